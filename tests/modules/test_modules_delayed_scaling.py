"""The state of delayed scaling: it advances, and the next step uses it, under everything that carries it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT as OVERWRITE
from flax.training.dynamic_scale import DynamicScale
from flax_apis import LINEN, NNX, Bound, both, mean_square, normal

from te_jax.recipe import DelayedScaling
from te_jax.testing import relative_error

HISTORY = 4
RECIPE = DelayedScaling(history_len=HISTORY)
X = np.ones((16, 32), np.float32)


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


@pytest.mark.parametrize(
    ("api", "model"),
    [(LINEN, of_flax), (NNX, stack)],
    ids=["linen-of_flax", "nnx-stack"],
)
def test_every_history_advances_with_an_optimizer(rng, model, api):
    # Growing inputs: no two steps observe the same.
    batches = [normal(rng, (16, 32)) * 2.0**step for step in range(HISTORY + 1)]
    stacked, model = model is stack, api.drawn(model(api), rng, batches[0])
    states = api.states(model)
    assert len(states) == (4 if stacked else 8)
    optimizer = api.optimizer(model, optax.sgd(1e-2, momentum=0.9))

    @api.jit
    def step(model, optimizer, x):
        return api.update(optimizer, model, api.value_and_grad(mean_square)(model, x)[1])

    for count, x in enumerate(batches, start=1):
        before, kernel = api.states(model), api.parameters(model)
        optimizer, model = step(model, optimizer, x)
        states = api.states(model)
        for path, history in states.items():
            if "history" in path:
                assert (history[..., 0] > 0).all(), path
                assert (history[..., 0] != before[path][..., 0]).all(), path
                np.testing.assert_array_equal(history[..., 1:], before[path][..., :-1])
                assert (np.count_nonzero(history, axis=-1) == min(count, HISTORY)).all()
        if not stacked:
            (observed_x,) = (states[path][0] for path in states if "up" in path and "activation" in path)
            (observed_kernel,) = (states[path][0] for path in states if "up" in path and "kernel" in path)
            assert observed_x == np.abs(np.asarray(x)).max()
            assert observed_kernel == np.abs(np.asarray(kernel["up"]["kernel"])).max()


@both
def test_accumulated_microbatches_keep_the_largest(rng, api):
    """The largest magnitude is in the first microbatch: adding, averaging or keeping the last one would lose it."""
    microbatches = [normal(rng, (16, 32)) * scale for scale in (8.0, 1.0, 2.0)]
    gradient = api.jit(lambda model, x: api.value_and_grad(mean_square)(model, x)[1])
    model = api.drawn(chain(api), rng, microbatches[0])
    model = api.overwrite(model, gradient(model, microbatches[1]))
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
def test_a_layer_that_a_step_leaves_out(rng, api):
    """Its state stays in NNX; in Linen its histories begin anew, as its gradient, zeros, takes their place."""
    x = normal(rng, (16, 32))
    model = api.drawn(api.stack(api.layer("Linear", 32, 32, recipe=RECIPE), 2), rng, x)
    empty = api.states(model)

    @api.jit
    def gradients_of(model, x, factor):
        return api.value_and_grad(lambda model, x: jnp.sum(factor * x) + factor * mean_square(model, x))(model, x)[1]

    used = gradients_of(model, x, 1.0)
    model = api.overwrite(model, used)
    before = api.states(model)
    assert all(state.any() for state in before.values())
    unused = jax.jit(lambda used: jax.tree.map(jnp.zeros_like, used))(used)
    after = api.states(api.overwrite(model, unused))
    jax.tree.map(np.testing.assert_array_equal, after, empty if api is LINEN else before)
    if api is LINEN:
        return
    # Of stacked layers, each by itself.
    used = gradients_of(model, x, 1.0)
    api.overwrite(model, jax.tree.map(lambda a, b: jnp.concatenate([a[:1], b[1:]]), used, unused))
    for path, state in api.states(model).items():
        if "uses" not in path:
            np.testing.assert_array_equal(state[0, 1:], before[path][0, :-1])
            assert state[0, 0] > 0
            np.testing.assert_array_equal(state[1:], before[path][1:])


@both
def test_a_sum_in_float32_stays_one(api):
    first, second = (
        jax.tree.map(
            jnp.ones_like,
            api.zeros(api.drawn(api.layer("Linear", 16, 16, param_dtype=dtype), np.random, X[:, :16].astype(dtype))),
        )
        for dtype in (jnp.float32, jnp.bfloat16)
    )
    bias = api.parameters(api.merge_gradients(first, second))["bias"]
    np.testing.assert_array_equal(bias, np.full(16, 2.0, np.float32), strict=True)


@both
def test_gradients_of_different_variables_are_not_merged(api):
    first, second, third = (
        api.zeros(api.drawn(api.layer("Linear", size, 16, use_bias=use_bias), np.random, X[:, :size]))
        for size, use_bias in ((16, True), (16, False), (1, True))
    )
    with pytest.raises(ValueError, match=r"first and second differ in \[.*bias.*\].*: merge gradients with respect to"):
        api.merge_gradients(first, second)
    with pytest.raises(ValueError, match=r"second has shape \(1, 16\) for .*kernel.*, and first \(16, 16\): merge"):
        api.merge_gradients(first, third)


# ------------------------------------------------------------------------------------------------------------- Linen


def test_gradients_that_flax_divides_by_a_loss_scale(rng):
    """DynamicScale divides the next state too, which must be undone; where it is not, the next loss is NaN."""
    x, layer = normal(rng, (16, 32)), LINEN.layer("Linear", 32, 32, recipe=RECIPE)
    model = LINEN.drawn(layer, rng, x)
    apply, scale = jax.jit(lambda variables, x: mean_square(Bound(model.module, variables), x)), DynamicScale()

    @jax.jit
    def step(scale, variables, x):
        def loss(variables, x):
            return mean_square(Bound(model.module, variables), x)

        divisor = scale.scale
        scale, _, value, gradients = scale.value_and_grad(loss)(variables, x)
        return scale, value, gradients, divisor, *jax.value_and_grad(loss)(variables, x)

    variables = model.variables
    for factor in (1.0, 2.0, 0.5):
        scale, value, gradients, divisor, expected_value, expected = step(scale, variables, factor * x)
        np.testing.assert_allclose(value, expected_value, rtol=1e-6)
        # The quantized gradient is another one while its history is empty.
        assert relative_error(gradients["params"]["kernel"], expected["params"]["kernel"]) < 0.25
        undone = jax.tree.map(lambda x, divisor=divisor: divisor * x, gradients[OVERWRITE])
        np.testing.assert_allclose(
            undone["activation_amax_history"], expected[OVERWRITE]["activation_amax_history"], rtol=1e-6
        )
        variables = variables | {OVERWRITE: undone}
    assert np.isnan(apply(variables | {OVERWRITE: gradients[OVERWRITE]}, x))


def test_initialisation_gives_what_later_steps_have():
    """Carries of loops and donated buffers need the same shapes, dtypes and structure."""
    model = LINEN.abstract(stack(LINEN), X)
    gradients = jax.eval_shape(lambda model: LINEN.value_and_grad(mean_square)(model, X)[1], model)
    assert jax.tree.map(jax.typeof, model.variables) == jax.tree.map(jax.typeof, gradients)


def test_the_collection_that_was_left_out_is_named():
    """The likeliest mistake of those who know layers without state."""
    layer = LINEN.layer("Linear", 32, 32, recipe=RECIPE)
    for kind, name in ((layer, "the layer"), (chain(LINEN), "up"), (stack(LINEN), "layer")):
        model = LINEN.abstract(kind, X)
        params = {"params": model.variables["params"]}
        message = rf'variables have no state in "{OVERWRITE}" for {name}, .*: pass this collection beside "params"'
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(lambda v, m=model: m.module.apply(v, X), params)
        made = jax.eval_shape(lambda v, m=model: m.module.apply(v, X, mutable=[OVERWRITE])[1], params)
        assert jax.tree.structure(made[OVERWRITE]) == jax.tree.structure(model.variables[OVERWRITE])
