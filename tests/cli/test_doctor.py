"""`te-jax doctor`: what it reports, what it advises, and that nothing broken makes it fail."""

import argparse
import dataclasses
import importlib.metadata
import json
import subprocess
import sys
import types

import jax
import pytest
from gpus import documented

from te_jax import native
from te_jax._core import host
from te_jax._core.terminal import aligned, reason_of
from te_jax.cli import doctor


def report(**changes):
    """A report of a machine with one usable H200, changed as the test says."""
    facts = {
        "python": "3.12.3 (Linux)",
        "versions": {
            "te_jax": "0.2.0",
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
    build = {"version": "0.2.0", "cuda runtime": "13.0"}
    loaded = problem is None
    return native.ExtensionStatus(platform, f"te_jax._te_{platform}", loaded, loaded, problem, (0, 3), build)


def without(report_, **versions):
    return {**report_.versions, **versions}


def remedies(report_):
    return [advice.remedy for advice in doctor.advise(report_)]


def test_a_complete_machine_is_usable_and_needs_no_advice():
    assert report().gpu_path_usable
    assert doctor.advise(report()) == ()
    assert "te_jax works on this machine's GPU." in doctor.as_text(report())


def test_the_text_has_every_fact():
    assert doctor.as_text(report()).splitlines() == [
        "Versions",
        "  python             3.12.3 (Linux)",
        "  te_jax             0.2.0",
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
        "    version            0.2.0",
        "    cuda runtime       13.0",
        "  te_jax._te_cuda (cuda): loaded",
        "    built for FFI API  0.3",
        "    version            0.2.0",
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
            versions=without(report(), te_jax=None),
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
        "      pip install .    (in the checkout)",
    ):
        assert line in text.splitlines()
    assert text.splitlines()[-1] == (
        "te_jax works, but slowly, without its kernels. Next: pip install .    (in the checkout)"
    )


@pytest.mark.parametrize(
    ("setting", "versions", "missing", "remedy"),
    [
        (None, {"jax": None}, "jax or jaxlib is not installed", 'pip install "jax>=0.10.2,<0.13"'),
        (None, {"jaxlib": None}, "jax or jaxlib is not installed", 'pip install "jax>=0.10.2,<0.13"'),
        (None, {}, "JAX starts no backend", 'pip install --upgrade "jax>=0.10.2,<0.13"'),
        ("cuda", {}, "JAX starts no backend with JAX_PLATFORMS=cuda", "unset JAX_PLATFORMS"),
    ],
)
def test_jax_that_is_not_there_or_does_not_start(setting, versions, missing, remedy):
    broken = report(versions=without(report(), **versions), backend=None, devices=(), jax_platforms=setting)
    assert doctor.advise(broken)[0] == doctor.Advice(missing, remedy)
    assert not any("==None" in remedy for remedy in remedies(broken))


def test_a_gpu_without_jax_plugin_is_told_the_exact_command():
    bare = report(
        versions=without(report(), **{"jax-cuda13-plugin": None, "jax-cuda13-pjrt": None}),
        devices=(cpu(),),
        backend="cpu",
    )
    assert not bare.gpu_path_usable
    assert remedies(bare) == ['pip install "jax[cuda13]"']


@pytest.mark.parametrize("host_gpus", [(), (host.HostGpu("NVIDIA H200", None, None, None),)])
def test_a_driver_or_a_gpu_alone_counts_as_a_gpu_machine(host_gpus):
    bare = report(
        versions=without(report(), **{"jax-cuda13-plugin": None}),
        devices=(cpu(),),
        backend="cpu",
        host_gpus=host_gpus,
        driver=None if host_gpus else "580.159.04",
    )
    assert remedies(bare) == ['pip install "jax[cuda13]"']


@pytest.mark.parametrize("version", ["0.10.2", "0.11.1"])
def test_a_plugin_of_another_release_is_named(version):
    mixed = report(versions=without(report(), **{"jax-cuda13-plugin": version}), devices=(cpu(),), backend="cpu")
    assert remedies(mixed) == ['pip install "jax[cuda13]==0.11.2"']
    assert version in doctor.advise(mixed)[0].missing


def test_a_later_build_of_a_plugin_is_of_the_same_release():
    later = without(report(), **{"jax-cuda13-plugin": "0.11.2.post1"})
    assert "starts no GPU" in doctor.advise(report(versions=later, devices=(cpu(),), backend="cpu"))[0].missing


def test_jax_platforms_that_hides_the_gpu_is_named():
    hidden = report(devices=(cpu(),), backend="cpu", jax_platforms="cpu")
    assert remedies(hidden) == ["unset JAX_PLATFORMS"]


@pytest.mark.parametrize("platforms", ["cuda", "gpu", "gpu,cpu"], ids="JAX_PLATFORMS={}".format)
def test_jax_platforms_that_asks_for_the_gpu_does_not_hide_it(platforms):
    asked = report(devices=(cpu(),), backend="cpu", jax_platforms=platforms)
    assert not any("JAX_PLATFORMS" in remedy for remedy in remedies(asked))


def test_a_plugin_that_starts_no_gpu_is_reported_with_jax_own_reason():
    failing = report(devices=(cpu(),), backend="cpu", cuda_backend_error="RuntimeError: CUDA_ERROR_NO_DEVICE")
    (advice,) = doctor.advise(failing)
    assert "CUDA_ERROR_NO_DEVICE" in advice.missing
    assert "nvidia-smi" in advice.remedy


@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.9", "10.0", "12.0"])
def test_other_compute_capabilities(capability):
    """XLA multiplies FP8 from 8.9 on; the extension would quantize from 9.0 on."""
    absent = extension("cuda", "te_jax was installed without te_jax._te_cuda")
    other = report(devices=(gpu(0, capability, kind="NVIDIA Other"),), extensions=(extension("cpu"), absent))
    if capability in ("8.0", "8.6"):
        assert not other.gpu_path_usable
        (advice,) = doctor.advise(other)
        assert advice.missing == f"no GPU that multiplies FP8: JAX sees NVIDIA Other ({capability})"
        assert "recipe=None" in advice.remedy
        return
    assert other.gpu_path_usable
    if capability != "8.9":
        (advice,) = doctor.advise(other)
        assert advice.remedy.startswith("TE_JAX_CUDA=ON pip install")
        other = dataclasses.replace(other, extensions=(extension("cpu"), extension("cuda")))
    assert not doctor.advise(other)
    last = doctor.as_text(other).splitlines()[-1]
    assert last == "te_jax works on this machine's GPU, by XLA. Next: te-jax train --recipe current --compare"


def test_gpus_of_several_capabilities_are_not_usable():
    several = report(devices=(gpu(0, "9.0"), gpu(1, "8.9", kind="NVIDIA L40S")))
    assert not several.gpu_path_usable
    (advice,) = doctor.advise(several)
    assert "NVIDIA H200 (9.0), NVIDIA L40S (8.9)" in advice.missing
    assert advice.remedy == "set CUDA_VISIBLE_DEVICES to GPUs of one capability"


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


def test_implementations_on_a_cpu(native_kernels, monkeypatch):
    if jax.default_backend() != "cpu":
        pytest.skip("about CPUs")
    assert {row.implementation for row in doctor.implementations()} == {"native", "reference"}
    monkeypatch.setattr(native, "use_native", lambda *_, **__: False)
    monkeypatch.setattr(native, "available", lambda: False)
    assert {row.implementation for row in doctor.implementations()} == {"reference"}


def test_a_missing_extension_is_not_usable_and_is_told_what_builds_it():
    problem = "te_jax was installed without te_jax._te_cuda"
    with_nvcc = report(extensions=(extension("cpu"), extension("cuda", problem)))
    without_nvcc = report(extensions=(extension("cpu"), extension("cuda", problem)), nvcc=None)
    assert not with_nvcc.gpu_path_usable
    assert problem in doctor.advise(with_nvcc)[0].missing
    assert remedies(with_nvcc)[0].startswith("TE_JAX_CUDA=ON pip install")
    assert "cuda-toolkit" in remedies(without_nvcc)[0]
    assert len(remedies(report(extensions=with_nvcc.extensions, host_gpus=(), driver=None))) == 1
    in_checkout = report(
        extensions=(extension("cpu", "run `pip install --editable .` in it"), extension("cuda")), nvcc=None
    )
    assert remedies(in_checkout) == [
        "pip install --force-reinstall --no-deps --editable .    (in the checkout; needs a C++ compiler)"
    ]


def test_a_machine_without_gpu_is_not_asked_to_build_for_one():
    laptop = report(
        versions=without(report(), **{"jax-cuda13-plugin": None}),
        devices=(cpu(),),
        backend="cpu",
        host_gpus=(),
        driver=None,
        extensions=(extension("cpu"), extension("cuda", "te_jax was installed without te_jax._te_cuda")),
    )
    assert not doctor.advise(laptop)
    last = doctor.as_text(laptop).splitlines()[-1]
    assert last == "te_jax works on this machine's CPU; it has no NVIDIA GPU. Next: te-jax train"


def test_the_last_line_names_the_first_step_that_mends():
    bare = report(versions=without(report(), **{"jax-cuda13-plugin": None}), devices=(cpu(),), backend="cpu")
    last = doctor.as_text(bare).splitlines()[-1]
    assert last == "te_jax works on this machine's CPU; not on its GPU. Next: " + remedies(bare)[0]


def test_missing_train_packages_are_named():
    incomplete = report(train_packages={"optax": "0.2.8", "tqdm": None, "matplotlib": None})
    (advice,) = doctor.advise(incomplete)
    assert advice == doctor.Advice("te-jax train needs tqdm, matplotlib", "pip install tqdm matplotlib")


def test_peer_access_is_a_matrix_with_direction():
    two = report(devices=(gpu(0, "9.0"), gpu(1, "9.0")), peer_access=((True, True), (False, True)))
    lines = doctor.as_text(two).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("Peer access"))
    assert [line.split() for line in lines[start + 3 : start + 5]] == [["0", "self", "yes"], ["1", "no", "self"]]


def test_host_memory():
    text = doctor.as_text(report())
    assert "memory         1511.7 GiB\n  may be locked  all\n" in text
    assert "copies         52.1 GB/s to the host, 51.8 GB/s to the GPU" in text
    limited = report(host_memory=doctor.HostMemory(24.0, 0.1, "64", None, None))
    assert "0.1 GiB (ulimit -l)\n  XLA may pin    64 GB (XLA_PJRT_GPU" in doctor.as_text(limited)
    assert doctor._copy_rates(2**16)[0] > 0


def test_packages_of_the_extra(monkeypatch):
    requirements = ["optax>=0.2.4; extra == 'train'", 'tqdm; extra=="train"', "train-tools>1; extra == 'test'", "jax"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requirements)
    assert doctor._train_packages() == ("optax", "tqdm")


@pytest.mark.parametrize(("stats", "gib"), [({"bytes_limit": 3 * 2**29}, 1.5), ({}, None), (None, None)])
def test_memory_of_a_device(stats, gib):
    device = types.SimpleNamespace(id=0, platform="gpu", device_kind="GPU", memory_stats=lambda: stats)
    assert doctor._describe(device) == doctor.Device(0, "gpu", "GPU", None, gib, ())


@pytest.mark.parametrize(("before", "after"), [(None, "false"), ("true", "true")])
def test_a_question_takes_no_memory_of_gpus(before, after, monkeypatch):
    environment = {} if before is None else {"XLA_PYTHON_CLIENT_PREALLOCATE": before}
    monkeypatch.setattr(doctor.os, "environ", environment)
    monkeypatch.setattr(doctor, "gather", report)
    assert doctor.run(argparse.Namespace(json=False)) == 0
    assert environment == {"XLA_PYTHON_CLIENT_PREALLOCATE": after}


def test_json_holds_the_facts_the_verdict_and_the_advice(capsys, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    status = doctor.run(argparse.Namespace(json=True))
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


@pytest.mark.parametrize("form", ["text", "json"])
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
def test_nothing_broken_makes_it_fail(owner, name, form, monkeypatch, capsys):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setattr(owner, name, fail)
    status = doctor.run(argparse.Namespace(json=form == "json"))
    printed = capsys.readouterr().out
    assert status in (0, 1)
    assert "with a second line" not in printed
    if name != "version":  # a version that cannot be read is a package that is not installed
        assert "RuntimeError: broken on purpose" in printed


def test_a_broken_backend_is_not_usable(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", fail)
    found = doctor.gather()
    assert not found.gpu_path_usable
    assert found.devices == ()
    assert found.cuda_backend_error is None
    assert any("JAX starts no backend" in advice.missing for advice in doctor.advise(found))


def test_errors_of_one_line(monkeypatch):
    monkeypatch.setattr(jax, "devices", fail)
    assert doctor.gather().cuda_backend_error == "RuntimeError: broken on purpose"
    assert reason_of(RuntimeError()) == "RuntimeError"


@pytest.mark.parametrize("error", [OSError("no such file"), subprocess.TimeoutExpired("nvidia-smi", 20)])
def test_commands_that_cannot_run_count_as_absent(error, monkeypatch):
    def run(*args, **kwargs):
        raise error

    monkeypatch.setattr(subprocess, "run", run)
    assert host.output_of(["nvidia-smi"]) is None
    assert all(gpu_.memory_mib is None for gpu_ in host.gpus())


def test_commands_that_fail_count_as_absent():
    command = [sys.executable, "-c", "import sys; print('some'); sys.exit(len(sys.argv) - 1)"]
    assert host.output_of(command) == "some\n"
    assert host.output_of([*command, "failure"]) is None


@pytest.mark.parametrize(("status", "version"), [(0, "12.8"), (1, None)])
def test_cuda_version_of_the_driver(status, version, monkeypatch):
    def get(pointer):
        pointer._obj.value = 12080
        return status

    monkeypatch.setattr(host.ctypes, "CDLL", lambda name: types.SimpleNamespace(cuDriverGetVersion=get))
    assert host.driver_cuda_version() == version


def test_gpu_listing_keeps_what_the_driver_knows():
    listing = "NVIDIA H200, 143771, 9.0, 580.159.04\nNVIDIA Old, [N/A], [N/A], 580.159.04\nError: garbage\n1,2,3,4,5\n"
    assert host.parse_gpu_listing(listing) == (
        host.HostGpu("NVIDIA H200", 143771, "9.0", "580.159.04"),
        host.HostGpu("NVIDIA Old", None, None, "580.159.04"),
    )


def test_help_documents_the_exit_status():
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    text = parser.format_help()
    assert "Exit status: 0 when the GPU path is usable" in text
    assert "at 8.9, 10.0 and 12.0 by XLA" in " ".join(text.split())
    assert "1 otherwise" in text


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
