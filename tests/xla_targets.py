"""Programs that XLA compiles for GPUs on a machine without one."""

import functools
import importlib.util

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from te_jax import native

# What XLA asks a device for, from NVIDIA's data sheets and the CUDA programming guide.
_TARGET = """
gpu_device_info {{
  name: "{name}" device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability {major}.{minor}{letter}"
  cuda_compute_capability {{ major: {major} minor: {minor} {extension} }}
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
  core_count: {cores} fpus_per_core: {fpus} clock_rate_ghz: {clock}
  device_memory_size: {memory} memory_bandwidth: {bandwidth} l2_cache_size: {l2}
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: {threads}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_core: {shared} shared_memory_per_block: 49152 shared_memory_per_block_optin: {optin}
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  device_address_bits: 64
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""
_SMALL = {"fpus": 128, "threads": 1536, "shared": 102400, "optin": 101376}
_LARGE = {"fpus": 128, "threads": 2048, "shared": 233472, "optin": 232448}
_GPUS = {
    "8.9": {"name": "NVIDIA L40S", "cores": 142, "clock": 2.52, "memory": 48 * 10**9, "bandwidth": 864 * 10**9,
            "l2": 96 * 2**20, **_SMALL},
    "9.0": {"name": "NVIDIA H200", "cores": 132, "clock": 1.98, "memory": 151397597184, "bandwidth": 4800 * 10**9,
            "l2": 52428800, **_LARGE},
    "10.0": {"name": "NVIDIA B200", "cores": 148, "clock": 1.965, "memory": 180 * 10**9, "bandwidth": 8000 * 10**9,
             "l2": 126 * 2**20, **_LARGE},
    "12.0": {"name": "NVIDIA RTX 5090", "cores": 170, "clock": 2.41, "memory": 32 * 10**9, "bandwidth": 1792 * 10**9,
             "l2": 96 * 2**20, **_SMALL},
}  # fmt: skip

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None,
    reason="needs XLA for CUDA: pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt",
)


@functools.cache
def mesh(count=1, axis="device", capability="9.0"):
    """So many GPUs of one host."""
    major, minor = capability.split(".")
    own = {"letter": "", "extension": ""}  # instructions that only this architecture has
    if int(major) >= 9:
        own = {"letter": "a", "extension": "feature_extension: ACCELERATED_FEATURES"}
    config = _TARGET.format(major=major, minor=minor, **own, **_GPUS[capability])
    devices = topologies.get_topology_desc(platform="cuda", target_config=config, topology=f"1x1x{count}").devices
    return Mesh(np.array(devices), (axis,), axis_types=(AxisType.Auto,))


def compiled(function, *operands, capability="9.0", compiler_options=None, **options):
    """The program for one GPU, of arrays or their types."""
    sharding = NamedSharding(mesh(capability=capability), PartitionSpec())
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), operands)
    return without_autotuning(jax.jit(function, **options).lower(*types), **(compiler_options or {}))


def without_autotuning(lowered, **compiler_options):
    """Compiled; autotuning would need the GPU."""
    return lowered.compile({"xla_gpu_autotune_level": 0, **compiler_options})


@functools.cache
def know_handlers():
    """te_jax's calls can be compiled: XLA looks for their handlers, and takes those of the CPU."""
    if not native.has_gpu():
        for target, handler in native.extension_module("cpu").registrations().items():
            jax.ffi.register_ffi_target(target, handler, platform="CUDA")
