"""The state of delayed scaling: it advances, and the next step uses it, under everything that carries it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax_apis import LINEN, NNX, both, mean_square, normal, observed

from te_jax.recipe import DelayedScaling
from te_jax.testing import relative_error

HISTORY = 4
RECIPE = DelayedScaling(history_len=HISTORY)


def chain(api):
    """A model of te_jax's layers."""
    return api.chain(
        up=api.layer("Linear", 32, 48, recipe=RECIPE, activation="silu"),
        down=api.layer("Linear", 48, 32, recipe=RECIPE),
    )


def of_flax(api):
    """The same of Flax's layers, with te_jax's products in them."""
    return api.chain(
        up=api.flax_with_products({"recipe": RECIPE}, 32, 48),
        silu=api.function(jax.nn.silu),
        down=api.flax_with_products({"recipe": RECIPE}, 48, 32),
    )


def stack(api):
    """Two stacked layers, rematerialized."""
    return api.stack(api.layer("Linear", 32, 32, recipe=RECIPE), 2, remat=True)


MODELS = [chain, of_flax, stack]


def exact(model, parameters, x):
    """The model in float32."""
    if model is stack:
        for layer in range(2):
            kernel, bias = (parameters["layer"][name][layer] for name in ("kernel", "bias"))
            x = x + x @ kernel + bias[None]
        return x
    up, down = parameters["up"], parameters["down"]
    return jax.nn.silu(x @ up["kernel"] + up["bias"][None]) @ down["kernel"] + down["bias"][None]


@both
@pytest.mark.parametrize("model", MODELS)
def test_every_history_advances_with_an_optimizer(rng, model, api):
    # Growing inputs: no two steps observe the same.
    batches = [normal(rng, (16, 32)) * 2.0**step for step in range(HISTORY + 1)]
    stacked, model = model is stack, api.make(model(api), rng, batches[0])
    states = api.states(model)
    assert len(states) == (4 if stacked else 8)
    assert not any(state.any() for state in states.values())
    optimizer = api.optimizer(model, optax.sgd(1e-2, momentum=0.9))

    @api.jit
    def step(model, optimizer, x):
        return api.update(optimizer, model, api.value_and_grad(mean_square)(model, x)[1])

    for count, x in enumerate(batches, start=1):
        before = api.states(model)
        optimizer, model = step(model, optimizer, x)
        for path, history in api.states(model).items():
            if "history" in path:
                assert (history[..., 0] > 0).all(), path
                assert (history[..., 0] != before[path][..., 0]).all(), path
                np.testing.assert_array_equal(history[..., 1:], before[path][..., :-1])
                assert (np.count_nonzero(history, axis=-1) == min(count, HISTORY)).all()


@both
def test_the_first_layer_observes_its_input_and_its_kernel(rng, api):
    x = normal(rng, (16, 32))
    model = api.make(chain(api), rng, x)
    states = api.states(api.jit(api.value_and_grad(mean_square))(model, x)[1])
    assert states["up/activation_amax_history"][0] == jnp.abs(x).max()
    assert states["up/kernel_amax_history"][0] == jnp.abs(api.parameters(model)["up"]["kernel"]).max()


@pytest.mark.parametrize(("api", "model"), [(LINEN, of_flax), (LINEN, stack), (NNX, chain), (NNX, stack)])
def test_the_next_step_uses_what_this_one_observed(rng, api, model):
    """Inputs beyond the range of FP8 saturate under a scale of 1; once they were seen, they do not."""
    kind, x = model, normal(rng, (16, 32)) * 1e4
    model = api.make(model(api), rng, x)

    @api.jit
    def step(model, x):
        def loss(model, x):
            y = model(x)
            return jnp.mean(jnp.square(y)), y

        (_, y), gradients = api.value_and_grad(loss, has_aux=True)(model, x)
        return y, api.overwrite(model, gradients)

    errors = []
    for _ in range(4):  # a layer needs the one before it to be right
        y, model = step(model, x)
        errors.append(relative_error(y, exact(kind, api.parameters(model), x)))
    assert errors[0] > 0.5
    assert errors[-1] < 0.12


@both
def test_accumulated_microbatches_keep_the_largest(rng, api):
    """The largest magnitude is in the first microbatch: adding, averaging or keeping the last one would lose it."""
    microbatches = [normal(rng, (16, 32)) * scale for scale in (8.0, 1.0, 2.0)]
    model = observed(api, api.make(chain(api), rng, microbatches[0]), microbatches[1])
    gradient = api.jit(lambda model, x: api.value_and_grad(mean_square)(model, x)[1])
    single = [gradient(model, x) for x in microbatches]
    merged = api.jit(lambda a, b, c: api.merge_gradients(api.merge_gradients(a, b), c))(*single)
    states, before = api.states(merged), api.states(model)
    for path, history in states.items():
        np.testing.assert_allclose(history, np.max([api.states(g)[path] for g in single], axis=0), rtol=1e-5)
        if "history" in path:
            np.testing.assert_array_equal(history[1:], before[path][:-1], err_msg=path)
    assert states["up/activation_amax_history"][0] == jnp.abs(microbatches[0]).max()
    kernels = [np.asarray(api.parameters(gradients)["up"]["kernel"]) for gradients in single]
    assert relative_error(api.parameters(merged)["up"]["kernel"], np.sum(kernels, axis=0)) < 1e-4
    after = api.states(api.overwrite(model, merged))
    for path, state in states.items():
        np.testing.assert_array_equal(after[path], state)


@both
def test_a_layer_that_is_called_twice_in_one_gradient(rng, api):
    """JAX adds up the two next states. Older entries stay what they were; the newest stays an upper bound."""
    x = normal(rng, (16, 32))
    model = api.make(api.chain(shared=api.layer("Linear", 32, 32, recipe=RECIPE, use_bias=False)), rng, x)

    @api.jit
    def gradient(model, x):
        return api.value_and_grad(lambda model, x: mean_square(model, model(x) * 3.0))(model, x)[1]

    first, peaks = float(jnp.abs(x).max()), []
    for _ in range(HISTORY + 2):
        model = api.overwrite(model, gradient(model, x))
        states = api.states(model)
        peaks.append(float(states["shared/activation_amax_history"][0]))
        assert 2 * first < peaks[-1] < 20 * first
        assert states["shared/uses"] == 2
    # What the layer reads: the sums of the steps, not doubled again in each.
    history = states["shared/activation_amax_history"]
    np.testing.assert_allclose(history[1:] / 2, peaks[-2 : -HISTORY - 1 : -1], rtol=1e-6)
    kernel = api.parameters(model)["shared"]["kernel"]
    assert relative_error(model(model(x) * 3.0), x @ kernel * 3.0 @ kernel) < 0.12
    if api is NNX:
        return
    for _ in range(HISTORY + 2):  # steps that overflow repeat the newest amaxes, which are sums already
        model = api.overwrite(model, gradient(model, x.at[0, 0].set(jnp.nan)))
    for name in ("activation_amax_history", "gradient_amax_history"):
        newest, *older = api.states(model)[f"shared/{name}"]
        np.testing.assert_allclose(newest, states[f"shared/{name}"][0], rtol=1e-6)
        np.testing.assert_allclose(np.array(older) / 2, newest, rtol=1e-6)


@both
def test_a_sum_in_float32_stays_one(rng, api):
    first, second = (
        jax.tree.map(
            jnp.ones_like,
            api.zeros(api.make(api.layer("Linear", 16, 16, param_dtype=dtype), rng, normal(rng, (3, 16), dtype))),
        )
        for dtype in (jnp.float32, jnp.bfloat16)
    )
    bias = api.parameters(api.merge_gradients(first, second))["bias"]
    np.testing.assert_array_equal(bias, np.full(16, 2.0, np.float32), strict=True)


@both
def test_gradients_of_different_variables_are_not_merged(rng, api):
    first, second, third = (
        api.zeros(api.make(api.layer("Linear", size, 16, use_bias=use_bias), rng, normal(rng, (3, size))))
        for size, use_bias in ((16, True), (16, False), (1, True))
    )
    with pytest.raises(ValueError, match=r"first and second differ in \[.*bias.*\].*: merge gradients with respect to"):
        api.merge_gradients(first, second)
    with pytest.raises(ValueError, match=r"second has shape \(1, 16\) for .*kernel.*, and first \(16, 16\): merge"):
        api.merge_gradients(first, third)
