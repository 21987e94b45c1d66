"""Matrix products of groups of rows in plain jax.numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from te_jax.quantized import QuantizedArray
from te_jax.reference.gemm import dequantized


def grouped_gemm(
    lhs: QuantizedArray | Array,
    rhs: QuantizedArray | Array,
    bounds: Array,
    *,
    lhs_contracting: str = "cols",
    rhs_contracting: str = "rows",
    bias: Array | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    accumulator: Array | None = None,
    accumulate: bool = True,
) -> Array:
    """Definition of `te_jax.ops.grouped_gemm`; see there for the arguments.

    One group after the other, each as a product of all rows of which others are masked: the memory is that of one
    group, and the FLOPs are those of all rows once for every group.

    Args:
      bounds: int32 [groups + 1], rows where groups begin, and where the last one ends.
    """
    a, b = dequantized(lhs, lhs_contracting), dequantized(rhs, rhs_contracting)
    wide = jnp.float64 if a.dtype == jnp.float64 else jnp.float32
    rows = jnp.arange(a.shape[0], dtype=bounds.dtype)[:, None]

    def inside(begin: Array, end: Array) -> Array:
        return (rows >= begin) & (rows < end)

    def dot(a: Array, b: Array, summed: tuple[int, int]) -> Array:
        precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
        dimensions = (((summed[0],), (summed[1],)), ((), ()))
        return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=wide)

    # Both operands and results are selected: 0 · NaN is NaN, in gradients as well.
    def add_rows(total: Array, group: tuple[Array, ...]) -> tuple[Array, None]:
        begin, end, member, *biases = group
        mask = inside(begin, end)
        value = dot(jnp.where(mask, a, 0), member, (1, 0 if rhs_contracting == "rows" else 1))
        for bias in biases:
            value = value + bias.astype(wide)[None]
        return jnp.where(mask, value, total), None

    def sums(_: None, group: tuple[Array, ...]) -> tuple[None, Array]:
        mask = inside(*group)
        return None, dot(jnp.where(mask, a, 0), jnp.where(mask, b, 0), (0, 0))

    begins, ends = bounds[:-1], bounds[1:]
    if lhs_contracting == "rows":
        value = lax.scan(sums, None, (begins, ends))[1]
    else:
        columns = b.shape[2 if rhs_contracting == "rows" else 1]
        # Zeros that depend on the operands: inside shard_map they must vary over the same mesh axes.
        zeros = jnp.zeros((a.shape[0], columns), wide) + _nothing_of(a, b, bounds).astype(wide)
        value = lax.scan(add_rows, zeros, (begins, ends, b, *(() if bias is None else (bias,))))[0]
    if accumulator is not None and accumulate:
        value = value + accumulator.astype(wide)
    return value.astype(out_dtype or (lhs.dtype if accumulator is None else accumulator.dtype))


def _nothing_of(*arrays: Array) -> Array:
    """0, which JAX takes to depend on all arrays."""
    empty = (lax.stop_gradient(x)[(slice(0, 0),) * x.ndim].astype(jnp.float32).reshape(0) for x in arrays)
    return jnp.sum(jnp.concatenate(list(empty)))
