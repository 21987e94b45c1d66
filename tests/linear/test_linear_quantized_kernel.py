"""Kernels that are quantized once, whatever layer has them. What else a QuantizedArray goes through as a kernel is in
tests/ops/test_dense_quantized_kernel.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import results_and_gradients
from linear_layers import every_layer_in_fp8
from ops.quantize_oracle import assert_bits

pytestmark = pytest.mark.usefixtures("native_kernels")


@every_layer_in_fp8
def test_the_same_bits(layer, rng):
    """As kernels that are quantized inside; their gradients go to the accumulators."""
    x, kernels, before, dys = layer.draw(rng)
    found, wanted = (
        results_and_gradients(lambda x, before, run=run: run(x, kernels, before), (x, before), dys)
        for run in (layer.of_quantized, layer)
    )
    jax.tree.map(assert_bits, found, wanted)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(found))


@every_layer_in_fp8
def test_without_an_accumulator_its_gradient_is_refused(layer, rng):
    x, kernels, _, _ = layer.draw(rng)

    def loss(kernels):
        return sum(jnp.sum(y) for y in layer.of_quantized(x, kernels, None))

    with pytest.raises(NotImplementedError, match=r"kernel\S* is a QuantizedArray without straight_through"):
        jax.eval_shape(jax.grad(loss), kernels)


@every_layer_in_fp8
def test_its_gradient_goes_through_straight_through(layer, rng):
    """To what was quantized, with the bits that it has where the layer quantizes."""
    x, kernels, _, dys = layer.draw(rng)
    found, wanted = (
        results_and_gradients(run, (x, kernels), dys)
        for run in (lambda x, kernels: layer.of_quantized(x, kernels, straight_through=True), layer)
    )
    jax.tree.map(assert_bits, found, wanted)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(found))
