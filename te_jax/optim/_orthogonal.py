"""The orthogonal factor of matrices, by Newton-Schulz iterations in float16."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from te_jax import native
from te_jax.optim._symmetric import dot, polynomial, symmetric_gemm, wide

Coefficients = tuple[tuple[float, float, float], ...]

MUON: Coefficients = ((3.4445, -4.7750, 2.0315),) * 5
"""Jordan's, as optax has them: singular values above 0.002 of the Frobenius norm end between 0.68 and 1.14."""

_SEGMENT = 3
"""Iterations of the Gram form before it starts again from a matrix that it has multiplied. In float16 errors of X·Xᵀ
grow with every iteration: three and two are as exact as each by itself, two and three are not, and after five results
are 0.2 off."""


def orthogonalize(
    x: Array, coefficients: Coefficients = MUON, *, implementation: native.Implementation | None = None
) -> Array:
    """U·f(S)·Vᵀ of a matrix U·S·Vᵀ, where f takes all but tiny singular values to about 1.

    Each iteration takes X to p(X·Xᵀ)·X with p(A) = a + b·A + c·A². In matrices much longer than wide, products with X
    are most of the work. There the Gram form iterates X·Xᵀ instead, and multiplies X by all polynomials of a segment at
    once.

    Args:
      x: [m, n], float16, of magnitudes up to 1. Zeros stay zeros.
      coefficients: (a, b, c) of each iteration.
      implementation: of products whose results are symmetric: see `te_jax.ops.gemm`. By default large
        ones run in the native kernel on an H100 or H200, and all others in XLA.

    Returns:
      float16 [m, n]; NaN where an x is.

    References:
      Jordan et al., Muon, https://kellerjordan.github.io/posts/muon.
    """
    of_x = wide(x)
    # Rounded to eight bits, for sums in another order, as XLA has them in other programs, to be the same.
    norm = lax.reduce_precision(jnp.sqrt(jnp.sum(of_x * of_x)), 8, 7)
    x = (of_x / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny)).astype(x.dtype)
    for segment in _segments(x.shape, len(coefficients)):
        gram = symmetric_gemm(x, x, over_rows=not _is_wide(x), implementation=implementation)
        x = _times(_polynomials(gram, coefficients[segment], implementation), x)
    return x


def flops(shape: tuple[int, ...], iterations: int) -> float:
    """The FLOPs of `orthogonalize` of a matrix."""
    m, n = sorted(shape)
    segments = _segments(shape, iterations)
    # A segment has two with X; each of its iterations one more, and each but the first three more.
    return sum(4 * m * m * n + (8 * (s.stop - s.start) - 6) * m**3 for s in segments)


def _segments(shape: tuple[int, ...], iterations: int) -> list[slice]:
    """Iterations that share products with X: each by itself, or several where that is less work."""
    m, n = sorted(shape)
    # Each that joins a segment saves two products with X, and adds three of X·Xᵀ.
    length = _SEGMENT if 2 * n > 3 * m else 1
    return [slice(first, min(first + length, iterations)) for first in range(0, iterations, length)]


def _polynomials(gram: Array, coefficients: Coefficients, implementation: native.Implementation | None) -> Array:
    """The product of the polynomials of iterations that begin with this X·Xᵀ. All are symmetric, and commute."""
    product = jnp.zeros(())  # of none yet
    for i, constants in enumerate(coefficients):
        factor = polynomial(gram, constants, implementation)
        product = symmetric_gemm(factor, product, implementation=implementation) if i else factor
        if i + 1 < len(coefficients):
            half = symmetric_gemm(factor, gram, implementation=implementation)
            gram = symmetric_gemm(half, factor, implementation=implementation)
    return product


def _is_wide(x: Array) -> bool:
    return x.shape[0] <= x.shape[1]


def _times(product: Array, x: Array) -> Array:
    """A polynomial of X·Xᵀ, or of Xᵀ·X where that is smaller, times X from its side."""
    return dot(product, x) if _is_wide(x) else dot(x, product)
