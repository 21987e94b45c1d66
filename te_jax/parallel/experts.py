"""Expert parallelism: each device holds some of the experts, and rows of tokens travel to their experts and back.

    plan = plan_dispatch(routing.experts, num_experts, axis_name="expert", align=128)
    rows, weights = dispatch(x, routing.weights, plan)
    y = combine(experts_of_this_device(rows, weights, plan.group_sizes), plan)

For use inside `shard_map` over the mesh axes that split the tokens. `te_jax.layers.moe` does it with axis_name. What
travels, and the backward pass would have to fetch again, has a name for `jax.checkpoint` policies:

    te_dispatched_rows    what a device receives, rows and their weights, or all tokens and weights with
                          exchange="all_gather"; FP8 with scales where they travelled as such
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from te_jax import native, ops, sharding
from te_jax._core.arguments import is_finite_number, is_whole_number
from te_jax._core.derivatives import differentiated_once
from te_jax._core.integers import as_int32
from te_jax._core.reverse_mode import reverse_mode_only
from te_jax._core.types import FLOAT_NAMES, FLOATS, PyTree
from te_jax.ops.operands import as_array, validate_quantization
from te_jax.ops.permute import most_rows, values_of_choices
from te_jax.ops.quantize import quantize_parts
from te_jax.parallel._exchanges import Segments, all_gather, covered_by, of_experts, send, send_back, sum_over_devices
from te_jax.parallel.transports.exchange import as_bytes
from te_jax.quantized import facts_of
from te_jax.recipe import Quantization
from te_jax.sharding import Axes, AxisName

Exchange = Literal["all_gather", "all_to_all"]

_NAME = "te_dispatched_rows"
_LARGEST = 2**31 - 1


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("permutation", "group_sizes", "dropped", "segments", "gathered"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class DispatchPlan:
    """Where each choice of a token lies on the device that holds its expert, from `plan_dispatch`.

    Attributes:
      permutation: this device's choices, sorted by expert, of all experts; those that were dropped have no row.
      group_sizes: int32 [experts / devices], rows of each expert of this device, padding included.
      dropped: int32 scalar, this device's choices that their experts had no room for.
      segments: what each device sends to each expert.
      gathered: where all devices' choices lie among the rows of this one, with exchange="all_gather"; else None.
    """

    permutation: ops.Permutation
    group_sizes: Array
    dropped: Array
    segments: Segments
    gathered: ops.Permutation | None

    @property
    def num_rows(self) -> int:
        """Rows of this device's experts, the size of the buffer."""
        return self.segments.held_rows

    @property
    def axis_name(self) -> Axes:
        """The mesh axes that split tokens and experts."""
        return self.segments.axis_name

    @property
    def exchange(self) -> Exchange:
        """The exchange that `plan_dispatch` was given, or has chosen."""
        return "all_to_all" if self.gathered is None else "all_gather"


def plan_dispatch(
    experts: jax.typing.ArrayLike,
    num_experts: int,
    *,
    axis_name: AxisName,
    align: int = 1,
    capacity: int | None = None,
    buffer_factor: float | None = None,
    exchange: Exchange | None = None,
) -> DispatchPlan:
    r"""Plans how the choices of all devices' tokens travel to the experts, of which each device holds as many.

    Rows are sorted by expert, for an expert by device, and for a device by token: one device would sort all tokens so.
    Devices exchange how many choices each has for each expert. All offsets follow from these numbers, and all devices
    compute them alike: nothing is sorted twice, and nothing is copied to the host.

    With D devices, T tokens of K experts on each, and E experts, a device's buffer has room for these choices, and for
    the padding of `align`, as in `te_jax.ops.group_by_expert`:

        D T min(K, E/D)        without buffer_factor: as many as there can be, if the experts of a token differ
        buffer_factor · T K    with it; T K are a device's choices under an even load. At most the number above

    Where choices do not fit, all experts of the device get the same capacity, the largest that fits in multiples of
    `align`. An expert drops those beyond it, of the last devices and tokens first. Dropped choices add zero, and their
    gradients are zero.

    Args:
      experts: integers [*tokens, top_k], of this device's tokens, from `te_jax.ops.router`. A choice outside of
        [0, num_experts) goes nowhere: mask tokens by it.
      num_experts: of all devices, which divide it: device d holds experts d E/D and following.
      axis_name: the mesh axis that splits tokens and experts, or several: the first varies slowest.
      align: rows of an expert are padded to a multiple of this; FP8 wants 128.
      capacity: most choices of an expert from all devices, or None for all.
      buffer_factor: room in the buffer, a multiple of an even load; None for any load.
      exchange: "all_to_all" sends each row to its expert, by `lax.ragged_all_to_all` on GPUs. "all_gather" sends every
        token to every device, and results back by reduce-scatter. A device receives T K (D-1)/D rows under an even load
        by the first, and T (D-1) rows by the second under any. None takes "all_gather" where D ≤ K, where it is not
        more, else "all_to_all".

    Returns:
      DispatchPlan: a pytree, whose arrays the backward pass keeps.

    Raises:
      ValueError: an argument breaks a rule above; the message names it.

    References:
      GShard: arXiv:2006.16668. DeepSeek-V3: arXiv:2412.19437.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> from te_jax import parallel
      >>> mesh = jax.make_mesh((1,), ("expert",), axis_types=(AxisType.Auto,))
      >>> def sizes(experts):
      ...     return parallel.plan_dispatch(experts, 4, axis_name="expert").group_sizes
      >>> experts = jnp.array([[0, 1], [1, 3]])
      >>> jax.shard_map(sizes, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))(experts).tolist()
      [1, 2, 0, 1]
    """
    axes, devices = sharding.mapped_axes(axis_name)
    experts = as_array("experts", experts)
    sharding.validate_split("experts", experts, axes, "pass each device its own tokens")
    if exchange not in (None, "all_gather", "all_to_all"):
        raise ValueError(f"exchange is {exchange!r}; it must be 'all_gather', 'all_to_all' or None")
    if buffer_factor is not None and not (is_finite_number(buffer_factor) and buffer_factor > 0):
        raise ValueError(f"buffer_factor is {buffer_factor!r}; it must be a positive number, or None for any load")
    if experts.ndim == 0 or not experts.size:
        raise ValueError(f"experts have shape {experts.shape}; they must be [*tokens, top_k], none of them 0")
    integers = {"num_experts": num_experts, "align": align, "capacity": 1 if capacity is None else capacity}
    for name, value in integers.items():
        if not (is_whole_number(value) and value >= 1):
            raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
    local, top_k = experts_of_device(num_experts, axis_name), experts.shape[-1]
    total = devices * experts.size
    num_rows = buffer_rows(experts.size // top_k, top_k, local, devices, align, capacity, buffer_factor)
    if max(total, num_rows) > _LARGEST:
        raise ValueError(
            f"experts have shape {experts.shape} on each of {devices} devices: {total} choices and {num_rows} rows are "
            "more than int32 can count; pass fewer tokens at once, or a buffer_factor"
        )
    permutation = ops.group_by_expert(experts, num_experts)
    return _plan(
        as_int32(experts),
        permutation,
        axes=axes,
        align=int(align),
        capacity=None if capacity is None else int(capacity),
        num_rows=num_rows,
        fits=num_rows >= most_rows(total, local, align, capacity),
        exchange=exchange or ("all_gather" if devices <= top_k else "all_to_all"),
    )


def dispatch(
    x: jax.typing.ArrayLike,
    weights: jax.typing.ArrayLike,
    plan: DispatchPlan,
    *,
    quantization: Quantization | None = None,
    implementation: native.Implementation | None = None,
) -> tuple[Array, Array]:
    r"""Sends the rows of tokens, with their weights, to the devices that hold their experts.

    What arrives is in order of experts, at the rows of `plan.group_sizes`; padding is zero. Weights travel as well, so
    that they can be multiplied into the experts' activations, before the last product (`te_jax.ops.permute_weights`).

    With a quantization x is quantized once, and rows travel as FP8 with float32 scales: 1 + 4/128 bytes a value with
    blocks. They are dequantized on arrival, to the dtype of x, which is exact if scales are powers of two; quantizing
    them there again gives the same values. With other scales it gives the same FP8 values, and scales that differ by a
    rounding to the dtype of x. The gradient travels in the dtype of x, and is that of no quantization.

    Args:
      x: [*tokens, features], this device's tokens; float32, bfloat16 or float16.
      weights: [*tokens, top_k], any float dtype, from `te_jax.ops.router`.
      plan: from `plan_dispatch`.
      quantization: how rows travel, scaled by row or in blocks of 1 × 128, such as
        `BlockScaling(power_of_two_scales=True).quantization("activation")`; None for as they are. Not for float16,
        whose range the rounded values may exceed.
      implementation: of the quantization, as in `te_jax.ops.quantize`.

    Returns:
      (rows, weights): [plan.num_rows, features] in the dtype of x, and [plan.num_rows] in that of the weights.

    Raises:
      ValueError: an argument breaks a rule above; the message names it.
      NotImplementedError: in forward mode; and for second derivatives with a quantization.
      te_jax.native.NativeUnavailableError: for implementation="native" where it cannot run.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> from te_jax import parallel
      >>> mesh = jax.make_mesh((1,), ("expert",), axis_types=(AxisType.Auto,))
      >>> def sent_and_returned(x, experts, weights):
      ...     plan = parallel.plan_dispatch(experts, 4, axis_name="expert")
      ...     rows, weights = parallel.dispatch(x, weights, plan)
      ...     return parallel.combine(rows * weights[:, None], plan)
      >>> f = jax.shard_map(sent_and_returned, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
      >>> f(jnp.array([[8.0], [4.0]]), jnp.array([[0, 1], [1, 3]]), jnp.array([[0.5, 0.25], [1.0, 1.0]])).tolist()
      [[6.0], [8.0]]
    """
    x, weights = as_array("x", x), as_array("weights", weights)
    _validate_plan(plan)
    choices = plan.permutation.rows.shape
    if x.dtype not in FLOATS:
        raise ValueError(f"x has dtype {x.dtype}; it must be {FLOAT_NAMES}: cast it")
    if x.shape[:-1] != choices[:-1]:
        raise ValueError(f"x has shape {x.shape}; the plan is one of tokens {choices[:-1]}, so x must be [*tokens, d]")
    if weights.shape != choices or not jnp.issubdtype(weights.dtype, jnp.floating):
        raise ValueError(
            f"weights have shape {weights.shape} and dtype {weights.dtype}; the plan is one of choices {choices}, and "
            "weights must be a float array of the same shape"
        )
    if quantization is not None:
        validate_quantization("quantization", quantization)
        if not facts_of(quantization.scaling).rows_travel:
            raise ValueError(
                f"quantization has scaling {quantization.scaling!r}; rows travel alone, so it must be 'row' or "
                "'block_1x128'"
            )
        if x.dtype == jnp.float16:
            raise ValueError(
                "x has dtype float16, whose range rounded values may exceed; use quantization=None, or bfloat16"
            )
    if plan.gathered is not None:
        tokens, weights = gather_tokens(x, weights, plan, quantization, implementation)
        return ops.permute(tokens, plan.gathered), ops.permute_weights(weights, plan.gathered)
    x, weights, plan = _together((x, weights), plan, "dispatch")
    return _jitted(_dispatch, 0)(_Wire.of(quantization, implementation), x, weights, plan)


def gather_tokens(
    x: Array,
    weights: Array,
    plan: DispatchPlan,
    quantization: Quantization | None,
    implementation: native.Implementation | None,
) -> tuple[Array, Array]:
    """([D, *tokens, features], [D, *tokens, top_k]): tokens of all devices and their weights, for `plan.gathered`.

    `dispatch` permutes these with exchange="all_gather", and takes the same arguments. Experts may as well gather their
    rows themselves, as one device's do.
    """
    x, weights, plan = _together((x, weights), plan, "dispatch")
    return _jitted(_gather, 0, 3)(_Wire.of(quantization, implementation), x, weights, plan.axis_name)


def combine(y: jax.typing.ArrayLike, plan: DispatchPlan) -> Array:
    """The experts' results for each token, back on its device and added up, in float32 and in the order of choices.

    Choices that were dropped, or that went nowhere, add zero. Rows of padding are not read, whatever they hold, and
    their gradient is zero. Results travel in the dtype of y; with exchange="all_gather" a device adds up its experts'
    results first, and these sums travel.

    Args:
      y: [plan.num_rows, features], float32, bfloat16 or float16; rows as those of `dispatch`, weighted.
      plan: from `plan_dispatch`.

    Returns:
      [*tokens, features] in the dtype of y.

    Raises:
      ValueError: an argument breaks a rule above; the message names it.
      NotImplementedError: in forward mode.

    Examples:
      See `dispatch`.
    """
    y = as_array("y", y)
    _validate_plan(plan)
    if y.dtype not in FLOATS:
        raise ValueError(f"y has dtype {y.dtype}; it must be {FLOAT_NAMES}: cast it")
    if y.ndim != 2 or y.shape[0] != plan.num_rows:
        raise ValueError(
            f"y has shape {y.shape}; the plan has {plan.num_rows} rows, so y must be [{plan.num_rows}, features]"
        )
    y, plan = _together((y,), plan, "combine")
    if plan.gathered is None:
        return _jitted(_combine)(y, plan)
    return combine_tokens(ops.unpermute(y, plan.gathered), plan)


def combine_tokens(y: Array, plan: DispatchPlan) -> Array:
    """[*tokens, features]: this device's part of y [D, *tokens, features], added up over all devices in float32."""
    y, plan = _together((y,), plan, "combine")
    return _jitted(sum_over_devices, 1)(y, plan.axis_name)


def experts_of_device(num_experts: int, axis_name: AxisName) -> int:
    """How many of the experts each device along the mesh axes holds."""
    devices = sharding.mapped_axes(axis_name)[1]
    if num_experts % devices:
        raise ValueError(
            f"num_experts is {num_experts}; it must be a multiple of the {devices} devices along {axis_name!r}"
        )
    return num_experts // devices


def buffer_rows(
    tokens: int, top_k: int, experts: int, devices: int, align: int, capacity: int | None, buffer_factor: float | None
) -> int:
    """`DispatchPlan.num_rows`, of as many tokens and experts on each of the devices."""
    most = most_rows(devices * tokens * min(top_k, experts), experts, align, capacity)
    if buffer_factor is None:
        return most
    return min(most, most_rows(math.ceil(buffer_factor * tokens * top_k), experts, align, capacity))


# ------------------------------------------------------------------------------------------------------- the plan


@functools.partial(
    jax.jit,
    static_argnames=("axes", "align", "capacity", "num_rows", "fits", "exchange"),
    inline=sharding.INLINE,
)
def _plan(
    experts: Array,
    permutation: ops.Permutation,
    *,
    axes: Axes,
    align: int,
    capacity: int | None,
    num_rows: int,
    fits: bool,
    exchange: Exchange,
) -> DispatchPlan:
    counts = lax.all_gather(permutation.group_sizes, axes)
    devices, num_experts = counts.shape
    me = lax.axis_index(axes)

    # What each expert takes, by the device that holds it, and where that begins on the device.
    totals = jnp.sum(counts, axis=0, dtype=jnp.int32).reshape(devices, num_experts // devices)
    taken = _taken(totals, align, capacity, None if fits else num_rows)
    sizes = -(-taken // align) * align
    starts, taken = _before(sizes, 1).reshape(1, num_experts), taken.reshape(1, num_experts)

    # Each device sends its first choices, as long as the expert has room.
    earlier = jnp.minimum(_before(counts, 0), taken)
    sent = jnp.minimum(counts, taken - earlier)
    segments = Segments(sent, _before(counts, 1), starts + earlier, axes, experts.size, num_rows)
    dropped = jnp.sum(counts[me] - sent[me], dtype=jnp.int32)

    valid = permutation.rows >= 0
    expert = jnp.where(valid, experts, 0)
    rank = permutation.rows - segments.origins[me][expert]
    goes = valid & (rank < sent[me][expert])
    if capacity is not None or not fits:
        choice = permutation.choices
        stays = goes.reshape(goes.size)[jnp.maximum(choice, 0)]
        permutation = permutation._replace(
            rows=jnp.where(goes, permutation.rows, -1), choices=jnp.where(stays, choice, -1), dropped=dropped
        )

    gathered = None
    if exchange == "all_gather":
        holder, place = expert // (num_experts // devices), segments.places[me][expert] + rank
        tables = (jnp.where(goes, holder, -1), place, permutation.choices.reshape(experts.shape))
        holder, place, choice = jnp.moveaxis(lax.all_gather(jnp.stack(tables), axes), 1, 0)
        rows, choices = jnp.where(holder == me, place, -1), _choices_of_all(choice, segments)
        gathered = ops.Permutation(rows, choices, sizes[me], dropped)
    return DispatchPlan(permutation, sizes[me], dropped, segments, gathered)


def _taken(totals: Array, align: int, capacity: int | None, num_rows: int | None) -> Array:
    """The number of choices [D, E/D] that each expert takes, where each device has num_rows rows.

    They are min(totals, capacity, m · align) with the largest m for which the rows suffice. With u = ⌈totals / align⌉
    in ascending order, Σ min(u, m) is the least of all Σ u[:i] + (n - i) m.
    """
    taken = totals if capacity is None else jnp.minimum(totals, capacity)
    if num_rows is None:
        return taken
    units, room = jnp.sort(-(-taken // align), axis=1), num_rows // align
    count = units.shape[1]
    largest = jnp.max((room - _before(units, 1)) // (count - jnp.arange(count, dtype=jnp.int32))[None], axis=1)
    largest = jnp.where(jnp.sum(units, axis=1, dtype=jnp.int32) <= room, room, largest)
    return jnp.minimum(taken, align * largest[:, None])


def _choices_of_all(choices: Array, segments: Segments) -> Array:
    """The choice [num_rows] in each row of this device, counted over all devices; -1 for padding.

    Args:
      choices: [D, *tokens, K], in the order in which each device has sorted them.
      segments: what each device sends to each expert.
    """
    devices, count = choices.shape[0], choices.size // choices.shape[0]
    sizes, places, origins = (
        of_experts(table, segments.axis_name) for table in (segments.sizes, segments.places, segments.origins)
    )
    covering, place = covered_by(sizes, places, segments.held_rows)
    device = jnp.maximum(covering, 0) // (sizes.shape[0] // devices)
    origin = jnp.where(covering >= 0, origins[covering] + place, 0)
    choice = choices.reshape(devices, count).at[device, origin].get(mode="promise_in_bounds")
    return jnp.where(covering >= 0, device * count + choice, -1)


def _before(counts: Array, axis: int) -> Array:
    """The sum of all entries before each one."""
    return jnp.cumsum(counts, axis=axis, dtype=jnp.int32) - counts


# --------------------------------------------------------------------------------------------------- what travels


@dataclasses.dataclass(frozen=True)
class _Wire:
    """How rows travel that are quantized: as bytes [*tokens, features], with float32 scales [*tokens, blocks]."""

    quantization: Quantization
    native: bool

    @classmethod
    def of(cls, quantization: Quantization | None, implementation: native.Implementation | None) -> _Wire | None:
        return None if quantization is None else cls(quantization, native.use_native(implementation))

    def quantize(self, x: Array) -> tuple[Array, Array]:
        tokens = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        array = quantize_parts(
            tokens, self.quantization, copies="data", implementation="native" if self.native else "reference"
        ).array
        assert array.data is not None
        assert array.scale_inv is not None
        scales = array.scale_inv[:, None] if facts_of(array.scaling).by_row else array.scale_inv.T
        return as_bytes(array.data).reshape(x.shape), scales.reshape(*x.shape[:-1], scales.shape[1])

    def dequantize(self, values: Array, scales: Array, dtype: jax.typing.DTypeLike) -> Array:
        features, width = values.shape[-1], facts_of(self.quantization.scaling).summed_block
        wide = lax.bitcast_convert_type(values, self.quantization.dtype).astype(jnp.float32)
        return (wide * jnp.repeat(scales, width or features, axis=-1)[..., :features]).astype(dtype)


# What custom_vjp wraps is a function of its own where it names values: policies see the names in a forward rule.


def _gather(wire: _Wire | None, x: Array, weights: Array, axes: Axes) -> tuple[Array, Array]:
    x = _named(all_gather(x, axes)) if wire is None else _gather_quantized(wire, x, axes)
    return x, _named(all_gather(weights, axes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def _gather_quantized(wire: _Wire, x: Array, axes: Axes) -> Array:
    return _gathered_quantized(wire, x, axes)


def _gathered_quantized(wire: _Wire, x: Array, axes: Axes) -> Array:
    values, scales = (_named(all_gather(array, axes)) for array in wire.quantize(x))
    return wire.dequantize(values, scales, x.dtype)


_gather_quantized.defvjp(
    lambda wire, x, axes: (_gathered_quantized(wire, differentiated_once(x, "te_jax.parallel.dispatch"), axes), None),
    lambda wire, axes, _, dtokens: (sum_over_devices(dtokens, axes),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dispatch(wire: _Wire | None, x: Array, weights: Array, plan: DispatchPlan) -> tuple[Array, Array]:
    return _dispatched(wire, x, weights, plan)


def _dispatched(wire: _Wire | None, x: Array, weights: Array, plan: DispatchPlan) -> tuple[Array, Array]:
    values, scales = (x, None) if wire is None else wire.quantize(x)
    sides = ops.permute_weights(weights, plan.permutation)[:, None]
    if scales is not None:  # in one exchange with the weights
        sides = jnp.concatenate([sides.astype(jnp.float32), ops.permute(scales, plan.permutation)], axis=1)
    values, sides = (_named(send(array, plan.segments)) for array in (ops.permute(values, plan.permutation), sides))
    rows = values if wire is None else wire.dequantize(values, sides[:, 1:], x.dtype)
    return rows, sides[:, 0].astype(weights.dtype)


def _dispatch_forward(wire: _Wire | None, x: Array, weights: Array, plan: DispatchPlan):
    if wire is not None:
        x = differentiated_once(x, "te_jax.parallel.dispatch")
    return _dispatched(wire, x, weights, plan), plan


def _dispatch_backward(wire: _Wire | None, plan: DispatchPlan, cotangents: tuple[Array, Array]):
    """The transpose of `_dispatch` without a quantization."""
    del wire
    drows, dweights = cotangents
    dweights = values_of_choices(send_back(dweights[:, None], plan.segments)[:, 0], plan.permutation)
    return _combine(drows, plan), dweights, None


_dispatch.defvjp(_dispatch_forward, _dispatch_backward)


def _combine(y: Array, plan: DispatchPlan) -> Array:
    return ops.unpermute(send_back(y, plan.segments), plan.permutation)


def _named(x: Array) -> Array:
    return checkpoint_name(x, _NAME)


# ----------------------------------------------------------------------------------------------------- arguments


def _validate_plan(plan: object) -> None:
    if not isinstance(plan, DispatchPlan):
        raise ValueError(f"plan is of type {type(plan).__name__}; it must come from te_jax.parallel.plan_dispatch")


def _together(x: tuple[PyTree, ...], plan: DispatchPlan, name: str) -> tuple[PyTree, ...]:
    """Operands that all vary over the same mesh axes: JAX then sums their gradients over others."""
    reason = (
        f"te_jax.parallel.{name} has derivatives in reverse mode (jax.grad, jax.vjp) only; for forward mode gather all "
        "tokens by jax.lax.all_gather"
    )
    return sharding.varying_together((*reverse_mode_only(x, reason), plan))


@functools.cache
def _jitted(function: Any, *static: int) -> Any:
    """Under jit even when called eagerly: shard_map does not run rules of derivatives then."""
    return jax.jit(function, static_argnums=static, inline=sharding.INLINE)
