"""The mixture of experts against `te_jax.layers.moe` with its parameters, and in stacked layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax_apis import both, normal, perturbed, sum_of_sines, value_and_gradients

from te_jax import ops
from te_jax.layers import Router, moe
from te_jax.ops import Activation
from te_jax.testing import assert_close

pytestmark = pytest.mark.skipif(
    jax.default_backend() == "gpu", reason="float32, which has no kernel on a GPU: see tests/gpu"
)

EXPERTS, IN, HIDDEN, OUT = 4, 32, 48, 16
ROUTER = Router(2, score="sigmoid", scaling_factor=2.5, capacity=9)
GPT_OSS = Activation("silu", 1.702, 7.0, 1.0)


def of_function(parameters, x, expert_bias):
    def of_layers(name, parameters=parameters):
        return tuple(parameters[layer].get(name) for layer in ("gate_proj", "up_proj", "down_proj"))

    return moe(
        x,
        parameters["router"]["kernel"],
        of_layers("kernel"),
        ROUTER,
        router_bias=parameters["router"]["bias"],
        bias=of_layers("bias"),
        expert_bias=expert_bias,
        shared=of_layers("kernel", parameters["shared"]),
        activation=GPT_OSS,
    )


@both
def test_it_is_the_function(rng, api):
    """Value and gradients, with all that a layer may have."""
    arguments = {"shared_features": 64, "expert_bias": True, "use_bias": True, "activation": GPT_OSS}
    x, bias = normal(rng, (2, 8, IN)), normal(rng, (EXPERTS,))
    model = perturbed(api, api.make(api.layer("MoE", IN, EXPERTS, HIDDEN, ROUTER, OUT, **arguments), rng, x), rng)
    assert not np.any(api.expert_bias(model))
    actual, gradients, _, dx = value_and_gradients(api, api.with_expert_bias(model, bias), x)
    assert actual.y.shape == (2, 8, OUT)
    assert actual.logits.shape == (2, 8, EXPERTS)
    assert actual.dropped > 0

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def function(parameters, x):
        result = of_function(parameters, x, bias)
        return sum_of_sines(result), result

    (_, expected), expected_gradients = function(api.parameters(model), x)
    close = functools.partial(assert_close, tolerance=1e-5)
    jax.tree.map(close, (actual, gradients, *dx), (expected, *expected_gradients))
    assert all(np.any(gradient) for gradient in jax.tree.leaves(gradients))


def call(layer, x):
    result = layer(x)
    return x + result.y, (result.logits, result.routing.experts)


@both
def test_stacked_layers_and_remat(rng, api):
    """The auxiliary loss of all layers from what the calls return."""
    x, layer = normal(rng, (16, IN)), api.layer("MoE", IN, EXPERTS, 16, ROUTER, expert_bias=True)

    def loss_fn(model, x):
        y, (logits, experts) = model(x)
        balance = jax.vmap(functools.partial(ops.load_balancing_loss, score="sigmoid"))(logits, experts)
        return jnp.mean(jnp.square(y)) + 1e-2 * balance.sum(), experts

    plain, wrapped = (api.make(api.stack(layer, 2, remat=remat, call=call), rng, x) for remat in (False, True))
    wrapped = api.replaced(wrapped, api.parameters(plain))
    assert api.expert_bias(plain, "layer").shape == (2, EXPERTS)
    step = api.jit(api.value_and_grad(loss_fn, has_aux=True))
    ((loss, experts), gradients), expected = step(wrapped, x), step(plain, x)
    assert experts.shape == (2, 16, 2)
    actual = loss, experts, api.parameters(gradients)
    expected = *expected[0], api.parameters(expected[1])
    jax.tree.map(functools.partial(assert_close, tolerance=1e-5), actual, expected)
