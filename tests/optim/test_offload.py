"""`te_jax.optim.offload`: the optimizer's own bits, with its state in host memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optim_cases import FLOAT8, assert_same, normal_like

from te_jax import optim
from te_jax.recipe import BlockScaling

OPTIMIZERS = {
    "FP8, skips": (
        "bfloat16",
        optim.adamw(1e-2, mu_dtype=FLOAT8, nu_dtype=FLOAT8, master_dtype=jnp.int16, skip_nonfinite=True),
    ),
    "optax, clipped": ("float32", optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))),
}


def steps(optimizer, params, gradients):
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, g):
        updates, state = optimizer.update(g, state, params)
        return optim.apply_updates(params, updates), state

    params = jax.tree.map(lambda x: jax.device_put(np.asarray(x), may_alias=False), params)
    state = optimizer.init(params)
    for place in range(len(gradients["kernel"])):
        params, state = step(params, state, jax.tree.map(lambda g, i=place: g[i], gradients))
    return params, state


def kinds(state, size):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state) if leaf.nbytes >= size}


@pytest.mark.parametrize(("dtype", "optimizer"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_same_bits_over_several_steps(dtype, optimizer, rng):
    """With a step that is not finite, which one of them skips."""
    params = normal_like(
        rng, {"kernel": np.zeros((3, 200), dtype), "bias": np.zeros(300, dtype), "scale": np.zeros((), dtype)}
    )
    gradients = jax.tree.map(np.array, normal_like(rng, params, 6))
    skips = hasattr(jax.eval_shape(optimizer.init, params), "skipped")
    gradients["kernel"][3, 0, 3] = np.inf if skips else 3
    offloaded = optim.offload(optimizer, min_size=512)
    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        found, expected = steps(offloaded, params, gradients), steps(optimizer, params, gradients)
    assert_same(found, expected)
    assert kinds(found[1], 512) == {"pinned_host"}
    assert kinds(found[0], 0) == kinds(expected[1], 0) == {"device"}
    assert kinds(offloaded.init(params), 512) == {"pinned_host"}
    assert not skips or found[1].skipped == 1


def test_kernels_are_requantized_as_without(rng):
    params = {"a": jnp.asarray(rng.standard_normal((32, 64)), jnp.float32), "b": jnp.ones(300)}
    how = {"a": optim.Requantize(BlockScaling()), "b": None}
    found = []
    for optimizer in (optim.adamw(1e-2), optim.offload(optim.adamw(1e-2), min_size=512)):
        updates, _ = jax.jit(optimizer.update)(params, optimizer.init(params), params)
        found.append(optim.apply_updates(params, updates, requantize=how))
    assert_same(*found)


def test_a_state_on_the_device_goes_to_the_host(rng):
    """As checkpoints restore it that do not say where it was."""
    params = normal_like(rng, np.zeros((3, 200), np.float32))
    optimizer = optim.adamw(1e-2)
    _, state = jax.jit(optim.offload(optimizer, min_size=512).update)(params, optimizer.init(params), params)
    assert kinds(state, 512) == {"pinned_host"}
    _, expected = jax.jit(optimizer.update)(params, optimizer.init(params), params)
    assert_same(state, expected)


def test_an_order_that_pairs_arrays_of_one_size():
    """What comes is as large as what leaves, and the largest are neither first nor last."""
    sizes = [256, 4096, 512, 4096, 256, 512]
    params = {str(i): jax.ShapeDtypeStruct((size,), jnp.float32) for i, size in enumerate(sizes)}
    optimizer = optim.offload(optim.adamw(1e-2), min_size=512)
    state = jax.eval_shape(optimizer.init, params)
    jaxpr = jax.make_jaxpr(optimizer.update)(params, state, params)
    moved = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "device_put"]
    there = [eqn.outvars[0].aval.size for eqn in moved if eqn.outvars[0].aval.memory_space == jax.memory.Space.Host]
    back = [eqn.outvars[0].aval.size for eqn in moved if eqn.outvars[0].aval.memory_space != jax.memory.Space.Host]
    assert there == back == [256, 256, 512, 512, 4096, 4096, 4096, 4096, 512, 512, 256, 256]


@pytest.mark.parametrize("min_size", [-1, 0.5, None])
def test_what_is_refused(min_size):
    with pytest.raises(ValueError, match="it must be a number of bytes"):
        optim.offload(optim.adamw(1e-2), min_size=min_size)
