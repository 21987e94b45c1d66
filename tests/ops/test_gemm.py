"""Values of matrix products against float64: every scaling, dtype and layout, and everything that follows a product."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gemm_oracle import (
    E4M3,
    E5M2,
    FLOATS,
    SCALINGS,
    assert_product,
    gelu,
    gemm,
    product,
    random_array,
    random_product,
    random_quantized,
    wide,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from te_jax import native, ops, recipe, reference
from te_jax.testing import assert_close

kinds = pytest.mark.parametrize("kind", SCALINGS)


@kinds
@pytest.mark.parametrize(
    ("lhs_dtype", "rhs_dtype", "out_dtype"),
    [(E4M3, E4M3, "float32"), (E4M3, E4M3, "bfloat16"), (E5M2, E4M3, "float32"), (E4M3, E5M2, "float16")],
    ids=str,
)
def test_fp8(lhs_dtype, rhs_dtype, out_dtype, kind, implementation, rng):
    lhs, rhs = random_product(rng, (36,), (48,), (176,), kind, lhs_dtype=lhs_dtype, rhs_dtype=rhs_dtype)
    result = gemm(lhs, rhs, out_dtype=out_dtype, implementation=implementation)
    assert_product(result, product(lhs, rhs), dtype=out_dtype)


@pytest.mark.parametrize("out_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_plain(dtype, out_dtype, implementation, rng):
    lhs, rhs = random_array(rng, (35, 77), dtype), random_array(rng, (77, 53), dtype)
    result = gemm(lhs, rhs, out_dtype=out_dtype, implementation=implementation)
    assert_close(result, product(lhs, rhs), dtype=out_dtype)


@kinds
@pytest.mark.parametrize("rhs_contracting", ["rows", "cols"])
@pytest.mark.parametrize("lhs_contracting", ["cols", "rows"])
def test_layouts(lhs_contracting, rhs_contracting, kind, implementation, rng):
    """Each side by either copy, with several dimensions in every group."""
    m, n, k = (2, 3, 32), (2, 128), (3, 128)
    lhs_scaling, rhs_scaling = SCALINGS[kind]
    lhs = random_quantized(rng, *((m, k) if lhs_contracting == "cols" else (k, m)), lhs_scaling)
    rhs = random_quantized(rng, *((k, n) if rhs_contracting == "rows" else (n, k)), rhs_scaling)
    contracting = {"lhs_contracting": lhs_contracting, "rhs_contracting": rhs_contracting}
    result = gemm(lhs, rhs, out_dtype="float32", implementation=implementation, **contracting)
    assert result.shape == (*m, *n)
    assert_product(result, product(lhs, rhs, **contracting), dtype="float32")


@pytest.mark.parametrize("rhs_contracting", ["rows", "cols"])
@pytest.mark.parametrize("lhs_contracting", ["cols", "rows"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layouts_of_plain_arrays(dtype, lhs_contracting, rhs_contracting, implementation, rng):
    m, n, k = (2, 7), (5, 3), (3, 11)
    lhs = random_array(rng, (*m, *k) if lhs_contracting == "cols" else (*k, *m), dtype)
    rhs = random_array(rng, (*k, *n) if rhs_contracting == "rows" else (*n, *k), dtype)
    contracting = {"lhs_contracting": lhs_contracting, "rhs_contracting": rhs_contracting, "contracting_ndim": 2}
    result = gemm(lhs, rhs, out_dtype="float32", implementation=implementation, **contracting)
    assert_close(result, product(lhs, rhs, **contracting), dtype="float32")


def test_the_reference_has_the_same_defaults(rng):
    a, b = (jax.device_put(np.asarray(rng.standard_normal(shape), jnp.float32)) for shape in ((16, 32), (32, 16)))
    quantize = jax.jit(lambda x: reference.quantize(x, recipe.CurrentScaling().quantization("kernel")).array)
    a8, b8 = quantize(a), quantize(b)
    assert_close(*jax.jit(lambda *ab: (reference.gemm(*ab), ops.gemm(*ab)))(a, b))
    ones, half = jax.ShapeDtypeStruct((16, 16), "float32"), jax.ShapeDtypeStruct((16, 32), "bfloat16")
    for multiply in (reference.gemm, ops.gemm):
        product = jax.eval_shape(lambda half, ones, by=multiply: by(half, half.T, accumulator=ones), half, ones)
        assert product.dtype == jnp.float32
        assert jax.eval_shape(lambda by=multiply: by(a.reshape(2, 8, 32), b)).shape == (2, 8, 16)
    assert_product(*jax.jit(lambda *ab: (ops.gemm(*ab), reference.gemm(*ab)))(a8, b8), dtype="float32")


@pytest.mark.parametrize("shape", [(1300, 1056, 592), (4, 2064, 2064), (2052, 16, 48)], ids=str)
@kinds
def test_sizes_beyond_one_tile_and_below(kind, shape, rng, native_kernels):
    m, n, k = shape
    lhs, rhs = random_product(rng, (m,), (n,), (k,), kind)
    result = gemm(lhs, rhs, out_dtype="float32", implementation="native")
    assert_product(result, product(lhs, rhs), dtype="float32")


@pytest.mark.skipif(
    jax.default_backend() == "gpu", reason="in which order cuBLASLt multiplies by two scales is its own"
)
def test_scales_of_rows_by_which_sums_overflow(rng, native_kernels):
    """Large by one scale and small by the other: the result is neither."""
    lhs, rhs = random_product(rng, (16,), (48,), (32,), "row")
    lhs = dataclasses.replace(lhs, scale_inv=np.full_like(lhs.scale_inv, 1e38))
    rhs = dataclasses.replace(rhs, transposed_scale_inv=np.full_like(rhs.transposed_scale_inv, 2e-38))
    result = gemm(lhs, rhs, out_dtype="float32", implementation="native")
    assert_product(result, product(lhs, rhs), dtype="float32")


@kinds
def test_scales_that_are_nan(kind, implementation, rng):
    """As of values that were not finite: what a scale belongs to is NaN, whatever its codes; all else is as before."""
    lhs, rhs = random_product(rng, (128,), (144,), (272,), kind)
    multiply = functools.partial(gemm, out_dtype="float32", implementation=implementation)
    scales = np.array(lhs.scale_inv)
    scales[{"block": (1, 3), "row": 3}.get(kind, ())] = np.nan
    poisoned = dataclasses.replace(lhs, scale_inv=scales)
    expected = np.array(multiply(lhs, rhs))
    expected[... if kind == "tensor" else 3] = np.nan
    np.testing.assert_array_equal(multiply(poisoned, rhs), expected)
    assert np.isnan(multiply(poisoned, rhs, bias=np.ones(144, np.float32), activation="gelu")[3]).all()


@settings(max_examples=5)
@given(m=st.integers(1, 300), n=st.integers(1, 40), k=st.integers(1, 640), kind=st.sampled_from([*SCALINGS, "plain"]))
def test_any_size(m, n, k, kind):
    rng = np.random.default_rng([m, n, k])
    if kind == "plain":
        lhs, rhs = random_array(rng, (m, k), "bfloat16"), random_array(rng, (k, n), "bfloat16")
    else:
        lhs, rhs = random_product(rng, (m,), (16 * n,), (k,), kind)
    for implementation in ["reference", *(["native"] if native.available() else [])]:
        result = gemm(lhs, rhs, out_dtype="float32", implementation=implementation)
        assert_product(result, product(lhs, rhs), dtype="float32", kind=kind)


def test_every_fp8_code_has_its_value(implementation):
    """256 codes of both formats times one: the table of values, subnormals, infinities and NaN included."""
    codes = np.arange(256, dtype=np.uint8).reshape(256, 1)
    for dtype in (E4M3, E5M2):
        # One code in each row, beside zeros, which no infinity may meet: their product would be NaN.
        expected = wide(codes.view(dtype))
        lhs, one = np.pad(codes, ((0, 0), (0, 15))).view(dtype), np.float32(1)
        x = random_quantized(np.random.default_rng(0), (256,), (16,), "tensor", dtype=dtype)
        x = dataclasses.replace(x, data=lhs, scale_inv=one, transposed=lhs.T, transposed_scale_inv=one)
        w = random_quantized(np.random.default_rng(0), (16,), (16,), "tensor")
        ones = np.ones((16, 16), E4M3)
        w = dataclasses.replace(w, data=ones, scale_inv=one, transposed=ones, transposed_scale_inv=one)
        result = np.asarray(gemm(x, w, out_dtype="float32", implementation=implementation))
        np.testing.assert_array_equal(result, np.broadcast_to(expected, (256, 16)))


# ---------------------------------------------------------------------------------------------- what follows a product


@pytest.mark.parametrize("kind", [*SCALINGS, "plain"])
@pytest.mark.parametrize(("dtype", "bias_dtype"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_bias(dtype, bias_dtype, kind, implementation, rng):
    lhs, rhs = operands(rng, kind, dtype, (3, 20), (32,), (48,))
    bias = random_array(rng, (32,), bias_dtype)
    result = gemm(lhs, rhs, bias=bias, out_dtype=dtype, implementation=implementation)
    assert_product(result, product(lhs, rhs) + wide(bias)[None, None], dtype=dtype, kind=kind)


@pytest.mark.parametrize(
    ("kind", "dtype", "with_bias"),
    [(kind, "bfloat16", True) for kind in [*SCALINGS, "plain"]] + [("plain", "bfloat16", False)],
)
def test_gelu(dtype, with_bias, kind, implementation, rng):
    lhs, rhs = operands(rng, kind, dtype, (24,), (2, 128), (48,))
    bias = random_array(rng, (2, 128), dtype) if with_bias else None
    call = functools.partial(
        gemm, lhs, rhs, bias=bias, activation="gelu", out_dtype=dtype, implementation=implementation
    )
    expected = product(lhs, rhs) + (wide(bias)[None] if with_bias else 0)
    assert_product(call(), gelu(expected), dtype=dtype, kind=kind)
    result, preactivation = call(save_preactivation=True)
    assert_product(result, gelu(expected), dtype=dtype, kind=kind)
    assert_product(preactivation, expected, dtype=dtype, kind=kind)


@pytest.mark.parametrize("columns", [1, 7, 8, 12])
def test_gelu_of_rows_of_any_length(columns, implementation, rng):
    """cuBLASLt's epilogues want rows of 16 bytes; others are followed up by XLA."""
    lhs, rhs = random_array(rng, (5, 9), "bfloat16"), random_array(rng, (9, columns), "bfloat16")
    bias = random_array(rng, (columns,), "bfloat16")
    expected = product(lhs, rhs) + wide(bias)[None]
    result, preactivation = gemm(
        lhs, rhs, bias=bias, activation="gelu", save_preactivation=True, implementation=implementation
    )
    assert_close(result, gelu(expected), dtype="bfloat16")
    assert_close(preactivation, expected, dtype="bfloat16")


@pytest.mark.parametrize(("inner", "columns"), [(2, 8), (3, 1), (8, 1), (12, 8)])
def test_gelu_of_what_is_left_of_a_product_and_a_bias(columns, inner, implementation):
    """257, which bfloat16 does not hold, less 256."""
    lhs = np.asarray([[256, 1, *[0] * (inner - 2)]], jnp.bfloat16)
    rhs, bias = np.ones((inner, columns), lhs.dtype), np.full(columns, -256, lhs.dtype)
    for layout in ("rows", "cols"):
        b = rhs if layout == "rows" else rhs.T
        result = gemm(lhs, b, rhs_contracting=layout, bias=bias, activation="gelu", implementation=implementation)
        assert_close(result, gelu(np.ones((1, columns))), dtype="bfloat16")


def test_gelu_far_from_zero(implementation):
    """Neither tail overflows, and the negative one decays to zero without cancellation."""
    x = np.asarray([-100.0, -20.0, -6.0, -3.0, -1e-6, 0.0, 1e-6, 6.0, 100.0, 1e6], jnp.bfloat16)[:, None]
    result = gemm(x, np.ones((1, 1), x.dtype), activation="gelu", implementation=implementation)
    assert_close(result, gelu(wide(x)), dtype="bfloat16")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="cuBLASLt's gelu is its own")
def test_gelu_of_values_as_in_training_that_diverges(implementation):
    x = np.asarray([-1e38, -1e18, -1e12, -1e6, 1e6, 1e12, 1e18, 0.0], jnp.bfloat16)
    result = gemm(np.eye(8, dtype=x.dtype), np.diag(x), activation="gelu", implementation=implementation)
    np.testing.assert_array_equal(wide(result), np.diag(np.maximum(wide(x), 0.0)))


# -------------------------------------------------------------------------------------------------------- accumulation


@pytest.mark.parametrize(
    ("kind", "dtype", "accumulate"),
    [(kind, "float32", True) for kind in [*SCALINGS, "plain"]]
    + [("plain", "bfloat16", True), ("tensor", "float32", False)],
)
def test_accumulator(dtype, accumulate, kind, implementation, rng):
    lhs, rhs = operands(rng, kind, "bfloat16", (8, 4), (32,), (48,))
    before = np.asarray(10 * rng.standard_normal((8, 4, 32)), jnp.dtype(dtype))
    if not accumulate:
        before[0, 0, 0] = np.nan
    expected = product(lhs, rhs) + (wide(before) if accumulate else 0)
    accumulator = jax.device_put(before, may_alias=False)
    result = gemm(lhs, rhs, accumulator=accumulator, accumulate=accumulate, implementation=implementation)
    assert_product(result, expected, dtype=dtype, kind=kind)
    np.testing.assert_array_equal(accumulator, before)  # not donated: not touched

    # In bfloat16 nothing would have been added: its values near 10⁴ lie 64 apart.


# ------------------------------------------------------------------------------------------------------- special sizes


@pytest.mark.parametrize(
    ("kind", "m", "n", "k"),
    [(kind, 16, 16, 0) for kind in ("row", "block", "plain")]
    + [("tensor", 0, 16, 16), ("plain", 16, 0, 16), ("block", 0, 16, 16)],
)
def test_empty(m, n, k, kind, implementation, rng):
    lhs, rhs = operands(rng, kind, "bfloat16", (m,), (n,), (k,))
    bias = random_array(rng, (n,), "bfloat16")
    result = gemm(lhs, rhs, bias=bias, implementation=implementation)
    np.testing.assert_array_equal(result, np.broadcast_to(bias, (m, n)))
    accumulator = random_array(rng, (m, n))
    result = gemm(lhs, rhs, accumulator=accumulator, implementation=implementation)
    np.testing.assert_array_equal(result, accumulator)


def test_vectors(implementation, rng):
    """No outer dimensions: a product of a vector and a matrix, and an inner product."""
    x, w = random_array(rng, (64,)), random_array(rng, (64, 5))
    assert_close(gemm(x, w, implementation=implementation), wide(x) @ wide(w), dtype="float32")
    assert_close(gemm(x, x, implementation=implementation), wide(x) @ wide(x), dtype="float32")
    outer = gemm(x, x, contracting_ndim=0, implementation=implementation)
    assert_close(outer, np.outer(wide(x), wide(x)), dtype="float32")


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize(("rows", "is_padded"), [(1, False), (7, False), (8, False), (11, True), (12, False)])
def test_few_rows_of_blocks_are_not_padded(rows, is_padded, rng):
    """A kernel takes any number up to 8; beyond, multiples of 4."""
    lhs, rhs = random_product(rng, (rows,), (128,), (256,), "block")
    program = jax.make_jaxpr(functools.partial(gemm, implementation="native"))(lhs, rhs)
    assert (" pad[" in str(program)) == is_padded


def test_default_dtypes(implementation, rng):
    lhs, rhs = random_product(rng, (4,), (16,), (16,), "tensor", stands_for="float16")
    call = functools.partial(gemm, implementation=implementation)
    for options, dtype in (
        ({}, jnp.float16),
        ({"out_dtype": jnp.bfloat16}, jnp.bfloat16),
        ({"accumulator": np.zeros((4, 16), np.float32)}, jnp.float32),
    ):
        assert jax.eval_shape(functools.partial(call, **options), lhs, rhs).dtype == dtype


def test_options_of_gpus_change_nothing_here(implementation, rng):
    lhs, rhs = random_product(rng, (4,), (16,), (16,), "tensor")
    bias = random_array(rng, (16,), "float32")
    expected = product(lhs, rhs) + wide(bias)[None]
    for options in ({"fast_accumulation": True}, {"algorithm": "cublaslt"}, {"algorithm": "te_jax"}):
        result = gemm(lhs, rhs, bias=bias, out_dtype="float32", implementation=implementation, **options)
        assert_product(result, expected, dtype="float32")


@pytest.mark.parametrize(
    ("environment", "processes", "expected"),
    [(None, 1, "auto"), ("1", 1, "auto"), ("0", 1, "cublaslt"), (None, 2, "cublaslt"), ("1", 2, "auto")],
)
def test_products_that_are_the_same_in_every_process(
    environment, processes, expected, monkeypatch, native_kernels, rng
):
    if processes > 1:
        monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(jax, "process_count", lambda: processes)
    if environment is None:
        monkeypatch.delenv("TE_JAX_AUTOTUNE", raising=False)
    else:
        monkeypatch.setenv("TE_JAX_AUTOTUNE", environment)
    rows = 16 * (16 * processes + len(f"{environment}{expected}"))  # what has been traced is not traced again
    x, kernel = random_array(rng, (rows, 32), "bfloat16"), random_array(rng, (32, 16), "bfloat16")
    layer = functools.partial(ops.dense, recipe=recipe.CurrentScaling(), implementation="native")
    assert f'algorithm = "{expected}"' in jax.jit(layer).lower(x, kernel).as_text()


def operands(rng, kind, dtype, m, n, k):
    """lhs [*m, *k] and rhs [*k, *n]: quantized, or plain arrays of the dtype."""
    if kind == "plain":
        return random_array(rng, (*m, *k), dtype), random_array(rng, (*k, *n), dtype)
    return random_product(rng, m, n, k, kind)
