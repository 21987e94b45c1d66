"""RMS and layer norms against float64: results, residual sums and gradients, in their own dtype and in FP8."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from activation_oracle import assert_quantized_from
from compiled import results_and_gradients
from norm_oracle import assert_rounded, oracle
from parameters import in_turns, named
from quantize_oracle import E5M2, assert_bits, quantization_of

from te_jax import native, ops

DTYPES = ("float32", "bfloat16", "float16")
SHAPES = ((256, 384), (100, 48), (33, 17), (1, 130), (130, 1), (5, 1100), (3, 7, 40), (50,))
PAIRS = ("tensor", "1x128", "1x128 and square", "square and 1x128", "row", "tensor and row", "block and tensor")
NORMS = ("rms_norm", "layer_norm")
each_norm = pytest.mark.parametrize("norm", NORMS)
with_residual = pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])


def draw(rng, shape, dtype="bfloat16", count=1, scale=1.0):
    return [
        jax.device_put((scale * rng.standard_normal(shape)).astype(np.float32).astype(jnp.dtype(dtype)))
        for _ in range(count)
    ]


def draw_operands(rng, norm, shape, dtype="bfloat16", residual=False):
    """x, scale, bias and residual, with a mean that is not zero."""
    x, *more = draw(rng, shape, dtype, count=2, scale=2.0)
    scale, bias = draw(rng, shape[-1:], "float32", count=2)
    x = jax.device_put(np.asarray(x) + np.asarray(0.5, x.dtype))
    return x, scale, bias if norm == "layer_norm" else None, more[0] if residual else None


def run(norm, x, scale, bias=None, residual=None, **options):
    if norm == "layer_norm":
        return ops.layer_norm(x, scale, bias, residual=residual, **options)
    return ops.rms_norm(x, scale, residual=residual, **options)


# ------------------------------------------------------------------------------------------------- in their own dtype


def check(norm, operands, dy, dtotal, implementation, **options):
    """Results and all gradients against float64."""
    x, scale, bias, residual = operands
    implementation = named(implementation, x.dtype)

    def call(*operands):
        return run(norm, *operands, implementation=implementation, **options)

    results, found = results_and_gradients(call, operands, dy if residual is None else (dy, dtotal))
    expected = oracle(x, scale, bias, residual, dy, dtotal, centered=norm == "layer_norm", **options)
    y = results if residual is None else results[0]
    assert_rounded(y, expected.y, x.dtype)
    if residual is not None:
        np.testing.assert_array_equal(np.asarray(results[1]).astype(np.float64), expected.total)
    terms = None
    if residual is not None and implementation != "native":  # JAX rounds both gradients before it adds them
        other = np.asarray(dtotal).astype(np.float64)
        terms = np.abs(expected.dx - other) + np.abs(other) + np.abs(expected.dx)
    assert_rounded(found[0], expected.dx, x.dtype, size=expected.size, terms=terms)
    sums = np.abs(np.asarray(dy).astype(np.float64)).reshape(-1, dy.shape[-1]).sum(axis=0).max(initial=0.0)
    assert_rounded(found[1], expected.dscale, scale.dtype, size=4 * sums)
    if bias is not None:
        assert_rounded(found[2], expected.dbias, bias.dtype, size=sums)
    if residual is not None:
        np.testing.assert_array_equal(np.asarray(found[3]), np.asarray(found[0]))


@pytest.mark.parametrize(
    ("norm", "residual", "implementation", "shape"),
    [(NORMS[i % 2], i % 4 < 2, "native", shape) for i, shape in enumerate(SHAPES)]
    + [("rms_norm", True, "reference", (100, 48)), ("layer_norm", False, "reference", (50,))],
    ids=str,
)
@pytest.mark.usefixtures("native_kernels")
def test_results_and_gradients(norm, shape, residual, implementation, rng):
    operands = draw_operands(rng, norm, shape, "float32", residual)
    dy, dtotal = draw(rng, shape, "float32", count=2)
    check(norm, operands, dy, dtotal if residual else None, implementation)


@pytest.mark.parametrize(
    ("norm", "dtype", "of_parameters"),
    in_turns(["rms_norm", "layer_norm", "layer_norm"], DTYPES, ["float16", "bfloat16", "float32"]),
)
def test_dtypes(norm, dtype, of_parameters, implementation, rng):
    x, *parameters, residual = draw_operands(rng, norm, (300, 72), dtype, residual=True)
    parameters = [array if array is None else np.asarray(array).astype(of_parameters) for array in parameters]
    cotangents = draw(rng, (300, 72), dtype, count=2)
    check(norm, (x, *parameters, residual), *cotangents, implementation, zero_centered=True, epsilon=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@each_norm
def test_the_norm_sees_the_sum_as_it_is_stored(norm, dtype, implementation, rng):
    """Rows of a large number and small ones, which the sum loses: what is normalized has lost them too."""
    x, scale, bias, _ = draw_operands(rng, norm, (64, 96), dtype)
    x, implementation = x * jnp.asarray(1e-2, dtype), named(implementation, dtype)
    residual = jnp.full_like(x, 8.0)
    y, total = jax.jit(functools.partial(run, norm, implementation=implementation))(x, scale, bias, residual)
    alone = jax.jit(functools.partial(run, norm, implementation=implementation))(total, scale, bias)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(alone))
    exact = np.asarray(x).astype(np.float32) + np.float32(8.0)
    np.testing.assert_array_equal(np.asarray(total), exact.astype(total.dtype))
    assert (np.asarray(total).astype(np.float32) != exact).mean() > 0.5


def test_subnormal_sums(implementation):
    """The sum is that of the dtype, also where it is subnormal."""
    x = jax.device_put(np.float16([[6e-8, -3e-6, 2e-5, 1.0]]))
    how = {"residual": x, "implementation": named(implementation, x.dtype)}
    _, total = jax.jit(lambda x: ops.rms_norm(x, jnp.ones(4), **how))(x)
    np.testing.assert_array_equal(np.asarray(total), np.asarray(x) * np.float16(2))


@each_norm
def test_values_that_are_not_finite(norm, implementation, rng):
    """They reach their row, and no other."""
    operands = x, scale, bias, residual = draw_operands(rng, norm, (6, 200), "float32", residual=True)
    x, residual = np.array(x), np.array(residual)
    x[1, 3], x[3, 150], residual[4, 7] = np.nan, np.inf, -np.inf
    call = jax.jit(functools.partial(run, norm, implementation=implementation))
    poisoned = [call(*o)[0] for o in ((x, scale, bias, residual), operands)]
    finite = np.isfinite(np.asarray(poisoned[0])).all(axis=1)
    np.testing.assert_array_equal(finite, [True, False, True, False, False, True])
    np.testing.assert_array_equal(np.asarray(poisoned[0])[finite], np.asarray(poisoned[1])[finite])


@pytest.mark.parametrize(
    ("norm", "residual", "dtype", "largest", "implementation"),
    [
        ("rms_norm", True, "float32", 3e19, "native"),
        ("layer_norm", False, "bfloat16", 1e30, "native"),
        ("rms_norm", False, "bfloat16", 1e30, "reference"),
        ("layer_norm", True, "float32", 3e19, "reference"),
    ],
)
@pytest.mark.usefixtures("native_kernels")
def test_squares_that_overflow(norm, residual, dtype, largest, implementation, rng):
    """Their rows are NaN and so are all gradients that they reach, not 0, or nobody would see that a run diverges."""
    x, scale, bias, other = draw_operands(rng, norm, (5, 200), dtype, residual)
    x = np.asarray(x) * np.asarray([[1], [largest], [1], [-1e37], [1]]).astype(x.dtype)

    def call(x, scale, bias, other):
        return run(norm, x, scale, bias, other, zero_centered=True, implementation=implementation)

    dy, dtotal = draw(rng, (5, 200), dtype, count=2)
    results, (dx, dscale, _, dother) = results_and_gradients(
        call, (x, scale, bias, other), (dy, dtotal) if residual else dy
    )
    for array in [results[0], dx, dother] if residual else [results, dx]:
        wrong = np.isnan(np.asarray(array).astype(np.float32))
        np.testing.assert_array_equal(wrong, np.repeat([[False], [True], [False], [True], [False]], 200, axis=1))
    assert np.isnan(np.asarray(dscale)).all()


@each_norm
def test_rows_of_zeros(norm, implementation):
    x, ones = jnp.zeros((3, 40), jnp.bfloat16), jnp.ones(40)
    call = functools.partial(run, norm, implementation=implementation)
    y, gradients = results_and_gradients(call, (x, ones, ones), jnp.ones_like(x))
    assert (np.asarray(y) == (1 if norm == "layer_norm" else 0)).all()
    assert np.isfinite(np.asarray(gradients[0]).astype(np.float32)).all()


@with_residual
@each_norm
def test_no_rows(norm, residual, implementation):
    x, scale = jnp.zeros((0, 16), jnp.bfloat16), jnp.ones(16)
    call = functools.partial(run, norm, implementation=implementation)
    in_fp8 = jax.jit(functools.partial(call, quantization=quantization_of("tensor")))
    quantized = in_fp8(x, scale, residual=x if residual else None)
    assert (quantized[0] if residual else quantized).transposed.shape == (16, 0)
    _, (dx, dscale) = results_and_gradients(
        lambda x, scale: call(x, scale, residual=x if residual else None), (x, scale), (x, x) if residual else x
    )
    assert dx.shape == (0, 16)
    np.testing.assert_array_equal(dscale, np.zeros(16))


@pytest.mark.parametrize(("rows", "norm"), in_turns([263, 264, 265, 1000], NORMS))
def test_more_rows_than_partial_sums(rows, norm, native_kernels, rng):
    """Every row is in one of them, whatever their number divides."""
    operands = draw_operands(rng, norm, (rows, 24), "float32")
    check(norm, operands, *draw(rng, (rows, 24), "float32"), None, "native")


@pytest.mark.parametrize("used", ["y", "total"])
def test_gradients_of_one_result(used, implementation, rng):
    x, scale, _, residual = draw_operands(rng, "rms_norm", (12, 40), "float32", residual=True)
    (weight,) = draw(rng, x.shape, "float32")

    def loss(x, scale, residual):
        y, total = ops.rms_norm(x, scale, residual=residual, implementation=implementation)
        return jnp.sum(weight * (y if used == "y" else total))

    found = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(x, scale, residual)
    zeros = np.zeros(x.shape)
    dy, dtotal = (weight, zeros) if used == "y" else (zeros, weight)
    expected = oracle(x, scale, None, residual, dy, dtotal, centered=False)
    assert_rounded(found[0], expected.dx, "float32", size=10)
    assert_rounded(found[1], expected.dscale, "float32", size=10)
    np.testing.assert_array_equal(found[0], found[2])


@with_residual
def test_what_is_kept_for_the_backward_pass(residual, native_kernels, rng):
    """One array of rows, and one float32 a row."""
    x, scale, _, other = draw_operands(rng, "rms_norm", (64, 512), residual=residual)
    _, gradient = jax.vjp(lambda x, scale: ops.rms_norm(x, scale, residual=other), x, scale)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(gradient)) <= x.nbytes + 4 * (64 + 512)


# ------------------------------------------------------------------------------------------------------------- in FP8


def check_quantized(norm, operands, quantization, implementation, copies="both", **options):
    """A result in FP8 against that in the dtype of x."""
    implementation = named(implementation, operands[0].dtype)

    def both(*operands):
        found = functools.partial(run, norm, quantization=quantization, copies=copies, implementation=implementation)
        return run(norm, *operands, implementation="reference", **options), found(*operands, **options)

    plain, found = jax.jit(both)(*operands)
    if operands[3] is not None:
        (plain, total), (found, found_total) = plain, found
        assert_bits(found_total, total)
    assert (found.data is None, found.transposed is None) == (copies == "transposed", copies == "data")
    assert (found.straight_through.shape, found.straight_through.dtype) == (plain.shape, plain.dtype)
    assert not np.asarray(found.straight_through).any()
    assert_quantized_from(dataclasses.replace(found, straight_through=None), plain, quantization)


@pytest.mark.parametrize(
    ("pair", "norm", "residual", "implementation", "copies"),
    [
        *in_turns(PAIRS, NORMS, [False, True, True], ["native"], ["both"]),
        *in_turns(PAIRS[1:3], NORMS[::-1], [True, False], ["native"], ["data", "transposed"]),
        *in_turns(PAIRS[:4:2], NORMS, [True, False], ["reference"], ["both", "transposed"]),
    ],
)
@pytest.mark.usefixtures("native_kernels")
def test_quantized_results(pair, norm, residual, implementation, copies, rng):
    operands = draw_operands(rng, norm, (200, 260), residual=residual)
    check_quantized(norm, operands, quantization_of(pair), implementation, copies, zero_centered=True)


@pytest.mark.parametrize(("shape", "dtype"), in_turns([(33, 17), (3, 128, 40), (5, 1100)], DTYPES))
def test_shapes_and_dtypes_in_fp8(shape, dtype, native_kernels, rng):
    """Only in the kernels: the reference calls `ops.quantize`, whose own tests have such shapes."""
    for pair, power_of_two in (("tensor", False), ("1x128", True)):
        operands = draw_operands(rng, "layer_norm", shape, dtype, residual=True)
        check_quantized("layer_norm", operands, quantization_of(pair, E5M2, power_of_two), "native")


def test_passes_over_memory(native_kernels, rng):
    """One kernel writes rows in 1×128 blocks; other copies need a second one."""
    operands = draw_operands(rng, "rms_norm", (256, 256), residual=True)

    def kernels(pair, copies):
        call = functools.partial(run, "rms_norm", quantization=quantization_of(pair), copies=copies)
        return re.findall(r"custom_call @(te_\w+)", jax.jit(call).lower(*operands).as_text())

    assert kernels("1x128", "data") == ["te_norm"]
    assert kernels("1x128", "both") == ["te_norm", "te_norm_blocks"]
    assert kernels("1x128", "transposed") == ["te_norm", "te_norm_blocks"]
    assert kernels("square and 1x128", "both") == ["te_norm", "te_norm_blocks"]
    assert kernels("tensor", "both") == ["te_norm", "te_norm_tensor"]
    # No recipe normalizes into these: XLA does, and they are quantized by themselves.
    assert kernels("1x128 and square", "both") == kernels("128x128", "data") == ["te_quantize_blocks"]


@pytest.mark.parametrize("value", [np.nan, 1e21], ids=["nan", "its square overflows"])
@pytest.mark.parametrize(("norm", "pair"), [("rms_norm", "tensor"), ("rms_norm", "1x128"), ("layer_norm", "1x128")])
def test_values_that_are_not_finite_in_fp8(norm, pair, value, implementation, rng):
    x, scale, bias, residual = draw_operands(rng, norm, (4, 256), "float32", residual=True)
    x = np.array(x)
    x[2, 5] = value
    call = functools.partial(run, norm, quantization=quantization_of(pair), implementation=implementation)
    found = jax.jit(lambda *operands: call(*operands)[0].dequantize())(x, scale, bias, residual)
    finite = np.isfinite(np.asarray(found)).all(axis=1)
    np.testing.assert_array_equal(finite, [pair == "1x128"] * 2 + [False] + [pair == "1x128"])


# ------------------------------------------------------------------------------------------------------------ sharded


# ------------------------------------------------------------------------------------------------------------- errors

X, ONES = jnp.zeros((4, 8), jnp.float32), jnp.ones(8)
TENSOR = quantization_of("tensor")


@pytest.mark.parametrize(
    ("operands", "options", "message"),
    [
        ((X.astype(jnp.int32), ONES), {}, "x has dtype int32; it must be float32, bfloat16 or float16: cast it"),
        ((X, ONES.astype(jnp.int8)), {}, "scale has dtype int8; it must be float32, bfloat16 or float16"),
        ((X, ONES, ONES[:3]), {}, "bias has shape (3,); for x of shape (4, 8) it must be (8,)"),
        ((X, X), {}, "scale has shape (4, 8); for x of shape (4, 8) it must be (8,)"),
        ((jnp.float32(1), ONES), {}, "x has shape (); it needs a last dimension, the features"),
        ((X[:, :0], ONES[:0]), {}, "x has shape (4, 0); it needs a last dimension, the features, of 1 or more"),
        ((X, ONES), {"residual": X[:2]}, "residual has shape (2, 8) and dtype float32, but x has shape (4, 8)"),
        ((X, ONES), {"residual": X.astype(jnp.bfloat16)}, "residual has shape (4, 8) and dtype bfloat16, but x has"),
        ((X, ONES), {"epsilon": -1.0}, "epsilon is -1.0; it must be a finite number of at least 0"),
        ((X, ONES), {"epsilon": np.nan}, "epsilon is nan; it must be a finite number of at least 0"),
        ((X, ONES), {"zero_centered": 1}, "zero_centered is 1; it must be True or False"),
        ((X, ONES), {"copies": "data"}, "copies is 'data', but there is no quantization"),
        ((X, ONES), {"quantization": "tensor"}, "quantization is 'tensor'; it must be a Quantization"),
        ((X, ONES), {"quantization": TENSOR, "copies": "rows"}, "copies is 'rows'; it must be one of"),
        ((X[0], ONES), {"quantization": TENSOR}, "x has shape (8,); it needs at least two dimensions"),
        ((X, ONES), {"implementation": "fast"}, "implementation is 'fast'"),
    ],
)
def test_message_names_argument_value_and_rule(operands, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ops.layer_norm(*operands, **options)


def test_scales_have_no_derivative(native_kernels):
    def scale(x):
        return ops.rms_norm(x, ONES, quantization=TENSOR, implementation="native").scale_inv.sum()

    with pytest.raises(NotImplementedError, match=r"te_jax.ops.rms_norm with quantization has no derivative through"):
        jax.eval_shape(jax.grad(scale), X)


NORM = {"epsilon": 1e-6, "centered": True, "row_ndim": 1, "batch_ndim": 0}
NONE, ROW = jnp.zeros(0), jnp.ones(4)


@pytest.mark.parametrize(
    ("changed", "results", "message"),
    [
        ({"epsilon": np.nan}, {}, "x is F32[4,8]; it must come with a finite epsilon of at least 0"),
        ({"epsilon": -1.0}, {}, "x is F32[4,8]; it must come with a finite epsilon of at least 0"),
        ({"row_ndim": 3}, {}, "x is F32[4,8]; it must have batch_ndim (0) and row_ndim (3) dimensions"),
        ({"centered": False}, {}, "mean is F32[4]; it must have no elements unless centered"),
        ({}, {0: (4, 7)}, "dx is F32[4,7]; it must have 32 elements"),
        ({}, {1: (0, 8)}, "dgamma_partial is F32[0,8]; it must have one partial sum at least"),
        ({}, {1: (8,)}, "dgamma_partial is F32[8]; it must have one partial sum at least"),
        ({}, {2: (3, 8)}, "dbeta_partial is F32[3,8]; it must have 16 elements"),
    ],
)
def test_handlers_refuse(changed, results, message, native_kernels):
    shapes = [results.get(i, shape) for i, shape in enumerate([(4, 8), (2, 8), (2, 8)])]
    types = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    operands = X, X, NONE, ONES, ROW, ROW
    with pytest.raises(Exception, match=re.escape(f"te_norm_gradient: {message}")):
        jax.block_until_ready(native.call_in_order("te_norm_gradient", types, *operands, **(NORM | changed)))


def test_unwanted_partial_sums_are_zero(native_kernels):
    """Where there are fewer rows than sums; no result is left as it was in memory."""
    types = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((4, 8), (9, 8), (9, 8))]
    for rows in (0, 4):
        x, row = jnp.ones((rows, 8)), jnp.ones(rows)
        types[0] = jax.ShapeDtypeStruct((rows, 8), np.float32)
        _, dgamma, dbeta = native.call_in_order("te_norm_gradient", types, x, x, NONE, ONES, row * 0, row, **NORM)
        np.testing.assert_array_equal(np.sum(dgamma, axis=0), np.full(8, rows))
        np.testing.assert_array_equal(np.sum(dbeta, axis=0), np.full(8, rows))
