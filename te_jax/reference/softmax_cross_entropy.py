"""Softmax cross-entropy in plain jax.numpy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def softmax_cross_entropy(
    logits: Array,
    labels: Array,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    logit_softcap: float | None = None,
    reduction: str = "mean",
    axis_name: tuple[str, ...] = (),
    return_lse: bool = False,
) -> Any:
    """Definition of `te_jax.ops.softmax_cross_entropy`; see there for the arguments. With return_lse also lse.

    Computes in float32, or in float64 for float64 logits, so that the tests have an oracle.
    """
    z = logits.astype(jnp.float64 if logits.dtype == jnp.float64 else jnp.float32)
    # Before any arithmetic, so that a NaN in an ignored row does not reach its gradient as 0 · NaN.
    ignored = equals(labels, ignore_index)
    z = jnp.where(ignored[..., None], 0.0, z)
    unit = 1.0 if logit_softcap is None else logit_softcap  # of z
    if logit_softcap is not None:
        z = jnp.tanh(z / logit_softcap)

    local_vocab = z.shape[-1]
    vocab = local_vocab * lax.axis_size(axis_name) if axis_name else local_vocab
    offset = lax.axis_index(axis_name) * local_vocab if axis_name else 0

    def over_shards(reduce, x):
        return reduce(x, axis_name) if axis_name else x

    # The maximum only steadies the exponentials: no gradient flows through it.
    peak = over_shards(lax.pmax, lax.stop_gradient(jnp.max(z, axis=-1)))
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)
    # Differences are multiplied by the cap. If z were, XLA could fuse the product with the subtraction, and half a
    # digit of z would be left as the exponent: for large caps a large number.
    mass = over_shards(lax.psum, jnp.sum(jnp.exp(unit * (z - peak[..., None])), axis=-1))
    lse = unit * peak + jnp.log(mass)

    valid = in_vocabulary(labels, vocab)
    column = jnp.where(valid, labels, 0).astype(jnp.int32) - offset
    hit = lax.broadcasted_iota(jnp.int32, z.shape, z.ndim - 1) == column[..., None]
    target = unit * over_shards(lax.psum, jnp.sum(jnp.where(hit, z, 0.0), axis=-1))

    loss = lse - (1.0 - label_smoothing) * target
    if label_smoothing:
        loss = loss - label_smoothing / vocab * unit * over_shards(lax.psum, jnp.sum(z, axis=-1))
    if z_loss:
        loss = loss + z_loss * lse * lse  # in this order it overflows only where the result does
    # A product rather than a choice: it makes the row's gradient NaN as well.
    loss = jnp.where(ignored, 0.0, loss * nan_unless(valid | ignored).astype(loss.dtype))
    loss = reduce_tokens(loss, ignored, reduction)
    return (loss, jnp.where(ignored, 0.0, lse)) if return_lse else loss


def row_statistics(
    logits: Array, codes: Array, *, with_total: bool, softcap: float, padding: int
) -> tuple[Array, Array, Array]:
    """Definition of te_softmax_cross_entropy_statistics: (lse, z[code], Σz) of each row, float32 [*batch].

    Args:
      logits: [*batch, vocab + padding].
      codes: int32 [*batch]: columns; -1 for rows that are not read, whose statistics are 0; others for no column.
      with_total: whether Σz is asked for; it is 0 otherwise.
      softcap: of the logits; 0 for none.
      padding: the number of last columns that do not count.
    """
    read = codes != -1
    z = _capped(logits, read, softcap, padding)
    here = (codes >= 0) & (codes < z.shape[-1])
    target = jnp.take_along_axis(z, jnp.where(here, codes, 0)[..., None], axis=-1)[..., 0]
    total = jnp.sum(z, axis=-1) if with_total else jnp.zeros(codes.shape, jnp.float32)
    lse = jax.nn.logsumexp(z, axis=-1)
    return jnp.where(read, lse, 0.0), jnp.where(here, target, 0.0), jnp.where(read, total, 0.0)


def logits_gradient(
    logits: Array,
    codes: Array,
    lse: Array,
    weight: Array,
    *,
    label_smoothing: float,
    uniform: float,
    z_loss: float,
    softcap: float,
    padding: int,
) -> Array:
    """Definition of te_softmax_cross_entropy_gradient: the gradient of Σ weight · loss, in the dtype of the logits.

    Args:
      logits, codes, softcap, padding: as in `row_statistics`.
      lse, weight: float32 [*batch].
      label_smoothing, z_loss: of the loss.
      uniform: label_smoothing / vocab.
    """
    read = codes != -1
    z = _capped(logits, read, softcap, padding)
    hit = lax.broadcasted_iota(jnp.int32, z.shape, z.ndim - 1) == codes[..., None]
    dz = jnp.exp(z - lse[..., None]) * (1.0 + 2.0 * z_loss * lse)[..., None] - uniform
    dz = weight[..., None] * (dz - jnp.where(hit, 1.0 - label_smoothing, 0.0))
    if softcap:
        dz *= 1.0 - (z / softcap) ** 2
    dz = jnp.where(read[..., None], dz, 0.0)
    return jnp.pad(dz, [(0, 0)] * (z.ndim - 1) + [(0, padding)]).astype(logits.dtype)


def _capped(logits: Array, read: Array, softcap: float, padding: int) -> Array:
    """Float32 [*batch, vocab]."""
    z = logits[..., : logits.shape[-1] - padding].astype(jnp.float32)
    z = jnp.where(read[..., None], z, 0.0)
    return softcap * jnp.tanh(z / softcap) if softcap else z


def equals(labels: Array, value: int) -> Array:
    """labels == value, also where their dtype cannot hold the value."""
    limits = jnp.iinfo(labels.dtype)
    if not limits.min <= value <= limits.max:
        return jnp.zeros_like(labels, dtype=bool)
    return labels == jnp.asarray(value, labels.dtype)


def in_vocabulary(labels: Array, vocab: int) -> Array:
    """0 <= labels < vocab, also where their dtype cannot hold vocab."""
    last = jnp.asarray(min(vocab - 1, jnp.iinfo(labels.dtype).max), labels.dtype)
    return (labels >= 0) & (labels <= last)


def nan_unless(condition: Array) -> Array:
    """float32: 1 where the condition holds, else NaN.

    Made from bits, because without jit jax_debug_nans would stop at a constant NaN, used or not.
    """
    bits = jnp.where(condition, 0x3F800000, 0x7FC00000).astype(jnp.int32)
    return lax.bitcast_convert_type(bits, jnp.float32)


def reduce_tokens(loss: Array, ignored: Array, reduction: str) -> Array:
    """The sum or the mean over tokens that are not ignored, or the losses themselves."""
    if reduction == "none":
        return loss
    total = jnp.sum(loss)
    if reduction == "sum":
        return total
    counted = jnp.sum(~ignored, dtype=jnp.int32)
    return total / jnp.maximum(counted, 1).astype(loss.dtype)
