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
import numpy as np
from jax import Array

from te_jax import native, sharding
from te_jax._core.derivatives import not_differentiated
from te_jax.ops._grouped_product import rows_in_groups
from te_jax.ops._quantize_rows import quantize_rows
from te_jax.ops.grouped_gemm import cuda_problem, grouped_gemm, grouped_gemm_of_pairs, grouped_native
from te_jax.ops.linear.arguments import implementation_for
from te_jax.ops.linear.per_product import PerProduct
from te_jax.ops.linear.products import Products, Wgrad
from te_jax.ops.permute import Permutation, unpermute
from te_jax.ops.quantize import QuantizedParts
from te_jax.quantized import QuantizedArray
from te_jax.recipe import DelayedScalingState, ProductRecipes, Recipe, Role
from te_jax.reference.quantize import Copies
from te_jax.sharding import Layout

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedProducts(Products):
    """Rows [rows, features]; kernels [groups, in, out], or [groups, out, in], are plain, or quantized each by itself.

    Attributes:
      dtype: of x.
      fake: a recipe whose values products without one read.
    """

    dtype: np.dtype
    fake: Recipe | None = None

    @property
    def once(self) -> str:
        return REVERSE_MODE

    def quantize(
        self, role, x, state, group: Groups, *, first_copy=True, second_copy, with_dbias=False
    ) -> QuantizedParts:
        if isinstance(x, QuantizedArray):
            return QuantizedParts(x, None, None)
        if self.fake is not None:
            return self._read_back(role, x, group, with_dbias, first_copy=first_copy, second_copy=second_copy)
        if role == "kernel":
            x = not_differentiated(x, self.once)
            if self.recipe is None:
                return QuantizedParts(x.astype(self.dtype), None, None)
            is_transposed = (self.kernel_contracting == "first") == first_copy
            one: Copies = "transposed" if is_transposed else "data"
            return self._kernels(x, state, "both" if first_copy and second_copy else one)
        dbias = self._sum_of_rows(x, group.sizes) if with_dbias else None
        if self.recipe is None:
            return QuantizedParts(not_differentiated(x, self.once), None, dbias)
        copies: Copies = "both" if first_copy and second_copy else "data" if first_copy else "transposed"
        return self._rows(role, x, state, group, copies)._replace(dbias=dbias)

    def _read_back(self, role: Role, x: Array, group: Groups, with_dbias: bool, **copies: bool) -> QuantizedParts:
        """The values that FP8 codes stand for, of the one copy that is asked for."""
        fake = dataclasses.replace(self, recipe=self.fake, fake=None, implementation="reference", by_kernels=False)
        array = fake.quantize(role, x, None, group, **copies).array
        dequantize = lambda x: dataclasses.replace(x, dtype=self.dtype).dequantize()  # noqa: E731
        values: Any = (jax.vmap(dequantize) if role == "kernel" else dequantize)(array)
        return QuantizedParts(values, None, self._sum_of_rows(x, group.sizes) if with_dbias else None)

    def _kernels(self, kernels: Array, state: DelayedScalingState | None, copies: Copies) -> QuantizedParts:
        """Kernels in FP8. A state is one for all: they share its scale, and it observes the largest of them."""
        parts = jax.vmap(lambda kernel: self.fp8.quantize("kernel", kernel, state, row_ndim=1, copies=copies))(kernels)
        return parts if parts.amax is None else parts._replace(amax=jnp.max(parts.amax, initial=0.0))

    def _rows(self, role: Role, x: Array, state: Any, group: Groups, copies: Copies) -> QuantizedParts:
        """Rows in FP8, zeros in rows of no group."""
        counts = jnp.arange(x.shape[0], dtype=jnp.int32) < rows_in_groups(group.sizes, x.shape[0])
        x = jnp.where(counts[:, None], x, jnp.zeros((), x.dtype))
        quantization = self.quantization(role)
        return self.fp8.quantize(role, x, state, row_ndim=1, copies=copies, quantization=quantization)

    def plain(self) -> GroupedProducts:
        return dataclasses.replace(self, recipe=None, fake=None)

    def _sum_of_rows(self, dy: Array, sizes: Array) -> Array:
        """Float32 [groups, out], as a product with ones, of as many columns as a GPU needs."""
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
            implementation="reference" if problem else self.implementation,
        )[..., 0]

    def gemm(self, lhs: Any, rhs: Any, group: Groups, **options: Any) -> Array:
        return grouped_gemm(lhs, rhs, group.sizes, implementation=self.implementation, **options)

    def forward(self, x8, kernel8s, biases, layouts, group: Groups, *, differentiated):
        products = zip(kernel8s, (not_differentiated(bias, self.once) for bias in biases), strict=True)
        options: Any = {"rhs_contracting": "rows" if self.kernel_contracting == "first" else "cols"}
        options["out_dtype"] = self.dtype
        ys = tuple(self.gemm(x8, kernel8, group, bias=bias, **options) for kernel8, bias in products)
        return ys, x8, (None,) * len(ys)

    def dgrad(self, dy8s, kernel8s, group: Groups, layout: Layout):
        """One product for two kernels, such as gate and up."""
        pairs = list(zip(dy8s, kernel8s, strict=True))
        options: Any = {"rhs_contracting": "cols" if self.kernel_contracting == "first" else "rows"}
        options["out_dtype"] = layout.dtype
        if len(pairs) == 2:
            options["implementation"] = self.implementation
            return layout.apply(grouped_gemm_of_pairs(pairs[0], pairs[1], group.sizes, **options)), dy8s
        if pairs[1:]:
            options["out_dtype"] = jnp.float32
        products = (self.gemm(dy8, kernel8, group, **options) for dy8, kernel8 in pairs)
        return layout.apply(functools.reduce(jnp.add, products)), dy8s

    def wgrads(self, x8, dy8s, group: Groups):
        product = functools.partial(self.gemm, group=group, lhs_contracting="rows")
        sides = (self.wgrad_sides(x8, dy8) for dy8 in dy8s)
        return tuple(Wgrad(functools.partial(product, *pair), pair) for pair in sides)


class _PerProduct(PerProduct):
    """A recipe for each of the products of `GroupedProducts`."""

    @property
    def once(self) -> str:
        return REVERSE_MODE


def grouped_products(
    recipe: Recipe | None,
    implementation: native.Implementation | None,
    x: Array | QuantizedArray,
    kernels: tuple[Any, ...],
    **options: Any,
) -> GroupedProducts | PerProduct:
    """The products of a layer.

    Args:
      recipe, implementation, x, kernels: of the layer.
      **options: further attributes of `GroupedProducts`.

    Raises:
      NativeUnavailableError: an implementation cannot run here.
    """

    def of(recipe: Recipe | None, fake: Recipe | None = None) -> GroupedProducts:
        problem = problem_of(recipe, x, kernels)
        if recipe is not None:
            chosen = implementation_for(implementation, recipe, problem, by_xla=False)
        else:
            chosen = "native" if grouped_native(implementation, problem) else "reference"
        own = {"by_kernels": native.use_native(implementation), "dtype": x.dtype, "fake": fake}
        return GroupedProducts(recipe=recipe, implementation=chosen, **own, **options)

    return _PerProduct.of(recipe, of) if isinstance(recipe, ProductRecipes) else of(recipe)


def problem_of(recipe: Recipe | None, x: Array | QuantizedArray, kernels: tuple[Any, ...]) -> str | None:
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

    def quantize(
        self, role, x, state, group: Groups, *, first_copy=True, second_copy, with_dbias=False
    ) -> QuantizedParts:
        if role == "activation":
            return QuantizedParts(_Tokens(x, _gathered(self, role, x, group, "data")), None, None)  # pyright: ignore
        copies = {"first_copy": first_copy, "second_copy": second_copy}
        return super().quantize(role, x, state, group, **copies, with_dbias=with_dbias)

    def forward(self, x8: Any, kernel8s, biases, layouts, group: Groups, *, differentiated):
        ys, _, preactivations = super().forward(
            x8.rows, kernel8s, biases, layouts, group, differentiated=differentiated
        )
        return ys, _Tokens(x8.x, None), preactivations

    def dgrad(self, dy8s, kernel8s, group: Groups, layout: Layout):
        dx, _ = super().dgrad(dy8s, kernel8s, group, Layout(layout.dtype))
        return layout.apply(dx if group.permutation is None else unpermute(dx, group.permutation)), dy8s

    def wgrads(self, x8: _Tokens, dy8s, group: Groups):
        # XLA would quantize x for the gradients at once, in the forward pass, and keep that too.
        dy8s, x = sharding.together(dy8s, x8.x)
        return super().wgrads(_gathered(self, "activation", x, group, "transposed"), dy8s, group)


class ScatteredProducts(GroupedProducts):
    """Products that return rows to tokens, each the sum of its rows: their gradients are gathered."""

    def quantize(
        self, role, x, state, group: Groups, *, first_copy=True, second_copy, with_dbias=False
    ) -> QuantizedParts:
        if role == "gradient":
            return QuantizedParts(_gathered(self, role, x, group, "both" if second_copy else "data"), None, None)
        copies = {"first_copy": first_copy, "second_copy": second_copy}
        return super().quantize(role, x, state, group, **copies, with_dbias=with_dbias)

    def forward(self, x8, kernel8s, biases, layouts, group: Groups, *, differentiated):
        ys, h8, _ = super().forward(x8, kernel8s, biases, layouts, group, differentiated=differentiated)
        if (permutation := group.permutation) is not None:
            ys = tuple(unpermute(y, permutation) for y in ys)
        return ys, h8, (None,) * len(ys)


def _gathered(products: GroupedProducts, role: Role, x: Array, group: Groups, copies: Copies) -> QuantizedArray:
    """The rows of groups in FP8, zeros in others; x [*tokens, features], or [rows, features] without a permutation."""
    if group.permutation is None:
        index = jnp.arange(x.shape[0], dtype=jnp.int32)
        index = jnp.where(index < rows_in_groups(group.sizes, x.shape[0]), index, -1)
    else:
        index = group.permutation.choices // group.permutation.rows.shape[-1]
    x = not_differentiated(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), products.once)
    use_native = products.implementation == "native" and x.size > 0 and index.size > 0
    return quantize_rows(x, index, products.quantization(role), copies, use_native)
