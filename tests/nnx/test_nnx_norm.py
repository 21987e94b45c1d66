"""Norms of te_jax.nnx with linear layers and MLPs behind them. Linen's agree with them: tests/modules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_apis import NNX, normal, perturbed, value_and_gradients
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from parameters import in_turns

from te_jax import ops
from te_jax.nnx import (
    Einsum,
    Embed,
    GatedMLP,
    Linear,
    LinearGeneral,
    NormLinear,
    OverwriteWithGradient,
    RMSNorm,
    overwrite_with_gradient,
)
from te_jax.quantized import QuantizedArray
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling
from te_jax.testing import assert_close

RECIPES = [CurrentScaling(), RowwiseScaling(), BlockScaling(), DelayedScaling(history_len=4)]
TRAINED = nnx.Any(nnx.Param, OverwriteWithGradient)


def assert_all_close(actual, expected, tolerance):
    jax.tree.map(functools.partial(assert_close, tolerance=tolerance), actual, expected)


def test_a_norm_hands_over_fp8_and_the_sum(rng):
    recipe = BlockScaling()
    x, residual = (normal(rng, (128, 64)).astype(jnp.bfloat16) for _ in range(2))
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
    x, residual = normal(rng, (128, 64)), 1e4 * normal(rng, (128, 64))
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
    x, norm_linear = normal(rng, shape), NormLinear(64, 32, recipe=recipe, rngs=nnx.Rngs(0))
    expected = norm_linear.linear(norm_linear.norm(x))
    assert_close(norm_linear(x), expected, tolerance=1e-2)
    assert GatedMLP(64, 96, 32, norm="rms", recipe=recipe, rngs=nnx.Rngs(0))(x).shape == expected.shape


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_split_over_devices(axis_type, make_mesh, native_kernels, rng):
    """Tokens along one axis of a mesh and hidden features along the other: values, gradients, and where they lie."""
    mesh = make_mesh({"data": axis_type, "model": axis_type})
    x, residual = normal(rng, (512, 64)), normal(rng, (512, 64))

    def mlp(**inits):
        return GatedMLP(64, 512, norm="rms", recipe=BlockScaling(), rngs=nnx.Rngs(0), **inits)

    expected = value_and_gradients(NNX, mlp(), x, residual)
    with jax.set_mesh(mesh):
        wide, down = (
            nnx.with_metadata(nnx.initializers.lecun_normal(), out_sharding=names)
            for names in ((None, "model"), ("model", None))
        )
        split = mlp(kernel_init=wide, down_kernel_init=down)
        actual = value_and_gradients(
            NNX, split, *(jax.device_put(a, NamedSharding(mesh, P("data"))) for a in (x, residual))
        )
    (y, total), gradients, *_ = actual
    rows = NamedSharding(mesh, P("data", None))
    assert all(a.sharding.is_equivalent_to(rows, 2) for a in (y, total))
    for name, spec in (("gate_proj", P(None, "model")), ("down_proj", P("model", None))):
        assert gradients[name]["kernel"].sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
    assert_all_close(actual, expected, tolerance=5e-3)


@pytest.mark.parametrize(("recipe", "norm"), in_turns(RECIPES, ["rms", "layer"]))
def test_norm_linear_is_a_norm_and_a_layer(norm, recipe, rng):
    both = perturbed(NNX, NormLinear(64, (4, 16), norm=norm, recipe=recipe, rngs=nnx.Rngs(0)), rng)
    assert set(nnx.to_pure_dict(nnx.state(both, nnx.Param))) == {"norm", "linear"}

    class Apart(nnx.Module):
        def __init__(self):
            self.norm, self.linear = both.norm, both.linear

        def __call__(self, x, residual):
            y, total = self.norm(x, residual)
            return self.linear(y), total

    x, residual = normal(rng, (2, 128, 64)), normal(rng, (2, 128, 64))
    actual, expected = (value_and_gradients(NNX, module, x, residual) for module in (both, Apart()))
    assert actual[0][0].shape == (2, 128, 4, 16)
    assert_all_close(actual, expected, tolerance=1e-2)
    assert_close(both(x), both.linear(both.norm(x)), tolerance=1e-2)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_gated_mlp_is_the_operation_behind_a_norm(recipe, rng):
    mlp = perturbed(
        NNX, GatedMLP(64, 96, 32, activation="gelu", norm="rms", use_bias=True, recipe=recipe, rngs=nnx.Rngs(0)), rng
    )
    x, residual = normal(rng, (128, 64)), normal(rng, (128, 64))
    layers = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    delayed = isinstance(recipe, DelayedScaling)
    y, total = mlp(x, residual)
    normed, expected_total = ops.rms_norm(x, mlp.norm.scale.get_value(), residual=residual)
    expected = ops.gated_mlp(
        normed,
        tuple(layer.kernel.get_value() for layer in layers),
        tuple(layer.bias.get_value() for layer in layers),
        activation="gelu",
        recipe=recipe,
        scaling_state=tuple(layer.held().scaling_state for layer in layers) if delayed else None,
    )
    assert_close(y, expected, tolerance=1e-2)
    np.testing.assert_array_equal(total, expected_total)
    _, gradients, *_ = value_and_gradients(NNX, mlp, x, residual)
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
    x = normal(rng, (8, 32))
    gate, up, down = (getattr(mlp, name).kernel.get_value() for name in ("gate_proj", "up_proj", "down_proj"))
    assert_close(mlp(x).astype(jnp.float32), (jax.nn.silu(x @ gate) * (x @ up)) @ down, tolerance=2e-2)
    assert mlp(x).dtype == jnp.bfloat16


def test_errors(rng):
    x = normal(rng, (128, 32))
    with pytest.raises(ValueError, match=r"x has shape \(128, 32\); the norm needs 48 features"):
        RMSNorm(48, rngs=nnx.Rngs(0))(x)
    for recipe in (None, BlockScaling()):
        with pytest.raises(ValueError, match="axis is 0, and the norm is of the last one"):
            NormLinear(32, 64, axis=0, recipe=recipe, rngs=nnx.Rngs(0))
    x8 = ops.quantize(x, BlockScaling().quantization("activation"), straight_through=True)
    for name, take in (
        ("x", RMSNorm(32, rngs=nnx.Rngs(0))),
        ("query", Embed(48, 32, rngs=nnx.Rngs(0)).attend),
        ("inputs", Einsum("td,df->tf", (32, 48), recipe=BlockScaling(), rngs=nnx.Rngs(0))),
    ):
        with pytest.raises(ValueError, match=f"{name} is a QuantizedArray, which linear layers take, and not this one"):
            take(x8)
