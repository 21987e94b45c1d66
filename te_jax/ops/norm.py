"""RMS and layer normalization, with a residual added before, in the dtype of their operand or in FP8."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jax.interpreters import ad

from te_jax import native, sharding
from te_jax._core.arguments import as_flag, is_finite_number
from te_jax._core.derivatives import straight_through
from te_jax._core.reverse_mode import reverse_mode_only
from te_jax._core.types import FLOAT_NAMES, FLOATS
from te_jax.ops._norm_kernels import Norm, Normalized, norm_gradients, normalized
from te_jax.ops._quantize_kernels import Request
from te_jax.ops.operands import as_array
from te_jax.ops.quantize import as_request, quantize
from te_jax.quantized import QuantizedArray
from te_jax.recipe import Quantization
from te_jax.reference.norm import normalize, residual_sum
from te_jax.reference.quantize import Copies


# fmt: off
@overload
def rms_norm(
    x: jax.typing.ArrayLike, scale: jax.typing.ArrayLike, *, epsilon: float = 1e-6, zero_centered: bool = False,
    residual: None = None, quantization: None = None, copies: Copies = "both",
    implementation: native.Implementation | None = None,
) -> Array: ...
@overload
def rms_norm(
    x: jax.typing.ArrayLike, scale: jax.typing.ArrayLike, *, epsilon: float = 1e-6, zero_centered: bool = False,
    residual: jax.typing.ArrayLike, quantization: None = None, copies: Copies = "both",
    implementation: native.Implementation | None = None,
) -> tuple[Array, Array]: ...
@overload
def rms_norm(
    x: jax.typing.ArrayLike, scale: jax.typing.ArrayLike, *, epsilon: float = 1e-6, zero_centered: bool = False,
    residual: None = None, quantization: Quantization, copies: Copies = "both",
    implementation: native.Implementation | None = None,
) -> QuantizedArray: ...
@overload
def rms_norm(
    x: jax.typing.ArrayLike, scale: jax.typing.ArrayLike, *, epsilon: float = 1e-6, zero_centered: bool = False,
    residual: jax.typing.ArrayLike, quantization: Quantization, copies: Copies = "both",
    implementation: native.Implementation | None = None,
) -> tuple[QuantizedArray, Array]: ...
@overload
def rms_norm(
    x: jax.typing.ArrayLike, scale: jax.typing.ArrayLike, *, epsilon: float = 1e-6, zero_centered: bool = False,
    residual: jax.typing.ArrayLike | None = None, quantization: Quantization | None = None, copies: Copies = "both",
    implementation: native.Implementation | None = None,
) -> Any: ...
# fmt: on
def rms_norm(
    x: jax.typing.ArrayLike,
    scale: jax.typing.ArrayLike,
    *,
    epsilon: float = 1e-6,
    zero_centered: bool = False,
    residual: jax.typing.ArrayLike | None = None,
    quantization: Quantization | None = None,
    copies: Copies = "both",
    implementation: native.Implementation | None = None,
) -> Any:
    r"""RMS normalization of rows, computed in float32.

        y = s / √(mean(s²) + epsilon) · scale,   s = x or x + residual

    A row whose squares overflow is NaN. The norm reads the sum as it is returned, rounded to the dtype of x. The
    residuals are s (checkpoint name "te_norm_input") and one float32 a row. The backward pass is one pass over memory,
    which also adds the gradient of the returned sum.

    Args:
      x: [*rows, features], float32, bfloat16 or float16. Rows may be sharded in any way; features are gathered.
      scale: [features], float32, bfloat16 or float16.
      epsilon: at least 0.
      zero_centered: multiplies by 1 + scale.
      residual: added to x before the norm; of its shape and dtype. None for none.
      quantization: None for a result in the dtype of x. Otherwise the format and scaling of the result, for example
        `recipe.quantization("activation")`: one kernel writes it in FP8, and `te_jax.ops.dense` takes it as x. Values
        and gradients are those of `dense` on the plain y, up to the rounding of y.
      copies: with quantization, which copies: "both", "data" (as it is) or "transposed".
      implementation: None uses the native kernels where there are some, else the reference, which XLA compiles and
        which "xla" names too; "native" or "reference" never fall back. XLA always computes a result in the dtype of x;
        native kernels compute its gradient.

    Returns:
      An array like x, or a `QuantizedArray` with straight_through; with residual a tuple of it and s, the new residual.

    Raises:
      ValueError: for arguments that break a rule above, naming the argument.
      NotImplementedError: for forward mode and second derivatives with native kernels, and for derivatives through FP8
        values or scales.
      te_jax.native.NativeUnavailableError: for implementation="native" where it cannot run.

    References:
      Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467.

    Examples:
      >>> import jax.numpy as jnp, te_jax
      >>> x, scale = jnp.array([[3.0, -3.0]]), jnp.array([1.0, 2.0])
      >>> te_jax.ops.rms_norm(x, scale, epsilon=0.0).round(3).tolist()
      [[1.0, -2.0]]
      >>> recipe, kernel, ones = te_jax.recipe.CurrentScaling(), jnp.ones((32, 16)), jnp.ones((4, 32))
      >>> quantization = recipe.quantization("activation")
      >>> x8, residual = te_jax.ops.rms_norm(ones, ones[0], residual=ones, quantization=quantization)
      >>> round(float(te_jax.ops.dense(x8, kernel, recipe=recipe)[0, 0]), 3), float(residual[0, 0])
      (32.0, 2.0)
    """
    norm = Norm(_as_epsilon(epsilon), centered=False)
    return _norm("rms_norm", norm, x, scale, None, zero_centered, residual, quantization, copies, implementation)


# fmt: off
@overload
def layer_norm(
    x: jax.typing.ArrayLike, scale: jax.typing.ArrayLike, bias: jax.typing.ArrayLike | None = None, *,
    epsilon: float = 1e-6, zero_centered: bool = False,
    residual: None = None, quantization: None = None, copies: Copies = "both",
    implementation: native.Implementation | None = None,
) -> Array: ...
@overload
def layer_norm(
    x: jax.typing.ArrayLike, scale: jax.typing.ArrayLike, bias: jax.typing.ArrayLike | None = None, *,
    epsilon: float = 1e-6, zero_centered: bool = False,
    residual: jax.typing.ArrayLike, quantization: None = None, copies: Copies = "both",
    implementation: native.Implementation | None = None,
) -> tuple[Array, Array]: ...
@overload
def layer_norm(
    x: jax.typing.ArrayLike, scale: jax.typing.ArrayLike, bias: jax.typing.ArrayLike | None = None, *,
    epsilon: float = 1e-6, zero_centered: bool = False,
    residual: None = None, quantization: Quantization, copies: Copies = "both",
    implementation: native.Implementation | None = None,
) -> QuantizedArray: ...
@overload
def layer_norm(
    x: jax.typing.ArrayLike, scale: jax.typing.ArrayLike, bias: jax.typing.ArrayLike | None = None, *,
    epsilon: float = 1e-6, zero_centered: bool = False,
    residual: jax.typing.ArrayLike, quantization: Quantization, copies: Copies = "both",
    implementation: native.Implementation | None = None,
) -> tuple[QuantizedArray, Array]: ...
@overload
def layer_norm(
    x: jax.typing.ArrayLike, scale: jax.typing.ArrayLike, bias: jax.typing.ArrayLike | None = None, *,
    epsilon: float = 1e-6, zero_centered: bool = False, residual: jax.typing.ArrayLike | None = None,
    quantization: Quantization | None = None, copies: Copies = "both",
    implementation: native.Implementation | None = None,
) -> Any: ...
# fmt: on
def layer_norm(
    x: jax.typing.ArrayLike,
    scale: jax.typing.ArrayLike,
    bias: jax.typing.ArrayLike | None = None,
    *,
    epsilon: float = 1e-6,
    zero_centered: bool = False,
    residual: jax.typing.ArrayLike | None = None,
    quantization: Quantization | None = None,
    copies: Copies = "both",
    implementation: native.Implementation | None = None,
) -> Any:
    r"""Layer normalization of rows, computed in float32.

        y = (s - mean(s)) / √(var(s) + epsilon) · scale + bias,   s = x or x + residual

    with var(s) = mean((s - mean(s))²).

    Args:
      x, scale, epsilon, zero_centered, residual, quantization, copies, implementation: as in `rms_norm`.
      bias: [features], float32, bfloat16 or float16, or None.

    Returns:
      As `rms_norm`.

    Raises:
      ValueError, NotImplementedError, te_jax.native.NativeUnavailableError: as `rms_norm`.

    References:
      Ba, Kiros and Hinton, Layer Normalization, arXiv:1607.06450.

    Examples:
      >>> import jax.numpy as jnp, te_jax
      >>> x, ones = jnp.array([[1.0, 5.0]]), jnp.ones(2)
      >>> te_jax.ops.layer_norm(x, ones, ones, epsilon=0.0).round(3).tolist()
      [[0.0, 2.0]]
    """
    norm = Norm(_as_epsilon(epsilon), centered=True)
    return _norm("layer_norm", norm, x, scale, bias, zero_centered, residual, quantization, copies, implementation)


def _norm(
    operation: str,
    norm: Norm,
    x: jax.typing.ArrayLike,
    scale: jax.typing.ArrayLike,
    bias: jax.typing.ArrayLike | None,
    zero_centered: bool,
    residual: jax.typing.ArrayLike | None,
    quantization: Quantization | None,
    copies: Copies,
    implementation: native.Implementation | None,
) -> Any:
    x, scale = as_array("x", x), as_array("scale", scale)
    bias = None if bias is None else as_array("bias", bias)
    residual = None if residual is None else as_array("residual", residual)
    _validate(x, scale, bias, residual)
    zero_centered = as_flag("zero_centered", zero_centered)
    request = None
    if quantization is not None:
        request, _ = as_request("x", x, quantization, None, copies, None, None, with_amax=False)
    elif copies != "both":
        raise ValueError(
            f"copies is {copies!r}, but there is no quantization, of which it says the copies: leave it out"
        )
    operands = (x, residual, scale, bias)
    if use_native := native.use_native(implementation, dtype=x.dtype) and x.size > 0:
        operands = reverse_mode_only(operands, _refusal(operation))
    y, total = _normalize(*operands, norm, zero_centered, request, operation if use_native else None)
    return y if residual is None else (y, total)


def _refusal(operation: str) -> str:
    return (
        f"te_jax.ops.{operation} with native kernels has first derivatives in reverse mode (jax.grad, jax.vjp) only: "
        "for forward mode (jax.jvp, jax.jacfwd) or second derivatives use implementation='reference'"
    )


def _as_epsilon(epsilon: float) -> float:
    if not is_finite_number(epsilon) or epsilon < 0:
        raise ValueError(f"epsilon is {epsilon!r}; it must be a finite number of at least 0, known while tracing")
    return float(epsilon)


def _validate(x: Array, scale: Array, bias: Array | None, residual: Array | None) -> None:
    for name, array in (("x", x), ("scale", scale), ("bias", bias), ("residual", residual)):
        if array is not None and array.dtype not in FLOATS:
            raise ValueError(f"{name} has dtype {array.dtype}; it must be {FLOAT_NAMES}: cast it")
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"x has shape {x.shape}; it needs a last dimension, the features, of 1 or more")
    for name, array in (("scale", scale), ("bias", bias)):
        if array is not None and array.shape != x.shape[-1:]:
            raise ValueError(f"{name} has shape {array.shape}; for x of shape {x.shape} it must be {x.shape[-1:]}")
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"residual has shape {residual.shape} and dtype {residual.dtype}, but x has shape {x.shape} and dtype "
            f"{x.dtype}; they must be the same"
        )


# Under jit even when called eagerly: sharded operands are then partitioned rather than gathered.
@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7), inline=sharding.INLINE)
def _normalize(
    x: Array,
    residual: Array | None,
    scale: Array,
    bias: Array | None,
    norm: Norm,
    zero_centered: bool,
    request: Request | None,
    operation: str | None,
) -> tuple[Array | QuantizedArray, Array | None]:
    """(y, the sum with the residual); `operation` is the name of the public function, None for the reference."""
    gamma, beta = (
        None if features is None else sharding.split_as_last(features, x).astype(jnp.float32)
        for features in (scale, bias)
    )
    assert gamma is not None
    gamma = 1 + gamma if zero_centered else gamma
    residual = None if residual is None else sharding.split_as_last(residual, x)
    if operation is not None:
        operands = sharding.varying_together((x, residual, gamma, beta))
        results: Any = _differentiable(operation, norm, request, *operands)
        return results
    total = checkpoint_name(x if residual is None else residual_sum(x, residual), "te_norm_input")
    # The backward pass needs no more than the operands, in scans and for remat policies, too.
    run = functools.partial(normalize, epsilon=norm.epsilon, centered=norm.centered)
    y: Any = jax.checkpoint(lambda *operands: run(*operands)[0], prevent_cse=False)(total, gamma, beta)
    if request is not None:
        y = quantize(y, request.quantization, copies=request.copies, straight_through=True, implementation="reference")
    return y, None if residual is None else total


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _differentiable(operation: str, norm: Norm, request: Request | None, x, residual, gamma, beta):
    del operation
    operands = x, residual, gamma, beta
    return _results(operands, normalized(norm, *operands, request))


def _results(operands: Sequence[Any], result: Normalized) -> tuple[Array | QuantizedArray, Array | None]:
    y, (x, residual, *_) = result.y, operands
    if isinstance(y, QuantizedArray):
        y = dataclasses.replace(y, straight_through=straight_through(*jax.tree.leaves(operands)))
    return y, None if residual is None else sharding.Layout.of(x).apply(result.x)


def _forward(operation: str, norm: Norm, request: Request | None, *operands):
    del operation
    x, residual, gamma, beta = primals = custom_vjp_primal_tree_values(operands)
    result = normalized(norm, x, residual, gamma, beta, request)
    layouts = [None if operand is None else sharding.Layout.of(operand) for operand in primals]
    kept = checkpoint_name(result.x, "te_norm_input")
    return _results(primals, result), (kept, gamma, result.mean, result.rstd, layouts)


def _backward(operation: str, norm: Norm, request: Request | None, kept, cotangents):
    x, gamma, mean, rstd, layouts = kept
    dy, dsum = cotangents
    if request is not None:
        values = jax.tree.leaves(dataclasses.replace(dy, straight_through=None))
        if not all(isinstance(cotangent, SymbolicZero) for cotangent in values):
            raise NotImplementedError(
                f"te_jax.ops.{operation} with quantization has no derivative through FP8 values or scales, because "
                "that of rounding is zero: te_jax.ops.dense defines those of FP8 products; leave quantization out for "
                "others, or pass jax.lax.stop_gradient of the result"
            )
        dy = dy.straight_through
    if isinstance(dy, SymbolicZero):
        dy = ad.zeros_like_aval(dy.aval)
    if isinstance(dsum, SymbolicZero):
        dsum = None
    dx, dgamma, dbeta = norm_gradients(norm, x, gamma, mean, rstd, dy, dsum, layouts[3] is not None)
    return tuple(
        None if layout is None else layout.apply(gradient)
        for layout, gradient in zip(layouts, (dx, dx, dgamma, dbeta), strict=True)
    )


_differentiable.defvjp(_forward, _backward, symbolic_zeros=True)
