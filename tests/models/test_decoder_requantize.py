"""The decoder in a train step whose optimizer quantizes the kernels, and which adds microbatches."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax import layers, models, optim
from te_jax.models import DecoderConfig, Experts
from te_jax.quantized import QuantizedArray
from te_jax.recipe import BlockScaling, CurrentScaling, products
from te_jax.testing import assert_close

CONFIG = DecoderConfig(
    vocab_size=19, num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, mlp_size=48
)


@functools.partial(jax.jit, static_argnums=0)
def first_state(config):
    params = models.init(config, jax.random.key(0))
    zeros = jax.tree.map(jnp.zeros_like, params)
    params, kernels = optim.apply_updates(params, zeros, requantize=models.requantize(config))
    return params, kernels


@functools.partial(jax.jit, static_argnums=0)
def init(config):
    return models.init(config, jax.random.key(0))


@pytest.fixture
def tokens(rng):
    return jax.device_put(np.asarray(rng.integers(0, CONFIG.vocab_size, (2, 2, 16)), jnp.int32))


def test_a_microbatch_is_added_to_those_before_it(tokens):
    """As with quantization in the call: in float32 both quantize the same values."""
    experts = Experts(num_experts=4, router=layers.Router(top_k=2))
    config = dataclasses.replace(CONFIG, recipe=BlockScaling(), experts=experts)
    params, kernels = first_state(config)
    assert sum(map(is_quantized, jax.tree.leaves(kernels, is_leaf=is_quantized))) == 7 * config.num_layers
    # GPUs have no grouped GEMM of float32.
    implementation = "reference" if jax.default_backend() == "gpu" else None

    def loss(params, tokens):
        return models.loss(params, tokens, tokens, config, implementation=implementation)

    added = jax.jit(layers.accumulate_gradients(loss))
    value, found = added(optim.merge_kernels(params, kernels), params, tokens[0])
    expected, gradients = jax.jit(jax.value_and_grad(loss))(params, tokens[0])
    assert_close(value, expected, tolerance=1e-6)
    assert jax.tree.structure(found) == jax.tree.structure(params)
    for one, before, wanted in zip(*map(jax.tree.leaves, (found, params, gradients)), strict=True):
        assert one.dtype == wanted.dtype == jnp.float32
        assert_close(one, np.asarray(before) + np.asarray(wanted), tolerance=1e-5)


def test_the_head_adds_its_gradient_in_place(tokens):
    """So no sum of the head's shape stands in the program: a pass over three arrays for each microbatch."""
    config = dataclasses.replace(CONFIG, recipe=BlockScaling())
    params, kernels = first_state(config)
    operands = optim.merge_kernels(params, kernels)

    def run(in_place, operands, tokens):
        loss = lambda params, tokens: models.loss(params, tokens, tokens, config)  # noqa: E731
        gradient = layers.accumulate_gradients(loss, in_place=in_place)
        return gradient(operands, params, tokens)  # on top of anything

    programs = [
        jax.jit(functools.partial(run, how)).lower(operands, tokens[0]).compile() for how in (models.is_head, None)
    ]
    (value, gradients), (expected, expected_gradients) = (program(operands, tokens[0]) for program in programs)
    assert_close(value, expected, tolerance=1e-6)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True):
        assert_close(one, other, tolerance=1e-5)
    sum_ = re.compile(rf"= f32\[{CONFIG.hidden_size},{CONFIG.vocab_size}\]\S* add\(")
    assert [bool(sum_.search(program.as_text())) for program in programs] == [False, True]


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
    operands = optim.merge_kernels(*state)
    tokens = np.zeros((2, 8), np.int32)
    gradient = jax.grad(lambda operands: models.loss(operands, tokens, tokens, config), allow_int=True)
    with pytest.raises(NotImplementedError, match="has no gradient of its own"):
        jax.eval_shape(gradient, operands)


def is_quantized(leaf):
    return isinstance(leaf, QuantizedArray)
