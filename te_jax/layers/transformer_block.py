"""The arithmetic of transformer blocks: the residual stream, and the recipes of its branches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from te_jax import sharding
from te_jax.layers import norm
from te_jax.layers.tensor_parallel import TensorAxis
from te_jax.quantized import Quantizable
from te_jax.recipe import Recipe


class Recipes(NamedTuple):
    """The recipes of the two parts of a block."""

    attention: Recipe | None
    mlp: Recipe | None

    @classmethod
    def of(cls, recipe: Recipe | Mapping[str, Recipe | None] | None) -> Recipes:
        """One recipe for both, or one for each by name."""
        if not isinstance(recipe, Mapping):
            return cls(recipe, recipe)
        if set(recipe) != set(cls._fields):
            raise ValueError(
                f"recipe has the keys {sorted(recipe)}; it must be a recipe, None, or a mapping with the keys "
                f"{cls._fields}"
            )
        return cls(**recipe)


def apply(
    x: jax.typing.ArrayLike,
    attention_norm: Callable[..., Any] | None,
    attention: Callable[[Quantizable], Array],
    mlp_norm: Callable[..., Any] | None,
    mlp: Callable[[Quantizable], Array],
    recipes: Recipes,
    tensor: TensorAxis | None,
) -> Array:
    """s + mlp(mlp_norm(s)) with s = x + attention(attention_norm(x)), like x; None is no norm."""
    stream = jnp.asarray(x)
    layout = sharding.Layout.of(stream)
    normed, _ = norm.before(attention_norm, stream, None, recipes.attention, tensor)
    y = layout.apply(attention(normed))
    if mlp_norm is None:
        normed = total = stream + y
    else:
        normed, total = norm.before(mlp_norm, y, stream, recipes.mlp, tensor)
    assert total is not None
    return layout.apply(total) + layout.apply(mlp(normed))
