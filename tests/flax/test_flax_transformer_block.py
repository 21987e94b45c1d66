"""te_jax.flax.TransformerBlock against the NNX one, with which it shares its arithmetic, and as Linen uses it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT as OVERWRITE
from flax.training.train_state import TrainState

from te_jax import nnx as te_nnx
from te_jax.flax import TransformerBlock, accumulate_gradients, quantize_kernels
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling
from te_jax.testing import assert_close

RECIPES = {
    "plain": None,
    "current": CurrentScaling(),
    "rowwise": RowwiseScaling(),
    "block": BlockScaling(),
    "delayed": DelayedScaling(history_len=4),
    "by role": {"attention": BlockScaling(), "mlp": DelayedScaling(history_len=4)},
}
SHAPE = {"hidden_features": 96, "num_heads": 4, "num_kv_heads": 2, "rope_theta": 100.0}


def normal(rng, shape, dtype=jnp.float32):
    return jax.device_put(np.asarray(rng.standard_normal(shape), jnp.dtype(dtype)))


def key_of(rng):
    return jax.random.key(int(rng.integers(2**31)))


def loss_of(model):
    return lambda variables, x: jnp.mean(jnp.square(model.apply(variables, x)))


@pytest.mark.parametrize(("name", "time"), [("plain", 128), ("current", 128), ("by role", 128), ("block", 16)])
def test_it_is_the_nnx_block(rng, name, time):
    arguments = {**SHAPE, "recipe": RECIPES[name], "dtype": jnp.bfloat16}
    if name == "current":
        arguments |= {"norm": "layer", "kind": "gelu", "epsilon": 1e-2, "window": 5, "qk_norm": True}
    if name == "plain":
        arguments |= {"zero_centered": True, "qk_norm": True}
    block = te_nnx.TransformerBlock(64, **arguments, rngs=nnx.Rngs(0))
    model, x = TransformerBlock(**arguments), normal(rng, (2, time, 64), jnp.bfloat16)
    variables = jax.jit(model.init)(key_of(rng), x)
    params = nnx.to_pure_dict(nnx.state(block, nnx.Param))
    assert jax.tree.map(jnp.shape, variables["params"]) == jax.tree.map(jnp.shape, params)
    np.testing.assert_array_equal(model.apply(variables | {"params": params}, x), block(x), strict=True)


@pytest.mark.slow
def test_decoding_gives_what_the_whole_sequence_does(rng):
    arguments, x = {**SHAPE, "window": 3}, normal(rng, (2, 7, 64))
    whole, model = TransformerBlock(**arguments), TransformerBlock(**arguments, decode=True)
    expected, variables = jax.jit(whole.init_with_output)(key_of(rng), x)
    cache = jax.jit(model.init)(key_of(rng), x)["cache"]

    @jax.jit
    def step(cache, part):
        y, changed = model.apply({**variables, "cache": cache}, part, mutable=["cache"])
        return changed["cache"], y

    ys = []
    for part in (x[:, :4], *(x[:, t : t + 1] for t in range(4, 7))):
        cache, y = step(cache, part)
        ys.append(y)
    assert_close(jnp.concatenate(ys, axis=1), expected)


@pytest.mark.slow
def test_state_of_delayed_scaling_advances(rng):
    model, x = TransformerBlock(**SHAPE, recipe=RECIPES["delayed"]), normal(rng, (2, 16, 64))
    state = TrainState.create(apply_fn=model.apply, params=model.init(key_of(rng), x), tx=optax.sgd(0.1))
    step = jax.jit(lambda state, x: state.apply_gradients(grads=jax.grad(loss_of(model))(state.params, x)))
    leaves = jax.tree.leaves_with_path(step(step(state, x), x).params[OVERWRITE])
    histories = [leaf for path, leaf in leaves if path[-1].key != "uses"]
    assert len(histories) == 7 * 3
    for history in histories:
        assert (history[:2] > 0).all()
        assert (history[2:] == 0).all()


class Stacked(nn.Module):
    """Two blocks with the same code, rematerialized."""

    recipe: object

    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            recipe: object

            @nn.compact
            def __call__(self, x, _):
                return TransformerBlock(**SHAPE, recipe=self.recipe, name="block")(x), None

        axes = {"params": 0, OVERWRITE: 0}
        layers = nn.scan(nn.remat(Layer), variable_axes=axes, split_rngs={"params": True}, length=2)
        return layers(self.recipe, name="layers")(x, None)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["by role"])
def test_kernels_are_quantized_once(rng, name):
    model, microbatches = Stacked(RECIPES[name]), normal(rng, (2, 2, 128, 64))
    variables = jax.jit(model.init)(key_of(rng), microbatches[0])
    gradients_of = jax.jit(jax.grad(loss_of(model)))
    if OVERWRITE in variables:  # scales of kernels quantized once are always up to date
        variables |= {OVERWRITE: gradients_of(variables, microbatches[0])[OVERWRITE]}

    @jax.jit
    def accumulated(variables, microbatches):
        quantized = quantize_kernels(model, variables, microbatches[0])

        def one(gradients, x):
            return accumulate_gradients(loss_of(model))(quantized, gradients, x)[::-1]

        return jax.lax.scan(one, jax.tree.map(jnp.zeros_like, variables), microbatches)[0]

    actual = accumulated(variables, microbatches)["params"]
    first, second = (gradients_of(variables, x)["params"] for x in microbatches)
    jax.tree.map(lambda a, e, f: assert_close(a, e + f, tolerance=5e-3), actual, first, second)


@pytest.mark.slow
def test_dropout_is_of_both_parts(rng):
    model, x = TransformerBlock(**SHAPE, dropout_rate=0.5), normal(rng, (2, 64, 64))
    params = model.init(key_of(rng), x, deterministic=True)["params"]

    def without(part, layer, **arguments):
        changed = params | {part: params[part] | {layer: {"kernel": 0 * params[part][layer]["kernel"]}}}
        return model.apply({"params": changed}, x, **arguments) == x

    for silent in (("mlp", "down_proj"), ("attention", "out")):
        assert 0.3 < jnp.mean(without(*silent, deterministic=False, rngs={"dropout": key_of(rng)})) < 0.7
        assert not jnp.any(without(*silent, deterministic=True))


ERRORS = {
    "norm": ({"norm": "batch"}, r"norm is 'batch'; it must be 'rms' or 'layer'"),
    "roles": ({"recipe": {"mlp": None}}, r"recipe has the keys \['mlp'\]; it must be .* 'mlp'"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_argument_rule_and_way_out(name):
    arguments, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        TransformerBlock(**SHAPE, **arguments).init(jax.random.key(0), jnp.ones((2, 3, 64)))
