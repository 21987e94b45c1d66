"""The decoder whose MLPs are mixtures of experts; `test_decoder.py` compares values and gradients with NumPy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from te_jax import models
from te_jax.layers import Router
from te_jax.models import PRESETS, DecoderConfig, Experts, TensorParallel
from te_jax.recipe import BlockScaling, DelayedScaling

CONFIG = DecoderConfig(
    vocab_size=19, num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, mlp_size=48,
    experts=Experts(num_experts=4, router=Router(top_k=2), balance_weight=0.1, z_weight=0.01),
)  # fmt: skip

jit_init = jax.jit(models.init, static_argnums=0)


# GPUs have no grouped GEMM of float32.
IMPLEMENTATION = "reference" if jax.default_backend() == "gpu" else None


@pytest.fixture
def tokens(rng):
    return jax.device_put(np.asarray(rng.integers(0, CONFIG.vocab_size, (2, 16)), jnp.int32))


def test_experts_alone_may_be_divided_whatever_the_time_of_a_sequence(tokens, require_devices):
    """In blocks of 128 rows too, which a device need not have."""
    require_devices(2)
    config = dataclasses.replace(CONFIG, recipe=BlockScaling())
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    parallel = TensorParallel(1, batch_axes=("data",), expert_axes=("data",))
    params = jax.eval_shape(functools.partial(models.init, config), jax.random.key(3))
    of_mesh = models.parallel_loss(mesh, config, parallel, implementation=IMPLEMENTATION)
    value, gradients = jax.eval_shape(jax.value_and_grad(of_mesh), params, tokens, tokens)
    assert value.shape == ()
    assert jax.tree.map(jnp.shape, gradients) == jax.tree.map(jnp.shape, params)


def test_every_expert_is_initialized_like_a_layer_of_its_own():
    config = dataclasses.replace(CONFIG, hidden_size=64, mlp_size=128)
    (layer,) = jax.device_get(jit_init(config, jax.random.key(1))["layers"])
    for name, fan_in in (("gate", 64), ("up", 64), ("down", 2 * 128), ("router", 64)):
        kernels = layer[name] if layer[name].ndim == 3 else layer[name][None]
        for kernel in kernels:
            assert abs(float(np.std(kernel)) * fan_in**0.5 - 1) < (0.25 if name == "router" else 0.05)
    assert not np.array_equal(layer["gate"][0], layer["gate"][1])
    assert not np.array_equal(layer["gate"], layer["up"])


def test_moe_3b_has_blocks_of_qwen3_30b_a3b():
    """48 of them, with embedding and head, have 30.5e9 parameters, of which a token meets 3.3e9."""
    whole = dataclasses.replace(PRESETS["moe-3b"], num_layers=48)
    assert whole.num_parameters == pytest.approx(30.5e9, rel=2e-3)
    assert whole.num_active_parameters == pytest.approx(3.35e9, rel=5e-3)
    gemms = 48 * (2 * 2048 * 4096 + 2 * 2048 * 512 + 8 * 3 * 2048 * 768 + 2048 * 128) + 2048 * 151_936
    attention = 48 * 2 * 2 * 4096 * 4096 / 2
    assert whole.flops_per_token(4096) == 3 * (2 * gemms + attention)
    assert PRESETS["tiny"].num_active_parameters == PRESETS["tiny"].num_parameters


def test_what_does_not_fit_is_refused(tokens):
    with pytest.raises(ValueError, match=r"num_experts is 1: .* at least router.top_k, 2"):
        Experts(num_experts=1, router=Router(top_k=2))
    with pytest.raises(ValueError, match=r"router is 2: .* Router\(top_k=2\)"):
        Experts(num_experts=4, router=2)
    with pytest.raises(ValueError, match=r"balance_weight is -1: .* finite number of at least 0"):
        Experts(num_experts=4, router=Router(top_k=2), balance_weight=-1)
    with pytest.raises(ValueError, match=r"experts is 8: it needs to be a te_jax.models.Experts"):
        dataclasses.replace(CONFIG, experts=8)
    with pytest.raises(ValueError, match="recipe is DelayedScaling, and experts have no scaling state"):
        dataclasses.replace(CONFIG, recipe=DelayedScaling())
    config = dataclasses.replace(CONFIG, vocab_size=24, hidden_size=24, num_heads=24, num_kv_heads=24)
    for size in (3, 8):
        with pytest.raises(ValueError, match=rf"{size}: experts.num_experts is 4, which {size} does not divide"):
            models.param_specs(config, TensorParallel(size))
    TensorParallel(3, batch_axes=("data",), expert_axes=("data",)).check(config)  # along which there may be two
    with pytest.raises(ValueError, match=r"expert_axes is \('expert',\): choose from \('tensor',\), in a tuple"):
        TensorParallel(2, expert_axes=("expert",))
