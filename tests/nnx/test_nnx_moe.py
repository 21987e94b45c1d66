"""The mixture of experts for NNX: as the one for Linen, which tests/flax compares with the function."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import te_jax.flax
from te_jax import ops
from te_jax.nn.moe import Router, moe
from te_jax.nnx import ExpertBias, MoE, accumulate_gradients, quantize_kernels
from te_jax.quantized import QuantizedArray
from te_jax.recipe import BlockScaling, DelayedScaling
from te_jax.testing import assert_close

pytestmark = pytest.mark.skipif(
    jax.default_backend() == "gpu", reason="float32, which has no kernel on a GPU: see tests/gpu"
)

EXPERTS, IN, HIDDEN, OUT = 4, 32, 48, 16
ROUTER = Router(2, score="sigmoid", scaling_factor=2.5)


def normal(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def test_as_for_linen(rng):
    """Structure, value and gradients, with all that a layer may have."""
    options = {
        "kind": "silu", "alpha": 1.702, "limit": 7.0, "offset": 1.0, "capacity": 9, "shared_features": 64,
        "expert_bias": True, "use_bias": True,
    }  # fmt: skip
    layer = MoE(IN, EXPERTS, HIDDEN, ROUTER, OUT, **options, bias_init=nnx.initializers.normal(0.1), rngs=nnx.Rngs(0))
    linen = te_jax.flax.MoE(EXPERTS, HIDDEN, ROUTER, OUT, **options)
    layer.expert_bias.set_value(normal(rng, EXPERTS))
    x = normal(rng, 2, 8, IN)
    params = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    variables = {"params": params, "router_state": nnx.to_pure_dict(nnx.state(layer, ExpertBias))}
    shapes = jax.eval_shape(linen.init, jax.random.key(0), x)
    assert jax.tree.map(jnp.shape, variables) == jax.tree.map(jnp.shape, shapes)

    def loss_of(result):
        return jnp.sum(jnp.sin(result.y)), result

    (_, actual), gradients = nnx.jit(nnx.value_and_grad(lambda layer, x: loss_of(layer(x)), has_aux=True))(layer, x)
    (_, expected), wanted = jax.jit(
        jax.value_and_grad(lambda variables, x: loss_of(linen.apply(variables, x)), has_aux=True)
    )(variables, x)
    assert actual.y.shape == (2, 8, OUT)
    assert actual.dropped > 0
    jax.tree.map(functools.partial(assert_close, tolerance=1e-6), actual, expected)
    jax.tree.map(functools.partial(assert_close, tolerance=1e-6), nnx.to_pure_dict(gradients), wanted["params"])


def test_expert_parallel(rng, require_devices):
    """Created with all experts, merged with parts of them: the value of the layer on one device."""
    require_devices(2)
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    wide, narrow = {"out_sharding": ("expert", None, None)}, {"out_sharding": ("expert", None)}
    options = {
        "use_bias": True, "expert_bias": True, "shared_features": 64, "bias_init": nnx.initializers.normal(0.1),
        "kernel_metadata": wide, "down_kernel_metadata": wide, "bias_metadata": narrow, "down_bias_metadata": narrow,
    }  # fmt: skip
    with jax.set_mesh(mesh):
        layers = [
            MoE(IN, EXPERTS, HIDDEN, ROUTER, OUT, axis_name=axis, **options, rngs=nnx.Rngs(0))
            for axis in ("expert", None)
        ]
    x = normal(rng, 4, 8, IN)
    graph, state = nnx.split(layers[0])
    specs = nnx.get_partition_spec(state)
    assert state["gate_proj"]["kernel"].get_value().sharding.spec == P("expert", None, None)
    mapped = jax.shard_map(
        lambda state, x: nnx.merge(graph, state)(x).y, mesh=mesh, in_specs=(specs, P("expert")), out_specs=P("expert")
    )
    assert_close(jax.jit(mapped)(state, x), nnx.jit(lambda layer, x: layer(x).y)(layers[1], x), tolerance=1e-5)


def test_parameters():
    """Metadata, and the spread of initial values, which is that of one expert's matrix."""
    names = (
        "kernel", "down_kernel", "bias", "down_bias", "router_kernel", "router_bias", "shared_kernel",
        "shared_down_kernel",
    )  # fmt: skip
    metadata = {f"{name}_metadata": {"role": name} for name in names}
    layer = MoE(
        128, 8, 64, Router(2), shared_features=96, use_bias=True, param_dtype=jnp.bfloat16, **metadata,
        down_kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0),
    )  # fmt: skip
    for parameter, role in (
        (layer.gate_proj.kernel, "kernel"), (layer.up_proj.bias, "bias"), (layer.down_proj.kernel, "down_kernel"),
        (layer.down_proj.bias, "down_bias"), (layer.router.kernel, "router_kernel"),
        (layer.router.bias, "router_bias"), (layer.shared.up_proj.kernel, "shared_kernel"),
        (layer.shared.down_proj.kernel, "shared_down_kernel"),
    ):  # fmt: skip
        assert parameter.get_metadata("role") == role
        assert parameter.dtype == jnp.bfloat16
    kernel = np.asarray(layer.gate_proj.kernel.get_value(), np.float32)
    np.testing.assert_allclose(kernel.std(axis=(1, 2)), 128**-0.5, rtol=0.1)
    assert len({kernel[e].tobytes() for e in range(8)}) == 8
    assert (layer.down_proj.kernel.get_value() == 1).all()


def test_kernels_quantized_once(rng):
    """With a recipe: the function's value, and the gradients of two microbatches in one sum."""
    layer = MoE(IN, EXPERTS, HIDDEN, Router(2), shared_features=64, recipe=BlockScaling(), rngs=nnx.Rngs(0))
    microbatches = normal(rng, 2, 24, IN)

    def loss_fn(layer, x):
        y = layer(x).y
        return jnp.sum(jnp.sin(y)), y

    plain = nnx.jit(nnx.value_and_grad(loss_fn, has_aux=True))
    ((_, y), first), (_, second) = (plain(layer, x) for x in microbatches)
    kernels, shared = (
        tuple(getattr(of, name).kernel.get_value() for name in ("gate_proj", "up_proj", "down_proj"))
        for of in (layer, layer.shared)
    )
    router_kernel = layer.router.kernel.get_value()
    wanted = moe(microbatches[0], router_kernel, kernels, Router(2), shared=shared, recipe=BlockScaling()).y
    assert_close(y, wanted, tolerance=1e-3)

    quantized = quantize_kernels(layer)
    assert isinstance(quantized.gate_proj.kernel.get_value(), QuantizedArray)
    step = nnx.jit(accumulate_gradients(loss_fn, has_aux=True))
    gradients = jax.tree.map(jnp.zeros_like, nnx.state(layer, nnx.Param))
    for x in microbatches:
        (loss, _), gradients = step(quantized, gradients, x)
        assert jnp.isfinite(loss)  # NaN says that a kernel was used twice
    expected = jax.tree.map(jnp.add, *map(nnx.to_pure_dict, (first, second)))
    jax.tree.map(functools.partial(assert_close, tolerance=5e-3), nnx.to_pure_dict(gradients), expected)


def test_scan_remat_and_jit(rng):
    """The auxiliary loss of all layers, and the update of all biases, from what the calls return."""

    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stacked(rngs):
        return MoE(IN, EXPERTS, 16, ROUTER, expert_bias=True, rngs=rngs)

    layers, x = stacked(nnx.Rngs(0)), normal(rng, 16, IN)

    def step(wrap, layers, x):
        def loss_fn(layers, x):
            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0))
            def run(layer, x):
                result = (nnx.remat(MoE.__call__) if wrap else MoE.__call__)(layer, x)
                return x + result.y, (result.logits, result.routing.experts)

            y, (logits, experts) = run(layers, x)
            balance = jax.vmap(functools.partial(ops.load_balancing_loss, score="sigmoid"))(logits, experts)
            return jnp.mean(jnp.square(y)) + 1e-2 * balance.sum(), experts

        (loss, experts), gradients = nnx.value_and_grad(loss_fn, has_aux=True)(layers, x)
        counts = jax.vmap(lambda experts: ops.expert_counts(experts, EXPERTS))(experts)
        layers.expert_bias.set_value(jax.vmap(ops.update_expert_bias)(layers.expert_bias.get_value(), counts))
        return loss, nnx.to_pure_dict(gradients), counts

    others = nnx.clone(layers)
    actual = nnx.jit(functools.partial(step, True))(layers, x)
    expected = nnx.jit(functools.partial(step, False))(others, x)
    jax.tree.map(functools.partial(assert_close, tolerance=1e-5), actual, expected)
    bias = np.asarray(layers.expert_bias.get_value())
    np.testing.assert_allclose(bias, 1e-3 * np.sign(8 - np.asarray(actual[2])), rtol=1e-6)
    assert not isinstance(layers.expert_bias, nnx.Param)


def test_errors(rng):
    x = normal(rng, 16, IN)
    for arguments, message in (
        ({"in_features": 0}, "in_features is 0"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"hidden_features": -1}, "hidden_features is -1"),
        ({"router": Router(5)}, "top_k is 5"),
        ({"router": 2}, "router is 2; it must be a te_jax.nn.moe.Router, such as"),
        ({"weighted": "both"}, "weighted is 'both'"),
        ({"recipe": DelayedScaling()}, "recipe is DelayedScaling"),
        ({"dtype": jnp.int32}, "dtype is int32"),
    ):
        arguments = {"in_features": IN, "num_experts": 4, "hidden_features": 16, "router": Router(2), **arguments}
        with pytest.raises(ValueError, match=message):
            nnx.eval_shape(lambda a=arguments: MoE(**a, rngs=nnx.Rngs(0))(x))
