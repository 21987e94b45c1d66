"""Matrix products of quantized or plain arrays in plain jax.numpy."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from te_jax.quantized import QuantizedArray
from te_jax.recipe import Quantization
from te_jax.reference.quantize import GroupAxes, quantize


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
    gelu_preactivation: Array | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    out_quantization: Quantization | None = None,
    out_amax: Array | None = None,
    accumulator: Array | None = None,
    accumulate: bool = True,
) -> Any:
    """Definition of `te_jax.ops.gemm`; see there for the arguments.

    Multiplies dequantized values, adds up and applies what follows the product in float32, and rounds once.
    """
    a, b = dequantized_copy(lhs, lhs_contracting), dequantized_copy(rhs, rhs_contracting)
    if isinstance(lhs, QuantizedArray):
        contracting_ndim = lhs.col_ndim if lhs_contracting == "cols" else lhs.row_ndim
    elif contracting_ndim is None:
        contracting_ndim = 1
    dtype = out_dtype or (lhs.dtype if accumulator is None else accumulator.dtype)
    value = lax.dot_general(
        a,
        b,
        (
            (summed_dimensions(a.ndim, contracting_ndim, lhs_contracting),
             summed_dimensions(b.ndim, contracting_ndim, rhs_contracting)),
            ((), ()),
        ),
        # Products of 16-bit values are exact in float32; for float32 GPUs would otherwise round them to TF32.
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    return epilogue(
        value,
        bias=bias,
        activation=activation,
        save_preactivation=save_preactivation,
        gelu_preactivation=gelu_preactivation,
        dtype=dtype,
        out_quantization=out_quantization,
        out_amax=out_amax,
        out_row_ndim=a.ndim - contracting_ndim,
        accumulator=accumulator if accumulate else None,
    )


def epilogue(
    value: Array,
    *,
    bias: Array | None,
    activation: str | None,
    save_preactivation: bool,
    gelu_preactivation: Array | None,
    dtype: jax.typing.DTypeLike,
    out_quantization: Quantization | None,
    out_amax: Array | None,
    out_row_ndim: int,
    accumulator: Array | None,
    axis_name: GroupAxes | None = None,
) -> Any:
    """What follows the product `value` [*lhs outer, *rhs outer], up to what `te_jax.ops.gemm` returns.

    Inside `shard_map`, `axis_name` says which mesh axes split the "rows" and "cols" of the value.
    """
    value = value.astype(jnp.float32)
    if accumulator is not None:
        value = value + accumulator.astype(jnp.float32)
    if bias is not None:
        value = value + jnp.expand_dims(bias.astype(jnp.float32), tuple(range(value.ndim - bias.ndim)))
    preactivation = value.astype(dtype)
    if activation == "gelu":
        value = gelu(value)
    if gelu_preactivation is not None:
        value = value * gelu_derivative(gelu_preactivation.astype(jnp.float32))
    if out_quantization is None:
        result = value.astype(dtype)
        return (result, preactivation) if save_preactivation else result
    quantized, amax, _ = quantize(
        value,
        out_quantization,
        row_ndim=out_row_ndim,
        copies="data",
        amax=out_amax,
        axis_name=axis_name,
        with_amax=True,
    )
    quantized = dataclasses.replace(quantized, dtype=np.dtype(dtype))
    return (quantized, amax, preactivation) if save_preactivation else (quantized, amax)


def dequantized_copy(x: QuantizedArray | Array, contracting: str) -> Array:
    """The array [*rows, *cols], from the copy that a product over its rows or cols reads: quantized ones in float32."""
    if not isinstance(x, QuantizedArray):
        return x
    copy = x.without_transposed() if contracting == "cols" else x.without_data()
    return dataclasses.replace(copy, dtype=np.dtype(np.float32)).dequantize()


def summed_dimensions(ndim: int, contracting_ndim: int, contracting: str) -> tuple[int, ...]:
    """The dimensions of [*rows, *cols] that a product over its rows or its cols sums over."""
    first = ndim - contracting_ndim if contracting == "cols" else 0
    return tuple(range(first, first + contracting_ndim))


_SQRT_2_OVER_PI = 0.7978845608028654


def gelu(x: Array) -> Array:
    """0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³)))."""
    return 0.5 * x * (1.0 + jnp.tanh(_SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)))


def gelu_derivative(x: Array) -> Array:
    """The derivative of `gelu`."""
    tanh = jnp.tanh(_SQRT_2_OVER_PI * (x + 0.044715 * x * x * x))
    inner = _SQRT_2_OVER_PI * (1.0 + 3.0 * 0.044715 * x * x)
    return 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * inner
