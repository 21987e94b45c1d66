"""Matrix products of rows that other devices have, and of sums that are split over devices.

The two products of tensor parallelism with sequence parallelism, for use inside `shard_map` and `pmap`. The gradient of
one is the other. What the backward pass reads has names for `jax.checkpoint` policies and offloading:

    te_collective_activation   the left operand, gathered or this device's part of it: in FP8 where there is a recipe,
                               1 byte a value, else in its dtype
    te_collective_kernel       the weights in FP8, 1 byte a value. Plain weights, and those that are passed in
                               quantized, have no name: as arguments they are there anyway
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values

from te_jax import native
from te_jax.ops.gemm import gemm
from te_jax.ops.quantize import quantize
from te_jax.parallel import _p2p, _ring, _xla
from te_jax.parallel._exchange import Exchange, Operand, Scaling, Transport, all_gather, dot, quantized, varying_axes
from te_jax.quantized import QuantizedArray
from te_jax.recipe import BLOCK, DelayedScaling, Product, Recipe, Role

AxisName = str | tuple[str, ...]
TransportName = Literal["auto", "xla", "ring", "p2p"]
Residual = Literal["gathered", "shard"]
Weight = Array | QuantizedArray

_TRANSPORTS = ("auto", "xla", "ring", "p2p")
_FLOATS = tuple(np.dtype(dtype) for dtype in (jnp.float32, jnp.bfloat16, jnp.float16))
_FLOAT_NAMES = "float32, bfloat16 or float16"
_ALIGNMENT = 16  # values of one byte in what FP8 matrix products read at once
_BLOCK_PRODUCT_ROWS = 4  # products of blocks want multiples of this many rows
_NAMES = {"activation": "te_collective_activation", "kernel": "te_collective_kernel"}


def all_gather_matmul(
    x: Array | QuantizedArray,
    w: Weight | tuple[Weight, ...],
    *,
    axis_name: AxisName,
    bias: Array | tuple[Array | None, ...] | None = None,
    gather_axis: int = -2,
    recipe: Recipe | None = None,
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
      transport: "xla": one all-gather, then the product; nothing overlaps. "ring": shards are passed on by `ppermute`,
        this device's own is multiplied first. "p2p": copies between GPUs that run beside the products; it needs
        the extension, and a shard_map that maps all axes. "auto" is "p2p" on GPUs of one process where products last
        long enough to hide it, else "xla".
      bidirectional: a ring sends halves of the rows both ways.
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
      te_jax.native.NativeUnavailableError: for implementation="native" where it cannot run.
    """
    several = isinstance(w, tuple | list)
    weights: tuple[Any, ...] = tuple(_array(weight) for weight in (w if isinstance(w, tuple | list) else (w,)))
    biases = _biases(bias, len(weights), several)
    x = _array(x)
    group = _Group.of(axis_name)
    axis = _axis("gather_axis", gather_axis, x)
    lead, mid = x.shape[:axis], x.shape[axis + 1 : -1]
    names = [f"w[{i}]" for i in range(len(weights))] if several else ["w"]
    _validate_operands(x, weights, names, biases, recipe)
    call = _Call.of(
        "all_gather_matmul", group, x, math.prod(lead), x.shape[axis] * math.prod(mid), recipe, transport,
        bidirectional, residual, gather_result, out_dtype, timeout, implementation,
    )  # fmt: skip
    _validate_recipe(call, x, weights, names, "gather_axis", group)
    outs = [weight.shape[1:] for weight in weights]
    operands = _canonical(call, x, (call.leading, call.rows), weights, biases)
    products, gathered = _all_gather_matmul(call, *operands)
    rows = (*lead, group.size * x.shape[axis], *mid)
    y: Any = tuple(product.reshape(*rows, *out) for product, out in zip(products, outs, strict=True))
    y = y if several else y[0]
    return (y, gathered.reshape(*rows, x.shape[-1])) if gather_result else y


def matmul_reduce_scatter(
    x: Array | QuantizedArray,
    w: Weight,
    *,
    axis_name: AxisName,
    bias: Array | None = None,
    scatter_axis: int = -2,
    recipe: Recipe | None = None,
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
      recipe, transport, bidirectional, out_dtype, timeout, implementation: as in `all_gather_matmul`.

    Returns:
      y [*lead, S/D, *mid, *N]. Gradients have the dtypes of what they belong to.

    Raises:
      ValueError: for shapes, dtypes or parameters that break a rule above, naming the argument. FP8 needs K/D and N in
        multiples of 16; block scaling needs rows, S/D times *mid, in multiples of 4, and in multiples of 128 where w is
        differentiated.
      te_jax.native.NativeUnavailableError: for implementation="native" where it cannot run.
    """
    if isinstance(w, tuple | list):
        raise ValueError("w is a tuple; matmul_reduce_scatter takes one, for its products have one sum: pass an array")
    x, weight = _array(x), _array(w)
    (bias,) = _biases(bias, 1, False)
    group = _Group.of(axis_name)
    axis = _axis("scatter_axis", scatter_axis, x)
    if x.shape[axis] % group.size:
        raise ValueError(
            f"x has shape {x.shape}; dimension {axis}, scatter_axis, must be a multiple of the {group.size} devices "
            f"along {axis_name!r}: pad it"
        )
    lead, size, mid = x.shape[:axis], x.shape[axis] // group.size, x.shape[axis + 1 : -1]
    _validate_operands(x, (weight,), ["w"], (bias,), recipe)
    call = _Call.of(
        "matmul_reduce_scatter", group, x, math.prod(lead), size * math.prod(mid), recipe, transport, bidirectional,
        "shard", False, out_dtype, timeout, implementation,
    )  # fmt: skip
    _validate_recipe(call, x, (weight,), ["w"], "scatter_axis", group)
    x, (w,), (bias,) = _canonical(call, x, (call.leading, call.size, call.rows), (weight,), (bias,))
    y = _matmul_reduce_scatter(call, x, w, bias)
    return y.reshape(*lead, size, *mid, *weight.shape[1:])


# ------------------------------------------------------------------------------------------------- the static arguments


class _Group(NamedTuple):
    """The devices that communicate."""

    names: tuple[str, ...]
    size: int

    @classmethod
    def of(cls, axis_name: Any) -> _Group:
        names = (axis_name,) if isinstance(axis_name, str) else axis_name
        if (
            not isinstance(names, tuple | list)
            or not names
            or not all(isinstance(name, str) for name in names)
            or len(set(names)) < len(names)
        ):
            raise ValueError(f"axis_name is {axis_name!r}; it must be the name of a mesh axis, or a tuple of several")
        size = 1
        for name in names:
            try:
                size *= lax.axis_size(name)
            except NameError:
                raise ValueError(
                    f"axis_name is {axis_name!r}, but no axis {name!r} is mapped here; call it inside shard_map or "
                    "pmap over a mesh with that axis"
                ) from None
        return cls(tuple(names), size)


@dataclasses.dataclass(frozen=True)
class _Call:
    """The static arguments, together: hashable.

    Attributes:
      leading: A, the product of the dimensions before the one that is gathered or scattered.
      rows: R, those of one device: its part of that dimension times the ones between it and the last.
      x_dtype: of x, or of what it stands for.
      out_dtype: of y.
    """

    name: str
    axis_name: tuple[str, ...]
    size: int
    leading: int
    rows: int
    recipe: Recipe | None
    transport: str
    bidirectional: bool
    residual: str
    gather_result: bool
    x_dtype: np.dtype
    out_dtype: np.dtype
    timeout: float
    native: bool

    @classmethod
    def of(
        cls, name: str, group: _Group, x, leading: int, rows: int, recipe, transport, bidirectional, residual,
        gather_result, out_dtype, timeout, implementation,
    ) -> _Call:  # fmt: skip
        if transport not in _TRANSPORTS:
            raise ValueError(f"transport is {transport!r}; it must be one of {_TRANSPORTS}")
        if residual not in ("gathered", "shard"):
            raise ValueError(f"residual is {residual!r}; it must be 'gathered' or 'shard'")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
            raise ValueError(f"timeout is {timeout!r}; it must be a positive number of seconds")
        dtype = np.dtype(x.dtype if out_dtype is None else out_dtype)
        if dtype not in _FLOATS:
            raise ValueError(f"out_dtype is {dtype}; it must be {_FLOAT_NAMES}")
        return cls(
            name, group.names, group.size, leading, rows, recipe, transport, bool(bidirectional), residual,
            bool(gather_result), np.dtype(x.dtype), dtype, float(timeout), native.use_native(implementation),
        )  # fmt: skip

    @property
    def implementation(self) -> native.Implementation:
        return "native" if self.native else "reference"

    @property
    def scaling(self) -> Scaling:
        """Of all operands of all products."""
        return "none" if self.recipe is None else _scaling(self.recipe.scalings["activation"][0])

    @property
    def fp8(self) -> Recipe:
        assert self.recipe is not None
        return self.recipe

    def is_fast(self, product: Product) -> bool:
        return self.recipe is not None and product in self.recipe.fast_accumulation

    def exchange(self, product: Product) -> Exchange:
        return Exchange(
            self.axis_name,
            self.size,
            self.out_dtype if product == "forward" else self.x_dtype,
            self.is_fast(product),
            self.native,
            self.bidirectional,
            self.timeout,
            self.name,
        )


def _scaling(scaling: str) -> Scaling:
    return cast(Scaling, scaling.partition("_")[0])


# ----------------------------------------------------------------------------------------------------------- validation


def _array(x: Any) -> Any:
    return x if isinstance(x, QuantizedArray) else jnp.asarray(x)


def _biases(bias: Any, count: int, several: bool) -> tuple[Any, ...]:
    if not several:
        if isinstance(bias, tuple | list):
            raise ValueError("bias is a tuple, but w is not; pass an array")
        bias = (bias,)
    elif bias is None:
        bias = (None,) * count
    elif not isinstance(bias, tuple | list) or len(bias) != count:
        raise ValueError(f"w is a tuple of {count}, so bias must be one too, with None where there is none")
    return tuple(None if b is None else jnp.asarray(b) for b in bias)


def _axis(name: str, axis: Any, x: Array | QuantizedArray) -> int:
    if x.ndim < 2:
        raise ValueError(f"x has shape {x.shape}; it needs a dimension before the last, which is summed over")
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer) or not -x.ndim <= axis < x.ndim:
        raise ValueError(f"{name} is {axis!r}; for x of shape {x.shape} it must be in [{-x.ndim}, {x.ndim - 2}]")
    if axis % x.ndim == x.ndim - 1:
        raise ValueError(f"{name} is {axis}, the last dimension of x, which is summed over; it must be another one")
    return int(axis) % x.ndim


def _validate_operands(x, weights: tuple[Any, ...], names: list[str], biases: tuple[Any, ...], recipe) -> None:
    if not weights:
        raise ValueError("w is an empty tuple; pass one array at least")
    for name, operand in (("x", x), *zip(names, weights, strict=True)):
        for sharding in (jax.typeof(leaf).sharding for leaf in jax.tree.leaves(operand)):
            if taken := {axis for entry in sharding.spec for axis in native.axes_of_entry(entry)}:
                raise ValueError(
                    f"{name} is split over {sorted(taken)}, Explicit axes that shard_map left out; let it map them as "
                    "well, or make them Auto"
                )
    for name, array in (("x", x), *zip(names, weights, strict=True)):
        if array.dtype not in _FLOATS:
            raise ValueError(f"{name} has dtype {array.dtype}; it must be {_FLOAT_NAMES}: cast it")
        if isinstance(array, QuantizedArray) and recipe is None:
            raise ValueError(
                f"recipe is None, but {name} is a QuantizedArray; name its recipe or pass {name}.dequantize()"
            )
    if 0 in x.shape:
        raise ValueError(f"x has shape {x.shape}; no dimension may be 0: there is nothing to exchange")
    for name, weight, bias in zip(names, weights, biases, strict=True):
        if weight.ndim < 2 or weight.shape[0] != x.shape[-1]:
            raise ValueError(
                f"{name} has shape {weight.shape}; it must be [{x.shape[-1]}, …], with the last dimension of x, which "
                f"has shape {x.shape}, and at least one of its own"
            )
        if 0 in weight.shape:
            raise ValueError(f"{name} has shape {weight.shape}; no dimension may be 0")
        if bias is None:
            continue
        label = name.replace("w", "bias")
        if bias.dtype not in _FLOATS:
            raise ValueError(f"{label} has dtype {bias.dtype}; it must be {_FLOAT_NAMES}: cast it")
        if bias.shape != weight.shape[1:]:
            raise ValueError(
                f"{label} has shape {bias.shape}; for {name} of shape {weight.shape} it must be {weight.shape[1:]}"
            )


def _validate_recipe(call: _Call, x, weights: tuple[Any, ...], names: list[str], axis: str, group: _Group) -> None:
    recipe = call.recipe
    if recipe is None:
        return
    if not isinstance(recipe, Recipe):
        raise ValueError(f"recipe is {recipe!r}; it must be a Recipe, such as te_jax.recipe.CurrentScaling(), or None")
    if isinstance(recipe, DelayedScaling):
        raise ValueError(
            "recipe is DelayedScaling, whose state collective products do not carry; use CurrentScaling, whose scales "
            "follow from the tensors themselves"
        )
    if call.gather_result:
        raise ValueError(
            "gather_result is True with a recipe: only FP8 values are gathered; pass several weights in a tuple to "
            "share one gather, or use recipe=None"
        )
    for name, weight in zip(names, weights, strict=True):
        for what, size in ((f"{weight.shape[0]} in", weight.shape[0]), ("out", math.prod(weight.shape[1:]))):
            if size % _ALIGNMENT:
                raise ValueError(
                    f"{name} has shape {weight.shape}, {size} features {what.split()[-1]} on this device; FP8 products "
                    f"need a multiple of {_ALIGNMENT}: pad them or use recipe=None"
                )
    if call.scaling == "block" and call.rows % _BLOCK_PRODUCT_ROWS:
        raise ValueError(
            f"x has shape {x.shape}, {call.rows} rows for each device along {axis}; block scaling needs a multiple of "
            f"{_BLOCK_PRODUCT_ROWS}: pad them, or use CurrentScaling or RowwiseScaling"
        )
    if isinstance(x, QuantizedArray):
        _validate_quantized("x", x, x.ndim - 1, recipe, "activation", "data")
        if call.name == "all_gather_matmul" and call.scaling == "tensor":
            assert x.scale_inv is not None
            if differing := varying_axes(x.scale_inv) & set(group.names):
                raise ValueError(
                    f"x has another scale on each device along {sorted(differing)}; scales of tensors must agree: "
                    "quantize it with axis_name"
                )
    for name, weight in zip(names, weights, strict=True):
        if isinstance(weight, QuantizedArray):
            _validate_quantized(name, weight, 1, recipe, "kernel", "transposed")


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


def _validate_rows_of_blocks(call: _Call) -> None:
    """Where tokens of several shards are summed over, blocks of them must not reach over shards."""
    if call.scaling == "block" and call.leading * call.size > 1 and call.rows % BLOCK:
        raise ValueError(
            f"x has {call.rows} rows for each device; the gradient of w with block scaling needs a multiple of {BLOCK}:"
            " pad them, or use CurrentScaling or RowwiseScaling"
        )


# ----------------------------------------------------------------------------------------------------- canonical shapes


def _canonical(call: _Call, x, sizes: tuple[int, ...], weights: tuple[Any, ...], biases: tuple[Any, ...]) -> Any:
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
    tracked = {
        name for name in call.axis_name if jax.typeof(lax.axis_index(name)).manual_axis_type.varying
    }  # not in pmap, nor with check_vma=False
    axes = varying_axes(operands) | tracked

    def vary(x: Array) -> Array:
        missing = tuple(sorted(axes - varying_axes(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, operands)


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


def _left(x: QuantizedArray, *sizes: int) -> Operand:
    """The data [prod(sizes), K] of a quantized matrix as a left side [*sizes, K]."""
    data, scale_inv, scaling = x.data, x.scale_inv, _scaling(x.scaling)
    assert data is not None
    assert scale_inv is not None
    if scaling == "row":
        scale_inv = scale_inv.reshape(sizes)
    if scaling == "block":
        scale_inv = jnp.moveaxis(scale_inv.reshape(scale_inv.shape[0], *sizes), 0, -2)
    return Operand(data.reshape(*sizes, data.shape[-1]), scale_inv, scaling)


def _transposed(x: QuantizedArray) -> Operand:
    """The transposed copy of a quantized matrix, which products over its rows read, as either side."""
    assert x.transposed is not None
    return Operand(x.transposed, x.transposed_scale_inv, _scaling(x.transposed_scaling))


# ------------------------------------------------------------------------------------------------------------- products


# Under jit even when called eagerly: shard_map does not run rules of derivatives that tell apart what is asked for.
@functools.partial(jax.jit, static_argnums=0, inline=native.INLINE)
def _all_gather_matmul(call: _Call, x, weights, biases) -> Any:
    return _gathered_products(call, x, weights, biases)


@functools.partial(jax.jit, static_argnums=0, inline=native.INLINE)
def _matmul_reduce_scatter(call: _Call, x, weight, bias) -> Any:
    return _scattered_product(call, x, weight, bias)


class _Residuals(NamedTuple):
    """What is kept for the backward pass. What is not needed is there without elements: JAX may run the backward pass
    of one choice of derivatives with the tree of another's residuals, so only shapes may depend on the choice."""

    wanted: tuple[Array, ...]  # gradients of x, of each of the weights and of each bias: (1, 0) for yes, (0, 0) for no
    dtypes: _Dtypes
    activation: Array  # what dw reads of x
    activation_scale_inv: Array | None
    weights: tuple[Operand, ...]  # right sides that sum over N


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Dtypes:
    """Of the weights."""

    weights: tuple[np.dtype, ...]


class _Wanted(NamedTuple):
    """Which gradients are asked for."""

    x: bool
    weights: tuple[bool, ...]
    biases: tuple[bool, ...]

    @classmethod
    def of(cls, x, weights, biases) -> _Wanted:
        """From the operands of a forward rule. What was quantized before has no gradient."""

        def perturbed(operand) -> bool:
            leaves = jax.tree.leaves(operand)
            return not isinstance(operand, QuantizedArray) and any(leaf.perturbed for leaf in leaves)

        return cls(perturbed(x), tuple(map(perturbed, weights)), tuple(map(perturbed, biases)))

    def as_flags(self) -> tuple[Array, ...]:
        return tuple(jnp.zeros((int(flag), 0), jnp.int8) for flag in (self.x, *self.weights, *self.biases))

    @classmethod
    def from_flags(cls, flags: tuple[Array, ...]) -> _Wanted:
        first, *rest = (len(flag) == 1 for flag in flags)
        return cls(first, tuple(rest[: len(rest) // 2]), tuple(rest[len(rest) // 2 :]))


_NOTHING = _Wanted(False, (), ())


def _all_gather_gemm(call: _Call, product: Product, x: Operand, weights, biases, extras=(), *, keep_gathered=False):
    exchange = call.exchange(product)
    transport = _transport(call, exchange, "all_gather", (x,), weights)
    return transport.all_gather_gemm(exchange, x, weights, biases, extras, keep_gathered)


def _gemm_reduce_scatter(call: _Call, product: Product, xs, weights, bias: Array | None) -> Array:
    exchange = call.exchange(product)
    transport = _transport(call, exchange, "reduce_scatter", xs, weights)
    return transport.gemm_reduce_scatter(exchange, xs, weights, bias)


def _transport(
    call: _Call, exchange: Exchange, kind: Literal["all_gather", "reduce_scatter"], xs, weights
) -> Transport:
    name = call.transport
    if call.size == 1:
        name = "ring"  # without any step it is the product alone
    elif name == "auto":
        name = "p2p" if _p2p.is_worthwhile(exchange, xs, weights, gathers=kind == "all_gather") else "xla"
    return cast(Transport, {"xla": _xla, "ring": _ring, "p2p": _p2p}[name])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered_products(call: _Call, x, weights: tuple[Any, ...], biases: tuple[Any, ...]):
    """(products [A, D·R, N], gathered x [A, D·R, K] where it is a result)"""
    return _gathered_products_and_residuals(call, x, weights, biases, _NOTHING)[0]


def _gathered_products_forward(call: _Call, *operands):
    x, weights, biases = custom_vjp_primal_tree_values(operands)
    return _gathered_products_and_residuals(call, x, weights, biases, _Wanted.of(*operands))


def _gathered_products_and_residuals(call: _Call, x, weights, biases, wanted: _Wanted):
    dtypes = _Dtypes(tuple(np.dtype(weight.dtype) for weight in weights))
    for_w = any(wanted.weights)
    keep = for_w and call.residual == "gathered"
    if call.recipe is None:
        rights = tuple(Operand(weight.astype(x.dtype), summed_first=True) for weight in weights)
        products, gathered, _ = _all_gather_gemm(
            call, "forward", Operand(x), rights, biases, keep_gathered=keep or call.gather_result
        )
        activation, scale_inv = gathered if keep else x if for_w else _absent(x.dtype), None
        kept = tuple(Operand(weight if wanted.x else _absent(weight.dtype)) for weight in weights)
        results = products, gathered if call.gather_result else None
        return results, _residuals(wanted, dtypes, activation, scale_inv, kept)

    rows, cols = {"rows": call.axis_name}, {"cols": call.axis_name}
    # One scale for all of the tensor: the gathered codes are transposed where that is read.
    travelling = for_w and call.scaling != "tensor"
    x8, _ = _quantize(call, "activation", x, rows, data=True, transposed=travelling, gathered=True)
    if for_w:
        _validate_rows_of_blocks(call)
    quantized_weights = [
        _quantize(call, "kernel", weight, cols, data=wanted.x, transposed=True)[0] for weight in weights
    ]
    products, gathered, extras = _all_gather_gemm(
        call,
        "forward",
        _left(x8, call.leading, call.rows),
        tuple(_transposed(weight) for weight in quantized_weights),
        biases,
        _travelling(call, x8) if travelling and keep else (),
        keep_gathered=keep and not travelling,
    )
    assert x8.data is not None
    if not for_w:
        activation, scale_inv = _absent(x8.data.dtype), _absent(jnp.float32)
    elif travelling:
        activation, scale_inv = (*(extras if keep else _travelling(call, x8)), x8.transposed_scale_inv)[:2]
    else:
        activation, scale_inv = gathered if keep else _left(x8, call.leading, call.rows).data, x8.scale_inv
    kept = tuple(
        _kept_weight(weight, weight8, wanted.x) for weight, weight8 in zip(weights, quantized_weights, strict=True)
    )
    return (products, None), _residuals(wanted, dtypes, activation, scale_inv, kept)


def _gathered_products_backward(call: _Call, residuals: _Residuals, cotangents):
    dys, dgathered = cotangents
    wanted = _Wanted.from_flags(residuals.wanted)
    seen = [i for i, dy in enumerate(dys) if not isinstance(dy, SymbolicZero)]
    A, D, R = call.leading, call.size, call.rows
    dx: Any = None
    dweights: list[Any] = [None] * len(dys)
    dbiases: list[Any] = [None] * len(dys)
    lefts, rights = [], []
    whole = _whole_activation(call, residuals, dys[seen[0]]) if any(wanted.weights[i] for i in seen) else None
    for i in seen:
        dy, for_w, for_bias = dys[i], wanted.weights[i], wanted.biases[i]
        dtype = residuals.dtypes.weights[i]
        if call.recipe is None:
            if for_bias:
                dbiases[i] = jnp.sum(dy.astype(jnp.float32), axis=(0, 1))
            dy = dy.astype(call.x_dtype)
            lefts.append(Operand(dy.reshape(A, D, R, dy.shape[-1])))
            if for_w:
                assert whole is not None
                dweights[i] = dot(whole.data, dy, (0, 1), (0, 1), dtype)
        elif wanted.x or for_w:
            dy8, dbiases[i] = _quantize(
                call, "gradient", dy, {"cols": call.axis_name}, data=wanted.x, transposed=for_w, with_dbias=for_bias
            )
            if wanted.x:
                lefts.append(_left(dy8, A, D, R))
            if for_w:
                assert whole is not None
                dweights[i] = _wgrad(call, whole, _transposed(dy8), dtype)
        elif for_bias:
            dbiases[i] = jnp.sum(dy.astype(jnp.float32), axis=(0, 1))
        rights.append(_like_left(residuals.weights[i], call))
    if wanted.x:
        if seen:
            dx = _gemm_reduce_scatter(call, "dgrad", tuple(lefts), tuple(rights), None)
        if dgathered is not None and not isinstance(dgathered, SymbolicZero):
            more = lax.psum_scatter(dgathered.astype(jnp.float32), call.axis_name, scatter_dimension=1, tiled=True)
            dx = (more if dx is None else dx.astype(jnp.float32) + more).astype(call.x_dtype)
    return dx, tuple(dweights), tuple(dbiases)


_gathered_products.defvjp(_gathered_products_forward, _gathered_products_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scattered_product(call: _Call, x, weight, bias: Array | None) -> Array:
    """[A, R, N]"""
    return _scattered_product_and_residuals(call, x, weight, bias, _NOTHING)[0]


def _scattered_product_forward(call: _Call, x, weight, bias):
    wanted = _Wanted.of(x, (weight,), (bias,))
    x, weight, bias = custom_vjp_primal_tree_values((x, weight, bias))
    return _scattered_product_and_residuals(call, x, weight, bias, wanted)


def _scattered_product_and_residuals(call: _Call, x, weight, bias: Array | None, wanted: _Wanted):
    dtypes = _Dtypes((np.dtype(weight.dtype),))
    for_w = any(wanted.weights)
    if call.recipe is None:
        right = Operand(weight.astype(x.dtype), summed_first=True)
        z = _gemm_reduce_scatter(call, "forward", (Operand(x),), (right,), bias)
        kept = Operand(weight if wanted.x else _absent(weight.dtype))
        return z, _residuals(wanted, dtypes, x if for_w else _absent(x.dtype), None, (kept,))

    if for_w:
        _validate_rows_of_blocks(call)
    x8, _ = _quantize(call, "activation", x, {"cols": call.axis_name}, data=True, transposed=for_w)
    weight8, _ = _quantize(call, "kernel", weight, {"rows": call.axis_name}, data=wanted.x, transposed=True)
    left = _left(x8, call.leading, call.size, call.rows)
    z = _gemm_reduce_scatter(call, "forward", (left,), (_transposed(weight8),), bias)
    activation, scale_inv = x8.transposed, x8.transposed_scale_inv
    if not for_w or activation is None:
        activation, scale_inv = _absent(left.data.dtype), _absent(jnp.float32)
    kept = _kept_weight(weight, weight8, wanted.x)
    return z, _residuals(wanted, dtypes, activation, scale_inv, (kept,))


def _scattered_product_backward(call: _Call, residuals: _Residuals, dz):
    if isinstance(dz, SymbolicZero):
        return None, None, None
    wanted = _Wanted.from_flags(residuals.wanted)
    (for_w,), (for_bias,), (dtype,) = wanted.weights, wanted.biases, residuals.dtypes.weights
    dbias = jnp.sum(dz.astype(jnp.float32), axis=(0, 1)) if for_bias else None
    dx = dweight = None
    gathered: Any = None
    extras: tuple[Array, ...] = ()
    if not (wanted.x or for_w):
        return None, None, dbias
    dz8 = None
    if call.recipe is None:
        left = Operand(dz.astype(call.x_dtype))
    else:
        travelling = for_w and call.scaling != "tensor"
        dz8, _ = _quantize(
            call,
            "gradient",
            dz,
            {"rows": call.axis_name},
            data=wanted.x or not travelling,
            transposed=travelling,
            gathered=True,
        )
        left = _left(dz8, call.leading, call.rows) if dz8.data is not None else None
        extras = _travelling(call, dz8) if travelling else ()
    keep = for_w and not extras
    if wanted.x:
        assert left is not None
        right = _like_left(residuals.weights[0], call)
        (dx,), gathered, extras = _all_gather_gemm(call, "dgrad", left, (right,), (None,), extras, keep_gathered=keep)
    elif keep:
        assert left is not None
        gathered = all_gather(left.data, call.axis_name, axis=1, tiled=True)
    else:
        extras = tuple(all_gather(extra, call.axis_name) for extra in extras)
    if for_w and call.recipe is None:
        x = residuals.activation
        x = x.reshape(call.leading, call.size * call.rows, x.shape[-1])
        dweight = dot(x, gathered, (0, 1), (0, 1), dtype)
    elif for_w:
        assert dz8 is not None
        if extras:
            right = _in_order(call, (*extras, dz8.transposed_scale_inv)[:2], square=True)
        else:
            right = _transposed_codes(gathered, dz8.scale_inv)
        x8 = Operand(residuals.activation, residuals.activation_scale_inv, call.scaling)
        dweight = _wgrad(call, x8, right, dtype)
    if dx is not None:
        dx = dx.reshape(call.leading, call.size, call.rows, dx.shape[-1])
    return dx, dweight, dbias


_scattered_product.defvjp(_scattered_product_forward, _scattered_product_backward, symbolic_zeros=True)


def _absent(dtype) -> Array:
    return jnp.zeros((0,), dtype)


def _residuals(wanted: _Wanted, dtypes, activation: Any, scale_inv, weights: tuple[Operand, ...]) -> _Residuals:
    name = _NAMES["activation"]
    return _Residuals(
        wanted.as_flags(),
        dtypes,
        checkpoint_name(activation, name),
        None if scale_inv is None else checkpoint_name(scale_inv, name),
        weights,
    )


def _kept_weight(weight, weight8: QuantizedArray, wanted: bool) -> Operand:
    """The copy that products over N read, with a name unless it is an argument."""
    given = isinstance(weight, QuantizedArray)
    scaling = _scaling(weight8.scaling)
    if not wanted:
        assert weight8.transposed is not None
        return Operand(_absent(weight8.transposed.dtype), _absent(jnp.float32), scaling)
    if weight8.data is None:
        raise ValueError(
            "w has no data copy, which the gradient with respect to x reads; quantize it with copies='both'"
        )
    kept = Operand(weight8.data, weight8.scale_inv, scaling)
    return kept if given else jax.tree.map(lambda leaf: checkpoint_name(leaf, _NAMES["kernel"]), kept)


def _like_left(weight: Operand, call: _Call) -> Operand:
    """A kept right side in the dtype of plain left sides."""
    return dataclasses.replace(weight, data=weight.data.astype(call.x_dtype)) if weight.scaling == "none" else weight


def _quantize(
    call: _Call,
    role: Role,
    x,
    split: dict[Any, tuple[str, ...]],
    *,
    data: bool,
    transposed: bool,
    gathered: bool = False,
    with_dbias: bool = False,
) -> tuple[QuantizedArray, Array | None]:
    """(FP8 of x as a matrix of rows [-1, last dimension], Σ rows in float32 where asked for).

    Args:
      call: what is static.
      role: of x.
      x: the array; a QuantizedArray is returned as it is.
      split: the mesh axes over which rows or cols of the whole tensor are split.
      data, transposed: which copies are needed.
      gathered: the rows of other devices are gathered: the scales of columns then have to agree.
      with_dbias: whether the sum is asked for.
    """
    if isinstance(x, QuantizedArray):
        if transposed and x.transposed is None:
            raise ValueError(
                "x has no transposed copy, which the gradient with respect to w reads; quantize it with copies='both'"
            )
        return x, None
    agreed = call.scaling == "tensor" or (gathered and call.scaling == "row")
    result = quantize(
        x.reshape(math.prod(x.shape[:-1]), x.shape[-1]),
        call.fp8.quantization(role),
        copies="both" if data and transposed else "data" if data else "transposed",
        axis_name=split if agreed else None,
        with_dbias=with_dbias,
        implementation=call.implementation,
    )
    return result if with_dbias else (result, None)


def _travelling(call: _Call, x8: QuantizedArray) -> tuple[Array, ...]:
    """What is gathered of a transposed copy: its codes, and its scales where they are those of blocks."""
    assert x8.transposed is not None
    assert x8.transposed_scale_inv is not None
    return (x8.transposed, x8.transposed_scale_inv) if call.scaling == "block" else (x8.transposed,)


def _whole_activation(call: _Call, residuals: _Residuals, dy: Array) -> Operand:
    """What dw reads of x: plain [A, D·R, K], or FP8 [K, A·D·R]."""
    activation, scale_inv = residuals.activation, residuals.activation_scale_inv
    shard = call.residual == "shard"
    if shard:
        # Not before dy is there, and not as one with the gather of the forward pass: what it gathers would be kept.
        activation, _ = lax.optimization_barrier((activation, dy))
    if call.scaling in ("none", "tensor"):
        if shard:
            activation = all_gather(activation, call.axis_name, axis=1, tiled=True)
        return Operand(activation) if scale_inv is None else _transposed_codes(activation, scale_inv)
    assert scale_inv is not None
    if shard:
        activation = all_gather(activation, call.axis_name)
        scale_inv = all_gather(scale_inv, call.axis_name) if call.scaling == "block" else scale_inv
    return _in_order(call, (activation, scale_inv), square=False)


def _transposed_codes(codes: Any, scale_inv: Any) -> Operand:
    """[A, D·R, K] with one scale as [K, A·D·R]."""
    return Operand(codes.reshape(math.prod(codes.shape[:-1]), codes.shape[-1]).T, scale_inv, "tensor")


def _in_order(call: _Call, parts: tuple[Any, ...], *, square: bool) -> Operand:
    """Gathered transposed copies [D, K, A·R] as one [K, A·D·R], whose rows have the order of those of x.

    Args:
      call: what is static.
      parts: codes, and scales: of rows [K], of blocks [D, A·R/128, K], or [D, K/128, A·R/128] where they are square.
      square: whether blocks are.
    """
    codes, scale_inv = parts
    A, D = call.leading, call.size

    def merged(x: Array) -> Array:
        _, outer, rows = x.shape
        return x.reshape(D, outer, A, rows // A).transpose(1, 2, 0, 3).reshape(outer, D * rows)

    if call.scaling == "block":
        scale_inv = merged(scale_inv) if square else merged(scale_inv.transpose(0, 2, 1)).T
    return Operand(merged(codes), scale_inv, call.scaling)


def _wgrad(call: _Call, x: Operand, dy: Operand, dtype: np.dtype) -> Array:
    """x · dyᵀ of FP8 [K, T] and [N, T]: [K, N]."""
    padding = -x.data.shape[1] % _ALIGNMENT  # zeros change neither the sum nor the scales
    x, dy = (dataclasses.replace(a, data=jnp.pad(a.data, ((0, 0), (0, padding)))) for a in (x, dy))
    return gemm(
        quantized(x, left=True),
        quantized(dy, left=False),
        rhs_contracting="cols",
        out_dtype=dtype,
        fast_accumulation=call.is_fast("wgrad"),
        implementation=call.implementation,
    )
