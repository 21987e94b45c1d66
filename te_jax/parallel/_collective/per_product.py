"""Collective products with a recipe for each: operands are quantized for the products that read them."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from te_jax import native
from te_jax.ops.linear.arguments import implementation_for
from te_jax.ops.linear.per_product import READ_BY, Operand
from te_jax.ops.quantize import QuantizedParts
from te_jax.parallel._collective.call import CollectiveSpec
from te_jax.parallel._collective.products import CollectiveProducts
from te_jax.recipe import Fake, Product, ProductRecipes, Role
from te_jax.sharding import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerProduct(CollectiveProducts):
    """Products by layers of their own; `recipe` is None.

    Attributes:
      layers: of the forward pass, of the gradient of x, and of the gradients of kernels.
    """

    layers: tuple[CollectiveProducts, CollectiveProducts, CollectiveProducts]

    def layer(self, product: Product) -> CollectiveProducts:
        return self.layers[("forward", "dgrad", "wgrad").index(product)]

    def plain(self) -> CollectiveProducts:
        return self.layer("forward").plain()

    @property
    def is_plain(self) -> bool:
        return False

    def quantize(self, role, x, state, group, *, first_copy=True, second_copy, with_dbias=False) -> QuantizedParts:
        first, second = (self.layer(product) for product in READ_BY[cast(Role, role)])
        if second_copy and (first.recipe, first.fake) == (second.recipe, second.fake):
            both = first.quantize(role, x, state, group, second_copy=True, with_dbias=with_dbias)
            return both._replace(array=cast(Any, Operand(both.array, both.array)))
        parts = first.quantize(role, x, state, group, second_copy=False, with_dbias=with_dbias)
        other = None
        if second_copy:
            other = second.quantize(role, x, state, group, first_copy=False, second_copy=True).array
        return parts._replace(array=cast(Any, Operand(parts.array, other)))

    def forward(self, x8: Operand, kernel8s, biases, layouts, group, *, differentiated):
        kernels, shared = tuple(kernel8.first for kernel8 in kernel8s), x8.first is x8.second
        ys, by_cols, nothing = self.layer("forward").forward(
            x8.first, kernels, biases, layouts, group, differentiated=differentiated and shared
        )
        if x8.second is not None and not shared:
            by_cols = x8.second.by_cols
        return ys, by_cols, nothing

    def kept(self, x: Any, role: Role, *, is_argument: bool) -> Any:
        if role == "kernel":
            return self.layer("dgrad").kept(x.second, role, is_argument=is_argument)
        return self.layer("wgrad").kept(x, role, is_argument=is_argument)

    def dgrad(self, dy8s, kernel8s, group, layout: Layout):
        dx, gathered = self.layer("dgrad").dgrad(tuple(dy8.first for dy8 in dy8s), kernel8s, group, layout)
        pairs = zip(dy8s, gathered, strict=True)
        return dx, tuple(Operand(None, of if dy8.first is dy8.second else dy8.second) for dy8, of in pairs)

    def wgrads(self, x8, dy8s, group):
        return self.layer("wgrad").wgrads(x8, tuple(dy8.second for dy8 in dy8s), group)

    def validate_x(self, x8: Any, trained: str) -> None:
        self.layer("wgrad").validate_x(None, trained)


def per_product(
    kind: type[CollectiveProducts],
    recipe: ProductRecipes,
    implementation: native.Implementation | None,
    spec: CollectiveSpec,
    **options: Any,
) -> PerProduct:
    """The products of a layer whose recipe is one of products.

    Args:
      kind: of products.
      recipe: of products.
      implementation: of the layer.
      spec: without a recipe.
      **options: what the products have in common.

    Raises:
      NativeUnavailableError: an implementation cannot run here.
    """
    if recipe.forward != recipe.wgrad:  # x of the gradients of kernels is another one, gathered when they are computed
        spec = dataclasses.replace(spec, residual="shard")

    def of(one: Any) -> CollectiveProducts:
        if one is None:
            return kind(recipe=None, implementation=spec.implementation, spec=spec, **options)
        if isinstance(one, Fake):
            return kind(recipe=None, fake=one.recipe, implementation=spec.implementation, spec=spec, **options)
        chosen = implementation_for(implementation, one)
        own = dataclasses.replace(spec, recipe=one, implementation=chosen)
        return kind(recipe=one, implementation=chosen, spec=own, **options)

    first, second, third = map(of, recipe.by_product.values())
    layers = first, second, third
    return PerProduct(recipe=None, implementation=spec.implementation, spec=spec, layers=layers, **options)
