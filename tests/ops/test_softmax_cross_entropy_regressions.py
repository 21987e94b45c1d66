"""What went wrong in other implementations of this loss, one test each. TE is NVIDIA/TransformerEngine."""

import jax
import jax.numpy as jnp
import numpy as np
from cross_entropy_oracle import check, loss_and_gradient_of, oracle, random_case
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from te_jax import ops
from te_jax.ops import CrossEntropy
from te_jax.testing import assert_close


def vjp_of(logits, labels, cotangent, **options):
    return loss_and_gradient_of(logits, labels, jnp.asarray(cotangent, jnp.float32), **options)[1]


def test_unreduced_gradient_is_not_divided_by_the_number_of_rows(implementation, rng):
    """TE#1879."""
    logits, labels = random_case(rng, (32, 41), "float32")
    ones = np.ones(32)
    gradient = vjp_of(logits, labels, ones, reduction="none", implementation=implementation)
    assert_close(gradient, oracle(logits, labels, reduction="none", cotangent=ones).gradient, dtype="float32")
    of_sum = vjp_of(logits, labels, 1.0, reduction="sum", implementation=implementation)
    assert_close(gradient, of_sum)
    of_mean = vjp_of(logits, labels, 1.0, reduction="mean", implementation=implementation)
    assert_close(gradient, 32.0 * of_mean)


def test_every_row_has_its_own_cotangent(implementation, rng):
    """TE#2139: all rows were multiplied by the first row's."""
    logits, labels = random_case(rng, (4, 6, 41), "float32")
    cotangent = rng.standard_normal((4, 6))
    cotangent[0, 0] = 0.0
    gradient = vjp_of(logits, labels, cotangent, reduction="none", implementation=implementation)
    assert_close(gradient, oracle(logits, labels, reduction="none", cotangent=cotangent).gradient, dtype="float32")
    np.testing.assert_array_equal(gradient[0, 0], 0.0)


def test_expanded_cotangent(implementation, rng):
    """TE#2402: a cotangent that is one number broadcast over all rows, or a strided view."""
    logits, labels = random_case(rng, (6, 8, 37), "bfloat16")
    per_column = jax.device_put(np.asarray(rng.standard_normal(8), jnp.float32))

    @jax.jit
    def gradient_of(logits, labels, per_column):
        loss = lambda logits: ops.softmax_cross_entropy(  # noqa: E731
            logits, labels, reduction="none", implementation=implementation
        )
        _, vjp = jax.vjp(loss, logits)
        expanded = vjp(jnp.broadcast_to(per_column, (6, 8)))[0]
        transposed = vjp(jnp.broadcast_to(per_column[:, None], (8, 6)).T)[0]
        return expanded, transposed

    expected = oracle(logits, labels, reduction="none", cotangent=np.broadcast_to(per_column, (6, 8))).gradient
    for gradient in gradient_of(logits, labels, per_column):
        assert_close(gradient, expected, dtype="bfloat16")


def test_transposed_logits(implementation, rng):
    """TE#2746: logits that are a transposed, and so not contiguous, view."""
    logits, labels = random_case(rng, (5, 7, 43), "float32")
    backwards = jax.device_put(np.transpose(logits, (2, 1, 0)))

    @jax.jit
    def run(backwards):
        loss = lambda x: ops.softmax_cross_entropy(  # noqa: E731
            jnp.transpose(x, (2, 1, 0)), labels, implementation=implementation
        )
        return jax.value_and_grad(loss)(backwards)

    loss, gradient = run(backwards)
    expected = oracle(logits, labels)
    assert_close(loss, expected.loss, dtype="float32")
    assert_close(gradient, np.transpose(expected.gradient, (2, 1, 0)), dtype="float32")


def test_divisor_leaves_out_ignored_tokens(implementation, rng):
    """TE#2476."""
    logits, labels = random_case(rng, (10, 29), "float32")
    labels = labels.at[3:].set(-100)
    loss, _ = check(logits, labels, rng, implementation=implementation)
    assert_close(loss, oracle(logits[:3], labels[:3]).loss, dtype="float32")


def test_callers_logits_are_not_overwritten(implementation, rng):
    """TE#3193: the gradient was written into the caller's logits."""
    logits, labels = random_case(rng, (16, 200), "bfloat16")
    before = np.array(logits)
    eager = jax.grad(ops.softmax_cross_entropy)(logits, labels, implementation=implementation)
    jitted = jax.jit(jax.grad(lambda *a: ops.softmax_cross_entropy(*a, implementation=implementation)))(logits, labels)
    jax.block_until_ready((eager, jitted))
    np.testing.assert_array_equal(logits, before)


def test_logits_that_are_used_after_the_loss(implementation, rng):
    """TE#3193, inside one program: the gradient must not be written over logits that something else still reads."""
    x = jax.device_put(np.asarray(rng.standard_normal((16, 8)), jnp.float32))
    weights = jax.device_put(np.asarray(rng.standard_normal((8, 50)), jnp.float32))
    labels = jax.device_put(np.asarray(rng.integers(0, 50, 16), jnp.int32))

    @jax.jit
    def step(x, weights, labels):
        def loss(weights):
            logits = x @ weights
            return ops.softmax_cross_entropy(logits, labels, implementation=implementation), logits

        gradient, logits = jax.grad(loss, has_aux=True)(weights)
        return gradient, logits, jnp.argmax(logits + 0.0 * gradient.sum(), axis=-1)

    gradient, logits, argmax = step(x, weights, labels)
    expected = np.asarray(x, np.float64) @ np.asarray(weights, np.float64)
    assert_close(logits, expected, dtype="float32")
    np.testing.assert_array_equal(argmax, np.argmax(np.asarray(logits), axis=-1))
    assert_close(gradient, np.asarray(x, np.float64).T @ oracle(logits, labels).gradient, dtype="float32")


def test_smoothing_sums_over_the_whole_vocabulary(make_mesh, implementation, rng):
    """TE, Megatron-LM#737: with a sharded vocabulary each rank smoothed over its own part, and losses differed."""
    mesh = make_mesh({"v": AxisType.Auto})
    logits, labels = random_case(rng, (8, 64), "float32")

    def local(logits, labels):
        loss = ops.softmax_cross_entropy(
            logits, labels, loss=CrossEntropy(label_smoothing=0.3), vocab_axis="v", implementation=implementation
        )
        return loss[None]

    of_every_shard = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(P(None, "v"), P()), out_specs=P("v"), check_vma=False)
    )(logits, labels)
    expected = oracle(logits, labels, loss=CrossEntropy(label_smoothing=0.3)).loss
    assert_close(of_every_shard, np.full(mesh.size, expected), dtype="float32")
    assert len(set(np.asarray(of_every_shard).tolist())) == 1


def test_two_losses_from_the_same_logits(implementation, rng):
    """Their gradients add up, whichever is written first."""
    logits, labels = random_case(rng, (12, 90), "float32")
    others = jnp.flip(labels)

    @jax.jit
    def gradient_of(logits):
        def both(logits):
            first = ops.softmax_cross_entropy(logits, labels, implementation=implementation)
            second = ops.softmax_cross_entropy(
                logits,
                others,
                loss=CrossEntropy(label_smoothing=0.1),
                reduction="sum",
                implementation=implementation,
            )
            return 2.0 * first + second

        return jax.grad(both)(logits * 1.0)

    expected = (
        2.0 * oracle(logits, labels).gradient
        + oracle(logits, others, loss=CrossEntropy(label_smoothing=0.1), reduction="sum").gradient
    )  # fmt: skip
    assert_close(gradient_of(logits), expected, dtype="float32")
