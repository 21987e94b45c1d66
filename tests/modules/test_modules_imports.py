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
CODE = {
    "te_jax has no Flax": ("import sys, te_jax; assert 'flax' not in sys.modules", None),
    **{
        f"{name} without Flax": (
            f"import sys; sys.modules['flax'] = None; import {name}",
            f'ImportError: {name} needs Flax, which is not installed: pip install "{NEEDED}"',
        )
        for name in ("te_jax.flax", "te_jax.nnx")
    },
    "a model made before": (MODEL_OF_FLAX, None),
}


@pytest.mark.parametrize("name", CODE)
def test_imports(name):
    code, error = CODE[name]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode == 0) is (error is None), done.stderr
    assert (error or "") in done.stderr
