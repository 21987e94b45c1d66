"""Checks of arguments that several functions share."""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import numpy as np
from jax.core import Tracer


def is_whole_number(value: object) -> bool:
    """Whether the value is an integer of Python or NumPy; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_finite_number(value: Any) -> bool:
    """Whether the value is a finite real number that is known: neither traced nor a bool."""
    try:
        return math.isfinite(value) and not isinstance(value, bool | np.bool_)
    except (TypeError, ValueError, OverflowError):
        return False


def as_flag(name: str, value: Any) -> bool:
    """True or False."""
    if isinstance(value, Tracer) or np.shape(value) != () or np.asarray(value).dtype != np.bool_:
        raise ValueError(f"{name} is {value!r}; it must be True or False, known while tracing")
    return bool(value)


def as_dtype(subject: str, value: jax.typing.DTypeLike | None, allowed: tuple[np.dtype, ...], rule: str) -> np.dtype:
    """The dtype that a value names, one of those allowed.

    Args:
      subject: the beginning of the error, such as "out_dtype is".
      value: a dtype, or what names one.
      allowed: those that may be named.
      rule: the same in words, for the error.
    """
    try:
        dtype = None if value is None else np.dtype(value)  # np.dtype(None) is float64
    except (TypeError, ValueError):
        dtype = None
    if dtype is None or dtype not in allowed:
        raise ValueError(f"{subject} {repr(value) if dtype is None else dtype}; it must be {rule}")
    return dtype


def static_way_out(value: object) -> str:
    """The end of an error about an argument that must be known while tracing: the way out, if it is traced.

    `jax.jit` takes whatever has a dtype for an array, also a DecoderConfig or a Quantization.
    """
    way_out = ": jax.jit traces it; name it in static_argnames, or close over it"
    return way_out if isinstance(value, Tracer) else ""


def kind_of(x: object) -> str:
    """A description of x for errors, without its values."""
    return "None" if x is None else f"of type {type(x).__name__}"
