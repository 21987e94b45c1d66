"""Products of groups of rows, each with a kernel of its own: the experts of a mixture.

The group of `Products` is a `Groups`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from te_jax import native, sharding
from te_jax._core.derivatives import not_differentiated
from te_jax.ops._grouped_product import rows_in_groups
from te_jax.ops._quantize_rows import quantize_rows
from te_jax.ops.grouped_gemm import cuda_problem, grouped_gemm, grouped_gemm_of_pairs, grouped_native
from te_jax.ops.linear.arguments import implementation_for
from te_jax.ops.linear.codec import Codec, Codecs, codecs_of
from te_jax.ops.linear.products import Products, State, Wgrad
from te_jax.ops.permute import Permutation, unpermute
from te_jax.ops.quantize import QuantizedParts
from te_jax.quantized import Quantizable, QuantizedArray
from te_jax.recipe import Product, Recipe, Role
from te_jax.reference.quantize import Copies
from te_jax.sharding import Layout

NAME = "te_jax.ops.grouped_dense"
REVERSE_MODE = (
    "te_jax.ops.grouped_dense has first derivatives in reverse mode (jax.grad, jax.vjp) only: for forward mode "
    "(jax.jvp, jax.jacfwd) or second derivatives use te_jax.ops.ragged_dot with implementation='reference'"
)


class Groups(NamedTuple):
    """How rows belong to groups.

    Attributes:
      sizes: integers [groups], of consecutive rows.
      permutation: which tokens the rows are, where products take rows from tokens or return them.
    """

    sizes: Array
    permutation: Permutation | None = None


class GroupedProducts(Products[Groups]):
    """Rows [rows, features]; kernels [groups, in, out], or [groups, out, in], each of which is quantized by itself."""

    @property
    def once(self) -> str:
        return REVERSE_MODE

    def quantized(
        self, codec: Codec, role: Role, x, state, group: Groups, *, first_copy, second_copy, with_dbias=False
    ) -> QuantizedParts:
        if isinstance(x, QuantizedArray):
            return QuantizedParts(x, None, None)
        is_transposed = (role == "kernel" and self.kernel_contracting == "first") == first_copy
        copies: Copies = "both" if first_copy and second_copy else "transposed" if is_transposed else "data"
        if role == "kernel":
            return self._kernels(codec, not_differentiated(x, self.once), state, copies)
        dbias = self.sum_of_rows(x, group) if with_dbias else None
        return self._rows(codec, role, x, state, group, copies)._replace(dbias=dbias)

    def read_back(self, role: Role, array: QuantizedArray) -> Array:
        read = functools.partial(super().read_back, role)
        return jax.vmap(read)(array) if role == "kernel" else read(array)

    def _kernels(self, codec: Codec, kernels: Array, state: State, copies: Copies) -> QuantizedParts:
        """Kernels in FP8. A state is one for all: they share its scale, and it observes the largest of them."""
        options: Any = {"copies": copies, "quantization": codec.quantization("kernel", self.kernel_contracting)}
        parts = jax.vmap(lambda kernel: codec.quantize("kernel", kernel, state, row_ndim=1, **options))(kernels)
        return parts if parts.amax is None else parts._replace(amax=jnp.max(parts.amax, initial=0.0))

    def _rows(self, codec: Codec, role: Role, x: Array, state: State, group: Groups, copies: Copies) -> QuantizedParts:
        """Rows in FP8, zeros in rows of no group."""
        counts = jnp.arange(x.shape[0], dtype=jnp.int32) < rows_in_groups(group.sizes, x.shape[0])
        x = jnp.where(counts[:, None], x, jnp.zeros((), x.dtype))
        quantization = codec.quantization(role, self.kernel_contracting)
        return codec.quantize(role, x, state, row_ndim=1, copies=copies, quantization=quantization)

    def plain(self) -> GroupedProducts:
        return dataclasses.replace(self, codecs=self.plain_codecs)

    def sum_of_rows(self, dy: Array, group: Groups) -> Array:
        """Float32 [groups, out], as a product with ones, of as many columns as a GPU needs."""
        sizes = group.sizes
        dy = not_differentiated(dy, self.once)
        columns = 1 if native.compute_capability() is None else 8
        ones = sharding.varying_over(jnp.ones((dy.shape[0], columns), dy.dtype), sharding.varying_axes(dy))
        problem = cuda_problem(None, dy.dtype, sizes.shape[0], dy.shape[1], columns)
        # dy first: under vmap of a split dimension the first operand says how examples lie; ones are the same for all.
        return grouped_gemm(
            dy,
            ones,
            sizes,
            lhs_contracting="rows",
            out_dtype=jnp.float32,
            implementation="reference" if problem else self.codec("dgrad").implementation,
        )[..., 0]

    def gemm(self, product: Product, lhs: Any, rhs: Any, group: Groups, **options: Any) -> Array:
        return grouped_gemm(lhs, rhs, group.sizes, implementation=self.codec(product).implementation, **options)

    def _forward(self, x8, kernel8s, biases, layouts, group: Groups, *, differentiated):
        products = zip(kernel8s, (not_differentiated(bias, self.once) for bias in biases), strict=True)
        options: Any = {"rhs_contracting": "rows" if self.kernel_contracting == "first" else "cols"}
        options["out_dtype"] = self.dtype
        ys = tuple(self.gemm("forward", x8, kernel8, group, bias=bias, **options) for kernel8, bias in products)
        return ys, x8, (None,) * len(ys)

    def _dgrad(self, dy8s, kernel8s, group: Groups, layout: Layout):
        """One product for two kernels, such as gate and up."""
        pairs = list(zip(dy8s, kernel8s, strict=True))
        options: Any = {"rhs_contracting": "cols" if self.kernel_contracting == "first" else "rows"}
        options["out_dtype"] = layout.dtype
        if len(pairs) == 2:
            options["implementation"] = self.codec("dgrad").implementation
            return layout.apply(grouped_gemm_of_pairs(pairs[0], pairs[1], group.sizes, **options)), dy8s
        if pairs[1:]:
            options["out_dtype"] = jnp.float32
        products = (self.gemm("dgrad", dy8, kernel8, group, **options) for dy8, kernel8 in pairs)
        return layout.apply(functools.reduce(jnp.add, products)), dy8s

    def _wgrads(self, x8, dy8s, group: Groups):
        product = functools.partial(self.gemm, "wgrad", group=group, lhs_contracting="rows")
        sides = (self.wgrad_sides(x8, dy8) for dy8 in dy8s)
        return tuple(Wgrad(functools.partial(product, *pair), pair) for pair in sides)


def grouped_codecs(
    recipe: Recipe | None,
    implementation: native.Implementation | None,
    x: Array | QuantizedArray,
    kernels: tuple[Quantizable, ...],
) -> Codecs:
    """The codecs of a layer with these operands.

    Raises:
      NativeUnavailableError: an implementation cannot run here.
    """

    def chosen(recipe: Recipe | None) -> native.Implementation:
        problem = problem_of(recipe, x, kernels)
        if recipe is not None:
            return implementation_for(implementation, recipe, problem, by_xla=False)
        return "native" if grouped_native(implementation, problem) else "reference"

    return codecs_of(NAME, recipe, implementation, x.dtype, chosen)


def problem_of(recipe: Recipe | None, x: Quantizable, kernels: tuple[Quantizable, ...]) -> str | None:
    """Why a GPU cannot multiply these, forward and backward."""
    scaling = None if recipe is None else recipe.quantization("activation").scaling
    problems = (cuda_problem(scaling, x.dtype, *kernel.shape) for kernel in kernels)
    return next(filter(None, problems), None)


class _Tokens(NamedTuple):
    """Tokens, and their rows in FP8 until the backward pass, which gathers them again."""

    x: Array
    rows: QuantizedArray | None


class GatheredProducts(GroupedProducts):
    """Products that take rows from tokens: gathered where they are quantized. What is kept are the tokens."""

    def quantized(self, codec: Codec, role: Role, x, state, group: Groups, **options) -> QuantizedParts:
        if role == "activation":
            rows = _gathered(self, codec, role, x, group, "data")
            return QuantizedParts(_Tokens(x, rows), None, None)  # pyright: ignore[reportArgumentType]
        return super().quantized(codec, role, x, state, group, **options)

    def _forward(self, x8: _Tokens, kernel8s, biases, layouts, group: Groups, *, differentiated):
        ys, _, preactivations = super()._forward(
            x8.rows, kernel8s, biases, layouts, group, differentiated=differentiated
        )
        return ys, _Tokens(x8.x, None), preactivations

    def _dgrad(self, dy8s, kernel8s, group: Groups, layout: Layout):
        dx, _ = super()._dgrad(dy8s, kernel8s, group, Layout(layout.dtype))
        return layout.apply(dx if group.permutation is None else unpermute(dx, group.permutation)), dy8s

    def _wgrads(self, x8: _Tokens, dy8s, group: Groups):
        # XLA would quantize x for the gradients at once, in the forward pass, and keep that too.
        dy8s, x = sharding.together(dy8s, x8.x)
        rows = _gathered(self, self.codec("wgrad"), "activation", x, group, "transposed")
        return super()._wgrads(rows, dy8s, group)


class ScatteredProducts(GroupedProducts):
    """Products that return rows to tokens, each the sum of its rows: their gradients are gathered."""

    def quantized(self, codec: Codec, role: Role, x, state, group: Groups, **options) -> QuantizedParts:
        if role == "gradient":
            copies: Copies = "both" if options["second_copy"] else "data"
            return QuantizedParts(_gathered(self, codec, role, x, group, copies), None, None)
        return super().quantized(codec, role, x, state, group, **options)

    def _forward(self, x8, kernel8s, biases, layouts, group: Groups, *, differentiated):
        ys, h8, _ = super()._forward(x8, kernel8s, biases, layouts, group, differentiated=differentiated)
        if (permutation := group.permutation) is not None:
            ys = tuple(unpermute(y, permutation) for y in ys)
        return ys, h8, (None,) * len(ys)


def _gathered(
    products: GroupedProducts, codec: Codec, role: Role, x: Array, group: Groups, copies: Copies
) -> QuantizedArray:
    """The rows of groups in FP8, zeros in others; x [*tokens, features], or [rows, features] without a permutation."""
    if group.permutation is None:
        index = jnp.arange(x.shape[0], dtype=jnp.int32)
        index = jnp.where(index < rows_in_groups(group.sizes, x.shape[0]), index, -1)
    else:
        index = group.permutation.choices // group.permutation.rows.shape[-1]
    x = not_differentiated(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), products.once)
    use_native = codec.implementation == "native" and native.takes(x.dtype) and x.size > 0 and index.size > 0
    return quantize_rows(x, index, codec.quantization(role, products.kernel_contracting), copies, use_native)
