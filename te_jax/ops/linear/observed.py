"""Statistics of operands in FP8, where they are asked for (`te_jax.debug`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from te_jax._core import observe
from te_jax.quantized import QuantizedArray, facts_of
from te_jax.recipe import Role
from te_jax.sharding import Layout

_INFINITY, _SMALLEST_NORMAL = 0x7F800000, 0x00800000
_SMALLEST = np.finfo(np.float32).tiny
_ROUNDED = np.float32(1 + 2**-20)  # what scales in float32 may be off by
_EXPONENTS = 256

_Rows = dict[tuple[str, ...], Array]
"""Statistics of rows, by the fields that an integer holds."""


def observed(role: Role, x: Array, array: QuantizedArray) -> QuantizedArray:
    """An array in FP8, with statistics of its copies where they are asked for.

    Args:
      role: of x.
      x: plain.
      array: of x.
    """
    request, layer = observe.requested(), observe.current_layer()
    if request is None or layer is None or (role not in request.roles and role != "kernel"):
        return array
    x, still = lax.stop_gradient((x, dataclasses.replace(array, straight_through=None)))
    wanted = []
    for copy, products in _copies(still, role, layer):
        asked = tuple(product for product in products if role in request.roles and product in request.products)
        if asked:
            wanted.append((copy, asked))
    fields_of_copies = _fields(x, [copy for copy, _ in wanted], exponents=request.exponents) if wanted else []
    entries = [observe.Entry(asked, tuple(fields)) for (_, asked), fields in zip(wanted, fields_of_copies, strict=True)]
    statistics = [value for fields in fields_of_copies for value in fields.values()]
    if not entries and role != "kernel":  # from whose tag others know where the kernel comes from
        return array
    copies = {name: getattr(array, name) for name in ("data", "transposed") if getattr(array, name) is not None}
    static = observe.Tag(layer.operation, role, tuple(entries))
    tagged = observe.tag(tuple(copies.values()), layer.links, statistics, static)
    return dataclasses.replace(array, **dict(zip(copies, tagged, strict=True)))


def _copies(
    array: QuantizedArray, role: Role, layer: observe.Layer
) -> Iterable[tuple[QuantizedArray, tuple[str, ...]]]:
    """Each copy that products may find other values in, and the products that read them."""
    data, transposed = (layer.product(role, copy) for copy in ("data", "transposed"))
    same = array.scaling == array.transposed_scaling and facts_of(array.scaling).is_symmetric
    both = array.data is not None and array.transposed is not None and array.data.dtype == array.transposed.dtype
    if layer.data_copies:
        yield array.without_transposed(), tuple(layer.product(role, copy) for copy in layer.data_copies)
        return
    if same and both:
        yield array.without_transposed(), (data, transposed)
        return
    if array.data is not None:
        yield array.without_transposed(), (data,)
    if array.transposed is not None:
        yield array.without_data(), (transposed,)


def _fields(x: Array, copies: Sequence[QuantizedArray], *, exponents: bool) -> list[dict[str, Array]]:
    """The statistics of copies of x, by the names of `observe.KINDS`."""
    layout = dataclasses.replace(Layout.of(x), dtype=np.dtype(np.float32))
    # XLA might take the values that x had before it was rounded, or wait with those of kernels for the optimizer.
    x = lax.optimization_barrier(x).astype(jnp.float32)
    bits = lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
    finite = bits < _INFINITY
    # One comparison, which NaN and infinities fail too. XLA keeps a mask of two comparisons in memory.
    above = lax.bitcast_convert_type(bits - _SMALLEST_NORMAL, jnp.uint32)
    nonzero = above < np.uint32(_INFINITY - _SMALLEST_NORMAL)
    factor = _factor(copies[0])
    of_x = {
        ("amax_bits",): jnp.max(bits, axis=-1, initial=0),
        ("norm",): jnp.sum(jnp.where(finite, x * factor, 0.0) ** 2, axis=-1),
        **_counts(nonzero=nonzero, nonfinite=~finite),
    }

    def rows_of(copy: QuantizedArray) -> _Rows:
        read, largest = _read(x, copy, layout)
        return {
            ("error_norm",): jnp.sum(jnp.where(finite, x * factor - read * factor, 0.0) ** 2, axis=-1),
            **_counts(underflows=nonzero & (read == 0.0), saturated=finite & (jnp.abs(x) > largest * _ROUNDED)),
        }

    # XLA finds all rows in one pass over x, and float32 sums of rows lose less than one sum of all values.
    of_x, *of_copies = lax.optimization_barrier([of_x, *map(rows_of, copies)])
    rest: dict[str, Array] = {"count": jnp.full((), x.size, jnp.float32)}
    if exponents:
        each = jnp.arange(_EXPONENTS, dtype=jnp.int32).reshape((1,) * x.ndim + (_EXPONENTS,))
        is_in_bin = jnp.expand_dims(bits >> 23, x.ndim) == each
        counts = jnp.sum(is_in_bin, axis=x.ndim - 1, dtype=jnp.int32).astype(jnp.float32)
        rest["exponents"] = jnp.sum(counts, axis=tuple(range(x.ndim - 1)))
    return [
        _of_tensor(of_x | of_copy, factor) | _of_scales(copy) | rest
        for copy, of_copy in zip(copies, of_copies, strict=True)
    ]


def _factor(copy: QuantizedArray) -> Array:
    """The power of two by which values are multiplied before they are squared, so that squares stay in float32. It
    follows from the scales: the amax would cost a pass of its own."""
    scale_inv = _scale_inv(copy)
    known = jnp.where(jnp.isfinite(scale_inv), scale_inv, 0.0)
    return observe.power_of_two_for(jnp.max(known, initial=0.0)) * np.float32(2**-6)


def _counts(**flags: Array) -> _Rows:
    """How many of two kinds of flags, of which a value has one, are set in each row: in one integer that holds both."""
    first, second = flags.values()
    if first.shape[-1] < 1 << 15:
        ones = jnp.where(first, np.int32(1), jnp.where(second, np.int32(1 << 16), np.int32(0)))
        return {tuple(flags): jnp.sum(ones, axis=-1, dtype=jnp.int32)}
    return {(name,): jnp.sum(each, axis=-1, dtype=jnp.int32) for name, each in flags.items()}


def _of_tensor(rows: _Rows, factor: Array) -> dict[str, Array]:
    """Sums are float32: integers of 32 bits do not count the values of all devices; those of a row they do."""
    statistics = {}
    for fields, values in rows.items():
        for place, field in enumerate(fields):
            each = values if len(fields) == 1 else values >> 16 * place & 0xFFFF
            if observe.KINDS[field] == "max":
                statistics[field] = jnp.max(each, initial=0)
                continue
            total = jnp.sum(each.astype(jnp.float32))
            if observe.KINDS[field] == "norm":
                # What is above 0 stays above it.
                total = jnp.where(total > 0.0, jnp.maximum(jnp.sqrt(total) / factor, _SMALLEST), total)
            statistics[field] = total
    return statistics


def _scale_inv(copy: QuantizedArray) -> Array:
    scale_inv: Any = copy.scale_inv if copy.data is not None else copy.transposed_scale_inv
    return scale_inv.astype(jnp.float32)


def _of_scales(copy: QuantizedArray) -> dict[str, Array]:
    scale = 1.0 / _scale_inv(copy)
    known = jnp.isfinite(scale)
    return {
        "smallest_scale": jnp.min(jnp.where(known, scale, jnp.inf), initial=np.inf),
        "largest_scale": jnp.max(jnp.where(known, scale, -jnp.inf), initial=-np.inf),
    }


def _read(x: Array, copy: QuantizedArray, layout: Layout) -> tuple[Array, Array]:
    """The values that products read of a copy, and the largest that it has for each, where x lies.

    Codes of a transposed copy are computed from x once more: XLA would take several passes to turn the stored ones.
    """
    copy = dataclasses.replace(copy, dtype=np.dtype(np.float32))
    names = ("data", "scale_inv") if copy.data is not None else ("transposed", "transposed_scale_inv")
    stored, scale_inv = (getattr(copy, name) for name in names)
    largest = np.float32(jnp.finfo(stored.dtype).max)

    def spread(scales: Array) -> Array:
        """For every value. The barrier keeps XLA from computing scales for every value."""
        of_ones = dict(zip(names, (jnp.ones_like(stored), lax.optimization_barrier(scales)), strict=True))
        return layout.apply(dataclasses.replace(copy, **of_ones).dequantize())

    scale_inv = scale_inv.astype(jnp.float32)
    inverse = spread(scale_inv)
    if copy.data is not None:
        return layout.apply(copy.dequantize()), largest * inverse
    scaled = jnp.clip(x * spread(1.0 / scale_inv), -largest, largest)
    return _rounded(scaled, stored.dtype) * inverse, largest * inverse


def _rounded(x: Array, dtype: np.dtype) -> Array:
    """Float32 x to the nearest value of an FP8 dtype, to even, as far as it reaches; XLA may leave out a conversion to
    FP8 and back."""
    info = jnp.finfo(dtype)
    smallest = np.float32(info.smallest_normal).view(np.int32)
    # Beside 1.5 · 2^(23 - nmant) of its own power of two, x has room for nmant bits.
    exponent = jnp.maximum(lax.bitcast_convert_type(x, jnp.int32) & _INFINITY, smallest)
    offset = lax.bitcast_convert_type(exponent + ((23 - info.nmant << 23) | 0x400000), jnp.float32)
    return (x + offset) - offset
