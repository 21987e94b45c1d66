"""RMS and layer normalization in plain jax.numpy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax


def residual_sum(x: Array, residual: Array) -> Array:
    """x + residual, rounded to their dtype: XLA would leave out a plain conversion where it needs float32 again."""
    total = x.astype(jnp.float32) + residual.astype(jnp.float32)
    if x.dtype == jnp.float32:
        return total
    info = jnp.finfo(x.dtype)
    rounded = lax.reduce_precision(total, exponent_bits=info.nexp, mantissa_bits=info.nmant).astype(x.dtype)
    # reduce_precision makes zeros of what is subnormal.
    return jnp.where(jnp.abs(total) < np.float32(info.tiny), total.astype(x.dtype), rounded)


def normalize(
    x: Array, gamma: Array, beta: Array | None, *, epsilon: float, centered: bool
) -> tuple[Array, Array | None, Array]:
    """Definition of `te_jax.ops.rms_norm` and `te_jax.ops.layer_norm`: computed in float32.

        y = (x - mean) · rstd · gamma + beta,   rstd = 1 / √(mean of (x - mean)² + epsilon)

    A row whose squares overflow float32 is NaN: 1 / √∞ would hide it as zeros, with gradients of zero.

    Args:
      x: [*rows, features], float32, bfloat16 or float16.
      gamma, beta: float32 [features]; beta may be None.
      epsilon: as above.
      centered: False for a mean of 0.

    Returns:
      (y in the dtype of x, mean, rstd): float32 [*rows]; the mean is None unless centered.
    """
    wide, mean = x.astype(jnp.float32), None
    if centered:
        mean = jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide - mean
    variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + np.float32(epsilon)
    # The remainder is the variance, or NaN where that is ∞. XLA fuses no norm whose variance is read twice.
    rstd = lax.rsqrt(lax.rem(variance, jnp.full_like(variance, np.inf)))
    y = wide * rstd * _like_rows(gamma, x)
    if beta is not None:
        y = y + _like_rows(beta, x)
    return y.astype(x.dtype), None if mean is None else mean[..., 0], rstd[..., 0]


def _like_rows(features: Array, x: Array) -> Array:
    return jnp.expand_dims(features, tuple(range(x.ndim - 1)))
