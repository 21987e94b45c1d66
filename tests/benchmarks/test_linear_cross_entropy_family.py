"""The family of linear_cross_entropy: what it measures, and what it refuses to publish."""

import dataclasses

import pytest

from benchmarks import linear_cross_entropy as family
from benchmarks.harness import QUICK
from benchmarks.shapes import HeadShape
from te_jax import ops

CASE = HeadShape(tokens=256, hidden=128, vocab=1024, operations=("master", "bf16", "trained"), model="test")
MEASURED = [name for name in family.IMPLEMENTATIONS if name != "liger"]  # which needs a GPU


@pytest.mark.usefixtures("native_kernels")
def test_all_implementations_are_measured_and_right():
    result = family.run_case(CASE, family.IMPLEMENTATIONS, QUICK)
    assert not result.wrong
    assert not result.skipped
    found = [(row["operation"], row["implementation"]) for row in result.rows]
    assert found == [(operation, name) for operation in CASE.operations for name in MEASURED]
    for row in result.rows:
        assert row["flops"] == 6 * 256 * 128 * 1024
        assert ("time_over_full_logits" in row) == (row["implementation"] != "full_logits")
        bound = 0.1 if "fp8" in row["implementation"] else 0.006
        assert max(row["loss_error"], row["dx_error"], row["dkernel_error"]) < bound


def test_trained_hidden_states_know_their_labels():
    random, trained = (family._exact(family._drawn(CASE, trained=trained)) for trained in (False, True))
    assert 7 < random.loss < 8  # log(1024) + 0.5
    assert 1 < trained.loss < 3


@pytest.mark.usefixtures("native_kernels")
def test_where_full_logits_do_not_fit_they_are_left_out():
    case = dataclasses.replace(CASE, operations=("master",), full_logits=False)
    result = family.run_case(case, ("te_jax", *family.PEERS), QUICK)
    assert not result.skipped
    assert [row["implementation"] for row in result.rows] == ["te_jax", "maxtext_tiling"]


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("operation", ["master", "bf16"])
def test_wrong_results_are_not_timed(monkeypatch, operation):
    right = ops.linear_cross_entropy

    def wrong(x, kernel, labels, **options):
        return right(x, kernel, labels, **options, label_smoothing=0.5)

    monkeypatch.setattr(ops, "linear_cross_entropy", wrong)
    case = dataclasses.replace(CASE, operations=(operation,))
    result = family.run_case(case, ("te_jax", "te_jax_fp8_backward", "full_logits"), QUICK)
    assert [row["implementation"] for row in result.rows] == ["full_logits"]
    assert [problem["implementation"] for problem in result.wrong] == ["te_jax", "te_jax_fp8_backward"]
