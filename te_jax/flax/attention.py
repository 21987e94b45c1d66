"""Grouped-query attention for Linen."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from te_jax import native
from te_jax.flax.linear import DenseGeneral, Initializer, layer_options, without_names
from te_jax.flax.norm import make_norm
from te_jax.layers import attention, linear, norm
from te_jax.quantized import QuantizedArray
from te_jax.recipe import Recipe


class Attention(nn.Module):
    """Self-attention with grouped queries and rotary positions, whose linear layers run in FP8 with a recipe.

    The layers "query", "key", "value" and "out" have the names and shapes of `flax.linen.MultiHeadDotProductAttention`,
    so that its checkpoints load; with qk_norm there are "query_ln" and "key_ln". The first three share one quantized x.
    Attention itself is `te_jax.ops.attention`, in `dtype`.

    Attributes:
      num_heads: of query.
      num_kv_heads: heads of key and value, which must divide num_heads; None for num_heads.
      head_dim: features of a head; None is the number of input features / num_heads.
      out_features: None is the number of input features.
      use_bias: whether the four layers have biases.
      causal: a token sees itself and those before it.
      window: a token sees only the last `window` of these tokens; None for all.
      rope_theta: base of rotary positions, which turn the pairs (i, i + head_dim / 2); None for no positions.
      qk_norm: the norms over head_dim of query and key, before the rotary positions: "rms", "layer" as in Flax, a
        `te_jax.layers.Norm`, or None.
      dtype, param_dtype, recipe, state_axis, implementation: as in `DenseGeneral`, for all layers.
      kernel_init, bias_init: of "query", "key" and "value", as in `DenseGeneral`.
      out_kernel_init, out_bias_init: of "out"; None for the same values, without names of axes.
      dropout_rate: of the result. Attention weights have no dropout.
      deterministic: as in `flax.linen.Dropout`; may be given to the call.
      decode: whether calls continue the tokens in the collection "cache", which must be mutable. `init` creates it with
        the number of sequences and tokens of its input.
      max_score_bytes: as in `te_jax.ops.attention`, which runs its reference with implementation="reference".
    """

    num_heads: int
    _: dataclasses.KW_ONLY
    num_kv_heads: int | None = None
    head_dim: int | None = None
    out_features: int | None = None
    use_bias: bool = False
    causal: bool = True
    window: int | None = None
    rope_theta: float | None = 10_000.0
    qk_norm: norm.Norm | norm.Kind | None = None
    dtype: jax.typing.DTypeLike | None = None
    param_dtype: jax.typing.DTypeLike = jnp.float32
    kernel_init: Initializer = nn.initializers.lecun_normal()
    out_kernel_init: Initializer | None = None
    bias_init: Initializer = nn.initializers.zeros_init()
    out_bias_init: Initializer | None = None
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    decode: bool = False
    recipe: Recipe | None = None
    state_axis: str | tuple[str, ...] | None = None
    implementation: native.Implementation | None = None
    max_score_bytes: int = 2**30

    def __post_init__(self) -> None:
        linear.Options(self.recipe, self.state_axis, self.implementation)
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        x: jax.typing.ArrayLike | QuantizedArray,
        *,
        segment_ids: Array | None = None,
        key_lengths: Array | None = None,
        positions: Array | None = None,
        deterministic: bool | None = None,
    ) -> Array:
        """Applies the layer.

        Args:
          x: [batch, time, in_features], or a QuantizedArray of it from a norm that writes FP8. With decode=True these
            are the next tokens of each sequence, one or more.
          segment_ids: integers [batch, time] of packed sequences: a token sees only tokens with its own number.
          key_lengths: integers [batch]: tokens from there on are padding, which no token sees.
          positions: integers [time] or [batch, time]; None counts from 0, or from the tokens in the cache. Packed
            sequences need no positions of their own, since rotary attention depends only on differences.
          deterministic: see the attribute.

        Returns:
          [batch, time, out_features]; NaN where the cache is too short for the tokens.

        Raises:
          ValueError: for shapes or dtypes that do not fit, naming the argument.
        """
        x = attention.as_input(x)
        in_features = x.shape[-1]
        heads = attention.Heads.of(in_features, self.num_heads, self.num_kv_heads, self.head_dim)
        settings = attention.Settings(
            self.causal, self.window, self.rope_theta, self.implementation, self.max_score_bytes
        )
        names = ("use_bias", "dtype", "param_dtype", "recipe", "state_axis", "implementation")
        shared: Any = {name: getattr(self, name) for name in names}
        projections = [
            DenseGeneral(
                features,
                kernel_init=self.kernel_init,
                bias_init=self.bias_init,
                name=name,
                **shared,
            )
            for name, features in zip(("query", "key", "value"), heads.features, strict=True)
        ]
        of_query, of_key, of_value = (layer.held((in_features,)) for layer in projections)
        query, key, value = attention.project(
            x, (of_query, of_key, of_value), heads, dtype=self.dtype, options=layer_options(projections[0])
        )
        if self.qk_norm is not None:
            heads_norm = norm.Norm.of(self.qk_norm, "qk_norm")
            of_norms: Any = {name: getattr(self, name) for name in ("dtype", "param_dtype", "implementation")}
            query, key = (
                make_norm(heads_norm, name=name, **of_norms)(x) for name, x in (("query_ln", query), ("key_ln", key))
            )
        mixed = self._attend(
            query, key, value, settings, segment_ids=segment_ids, key_lengths=key_lengths, positions=positions
        )
        y = DenseGeneral(
            in_features if self.out_features is None else self.out_features,
            axis=(-2, -1),
            kernel_init=self.out_kernel_init or without_names(self.kernel_init),
            bias_init=self.out_bias_init or without_names(self.bias_init),
            name="out",
            **shared,
        )(mixed)
        if not self.dropout_rate:
            return y
        deterministic = nn.merge_param("deterministic", self.deterministic, deterministic)
        return nn.Dropout(self.dropout_rate, name="dropout")(y, deterministic=deterministic)

    def _attend(self, query: Array, key: Array, value: Array, settings: attention.Settings, **arguments: Any) -> Array:
        """`te_jax.layers.attention.attend`, with the cache as variables; `init` only makes them."""
        if not self.decode:
            return attention.attend(query, key, value, settings, **arguments)[0]
        exists = self.has_variable("cache", "cached_key")
        variables = (
            self.variable("cache", "cached_key", jnp.zeros_like, key),
            self.variable("cache", "cached_value", jnp.zeros_like, value),
            self.variable("cache", "cache_index", jnp.zeros, (), jnp.int32),
        )
        if not exists:
            return attention.attend(query, key, value, settings, **arguments)[0]
        cache = attention.Cache(*(variable.value for variable in variables))
        mixed, cache = attention.attend(query, key, value, settings, **arguments, cache=cache)
        for variable, new in zip(variables, cache or (), strict=True):
            variable.value = new
        return mixed
