"""Quantization to FP8 in plain jax.numpy.

Scales and codes are computed on the bits of floats. They are then the same on every backend, whether or not it flushes
subnormals to zero, divides approximately, or drops NaN in maxima.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from te_jax._core.types import E8M0
from te_jax.quantized import Facts, QuantizedArray, facts_of
from te_jax.recipe import Quantization
from te_jax.sharding import blocks, varying_axes, varying_over

AxisName = str | tuple[str, ...]
GroupAxes = AxisName | Mapping[Literal["rows", "cols"], AxisName]
Copies = Literal["both", "data", "transposed"]

_INFINITY = 0x7F800000
_SMALLEST_NORMAL = 0x00800000
_QUIET_NAN = 0x7FC00000
_FP8_NAN = 0x7F  # in both formats


class SharedBlocks(NamedTuple):
    """Blocks along the last dimension of "rows" or "cols", of which devices along a mesh axis have equal parts that cut
    them."""

    group: Literal["rows", "cols"]
    axis_name: str


class QuantizedParts(NamedTuple):
    """The results of a quantization; None for what was not asked for."""

    array: QuantizedArray
    amax: Array | None
    dbias: Array | None


def quantize(
    x: Array,
    quantization: Quantization,
    *,
    row_ndim: int | None = None,
    copies: Copies = "both",
    amax: Array | None = None,
    amax_axis: GroupAxes | None = None,
    with_amax: bool = False,
    with_dbias: bool = False,
    shared_blocks: SharedBlocks | None = None,
) -> QuantizedParts:
    """Definition of `te_jax.ops.quantize`; see there for the arguments."""
    row_ndim = x.ndim - 1 if row_ndim is None else row_ndim
    rows, cols = tuple(range(row_ndim)), tuple(range(row_ndim, x.ndim))
    row_axes, col_axes = mesh_axes(amax_axis)
    if x.dtype != jnp.float32:
        # Without it XLA may quantize the value that x had before it was rounded to its dtype.
        x = lax.optimization_barrier(x)
    wide = x.astype(jnp.float32)
    current_amax = None
    if with_amax or (amax is None and any(facts.by_tensor for facts in facts_of_copies(quantization, copies))):
        current_amax = _over(lax.pmax, _amax_bits(wide, rows + cols), row_axes + col_axes)
    tensor_amax = current_amax if amax is None else _bits(amax)
    of_data, of_transposed = facts_of_copies(quantization, "both")

    data = scale_inv = transposed = transposed_scale_inv = None
    if copies != "transposed":
        data, scale_inv = _copy(wide, quantization, of_data, rows, cols, tensor_amax, col_axes, shared_blocks)
    same_scales = of_data == of_transposed and of_data.is_symmetric
    if data is not None and scale_inv is not None and copies == "both" and same_scales:
        transposed = data.transpose(cols + rows)
        transposed_scale_inv = scale_inv.transpose(cols + rows) if scale_inv.ndim else scale_inv
    elif copies != "data":
        codes, transposed_scale_inv = _copy(wide, quantization, of_transposed, cols, rows, tensor_amax, row_axes)
        transposed = codes.transpose(cols + rows)
    array = QuantizedArray(
        data,
        scale_inv,
        transposed,
        transposed_scale_inv,
        len(rows),
        len(cols),
        quantization.scaling,
        quantization.transposed_scaling,
        np.dtype(x.dtype),
    )
    return QuantizedParts(
        array,
        _float(current_amax) if with_amax and current_amax is not None else None,
        _over(lax.psum, jnp.sum(wide, axis=rows), row_axes) if with_dbias else None,
    )


def mesh_axes(amax_axis: GroupAxes | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The mesh axes over which rows and cols are split; a name alone is about rows."""
    if not isinstance(amax_axis, Mapping):
        amax_axis = {"rows": amax_axis or ()}

    def names(axes: AxisName | None) -> tuple[str, ...]:
        return (axes,) if isinstance(axes, str) else tuple(axes or ())

    return names(amax_axis.get("rows")), names(amax_axis.get("cols"))


def facts_of_copies(quantization: Quantization, copies: Copies) -> tuple[Facts, ...]:
    """The facts of the scalings of the copies that are asked for."""
    both = (facts_of(quantization.scaling), facts_of(quantization.transposed_scaling))
    return both if copies == "both" else (both[copies == "transposed"],)


def blocked_groups(quantization: Quantization, copies: Copies) -> frozenset[str]:
    """The groups of dimensions, "rows" and "cols", whose last dimension is cut into blocks."""
    groups: set[str] = set()
    both = facts_of_copies(quantization, "both")
    for copy, facts, summed in zip(("data", "transposed"), both, ("cols", "rows"), strict=True):
        if copies in (copy, "both") and facts.in_blocks:
            groups |= {summed} if facts.outer_block == 1 else {"rows", "cols"}
    return frozenset(groups)


def amax_of(x: Array, axes: tuple[str, ...]) -> Array:
    """The amax of float32 x and of its shards over mesh axes; NaN where any value is."""
    return amax_of_shards(_float(_amax_bits(x, tuple(range(x.ndim)))), axes)


def amax_of_shards(amax: Array, axes: tuple[str, ...]) -> Array:
    """The maximum of amaxes (float32) over mesh axes, elementwise; of their bits, because `lax.pmax` may drop NaN."""
    return _float(lax.pmax(_bits(amax), axes)) if axes else amax


def scale_of(amax: Array, dtype: np.dtype, power_of_two: bool) -> Array:
    """The scale, which maps amax to the largest FP8 value. amax comes as the bits of a float32 (int32)."""
    largest_code = float(jnp.finfo(dtype).max)
    # Below, the scale would exceed 2^126 and its reciprocal be subnormal.
    smallest = np.float32(largest_code * 2.0**-126)
    scale = _quotient(largest_code, jnp.maximum(lax.bitcast_convert_type(amax, jnp.float32), smallest))
    if power_of_two:
        scale = _float(_bits(scale) & _INFINITY)
    return jnp.where((amax < _SMALLEST_NORMAL) | (amax >= _INFINITY), np.float32(1.0), scale)


def scale_inv_of(amax: Array, quantization: Quantization) -> Array:
    """The scale_inv of an amax (float32); elementwise."""
    amax = _bits(amax)
    return _scale_inv(amax, scale_of(amax, quantization.dtype, quantization.power_of_two_scales))


def _scale_inv(amax: Array, scale: Array) -> Array:
    """The reciprocal of the scale; NaN where amax (its bits) is not finite: all that share the scale then read as NaN,
    those too that saturated under a scale of 1."""
    return _float(jnp.where((amax & 0x7FFFFFFF) < _INFINITY, _bits(_quotient(1.0, scale)), _QUIET_NAN))


def _copy(
    x: Array,
    quantization: Quantization,
    facts: Facts,
    outer: tuple[int, ...],
    summed: tuple[int, ...],
    tensor_amax: Array | None,
    summed_axes: tuple[str, ...],
    shared_blocks: SharedBlocks | None = None,
) -> tuple[Array, Array]:
    """One copy: FP8 in the order of x, and scale_inv in the order of `quantized.scale_shape`."""

    def scaled(x: Array, amax: Array) -> tuple[Array, Array]:
        power_of_two = quantization.power_of_two_scales or facts.dtype == E8M0
        scale = scale_of(amax, quantization.dtype, power_of_two)
        # Keeps XLA from fusing the division into the loop over x, where it would run for each value.
        scale, scale_inv = lax.optimization_barrier((scale, _scale_inv(amax, scale)))
        return _encode(x, scale, quantization.dtype), scale_inv

    if facts.by_tensor:
        assert tensor_amax is not None
        codes, scale_inv = scaled(x, jnp.expand_dims(tensor_amax, tuple(range(x.ndim))))
        return codes, jnp.squeeze(scale_inv, tuple(range(x.ndim)))
    if facts.by_row:
        codes, scale_inv = scaled(x, _over(lax.pmax, _amax_bits(x, summed, keepdims=True), summed_axes))
        return codes, jnp.squeeze(scale_inv, summed)

    if shared_blocks is not None:
        cut, whole = (outer[-1], summed[-1]) if shared_blocks.group == "rows" else (summed[-1], outer[-1])
        return _copy_of_shared_blocks(x, quantization, facts, cut, whole, shared_blocks.axis_name)
    split = sorted({summed[-1]} if facts.outer_block == 1 else {summed[-1], outer[-1]})
    parts = blocks.split(x, split, facts.block_size)
    inside = tuple(axis + place + 1 for place, axis in enumerate(split))
    codes, scale_inv = scaled(parts, _amax_bits(parts, inside, keepdims=True))
    scale_inv = jnp.squeeze(scale_inv, inside).transpose(facts.of_scales(outer, summed))
    return blocks.merge(codes, x.shape, split), _e8m0(scale_inv) if facts.dtype == E8M0 else scale_inv


def _copy_of_shared_blocks(
    x: Array, quantization: Quantization, facts: Facts, cut: int, whole: int, axis_name: str
) -> tuple[Array, Array]:
    """FP8 of this device's part along one dimension, and the scales of all devices' blocks. Blocks are square."""
    parts = blocks.split(x, [whole], facts.block_size)
    inside, cut = whole + 1, cut + (cut > whole)
    of_rows = _amax_bits(parts, (inside,), keepdims=True)
    count = x.shape[cut - (cut > whole)]
    block = (lax.axis_index(axis_name) * count + jnp.arange(count, dtype=jnp.int32)) // facts.block_size
    shape = list(of_rows.shape)
    shape[cut] = -(-count * lax.axis_size(axis_name) // facts.block_size)
    amax = varying_over(jnp.zeros(shape, of_rows.dtype), varying_axes(of_rows))
    amax = lax.pmax(amax.at[(slice(None),) * cut + (block,)].max(of_rows), axis_name)
    scale = scale_of(amax, quantization.dtype, quantization.power_of_two_scales)
    codes = _encode(parts, jnp.take(scale, block, axis=cut, mode="clip"), quantization.dtype)
    return blocks.merge(codes, x.shape, [whole]), jnp.squeeze(_scale_inv(amax, scale), inside)


def _e8m0(x: Array) -> Array:
    """Powers of two and NaN (float32) in one byte, which holds their exponent."""
    exponent = jnp.where(jnp.isnan(x), 0xFF, _bits(x) >> 23)
    return lax.bitcast_convert_type(exponent.astype(jnp.uint8), E8M0)


def _encode(x: Array, scale: Array, dtype: np.dtype) -> Array:
    """FP8 of x · scale: rounded to nearest even, clipped; subnormal x as zero, NaN and infinities visible."""
    mantissa, bias, infinity = (3, 7, _FP8_NAN) if np.dtype(dtype) == jnp.float8_e4m3fn else (2, 15, 0x7C)
    shift = 23 - mantissa
    smallest_normal = (128 - bias) << 23
    # A float of this size has the spacing of FP8 subnormals: a sum with it ends in the bits of the rounded code.
    aligned = (127 + 23 + 1 - bias - mantissa) << 23

    bits = _bits(x)
    magnitude = bits & 0x7FFFFFFF
    product = _float(jnp.where(magnitude < _SMALLEST_NORMAL, 0, magnitude)) * scale
    clipped = _bits(jnp.minimum(product, np.float32(jnp.finfo(dtype).max)))
    normal = (clipped - ((127 - bias) << 23) + ((1 << (shift - 1)) - 1) + ((clipped >> shift) & 1)) >> shift
    subnormal = _bits(_float(clipped) + np.int32(aligned).view(np.float32)) - aligned
    finite = jnp.where(clipped < smallest_normal, subnormal, normal)
    special = jnp.where(magnitude > _INFINITY, _FP8_NAN, infinity)
    code = jnp.where(magnitude >= _INFINITY, special, finite)
    sign = jnp.where(code == _FP8_NAN, 0, (bits >> 24) & 0x80)
    return lax.bitcast_convert_type((code | sign).astype(jnp.uint8), dtype)


@functools.partial(jax.jit, static_argnums=0)  # one function in a program for all quotients of a shape
def _quotient(numerator: float, denominator: Array) -> Array:
    """numerator / denominator, rounded correctly even if the backend's own division is off by up to two units.

    The numerator is n · 2^k with n in {1, 7}, which makes ties impossible; denominator and quotient are normal floats.
    """
    below = _bits(np.float32(numerator) / denominator) - 2
    divisor = _mantissa(_bits(denominator))
    # Steps up while the exact quotient is past the middle of two neighbours: numerator > middle · denominator. The
    # difference of both sides is small, so its lowest 32 bits suffice, and the numerator's own lowest 32 bits are zero.
    steps = [-((2 * _mantissa(below + step) + 1) * divisor) > 0 for step in range(4)]
    return _float(below + sum(step.astype(jnp.int32) for step in steps))


def _mantissa(bits: Array) -> Array:
    return (bits & 0x007FFFFF) | _SMALLEST_NORMAL


def _amax_bits(x: Array, axes: tuple[int, ...], *, keepdims: bool = False) -> Array:
    """The amax over the axes as the bits of a float32 (int32), whose order puts NaN above infinity."""
    bits = jnp.max(_bits(x) & 0x7FFFFFFF, axis=axes, keepdims=keepdims, initial=0)
    return jnp.where(bits > _INFINITY, _QUIET_NAN, bits)


def _over(collective, x: Array, axes: tuple[str, ...]) -> Array:
    return collective(x, axes) if axes else x


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _float(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)
