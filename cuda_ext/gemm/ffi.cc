#include <vector>

#include "gemm/ffi_types.h"

namespace te::gemm {
namespace {

using ffi::AnyBuffer;

TE_JAX_ATTRIBUTES(Attributes, int64_t a_outer_ndim, b_outer_ndim; bool a_summed_first, b_summed_first;
                  std::string_view scaling; bool gelu, accumulate, fast_accumulation; std::string_view algorithm);

TE_JAX_CALL(Call, (a, b, a_scale_inv, b_scale_inv, bias, accumulator), (d, preactivation, workspace));
// Operands of two or three pairs; those of the third may be empty.
TE_JAX_CALL(SumCall,
            (a, b, a_scale_inv, b_scale_inv, second_a, second_b, second_a_scale_inv, second_b_scale_inv, third_a,
             third_b, third_a_scale_inv, third_b_scale_inv),
            (d));

constexpr std::string_view kName = "te_gemm", kSumName = "te_gemm_sum";

// The groups of dimensions of an operand [*batch, *outer, *summed], or [*batch, *summed, *outer].
struct Groups {
  int64_t outer;
  int64_t summed;
  bool outer_in_blocks;  // blocks of 128 outer, and of 128 summed values do not cross the last dimension of a group
  bool summed_in_blocks;
};

std::optional<Groups> DecodeGroups(Rules& rules, std::string_view name, const AnyBuffer& buffer, int64_t batch_ndim,
                                   int64_t batch, int64_t outer_ndim, bool summed_first) {
  const Sizes dims = SizesOf(buffer);
  const std::optional<int64_t> summed_ndim = DimensionsBeside({batch_ndim, outer_ndim}, buffer);
  rules.That(summed_ndim.has_value(), name, buffer, "have all of its batch and outer dimensions");
  if (rules.broken()) return std::nullopt;
  const auto outer = dims.subspan(batch_ndim + (summed_first ? *summed_ndim : 0), outer_ndim);
  const auto summed = dims.subspan(batch_ndim + (summed_first ? 0 : outer_ndim), *summed_ndim);
  auto in_blocks = [](Sizes group) {
    return group.size() == 1 || (group.size() > 1 && group.back() % kBlockSize == 0);
  };
  const Groups groups{CountOf(outer), CountOf(summed), in_blocks(outer), in_blocks(summed)};
  rules.That(CountOf(dims.first(batch_ndim)) == batch, name, buffer, "have the batch of d");
  rules.That(groups.outer <= INT32_MAX && groups.summed <= INT32_MAX, name, buffer,
             "have groups of dimensions below 2^31");
  return groups;
}

std::optional<Problem> Decode(Rules& rules, const Call& call, const Attributes& attributes) {
  Problem problem{};
  DecodeKind(rules, {"a", call.a}, {"b", call.b}, {"d", call.d}, attributes.scaling, attributes.algorithm, problem);
  const std::optional<int64_t> batch_ndim =
      DimensionsBeside({attributes.a_outer_ndim, attributes.b_outer_ndim}, call.d);
  rules.That(batch_ndim.has_value(), "d", call.d, "have the outer dimensions of a and of b");
  if (rules.broken()) return std::nullopt;
  const int64_t batch = CountOf(SizesOf(call.d).first(*batch_ndim));
  const auto left =
      DecodeGroups(rules, "a", call.a, *batch_ndim, batch, attributes.a_outer_ndim, attributes.a_summed_first);
  const auto right =
      DecodeGroups(rules, "b", call.b, *batch_ndim, batch, attributes.b_outer_ndim, attributes.b_summed_first);
  if (rules.broken()) return std::nullopt;
  problem.m = left->outer;
  problem.n = right->outer;
  problem.k = left->summed;
  if (right->summed != problem.k) {
    rules.That(false, "b", call.b, "sum over " + std::to_string(problem.k) + " values, as a does");
  }
  const int64_t d_count = CountOf({batch, problem.m, problem.n});
  rules.Elements(d_count, "d", call.d);

  const bool plain = problem.scaling == Scaling::kNone;
  rules.That(plain || !(attributes.a_summed_first || attributes.b_summed_first), "a", call.a,
             "have its summed dimensions last with scaling");
  if (problem.scaling == Scaling::kBlock) {
    rules.That(left->summed_in_blocks, "a", call.a, "have a last summed dimension of a multiple of 128");
    rules.That(right->outer_in_blocks, "b", call.b, "have a last outer dimension of a multiple of 128");
  }
  const int64_t a_count = ScaleCount(problem, problem.m, false), b_count = ScaleCount(problem, problem.n, true);
  rules.Type(ffi::F32, "a_scale_inv", call.a_scale_inv)
      .Elements(CountOf({batch, a_count}), "a_scale_inv", call.a_scale_inv);
  rules.Type(ffi::F32, "b_scale_inv", call.b_scale_inv)
      .Elements(CountOf({batch, b_count}), "b_scale_inv", call.b_scale_inv);

  auto optional = [&](std::string_view name, const AnyBuffer& buffer, int64_t count) {
    if (CountOf(buffer) != 0) rules.Type(call.d.element_type(), name, buffer).Elements(count, name, buffer);
  };
  optional("bias", call.bias, CountOf({batch, problem.n}));
  optional("accumulator", call.accumulator, d_count);
  optional("preactivation", call.preactivation, d_count);
  const bool has_bias = CountOf(call.bias) != 0;
  rules.That(!attributes.gelu || plain || problem.scaling == Scaling::kTensor, "d", call.d,
             "come without gelu with row or block scaling");
  rules.That(!attributes.gelu || problem.algorithm != Algorithm::kTeJax, "d", call.d,
             "come without gelu with algorithm te_jax");
  rules.That(!attributes.gelu || problem.d_type != Type::kFloat32, "d", call.d, "be of 16 bits for gelu");
  rules.That(attributes.gelu || CountOf(call.preactivation) == 0, "preactivation", call.preactivation,
             "come with gelu");
  rules.That(problem.scaling != Scaling::kTensor || problem.d_type != Type::kFloat32 || !has_bias, "bias", call.bias,
             "be absent where tensors in FP8 give float32");
  rules.That(!attributes.accumulate || d_count == 0 || CountOf(call.accumulator) != 0, "accumulator", call.accumulator,
             "be there with accumulate");
  rules.That(!attributes.accumulate || !(has_bias || attributes.gelu), "accumulator", call.accumulator,
             "come without bias and gelu");
  const int64_t workspace_bytes = WorkspaceBytes(rules, call.workspace);
  if (rules.broken()) return std::nullopt;

  problem.a = {call.a.untyped_data(), Present<const float>(call.a_scale_inv), problem.a.type,
               attributes.a_summed_first};
  problem.b = {call.b.untyped_data(), Present<const float>(call.b_scale_inv), problem.b.type,
               attributes.b_summed_first};
  problem.fast_accumulation = attributes.fast_accumulation;
  problem.gelu = attributes.gelu;
  problem.bias = Present<const void>(call.bias);
  problem.accumulator = attributes.accumulate ? Present<const void>(call.accumulator) : nullptr;
  problem.preactivation = Present<void>(call.preactivation);
  problem.d = call.d.untyped_data();
  problem.workspace = Present<void>(call.workspace);
  problem.workspace_bytes = workspace_bytes;
  problem.batch = {batch,   problem.m * problem.k,    problem.n * problem.k, a_count,
                   b_count, has_bias ? problem.n : 0, problem.m * problem.n};
  return problem;
}

// Both stages take the same operands, results and attributes.
template <Status (*kDo)(const Executor&, const Problem&)>
ffi::Error Handle(PlatformValue platform, const Call& call, const Attributes& attributes) {
  Rules rules(kName);
  const std::optional<Problem> problem = Decode(rules, call, attributes);
  if (!problem) return rules.error();
  if (problem->m == 0 || problem->n == 0 || problem->batch.count == 0) return ffi::Error::Success();
  return ToError(kName, kDo(MakeExecutor(platform), *problem));
}

// The operands of one GEMM of a sum: matrices a [m, k] and b [n, k] with scales of blocks.
struct PairBuffers {
  AnyBuffer a, b, a_scales, b_scales;
};

// The problem with the operands of a pair, as its own where it has none yet.
std::optional<OperandPair> DecodePair(Rules& rules, const PairBuffers& pair, const AnyBuffer& d, bool is_first,
                                      Problem& problem) {
  const Type a_type = problem.a.type, b_type = problem.b.type;
  DecodeKind(rules, {"a", pair.a}, {"b", pair.b}, {"d", d}, "block", "te_jax", problem);
  const auto left = DecodeGroups(rules, "a", pair.a, 0, 1, 1, false);
  const auto right = DecodeGroups(rules, "b", pair.b, 0, 1, 1, false);
  if (rules.broken()) return std::nullopt;
  if (is_first) problem.m = left->outer, problem.n = right->outer;
  problem.k = left->summed;
  rules.That(is_first || (problem.a.type == a_type && left->outer == problem.m), "a", pair.a,
             "have the type and the rows of the first pair's");
  rules.That(is_first || (problem.b.type == b_type && right->outer == problem.n), "b", pair.b,
             "have the type and the rows of the first pair's");
  rules.That(right->summed == problem.k && problem.k > 0, "b", pair.b,
             "sum over as many values as a does, one or more");
  const int64_t a_count = ScaleCount(problem, problem.m, false), b_count = ScaleCount(problem, problem.n, true);
  rules.Type(ffi::F32, "a_scale_inv", pair.a_scales).Elements(a_count, "a_scale_inv", pair.a_scales);
  rules.Type(ffi::F32, "b_scale_inv", pair.b_scales).Elements(b_count, "b_scale_inv", pair.b_scales);
  if (rules.broken()) return std::nullopt;
  return OperandPair{{pair.a.untyped_data(), Present<const float>(pair.a_scales), problem.a.type, false},
                     {pair.b.untyped_data(), Present<const float>(pair.b_scales), problem.b.type, false},
                     problem.k};
}

ffi::Error HandleSum(PlatformValue platform, const SumCall& call) {
  Rules rules(kSumName);
  Problem problem{};
  std::optional<OperandPair> first =
      DecodePair(rules, {call.a, call.b, call.a_scale_inv, call.b_scale_inv}, call.d, true, problem);
  std::vector<OperandPair> more;
  const auto add = [&](std::string_view name, const PairBuffers& pair) {
    rules.Of(name);
    if (const auto decoded = DecodePair(rules, pair, call.d, false, problem)) more.push_back(*decoded);
  };
  if (first) add("second_", {call.second_a, call.second_b, call.second_a_scale_inv, call.second_b_scale_inv});
  if (!rules.broken() && CountOf(call.third_a) != 0) {
    add("third_", {call.third_a, call.third_b, call.third_a_scale_inv, call.third_b_scale_inv});
  }
  if (!rules.broken()) rules.Of("").Elements(CountOf({problem.m, problem.n}), "d", call.d);
  if (rules.broken()) return rules.error();
  if (problem.m == 0 || problem.n == 0) return ffi::Error::Success();
  problem.a = first->a, problem.b = first->b, problem.k = first->k;
  problem.d = call.d.untyped_data();
  return ToError(kSumName, RunSum(MakeExecutor(platform), problem, more));
}

}  // namespace

TE_JAX_DEFINE_TARGET(te_gemm_sum, HandleSum, ffi::Traits::kCmdBufferCompatible)
TE_JAX_DEFINE_TARGET(te_gemm, Handle<Run>, ffi::Traits::kCmdBufferCompatible)

#ifdef TE_JAX_CUDA
XLA_FFI_DEFINE_HANDLER_SYMBOL(te_gemm_initialize, HandlerOf<Handle<Prepare>>{},
                              HandlerOf<Handle<Prepare>>::Binding<ffi::ExecutionStage::kInitialize>());
#endif

}  // namespace te::gemm
