"""Einsum in FP8 against Flax's own; input and kernel keep their roles. Without a recipe: test_modules_flax.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax_apis import LINEN, NNX, both, normal, value_and_gradients
from parameters import in_turns

from te_jax import ops
from te_jax.nnx import Einsum
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling
from te_jax.testing import assert_close, relative_error

X = jnp.ones((3, 16))
# String, shapes of kernel and bias, and of inputs.
CASES = {
    "kernel contracted last": ("b t d, h k d -> b t h k", (4, 8, 32), (4, 8), (3, 5, 32)),
    "kernel mixed": ("bthk,hdk->btd", (4, 16, 8), (16,), (3, 5, 4, 8)),
    "experts": ("ebd,edf->ebf", (4, 32, 16), (4, 16), (4, 6, 32)),
    "experts apart": ("beid,dfie->iefb", (32, 16, 3, 2), (3, 2, 16), (6, 2, 3, 32)),
}


@pytest.mark.parametrize(("case", "recipe", "api"), in_turns(CASES, {"delayed": 0, "block": 1}, [LINEN, NNX, NNX]))
def test_value_gradients_and_state(rng, case, recipe, api):
    """Two steps, so that the second must find what the first one observed where it belongs."""
    recipe = (DelayedScaling(history_len=4), BlockScaling())[recipe]
    *sizes, shape = case
    x = normal(rng, shape)
    layer = api.drawn(api.layer("Einsum", *sizes, recipe=recipe), rng, x)
    flax = api.replaced(api.drawn(api.flax("Einsum", *sizes), rng, x), api.parameters(layer))
    cotangent = normal(rng, jax.eval_shape(flax, x).shape)
    y, gradients, states, (dx,) = value_and_gradients(api, layer, x, cotangent=cotangent)
    if states:
        layer = api.with_states(layer, states)
        y, gradients, states, (dx,) = value_and_gradients(api, layer, x, cotangent=cotangent)
        seen = {"activation": x, "kernel": api.parameters(layer)["kernel"], "gradient": cotangent}
        for role, operand in seen.items():
            amax = np.abs(np.asarray(operand)).max()
            np.testing.assert_allclose(states[f"{role}_amax_history"], [amax, amax, 0, 0], rtol=1e-6, err_msg=role)
        assert states["uses"] == 1
    exact, wanted, _, (wanted_dx,) = value_and_gradients(api, flax, x, cotangent=cotangent)
    assert 1e-3 < relative_error(y, exact) < 0.06
    assert relative_error(dx, wanted_dx) < 0.09
    assert relative_error(gradients["kernel"], wanted["kernel"]) < 0.09
    if "bias" in wanted:
        assert_close(gradients["bias"], wanted["bias"], tolerance=1e-5)


def test_experts_have_scales_of_their_own(rng):
    *sizes, shape = CASES["experts"]
    x = normal(rng, shape) * np.asarray([1.0, 1e-4, 1e4, 1.0], np.float32)[:, None, None]
    layer = NNX.drawn(NNX.layer("Einsum", *sizes, recipe=CurrentScaling()), rng, x)

    @NNX.jit
    def results(layer, x):
        kernel, bias = layer.kernel[...], layer.bias[...]
        each = [ops.dense(x[i], kernel[i], bias[i], recipe=CurrentScaling()) for i in range(4)]
        return layer(x), each

    for one, other in zip(*results(layer, x), strict=True):
        assert_close(one, other, tolerance=1e-6)


@both
def test_kernels_that_cannot_be_quantized_once_are_refused(api):
    x = jnp.ones((3, 5, 4, 8))
    layer = api.layer("Einsum", "bthk,hdk->btd", (4, 16, 8), None, recipe=CurrentScaling())
    with pytest.raises(ValueError, match=r"needs the dimensions 'hkd' in this order"):
        api.quantize_kernels(api.drawn(layer, np.random.default_rng(0), x), x)
    if api is NNX:
        layer = api.layer("Einsum", None, (16, 16), None, recipe=CurrentScaling())
        with pytest.raises(ValueError, match="einsum_str is None; it must name the dimensions"):
            api.quantize_kernels(api.drawn(layer, np.random.default_rng(0), x), x)


@both
def test_a_string_is_given_once(api):
    open_, closed = (api.layer("Einsum", string, (16, 32), None) for string in (None, "bi,io->bo"))
    inputs = {"inputs": X, "einsum_str": "bi,io->ob"}
    assert jax.tree.leaves(api.trace(open_, **inputs))[0].shape == (32, 3)
    for layer, call in ((open_, {"inputs": X}), (closed, inputs)):
        with pytest.raises(ValueError, match="einsum_str"):
            api.trace(layer, **call)


NO_PRODUCTS = ["bi,bi->b", "bi,io->b", "bi,io->boo", "bii,io->bo", "bi,oj->bioj", "bij,io->bo"]
REFUSED = {
    **{string: ((string, None), {}, r"einsum_str is .*: use jnp.einsum for other sums") for string in NO_PRODUCTS},
    "no result": (("bi,io", (16, 16)), {}, "it must name the dimensions of inputs, kernel and result"),
    "three operands": (("bi,io,o->bo", (16, 16)), {}, "it must name the dimensions"),
    "ellipsis": (("bi,i...->b...", (16, 16)), {}, "only inputs and result may have an ellipsis"),
    "dimensions": (("bi,io->bo", (16, 4, 4)), {}, r"the kernel has 2 dimensions; its shape is"),
    "inputs": (("bti,io->bto", (16, 16)), {}, r"does not fit inputs of shape \(3, 16\)"),
    "features": (("bi,io->bo", (32, 16)), {}, r"does not fit inputs of shape \(3, 16\)"),
    "bias": (("bi,io->bo", (16, 16), (8,)), {}, r"bias has shape \(8,\); .* \(16,\)"),
    "no features": (("bi,io->bo", (16, 0)), {}, r"kernel_shape is \(16, 0\); it must be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    (string, *shapes), arguments, message = REFUSED[name]
    shapes = shapes if shapes[0] else [(16,) * len(string.split("->")[0].split(",")[1])]
    with pytest.raises(ValueError, match=message):
        NNX.trace(lambda rngs: Einsum(string, *shapes, **arguments, rngs=rngs), inputs=X)
