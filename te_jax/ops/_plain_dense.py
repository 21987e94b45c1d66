"""Linear layers without FP8, and the activations of linear layers with it: left to XLA, which is at the limit there."""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import custom_vjp_primal_tree_values

from te_jax import sharding
from te_jax._core.branches import in_branch_differentiated_outside
from te_jax._core.derivatives import not_differentiated

Activation = Literal["gelu", "relu", "silu"]
KernelContracting = Literal["first", "last"]

ACTIVATIONS = ("gelu", "relu", "silu")

_ONCE = (
    "te_jax.ops.dense with wgrad_accumulator is differentiated once, by its own rules; for second derivatives do "
    "without wgrad_accumulator"
)


# Under jit even when called eagerly, as the layers in FP8 are.
@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7), inline=sharding.INLINE)
def dense(
    x: Array,
    kernel: Array,
    bias: Array | None,
    accumulator: Array | None,
    contracting_ndim: int,
    kernel_contracting: KernelContracting,
    activation: Activation | None,
    accumulate: bool,
) -> Array:
    """`te_jax.ops.dense` with recipe=None; see there for the arguments."""
    y: Any
    if accumulator is None:
        y = _forward(x, kernel, contracting_ndim, kernel_contracting)
    else:
        y = _accumulating(contracting_ndim, kernel_contracting, accumulate, x, kernel, accumulator)
    if bias is not None:
        # In float32, so that the sum that is its gradient is too.
        wide = sharding.split_as_last(bias, y).astype(jnp.float32)
        wide = jnp.expand_dims(wide, tuple(range(y.ndim - bias.ndim)))
        y = (y.astype(jnp.float32) + wide).astype(y.dtype)
    if activation is not None:
        # Keeps the values before the activation only, rather than the float32 ones inside it.
        y = jax.checkpoint(functools.partial(activate, activation))(checkpoint_name(y, "te_dense_preactivation"))
    return y


def activate(activation: Activation, x: Array) -> Array:
    """The activation, computed in float32, in the dtype of x."""
    functions = {"gelu": functools.partial(jax.nn.gelu, approximate=True), "relu": jax.nn.relu, "silu": jax.nn.silu}
    return functions[activation](x.astype(jnp.float32)).astype(x.dtype)


def activation_gradient(activation: Activation, x: Array, dy: Array) -> Array:
    """The gradient with respect to x where dy is that of the activation at x, computed in float32."""
    return jax.vjp(functools.partial(activate, activation), x)[1](dy)[0]


def _forward(x: Array, kernel: Array, contracting_ndim: int, kernel_contracting: KernelContracting) -> Array:
    first = 0 if kernel_contracting == "first" else kernel.ndim - contracting_ndim
    dims = (tuple(range(x.ndim - contracting_ndim, x.ndim)), tuple(range(first, first + contracting_ndim)))
    return sharding.dot(x, kernel.astype(x.dtype), dims, x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _accumulating(contracting_ndim, kernel_contracting, accumulate, x: Array, kernel: Array, accumulator: Array):
    """The product whose gradient with respect to kernel goes to the accumulator."""
    del accumulate, accumulator
    return _forward(x, kernel, contracting_ndim, kernel_contracting)


def _accumulating_forward(contracting_ndim, kernel_contracting, accumulate, *operands):
    validate_accumulated(*(operand.perturbed for operand in operands[1:]))
    x, kernel, accumulator = custom_vjp_primal_tree_values(operands)
    y = _accumulating(contracting_ndim, kernel_contracting, accumulate, x, kernel, accumulator)
    return y, (x, kernel, accumulator)


def _accumulating_backward(contracting_ndim, kernel_contracting, accumulate, residuals, dy: Array):
    # Here, for a scan keeps what passes through a function beside what it is passed, once more for every layer.
    x, kernel, accumulator, dy = (not_differentiated(x, _ONCE) for x in (*residuals, dy))
    (dx,) = jax.vjp(lambda x: _forward(x, kernel, contracting_ndim, kernel_contracting), x)[1](dy)
    tokens = tuple(range(x.ndim - contracting_ndim))
    operands = (x, dy) if kernel_contracting == "first" else (dy, x)
    wgrad = sharding.Layout.of(accumulator).apply(sharding.dot(*operands, (tokens, tokens), accumulator.dtype))
    if accumulate:
        return dx, None, added_once(accumulator, wgrad) + wgrad
    # The buffer is written over: an argument that is not mentioned at all would not be donated.
    return dx, None, lax.dynamic_update_slice(accumulator, wgrad, (0,) * wgrad.ndim)


_accumulating.defvjp(_accumulating_forward, _accumulating_backward, symbolic_zeros=True)


def validate_reached(name: str) -> None:
    """Checks, where a layer with an accumulator is called, that every gradient reaches it."""
    if in_branch_differentiated_outside():
        raise ValueError(
            f"{name} is given in a branch of jax.lax.cond or jax.lax.switch, and the gradient is taken outside of it: "
            "where the branch is not taken, that of the accumulator would be zero, and the sum lost. Take the gradient "
            "in the branch, or call the layer outside and choose its result with jnp.where"
        )


def validate_accumulated(for_kernel: bool, for_accumulator: bool) -> None:
    """Checks, in the forward rule of a layer with an accumulator, what is differentiated."""
    if for_kernel and not for_accumulator:
        raise ValueError(
            "wgrad_accumulator takes the gradient of kernel, but only kernel is differentiated; differentiate with "
            "respect to wgrad_accumulator, whose cotangent is its next value"
        )


@jax.custom_batching.custom_vmap
def added_once(accumulator: Array, *added: Array) -> Array:
    """The accumulator, to add `added` to. Where examples of a vmap share it, theirs is zero but for the first one's:
    JAX sums over them what comes back, as it does with all cotangents."""
    del added
    return accumulator


@added_once.def_vmap
def _(size: int, batched: list[bool], accumulator: Array, *added: Array):
    if batched[0]:
        return accumulator, True
    if not size:
        raise ValueError(
            "wgrad_accumulator is shared by the 0 examples of a vmap, whose sum would be zero and not its value; do "
            "without the empty vmap, or map wgrad_accumulator too"
        )
    # Examples of a vmap around this one may share it as well. The maxima only have its dimension, and are not computed.
    rest = (jnp.max(x, axis=0) if mapped else x for x, mapped in zip(added, batched[1:], strict=True))
    own = added_once(accumulator, *rest)
    return jnp.pad(own[None], ((0, size - 1), *((0, 0),) * own.ndim)), True
