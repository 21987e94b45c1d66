"""The norm family: what it measures, and what it refuses to publish."""

import jax.numpy as jnp
import pytest

from benchmarks import norm as family
from benchmarks.harness import QUICK
from benchmarks.shapes import MatrixShape
from te_jax import ops

CASE = MatrixShape(rows=128, cols=256, dtype="bfloat16", model="test")
BYTES = {"rows": 3, "both": 4, "residual_rows": 7, "residual_both": 8, "current_both": 6, "backward": 8}


@pytest.mark.usefixtures("native_kernels")
def test_operations_are_measured_and_right(monkeypatch):
    few = {name: family.OPERATIONS[name] for name in ("rows", "residual_both", "current_both")}
    monkeypatch.setattr(family, "OPERATIONS", few)
    result = family.run_case(CASE, family.IMPLEMENTATIONS, QUICK)
    assert not result.wrong
    assert not result.skipped
    found = {(row["operation"], row["implementation"]): row["bytes"] for row in result.rows}
    assert found == {
        (operation, name): BYTES[operation] * 128 * 256
        for operation in (*few, "backward")
        for name in family.IMPLEMENTATIONS
    }


def test_bytes_that_every_operation_must_move():
    assert {name: 2 * each.wide + each.codes for name, each in family.OPERATIONS.items()} | {"backward": 8} == BYTES


@pytest.mark.usefixtures("native_kernels")
def test_wrong_results_are_not_timed(monkeypatch):
    right = ops.rms_norm

    def wrong(x, scale, **options):
        return right(x, scale * jnp.float32(1.1), **options)

    monkeypatch.setattr(ops, "rms_norm", wrong)
    monkeypatch.setattr(family, "OPERATIONS", {"residual_both": family.OPERATIONS["residual_both"]})
    result = family.run_case(CASE, ("te_jax", "copy"), QUICK)
    assert {row["implementation"] for row in result.rows} == {"copy"}
    assert {problem["operation"] for problem in result.wrong} == {"residual_both", "backward"}
