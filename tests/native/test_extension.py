"""Loading, checking and registering the extensions, and what happens where they are missing or do not fit."""

import ctypes
import functools
import importlib.util
import json
import os
import subprocess
import sys
import textwrap
import threading
import types
import unittest.mock
from pathlib import Path

import jax
import jax.export
import numpy as np
import pytest

import te_jax
from te_jax import native, ops
from te_jax.native import extension
from te_jax.recipe import CurrentScaling

ROOT = Path(te_jax.__file__).parent.parent  # of the package under test, which need not be this checkout's


def run_python(code, **environment):
    """The JSON that a fresh process prints last; without a GPU, so that it starts fast and takes no memory there."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    result = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(code)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


# --------------------------------------------------------------------------------------------------------------- import


def test_import_brings_nothing_but_te_jax_and_parts_of_jax_and_starts_no_backend(native_kernels):
    """Which keeps it short. To ask for the status starts none either, and nothing depends on the locale: Python warns
    of files that are read in its encoding, where it is asked to."""
    code = """
        import json, sys, warnings
        import jax, numpy, jax.numpy, jax.experimental.custom_partitioning
        from jax._src import xla_bridge
        before = set(sys.modules)
        import te_jax
        packages = sorted({name.partition(".")[0] for name in set(sys.modules) - before})
        import te_jax.native, te_jax.testing
        loaded = [name for name in sys.modules if name.startswith("te_jax._te")]
        warnings.simplefilter("error", EncodingWarning)
        states = [state.platform for state in te_jax.native.status() if state.loaded]
        print(json.dumps([packages, loaded, "cpu" in states, sorted(xla_bridge._backends)]))
    """
    assert run_python(code, PYTHONWARNDEFAULTENCODING="1") == [["jax", "te_jax"], [], True, []]


# --------------------------------------------------------------------------------------------------------------- status


def test_status_of_the_cpu_extension(native_kernels):
    cpu = native.status()[0]
    assert (cpu.platform, cpu.module, cpu.built, cpu.loaded, cpu.problem) == ("cpu", "te_jax._te_cpu", True, True, None)
    assert cpu.build["te_jax"] == te_jax.__version__
    assert cpu.ffi_api[0] == native.runtime_ffi_api()[0]
    assert cpu.ffi_api <= native.runtime_ffi_api()


def test_status_explains_what_is_not_loaded():
    for state in native.status():
        assert state.loaded == (state.problem is None)
        if not state.loaded:
            assert state.module in state.problem or "libcu" in state.problem


def test_use_native(native_kernels):
    assert native.available()
    assert native.use_native(None)
    assert native.use_native("native")
    assert not native.use_native("reference")
    with pytest.raises(ValueError, match="implementation is 'cuda'; it must be None, 'native', 'xla' or 'reference'"):
        native.use_native("cuda")


@pytest.mark.parametrize(
    ("architectures", "capability", "supported"),
    [
        ("90a", "9.0", True),
        ("90a-real", "9.0", True),
        ("90a", "10.0", False),
        ("90a", "8.9", False),
        ("90", "10.0", True),
        ("90-real", "10.0", False),
        ("80-real", "8.9", True),
        ("90-virtual", "9.0", True),
        ("90a-virtual", "9.0", True),
        ("80;90a", "8.6", True),
        ("80-real;90a", "9.0", True),
        ("90-real, 90-virtual", "12.0", True),
        ("90-real, 90-virtual", "8.9", False),
        ("75-real;90a-real", "8.0", False),
        ("native", "12.0", True),
    ],
)
def test_architectures(architectures, capability, supported):
    assert extension._supports(architectures, capability) == supported


def problem_on(monkeypatch, capability, *, products, architectures="90-real, 90-virtual"):
    """(problem, whether it deserves a warning) on a GPU, with an extension for these architectures, or without it."""
    client = types.SimpleNamespace(platform_version="cuda 13000")
    gpu = types.SimpleNamespace(platform="gpu", client=client, device_kind="Other", compute_capability=capability)
    build, problem = {"cuda architectures": architectures}, None if architectures else "it is not there"
    state = extension.ExtensionStatus("cuda", "te_jax._te_cuda", True, not problem, problem, (0, 3), build)
    module = types.ModuleType("cuda") if architectures else None
    monkeypatch.setattr(jax, "local_devices", lambda **_: [gpu])
    monkeypatch.setattr(extension, "_load", lambda platform: (module, state))
    return extension._problem_on_default_backend.__wrapped__(products)


@pytest.mark.parametrize(
    ("capability", "products", "kernels"),
    [
        ("8.0", False, "kernels are for 9.0 and later"),
        ("8.9", False, "kernels are for 9.0 and later"),
        ("9.0", False, None),
        ("10.0", False, None),
        ("12.1", False, None),
        ("8.9", True, "kernels for products are for 9.0 alone (H100, H200)"),
        ("9.0", True, None),
        ("10.0", True, "kernels for products are for 9.0 alone (H100, H200)"),
    ],
)
def test_which_gpus_run_which_kernels(capability, products, kernels, monkeypatch):
    """No warning where there are none: no build of the extension would have them."""
    if kernels is None:
        assert problem_on(monkeypatch, capability, products=products) == (None, False)
        assert problem_on(monkeypatch, capability, products=products, architectures=None) == ("it is not there", True)
        return
    for architectures in ("90-real, 90-virtual", None):
        problem, surprising = problem_on(monkeypatch, capability, products=products, architectures=architectures)
        assert problem == (
            f"Other has compute capability {capability}, and te_jax's {kernels}: use implementation='reference'"
        )
        assert not surprising


def test_an_extension_without_ptx_does_not_travel(monkeypatch):
    problem, surprising = problem_on(monkeypatch, "10.0", products=False, architectures="90-real")
    assert surprising
    assert "for CUDA architectures 90-real, and Other has compute capability 10.0: build it without" in problem


# --------------------------------------------------------------------------------------------------------- registration


def test_registration_is_idempotent_and_thread_safe(native_kernels):
    failures = []

    def register():
        try:
            for _ in range(20):
                extension.register()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=register) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.slow  # seconds of that process; tests/conformance has all operations in this one
def test_exported_programs_run_in_another_process(tmp_path, native_kernels, rng):
    pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
    operands = [rng.standard_normal(shape).astype(np.float32) for shape in ((32, 64), (64, 32))]
    product = jax.jit(functools.partial(ops.dense, recipe=CurrentScaling()))
    exported = jax.export.export(product, disabled_checks=native.export_checks())(*operands)
    (tmp_path / "program").write_bytes(exported.serialize())
    np.savez(tmp_path / "operands.npz", *operands)
    loaded = run_python(f"""
        import json, pathlib
        import numpy as np
        from jax import export
        from te_jax import native

        folder = pathlib.Path({str(tmp_path)!r})
        native.register()
        with np.load(folder / "operands.npz") as operands:
            y = export.deserialize((folder / "program").read_bytes()).call(*operands.values())
        print(json.dumps(y.tolist()))
    """)
    np.testing.assert_array_equal(np.float32(loaded), product(*operands))


def test_first_use_from_many_threads():
    values = run_python("""
        import json, threading
        import jax, jax.numpy as jnp
        from te_jax import ops
        jax.devices()
        barrier, values = threading.Barrier(8), []
        def run():
            barrier.wait()
            loss = ops.softmax_cross_entropy(jnp.zeros((2, 4)), jnp.zeros(2, jnp.int32))
            values.append(float(loss))
        threads = [threading.Thread(target=run) for _ in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        print(json.dumps(values))
    """)
    assert values == [pytest.approx(1.3862944)] * 8


# ---------------------------------------------------------------------------------------------------- broken extensions

_BROKEN = """
    import importlib.abc, importlib.machinery, json, sys, types, warnings

    def build():
        return {{"te_jax": te_jax.__version__, "jaxlib headers": "77.0.0"}}

    class Loader(importlib.abc.Loader):
        def create_module(self, spec):
            return None
        def exec_module(self, module):
            {execute}

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name == "te_jax._te_cpu":
                return importlib.machinery.ModuleSpec(name, Loader(), origin="fake")

    sys.meta_path.insert(0, Finder())

    import jax, jax.numpy as jnp
    import te_jax
    from te_jax import native, ops

    logits, labels = jnp.zeros((2, 4)), jnp.zeros(2, jnp.int32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = [float(ops.softmax_cross_entropy(logits, labels)) for _ in range(3)][0]
        gradient = jax.jit(jax.grad(ops.softmax_cross_entropy))(logits, labels)
    try:
        ops.softmax_cross_entropy(logits, labels, implementation="native")
    except native.NativeUnavailableError as error:
        refusal = str(error)
    print(json.dumps({{
        "value": value,
        "gradient": gradient.tolist(),
        "warnings": [[w.category.__name__, str(w.message), w.filename] for w in caught if "te_jax" in str(w.message)],
        "refusal": refusal,
        "available": native.available(),
        "version": te_jax.__version__,
        "jaxlib": __import__("jaxlib").__version__,
        "backend": jax.default_backend(),
        "loaded": native.status()[0].loaded,
    }}))
"""


def test_broken_extension():
    """One warning that names both versions, the reference path, and a refusal of "native" with the same words."""
    execute = 'raise ImportError("libfoo.so.7: cannot open shared object file")'
    found = run_python(textwrap.dedent(_BROKEN).format(execute=execute))
    assert found["value"] == pytest.approx(1.3862944)
    assert found["gradient"][0] == pytest.approx([-0.375, 0.125, 0.125, 0.125])
    assert (found["available"], found["loaded"], found["backend"]) == (False, False, "cpu")
    ((category, message, filename),) = found["warnings"]
    assert category == "RuntimeWarning"
    assert filename == "<string>"  # the caller's line, not one of te_jax
    assert found["refusal"] in message
    for words in ("libfoo.so.7", f"te_jax {te_jax.__version__}", _REINSTALL):
        assert words in message


_REINSTALL = "reinstall te_jax (`pip install --force-reinstall --no-deps --editable .` in its checkout)"
_BUILD = {"te_jax": te_jax.__version__, "jaxlib headers": "77.0.0"}


@pytest.mark.parametrize(
    ("ffi_api", "build", "words"),
    [
        ((0, 99), _BUILD, ["XLA FFI 0.99", "jaxlib 77.0.0", "jaxlib {jaxlib} speaks"]),
        ((9, 0), _BUILD, ["XLA FFI 9.0", "jaxlib {jaxlib} speaks"]),
        ((0, 3), _BUILD | {"te_jax": "0.0.7"}, ["te_jax 0.0.7", "te_jax {te_jax}"]),
        ((0, 3), {}, ["te_jax {te_jax}"]),
    ],
    ids=["newer FFI", "other FFI", "other te_jax", "no build facts"],
)
def test_an_extension_that_does_not_fit(ffi_api, build, words, native_kernels, monkeypatch):
    module = types.SimpleNamespace(ffi_api=ffi_api, build=lambda: build)
    monkeypatch.setattr(extension.importlib, "import_module", lambda name: module)
    loaded, state = extension._load.__wrapped__("cpu")
    assert loaded is None
    assert not state.loaded
    versions = {"te_jax": te_jax.__version__, "jaxlib": extension._jaxlib_version()}
    for word in (*words, _REINSTALL):
        assert word.format(**versions) in state.problem


@pytest.mark.parametrize("kept", [0.999, 0.01])
def test_truncated_extension(kept, tmp_path, native_kernels, monkeypatch):
    """To load it would end the process with SIGBUS."""
    whole = Path(importlib.util.find_spec("te_jax._te_cpu").origin).read_bytes()
    truncated = tmp_path / "_te_cpu.so"
    truncated.write_bytes(whole[: int(kept * len(whole))])
    spec = importlib.util.spec_from_file_location("te_jax._te_cpu", truncated)
    monkeypatch.setattr(extension.importlib.util, "find_spec", lambda name: spec)
    _, state = extension._load.__wrapped__("cpu")
    sizes = f"is truncated to {truncated.stat().st_size} of {len(whole)} bytes"
    assert f"te_jax._te_cpu cannot be loaded: {truncated} {sizes}; reinstall te_jax" in state.problem


def test_a_checkout_that_hides_an_installed_te_jax_is_named(monkeypatch, tmp_path):
    """As in the folder in which `pip install .` was run: to install it there once more would change nothing."""
    monkeypatch.setattr(extension.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(extension, "__file__", str(tmp_path / "te_jax" / "native" / "extension.py"))
    installed = extension._load.__wrapped__("cpu")[1].problem
    (tmp_path / "CMakeLists.txt").touch()
    hidden = extension._load.__wrapped__("cpu")[1].problem
    assert installed == "te_jax was installed without te_jax._te_cpu; install it again with a C++ compiler"
    assert hidden.startswith(f"te_jax is imported from {tmp_path}, a checkout without te_jax._te_cpu")
    assert "pip install --editable ." in hidden


def test_each_problem_is_warned_of_once(monkeypatch):
    monkeypatch.setattr(extension, "_problem_on_default_backend", lambda *_: (None, False))
    for problem in ("too wide", "too narrow"):
        with pytest.warns(RuntimeWarning, match=f"te_jax runs no native kernel: {problem}"):
            assert not native.use_native(None, problem)
        assert not native.use_native(None, problem)


def test_default_backend_decides():
    assert jax.default_backend() in ("cpu", "gpu")
    assert native.available() == (extension._problem_on_default_backend()[0] is None)


@pytest.mark.parametrize("gpus", [1, 0])
def test_targets_of_gpus_beside_another_default_backend(monkeypatch, gpus):
    """JAX_PLATFORMS=cpu,cuda: programs that are put on a GPU find their targets there."""

    def local_devices(backend=None):
        if not gpus:
            raise RuntimeError(f"Unknown backend {backend}. Available backends are ['cpu']")
        return {"cuda": ["a GPU"], None: jax.devices()}[backend]

    registered = []
    module = types.SimpleNamespace(registrations=lambda: {"te_foo": None}, use_sgemm=lambda sgemm: None)
    monkeypatch.setattr(extension, "_registered", {})
    monkeypatch.setattr(extension, "_load", lambda platform: (module, None))
    monkeypatch.setattr(jax, "local_devices", local_devices)
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *_, platform: registered.append(platform))
    assert native.register() == ("te_foo",)
    assert registered == ["cpu", "CUDA"][: 1 + gpus]
    assert native.has_gpu() == bool(gpus)


# ---------------------------------------------------------------------------------------------------------------- build


@pytest.mark.parametrize("arguments", ["", " -O2"])
def test_the_build_asks_for_the_wheels_of_the_compiler_named(monkeypatch, tmp_path, arguments):
    """CUDACXX, with arguments behind it as CMake takes them or without; what is none is named. AUTO needs a GPU."""
    for name in ("scikit_build_core", "scikit_build_core.build"):
        monkeypatch.setitem(sys.modules, name, unittest.mock.MagicMock())
    path = Path(__file__).parents[2] / "cuda_ext" / "build_backend.py"
    backend = importlib.util.module_from_spec(importlib.util.spec_from_file_location("build_backend", path))
    backend.__spec__.loader.exec_module(backend)
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho '#$ TOP={tmp_path}' >&2\necho release 13.0\n")
    nvcc.chmod(0o755)
    monkeypatch.delenv("TE_JAX_CUDA", raising=False)
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    monkeypatch.setenv("CUDACXX", f"{nvcc}{arguments}")
    smi = tmp_path / "nvidia-smi"
    for status, gpu in ((9, False), (0, True)):
        smi.write_text(f"#!/bin/sh\nexit {status}\n")
        smi.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        assert bool(backend._cuda_wheels(None)) == gpu
    smi.write_text("#!/bin/sh\nexit 9\n")
    monkeypatch.setenv("TE_JAX_CUDA", "ON")
    assert backend._cuda_wheels(None) == ["nvidia-cuda-runtime==13.0.*", "nvidia-cublas==13.0.*"]
    nvcc.unlink()
    with pytest.raises(FileNotFoundError, match=f"CUDACXX is {nvcc}.*leave CUDACXX unset"):
        backend._cuda_wheels(None)
    monkeypatch.setenv("TE_JAX_CUDA", "OFF")
    assert backend._cuda_wheels(None) == []


def test_versions_are_those_of_the_cuda_libraries_that_are_loaded(monkeypatch):
    """And none is loaded for the sake of its version."""

    def opened(library, mode):
        assert mode == os.RTLD_NOLOAD
        if "cudnn" in library:
            return types.SimpleNamespace(cudnnGetVersion=unittest.mock.Mock(return_value=91901))
        raise OSError(f"{library}: cannot open shared object file")

    assert native.cuda_library_versions() == {} or native.has_gpu()
    monkeypatch.setattr(ctypes, "CDLL", opened)
    assert native.cuda_library_versions() == {"cuDNN": "9.19.1"}


def test_the_package_has_no_folder_that_is_not_its_own():
    """What reads all modules of a package would read all below it."""
    assert {Path(folder).name for folder in te_jax.__path__} == {"te_jax"}
