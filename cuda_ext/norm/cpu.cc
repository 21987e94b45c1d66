// XLA's pool of CPU threads works on rows, in chunks that are widened to float one after another. What leaves in FP8 is
// computed as an array of the inputs' dtype and quantized as any other array.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "common/cpu_float.h"
#include "norm/norm.h"

namespace te::norm {
namespace {

constexpr int64_t kChunk = 512;  // values that stay in the L1 cache from the first loop over them to the last
constexpr int64_t kValuesPerTask = 16384;

// -------------------------------------------------------------------------------------------------------------- loops

TE_JAX_CLONES float SumOf(const float* values, int64_t count) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += values[i];
  return sum;
}

TE_JAX_CLONES float SumOfSquares(const float* values, float mean, int64_t count) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += (values[i] - mean) * (values[i] - mean);
  return sum;
}

// y in place of the values; `beta` may be null.
TE_JAX_CLONES void Apply(float mean, float rstd, const float* gamma, const float* beta, int64_t count, float* values) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) values[i] = (values[i] - mean) * rstd * gamma[i];
  if (beta == nullptr) return;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) values[i] += beta[i];
}

// The normalized values in place of the values, and dy · gamma in `scaled`.
TE_JAX_CLONES void Unscale(float mean, float rstd, const float* gamma, const float* dy, int64_t count, float* values,
                           float* scaled) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    values[i] = (values[i] - mean) * rstd;
    scaled[i] = dy[i] * gamma[i];
  }
}

TE_JAX_CLONES float Dot(const float* a, const float* b, int64_t count) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

TE_JAX_CLONES void AddProducts(const float* a, const float* b, int64_t count, float* sums) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) sums[i] += a[i] * b[i];
}

TE_JAX_CLONES void AddTo(const float* values, int64_t count, float* sums) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) sums[i] += values[i];
}

// The gradient of x in place of `scaled`, from the means over the row of `scaled` and of its product with `normalized`.
TE_JAX_CLONES void Differentiate(float rstd, float mean, float product_mean, const float* normalized, int64_t count,
                                 float* scaled) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) scaled[i] = rstd * (scaled[i] - mean - normalized[i] * product_mean);
}

// --------------------------------------------------------------------------------------------------------------- rows

// A row of the inputs, in chunks: body(first column, columns).
template <typename Body>
void OverChunks(const Inputs& inputs, const Body& body) {
  for (int64_t first = 0; first < inputs.cols; first += kChunk) body(first, std::min(kChunk, inputs.cols - first));
}

class Rows {
 public:
  explicit Rows(const Inputs& inputs) : inputs_(inputs), conversion_(ConversionOf(inputs.dtype)) {}

  int64_t count() const { return inputs_.count * inputs_.rows; }

  // A part of a row of s.
  void Load(int64_t row, int64_t first, int64_t count, float* to) const {
    Load(inputs_.x, row, first, count, to);
    if (inputs_.residual) conversion_.add(At(inputs_.residual, row, first), count, to);
  }

  // A part of a row of an array like x.
  void Load(const void* array, int64_t row, int64_t first, int64_t count, float* to) const {
    conversion_.load(At(array, row, first), count, to);
  }

  void Store(const float* from, int64_t row, int64_t first, int64_t count, void* array) const {
    conversion_.store(from, count, static_cast<std::byte*>(array) + Offset(row, first));
  }

  const float* gamma(int64_t row) const { return inputs_.gamma + row / inputs_.rows * inputs_.cols; }
  const float* beta(int64_t row) const {
    return inputs_.beta ? inputs_.beta + row / inputs_.rows * inputs_.cols : nullptr;
  }

  // Calls body(row) for all rows.
  template <typename Body>
  void ForEach(const Executor& executor, const Body& body) const {
    executor.ParallelFor(count(), std::max(int64_t{1}, kValuesPerTask / inputs_.cols), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) body(row);
    });
  }

  // mean and rstd of a row, and s where it is wanted. Sums are those of floats in a chunk, and of doubles beyond.
  void FindStatistics(int64_t row, const Statistics& statistics, void* sum) const {
    alignas(64) float values[kChunk];
    float mean = 0.0f;
    if (inputs_.centered || sum) {
      double total = 0.0;
      OverChunks(inputs_, [&](int64_t first, int64_t count) {
        Load(row, first, count, values);
        if (sum) Store(values, row, first, count, sum);
        total += SumOf(values, count);
      });
      if (inputs_.centered) mean = static_cast<float>(total / static_cast<double>(inputs_.cols));
    }
    double squares = 0.0;
    OverChunks(inputs_, [&](int64_t first, int64_t count) {
      Load(row, first, count, values);
      squares += SumOfSquares(values, mean, count);
    });
    const auto variance = static_cast<float>(squares / static_cast<double>(inputs_.cols)) + inputs_.epsilon;
    if (statistics.mean) statistics.mean[row] = mean;
    // A row whose squares overflow is NaN: 1 / √∞ would hide it as zeros, with gradients of zero.
    statistics.rstd[row] = std::isfinite(variance) ? 1.0f / std::sqrt(variance) : NAN;
  }

  // A row of y in the dtype of x.
  void Normalize(int64_t row, const Statistics& statistics, void* y) const {
    alignas(64) float values[kChunk];
    const float mean = statistics.mean ? statistics.mean[row] : 0.0f;
    const float *gamma = this->gamma(row), *beta = this->beta(row);
    OverChunks(inputs_, [&](int64_t first, int64_t count) {
      Load(row, first, count, values);
      Apply(mean, statistics.rstd[row], gamma + first, beta ? beta + first : nullptr, count, values);
      Store(values, row, first, count, y);
    });
  }

 private:
  int64_t Offset(int64_t row, int64_t first) const { return (row * inputs_.cols + first) * conversion_.bytes; }

  const void* At(const void* array, int64_t row, int64_t first) const {
    return static_cast<const std::byte*>(array) + Offset(row, first);
  }

  const Inputs& inputs_;
  const Conversion conversion_;
};

// An array like x.
struct Array {
  std::unique_ptr<std::byte[]> values;

  bool Allocate(const Inputs& inputs) {
    const int64_t bytes = inputs.count * inputs.rows * inputs.cols * ConversionOf(inputs.dtype).bytes;
    values.reset(new (std::nothrow) std::byte[bytes]);
    return values != nullptr;
  }

  quantize::Matrices Of(const Inputs& inputs) const {
    return {inputs.dtype, values.get(), inputs.count, inputs.rows, inputs.cols};
  }
};

Status OutOfMemory() { return Status::Failed("not enough memory for the result in the dtype of x"); }

// Calls quantize(y) with the result of statistics that are known.
template <typename Quantize>
Status WithResult(const Executor& executor, const Inputs& inputs, const Statistics& statistics,
                  const Quantize& quantize) {
  Array y;
  if (!y.Allocate(inputs)) return OutOfMemory();
  const Rows rows(inputs);
  rows.ForEach(executor, [&](int64_t row) { rows.Normalize(row, statistics, y.values.get()); });
  return quantize(y.Of(inputs));
}

}  // namespace

Status Normalize(const Executor& executor, const Inputs& inputs, const Outputs& outputs) {
  const Rows rows(inputs);
  rows.ForEach(executor, [&](int64_t row) { rows.FindStatistics(row, outputs.statistics, outputs.sum); });
  const quantize::RowOutputs& to = outputs.rows;
  if (!to.amax && !to.data) return Status::Ok();
  return WithResult(executor, inputs, outputs.statistics, [&](const quantize::Matrices& y) {
    if (to.amax) TE_JAX_TRY(quantize::AmaxOfTensor(executor, y, to.amax));
    if (!to.data) return Status::Ok();
    const quantize::Copies copies{to.format, to.power_of_two_scales, to.data, nullptr, nullptr};
    if (to.reference_amax) {
      return quantize::QuantizeTensor(executor, y, copies, {to.reference_amax, to.scale_inv, nullptr, nullptr});
    }
    return quantize::QuantizeBlocks(executor, y, copies, {false, false, to.scale_inv, nullptr});
  });
}

Status NormalizedInTensor(const Executor& executor, const Inputs& inputs, const Statistics& statistics,
                          const quantize::Copies& copies, const quantize::TensorScaling& scaling) {
  return WithResult(executor, inputs, statistics, [&](const quantize::Matrices& y) {
    return quantize::QuantizeTensor(executor, y, copies, scaling);
  });
}

Status NormalizedInBlocks(const Executor& executor, const Inputs& inputs, const Statistics& statistics,
                          const quantize::Copies& copies, const quantize::BlockScaling& scaling) {
  return WithResult(executor, inputs, statistics, [&](const quantize::Matrices& y) {
    return quantize::QuantizeBlocks(executor, y, copies, scaling);
  });
}

// Every partial sum takes as many rows that follow each other; the last ones may have none.
Status Backward(const Executor& executor, const Inputs& inputs, const Statistics& statistics, const void* dy,
                const void* dsum, const Gradients& gradients) {
  const Rows rows(inputs);
  const int64_t rows_per_partial = inputs.rows / gradients.partials + (inputs.rows % gradients.partials != 0);
  const auto cols = static_cast<double>(inputs.cols);

  auto differentiate = [&](int64_t row, float* dgamma, float* dbeta) {
    alignas(64) float values[kChunk], upstream[kChunk], scaled[kChunk];
    const float mean = statistics.mean ? statistics.mean[row] : 0.0f, rstd = statistics.rstd[row];
    auto load = [&](int64_t first, int64_t count) {
      rows.Load(row, first, count, values);
      rows.Load(dy, row, first, count, upstream);
      Unscale(mean, rstd, rows.gamma(row) + first, upstream, count, values, scaled);
    };
    double sum = 0.0, products = 0.0;
    OverChunks(inputs, [&](int64_t first, int64_t count) {
      load(first, count);
      if (inputs.centered) sum += SumOf(scaled, count);
      products += Dot(scaled, values, count);
      AddProducts(upstream, values, count, dgamma + first);
      if (dbeta) AddTo(upstream, count, dbeta + first);
    });
    OverChunks(inputs, [&](int64_t first, int64_t count) {
      load(first, count);
      Differentiate(rstd, static_cast<float>(sum / cols), static_cast<float>(products / cols), values, count, scaled);
      if (dsum) {
        rows.Load(dsum, row, first, count, values);
        AddTo(values, count, scaled);
      }
      rows.Store(scaled, row, first, count, gradients.dx);
    });
  };

  executor.ParallelFor(inputs.count * gradients.partials, 1, [&](int64_t begin, int64_t end) {
    for (int64_t partial = begin; partial < end; ++partial) {
      float* dgamma = gradients.dgamma + partial * inputs.cols;
      float* dbeta = gradients.dbeta ? gradients.dbeta + partial * inputs.cols : nullptr;
      std::fill_n(dgamma, inputs.cols, 0.0f);
      if (dbeta) std::fill_n(dbeta, inputs.cols, 0.0f);
      const int64_t example = partial / gradients.partials, index = partial % gradients.partials;
      const int64_t first = std::min(index, inputs.rows) * rows_per_partial;
      const int64_t last = std::min(inputs.rows, first + rows_per_partial);
      for (int64_t row = first; row < last; ++row) differentiate(example * inputs.rows + row, dgamma, dbeta);
    }
  });
  return Status::Ok();
}

}  // namespace te::norm
