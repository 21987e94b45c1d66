"""Latent attention in what the folders of tests/models/hf do not have: recipes, adapters, and caches in FP8."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_decoder import random_params, random_tokens

from te_jax import models, optim
from te_jax.models import DecoderConfig, Experts, Latent, Lora, apply, generate, init, loss
from te_jax.quantized import QuantizedArray
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling
from te_jax.testing import relative_error

LATENT = Latent(rank=48, rope_dim=16, value_dim=16, query_rank=64)
CONFIG = DecoderConfig(
    vocab_size=32, num_layers=1, hidden_size=64, num_heads=2, num_kv_heads=2, head_dim=32, mlp_size=96, latent=LATENT
)


@functools.partial(jax.jit, static_argnums=3)
def value_and_gradient(params, tokens, state, config):
    def run(params, state):
        return loss(params, tokens[:, :-1], tokens[:, 1:], config, state)

    value, (gradient, _) = jax.value_and_grad(run, argnums=(0, 1))(params, state)
    return value, gradient


@pytest.mark.parametrize("recipe", [BlockScaling(), CurrentScaling(), DelayedScaling(history_len=2)], ids=type)
def test_every_kernel_has_products_of_a_recipe(recipe, rng):
    """Losses and gradients have the error of FP8, and are those of a block that is computed again."""
    params, tokens = random_params(CONFIG, rng), random_tokens(CONFIG, rng, (2, 33))
    config = dataclasses.replace(CONFIG, recipe=recipe)
    state = models.init_scaling_state(config)
    (value, found), (wanted, gradients) = (
        value_and_gradient(params, tokens, one, each) for one, each in ((state, config), (None, CONFIG))
    )
    assert abs(value - wanted) < 0.1 * wanted
    for name in config.projections:
        assert 1e-3 < relative_error(found["layers"][0][name], gradients["layers"][0][name]) < 0.5, name
    again = value_and_gradient(params, tokens, state, dataclasses.replace(config, remat=True))
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves((value, found)), strict=True):
        assert relative_error(one, other) < 1e-6


def test_kernels_are_quantized_once(rng):
    config = dataclasses.replace(CONFIG, recipe=BlockScaling())
    params, tokens = random_params(config, rng), random_tokens(config, rng, (2, 16))
    how = models.requantize(config)
    assert {name for name, value in how["layers"][0].items() if value is not None} == set(config.projections)
    zeros = jax.tree.map(jnp.zeros_like, params)
    kernels = jax.jit(functools.partial(optim.apply_updates, requantize=how))(params, zeros)[1]
    operands = optim.merge_kernels(params, kernels)
    assert isinstance(operands["layers"][0]["key_value_up"], QuantizedArray)
    run = jax.jit(apply, static_argnums=2)
    np.testing.assert_array_equal(run(operands, tokens, config), run(params, tokens, config))
    both = (generate(each, tokens, config, max_new_tokens=4) for each in (operands, params))
    np.testing.assert_array_equal(*both)


@pytest.mark.parametrize("recipe", [None, BlockScaling()], ids=["none", "block"])
def test_a_cache_of_latents_says_what_keys_and_values_do(recipe, rng):
    """Log-probabilities of tokens that were drawn, of prompts of two lengths."""
    config = dataclasses.replace(CONFIG, recipe=recipe, window=9)
    params, tokens, lengths = random_params(config, rng), random_tokens(config, rng, (2, 8)), np.asarray([8, 5])
    drawn, found = generate(params, tokens, config, max_new_tokens=8, lengths=lengths, return_log_probs=True)
    for row, length in enumerate(lengths):
        text = jnp.concatenate([tokens[row, :length], drawn[row]])[None]
        logits = jax.jit(apply, static_argnums=2)(params, text, config)[0, length - 1 : -1]
        wanted = jnp.take_along_axis(jax.nn.log_softmax(logits), drawn[row][:, None], axis=-1)[:, 0]
        assert np.abs(found[row] - wanted).max() < (1e-5 if recipe is None else 0.3)


def test_adapters_of_latent_kernels(rng):
    config = dataclasses.replace(CONFIG, lora=Lora(4, names=CONFIG.adaptable))
    params, tokens = random_params(config, rng), random_tokens(config, rng, (2, 8))
    merged, together = models.merge_adapters(config, params)
    run = jax.jit(apply, static_argnums=2)
    assert relative_error(run(params, tokens, config), run(together, tokens, merged)) < 1e-5
    plain = run(models.split_adapters(params)[1], tokens, merged)
    assert relative_error(plain, run(together, tokens, merged)) > 1e-2
    found, wanted = (
        generate(*each, max_new_tokens=6) for each in ((params, tokens, config), (together, tokens, merged))
    )
    np.testing.assert_array_equal(found, wanted)


def test_sizes_and_names():
    experts = Experts(
        4, models.PRESETS["moe"].experts.router, choice_bias=True, shared=2, dense_layers=1, dense_size=80
    )
    config = dataclasses.replace(CONFIG, num_layers=3, experts=experts)
    params = jax.eval_shape(functools.partial(init, config), jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == config.num_parameters
    first, second, _ = ({name: leaf.shape for name, leaf in layer.items()} for layer in params["layers"])
    assert (first["gate"], second["gate"], second["shared_down"]) == ((64, 80), (4, 64, 96), (192, 64))
    assert first.keys() < second.keys()
    attention = 64 * 64 + 64 * 64 + 64 * 64 + 48 * 2 * 32 + 2 * 16 * 64
    others = 64 * 80 * 3 + 2 * (64 * 96 * 3 * (2 + 2) + 64 * 4) + 32 * 64
    pairs = 3 * 2 * (32 + 16) * 10 / 2
    assert config.flops_per_token(10) == 6 * (3 * attention + others) + 6 * pairs


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"latent": 48}, "latent is 48: it needs to be a te_jax.models.Latent, or None"),
        ({"num_kv_heads": 1}, "num_kv_heads is 1 and num_heads 2: with latent attention they are the same"),
        ({"head_dim": 16}, "latent.rope_dim is 16, and head_dim is 16: choose one that is smaller"),
        ({"qk_norm": True}, "qk_norm is True, which latent attention does not have: leave it out"),
        ({"attention_biases": ("out",)}, r"attention_biases is \('out',\), which latent attention does not have"),
        ({"lora": Lora(2, names=("key",))}, r"lora.names is \('key',\), and kernels of attention have other names"),
        ({"latent": functools.partial(Latent, 8, 3, 8)}, "latent.rope_dim is 3: rotary positions turn pairs"),
        ({"latent": functools.partial(Latent, 8, 2, 0)}, "latent.value_dim is 0: it needs to be a whole number"),
        ({"latent": functools.partial(Latent, 8, 2, 8, norm_eps=0)}, "latent.norm_eps is 0: it needs"),
        ({"experts": {"shared": -1}}, "shared is -1: it needs to be a whole number of at least 0"),
        ({"experts": {"shared": 1, "weighted_shared": 8}}, "weighted_shared is 8 and shared 1: give a width of at"),
        ({"experts": {"dense_layers": 1}}, "dense_size is None and dense_layers 1: give the width"),
        ({"experts": {"dense_size": 8}}, "dense_size is 8 and dense_layers 0: give the width"),
        ({"experts": {"dense_layers": 1, "dense_size": 8}}, "dense_layers is 1, and num_layers is 1: leave a block"),
    ],
)
def test_shapes_that_are_refused(changes, words):
    def make():
        of_latent, of_experts = changes.get("latent"), changes.get("experts")
        if callable(of_latent):
            return of_latent()
        if of_experts is not None:
            experts = dataclasses.replace(models.PRESETS["moe"].experts, **of_experts)
            return dataclasses.replace(CONFIG, experts=experts)
        return dataclasses.replace(CONFIG, **changes)

    with pytest.raises(ValueError, match=words):
        make()
