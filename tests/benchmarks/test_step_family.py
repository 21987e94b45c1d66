"""The step family: what it measures, and what it refuses to publish."""

import dataclasses

import jax
import numpy as np
import pytest

from benchmarks import step as family
from benchmarks.harness import QUICK
from benchmarks.shapes import STEP_GPU, StepShape
from te_jax import models

CASE = StepShape(
    short="test", depths=(1,), batch=1, sequence=32, hidden=32, mlp=48, heads=2, kv_heads=1, head_dim=16, vocab=32,
    model="test",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _as_the_peers_need_it():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("microbatches", [1, 2])
def test_all_kinds_are_measured_and_right(microbatches):
    """And the time of a layer follows from two depths."""
    case = dataclasses.replace(CASE, microbatches=microbatches, depths=(2, 1) if microbatches == 1 else (1,))
    names = ("bf16", "te_jax_delayed") if microbatches == 1 else ("bf16", "flax_fp8_scan", "te_jax_block")
    result = family.run_case(case, names, QUICK)
    assert not result.wrong
    assert not result.skipped
    found = [(row["operation"], row["implementation"]) for row in result.rows]
    operations = ("step", "step_1_layer") if microbatches == 1 else ("step",)
    assert found == [(operation, name) for operation in operations for name in names]
    for row in result.rows:
        block = 32 * (2 * 32 + 2 * 16 + 3 * 48)
        pairs = 32 * 32 // 2  # a token attends to half of them
        layers = row["layers"]
        assert row["flops"] == microbatches * 3 * (2 * 32 * (layers * block + 32 * 32) + layers * 4 * pairs * 32)
        assert row["tokens_per_second"] == pytest.approx(microbatches * 32e3 / row["median_ms"], rel=1e-3)
        assert row["losses"][2] < row["losses"][0]
        assert row["peak_bytes"] > 3 * 4 * 2 * 32 * 32
        assert ("layer_ms" in row) == (row["operation"] == "step" and microbatches == 1)
        if row["implementation"].startswith("bf16"):
            assert row["time_over_bf16"] == 1


@pytest.mark.usefixtures("native_kernels")
def test_parameters_in_bfloat16_learn_as_those_in_float32_and_logits_in_fp8_differ():
    names = ("te_jax_block_fp8_head", "te_jax_block_bf16_params", "te_jax_block_fp8_logits", "te_jax_block_fp8_moments")
    result = family.run_case(dataclasses.replace(CASE, remat=True), ("bf16", *names), QUICK)
    assert not result.wrong
    assert not result.skipped
    _, exact, rounded, logits, moments = (np.array(row["losses"]) for row in result.rows)
    np.testing.assert_allclose(rounded, exact, rtol=2e-3)
    assert rounded[0] - rounded[2] > 0.7 * (exact[0] - exact[2])  # less than half if masters begin rounded
    assert abs(logits[0] - rounded[0]) > 1e-4 * exact[0]
    np.testing.assert_allclose(moments, logits, rtol=2e-3)


def test_peers_of_whole_models_learn_alike():
    result = family.run_case(CASE, ("bf16", *family.RECOMPUTING), QUICK)
    exact, *others = (row["losses"] for row in result.rows)
    assert len(others) == 3
    np.testing.assert_allclose(others, [exact] * 3, rtol=1e-3)


@pytest.mark.usefixtures("native_kernels")
def test_experts_are_those_of_plain_jax():
    """In bfloat16 up to rounding, which chooses other experts for few tokens."""
    case = dataclasses.replace(CASE, experts=4, top_k=2)
    result = family.run_case(case, ("bf16", "te_jax", "te_jax_delayed"), QUICK)
    assert not result.wrong
    assert [row["implementation"] for row in result.rows] == ["bf16", "te_jax"]
    assert "experts have no scaling state" in result.skipped[0]["reason"]
    plain, ours = (row["losses"] for row in result.rows)
    assert ours == pytest.approx(plain, rel=0.02)
    block = 32 * (2 * 32 + 2 * 16 + 4 + 2 * 3 * 48)  # two of the experts
    assert result.rows[0]["flops"] == 3 * (2 * 32 * (block + 32 * 32) + 4 * 32 * 32 // 2 * 32)


@pytest.mark.usefixtures("native_kernels")
def test_wrong_losses_are_not_timed_and_what_does_not_run_costs_the_others_nothing(monkeypatch):
    right = models.loss

    def wrong(params, tokens, targets, config, *args, **options):
        if config.recipe is not None:
            raise RuntimeError("out of memory")
        return 1.1 * right(params, tokens, targets, config, *args, **options)

    monkeypatch.setattr(models, "loss", wrong)
    result = family.run_case(CASE, ("te_jax", "te_jax_block"), QUICK)
    assert [row["implementation"] for row in result.rows] == ["bf16"]
    assert [problem["implementation"] for problem in result.wrong] == ["te_jax"]
    assert [problem["reason"] for problem in result.skipped] == ["RuntimeError: out of memory"]


def test_shapes_of_models_have_their_parameters():
    layers = {"8b": 32, "70b": 80, "qwen3-1.7b": 28, "qwen3-30b-a3b": 48}
    sizes = {case.short: family.config_of(case, layers[case.short]).num_parameters for case in STEP_GPU}
    assert sizes["8b"] == 8_030_261_248
    assert sizes["70b"] == pytest.approx(70.6e9, rel=1e-3)
    assert sizes["qwen3-1.7b"] == pytest.approx(1.72e9 + 151_936 * 2048, rel=1e-3)  # and the second embedding
    assert sizes["qwen3-30b-a3b"] == pytest.approx(30.5e9, rel=2e-3)
