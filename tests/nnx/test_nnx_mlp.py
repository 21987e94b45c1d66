"""x in FP8 for MLPs of te_jax.nnx, kernels quantized once behind a norm, gradients of embeddings, metadata of norms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from te_jax.nnx import Embed, GatedMLP, NormLinear, RMSNorm, accumulate_gradients, quantize_kernels
from te_jax.quantized import QuantizedArray
from te_jax.recipe import BlockScaling, CurrentScaling, RowwiseScaling
from te_jax.testing import assert_close, relative_error


def normal(rng, *shape):
    return jax.device_put(np.asarray(rng.standard_normal(shape), jnp.float32))


@pytest.mark.parametrize("recipe", [CurrentScaling(), RowwiseScaling(), BlockScaling()], ids=lambda r: type(r).__name__)
def test_an_mlp_takes_x_in_fp8(recipe, rng):
    """A norm of one's own before it gives the values and gradients of the norm within it."""
    within = GatedMLP(32, 48, norm="rms", recipe=recipe, rngs=nnx.Rngs(0))
    alone = GatedMLP(32, 48, recipe=recipe, rngs=nnx.Rngs(0))
    norm = RMSNorm(32, rngs=nnx.Rngs(0))
    norm.scale.set_value(1 + normal(rng, 32) / 5)
    nnx.update(within, nnx.state(alone))
    nnx.update(within.norm, nnx.state(norm))

    @nnx.jit
    def found(mlp, norm, x):
        def loss(mlp, norm, x):
            x = x if norm is None else norm(x, quantization=recipe.quantization("activation"))
            assert isinstance(x, QuantizedArray) == (norm is not None)
            return jnp.sum(jnp.sin(mlp(x)))

        places = (0, 2) if norm is None else (0, 1, 2)
        return nnx.value_and_grad(loss, argnums=places)(mlp, norm, x)

    x = normal(rng, 128, 32)
    value, (of_alone, of_norm, dx) = found(alone, norm, x)
    expected, (of_within, expected_dx) = found(within, None, x)
    np.testing.assert_allclose(value, expected, rtol=1e-4)
    assert jnp.abs(dx).max() > 0
    assert_close(dx, expected_dx, tolerance=1e-3)
    assert_close(of_norm["scale"][...], of_within["norm"]["scale"][...], tolerance=1e-3)
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert_close(of_alone[name]["kernel"][...], of_within[name]["kernel"][...], tolerance=1e-3)


def test_norm_linear_with_kernels_quantized_once(rng):
    model = NormLinear(32, 64, recipe=BlockScaling(), rngs=nnx.Rngs(0))
    microbatches = normal(rng, 2, 128, 32)

    def loss_fn(model, x):
        return jnp.mean(jnp.square(model(x)))

    quantized = quantize_kernels(model)
    assert isinstance(quantized.linear.kernel.get_value(), QuantizedArray)
    gradients = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
    for x in microbatches:
        _, gradients = accumulate_gradients(loss_fn)(quantized, gradients, x)
    first, second = (nnx.grad(loss_fn)(model, x) for x in microbatches)
    for name, parameter in (("norm", "scale"), ("linear", "kernel"), ("linear", "bias")):
        expected = first[name][parameter][...] + second[name][parameter][...]
        assert_close(gradients[name][parameter][...], expected, tolerance=5e-3)


@pytest.mark.parametrize("recipe", [None, CurrentScaling()], ids=["none", "current"])
def test_gradients_of_an_embedding_are_flaxs(recipe, rng):
    """Through the lookup and through the logits, in one table."""
    tokens, x = jax.device_put(rng.integers(0, 48, 16)), normal(rng, 16, 32)

    def gradients(model):
        def loss(model, x):
            return jnp.sum(jnp.sin(model.attend(model(tokens) + x)))

        table, dx = nnx.grad(loss, argnums=(0, 1))(model, x)
        return table["embedding"][...], dx

    ours, theirs = Embed(48, 32, recipe=recipe, rngs=nnx.Rngs(0)), nnx.Embed(48, 32, rngs=nnx.Rngs(0))
    for actual, expected in zip(gradients(ours), gradients(theirs), strict=True):
        error = relative_error(actual, expected)
        assert error < 1e-5 if recipe is None else 1e-3 < error < 0.15


def test_metadata_of_the_norm(rng):
    metadata = {"scale_metadata": {"role": "scale"}}
    for module in (
        NormLinear(32, 64, **metadata, rngs=nnx.Rngs(0)),
        GatedMLP(32, 64, norm="layer", **metadata, rngs=nnx.Rngs(0)),
    ):
        assert module.norm.scale.get_metadata("role") == "scale"


@pytest.mark.parametrize("recipe", [None, BlockScaling()], ids=["none", "block"])
def test_a_norm_is_of_the_last_axis(recipe):
    with pytest.raises(ValueError, match="axis is 0, and the norm is of the last one"):
        NormLinear(32, 64, axis=0, recipe=recipe, rngs=nnx.Rngs(0))
