"""Which values of a program are the same array: those have the same bytes in the same order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax._core.reverse_mode import reverse_mode_only
from te_jax.offload._values import Value, values_of


@jax.custom_jvp
def custom_jvp(x, y):
    return y, jnp.ravel(x, order="F")


custom_jvp.defjvp(lambda primals, tangents: (custom_jvp(*primals), custom_jvp(*tangents)))


@jax.custom_vjp
def custom_vjp(x, y):
    return y, jnp.ravel(x, order="F")


custom_vjp.defvjp(lambda x, y: (custom_vjp(x, y), None), lambda _, dy: (dy[1].reshape(dy[0].shape, order="F"), dy[0]))


def both(x):
    """As the calls below get it, which exchange two arrays and reorder one of them."""
    return x, jnp.flip(x)


SAME = {
    "reshape": lambda x: x.reshape(3, 8),
    "ravel": jnp.ravel,
    "dimensions in their order": lambda x: lax.reshape(x, (24,), dimensions=(0, 1)),
    "squeeze": lambda x: lax.squeeze(x.reshape(4, 1, 6), (1,)),
    "copy": jnp.copy,
    "name": lambda x: checkpoint_name(x, "name"),
    "reduce_precision to the same": lambda x: lax.reduce_precision(x, 8, 23),
    "optimization_barrier": lambda x: lax.optimization_barrier((jnp.flip(x), x))[1],
    "reverse_mode_only": lambda x: reverse_mode_only((jnp.flip(x), x), "reason")[1],
    "jit": lambda x: jax.jit(lambda x, y: (y, x))(*both(x))[1],
    "checkpoint": lambda x: jax.checkpoint(lambda x, y: (y, x))(*both(x))[1],
    "custom_jvp": lambda x: custom_jvp(jnp.flip(x), x)[0],
    "custom_vjp": lambda x: custom_vjp(jnp.flip(x), x)[0],
}
OTHER = {
    "ravel, last dimension first": lambda x: jnp.ravel(x, order="F"),
    "reshape, last dimension first": lambda x: x.reshape(3, 8, order="F"),
    "another order of dimensions": lambda x: lax.reshape(x, (4, 6), dimensions=(1, 0)),
    "another order under vmap": lambda x: jax.vmap(lambda row: jnp.ravel(row.reshape(2, 3), order="F"))(x),
    "another order of a square": lambda x: lax.reshape(x.reshape(2, 2, 6), (2, 2, 6), dimensions=(1, 0, 2)),
    "transpose": jnp.transpose,
    "reduce_precision": lambda x: lax.reduce_precision(x, 8, 7),
    "bitcast": lambda x: lax.bitcast_convert_type(x, jnp.int32),
    "optimization_barrier": lambda x: lax.optimization_barrier((x, jnp.flip(x)))[1],
    "reverse_mode_only": lambda x: reverse_mode_only((x, jnp.flip(x)), "reason")[1],
    "jit": lambda x: jax.jit(lambda x, y: (y, x))(*both(x))[0],
    "checkpoint": lambda x: jax.checkpoint(lambda x, y: (y, jnp.ravel(x, order="F")))(*both(x))[1],
    "custom_jvp": lambda x: custom_jvp(x, jnp.flip(x))[1],
    "custom_vjp": lambda x: custom_vjp(x, jnp.flip(x))[1],
    "scan": lambda x: lax.scan(lambda _, row: (None, jnp.flip(row)), None, x)[1],
    "cond": lambda x: lax.cond(x[0, 0] > 0, jnp.flip, jnp.negative, x),
}


def same_array(function, x):
    """Whether the table says that the result is its operand, and both as numbers."""
    closed = jax.make_jaxpr(function)(x)
    operand = Value.new(marked=True, names=["operand"])
    (result,) = values_of(closed.jaxpr, [operand])
    assert result.marked
    return result.array is operand.array, jaxpr_as_fun(closed)(x)[0]


@pytest.mark.parametrize("function", SAME.values(), ids=SAME)
def test_the_same_array(function, rng):
    x = jnp.asarray(rng.standard_normal((4, 6)), jnp.float32)
    same, y = same_array(function, x)
    assert same
    np.testing.assert_array_equal(np.ravel(y), np.ravel(x))


@pytest.mark.parametrize("function", OTHER.values(), ids=OTHER)
def test_another_array(function, rng):
    x = jnp.asarray(rng.standard_normal((4, 6)), jnp.float32)
    same, y = same_array(function, x)
    assert not same
    assert np.asarray(y).tobytes() != np.asarray(x).tobytes() or y.dtype != x.dtype


@pytest.mark.parametrize("function", [lambda x: x, lambda x: jnp.ravel(x, order="F")], ids=["same", "another"])
def test_what_varies_over_devices(function, make_mesh, rng):
    """`pcast` changes no byte."""
    mesh = make_mesh({"data": AxisType.Auto})
    x = jnp.asarray(rng.standard_normal((4, 6)), jnp.float32)
    found = []

    def run(x):
        same, y = same_array(lambda x: function(lax.pcast(x, "data", to="varying")), x)
        found.append(same)
        return y[None]

    y = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P("data"))(x)
    assert found == [np.asarray(y[0]).tobytes() == np.asarray(x).tobytes()]


def test_another_distribution(make_mesh):
    """Devices of an Explicit mesh then hold other bytes."""
    mesh = make_mesh({"data": AxisType.Explicit, "model": AxisType.Explicit})
    x = jax.device_put(jnp.zeros((16, 16)), NamedSharding(mesh, P("data")))
    for spec in (P("data"), P("data", "model")):
        sharding = NamedSharding(mesh, spec)
        same, y = same_array(lambda x, sharding=sharding: lax.reshape(x, x.shape, out_sharding=sharding), x)
        assert same == (spec == P("data")) == y.sharding.is_equivalent_to(x.sharding, 2)
