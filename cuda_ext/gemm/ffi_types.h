// Decoding that the handlers of all products share.
#pragma once

#include "common/ffi.h"
#include "gemm/gemm.h"

namespace te::gemm {

inline std::optional<Type> TypeOf(const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::F32:
      return Type::kFloat32;
    case ffi::BF16:
      return Type::kBFloat16;
    case ffi::F16:
      return Type::kFloat16;
    case ffi::F8E4M3FN:
      return Type::kE4M3;
    case ffi::F8E5M2:
      return Type::kE5M2;
    default:
      return std::nullopt;
  }
}

inline std::optional<Scaling> ScalingOf(std::string_view name) {
  if (name == "none") return Scaling::kNone;
  if (name == "tensor") return Scaling::kTensor;
  if (name == "row") return Scaling::kRow;
  if (name == "block") return Scaling::kBlock;
  return std::nullopt;
}

inline std::optional<Algorithm> AlgorithmOf(std::string_view name) {
  if (name == "auto") return Algorithm::kAuto;
  if (name == "cublaslt") return Algorithm::kCublasLt;
  if (name == "te_jax") return Algorithm::kTeJax;
  return std::nullopt;
}

// An operand as errors name it.
struct NamedBuffer {
  std::string_view name;
  const ffi::AnyBuffer& buffer;
};

// Sets types, scaling and algorithm of a product of a and b, which gives d, as far as they fit together.
inline void DecodeKind(Rules& rules, NamedBuffer a, NamedBuffer b, NamedBuffer d, std::string_view scaling_name,
                       std::string_view algorithm_name, Problem& problem) {
  const std::optional<Type> a_type = TypeOf(a.buffer), b_type = TypeOf(b.buffer), d_type = TypeOf(d.buffer);
  rules.That(a_type.has_value(), a.name, a.buffer, "be of a float type of 8, 16 or 32 bits");
  rules.That(b_type.has_value(), b.name, b.buffer, "be of a float type of 8, 16 or 32 bits");
  rules.That(d_type && !IsFp8(*d_type), d.name, d.buffer, "be float32, bfloat16 or float16");
  const std::optional<Scaling> scaling = ScalingOf(scaling_name);
  const std::optional<Algorithm> algorithm = AlgorithmOf(algorithm_name);
  rules.That(scaling.has_value(), a.name, a.buffer, "come with scaling none, tensor, row or block");
  rules.That(algorithm.has_value(), a.name, a.buffer, "come with algorithm auto, cublaslt or te_jax");
  if (rules.broken()) return;
  const bool plain = scaling == Scaling::kNone;
  rules.That(IsFp8(*a_type) != plain, a.name, a.buffer, plain ? "be plain without scaling" : "be FP8 with scaling");
  rules.That(IsFp8(*b_type) != plain, b.name, b.buffer, plain ? "be plain without scaling" : "be FP8 with scaling");
  rules.That(!plain || a_type == b_type, b.name, b.buffer, "have the type of the other operand");
  rules.That(a_type != Type::kE5M2 || b_type != Type::kE5M2, b.name, b.buffer, "be E4M3 where the other one is E5M2");
  rules.That(!plain || algorithm != Algorithm::kTeJax, a.name, a.buffer, "be FP8 with algorithm te_jax");
  rules.That(scaling != Scaling::kBlock || algorithm == Algorithm::kTeJax, a.name, a.buffer,
             "come with algorithm te_jax with block scaling");
  rules.That(plain || d_type != Type::kFloat16, d.name, d.buffer, "be float32 or bfloat16 with scaling");
  problem.a.type = *a_type;
  problem.b.type = *b_type;
  problem.d_type = *d_type;
  problem.scaling = *scaling;
  problem.algorithm = *algorithm;
}

// Null for an array that is not there.
template <typename T>
T* Present(const ffi::AnyBuffer& buffer) {
  return CountOf(buffer) == 0 ? nullptr : static_cast<T*>(buffer.untyped_data());
}

inline int64_t WorkspaceBytes(Rules& rules, const ffi::AnyBuffer& workspace) {
  if (CountOf(workspace) != 0) rules.Type(ffi::U8, "workspace", workspace);
  return CountOf(workspace);
}

}  // namespace te::gemm
