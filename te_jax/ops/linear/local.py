"""Products of linear layers on the arrays of one device, or of an Auto or Explicit mesh, with and without FP8."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from te_jax import sharding
from te_jax.ops._activation_kernels import activated
from te_jax.ops.gemm import Contracting, gemm, gemm_sum
from te_jax.ops.linear.arguments import Shape, sequence_padding, whole_blocks
from te_jax.ops.linear.codec import plain
from te_jax.ops.linear.products import Products, Wgrad
from te_jax.ops.linear.rule import linear
from te_jax.ops.linear.weight import Weight, together
from te_jax.ops.quantize import QuantizedParts
from te_jax.quantized import Quantizable, QuantizedArray, facts_of
from te_jax.recipe import Product
from te_jax.reference.activation import Activation
from te_jax.reference.quantize import Copies
from te_jax.sharding import Layout, layout_of_product, regrouped, split_in_two


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalProducts(Products[None]):
    """Products of which at least one is in FP8, or reads its values.

    Attributes:
      contracting_ndim: number of dimensions of x that are contracted.
      activation: of every result.
    """

    contracting_ndim: int = 1
    activation: Activation | None = None

    def sized(self, batch_ndim: int, contracting_ndim: int) -> LocalProducts:
        """Products for x of other numbers of dimensions."""
        return dataclasses.replace(self, batch_ndim=batch_ndim, contracting_ndim=contracting_ndim)

    @property
    def gelu_is_fused(self) -> bool:
        codec = self.codec("forward")
        return self.activation == Activation("gelu") and codec.in_fp8 and codec.facts.by_tensor

    @property
    def block_size(self) -> int:
        """The most values of a dimension that share a scale."""
        return max(codec.facts.block_size for codec in self.codecs)

    def quantized(self, codec, role, x, state, group=None, *, first_copy, second_copy, with_dbias=False):
        is_transposed = (role == "kernel" and self.kernel_contracting == "first") == first_copy
        copies: Copies = "both" if first_copy and second_copy else "transposed" if is_transposed else "data"
        row_ndim = self.batch_ndim
        if role == "kernel":
            row_ndim = self.contracting_ndim if self.kernel_contracting == "first" else x.ndim - self.contracting_ndim
        quantization = codec.quantization(role, self.kernel_contracting)
        return codec.quantize(
            role, x, state, row_ndim=row_ndim, copies=copies, quantization=quantization, with_dbias=with_dbias
        )

    def sum_of_rows(self, dy: Array, group: None) -> Array:
        return jnp.sum(dy.astype(jnp.float32), axis=tuple(range(self.batch_ndim)))

    def layouts(self, x: Quantizable, kernels: Iterable[Quantizable]) -> tuple[Layout, ...]:
        return tuple(self.layout(x, kernel) for kernel in kernels)

    def layout(self, x: Quantizable, kernel: Quantizable) -> Layout:
        """The batch lies as that of x and out as that of kernel, whichever copies products read, and what they
        gather."""
        out_ndim, out_first = kernel.ndim - self.contracting_ndim, self.kernel_contracting == "last"
        copy: Any = kernel
        if isinstance(kernel, QuantizedArray):
            copy, out_first = (kernel.data if out_first else kernel.transposed), True
        out = slice(out_ndim) if out_first else slice(-out_ndim, None)
        values: Any = x.data if isinstance(x, QuantizedArray) else x
        return dataclasses.replace(layout_of_product(values, self.batch_ndim, copy, out), dtype=np.dtype(x.dtype))

    def gemm(self, product: Product, lhs: Any, rhs: Any, **options: Any) -> Any:
        """One of the three products: "forward" x · kernel, "dgrad" dy · kernelᵀ, "wgrad" xᵀ · dy or dyᵀ · x."""
        codec, contracting = self.codec(product), self.contracting(product)
        if codec.in_fp8:
            options["fast_accumulation"] = codec.is_fast(product)
        else:
            sizes = {
                "forward": self.contracting_ndim, "dgrad": lhs.ndim - self.batch_ndim, "wgrad": self.batch_ndim,
            }  # fmt: skip
            options["contracting_ndim"] = sizes[product]
        return gemm(lhs, rhs, implementation=codec.implementation, **contracting, **options)

    def contracting(self, product: Product) -> dict[str, Contracting]:
        """Over which dimensions of both operands a product sums."""
        rows_summed = self.kernel_contracting == ("last" if product == "dgrad" else "first") or product == "wgrad"
        return {
            "lhs_contracting": "rows" if product == "wgrad" else "cols",
            "rhs_contracting": "rows" if rows_summed else "cols",
        }

    def _forward(self, x8, kernel8s, biases, layouts, group=None, *, differentiated: bool):
        product = functools.partial(self._result, x8, keep=differentiated and self.gelu_is_fused)
        ys, preactivations = zip(*map(product, kernel8s, biases, layouts), strict=True)
        return ys, x8, preactivations

    def _result(self, x8, kernel8, bias: Array | None, layout: Layout, *, keep: bool) -> tuple[Array, Array | None]:
        """activation(x · kernel + bias), and what the gradient of the activation reads."""
        activation = "gelu" if self.gelu_is_fused else None
        result = self.gemm(
            "forward", x8, kernel8, bias=bias, activation=activation, save_preactivation=keep, out_dtype=layout.dtype
        )
        if keep:
            y, preactivation = map(layout.apply, result)
            return y, checkpoint_name(preactivation, "te_dense_preactivation")
        y = layout.apply(result)
        if self.activation is None or self.gelu_is_fused:
            return y, None
        preactivation = checkpoint_name(y, "te_dense_preactivation")  # where it is kept, y is computed from it again
        return activated(self.activation, preactivation), preactivation

    def plain(self) -> PlainProducts:
        return PlainProducts(
            name=self.name,
            codecs=plain(self.name),
            dtype=self.dtype,
            accumulate=self.accumulate,
            batch_ndim=self.batch_ndim,
            kernel_contracting=self.kernel_contracting,
            contracting_ndim=self.contracting_ndim,
        )

    def token_ndim(self, x: Array) -> int:
        return self.batch_ndim

    def activated(self, y: Array) -> Array:
        return y if self.activation is None else activated(self.activation, y)

    def before_activation(self, preactivation: Array | None, dy: Array) -> Array:
        if self.activation is None:
            return dy
        return jax.vjp(functools.partial(activated, self.activation), preactivation)[1](dy)[0]

    def _dgrad(self, dy8s, kernel8s, group, layout: Layout):
        pairs, how = list(zip(dy8s, kernel8s, strict=True)), self.codec("dgrad")
        if len(pairs) > 1 and how.in_fp8 and facts_of(dy8s[0].scaling).native_blocks:
            options: Any = {"out_dtype": layout.dtype, "implementation": how.implementation}
            options["rhs_contracting"] = "rows" if self.kernel_contracting == "last" else "cols"
            return layout.apply(gemm_sum(pairs, **options)), dy8s
        products = (layout.apply(self.gemm("dgrad", *pair, out_dtype=layout.dtype)) for pair in pairs)
        return total(*products), dy8s

    def _wgrads(self, x8, dy8s, group=None):
        sides = (self.wgrad_sides(x8, dy8) for dy8 in dy8s)
        return tuple(Wgrad(functools.partial(self._wgrad, *pair), pair) for pair in sides)

    def _wgrad(self, lhs, rhs, *, out_dtype: np.dtype, accumulator: Array | None = None, accumulate: bool = True):
        """The gradient, or the next value of an accumulator, which may have more dimensions than the kernel that
        products read. It gets those here: a scan keeps what is reshaped before beside its own inputs, once more for
        every layer."""
        if accumulator is None:
            return self.gemm("wgrad", lhs, rhs, out_dtype=out_dtype)
        groups = lhs.shape[self.batch_ndim :], rhs.shape[self.batch_ndim :]
        accumulator_groups = split_in_two(accumulator.shape, math.prod(groups[0]))
        accumulator = regrouped(accumulator, accumulator_groups, groups)
        return regrouped(
            self.gemm("wgrad", lhs, rhs, accumulator=accumulator, accumulate=accumulate), groups, accumulator_groups
        )


def total(first: Array, *more: Array) -> Array:
    """Their sum in float32, rounded once."""
    if not more:
        return first
    return functools.reduce(operator.add, (x.astype(jnp.float32) for x in (first, *more))).astype(first.dtype)


def multiplied_in_fp8(layer: LocalProducts, x, x8, weights: tuple[Weight, ...]) -> tuple[Array, ...]:
    """`linear` with groups of dimensions in forms that FP8 products take, and back."""
    like = x if x8 is None else x8
    block = layer.block_size
    shapes = [Shape.of(like, "kernel", w.kernel, layer.contracting_ndim, layer.kernel_contracting) for w in weights]
    layouts = layer.layouts(like, (weight.kernel for weight in weights))  # merging dimensions may gather what was split
    whole_batch, whole_inner, _ = shapes[0]
    if x8 is None and (padding := sequence_padding(whole_batch, block, x)):
        axis = len(whole_batch) - 1
        ys = multiplied_in_fp8(layer, sharding.padded(x, padding, axis), None, weights)
        return tuple(
            layout.apply(lax.slice_in_dim(y, 0, whole_batch[-1], axis=axis))
            for y, layout in zip(ys, layouts, strict=True)
        )
    batch, inner = whole_batch, whole_inner
    if x8 is None:
        batch, inner = (whole_blocks(sizes, block) or (1,) for sizes in (batch, inner))
        x = regrouped(x, (whole_batch, whole_inner), (batch, inner))
    order = 1 if layer.kernel_contracting == "first" else -1

    def merged(weight: Weight, shape: Shape) -> Weight:
        kernel, bias, outer = weight.kernel, weight.bias, whole_blocks(shape.outer, block)
        if not isinstance(kernel, QuantizedArray):
            kernel = regrouped(kernel, (shape.inner, shape.outer)[::order], (inner, outer)[::order])
        return weight._replace(
            kernel=kernel, bias=None if bias is None else regrouped(bias, (shape.outer,), (outer,))
        )  # fmt: skip

    layer = layer.sized(len(batch), len(inner))
    x, x8, weights = together((x, x8, tuple(map(merged, weights, shapes))))
    ys: Any = linear(layer, x, x8, weights, None)
    return tuple(
        layout.apply(regrouped(y, (batch, whole_blocks(shape.outer, block)), (whole_batch, shape.outer)))
        for y, layout, shape in zip(ys, layouts, shapes, strict=True)
    )


# ------------------------------------------------------------------------------------------------------- without FP8


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainProducts(LocalProducts):
    """Products in the dtype of x, by XLA."""

    def encoded(self, codec, role, x, state, group, **options) -> QuantizedParts:
        return QuantizedParts(x, None, None)

    def _forward(self, x8, kernel8s, biases, layouts, group=None, *, differentiated=True):
        ys = tuple(self.product(x8, kernel) for kernel in kernel8s)
        return tuple(map(with_bias, ys, biases)), x8, (None,) * len(kernel8s)

    def product(self, x: Array, kernel: Array) -> Array:
        count = self.contracting_ndim
        first = 0 if self.kernel_contracting == "first" else kernel.ndim - count
        dims = (tuple(range(x.ndim - count, x.ndim)), tuple(range(first, first + count)))
        return sharding.dot(x, kernel.astype(x.dtype), dims, x.dtype)

    def _dgrad(self, dy8s, kernel8s, group, layout: Layout):
        return total(*(layout.apply(self._dx(*pair)) for pair in zip(dy8s, kernel8s, strict=True))), dy8s

    def _dx(self, dy: Array, kernel: Array) -> Array:
        count = kernel.ndim - self.contracting_ndim
        first = self.contracting_ndim if self.kernel_contracting == "first" else 0
        dims = tuple(range(dy.ndim - count, dy.ndim)), tuple(range(first, first + count))
        return sharding.dot(dy, kernel.astype(dy.dtype), dims, dy.dtype)

    def _wgrads(self, x8, dy8s, group=None):
        return tuple(Wgrad(functools.partial(self._next_value, x8, dy), (x8, dy)) for dy in dy8s)

    def _next_value(
        self, x: Array, dy: Array, *, out_dtype: np.dtype, accumulator: Array | None = None, accumulate: bool = True
    ) -> Array:
        """The gradient, or the next value of an accumulator."""
        tokens = tuple(range(x.ndim - self.contracting_ndim))
        wgrad = sharding.dot(*self.wgrad_sides(x, dy), (tokens, tokens), out_dtype)
        if accumulator is None:
            return wgrad
        wgrad = Layout.of(accumulator).apply(wgrad)
        if accumulate:
            return accumulator + wgrad
        # The buffer is written over: an argument that is not mentioned at all would not be donated.
        return lax.dynamic_update_slice(accumulator, wgrad, (0,) * wgrad.ndim)


def with_bias(y: Array, bias: Array | None) -> Array:
    """y + bias, in float32, so that the sum that is its gradient is too."""
    if bias is None:
        return y
    wide = sharding.split_as_last(bias, y).astype(jnp.float32)
    wide = jnp.expand_dims(wide, tuple(range(y.ndim - bias.ndim)))
    return (y.astype(jnp.float32) + wide).astype(y.dtype)


def multiplied_as_it_is(layer: tuple[PlainProducts, Activation | None], x: Array, weight: Weight) -> Array:
    """A layer without FP8. Its derivatives are XLA's, but for that of a kernel with an accumulator."""
    products, activation = layer
    if weight.accumulator is None:
        y = products.product(x, weight.kernel)
    else:
        ys: Any = linear(products, x, None, (weight._replace(bias=None),), None)
        y = ys[0]
    y = with_bias(y, weight.bias)
    if activation is not None:
        # Keeps the values before the activation only, rather than the float32 ones inside it.
        y = jax.checkpoint(functools.partial(activated, activation))(checkpoint_name(y, "te_dense_preactivation"))
    return y
