"""States of one Adam made into those of another: nothing is lost that the new one can hold."""

import collections
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optim_cases import FLOAT8, MOMENT_DTYPES, adam_state, assert_same, moments, normal_like, run, types, weight
from parameters import in_turns

from te_jax import optim

pytestmark = pytest.mark.usefixtures("standard_promotion")

SHAPES = {"kernel": jnp.zeros((3, 200)), "scale": jnp.zeros(()), "absent": None}


@functools.cache
def narrow(dtype, **options):
    return optim.adamw(0.1, mu_dtype=dtype, nu_dtype=dtype, **options)


OURS, THEIRS = optim.adamw(0.1), optax.adamw(0.1)


@pytest.fixture
def params(rng):
    return normal_like(rng, SHAPES)


@pytest.fixture
def gradients(rng):
    return [normal_like(rng, SHAPES) for _ in range(4)]


@pytest.fixture
def drawn_state(rng):
    """Of optax's AdamW, as after four steps."""
    params = normal_like(rng, SHAPES)
    state = optax.adamw(0.1).init(params)
    mu, nu = normal_like(rng, SHAPES), jax.tree.map(lambda x: jax.device_put(np.square(x)), normal_like(rng, SHAPES))
    return params, (state[0]._replace(count=jnp.int32(4), mu=mu, nu=nu), *state[1:])


SMALLEST = {jnp.float32: 0.0, jnp.bfloat16: 0.0, jnp.float16: 2.0**-35, FLOAT8: 2.0**-15}


def assert_rounded_once(actual, expected, dtype, *, exact):
    """To nearest: within half of a digit, or of the distance of the smallest numbers of a block."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    digits = 0.0 if exact else float(jnp.finfo(dtype).eps) / 2 * np.abs(expected)
    assert (np.abs(actual - expected) <= np.maximum(digits, SMALLEST[dtype] * np.abs(expected).max())).all()


convert = jax.jit(optim.convert_state, static_argnums=0)


@pytest.mark.parametrize(("dtype", "to"), in_turns(MOMENT_DTYPES, [FLOAT8, jnp.float16, FLOAT8, jnp.bfloat16]))
def test_optax_to_ours_among_each_other_and_back(dtype, to, drawn_state):
    params, state = drawn_state
    ours = convert(narrow(dtype), state, params)
    assert types(ours) == types(narrow(dtype).init(params))
    assert ours[0].count == 4
    wide = convert(THEIRS, ours, params)
    assert types(wide) == types(state)
    others = convert(narrow(to), ours, params)
    assert types(others) == types(narrow(to).init(params))
    is_wider = jnp.finfo(to).nmant >= jnp.finfo(dtype).nmant
    others = convert(THEIRS, others, params)
    for name in ("mu", "nu"):
        exact, actual, again = (getattr(each[0], name)["kernel"] for each in (state, wide, others))
        assert_rounded_once(actual, exact, dtype, exact=dtype == jnp.float32)
        assert_rounded_once(again, actual, to, exact=is_wider)
    again = convert(THEIRS, convert(narrow(dtype), wide, params), params)
    assert_same(again, wide)


def test_float16_has_blocks_here_and_none_in_optax(params, gradients):
    """The same dtype, of other values."""
    theirs, ours = optax.adamw(0.1, mu_dtype=jnp.float16), optim.adamw(0.1, mu_dtype=jnp.float16)
    for before, after in ((theirs, ours), (ours, theirs)):
        new, state = run(before, params, gradients)
        converted = convert(after, state, new)
        assert types(converted) == types(after.init(new))
        found, expected = (convert(THEIRS, s, new)[0].mu["kernel"] for s in (converted, state))
        if after is theirs:  # without scales small numbers are subnormal
            expected = np.asarray(expected).astype(np.float16).astype(np.float32)
        assert_rounded_once(found, expected, jnp.float16, exact=after is theirs)


def test_carrying_on_after_float32_to_float32(params, gradients):
    """The bits of a run that was not converted, whoever's it is."""
    for of in (OURS, THEIRS):
        half, state = run(of, params, gradients[:2])
        back = convert(of, convert(OURS, state, half), half)
        assert_same(back, state)
        assert_same(run(of, half, gradients[2:], back), run(of, params, gradients))


@pytest.mark.parametrize("dtype", [jnp.float16, FLOAT8], ids=["float16", "float8"])
def test_second_moments_stay_above_zero(dtype):
    """As steps keep them: next to nothing beside the largest of a block is still something to divide by."""
    state = THEIRS.init(SHAPES)
    nu = {
        **state[0].nu,
        "kernel": np.where(np.arange(200) % 100, 1e-20, 0.75).astype(np.float32) * np.ones((3, 1), np.float32),
    }
    state = (state[0]._replace(nu=nu), *state[1:])
    run = jax.jit(lambda state: moments(optim.convert_state(narrow(dtype), state, SHAPES)[0], SHAPES)[1]["kernel"])
    assert (np.asarray(run(state)) > 0).all()


# ---------------------------------------------------------------------------------------------- wrappers and companions


def bfloat16(tree):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)


def test_masters_begin_as_the_parameters_are(params, gradients):
    params, state = run(narrow("bfloat16"), bfloat16(params), [bfloat16(g) for g in gradients])
    for dtype in ("float32", "int16"):
        converted = optim.convert_state(narrow("bfloat16", master_dtype=dtype), state, params)
        assert types(converted) == types(narrow("bfloat16", master_dtype=dtype).init(params))
        assert_same(converted.inner, state)
        masters = converted.master if dtype == "float32" else jax.tree.map(weight, params, converted.master)
        assert_same(masters, jax.tree.map(lambda x: x.astype(jnp.float32), params))


def test_masters_are_taken_over(params, gradients):
    """From either form to the other, and dropped where there are none."""
    whole, half = (narrow("bfloat16", master_dtype=dtype) for dtype in ("float32", "int16"))
    params, state = run(half, bfloat16(params), [bfloat16(g) for g in gradients])
    assert jnp.count_nonzero(state.master["kernel"]) > 300
    wide = optim.convert_state(whole, state, params)
    assert_same(wide.master["kernel"], weight(params["kernel"], state.master["kernel"]))
    assert_same(wide.inner, state.inner)
    assert_same(optim.convert_state(half, wide, params), state)
    assert_same(optim.convert_state(whole, wide, params), wide)
    assert_same(optim.convert_state(narrow("bfloat16"), wide, params), state.inner)


def test_wrappers_are_added_and_dropped(params, gradients):
    skip, scale = (optim.skip_nonfinite(narrow(FLOAT8)), optim.dynamic_loss_scale(narrow(FLOAT8), 4.0))
    both = optim.skip_nonfinite(optim.dynamic_loss_scale(narrow(FLOAT8), 2.0))
    params, state = run(skip, params, [*gradients, jax.tree.map(lambda g: g * jnp.nan, gradients[0])])
    assert state.skipped == 1
    assert_same(optim.convert_state(skip, state, params), state)
    plain = optim.convert_state(narrow("float32"), state, params)
    assert_same((moments(plain[0], params), plain[0].count), (moments(state.inner[0], params), jnp.int32(4)))
    scaled = optim.convert_state(scale, state, params)
    assert (scaled.loss_scale, scaled.skipped) == (4.0, 0)
    used = scaled._replace(loss_scale=jnp.float32(32.0), finite_steps=jnp.int32(5))
    nested = optim.convert_state(both, used, params)
    assert types(nested) == types(both.init(params))
    assert (nested.skipped, nested.inner.loss_scale, nested.inner.finite_steps) == (0, 32.0, 5)
    assert_same(optim.convert_state(scale, nested, params), used)


def chained(adamw):
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def injected(make, **options):
    return optax.inject_hyperparams(make)(learning_rate=optax.linear_schedule(0.1, 0.0, 10), **options)


def named(adamw):
    return optax.named_chain(("rescaled", adamw), ("clipped", optax.clip(1.0)))


def masked(adamw):
    return optax.masked(adamw, {"kernel": True, "scale": False, "absent": False})


def parted(adamw):
    return optax.partition({"a": adamw, "b": optax.sgd(0.1)}, {"kernel": "a", "scale": "b", "absent": "a"})


def accumulated(adamw):
    return optax.MultiSteps(adamw, 2).gradient_transformation()


@pytest.mark.parametrize("around", [chained, named, masked, parted, accumulated])
def test_inside_of_other_transforms(around, params, gradients):
    theirs, ours = around(optax.adamw(0.1)), around(narrow("bfloat16", skip_nonfinite=True))
    params, state = run(theirs, params, gradients[:3])
    converted = optim.convert_state(ours, state, params)
    assert types(converted) == types(ours.init(params))
    assert jax.tree.structure(converted) == jax.tree.structure(ours.init(params))
    assert_same(adam_state(converted).mu["kernel"], adam_mu(state)["kernel"].astype(jnp.bfloat16))
    assert adam_state(converted).count == (1 if around is accumulated else 3)
    run(ours, params, gradients[3:], converted)


def adam_mu(state):
    found = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, optax.ScaleByAdamState))
    (state,) = (x for x in found if isinstance(x, optax.ScaleByAdamState))
    return state.mu


def test_injected_hyperparameters(params, gradients):
    """Those of both are kept, with the counts of their schedules; those of the new one alone are its own."""
    theirs = injected(optax.adamw, b1=0.8)
    ours = injected(functools.partial(optim.adamw, mu_dtype="bfloat16"), seed=7)
    params, state = run(theirs, params, gradients)
    converted = optim.convert_state(ours, state, params)
    assert types(converted) == types(ours.init(params))
    assert converted.count == 4
    assert converted.hyperparams_states["learning_rate"].count == 4
    assert converted.hyperparams["b1"] == jnp.float32(0.8)
    assert converted.hyperparams["seed"] == 7
    assert_same(converted.inner_state[0].mu["kernel"], adam_mu(state)["kernel"].astype(jnp.bfloat16))


# ------------------------------------------------------------------------------------------------------------- refusals


def test_other_compositions(params):
    ours, plain = OURS, THEIRS
    pairs = [
        (ours, optax.sgd(0.1, momentum=0.9)),
        (ours, optax.chain(optax.clip(1.0), plain)),
        (optim.adam(0.1), plain),
        (ours, optax.adamw(optax.linear_schedule(0.1, 0.0, 10))),
        (optim.adam(optax.linear_schedule(0.1, 0.0, 10)), optax.adam(0.1)),
        (optim.skip_nonfinite(ours), optax.sgd(0.1)),
    ]
    for optimizer, other in pairs:
        with pytest.raises(ValueError, match="both must be composed of the same transforms"):
            optim.convert_state(optimizer, other.init(params), params)


def test_transforms_of_as_many_states(params):
    """NamedTuples of other transforms with as many fields, and what stands for nothing."""
    pairs = [
        (optax.trace(0.9), optax.scale_by_rms()),
        (optim.scale_by_adam(), optax.scale_by_belief()),
        (optax.scale_by_adam(), optax.scale_by_belief()),
        (optax.masked(optax.trace(0.9), True), optax.ema(0.9)),
        (optax.identity(), optax.trace(0.9)),
        (optax.trace(0.9), optax.identity()),
    ]
    for optimizer, other in pairs:
        with pytest.raises(ValueError, match="both must be composed of the same transforms"):
            optim.convert_state(optimizer, other.init(params), params)


AROUND = {
    "Adam": optim.adamw(0.1),
    "trace": optax.trace(0.9),
    "accumulated": optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
    "masters": optim.master_weights(optax.identity()),
    "chained": chained(optax.sgd(0.1, momentum=0.9)),
}
each_transform = pytest.mark.parametrize("optimizer", AROUND.values(), ids=AROUND)


@each_transform
def test_parameters_of_other_shapes(optimizer):
    short, long = ({"a": jnp.ones(n, jnp.bfloat16)} for n in (3, 4))
    with pytest.raises(ValueError, match=r"state.*\['a'\] has shape \(3,\) where the optimizer has shape \(4,\)"):
        optim.convert_state(optimizer, optimizer.init(short), long)


def test_other_injected_hyperparameters(params):
    """Those that both have are kept; schedules and seeds begin."""
    narrow = optax.inject_hyperparams(optim.adamw, "nu_dtype")(learning_rate=0.1, nu_dtype="bfloat16")
    wide = optax.inject_hyperparams(optax.adamw)(learning_rate=0.2)
    scheduled = optax.inject_hyperparams(optim.adamw)(learning_rate=lambda step: 0.3)
    for one, other in itertools.permutations((narrow, wide, scheduled), 2):
        converted = optim.convert_state(one, other.init(params), params)
        assert types(converted.inner_state) == types(one.init(params).inner_state)
        assert set(converted.hyperparams) == set(one.init(params).hyperparams)
        assert converted.hyperparams["learning_rate"] == other.init(params).hyperparams["learning_rate"]


@pytest.mark.parametrize("options", [{"mu_dtype": "bfloat16"}, {"master_dtype": "float32"}], ids=["moments", "masters"])
def test_parameters_in_other_containers(options, params):
    optimizer = optim.adamw(0.1, **options)
    params = bfloat16(params)
    state = optimizer.init(collections.OrderedDict(params))
    with pytest.raises(ValueError, match=r"(mu|master) has .*OrderedDict.*: give params in the containers"):
        optim.convert_state(optimizer, state, params)


@pytest.mark.parametrize("run", [optim.convert_state, convert], ids=["eager", "jit"])
def test_an_offloaded_state_is_in_host_memory(run, rng):
    """And that of an optimizer which is not, on the device."""
    params = {"w": jnp.asarray(rng.standard_normal((8, 16)), jnp.bfloat16)}
    plain = narrow("bfloat16", master_dtype=jnp.int16)
    offloaded = optim.offload(plain, min_size=0)
    state = plain.init(params)
    there = run(offloaded, state, params)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(there) if leaf.ndim} == {"pinned_host"}
    assert_same(jax.device_get(there), state)
    back = run(plain, there, params)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(back)} == {"device"}
