"""The measure of error of all other tests: that it can fail."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax.testing import assert_close, relative_error


def test_relative_error_is_the_relative_l2_norm():
    assert relative_error([3.0, 4.0, 0.5], [3.0, 4.0, 0.0]) == pytest.approx(0.1)
    assert relative_error([1e300, 0.0], [1e300, 1e299]) == pytest.approx(0.1, rel=1e-2)
    assert relative_error([1e-300, 2e-300], [1e-300, 1e-300]) == pytest.approx(0.5**0.5)
    assert relative_error([1e200, 2.0], [1e200, 1.0]) == pytest.approx(1e-200)


def test_relative_error_of_special_values():
    assert relative_error([], []) == 0.0
    assert relative_error(0.0, 0.0) == 0.0
    assert relative_error([1e-30], [0.0]) == np.inf
    assert relative_error([np.inf, 1.0], [np.inf, 1.0]) == 0.0
    assert relative_error([np.inf, 1.1], [np.inf, 1.0]) == pytest.approx(0.1)
    assert relative_error([np.inf, 1.0], [-np.inf, 1.0]) == np.inf
    assert relative_error([np.inf, 1.0], [5.0, 1.0]) == np.inf
    assert relative_error([5.0, 1.0], [np.inf, 1.0]) == np.inf
    assert np.isnan(relative_error([np.nan, 1.0], [np.nan, 1.0]))
    assert np.isnan(relative_error([np.nan, 1.0], [1.0, 1.0]))
    assert np.isnan(relative_error([1.0, 1.0], [np.nan, 1.0]))


def test_relative_error_broadcasts_nothing():
    with pytest.raises(ValueError, match=r"actual has shape \(1,\) and expected \(2,\)"):
        relative_error([1.0], [1.0, 1.0])


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 1e-2), ("float16", 2e-3), ("float64", 1e-12)]
)
def test_default_tolerance_follows_the_dtype(dtype, tolerance, rng):
    with jax.enable_x64(True):
        expected = jax.device_put(np.asarray(rng.standard_normal(1000), jnp.dtype(dtype)))
        exact = np.asarray(expected, np.float64)
        assert_close(expected, exact * (1 + 0.9 * tolerance), dtype=dtype)
        with pytest.raises(AssertionError, match="relative L2 error"):
            assert_close(expected, exact * (1 + 1.1 * tolerance), dtype=dtype)


def test_integers_must_be_equal():
    assert_close(np.arange(3), np.arange(3))
    with pytest.raises(AssertionError, match="relative L2 error"):
        assert_close(np.array([1000000, 1]), np.array([1000000, 2]))


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_integers_that_float64_rounds_are_refused(dtype):
    largest = np.array([2**53], dtype)
    assert_close(largest, largest)
    with pytest.raises(ValueError, match=f"actual has dtype {dtype} and integers beyond 2\\^53"):
        assert_close(largest + np.array([1], dtype), largest)
    if dtype == "int64":
        assert_close(-largest, -largest)
        with pytest.raises(ValueError, match="expected has dtype int64 and integers beyond"):
            assert_close(-largest, -largest - 1)


def test_complex_numbers_are_refused():
    with pytest.raises(ValueError, match="expected has dtype complex64; it must be real"):
        relative_error(np.ones(2, np.float32), np.ones(2, np.complex64))


def test_zeros_are_not_close_to_anything_else():
    expected = np.full(8, 1e-20, np.float32)
    with pytest.raises(AssertionError, match=r"relative L2 error 1\.000e\+00"):
        assert_close(np.zeros(8, np.float32), expected)
    with pytest.raises(AssertionError, match="relative L2 error inf"):
        assert_close(expected, np.zeros(8, np.float32))


def test_failure_states_metric_norms_tolerance_and_worst_element():
    actual, expected = np.full((2, 3), 2.0, np.float32), np.full((2, 3), 2.0, np.float32)
    actual[1, 2] = 8.0
    with pytest.raises(AssertionError) as failure:
        assert_close(actual, expected, tolerance=0.25)
    message = str(failure.value)
    for part in ("relative L2 error 1.225e+00", "tolerance 2.500e-01", "‖actual‖ = 9.165151e+00",
                 "‖expected‖ = 4.898979e+00", "at (1, 2): 8, but 2 is expected"):  # fmt: skip
        assert part in message


def test_failure_leaves_out_what_is_not_finite_on_both_sides():
    expected = np.array([np.nan, np.inf, 3.0, 4.0], np.float32)
    with pytest.raises(AssertionError) as failure:
        assert_close(expected + np.array([0, 0, 0, 1], np.float32), expected, equal_nan=True)
    for part in ("‖actual‖ = 5.830952e+00", "‖expected‖ = 5.000000e+00", "at (3,): 5, but 4 is expected"):
        assert part in str(failure.value)


def test_shape_and_dtype_must_match():
    with pytest.raises(AssertionError, match=r"shape \(1, 2\), but \(2,\)"):
        assert_close(np.ones((1, 2), np.float32), np.ones(2, np.float32))
    with pytest.raises(AssertionError, match=r"shape \(\), but \(2,\)"):
        assert_close(np.float32(1), np.ones(2, np.float32))
    with pytest.raises(AssertionError, match="dtype float32, but bfloat16"):
        assert_close(jnp.ones(2, jnp.float32), jnp.ones(2, jnp.bfloat16))
    with pytest.raises(AssertionError, match="dtype float32, but float16"):
        assert_close(np.ones(2, np.float32), np.ones(2), dtype=jnp.float16)


def test_nan_passes_only_where_it_is_expected():
    with_nan, without = np.array([1.0, np.nan], np.float32), np.array([1.0, 2.0], np.float32)
    for actual, expected in ((with_nan, with_nan), (with_nan, without), (without, with_nan)):
        with pytest.raises(AssertionError, match="NaN never passes"):
            assert_close(actual, expected, tolerance=np.inf)
    for actual, expected in ((with_nan, without), (without, with_nan), (with_nan, with_nan[::-1])):
        with pytest.raises(AssertionError, match="NaN at different places"):
            assert_close(actual, expected, tolerance=np.inf, equal_nan=True)
    assert_close(with_nan, with_nan, equal_nan=True)
    with pytest.raises(AssertionError, match="relative L2 error"):
        assert_close(with_nan + 1, with_nan, equal_nan=True)


@pytest.mark.parametrize("tolerance", [-1.0, np.nan])
def test_tolerance_must_be_a_number(tolerance):
    with pytest.raises(ValueError, match="tolerance is"):
        assert_close(1.0, 1.0, tolerance=tolerance)
