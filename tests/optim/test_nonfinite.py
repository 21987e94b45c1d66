"""Steps that are left out, and the scale of a loss: what they change, what they leave, and that nobody waits for it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from optim_cases import FLOAT8, adam_state, assert_same, normal_like

from te_jax import optim

SHAPES = {"kernel": (3, 200), "bias": (7,)}
WRAPPERS = {"skip": optim.skip_nonfinite, "loss scale": optim.dynamic_loss_scale}
wrappers = pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)


def adamw(**options):
    rate = optax.linear_schedule(0.1, 0.0, 10)
    return optim.adamw(rate, mu_dtype="bfloat16", nu_dtype=FLOAT8, **options)


def with_one(gradients, name, value):
    changed = np.array(gradients[name])
    changed[(1,) * changed.ndim] = value
    return {**gradients, name: jax.device_put(changed)}


WITH_MASTERS = {"master_dtype": "int16", "weight_decay": 0.1}
LEFT_OUT = {
    "skip": (optim.skip_nonfinite(adamw()), "float32", np.nan),
    "loss scale": (optim.dynamic_loss_scale(adamw()), "float32", np.inf),
    "option": (adamw(skip_nonfinite=True, **WITH_MASTERS), "bfloat16", -np.inf),
    "loss scale of masters": (optim.dynamic_loss_scale(adamw(**WITH_MASTERS)), "bfloat16", np.nan),
}


@pytest.mark.parametrize(("transform", "dtype", "value"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_a_step_is_left_out(transform, dtype, value, rng):
    """Parameters, moments, masters, schedule and random bits are those of a run that never saw it."""
    params = normal_like(rng, {name: np.zeros(shape, dtype) for name, shape in SHAPES.items()})
    good = [normal_like(rng, params) for _ in range(2)]
    bad = [with_one(good[0], name, value) for name in params]

    @jax.jit
    def step(params, state, g):
        if isinstance(state, optim.DynamicLossScaleState):
            g = jax.tree.map(lambda g: g * optim.loss_scale(state).astype(g.dtype), g)
        updates, state = transform.update(g, state, params)
        return optim.apply_updates(params, updates), state

    def run(gradients):
        new, state = params, start
        for g in gradients:
            new, state = step(new, state, g)
        return new, state

    start = transform.init(params)
    after, state = run(bad[:1])
    assert_same((after, state.inner), (params, start.inner))
    after, state = run([good[0], *bad, good[1]])
    assert (state.skipped, adam_state(state).count) == (2, 2)
    expected, expected_state = run(good)
    assert_same((after, state.inner), (expected, expected_state.inner))


@wrappers
def test_nothing_waits_for_the_decision(wrapper):
    """By selection: no branch, and nothing for the host to look at."""
    transform = wrapper(optax.trace(0.9))
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    abstract = params, jax.eval_shape(transform.init, params)
    text = jax.jit(transform.update).lower(*abstract, abstract[0]).compile().as_text()
    assert "select" in text
    for operation in ("conditional", "while", "outfeed", "infeed", "callback", "send("):
        assert operation not in text


@pytest.mark.parametrize("axis_name", ["data", ("data", "model")], ids=str)
@wrappers
def test_shards_decide_alike(wrapper, axis_name, make_mesh, rng):
    mesh = make_mesh({"data": AxisType.Auto, "model": AxisType.Auto})
    spec = P("data") if axis_name == "data" else P("data", "model")
    params, g = (normal_like(rng, np.zeros((8, 4), np.float32)) for _ in range(2))
    transform = wrapper(optim.adam(0.1), axis_name=axis_name)
    state = transform.init(params)
    specs = jax.tree.map(lambda x: spec if x.ndim else P(), state)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(spec, specs), out_specs=(spec, specs))
    def update(g, state):
        return transform.update(g, state)

    updates, after = update(g, state)
    assert after.skipped == 0
    assert (np.asarray(updates) != 0).all()
    updates, after = update(g.at[5, 3].set(jnp.nan), state)
    assert after.skipped == 1
    assert_same(updates, jnp.zeros_like(g))
    assert_same(after.inner, state.inner)


@wrappers
def test_axes_that_are_not_mapped(wrapper):
    g = np.zeros(3, np.float32)
    for axis_name, message in (
        ("data", "axis_name is 'data', but no axis 'data' is mapped here; call it inside shard_map or pmap"),
        (3, "axis_name is 3; it must be the name of a mesh axis, or a tuple of several"),
    ):
        transform = wrapper(optax.identity(), axis_name=axis_name)
        with pytest.raises(ValueError, match=message):
            transform.update(g, transform.init(g))


# ----------------------------------------------------------------------------------------------------------- loss scale


def scales(transform, finite):
    """The scale after each step, where `finite` says how a step went."""
    params = jnp.zeros(3)
    state = transform.init(params)
    update = jax.jit(transform.update)
    for good in finite:
        _, state = update(jnp.where(good, jnp.ones(3), jnp.inf), state)
        yield float(optim.loss_scale(state)), int(state.finite_steps), int(state.skipped)


def test_the_scale_rises_and_falls():
    transform = optim.dynamic_loss_scale(optax.identity(), 8.0, growth_interval=3)
    assert float(optim.loss_scale(transform.init(jnp.zeros(3)))) == 8.0
    steps = [True, True, True, True, False, True, True, False, False, True, True, True]
    expected = [
        *((8, 1, 0), (8, 2, 0), (16, 0, 0), (16, 1, 0), (8, 0, 1), (8, 1, 1)),
        *((8, 2, 1), (4, 0, 2), (2, 0, 3), (2, 1, 3), (2, 2, 3), (4, 0, 3)),
    ]
    assert list(scales(transform, steps)) == expected


def test_the_scale_stays_between_its_limits():
    options = {"growth_interval": 1, "factor": 4.0, "smallest": 2.0, "largest": 40.0}
    transform = optim.dynamic_loss_scale(optax.identity(), 8.0, **options)
    assert [scale for scale, _, _ in scales(transform, [True] * 3 + [False] * 4)] == [32, 40, 40, 10, 2.5, 2, 2]


def test_float16_gradients_that_would_vanish():
    """float16 does not hold 2e-8: the scale lifts such gradients, and falls until the large ones do not overflow."""
    w = {"small": jnp.float16(1.0), "large": jnp.float16(1.0)}
    transform = optim.dynamic_loss_scale(optax.sgd(1.0), 2.0**24, growth_interval=10**6)
    state = transform.init(w)

    def loss(w, scale):
        w = jax.tree.map(lambda x: x.astype(jnp.float32), w)
        return (2e-8 * w["small"] + 10.0 * w["large"]) * scale

    assert jax.grad(lambda w: loss(w, jnp.float32(1.0)))(w)["small"] == 0
    gradient, update = (
        jax.jit(jax.grad(loss)),
        jax.jit(transform.update),
    )  # in one program a GPU does not round to float16
    for _ in range(20):
        updates, state = update(gradient(w, optim.loss_scale(state)), state, w)
    assert state.skipped == 12
    assert float(state.loss_scale) == 2.0**12
    assert {u.dtype for u in updates.values()} == {np.dtype(np.float32)}
    np.testing.assert_allclose([-updates["small"], -updates["large"]], [2e-8, 10.0], rtol=2.0**-10)


@pytest.mark.parametrize(
    ("dtype", "scale", "value"), [("float32", 2.0**-10, 1e37), ("float16", 2.0**-120, 6e4), ("float64", 2.0, 1e300)]
)
def test_gradients_that_overflow_when_they_are_unscaled(dtype, scale, value):
    """Finite as they come, they are not as the wrapped transform would get them: the step is left out."""
    with jax.enable_x64(dtype == "float64"):
        gradient = jax.device_put(np.array([0.5, value], dtype))
        transform = optim.dynamic_loss_scale(optim.scale_by_adam(), scale, smallest=2.0**-126)
        start = transform.init(np.zeros(2, np.float32))
        updates, state = jax.jit(transform.update)(gradient, start)
        np.testing.assert_array_equal(updates, np.zeros(2, np.float32))
        assert_same(state.inner, start.inner)
        assert (int(state.skipped), float(optim.loss_scale(state))) == (1, scale / 2)


def test_loss_scale_finds_the_one_in_a_state():
    params = {"w": jnp.zeros(3)}
    scaled = optim.dynamic_loss_scale(optim.adam(0.1), 64.0)
    for transform in (
        scaled,
        optax.chain(optax.clip(1.0), scaled),
        optim.skip_nonfinite(scaled),
        optax.masked(scaled, {"w": True}),
    ):
        scale = optim.loss_scale(transform.init(params))
        assert (scale.dtype, scale.shape, float(scale)) == (jnp.float32, (), 64.0)


def test_loss_scale_of_none_or_two():
    params = jnp.zeros(3)
    with pytest.raises(ValueError, match="state holds 0 loss scales: it must come from one `dynamic_loss_scale`"):
        optim.loss_scale(optim.adam(0.1).init(params))
    scaled = optim.dynamic_loss_scale(optax.identity())
    with pytest.raises(ValueError, match="state holds 2 loss scales"):
        optim.loss_scale(optax.chain(scaled, scaled).init(params))


@pytest.mark.parametrize(
    ("name", "rule", "values"),
    [
        ("initial_scale", "a finite number above 0", ["a", None, True, 0.0, 1e-40, -1, np.nan, np.inf, 1e39]),
        ("factor", "a finite number of at least 1", ["a", None, True, 0, 0.5, -2.0, np.nan, np.inf]),
        ("growth_interval", "a number of steps, at least 1 and below", ["a", None, True, 0, -1, 2.5, 2**31, np.nan]),
        ("smallest", "a finite number above 0", ["a", None, True, 0.0, 1e-40, -1, np.nan, np.inf]),
        ("largest", "a finite number above 0", ["a", None, True, 0.0, 1e-40, -1, np.nan, np.inf]),
    ],
)
def test_numbers_of_no_use(name, rule, values):
    for value in values:
        with pytest.raises(ValueError, match=re.escape(f"{name} is {value!r}; it must be {rule}")):
            optim.dynamic_loss_scale(optax.identity(), **{name: value})


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"smallest": 4.0, "largest": 2.0}, r"smallest is 4\.0; it must not be above largest, which is 2\.0"),
        ({"largest": 1024.0}, r"initial_scale is 32768\.0; it must be in \[smallest, largest\]"),
        ({"smallest": 2.0**16}, r"initial_scale is 32768\.0; it must be in \[smallest, largest\]"),
    ],
)
def test_limits_of_no_use(limits, message):
    with pytest.raises(ValueError, match=message):
        optim.dynamic_loss_scale(optax.identity(), **limits)


def test_numbers_of_numpy_are_taken():
    with jax.enable_x64(True):
        numbers = {"factor": np.float64(4), "smallest": np.float64(1), "largest": jnp.float64(64)}
        transform = optim.dynamic_loss_scale(optax.identity(), np.float32(8), growth_interval=np.int64(1), **numbers)
        assert [scale for scale, _, _ in scales(transform, [True, True, False])] == [32, 64, 16]
        state = transform.init(jnp.zeros(3))
        assert {leaf.dtype.itemsize for leaf in jax.tree.leaves(state)} == {4}
    half = np.float16(8)  # which Python's 2.0**24 overflows
    optim.dynamic_loss_scale(optax.identity(), half, factor=half)


def test_numbers_that_jit_traces():
    @jax.jit
    def next_scale(initial, interval, factor, smallest, largest):
        transform = optim.dynamic_loss_scale(
            optax.identity(), initial, growth_interval=interval, factor=factor, smallest=smallest, largest=largest
        )
        return optim.loss_scale(transform.update(jnp.ones(3), transform.init(jnp.ones(3)))[1])

    for interval, largest, expected in ((1, 64.0, 32.0), (1, 10.0, 10.0), (2, 64.0, 8.0)):
        assert float(next_scale(8.0, interval, 4.0, 1.0, largest)) == expected
