"""The linear layer family: its float64 rows, its error bounds, and what it refuses to publish."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import dense as family
from benchmarks.harness import QUICK, screen_table
from benchmarks.shapes import GemmShape
from te_jax import native, ops

CASE = GemmShape(m=96, n=128, k=256, model="test")


def by_name(result, operation):
    return {row["implementation"]: row for row in result.rows if row["operation"] == operation}


def test_both_operations_of_every_recipe_are_measured_and_within_their_bounds():
    names = (
        "te_jax_current",
        "te_jax_current_split",
        "te_jax_delayed_once",
        "te_jax_block",
        "te_jax_block_once",
        "jnp",
    )
    result = family.run_case(CASE, names, QUICK)
    assert not result.wrong
    measured = set(names) if native.available() else {"jnp"}
    assert set(by_name(result, "forward")) == measured - {"te_jax_current_split"}  # only gradients differ
    assert set(by_name(result, "forward_backward")) == measured
    for row in result.rows:
        backward = row["operation"] == "forward_backward"
        assert row["flops"] == (6 if backward else 2) * 96 * 128 * 256
        assert {key for key in row if key.endswith("_error")} == (
            {"y_error", "dx_error", "dkernel_error"} if backward else {"y_error"}
        )
        assert 0 < row["y_error"] < (0.01 if row["implementation"] == "jnp" else 0.045)
        assert set(row["speedup_over"]) == {"jnp"} - {row["implementation"]}
    assert "TFLOP/s" in screen_table(result.rows)


def test_exact_rows():
    inputs = family._inputs(CASE)
    exact = family._exact(inputs)
    x, kernel, dy = (np.asarray(a).astype(np.float64) for a in (inputs.x, inputs.kernel, inputs.dy))
    np.testing.assert_allclose(exact.y, (x @ kernel)[exact.tokens], rtol=1e-12, atol=1e-9)
    np.testing.assert_allclose(exact.dx, (dy @ kernel.T)[exact.tokens], rtol=1e-12, atol=1e-9)
    np.testing.assert_allclose(exact.dkernel, (x.T @ dy)[exact.features], rtol=1e-12, atol=1e-9)
    assert len(exact.tokens) == len(exact.features) == 64


@pytest.mark.parametrize("spoil", [lambda y: y * 1.1, lambda y: y * jnp.nan])
def test_a_wrong_result_is_not_timed(spoil, monkeypatch):
    right = ops.dense

    def spoilt(*operands, implementation=None, **options):
        del implementation
        return spoil(right(*operands, implementation="reference", **options))

    monkeypatch.setattr(ops, "dense", spoilt)
    result = family.run_case(CASE, ("te_jax_current", "jnp"), QUICK)
    assert {row["implementation"] for row in result.rows} == {"jnp"}
    assert {problem["implementation"] for problem in result.wrong} == {"te_jax_current"}
    assert all("y is wrong" in problem["reason"] for problem in result.wrong)


def test_a_wrong_gradient_is_not_timed(monkeypatch):
    right = ops.dense

    def spoilt(x, kernel, implementation=None, **options):
        del implementation
        y = right(x, kernel, implementation="reference", **options)
        return y * 1.1 - jax.lax.stop_gradient(y) * 0.1

    monkeypatch.setattr(ops, "dense", spoilt)
    result = family.run_case(CASE, ("te_jax_current", "jnp"), QUICK)
    assert "te_jax_current" in by_name(result, "forward")
    assert "te_jax_current" not in by_name(result, "forward_backward")
    assert any("is wrong" in problem["reason"] for problem in result.wrong)


def test_the_reference_is_not_published_as_the_native_kernel(monkeypatch):
    def only_reference(*_, implementation=None, **__):
        assert implementation == "native"
        raise native.NativeUnavailableError("the kernels are not loaded")

    monkeypatch.setattr(ops, "dense", only_reference)
    result = family.run_case(CASE, ("te_jax_current", "te_jax_block", "jnp"), QUICK)
    assert {row["implementation"] for row in result.rows} == {"jnp"}
    assert all("the kernels are not loaded" in problem["reason"] for problem in result.skipped)
