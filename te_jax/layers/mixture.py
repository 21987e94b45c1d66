"""A mixture of experts: router, permutation, gated MLPs of experts by grouped GEMMs, and the way back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from te_jax import native, ops, parallel
from te_jax._core.arguments import static_way_out
from te_jax._core.reverse_mode import reverse_mode_only
from te_jax._core.types import BLOCK, PyTree
from te_jax.layers import linear
from te_jax.layers.microbatches import dense_kernels
from te_jax.layers.tensor_parallel import TensorAxis
from te_jax.ops.experts_mlp import experts_mlp, is_fused
from te_jax.ops.router import Score
from te_jax.ops.router_logits import router_logits
from te_jax.parallel.experts import Exchange, buffer_rows, combine_tokens, gather_tokens
from te_jax.quantized import facts_of
from te_jax.recipe import DelayedScaling, ProductRecipes, Quantization, Recipe
from te_jax.reference.activation import Activation, ActivationName
from te_jax.sharding import AxisName, axes_of_entry

__all__ = ["ExpertBuffers", "ExpertParallel", "MoEResult", "Router", "expert_buffers", "moe"]

Kernels = tuple[Any, Any, Any]

EINSUM = "eti,eio->eto"
"""How layers that hold kernels [experts, in, out] describe them."""


@dataclasses.dataclass(frozen=True)
class Router:
    """How the experts of a token are chosen and weighted.

    Attributes:
      top_k, score, normalize, num_groups, top_groups, scaling_factor, top_of_group: as in `te_jax.ops.router`.
      weighted: "results" multiplies the results of experts by the weights; "inputs" multiplies x, as Llama 4 does.
      capacity: most tokens of an expert, from all devices together; None for all.

    Raises:
      ValueError: for another `weighted`.
    """

    top_k: int
    score: Score = "softmax"
    normalize: bool = True
    num_groups: int = 1
    top_groups: int = 1
    scaling_factor: float = 1.0
    weighted: Literal["results", "inputs"] = "results"
    capacity: int | None = None
    top_of_group: int | None = None

    def __post_init__(self) -> None:
        if self.weighted not in ("results", "inputs"):
            raise ValueError(f"weighted is {self.weighted!r}; it must be 'results' or 'inputs'")

    @property
    def choice(self) -> dict[str, Any]:
        """Arguments of `te_jax.ops.router`."""
        return {name: value for name, value in vars(self).items() if name not in ("weighted", "capacity")}

    @staticmethod
    def check(router: object) -> None:
        """Raises a ValueError unless it is a Router."""
        if not isinstance(router, Router):
            raise ValueError(
                f"router is {router!r}; it must be a te_jax.layers.Router, such as Router(top_k=2)"
                f"{static_way_out(router)}"
            )


@dataclasses.dataclass(frozen=True)
class ExpertParallel:
    """The devices that divide the experts, for use inside `shard_map`.

    Attributes:
      axis_name: the mesh axis that splits tokens and experts, or several: the first varies slowest.
      buffer_factor, exchange: as in `te_jax.parallel.plan_dispatch`.
    """

    axis_name: AxisName
    buffer_factor: float | None = None
    exchange: Exchange | None = None

    @classmethod
    def of(cls, experts: ExpertParallel | AxisName | None) -> ExpertParallel | None:
        """What an argument says; a name is that of the axis."""
        return experts if experts is None or isinstance(experts, ExpertParallel) else cls(experts)


class MoEResult(NamedTuple):
    """The result of `moe`.

    Attributes:
      y: [*tokens, out], like x.
      logits: float32 [*tokens, experts], for `te_jax.ops.load_balancing_loss` and `router_z_loss`.
      routing: experts and weights of every token, for the same and for `te_jax.ops.expert_counts`.
      dropped: int32 scalar, choices of these tokens beyond an expert's capacity, or the buffer of its device.
    """

    y: Array
    logits: Array
    routing: ops.Routing
    dropped: Array


class ExpertBuffers(NamedTuple):
    """The buffers of a device's experts in one layer, in bytes, from `expert_buffers`.

    Attributes:
      num_rows: rows of each, which there may be at most, padding included.
      rows: the experts' inputs; with block scaling in FP8, with scales.
      gate_up: the values before the activation, both. The backward pass needs these of every layer.
      y: the experts' results.
    """

    num_rows: int
    rows: int
    gate_up: int
    y: int


def expert_buffers(
    tokens: int,
    features: tuple[int, int, int],
    num_experts: int,
    router: Router,
    *,
    devices: int = 1,
    buffer_factor: float | None = None,
    recipe: Recipe | None = None,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> ExpertBuffers:
    """The memory that `moe` takes for rows, before anything runs.

    The gradients of these come on top, in the backward pass of one layer at a time.

    Args:
      tokens: of each device.
      features: (in, hidden, out) of an expert.
      num_experts: of all devices.
      router, recipe: as for `moe`.
      devices: that divide the experts.
      buffer_factor: as in `ExpertParallel`.
      dtype: of x.

    Raises:
      ValueError: devices do not divide the experts.

    Examples:
      >>> from te_jax.layers import Router, expert_buffers
      >>> from te_jax.recipe import BlockScaling
      >>> buffers = expert_buffers(8192, (2048, 768, 2048), 128, Router(8), devices=4, recipe=BlockScaling())
      >>> buffers.num_rows, *(round(size / 1e9, 2) for size in buffers[1:])
      (266112, 0.56, 0.82, 1.09)
    """
    if num_experts % devices:
        raise ValueError(f"num_experts is {num_experts}; it must be a multiple of the {devices} devices")
    (width, hidden, out), size = features, jnp.dtype(dtype).itemsize
    align, experts = 1 if recipe is None else BLOCK, num_experts // devices
    rows = buffer_rows(tokens, router.top_k, experts, devices, align, router.capacity, buffer_factor)
    of_x = width + 4 * -(-width // BLOCK) if is_fused(recipe) else size * width
    return ExpertBuffers(rows, rows * of_x, 2 * rows * hidden * size, rows * out * size)


@dataclasses.dataclass(frozen=True)
class Options:
    """Arguments of `moe` that modules hold."""

    activation: Activation
    expert_parallel: ExpertParallel | None
    recipe: Recipe | None
    implementation: native.Implementation | None


def moe(
    x: jax.typing.ArrayLike,
    router_kernel: jax.typing.ArrayLike,
    kernel: Kernels,
    router: Router,
    *,
    router_bias: jax.typing.ArrayLike | None = None,
    expert_bias: jax.typing.ArrayLike | None = None,
    bias: tuple[jax.typing.ArrayLike | None, ...] = (None, None, None),
    shared: Kernels | None = None,
    shared_router: jax.typing.ArrayLike | None = None,
    activation: Activation | ActivationName = "silu",
    expert_parallel: ExpertParallel | AxisName | None = None,
    wgrad_accumulator: tuple[jax.typing.ArrayLike | None, ...] = (None, None, None),
    accumulate: bool = True,
    recipe: Recipe | None = None,
    implementation: native.Implementation | None = None,
) -> MoEResult:
    r"""The sum over the experts e of a token, and over shared experts, of gated MLPs.

        logits = x · router_kernel + router_bias          in float32
        y      = Σ_e w_e · MLP_e(x)  +  MLP_shared(x)     with the experts and weights w of `te_jax.ops.router`

    Tokens are sorted by expert, and multiplied by grouped GEMMs: no token is dropped unless a capacity is given, and no
    expert computes more than its tokens, padded to 128 with a recipe. The weights are multiplied into the activations,
    before the last product. The residuals that grow with the tokens are x, the values before the activation
    ("te_moe_preactivation"), the weights and the permutation. The backward pass computes the rest again, without GEMMs.

    All tokens at hand are sorted together. Where they are split over devices, call this inside `shard_map`. With
    expert_parallel each device then holds some of the experts only, and tokens or their rows travel to them and back
    (`te_jax.parallel.plan_dispatch`): results and gradients are those of one device with all tokens. Scales that many
    rows share, of CurrentScaling and of RowwiseScaling's weight gradients, follow from the rows of each device. What a
    device receives is kept for the backward pass as well ("te_dispatched_rows"). With a recipe that scales activations
    by row or in blocks, by powers of two, it travels in FP8 forward, except in float16 and with
    Router(weighted="inputs").

    Args:
      x: [*tokens, in], float32, bfloat16 or float16.
      router_kernel: [in, experts], any float dtype.
      kernel: (gate, up, down), [experts, in, hidden] twice and [experts, hidden, out], as `te_jax.ops.grouped_dense`
        takes them.
      router: how experts are chosen.
      router_bias: [experts], added to the logits.
      expert_bias: [experts], see `te_jax.ops.update_expert_bias`.
      bias: ([experts, hidden], [experts, hidden], [experts, out]), each of which may be None.
      shared: (gate, up, down) of the shared experts as one MLP, [in, hidden], [in, hidden] and [hidden, out], or None.
      shared_router: [in, 1], any float dtype: the result of the shared experts is multiplied by
        sigmoid(x · shared_router), in float32, as in Qwen 2. None leaves it.
      activation: that of the MLPs; SwiGLU by default.
      expert_parallel: the devices that divide the experts, as an `ExpertParallel` or the name of their mesh axis. Then
        kernel, bias and wgrad_accumulator are this device's parts, [experts / devices, …]; all else is whole on every
        device.
      wgrad_accumulator, accumulate: for the kernels of the experts, as in `te_jax.ops.grouped_dense`.
      recipe: of the experts' and the shared experts' GEMMs. The routers are never quantized.
      implementation: see `te_jax.ops.grouped_dense`.

    Returns:
      MoEResult(y, logits, routing, dropped).

    Raises:
      ValueError: an argument breaks a rule above; the message names it.

    References:
      Shazeer et al., arXiv:1701.06538. DeepSeek-V3: arXiv:2412.19437.
    """
    Router.check(router)
    x = jnp.asarray(x)
    if not isinstance(kernel, tuple | list) or len(kernel) != 3:
        raise ValueError("kernel must be a tuple of three, (gate, up, down)")
    if shared_router is not None and (shared is None or jnp.shape(shared_router) != (x.shape[-1], 1)):
        raise ValueError(
            f"shared_router has shape {jnp.shape(shared_router)}; it must be ({x.shape[-1]}, 1), with shared"
        )
    if isinstance(recipe, DelayedScaling):
        raise ValueError(
            "recipe is DelayedScaling, and experts have no scaling state; use BlockScaling or CurrentScaling"
        )
    operands = reverse_mode_only((x, jnp.asarray(router_kernel).astype(jnp.float32)), _REVERSE_MODE)
    logits = router_logits(*operands, router_bias)
    routing = ops.router(logits, expert_bias=expert_bias, **router.choice)
    count, align = logits.shape[-1], 1 if recipe is None else BLOCK
    devices = ExpertParallel.of(expert_parallel)
    if devices is None:
        plan = ops.group_by_expert(routing.experts, count, align=align, capacity=router.capacity)
    else:
        plan = parallel.plan_dispatch(routing.experts, count, align=align, capacity=router.capacity, **vars(devices))
        _validate_parts(kernel, plan)
    fused = router.weighted == "results" and bias[0] is None and bias[1] is None and is_fused(recipe)
    layer = functools.partial(
        _experts,
        fused=fused,
        activation=Activation.of(activation),
        weighted=router.weighted,
        options={"accumulate": accumulate, "recipe": recipe, "implementation": implementation},
    )
    if not fused or isinstance(plan, parallel.DispatchPlan):  # else the residuals are these anyway
        # Kernels in FP8 are kept as well: they are quantized once, and do not grow with the tokens.
        names = ("te_moe_preactivation", "te_dispatched_rows", "te_dense_kernel")
        layer = jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(*names))
    y = layer(x, routing.weights, plan, tuple(kernel), tuple(bias[:2]), tuple(wgrad_accumulator))
    if bias[2] is not None:
        total = jax.checkpoint(functools.partial(_bias, weighted=router.weighted))(routing.weights, plan, bias[2])
        y = (y.astype(jnp.float32) + total).astype(y.dtype)
    if shared is not None:
        of_shared = ops.gated_mlp(x, shared, activation=activation, recipe=recipe, implementation=implementation)
        y = y + weighted_shared(of_shared, x, shared_router)
    return MoEResult(y, logits, routing, plan.dropped)


def weighted_shared(y: Array, x: Array, kernel: jax.typing.ArrayLike | None) -> Array:
    """What shared experts compute of x, y [*tokens, out], times sigmoid(x · kernel), in float32; None leaves it."""
    if kernel is None:
        return y
    weights = jax.nn.sigmoid(router_logits(x, jnp.asarray(kernel).astype(jnp.float32)))
    return (y.astype(jnp.float32) * weights).astype(y.dtype)


def moe_of_layers(
    x: jax.typing.ArrayLike,
    router_layer: linear.Layer,
    experts: tuple[linear.Layer, linear.Layer, linear.Layer],
    router: Router,
    *,
    expert_bias: Array | None,
    dtype: jax.typing.DTypeLike | None,
    options: Options,
    tensor: TensorAxis | None = None,
) -> MoEResult:
    """`moe` of what layers hold, in the given dtype, or in what x, kernels and biases of the experts promote to.

    With a tensor axis the time of x is split over devices, which divide the experts as `options.expert_parallel` says.
    """
    x = linear.as_array("x", x)
    dtype = linear.result_dtype(dtype, x, *(array for layer in experts for array in (layer.kernel, layer.bias)))
    kernels = [layer.kernel for layer in experts]
    arguments = dense_kernels(kernels) if tensor is None else tensor.dense_kernels(kernels, x)
    router_kernel: Any = router_layer.kernel  # never quantized
    gate, up, down = experts
    shared = {"router_kernel": router_kernel, "router_bias": router_layer.bias, "expert_bias": expert_bias}
    parts = {"kernel": tuple(arguments.pop("kernel")), "bias": (gate.bias, up.bias, down.bias)}
    run = functools.partial(moe, router=router, accumulate=arguments.pop("accumulate"), **vars(options))
    x, parts = x.astype(dtype), parts | arguments
    if tensor is None or tensor.mesh is None:
        return run(x, **shared, **parts)
    assert options.expert_parallel is not None
    stream, of_experts = tensor.stream_spec(x), PartitionSpec(options.expert_parallel.axis_name)
    axes = tuple(axis for entry in stream for axis in axes_of_entry(entry))

    def local(x: Array, shared: dict[str, Array | None], parts: dict[str, Any]) -> tuple[PyTree, ...]:
        *of_tokens, dropped = run(x, **shared, **parts)
        return *of_tokens, lax.psum(dropped, axes)

    of_parts = {name: tuple(tensor.specs(name, part, of_experts) for part in each) for name, each in parts.items()}
    outs = stream, stream, stream, PartitionSpec()
    return MoEResult(*tensor.call(local, (x, shared, parts), (stream, PartitionSpec(), of_parts), outs))


def for_each_expert(init: Callable[..., Array]) -> Callable[..., Array]:
    """An initializer of [experts, …] that draws the values of every expert with the given one."""

    def drawn(rng: Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Array:
        return jax.vmap(lambda rng: init(rng, shape[1:], dtype))(jax.random.split(rng, shape[0]))

    return drawn


_REVERSE_MODE = (
    "te_jax.layers.moe has first derivatives in reverse mode (jax.grad, jax.vjp) only: for forward mode (jax.jvp, "
    "jax.jacfwd) or second derivatives use te_jax.ops.ragged_dot with implementation='reference'"
)


def _experts(
    x: Array,
    weights: Array,
    plan: ops.Permutation | parallel.DispatchPlan,
    kernels: Kernels,
    biases: tuple[jax.typing.ArrayLike | None, ...],
    accumulators: tuple[jax.typing.ArrayLike | None, ...],
    *,
    fused: bool,
    activation: Activation,
    weighted: str,
    options: dict[str, Any],
) -> Array:
    """The sum over the experts of each token, without the bias of the last product."""
    run = experts_mlp if fused else functools.partial(_mlps, biases=biases, weighted=weighted)
    run = functools.partial(run, kernel=kernels, wgrad_accumulator=accumulators, activation=activation, **options)
    if isinstance(plan, ops.Permutation):
        return run(x, weights, plan.group_sizes, plan)
    quantization, implementation = _travelling(x, weighted, options["recipe"]), options["implementation"]
    if plan.gathered is not None:
        tokens, weights = gather_tokens(x, weights, plan, quantization, implementation)
        return combine_tokens(run(tokens, weights, plan.group_sizes, plan.gathered), plan)
    rows, of_rows = parallel.dispatch(x, weights, plan, quantization=quantization, implementation=implementation)
    return parallel.combine(run(rows, of_rows, plan.group_sizes, None), plan)


def _bias(weights: Array, plan: ops.Permutation | parallel.DispatchPlan, bias: Any, *, weighted: str) -> Array:
    """The weighted sum of the biases of each token's experts, in float32."""
    bias = jnp.asarray(bias)
    if isinstance(plan, parallel.DispatchPlan):
        permutation = plan.permutation
        bias = lax.all_gather(bias.astype(jnp.float32), plan.axis_name, tiled=True)
    else:
        permutation = plan
    # Σ_k w_k bias[e_k], as a product with the weight of every expert: rows have been weighted before.
    given = jnp.ones_like(weights) if weighted == "inputs" else weights
    given = jnp.where(permutation.rows >= 0, given, 0.0)
    return jnp.matmul(_by_expert(given, permutation, bias.shape[0]), bias.astype(jnp.float32), precision="highest")


def _mlps(
    x: Array,
    weights: Array,
    group_sizes: Array,
    permutation: ops.Permutation | None,
    *,
    kernel: Kernels,
    biases: tuple[jax.typing.ArrayLike | None, ...],
    wgrad_accumulator: tuple[jax.typing.ArrayLike | None, ...],
    activation: Activation,
    weighted: str,
    **options: Any,
) -> Array:
    """`te_jax.ops.experts_mlp` in single operations, with biases of gate and up, and weights of inputs or results."""
    if permutation is not None:
        x, weights = ops.permute(x, permutation), ops.permute_weights(weights, permutation)

    def times_weights(values: Array) -> Array:
        return (values.astype(jnp.float32) * weights[:, None].astype(jnp.float32)).astype(values.dtype)

    if weighted == "inputs":
        x = times_weights(x)
    gate, up = (
        checkpoint_name(value, "te_moe_preactivation")
        for value in ops.grouped_dense(
            x, kernel[:2], group_sizes, biases, wgrad_accumulator=wgrad_accumulator[:2], **options
        )
    )
    h = ops.gated_activation(gate, up, activation)
    if weighted == "results":
        h = times_weights(h)
    y = ops.grouped_dense(h, kernel[2], group_sizes, wgrad_accumulator=wgrad_accumulator[2], **options)
    return y if permutation is None else ops.unpermute(y, permutation)


def _travelling(x: Array, weighted: str, recipe: Recipe | None) -> Quantization | None:
    """How rows travel: quantized as the experts will, where a scale belongs to one row, and rounds no value again."""
    if recipe is None or isinstance(recipe, ProductRecipes) or x.dtype == jnp.float16:
        return None
    if weighted == "inputs":  # weights multiply rows where they arrive
        return None
    quantization = recipe.quantization("activation")
    exact = quantization.power_of_two_scales and facts_of(quantization.scaling).rows_travel
    return quantization if exact else None


def _validate_parts(kernel: Kernels, plan: parallel.DispatchPlan) -> None:
    count = plan.group_sizes.shape[0]
    for i, part in enumerate(kernel):
        if jnp.shape(part)[:1] != (count,):
            raise ValueError(
                f"kernel[{i}] has shape {jnp.shape(part)}; with expert_parallel each device has {count} experts, so it "
                f"must be ({count}, in, out): pass it into shard_map split along its first dimension, by "
                f"PartitionSpec({plan.axis_name})"
            )


def _by_expert(weights: Array, permutation: ops.Permutation, experts: int) -> Array:
    """[*tokens, experts]: the weight of every expert for a token, 0 of those that were not chosen."""
    ends = jnp.cumsum(permutation.group_sizes)
    chosen = jnp.sum(lax.expand_dims(ends, range(weights.ndim)) <= permutation.rows[..., None], axis=-1)
    mask = chosen[..., None] == lax.expand_dims(jnp.arange(experts, dtype=chosen.dtype), range(weights.ndim))
    return jnp.sum(jnp.where(mask, weights[..., None], 0.0), axis=-2)
