"""Layers of transformers written another way: rotary positions as complex numbers, one mask for all pairs of tokens."""

import jax
import jax.numpy as jnp
import numpy as np

from te_jax.layers import Norm


def rotated(x, positions, theta):
    """x [batch, time, heads, head_dim] whose pairs (i, i + head_dim / 2) are turned by positions [batch, time]."""
    half = x.shape[-1] // 2
    angles = np.asarray(positions)[:, :, None, None] * theta ** -(np.arange(half) / half)
    turned = jax.lax.complex(x[..., :half], x[..., half:]) * jax.device_put(
        np.asarray(np.exp(1j * angles), jnp.complex64)
    )
    return jnp.concatenate([turned.real, turned.imag], axis=-1)


def visible(batch, time, *, causal=True, window=None, segments=None, lengths=None):
    """bool [batch, time, time]: which token sees which."""
    mask = np.ones((batch, time, time), bool)
    for b, t, s in np.ndindex(mask.shape):
        mask[b, t, s] = (
            (not causal or s <= t)
            and (window is None or t - s < window)
            and (segments is None or segments[b, t] == segments[b, s])
            and (lengths is None or s < lengths[b])
        )
    return mask


def attention_layer(params, x, mask, *, theta=None, positions=None, norm=lambda name, heads: heads):
    """The layer of kernels {"query": {"kernel"}, …} on x [batch, time, in]; `norm` is applied to query and key."""
    query, key, value = (jnp.einsum("bti,inh->btnh", x, params[name]["kernel"]) for name in ("query", "key", "value"))
    query, key = norm("query_ln", query), norm("key_ln", key)
    if theta is not None:
        positions = np.broadcast_to(np.arange(x.shape[1]), x.shape[:2]) if positions is None else positions
        query, key = rotated(query, positions, theta), rotated(key, positions, theta)
    group = query.shape[2] // key.shape[2]
    key, value = jnp.repeat(key, group, axis=2), jnp.repeat(value, group, axis=2)
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(jnp.asarray(mask)[:, None], scores, -1e30), axis=-1)
    return jnp.einsum("bnts,bsnh,nho->bto", weights, value, params["out"]["kernel"])


def normalized(x, params, norm):
    """RMS norm, or layer norm where there is a bias."""
    if "bias" in params:
        x = x - x.mean(axis=-1, keepdims=True)
    y = x / jnp.sqrt((x * x).mean(axis=-1, keepdims=True) + norm.epsilon)
    y = jnp.einsum("...i,i->...i", y, params["scale"] + (1.0 if norm.zero_centered else 0.0))
    return y + params["bias"].reshape((1,) * (y.ndim - 1) + (-1,)) if "bias" in params else y


def transformer_block(params, x, *, theta, activation="silu", window=None, norm="rms", qk_norm=None):
    """The block of `te_jax.nnx.TransformerBlock` with these parameters."""
    norm = Norm.of(norm)
    assert ("bias" in params["attention_norm"]) == (norm.kind == "layer")

    def norm_of(name, x):
        return normalized(x, params[name], norm)

    heads = params["attention"]

    def of_heads(name, x):
        return x if qk_norm is None else normalized(x, heads[name], Norm.of(qk_norm))

    mask = visible(*x.shape[:2], window=window)
    x = x + attention_layer(heads, norm_of("attention_norm", x), mask, theta=theta, norm=of_heads)
    h = norm_of("mlp_norm", x)
    gate, up, down = (params["mlp"][name]["kernel"] for name in ("gate_proj", "up_proj", "down_proj"))
    activation = {"silu": jax.nn.silu, "gelu": jax.nn.gelu}[activation]
    return x + (activation(h @ gate) * (h @ up)) @ down
