"""Statistics go to any object with `add_scalar`, and to a file of JSON lines."""

import json
import math

import numpy as np
import pytest

from te_jax import debug

STATISTICS = {
    "layers/up": {
        "gradient": {
            "dgrad": debug.TensorStatistics(
                *(np.arange(2, dtype=np.float32) + i for i in range(6)), error=np.array([0.5, np.nan], np.float32)
            )
        }
    }
}


def test_a_writer_gets_every_scalar_by_its_name():
    class Writer:  # as torch's SummaryWriter has it
        def add_scalar(self, tag, scalar_value, global_step=None, walltime=None, new_style=False):
            found[tag] = scalar_value, global_step

    found = {}
    debug.write(STATISTICS, Writer(), 7)
    wanted = debug.scalars(STATISTICS)
    assert len(wanted) == 14
    assert list(found) == list(wanted)
    assert {step for _, step in found.values()} == {7}
    np.testing.assert_array_equal([value for value, _ in found.values()], list(wanted.values()))


def test_a_file_of_json_lines_goes_on_where_it_ended(tmp_path):
    for step in (10, 20):
        with debug.JSONLinesWriter(tmp_path / "statistics.jsonl") as writer:
            debug.write(STATISTICS, writer, step)
            writer.add_scalar("loss", np.float32(2.5), np.int64(step))
    lines = [json.loads(line) for line in (tmp_path / "statistics.jsonl").read_text().splitlines()]
    wanted = debug.scalars(STATISTICS) | {"loss": 2.5}
    assert [(line["step"], line["name"]) for line in lines] == [(step, name) for step in (10, 20) for name in wanted]
    for line in lines:
        value = wanted[line["name"]]
        assert line["value"] == (None if math.isnan(value) else value)


def test_a_writer_is_seen_while_it_is_open(tmp_path):
    writer = debug.JSONLinesWriter(tmp_path / "statistics.jsonl")
    writer.add_scalar("loss", math.inf, 1)
    writer.flush()
    assert (tmp_path / "statistics.jsonl").read_text() == '{"step": 1, "name": "loss", "value": null}\n'
    writer.close()


def test_what_is_no_writer_is_refused():
    with pytest.raises(ValueError, match=r"writer is 3; it must have a method add_scalar\(name, value, step\)"):
        debug.write(STATISTICS, 3, 7)
