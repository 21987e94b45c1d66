"""How a moment is kept: as it is, in bfloat16, or in blocks of 128 values of float16 or FP8 with a scale each.

A block's scale follows from an upper bound of its magnitudes, which is kept beside it and takes the same step as the
moment itself: |b·m + (1-b)·g| ≤ b·bound + (1-b)·max|g|. So one look at the gradient's block maxima is enough, where the
maxima of the new moment would take a second pass over everything. Scales are powers of two: exact, and the exponent of
the bound is all that they need.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from te_jax.optim import _rounding
from te_jax.sharding import blocks

FLOAT8 = np.dtype(jnp.float8_e4m3fn)
_FLOAT16 = np.dtype(jnp.float16)
_PLAIN = tuple(np.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float64))
_INFINITY = 0x7F800000
_MANTISSA = 0x007FFFFF
# The power of two on which the bound of a block comes to lie. Values that rounding took above their bound, step after
# step, still find room: to 3.5 times the bound in FP8.
_TARGET = {FLOAT8: 2.0**7, _FLOAT16: 2.0**12}


def checked_dtype(name: str, dtype: jax.typing.DTypeLike | None) -> np.dtype | None:
    """The dtype of a moment, or None for that of the parameter."""
    if dtype is None:
        return None
    try:
        known = np.dtype(dtype)
    except TypeError:
        known = None
    if known is None or known not in (*_PLAIN, *_TARGET):  # NumPy calls None equal to float64
        raise ValueError(f"{name} is {known or dtype}: choose float32, bfloat16, float16 or float8_e4m3fn")
    return known


def is_scaled(dtype: np.dtype | None) -> bool:
    """Whether a moment of this dtype has a bound for every block."""
    return dtype in _TARGET


def zeros(param: Array | jax.ShapeDtypeStruct, dtype: np.dtype | None) -> Array:
    """A moment before the first step."""
    param_dtype = jnp.result_type(param)
    if param_dtype not in (*_PLAIN, _FLOAT16):
        raise ValueError(
            f"a parameter has dtype {param_dtype}: moments need parameters in float32, bfloat16, float16 or float64; "
            "mask it out"
        )
    dtype = dtype or (np.dtype(jnp.float32) if param_dtype == _FLOAT16 else param_dtype)
    return jnp.zeros_like(param, dtype=dtype)


def check_shape(gradient: Array, moment: Array) -> None:
    if gradient.shape != moment.shape:
        raise ValueError(
            f"updates have a gradient of shape {gradient.shape} whose moments have shape {moment.shape}: "
            "gradients must have the shapes of the parameters that the state was made for"
        )


def clipped(gradient: Array, *dtypes: np.dtype) -> Array:
    """The gradient, its finite values clipped so that no moment of these dtypes overflows; NaN and infinities stay.

    The last one is that of a second moment, if there are two.
    """
    # At most a quarter of the largest number, or of its square root: room for what rounding adds.
    limit = 2.0**511 if dtypes[0] == np.float64 else 2.0**126
    if len(dtypes) > 1 and dtypes[1] != np.float64:
        limit = 2.0**63
    return jnp.where(jnp.abs(gradient) < np.inf, jnp.clip(gradient, -limit, limit), gradient)


def maxima(x: Array) -> Array:
    """The largest magnitude in each block of x; NaN where there is one."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & 0x7FFFFFFF  # in this order NaN is largest
    if bits.ndim:
        bits = jnp.max(blocks.split(bits, [x.ndim - 1]), axis=-1)
    return lax.bitcast_convert_type(bits, jnp.float32)


def decode(values: Array, bounds: Array | None, dtype: jax.typing.DTypeLike, *, times: Array | None = None) -> Array:
    """The moment in float32 (or float64), times a number: of blocks it is the scales that are multiplied by it."""
    wide = values.astype(dtype)
    if bounds is None:
        return wide if times is None else times * wide
    scales = _scales(bounds, values.dtype).astype(dtype)
    return wide * _spread(scales if times is None else times * scales, values.shape)


def encode(x: Array, bounds: Array | None, dtype: np.dtype, bits: Array | None, *, positive: bool = False) -> Array:
    """The moment as it is kept.

    Args:
      x: float32 or float64, of magnitudes not above the bounds.
      bounds: float32, of blocks; None for a dtype that is not scaled.
      dtype: what to keep it in.
      bits: from `random_bits`, or None to round to nearest.
      positive: x is a second moment. In blocks it is kept above zero.
    """
    if bounds is None:
        if bits is None or dtype != jnp.bfloat16:
            return x.astype(dtype)
        return _rounding.to_bfloat16(x.astype(jnp.float32), bits)
    # A block with values that are not finite has a bound that is not: whatever its codes, it reads as NaN.
    scaled = x.astype(jnp.float32) * _spread(_scales(bounds, dtype, inverse=True), x.shape)
    return _rounding.to_narrow_float(scaled, dtype, bits, positive=positive)


def _scales(bounds: Array, dtype: jax.typing.DTypeLike, *, inverse: bool = False) -> Array:
    """Factors from codes to values, one for each block: the bound's next power of two by the target's."""
    target = int(np.float32(_TARGET[np.dtype(dtype)]).view(np.int32))
    exponent = (lax.bitcast_convert_type(bounds, jnp.int32) + _MANTISSA) & _INFINITY
    # The scale and its inverse are normal numbers, and so is a scale that XLA has multiplied by a decay first.
    exponent = jnp.clip(exponent, (8 << 23) + target - (127 << 23), 253 << 23)
    difference = target - exponent if inverse else exponent - target
    scales = lax.bitcast_convert_type(difference + (127 << 23), jnp.float32)
    return jnp.where(bounds < np.inf, scales, np.float32(np.nan))  # false for NaN too


def _spread(scales: Array, shape: tuple[int, ...]) -> Array:
    """To every value that of its block."""
    if not shape:
        return scales
    size = blocks.size_of(shape[-1])
    return blocks.merge(jnp.broadcast_to(scales[..., None], (*scales.shape, size)), shape, [len(shape) - 1])
