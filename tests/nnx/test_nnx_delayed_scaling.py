"""The state of delayed scaling in NNX: it advances, and the next step uses it, under everything that carries it."""

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

from te_jax.flax import Dense
from te_jax.nnx import DotGeneral, Linear, OverwriteWithGradient, merge_gradients, overwrite_with_gradient
from te_jax.recipe import DelayedScaling
from te_jax.testing import relative_error

HISTORY = 4
RECIPE = DelayedScaling(history_len=HISTORY)
TRAINED = nnx.Any(nnx.Param, OverwriteWithGradient)
WRT = nnx.DiffState(0, TRAINED)


class OwnLayers(nnx.Module):
    """A model of te_jax's layers."""

    def __init__(self, rngs):
        self.up = Linear(32, 48, recipe=RECIPE, activation="silu", rngs=rngs)
        self.down = Linear(48, 32, recipe=RECIPE, rngs=rngs)

    def __call__(self, x):
        return self.down(self.up(x))


class FlaxLayers(nnx.Module):
    """The same of Flax's layers, with te_jax's products in them."""

    def __init__(self, rngs):
        self.up = nnx.Linear(32, 48, dot_general=DotGeneral(RECIPE), rngs=rngs)
        self.down = nnx.Linear(48, 32, dot_general=DotGeneral(RECIPE), rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.silu(self.up(x)))


class Rematerialised(OwnLayers):
    @nnx.remat
    def __call__(self, x):
        return self.down(self.up(x))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = Linear(32, 32, recipe=RECIPE, rngs=rngs)

    def __call__(self, x):
        return x + self.linear(x)


class Scanned(nnx.Module):
    """Two stacked layers."""

    def __init__(self, rngs):
        self.blocks = nnx.split_rngs(splits=2)(nnx.vmap(Block))(rngs)

    def __call__(self, x):
        return nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)


MODELS = [OwnLayers, FlaxLayers, Rematerialised, Scanned]


def normal(rng, shape):
    return jax.device_put(np.asarray(rng.standard_normal(shape), jnp.float32))


def made(rng, model):
    return model(nnx.Rngs(int(rng.integers(2**31))))


def states(tree):
    """{path: value} of the state."""
    flat = nnx.to_flat_state(nnx.state(tree, OverwriteWithGradient))
    return {path: np.asarray(variable[...]) for path, variable in flat}


def loss_fn(model, x):
    return jnp.mean(jnp.square(model(x)))


def reference(model, x):
    """The model in float32."""
    if isinstance(model, Scanned):
        linear = model.blocks.linear
        for layer in range(2):
            x = x + x @ linear.kernel[layer] + linear.bias[layer][None]
        return x
    x = nnx.silu(x @ model.up.kernel[...] + model.up.bias[...][None])
    return x @ model.down.kernel[...] + model.down.bias[...][None]


@nnx.jit
def observe(model, x):
    overwrite_with_gradient(model, nnx.grad(loss_fn, argnums=WRT)(model, x))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_history_advances_with_an_optimizer(rng, model):
    model = made(rng, model)
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)
    assert not any(history.any() for path, history in states(model).items() if "history" in path[-1])

    @nnx.jit
    def step(model, optimizer, x):
        loss, gradients = nnx.value_and_grad(loss_fn, argnums=WRT)(model, x)
        optimizer.update(model, gradients)
        overwrite_with_gradient(model, gradients)
        return loss

    for count in range(1, HISTORY + 2):
        before = states(model)
        step(model, optimizer, normal(rng, (16, 32)) * 2.0**count)  # growing: no two steps observe the same
        assert len(before) == 8 if not isinstance(model, Scanned) else 4
        for path, history in states(model).items():
            if "history" not in path[-1]:
                continue
            assert (history[..., 0] > 0).all(), path
            assert (history[..., 0] != before[path][..., 0]).all(), path
            np.testing.assert_array_equal(history[..., 1:], before[path][..., :-1])
            assert (np.count_nonzero(history, axis=-1) == min(count, HISTORY)).all()


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_the_next_step_uses_what_this_one_observed(rng, model):
    """Inputs beyond the range of FP8 saturate under a scale of 1; once they were seen, they do not."""
    model, x = made(rng, model), normal(rng, (16, 32)) * 1e4

    @nnx.jit
    def step(model, x):
        def loss(model):
            y = model(x)
            return jnp.mean(jnp.square(y)), y

        gradients, y = nnx.grad(loss, argnums=WRT, has_aux=True)(model)
        overwrite_with_gradient(model, gradients)
        return y

    errors = []
    for _ in range(4):  # a layer needs the one before it to be right
        errors.append(relative_error(step(model, x), reference(model, x)))
    assert errors[0] > 0.5
    assert errors[-1] < 0.12


def test_split_and_merge_keep_it(rng):
    """A loop over pure functions, as in jax.jit and jax.lax.scan: what comes out of one step goes into the next."""
    model = made(rng, OwnLayers)
    graphdef, trained, rest = nnx.split(model, TRAINED, ...)
    batches = jnp.stack([normal(rng, (16, 32)) * 2.0**step for step in range(3)])

    @jax.jit
    def train(trained, batches):
        def step(trained, x):
            model = nnx.merge(graphdef, trained, rest, copy=True)
            gradients = nnx.grad(loss_fn, argnums=WRT)(model, x)
            overwrite_with_gradient(model, gradients)
            return nnx.state(model, TRAINED), model.up.activation_amax_history[...]

        return jax.lax.scan(step, trained, batches)

    trained, seen = train(trained, batches)
    largest = np.abs(np.asarray(batches)).max((1, 2))
    np.testing.assert_array_equal(seen[:, 0], largest)
    np.testing.assert_array_equal(seen[-1, :3], largest[::-1])
    merged = nnx.merge(graphdef, trained, rest)
    np.testing.assert_array_equal(merged.up.activation_amax_history[...], seen[-1])


def test_accumulated_microbatches_keep_the_largest(rng):
    """The largest magnitude is in the first microbatch: adding, averaging or keeping the last one would lose it."""
    model = made(rng, OwnLayers)
    observe(model, normal(rng, (16, 32)))
    microbatches = [normal(rng, (16, 32)) * scale for scale in (8.0, 1.0, 2.0)]

    @nnx.jit
    def accumulated(model, microbatches):
        gradients = [nnx.grad(loss_fn, argnums=WRT)(model, x) for x in microbatches]
        return merge_gradients(merge_gradients(gradients[0], gradients[1]), gradients[2])

    gradient = nnx.jit(nnx.grad(loss_fn, argnums=WRT))
    single = [gradient(model, x) for x in microbatches]
    actual = accumulated(model, microbatches)
    for path, history in states(actual).items():
        np.testing.assert_allclose(history, np.max([states(g)[path] for g in single], axis=0), rtol=1e-5)
    assert actual["up"]["activation_amax_history"][0] == jnp.abs(microbatches[0]).max()
    kernels = [gradients["up"]["kernel"][...] for gradients in single]
    assert relative_error(actual["up"]["kernel"][...], np.sum(kernels, axis=0)) < 1e-4
    before = states(model)
    overwrite_with_gradient(model, actual)
    np.testing.assert_array_equal(model.up.activation_amax_history[1:], before["up", "activation_amax_history"][:-1])


def test_a_layer_that_is_called_twice_in_one_gradient(rng):
    """JAX adds up the two next states. Older entries stay what they were; the newest stays an upper bound."""
    model, x = made(rng, Block), normal(rng, (16, 32))

    def twice(model, x):
        return jnp.mean(jnp.square(model(model(x) * 3.0)))

    first, peaks = float(jnp.abs(x).max()), []
    gradient = nnx.jit(nnx.grad(twice, argnums=WRT))
    for _ in range(HISTORY + 2):
        overwrite_with_gradient(model, gradient(model, x))
        peaks.append(float(model.linear.activation_amax_history[0]))
        assert 2 * first < peaks[-1] < 30 * first
        assert model.linear.uses[...] == 2
    history = np.asarray(model.linear.activation_amax_history[...])
    np.testing.assert_allclose(history[1:] / 2, peaks[-2 : -HISTORY - 1 : -1], rtol=1e-6)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_layer_that_a_step_leaves_out_keeps_its_state(stacked, rng):
    model, x = made(rng, Scanned if stacked else OwnLayers), normal(rng, (16, 32))
    for _ in range(2):
        observe(model, x)
    before = states(model)
    gradients = nnx.jit(nnx.grad(lambda model, x: jnp.sum(x) + 0.0 * loss_fn(model, x), argnums=WRT))(model, x)
    unused = nnx.grad(lambda model, x: jnp.sum(x), argnums=WRT)(model, x)
    overwrite_with_gradient(model, unused)
    jax.tree.map(np.testing.assert_array_equal, states(model), before)
    overwrite_with_gradient(model, gradients)
    after = states(model)
    assert all(
        np.array_equal(after[path][..., 1:], old[..., :-1]) for path, old in before.items() if "uses" not in path
    )


def test_of_stacked_layers_those_that_were_used_advance(rng):
    model, x = made(rng, Scanned), normal(rng, (16, 32))
    observe(model, x)
    before = states(model)
    used, unused = (nnx.jit(nnx.grad(loss, argnums=WRT))(model, x) for loss in (loss_fn, lambda model, x: jnp.sum(x)))
    overwrite_with_gradient(model, jax.tree.map(lambda a, b: jnp.concatenate([a[:1], b[1:]]), used, unused))
    for path, after in states(model).items():
        if "uses" not in path:
            np.testing.assert_array_equal(after[0, 1:], before[path][0, :-1])
            assert after[0, 0] > 0
            np.testing.assert_array_equal(after[1:], before[path][1:])


def test_state_survives_checkpoints(rng, tmp_path):
    model, x = made(rng, OwnLayers), normal(rng, (16, 32))
    observe(model, x)
    gradient = nnx.jit(nnx.grad(loss_fn, argnums=WRT))
    expected = nnx.to_pure_dict(gradient(model, x))
    graphdef, state = nnx.split(model)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", nnx.to_pure_dict(state))
        checkpointer.wait_until_finished()
        abstract = nnx.state(nnx.eval_shape(lambda: OwnLayers(nnx.Rngs(0))))
        restored = checkpointer.restore(tmp_path / "checkpoint", nnx.to_pure_dict(abstract))
    nnx.replace_by_pure_dict(abstract, restored)
    model = nnx.merge(graphdef, abstract)
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(gradient(model, x)), expected)


def test_bridges_between_the_two_apis_know_the_state(rng):
    x = normal(rng, (16, 32))
    model = nnx.bridge.ToNNX(Dense(32, recipe=RECIPE), rngs=nnx.Rngs(0)).lazy_init(x)
    for _ in range(2):
        overwrite_with_gradient(model, nnx.grad(loss_fn, argnums=WRT)(model, x))
    np.testing.assert_array_equal(model.activation_amax_history[...], [jnp.abs(x).max()] * 2 + [0] * (HISTORY - 2))

    linen = nnx.bridge.to_linen(Linear, 32, 32, recipe=RECIPE)
    variables = linen.init(jax.random.key(0), x)
    state = TrainState.create(apply_fn=linen.apply, params=variables, tx=optax.sgd(0.1, momentum=0.9))
    gradients = jax.grad(lambda variables: loss_fn(lambda x: linen.apply(variables, x), x))(variables)
    state = state.apply_gradients(grads=gradients)
    history = state.params[OVERWRITE]["activation_amax_history"]
    np.testing.assert_array_equal(history, [jnp.abs(x).max()] + [0] * (HISTORY - 1))


def test_state_of_flax_layers_in_fp8_is_overwritten_too(rng):
    """It comes under the same name through flax.nnx.bridge, and without a count of uses."""
    dense = nn.Dense(32, dot_general_cls=nn.Fp8DirectDotGeneralOp)
    x = normal(rng, (16, 32))
    model = nnx.bridge.ToNNX(dense, rngs=nnx.Rngs(0)).lazy_init(x)
    gradients = nnx.grad(loss_fn, argnums=WRT)(model, x)
    overwrite_with_gradient(model, gradients)
    state, expected = (nnx.to_pure_dict(nnx.state(tree, OverwriteWithGradient)) for tree in (model, gradients))
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    (histories,) = state.values()
    assert histories["input_amax_history"][0] == jnp.abs(x).max()


def test_gradients_without_the_state_are_refused(rng):
    model, x = made(rng, OwnLayers), normal(rng, (16, 32))
    gradients = nnx.grad(loss_fn, argnums=WRT)(model, x)
    with pytest.raises(ValueError, match=r"gradients have nothing for .*up.*activation_amax_history.*argnums="):
        overwrite_with_gradient(model, nnx.state(gradients, nnx.Param))
    with pytest.raises(ValueError, match=r"the kernel is differentiated and scaling_state is not.*nnx\.DiffState"):
        nnx.grad(loss_fn)(model, x)


def test_the_optimizer_does_not_see_the_state(rng):
    model = made(rng, OwnLayers)
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)
    names = {part for path, _ in jax.tree.leaves_with_path(nnx.state(optimizer)) for part in map(str, path)}
    assert any("kernel" in name for name in names)
    assert not any("history" in name or "uses" in name for name in names)


def test_a_sum_in_float32_stays_one():
    first, second = (nnx.State({"bias": nnx.Param(jnp.ones(4, dtype))}) for dtype in (jnp.float32, jnp.bfloat16))
    bias = merge_gradients(first, second)["bias"].get_value()
    np.testing.assert_array_equal(bias, np.full(4, 2.0, np.float32), strict=True)


def test_gradients_of_different_variables_are_not_merged():
    first, second, third = (
        nnx.state(Linear(size, 16, use_bias=use_bias, rngs=nnx.Rngs(0)))
        for size, use_bias in ((16, True), (16, False), (1, True))
    )
    with pytest.raises(ValueError, match=r"first and second differ in \['bias'\].*: merge gradients with respect to"):
        merge_gradients(first, second)
    with pytest.raises(ValueError, match=r"second has shape \(1, 16\) for kernel, and first \(16, 16\): merge"):
        merge_gradients(first, third)


def test_gradients_of_several_arguments_are_merged():
    states = tuple(nnx.state(Linear(16, size, rngs=nnx.Rngs(size))) for size in (16, 32))
    for tree in (states, list(states), {"a": states[0], "b": states[1]}):
        merged = merge_gradients(tree, tree)
        jax.tree.map(lambda one, two: np.testing.assert_array_equal(2 * one, two), tree, merged)
