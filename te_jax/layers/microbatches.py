"""Kernels that are quantized once for several microbatches, and gradients that are summed over these."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jax.tree_util import KeyPath

from te_jax._core.types import PyTree
from te_jax.parallel.fsdp import is_parameter
from te_jax.quantized import QuantizedArray
from te_jax.recipe import DelayedScalingState, merge
from te_jax.sharding import varying_axes, varying_over

OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"
"""Flax's name of the collection of variables whose gradient is their next value."""

_ZEROS = (
    "jax.tree.map(jnp.zeros_like, variables), of the variables (of flax.linen.unbox of them) before they were quantized"
)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("kernel", "gradient", "uses"), meta_fields=("accumulate",)
)
@dataclasses.dataclass(frozen=True)
class AccumulatedKernel:
    """A kernel and the sum to which its gradient is added.

    Attributes:
      kernel: an array, or both quantized copies.
      gradient: the sum so far, in the kernel's shape. The gradient with respect to it is the next sum.
      uses: float32 zeros, one for each stacked kernel. The gradient with respect to it counts the layer's calls: JAX
        would add up the next sums of several calls.
      accumulate: False where `gradient` is only a place for the sum, and what it holds is not added to.
    """

    kernel: Array | QuantizedArray
    gradient: Array
    uses: Array
    accumulate: bool = True

    def added(self) -> Array | QuantizedArray:
        """The kernel, with a gradient that is added to the sum."""
        kernel = jax.lax.stop_gradient(self.kernel)
        if isinstance(kernel, QuantizedArray):
            zeros: Any = _added(jnp.zeros_like(self.gradient), self.gradient, self.uses, self.accumulate)
            # Rows or cols may have become one dimension each when the kernel was quantized.
            return dataclasses.replace(kernel, straight_through=zeros.reshape(kernel.shape))
        return _added(kernel, self.gradient, self.uses, self.accumulate)

    def __jax_array__(self) -> Array:
        raise TypeError(
            "a kernel whose gradient accumulate_gradients adds in place is no array: take it apart by "
            "te_jax.layers.dense_kernels for an operation with wgrad_accumulator, or do not choose it by in_place"
        )


def validate_gradients(variables: Mapping[str, Any], gradients: Mapping[str, Any], zeros: str) -> None:
    """Checks that gradients fit what they are gradients of, both by name.

    Args:
      variables: arrays and QuantizedArrays.
      gradients: what is added to.
      zeros: how to make gradients that fit, for errors.

    Raises:
      ValueError: names or shapes differ, or gradients are quantized.
    """
    missing = [name for name in variables if name not in gradients]
    surplus = [name for name in gradients if name not in variables]
    if missing or surplus:
        lacks = f"have nothing for {missing}" if missing else f"have {surplus}, which is not differentiated"
        raise ValueError(f"gradients {lacks}: start from {zeros}")
    for name, variable in variables.items():
        gradient = gradients[name]
        if isinstance(gradient, QuantizedArray):
            raise ValueError(f"gradients have a QuantizedArray for {name}, and sums need an array: start from {zeros}")
        if not _has_shape_of(variable, gradient):
            shapes = (jax.tree.map(jnp.shape, gradient), getattr(variable, "shape", "another structure"))
            raise ValueError(
                f"gradients have shape {shapes[0]} for {name}, which has shape {shapes[1]}: start from {zeros}"
            )


def validate_mergeable(first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Checks that two gradients, both by name, are of the same variables.

    Raises:
      ValueError: names or shapes differ.
    """
    remedy = "merge gradients with respect to the same variables"
    if unshared := sorted(set(first) ^ set(second)):
        raise ValueError(f"first and second differ in {unshared}, which only one of them has: {remedy}")
    for name, gradient in first.items():
        if jnp.shape(gradient) != jnp.shape(second[name]):
            raise ValueError(
                f"second has shape {jnp.shape(second[name])} for {name}, and first {jnp.shape(gradient)}: {remedy}"
            )


def _has_shape_of(variable: Any, gradient: Any) -> bool:
    if isinstance(variable, DelayedScalingState):
        return jax.tree.map(jnp.shape, variable) == jax.tree.map(jnp.shape, gradient)
    shape = jnp.shape(gradient)
    if not isinstance(variable, QuantizedArray):
        return shape == jnp.shape(variable)
    stacked = _stacked(variable)  # the other dimensions may be merged
    return shape[: len(stacked)] == stacked and math.prod(shape) == variable.size


def _stacked(kernel: Array | QuantizedArray) -> tuple[int, ...]:
    """The dimensions over which quantized kernels are stacked."""
    if not isinstance(kernel, QuantizedArray):
        return ()
    return kernel.shape[: kernel.ndim - kernel.row_ndim - kernel.col_ndim]


def accumulate(
    loss_of: Callable[[dict[str, AccumulatedKernel], PyTree], tuple[Array, PyTree]],
    kernels: Mapping[str, Array | QuantizedArray],
    sums: Mapping[str, Array] | None,
    rest: PyTree,
) -> tuple[Array, PyTree, dict[str, Array], PyTree]:
    """A loss and its gradients, with those of some kernels added to former ones.

    Args:
      loss_of: (kernels, rest) -> (loss, aux).
      kernels: by name.
      sums: what their gradients are added to, by name; floating point, of the shapes of the kernels. None for nothing:
        the gradients then have the kernels' shapes and dtypes.
      rest: what else is differentiated.

    Returns:
      (loss, aux, sums, gradient with respect to rest). The loss is NaN where a kernel was used several times, for its
      sum is then wrong.

    Raises:
      ValueError: the same, outside of jit; or a layer reads a kernel in a branch of `lax.cond`.
    """

    def anchored_loss(sums: Mapping[str, Array], uses: Mapping[str, Array], rest: PyTree):
        accumulated, anchors = {}, []
        for name, kernel in kernels.items():
            kept: Any = _kept_if_unused(sums[name], uses[name], adds)
            sum_, count, anchor = kept
            accumulated[name] = AccumulatedKernel(kernel, sum_, count, adds)
            anchors.append(anchor)
        loss, aux = loss_of(accumulated, rest)
        return sum((anchor.astype(loss.dtype) for anchor in anchors), loss), aux

    adds = sums is not None
    before = sums or {
        name: varying_over(lax.empty(kernel.shape, kernel.dtype), varying_axes(kernel))
        for name, kernel in kernels.items()
    }
    uses = {name: jnp.zeros(_stacked(kernel), jnp.float32) for name, kernel in kernels.items()}
    differentiated = ({name: before[name] for name in kernels}, uses, rest)
    (loss, aux), gradients = jax.value_and_grad(anchored_loss, argnums=(0, 1, 2), has_aux=True)(*differentiated)
    after, uses, rest = gradients
    for name, count in uses.items():
        wrong = jnp.any(count != 1.0)
        if isinstance(wrong, Tracer):
            loss = jnp.where(wrong, jnp.nan, loss)
        elif wrong:
            is_quantized = isinstance(kernels[name], QuantizedArray)
            why, choose = ("quantized", "quantize") if is_quantized else ("chosen by in_place", "choose")
            raise ValueError(
                f"kernel {name} is {why} and was used {count} times in one gradient, which is then wrong: "
                f"{choose} only kernels of layers that are called once"
            )
    return loss, aux, dict(after), rest


def accumulate_gradients(
    loss_fn: Callable[..., PyTree],
    *,
    has_aux: bool = False,
    in_place: Callable[[KeyPath, Array], bool] | None = None,
) -> Callable[..., tuple[PyTree, PyTree]]:
    """`jax.value_and_grad` with respect to the first argument, adding to the gradients of earlier microbatches.

    GEMMs add to the sum for a quantized kernel in place, if it is donated or the carry of a loop. States of delayed
    scaling are not summed: the next one is the maximum (`te_jax.recipe.merge`). The same holds for all entries of a
    dict's "_overwrite_with_gradient", Flax's collection of such states.

    Args:
      loss_fn: loss_fn(variables, *args, **kwargs) returns a scalar, or (scalar, aux) with has_aux.
      has_aux: as in `jax.value_and_grad`.
      in_place: in_place(path, array), with a path of `jax.tree_util`, says which arrays are kernels whose sums are
        updated in place, too: in their place loss_fn finds what it finds in that of quantized kernels, which
        `dense_kernels` takes apart. For the decoder of `te_jax.models` it is `te_jax.models.is_head`. It saves a
        pass over three such arrays. Where `gradients` is None there is no sum, and loss_fn finds the arrays. None for
        quantized kernels alone.

    Returns:
      f(variables, gradients, *args, **kwargs) -> (what loss_fn returns, gradients). `variables` is a pytree whose
      kernels may be quantized (`te_jax.optim.merge_kernels`, `te_jax.flax.quantize_kernels`). `gradients` have its
      structure with arrays for kernels, zeros at first: `jax.tree.map(jnp.zeros_like, variables)` before they were
      quantized, and after `flax.linen.unbox` where Linen boxes them. Or None for the first microbatch, which then
      writes the sum to which the others add. f raises ValueError if `gradients` do not fit.

    Raises:
      ValueError: `in_place` is no function.

    Examples:
      >>> import jax.numpy as jnp, te_jax
      >>> recipe = te_jax.recipe.CurrentScaling()
      >>> kernel = te_jax.ops.quantize(jnp.ones((32, 16)), recipe.quantization("kernel"))
      >>> def loss(variables, x):
      ...     return te_jax.ops.dense(x, **te_jax.layers.dense_kernels((variables["kernel"],)), recipe=recipe)[0].sum()
      >>> gradient = te_jax.layers.accumulate_gradients(loss)
      >>> _, gradients = gradient({"kernel": kernel}, None, jnp.ones((4, 32)))
      >>> _, gradients = gradient({"kernel": kernel}, gradients, jnp.ones((4, 32)))
      >>> round(float(gradients["kernel"][0, 0]), 3)
      8.0
    """

    if in_place is not None and not callable(in_place):
        raise ValueError(f"in_place is {in_place!r}; it must be a function (path, array) -> bool, or None")

    @functools.wraps(loss_fn)
    def wrapped(variables: PyTree, gradients: PyTree, *args: object, **kwargs: object):
        leaves, structure = jax.tree.flatten_with_path(variables, is_leaf=is_parameter)
        named = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
        before = None if gradients is None else named_leaves(gradients)
        if before is not None:
            validate_gradients(named, before, _ZEROS)
        kernels = {
            name: leaf
            for (path, leaf), name in zip(leaves, named, strict=True)
            if isinstance(leaf, QuantizedArray)
            or (in_place is not None and before is not None and isinstance(leaf, Array) and in_place(path, leaf))
        }
        rest = {name: leaf for name, leaf in named.items() if name not in kernels}

        def loss_of(kernels: dict[str, Any], rest: dict[str, Any]):
            inputs = kernels | rest
            result = loss_fn(structure.unflatten([inputs[name] for name in named]), *args, **kwargs)
            return result if has_aux else (result, None)

        loss, aux, sums, found = accumulate(loss_of, kernels, before, rest)
        after = [
            sums[name] if name in kernels
            else found[name] if before is None
            else merged(path, before[name], found[name])
            for (path, _), name in zip(leaves, named, strict=True)
        ]  # fmt: skip
        return (loss, aux) if has_aux else loss, structure.unflatten(after)

    return wrapped


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Arrays, QuantizedArrays and states of delayed scaling by their place in a pytree."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_parameter)}


def merged(path: KeyPath, first: Any, second: Any) -> Any:
    """The gradients of two microbatches with respect to one leaf, as one."""
    if isinstance(first, DelayedScalingState):
        return merge(first, second)
    overwrites = jax.tree_util.DictKey(OVERWRITE_WITH_GRADIENT) in path
    return jnp.maximum(first, second) if overwrites else first + second.astype(first.dtype)


def dense_kernels(kernels: Sequence[Array | QuantizedArray | AccumulatedKernel]) -> dict[str, Any]:
    """The kernels of layers as arguments of `te_jax.ops.dense` and `gated_mlp`.

    Args:
      kernels: arrays; or, in the loss of `accumulate_gradients`, its stand-ins for kernels.

    Returns:
      `kernel`, `wgrad_accumulator` and `accumulate`.
    """
    accumulated = [kernel for kernel in kernels if isinstance(kernel, AccumulatedKernel)]
    return {
        "kernel": tuple(kernel.kernel if isinstance(kernel, AccumulatedKernel) else kernel for kernel in kernels),
        "wgrad_accumulator": tuple(
            _count_use(kernel.gradient, kernel.uses) if isinstance(kernel, AccumulatedKernel) else None
            for kernel in kernels
        ),
        "accumulate": all(kernel.accumulate for kernel in accumulated),
    }


@jax.custom_vjp
def _count_use(gradient: Array, uses: Array) -> Array:
    del uses
    return gradient


_count_use.defvjp(
    lambda gradient, uses: (gradient, uses),
    lambda uses, next_gradient: (next_gradient, jnp.ones_like(uses)),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _added(kernel: Array, gradient: Array, uses: Array, adds: bool) -> Array:
    """The kernel, whose gradient is added to that of `gradient`, and whose uses are counted."""
    del gradient, uses, adds
    return kernel


def _added_backward(adds, residuals, dkernel):
    gradient, uses = residuals
    dkernel = dkernel.astype(gradient.dtype)
    return None, gradient + dkernel if adds else dkernel, jnp.ones_like(uses)


_added.defvjp(lambda kernel, gradient, uses, adds: (kernel, (gradient, uses)), _added_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _kept_if_unused(gradient: Array, uses: Array, adds: bool) -> tuple[Array, Array, Array]:
    """(gradient, uses, 0). Where nothing uses the first, its cotangent is itself, or 0 if it is only a place.

    The 0 must be added to the loss: JAX skips the backward pass of what nothing depends on.
    """
    del adds
    return gradient, uses, jnp.zeros((), jnp.float32)


def _kept_forward(gradient, uses, adds):
    return _kept_if_unused(gradient.value, uses.value, adds), (gradient.value, uses.value)


def _kept_backward(adds, residuals, cotangents):
    gradient, uses, _ = cotangents
    if isinstance(gradient, SymbolicZero):
        return residuals[0] if adds else jnp.zeros_like(residuals[0]), jnp.ones_like(residuals[1])
    return gradient, uses


_kept_if_unused.defvjp(_kept_forward, _kept_backward, symbolic_zeros=True)
