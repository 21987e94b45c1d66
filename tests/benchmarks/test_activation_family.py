"""The activation family: what it measures, and what it refuses to publish."""

import dataclasses

import jax
import jax.numpy as jnp

from benchmarks import activation as family
from benchmarks.harness import QUICK
from benchmarks.shapes import MatrixShape
from te_jax import ops

CASE = MatrixShape(rows=256, cols=384, dtype="bfloat16", model="test")
BYTES = {"forward_data": 5, "forward": 6, "backward": 10, "backward_y": 11}


def test_all_operations_are_measured_and_right(monkeypatch, native_kernels):
    result = family.run_case(CASE, ("te_jax", "copy"), QUICK)
    names = list(family.OPERATIONS)
    monkeypatch.setattr(
        family, "OPERATIONS", {name: family.OPERATIONS[name] for name in ("forward_block", "backward_y_current")}
    )
    with_peers = family.run_case(CASE, family.IMPLEMENTATIONS, QUICK)
    assert not result.wrong + with_peers.wrong
    assert not result.skipped + with_peers.skipped
    for name in names:
        rows = [row for row in result.rows + with_peers.rows if row["operation"] == name]
        expected = family.IMPLEMENTATIONS if name in family.OPERATIONS else ("te_jax", "copy")
        assert {row["implementation"] for row in rows} == set(expected)
        direction, _, scales = name.rpartition("_")
        again = (6 if "backward" in name else 4) if scales == "current" else 0
        assert {row["bytes"] for row in rows} == {256 * 384 * (BYTES[direction] + again)}


def test_wrong_codes_are_not_timed(monkeypatch, native_kernels):
    right = ops.gated_activation

    def negated(*args, **kwargs):
        quantized = right(*args, **kwargs)
        codes = jax.lax.bitcast_convert_type(quantized.transposed, jnp.uint8) ^ 0x80
        return dataclasses.replace(
            quantized, transposed=jax.lax.bitcast_convert_type(codes, quantized.transposed.dtype)
        )

    monkeypatch.setattr(family, "OPERATIONS", {"forward_block": family.OPERATIONS["forward_block"]})
    monkeypatch.setattr(ops, "gated_activation", negated)
    result = family.run_case(CASE, ("te_jax", "copy"), QUICK)
    assert {row["implementation"] for row in result.rows} == {"copy"}
    assert [problem["reason"].partition(":")[0] for problem in result.wrong] == [
        "transposed of the first result is wrong"
    ]
