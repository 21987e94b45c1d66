"""The interconnect family: what counts as moved, what counts as the link, and data that did not arrive."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks import harness, tables
from benchmarks import interconnect as family
from benchmarks.harness import Timing, screen_table
from benchmarks.shapes import MESSAGES_CPU, MESSAGES_GPU, MessageSizes, bytes_as_text

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


@pytest.mark.parametrize("devices", [3, None])
def test_all_transfers_are_measured_by_the_bytes_that_a_device_receives(devices, require_devices):
    require_devices(devices or 2)
    result = family.run_case(sweep(devices), EVERYTHING, FEW)
    assert not result.wrong
    assert not result.skipped
    assert list(by_pair(result)) == PAIRS
    count = devices or len(jax.local_devices())
    part = 4096 // 4 // count * 4
    for (operation, _), row in by_pair(result).items():
        assert row["case"] == f"{count}x4KiB"
        assert row["devices"] == count
        assert row["bytes"] == (4096 if operation in ("one_way", "both_ways") else part * (count - 1))
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


def identity(x, *args, **options):
    del args, options
    return x


SPOILT = {
    "ppermute": (identity, {("both_ways", "ppermute"), ("all_gather", "ppermute_ring")}),
    "all_gather": (lambda x, axis, **_: jnp.tile(x, lax.axis_size(axis)), {("all_gather", "all_gather")}),
    "psum_scatter": (lambda x, axis, **_: x[: x.size // lax.axis_size(axis)], {("reduce_scatter", "psum_scatter")}),
}


@pytest.mark.parametrize("name", SPOILT)
def test_data_that_did_not_arrive_is_not_timed(name, monkeypatch):
    spoilt, pairs = SPOILT[name]
    monkeypatch.setattr(lax, name, spoilt)
    result = family.run_case(sweep(2), ("device_put", *{implementation for _, implementation in pairs}), FEW)
    assert {(problem["operation"], problem["implementation"]) for problem in result.wrong} == pairs
    assert all("not what was sent" in problem["reason"] for problem in result.wrong)
    assert set(by_pair(result)) == {("one_way", "device_put"), ("both_ways", "device_put")}


@pytest.mark.parametrize("spoil", [lambda x: x.at[-1].add(1), lambda x: x.at[0].set(x[1])])
def test_a_single_wrong_word_is_noticed_and_there_is_no_link_then(spoil, monkeypatch):
    put = jax.device_put

    def spoilt(x, device):
        moved = isinstance(x, jax.Array) and x.devices() != {device}
        return spoil(put(x, device)) if moved else put(x, device)

    monkeypatch.setattr(jax, "device_put", spoilt)
    result = family.run_case(sweep(2), ("device_put", "ppermute"), FEW)
    assert [problem["operation"] for problem in result.wrong] == ["one_way", "both_ways"]
    assert result.rows == []
    (problem,) = result.skipped
    assert problem["implementation"] == "ppermute"
    assert "no one-way copy was measured" in problem["reason"]


def test_a_copy_that_stays_where_it_was_is_noticed(monkeypatch):
    monkeypatch.setattr(jax, "device_put", lambda x, device: x)
    result = family.run_case(sweep(2), ("device_put",), FEW)
    assert ("one_way", "device_put") in {(wrong["operation"], wrong["implementation"]) for wrong in result.wrong}


@pytest.mark.parametrize("operation", ["one_way", "both_ways"])
def test_all_copies_are_waited_for_and_none_is_kept(operation, monkeypatch):
    candidate = family._build((operation, "device_put"), 4096, (4096, 0), jax.local_devices()).candidate
    wait, waited = jax.block_until_ready, []
    monkeypatch.setattr(jax, "block_until_ready", lambda x: wait(waited.append(list(jax.tree.leaves(x))) or x))
    for calls in (3, 1):
        received = [candidate.call(*arguments) for arguments in candidate.arguments(calls)]
        candidate.wait(received[-1])
        assert list(map(id, waited.pop())) == list(map(id, jax.tree.leaves(received)))


def test_every_transfer_and_device_has_words_of_its_own():
    salts = [(size, number) for size in (4096, 16384) for number in range(3)]
    drawn = np.stack([np.asarray(family._words(salt, rank, 1024)) for salt in salts for rank in range(4)])
    assert len(np.unique(drawn)) > 0.999 * drawn.size
    bits = np.unpackbits(drawn.view(np.uint8), axis=1)
    assert np.abs(bits.mean(axis=1) - 0.5).max() < 0.02
    again = jax.jit(family._words, static_argnums=2)((4096, 0), 3, 1024)
    np.testing.assert_array_equal(again, drawn[3])


def test_a_transfer_that_fails_costs_the_others_nothing(monkeypatch):
    def fails(*_, **__):
        raise NotImplementedError("not on this platform")

    monkeypatch.setattr(lax, "psum_scatter", fails)
    result = family.run_case(sweep(2), ("device_put", "ppermute", "psum_scatter"), FEW)
    (problem,) = result.skipped
    assert problem["reason"] == "NotImplementedError: not on this platform"
    assert set(by_pair(result)) == {("one_way", "device_put"), ("both_ways", "device_put"), ("both_ways", "ppermute")}


def test_without_peers_only_copies_are_measured():
    result = family.run_case(sweep(2), ("device_put",), FEW)
    assert set(by_pair(result)) == {("one_way", "device_put"), ("both_ways", "device_put")}


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


def test_sizes():
    assert MESSAGES_GPU[0].name == "4KiB-1GiB"
    assert [case.name for case in MESSAGES_CPU] == ["2x4KiB-4MiB", "4x4KiB-4MiB"]
    assert MESSAGES_CPU[0].sizes == tuple(4096 * 4**i for i in range(6))
    assert MESSAGES_GPU[0].sizes == tuple(4096 * 4**i for i in range(10))
    assert [bytes_as_text(2**i) for i in (9, 10, 19, 20, 30, 31)] == ["512B", "1KiB", "512KiB", "1MiB", "1GiB", "2GiB"]


def test_a_run_becomes_tables_and_a_figure(tmp_path, monkeypatch):
    small = {"cpu": (sweep(2, largest=2**14),), "gpu": (sweep(2, largest=2**14),)}
    monkeypatch.setitem(family.FAMILY.cases, jax.default_backend(), small[jax.default_backend()])
    said = []
    assert harness.run_family("interconnect", family.FAMILY, quick=True, output=tmp_path, say=said.append) == 0
    (path,) = tmp_path.glob("*/interconnect.json")
    document = json.loads(path.read_text())
    assert {row["case"] for row in document["rows"]} == {"2x4KiB", "2x16KiB"}
    assert any("GB/s" in line for line in said)
    page = tables.results_page(document)
    assert "| GB/s a direction | of the link |" in page
    assert page.count("`psum_scatter`") == 2
    summary = tables.summary_table(document)
    assert "| case | `ppermute_ring` | `all_gather` |" in summary
    assert summary.count("\n| 2x") == 2
    assert "2x16KiB" in tables.bar_chart(document)
