"""Rounding at random, with bits that are worked out from where a value stands."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from te_jax._core.arguments import is_whole_number


def check_seed(seed: int | Array) -> None:
    if isinstance(seed, Array | np.ndarray):
        is_seed = seed.shape == () and jnp.issubdtype(seed.dtype, jnp.integer)
    else:
        is_seed = is_whole_number(seed) and 0 <= seed < 2**32
    if not is_seed:
        raise ValueError(f"seed is {seed!r}; it must be an integer from 0 to 2^32 - 1")


def keys(seed: int | Array, count: Array, leaves: int) -> Array:
    """uint32 [leaves]: for the random bits of each parameter in a step."""
    key = mix(mix(jnp.uint32(seed)) + count.astype(jnp.uint32))
    return mix(key ^ jnp.arange(leaves, dtype=jnp.uint32))


def mix(x: Array) -> Array:
    """A bijection of uint32 that spreads every bit of x over all bits of the result: shifts and two products."""
    x = (x ^ (x >> 16)) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * np.uint32(0xD35A2D97)
    return x ^ (x >> 15)


def random_bits(key: Array, shape: tuple[int, ...]) -> Array:
    """uint32 [*shape], of which the upper 20 bits are good: for every key (uint32 scalar) others, which depend on
    nothing but the place in the array.

    A place counts modulo 2^32. Nothing is stored or read, so XLA works the bits out inside of the loop that uses them,
    on every device those of its own shard.
    """
    x = (lax.iota(jnp.uint32, math.prod(shape)).reshape(shape) + key) * np.uint32(0x21F0AAAD)
    return (x ^ (x >> 15)) * np.uint32(0xD35A2D97)


def to_bfloat16(x: Array, bits: Array) -> Array:
    """float32 x as one of its neighbours in bfloat16: the mean over `bits` is x. What is not finite gives NaN.

    Args:
      x: float32.
      bits: uint32 of the same shape; the upper 16 are used.
    """
    rounded = (lax.bitcast_convert_type(x, jnp.uint32) + (bits >> 16)) & np.uint32(0xFFFF0000)
    # Zero, NaN where x is not finite, and its derivative is that of x: bits have none.
    nothing = x - lax.stop_gradient(x)
    # Converted, not cut in two: XLA writes a loop that ends in a conversion over the moment it reads.
    return (lax.bitcast_convert_type(rounded, jnp.float32) + nothing).astype(jnp.bfloat16)


def to_narrow_float(x: Array, dtype: np.dtype, bits: Array | None, *, positive: bool = False) -> Array:
    """float32 x as float16 or FP8, clipped; to nearest without `bits`, else at random as in `to_bfloat16`.

    Args:
      x: float32, finite.
      dtype: float16 or float8_e4m3fn.
      bits: uint32 of the same shape, or None; as many of the upper bits are used as mantissa is dropped.
      positive: x is not negative, and what is given is at least the smallest positive number.
    """
    info = jnp.finfo(dtype)
    smallest = np.float32(info.smallest_subnormal)
    if positive:
        x = jnp.maximum(x, smallest)
    if bits is None:
        return jnp.clip(x, -np.float32(info.max), np.float32(info.max)).astype(dtype)
    dropped = 23 - info.nmant
    code_of = np.dtype(np.uint8 if dtype.itemsize == 1 else np.uint16)
    magnitude = x if positive else jnp.abs(x)
    # Below the smallest normal number all neighbours are equally far apart: as far as above it, so that a sum with it
    # ends in the bits of the code.
    normal = info.smallest_normal.astype(np.float32)
    subnormal = magnitude < normal
    first = normal.view(np.int32)
    aligned = jnp.where(  # of two arrays: a choice of two scalars has no sharding on an Explicit mesh
        subnormal,
        lax.bitcast_convert_type(magnitude + normal, jnp.int32) - first,
        lax.bitcast_convert_type(magnitude, jnp.int32) - (first - (1 << 23)),
    )
    code = (aligned + (bits >> (32 - dropped)).astype(jnp.int32)) >> dropped
    largest_code = int(np.asarray(info.max, dtype).view(code_of))
    code = jnp.minimum(code, largest_code)
    if not positive:
        sign = lax.bitcast_convert_type(x, jnp.int32) >> (32 - 8 * dtype.itemsize)
        code = code | (sign & (1 << (8 * dtype.itemsize - 1)))
    return lax.bitcast_convert_type(code.astype(code_of), dtype)
