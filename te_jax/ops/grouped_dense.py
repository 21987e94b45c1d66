"""Linear layers of experts: a kernel for each group of rows, forward, input gradient and weight gradient, in FP8."""

from __future__ import annotations

from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from te_jax import native, sharding
from te_jax._core.arguments import as_flag
from te_jax._core.reverse_mode import reverse_mode_only
from te_jax._core.types import FLOAT_NAMES, FLOATS, FP8_ALIGNMENT
from te_jax.ops.linear import fp8
from te_jax.ops.linear.accumulator import validate_accumulator
from te_jax.ops.linear.arguments import (
    KernelContracting,
    Operand,
    as_operand,
    named_weights,
    of_kernel,
    split,
    state_axes,
    validate_kernel_contracting,
    validate_not_quantized,
    validate_quantized_x,
    with_gradient_through,
)
from te_jax.ops.linear.compared import left_plain, recipe_in_comparison
from te_jax.ops.linear.grouped import NAME, REVERSE_MODE, GroupedProducts, Groups, grouped_codecs
from te_jax.ops.linear.products import Products
from te_jax.ops.linear.rule import linear, traced
from te_jax.ops.linear.weight import Weight, together
from te_jax.ops.operands import as_array
from te_jax.quantized import QuantizedArray
from te_jax.recipe import DelayedScalingState, ProductRecipes, Recipe
from te_jax.sharding import AxisName

__all__ = ["grouped_dense"]


# fmt: off
@overload
def grouped_dense(
    x: Operand, kernel: Operand, group_sizes: jax.typing.ArrayLike,
    bias: jax.typing.ArrayLike | None = None, *, recipe: Recipe | None = None,
    kernel_contracting: KernelContracting = "first", wgrad_accumulator: jax.typing.ArrayLike | None = None,
    accumulate: bool = True, scaling_state: DelayedScalingState | None = None, state_axis: AxisName | None = None,
    implementation: native.Implementation | None = None,
) -> Array: ...
@overload
def grouped_dense(
    x: Operand, kernel: tuple[Operand, ...], group_sizes: jax.typing.ArrayLike,
    bias: tuple[jax.typing.ArrayLike | None, ...] | None = None, *, recipe: Recipe | None = None,
    kernel_contracting: KernelContracting = "first",
    wgrad_accumulator: tuple[jax.typing.ArrayLike | None, ...] | None = None, accumulate: bool = True,
    scaling_state: tuple[DelayedScalingState, ...] | None = None, state_axis: AxisName | None = None,
    implementation: native.Implementation | None = None,
) -> tuple[Array, ...]: ...
# fmt: on
def grouped_dense(
    x: Operand,
    kernel: Operand | tuple[Operand, ...],
    group_sizes: jax.typing.ArrayLike,
    bias: jax.typing.ArrayLike | tuple[jax.typing.ArrayLike | None, ...] | None = None,
    *,
    recipe: Recipe | None = None,
    kernel_contracting: KernelContracting = "first",
    wgrad_accumulator: jax.typing.ArrayLike | tuple[jax.typing.ArrayLike | None, ...] | None = None,
    accumulate: bool = True,
    scaling_state: DelayedScalingState | tuple[DelayedScalingState, ...] | None = None,
    state_axis: AxisName | None = None,
    implementation: native.Implementation | None = None,
) -> Any:
    r"""A linear layer of experts, y[r] = x[r] · kernel[e] + bias[e] for the rows r of expert e, and zeros for others.

    With Q for quantization as the recipe says, and g for the gradient of y:

        y = Q(x) Q(kernel) + bias,   dx = Q(g) Q(kernel)ᵀ,   dkernel[e] = Σ_r Q(x)ᵀ Q(g),   dbias[e] = Σ_r g

    with sums over the rows of each expert. The backward pass reads x and kernel in FP8, under the names of
    `te_jax.checkpoint_policies`. Rows of no expert, in x and in g, are read as zeros whatever they hold; gradients of
    experts without rows are zero.

    Args:
      x: [rows, in], float32, bfloat16 or float16, sorted by expert (`permute`). Or a QuantizedArray of it, as in
        `dense`, quantized with zeros in rows of no expert: they share scales with others.
      kernel: [experts, in, out], or [experts, out, in] for kernel_contracting="last"; float32, bfloat16 or float16. Or
        a QuantizedArray of it, from a `jax.vmap` of `quantize` with `recipe.quantization("kernel")`, which serves
        several microbatches and has no gradient of its own: that goes to wgrad_accumulator. Or several in a tuple (gate
        and up), which share one quantized x; dx is the sum over them.
      group_sizes: integers [experts], rows of each, in order.
      bias: [experts, out], or None; a tuple where kernel is one, as are wgrad_accumulator and scaling_state.
      recipe: how to quantize. The tensor of CurrentScaling is all of x, and of a kernel one expert's. A kernel is
        quantized from its own dtype. None multiplies in the dtype of x, to which kernels are rounded. With a recipe
        rows, in and out must be multiples of 16, and block scaling wants the rows of each expert to be one of 128:
        `group_by_expert(…, align=128)`.
      kernel_contracting: "first" or "last": where in the kernel the dimension `in` stands.
      wgrad_accumulator: float32, bfloat16 or float16, shaped as kernel. Its cotangent is its next value, written in
        place where the buffer is donated; kernel's own cotangent is then zero.
      accumulate: the next value is wgrad_accumulator + dkernel; False: dkernel, in the same buffer.
      scaling_state, state_axis: for DelayedScaling, as in `dense`. A state is one for all experts of a kernel, which
        share its scale.
      implementation: as in `dense`, but XLA has no FP8 product of groups. See `grouped_gemm` about GPUs.

    Returns:
      [rows, out] in the dtype of x, or a tuple of them where kernel is one. Gradients have the dtypes of their
      arguments; dkernel and dbias are rounded once, from float32 sums.

    Raises:
      ValueError: an argument breaks a rule above, naming it; or you differentiate the kernel but not scaling_state.
      NotImplementedError: for forward mode, second derivatives, and with respect to a QuantizedArray, but for the
        straight_through of x.
      te_jax.native.NativeUnavailableError: implementation cannot run here, or this GPU cannot multiply as recipe says.

    Examples:
      >>> import jax, jax.numpy as jnp, te_jax
      >>> x, kernel, sizes = jnp.ones((256, 32)), jnp.ones((2, 32, 16)), jnp.array([128, 0])
      >>> loss = lambda x, k: te_jax.ops.grouped_dense(x, k, sizes, recipe=te_jax.recipe.BlockScaling()).sum()
      >>> dx, dkernel = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, kernel)
      >>> dx[:, 0][jnp.array([0, 200])].round(3).tolist(), dkernel[:, 0, 0].round(3).tolist()
      ([16.0, 0.0], [128.0, 0.0])
    """
    several = isinstance(kernel, tuple | list)
    x, group_sizes = as_operand("x", x), as_array("group_sizes", group_sizes)
    weights = named_weights(kernel, bias, scaling_state, wgrad_accumulator, as_kernels)
    accumulate = as_flag("accumulate", accumulate)
    axis_names = state_axes(state_axis, recipe)
    validate_rows(recipe, x)
    if isinstance(x, QuantizedArray):
        if recipe is None:
            raise ValueError("recipe is None, but x is a QuantizedArray; name its recipe or pass x.dequantize()")
        if isinstance(recipe, ProductRecipes):
            validate_not_quantized("x", x, recipe)
        validate_quantized_x(x, recipe, kernel_contracting, row_ndim=1)
    if group_sizes.ndim != 1 or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(
            f"group_sizes has shape {group_sizes.shape} and dtype {group_sizes.dtype}; it must be integers [experts]"
        )

    def validate(recipe: Recipe | None) -> None:
        validate_rows(recipe, x)
        for name, weight in weights.items():
            validate_kernel(x, group_sizes, recipe, kernel_contracting, name, weight)

    validate(recipe)
    for name, weight in weights.items():
        fp8.validate_state(recipe, weight.state, of_kernel(name, "scaling_state"))
    recipe, obstacle = recipe_in_comparison(recipe, validate)
    kernels = tuple(weight.kernel for weight in weights.values())
    layer = GroupedProducts(
        name=NAME,
        codecs=grouped_codecs(recipe, implementation, x, kernels),
        dtype=np.dtype(x.dtype),
        accumulate=accumulate,
        state_axis=axis_names,
        kernel_contracting=kernel_contracting,
    )
    *rows, each = reverse_mode_only((*split(x), tuple(weights.values())), REVERSE_MODE)
    ys = traced(_multiplied, layer, *together((*rows, Groups(group_sizes), each)))
    ys = left_plain(NAME, ys, kernels, obstacle)
    return ys if several else ys[0]


def _multiplied(layer: Products, x, x8, groups: Groups, weights: tuple[Weight, ...]) -> tuple[Array, ...]:
    return linear(layer, x, x8, weights, groups)


# ----------------------------------------------------------------------------------------------------- arguments


def as_kernels(name: str, value: Operand) -> Array | QuantizedArray:
    """Kernels [experts, …], which come quantized each by itself."""
    return with_gradient_through(value) if isinstance(value, QuantizedArray) else as_array(name, value)


def validate_rows(recipe: object, x: Array | QuantizedArray) -> None:
    if x.ndim != 2 or x.dtype not in FLOATS:
        raise ValueError(f"x has shape {x.shape} and dtype {x.dtype}; it must be [rows, in], {FLOAT_NAMES}")
    if recipe is None:
        return
    fp8.validate_recipe(recipe)
    for name, size in (("rows", x.shape[0]), ("values of `in`", x.shape[1])):
        if size % FP8_ALIGNMENT:
            raise ValueError(
                f"x has {size} {name}; FP8 products need a multiple of {FP8_ALIGNMENT}: use group_by_expert(…, "
                "align=128), pad x and kernel, or use recipe=None"
            )


def validate_kernel(
    x: Array | QuantizedArray,
    group_sizes: Array,
    recipe: Recipe | None,
    kernel_contracting: KernelContracting,
    name: str,
    weight: Weight,
) -> None:
    kernel, bias, accumulator, _ = weight
    bias_name, accumulator_name = of_kernel(name, "bias"), of_kernel(name, "wgrad_accumulator")
    validate_kernel_contracting(kernel_contracting)
    experts, inner, order = group_sizes.shape[0], x.shape[1], 1 if kernel_contracting == "first" else -1
    if kernel.ndim != 3 or kernel.shape[0] != experts or kernel.shape[1:][::order][0] != inner:
        sizes = ", ".join((str(inner), "out")[::order])
        raise ValueError(
            f"{name} has shape {kernel.shape}; for {experts} group_sizes and x of shape {x.shape} it must be "
            f"({experts}, {sizes})"
        )
    if isinstance(kernel, QuantizedArray):
        if recipe is None:
            raise ValueError(f"{name} is a QuantizedArray and recipe is None; give the recipe that it was quantized by")
        if isinstance(recipe, ProductRecipes):
            validate_not_quantized(name, kernel, recipe)
        fp8.validate_quantized(name, kernel, recipe, "kernel", "transposed" if order == 1 else "data")
    elif kernel.dtype not in FLOATS:
        raise ValueError(f"{name} has dtype {kernel.dtype}; it must be {FLOAT_NAMES}: cast it")
    if accumulator is not None:
        validate_accumulator(accumulator_name, accumulator, sharding.varying_axes(x, kernel, group_sizes))
    outer = kernel.shape[1:][::order][1]
    if recipe is not None and outer % FP8_ALIGNMENT:
        raise ValueError(
            f"{name} has {outer} values of `out`; FP8 products need a multiple of {FP8_ALIGNMENT}: pad it, or use "
            "recipe=None"
        )
    for label, array, expected in ((bias_name, bias, (experts, outer)), (accumulator_name, accumulator, kernel.shape)):
        if array is not None and (array.shape != expected or array.dtype not in FLOATS):
            raise ValueError(
                f"{label} has shape {array.shape} and dtype {array.dtype}; it must be {FLOAT_NAMES}, {expected}"
            )
