"""Modules of Linen and of NNX with the same arguments compute the same; the values are tested of one of the two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax_apis import LINEN, NNX, normal, value_and_gradients

from te_jax import ops
from te_jax.layers import Norm, Router
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling
from te_jax.testing import assert_close

DELAYED = DelayedScaling(history_len=4)
BF16 = {"dtype": jnp.bfloat16}
PACKED = {"segment_ids": np.array([[0] * 7 + [1] * 9, [0, 1] * 8]), "positions": np.arange(16)[::-1].copy()}
BLOCK = {"num_kv_heads": 2, "rope_theta": 100.0}
NORM = Norm("layer", epsilon=0.1, zero_centered=True)
GPT_OSS = {"activation": ops.Activation("silu", 1.702, 7.0, 1.0)}

# Sizes, arguments, shape of x, arguments of the call.
ROWS = {
    "Linear": (
        (64, 32),
        {"recipe": RowwiseScaling(), "activation": ops.Activation("silu", 1.702), **BF16},
        (16, 64),
        {},
    ),
    "LinearGeneral": (
        ((4, 16), (2, 16)),
        {"axis": (-1, 0), "recipe": DELAYED, "param_dtype": jnp.bfloat16, "dtype": jnp.float32},
        (4, 3, 16),
        {},
    ),
    "Einsum": (("beid,dfie->iefb", (32, 16, 3, 2), (3, 2, 16)), {"recipe": DELAYED, **BF16}, (6, 2, 3, 32), {}),
    "RMSNorm": ((48,), {"epsilon": 0.1, "zero_centered": True, **BF16}, (3, 48), {}),
    "LayerNorm": ((48,), {"epsilon": 0.1, "zero_centered": True}, (3, 48), {}),
    "NormLinear": (
        (64, (4, 16)),
        {"norm": NORM, "recipe": BlockScaling(), "activation": "squared_relu"},
        (128, 64),
        {},
    ),
    "GatedMLP": (
        (64, 96, 32),
        {"norm": NORM, "use_bias": True, "recipe": DELAYED, **GPT_OSS},
        (128, 64),
        {},
    ),
    "Attention": (
        (64, 4),
        {"head_dim": 32, "out_features": 48, "use_bias": True, "window": 5, "qk_norm": Norm("rms", 0.1, True)}
        | {"recipe": DELAYED, **BLOCK, **BF16},
        (2, 16, 64),
        PACKED,
    ),
    "TransformerBlock": (
        (64, 96, 4),
        {"norm": NORM, "activation": "gelu", "window": 5, "qk_norm": "layer"}
        | {"head_dim": 32, "recipe": {"attention": CurrentScaling(), "mlp": DELAYED}}
        | {"attention_arguments": {"use_bias": True}, "mlp_arguments": {"use_bias": True}, **BLOCK, **BF16},
        (2, 16, 64),
        PACKED,
    ),
    "MoE": (
        (32, 4, 48, Router(1, weighted="inputs")),
        {"shared_features": 64, "use_bias": True, "recipe": BlockScaling(), **GPT_OSS, **BF16},
        (24, 32),
        {},
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_values_and_gradients(rng, name):
    sizes, arguments, shape, call = ROWS[name]
    x = normal(rng, shape, arguments.get("dtype", jnp.float32))
    models = [api.drawn(api.layer(name.split()[0], *sizes, **arguments), rng, x) for api in (LINEN, NNX)]
    states = [api.states(model) for api, model in zip((LINEN, NNX), models, strict=True)]
    jax.tree.map(np.testing.assert_array_equal, *states)
    models[1] = NNX.replaced(models[1], LINEN.parameters(models[0]))
    found = [value_and_gradients(api, model, x, **call) for api, model in zip((LINEN, NNX), models, strict=True)]
    jax.tree.map(lambda a, e: assert_close(a, e, tolerance=1e-6), *found)
    assert np.asarray(found[0][3][0], np.float32).any()
