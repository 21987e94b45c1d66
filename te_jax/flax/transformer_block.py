"""A transformer block for Linen."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from te_jax import native
from te_jax.flax.attention import Attention
from te_jax.flax.gated_mlp import GatedMLP
from te_jax.flax.norm import make_norm
from te_jax.layers import linear, norm, tensor_parallel, transformer_block
from te_jax.layers.tensor_parallel import TensorAxis
from te_jax.recipe import Recipe
from te_jax.reference.activation import Activation, ActivationName


class TransformerBlock(nn.Module):
    """The pre-norm block of Llama and similar models: s = x + attention(norm(x)), then s + mlp(norm(s)).

    It consists of "attention_norm", "attention", "mlp_norm" and "mlp". The norms write x in FP8, and the second one
    computes s in its CUDA kernel. The layers quantize x with delayed scaling, and with block scaling if 128 does not
    divide the sequence length.

    Attributes:
      hidden_features: of the MLP.
      num_heads, num_kv_heads, head_dim, window, rope_theta, qk_norm, decode: of `Attention`.
      activation: of `GatedMLP`; "silu" is SwiGLU.
      norm: "rms", "layer", or a `te_jax.layers.Norm`.
      dropout_rate: of the results of attention and MLP, before they are added.
      tensor_axis: the mesh axis whose devices split heads and hidden features, and between modules the time of x and of
        the result; see `Attention` and `GatedMLP`.
      deterministic: as in `flax.linen.Dropout`; may be given to the call.
      dtype, param_dtype, state_axis, implementation: as in `DenseGeneral`, for all layers.
      recipe: a recipe, None, or recipes by role, {"attention": …, "mlp": …}.
      attention_arguments, mlp_arguments: further arguments of these layers, such as {"kernel_init": …}.
    """

    hidden_features: int
    num_heads: int
    _: dataclasses.KW_ONLY
    num_kv_heads: int | None = None
    head_dim: int | None = None
    window: int | None = None
    rope_theta: float | None = 10_000.0
    qk_norm: norm.Norm | norm.Kind | None = None
    activation: Activation | ActivationName = "silu"
    norm: norm.Norm | norm.Kind = "rms"
    dropout_rate: float = 0.0
    tensor_axis: str | None = None
    deterministic: bool | None = None
    decode: bool = False
    dtype: jax.typing.DTypeLike | None = None
    param_dtype: jax.typing.DTypeLike = jnp.float32
    recipe: Recipe | Mapping[str, Recipe | None] | None = None
    state_axis: str | tuple[str, ...] | None = None
    implementation: native.Implementation | None = None
    attention_arguments: Mapping[str, Any] | None = None
    mlp_arguments: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for recipe in transformer_block.Recipes.of(self.recipe):
            linear.Options(recipe, self.state_axis, self.implementation)
        tensor_parallel.validate(self.tensor_axis, self.state_axis)
        super().__post_init__()

    @nn.compact
    def __call__(self, x: jax.typing.ArrayLike, *, deterministic: bool | None = None, **arguments: Any) -> Array:
        """Applies the block.

        Args:
          x: [batch, time, in_features].
          deterministic: see the attribute.
          arguments: segment_ids, max_segments_per_seq, key_lengths and positions, as in `Attention`.

        Returns:
          An array like x.

        Raises:
          ValueError: for shapes or dtypes that do not fit, naming the argument, and other keys of recipe.
        """
        if self.dropout_rate:
            deterministic = nn.merge_param("deterministic", self.deterministic, deterministic)
        recipes = transformer_block.Recipes.of(self.recipe)
        shared: Any = {"dtype": self.dtype, "param_dtype": self.param_dtype, "implementation": self.implementation}
        attention = Attention(
            self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            window=self.window,
            rope_theta=self.rope_theta,
            qk_norm=self.qk_norm,
            dropout_rate=self.dropout_rate,
            decode=self.decode,
            tensor_axis=self.tensor_axis,
            recipe=recipes.attention,
            state_axis=self.state_axis,
            name="attention",
            **shared,
            **(self.attention_arguments or {}),
        )
        mlp = GatedMLP(
            self.hidden_features,
            activation=self.activation,
            dropout_rate=self.dropout_rate,
            tensor_axis=self.tensor_axis,
            recipe=recipes.mlp,
            state_axis=self.state_axis,
            name="mlp",
            **shared,
            **(self.mlp_arguments or {}),
        )

        return transformer_block.apply(
            x,
            make_norm(self.norm, name="attention_norm", **shared),
            functools.partial(attention, **arguments, deterministic=deterministic),
            make_norm(self.norm, name="mlp_norm", **shared),
            functools.partial(mlp, deterministic=deterministic),
            recipes,
            None if self.is_initializing() else TensorAxis.of(self.tensor_axis),
        )
