"""What only a GPU shows of norms: rows of every length and alignment, which few threads share or many; CUDA graphs."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.activation_oracle import assert_quantized_from
from ops.norm_oracle import assert_rounded, oracle
from ops.quantize_oracle import E5M2, assert_bits, quantization_of

from te_jax import ops

pytestmark = pytest.mark.gpu

SHAPES = ((256, 384), (100, 48), (33, 17), (1, 130), (130, 4096), (64, 8192), (8, 14336), (5, 20000))
PAIRS = ("tensor", "1x128", "1x128 and square", "square and 1x128")
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])


@pytest.fixture(autouse=True)
def _poisoned_memory(request):
    """Results are written into memory that holds NaN, so that what a kernel leaves out is found."""
    if request.node.get_closest_marker("gpu") and jax.default_backend() == "gpu":
        jax.block_until_ready(jnp.full(2**28, jnp.nan)).delete()


def draw(rng, shape, dtype, count):
    return [jnp.asarray((2 * rng.standard_normal(shape) + 0.25).astype(np.float32)).astype(dtype) for _ in range(count)]


def draw_operands(rng, shape, dtype):
    """x, scale, bias and residual."""
    x, residual = draw(rng, shape, dtype, 2)
    return x, *draw(rng, shape[-1:], "float32", 2), residual


def run(x, scale, bias, residual, *, centered, **options):
    if centered:
        return ops.layer_norm(x, scale, bias, residual=residual, **options)
    return ops.rms_norm(x, scale, residual=residual, **options)


def jitted(operands, **options):
    return jax.jit(functools.partial(run, **options))(*operands)


@each_dtype
@each_shape
def test_quantized_results(shape, dtype, rng):
    for pair in PAIRS:
        for centered in (False, True):
            for with_residual in (False, True):
                x, scale, bias, residual = draw_operands(rng, shape, dtype)
                operands = x, scale, bias, residual if with_residual else None
                plain = jitted(operands, centered=centered, implementation="reference")
                quantization = quantization_of(pair, E5M2 if centered else quantization_of(pair).dtype, with_residual)
                found = jitted(operands, centered=centered, implementation="native", quantization=quantization)
                if with_residual:
                    (plain, total), (found, found_total) = plain, found
                    assert_bits(found_total, total)
                assert_quantized_from(dataclasses.replace(found, straight_through=None), plain, quantization)


@pytest.mark.parametrize(
    ("pair", "copies"),
    [
        *itertools.product(("tensor", "1x128"), ("data", "transposed")),
        # For the other pairs XLA normalizes one copy or both, and rounds differently.
        ("1x128 and square", "transposed"),
        ("square and 1x128", "transposed"),
    ],
)
def test_one_copy(pair, copies, rng):
    operands = draw_operands(rng, (130, 4096), "bfloat16")
    options = {"centered": True, "quantization": quantization_of(pair), "implementation": "native"}
    (one, _), (both, _) = jitted(operands, copies=copies, **options), jitted(operands, **options)
    for name in (copies, {"data": "scale_inv", "transposed": "transposed_scale_inv"}[copies]):
        assert_bits(getattr(one, name), getattr(both, name))


@each_dtype
@each_shape
def test_gradients(shape, dtype, rng):
    for centered in (False, True):
        for with_residual in (False, True):
            x, scale, bias, residual = draw_operands(rng, shape, dtype)
            dy, dtotal = draw(rng, shape, dtype, 2)
            residual, dtotal = (residual, dtotal) if with_residual else (None, None)
            expected = oracle(x, scale, bias if centered else None, residual, dy, dtotal, centered=centered)

            def gradients(x, scale, bias, residual, dy, dtotal, centered=centered):
                call = functools.partial(run, centered=centered, implementation="native")
                _, gradient = jax.vjp(call, x, scale, bias, residual)
                return gradient(dy if dtotal is None else (dy, dtotal))

            dx, dscale, dbias, dresidual = jax.jit(gradients)(x, scale, bias, residual, dy, dtotal)
            assert_rounded(dx, expected.dx, dtype, size=expected.size)
            size = np.abs(np.asarray(dy).astype(np.float64)).sum(axis=0).max()
            assert_rounded(dscale, expected.dscale, "float32", size=4 * size)
            if centered:
                assert_rounded(dbias, expected.dbias, "float32", size=size)
            if with_residual:
                assert_bits(dresidual, dx)


def test_more_rows_than_partial_sums(rng):
    for rows in (263, 264, 265, 3000):
        x, scale, bias, _ = draw_operands(rng, (rows, 200), "float32")
        (dy,) = draw(rng, x.shape, "float32", 1)
        expected = oracle(x, scale, bias, None, dy, centered=True)
        _, gradient = jax.vjp(functools.partial(ops.layer_norm, implementation="native"), x, scale, bias)
        _, dscale, dbias = gradient(dy)
        size = np.abs(np.asarray(dy)).sum(axis=0).max()
        assert_rounded(dscale, expected.dscale, "float32", size=4 * size)
        assert_rounded(dbias, expected.dbias, "float32", size=size)


@pytest.mark.parametrize("pair", ["tensor", "1x128"])
def test_examples_of_a_vmap(pair, rng):
    """Each has scales and gradients of its own; examples start at every alignment."""
    x, residual, dy = draw(rng, (3, 33, 130), "bfloat16", 3)
    (scale,) = draw(rng, (3, 130), "float32", 1)

    def step(x, scale, residual, dy):
        quantized = ops.rms_norm(
            x, scale, residual=residual, quantization=quantization_of(pair), implementation="native"
        )
        call = lambda *a: ops.rms_norm(a[0], a[1], residual=a[2], implementation="native")  # noqa: E731
        results, gradient = jax.vjp(call, x, scale, residual)
        return quantized, results, gradient((dy, dy))

    found = jax.jit(jax.vmap(step))(x, scale, residual, dy)
    for i in range(3):
        alone = jax.jit(step)(x[i], scale[i], residual[i], dy[i])
        jax.tree.map(lambda whole, part, i=i: assert_bits(whole[i], part), found[0], alone[0])
        jax.tree.map(
            lambda whole, part, i=i: np.testing.assert_allclose(
                np.asarray(whole[i], np.float32), np.asarray(part, np.float32), rtol=1e-2, atol=1e-3
            ),
            found[1:],
            alone[1:],
        )


@pytest.mark.parametrize("cols", [1000, 1001], ids=["rows in registers", "long rows"])
@pytest.mark.parametrize("pair", ["tensor", "1x128"])
def test_values_that_are_not_finite(pair, cols, rng):
    x, scale, _, residual = draw_operands(rng, (40, cols), "bfloat16")
    x = x.at[7, 5].set(jnp.nan).at[8, 900].set(1e25)  # whose square overflows
    residual = residual.at[9, 999].set(jnp.inf)
    found, _ = jitted(
        (x, scale, None, residual), centered=False, quantization=quantization_of(pair), implementation="native"
    )
    finite = np.isfinite(np.asarray(found).astype(np.float32)).all(axis=1)
    wrong = np.flatnonzero(~finite).tolist()
    assert wrong == ([7, 8, 9] if pair == "1x128" else list(range(40)))


def test_the_same_bits_in_every_run(rng):
    """Sums have a fixed order, in a program that runs as a CUDA graph from its second or third run on."""
    x, scale, bias, residual = draw_operands(rng, (1000, 4096), "bfloat16")
    dy, dtotal = draw(rng, x.shape, "bfloat16", 2)

    @jax.jit
    def step(*operands):
        quantized = run(
            *operands, centered=True, quantization=quantization_of("1x128"), implementation="native"
        )  # fmt: skip
        _, gradient = jax.vjp(functools.partial(run, centered=True, implementation="native"), *operands)
        return quantized, gradient((dy, dtotal))

    first, *others = [step(x, scale, bias, residual) for _ in range(5)]
    for other in others:
        jax.tree.map(assert_bits, other, first)
