"""The state of delayed scaling in Linen: divided, left out, restored, and as carries of loops. Else: tests/modules."""

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
from flax_apis import LINEN, Bound, mean_square, normal

from te_jax.flax import Dense
from te_jax.recipe import DelayedScaling
from te_jax.testing import relative_error

RECIPE = DelayedScaling(history_len=4)
LINEAR = LINEN.layer("Linear", 32, 32, recipe=RECIPE)
CHAIN, STACK = LINEN.chain(up=LINEAR, down=LINEAR)(), LINEN.stack(LINEAR, 2)()


def loss_of(model):
    return lambda variables, x: mean_square(Bound(model, variables), x)


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
    model, x = CHAIN, normal(rng, (16, 32))
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
    model, x = STACK, normal(rng, (16, 32))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    gradients = jax.eval_shape(jax.grad(loss_of(model)), variables, x)
    assert jax.tree.map(jax.typeof, variables) == jax.tree.map(jax.typeof, gradients)


def test_the_collection_that_was_left_out_is_named(rng):
    """The likeliest mistake of those who know layers without state."""
    x = normal(rng, (16, 32))
    for model, name in ((Dense(32, recipe=RECIPE), "the layer"), (CHAIN, "up"), (STACK, "layer")):
        variables = jax.jit(model.init)(jax.random.key(0), x)
        message = rf'variables have no state in "{OVERWRITE}" for {name}, .*: pass this collection beside "params"'
        with pytest.raises(ValueError, match=message):
            model.apply({"params": variables["params"]}, x)
        _, made = model.apply({"params": variables["params"]}, x, mutable=[OVERWRITE])
        assert jax.tree.structure(made[OVERWRITE]) == jax.tree.structure(variables[OVERWRITE])
