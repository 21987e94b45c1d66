// A normalized value, with the same bits wherever it is computed.
#pragma once

namespace te::norm {

__device__ __forceinline__ float Normalized(float s, float mean, float rstd, float gamma, const float* beta) {
  const float unit = __fmul_rn(s - mean, rstd);
  return beta ? __fmaf_rn(unit, gamma, *beta) : __fmul_rn(unit, gamma);
}

}  // namespace te::norm
