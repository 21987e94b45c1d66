"""Quantization to FP8: both copies that matrix products need, their scales, and amax and dbias from the same pass."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from te_jax import native, reference, sharding
from te_jax._core.arguments import as_flag, is_whole_number
from te_jax._core.derivatives import straight_through as zeros_with_gradient
from te_jax._core.derivatives import without_gradient
from te_jax._core.reverse_mode import reverse_mode_only
from te_jax.ops._quantize_kernels import Request, quantize_by_kernels
from te_jax.ops.operands import as_array, validate_quantization
from te_jax.quantized import QuantizedArray
from te_jax.recipe import Quantization
from te_jax.reference.quantize import Copies, GroupAxes, QuantizedParts, SharedBlocks, blocked_groups, mesh_axes

_NO_DERIVATIVE = (
    "te_jax.ops.quantize has no derivative, because that of rounding is zero: te_jax.ops.dense and te_jax.parallel "
    "define those of FP8 products; for a constant pass jax.lax.stop_gradient(x)"
)
_COPIES = ("both", "data", "transposed")


# fmt: off
@overload
def quantize(
    x: jax.typing.ArrayLike, quantization: Quantization, *, row_ndim: int | None = None, copies: Copies = "both",
    amax: jax.typing.ArrayLike | None = None, amax_axis: GroupAxes | None = None,
    with_amax: Literal[False] = False, with_dbias: Literal[False] = False, straight_through: bool = False,
    implementation: native.Implementation | None = None,
) -> QuantizedArray: ...
@overload
def quantize(
    x: jax.typing.ArrayLike, quantization: Quantization, *, row_ndim: int | None = None, copies: Copies = "both",
    amax: jax.typing.ArrayLike | None = None, amax_axis: GroupAxes | None = None,
    with_amax: Literal[True], with_dbias: Literal[False] = False, straight_through: bool = False,
    implementation: native.Implementation | None = None,
) -> tuple[QuantizedArray, Array]: ...
@overload
def quantize(
    x: jax.typing.ArrayLike, quantization: Quantization, *, row_ndim: int | None = None, copies: Copies = "both",
    amax: jax.typing.ArrayLike | None = None, amax_axis: GroupAxes | None = None,
    with_amax: Literal[False] = False, with_dbias: Literal[True], straight_through: bool = False,
    implementation: native.Implementation | None = None,
) -> tuple[QuantizedArray, Array]: ...
@overload
def quantize(
    x: jax.typing.ArrayLike, quantization: Quantization, *, row_ndim: int | None = None, copies: Copies = "both",
    amax: jax.typing.ArrayLike | None = None, amax_axis: GroupAxes | None = None,
    with_amax: Literal[True], with_dbias: Literal[True], straight_through: bool = False,
    implementation: native.Implementation | None = None,
) -> tuple[QuantizedArray, Array, Array]: ...
# fmt: on
def quantize(
    x: jax.typing.ArrayLike,
    quantization: Quantization,
    *,
    row_ndim: int | None = None,
    copies: Copies = "both",
    amax: jax.typing.ArrayLike | None = None,
    amax_axis: GroupAxes | None = None,
    with_amax: bool = False,
    with_dbias: bool = False,
    straight_through: bool = False,
    implementation: native.Implementation | None = None,
) -> Any:
    r"""Quantizes an array [*rows, *cols] to FP8, as it is and transposed, with the scales of both copies.

    With m the largest FP8 value (448 in float8_e4m3fn, 57344 in float8_e5m2) and amax the largest |x| among the values
    that share a scale:

        scale     = min(m / amax, 2^126), or 1 where amax is not finite or below 2^-126
        data      = FP8(clip(x · scale, ±m)), rounded to nearest even
        scale_inv = 1 / scale, or NaN where amax is not finite

    So one NaN or infinity turns all values that share its scale into NaN. If you give amax, such a value affects only
    itself: NaN stays NaN, an infinity becomes NaN in float8_e4m3fn and an infinity in float8_e5m2. Float32 subnormals
    count as zero. All implementations give the same bits.

    Args:
      x: [*rows, *cols], float32, bfloat16 or float16. It may be sharded in any way: scales are those of the whole
        array, and devices exchange amaxes and dbias only. With block scaling, devices gather dimensions whose shards
        would cut blocks.
      quantization: format and scaling, for example `recipe.quantization("activation")`.
      row_ndim: number of dimensions in rows; None for all but the last. Rows and cols have at least one each. With
        block scaling, the last dimension of a group of several must be a multiple of 128, of 32 for "block_1x32".
      copies: "both", "data" (as it is) or "transposed".
      amax: float32 scalar, for tensor scaling: the scale follows from it in one pass over x, larger values saturate,
        and 0 gives a scale of 1. None: the scale follows from x itself in two passes.
      amax_axis: inside `shard_map` or `pmap`, the mesh axis or axes that split the rows, or {"rows": axes, "cols":
        axes}. Block scaling needs it only for amax and dbias. Under `jit` on Auto or Explicit meshes leave it None.
      with_amax: also returns the amax of x, from the same pass except with block scaling.
      with_dbias: also returns the sum of x over its rows, from the same pass.
      straight_through: lets gradients pass through the QuantizedArray: `te_jax.ops.dense` takes it as x, and returns
        the gradient of x. Values and gradients are those of `dense` on the plain x.
      implementation: None uses the native kernel where there is one, for all scalings but "block_1x32", else the
        reference, which XLA compiles and which "xla" names too; "native" or "reference" never fall back.

    Returns:
      `QuantizedArray`; with with_amax or with_dbias a tuple of it, amax (float32 scalar; NaN if any value is, else
      infinite if any is) and dbias (float32 [*cols]), in this order.

    Raises:
      ValueError: for shapes, dtypes or parameters that break a rule above, naming the argument.
      NotImplementedError: for derivatives through FP8 values or scales; `te_jax.ops.dense` defines those of GEMMs.
      te_jax.native.NativeUnavailableError: for implementation="native" where it cannot run.

    References:
      Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433. Blocks: DeepSeek-V3, arXiv:2412.19437.

    Examples:
      >>> import jax.numpy as jnp, te_jax
      >>> x = jnp.array([[1.0, -2.0, 448.0]])
      >>> q = te_jax.ops.quantize(x, te_jax.recipe.CurrentScaling().quantization("activation"))
      >>> q.transposed.shape, q.scale_inv.item(), q.dequantize().tolist()
      ((3, 1), 1.0, [[1.0, -2.0, 448.0]])
    """
    x = as_array("x", x)
    request, amax = as_request(
        "x", x, quantization, row_ndim, copies, amax, amax_axis, with_amax=with_amax, with_dbias=with_dbias
    )
    use_native = _use_native(implementation, request, x.dtype) and x.size > 0
    operands = jax.tree.map(lambda operand: reverse_mode_only(operand, _NO_DERIVATIVE), (x, amax))
    parts = _quantize_once(*operands, request, use_native, as_flag("straight_through", straight_through))
    wanted = tuple(part for part in parts if part is not None)
    return wanted if len(wanted) > 1 else parts.array


def quantize_parts(
    x: Array,
    quantization: Quantization,
    *,
    row_ndim: int | None = None,
    copies: Copies = "both",
    amax: jax.typing.ArrayLike | None = None,
    amax_axis: GroupAxes | None = None,
    with_amax: bool = False,
    with_dbias: bool = False,
    implementation: native.Implementation | None = None,
) -> QuantizedParts:
    """`quantize` for operations with derivatives of their own: its derivative is zero, without an error."""
    request, amax = as_request(
        "x", x, quantization, row_ndim, copies, amax, amax_axis, with_amax=with_amax, with_dbias=with_dbias
    )
    return quantize_requested(x, amax, request, _use_native(implementation, request, x.dtype) and x.size > 0)


def quantize_shared_blocks(
    x: Array, quantization: Quantization, shared_blocks: SharedBlocks, *, row_ndim: int, straight_through: bool
) -> QuantizedArray:
    """`quantize` of a part that cuts blocks, whose amaxes devices exchange: its scales are those of the whole array.

    Blocks are square, so that both copies have the same scales. XLA computes it, for native kernels take no amaxes of
    blocks.
    """
    request, _ = as_request("x", x, quantization, row_ndim, "both", None, None, with_amax=False)
    request = dataclasses.replace(request, shared_blocks=shared_blocks)
    return _quantize_once(x, None, request, False, straight_through).array


def _use_native(implementation: native.Implementation | None, request: Request, dtype: np.dtype) -> bool:
    if all(facts.native for facts in request.facts):
        return native.use_native(implementation, dtype=dtype)
    native.validate_implementation(implementation)
    if implementation == "native":
        raise native.NativeUnavailableError(
            "no native kernel quantizes with 'block_1x32' scaling: leave implementation out"
        )
    return False


def as_request(
    name: str,
    x: Array,
    quantization: Quantization,
    row_ndim: int | None,
    copies: Copies,
    amax: jax.typing.ArrayLike | None,
    amax_axis: GroupAxes | None,
    *,
    with_amax: bool,
    with_dbias: bool = False,
) -> tuple[Request, Array | None]:
    """The arguments of `quantize`, checked, and amax as an array.

    Raises:
      ValueError: one of them breaks a rule; x is called by its name.
    """
    if row_ndim is not None and not is_whole_number(row_ndim):
        raise ValueError(f"row_ndim is {row_ndim!r}; it must be an integer")
    request = Request(
        quantization,
        x.ndim - 1 if row_ndim is None else int(row_ndim),
        copies,
        *_mapped_axes(amax_axis),
        as_flag("with_amax", with_amax),
        as_flag("with_dbias", with_dbias),
    )
    _validate(name, x, request)
    return request, None if amax is None else _validated_amax(amax, request)


def _mapped_axes(amax_axis: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The mesh axes that split rows and cols."""
    if isinstance(amax_axis, Mapping) and set(amax_axis) - {"rows", "cols"}:
        raise ValueError(f'amax_axis has keys {list(amax_axis)}; they must be out of "rows" and "cols"')
    for axes in amax_axis.values() if isinstance(amax_axis, Mapping) else (amax_axis,):
        if names := sharding.as_axis_names("amax_axis", axes):
            sharding.mapped_axes(names, "amax_axis")
    return mesh_axes(amax_axis)


def _validate(name: str, x: Array, request: Request) -> None:
    validate_quantization("quantization", request.quantization)
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"{name} has dtype {x.dtype}; it must be float32, bfloat16 or float16: cast it")
    if x.ndim < 2:
        raise ValueError(f"{name} has shape {x.shape}; it needs at least two dimensions, rows and cols: reshape it")
    if not 1 <= request.row_ndim < x.ndim:
        raise ValueError(
            f"row_ndim is {request.row_ndim}; for {name} of shape {x.shape} it must be in [1, {x.ndim - 1}], so that "
            "rows and cols have a dimension each"
        )
    if request.copies not in _COPIES:
        raise ValueError(f"copies is {request.copies!r}; it must be one of {_COPIES}")
    blocked = blocked_groups(request.quantization, request.copies)
    block = max(facts.block_size for facts in request.facts)
    for group, shape in (("rows", x.shape[: request.row_ndim]), ("cols", x.shape[request.row_ndim :])):
        if group in blocked and len(shape) > 1 and shape[-1] % block:
            raise ValueError(
                f"{name} has {group} of shape {shape}; blocks of {block} along them need a last dimension that is a "
                f"multiple of {block} where there are others: collapse them to one dimension, or pad"
            )


def _validated_amax(amax: jax.typing.ArrayLike, request: Request) -> Array:
    amax = as_array("amax", amax)
    if amax.shape != () or amax.dtype != jnp.float32:
        raise ValueError(f"amax has shape {amax.shape} and dtype {amax.dtype}; it must be a float32 scalar")
    if not all(facts.by_tensor for facts in request.facts):
        raise ValueError(
            f"amax is given, but quantization has scaling {request.quantization.scaling!r} and "
            f"{request.quantization.transposed_scaling!r}; only tensor scaling takes its scale from an amax: "
            "leave it None"
        )
    return amax


# Under jit even when called eagerly: sharded operands are then partitioned rather than gathered.
@functools.partial(jax.jit, static_argnums=(2, 3), inline=sharding.INLINE)
def quantize_requested(x: Array, amax: Array | None, request: Request, use_native: bool) -> QuantizedParts:
    """`quantize_parts` of arguments that are checked; with use_native, x has values."""
    x, amax = lax.stop_gradient((x, amax))
    if use_native and all(facts.native for facts in request.facts):
        return quantize_by_kernels(x, amax, request)
    return reference.quantize(
        x,
        request.quantization,
        row_ndim=request.row_ndim,
        copies=request.copies,
        amax=amax,
        amax_axis={"rows": request.row_axes, "cols": request.col_axes},
        with_amax=request.with_amax,
        with_dbias=request.with_dbias,
        shared_blocks=request.shared_blocks,
    )


@functools.partial(jax.jit, static_argnums=(2, 3, 4), inline=sharding.INLINE)
def _quantize_once(
    x: Array, amax: Array | None, request: Request, use_native: bool, straight_through: bool
) -> QuantizedParts:
    """`quantize_requested`, whose derivatives are errors; with straight_through, but for that one."""
    parts: Any = without_gradient(quantize_requested(x, amax, request, use_native), (x, amax), _NO_DERIVATIVE)
    if not straight_through:
        return parts
    array = dataclasses.replace(parts.array, straight_through=zeros_with_gradient(x))
    return parts._replace(array=array)
