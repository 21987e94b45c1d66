#include <functional>
#include <numeric>
#include <span>
#include <type_traits>

#include "gemm/ffi_types.h"

namespace te::gemm {
namespace {

using ffi::AnyBuffer;
using Result = ffi::Result<AnyBuffer>;

constexpr std::string_view kName = "te_gemm";

ffi::DataType DataTypeOf(Type type) {
  switch (type) {
    case Type::kFloat32:
      return ffi::F32;
    case Type::kBFloat16:
      return ffi::BF16;
    case Type::kFloat16:
      return ffi::F16;
    case Type::kE4M3:
      return ffi::F8E4M3FN;
    case Type::kE5M2:
      return ffi::F8E5M2;
  }
  return ffi::DataType::INVALID;
}

template <typename T>
T* Present(const AnyBuffer& buffer) {
  return buffer.element_count() == 0 ? nullptr : static_cast<T*>(buffer.untyped_data());
}

using Sizes = std::span<const int64_t>;

Sizes SizesOf(const AnyBuffer& buffer) { return {buffer.dimensions().begin(), buffer.dimensions().size()}; }

int64_t Product(Sizes sizes) { return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>()); }

// An operand [*batch, *outer, *summed], or [*batch, *summed, *outer].
struct Decoded {
  Type type;
  int64_t outer;
  int64_t summed;
  bool outer_in_blocks;  // blocks of 128 outer, and of 128 summed values do not cross the last dimension of a group
  bool summed_in_blocks;
};

std::optional<Decoded> DecodeOperand(Rules& rules, std::string_view name, const AnyBuffer& buffer, int64_t batch_ndim,
                                     int64_t outer_ndim, bool summed_first) {
  const std::optional<Type> type = TypeOf(buffer);
  rules.That(type.has_value(), name, buffer, "be of a float type of 8, 16 or 32 bits");
  const Sizes dims = SizesOf(buffer);
  const int64_t summed_ndim = static_cast<int64_t>(dims.size()) - batch_ndim - outer_ndim;
  rules.That(summed_ndim >= 0, name, buffer, "have all of its batch and outer dimensions");
  if (rules.broken()) return std::nullopt;
  const auto outer = dims.subspan(batch_ndim + (summed_first ? summed_ndim : 0), outer_ndim);
  const auto summed = dims.subspan(batch_ndim + (summed_first ? 0 : outer_ndim), summed_ndim);
  auto in_blocks = [](Sizes group) {
    return group.size() == 1 || (group.size() > 1 && group.back() % kBlockSize == 0);
  };
  return Decoded{*type, Product(outer), Product(summed), in_blocks(outer), in_blocks(summed)};
}

std::optional<Problem> Decode(Rules& rules, AnyBuffer a, AnyBuffer b, AnyBuffer a_scales, AnyBuffer b_scales,
                              AnyBuffer bias, AnyBuffer accumulator, AnyBuffer aux_in, AnyBuffer amax_in, Result d,
                              Result aux_out, Result amax_out, Result d_scale_inv, Result workspace,
                              int64_t a_outer_ndim, int64_t b_outer_ndim, bool a_summed_first, bool b_summed_first,
                              std::string_view scaling_name, std::string_view epilogue_name, bool fast_accumulation,
                              bool accumulate, bool power_of_two_scale, bool autotune, bool own_kernel) {
  const int64_t batch_ndim = static_cast<int64_t>(d->dimensions().size()) - a_outer_ndim - b_outer_ndim;
  rules.That(a_outer_ndim >= 0 && b_outer_ndim >= 0 && batch_ndim >= 0, "d", *d,
             "have the outer dimensions of a and of b");
  if (rules.broken()) return std::nullopt;
  const int64_t batch = Product(SizesOf(*d).first(batch_ndim));
  const auto left = DecodeOperand(rules, "a", a, batch_ndim, a_outer_ndim, a_summed_first);
  const auto right = DecodeOperand(rules, "b", b, batch_ndim, b_outer_ndim, b_summed_first);
  const std::optional<Type> d_type = TypeOf(*d);
  rules.That(d_type.has_value(), "d", *d, "be of a float type of 8, 16 or 32 bits");
  if (rules.broken()) return std::nullopt;

  Problem problem{};
  problem.m = left->outer;
  problem.n = right->outer;
  problem.k = left->summed;
  problem.d_type = *d_type;
  if (right->summed != problem.k) {
    rules.That(false, "b", b, "sum over " + std::to_string(problem.k) + " values, as a does");
  }
  rules.That(Product(SizesOf(a).first(batch_ndim)) == batch, "a", a, "have the batch of d");
  rules.That(Product(SizesOf(b).first(batch_ndim)) == batch, "b", b, "have the batch of d");
  const size_t d_count = static_cast<size_t>(batch * problem.m * problem.n);
  rules.Elements(d_count, "d", *d);
  rules.That(problem.m <= INT32_MAX && problem.k <= INT32_MAX, "a", a, "have groups of dimensions below 2^31");
  rules.That(problem.n <= INT32_MAX, "b", b, "have groups of dimensions below 2^31");

  if (scaling_name == "none") {
    problem.scaling = Scaling::kNone;
  } else if (scaling_name == "tensor") {
    problem.scaling = Scaling::kTensor;
  } else if (scaling_name == "row") {
    problem.scaling = Scaling::kRow;
  } else {
    rules.That(scaling_name == "block", "a", a, "come with scaling none, tensor, row or block");
    problem.scaling = Scaling::kBlock;
  }
  const bool plain = problem.scaling == Scaling::kNone;
  rules.That(IsFp8(left->type) != plain, "a", a, plain ? "be plain without scaling" : "be FP8 with scaling");
  rules.That(IsFp8(right->type) != plain, "b", b, plain ? "be plain without scaling" : "be FP8 with scaling");
  rules.That(!plain || left->type == right->type, "b", b, "have the type of a");
  rules.That(left->type != Type::kE5M2 || right->type != Type::kE5M2, "b", b, "be E4M3 where a is E5M2");
  rules.That(plain || !(a_summed_first || b_summed_first), "a", a, "have its summed dimensions last with scaling");
  if (problem.scaling == Scaling::kBlock) {
    rules.That(left->summed_in_blocks, "a", a, "have a last summed dimension of a multiple of 128");
    rules.That(right->outer_in_blocks, "b", b, "have a last outer dimension of a multiple of 128");
  }
  const int64_t a_count = ScaleCount(problem, problem.m, false), b_count = ScaleCount(problem, problem.n, true);
  rules.Type(ffi::F32, "a_scale_inv", a_scales).Elements(batch * a_count, "a_scale_inv", a_scales);
  rules.Type(ffi::F32, "b_scale_inv", b_scales).Elements(batch * b_count, "b_scale_inv", b_scales);
  problem.a = {a.untyped_data(), Present<const float>(a_scales), left->type, a_summed_first};
  problem.b = {b.untyped_data(), Present<const float>(b_scales), right->type, b_summed_first};

  const bool fp8_result = IsFp8(problem.d_type);
  const ffi::DataType side = DataTypeOf(SideType(problem.d_type));
  auto optional = [&](std::string_view name, const AnyBuffer& buffer, ffi::DataType type, int64_t count) {
    if (buffer.element_count() != 0) rules.Type(type, name, buffer).Elements(batch * count, name, buffer);
  };
  optional("bias", bias, side, problem.n);
  optional("accumulator", accumulator, d->element_type(), problem.m * problem.n);
  optional("aux_in", aux_in, side, problem.m * problem.n);
  optional("aux_out", *aux_out, side, problem.m * problem.n);
  optional("amax_in", amax_in, ffi::F32, 1);
  optional("amax_out", *amax_out, ffi::F32, 1);
  optional("d_scale_inv", *d_scale_inv, ffi::F32, 1);
  problem.bias = Present<const void>(bias);
  problem.accumulator = accumulate ? Present<const void>(accumulator) : nullptr;
  problem.aux_in = Present<const void>(aux_in);
  problem.aux_out = Present<void>(*aux_out);
  problem.d = d->untyped_data();
  problem.amax_in = Present<const float>(amax_in);
  problem.amax_out = Present<float>(*amax_out);
  problem.d_scale_inv = Present<float>(*d_scale_inv);

  problem.epilogue = epilogue_name == "gelu"    ? Epilogue::kGelu
                     : epilogue_name == "dgelu" ? Epilogue::kDgelu
                                                : Epilogue::kNone;
  const bool gelu = problem.epilogue == Epilogue::kGelu, dgelu = problem.epilogue == Epilogue::kDgelu;
  rules.That(gelu || dgelu || epilogue_name == "none", "d", *d, "come with epilogue none, gelu or dgelu");
  rules.That((!gelu && !dgelu) || plain || problem.scaling == Scaling::kTensor, "d", *d,
             "have no epilogue with row or block scaling");
  rules.That(!dgelu || problem.bias == nullptr, "bias", bias, "be absent with the epilogue dgelu");
  rules.That((!gelu && !dgelu) || problem.d_type != Type::kFloat32, "d", *d, "be of 8 or 16 bits for an epilogue");
  rules.That(d_count == 0 || dgelu == (problem.aux_in != nullptr), "aux_in", aux_in, "come with the epilogue dgelu");
  rules.That(gelu || problem.aux_out == nullptr, "aux_out", *aux_out, "come with the epilogue gelu");
  rules.That(plain || problem.d_type != Type::kFloat32 || problem.scaling != Scaling::kTensor || !problem.bias, "bias",
             bias, "be absent where tensors in FP8 give float32");
  rules.That(!accumulate || d_count == 0 || problem.accumulator, "accumulator", accumulator,
             "be there with accumulate");
  rules.That(!problem.accumulator || !(problem.bias || gelu || dgelu || fp8_result), "accumulator", accumulator,
             "come without bias, epilogue and FP8 result");
  rules.That(!fp8_result || (problem.scaling == Scaling::kTensor && !dgelu), "d", *d,
             "be FP8 only with tensor scaling, and not with dgelu");
  rules.That(!own_kernel || !(gelu || dgelu || fp8_result), "d", *d,
             "be neither FP8 nor have an epilogue with own_kernel");
  const bool all_of_three = problem.amax_in && problem.amax_out && problem.d_scale_inv;
  rules.That(batch == 0 || !fp8_result || all_of_three, "d", *d, "come with amax_in, amax_out and d_scale_inv as FP8");
  if (rules.broken()) return std::nullopt;

  problem.power_of_two_scale = power_of_two_scale;
  problem.fast_accumulation = fast_accumulation;
  problem.autotune = autotune;
  problem.own_kernel = own_kernel;
  problem.workspace = Present<void>(*workspace);
  problem.workspace_bytes = static_cast<int64_t>(workspace->size_bytes());
  const int64_t bias_stride = problem.bias != nullptr ? problem.n : 0;
  problem.batch = {batch,   problem.m * problem.k, problem.n * problem.k, a_count,
                   b_count, bias_stride,           problem.m * problem.n};
  return problem;
}

// Both stages take the same operands, results and attributes.
template <Status (*kDo)(const Executor&, const Problem&)>
struct Handle {
  template <typename... Arguments>
  ffi::Error operator()(PlatformValue platform, Arguments... arguments) const {
    Rules rules(kName);
    const std::optional<Problem> problem = Decode(rules, arguments...);
    if (!problem) return rules.error();
    if (problem->m == 0 || problem->n == 0 || problem->batch.count == 0) return ffi::Error::Success();
    if (Status status = kDo(MakeExecutor(platform), *problem); !status.ok()) return ToError(kName, status);
    return ffi::Error::Success();
  }
};

template <ffi::ExecutionStage kStage>
auto Binding() {
  return ffi::Ffi::Bind<kStage>()
      .template Ctx<Platform>()
      .template Arg<AnyBuffer>()  // a
      .template Arg<AnyBuffer>()  // b
      .template Arg<AnyBuffer>()  // a_scale_inv
      .template Arg<AnyBuffer>()  // b_scale_inv
      .template Arg<AnyBuffer>()  // bias
      .template Arg<AnyBuffer>()  // accumulator
      .template Arg<AnyBuffer>()  // aux_in
      .template Arg<AnyBuffer>()  // amax_in
      .template Ret<AnyBuffer>()  // d
      .template Ret<AnyBuffer>()  // aux_out
      .template Ret<AnyBuffer>()  // amax_out
      .template Ret<AnyBuffer>()  // d_scale_inv
      .template Ret<AnyBuffer>()  // workspace
      .template Attr<int64_t>("a_outer_ndim")
      .template Attr<int64_t>("b_outer_ndim")
      .template Attr<bool>("a_summed_first")
      .template Attr<bool>("b_summed_first")
      .template Attr<std::string_view>("scaling")
      .template Attr<std::string_view>("epilogue")
      .template Attr<bool>("fast_accumulation")
      .template Attr<bool>("accumulate")
      .template Attr<bool>("power_of_two_scale")
      .template Attr<bool>("autotune")
      .template Attr<bool>("own_kernel");
}

}  // namespace
}  // namespace te::gemm

XLA_FFI_DEFINE_HANDLER_SYMBOL(te_gemm, te::gemm::Handle<te::gemm::Run>{},
                              te::gemm::Binding<xla::ffi::ExecutionStage::kExecute>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

#ifdef TE_JAX_CUDA
XLA_FFI_DEFINE_HANDLER_SYMBOL(te_gemm_initialize, te::gemm::Handle<te::gemm::Prepare>{},
                              te::gemm::Binding<xla::ffi::ExecutionStage::kInitialize>());
#endif
