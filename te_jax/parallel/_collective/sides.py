"""Operands of collective products: as each product reads them, and in the order of gathered rows."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from te_jax._core import observe
from te_jax._core.types import FP8_ALIGNMENT
from te_jax.ops.gemm import gemm
from te_jax.ops.linear.arguments import KernelContracting
from te_jax.parallel._collective.call import CollectiveSpec
from te_jax.parallel.transports.exchange import GemmOperand, all_gather, dot, quantized
from te_jax.quantized import QuantizedArray, facts_of
from te_jax.recipe import DelayedScalingState, Role


class Sides(NamedTuple):
    """A matrix of rows as its products read it.

    Attributes:
      by_rows: a GemmOperand for products that sum over its last dimension, [*lead, K]; None without such a copy.
      by_cols: a GemmOperand for products that sum over its rows: plain [*lead, K], quantized [K, rows]. Where the data
        of tensor scaling is gathered it is `by_rows`, which is transposed afterwards. None where there is no such copy.
      amax: where scaling is delayed, and the array did not come quantized.
      dbias: the sum over rows, where it was asked for.
    """

    by_rows: Any
    by_cols: Any
    amax: Array | None = None
    dbias: Array | None = None


def sides_of(
    spec: CollectiveSpec,
    role: Role,
    x: Any,
    lead: tuple[int, ...],
    split: Literal["rows", "cols"],
    state: DelayedScalingState | None,
    *,
    kernel_contracting: KernelContracting,
    by_rows: bool = True,
    by_cols: bool = True,
    gathered: bool = False,
    with_dbias: bool = False,
) -> Sides:
    """Quantizes an array where there is a recipe.

    Args:
      spec: static arguments.
      role: of x.
      x: plain, or quantized as a matrix.
      lead: the dimensions before the last as products read them.
      split: "rows" or "cols": which of the whole matrix are split over the devices.
      state: of delayed scaling, the same on all devices; None for other recipes.
      kernel_contracting: of the layer.
      by_rows, by_cols: which sides are needed.
      gathered: the rows of other devices are gathered: scales of columns then have to agree.
      with_dbias: whether the sum over rows is asked for.
    """
    codec = spec.codec
    if codec.recipe is None:
        dbias = jnp.sum(x.astype(jnp.float32), axis=tuple(range(x.ndim - 1))) if with_dbias else None
        plain = GemmOperand(x.astype(spec.x_dtype).reshape(*lead, x.shape[-1]))
        return Sides(plain if by_rows else None, plain if by_cols else None, None, dbias)
    transposed_later = gathered and spec.scaling.by_tensor
    agreed = spec.scaling.by_tensor or (gathered and spec.scaling.by_row)
    transposed = by_cols and not transposed_later
    needed = ("data",) * by_rows + ("transposed",) * by_cols
    with observe.data_read_as(needed if transposed_later else ()):
        x8, amax, dbias = codec.quantize(
            role,
            x if isinstance(x, QuantizedArray) else x.reshape(-1, x.shape[-1]),  # pyright: ignore[reportArgumentType]
            state,
            row_ndim=1,
            copies="both" if by_rows and transposed else "transposed" if transposed else "data",
            quantization=codec.quantization(role, kernel_contracting),
            amax_axis={split: spec.axis_name} if agreed else None,
            with_dbias=with_dbias,
        )
    if codec.is_read_back:
        data, other = (
            None if values is None else _read_back(copy, spec, lead)
            for values, copy in ((x8.data, x8.without_transposed()), (x8.transposed, x8.without_data()))
        )
        return Sides(data, data if transposed_later else other, None, dbias)
    rows = None if x8.data is None else _data_of(x8, lead)
    cols = None
    if x8.transposed is not None:
        cols = GemmOperand(x8.transposed, x8.transposed_scale_inv, facts_of(x8.transposed_scaling))
    return Sides(rows, rows if transposed_later else cols, amax, dbias)


def _read_back(copy: QuantizedArray, spec: CollectiveSpec, lead: tuple[int, ...]) -> GemmOperand:
    values = dataclasses.replace(copy, dtype=spec.x_dtype).dequantize()
    return GemmOperand(values.reshape(*lead, values.shape[-1]))


def _data_of(x: QuantizedArray, lead: tuple[int, ...]) -> GemmOperand:
    data, scale_inv, scaling = x.data, x.scale_inv, facts_of(x.scaling)
    assert data is not None
    assert scale_inv is not None
    if scaling.by_row:
        scale_inv = scale_inv.reshape(lead)
    if scaling.summed_first:
        scale_inv = jnp.moveaxis(scale_inv.reshape(scale_inv.shape[0], *lead), 0, -2)
    return GemmOperand(data.reshape(*lead, data.shape[-1]), scale_inv, scaling)


# ------------------------------------------------------------------------------ operands of the kernel's gradient


def travelling(by_cols: Any) -> tuple[Array, ...]:
    """The arrays that are gathered beside the data by rows: values of the transposed copy, and scales of blocks."""
    if by_cols is None or not by_cols.scaling.has_several_scales:
        return ()
    assert by_cols.scale_inv is not None
    return (by_cols.data, by_cols.scale_inv) if by_cols.scaling.in_blocks else (by_cols.data,)


def with_parts(by_cols: GemmOperand, gathered: Array | None, parts: tuple[Array, ...]) -> GemmOperand:
    """The operand of all devices: data by rows [A, D·R, K] as it was gathered, or the gathered `travelling`."""
    data, scale_inv = (*(parts or (gathered,)), by_cols.scale_inv)[:2]
    assert data is not None
    return dataclasses.replace(by_cols, data=data, scale_inv=scale_inv)


def gather(spec: CollectiveSpec, by_cols: GemmOperand) -> GemmOperand:
    """The operand of all devices, by a plain collective."""
    if parts := travelling(by_cols):
        return with_parts(by_cols, None, tuple(all_gather(part, spec.axis_name) for part in parts))
    return with_parts(by_cols, all_gather(by_cols.data, spec.axis_name, axis=1, tiled=True), ())


def in_order(spec: CollectiveSpec, whole: GemmOperand) -> GemmOperand:
    """An operand of all devices with its rows in the order of x: plain [A, D·R, K], quantized [K, A·D·R].

    Args:
      spec: static arguments.
      whole: data by rows [A, D·R, K] with one scale or none; or transposed copies [D, K, A·R] with scales of rows [K]
        or of blocks, [D, A·R/128, K] or [D, K/128, A·R/128].
    """
    data, scale_inv = whole.data, whole.scale_inv
    if whole.scaling.is_plain:
        return whole
    if whole.scaling.by_tensor:
        return dataclasses.replace(whole, data=data.reshape(math.prod(data.shape[:-1]), data.shape[-1]).T)
    A, D = spec.leading, spec.size

    def merged(x: Array) -> Array:
        _, outer, rows = x.shape
        return x.reshape(D, outer, A, rows // A).transpose(1, 2, 0, 3).reshape(outer, D * rows)

    if whole.scaling.in_blocks:
        assert scale_inv is not None
        scale_inv = merged(scale_inv.mT).T if whole.scaling.summed_first else merged(scale_inv)
    return dataclasses.replace(whole, data=merged(data), scale_inv=scale_inv)


def wgrad(
    spec: CollectiveSpec,
    lhs: GemmOperand,
    rhs: GemmOperand,
    *,
    out_dtype: jnp.dtype,
    accumulator: Array | None = None,
    accumulate: bool = True,
) -> Array:
    """lhsᵀ · rhs over all rows, x and dy or dy and x; or the next value of an accumulator of as many values."""
    if lhs.scaling.is_plain:
        left, right = (a.data.reshape(-1, a.data.shape[-1]) for a in (lhs, rhs))
        product = dot(left, right, (0,), (0,), out_dtype)
        if accumulator is None:
            return product
        product = product.reshape(accumulator.shape)
        if accumulate:
            return accumulator + product
        # The buffer is written over: an argument that is not mentioned at all would not be donated.
        return lax.dynamic_update_slice(accumulator, product, (0,) * product.ndim)
    padding = -lhs.data.shape[1] % FP8_ALIGNMENT  # zeros change neither the sum nor the scales
    lhs, rhs = (dataclasses.replace(a, data=jnp.pad(a.data, ((0, 0), (0, padding)))) for a in (lhs, rhs))
    matrix = None if accumulator is None else accumulator.reshape(lhs.data.shape[0], rhs.data.shape[0])
    product = gemm(
        quantized(lhs),
        quantized(rhs),
        rhs_contracting="cols",
        out_dtype=out_dtype,
        accumulator=matrix,
        accumulate=accumulate,
        fast_accumulation=spec.fast_accumulation,
        implementation=spec.codec.implementation,
    )
    return product if accumulator is None else product.reshape(accumulator.shape)
