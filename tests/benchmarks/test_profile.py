"""Kernels of a trace by kind, and what no kernel fills."""

import gzip
import json

import jax
import pytest

from benchmarks import profile
from benchmarks.profile import KINDS, sorted_kernels

PROGRAM = """
ENTRY %main {
  %loop_add_fusion.3 = f32[8]{0} fusion(%p), kind=kLoop, metadata={op_name="jit(step)/optimizer/add" source_line=3}
  ROOT %loop_reduce_fusion = (f32[8]{0}, s32[]) fusion(%p), metadata={op_name="jit(step)/transpose(jvp(loss))/reduce"}
  %loop_convert_fusion.1 = f8e4m3fn[8]{0} fusion(%p), metadata={op_name="jit(step)/convert"}
  %wrapped_tuple = (bf16[8]{0}, f8e5m2[8]{0}) fusion(%p), metadata={op_name="jit(step)/convert"}
  %loop_multiply_fusion = bf16[8]{0} fusion(%p), metadata={op_name="jit(step)/jit(block)/mul"}
}
"""
KERNELS = {
    "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNN": "GEMM",
    "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n": "GEMM",
    "void te_jax::gemm::Multiply<128, 128>(Operands)": "GEMM",
    "gemm_fusion_dot_general_4": "GEMM",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "NCCL beside others",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_1": "attention",
    "void te_jax::QuantizeTile<__nv_bfloat16>(Arguments)": "quantization",
    "loop_convert_fusion_1": "quantization",
    "wrapped_tuple": "quantization",
    "void te_jax::NormalizeRows<float>(Arguments)": "elementwise",
    "void te_jax::GradientOnStretches<float>(Arguments)": "loss",
    "void te_jax::Subtract<float>(Arguments)": "loss",
    "loop_subtract_fusion": "elementwise",
    "loop_add_fusion_3": "optimizer",
    "void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>>": "optimizer",
    "loop_reduce_fusion": "loss",
    "loop_multiply_fusion": "elementwise",
    "loop_add_fusion_4": "elementwise",
    "MemcpyD2D": "copies and loops",
    "copy_fusion": "copies and loops",
    "loop_dynamic_update_slice_fusion_2": "copies and loops",
    "loop_broadcast_fusion": "copies and loops",
}


def names(*processes):
    for pid, process in enumerate(processes):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}}
        for tid, thread in enumerate(("Stream #1(Compute)", "Stream #2(MemcpyD2D)", "XLA Ops")):
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": thread}}


def event(name, start, duration, *, pid=0, tid=0, **args):
    return {"ph": "X", "name": name, "ts": start, "dur": duration, "pid": pid, "tid": tid, "args": args}


@pytest.mark.parametrize(("name", "kind"), KERNELS.items())
def test_kinds(name, kind):
    (kernel,) = sorted_kernels([*names("/device:GPU:0"), event(name, 0, 7)], calls=1, program=PROGRAM).kernels
    assert (kernel.kind, kernel.name, kernel.milliseconds) == (kind, name, pytest.approx(7e-3))


def test_the_instruction_of_an_event_decides_over_its_name():
    events = [*names("/device:GPU:0"), event("loop_multiply_fusion", 0, 7, hlo_op="loop_add_fusion.3")]
    assert sorted_kernels(events, calls=1, program=PROGRAM).kernels[0].kind == "optimizer"


def test_idle_is_what_no_stream_fills():
    events = [
        *names("/device:GPU:0", "/host:CPU"),
        event("nvjet", 1000, 100),
        event("MemcpyD2D", 1050, 100, tid=1),  # half of it beside the GEMM
        event("nvjet", 1200, 100),  # after 50 without anything
        event("loop_multiply_fusion", 1000, 500, tid=2),  # another view of the same
        event("nvjet", 0, 5000, pid=1),
    ]
    found = sorted_kernels(events, calls=2)
    assert tuple(found.milliseconds) == KINDS
    assert found.span == pytest.approx(0.15)
    wanted = {"GEMM": 0.1, "copies and loops": 0.05, "idle": 0.025}
    assert found.milliseconds == pytest.approx(dict.fromkeys(KINDS, 0.0) | wanted)
    assert [(kernel.name, kernel.calls) for kernel in found.kernels] == [("nvjet", 1.0), ("MemcpyD2D", 0.5)]


def test_of_nccl_what_runs_alone_is_told_from_what_runs_beside_others():
    events = [
        *names("/device:GPU:0"),
        event("nvjet", 0, 100),
        event("ncclDevKernel_AllGather", 80, 70, tid=1),  # 20 beside the GEMM
        event("ncclDevKernel_ReduceScatter", 140, 20, tid=1),  # 10 beside the other one
        event("nvjet", 155, 45),  # 5 of these as well
    ]
    found = sorted_kernels(events, calls=1).milliseconds
    wanted = {"GEMM": 0.145, "NCCL beside others": 0.025, "NCCL alone": 0.055}
    assert found == pytest.approx(dict.fromkeys(KINDS, 0.0) | wanted)


def test_the_mean_over_devices():
    events = [*names("/device:GPU:0", "/device:GPU:1"), event("nvjet", 0, 100), event("nvjet", 50, 300, pid=1)]
    found = sorted_kernels(events, calls=1)
    assert found.milliseconds["GEMM"] == found.span == pytest.approx(0.2)
    assert found.milliseconds["idle"] == 0


def test_a_trace_without_a_gpu_has_nothing(tmp_path):
    run = jax.jit(lambda x: x + 1)
    found = profile.traced(lambda: run(1.0), calls=1, folder=tmp_path)
    assert found.kernels == ()
    assert set(found.milliseconds.values()) == {0.0}
    with gzip.open(found.trace) as file:
        assert json.load(file)
