"""FP8 copies, scales, largest magnitudes and dbias, bit for bit against NumPy, over shapes, dtypes and scalings."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from parameters import in_turns
from quantize_oracle import (
    E4M3,
    E5M2,
    LARGEST,
    PAIRS,
    assert_bits,
    assert_quantized,
    check,
    oracle,
    quantization_of,
    quantize,
    random_case,
)

from te_jax import ops, recipe
from te_jax.testing import relative_error

DTYPES = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize(
    ("pair", "dtype", "dtype_fp8", "power_of_two_scales"),
    in_turns(list(PAIRS), DTYPES, [E4M3, E5M2], [False, False, True]),
)
def test_copies(pair, dtype_fp8, dtype, power_of_two_scales, implementation, rng):
    x = random_case(rng, (2, 128, 272), dtype)  # whole tiles, and parts of tiles that are a multiple of 16 wide
    check(x, quantization_of(pair, dtype_fp8, power_of_two_scales), implementation=implementation)


def test_formats_by_any_name(rng):
    names = {"float8_e5m2": E5M2, E4M3.type: E4M3, jnp.float8_e5m2: E5M2}
    for rows, (name, dtype) in enumerate(names.items(), start=41):  # equal keys of jax.jit would share a program
        x = random_case(rng, (rows, 48), "float32")
        assert_bits(quantize(x, quantization_of("row", name)).data, oracle(x, quantization_of("row", dtype)).data)


@pytest.mark.parametrize("amax", [0.0, 1e-30, 3.0, 1e4, 1e38, np.inf, np.nan, 1e-40])
def test_scale_from_a_given_amax(amax, implementation, rng):
    """Delayed scaling: larger values saturate."""
    x = random_case(rng, (130, 144), "float32")
    quantized = check(x, quantization_of("tensor", E5M2), amax=amax, implementation=implementation)
    assert np.abs(np.asarray(quantized.data).astype(np.float32)).max() <= LARGEST[E5M2]


@pytest.mark.parametrize(
    ("pair", "copies"), in_turns(["tensor", "row", "1x128 and square", "1x128"], ["data", "transposed", "transposed"])
)
def test_one_copy(pair, copies, implementation, rng):
    x = random_case(rng, (144, 256), "bfloat16")
    check(x, quantization_of(pair), copies=copies, implementation=implementation)


# Around tiles of 128 and vectors of 16; no size that blocks of 128 divide.
sizes = st.sampled_from([1, 2, 7, 8, 15, 16, 17, 64, 127, 128, 129, 144, 256, 272]) | st.integers(1, 300)


@given(
    shape=st.tuples(sizes, sizes),
    dtype=st.sampled_from(DTYPES),
    dtype_fp8=st.sampled_from([E4M3, E5M2]),
    pair=st.sampled_from(sorted(PAIRS)),
    power_of_two_scales=st.booleans(),
    copies=st.sampled_from(["both", "data", "transposed"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_matrix(shape, dtype, dtype_fp8, pair, power_of_two_scales, copies, seed, native_kernels):
    x = random_case(np.random.default_rng(seed), shape, dtype)
    check(x, quantization_of(pair, dtype_fp8, power_of_two_scales), copies=copies, implementation="native")


@pytest.mark.parametrize(
    ("shape", "row_ndim", "pair", "dtype"),
    [
        ((2, 3, 2, 5), 2, "row", "float32"),
        ((130, 1), 1, "row", "float32"),
        ((1, 7, 1, 3), 3, "tensor", "float32"),
        ((70, 2, 128), 1, "1x128", "bfloat16"),
        ((2, 128, 3, 256), 2, "1x128", "bfloat16"),
        ((2, 128, 60), 2, "128x128", "bfloat16"),
        ((60, 2, 128), 1, "1x128 and square", "bfloat16"),
    ],
)
def test_groups_of_dimensions(pair, shape, row_ndim, dtype, implementation, rng):
    check(random_case(rng, shape, dtype), quantization_of(pair), row_ndim=row_ndim, implementation=implementation)


def test_blocks_need_whole_groups_only_where_they_lie(implementation, rng):
    x = random_case(rng, (3, 5, 200), "bfloat16")  # rows of 3 × 5 without blocks in them
    check(x, quantization_of("1x128"), copies="data", implementation=implementation)


@pytest.mark.parametrize(
    ("shape", "pair", "implementation"),
    [
        *in_turns([(0, 5), (2, 0, 128), (0, 0)], ["tensor", "1x128", "128x128"], ["native"]),
        *in_turns([(5, 0)], ["row"], ["reference"]),
    ],
)
@pytest.mark.usefixtures("native_kernels")
def test_empty(pair, shape, implementation):
    quantized, amax, dbias = quantize(
        jnp.zeros(shape, jnp.bfloat16), quantization_of(pair), with_amax=True, with_dbias=True,
        implementation=implementation,
    )  # fmt: skip
    assert quantized.shape == shape
    assert quantized.transposed.shape == (shape[-1], *shape[:-1])
    assert (np.asarray(quantized.scale_inv) == 1.0).all()
    assert amax == 0.0
    assert (np.asarray(dbias) == np.zeros(shape[-1])).all()


# ------------------------------------------------------------------------------------------------------- special values


@pytest.mark.parametrize(
    ("pair", "dtype", "dtype_fp8"),
    in_turns(["tensor", "row", "1x128", "128x128"], ["float32", "float16"], [E4M3, E5M2]),
)
def test_values_that_are_not_finite(pair, dtype_fp8, dtype, implementation, rng):
    """In one tile each: NaN, infinities, both. The fourth is untouched, and with blocks its scale is its own.

    What shares a scale with one of them reads as NaN, rather than as what it saturated to.
    """
    x = np.array(random_case(rng, (256, 256), dtype, edges=0.0))
    x[3, 5], x[77, 5] = np.nan, -np.nan
    x[40, 200], x[41, 201] = np.inf, -np.inf
    x[130:250, 17] = np.inf
    x[200, 100] = np.nan
    expected = oracle(x, quantization_of(pair, dtype_fp8))
    quantized = check(jnp.asarray(x), quantization_of(pair, dtype_fp8), implementation=implementation)
    codes = np.asarray(quantized.data).view(np.uint8)
    assert codes[3, 5] == codes[77, 5] == 0x7F
    assert (codes[40, 200], codes[41, 201]) == ((0x7F, 0x7F) if dtype_fp8 == E4M3 else (0x7C, 0xFC))
    assert np.isnan(np.asarray(expected.amax))
    special = ~np.isfinite(x)
    shared = {
        "tensor": special.any(keepdims=True),
        "row": special.any(axis=1, keepdims=True),
        "1x128": special.reshape(256, 2, 128).any(axis=2).repeat(128, axis=1),
        "128x128": special.reshape(2, 128, 2, 128).any(axis=(1, 3)).repeat(128, axis=0).repeat(128, axis=1),
    }[pair]
    values = np.asarray(quantized.dequantize()).astype(np.float32)
    np.testing.assert_array_equal(np.isnan(values), np.broadcast_to(shared, x.shape))
    transposed = np.asarray(quantized.without_data().dequantize()).astype(np.float32)
    shared = {"row": special.any(axis=0), "1x128": special.reshape(2, 128, 256).any(axis=1).repeat(128, axis=0)}.get(
        pair, shared
    )
    np.testing.assert_array_equal(np.isnan(transposed), np.broadcast_to(shared, x.shape))


@pytest.mark.parametrize(("pair", "dtype_fp8"), [("tensor", E4M3), ("1x128", E5M2)])
def test_zeros_keep_their_sign(pair, dtype_fp8, implementation):
    x = np.zeros((130, 140), np.float32)
    x[::2, ::3] = -0.0
    quantized = check(jnp.asarray(x), quantization_of(pair, dtype_fp8), implementation=implementation)
    assert_bits(np.asarray(quantized.data).view(np.uint8), np.where(np.signbit(x), 0x80, 0).astype(np.uint8))
    assert (np.asarray(quantized.scale_inv) == 1.0).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pair", ["row", "1x128"])
def test_every_magnitude(pair, dtype, implementation, rng):
    """Rows of numbers around every power of two that float32 can hold, with subnormals between them."""
    x = np.ldexp(rng.uniform(1, 1.99, (277, 130)), np.arange(-149, 128)[:, None]).astype(np.float32)
    subnormal = np.array([1, 0x00400000, 0x007FFFFF, 0x80000001], np.uint32).view(np.float32)
    x = np.where(rng.random(x.shape) < 0.1, rng.choice(subnormal, x.shape), x * rng.choice([-1, 1], x.shape))
    x = jax.device_put(x.astype(np.float32).astype(dtype))
    quantized = check(x, quantization_of(pair), implementation=implementation)
    scale_inv = np.asarray(quantized.scale_inv)
    assert np.isfinite(scale_inv).all()
    assert (scale_inv >= 2.0**-126).all()


@pytest.mark.parametrize("exponent", [-149, -126, -119, 127])
def test_tensors_of_tiny_and_huge_numbers(exponent, implementation, rng):
    x = np.ldexp(rng.uniform(1, 1.999, (64, 130)) * rng.choice([-1, 1], (64, 130)), exponent)
    check(jax.device_put(x.astype(np.float32)), quantization_of("tensor"), implementation=implementation)


def test_scales_are_divided_exactly(implementation, rng):
    """A row for each of many magnitudes: the quotients are IEEE's."""
    x = rng.integers(0x00800000, 0x7F800000, (4096, 1), dtype=np.uint32).view(np.float32)
    check(jnp.asarray(x), quantization_of("row"), implementation=implementation)


def test_every_code_comes_back(implementation):
    call = functools.partial(quantize, implementation=implementation)
    for dtype in (E4M3, E5M2):
        values = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
        values = np.where(np.isnan(values), 0, values).reshape(16, 16)
        quantized = call(jnp.asarray(values), quantization_of("tensor", dtype), amax=jnp.float32(LARGEST[dtype]))
        assert_bits(quantized.dequantize(), values)


@pytest.mark.parametrize(("row_ndim", "copies"), [(1, "transposed"), (2, "data")])
def test_either_copy_gives_the_groups_of_dimensions_back(copies, row_ndim, implementation, rng):
    x = jax.device_put(np.asarray(rng.standard_normal((5, 3, 4, 16)[row_ndim - 1 :]), jnp.float32))

    def back(x):
        how = {"row_ndim": row_ndim, "copies": copies, "implementation": implementation}
        return ops.quantize(x, quantization_of("row"), **how).dequantize()

    for value in jax.jit(lambda x: (back(x), jax.vmap(back)(x[None])))(x):
        assert relative_error(np.asarray(value).reshape(x.shape), x) < 0.05


# ------------------------------------------------------------------------------------------------------ transformations


@pytest.mark.parametrize("amax", [None, 3.0])
def test_largest_magnitude_does_not_depend_on_what_its_memory_held(amax, native_kernels, rng):
    x = random_case(rng, (256, 384), "bfloat16")
    expected = oracle(x, quantization_of("tensor"), amax=amax)

    def run(x, poison):  # which the result takes the place of
        x = jnp.where(poison > 0, x, 0)
        given = None if amax is None else jnp.float32(amax)
        return ops.quantize(x, quantization_of("tensor"), amax=given, with_amax=True, implementation="native")

    run = jax.jit(run, donate_argnums=1)
    for poison in (1e30, np.nan, 1e-30):
        quantized, own_amax = run(x, jnp.float32(poison))
        if poison > 0:
            assert_bits(own_amax, expected.amax)
            assert_quantized(quantized, expected)
        else:
            assert own_amax == 0


@pytest.mark.parametrize("pair", ["tensor", "row", "1x128 and square"])
def test_a_program_that_returns_the_results_copies_none(pair, native_kernels, rng):
    """XLA would, where two of them were one array."""
    x = random_case(rng, (128, 256), "bfloat16")
    quantization = quantization_of(pair)
    run = jax.jit(lambda x: ops.quantize(x, quantization, with_amax=True, implementation="native"))
    text = run.lower(x).compile().as_text()
    assert "custom-call" in text
    assert not re.findall(r"= \S+ copy\(.*", text)


def test_it_has_no_gradient(implementation, rng):
    """It would be zero, silently. What only passes by is as it is without."""

    def dequantized(x):
        return ops.quantize(x, quantization_of("tensor"), implementation=implementation).dequantize()

    def straight_through(x):
        return jnp.sum((x + jax.lax.stop_gradient(dequantized(x) - x)) ** 2)

    x = np.asarray(random_case(rng, (16, 32), "float32", edges=0.0))
    for wrap in (lambda f: f, jax.jit):
        with pytest.raises(NotImplementedError, match=r"quantize has no derivative.*te_jax.ops.dense.*stop_gradient"):
            jax.eval_shape(wrap(jax.grad(lambda x: jnp.sum(dequantized(x)))), x)
    gradient, value = jax.jit(lambda x: (jax.grad(straight_through)(x), dequantized(x)))(x)
    np.testing.assert_allclose(gradient, 2 * np.asarray(value), rtol=1e-5, atol=1e-6)
    gradient, _ = jax.jit(jax.grad(lambda x: (jnp.sum(x), dequantized(x)), has_aux=True))(x)
    assert_bits(gradient, np.ones((16, 32), np.float32))


def test_straight_through_alone_has_the_gradient(implementation, rng):
    """The values are those without. Any part of a gradient that comes through FP8 values or scales is an error."""
    x = jnp.asarray(random_case(rng, (16, 32), "bfloat16", edges=0.2))
    factor = jax.device_put(np.asarray(rng.standard_normal((16, 32)), jnp.bfloat16))

    def quantized(x, straight_through=True):
        options = {"implementation": implementation, "straight_through": straight_through, "with_amax": True}
        return ops.quantize(x, quantization_of("tensor"), **options)

    (q, amax), without = jax.jit(lambda x: (quantized(x), quantized(x, straight_through=False)))(x)
    assert_bits(q.straight_through, np.zeros((16, 32), x.dtype))
    jax.tree.map(assert_bits, (dataclasses.replace(q, straight_through=None), amax), without)

    def through(x):
        return jnp.sum(quantized(x)[0].straight_through * factor)

    def leaking(part):
        def loss(x):
            q, amax = quantized(x)
            leak = amax if part == "amax" else jnp.sum(getattr(q, part).astype(jnp.float32))
            return through(x).astype(jnp.float32) + leak

        return loss

    wraps = (lambda f: f, jax.jit, jax.checkpoint)
    for i, part in enumerate(("data", "scale_inv", "transposed", "transposed_scale_inv", "amax")):
        with pytest.raises(NotImplementedError, match=r"quantize has no derivative.*te_jax.ops.dense"):
            jax.eval_shape(jax.grad(wraps[i % 3](leaking(part))), x)
    with pytest.raises(NotImplementedError, match=r"quantize has no derivative"):
        jax.jit(lambda x: jax.jvp(through, (x,), (x,))).lower(x)
    twice = np.asarray([1, 3], jnp.bfloat16)

    def shared(x):
        return jnp.sum(jax.vmap(lambda scale: scale * through(x))(twice))

    def examples(x):
        return jnp.sum(jax.vmap(lambda s, x: s * through(x), in_axes=(0, None))(twice, x))

    alone, each, *both = jax.jit(
        lambda x: (
            jax.grad(jax.checkpoint(through))(x), jax.vmap(jax.grad(through))(jnp.stack([x, 2 * x])),
            jax.grad(shared)(x), jax.grad(examples)(x),
        )
    )(x)  # fmt: skip
    assert_bits(alone, factor)
    assert_bits(each, np.stack([factor, factor]))
    for found in both:
        assert_bits(found, 4 * factor)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (None, {}, "x is None; it must be an array"),
        (ops.quantize(jnp.ones((4, 8)), quantization_of("tensor")), {}, "x is a QuantizedArray; it must be a plain"),
        (jnp.ones((4, 8)), {"amax": "largest"}, "amax is of type str; it must be an array"),
        (jnp.ones((4, 8)), {"amax_axis": 3}, "amax_axis is 3; it must be the name of a mesh axis, a tuple of several"),
        (jnp.ones((4, 8)), {"amax_axis": {"cols": (3,)}}, "amax_axis is (3,); it must be the name of a mesh axis"),
        (jnp.ones((4, 8)), {"with_amax": "no"}, "with_amax is 'no'; it must be True or False"),
    ],
)  # fmt: skip
def test_what_is_no_array_axis_or_flag_is_named(x, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ops.quantize(x, quantization_of("tensor"), **options)


@pytest.mark.parametrize("scaling", ["tensor", "1x128"])
def test_an_axis_that_is_not_mapped_is_named(scaling, implementation):
    with pytest.raises(
        ValueError, match=r"amax_axis is \('data',\), but no axis 'data' is mapped here; call it inside"
    ):
        ops.quantize(jnp.ones((4, 8)), quantization_of(scaling), amax_axis="data", implementation=implementation)


def test_a_program_holds_the_arithmetic_of_scales_once():
    """However many tensors it quantizes: rounding a quotient correctly takes some forty operations."""

    def negations(tensors):
        how = recipe.CurrentScaling().quantization("activation")

        def quantized(arrays):
            return [ops.quantize(x, how, implementation="reference") for x in arrays]

        return jax.jit(quantized).lower([jnp.zeros((16, 32))] * tensors).as_text().count("stablehlo.negate")

    assert negations(1) == negations(4) > 0
