"""Products of linear layers with a recipe for each: operands are quantized for the products that read them."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from te_jax import native
from te_jax._core.derivatives import not_differentiated
from te_jax.ops.gemm import gemm
from te_jax.ops.linear.arguments import implementation_for
from te_jax.ops.linear.local import LocalProducts, total
from te_jax.ops.quantize import QuantizedParts
from te_jax.recipe import Fake, Product, ProductRecipes, Recipe, Role
from te_jax.reference.quantize import Copies
from te_jax.sharding import Layout

READ_BY: dict[Role, tuple[Product, Product]] = {
    "activation": ("forward", "wgrad"),
    "kernel": ("forward", "dgrad"),
    "gradient": ("dgrad", "wgrad"),
}


class Operand(NamedTuple):
    """An operand as each of its two products reads it; the second None where it is not needed."""

    first: Any
    second: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerProduct(LocalProducts):
    """Products by recipes of their own; `recipe` is None.

    Attributes:
      recipes: of the products.
      implementations: of the products in FP8; `implementation` is that of the others.
      dtype: of x, in which the others multiply.
    """

    recipes: ProductRecipes
    implementations: tuple[tuple[Product, native.Implementation], ...]
    dtype: np.dtype

    @property
    def gelu_is_fused(self) -> bool:
        recipe = self.recipes.forward
        return isinstance(recipe, Recipe) and self._layer(recipe, self.implementation).gelu_is_fused

    def quantize(self, role, x, state=None, group=None, *, second_copy, with_dbias=False) -> QuantizedParts:
        x = not_differentiated(x, self.once)
        copies: tuple[Copies, Copies] = ("data", "transposed")
        if role == "kernel" and self.kernel_contracting == "first":
            copies = ("transposed", "data")
        first, second = READ_BY[role]
        recipes = self.recipes.by_product
        if second_copy and recipes[first] == recipes[second] and not isinstance(recipes[first], Fake):
            both = self._read(first, role, x, "both")
            operand = Operand(both, both)
        else:
            operand = Operand(
                self._read(first, role, x, copies[0]), self._read(second, role, x, copies[1]) if second_copy else None
            )
        dbias = jnp.sum(x.astype(jnp.float32), axis=tuple(range(self.batch_ndim))) if with_dbias else None
        return QuantizedParts(operand, None, dbias)  # pyright: ignore[reportArgumentType]

    def _read(self, product: Product, role: Role, x: Array, copies: Copies) -> Any:
        """x as a product reads it: in FP8, or in the dtype of the layer's x."""
        recipe = self.recipes.by_product[product]
        if recipe is None:
            return x.astype(self.dtype)
        if isinstance(recipe, Fake):
            fake = self._layer(recipe.recipe, "reference").copies_of(role, x, None, copies).array
            return dataclasses.replace(fake, dtype=self.dtype).dequantize()
        return self._layer(recipe, dict(self.implementations)[product]).copies_of(role, x, None, copies).array

    def _layer(self, recipe: Recipe, implementation: native.Implementation) -> LocalProducts:
        """The layer with one recipe for all products."""
        given: Any = {field.name: getattr(self, field.name) for field in dataclasses.fields(LocalProducts)}
        given |= {"recipe": recipe, "implementation": implementation}
        given["by_kernels"] = self.by_kernels and implementation != "reference"
        return LocalProducts(**given)

    @property
    def is_plain(self) -> bool:
        return False

    def gemm(self, product: Product, lhs: Any, rhs: Any, **options: Any) -> Any:
        recipe = self.recipes.by_product[product]
        if isinstance(recipe, Recipe):
            return self._layer(recipe, dict(self.implementations)[product]).gemm(product, lhs, rhs, **options)
        sizes = {
            "forward": self.contracting_ndim, "dgrad": lhs.ndim - self.batch_ndim, "wgrad": self.batch_ndim,
        }  # fmt: skip
        options |= {**self.contracting(product), "contracting_ndim": sizes[product]}
        return gemm(lhs, rhs, implementation=self.implementation, **options)

    def forward(self, x8, kernel8s, biases, layouts, group=None, *, differentiated: bool):
        kernels = tuple(kernel.first for kernel in kernel8s)
        ys, _, preactivations = super().forward(
            x8.first, kernels, biases, layouts, group, differentiated=differentiated
        )
        return ys, x8, preactivations

    def kept(self, x: Any, role: Role, *, is_argument: bool) -> Any:
        return super().kept(x.second, role, is_argument=is_argument)

    def dgrad(self, dy8s, kernel8s, group, layout: Layout):
        firsts, recipe = tuple(dy8.first for dy8 in dy8s), self.recipes.dgrad
        if isinstance(recipe, Recipe):
            dx, _ = self._layer(recipe, dict(self.implementations)["dgrad"]).dgrad(firsts, kernel8s, group, layout)
            return dx, dy8s
        pairs = zip(firsts, kernel8s, strict=True)
        return total(*(layout.apply(self.gemm("dgrad", *pair, out_dtype=layout.dtype)) for pair in pairs)), dy8s

    def wgrads(self, x8, dy8s, group=None):
        return super().wgrads(x8, tuple(dy8.second for dy8 in dy8s), group)


def per_product(
    recipe: Recipe, implementation: native.Implementation | None, dtype: np.dtype, **options: Any
) -> PerProduct | None:
    """The products of a layer whose recipe is one of products; None for another recipe.

    Raises:
      NativeUnavailableError: an implementation cannot run here.
    """
    if not isinstance(recipe, ProductRecipes):
        return None
    implementations: Any = tuple(
        (product, implementation_for(implementation, of))
        for product, of in recipe.by_product.items()
        if isinstance(of, Recipe)
    )
    others: native.Implementation = "native" if native.use_native(implementation, products=True) else "reference"
    return PerProduct(
        recipe=None,
        recipes=recipe,
        implementation=others,
        implementations=implementations,
        by_kernels=native.use_native(implementation),
        dtype=dtype,
        **options,
    )
