"""What XLA makes of FSDP on eight H200s of a host: how many bytes of which type travel, and what memory it takes."""

import collections
import math
import re

import jax
import jax.numpy as jnp
import pytest
from h200 import know_handlers, mesh, needs_compiler, without_autotuning
from jax.sharding import NamedSharding, PartitionSpec

from te_jax import ops
from te_jax.layers import apply_layers
from te_jax.optim import Requantize
from te_jax.parallel import FSDP, shard_specs
from te_jax.recipe import BlockScaling

DEVICES, WIDTH, MLP, TOKENS = 8, 2048, 8192, 4096
OF_LAYER = 2 * WIDTH * MLP  # parameters
INPUT = 2 * TOKENS * WIDTH  # bytes
_BYTES = {"f8e4m3fn": 1, "bf16": 2, "f32": 4, "s32": 4}
_COLLECTIVE = re.compile(r"= (?P<type>.*?) (?P<name>all-gather|reduce-scatter|all-reduce)(?P<start>-start)?\(")


def layer(x, params):
    h = ops.dense(ops.rms_norm(x, params["scale"]), params["up"], recipe=BlockScaling())
    return x + ops.dense(jax.nn.silu(h), params["down"], recipe=BlockScaling())


def gradient(count, **options):
    """The compiled gradient of so many layers."""
    how = Requantize(BlockScaling())
    fsdp = FSDP(DEVICES, quantize={"scale": None, "up": how, "down": how}, **options)
    shapes = {"scale": (WIDTH,), "up": (WIDTH, MLP), "down": (MLP, WIDTH)}
    layers = [{name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}] * count

    def placed(leaf, spec):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh(DEVICES, "fsdp"), spec))

    layers = jax.tree.map(placed, layers, shard_specs(layers, fsdp))
    x = placed(jax.ShapeDtypeStruct((DEVICES, TOKENS, WIDTH), jnp.bfloat16), PartitionSpec("fsdp"))

    def loss(layers, x):
        return jnp.mean(jnp.square(apply_layers(layer, layers, x, remat=True, fsdp=fsdp).astype(jnp.float32)))

    with jax.set_mesh(mesh(DEVICES, "fsdp")):
        shardings = jax.tree.map(lambda leaf: leaf.sharding, layers)
        return without_autotuning(jax.jit(jax.grad(loss), out_shardings=shardings).lower(layers, x))


def travelling(program):
    """Bytes of whole arrays that devices gather, scatter or sum, by collective and type."""
    found = collections.Counter()
    for match in _COLLECTIVE.finditer(program.as_text()):
        types = re.findall(r"(\w+)\[([\d,]*)\]", match["type"])
        whole = {"all-gather": types[len(types) // 2 :], "reduce-scatter": types[: len(types) // 2]}
        parts = 1 if match["start"] or match["name"] != "reduce-scatter" else DEVICES
        for name, shape in whole.get(match["name"], types) if match["start"] else types:
            size = math.prod(int(count) for count in shape.split(",") if count) * _BYTES[name]
            found[match["name"], name] += parts * size
    return {kind: size for kind, size in found.items() if size > 2**20}


@needs_compiler
@pytest.mark.parametrize(("keep", "gathers"), [(0, 8), (1, 7), (4, 4)])
def test_two_bytes_a_parameter_travel_each_way(keep, gathers, monkeypatch):
    know_handlers()
    monkeypatch.setattr("te_jax.native.use_native", lambda *_, **__: True)
    layers = 4
    assert travelling(gradient(layers, keep=keep)) == {
        ("all-gather", "f8e4m3fn"): gathers * OF_LAYER,
        ("reduce-scatter", "bf16"): layers * OF_LAYER * 2,
    }


@needs_compiler
def test_each_layer_exchanges_once_beside_products(monkeypatch):
    """But for the first parameters and the last gradients, which nothing can hide."""
    know_handlers()
    monkeypatch.setattr("te_jax.native.use_native", lambda *_, **__: True)
    monkeypatch.setattr("te_jax.parallel.shards._LAUNCHES_GROUPS", True)
    layers = 6
    products, started, beside = 0, {}, []
    for line in gradient(layers).as_text().split("\nENTRY ")[1].splitlines():
        products += 'custom_call_target="te_gemm' in line
        if launch := re.match(r"\s+%?([\w.-]+) = .* (async|all-gather|reduce-scatter)-start\(", line):
            started[launch[1]] = products
        if launch := re.match(r"\s+%?[\w.-]+ = .* (?:async|all-gather|reduce-scatter)-done\(%?([\w.-]+)\)", line):
            beside.append(products - started[launch[1]])
    assert len(beside) == 2 * layers + 1
    assert min(beside[1:-2]) > 0


@needs_compiler
def test_devices_hold_the_parameters_of_two_layers(monkeypatch):
    """Memory grows by a layer's input with every layer; kept parameters would add a byte for each."""
    know_handlers()
    monkeypatch.setattr("te_jax.native.use_native", lambda *_, **__: True)
    few, many = (gradient(count).memory_analysis().temp_size_in_bytes for count in (4, 8))
    assert many - few < 4 * (INPUT + OF_LAYER / DEVICES) * 1.25  # and its part in FP8, quantized once
    assert gradient(8, keep=8).memory_analysis().temp_size_in_bytes > many + 3 * OF_LAYER
