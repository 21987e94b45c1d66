"""Data parallelism is kept whatever the length of sequences: every device multiplies its own tokens alone."""

import jax
import jax.numpy as jnp
import pytest
from dense_oracle import RECIPES, random_case, warm_state
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax import hlo, ops
from te_jax.testing import assert_close

IN, OUT = 64, 32
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def gradients_of(recipe):
    def loss(x, kernel, dy, state):
        y = ops.dense(x, kernel, recipe=recipe, scaling_state=state)
        return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32))

    return jax.jit(jax.grad(loss, argnums=(0, 1, 3)))


@pytest.mark.parametrize(
    ("name", "length", "axis_type"),
    [
        *((name, 196, (AUTO, EXPLICIT)[i % 2]) for i, name in enumerate(RECIPES)),
        ("current", 197, EXPLICIT),
        ("block", 197, EXPLICIT),
    ],
)
def test_sequences_of_any_length(name, length, axis_type, make_mesh, rng):
    """What crosses devices is the sum of the weight gradient and amaxes, never tokens."""
    mesh = make_mesh({"data": axis_type})
    case = random_case(rng, (mesh.size, length), (IN,), (OUT,), with_bias=False)
    state = warm_state(case, RECIPES[name]) if name == "delayed" else None
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    x, dy = (jax.device_put(a, split) for a in (case.x, case.dy))
    run = gradients_of(RECIPES[name])
    compiled = run.lower(x, *jax.device_put((case.kernel,), whole), dy, jax.device_put(state, whole)).compile()
    found = hlo.collectives(compiled)
    assert {collective.kind for collective in found} == {"all-reduce"}
    assert max(collective.bytes for collective in found) <= 4 * IN * OUT
    actual = compiled(x, *jax.device_put((case.kernel,), whole), dy, jax.device_put(state, whole))
    expected = run(case.x, case.kernel, case.dy, state)
    # Blocks of 128 tokens begin with every sequence where several devices share a batch.
    for got, wanted in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_close(got, wanted, tolerance=5e-2 if name == "block" else 5e-3)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_a_warning_names_the_gather_of_blocks(axis_type, require_devices, rng):
    require_devices(2)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:2])
    case = random_case(rng, (192,), (IN,), (OUT,), with_bias=False)
    x, dy = (jax.device_put(a, NamedSharding(mesh, P("data"))) for a in (case.x, case.dy))
    with pytest.warns(RuntimeWarning, match="192 values is split over 2 devices, whose shards would cut blocks of 128"):
        gradients_of(RECIPES["block"]).lower(x, case.kernel, dy, None).compile()
