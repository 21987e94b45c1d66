"""How all tests run: fake devices, strict promotion, and what is skipped where.

Everything here happens before a backend starts. The same tests run on a GPU with `JAX_PLATFORMS=cuda`.
"""

import collections
import dataclasses
import functools
import gc
import os
import pathlib
import secrets
import typing

# Oracles in NumPy: threads of its BLAS wait for work by spinning, on cores that XLA and other workers compute on.
# The BLAS of kernels is scipy's, which loads later and keeps its threads.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
import numpy as np

del os.environ["OPENBLAS_NUM_THREADS"]

import hypothesis
import jax
import pytest
from jax.sharding import AxisType
from parameters import mark_products
from selection import is_slow
from xla_flags import asks_for_devices, compile_quickly

from te_jax import native, ops
from te_jax.native import extension
from te_jax.ops import implementations
from te_jax.recipe import Scaling

gc.set_threshold(100_000, 20, 50)  # tracing makes many objects that stay: looking for cycles was a tenth of the time
compile_quickly()
if not asks_for_devices():
    jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")  # GPUs would multiply float32 in TF32

# Every shape is a compilation: few examples, and no deadline. Each run draws new ones; a failure is replayed from
# hypothesis' own database, and printed.
hypothesis.settings.register_profile(
    "te_jax", deadline=None, max_examples=12, derandomize=False, print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)  # fmt: skip
hypothesis.settings.load_profile("te_jax")

_SEED = pytest.StashKey[int]()
_TESTS = pathlib.Path(__file__).parent

# How many programs the tests that are not slow compile at most: a number that is the same on every machine, where times
# are not. A run above fails: let tests share programs, or raise the number.
_MOST_PROGRAMS = 5350
_programs = collections.Counter()
_folder = None


class _FailuresAtOnce:
    """A run of minutes says what failed when it fails."""

    def __init__(self, reporter):
        self.reporter = reporter

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.reporter.ensure_newline()
            self.reporter.write_line(f"FAILED {report.nodeid}: {crash.message[:400] if crash else report.longrepr}")


def pytest_sessionstart(session):
    """TE_JAX_TEST_REQUIRE_NATIVE=1 ends a run that would silently test the reference instead of the kernels."""
    plugins = session.config.pluginmanager
    if not hasattr(session.config, "workerinput") and (reporter := plugins.get_plugin("terminalreporter")):
        plugins.register(_FailuresAtOnce(reporter))
    if os.environ.get("TE_JAX_TEST_REQUIRE_NATIVE") == "1" and not native.available():
        problems = "; ".join(state.problem for state in native.status() if state.problem)
        pytest.exit(f"TE_JAX_TEST_REQUIRE_NATIVE=1, but on {jax.default_backend()}: {problems}", returncode=3)


def pytest_ignore_collect(collection_path):
    """Elsewhere every worker would import tests/gpu only to skip it, unless it is named."""
    return True if collection_path == _TESTS / "gpu" and jax.default_backend() != "gpu" else None


@pytest.hookimpl(tryfirst=True)  # before pytest looks at marks
def pytest_collection_modifyitems(config, items):
    if jax.default_backend() == "cpu":
        mark_products([item for item in items if "gpu" not in item.keywords])
        named = {pathlib.Path(argument.partition("::")[0]).resolve() for argument in config.args}
        for item in items:
            if item.path not in named and is_slow(item.path):
                item.add_marker(pytest.mark.slow)
    # With --no-loadscope-reorder workers share files in this order: one that takes minutes would end alone.
    items.sort(key=lambda item: item.path.name not in ("test_notebooks.py", "test_train.py", "test_meshes.py"))
    on_gpu = [item for item in items if "gpu" in item.keywords]
    if on_gpu and not (jax.default_backend() == "gpu" and native.available()):
        skip = pytest.mark.skip(reason="needs a GPU and the CUDA extension")
        for item in on_gpu:
            item.add_marker(skip)


@functools.cache
def _refused_on_this_gpu():
    """What operations say, among other words, of a scaling that this GPU does not multiply at all: MXFP8 on 9.0."""
    if jax.default_backend() != "gpu":
        return set()
    refused = [scaling for scaling in typing.get_args(Scaling) if _refusal(None, scaling)]
    return {_refusal(implementation, scaling) for scaling in refused for implementation in ("native", "xla")}


def _refusal(implementation, scaling):
    try:
        implementations.fp8_implementation(implementation, scaling, implementations.unsupported(scaling))
    except native.NativeUnavailableError as error:
        return str(error)
    return None


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """Skips what the GPU refuses by design."""
    try:
        return (yield)
    except native.NativeUnavailableError as error:
        if not any(message in str(error) for message in _refused_on_this_gpu()):
            raise
        pytest.skip(str(error))


# ------------------------------------------------------------------------------------------------- compiled programs


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    global _folder
    left_out = item.get_closest_marker("slow") or item.get_closest_marker("product") or is_slow(item.path)
    _folder = None if left_out else item.path.parent.name
    return (yield)


@jax.monitoring.register_event_duration_secs_listener
def _count_program(event, duration, **_):
    if event == "/jax/core/compile/backend_compile_duration" and _folder:
        _programs[_folder] += 1


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # of pytest-xdist
        session.config.workeroutput["programs"] = dict(_programs)
    elif _too_many() and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    _programs.update(getattr(node, "workeroutput", {}).get("programs", {}))


def _too_many():
    return jax.default_backend() == "cpu" and _programs.total() > _MOST_PROGRAMS


def pytest_terminal_summary(terminalreporter):
    if not _programs:
        return
    counts = ", ".join(f"{folder} {count}" for folder, count in sorted(_programs.items()))
    terminalreporter.write_line(f"Compiled by tests that are not slow: {counts}; {_programs.total()} programs in all")
    if _too_many():
        terminalreporter.write_line(f"FAILED: _MOST_PROGRAMS in tests/conftest.py allows {_MOST_PROGRAMS}")


@pytest.fixture(autouse=True, scope="module")
def _what_stays_is_not_looked_through_again():
    """Benchmarks collect garbage before each measurement, which takes a second among what earlier files have traced."""
    yield
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed and _SEED in item.stash:
        report.sections.append(("rng", f"TE_JAX_TEST_SEED={item.stash[_SEED]} draws the same numbers"))
    return report


@pytest.fixture
def rng(request):
    """Fresh random numbers in every run; a failing test names the seed that repeats it."""
    seed = int(os.environ.get("TE_JAX_TEST_SEED") or secrets.randbits(32))
    request.node.stash[_SEED] = seed
    return np.random.default_rng(seed)


@pytest.fixture(params=["native", "reference"])
def implementation(request):
    """Both implementations by name; the native one is skipped where it is not built."""
    if request.param == "native":
        _skip_without_native()
    return request.param


@pytest.fixture
def native_kernels():
    """Skips a test that is about native kernels where there are none."""
    _skip_without_native()


@pytest.fixture
def report_gpus(monkeypatch, native_kernels):
    """report_gpus("8.9") lets te_jax see a GPU of that compute capability, beside an extension of the default build.

    Its native kernels are those of the CPU. Several capabilities are those of several GPUs.
    """
    if jax.default_backend() != "cpu":
        pytest.skip("a CPU takes the part of the GPU")
    cached = extension._problem_on_default_backend, extension.compute_capability, extension._warn_once

    def report(*capabilities):
        for function in cached:
            function.cache_clear()
        monkeypatch.setattr(extension, "_gpus", lambda: tuple((f"GPU {c}", c) for c in capabilities))

    module, state = extension._load("cpu")
    build = {**state.build, "cuda architectures": "90-real, 90-virtual"}
    cuda = dataclasses.replace(state, platform="cuda", build=build)
    load = {"cpu": (module, state), "cuda": (module, cuda)}.__getitem__
    monkeypatch.setattr(extension, "_load", load)
    yield report
    monkeypatch.undo()
    for function in cached:
        function.cache_clear()


def _skip_without_native():
    if not native.available():
        pytest.skip("needs the extension for this platform")


@pytest.fixture
def options_of_dense(monkeypatch):
    """Keyword arguments with which a layer calls `ops.dense`, which runs without state_axis: it need not be there."""

    def recorded(*operands, state_axis, **options):
        given.update(options, state_axis=state_axis)
        return dense(*operands, **options)

    given, dense = {}, ops.dense
    monkeypatch.setattr(ops, "dense", recorded)
    return given


@pytest.fixture
def require_devices():
    """require_devices(n) skips the test where fewer than n devices are there."""

    def require(count):
        if jax.device_count() < count:
            pytest.skip(f"needs {count} devices, and there are {jax.device_count()}")

    return require


@pytest.fixture
def make_mesh(require_devices):
    """make_mesh({"data": AxisType.Auto, "model": AxisType.Auto}): a mesh of as many devices as are there.

    Every axis but the first has size 2, and the first the rest, at least 2.
    """

    def make(axes: dict[str, AxisType]):
        inner = 2 ** (len(axes) - 1)
        require_devices(2 * inner)
        count = jax.device_count() // inner * inner
        shape = (count // inner,) + (2,) * (len(axes) - 1)
        return jax.make_mesh(shape, tuple(axes), axis_types=tuple(axes.values()), devices=jax.devices()[:count])

    return make
