"""Delayed scaling: the state advances, is used, and stays right wherever it is shared."""

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
from te_jax.recipe import DelayedScaling, DelayedScalingState, accumulating, merge
from te_jax.testing import assert_close, relative_error

RECIPE = DelayedScaling(history_len=4)
ROLES = ("activation", "kernel", "gradient")


def amax(x):
    return float(np.abs(wide(x)).max())


def state_of(*histories):
    return DelayedScalingState(*(jnp.asarray(history, jnp.float32) for history in histories))


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


# -------------------------------------------------------------------------------------------------------------- sharing


def two_uses(x, kernel, state, dy, share):
    """A layer twice, with one kernel and one state."""
    state = share(state)
    hidden = ops.dense(x, kernel, recipe=RECIPE, scaling_state=state)
    return loss(hidden, kernel, state, dy)


@pytest.fixture
def square(rng):
    """A layer and the state that has seen it once, and what its second use sees then."""
    case = random_case(rng, (32,), (32,), (32,), with_bias=False)
    state = state_of([amax(case.x) * 3] * 4, [amax(case.kernel)] * 4, [amax(case.dy) * 3] * 4)
    first = next_state_of(case.x, case.kernel, state, case.dy)
    hidden = ops.dense(case.x, case.kernel, recipe=RECIPE, scaling_state=state)
    second = next_state_of(hidden, case.kernel, state, case.dy)
    gradient = jax.grad(loss)(hidden, case.kernel, state, case.dy)
    return (
        case,
        state,
        first,
        second,
        [max(amax(case.x), amax(hidden)), amax(case.kernel), max(amax(case.dy), amax(gradient))],
    )


@pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
def test_shared_state_is_the_maximum_and_not_the_sum(remat, square):
    case, state, _, _, largest = square
    run = functools.partial(two_uses, share=accumulating)
    run = jax.checkpoint(run) if remat else run
    found = jax.jit(jax.grad(run, argnums=2))(case.x, case.kernel, state, case.dy)
    for history, before, seen in zip(histories(found), histories(state), largest, strict=True):
        assert history == pytest.approx([seen, *before[:-1]])
    # Floats would add up: what accumulating is there for.
    summed = jax.jit(jax.grad(functools.partial(two_uses, share=lambda s: s), argnums=2))(
        case.x, case.kernel, state, case.dy
    )
    assert histories(summed)[1][0] == pytest.approx(2 * largest[1])


def test_merge_of_states_of_microbatches(square):
    _, _, first, second, _ = square
    found = merge(first, second)
    for role in ROLES:
        assert_close(getattr(found, role), np.maximum(getattr(first, role), getattr(second, role)))


@pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
def test_state_closed_over_in_a_scan(remat, rng):
    """One state for all microbatches of a loop in the loss."""
    case = random_case(rng, (4, 32), (32,), (32,), with_bias=False)
    factors = jnp.asarray([1.0, 4.0, 2.0, 0.5], jnp.bfloat16)
    state = state_of([20] * 4, [1] * 4, [20] * 4)

    def total(state):
        state = accumulating(state)

        def body(carry, microbatch):
            x, dy, factor = microbatch
            return carry + loss(x * factor, case.kernel, state, dy * factor), None

        body = jax.checkpoint(body) if remat else body
        return lax.scan(body, jnp.float32(0), (case.x, case.dy, factors))[0]

    found = jax.jit(jax.grad(total))(state)
    seen = [amax(a * factors[:, None, None]) for a in (case.x, case.dy)]
    assert histories(found) == [[seen[0], 20, 20, 20], [amax(case.kernel), 1, 1, 1], [seen[1], 20, 20, 20]]


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


def test_states_of_layers_in_a_scan(rng):
    """Stacked states, as stacked kernels: each layer advances its own."""
    x = jnp.asarray(rng.standard_normal((32, 32)), jnp.bfloat16)
    kernels = jnp.asarray(rng.standard_normal((3, 32, 32)) / 6, jnp.bfloat16)
    states = jax.tree.map(lambda h: jnp.broadcast_to(h + 10, (3, 4)), RECIPE.init())

    def run(states):
        def body(x, layer):
            kernel, state = layer
            return ops.dense(x, kernel, recipe=RECIPE, scaling_state=state), None

        return jnp.sum(lax.scan(body, x, (kernels, states))[0].astype(jnp.float32))

    found = jax.jit(jax.grad(run))(states)
    assert_close(found.kernel[:, 0], np.abs(wide(kernels)).max(axis=(1, 2)), dtype="float32")
    assert_close(found.activation[0, 0], jnp.float32(amax(x)))
    assert_close(found.gradient[2, 0], jnp.float32(1))
    assert_close(found.gradient[:, 1:], jnp.full((3, 3), 10.0))


@pytest.mark.parametrize("share", [accumulating, lambda state: state], ids=["accumulating", "plain"])
def test_vmap_over_examples_that_share_a_state(share, rng):
    case = random_case(rng, (3, 32), (32,), (32,), with_bias=False)
    state = state_of([5] * 4, [1] * 4, [5] * 4)

    def total(state):
        return jnp.sum(jax.vmap(loss, in_axes=(0, None, None, 0))(case.x, case.kernel, share(state), case.dy))

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
@pytest.mark.parametrize("share", ["vmap", "accumulating", "merge"])
def test_a_shared_state_stays_finite(share, poison, rng):
    """The first of three microbatches is spoilt. A maximum of histories takes the others' magnitudes."""
    case = random_case(rng, (3, 32), (32,), (32,), with_bias=False)
    x = case.x.at[0, 0, 0].set(poison)
    state = state_of([2] * 4, [1] * 4, [3] * 4)
    whole = jax.vmap(loss, in_axes=(0, None, None, 0))

    def one_by_one(state):
        state = accumulating(state)
        return sum(loss(x[i], case.kernel, state, case.dy[i]) for i in range(3))

    if share == "vmap":  # one tensor, of which one magnitude is known
        found = jax.jit(jax.grad(lambda state: jnp.sum(whole(x, case.kernel, state, case.dy))))(state)
        seen = 2.0
    elif share == "accumulating":
        found, seen = jax.jit(jax.grad(one_by_one))(state), max(2.0, amax(x[1:]))
    else:
        found = merge(*(next_state_of(x[i], case.kernel, state, case.dy[i]) for i in range(3)))
        seen = max(2.0, amax(x[1:]))
    assert histories(found) == [[seen, 2, 2, 2], [amax(case.kernel), 1, 1, 1], [amax(case.dy), 3, 3, 3]]


def test_vmap_over_states(rng):
    case = random_case(rng, (3, 32), (32,), (32,), with_bias=False)
    states = jax.tree.map(lambda h: jnp.stack([h + i for i in (4.0, 5.0, 6.0)]), RECIPE.init())
    found = jax.vmap(jax.grad(loss, argnums=2), in_axes=(0, None, 0, 0))(case.x, case.kernel, states, case.dy)
    for i in range(3):
        assert np.asarray(found.activation[i]).tolist() == [amax(case.x[i]), *[4.0 + i] * 3]


def test_vmap_over_states_alone(implementation, case):
    states = jax.tree.map(lambda h: jnp.stack([h + i for i in (4.0, 5.0)]), RECIPE.init())
    next_states = jax.grad(functools.partial(loss, implementation=implementation), argnums=2)
    found = jax.vmap(next_states, in_axes=(None, None, 0, None))(case.x, case.kernel, states, case.dy)
    for i in range(2):
        assert found.activation[i].tolist() == [amax(case.x), *[4.0 + i] * 3]
        assert found.kernel[i].tolist() == [amax(case.kernel), *[4.0 + i] * 3]


def test_unused_accumulating_state_stays(case):
    state = state_of([1, 2, 3, 4], [5, 6, 7, 8], [9, 8, 7, 6])

    def run(state, use):
        state = accumulating(state)
        return lax.cond(use, lambda: loss(case.x, case.kernel, state, case.dy), lambda: jnp.float32(0))

    unused = jax.jit(jax.grad(run))(state, False)
    assert histories(unused) == histories(state)
    used = jax.jit(jax.grad(run))(state, True)
    assert histories(used)[0] == [amax(case.x), 1, 2, 3]


def test_accumulating_outside_of_jit_says_so():
    with pytest.raises(TypeError, match=r"exists inside jax\.jit only"):
        accumulating(RECIPE.init())


# -------------------------------------------------------------------------------------------------------- data parallel


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_data_parallel(axis_type, native_kernels, make_mesh, rng):
    """What is observed is the magnitude of the whole batch, on every device."""
    mesh = make_mesh({"data": axis_type})
    case = random_case(rng, (16 * mesh.size,), (32,), (32,), with_bias=False)
    x = case.x.at[-1, 3].set(77.0)  # on the last device
    placed = [jax.device_put(a, NamedSharding(mesh, P("data"))) for a in (x, case.dy)]
    kernel, state = jax.device_put((case.kernel, RECIPE.init()), NamedSharding(mesh, P()))
    found = next_state_of(placed[0], kernel, state, placed[1])
    assert histories(found) == [[77, 0, 0, 0], [amax(case.kernel), 0, 0, 0], [amax(case.dy), 0, 0, 0]]
    for leaf in jax.tree.leaves(found):
        assert len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) == 1


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
            lambda *a: jax.grad(loss, argnums=2)(*a, axis_name=None if tracked else "data"),
            mesh=mesh, in_specs=(P("data"), P(), P(), P("data")), out_specs=P(), check_vma=tracked,
        )  # fmt: skip
        found = jax.jit(run)(x, case.kernel, state, case.dy)
    assert histories(found) == [[4, 4, 4, 4], [amax(case.kernel), 5, 5, 5], [amax(case.dy), 6, 6, 6]]
    for leaf in jax.tree.leaves(found):
        assert len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) == 1


@pytest.mark.parametrize("share", [accumulating, lambda state: state], ids=["accumulating", "plain"])
@pytest.mark.parametrize("inside", [False, True], ids=["gradient of shard_map", "gradient in shard_map"])
def test_shard_map(inside, share, make_mesh, rng):
    mesh = make_mesh({"data": AxisType.Auto})
    case = random_case(rng, (16 * mesh.size,), (32,), (32,), with_bias=False)
    x = case.x.at[-1, 3].set(77.0)

    def local(x, kernel, state, dy):
        return lax.psum(loss(x, kernel, share(state), dy), "data")

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
def test_axis_name_where_nothing_is_tracked(kind, make_mesh, rng):
    mesh = make_mesh({"data": AxisType.Auto})
    case = random_case(rng, (mesh.size, 16), (32,), (32,), with_bias=False)
    x = case.x.at[-1, 3, 3].set(77.0)

    def local(x, kernel, state, dy):
        return jax.grad(loss, argnums=2)(x, kernel, state, dy, axis_name="data")

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


def test_state_of_another_extended_dtype(case):
    """Flax's own dtype for such states, for those who keep them in it."""
    fp8_ops = pytest.importorskip("flax.linen.fp8_ops")

    def run(state):
        def twice(state):
            return loss(case.x, case.kernel, state, case.dy) + loss(case.x * 2, case.kernel, state, case.dy)

        state = jax.tree.map(lambda h: lax.convert_element_type(h, fp8_ops.fm32), state)
        (state,) = jax.vjp(twice, state)[1](jnp.float32(1))
        return jax.tree.map(lambda h: lax.convert_element_type(h, jnp.float32), state)

    found = jax.jit(run)(RECIPE.init())
    assert histories(found) == [[2 * amax(case.x), 0, 0, 0], [amax(case.kernel), 0, 0, 0], [amax(case.dy), 0, 0, 0]]
