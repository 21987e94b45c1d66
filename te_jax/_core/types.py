"""Dtypes and sizes that several operations share."""

from __future__ import annotations

from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

T = TypeVar("T")
PyTree = Any
"""A tree of arrays, or of one value for each array, such as its PartitionSpec: JAX has no type for trees."""

FLOATS = (np.dtype(jnp.float32), np.dtype(jnp.bfloat16), np.dtype(jnp.float16))
FLOAT_NAMES = "float32, bfloat16 or float16"

E4M3, E5M2 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)
FP8 = (E4M3, E5M2)
FP8_NAMES = "float8_e4m3fn or float8_e5m2"
E8M0 = np.dtype(jnp.float8_e8m0fnu)
"""A power of two from 2^-127 to 2^127, or NaN."""

FP8_ALIGNMENT = 16
"""FP8 GEMMs read 16 bytes at a time: their N and K must be multiples of it."""

BLOCK = 128
"""Values along one side of a block that shares a scale."""

MX_BLOCK = 32
"""Values of a block of MXFP8."""
