// The whole product in float32 by gemm/cpu.cc, and then the lower triangle, twice.

#include <cstdint>
#include <vector>

#include "common/cpu_float.h"
#include "symmetric_gemm/symmetric_gemm.h"

namespace te::symmetric_gemm {
namespace {

template <typename T>
void Combine(const Executor& executor, const Problem& p, const std::vector<float>& product, int64_t member) {
  const int64_t m = p.m, begin = member * m * m;
  const auto* const c = static_cast<const T*>(p.c);
  auto* const d = static_cast<T*>(p.d) + begin;
  executor.ParallelFor(m, 64, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) {
      for (int64_t column = 0; column <= row; ++column) {
        float value = p.alpha * product[row * m + column];
        if (c != nullptr) value += p.beta * ToFloat(c[begin + row * m + column]);
        if (row == column) value += p.diagonal;
        FromFloat(value, &d[row * m + column]);
        d[column * m + row] = d[row * m + column];
      }
    }
  });
}

}  // namespace

Status Run(const Executor& executor, const Problem& p) {
  std::vector<float> product(p.m * p.m);
  for (int64_t i = 0; i < p.count; ++i) {
    const auto of_member = [&](const void* x) {
      const auto* const values = static_cast<const uint16_t*>(x) + i * p.m * p.k;
      return gemm::Operand{values, nullptr, p.type, p.summed_first};
    };
    gemm::Problem one{.m = p.m, .n = p.m, .k = p.k, .a = of_member(p.a), .b = of_member(p.b)};
    one.d_type = gemm::Type::kFloat32;
    one.d = product.data();
    TE_JAX_TRY(gemm::Run(executor, one));
    (p.type == gemm::Type::kFloat16 ? Combine<Float16> : Combine<BFloat16>)(executor, p, product, i);
  }
  return Status::Ok();
}

}  // namespace te::symmetric_gemm
