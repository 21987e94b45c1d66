"""te_jax.flax and te_jax.nnx need Flax, and nothing else does; models that exist keep working after their import."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
(NEEDED,) = PROJECT["optional-dependencies"]["flax"]

# te_jax.nnx adopts Flax's own type for the state of a model that was made before it was imported.
MODEL_OF_FLAX = """
import flax.linen as nn, jax, jax.numpy as jnp
from flax import nnx

x = jnp.ones((4, 16))
model = nnx.bridge.ToNNX(nn.Dense(16, dot_general_cls=nn.Fp8DirectDotGeneralOp), rngs=nnx.Rngs(0)).lazy_init(x)

from te_jax.nnx import OverwriteWithGradient

state = nnx.state(model, OverwriteWithGradient)
assert len(nnx.to_flat_state(state)) == 6, state
assert nnx.variable_type_from_name("_overwrite_with_gradient") is OverwriteWithGradient
assert nnx.variable_name_from_type(OverwriteWithGradient) == "_overwrite_with_gradient"
assert OverwriteWithGradient.__name__ == "_overwrite_with_gradient"  # by which MaxText knows it
graphdef, state = nnx.split(model)
nnx.jit(lambda model, x: model(x))(nnx.merge(graphdef, state), x)
variables = nnx.bridge.to_linen(lambda rngs: model).init(jax.random.key(0), x)
assert set(variables) >= {"params", "_overwrite_with_gradient"}, variables
"""
WITHOUT_FLAX = """
import sys, te_jax

assert "flax" not in sys.modules
sys.modules["flax"] = None
for name in ("flax", "nnx"):
    try:
        getattr(te_jax, name)
    except ImportError as error:
        print(error)
"""


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow  # seconds of a process that makes a model of Flax
def test_a_model_that_was_made_before():
    run(MODEL_OF_FLAX)


def test_without_flax():
    way_out = f'needs Flax, which is not installed: pip install "{NEEDED}"'
    assert run(WITHOUT_FLAX) == [f"te_jax.{name} {way_out}" for name in ("flax", "nnx")]
