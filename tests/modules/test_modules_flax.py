"""Without a recipe modules are Flax's: the same parameters, values and gradients."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_apis import LINEN, NNX, both, normal, value_and_gradients
from layer_oracle import visible
from parameters import in_turns

from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling
from te_jax.testing import assert_close, relative_error

BF16 = {"param_dtype": jnp.bfloat16, "dtype": jnp.bfloat16}
INITIALIZERS = {"kernel_init": nn.initializers.orthogonal(), "bias_init": nn.initializers.normal()}
BIAS = {"bias_init": nn.initializers.normal()}

# Class, sizes, arguments of both modules, and the shape of an input.
LAYERS = {
    "matrix": ("Linear", (32, 48), {}, (3, 5, 32)),
    "bfloat16": ("Linear", (32, 48), BF16, (3, 32)),
    "other initializers": ("Linear", (32, 48), INITIALIZERS, (3, 32)),
    "heads": ("LinearGeneral", (32, (4, 8)), {}, (3, 5, 32)),
    "from heads in bfloat16": ("LinearGeneral", ((4, 8), 32), {"axis": (-2, -1), "dtype": jnp.bfloat16}, (3, 5, 4, 8)),
    "axes apart, out of order": ("LinearGeneral", ((4, 8), (2, 16)), {"axis": (-1, 0)}, (4, 3, 8)),
    "einsum, experts apart": ("Einsum", ("beid,dfie->iefb", (32, 16, 3, 2), (3, 2, 16)), BIAS, (6, 2, 3, 32)),
    "einsum, kernel mixed": ("Einsum", ("bthk,hdk->btd", (4, 16, 8), (16,)), BIAS, (3, 5, 4, 8)),
    "einsum, ellipsis": ("Einsum", ("...eid,dfie->i...ef", (32, 16, 3, 2), None), {}, (6, 2, 3, 32)),
    "einsum, experts": ("Einsum", ("ebd,edf->ebf", (4, 32, 16), (4, 16)), BIAS, (4, 6, 32)),
    "RMS norm": ("RMSNorm", (48,), {}, (3, 5, 48)),
    "RMS norm without scale": ("RMSNorm", (48,), {"use_scale": False, "epsilon": 0.1}, (3, 5, 48)),
    "layer norm": ("LayerNorm", (48,), {}, (3, 5, 48)),
}


def of_both_libraries(api, layer):
    """The layers of te_jax and of Flax, and the shape and dtype of an input."""
    kind, sizes, arguments, shape = layer
    x = jax.ShapeDtypeStruct(shape, arguments.get("dtype", jnp.float32))
    return *(of(kind, *sizes, **arguments) for of in (api.layer, api.flax)), x


@pytest.mark.parametrize(("api", "name"), [(api, name) for name in LAYERS for api in (LINEN, NNX)], ids=str)
def test_parameters(api, name):
    ours, theirs, x = of_both_libraries(api, LAYERS[name])
    actual, expected = (
        jax.tree.leaves_with_path(model.variables if api is LINEN else nnx.state(model))
        for model in (api.abstract(layer, x) for layer in (ours, theirs))
    )
    assert [(path, leaf.shape, leaf.dtype) for path, leaf in actual] == [
        (path, leaf.shape, leaf.dtype) for path, leaf in expected
    ]


@pytest.mark.parametrize(
    ("name", "api"),
    in_turns(["other initializers", "heads", "einsum, experts", "layer norm"], {"linen": LINEN, "nnx": NNX}),
)
def test_initial_values(api, name):
    *layers, x = of_both_libraries(api, LAYERS[name])
    x = np.zeros(x.shape, x.dtype)
    ours, theirs = (api.parameters(api.make(layer, np.random.default_rng(0), x)) for layer in layers)
    jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), ours, theirs)


@pytest.mark.parametrize(("layer", "api"), in_turns(LAYERS, {"linen": LINEN, "nnx": NNX}))
def test_values_and_gradients(rng, api, layer):
    *layers, x = of_both_libraries(api, layer)
    x = normal(rng, x.shape, x.dtype)
    ours, theirs = (api.drawn(each, rng, x) for each in layers)
    ours = api.replaced(ours, api.parameters(theirs))
    actual, expected = (value_and_gradients(api, model, x) for model in (ours, theirs))
    tolerance = 1e-2 if x.dtype == jnp.bfloat16 or "Norm" in layer[0] else 1e-5
    for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert a.dtype == e.dtype
        assert_close(a, e, tolerance=tolerance)


RECIPES = {"current": CurrentScaling(), "block": BlockScaling(), "delayed": DelayedScaling(history_len=4)}


@pytest.mark.parametrize(("recipe", "api"), in_turns(RECIPES, {"nnx": NNX, "linen": LINEN}))
def test_products_of_te_jax_in_layers_of_flax(rng, recipe, api):
    """Flax rounds kernels to the dtype of the computation before the product; these are rounded already."""
    x, arguments = normal(rng, (16, 32), jnp.bfloat16), {**BF16, "use_bias": False}
    theirs = api.drawn(api.flax_with_products({"recipe": recipe}, 32, 48, **arguments), rng, x)
    ours = api.drawn(api.layer("Linear", 32, 48, recipe=recipe, **arguments), rng, x)
    ours = api.replaced(ours, api.parameters(theirs))
    actual, expected = (jax.tree.leaves(value_and_gradients(api, model, x)) for model in (theirs, ours))
    for a, e in zip(actual, expected, strict=True):  # the state, too
        np.testing.assert_array_equal(a, e, strict=True)
    assert any(np.any(np.asarray(leaf, np.float32)) for leaf in actual[1:])


@pytest.mark.parametrize(("api", "causal"), [(LINEN, True), (NNX, False)], ids=str)
def test_attention_without_rotary_positions(rng, api, causal):
    theirs = {
        LINEN: functools.partial(nn.MultiHeadDotProductAttention, 4, use_bias=True),
        NNX: functools.partial(nnx.MultiHeadAttention, 4, 32, use_bias=True, decode=False),
    }[api]
    ours = api.layer("Attention", 32, 4, rope_theta=None, use_bias=True, causal=causal)
    x = normal(rng, (2, 6, 32))
    ours, theirs = (api.drawn(layer, rng, x) for layer in (ours, theirs))
    ours = api.replaced(ours, api.parameters(theirs))
    actual = value_and_gradients(api, ours, x)
    expected = value_and_gradients(api, theirs, x, mask=visible(2, 6, causal=causal)[:, None])
    for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-4)  # the gradient of the bias of keys is 0


@both
def test_embedding(rng, api):
    """With gradients through the lookup and through the logits, in one table."""
    tokens, x, seed = jax.device_put(rng.integers(0, 48, 16)), normal(rng, (16, 32)), int(rng.integers(2**31))
    layers = (
        api.layer("Embed", 48, 32),
        api.layer("Embed", 48, 32, recipe=CurrentScaling()),
        api.flax("Embed", 48, 32),
    )
    ours, in_fp8, theirs = (api.drawn(layer, np.random.default_rng(seed), tokens) for layer in layers)
    np.testing.assert_array_equal(ours(tokens), theirs(tokens))

    def gradients(model):
        def loss(model, x):
            y = api.call(model, "attend", model(tokens) + x)
            return jnp.sum(jnp.sin(y)), y

        (_, y), (table, dx) = api.jit(api.value_and_grad(loss, argnums=(0, 1), has_aux=True))(model, x)
        return y, api.parameters(table)["embedding"], dx

    for exact, quantized, expected in zip(*map(gradients, (ours, in_fp8, theirs)), strict=True):
        assert relative_error(exact, expected) < 1e-5
        assert 1e-3 < relative_error(quantized, expected) < 0.15
