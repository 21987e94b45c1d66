"""The interconnect family: what counts as moved, what counts as the link, and data that did not arrive."""

import jax
import pytest

from benchmarks import interconnect as family
from benchmarks.harness import Timing, screen_table
from benchmarks.shapes import MessageSizes

FEW = Timing(samples=2, sample_seconds=1e-9)
EVERYTHING = family.FAMILY.implementations
PAIRS = [(operation, name) for operation, names in family.OPERATIONS.items() for name in names]


def sweep(devices, smallest=2**12, largest=2**12):
    return MessageSizes(smallest=smallest, largest=largest, devices=devices)


def by_pair(result):
    return {(row["operation"], row["implementation"]): row for row in result.rows}


@pytest.fixture(autouse=True)
def _two_devices(require_devices):
    require_devices(2)


def test_all_devices_take_part_if_a_case_names_none():
    result = family.run_case(sweep(None), ("device_put", "all_gather"), FEW)
    count = len(jax.local_devices())
    assert {row["devices"] for row in result.rows} == {count}
    assert by_pair(result)["all_gather", "all_gather"]["bytes"] == 4096 // 4 // count * 4 * (count - 1)
    for row in result.rows:
        assert row["gigabytes_per_second"] == pytest.approx(row["bytes"] / row["median_ms"] / 1e6, rel=1e-3)


def test_the_link_is_the_best_one_way_copy_of_all_sizes():
    result = family.run_case(sweep(2, largest=2**14), EVERYTHING, FEW)
    assert [row["case"] for row in result.rows[:: len(PAIRS)]] == ["2x4KiB", "2x16KiB"]
    link = max(row["gigabytes_per_second"] for row in result.rows if row["operation"] == "one_way")
    assert max(row["share_of_link"] for row in result.rows if row["operation"] == "one_way") == 1
    for row in result.rows:
        assert row["share_of_link"] == pytest.approx(row["gigabytes_per_second"] / link, rel=1e-3)
        assert row["time_over_link"] == pytest.approx(1 / row["share_of_link"], rel=1e-3)
    ring, gather = (by_pair(result)["all_gather", name] for name in ("ppermute_ring", "all_gather"))
    assert ring["speedup_over"]["all_gather"] == pytest.approx(gather["median_ms"] / ring["median_ms"], rel=1e-3)
    assert by_pair(result)["reduce_scatter", "psum_scatter"]["speedup_over"] == {}
    table = screen_table(result.rows)
    assert "GB/s" in table
    assert "of link" in table
    assert "TFLOP/s" not in table


def test_without_a_one_way_copy_there_is_no_link_and_there_are_no_rows(monkeypatch):
    put = jax.device_put

    def spoilt(x, device):
        moved = isinstance(x, jax.Array) and x.devices() != {device}
        return put(x, device).at[0].add(1) if moved else put(x, device)

    monkeypatch.setattr(jax, "device_put", spoilt)
    result = family.run_case(sweep(2), ("device_put", "ppermute"), FEW)
    assert [problem["operation"] for problem in result.wrong] == ["one_way", "both_ways"]
    assert "not what was sent" in result.wrong[0]["reason"]
    assert result.rows == []
    (problem,) = result.skipped
    assert problem["implementation"] == "ppermute"
    assert "no one-way copy was measured" in problem["reason"]


def test_a_copy_that_stays_where_it_was_is_noticed(monkeypatch):
    monkeypatch.setattr(jax, "device_put", lambda x, device: x)
    result = family.run_case(sweep(2), ("device_put",), FEW)
    assert ("one_way", "device_put") in {(wrong["operation"], wrong["implementation"]) for wrong in result.wrong}


@pytest.mark.parametrize(("available", "devices", "wanted"), [(1, None, 2), (1, 2, 2), (2, 4, 4)])
def test_too_few_devices_are_a_reason_and_no_figures(available, devices, wanted, monkeypatch):
    there = jax.local_devices()[:available]
    monkeypatch.setattr(jax, "local_devices", lambda: there)
    result = family.run_case(sweep(devices), EVERYTHING, FEW)
    assert result.rows == result.wrong == []
    (problem,) = result.skipped
    assert f"it needs {wanted} devices and finds {available}" in problem["reason"]
    if there[0].platform == "cpu":
        assert "XLA_FLAGS=--xla_force_host_platform_device_count=4" in problem["reason"]
