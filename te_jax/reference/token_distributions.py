"""Distributions over a vocabulary in plain jax.numpy: log-probabilities, entropies and distances."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer

from te_jax._core.arguments import is_finite_number
from te_jax.reference.softmax_cross_entropy import CrossEntropy, equals, softmax_cross_entropy


@dataclasses.dataclass(frozen=True)
class Softmax:
    """How logits become probabilities: softmax(cap(logits) / temperature); hashable, a static argument.

        softmax = te_jax.ops.Softmax(temperature=0.7)

    Attributes:
      temperature: a finite number above 0.
      ignore_index: tokens of this number do not count, where there are tokens: what follows from them, and their
        gradients, are 0, and their hidden states are not read.
      logit_softcap: c of logits that are c · tanh(logits / c) before the temperature, or None.

    Raises:
      ValueError: for numbers out of these ranges, or not known while tracing.
    """

    temperature: float = 1.0
    ignore_index: int = -100
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.temperature, Tracer) or not is_finite_number(self.temperature) or self.temperature <= 0:
            raise ValueError(
                f"temperature is {self.temperature!r}; it must be a finite number above 0, known while tracing"
            )
        object.__setattr__(self, "temperature", float(self.temperature))
        CrossEntropy(ignore_index=self.ignore_index, logit_softcap=self.logit_softcap)  # raises for both


def log_probs(
    logits: Array, tokens: Array, softmax: Softmax = Softmax(), *, vocab_axis: tuple[str, ...] = ()
) -> tuple[Array, Array]:
    """Definition of `te_jax.ops.linear_log_probs` from all logits: log-probabilities and entropies."""
    z = _scaled(logits, softmax)
    ignored = equals(tokens, softmax.ignore_index)
    loss = CrossEntropy(ignore_index=softmax.ignore_index)
    loss, lse = softmax_cross_entropy(z, tokens, loss, reduction="none", vocab_axis=vocab_axis, return_lse=True)
    log_p = jnp.where(ignored[..., None], 0.0, z - lse[..., None])
    entropy = -_expectation(log_p, log_p, vocab_axis)
    return -loss, jnp.where(ignored, 0.0, entropy + 0.0 * loss)  # NaN where the token is outside the vocabulary


def divergence(
    logits: Array,
    other: Array,
    ignored: Array,
    *,
    kind: str,
    beta: float = 0.5,
    softmax: Softmax = Softmax(),
    vocab_axis: tuple[str, ...] = (),
) -> Array:
    """Definition of `te_jax.ops.linear_divergence` from all logits of both heads, for each token."""
    log_p, log_q = (
        _log_softmax(jnp.where(ignored[..., None], 0.0, _scaled(each, softmax)), vocab_axis)
        for each in (logits, lax.stop_gradient(other))
    )
    if kind == "forward":
        value = _expectation(log_q, log_q - log_p, vocab_axis)
    elif kind == "reverse":
        value = _expectation(log_p, log_p - log_q, vocab_axis)
    else:
        log_m = jnp.logaddexp(log_q + jnp.log(beta), log_p + jnp.log1p(-beta))
        value = beta * _expectation(log_q, log_q - log_m, vocab_axis)
        value += (1.0 - beta) * _expectation(log_p, log_p - log_m, vocab_axis)
    return jnp.where(ignored, 0.0, value)


def _scaled(logits: Array, softmax: Softmax) -> Array:
    z, cap = logits.astype(jnp.float64 if logits.dtype == jnp.float64 else jnp.float32), softmax.logit_softcap
    return (z if cap is None else cap * jnp.tanh(z / cap)) / softmax.temperature


def _log_softmax(z: Array, vocab_axis: tuple[str, ...]) -> Array:
    if not vocab_axis:
        return jax.nn.log_softmax(z, axis=-1)
    shifted = z - lax.pmax(lax.stop_gradient(jnp.max(z, axis=-1, keepdims=True)), vocab_axis)
    return shifted - jnp.log(lax.psum(jnp.sum(jnp.exp(shifted), axis=-1, keepdims=True), vocab_axis))


def _expectation(log_p: Array, of: Array, vocab_axis: tuple[str, ...]) -> Array:
    """Σ p · of, where terms of p = 0 are 0."""
    p = jnp.exp(log_p)
    total = jnp.sum(jnp.where(p == 0.0, 0.0, p * jnp.where(p == 0.0, 0.0, of)), axis=-1)
    return lax.psum(total, vocab_axis) if vocab_axis else total
