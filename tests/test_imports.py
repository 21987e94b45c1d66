"""What `import te_jax` loads, and what comes at first use."""

import subprocess
import sys

CODE = """
import sys, te_jax

names = "flax", "layers", "models", "nnx", "optim", "reference", "testing"
assert not {"flax", "optax", "te_jax.models", "te_jax.testing"} & set(sys.modules)
assert set(dir(te_jax)) >= {*names, "ops", "recipe"}
for name in names:
    assert getattr(te_jax, name) is sys.modules[f"te_jax.{name}"]
    assert vars(te_jax)[name] is sys.modules[f"te_jax.{name}"]
assert not hasattr(te_jax, "optimizers")
"""


def test_packages_are_loaded_at_first_use():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
