// Every XLA FFI target of the extensions, one line each. CMake finds the sources by folder.
#pragma once

#define TE_JAX_TARGETS(X)                \
  X(te_softmax_cross_entropy_statistics) \
  X(te_softmax_cross_entropy_gradient)
