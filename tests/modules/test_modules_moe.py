"""The mixture of experts against `te_jax.layers.moe` with its parameters."""

import functools

import jax
import numpy as np
import pytest
from flax_apis import LINEN, normal, sum_of_sines, value_and_gradients
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from te_jax.layers import ExpertParallel, Router, moe
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


def test_it_is_the_function(rng):
    """Value and gradients, with all that a layer may have."""
    api = LINEN
    arguments = {"shared_features": 64, "expert_bias": True, "use_bias": True, "activation": GPT_OSS}
    x, bias = normal(rng, (2, 8, IN)), normal(rng, (EXPERTS,))
    model = api.drawn(api.layer("MoE", IN, EXPERTS, HIDDEN, ROUTER, OUT, **arguments), rng, x)
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
    assert all(np.any(np.asarray(gradient)) for gradient in jax.tree.leaves(gradients))


def call(layer, x):
    result = layer(x)
    return x + result.y, (result.logits, result.routing.experts)


def test_expert_parallel(rng, require_devices):
    """Created with all experts, applied to parts of them: the value of the module on one device."""
    require_devices(2)
    api = LINEN
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    kernels, biases = api.named(("expert", None, None)), api.named(("expert", None))
    router = Router(2, score="sigmoid", scaling_factor=2.5)

    def layer(axis):
        return api.layer(
            "MoE", IN, EXPERTS, HIDDEN, router, OUT, expert_parallel=axis, shared_features=64, expert_bias=True,
            use_bias=True, kernel_init=kernels, down_kernel_init=kernels, bias_init=biases, down_bias_init=biases,
        )  # fmt: skip

    x, axis = normal(rng, (4, 8, IN)), ExpertParallel("expert", buffer_factor=2.0)
    together, apart = (api.drawn(layer(of), rng, x) for of in (None, axis))
    parameters = api.parameters(together)
    assert parameters["gate_proj"]["kernel"].shape == (EXPERTS, IN, HIDDEN)
    specs = jax.tree.map(lambda spec: spec or P(), api.names(layer(axis), x), is_leaf=lambda spec: spec is None)
    assert specs["down_proj"]["bias"] == P("expert", None)
    mapped = jax.shard_map(
        lambda parameters, x: api.replaced(apart, parameters)(x).y,
        mesh=mesh, in_specs=(specs, P("expert")), out_specs=P("expert"),
    )  # fmt: skip
    found = jax.jit(mapped)(parameters, x)
    wanted = jax.jit(lambda parameters, x: api.replaced(together, parameters)(x).y)(parameters, x)
    assert_close(found, wanted, tolerance=1e-5)
    with pytest.raises(ValueError, match="no axis 'expert' is mapped here; call it inside shard_map"):
        jax.eval_shape(lambda x: api.replaced(apart, parameters)(x).y, x)
