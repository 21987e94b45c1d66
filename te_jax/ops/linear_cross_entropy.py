"""The output head and its cross-entropy together: logits exist for a few thousand tokens at a time, and never twice."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection
from typing import Any, Literal, cast, overload

import jax
import jax.numpy as jnp
from jax import Array, lax

from te_jax import native, sharding
from te_jax._core.arguments import as_flag
from te_jax.ops import _cross_entropy
from te_jax.ops._cross_entropy import Loss, Reduction
from te_jax.ops.head.arguments import HeadOperands, differentiated_once, head_of, validate_accumulated_with
from te_jax.ops.head.derivatives import per_token, total
from te_jax.ops.head.rows import Head, LabelLoss
from te_jax.ops.linear.arguments import KernelContracting
from te_jax.ops.linear.local import multiplied_as_it_is
from te_jax.ops.linear.weight import Weight
from te_jax.ops.operands import as_array
from te_jax.recipe import Product, Recipe
from te_jax.reference.linear_cross_entropy import loss_of_logits, without_ignored
from te_jax.reference.softmax_cross_entropy import CrossEntropy, equals
from te_jax.sharding import AxisName

_NAME = "te_jax.ops.linear_cross_entropy"


# fmt: off
@overload
def linear_cross_entropy(
    x: jax.typing.ArrayLike, kernel: jax.typing.ArrayLike, labels: jax.typing.ArrayLike, *,
    bias: jax.typing.ArrayLike | None = None, kernel_contracting: KernelContracting = "first",
    loss: CrossEntropy = CrossEntropy(),
    reduction: Reduction = "mean", weight: jax.typing.ArrayLike | None = None, recipe: Recipe | None = None,
    fp8_products: Collection[Product] = ("dgrad", "wgrad"), chunk_tokens: int | None = None,
    wgrad_accumulator: jax.typing.ArrayLike | None = None, accumulate: bool = True, return_lse: Literal[False] = False,
    vocab_axis: AxisName | None = None, implementation: native.Implementation | None = None,
) -> Array: ...
@overload
def linear_cross_entropy(
    x: jax.typing.ArrayLike, kernel: jax.typing.ArrayLike, labels: jax.typing.ArrayLike, *,
    bias: jax.typing.ArrayLike | None = None, kernel_contracting: KernelContracting = "first",
    loss: CrossEntropy = CrossEntropy(),
    reduction: Reduction = "mean", weight: jax.typing.ArrayLike | None = None, recipe: Recipe | None = None,
    fp8_products: Collection[Product] = ("dgrad", "wgrad"), chunk_tokens: int | None = None,
    wgrad_accumulator: jax.typing.ArrayLike | None = None, accumulate: bool = True, return_lse: Literal[True],
    vocab_axis: AxisName | None = None, implementation: native.Implementation | None = None,
) -> tuple[Array, Array]: ...
# fmt: on
def linear_cross_entropy(
    x: jax.typing.ArrayLike,
    kernel: jax.typing.ArrayLike,
    labels: jax.typing.ArrayLike,
    *,
    bias: jax.typing.ArrayLike | None = None,
    kernel_contracting: KernelContracting = "first",
    loss: CrossEntropy = CrossEntropy(),
    reduction: Reduction = "mean",
    weight: jax.typing.ArrayLike | None = None,
    recipe: Recipe | None = None,
    fp8_products: Collection[Product] = ("dgrad", "wgrad"),
    chunk_tokens: int | None = None,
    wgrad_accumulator: jax.typing.ArrayLike | None = None,
    accumulate: bool = True,
    return_lse: bool = False,
    vocab_axis: AxisName | None = None,
    implementation: native.Implementation | None = None,
) -> Array | tuple[Array, Array]:
    r"""`softmax_cross_entropy(x · kernel + bias, labels)` without an array of all logits.

    It takes tokens in chunks. If you differentiate a scalar loss, the forward pass computes the gradients of each chunk
    at once, while its logits exist: three GEMMs instead of four. It adds up the gradient of kernel in float32. With
    reduction="none" the backward pass computes the logits again. docs/linear_cross_entropy.md has times and memory.

    Args:
      x: [*batch, in], float32, bfloat16 or float16: the hidden states. Sharded in any way.
      kernel: [in, vocab], or [vocab, in] for kernel_contracting="last", such as an embedding; float32, bfloat16 or
        float16. It is multiplied in the dtype of x.
      labels: [*batch], any integer dtype, in [0, vocab) or `loss.ignore_index`, as in `softmax_cross_entropy`.
      bias: [vocab], or None.
      kernel_contracting: "first" or "last": which dimension of the kernel is `in`.
      loss: as in `softmax_cross_entropy`.
      reduction: "mean" over the tokens that are not ignored (at least 1), "sum", or "none" for [*batch].
      weight: float32 [*batch], or None for ones: factors of the tokens' losses. "mean" divides by their sum over the
        tokens that are not ignored. Those of ignored tokens are not read.
      recipe: how to quantize for products in FP8; None for none. Not DelayedScaling.
      fp8_products: which of "forward", "dgrad" and "wgrad" run in FP8 with a recipe. The forward GEMM in FP8 loses most
        of the accuracy.
      chunk_tokens: the number of tokens in a chunk; None for chunks with 0.9 GB of logits, 1.8 GB with a
        recipe, or 2048 tokens, whichever is more.
      wgrad_accumulator: float32, bfloat16 or float16, shaped as kernel. Its cotangent is its next value, as in `dense`.
        If you differentiate a scalar loss itself, its gradient is added in place. If you scale the loss first, by a
        number known to XLA, that takes one more pass; by one that is computed, one more product (scale the
        accumulator afterwards, or use `weight`).
      accumulate: the next value is wgrad_accumulator + dkernel; False: dkernel, in the same buffer.
      return_lse: return the log-sum-exp too; it has no gradient.
      vocab_axis: inside `shard_map` or `pmap`, the mesh axes that split the vocabulary of kernel and bias, as in
        `softmax_cross_entropy`. Elsewhere leave it None.
      implementation: as in `dense`. "xla" and "reference" have all logits without a recipe.

    Returns:
      float32 scalar, or [*batch] for reduction="none"; with return_lse a tuple of that and lse, float32 [*batch].
      Gradients have the dtypes of their arguments.

    Raises:
      ValueError: for arguments that break a rule above, naming the argument.
      NotImplementedError: for forward mode and second derivatives with native kernels.
      te_jax.native.NativeUnavailableError: implementation cannot run here, or this GPU cannot multiply as recipe says.

    References:
      Gradients per chunk in the forward pass: Liger Kernel, arXiv:2410.10989. Cut cross-entropy: arXiv:2411.09009.

    Examples:
      >>> import jax, jax.numpy as jnp, te_jax
      >>> x, kernel, labels = jnp.ones((4, 8)), jnp.zeros((8, 16)), jnp.array([0, 3, 5, -100])
      >>> def loss(x, kernel, cross_entropy=te_jax.ops.CrossEntropy(z_loss=1e-4)):
      ...     return te_jax.ops.linear_cross_entropy(x, kernel, labels, loss=cross_entropy)
      >>> value, (dx, dkernel) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, kernel)
      >>> round(float(value), 3), dkernel.shape, round(float(dkernel[0, 3]), 4)
      (2.773, (8, 16), -0.2708)
    """
    weight = None if weight is None else as_array("weight", weight)
    head_operands = HeadOperands.of(
        x, kernel, bias, wgrad_accumulator, kernel_contracting=kernel_contracting, weight=weight
    )
    labels = as_array("labels", labels)
    validate_accumulated_with(head_operands, labels, weight)
    _cross_entropy.validate_labels("x", head_operands.x.shape, labels, reduction)
    split = Loss.of(loss, vocab_axis)
    head = head_of(
        _NAME,
        LabelLoss(vocab_axis=split.vocab_axis, loss=split),
        head_operands,
        kernel_contracting=kernel_contracting,
        recipe=recipe,
        fp8_products=fp8_products,
        chunk_tokens=chunk_tokens,
        accumulate=accumulate,
        implementation=implementation,
    )
    operands = (*head_operands, weight)
    if head.in_chunks:
        operands = differentiated_once(_NAME, operands)
    value, lse = _linear_cross_entropy(*operands, labels, head, split, reduction)
    return (value, lax.stop_gradient(lse)) if as_flag("return_lse", return_lse) else value


# Under jit even when called eagerly: sharded operands are then partitioned rather than gathered.
@functools.partial(jax.jit, static_argnums=(6, 7, 8), inline=sharding.INLINE)
def _linear_cross_entropy(x, kernel, bias, accumulator, weight, labels, head: Head, loss: Loss, reduction):
    """The loss and lse."""
    if not head.in_chunks:
        x = without_ignored(x, labels, loss.ignore_index)
        products = dataclasses.replace(head.layer, batch_ndim=x.ndim - 1).plain()
        logits = multiplied_as_it_is((products, None), x, Weight(kernel, bias, accumulator))
        return loss_of_logits(logits, labels, loss, weight=weight, reduction=reduction, vocab_axis=loss.vocab_axis)
    codes = loss.codes(labels, loss.whole_vocab(kernel.shape[head.vocab_axis]))
    counted = ~equals(labels, loss.ignore_index)
    factor = jnp.ones(labels.shape, jnp.float32)
    if weight is not None:
        factor = jnp.where(counted, weight.astype(jnp.float32), 0.0)
    varying = sharding.varying_axes(x, kernel, bias, labels) - frozenset(loss.vocab_axis)
    factor = sharding.varying_over(sharding.split_as_last(factor, labels), varying)
    operands = sharding.varying_together((x, kernel, bias, accumulator))
    if reduction == "none":
        losses, lse = cast(Any, per_token(head, *operands, {"codes": codes}))
        return losses * sharding.split_as_last(factor, losses), lse
    if reduction == "mean":
        if weight is None:
            count = jnp.maximum(jnp.sum(counted, dtype=jnp.int32), 1).astype(jnp.float32)
        else:
            count = jnp.sum(factor)
            count = jnp.where(count == 0.0, 1.0, count)
        factor = factor / count
    return total(head, *operands, {"codes": codes, "factor": factor})
