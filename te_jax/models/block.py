"""A block of the decoder: `te_jax.layers` with its parameters, called by their names in `te_jax.models.init`."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from te_jax import native, ops
from te_jax._core.types import PyTree
from te_jax.layers import linear, mixture, norm, transformer_block
from te_jax.layers.attention import rotary_tables, rotate, split_heads
from te_jax.layers.gated_mlp import gated_mlp
from te_jax.layers.tensor_parallel import TensorAxis
from te_jax.models.config import LATENT, MLP, DecoderConfig, Latent, Rope
from te_jax.models.parallel import TensorParallel
from te_jax.models.tensor_parallel import scaled
from te_jax.quantized import Quantizable, QuantizedArray
from te_jax.recipe import DelayedScalingState
from te_jax.reference.activation import Activation

_QKV = ("query", "key", "value")


class Balance(NamedTuple):
    """The auxiliary loss and the largest load of the experts of the blocks so far: float32 scalars."""

    auxiliary: jax.Array
    largest_load: jax.Array


@dataclasses.dataclass(frozen=True)
class Block:
    """The parameters of a block, and how it computes with them.

    Where devices share the block, the residual stream is this device's part of the time, and all else its heads and
    columns of the MLP.
    """

    params: PyTree  # arrays, QuantizedArrays, or what stands for these in `te_jax.layers.accumulate_gradients`
    scaling_state: dict[str, DelayedScalingState] | None
    config: DecoderConfig
    parallel: TensorParallel | None
    implementation: native.Implementation | None
    reads_latents: bool = False  # whether keys and values are those of a cache of latents

    def __call__(
        self, x: Array, rotary: tuple[Array, Array] | None, attend: Callable[..., Array]
    ) -> tuple[Array, Balance | None]:
        """The residual stream after the block, and the balance of its experts.

        Args:
          x: the residual stream before it.
          rotary: cos and sin, of `te_jax.layers.attention.rotary_tables`; None for no rotary positions.
          attend: attention of query, key and value [batch, time, heads, head_dim], with the scores of sinks [heads].
            It scales scores as `DecoderConfig.factors` says. With latent attention a fifth argument are the latents
            [batch, time, 1, rank + rope_dim] of the tokens. With `reads_latents` these are the key, whose first
            features are the value.
        """
        config, balance = self.config, None

        def attention(x: Quantizable) -> Array:
            if config.latent is not None:
                mixed = self._latent_attention(x, config.latent, rotary, attend)
                return self._branch("attention", self._to_stream(mixed.reshape(*mixed.shape[:2], -1), "out"))
            query, key, value = self._heads(x)
            if config.qk_norm:
                query, key = self._normalized("query_norm", query), self._normalized("key_norm", key)
            if rotary is not None:
                query, key = rotate(query, *rotary), rotate(key, *rotary)
            mixed = attend(query, key, value, self.params.get("sinks"))
            return self._branch("attention", self._to_stream(mixed.reshape(*mixed.shape[:2], -1), "out"))

        def mlp(x: Any) -> Array:
            nonlocal balance
            y, balance = (self._dense_mlp(x), None) if config.experts is None else self._mixture(x)
            return self._branch("mlp", y)

        # Adapters and routers read values.
        recipes = transformer_block.Recipes(
            None if self._is_adapted(*_QKV, *LATENT) else config.recipe,
            None if self._is_adapted(*MLP[:2]) or config.experts is not None else config.recipe,
        )
        of_attention = of_mlp = None
        if config.norms != "after":
            of_attention, of_mlp = self._norm("attention_norm"), self._norm("mlp_norm")
        x = transformer_block.apply(x, of_attention, attention, of_mlp, mlp, recipes, self._tensor)
        return x, balance

    @property
    def _tensor(self) -> TensorAxis | None:
        return None if self.parallel is None or self.parallel.size == 1 else self.parallel.tensor

    @property
    def _arithmetic(self) -> dict[str, Any]:
        options = linear.Options(self.config.recipe, None, self.implementation)
        return {"dtype": self.config.dtype, "options": options, "tensor": self._tensor}

    def _norm(self, name: str) -> Callable[..., Any]:
        return rms_norm(self.params[name], self.config, self.implementation)

    def _normalized(self, name: str, x: Array) -> Array:
        """Query or key [batch, time, heads, head_dim], normalized."""
        if self.config.qk_norm == "projection":
            return self._norm(name)(x.reshape(*x.shape[:2], -1), None).reshape(x.shape)
        return self._norm(name)(x, None)

    def _branch(self, name: str, y: Array) -> Array:
        """What attention or MLP add to the residual stream, from their result."""
        y = y if self.config.norms == "before" else self._norm(f"{name}_post_norm")(y, None)
        return scaled(y, self.config.factors.residual)

    def _layer(self, name: str) -> linear.Layer:
        state = None if self.scaling_state is None else self.scaling_state[name]
        return linear.Layer(self.params[name], self.params.get(f"{name}_bias"), state)

    def _heads(self, x: Quantizable) -> tuple[Array, ...]:
        """Query, key and value [batch, time, heads, head_dim]."""
        layers, heads = (self._layer("query"), self._layer("key"), self._layer("value")), self.config.heads
        if self._tensor is not None:
            layers, heads = split_heads(layers, heads, self._tensor)
        ys = self._from_stream(x, dict(zip(_QKV, layers, strict=True)), [math.prod(sizes) for sizes in heads.features])
        return tuple(y.reshape(*y.shape[:2], -1, heads.head_dim) for y in ys)

    def _latent_attention(
        self,
        x: Quantizable,
        latent: Latent,
        rotary: tuple[Array, Array] | None,
        attend: Callable[..., Array],
    ) -> Array:
        """The values [batch, time, H, value_dim] that queries read: see `te_jax.models.Latent`."""
        config, rank = self.config, latent.rank
        unrotated = config.head_dim - latent.rope_dim
        of_query, of_key_value = self._products(
            x, "query" if latent.query_rank is None else "query_down", "key_value_down"
        )
        if latent.query_rank is not None:
            (of_query,) = self._products(self._latent_norm("query_down_norm", of_query), "query_up")
        query, query_rope = jnp.split(
            of_query.reshape(*of_query.shape[:2], config.num_heads, -1), (unrotated,), axis=-1
        )
        latents = self._latent_norm("key_value_norm", of_key_value[..., :rank])
        key_rope = of_key_value[:, :, None, rank:]
        if rotary is not None:
            query_rope, key_rope = (rotate(_paired(part), *rotary) for part in (query_rope, key_rope))
        cached = jnp.concatenate([latents[:, :, None], key_rope], axis=-1)
        if self.reads_latents:
            # query · (c · kernel) is (query · kernel) · c: no key and no value is made of what is in the cache.
            of_keys, of_values = jnp.split(self._key_value_kernel(latent, query.dtype), (unrotated,), axis=-1)
            query = jnp.einsum("bthn,rhn->bthr", query, of_keys, preferred_element_type=jnp.float32)
            query = jnp.concatenate([query.astype(query_rope.dtype), query_rope], axis=-1)
            mixed = attend(query, cached, cached[..., :0], None)
            values = jnp.einsum("bthr,rhv->bthv", mixed, of_values, preferred_element_type=jnp.float32)
            return values.astype(mixed.dtype)
        (both,) = self._products(latents, "key_value_up")
        key, value = jnp.split(both.reshape(*both.shape[:2], config.num_heads, -1), (unrotated,), axis=-1)
        key = jnp.concatenate([key, jnp.broadcast_to(key_rope, (*key.shape[:-1], latent.rope_dim))], axis=-1)
        return attend(jnp.concatenate([query, query_rope], axis=-1), key, value, None, cached)

    def _products(self, x: Quantizable, *names: str) -> tuple[Array, ...]:
        """x [batch, time, in] times kernels [in, out], by their names."""
        shapes = self.config.kernel_shapes
        return self._from_stream(x, {name: self._layer(name) for name in names}, [shapes[name][1] for name in names])

    def _latent_norm(self, name: str, x: Array) -> Array:
        assert self.config.latent is not None
        return rms_norm(self.params[name], self.config, self.implementation, self.config.latent.norm_eps)(x, None)

    def _key_value_kernel(self, latent: Latent, dtype: jax.typing.DTypeLike) -> Array:
        """key_value_up with its adapter, [rank, H, features]."""
        kernel, name = self.params["key_value_up"], "key_value_up"
        kernel = (kernel.dequantize() if isinstance(kernel, QuantizedArray) else kernel).astype(dtype)
        if self._is_adapted(name):
            assert self.config.lora is not None
            a, b = (self.params[f"{name}_{part}"].astype(dtype) for part in "ab")
            kernel += ops.dense(a, b * jnp.asarray(self.config.lora.scale, dtype))
        return kernel.reshape(latent.rank, self.config.num_heads, -1)

    def _from_stream(self, x: Quantizable, layers: dict[str, linear.Layer], features: Sequence[int]):
        """A norm's result [batch, time, D] times kernels: [batch, time, features] for each, by name."""
        products = [layer._replace(bias=None) for layer in layers.values()]
        ys = linear.linears(x, products, features=[(count,) for count in features], **self._arithmetic)
        return tuple(self._added(y, x, *layer) for y, layer in zip(ys, layers.items(), strict=True))

    def _to_stream(self, x: Array, name: str) -> Array:
        """[batch, time, N] times a kernel [N, D]: what is added to the residual stream."""
        layer, features = self._layer(name), (self.config.hidden_size,)
        y = linear.scattered_linear(x, layer._replace(bias=None), axis=(2,), features=features, **self._arithmetic)
        return self._added(y, x, name, layer)

    def _added(self, y: Array, x: Quantizable, name: str, layer: linear.Layer) -> Array:
        """y = x · kernel, and what the adapter of the kernel and the bias add."""
        if self._is_adapted(name):
            assert self.config.lora is not None
            a, b = (self.params[f"{name}_{part}"].astype(x.dtype) for part in "ab")
            y = y + ops.dense(ops.dense(x, a), b * jnp.asarray(self.config.lora.scale, b.dtype))
        # Beside the products, since XLA adds it where it rotates, normalizes or adds the stream.
        return y if layer.bias is None else y + jnp.expand_dims(layer.bias.astype(y.dtype), (0, 1))

    def _is_adapted(self, *names: str) -> bool:
        return self.config.lora is not None and not set(names).isdisjoint(self.config.lora.names)

    def _dense_mlp(self, x: Quantizable) -> Array:
        activation = Activation.of(self.config.activation)
        gate, up, down = (self._layer(name) for name in MLP)
        if not self._is_adapted(*MLP):
            return gated_mlp(x, gate, up, down, activation, **self._arithmetic)
        of_gate, of_up = self._from_stream(x, {"gate": gate, "up": up}, [self.config.mlp_size] * 2)
        return self._to_stream(ops.gated_activation(of_gate, of_up, activation), "down")

    def _mixture(self, x: Array) -> tuple[Array, Balance]:
        """The experts' result for tokens x [batch, time, D], and how all tokens share the experts."""
        config, parallel, experts = self.config, self.parallel, self.config.experts
        assert experts is not None
        token_axes = expert_axes = None
        if parallel is not None:
            token_axes = (*parallel.batch_axes, parallel.axis_name)
            whole = parallel.size == 1 and parallel.expert_axes == (parallel.axis_name,)
            expert_axes = None if whole else parallel.expert_axes or None
        gate, up, down = (self._layer(name) for name in MLP)
        result = mixture.moe_of_layers(
            x,
            self._layer("router"),
            (gate, up, down),
            experts.router,
            expert_bias=self.params.get("expert_bias"),
            dtype=config.dtype,
            options=mixture.Options(
                Activation.of(config.activation),
                mixture.ExpertParallel.of(expert_axes),
                config.recipe,
                self.implementation,
            ),
        )
        chosen = result.routing.experts
        auxiliary = jnp.zeros((), jnp.float32)
        if experts.balance_weight:
            balance = ops.load_balancing_loss(result.logits, chosen, score=experts.router.score, token_axis=token_axes)
            auxiliary += experts.balance_weight * balance
        if experts.z_weight:
            auxiliary += experts.z_weight * ops.router_z_loss(result.logits, token_axis=token_axes)
        counts = ops.expert_counts(chosen, experts.num_experts, token_axis=token_axes).astype(jnp.float32)
        y = result.y
        if experts.shared or experts.weighted_shared:
            gate, up, down = (self._layer(f"shared_{name}") for name in MLP)
            of_shared = gated_mlp(x, gate, up, down, Activation.of(config.activation), **self._arithmetic)
            y += mixture.weighted_shared(of_shared, x, self.params.get("shared_router"))
        return y, Balance(auxiliary, jnp.max(counts) / jnp.mean(counts))


def _paired(x: Array) -> Array:
    """Features (2i, 2i + 1) of x [..., features] in the places (i, i + features / 2), which `rotate` turns."""
    return jnp.swapaxes(x.reshape(*x.shape[:-1], -1, 2), -1, -2).reshape(x.shape)


def capped(logits: Array, config: DecoderConfig) -> Array:
    """Logits with their cap, if they have one."""
    if (cap := config.softcaps.logits) is None:
        return logits
    return (cap * jnp.tanh(logits.astype(jnp.float32) / cap)).astype(logits.dtype)


def rotary_of(positions: Array, config: DecoderConfig) -> dict[Rope | None, tuple[Array, Array] | None]:
    """cos and sin for the blocks that have such rotary positions."""
    width = config.head_dim if config.latent is None else config.latent.rope_dim
    return {
        rope: None if rope is None else rotary_tables(positions, width, *rope) for rope in dict.fromkeys(config.ropes)
    }


def final_norm(scale: Array, config: DecoderConfig, implementation: native.Implementation | None) -> Callable[..., Any]:
    """The norm before the output head. Its scale divides the logits, wherever they are computed."""
    if (divisor := config.factors.logits_divisor) != 1:
        centre = 1.0 if config.zero_centered_norms else 0.0
        scale = (scale.astype(jnp.float32) + centre) / divisor - centre
    return rms_norm(scale, config, implementation)


def rms_norm(
    scale: Array, config: DecoderConfig, implementation: native.Implementation | None, eps: float | None = None
) -> Callable[..., Any]:
    """A norm of the decoder, of (x, residual or None): see `te_jax.layers.norm.normalize`."""
    options = norm.Options("rms", eps or config.norm_eps, config.zero_centered_norms, implementation)
    return functools.partial(norm.normalize, scale=scale, bias=None, dtype=config.dtype, options=options)
