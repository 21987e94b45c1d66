"""Integers of any dtype as those of another, without a cast that wraps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax


def validate_integers(name: str, x: object) -> None:
    """Checks that JAX holds the values of an argument, before it makes an array of them: it would wrap them silently.

    Raises:
      ValueError: they are 64-bit integers of NumPy that 32 bits do not hold, and jax_enable_x64 is off.
    """
    if not isinstance(x, np.ndarray | np.generic) or x.dtype.kind not in "iu" or x.size == 0:
        return
    limits = jnp.iinfo(jax.dtypes.canonicalize_dtype(x.dtype))
    for value in (x.min(), x.max()):
        if not limits.min <= value <= limits.max:
            raise ValueError(
                f"{name} has dtype {x.dtype} and contains {value}, and without jax_enable_x64 integers of JAX have 32 "
                f"bits; values must be from {limits.min} to {limits.max}: use smaller ones, or enable x64"
            )


def as_int32(x: Array) -> Array:
    """Integers as int32; what it cannot hold becomes its smallest or largest value."""
    limits, of_int32 = jnp.iinfo(x.dtype), jnp.iinfo(jnp.int32)
    if limits.min < of_int32.min or limits.max > of_int32.max:
        bounds = max(limits.min, of_int32.min), min(limits.max, of_int32.max)
        smallest, largest = (np.asarray(bound, x.dtype) for bound in bounds)
        x = lax.clamp(smallest, x, largest)
    return x.astype(jnp.int32)


def in_one_dtype(first: Array, second: Array) -> tuple[Array, Array]:
    """Both in one integer dtype, in which a number of the first equals one of the second where the two are the same.
    Numbers of one array that differ may become the same, if the dtype of the other cannot hold them."""
    a, b = jnp.iinfo(first.dtype), jnp.iinfo(second.dtype)
    if a.min <= b.min and b.max <= a.max:
        return first, second.astype(first.dtype)
    if b.min <= a.min and a.max <= b.max:
        return first.astype(second.dtype), second
    # One is signed. The other is not, and is as wide or wider: its negative numbers are free to stand for no match.
    signed = (first if a.min < 0 else second).dtype
    largest = min(a.max, b.max)

    def shared(x: Array, otherwise: int) -> Array:
        in_range = (x >= 0) & (x <= np.asarray(largest, x.dtype))
        return jnp.where(in_range, x.astype(signed), np.asarray(otherwise, signed))

    return shared(first, -1), shared(second, -2)
