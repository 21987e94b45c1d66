"""The family of steps on several devices: all layouts are measured and right, and what is read of compiled programs."""

import dataclasses

import jax
import pytest

from benchmarks import fsdp as family
from benchmarks import fsdp_torch, step
from benchmarks.fsdp_compiled import Collective, collectives
from benchmarks.harness import QUICK
from benchmarks.shapes import StepShape

CASE = StepShape(
    short="test", depths=(1,), batch=1, sequence=128, hidden=256, mlp=256, heads=2, kv_heads=2, head_dim=128, vocab=64,
    remat=True, model="test",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _as_the_peers_need_it():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def devices(monkeypatch, require_devices):
    """devices(n) lets the family find n devices."""

    found = jax.local_devices

    def limit(count):
        require_devices(count)
        monkeypatch.setattr(jax, "local_devices", lambda **chosen: found(**chosen) if chosen else found()[:count])

    return limit


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize(
    ("count", "changes", "names"),
    [
        (2, {}, ("bf16", "te_jax_block_fp8_head_overlap")),
        (2, {"one_sequence": True}, ("bf16", "te_jax_block_fp8_head")),
        (4, {"sequence": 256}, ("bf16", "te_jax_block_fp8_head_tensor", "te_jax_block_fp8_head_replicas")),
    ],
)
def test_all_layouts_are_measured_and_right(count, changes, names, devices):
    devices(count)
    case = dataclasses.replace(CASE, **changes)
    result = family.run_case(case, names, QUICK)
    assert not result.wrong
    assert not result.skipped
    assert [row["implementation"] for row in result.rows] == list(names)
    kernels = 256 * (4 * 256 + 3 * 256 + 64)
    shared = {"sequence": case.sequence * count} if case.one_sequence else {"batch": count}
    on_devices = dataclasses.replace(case, **shared)
    for row in result.rows:
        assert row["case"] == on_devices.name
        assert row["devices"] == count
        assert row["losses"] == pytest.approx(result.rows[0]["losses"], rel=0.01)
        assert row["losses"][2] < row["losses"][0]
        pairs = on_devices.sequence**2 // 2 // (count if case.one_sequence else 1)
        assert row["flops"] == case.microbatches * 3 * (2 * case.sequence * kernels + 4 * pairs * 256)
        assert row["tokens_per_second"] == pytest.approx(case.tokens * 1e3 / row["median_ms"], rel=1e-3)
        # Each device has its part of the parameters, and of both moments.
        parameters = (kernels + 64 * 256) * (2 if row["implementation"].endswith("replicas") else 1)
        moments = 8 if row["implementation"].startswith("bf16") else 4
        arguments = parameters // count * (4 + moments)
        assert arguments < row["peak_bytes"] - row["temporaries_gb"] * 1e9 < 1.5 * arguments


def test_what_cannot_run_says_why(devices, monkeypatch):
    def without_torch(*_, **__):
        raise ImportError("no torch")

    monkeypatch.setattr(fsdp_torch, "measured", without_torch)
    monkeypatch.setattr(step, "run_depth", lambda *_, **__: None)
    devices(2)
    assert [problem["reason"] for problem in family.run_case(CASE, ("torch_fsdp2",), QUICK).skipped] == [
        "ImportError: no torch"
    ]
    with pytest.raises(ValueError, match="it needs a multiple of 4 devices, and there are 2"):
        family.made_on("te_jax_block_fp8_head_replicas", CASE, 1, jax.local_devices())
    devices(1)
    (problem,) = family.run_case(CASE, ("bf16",), QUICK).skipped
    assert "it needs 2 devices" in problem["reason"]


PROGRAM = """\
HloModule jit_step, is_scheduled=true

%body (p: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {
  %all-gather-start = (bf16[2,4]{1,0}, bf16[8,4]{1,0}) all-gather-start(%p), channel_id=1
  %all-gather-done = bf16[8,4]{1,0} all-gather-done(%all-gather-start)
}

%wrapped (p: f32[8,4]) -> f32[2,4] {
  %reduce-scatter.1 = f32[2,4]{1,0} reduce-scatter(%p), channel_id=2, replica_groups=[1,4]<=[4], dimensions={0}
  %all-gather.9 = s8[8]{0} all-gather(%q), channel_id=2, dimensions={0}
}

ENTRY %main {
  %while = (s32[], bf16[8,4]) while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %start = ((f32[8,4]{1,0}), f32[2,4]{1,0}) async-start(%x), calls=%wrapped
  %all-gather.1 = (f8e4m3fn[8,4]{1,0}, f32[8,1]{1,0}) all-gather(%a, %b), channel_id=3
  %reduce-scatter.2 = bf16[4,4]{1,0} reduce-scatter(%z), replica_groups=mesh['fsdp'=2,'tensor'=2] {'tensor'}
  %reduce-scatter.3 = bf16[4,4]{1,0} reduce-scatter(%z), replica_groups={{0,1},{2,3}}, dimensions={0}
  %all-reduce-start.1 = ((bf16[16]{0}), bf16[16]{0}) all-reduce-start(%v), channel_id=5
  %all-reduce-start.2 = bf16[16]{0} all-reduce-start(%v), channel_id=6
  ROOT %all-reduce.1 = f32[16]{0} all-reduce(%y), channel_id=4
}
"""


def test_collectives_of_a_program():
    """As often as loops run them, and with the sizes of whole arrays; two of them are one launch."""
    found, launches = collectives(PROGRAM)
    assert launches == 3 + 7
    assert sorted(found, key=repr) == [
        Collective("all-gather", "bf16", 3, 0, 3 * 2 * 32),
        Collective("all-gather", "f32", 0, 0, 4 * 8),  # the second result of one call
        Collective("all-gather", "f8e4m3fn", 0, 1, 32),
        Collective("all-gather", "s8", 1, 0, 8),
        Collective("all-reduce", "bf16", 2, 0, 2 * 2 * 16),
        Collective("all-reduce", "f32", 0, 1, 4 * 16),
        Collective("reduce-scatter", "bf16", 0, 2, 2 * 2 * 32),
        Collective("reduce-scatter", "f32", 1, 0, 4 * 32),
    ]
