"""Norms of te_jax.nnx against Flax's own, with linear layers and MLPs behind them, and embeddings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from parameters import in_turns

from te_jax import ops
from te_jax.nnx import (
    Einsum,
    Embed,
    GatedMLP,
    LayerNorm,
    Linear,
    LinearGeneral,
    NormLinear,
    OverwriteWithGradient,
    RMSNorm,
    accumulate_gradients,
    overwrite_with_gradient,
    quantize_kernels,
)
from te_jax.quantized import QuantizedArray
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling
from te_jax.testing import assert_close

RECIPES = [CurrentScaling(), RowwiseScaling(), BlockScaling(), DelayedScaling(history_len=4)]
TRAINED = nnx.Any(nnx.Param, OverwriteWithGradient)
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)


def normal(rng, *shape):
    return jax.device_put(np.asarray(rng.standard_normal(shape), jnp.float32))


def perturbed(module, rng):
    """With parameters that differ from those that layers begin with."""
    for _, parameter in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        parameter.set_value(parameter.get_value() + 0.2 * normal(rng, *parameter.shape))
    return module


def assert_all_close(actual, expected, tolerance):
    jax.tree.map(functools.partial(assert_close, tolerance=tolerance), actual, expected)


def value_and_gradients(module, *operands):
    @nnx.jit
    def found(module, *operands):
        def loss(module, *operands):
            y = module(*operands)
            return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(y)), y

        places = (nnx.DiffState(0, TRAINED), *range(1, 1 + len(operands)))
        (_, y), gradients = nnx.value_and_grad(loss, argnums=places, has_aux=True)(module, *operands)
        return y, nnx.to_pure_dict(gradients[0]), gradients[1:]

    return found(module, *operands)


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (RMSNorm, nnx.RMSNorm, {}),
        (RMSNorm, nnx.RMSNorm, {"use_scale": False, "epsilon": 0.1}),
        (LayerNorm, nnx.LayerNorm, {}),
        (LayerNorm, nnx.LayerNorm, {"use_bias": False, "epsilon": 0.1}),
    ],
)
def test_norms_are_flaxs(ours, theirs, options, rng):
    ours, theirs = ours(48, **options, rngs=nnx.Rngs(0)), theirs(48, **options, rngs=nnx.Rngs(0))
    for a, e in zip(*(jax.tree.leaves_with_path(nnx.state(module)) for module in (ours, theirs)), strict=True):
        assert a[0] == e[0]
        np.testing.assert_array_equal(a[1], e[1])
    nnx.update(ours, nnx.state(perturbed(theirs, rng)))  # a checkpoint of the one is one of the other
    x = normal(rng, 3, 5, 48)
    actual, expected = (value_and_gradients(module, x) for module in (ours, theirs))
    for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert a.dtype == e.dtype
        np.testing.assert_allclose(a.astype(jnp.float32), e.astype(jnp.float32), atol=2e-5, rtol=1e-2)


def test_zero_centered_norms_begin_with_zeros(rng):
    x, norm = normal(rng, 4, 48), RMSNorm(48, zero_centered=True, rngs=nnx.Rngs(0))
    assert not norm.scale.get_value().any()
    assert_close(norm(x), RMSNorm(48, rngs=nnx.Rngs(0))(x), tolerance=1e-6)


def test_a_norm_hands_over_fp8_and_the_sum(rng):
    recipe = BlockScaling()
    x, residual = (normal(rng, 128, 64).astype(jnp.bfloat16) for _ in range(2))
    norm = RMSNorm(64, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x8, total = norm(x, residual, quantization=recipe.quantization("activation"))
    assert isinstance(x8, QuantizedArray)
    assert total.dtype == jnp.bfloat16
    linear = Linear(64, 32, dtype=jnp.bfloat16, recipe=recipe, rngs=nnx.Rngs(1))
    assert_close(linear(x8), linear(norm(total)), tolerance=1e-2)
    with pytest.raises(ValueError, match=r"inputs are a QuantizedArray, and the layer has axis \(0,\)"):
        LinearGeneral(128, 32, axis=0, recipe=recipe, rngs=nnx.Rngs(1))(x8)


@pytest.mark.parametrize("recipe", [None, BlockScaling()], ids=["none", "block"])
def test_a_float32_residual_stream_stays_float32(recipe, rng):
    """Where layers compute in bfloat16: what is added to the stream is not lost in the next sum."""
    mlp = GatedMLP(64, 96, norm="rms", dtype=jnp.bfloat16, recipe=recipe, rngs=nnx.Rngs(0))
    x, residual = normal(rng, 128, 64), 1e4 * normal(rng, 128, 64)
    y, total = mlp(x, residual)
    assert (y.dtype, total.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(total, x + residual)
    exact = GatedMLP(64, 96, norm="rms", recipe=recipe, rngs=nnx.Rngs(0))
    assert_close(y.astype(jnp.float32), exact(x, residual)[0], tolerance=2e-2 if recipe is None else 6e-2)
    gradients = nnx.grad(
        lambda mlp, *xs: sum(jnp.sum(y.astype(jnp.float32)) for y in mlp(*xs)),
        argnums=(nnx.DiffState(0, TRAINED), 1, 2),
    )
    _, dx, dresidual = nnx.jit(gradients)(mlp, x, residual)
    assert dx.dtype == dresidual.dtype == jnp.float32
    np.testing.assert_array_equal(dx, dresidual)


@pytest.mark.parametrize(
    ("shape", "recipe"),
    in_turns([(64,), (3, 7, 64), (0, 64)], {"block": BlockScaling(), "current": CurrentScaling()}),
)
def test_any_rows(recipe, shape, rng):
    x, norm_linear = normal(rng, *shape), NormLinear(64, 32, recipe=recipe, rngs=nnx.Rngs(0))
    expected = norm_linear.linear(norm_linear.norm(x))
    assert_close(norm_linear(x), expected, tolerance=1e-2)
    assert GatedMLP(64, 96, 32, norm="rms", recipe=recipe, rngs=nnx.Rngs(0))(x).shape == expected.shape


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_split_over_devices(axis_type, make_mesh, native_kernels, rng):
    """Tokens along one axis of a mesh and hidden features along the other: values, gradients, and where they lie."""
    mesh = make_mesh({"data": axis_type, "model": axis_type})
    x, residual = normal(rng, 512, 64), normal(rng, 512, 64)

    def mlp(**metadata):
        return GatedMLP(64, 512, norm="rms", recipe=BlockScaling(), rngs=nnx.Rngs(0), **metadata)

    expected = value_and_gradients(mlp(), x, residual)
    with jax.set_mesh(mesh):
        split = mlp(
            kernel_metadata={"out_sharding": (None, "model")}, down_kernel_metadata={"out_sharding": ("model", None)}
        )
        actual = value_and_gradients(split, *(jax.device_put(a, NamedSharding(mesh, P("data"))) for a in (x, residual)))
    (y, total), gradients, _ = actual
    rows = NamedSharding(mesh, P("data", None))
    assert all(a.sharding.is_equivalent_to(rows, 2) for a in (y, total))
    for name, spec in (("gate_proj", P(None, "model")), ("down_proj", P("model", None))):
        assert gradients[name]["kernel"].sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
    assert_all_close(actual, expected, tolerance=5e-3)


@pytest.mark.parametrize(("recipe", "norm"), in_turns(RECIPES, ["rms", "layer"]))
def test_norm_linear_is_a_norm_and_a_layer(norm, recipe, rng):
    both = perturbed(NormLinear(64, (4, 16), norm=norm, recipe=recipe, rngs=nnx.Rngs(0)), rng)
    assert set(nnx.to_pure_dict(nnx.state(both, nnx.Param))) == {"norm", "linear"}

    class Apart(nnx.Module):
        def __init__(self):
            self.norm, self.linear = both.norm, both.linear

        def __call__(self, x, residual):
            y, total = self.norm(x, residual)
            return self.linear(y), total

    x, residual = normal(rng, 2, 128, 64), normal(rng, 2, 128, 64)
    actual, expected = (value_and_gradients(module, x, residual) for module in (both, Apart()))
    assert actual[0][0].shape == (2, 128, 4, 16)
    assert_all_close(actual, expected, tolerance=1e-2)
    assert_close(both(x), both.linear(both.norm(x)), tolerance=1e-2)


@each_recipe
def test_gated_mlp_is_the_operation_behind_a_norm(recipe, rng):
    mlp = perturbed(GatedMLP(64, 96, 32, kind="gelu", norm="rms", use_bias=True, recipe=recipe, rngs=nnx.Rngs(0)), rng)
    x, residual = normal(rng, 128, 64), normal(rng, 128, 64)
    layers = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    delayed = isinstance(recipe, DelayedScaling)
    y, total = mlp(x, residual)
    normed, expected_total = ops.rms_norm(x, mlp.norm.scale.get_value(), residual=residual)
    expected = ops.gated_mlp(
        normed,
        tuple(layer.kernel.get_value() for layer in layers),
        tuple(layer.bias.get_value() for layer in layers),
        kind="gelu",
        recipe=recipe,
        scaling_state=tuple(layer.held().scaling_state for layer in layers) if delayed else None,
    )
    assert_close(y, expected, tolerance=1e-2)
    np.testing.assert_array_equal(total, expected_total)
    _, gradients, _ = value_and_gradients(mlp, x, residual)
    if delayed:
        overwrite_with_gradient(mlp, value_and_gradients_state(mlp, x))
        for layer in layers:
            assert layer.activation_amax_history.get_value()[0] > 0
    assert all(jnp.abs(gradients[name]["kernel"]).max() > 0 for name in ("gate_proj", "up_proj", "down_proj"))


def value_and_gradients_state(module, x):
    def loss(module):
        return jnp.sum(jnp.sin(module(x)))

    return nnx.jit(nnx.grad(loss, argnums=nnx.DiffState(0, TRAINED)))(module)


def test_gated_mlp_in_bfloat16_is_plain_jax(rng):
    mlp = GatedMLP(32, 48, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = normal(rng, 8, 32)
    gate, up, down = (getattr(mlp, name).kernel.get_value() for name in ("gate_proj", "up_proj", "down_proj"))
    assert_close(mlp(x).astype(jnp.float32), (jax.nn.silu(x @ gate) * (x @ up)) @ down, tolerance=2e-2)
    assert mlp(x).dtype == jnp.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [BlockScaling(), DelayedScaling(history_len=4)], ids=["block", "delayed"])
def test_kernels_quantized_once(recipe, rng):
    mlp = GatedMLP(32, 64, norm="rms", recipe=recipe, rngs=nnx.Rngs(0))
    microbatches = normal(rng, 2, 128, 32)

    def loss_fn(mlp, x):
        return jnp.mean(jnp.square(mlp(x)))

    single = nnx.jit(nnx.grad(loss_fn, argnums=nnx.DiffState(0, TRAINED)))
    if isinstance(recipe, DelayedScaling):  # scales of kernels quantized once are always up to date
        overwrite_with_gradient(mlp, single(mlp, microbatches[0]))

    @nnx.jit
    def accumulated(mlp, microbatches):
        quantized = quantize_kernels(mlp)
        assert isinstance(quantized.up_proj.kernel.get_value(), QuantizedArray)
        gradients = jax.tree.map(jnp.zeros_like, nnx.state(mlp, TRAINED))
        for x in microbatches:
            _, gradients = accumulate_gradients(loss_fn)(quantized, gradients, x)
        return gradients

    actual, (first, second) = accumulated(mlp, microbatches), (single(mlp, x) for x in microbatches)
    for name in ("gate_proj", "up_proj", "down_proj"):
        expected = first[name]["kernel"][...] + second[name]["kernel"][...]
        assert_close(actual[name]["kernel"][...], expected, tolerance=5e-3)


def test_dropout_is_of_the_result(rng):
    mlp, x = GatedMLP(32, 48, dropout_rate=0.5, rngs=nnx.Rngs(0, dropout=1)), normal(rng, 8, 32)
    y, dropped = mlp(x, deterministic=True), mlp(x)
    assert 0.2 < jnp.mean(dropped == 0) < 0.8
    np.testing.assert_allclose(dropped, jnp.where(dropped == 0, 0, 2 * y), rtol=1e-5)


def test_embed_is_flaxs(rng):
    ours, theirs = Embed(48, 32, rngs=nnx.Rngs(0)), nnx.Embed(48, 32, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(ours.embedding.get_value(), theirs.embedding.get_value())
    tokens, x = jax.device_put(rng.integers(0, 48, (2, 5))), normal(rng, 2, 5, 32)
    np.testing.assert_array_equal(ours(tokens), theirs(tokens))
    assert_close(ours.attend(x), theirs.attend(x), tolerance=1e-6)
    fp8 = Embed(48, 32, recipe=CurrentScaling(), rngs=nnx.Rngs(0))
    assert 1e-3 < jnp.linalg.norm(fp8.attend(x) - theirs.attend(x)) / jnp.linalg.norm(theirs.attend(x)) < 0.1


def test_errors(rng):
    x = normal(rng, 128, 32)
    with pytest.raises(ValueError, match="norm is 'batch'; it must be 'rms' or 'layer'"):
        GatedMLP(32, 48, norm="batch", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="residual is given, and there is no norm that adds it"):
        GatedMLP(32, 48, rngs=nnx.Rngs(0))(x, x)
    with pytest.raises(ValueError, match=r"x has shape \(128, 32\); the norm needs 48 features"):
        RMSNorm(48, rngs=nnx.Rngs(0))(x)
    with pytest.raises(ValueError, match="whose state Embed does not hold"):
        Embed(48, 32, recipe=DelayedScaling(), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="inputs have dtype float32; they must be integers"):
        Embed(48, 32, rngs=nnx.Rngs(0))(x)
    x8 = ops.quantize(x, BlockScaling().quantization("activation"), straight_through=True)
    with pytest.raises(ValueError, match="x is a QuantizedArray, and there is a norm"):
        NormLinear(32, 16, recipe=BlockScaling(), rngs=nnx.Rngs(0))(x8)
    for name, take in (
        ("x", RMSNorm(32, rngs=nnx.Rngs(0))),
        ("query", Embed(48, 32, rngs=nnx.Rngs(0)).attend),
        ("inputs", Einsum("td,df->tf", (32, 48), recipe=BlockScaling(), rngs=nnx.Rngs(0))),
    ):
        with pytest.raises(ValueError, match=f"{name} is a QuantizedArray, which linear layers take, and not this one"):
            take(x8)
