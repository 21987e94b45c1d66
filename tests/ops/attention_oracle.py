"""Attention written another way: one probability for each pair of positions, and a column for the sink."""

import jax
import jax.numpy as jnp
import numpy as np

FAR = -1e30  # hides a score, with a gradient of exactly 0


def visible(batch, queries, keys, *, causal=False, window=None, q_lengths=None, k_lengths=None, segments=None):
    """bool [batch, queries, keys], pair by pair; all arguments are NumPy's or Python's."""
    mask = np.ones((batch, queries, keys), bool)
    for b, t, s in np.ndindex(mask.shape):
        mask[b, t, s] = (
            (not causal or s <= t)
            and (window is None or t - s < window)
            and (q_lengths is None or t < q_lengths[b])
            and (k_lengths is None or s < k_lengths[b])
            and (segments is None or segments[0][b, t] == segments[1][b, s])
        )
    return mask


def random_runs(rng, length, count):
    """The numbers of `count` segments of a sequence, [length], whose lengths are of all magnitudes."""
    weights = 1 / np.arange(1, length)
    begins = rng.choice(np.arange(1, length), count - 1, replace=False, p=weights / weights.sum())
    lengths = rng.permutation(np.diff(np.sort(begins), prepend=0, append=length))
    return np.repeat(np.arange(count), lengths)


def attention(query, key, value, mask, *, bias=None, sinks=None, scale=None, softcap=None):
    """(output [B, T, N, H], log-sum-exp [B, T, N]) in the dtype of query, of operands as in `te_jax.ops.attention`."""
    heads, group = query.shape[2], query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if bias is not None:
        scores = scores + jnp.broadcast_to(bias, scores.shape)
    mask = jnp.broadcast_to(jnp.asarray(mask)[:, None], scores.shape)
    scores = jnp.where(mask, scores, FAR)
    column = jnp.full((*scores.shape[:-1], 1), FAR, scores.dtype)
    if sinks is not None:
        column = jnp.broadcast_to(sinks.reshape(1, heads, 1, 1), column.shape)
    weights = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]
    lse = jax.nn.logsumexp(jnp.concatenate([scores, column], axis=-1), axis=-1)
    out = jnp.einsum("bnts,bsnh->btnh", jnp.where(mask, weights, 0.0), value)
    lse = jnp.where(lse < FAR / 2, -jnp.inf, lse)
    return out, jnp.swapaxes(lse, 1, 2)
