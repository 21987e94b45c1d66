"""An embedding for NNX whose transpose makes logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from te_jax import native
from te_jax.layers import embed, linear
from te_jax.nnx.linear import Initializer
from te_jax.recipe import Recipe


class Embed(nnx.Module):
    """A table of vectors, whose transpose computes logits, with the parameter of `flax.nnx.Embed`.

    Args:
      num_embeddings, features: sizes of the table.
      dtype: of the results; None is that of the table, for logits what x and the table promote to.
      param_dtype, embedding_init, embedding_metadata: of the parameter.
      recipe: how `attend` quantizes; None, which most models want for logits, computes in `dtype`. Not DelayedScaling.
      implementation: as in `LinearGeneral`.
      rngs: `nnx.Rngs`, of which "params" is used.

    Raises:
      ValueError: recipe is a DelayedScaling.
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        embedding_init: Initializer = embed.INIT,
        embedding_metadata: Mapping[str, Any] | None = None,
        recipe: Recipe | None = None,
        implementation: native.Implementation | None = None,
        rngs: nnx.Rngs,
    ):
        embed.check_recipe(recipe)
        self.num_embeddings, self.features, self.dtype = num_embeddings, features, dtype
        self.options = linear.Options(recipe, None, implementation)
        table = embedding_init(rngs.params(), (num_embeddings, features), param_dtype)
        self.embedding: nnx.Param = nnx.Param(table, **(embedding_metadata or {}))

    def __call__(self, inputs: jax.typing.ArrayLike) -> Array:
        """The vectors [*inputs' shape, features] of integers in [0, num_embeddings).

        As in Flax's layer, -1 is the last vector, and integers from num_embeddings on give NaN.
        """
        return embed.rows(self.embedding.get_value(), inputs, self.dtype)

    def attend(self, query: jax.typing.ArrayLike) -> Array:
        """Logits [*batch, num_embeddings] of query [*batch, features]."""
        return embed.attend(self.embedding.get_value(), query, self.dtype, self.options)
