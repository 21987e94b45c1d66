"""The decoder with recipes: what runs in FP8 and what does not, and the state of delayed scaling."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax.models import PRESETS, DecoderConfig, apply, init, init_scaling_state, loss
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling
from te_jax.testing import relative_error

# A vocabulary that FP8 products would refuse.
PLAIN = DecoderConfig(
    vocab_size=19, num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, mlp_size=48
)
STACK = dataclasses.replace(PLAIN, num_layers=2)
PROJECTIONS = ("query", "key", "value", "out", "gate", "up", "down")

# Compiled once for each recipe, so tests use one shape.
SHAPE = (4, 32)
value_and_grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 4)), static_argnums=3)


def random_params(rng, config=PLAIN):
    """Unlike those of `init`, of another size in each layer."""
    params = jax.device_get(jax.jit(init, static_argnums=0)(config, jax.random.key(int(rng.integers(2**31)))))
    return jax.tree.map(lambda leaf: leaf * leaf.dtype.type(rng.uniform(0.5, 1.5)), params)


def stacked(layers):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *layers)


def random_tokens(rng):
    return jax.device_put(np.asarray(rng.integers(0, PLAIN.vocab_size, SHAPE), jnp.int32))


def test_loss_and_gradients_are_near_those_without_a_recipe(rng):
    """`test_tensor_parallel.py` has blocks."""
    config = dataclasses.replace(STACK, recipe=DelayedScaling(history_len=3))
    params, tokens = random_params(rng, STACK), random_tokens(rng)
    targets = random_tokens(rng)
    state = init_scaling_state(config)
    for _ in range(3):  # gradients reach layers beneath others at their right size once those know their own
        (value, (gradients, state)) = value_and_grad(params, tokens, targets, config, state)
    expected, (expected_gradients, _) = value_and_grad(params, tokens, targets, STACK, None)
    assert 0 < abs(value - expected) < 2e-2 * expected
    gradients, expected_gradients = (
        {**each, "layers": stacked(each["layers"])} for each in (gradients, expected_gradients)
    )
    for (path, gradient), found in zip(
        jax.tree.leaves_with_path(expected_gradients), jax.tree.leaves(gradients), strict=True
    ):
        assert found.dtype == jnp.float32
        assert 1e-4 < relative_error(found, gradient) < 0.4, path


def test_projections_of_blocks_are_in_fp8_and_nothing_else_is(rng):
    params, tokens = random_params(rng), random_tokens(rng)
    config = dataclasses.replace(PLAIN, recipe=CurrentScaling())

    def fp8_shapes(config):
        text = str(jax.make_jaxpr(lambda *a: apply(*a, config, implementation="reference"))(params, tokens))
        return {tuple(map(int, shape.split(","))) for shape in re.findall(r"f8_e4m3fn\[([\d,]+)\]", text)}

    assert not fp8_shapes(PLAIN)
    shapes = {tuple(sorted(shape)) for shape in fp8_shapes(config)}
    assert shapes >= {tuple(sorted(params["layers"][0][name].shape)) for name in PROJECTIONS}
    assert not any(PLAIN.vocab_size in shape for shape in shapes)


def test_products_of_the_head_in_fp8_are_those_that_are_named(rng):
    """The forward GEMM in FP8 changes the loss, and those of the gradients do not."""
    params, tokens, targets = random_params(rng), random_tokens(rng), random_tokens(rng)

    def losses_of(**options):
        config = dataclasses.replace(PLAIN, dtype="bfloat16", **options)
        with jax.numpy_dtype_promotion("standard"):
            value, (gradients, _) = value_and_grad(params, tokens, targets, config, None)
        return float(value), gradients["head"]

    plain, plain_gradient = losses_of()
    backward, backward_gradient = losses_of(head_recipe=BlockScaling())
    everything, _ = losses_of(head_recipe=BlockScaling(), head_fp8_products=["wgrad", "forward", "dgrad"])
    assert backward == pytest.approx(plain, rel=1e-5)
    assert 1e-3 < relative_error(backward_gradient, plain_gradient) < 0.1
    assert 0 < abs(everything - plain) < 2e-2 * plain  # errors of many tokens, which may nearly cancel


def test_each_layer_and_projection_has_a_history_of_its_own(rng):
    config = dataclasses.replace(STACK, recipe=DelayedScaling(history_len=3))
    params, tokens = random_params(rng, STACK), random_tokens(rng)
    state = init_scaling_state(config)
    assert [set(of_layer) for of_layer in state] == [set(PROJECTIONS)] * 2
    histories = [stacked(state)]
    for _ in range(2):
        _, (_, state) = value_and_grad(params, tokens, tokens, config, state)
        histories.append(stacked(state))
    before, first, second = histories
    for name in PROJECTIONS:
        for role in ("activation", "kernel", "gradient"):
            zero, one, two = (getattr(each[name], role) for each in (before, first, second))
            assert zero.shape == one.shape == (2, 3)
            assert not zero.any()
            assert (two[:, 0] > 0).all()
            assert not one[:, 1:].any()
            np.testing.assert_array_equal(two[:, 1:], one[:, :-1])
        largest = [np.abs(np.asarray(layer[name])).max() for layer in params["layers"]]
        np.testing.assert_array_equal(first[name].kernel[:, 0], largest)
    # What enters the first layer is not touched by FP8.
    embedded = np.asarray(params["embedding"], np.float64)[np.asarray(tokens)]
    normed = embedded / np.sqrt(np.mean(embedded**2, axis=-1, keepdims=True) + PLAIN.norm_eps)
    largest = np.abs(normed * np.asarray(params["layers"][0]["attention_norm"])).max()
    for name in ("query", "key", "value"):
        np.testing.assert_allclose(first[name].activation[0, 0], largest, rtol=1e-5)


def test_the_state_decides_the_scales(rng):
    config = dataclasses.replace(STACK, recipe=DelayedScaling(history_len=3))
    params, tokens = random_params(rng, STACK), random_tokens(rng)
    _, (_, state) = value_and_grad(params, tokens, tokens, config, init_scaling_state(config))
    logits = jax.jit(apply, static_argnums=2)
    # Scales for values a million times larger flush all of these to zero, as if the kernels were.
    flushing = jax.tree.map(lambda history: history * 2**20, state)
    silent = {
        **params,
        "layers": [layer | {name: 0 * layer[name] for name in PROJECTIONS} for layer in params["layers"]],
    }
    np.testing.assert_array_equal(logits(params, tokens, config, flushing), logits(silent, tokens, config, state))


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        *(("tiny", RowwiseScaling()), ("small", DelayedScaling(history_len=3))),
        *(("8b", CurrentScaling()), ("moe-3b", BlockScaling())),
    ],
)
def test_presets_fit_every_recipe(name, recipe):
    config = dataclasses.replace(PRESETS[name], num_layers=1, recipe=recipe)
    params = jax.eval_shape(functools.partial(init, config), jax.random.key(0))
    state = jax.eval_shape(functools.partial(init_scaling_state, config))
    tokens = jax.ShapeDtypeStruct((2, 32), jnp.int32)
    step = jax.value_and_grad(loss, argnums=(0, 4))
    with jax.numpy_dtype_promotion("standard"):  # attention in bfloat16 needs it
        _, (gradients, next_state) = jax.eval_shape(
            lambda *a: step(*a[:3], config, *a[3:]), params, tokens, tokens, state
        )
    shapes = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) for tree in (params, gradients)]
    assert shapes[0] == shapes[1]
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, next_state)


def test_what_does_not_fit_is_refused():
    tokens = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(ValueError, match=r"recipe is 'block': it needs to be a Recipe"):
        dataclasses.replace(PLAIN, recipe="block")
    for products in ((), "forward", ("forwards",)):
        with pytest.raises(ValueError, match=r"head_fp8_products is .*: it needs to be one or more names out of"):
            dataclasses.replace(PLAIN, head_fp8_products=products)
    params = jax.eval_shape(functools.partial(init, PLAIN), jax.random.key(0))
    delayed = dataclasses.replace(PLAIN, recipe=DelayedScaling())
    with pytest.raises(ValueError, match=r"scaling_state is missing, .* DelayedScaling.*init_scaling_state"):
        apply(params, tokens, delayed)
    for config in (PLAIN, dataclasses.replace(PLAIN, recipe=BlockScaling())):
        assert init_scaling_state(config) is None
        with pytest.raises(ValueError, match=r"scaling_state is given, and config.recipe is "):
            apply(params, tokens, config, init_scaling_state(delayed))
    assert hash(delayed) == hash(dataclasses.replace(PLAIN, recipe=DelayedScaling()))
