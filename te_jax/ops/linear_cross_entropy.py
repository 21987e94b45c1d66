"""The output head and its cross-entropy together: logits exist for a few thousand tokens at a time, and never twice."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jax.interpreters import ad

from te_jax import native, sharding
from te_jax._core import observe
from te_jax._core.arguments import as_flag, is_whole_number
from te_jax._core.reverse_mode import reverse_mode_only
from te_jax._core.types import FP8_ALIGNMENT
from te_jax.ops import _cross_entropy
from te_jax.ops._cross_entropy import IGNORED, Loss, Reduction, where_counted
from te_jax.ops._quantize_kernels import Request, shared_facts
from te_jax.ops.linear import fp8
from te_jax.ops.linear.accumulator import added_once, validate_accumulated, validate_accumulator
from te_jax.ops.linear.arguments import KernelContracting, implementation_for
from te_jax.ops.linear.codec import Codec, codecs_of
from te_jax.ops.linear.compared import compared
from te_jax.ops.linear.local import LocalProducts, multiplied_as_it_is
from te_jax.ops.linear.weight import Weight
from te_jax.ops.operands import as_array
from te_jax.quantized import QuantizedArray, facts_of_recipe
from te_jax.recipe import PRODUCTS, DelayedScaling, Product, ProductRecipes, Recipe, Role
from te_jax.reference.linear_cross_entropy import loss_of_logits, without_ignored
from te_jax.reference.softmax_cross_entropy import CrossEntropy, equals
from te_jax.sharding import AxisName

_NAME = "te_jax.ops.linear_cross_entropy"
_REVERSE_MODE = (
    "te_jax.ops.linear_cross_entropy with native kernels has first derivatives in reverse mode (jax.grad, jax.vjp) "
    "only: for forward mode (jax.jvp, jax.jacfwd) or second derivatives use implementation='reference'"
)
_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)

_CHUNK_BYTES = 900_000_000
"""Of logits, twice as many with a recipe. From a chunk to the next the weight gradient is read and written once more,
which takes a larger share of a faster product."""

_CHUNK_MULTIPLE = 1024
"""Of tokens: tiles of the input gradient then fill a GPU's multiprocessors."""

_LEAST_CHUNK = 2048
"""With fewer tokens, reading and writing the weight gradient takes as long as its product."""

_MOST_UNROLLED = 4
"""Chunks, after the first, that are not made a loop, in which products took 1% longer."""

_ALIGNMENT = 16
"""Columns of 16-bit logits: GEMMs of other widths are slow, and FP8 has none."""


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
    head = _Head(split, layer, None if chunk_tokens is None else int(chunk_tokens))
    operands = (x, kernel, bias, accumulator, weight)
    if head.in_chunks:
        operands = reverse_mode_only(operands, _REVERSE_MODE)
    value, lse = _linear_cross_entropy(*operands, labels, head, reduction)
    return (value, lax.stop_gradient(lse)) if as_flag("return_lse", return_lse) else value


@dataclasses.dataclass(frozen=True)
class _Head:
    """The static arguments, together: hashable, so that a head is traced once."""

    loss: Loss
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
        """Of the products in FP8, if there are any."""
        return next((codec for codec in self.layer.codecs if codec.in_fp8), None)

    @property
    def in_chunks(self) -> bool:
        """Whether tokens are taken in chunks, by rules of derivatives of its own."""
        return self.by_kernels or self.codec is not None

    def in_fp8(self, product: Product) -> bool:
        return self.layer.codec(product).in_fp8


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
    """Those of the three products."""
    fp8.validate_recipe(recipe)
    facts_of_recipe(recipe)  # which several recipes have not
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
def _linear_cross_entropy(x, kernel, bias, accumulator, weight, labels, head: _Head, reduction):
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
def _total(head: _Head, x, kernel, bias, accumulator, codes, factor):
    """Σ factor · loss, whose gradients are computed with it, and lse."""
    del accumulator
    found = _run(head, _Wanted(), x, kernel, bias, None, codes)
    return _sum(factor, found.losses), found.lse


def _sum(factor: Array, losses: Array) -> Array:
    return jnp.sum(sharding.split_as_last(factor, losses) * losses)


def _total_forward(head: _Head, *operands):
    wanted = _Wanted.of(*operands[:4])
    x, kernel, bias, accumulator, codes, factor = custom_vjp_primal_tree_values(operands)
    if accumulator is not None:
        accumulator = added_once(accumulator, x, factor)
        # For a loss that is scaled afterwards; XLA removes that of the two which is not used.
        wanted = dataclasses.replace(wanted, kernel=wanted.accumulator)
    found = _run(head, wanted, x, kernel, bias, accumulator, codes, factor)
    gradients = [
        checkpoint_name(_absent() if a is None else a, "linear_cross_entropy_gradient") for a in found.gradients
    ]
    residuals = (gradients, found.losses, *map(_like, (x, kernel, bias, factor)), accumulator)
    return (_sum(factor, found.losses), found.lse), residuals


def _like(a: Array | None) -> sharding.Layout | None:
    return None if a is None else sharding.Layout.of(a)


def _absent() -> Array:
    """What stands for a gradient that is not asked for: JAX wants residuals of one structure, whatever is asked for."""
    return jnp.zeros((0,), jnp.float32)


def _total_backward(head: _Head, residuals, cotangents):
    gradients, losses, *layouts, of_factor, accumulator = residuals
    cotangent = _over_replicas(head, cotangents[0])
    dx, dkernel, dbias, following = (None if a.shape == (0,) else a for a in gradients)
    if following is not None:
        assert dkernel is not None
        # XLA sees a cotangent that is 1, and then needs neither the accumulator nor dkernel.
        others = accumulator.astype(jnp.float32) if head.layer.accumulate else 0.0
        scaled = (others + cotangent * dkernel).astype(following.dtype)
        following, dkernel = jnp.where(cotangent == 1.0, following, scaled), None
    dx, dkernel, dbias = (
        None if a is None or layout is None else layout.apply(cotangent * a.astype(jnp.float32))
        for a, layout in zip((dx, dkernel, dbias), layouts, strict=True)
    )
    return dx, dkernel, dbias, following, None, of_factor.apply(cotangent * losses)


def _over_replicas(head: _Head, cotangent: Any) -> Array:
    if isinstance(cotangent, SymbolicZero):
        cotangent = ad.zeros_like_aval(cotangent.aval)
    return _cross_entropy.over_replicas(cotangent, head.loss.vocab_axis)


_total.defvjp(_total_forward, _total_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _per_token(head: _Head, x, kernel, bias, accumulator, codes):
    """The loss of each token, whose gradients are computed when their weights are known, and lse."""
    del accumulator
    found = _run(head, _Wanted(), x, kernel, bias, None, codes)
    return found.losses, found.lse


def _per_token_forward(head: _Head, *operands):
    wanted = _Wanted.of(*operands[:4])
    x, kernel, bias, accumulator, codes = custom_vjp_primal_tree_values(operands)
    found = _run(head, _Wanted(), x, kernel, bias, None, codes)
    lse = checkpoint_name(found.lse, "linear_cross_entropy_lse")
    return (found.losses, lse), (wanted.as_shapes(), x, kernel, bias, accumulator, codes, lse)


def _per_token_backward(head: _Head, residuals, cotangents):
    return _gradients_again(head, residuals, _over_replicas(head, cotangents[0]))


# Under jit, or each gradient outside of jit would trace it anew.
@functools.partial(jax.jit, static_argnums=0, inline=sharding.INLINE)
def _gradients_again(head: _Head, residuals, cotangent: Array):
    shapes, x, kernel, bias, accumulator, codes, lse = residuals
    wanted = _Wanted(*(a.shape == (1,) for a in shapes))
    if accumulator is not None:
        accumulator = added_once(accumulator, x, cotangent)
    gradients = _run(head, wanted, x, kernel, bias, accumulator, codes, cotangent, lse).gradients
    dx, dkernel, dbias = (
        None if a is None else sharding.Layout.of(of).apply(a)
        for a, of in ((gradients.x, x), (gradients.kernel, kernel), (gradients.bias, bias))
    )
    return dx, dkernel, dbias, gradients.accumulator, None


_per_token.defvjp(_per_token_forward, _per_token_backward, symbolic_zeros=True)


# ----------------------------------------------------------------------------------------------------------- all chunks


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """Which gradients are asked for: that of the kernel by itself, added to the accumulator, or both."""

    x: bool = False
    kernel: bool = False
    bias: bool = False
    accumulator: bool = False

    @classmethod
    def of(cls, x: Any, kernel: Any, bias: Any, accumulator: Any) -> _Wanted:
        """From operands as custom_vjp hands them over with symbolic_zeros."""
        if accumulator is not None:
            validate_accumulated(kernel.perturbed, accumulator.perturbed)
        perturbed = [a is not None and a.perturbed for a in (x, kernel, bias, accumulator)]
        return cls(perturbed[0], perturbed[1] and accumulator is None, *perturbed[2:])

    def as_shapes(self) -> list[Array]:
        """As residuals, whose structure must not depend on it."""
        return [jnp.zeros((flag,), bool) for flag in dataclasses.astuple(self)]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(self) if getattr(self, field.name))


class _Gradients(NamedTuple):
    """None for what is not asked for; that of kernel is float32."""

    x: Array | None
    kernel: Array | None
    bias: Array | None
    accumulator: Array | None


class _Found(NamedTuple):
    losses: Array
    lse: Array
    gradients: _Gradients


def _run(head: _Head, wanted: _Wanted, x, kernel, bias, accumulator, codes, factor=None, lse=None) -> _Found:
    """Losses, lse and the gradients of Σ factor · loss. Given lse, losses are not computed, and are lse."""
    given = {
        "x": x,
        "kernel": kernel,
        "codes": codes,
        "bias": bias,
        "factor": factor if wanted.names else None,
        "lse": lse,
        "accumulator": accumulator if wanted.accumulator else None,
    }
    names = tuple(name for name, a in given.items() if a is not None)
    call: Any = _per_shard(head, wanted, names, x.ndim - 1)
    if observe.requested() is not None and head.codec is not None and not head.loss.vocab_axis:
        call = call.observable
    axes = {"v": head.loss.vocab_axis} if head.loss.vocab_axis else None
    options = {} if axes is None else {"axes": axes}
    losses, lse, *gradients = call(*(given[name] for name in names), **options)
    named = dict(zip(wanted.names, gradients, strict=True))
    return _Found(losses, lse, _Gradients(*(named.get(field) for field in _Gradients._fields)))


@functools.cache
def _per_shard(head: _Head, wanted: _Wanted, names: tuple[str, ...], batch_ndim: int) -> Callable[..., Any]:
    batch = [f"b{i}" for i in range(batch_ndim)]
    tokens = " ".join(["...", *batch])
    terms = {
        "x": f"{tokens} h",
        "kernel": f"... {head.kernel_dimensions}",
        "bias": "... v",
        "accumulator": f"... {head.kernel_dimensions}",
    }
    results = [tokens, tokens, *(terms[name] for name in wanted.names)]

    @sharding.per_shard(
        f"{', '.join(terms.get(name, tokens) for name in names)} -> {', '.join(results)}",
        axes_of=(*batch, "v"),
        replicated=("h",),
    )
    def local(*operands: Array, axes: Mapping[str, Sequence[str]]) -> tuple[Array, ...]:
        token_axes = tuple(axis for factor in batch for axis in axes.get(factor, ()))
        run = functools.partial(_run_locally, head, wanted, token_axes, tuple(axes.get("v", ())))
        for _ in range(operands[0].ndim - batch_ndim - 1):
            run = jax.vmap(run)
        return run(dict(zip(names, operands, strict=True)))

    return local


def _run_locally(head: _Head, wanted: _Wanted, token_axes, vocab_axes, given: dict[str, Array]) -> tuple[Array, ...]:
    """(losses, lse, *gradients) on one device's arrays, without more batch dimensions than x has."""
    x, kernel, accumulator = given["x"], given["kernel"], given.get("accumulator")
    batch, axis, vocab = x.shape[:-1], head.vocab_axis, given["kernel"].shape[head.vocab_axis]
    alone = not token_axes  # what devices have is not added up
    chunks = _Chunks(head, wanted, vocab_axes, kernel, given.get("bias"), accumulator if alone else None, x.dtype)
    pieces = {name: given[name].reshape(-1, *given[name].shape[len(batch) :]) for name in _PER_TOKEN & set(given)}

    tokens = math.prod(batch)
    rows = head.chunk_tokens or chunk_tokens(tokens, vocab + chunks.padding, x.dtype.itemsize, head.codec is not None)
    more = max(0, -(-tokens // rows) - 1)
    first = tokens - more * rows
    totals, found = chunks.step(
        _Totals(None, None, accumulator if chunks.in_place else None),
        {name: a[:first] for name, a in pieces.items()},
        first=True,
    )
    rest = {name: a[first:].reshape(more, rows, *a.shape[1:]) for name, a in pieces.items()}
    if more > _MOST_UNROLLED or (more and not wanted.names):
        totals, others = lax.scan(chunks.step, totals, rest)
        found = [jnp.concatenate([a, b.reshape(-1, *b.shape[2:])]) for a, b in zip(found, others, strict=True)]
    elif more:
        each = [found]
        for i in range(more):
            piece = {name: a[i] for name, a in rest.items()}
            # Or XLA might compute the logits of all chunks first. What passes one barrier varies over the same axes.
            if wanted.x:
                piece["x"], each[-1][-1] = lax.optimization_barrier((piece["x"], each[-1][-1]))
            piece["x"], totals = lax.optimization_barrier((piece["x"], totals))
            totals, found = chunks.step(totals, piece)
            each.append(found)
        found = [jnp.concatenate(parts) for parts in zip(*each, strict=True)]
    if wanted.x:
        found[-1] = chunks.summed(found[-1])
    found = [a.reshape(*batch, *a.shape[1:]) for a in found]

    dkernel, dbias = (
        None if a is None else lax.slice_in_dim(a, 0, vocab, axis=along)
        for a, along in ((totals.kernel, axis), (totals.bias, 0))
    )
    if token_axes:
        dkernel, dbias = lax.psum((dkernel, dbias), token_axes)
    following = totals.accumulator
    if accumulator is not None and not chunks.in_place:
        assert dkernel is not None
        if head.layer.accumulate:
            following = (accumulator.astype(jnp.float32) + dkernel).astype(accumulator.dtype)
        else:  # the buffer is written over: an argument that is not mentioned at all would not be donated
            following = lax.dynamic_update_slice(accumulator, dkernel.astype(accumulator.dtype), (0, 0))
    gradients = {"x": found[-1], "kernel": dkernel, "bias": dbias, "accumulator": following}
    return *found[:2], *(gradients[name] for name in wanted.names)


_PER_TOKEN = {"x", "codes", "factor", "lse"}


def chunk_tokens(tokens: int, vocab: int, itemsize: int, in_fp8: bool) -> int:
    """The number of tokens in a chunk; the first one has what is left."""
    most = _CHUNK_BYTES * (1 + in_fp8) // (vocab * itemsize) // _CHUNK_MULTIPLE * _CHUNK_MULTIPLE
    count = -(-tokens // max(most, _LEAST_CHUNK))
    return max(1, tokens) if count <= 1 else -(-tokens // (count * _CHUNK_MULTIPLE)) * _CHUNK_MULTIPLE


class _Totals(NamedTuple):
    """Sums over chunks: of the gradients of kernel and bias, padded as `_Chunks` says, and the accumulator with that
    of kernel. None for none so far."""

    kernel: Any
    bias: Any
    accumulator: Any


# ------------------------------------------------------------------------------------------------------------ one chunk


class _Chunks:
    """What all chunks have in common: the kernel as products read it, and how a chunk is computed.

    `padding` columns of zeros follow the kernel, whose logits do not count. With `in_place` products add to the
    accumulator.
    """

    def __init__(
        self,
        head: _Head,
        wanted: _Wanted,
        vocab_axes,
        kernel: Array,
        bias: Array | None,
        accumulator: Array | None,
        dtype: Any,
    ):
        axis, vocab = head.vocab_axis, kernel.shape[head.vocab_axis]
        self.head, self.wanted, self.vocab_axes, self.dtype = head, wanted, vocab_axes, dtype
        self.padding = -vocab % _ALIGNMENT if dtype.itemsize == 2 or head.codec else 0
        self.in_place = accumulator is not None and not self.padding and accumulator.dtype == jnp.float32
        self.with_wgrad = wanted.kernel or wanted.accumulator
        # The whole vocabulary: Auto and Explicit axes split it, or those of vocab_axis.
        self.vocab = vocab * (lax.axis_size(vocab_axes) if vocab_axes else 1)
        self.links = observe.links_of([kernel] if head.codec else [])
        kernel, bias = kernel.astype(dtype), None if bias is None else bias.astype(dtype)
        if self.padding:
            kernel = jnp.pad(kernel, [(0, self.padding if i == axis else 0) for i in range(2)])
            bias = None if bias is None else jnp.pad(bias, (0, self.padding))
        self.kernel, self.bias = kernel, bias
        self.kernel8: Any = None
        if self._in_fp8("forward") or self._in_fp8("dgrad"):
            self.kernel8 = self._quantized("kernel", kernel, self._in_fp8("forward"), self._in_fp8("dgrad"))

    def _quantized(self, role: Role, x: Array, first_copy: bool, second_copy: bool) -> QuantizedArray:
        layer, codec = self.head.layer, self.head.codec
        assert codec is not None
        with layer.observed_for(self.links):
            return layer.quantized(codec, role, x, None, first_copy=first_copy, second_copy=second_copy).array

    def _in_fp8(self, product: Any) -> bool:
        """Whether a product is computed, and in FP8."""
        return self.head.in_fp8(product) and {"dgrad": self.wanted.x, "wgrad": self.with_wgrad}.get(product, True)

    @property
    def _compares(self) -> bool:
        request = observe.requested()
        return request is not None and request.results

    def _compared(self, product: Product, value: Array, plain: Callable[[], Array]) -> Array:
        """The result of a product in FP8, with its errors where they are asked for."""
        return compared(product, "linear_cross_entropy", value, plain(), self.links, 1) if self._compares else value

    def step(self, totals: _Totals, piece: dict[str, Array], *, first: bool = False):
        """Totals with those of a chunk, and for its tokens [losses, lse], and dx where it is asked for."""
        head, loss, codes, lse = self.head, self.head.loss, piece["codes"], piece.get("lse")
        x = jnp.where(codes[:, None] == IGNORED, jnp.zeros((), self.dtype), piece["x"])  # 0 · NaN would reach dkernel
        logits = self._logits(x)
        if not self.wanted.names:
            return totals, self._losses(codes, self._statistics(logits, codes))
        columns = _cross_entropy.local_codes(codes, self._local_vocab, self.vocab_axes) if self.vocab_axes else codes
        attributes: Any = loss.gradient_attributes(self.vocab) | {"softcap": loss.softcap, "padding": self.padding}
        weight = where_counted(codes, piece["factor"])
        statistics, dlogits8 = None, None
        if lse is None and head.codec is None and not self.vocab_axes:
            with_total = loss.label_smoothing > 0.0
            *statistics, dlogits = _cross_entropy.statistics_and_gradient(
                logits, codes, weight, with_total=with_total, **attributes
            )
            found = self._losses(codes, statistics)
        else:
            if lse is None:
                statistics = self._statistics(logits, codes)
                lse = statistics[0]
            dlogits, dlogits8 = self._gradient(logits, columns, lse, weight, attributes)
            found = [lse, lse] if statistics is None else self._losses(codes, statistics)
        dx, totals = self._products(totals, x, dlogits, dlogits8, first)
        return totals, [*found, *([dx] if self.wanted.x else [])]

    def summed(self, dx: Array) -> Array:
        """dx of all shards of the vocabulary. Inside shard_map JAX, or the user, adds up."""
        return lax.psum(dx, self.vocab_axes) if self.vocab_axes and not self.head.loss.vocab_axis else dx

    def _gradient(self, logits: Array, columns: Array, lse: Array, weight: Array, attributes: dict[str, Any]):
        """The gradient of the logits, as it is and in FP8, as far as products read it."""
        head, wanted, codec = self.head, self.wanted, self.head.codec
        if codec is None:
            return _cross_entropy.logits_gradient(logits, columns, lse, weight, axes={}, **attributes)[0], None
        for_dgrad, for_wgrad = self._in_fp8("dgrad"), self._in_fp8("wgrad")
        copies: Any = "both" if for_dgrad and for_wgrad else "data" if for_dgrad else "transposed"
        as_it_is = self.links or wanted.bias or for_dgrad != wanted.x or for_wgrad != self.with_wgrad
        quantization = codec.quantization("gradient", head.layer.kernel_contracting)
        request = Request(quantization, 1, copies, (), (), with_amax=False, with_dbias=False)
        if not as_it_is and head.by_kernels and shared_facts(request).in_blocks:
            return None, _cross_entropy.quantized_gradient(logits, columns, lse, weight, request, **attributes)
        (plain,) = _cross_entropy.logits_gradient(
            logits, columns, lse, weight, axes={}, use_native=head.by_kernels, **attributes
        )
        if not (for_dgrad or for_wgrad):
            return plain, None
        return plain, self._quantized("gradient", plain, for_dgrad, for_wgrad)

    @property
    def _local_vocab(self) -> int:
        return self.kernel.shape[self.head.vocab_axis] - self.padding

    def _logits(self, x: Array) -> Array:
        head = self.head
        if head.in_fp8("forward"):
            x8 = self._quantized("activation", x, True, False)
            logits = head.layer.gemm("forward", x8, self.kernel8, bias=self.bias, out_dtype=self.dtype)
            return self._compared("forward", logits, functools.partial(self._plain_logits, x))
        return self._plain_logits(x)

    def _plain_logits(self, x: Array) -> Array:
        logits = _dot(x, self.kernel, (1, 1 - self.head.vocab_axis), self.dtype)
        return logits if self.bias is None else logits + self.bias[None, :]

    def _statistics(self, logits: Array, codes: Array) -> tuple[Array, ...]:
        return _cross_entropy.row_statistics(
            logits,
            codes,
            with_total=self.head.loss.label_smoothing > 0.0,
            softcap=self.head.loss.softcap,
            padding=self.padding,
            use_native=self.head.by_kernels,
            axes={"v": self.vocab_axes} if self.vocab_axes else {},
        )

    def _losses(self, codes: Array, statistics: Sequence[Array]) -> list[Array]:
        return [self.head.loss.of_rows(codes, statistics, self.vocab), statistics[0]]

    def _products(self, totals: _Totals, x: Array, dlogits: Any, dlogits8: Any, first: bool):
        """dx of a chunk, and the totals."""
        head, dx, dbias = self.head, None, None
        if self.wanted.bias:
            dbias = jnp.sum(dlogits, axis=0, dtype=jnp.float32) + (0.0 if first else totals.bias)
        if self.wanted.x:
            plain = functools.partial(_dot, dlogits, self.kernel, (1, head.vocab_axis), self.dtype)
            if head.in_fp8("dgrad"):
                dx = head.layer.gemm("dgrad", dlogits8, self.kernel8, out_dtype=self.dtype)
                dx = self._compared("dgrad", dx, plain)
            else:
                dx = plain()
        return dx, _Totals(None, dbias, None)._replace(**self._wgrads(totals, x, dlogits, dlogits8, first))

    def _wgrads(self, totals: _Totals, x: Array, dlogits: Any, dlogits8: Any, first: bool) -> dict[str, Array]:
        """The next sums of kernel and accumulator, as far as they are computed here."""
        head = self.head
        if not self.with_wgrad:
            return {}
        order = 1 if head.vocab_axis else -1
        read = (self._quantized("activation", x, False, True), dlogits8) if head.in_fp8("wgrad") else (x, dlogits)
        product = functools.partial(head.layer.gemm, "wgrad", *read[::order])
        sums = {}
        if self.wanted.kernel or not self.in_place:
            if self._compares and head.in_fp8("wgrad"):
                plain = functools.partial(_dot, *(x, dlogits)[::order], (0, 0), jnp.dtype(jnp.float32))
                alone = self._compared("wgrad", product(out_dtype=jnp.float32), plain)
                sums["kernel"] = alone if totals.kernel is None else totals.kernel + alone
            else:
                sums["kernel"] = product(out_dtype=jnp.float32, accumulator=totals.kernel)
        if self.in_place:
            accumulate = head.layer.accumulate or not first
            sums["accumulator"] = product(out_dtype=jnp.float32, accumulator=totals.accumulator, accumulate=accumulate)
        return sums


def _dot(lhs: Array, rhs: Array, contracting: tuple[int, int], dtype: Any) -> Array:
    dims = ((contracting[0],), (contracting[1],)), ((), ())
    return lax.dot_general(lhs, rhs, dims, preferred_element_type=dtype)
