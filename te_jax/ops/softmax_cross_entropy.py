"""Softmax cross-entropy that reads the logits once forward and once backward."""

from __future__ import annotations

import functools
from typing import cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from te_jax import native, reference, sharding
from te_jax._core.reverse_mode import reverse_mode_only
from te_jax.ops._cross_entropy import (
    Loss,
    Reduction,
    logits_gradient,
    over_replicas,
    row_statistics,
    validate_labels,
    where_counted,
)
from te_jax.ops.operands import as_array
from te_jax.reference.softmax_cross_entropy import CrossEntropy, equals, reduce_tokens
from te_jax.sharding import AxisName

_REVERSE_MODE = (
    "te_jax.ops.softmax_cross_entropy with native kernels has first derivatives in reverse mode (jax.grad, jax.vjp) "
    "only: for forward mode (jax.jvp, jax.jacfwd) or second derivatives use implementation='reference'"
)


def softmax_cross_entropy(
    logits: jax.typing.ArrayLike,
    labels: jax.typing.ArrayLike,
    loss: CrossEntropy = CrossEntropy(),
    *,
    reduction: Reduction = "mean",
    vocab_axis: AxisName | None = None,
    implementation: native.Implementation | None = None,
) -> Array:
    r"""Cross-entropy of the softmax over the last dimension against integer labels.

    The forward pass reads the logits once and keeps one float32 `lse` a row (checkpoint name
    "softmax_cross_entropy_lse"). The backward pass reads them once more and writes the gradient, over the logits
    themselves where XLA may reuse their buffer. There is never a float32 copy of the logits.

    Args:
      logits: [*batch, vocab], float32, bfloat16 or float16. They may be sharded in any way: over batch dimensions
        devices exchange nothing, over the vocabulary four floats a row.
      labels: [*batch], any integer dtype, in [0, vocab) or `loss.ignore_index`. Any other label makes its row's loss
        and gradient NaN.
      loss: label smoothing, ignored labels, z-loss and soft cap; see `CrossEntropy`.
      reduction: "mean" over the rows that are not ignored (at least 1), "sum", or "none" for [*batch].
      vocab_axis: inside `shard_map` or `pmap`, the mesh axis or axes that split the vocabulary in equal shards, in
        order. Labels then count over the whole vocabulary, and the loss is the same on every shard. Under `jit` on
        Auto or Explicit meshes leave it None. Under `pmap` and with check_vma=False, gradients taken inside are those
        of the sum of all shards' losses, as with JAX's own `psum`.
      implementation: None uses the native kernel where there is one, else the reference, which XLA compiles and which
        "xla" names too; "native" or "reference" never fall back.

    Returns:
      float32 scalar, or [*batch] for reduction="none". The gradient has the dtype of the logits.

    Raises:
      ValueError: for shapes, dtypes or parameters that break a rule above, naming the argument.
      NotImplementedError: for forward mode and second derivatives with the native kernel.
      te_jax.native.NativeUnavailableError: for implementation="native" where it cannot run.

    References:
      Online softmax: arXiv:1805.02867.

    Examples:
      >>> import jax, jax.numpy as jnp, te_jax
      >>> logits, labels = jnp.zeros((3, 4)), jnp.array([0, 2, -100])
      >>> value, gradient = jax.jit(jax.value_and_grad(te_jax.ops.softmax_cross_entropy))(logits, labels)
      >>> bool(jnp.allclose(value, jnp.log(4))), gradient[0, 0].item(), gradient[2, 0].item()
      (True, -0.375, 0.0)
    """
    logits, labels = as_array("logits", logits), as_array("labels", labels)
    _validate(logits, labels, reduction)
    split = Loss.of(loss, vocab_axis)
    remedy = (
        f"pass the device's shard of the vocabulary, by in_specs such as P(None, {vocab_axis!r}), or vocab_axis=None"
    )
    sharding.validate_split("logits", logits, split.vocab_axis, remedy, "vocab_axis")
    if use_native := native.use_native(implementation, dtype=logits.dtype):
        logits = reverse_mode_only(logits, _REVERSE_MODE)
    return _softmax_cross_entropy(logits, labels, split, reduction, use_native)


def _validate(logits: Array, labels: Array, reduction: str) -> None:
    if logits.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"logits have dtype {logits.dtype}; they must be float32, bfloat16 or float16: cast them")
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits have shape {logits.shape}; they need a last dimension, the vocabulary, of 1 or more")
    validate_labels("logits", logits.shape, labels, reduction)


# Under jit even when called eagerly: sharded operands are then partitioned rather than gathered.
@functools.partial(jax.jit, static_argnums=(2, 3, 4), inline=sharding.INLINE)
def _softmax_cross_entropy(logits: Array, labels: Array, loss: Loss, reduction: str, use_native: bool) -> Array:
    if not use_native:
        return reference.softmax_cross_entropy(logits, labels, loss, reduction=reduction, vocab_axis=loss.vocab_axis)
    losses = cast(Array, _per_token(logits, labels, loss))
    return reduce_tokens(losses, equals(sharding.split_as_last(labels, losses), loss.ignore_index), reduction)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _per_token(logits: Array, labels: Array, loss: Loss) -> Array:
    return _forward(logits, labels, loss)[0]


def _forward(logits: Array, labels: Array, loss: Loss):
    vocab = loss.whole_vocab(logits.shape[-1])
    codes = loss.codes(labels, vocab)
    lse, *statistics = row_statistics(logits, codes, with_total=loss.label_smoothing > 0.0, **loss.split)
    codes = sharding.split_as_last(codes, lse)
    lse = checkpoint_name(lse, "softmax_cross_entropy_lse")
    return loss.of_rows(codes, (lse, *statistics), vocab), (logits, codes, lse)


# Under jit, or each gradient outside of jit would trace it anew.
@functools.partial(jax.jit, static_argnums=0, inline=sharding.INLINE)
def _backward(loss: Loss, residuals, cotangent: Array):
    logits, codes, lse = residuals
    weight = where_counted(codes, over_replicas(cotangent, loss.vocab_axis))
    attributes = loss.gradient_attributes(loss.whole_vocab(logits.shape[-1]))
    (gradient,) = logits_gradient(logits, codes, lse, weight, **attributes, **loss.split)
    return gradient, None


_per_token.defvjp(_forward, _backward)
