"""Products of linear layers with a recipe for each: operands are quantized for the products that read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Self

from jax import Array

from te_jax.ops.linear.products import Products
from te_jax.ops.quantize import QuantizedParts
from te_jax.recipe import Fake, Product, ProductRecipes, Recipe, Role
from te_jax.sharding import Layout

_PRODUCTS: tuple[Product, ...] = ("forward", "dgrad", "wgrad")
_READ_BY: dict[Role, tuple[Product, Product]] = {
    "activation": ("forward", "wgrad"),
    "kernel": ("forward", "dgrad"),
    "gradient": ("dgrad", "wgrad"),
}


def is_shared(recipes: ProductRecipes, role: Role) -> bool:
    """Whether both products that read an operand read what one recipe makes of it."""
    first, second = (recipes.by_product[product] for product in _READ_BY[role])
    return first == second and not isinstance(first, Fake)


class _Operand(NamedTuple):
    """An operand as each of its two products reads it; the second None where it is not needed."""

    first: Any
    second: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerProduct(Products):
    """Products, each of a layer of its own; `recipe` is None.

    Attributes:
      recipes: of the products.
      layers: of the forward pass, of the gradient of x and of the gradients of kernels.
    """

    recipes: ProductRecipes
    layers: tuple[Any, ...]

    @classmethod
    def of(cls, recipes: ProductRecipes, layer: Callable[[Recipe | None, Recipe | None], Products]) -> Self:
        """The layer of recipes of products.

        Args:
          recipes: of the products.
          layer: a layer by its recipe, or else by the recipe whose values it reads, if there is one.
        """
        layers = tuple(
            layer(None, one.recipe) if isinstance(one, Fake) else layer(one, None)
            for one in recipes.by_product.values()
        )
        own = {field.name: getattr(layers[0], field.name) for field in dataclasses.fields(Products)}
        return cls(**{**own, "recipe": None}, recipes=recipes, layers=layers)

    def layer(self, product: Product) -> Any:
        return self.layers[_PRODUCTS.index(product)]

    @property
    def is_plain(self) -> bool:
        return False

    def quantize(
        self, role, x, state=None, group=None, *, first_copy=True, second_copy, with_dbias=False
    ) -> QuantizedParts:
        first, second = map(self.layer, _READ_BY[role])
        shared = second_copy and is_shared(self.recipes, role)
        parts = first.quantize(role, x, None, group, second_copy=shared, with_dbias=with_dbias)
        other = parts.array if shared else None
        if second_copy and not shared:
            other = second.quantize(role, x, None, group, first_copy=False, second_copy=True).array
        operand: Any = _Operand(parts.array, other)
        return QuantizedParts(operand, None, parts.dbias)

    def layouts(self, x: Any, kernels: Any) -> tuple[Layout | None, ...]:
        return self.layers[0].layouts(x, kernels)

    def forward(self, x8: _Operand, kernel8s, biases, layouts, group=None, *, differentiated: bool):
        kernels = tuple(kernel8.first for kernel8 in kernel8s)
        ys, x, preactivations = self.layer("forward").forward(
            x8.first, kernels, biases, layouts, group, differentiated=differentiated
        )
        return ys, x if is_shared(self.recipes, "activation") else x8.second, preactivations

    def kept(self, x: Any, role: Role, *, is_argument: bool) -> Any:
        if role == "kernel":
            return self.layer("dgrad").kept(x.second, role, is_argument=is_argument)
        return self.layer("wgrad").kept(x, role, is_argument=is_argument)

    def plain(self) -> Products:
        return self.layers[0].plain()

    def token_ndim(self, x: Array) -> int:
        return self.layers[0].token_ndim(x)

    def activated(self, y: Array) -> Array:
        return self.layers[0].activated(y)

    def before_activation(self, preactivation: Any, dy: Array) -> Array:
        return self.layers[0].before_activation(preactivation, dy)

    def dgrad(self, dy8s, kernel8s, group, layout: Layout):
        firsts = tuple(dy8.first for dy8 in dy8s)
        dx, dys = self.layer("dgrad").dgrad(firsts, kernel8s, group, layout)
        if is_shared(self.recipes, "gradient") and dy8s[0].second is not None:
            dy8s = tuple(_Operand(None, dy) for dy in dys)
        return dx, dy8s

    def wgrads(self, x8, dy8s, group=None):
        return self.layer("wgrad").wgrads(x8, tuple(dy8.second for dy8 in dy8s), group)

    def validate_x(self, x8: Any, trained: str) -> None:
        self.layer("wgrad").validate_x(x8, trained)
