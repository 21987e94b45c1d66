"""optax is needed by te_jax.optim, and by nothing that te_jax itself imports."""

import subprocess
import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


CODE = """
import sys, te_jax, te_jax.ops, te_jax.models

assert "optax" not in sys.modules
sys.modules["optax"] = None
import te_jax.optim
"""


def test_without_optax_the_error_says_what_to_install():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    (needed,) = EXTRAS["optim"]
    assert f'te_jax.optim needs optax, which is not installed: pip install "{needed}"' in done.stderr
