"""Kernels that are quantized once and used by several microbatches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax_apis import LINEN, NNX, both, mean_square, normal, observed, quantized_paths
from parameters import in_turns

from te_jax.layers import Router
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling
from te_jax.testing import assert_close

RECIPES = {"block": BlockScaling(), "current": CurrentScaling(), "delayed": DelayedScaling(history_len=4)}


def chain(api, recipe):
    """Two layers that are quantized and one that is not, with heads that blocks of 128 do not divide."""
    return api.chain(
        split=api.layer("LinearGeneral", 32, (4, 48), recipe=recipe, activation="gelu"),
        join=api.layer("LinearGeneral", (4, 48), 32, axis=(-2, -1), recipe=recipe, use_bias=False),
        exact=api.layer("Linear", 32, 8),
    )


def stack(api, recipe):
    return api.stack(api.layer("Linear", 32, 32, recipe=recipe), 3, remat=True)


def assert_all_close(actual, expected, tolerance):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(lambda a, e: assert_close(a, e, tolerance=tolerance), actual, expected)


@pytest.mark.parametrize(
    ("api", "layer", "recipe"),
    [(LINEN, chain, "block"), (NNX, stack, "delayed")],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_gradients_are_those_of_kernels_quantized_in_each_microbatch(rng, api, layer, recipe):
    microbatches = normal(rng, (2, 16, 32))
    model = observed(api, api.drawn(layer(api, RECIPES[recipe]), rng, microbatches[0]), microbatches[0])

    @api.jit
    def both_ways(model, microbatches):
        quantized, gradients, losses = api.quantize_kernels(model, microbatches[0]), api.zeros(model), []
        for x in microbatches:
            loss, gradients = api.accumulate_gradients(mean_square)(quantized, gradients, x)
            losses.append(loss)
        return (losses, gradients), [api.value_and_grad(mean_square)(model, x) for x in microbatches]

    (losses, actual), each = both_ways(model, microbatches)
    single_losses, single = zip(*each, strict=True)
    assert_all_close(api.parameters(actual), jax.tree.map(jnp.add, *map(api.parameters, single)), 5e-3)
    assert_close(np.stack(losses), np.stack(single_losses), tolerance=1e-3)
    states = api.states(actual)
    assert bool(states) is (recipe == "delayed")
    for path, state in states.items():
        if "kernel_amax_history" not in path:  # quantized kernels are not observed
            np.testing.assert_allclose(state, np.max([api.states(g)[path] for g in single], axis=0), rtol=1e-3)


# Layers, the number of their kernels, and the shape of an input.
LAYERS = {
    "MoE": (("MoE", 32, 4, 48, Router(2)), {"shared_features": 64}, 6, (24, 32)),
    "GatedMLP": (("GatedMLP", 64, 96), {"norm": "rms", "recipe": RECIPES["delayed"]}, 3, (128, 64)),
}


if jax.default_backend() == "gpu":
    del LAYERS["MoE"]  # float32, which has no kernel there: see tests/gpu


@pytest.mark.parametrize(("layer", "api"), in_turns(LAYERS, {"linen": LINEN, "nnx": NNX}))
def test_kernels_of_modules(rng, layer, api):
    (kind, *sizes), arguments, count, shape = layer
    x = normal(rng, shape)
    made = api.layer(kind, *sizes, **{"recipe": RECIPES["block"], **arguments})
    model = observed(api, api.drawn(made, rng, x), x)

    @api.jit
    def both_ways(model, x):
        quantized = api.quantize_kernels(model, x)
        assert len(quantized_paths(api.parameters(quantized))) == count
        loss, gradients = api.accumulate_gradients(mean_square)(quantized, api.zeros(model), x)
        return loss, api.parameters(gradients), api.parameters(api.value_and_grad(mean_square)(model, x)[1])

    loss, actual, expected = both_ways(model, x)
    assert jnp.isfinite(loss)  # NaN says that a kernel was used twice
    assert_all_close(actual, expected, 5e-3)


def test_only_kernels_of_layers_with_a_recipe_are_quantized(rng):
    api, recipe, x = LINEN, "delayed", normal(rng, (16, 32))
    model = observed(api, api.drawn(chain(api, RECIPES[recipe]), rng, x), x)
    quantized = api.quantize_kernels(model, x)
    parameters, kernel = api.parameters(quantized), np.asarray(api.parameters(model)["join"]["kernel"])
    assert quantized_paths(parameters) == {"split/kernel", "join/kernel"}
    assert_close(parameters["join"]["kernel"].dequantize().reshape(kernel.shape), kernel, tolerance=0.04)
    apply = api.jit(lambda model, x: model(x))
    assert_close(apply(quantized, x), apply(model, x), tolerance=2e-3)
    again = api.quantize_kernels(quantized, x)
    assert jax.tree.structure(api.parameters(again)) == jax.tree.structure(parameters)
    jax.tree.map(np.testing.assert_array_equal, api.parameters(again), parameters)


@both
def test_gradient_of_a_kernel_that_the_loss_does_not_use(rng, api):
    x = normal(rng, (16, 32))
    model = api.drawn(chain(api, CurrentScaling()), rng, x)
    before = jax.tree.map(jnp.ones_like, api.zeros(model))
    accumulate = api.accumulate_gradients(lambda model, x: jnp.sum(model(x, last="split") ** 2))
    loss, after = api.jit(accumulate)(api.quantize_kernels(model, x), before, x)
    assert jnp.isfinite(loss)
    after = api.parameters(after)
    np.testing.assert_array_equal(after["join"]["kernel"], 1.0)
    assert jnp.linalg.norm(after["split"]["kernel"] - 1.0) > 1.0


@pytest.mark.parametrize(("api", "jit"), [(LINEN, False), (NNX, True)], ids=["linen", "nnx-jit"])
def test_a_quantized_kernel_that_is_used_twice_is_visible(rng, jit, api):
    x = normal(rng, (16, 32))
    model = api.drawn(api.chain(shared=api.layer("Linear", 32, 32, recipe=CurrentScaling())), rng, x)
    function = api.accumulate_gradients(lambda model, x: mean_square(model, model(x)))
    arguments = api.quantize_kernels(model, x), api.zeros(model), x
    if jit:
        assert jnp.isnan(api.jit(function)(*arguments)[0])
    else:
        with pytest.raises(ValueError, match=r"kernel .*shared.*kernel.* is quantized and was used 2.0 times"):
            function(*arguments)


@both
def test_aux_is_handed_on(rng, api):
    x = normal(rng, (16, 32))
    model = api.drawn(api.layer("Linear", 32, 32, recipe=CurrentScaling()), rng, x)
    arguments = api.quantize_kernels(model, x), api.zeros(model), x
    with_aux = api.accumulate_gradients(lambda m, x: (mean_square(m, x), {"rows": x.shape[0]}), has_aux=True)
    without = api.accumulate_gradients(mean_square)
    (loss, aux), expected = api.jit(lambda *of: (with_aux(*of)[0], without(*of)[0]))(*arguments)
    assert aux == {"rows": 16}
    assert loss == expected


@both
def test_what_is_no_module_has_no_kernels(api):
    kind = {LINEN: "linen", NNX: "nnx"}[api]
    with pytest.raises(ValueError, match=rf"model is of type int; it must be a flax\.{kind}\.Module"):
        api.library.quantize_kernels(3, *([{}] if api is LINEN else []))
