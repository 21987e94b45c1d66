"""Modules whose devices share them along a mesh axis, against the same modules on one device."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_apis import LINEN, NNX, both, mean_square, normal, sum_of_sines, value_and_gradients
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import te_jax.nnx
from te_jax import hlo
from te_jax.layers import Router
from te_jax.recipe import BlockScaling, CurrentScaling
from te_jax.testing import assert_close

pytestmark = pytest.mark.skipif(
    jax.default_backend() == "gpu", reason="float32, which has no kernel on a GPU: see tests/gpu"
)

BATCH, TIME, IN, HIDDEN = 2, 16, 16, 48
MODULES = {
    "Attention": ((IN, 4), {"num_kv_heads": 2, "window": 9, "qk_norm": "rms", "use_bias": True}),
    "GatedMLP": ((IN, HIDDEN), {"norm": "layer", "use_bias": True}),
    "MoE": ((IN, 4, HIDDEN, Router(2)), {"shared_features": HIDDEN, "expert_bias": True, "use_bias": True}),
    "NormLinear": ((IN, (4, 8)), {"activation": "gelu"}),
    "TransformerBlock": ((IN, HIDDEN, 4), {"num_kv_heads": 2}),
}
CALLS = {
    "Attention": {
        "segment_ids": np.arange(TIME)[None] // np.array([[7], [20]]),
        "key_lengths": np.array([TIME, 11]),
        "positions": np.arange(TIME) + 3,
    }
}


def mesh_of(require_devices, axis_type=AxisType.Auto, **axes):
    count = math.prod(axes.values())
    require_devices(count)
    types = (axis_type,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types, devices=jax.devices()[:count])


def layer_of(api, name, tensor_axis, **arguments):
    sizes, others = MODULES[name]
    return api.layer(name, *sizes, **(others | arguments), tensor_axis=tensor_axis)


@functools.cache
def reference(api, name):
    """(a module on one device, x, its results and gradients)."""
    rng = np.random.default_rng(0)
    x = normal(rng, (BATCH, TIME, IN))
    model = api.drawn(layer_of(api, name, None), rng, x)
    return model, x, value_and_gradients(api, model, x, **CALLS.get(name, {}))


def placed(api, layer, parameters, x):
    """Parameters on the mesh at hand, as their metadata say."""
    mesh = jax.sharding.get_mesh()
    place = lambda value, spec: jax.device_put(np.asarray(value), NamedSharding(mesh, spec))  # noqa: E731
    return jax.tree.map(place, parameters, specs_of(api, layer, x))


def specs_of(api, layer, x):
    names = api.names(layer, x)
    return jax.tree.map(lambda spec: spec or P(), names, is_leaf=lambda spec: spec is None or isinstance(spec, P))


def shared(api, layer, model, x):
    """The model with parameters on the mesh at hand, and a tensor axis."""
    return api.replaced(api.drawn(layer, np.random.default_rng(1), x), placed(api, layer, api.parameters(model), x))


def assert_same(actual, expected, tolerance=1e-5):
    actual, expected = (jax.tree.leaves_with_path(jax.device_get(tree)) for tree in (actual, expected))
    for (path, one), (other_path, other) in zip(actual, expected, strict=True):
        assert path == other_path
        assert_close(one, other, tolerance=tolerance)


BOTH_AXES = {"kernel_init": ("data", "tensor"), "down_kernel_init": ("tensor", "data")}
# A module, a mesh, and names of the dimensions of kernels: FSDP by PartitionSpecs alone.
UNDER_JIT = [
    pytest.param("GatedMLP", NNX, AxisType.Explicit, {"data": 2, "tensor": 2}, BOTH_AXES, id="GatedMLP-nnx-both-axes"),
    pytest.param("NormLinear", LINEN, AxisType.Explicit, {"data": 2, "tensor": 2}, {}, id="NormLinear-linen-explicit"),
    pytest.param("Attention", LINEN, AxisType.Auto, {"tensor": 4}, {}, id="Attention-linen-auto"),
]


@pytest.mark.parametrize(("name", "api", "axis_type", "axes", "names"), UNDER_JIT)
def test_under_jit(require_devices, api, axis_type, axes, name, names):
    model, x, expected = reference(api, name)
    mesh = mesh_of(require_devices, axis_type, **axes)
    layer = layer_of(api, name, "tensor", **{init: api.named(each) for init, each in names.items()})
    make = functools.partial(api.drawn, layer, np.random.default_rng(1), x)
    tensor = make() if api is LINEN else None  # flax.linen.unbox needs arrays that lie on an Explicit mesh
    with jax.set_mesh(mesh):
        tensor = tensor or make()
        split = NamedSharding(mesh, P("data" if "data" in axes else None, "tensor"))
        tensor = api.replaced(tensor, placed(api, layer, api.parameters(model), x))
        assert not names or tensor.gate_proj.kernel.get_value().sharding.spec == P("data", "tensor")
        found = value_and_gradients(api, tensor, jax.device_put(x, split), **CALLS.get(name, {}))
    assert_same(found, expected)
    y = getattr(found[0], "y", found[0])
    spec = (*split.spec, None) if name != "NormLinear" else (split.spec[0], None, "tensor", None)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P(*spec)), y.ndim)


def test_inside_shard_map(require_devices):
    """A mesh that a user's own shard_map has mapped, with all of the batch on every device."""
    api, name = NNX, "MoE"
    model, x, (y, gradients, _, (dx,)) = reference(api, name)
    layer = layer_of(api, name, "tensor")
    outs = P(None, "tensor")
    with jax.set_mesh(mesh_of(require_devices, tensor=2)):
        specs = specs_of(api, layer, x)
        tensor = api.drawn(layer, np.random.default_rng(1), x)

        def local(parameters, x):
            y = api.replaced(tensor, parameters)(x)
            return y._replace(dropped=jax.lax.psum(y.dropped, "tensor"))

        outs = y._replace(y=outs, logits=outs, routing=outs, dropped=P())
        mapped = jax.shard_map(local, in_specs=(specs, P(None, "tensor")), out_specs=outs)

        @jax.jit
        @functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
        def found(parameters, x):
            y = mapped(parameters, x)
            return sum_of_sines(y), y

        (of_parameters, of_x), result = found(placed(api, layer, api.parameters(model), x), x)
    assert_same((result, of_parameters, of_x), (y, gradients, dx))


# Wide enough for whole blocks on each device.
WIDE = {"GatedMLP": ((64, 256), {"norm": "rms"}), "Attention": ((64, 2), {"head_dim": 128})}


def test_kernels_that_are_quantized_beforehand(require_devices, rng):
    api, name = NNX, "Attention"
    sizes, others = WIDE[name]
    layer = functools.partial(api.layer, name, *sizes, **others, recipe=BlockScaling())
    x = normal(rng, (2, 256, 64))
    model = api.drawn(layer(), rng, x)

    def step(model, x):
        quantized = api.quantize_kernels(model, x)
        return api.parameters(api.accumulate_gradients(mean_square)(quantized, api.zeros(model), x)[1])

    expected = api.jit(step)(model, x)
    with jax.set_mesh(mesh_of(require_devices, data=2, tensor=2)):
        found = api.jit(step)(shared(api, layer(tensor_axis="tensor"), model, x), x)
    assert_same(found, expected, 1e-2)


@both
def test_metadata(require_devices, api):
    x = jnp.zeros((BATCH, TIME, IN))
    columns, rows = P(None, "tensor"), P("tensor", None)
    heads = {"kernel": P(None, "tensor", None)}
    block = {
        "attention_norm": {"scale": P()},
        "attention": {"query": heads, "key": heads, "value": heads, "out": {"kernel": P("tensor", None, None)}},
        "mlp_norm": {"scale": P()},
        "mlp": {"gate_proj": {"kernel": columns}, "up_proj": {"kernel": columns}, "down_proj": {"kernel": rows}},
    }
    layer = layer_of(api, "TransformerBlock", "tensor")
    assert specs_of(api, layer, x) == block
    with jax.set_mesh(mesh_of(require_devices, tensor=4)):  # of two heads of key and value
        found = specs_of(api, layer, x)["attention"]
        assert found["key"] == found["value"] == {"kernel": P()}
        assert found["query"] == heads
    experts = {"kernel": P("tensor", None, None), "bias": P("tensor", None)}
    found = specs_of(api, layer_of(api, "MoE", "tensor"), x)
    assert found["gate_proj"] == found["up_proj"] == found["down_proj"] == experts
    assert found["router"] == {"kernel": P(), "bias": P()}
    assert found["shared"]["down_proj"] == {"kernel": rows}
    both_axes = layer_of(api, "MoE", "tensor", expert_parallel=("data", "tensor"))
    assert specs_of(api, both_axes, x)["up_proj"]["kernel"] == P(("data", "tensor"), None, None)
    mine = layer_of(api, "GatedMLP", "tensor", kernel_init=api.named(("fsdp", "tensor")))
    assert specs_of(api, mine, x)["gate_proj"] == {"kernel": P("fsdp", "tensor"), "bias": P("tensor")}


def test_a_block_gathers_no_kernel(require_devices, rng):
    """A block gathers the residual stream four times, or its gradient, and scatters as often; gradients of what devices
    share are summed, like the loss; and there is nothing else."""
    api, x = LINEN, normal(rng, (1, 64, IN))
    layer = layer_of(api, "TransformerBlock", "tensor")
    mesh = mesh_of(require_devices, tensor=2)
    with jax.set_mesh(mesh):
        model = api.drawn(layer, rng, x)
        model = api.replaced(model, placed(api, layer, api.parameters(model), x))
        x = jax.device_put(x, NamedSharding(mesh, P(None, "tensor")))
        found = hlo.collectives(lambda model, x: api.value_and_grad(mean_square)(model, x), model, x)
    whole = {kind: [each for each in found if each.kind == kind] for kind in ("all-gather", "reduce-scatter")}
    assert [len(each) for each in whole.values()] == [4, 4]
    assert {math.prod(buffer.shape) for each in whole["all-gather"] for buffer in each.results} == {x.size}
    assert {each.kind for each in found} - set(whole) == {"all-reduce"}


@both
def test_errors(require_devices, api):
    x = np.zeros((BATCH, TIME, IN), np.float32)

    def trace(name, *sizes, x=x, call=None, tensor_axis="tensor", **arguments):
        layer = api.layer(name, *sizes, **arguments, tensor_axis=tensor_axis)
        if api is NNX:
            return nnx.eval_shape(lambda x: layer(rngs=nnx.Rngs(0))(x, **(call or {})), x)
        return jax.eval_shape(lambda x: layer().apply(layer().init(jax.random.key(0), x), x), x)

    with pytest.raises(ValueError, match=r"tensor_axis is 'tensor', and the mesh here has the axes \(\)"):
        trace("GatedMLP", IN, HIDDEN)
    with jax.set_mesh(mesh_of(require_devices, tensor=4)):
        with pytest.raises(ValueError, match=r"hidden_features is 50, .*a multiple of 4, .*: \[1, 2, 5, 10, 25, 50\]"):
            trace("GatedMLP", IN, 50)
        with pytest.raises(ValueError, match=r"hidden_features is 48, .* multiples of 16.*: \[1, 3\]"):
            trace("GatedMLP", IN, 48, recipe=CurrentScaling())
        with pytest.raises(ValueError, match=r"num_heads is 6, .*: \[1, 2, 3, 6\]"):
            trace("Attention", IN, 6, head_dim=8)
        with pytest.raises(ValueError, match=r"features is 6, .*: \[1, 2, 3, 6\]"):
            trace("NormLinear", IN, 6)
        with pytest.raises(ValueError, match=r"num_experts is 6, .* 4 devices along 'tensor' .*: \[1, 2, 3, 6\]"):
            trace("MoE", IN, 6, HIDDEN, Router(2))
        with pytest.raises(ValueError, match=r"a time of 18, .* pad it to a multiple of 4"):
            trace("TransformerBlock", IN, HIDDEN, 4, x=x[:, :1].repeat(18, 1))
        with pytest.raises(ValueError, match=r"it must be \[\*batch, time, features\]"):
            trace("GatedMLP", IN, HIDDEN, x=x[0, 0])
        call = {"decode": True} if api is NNX else {}
        with pytest.raises(ValueError, match="decode is True and tensor_axis 'tensor'"):
            trace("Attention", IN, 4, **({"decode": True} if api is LINEN else {}), call=call)
    for name in ("GatedMLP", "Attention", "TransformerBlock", "NormLinear"):
        sizes = MODULES[name][0]
        with pytest.raises(ValueError, match="state_axis is 'data' and tensor_axis 'tensor'"):
            trace(name, *sizes, state_axis="data")
    for name, (sizes, _) in MODULES.items():
        with pytest.raises(ValueError, match=r"tensor_axis is \('a', 'b'\); it must be the name"):
            trace(name, *sizes, tensor_axis=("a", "b"))


def test_quantized_kernels_that_devices_cannot_split(require_devices):
    def call(num_kv_heads, recipe):
        sizes = {"num_kv_heads": num_kv_heads, "head_dim": 48, "recipe": recipe}

        def result(x):
            model = te_jax.nnx.Attention(IN, 4, **sizes, tensor_axis="tensor", rngs=nnx.Rngs(0))
            return te_jax.nnx.quantize_kernels(model)(x)

        nnx.eval_shape(result, jax.ShapeDtypeStruct((1, 256, IN), jnp.float32))

    with jax.set_mesh(mesh_of(require_devices, tensor=2)):
        with pytest.raises(ValueError, match=r"kernel has shape \(16, 192\) and is quantized in blocks of 128"):
            call(2, BlockScaling())
        with pytest.raises(ValueError, match="key or value is quantized beforehand"):
            call(1, CurrentScaling())


def test_what_shard_map_must_not_be(require_devices):
    """Without tracking, and with kernels of which each device has all."""
    model, x, _ = reference(NNX, "Attention")
    layer = layer_of(NNX, "Attention", "tensor")
    with jax.set_mesh(mesh_of(require_devices, tensor=2)):
        tensor, specs = NNX.drawn(layer, np.random.default_rng(0), x), specs_of(NNX, layer, x)

        def call(specs, **options):
            def local(parameters, x):
                return NNX.replaced(tensor, parameters)(x)

            stream = P(None, "tensor")
            mapped = jax.shard_map(local, in_specs=(specs, stream), out_specs=stream, **options)
            return jax.eval_shape(mapped, NNX.parameters(model), x)

        with pytest.raises(ValueError, match="use shard_map with check_vma=True"):
            call(specs, check_vma=False)
        with pytest.raises(ValueError, match="it must be this device's part with"):
            call(jax.tree.map(lambda _: P(), specs, is_leaf=lambda spec: isinstance(spec, P)))


def test_linen_boxes_inside_shard_map(require_devices):
    """Names of axes, which Linen keeps with parameters, may go into shard_map too."""
    x = jnp.zeros((BATCH, TIME, IN))
    module = layer_of(LINEN, "TransformerBlock", "tensor")()
    variables = jax.eval_shape(module.init, jax.random.key(0), x)
    specs = nn.get_partition_spec(variables), P(None, "tensor")
    with jax.set_mesh(mesh_of(require_devices, tensor=2)):
        mapped = jax.shard_map(module.apply, in_specs=specs, out_specs=P(None, "tensor"))
        assert jax.eval_shape(mapped, variables, x).shape == x.shape
