"""The family of experts: what it measures, and what it refuses to publish."""

import dataclasses

import pytest

from benchmarks import moe as family
from benchmarks.harness import QUICK
from benchmarks.shapes import ExpertsShape
from te_jax import ops

PRODUCTS = ExpertsShape(
    ("forward", "dgrad", "wgrad"), experts=4, tokens=96, top_k=1, hidden=64, mlp=48, load="zipf", model="test"
)
LAYER = dataclasses.replace(PRODUCTS, operations=("layer", "permute", "permute_quantize"), top_k=2, load="balanced")

pytestmark = pytest.mark.usefixtures("native_kernels")


def test_products_are_measured_and_right():
    result = family.run_case(PRODUCTS, family.IMPLEMENTATIONS, QUICK)
    assert not result.wrong
    assert not result.skipped
    measured = [(row["operation"], row["implementation"]) for row in result.rows]
    names = ("te_jax_block", "te_jax", "ragged_dot")
    assert measured == [(operation, name) for operation in PRODUCTS.operations for name in names]
    for row in result.rows:
        assert row["flops"] == 2 * 96 * 64 * 48  # not those of the 4 × 128 rows in FP8
        assert (row["error"] < 0.01) == (row["implementation"] != "te_jax_block")


def test_a_layer_and_its_permutation_are_measured_and_right():
    result = family.run_case(LAYER, family.IMPLEMENTATIONS, QUICK)
    assert not result.wrong
    assert not result.skipped
    rows = {(row["operation"], row["implementation"]): row for row in result.rows}
    assert set(rows) == {
        *(("layer", name) for name in ("te_jax_block", "te_jax_block_once", "te_jax", "ragged_dot")),
        *(("permute", name) for name in ("te_jax", "jnp", "copy")),
        *(("permute_quantize", name) for name in ("te_jax_block", "copy")),
    }
    assert rows["layer", "te_jax"]["flops"] == 18 * 192 * 64 * 48
    assert rows["layer", "ragged_dot"]["kept_over_least"] > rows["layer", "te_jax"]["kept_over_least"] > 1
    # x and 640 rows: 192 choices of 4 experts, and up to 127 more for each, in whole blocks of 128.
    assert rows["permute", "te_jax"]["bytes"] == 2 * 64 * (96 + 640)


def test_a_layer_keeps_x_and_what_is_before_the_activation():
    """Beside these, 4 bytes for the logit of each expert, and 16 for each choice."""
    case = ExpertsShape(("layer",), 64, 1024, 8, hidden=2048, mlp=1024, load="balanced", model="test")
    least = 2 * 2048 + 4 * 8 * 1024
    for name in ("te_jax", "te_jax_block"):
        assert least <= family.kept_bytes(name, case) <= least + 4 * 64 + 16 * 8


@pytest.mark.parametrize(("load", "last"), [("balanced", 24), ("zipf", 12), ("one_hot", 0)])
def test_loads_have_all_rows(load, last):
    sizes = family._sizes(dataclasses.replace(PRODUCTS, load=load))
    assert sizes.sum() == PRODUCTS.rows
    assert sizes[-1] == pytest.approx(last, abs=1)


def test_wrong_results_are_not_timed(monkeypatch):
    right = ops.grouped_gemm
    monkeypatch.setattr(ops, "grouped_gemm", lambda *operands, **options: 1.5 * right(*operands, **options))
    result = family.run_case(dataclasses.replace(PRODUCTS, operations=("forward",)), ("te_jax", "ragged_dot"), QUICK)
    assert [row["implementation"] for row in result.rows] == ["ragged_dot"]
    assert [problem["implementation"] for problem in result.wrong] == ["te_jax"]
