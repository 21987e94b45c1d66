"""Plain Flax models, converted to FP8, whose blocks' parameters devices share: the gradients of one device."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding

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


class NNXBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, MLP, rngs=rngs), nnx.Linear(MLP, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.silu(self.up(self.norm(x))))


def compare(layer, layers, quantize, require_devices):
    """Gradients on a mesh with those on one device."""
    require_devices(DEVICES)
    kernels = [how for how in jax.tree.leaves(quantize, is_leaf=lambda x: x is None) if how is not None]
    assert kernels == [Requantize(BlockScaling())] * 2
    fsdp = FSDP(DEVICES, quantize=quantize, reduce_dtype="float32")

    def loss(layers, fsdp=None):
        return jnp.mean(jnp.sin(apply_layers(layer, layers, X, remat=True, fsdp=fsdp)))

    expected = jax.jit(jax.grad(loss))(layers)
    mesh = jax.make_mesh((DEVICES,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])
    place = lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec))  # noqa: E731
    shared = jax.tree.map(place, layers, shard_specs(layers, fsdp))
    with jax.set_mesh(mesh):
        found = jax.jit(jax.grad(functools.partial(loss, fsdp=fsdp)))(shared)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(jax.device_get(one), jax.device_get(other), tolerance=1e-2)  # where roundings flip


def test_linen(require_devices):
    block = te_jax.flax.convert(LinenBlock(), BlockScaling())
    layers = [block.init(jax.random.key(i), X)["params"] for i in range(2)]
    quantize = te_jax.flax.requantize(block, {"params": layers[0]}, X)["params"]
    compare(lambda x, params: block.apply({"params": params}, x), layers, quantize, require_devices)


def test_nnx(require_devices):
    blocks = nnx.List([NNXBlock(nnx.Rngs(i)) for i in range(2)])
    te_jax.nnx.convert(blocks, BlockScaling())
    graph = nnx.split(blocks[0])[0]
    layers = [nnx.state(block) for block in blocks]
    compare(lambda x, state: nnx.merge(graph, state)(x), layers, te_jax.nnx.requantize(blocks[0]), require_devices)
