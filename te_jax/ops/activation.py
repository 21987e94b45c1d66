"""Activation functions, gated or not, in the dtype of their operands or in FP8."""

from __future__ import annotations

import functools
from typing import Any, Literal, overload

import jax
from jax import Array

from te_jax import native
from te_jax._core.derivatives import without_gradient
from te_jax._core.reverse_mode import reverse_mode_only
from te_jax._core.types import FLOAT_NAMES, FLOATS
from te_jax.ops._activation_kernels import activate_quantized, activated
from te_jax.ops.operands import as_array
from te_jax.ops.quantize import as_request
from te_jax.quantized import QuantizedArray
from te_jax.recipe import Quantization
from te_jax.reference.activation import Activation, ActivationName
from te_jax.reference.quantize import Copies, GroupAxes


# fmt: off
@overload
def activation(
    x: jax.typing.ArrayLike, activation: Activation | ActivationName = "gelu", *, quantization: None = None,
) -> Array: ...
@overload
def activation(
    x: jax.typing.ArrayLike, activation: Activation | ActivationName = "gelu", *, quantization: Quantization,
    row_ndim: int | None = None, copies: Copies = "both", amax: jax.typing.ArrayLike | None = None,
    amax_axis: GroupAxes | None = None, with_amax: Literal[False] = False,
    implementation: native.Implementation | None = None,
) -> QuantizedArray: ...
@overload
def activation(
    x: jax.typing.ArrayLike, activation: Activation | ActivationName = "gelu", *, quantization: Quantization,
    row_ndim: int | None = None, copies: Copies = "both", amax: jax.typing.ArrayLike | None = None,
    amax_axis: GroupAxes | None = None, with_amax: Literal[True],
    implementation: native.Implementation | None = None,
) -> tuple[QuantizedArray, Array]: ...
@overload
def activation(
    x: jax.typing.ArrayLike, activation: Activation | ActivationName = "gelu", *,
    quantization: Quantization | None = None, row_ndim: int | None = None, copies: Copies = "both",
    amax: jax.typing.ArrayLike | None = None, amax_axis: GroupAxes | None = None, with_amax: bool = False,
    implementation: native.Implementation | None = None,
) -> Any: ...
# fmt: on
def activation(
    x: jax.typing.ArrayLike,
    activation: Activation | ActivationName = "gelu",
    *,
    quantization: Quantization | None = None,
    row_ndim: int | None = None,
    copies: Copies = "both",
    amax: jax.typing.ArrayLike | None = None,
    amax_axis: GroupAxes | None = None,
    with_amax: bool = False,
    implementation: native.Implementation | None = None,
) -> Any:
    r"""An activation function of every value, computed in float32.

        silu          x · sigmoid(alpha x)
        gelu          0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³)))
        relu          max(x, 0)
        squared_relu  max(x, 0)²

    Args:
      x: [*rows, *cols], float32, bfloat16 or float16, sharded in any way; any shape without quantization.
      activation: one of the names above, or an `Activation` without limit and offset, such as
        `Activation("silu", alpha=1.702)`.
      quantization: None for a result in the dtype of x, which XLA computes and which has all derivatives. Otherwise the
        format and scaling of the result, which one kernel computes and quantizes; for example
        `recipe.quantization("activation")`. Current scaling reads x twice. Row scaling writes the result to memory
        before it quantizes it.
      row_ndim, copies, amax, amax_axis, with_amax, implementation: with quantization only, as in
        `te_jax.ops.quantize`; amax is that of the result.

    Returns:
      An array like x, or a `QuantizedArray`, equal to `ops.quantize` of that array up to the rounding of f; with
      with_amax a tuple of it and the amax of the result.

    Raises:
      ValueError: for arguments that break a rule above, naming the argument.
      NotImplementedError: for derivatives through a `QuantizedArray`.
      te_jax.native.NativeUnavailableError: for implementation="native" where it cannot run.

    Examples:
      >>> import jax.numpy as jnp, te_jax
      >>> x = jnp.array([[-1.0, 0.0, 2.0]])
      >>> te_jax.ops.activation(x, "squared_relu").tolist()
      [[0.0, 0.0, 4.0]]
    """
    function = Activation.ungated(activation)
    x = _as_float_array("x", x)
    options = {
        "row_ndim": row_ndim,
        "copies": copies,
        "amax": amax,
        "amax_axis": amax_axis,
        "with_amax": with_amax,
        "implementation": implementation,
    }
    return _activation("activation", "x", function, x, None, quantization, options)


# fmt: off
@overload
def gated_activation(
    gate: jax.typing.ArrayLike, up: jax.typing.ArrayLike, activation: Activation | ActivationName = "silu", *,
    quantization: None = None,
) -> Array: ...
@overload
def gated_activation(
    gate: jax.typing.ArrayLike, up: jax.typing.ArrayLike, activation: Activation | ActivationName = "silu", *,
    quantization: Quantization,
    row_ndim: int | None = None, copies: Copies = "both", amax: jax.typing.ArrayLike | None = None,
    amax_axis: GroupAxes | None = None, with_amax: Literal[False] = False,
    implementation: native.Implementation | None = None,
) -> QuantizedArray: ...
@overload
def gated_activation(
    gate: jax.typing.ArrayLike, up: jax.typing.ArrayLike, activation: Activation | ActivationName = "silu", *,
    quantization: Quantization,
    row_ndim: int | None = None, copies: Copies = "both", amax: jax.typing.ArrayLike | None = None,
    amax_axis: GroupAxes | None = None, with_amax: Literal[True],
    implementation: native.Implementation | None = None,
) -> tuple[QuantizedArray, Array]: ...
@overload
def gated_activation(
    gate: jax.typing.ArrayLike, up: jax.typing.ArrayLike, activation: Activation | ActivationName = "silu", *,
    quantization: Quantization | None = None,
    row_ndim: int | None = None, copies: Copies = "both", amax: jax.typing.ArrayLike | None = None,
    amax_axis: GroupAxes | None = None, with_amax: bool = False, implementation: native.Implementation | None = None,
) -> Any: ...
# fmt: on
def gated_activation(
    gate: jax.typing.ArrayLike,
    up: jax.typing.ArrayLike,
    activation: Activation | ActivationName = "silu",
    *,
    quantization: Quantization | None = None,
    row_ndim: int | None = None,
    copies: Copies = "both",
    amax: jax.typing.ArrayLike | None = None,
    amax_axis: GroupAxes | None = None,
    with_amax: bool = False,
    implementation: native.Implementation | None = None,
) -> Any:
    r"""A gated activation function: SwiGLU ("silu"), GeGLU ("gelu", by tanh), ReGLU ("relu"), computed in float32.

        y = f(min(gate, limit)) · (clip(up, ±limit) + offset)

    with f as in `activation`. Limit and offset are those of an `Activation`; a name alone has none. Gradients are zero
    where a value was clipped, and unchanged at the limit.

    Args:
      gate, up: [*rows, *cols], of the same shape and dtype: float32, bfloat16 or float16, sharded in any way; any shape
        without quantization.
      activation: "silu", "gelu", "relu", "squared_relu", or an `Activation`, such as that of gpt-oss,
        `Activation("silu", alpha=1.702, limit=7.0, offset=1.0)`.
      quantization: None for a result in the dtype of gate, which XLA computes and which has all derivatives. Otherwise
        the format and scaling of the result, which one kernel computes and quantizes; see `activation`.
      row_ndim, copies, amax, amax_axis, with_amax, implementation: with quantization only, as in
        `te_jax.ops.quantize`; amax is that of the result.

    Returns:
      An array like gate, or a `QuantizedArray`, equal to `ops.quantize` of that array up to the rounding of f; with
      with_amax a tuple of it and the amax of the result.

    Raises:
      ValueError: for arguments that break a rule above, naming the argument.
      NotImplementedError: for derivatives through a `QuantizedArray`.
      te_jax.native.NativeUnavailableError: for implementation="native" where it cannot run.

    References:
      Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202.

    Examples:
      >>> import jax.numpy as jnp, te_jax
      >>> gate, up = jnp.array([[-1.0, 3.0]]), jnp.array([[5.0, 5.0]])
      >>> te_jax.ops.gated_activation(gate, up, te_jax.ops.Activation("relu", limit=2.0, offset=1.0)).tolist()
      [[0.0, 6.0]]
    """
    function = Activation.of(activation)
    gate, up = _as_float_array("gate", gate), _as_float_array("up", up)
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"up has shape {up.shape} and dtype {up.dtype}, but gate has shape {gate.shape} and dtype {gate.dtype}; "
            "they must be the same"
        )
    options = {
        "row_ndim": row_ndim,
        "copies": copies,
        "amax": amax,
        "amax_axis": amax_axis,
        "with_amax": with_amax,
        "implementation": implementation,
    }
    return _activation("gated_activation", "gate", function, gate, up, quantization, options)


_OPTIONS = {
    "row_ndim": None,
    "copies": "both",
    "amax": None,
    "amax_axis": None,
    "with_amax": False,
    "implementation": None,
}


def _activation(
    operation: str,
    name: str,
    function: Activation,
    gate: Array,
    up: Array | None,
    quantization: Quantization | None,
    options: dict[str, Any],
) -> Any:
    if quantization is None:
        for option, default in _OPTIONS.items():
            if options[option] is not default and options[option] != default:
                raise ValueError(
                    f"{option} is given without quantization, whose option it is: XLA computes results in the dtype "
                    "of the operands; leave it out, or say how to quantize"
                )
        # In scans and for remat policies, too, the backward pass needs no more than the operands.
        return jax.checkpoint(functools.partial(activated, function), prevent_cse=False)(gate, up)
    implementation = options.pop("implementation")
    request, amax = as_request(name, gate, quantization, **options)
    use_native = native.use_native(implementation, dtype=gate.dtype) and gate.size > 0
    parts = activate_quantized(function, gate, up, amax, request, use_native)
    reason = (
        f"te_jax.ops.{operation} has no derivative with quantization, because that of rounding is zero: leave "
        "quantization out for one, or pass jax.lax.stop_gradient of the operands"
    )
    operands = jax.tree.map(lambda operand: reverse_mode_only(operand, reason), (gate, up, amax))
    parts: Any = without_gradient(parts, operands, reason)
    return (parts.array, parts.amax) if request.with_amax else parts.array


def _as_float_array(name: str, x: jax.typing.ArrayLike) -> Array:
    x = as_array(name, x)
    if x.dtype not in FLOATS:
        raise ValueError(f"{name} has dtype {x.dtype}; it must be {FLOAT_NAMES}: cast it")
    return x
