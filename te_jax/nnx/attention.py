"""Grouped-query attention for NNX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from te_jax import native
from te_jax.layers import attention, linear, norm, tensor_parallel
from te_jax.layers.tensor_parallel import TensorAxis, splits_kv_heads
from te_jax.nnx.linear import Initializer, LinearGeneral, apply_dropout, split_over, without_metadata
from te_jax.nnx.norm import LayerNorm, RMSNorm, make_norm
from te_jax.quantized import QuantizedArray
from te_jax.recipe import Recipe


class Attention(nnx.Module):
    """Self-attention with grouped queries and rotary positions, whose linear layers run in FP8 with a recipe.

    The layers `query`, `key`, `value` and `out` have the names and shapes of `flax.nnx.MultiHeadAttention`, so that its
    checkpoints load; with qk_norm there are `query_ln` and `key_ln`. The first three share one quantized x. Attention
    itself is `te_jax.ops.attention`, in `dtype`.

    Args:
      in_features: number of input features.
      num_heads: of query.
      num_kv_heads: heads of key and value, which must divide num_heads; None for num_heads.
      head_dim: features of a head; None is in_features / num_heads.
      out_features: None is in_features.
      use_bias: whether the four layers have biases.
      causal: a token sees itself and those before it.
      window: a token sees only the last `window` of these tokens; None for all.
      rope_theta: base of rotary positions, which turn the pairs (i, i + head_dim / 2); None for no positions.
      qk_norm: the norms over head_dim of query and key, before the rotary positions: "rms", "layer" as in Flax, a
        `te_jax.layers.Norm`, or None.
      dtype, param_dtype, recipe, state_axis, implementation: as in `LinearGeneral`, for all layers.
      kernel_init, bias_init: of `query`, `key` and `value`. They may have metadata, as from `nnx.with_partitioning`.
      out_kernel_init, out_bias_init: of `out`; None for the same values, without metadata.
      dropout_rate: of the result. Attention weights have no dropout.
      tensor_axis: the mesh axis whose devices split the heads, and between modules the time of x and of the result. The
        calls of `te_jax.parallel.all_gather_matmul` and `matmul_reduce_scatter` overlap exchanges with GEMMs. If there
        are too few heads of key and value, all devices have all of these parameters. None for no such axis.
      max_score_bytes: as in `te_jax.ops.attention`, which runs its reference with implementation="reference".
      rngs: `nnx.Rngs`, of which "params" is used, and "dropout" with a dropout_rate.

    Raises:
      ValueError: for sizes that do not fit.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        out_features: int | None = None,
        use_bias: bool = False,
        causal: bool = True,
        window: int | None = None,
        rope_theta: float | None = 10_000.0,
        qk_norm: norm.Norm | norm.Kind | None = None,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        kernel_init: Initializer = nnx.initializers.lecun_normal(),
        out_kernel_init: Initializer | None = None,
        bias_init: Initializer = nnx.initializers.zeros_init(),
        out_bias_init: Initializer | None = None,
        dropout_rate: float = 0.0,
        tensor_axis: str | None = None,
        recipe: Recipe | None = None,
        state_axis: str | tuple[str, ...] | None = None,
        implementation: native.Implementation | None = None,
        max_score_bytes: int = 2**30,
        rngs: nnx.Rngs,
    ):
        tensor_parallel.validate(tensor_axis, state_axis)
        self.in_features, self.tensor_axis = in_features, tensor_axis
        self.heads = attention.Heads.of(in_features, num_heads, num_kv_heads, head_dim)
        tensor_parallel.validate_sizes(tensor_axis, num_heads=self.heads.query)
        self.settings = attention.Settings(causal, window, rope_theta, implementation, max_score_bytes)
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.decode = False
        shared: Any = {
            "use_bias": use_bias,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "recipe": recipe,
            "state_axis": state_axis,
            "implementation": implementation,
            "rngs": rngs,
        }
        by_head: Any = {
            "kernel_metadata": split_over(tensor_axis, None, tensor_axis, None),
            "bias_metadata": split_over(tensor_axis, tensor_axis, None),
        }
        projection: Any = {"kernel_init": kernel_init, "bias_init": bias_init}
        key_value = projection | (by_head if splits_kv_heads(tensor_axis, self.heads.key_value) else {})
        of_query, of_key, of_value = self.heads.features
        self.query = LinearGeneral(in_features, of_query, **projection, **by_head, **shared)
        self.key = LinearGeneral(in_features, of_key, **key_value, **shared)
        self.value = LinearGeneral(in_features, of_value, **key_value, **shared)
        self.query_ln: RMSNorm | LayerNorm | None = nnx.data(None)
        self.key_ln: RMSNorm | LayerNorm | None = nnx.data(None)
        if qk_norm is not None:
            heads_norm = norm.Norm.of(qk_norm, "qk_norm")
            names = ("dtype", "param_dtype", "implementation", "rngs")
            of_norms: Any = {name: shared[name] for name in names}
            self.query_ln, self.key_ln = (make_norm(heads_norm, self.heads.head_dim, **of_norms) for _ in range(2))
        self.out = LinearGeneral(
            of_query,
            in_features if out_features is None else out_features,
            axis=(-2, -1),
            kernel_init=out_kernel_init or without_metadata(kernel_init),
            bias_init=out_bias_init or without_metadata(bias_init),
            kernel_metadata=split_over(tensor_axis, tensor_axis, None, None),
            **shared,
        )
        self.dropout: nnx.Dropout | None = nnx.Dropout(dropout_rate, rngs=rngs) if dropout_rate else nnx.data(None)
        self.cached_key: nnx.Cache | None = nnx.data(None)
        self.cached_value: nnx.Cache | None = nnx.data(None)
        self.cache_index: nnx.Cache | None = nnx.data(None)

    def __call__(
        self,
        x: jax.typing.ArrayLike | QuantizedArray,
        *,
        segment_ids: Array | None = None,
        max_segments_per_seq: int | None = None,
        key_lengths: Array | None = None,
        positions: Array | None = None,
        decode: bool | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        out_sharding: linear.OutSharding = None,
    ) -> Array:
        """Applies the layer.

        Args:
          x: [batch, time, in_features], or a QuantizedArray of it from a norm that writes FP8.
          segment_ids: integers [batch, time] of packed sequences: a token sees only tokens with its own number.
          max_segments_per_seq: how many there are in a sequence at most, each a run of equal numbers, as in
            `te_jax.ops.attention`: cuDNN then computes them alone. None takes any, by a mask.
          key_lengths: integers [batch]: tokens from there on are padding, which no token sees.
          positions: integers [time] or [batch, time]; None counts from 0, or from the tokens in the cache. Packed
            sequences need no positions of their own, since rotary attention depends only on differences.
          decode: None takes the attribute. If true, x holds the next tokens of each sequence, one or more.
          deterministic, rngs: as in `flax.nnx.Dropout`.
          out_sharding: of the result, on Explicit meshes.

        Returns:
          [batch, time, out_features]; NaN where the cache is too short for the tokens.

        Raises:
          ValueError: for shapes or dtypes that do not fit, naming the argument, and for a cache that is missing.
        """
        decode = self.decode if decode is None else decode
        if decode:
            tensor_parallel.refuse_decoding(self.tensor_axis)
        tensor_parallel.validate_sizes(self.tensor_axis, num_heads=self.heads.query)
        tensor = TensorAxis.of(self.tensor_axis)
        x = attention.as_input(x, self.in_features)
        query, key, value = attention.project(
            x,
            (self.query.held(), self.key.held(), self.value.held()),
            self.heads,
            dtype=self.dtype,
            options=self.query.options,
            tensor=tensor,
        )
        if self.query_ln is not None and self.key_ln is not None:
            query, key = self.query_ln(query), self.key_ln(key)
        cache = self._cache() if decode else None
        mixed, cache = attention.attend(
            query,
            key,
            value,
            self.settings,
            segment_ids=segment_ids,
            max_segments_per_seq=max_segments_per_seq,
            key_lengths=key_lengths,
            positions=positions,
            cache=None if cache is None else attention.Cache(*(variable.get_value() for variable in cache)),
        )
        if cache is not None:
            for variable, new in zip(self._cache(), cache, strict=True):
                variable.set_value(new)
        y = self.out(mixed, out_sharding) if tensor is None else self._scattered(mixed, tensor, out_sharding)
        return apply_dropout(self.dropout, y, tensor, deterministic, rngs)

    def _scattered(self, mixed: Array, tensor: TensorAxis, out_sharding: linear.OutSharding) -> Array:
        features = linear.as_tuple(self.out.out_features)
        options: Any = {"dtype": self.dtype, "options": self.out.options, "tensor": tensor}
        y = linear.scattered_linear(mixed, self.out.held(), axis=(2, 3), features=features, **options)
        return y if out_sharding is None else jax.reshard(y, out_sharding)

    def init_cache(self, batch: int, length: int, dtype: jax.typing.DTypeLike | None = None) -> None:
        """Makes an empty cache for decoding, in variables of type `nnx.Cache`.

        Args:
          batch: number of sequences.
          length: the largest number of tokens of each.
          dtype: None is the dtype of the computation, or that of the parameters.
        """
        dtype = dtype or self.dtype or self.param_dtype
        self.cached_key, self.cached_value, self.cache_index = map(
            nnx.Cache, attention.Cache.empty(batch, length, self.heads, dtype)
        )

    def _cache(self) -> tuple[nnx.Cache, nnx.Cache, nnx.Cache]:
        if self.cached_key is None or self.cached_value is None or self.cache_index is None:
            raise ValueError("decode is True, and there is no cache: call init_cache(batch, length) first")
        return self.cached_key, self.cached_value, self.cache_index
