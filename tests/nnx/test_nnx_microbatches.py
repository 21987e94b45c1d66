"""Kernels that are quantized once: how NNX shares variables, and gradients that do not fit. Else: tests/modules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_apis import NNX, normal

from te_jax.nnx import OverwriteWithGradient, QuantizedKernel, accumulate_gradients, quantize_kernels
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling
from te_jax.testing import assert_close

TRAINED = nnx.Any(nnx.Param, OverwriteWithGradient)


def linear(recipe):
    return NNX.drawn(NNX.layer("Linear", 32, 32, recipe=recipe), np.random.default_rng(0))


def loss_fn(model, x):
    return jnp.mean(jnp.square(model(x)))


def zeros(model):
    return jax.tree.map(jnp.zeros_like, nnx.state(model, TRAINED))


def test_what_the_loss_changes_beside_its_gradients_is_kept(rng):
    """As batch statistics are. Variables that are not quantized are shared with the given model."""
    model = nnx.Dict(norm=nnx.BatchNorm(32, rngs=nnx.Rngs(0)), linear=linear(CurrentScaling()), exact=linear(None))
    expected, quantized, x = nnx.clone(model.norm), quantize_kernels(model), normal(rng, (16, 32))

    @nnx.jit
    def step(expected, quantized, gradients, x):
        expected(x)
        return accumulate_gradients(lambda m, x: jnp.sum(m.exact(m.linear(m.norm(x)))))(quantized, gradients, x)

    step(expected, quantized, zeros(model), x)
    np.testing.assert_allclose(model.norm.mean[...], expected.mean[...], rtol=1e-5, atol=1e-7)
    assert jnp.any(model.norm.mean[...] != 0)
    assert isinstance(model.linear.kernel, nnx.Param)
    assert isinstance(quantized.linear.kernel, QuantizedKernel)
    assert quantized.linear.bias is model.linear.bias
    assert quantized.exact.kernel is model.exact.kernel


class Tied(nnx.Module):
    def __init__(self, recipe, other):
        self.first = linear(recipe)
        self.second = NNX.abstract(NNX.layer("LinearGeneral", 32, 32, recipe=other, use_bias=False))
        self.second.kernel = self.first.kernel

    def __call__(self, x):
        return self.second(x)


def test_a_kernel_that_layers_share_stays_one(rng):
    model, x = Tied(CurrentScaling(), CurrentScaling()), normal(rng, (16, 32))
    quantized = quantize_kernels(model)
    assert quantized.first.kernel is quantized.second.kernel
    assert model.first.kernel is model.second.kernel
    assert isinstance(model.first.kernel, nnx.Param)

    @nnx.jit
    def gradients(quantized, model, x):
        _, actual = accumulate_gradients(loss_fn)(quantized, zeros(model), x)
        return actual["first"]["kernel"], nnx.grad(loss_fn)(model, x)["first"]["kernel"]

    actual, expected = gradients(quantized, model, x)
    assert_close(actual[...], expected[...], tolerance=5e-3)
    with pytest.raises(ValueError, match=r"kernel first.kernel is quantized and was used 2.0 times"):
        accumulate_gradients(lambda model, x: jnp.sum(model(model.first(x))))(quantized, zeros(model), x)


def test_layers_that_share_a_kernel_and_need_different_ones_are_refused():
    with pytest.raises(ValueError, match="layers first and second share a kernel and quantize it differently"):
        quantize_kernels(Tied(CurrentScaling(), BlockScaling()))
    first, second = (
        NNX.drawn(NNX.layer("LinearGeneral", *sizes, axis=axis, recipe=CurrentScaling()), np.random.default_rng(0))
        for sizes, axis in ((((16, 16), 32), (-2, -1)), ((16, (16, 32)), -1))
    )
    second.kernel = first.kernel
    with pytest.raises(ValueError, match=r"layers 0 and 1 share a kernel .*: give them the same .* of dimensions"):
        quantize_kernels(nnx.List([first, second]))
    for recipes, names in (
        ((None, CurrentScaling()), "second .* with first.kernel"),
        ((CurrentScaling(), None), "first .* with second.kernel"),
    ):
        with pytest.raises(ValueError, match=f"layer {names}, which needs it as it is: use recipe=None"):
            quantize_kernels(Tied(*recipes))


def test_gradients_that_do_not_fit_are_refused(rng):
    model, x = linear(DelayedScaling(history_len=4)), normal(rng, (16, 32))
    quantized, given = quantize_kernels(model), dict(nnx.to_flat_state(zeros(model)))
    function = nnx.jit(accumulate_gradients(loss_fn))

    def refuses(gradients, message):
        remedy = (
            r"start from jax.tree.map\(jnp.zeros_like, nnx.state\(model, .*OverwriteWithGradient\)\)\), of the model"
        )
        with pytest.raises(ValueError, match=f"gradients have {message}.*: {remedy}"):
            function(quantized, gradients, x)

    with pytest.raises(ValueError, match=r"gradients is of type NoneType: start from jax\.tree\.map"):
        function(quantized, None, x)
    refuses(jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param)), "nothing for .*'activation_amax_history'")
    refuses(zeros(quantized), r"nothing for \['kernel'\]")
    everything = nnx.Any(TRAINED, QuantizedKernel)
    refuses(jax.tree.map(jnp.zeros_like, nnx.state(quantized, everything)), "a QuantizedArray for kernel")
    refuses(nnx.from_flat_state(given | {("other",): nnx.Param(x)}), r"\['other'\], which is not differentiated")
    for name in ("kernel", "bias"):
        wrong = given | {(name,): given[(name,)].replace(jnp.zeros(16))}
        refuses(nnx.from_flat_state(wrong), rf"shape \(16,\) for {name}, which has shape")
