"""Which values of a program are the same array: those have the same bytes in the same order."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from parameters import in_turns

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
    """Whether the table says that the result is its operand."""
    operand = Value.new(marked=True, names=["operand"])
    (result,) = values_of(jax.make_jaxpr(function)(x).jaxpr, [operand])
    assert result.marked
    return result.array is operand.array


@pytest.mark.parametrize(("function", "same"), [*in_turns(SAME, [True]), *in_turns(OTHER, [False])])
def test_values_that_are_the_same_array(function, same):
    assert same_array(function, jax.ShapeDtypeStruct((4, 6), jnp.float32)) == same


def test_another_distribution(make_mesh):
    """Devices of an Explicit mesh then hold other bytes."""
    mesh = make_mesh({"data": AxisType.Explicit, "model": AxisType.Explicit})
    x = jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    for spec in (P("data"), P("data", "model")):
        sharding = NamedSharding(mesh, spec)
        same = same_array(lambda x, sharding=sharding: lax.reshape(x, x.shape, out_sharding=sharding), x)
        assert same == (spec == P("data"))
