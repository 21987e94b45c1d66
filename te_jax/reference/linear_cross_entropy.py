"""An output head and its cross-entropy in plain jax.numpy."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from te_jax.reference.softmax_cross_entropy import CrossEntropy, equals, reduce_tokens, softmax_cross_entropy


def linear_cross_entropy(
    x: Array,
    kernel: Array,
    labels: Array,
    loss: CrossEntropy = CrossEntropy(),
    *,
    bias: Array | None = None,
    weight: Array | None = None,
    kernel_contracting: str = "first",
    reduction: str = "mean",
) -> tuple[Array, Array]:
    """Definition of `te_jax.ops.linear_cross_entropy`, which see: the loss, and lse of all tokens."""
    x = without_ignored(x, labels, loss.ignore_index)
    logits = jnp.einsum(
        "...h,hv->...v" if kernel_contracting == "first" else "...h,vh->...v", x, kernel.astype(x.dtype)
    )
    if bias is not None:
        logits += bias.astype(x.dtype)
    return loss_of_logits(logits, labels, loss, weight=weight, reduction=reduction)


def without_ignored(x: Array, labels: Array, ignore_index: int) -> Array:
    """Zeros in the rows of ignored tokens: the gradient of the kernel would read a NaN there as 0 · NaN."""
    return jnp.where(equals(labels, ignore_index)[..., None], jnp.zeros((), x.dtype), x)


def loss_of_logits(
    logits: Array,
    labels: Array,
    loss: CrossEntropy,
    *,
    weight: Array | None,
    reduction: str,
    vocab_axis: tuple[str, ...] = (),
) -> tuple[Array, Array]:
    """The loss with weights of tokens, and lse."""
    losses, lse = softmax_cross_entropy(logits, labels, loss, reduction="none", vocab_axis=vocab_axis, return_lse=True)
    ignored = equals(labels, loss.ignore_index)
    if weight is None:
        return reduce_tokens(losses, ignored, reduction), lse
    weight = jnp.where(ignored, 0.0, weight.astype(losses.dtype))
    losses = weight * losses
    if reduction != "mean":
        return reduce_tokens(losses, ignored, reduction), lse
    total = jnp.sum(weight)
    return jnp.sum(losses) / jnp.where(total == 0.0, 1.0, total), lse
