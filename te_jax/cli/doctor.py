"""`te-jax doctor`: what this machine offers te_jax, what is missing, and how to get it.

Each fact is gathered on its own, and a fact that cannot be had becomes a line of the report instead of an exception:
this command is for machines where something is broken.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import resource
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from te_jax import native
from te_jax._core import host
from te_jax._core.terminal import aligned, key_values, reason_of
from te_jax.ops.implementations import attention_implementation, fp8_implementation, unsupported
from te_jax.quantized import facts_of
from te_jax.recipe import Scaling

DESCRIPTION = """\
Report what te_jax finds on this machine: versions, devices, the implementation that each group of operations takes,
native extensions, FFI API versions, memory kinds, peer access between GPUs, host memory and optional packages; and, for
each thing missing, the command that gets it.

Exit status: 0 when te_jax works with what the machine has, 1 otherwise. With GPUs that means that JAX sees those of one
compute capability, and layers run in FP8 there: at 9.0 by the extension _te_cuda, at 8.9, 10.0 and 12.0 by XLA. Without
a GPU it means that the extension _te_cpu runs; --require gpu makes this 1, too."""

COMPUTE_CAPABILITY = "9.0"
"""Kernels for products use this architecture's own instructions (sm_90a), which no other GPU runs."""

_PRODUCTS = "dense, einsum, gated_mlp, linear_cross_entropy, gemm, te_jax.parallel"
_GROUPED_PRODUCTS = "grouped_dense, grouped_gemm, layers.moe"
_OTHERS = "quantize, norms, activations and losses"

_CORE_PACKAGES = ("te_jax", "jax", "jaxlib", "numpy")
_PLUGIN_PACKAGES = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt")

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Advice:
    """One thing that is missing, and the command or step that gets it."""

    missing: str
    remedy: str


@dataclass(frozen=True)
class Device:
    """One JAX device. `memory_gib` is what JAX may allocate on it; None where the backend does not say."""

    id: int
    platform: str
    kind: str
    compute_capability: str | None
    memory_gib: float | None
    memory_kinds: tuple[str, ...]


@dataclass(frozen=True)
class Chosen:
    """The implementation that operations take here with implementation=None.

    Attributes:
      operations: their names.
      recipes: names of recipes; empty for operations without one.
      implementation: "native", "xla", "reference" or "refused"; of attention the libraries.
    """

    operations: str
    recipes: str
    implementation: str


@dataclass(frozen=True)
class HostMemory:
    """The host memory that offload can use.

    Attributes:
      gib: of the machine.
      lockable_gib: what a process may lock; None for no limit.
      xla_limit_gb: what XLA may pin, where the environment says so.
      to_host, to_device: GB/s of copies between the first GPU and pinned memory; None without a GPU.
    """

    gib: float
    lockable_gib: float | None
    xla_limit_gb: str | None
    to_host: float | None
    to_device: float | None


@dataclass(frozen=True)
class Report:
    """All that doctor found. `failures` maps a part of the report that could not be had to the reason."""

    python: str
    versions: dict[str, str | None]
    train_packages: dict[str, str | None]
    host_gpus: tuple[host.HostGpu, ...]
    driver: str | None
    driver_cuda: str | None
    nvcc: tuple[str, str] | None
    jax_platforms: str | None
    backend: str | None
    cuda_backend_error: str | None
    devices: tuple[Device, ...]
    implementations: tuple[Chosen, ...]
    extensions: tuple[native.ExtensionStatus, ...]
    cuda_libraries: dict[str, str]
    jaxlib_ffi_api: tuple[int, int] | None
    peer_access: tuple[tuple[bool, ...], ...]
    host_memory: HostMemory | None
    failures: dict[str, str]

    @property
    def has_gpu(self) -> bool:
        """Whether the machine has an NVIDIA GPU or its driver."""
        return bool(self.host_gpus or self.driver or any(device.compute_capability for device in self.devices))

    @property
    def capabilities(self) -> frozenset[str]:
        """Compute capabilities of the GPUs that JAX sees."""
        return frozenset(device.compute_capability for device in self.devices if device.compute_capability is not None)

    @property
    def gpu_path_usable(self) -> bool:
        """Whether layers run in FP8 on the GPUs that JAX sees."""
        if len(self.capabilities) != 1:
            return False
        if COMPUTE_CAPABILITY in self.capabilities:
            return any(extension.platform == "cuda" and extension.loaded for extension in self.extensions)
        return all(map(_has_fp8_by_xla, self.capabilities))

    @property
    def cpu_path_usable(self) -> bool:
        """Whether operations run by the extension for CPUs."""
        return any(extension.platform == "cpu" and extension.loaded for extension in self.extensions)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.add_argument("--require", choices=("gpu",), help="exit with 1 where layers do not run in FP8 on a GPU")


def run(args: argparse.Namespace) -> int:
    # By default JAX's first touch of a GPU takes three quarters of its memory: too much for a question, and a failure
    # where a training run already holds it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    report = gather()
    print(as_json(report) if args.json else as_text(report))
    on_cpu = report.cpu_path_usable and report.backend is not None and not report.has_gpu and args.require is None
    return 0 if report.gpu_path_usable or on_cpu else 1


def gather() -> Report:
    """Asks the host, the installed packages, JAX and te_jax.native; raises nothing."""
    failures: dict[str, str] = {}

    def attempt(part: str, ask: Callable[[], _Value], otherwise: _Value) -> _Value:
        try:
            return ask()
        except Exception as error:
            failures[part] = reason_of(error)
            return otherwise

    backend = attempt("JAX", jax.default_backend, None)
    return Report(
        python=f"{platform.python_version()} ({platform.platform()})",
        versions={name: _version(name) for name in (*_CORE_PACKAGES, *_PLUGIN_PACKAGES)},
        train_packages={name: _version(name) for name in attempt("optional packages", _train_packages, ())},
        host_gpus=attempt("GPUs of the host", host.gpus, ()),
        driver=attempt("NVIDIA driver", host.driver_version, None),
        driver_cuda=attempt("CUDA version of the driver", host.driver_cuda_version, None),
        nvcc=attempt("nvcc", host.nvcc, None),
        jax_platforms=os.environ.get("JAX_PLATFORMS"),
        backend=backend,
        cuda_backend_error=_cuda_backend_error() if backend is not None else None,
        devices=attempt("devices", lambda: tuple(map(_describe, jax.devices())), ()) if backend is not None else (),
        implementations=attempt("implementations", implementations, ()) if backend is not None else (),
        extensions=attempt("extensions", native.status, ()),
        cuda_libraries=attempt("CUDA libraries", native.cuda_library_versions, {}),
        jaxlib_ffi_api=attempt("FFI API of jaxlib", native.runtime_ffi_api, None),
        peer_access=attempt("peer access", native.peer_access, ()),
        host_memory=attempt("host memory", _host_memory, None) if backend is not None else None,
        failures=failures,
    )


def advise(report: Report) -> tuple[Advice, ...]:
    """Advice on missing parts of the GPU path and on optional parts, in the order in which to mend them."""
    parts = (_package_advice, _device_advice, _extension_advice, _train_advice)
    return tuple(advice for part in parts for advice in part(report))


def as_json(report: Report) -> str:
    """The report as an indented JSON object, with `gpu_path_usable` and `advice` added."""
    document = dataclasses.asdict(report)
    document["gpu_path_usable"] = report.gpu_path_usable
    document["advice"] = [dataclasses.asdict(item) for item in advise(report)]
    return json.dumps(document, indent=2, default=str)


def as_text(report: Report) -> str:
    """The report as plain text, one titled section after another."""
    sections = [
        ("Versions", _versions_text(report)),
        ("CUDA on this host", _cuda_text(report)),
        (f"Devices (JAX's default backend: {report.backend or 'none'})", _devices_text(report)),
        ("Implementations of operations", _implementations_text(report)),
        ("Native extensions", _extensions_text(report)),
        ("Peer access between GPUs", _peer_text(report)),
        ("Host memory, for offload", _host_memory_text(report)),
        ("Packages of the extra [train]", _train_text(report)),
    ]
    if report.failures:
        sections.append(("Could not be asked", key_values(tuple(report.failures.items()))))
    advice = advise(report)
    if advice:
        lines = "\n".join(f"  - {item.missing}\n      {item.remedy}" for item in advice)
        sections.append(("Missing, and how to get it", lines))
    body = "\n\n".join(f"{title}\n{text}" for title, text in sections)
    return f"{body}\n\n{_verdict(report)}"


# Gathering


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except Exception:  # a half-removed package raises more than PackageNotFoundError
        return None


def _train_packages() -> tuple[str, ...]:
    requirements = importlib.metadata.requires("te_jax") or []
    train = [requirement for requirement in requirements if re.search(r"extra\s*==\s*['\"]train['\"]", requirement)]
    return tuple(re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0] for requirement in train)


def _describe(device: Any) -> Device:
    limit = _ask(lambda: (device.memory_stats() or {}).get("bytes_limit"), None)
    capability = _ask(lambda: device.compute_capability, None)
    return Device(
        id=device.id,
        platform=device.platform,
        kind=device.device_kind,
        compute_capability=None if capability is None else str(capability),
        memory_gib=None if limit is None else round(limit / 2**30, 1),
        memory_kinds=_ask(lambda: tuple(memory.kind for memory in device.addressable_memories()), ()),
    )


def implementations() -> tuple[Chosen, ...]:
    """The implementation that each group of operations takes on JAX's default backend."""
    on_gpu = native.compute_capability() is not None
    implementation = "native" if native.available() else "xla" if on_gpu else "reference"
    return (
        Chosen(_PRODUCTS, "current, delayed", _of_product("tensor")),
        Chosen(_PRODUCTS, "rowwise", _of_product("row")),
        Chosen(_PRODUCTS, "block", _of_product("block_1x128")),
        Chosen(_PRODUCTS, "mxfp8", _of_product("block_1x32")),
        Chosen(_GROUPED_PRODUCTS, "current, delayed, rowwise, block", _of_product("block_1x128", by_xla=False)),
        Chosen(_GROUPED_PRODUCTS, "mxfp8", _of_product("block_1x32", by_xla=False)),
        Chosen(_OTHERS, "", implementation),
        Chosen("attention", "", attention_implementation()),
    )


def _of_product(scaling: Scaling, *, by_xla: bool = True) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report says what is missing
        try:
            return fp8_implementation(None, scaling, unsupported(scaling), by_xla=by_xla)
        except native.NativeUnavailableError:
            return "refused"


def _has_fp8_by_xla(capability: str) -> bool:
    return _is_at_least(capability, facts_of("tensor").xla or (0, 0))


def _is_at_least(capability: str, needed: tuple[int, int]) -> bool:
    return tuple(map(int, capability.split("."))) >= needed


def _ask(question: Callable[[], _Value], otherwise: _Value) -> _Value:
    """The answer of a device. Not every backend has an answer, and each says so with an error of its own."""
    try:
        return question()
    except Exception:
        return otherwise


def _host_memory() -> HostMemory:
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    on_gpu = jax.default_backend() == "gpu"
    to_host, to_device = _copy_rates() if on_gpu else (None, None)
    return HostMemory(
        gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        lockable_gib=None if locked == resource.RLIM_INFINITY else round(locked / 2**30, 1),
        xla_limit_gb=os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"),
        to_host=to_host,
        to_device=to_device,
    )


def _copy_rates(size: int = 2**28) -> tuple[float, float]:
    """GB/s of the best of a few copies of so many bytes, to pinned host memory and back."""
    there = jnp.zeros((size,), jnp.uint8)
    rates = []
    for source, space in ((there, jax.memory.Space.Host), (None, jax.memory.Space.Device)):
        source = jax.block_until_ready(jax.device_put(there, jax.memory.Space.Host)) if source is None else source
        seconds = []
        for _ in range(4):  # the first one also pins memory
            start = time.perf_counter()
            jax.block_until_ready(jax.device_put(source, space))
            seconds.append(time.perf_counter() - start)
        rates.append(round(size / min(seconds) / 1e9, 1))
    return rates[0], rates[1]


def _cuda_backend_error() -> str | None:
    try:
        jax.devices("cuda")
    except Exception as error:
        return reason_of(error)
    return None


# Advice


def _package_advice(report: Report) -> list[Advice]:
    advice = []
    if report.versions.get("te_jax") is None:
        advice.append(Advice("te_jax is not installed as a package", "pip install -e .    (in the checkout)"))
    if report.versions.get("jax") is None or report.versions.get("jaxlib") is None:
        advice.append(Advice("jax or jaxlib is not installed", 'pip install "jax>=0.10.2,<0.13"'))
    elif report.backend is None:
        setting = f" with JAX_PLATFORMS={report.jax_platforms}" if report.jax_platforms else ""
        remedy = "unset JAX_PLATFORMS" if report.jax_platforms else 'pip install --upgrade "jax>=0.10.2,<0.13"'
        advice.append(Advice(f"JAX starts no backend{setting}", remedy))
    return advice


def _device_advice(report: Report) -> list[Advice]:
    jax_gpus = [device for device in report.devices if device.compute_capability is not None]
    plugins = [name for name in _PLUGIN_PACKAGES if name.endswith("plugin") and report.versions.get(name)]
    platforms, jax_version = report.jax_platforms, report.versions.get("jax")
    kinds = ", ".join(sorted({f"{device.kind} ({device.compute_capability})" for device in jax_gpus}))
    if not report.has_gpu:
        return []
    if len(report.capabilities) > 1:
        missing = f"JAX sees GPUs of several compute capabilities, {kinds}, and te_jax chooses kernels for one"
        remedy = "set CUDA_VISIBLE_DEVICES to GPUs of one capability"
    elif COMPUTE_CAPABILITY in report.capabilities or (jax_gpus and all(map(_has_fp8_by_xla, report.capabilities))):
        return []
    elif jax_gpus:
        missing = f"no GPU that multiplies FP8: JAX sees {kinds}"
        remedy = "use recipe=None, or a GPU of compute capability 8.9 or later"
    elif not plugins:
        missing = "the machine has an NVIDIA GPU, but JAX has no CUDA plugin"
        remedy = 'pip install "jax[cuda13]"'
    elif platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        missing, remedy = f"JAX_PLATFORMS={platforms} hides the GPU", "unset JAX_PLATFORMS"
    elif jax_version and not any(_same_release(report.versions[name], jax_version) for name in plugins):
        plugin_versions = ", ".join(f"{name} {report.versions[name]}" for name in plugins)
        missing = f"JAX {jax_version} and its CUDA plugin ({plugin_versions}) are of different releases"
        remedy = f'pip install "jax[cuda13]=={jax_version}"'
    else:
        reason = f": {report.cuda_backend_error}" if report.cuda_backend_error else ""
        missing = f"JAX's CUDA plugin is installed but starts no GPU{reason}"
        remedy = (
            "nvidia-smi    (is the driver running, is CUDA_VISIBLE_DEVICES right?), then "
            'pip install --upgrade --force-reinstall "jax[cuda13]"'
        )
    return [Advice(missing, remedy)]


def _same_release(first: str | None, second: str | None) -> bool:
    """JAX's rule: plugin and jaxlib agree in the first three version numbers."""
    return first is not None and second is not None and first.split(".")[:3] == second.split(".")[:3]


def _extension_advice(report: Report) -> list[Advice]:
    advice = []
    for extension in report.extensions:
        without_kernels = report.capabilities and not any(_is_at_least(one, (9, 0)) for one in report.capabilities)
        if extension.loaded or (extension.platform == "cuda" and (without_kernels or not report.has_gpu)):
            continue
        # Without --editable, a checkout that Python imports would hide what is installed.
        install = "pip install --force-reinstall --no-deps --editable ."
        if extension.platform == "cuda" and report.nvcc is None:
            remedy = (
                "install the CUDA toolkit (Debian and Ubuntu, from NVIDIA's repository: apt-get install "
                f"cuda-toolkit-13-0), put nvcc on PATH, then: TE_JAX_CUDA=ON {install}"
            )
        elif extension.platform == "cuda":
            remedy = f"TE_JAX_CUDA=ON {install}    (in the checkout)"
        else:
            remedy = f"{install}    (in the checkout; needs a C++ compiler)"
        reason = f": {extension.problem}" if extension.problem else ""
        advice.append(Advice(f"{extension.module} is not loaded{reason}", remedy))
    return advice


def _train_advice(report: Report) -> list[Advice]:
    missing = [name for name, version in report.train_packages.items() if version is None]
    if not missing:
        return []
    return [Advice(f"te-jax train needs {', '.join(missing)}", f"pip install {' '.join(missing)}")]


# Text


def _versions_text(report: Report) -> str:
    installed = [(name, report.versions.get(name)) for name in (*_CORE_PACKAGES, *_PLUGIN_PACKAGES)]
    shown = [(name, version or "not installed") for name, version in installed if version or name in _CORE_PACKAGES]
    return key_values([("python", report.python), *shown])


def _cuda_text(report: Report) -> str:
    supports = f" (supports CUDA up to {report.driver_cuda})" if report.driver_cuda else ""
    pairs = [("driver", f"{report.driver}{supports}" if report.driver else "none found")]
    pairs.append(("nvcc", f"{report.nvcc[1]}, {report.nvcc[0]}" if report.nvcc else "not on PATH"))
    for extension in report.extensions:
        if extension.platform == "cuda":
            pairs += [(key, value) for key, value in extension.build.items() if "cuda" in key]
    pairs += report.cuda_libraries.items()
    for number, gpu in enumerate(report.host_gpus):
        memory = f", {gpu.memory_mib / 1024:.1f} GiB" if gpu.memory_mib else ""
        capability = f", compute capability {gpu.compute_capability}" if gpu.compute_capability else ""
        pairs.append((f"GPU {number}", f"{gpu.name}{memory}{capability}"))
    return key_values(pairs)


def _devices_text(report: Report) -> str:
    if not report.devices:
        return "  none"
    headings = ("id", "platform", "kind", "compute capability", "memory for JAX, GiB", "memory kinds")
    rows = []
    for device in report.devices:
        memory = "–" if device.memory_gib is None else f"{device.memory_gib:.1f}"
        kinds = ", ".join(device.memory_kinds) or "–"
        rows.append((str(device.id), device.platform, device.kind, device.compute_capability or "–", memory, kinds))
    return aligned(headings, rows)


def _implementations_text(report: Report) -> str:
    if not report.implementations:
        return "  not known"
    headings = ("operations", "recipes", "implementation")
    return aligned(headings, [dataclasses.astuple(row) for row in report.implementations])


def _extensions_text(report: Report) -> str:
    lines = [f"  FFI API of the installed jaxlib: {_api(report.jaxlib_ffi_api)}"]
    for extension in report.extensions:
        lines.append(f"  {extension.module} ({extension.platform}): {'loaded' if extension.loaded else 'not loaded'}")
        details = [("built for FFI API", _api(extension.ffi_api))] if extension.ffi_api else []
        details += extension.build.items()
        if extension.problem:
            details.append(("problem", extension.problem))
        if details:
            lines.append(key_values(details, indent=4))
    return "\n".join(lines)


def _api(version: tuple[int, int] | None) -> str:
    return "unknown" if version is None else f"{version[0]}.{version[1]}"


def _host_memory_text(report: Report) -> str:
    memory = report.host_memory
    if memory is None:
        return "  not known"
    facts = [
        ("memory", f"{memory.gib} GiB"),
        ("may be locked", "all" if memory.lockable_gib is None else f"{memory.lockable_gib} GiB (ulimit -l)"),
    ]
    if memory.xla_limit_gb is not None:
        facts.append(("XLA may pin", f"{memory.xla_limit_gb} GB (XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB)"))
    if memory.to_host is not None:
        facts.append(("copies", f"{memory.to_host} GB/s to the host, {memory.to_device} GB/s to the GPU"))
    return key_values(tuple(facts))


def _peer_text(report: Report) -> str:
    if len(report.peer_access) < 2:
        return "  fewer than two GPUs"
    headings = ("from \\ to", *(str(number) for number in range(len(report.peer_access))))
    rows = [
        (str(number), *("self" if column == number else "yes" if cell else "no" for column, cell in enumerate(row)))
        for number, row in enumerate(report.peer_access)
    ]
    return aligned(headings, rows)


def _train_text(report: Report) -> str:
    if not report.train_packages:
        return "  unknown: te_jax is not installed as a package"
    return key_values([(name, version or "not installed") for name, version in report.train_packages.items()])


def _verdict(report: Report) -> str:
    """One line that says whether te_jax works here, and what to type next."""
    if report.gpu_path_usable:
        works, recipe = "te_jax works on this machine's GPU.", "block"
        if COMPUTE_CAPABILITY not in report.capabilities:
            works, recipe = "te_jax works on this machine's GPU, by XLA.", "current"
        trial = f"te-jax train --recipe {recipe} --compare"
    elif report.cpu_path_usable:
        gpu = "not on its GPU" if report.has_gpu else "it has no NVIDIA GPU"
        works, trial = f"te_jax works on this machine's CPU; {gpu}.", "te-jax train"
    else:
        works, trial = "te_jax works, but slowly, without its kernels.", "te-jax train"
    advice = advise(report)
    return f"{works} Next: {advice[0].remedy if advice else trial}"
