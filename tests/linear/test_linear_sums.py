"""The gradient of an x that several kernels share is summed in float32 and rounded once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from linear_layers import FALLS_BACK, KINDS, MORE, layers

from te_jax.testing import relative_error

ROWS = ("dense", "dense, block", "grouped_dense", "grouped_dense, none", "all_gather_matmul")


@layers({name: (KINDS | MORE)[name] for name in ROWS})
@FALLS_BACK
def test_a_large_product_and_its_opposite_leave_the_small_one(layer, rng):
    x, (kernel, _), _, (dy, _) = layer.draw(rng)
    if layer.experts:
        dy[np.arange(len(dy)) >= 128] = 0
    x, kernel, other, dy = (a.astype(jnp.bfloat16) for a in (x, kernel, rng.permutation(kernel, axis=-1), dy))
    kernels, small = (kernel, other, kernel), dy / 1024
    if layer.specs:
        layer = layer_of_three(layer)

    @jax.jit
    def dx_of(x, kernels, *dys):
        return jax.vjp(lambda x: layer(x, kernels), x)[1](dys)[0]

    dx, expected = (dx_of(x, kernels, *dys) for dys in ((dy, small, -dy), (0 * dy, small, 0 * dy)))
    assert dx.dtype == jnp.bfloat16
    assert relative_error(dx, expected) < 0.01
    assert np.any(np.asarray(expected))


def layer_of_three(layer):
    of_x, (of_kernel, _), of_results = layer.specs
    return dataclasses.replace(layer, specs=(of_x, (of_kernel,) * 3, of_results))
