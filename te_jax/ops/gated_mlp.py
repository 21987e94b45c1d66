"""A gated MLP in FP8: between its three linear layers, kernels compute the activation and its gradients in FP8."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax import Array, lax

from te_jax import native, sharding
from te_jax._core import observe
from te_jax._core.arguments import as_flag
from te_jax._core.reverse_mode import reverse_mode_only
from te_jax.ops.activation import gated_activation
from te_jax.ops.dense import dense
from te_jax.ops.linear.arguments import (
    KernelContracting,
    Operand,
    Shape,
    as_operand,
    named_weights,
    sequence_padding,
    split,
    state_axes,
    validate,
    validate_fp8,
    whole_blocks,
)
from te_jax.ops.linear.codec import codecs_of
from te_jax.ops.linear.gated import GatedMLP, gated
from te_jax.ops.linear.local import LocalProducts
from te_jax.ops.linear.rule import traced
from te_jax.ops.linear.weight import Weight, together
from te_jax.ops.operands import one_for_each
from te_jax.quantized import facts_of_recipe
from te_jax.recipe import DelayedScalingState, ProductRecipes, Recipe
from te_jax.reference.activation import Activation, ActivationName
from te_jax.sharding import AxisName, regrouped

_REVERSE_MODE = (
    "te_jax.ops.gated_mlp with a recipe has first derivatives in reverse mode (jax.grad, jax.vjp) only: for forward "
    "mode (jax.jvp, jax.jacfwd) or second derivatives use recipe=None"
)


def gated_mlp(
    x: Operand,
    kernel: tuple[Operand, Operand, Operand],
    bias: tuple[jax.typing.ArrayLike | None, ...] | None = None,
    *,
    activation: Activation | ActivationName = "silu",
    recipe: Recipe | None = None,
    kernel_contracting: KernelContracting = "first",
    wgrad_accumulator: tuple[jax.typing.ArrayLike | None, ...] | None = None,
    accumulate: bool = True,
    scaling_state: tuple[DelayedScalingState, ...] | None = None,
    state_axis: AxisName | None = None,
    implementation: native.Implementation | None = None,
) -> Array:
    r"""The MLP of Llama and similar models, y = h · down with h = f(x · gate) · (x · up), whose GEMMs run in FP8.

    It computes the same as these lines, with fewer passes over memory:

        gate, up = dense(x, (gate, up), …)
        y = dense(gated_activation(gate, up, activation), down, …)

    CUDA kernels write h and the gradients of gate and up in FP8. h is no residual: the backward pass computes it again,
    transposed, together with these gradients. The residuals are x and the kernels in FP8 and the values before the
    activation, under the names of `te_jax.checkpoint_policies`. With row scaling, and without a recipe, it runs those
    lines.

    Args:
      x: [*batch, in], float32, bfloat16 or float16, sharded in any way. Or a QuantizedArray, as in `dense`.
      kernel: (gate, up, down), [in, hidden], [in, hidden] and [hidden, out], or for kernel_contracting="last"
        [hidden, in], [hidden, in] and [out, hidden]; each as in `dense`.
      bias: ([hidden], [hidden], [out]), each of which may be None, or None.
      activation: as in `gated_activation`; "silu" is SwiGLU.
      recipe: how to quantize; None multiplies in the dtype of x, by XLA.
      kernel_contracting, wgrad_accumulator, accumulate, scaling_state, state_axis, implementation: as in `dense` with
        three kernels.

    Returns:
      [*batch, out] in the dtype of x.

    Raises:
      ValueError: for arguments that break a rule above, naming the argument.
      NotImplementedError: for second derivatives with a recipe.
      te_jax.native.NativeUnavailableError: implementation cannot run here, or this GPU cannot multiply as recipe says.

    References:
      Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202.

    Examples:
      >>> import jax, jax.numpy as jnp, te_jax
      >>> x, kernel = jnp.ones((4, 32)), (jnp.ones((32, 64)), jnp.ones((32, 64)), jnp.ones((64, 16)))
      >>> y = jax.jit(lambda x: te_jax.ops.gated_mlp(x, kernel, recipe=te_jax.recipe.BlockScaling()))(x)
      >>> y.shape, round(float(y[0, 0]))  # silu(32) · 32 · 64
      ((4, 16), 65536)
    """
    activation = Activation.of(activation)
    if not isinstance(kernel, tuple | list) or len(kernel) != 3:
        raise ValueError("kernel must be a tuple of three, (gate, up, down)")
    options: Any = {
        "recipe": recipe,
        "kernel_contracting": kernel_contracting,
        "accumulate": accumulate,
        "state_axis": state_axis,
        "implementation": implementation,
    }
    in_two = observe.requested() is not None  # the rule of gated MLPs has no plain h to observe
    if recipe is None or in_two or isinstance(recipe, ProductRecipes) or _is_by_rows(recipe):
        several = {"bias": bias, "wgrad_accumulator": wgrad_accumulator, "scaling_state": scaling_state}
        values = {name: [v for _, v in one_for_each(name, each, 3, True)] for name, each in several.items()}
        gate, up = dense(x, tuple(kernel[:2]), **{name: tuple(v[:2]) for name, v in values.items()}, **options)
        h = gated_activation(gate, up, activation)
        return dense(h, kernel[2], **{name: v[2] for name, v in values.items()}, **options)

    x, weights = as_operand("x", x), named_weights(kernel, bias, scaling_state, wgrad_accumulator)
    axis_names = state_axes(state_axis, recipe)
    gate, up, down = (weight.kernel for weight in weights.values())
    if gate.shape != up.shape:
        raise ValueError(
            f"kernel[1] has shape {up.shape}, but kernel[0] has {gate.shape}; gate and up must have the same"
        )
    if up.ndim != 2 or down.ndim != 2:
        raise ValueError(
            f"kernel has shapes {[k.shape for k in (gate, up, down)]}; they must be [in, hidden], [in, hidden] and "
            "[hidden, out], or with kernel_contracting='last' [hidden, in], [hidden, in] and [out, hidden]"
        )
    (width,) = Shape.of(x, "kernel[1]", up, 1, kernel_contracting).outer
    hidden = jax.ShapeDtypeStruct((*x.shape[:-1], width), x.dtype)
    varying = sharding.varying_axes(x, (gate, up, down))
    for operand, (name, weight) in zip((x, x, hidden), weights.items(), strict=True):
        shape = Shape.of(operand, name, weight.kernel, 1, kernel_contracting)
        validate(operand, name, weight, shape, varying)
        validate_fp8(operand, name, weight, shape, recipe, kernel_contracting)
    layer = LocalProducts(
        name="te_jax.ops.gated_mlp",
        codecs=codecs_of("te_jax.ops.gated_mlp", recipe, implementation, np.dtype(x.dtype)),
        dtype=np.dtype(x.dtype),
        accumulate=as_flag("accumulate", accumulate),
        state_axis=axis_names,
        batch_ndim=x.ndim - 1,
        kernel_contracting=kernel_contracting,
    )
    operands = reverse_mode_only((*split(x), tuple(weights.values())), _REVERSE_MODE)
    return traced(_multiplied, (layer, activation), *operands)


def _is_by_rows(recipe: object) -> bool:
    return isinstance(recipe, Recipe) and facts_of_recipe(recipe).by_row


def _multiplied(static: tuple[LocalProducts, Activation], x, x8, weights: tuple[Weight, ...]) -> Array:
    """The MLP of a batch in a form that FP8 products take, and back; see `dense`."""
    (layer, function), like = static, x if x8 is None else x8
    block = layer.block_size
    batch, width = like.shape[:-1], like.shape[-1:]
    layout = layer.layout(like, weights[2].kernel)
    if x8 is None and (padding := sequence_padding(batch, block, x)):
        axis = len(batch) - 1
        y = _multiplied(static, sharding.padded(x, padding, axis), None, weights)
        return layout.apply(lax.slice_in_dim(y, 0, batch[-1], axis=axis))
    merged = batch
    if x8 is None:
        merged = whole_blocks(batch, block) or (1,)
        x = regrouped(x, (batch, width), (merged, width))
    layer = dataclasses.replace(layer, batch_ndim=len(merged))
    x, x8, weights = together((x, x8, weights))
    y: Any = gated(GatedMLP(layer, layer, function), x, x8, None, weights, None)
    return layout.apply(regrouped(y, (merged, y.shape[-1:]), (batch, y.shape[-1:])))
