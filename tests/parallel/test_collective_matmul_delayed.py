"""Delayed scaling in collective products: values, gradients and the next state are those of one device.

tests/linear has this for the default transport, and what each state observes.
"""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collective_oracle import FUNCTIONS, TRANSPORTS, mesh_of
from jax.sharding import PartitionSpec as P
from parameters import in_turns

from te_jax.ops import dense
from te_jax.parallel import all_gather_matmul
from te_jax.recipe import DelayedScaling
from te_jax.testing import assert_close, relative_error

RECIPE = DelayedScaling(history_len=4)
SUMS = 1e-5 if jax.default_backend() == "cpu" else 1e-3  # FP8 tensor cores add up with about 14 bits
NAMES = GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def seen(rng):
    """A state that has seen less than what comes, so that large values saturate."""
    state = jax.tree.map(lambda history: rng.uniform(1, 3, history.shape).astype(np.float32), RECIPE.init())
    return dataclasses.replace(state, uses=np.float32(1))


def drawn(rng):
    """x, w, state and dy"""
    return normal(rng, 4, 32, 32), normal(rng, 32, 64), seen(rng), normal(rng, 4, 32, 64)


def local(name, **options):
    """The function of a device's x, w and state, along the axis 1 of x or y."""
    axis = {"gather_dimension" if name == GATHER else "scatter_dimension": 1}

    def product(x, w, state):
        return FUNCTIONS[name](x, w, axis_name="tp", recipe=RECIPE, scaling_state=state, **axis, **options)

    return product


def collective(name, *, mesh=None, data=None, **options):
    """The function on whole x, w and state."""
    rows, cols = P(data, "tp"), P(data, None, "tp")
    specs, result = ((rows, P(None, "tp")), cols) if name == GATHER else ((cols, P("tp")), rows)
    return jax.shard_map(
        local(name, **options), mesh=mesh or mesh_of({"tp": 2}), in_specs=(*specs, P()), out_specs=result
    )  # fmt: skip


def on_one_device(x, w, state):
    return dense(x, w, recipe=RECIPE, scaling_state=state)


def results_of(product, x, w, state, dy):
    """y, gradients and the next state."""

    @jax.jit
    def step(x, w, state, dy):
        y, vjp = jax.vjp(product, x, w, state)
        return y, *vjp(dy)

    *results, after = step(x, w, state, dy)
    return results, after


def assert_as_on_one_device(product, case):
    (results, after), (expected, expected_after) = (results_of(run, *case) for run in (product, on_one_device))
    for one, other in zip(results, expected, strict=True):
        assert_close(one, other, tolerance=SUMS)
    jax.tree.map(np.testing.assert_array_equal, after, expected_after)
    x, w, _, dy = case
    assert [after.activation[0], after.kernel[0], after.gradient[0]] == [np.abs(a).max() for a in (x, w, dy)]
    assert 0.02 < relative_error(results[0], np.float64(x) @ np.float64(w)) < 0.4  # it saturates


@pytest.mark.parametrize(("name", "transport", "data"), in_turns(NAMES, TRANSPORTS[1:], [None, "data"]))
def test_each_transport(name, transport, data, rng):
    """The state is one for all devices, and so are the scales, also where the batch is split too."""
    mesh = mesh_of({"data": 2, "tp": 2} if data else {"tp": 2})
    assert_as_on_one_device(collective(name, mesh=mesh, data=data, transport=transport), drawn(rng))


@pytest.mark.parametrize("name", NAMES)
def test_no_empty_array_enters_or_leaves_a_shard_map(name, rng):
    """XLA of jax 0.11.2 crashes while it compiles such a program for GPUs."""
    x, kernels, state = normal(rng, 2, 32, 32), normal(rng, 3, 32, 32), seen(rng)
    product = collective(name, transport="p2p")

    def loss(kernels, state):
        return jnp.sum(jax.lax.scan(lambda x, kernel: (product(x, kernel, state), None), x, kernels)[0])

    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(kernels, state).as_text()
    empty = [line for line in text.splitlines() if "tensor<0x" in line]
    made_and_used_in_place = ("stablehlo.constant", "stablehlo.broadcast_in_dim", "stablehlo.custom_call")
    assert empty
    assert not [line for line in empty if not any(operation in line for operation in made_and_used_in_place)]


@pytest.mark.parametrize(("name", "mapped"), in_turns(NAMES, ["pmap", "shard_map"]))
def test_where_jax_does_not_track_what_varies(mapped, name, rng):
    """Every device gets the next state of the group."""
    x, w, state, dy = drawn(rng)
    _, expected = results_of(on_one_device, x, w, state, dy)
    product, mesh = local(name, transport=TRANSPORTS[-1]), mesh_of({"tp": 2})

    def next_state(x, w, dy, state):
        return jax.grad(lambda state: jnp.sum(product(x, w, state) * dy))(state)

    rows, cols = (1, 2) if name == GATHER else (2, 1)
    operands = [np.stack(np.split(a, 2, axis=axis)) for a, axis in ((x, rows), (w, cols - 1), (dy, cols))]
    if mapped == "pmap":
        run = jax.pmap(next_state, axis_name="tp", in_axes=(0, 0, 0, None), devices=jax.devices()[:2])
    else:
        run = jax.jit(
            jax.shard_map(
                lambda x, w, dy, state: jax.tree.map(lambda h: h[None], next_state(x[0], w[0], dy[0], state)),
                mesh=mesh, in_specs=(P("tp"), P("tp"), P("tp"), P()), out_specs=P("tp"), check_vma=False,
            )
        )  # fmt: skip
    found = jax.tree.map(np.asarray, run(*operands, state))
    for device in range(2):
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(operator.itemgetter(device), found), expected)


def test_a_state_that_differs_from_device_to_device(rng):
    x, w, state, _ = drawn(rng)

    def run(x, w, state):
        state = jax.tree.map(lambda history: jax.lax.pcast(history, "tp", to="varying"), state)
        return all_gather_matmul(x, w, axis_name="tp", recipe=RECIPE, scaling_state=state)

    mapped = jax.shard_map(run, mesh=mesh_of({"tp": 2}), in_specs=(P(None, "tp"), P(None, "tp"), P()), out_specs=P())
    with pytest.raises(ValueError, match=r"scaling_state differs from device to device along \['tp'\].*into shard_map"):
        jax.eval_shape(functools.partial(mapped), x, w, state)
