"""What `te_jax.ops.quantize` asks of the native kernels, and how their results are combined over shards."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from te_jax import native, sharding
from te_jax._core.types import BLOCK
from te_jax.quantized import QuantizedArray
from te_jax.recipe import Quantization
from te_jax.reference.quantize import (
    Copies,
    blocked_groups,
    largest,
    largest_of_shards,
    scale_inv_of,
    scalings_of,
)

Dimensions = tuple[str, ...]
"""Dimensions as sharding rules name them: "r0"; "(r0 ri)" for blocks and the values in a block; "r0" for its blocks."""

_FLOAT32 = np.dtype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Request:
    """The static arguments of `quantize`, together: hashable, so that a quantization is traced once."""

    quantization: Quantization
    row_ndim: int
    copies: Copies
    row_axes: tuple[str, ...]
    col_axes: tuple[str, ...]
    with_amax: bool
    with_dbias: bool


@dataclasses.dataclass(frozen=True)
class _Result:
    """A result of a target.

    Attributes:
      dimensions: of the result.
      dtype: of the result.
      combine: how results of shards become one, where dimensions in `over` are split.
      partial: the target returns one for every 128 rows, to be summed.
      amax: it is the inverse of the scales that follow from the operand with this index.
    """

    dimensions: Dimensions
    dtype: np.dtype = _FLOAT32
    combine: Literal["largest", "sum"] | None = None
    over: Dimensions = ()
    partial: bool = False
    amax: int | None = None


def quantize_by_kernels(
    x: Array, amax: Array | None, request: Request
) -> tuple[QuantizedArray, Array | None, Array | None]:
    """The copies, the largest magnitude of x and dbias; of the last two, what is not asked for may be None."""
    families = {scaling.partition("_")[0] for scaling in scalings_of(request.quantization, request.copies)}
    if len(families) > 1:  # a pass for each copy
        only_data = dataclasses.replace(request, copies="data")
        only_transposed = dataclasses.replace(request, copies="transposed", with_amax=False, with_dbias=False)
        quantized, own_amax, dbias = quantize_by_kernels(x, amax, only_data)
        other, _, _ = quantize_by_kernels(x, amax, only_transposed)
        quantized = dataclasses.replace(
            quantized, transposed=other.transposed, transposed_scale_inv=other.transposed_scale_inv
        )
        return quantized, own_amax, dbias

    family = {"tensor": _tensor_scaled, "row": _row_scaled, "block": _block_scaled}[families.pop()]
    (data, scale_inv, transposed, transposed_scale_inv), own_amax, dbias = family(x, amax, request)
    quantized = QuantizedArray(
        data,
        None if data is None else scale_inv,
        transposed,
        None if transposed is None else transposed_scale_inv,
        request.row_ndim,
        x.ndim - request.row_ndim,
        request.quantization.scaling,
        request.quantization.transposed_scaling,
        np.dtype(x.dtype),
    )
    return quantized, own_amax, dbias


def _tensor_scaled(x: Array, amax: Array | None, request: Request):
    call = _Caller(request, x.ndim)
    own_amax = None if amax is not None else _amax_of_tensor(x, request)
    seen_amax = call.amax if request.with_amax and own_amax is None else None
    # An inverse for each copy: if both were one array, XLA would copy it where a program returns both.
    data, transposed, scale_inv, transposed_scale_inv, seen_amax, dbias = call(
        "te_quantize_tensor",
        [(call.x, x), ((), own_amax if amax is None else amax)],
        [
            call.data,
            call.transposed,
            call.data and _Result((), amax=1),
            call.transposed and _Result((), amax=1),
            seen_amax,
            call.dbias,
        ],
    )
    return (data, scale_inv, transposed, transposed_scale_inv), seen_amax if own_amax is None else own_amax, dbias


def _amax_of_tensor(x: Array, request: Request) -> Array:
    call = _Caller(request, x.ndim)
    (amax,) = call("te_amax_tensor", [(call.x, x)], [call.amax])
    return amax


def _row_scaled(x: Array, amax: None, request: Request):
    del amax
    call = _Caller(request, x.ndim)
    row_amax, col_amax = call("te_amax_rows", [(call.x, x)], [call.row_amax, call.col_amax])
    data, transposed, scale_inv, transposed_scale_inv, dbias = call(
        "te_quantize_rows",
        [(call.x, x), (call.rows, row_amax), (call.cols, col_amax)],
        [
            call.data,
            call.transposed,
            call.data and _Result(call.rows, amax=1),
            call.transposed and _Result(call.cols, amax=2),
            call.dbias,
        ],
    )
    own_amax = None
    if request.with_amax:
        amaxes, axes = (col_amax, request.col_axes) if row_amax is None else (row_amax, request.row_axes)
        own_amax = largest(amaxes, axes)
    return (data, scale_inv, transposed, transposed_scale_inv), own_amax, dbias


def _block_scaled(x: Array, amax: None, request: Request):
    del amax
    quantization = request.quantization
    square, transposed_square = (
        scaling == "block_128x128" for scaling in (quantization.scaling, quantization.transposed_scaling)
    )
    call = _Caller(request, x.ndim, blocked_groups(quantization, request.copies))
    data, scale_inv, transposed, transposed_scale_inv, dbias = call(
        "te_quantize_blocks",
        [(call.x, x)],
        [
            call.data,
            call.data and _Result(_scales(square, call.rows, call.cols)),
            call.transposed,
            call.transposed and _Result(_scales(transposed_square, call.cols, call.rows)),
            call.dbias,
        ],
        data_square=square,
        transposed_square=transposed_square,
    )
    own_amax = _amax_of_tensor(x, request) if request.with_amax else None
    return (data, scale_inv, transposed, transposed_scale_inv), own_amax, dbias


class _Caller:
    """Calls targets for a request on x, an array with `ndim` dimensions, and knows the results that they share."""

    def __init__(self, request: Request, ndim: int, blocked: Collection[str] = ()):
        self.quantization = request.quantization
        self.rows = _dimensions("r", request.row_ndim, "rows" in blocked)
        self.cols = _dimensions("c", ndim - request.row_ndim, "cols" in blocked)
        self.x = self.rows + self.cols
        groups = ((self.rows, request.row_axes), (self.cols, request.col_axes))
        self.axes = {_factor(group[0]): axes for group, axes in groups if axes}
        # None where it is not asked for.
        with_data, with_transposed = request.copies != "transposed", request.copies != "data"
        dtype = np.dtype(request.quantization.dtype)
        self.data = _Result(self.rows + self.cols, dtype) if with_data else None
        self.transposed = _Result(self.cols + self.rows, dtype) if with_transposed else None
        self.amax = _Result((), combine="largest", over=self.x)
        self.row_amax = _Result(self.rows, combine="largest", over=self.cols) if with_data else None
        self.col_amax = _Result(self.cols, combine="largest", over=self.rows) if with_transposed else None
        self.dbias = _Result(self.cols, combine="sum", over=self.rows, partial=True) if request.with_dbias else None

    def __call__(
        self,
        target: str,
        operands: Sequence[tuple[Dimensions, Array | None]],
        results: Sequence[_Result | None],
        **attributes: Any,
    ) -> list[Any]:
        """Runs a target. Operands and results that are None are absent: the target sees an array without elements.

        Args:
          target: its name.
          operands: x and others, with their dimensions.
          results: what it returns.
          attributes: of the target, beside those that follow from the request.

        Returns:
          The results; None for absent ones.
        """
        if len(results) > 2:  # what quantizes, and does not only look for the largest magnitudes
            attributes["power_of_two_scales"] = self.quantization.power_of_two_scales
        kernel = _kernel(
            target,
            self.quantization,
            (self.rows, self.cols),
            tuple(None if operand is None else dimensions for dimensions, operand in operands),
            tuple(results),
            tuple(sorted(attributes.items())),
        )
        found = iter(kernel(*[operand for _, operand in operands if operand is not None], axes=self.axes))
        return [None if result is None else next(found) for result in results]


@functools.cache
def _kernel(
    target: str,
    quantization: Quantization,
    groups: tuple[Dimensions, Dimensions],
    operand_terms: tuple[Dimensions | None, ...],
    results: tuple[_Result | None, ...],
    attributes: tuple[tuple[str, Any], ...],
) -> Callable[..., tuple[Array, ...]]:
    """A target as a function of arrays that may be sharded, without the absent operands and results."""
    rows, cols = groups
    wanted = [result for result in results if result is not None]

    @sharding.per_shard(
        f"{_terms(operand_terms)} -> {_terms([result.dimensions for result in wanted])}",
        axes_of=tuple(dict.fromkeys(_factor(dimension) for result in wanted for dimension in result.over)),
        sizes={minor: BLOCK for dimension in rows + cols for minor in _factors(dimension)[1:]},
    )
    def kernel(*operands: Array, axes: Mapping[str, tuple[str, ...]]) -> tuple[Array, ...]:
        if axes:
            return tuple(_combined(of, value, axes) for of, value in zip(wanted, kernel(*operands), strict=True))
        given = iter(operands)
        arguments = [jnp.zeros((0,), _FLOAT32) if term is None else next(given) for term in operand_terms]
        x = arguments[0]
        batch_ndim = x.ndim - len(rows) - len(cols)
        sizes = _sizes(rows + cols, x.shape[batch_ndim:])
        row_blocks = -(-math.prod(sizes[dimension] for dimension in rows) // BLOCK)

        def type_of(result: _Result | None) -> jax.ShapeDtypeStruct:
            if result is None:
                return jax.ShapeDtypeStruct((0,), _FLOAT32)
            shape = [row_blocks] * result.partial + [sizes[dimension] for dimension in result.dimensions]
            return jax.ShapeDtypeStruct((*x.shape[:batch_ndim], *shape), result.dtype)

        values = native.call(
            target,
            [type_of(result) for result in results],
            *arguments,
            row_ndim=len(rows),
            batch_ndim=batch_ndim,
            **dict(attributes),
        )
        values = [value for value, result in zip(values, results, strict=True) if result is not None]
        for i, result in enumerate(wanted):
            if result.partial:
                values[i] = jnp.sum(values[i], axis=batch_ndim)
            # By its type a scale of the whole would differ from shard to shard, as x does.
            if result.amax is not None and _varies_more(values[i], arguments[result.amax]):
                values[i] = scale_inv_of(arguments[result.amax], quantization)
        return tuple(values)

    return kernel


def _combined(result: _Result, value: Array, axes: Mapping[str, tuple[str, ...]]) -> Array:
    """A result of the whole, from those of shards."""
    over = tuple(axis for dimension in result.over for axis in axes.get(_factor(dimension), ()))
    if not over:
        return value
    return lax.psum(value, over) if result.combine == "sum" else largest_of_shards(value, over)


def _varies_more(value: Array, operand: Array) -> bool:
    """Whether, inside shard_map, the value varies over mesh axes over which the operand does not."""
    return bool(sharding.varying_axes(value) - sharding.varying_axes(operand))


def _dimensions(name: str, ndim: int, blocked: bool) -> Dimensions:
    """Of rows or cols; where blocked, the last consists of blocks and the values of a block."""
    plain = tuple(f"{name}{i}" for i in range(ndim))
    return (*plain[:-1], f"({plain[-1]} {name}i)") if blocked else plain


def _factors(dimension: str) -> list[str]:
    return dimension.strip("()").split()


def _factor(dimension: str) -> str:
    """Of the factors of a dimension, the one that may be split over devices."""
    return _factors(dimension)[0]


def _scales(square: bool, outer: Dimensions, summed: Dimensions) -> Dimensions:
    """Of the scales of blocks, as `quantized.scale_shape` orders them."""
    blocks = (*summed[:-1], _factor(summed[-1]))
    return (*outer[:-1], _factor(outer[-1]), *blocks) if square else (*blocks, *outer)


def _sizes(dimensions: Dimensions, shape: Sequence[int]) -> dict[str, int]:
    """Of the dimensions, and of the blocks that some consist of."""
    blocks = {_factor(name): -(-size // BLOCK) for name, size in zip(dimensions, shape, strict=True)}
    return blocks | dict(zip(dimensions, shape, strict=True))


def _terms(terms: Sequence[Dimensions | None]) -> str:
    return ", ".join(" ".join(("...", *dimensions)) for dimensions in terms if dimensions is not None)
