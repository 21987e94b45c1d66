"""The cross-entropy family: its float64 oracle, its error bounds, and what it refuses to publish."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import softmax_cross_entropy as family
from benchmarks.harness import QUICK
from benchmarks.shapes import LogitsShape
from te_jax import native, ops

CASE = LogitsShape(rows=96, vocab=384, dtype="bfloat16", model="test")


def by_name(result, operation):
    return {row["implementation"]: row for row in result.rows if row["operation"] == operation}


def test_both_operations_are_measured_and_within_their_bounds():
    result = family.run_case(CASE, ("te_jax", "te_jax_donated", "jnp", "optax", "copy"), QUICK)
    assert not result.wrong
    expected = {"jnp", "optax", "copy"} | ({"te_jax"} if native.available() else set())
    assert set(by_name(result, "forward")) == expected
    expected |= {"te_jax_donated"} if native.available() else set()
    assert set(by_name(result, "forward_backward")) == expected
    for row in by_name(result, "forward_backward").values():
        if row["implementation"] != "copy":
            assert row["gradient_error"] < 1e-2
            assert row["bytes"] == 3 * 96 * 384 * 2
            assert set(row["speedup_over"]) == {"jnp", "optax"} - {row["implementation"]}


def test_the_oracle_agrees_with_central_differences():
    rng = np.random.default_rng()
    logits = rng.normal(size=(5, 7)).astype(np.float32)
    labels = rng.integers(0, 7, 5).astype(np.int32)

    def mean_loss(z):
        p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
        return -np.mean(np.log(p[np.arange(5), labels]))

    exact = family._exact(logits, labels)
    assert exact.loss == pytest.approx(mean_loss(logits.astype(np.float64)), rel=1e-12)
    assert list(exact.rows) == list(range(5))
    for row in range(5):
        for column in range(7):
            step = np.zeros((5, 7))
            step[row, column] = 1e-5
            wide = logits.astype(np.float64)
            slope = (mean_loss(wide + step) - mean_loss(wide - step)) / 2e-5
            assert exact.gradient[row, column] == pytest.approx(slope, abs=1e-9)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda loss: loss * jnp.nan, "the loss is wrong"),
        # Right loss, wrong gradient.
        (lambda loss: loss * 1.05 - jax.lax.stop_gradient(loss) * 0.05, "the gradient is wrong"),
    ],
)
def test_a_wrong_result_is_not_timed(spoil, reason, monkeypatch):
    right = ops.softmax_cross_entropy
    monkeypatch.setattr(ops, "softmax_cross_entropy", lambda *args, **kwargs: spoil(right(*args, **kwargs)))
    result = family.run_case(CASE, ("jnp", "optax", "copy"), QUICK)
    assert "jnp" not in by_name(result, "forward_backward")
    assert {"optax", "copy"} <= set(by_name(result, "forward_backward"))
    assert any(problem["implementation"] == "jnp" and reason in problem["reason"] for problem in result.wrong)


def test_the_reference_is_not_published_as_the_native_kernel(monkeypatch):
    def only_reference(logits, labels, *, implementation=None):
        if implementation == "native":
            raise native.NativeUnavailableError("the kernels are not loaded")
        return jnp.mean(logits.astype(jnp.float32))

    monkeypatch.setattr(ops, "softmax_cross_entropy", only_reference)
    result = family.run_case(CASE, ("te_jax", "te_jax_donated", "copy"), QUICK)
    assert {row["implementation"] for row in result.rows} == {"copy"}
    assert {(problem["operation"], problem["implementation"]) for problem in result.skipped} == {
        ("forward", "te_jax"),
        ("forward_backward", "te_jax"),
        ("forward_backward", "te_jax_donated"),
    }
    assert all("the kernels are not loaded" in problem["reason"] for problem in result.skipped)


def test_inputs_are_random_and_labels_within_the_vocabulary():
    logits, labels = family._inputs(CASE)
    values = np.asarray(logits, np.float32)
    assert logits.dtype == jnp.bfloat16
    assert values.std() == pytest.approx(1, abs=0.05)
    assert np.all((np.asarray(labels) >= 0) & (np.asarray(labels) < CASE.vocab))


def test_small_logits_rotate_through_more_memory_than_caches_hold():
    assert family._buffers_for(2 * 2**30) == 1
    assert family._buffers_for(64 * 2**20) * 64 * 2**20 >= 256 * 2**20
    assert family._buffers_for(1) == family._MOST_BUFFERS
