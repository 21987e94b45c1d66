"""The three products of linear layers in FP8, on quantized operands, for several kernels that share one x.

A layer with derivative rules of its own quantizes its operands by `Layer.quantize`, or has kernels that write them in
FP8, and calls `forward_products` in its forward rule and `backward_products` in its backward rule.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from te_jax._core.batching import batched_together
from te_jax._core.derivatives import differentiated_once
from te_jax.ops._fp8 import Copy, Fp8
from te_jax.ops._plain_dense import Activation, KernelContracting, activate, added_once
from te_jax.ops.gemm import gemm
from te_jax.ops.quantize import QuantizedParts
from te_jax.quantized import QuantizedArray
from te_jax.recipe import DelayedScalingState, Product, Quantization, Recipe, Role
from te_jax.sharding import Layout, layout_of_product, regrouped, split_in_two


@dataclasses.dataclass(frozen=True)
class Layer:
    """The static arguments of a linear layer, together. Hashable, so that a layer is traced once.

    Attributes:
      fp8: how operands are quantized.
      batch_ndim: number of dimensions of x before those that are contracted.
      contracting_ndim: number of dimensions of x that are contracted.
      kernel_contracting: where in the kernels these dimensions stand.
      activation: of every result.
      accumulate: whether accumulators are added to, or written over.
    """

    fp8: Fp8
    batch_ndim: int
    contracting_ndim: int
    kernel_contracting: KernelContracting = "first"
    activation: Activation | None = None
    accumulate: bool = True

    @property
    def dgrad_copy(self) -> Copy:
        """The copy of a kernel that the input gradient reads, which sums over out."""
        return "data" if self.kernel_contracting == "first" else "transposed"

    @property
    def gelu_is_fused(self) -> bool:
        return self.activation == "gelu" and self.fp8.recipe.scalings["activation"][0] == "tensor"

    def quantization(self, role: Role) -> Quantization:
        return quantization_of(self.fp8.recipe, role, self.kernel_contracting)

    def quantize(self, role: Role, x: Any, state: DelayedScalingState | None, **options: Any) -> QuantizedParts:
        """x in FP8 for the products of this layer; see `Fp8.quantize`."""
        row_ndim = self.batch_ndim
        if role == "kernel":
            row_ndim = self.contracting_ndim if self.kernel_contracting == "first" else x.ndim - self.contracting_ndim
        return self.fp8.quantize(role, x, state, row_ndim=row_ndim, quantization=self.quantization(role), **options)

    def gemm(self, product: Product, lhs: QuantizedArray, rhs: QuantizedArray, **options: Any) -> Any:
        """One of the three products: "forward" x · kernel, "dgrad" dy · kernelᵀ, "wgrad" xᵀ · dy or dyᵀ · x."""
        rows_summed = self.kernel_contracting == ("last" if product == "dgrad" else "first") or product == "wgrad"
        return gemm(
            lhs,
            rhs,
            lhs_contracting="rows" if product == "wgrad" else "cols",
            rhs_contracting="rows" if rows_summed else "cols",
            fast_accumulation=self.fp8.is_fast(product),
            implementation=self.fp8.implementation,
            **options,
        )

    def layout(self, x: Array | QuantizedArray, kernel: Array | QuantizedArray) -> Layout:
        """That of y. The batch lies as that of x and out as that of kernel, whichever copies products read, and what
        they gather."""
        out_ndim, out_first = kernel.ndim - self.contracting_ndim, self.kernel_contracting == "last"
        copy: Any = kernel
        if isinstance(kernel, QuantizedArray):
            copy, out_first = (kernel.data if out_first else kernel.transposed), True
        out = slice(out_ndim) if out_first else slice(-out_ndim, None)
        values: Any = x.data if isinstance(x, QuantizedArray) else x
        return dataclasses.replace(layout_of_product(values, self.batch_ndim, copy, out), dtype=np.dtype(x.dtype))


def quantization_of(recipe: Recipe, role: Role, kernel_contracting: KernelContracting) -> Quantization:
    """Block-scaled GEMMs need 1x128 scales on the LHS and 128x128 on the RHS. With kernel_contracting="last" x and the
    gradient change sides in the weight gradient, and so their transposed copies their scaling."""
    quantization = recipe.quantization(role)
    if kernel_contracting == "first" or role == "kernel":
        return quantization
    other = recipe.quantization("gradient" if role == "activation" else "activation")
    return dataclasses.replace(quantization, transposed_scaling=other.transposed_scaling)


class Layouts(NamedTuple):
    """Layouts of operands, which are those of their gradients. None for what has no gradient.

    Attributes:
      x: None for one that came quantized without a way for its gradient.
      kernels: None for one that came quantized.
      biases, accumulators: None for one that is not there.
    """

    x: Layout | None
    kernels: tuple[Layout | None, ...]
    biases: tuple[Layout | None, ...]
    accumulators: tuple[Layout | None, ...]

    @classmethod
    def of(cls, x: Any, *others: tuple[Any, ...]) -> Layouts:
        def layout(a: Any) -> Layout | None:
            return Layout.of(a) if isinstance(a, Array) else None

        return cls(layout(x), *(tuple(map(layout, operands)) for operands in others))


def forward_products(
    layer: Layer,
    x8: QuantizedArray,
    kernel8s: tuple[QuantizedArray, ...],
    biases: tuple[Array | None, ...],
    layouts: tuple[Layout, ...],
    *,
    keep_preactivations: bool,
) -> tuple[tuple[Array, ...], tuple[Array | None, ...]]:
    """activation(x · kernel + bias) for each kernel, and the values before the activation.

    Args:
      layer: what the kernels have in common.
      x8: with the data copy.
      kernel8s: with the copy that `layer.dgrad_copy` does not name.
      biases: for each kernel, or None.
      layouts: of the results, from `layer.layout`.
      keep_preactivations: whether values before the activation are asked for; they are None otherwise, and without an
        activation.
    """

    def product(kernel8: QuantizedArray, bias: Array | None, layout: Layout) -> tuple[Array, Array | None]:
        keep = layer.gelu_is_fused and keep_preactivations
        result = layer.gemm(
            "forward",
            x8,
            kernel8,
            bias=bias,
            activation="gelu" if layer.gelu_is_fused else None,
            save_preactivation=keep,
            out_dtype=layout.dtype,
        )
        if keep:
            y, preactivation = map(layout.apply, result)
            return y, checkpoint_name(preactivation, "te_dense_preactivation")
        y = layout.apply(result)
        if layer.activation is None or layer.gelu_is_fused:
            return y, None
        preactivation = checkpoint_name(y, "te_dense_preactivation")  # where it is kept, y is computed from it again
        return activate(layer.activation, preactivation), preactivation

    ys, preactivations = zip(*map(product, kernel8s, biases, layouts), strict=True)
    return batched_together(ys), preactivations


def backward_products(
    layer: Layer,
    x8: QuantizedArray,
    kernel8s: tuple[QuantizedArray, ...],
    dy8s: tuple[QuantizedArray, ...],
    layouts: Layouts,
    accumulators: tuple[Array | None, ...],
) -> tuple[Array | None, tuple[Array | None, ...], tuple[Array | None, ...]]:
    """(dx, dkernels, next accumulators). XLA removes the gradients that nobody asks for, and their products.

    Args:
      layer: what the kernels have in common.
      x8: with the transposed copy; without, no kernel has a gradient.
      kernel8s: with the copy that `layer.dgrad_copy` names; where one lacks it, dx is None.
      dy8s: gradients of the results before the activation, from `layer.quantize("gradient", …)` or in that
        quantization; with both copies where the kernel has a gradient.
      layouts: of the operands of the forward pass.
      accumulators: for each kernel; where there is none, dkernel is returned, unless the kernel came quantized.
    """
    dx: Any = None
    if layouts.x is not None and all(getattr(kernel8, layer.dgrad_copy) is not None for kernel8 in kernel8s):
        products = (
            layouts.x.apply(layer.gemm("dgrad", dy8, kernel8, out_dtype=layouts.x.dtype))
            for dy8, kernel8 in zip(dy8s, kernel8s, strict=True)
        )
        dx = _sum(*products)
    dkernels: list[Any] = [None] * len(kernel8s)
    next_accumulators: list[Any] = [None] * len(kernel8s)
    for i, dy8 in enumerate(dy8s if x8.transposed is not None else ()):
        sides = (x8, dy8) if layer.kernel_contracting == "first" else (dy8, x8)
        if (layout := layouts.accumulators[i]) is not None:
            next_accumulators[i] = layout.apply(_accumulated(layer, *sides, accumulators[i]))
        elif (layout := layouts.kernels[i]) is not None:
            dkernels[i] = layout.apply(layer.gemm("wgrad", *sides, out_dtype=layout.dtype))
    return dx, tuple(dkernels), tuple(next_accumulators)


def _sum(first: Array, *more: Array) -> Array:
    """Their sum in float32, rounded once."""
    if not more:
        return first
    return functools.reduce(operator.add, (x.astype(jnp.float32) for x in (first, *more))).astype(first.dtype)


def _accumulated(layer: Layer, lhs: QuantizedArray, rhs: QuantizedArray, accumulator: Any) -> Array:
    """The next value of an accumulator, which may have more dimensions than the kernel that products read. It gets
    those here: a scan keeps what is reshaped before beside its own inputs, once more for every layer."""
    if layer.accumulate:
        accumulator = differentiated_once(accumulator, layer.fp8.name)
        accumulator = added_once(accumulator, *jax.tree.leaves((lhs, rhs)))
    groups = lhs.shape[lhs.row_ndim :], rhs.shape[rhs.row_ndim :]
    own = split_in_two(accumulator.shape, math.prod(groups[0]))
    wgrad = layer.gemm("wgrad", lhs, rhs, accumulator=regrouped(accumulator, own, groups), accumulate=layer.accumulate)
    return regrouped(wgrad, groups, own)
