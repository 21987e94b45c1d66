"""What JAX says to somebody who exports native kernels, and that its way out is one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from parameters import in_turns

from te_jax import native, ops
from te_jax.recipe import CurrentScaling

X = jnp.ones((32, 32))
FUNCTIONS = {
    "softmax_cross_entropy": lambda x: ops.softmax_cross_entropy(x, jnp.zeros(len(x), jnp.int32), reduction="none"),
    "dense": lambda x: ops.dense(x, X, recipe=CurrentScaling()),
    "gradient": jax.grad(lambda x: jnp.sum(ops.dense(x, X, recipe=CurrentScaling()))),
}


@pytest.mark.parametrize(("name", "split"), in_turns(list(FUNCTIONS), [True, False]))
def test_the_error_names_the_way_out(name, split, native_kernels, make_mesh):
    fn, x = FUNCTIONS[name], X
    if split:
        mesh = make_mesh({"data": AxisType.Auto})
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        fn = jax.shard_map(fn, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    fn = jax.jit(fn)
    with pytest.raises(ValueError, match=r"pass disabled_checks=te_jax\.native\.export_checks\(\)"):
        export.export(fn)(x)
    exported = export.export(fn, disabled_checks=native.export_checks())(x)
    np.testing.assert_array_equal(exported.call(x), fn(x))


def test_only_exported_programs_carry_the_hint(native_kernels):
    fn = jax.jit(FUNCTIONS["dense"])
    assert "te_quantize" in fn.lower(X).as_text()
    assert "export_checks" not in fn.lower(X).as_text()
