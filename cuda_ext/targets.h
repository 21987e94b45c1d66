// Every XLA FFI target of the extensions, one line each. CMake finds the sources by folder.
#pragma once

#define TE_JAX_TARGETS(X)                     \
  X(te_gemm)                                  \
  X(te_gemm_sum)                              \
  X(te_symmetric_gemm)                        \
  X(te_all_gather_gemm)                       \
  X(te_gemm_reduce_scatter)                   \
  X(te_softmax_cross_entropy_statistics)      \
  X(te_softmax_cross_entropy_gradient)        \
  X(te_softmax_cross_entropy_both)            \
  X(te_softmax_cross_entropy_gradient_blocks) \
  X(te_amax_tensor)                           \
  X(te_amax_rows)                             \
  X(te_quantize_tensor)                       \
  X(te_quantize_rows)                         \
  X(te_quantize_blocks)                       \
  X(te_quantize_blocks_of_rows)               \
  X(te_activation_amax)                       \
  X(te_activation_tensor)                     \
  X(te_activation_blocks)                     \
  X(te_activation_gradient_amax)              \
  X(te_activation_gradient_tensor)            \
  X(te_activation_gradient_blocks)            \
  X(te_norm)                                  \
  X(te_norm_tensor)                           \
  X(te_norm_blocks)                           \
  X(te_norm_gradient)                         \
  X(te_grouped_gemm)                          \
  X(te_offload_begin_store)                   \
  X(te_offload_store)                         \
  X(te_offload_begin_fetch)                   \
  X(te_offload_fetch)                         \
  X(te_offload_end_store)

// Those among them that prepare on a GPU, before each execution of a program, by a second handler: <target>_initialize.
#define TE_JAX_INITIALIZED_TARGETS(X) X(te_gemm) X(te_all_gather_gemm) X(te_gemm_reduce_scatter)
