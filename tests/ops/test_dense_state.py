"""Delayed scaling: the state advances, is used, and stays right wherever it is shared."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_oracle import gradients_of, oracle, random_case, wide
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax import ops
from te_jax.recipe import DelayedScaling, DelayedScalingState, advance, merge
from te_jax.testing import assert_close, relative_error

RECIPE = DelayedScaling(history_len=4)
ROLES = ("activation", "kernel", "gradient")


def amax(x):
    return float(np.abs(wide(x)).max())


def state_of(*histories, uses=1.0):
    return DelayedScalingState(*(jnp.asarray(value, jnp.float32) for value in (*histories, uses)))


def histories(state):
    return [np.asarray(getattr(state, role)).tolist() for role in ROLES]


def loss(x, kernel, state, dy, recipe=RECIPE, **options):
    y = ops.dense(x, kernel, recipe=recipe, scaling_state=state, **options)
    return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32))


next_state_of = jax.jit(jax.grad(loss, argnums=2))


@pytest.fixture
def case(rng):
    return random_case(rng, (32,), (32,), (48,), with_bias=False)


def test_histories_roll_and_take_up_what_was_seen(implementation, case):
    state = state_of([4, 3, 2, 1], [8, 7, 6, 5], [12, 11, 10, 9])
    found = jax.grad(loss, argnums=2)(case.x, case.kernel, state, case.dy, implementation=implementation)
    assert histories(found) == [[amax(case.x), 4, 3, 2], [amax(case.kernel), 8, 7, 6], [amax(case.dy), 12, 11, 10]]


def test_scales_follow_from_the_state_and_not_from_the_tensor(implementation, case):
    """A state that has seen small values: what is larger saturates, and only that."""
    limits = 0.5, 0.05, 0.5
    y, (dx, dkernel, _, _) = gradients_of(
        case.x, case.kernel, None, case.dy, state_of(*([limit] * 4 for limit in limits)),
        recipe=RECIPE, implementation=implementation,
    )  # fmt: skip
    x, kernel, dy = (
        np.clip(wide(a), -limit, limit) for a, limit in zip((case.x, case.kernel, case.dy), limits, strict=True)
    )
    assert_close(y, x @ kernel, dtype="bfloat16", tolerance=0.055)
    assert_close(dx, dy @ kernel.T, dtype="bfloat16", tolerance=0.085)
    assert_close(dkernel, x.T @ dy, dtype="bfloat16", tolerance=0.085)
    assert relative_error(y, oracle(case).y) > 0.3


@pytest.mark.parametrize(
    ("recipe", "largest"),
    [
        (DelayedScaling(history_len=3), 3.0),
        (DelayedScaling(history_len=3, algorithm="most_recent"), 1.0),
        (DelayedScaling(history_len=3, algorithm="most_recent", margin=1), 2.0),
    ],
    ids=["max", "most recent", "margin"],
)
def test_algorithms(recipe, largest, case):
    state = state_of([1, 2, 3], [10] * 3, [10] * 3)
    y = ops.dense(case.x * 10, case.kernel, recipe=recipe, scaling_state=state)
    assert_close(
        y, np.clip(wide(case.x * 10), -largest, largest) @ wide(case.kernel), dtype="bfloat16", tolerance=0.055
    )


def test_the_first_step_has_scales_of_one(case):
    state = RECIPE.init()
    y = ops.dense(case.x, case.kernel, recipe=RECIPE, scaling_state=state)
    fp8 = [wide(a.astype(jnp.float8_e4m3fn)) for a in (case.x, case.kernel)]
    assert_close(y, fp8[0] @ fp8[1], dtype="bfloat16")


def test_training_loop(rng):
    """The state advances over steps and is used: as gradients grow a millionfold its scales keep up with them."""
    case = random_case(rng, (64,), (64,), (64,), with_bias=False)
    recipe = DelayedScaling(history_len=2, algorithm="most_recent")

    @jax.jit
    def step(state, factor):
        dkernel, state = jax.grad(loss, argnums=(1, 2))(
            case.x, case.kernel, state, case.dy.astype(jnp.float32) * factor, recipe
        )
        return dkernel, state

    state = recipe.init()
    for i in range(12):
        factor = 4.0**i
        dkernel, state = step(state, factor)
        assert histories(state)[2][0] == pytest.approx(amax(case.dy) * factor, rel=1e-2)
    without, _ = step(recipe.init(), factor)
    expected = oracle(case).dkernel * factor
    for _ in range(2):
        dkernel, state = step(state, factor)
    assert relative_error(dkernel, expected) < 0.085
    assert relative_error(without, expected) > 0.5  # the gradients saturate without it


def test_kernel_that_was_quantized_before_is_not_observed(case):
    state = state_of([4] * 4, [3, 2, 1, 0], [4] * 4)
    kernel = ops.quantize(case.kernel, RECIPE.quantization("kernel"), amax=jnp.float32(1))
    found = next_state_of(case.x, kernel, state, case.dy)
    assert histories(found) == [[amax(case.x), 4, 4, 4], [3, 2, 1, 0], [amax(case.dy), 4, 4, 4]]


def test_empty_batch_observes_nothing_but_the_kernel(case):
    state = state_of([4] * 4, [3] * 4, [2] * 4)
    found = next_state_of(case.x[:0], case.kernel, state, case.dy[:0])
    assert histories(found) == [[0, 4, 4, 4], [amax(case.kernel), 3, 3, 3], [0, 2, 2, 2]]


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("history_len", [1, 3])
def test_steps_of_zeros_leave_the_scale_alone(history_len, algorithm, case):
    """Scales of 1 would follow, for which gradients as small as these are zeros in E5M2."""
    kept = DelayedScaling(history_len=history_len, algorithm=algorithm)
    dy = (case.dy * 1e-7).astype(case.dy.dtype)

    def step(state, dy):
        return gradients_of(case.x, case.kernel, None, dy, state, recipe=kept)[1]

    state = step(kept.init(), dy)[3]
    expected = step(state, dy)[0]
    for _ in range(history_len + 2):
        state = step(state, jnp.zeros_like(dy))[3]
        assert float(kept.reference_amax(state.gradient)) == amax(dy)
    np.testing.assert_array_equal(wide(step(state, dy)[0]), wide(expected))
    halved = step(state, dy / 2)[3]
    assert histories(halved)[2][0] == amax(dy / 2)


def test_padding_is_not_observed_in_the_wrong_place(case):
    found = next_state_of(case.x[:5], case.kernel, RECIPE.init(), case.dy[:5])
    assert histories(found) == [[amax(a), 0, 0, 0] for a in (case.x[:5], case.kernel, case.dy[:5])]


@pytest.mark.parametrize("poison", [np.inf, np.nan])
def test_what_is_not_finite_is_shown_and_not_remembered(poison, implementation, case):
    state = state_of([4, 3, 2, 1], [8, 7, 6, 5], [12, 11, 10, 9])
    operands = [a.at[0, 0].set(poison) for a in (case.x, case.kernel, case.dy)]
    y, (_, dkernel, _, found) = gradients_of(
        *operands[:2], None, operands[2], state, recipe=RECIPE, implementation=implementation
    )
    assert not np.isfinite(wide(y)[0]).any()
    assert not np.isfinite(wide(dkernel)[0]).any()
    assert histories(found) == [[4, 4, 3, 2], [8, 8, 7, 6], [12, 12, 11, 10]]


def test_the_step_after_one_that_overflowed_scales_as_before(case):
    """Gradients too small for FP8 at a scale of 1, which an infinity in the history would lead to."""
    small, overflown = case.dy * 2.0**-30, case.dy * jnp.bfloat16(np.inf)
    state = next_state_of(case.x, case.kernel, RECIPE.init(), small)
    state = next_state_of(case.x, case.kernel, state, overflown)
    _, (_, dkernel, _, _) = gradients_of(case.x, case.kernel, None, small, state, recipe=RECIPE)
    assert_close(dkernel, oracle(case).dkernel * 2.0**-30, dtype="bfloat16", tolerance=0.085)


# ------------------------------------------------------------------------------------------------------------- outliers


def test_an_outlier_costs_its_own_step_alone(implementation, case):
    """1e30 in every operand: with it in the history, all other values would be zero for as long as it is there."""
    recipe = DelayedScaling()
    small, large = ([a.at[3, 5].set(value) for a in (case.x, case.kernel, case.dy)] for value in (1.0, 1e30))

    def step(operands, state):
        x, kernel, dy = operands
        return gradients_of(x, kernel, None, dy, state, recipe=recipe, implementation=implementation)

    state = recipe.init()
    for operands in (small, large, small):
        y, (dx, dkernel, _, state) = step(operands, state)
    x, kernel, dy = map(wide, small)
    assert relative_error(y, x @ kernel) < 0.055
    assert relative_error(dx, dy @ kernel.T) < 0.085
    assert relative_error(dkernel, x.T @ dy) < 0.085
    expected = [[amax(a), 16 * amax(a), amax(a), 0] for a in small]
    assert [history[:4] for history in histories(state)] == expected


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_growth_is_followed(algorithm, case):
    """With room for growth by 4, values that grow by 4 in every step never saturate."""
    recipe = DelayedScaling(history_len=4, algorithm=algorithm, margin=2)
    state = recipe.init()
    for i in range(8):
        x = case.x * 4**i
        y, (_, _, _, state) = gradients_of(x, case.kernel, None, case.dy, state, recipe=recipe)
        assert relative_error(y, wide(x) @ wide(case.kernel)) < 0.055
        assert float(state.activation[0]) == amax(x)


def test_growth_by_a_thousand_is_followed_in_three_steps(case):
    x, state = case.x * 1000, next_state_of(case.x, case.kernel, RECIPE.init(), case.dy)
    for expected in (16 * amax(case.x), 256 * amax(case.x), amax(x)):
        state = next_state_of(x, case.kernel, state, case.dy)
        assert float(state.activation[0]) == expected


def test_a_margin_that_overflows():
    """The scale is then as small as it can be, and not 1."""
    recipe = DelayedScaling(history_len=2, margin=64)
    assert float(recipe.reference_amax(jnp.asarray([1e30, 1.0]))) == np.finfo(np.float32).max


# -------------------------------------------------------------------------------------------------------------- sharing


def two_uses(x, kernel, state, dy):
    """A layer twice, with one kernel and one state."""
    hidden = ops.dense(x, kernel, recipe=RECIPE, scaling_state=state)
    return loss(hidden, kernel, state, dy)


@pytest.fixture
def square(rng):
    """A layer, a state that has seen it, and the amaxes of its two uses by role."""
    case = random_case(rng, (32,), (32,), (32,), with_bias=False)
    state = state_of([amax(case.x) * 3] * 4, [amax(case.kernel)] * 4, [amax(case.dy) * 3] * 4)
    hidden = ops.dense(case.x, case.kernel, recipe=RECIPE, scaling_state=state)
    gradient = jax.grad(loss)(hidden, case.kernel, state, case.dy)
    seen = [(amax(case.x), amax(hidden)), (amax(case.kernel),) * 2, (amax(case.dy), amax(gradient))]
    return case, state, seen


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
def test_a_state_that_is_used_twice(remat, jit, square):
    """The newest amaxes add up, which none exceeds; the older ones are as they were."""
    case, state, seen = square
    run = jax.checkpoint(two_uses) if remat else two_uses
    step = jax.grad(run, argnums=2)
    step = jax.jit(step) if jit else step
    found = step(case.x, case.kernel, state, case.dy)
    assert found.uses == 2
    for role, before, two in zip(ROLES, histories(state), seen, strict=True):
        np.testing.assert_allclose(getattr(found, role), [sum(two), *(2 * h for h in before[:-1])], rtol=1e-6)
    for _ in range(5):  # neither grows without end nor forgets
        found = step(case.x, case.kernel, found, case.dy)
        assert found.kernel[0] == pytest.approx(2 * amax(case.kernel))
    np.testing.assert_allclose(found.kernel[1:] / found.uses, 2 * amax(case.kernel), rtol=1e-6)


@pytest.mark.parametrize("poison", [np.inf, np.nan])
def test_two_uses_that_are_not_finite_repeat_the_newest_amax(poison, square):
    case, state, _ = square
    step = jax.jit(jax.grad(two_uses, argnums=2))
    before = found = step(case.x, case.kernel, state, case.dy)
    for _ in range(6):
        found = step(case.x.at[0, 0].set(poison), case.kernel, found, case.dy)
        assert found.activation[0] == pytest.approx(float(before.activation[0]))


def test_an_outlier_in_one_of_two_uses(square):
    """The limit is that of a use, in terms of the history before the step."""
    case, state, seen = square
    step = jax.jit(jax.grad(two_uses, argnums=2))
    found = step(case.x.at[0, 0].set(1e30), case.kernel, state, case.dy)
    before = float(state.activation[0])
    assert found.activation[0] == pytest.approx(16 * before, rel=0.1)
    assert found.kernel[0] == pytest.approx(sum(seen[1]))
    after = step(case.x, case.kernel, found, case.dy)
    assert after.activation[0] == pytest.approx(sum(seen[0]), rel=0.05)


def test_two_uses_of_zeros_keep_the_scale(square):
    case, state, _ = square
    step = jax.jit(jax.grad(two_uses, argnums=2))
    found = step(case.x, case.kernel, state, case.dy)
    for _ in range(6):
        found = step(case.x, case.kernel, found, 0 * case.dy)
        known = RECIPE.reference_amax(jnp.asarray(found.gradient) / jnp.asarray([1, *[found.uses] * 3]))
        assert 0 < known <= 2 * 3 * amax(case.dy)


def test_merge_of_states_of_microbatches(case):
    """The exact maximum, where each microbatch has a gradient of its own."""
    state = state_of([4] * 4, [3] * 4, [2] * 4)
    first, second = (next_state_of(case.x * f, case.kernel, state, case.dy * f) for f in (1, 8))
    found = merge(first, second)
    assert found.uses == 1
    for role in ROLES:
        assert_close(getattr(found, role), np.maximum(getattr(first, role), getattr(second, role)))
    assert found.activation[0] == second.activation[0]


def test_a_state_that_a_step_does_not_use_stays(case):
    state = state_of([1, 2, 3, 4], [5, 6, 7, 8], [9, 8, 7, 6])

    def run(state, use):
        return lax.cond(use, lambda: loss(case.x, case.kernel, state, case.dy), lambda: jnp.float32(0))

    step = jax.jit(lambda state, use: advance(state, jax.grad(run)(state, use)))
    assert histories(step(state, False)) == histories(state)
    assert histories(step(state, True))[0] == [amax(case.x), 1, 2, 3]


@pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
def test_state_closed_over_in_a_scan(remat, rng):
    """One state for all microbatches of a loop in the loss."""
    case = random_case(rng, (4, 32), (32,), (32,), with_bias=False)
    factors = jnp.asarray([1.0, 4.0, 2.0, 0.5], jnp.bfloat16)
    state = state_of([20] * 4, [1] * 4, [20] * 4)

    def total(state):
        def body(carry, microbatch):
            x, dy, factor = microbatch
            return carry + loss(x * factor, case.kernel, state, dy * factor), None

        body = jax.checkpoint(body) if remat else body
        return lax.scan(body, jnp.float32(0), (case.x, case.dy, factors))[0]

    found = jax.jit(jax.grad(total))(state)
    seen = [sum(amax(a * f) for a, f in zip(x, factors, strict=True)) for x in (case.x, case.dy)]
    expected = [[seen[0], 80, 80, 80], [4 * amax(case.kernel), 4, 4, 4], [seen[1], 80, 80, 80]]
    np.testing.assert_allclose(histories(found), expected, rtol=1e-6)
    assert found.uses == 4


def test_state_as_the_carry_of_a_scan_over_steps(rng):
    case = random_case(rng, (3, 32), (32,), (32,), with_bias=False)

    def step(state, microbatch):
        return jax.grad(loss, argnums=2)(microbatch[0], case.kernel, state, microbatch[1]), None

    found, _ = jax.jit(lambda state: lax.scan(step, state, (case.x, case.dy)))(RECIPE.init())
    assert histories(found)[0] == [amax(case.x[2]), amax(case.x[1]), amax(case.x[0]), 0]
    assert histories(found)[2] == [amax(case.dy[2]), amax(case.dy[1]), amax(case.dy[0]), 0]


def test_export(case):
    """A step whose argument and result is a state."""
    pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
    step = jax.jit(jax.grad(functools.partial(loss, implementation="reference"), argnums=2))
    operands = case.x, case.kernel, state_of([1, 2, 3, 4], [5, 6, 7, 8], [9, 8, 7, 6]), case.dy
    exported = jax.export.deserialize(jax.export.export(step)(*operands).serialize())
    assert histories(exported.call(*operands)) == histories(step(*operands))


def test_vmap_over_examples_that_share_a_state(rng):
    case = random_case(rng, (3, 32), (32,), (32,), with_bias=False)
    state = state_of([5] * 4, [1] * 4, [5] * 4)

    def total(state):
        return jnp.sum(jax.vmap(loss, in_axes=(0, None, None, 0))(case.x, case.kernel, state, case.dy))

    found = jax.jit(jax.grad(total))(state)
    assert histories(found) == [[amax(case.x), 5, 5, 5], [amax(case.kernel), 1, 1, 1], [amax(case.dy), 5, 5, 5]]


def test_vmap_over_no_examples(case):
    """What they share sees what an empty batch shows: nothing but the kernel."""

    def total(state, x, dy):
        return jnp.sum(jax.vmap(loss, in_axes=(0, None, None, 0))(x, case.kernel, state, dy))

    nothing = jnp.zeros((0, *case.x.shape), case.x.dtype), jnp.zeros((0, *case.dy.shape), case.dy.dtype)
    found = jax.grad(total)(state_of([4] * 4, [3] * 4, [2] * 4), *nothing)
    assert histories(found) == [[0, 4, 4, 4], [amax(case.kernel), 3, 3, 3], [0, 2, 2, 2]]


@pytest.mark.parametrize("poison", [np.inf, np.nan])
@pytest.mark.parametrize("share", ["vmap", "merge"])
def test_a_shared_state_stays_finite(share, poison, rng):
    """The first of three microbatches is spoilt. A maximum of histories takes the others' magnitudes."""
    case = random_case(rng, (3, 32), (32,), (32,), with_bias=False)
    x = case.x.at[0, 0, 0].set(poison)
    state = state_of([2] * 4, [1] * 4, [3] * 4)
    whole = jax.vmap(loss, in_axes=(0, None, None, 0))
    if share == "vmap":  # one tensor, of which one magnitude is known
        found = jax.jit(jax.grad(lambda state: jnp.sum(whole(x, case.kernel, state, case.dy))))(state)
        seen = 2.0
    else:
        found = merge(*(next_state_of(x[i], case.kernel, state, case.dy[i]) for i in range(3)))
        seen = max(2.0, amax(x[1:]))
    assert histories(found) == [[seen, 2, 2, 2], [amax(case.kernel), 1, 1, 1], [amax(case.dy), 3, 3, 3]]


# ------------------------------------------------------------------------------------------------------------ wrong use


def test_training_without_the_next_state_is_an_error(case):
    """A loop that forgets the state would keep scales of 1 for ever."""
    state = RECIPE.init()
    accumulator = jnp.zeros(case.kernel.shape)
    message = "the kernel is differentiated and scaling_state is not"
    with pytest.raises(ValueError, match=message):
        jax.grad(loss, argnums=1)(case.x, case.kernel, state, case.dy)
    with pytest.raises(ValueError, match=message):
        jax.jit(jax.grad(lambda a: loss(case.x, case.kernel, state, case.dy, wgrad_accumulator=a)))(accumulator)
    jax.grad(loss)(case.x, case.kernel, state, case.dy)  # a frozen kernel


@pytest.mark.parametrize("role", ROLES)
def test_a_negative_history_gives_nan(role, implementation, case):
    """An optimizer that updates all variables makes it so."""
    state = state_of([4] * 4, [5] * 4, [6] * 4)
    state = dataclasses.replace(state, **{role: getattr(state, role).at[2].set(-0.3)})
    y, (dx, dkernel, _, _) = gradients_of(
        case.x, case.kernel, None, case.dy, state, recipe=RECIPE, implementation=implementation
    )
    assert np.isnan(wide(y)).all() == (role != "gradient")
    assert np.isnan(wide(dx)).all() == (role != "activation")
    assert np.isnan(wide(dkernel)).all() == (role != "kernel")


@pytest.mark.parametrize("uses", [0.999, 1 / 1024, -1.0, np.nan])
def test_a_fraction_of_uses_gives_nan(uses, case):
    """As when all gradients are divided by a loss scale, the state's among them."""
    state = state_of([4] * 4, [5] * 4, [6] * 4, uses=uses)
    assert np.isnan(wide(ops.dense(case.x, case.kernel, recipe=RECIPE, scaling_state=state))).all()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_an_optimizer_that_updates_the_state_ends_in_nan(optimizer, case):
    optax = pytest.importorskip("optax")
    variables = {"kernel": case.kernel.astype(jnp.float32), "state": RECIPE.init()}
    tx = getattr(optax, optimizer)(1e-2)
    slots = tx.init(variables)

    @jax.jit
    def step(variables, slots):
        def total(variables):
            return loss(case.x, variables["kernel"], variables["state"], case.dy)

        value, gradients = jax.value_and_grad(total)(variables)
        updates, slots = tx.update(gradients, slots, variables)
        return value, optax.apply_updates(variables, updates), slots

    losses = []
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(3):
            value, variables, slots = step(variables, slots)
            losses.append(float(value))
    assert np.isnan(losses[1:]).all()


# -------------------------------------------------------------------------------------------------------- data parallel


@pytest.mark.parametrize("poison", [np.inf, np.nan])
@pytest.mark.parametrize("kind", ["auto", "explicit", "shard_map", "untracked"])
def test_what_is_not_finite_on_one_device_is_remembered_on_none(kind, poison, make_mesh, rng):
    mesh = make_mesh({"data": AxisType.Explicit if kind == "explicit" else AxisType.Auto})
    case = random_case(rng, (16 * mesh.size,), (32,), (32,), with_bias=False)
    x, state = case.x.at[-1, 3].set(poison), state_of([4] * 4, [5] * 4, [6] * 4)
    if kind in ("auto", "explicit"):
        x, dy = (jax.device_put(a, NamedSharding(mesh, P("data"))) for a in (x, case.dy))
        found = next_state_of(x, *jax.device_put((case.kernel, state), NamedSharding(mesh, P())), dy)
    else:
        tracked = kind == "shard_map"
        run = jax.shard_map(
            lambda *a: jax.grad(loss, argnums=2)(*a, state_axis=None if tracked else "data"),
            mesh=mesh, in_specs=(P("data"), P(), P(), P("data")), out_specs=P(), check_vma=tracked,
        )  # fmt: skip
        found = jax.jit(run)(x, case.kernel, state, case.dy)
    assert histories(found) == [[4, 4, 4, 4], [amax(case.kernel), 5, 5, 5], [amax(case.dy), 6, 6, 6]]
    for leaf in jax.tree.leaves(found):
        assert len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) == 1


@pytest.mark.parametrize("inside", [False, True], ids=["gradient of shard_map", "gradient in shard_map"])
def test_shard_map(inside, make_mesh, rng):
    mesh = make_mesh({"data": AxisType.Auto})
    case = random_case(rng, (16 * mesh.size,), (32,), (32,), with_bias=False)
    x = case.x.at[-1, 3].set(77.0)

    def local(x, kernel, state, dy):
        return lax.psum(loss(x, kernel, state, dy), "data")

    specs = (P("data"), P(), P(), P("data"))
    if inside:
        run = jax.shard_map(jax.grad(local, argnums=2), mesh=mesh, in_specs=specs, out_specs=P())
    else:
        run = jax.grad(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P()), argnums=2)
    found = jax.jit(run)(x, case.kernel, RECIPE.init(), case.dy)
    assert histories(found) == [[77, 0, 0, 0], [amax(case.kernel), 0, 0, 0], [amax(case.dy), 0, 0, 0]]


def test_states_of_devices_that_have_one_each(make_mesh, rng):
    """As of layers or experts that lie on different devices: each state sees what its own device does."""
    mesh = make_mesh({"data": AxisType.Auto})
    case = random_case(rng, (mesh.size, 16), (32,), (32,), with_bias=False)
    states = jax.tree.map(lambda history: jnp.zeros((mesh.size, *history.shape)), RECIPE.init())

    def local(x, kernel, state, dy):
        state = jax.tree.map(lambda history: history[0], state)
        return jax.tree.map(lambda history: history[None], jax.grad(loss, argnums=2)(x, kernel, state, dy))

    specs = (P("data"), P(), P("data"), P("data"))
    found = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("data")))(
        case.x, case.kernel, states, case.dy
    )
    assert found.activation[:, 0].tolist() == [amax(x) for x in case.x]
    assert found.kernel[:, 0].tolist() == [amax(case.kernel)] * mesh.size
    assert found.gradient[:, 0].tolist() == [amax(dy) for dy in case.dy]


@pytest.mark.parametrize("kind", ["pmap", "shard_map"])
def test_state_axis_where_nothing_is_tracked(kind, make_mesh, rng):
    mesh = make_mesh({"data": AxisType.Auto})
    case = random_case(rng, (mesh.size, 16), (32,), (32,), with_bias=False)
    x = case.x.at[-1, 3, 3].set(77.0)

    def local(x, kernel, state, dy):
        return jax.grad(loss, argnums=2)(x, kernel, state, dy, state_axis="data")

    if kind == "pmap":
        run = jax.pmap(local, axis_name="data", in_axes=(0, None, None, 0))
        found = jax.tree.map(lambda h: h[0], run(x, case.kernel, RECIPE.init(), case.dy))
    else:
        run = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P(), P(), P("data")), out_specs=P(), check_vma=False)
        found = jax.jit(run)(x, case.kernel, RECIPE.init(), case.dy)
    assert histories(found) == [[77, 0, 0, 0], [amax(case.kernel), 0, 0, 0], [amax(case.dy), 0, 0, 0]]


def test_state_can_be_donated(case):
    state = RECIPE.init()
    step = jax.jit(jax.grad(loss, argnums=2), donate_argnums=2)
    for _ in range(3):
        state = step(case.x, case.kernel, state, case.dy)
    assert histories(state)[0] == [amax(case.x)] * 3 + [0]


def gated_mlp(x, kernel, *, scaling_state, **options):
    return ops.gated_mlp(x, (kernel, kernel, kernel.T), scaling_state=(scaling_state,) * 3, **options)


@pytest.mark.parametrize("layer", [ops.dense, gated_mlp])
def test_a_gradient_after_one_that_was_refused(layer, case):
    """The trace of a derivative rule that raised must not be used again."""

    def loss(kernel, state):
        return layer(case.x, kernel, recipe=RECIPE, scaling_state=state).sum()

    step = jax.grad(loss, argnums=(0, 1))
    state = state_of([4] * 4, [5] * 4, [6] * 4)
    expected, _ = step(case.kernel, state)
    with pytest.raises(ValueError, match="scaling_state is not"):
        jax.grad(loss)(case.kernel, state)
    found, _ = step(case.kernel, state)
    np.testing.assert_array_equal(wide(found), wide(expected))
