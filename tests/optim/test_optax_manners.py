"""What every optax transform can be relied on for, through one table of ours."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from optim_cases import FLOAT8, adam_state, assert_same, normal_like, run, types
from parameters import in_turns

from te_jax import optim
from te_jax.testing import assert_close

pytestmark = pytest.mark.usefixtures("standard_promotion")

FLOAT32, BFLOAT16 = np.dtype(jnp.float32), np.dtype(jnp.bfloat16)
NARROW = {"mu_dtype": np.dtype(FLOAT8), "nu_dtype": np.dtype(jnp.float16)}
# A constructor, its options, and the dtype of parameters and gradients.
CASES = {
    "adam": (optim.adam, {"learning_rate": 0.1}, FLOAT32),
    "adamw of bfloat16": (optim.adamw, {"learning_rate": 0.1, "mu_dtype": "bfloat16"}, BFLOAT16),
    "adamw in few bits": (optim.adamw, {"learning_rate": 0.1, **NARROW}, FLOAT32),
    "scale_by_adam": (optim.scale_by_adam, NARROW, FLOAT32),
    "float32 masters": (optim.adamw, {"learning_rate": 0.1, "master_dtype": "float32"}, BFLOAT16),
    "int16 masters": (optim.adam, {"learning_rate": 0.1, "master_dtype": "int16", **NARROW}, BFLOAT16),
    "skipping": (optim.adamw, {"learning_rate": 0.1, "skip_nonfinite": True, **NARROW}, FLOAT32),
    "loss scale": (
        lambda **options: optim.dynamic_loss_scale(optim.adamw(**options)),
        {"learning_rate": 0.1, "master_dtype": "int16", "nu_dtype": "bfloat16"},
        BFLOAT16,
    ),
}
cases = pytest.mark.parametrize("case", CASES)
few_cases = pytest.mark.parametrize("case", ["adamw in few bits", "int16 masters"])
WITH_MASTERS = ("float32 masters", "int16 masters", "loss scale")


@functools.cache
def transform_of(case, **options):
    make, defaults, _ = CASES[case]
    return make(**{**defaults, **options})


@pytest.fixture
def params(case, rng):
    """None and an empty tuple stand for what is not there."""
    dtype = CASES[case][2]
    tree = {"kernel": jnp.zeros((3, 130), dtype), "scale": jnp.zeros((), dtype), "absent": None, "nothing": ()}
    return normal_like(rng, tree)


@pytest.fixture
def gradients(params, rng):
    return [normal_like(rng, params) for _ in range(3)]


def assert_alike(actual, expected):
    """Parameters; programs that are compiled differently may round one moment in a million to its other neighbour.

    All together: of a single one a step may leave next to nothing."""
    assert types(actual) == types(expected)

    def all_values(tree):
        return np.concatenate([np.ravel(leaf).astype(np.float32) for leaf in jax.tree.leaves(tree)])

    dtype = jax.tree.leaves(expected)[0].dtype
    assert_close(all_values(actual), all_values(expected), tolerance={FLOAT32: 1e-3, BFLOAT16: 1e-2}[dtype])


# ----------------------------------------------------------------------------------------------------------- signatures


@pytest.mark.parametrize("name", ["adam", "adamw", "scale_by_adam", "apply_updates"])
def test_positional_arguments_are_those_of_optax(name):
    """In its order and with its defaults; what we add goes by keyword."""

    def arguments(function):
        found = {key: (p.kind, p.default) for key, p in inspect.signature(function).parameters.items()}
        positional = [(key, default) for key, (kind, default) in found.items() if kind is not kind.KEYWORD_ONLY]
        return positional, {key: default for key, (kind, default) in found.items() if kind is kind.KEYWORD_ONLY}

    ours, theirs = arguments(getattr(optim, name)), arguments(getattr(optax, name))
    assert ours[0] == theirs[0]
    assert theirs[1].items() <= ours[1].items()


@pytest.mark.parametrize(
    "wrap",
    [optim.skip_nonfinite, lambda inner: optim.dynamic_loss_scale(inner, 1.0), optim.master_weights],
    ids=["skipping", "loss scale", "masters"],
)
def test_wrappers_hand_on_other_arguments(wrap):
    inner = optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), lambda updates, state, params=None, *, factor: (factor * updates, state)
    )
    params, transform = np.ones(3, jnp.bfloat16), wrap(inner)
    update = jax.jit(lambda params: transform.update(params, transform.init(params), params, factor=2.0)[0])
    updates = update(params)
    np.testing.assert_array_equal(np.asarray(updates, np.float32), np.full(3, 2.0))


# ----------------------------------------------------------------------------------------------- init, update and types


@cases
def test_init_of_shapes_alone(case, params):
    """On jax.ShapeDtypeStruct and in jax.eval_shape."""
    transform = transform_of(case)
    expected = transform.init(params)
    assert types(transform.init(jax.eval_shape(lambda: params))) == types(expected)
    assert types(jax.eval_shape(transform.init, params)) == types(expected)


@cases
def test_updates_have_the_gradients_dtypes_or_float32_with_masters(case, params, gradients):
    transform = transform_of(case)
    state = jax.eval_shape(transform.init, params)
    updates, _ = jax.eval_shape(transform.update, gradients[0], state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    expected = FLOAT32 if case in WITH_MASTERS else CASES[case][2]
    assert {u.dtype for u in jax.tree.leaves(updates)} == {expected}
    wide = jax.tree.map(lambda g: np.asarray(g, np.float32), gradients[0])
    updates, _ = jax.eval_shape(transform.update, wide, state, params)
    assert {u.dtype for u in jax.tree.leaves(updates)} == {FLOAT32}


@cases
def test_state_keeps_its_type_in_loops_and_branches(case, params, gradients):
    transform = transform_of(case)
    state = jax.eval_shape(transform.init, params)

    def step(carry, g):
        params, state = carry
        updates, after = transform.update(g, state, params)
        after = lax.cond(jnp.all(updates["scale"] > 0), lambda: after, lambda: state)
        return (optax.apply_updates(params, updates), after), None

    stacked = jax.tree.map(lambda *g: np.stack(g), *gradients)
    (_, after), _ = jax.eval_shape(lambda *args: lax.scan(step, *args), (params, state), stacked)
    assert types(after) == types(state)


@pytest.mark.parametrize("case", ["adamw in few bits", "loss scale"])
def test_repeated_steps_trace_once_and_may_be_donated(case, params, gradients):
    """A donated buffer that is of no use, or that occurs twice, would be a warning or an error."""
    transform, traces = transform_of(case), []

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, g):
        traces.append(None)
        updates, state = transform.update(g, state, params)
        return optax.apply_updates(params, updates), state

    copy = jax.tree.map(jnp.copy, params)
    state = transform.init(copy)
    for g in gradients:
        before = jax.tree.leaves((copy, state))
        copy, state = step(copy, state, g)
        assert all(leaf.is_deleted() for leaf in before)
    assert len(traces) == 1
    assert_alike(copy, run(transform, params, gradients)[0])


# ----------------------------------------------------------------------------------------------------- other transforms


@few_cases
def test_schedules_of_the_learning_rate(case, params, gradients):
    def rate(step):
        return jnp.where(step < 2, 0.1, 0.0)

    actual, state = run(transform_of(case, learning_rate=rate), params, gradients[:2])
    assert_same(actual, run(transform_of(case), params, gradients[:2])[0])
    assert_same(run(transform_of(case, learning_rate=rate), actual, gradients[2:], state)[0], actual)


@few_cases
def test_inject_hyperparams(case, params, gradients):
    make, options, _ = CASES[case]

    def b1(step):
        return 0.9 - 0.4 * step

    injected = optax.inject_hyperparams(make, hyperparam_dtype=jnp.float32)(**options, b1=b1)
    first, state = run(injected, params, gradients[:1])
    assert_alike(first, run(transform_of(case), params, gradients[:1])[0])
    actual, after = run(injected, first, gradients[1:2], state)
    expected, _ = run(transform_of(case, b1=0.5), first, gradients[1:2], state.inner_state)
    assert_alike(actual, expected)
    assert types(after) == types(state)
    stopped = {**after.hyperparams, "learning_rate": jnp.float32(0.0)}
    assert_same(run(injected, actual, gradients[2:], after._replace(hyperparams=stopped))[0], actual)


@cases
def test_tree_map_params(case, params):
    """Moments, bounds and masters belong to parameters, counts and scales do not."""
    transform = transform_of(case)
    state = transform.init(params)
    names = jax.tree.unflatten(jax.tree.structure(params), ["kernel", "scale"])
    mapped = optax.tree_map_params(transform, lambda _, name: name, state, names, transform_non_params=lambda _: "none")
    assert jax.tree.structure(mapped) == jax.tree.structure(state)
    for path, name in jax.tree.leaves_with_path(mapped):
        last = getattr(path[-1], "key", None)
        assert name == (last or "none"), jax.tree_util.keystr(path)
    assert adam_state(mapped).mu["kernel"] == "kernel"
    if adam_state(state).nu_bounds is not None:
        assert adam_state(mapped).nu_bounds["kernel"] == "kernel"


def _with_a_nan(gradients):
    kernel = np.array(gradients[1]["kernel"])
    kernel[1, 7] = np.nan
    return [gradients[0], {**gradients[1], "kernel": kernel}, gradients[2]]


# A transform around ours, the gradients that it is given of three, and those that ours then gets.
AROUND = {
    "chain": (
        lambda ours: optax.chain(optax.scale(0.5), ours),
        lambda g: g,
        lambda g: jax.tree.map(lambda x: x / 2, g),
    ),
    "MultiSteps": (
        lambda ours: optax.MultiSteps(ours, every_k_schedule=2),
        lambda g: g[:2],
        lambda g: [jax.tree.map(lambda a, b: (a + b) / 2, *g[:2])],
    ),
    "apply_if_finite": (lambda ours: optax.apply_if_finite(ours, 3), _with_a_nan, lambda g: [g[0], g[2]]),
}


@pytest.mark.parametrize(("around", "case"), in_turns(AROUND, ["int16 masters", "adamw in few bits", "loss scale"]))
def test_inside_transforms_of_optax(case, around, params, gradients):
    wrap, given, seen = around
    gradients = jax.tree.map(lambda g: np.asarray(g, np.float32), gradients)  # as these transforms want them
    transform = transform_of(case)
    actual, state = run(wrap(transform), params, given(gradients))
    expected, own = run(transform, params, seen(gradients))
    assert_alike(actual, expected)
    assert adam_state(state).count == adam_state(own).count


@few_cases
def test_masked(case, params, gradients):
    masked = optax.masked(transform_of(case), {"kernel": True, "scale": False, "absent": False, "nothing": ()})
    updates, _ = jax.jit(masked.update)(gradients[0], masked.init(params), params)
    alone = {"kernel": params["kernel"]}
    transform = transform_of(case)
    expected, _ = jax.jit(transform.update)({"kernel": gradients[0]["kernel"]}, transform.init(alone), alone)
    assert_alike(updates["kernel"], expected["kernel"])
    assert_same(updates["scale"], gradients[0]["scale"])


# ---------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("case", ["int16 masters"])
def test_orbax(case, params, gradients, tmp_path):
    """A run that is carried on from disk has the bits of one that was not stopped."""
    checkpoint = pytest.importorskip("orbax.checkpoint")
    transform = transform_of(case)
    expected = run(transform, params, gradients)
    saved = run(transform, params, gradients[:1])
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.tree.map(jnp.zeros_like, saved))
    assert_same(restored, saved)
    params, state = restored
    assert_same(run(transform, params, gradients[1:], state), expected)
