"""Programs run with and without CUDA graphs, in processes of their own, for flags of XLA are read once."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import te_jax

_COMMAND_BUFFERS = ("", "--xla_gpu_enable_command_buffer=", "--xla_gpu_enable_command_buffer=+CUSTOM_CALL")
"""The default, none, and those that take custom calls."""


def outputs(code: str) -> dict[str, str]:
    """The last line that a program prints, by the flag of command buffers."""
    return {
        flag: _output(code, f"{flag} --xla_gpu_graph_min_graph_size=1 --xla_gpu_autotune_level=0")
        for flag in _COMMAND_BUFFERS
    }


def _output(code: str, flags: str) -> str:
    environment = {
        **os.environ,
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTHONPATH": os.pathsep.join([str(Path(te_jax.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-c", textwrap.dedent(code)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout.splitlines()[-1]
