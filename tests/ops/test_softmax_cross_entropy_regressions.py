"""What went wrong in other implementations of this loss, one test each. TE is NVIDIA/TransformerEngine."""

import jax
import jax.numpy as jnp
import numpy as np
from cross_entropy_oracle import loss_and_gradient_of, oracle, random_case
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from te_jax import ops
from te_jax.ops import CrossEntropy
from te_jax.testing import assert_close


def test_every_row_has_its_own_cotangent(rng):
    """TE#2139: all rows were multiplied by the first row's. TE#1879: they were divided by the number of rows."""
    logits, labels = random_case(rng, (4, 6, 41), "float32")
    cotangent = rng.standard_normal((4, 6))
    cotangent[0, 0] = 0.0
    _, gradient = loss_and_gradient_of(logits, labels, np.float32(cotangent), reduction="none")
    assert_close(gradient, oracle(logits, labels, reduction="none", cotangent=cotangent).gradient, dtype="float32")
    np.testing.assert_array_equal(np.asarray(gradient)[0, 0], 0.0)


def test_callers_logits_are_not_overwritten(rng):
    """TE#3193: the gradient was written into the caller's logits."""
    logits, labels = random_case(rng, (16, 200), "bfloat16")
    before = np.array(logits)
    jax.block_until_ready(jax.jit(jax.grad(ops.softmax_cross_entropy))(logits, labels))
    np.testing.assert_array_equal(logits, before)


def test_logits_that_are_used_after_the_loss(rng):
    """TE#3193, inside one program: the gradient must not be written over logits that something else still reads."""
    x = jax.device_put(np.asarray(rng.standard_normal((16, 8)), jnp.float32))
    weights = jax.device_put(np.asarray(rng.standard_normal((8, 50)), jnp.float32))
    labels = jax.device_put(np.asarray(rng.integers(0, 50, 16), jnp.int32))

    @jax.jit
    def step(x, weights, labels):
        def loss(weights):
            logits = x @ weights
            return ops.softmax_cross_entropy(logits, labels), logits

        gradient, logits = jax.grad(loss, has_aux=True)(weights)
        return gradient, logits, jnp.argmax(logits + 0.0 * gradient.sum(), axis=-1)

    gradient, logits, argmax = step(x, weights, labels)
    expected = np.asarray(x, np.float64) @ np.asarray(weights, np.float64)
    assert_close(logits, expected, dtype="float32")
    np.testing.assert_array_equal(argmax, np.argmax(np.asarray(logits), axis=-1))
    assert_close(gradient, np.asarray(x, np.float64).T @ oracle(logits, labels).gradient, dtype="float32")


def test_smoothing_sums_over_the_whole_vocabulary(make_mesh, rng):
    """TE, Megatron-LM#737: with a sharded vocabulary each rank smoothed over its own part, and losses differed."""
    mesh = make_mesh({"v": AxisType.Auto})
    logits, labels = random_case(rng, (8, 64), "float32")

    def local(logits, labels):
        loss = ops.softmax_cross_entropy(logits, labels, loss=CrossEntropy(label_smoothing=0.3), vocab_axis="v")
        return loss[None]

    of_every_shard = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(P(None, "v"), P()), out_specs=P("v"), check_vma=False)
    )(logits, labels)
    expected = oracle(logits, labels, loss=CrossEntropy(label_smoothing=0.3)).loss
    assert_close(of_every_shard, np.full(mesh.size, expected), dtype="float32")
    assert len(set(np.asarray(of_every_shard).tolist())) == 1
