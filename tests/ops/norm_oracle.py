"""Norms and their gradients in float64, and how far what is rounded may be off."""

import dataclasses

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Expected:
    """What is normalized, as it is stored and in float64; the result; and, with dy, gradients. `size` is that of the
    largest term of dx, whose terms may cancel."""

    total: np.ndarray
    y: np.ndarray
    dx: np.ndarray | None = None
    dscale: np.ndarray | None = None
    dbias: np.ndarray | None = None
    size: float = 0.0


def oracle(x, scale, bias=None, residual=None, dy=None, dtotal=None, *, centered, epsilon=1e-6, zero_centered=False):
    """RMS norm, or layer norm where centered. The gradient of the residual is that of x."""
    dtype = np.asarray(x).dtype
    total = np.asarray(x).astype(np.float64)
    with np.errstate(all="ignore"):
        if residual is not None:
            total = (total + np.asarray(residual).astype(np.float64)).astype(np.float32).astype(dtype)
            total = total.astype(np.float64)
        gamma = np.asarray(scale).astype(np.float64) + (1.0 if zero_centered else 0.0)
        away = total - total.mean(axis=-1, keepdims=True) if centered else total
        rstd = 1 / np.sqrt((away**2).mean(axis=-1, keepdims=True) + epsilon)
        normalized = away * rstd
        y = normalized * gamma + (0.0 if bias is None else np.asarray(bias).astype(np.float64))
        if dy is None:
            return Expected(total, y)
        dy = np.asarray(dy).astype(np.float64)
        scaled = dy * gamma
        dx = scaled - normalized * (scaled * normalized).mean(axis=-1, keepdims=True)
        if centered:
            dx = dx - scaled.mean(axis=-1, keepdims=True)
        dx, size = rstd * dx, np.abs(rstd * scaled).max(initial=0.0)
        if dtotal is not None:
            dx = dx + np.asarray(dtotal).astype(np.float64)
        rows = tuple(range(dy.ndim - 1))
        return Expected(total, y, dx, (dy * normalized).sum(axis=rows), dy.sum(axis=rows), size)


def assert_rounded(actual, expected, dtype, *, size=0.0, terms=None):
    """Values of a dtype that float32 computed, from numbers of this size, and rounded; `terms` is the size of what was
    rounded before it was added up."""
    actual = np.asarray(actual)
    assert actual.dtype == np.dtype(dtype)
    assert actual.shape == expected.shape
    terms = np.abs(expected) if terms is None else terms
    bound = float(jnp.finfo(dtype).eps) * terms + 1e-5 * max(size, np.abs(expected).max(initial=0.0))
    error = np.abs(actual.astype(np.float64) - expected)
    assert (error <= bound).all(), (error - bound).max()
