"""What is computed from the logits of an output head, token by token; and the head itself."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array

from te_jax.ops import _cross_entropy
from te_jax.ops._cross_entropy import Loss, where_counted
from te_jax.ops.linear.codec import Codec
from te_jax.ops.linear.local import LocalProducts
from te_jax.quantized import QuantizedArray
from te_jax.recipe import Product


class Chunks(Protocol):
    """What rows read of all chunks, and what they can have computed: `chunks.HeadChunks`."""

    head: Head
    vocab_axes: tuple[str, ...]
    vocab: int  # of all shards
    padding: int
    dtype: jnp.dtype
    fixed_kernel: Array | None

    @property
    def local_vocab(self) -> int: ...
    def product(self, x: Array, kernel: Array) -> Array: ...
    def statistics(
        self, logits: Array, codes: Array, softcap: float, *, with_total: bool = False
    ) -> tuple[Array, ...]: ...
    def gradient_of_labels(
        self, logits: Array, codes: Array, lse: Array, weight: Array, attributes: dict[str, float]
    ) -> LogitsGradient: ...
    def quantized_gradient(self, plain: Array) -> LogitsGradient: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows(abc.ABC):
    """What is computed from each token's row of logits: two numbers, and the gradient of Σ factor · the first.

    Attributes:
      vocab_axis: mesh axes that split the vocabulary, inside of a shard_map.
      derived: operands of each token, beside `factor`, with a derivative.
    """

    vocab_axis: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()

    heads: ClassVar[int] = 1
    """Rows of logits for a token."""

    @abc.abstractmethod
    def values(self, chunks: Chunks, logits: Array, piece: dict[str, Array]) -> list[Array]:
        """The two numbers, float32 [tokens].

        Args:
          chunks: what all chunks share.
          logits: [tokens, vocab + chunks.padding].
          piece: operands of these tokens by their names, such as `codes`.
        """

    @abc.abstractmethod
    def differentiated(
        self, chunks: Chunks, logits: Array, piece: dict[str, Array]
    ) -> tuple[list[Array], LogitsGradient]:
        """`values`, then the derivatives by `derived`; and the gradient of the logits."""

    @abc.abstractmethod
    def weighted(self, weights: Sequence[Array], second: Array) -> dict[str, Array]:
        """More operands of each token, with which `differentiated` has the gradient of the sum of both numbers by
        weights.

        Args:
          weights: float32 [*batch] each.
          second: the second numbers.
        """


class LogitsGradient(NamedTuple):
    """As it is and in FP8, as far as products read it."""

    plain: Array | None
    quantized: QuantizedArray | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelLoss(Rows):
    """The cross-entropy of labels, and lse. With `lse` among the operands it is not computed again."""

    loss: Loss

    def values(self, chunks: Chunks, logits: Array, piece: dict[str, Array]) -> list[Array]:
        return self._losses(chunks, piece["codes"], self._statistics(chunks, logits, piece["codes"]))

    def differentiated(
        self, chunks: Chunks, logits: Array, piece: dict[str, Array]
    ) -> tuple[list[Array], LogitsGradient]:
        codes, lse, loss = piece["codes"], piece.get("lse"), self.loss
        attributes = loss.gradient_attributes(chunks.vocab) | {"softcap": loss.softcap, "padding": chunks.padding}
        weight = where_counted(codes, piece["factor"])
        if lse is None and chunks.head.codec is None and not chunks.vocab_axes:
            with_total = loss.label_smoothing > 0.0
            *statistics, dlogits = _cross_entropy.statistics_and_gradient(
                logits, codes, weight, with_total=with_total, **attributes
            )
            return self._losses(chunks, codes, statistics), LogitsGradient(dlogits, None)
        statistics = None
        if lse is None:
            statistics = self._statistics(chunks, logits, codes)
            lse = statistics[0]
        gradient = chunks.gradient_of_labels(logits, codes, lse, weight, attributes)
        return [lse, lse] if statistics is None else self._losses(chunks, codes, statistics), gradient

    def weighted(self, weights: Sequence[Array], second: Array) -> dict[str, Array]:
        return {"factor": weights[0], "lse": second}  # which has no gradient

    def _statistics(self, chunks: Chunks, logits: Array, codes: Array) -> tuple[Array, ...]:
        return chunks.statistics(logits, codes, self.loss.softcap, with_total=self.loss.label_smoothing > 0.0)

    def _losses(self, chunks: Chunks, codes: Array, statistics: Sequence[Array]) -> list[Array]:
        return [self.loss.of_rows(codes, statistics, chunks.vocab), statistics[0]]


@dataclasses.dataclass(frozen=True)
class Head:
    """The static arguments, together: hashable, so that a head is traced once."""

    rows: Rows
    layer: LocalProducts
    chunk_tokens: int | None

    @property
    def kernel_dimensions(self) -> str:
        return "h v" if self.layer.kernel_contracting == "first" else "v h"

    @property
    def vocab_axis(self) -> int:
        return 1 if self.layer.kernel_contracting == "first" else 0

    @property
    def by_kernels(self) -> bool:
        """Whether native kernels compute what is no product."""
        return self.layer.codecs[0].by_kernels

    @property
    def codec(self) -> Codec | None:
        """Codec of the products in FP8, if there are any."""
        return next((codec for codec in self.layer.codecs if codec.in_fp8), None)

    @property
    def in_chunks(self) -> bool:
        """Whether tokens are taken in chunks, by rules of derivatives of its own."""
        return self.by_kernels or self.codec is not None

    def in_fp8(self, product: Product) -> bool:
        return self.layer.codec(product).in_fp8
