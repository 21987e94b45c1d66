"""x in FP8 for layers of te_jax.flax, kernels quantized once behind a norm, and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax.flax import Dense, Embed, GatedMLP, NormLinear, RMSNorm, accumulate_gradients, quantize_kernels
from te_jax.recipe import BlockScaling, DelayedScaling
from te_jax.testing import assert_close


def normal(rng, *shape):
    return jax.device_put(np.asarray(rng.standard_normal(shape), jnp.float32))


def test_an_mlp_takes_x_in_fp8(rng):
    """A norm of one's own before it gives the values and gradients of the norm within it."""
    recipe, x = BlockScaling(), normal(rng, 128, 32)
    within, alone, norm = GatedMLP(48, norm="rms", recipe=recipe), GatedMLP(48, recipe=recipe), RMSNorm()
    params = within.init(jax.random.key(0), x)["params"]
    params = params | {"norm": {"scale": 1 + normal(rng, 32) / 5}}

    def behind(params, x):
        x8 = norm.apply({"params": params["norm"]}, x, quantization=recipe.quantization("activation"))
        return alone.apply({"params": {name: params[name] for name in params if name != "norm"}}, x8)

    def found(f):
        y, pull = jax.vjp(jax.jit(f), params, x)
        return y, pull(jnp.cos(y))

    actual, expected = found(behind), found(lambda params, x: within.apply({"params": params}, x))
    assert all(jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(actual))
    jax.tree.map(functools.partial(assert_close, tolerance=1e-3), actual, expected)


def test_a_norm_with_a_residual_is_one_of_the_sum(rng):
    x, residual, norm = normal(rng, 8, 32), normal(rng, 8, 32), RMSNorm(zero_centered=True)
    variables = norm.init(jax.random.key(0), x)
    assert not variables["params"]["scale"].any()
    y, total = norm.apply(variables, x, residual)
    np.testing.assert_array_equal(total, x + residual)
    assert_close(y, norm.apply(variables, total), tolerance=1e-6)


def test_norm_linear_with_kernels_quantized_once(rng):
    model, microbatches = NormLinear(64, recipe=BlockScaling()), normal(rng, 2, 128, 32)
    variables = jax.jit(model.init)(jax.random.key(0), microbatches[0])

    def loss_fn(variables, x):
        return jnp.mean(jnp.square(model.apply(variables, x)))

    quantized = quantize_kernels(model, variables, microbatches[0])
    gradients = jax.tree.map(jnp.zeros_like, variables)
    for x in microbatches:
        _, gradients = accumulate_gradients(loss_fn)(quantized, gradients, x)
    first, second = (jax.grad(loss_fn)(variables, x) for x in microbatches)
    expected = jax.tree.map(jnp.add, first["params"], second["params"])
    jax.tree.map(functools.partial(assert_close, tolerance=5e-3), gradients["params"], expected)


def test_errors(rng):
    x, key = normal(rng, 128, 32), jax.random.key(0)
    with pytest.raises(ValueError, match="norm is 'batch'; it must be 'rms' or 'layer'"):
        GatedMLP(48, norm="batch").init(key, x)
    with pytest.raises(ValueError, match="residual is given, and there is no norm that adds it"):
        GatedMLP(48).init(key, x, x)
    with pytest.raises(ValueError, match="whose state Embed does not hold"):
        Embed(48, 32, recipe=DelayedScaling()).init(key, jnp.arange(3))
    recipe = BlockScaling()
    x8 = RMSNorm().init_with_output(key, x, quantization=recipe.quantization("activation"))[0]
    with pytest.raises(ValueError, match="x is a QuantizedArray, and there is a norm"):
        NormLinear(16, recipe=recipe).init(key, x8)
    with pytest.raises(ValueError, match="recipe is None, but x is a QuantizedArray"):
        Dense(16).init(key, x8)
