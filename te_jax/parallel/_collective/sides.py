"""Sides of FP8 products: quantized with scales that devices agree on, and in the order of gathered rows."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from te_jax.ops._fp8 import Fp8
from te_jax.ops.quantize import QuantizedParts
from te_jax.parallel._collective.call import Call, scaling_of
from te_jax.parallel.transports.exchange import Operand
from te_jax.quantized import QuantizedArray
from te_jax.recipe import DelayedScalingState, Role


def quantize_matrix(
    call: Call,
    role: Role,
    x,
    split: dict[Any, tuple[str, ...]],
    *,
    data: bool,
    transposed: bool,
    gathered: bool = False,
    with_dbias: bool = False,
    state: DelayedScalingState | None = None,
    observed: bool = False,
) -> QuantizedParts:
    """FP8 of x as a matrix of rows [-1, last dimension].

    Args:
      call: what is static.
      role: of x.
      x: the array; a QuantizedArray is returned as it is.
      split: the mesh axes over which rows or cols of the whole tensor are split.
      data, transposed: which copies are needed.
      gathered: the rows of other devices are gathered: the scales of columns then have to agree.
      with_dbias: whether the sum is asked for.
      state: of delayed scaling, the same on all devices; None for other recipes.
      observed: whether the largest magnitude is asked for.
    """
    if isinstance(x, QuantizedArray):
        if transposed and x.transposed is None:
            raise ValueError(
                "x has no transposed copy, which the gradient with respect to w reads; quantize it with copies='both'"
            )
        return QuantizedParts(x, None, None)
    agreed = call.scaling == "tensor" or (gathered and call.scaling == "row")
    parts = Fp8(call.name, call.fp8, call.implementation).quantize(
        role,
        x.reshape(math.prod(x.shape[:-1]), x.shape[-1]),
        state,
        row_ndim=1,
        copies="both" if data and transposed else "data" if data else "transposed",
        axis_name=split if agreed else None,
        with_dbias=with_dbias,
    )
    return parts if observed else parts._replace(amax=None)


def travelling_parts(call: Call, x8: QuantizedArray) -> tuple[Array, ...]:
    """What is gathered of a transposed copy: its codes, and its scales where they are those of blocks."""
    assert x8.transposed is not None
    assert x8.transposed_scale_inv is not None
    return (x8.transposed, x8.transposed_scale_inv) if call.scaling == "block" else (x8.transposed,)


def transposed_codes(codes: Any, scale_inv: Any) -> Operand:
    """[A, D·R, K] with one scale as [K, A·D·R]."""
    return Operand(codes.reshape(math.prod(codes.shape[:-1]), codes.shape[-1]).T, scale_inv, "tensor")


def in_order(call: Call, parts: tuple[Any, ...], *, square: bool) -> Operand:
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


def left_side(x: QuantizedArray, *sizes: int) -> Operand:
    """The data [prod(sizes), K] of a quantized matrix as a left side [*sizes, K]."""
    data, scale_inv, scaling = x.data, x.scale_inv, scaling_of(x.scaling)
    assert data is not None
    assert scale_inv is not None
    if scaling == "row":
        scale_inv = scale_inv.reshape(sizes)
    if scaling == "block":
        scale_inv = jnp.moveaxis(scale_inv.reshape(scale_inv.shape[0], *sizes), 0, -2)
    return Operand(data.reshape(*sizes, data.shape[-1]), scale_inv, scaling)


def transposed_side(x: QuantizedArray) -> Operand:
    """The transposed copy of a quantized matrix, which products over its rows read, as either side."""
    assert x.transposed is not None
    return Operand(x.transposed, x.transposed_scale_inv, scaling_of(x.transposed_scaling))
