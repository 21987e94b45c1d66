"""Checks of arguments that several functions share."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np


def is_whole_number(value: Any) -> bool:
    """Whether the value is an integer of Python or NumPy; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_finite_number(value: Any) -> bool:
    """Whether the value is a finite real number that is known: neither traced nor a bool."""
    try:
        return math.isfinite(value) and not isinstance(value, bool | np.bool_)
    except (TypeError, ValueError, OverflowError):
        return False
