"""Matrix products of rows that other devices have, and of sums that are split over devices.

The two products of tensor parallelism with sequence parallelism, for use inside `shard_map` and `pmap`. The gradient of
one is the other. What the backward pass reads has names for `jax.checkpoint` policies and offloading:

    te_collective_activation   the left operand, gathered or this device's part of it: in FP8 where there is a recipe,
                               1 byte a value, else in its dtype
    te_collective_kernel       the weights in FP8, 1 byte a value. Plain weights, and those that are passed in
                               quantized, have no name: as arguments they are there anyway
"""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from te_jax import native, sharding
from te_jax._core.arguments import as_dtype
from te_jax._core.types import BLOCK, FLOAT_NAMES, FLOATS, FP8_ALIGNMENT
from te_jax.ops import _fp8
from te_jax.ops._operands import as_array
from te_jax.parallel._collective.call import BLOCK_PRODUCT_ROWS, Call, Group, Residual, TransportName
from te_jax.parallel._collective.products import all_gather_products, reduce_scatter_product
from te_jax.quantized import QuantizedArray
from te_jax.recipe import DelayedScalingState, Recipe, Role
from te_jax.sharding import AxisName

Weight = jax.typing.ArrayLike | QuantizedArray


# fmt: off
@overload
def all_gather_matmul(
    x: jax.typing.ArrayLike | QuantizedArray, w: Weight, *, axis_name: AxisName,
    bias: jax.typing.ArrayLike | None = None, gather_axis: int = -2, recipe: Recipe | None = None,
    scaling_state: DelayedScalingState | None = None, transport: TransportName = "auto", bidirectional: bool = False,
    gather_result: Literal[False] = False, residual: Residual = "gathered",
    out_dtype: jax.typing.DTypeLike | None = None, timeout: float = 60.0,
    implementation: native.Implementation | None = None,
) -> Array: ...
@overload
def all_gather_matmul(
    x: jax.typing.ArrayLike | QuantizedArray, w: tuple[Weight, ...], *, axis_name: AxisName,
    bias: tuple[jax.typing.ArrayLike | None, ...] | None = None, gather_axis: int = -2, recipe: Recipe | None = None,
    scaling_state: tuple[DelayedScalingState, ...] | None = None, transport: TransportName = "auto",
    bidirectional: bool = False, gather_result: Literal[False] = False, residual: Residual = "gathered",
    out_dtype: jax.typing.DTypeLike | None = None, timeout: float = 60.0,
    implementation: native.Implementation | None = None,
) -> tuple[Array, ...]: ...
@overload
def all_gather_matmul(
    x: jax.typing.ArrayLike | QuantizedArray, w: Weight | tuple[Weight, ...], *, axis_name: AxisName,
    bias: jax.typing.ArrayLike | tuple[jax.typing.ArrayLike | None, ...] | None = None, gather_axis: int = -2,
    recipe: Recipe | None = None, scaling_state: DelayedScalingState | tuple[DelayedScalingState, ...] | None = None,
    transport: TransportName = "auto", bidirectional: bool = False, gather_result: bool = False,
    residual: Residual = "gathered", out_dtype: jax.typing.DTypeLike | None = None, timeout: float = 60.0,
    implementation: native.Implementation | None = None,
) -> Any: ...
# fmt: on
def all_gather_matmul(
    x: jax.typing.ArrayLike | QuantizedArray,
    w: Weight | tuple[Weight, ...],
    *,
    axis_name: AxisName,
    bias: jax.typing.ArrayLike | tuple[jax.typing.ArrayLike | None, ...] | None = None,
    gather_axis: int = -2,
    recipe: Recipe | None = None,
    scaling_state: DelayedScalingState | tuple[DelayedScalingState, ...] | None = None,
    transport: TransportName = "auto",
    bidirectional: bool = False,
    gather_result: bool = False,
    residual: Residual = "gathered",
    out_dtype: jax.typing.DTypeLike | None = None,
    timeout: float = 60.0,
    implementation: native.Implementation | None = None,
) -> Any:
    r"""y = all_gather(x) · w + bias, where the rows of other devices travel while those that are here are multiplied.

    For w split by columns, with x split along the sequence: the first half of a tensor-parallel layer. With g for the
    gradient of y,

        dx = reduce_scatter(g wᵀ),   dw = all_gather(x)ᵀ g,   dbias = Σ g

    With a recipe x is quantized first, and FP8 values travel. Scales are those of the gathered x, the same that
    `te_jax.ops.dense` would use on one device: scales of tensors agree over `axis_name`, scales of rows and blocks
    travel with their rows.

    Args:
      x: [*lead, S/D, *mid, K], this device's shard of a tensor whose dimension of size S is split over D devices;
        float32, bfloat16 or float16. Or a QuantizedArray of it with row_ndim = all but the last dimension, from
        `quantize(x, recipe.quantization("activation"), axis_name=axis_name)`; its own gradient is zero.
      w: [K, *N], this device's part, float32, bfloat16 or float16; or several in a tuple, which share one gather (q, k
        and v; gate and up). Without a recipe they are cast to the dtype of x. Or a QuantizedArray, from
        `quantize(w, recipe.quantization("kernel"), row_ndim=1)`, whose own gradient is zero.
      axis_name: the mesh axis of the devices, or several: the first varies slowest.
      bias: [*N], or None; a tuple of them where w is one.
      gather_axis: the dimension of x that is split, any but the last.
      recipe: how to quantize; None multiplies x and w as they are.
      scaling_state: for DelayedScaling: histories of largest magnitudes, the same on all devices; a tuple of them where
        w is one, of which the first says how x is quantized. Its cotangent is the next state, as in
        `te_jax.ops.dense`: what was observed is combined over all axes along which it varies, and over axis_name alone
        in `pmap` and with check_vma=False; there combine next states over other axes with `lax.pmax`. With
        check_vma=False take that gradient inside the shard_map: JAX adds up cotangents of devices outside.
      transport: "xla": one all-gather, then the product; nothing overlaps. "ring": shards are passed on by `ppermute`,
        this device's own is multiplied first. "p2p": copies between GPUs that run beside the products; it needs
        the extension, and a shard_map that maps all axes. "auto" is "p2p" on GPUs of one process where products last
        long enough to hide it, else "xla".
      bidirectional: whether a ring sends halves of the rows both ways; other transports take no notice.
      gather_result: also return the gathered x. Without recipe only.
      residual: what is kept of x for dw: the "gathered" operand, or this device's "shard" of it, which is D times
        smaller and gathered again in the backward pass.
      out_dtype: of y: float32, bfloat16 or float16; None is the dtype of x.
      timeout: seconds after which "p2p" gives up on a device that does not arrive.
      implementation: of FP8 products and quantization: None takes the native kernels where there are, else the
        reference; "native" or "reference" never fall back.

    Returns:
      y [*lead, S, *mid, *N], or a tuple of them where w is one; with gather_result (y, x [*lead, S, *mid, K]).
      Gradients have the dtypes of what they belong to.

    Raises:
      ValueError: for shapes, dtypes or parameters that break a rule above, naming the argument. FP8 needs K and each N
        in multiples of 16; block scaling needs rows, S/D times *mid, in multiples of 4, and in multiples of 128 where w
        is differentiated.
      NotImplementedError: for second derivatives in FP8 or over "p2p".
      te_jax.native.NativeUnavailableError: for implementation="native" where it cannot run.
    """
    several = isinstance(w, tuple | list)
    given = tuple(w) if isinstance(w, tuple | list) else (w,)
    names = [f"w[{i}]" for i in range(len(given))] if several else ["w"]
    x, weights = _operand("x", x), tuple(map(_operand, names, given))
    biases = _biases(bias, len(weights), several)
    group = Group.of(axis_name)
    axis = _axis("gather_axis", gather_axis, x)
    lead, mid = x.shape[:axis], x.shape[axis + 1 : -1]
    _validate_operands(x, weights, names, biases, recipe)
    call = Call(
        name="all_gather_matmul",
        axis_name=group.names,
        size=group.size,
        leading=math.prod(lead),
        rows=x.shape[axis] * math.prod(mid),
        recipe=recipe,
        transport=transport,
        bidirectional=bidirectional,
        residual=residual,
        gather_result=gather_result,
        x_dtype=np.dtype(x.dtype),
        out_dtype=_out_dtype(out_dtype, x),
        timeout=timeout,
        native=native.use_native(implementation),
    )
    _validate_recipe(call, x, weights, names, "gather_axis", group)
    states = _states(call, scaling_state, len(weights), several)
    outs = [weight.shape[1:] for weight in weights]
    flat, weights, biases = _canonical(call, x, (call.leading, call.rows), weights, biases)
    products, gathered = all_gather_products(call, flat, weights, biases, states)
    rows = (*lead, group.size * x.shape[axis], *mid)
    y: Any = tuple(product.reshape(*rows, *out) for product, out in zip(products, outs, strict=True))
    y = y if several else y[0]
    return (y, gathered.reshape(*rows, x.shape[-1])) if gather_result else y


def matmul_reduce_scatter(
    x: jax.typing.ArrayLike | QuantizedArray,
    w: Weight,
    *,
    axis_name: AxisName,
    bias: jax.typing.ArrayLike | None = None,
    scatter_axis: int = -2,
    recipe: Recipe | None = None,
    scaling_state: DelayedScalingState | None = None,
    transport: TransportName = "auto",
    bidirectional: bool = False,
    out_dtype: jax.typing.DTypeLike | None = None,
    timeout: float = 60.0,
    implementation: native.Implementation | None = None,
) -> Array:
    r"""y = reduce_scatter(x · w) + bias: rows for other devices travel while the next ones are multiplied.

    For w split by rows, with y split along the sequence: the second half of a tensor-parallel layer. With g for the
    gradient of y,

        dx = all_gather(g) wᵀ,   dw = xᵀ all_gather(g),   dbias = Σ g

    Partial sums are rounded to out_dtype once, to travel, and added up in float32; with transport="xla" they are added
    up in out_dtype, as `lax.psum_scatter` does. With a recipe x and w are quantized first, and in the backward pass
    FP8 values of g travel.

    Args:
      x: [*lead, S, *mid, K/D], this device's part of a tensor whose last dimension is split over D devices; float32,
        bfloat16 or float16. Or a QuantizedArray of it with row_ndim = all but the last dimension, from
        `quantize(x, recipe.quantization("activation"))`; its own gradient is zero.
      w: [K/D, *N], the same part of the weights, float32, bfloat16 or float16. Without a recipe it is cast to the dtype
        of x. Or a QuantizedArray, from `quantize(w, recipe.quantization("kernel"), row_ndim=1)`, whose own gradient is
        zero.
      axis_name: the mesh axis of the devices, or several: the first varies slowest.
      bias: [*N], the same on all devices, added once, after the sum; or None.
      scatter_axis: the dimension of x that the result is split along, any but the last; a multiple of D.
      recipe, scaling_state, transport, bidirectional, out_dtype, timeout, implementation: as in `all_gather_matmul`.

    Returns:
      y [*lead, S/D, *mid, *N]. Gradients have the dtypes of what they belong to.

    Raises:
      ValueError: for shapes, dtypes or parameters that break a rule above, naming the argument. FP8 needs K/D and N in
        multiples of 16; block scaling needs rows, S/D times *mid, in multiples of 4, and in multiples of 128 where w is
        differentiated.
      NotImplementedError: for second derivatives in FP8 or over "p2p".
      te_jax.native.NativeUnavailableError: for implementation="native" where it cannot run.
    """
    if isinstance(w, tuple | list):
        raise ValueError("w is a tuple; matmul_reduce_scatter takes one, for its products have one sum: pass an array")
    x, weight = _operand("x", x), _operand("w", w)
    (bias,) = _biases(bias, 1, False)
    group = Group.of(axis_name)
    axis = _axis("scatter_axis", scatter_axis, x)
    if x.shape[axis] % group.size:
        raise ValueError(
            f"x has shape {x.shape}; dimension {axis}, scatter_axis, must be a multiple of the {group.size} devices "
            f"along {axis_name!r}: pad it"
        )
    lead, size, mid = x.shape[:axis], x.shape[axis] // group.size, x.shape[axis + 1 : -1]
    _validate_operands(x, (weight,), ["w"], (bias,), recipe)
    call = Call(
        name="matmul_reduce_scatter",
        axis_name=group.names,
        size=group.size,
        leading=math.prod(lead),
        rows=size * math.prod(mid),
        recipe=recipe,
        transport=transport,
        bidirectional=bidirectional,
        residual="shard",
        gather_result=False,
        x_dtype=np.dtype(x.dtype),
        out_dtype=_out_dtype(out_dtype, x),
        timeout=timeout,
        native=native.use_native(implementation),
    )
    _validate_recipe(call, x, (weight,), ["w"], "scatter_axis", group)
    (state,) = _states(call, scaling_state, 1, False)
    x, (w,), (bias,) = _canonical(call, x, (call.leading, call.size, call.rows), (weight,), (bias,))
    y = reduce_scatter_product(call, x, w, bias, state)
    return y.reshape(*lead, size, *mid, *weight.shape[1:])


# ----------------------------------------------------------------------------------------------------------- validation


def _operand(name: str, x: Any) -> Array | QuantizedArray:
    return x if isinstance(x, QuantizedArray) else as_array(name, x)


def _biases(bias: Any, count: int, several: bool) -> tuple[Any, ...]:
    if not several:
        if isinstance(bias, tuple | list):
            raise ValueError("bias is a tuple, but w is not; pass an array")
        bias = (bias,)
    elif bias is None:
        bias = (None,) * count
    elif not isinstance(bias, tuple | list) or len(bias) != count:
        raise ValueError(f"w is a tuple of {count}, so bias must be one too, with None where there is none")
    return tuple(None if b is None else as_array(f"bias[{i}]" if several else "bias", b) for i, b in enumerate(bias))


def _out_dtype(dtype: Any, x: Array | QuantizedArray) -> np.dtype:
    return as_dtype("out_dtype is", x.dtype if dtype is None else dtype, FLOATS, FLOAT_NAMES)


def _axis(name: str, axis: Any, x: Array | QuantizedArray) -> int:
    if x.ndim < 2:
        raise ValueError(f"x has shape {x.shape}; it needs a dimension before the last, which is summed over")
    integer = isinstance(axis, int | np.integer) and not isinstance(axis, bool)
    if not integer or not -x.ndim <= axis < x.ndim or axis % x.ndim == x.ndim - 1:
        raise ValueError(
            f"{name} is {axis!r}; for x of shape {x.shape} it must be an integer that names a dimension before the "
            "last, which is summed over"
        )
    return int(axis) % x.ndim


def _validate_operands(x, weights: tuple[Any, ...], names: list[str], biases: tuple[Any, ...], recipe) -> None:
    if not weights:
        raise ValueError("w is an empty tuple; pass one array at least")
    for name, operand in (("x", x), *zip(names, weights, strict=True)):
        for leaf in jax.tree.leaves(operand):
            if taken := set(sharding.axes_of_type(leaf)):
                raise ValueError(
                    f"{name} is split over {sorted(taken)}, Explicit axes that shard_map left out; let it map them as "
                    "well, or make them Auto"
                )
    for name, array in (("x", x), *zip(names, weights, strict=True)):
        if array.dtype not in FLOATS:
            raise ValueError(f"{name} has dtype {array.dtype}; it must be {FLOAT_NAMES}: cast it")
        if isinstance(array, QuantizedArray) and recipe is None:
            raise ValueError(
                f"recipe is None, but {name} is a QuantizedArray; name its recipe or pass {name}.dequantize()"
            )
    if 0 in x.shape:
        raise ValueError(f"x has shape {x.shape}; no dimension may be 0: leave out a call that exchanges nothing")
    for name, weight, bias in zip(names, weights, biases, strict=True):
        if weight.ndim < 2 or weight.shape[0] != x.shape[-1]:
            raise ValueError(
                f"{name} has shape {weight.shape}; it must be [{x.shape[-1]}, …], with the last dimension of x, which "
                f"has shape {x.shape}, and at least one of its own"
            )
        if 0 in weight.shape:
            raise ValueError(f"{name} has shape {weight.shape}; no dimension may be 0: leave out a weight of nothing")
        if bias is None:
            continue
        label = name.replace("w", "bias")
        if bias.dtype not in FLOATS:
            raise ValueError(f"{label} has dtype {bias.dtype}; it must be {FLOAT_NAMES}: cast it")
        if bias.shape != weight.shape[1:]:
            raise ValueError(
                f"{label} has shape {bias.shape}; for {name} of shape {weight.shape} it must be {weight.shape[1:]}"
            )


def _validate_recipe(call: Call, x, weights: tuple[Any, ...], names: list[str], axis: str, group: Group) -> None:
    recipe = call.recipe
    if recipe is None:
        return
    if not isinstance(recipe, Recipe):
        raise ValueError(f"recipe is {recipe!r}; it must be a Recipe, such as te_jax.recipe.CurrentScaling(), or None")
    if call.gather_result:
        raise ValueError(
            "gather_result is True with a recipe: only FP8 values are gathered; pass several weights in a tuple to "
            "share one gather, or use recipe=None"
        )
    for name, weight in zip(names, weights, strict=True):
        for what, size in ((f"{weight.shape[0]} in", weight.shape[0]), ("out", math.prod(weight.shape[1:]))):
            if size % FP8_ALIGNMENT:
                raise ValueError(
                    f"{name} has shape {weight.shape}, {size} features {what.split()[-1]} on this device; FP8 products "
                    f"need a multiple of {FP8_ALIGNMENT}: pad them or use recipe=None"
                )
    if call.scaling == "block" and call.rows % BLOCK_PRODUCT_ROWS:
        raise ValueError(
            f"x has shape {x.shape}, {call.rows} rows for each device along {axis}; block scaling needs a multiple of "
            f"{BLOCK_PRODUCT_ROWS}: pad them, or use CurrentScaling or RowwiseScaling"
        )
    if isinstance(x, QuantizedArray):
        _validate_quantized("x", x, x.ndim - 1, recipe, "activation", "data")
        # Scales of rows and blocks travel with them; not so those of features, which the gradient of w reads.
        shared = {"tensor": x.scale_inv, "row": x.transposed_scale_inv}.get(call.scaling)
        differing = sharding.varying_axes(shared) & set(group.names)
        if call.name == "all_gather_matmul" and differing:
            kind = "tensors" if call.scaling == "tensor" else "features, of the transposed copy,"
            raise ValueError(
                f"x has another scale on each device along {sorted(differing)}; scales of {kind} must agree: quantize "
                "it with axis_name"
            )
    for name, weight in zip(names, weights, strict=True):
        if isinstance(weight, QuantizedArray):
            _validate_quantized(name, weight, 1, recipe, "kernel", "transposed")


def _states(call: Call, states: Any, count: int, several: bool) -> tuple[DelayedScalingState | None, ...]:
    if not several:
        if isinstance(states, tuple | list):
            raise ValueError("scaling_state is a tuple, but w is not; pass a DelayedScalingState")
        states = (states,)
    elif states is None:
        states = (None,) * count
    elif not isinstance(states, tuple | list) or len(states) != count:
        raise ValueError(f"w is a tuple of {count}, so scaling_state must be one too, with a state for each")
    for i, state in enumerate(states):
        name = f"scaling_state[{i}]" if several else "scaling_state"
        if call.recipe is not None:
            _fp8.validate_state(call.recipe, state, name)
        elif state is not None:
            raise ValueError(f"{name} is given, but recipe is None; only DelayedScaling has a state")
        if differing := sharding.varying_axes(state) & set(call.axis_name):
            raise ValueError(
                f"{name} differs from device to device along {sorted(differing)}; scales of tensors must agree: pass "
                "it into shard_map whole, with PartitionSpec()"
            )
    return tuple(states)


def _validate_quantized(name: str, x: QuantizedArray, row_ndim: int, recipe: Recipe, role: Role, copy: str) -> None:
    if getattr(x, copy) is None:
        raise ValueError(f"{name} has no {copy} copy, which the product reads; quantize it with copies='both'")
    if (x.row_ndim, x.row_ndim + x.col_ndim) != (row_ndim, x.ndim):
        raise ValueError(
            f"{name} was quantized as {x.row_ndim} rows and {x.col_ndim} cols, shape {x.shape}; quantize it with "
            f"row_ndim={row_ndim}"
        )
    expected = recipe.quantization(role)
    if (x.scaling, x.transposed_scaling) != (expected.scaling, expected.transposed_scaling):
        raise ValueError(
            f"{name} has {x.scaling!r} and {x.transposed_scaling!r} scaling, but recipe is {recipe!r}; quantize it "
            f'with recipe.quantization("{role}")'
        )
    if getattr(x, copy).dtype != expected.dtype:
        raise ValueError(
            f"{name} has {getattr(x, copy).dtype} values, but recipe is {recipe!r}; quantize it with "
            f'recipe.quantization("{role}")'
        )


# ----------------------------------------------------------------------------------------------------- canonical shapes


def _canonical(call: Call, x, sizes: tuple[int, ...], weights: tuple[Any, ...], biases: tuple[Any, ...]) -> Any:
    """x [*sizes, K], weights [K, N] and biases [N] in float32, in which they are added and their gradients summed, all
    varying over the same mesh axes: gradients are then summed outside, as those of JAX's own operations are. Quantized
    arrays are matrices."""
    inner = x.shape[-1]
    x = _matrix(x, math.prod(sizes), inner) if isinstance(x, QuantizedArray) else x.reshape(*sizes, inner)
    weights = tuple(
        _matrix(weight, inner, math.prod(weight.shape[1:]))
        if isinstance(weight, QuantizedArray)
        else weight.reshape(inner, math.prod(weight.shape[1:]))
        for weight in weights
    )
    biases = tuple(None if bias is None else bias.astype(jnp.float32).reshape(bias.size) for bias in biases)
    operands = (x, weights, biases)
    return sharding.varying_together(operands, sharding.tracked_axes(call.axis_name))


def _matrix(x: QuantizedArray, rows: int, cols: int) -> QuantizedArray:
    """The same with one dimension of rows and one of cols. Blocks divide the last dimension of each group."""

    def scales(scale_inv: Array | None, scaling: str, outer: int, summed: int) -> Array | None:
        if scale_inv is None or scaling == "tensor":
            return scale_inv
        if scaling == "row":
            return scale_inv.reshape(outer)
        blocks = -(-summed // BLOCK)
        return scale_inv.reshape((blocks, outer) if scaling == "block_1x128" else (-(-outer // BLOCK), blocks))

    return QuantizedArray(
        None if x.data is None else x.data.reshape(rows, cols),
        scales(x.scale_inv, x.scaling, rows, cols),
        None if x.transposed is None else x.transposed.reshape(cols, rows),
        scales(x.transposed_scale_inv, x.transposed_scaling, cols, rows),
        1,
        1,
        x.scaling,
        x.transposed_scaling,
        x.dtype,
    )
