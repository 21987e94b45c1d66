"""Operands of the libraries of fused attention: the masks, where segments are, and the sinks that they do not know."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol, Self

import jax.numpy as jnp
from jax import Array, lax

from te_jax.reference.attention import visible_pairs

Operands = Mapping[str, Array]


@dataclasses.dataclass(frozen=True)
class Masks:
    """The static arguments of attention that decide which scores there are."""

    causal: bool
    window: int | None
    scale: float
    max_segments_per_seq: int | None = None
    softcap: float | None = None

    def visible(self, operands: Operands) -> Array | None:
        names = ("query_lengths", "key_lengths", "query_segment_ids", "key_segment_ids")
        return visible_pairs(
            operands["query"].shape[-3],
            operands["key"].shape[-3],
            causal=self.causal,
            window=self.window,
            **{name: operands[name] for name in names if name in operands},
        )


class Library(Protocol):
    """A module that computes attention on local arrays, in which any number of dimensions are of a batch."""

    def forward(self, operands: Operands, masks: Masks) -> tuple[Array, Array]:
        """(output, float32 log-sum-exp [*batch, N, T])."""
        ...

    def backward(
        self,
        operands: Operands,
        masks: Masks,
        out: Array,
        lse: Array,
        dout: Array,
        dlse: Array | None,
        wanted: tuple[str, ...],
    ) -> tuple[Array, ...]:
        """Gradients of the wanted operands. The log-sum-exp may be that of more keys than these."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Segments:
    """Where segments are in a batch of sequences.

    Attributes:
      segment: int32 [B · T], that of each token; S or more if the token is in none of these.
      offsets: int32 [S + 1], the tokens before each segment, and before the end for S - n that there are not.
      lengths: int32 [S], the tokens of each segment.
      time: the most tokens that a segment can have.
    """

    segment: Array
    offsets: Array
    lengths: Array
    time: int

    @classmethod
    def of(cls, ids: Array, count: int) -> Self:
        """From the numbers [B, T] of segments, which grow in a sequence, for `count` segments."""
        begins = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        segment = jnp.cumsum(begins.ravel(), dtype=jnp.int32) - 1
        places = lax.broadcasted_iota(jnp.int32, (count + 1, segment.size), 0)
        offsets = jnp.sum(segment[None] < places, axis=1, dtype=jnp.int32)
        return cls(segment, offsets, offsets[1:] - offsets[:-1], ids.shape[1])


def with_sinks(operands: Operands, out: Array, lse: Array) -> tuple[Array, Array]:
    """(output, log-sum-exp [*batch, N, T]) of attention with the sinks, if there are any, from those without."""
    if "sinks" not in operands:
        return out, lse
    # A sink is one more score without a value: it enlarges the sum of exponentials and scales the output down.
    enlarged = jnp.logaddexp(lse, _broadcast_sinks(operands))
    rescale = jnp.swapaxes(jnp.exp(lse - enlarged), -1, -2)[..., None]
    return (out.astype(jnp.float32) * rescale).astype(out.dtype), enlarged


def gradient_of_sinks(operands: Operands, out: Array, lse: Array, dout: Array, dlse: Array | None) -> Array:
    """Σ exp(sinks - lse) (dlse - δ), δ = Σ dout · out, of an output and a log-sum-exp that include the sinks."""
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    share = jnp.exp(_broadcast_sinks(operands) - lse) * ((0.0 if dlse is None else dlse) - jnp.swapaxes(delta, -1, -2))
    return jnp.sum(share, axis=(-1, -3)).astype(operands["sinks"].dtype)


def _broadcast_sinks(operands: Operands) -> Array:
    """Sinks as they are added to a log-sum-exp: [*, 1, N, 1]."""
    return operands["sinks"].astype(jnp.float32)[..., None, :, None]
