"""The build backend: scikit-build-core, plus CUDA headers from PyPI where nvcc stands alone.

A compiler without headers is common: distributions and CI images often carry nvcc and the CUDA runtime but not
cuBLAS. The build then asks for NVIDIA's own wheels of the same release, which pip puts into the isolated build
environment. With TE_JAX_CUDA=OFF, without nvcc, or with a complete toolkit nothing is added, and without a GPU only
with TE_JAX_CUDA=ON.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from scikit_build_core import build as _build
from scikit_build_core.build import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    # Without these pip builds the wheel for its metadata, and says "Preparing metadata" for minutes.
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

# Header that shows a library's development files are there -> the wheel that carries them.
_WHEELS = {
    "cuda_runtime.h": "nvidia-cuda-runtime",
    "cublasLt.h": "nvidia-cublas",
}


def _setting(config_settings: dict[str, Any] | None) -> str:
    """TE_JAX_CUDA from `--config-settings=cmake.define.TE_JAX_CUDA=…`, CMAKE_ARGS or the environment, in that order."""
    for key, value in (config_settings or {}).items():
        if key.endswith("cmake.define.TE_JAX_CUDA"):
            return str(value).upper()
    found = re.search(r"-DTE_JAX_CUDA(?::\w+)?=(\w+)", os.environ.get("CMAKE_ARGS", ""))
    return (found[1] if found else os.environ.get("TE_JAX_CUDA", "AUTO")).upper()


def _has_gpu() -> bool:
    smi = shutil.which("nvidia-smi")
    return smi is not None and subprocess.run([smi, "-L"], capture_output=True, check=False).returncode == 0


def _cuda_wheels(config_settings: dict[str, Any] | None) -> list[str]:
    setting = _setting(config_settings)
    if setting == "OFF" or (setting == "AUTO" and not _has_gpu()):
        return []
    named = os.environ.get("CUDACXX")
    if named:
        nvcc = shutil.which(named) or shutil.which(named.partition(" ")[0])  # CMake takes arguments behind it
        if nvcc is None:
            raise FileNotFoundError(f"CUDACXX is {named}, where no program is: name nvcc's path or leave CUDACXX unset")
    else:
        nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        return []
    # --dryrun prints the toolkit root even where nvcc on PATH is a wrapper script.
    dryrun = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, check=False)
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    root = re.search(r"^#\$ TOP=(.+)$", dryrun.stderr, re.MULTILINE)
    release = re.search(r"release (\d+\.\d+)", version.stdout)
    if root is None or release is None:
        return []
    include = [path / "include" for path in (Path(root[1]), *Path(root[1]).glob("targets/*"))]
    return [
        f"{wheel}=={release[1]}.*"
        for header, wheel in _WHEELS.items()
        if not any((directory / header).exists() for directory in include)
    ]


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """PEP 517 hook: what scikit-build-core needs, and the CUDA wheels whose headers the toolkit lacks."""
    return _build.get_requires_for_build_wheel(config_settings) + _cuda_wheels(config_settings)


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    """PEP 660 hook: the same as for a wheel."""
    return _build.get_requires_for_build_editable(config_settings) + _cuda_wheels(config_settings)
