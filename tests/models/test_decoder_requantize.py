"""The decoder in a train step whose optimizer quantizes the kernels: several microbatches, and a resumed run."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax import layers, models, optim
from te_jax.models import DecoderConfig
from te_jax.quantized import QuantizedArray
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, products
from te_jax.testing import assert_close

CONFIG = DecoderConfig(
    vocab_size=19, num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, mlp_size=48
)
MICROBATCHES = 2

OPTIMIZER = optim.adamw(1e-3, mu_dtype="bfloat16", nu_dtype="bfloat16")


def loss_of(config):
    def loss(variables, tokens):
        params, scaling = variables
        return models.loss(params, tokens, tokens, config, scaling)

    return loss


@functools.partial(jax.jit, static_argnums=0)
def first_state(config):
    params = models.init(config, jax.random.key(0))
    zeros = jax.tree.map(jnp.zeros_like, params)
    params, kernels = optim.apply_updates(params, zeros, requantize=models.requantize(config))
    return params, OPTIMIZER.init(params), kernels, models.init_scaling_state(config)


@functools.partial(jax.jit, static_argnums=0)
def step(config, state, tokens):
    """tokens is [microbatches, batch, time]."""
    params, optimizer, kernels, scaling = state
    operands = optim.merge_kernels(params, kernels)
    gradient = layers.accumulate_gradients(loss_of(config))
    gradients, losses = None, []
    for microbatch in tokens:
        loss, gradients = gradient((operands, scaling), gradients, microbatch)
        losses.append(loss)
    gradients, scaling = gradients
    updates, optimizer = OPTIMIZER.update(gradients, optimizer, params)
    params, kernels = optim.apply_updates(params, updates, requantize=models.requantize(config))
    return (params, optimizer, kernels, scaling), (jnp.stack(losses), gradients)


@functools.partial(jax.jit, static_argnums=0)
def gradients_with_quantization_in_the_call(config, params, scaling, tokens):
    found = [jax.value_and_grad(loss_of(config))((params, scaling), microbatch) for microbatch in tokens]
    losses, gradients = zip(*found, strict=True)
    return jnp.stack(losses), jax.tree.map(lambda a, b: a + b, gradients[0][0], gradients[1][0])


@functools.partial(jax.jit, static_argnums=0)
def init(config):
    return models.init(config, jax.random.key(0))


@pytest.fixture
def tokens(rng):
    return jax.device_put(np.asarray(rng.integers(0, CONFIG.vocab_size, (4, MICROBATCHES, 2, 16)), jnp.int32))


def test_two_microbatches_are_those_with_quantization_in_the_call(tokens):
    config = dataclasses.replace(CONFIG, recipe=BlockScaling())
    state = first_state(config)
    kernels = [leaf for leaf in jax.tree.leaves(state[2], is_leaf=is_quantized) if is_quantized(leaf)]
    assert len(kernels) == 7 * config.num_layers
    _, (losses, gradients) = step(config, state, tokens[1])
    expected, expected_gradients = gradients_with_quantization_in_the_call(config, state[0], state[3], tokens[1])
    assert_close(losses, expected, tolerance=1e-6)
    assert jax.tree.structure(gradients) == jax.tree.structure(state[0])
    for found, wanted in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True):
        assert found.dtype == wanted.dtype == jnp.float32
        assert_close(found, wanted, tolerance=1e-5)


def test_the_state_of_delayed_scaling_is_the_largest_of_all_microbatches(tokens):
    config = dataclasses.replace(CONFIG, recipe=DelayedScaling(history_len=3))
    state = first_state(config)
    (_, _, _, together), _ = step(config, state, tokens[0])
    alone = [step(config, state, tokens[0, i : i + 1])[0][3] for i in range(MICROBATCHES)]
    for found, first, second in zip(*map(jax.tree.leaves, (together, *alone)), strict=True):
        np.testing.assert_array_equal(found, np.maximum(first, second))


@pytest.mark.parametrize(("recipe", "apply"), [(BlockScaling(), False), (None, True)], ids=["loss", "apply"])
def test_the_head_adds_its_gradient_in_place(recipe, apply, tokens):
    """So no sum of the head's shape stands in the program: a pass over three arrays for each microbatch. Without a
    recipe this holds on GPUs alone: on CPUs XLA multiplies, and adds."""
    config = dataclasses.replace(CONFIG, recipe=recipe)
    params, kernels = (init(config), None) if recipe is None else first_state(config)[::2]
    operands = params if recipe is None else optim.merge_kernels(params, kernels)

    def with_logits(params, tokens):
        return jnp.mean(jax.nn.logsumexp(models.apply(params, tokens, config).astype(jnp.float32), axis=-1))

    def run(in_place, operands, tokens):
        loss = with_logits if apply else lambda params, tokens: models.loss(params, tokens, tokens, config)
        gradient = layers.accumulate_gradients(loss, in_place=in_place)
        first, gradients = gradient(operands, None, tokens[0])
        second, gradients = gradient(operands, gradients, tokens[1])
        return first + second, gradients

    programs = [
        jax.jit(functools.partial(run, how)).lower(operands, tokens[0]).compile() for how in (models.is_head, None)
    ]
    (value, gradients), (expected, expected_gradients) = (program(operands, tokens[0]) for program in programs)
    assert_close(value, expected, tolerance=1e-6)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True):
        assert_close(one, other, tolerance=1e-5)
    if recipe is not None and not apply:
        sum_ = re.compile(rf"= f32\[{CONFIG.hidden_size},{CONFIG.vocab_size}\]\S* add\(")
        assert [bool(sum_.search(program.as_text())) for program in programs] == [False, True]


def test_a_head_that_is_used_twice_is_visible(tokens):
    params = init(CONFIG)

    def loss(params, tokens):
        return sum(models.loss(params, each, each, CONFIG) for each in (tokens[:1], tokens[1:]))

    gradient = layers.accumulate_gradients(loss, in_place=models.is_head)
    zeros = jax.tree.map(jnp.zeros_like, params)
    with pytest.raises(ValueError, match=r"kernel \['head'\] is chosen by in_place and was used 2"):
        gradient(params, zeros, tokens[0, 0])
    assert np.isnan(jax.jit(gradient)(params, zeros, tokens[0, 0])[0])


def test_where_gradients_can_be_added_in_place():
    kernel = {"kernel": jnp.ones((4, 3))}
    gradient = layers.accumulate_gradients(
        lambda params: (jnp.ones((2, 4)) @ params["kernel"]).sum(), in_place=lambda *_: True
    )
    np.testing.assert_array_equal(gradient(kernel, None)[1]["kernel"], 2.0)  # there is no sum yet
    with pytest.raises(TypeError, match=r"take it apart by te_jax\.layers\.dense_kernels"):
        gradient(kernel, kernel)
    with pytest.raises(ValueError, match="in_place is True; it must be a function"):
        layers.accumulate_gradients(lambda params: 0.0, in_place=True)


def test_what_is_refused():
    for recipe in (None, products(forward=CurrentScaling())):
        with pytest.raises(ValueError, match=r"config\.recipe is .*: only one recipe for all products says how"):
            models.requantize(dataclasses.replace(CONFIG, recipe=recipe))
    config = dataclasses.replace(CONFIG, recipe=CurrentScaling())
    state = jax.eval_shape(lambda: first_state(config))
    operands = optim.merge_kernels(state[0], state[2])
    tokens = np.zeros((2, 8), np.int32)
    gradient = jax.grad(lambda operands: models.loss(operands, tokens, tokens, config), allow_int=True)
    with pytest.raises(NotImplementedError, match="has no gradient of its own"):
        jax.eval_shape(gradient, operands)


def is_quantized(leaf):
    return isinstance(leaf, QuantizedArray)
