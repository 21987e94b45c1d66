"""Attention in plain jax.numpy."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from te_jax import sharding


def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    bias: Array | None = None,
    sinks: Array | None = None,
    query_lengths: Array | None = None,
    key_lengths: Array | None = None,
    query_segment_ids: Array | None = None,
    key_segment_ids: Array | None = None,
    causal: bool = False,
    window: int | None = None,
    scale: float,
    softcap: float | None = None,
) -> tuple[Array, Array]:
    """Definition of `te_jax.ops.attention`; see there for the arguments.

    Computes in float32, or in float64 for float64 operands. All operands may have more leading dimensions.

    Returns:
      (output [*batch, T, N, V], log-sum-exp [*batch, N, T]), 0 and -inf for a query that sees no key.
    """
    dtype = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    kv_heads, group = key.shape[-2], query.shape[-2] // key.shape[-2]
    q = _split_heads(query, query.ndim - 2, kv_heads, group)
    scores = jnp.einsum("...tkgh,...skh->...kgts", q, key, preferred_element_type=dtype) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if bias is not None:
        heads = (1, 1) if bias.shape[-3] == 1 else (kv_heads, group)
        scores = scores + _split_heads(bias, bias.ndim - 3, *heads).astype(dtype)
    visible = visible_pairs(
        query.shape[-3],
        key.shape[-3],
        causal=causal,
        window=window,
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        query_segment_ids=query_segment_ids,
        key_segment_ids=key_segment_ids,
    )
    if visible is not None:
        visible = jnp.expand_dims(visible, (*range(scores.ndim - visible.ndim - 2), -3, -4))
        scores = jnp.where(visible, scores, -jnp.inf)

    # The maximum only steadies the exponentials: no gradient flows through it.
    peak = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf))
    if sinks is not None:
        sinks = _split_heads(sinks, sinks.ndim - 1, kv_heads, group).astype(dtype)[..., None, :, :, None, None]
        peak = jnp.maximum(peak, lax.stop_gradient(sinks))
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)
    weights = jnp.exp(scores - peak)
    mass = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        mass = mass + jnp.exp(sinks - peak)
    empty = mass == 0.0
    mass = jnp.where(empty, 1.0, mass)  # before the logarithm, so that no 1 / 0 reaches the gradient
    lse = jnp.where(empty, -jnp.inf, peak + jnp.log(mass))[..., 0]

    probabilities = (weights / mass).astype(value.dtype)
    out = jnp.einsum("...kgts,...skh->...tkgh", probabilities, value, preferred_element_type=dtype)
    return (
        _merge_heads(out, out.ndim - 3).astype(query.dtype),
        _merge_heads(lse, lse.ndim - 3),
    )


def visible_pairs(
    queries: int,
    keys: int,
    *,
    causal: bool = False,
    window: int | None = None,
    query_lengths: Array | None = None,
    key_lengths: Array | None = None,
    query_segment_ids: Array | None = None,
    key_segment_ids: Array | None = None,
) -> Array | None:
    """Which query sees which key: bool [*batch, T, S], without a batch where none is given; None for all."""
    t, s = lax.broadcasted_iota(jnp.int32, (queries, keys), 0), lax.broadcasted_iota(jnp.int32, (queries, keys), 1)
    masks = []
    if causal:
        masks.append(s <= t)
    if window is not None:
        masks.append(s > t - window)
    for place, lengths in ((t, query_lengths), (s, key_lengths)):
        if lengths is not None:
            lead = tuple(range(lengths.ndim))
            masks.append(jnp.expand_dims(place, lead) < lengths[..., None, None])
    if query_segment_ids is not None and key_segment_ids is not None:
        masks.append(query_segment_ids[..., :, None] == key_segment_ids[..., None, :])
    rank = max((mask.ndim for mask in masks), default=0)
    combined = None
    for mask in masks:
        mask = jnp.expand_dims(mask, tuple(range(rank - mask.ndim)))
        combined = mask if combined is None else combined & mask
    return combined


def _split_heads(x: Array, axis: int, kv_heads: int, group: int) -> Array:
    """x with the heads of a dimension as [kv_heads, group]."""
    before = [(size,) for size in x.shape]
    return sharding.regrouped(x, before, [*before[:axis], (kv_heads, group), *before[axis + 1 :]])


def _merge_heads(x: Array, axis: int) -> Array:
    """x with the dimensions [kv_heads, group] as one."""
    sizes = [(size,) for size in x.shape]
    kv_heads, group = x.shape[axis : axis + 2]
    return sharding.regrouped(
        x,
        [*sizes[:axis], (kv_heads, group), *sizes[axis + 2 :]],
        [*sizes[:axis], (kv_heads * group,), *sizes[axis + 2 :]],
    )
