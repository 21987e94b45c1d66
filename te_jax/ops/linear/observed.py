"""Statistics of operands in FP8, where they are asked for (`te_jax.debug`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from te_jax._core import observe
from te_jax.quantized import QuantizedArray
from te_jax.recipe import Role
from te_jax.sharding import Layout

_INFINITY, _SMALLEST_NORMAL = 0x7F800000, 0x00800000
_ROUNDED = np.float32(1 + 2**-20)  # what scales in float32 may be off by
_EXPONENTS = 256


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
    entries, statistics = [], []
    x, still = lax.stop_gradient((x, dataclasses.replace(array, straight_through=None)))
    for copy, products in _copies(still, role, layer):
        wanted = tuple(product for product in products if role in request.roles and product in request.products)
        if wanted:
            fields = _fields(x, copy, exponents=request.exponents)
            entries.append(observe.Entry(wanted, tuple(fields)))
            statistics += fields.values()
    if not entries and role != "kernel":  # from whose tag others know where the kernel comes from
        return array
    held = {name: getattr(array, name) for name in ("data", "transposed") if getattr(array, name) is not None}
    static = observe.Tag(layer.operation, role, tuple(entries))
    tagged = observe.tag(tuple(held.values()), layer.links, statistics, static)
    return dataclasses.replace(array, **dict(zip(held, tagged, strict=True)))


def _copies(
    array: QuantizedArray, role: Role, layer: observe.Layer
) -> Iterable[tuple[QuantizedArray, tuple[str, ...]]]:
    """Each copy that products may find other values in, and the products that read them."""
    data, transposed = (layer.product(role, copy) for copy in ("data", "transposed"))
    same = array.scaling == array.transposed_scaling in ("tensor", "block_128x128")
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


def _fields(x: Array, copy: QuantizedArray, *, exponents: bool) -> dict[str, Array]:
    """The statistics of one copy of x, by the names of `observe.KINDS`."""
    layout, wide = Layout.of(x), dataclasses.replace(copy, dtype=np.dtype(np.float32))
    layout = dataclasses.replace(layout, dtype=np.dtype(np.float32))
    if x.dtype != jnp.float32:
        x = lax.optimization_barrier(x)  # XLA might take the values that x had before it was rounded
    x = x.astype(jnp.float32)
    read = layout.apply(wide.dequantize())
    codes = layout.apply(_with_scales(wide, jnp.ones_like).dequantize())

    bits = lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
    finite = bits < _INFINITY
    nonzero = finite & (bits >= _SMALLEST_NORMAL)
    stored: Any = copy.data if copy.data is not None else copy.transposed
    largest = np.float32(jnp.finfo(stored.dtype).max)
    beyond = (jnp.abs(codes) == largest) & (jnp.abs(x) > jnp.abs(read) * _ROUNDED)
    scale_inv: Any = copy.scale_inv if copy.data is not None else copy.transposed_scale_inv
    scale = 1.0 / scale_inv.astype(jnp.float32)
    known = jnp.isfinite(scale)
    fields: dict[str, Any] = {
        "amax_bits": jnp.max(bits, initial=0),
        "smallest_scale": jnp.min(jnp.where(known, scale, jnp.inf), initial=np.inf),
        "largest_scale": jnp.max(jnp.where(known, scale, -jnp.inf), initial=-np.inf),
        "count": jnp.full((), x.size, jnp.float32),
        "nonzero": _count(nonzero),
        "underflows": _count(nonzero & (read == 0.0)),
        "saturated": _count(nonzero & beyond),
        "nonfinite": _count(~finite),
        "squares": _sum(jnp.where(finite, x, 0.0) ** 2),
        "error_squares": _sum(jnp.where(finite, x - read, 0.0) ** 2),
    }
    if exponents:
        each = jnp.arange(_EXPONENTS, dtype=jnp.int32).reshape((1,) * x.ndim + (_EXPONENTS,))
        is_in_bin = jnp.expand_dims(bits >> 23, x.ndim) == each
        counts = jnp.sum(is_in_bin, axis=x.ndim - 1, dtype=jnp.int32).astype(jnp.float32)
        fields["exponents"] = jnp.sum(counts, axis=tuple(range(x.ndim - 1)))
    return fields


def _with_scales(x: QuantizedArray, function: Callable[[Array], Array]) -> QuantizedArray:
    scales = {name: getattr(x, name) for name in ("scale_inv", "transposed_scale_inv")}
    return dataclasses.replace(x, **{name: function(s) for name, s in scales.items() if s is not None})


def _count(flags: Array) -> Array:
    """Float32, for integers of 32 bits do not count the values of all devices; those of a row they do."""
    return jnp.sum(jnp.sum(flags, axis=-1, dtype=jnp.int32).astype(jnp.float32))


def _sum(x: Array) -> Array:
    """The sum of the sums of rows, which loses less than float32 sums of one value after the other."""
    return jnp.sum(jnp.sum(x, axis=-1))
