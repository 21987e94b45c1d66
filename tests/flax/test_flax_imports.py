"""Flax is needed by te_jax.flax and te_jax.nnx, and by nothing else."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_te_jax_does_not_import_flax():
    done = run("import sys, te_jax; sys.exit('flax' in sys.modules)")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["te_jax.flax", "te_jax.nnx"])
def test_without_flax_the_error_says_what_to_install(name):
    done = run(f"import sys; sys.modules['flax'] = None; import {name}")
    assert done.returncode == 1
    (needed,) = EXTRAS["flax"]
    message = f'ImportError: {name} needs Flax, which is not installed: pip install "{needed}"'
    assert message in done.stderr
