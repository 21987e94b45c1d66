"""te_jax.nnx.Attention against an oracle and the operations that it calls. Linen's agrees with it: tests/modules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax_apis import NNX, normal, value_and_gradients
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from layer_oracle import attention_layer, visible

from te_jax import ops
from te_jax.layers.attention import rotary_tables, rotate
from te_jax.nnx import Attention, OverwriteWithGradient, overwrite_with_gradient
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling
from te_jax.testing import assert_close, relative_error

RECIPES = {
    "current": CurrentScaling(),
    "rowwise": RowwiseScaling(),
    "block": BlockScaling(),
    "delayed": DelayedScaling(history_len=4),
}
GROUPED = {"num_kv_heads": 2, "rope_theta": 100.0}
TRAINED = nnx.Any(nnx.Param, OverwriteWithGradient)


def rngs_of(rng):
    return nnx.Rngs(int(rng.integers(2**31)))


def test_sizes(rng):
    layer = Attention(
        48, 4, num_kv_heads=2, head_dim=8, out_features=16, use_bias=True, qk_norm="rms", rngs=rngs_of(rng)
    )
    shapes = nnx.to_pure_dict(jax.tree.map(jnp.shape, nnx.state(layer)))
    assert shapes == {
        "query": {"kernel": (48, 4, 8), "bias": (4, 8)},
        "key": {"kernel": (48, 2, 8), "bias": (2, 8)},
        "value": {"kernel": (48, 2, 8), "bias": (2, 8)},
        "query_ln": {"scale": (8,)},
        "key_ln": {"scale": (8,)},
        "out": {"kernel": (4, 8, 16), "bias": (16,)},
    }
    assert layer(normal(rng, (3, 5, 48))).shape == (3, 5, 16)


SEGMENTS = np.array([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 2]])
POSITIONS = np.array([[0, 1, 2, 0, 1, 2], [0, 0, 1, 2, 3, 0]])
CALLS = {
    "rotary": ({}, {}, {}),
    "window": ({"window": 2}, {}, {"window": 2}),
    "not causal": ({"causal": False}, {}, {"causal": False}),
    "packed": ({}, {"segment_ids": SEGMENTS}, {"segments": SEGMENTS}),
    "padded": ({"causal": False}, {"key_lengths": np.array([4, 6])}, {"causal": False, "lengths": [4, 6]}),
    "positions": ({}, {"segment_ids": SEGMENTS, "positions": POSITIONS}, {"segments": SEGMENTS}),
}


@pytest.mark.parametrize("name", CALLS)
def test_groups_and_rotary_positions(rng, name):
    arguments, call, seen = CALLS[name]
    layer, x = Attention(32, 4, **GROUPED, **arguments, rngs=rngs_of(rng)), normal(rng, (2, 6, 32))
    params = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    expected = attention_layer(params, x, visible(2, 6, **seen), theta=100.0, positions=call.get("positions"))
    assert_close(layer(x, **call), expected)


def test_decode_may_be_an_attribute_and_the_cache_may_be_smaller(rng):
    layer, x = Attention(32, 4, rngs=rngs_of(rng)), normal(rng, (2, 4, 32))
    layer.set_attributes(decode=True)
    layer.init_cache(2, 4, jnp.bfloat16)
    assert {type(v) for v in (layer.cached_key, layer.cached_value, layer.cache_index)} == {nnx.Cache}
    assert layer.cached_key.dtype == jnp.bfloat16
    expected = layer(x, decode=False)
    for _ in range(2):
        layer.cache_index.set_value(jnp.zeros((), jnp.int32))  # what is in the cache behind it is not seen
        assert_close(layer(x), expected, tolerance=1e-2)
        assert layer.cache_index[...] == 4
    np.testing.assert_array_equal(layer(x, decode=False), expected)  # without decode the cache is not read


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_it_is_the_operations(rng, recipe):
    layer = Attention(64, 4, **GROUPED, window=7, use_bias=True, recipe=recipe, dtype=jnp.bfloat16, rngs=rngs_of(rng))
    x, states = normal(rng, (2, 16, 64), jnp.bfloat16), None
    if isinstance(recipe, DelayedScaling):
        states = (recipe.init(),) * 3
    layers = (layer.query, layer.key, layer.value)
    for module in layers:
        module.bias[...] = normal(rng, module.bias.shape)
    kernels, biases = ([getattr(module, name)[...] for module in layers] for name in ("kernel", "bias"))
    query, key, value = ops.dense(x, tuple(kernels), tuple(biases), recipe=recipe, scaling_state=states)
    tables = rotary_tables(jnp.arange(16), 16, 100.0)
    mixed = ops.attention(rotate(query, *tables), rotate(key, *tables), value, causal=True, window=7)
    state = None if states is None else states[0]
    expected = ops.dense(mixed, layer.out.kernel[...], recipe=recipe, contracting_ndim=2, scaling_state=state)
    np.testing.assert_array_equal(layer(x), expected, strict=True)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_value_and_gradients_in_fp8(rng, recipe):
    seed, x, cotangent = int(rng.integers(2**31)), normal(rng, (2, 32, 64)), normal(rng, (2, 32, 64))
    layer, plain = (Attention(64, 4, **GROUPED, recipe=r, rngs=nnx.Rngs(seed)) for r in (recipe, None))
    y, of_layer, _, (dx,) = value_and_gradients(NNX, layer, x, cotangent=cotangent)
    expected_y, of_plain, _, (expected_dx,) = value_and_gradients(NNX, plain, x, cotangent=cotangent)
    errors = [relative_error(y, expected_y), relative_error(dx, expected_dx)]
    errors += [relative_error(of_layer[name]["kernel"], of_plain[name]["kernel"]) for name in of_plain]
    assert all(0.01 < error < 0.16 for error in errors), errors


@pytest.mark.parametrize("recipe", [CurrentScaling(), BlockScaling()], ids=["current", "block"])
def test_x_may_come_from_a_norm_in_fp8(rng, recipe):
    layer, scale = Attention(64, 4, **GROUPED, recipe=recipe, rngs=rngs_of(rng)), 1 + normal(rng, (64,)) / 10
    x, cotangent = normal(rng, (2, 128, 64)), normal(rng, (2, 128, 64))

    def value_and_gradients_of(quantization):
        @nnx.jit
        def found(layer, x, scale):
            def loss(layer, x, scale):
                y = layer(ops.rms_norm(x, scale, quantization=quantization))
                return jnp.sum(y * cotangent), y

            return nnx.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(layer, x, scale)

        (_, y), gradients = found(layer, x, scale)
        return jax.tree.leaves((y, gradients))

    for actual, expected in zip(*map(value_and_gradients_of, (recipe.quantization("activation"), None)), strict=True):
        assert_close(actual, expected, tolerance=1e-2)


def test_state_of_delayed_scaling_advances(rng):
    layer, x = Attention(64, 4, recipe=RECIPES["delayed"], rngs=rngs_of(rng)), normal(rng, (2, 16, 64))
    optimizer = nnx.Optimizer(layer, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(layer, optimizer, x):
        gradients = nnx.grad(lambda layer: jnp.mean(layer(x) ** 2), argnums=nnx.DiffState(0, TRAINED))(layer)
        optimizer.update(layer, gradients)
        overwrite_with_gradient(layer, gradients)

    step(layer, optimizer, x)
    kernels = [module.kernel[...] for module in (layer.query, layer.key, layer.value, layer.out)]
    step(layer, optimizer, 2 * x)
    for module, kernel in zip((layer.query, layer.key, layer.value, layer.out), kernels, strict=True):
        assert module.kernel_amax_history[0] == jnp.abs(kernel).max()
        assert (module.gradient_amax_history[:2] > 0).all()
        assert module.uses[...] == 1
    for module in (layer.query, layer.key, layer.value):
        np.testing.assert_array_equal(module.activation_amax_history[:2], jnp.abs(x).max() * jnp.array([2.0, 1.0]))


def test_on_an_explicit_mesh(rng, make_mesh):
    mesh = make_mesh({"data": AxisType.Explicit, "model": AxisType.Explicit})
    arguments = {**GROUPED, "recipe": CurrentScaling(), "rngs": nnx.Rngs(0)}
    batch = 2 * mesh.shape["data"]
    x, rows = normal(rng, (batch, 16, 64)), P("data", None, None)
    expected = Attention(64, 4, **arguments)(x)
    with jax.set_mesh(mesh):
        columns, lines = (
            nnx.with_metadata(nnx.initializers.lecun_normal(), out_sharding=names)
            for names in ((None, "model", None), ("model", None, None))
        )
        arguments["rngs"] = nnx.Rngs(0)
        layer = Attention(64, 4, **arguments, kernel_init=columns, out_kernel_init=lines)
        x = jax.device_put(x, NamedSharding(mesh, rows))
        layer.init_cache(batch, 16)
        for decode in (False, True):
            y = nnx.jit(lambda layer, x, decode=decode: layer(x, decode=decode, out_sharding=rows))(layer, x)
            assert jax.typeof(y).sharding.spec == rows
            assert_close(np.asarray(y), expected, tolerance=1e-5 if not decode else 1e-2)


ERRORS = {
    "no heads": ({"num_heads": 0}, {}, r"num_heads is 0; it must be an integer of at least 1"),
    "head_dim": ({"num_heads": 5}, {}, r"num_heads is 5, which does not divide the 32 input features: pass head_dim"),
    "odd": ({"head_dim": 5}, {}, r"head_dim is 5, and rotary .* make it even, or use rope_theta=None"),
    "theta": ({"rope_theta": -1.0}, {}, r"rope_theta is -1.0; it must be a positive number, or None"),
    "window": ({"window": 2, "causal": False}, {}, r"window is 2 with causal=False; .* with causal=True"),
    "features": ({}, {"x": jnp.ones((2, 6, 16))}, r"x has shape \(2, 6, 16\); it must be \[batch, time, 32\]"),
    "positions": ({}, {"positions": jnp.ones(6)}, r"positions have shape \(6,\) and dtype float32; they must be int"),
    "other positions": ({}, {"positions": jnp.arange(5)}, r"they must be integers, of shape \(6,\) or \(2, 6\)"),
    "no theta": ({"rope_theta": None}, {"positions": jnp.arange(6)}, r"rope_theta is None, .* leave them out"),
    "no cache": ({}, {"decode": True}, r"there is no cache: call init_cache\(batch, length\) first"),
    "both ways": ({"causal": False}, {"decode": True, "cache": (2, 6)}, r"causal is False, .* use causal=True"),
    "packed": ({}, {"decode": True, "cache": (2, 6), "segment_ids": SEGMENTS}, r"segment_ids are given with decode"),
    "batch": ({}, {"decode": True, "cache": (3, 6)}, r"x gives keys of shape \(2, 6, 4, 8\), and the cache holds \(3"),
    "long": ({}, {"decode": True, "cache": (2, 5)}, r"x has 6 tokens, and the cache of length 5 holds 0 already"),
    "empty": ({}, {"cache": (2, 0)}, r"length is 0; it must be an integer of at least 1"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_argument_rule_and_way_out(name):
    arguments, call, message = ERRORS[name]
    call = {"x": jnp.ones((2, 6, 32)), **call}

    def fail():
        layer = Attention(32, **{"num_heads": 4, **arguments}, rngs=nnx.Rngs(0))
        if "cache" in call:
            layer.init_cache(*call.pop("cache"))
        layer(**call)

    with pytest.raises(ValueError, match=message):
        fail()
