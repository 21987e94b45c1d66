"""Delayed scaling: what a state becomes, how scales follow from it, and that it stays right wherever it is shared.

That each layer observes what belongs to each of its states is in tests/linear/test_linear_delayed.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_oracle import FORWARD, GRADIENT, gradients_of, random_case, wide
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from parameters import in_turns

from te_jax import ops
from te_jax.recipe import DelayedScaling, DelayedScalingState
from te_jax.testing import assert_close, relative_error

RECIPE = DelayedScaling(history_len=4)
ROLES = ("activation", "kernel", "gradient")


def amax(x):
    return float(np.abs(wide(x)).max())


def state_of(*histories, uses=1.0):
    return DelayedScalingState(*(np.asarray(value, np.float32) for value in (*histories, uses)))


def histories(state):
    return [np.asarray(getattr(state, role)).tolist() for role in ROLES]


def scaled(x, factor):
    return (np.asarray(x, np.float32) * np.float32(factor)).astype(x.dtype)


def with_value(x, place, value):
    x = np.array(x)
    x[place] = value
    return x


@pytest.fixture
def operands(rng):
    """x, kernel and dy in bfloat16."""
    case = random_case(rng, (32,), (32,), (32,), with_bias=False)
    return tuple(map(np.array, (case.x, case.kernel, case.dy)))


def step(operands, state, recipe=RECIPE):
    """((y, dx, dkernel), next state), by one program for each recipe."""
    x, kernel, dy = operands
    y, (dx, dkernel, _, after) = gradients_of(x, kernel, None, dy, state, recipe=recipe)
    return (y, dx, dkernel), after


def assert_products(found, operands):
    x, kernel, dy = map(wide, operands)
    bounds = FORWARD, GRADIENT, GRADIENT
    for one, wanted, bound in zip(found, (x @ kernel, dy @ kernel.T, x.T @ dy), bounds, strict=True):
        assert relative_error(one, wanted) < bound


def loss(x, kernel, state, dy, **options):
    y = ops.dense(x, kernel, recipe=RECIPE, scaling_state=state, **options)
    return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32))


# ------------------------------------------------------------------------------------------------------------ one use


@pytest.mark.parametrize(
    ("recipe", "largest"),
    [
        (DelayedScaling(history_len=3), 3.0),
        (DelayedScaling(history_len=3, algorithm="most_recent"), 1.0),
        (DelayedScaling(history_len=3, algorithm="most_recent", margin=1), 2.0),
    ],
    ids=["max", "most recent", "margin"],
)
def test_scales_follow_from_histories(recipe, largest, operands):
    """What is larger than they say saturates, and only that."""
    x, kernel, dy = scaled(operands[0], 8), *operands[1:]
    found, after = step((x, kernel, dy), state_of([1, 2, 3], [10, 8, 9], [11, 12, 10]), recipe)
    assert_products(found, (np.clip(wide(x), -largest, largest), kernel, dy))
    assert histories(after) == [[amax(x), 1, 2], [amax(kernel), 10, 8], [amax(dy), 11, 12]]


def test_the_first_step_has_scales_of_one(operands):
    (y, *_), after = step(operands, RECIPE.init())
    x, kernel = (wide(a.astype(jnp.float8_e4m3fn)) for a in operands[:2])
    assert_close(y, x @ kernel, dtype="bfloat16")
    assert histories(after) == [[amax(a), 0, 0, 0] for a in operands]


def test_an_empty_batch_observes_nothing_but_the_kernel(operands):
    x, kernel, dy = operands
    _, after = step((x[:0], kernel, dy[:0]), state_of([4] * 4, [3] * 4, [2] * 4))
    assert histories(after) == [[0, 4, 4, 4], [amax(kernel), 3, 3, 3], [0, 2, 2, 2]]


@pytest.mark.parametrize(("history_len", "algorithm"), in_turns([1, 3], ["max", "most_recent"]))
def test_steps_of_zeros_leave_the_scale_alone(history_len, algorithm, operands):
    """Scales of 1 would follow, for which gradients as small as these are zeros in E5M2."""
    recipe = DelayedScaling(history_len=history_len, algorithm=algorithm)
    *others, dy = operands
    dy = scaled(dy, 1e-7)
    state = step((*others, dy), recipe.init(), recipe)[1]
    (_, expected, _), _ = step((*others, dy), state, recipe)
    for _ in range(history_len + 2):
        state = step((*others, 0 * dy), state, recipe)[1]
        assert float(recipe.reference_amax(state.gradient)) == amax(dy)
    np.testing.assert_array_equal(step((*others, dy), state, recipe)[0][1], expected)
    assert step((*others, dy / 2), state, recipe)[1].gradient[0] == amax(dy / 2)


@pytest.mark.parametrize("poison", [np.inf, np.nan])
def test_what_is_not_finite_is_shown_and_not_remembered(poison, operands):
    poisoned = [with_value(a, (0, 0), poison) for a in operands]
    (y, _, dkernel), after = step(poisoned, state_of([4, 3, 2, 1], [8, 7, 6, 5], [12, 11, 10, 9]))
    assert not np.isfinite(wide(y)[0]).any()
    assert not np.isfinite(wide(dkernel)[0]).any()
    assert histories(after) == [[4, 4, 3, 2], [8, 8, 7, 6], [12, 12, 11, 10]]
    assert_products(step(operands, after)[0], operands)


def test_an_outlier_costs_its_own_step_alone(operands):
    """1e30 in every operand: with it in the history, all other values would be zero for as long as it is there."""
    ones, large = ([with_value(a, (3, 5), value) for a in operands] for value in (1.0, 1e30))
    state = RECIPE.init()
    for each in (ones, large, ones):
        found, state = step(each, state)
    assert_products(found, ones)
    assert histories(state) == [[amax(a), 16 * amax(a), amax(a), 0] for a in ones]


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_growth_is_followed(algorithm, operands):
    """With room for growth by 4, values that grow by 4 in every step never saturate; by 1000 it takes three steps."""
    recipe = DelayedScaling(history_len=4, algorithm=algorithm, margin=2)
    x, *others = operands
    state = recipe.init()
    for i in range(6):
        found, state = step((scaled(x, 4**i), *others), state, recipe)
        assert_products(found, (scaled(x, 4**i), *others))
        assert state.activation[0] == amax(x) * 4**i
    for factor in (16, 256, 1000):
        state = step((scaled(x, 1000 * 4**5), *others), state, recipe)[1]
        assert state.activation[0] == pytest.approx(amax(x) * 4**5 * factor, rel=1e-2)


def test_a_margin_that_overflows():
    """The scale is then as small as it can be, and not 1."""
    recipe = DelayedScaling(history_len=2, margin=64)
    assert float(recipe.reference_amax(jnp.asarray([1e30, 1.0]))) == np.finfo(np.float32).max


@pytest.mark.parametrize("role", ROLES)
def test_a_negative_history_gives_nan(role, operands):
    """An optimizer that updates all variables makes it so."""
    state = state_of([4] * 4, [5] * 4, [6] * 4)
    state = dataclasses.replace(state, **{role: with_value(getattr(state, role), 2, -0.3)})
    for result, spared in zip(step(operands, state)[0], ("gradient", "activation", "kernel"), strict=True):
        assert np.isnan(wide(result)).all() == (role != spared)


@pytest.mark.parametrize("uses", [0.999, 1 / 1024, -1.0, np.nan])
def test_a_fraction_of_uses_gives_nan(uses, operands):
    """As when all gradients are divided by a loss scale, the state's among them."""
    assert all(np.isnan(wide(a)).all() for a in step(operands, state_of([4] * 4, [5] * 4, [6] * 4, uses=uses))[0])


# -------------------------------------------------------------------------------------------------------- several uses


def two_uses(x, kernel, state, dy):
    """A layer twice, with one kernel and one state."""
    hidden = ops.dense(x, kernel, recipe=RECIPE, scaling_state=state)
    return loss(hidden, kernel, state, dy)


after_two_uses = jax.jit(jax.grad(two_uses, argnums=2))


@pytest.fixture
def shared(operands):
    """A state that has seen the layer, and the amaxes of its two uses by role."""
    x, kernel, dy = operands
    state = state_of([amax(x) * 3] * 4, [amax(kernel)] * 4, [amax(dy) * 3] * 4)
    hidden = np.asarray(step(operands, state)[0][0])
    gradient = step((hidden, kernel, dy), state)[0][1]
    return state, [(amax(x), amax(hidden)), (amax(kernel),) * 2, (amax(dy), amax(gradient))]


def test_a_state_that_is_used_twice(shared, operands):
    """The newest amaxes add up, which none exceeds; the older ones are as they were."""
    (x, kernel, dy), (state, seen) = operands, shared
    found = after_two_uses(x, kernel, state, dy)
    assert found.uses == 2
    for role, before, two in zip(ROLES, histories(state), seen, strict=True):
        np.testing.assert_allclose(getattr(found, role), [sum(two), *(2 * h for h in before[:-1])], rtol=1e-6)
    for _ in range(5):  # neither grows without end nor forgets
        found = after_two_uses(x, kernel, found, dy)
        assert found.kernel[0] == pytest.approx(2 * amax(kernel))
    np.testing.assert_allclose(np.asarray(found.kernel)[1:] / found.uses, 2 * amax(kernel), rtol=1e-6)


def test_two_uses_of_what_stands_out(shared, operands):
    """Infinities repeat the newest amax, an outlier counts 16 times the history of one use, zeros keep the scale."""
    (x, kernel, dy), (state, seen) = operands, shared
    found = before = after_two_uses(x, kernel, state, dy)
    for _ in range(6):
        found = after_two_uses(with_value(x, (0, 0), np.nan), kernel, found, dy)
        assert found.activation[0] == pytest.approx(float(before.activation[0]))
    found = after_two_uses(with_value(x, (0, 0), 1e30), kernel, state, dy)
    assert found.activation[0] == pytest.approx(16 * state.activation[0], rel=0.1)
    assert found.kernel[0] == pytest.approx(sum(seen[1]))
    found = after_two_uses(x, kernel, found, dy)
    assert found.activation[0] == pytest.approx(sum(seen[0]), rel=0.05)
    for _ in range(6):
        found = after_two_uses(x, kernel, found, 0 * dy)
        known = RECIPE.reference_amax(np.asarray(found.gradient) / np.asarray([1, *[found.uses] * 3]))
        assert 0 < known <= 2 * 3 * amax(dy)


@pytest.mark.parametrize("poison", [1.0, np.inf])
def test_vmap_over_examples_that_share_a_state(poison, operands):
    """It is that of one tensor, also of one without examples."""
    x, kernel, dy = operands
    xs, dys = np.stack([with_value(x, (0, 0), poison), x]), np.stack([dy, dy])
    state = state_of([5] * 4, [1] * 4, [5] * 4)

    @jax.jit
    def after(state, xs, dys):
        return jax.grad(lambda state: jnp.sum(jax.vmap(loss, (0, None, None, 0))(xs, kernel, state, dys)))(state)

    seen = 5 if np.isinf(poison) else amax(xs)
    assert histories(after(state, xs, dys)) == [[seen, 5, 5, 5], [amax(kernel), 1, 1, 1], [amax(dy), 5, 5, 5]]
    if poison == 1.0:
        found = after(state, xs[:0], dys[:0])
        assert histories(found) == [[0, 5, 5, 5], [amax(kernel), 1, 1, 1], [0, 5, 5, 5]]


# ------------------------------------------------------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("kind", "poison"), in_turns(["explicit", "untracked", "shard_map", "pmap"], [np.inf, 77.0, np.nan])
)
def test_devices_share_a_state(kind, poison, make_mesh, operands):
    """They observe the largest magnitude of all, and one that is not finite on one is remembered on none."""
    mesh = make_mesh({"data": AxisType.Explicit if kind == "explicit" else AxisType.Auto})
    x, kernel, dy = operands
    x, state = with_value(x, (-1, 3), poison), state_of([80] * 4, [5] * 4, [6] * 4)
    after = jax.grad(loss, argnums=2)
    if kind == "explicit":
        x, dy = (jax.device_put(a, NamedSharding(mesh, P("data"))) for a in (x, dy))
        found = jax.jit(after)(x, *jax.device_put((kernel, state), NamedSharding(mesh, P())), dy)
    elif kind == "pmap":
        x, dy = (a.reshape(mesh.size, -1, 32) for a in (x, dy))
        mapped = jax.pmap(lambda *a: after(*a, state_axis="data"), axis_name="data", in_axes=(0, None, None, 0))
        found = mapped(x, kernel, state, dy)
    else:
        tracked, specs = kind == "shard_map", (P("data"), P(), P(), P("data"))
        found = jax.jit(
            jax.shard_map(
                lambda *a: after(*a, state_axis=None if tracked else "data"),
                mesh=mesh, in_specs=specs, out_specs=P(), check_vma=tracked,
            )
        )(x, kernel, state, dy)  # fmt: skip
    expected = [[poison if np.isfinite(poison) else 80, 80, 80, 80]]
    expected += [[amax(a), *[old] * 3] for a, old in ((kernel, 5), (dy, 6))]
    for leaf, wanted in zip(jax.tree.leaves(found), (*expected, 1.0), strict=True):
        shards = leaf if kind == "pmap" else [shard.data for shard in leaf.addressable_shards]
        for shard in map(np.asarray, shards):
            np.testing.assert_array_equal(shard, np.float32(wanted))


def gated_mlp(x, kernel, *, scaling_state, **options):
    return ops.gated_mlp(x, (kernel, kernel, kernel.T), scaling_state=(scaling_state,) * 3, **options)


@pytest.mark.parametrize("layer", [ops.dense, gated_mlp])
def test_a_gradient_after_one_that_was_refused(layer, operands):
    """The trace of a derivative rule that raised must not be used again."""
    x, kernel, _ = operands

    def loss(kernel, state):
        return layer(x, kernel, recipe=RECIPE, scaling_state=state).astype(jnp.float32).sum()

    gradient, state = jax.grad(loss, argnums=(0, 1)), state_of([4] * 4, [5] * 4, [6] * 4)
    jax.eval_shape(gradient, kernel, state)
    with pytest.raises(ValueError, match="scaling_state is not"):
        jax.eval_shape(jax.grad(loss), kernel, state)
    jax.eval_shape(gradient, kernel, state)
