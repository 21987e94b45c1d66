"""Kernels that are quantized before they are used, for several microbatches or calls."""

from __future__ import annotations

import jax
from jax import Array

from te_jax import native
from te_jax.ops.linear.arguments import whole_blocks
from te_jax.ops.quantize import quantize
from te_jax.quantized import QuantizedArray
from te_jax.recipe import Recipe
from te_jax.sharding import regrouped


def quantize_kernel(
    kernel: Array,
    recipe: Recipe,
    *,
    row_ndim: int,
    stacked_ndim: int = 0,
    amax: Array | None = None,
    implementation: native.Implementation | None = None,
) -> QuantizedArray:
    """Both copies of a kernel [*stacked, *rows, *cols], each stacked one with scales of its own.

    Where blocks would not divide the last dimension of rows or cols, these are one dimension, as `dense` has it.

    Args:
      amax: float32 [*stacked], the largest magnitudes where scaling is by tensor; None to find them.
    """
    stacked, rows, cols = (
        kernel.shape[:stacked_ndim],
        kernel.shape[stacked_ndim : stacked_ndim + row_ndim],
        kernel.shape[stacked_ndim + row_ndim :],
    )
    after = whole_blocks(rows, recipe), whole_blocks(cols, recipe)

    def quantized(kernel: Array, amax: Array | None) -> QuantizedArray:
        quantization = recipe.quantization("kernel")
        return quantize(kernel, quantization, row_ndim=len(after[0]), amax=amax, implementation=implementation)

    for _ in stacked:
        quantized = jax.vmap(quantized)
    return quantized(regrouped(kernel, (stacked, rows, cols), (stacked, *after)), amax)
