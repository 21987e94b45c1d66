"""Facts of the host about its processors, NVIDIA driver and CUDA toolkit, without JAX.

Every function answers "not there" with None or an empty result and raises nothing: `te-jax doctor` exists for broken
machines, and a benchmark's record must not fail for want of a driver version.
"""

import ctypes
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_COMMAND_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class HostGpu:
    """One GPU as the NVIDIA driver reports it, whether or not JAX can use it."""

    name: str
    memory_mib: int | None
    compute_capability: str | None
    driver: str | None


def output_of(command: list[str], cwd: Path | None = None) -> str | None:
    """Standard output of a command, or None where it is missing, fails or takes more than 20 seconds."""
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, errors="replace", timeout=_COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def gpus() -> tuple[HostGpu, ...]:
    """The machine's NVIDIA GPUs, from nvidia-smi, else from the driver's files under /proc."""
    listing = output_of(
        ["nvidia-smi", "--query-gpu=name,memory.total,compute_cap,driver_version", "--format=csv,noheader,nounits"]
    )
    if listing is not None:
        return parse_gpu_listing(listing)
    return tuple(
        HostGpu(_in_file(folder / "information", r"^Model:\s*(.+)$") or "NVIDIA GPU", None, None, _proc_driver())
        for folder in _folders(Path("/proc/driver/nvidia/gpus"))
    )


def parse_gpu_listing(listing: str) -> tuple[HostGpu, ...]:
    """Read nvidia-smi's `name, memory in MiB, compute capability, driver` lines; `[N/A]` fields become None."""
    rows = [[field.strip() for field in line.split(",")] for line in listing.splitlines()]
    return tuple(
        HostGpu(
            name=name,
            memory_mib=int(memory) if memory.isdigit() else None,
            compute_capability=capability if re.fullmatch(r"\d+\.\d+", capability) else None,
            driver=driver if driver[:1].isdigit() else None,
        )
        for name, memory, capability, driver in (row for row in rows if len(row) == 4)
    )


def driver_version() -> str | None:
    """Version of the NVIDIA kernel driver, such as "580.159.04"."""
    from_smi = next((gpu.driver for gpu in gpus() if gpu.driver), None)
    return from_smi or _proc_driver()


def driver_cuda_version() -> str | None:
    """The newest CUDA version that the installed driver supports, such as "13.0"; starts no GPU context."""
    try:
        version = ctypes.c_int(0)
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def nvcc() -> tuple[str, str] | None:
    """Path and release of the CUDA compiler on PATH, such as ("/usr/local/cuda/bin/nvcc", "13.0")."""
    path = shutil.which("nvcc")
    if path is None:
        return None
    release = re.search(r"release (\d+\.\d+)", output_of([path, "--version"]) or "")
    return path, release.group(1) if release else "unknown release"


def processor() -> str:
    """Model name of the host's processor and the number of logical CPUs that this process may use."""
    model = _in_file(Path("/proc/cpuinfo"), r"^model name\s*:\s*(.+)$") or platform.processor() or platform.machine()
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return f"{model}, {count} logical CPUs"


def _proc_driver() -> str | None:
    return _in_file(Path("/proc/driver/nvidia/version"), r"\b(\d{3}\.\d+(?:\.\d+)?)\b")


def _in_file(path: Path, pattern: str) -> str | None:
    """The group of the first match in a file, if it can be read and there is one."""
    try:
        match = re.search(pattern, path.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return match.group(1).strip() if match else None


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(entry for entry in parent.iterdir() if entry.is_dir())
    except OSError:
        return []
