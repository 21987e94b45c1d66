"""The state of delayed scaling in NNX: as variables that are split, restored or left out. Else: tests/modules."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT as OVERWRITE
from flax.training.train_state import TrainState
from flax_apis import NNX, mean_square, normal, observed

from te_jax.flax import Dense
from te_jax.nnx import Linear, OverwriteWithGradient, merge_gradients, overwrite_with_gradient
from te_jax.recipe import DelayedScaling

HISTORY = 4
RECIPE = DelayedScaling(history_len=HISTORY)
TRAINED = nnx.Any(nnx.Param, OverwriteWithGradient)
WRT = nnx.DiffState(0, TRAINED)
LINEAR = NNX.layer("Linear", 32, 32, recipe=RECIPE)


def chain(rng):
    return NNX.make(NNX.chain(up=LINEAR, down=LINEAR), rng)


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


def test_layers_that_a_step_leaves_out_keep_their_state(rng):
    model, x = NNX.make(NNX.stack(LINEAR, 2), rng), normal(rng, (16, 32))
    observed(NNX, model, x)
    before = NNX.states(model)
    used, unused = (nnx.jit(nnx.grad(f, argnums=WRT))(model, x) for f in (mean_square, lambda model, x: jnp.sum(x)))
    overwrite_with_gradient(model, unused)
    jax.tree.map(np.testing.assert_array_equal, NNX.states(model), before)
    # Of stacked layers, each by itself.
    overwrite_with_gradient(model, jax.tree.map(lambda a, b: jnp.concatenate([a[:1], b[1:]]), used, unused))
    for path, after in NNX.states(model).items():
        if "uses" not in path:
            np.testing.assert_array_equal(after[0, 1:], before[path][0, :-1])
            assert after[0, 0] > 0
            np.testing.assert_array_equal(after[1:], before[path][1:])


def test_state_survives_checkpoints(rng, tmp_path):
    model, x = chain(rng), normal(rng, (16, 32))
    observed(NNX, model, x)
    gradient = nnx.jit(nnx.grad(mean_square, argnums=WRT))
    expected = nnx.to_pure_dict(gradient(model, x))
    graphdef, state = nnx.split(model)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", nnx.to_pure_dict(state))
        checkpointer.wait_until_finished()
        abstract = nnx.state(nnx.eval_shape(lambda: chain(np.random.default_rng(0))))
        restored = checkpointer.restore(tmp_path / "checkpoint", nnx.to_pure_dict(abstract))
    nnx.replace_by_pure_dict(abstract, restored)
    model = nnx.merge(graphdef, abstract)
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(gradient(model, x)), expected)


def test_bridges_between_the_two_apis_know_the_state(rng):
    x = normal(rng, (16, 32))
    model = nnx.bridge.ToNNX(Dense(32, recipe=RECIPE), rngs=nnx.Rngs(0)).lazy_init(x)
    for _ in range(2):
        overwrite_with_gradient(model, nnx.grad(mean_square, argnums=WRT)(model, x))
    np.testing.assert_array_equal(model.activation_amax_history[...], [jnp.abs(x).max()] * 2 + [0] * (HISTORY - 2))

    linen = nnx.bridge.to_linen(Linear, 32, 32, recipe=RECIPE)
    variables = linen.init(jax.random.key(0), x)
    state = TrainState.create(apply_fn=linen.apply, params=variables, tx=optax.sgd(0.1, momentum=0.9))
    gradients = jax.grad(lambda variables: mean_square(lambda x: linen.apply(variables, x), x))(variables)
    state = state.apply_gradients(grads=gradients)
    history = state.params[OVERWRITE]["activation_amax_history"]
    np.testing.assert_array_equal(history, [jnp.abs(x).max()] + [0] * (HISTORY - 1))


def test_state_of_flax_layers_in_fp8_is_overwritten_too(rng):
    """It comes under the same name through flax.nnx.bridge, and without a count of uses."""
    dense = nn.Dense(32, dot_general_cls=nn.Fp8DirectDotGeneralOp)
    x = normal(rng, (16, 32))
    model = nnx.bridge.ToNNX(dense, rngs=nnx.Rngs(0)).lazy_init(x)
    gradients = nnx.grad(mean_square, argnums=WRT)(model, x)
    overwrite_with_gradient(model, gradients)
    state, expected = (nnx.to_pure_dict(nnx.state(tree, OverwriteWithGradient)) for tree in (model, gradients))
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    (histories,) = state.values()
    assert histories["input_amax_history"][0] == jnp.abs(x).max()


def test_gradients_without_the_state_are_refused(rng):
    model, x = chain(rng), normal(rng, (16, 32))
    gradients = nnx.grad(mean_square, argnums=WRT)(model, x)
    with pytest.raises(ValueError, match=r"gradients have nothing for .*up.*activation_amax_history.*argnums="):
        overwrite_with_gradient(model, nnx.state(gradients, nnx.Param))
    with pytest.raises(ValueError, match=r"the kernel is differentiated and scaling_state is not.*nnx\.DiffState"):
        nnx.grad(mean_square)(model, x)


def test_the_optimizer_does_not_see_the_state(rng):
    model = chain(rng)
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)
    names = {part for path, _ in jax.tree.leaves_with_path(nnx.state(optimizer)) for part in map(str, path)}
    assert any("kernel" in name for name in names)
    assert not any("history" in name or "uses" in name for name in names)


def test_gradients_of_several_arguments_are_merged():
    states = tuple(nnx.state(Linear(16, size, rngs=nnx.Rngs(size))) for size in (16, 32))
    for tree in (states, list(states), {"a": states[0], "b": states[1]}):
        merged = merge_gradients(tree, tree)
        jax.tree.map(lambda one, two: np.testing.assert_array_equal(2 * one, two), tree, merged)
