"""What linear layers of Linen and NNX share: from what a layer holds to one call of `te_jax.ops.dense`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from te_jax import native, ops
from te_jax._core.arguments import as_dtype, is_whole_number
from te_jax._core.types import FLOAT_NAMES, FLOATS
from te_jax.nn.microbatches import AccumulatedKernel, kernel_and_accumulator
from te_jax.ops.dense import quantize_kernel as _quantize_kernel
from te_jax.quantized import QuantizedArray
from te_jax.recipe import DelayedScalingState, Recipe
from te_jax.sharding import regrouped

Activation = Literal["gelu", "relu", "silu"]


@dataclasses.dataclass(frozen=True)
class Options:
    """What layers hand on to `te_jax.ops.dense`."""

    recipe: Recipe | None
    axis_name: str | tuple[str, ...] | None
    implementation: native.Implementation | None


def linear(
    x: Array,
    kernel: Array | QuantizedArray | AccumulatedKernel,
    bias: Array | None,
    scaling_state: DelayedScalingState | None,
    *,
    axis: tuple[int, ...],
    features: tuple[int, ...],
    dtype: jax.typing.DTypeLike | None,
    activation: Activation | None,
    options: Options,
) -> Array:
    """activation(x · kernel + bias), contracting the dimensions `axis` of x with the first ones of the kernel.

    y [*other dimensions of x, *features] has the given dtype, or what x, kernel and bias promote to. The kernel is
    quantized from its own dtype.
    """
    operand, accumulator = kernel_and_accumulator(kernel)
    x = _contracted_last(x.astype(_result_dtype(dtype, x, operand, bias)), axis)
    batch, contracted = x.shape[: x.ndim - len(axis)], x.shape[x.ndim - len(axis) :]
    if isinstance(operand, QuantizedArray):  # possibly with fewer dimensions, see `quantize_kernel`
        rows, cols = operand.shape[: operand.row_ndim], operand.shape[operand.row_ndim :]
        if math.prod(contracted) != math.prod(rows):
            raise ValueError(
                f"inputs have sizes {contracted} along the contracted axes; the quantized kernel has {rows} there"
            )
        x = regrouped(x, (batch, contracted), (batch, rows))
        bias = None if bias is None else regrouped(bias, (features,), (cols,))
        contracted = rows
    y = ops.dense(
        x,
        operand,
        bias,
        contracting_ndim=len(contracted),
        activation=activation,
        wgrad_accumulator=accumulator,
        scaling_state=scaling_state,
        **vars(options),
    )
    return regrouped(y, (batch, y.shape[len(batch) :]), (batch, features))


def dot_general(
    lhs: Array,
    rhs: Array,
    dimension_numbers: tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]],
    scaling_state: DelayedScalingState | None,
    *,
    preferred_element_type: jax.typing.DTypeLike | None,
    out_sharding: Any,
    options: Options,
) -> Array:
    """`jax.lax.dot_general` of an activation and a kernel, without batch dimensions."""
    try:
        (lhs_axes, rhs_axes), (lhs_batch, rhs_batch) = (map(tuple, pair) for pair in dimension_numbers)
    except (TypeError, ValueError):
        raise ValueError(
            f"dimension_numbers is {dimension_numbers!r}; it must be ((dimensions of lhs, dimensions of rhs), "
            "((), ())), as jax.lax.dot_general has it"
        ) from None
    if preferred_element_type is not None and options.recipe is not None:
        preferred_element_type = _as_float("preferred_element_type", preferred_element_type)
    if lhs_batch or rhs_batch:
        raise ValueError(
            f"dimension_numbers is {dimension_numbers}; batch dimensions are not supported: "
            "use jax.vmap, or jax.lax.dot_general for products of two activations"
        )
    lhs_axes = normalize_axes("dimension_numbers", lhs_axes, lhs.ndim)
    rhs_axes = normalize_axes("dimension_numbers", rhs_axes, rhs.ndim)
    if [lhs.shape[i] for i in lhs_axes] != [rhs.shape[i] for i in rhs_axes]:
        raise ValueError(
            f"dimension_numbers is {dimension_numbers}; it contracts dimensions of different sizes: "
            f"lhs has shape {lhs.shape} and rhs {rhs.shape}"
        )
    rhs_axes, lhs_axes = zip(*sorted(zip(rhs_axes, lhs_axes, strict=True)), strict=True)
    count = len(rhs_axes)
    last = rhs_axes == tuple(range(rhs.ndim - count, rhs.ndim))
    y = ops.dense(
        _contracted_last(lhs, lhs_axes),
        rhs if last else _moved(rhs, (*rhs_axes, *_others(rhs_axes, rhs.ndim))),
        contracting_ndim=count,
        kernel_contracting="last" if last else "first",
        scaling_state=scaling_state,
        **vars(options),
    )
    y = y if preferred_element_type is None else y.astype(preferred_element_type)
    return y if out_sharding is None else jax.reshard(y, out_sharding)


def quantize_kernel(kernel: Array, row_ndim: int, col_ndim: int, options: Options) -> QuantizedArray:
    """Both copies of a kernel [*stacked, *rows, *cols], possibly with fewer dimensions in rows and cols."""
    assert options.recipe is not None
    return _quantize_kernel(
        kernel,
        options.recipe,
        row_ndim=row_ndim,
        stacked_ndim=kernel.ndim - row_ndim - col_ndim,
        implementation=options.implementation,
    )


def as_tuple(value: int | Iterable[int]) -> tuple[int, ...]:
    """One number or several, as several."""
    return tuple(value) if isinstance(value, Iterable) else (value,)


def normalize_axes(name: str, axes: Iterable[int], ndim: int) -> tuple[int, ...]:
    """Axes counted from the front, in the order given."""
    axes = tuple(axes)
    if axes and all(is_whole_number(axis) and -ndim <= axis < ndim for axis in axes):
        positive = tuple(int(axis) % ndim for axis in axes)
        if len(set(positive)) == len(axes):
            return positive
    raise ValueError(
        f"{name} is {axes}; for an input with {ndim} dimensions it must name different ones of them, at least one, by "
        f"integers in [{-ndim}, {ndim - 1}]"
    )


def sizes(name: str, value: int | Iterable[int]) -> tuple[int, ...]:
    """Numbers of features, one or several."""
    features = as_tuple(value)
    if not features or not all(is_whole_number(size) and size >= 1 for size in features):
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1, or several")
    return tuple(map(int, features))


def _result_dtype(dtype: jax.typing.DTypeLike | None, *arrays: Any) -> jax.typing.DTypeLike:
    if dtype is not None:
        return _as_float("dtype", dtype)
    dtype = jnp.result_type(*(x.dtype if isinstance(x, QuantizedArray) else x for x in arrays if x is not None))
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.float32


def _as_float(name: str, dtype: jax.typing.DTypeLike) -> jax.typing.DTypeLike:
    if dtype in (float, jnp.float64):  # names of float32 where there are no 64 bits
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return as_dtype(f"{name} is", dtype, FLOATS, FLOAT_NAMES)


def _contracted_last(x: Array, axes: tuple[int, ...]) -> Array:
    return _moved(x, (*_others(axes, x.ndim), *axes))


def _others(axes: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    return tuple(axis for axis in range(ndim) if axis not in axes)


def _moved(x: Array, order: tuple[int, ...]) -> Array:
    return x if order == tuple(range(x.ndim)) else x.transpose(order)
