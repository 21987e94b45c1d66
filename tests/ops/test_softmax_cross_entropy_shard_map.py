"""Softmax cross-entropy inside shard_map: the vocabulary split by `axis_name`, fully and partly manual meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cross_entropy_oracle import oracle
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from te_jax import ops
from te_jax.testing import assert_close

pytestmark = pytest.mark.usefixtures("native_kernels")

AUTO = AxisType.Auto


@pytest.fixture
def mesh(make_mesh):
    return make_mesh({"data": AUTO, "model": AUTO})


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
