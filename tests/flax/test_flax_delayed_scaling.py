"""The state of delayed scaling in Linen: it advances, and the next step uses it, under everything that carries it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT as OVERWRITE
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState

from te_jax.flax import Dense, make_dot_general_cls, merge_gradients
from te_jax.recipe import DelayedScaling
from te_jax.testing import relative_error

HISTORY = 4
RECIPE = DelayedScaling(history_len=HISTORY)


class OwnLayers(nn.Module):
    """A model of te_jax's layers."""

    @nn.compact
    def __call__(self, x):
        x = Dense(48, recipe=RECIPE, activation="silu", name="up")(x)
        return Dense(32, recipe=RECIPE, name="down")(x)


class FlaxLayers(nn.Module):
    """The same of Flax's layers, with te_jax's products in them."""

    @nn.compact
    def __call__(self, x):
        product = make_dot_general_cls(RECIPE)
        x = nn.silu(nn.Dense(48, dot_general_cls=product, name="up")(x))
        return nn.Dense(32, dot_general_cls=product, name="down")(x)


class Rematerialised(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.remat(OwnLayers)(name="layers")(x)


class Scanned(nn.Module):
    """Two stacked layers."""

    @nn.compact
    def __call__(self, x):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return x + Dense(32, recipe=RECIPE, name="dense")(x), None

        scan = nn.scan(Block, variable_axes={"params": 0, OVERWRITE: 0}, split_rngs={"params": True}, length=2)
        return scan(name="layers")(x, None)[0]


MODELS = [OwnLayers, FlaxLayers, Rematerialised, Scanned]


def normal(rng, shape):
    return jax.device_put(np.asarray(rng.standard_normal(shape), jnp.float32))


def states(variables):
    """{path: leaf} of the state."""
    return {
        jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(variables[OVERWRITE])
    }


def loss_of(model):
    return lambda variables, x: jnp.mean(jnp.square(model.apply(variables, x)))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_history_advances_with_train_state(rng, model):
    model = model()
    # Growing inputs: no two steps observe the same.
    batches = [normal(rng, (16, 32)) * 2.0**step for step in range(HISTORY + 1)]
    variables = jax.jit(model.init)(jax.random.key(int(rng.integers(2**31))), batches[0])
    assert all(not leaf.any() for path, leaf in states(variables).items() if "history" in path)
    state = TrainState.create(apply_fn=model.apply, params=variables, tx=optax.sgd(1e-2))

    @jax.jit
    def step(state, x):
        return state.apply_gradients(grads=jax.grad(loss_of(model))(state.params, x))

    for count, x in enumerate(batches, start=1):
        before = states(state.params)
        state = step(state, x)
        for path, history in states(state.params).items():
            if "history" not in path:
                continue
            assert (history[..., 0] > 0).all(), path
            assert (history[..., 0] != before[path][..., 0]).all(), path
            np.testing.assert_array_equal(history[..., 1:], before[path][..., :-1])
            assert (np.count_nonzero(history, axis=-1) == min(count, HISTORY)).all()


def test_the_first_layer_observes_its_input_and_its_kernel(rng):
    model, x = OwnLayers(), normal(rng, (16, 32))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    gradients = jax.jit(jax.grad(loss_of(model)))(variables, x)
    state = gradients[OVERWRITE]["up"]
    assert state["activation_amax_history"][0] == jnp.abs(x).max()
    assert state["kernel_amax_history"][0] == jnp.abs(variables["params"]["up"]["kernel"]).max()


@pytest.mark.parametrize("model", [FlaxLayers, Scanned], ids=lambda model: model.__name__)
def test_the_next_step_uses_what_this_one_observed(rng, model):
    """Inputs beyond the range of FP8 saturate under a scale of 1; once they were seen, they do not."""
    model, x = model(), normal(rng, (16, 32)) * 1e4
    variables = jax.jit(model.init)(jax.random.key(int(rng.integers(2**31))), x)

    @jax.jit
    def step(variables, x):
        def loss(variables):
            y = model.apply(variables, x)
            return jnp.mean(jnp.square(y)), y

        gradients, y = jax.grad(loss, has_aux=True)(variables)
        return y, variables | {OVERWRITE: gradients[OVERWRITE]}

    errors = []
    for _ in range(4):  # a layer needs the one before it to be right
        y, variables = step(variables, x)
        errors.append(relative_error(y, reference(model, variables, x)))
    assert errors[0] > 0.5
    assert errors[-1] < 0.12


def reference(model, variables, x):
    """The model in float32."""
    params = variables["params"]
    if isinstance(model, Scanned):
        for layer in range(2):
            dense = jax.tree.map(lambda leaf, i=layer: leaf[i], params["layers"]["dense"])
            x = x + x @ dense["kernel"] + dense["bias"][None]
        return x
    params = params.get("layers", params)
    x = nn.silu(x @ params["up"]["kernel"] + params["up"]["bias"][None])
    return x @ params["down"]["kernel"] + params["down"]["bias"][None]


def test_gradients_of_the_next_step_follow_its_scale_too(rng):
    model, x, target = Dense(32, recipe=RECIPE), normal(rng, (16, 32)), normal(rng, (16, 32)) * 1e7
    variables = jax.jit(model.init)(jax.random.key(int(rng.integers(2**31))), x)

    def loss(variables):
        return jnp.sum(target * model.apply(variables, x))

    expected, gradient = np.asarray(x).T @ np.asarray(target), jax.jit(jax.grad(loss))
    gradients = gradient(variables)
    assert relative_error(gradients["params"]["kernel"], expected) > 0.5
    gradients = gradient(variables | {OVERWRITE: gradients[OVERWRITE]})
    assert relative_error(gradients["params"]["kernel"], expected) < 0.12


def test_accumulated_microbatches_keep_the_largest(rng):
    """The largest magnitude is in the first microbatch: adding, averaging or keeping the last one would lose it."""
    model = OwnLayers()
    gradient = jax.jit(jax.grad(loss_of(model)))
    microbatches = jnp.stack([normal(rng, (16, 32)) * scale for scale in (8.0, 1.0, 2.0)])
    variables = jax.jit(model.init)(jax.random.key(int(rng.integers(2**31))), microbatches[0])
    variables |= {OVERWRITE: gradient(variables, microbatches[1])[OVERWRITE]}

    @jax.jit
    def accumulated(variables, microbatches):
        def one(total, x):
            return merge_gradients(total, jax.grad(loss_of(model))(variables, x)), None

        return jax.lax.scan(one, jax.tree.map(jnp.zeros_like, variables), microbatches)[0]

    single = [gradient(variables, x) for x in microbatches]
    actual = accumulated(variables, microbatches)
    for path, history in states(actual).items():
        expected = np.max([states(gradients)[path] for gradients in single], axis=0)
        np.testing.assert_allclose(history, expected, rtol=1e-5, err_msg=path)
        if "history" in path:
            np.testing.assert_array_equal(history[1:], states(variables)[path][:-1], err_msg=path)
    assert actual[OVERWRITE]["up"]["activation_amax_history"][0] == jnp.abs(microbatches).max()
    kernels = [gradients["params"]["up"]["kernel"] for gradients in single]
    assert relative_error(actual["params"]["up"]["kernel"], np.sum(kernels, axis=0)) < 1e-4


class CalledTwice(nn.Module):
    @nn.compact
    def __call__(self, x):
        shared = Dense(32, recipe=RECIPE, use_bias=False, name="shared")
        return shared(shared(x) * 3.0)


def test_a_layer_that_is_called_twice_in_one_gradient(rng):
    """JAX adds up the two next states. Older entries stay what they were; the newest stays an upper bound."""
    model = CalledTwice()
    x = normal(rng, (16, 32))
    variables = jax.jit(model.init)(jax.random.key(int(rng.integers(2**31))), x)
    gradient = jax.jit(jax.grad(loss_of(model)))
    peaks = []
    for _ in range(HISTORY + 2):
        variables |= {OVERWRITE: gradient(variables, x)[OVERWRITE]}
        first = float(jnp.abs(x).max())
        peaks.append(float(variables[OVERWRITE]["shared"]["activation_amax_history"][0]))
        assert 2 * first < peaks[-1] < 20 * first
        assert variables[OVERWRITE]["shared"]["uses"] == 2
    # What the layer reads: the sums of the steps, not doubled again in each.
    history = np.asarray(variables[OVERWRITE]["shared"]["activation_amax_history"])
    np.testing.assert_allclose(history[1:] / 2, peaks[-2 : -HISTORY - 1 : -1], rtol=1e-6)
    exact = x @ variables["params"]["shared"]["kernel"] * 3.0 @ variables["params"]["shared"]["kernel"]
    assert relative_error(model.apply(variables, x), exact) < 0.12


def test_steps_that_overflow_do_not_add_up_in_a_layer_that_is_called_twice(rng):
    """Each call repeats the newest amaxes, which are sums already."""
    model = CalledTwice()
    x = normal(rng, (16, 32))
    variables = jax.jit(model.init)(jax.random.key(int(rng.integers(2**31))), x)
    gradient = jax.jit(jax.grad(loss_of(model)))
    for _ in range(HISTORY):
        variables |= {OVERWRITE: gradient(variables, x)[OVERWRITE]}
    before = variables[OVERWRITE]["shared"]
    for _ in range(HISTORY + 2):
        variables |= {OVERWRITE: gradient(variables, x.at[0, 0].set(jnp.nan))[OVERWRITE]}
    after = variables[OVERWRITE]["shared"]
    for name in ("activation_amax_history", "gradient_amax_history"):
        newest, *older = np.asarray(after[name])
        np.testing.assert_allclose(newest, before[name][0], rtol=1e-6)
        np.testing.assert_allclose(np.array(older) / 2, newest, rtol=1e-6)


def test_gradients_that_are_divided_by_a_loss_scale(rng):
    """Flax's DynamicScale divides the next state too, which must be undone; where it is not, the next loss is NaN."""
    model = Dense(32, recipe=RECIPE)
    x = normal(rng, (16, 32))
    tx = optax.sgd(0.0)
    state = TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(0), x), tx=tx)
    plain, scale = state, DynamicScale()
    for factor in (1.0, 2.0, 0.5):
        divisor = scale.scale
        scale, _, loss, gradients = scale.value_and_grad(loss_of(model))(state.params, factor * x)
        expected_loss, expected = jax.value_and_grad(loss_of(model))(plain.params, factor * x)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
        # The quantized gradient is another one while its history is empty.
        assert relative_error(gradients["params"]["kernel"], expected["params"]["kernel"]) < 0.15
        undone = jax.tree.map(lambda x, factor=divisor: factor * x, gradients[OVERWRITE])
        state = state.apply_gradients(grads=gradients | {OVERWRITE: undone})
        plain = plain.apply_gradients(grads=expected)
    forgotten = state.apply_gradients(grads=gradients)
    assert jnp.isnan(loss_of(model)(forgotten.params, x))


def test_a_layer_that_a_step_leaves_out_begins_anew(rng):
    """The gradient that takes the place of its state is zeros, and so is its number of uses."""
    model = Dense(32, recipe=RECIPE)
    x = normal(rng, (16, 32))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    zeros = jax.grad(lambda variables: jnp.sum(x))(variables)[OVERWRITE]
    assert zeros["uses"] == 0
    gradient = jax.jit(jax.value_and_grad(loss_of(model)))
    found, expected = (gradient(variables | {OVERWRITE: state}, x) for state in (zeros, variables[OVERWRITE]))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_state_survives_checkpoints(rng, tmp_path):
    model, x = OwnLayers(), normal(rng, (16, 32))
    variables = jax.jit(model.init)(jax.random.key(int(rng.integers(2**31))), x)
    gradient = jax.jit(jax.grad(loss_of(model)))
    variables |= {OVERWRITE: gradient(variables, x)[OVERWRITE]}
    expected = gradient(variables, x)

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", variables)
        checkpointer.wait_until_finished()
        target = jax.eval_shape(model.init, jax.random.key(0), x)
        restored = checkpointer.restore(tmp_path / "orbax", target)
    through_bytes = serialization.from_bytes(jax.tree.map(jnp.zeros_like, variables), serialization.to_bytes(variables))
    for found in (restored, through_bytes):
        jax.tree.map(np.testing.assert_array_equal, gradient(found, x), expected)


def test_initialisation_gives_what_later_steps_have(rng):
    """Carries of loops and donated buffers need the same shapes, dtypes and structure."""
    model, x = Scanned(), normal(rng, (16, 32))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    gradients = jax.eval_shape(jax.grad(loss_of(model)), variables, x)
    assert jax.tree.map(jax.typeof, variables) == jax.tree.map(jax.typeof, gradients)


def test_the_collection_that_was_left_out_is_named(rng):
    """The likeliest mistake of those who know layers without state."""
    x = normal(rng, (16, 32))
    for model, name in ((Dense(32, recipe=RECIPE), "the layer"), (OwnLayers(), "up"), (Scanned(), "layers/dense")):
        variables = jax.jit(model.init)(jax.random.key(0), x)
        message = rf'variables have no state in "{OVERWRITE}" for {name}, .*: pass this collection beside "params"'
        with pytest.raises(ValueError, match=message):
            model.apply({"params": variables["params"]}, x)
        _, made = model.apply({"params": variables["params"]}, x, mutable=[OVERWRITE])
        assert jax.tree.structure(made[OVERWRITE]) == jax.tree.structure(variables[OVERWRITE])


def test_a_sum_in_float32_stays_one():
    first, second = ({"params": {"bias": jnp.ones(4, dtype)}} for dtype in (jnp.float32, jnp.bfloat16))
    bias = merge_gradients(first, second)["params"]["bias"]
    np.testing.assert_array_equal(bias, np.full(4, 2.0, np.float32), strict=True)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            {"params": {"bias": jnp.zeros(4)}},
            r"first and second differ in .*bias.*kernel.*: merge gradients with respect",
        ),
        (
            {"params": {"kernel": jnp.zeros((1, 4))}},
            r"second has shape \(1, 4\) for .*kernel.*, and first \(3, 4\)",
        ),
    ],
)
def test_gradients_of_different_variables_are_not_merged(second, message):
    with pytest.raises(ValueError, match=message):
        merge_gradients({"params": {"kernel": jnp.zeros((3, 4))}}, second)
