"""Softmax cross-entropy inside shard_map: the vocabulary split by `axis_name`, fully and partly manual meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cross_entropy_oracle import OPTIONS, oracle, random_case
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax import ops
from te_jax.hlo import buffers, collectives
from te_jax.testing import assert_close

pytestmark = pytest.mark.usefixtures("native_kernels")

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
SHAPE = (16, 64)


@pytest.fixture
def mesh(make_mesh):
    return make_mesh({"data": AUTO, "model": AUTO})


@pytest.fixture
def case(rng):
    return random_case(rng, SHAPE, "float32", ignored=0.2)


def assert_exchanges_rows_only(compiled, rows):
    found = collectives(compiled)
    assert {entry.kind for entry in found} <= {"all-reduce"}
    assert sum(array.elements for entry in found for array in entry.results) <= 4 * rows + 8, found


def test_special_rows_of_a_split_vocabulary(mesh):
    """Masked, without probability, NaN, infinite, ignored, out of the vocabulary; each spread over shards or in one."""
    logits = np.tile(np.linspace(-1, 1, 64, dtype=np.float32), (8, 1))
    labels = np.full(8, 40, np.int32)
    logits[0, :32] = -np.inf  # a whole shard masked
    logits[1, :] = -np.inf
    logits[2, 3] = np.nan
    logits[3, 60] = np.inf
    labels[4], logits[4] = -100, np.nan
    labels[5] = 64
    labels[6] = -1
    expected = oracle(logits, labels, reduction="none", cotangent=np.ones(8))
    expected.gradient[4] = 0.0

    def rows(logits):
        local = functools.partial(ops.softmax_cross_entropy, vocab_axis="model", reduction="none")
        return jax.shard_map(local, mesh=mesh, in_specs=(P(None, "model"), P()), out_specs=P())(logits, labels)

    @jax.jit
    def run(logits):
        value, vjp = jax.vjp(rows, logits)
        return value, vjp(jnp.ones(8))[0]

    value, gradient = run(jnp.asarray(logits))
    assert_close(value, expected.loss, dtype="float32", equal_nan=True)
    assert_close(gradient, expected.gradient, dtype="float32", equal_nan=True)


# -------------------------------------------------------------------------------------------------------- partly manual


@pytest.mark.parametrize("outer", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_manual_vocabulary_and_rows_that_jax_splits(outer, make_mesh, case):
    mesh = make_mesh({"data": outer, "model": AUTO})
    logits, labels = case

    def total(logits, labels):
        local = functools.partial(ops.softmax_cross_entropy, vocab_axis="model", reduction="sum", **OPTIONS["all"])
        return jax.shard_map(
            local, mesh=mesh, in_specs=(P(None, "model"), P()), out_specs=P(), axis_names={"model"}
        )(logits, labels)  # fmt: skip

    expected = oracle(logits, labels, reduction="sum", **OPTIONS["all"])
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in ((logits, P("data", "model")), (labels, P("data")))
        ]
        compiled = jax.jit(jax.value_and_grad(total)).lower(*placed).compile()
        value, gradient = compiled(*placed)
    assert_close(value, expected.loss, dtype="float32")
    assert_close(gradient, expected.gradient, dtype="float32")
    # Where the other axis is Explicit, JAX itself gathers the operands of such a shard_map, whatever runs inside.
    if not mesh.explicit_axes:
        assert_exchanges_rows_only(compiled, SHAPE[0] // mesh.shape["data"])


@pytest.mark.parametrize(("check_vma", "donate"), [(True, False), (False, True)], ids=["kept", "donated"])
def test_memory_of_shards(check_vma, donate, mesh, rng):
    """The gradient is written over donated shards. Shards that are kept are copied once: inside a shard_map of the
    user's it cannot be seen whose they are."""
    logits, labels = random_case(rng, (64, 2048), "bfloat16")
    spec = P("data", "model")

    def local(logits, labels):
        return jax.grad(lambda x: ops.softmax_cross_entropy(x, labels, vocab_axis="model", reduction="sum"))(logits)

    step = jax.shard_map(local, mesh=mesh, in_specs=(spec, P("data")), out_specs=spec, check_vma=check_vma)
    # Without tracked axes JAX differentiates the sum of the shards' losses.
    expected = (1 if check_vma else 2) * oracle(logits, labels, reduction="sum").gradient
    placed = jax.device_put(logits, NamedSharding(mesh, spec)), jax.device_put(labels, NamedSharding(mesh, P("data")))
    size = placed[0].addressable_shards[0].data.nbytes
    compiled = jax.jit(step, donate_argnums=(0,) if donate else ()).lower(*placed).compile()
    assert len([b for b in buffers(compiled, "copy", "copy-start") if b.bytes >= size]) == (0 if donate else 1)
    assert compiled.memory_analysis().alias_size_in_bytes == (size if donate else 0)
    assert compiled.memory_analysis().temp_size_in_bytes < 0.1 * size
    assert_close(compiled(*placed), expected, dtype="bfloat16")
