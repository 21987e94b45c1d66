"""Kernels that are quantized before they are used, for several microbatches or calls."""

from __future__ import annotations

import dataclasses

import jax
from jax import Array

from te_jax import native
from te_jax._core import observe
from te_jax._core.arguments import is_whole_number
from te_jax.ops.linear.arguments import whole_blocks
from te_jax.ops.linear.observed import observed
from te_jax.ops.quantize import quantize, quantize_shared_blocks
from te_jax.quantized import QuantizedArray, facts_of_recipe
from te_jax.recipe import Recipe
from te_jax.reference.quantize import GroupAxes, SharedBlocks
from te_jax.sharding import regrouped


@dataclasses.dataclass(frozen=True)
class Requantize:
    """How a kernel is quantized before the layers that read it.

    Attributes:
      recipe: of the layer that it belongs to.
      row_ndim: number of dimensions of the kernel in its rows.
      stacked_ndim: number of dimensions in front of them along which the kernels of several layers are stacked; each
        has separate scales.
      implementation: see `te_jax.ops.quantize`.

    Raises:
      ValueError: the recipe is none, or a number is out of range.
    """

    recipe: Recipe
    row_ndim: int = 1
    stacked_ndim: int = 0
    implementation: native.Implementation | None = None

    def __post_init__(self):
        if not isinstance(self.recipe, Recipe):
            raise ValueError(
                f"recipe is {self.recipe!r}; it must be a recipe, such as te_jax.recipe.CurrentScaling(); for a kernel "
                "that is not quantized, write None instead of a Requantize"
            )
        for name, smallest in (("row_ndim", 1), ("stacked_ndim", 0)):
            value = getattr(self, name)
            if not is_whole_number(value) or value < smallest:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {smallest}")


def quantize_kernel(
    kernel: Array,
    recipe: Recipe,
    *,
    row_ndim: int,
    stacked_ndim: int = 0,
    amax: Array | None = None,
    amax_axis: GroupAxes | None = None,
    shared_blocks: SharedBlocks | None = None,
    straight_through: bool = False,
    implementation: native.Implementation | None = None,
) -> QuantizedArray:
    """Both copies of a kernel [*stacked, *rows, *cols], each stacked one with scales of its own.

    Where blocks would not divide the last dimension of rows or cols, these are one dimension, as `dense` has it.

    Args:
      amax: float32 [*stacked], the largest magnitudes where scaling is by tensor; None to find them.
      shared_blocks: those that this device's part of a kernel cuts; its scales are then those of the whole kernel.
      amax_axis, straight_through, implementation: see `te_jax.ops.quantize`.
    """
    stacked, rows, cols = (
        kernel.shape[:stacked_ndim],
        kernel.shape[stacked_ndim : stacked_ndim + row_ndim],
        kernel.shape[stacked_ndim + row_ndim :],
    )
    block = facts_of_recipe(recipe).block_size
    after = whole_blocks(rows, block), whole_blocks(cols, block)
    links = observe.links_of([kernel])

    def quantized(kernel: Array, amax: Array | None) -> QuantizedArray:
        quantization = recipe.quantization("kernel")
        if shared_blocks is not None:
            array = quantize_shared_blocks(
                kernel, quantization, shared_blocks, row_ndim=len(after[0]), straight_through=straight_through
            )
        else:
            array = quantize(
                kernel,
                quantization,
                row_ndim=len(after[0]),
                amax=amax,
                amax_axis=amax_axis,
                straight_through=straight_through,
                implementation=implementation,
            )
        with observe.layer("te_jax.ops.quantize", links, "data"):  # of layers whose kernels are [in, out]
            return observed("kernel", kernel, array)

    for _ in stacked:
        quantized = jax.vmap(quantized)
    return quantized(regrouped(kernel, (stacked, rows, cols), (stacked, *after)), amax)
