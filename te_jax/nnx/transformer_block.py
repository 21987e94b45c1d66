"""A transformer block for NNX."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from te_jax import native
from te_jax.layers import norm, transformer_block
from te_jax.layers.tensor_parallel import TensorAxis
from te_jax.nnx.attention import Attention
from te_jax.nnx.gated_mlp import GatedMLP
from te_jax.nnx.norm import make_norm
from te_jax.recipe import Recipe
from te_jax.reference.activation import Activation, ActivationName


class TransformerBlock(nnx.Module):
    """The pre-norm block of Llama and similar models: s = x + attention(norm(x)), then s + mlp(norm(s)).

    It consists of `attention_norm`, `attention`, `mlp_norm` and `mlp`. The norms write x in FP8, and the second one
    computes s in its CUDA kernel. The layers quantize x with delayed scaling, and with block scaling if 128 does not
    divide the sequence length.

    Args:
      in_features: number of features of x.
      hidden_features: of the MLP.
      num_heads, num_kv_heads, head_dim, window, rope_theta, qk_norm: of `Attention`.
      activation: of `GatedMLP`; "silu" is SwiGLU.
      norm: "rms", "layer", or a `te_jax.layers.Norm`.
      dropout_rate: of the results of attention and MLP, before they are added.
      tensor_axis: the mesh axis whose devices split heads and hidden features, and between modules the time of x and of
        the result; see `Attention` and `GatedMLP`.
      dtype, param_dtype, state_axis, implementation: as in `LinearGeneral`, for all layers.
      recipe: a recipe, None, or recipes by role, {"attention": …, "mlp": …}.
      attention_arguments, mlp_arguments: further arguments of these layers, such as {"kernel_init": …}.
      rngs: `nnx.Rngs`, of which "params" is used, and "dropout" with a dropout_rate.

    Raises:
      ValueError: for sizes that do not fit, and other keys of recipe.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        window: int | None = None,
        rope_theta: float | None = 10_000.0,
        qk_norm: norm.Norm | norm.Kind | None = None,
        activation: Activation | ActivationName = "silu",
        norm: norm.Norm | norm.Kind = "rms",
        dropout_rate: float = 0.0,
        tensor_axis: str | None = None,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        recipe: Recipe | Mapping[str, Recipe | None] | None = None,
        state_axis: str | tuple[str, ...] | None = None,
        implementation: native.Implementation | None = None,
        attention_arguments: Mapping[str, Any] | None = None,
        mlp_arguments: Mapping[str, Any] | None = None,
        rngs: nnx.Rngs,
    ):
        self.dtype, self.tensor_axis = dtype, tensor_axis
        self.recipes = transformer_block.Recipes.of(recipe)
        shared: Any = {"dtype": dtype, "param_dtype": param_dtype, "implementation": implementation, "rngs": rngs}
        self.attention_norm = make_norm(norm, in_features, **shared)
        self.attention = Attention(
            in_features,
            num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window=window,
            rope_theta=rope_theta,
            qk_norm=qk_norm,
            dropout_rate=dropout_rate,
            tensor_axis=tensor_axis,
            recipe=self.recipes.attention,
            state_axis=state_axis,
            **shared,
            **(attention_arguments or {}),
        )
        self.mlp_norm = make_norm(norm, in_features, **shared)
        self.mlp = GatedMLP(
            in_features,
            hidden_features,
            activation=activation,
            dropout_rate=dropout_rate,
            tensor_axis=tensor_axis,
            recipe=self.recipes.mlp,
            state_axis=state_axis,
            **shared,
            **(mlp_arguments or {}),
        )

    def __call__(
        self,
        x: jax.typing.ArrayLike,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        **arguments: Any,
    ) -> Array:
        """Applies the block.

        Args:
          x: [batch, time, in_features].
          deterministic, rngs: as in `flax.nnx.Dropout`.
          arguments: segment_ids, max_segments_per_seq, key_lengths, positions and decode, as in `Attention`.

        Returns:
          An array like x.

        Raises:
          ValueError: for shapes or dtypes that do not fit, naming the argument.
        """
        dropout: Any = {"deterministic": deterministic, "rngs": rngs}
        return transformer_block.apply(
            x,
            self.attention_norm,
            functools.partial(self.attention, **arguments, **dropout),
            self.mlp_norm,
            functools.partial(self.mlp, **dropout),
            self.recipes,
            TensorAxis.of(self.tensor_axis),
        )
