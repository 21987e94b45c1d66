"""Attention and the transformer block against oracles and the operations that they call, each in one of the APIs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_apis import LINEN, NNX, normal, value_and_gradients
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from layer_oracle import attention_layer, transformer_block, visible
from parameters import in_turns

from te_jax import ops
from te_jax.layers import Norm
from te_jax.layers.attention import rotary_tables, rotate
from te_jax.nnx import Attention
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling
from te_jax.testing import assert_close

DELAYED = DelayedScaling(history_len=4)
GROUPED = {"num_kv_heads": 2, "rope_theta": 100.0}
SEGMENTS = np.array([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 2]])
POSITIONS = np.array([[0, 1, 2, 0, 1, 2], [0, 0, 1, 2, 3, 0]])
# Arguments of the layer and of the call, and who sees whom.
CALLS = {
    "window": ({"window": 2}, {}, {"window": 2}),
    "packed": ({}, {"segment_ids": SEGMENTS}, {"segments": SEGMENTS}),
    "padded": ({"causal": False}, {"key_lengths": np.array([4, 6])}, {"causal": False, "lengths": [4, 6]}),
    "positions": ({}, {"segment_ids": SEGMENTS, "positions": POSITIONS}, {"segments": SEGMENTS}),
}


@pytest.mark.parametrize(("case", "api"), in_turns(CALLS, {"linen": LINEN, "nnx": NNX}))
def test_groups_and_rotary_positions(rng, api, case):
    arguments, call, seen = case
    x = normal(rng, (2, 6, 32))
    layer = api.drawn(api.layer("Attention", 32, 4, **GROUPED, **arguments), rng, x)
    mask, positions = visible(2, 6, **seen), call.get("positions")

    @jax.jit
    def expected(parameters, x):
        return attention_layer(parameters, x, mask, theta=100.0, positions=positions)

    assert_close(api.jit(lambda layer, x: layer(x, **call))(layer, x), expected(api.parameters(layer), x))


@pytest.mark.parametrize(("api", "recipe"), [(NNX, DELAYED)], ids=["nnx"])
def test_attention_is_the_operations(rng, api, recipe):
    x, delayed = normal(rng, (2, 16, 64), jnp.bfloat16), recipe is DELAYED
    layer = api.layer("Attention", 64, 4, **GROUPED, window=7, use_bias=True, recipe=recipe, dtype=jnp.bfloat16)
    layer = api.drawn(layer, rng, x)
    parameters = api.parameters(layer)

    @jax.jit
    def expected(parameters, x):
        of_x = [parameters[name] for name in ("query", "key", "value")]
        kernels, biases = (tuple(layer[name] for layer in of_x) for name in ("kernel", "bias"))
        states = (recipe.init(),) * 3 if delayed else None
        query, key, value = ops.dense(x, kernels, biases, recipe=recipe, scaling_state=states)
        tables = rotary_tables(jnp.arange(16), 16, 100.0)
        mixed = ops.attention(rotate(query, *tables), rotate(key, *tables), value, causal=True, window=7)
        state = recipe.init() if delayed else None
        out = parameters["out"]
        return ops.dense(mixed, out["kernel"], out["bias"], recipe=recipe, contracting_ndim=2, scaling_state=state)

    y, _, states, _ = value_and_gradients(api, layer, x)
    np.testing.assert_array_equal(y, expected(parameters, x), strict=True)
    for name in parameters if delayed else ():
        assert states[f"{name}/kernel_amax_history"][0] == np.abs(np.asarray(parameters[name]["kernel"])).max()
        assert states[f"{name}/gradient_amax_history"][0] > 0
        assert states[f"{name}/uses"] == 1
        if name != "out":
            assert states[f"{name}/activation_amax_history"][0] == np.abs(np.asarray(x, np.float32)).max()


def test_attention_on_an_explicit_mesh(make_mesh):
    mesh = make_mesh({"data": AxisType.Explicit, "model": AxisType.Explicit})
    batch, rows = 2 * mesh.shape["data"], P("data", None, None)
    with jax.set_mesh(mesh):
        columns, lines = (NNX.named(names) for names in ((None, "model", None), ("model", None, None)))

        def call(x, decode):
            rngs = nnx.Rngs(0)
            layer = Attention(64, 4, **GROUPED, kernel_init=columns, out_kernel_init=lines, rngs=rngs)
            layer.init_cache(batch, 16)
            return layer(x, decode=decode, out_sharding=rows)

        x = jax.ShapeDtypeStruct((batch, 16, 64), jnp.float32, sharding=jax.NamedSharding(mesh, rows))
        for decode in (False, True):
            assert nnx.eval_shape(lambda x, decode=decode: call(x, decode), x).sharding.spec == rows


SHAPE = {"num_kv_heads": 2, "rope_theta": 100.0}
VARIANTS = {
    "others": {"activation": "gelu", "window": 3, "norm": Norm("rms", 1e-2, True), "qk_norm": Norm("rms", 1e-2, True)},
}


@pytest.mark.parametrize(("arguments", "api"), in_turns(VARIANTS, {"linen": LINEN, "nnx": NNX}))
def test_a_block(rng, api, arguments):
    x = normal(rng, (2, 9, 64))
    block = api.drawn(api.layer("TransformerBlock", 64, 96, 4, **SHAPE, **arguments), rng, x)
    cotangent = normal(rng, x.shape)

    @jax.jit
    def expected(parameters, x):
        y, vjp = jax.vjp(lambda *of: transformer_block(*of, theta=100.0, **arguments), parameters, x)
        return y, *vjp(cotangent)

    y, gradients, _, (dx,) = value_and_gradients(api, block, x, cotangent=cotangent)
    wanted = expected(api.parameters(block), x)
    jax.tree.map(lambda a, e: assert_close(a, e, tolerance=2e-5), (y, gradients, dx), wanted)


@pytest.mark.parametrize(
    ("recipe", "time"),
    [({"attention": BlockScaling(), "mlp": DELAYED}, 16), (CurrentScaling(), 16)],
    ids=["by role, blocks that are cut", "current"],
)
def test_a_block_is_the_operations(rng, recipe, time):
    """Norms hand x over in FP8 where the whole of it is scaled, or whole blocks."""
    of_attention, of_mlp = recipe.values() if isinstance(recipe, dict) else (recipe, recipe)
    x = normal(rng, (2, time, 64), jnp.bfloat16)
    block = NNX.drawn(NNX.layer("TransformerBlock", 64, 96, 4, **SHAPE, recipe=recipe, dtype=jnp.bfloat16), rng)

    def quantization(recipe):
        cut = time != 128 and isinstance(recipe, BlockScaling)
        return None if isinstance(recipe, DelayedScaling) or cut else recipe.quantization("activation")

    @NNX.jit
    def expected(block, x):
        norms = [block.attention_norm.scale[...], block.mlp_norm.scale[...]]
        y = block.attention(ops.rms_norm(x, norms[0], quantization=quantization(of_attention)))
        h, x_and_y = ops.rms_norm(y, norms[1], residual=x, quantization=quantization(of_mlp))
        kernels = tuple(getattr(block.mlp, layer).kernel[...] for layer in ("gate_proj", "up_proj", "down_proj"))
        states = (of_mlp.init(),) * 3 if isinstance(of_mlp, DelayedScaling) else None
        return x_and_y + ops.gated_mlp(h, kernels, recipe=of_mlp, scaling_state=states)

    y = NNX.jit(lambda block, x: block(x))(block, x)
    np.testing.assert_array_equal(y, expected(block, x), strict=True)


def test_the_stream_of_a_block_keeps_its_dtype(rng):
    x = normal(rng, (2, 16, 64))
    layer = NNX.layer("TransformerBlock", 64, 96, 4, recipe=CurrentScaling(), dtype=jnp.bfloat16)
    block = NNX.drawn(layer, rng)
    for kernel in (block.attention.out.kernel, block.mlp.down_proj.kernel):
        kernel[...] *= 0
    np.testing.assert_array_equal(NNX.jit(lambda block, x: block(x))(block, x), x, strict=True)  # not rounded to dtype
    wide = NNX.layer("TransformerBlock", 64, 96, 4, dtype=jnp.float32)
    assert NNX.trace(wide, x=x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


X = jnp.ones((2, 6, 32))
REFUSED = {
    "no heads": ({"num_heads": 0}, {}, r"num_heads is 0; it must be an integer of at least 1"),
    "head_dim": ({"num_heads": 5}, {}, r"num_heads is 5, which does not divide the 32 input features: pass head_dim"),
    "odd": ({"head_dim": 5}, {}, r"head_dim is 5, and rotary .* make it even, or use rope_theta=None"),
    "theta": ({"rope_theta": -1.0}, {}, r"rope_theta is -1.0; it must be a positive number, or None"),
    "window": ({"window": 2, "causal": False}, {}, r"window is 2 with causal=False; .* with causal=True"),
    "features": ({}, {"x": X[..., :16]}, r"x has shape \(2, 6, 16\); it must be \[batch, time, 32\]"),
    "positions": ({}, {"positions": jnp.ones(6)}, r"positions have shape \(6,\) and dtype float32; they must be int"),
    "other positions": ({}, {"positions": jnp.arange(5)}, r"they must be integers, of shape \(6,\) or \(2, 6\)"),
    "no theta": ({"rope_theta": None}, {"positions": jnp.arange(6)}, r"rope_theta is None, .* leave them out"),
    "no cache": ({}, {"decode": True}, r"there is no cache: call init_cache\(batch, length\) first"),
    "both ways": ({"causal": False}, {"decode": True, "cache": (2, 6)}, r"causal is False, .* use causal=True"),
    "packed": ({}, {"decode": True, "cache": (2, 6), "segment_ids": SEGMENTS}, r"segment_ids are given with decode"),
    "batch": ({}, {"decode": True, "cache": (3, 6)}, r"x gives keys of shape \(2, 6, 4, 8\), and the cache holds \(3"),
    "empty": ({}, {"cache": (2, 0)}, r"length is 0; it must be an integer of at least 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    arguments, call, message = REFUSED[name]
    call = {"x": X, **call}
    cache = call.pop("cache", None)

    def run():
        layer = Attention(32, **{"num_heads": 4, **arguments}, rngs=nnx.Rngs(0))
        if cache is not None:
            layer.init_cache(*cache)
        return layer(**call)

    with pytest.raises(ValueError, match=message):
        nnx.eval_shape(run)
