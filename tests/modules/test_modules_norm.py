"""Norms with linear layers and MLPs behind them, each in one of the two APIs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_apis import LINEN, NNX, normal, value_and_gradients

from te_jax import ops
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling
from te_jax.testing import assert_close

DELAYED = DelayedScaling(history_len=4)


def assert_all_close(actual, expected, tolerance):
    jax.tree.map(functools.partial(assert_close, tolerance=tolerance), actual, expected)


def test_a_float32_residual_stream_stays_float32(rng):
    """Where layers compute in bfloat16: what is added to the stream is not lost in the next sum."""
    x, residual = normal(rng, (128, 64)), normal(rng, (128, 64), scale=1e4)
    layer = functools.partial(NNX.layer, "GatedMLP", 64, 96, norm="rms", recipe=BlockScaling())
    mlp, exact = (NNX.drawn(layer(dtype=dtype), rng) for dtype in (jnp.bfloat16, jnp.float32))
    exact = NNX.replaced(exact, NNX.parameters(mlp))
    (y, total), _, _, (dx, dresidual) = value_and_gradients(NNX, mlp, x, residual)
    assert (y.dtype, total.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(total, x + residual)
    (wanted, _), *_ = value_and_gradients(NNX, exact, x, residual)
    assert_close(y.astype(jnp.float32), wanted, tolerance=6e-2)
    assert dx.dtype == jnp.float32
    np.testing.assert_array_equal(dx, dresidual, strict=True)


@pytest.mark.parametrize("shape", [(64,), (3, 7, 64), (0, 64)])
def test_any_rows(shape, rng):
    x, layer = normal(rng, shape), NNX.drawn(NNX.layer("NormLinear", 64, 32, recipe=BlockScaling()), rng)
    y, expected = NNX.jit(lambda layer, x: (layer(x), layer.linear(layer.norm(x))))(layer, x)
    assert_close(y, expected, tolerance=1e-2)


def test_norm_linear_is_a_norm_and_a_layer(rng):
    both = NNX.drawn(NNX.layer("NormLinear", 64, (4, 16), norm="rms", recipe=BlockScaling()), rng)

    class Apart(nnx.Module):
        def __init__(self):
            self.norm, self.linear = both.norm, both.linear

        def __call__(self, x, residual):
            y, total = self.norm(x, residual)
            return self.linear(y), total

    x, residual = normal(rng, (2, 128, 64)), normal(rng, (2, 128, 64))
    actual, expected = (value_and_gradients(NNX, module, x, residual) for module in (both, Apart()))
    assert actual[0][0].shape == (2, 128, 4, 16)
    assert_all_close(actual, expected, tolerance=1e-2)


@pytest.mark.parametrize(
    ("api", "recipe"), [(LINEN, DELAYED), (NNX, CurrentScaling())], ids=["linen-delayed", "nnx-current"]
)
def test_gated_mlp_is_the_operation_behind_a_norm(api, recipe, rng):
    x, residual, names = normal(rng, (128, 64)), normal(rng, (128, 64)), ("gate_proj", "up_proj", "down_proj")
    layer = api.layer("GatedMLP", 64, 96, 32, activation="gelu", norm="rms", use_bias=True, recipe=recipe)
    mlp = api.drawn(layer, rng, x)

    def operation(parameters, x, residual):
        normed, total = ops.rms_norm(x, parameters["norm"]["scale"], residual=residual)
        kernels, biases = (tuple(parameters[name][kind] for name in names) for kind in ("kernel", "bias"))
        states = (recipe.init(),) * 3 if recipe is DELAYED else None
        options = {"activation": "gelu", "recipe": recipe, "scaling_state": states}
        return ops.gated_mlp(normed, kernels, biases, **options), total

    actual, gradients, states, _ = value_and_gradients(api, mlp, x, residual)
    assert_all_close(actual, jax.jit(operation)(api.parameters(mlp), x, residual), tolerance=1e-2)
    assert all(np.any(gradients[name]["kernel"]) for name in names)
    assert bool(states) is (recipe is DELAYED)
    for name in names if states else ():
        assert states[f"{name}/activation_amax_history"][0] > 0
