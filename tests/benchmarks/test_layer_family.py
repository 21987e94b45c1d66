"""The layer family: what it measures, and what it refuses to publish."""

import jax
import pytest

from benchmarks import layer as family
from benchmarks.harness import QUICK
from benchmarks.shapes import LayerShape
from te_jax import ops

CASE = LayerShape(
    batch=1, sequence=128, hidden=128, mlp=256, heads=8, kv_heads=4, head_dim=16, operations=("mlp",), model="test"
)


@pytest.mark.usefixtures("native_kernels")
def test_all_implementations_are_measured_and_right():
    result = family.run_case(CASE, family.IMPLEMENTATIONS, QUICK)
    assert not result.wrong
    assert not result.skipped
    assert [row["implementation"] for row in result.rows] == list(family.IMPLEMENTATIONS)
    for row in result.rows:
        assert row["flops"] == 3 * 2 * 128 * 3 * 128 * 256
        exact = row["implementation"] in ("bf16", "te_jax")
        assert (row["y_error"] < 0.01) == exact


@pytest.mark.usefixtures("native_kernels")
def test_a_block_is_right_in_fp8():
    block = LayerShape(**{**vars(CASE), "batch": 2, "operations": ("block",)})
    with jax.numpy_dtype_promotion("standard"):  # as jax.nn.dot_product_attention needs it
        result = family.run_case(block, ("te_jax_block_once",), QUICK)
    assert not result.skipped
    assert [row["implementation"] for row in result.rows] == ["bf16", "te_jax_block_once"]


@pytest.mark.usefixtures("native_kernels")
def test_wrong_results_are_not_timed(monkeypatch):
    right = ops.gated_mlp
    monkeypatch.setattr(ops, "gated_mlp", lambda x, **options: 1.5 * right(x, **options))
    result = family.run_case(CASE, ("te_jax_block",), QUICK)
    assert [row["implementation"] for row in result.rows] == ["bf16"]
    assert [problem["implementation"] for problem in result.wrong] == ["te_jax_block"]
