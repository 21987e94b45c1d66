"""What the compiled program does to the logits: no float32 copy of them, and no copy that is not needed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cross_entropy_oracle import oracle, random_case

from te_jax import ops
from te_jax.hlo import buffers
from te_jax.ops import CrossEntropy
from te_jax.testing import assert_close

pytestmark = pytest.mark.usefixtures("native_kernels")

ROWS, VOCAB = 64, 2048


@pytest.fixture
def case(rng):
    return random_case(rng, (ROWS, VOCAB), "bfloat16", ignored=0.1)


def gradient(logits, labels):
    return jax.grad(ops.softmax_cross_entropy)(
        logits, labels, loss=CrossEntropy(label_smoothing=0.1, z_loss=1e-3), implementation="native"
    )


def large(program, *operations):
    """Arrays of the logits' size."""
    return [buffer for buffer in buffers(program, *operations) if buffer.elements >= ROWS * VOCAB]


def copies(program):
    fused = [line for line in program.as_text().splitlines() if "copy" in line.split("=")[0]]
    names = [line for line in fused if f"[{ROWS},{VOCAB}]" in line.split("=")[1].split("(")[0]]
    return large(program, "copy", "copy-start") + names


def test_no_float32_array_of_the_logits_size(case):
    compiled = jax.jit(gradient).lower(*case).compile()
    assert {buffer.dtype for buffer in large(compiled)} == {"bf16"}


def test_the_check_sees_the_references_float32_arrays(case):
    compiled = jax.jit(lambda *a: jax.grad(ops.softmax_cross_entropy)(*a, implementation="reference")).lower(*case)
    assert "f32" in {buffer.dtype for buffer in large(compiled.compile())}


def test_logits_that_are_kept_are_not_copied(case):
    compiled = jax.jit(gradient).lower(*case).compile()
    assert copies(compiled) == []
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 0
    assert memory.temp_size_in_bytes < 0.05 * case[0].nbytes
    before = np.array(case[0])
    result = compiled(*case)
    assert result.unsafe_buffer_pointer() != case[0].unsafe_buffer_pointer()
    np.testing.assert_array_equal(case[0], before)


def test_donated_logits_become_the_gradient(case):
    expected = oracle(*case, loss=CrossEntropy(label_smoothing=0.1, z_loss=1e-3)).gradient
    logits = case[0] + jnp.bfloat16(0)
    pointer, size = logits.unsafe_buffer_pointer(), logits.nbytes
    compiled = jax.jit(gradient, donate_argnums=0).lower(logits, case[1]).compile()
    assert copies(compiled) == []
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < 0.05 * size
    result = compiled(logits, case[1])
    assert logits.is_deleted()
    assert result.unsafe_buffer_pointer() == pointer
    assert_close(result, expected, dtype="bfloat16")


def projected(hidden, weights, labels):
    logits = hidden @ weights
    return ops.softmax_cross_entropy(logits, labels, implementation="native")

    # No memory figure: XLA's CPU matrix products make float32 copies of bfloat16 operands, and on a GPU the workspace
    # of such a product is larger than these logits; tests/gpu measures large ones.


def test_float32_intermediate_logits_take_one_buffer(rng):
    hidden = jax.device_put(np.asarray(rng.standard_normal((ROWS, 16)), jnp.float32))
    weights = jax.device_put(np.asarray(rng.standard_normal((16, VOCAB)), jnp.float32))
    labels = jax.device_put(np.asarray(rng.integers(0, VOCAB, ROWS), jnp.int32))

    def step(hidden, weights, labels):
        return jax.value_and_grad(projected)(hidden, weights, labels)

    compiled = jax.jit(step).lower(hidden, weights, labels).compile()
    assert copies(compiled) == []
    if jax.default_backend() == "cpu":
        assert compiled.memory_analysis().temp_size_in_bytes < 1.1 * 4 * ROWS * VOCAB + weights.nbytes
    value, to_hidden = compiled(hidden, weights, labels)
    expected = oracle(np.asarray(hidden, np.float64) @ np.asarray(weights, np.float64), labels)
    assert_close(value, expected.loss, dtype="float32")
    assert_close(to_hidden, expected.gradient @ np.asarray(weights, np.float64).T, dtype="float32")


def test_logits_that_are_read_again_survive_their_gradient(rng):
    """XLA has to copy here, and must not be kept from it."""
    logits, labels = random_case(rng, (8, 64), "float32")

    @jax.jit
    def run(x):
        logits = jnp.sin(x)
        return gradient(logits, labels), jnp.flip(logits, 0)

    result, flipped = run(logits)
    assert_close(flipped, np.sin(np.asarray(logits, np.float64))[::-1], dtype="float32")
    assert_close(
        result,
        oracle(np.sin(np.asarray(logits, np.float64)), labels, CrossEntropy(label_smoothing=0.1, z_loss=1e-3)).gradient,
        dtype="float32",
    )


def test_residuals_are_the_logits_and_two_numbers_a_row(case):
    logits, labels = case
    _, vjp = jax.vjp(lambda x: ops.softmax_cross_entropy(x, labels, implementation="native"), logits)
    sizes = sorted((leaf.nbytes for leaf in jax.tree.leaves(vjp) if hasattr(leaf, "nbytes")), reverse=True)
    assert sizes[0] == logits.nbytes
    assert 4 * ROWS <= sum(sizes[1:]) <= 16 * ROWS
