"""Linear layers in FP8: forward, input gradient and weight gradient, with what surrounds them fused where possible."""

from __future__ import annotations

from typing import Any, overload

import jax
import numpy as np
from jax import Array

from te_jax import native, sharding
from te_jax._core.arguments import as_flag
from te_jax._core.reverse_mode import reverse_mode_only
from te_jax.ops.linear.arguments import (
    KernelContracting,
    Operand,
    Shape,
    as_operand,
    named_weights,
    split,
    state_axes,
    validate,
    validate_fp8,
    validate_plain,
)
from te_jax.ops.linear.codec import codecs_of, plain
from te_jax.ops.linear.compared import left_plain, recipe_in_comparison
from te_jax.ops.linear.local import LocalProducts, PlainProducts, multiplied_as_it_is, multiplied_in_fp8
from te_jax.ops.linear.rule import traced
from te_jax.recipe import DelayedScalingState, Recipe
from te_jax.reference.activation import Activation, ActivationName
from te_jax.sharding import AxisName

_NAME = "te_jax.ops.dense"
_REVERSE_MODE = (
    "te_jax.ops.dense with a recipe or a wgrad_accumulator has first derivatives in reverse mode (jax.grad, jax.vjp) "
    "only: for forward mode (jax.jvp, jax.jacfwd) or second derivatives use recipe=None and no wgrad_accumulator"
)


# fmt: off
@overload
def dense(
    x: Operand, kernel: Operand, bias: jax.typing.ArrayLike | None = None, *, recipe: Recipe | None = None,
    contracting_ndim: int = 1, kernel_contracting: KernelContracting = "first",
    activation: Activation | ActivationName | None = None,
    wgrad_accumulator: jax.typing.ArrayLike | None = None, accumulate: bool = True,
    scaling_state: DelayedScalingState | None = None, state_axis: AxisName | None = None,
    implementation: native.Implementation | None = None,
) -> Array: ...
@overload
def dense(
    x: Operand, kernel: tuple[Operand, ...], bias: tuple[jax.typing.ArrayLike | None, ...] | None = None, *,
    recipe: Recipe | None = None, contracting_ndim: int = 1, kernel_contracting: KernelContracting = "first",
    activation: Activation | ActivationName | None = None,
    wgrad_accumulator: tuple[jax.typing.ArrayLike | None, ...] | None = None, accumulate: bool = True,
    scaling_state: tuple[DelayedScalingState, ...] | None = None,
    state_axis: AxisName | None = None, implementation: native.Implementation | None = None,
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
    activation: Activation | ActivationName | None = None,
    wgrad_accumulator: jax.typing.ArrayLike | tuple[jax.typing.ArrayLike | None, ...] | None = None,
    accumulate: bool = True,
    scaling_state: DelayedScalingState | tuple[DelayedScalingState, ...] | None = None,
    state_axis: AxisName | None = None,
    implementation: native.Implementation | None = None,
) -> Any:
    r"""A linear layer, y = activation(x · kernel + bias), whose three GEMMs run in FP8.

    With Q for quantization as the recipe says, and g for the gradient of y before the activation:

        y  = activation(Q(x) Q(kernel) + bias)
        dx = Q(g) Q(kernel)ᵀ,   dkernel = Q(x)ᵀ Q(g),   dbias = Σ g

    The residuals are x and kernel in FP8 and, with an activation, the values before it, under the names of
    `te_jax.checkpoint_policies`. docs/fp8.md has the costs, docs/sharding.md FSDP and how block scaling treats
    shapes.

    Args:
      x: [*batch, *in], float32, bfloat16 or float16. Sharded in any way. Or a QuantizedArray of it, from
        `quantize(x, recipe.quantization("activation"), row_ndim=…, straight_through=True)` or an operation that writes
        FP8: the cotangent of its straight_through is dx. Not for DelayedScaling.
      kernel: [*in, *out], or [*out, *in] for kernel_contracting="last"; float32, bfloat16 or float16. Or a
        QuantizedArray from `quantize(kernel, recipe.quantization("kernel"), row_ndim=…)`, which serves several
        microbatches and whose gradient goes to wgrad_accumulator, or to its straight_through. Or several in a tuple,
        each with its own `out`, which share one quantized x (q, k and v; gate and up). dx is then the sum over them.
      bias: [*out], or None. If kernel is a tuple, then so are bias, wgrad_accumulator and scaling_state.
      recipe: how to quantize for all GEMMs or, with `te_jax.recipe.products`, for each; None multiplies in the dtype of
        x, by XLA.
      contracting_ndim: number of dimensions in `in`.
      kernel_contracting: "first" or "last": where in the kernel the dimensions of `in` stand.
      activation: None, or as in `te_jax.ops.activation`.
      wgrad_accumulator: float32, bfloat16 or float16, shaped as kernel. Its cotangent is its next value, written in
        place where the buffer is donated or carried by a loop; kernel's own cotangent is then zero. Use it in exactly
        one call of a gradient: it becomes zero in one that skips the layer, and a branch of `lax.cond` is refused.
        Inside `shard_map` each device accumulates its part: sum over devices at the end.
      accumulate: the next value is wgrad_accumulator + dkernel; False: dkernel, in the same buffer.
      scaling_state: for DelayedScaling, first `recipe.init()`. Its cotangent is the next state. If several layers or
        iterations share one, its newest amax is the sum of theirs. In a tuple, the first state gives the scale of x.
      state_axis: for DelayedScaling inside `pmap`, or `shard_map` with check_vma=False: the mesh axes over which
        scaling_state is the same. Take its gradient inside. Elsewhere leave it None. It sums no result.
      implementation: "native"; "xla", whose compiler multiplies FP8 with one scale for each tensor on GPUs from compute
        capability 8.9 on; or "reference", in float32. None takes the first that is there, on a GPU never the last;
        beside XLA's products native kernels quantize from 9.0 on, to the same bits. A named one also quantizes.

    Returns:
      [*batch, *out] in the dtype of x, or a tuple of them if kernel is one. Gradients have the dtypes of their
      arguments. The result is NaN if scaling_state has negative entries or a fraction of uses, which an optimizer
      causes that updates it like a parameter.

    Raises:
      ValueError: for arguments that break a rule above, or if you differentiate the kernel but not scaling_state.
      NotImplementedError: for second derivatives with a recipe or a wgrad_accumulator, and for derivatives with respect
        only to a QuantizedArray without straight_through.
      te_jax.native.NativeUnavailableError: implementation cannot run here, or this GPU cannot multiply as recipe says.

    Examples:
      >>> import jax, jax.numpy as jnp, te_jax
      >>> x, kernel = jnp.ones((4, 32)), jnp.ones((32, 16))
      >>> recipe = te_jax.recipe.CurrentScaling()
      >>> loss = lambda x, kernel: te_jax.ops.dense(x, kernel, recipe=recipe).sum()
      >>> dx, dkernel = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, kernel)
      >>> round(float(dx[0, 0]), 3), round(float(dkernel[0, 0]), 3)
      (16.0, 4.0)
    """
    function = None if activation is None else Activation.ungated(activation)
    several = isinstance(kernel, tuple | list)
    x = as_operand("x", x)
    weights = named_weights(kernel, bias, scaling_state, wgrad_accumulator)
    accumulate = as_flag("accumulate", accumulate)
    axis_names = state_axes(state_axis, recipe)
    shapes = {
        name: Shape.of(x, name, weight.kernel, contracting_ndim, kernel_contracting) for name, weight in weights.items()
    }
    for name, weight in weights.items():
        validate(x, name, weight, shapes[name], sharding.varying_axes(x, weight.kernel))
        if recipe is None:
            validate_plain(x, name, weight)
        else:
            validate_fp8(x, name, weight, shapes[name], recipe, kernel_contracting)
    recipe, obstacle = recipe_in_comparison(
        recipe,
        lambda recipe: [
            validate_fp8(x, name, weight, shapes[name], recipe, kernel_contracting) for name, weight in weights.items()
        ],
    )
    kernels = tuple(weight.kernel for weight in weights.values())
    operands = (*split(x), tuple(weights.values()))
    if recipe is not None or any(weight.accumulator is not None for weight in weights.values()):
        operands = reverse_mode_only(operands, _REVERSE_MODE)
    options: Any = {"contracting_ndim": int(contracting_ndim), "kernel_contracting": kernel_contracting}
    options |= {"name": _NAME, "dtype": np.dtype(x.dtype), "batch_ndim": x.ndim - int(contracting_ndim)}
    options["accumulate"] = accumulate
    if recipe is None:
        native.use_native(implementation, products=True)  # the same answer to a bad name as with a recipe
        layer = PlainProducts(codecs=plain(_NAME), **options)
        as_it_is, _, each = operands
        ys = tuple(traced(multiplied_as_it_is, (layer, function), as_it_is, weight) for weight in each)
        ys = left_plain(_NAME, ys, kernels, obstacle)
    else:
        codecs = codecs_of(_NAME, recipe, implementation, np.dtype(x.dtype))
        layer = LocalProducts(codecs=codecs, state_axis=axis_names, activation=function, **options)
        ys = traced(multiplied_in_fp8, layer, *operands)
    return ys if several else ys[0]
