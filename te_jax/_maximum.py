"""A float32 of which several cotangents add up to their maximum.

JAX adds up the cotangents of a value that is used several times. Where a cotangent is no derivative but the next value
of a state, its sum means nothing. For dtypes beyond those of NumPy, JAX lets the dtype say how to add.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax._src.dtypes import ExtendedDType  # has no public name

_FLOAT32 = np.dtype(np.float32)


@jax.custom_vjp
def maximum_of_cotangents(x: Array) -> Array:
    """x, in a dtype whose cotangents merge by their maximum; without any cotangent its own is x itself.

    Args:
      x: float32, any shape.

    Returns:
      The same in a dtype that nothing computes with: `lax.convert_element_type` leads back to float32. It exists only
      while JAX traces, so inside `jax.jit`.
    """
    return lax.convert_element_type(x, _MAXIMUM)


def _forward(x: Array):
    return maximum_of_cotangents(x), x


def _backward(x: Array, cotangent: Array):
    merged = lax.convert_element_type(cotangent, jnp.float32)
    return (jnp.where(merged == -jnp.inf, x, merged),)


maximum_of_cotangents.defvjp(_forward, _backward)


class _Kind(jax.dtypes.extended):
    """Tells the dtype from other extended ones."""


class _Rules:
    """What JAX asks about the dtype."""

    allow_conversion = True

    @staticmethod
    def physical_element_aval(dtype):
        del dtype
        return jax.core.ShapedArray((), _FLOAT32)

    @staticmethod
    def convert_from(maximum, other) -> bool:
        del maximum
        return other == _FLOAT32

    @staticmethod
    def convert_to(other, maximum) -> bool:
        del maximum
        return other == _FLOAT32

    @staticmethod
    def tangent_dtype(dtype):
        return dtype

    @staticmethod
    def add(dtype, x: Array, y: Array) -> Array:
        x, y = (lax.convert_element_type(value, _FLOAT32) for value in (x, y))
        return lax.convert_element_type(lax.max(x, y), dtype)

    @staticmethod
    def zero(dtype) -> Array:
        return lax.convert_element_type(np.float32(-np.inf), dtype)

    @staticmethod
    def full(shape, value, dtype) -> Array:
        value = lax.convert_element_type(value, _FLOAT32)
        return lax.convert_element_type(lax.full(shape, value, _FLOAT32), dtype)

    @staticmethod
    def global_sharded_result_handler(aval, sharding, committed):
        del aval, sharding, committed
        raise TypeError("an accumulating state exists inside jax.jit only: take the gradient under jax.jit")


@dataclasses.dataclass(frozen=True)
class _Maximum(ExtendedDType):
    _rules = _Rules  # pyright: ignore[reportAssignmentType]
    type = _Kind  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    name = "maximum_float32"  # pyright: ignore[reportAssignmentType]


_MAXIMUM = _Maximum()
