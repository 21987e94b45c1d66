"""Kernels that are quantized once for several microbatches, and gradients that are summed over these."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from te_jax.quantized import QuantizedArray


@functools.partial(jax.tree_util.register_dataclass, data_fields=("kernel", "gradient", "uses"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class AccumulatedKernel:
    """A quantized kernel and the sum to which its gradient is added.

    Attributes:
      kernel: both copies.
      gradient: the sum so far, in the kernel's shape. The gradient with respect to it is the next sum.
      uses: float32 zeros, one for each stacked kernel. The gradient with respect to it counts the layer's calls: JAX
        would add up the next sums of several calls.
    """

    kernel: QuantizedArray
    gradient: Array
    uses: Array


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
        if not _has_shape_of(variable, jnp.shape(gradient)):
            raise ValueError(
                f"gradients have shape {jnp.shape(gradient)} for {name}, which has shape {variable.shape}: start from "
                f"{zeros}"
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


def _has_shape_of(variable: Any, shape: tuple[int, ...]) -> bool:
    if not isinstance(variable, QuantizedArray):
        return shape == jnp.shape(variable)
    stacked = variable.shape[: variable.ndim - variable.row_ndim - variable.col_ndim]  # the others may be merged
    return shape[: len(stacked)] == stacked and math.prod(shape) == variable.size


def accumulate(
    loss_of: Callable[[dict[str, AccumulatedKernel], Any], tuple[Array, Any]],
    kernels: Mapping[str, QuantizedArray],
    sums: Mapping[str, Array],
    rest: Any,
) -> tuple[Array, Any, dict[str, Array], Any]:
    """A loss and its gradients, with those of quantized kernels added to former ones.

    Args:
      loss_of: (kernels, rest) -> (loss, aux).
      kernels: by name.
      sums: what their gradients are added to, by name; floating point, of the shapes of the kernels.
      rest: what else is differentiated.

    Returns:
      (loss, aux, sums, gradient with respect to rest). The loss is NaN where a kernel was used several times, or in a
      branch that was not taken: its sum is then wrong.

    Raises:
      ValueError: the same, outside of jit.
    """

    def anchored_loss(sums: Mapping[str, Array], uses: Mapping[str, Array], rest: Any):
        accumulated, anchors = {}, []
        for name, kernel in kernels.items():
            sum_, count, anchor = _kept_if_unused(sums[name], uses[name])
            accumulated[name] = AccumulatedKernel(kernel, sum_, count)
            anchors.append(anchor)
        loss, aux = loss_of(accumulated, rest)
        return sum((anchor.astype(loss.dtype) for anchor in anchors), loss), aux

    uses = {
        name: jnp.zeros(kernel.shape[: kernel.ndim - kernel.row_ndim - kernel.col_ndim], jnp.float32)
        for name, kernel in kernels.items()
    }
    differentiated = ({name: sums[name] for name in kernels}, uses, rest)
    (loss, aux), gradients = jax.value_and_grad(anchored_loss, argnums=(0, 1, 2), has_aux=True)(*differentiated)
    sums, uses, rest = gradients
    for name, count in uses.items():
        wrong = jnp.any(count != 1.0)
        if isinstance(wrong, Tracer):
            loss = jnp.where(wrong, jnp.nan, loss)
        elif wrong:
            raise ValueError(
                f"kernel {name} is quantized and was used {count} times in one gradient, which is then wrong: "
                "quantize only kernels of layers that are called once"
            )
    return loss, aux, dict(sums), rest


def kernel_and_accumulator(
    kernel: Array | QuantizedArray | AccumulatedKernel,
) -> tuple[Array | QuantizedArray, Array | None]:
    if isinstance(kernel, AccumulatedKernel):
        return kernel.kernel, _count_use(kernel.gradient, kernel.uses)
    return kernel, None


@jax.custom_vjp
def _count_use(gradient: Array, uses: Array) -> Array:
    del uses
    return gradient


_count_use.defvjp(
    lambda gradient, uses: (gradient, uses),
    lambda uses, next_gradient: (next_gradient, jnp.ones_like(uses)),
)


@jax.custom_vjp
def _kept_if_unused(gradient: Array, uses: Array) -> tuple[Array, Array, Array]:
    """(gradient, uses, 0). Where nothing uses the first, so that nothing is added to it, it is its own cotangent.

    The 0 must be added to the loss: JAX skips the backward pass of what nothing depends on.
    """
    return gradient, uses, jnp.zeros((), jnp.float32)


def _kept_forward(gradient, uses):
    return _kept_if_unused(gradient.value, uses.value), (gradient.value, uses.value)


def _kept_backward(residuals, cotangents):
    gradient, uses, _ = cotangents
    if isinstance(gradient, SymbolicZero):
        return residuals[0], jnp.ones_like(residuals[1])
    return gradient, uses


_kept_if_unused.defvjp(_kept_forward, _kept_backward, symbolic_zeros=True)
