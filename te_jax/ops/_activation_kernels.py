"""Activation functions whose results, and gradients, leave as FP8, for layers: without a derivative of their own.

With tensor and block scaling the native kernels quantize what they compute, so that it never lies in memory in its own
dtype. With other scalings, and in the reference, it does. Rows may have weights, which multiply the result in float32
before it is rounded, as in a mixture of experts; the native kernels know them with block scaling, where no amax is
asked for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array, lax

from te_jax import reference, sharding
from te_jax.ops._quantize_kernels import (
    AMAX,
    Dimensions,
    Kernels,
    Request,
    Result,
    block_attributes,
    quantized_array,
    shared_facts,
)
from te_jax.ops.quantize import quantize_requested
from te_jax.quantized import PLAIN, Facts, QuantizedArray
from te_jax.recipe import Quantization
from te_jax.reference.activation import Activation
from te_jax.reference.quantize import QuantizedParts, blocked_groups

Gradients = tuple[QuantizedParts, QuantizedParts | None, QuantizedArray | None]


def activated(function: Activation, gate: Array, up: Array | None = None, weights: Array | None = None) -> Array:
    """The result in the dtype of gate; up is None where the function is not gated. Weights are float32 [*rows]."""
    if weights is None:
        return reference.activation(gate, function) if up is None else reference.gated_activation(gate, up, function)
    wide = activated(function, gate.astype(jnp.float32), None if up is None else up.astype(jnp.float32))
    return (wide * lax.expand_dims(weights, range(weights.ndim, gate.ndim))).astype(gate.dtype)


# Under jit even when called eagerly: sharded operands are then partitioned rather than gathered.
@functools.partial(jax.jit, static_argnums=(0, 4, 5), inline=sharding.INLINE)
def activate_quantized(
    function: Activation,
    gate: Array,
    up: Array | None,
    amax: Array | None,
    request: Request,
    use_native: bool,
    weights: Array | None = None,
) -> QuantizedParts:
    """The result in FP8.

    Args:
      function: what to compute.
      gate: [*rows, *cols], float32, bfloat16 or float16.
      up: the same shape and dtype, or None where the function is not gated.
      amax: float32 scalar from which the scale follows with tensor scaling; None: the scale follows from the result
        itself, in two passes.
      request: how to quantize; without dbias.
      use_native: whether to run the native kernels; gate then has values.
      weights: float32 [*rows], factors of the rows of the result, or None. With tensor or row scaling, or with_amax,
        XLA multiplies by them before the result is quantized.

    Returns:
      The parts that `ops.quantize` would give for the result.
    """
    gate, up, amax, weights = lax.stop_gradient((gate, up, amax, weights))
    fused = _fused(weights, request) if use_native else PLAIN
    if fused.is_plain:
        return quantize_requested(activated(function, gate, up, weights), amax, request, use_native)
    current_amax = None
    if request.with_amax if fused.in_blocks else amax is None:
        current_amax = _amax(function, gate, up, request)
    if fused.in_blocks:
        kernels = Kernels(request, gate.ndim, blocked_groups(request.quantization, request.copies))
        arrays = kernels.run(
            "te_activation_blocks",
            {"gate": (kernels.x, gate), "up": (kernels.x, up), "weights": (kernels.rows, weights)},
            kernels.blocks,
            **dataclasses.asdict(function),
            **block_attributes(request.quantization),
        )
    else:
        kernels = Kernels(request, gate.ndim)
        data, transposed, scale_inv, transposed_scale_inv, seen_amax = kernels.run(
            "te_activation_tensor",
            {
                "gate": (kernels.x, gate),
                "up": (kernels.x, up),
                "amax": ((), current_amax if amax is None else amax),
            },
            {
                **kernels.copies,
                **kernels.tensor_scales("amax"),
                "amax_out": AMAX if request.with_amax and current_amax is None else None,
            },
            **dataclasses.asdict(function),
            power_of_two_scales=request.quantization.power_of_two_scales,
        )
        arrays = data, scale_inv, transposed, transposed_scale_inv
        current_amax = seen_amax if current_amax is None else current_amax
    return QuantizedParts(quantized_array(gate, arrays, request), current_amax if request.with_amax else None, None)


@functools.partial(jax.jit, static_argnums=(0, 7, 8, 9), inline=sharding.INLINE)
def activation_gradients_quantized(
    function: Activation,
    gate: Array,
    up: Array | None,
    dy: Array,
    gate_amax: Array | None,
    up_amax: Array | None,
    y_amax: Array | None,
    request: Request,
    y_quantization: Quantization | None,
    use_native: bool,
    weights: Array | None = None,
) -> Gradients | tuple[QuantizedParts, QuantizedParts | None, QuantizedArray | None, Array]:
    """The gradients of gate and up in FP8, and the result once more, transposed, for the weight gradient that reads it.

    Args:
      function, gate, up: those of the result.
      dy: the gradient of the result, in its shape and dtype.
      gate_amax, up_amax: float32 scalars from which the scales of the gradients follow with tensor scaling; None for
        both: the scales follow from the gradients themselves, in two passes.
      y_amax: the same for the result; None: its scale follows from itself, in a pass of its own.
      request: how to quantize both gradients.
      y_quantization: how to quantize the result; None where it is not wanted.
      use_native: whether to run the native kernels; gate then has values.
      weights: those of the result, or None.

    Returns:
      The parts that `ops.quantize` would give for both gradients, rounded to the dtype of gate; None for up where the
      function is not gated. And the result with its transposed copy alone, or None. With weights also their gradient,
      float32 [*rows]: the sum over columns of dy times the result without weights, which is not rounded.
    """
    operands = lax.stop_gradient((gate, up, dy))
    weights = lax.stop_gradient(weights)
    amaxes = lax.stop_gradient((gate_amax, up_amax, y_amax))
    y_request = None
    if y_quantization is not None:
        y_request = dataclasses.replace(
            request, quantization=y_quantization, copies="transposed", with_amax=False, with_dbias=False
        )
    fused = _fused(weights, request, y_request) if use_native else PLAIN
    if fused.by_tensor:
        return _gradients_in_tensors(function, operands, amaxes, request, y_request)
    if fused.in_blocks:
        gate_parts, up_parts, y8, dweights = _gradients_in_blocks(function, operands, weights, request, y_request)
    else:
        *inputs, dy = sharding.varying_together((*operands[:2], weights, operands[2]))
        y, gradients_of = jax.vjp(functools.partial(activated, function), *inputs)
        dgate, dup, dweights = gradients_of(dy)
        if dweights is not None and request.col_axes:
            dweights = lax.psum(dweights, request.col_axes)
        gate_parts = quantize_requested(dgate, amaxes[0], request, use_native)
        up_parts = None if dup is None else quantize_requested(dup, amaxes[1], request, use_native)
        y8 = None if y_request is None else quantize_requested(y, amaxes[2], y_request, use_native).array
    gradients = gate_parts, up_parts, y8
    return gradients if dweights is None else (*gradients, dweights)


def _gradients_in_tensors(
    function: Activation,
    operands: tuple[Array, Array | None, Array],
    amaxes: tuple[Array | None, Array | None, Array | None],
    request: Request,
    y_request: Request | None,
) -> Gradients:
    gate, up, _ = operands
    gate_amax, up_amax, y_amax = amaxes
    current_amaxes: list[Array | None] = [None, None]
    if gate_amax is None:
        current_amaxes = _amaxes_of_gradients(function, operands, request)
        gate_amax, up_amax = current_amaxes
    if y_request is None:
        y_amax = None
    elif y_amax is None:
        y_amax = _amax(function, gate, up, y_request)
    kernels, y_kernels = Kernels(request, gate.ndim), y_request and Kernels(y_request, gate.ndim)

    def results(of: str) -> dict[str, Result | None]:
        amax_result = AMAX if request.with_amax and current_amaxes[0] is None else None
        copies = kernels.copies | kernels.tensor_scales(f"{of}_amax")
        return _of(of, copies | {"amax_out": amax_result, "dbias_partial": kernels.dbias})

    amaxes_by_name = {"gate_amax": gate_amax, "up_amax": up_amax, "y_amax": y_amax}
    arrays = kernels.run(
        "te_activation_gradient_tensor",
        _operands(kernels, operands) | {name: ((), amax) for name, amax in amaxes_by_name.items()},
        {
            **results("gate"),
            **(dict.fromkeys(results("up")) if up is None else results("up")),
            "y_transposed": y_kernels.transposed if y_kernels else None,
            "y_transposed_scale_inv": y_kernels.tensor_scales("y_amax")["transposed_scale_inv"] if y_kernels else None,
        },
        **dataclasses.asdict(function),
        power_of_two_scales=request.quantization.power_of_two_scales,
        y_power_of_two_scales=y_request is not None and y_request.quantization.power_of_two_scales,
    )

    def parts(first: int, current_amax: Array | None) -> QuantizedParts:
        data, transposed, scale_inv, transposed_scale_inv, seen_amax, dbias = arrays[first : first + 6]
        array = quantized_array(gate, (data, scale_inv, transposed, transposed_scale_inv), request)
        amax = seen_amax if current_amax is None else current_amax
        return QuantizedParts(array, amax if request.with_amax else None, dbias)

    up_parts = None if up is None else parts(6, current_amaxes[1])
    return (
        parts(0, current_amaxes[0]),
        up_parts,
        y_request and quantized_array(gate, (None, None, *arrays[12:]), y_request),
    )


def _gradients_in_blocks(
    function: Activation,
    operands: tuple[Array, Array | None, Array],
    weights: Array | None,
    request: Request,
    y_request: Request | None,
) -> tuple[QuantizedParts, QuantizedParts | None, QuantizedArray | None, Array | None]:
    gate, up, _ = operands
    blocked = blocked_groups(request.quantization, request.copies)
    if y_request is not None:
        blocked |= blocked_groups(y_request.quantization, y_request.copies)
    kernels, y_kernels = Kernels(request, gate.ndim, blocked), y_request and Kernels(y_request, gate.ndim, blocked)
    results = kernels.blocks | {"dbias_partial": kernels.dbias}
    y_attributes = block_attributes(y_request.quantization if y_request else request.quantization)
    arrays = kernels.run(
        "te_activation_gradient_blocks",
        _operands(kernels, operands) | {"weights": (kernels.rows, weights)},
        {
            **_of("gate", results),
            **_of("up", dict.fromkeys(results) if up is None else results),
            "y_transposed": y_kernels.transposed if y_kernels else None,
            "y_transposed_scale_inv": y_kernels.blocks["transposed_scale_inv"] if y_kernels else None,
            "dweights_partial": None if weights is None else Result(kernels.rows, reduced_by="sum"),
        },
        **dataclasses.asdict(function),
        **block_attributes(request.quantization),
        y_transposed_128x128=y_attributes["transposed_128x128"],
        y_power_of_two_scales=y_attributes["power_of_two_scales"],
    )
    amaxes = _amaxes_of_gradients(function, operands, request) if request.with_amax else [None, None]
    parts = [
        QuantizedParts(quantized_array(gate, arrays[first : first + 4], request), amax, arrays[first + 4])
        for first, amax in zip((0, 5), amaxes, strict=True)
    ]
    y8 = y_request and quantized_array(gate, (None, None, *arrays[10:12]), y_request)
    return parts[0], None if up is None else parts[1], y8, arrays[12]


def _operands(
    kernels: Kernels, operands: tuple[Array, Array | None, Array]
) -> dict[str, tuple[Dimensions, Array | None]]:
    """Gate, up and dy."""
    return {name: (kernels.x, x) for name, x in zip(("gate", "up", "dy"), operands, strict=True)}


def _of(name: str, results: Mapping[str, Result | None]) -> dict[str, Result | None]:
    """Results about gate or up."""
    return {f"{name}_{result}": value for result, value in results.items()}


def _fused(weights: Array | None, *requests: Request | None) -> Facts:
    """The facts of scalings that all requests share, of tensors or blocks, if the kernels know them; otherwise those of
    plain arrays."""
    facts = shared_facts(*requests)
    if weights is None:
        return PLAIN if facts.by_row else facts
    return facts if facts.in_blocks and not any(each.with_amax for each in requests if each) else PLAIN


def _amax(function: Activation, gate: Array, up: Array | None, request: Request) -> Array:
    """The amax of the result."""
    kernels = Kernels(request, gate.ndim)
    operands = {"gate": (kernels.x, gate), "up": (kernels.x, up)}
    return kernels.run("te_activation_amax", operands, {"amax": AMAX}, **dataclasses.asdict(function))[0]


def _amaxes_of_gradients(
    function: Activation, operands: tuple[Array, Array | None, Array], request: Request
) -> list[Array | None]:
    kernels = Kernels(request, operands[0].ndim)
    return kernels.run(
        "te_activation_gradient_amax",
        _operands(kernels, operands),
        {"gate_amax": AMAX, "up_amax": None if operands[1] is None else AMAX},
        **dataclasses.asdict(function),
    )
