"""What only a GPU shows of softmax cross-entropy: clusters, CUDA graphs, 64-bit indices, memory, several devices."""

import os
import threading

import cuda_graphs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax import ops
from te_jax.hlo import buffers
from te_jax.testing import assert_close

pytestmark = pytest.mark.gpu


def loss_and_gradient(logits, labels, **options):
    return jax.value_and_grad(ops.softmax_cross_entropy)(logits, labels, implementation="native", **options)


def draw(rng, rows, vocab, dtype="bfloat16"):
    """Logits made on the device, as they are too many for the host's generator."""
    key = jax.random.key(int(rng.integers(2**31)))
    labels = jnp.asarray(rng.integers(0, vocab, rows), jnp.int32)
    return 2 * jax.random.normal(key, (rows, vocab), dtype), labels


def expected_row(row, label, smoothing=0.0):
    """Loss and gradient of one row in float64."""
    z = np.asarray(row).astype(np.float64)
    lse = np.log(np.exp(z - z.max()).sum()) + z.max()
    gradient = np.exp(z - lse) - smoothing / z.size
    gradient[label] -= 1 - smoothing
    return lse - (1 - smoothing) * z[label] - smoothing * z.mean(), gradient


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2, 7, 133])
@pytest.mark.parametrize("vocab", [262144, 128256, 151937, 50257])
def test_few_rows_of_a_large_vocabulary(vocab, rows, dtype, rng):
    """Rows are spread over clusters of thread blocks; odd vocabularies start rows at every alignment."""
    logits, labels = draw(rng, rows, vocab, dtype)
    losses, vjp = jax.vjp(
        lambda x: ops.softmax_cross_entropy(
            x, labels, loss=ops.CrossEntropy(label_smoothing=0.1), reduction="none", implementation="native"
        ),
        logits,
    )  # fmt: skip
    weights = jnp.asarray(rng.uniform(0.5, 2.0, rows), jnp.float32)
    (gradient,) = vjp(weights)
    for row in {0, rows // 2, rows - 1}:
        loss, slope = expected_row(logits[row], int(labels[row]), smoothing=0.1)
        assert_close(losses[row], loss, dtype="float32")
        assert_close(gradient[row], float(weights[row]) * slope, dtype=dtype)


@pytest.mark.parametrize("vocab", [262144, 50257, 257])
@pytest.mark.parametrize("softcap", [1e8, 1e20])
def test_large_softcaps(softcap, vocab, rng):
    """The last digit of a logit is more than 1: no thread may subtract the maximum from a product not yet rounded."""
    logits, labels = draw(rng, 7, vocab, "float32")
    logits = logits * (softcap / 8)
    # One random row in thirty has two equal maxima, and log 2 is less than the last digit of lse there.
    logits = logits.at[jnp.arange(7), jnp.argmax(logits, axis=-1)].multiply(1.01)

    def losses(x):
        return ops.softmax_cross_entropy(
            x, labels, loss=ops.CrossEntropy(logit_softcap=softcap), reduction="none", implementation="native"
        )  # fmt: skip

    found, vjp = jax.vjp(losses, logits)
    (gradient,) = vjp(jnp.ones(7))
    for row in range(7):
        tanh = np.tanh(np.asarray(logits[row]).astype(np.float64) / softcap)
        loss, slope = expected_row(softcap * tanh, int(labels[row]))
        assert_close(found[row], loss, dtype="float32")
        assert_close(gradient[row], slope * (1 - tanh**2), dtype="float32", tolerance=1e-4)


@pytest.mark.parametrize("rows_and_vocab", [(70000, 32768), (16400, 131072 + 8), (8200, 262144 + 1)], ids=str)
def test_more_logits_than_32_bits_count(rows_and_vocab, rng):
    rows, vocab = rows_and_vocab
    assert rows * vocab > 2**31
    logits, labels = draw(rng, rows, vocab)
    sampled = [0, 1, rows // 2, 2**31 // vocab - 1, 2**31 // vocab, 2**31 // vocab + 1, rows - 2, rows - 1]
    kept = np.asarray(logits[jnp.asarray(sampled)])

    def per_row(logits, labels, weights):
        losses, vjp = jax.vjp(
            lambda x: ops.softmax_cross_entropy(x, labels, reduction="none", implementation="native"), logits
        )
        return losses, vjp(weights)[0]

    weights = jnp.asarray(rng.uniform(0.5, 2.0, rows), jnp.float32)
    losses, gradient = jax.jit(per_row, donate_argnums=0)(logits, labels, weights)
    assert logits.is_deleted()
    for row, values in zip(sampled, kept, strict=True):
        loss, slope = expected_row(values, int(labels[row]))
        assert_close(losses[row], loss, dtype="float32")
        assert_close(gradient[row], float(weights[row]) * slope, dtype="bfloat16")
    # Each row of the gradient sums to zero: no row was left out.
    sums = jax.jit(lambda g: jnp.max(jnp.abs(jnp.sum(g, axis=1, dtype=jnp.float32))))(gradient)
    assert sums < 0.05


def test_gradient_is_written_in_place(rng):
    rows, vocab = 16384, 32768  # large beside the 32 MiB that a matrix product takes as its workspace
    labels = jnp.asarray(rng.integers(0, vocab, rows), jnp.int32)
    hidden = jax.random.normal(jax.random.key(0), (rows, 128), jnp.bfloat16)
    weights = jax.random.normal(jax.random.key(1), (128, vocab), jnp.bfloat16)

    def loss(weights):
        return ops.softmax_cross_entropy(hidden @ weights, labels, implementation="native")

    size = 2 * rows * vocab
    compiled = jax.jit(jax.value_and_grad(loss)).lower(weights).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 1.05 * size
    assert not [b for b in buffers(compiled, "copy", "copy-start") if b.bytes >= size]
    assert not [b for b in buffers(compiled) if b.dtype == "f32" and b.elements >= rows * vocab]

    logits = hidden @ weights
    kept = jax.jit(loss_and_gradient).lower(logits, labels).compile()
    assert kept.memory_analysis().temp_size_in_bytes <= 0.05 * size
    donated = jax.jit(loss_and_gradient, donate_argnums=0).lower(logits, labels).compile()
    assert donated.memory_analysis().alias_size_in_bytes >= size
    assert donated.memory_analysis().temp_size_in_bytes <= 0.05 * size
    pointer = logits.unsafe_buffer_pointer()
    _, gradient = donated(logits, labels)
    assert gradient.unsafe_buffer_pointer() == pointer


_HASHES = """
    import hashlib, json
    import jax, jax.numpy as jnp, numpy as np
    from te_jax import ops

    def run(rows, vocab, dtype, seed):
        rng = np.random.default_rng(seed)
        logits = jnp.asarray(rng.standard_normal((rows, vocab), np.float32)).astype(dtype)
        labels = jnp.asarray(rng.integers(0, vocab, rows), jnp.int32)

        @jax.jit
        def steps(logits):  # several launches in a row, so that XLA has something to put into a graph
            for _ in range(4):
                loss, gradient = jax.value_and_grad(ops.softmax_cross_entropy)(
                    logits, labels, loss=ops.CrossEntropy(label_smoothing=0.1), implementation="native"
                )
                logits = logits - (8 * gradient).astype(logits.dtype)
            return loss, logits

        digest = hashlib.sha256()
        for _ in range(5):  # a graph is captured, and then replayed and updated
            loss, logits = steps(logits)
            digest.update(np.asarray(loss).tobytes() + np.asarray(logits).tobytes())
        return digest.hexdigest()

    print(json.dumps([run(*case) for case in {cases}]))
"""


def test_cuda_graphs_do_not_change_a_bit():
    """With command buffers that take custom calls, with the default, and with none: the same losses and gradients."""
    seed = int.from_bytes(os.urandom(4), "little")
    cases = [(64, 512, "float32", seed), (3, 100003, "bfloat16", seed), (16, 33000, "bfloat16", seed)]
    digests = cuda_graphs.outputs(_HASHES.format(cases=cases))
    assert len(set(digests.values())) == 1, (seed, digests)


def test_repeated_runs_give_the_same_bits(rng):
    """Also while another stream of work keeps the GPU busy, and thread blocks come in another order."""
    for rows, vocab in ((5, 262144), (512, 32003), (20000, 64)):
        logits, labels = draw(rng, rows, vocab)
        run = jax.jit(lambda *a: loss_and_gradient(*a, loss=ops.CrossEntropy(label_smoothing=0.1, z_loss=1e-3)))
        first = [np.asarray(x).tobytes() for x in run(logits, labels)]
        for _ in range(20):
            assert [np.asarray(x).tobytes() for x in run(logits, labels)] == first


def test_devices_driven_by_their_own_threads(require_devices, rng):
    require_devices(2)
    logits, labels = draw(rng, 64, 128256)
    run = jax.jit(loss_and_gradient)
    expected = [np.asarray(x).tobytes() for x in run(logits, labels)]
    results, failures = {}, []

    def drive(device):
        try:
            local = jax.device_put((logits, labels), device)
            for _ in range(10):
                results[device] = [np.asarray(x).tobytes() for x in run(*local)]
                assert results[device] == expected
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=drive, args=(device,)) for device in jax.devices()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(results) == jax.device_count()
