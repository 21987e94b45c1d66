"""The activation family: what it measures, and what it refuses to publish."""

import dataclasses

import jax
import jax.numpy as jnp

from benchmarks import activation as family
from benchmarks.harness import QUICK
from benchmarks.shapes import MatrixShape
from te_jax import ops

CASE = MatrixShape(rows=128, cols=256, dtype="bfloat16", model="test")
BYTES = {"forward_data": 5, "forward": 6, "backward": 10, "backward_y": 11}
FEW = ("forward_data_delayed", "forward_block", "backward_current", "backward_y_block")
"""Every direction and every way of scaling."""


def test_every_direction_and_every_way_of_scaling_is_measured_and_right(monkeypatch, native_kernels):
    operations = dict(family.OPERATIONS)
    monkeypatch.setattr(family, "OPERATIONS", {name: operations[name] for name in FEW})
    result = family.run_case(CASE, ("te_jax", "copy"), QUICK)
    monkeypatch.setattr(family, "OPERATIONS", {"backward_y_current": operations["backward_y_current"]})
    with_peers = family.run_case(CASE, family.IMPLEMENTATIONS, QUICK)
    for found, names, implementations in (
        (result, FEW, ("te_jax", "copy")),
        (with_peers, ("backward_y_current",), family.IMPLEMENTATIONS),
    ):
        assert not found.wrong + found.skipped
        bytes_of = {(row["operation"], row["implementation"]): row["bytes"] for row in found.rows}
        assert bytes_of == {
            (name, implementation): 128 * 256 * operations[name].bytes
            for name in names
            for implementation in implementations
        }


def test_bytes_that_every_operation_must_move():
    for name, operation in family.OPERATIONS.items():
        direction, _, scales = name.rpartition("_")
        again = (6 if "backward" in name else 4) if scales == "current" else 0
        assert operation.bytes == BYTES[direction] + again


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
