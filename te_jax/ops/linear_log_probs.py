"""Log-probabilities of tokens from hidden states, and losses made of them: logits exist for a few thousand tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any, Literal, cast, overload

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer

from te_jax import native, sharding
from te_jax._core.arguments import as_flag
from te_jax.ops import _cross_entropy
from te_jax.ops._cross_entropy import Loss
from te_jax.ops.head.arguments import HeadOperands, differentiated_once, head_of
from te_jax.ops.head.derivatives import per_token, total
from te_jax.ops.head.rows import Head
from te_jax.ops.head.tokens import LogProbs, TokenLoss
from te_jax.ops.linear.arguments import KernelContracting
from te_jax.ops.linear.local import multiplied_as_it_is
from te_jax.ops.linear.weight import Weight
from te_jax.ops.operands import as_array
from te_jax.recipe import Product, Recipe
from te_jax.reference.linear_cross_entropy import without_ignored
from te_jax.reference.softmax_cross_entropy import CrossEntropy, equals
from te_jax.reference.token_distributions import Softmax, log_probs
from te_jax.sharding import AxisName


# fmt: off
@overload
def linear_log_probs(
    x: jax.typing.ArrayLike, kernel: jax.typing.ArrayLike, tokens: jax.typing.ArrayLike, *,
    softmax: Softmax = Softmax(), entropy: Literal[False] = False, bias: jax.typing.ArrayLike | None = None,
    kernel_contracting: KernelContracting = "first", recipe: Recipe | None = None,
    fp8_products: Collection[Product] = ("dgrad", "wgrad"), chunk_tokens: int | None = None,
    vocab_axis: AxisName | None = None, implementation: native.Implementation | None = None,
) -> Array: ...
@overload
def linear_log_probs(
    x: jax.typing.ArrayLike, kernel: jax.typing.ArrayLike, tokens: jax.typing.ArrayLike, *,
    softmax: Softmax = Softmax(), entropy: Literal[True], bias: jax.typing.ArrayLike | None = None,
    kernel_contracting: KernelContracting = "first", recipe: Recipe | None = None,
    fp8_products: Collection[Product] = ("dgrad", "wgrad"), chunk_tokens: int | None = None,
    vocab_axis: AxisName | None = None, implementation: native.Implementation | None = None,
) -> tuple[Array, Array]: ...
# fmt: on
def linear_log_probs(
    x: jax.typing.ArrayLike,
    kernel: jax.typing.ArrayLike,
    tokens: jax.typing.ArrayLike,
    *,
    softmax: Softmax = Softmax(),
    entropy: bool = False,
    bias: jax.typing.ArrayLike | None = None,
    kernel_contracting: KernelContracting = "first",
    recipe: Recipe | None = None,
    fp8_products: Collection[Product] = ("dgrad", "wgrad"),
    chunk_tokens: int | None = None,
    vocab_axis: AxisName | None = None,
    implementation: native.Implementation | None = None,
) -> Array | tuple[Array, Array]:
    r"""log p(token) of p = softmax(x · kernel + bias), without an array of all logits.

    It takes tokens in chunks, and computes the logits of a chunk again in the backward pass. Where a loss follows from
    these numbers token by token, `linear_token_loss` needs one product less.

    Args:
      x: [*batch, in], float32, bfloat16 or float16: the hidden states. Sharded in any way.
      kernel: [in, vocab], or [vocab, in] for kernel_contracting="last"; float32, bfloat16 or float16.
      tokens: [*batch], any integer dtype, in [0, vocab) or `softmax.ignore_index`.
      softmax: temperature and soft cap of the logits, and which tokens do not count.
      entropy: return the entropy -Σ p log p of each row, too.
      bias, kernel_contracting, recipe, fp8_products, chunk_tokens, vocab_axis, implementation: as in
        `linear_cross_entropy`.

    Returns:
      float32 [*batch], in nats; with entropy a tuple of that and the entropies. Both have gradients.

    Raises:
      ValueError: for arguments that break a rule above, naming the argument.
      NotImplementedError: for forward mode and second derivatives with native kernels.
      te_jax.native.NativeUnavailableError: implementation cannot run here, or this GPU cannot multiply as recipe says.

    Examples:
      >>> import jax.numpy as jnp, te_jax
      >>> x, kernel, tokens = jnp.ones((4, 8)), jnp.zeros((8, 16)), jnp.array([0, 3, 5, -100])
      >>> log_probs, entropies = te_jax.ops.linear_log_probs(x, kernel, tokens, entropy=True)
      >>> [round(float(value), 2) for value in (log_probs[0], log_probs[3], entropies[0])]
      [-2.77, 0.0, 2.77]
    """
    rows = _rows(softmax, vocab_axis, entropy=as_flag("entropy", entropy))
    operands, tokens = _operands(x, kernel, bias, tokens, kernel_contracting)
    head = head_of(
        "te_jax.ops.linear_log_probs",
        rows,
        operands,
        kernel_contracting=kernel_contracting,
        recipe=recipe,
        fp8_products=fp8_products,
        chunk_tokens=chunk_tokens,
        implementation=implementation,
    )
    if head.in_chunks:
        operands = differentiated_once(head.layer.name, operands)
    log_probs, entropies = _linear_log_probs(*operands[:3], tokens, head)
    return (log_probs, entropies) if entropy else log_probs


# fmt: off
@overload
def linear_token_loss(
    x: jax.typing.ArrayLike, kernel: jax.typing.ArrayLike, tokens: jax.typing.ArrayLike, fn: Callable[..., Array],
    *arrays: jax.typing.ArrayLike, softmax: Softmax = Softmax(), entropy: bool = False,
    reduction: Literal["mean", "sum"] = "mean", return_log_probs: Literal[False] = False,
    bias: jax.typing.ArrayLike | None = None, kernel_contracting: KernelContracting = "first",
    recipe: Recipe | None = None, fp8_products: Collection[Product] = ("dgrad", "wgrad"),
    chunk_tokens: int | None = None, vocab_axis: AxisName | None = None,
    implementation: native.Implementation | None = None,
) -> Array: ...
@overload
def linear_token_loss(
    x: jax.typing.ArrayLike, kernel: jax.typing.ArrayLike, tokens: jax.typing.ArrayLike, fn: Callable[..., Array],
    *arrays: jax.typing.ArrayLike, softmax: Softmax = Softmax(), entropy: bool = False,
    reduction: Literal["mean", "sum"] = "mean", return_log_probs: Literal[True],
    bias: jax.typing.ArrayLike | None = None, kernel_contracting: KernelContracting = "first",
    recipe: Recipe | None = None, fp8_products: Collection[Product] = ("dgrad", "wgrad"),
    chunk_tokens: int | None = None, vocab_axis: AxisName | None = None,
    implementation: native.Implementation | None = None,
) -> tuple[Array, Array]: ...
# fmt: on
def linear_token_loss(
    x: jax.typing.ArrayLike,
    kernel: jax.typing.ArrayLike,
    tokens: jax.typing.ArrayLike,
    fn: Callable[..., Array],
    *arrays: jax.typing.ArrayLike,
    softmax: Softmax = Softmax(),
    entropy: bool = False,
    reduction: Literal["mean", "sum"] = "mean",
    return_log_probs: bool = False,
    bias: jax.typing.ArrayLike | None = None,
    kernel_contracting: KernelContracting = "first",
    recipe: Recipe | None = None,
    fp8_products: Collection[Product] = ("dgrad", "wgrad"),
    chunk_tokens: int | None = None,
    vocab_axis: AxisName | None = None,
    implementation: native.Implementation | None = None,
) -> Array | tuple[Array, Array]:
    r"""The mean of `fn(log p(token), *arrays)`, a policy's loss, without an array of all logits.

    fn says what a token's loss is: PPO, GRPO, DAPO, REINFORCE, DPO's terms. Its derivative is taken chunk by chunk in
    the forward pass, while the logits exist: three GEMMs, as in `linear_cross_entropy`, where a loss of
    `linear_log_probs` takes four.

    Args:
      x, kernel, tokens: as in `linear_log_probs`.
      fn: of arrays of one shape, elementwise. It must not close over traced arrays: give them as `arrays`. Define it
        once; for another function the operation is compiled again.
      arrays: what fn takes beside the log-probability, such as advantages; each is broadcast to [*batch]. Those of
        floats have gradients.
      entropy: call fn(log p, entropy, *arrays) with the entropy -Σ p log p of each row.
      reduction: "mean" over the tokens that are not ignored (at least 1), or "sum".
      return_log_probs: return the log-probabilities, too; they have no gradient.
      softmax, bias, kernel_contracting, recipe, fp8_products, chunk_tokens, vocab_axis, implementation: as in
        `linear_log_probs`.

    Returns:
      float32 scalar; with return_log_probs a tuple of that and float32 [*batch].

    Raises:
      ValueError: for arguments that break a rule above, naming the argument.
      NotImplementedError: for forward mode and second derivatives with native kernels.
      te_jax.native.NativeUnavailableError: implementation cannot run here, or this GPU cannot multiply as recipe says.

    References:
      PPO: arXiv:1707.06347. GRPO: arXiv:2402.03300. DAPO: arXiv:2503.14476.

    Examples:
      >>> import jax, jax.numpy as jnp, te_jax
      >>> def ppo(log_prob, before, advantage):
      ...     ratio = jnp.exp(log_prob - before)
      ...     return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
      >>> x, kernel, tokens = jnp.ones((4, 8)), jnp.zeros((8, 16)), jnp.array([0, 3, 5, -100])
      >>> before, advantages = jnp.full((4,), -2.7726), jnp.array([1.0, 1.0, -1.0, 0.0])
      >>> def loss(kernel):
      ...     return te_jax.ops.linear_token_loss(x, kernel, tokens, ppo, before, advantages)
      >>> value, gradient = jax.value_and_grad(loss)(kernel)
      >>> round(float(value), 3), gradient.shape
      (-0.333, (8, 16))
    """
    rows = _rows(softmax, vocab_axis, entropy=as_flag("entropy", entropy))
    operands, tokens = _operands(x, kernel, bias, tokens, kernel_contracting)
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; it must be 'mean' or 'sum': for each token use linear_log_probs")
    extras = _broadcast(arrays, tokens)
    _validate_function(fn, extras, entropy=rows.entropy)
    names = tuple(f"array{i}" for i in range(len(extras)))
    derived = tuple(name for name, a in zip(names, extras, strict=True) if jnp.issubdtype(a.dtype, jnp.floating))
    head = head_of(
        "te_jax.ops.linear_token_loss",
        TokenLoss(vocab_axis=rows.vocab_axis, log_probs=rows, function=fn, arrays=names, derived=derived),
        operands,
        kernel_contracting=kernel_contracting,
        recipe=recipe,
        fp8_products=fp8_products,
        chunk_tokens=chunk_tokens,
        implementation=implementation,
    )
    if head.in_chunks:
        operands, extras = differentiated_once(head.layer.name, (operands, extras))
    value, log_probs = _linear_token_loss(*operands[:3], tokens, extras, head, reduction)
    return (value, lax.stop_gradient(log_probs)) if as_flag("return_log_probs", return_log_probs) else value


def _rows(softmax: Softmax, vocab_axis: AxisName | None, *, entropy: bool) -> LogProbs:
    """Raises ValueError where an argument breaks a rule."""
    return LogProbs(vocab_axis=split_of(softmax, vocab_axis).vocab_axis, softmax=softmax, entropy=entropy)


def split_of(softmax: Softmax, vocab_axis: AxisName | None) -> Loss:
    """The cross-entropy with the same logits. Raises ValueError where an argument breaks a rule."""
    if not isinstance(softmax, Softmax):
        raise ValueError(f"softmax is {softmax!r}; it must be a te_jax.ops.Softmax, such as Softmax(temperature=0.7)")
    loss = CrossEntropy(ignore_index=softmax.ignore_index, logit_softcap=softmax.logit_softcap)
    return Loss.of(loss, vocab_axis)


def _operands(
    x: jax.typing.ArrayLike,
    kernel: jax.typing.ArrayLike,
    bias: jax.typing.ArrayLike | None,
    tokens: jax.typing.ArrayLike,
    kernel_contracting: KernelContracting,
) -> tuple[HeadOperands, Array]:
    operands = HeadOperands.of(x, kernel, bias, kernel_contracting=kernel_contracting)
    tokens = as_array("tokens", tokens)
    _cross_entropy.validate_labels("x", operands.x.shape, tokens, "none", "tokens")
    return operands, tokens


def _broadcast(arrays: tuple[jax.typing.ArrayLike, ...], tokens: Array) -> list[Array]:
    extras = []
    for i, each in enumerate(arrays):
        a = as_array(f"arrays[{i}]", each)
        try:
            extras.append(jnp.broadcast_to(a, tokens.shape))
        except ValueError as error:
            raise ValueError(
                f"arrays[{i}] has shape {a.shape}, which does not broadcast to that of tokens, {tokens.shape}"
            ) from error
    return extras


def _validate_function(fn: Callable[..., Any], extras: list[Array], *, entropy: bool) -> None:
    """Raises ValueError unless fn is elementwise as far as shapes say, and closes over nothing that is traced."""
    tokens = jax.ShapeDtypeStruct((3,), jnp.float32)
    operands = [tokens] * (1 + entropy) + [jax.ShapeDtypeStruct((3,), a.dtype) for a in extras]
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(*operands)
    if any(isinstance(constant, Tracer) for constant in closed.consts):
        raise ValueError("fn closes over a traced array: give it to linear_token_loss as one of arrays")
    if getattr(shape, "shape", None) != (3,) or not jnp.issubdtype(shape.dtype, jnp.floating):
        raise ValueError(f"fn returns {shape} for arrays of shape (3,); it must return floats of that shape")


@functools.partial(jax.jit, static_argnums=4, inline=sharding.INLINE)
def _linear_log_probs(x, kernel, bias, tokens, head: Head) -> tuple[Array, Array]:
    rows = cast(LogProbs, head.rows)
    if not head.in_chunks:
        return _of_all_logits(x, kernel, bias, tokens, head, rows)
    codes = _codes_of(tokens, rows, kernel.shape[head.vocab_axis])
    x, kernel, bias = sharding.varying_together((x, kernel, bias))
    return cast(tuple[Array, Array], per_token(head, x, kernel, bias, None, {"codes": codes}))


@functools.partial(jax.jit, static_argnums=(5, 6), inline=sharding.INLINE)
def _linear_token_loss(x, kernel, bias, tokens, extras, head: Head, reduction: str) -> tuple[Array, Array]:
    rows = cast(TokenLoss, head.rows)
    counted = ~equals(tokens, rows.log_probs.softmax.ignore_index)
    factor = counted.astype(jnp.float32)
    if reduction == "mean":
        factor /= jnp.maximum(jnp.sum(counted, dtype=jnp.int32), 1).astype(jnp.float32)
    if not head.in_chunks:
        pair = _of_all_logits(x, kernel, bias, tokens, head, rows.log_probs)
        values = rows.function(*pair[: 1 + rows.log_probs.entropy], *extras)
        return jnp.sum(jnp.where(counted, factor * values.astype(jnp.float32), 0.0)), pair[0]
    codes = _codes_of(tokens, rows.log_probs, kernel.shape[head.vocab_axis])
    varying = sharding.varying_axes(x, kernel, bias, tokens, *extras) - frozenset(rows.vocab_axis)
    named = {"factor": factor, **dict(zip(rows.arrays, extras, strict=True))}
    named = {name: sharding.varying_over(sharding.split_as_last(a, tokens), varying) for name, a in named.items()}
    x, kernel, bias = sharding.varying_together((x, kernel, bias))
    return cast(tuple[Array, Array], total(head, x, kernel, bias, None, {"codes": codes, **named}))


def _codes_of(tokens: Array, rows: LogProbs, local_vocab: int) -> Array:
    """Codes of tokens, as the kernels of the cross-entropy take them."""
    loss = Loss(ignore_index=rows.softmax.ignore_index, vocab_axis=rows.vocab_axis)
    return loss.codes(tokens, loss.whole_vocab(local_vocab))


def all_logits(x: Array, kernel: Array, bias: Array | None, head: Head) -> Array:
    """Logits of all tokens at once."""
    products = dataclasses.replace(head.layer, batch_ndim=x.ndim - 1).plain()
    return multiplied_as_it_is((products, None), x, Weight(kernel, bias))


def _of_all_logits(x, kernel, bias, tokens, head: Head, rows: LogProbs) -> tuple[Array, Array]:
    logits = all_logits(without_ignored(x, tokens, rows.softmax.ignore_index), kernel, bias, head)
    return log_probs(logits, tokens, rows.softmax, vocab_axis=rows.vocab_axis)
