"""Adam: optax's own in float32, and close to it with moments in fewer bits, for gradients of every magnitude."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from optim_cases import FLOAT8, MOMENT_DTYPES, adam_oracle, adam_state, moments, normal_like, random_params
from parameters import in_turns

from te_jax import optim
from te_jax.testing import assert_close, relative_error

NARROW = {name: dtype for name, dtype in MOMENT_DTYPES.items() if name != "float32"}
narrow = pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)


@functools.partial(jax.jit, static_argnums=0)
def after(transform, gradients, params):
    """The updates of all steps and the last state; gradients have steps in front."""

    def step(state, g):
        return transform.update(g, state, params)[::-1]

    return lax.scan(step, transform.init(params), gradients)[::-1]


# ------------------------------------------------------------------------------------------------------- as optax's own


def kernels_only(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


PAIRS = {
    "adamw": (optim.adamw, optax.adamw, {"b1": 0.8, "eps_root": 0.01, "weight_decay": 0.1, "mask": kernels_only}),
    "nadam": (functools.partial(optim.adam, nesterov=True), optax.nadam, {"b2": 0.99, "eps": 1e-6}),
}


def assert_ulps(actual, expected, count=2):
    """Ten times as many for a single value, of 0.1 at least, for its terms may cancel: of those XLA fuses products and
    sums, as it likes in every program."""
    for (path, a), e in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        a, e = np.asarray(a), np.asarray(e)
        most, size = (count, np.abs(e)) if e.size > 1 else (10 * count, np.maximum(np.abs(e), 0.1))
        assert a.dtype == e.dtype == np.float32
        assert (np.abs(a - e) <= most * np.spacing(size.astype(np.float32))).all(), jax.tree_util.keystr(path)


@pytest.mark.parametrize(("ours", "theirs", "options"), PAIRS.values(), ids=PAIRS)
def test_float32_is_optax(ours, theirs, options, standard_promotion, rng):
    params = random_params(rng)
    gradients = normal_like(rng, params, 100)

    @functools.partial(jax.jit, static_argnums=0)
    def train(optimizer, params, gradients):
        def step(carry, g):
            params, state = carry
            updates, state = optimizer.update(g, state, params)
            return (optax.apply_updates(params, updates), state), None

        return lax.scan(step, (params, optimizer.init(params)), gradients)[0]

    rate = optax.cosine_decay_schedule(0.01, 200)
    (actual, state), (expected, expected_state) = (
        train(make(rate, **options), params, gradients) for make in (ours, theirs)
    )
    assert_ulps(actual, expected)
    assert_ulps(state[0].mu, expected_state[0].mu)
    assert_ulps(state[0].nu, expected_state[0].nu)
    assert (state[0].mu_bounds, state[0].nu_bounds) == (None, None)
    assert state[0].count == expected_state[0].count == 100
    assert jnp.linalg.norm(actual["kernel"] - params["kernel"]) > 0.1


@pytest.mark.parametrize(("dtype", "stochastic_rounding"), [(FLOAT8, True)])
def test_float64_parameters_with_moments_in_few_bits(dtype, stochastic_rounding, standard_promotion, rng):
    with jax.enable_x64(True):
        params = random_params(rng, "float64")
        gradients = normal_like(rng, params, 3)
        transform = optim.scale_by_adam(mu_dtype=dtype, nu_dtype=dtype, stochastic_rounding=stochastic_rounding)
        with jax.numpy_dtype_promotion("strict"):
            updates, state = after(transform, gradients, params)
        expected, _ = after(optax.scale_by_adam(), gradients, params)
        assert jax.tree.leaves(jax.eval_shape(transform.init, params)) == jax.tree.leaves(jax.eval_shape(lambda: state))
        assert jax.tree.leaves(updates)[0].dtype == jnp.float64
        jax.tree.map(functools.partial(assert_close, tolerance=0.15), updates, expected)


@pytest.mark.parametrize(("dtype", "x64"), [("bfloat16", False), ("float64", True)])
def test_decays_that_are_arrays(dtype, x64, rng):
    b1, b2 = np.asarray([0.875, 0.9375], dtype)
    gradient = jax.device_put(np.asarray(rng.standard_normal((3, 40)), jnp.float32))
    with jax.enable_x64(x64):
        updates, state = after(optim.scale_by_adam(jnp.asarray(b1), b2), gradient, gradient[0])
        expected, expected_state = after(optim.scale_by_adam(0.875, 0.9375), gradient, gradient[0])
    assert_ulps((updates, state.mu, state.nu), (expected, expected_state.mu, expected_state.nu))


# -------------------------------------------------------------------------------------------------- moments in few bits


def rounding_error(dtype, decay, steps):
    """The error of a moment that was rounded at random after every step: half a digit each, decaying as the moment."""
    if dtype == jnp.float32:
        return 1e-5
    return float(jnp.finfo(dtype).eps) / 2 * np.sqrt(sum(decay ** (2 * k) for k in range(steps)))


@pytest.mark.parametrize(
    ("mu_dtype", "nu_dtype"), [*in_turns(NARROW, [FLOAT8, jnp.bfloat16, jnp.float16]), (None, "float32")]
)
def test_moments_are_close_to_float32(mu_dtype, nu_dtype, rng):
    x, steps = jnp.zeros((6, 300)), 20
    gradients = normal_like(rng, x, steps)
    updates, state = after(optim.scale_by_adam(mu_dtype=mu_dtype, nu_dtype=nu_dtype), gradients, x)
    mu, nu = moments(state, x)
    errors = []
    for kept, bounds, dtype, decay in (
        (state.mu, state.mu_bounds, mu_dtype or jnp.float32, 0.9),
        (state.nu, state.nu_bounds, nu_dtype or jnp.float32, 0.999),
    ):
        assert (kept.shape, kept.dtype) == (x.shape, dtype)
        if dtype in (jnp.float16, FLOAT8):
            assert (bounds.shape, bounds.dtype) == ((6, 3), jnp.float32)
        else:
            assert bounds is None
        errors.append(rounding_error(dtype, decay, steps))
    expected = adam_oracle(gradients)
    assert_close(mu, expected.mu, dtype="float32", tolerance=errors[0])
    assert_close(nu, expected.nu, dtype="float32", tolerance=errors[1])
    assert_close(updates[-1], expected.update, dtype="float32", tolerance=errors[0] + errors[1])


@narrow
def test_an_update_precedes_rounding(dtype, rng):
    """The first one is that of float32 moments; the second is not."""
    x = jnp.zeros((6, 300))
    gradients = normal_like(rng, x, 2)
    actual, _ = after(optim.scale_by_adam(mu_dtype=dtype, nu_dtype=dtype), gradients, x)
    expected, _ = after(optim.scale_by_adam(), gradients, x)
    assert_ulps(actual[0], expected[0], 4)
    assert relative_error(actual[1], expected[1]) > float(jnp.finfo(dtype).eps) / 16


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_arithmetic_of_16_bit_gradients_is_float32(dtype, rng):
    x = jnp.zeros((3, 200), dtype)
    gradients = normal_like(rng, x, 5)
    updates, state = after(optim.scale_by_adam(mu_dtype="float32", nu_dtype="float32"), gradients, x)
    expected = adam_oracle(gradients)
    assert_close(state.mu, expected.mu, dtype="float32", tolerance=1e-6)
    assert_close(state.nu, expected.nu, dtype="float32", tolerance=1e-6)
    assert_close(updates[-1], expected.update, dtype=dtype, tolerance=float(jnp.finfo(dtype).eps) / 3)


def test_weight_decay_of_16_bit_parameters_is_float32(standard_promotion, rng):
    params, gradient = normal_like(rng, jnp.zeros((3, 200), jnp.bfloat16)), normal_like(rng, jnp.zeros((3, 200)))
    ours, theirs = (
        make(1.0, weight_decay=0.3, mu_dtype="float32", **options)
        for make, options in ((optim.adamw, {"nu_dtype": "float32"}), (optax.adamw, {}))
    )
    actual, _ = jax.jit(ours.update)(gradient, ours.init(params), params)
    wide = params.astype(jnp.float32)
    expected, _ = jax.jit(theirs.update)(gradient, theirs.init(wide), wide)
    assert_close(actual, expected, dtype="float32", tolerance=1e-6)


def test_updates_of_16_bits_are_rounded_once(standard_promotion, rng):
    params, first, gradient = (normal_like(rng, jnp.zeros((3, 200), jnp.bfloat16)) for _ in range(3))
    transform = optim.adamw(0.3, mu_dtype="float32", nu_dtype="float32")
    update = jax.jit(transform.update)
    _, state = update(first, transform.init(params), params)
    narrow, wide = (update(gradient.astype(d), state, params)[0] for d in (jnp.bfloat16, jnp.float32))
    np.testing.assert_array_equal(narrow, wide.astype(jnp.bfloat16))


# ---------------------------------------------------------------------------------- second moments follow the gradients


def after_a_fall(transform, size):
    """Mean of nu after 1000 gradients of 1 and 2000 of 0.001."""

    @jax.jit
    def run(x):
        def steps(count, value, state):
            return lax.fori_loop(0, count, lambda _, s: transform.update(jnp.full_like(x, value), s)[1], state)

        return steps(2000, 1e-3, steps(1000, 1.0, transform.init(x)))

    x = jnp.zeros(size)
    return float(jnp.mean(moments(run(x), x)[1]))


FALLEN = (1 - 0.999**1000) * 0.999**2000 + 1e-6 * (1 - 0.999**2000)


@pytest.mark.parametrize(
    ("dtype", "size", "tolerance"),
    [("bfloat16", 4096, 0.01), ("float16", 1024, 0.01), (FLOAT8, 16384, 0.03)],
    ids=NARROW,
)
def test_second_moments_follow_their_gradients(dtype, size, tolerance, rng):
    transform = optim.scale_by_adam(nu_dtype=dtype, seed=int(rng.integers(2**31)))
    assert after_a_fall(transform, size) == pytest.approx(FALLEN, rel=tolerance)


def test_rounded_to_nearest_they_do_not():
    """In bfloat16 as optax has it: half of the last digit is more than a step."""
    transform = optim.scale_by_adam(nu_dtype="bfloat16", stochastic_rounding=False)
    assert abs(after_a_fall(transform, 256) / FALLEN - 1) > 0.3


# ---------------------------------------------------------------------------------------------------- extreme gradients


@pytest.mark.parametrize(("magnitude", "dtype"), in_turns([1e-16, 1e12], [jnp.float16, FLOAT8]))
def test_gradients_of_any_magnitude(dtype, magnitude, rng):
    """What float16 and FP8 could not hold by themselves."""
    x, steps = jnp.zeros((4, 200)), 10
    gradients = normal_like(rng, x, steps) * np.float32(magnitude)
    updates, state = after(optim.scale_by_adam(mu_dtype=dtype, nu_dtype=dtype, eps=0.0), gradients, x)
    mu, nu = moments(state, x)
    expected = adam_oracle(gradients, eps=0.0)
    errors = rounding_error(dtype, 0.9, steps), rounding_error(dtype, 0.999, steps)
    assert_close(mu, expected.mu, dtype="float32", tolerance=errors[0])
    assert_close(nu, expected.nu, dtype="float32", tolerance=errors[1])
    assert_close(updates[-1], expected.update, dtype="float32", tolerance=sum(errors))


def test_bounds_of_blocks_take_the_steps_of_their_moments(rng):
    """They are the moments of the largest magnitudes, so they fall as fast as the gradients do."""
    x = jnp.zeros((3, 300))
    gradients = np.asarray(normal_like(rng, x, 10)) * np.geomspace(1, 1e-3, 10, dtype=np.float32)[:, None, None]
    _, state = after(optim.scale_by_adam(mu_dtype=FLOAT8, nu_dtype=FLOAT8), gradients, x)
    largest = np.stack([np.abs(part).max(axis=-1) for part in np.split(gradients, [128, 256], axis=-1)], axis=-1)
    expected = adam_oracle(largest)
    assert_close(state.mu_bounds, expected.mu, dtype="float32", tolerance=1e-6)
    assert_close(state.nu_bounds, expected.nu, dtype="float32", tolerance=1e-6)


def test_second_moments_are_at_least_a_small_part_of_the_largest(rng):
    """In FP8; below it they are kept too large, which makes updates too small, and never divides by zero."""
    x = jnp.zeros((4, 128))
    gradients = np.full((30, *x.shape), 1e-6, np.float32)
    gradients[..., 7] = rng.uniform(1, 2, (30, 4))
    updates, state = after(optim.scale_by_adam(nu_dtype=FLOAT8), jnp.asarray(gradients), x)
    nu = np.asarray(moments(state, x)[1])
    assert (nu >= 2.0**-17 * nu.max(axis=1, keepdims=True)).all()
    small = np.delete(np.asarray(updates[-1]), 7, axis=1)
    assert ((small > 0) & (small < 1)).all()


@pytest.mark.parametrize(("dtype", "value"), in_turns(MOMENT_DTYPES, [np.nan, -np.inf]))
def test_gradients_that_are_not_finite_stay_visible(dtype, value, rng):
    """For the step and all after it, and only in their own block."""
    x = jnp.zeros((3, 300))
    gradients = np.array(normal_like(rng, x, 3))
    transform = optim.scale_by_adam(mu_dtype=dtype, nu_dtype=dtype)
    clean = after(transform, jnp.asarray(gradients), x)
    gradients[1, 2, 150] = value
    dirty = after(transform, jnp.asarray(gradients), x)
    others = np.ones(x.shape, bool)
    others[2, 128:256] = False
    dirty, clean = ((updates[-1], *moments(state, x)) for updates, state in (dirty, clean))
    for actual, expected in zip(dirty, clean, strict=True):
        assert not np.isfinite(actual[2, 150])
        np.testing.assert_array_equal(np.asarray(actual)[others], np.asarray(expected)[others])


ADAMS_BOUND = 0.1 / 0.001**0.5
"""What no update exceeds with b1 = 0.9 and b2 = 0.999: Kingma and Ba, section 2.1."""


@pytest.mark.parametrize(
    ("mu_dtype", "nu_dtype"),
    [("float32", FLOAT8), (FLOAT8, jnp.float16)],
)
def test_finite_gradients_never_destroy_weights(mu_dtype, nu_dtype, rng):
    """One step has gradients whose squares float32 does not hold: `skip_nonfinite` must not skip it, because they are
    finite."""
    huge = np.ones(128, np.float32)
    huge[:100] = [2e19, -1e30, 1e38, -np.finfo(np.float32).max] * 25
    params = {"w": np.ones((3, 128), np.float32)}
    optimizer = optim.adam(1.0, mu_dtype=mu_dtype, nu_dtype=nu_dtype, skip_nonfinite=True, seed=rng.integers(2**31))
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for step in range(5):
        gradients = {"w": np.full((3, 128), 0.1, np.float32)}
        if step == 2:
            gradients["w"][1] = huge
        updates, state = update(gradients, state, params)
        assert (np.abs(updates["w"]) <= ADAMS_BOUND).all()
        assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(state))
        assert all(np.isfinite(moment["w"]).all() for moment in moments(adam_state(state), params))
    assert (np.abs(np.asarray(updates["w"])[::2] + 1) < 0.3).all()  # the other rows go on as if nothing had been
    assert state.skipped == 0


def test_gradients_are_clipped_beyond_optax_range(standard_promotion, rng):
    """Up to 2^63 float32 states are optax's own; what exceeds it counts as 2^63."""
    signs = np.sign(rng.standard_normal((3, 40)))
    signs[0] = rng.uniform(-1, 1, 40)
    x = jnp.zeros(40)
    below, above = (jnp.asarray(signs * magnitude, jnp.float32) for magnitude in (2.0**63, 1e30))
    expected, expected_state = after(optax.scale_by_adam(), below, x)
    for gradients in (below, above.at[0].set(below[0])):
        updates, state = after(optim.scale_by_adam(), gradients, x)
        assert_ulps((updates, state.mu, state.nu), (expected, expected_state.mu, expected_state.nu), count=8)


@pytest.mark.parametrize(("mu_dtype", "nu_dtype"), [("float64", FLOAT8)])
def test_finite_float64_gradients_never_destroy_weights(mu_dtype, nu_dtype):
    with jax.enable_x64(True):
        gradients = jnp.full((4, 40), 0.1, "float64").at[1, :30].set(jnp.asarray([2e19, -1e60, 1e300] * 10))
        optimizer = optim.scale_by_adam(mu_dtype=mu_dtype, nu_dtype=nu_dtype)
        updates, state = after(optimizer, gradients, gradients[0])
        assert (np.abs(updates) <= ADAMS_BOUND).all()
        np.testing.assert_allclose(updates[30:], 1.0, atol=0.3)  # the other elements go on
        wide = optim.convert_state(optim.scale_by_adam(), state, gradients[0])
        assert np.isfinite(wide.mu).all()
        assert np.isfinite(wide.nu).all()


# ------------------------------------------------------------------------------------------------------------- refusals


OF_DTYPE = "choose float32, bfloat16, float16 or float8_e4m3fn"
ARGUMENTS = {
    **{
        f"{name} is {dtype}: {OF_DTYPE}": {name: dtype}
        for name in ("mu_dtype", "nu_dtype")
        for dtype in ("int8", "float8_e5m2", "complex64", "bf16")
    },
    **{
        f"seed is {seed!r}; it must be an integer from 0 to 2^32 - 1": {"mu_dtype": "bfloat16", "seed": seed}
        for seed in (-1, 2**32, np.int64(2**33), 1.5, "1", None, np.arange(3))
    },
    **{
        f"{name} is {value!r}; it must be True or False": {name: value}
        for name in ("nesterov", "stochastic_rounding", "skip_nonfinite")
        for value in ("no", None, 1)
    },
}


@pytest.mark.parametrize("message", ARGUMENTS)
def test_arguments_of_no_use(message):
    with pytest.raises(ValueError, match=re.escape(message)):
        optim.adamw(1e-3, **ARGUMENTS[message])


def test_parameters_states_and_gradients_of_others():
    for dtype in ("int32", "complex64", "float8_e5m2"):
        params = {"a": np.zeros(3, np.float32), "b": np.zeros(3, dtype)}
        message = f"a parameter has dtype {dtype}: moments need parameters in float32, bfloat16"
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(optim.adam(0.1).init, params)
    adam = optim.scale_by_adam()
    for state in (optax.scale_by_adam().init(jnp.ones(3)), {"count": 0}):
        name = f"{type(state).__module__}.{type(state).__name__}"
        with pytest.raises(ValueError, match=f"state is a {name}; it must be .* te_jax.optim.convert_state"):
            adam.update(jnp.ones(3), state)
    with pytest.raises(ValueError, match=r"shape \(4, 1\) whose moments have shape \(4, 2\): gradients must have"):
        jax.eval_shape(adam.update, {"w": jnp.ones((4, 1))}, jax.eval_shape(adam.init, {"w": jnp.ones((4, 2))}))
