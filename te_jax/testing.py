"""One measure of error for tests of numerical code: the relative L2 error.

`te_jax.hlo` lists the collectives and arrays of a compiled program, for tests as well.
"""

from __future__ import annotations

import math

import numpy as np
from jax.typing import ArrayLike, DTypeLike

__all__ = ["assert_close", "relative_error"]

# What rounding once to the type costs, with room for the order of sums. Other types must match exactly.
_TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}


def relative_error(actual: ArrayLike, expected: ArrayLike) -> float:
    """Relative L2 error ‖actual - expected‖ / ‖expected‖ in float64.

    Infinities that are equal on both sides count as no error and are left out of both norms.

    Args:
      actual: any shape and real dtype.
      expected: the same shape; any real dtype.

    Returns:
      The error: 0 where all elements are equal, inf where only `expected` is all zero or an infinity is unmatched, and
      NaN where either holds a NaN.

    Raises:
      ValueError: if the shapes differ; nothing is broadcast. For complex numbers, and for integers beyond 2^53.
    """
    actual, expected = _real("actual", actual), _real("expected", expected)
    if actual.shape != expected.shape:
        raise ValueError(f"actual has shape {actual.shape} and expected {expected.shape}; they must be the same")
    if np.isnan(actual).any() or np.isnan(expected).any():
        return math.nan
    if np.array_equal(actual, expected):
        return 0.0
    difference = _difference(actual, expected)
    if not np.isfinite(difference).all():
        return math.inf
    # Divided by the largest element first, so that squares neither overflow nor vanish.
    expected = np.where(np.isfinite(expected), expected, 0.0)
    scale = max(np.abs(difference).max(), np.abs(expected).max())
    norm = np.linalg.norm(expected / scale)
    return float(np.linalg.norm(difference / scale) / norm) if norm > 0.0 else math.inf


def assert_close(
    actual: ArrayLike,
    expected: ArrayLike,
    *,
    tolerance: float | None = None,
    dtype: DTypeLike | None = None,
    equal_nan: bool = False,
) -> None:
    """Asserts that `relative_error(actual, expected)` is at most `tolerance`.

    Args:
      actual: what was computed; any shape.
      expected: what it should be, in the same shape.
      tolerance: largest relative L2 error that passes. The default follows from `dtype`: float64 1e-12, float32 1e-5,
        bfloat16 1e-2, float16 2e-3, and 0 for all others.
      dtype: dtype that `actual` must have. The default is that of `expected`; name it where `expected` comes from an
        oracle of higher precision.
      equal_nan: lets NaN pass where both sides have it at exactly the same places; the other elements are compared as
        always. Without it a NaN on either side fails.

    Raises:
      AssertionError: where dtype or shape differ, for NaN, and for too large an error. The message states the metric,
        the error, both norms, the tolerance, and the element that is furthest off.
      ValueError: for a tolerance below 0, or one that is not a number; for complex numbers, and integers beyond 2^53.
    """
    dtype = np.dtype(dtype if dtype is not None else np.asarray(expected).dtype)
    tolerance = _TOLERANCES.get(dtype.name, 0.0) if tolerance is None else tolerance
    if not tolerance >= 0.0:
        raise ValueError(f"tolerance is {tolerance}; it must be a number of at least 0")
    actual_dtype = np.asarray(actual).dtype
    if actual_dtype != dtype:
        raise AssertionError(f"actual has dtype {actual_dtype.name}, but {dtype.name} is expected")
    actual, expected = _real("actual", actual), _real("expected", expected)
    if actual.shape != expected.shape:
        raise AssertionError(f"actual has shape {actual.shape}, but {expected.shape} is expected")

    nan, expected_nan = np.isnan(actual), np.isnan(expected)
    if equal_nan and (nan != expected_nan).any():
        raise AssertionError(f"NaN at different places: {_places(nan, expected_nan)}")
    if not equal_nan and (nan | expected_nan).any():
        raise AssertionError(f"NaN never passes without equal_nan: {_places(nan, expected_nan)}")
    numbers = ~nan
    error = relative_error(actual[numbers], expected[numbers])
    if not error <= tolerance:
        raise AssertionError(_report(actual, expected, numbers, error, tolerance))


def _real(name: str, x: ArrayLike) -> np.ndarray:
    array = np.asarray(x)
    if np.iscomplexobj(array):
        raise ValueError(f"{name} has dtype {array.dtype}; it must be real: compare real and imaginary parts")
    if array.dtype.kind in "iu" and ((array > 2**53) | (array < -(2**53))).any():
        raise ValueError(
            f"{name} has dtype {array.dtype} and integers beyond 2^53, which float64 rounds: compare them by "
            "numpy.testing.assert_array_equal"
        )
    return array.astype(np.float64)


def _difference(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """actual - expected, and 0 rather than NaN where both are the same infinity."""
    same = actual == expected
    return np.where(same, 0.0, np.where(same, 0.0, actual) - np.where(same, 0.0, expected))


def _places(nan: np.ndarray, expected_nan: np.ndarray) -> str:
    first = tuple(int(i) for i in np.argwhere((nan != expected_nan) if (nan != expected_nan).any() else nan)[0])
    return f"{nan.sum()} of {nan.size} in actual, {expected_nan.sum()} in expected, the first at {first}"


def _report(actual: np.ndarray, expected: np.ndarray, numbers: np.ndarray, error: float, tolerance: float) -> str:
    distance = np.where(
        numbers, np.abs(_difference(np.where(numbers, actual, 0), np.where(numbers, expected, 0))), -1.0
    )
    worst = np.unravel_index(np.argmax(distance), distance.shape)
    norms = [float(np.linalg.norm(x[numbers & np.isfinite(x)])) for x in (actual, expected)]
    return (
        f"relative L2 error {error:.3e} is above the tolerance {tolerance:.3e}: "
        f"‖actual‖ = {norms[0]:.6e}, ‖expected‖ = {norms[1]:.6e}; "
        f"furthest off at {tuple(int(i) for i in worst)}: {actual[worst]:.8g}, but {expected[worst]:.8g} is expected"
    )
