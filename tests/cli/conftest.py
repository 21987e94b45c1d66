"""What the tests of the command share: JAX as the command finds it, and programs that XLA compiles once."""

import contextlib
import dataclasses
import functools
import os
import unittest.mock

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from runs import Toy, defaults_of, take_defaults_of_a_gpu

from te_jax.cli import _placement, _step
from te_jax.cli._options import Options


@pytest.fixture(scope="session")
def _compiled(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module", autouse=True)
def _compile_once(_compiled):
    """Every run traces and lowers its programs, and XLA compiles those that it has not seen.

    This holds for processes that a test starts as well, one after the other: nothing keeps two from writing one entry
    at the same time. On a GPU all is compiled, because a resumed run has to tune itself to the same bits.
    """
    if jax.default_backend() != "cpu":
        yield
        return
    options = {
        "jax_compilation_cache_dir": str(_compiled),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        # An address that each process has its own of; how te_jax partitions is in the program's text as well.
        "jax_remove_custom_partitioning_ptr_from_cache_key": True,
    }
    before = {name: getattr(jax.config, name) for name in options}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in options.items():
            jax.config.update(name, value)
            patch.setenv(name.upper(), str(value))
        compilation_cache.reset_cache()  # forgets that there was none when this process began
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session", autouse=True)
def _defaults_of_a_gpu():
    take_defaults_of_a_gpu()
    yield
    _placement.defaults_of = defaults_of


@contextlib.contextmanager
def _jax_as_in_a_process_of_its_own():
    # The backend starts here, with the devices of all tests: --devices would choose them for the whole process.
    jax.devices()
    # optax mixes dtypes in its schedules; the command itself runs with JAX's defaults. --deterministic sets a variable.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), unittest.mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="module")
def as_in_a_process_of_its_own():
    """Lets a module's tests, and the runs they share, call the command in this process."""
    with _jax_as_in_a_process_of_its_own():
        yield


@functools.cache
def _learner_of(plan, model, build_learner=_step.build_learner):
    return build_learner(plan, model)


@pytest.fixture(scope="module")
def programs_of_equal_runs():
    """Runs that differ in what they read and write, but not in what they compute, trace it once."""

    def build_learner(plan, model):
        alike = {"text": None, "compare": False, "checkpoint_every": 1, "eval_every": 1, "tensorboard": False}
        options = Options.of(plan.options.values() | alike)
        of_text = {"text": "", "num_tokens": 0, "num_documents": None, "sha256": ""}
        plan = dataclasses.replace(plan, options=options, models=(), checkpoint_every=1, **of_text)
        return _learner_of(plan, model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_step, "build_learner", build_learner)
        yield


@pytest.fixture
def toy(monkeypatch):
    """Runs whose subject is no model train an array, and draw no figure."""
    toy = Toy()
    monkeypatch.setattr(_step, "build_learner", toy.build_learner)
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path: path.touch())
    return toy
