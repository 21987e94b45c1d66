"""Plain Flax models, converted to FP8, whose blocks' parameters devices share: the gradients of one device."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_apis import LINEN, NNX
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import te_jax.flax
import te_jax.nnx
from te_jax.layers import apply_layers
from te_jax.optim import Requantize
from te_jax.parallel import FSDP, shard_specs
from te_jax.recipe import BlockScaling
from te_jax.testing import assert_close

WIDTH, MLP, DEVICES = 256, 512, 2
X = np.random.default_rng(0).standard_normal((4, 128, WIDTH)).astype(np.float32)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(WIDTH)(nn.silu(nn.Dense(MLP)(nn.RMSNorm()(x))))


@pytest.fixture
def mesh(require_devices):
    require_devices(DEVICES)
    return jax.make_mesh((DEVICES,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])


def place(tree, mesh, specs):
    return jax.tree.map(lambda leaf, spec: jax.device_put(np.asarray(leaf), NamedSharding(mesh, spec)), tree, specs)


def assert_same(found, expected, tolerance=1e-2):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(jax.device_get(one), jax.device_get(other), tolerance=tolerance)  # where roundings flip


def test_linen(mesh, rng):
    """Gradients on a mesh with those on one device."""
    block = te_jax.flax.convert(LinenBlock(), BlockScaling())
    layers = [LINEN.drawn(lambda: block, rng, X).variables["params"] for _ in range(2)]
    quantize = te_jax.flax.requantize(block, {"params": layers[0]}, X)["params"]
    kernels = [how for how in jax.tree.leaves(quantize, is_leaf=lambda x: x is None) if how is not None]
    assert kernels == [Requantize(BlockScaling())] * 2
    fsdp = FSDP(DEVICES, quantize=quantize, reduce_dtype="float32")

    def loss(layers, fsdp=None):
        y = apply_layers(lambda x, params: block.apply({"params": params}, x), layers, X, remat=True, fsdp=fsdp)
        return jnp.mean(jnp.sin(y))

    expected = jax.jit(jax.grad(loss))(layers)
    with jax.set_mesh(mesh):
        found = jax.jit(jax.grad(functools.partial(loss, fsdp=fsdp)))(place(layers, mesh, shard_specs(layers, fsdp)))
    assert_same(found, expected)


def linen_mlp(key):
    block = te_jax.flax.GatedMLP(64, dropout_rate=0.5)
    params = jax.jit(functools.partial(block.init, deterministic=True))(jax.random.key(0), X[..., :64])["params"]

    def layer(x, part):
        return block.apply({"params": part[0]}, x, deterministic=False, rngs={"dropout": part[1]})

    return layer, (params, jax.random.key_data(key))


def nnx_mlp(key):
    mlp = nnx.jit(lambda key: te_jax.nnx.GatedMLP(64, 64, dropout_rate=0.5, rngs=nnx.Rngs(0, dropout=key)))(key)
    graph, state = nnx.split(mlp)
    return lambda x, state: nnx.merge(graph, state)(x), state  # draws by a key among its state


@pytest.mark.parametrize("make", [linen_mlp, nnx_mlp])
def test_dropout_is_of_each_device(make, mesh):
    layer, params = make(jax.random.key(1))
    x = np.concatenate([X[:1, :, :64]] * DEVICES)
    with jax.set_mesh(mesh):
        run = jax.jit(lambda params, x: apply_layers(layer, [params], x, remat=True, fsdp=FSDP(DEVICES)))
        first, second = jax.device_get(run(params, x))
    kept = (first != 0) & (second != 0)
    assert 0.2 < np.mean(kept) < 0.3
    np.testing.assert_array_equal(first[kept], second[kept])


def test_a_block_with_a_tensor_axis_shares_what_is_left(require_devices, rng):
    """Parameters are split by both axes, and the layer by one."""
    require_devices(4)
    x = np.concatenate([X, X[::-1]], axis=1)  # whole blocks of the time of each device
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    arguments = {"num_heads": 4, "head_dim": 128, "recipe": BlockScaling()}
    make = functools.partial(te_jax.nnx.TransformerBlock, WIDTH, MLP, **arguments)
    plain = NNX.drawn(make, rng)
    expected = nnx.jit(nnx.grad(lambda block, x: jnp.mean(jnp.sin(block(x)))))(plain, x)
    with jax.set_mesh(mesh):
        graph, shapes = nnx.split(NNX.abstract(functools.partial(make, tensor_axis="tensor")))
    state = jax.tree.structure(shapes).unflatten(jax.tree.leaves(nnx.state(plain)))
    state = place(state, mesh, nnx.get_partition_spec(shapes))
    fsdp = FSDP(2, quantize=te_jax.nnx.requantize(nnx.merge(graph, state)), reduce_dtype="float32")
    specs = shard_specs([state], fsdp)
    assert specs[0]["mlp"]["up_proj"]["kernel"].get_value() == P("fsdp", "tensor")
    assert specs[0]["mlp"]["down_proj"]["kernel"].get_value() == P(("tensor", "fsdp"))
    fsdp = dataclasses.replace(fsdp, specs=specs)

    def local(states, x):
        y = apply_layers(lambda x, state: nnx.merge(graph, state)(x), states, x, remat=True, fsdp=fsdp)
        return jax.lax.pmean(jnp.mean(jnp.sin(y)), ("fsdp", "tensor"))

    shared = jax.shard_map(local, mesh=mesh, in_specs=(specs, P("fsdp", "tensor")), out_specs=P())
    states = place([state], mesh, specs)
    assert shard_specs(states, fsdp) == specs
    x = jax.device_put(x, NamedSharding(mesh, P("fsdp", "tensor")))
    assert_same(jax.jit(jax.grad(shared))(states, x), expected, tolerance=5e-2)
