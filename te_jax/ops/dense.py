"""Linear layers in FP8: forward, input gradient and weight gradient, with what surrounds them fused where possible."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, overload

import jax
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jax.interpreters import ad

from te_jax import native, sharding
from te_jax._core.arguments import as_flag
from te_jax._core.derivatives import differentiated_once
from te_jax._core.reverse_mode import reverse_mode_only
from te_jax.ops import _fp8, _plain_dense
from te_jax.ops._dense_arguments import (
    Operand,
    Shape,
    as_operand,
    implementation_for,
    sequence_padding,
    split,
    state_axes,
    validate,
    validate_differentiated,
    validate_fp8,
    validate_plain,
    whole_blocks,
)
from te_jax.ops._fp8 import Fp8
from te_jax.ops._fp8_products import Layer, Layouts, backward_products, forward_products
from te_jax.ops._operands import as_array, one_for_each
from te_jax.ops._plain_dense import (
    Activation,
    KernelContracting,
    activation_gradient,
)
from te_jax.ops.quantize import quantize
from te_jax.quantized import QuantizedArray
from te_jax.recipe import DelayedScalingState, Recipe
from te_jax.sharding import AxisName, regrouped

_REVERSE_MODE = (
    "te_jax.ops.dense with a recipe or a wgrad_accumulator has first derivatives in reverse mode (jax.grad, jax.vjp) "
    "only: for forward mode (jax.jvp, jax.jacfwd) or second derivatives use recipe=None and no wgrad_accumulator"
)


# fmt: off
@overload
def dense(
    x: Operand, kernel: Operand, bias: jax.typing.ArrayLike | None = None, *, recipe: Recipe | None = None,
    contracting_ndim: int = 1, kernel_contracting: KernelContracting = "first", activation: Activation | None = None,
    wgrad_accumulator: jax.typing.ArrayLike | None = None, accumulate: bool = True,
    scaling_state: DelayedScalingState | None = None, axis_name: AxisName | None = None,
    implementation: native.Implementation | None = None,
) -> Array: ...
@overload
def dense(
    x: Operand, kernel: tuple[Operand, ...], bias: tuple[jax.typing.ArrayLike | None, ...] | None = None, *,
    recipe: Recipe | None = None, contracting_ndim: int = 1, kernel_contracting: KernelContracting = "first",
    activation: Activation | None = None, wgrad_accumulator: tuple[jax.typing.ArrayLike | None, ...] | None = None,
    accumulate: bool = True, scaling_state: tuple[DelayedScalingState, ...] | None = None,
    axis_name: AxisName | None = None, implementation: native.Implementation | None = None,
) -> tuple[Array, ...]: ...
# fmt: on
def dense(
    x: Operand,
    kernel: Operand | tuple[Operand, ...],
    bias: jax.typing.ArrayLike | tuple[jax.typing.ArrayLike | None, ...] | None = None,
    *,
    recipe: Recipe | None = None,
    contracting_ndim: int = 1,
    kernel_contracting: KernelContracting = "first",
    activation: Activation | None = None,
    wgrad_accumulator: jax.typing.ArrayLike | tuple[jax.typing.ArrayLike | None, ...] | None = None,
    accumulate: bool = True,
    scaling_state: DelayedScalingState | tuple[DelayedScalingState, ...] | None = None,
    axis_name: AxisName | None = None,
    implementation: native.Implementation | None = None,
) -> Any:
    r"""A linear layer, y = activation(x · kernel + bias), whose three GEMMs run in FP8.

    With Q for quantization as the recipe says, and g for the gradient of y before the activation:

        y  = activation(Q(x) Q(kernel) + bias)
        dx = Q(g) Q(kernel)ᵀ,   dkernel = Q(x)ᵀ Q(g),   dbias = Σ g

    The residuals are x and kernel in FP8 and, with an activation, the values before it, under the names of
    `te_jax.checkpoint_policies`. docs/fp8.md has the costs, FSDP, and how block scaling treats shapes.

    Args:
      x: [*batch, *in], float32, bfloat16 or float16. Sharded in any way. Or a QuantizedArray of it, from
        `quantize(x, recipe.quantization("activation"), row_ndim=…, straight_through=True)` or an operation that writes
        FP8: the cotangent of its straight_through is dx. Not for DelayedScaling.
      kernel: [*in, *out], or [*out, *in] for kernel_contracting="last"; float32, bfloat16 or float16. Or a
        QuantizedArray from `quantize(kernel, recipe.quantization("kernel"), row_ndim=…)`, which serves several
        microbatches and whose gradient goes to wgrad_accumulator. Or several in a tuple, each with its own `out`, which
        share one quantized x (q, k and v; gate and up). dx is then the sum over them.
      bias: [*out], or None. If kernel is a tuple, then so are bias, wgrad_accumulator and scaling_state.
      recipe: how to quantize; None multiplies in the dtype of x, by XLA.
      contracting_ndim: number of dimensions in `in`.
      kernel_contracting: "first" or "last": where in the kernel the dimensions of `in` stand.
      activation: None, "gelu" (tanh approximation), "relu" or "silu".
      wgrad_accumulator: float32, bfloat16 or float16, shaped as kernel. Its cotangent is its next value, written in
        place where the buffer is donated or carried by a loop; kernel's own cotangent is then zero. Use it in exactly
        one call of a gradient: it becomes zero in one that skips the layer, and a branch of `lax.cond` is refused.
        Inside `shard_map` each device accumulates its part: sum over devices at the end.
      accumulate: the next value is wgrad_accumulator + dkernel; False: dkernel, in the same buffer.
      scaling_state: for DelayedScaling, first `recipe.init()`. Its cotangent is the next state. If several layers or
        iterations share one, its newest amax is the sum of theirs. In a tuple, the first state gives the scale of x.
      axis_name: for DelayedScaling inside `pmap`, or `shard_map` with check_vma=False: the mesh axes over which
        scaling_state is the same. Take its gradient inside. Elsewhere leave it None. It sums no result.
      implementation: None takes the native kernels where they are installed, else the reference; "native" or
        "reference" never fall back.

    Returns:
      [*batch, *out] in the dtype of x, or a tuple of them if kernel is one. Gradients have the dtypes of their
      arguments. The result is NaN if scaling_state has negative entries or a fraction of uses, which an optimizer
      causes that updates it like a parameter.

    Raises:
      ValueError: for arguments that break a rule above, or if you differentiate the kernel but not scaling_state.
      NotImplementedError: for second derivatives with a recipe or a wgrad_accumulator, and for derivatives with respect
        only to a QuantizedArray without straight_through.
      te_jax.native.NativeUnavailableError: "native" cannot run here, or this GPU cannot multiply as the recipe says.

    Examples:
      >>> import jax, jax.numpy as jnp, te_jax
      >>> x, kernel = jnp.ones((4, 32)), jnp.ones((32, 16))
      >>> recipe = te_jax.recipe.CurrentScaling()
      >>> loss = lambda x, kernel: te_jax.ops.dense(x, kernel, recipe=recipe).sum()
      >>> dx, dkernel = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, kernel)
      >>> round(float(dx[0, 0]), 3), round(float(dkernel[0, 0]), 3)
      (16.0, 4.0)
    """
    several = isinstance(kernel, tuple | list)
    count = len(kernel) if isinstance(kernel, tuple | list) else 1
    x = as_operand("x", x)
    kernels = {name: as_operand(name, value) for name, value in one_for_each("kernel", kernel, count, several)}
    biases, accumulators = (
        {name: None if a is None else as_array(name, a) for name, a in one_for_each(argument, values, count, several)}
        for argument, values in (("bias", bias), ("wgrad_accumulator", wgrad_accumulator))
    )
    states = dict(one_for_each("scaling_state", scaling_state, count, several))
    accumulate = as_flag("accumulate", accumulate)
    axis_names = state_axes(axis_name, recipe)
    if not kernels:
        raise ValueError("kernel is an empty tuple; pass one array at least")
    for named_kernel, *others in zip(
        kernels.items(), biases.items(), accumulators.items(), states.items(), strict=True
    ):
        shape = Shape.of(x, *named_kernel, contracting_ndim, kernel_contracting)
        bias_and_accumulator = others[0], others[1]
        varying = sharding.varying_axes(x, named_kernel[1])
        validate(x, *named_kernel, shape, activation, *bias_and_accumulator, varying)
        if recipe is None:
            validate_plain(x, *named_kernel, *others[2])
        else:
            validate_fp8(x, *named_kernel, shape, recipe, *others[2], kernel_contracting)
    operands = (*split(x), *(tuple(named.values()) for named in (kernels, biases, accumulators, states)))
    if recipe is not None or any(a is not None for a in accumulators.values()):
        operands = reverse_mode_only(operands, _REVERSE_MODE)
    if recipe is None:
        native.use_native(implementation)  # the same answer to a bad name as with a recipe
        plain, _, *others, _ = operands
        ys = tuple(
            _plain_dense.dense(plain, *one, int(contracting_ndim), kernel_contracting, activation, accumulate)
            for one in zip(*others, strict=True)
        )
    else:
        fp8 = Fp8("te_jax.ops.dense", recipe, implementation_for(implementation, recipe), axis_names)
        batch_ndim = x.ndim - int(contracting_ndim)
        layer = Layer(fp8, batch_ndim, int(contracting_ndim), kernel_contracting, activation, accumulate)
        ys = _dense(*operands, layer)
    return ys if several else ys[0]


# ---------------------------------------------------------------------------------------------------------- derivatives


# Under jit even when called eagerly: sharded operands are then partitioned rather than gathered.
@functools.partial(jax.jit, static_argnums=6, inline=sharding.INLINE)
def _dense(x, x8, kernels, biases, accumulators, states, layer: Layer) -> tuple[Array, ...]:
    """Brings groups of dimensions into forms that FP8 products take, and back. Of an x that came quantized, `x8`, `x`
    is what its gradient goes through, or None."""
    like, recipe = x if x8 is None else x8, layer.fp8.recipe
    shapes = [Shape.of(like, "kernel", k, layer.contracting_ndim, layer.kernel_contracting) for k in kernels]
    layouts = [layer.layout(like, k) for k in kernels]  # merging dimensions may gather what was split
    (whole_batch, whole_inner, _), *_ = shapes
    if x8 is None and (padding := sequence_padding(whole_batch, recipe, x)):
        axis = len(whole_batch) - 1
        ys = _dense(sharding.padded(x, padding, axis), None, kernels, biases, accumulators, states, layer)
        return tuple(
            layout.apply(lax.slice_in_dim(y, 0, whole_batch[-1], axis=axis))
            for y, layout in zip(ys, layouts, strict=True)
        )
    batch, inner = whole_batch, whole_inner
    if x8 is None:
        batch, inner = (whole_blocks(sizes, recipe) or (1,) for sizes in (batch, inner))
        x = regrouped(x, (whole_batch, whole_inner), (batch, inner))
    outers = [whole_blocks(shape.outer, recipe) for shape in shapes]
    order = 1 if layer.kernel_contracting == "first" else -1
    kernels = tuple(
        kernel
        if isinstance(kernel, QuantizedArray)
        else regrouped(kernel, (shape.inner, shape.outer)[::order], (inner, outer)[::order])
        for kernel, shape, outer in zip(kernels, shapes, outers, strict=True)
    )
    biases = tuple(
        None if bias is None else regrouped(bias, (shape.outer,), (outer,))
        for bias, shape, outer in zip(biases, shapes, outers, strict=True)
    )
    layer = dataclasses.replace(layer, batch_ndim=len(batch), contracting_ndim=len(inner))
    operands = sharding.varying_together((x, x8, kernels, biases, accumulators))
    ys: Any = _products(layer, *operands, states)
    return tuple(
        layout.apply(regrouped(y, (batch, outer), (whole_batch, shape.outer)))
        for y, layout, shape, outer in zip(ys, layouts, shapes, outers, strict=True)
    )


class _Residuals(NamedTuple):
    """What is kept for the backward pass."""

    layouts: Layouts
    x: QuantizedArray  # the copy that sums over tokens; none where no kernel has a gradient
    kernels: tuple[QuantizedArray, ...]  # the copy that sums over out; none where a quantized kernel came without
    preactivations: tuple[Array | None, ...]
    accumulators: tuple[Array | None, ...]
    states: tuple[DelayedScalingState | None, ...]
    amaxes: tuple[Array | None, ...]  # of x and of each of the kernels


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _products(layer: Layer, x, x8, kernels, biases, accumulators, states) -> tuple[Array, ...]:
    del accumulators
    layouts = tuple(layer.layout(x if x8 is None else x8, kernel) for kernel in kernels)
    if x8 is None:
        x8 = layer.quantize("activation", x, states[0], copies="data").array
    copies = "transposed" if layer.dgrad_copy == "data" else "data"
    kernel8s = tuple(
        layer.quantize("kernel", kernel, state, copies=copies).array
        for kernel, state in zip(kernels, states, strict=True)
    )
    return forward_products(layer, x8, kernel8s, biases, layouts, keep_preactivations=False)[0]


def _forward(layer: Layer, *operands):
    try:
        validate_differentiated(layer, *operands)
    except Exception:
        jitted: Any = _dense  # JAX would take the trace whose rule failed for the next gradient, and not find its parts
        jitted.clear_cache()
        raise
    x, x8, kernels, biases, accumulators, states = custom_vjp_primal_tree_values(operands)
    given = [isinstance(kernel, QuantizedArray) for kernel in kernels]
    layouts = tuple(layer.layout(x if x8 is None else x8, kernel) for kernel in kernels)
    with_wgrad = any(a is not None or not g for a, g in zip(accumulators, given, strict=True))
    if x8 is not None:
        x8, _ = differentiated_once((x8, x), layer.fp8.name)
    x8, x_amax, _ = layer.quantize(
        "activation", x if x8 is None else x8, states[0], copies="both" if with_wgrad else "data"
    )
    kernel8s, amaxes, _ = zip(
        *(layer.quantize("kernel", kernel, state) for kernel, state in zip(kernels, states, strict=True)), strict=True
    )
    ys, preactivations = forward_products(layer, x8, kernel8s, biases, layouts, keep_preactivations=True)
    return ys, _Residuals(
        Layouts.of(x, kernels, biases, accumulators),
        _fp8.kept(x8 if with_wgrad else x8.without_transposed(), "transposed", "te_dense_activation"),
        tuple(
            _fp8.kept(kernel8, layer.dgrad_copy, None if g else "te_dense_kernel")
            for kernel8, g in zip(kernel8s, given, strict=True)
        ),
        preactivations,
        accumulators,
        states,
        tuple(
            None if amax is None else checkpoint_name(amax, f"te_dense_{role}")
            for amax, role in zip((x_amax, *amaxes), ("activation", *("kernel" for _ in amaxes)), strict=True)
        ),
    )


def _backward(layer: Layer, residuals: _Residuals, dys):
    layouts, x8, kernel8s, preactivations, accumulators, states, amaxes = residuals
    preactivations: Any
    # A result that is not used has a gradient of zeros, so that accumulators and states still get their next values.
    dys = [ad.zeros_like_aval(dy.aval) if isinstance(dy, SymbolicZero) else dy for dy in dys]
    if layer.activation is not None:
        dys = [activation_gradient(layer.activation, z, dy) for z, dy in zip(preactivations, dys, strict=True)]
    dy8s, dy_amaxes, dbiases = zip(
        *(
            layer.quantize(
                "gradient",
                dy,
                state,
                copies="both" if x8.transposed is not None and (of_kernel or of_accumulator) else "data",
                with_dbias=of_bias is not None,
            )
            for dy, state, of_kernel, of_bias, of_accumulator in zip(dys, states, *layouts[1:], strict=True)
        ),
        strict=True,
    )
    dx, dkernels, next_accumulators = backward_products(layer, x8, kernel8s, dy8s, layouts, accumulators)
    next_states = tuple(
        None
        if state is None
        else _fp8.next_state(
            state, {"activation": amaxes[0], "kernel": amaxes[i + 1], "gradient": dy_amaxes[i]}, layer.fp8.axis_name
        )
        for i, state in enumerate(states)
    )
    dbiases = tuple(
        None if layout is None else layout.apply(dbias) for layout, dbias in zip(layouts.biases, dbiases, strict=True)
    )
    return dx, None, dkernels, dbiases, next_accumulators, next_states


_products.defvjp(_forward, _backward, symbolic_zeros=True)


# ---------------------------------------------------------------------------------------------------- quantized kernels


def quantize_kernel(
    kernel: Array,
    recipe: Recipe,
    *,
    row_ndim: int,
    stacked_ndim: int = 0,
    amax: Array | None = None,
    implementation: native.Implementation | None = None,
) -> QuantizedArray:
    """Both copies of a kernel [*stacked, *rows, *cols], each stacked one with scales of its own.

    Where blocks would not divide the last dimension of rows or cols, these are one dimension, as `dense` has it.

    Args:
      amax: float32 [*stacked], the largest magnitudes where scaling is by tensor; None to find them.
    """
    stacked, rows, cols = (
        kernel.shape[:stacked_ndim],
        kernel.shape[stacked_ndim : stacked_ndim + row_ndim],
        kernel.shape[stacked_ndim + row_ndim :],
    )
    after = whole_blocks(rows, recipe), whole_blocks(cols, recipe)

    def quantized(kernel: Array, amax: Array | None) -> QuantizedArray:
        quantization = recipe.quantization("kernel")
        return quantize(kernel, quantization, row_ndim=len(after[0]), amax=amax, implementation=implementation)

    for _ in stacked:
        quantized = jax.vmap(quantized)
    return quantized(regrouped(kernel, (stacked, rows, cols), (stacked, *after)), amax)
