"""Products whose results are symmetric, of which a GPU computes the lower triangle alone."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from te_jax import native

_LEAST_ROWS = 2560
"""From so many on the tiles of the triangle take at most two thirds of the rounds of an H100's or H200's
multiprocessors that all tiles take. The prototype took 0.58 to 0.65 of cuBLASLt's time with 4096 rows, and 1.4 with
1024."""

_ROW_MULTIPLE, _SUMMED_MULTIPLE = 128, 8

_Operands = tuple[Array, Array, Array | None]


def runs_native(rows: int, summed: int, implementation: native.Implementation | None) -> bool:
    """Whether the kernel computes results [rows, rows], each a sum over so many values: where it is named, and by
    default on a GPU where it is faster."""
    if implementation is not None:
        return native.use_native(implementation, products=True)
    fits = rows >= _LEAST_ROWS and rows % _ROW_MULTIPLE == 0 and summed % _SUMMED_MULTIPLE == 0
    return fits and native.compute_capability() == (9, 0) and native.use_native(None, products=True)


def symmetric_gemm(
    a: Array, b: Array, *, over_rows: bool = False, implementation: native.Implementation | None
) -> Array:
    """A·Bᵀ [m, m] of a and b [m, k], or Aᵀ·B of [k, m] over rows, which is symmetric, as with b = a or commuting ones.

    Results have the dtype of a, float16 or bfloat16; sums are float32.
    """
    m, k = a.shape[::-1] if over_rows else a.shape
    if runs_native(m, k, implementation):
        return _te_symmetric_gemm(a, b, None, over_rows, 1.0, 0.0, 0.0)
    return dot(a, b, (0, 0) if over_rows else (1, 1))


def polynomial(x: Array, constants: tuple[float, float, float], implementation: native.Implementation | None) -> Array:
    """a + b·X + c·X² of a symmetric X [m, m] in its dtype, for constants (a, b, c). Terms are added up in float32, for
    they cancel."""
    a, b, c = constants
    if runs_native(len(x), len(x), implementation):
        return _te_symmetric_gemm(x, x, x, False, float(c), float(b), float(a))
    squared, identity = dot(x, x), jnp.eye(len(x), dtype=jnp.float32)
    return (a * identity + (_exactly(b * wide(x)) + _exactly(c * wide(squared)))).astype(x.dtype)


def dot(lhs: Array, rhs: Array, contracting: tuple[int, int] = (1, 0)) -> Array:
    """In the dtype of lhs; sums are float32."""
    return lax.dot_general(
        lhs, rhs, (((contracting[0],), (contracting[1],)), ((), ())), preferred_element_type=lhs.dtype
    )


def wide(x: Array) -> Array:
    """In float32."""
    return x.astype(jnp.float32)


def _exactly(x: Array) -> Array:
    """A product as one number, which is not added to another in one operation: XLA does so in some programs."""
    return lax.reduce_precision(x, 8, 22)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4, 5, 6))
def _te_symmetric_gemm(
    a: Array, b: Array, c: Array | None, summed_first: bool, alpha: float, beta: float, diagonal: float
) -> Array:
    operands = {"a": a[None], "b": b[None]} | ({} if c is None else {"c": c[None]})
    rows = a.shape[1 if summed_first else 0]
    return native.call(
        "te_symmetric_gemm",
        {"d": jax.ShapeDtypeStruct((1, rows, rows), a.dtype)},
        operands,
        summed_first=summed_first,
        alpha=alpha,
        beta=beta,
        diagonal=diagonal,
    )[0][0]


@_te_symmetric_gemm.defjvp
def _derivative(
    summed_first: bool, alpha: float, beta: float, diagonal: float, primals: _Operands, tangents: _Operands
) -> tuple[Array, Array]:
    (a, b, c), (a_dot, b_dot, c_dot) = primals, tangents
    contracting = (0, 0) if summed_first else (1, 1)
    tangent = alpha * (dot(a_dot, b, contracting) + dot(a, b_dot, contracting))
    if c_dot is not None:
        tangent += beta * c_dot
    return _te_symmetric_gemm(a, b, c, summed_first, alpha, beta, diagonal), tangent
