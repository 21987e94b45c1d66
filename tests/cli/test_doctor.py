"""`te-jax doctor`: what it reports, what it advises, and that nothing broken makes it fail."""

import argparse
import dataclasses
import importlib.metadata
import json
import subprocess

import jax
import pytest
from gpus import documented

from te_jax import native
from te_jax._core import host
from te_jax._core.terminal import aligned
from te_jax.cli import doctor
from te_jax.ops import _fa3_attention


def report(**changes):
    """A report of a machine with one usable H200, changed as the test says."""
    facts = {
        "python": "3.12.3 (Linux)",
        "versions": {
            "te_jax": "0.3.0",
            "jax": "0.11.2",
            "jaxlib": "0.11.2",
            "numpy": "2.4.0",
            "jax-cuda13-plugin": "0.11.2",
            "jax-cuda13-pjrt": "0.11.2",
            "jax-cuda12-plugin": None,
            "jax-cuda12-pjrt": None,
        },
        "train_packages": {"optax": "0.2.8", "tqdm": "4.66"},
        "host_gpus": (host.HostGpu("NVIDIA H200", 143771, "9.0", "580.159.04"),),
        "driver": "580.159.04",
        "driver_cuda": "13.0",
        "nvcc": ("/usr/local/cuda/bin/nvcc", "13.0"),
        "jax_platforms": None,
        "backend": "gpu",
        "cuda_backend_error": None,
        "devices": (gpu(0, "9.0"),),
        "implementations": (doctor.Chosen("dense, gemm", "block", "native"), doctor.Chosen("norms", "", "native")),
        "extensions": (extension("cpu"), extension("cuda")),
        "cuda_libraries": {"cuBLAS": "13.1.1", "cuDNN": "9.19.1"},
        "jaxlib_ffi_api": (0, 3),
        "peer_access": ((True,),),
        "host_memory": doctor.HostMemory(1511.7, None, None, 52.1, 51.8),
        "failures": {},
    }
    return doctor.Report(**{**facts, **changes})


def gpu(number, capability, kind="NVIDIA H200"):
    return doctor.Device(number, "gpu", kind, capability, 104.6, ("device", "pinned_host"))


def cpu():
    return doctor.Device(0, "cpu", "cpu", None, None, ("device",))


def extension(platform, problem=None):
    build = {"version": "0.3.0", "cuda runtime": "13.0"}
    loaded = problem is None
    return native.ExtensionStatus(platform, f"te_jax._te_{platform}", loaded, loaded, problem, (0, 3), build)


def test_the_text_has_every_fact():
    assert doctor.as_text(report()).splitlines() == [
        "Versions",
        "  python             3.12.3 (Linux)",
        "  te_jax             0.3.0",
        "  jax                0.11.2",
        "  jaxlib             0.11.2",
        "  numpy              2.4.0",
        "  jax-cuda13-plugin  0.11.2",
        "  jax-cuda13-pjrt    0.11.2",
        "",
        "CUDA on this host",
        "  driver        580.159.04 (supports CUDA up to 13.0)",
        "  nvcc          13.0, /usr/local/cuda/bin/nvcc",
        "  cuda runtime  13.0",
        "  cuBLAS        13.1.1",
        "  cuDNN         9.19.1",
        "  GPU 0         NVIDIA H200, 140.4 GiB, compute capability 9.0",
        "",
        "Devices (JAX's default backend: gpu)",
        "  id  platform  kind         compute capability  memory for JAX, GiB  memory kinds",
        "  --  --------  -----------  ------------------  -------------------  -------------------",
        "   0  gpu       NVIDIA H200                 9.0                104.6  device, pinned_host",
        "",
        "Implementations of operations",
        "  operations   recipes  implementation",
        "  -----------  -------  --------------",
        "  dense, gemm  block    native",
        "  norms                 native",
        "",
        "Native extensions",
        "  FFI API of the installed jaxlib: 0.3",
        "  te_jax._te_cpu (cpu): loaded",
        "    built for FFI API  0.3",
        "    version            0.3.0",
        "    cuda runtime       13.0",
        "  te_jax._te_cuda (cuda): loaded",
        "    built for FFI API  0.3",
        "    version            0.3.0",
        "    cuda runtime       13.0",
        "",
        "Peer access between GPUs",
        "  fewer than two GPUs",
        "",
        "Host memory, for offload",
        "  memory         1511.7 GiB",
        "  may be locked  all",
        "  copies         52.1 GB/s to the host, 51.8 GB/s to the GPU",
        "",
        "Packages of the extra [train]",
        "  optax  0.2.8",
        "  tqdm   4.66",
        "",
        "te_jax works on this machine's GPU. Next: te-jax train --recipe block --compare",
    ]


def test_the_text_says_what_is_not_there():
    text = doctor.as_text(
        report(
            **versions(te_jax=None),
            train_packages={},
            devices=(),
            extensions=(extension("cpu", "no compiler"), extension("cuda")),
        )
    )
    for line in (
        "  te_jax             not installed",
        "    problem            no compiler",
        "  unknown: te_jax is not installed as a package",
        "Missing, and how to get it",
        "  - te_jax is not installed as a package",
        "      pip install -e .    (in the checkout)",
    ):
        assert line in text.splitlines()
    assert text.splitlines()[-1] == (
        "te_jax works, but slowly, without its kernels. Next: pip install -e .    (in the checkout)"
    )


def versions(**changes):
    """A version for each package, with the changes of the test; "plugin" is JAX's plugin for CUDA."""
    plugin = {"jax-cuda13-plugin": changes.pop("plugin")} if "plugin" in changes else {}
    return {"versions": report().versions | changes | plugin}


NO_CUDA = "te_jax was installed without te_jax._te_cuda"
ON_CPU = {"devices": (cpu(),), "backend": "cpu"}
WITHOUT_CUDA = {"extensions": (extension("cpu"), extension("cuda", NO_CUDA))}
NO_JAX = 'pip install "jax>=0.10.2,<0.13"'
ADVICE = {
    "no jax": ({**versions(jax=None), "backend": None, "devices": ()}, "jax or jaxlib is not installed", NO_JAX),
    "no backend": ({"backend": None, "devices": ()}, "JAX starts no backend", 'pip install --upgrade "jax>=0.10.2'),
    "no backend of that name": (
        {"backend": None, "devices": (), "jax_platforms": "cuda"},
        "JAX starts no backend with JAX_PLATFORMS=cuda",
        "unset JAX_PLATFORMS",
    ),
    "no plugin": ({**versions(plugin=None), **ON_CPU}, "", 'pip install "jax[cuda13]"'),
    "another release": ({**versions(plugin="0.11.1"), **ON_CPU}, "0.11.1", 'pip install "jax[cuda13]==0.11.2"'),
    "a later build": ({**versions(plugin="0.11.2.post1"), **ON_CPU}, "starts no GPU", ""),
    "a GPU that is hidden": ({**ON_CPU, "jax_platforms": "cpu"}, "", "unset JAX_PLATFORMS"),
    "a GPU that does not start": (
        {**ON_CPU, "cuda_backend_error": "RuntimeError: CUDA_ERROR_NO_DEVICE"},
        "CUDA_ERROR_NO_DEVICE",
        "nvidia-smi",
    ),
    "a GPU that does not start when asked for": ({**ON_CPU, "jax_platforms": "gpu,cpu"}, "starts no GPU", "nvidia-smi"),
    "an older GPU": (
        {"devices": (gpu(0, "8.0", "NVIDIA Other"),), **WITHOUT_CUDA},
        "no GPU that multiplies FP8: JAX sees NVIDIA Other (8.0)",
        "recipe=None",
    ),
    "a newer GPU": ({"devices": (gpu(0, "12.0"),), **WITHOUT_CUDA}, NO_CUDA, "TE_JAX_CUDA=ON pip install"),
    "several kinds of GPUs": (
        {"devices": (gpu(0, "9.0"), gpu(1, "8.9", kind="NVIDIA L40S"))},
        "NVIDIA H200 (9.0), NVIDIA L40S (8.9)",
        "set CUDA_VISIBLE_DEVICES to GPUs of one capability",
    ),
    "no extension": (WITHOUT_CUDA, NO_CUDA, "TE_JAX_CUDA=ON pip install"),
    "no extension and no compiler": ({**WITHOUT_CUDA, "nvcc": None}, NO_CUDA, "cuda-toolkit"),
    "a checkout that was not built": (
        {"extensions": (extension("cpu", "run `pip install --editable .` in it"), extension("cuda")), "nvcc": None},
        "",
        "pip install --force-reinstall --no-deps --editable .    (in the checkout; needs a C++ compiler)",
    ),
    "packages of train": (
        {"train_packages": {"optax": "0.2.8", "tqdm": None, "matplotlib": None}},
        "te-jax train needs tqdm, matplotlib",
        "pip install tqdm matplotlib",
    ),
}
"""What differs from a complete machine, what is said to be missing, and how to get it."""

UNUSABLE = {"no plugin", "an older GPU", "several kinds of GPUs", "no extension"}


@pytest.mark.parametrize("name", ADVICE)
def test_what_is_missing_is_told_first_with_the_way_to_get_it(name):
    changes, missing, remedy = ADVICE[name]
    found = report(**changes)
    advice = doctor.advise(found)[0]
    assert missing in advice.missing
    assert remedy in advice.remedy
    assert "==None" not in advice.remedy
    if changes.get("jax_platforms") == "gpu,cpu":
        assert "JAX_PLATFORMS" not in advice.remedy
    if name in UNUSABLE:
        assert not found.gpu_path_usable


@pytest.mark.parametrize(
    ("changes", "last"),
    [
        ({}, "te_jax works on this machine's GPU. Next: te-jax train --recipe block --compare"),
        (
            {"devices": (gpu(0, "8.9"),), **WITHOUT_CUDA},
            "te_jax works on this machine's GPU, by XLA. Next: te-jax train --recipe current --compare",
        ),
        (
            {"devices": (gpu(0, "12.0"),)},
            "te_jax works on this machine's GPU, by XLA. Next: te-jax train --recipe current --compare",
        ),
        (
            {**versions(plugin=None), **ON_CPU, "host_gpus": (), "driver": None, **WITHOUT_CUDA},
            "te_jax works on this machine's CPU; it has no NVIDIA GPU. Next: te-jax train",
        ),
    ],
    ids=["GPU", "GPU of XLA", "newer GPU", "CPU"],
)
def test_a_machine_that_lacks_nothing_needs_no_advice(changes, last):
    found = report(**changes)
    assert doctor.advise(found) == ()
    assert found.gpu_path_usable == ("this machine's GPU" in last)
    assert doctor.as_text(found).splitlines()[-1] == last


_LAPTOP = {**ON_CPU, "host_gpus": (), "driver": None, **WITHOUT_CUDA}


@pytest.mark.parametrize(
    ("changes", "status", "with_gpu_required"),
    [
        ({}, 0, 0),
        (_LAPTOP, 0, 1),
        (_LAPTOP | {"extensions": (extension("cpu", "no compiler"), extension("cuda"))}, 1, 1),
        (_LAPTOP | {"backend": None, "devices": ()}, 1, 1),
        ({**ON_CPU, "jax_platforms": "cpu"}, 1, 1),
        (WITHOUT_CUDA, 1, 1),
    ],
    ids=["GPU", "laptop", "no kernels", "no backend", "a GPU that is hidden", "no extension for the GPU"],
)
def test_the_exit_status_is_0_where_te_jax_works_with_what_there_is(changes, status, with_gpu_required, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setattr(doctor, "gather", lambda: report(**changes))
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    assert doctor.run(parser.parse_args([])) == status
    assert doctor.run(parser.parse_args(["--require", "gpu"])) == with_gpu_required


@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.9", "9.0", "10.0", "12.0"])
def test_implementations_are_those_of_the_table_in_the_docs(capability, report_gpus):
    report_gpus(capability)
    found = {
        (row.operations, recipe): row.implementation
        for row in doctor.implementations()
        for recipe in row.recipes.split(", ")
    }
    assert found == {
        (operations.replace("`", ""), recipe): cells[capability] for (operations, recipe), cells in documented().items()
    }


def test_attention_where_flashattention_3_is_installed(report_gpus, monkeypatch):
    report_gpus("9.0")
    monkeypatch.setattr(_fa3_attention, "is_here", lambda: True)
    assert doctor.Chosen("attention", "", "FlashAttention 3, cuDNN") in doctor.implementations()


def test_implementations_on_a_cpu(native_kernels, monkeypatch):
    if jax.default_backend() != "cpu":
        pytest.skip("about CPUs")
    assert {row.implementation for row in doctor.implementations()} == {"native", "reference"}
    monkeypatch.setattr(native, "use_native", lambda *_, **__: False)
    monkeypatch.setattr(native, "available", lambda: False)
    assert {row.implementation for row in doctor.implementations()} == {"reference"}


def test_peer_access_is_a_matrix_with_direction():
    two = report(devices=(gpu(0, "9.0"), gpu(1, "9.0")), peer_access=((True, True), (False, True)))
    lines = doctor.as_text(two).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("Peer access"))
    assert [line.split() for line in lines[start + 3 : start + 5]] == [["0", "self", "yes"], ["1", "no", "self"]]


def test_host_memory():
    limited = report(host_memory=doctor.HostMemory(24.0, 0.1, "64", None, None))
    assert "0.1 GiB (ulimit -l)\n  XLA may pin    64 GB (XLA_PJRT_GPU" in doctor.as_text(limited)
    assert doctor._copy_rates(2**16)[0] > 0


@pytest.mark.parametrize(("before", "after"), [(None, "false"), ("true", "true")])
def test_a_question_takes_no_memory_of_gpus(before, after, monkeypatch):
    environment = {} if before is None else {"XLA_PYTHON_CLIENT_PREALLOCATE": before}
    monkeypatch.setattr(doctor.os, "environ", environment)
    monkeypatch.setattr(doctor, "gather", report)
    assert doctor.run(argparse.Namespace(json=False, require=None)) == 0
    assert environment == {"XLA_PYTHON_CLIENT_PREALLOCATE": after}


def test_json_holds_the_facts_the_verdict_and_the_advice(capsys, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    status = doctor.run(argparse.Namespace(json=True, require="gpu"))
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["jax"] == jax.__version__
    assert found["jaxlib_ffi_api"] == list(native.runtime_ffi_api())
    assert found["extensions"] == json.loads(json.dumps([dataclasses.asdict(item) for item in native.status()]))
    assert len(found["devices"]) == len(jax.devices())
    assert all("device" in device["memory_kinds"] for device in found["devices"])
    assert status == (0 if found["gpu_path_usable"] else 1)
    incomplete = json.loads(doctor.as_json(report(train_packages={"tqdm": None})))
    assert [advice["missing"] for advice in incomplete["advice"]] == ["te-jax train needs tqdm"]


def fail(*args, **kwargs):
    raise RuntimeError("broken on purpose\nwith a second line")


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (jax, "default_backend"),
        (jax, "devices"),
        (native, "status"),
        (native, "runtime_ffi_api"),
        (native, "peer_access"),
        (doctor, "_host_memory"),
        (importlib.metadata, "version"),
        (importlib.metadata, "requires"),
        (host, "gpus"),
        (host, "nvcc"),
    ],
)
def test_nothing_broken_makes_it_fail(owner, name, monkeypatch, capsys):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setattr(owner, name, fail)
    status = doctor.run(argparse.Namespace(json=False, require=None))
    printed = capsys.readouterr().out
    assert status in (0, 1)
    assert "with a second line" not in printed
    if name != "version":  # a version that cannot be read is a package that is not installed
        assert "RuntimeError: broken on purpose" in printed


@pytest.mark.parametrize("error", [OSError("no such file"), subprocess.TimeoutExpired("nvidia-smi", 20)])
def test_commands_that_cannot_run_count_as_absent(error, monkeypatch):
    def run(*args, **kwargs):
        raise error

    monkeypatch.setattr(subprocess, "run", run)
    assert host.output_of(["nvidia-smi"]) is None
    assert all(gpu_.memory_mib is None for gpu_ in host.gpus())


def test_gpu_listing_keeps_what_the_driver_knows():
    listing = "NVIDIA H200, 143771, 9.0, 580.159.04\nNVIDIA Old, [N/A], [N/A], 580.159.04\nError: garbage\n1,2,3,4,5\n"
    assert host.parse_gpu_listing(listing) == (
        host.HostGpu("NVIDIA H200", 143771, "9.0", "580.159.04"),
        host.HostGpu("NVIDIA Old", None, None, "580.159.04"),
    )


def test_figures_and_dashes_for_them_are_set_flush_right():
    text = aligned(
        ("device", "GiB", "change", "kind"), [("H200", "139.8", "+1", "–"), ("cpu", "–", "-10", "simulated")]
    )
    assert text.splitlines() == [
        "  device    GiB  change  kind",
        "  ------  -----  ------  ---------",
        "  H200    139.8      +1  –",
        "  cpu         –     -10  simulated",
    ]
