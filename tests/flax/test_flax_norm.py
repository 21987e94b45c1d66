"""Norms, MLPs and embeddings of te_jax.flax against Flax's own, and the NNX modules, which share their arithmetic."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT as OVERWRITE

from te_jax import nnx as te_nnx
from te_jax.flax import Embed, GatedMLP, LayerNorm, NormLinear, RMSNorm, accumulate_gradients, quantize_kernels
from te_jax.recipe import BlockScaling, DelayedScaling
from te_jax.testing import assert_close


def normal(rng, *shape):
    return jax.device_put(np.asarray(rng.standard_normal(shape), jnp.float32))


def perturbed(variables, rng):
    return jax.tree.map(lambda leaf: leaf + 0.2 * normal(rng, *leaf.shape), variables)


def value_and_gradients(module, variables, x):
    y, pull = jax.vjp(lambda variables, x: module.apply(variables, x), variables, x)
    return y, *pull(jnp.cos(y))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (RMSNorm(), nn.RMSNorm()),
        (RMSNorm(epsilon=0.1, use_scale=False), nn.RMSNorm(epsilon=0.1, use_scale=False)),
        (LayerNorm(), nn.LayerNorm()),
        (LayerNorm(use_bias=False, epsilon=0.1), nn.LayerNorm(use_bias=False, epsilon=0.1)),
    ],
)
def test_norms_are_flaxs(ours, theirs, rng):
    x = normal(rng, 3, 5, 48)
    variables = jax.jit(theirs.init)(jax.random.key(0), x)
    assert jax.tree.map(jnp.shape, ours.init(jax.random.key(0), x)) == jax.tree.map(jnp.shape, variables)
    variables = perturbed(variables, rng)
    actual, expected = (value_and_gradients(module, variables, x) for module in (ours, theirs))
    for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert a.dtype == e.dtype
        assert_close(a.astype(jnp.float32), e.astype(jnp.float32), tolerance=1e-2)


MLP = {"kind": "relu", "norm": "layer", "use_bias": True, "zero_centered": True}


@pytest.mark.parametrize(
    ("recipe", "linen", "of_nnx"),
    [
        (
            BlockScaling(),
            lambda recipe: NormLinear((4, 16), norm="layer", recipe=recipe),
            lambda recipe: te_nnx.NormLinear(64, (4, 16), norm="layer", recipe=recipe, rngs=nnx.Rngs(0)),
        ),
        (
            DelayedScaling(history_len=4),
            lambda recipe: GatedMLP(96, 32, recipe=recipe, **MLP),
            lambda recipe: te_nnx.GatedMLP(64, 96, 32, recipe=recipe, rngs=nnx.Rngs(0), **MLP),
        ),
    ],
    ids=["NormLinear", "GatedMLP"],
)
def test_they_are_the_modules_of_nnx(linen, of_nnx, recipe, rng):
    module, other = linen(recipe), of_nnx(recipe)
    x = normal(rng, 128, 64)
    variables = jax.jit(module.init)(jax.random.key(0), x)
    variables = variables | {"params": perturbed(variables["params"], rng)}
    state = nnx.to_pure_dict(nnx.state(other, nnx.Any(nnx.Param, te_nnx.OverwriteWithGradient)))
    merged = jax.tree.map(jnp.shape, state)
    for collection in variables.values():
        for name, values in collection.items():
            assert jax.tree.map(jnp.shape, values).items() <= merged[name].items()
    for name, values in variables["params"].items():
        for parameter, value in values.items():
            getattr(getattr(other, name), parameter).set_value(value)
    assert_close(module.apply(variables, x), other(x), tolerance=1e-6)
    _, gradients, _ = value_and_gradients(module, variables, x)
    assert all(jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradients["params"]))
    if isinstance(recipe, DelayedScaling):
        histories = [state["activation_amax_history"] for state in gradients[OVERWRITE].values()]
        assert all(history[0] > 0 for history in histories)


def test_residual_and_dropout(rng):
    x, residual = normal(rng, 8, 32), normal(rng, 8, 32)
    mlp = GatedMLP(48, norm="rms", dropout_rate=0.5)
    variables = mlp.init(jax.random.key(0), x, deterministic=True)
    y, total = mlp.apply(variables, x, residual, deterministic=True)
    np.testing.assert_array_equal(total, x + residual)
    assert_close(y, mlp.apply(variables, total, deterministic=True), tolerance=1e-6)
    dropped, _ = mlp.apply(variables, x, residual, deterministic=False, rngs={"dropout": jax.random.key(1)})
    np.testing.assert_allclose(dropped, jnp.where(dropped == 0, 0, 2 * y), rtol=1e-5)


def test_kernels_quantized_once(rng):
    model = GatedMLP(64, norm="rms", recipe=BlockScaling())
    microbatches = normal(rng, 2, 128, 32)
    variables = jax.jit(model.init)(jax.random.key(0), microbatches[0])

    def loss_fn(variables, x):
        return jnp.mean(jnp.square(model.apply(variables, x)))

    quantized = quantize_kernels(model, variables, microbatches[0])
    gradients = jax.tree.map(jnp.zeros_like, variables)
    for x in microbatches:
        _, gradients = accumulate_gradients(loss_fn)(quantized, gradients, x)
    first, second = (jax.grad(loss_fn)(variables, x) for x in microbatches)
    expected = jax.tree.map(jnp.add, first["params"], second["params"])
    jax.tree.map(functools.partial(assert_close, tolerance=5e-3), gradients["params"], expected)


def test_embed_is_flaxs(rng):
    ours, theirs = Embed(48, 32), nn.Embed(48, 32)
    tokens, x = jax.device_put(rng.integers(0, 48, (2, 5))), normal(rng, 2, 5, 32)
    variables = jax.jit(theirs.init)(jax.random.key(0), tokens)
    np.testing.assert_array_equal(
        jax.jit(ours.init)(jax.random.key(0), tokens)["params"]["embedding"], variables["params"]["embedding"]
    )
    np.testing.assert_array_equal(ours.apply(variables, tokens), theirs.apply(variables, tokens))
    attend = (module.apply(variables, x, method="attend") for module in (ours, theirs))
    assert_close(*attend, tolerance=1e-6)


def test_logical_axes(rng):
    mlp = GatedMLP(
        48, norm="rms", kernel_axes=("embed", "mlp"), down_kernel_axes=("mlp", "embed"), scale_axes=("embed",)
    )
    boxed = jax.jit(mlp.init)(jax.random.key(0), normal(rng, 8, 32))["params"]
    specs = nn.get_partition_spec(boxed)
    assert specs["norm"]["scale"] == jax.sharding.PartitionSpec("embed")
    assert specs["down_proj"]["kernel"] == jax.sharding.PartitionSpec("mlp", "embed")
