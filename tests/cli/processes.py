"""`te-jax` in processes of their own.

They are forked from one that has imported everything and started no backend: importing takes longer than a short run.
"""

import multiprocessing
import os
import sys
import warnings

import pytest
from runs import take_defaults_of_a_gpu
from xla_flags import environment_without_devices

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["te_jax.cli.train", "orbax.checkpoint", "matplotlib.figure"])


def start(argv, shown, before=None):
    """A process that calls `before`, runs `te-jax` with these arguments, and writes what it shows to a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", environment_without_devices()["XLA_FLAGS"])  # the first fork takes the environment
        process = _CONTEXT.Process(target=_run, args=(argv, str(shown), before), daemon=True)
        process.start()
    return process


def finish(process, shown):
    """Waits for a process that is to succeed, and returns what it has shown."""
    process.join(timeout=120)
    assert process.exitcode == 0, shown.read_text()
    return shown.read_text()


def _run(argv, shown, before):
    with open(shown, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from te_jax.cli.main import main

    take_defaults_of_a_gpu()
    if before is not None:
        before()
    warnings.simplefilter("error")
    sys.exit(main(argv))
