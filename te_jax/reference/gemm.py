"""Matrix products of quantized or plain arrays in plain jax.numpy."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from te_jax.quantized import QuantizedArray


class GemmResult(NamedTuple):
    """The result of `gemm` with save_preactivation=True.

    Attributes:
      value: gelu(preactivation).
      preactivation: A B + bias, in the dtype of the value.
    """

    value: Array
    preactivation: Array


def gemm(
    lhs: QuantizedArray | Array,
    rhs: QuantizedArray | Array,
    *,
    lhs_contracting: str = "cols",
    rhs_contracting: str = "rows",
    contracting_ndim: int | None = None,
    bias: Array | None = None,
    activation: str | None = None,
    save_preactivation: bool = False,
    out_dtype: jax.typing.DTypeLike | None = None,
    accumulator: Array | None = None,
    accumulate: bool = True,
) -> Array | GemmResult:
    """Definition of `te_jax.ops.gemm`; see there for the arguments.

    Multiplies dequantized values, adds up and applies what follows the product in float32, and rounds once.
    """
    a, b = dequantized(lhs, lhs_contracting), dequantized(rhs, rhs_contracting)
    if isinstance(lhs, QuantizedArray):
        contracting_ndim = lhs.col_ndim if lhs_contracting == "cols" else lhs.row_ndim
    elif contracting_ndim is None:
        contracting_ndim = 1
    value = lax.dot_general(
        a,
        b,
        (
            (_summed(a.ndim, contracting_ndim, lhs_contracting), _summed(b.ndim, contracting_ndim, rhs_contracting)),
            ((), ()),
        ),
        # Products of 16-bit values are exact in float32; for float32 GPUs would otherwise round them to TF32.
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    results = epilogue(
        value,
        bias=bias,
        activation=activation,
        save_preactivation=save_preactivation,
        dtype=out_dtype or (lhs.dtype if accumulator is None else accumulator.dtype),
        accumulator=accumulator if accumulate else None,
    )
    return GemmResult(*results) if save_preactivation else results[0]


def epilogue(
    value: Array,
    *,
    bias: Array | None,
    activation: str | None,
    save_preactivation: bool,
    dtype: jax.typing.DTypeLike,
    accumulator: Array | None,
) -> tuple[Array, ...]:
    """The epilogue of the product `value` [*lhs outer, *rhs outer]: the result and, if saved, the preactivation."""
    value = value.astype(jnp.float32)
    if accumulator is not None:
        value = value + accumulator.astype(jnp.float32)
    if bias is not None:
        value = value + jnp.expand_dims(bias.astype(jnp.float32), tuple(range(value.ndim - bias.ndim)))
    result = (gelu(value) if activation == "gelu" else value).astype(dtype)
    return (result, value.astype(dtype)) if save_preactivation else (result,)


def gelu(x: Array) -> Array:
    """0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³)))."""
    return 0.5 * x * (1.0 + jnp.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


def _summed(ndim: int, contracting_ndim: int, contracting: str) -> tuple[int, ...]:
    """The dimensions of [*rows, *cols] that a product over its rows or its cols sums over."""
    return tuple(range(ndim - contracting_ndim, ndim) if contracting == "cols" else range(contracting_ndim))


def dequantized(x: QuantizedArray | Array, contracting: str) -> Array:
    """The array [*rows, *cols] in float32, from the copy that a product over its rows or cols reads; plain arrays as
    they are."""
    if not isinstance(x, QuantizedArray):
        return x
    copy = x.without_transposed() if contracting == "cols" else x.without_data()
    return dataclasses.replace(copy, dtype=np.dtype(np.float32)).dequantize()
