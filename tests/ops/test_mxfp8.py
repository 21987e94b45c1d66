"""MXFP8: copies bit for bit against NumPy, products and layers against float64, and what has no such product.

There is no native kernel. `implementation="xla"` lays operands out as on GPUs, for which test_xla_products.py compiles.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_oracle import FORWARD, GRADIENT, oracle
from dense_oracle import check as check_layer
from dense_oracle import random_case as random_layer
from gemm_oracle import (
    E4M3,
    E5M2,
    assert_product,
    gelu,
    gemm,
    product,
    random_array,
    random_product,
    random_quantized,
    wide,
)  # fmt: skip
from jax import export
from parameters import in_turns
from quantize_oracle import check, quantization_of, quantize, random_case

from te_jax import native, ops
from te_jax.ops.linear.kernels import quantize_kernel
from te_jax.recipe import CurrentScaling, MXFP8Scaling
from te_jax.testing import assert_close, relative_error

RECIPE = MXFP8Scaling()
E8M0 = jnp.float8_e8m0fnu

IMPLEMENTATIONS = ["xla", "reference"]

# -------------------------------------------------------------------------------------------------------- quantization


@pytest.mark.parametrize(
    ("shape", "row_ndim", "dtype", "dtype_fp8", "pair", "copies"),
    [
        ((48, 96), 1, "bfloat16", E4M3, "1x32", "transposed"),
        ((33, 70), 1, "float32", E4M3, "1x32", "both"),
        ((2, 64, 3, 32), 2, "float32", E5M2, "1x32", "data"),
        ((0, 32), 1, "bfloat16", E4M3, "1x32", "both"),
        ((40, 64), 1, "bfloat16", E4M3, "1x32 and tensor", "both"),
    ],
)
def test_copies(shape, row_ndim, dtype, dtype_fp8, pair, copies, rng):
    quantization = quantization_of(pair, dtype_fp8)
    check(random_case(rng, shape, dtype), quantization, row_ndim=row_ndim, copies=copies, implementation=None)


def test_nothing_saturates(rng):
    """Scales are rounded down, so that the largest value of a block is 448 at most, and above 224."""
    x = np.exp(rng.uniform(-30, 30, (64, 64))).astype(np.float32)
    quantized = quantize(x, RECIPE.quantization("activation"))
    largest = np.abs(wide(quantized.data)).reshape(64, 2, 32).max(-1)
    assert (largest >= 224).all()
    assert (largest <= 448).all()
    assert relative_error(quantized.dequantize(), x) < 0.04


def test_a_value_that_is_not_finite_reaches_its_block_alone():
    x = np.ones((2, 64), np.float32)
    x[1, 40] = np.inf
    found = np.isnan(np.asarray(quantize(x, RECIPE.quantization("activation"), copies="data").dequantize()))
    assert found[1, 32:].all()
    assert found.sum() == 32


def test_refusals():
    x, quantization = np.ones((32, 32), np.float32), RECIPE.quantization("activation")
    with pytest.raises(native.NativeUnavailableError, match="no native kernel quantizes with 'block_1x32' scaling"):
        ops.quantize(x, quantization, implementation="native")
    with pytest.raises(ValueError, match=r"cols of shape \(2, 48\); blocks of 32 along them need a last dimension"):
        ops.quantize(np.ones((32, 2, 48), np.float32), quantization, row_ndim=1)
    quantized = quantize(x, quantization)
    with pytest.raises(native.NativeUnavailableError, match="no native kernel multiplies FP8 with 'block_1x32'"):
        ops.gemm(quantized, quantized, implementation="native")
    other = quantize(x, CurrentScaling().quantization("kernel"))
    with pytest.raises(ValueError, match="rhs has 'tensor' scales and lhs 'block_1x32'; both must have the same kind"):
        ops.gemm(quantized, other)
    with pytest.raises(ValueError, match=re.escape("scaling they must be float8_e8m0fnu (32, 1)")):
        ops.gemm(jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == E8M0 else x, quantized), quantized)


# ------------------------------------------------------------------------------------------------------------ products


@pytest.mark.parametrize(
    ("case", "implementation"),
    in_turns(
        {
            "matrices": ((36,), (176,), (48,), (E4M3, E4M3), "float32"),
            "groups": ((2, 3), (2, 64), (48,), (E5M2, E4M3), "bfloat16"),
            "short blocks": ((5,), (20,), (2, 16), (E4M3, E5M2), "float16"),
        },
        IMPLEMENTATIONS,
    ),
)
def test_gemm(case, implementation, rng):
    m, k, n, dtypes, out_dtype = case
    lhs, rhs = random_product(rng, m, n, k, "mx", lhs_dtype=dtypes[0], rhs_dtype=dtypes[1])
    bias = random_array(rng, n, out_dtype)
    result = gemm(lhs, rhs, bias=bias, activation="gelu", out_dtype=out_dtype, implementation=implementation)
    assert_product(result, gelu(product(lhs, rhs) + wide(bias)), dtype=out_dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gemm_of_other_copies_with_an_accumulator(implementation, rng):
    lhs, rhs = (random_quantized(rng, (64,), (size,), "block_1x32") for size in (40, 48))
    accumulator = random_array(rng, (40, 48))
    options = {"lhs_contracting": "rows", "rhs_contracting": "rows"}
    result = gemm(lhs, rhs, accumulator=accumulator, implementation=implementation, **options)
    assert_product(result, product(lhs, rhs, **options) + wide(accumulator), dtype="float32")


# -------------------------------------------------------------------------------------------------------------- layers


def test_dense(rng):
    """Groups of dimensions, and tokens that fill no blocks; tests/conformance has the reference."""
    case = random_layer(rng, (3, 23), (2, 48), (3, 32), "float16", kernel_contracting="last")
    check_layer(case, recipe=RECIPE, implementation="xla")


def test_the_default_on_a_cpu_is_the_reference_without_a_warning(rng, recwarn):
    case = random_layer(rng, (32,), (32,), (32,), "float32", with_bias=False)
    default, reference = jax.jit(
        lambda *operands: [
            ops.dense(*operands, recipe=RECIPE, implementation=name) for name in (None, "reference")
        ]
    )(case.x, case.kernel)  # fmt: skip
    np.testing.assert_array_equal(default, reference)
    assert not [warning for warning in recwarn if issubclass(warning.category, RuntimeWarning)]


def test_grouped_dense(rng):
    shapes = (96, 64), (64, 160), (64, 160)
    x, gate, up = ((rng.standard_normal(s) / np.sqrt(s[0])).astype(np.float32) for s in shapes)
    sizes = np.int32([50, 46])

    def step(recipe):
        def loss(x, gate, up):
            return jnp.sum(jnp.sin(4 * ops.grouped_dense(8 * x, jnp.stack([gate, up]), sizes, recipe=recipe)))

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(x, gate, up)

    (_, found), (_, expected) = jax.jit(lambda: (step(RECIPE), step(None)))()
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a, b) < 3 * GRADIENT


def test_a_kernel_quantized_beforehand_with_an_accumulator(rng):
    case = random_layer(rng, (64,), (2, 48), (32,), "float32", with_bias=False)
    kernel = quantize_kernel(case.kernel, RECIPE, row_ndim=2)
    assert kernel.data.shape == (96, 32)  # 48 is not made of whole blocks

    def step(kernel, accumulator):
        y, vjp = jax.vjp(
            lambda x, accumulator: ops.dense(
                x, kernel, recipe=RECIPE, wgrad_accumulator=accumulator
            ),
            case.x.reshape(64, 96), accumulator,
        )  # fmt: skip
        return y, *vjp(case.dy)

    y, dx, following = jax.jit(step)(kernel, jnp.ones((96, 32)))
    expected = oracle(case)
    assert_close(y, expected.y, dtype="float32", tolerance=FORWARD)
    assert_close(dx, expected.dx.reshape(64, 96), dtype="float32", tolerance=GRADIENT)
    assert_close(following - 1, expected.dkernel.reshape(96, 32), dtype="float32", tolerance=GRADIENT)


def test_export(rng):
    """Scales of one byte survive serialization."""
    quantized = quantize(rng.standard_normal((32, 64)).astype(np.float32), RECIPE.quantization("kernel"))
    dequantize = jax.jit(lambda q: q.dequantize())
    again = export.deserialize(export.export(dequantize)(quantized).serialize())
    np.testing.assert_array_equal(again.call(quantized), dequantize(quantized))


def test_memory():
    """33 bytes for 32 values of a copy."""
    quantized = jax.eval_shape(lambda x: ops.quantize(x, RECIPE.quantization("kernel")), np.ones((64, 96)))
    for scales, copy in ((quantized.scale_inv, quantized.data), (quantized.transposed_scale_inv, quantized.transposed)):
        assert scales.dtype == E8M0
        assert scales.size * 32 == copy.size
