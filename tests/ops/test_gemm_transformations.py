"""Matrix products and threads, and what they do to the buffers of accumulators."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gemm_oracle import SCALINGS, assert_product, product, random_array, random_product, wide
from jax import lax

from te_jax import ops
from te_jax.hlo import buffers
from te_jax.testing import assert_close

KINDS = [*SCALINGS, "plain"]
kinds = pytest.mark.parametrize("kind", KINDS)


def draw(rng, kind, m, n, k):
    if kind == "plain":
        return random_array(rng, (*m, *k), "bfloat16"), random_array(rng, (*k, *n), "bfloat16")
    return random_product(rng, m, n, k, kind)


def stack(*trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


# --------------------------------------------------------------------------------------------------- buffers, and scan


@pytest.mark.parametrize("kind", ["row", "plain"])
@pytest.mark.parametrize("accumulate", [True, False], ids=["added", "overwritten"])
def test_accumulator_that_is_kept_is_not_copied(accumulate, kind, native_kernels, rng):
    lhs, rhs = draw(rng, kind, (256,), (512,), (128,))
    accumulator = random_array(rng, (256, 512))

    def run(lhs, rhs, accumulator):
        return ops.gemm(lhs, rhs, accumulator=accumulator, accumulate=accumulate, implementation="native")

    compiled = jax.jit(run, keep_unused=True).lower(lhs, rhs, accumulator).compile()
    assert [b for b in buffers(compiled, "copy", "copy-start") if b.bytes >= accumulator.nbytes] == []
    if jax.default_backend() == "cpu":
        assert compiled.memory_analysis().temp_size_in_bytes < accumulator.nbytes
    expected = product(lhs, rhs) + (wide(accumulator) if accumulate else 0)
    assert_product(compiled(lhs, rhs, accumulator), expected, dtype="float32", kind=kind)


@pytest.mark.parametrize("kind", ["block", "plain"])
def test_accumulation_in_a_scan_copies_nothing(kind, native_kernels, rng):
    """Weight gradients of microbatches, added up in the carry."""
    steps = [draw(rng, kind, (256,), (512,), (128,)) for _ in range(4)]
    start = random_array(rng, (256, 512))

    def run(start, steps):
        def step(total, operands):
            return ops.gemm(*operands, accumulator=total, implementation="native"), None

        return lax.scan(step, start, steps)[0]

    lhs, rhs = (stack(*side) for side in zip(*steps, strict=True))
    compiled = jax.jit(run, donate_argnums=0).lower(start, (lhs, rhs)).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == start.nbytes
    assert [b for b in buffers(compiled, "copy", "copy-start") if b.bytes >= start.nbytes] == []
    expected = wide(start) + sum(product(*operands) for operands in steps)
    assert_product(compiled(start, (lhs, rhs)), expected, dtype="float32", kind=kind)


def test_accumulator_that_is_used_again_keeps_its_values(native_kernels, rng):
    lhs, rhs = random_product(rng, (16,), (32,), (16,), "tensor")
    start = random_array(rng, (16, 32))

    @functools.partial(jax.jit, donate_argnums=0)
    def run(start):
        doubled = 2 * start
        return ops.gemm(lhs, rhs, accumulator=doubled, implementation="native"), doubled

    expected = 2 * wide(start)
    total, doubled = run(start)
    assert_close(doubled, expected, dtype="float32")
    assert_product(total, expected + product(lhs, rhs), dtype="float32")


# -------------------------------------------------------------------------------------------------------- threads, bits


@kinds
def test_repeated_runs_give_the_same_bits(kind, implementation, rng):
    lhs, rhs = draw(rng, kind, (200,), (304,), (1072,))
    if kind == "plain":
        lhs, rhs = lhs.astype("float32"), rhs.astype("float32")
    run = jax.jit(functools.partial(ops.gemm, out_dtype="float32", implementation=implementation))
    assert len({np.asarray(run(lhs, rhs)).tobytes() for _ in range(5)}) == 1


def test_many_threads_at_once(native_kernels, rng):
    """Handlers share the BLAS and the scratch memory; each gets its own result."""
    cases = [random_product(rng, (64 * (i + 1),), (48,), (160,), "row") for i in range(4)]
    expected = [product(*case) for case in cases]
    run = jax.jit(lambda lhs, rhs: ops.gemm(lhs, rhs, out_dtype="float32", implementation="native"))
    failures = []

    def work(i):
        try:
            for _ in range(10):
                assert_product(run(*cases[i % 4]), expected[i % 4], dtype="float32")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
