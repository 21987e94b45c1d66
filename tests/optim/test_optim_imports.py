"""optax is needed by te_jax.optim, and by nothing that te_jax itself imports."""

import subprocess
import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_te_jax_does_not_import_optax():
    done = run("import sys, te_jax, te_jax.ops, te_jax.models; sys.exit('optax' in sys.modules)")
    assert done.returncode == 0, done.stderr


def test_without_optax_the_error_says_what_to_install():
    done = run("import sys; sys.modules['optax'] = None; import te_jax.optim")
    assert done.returncode == 1
    (needed,) = EXTRAS["optim"]
    assert f'te_jax.optim needs optax, which is not installed: pip install "{needed}"' in done.stderr
