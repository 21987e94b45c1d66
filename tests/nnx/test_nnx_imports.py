"""Models and states that exist keep working after `import te_jax.nnx`: it adopts Flax's own type for the state."""

import subprocess
import sys

import pytest

MAKE = """
import flax.linen as nn, jax, jax.numpy as jnp
from flax import nnx

x = jnp.ones((4, 16))
def made():
    dense = nn.Dense(16, dot_general_cls=nn.Fp8DirectDotGeneralOp)
    return nnx.bridge.ToNNX(dense, rngs=nnx.Rngs(0)).lazy_init(x)
"""
USE = """
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


@pytest.mark.parametrize("lines", [(MAKE, "model = made()"), ("import te_jax.nnx", MAKE, "model = made()")])
def test_models_made_before_or_after_the_import_keep_working(lines):
    done = subprocess.run([sys.executable, "-c", "\n".join([*lines, USE])], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
