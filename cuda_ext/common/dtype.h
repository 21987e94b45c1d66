// The floating-point element types that entry points take behind a `const void*`.
#pragma once

namespace te {

enum class DType { kFloat32, kBFloat16, kFloat16 };

}  // namespace te
