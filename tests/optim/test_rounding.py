"""Rounding at random: one of two neighbours, right on average, with bits that follow from the place alone.

With b1 = 0 the first moment is the gradient as it was rounded, which shows the rounding of every dtype from outside.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optim_cases import FLOAT8, NAN_OF_GPUS, assert_same, moments, normal_like
from parameters import in_turns

from te_jax import optim
from te_jax.hlo import buffers
from te_jax.testing import assert_close

NARROW = {"bfloat16": jnp.bfloat16, "float16": jnp.float16, "float8": FLOAT8}
narrow = pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
# The distance of the smallest numbers of a block by its largest one, or less.
SMALLEST = {jnp.bfloat16: 0.0, jnp.float16: 2.0**-35, FLOAT8: 2.0**-15}
COPIES = 2048


def narrow_adam(dtype, **options):
    return optim.scale_by_adam(mu_dtype=dtype, nu_dtype=dtype, **options)


@functools.partial(jax.jit, static_argnames=("dtype", "stochastic_rounding"))
def moment(x, seed, **options):
    transform = optim.scale_by_adam(b1=0.0, mu_dtype=options.pop("dtype"), seed=seed, **options)
    return moments(transform.update(x, transform.init(x))[1], x)[0]


def rounded(x, dtype, seed=0, stochastic_rounding=True):
    """float32 x as a moment keeps it, in float32."""
    options = {"dtype": dtype, "stochastic_rounding": stochastic_rounding}
    return np.asarray(moment(np.asarray(x, np.float32), np.uint32(seed), **options), np.float64)


def seed_of(rng):
    return int(rng.integers(2**31))


def distance(x, dtype):
    """Between the neighbours of each number of a block; or twice that, just above a power of two."""
    return np.maximum(float(jnp.finfo(dtype).eps) * np.abs(x), SMALLEST[dtype] * np.abs(x).max())


@narrow
def test_right_on_average_and_never_further_than_a_neighbour(dtype, rng):
    """Over magnitudes down to where FP8 runs out of digits, and signs."""
    x = (rng.standard_normal(128) * 10.0 ** rng.uniform(-4, 0, 128)).astype(np.float32).astype(np.float64)
    order = rng.permuted(np.tile(np.arange(128), (COPIES, 1)), axis=1)
    values = np.empty((COPIES, 128))
    np.put_along_axis(values, order, rounded(x[order], dtype, seed=seed_of(rng)), axis=1)
    low, high = values.min(axis=0), values.max(axis=0)
    assert ((values == low) | (values == high)).all()
    assert (high - low <= distance(x, dtype)).all()
    assert (np.abs(values - x) <= distance(x, dtype)).all()
    inexact = low < high
    assert inexact.mean() > 0.9
    assert ((low <= x) & (x <= high))[inexact].all()
    low, high, x, values = low[inexact], high[inexact], x[inexact], values[:, inexact]
    chance = (x - low) / (high - low)
    error = np.abs((values == high).mean(axis=0) - chance)
    # Six standard deviations, and a bit for chances that 16 random bits, or 24 of a sum, cannot tell apart.
    assert (error < 6 * np.sqrt(chance * (1 - chance) / COPIES) + 2.0**-12).all()


def test_derivatives_come_through_moments_in_bfloat16(rng):
    """Gradients of two steps are as if nothing were rounded, which on average nothing is."""

    def moment(gradients, dtype):
        adam = optim.scale_by_adam(mu_dtype=dtype, nu_dtype=dtype, seed=seed)
        state = adam.init(gradients)
        for _ in range(2):
            _, state = adam.update(gradients, state)
        return jnp.sum(state.mu.astype(jnp.float32))

    gradients, seed = jax.device_put(np.asarray(rng.standard_normal(128), jnp.float32)), seed_of(rng)
    derivative, expected = (
        jax.jit(jax.grad(moment), static_argnums=1)(gradients, dtype) for dtype in (jnp.bfloat16, jnp.float32)
    )
    assert_close(derivative, expected, tolerance=1e-2)


@narrow
def test_numbers_of_the_dtype_stay(dtype, rng):
    digits = jnp.finfo(dtype).nmant
    x = (1 + rng.integers(0, 2**digits, 128) / 2**digits) * 2.0 ** rng.integers(-5, 0, 128) * rng.choice([-1, 1], 128)
    x[:2] = 0.0, -0.0
    values = rounded(np.tile(x, (64, 1)), dtype, seed=seed_of(rng))
    np.testing.assert_array_equal(values, np.tile(x, (64, 1)))


@narrow
def test_to_nearest(dtype, rng):
    """Without random bits there is one neighbour for all copies, and it is no further than the other."""
    x = (rng.standard_normal(128) * 10.0 ** rng.uniform(-4, 0, 128)).astype(np.float32).astype(np.float64)
    values = rounded(np.tile(x, (8, 1)), dtype, stochastic_rounding=False)
    assert (values == values[0]).all()
    assert (np.abs(values[0] - x) <= distance(x, dtype) / 2).all()
    assert (values[0] != x).mean() > 0.9


@pytest.mark.parametrize(("value", "dtype"), in_turns([-np.inf, np.nan, NAN_OF_GPUS, NAN_OF_GPUS], NARROW))
def test_values_that_are_not_finite_do_not_become_finite(dtype, value, rng):
    x = rng.standard_normal((64, 128))
    x[3, 5] = value
    finite = np.isfinite(rounded(x, dtype, seed=seed_of(rng)))
    assert not finite[3, 5]
    if dtype == jnp.bfloat16:
        assert finite.sum() == finite.size - 1
    else:  # the scale of a block is then NaN
        assert np.delete(finite, 3, axis=0).all()


@pytest.mark.parametrize("dtype", [jnp.float16, FLOAT8], ids=["float16", "float8"])
def test_scales_change_no_digit(dtype, rng):
    """They are powers of two: a block and its multiple are rounded alike."""
    x, seed = rng.standard_normal((16, 384)).astype(np.float32), seed_of(rng)
    for scale in (2.0**-90, 2.0**60):
        np.testing.assert_array_equal(
            rounded(x * np.float32(scale), dtype, seed=seed), rounded(x, dtype, seed=seed) * scale
        )


# ---------------------------------------------------------------------------------------------------------- random bits


def run(transform, gradients, state, params=None):
    update = jax.jit(transform.update)
    for g in gradients:
        _, state = update(g, state, params)
    return state


def test_the_same_bits_again_and_after_a_restart(rng):
    params = {"a": jnp.zeros((5, 200)), "b": jnp.zeros(130)}
    gradients, seed = [normal_like(rng, params) for _ in range(4)], seed_of(rng)
    transform = narrow_adam(FLOAT8, seed=seed)
    expected = run(transform, gradients, transform.init(params))
    saved = jax.tree.map(np.asarray, run(transform, gradients[:2], transform.init(params)))
    restarted = narrow_adam(FLOAT8, seed=jnp.uint32(seed))
    assert_same(run(restarted, gradients[2:], jax.tree.map(jnp.asarray, saved)), expected)


@pytest.mark.parametrize("options", [{"seed": 7}, {"stochastic_rounding": False}], ids=["seed", "nearest"])
def test_adam_and_adamw_round_as_they_are_told(options, rng):
    params, gradient = (normal_like(rng, jnp.zeros((5, 200))) for _ in range(2))
    makes = (optim.adam, 0.1), (optim.adamw, 0.1), (optim.scale_by_adam,)
    transforms = [make(*rate, mu_dtype="bfloat16", **options) for make, *rate in makes]
    (adam, *_), (adamw, *_), expected = (run(t, [gradient], t.init(params), params) for t in transforms)
    for state in (adam, adamw):
        assert_same(state.mu, expected.mu)


@jax.jit
def ups(seed, count, x):
    """Where a value half-way between two neighbours was rounded up, at a step, in each of three leaves."""
    transform, params = optim.scale_by_adam(b1=0.0, mu_dtype="bfloat16", seed=seed), [x] * 3
    _, state = transform.update(params, transform.init(params)._replace(count=count))
    return [mu > x[0, 0].astype(mu.dtype) for mu in state.mu]


def test_other_bits_for_every_seed_step_leaf_and_place(rng):
    x = np.full((128, 256), 1 + 2.0**-8, np.float32)
    places = [(7, 0), (8, 0), (7 + 2**16, 0), (7, 1), (7, 2), (7, 1000)]
    leaves = [ups(np.uint32(seed), np.int32(count), x) for seed, count in places]
    patterns = [np.asarray(pattern) for pattern in (*leaves[0], *(each[0] for each in leaves[1:]))]
    patterns += [np.roll(patterns[0], 1, axis=axis) for axis in (0, 1)]
    deviation = 0.5 / np.sqrt(x.size)
    for i, one in enumerate(patterns):
        assert abs(one.mean() - 0.5) < 6 * deviation
        for other in patterns[:i]:
            assert abs((one == other).mean() - 0.5) < 6 * deviation


def test_bits_are_worked_out_and_not_stored():
    """No generator of random numbers, which would also tie bits to the sharding, and no table."""
    x = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
    transform = narrow_adam(FLOAT8)
    compiled = jax.jit(transform.update).lower(x, jax.eval_shape(transform.init, x)).compile()
    text = compiled.as_text()
    assert "rng" not in text
    assert "threefry" not in text
    assert all(constant.elements < 1024 for constant in buffers(compiled, "constant"))
