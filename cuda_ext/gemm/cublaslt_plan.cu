#include <algorithm>
#include <array>
#include <initializer_list>
#include <utility>

#include "common/cuda_status.h"
#include "gemm/cublaslt_plan.h"
#include "gemm/hopper.h"

namespace te::gemm::cublaslt {
namespace {

constexpr int kMostAlgorithms = 16;
// XLA's buffers have it. Stricter alignment, which some happen to have, is not told apart: it would only make the same
// product be searched for twice.
constexpr uintptr_t kUsualAlignment = 128;

constexpr int64_t kSpreadAlignment = 64;  // floats: cuBLASLt's workspace, which follows, is aligned to 256 bytes
constexpr int64_t AlignedCount(int64_t count) {
  return (count + kSpreadAlignment - 1) / kSpreadAlignment * kSpreadAlignment;
}

// The alignment of an array, or of all that are so many bytes apart.
uint8_t AlignmentOf(const void* pointer, int64_t stride = 0) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer) | static_cast<uintptr_t>(stride) | kUsualAlignment;
  return static_cast<uint8_t>(address & (~address + 1));
}

cudaDataType_t DataTypeOf(Type type) {
  switch (type) {
    case Type::kFloat32:
      return CUDA_R_32F;
    case Type::kBFloat16:
      return CUDA_R_16BF;
    case Type::kFloat16:
      return CUDA_R_16F;
    case Type::kE4M3:
      return CUDA_R_8F_E4M3;
    case Type::kE5M2:
      return CUDA_R_8F_E5M2;
  }
  return CUDA_R_32F;
}

cublasLtEpilogue_t EpilogueOf(const Key& key) {
  if (key.preactivation) return key.bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
  if (key.gelu) return key.bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
  return key.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

// The status of a row of calls: a failure sticks, and the calls after it are left out.
class StickyStatus {
 public:
  template <typename Call>
  void Do(const char* what, const Call& call) {
    if (status_ != CUBLAS_STATUS_SUCCESS) return;
    status_ = call();
    what_ = what;
  }
  template <typename T>
  void Set(cublasLtMatmulDesc_t description, cublasLtMatmulDescAttributes_t attribute, T value, const char* what) {
    Do(what, [&] { return cublasLtMatmulDescSetAttribute(description, attribute, &value, sizeof(value)); });
  }
  template <typename T>
  void Set(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute, T value, const char* what) {
    Do(what, [&] { return cublasLtMatrixLayoutSetAttribute(layout, attribute, &value, sizeof(value)); });
  }
  template <typename T>
  void Set(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute, T value,
           const char* what) {
    Do(what, [&] { return cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)); });
  }
  Status status() const { return Check(status_, what_); }

 private:
  cublasStatus_t status_ = CUBLAS_STATUS_SUCCESS;
  const char* what_ = "";
};

// Where scales are spread they take the beginning of the workspace, those of a first.
int64_t SpreadBytes(const Key& key) {
  if (!key.spread) return 0;
  return (AlignedCount(key.m) + AlignedCount(key.n)) * static_cast<int64_t>(sizeof(float));
}

__global__ void SpreadScales(const float* a, const float* b, int64_t a_count, int64_t count, float* out) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i < count) out[i] = i < a_count ? *a : *b;
}

std::string Name(Type type) {
  constexpr std::array<const char*, 5> kNames = {"float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"};
  return kNames[static_cast<int>(type)];
}

}  // namespace

size_t HashOfKey::operator()(const Key& key) const {
  uint64_t flags = 0;
  for (const uint64_t field :
       {static_cast<uint64_t>(key.a_type), static_cast<uint64_t>(key.b_type), static_cast<uint64_t>(key.d_type),
        static_cast<uint64_t>(key.algorithm), uint64_t{key.a_summed_first}, uint64_t{key.b_summed_first},
        uint64_t{key.row_scales}, uint64_t{key.bias}, uint64_t{key.gelu}, uint64_t{key.preactivation},
        uint64_t{key.accumulate}, uint64_t{key.fast_accumulation}, uint64_t{key.spread}}) {
    flags = flags * 8 + field;
  }
  size_t hash = 0;
  for (const uint64_t word : {static_cast<uint64_t>(key.m), static_cast<uint64_t>(key.n), static_cast<uint64_t>(key.k),
                              static_cast<uint64_t>(key.batch), static_cast<uint64_t>(key.a_stride),
                              static_cast<uint64_t>(key.b_stride), static_cast<uint64_t>(key.bias_stride),
                              static_cast<uint64_t>(key.d_stride), flags, uint64_t{key.d_alignment}}) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 29;
  }
  return hash;
}

Key KeyOf(const Problem& p, const Arrays& arrays, int64_t workspace_bytes) {
  Key key{};
  key.m = p.m;
  key.n = p.n;
  key.k = p.k;
  key.batch = p.batch.count;
  if (key.batch > 1) {
    key.a_stride = p.batch.a_stride;
    key.b_stride = p.batch.b_stride;
    key.bias_stride = p.batch.bias_stride;
    key.d_stride = p.batch.d_stride;
  }
  key.workspace_bytes = workspace_bytes;
  key.a_type = p.a.type;
  key.b_type = p.b.type;
  key.d_type = p.d_type;
  key.algorithm = p.algorithm;
  key.a_summed_first = p.a.summed_first;
  key.b_summed_first = p.b.summed_first;
  key.row_scales = p.scaling == Scaling::kRow;
  key.bias = p.bias != nullptr;
  key.gelu = p.gelu;
  key.preactivation = p.preactivation != nullptr;
  key.accumulate = p.accumulator != nullptr;
  key.fast_accumulation = p.fast_accumulation && IsFp8(p.a.type);
  const int64_t d_stride = key.d_stride * SizeOf(p.d_type);
  key.a_alignment = AlignmentOf(arrays.a, key.a_stride * SizeOf(p.a.type));
  key.b_alignment = AlignmentOf(arrays.b, key.b_stride * SizeOf(p.b.type));
  key.c_alignment = AlignmentOf(key.accumulate ? arrays.c : arrays.d, d_stride);
  key.d_alignment = AlignmentOf(arrays.d, d_stride);
  key.bias_alignment = AlignmentOf(arrays.bias, key.bias_stride * SizeOf(p.d_type));
  key.preactivation_alignment = AlignmentOf(arrays.preactivation);
  return key;
}

std::optional<Key> SpreadKeyOf(const Key& key) {
  // With a scale for each row cuBLASLt 13.1 has no gelu, adds no bias to float32, and knows no stride of a batch.
  const bool supported = IsFp8(key.a_type) && !key.row_scales && key.batch == 1 && !key.gelu &&
                         !(key.bias && key.d_type == Type::kFloat32);
  if (!supported) return std::nullopt;
  Key spread = key;
  spread.row_scales = spread.spread = true;
  if (SpreadBytes(spread) > key.workspace_bytes) return std::nullopt;
  return spread;
}

std::optional<Key> TeJaxKeyOf(const Key& key) {
  if (!IsFp8(key.a_type) || key.gelu || key.k % 16 != 0 || key.n % 16 != 0) return std::nullopt;
  Key te_jax = key;
  te_jax.algorithm = Algorithm::kTeJax;
  return te_jax;
}

Status Plan::Make(cublasLtHandle_t handle, const Key& key, const Arrays& arrays, std::unique_ptr<Plan>& plan) {
  std::unique_ptr<Plan> made(new Plan(key));
  if (key.algorithm == Algorithm::kTeJax) {
    plan = std::move(made);
    return Status::Ok();
  }
  if (Status status = made->Describe(); !status.ok()) return status;
  // The alignments of bias and preactivation are read off their pointers.
  if (Status status = made->SetPointers(arrays); !status.ok()) return status;
  if (Status status = made->FindAlgorithms(handle); !status.ok()) return status;
  plan = std::move(made);
  return Status::Ok();
}

Status Plan::Describe() {
  StickyStatus sticky;
  auto make_layout = [&](Type type, bool transposed, int64_t rows, int64_t columns, int64_t stride, Layout& made,
                         const char* what) {
    cublasLtMatrixLayout_t layout = nullptr;
    const auto [stored_rows, stored_columns] = transposed ? std::pair(columns, rows) : std::pair(rows, columns);
    sticky.Do(what, [&] {
      return cublasLtMatrixLayoutCreate(&layout, DataTypeOf(type), stored_rows, stored_columns, stored_rows);
    });
    made.reset(layout);
    const auto batch = static_cast<int32_t>(key_.batch);
    sticky.Set(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, batch, what);
    sticky.Set(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, stride, what);
  };
  const bool b_transposed = !key_.b_summed_first, a_transposed = key_.a_summed_first;
  make_layout(key_.b_type, b_transposed, key_.n, key_.k, key_.b_stride, first_, "layout of b");
  make_layout(key_.a_type, a_transposed, key_.k, key_.m, key_.a_stride, second_, "layout of a");
  make_layout(key_.d_type, false, key_.n, key_.m, key_.d_stride, added_, "layout of the accumulator");
  make_layout(key_.d_type, false, key_.n, key_.m, key_.d_stride, result_, "layout of d");

  cublasLtMatmulDesc_t made = nullptr;
  sticky.Do("cublasLtMatmulDescCreate",
            [&] { return cublasLtMatmulDescCreate(&made, CUBLAS_COMPUTE_32F, CUDA_R_32F); });
  description_.reset(made);
  const int32_t b_operation = b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  const int32_t a_operation = a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  const int32_t d_type = DataTypeOf(key_.d_type);
  sticky.Set(made, CUBLASLT_MATMUL_DESC_TRANSA, b_operation, "transposition of b");
  sticky.Set(made, CUBLASLT_MATMUL_DESC_TRANSB, a_operation, "transposition of a");
  sticky.Set(made, CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<uint32_t>(EpilogueOf(key_)), "epilogue");
  if (IsFp8(key_.a_type)) {
    sticky.Set(made, CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(key_.fast_accumulation), "fast sums");
  }
  if (key_.row_scales) {
    constexpr int32_t kOneForEachRow = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    sticky.Set(made, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, kOneForEachRow, "scales of b");
    sticky.Set(made, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, kOneForEachRow, "scales of a");
  }
  if (key_.bias) {
    sticky.Set(made, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, d_type, "type of bias");
    sticky.Set(made, CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, key_.bias_stride, "stride of bias");
  }
  if (key_.preactivation) {
    sticky.Set(made, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, d_type, "type of the preactivation");
    sticky.Set(made, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, key_.n, "stride of the preactivation");
  }
  return sticky.status();
}

Status Plan::SetPointers(const Arrays& arrays) {
  StickyStatus sticky;
  auto set = [&](bool wanted, cublasLtMatmulDescAttributes_t attribute, const void* pointer, const char* what) {
    if (wanted) sticky.Set(description_.get(), attribute, pointer, what);
  };
  const bool fp8 = IsFp8(key_.a_type);
  set(key_.bias, CUBLASLT_MATMUL_DESC_BIAS_POINTER, arrays.bias, "bias");
  set(key_.preactivation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, arrays.preactivation, "preactivation");
  set(fp8, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, arrays.b_scale_inv, "scale of b");
  set(fp8, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, arrays.a_scale_inv, "scale of a");
  // C never has a scale: with β ≠ 0 it would hang cuBLASLt 13.1.
  return sticky.status();
}

Status Plan::FindAlgorithms(cublasLtHandle_t handle) {
  StickyStatus sticky;
  cublasLtMatmulPreference_t made = nullptr;
  sticky.Do("cublasLtMatmulPreferenceCreate", [&] { return cublasLtMatmulPreferenceCreate(&made); });
  const Preference preference(made);
  const uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  const auto workspace_bytes = static_cast<uint64_t>(key_.workspace_bytes - SpreadBytes(key_));
  sticky.Set(made, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes, "preferred workspace");
  sticky.Set(made, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions, "preferred reductions");
  sticky.Set(made, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, uint32_t{key_.b_alignment}, "alignment of b");
  sticky.Set(made, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, uint32_t{key_.a_alignment}, "alignment of a");
  sticky.Set(made, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, uint32_t{key_.c_alignment}, "alignment of c");
  sticky.Set(made, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, uint32_t{key_.d_alignment}, "alignment of d");
  if (Status status = sticky.status(); !status.ok()) return status;
  std::array<cublasLtMatmulHeuristicResult_t, kMostAlgorithms> found{};
  int count = 0;
  const cublasStatus_t searched =
      cublasLtMatmulAlgoGetHeuristic(handle, description_.get(), first_.get(), second_.get(), added_.get(),
                                     result_.get(), preference.get(), kMostAlgorithms, found.data(), &count);
  for (int i = 0; i < count; ++i) {
    if (found[i].state == CUBLAS_STATUS_SUCCESS) algorithms_.push_back({found[i].algo});
  }
  if (!algorithms_.empty()) return Status::Ok();
  refusal_ = "cuBLASLt has no algorithm for [" + std::to_string(key_.m) + ", " + std::to_string(key_.k) + "] " +
             Name(key_.a_type) + " times [" + std::to_string(key_.k) + ", " + std::to_string(key_.n) + "] " +
             Name(key_.b_type) + " giving " + Name(key_.d_type) + ", epilogue " + std::to_string(EpilogueOf(key_)) +
             " (" + cublasLtGetStatusString(searched) + ")";
  const bool lasts = searched == CUBLAS_STATUS_SUCCESS || searched == CUBLAS_STATUS_NOT_SUPPORTED ||
                     searched == CUBLAS_STATUS_INVALID_VALUE;
  return lasts ? Status::Ok() : refusal();
}

Status Plan::LaunchTeJax(const Arrays& arrays, cudaStream_t stream) const {
  Problem problem{};
  problem.m = key_.m;
  problem.n = key_.n;
  problem.k = key_.k;
  problem.a = {arrays.a, arrays.a_scale_inv, key_.a_type, false};
  problem.b = {arrays.b, arrays.b_scale_inv, key_.b_type, false};
  problem.scaling = key_.row_scales ? Scaling::kRow : Scaling::kTensor;
  problem.bias = arrays.bias;
  problem.accumulator = key_.accumulate ? arrays.c : nullptr;
  problem.d = arrays.d;
  problem.d_type = key_.d_type;
  problem.fast_accumulation = key_.fast_accumulation;
  problem.batch = {key_.batch, key_.a_stride, key_.b_stride, 0, 0, key_.bias_stride, key_.d_stride};
  return hopper::Run(stream, problem);
}

Status Plan::Launch(cublasLtHandle_t handle, const Arrays& given, size_t algorithm, cudaStream_t stream) {
  if (key_.algorithm == Algorithm::kTeJax) return LaunchTeJax(given, stream);
  Arrays arrays = given;
  if (key_.spread) {
    auto* scales = static_cast<float*>(arrays.workspace);
    const int64_t a_count = AlignedCount(key_.m), count = a_count + AlignedCount(key_.n);
    constexpr int kThreads = 256;
    const auto blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
    SpreadScales<<<blocks, kThreads, 0, stream>>>(arrays.a_scale_inv, arrays.b_scale_inv, a_count, count, scales);
    if (Status status = Check(cudaGetLastError(), "kernel launch"); !status.ok()) return status;
    arrays.a_scale_inv = scales;
    arrays.b_scale_inv = scales + a_count;
    arrays.workspace = scales + count;
  }
  const float alpha = 1.0f, beta = key_.accumulate ? 1.0f : 0.0f;
  const void* added = key_.accumulate ? arrays.c : arrays.d;
  const auto workspace_bytes = static_cast<size_t>(key_.workspace_bytes - SpreadBytes(key_));
  const std::lock_guard lock(mutex_);
  if (Status status = SetPointers(arrays); !status.ok()) return status;
  return Check(cublasLtMatmul(handle, description_.get(), &alpha, arrays.b, first_.get(), arrays.a, second_.get(),
                              &beta, added, added_.get(), arrays.d, result_.get(), &algorithms_[algorithm].algorithm,
                              arrays.workspace, workspace_bytes, stream),
               "cublasLtMatmul");
}

}  // namespace te::gemm::cublaslt
