// The floating-point element types that entry points take behind a `const void*`. Products also know others: gemm.h.
#pragma once

namespace te {

enum class DType { kFloat32, kBFloat16 };

}  // namespace te
