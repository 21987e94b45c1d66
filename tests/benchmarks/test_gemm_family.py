"""The matrix product family: its float64 rows, its error bound, and what it refuses to publish."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import gemm as family
from benchmarks.harness import QUICK, screen_table
from benchmarks.shapes import GemmShape
from te_jax import native, ops

CASE = GemmShape(m=96, n=128, k=256, model="test")
PRODUCTS = ("te_jax_tensor_split", "te_jax_row", "te_jax_block", "jnp")


def by_name(result, operation):
    return {row["implementation"]: row for row in result.rows if row["operation"] == operation}


def test_both_operations_are_measured_and_within_their_bound():
    result = family.run_case(CASE, PRODUCTS, QUICK)
    assert not result.wrong
    kernels = set(PRODUCTS) - {"jnp"} if native.available() else set()
    assert set(by_name(result, "forward")) == kernels | {"jnp"}
    assert set(by_name(result, "accumulate")) == (kernels | {"jnp"}) - {
        "te_jax_row"
    }  # fast sums, unlike weight gradients
    for row in result.rows:
        assert 0 < row["error"] < family.ERROR_BOUND
        assert row["flops"] == 2 * 96 * 128 * 256
        assert row["tflops"] == pytest.approx(row["flops"] / row["median_ms"] / 1e9, rel=1e-3)
        assert set(row["speedup_over"]) == {"jnp"} - {row["implementation"]}
    assert "TFLOP/s" in screen_table(result.rows)
    assert "× copy" not in screen_table(result.rows)


def test_several_products_are_measured_forward():
    result = family.run_case(dataclasses.replace(CASE, products=3), PRODUCTS, QUICK)
    assert not result.wrong
    assert {row["operation"] for row in result.rows} == {"forward"}
    assert set(by_name(result, "forward")) == (set(PRODUCTS) if native.available() else {"jnp"})
    for row in result.rows:
        assert row["case"] == "3x96x128x256"
        assert row["flops"] == 3 * 2 * 96 * 128 * 256


def test_products_are_measured_after_rests_on_a_gpu(monkeypatch):
    """On any backend that says it is one."""
    monkeypatch.setattr(family.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(family, "_applies", lambda name, operation: name == "jnp")
    timings = []

    def measure(candidates, timing, *, pipelined):
        timings.append(timing)
        seconds = 1e-6 if timing.rest_seconds else 2e-6
        return {each.name: [seconds] for each in candidates}, {}

    monkeypatch.setattr(family, "measure", measure)
    result = family.run_case(CASE, ("jnp",), QUICK)
    assert timings == [QUICK, QUICK.rested, QUICK]
    forward, accumulate = by_name(result, "forward")["jnp"], by_name(result, "accumulate")["jnp"]
    assert forward["tflops_rested"] == pytest.approx(2 * forward["tflops"], rel=1e-3)
    assert "tflops_rested" not in accumulate


def test_exact_rows():
    inputs = family._inputs(CASE, PRODUCTS)
    rows = np.array([0, 7, 95])
    for scalings, (lhs, rhs) in inputs.quantized.items():
        wide = [np.asarray(x.dequantize()).astype(np.float64) for x in (lhs, rhs)]
        expected = wide[0][rows] @ wide[1].T  # of bfloat16 values, which differ a little from FP8 times a scale
        found = family._exact((lhs, rhs), rows)
        assert np.allclose(found, expected[None], rtol=0, atol=0.05 * np.abs(expected).max())
        assert (lhs.scaling, rhs.scaling) == scalings
    values = np.asarray(inputs.plain[0], np.float32)
    assert values.std() == pytest.approx(1, abs=0.05)


def test_exact_rows_of_several_products():
    lhs, rhs = family._inputs(dataclasses.replace(CASE, products=3), PRODUCTS).plain
    rows = np.array([0, 7, 95])
    lhs, rhs = (np.asarray(x).astype(np.float64)[[0, 2]] for x in (lhs, rhs))
    assert np.allclose(family._exact((lhs, rhs), rows), lhs[:, rows] @ rhs.mT, rtol=0, atol=1e-10)


@pytest.mark.parametrize("spoil", [lambda d: d * 1.02, lambda d: d.at[:, 5].set(jnp.nan)])
def test_a_wrong_result_is_not_timed(spoil, monkeypatch):
    right = ops.gemm

    def wrong(*operands, implementation=None, **options):
        del implementation
        return spoil(right(*operands, implementation="reference", **options))

    monkeypatch.setattr(ops, "gemm", wrong)
    result = family.run_case(CASE, ("te_jax_block", "jnp"), QUICK)
    assert set(by_name(result, "forward")) == {"jnp"}
    assert {problem["implementation"] for problem in result.wrong} == {"te_jax_block"}
    assert all("the product is wrong" in problem["reason"] for problem in result.wrong)


def test_the_reference_is_not_published_as_the_native_kernel(monkeypatch):
    def only_reference(*_, implementation=None, **__):
        assert implementation == "native"
        raise native.NativeUnavailableError("the kernels are not loaded")

    monkeypatch.setattr(ops, "gemm", only_reference)
    result = family.run_case(CASE, PRODUCTS, QUICK)
    assert {row["implementation"] for row in result.rows} == {"jnp"}
    assert all("the kernels are not loaded" in problem["reason"] for problem in result.skipped)
