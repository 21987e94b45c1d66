"""The arithmetic of embeddings of Linen and NNX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from te_jax import ops, sharding
from te_jax._core.integers import validate_integers
from te_jax.layers import linear
from te_jax.recipe import DelayedScaling, Recipe

INIT = jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)
"""The initializer of Flax's own."""


def check_recipe(recipe: Recipe | None) -> None:
    """Raises a ValueError for a recipe with a state, which an embedding does not hold."""
    if isinstance(recipe, DelayedScaling):
        raise ValueError(f"recipe is {recipe!r}, whose state Embed does not hold: use another recipe, or None")


def rows(table: Array, indices: jax.typing.ArrayLike, dtype: jax.typing.DTypeLike | None) -> Array:
    """The rows of a table at indices, in the given dtype or that of the table."""
    validate_integers("inputs", indices)
    indices = jnp.asarray(indices)
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise ValueError(f"inputs have dtype {indices.dtype}; they must be integers, the numbers of the vectors")
    return sharding.take_rows(table, indices).astype(table.dtype if dtype is None else dtype)


def attend(table: Array, query: Any, dtype: jax.typing.DTypeLike | None, options: linear.Options) -> Array:
    """query · tableᵀ."""
    query = linear.as_array("query", query)
    query = query.astype(linear.result_dtype(dtype, query, table))
    return ops.dense(query, table, kernel_contracting="last", **vars(options))
