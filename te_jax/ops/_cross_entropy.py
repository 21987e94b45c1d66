"""The common parts of softmax losses: their parameters, codes of labels, and the kernels on logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from te_jax import native, sharding
from te_jax.ops._quantize_kernels import Kernels, Request, block_attributes, quantized_array
from te_jax.quantized import QuantizedArray
from te_jax.reference.quantize import blocked_groups
from te_jax.reference.softmax_cross_entropy import CrossEntropy, equals, in_vocabulary, nan_unless
from te_jax.reference.softmax_cross_entropy import logits_gradient as reference_gradient
from te_jax.reference.softmax_cross_entropy import row_statistics as reference_statistics
from te_jax.sharding import AxisName

# Codes of labels for the kernels, beside columns of the local vocabulary.
IGNORED = -1  # the row is not read
ELSEWHERE = -2  # no target in this shard

Reduction = Literal["mean", "sum", "none"]


@dataclasses.dataclass(frozen=True)
class Loss(CrossEntropy):
    """A cross-entropy, and the mesh axes that split its vocabulary."""

    vocab_axis: tuple[str, ...] = ()

    @classmethod
    def of(cls, loss: CrossEntropy, vocab_axis: AxisName | None) -> Loss:
        """Raises ValueError where an argument breaks a rule."""
        if not isinstance(loss, CrossEntropy):
            raise ValueError(
                f"loss is {loss!r}; it must be a te_jax.ops.CrossEntropy, such as CrossEntropy(z_loss=1e-4)"
            )
        axes = () if vocab_axis in (None, (), []) else sharding.mapped_axes(vocab_axis, "vocab_axis")[0]
        return cls(**dataclasses.asdict(loss), vocab_axis=axes)

    @property
    def softcap(self) -> float:
        """As the kernels take it: 0 for none."""
        return self.logit_softcap or 0.0

    @property
    def split(self) -> dict[str, Any]:
        """The `axes`, `softcap` and `padding` of the calls below."""
        return {"axes": {"v": self.vocab_axis} if self.vocab_axis else {}, "softcap": self.softcap, "padding": 0}

    def whole_vocab(self, local_vocab: int) -> int:
        """The size of the whole vocabulary, of which this device has a shard where vocab_axis says so."""
        return local_vocab * (lax.axis_size(self.vocab_axis) if self.vocab_axis else 1)

    def codes(self, labels: Array, vocab: int) -> Array:
        """int32: each label's column, IGNORED, or ELSEWHERE for one outside the vocabulary."""
        codes = jnp.where(in_vocabulary(labels, vocab), labels.astype(jnp.int32), ELSEWHERE)
        return jnp.where(equals(labels, self.ignore_index), IGNORED, codes)

    def of_rows(self, codes: Array, statistics: Sequence[Array], vocab: int) -> Array:
        """The loss of each row, from (lse, z[label], Σz): zero where ignored, NaN where outside the vocabulary."""
        lse, target, total = statistics
        value = lse - (1.0 - self.label_smoothing) * target
        if self.label_smoothing:
            value -= self.label_smoothing / vocab * total
        if self.z_loss:
            value += self.z_loss * lse * lse  # in this order it overflows only where the result does
        return where_counted(codes, value)

    def gradient_attributes(self, vocab: int) -> dict[str, float]:
        """Attributes of the gradient's kernels, beside `softcap`."""
        return {"label_smoothing": self.label_smoothing, "uniform": self.label_smoothing / vocab, "z_loss": self.z_loss}


def validate_labels(name: str, shape: tuple[int, ...], labels: Array, reduction: str, named: str = "labels") -> None:
    """Checks labels and reduction for rows of the given shape, those of the argument `name`."""
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"{named} have dtype {labels.dtype}; they must be integers, one for each row of {name}")
    if labels.shape != shape[:-1]:
        raise ValueError(f"{named} have shape {labels.shape}; for {name} of shape {shape} they must have {shape[:-1]}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}; it must be 'mean', 'sum' or 'none'")


@sharding.per_shard("... v, ... -> ..., ..., ...", axes_of=("v",))
def row_statistics(logits: Array, codes: Array, *, axes, use_native: bool = True, **attributes) -> tuple[Array, ...]:
    """(lse, z[label], Σz) of each row, float32 [*batch], from one read of the logits.

    Attributes: `with_total`, for Σz; `softcap`; `padding`, the number of last columns that do not count.
    """
    if "v" in axes:
        codes = local_codes(codes, logits.shape[-1] - attributes["padding"], axes["v"])
        return _merge(row_statistics(logits, codes, use_native=use_native, **attributes), axes["v"])
    if not use_native:
        return reference_statistics(logits, codes, **attributes)
    row = jax.ShapeDtypeStruct(codes.shape, jnp.float32)
    results, operands = {"lse": row, "target": row, "total": row}, {"logits": logits, "labels": codes}
    return tuple(native.call("te_softmax_cross_entropy_statistics", results, operands, **attributes))


@sharding.per_shard("... v, ..., ..., ... -> ... v", axes_of=("v",), reuse={0: 0})
def logits_gradient(
    logits: Array, codes: Array, lse: Array, weight: Array, *, axes, reuse, use_native: bool = True, **attributes
):
    """The gradient of Σ weight · loss, over the logits themselves where their buffer is free."""
    if "v" in axes:
        codes = local_codes(codes, logits.shape[-1] - attributes["padding"], axes["v"])
        return logits_gradient(logits, codes, lse, weight, reuse=reuse, use_native=use_native, **attributes)
    if not use_native:
        return (reference_gradient(logits, codes, lse, weight, **attributes),)
    operands = {"logits": logits, "labels": codes, "lse": lse, "weight": weight}
    aliases = {"logits": "gradient"} if reuse else None
    target = "te_softmax_cross_entropy_gradient"
    return tuple(native.call(target, {"gradient": logits}, operands, aliases=aliases, **attributes))


@sharding.per_shard("... v, ..., ... -> ..., ..., ..., ... v", reuse={0: 3}, replicated=("v",))
def statistics_and_gradient(logits: Array, codes: Array, weight: Array, *, axes, reuse, **attributes):
    """`row_statistics` and `logits_gradient`, by one read of the logits where their rows are not too long."""
    del axes
    row = jax.ShapeDtypeStruct(codes.shape, jnp.float32)
    results = {"lse": row, "target": row, "total": row, "gradient": logits}
    operands = {"logits": logits, "labels": codes, "weight": weight}
    aliases = {"logits": "gradient"} if reuse else None
    return tuple(native.call("te_softmax_cross_entropy_both", results, operands, aliases=aliases, **attributes))


def quantized_gradient(
    logits: Array, codes: Array, lse: Array, weight: Array, request: Request, **attributes
) -> QuantizedArray:
    """`logits_gradient` in FP8, with scales of blocks.

    Args:
      logits: [tokens, vocab], not sharded.
      codes: int32 [tokens].
      lse, weight: float32 [tokens].
      request: how to quantize.
      attributes: those of `logits_gradient`.
    """
    kernels = Kernels(request, logits.ndim, blocked_groups(request.quantization, request.copies))
    data, scale_inv, transposed, transposed_scale_inv = kernels.run(
        "te_softmax_cross_entropy_gradient_blocks",
        {
            "logits": (kernels.x, logits),
            "labels": (kernels.rows, codes),
            "lse": (kernels.rows, lse),
            "weight": (kernels.rows, weight),
        },
        kernels.blocks,
        **block_attributes(request.quantization),
        **attributes,
    )
    return quantized_array(logits, (data, scale_inv, transposed, transposed_scale_inv), request)


def local_codes(codes: Array, local_vocab: int, axis_name: AxisName) -> Array:
    """Codes in this device's shard of the vocabulary from those in the whole vocabulary."""
    column = codes - lax.axis_index(axis_name) * local_vocab
    here = (codes >= 0) & (column >= 0) & (column < local_vocab)
    return jnp.where(here, column, jnp.where(codes == IGNORED, IGNORED, ELSEWHERE))


def _merge(statistics: tuple[Array, ...], axis_name: AxisName) -> tuple[Array, ...]:
    """Statistics of whole rows from those of their shards: a max and a sum over the axis, four floats a row."""
    lse, target, total = statistics
    peak = lax.pmax(lse, axis_name)
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)
    mass, target, total = lax.psum((jnp.exp(lse - peak), target, total), axis_name)
    return peak + jnp.log(mass), target, total


def where_counted(codes: Array, value: Array) -> Array:
    """Zero in ignored rows, NaN in rows whose label is outside the vocabulary."""
    return jnp.where(codes == IGNORED, 0.0, value * nan_unless(codes != ELSEWHERE))


def over_replicas(cotangent: Array, axis_name: tuple[str, ...]) -> Array:
    """The cotangent of a loss that every shard of the vocabulary holds.

    Where shard_map tracks varying axes it is the same on every shard. Where it does not (check_vma=False, pmap), each
    shard holds a part and psum's own gradient would sum them; so does this.
    """
    if not axis_name or sharding.tracked_axes(axis_name):
        return cotangent
    return lax.psum(cotangent, axis_name)
