"""Softmax cross-entropy of sharded logits: labels that lie otherwise, memory, and what surrounds it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cross_entropy_oracle import OPTIONS, oracle, random_case
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from parameters import in_turns

from te_jax import ops
from te_jax.hlo import buffers, collectives
from te_jax.testing import assert_close

pytestmark = pytest.mark.usefixtures("native_kernels")

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
SHAPE = (16, 2, 64)

# logits' sharding, labels' sharding: where labels lie over another axis than their rows, XLA moves labels or losses, a
# number a row. Others are in tests/conformance.
AXIS_TYPES = {"auto": AUTO, "explicit": EXPLICIT}
SPECS = {"labels alone": (P(), P("data")), "labels over the vocabulary's axis": (P(None, None, "data"), P("data"))}


def place(x, mesh, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


@functools.cache
def step(**options):
    def value_and_gradient(logits, labels, cotangent):
        loss, vjp = jax.vjp(lambda x: ops.softmax_cross_entropy(x, labels, implementation="native", **options), logits)
        return loss, vjp(cotangent)[0]

    return jax.jit(value_and_gradient)


def assert_same_bits_everywhere(x):
    """All devices that hold the same part of an array hold the same bits."""
    parts = {}
    for shard in x.addressable_shards:
        parts.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
    assert all(len(bits) == 1 for bits in parts.values())


def assert_exchanges_rows_only(compiled, local_shape):
    """Only all-reduces, of at most four float32 for each local row in all."""
    rows = int(np.prod(local_shape[:-1]))
    found = collectives(compiled)
    assert {entry.kind for entry in found} <= {"all-reduce"}
    assert sum(array.bytes for entry in found for array in entry.results) <= 4 * 4 * rows + 32, found


def check(mesh, specs, rng, *, exchanges=True, **options):
    logits, labels = random_case(rng, SHAPE, "bfloat16", ignored=0.2)
    expected = oracle(logits, labels, cotangent=1.5, **options)
    logits, labels = place(logits, mesh, specs[0]), place(labels, mesh, specs[1])
    compiled = step(**options).lower(logits, labels, jnp.float32(1.5)).compile()
    loss, gradient = compiled(logits, labels, jnp.float32(1.5))
    assert_close(loss, expected.loss, dtype="float32")
    assert_close(gradient, expected.gradient, dtype="bfloat16")
    assert_same_bits_everywhere(loss)
    assert_same_bits_everywhere(gradient)
    if exchanges:
        assert gradient.sharding.is_equivalent_to(logits.sharding, logits.ndim), gradient.sharding
        assert_exchanges_rows_only(compiled, logits.sharding.shard_shape(SHAPE))
        local = int(np.prod(logits.sharding.shard_shape(SHAPE)))
        assert not [b for b in buffers(compiled) if b.dtype == "f32" and b.elements >= local]
    return compiled


@pytest.mark.parametrize(("specs", "axis_type"), in_turns(SPECS, AXIS_TYPES))
def test_labels_that_lie_otherwise(axis_type, specs, make_mesh, rng):
    mesh = make_mesh({"data": axis_type, "model": axis_type})
    compiled = check(mesh, specs, rng, exchanges=False, **OPTIONS["all"])
    # Whatever moves, it is never logits.
    local = NamedSharding(mesh, specs[0]).shard_shape(SHAPE)
    sizes = [sum(array.elements for array in entry.results) for entry in collectives(compiled)]
    assert all(size <= 4 * SHAPE[0] * SHAPE[1] for size in sizes)
    assert not [b for b in buffers(compiled) if b.elements > int(np.prod(local))]
