"""Rows of logits as distributions: log-probabilities of tokens, functions of them, and distances from another head.

XLA computes what the kernels of the cross-entropy do not: temperatures, entropies and distances.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from te_jax.ops import _cross_entropy
from te_jax.ops._cross_entropy import IGNORED, Loss, where_counted
from te_jax.ops.head.rows import Chunks, LogitsGradient, Rows
from te_jax.reference.token_distributions import Softmax

Divergence = Literal["forward", "reverse", "jensen_shannon"]


class _Row(NamedTuple):
    """A row as a distribution, float32."""

    z: Array | None  # [tokens, vocab]: logits over the temperature; None where the kernels know them
    lse: Array
    log_prob: Array  # of the token
    entropy: Array  # zeros where it is not asked for


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogProbs(Rows):
    """The log-probability of each token, and the entropy of its row."""

    softmax: Softmax
    entropy: bool

    @property
    def by_kernels(self) -> bool:
        return self.softmax.temperature == 1.0 and not self.entropy

    def values(self, chunks: Chunks, logits: Array, piece: dict[str, Array]) -> list[Array]:
        row = self.of(chunks, logits, piece["codes"])
        return [row.log_prob, row.entropy]

    def differentiated(
        self, chunks: Chunks, logits: Array, piece: dict[str, Array]
    ) -> tuple[list[Array], LogitsGradient]:
        row = self.of(chunks, logits, piece["codes"])
        weights = piece["factor"], piece["of_entropy"]
        return [row.log_prob, row.entropy], self.gradient(chunks, logits, piece["codes"], row, *weights)

    def weighted(self, weights: Sequence[Array], second: Array) -> dict[str, Array]:
        del second
        return {"factor": weights[0], "of_entropy": weights[1]}

    def of(self, chunks: Chunks, logits: Array, codes: Array) -> _Row:
        """The rows of a chunk: zeros where ignored, NaN where the token is outside the vocabulary."""
        if self.by_kernels:
            lse, target, _ = chunks.statistics(logits, codes, self.softmax.logit_softcap or 0.0)
            return _Row(None, lse, where_counted(codes, target - lse), jnp.zeros_like(lse))
        z = _scaled(chunks, logits, codes, self.softmax)
        axes = {"v": chunks.vocab_axes} if chunks.vocab_axes else {}
        lse, target, _ = _cross_entropy.row_statistics(
            z, codes, with_total=False, softcap=0.0, padding=0, use_native=False, axes=axes
        )
        entropy = jnp.zeros_like(lse)
        if self.entropy:
            entropy = where_counted(codes, -_expectation(chunks, z - lse[:, None], z - lse[:, None]))
        return _Row(z, lse, where_counted(codes, target - lse), entropy)

    def gradient(
        self, chunks: Chunks, logits: Array, codes: Array, row: _Row, of_log_prob: Array, of_entropy: Array
    ) -> LogitsGradient:
        """The gradient of the logits, from those of a row's two numbers."""
        if row.z is None:
            loss = Loss(logit_softcap=self.softmax.logit_softcap)
            attributes = {**loss.gradient_attributes(chunks.vocab), "softcap": loss.softcap, "padding": chunks.padding}
            return chunks.gradient_of_labels(logits, codes, row.lse, -where_counted(codes, of_log_prob), attributes)
        log_p = row.z - row.lse[:, None]
        p = jnp.exp(log_p)
        dz = where_counted(codes, of_log_prob)[:, None] * (_hits(chunks, codes, p) - p)
        if self.entropy:
            dz -= where_counted(codes, of_entropy)[:, None] * _times(p, log_p + row.entropy[:, None])
        return _gradient_of(chunks, logits, codes, row.z, dz, self.softmax)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLoss(Rows):
    """A function of each token's log-probability, the entropy of its row and arrays; and the log-probability.

    Attributes:
      log_probs: of the rows.
      function: (log-probability, *arrays) → loss, elementwise; with log_probs.entropy that is its second argument.
      arrays: names of the arrays among the operands.
    """

    log_probs: LogProbs
    function: Callable[..., Array]
    arrays: tuple[str, ...]

    def _function_of(self, piece: Mapping[str, Array]) -> Callable[..., Array]:
        """Of the log-probability, the entropy and the arrays that have a derivative."""

        def function(log_prob: Array, entropy: Array, *derived: Array) -> Array:
            arrays = {**piece, **dict(zip(self.derived, derived, strict=True))}
            first = (log_prob, entropy) if self.log_probs.entropy else (log_prob,)
            value = self.function(*first, *(arrays[name] for name in self.arrays))
            return where_counted(piece["codes"], value.astype(jnp.float32))

        return function

    def values(self, chunks: Chunks, logits: Array, piece: dict[str, Array]) -> list[Array]:
        row = self.log_probs.of(chunks, logits, piece["codes"])
        derived = (piece[name] for name in self.derived)
        return [self._function_of(piece)(row.log_prob, row.entropy, *derived), row.log_prob]

    def differentiated(
        self, chunks: Chunks, logits: Array, piece: dict[str, Array]
    ) -> tuple[list[Array], LogitsGradient]:
        codes = piece["codes"]
        row = self.log_probs.of(chunks, logits, codes)
        operands = row.log_prob, row.entropy, *(piece[name] for name in self.derived)
        value, pull = jax.vjp(self._function_of(piece), *operands)
        of_log_prob, of_entropy, *derivatives = pull(where_counted(codes, piece["factor"]))
        gradient = self.log_probs.gradient(chunks, logits, codes, row, of_log_prob, of_entropy)
        derivatives = [jnp.where(codes == IGNORED, 0.0, each.astype(jnp.float32)) for each in derivatives]
        return [value, row.log_prob, *derivatives], gradient

    def weighted(self, weights: Sequence[Array], second: Array) -> dict[str, Array]:
        del second  # has no gradient
        return {"factor": weights[0]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distance(Rows):
    """How far the distribution of another head is, `fixed_x · fixed_kernel`, which has no gradient; twice.

    Attributes:
      kind: "forward" is KL(other ‖ this), "reverse" KL(this ‖ other); "jensen_shannon" see `linear_divergence`.
      beta: of "jensen_shannon".
    """

    kind: Divergence
    beta: float
    softmax: Softmax

    heads: ClassVar[int] = 2

    def values(self, chunks: Chunks, logits: Array, piece: dict[str, Array]) -> list[Array]:
        value, _, _ = self._of(chunks, logits, piece)
        return [value, value]

    def differentiated(
        self, chunks: Chunks, logits: Array, piece: dict[str, Array]
    ) -> tuple[list[Array], LogitsGradient]:
        codes = piece["codes"]
        value, z, dz = self._of(chunks, logits, piece)
        dz *= where_counted(codes, piece["factor"])[:, None]
        gradient = _gradient_of(chunks, logits, codes, z, dz, self.softmax)
        return [value, value], gradient

    def weighted(self, weights: Sequence[Array], second: Array) -> dict[str, Array]:
        del second
        return {"factor": weights[0]}

    def _of(self, chunks: Chunks, logits: Array, piece: dict[str, Array]) -> tuple[Array, Array, Array]:
        """The distance, z of this head, and the distance's derivative by it."""
        codes = piece["codes"]
        assert chunks.fixed_kernel is not None
        x = jnp.where(codes[:, None] == IGNORED, jnp.zeros((), chunks.dtype), piece["fixed_x"].astype(chunks.dtype))
        others = chunks.product(x, chunks.fixed_kernel)
        z, other = (_scaled(chunks, each, codes, self.softmax) for each in (logits, others))
        log_p, log_q = (_log_softmax(chunks, each) for each in (z, other))
        if self.kind == "forward":
            return where_counted(codes, _expectation(chunks, log_q, log_q - log_p)), z, jnp.exp(log_p) - jnp.exp(log_q)
        # The derivative of an expectation over p of d is p · (d - expectation), d being constant in the first order.
        if self.kind == "reverse":
            d = log_p - log_q
            value = distance = _expectation(chunks, log_p, d)
            share = 1.0
        else:
            share = 1.0 - self.beta
            log_m = jnp.logaddexp(log_q + jnp.log(self.beta), log_p + jnp.log(share))
            d = log_p - log_m
            distance = _expectation(chunks, log_p, d)
            value = share * distance + self.beta * _expectation(chunks, log_q, log_q - log_m)
        dz = share * _times(jnp.exp(log_p), d - distance[:, None])
        return where_counted(codes, value), z, dz


def _scaled(chunks: Chunks, logits: Array, codes: Array, softmax: Softmax) -> Array:
    """float32 [tokens, vocab]: capped logits over the temperature, without padding; zeros in ignored rows."""
    z = logits[:, : chunks.local_vocab].astype(jnp.float32)
    z = jnp.where(codes[:, None] == IGNORED, 0.0, z)
    z = z if (cap := softmax.logit_softcap) is None else cap * jnp.tanh(z / cap)
    return z if softmax.temperature == 1.0 else z / softmax.temperature


def _log_softmax(chunks: Chunks, z: Array) -> Array:
    peak = lax.stop_gradient(jnp.max(z, axis=-1, keepdims=True))
    peak = lax.pmax(peak, chunks.vocab_axes) if chunks.vocab_axes else peak
    shifted = z - jnp.where(peak == -jnp.inf, 0.0, peak)
    return shifted - jnp.log(_over_shards(chunks, jnp.sum(jnp.exp(shifted), axis=-1)))[:, None]


def _expectation(chunks: Chunks, log_p: Array, of: Array) -> Array:
    """Σ p · of, where terms of p = 0 are 0."""
    return _over_shards(chunks, jnp.sum(_times(jnp.exp(log_p), of), axis=-1))


def _times(p: Array, of: Array) -> Array:
    return jnp.where(p == 0.0, 0.0, p * of)


def _over_shards(chunks: Chunks, x: Array) -> Array:
    return lax.psum(x, chunks.vocab_axes) if chunks.vocab_axes else x


def _hits(chunks: Chunks, codes: Array, like: Array) -> Array:
    """1 in the column of each token."""
    columns = _cross_entropy.local_codes(codes, chunks.local_vocab, chunks.vocab_axes) if chunks.vocab_axes else codes
    return (lax.broadcasted_iota(jnp.int32, like.shape, 1) == columns[:, None]).astype(jnp.float32)


def _gradient_of(chunks: Chunks, logits: Array, codes: Array, z: Array, dz: Array, softmax: Softmax) -> LogitsGradient:
    """The gradient of the logits from that of z."""
    temperature = softmax.temperature
    if softmax.logit_softcap is not None:
        dz *= 1.0 - (z * (temperature / softmax.logit_softcap)) ** 2
    dz = jnp.where(codes[:, None] == IGNORED, 0.0, dz if temperature == 1.0 else dz / temperature)
    return chunks.quantized_gradient(jnp.pad(dz, ((0, 0), (0, chunks.padding))).astype(logits.dtype))
