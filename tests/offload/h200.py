"""Programs that XLA compiles for an H200 on a machine without a GPU: when they copy, and how much memory they need."""

import dataclasses
import functools
import importlib.util
import re

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from te_jax import native

# What XLA asks a device for, from NVIDIA's data sheet and the CUDA programming guide (compute capability 9.0).
_TARGET = """
gpu_device_info {
  name: "NVIDIA H200" device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability 9.0a"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  device_memory_size: 151397597184 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_core: 233472 shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  device_address_bits: 64
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None,
    reason="needs XLA for CUDA: pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt",
)


@functools.cache
def mesh(count=1, axis="device"):
    """So many GPUs of one host."""
    devices = topologies.get_topology_desc(platform="cuda", target_config=_TARGET, topology=f"1x1x{count}").devices
    return Mesh(np.array(devices), (axis,), axis_types=(AxisType.Auto,))


@functools.cache
def know_handlers():
    """te_jax's calls can be compiled: XLA looks for their handlers, and takes those of the CPU."""
    if not native.has_gpu():
        for target, handler in native.extension_module("cpu").registrations().items():
            jax.ffi.register_ffi_target(target, handler, platform="CUDA")


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy between device and host: where it begins and ends in the schedule, and the GEMMs in between."""

    to_host: bool
    start: int
    done: int
    gemms: int


def compiled(function, *operands, **options):
    sharding = NamedSharding(mesh(), PartitionSpec())
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), operands)
    return without_autotuning(jax.jit(function, **options).lower(*types))


def without_autotuning(lowered):
    """Compiled; autotuning would need the GPU."""
    return lowered.compile({"xla_gpu_autotune_level": 0})


def copies(program):
    """All copies between device and host, in the order in which they begin."""
    entry = program.as_text().split("\nENTRY ")[1]
    lines = [match for match in map(_INSTRUCTION.match, entry.splitlines()) if match]
    gemms = [place for place, line in enumerate(lines) if "dot" in line["name"]]
    starts = {line["name"]: (place, line["type"]) for place, line in enumerate(lines) if line["op"] == "copy-start"}
    found = []
    for done, line in enumerate(lines):
        if line["op"] != "copy-done":
            continue
        start, type_ = starts[line["operand"]]
        result, operand = re.findall(r"\[[\d,]*\]\{([^}]*)\}", type_)[:2]
        if ("S(5)" in result) != ("S(5)" in operand):
            found.append(Copy("S(5)" in result, start, done, sum(start < place < done for place in gemms)))
    return sorted(found, key=lambda copy: copy.start)


_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<type>.*?) (?P<op>[\w-]+)\(%?(?P<operand>[\w.-]*)")
