"""What XLA makes of the steps of `benchmarks.fsdp` for many H100s, without one: what travels, and what memory it takes.

    python -m benchmarks.fsdp_compiled                        # 8 GPUs of a host, bf16 and te_jax
    python -m benchmarks.fsdp_compiled --devices 64 --hosts 8 --layers 32 --names te_jax_block_fp8_head_replicas
    python -m benchmarks.fsdp_compiled --devices 64 --hosts 8 --layers 32 --output benchmarks/results/compiled.json \
        --names bf16,te_jax_block_fp8_head,te_jax_block_fp8_head_replicas     # the table of docs/multi_host.md

It needs XLA for CUDA (pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt). Printed are, for each implementation,
GiB of temporaries, arguments and peak memory of a device, how often a step launches collectives, seconds to trace and
to compile, and for each collective how often a step calls it, asynchronously and not, and MiB of the whole arrays of
each dtype. XLA chooses GEMMs without trying them, and bf16's attention is te_jax's call of cuDNN, for JAX's own asks
the GPU.
"""

import argparse
import collections
import dataclasses
import functools
import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import fsdp, harness, layer, shapes, step
from te_jax import native, ops

# What XLA asks a device for, from NVIDIA's data sheet and the CUDA programming guide (compute capability 9.0).
_TARGET = """
gpu_device_info {
  name: "NVIDIA H100 80GB HBM3" device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability 9.0a"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  device_memory_size: 85024112640 memory_bandwidth: 3350000000000 l2_cache_size: 52428800
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_core: 233472 shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  device_address_bits: 64
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_BYTES = {"f8e4m3fn": 1, "f8e5m2": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4}
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (?P<type>.*?) (?P<name>[a-z][\w-]*)\((?P<rest>.*)$")
_TYPE = re.compile(rf"({'|'.join(_BYTES)})\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """A kind of collective in a program.

    Attributes:
      name, dtype: of what.
      asynchronous, synchronous: how often a step calls it in each way.
      size: bytes of all whole arrays.
    """

    name: str
    dtype: str
    asynchronous: int
    synchronous: int
    size: int


def collectives(program: str) -> tuple[list[Collective], int]:
    """Those of the text of a compiled program, each as often as loops of known length run it; and how many launches
    they are: what one asynchronous operation starts is one."""
    computations: dict[str, list[re.Match[str]]] = {}
    lines: list[re.Match[str]] = []
    for line in program.splitlines():
        if line.rstrip().endswith("{") and not line.startswith((" ", "HloModule")):
            name = "ENTRY" if line.startswith("ENTRY") else line.split()[0].lstrip("%")
            lines = computations.setdefault(name, [])
        elif (match := _INSTRUCTION.match(line)) is not None:
            lines.append(match)

    launches = 0

    def run(name: str, times: int, asynchronous: bool) -> Iterator[tuple[str, str, bool, int, int]]:
        nonlocal launches
        for match in computations.get(name, ()):
            operation, rest = match["name"], match["rest"]
            kind = operation.removesuffix("-start")
            if kind in COLLECTIVES:
                launches += 0 if asynchronous else times
                types = [(dtype, _size(dtype, shape)) for dtype, shape in _TYPE.findall(match["type"])]
                # (operands, results), but for all-reduces before jax 0.11
                if operation != kind and (kind != "all-reduce" or match["type"].startswith("((")):
                    types = types[: len(types) // 2] if kind == "reduce-scatter" else types[len(types) // 2 :]
                parts = _group(rest) if operation == kind == "reduce-scatter" else 1
                started = asynchronous or operation != kind
                for number, (dtype, size) in enumerate(types):
                    yield kind, dtype, started, times * (number == 0), times * parts * size
            elif operation == "while":
                trips = re.search(r'known_trip_count":\{"n":"?(\d+)', rest)
                body = re.search(r"body=%?([\w.-]+)", rest)
                yield from run(body[1] if body else "", times * int(trips[1] if trips else 1), asynchronous)
            elif operation in ("call", "async-start"):
                called = re.search(r"(?:to_apply|calls)=%?([\w.-]+)", rest)
                inner = list(run(called[1] if called else "", times, asynchronous or operation == "async-start"))
                launches += times if inner and operation == "async-start" and not asynchronous else 0
                yield from inner

    calls: collections.Counter[tuple[str, str, bool]] = collections.Counter()
    sizes: collections.Counter[tuple[str, str]] = collections.Counter()
    for kind, dtype, started, count, size in run("ENTRY", 1, False):
        calls[kind, dtype, started] += count
        sizes[kind, dtype] += size
    return [
        Collective(kind, dtype, calls[kind, dtype, True], calls[kind, dtype, False], size)
        for (kind, dtype), size in sorted(sizes.items(), key=lambda item: -item[1])
    ], launches


def _size(dtype: str, shape: str) -> int:
    return _BYTES[dtype] * math.prod(int(count) for count in shape.split(",") if count)


def _group(rest: str) -> int:
    """How many devices share an array: {{0,1},{2,3}}, [2,2]<=[4], or axes of a mesh."""
    if (mesh := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", rest)) is not None:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
    if (groups := re.search(r"replica_groups=\[\d+,(\d+)\]", rest)) is not None:
        return int(groups[1])
    first = re.search(r"replica_groups=\{\{([\d,]+)\}", rest)
    return len(first[1].split(",")) if first else 1


@functools.cache
def prepare() -> None:
    """Lets te_jax's calls be lowered: XLA looks for their handlers, and takes those of the CPU."""
    if not native.has_gpu():
        for target, handler in native.extension_module("cpu").registrations().items():
            jax.ffi.register_ffi_target(target, handler, platform="CUDA")
        native.use_native = lambda *_, **__: True
    layer.Plain.attention = lambda self, query, key, value: ops.attention(query, key, value, causal=True)


@dataclasses.dataclass(frozen=True)
class Program:
    """The compiled step of an implementation; sizes are bytes of a device.

    Attributes:
      temporaries, arguments, peak: memory.
      launches: of collectives in a step.
      traced, compiled: seconds.
      collectives: of a step.
    """

    name: str
    temporaries: int
    arguments: int
    peak: int
    launches: int
    traced: float
    compiled: float
    collectives: list[Collective]

    def lines(self) -> list[str]:
        """For the terminal."""
        temporaries, arguments, peak = (f"{n / 2**30:.2f}" for n in (self.temporaries, self.arguments, self.peak))
        lines = [
            f"{self.name}: temporaries {temporaries}, arguments {arguments}, peak {peak} GiB; "
            f"{self.launches} launches; traced in {self.traced:.0f} s, compiled in {self.compiled:.0f} s"
        ]
        for each in self.collectives:
            calls = f"{each.asynchronous:4} asynchronous {each.synchronous:4} synchronous"
            lines.append(f"  {each.name:18} {each.dtype:8} {calls} {each.size / 2**20:9.1f} MiB")
        return lines


def program_of(name: str, case: shapes.StepShape, hosts: int = 1) -> Program:
    """Compiles an implementation.

    Args:
      name: of the implementation.
      case: on all devices.
      hosts: that have these.
    """
    prepare()
    topology = f"1x{hosts}x{case.devices // hosts}"
    devices = topologies.get_topology_desc(platform="cuda", target_config=_TARGET, topology=topology).devices
    made, on = fsdp.made_on(name, case, case.depths[0], devices)
    sharding = NamedSharding(on.mesh, P(None, (fsdp.REPLICA, fsdp.AXIS)))
    tokens = jax.ShapeDtypeStruct((case.microbatches, case.batch, case.sequence), jnp.int32, sharding=sharding)
    start = time.perf_counter()
    with jax.set_mesh(on.mesh):
        lowered = step.lowered(made, case, case.depths[0], on, (tokens, tokens))
    traced = time.perf_counter()
    # Autotuning would need the GPU.
    options: dict[str, Any] = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
    compiled = lowered.compile({**options, **on.compiler_options})
    seconds = traced - start, time.perf_counter() - traced
    memory: Any = compiled.memory_analysis()
    sizes = memory.temp_size_in_bytes, memory.argument_size_in_bytes, step.peak_bytes(compiled) or 0
    found, launches = collectives(compiled.as_text() or "")
    return Program(name, *sizes, launches, *seconds, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--case", default=shapes.FSDP_GPU[0].name, choices=[case.name for case in shapes.FSDP_GPU])
    parser.add_argument("--layers", type=int, help="instead of the case's")
    parser.add_argument("--names", default="bf16,te_jax_block_fp8_head_jit,te_jax_block_fp8_head")
    parser.add_argument("--output", type=Path, help="a file for the figures, in JSON")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    case = next(case for case in shapes.FSDP_GPU if case.name == options.case)
    case = dataclasses.replace(case, depths=(options.layers or case.depths[0],))
    programs = []
    for name in options.names.split(","):
        try:
            programs.append(program_of(name, fsdp.on_devices(case, options.devices), options.hosts))
        except ValueError as error:
            print(f"{name}: {error}", flush=True)
        else:
            print("\n".join(programs[-1].lines()), flush=True)
    if options.output is not None:
        environment = harness.environment()
        document = {name: environment[name] for name in ("commit", "dirty", "date")} | {"jax": jax.__version__}
        document |= {"case": case.name, "devices": options.devices, "hosts": options.hosts}
        document["programs"] = [dataclasses.asdict(program) for program in programs]
        options.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
