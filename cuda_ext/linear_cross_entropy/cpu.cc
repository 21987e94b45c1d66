// One task for a few rows of dx, and one for a few values of each column of dkernel.

#include "common/cpu_float.h"
#include "linear_cross_entropy/linear_cross_entropy.h"

namespace te::linear_cross_entropy {
namespace {

template <typename T>
void Subtract(const Executor& executor, const Labels& labels) {
  const T* const x = static_cast<const T*>(labels.x);
  const T* const kernel = static_cast<const T*>(labels.kernel);
  auto here = [&](int64_t place) {
    return 0 <= labels.columns[place] && labels.columns[place] < labels.vocab && labels.TokenAt(place) >= 0;
  };
  if (labels.dx) {
    executor.ParallelFor(labels.tokens, 16, [&](int64_t begin, int64_t end) {
      for (int64_t place = begin; place < end; ++place) {
        const int64_t token = labels.TokenAt(place), column = labels.columns[place];
        if (token < 0) continue;
        T* const dx = static_cast<T*>(labels.dx) + token * labels.width;
        for (int64_t i = 0; i < labels.width; ++i) {
          float value = labels.dx_without[token * labels.width + i];
          if (here(place)) value -= labels.factor[token] * ToFloat(kernel[labels.At(i, column)]);
          FromFloat(value, dx + i);
        }
      }
    });
  }
  if (labels.dkernel) {
    executor.ParallelFor(labels.width, 16, [&](int64_t begin, int64_t end) {
      for (int64_t place = 0; place < labels.tokens; ++place) {
        if (!here(place)) continue;
        const int64_t token = labels.order[place], column = labels.columns[place];
        for (int64_t i = begin; i < end; ++i) {
          labels.dkernel[labels.At(i, column)] -= labels.factor[token] * ToFloat(x[token * labels.width + i]);
        }
      }
    });
  }
  for (int64_t place = 0; labels.dbias && place < labels.tokens; ++place) {
    if (here(place)) labels.dbias[labels.columns[place]] -= labels.factor[labels.order[place]];
  }
}

}  // namespace

Status SubtractLabels(const Executor& executor, const Labels& labels) {
  auto* subtract = labels.dtype == DType::kFloat32    ? Subtract<Float32>
                   : labels.dtype == DType::kBFloat16 ? Subtract<BFloat16>
                                                      : Subtract<Float16>;
  subtract(executor, labels);
  return Status::Ok();
}

}  // namespace te::linear_cross_entropy
