"""The output head and its cross-entropy together: logits exist for a few thousand tokens at a time, and never twice."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection
from typing import Any, Literal, cast, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jax.interpreters import ad

from te_jax import native, sharding
from te_jax._core.arguments import as_flag, is_whole_number
from te_jax._core.reverse_mode import reverse_mode_only
from te_jax._core.types import FP8_ALIGNMENT
from te_jax.ops import _cross_entropy
from te_jax.ops._cross_entropy import Loss, Reduction
from te_jax.ops._linear_cross_entropy import Head, Wanted, run
from te_jax.ops.linear import fp8
from te_jax.ops.linear.accumulator import added_once, validate_accumulator
from te_jax.ops.linear.arguments import KernelContracting, implementation_for
from te_jax.ops.linear.codec import codecs_of
from te_jax.ops.linear.local import LocalProducts, multiplied_as_it_is
from te_jax.ops.linear.weight import Weight
from te_jax.ops.operands import as_array
from te_jax.quantized import facts_of_recipe
from te_jax.recipe import PRODUCTS, DelayedScaling, Product, ProductRecipes, Recipe
from te_jax.reference.linear_cross_entropy import loss_of_logits, without_ignored
from te_jax.reference.softmax_cross_entropy import CrossEntropy, equals
from te_jax.sharding import AxisName

_NAME = "te_jax.ops.linear_cross_entropy"
_REVERSE_MODE = (
    "te_jax.ops.linear_cross_entropy with native kernels has first derivatives in reverse mode (jax.grad, jax.vjp) "
    "only: for forward mode (jax.jvp, jax.jacfwd) or second derivatives use implementation='reference'"
)
_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


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
    x, kernel, labels = as_array("x", x), as_array("kernel", kernel), as_array("labels", labels)
    bias, weight, accumulator = (
        None if a is None else as_array(name, a)
        for name, a in (("bias", bias), ("weight", weight), ("wgrad_accumulator", wgrad_accumulator))
    )
    if kernel_contracting not in ("first", "last"):
        raise ValueError(f"kernel_contracting is {kernel_contracting!r}; it must be 'first' or 'last'")
    _validate(x, kernel, labels, bias, weight, accumulator, kernel_contracting, reduction)
    if chunk_tokens is not None and (not is_whole_number(chunk_tokens) or chunk_tokens < 1):
        raise ValueError(f"chunk_tokens is {chunk_tokens!r}; it must be a whole number of at least 1, or None")
    split = Loss.of(loss, vocab_axis)
    remedy = (
        f"pass the device's shard of the vocabulary, by in_specs such as P(None, {vocab_axis!r}), or vocab_axis=None"
    )
    sharding.validate_split("kernel", kernel, split.vocab_axis, remedy, "vocab_axis")
    recipes = None if recipe is None else _recipes(x, recipe, fp8_products)
    by_kernels = native.use_native(implementation)

    def chosen(recipe: Recipe | None) -> native.Implementation:
        if recipe is not None:
            return implementation_for(implementation, recipe)
        return "native" if by_kernels and native.use_native(None, products=True) else "reference"

    layer = LocalProducts(
        name=_NAME,
        codecs=codecs_of(_NAME, recipes, implementation, chosen),
        dtype=np.dtype(x.dtype),
        accumulate=as_flag("accumulate", accumulate),
        kernel_contracting=kernel_contracting,
    )
    head = Head(split, layer, None if chunk_tokens is None else int(chunk_tokens))
    operands = (x, kernel, bias, accumulator, weight)
    if head.in_chunks:
        operands = reverse_mode_only(operands, _REVERSE_MODE)
    value, lse = _linear_cross_entropy(*operands, labels, head, reduction)
    return (value, lax.stop_gradient(lse)) if as_flag("return_lse", return_lse) else value


def _validate(x, kernel, labels, bias, weight, accumulator, kernel_contracting, reduction) -> None:
    if x.ndim < 1 or kernel.ndim != 2:
        raise ValueError(
            f"x has shape {x.shape} and kernel {kernel.shape}; they must be [*batch, in] and [in, vocab], or "
            "[vocab, in] with kernel_contracting='last'"
        )
    width, vocab = kernel.shape if kernel_contracting == "first" else kernel.shape[::-1]
    if x.shape[-1] != width:
        remedy = ""
        if x.shape[-1] == vocab:
            other = "last" if kernel_contracting == "first" else "first"
            remedy = f": pass hidden states, not logits, or a kernel in this order with kernel_contracting={other!r}"
        raise ValueError(
            f"kernel has shape {kernel.shape}, whose {kernel_contracting} dimension is contracted; the last one of x "
            f"must be the same, and x has shape {x.shape}{remedy}"
        )
    if 0 in kernel.shape:
        raise ValueError(f"kernel has shape {kernel.shape}; only the batch may be empty")
    for name, a, shape in (
        ("x", x, x.shape),
        ("kernel", kernel, kernel.shape),
        ("bias", bias, (vocab,)),
        ("weight", weight, x.shape[:-1]),
        ("wgrad_accumulator", accumulator, kernel.shape),
    ):
        if a is None:
            continue
        if a.dtype not in _FLOATS:
            raise ValueError(f"{name} has dtype {a.dtype}; it must be float32, bfloat16 or float16: cast it")
        if a.shape != shape:
            raise ValueError(
                f"{name} has shape {a.shape}; for x of shape {x.shape} and kernel of shape {kernel.shape} it must be "
                f"{shape}"
            )
    if accumulator is not None:
        varying = sharding.varying_axes(x, kernel, bias, labels, weight)
        validate_accumulator("wgrad_accumulator", accumulator, varying)
    _cross_entropy.validate_labels("x", x.shape, labels, reduction)


def _recipes(x: Array, recipe: Any, products: Any) -> Recipe:
    """Recipes of the three products."""
    fp8.validate_recipe(recipe)
    facts_of_recipe(recipe)  # refuses recipes of products
    if isinstance(recipe, DelayedScaling):
        raise ValueError(f"recipe is {recipe!r}, whose state a loss does not take; use BlockScaling or CurrentScaling")
    known = isinstance(products, tuple | list | set | frozenset) and set(products) <= set(PRODUCTS)
    if not known or not products:
        raise ValueError(f"fp8_products is {products!r}; it must be a tuple of one or more names out of {PRODUCTS}")
    if x.shape[-1] % FP8_ALIGNMENT:
        raise ValueError(
            f"x has shape {x.shape}, {x.shape[-1]} features; FP8 products need a multiple of {FP8_ALIGNMENT}: pad x "
            "and kernel, or use recipe=None"
        )
    return ProductRecipes(**dict.fromkeys(products, recipe))


# Under jit even when called eagerly: sharded operands are then partitioned rather than gathered.
@functools.partial(jax.jit, static_argnums=(6, 7), inline=sharding.INLINE)
def _linear_cross_entropy(x, kernel, bias, accumulator, weight, labels, head: Head, reduction):
    """The loss and lse."""
    loss = head.loss
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
        losses, lse = cast(Any, _per_token(head, *operands, codes))
        return losses * sharding.split_as_last(factor, losses), lse
    if reduction == "mean":
        if weight is None:
            total = jnp.maximum(jnp.sum(counted, dtype=jnp.int32), 1).astype(jnp.float32)
        else:
            total = jnp.sum(factor)
            total = jnp.where(total == 0.0, 1.0, total)
        factor = factor / total
    return _total(head, *operands, codes, factor)


# ---------------------------------------------------------------------------------------------------------- derivatives


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _total(head: Head, x, kernel, bias, accumulator, codes, factor):
    """Σ factor · loss, whose gradients are computed with it, and lse."""
    del accumulator
    results = run(head, Wanted(), x, kernel, bias, None, codes)
    return _sum(factor, results.losses), results.lse


def _sum(factor: Array, losses: Array) -> Array:
    return jnp.sum(sharding.split_as_last(factor, losses) * losses)


def _total_forward(head: Head, *operands):
    wanted = Wanted.of(*operands[:4])
    x, kernel, bias, accumulator, codes, factor = custom_vjp_primal_tree_values(operands)
    if accumulator is not None:
        accumulator = added_once(accumulator, x, factor)
        # For a loss that is scaled afterwards; XLA removes that of the two which is not used.
        wanted = dataclasses.replace(wanted, kernel=wanted.accumulator)
    results = run(head, wanted, x, kernel, bias, accumulator, codes, factor)
    gradients = [
        checkpoint_name(_absent() if a is None else a, "linear_cross_entropy_gradient") for a in results.gradients
    ]
    residuals = (gradients, results.losses, *map(_like, (x, kernel, bias, factor)), accumulator)
    return (_sum(factor, results.losses), results.lse), residuals


def _like(a: Array | None) -> sharding.Layout | None:
    return None if a is None else sharding.Layout.of(a)


def _absent() -> Array:
    """Placeholder for a gradient that is not asked for: JAX wants residuals of one structure, whatever is asked for."""
    return jnp.zeros((0,), jnp.float32)


def _total_backward(head: Head, residuals, cotangents):
    gradients, losses, *layouts, of_factor, accumulator = residuals
    cotangent = _over_replicas(head, cotangents[0])
    dx, dkernel, dbias, following = (None if a.shape == (0,) else a for a in gradients)
    if following is not None:
        assert dkernel is not None
        # XLA sees a cotangent that is 1, and then needs neither the accumulator nor dkernel.
        previous = accumulator.astype(jnp.float32) if head.layer.accumulate else 0.0
        scaled = (previous + cotangent * dkernel).astype(following.dtype)
        following, dkernel = jnp.where(cotangent == 1.0, following, scaled), None
    dx, dkernel, dbias = (
        None if a is None or layout is None else layout.apply(cotangent * a.astype(jnp.float32))
        for a, layout in zip((dx, dkernel, dbias), layouts, strict=True)
    )
    return dx, dkernel, dbias, following, None, of_factor.apply(cotangent * losses)


def _over_replicas(head: Head, cotangent: Any) -> Array:
    if isinstance(cotangent, SymbolicZero):
        cotangent = ad.zeros_like_aval(cotangent.aval)
    return _cross_entropy.over_replicas(cotangent, head.loss.vocab_axis)


_total.defvjp(_total_forward, _total_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _per_token(head: Head, x, kernel, bias, accumulator, codes):
    """The loss of each token, whose gradients are computed when their weights are known, and lse."""
    del accumulator
    results = run(head, Wanted(), x, kernel, bias, None, codes)
    return results.losses, results.lse


def _per_token_forward(head: Head, *operands):
    wanted = Wanted.of(*operands[:4])
    x, kernel, bias, accumulator, codes = custom_vjp_primal_tree_values(operands)
    results = run(head, Wanted(), x, kernel, bias, None, codes)
    lse = checkpoint_name(results.lse, "linear_cross_entropy_lse")
    return (results.losses, lse), (wanted.as_shapes(), x, kernel, bias, accumulator, codes, lse)


def _per_token_backward(head: Head, residuals, cotangents):
    return _gradients_again(head, residuals, _over_replicas(head, cotangents[0]))


# Under jit, or each gradient outside of jit would trace it anew.
@functools.partial(jax.jit, static_argnums=0, inline=sharding.INLINE)
def _gradients_again(head: Head, residuals, cotangent: Array):
    shapes, x, kernel, bias, accumulator, codes, lse = residuals
    wanted = Wanted(*(a.shape == (1,) for a in shapes))
    if accumulator is not None:
        accumulator = added_once(accumulator, x, cotangent)
    gradients = run(head, wanted, x, kernel, bias, accumulator, codes, cotangent, lse).gradients
    dx, dkernel, dbias = (
        None if a is None else sharding.Layout.of(of).apply(a)
        for a, of in ((gradients.x, x), (gradients.kernel, kernel), (gradients.bias, bias))
    )
    return dx, dkernel, dbias, gradients.accumulator, None


_per_token.defvjp(_per_token_forward, _per_token_backward, symbolic_zeros=True)
