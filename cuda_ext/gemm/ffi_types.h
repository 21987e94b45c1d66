// XLA's names of the types that products know.
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

}  // namespace te::gemm
