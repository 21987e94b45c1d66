"""The distance of two output heads, a teacher's and a student's, without an array of all logits of either."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import cast, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax

from te_jax import native, sharding
from te_jax._core.arguments import is_finite_number
from te_jax.ops._cross_entropy import IGNORED, Reduction
from te_jax.ops.head.arguments import HeadOperands, differentiated_once, head_of
from te_jax.ops.head.derivatives import per_token, total
from te_jax.ops.head.rows import Head
from te_jax.ops.head.tokens import Distance, Divergence
from te_jax.ops.linear.arguments import KernelContracting
from te_jax.ops.linear_log_probs import all_logits, split_of
from te_jax.ops.operands import as_array
from te_jax.recipe import Product, Recipe
from te_jax.reference.token_distributions import Softmax, divergence
from te_jax.sharding import AxisName


def linear_divergence(
    x: jax.typing.ArrayLike,
    kernel: jax.typing.ArrayLike,
    teacher_x: jax.typing.ArrayLike,
    teacher_kernel: jax.typing.ArrayLike,
    *,
    kind: Divergence = "forward",
    beta: float = 0.5,
    softmax: Softmax = Softmax(),
    weight: jax.typing.ArrayLike | None = None,
    reduction: Reduction = "mean",
    bias: jax.typing.ArrayLike | None = None,
    kernel_contracting: KernelContracting = "first",
    recipe: Recipe | None = None,
    fp8_products: Collection[Product] = ("dgrad", "wgrad"),
    chunk_tokens: int | None = None,
    vocab_axis: AxisName | None = None,
    implementation: native.Implementation | None = None,
) -> Array:
    r"""How far a student's distribution over the vocabulary is from a teacher's, for distillation.

    With p = softmax(x · kernel + bias) the student's and q = softmax(teacher_x · teacher_kernel) the teacher's:

        forward         KL(q ‖ p) = Σ q (log q - log p)
        reverse         KL(p ‖ q)
        jensen_shannon  β KL(q ‖ m) + (1 - β) KL(p ‖ m) with m = β q + (1 - β) p

    Both heads multiply a chunk of tokens at a time. If you differentiate a scalar, the gradients are computed with it:
    four GEMMs, one of them the teacher's, which has no gradient.

    Args:
      x: [*batch, in], float32, bfloat16 or float16: the student's hidden states. Sharded in any way.
      kernel: [in, vocab], or [vocab, in] for kernel_contracting="last".
      teacher_x: [*batch, width]; it is multiplied in the dtype of x.
      teacher_kernel: [width, vocab], or [vocab, width], as kernel_contracting says.
      kind: see above.
      beta: above 0 and below 1, for "jensen_shannon".
      softmax: temperature and soft cap of both heads. Gradients fall with the temperature's square, by which Hinton et
        al. multiply the loss.
      weight: float32 [*batch], or None for ones: factors of the tokens. Those of weight 0 are not read.
      reduction: "mean" over the tokens, that is the sum over that of the weights, "sum", or "none" for [*batch].
      bias, kernel_contracting, recipe, fp8_products, chunk_tokens, vocab_axis, implementation: of the student's head,
        as in `linear_cross_entropy`. With vocab_axis both kernels are split.

    Returns:
      float32 scalar in nats, or [*batch] for reduction="none". weight has no gradient.

    Raises:
      ValueError: for arguments that break a rule above, naming the argument.
      NotImplementedError: for forward mode and second derivatives with native kernels.
      te_jax.native.NativeUnavailableError: implementation cannot run here, or this GPU cannot multiply as recipe says.

    References:
      Distillation: arXiv:1503.02531. Generalized Jensen-Shannon on a student's own samples: arXiv:2306.13649.

    Examples:
      >>> import jax, jax.numpy as jnp, te_jax
      >>> x, kernel, teacher_x = jnp.ones((4, 8)), jnp.zeros((8, 16)), jnp.ones((4, 32))
      >>> teacher_kernel = jnp.zeros((32, 16)).at[:, 3].set(0.1)
      >>> loss = lambda kernel: te_jax.ops.linear_divergence(x, kernel, teacher_x, teacher_kernel)
      >>> value, gradient = jax.value_and_grad(loss)(kernel)
      >>> round(float(value), 2), round(float(gradient[0, 3]), 2)
      (1.08, -0.56)
    """
    weight = None if weight is None else as_array("weight", weight)
    operands = HeadOperands.of(x, kernel, bias, kernel_contracting=kernel_contracting, weight=weight)
    weight = jnp.ones(operands.x.shape[:-1], jnp.float32) if weight is None else weight.astype(jnp.float32)
    teacher = HeadOperands.of(teacher_x, teacher_kernel, kernel_contracting=kernel_contracting, whose="teacher_")[:2]
    _validate_teacher(*teacher, operands, kernel_contracting)
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}; it must be 'mean', 'sum' or 'none'")
    if kind not in get_args(Divergence):
        raise ValueError(f"kind is {kind!r}; it must be one of {get_args(Divergence)}")
    if not is_finite_number(beta) or not 0 < beta < 1:
        raise ValueError(f"beta is {beta!r}; it must be a number above 0 and below 1")
    axes = split_of(softmax, vocab_axis).vocab_axis
    head = head_of(
        "te_jax.ops.linear_divergence",
        Distance(vocab_axis=axes, kind=kind, beta=float(beta), softmax=softmax),
        operands,
        kernel_contracting=kernel_contracting,
        recipe=recipe,
        fp8_products=fp8_products,
        chunk_tokens=chunk_tokens,
        implementation=implementation,
    )
    if head.in_chunks:
        operands = differentiated_once(head.layer.name, operands)
    return _linear_divergence(*operands[:3], *lax.stop_gradient((*teacher, weight)), head, reduction)


def _validate_teacher(x: Array, kernel: Array, operands: HeadOperands, kernel_contracting: KernelContracting) -> None:
    """Raises ValueError where it has another vocabulary or other tokens than the student."""
    batch, vocab = operands.x.shape[:-1], 1 if kernel_contracting == "first" else 0
    if x.shape[:-1] != batch:
        raise ValueError(
            f"teacher_x has shape {x.shape}; for x of shape {operands.x.shape} it must be {batch} and a width"
        )
    if kernel.shape[vocab] != (needed := operands.kernel.shape[vocab]):
        raise ValueError(
            f"teacher_kernel has shape {kernel.shape}, a vocabulary of {kernel.shape[vocab]}; kernel has {needed}"
        )


@functools.partial(jax.jit, static_argnums=(6, 7), inline=sharding.INLINE)
def _linear_divergence(x, kernel, bias, teacher_x, teacher_kernel, weight, head: Head, reduction) -> Array:
    rows = cast(Distance, head.rows)
    ignored = weight == 0.0
    count = jnp.sum(weight)
    factor = weight / jnp.where(count == 0.0, 1.0, count) if reduction == "mean" else weight
    if not head.in_chunks:
        x, teacher_x = (jnp.where(ignored[..., None], jnp.zeros((), a.dtype), a) for a in (x, teacher_x))
        logits = all_logits(x, kernel, bias, head)
        other = all_logits(teacher_x.astype(x.dtype), teacher_kernel, None, head)
        values = factor * divergence(
            logits,
            other,
            ignored,
            kind=rows.kind,
            beta=rows.beta,
            softmax=rows.softmax,
            vocab_axis=rows.vocab_axis,
        )
        return values if reduction == "none" else jnp.sum(values)
    varying = sharding.varying_axes(x, kernel, bias, teacher_x, teacher_kernel, weight) - frozenset(rows.vocab_axis)
    codes = sharding.varying_over(jnp.where(ignored, IGNORED, 0), varying)
    factor = sharding.varying_over(sharding.split_as_last(factor, weight), varying)
    x, kernel, bias, teacher_x, teacher_kernel = sharding.varying_together((x, kernel, bias, teacher_x, teacher_kernel))
    tokens = {"codes": codes, "fixed_x": teacher_x, "fixed_kernel": teacher_kernel}
    if reduction == "none":
        return factor * cast(tuple[Array, Array], per_token(head, x, kernel, bias, None, tokens))[0]
    return cast(tuple[Array, Array], total(head, x, kernel, bias, None, {**tokens, "factor": factor}))[0]
