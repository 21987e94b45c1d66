"""Checks of arguments that several functions share."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np
from jax import lax
from jax.core import Tracer


def is_whole_number(value: Any) -> bool:
    """Whether the value is an integer of Python or NumPy; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_finite_number(value: Any) -> bool:
    """Whether the value is a finite real number that is known: neither traced nor a bool."""
    try:
        return math.isfinite(value) and not isinstance(value, bool | np.bool_)
    except (TypeError, ValueError, OverflowError):
        return False


def mapped_axes(axis_name: Any) -> tuple[tuple[str, ...], int]:
    """The mesh axes that `axis_name` names, and the number of devices along them.

    Raises:
      ValueError: it is no name or tuple of names, or one of them is not mapped here.
    """
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if (
        not isinstance(names, tuple | list)
        or not names
        or not all(isinstance(name, str) for name in names)
        or len(set(names)) < len(names)
    ):
        raise ValueError(
            f"axis_name is {axis_name!r}; it must be the name of a mesh axis, or a tuple of several, each once"
        )
    size = 1
    for name in names:
        try:
            size *= lax.axis_size(name)
        except NameError:
            raise ValueError(
                f"axis_name is {axis_name!r}, but no axis {name!r} is mapped here; call it inside shard_map or "
                "pmap over a mesh with that axis"
            ) from None
    return tuple(names), size


def as_flag(name: str, value: Any) -> bool:
    """True or False."""
    if isinstance(value, Tracer) or np.shape(value) != () or np.asarray(value).dtype != np.bool_:
        raise ValueError(f"{name} is {value!r}; it must be True or False, known while tracing")
    return bool(value)


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
    except (TypeError, ValueError):
        dtype = None
    if dtype is None or dtype not in allowed:
        raise ValueError(f"{subject} {repr(value) if dtype is None else dtype}; it must be {rule}")
    return dtype


def as_axis_names(name: str, axes: Any) -> tuple[str, ...]:
    """The mesh axes that an argument names: one, several, or None for none."""
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    if not isinstance(names, tuple | list) or not all(isinstance(axis, str) for axis in names):
        raise ValueError(f"{name} is {axes!r}; it must be the name of a mesh axis, a tuple of several, or None")
    return tuple(names)


def kind_of(x: Any) -> str:
    """What x is, for errors, without its values."""
    return "None" if x is None else f"of type {type(x).__name__}"
