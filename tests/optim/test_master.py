"""Masters: float32 weights of which parameters are the rounded image, whole or as the half that bfloat16 lacks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optim_cases import NAN_OF_GPUS, assert_same, normal_like, weight

from te_jax import optim

BFLOAT16 = np.dtype(jnp.bfloat16)


def added(dtype):
    """Adds float32 updates to masters as they are."""
    return optim.master_weights(optax.identity(), dtype)


def train(transform, params, gradients, state=None):
    """Parameters and state after every step."""
    state = transform.init(params) if state is None else state

    @jax.jit
    def step(params, state, g):
        updates, state = transform.update(g, state, params)
        return optim.apply_updates(params, updates), state

    for g in gradients:
        params, state = step(params, state, g)
        yield params, state


def to_nearest_away(x):
    """float32 as bfloat16; what lies between two goes away from zero."""
    return ((np.asarray(x).view(np.uint32).astype(np.uint64) + 0x8000) >> 16).astype(np.uint16).view(BFLOAT16)


def random_walk(rng, shape, steps):
    """Parameters of all magnitudes, and steps of all sizes that make them cross zero now and then."""
    start = jax.device_put(np.asarray(rng.standard_normal(shape) * 10.0 ** rng.uniform(-20, 30, shape), jnp.bfloat16))
    magnitudes = np.abs(np.asarray(start).astype(np.float64)) * 10.0 ** rng.uniform(-6, 0.5, (steps, *shape))
    return start, (rng.standard_normal((steps, *shape)) * magnitudes).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float32_masters_add_up_and_parameters_are_their_image(dtype, rng):
    start, walk = random_walk(rng, (3, 300), 50)
    if dtype == "float16":
        start, walk = jnp.clip(start, -1e3, 1e3).astype(dtype), np.clip(walk, -1e3, 1e3)
    exact = np.asarray(start).astype(np.float32)
    for (param, state), step in zip(train(added("float32"), start, walk), walk, strict=True):
        exact = exact + step
        assert param.dtype == dtype
        assert_same(state.master, exact)
        np.testing.assert_array_equal(param, exact.astype(param.dtype))  # but for the sign of zero


def test_int16_completes_a_bfloat16_to_the_master(rng):
    """Bit for bit, through all signs and magnitudes."""
    start, walk = random_walk(rng, (3, 300), 50)
    exact = np.asarray(start).astype(np.float32)
    crossed = 0
    for (param, state), step in zip(train(added("int16"), start, walk), walk, strict=True):
        crossed += (np.sign(exact) != np.sign(exact + step)).sum()
        exact = exact + step
        assert (param.dtype, state.master.dtype) == (BFLOAT16, np.int16)
        assert_same(weight(param, state.master), exact)
        assert_same(param, to_nearest_away(exact))
    assert crossed > 100


def test_ties(rng):
    """Half-way between two numbers of bfloat16, which are the smallest remainders."""
    x = (rng.uniform(1, 2, 256) * rng.choice([-1, 1], 256)).astype(BFLOAT16)
    exact = (x.view(np.uint16).astype(np.uint32) << 16 | 0x8000).view(np.float32)
    step = exact - x.astype(np.float32)
    [(param, state)] = train(added("int16"), jnp.asarray(x), [step])
    assert_same(weight(param, state.master), exact)
    assert (np.abs(np.asarray(param).astype(np.float32)) > np.abs(exact)).all()
    [(param, state)] = train(added("float32"), jnp.asarray(x), [step])
    assert_same(state.master, exact)
    assert_same(param, exact.astype(BFLOAT16))


def test_a_parameter_and_a_remainder_of_two_sums(rng):
    """XLA may compute a sum twice, and round it in two ways: both together are a weight near these sums."""
    x = (rng.standard_normal(512) * 10.0 ** rng.uniform(-20, 20, 512)).astype(BFLOAT16)
    half_way = (x.view(np.uint16).astype(np.int64) << 16) + 0x8000
    below, above = ((half_way + side).astype(np.uint32).view(np.float32) for side in (-3, 2))
    [(param, _)] = train(added("int16"), jnp.asarray(x), [below - x.astype(np.float32)])
    [(other, state)] = train(added("int16"), jnp.asarray(x), [above - x.astype(np.float32)])
    assert (np.asarray(param) != np.asarray(other)).all()
    assert_same(weight(param, state.master), below)


def test_parameters_that_all_but_vanish_in_a_step(rng):
    """To a few of their last digits, on the other side of zero: a float32 sum from the parameter can miss the image.

    A float32 master is exact all the same, and the next step mends the parameter. With int16 the weight is what the
    sum gave, which is off by less than the last digit of what was there.
    """
    x = (rng.choice([-1, 1], 512) * 2.0 ** rng.integers(-60, 60, 512)).astype(BFLOAT16)
    x[::2] *= rng.uniform(1, 2, 256).astype(BFLOAT16)
    wide = x.astype(np.float32)
    digit = np.spacing(np.abs(wide) / 2)
    steps = [rng.integers(-20, 21, 512).astype(np.float32) * digit, -wide, np.zeros_like(wide)]
    exact = wide + steps[0] - wide
    _, (missed, _), (param, state) = train(added("float32"), jnp.asarray(x), steps)
    assert_same(state.master, exact)
    np.testing.assert_array_equal(param, exact.astype(BFLOAT16))
    assert (np.asarray(missed) != np.asarray(param)).any()
    _, (param, state), (last, last_state) = train(added("int16"), jnp.asarray(x), steps)
    actual = weight(param, state.master)
    assert (np.abs(actual - exact) <= digit).all()
    assert (actual == exact).mean() > 0.5
    np.testing.assert_array_equal(param, to_nearest_away(actual))
    assert_same((last, last_state), (param, state))


@pytest.mark.parametrize("dtype", ["float32", "int16"])
def test_values_that_are_not_finite_show(dtype, rng):
    x = jax.device_put(np.asarray(rng.standard_normal(5), jnp.bfloat16))
    steps = [np.array([np.nan, np.inf, -np.inf, NAN_OF_GPUS, 1], np.float32), np.zeros(5, np.float32)]
    (first, _), (_, state) = train(added(dtype), x, steps)
    assert_same(np.isfinite(np.asarray(first).astype(np.float32)), np.array([False, False, False, False, True]))
    if dtype == "float32":
        np.testing.assert_equal(np.asarray(state.master)[:4], [np.nan, np.inf, -np.inf, np.nan])


@pytest.mark.parametrize("dtype", ["float32", "int16"])
def test_steps_too_small_for_a_parameter_add_up(dtype):
    """A thousand of 2^-13 to 1, whose next bfloat16 is 1 + 2^-7."""
    x, step = jnp.ones(8, jnp.bfloat16), np.full(8, 2.0**-13, np.float32)
    assert (x + jnp.asarray(step, jnp.bfloat16) == x).all()
    *_, (param, state) = train(added(dtype), x, [step] * 1000)
    np.testing.assert_array_equal(param, np.full(8, 1 + 1000 * 2.0**-13).astype(BFLOAT16))
    assert state.master.dtype == dtype


def test_adamw_has_the_same_masters_in_both_forms(rng):
    """With weight decay, and masks."""
    params = {"kernel": np.zeros((3, 200), BFLOAT16), "bias": np.zeros(7, BFLOAT16)}
    params = normal_like(rng, params)
    gradients = [normal_like(rng, params) for _ in range(20)]
    results = []
    for dtype in ("float32", "int16"):
        options = {"weight_decay": 0.1, "mask": {"kernel": True, "bias": False}, "master_dtype": dtype}
        *_, after = train(optim.adamw(0.05, mu_dtype="bfloat16", **options), params, gradients)
        results.append(after)
    (_, whole), (new, half) = results
    masters = jax.tree.map(weight, new, half.master)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5), masters, whole.master)
    assert whole.inner[0].mu["kernel"].dtype == BFLOAT16


def test_weight_decay_acts_on_masters(rng):
    """Not on their rounded images."""
    params = jax.device_put(np.asarray(rng.uniform(1, 2, 256), jnp.bfloat16))
    optimizer = optim.adamw(0.5, weight_decay=0.5, master_dtype="float32")
    master = params.astype(jnp.float32) * (1 + 2.0**-10)
    state = optimizer.init(params)._replace(master=master)
    [(param, state)] = train(optimizer, params, [jnp.zeros_like(params)], state)
    np.testing.assert_allclose(state.master, 0.75 * master, rtol=1e-6)
    np.testing.assert_array_equal(param, state.master.astype(jnp.bfloat16))


@pytest.mark.parametrize("dtype", ["float32", "int16"])
def test_float32_parameters_are_their_own_masters(dtype, rng):
    params = {"kernel": jnp.zeros((3, 5), jnp.bfloat16), "norm": jnp.zeros(5), "absent": None}
    params = normal_like(rng, params)
    walk = [normal_like(rng, params) for _ in range(3)]
    *_, (new, state) = train(added(dtype), params, walk)
    assert isinstance(state.master["norm"], optax.MaskedNode)
    assert [leaf.dtype for leaf in jax.tree.leaves(state.master)] == [dtype]
    expected = np.asarray(params["norm"])
    for step in walk:
        expected = expected + np.asarray(step["norm"])
    assert_same(new["norm"], expected)
    assert new["kernel"].dtype == BFLOAT16


def test_weights_of_a_state(rng):
    """What is evaluated and kept: masters, wherever they are in a state, or else the parameters."""
    params = {"kernel": jnp.zeros((3, 5), jnp.bfloat16), "norm": jnp.zeros(5)}
    params, step = normal_like(rng, params), normal_like(rng, params)
    expected = jax.tree.map(
        lambda p, s: np.asarray(p).astype(np.float32) + np.asarray(s).astype(np.float32), params, step
    )
    for dtype in ("float32", "int16"):
        transform = optax.chain(optax.identity(), optim.skip_nonfinite(added(dtype)))
        [(new, state)] = train(transform, params, [step])
        assert_same(optim.weights(new, state), expected)
        with pytest.raises(ValueError, match="state holds the masters of 2 optimizers"):
            optim.weights(new, (state, state))
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    assert_same(optim.weights(params, optim.adam(0.1).init(params)), wide)


@pytest.mark.parametrize("labels", [{"a": "ours", "b": "theirs"}, {"a": {"k": "ours", "n": "theirs"}, "b": "theirs"}])
@pytest.mark.parametrize("dtype", ["float32", "int16"])
def test_weights_where_other_parameters_have_another_optimizer(labels, dtype, rng):
    params = {"a": {"k": jnp.zeros((3, 5), jnp.bfloat16), "n": jnp.zeros(5)}, "b": {"k": jnp.zeros(7, jnp.bfloat16)}}
    params = normal_like(rng, params)
    transform = optax.partition({"ours": added(dtype), "theirs": optax.set_to_zero()}, labels)
    [(new, state)] = train(transform, params, [jax.tree.map(jnp.ones_like, params)])
    expected = jax.tree.map(lambda p: np.asarray(p).astype(np.float32), params)
    for key in ("k", "n") if labels["a"] == "ours" else ("k",):
        expected["a"][key] = expected["a"][key] + np.float32(1)
    assert_same(optim.weights(new, state), expected)


# ------------------------------------------------------------------------------------------------------------- refusals


def test_what_is_refused():
    for dtype in ("bfloat16", "int32", "float64"):
        for make in (added, lambda dtype: optim.adamw(0.1, master_dtype=dtype)):
            with pytest.raises(ValueError, match=f"master_dtype is {dtype}: choose float32, or int16"):
                make(dtype)
    for dtype in ("float16", "float64", "int32", "float8_e4m3fn"):
        rule = "master_dtype int16 completes bfloat16 ones" if dtype == "float16" else "masters are for bfloat16 and"
        with jax.enable_x64(True), pytest.raises(ValueError, match=f"a parameter has dtype {dtype}: {rule}"):
            added("int16").init({"a": np.zeros(3, BFLOAT16), "b": np.zeros(3, dtype)})
    params, transform = np.zeros(3, BFLOAT16), added("float32")
    with pytest.raises(ValueError, match=r"params is None: masters belong to parameters"):
        transform.update(params, transform.init(params))
