"""The mixture of experts for Linen against `te_jax.nn.moe` with its parameters."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from te_jax import ops
from te_jax.flax import MoE, accumulate_gradients, quantize_kernels
from te_jax.nn.gated_mlp import Activation
from te_jax.nn.moe import Router, moe
from te_jax.recipe import BlockScaling, DelayedScaling
from te_jax.testing import assert_close

pytestmark = pytest.mark.skipif(
    jax.default_backend() == "gpu", reason="float32, which has no kernel on a GPU: see tests/gpu"
)

EXPERTS, IN, HIDDEN, OUT = 4, 32, 48, 16
ROUTER = Router(2, score="sigmoid", scaling_factor=2.5)


def normal(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def of_function(variables, x, router, **options):
    """`te_jax.nn.moe` with the variables of the module."""
    params = variables["params"]

    def of_layers(name, params=params):
        return tuple(params[layer].get(name) for layer in ("gate_proj", "up_proj", "down_proj"))

    return moe(
        x,
        params["router"]["kernel"],
        of_layers("kernel"),
        router,
        router_bias=params["router"].get("bias"),
        bias=of_layers("bias"),
        expert_bias=variables.get("router_state", {}).get("expert_bias"),
        shared=of_layers("kernel", params["shared"]) if "shared" in params else None,
        **options,
    )


def test_as_the_function(rng):
    """Value and gradients, with all that a layer may have."""
    activation = {"kind": "silu", "alpha": 1.702, "limit": 7.0, "offset": 1.0}
    model = MoE(
        EXPERTS, HIDDEN, ROUTER, OUT, **activation, capacity=9, shared_features=64, expert_bias=True, use_bias=True,
        bias_init=nn.initializers.normal(0.1),
    )  # fmt: skip
    x = normal(rng, 2, 8, IN)
    variables = model.init(jax.random.key(0), x)
    assert not variables["router_state"]["expert_bias"].any()
    variables["router_state"]["expert_bias"] = normal(rng, EXPERTS)

    def found(f):
        (_, result), gradients = jax.jit(
            jax.value_and_grad(lambda *a: (jnp.sum(jnp.sin((r := f(*a)).y)), r), argnums=(0, 1), has_aux=True)
        )(variables, x)
        return result, gradients

    wanted = functools.partial(of_function, router=ROUTER, activation=Activation(**activation), capacity=9)
    (actual, gradients), (expected, expected_gradients) = found(model.apply), found(wanted)
    assert actual.y.shape == (2, 8, OUT)
    assert actual.logits.shape == (2, 8, EXPERTS)
    assert actual.dropped > 0
    jax.tree.map(functools.partial(assert_close, tolerance=1e-5), actual, expected)
    jax.tree.map(functools.partial(assert_close, tolerance=1e-5), gradients, expected_gradients)
    assert all(gradient.any() for gradient in jax.tree.leaves(gradients[0]["params"]))
    assert not gradients[0]["router_state"]["expert_bias"].any()


def test_parameters(rng):
    """Shapes, logical axes, and the spread of initial values, which is that of one expert's matrix."""
    model = MoE(
        8, 64, Router(2), shared_features=96, use_bias=True, param_dtype=jnp.bfloat16,
        kernel_axes=("expert", "embed", "mlp"), down_kernel_axes=("expert", "mlp", "embed"),
        bias_axes=("expert", "mlp"), down_bias_axes=("expert", "embed"), router_kernel_axes=("embed", None),
        router_bias_axes=(None,), shared_kernel_axes=("embed", "mlp"), shared_down_kernel_axes=("mlp", "embed"),
        down_kernel_init=nn.initializers.ones,
    )  # fmt: skip
    boxed = jax.jit(model.init)(jax.random.key(0), normal(rng, 4, 128).astype(jnp.bfloat16))["params"]
    params = nn.unbox(boxed)
    wide, narrow = {"kernel": (8, 128, 64), "bias": (8, 64)}, {"kernel": (8, 64, 128), "bias": (8, 128)}
    shared = {layer: {"kernel": (128, 96)} for layer in ("gate_proj", "up_proj")} | {"down_proj": {"kernel": (96, 128)}}
    router = {"kernel": (128, 8), "bias": (8,)}
    shapes = {"router": router, "gate_proj": wide, "up_proj": wide, "down_proj": narrow, "shared": shared}
    assert jax.tree.map(jnp.shape, params) == shapes
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    names = {"expert": 8, "embed": 128, "mlp": 64}
    for layer in ("gate_proj", "down_proj"):
        for parameter, value in boxed[layer].items():
            assert tuple(names[name] for name in value.names) == shapes[layer][parameter]
    assert boxed["shared"]["up_proj"]["kernel"].names == ("embed", "mlp")
    assert boxed["router"]["kernel"].names == ("embed", None)

    kernel = np.asarray(params["gate_proj"]["kernel"], np.float32)
    np.testing.assert_allclose(kernel.std(axis=(1, 2)), 128**-0.5, rtol=0.1)
    assert len({kernel[e].tobytes() for e in range(8)}) == 8
    assert (params["down_proj"]["kernel"] == 1).all()
    assert (params["shared"]["down_proj"]["kernel"] == 1).all()


def test_kernels_quantized_once(rng):
    """With a recipe: the function's value, and the gradients of two microbatches in one sum."""
    recipe = BlockScaling()
    model = MoE(EXPERTS, HIDDEN, Router(2), shared_features=64, recipe=recipe, dtype=jnp.bfloat16)
    microbatches = normal(rng, 2, 24, IN)
    variables = jax.jit(model.init)(jax.random.key(0), microbatches[0])

    def loss_fn(variables, x):
        y = model.apply(variables, x).y
        assert y.dtype == jnp.bfloat16
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    plain = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    ((_, y), first), (_, second) = (plain(variables, x) for x in microbatches)
    wanted = of_function(variables, microbatches[0].astype(jnp.bfloat16), Router(2), recipe=recipe).y
    assert_close(y, wanted, dtype="bfloat16", tolerance=5e-3)

    @jax.jit
    def step(variables, gradients, x):
        return accumulate_gradients(loss_fn, has_aux=True)(quantize_kernels(model, variables, x), gradients, x)

    gradients = jax.tree.map(jnp.zeros_like, variables)
    for x in microbatches:
        (loss, _), gradients = step(variables, gradients, x)
        assert jnp.isfinite(loss)  # NaN says that a kernel was used twice
    jax.tree.map(functools.partial(assert_close, tolerance=0.05), gradients, jax.tree.map(jnp.add, first, second))


class Layers(nn.Module):
    """Layers with a residual, whose results of the router are stacked."""

    wrap: bool

    @nn.compact
    def __call__(self, x):
        def body(layer, x, _):
            result = layer(x)
            return x + result.y, (result.logits, result.routing.experts)

        axes = {"params": 0, "router_state": 0}
        scan = nn.scan(
            nn.remat(body, prevent_cse=False) if self.wrap else body,
            variable_axes=axes,
            split_rngs={"params": True},
            length=2,
        )
        return scan(MoE(EXPERTS, 16, ROUTER, expert_bias=True, name="layer"), x, None)


def test_scan_remat_and_jit(rng):
    """The auxiliary loss of all layers, and the update of all biases, from what the calls return."""
    x = normal(rng, 16, IN)
    plain, wrapped = Layers(False), Layers(True)
    variables = plain.init(jax.random.key(0), x)
    assert variables["params"]["layer"]["gate_proj"]["kernel"].shape == (2, EXPERTS, IN, 16)

    def step(model):
        def loss_fn(params, state):
            y, (logits, experts) = model.apply({"params": params, "router_state": state}, x)
            balance = jax.vmap(functools.partial(ops.load_balancing_loss, score="sigmoid"))(logits, experts)
            counts = jax.vmap(lambda experts: ops.expert_counts(experts, EXPERTS))(experts)
            return jnp.mean(jnp.square(y)) + 1e-2 * balance.sum(), {"layer": {"expert_bias": counts}}

        params, state = variables["params"], variables["router_state"]
        (loss, counts), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params, state)
        return loss, gradients, counts, jax.tree.map(jax.vmap(ops.update_expert_bias), state, counts)

    (loss, gradients, counts, state), expected = (jax.jit(functools.partial(step, m))() for m in (wrapped, plain))
    jax.tree.map(functools.partial(assert_close, tolerance=1e-5), (loss, gradients, counts, state), expected)
    load, bias = (np.asarray(tree["layer"]["expert_bias"]) for tree in (counts, state))
    np.testing.assert_array_equal(load.sum(axis=1), 2 * 16)
    np.testing.assert_allclose(bias, 1e-3 * np.sign(8 - load), rtol=1e-6)


def test_the_bias_moves_the_choice(rng):
    model = MoE(EXPERTS, 16, ROUTER, expert_bias=True)
    x = normal(rng, 16, IN)
    variables = model.init(jax.random.key(0), x)
    variables["router_state"]["expert_bias"] = jnp.array([0.0, 10.0, 0.0, 9.0])
    experts = model.apply(variables, x).routing.experts
    assert (experts == jnp.array([[1, 3]])).all()


def test_expert_parallel(rng, require_devices):
    """Created with all experts, applied to parts of them: value and gradients of the module on one device."""
    require_devices(2)
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    wide, narrow = ("expert", None, None), ("expert", None)
    model = MoE(
        EXPERTS, HIDDEN, ROUTER, OUT, axis_name="expert", buffer_factor=2.0, shared_features=64, expert_bias=True,
        use_bias=True, bias_init=nn.initializers.normal(0.1),
        kernel_axes=wide, down_kernel_axes=wide, bias_axes=narrow, down_bias_axes=narrow,
    )  # fmt: skip
    x = normal(rng, 4, 8, IN)
    boxed = jax.jit(model.init)(jax.random.key(0), x)
    specs, variables = nn.get_partition_spec(boxed), nn.unbox(boxed)
    assert variables["params"]["gate_proj"]["kernel"].shape == (EXPERTS, IN, HIDDEN)
    assert specs["params"]["down_proj"]["bias"] == P("expert", None)

    def apart(variables, x):
        return jax.shard_map(
            lambda *a: model.apply(*a).y, mesh=mesh, in_specs=(specs, P("expert")), out_specs=P("expert")
        )(variables, x)  # fmt: skip

    def together(variables, x):
        return model.clone(axis_name=None, buffer_factor=None).apply(variables, x).y

    found, wanted = (
        jax.jit(jax.value_and_grad(lambda *a, f=f: jnp.sum(f(*a) ** 2)))(variables, x) for f in (apart, together)
    )
    jax.tree.map(functools.partial(assert_close, tolerance=1e-5), found, wanted)
    with pytest.raises(ValueError, match="no axis 'expert' is mapped here; call it inside shard_map"):
        jax.eval_shape(model.apply, variables, x)


def test_errors(rng):
    x, key = normal(rng, 16, IN), jax.random.key(0)
    for fields, message in (
        ({"num_experts": 0}, "num_experts is 0"),
        ({"hidden_features": -1}, "hidden_features is -1"),
        ({"router": 2}, "router is 2; it must be a te_jax.nn.moe.Router, such as"),
        ({"router": Router(5)}, "top_k is 5"),
        ({"weighted": "both"}, "weighted is 'both'"),
        ({"recipe": DelayedScaling()}, "recipe is DelayedScaling"),
        ({"kernel_axes": ("embed", "mlp")}, "kernel_axes is"),
        ({"dtype": jnp.int32}, "dtype is int32"),
    ):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(MoE(**{"num_experts": 4, "hidden_features": 16, "router": Router(2), **fields}).init, key, x)
