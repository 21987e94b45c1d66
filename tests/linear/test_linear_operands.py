"""Accumulators, and operands that come quantized, whatever layer has them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linear_layers import FALLS_BACK, KINDS, MORE, every_layer, layers
from ops.quantize_oracle import assert_bits

from te_jax.testing import assert_close

pytestmark = pytest.mark.usefixtures("native_kernels")


def each_way(layer, takes_x, x, kernels, before, dys):
    """{way: (results, gradients)}, in one program."""

    def gradients(run, *operands):
        results, vjp = jax.vjp(run, *operands)
        return results, vjp(dys)

    found = {
        "plain": gradients(layer, x, kernels),
        "added": gradients(layer, x, kernels, before),
        "overwritten": gradients(functools.partial(layer, accumulate=False), x, kernels, before),
    }
    if layer.recipe is not None:
        through = functools.partial(layer.of_quantized, straight_through=True)
        found["quantized kernels"] = gradients(lambda x, before: layer.of_quantized(x, kernels, before), x, before)
        found["quantized kernels with a gradient"] = gradients(through, x, kernels)
        if takes_x:
            found["quantized x"] = gradients(layer.of_quantized_x, x, kernels)
    return found


@every_layer
def test_results_and_gradients(layer, rng):
    x, kernels, before, dys = layer.draw(rng)
    takes_x = layer.call is not KINDS["experts_mlp"].call
    found = jax.jit(functools.partial(each_way, layer, takes_x))(x, kernels, before, dys)
    ys, (dx, gradients) = plain = found.pop("plain")
    assert all(np.any(leaf) for leaf in jax.tree.leaves(plain))
    near = functools.partial(assert_close, tolerance=1e-6)
    # The gradient is added to an accumulator, or overwrites it; nothing else changes.
    for way, factor in (("added", np.float32(1)), ("overwritten", np.float32(0))):
        results, (of_x, zeros, after) = found[way]
        jax.tree.map(near, (results, of_x), (ys, dx))
        assert not any(map(np.any, zeros))
        for one, old, gradient in zip(after, before, gradients, strict=True):
            assert_close(np.asarray(one) - old * factor, gradient, tolerance=1e-5)
    if layer.recipe is None:
        return
    # Operands that come quantized give the same bits, and pass their gradients on.
    results, (of_x, after) = found["quantized kernels"]
    jax.tree.map(assert_bits, (results, of_x), (ys, dx))
    jax.tree.map(assert_bits, after, found["added"][1][2])
    for way in found.keys() & {"quantized kernels with a gradient", "quantized x"}:
        jax.tree.map(assert_bits, found[way], plain)


SHARED = {name: (KINDS | MORE)[name] for name in ("dense", "dense, none", "grouped_dense", "gated_mlp, block")}


@layers(SHARED)
@FALLS_BACK
def test_examples_of_vmaps_share_accumulators(layer, rng):
    """They are added once, and not once for each example of the inner or the outer vmap."""
    cases = [[layer.draw(rng) for _ in range(2)] for _ in range(2)]
    _, kernels, before, _ = cases[0][0]
    xs, dys = (
        jax.tree.map(lambda *a: np.stack(a).reshape(2, 2, *a[0].shape), *(case[i] for row in cases for case in row))
        for i in (0, 3)
    )

    @jax.jit
    def step(xs, kernels, before, dys):
        def loss(x, dys, before):
            return sum(jnp.sum(y * dy) for y, dy in zip(layer(x, kernels, before), dys, strict=True))

        def total(before):
            return jnp.sum(jax.vmap(jax.vmap(loss, (0, 0, None)), (0, 0, None))(xs, dys, before))

        def one_by_one(before):
            return sum(loss(xs[at], [dy[at] for dy in dys], before) for at in np.ndindex(2, 2))

        return jax.grad(total)(before), jax.grad(one_by_one)(jax.tree.map(jnp.zeros_like, before))

    for after, gradient, old in zip(*step(xs, kernels, before, dys), before, strict=True):
        assert_close(np.asarray(after) - old, gradient, tolerance=2e-2)
