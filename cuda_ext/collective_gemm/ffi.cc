#include <algorithm>
#include <chrono>

#include "collective_gemm/collective_gemm.h"
#include "gemm/ffi_types.h"

namespace te::collective_gemm {
namespace {

using ffi::AnyBuffer;
using Places = ffi::Span<const int64_t>;
using gemm::Present;
using gemm::Scaling;

// Operands and results one after another, where their number depends on attributes.
class Operands {
 public:
  Operands(ffi::RemainingArgs& arguments, ffi::RemainingRets& results) : arguments_(arguments), results_(results) {}

  std::optional<AnyBuffer> Argument() {
    auto buffer = arguments_.get<AnyBuffer>(argument_++);
    return buffer.has_value() ? std::optional<AnyBuffer>(*buffer) : std::nullopt;
  }
  std::optional<AnyBuffer> Result() {
    auto buffer = results_.get<AnyBuffer>(result_++);
    return buffer.has_value() ? std::optional<AnyBuffer>(**buffer) : std::nullopt;
  }
  bool HaveArguments() const { return argument_ < arguments_.size(); }
  bool Left() const { return HaveArguments() || result_ < results_.size(); }

 private:
  ffi::RemainingArgs& arguments_;
  ffi::RemainingRets& results_;
  size_t argument_ = 0, result_ = 0;
};

// The attributes of both calls. Groups are of devices, group after group. Of an all-gather, keep_gathered makes all of
// x a result, and put lets devices write to their peers. shared_bytes are what a call needs of every segment, where
// several processes drive the devices of a group. Weights are [k, n] with summed_first. The timeout is in seconds.
TE_JAX_ATTRIBUTES(Attributes, std::string_view algorithm, name, scaling; Places groups;
                  int64_t call, group_size, products, shared_bytes;
                  bool fast_accumulation, keep_gathered, put, summed_first; float timeout);

ffi::ErrorOr<Group> GroupOf(const Attributes& attributes, int64_t run, int32_t device) {
  const auto refused = [&](const std::string& why) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(std::string(attributes.name) + ": " + why));
  };
  const auto places = static_cast<int64_t>(attributes.groups.size());
  if (attributes.group_size < 1 || places % attributes.group_size != 0) {
    return refused("groups names " + std::to_string(places) + " devices; it must name some multiple of group_size, " +
                   std::to_string(attributes.group_size));
  }
  for (const int64_t place : attributes.groups) {
    if (place < 0 || place > INT32_MAX) return refused("groups names " + std::to_string(place) + ", which is no place");
  }
  if (!IsTimeout(attributes.timeout)) {
    return refused("timeout is " + std::to_string(attributes.timeout) +
                   "; it must be a number of seconds from 0 to 1e9");
  }
  if (attributes.products < 0 || attributes.shared_bytes < 0) {
    return refused("products is " + std::to_string(attributes.products) + " and shared_bytes " +
                   std::to_string(attributes.shared_bytes) + "; neither can be negative");
  }
  const auto found = std::find(attributes.groups.begin(), attributes.groups.end(), PlaceOf(device));
  if (found == attributes.groups.end()) {
    return refused("device " + std::to_string(device) +
                   " belongs to no group of this call, or the program was lowered in another process: compile it in "
                   "this one");
  }
  if (std::find(found + 1, attributes.groups.end(), *found) != attributes.groups.end()) {
    return refused("groups names device " + NameOf(static_cast<int>(*found)) + " more than once");
  }
  const int64_t place = found - attributes.groups.begin();
  const auto begin = attributes.groups.begin() + place / attributes.group_size * attributes.group_size;
  Group group{std::string(attributes.name),
              run,
              attributes.call,
              static_cast<int>(place % attributes.group_size),
              std::vector<int>(begin, begin + attributes.group_size),
              Timeout(attributes.timeout),
              nullptr};
  const auto other_process = [&](int place) { return ProcessOf(place) != ProcessOf(group.devices.front()); };
  if (std::any_of(group.devices.begin(), group.devices.end(), other_process)) {
    group.segments = FindSegments(group.devices, group.rank, attributes.shared_bytes);
    if (group.segments == nullptr) {
      return refused(
          "this program was compiled in another run, whose processes shared memory that is gone: compile it again, "
          "without a cache");
    }
  }
  return group;
}

// The product of a piece of x, [rows, k], with a weight; its pointers into x are the caller's.
gemm::Problem ProductOf(Rules& rules, const Attributes& attributes, const AnyBuffer& x, int64_t rows, int64_t k,
                        const AnyBuffer& w, const AnyBuffer& w_scales, const AnyBuffer& y) {
  gemm::Problem problem{};
  gemm::DecodeKind(rules, {"x", x}, {"w", w}, {"y", y}, attributes.scaling, attributes.algorithm, problem);
  rules.That(w.dimensions().size() == 2, "w", w, "have two dimensions");
  if (rules.broken()) return problem;
  rules.That(problem.scaling == Scaling::kNone || !attributes.summed_first, "w", w,
             "have its summed dimension last with scaling");
  problem.m = rows;
  problem.k = k;
  problem.n = w.dimensions()[attributes.summed_first ? 1 : 0];
  rules.That(rows <= INT32_MAX && k <= INT32_MAX, "x", x, "have rows and columns below 2^31");
  rules.That(problem.n <= INT32_MAX, "w", w, "have dimensions below 2^31");
  if (rules.broken()) return problem;
  if (w.dimensions()[attributes.summed_first ? 0 : 1] != k) {
    rules.That(false, "w", w, "sum over " + std::to_string(k) + " values, as x does");
  }
  problem.a = {x.untyped_data(), nullptr, problem.a.type, false};
  problem.b = {w.untyped_data(), Present<const float>(w_scales), problem.b.type, attributes.summed_first};
  problem.fast_accumulation = attributes.fast_accumulation;
  rules.Type(ffi::F32, "w_scale_inv", w_scales)
      .Elements(gemm::ScaleCount(problem, problem.n, true), "w_scale_inv", w_scales);
  return problem;
}

bool IsMissing(Rules& rules, const std::optional<AnyBuffer>& buffer, const AnyBuffer& x) {
  rules.That(buffer.has_value(), "x", x, "come with all the operands and results that its attributes announce");
  return !buffer.has_value();
}

void RequireNoneLeft(Rules& rules, const Operands& operands, const AnyBuffer& x) {
  rules.That(!operands.Left(), "x", x, "come without operands and results that its attributes do not announce");
}

// Whatever has values of whole bytes: XLA packs smaller ones.
Gathered GatheredOf(Rules& rules, std::string_view name, const AnyBuffer& mine, const AnyBuffer& all, int64_t size,
                    int64_t pieces, bool with_mine) {
  const std::optional<gemm::Type> type = gemm::TypeOf(mine);
  rules.That(type.has_value(), name, mine, "be of a float type of 8, 16 or 32 bits");
  rules.Type(mine.element_type(), name, all).Elements(CountOf({size, CountOf(mine)}), name, all);
  if (rules.broken()) return {};
  const int64_t bytes = CountOf(mine) * gemm::SizeOf(*type);
  return {mine.untyped_data(), all.untyped_data(), pieces, bytes / std::max<int64_t>(pieces, 1), with_mine};
}

// x [pieces, rows, k], its scales; weights, their scales and biases; others, in their order. Results: a product
// [pieces, size, rows, n] for each weight, all of x [pieces, size, rows, k], all scales and others [size, …], and a
// workspace.
std::optional<AllGatherProblem> DecodeAllGather(Rules& rules, ffi::RemainingArgs& arguments,
                                                ffi::RemainingRets& results, const Attributes& attributes) {
  Operands operands(arguments, results);
  const auto x = operands.Argument(), x_scales = operands.Argument();
  if (!x || !x_scales) return std::nullopt;
  rules.That(x->dimensions().size() == 3, "x", *x, "have three dimensions");
  const std::optional<Scaling> scaling = gemm::ScalingOf(attributes.scaling);
  rules.That(scaling.has_value(), "x", *x, "come with scaling none, tensor, row or block");
  rules.Type(ffi::F32, "x_scale_inv", *x_scales);
  if (rules.broken()) return std::nullopt;
  const int64_t pieces = x->dimensions()[0], rows = x->dimensions()[1], k = x->dimensions()[2];
  const int64_t size = attributes.group_size;

  AllGatherProblem problem{};
  problem.put = attributes.put;
  for (int64_t i = 0; i < attributes.products; ++i) {
    const auto w = operands.Argument(), w_scales = operands.Argument(), bias = operands.Argument();
    const auto y = operands.Result();
    if (IsMissing(rules, bias, *x) || IsMissing(rules, y, *x)) return std::nullopt;
    Product product{ProductOf(rules, attributes, *x, rows, k, *w, *w_scales, *y), y->untyped_data()};
    rules.Elements(CountOf({pieces, size, rows, product.problem.n}), "y", *y);
    if (CountOf(*bias) != 0) {
      rules.Type(y->element_type(), "bias", *bias).Elements(product.problem.n, "bias", *bias);
      product.problem.bias = bias->untyped_data();
    }
    if (rules.broken()) return std::nullopt;
    const int64_t scales = gemm::ScaleCount(product.problem, rows, false);
    rules.Elements(*scaling == Scaling::kTensor ? 1 : CountOf({pieces, scales}), "x_scale_inv", *x_scales);
    if (*scaling == Scaling::kTensor) product.problem.a.scales = Present<const float>(*x_scales);
    if (CountOf(*y) != 0) problem.products.push_back(product);
  }
  const auto all = operands.Result(), all_scales = operands.Result();
  if (IsMissing(rules, all, *x) || IsMissing(rules, all_scales, *x)) return std::nullopt;
  // However many pieces there are, nothing is to be done for them.
  const bool empty = CountOf(*x) == 0 && problem.products.empty();
  problem.x = GatheredOf(rules, "gathered", *x, *all, size, empty ? 0 : pieces, attributes.keep_gathered);
  if (*scaling == Scaling::kRow || *scaling == Scaling::kBlock) {
    problem.scales = GatheredOf(rules, "gathered scales", *x_scales, *all_scales, size, 1, false);
  }
  while (operands.HaveArguments()) {
    const auto other = operands.Argument();
    const auto all_others = operands.Result();
    if (IsMissing(rules, other, *x) || IsMissing(rules, all_others, *x)) return std::nullopt;
    problem.others.push_back(GatheredOf(rules, "gathered", *other, *all_others, size, 1, true));
  }
  const auto workspace = operands.Result();
  if (IsMissing(rules, workspace, *x)) return std::nullopt;
  RequireNoneLeft(rules, operands, *x);
  problem.workspace = Present<void>(*workspace);
  const int64_t workspace_bytes = gemm::WorkspaceBytes(rules, *workspace) / kGemmStreams;
  for (Product& product : problem.products) product.problem.workspace_bytes = workspace_bytes;
  if (rules.broken()) return std::nullopt;
  return problem;
}

// For each product x [pieces, size, rows, k], its scales, a weight and its scales; then a bias. Results: z [pieces,
// rows, n], what is received [parts, pieces, rows, n], what is sent, sums of several products in float32 [2, pieces,
// rows, n] before they are rounded, and a workspace.
std::optional<ReduceScatterProblem> DecodeReduceScatter(Rules& rules, ffi::RemainingArgs& arguments,
                                                        ffi::RemainingRets& results, const Attributes& attributes) {
  Operands operands(arguments, results);
  const std::optional<Scaling> scaling = gemm::ScalingOf(attributes.scaling);
  const auto z = operands.Result(), received = operands.Result(), outgoing = operands.Result();
  const auto sums = operands.Result(), workspace = operands.Result();
  if (!z || !received || !outgoing || !sums || !workspace) return std::nullopt;
  rules.That(z->dimensions().size() == 3, "z", *z, "have three dimensions");
  rules.That(scaling.has_value(), "z", *z, "come with scaling none, tensor, row or block");
  rules.That(attributes.products > 0, "z", *z, "be the sum of at least one product");
  if (rules.broken()) return std::nullopt;
  const int64_t size = attributes.group_size, pieces = z->dimensions()[0], rows = z->dimensions()[1];
  const int64_t z_count = CountOf(*z);

  ReduceScatterProblem problem{};
  for (int64_t i = 0; i < attributes.products; ++i) {
    const auto x = operands.Argument(), x_scales = operands.Argument();
    const auto w = operands.Argument(), w_scales = operands.Argument();
    if (IsMissing(rules, w_scales, *z)) return std::nullopt;
    rules.That(x->dimensions().size() == 4, "x", *x, "have four dimensions");
    if (rules.broken()) return std::nullopt;
    gemm::Problem product = ProductOf(rules, attributes, *x, rows, x->dimensions()[3], *w, *w_scales, *z);
    rules.Elements(CountOf({pieces, size, rows, product.k}), "x", *x);
    rules.That(product.n == z->dimensions()[2], "w", *w, "have as many columns as z");
    if (rules.broken()) return std::nullopt;
    const int64_t scales = *scaling == Scaling::kTensor ? 0 : gemm::ScaleCount(product, rows, false);
    rules.Type(ffi::F32, "x_scale_inv", *x_scales)
        .Elements(*scaling == Scaling::kTensor ? 1 : CountOf({pieces, size, scales}), "x_scale_inv", *x_scales);
    if (z_count == 0) product.m = 0;
    product.a.scales = Present<const float>(*x_scales);
    problem.type = product.d_type;
    if (CountOf(*sums) != 0) product.d_type = gemm::Type::kFloat32;
    problem.products.push_back(product);
    problem.scales_of_piece.push_back(scales);
  }
  if (CountOf(*sums) != 0) {
    rules.Type(ffi::F32, "sums", *sums).Elements(CountOf({2, z_count}), "sums", *sums);
    rules.That(size == 1 || CountOf(*outgoing) != 0, "outgoing", *outgoing, "be there with sums");
    problem.sums = static_cast<float*>(sums->untyped_data());
  }
  const auto bias = operands.Argument();
  if (IsMissing(rules, bias, *z)) return std::nullopt;
  RequireNoneLeft(rules, operands, *z);
  if (CountOf(*bias) != 0) {
    rules.Type(ffi::F32, "bias", *bias).Elements(z->dimensions()[2], "bias", *bias);
    problem.bias = static_cast<const float*>(bias->untyped_data());
  }
  rules.Type(z->element_type(), "received", *received)
      .Elements(CountOf({problem.Parts(static_cast<int>(size)), z_count}), "received", *received);
  if (CountOf(*outgoing) != 0) {
    rules.Type(z->element_type(), "outgoing", *outgoing).Elements(CountOf({size - 1, z_count}), "outgoing", *outgoing);
    problem.outgoing = outgoing->untyped_data();
  }
  problem.pieces = z_count == 0 ? 0 : pieces;  // however many they are, there is nothing to do
  problem.received = received->untyped_data();
  problem.z = z->untyped_data();
  problem.workspace = Present<void>(*workspace);
  const int64_t workspace_bytes = gemm::WorkspaceBytes(rules, *workspace);
  for (gemm::Problem& product : problem.products) product.workspace_bytes = workspace_bytes;
  if (rules.broken()) return std::nullopt;
  return problem;
}

template <typename Problem>
using Decoder = std::optional<Problem> (*)(Rules&, ffi::RemainingArgs&, ffi::RemainingRets&, const Attributes&);
template <typename Problem>
using Action = Status (*)(const Executor&, const Group&, const Problem&);

template <typename Problem>
ffi::Error Run(const char* target, Decoder<Problem> decode, Action<Problem> act, PlatformValue platform, int64_t run,
               int32_t device, ffi::RemainingArgs& arguments, ffi::RemainingRets& results,
               const Attributes& attributes) {
  Rules rules(target);
  auto group = GroupOf(attributes, run, device);
  if (!group.has_value()) return group.error();
  const auto problem = decode(rules, arguments, results, attributes);
  if (!problem) {
    return rules.broken() ? rules.error() : ffi::Error::InvalidArgument(std::string(target) + ": no operands");
  }
  return ToError(target, act(MakeExecutor(platform), *group, *problem));
}

constexpr char kAllGather[] = "te_all_gather_gemm", kReduceScatter[] = "te_gemm_reduce_scatter";

template <const char* target, auto decode, auto act>
ffi::Error Execute(PlatformValue platform, ffi::RunId run, int32_t device, ffi::RemainingArgs arguments,
                   ffi::RemainingRets results, Attributes attributes) {
  return Run(target, decode, act, platform, run.run_id, device, arguments, results, attributes);
}
constexpr auto ExecuteAllGather = Execute<kAllGather, DecodeAllGather, AllGather>;
constexpr auto ExecuteReduceScatter = Execute<kReduceScatter, DecodeReduceScatter, ReduceScatter>;

auto ExecuteBinding() {
  return ffi::Ffi::Bind()
      .Ctx<Platform>()
      .Ctx<ffi::RunId>()
      .Ctx<ffi::DeviceOrdinal>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs<Attributes>();
}

#ifdef TE_JAX_CUDA
template <const char* target, auto decode, auto act>
ffi::Error Initialize(PlatformValue platform, int32_t device, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                      Attributes attributes) {
  return Run(target, decode, act, platform, 0, device, arguments, results, attributes);
}
constexpr auto InitializeAllGather = Initialize<kAllGather, DecodeAllGather, PrepareAllGather>;
constexpr auto InitializeReduceScatter = Initialize<kReduceScatter, DecodeReduceScatter, PrepareReduceScatter>;

auto InitializeBinding() {
  return ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
      .Ctx<Platform>()
      .Ctx<ffi::DeviceOrdinal>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs<Attributes>();
}
#endif

}  // namespace
}  // namespace te::collective_gemm

// Not compatible with command buffers: waits for other devices' events cannot be captured on one device alone.
XLA_FFI_DEFINE_HANDLER_SYMBOL(te_all_gather_gemm, te::collective_gemm::ExecuteAllGather,
                              te::collective_gemm::ExecuteBinding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(te_gemm_reduce_scatter, te::collective_gemm::ExecuteReduceScatter,
                              te::collective_gemm::ExecuteBinding());

extern "C" const char* te_all_gather_gemm_names() { return ""; }
extern "C" const char* te_gemm_reduce_scatter_names() { return ""; }

#ifdef TE_JAX_CUDA
XLA_FFI_DEFINE_HANDLER_SYMBOL(te_all_gather_gemm_initialize, te::collective_gemm::InitializeAllGather,
                              te::collective_gemm::InitializeBinding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(te_gemm_reduce_scatter_initialize, te::collective_gemm::InitializeReduceScatter,
                              te::collective_gemm::InitializeBinding());
#endif
