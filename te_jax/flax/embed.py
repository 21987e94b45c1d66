"""An embedding for Linen whose transpose makes logits."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from te_jax import native
from te_jax.flax.linear import Initializer, reshaped
from te_jax.layers import embed, linear
from te_jax.recipe import Recipe


class Embed(nn.Module):
    """A table of vectors, whose transpose computes logits, with the parameter of `flax.linen.Embed`.

    Attributes:
      num_embeddings, features: sizes of the table.
      dtype: of the results; None is that of the table, for logits what x and the table promote to.
      param_dtype, embedding_init: of the parameter "embedding".
      recipe: how `attend` quantizes; None, which most models want for logits, computes in `dtype`. Not DelayedScaling.
      implementation: as in `DenseGeneral`.
    """

    num_embeddings: int
    features: int
    dtype: jax.typing.DTypeLike | None = None
    param_dtype: jax.typing.DTypeLike = jnp.float32
    embedding_init: Initializer = embed.INIT
    _: dataclasses.KW_ONLY
    recipe: Recipe | None = None
    implementation: native.Implementation | None = None

    def __post_init__(self) -> None:
        embed.check_recipe(self.recipe)
        linear.Options(self.recipe, None, self.implementation)
        super().__post_init__()

    def setup(self) -> None:
        shape = self.num_embeddings, self.features
        init = reshaped(self.embedding_init, shape)
        self.embedding = self.param("embedding", init, shape, self.param_dtype)

    def __call__(self, inputs: jax.typing.ArrayLike) -> Array:
        """The vectors [*inputs' shape, features] of integers in [0, num_embeddings).

        As in Flax's layer, -1 is the last vector, and integers from num_embeddings on give NaN.
        """
        return embed.rows(self.embedding, inputs, self.dtype)

    def attend(self, query: jax.typing.ArrayLike) -> Array:
        """Logits [*batch, num_embeddings] of query [*batch, features]."""
        return embed.attend(self.embedding, query, self.dtype, linear.Options(self.recipe, None, self.implementation))
