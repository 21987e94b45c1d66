"""Activation functions and their gradients in float64, and how far what is rounded may be off."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from te_jax import ops

KINDS = ("silu", "gelu", "relu", "squared_relu")


@dataclasses.dataclass(frozen=True)
class Expected:
    """The result, and the gradients of both operands, in float64; None without dy, and without up."""

    y: np.ndarray
    gate: np.ndarray | None = None
    up: np.ndarray | None = None


def oracle(kind, gate, up=None, dy=None, *, alpha=1.0, limit=None, offset=0.0) -> Expected:
    gate, up, dy = (None if x is None else np.asarray(x).astype(np.float64) for x in (gate, up, dy))
    with np.errstate(all="ignore"):
        inside, up_inside, factor = True, True, 1.0
        if up is not None:
            factor = up
            if limit is not None:
                inside, up_inside = ~(gate > limit), ~(np.abs(up) > limit)
                gate, factor = np.where(inside, gate, limit), np.where(up_inside, up, np.sign(up) * limit)
            factor = factor + offset
        value, slope = _function(kind, gate, alpha)
        return Expected(
            value * factor,
            None if dy is None else np.where(inside, dy * factor * slope, 0.0),
            None if dy is None or up is None else np.where(up_inside, dy * value, 0.0),
        )


def _function(kind, x, alpha):
    """(f(x), its derivative)."""
    if kind == "silu":
        sigmoid = 1 / (1 + np.exp(-alpha * x))
        return x * sigmoid, sigmoid + alpha * x * sigmoid * (1 - sigmoid)
    if kind == "gelu":
        tanh = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
        slope = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
        return 0.5 * x * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * slope
    positive = np.where(x <= 0, 0.0, x)
    return (positive, np.where(x <= 0, 0.0, 1.0)) if kind == "relu" else (positive**2, 2 * positive)


def assert_rounded(actual, expected, dtype):
    """Finite values within a unit of the last place of a dtype, which float32 computed."""
    actual = np.asarray(actual)
    assert actual.dtype == np.dtype(dtype)
    assert actual.shape == expected.shape
    epsilon = float(jnp.finfo(dtype).eps)
    # Derivatives cross zero, where what float32 rounds is as large as elsewhere.
    error = np.abs(actual.astype(np.float64) - expected)
    bound = (epsilon + 4e-6) * np.abs(expected) + 4e-6 * np.abs(expected).max(initial=0.0)
    assert (error <= bound).all(), (error - bound).max()


def assert_quantized_from(quantized, plain, quantization, *, row_ndim=None, amax=None):
    """The copies of an array whose values may differ from `plain` by a unit in the last place of its dtype: so may
    the amaxes that scales follow from, and codes by a step where a value lies in the middle of two."""
    copies = "data" if quantized.transposed is None else "transposed" if quantized.data is None else "both"
    expected = ops.quantize(
        plain, quantization, row_ndim=row_ndim, copies=copies, amax=amax, implementation="reference"
    )
    assert jax.tree.structure(quantized) == jax.tree.structure(expected)
    epsilon = float(jnp.finfo(plain.dtype).eps)
    for name in ("scale_inv", "transposed_scale_inv"):
        found, wanted = getattr(quantized, name), getattr(expected, name)
        if wanted is not None:
            np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=2 * epsilon + 1e-5, atol=0)
    for name in ("data", "transposed"):
        found, wanted = getattr(quantized, name), getattr(expected, name)
        if wanted is not None:
            assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
            steps = np.abs(_places(found) - _places(wanted))
            assert steps.max(initial=0) <= 1, (name, steps.max())
            assert (steps > 0).sum() <= 3 + 0.1 * steps.size, (name, (steps > 0).mean())


def _places(codes):
    """FP8 codes as integers in the order of their values; both zeros are 0, NaN is beyond all."""
    codes = np.asarray(codes)
    bits = codes.view(np.uint8).astype(np.int64)
    places = np.where(bits > 0x7F, -(bits & 0x7F), bits)
    return np.where(np.isnan(codes.astype(np.float32)), 1000, places)
