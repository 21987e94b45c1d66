"""Activation functions whose results, and gradients, leave as FP8, for layers: without a derivative of their own.

With tensor and block scaling the native kernels quantize what they compute, so that it never lies in memory in its own
dtype. With other scalings, and in the reference, it does.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax import Array, lax

from te_jax import reference, sharding
from te_jax.ops._quantize_kernels import (
    AMAX,
    Dimensions,
    Kernels,
    Request,
    Result,
    block_attributes,
    families_of,
    quantized_array,
)
from te_jax.ops.quantize import quantize_requested
from te_jax.quantized import QuantizedArray
from te_jax.recipe import Quantization
from te_jax.reference.activation import Function
from te_jax.reference.quantize import QuantizedParts, blocked_groups


def activated(function: Function, gate: Array, up: Array | None) -> Array:
    """The result in the dtype of gate; up is None where the function is not gated."""
    return reference.activation(gate, function) if up is None else reference.gated_activation(gate, up, function)


# Under jit even when called eagerly: sharded operands are then partitioned rather than gathered.
@functools.partial(jax.jit, static_argnums=(0, 4, 5), inline=sharding.INLINE)
def activate_quantized(
    function: Function, gate: Array, up: Array | None, amax: Array | None, request: Request, use_native: bool
) -> QuantizedParts:
    """The result in FP8.

    Args:
      function: what to compute.
      gate: [*rows, *cols], float32, bfloat16 or float16.
      up: the same shape and dtype, or None where the function is not gated.
      amax: float32 scalar from which the scale follows with tensor scaling; None: from the result itself, in two passes.
      request: how to quantize; without dbias.
      use_native: by the native kernels; gate then has values.

    Returns:
      The parts that `ops.quantize` would give for the result.
    """
    gate, up, amax = lax.stop_gradient((gate, up, amax))
    quantization = request.quantization
    family = _fused_family(families_of(quantization, request.copies)) if use_native else None
    if family is None:
        return quantize_requested(activated(function, gate, up), amax, request, use_native)
    kernels = Kernels(request, gate.ndim, blocked_groups(quantization, request.copies) if family == "block" else ())
    operands = [(kernels.x, gate), (kernels.x, up)]
    own_amax = None
    if request.with_amax if family == "block" else amax is None:
        own_amax = _amax(function, gate, up, request)
    if family == "block":
        scales = kernels.block_scales()
        arrays = kernels.run(
            "te_activation_blocks",
            operands,
            [kernels.data, scales[0], kernels.transposed, scales[1]],
            **_attributes(function),
            **block_attributes(quantization),
        )
    else:
        data, transposed, scale_inv, transposed_scale_inv, seen_amax = kernels.run(
            "te_activation_tensor",
            [*operands, ((), own_amax if amax is None else amax)],
            [
                kernels.data,
                kernels.transposed,
                *kernels.tensor_scales(amax_operand=2),
                AMAX if request.with_amax and own_amax is None else None,
            ],
            **_attributes(function),
            power_of_two_scales=quantization.power_of_two_scales,
        )
        arrays = data, scale_inv, transposed, transposed_scale_inv
        own_amax = seen_amax if own_amax is None else own_amax
    return QuantizedParts(quantized_array(gate, arrays, request), own_amax if request.with_amax else None, None)


@functools.partial(jax.jit, static_argnums=(0, 7, 8, 9), inline=sharding.INLINE)
def activation_gradients_quantized(
    function: Function,
    gate: Array,
    up: Array | None,
    dy: Array,
    gate_amax: Array | None,
    up_amax: Array | None,
    y_amax: Array | None,
    request: Request,
    y_quantization: Quantization | None,
    use_native: bool,
) -> tuple[QuantizedParts, QuantizedParts | None, QuantizedArray | None]:
    """The gradients of gate and up in FP8, and the result once more, transposed, for the weight gradient that reads it.

    Args:
      function, gate, up: as the result was computed from.
      dy: the gradient of the result, in its shape and dtype.
      gate_amax, up_amax: float32 scalars from which the scales of the gradients follow with tensor scaling; None for
        both: from the gradients themselves, in two passes.
      y_amax: the same for the result; None: from itself, in a pass of its own.
      request: how to quantize both gradients.
      y_quantization: how to quantize the result; None where it is not wanted.
      use_native: by the native kernels; gate then has values.

    Returns:
      The parts that `ops.quantize` would give for both gradients, rounded to the dtype of gate; None for up where the
      function is not gated; and the result with its transposed copy alone, or None.
    """
    gate, up, dy, gate_amax, up_amax, y_amax = lax.stop_gradient((gate, up, dy, gate_amax, up_amax, y_amax))
    y_request = None
    if y_quantization is not None:
        y_request = dataclasses.replace(
            request, quantization=y_quantization, copies="transposed", with_amax=False, with_dbias=False
        )
    requests = [each for each in (request, y_request) if each is not None]
    families = frozenset().union(*(families_of(each.quantization, each.copies) for each in requests))
    family = _fused_family(families) if use_native else None
    if family is None:
        operands = (gate,) if up is None else (gate, up)
        y, gradient_of = jax.vjp(lambda gate, up=None: activated(function, gate, up), *operands)
        gate_parts, up_parts = [
            quantize_requested(gradient, amax, request, use_native)
            for gradient, amax in zip(gradient_of(dy), (gate_amax, up_amax), strict=False)
        ] + [None] * (up is None)
        y8 = None if y_request is None else quantize_requested(y, y_amax, y_request, use_native).array
        return gate_parts, up_parts, y8

    blocked = frozenset()
    if family == "block":
        blocked = blocked.union(*(blocked_groups(each.quantization, each.copies) for each in requests))
    kernels = Kernels(request, gate.ndim, blocked)
    operands: list[tuple[Dimensions, Array | None]] = [(kernels.x, x) for x in (gate, up, dy)]
    own_amaxes: list[Array | None] = [None, None]
    if request.with_amax if family == "block" else gate_amax is None:
        amax_kernels = Kernels(request, gate.ndim)
        own_amaxes = amax_kernels.run(
            "te_activation_gradient_amax",
            [(amax_kernels.x, x) for x in (gate, up, dy)],
            [AMAX, None if up is None else AMAX],
            **_attributes(function),
        )
    y_kernels = None if y_request is None else Kernels(y_request, gate.ndim, blocked)
    y_attributes = {"y_power_of_two_scales": y_quantization is not None and y_quantization.power_of_two_scales}
    if family == "block":
        scales = kernels.block_scales()
        results: list[Result | None] = [kernels.data, scales[0], kernels.transposed, scales[1], kernels.dbias]
        found = kernels.run(
            "te_activation_gradient_blocks",
            operands,
            [
                *results,
                *(results if up is not None else [None] * len(results)),
                *((y_kernels.transposed, y_kernels.block_scales()[1]) if y_kernels else (None, None)),
            ],
            **_attributes(function),
            **block_attributes(request.quantization),
            y_transposed_128x128=y_quantization is not None and y_quantization.transposed_scaling == "block_128x128",
            **y_attributes,
        )
        gradients = [(*found[first : first + 4], None, found[first + 4]) for first in (0, 5)]
    else:
        if y_request is None:
            y_amax = None
        elif y_amax is None:
            y_amax = _amax(function, gate, up, y_request)
        amaxes = own_amaxes if gate_amax is None else [gate_amax, up_amax]
        own = AMAX if request.with_amax and gate_amax is not None else None
        results = [
            [kernels.data, kernels.transposed, *kernels.tensor_scales(amax_operand), own, kernels.dbias]
            for amax_operand in (3, 4)
        ]
        found = kernels.run(
            "te_activation_gradient_tensor",
            [*operands, *(((), amax) for amax in (*amaxes, y_amax))],
            [
                *results[0],
                *(results[1] if up is not None else [None] * len(results[1])),
                *((y_kernels.transposed, y_kernels.tensor_scales(amax_operand=5)[1]) if y_kernels else (None, None)),
            ],
            **_attributes(function),
            power_of_two_scales=request.quantization.power_of_two_scales,
            **y_attributes,
        )
        gradients = [(found[i], found[i + 2], found[i + 1], found[i + 3], found[i + 4], found[i + 5]) for i in (0, 6)]

    def parts_of(gradient: Any, own_amax: Array | None) -> QuantizedParts:
        *arrays, seen_amax, dbias = gradient
        amax = (seen_amax if own_amax is None else own_amax) if request.with_amax else None
        return QuantizedParts(quantized_array(gate, arrays, request), amax, dbias)

    gate_parts = parts_of(gradients[0], own_amaxes[0])
    up_parts = None if up is None else parts_of(gradients[1], own_amaxes[1])
    y8 = None if y_request is None else quantized_array(gate, (None, None, *found[-2:]), y_request)
    return gate_parts, up_parts, y8


def _fused_family(families: frozenset[str]) -> str | None:
    """The one family of scalings, if there are kernels for it."""
    family = next(iter(families))
    return family if len(families) == 1 and family in ("tensor", "block") else None


def _amax(function: Function, gate: Array, up: Array | None, request: Request) -> Array:
    """That of the result."""
    kernels = Kernels(request, gate.ndim)
    (amax,) = kernels.run(
        "te_activation_amax", [(kernels.x, gate), (kernels.x, up)], [AMAX], **_attributes(function)
    )  # fmt: skip
    return amax


def _attributes(function: Function) -> dict[str, Any]:
    return dataclasses.asdict(function)
