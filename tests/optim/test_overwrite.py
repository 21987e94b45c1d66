"""overwrite_with_gradient: the state of delayed scaling advances as `TrainState` and `te_jax.nnx` advance it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from te_jax import optim
from te_jax.ops import dense
from te_jax.recipe import DelayedScaling
from te_jax.testing import assert_close

pytestmark = pytest.mark.usefixtures("standard_promotion")  # of optax

RECIPE = DelayedScaling(history_len=4)
OVERWRITE = "_overwrite_with_gradient"


def normal(rng, *shape):
    return jax.device_put(np.asarray(rng.standard_normal(shape), jnp.float32))


ROLES = {"te_jax": ("activation", "kernel", "gradient"), "flax": ("input", "kernel", "output_grad")}


@pytest.mark.parametrize(
    ("names", "collection", "stacked"),
    [("te_jax", OVERWRITE, True), ("te_jax", "layers", False), ("flax", "layers", False)],
)
def test_states_of_layers_are_overwritten_where_the_loss_used_them(names, collection, stacked, rng):
    """Known by Linen's collection, or by the names of te_jax's or Flax's layers. The inner optimizer sees none."""
    shape = (3,) if stacked else ()
    state = {f"{role}_amax_history": np.abs(normal(rng, *shape, 4)) for role in ROLES[names]}
    state |= (
        {"uses": np.ones(shape, np.float32)}
        if names == "te_jax"
        else {f"{role}_scale": normal(rng, 1) for role in ROLES[names]}
    )
    params = {"params": {"kernel": normal(rng, 4)}, collection: {"layer": state}}
    used = np.arange(3) != 1 if stacked else np.array(names == "flax")
    # The gradients of what is not used are zeros.
    found = {name: (x + 1) * _in_front(used, x).astype(np.float32) for name, x in state.items()}
    gradients = {"params": params["params"], collection: {"layer": found}}
    seen = []

    def update(updates, state, params):
        seen.extend((updates, params))
        return updates, state

    inner = optax.GradientTransformation(lambda params: seen.append(params) or optax.EmptyState(), update)
    optimizer = optim.overwrite_with_gradient(inner)
    updates = jax.jit(lambda g, params: optimizer.update(g, optimizer.init(params), params)[0])(gradients, params)
    for name, value in updates[collection]["layer"].items():
        expected = np.where(_in_front(used, value), found[name], state[name])
        assert_close(state[name] + np.asarray(value), expected, tolerance=1e-6)
    assert len(seen) == 3
    assert [[leaf.shape for leaf in jax.tree.leaves(tree)] for tree in seen] == [[(4,)]] * 3


def test_states_anywhere_in_a_tree(rng):
    x = normal(rng, 16, 32)
    params = [{"kernel": normal(rng, 32, 32), "scaling": RECIPE.init(), "uses": jnp.ones(())} for _ in range(2)]
    optimizer = optim.overwrite_with_gradient(optax.sgd(0.1))

    def loss_fn(params, x):
        for layer in params:
            x = dense(x, layer["kernel"], recipe=RECIPE, scaling_state=layer["scaling"]) * layer["uses"]
        return jnp.sum(jnp.square(x))

    state = optimizer.init(params)
    gradients = jax.jit(jax.grad(loss_fn))(params, x)
    after = optax.apply_updates(params, optimizer.update(gradients, state, params)[0])
    for layer, before, gradient in zip(after, params, gradients, strict=True):
        jax.tree.map(np.testing.assert_array_equal, layer["scaling"], gradient["scaling"])
        assert_close(layer["kernel"], before["kernel"] - 0.1 * gradient["kernel"])
        assert_close(layer["uses"], before["uses"] - 0.1 * gradient["uses"])  # a parameter, whatever its name


def _in_front(flags, x):
    return np.reshape(flags, flags.shape + (1,) * (x.ndim - flags.ndim))


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_next_values_are_never_rounded_down(rng, jit):
    """An amax that became smaller would saturate, and one that became 0 would be unknown."""
    former, following = np.float32(2.0) ** rng.uniform(-40, 40, (2, 4096)).astype(np.float32)
    former[:8], following[4:12] = 0, 0
    following[-8:] = former[-8:] * np.float32(1.5)
    params, gradients = ({OVERWRITE: jnp.asarray(x)} for x in (former, following))
    optimizer = optim.overwrite_with_gradient(optax.sgd(0.1))

    @jit
    def step(params, gradients):
        updates, _ = optimizer.update(gradients, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    after = np.asarray(step(params, gradients)[OVERWRITE])
    assert (after >= following).all()
    assert (after <= following + 2.0**-22 * np.maximum(former, following)).all()
    np.testing.assert_array_equal(after[following == 0], 0)
    np.testing.assert_array_equal(after[-8:], following[-8:])


def test_params_are_needed():
    optimizer = optim.overwrite_with_gradient(optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"params is None; .*: call update\(gradients, opt_state, params\)"):
        optimizer.update({OVERWRITE: jnp.ones(3)}, optimizer.init({OVERWRITE: jnp.ones(3)}))
