"""The state of delayed scaling in NNX: as variables that are split, restored or left out. Else: tests/modules."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT as OVERWRITE
from flax_apis import NNX, mean_square, normal

from te_jax.flax import Dense
from te_jax.nnx import Linear, OverwriteWithGradient, merge_gradients, overwrite_with_gradient
from te_jax.recipe import DelayedScaling

HISTORY = 4
RECIPE = DelayedScaling(history_len=HISTORY)
TRAINED = nnx.Any(nnx.Param, OverwriteWithGradient)
WRT = nnx.DiffState(0, TRAINED)
LINEAR = NNX.layer("Linear", 32, 32, recipe=RECIPE)


def chain(rng):
    return NNX.drawn(NNX.chain(up=LINEAR, down=LINEAR), rng)


def test_split_and_merge_keep_it(rng):
    """A loop over pure functions, as in jax.jit and jax.lax.scan: what comes out of one step goes into the next."""
    model = chain(rng)
    graphdef, trained, rest = nnx.split(model, TRAINED, ...)
    batches = jnp.stack([normal(rng, (16, 32)) * 2.0**step for step in range(3)])

    @jax.jit
    def train(trained, batches):
        def step(trained, x):
            model = nnx.merge(graphdef, trained, rest, copy=True)
            gradients = nnx.grad(mean_square, argnums=WRT)(model, x)
            overwrite_with_gradient(model, gradients)
            return nnx.state(model, TRAINED), model.up.activation_amax_history[...]

        return jax.lax.scan(step, trained, batches)

    trained, seen = train(trained, batches)
    largest = np.abs(np.asarray(batches)).max((1, 2))
    np.testing.assert_array_equal(seen[:, 0], largest)
    np.testing.assert_array_equal(seen[-1, :3], largest[::-1])
    merged = nnx.merge(graphdef, trained, rest)
    np.testing.assert_array_equal(merged.up.activation_amax_history[...], seen[-1])


@nnx.jit(static_argnums=0)
def bridged(module, x):
    return nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)).lazy_init(x)


gradients_of = nnx.jit(nnx.grad(mean_square, argnums=WRT))


def test_bridges_between_the_two_apis_know_the_state(rng):
    x = normal(rng, (16, 32))
    model = bridged(Dense(32, recipe=RECIPE), x)
    for _ in range(2):
        overwrite_with_gradient(model, gradients_of(model, x))
    amax = np.abs(np.asarray(x)).max()
    np.testing.assert_array_equal(model.activation_amax_history[...], [amax] * 2 + [0] * (HISTORY - 2))

    linen = nnx.bridge.to_linen(Linear, 32, 32, recipe=RECIPE)
    variables = jax.jit(linen.init)(jax.random.key(0), x)
    gradients = jax.jit(jax.grad(lambda variables: mean_square(lambda x: linen.apply(variables, x), x)))(variables)
    history = gradients[OVERWRITE]["activation_amax_history"]
    np.testing.assert_array_equal(history, [amax] + [0] * (HISTORY - 1))


def test_state_of_flax_layers_in_fp8_is_overwritten_too(rng):
    """It comes under the same name through flax.nnx.bridge, and without a count of uses."""
    x = normal(rng, (16, 32))
    model = bridged(nn.Dense(32, dot_general_cls=nn.Fp8DirectDotGeneralOp), x)
    gradients = gradients_of(model, x)
    overwrite_with_gradient(model, gradients)
    state, expected = (nnx.to_pure_dict(nnx.state(tree, OverwriteWithGradient)) for tree in (model, gradients))
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    (histories,) = state.values()
    assert histories["input_amax_history"][0] == np.abs(np.asarray(x)).max()


def test_gradients_without_the_state_are_refused():
    model = NNX.abstract(NNX.chain(up=LINEAR, down=LINEAR))
    with pytest.raises(ValueError, match=r"gradients have nothing for .*up.*activation_amax_history.*argnums="):
        overwrite_with_gradient(model, nnx.state(model, nnx.Param))
    with pytest.raises(ValueError, match=r"the kernel is differentiated and scaling_state is not.*nnx\.DiffState"):
        jax.eval_shape(lambda: nnx.grad(mean_square)(chain(np.random.default_rng(0)), jnp.ones((16, 32))))


def test_the_optimizer_does_not_see_the_state():
    model = nnx.eval_shape(lambda: nnx.Optimizer(LINEAR(rngs=nnx.Rngs(0)), optax.adam(1e-2), wrt=nnx.Param))
    names = {part for path, _ in jax.tree.leaves_with_path(nnx.state(model)) for part in map(str, path)}
    assert any("kernel" in name for name in names)
    assert not any("history" in name or "uses" in name for name in names)


def test_gradients_of_several_arguments_are_merged():
    states = tuple(nnx.state(NNX.drawn(NNX.layer("Linear", 16, size), np.random)) for size in (16, 32))
    for tree in (states, list(states), {"a": states[0], "b": states[1]}):
        merged = merge_gradients(tree, tree)
        jax.tree.map(lambda one, two: np.testing.assert_array_equal(2 * one, two), tree, merged)
