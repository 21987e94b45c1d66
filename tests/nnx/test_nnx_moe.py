"""The mixture of experts for NNX across devices. Else: tests/modules."""

import jax
import pytest
from flax import nnx
from flax_apis import normal
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from te_jax.layers import Router
from te_jax.nnx import MoE
from te_jax.testing import assert_close

pytestmark = pytest.mark.skipif(
    jax.default_backend() == "gpu", reason="float32, which has no kernel on a GPU: see tests/gpu"
)

EXPERTS, IN, HIDDEN, OUT = 4, 32, 48, 16
ROUTER = Router(2, score="sigmoid", scaling_factor=2.5)


def test_expert_parallel(rng, require_devices):
    """Created with all experts, merged with parts of them: the value of the layer on one device."""
    require_devices(2)
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    kernel_init = nnx.with_metadata(nnx.initializers.lecun_normal(), out_sharding=("expert", None, None))
    bias_init = nnx.with_metadata(nnx.initializers.normal(0.1), out_sharding=("expert", None))
    options = {
        "use_bias": True, "expert_bias": True, "shared_features": 64, "kernel_init": kernel_init,
        "down_kernel_init": kernel_init, "bias_init": bias_init, "down_bias_init": bias_init,
    }  # fmt: skip
    with jax.set_mesh(mesh):
        layers = [
            MoE(IN, EXPERTS, HIDDEN, ROUTER, OUT, expert_parallel=axis, **options, rngs=nnx.Rngs(0))
            for axis in ("expert", None)
        ]
    x = normal(rng, (4, 8, IN))
    graph, state = nnx.split(layers[0])
    specs = nnx.get_partition_spec(state)
    assert state["gate_proj"]["kernel"].get_value().sharding.spec == P("expert", None, None)
    mapped = jax.shard_map(
        lambda state, x: nnx.merge(graph, state)(x).y, mesh=mesh, in_specs=(specs, P("expert")), out_specs=P("expert")
    )
    assert_close(jax.jit(mapped)(state, x), nnx.jit(lambda layer, x: layer(x).y)(layers[1], x), tolerance=1e-5)
