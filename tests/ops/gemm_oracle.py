"""Random operands of matrix products, and what comes out of them in float64, by NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from te_jax import ops
from te_jax.quantized import QuantizedArray, facts_of, scale_shape
from te_jax.testing import assert_close

E4M3, E5M2 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)
SCALINGS = {"tensor": ("tensor", "tensor"), "row": ("row", "row"), "block": ("block_1x128", "block_128x128")}
"""Scalings of lhs and rhs by the kind of product."""
MXFP8 = {"mx": ("block_1x32", "block_1x32")}
"""Those without a native kernel."""
FLOATS = ("float32", "bfloat16", "float16")
STATICS = (
    "lhs_contracting", "rhs_contracting", "contracting_ndim", "activation", "save_preactivation", "out_dtype",
    "accumulate", "fast_accumulation", "algorithm", "implementation",
)  # fmt: skip
# One program for each shape and choice of options: run eagerly, what follows a product is several.
gemm = jax.jit(ops.gemm, static_argnames=STATICS)


def random_quantized(rng, rows, cols, scaling, *, dtype=E4M3, transposed_scaling=None, stands_for="bfloat16"):
    """A QuantizedArray whose two copies are independent of each other, so that a mix-up shows."""

    def copy(outer, summed, scaling):
        data = jax.device_put(rng.standard_normal((*outer, *summed)).astype(np.float32).astype(dtype))
        scales = np.exp(rng.uniform(-1, 1, scale_shape(scaling, outer, summed)))
        if scaling == "block_1x32":
            scales = np.exp2(np.round(2 * np.log(scales)))
        return data, jax.device_put(scales.astype(np.float32).astype(facts_of(scaling).dtype))

    transposed_scaling = transposed_scaling or scaling
    return QuantizedArray(
        *copy(rows, cols, scaling),
        *copy(cols, rows, transposed_scaling),
        len(rows),
        len(cols),
        scaling,
        transposed_scaling,
        np.dtype(stands_for),
    )


def random_product(rng, m, n, k, kind, *, lhs_dtype=E4M3, rhs_dtype=E4M3, **options):
    """lhs [*m, *k] and rhs [*k, *n] of a product over cols and rows."""
    lhs_scaling, rhs_scaling = (SCALINGS | MXFP8)[kind]
    return (
        random_quantized(rng, m, k, lhs_scaling, dtype=lhs_dtype, **options),
        random_quantized(rng, k, n, rhs_scaling, dtype=rhs_dtype, **options),
    )


def wide(x):
    """Any array in float64."""
    return np.asarray(x).astype(np.float64)


def random_array(rng, shape, dtype="float32"):
    return jax.device_put(rng.standard_normal(shape).astype(np.float32).astype(jnp.dtype(dtype)))


def matrix(x, contracting, contracting_ndim=1):
    """The copy of an operand that a product reads, as a float64 matrix [outer, summed], and its outer dimensions."""
    if not isinstance(x, QuantizedArray):
        first = x.ndim - contracting_ndim if contracting == "cols" else contracting_ndim
        rows, cols = x.shape[:first], x.shape[first:]
        value = wide(x).reshape(math.prod(rows), math.prod(cols))
        return (value, rows) if contracting == "cols" else (value.T, cols)
    if contracting == "cols":
        data, scales, scaling, outer_ndim = x.data, x.scale_inv, x.scaling, x.row_ndim
    else:
        data, scales, scaling, outer_ndim = x.transposed, x.transposed_scale_inv, x.transposed_scaling, x.col_ndim
    outer, summed = data.shape[:outer_ndim], data.shape[outer_ndim:]
    value, scales = wide(data).reshape(math.prod(outer), math.prod(summed)), wide(scales)
    blocks = -(-value.shape[1] // 128)
    if scaling == "row":
        scales = scales.reshape(-1, 1)
    elif scaling == "block_1x32":
        scales = np.repeat(scales.reshape(len(value), -1), 32, axis=1)[:, : value.shape[1]]
    elif scaling == "block_1x128":
        scales = np.repeat(scales.reshape(blocks, len(value)).T, 128, axis=1)[:, : value.shape[1]]
    elif scaling == "block_128x128":
        scales = scales.reshape(-(-len(value) // 128), blocks)
        scales = np.repeat(np.repeat(scales, 128, axis=0), 128, axis=1)[: len(value), : value.shape[1]]
    return value * scales, outer


def product(lhs, rhs, lhs_contracting="cols", rhs_contracting="rows", contracting_ndim=1):
    """The product [*lhs outer, *rhs outer] in float64."""
    a, a_outer = matrix(lhs, lhs_contracting, contracting_ndim)
    b, b_outer = matrix(rhs, rhs_contracting, contracting_ndim)
    return (a @ b.T).reshape(*a_outer, *b_outer)


def tolerance_of(dtype, kind=""):
    """For `assert_close`: room for what tensor cores drop of sums of FP8 products between promotions to float32."""
    on_tensor_cores = jax.default_backend() == "gpu" and kind != "plain"
    return {"float32": 1e-3, "float16": 4e-3}.get(np.dtype(dtype).name) if on_tensor_cores else None


def assert_product(actual, expected, *, dtype, kind=""):
    assert_close(actual, expected, dtype=dtype, tolerance=tolerance_of(dtype, kind))


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
