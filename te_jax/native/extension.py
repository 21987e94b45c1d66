"""Finding, checking and registering the extension modules `te_jax._te_cpu` and `te_jax._te_cuda`."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re
import struct
import threading
import types
import warnings
from pathlib import Path
from typing import Any, Literal

import jax
import jax.export
import numpy as np

from te_jax._version import __version__
from te_jax.native import cuda_libraries

Implementation = Literal["native", "xla", "reference"]

_MODULES = {"cpu": "te_jax._te_cpu", "cuda": "te_jax._te_cuda"}
_XLA_PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}
# Targets that te_jax.ops.attention calls: XLA's own, and FlashAttention 3's, which it registers.
_CUDNN_TARGETS = tuple(
    f"__cudnn$fmha{name}{direction}" for name in ("Softmax", "ScaleBiasSoftmax") for direction in ("", "Backward")
)
FA3_TARGETS = tuple(f"te_jax_fa3_{kind}{direction}" for kind in ("", "varlen_") for direction in ("fwd", "bwd"))
_REINSTALL = "reinstall te_jax (`pip install --force-reinstall --no-deps --editable .` in its checkout)"


class NativeUnavailableError(RuntimeError):
    """An implementation cannot run here, or none multiplies as a recipe says; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class ExtensionStatus:
    """The state of one extension module.

    Attributes:
      platform: "cpu" or "cuda".
      module: its Python name.
      built: whether the installation contains the module.
      loaded: whether it was imported and passed all checks.
      problem: why it is not loaded, and the way out; None if it is loaded.
      ffi_api: XLA FFI API version (major, minor) that it was built against; None if it could not be imported.
      build: versions of te_jax, jaxlib's headers, the compiler and CUDA.
    """

    platform: str
    module: str
    built: bool
    loaded: bool
    problem: str | None
    ffi_api: tuple[int, int] | None
    build: dict[str, str]


@functools.cache
def runtime_ffi_api() -> tuple[int, int]:
    """The XLA FFI API version of the installed jaxlib, as (major, minor)."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    text = header.read_text(encoding="utf-8")
    matches = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    if matches[0] is None or matches[1] is None:
        raise NativeUnavailableError(f"{header} does not state an XLA FFI API version; reinstall jaxlib")
    return int(matches[0][1]), int(matches[1][1])


@functools.cache
def _load(platform: str) -> tuple[types.ModuleType | None, ExtensionStatus]:
    name = _MODULES[platform]

    def failed(problem: str, *, built: bool = True, ffi_api=None, build=None):
        return None, ExtensionStatus(platform, name, built, False, problem, ffi_api, build or {})

    if (spec := importlib.util.find_spec(name)) is None:
        needs = "a C++ compiler" if platform == "cpu" else "nvcc on PATH and TE_JAX_CUDA=ON"
        checkout = Path(__file__).parents[2]
        if (checkout / "CMakeLists.txt").exists():  # the working directory may hide a te_jax that is installed
            return failed(
                f"te_jax is imported from {checkout}, a checkout without {name}; run `pip install --editable .` in it, "
                f"with {needs}, or start Python in a folder where it does not hide an installed te_jax",
                built=False,
            )
        return failed(f"te_jax was installed without {name}; install it again with {needs}", built=False)
    if truncation := _truncation(spec.origin):
        return failed(f"{name} cannot be loaded: {spec.origin} {truncation}; {_REINSTALL}")
    if platform == "cuda" and (missing := cuda_libraries.load()):
        return failed(f"{name} needs {missing}")
    try:
        module = importlib.import_module(name)
        ffi_api, build = tuple(module.ffi_api), dict(module.build())
        built_for, built_against = build["te_jax"], build["jaxlib headers"]
    except Exception as error:
        versions = f"te_jax {__version__} and jaxlib {_jaxlib_version()}"
        return failed(f"{name} cannot be loaded under {versions} ({type(error).__name__}: {error}); {_REINSTALL}")

    if built_for != __version__:
        problem = f"{name} was built for te_jax {built_for}, but this is te_jax {__version__}; {_REINSTALL}"
        return failed(problem, ffi_api=ffi_api, build=build)
    runtime = runtime_ffi_api()
    # XLA accepts handlers of its own major version that are not newer than itself.
    if ffi_api[0] != runtime[0] or ffi_api[1] > runtime[1]:
        problem = (
            f"{name} speaks XLA FFI {ffi_api[0]}.{ffi_api[1]} (headers of jaxlib {built_against}), but "
            f"jaxlib {_jaxlib_version()} speaks {runtime[0]}.{runtime[1]}; upgrade jaxlib, or {_REINSTALL}"
        )
        return failed(problem, ffi_api=ffi_api, build=build)
    return module, ExtensionStatus(platform, name, True, True, None, ffi_api, build)


def _truncation(path: str | None) -> str | None:
    """The truncation of an ELF file whose header counts sections beyond its end. Loading it would be a SIGBUS."""
    try:
        with open(path or "", "rb") as file:
            header, size = file.read(64), os.fstat(file.fileno()).st_size
    except OSError:
        return None
    if len(header) < 64 or not header.startswith(b"\x7fELF"):
        return None  # the loader says so
    (sections,), (entry, count) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
    whole = sections + entry * count
    return f"is truncated to {size} of {whole} bytes" if size < whole else None


def _jaxlib_version() -> str:
    return importlib.metadata.version("jaxlib")


def extension_module(platform: str) -> types.ModuleType:
    """The extension for devices of a platform, "cpu" or "gpu", for its functions beside the targets.

    Raises:
      NativeUnavailableError: it cannot run here.
    """
    module, state = _load("cuda" if platform == "gpu" else "cpu")
    problem = _problem_on_default_backend()[0] if platform == jax.default_backend() else None
    if module is None or problem is not None:
        raise NativeUnavailableError(problem or state.problem)
    return module


def status() -> tuple[ExtensionStatus, ...]:
    """The state of both extensions. Loads them; starts no backend."""
    return tuple(_load(platform)[1] for platform in _MODULES)


def peer_access() -> tuple[tuple[bool, ...], ...]:
    """peer_access()[i][j]: whether GPU i can read GPU j's memory directly. Empty without GPUs or the extension."""
    module, _ = _load("cuda")
    return tuple(tuple(row) for row in module.peer_access()) if module else ()


def _supports(architectures: str, capability: str) -> bool:
    """Whether code for CMake's architecture list runs on a device of a compute capability such as "9.0"."""
    major, minor = (int(part) for part in capability.split("."))
    device = 10 * major + minor
    for entry in re.split("[;, ]+", architectures):
        match = re.fullmatch(r"(\d+)([af]?)(-real|-virtual)?", entry)
        if match is None:  # "native", "all": built for this machine or for every one
            return True
        number, specific, kind = int(match[1]), match[2], match[3]
        if number == device:
            return True
        if not specific and kind != "-real" and number <= device:  # carries PTX
            return True
        if not specific and number // 10 == major and number <= device:
            return True
    return False


def _is_cuda(device: Any) -> bool:
    return device.platform == "gpu" and "cuda" in device.client.platform_version.lower()


def _gpus() -> tuple[tuple[str, str], ...]:
    """(kind, compute capability) of the default backend's CUDA GPUs."""
    return tuple((gpu.device_kind, str(gpu.compute_capability)) for gpu in jax.local_devices() if _is_cuda(gpu))


def gpu_mixture() -> str | None:
    """Why no choice of kernels suits all GPUs here, if they have several compute capabilities."""
    gpus = {f"{kind} ({capability})": capability for kind, capability in _gpus()}
    if len(set(gpus.values())) < 2:
        return None
    return (
        f"JAX sees GPUs of several compute capabilities, {' and '.join(gpus)}, and te_jax chooses kernels for one: set "
        "CUDA_VISIBLE_DEVICES to GPUs of one capability"
    )


def _problem_of_gpu(kind: str, capability: str, products: bool) -> str | None:
    """Why GPUs of this compute capability do not run the kernels, however they are compiled."""
    if products and capability != "9.0":
        what = "kernels for products are for 9.0 alone (H100, H200)"
    elif int(capability.partition(".")[0]) < 9:
        what = "kernels are for 9.0 and later"
    else:
        return None
    return f"{kind} has compute capability {capability}, and te_jax's {what}: use implementation='reference'"


@functools.cache
def _problem_on_default_backend(products: bool = False) -> tuple[str | None, bool]:
    """(why native kernels cannot run on the default backend or None, whether that deserves a warning).

    Args:
      products: of kernels that multiply matrices, rather than of all others.
    """
    if not (gpus := _gpus()):
        platform = jax.default_backend()
        if platform != "cpu":
            return f"te_jax has no native kernels for {platform!r} devices; use implementation='reference'", False
        problem = _load("cpu")[1].problem
        return problem, problem is not None
    if mixture := gpu_mixture():
        return mixture, True
    kind, capability = gpus[0]
    if problem := _problem_of_gpu(kind, capability, products):
        return problem, False
    module, state = _load("cuda")
    if module is None:
        return state.problem, True
    if not _supports(architectures := state.build["cuda architectures"], capability):
        problem = (
            f"te_jax._te_cuda holds code for CUDA architectures {architectures}, and {kind} has compute capability "
            f"{capability}: build it without CMAKE_CUDA_ARCHITECTURES, or use implementation='reference'"
        )
        return problem, True
    return None, False


def available() -> bool:
    """Whether operations that multiply no matrices run native kernels on the default backend with implementation=None.
    Starts the backend."""
    return _problem_on_default_backend()[0] is None


@functools.cache
def _warn_once(problem: str) -> None:
    warnings.warn(f"te_jax runs no native kernel: {problem}", RuntimeWarning, stacklevel=4)


def has_gpu() -> bool:
    """Whether JAX has CUDA GPUs here, as its default backend or beside it. Starts JAX's backends."""
    try:
        return bool(jax.local_devices(backend="cuda"))
    except RuntimeError:
        return False


@functools.cache
def compute_capability() -> tuple[int, int] | None:
    """CUDA compute capability of the default backend's devices, the lowest of several; None without CUDA GPUs. Starts
    the backend."""
    capabilities = [tuple(int(part) for part in capability.split(".")) for _, capability in _gpus()]
    return min(((major, minor) for major, minor in capabilities), default=None)


def device_name() -> str:
    """The default backend's devices for a sentence, such as "NVIDIA L40S (compute capability 8.9)"."""
    names = dict.fromkeys(f"{kind} (compute capability {capability})" for kind, capability in _gpus())
    return " and ".join(names) or f"this {jax.default_backend()}"


def validate_implementation(implementation: Any) -> None:
    """Raises ValueError unless it is None, "native", "xla" or "reference"."""
    if implementation not in (None, "native", "xla", "reference"):
        raise ValueError(f"implementation is {implementation!r}; it must be None, 'native', 'xla' or 'reference'")


def takes(dtype: jax.typing.DTypeLike) -> bool:
    """Whether native kernels read and write values of this floating dtype, on a GPU and on a CPU alike.

    They do for float32 and bfloat16. For float16 there are products of plain operands, cuBLASLt's, and nothing else:
    XLA computes the rest.
    """
    return np.dtype(dtype) != np.float16


def use_native(
    implementation: Implementation | None,
    problem: str | None = None,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    products: bool = False,
) -> bool:
    """Whether to run the native kernel rather than the reference, which XLA compiles.

    Args:
      implementation: None uses the native kernel where there is one, else the reference, with one warning for each
        distinct problem in a process; "native", "xla" and "reference" never fall back. FP8 products tell the last two
        apart: see `te_jax.ops.gemm`.
      problem: why there is no native kernel for these operands, and the way out; None if there is one.
      dtype: of the values, if the kernel is for those that it `takes`. Others fall back without a warning.
      products: whether the kernel multiplies matrices. Such kernels are for compute capability 9.0, others also for
        later ones.

    Raises:
      ValueError: for any other name.
      NativeUnavailableError: for "native" where it cannot run.
    """
    validate_implementation(implementation)
    if implementation in ("xla", "reference"):
        return False
    of_backend, surprising = _problem_on_default_backend(products)
    if of_backend is None and dtype is not None and not takes(dtype):
        of_backend, surprising = _problem_of_dtype(dtype), False
    problem, surprising = (of_backend, surprising) if of_backend else (problem, True)
    if problem is None:
        return True
    if implementation == "native":
        raise NativeUnavailableError(problem)
    if surprising:
        _warn_once(problem)
    return False


def _problem_of_dtype(dtype: jax.typing.DTypeLike) -> str:
    return (
        f"no native kernel takes {np.dtype(dtype)}: cast to bfloat16 or float32, or leave implementation out, for what "
        "XLA compiles"
    )


def _lend_blas(module: types.ModuleType) -> None:
    """Gives the CPU kernels the BLAS of scipy, which JAX depends on. Kernels that need it say so if it is missing."""
    cython_blas = importlib.import_module("scipy.linalg.cython_blas")
    if sgemm := getattr(cython_blas, "__pyx_capi__", {}).get("sgemm"):
        module.use_sgemm(sgemm)


_registered: dict[str, tuple[str, ...]] = {}  # targets by platform
_registering = threading.Lock()


def register() -> tuple[str, ...]:
    """Registers every target with XLA on the platforms that JAX has started. Idempotent and thread-safe.

    Operations call it. A process that runs a program from `jax.export` and no operation of te_jax must call it itself.

    Returns:
      The names of the targets; empty without the extensions.
    """
    # Only after a backend has started: before, XLA queues targets, and one that it rejects would keep the backend from
    # starting.
    with _registering:
        for platform in ("cpu", "cuda") if has_gpu() else ("cpu",):
            if platform in _registered:
                continue
            module, _ = _load(platform)
            handlers = module.registrations() if module else {}
            if module and platform == "cpu":
                _lend_blas(module)
            for target, handler in handlers.items():
                jax.ffi.register_ffi_target(target, handler, platform=_XLA_PLATFORMS[platform])
            _registered[platform] = tuple(handlers)
        return tuple(dict.fromkeys(target for targets in _registered.values() for target in targets))


def buffers(target: str) -> str:
    """The names of a target's operands and results, in the order of its calls: "(x, y) -> (z)".

    Raises:
      NativeUnavailableError: there is no extension here.
    """
    for platform in _MODULES:
        module, _ = _load(platform)
        if module is not None:
            return module.buffers()[target]
    raise NativeUnavailableError(
        f"{target} is a target of the extensions, and this installation has none: {_REINSTALL}"
    )


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """The `disabled_checks` that `jax.export.export` needs to export a function that calls native kernels or cuDNN.

        exported = jax.export.export(jax.jit(fn), disabled_checks=te_jax.native.export_checks())(*args)

    JAX asks for it because custom calls promise no compatibility: run the program with the te_jax that exported it.
    """
    of_attention = (*_CUDNN_TARGETS, *FA3_TARGETS)
    return [jax.export.DisabledSafetyCheck.custom_call(target) for target in (*register(), *of_attention)]
