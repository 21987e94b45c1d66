"""overwrite_with_gradient: the state of delayed scaling advances as `TrainState` and `te_jax.nnx` advance it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import te_jax.flax
import te_jax.nnx
from te_jax import optim
from te_jax.ops import dense
from te_jax.recipe import DelayedScaling
from te_jax.testing import assert_close

pytestmark = pytest.mark.usefixtures("standard_promotion")  # of optax

RECIPE = DelayedScaling(history_len=4)
OVERWRITE = "_overwrite_with_gradient"
TRAINED = nnx.Any(nnx.Param, te_jax.nnx.OverwriteWithGradient)
STEPS = 6

INNER = {
    "optax": lambda: optax.chain(optax.clip_by_global_norm(1e-2), optax.adamw(1e-2, weight_decay=0.1)),
    "te_jax": lambda: optim.adamw(1e-2, mu_dtype=jnp.bfloat16, nu_dtype=jnp.bfloat16, weight_decay=0.1),
}


def normal(rng, *shape):
    return jax.device_put(np.asarray(rng.standard_normal(shape), jnp.float32))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = te_jax.flax.Dense(48, recipe=RECIPE, activation="silu", name="up")(x)
        return te_jax.flax.Dense(32, recipe=RECIPE, name="down")(x)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.up = te_jax.nnx.Linear(32, 48, recipe=RECIPE, activation="silu", rngs=rngs)
        self.down = te_jax.nnx.Linear(48, 32, recipe=RECIPE, rngs=rngs)

    def __call__(self, x):
        return self.down(self.up(x))


def growing_batches(rng):
    return normal(rng, STEPS, 16, 32) * np.exp2(np.arange(STEPS, dtype=np.float32))[:, None, None]


def assert_all_close(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(lambda a, e: assert_close(a, e, tolerance=1e-4), actual, expected)


def assert_not_rounded_down(amax, expected):
    """An optimizer adds differences of float32 values: what it writes may lie above `expected` by a rounding."""
    assert expected <= amax <= expected * (1 + 2.0**-22)


@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
def test_a_linen_loop_is_that_of_train_state(rng, inner):
    model, xs = Linen(), growing_batches(rng)
    variables = model.init(jax.random.key(int(rng.integers(2**31))), xs[0])
    optimizer = optim.overwrite_with_gradient(inner())

    def loss_fn(variables, x):
        return jnp.mean(jnp.square(model.apply(variables, x)))

    @jax.jit
    def step(variables, state, x):
        loss, gradients = jax.value_and_grad(loss_fn)(variables, x)
        updates, state = optimizer.update(gradients, state, variables)
        return loss, optax.apply_updates(variables, updates), state

    @jax.jit
    def expected_step(state, x):
        loss, gradients = jax.value_and_grad(loss_fn)(state.params, x)
        return loss, state.apply_gradients(grads=gradients)

    state = optimizer.init(variables)
    expected = TrainState.create(apply_fn=model.apply, params=variables, tx=inner())
    for x in xs:
        loss, variables, state = step(variables, state, x)
        expected_loss, expected = expected_step(expected, x)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-4)
    assert_all_close(variables, expected.params)
    assert_not_rounded_down(variables[OVERWRITE]["up"]["activation_amax_history"][0], jnp.abs(xs[-1]).max())


@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
def test_an_nnx_loop_is_that_of_the_function_of_te_jax(rng, inner):
    seed, xs = int(rng.integers(2**31)), growing_batches(rng)

    def trained(optimizer_of, after):
        model = Nnx(nnx.Rngs(seed))
        optimizer = optimizer_of(model)

        @nnx.jit
        def step(model, optimizer, x):
            wrt = nnx.DiffState(0, TRAINED)
            gradients = nnx.grad(lambda model: jnp.mean(jnp.square(model(x))), argnums=wrt)(model)
            optimizer.update(model, gradients)
            after(model, gradients)

        for x in xs:
            step(model, optimizer, x)
        return nnx.to_pure_dict(nnx.state(model))

    actual = trained(
        lambda model: nnx.Optimizer(model, optim.overwrite_with_gradient(inner()), wrt=TRAINED), lambda *_: None
    )
    expected = trained(lambda model: nnx.Optimizer(model, inner(), wrt=nnx.Param), te_jax.nnx.overwrite_with_gradient)
    assert_all_close(actual, expected)
    assert_not_rounded_down(actual["up"]["activation_amax_history"][0], jnp.abs(xs[-1]).max())


def test_states_anywhere_in_a_tree(rng):
    x = normal(rng, 16, 32)
    params = [{"kernel": normal(rng, 32, 32), "scaling": RECIPE.init(), "uses": jnp.ones(())} for _ in range(2)]
    optimizer = optim.overwrite_with_gradient(optax.sgd(0.1))

    def loss_fn(params, x):
        for layer in params:
            x = dense(x, layer["kernel"], recipe=RECIPE, scaling_state=layer["scaling"]) * layer["uses"]
        return jnp.sum(jnp.square(x))

    state = optimizer.init(params)
    gradients = jax.jit(jax.grad(loss_fn))(params, x)
    after = optax.apply_updates(params, optimizer.update(gradients, state, params)[0])
    for layer, before, gradient in zip(after, params, gradients, strict=True):
        jax.tree.map(np.testing.assert_array_equal, layer["scaling"], gradient["scaling"])
        assert_close(layer["kernel"], before["kernel"] - 0.1 * gradient["kernel"])
        assert_close(layer["uses"], before["uses"] - 0.1 * gradient["uses"])  # a parameter, whatever its name


def test_state_of_flax_layers_is_overwritten_too(rng):
    x = normal(rng, 16, 32)
    dense = nn.Dense(32, dot_general_cls=nn.Fp8DirectDotGeneralOp)
    model = nnx.bridge.ToNNX(dense, rngs=nnx.Rngs(0)).lazy_init(x)
    optimizer = nnx.Optimizer(model, optim.overwrite_with_gradient(optax.sgd(0.1)), wrt=TRAINED)
    gradients = nnx.grad(lambda model: jnp.mean(model(x)), argnums=nnx.DiffState(0, TRAINED))(model)
    optimizer.update(model, gradients)
    state, expected = (nnx.to_pure_dict(nnx.state(t, te_jax.nnx.OverwriteWithGradient)) for t in (model, gradients))
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-6), state, expected)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_layer_that_the_loss_did_not_use_keeps_its_state(rng, stacked):
    shape = (3,) if stacked else ()
    names = [f"{role}_amax_history" for role in ("activation", "kernel", "gradient")]
    state = {name: jnp.abs(normal(rng, *shape, 4)) for name in names} | {"uses": jnp.ones(shape)}
    params = {"params": {"kernel": normal(rng, 4)}, OVERWRITE: {"layer": state}}
    used = np.arange(3) != 1 if stacked else np.array(False)
    # The gradients of what is not used are zeros.
    found = {name: (x + 1.0) * jnp.asarray(_in_front(used, x), jnp.float32) for name, x in state.items()}
    gradients = {"params": params["params"], OVERWRITE: {"layer": found}}
    optimizer = optim.overwrite_with_gradient(optax.sgd(0.1))
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    after = optax.apply_updates(params, updates)[OVERWRITE]["layer"]
    for name, value in after.items():
        assert_close(value, jnp.where(_in_front(used, value), found[name], state[name]), tolerance=1e-6)


def _in_front(flags, x):
    return np.reshape(flags, flags.shape + (1,) * (x.ndim - flags.ndim))


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_next_values_are_never_rounded_down(rng, jit):
    """An amax that became smaller would saturate, and one that became 0 would be unknown."""
    former, following = np.float32(2.0) ** rng.uniform(-40, 40, (2, 4096)).astype(np.float32)
    former[:8], following[4:12] = 0, 0
    following[-8:] = former[-8:] * np.float32(1.5)
    params, gradients = ({OVERWRITE: jnp.asarray(x)} for x in (former, following))
    optimizer = optim.overwrite_with_gradient(optax.sgd(0.1))

    @jit
    def step(params, gradients):
        updates, _ = optimizer.update(gradients, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    after = np.asarray(step(params, gradients)[OVERWRITE])
    assert (after >= following).all()
    assert (after <= following + 2.0**-22 * np.maximum(former, following)).all()
    np.testing.assert_array_equal(after[following == 0], 0)
    np.testing.assert_array_equal(after[-8:], following[-8:])


def test_the_inner_optimizer_sees_the_parameters_alone(rng):
    variables = Linen().init(jax.random.key(0), normal(rng, 16, 32))
    seen = []
    inner = optax.GradientTransformation(
        lambda params: seen.append(params) or optax.EmptyState(),
        lambda updates, state, params: seen.extend((updates, params)) or (updates, state),
    )
    optimizer = optim.overwrite_with_gradient(inner)
    optimizer.update(variables, optimizer.init(variables), variables)
    assert len(seen) == 3
    for tree in seen:
        jax.tree.map(np.testing.assert_array_equal, tree["params"], variables["params"])
        assert not jax.tree.leaves(tree[OVERWRITE])


def test_params_are_needed():
    optimizer = optim.overwrite_with_gradient(optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"params is None; .*: call update\(gradients, opt_state, params\)"):
        optimizer.update({OVERWRITE: jnp.ones(3)}, optimizer.init({OVERWRITE: jnp.ones(3)}))


def test_without_it_an_optimizer_of_everything_ends_in_nan(rng):
    model, x = Linen(), normal(rng, 16, 32)
    variables = model.init(jax.random.key(0), x)
    optimizer = optax.adamw(1e-2)
    state = optimizer.init(variables)

    @jax.jit
    def step(variables, state):
        loss, gradients = jax.value_and_grad(lambda v: jnp.mean(jnp.square(model.apply(v, x))))(variables)
        updates, state = optimizer.update(gradients, state, variables)
        return loss, optax.apply_updates(variables, updates), state

    for _ in range(3):
        loss, variables, state = step(variables, state)
    assert jnp.isnan(loss)
