"""The mixture of experts for Linen across devices. Else: tests/modules."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax_apis import normal
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from te_jax.flax import MoE
from te_jax.layers import ExpertParallel, Router
from te_jax.testing import assert_close

pytestmark = pytest.mark.skipif(
    jax.default_backend() == "gpu", reason="float32, which has no kernel on a GPU: see tests/gpu"
)

EXPERTS, IN, HIDDEN, OUT = 4, 32, 48, 16
ROUTER = Router(2, score="sigmoid", scaling_factor=2.5)


def test_expert_parallel(rng, require_devices):
    """Created with all experts, applied to parts of them: value and gradients of the module on one device."""
    require_devices(2)
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    kernel_init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("expert", None, None))
    bias_init = nn.with_logical_partitioning(nn.initializers.normal(0.1), ("expert", None))
    model = MoE(
        EXPERTS, HIDDEN, ROUTER, OUT, expert_parallel=ExpertParallel("expert", buffer_factor=2.0),
        shared_features=64, expert_bias=True, use_bias=True, kernel_init=kernel_init, down_kernel_init=kernel_init,
        bias_init=bias_init, down_bias_init=bias_init,
    )  # fmt: skip
    x = normal(rng, (4, 8, IN))
    boxed = jax.jit(model.init)(jax.random.key(0), x)
    specs, variables = nn.get_partition_spec(boxed), nn.unbox(boxed)
    assert variables["params"]["gate_proj"]["kernel"].shape == (EXPERTS, IN, HIDDEN)
    assert specs["params"]["down_proj"]["bias"] == P("expert", None)

    def apart(variables, x):
        return jax.shard_map(
            lambda *a: model.apply(*a).y, mesh=mesh, in_specs=(specs, P("expert")), out_specs=P("expert")
        )(variables, x)  # fmt: skip

    def together(variables, x):
        return model.clone(expert_parallel=None).apply(variables, x).y

    found, wanted = (
        jax.jit(jax.value_and_grad(lambda *a, f=f: jnp.sum(f(*a) ** 2)))(variables, x) for f in (apart, together)
    )
    jax.tree.map(functools.partial(assert_close, tolerance=1e-5), found, wanted)
    with pytest.raises(ValueError, match="no axis 'expert' is mapped here; call it inside shard_map"):
        jax.eval_shape(model.apply, variables, x)
