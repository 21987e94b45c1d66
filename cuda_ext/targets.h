// Every XLA FFI target of the extension, one line each. CMake finds the sources by folder.
#pragma once

#define TE_JAX_TARGETS(X) X(te_softmax_cross_entropy)
