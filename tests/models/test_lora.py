"""Adapters of the decoder: the same as merged kernels, gradients of them alone, and no gradient of a kernel."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax.layers import Router
from te_jax.models import PRESETS, Experts, Lora, apply, init, join_adapters, loss, merge_adapters, split_adapters
from te_jax.ops import quantize
from te_jax.recipe import BlockScaling, Quantization
from te_jax.testing import assert_close

E4M3 = Quantization(jnp.dtype("float8_e4m3fn"), "tensor", "tensor")
CONFIG = dataclasses.replace(PRESETS["nano"], num_layers=1, hidden_size=64, mlp_size=128, lora=Lora(4))


jit_apply = jax.jit(apply, static_argnums=2, static_argnames="implementation")


def drawn(config, rng):
    """Parameters whose adapters add something, and tokens."""
    params = jax.device_get(jax.jit(init, static_argnums=0)(config, jax.random.key(0)))
    moved = jax.tree.map(lambda x: x + rng.normal(0, 0.05, x.shape).astype(np.float32), params)
    return moved, rng.integers(0, 256, (2, 32)).astype(np.int32)


@pytest.mark.parametrize(
    "changes",
    [
        {"lora": Lora(2, alpha=1.0)},
        pytest.param(
            {"experts": Experts(2, Router(top_k=1)), "lora": Lora(2, names=("key", "out"))}, marks=pytest.mark.slow
        ),
    ],
    ids=["all", "some of experts"],
)
def test_adapters_compute_what_merged_kernels_do(changes, rng):
    config = dataclasses.replace(CONFIG, **changes)
    params, tokens = drawn(config, rng)
    merged_config, merged = merge_adapters(config, params)
    assert merged_config == dataclasses.replace(config, lora=None)
    assert config.num_parameters == sum(x.size for x in jax.tree.leaves(params))
    found, expected = (
        jit_apply(each, tokens, shape, implementation="reference")
        for each, shape in ((params, config), (merged, merged_config))
    )
    assert_close(found, expected, tolerance=1e-5)
    joined = join_adapters(*split_adapters(params))
    jax.tree.map(np.testing.assert_array_equal, joined, params)


def _with_quantized_kernel():
    params = jax.eval_shape(lambda: init(CONFIG, jax.random.key(0)))
    up = params["layers"][0]["up"]
    params["layers"][0]["up"] = jax.eval_shape(lambda: quantize(jnp.ones(up.shape), E4M3, implementation="reference"))
    return params


def test_adapters_start_as_nothing_and_learn(rng):
    params = jax.jit(init, static_argnums=0)(CONFIG, jax.random.key(0))
    tokens = rng.integers(0, 256, (2, 32)).astype(np.int32)
    adapters, frozen = split_adapters(params)
    run = jax.jit(jax.value_and_grad(lambda a: loss(join_adapters(a, frozen), tokens, tokens, CONFIG)))
    value, gradients = run(adapters)
    plain = dataclasses.replace(CONFIG, lora=None)
    assert_close(value, jax.jit(functools.partial(loss, config=plain))(frozen, tokens, tokens), tolerance=1e-6)
    for layer in gradients["layers"]:
        for name, gradient in layer.items():
            assert np.asarray(gradient).any() == name.endswith("_b"), name  # a's is a product with b, which is 0


@pytest.mark.usefixtures("native_kernels")
def test_gradients_in_fp8_cost_no_weight_gradient(rng):
    config = dataclasses.replace(CONFIG, recipe=BlockScaling())
    params, tokens = drawn(config, rng)
    adapters, frozen = split_adapters(params)

    def of_adapters(adapters, frozen, config=config):
        return loss(join_adapters(adapters, frozen), tokens, tokens, config)

    compiled = jax.jit(jax.grad(of_adapters)).lower(adapters, frozen).compile()
    both = jax.jit(jax.grad(of_adapters, argnums=(0, 1))).lower(adapters, frozen)
    products = len(re.findall(r'custom_call_target="te_gemm"', compiled.as_text()))
    more = len(re.findall(r"custom_call @te_gemm\b", both.as_text()))
    assert more - products == 7 + 1  # kernels, and the head
    found = compiled(adapters, frozen)
    plain = dataclasses.replace(config, recipe=None)
    expected = jax.jit(functools.partial(jax.grad(of_adapters), config=plain))(adapters, frozen)
    one, other = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(each)]) for each in (found, expected))
    assert_close(one, other, tolerance=0.25)  # each product of FP8 has an error of about 4%


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Lora(0), "rank is 0: it needs to be a whole number of at least 1"),
        (lambda: Lora(2, alpha=0.0), "alpha is 0.0: it needs to be a finite number above 0, or None"),
        (lambda: Lora(2, names=("head",)), r"names is \('head',\): it needs to be one or more names out of"),
        (lambda: dataclasses.replace(CONFIG, lora=4), "lora is 4: it needs to be a te_jax.models.Lora"),
        (
            lambda: dataclasses.replace(CONFIG, experts=Experts(2, Router(top_k=1))),
            "and experts have no adapters: choose out of",
        ),
        (
            lambda: merge_adapters(CONFIG, _with_quantized_kernel()),
            r"params\['layers'\]\[0\]\['up'\] is quantized, .*: give the parameters that kernels were quantized from",
        ),
        (
            lambda: merge_adapters(dataclasses.replace(CONFIG, lora=None), {}),
            "config.lora is None: there are no adapters to merge",
        ),
    ],
)
def test_what_is_no_lora_is_refused(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()
