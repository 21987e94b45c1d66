"""Softmax cross-entropy in plain jax.numpy."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from te_jax._core.arguments import is_finite_number, is_whole_number

_LARGEST = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """Terms of a cross-entropy of a row; hashable, a static argument.

        loss = te_jax.ops.CrossEntropy(label_smoothing=0.1, z_loss=1e-4)

    With z the logits, or c · tanh(logits / c) for a soft cap c, with ε = label_smoothing and V the vocabulary:

        lse  = log Σ_v exp(z_v)
        loss = lse - (1 - ε) z[label] - ε/V Σ_v z_v + z_loss · lse²

    Attributes:
      label_smoothing: ε in [0, 1]: probability that is spread evenly over the whole vocabulary. Σ_v z_v is summed in
        float32: where it exceeds 3.4e38, the loss is not finite.
      ignore_index: rows with this label have loss 0 and gradient 0, and are not read.
      z_loss: weight of lse², at least 0; keeps the logits from drifting.
      logit_softcap: c, from 1e-30 to 1e30, or None for none.

    Raises:
      ValueError: for numbers out of these ranges, or not known while tracing.

    References:
      Label smoothing: arXiv:1512.00567. z-loss: arXiv:2204.02311. Soft cap: arXiv:2408.00118.
    """

    label_smoothing: float = 0.0
    ignore_index: int = -100
    z_loss: float = 0.0
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        if not is_whole_number(self.ignore_index):
            raise ValueError(f"ignore_index is {self.ignore_index!r}; it must be an integer, such as -100")
        object.__setattr__(self, "ignore_index", int(self.ignore_index))
        self._check("label_smoothing", "a number in [0, 1], 0 for none", 0, 1)
        self._check("z_loss", "a finite number of at least 0 that float32 holds, 0 for none", 0, _LARGEST)
        if self.logit_softcap is not None:  # beyond these limits c or logits / c would be subnormal
            self._check("logit_softcap", "a number from 1e-30 to 1e30, or None", 1e-30, 1e30)

    def _check(self, name: str, rule: str, least: float, most: float) -> None:
        value = getattr(self, name)
        if isinstance(value, Tracer):
            raise ValueError(f"{name} is traced; it must be {rule}, known while tracing: make it a static argument")
        if not is_finite_number(value) or not least <= float(value) <= most:
            raise ValueError(f"{name} is {value!r}; it must be {rule}")
        object.__setattr__(self, name, float(value))


def softmax_cross_entropy(
    logits: Array,
    labels: Array,
    loss: CrossEntropy = CrossEntropy(),
    *,
    reduction: str = "mean",
    vocab_axis: tuple[str, ...] = (),
    return_lse: bool = False,
) -> Any:
    """Definition of `te_jax.ops.softmax_cross_entropy`; see there for the arguments. With return_lse also lse.

    Computes in float32, or in float64 for float64 logits, so that the tests have an oracle.
    """
    z = logits.astype(jnp.float64 if logits.dtype == jnp.float64 else jnp.float32)
    # Before any arithmetic, so that a NaN in an ignored row does not reach its gradient as 0 · NaN.
    ignored = equals(labels, loss.ignore_index)
    z = jnp.where(ignored[..., None], 0.0, z)
    unit = 1.0 if loss.logit_softcap is None else loss.logit_softcap  # of z
    if loss.logit_softcap is not None:
        z = jnp.tanh(z / loss.logit_softcap)

    local_vocab = z.shape[-1]
    vocab = local_vocab * lax.axis_size(vocab_axis) if vocab_axis else local_vocab
    offset = lax.axis_index(vocab_axis) * local_vocab if vocab_axis else 0

    def over_shards(reduce, x):
        return reduce(x, vocab_axis) if vocab_axis else x

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

    value = lse - (1.0 - loss.label_smoothing) * target
    if loss.label_smoothing:
        value = value - loss.label_smoothing / vocab * unit * over_shards(lax.psum, jnp.sum(z, axis=-1))
    if loss.z_loss:
        value = value + loss.z_loss * lse * lse  # in this order it overflows only where the result does
    # A product rather than a choice: it makes the row's gradient NaN as well.
    value = jnp.where(ignored, 0.0, value * nan_unless(valid | ignored).astype(value.dtype))
    value = reduce_tokens(value, ignored, reduction)
    return (value, jnp.where(ignored, 0.0, lse)) if return_lse else value


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
