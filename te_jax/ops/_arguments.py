"""What several operations ask of an argument, each with an error that names it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from te_jax.recipe import Quantization

FP8 = (np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2))
FP8_NAMES = "float8_e4m3fn or float8_e5m2"

_SCALINGS = ("tensor", "row", "block_1x128", "block_128x128")


def validate_quantization(name: str, quantization: Any) -> None:
    """Checks that an argument says how to quantize to FP8.

    Raises:
      ValueError: it does not.
    """
    if not isinstance(quantization, Quantization):
        raise ValueError(
            f"{name} is {quantization!r}; it must be a Quantization, such as "
            'te_jax.recipe.CurrentScaling().quantization("activation")'
        )
    as_dtype(f"{name} has dtype", quantization.dtype, FP8, FP8_NAMES)
    for field in ("scaling", "transposed_scaling"):
        scaling = getattr(quantization, field)
        if scaling not in _SCALINGS:
            raise ValueError(f"{name} has {field} {scaling!r}; it must be one of {_SCALINGS}")


def as_dtype(subject: str, value: Any, allowed: tuple[np.dtype, ...], rule: str) -> np.dtype:
    """The dtype that a value names, one of those allowed.

    Args:
      subject: the beginning of the error, such as "out_dtype is".
      value: a dtype, or what names one.
      allowed: those that may be named.
      rule: the same in words, for the error.
    """
    try:
        dtype = None if value is None else np.dtype(value)  # np.dtype(None) is float64
    except TypeError:
        dtype = None
    if dtype is None or dtype not in allowed:
        raise ValueError(f"{subject} {repr(value) if dtype is None else dtype}; it must be {rule}")
    return dtype
