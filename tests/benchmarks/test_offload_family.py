"""The offload family: what it measures, and what it refuses to publish."""

import jax
import pytest

from benchmarks import offload as family
from benchmarks.harness import QUICK
from benchmarks.shapes import OffloadShape
from te_jax import optim

CASE = OffloadShape(("input", "hidden", "optimizer"), layers=3, tokens=128, hidden=64, mlp=128, kernels=2, model="test")


@pytest.mark.usefixtures("native_kernels")
def test_all_kinds_are_measured_and_right(monkeypatch):
    monkeypatch.setattr(optim, "offload", lambda optimizer, offload=optim.offload: offload(optimizer, min_size=0))
    with jax.numpy_dtype_promotion("standard"):
        result = family.run_case(CASE, family.IMPLEMENTATIONS, QUICK)
    assert not result.wrong
    assert not result.skipped
    found = [(row["operation"], row["implementation"]) for row in result.rows]
    assert found == [(operation, name) for operation, names in family.OF_OPERATION.items() for name in names]
    for row in result.rows:
        first = family.OF_OPERATION[row["operation"]][0]
        assert (row[f"time_over_{first}"] == 1) == (row["implementation"] == first)
        assert (row["difference"] > 1e-4) == (row["implementation"] == "te_jax_fp8")
    assert result.rows[-1]["host_gb"] == pytest.approx(2 * 8 * 64 * 128 / 1e9, rel=1e-3)


def test_another_result_is_not_timed(monkeypatch):
    adamw = optim.adamw
    monkeypatch.setattr(optim, "offload", lambda optimizer: adamw(2e-3))
    case = OffloadShape(("optimizer",), layers=1, tokens=8, hidden=64, mlp=128, kernels=2, model="test")
    with jax.numpy_dtype_promotion("standard"):
        result = family.run_case(case, ("device", "te_jax"), QUICK)
    assert [row["implementation"] for row in result.rows] == ["device"]
    assert [problem["implementation"] for problem in result.wrong] == ["te_jax"]
