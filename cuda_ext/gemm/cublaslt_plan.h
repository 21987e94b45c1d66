// A product as cuBLASLt knows it: descriptors that are made once, and an algorithm. Or the package's kernel in its
// place, where timing finds it faster.
//
// cuBLASLt is column-major, so it computes the transpose Dᵀ[n, m] = B[n, k] Aᵀ[k, m]: its first matrix is our b, its
// second our a. FP8 products exist only with both operands contiguous along k, which is their only layout here.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "common/status.h"
#include "gemm/gemm.h"

namespace te {

inline Status Check(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return Status::Ok();
  return Status::Failed(std::string(what) + ": " + cublasLtGetStatusString(status));
}

}  // namespace te

namespace te::gemm::cublaslt {

// The pointers of one call.
struct Arrays {
  const void* a;
  const void* b;
  const void* c;  // what is added, perhaps d
  const void* bias;
  void* preactivation;
  void* d;
  const float* a_scale_inv;  // one, or one for each row; aligned to 16 bytes, as all scalars: cuBLASLt 13.1 needs it
  const float* b_scale_inv;
  void* workspace;  // aligned to 256 bytes
};

// All that the choice of an algorithm depends on.
struct Key {
  int64_t m, n, k;
  int64_t batch, a_stride, b_stride, bias_stride, d_stride;
  int64_t workspace_bytes;
  Type a_type, b_type, d_type;
  Algorithm algorithm;  // kTeJax: the package's kernel is the plan's one candidate
  bool a_summed_first, b_summed_first;
  bool row_scales, bias, gelu, preactivation, accumulate, fast_accumulation;
  bool spread;  // one scale for each operand, which Launch writes for every row first
  uint8_t a_alignment, b_alignment, c_alignment, d_alignment, bias_alignment, preactivation_alignment;

  friend bool operator==(const Key&, const Key&) = default;
};

struct HashOfKey {
  size_t operator()(const Key& key) const;
};

Key KeyOf(const Problem& problem, const Arrays& arrays, int64_t workspace_bytes);

// The same product by the algorithms for scales of rows, if there are any for it. They are others than those for one
// scale, and on H200s that run at their power limit the faster ones, by more than writing the scales out costs.
std::optional<Key> SpreadKeyOf(const Key& key);

// The same product by the package's kernel, which knows no gelu.
std::optional<Key> TeJaxKeyOf(const Key& key);

class Plan {
 public:
  // With the algorithms that cuBLASLt suggests, the fastest by its own estimate first. Only those whose results do not
  // depend on the order in which thread blocks run, and that round no partial sums: no split of k, or one whose parts
  // are kept in float32 and summed in a second step. Where there are none, refusal() says so; Make fails where the next
  // search may find some.
  static Status Make(cublasLtHandle_t handle, const Key& key, const Arrays& arrays, std::unique_ptr<Plan>& plan);

  Status Launch(cublasLtHandle_t handle, const Arrays& arrays, cudaStream_t stream) {
    return Launch(handle, arrays, chosen_, stream);
  }
  // Two threads may launch the same plan.
  Status Launch(cublasLtHandle_t handle, const Arrays& arrays, size_t algorithm, cudaStream_t stream);

  const Key& key() const { return key_; }
  Status refusal() const { return refusal_.empty() ? Status::Ok() : Status::Failed(refusal_); }
  size_t algorithms() const { return key_.algorithm == Algorithm::kTeJax ? 1 : algorithms_.size(); }
  void Choose(size_t algorithm) { chosen_ = algorithm; }

  // Whether algorithms have been compared, or need not be.
  bool settled = false;

 private:
  struct Destroy {
    void operator()(cublasLtMatmulDescOpaque_t* description) const { cublasLtMatmulDescDestroy(description); }
    void operator()(cublasLtMatrixLayoutOpaque_t* layout) const { cublasLtMatrixLayoutDestroy(layout); }
    void operator()(cublasLtMatmulPreferenceOpaque_t* preference) const { cublasLtMatmulPreferenceDestroy(preference); }
  };
  struct Suggestion {  // nvcc 13.0 cannot destroy the unnamed struct itself in a vector
    cublasLtMatmulAlgo_t algorithm;
  };
  using Description = std::unique_ptr<cublasLtMatmulDescOpaque_t, Destroy>;
  using Layout = std::unique_ptr<cublasLtMatrixLayoutOpaque_t, Destroy>;
  using Preference = std::unique_ptr<cublasLtMatmulPreferenceOpaque_t, Destroy>;

  explicit Plan(const Key& key) : key_(key) {}
  Status Describe();
  Status SetPointers(const Arrays& arrays);
  Status FindAlgorithms(cublasLtHandle_t handle);
  Status LaunchTeJax(const Arrays& arrays, cudaStream_t stream) const;

  Key key_;
  Description description_;
  Layout first_, second_, added_, result_;
  std::vector<Suggestion> algorithms_;
  std::string refusal_;  // where there are none
  size_t chosen_ = 0;
  std::mutex mutex_;  // of the description's pointers
};

}  // namespace te::gemm::cublaslt
