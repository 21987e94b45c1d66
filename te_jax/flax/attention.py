"""Grouped-query attention for Linen."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from te_jax import native
from te_jax.flax.linear import DenseGeneral, Initializer, apply_dropout, layer_options, split_over, without_names
from te_jax.flax.norm import make_norm
from te_jax.layers import attention, linear, norm, tensor_parallel
from te_jax.layers.tensor_parallel import TensorAxis, splits_kv_heads
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
      tensor_axis: the mesh axis whose devices split the heads, and between modules the time of x and of the result. The
        calls of `te_jax.parallel.all_gather_matmul` and `matmul_reduce_scatter` overlap exchanges with GEMMs. If there
        are too few heads of key and value, all devices have all of these parameters. None for no such axis. `init`
        creates whole parameters.
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
    tensor_axis: str | None = None
    deterministic: bool | None = None
    decode: bool = False
    recipe: Recipe | None = None
    state_axis: str | tuple[str, ...] | None = None
    implementation: native.Implementation | None = None
    max_score_bytes: int = 2**30

    def __post_init__(self) -> None:
        linear.Options(self.recipe, self.state_axis, self.implementation)
        tensor_parallel.validate(self.tensor_axis, self.state_axis)
        if self.decode:
            tensor_parallel.refuse_decoding(self.tensor_axis)
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        x: jax.typing.ArrayLike | QuantizedArray,
        *,
        segment_ids: Array | None = None,
        max_segments_per_seq: int | None = None,
        key_lengths: Array | None = None,
        positions: Array | None = None,
        deterministic: bool | None = None,
    ) -> Array:
        """Applies the layer.

        Args:
          x: [batch, time, in_features], or a QuantizedArray of it from a norm that writes FP8. With decode=True these
            are the next tokens of each sequence, one or more.
          segment_ids: integers [batch, time] of packed sequences: a token sees only tokens with its own number.
          max_segments_per_seq: how many there are in a sequence at most, each a run of equal numbers, as in
            `te_jax.ops.attention`: cuDNN then computes them alone. None takes any, by a mask.
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
        tensor_parallel.validate_sizes(self.tensor_axis, num_heads=heads.query)
        tensor = None if self.is_initializing() else TensorAxis.of(self.tensor_axis)
        held = heads if tensor is None else attention.heads_here(heads, tensor)
        splits_kv = splits_kv_heads(self.tensor_axis, heads.key_value)
        splits = {"query": self.tensor_axis} | dict.fromkeys(("key", "value"), self.tensor_axis if splits_kv else None)
        projections = [
            DenseGeneral(
                features,
                kernel_init=split_over(split, self.kernel_init, None, split, None),
                bias_init=split_over(split, self.bias_init, split, None),
                name=name,
                **shared,
            )
            for (name, split), features in zip(splits.items(), held.features, strict=True)
        ]
        of_query, of_key, of_value = (layer.held((in_features,)) for layer in projections)
        query, key, value = attention.project(
            x,
            (of_query, of_key, of_value),
            heads,
            dtype=self.dtype,
            options=layer_options(projections[0]),
            tensor=tensor,
        )
        if self.qk_norm is not None:
            heads_norm = norm.Norm.of(self.qk_norm, "qk_norm")
            of_norms: Any = {name: getattr(self, name) for name in ("dtype", "param_dtype", "implementation")}
            query, key = (
                make_norm(heads_norm, name=name, **of_norms)(x) for name, x in (("query_ln", query), ("key_ln", key))
            )
        mixed = self._attend(
            query,
            key,
            value,
            settings,
            segment_ids=segment_ids,
            max_segments_per_seq=max_segments_per_seq,
            key_lengths=key_lengths,
            positions=positions,
        )
        out_features = in_features if self.out_features is None else self.out_features
        out_kernel_init = self.out_kernel_init or without_names(self.kernel_init)
        out = DenseGeneral(
            out_features,
            axis=(-2, -1),
            kernel_init=split_over(self.tensor_axis, out_kernel_init, self.tensor_axis, None, None),
            bias_init=self.out_bias_init or without_names(self.bias_init),
            name="out",
            **shared,
        )
        if tensor is None:
            y = out(mixed)
        else:
            y = linear.scattered_linear(
                mixed,
                out.held(mixed.shape[2:]),
                axis=(2, 3),
                features=linear.as_tuple(out_features),
                dtype=self.dtype,
                options=layer_options(out),
                tensor=tensor,
            )
        return apply_dropout(self, y, tensor, deterministic)

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
