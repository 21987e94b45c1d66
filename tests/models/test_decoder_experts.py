"""The decoder whose MLPs are mixtures of experts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from te_jax import layers, models, optim
from te_jax.layers import Router
from te_jax.models import PRESETS, DecoderConfig, Experts, TensorParallel
from te_jax.quantized import QuantizedArray
from te_jax.recipe import BlockScaling, DelayedScaling
from te_jax.testing import assert_close, relative_error

CONFIG = DecoderConfig(
    vocab_size=19,
    num_layers=2,
    hidden_size=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    mlp_size=48,
    experts=Experts(num_experts=4, router=Router(top_k=2), balance_weight=0.1, z_weight=0.01),
)

ONE_BLOCK = dataclasses.replace(CONFIG, num_layers=1)

jit_init = jax.jit(models.init, static_argnums=0)


def implementation(config):
    """GPUs have no grouped GEMM of float32."""
    return "reference" if jax.default_backend() == "gpu" and config.dtype == "float32" else None


@functools.partial(jax.jit, static_argnums=0)
def losses_and_gradients(config, params, tokens):
    def objective(params):
        losses = models.losses(params, tokens, tokens, config, implementation=implementation(config))
        return losses.objective, losses

    (_, losses), gradients = jax.value_and_grad(objective, has_aux=True)(params)
    return losses, gradients


@pytest.fixture
def tokens(rng):
    return jax.device_put(np.asarray(rng.integers(0, CONFIG.vocab_size, (2, 16)), jnp.int32))


# A reference: every token multiplies kernels of its own.


def rms_norm(x, scale):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + CONFIG.norm_eps) * scale


def rotate(x):
    """[time, heads, size], by pairs of its halves."""
    time, _, size = x.shape
    frequency = CONFIG.rope_theta ** (-jnp.arange(0, size, 2) / size)
    angle = (jnp.arange(time)[:, None] * frequency)[:, None]
    first, second = x[..., : size // 2], x[..., size // 2 :]
    return jnp.concatenate(
        [first * jnp.cos(angle) - second * jnp.sin(angle), second * jnp.cos(angle) + first * jnp.sin(angle)], axis=-1
    )


def attention(x, layer):
    query, key, value = ((x @ layer[name]).reshape(len(x), -1, CONFIG.head_dim) for name in ("query", "key", "value"))
    query, key = rotate(query), rotate(key)
    key, value = (jnp.repeat(each, CONFIG.num_heads // CONFIG.num_kv_heads, axis=1) for each in (key, value))
    scores = jnp.einsum("qhd,khd->hqk", query, key) / CONFIG.head_dim**0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -jnp.inf)
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), value).reshape(len(x), -1) @ layer["out"]


def experts_of(x, layer):
    """x [tokens, D]: (result, auxiliary losses, tokens of each expert)."""
    num_experts, top_k = CONFIG.experts.num_experts, CONFIG.experts.router.top_k
    logits = x @ layer["router"]
    chosen = jnp.argsort(-logits, axis=-1)[:, :top_k]
    weights = jax.nn.softmax(jnp.take_along_axis(logits, chosen, axis=-1))

    def of_token(x, chosen, weights):
        return sum(
            weights[k] * ((jax.nn.silu(x @ layer["gate"][e]) * (x @ layer["up"][e])) @ layer["down"][e])
            for k, e in enumerate(chosen)
        )

    y = jax.vmap(of_token)(x, chosen, weights)
    counts = jnp.sum(chosen[..., None] == jnp.arange(num_experts), axis=(0, 1))
    shares = counts / (top_k * len(x))
    balance = num_experts * jnp.sum(shares * jnp.mean(jax.nn.softmax(logits), axis=0))
    z = jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)
    return y, 0.1 * balance + 0.01 * z, counts


def reference(params, tokens):
    """(objective, cross-entropy, largest load) of tokens that are their own targets."""
    x, auxiliary, loads = params["embedding"][tokens], 0.0, []
    for layer in params["layers"]:
        x = x + jnp.stack([attention(rms_norm(each, layer["attention_norm"]), layer) for each in x])
        y, own, counts = experts_of(rms_norm(x, layer["mlp_norm"]).reshape(-1, x.shape[-1]), layer)
        x, auxiliary = x + y.reshape(x.shape), auxiliary + own
        loads.append(counts.max() / counts.mean())
    logits = rms_norm(x, params["final_norm"]) @ params["head"]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)
    return auxiliary - picked.mean(), (-picked.mean(), jnp.stack(loads).max())


def test_losses_and_gradients_are_those_of_every_token_by_itself(tokens):
    params = jit_init(ONE_BLOCK, jax.random.key(3))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        run = jax.jit(jax.value_and_grad(reference, has_aux=True))
        (objective, (cross_entropy, load)), expected = run(params, tokens)
    losses, gradients = losses_and_gradients(ONE_BLOCK, params, tokens)
    assert float(losses.objective) == pytest.approx(float(objective), rel=1e-5)
    assert float(losses.cross_entropy) == pytest.approx(float(cross_entropy), rel=1e-5)
    assert float(losses.largest_load) == pytest.approx(float(load))
    for (path, found), wanted in zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(expected), strict=True):
        assert relative_error(found, wanted) < 1e-4, jax.tree_util.keystr(path)


def test_kernels_quantized_once_give_the_gradients_of_those_quantized_in_the_call(rng):
    """The gradients are those of two microbatches. In float32 both quantize the same values."""
    config = dataclasses.replace(ONE_BLOCK, recipe=BlockScaling())
    params = jit_init(config, jax.random.key(3))
    batches = jax.device_put(np.asarray(rng.integers(0, config.vocab_size, (2, 2, 16)), jnp.int32))
    how = models.requantize(config, implementation=implementation(config))
    zeros = jax.tree.map(jnp.zeros_like, params)
    _, kernels = jax.jit(lambda params: optim.apply_updates(params, zeros, requantize=how))(params)
    operands = optim.merge_kernels(params, kernels)
    for name in ("gate", "up", "down"):
        assert isinstance(operands["layers"][0][name], QuantizedArray)
        assert operands["layers"][0][name].shape == params["layers"][0][name].shape
    assert not isinstance(operands["layers"][0]["router"], QuantizedArray)

    @jax.jit
    def summed(operands, batches):
        gradient = layers.accumulate_gradients(
            lambda params, tokens: models.loss(params, tokens, tokens, config, implementation=implementation(config))
        )
        total, sums = 0.0, None
        for tokens in batches:
            value, sums = gradient(operands, sums, tokens)
            total += value
        return total, sums

    value, gradients = summed(operands, batches)
    alone = [losses_and_gradients(config, params, tokens) for tokens in batches]
    assert float(value) == pytest.approx(sum(float(losses.objective) for losses, _ in alone), rel=1e-6)
    for found, first, second in zip(*map(jax.tree.leaves, (gradients, alone[0][1], alone[1][1])), strict=True):
        assert found.dtype == jnp.float32
        assert_close(found, np.asarray(first) + np.asarray(second), tolerance=1e-5)


def test_experts_alone_may_be_divided_whatever_the_time_of_a_sequence(rng, require_devices):
    """In blocks of 128 rows too, which a device need not have."""
    require_devices(2)
    config = dataclasses.replace(ONE_BLOCK, recipe=BlockScaling(power_of_two_scales=True))
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    parallel = TensorParallel(1, batch_axes=("data",), expert_axes=("data",))
    params = jit_init(config, jax.random.key(3))
    tokens = jax.device_put(np.asarray(rng.integers(0, config.vocab_size, (2, 5)), jnp.int32))
    of_mesh = models.parallel_loss(mesh, config, parallel, implementation=implementation(config))
    value, gradients = jax.jit(jax.value_and_grad(lambda params: of_mesh(params, tokens, tokens)))(params)
    # Scales are those of a device's tokens: a token may choose another expert, and its gradients be others.
    losses = jax.jit(functools.partial(models.losses, config=config, implementation=implementation(config)))
    expected = losses(params, tokens, tokens).objective
    assert float(value) == pytest.approx(float(expected), rel=0.05)
    assert all(np.isfinite(leaf).all() and np.any(leaf) for leaf in jax.tree.leaves(gradients))


def test_every_expert_is_initialized_like_a_layer_of_its_own():
    config = dataclasses.replace(CONFIG, hidden_size=64, mlp_size=128)
    layer = jit_init(config, jax.random.key(1))["layers"][1]
    for name, fan_in in (("gate", 64), ("up", 64), ("down", 2 * 2 * 128), ("router", 64)):
        kernels = layer[name] if layer[name].ndim == 3 else layer[name][None]
        for kernel in kernels:
            assert abs(float(jnp.std(kernel)) * fan_in**0.5 - 1) < (0.25 if name == "router" else 0.05)
    assert not np.array_equal(layer["gate"][0], layer["gate"][1])
    assert not np.array_equal(layer["gate"], layer["up"])
    # Other parameters of a shape are those without experts.
    plain = jit_init(dataclasses.replace(config, experts=None), jax.random.key(1))
    assert plain["layers"][1].keys() == layer.keys() - {"router"}


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
