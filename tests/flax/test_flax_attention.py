"""te_jax.flax.Attention against Flax's own, an oracle, and the NNX layer, with which it shares its arithmetic."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT as OVERWRITE
from flax.training.train_state import TrainState
from layer_oracle import attention_layer, visible

from te_jax import nnx as te_nnx
from te_jax import ops
from te_jax.flax import Attention, accumulate_gradients, quantize_kernels
from te_jax.quantized import QuantizedArray
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling
from te_jax.testing import assert_close

RECIPES = {
    "current": CurrentScaling(),
    "rowwise": RowwiseScaling(),
    "block": BlockScaling(),
    "delayed": DelayedScaling(history_len=4),
}
GROUPED = {"num_kv_heads": 2, "rope_theta": 100.0}


def normal(rng, shape, dtype=jnp.float32):
    return jax.device_put(np.asarray(rng.standard_normal(shape), jnp.dtype(dtype)))


def key_of(rng):
    return jax.random.key(int(rng.integers(2**31)))


def loss_of(model):
    return lambda variables, x: jnp.mean(jnp.square(model.apply(variables, x)))


@pytest.mark.parametrize(("use_bias", "causal"), [(False, True), (True, False)])
def test_without_rotary_positions_it_is_flaxs(rng, use_bias, causal):
    ours = Attention(4, rope_theta=None, use_bias=use_bias, causal=causal)
    theirs = nn.MultiHeadDotProductAttention(4, use_bias=use_bias)
    x, key = normal(rng, (2, 6, 32)), key_of(rng)
    variables = jax.jit(theirs.init)(key, x)
    for a, e in zip(*map(jax.tree.leaves_with_path, (ours.init(key, x), variables)), strict=True):
        assert a[0] == e[0]
        np.testing.assert_allclose(a[1], e[1], rtol=1e-5, atol=1e-6)  # only one of the two is under jit
    variables = jax.tree.map(lambda leaf: leaf + normal(rng, leaf.shape) / 10, variables)
    cotangent, mask = normal(rng, (2, 6, 32)), jnp.asarray(visible(2, 6, causal=causal)[:, None])

    def value_and_gradients(model, **arguments):
        y, pull = jax.vjp(lambda *operands: model.apply(*operands, **arguments), variables, x)
        return y, *pull(cotangent)

    for a, e in zip(
        *map(jax.tree.leaves, (value_and_gradients(ours), value_and_gradients(theirs, mask=mask))), strict=True
    ):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-4)  # the gradient of the bias of keys is 0


SEGMENTS = np.array([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 2]])
POSITIONS = np.array([[0, 1, 2, 0, 1, 2], [0, 0, 1, 2, 3, 0]])
CALLS = {
    "window": ({"window": 2}, {}, {"window": 2}),
    "packed": ({}, {"segment_ids": SEGMENTS, "positions": POSITIONS}, {"segments": SEGMENTS}),
    "padded": ({"causal": False}, {"key_lengths": np.array([4, 6])}, {"causal": False, "lengths": [4, 6]}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_groups_and_rotary_positions(rng, name):
    arguments, call, seen = CALLS[name]
    model, x = Attention(4, **GROUPED, **arguments), normal(rng, (2, 6, 32))
    variables = jax.jit(model.init)(key_of(rng), x)
    mask = visible(2, 6, **seen)
    expected = attention_layer(variables["params"], x, mask, theta=100.0, positions=call.get("positions"))
    assert_close(model.apply(variables, x, **call), expected)


@pytest.mark.parametrize("recipe", [None, RECIPES["block"], RECIPES["delayed"]], ids=["plain", "block", "delayed"])
def test_it_is_the_nnx_layer(rng, recipe):
    arguments = {**GROUPED, "head_dim": 32, "out_features": 48, "use_bias": True, "window": 5, "recipe": recipe}
    layer = te_nnx.Attention(64, 4, **arguments, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    model, x = Attention(4, **arguments, dtype=jnp.bfloat16), normal(rng, (2, 16, 64))
    params = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    variables = jax.tree.map(jnp.array, jax.jit(model.init)(key_of(rng), x)) | {"params": params}
    y = model.apply(variables, x)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, layer(x), strict=True)


def test_decoding_gives_what_the_whole_sequence_does(rng):
    arguments, x = {**GROUPED, "window": 3, "recipe": BlockScaling()}, normal(rng, (2, 9, 64))
    params = Attention(4, **arguments).init(key_of(rng), x)["params"]
    expected = Attention(4, **arguments).apply({"params": params}, x)
    model = Attention(4, **arguments, decode=True)
    cache = jax.jit(model.init)(key_of(rng), jnp.zeros((2, 10, 64)))["cache"]
    assert jax.tree.map(jnp.shape, cache) == {
        "cached_key": (2, 10, 2, 16), "cached_value": (2, 10, 2, 16), "cache_index": (),
    }  # fmt: skip
    assert cache["cache_index"] == 0

    @jax.jit
    def step(cache, x):
        y, changed = model.apply({"params": params, "cache": cache}, x, mutable=["cache"])
        return changed["cache"], y

    ys = []
    for part in (x[:, :5], *(x[:, t : t + 1] for t in range(5, 9))):
        cache, y = step(cache, part)
        ys.append(y)
    assert_close(jnp.concatenate(ys, axis=1), expected, tolerance=5e-3)  # values in FP8 may be rounded either way
    assert cache["cache_index"] == 9
    assert jnp.isnan(step(cache, x[:, :2])[1]).all()
    with pytest.raises(ValueError, match="x has 2 tokens, and the cache of length 10 holds 9 already"):
        model.apply({"params": params, "cache": cache}, x[:, :2], mutable=["cache"])


def test_x_may_come_from_a_norm_in_fp8(rng):
    recipe = BlockScaling()
    model, x, scale = Attention(4, recipe=recipe), normal(rng, (2, 128, 64)), 1 + normal(rng, (64,)) / 10
    variables = jax.jit(model.init)(key_of(rng), x)

    def gradients(quantization):
        def loss(variables, x, scale):
            return jnp.mean(jnp.square(model.apply(variables, ops.rms_norm(x, scale, quantization=quantization))))

        return jax.tree.leaves(jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(variables, x, scale))

    for actual, expected in zip(gradients(recipe.quantization("activation")), gradients(None), strict=True):
        assert_close(actual, expected, tolerance=1e-2)


@pytest.mark.slow
def test_state_of_delayed_scaling_advances(rng):
    model, x = Attention(4, recipe=RECIPES["delayed"]), normal(rng, (2, 16, 64))
    state = TrainState.create(apply_fn=model.apply, params=model.init(key_of(rng), x), tx=optax.sgd(0.1))
    step = jax.jit(lambda state, x: state.apply_gradients(grads=jax.grad(loss_of(model))(state.params, x)))
    before = step(state, x)
    after = step(before, 2 * x)
    for name, layer in after.params[OVERWRITE].items():
        kernel = before.params["params"][name]["kernel"]
        assert layer["kernel_amax_history"][0] == jnp.abs(kernel).max()
        assert (layer["gradient_amax_history"][:2] > 0).all()
        if name != "out":
            np.testing.assert_array_equal(
                layer["activation_amax_history"][:2], jnp.abs(x).max() * jnp.array([2.0, 1.0])
            )


class Stacked(nn.Module):
    recipe: object

    @nn.compact
    def __call__(self, x):
        class Block(nn.Module):
            recipe: object

            @nn.compact
            def __call__(self, x, _):
                return x + Attention(4, **GROUPED, recipe=self.recipe, name="attention")(x), None

        axes = {"params": 0, OVERWRITE: 0}
        layers = nn.scan(nn.remat(Block), variable_axes=axes, split_rngs={"params": True}, length=2)
        return layers(self.recipe, name="layers")(x, None)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "recipe"), [(Attention, "block"), (Stacked, "delayed")])
def test_kernels_are_quantized_once(rng, model, recipe):
    recipe = RECIPES[recipe]
    model = Stacked(recipe) if model is Stacked else Attention(4, **GROUPED, recipe=recipe)
    microbatches = normal(rng, (2, 2, 16, 64))
    variables = jax.jit(model.init)(key_of(rng), microbatches[0])
    gradients_of = jax.jit(jax.grad(loss_of(model)))
    if OVERWRITE in variables:  # scales of kernels quantized once are always up to date
        variables |= {OVERWRITE: gradients_of(variables, microbatches[0])[OVERWRITE]}

    @jax.jit
    def accumulated(variables, microbatches):
        quantized = quantize_kernels(model, variables, microbatches[0])
        kernels = jax.tree.leaves(quantized["params"], is_leaf=lambda leaf: isinstance(leaf, QuantizedArray))
        assert [type(kernel) for kernel in kernels] == [QuantizedArray] * 4

        def one(gradients, x):
            return accumulate_gradients(loss_of(model))(quantized, gradients, x)[::-1]

        return jax.lax.scan(one, jax.tree.map(jnp.zeros_like, variables), microbatches)[0]

    actual = accumulated(variables, microbatches)["params"]
    first, second = (gradients_of(variables, x)["params"] for x in microbatches)
    jax.tree.map(lambda a, e, f: assert_close(a, e + f, tolerance=5e-3), actual, first, second)


def test_names_of_axes(rng):
    axes = ("embed", "heads", "head_dim")
    model = Attention(
        4,
        use_bias=True,
        kernel_axes=axes,
        bias_axes=axes[1:],
        out_kernel_axes=axes[1:] + axes[:1],
        out_bias_axes=axes[:1],
        qk_norm=True,
        scale_axes=axes[-1:],
    )
    variables = jax.jit(model.init)(key_of(rng), normal(rng, (1, 3, 32)))
    specs = nn.get_partition_spec(variables)["params"]
    assert [tuple(specs[name]["kernel"]) for name in ("query", "key", "value")] == [axes] * 3
    assert tuple(specs["value"]["bias"]) == axes[1:]
    assert tuple(specs["query_ln"]["scale"]) == tuple(specs["key_ln"]["scale"]) == axes[-1:]
    assert (tuple(specs["out"]["kernel"]), tuple(specs["out"]["bias"])) == (axes[1:] + axes[:1], axes[:1])


def test_dropout_is_of_the_result(rng):
    model, x = Attention(4, dropout_rate=0.5), normal(rng, (2, 8, 32))
    variables = model.init(key_of(rng), x, deterministic=True)
    y = model.apply(variables, x, deterministic=True)
    dropped = model.apply(variables, x, deterministic=False, rngs={"dropout": key_of(rng)})
    assert 0.3 < jnp.mean(dropped == 0) < 0.7
    np.testing.assert_allclose(dropped, jnp.where(dropped == 0, 0, 2 * y), rtol=1e-6)


ERRORS = {
    "heads": ({"num_kv_heads": 3}, {}, r"num_kv_heads is 3 and num_heads 4; the first must divide the second"),
    "dimensions": (
        {},
        {"x": jnp.ones((6, 32))},
        r"x has shape \(6, 32\); it must be \[batch, time, in_features\]: add",
    ),
    "packed": (
        {"decode": True},
        {"segment_ids": SEGMENTS},
        r"segment_ids are given with decode=True, .* leave them out",
    ),
    "axes": ({"kernel_axes": ("embed",)}, {}, r"kernel_axes is \('embed',\); for shape \(32, 4, 8\) it must have 3"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_argument_rule_and_way_out(name):
    arguments, call, message = ERRORS[name]
    model, call = Attention(4, **arguments), {"x": jnp.ones((2, 6, 32)), **call}

    def fail():
        variables = jax.jit(model.init)(jax.random.key(0), call["x"])
        model.apply(variables, **call, mutable=["cache"])

    with pytest.raises(ValueError, match=message):
        fail()
