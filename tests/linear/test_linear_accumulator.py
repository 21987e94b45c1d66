"""Accumulators take the gradients of kernels, whatever layer has them. tests/ops/test_dense_accumulator.py has their
memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import results_and_gradients
from linear_layers import every_layer

from te_jax.testing import assert_close

pytestmark = pytest.mark.usefixtures("native_kernels")


@every_layer
def test_value(layer, rng):
    """What the gradient would have been is added to it, or overwrites it; nothing else changes."""
    x, kernels, before, dys = layer.draw(rng)
    wanted, (wanted_dx, gradients) = results_and_gradients(layer, (x, kernels), dys)
    for accumulate in (True, False):
        run = functools.partial(layer, accumulate=accumulate)
        ys, (dx, dkernels, after) = results_and_gradients(run, (x, kernels, before), dys)
        jax.tree.map(lambda one, other: assert_close(one, other, tolerance=1e-6), (ys, dx), (wanted, wanted_dx))
        for dkernel, found, old, gradient in zip(dkernels, after, before, gradients, strict=True):
            assert not np.any(dkernel)
            assert_close(np.asarray(found) - old * np.float32(accumulate), gradient, tolerance=1e-5)
            assert np.any(gradient)


@every_layer
def test_it_has_to_be_differentiated(layer, rng):
    """It would swallow the gradient of the kernel."""
    x, kernels, before, _ = layer.draw(rng)

    def loss(x, kernels):
        return sum(jnp.sum(y) for y in layer(x, kernels, before))

    with pytest.raises(ValueError, match="differentiate with respect to wgrad_accumulator"):
        jax.eval_shape(jax.grad(loss, argnums=1), x, kernels)
    jax.eval_shape(jax.grad(loss), x, kernels)


@every_layer
def test_second_derivatives_are_refused(layer, rng):
    """As those of a gradient penalty are."""
    x, kernels, before, _ = layer.draw(rng)

    def penalty(x):
        return jnp.sum(jax.grad(lambda x: sum(jnp.sum(jnp.sin(y)) for y in layer(x, kernels, before)))(x) ** 2)

    with pytest.raises(NotImplementedError, match=r"differentiated once|first derivatives in reverse mode"):
        jax.jit(jax.grad(penalty)).lower(x)
