"""Gated MLPs of experts with block scaling: `grouped_dense`, a gated activation and `grouped_dense`, in fewer passes.

Tokens are gathered where they are quantized, the activation multiplies the weights of rows and writes FP8, and the
backward pass does the same: of arrays [rows, features], only gate, up, the gradient of the activation, y and the
gradient of the rows lie in memory in their own dtype.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jax.interpreters import ad

from te_jax import native, sharding
from te_jax._core.arguments import as_flag
from te_jax._core.derivatives import differentiated_once
from te_jax._core.reverse_mode import reverse_mode_only
from te_jax.ops import _fp8
from te_jax.ops._activation_kernels import activate_quantized, activation_gradients_quantized
from te_jax.ops._dense_arguments import implementation_for
from te_jax.ops._grouped_product import rows_in_groups
from te_jax.ops._operands import as_array
from te_jax.ops._quantize_kernels import Request
from te_jax.ops._quantize_rows import quantize_rows
from te_jax.ops.activation import as_function
from te_jax.ops.grouped_dense import (
    NAME,
    REVERSE_MODE,
    GroupedLayer,
    accumulated,
    problem_of,
    validate_differentiated,
    validate_kernel,
    validate_rows,
)
from te_jax.ops.permute import Permutation, permute_weights, unpermute, values_of_choices
from te_jax.quantized import QuantizedArray
from te_jax.recipe import Recipe, Role
from te_jax.reference.activation import Function
from te_jax.reference.quantize import Copies
from te_jax.sharding import Layout

__all__ = ["experts_mlp", "is_fused"]


def is_fused(recipe: Recipe | None) -> bool:
    """Whether `experts_mlp` takes this recipe."""
    return isinstance(recipe, Recipe) and all(
        scaling.startswith("block") for role in ("activation", "gradient") for scaling in recipe.scalings[role]
    )


def experts_mlp(
    x: Array,
    weights: Array,
    group_sizes: Array,
    permutation: Permutation | None,
    kernel: tuple[Any, Any, Any],
    *,
    kind: Any,
    alpha: float,
    limit: float | None,
    offset: float,
    recipe: Recipe,
    wgrad_accumulator: tuple[Any, Any, Any],
    accumulate: bool,
    implementation: native.Implementation | None,
) -> Array:
    """y = Σ_k h_k · down with h = w f(x · gate) (x · up), over the choices k of each token.

    It computes the same as these lines, with fewer passes over memory, and h is rounded once:

        rows = permute(x, permutation)
        gate, up = grouped_dense(rows, (gate, up), group_sizes, …)
        h = gated_activation(gate, up, kind, …) * permute_weights(weights, permutation)[:, None]
        y = unpermute(grouped_dense(h, down, group_sizes, …), permutation)

    The residuals are x, weights, gate and up ("te_moe_preactivation"), and the kernels in FP8 ("te_dense_kernel").

    Args:
      x: [*tokens, in], float32, bfloat16 or float16; without a permutation the rows themselves, [rows, in], whose
        rows of no expert are not read.
      weights: [*tokens, top_k], any float dtype, from `router`; without a permutation those of rows, [rows].
      group_sizes: integers [experts], multiples of 128.
      permutation: with these sizes, or None.
      kernel: (gate, up, down), as in `grouped_dense`, as are all other arguments but those of the activation.
      kind, alpha, limit, offset: see `gated_activation`.
      recipe: one that `is_fused`.

    Returns:
      [*tokens, out], or without a permutation [rows, out], in the dtype of x.

    Raises:
      ValueError, NotImplementedError, NativeUnavailableError: as `grouped_dense`.
    """
    function = as_function(kind, alpha, limit, offset)
    kernels = tuple(
        value if isinstance(value, QuantizedArray) else as_array(f"kernel[{i}]", value)
        for i, value in enumerate(kernel)
    )
    accumulators = tuple(
        None if value is None else as_array(f"wgrad_accumulator[{i}]", value)
        for i, value in enumerate(wgrad_accumulator)
    )
    count = x.shape[0] if permutation is None else permutation.choices.shape[0]
    rows: Any = jax.ShapeDtypeStruct((count, x.shape[-1]), x.dtype)
    gate, up, _ = kernels
    if gate.shape != up.shape:
        raise ValueError(
            f"kernel[1] has shape {up.shape}, but kernel[0] has {gate.shape}; gate and up must have the same, "
            "[experts, in, hidden]"
        )
    validate_rows(recipe, rows)
    hidden: Any = jax.ShapeDtypeStruct((rows.shape[0], gate.shape[-1]), x.dtype)
    for i, (operand, one, accumulator) in enumerate(zip((rows, rows, hidden), kernels, accumulators, strict=True)):
        named = (f"kernel[{i}]", one), ("bias", None), (f"wgrad_accumulator[{i}]", accumulator)
        validate_kernel(operand, group_sizes, recipe, *named)
    which = implementation_for(implementation, recipe, problem_of(recipe, rows, kernels))
    layer = GroupedLayer(recipe, which, as_flag("accumulate", accumulate))
    operands = reverse_mode_only((x, weights, kernels, accumulators), REVERSE_MODE)
    return _run(*sharding.varying_together((*operands, permutation, group_sizes)), layer, function)


# Under jit even when called eagerly: sharded operands are then partitioned rather than gathered.
@functools.partial(jax.jit, static_argnums=(6, 7), inline=sharding.INLINE)
def _run(x, weights, kernels, accumulators, permutation, group_sizes, layer: GroupedLayer, function: Function) -> Array:
    return _mlp(layer, function, x, weights, kernels, accumulators, permutation, group_sizes)


class _Residuals(NamedTuple):
    """What is kept for the backward pass."""

    layouts: tuple[Any, ...]  # of x, weights, kernels; None for a kernel that came quantized
    x: Array
    weights: Array
    gate: Array  # x · gate, [rows, hidden]
    up: Array  # x · up
    kernels: tuple[QuantizedArray, ...]  # the copies that sum over out
    accumulators: tuple[Array | None, ...]
    permutation: Permutation | None
    group_sizes: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mlp(layer: GroupedLayer, function: Function, x, weights, kernels, accumulators, permutation, group_sizes) -> Array:
    del accumulators
    return _products(layer, function, x, weights, kernels, permutation, group_sizes)[0]


def _products(layer: GroupedLayer, function: Function, x, weights, kernels, permutation, group_sizes):
    """y, the kernels in FP8, and the values before the activation."""
    kernel8s = tuple(layer.quantize_kernel(kernel, x.dtype) for kernel in kernels)
    x8 = _quantized(layer, "activation", x, permutation, group_sizes, "data")
    gate, up = (
        checkpoint_name(layer.gemm(x8, kernel8, group_sizes, out_dtype=x.dtype), "te_moe_preactivation")
        for kernel8 in kernel8s[:2]
    )
    gate_, up_, weights_ = differentiated_once((gate, up, _of_rows(weights, permutation)), NAME)
    request, use_native = _request(layer, "activation", "data"), _use_native(layer, gate)
    h8 = activate_quantized(function, gate_, up_, None, request, use_native, weights=weights_).array
    y = layer.gemm(h8, kernel8s[2], group_sizes, out_dtype=x.dtype)
    return y if permutation is None else unpermute(y, permutation), kernel8s, gate, up


def _forward(layer: GroupedLayer, function: Function, *operands):
    x, weights, kernels, accumulators, *_ = operands
    validate_differentiated((x, weights), kernels, None, accumulators, None)
    x, weights, kernels, accumulators, permutation, group_sizes = custom_vjp_primal_tree_values(operands)
    y, kernel8s, gate, up = _products(layer, function, x, weights, kernels, permutation, group_sizes)
    given = [isinstance(kernel, QuantizedArray) for kernel in kernels]
    if given[2] and kernels[2].data is None:
        raise ValueError(
            "kernel[2] has no data copy, which the gradients of gate and up read; quantize it with copies='both'"
        )
    kept = tuple(
        _fp8.kept(kernel8, "data", None if g else "te_dense_kernel") for kernel8, g in zip(kernel8s, given, strict=True)
    )
    layouts = (
        Layout.of(x),
        Layout.of(weights),
        tuple(None if g else Layout.of(kernel) for kernel, g in zip(kernels, given, strict=True)),
    )
    return y, _Residuals(layouts, x, weights, gate, up, kept, accumulators, permutation, group_sizes)


def _backward(layer: GroupedLayer, function: Function, residuals: _Residuals, dy: Any):
    layouts, x, weights, gate, up, kernel8s, accumulators, permutation, sizes = residuals
    x_layout, weights_layout, kernel_layouts = layouts
    if isinstance(dy, SymbolicZero):
        dy = ad.zeros_like_aval(dy.aval)
    # XLA would quantize x for the weight gradients at once, in the forward pass, and keep that too.
    dy, x = sharding.together(dy, x)
    trained = [
        accumulator is not None or layout is not None
        for accumulator, layout in zip(accumulators, kernel_layouts, strict=True)
    ]
    quantized = functools.partial(_quantized, layer, permutation=permutation, group_sizes=sizes)
    dy8 = quantized("gradient", dy, copies="both" if trained[2] else "data")
    dh = layer.gemm(dy8, kernel8s[2], sizes, rhs_contracting="cols", out_dtype=gate.dtype)
    gate_, up_, dh_, weights_ = differentiated_once((gate, up, dh, _of_rows(weights, permutation)), NAME)
    parts: Any = activation_gradients_quantized(
        function,
        gate_,
        up_,
        Layout.of(gate).apply(dh_),
        None,
        None,
        None,
        _request(layer, "gradient", "both" if any(trained[:2]) else "data"),
        _quantization(layer, "activation") if trained[2] else None,
        _use_native(layer, gate),
        weights=weights_,
    )
    gate_parts, up_parts, h8, dweights = parts
    gradients = gate_parts.array, up_parts.array
    dx = layer.dgrad(gradients, kernel8s[:2], sizes, x_layout.dtype)
    if permutation is not None:
        dx, dweights = unpermute(dx, permutation), values_of_choices(dweights, permutation)
    x8 = quantized("activation", x, copies="transposed") if any(trained[:2]) else None
    dkernels: list[Any] = [None] * 3
    next_accumulators: list[Any] = [None] * 3
    for i, (lhs, rhs) in enumerate(((x8, gradients[0]), (x8, gradients[1]), (h8, dy8))):
        wgrad = functools.partial(layer.gemm, lhs, rhs, sizes, lhs_contracting="rows")
        if (accumulator := accumulators[i]) is not None:
            next_accumulators[i] = accumulated(layer, wgrad, accumulator, lhs, rhs)
        elif (layout := kernel_layouts[i]) is not None:
            dkernels[i] = layout.apply(wgrad(out_dtype=layout.dtype))
    return (
        x_layout.apply(dx),
        weights_layout.apply(dweights),
        tuple(dkernels),
        tuple(next_accumulators),
        None,
        None,
    )


_mlp.defvjp(_forward, _backward, symbolic_zeros=True)


def _quantized(
    layer: GroupedLayer,
    role: Role,
    x: Array,
    permutation: Permutation | None,
    group_sizes: Array,
    copies: Copies,
) -> QuantizedArray:
    """The rows of experts in FP8, zeros in others."""
    if permutation is None:
        index = jnp.arange(x.shape[0], dtype=jnp.int32)
        index = jnp.where(index < rows_in_groups(group_sizes, x.shape[0]), index, -1)
    else:
        index = permutation.choices // permutation.rows.shape[-1]
    x = differentiated_once(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), NAME)
    use_native = layer.implementation == "native" and x.size > 0 and index.size > 0
    return quantize_rows(x, index, _quantization(layer, role), copies, use_native)


def _of_rows(weights: Array, permutation: Permutation | None) -> Array:
    """Float32 [rows]."""
    return (weights if permutation is None else permute_weights(weights, permutation)).astype(jnp.float32)


def _quantization(layer: GroupedLayer, role: Role):
    assert layer.recipe is not None
    return layer.recipe.quantization(role)


def _request(layer: GroupedLayer, role: Role, copies: Copies) -> Request:
    return Request(_quantization(layer, role), 1, copies, (), (), with_amax=False, with_dbias=False)


def _use_native(layer: GroupedLayer, x: Array) -> bool:
    return layer.implementation == "native" and x.size > 0
