"""What Linen and NNX layers share: from what a layer holds to one call of `te_jax.ops.dense`."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from te_jax import native, ops
from te_jax._arguments import as_dtype, is_whole_number
from te_jax.ops._gemm_product import FLOAT_NAMES, FLOATS
from te_jax.ops._regrouped import regrouped
from te_jax.ops.dense import quantize_kernel as _quantize_kernel
from te_jax.quantized import QuantizedArray
from te_jax.recipe import DelayedScaling, DelayedScalingState, Recipe

Activation = Literal["gelu", "relu", "silu"]
USES = "uses"
STATE_NAMES = ("activation_amax_history", "kernel_amax_history", "gradient_amax_history", USES)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("kernel", "gradient", "uses"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class AccumulatedKernel:
    """A quantized kernel and what its gradient is added to.

    Attributes:
      kernel: both copies.
      gradient: of the kernel's shape. The gradient with respect to it is the sum.
      uses: float32, shaped as the dimensions along which kernels are stacked, () for one kernel. The gradient with
        respect to it counts the layer's calls: JAX would add up the sums of several.
    """

    kernel: QuantizedArray
    gradient: Array
    uses: Array


@dataclasses.dataclass(frozen=True)
class Options:
    """What layers hand on to `te_jax.ops.dense`."""

    recipe: Recipe | None
    axis_name: str | tuple[str, ...] | None
    implementation: native.Implementation | None


def linear(
    x: Array,
    kernel: Array | QuantizedArray | AccumulatedKernel,
    bias: Array | None,
    scaling_state: DelayedScalingState | None,
    *,
    axis: tuple[int, ...],
    features: tuple[int, ...],
    dtype: jax.typing.DTypeLike | None,
    activation: Activation | None,
    options: Options,
) -> Array:
    """activation(x · kernel + bias), contracting the dimensions `axis` of x with the first ones of the kernel.

    y [*other dimensions of x, *features] has the given dtype, or what x, kernel and bias promote to. The kernel is
    quantized from its own dtype.
    """
    operand, accumulator = _kernel_and_accumulator(kernel)
    x = _contracted_last(x.astype(_result_dtype(dtype, x, operand, bias)), axis)
    batch, contracted = x.shape[: x.ndim - len(axis)], x.shape[x.ndim - len(axis) :]
    if isinstance(operand, QuantizedArray):  # possibly with fewer dimensions, see `quantize_kernel`
        rows, cols = operand.shape[: operand.row_ndim], operand.shape[operand.row_ndim :]
        if math.prod(contracted) != math.prod(rows):
            raise ValueError(
                f"inputs have sizes {contracted} along the contracted axes; the quantized kernel has {rows} there"
            )
        x = regrouped(x, (batch, contracted), (batch, rows))
        bias = None if bias is None else regrouped(bias, (features,), (cols,))
        contracted = rows
    y = ops.dense(
        x,
        operand,
        bias,
        contracting_ndim=len(contracted),
        activation=activation,
        wgrad_accumulator=accumulator,
        scaling_state=scaling_state,
        **vars(options),
    )
    return regrouped(y, (batch, y.shape[len(batch) :]), (batch, features))


def dot_general(
    lhs: Array,
    rhs: Array,
    dimension_numbers: tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]],
    scaling_state: DelayedScalingState | None,
    *,
    preferred_element_type: jax.typing.DTypeLike | None,
    out_sharding: Any,
    options: Options,
) -> Array:
    """`jax.lax.dot_general` of an activation and a kernel, without batch dimensions."""
    try:
        (lhs_axes, rhs_axes), (lhs_batch, rhs_batch) = (map(tuple, pair) for pair in dimension_numbers)
    except (TypeError, ValueError):
        raise ValueError(
            f"dimension_numbers is {dimension_numbers!r}; it must be ((dimensions of lhs, dimensions of rhs), "
            "((), ())), as jax.lax.dot_general has it"
        ) from None
    if preferred_element_type is not None and options.recipe is not None:
        preferred_element_type = _as_float("preferred_element_type", preferred_element_type)
    if lhs_batch or rhs_batch:
        raise ValueError(
            f"dimension_numbers is {dimension_numbers}; batch dimensions are not supported: "
            "use jax.vmap, or jax.lax.dot_general for products of two activations"
        )
    lhs_axes = normalize_axes("dimension_numbers", lhs_axes, lhs.ndim)
    rhs_axes = normalize_axes("dimension_numbers", rhs_axes, rhs.ndim)
    if [lhs.shape[i] for i in lhs_axes] != [rhs.shape[i] for i in rhs_axes]:
        raise ValueError(
            f"dimension_numbers is {dimension_numbers}; it contracts dimensions of different sizes: "
            f"lhs has shape {lhs.shape} and rhs {rhs.shape}"
        )
    rhs_axes, lhs_axes = zip(*sorted(zip(rhs_axes, lhs_axes, strict=True)), strict=True)
    count = len(rhs_axes)
    last = rhs_axes == tuple(range(rhs.ndim - count, rhs.ndim))
    y = ops.dense(
        _contracted_last(lhs, lhs_axes),
        rhs if last else _moved(rhs, (*rhs_axes, *_others(rhs_axes, rhs.ndim))),
        contracting_ndim=count,
        kernel_contracting="last" if last else "first",
        scaling_state=scaling_state,
        **vars(options),
    )
    y = y if preferred_element_type is None else y.astype(preferred_element_type)
    return y if out_sharding is None else jax.reshard(y, out_sharding)


def quantize_kernel(kernel: Array, row_ndim: int, col_ndim: int, options: Options) -> QuantizedArray:
    """Both copies of a kernel [*stacked, *rows, *cols], possibly with fewer dimensions in rows and cols."""
    assert options.recipe is not None
    return _quantize_kernel(
        kernel,
        options.recipe,
        row_ndim=row_ndim,
        stacked_ndim=kernel.ndim - row_ndim - col_ndim,
        implementation=options.implementation,
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


def _kernel_and_accumulator(
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


def as_tuple(value: int | Iterable[int]) -> tuple[int, ...]:
    """One number or several, as several."""
    return tuple(value) if isinstance(value, Iterable) else (value,)


def normalize_axes(name: str, axes: Iterable[int], ndim: int) -> tuple[int, ...]:
    """Axes counted from the front, in the order given."""
    axes = tuple(axes)
    if axes and all(is_whole_number(axis) and -ndim <= axis < ndim for axis in axes):
        positive = tuple(int(axis) % ndim for axis in axes)
        if len(set(positive)) == len(axes):
            return positive
    raise ValueError(
        f"{name} is {axes}; for an input with {ndim} dimensions it must name different ones of them, at least one, by "
        f"integers in [{-ndim}, {ndim - 1}]"
    )


def sizes(name: str, value: int | Iterable[int]) -> tuple[int, ...]:
    """Numbers of features, one or several."""
    features = as_tuple(value)
    if not features or not all(is_whole_number(size) and size >= 1 for size in features):
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1, or several")
    return tuple(map(int, features))


def initial_state(recipe: DelayedScaling) -> dict[str, Array]:
    """What a layer keeps between steps, by name: the amaxes of each role, and how often a step used them."""
    state = recipe.init()
    histories = (state.activation, state.kernel, state.gradient)
    return dict(zip(STATE_NAMES, (*histories, jnp.ones((), jnp.float32)), strict=True))


def scaling_state(values: Mapping[str, Array]) -> DelayedScalingState:
    """The state out of what `initial_state` names."""
    *histories, uses = (values[name] for name in STATE_NAMES)
    return _counted(DelayedScalingState(*histories), uses)


@jax.custom_vjp
def _counted(state: DelayedScalingState, uses: Array) -> DelayedScalingState:
    """The state that was used `uses` times in the step before.

    JAX adds up the cotangents of what is used several times, and so the next states of a layer that is called twice
    inside one gradient. Their number, which is added up alike, takes the sum apart: all but the most recent amaxes are
    equal, so dividing restores them. Of the most recent ones the sum remains, which no value exceeds: scales are then
    smaller than need be, at most by the number of uses, and nothing saturates. With `te_jax.recipe.accumulating` the
    number stays 1, and the maximum is exact.

    Who divides all gradients by a loss scale divides the number too. Below 1 it restores the most recent amaxes as
    well; those of several uses are then their mean.
    """
    return _counted_forward(state, uses)[0]


def _counted_forward(state: DelayedScalingState, uses: Array):
    dtype = uses.dtype
    state, uses = jax.tree.map(lambda x: lax.convert_element_type(x, jnp.float32), (state, uses))
    count = jnp.where(uses > 0, uses, 1.0)

    def restored(history: Array) -> Array:
        return history.at[1:].divide(count).at[0].divide(jnp.minimum(count, 1.0))

    state = jax.tree.map(restored, state)
    newest = jax.tree.map(lambda history: history[0], state)
    return state, (_Static(dtype), newest, jnp.maximum(count, 1.0))


def _counted_backward(residuals, next_state: DelayedScalingState):
    dtype, newest, count = residuals

    def part(history: Array, newest: Array) -> Array:
        # Each use that saw something not finite repeats the newest amax, which is a sum already: its part of it.
        return history.at[0].divide(jnp.where(history[0] == newest, count, 1.0))

    cotangents = (jax.tree.map(part, next_state, newest), jnp.ones((), jnp.float32))
    return jax.tree.map(lambda x: lax.convert_element_type(x, dtype.value), cotangents)


_counted.defvjp(_counted_forward, _counted_backward)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    value: Any


def _result_dtype(dtype: jax.typing.DTypeLike | None, *arrays: Any) -> jax.typing.DTypeLike:
    if dtype is not None:
        return _as_float("dtype", dtype)
    dtype = jnp.result_type(*(x.dtype if isinstance(x, QuantizedArray) else x for x in arrays if x is not None))
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.float32


def _as_float(name: str, dtype: jax.typing.DTypeLike) -> jax.typing.DTypeLike:
    if dtype in (float, jnp.float64):  # names of float32 where there are no 64 bits
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return as_dtype(f"{name} is", dtype, FLOATS, FLOAT_NAMES)


def _contracted_last(x: Array, axes: tuple[int, ...]) -> Array:
    return _moved(x, (*_others(axes, x.ndim), *axes))


def _others(axes: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    return tuple(axis for axis in range(ndim) if axis not in axes)


def _moved(x: Array, order: tuple[int, ...]) -> Array:
    return x if order == tuple(range(x.ndim)) else x.transpose(order)
