"""The quantize family: what it measures, and what it refuses to publish."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from benchmarks import quantize as family
from benchmarks.harness import QUICK
from benchmarks.shapes import MatrixShape
from te_jax import native, ops

CASE = MatrixShape(rows=128, cols=256, dtype="bfloat16", model="test")
ALL = ("te_jax", "te_jax_reference", "jnp", "copy")


@pytest.fixture
def only(monkeypatch):
    """only(names): what a test says of all operations, it says of each alike."""
    operations = family.OPERATIONS
    return lambda *names: monkeypatch.setattr(family, "OPERATIONS", {name: operations[name] for name in names})


def by_name(result, operation):
    return {row["implementation"]: row for row in result.rows if row["operation"] == operation}


def test_operations_are_measured_and_right(only):
    """Each kind of scales, and each further result."""
    only("row", "block_gradient", "current_dbias")
    _check_all(examples=None)


def test_examples_of_a_vmap(only):
    only("delayed")
    _check_all(examples=3)


def _check_all(examples):
    result = family.run_case(dataclasses.replace(CASE, examples=examples), ALL, QUICK)
    assert not result.wrong
    expected = set(ALL) - (set() if native.available() else {"te_jax"})
    for name, operation in family.OPERATIONS.items():
        rows = by_name(result, name)
        assert set(rows) == expected
        for row in rows.values():
            assert row["bytes"] == (examples or 1) * 128 * 256 * (2 * operation.reads + 2)
            assert row["share_of_floor"] == pytest.approx(1 / row["ratio_to_copy"], rel=1e-3)


@pytest.mark.parametrize(("copy", "operation"), [("data", "delayed"), ("transposed", "block_gradient")])
def test_wrong_codes_are_not_timed(copy, operation, only, monkeypatch):
    only(operation)
    right = ops.quantize

    def one_bit_off(x, *args, implementation, **kwargs):
        results = right(x, *args, implementation="reference", **kwargs)
        if implementation != "native":
            return results
        quantized, *rest = results if isinstance(results, tuple) else (results,)
        codes = jax.lax.bitcast_convert_type(getattr(quantized, copy), jnp.uint8).at[3, 5].add(1)
        wrong = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
        quantized = dataclasses.replace(quantized, **{copy: wrong})
        return (quantized, *rest) if rest else quantized

    monkeypatch.setattr(ops, "quantize", one_bit_off)
    result = family.run_case(CASE, ("te_jax", "copy"), QUICK)
    assert {row["implementation"] for row in result.rows} == {"copy"}
    assert {problem["operation"] for problem in result.wrong} == set(family.OPERATIONS)
    assert all(problem["reason"].startswith("1 codes or scales differ") for problem in result.wrong)


def test_peers_that_are_off_are_not_timed(only, monkeypatch):
    only("block_gradient")
    monkeypatch.setattr(family, "_LARGEST", 0.02)  # all values in a few codes
    result = family.run_case(CASE, ("jnp", "copy"), QUICK)
    assert {row["implementation"] for row in result.rows} == {"copy"}
    assert all("relative L2 error" in problem["reason"] for problem in result.wrong)


def test_the_reference_is_not_published_as_the_native_kernel(only, monkeypatch):
    only("delayed")
    right = ops.quantize

    def only_reference(*args, implementation, **kwargs):
        if implementation == "native":
            raise native.NativeUnavailableError("the kernels are not loaded")
        return right(*args, implementation=implementation, **kwargs)

    monkeypatch.setattr(ops, "quantize", only_reference)
    result = family.run_case(CASE, ("te_jax", "copy"), QUICK)
    assert {row["implementation"] for row in result.rows} == {"copy"}
    assert all("the kernels are not loaded" in problem["reason"] for problem in result.skipped)
