"""A gated MLP over devices, beyond the rules of tests/conformance: short shards, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collective_oracle import mesh_of
from jax.sharding import PartitionSpec as P

from te_jax import ops, parallel
from te_jax.recipe import BlockScaling, CurrentScaling
from te_jax.testing import assert_close

KERNELS = P(None, "tp"), P(None, "tp"), P("tp")


def mapped(recipe):
    local = functools.partial(parallel.gated_mlp, axis_name="tp", dimension=1, recipe=recipe)
    return jax.shard_map(
        local, mesh=mesh_of({"tp": 2}), in_specs=(P(None, "tp"), KERNELS), out_specs=P(None, "tp")
    )  # fmt: skip


def random_case(rng, time=128):
    shapes = (1, time, 128), (128, 256), (128, 256), (256, 128)
    x, *kernels = (rng.standard_normal(shape).astype(np.float32) / shape[-2] ** 0.5 for shape in shapes)
    return x, tuple(kernels)


def test_blocks_that_reach_over_shards_leave_the_gradient_of_x(rng):
    """With 64 rows a device, the gradients of kernels are refused, and that of x is as on one device."""
    x, kernels = random_case(rng)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(mapped(BlockScaling())(x, kernels)))))
    expected = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(ops.gated_mlp(x, kernels, recipe=BlockScaling())))))(x)
    assert_close(gradient(x), expected, tolerance=2e-2)
    with pytest.raises(ValueError, match=r"x has 64 rows for each device; the gradient of kernel\[0\] with block"):
        jax.eval_shape(jax.grad(lambda kernels: jnp.sum(mapped(BlockScaling())(x, kernels))), kernels)


def test_what_is_refused(rng):
    x, (gate, up, down) = random_case(rng)
    with pytest.raises(ValueError, match=r"kernel must be a tuple of three"):
        jax.eval_shape(
            functools.partial(parallel.gated_mlp, axis_name="tp", recipe=CurrentScaling()), x, (gate, up)
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"kernel\[2\] has shape \(64, 128\), and kernel\[1\] \(128, 128\)"):
        jax.eval_shape(mapped(CurrentScaling()), x, (gate, up, down[:128]))
    with pytest.raises(ValueError, match=r"kernel has shapes .*; they must be \[in, hidden/D\]"):
        jax.eval_shape(mapped(CurrentScaling()), x, (gate, up[:, :128], down))

    def once(x):
        return jax.grad(lambda x: jnp.sum(jnp.sin(mapped(CurrentScaling())(x, (gate, up, down)))))(x)

    with pytest.raises(NotImplementedError, match="in FP8 is differentiated once"):
        jax.make_jaxpr(jax.grad(lambda x: jnp.sum(once(x))))(x)
