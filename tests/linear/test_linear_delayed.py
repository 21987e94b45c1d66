"""Delayed scaling, whatever layer has it: what each role of each state observes, and scales that follow from it.

What a state becomes after outliers, zeros, infinities and several uses is in tests/ops/test_dense_state.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linear_layers import KINDS, SIZES, layers, without
from ops.quantize_oracle import assert_bits

from te_jax.recipe import CurrentScaling, DelayedScaling, DelayedScalingState
from te_jax.testing import assert_close

pytestmark = pytest.mark.usefixtures("native_kernels")

RECIPE = DelayedScaling(history_len=3)
SAME = CurrentScaling(gradient_dtype=RECIPE.gradient_dtype)


def amax(x):
    return np.abs(np.asarray(x)).max()


def warm(rng, count, uses=1.0):
    """States that have seen more than what comes, but not so much that nothing else is remembered."""

    def history():
        return rng.uniform(20, 40, RECIPE.history_len).astype(np.float32)

    return tuple(DelayedScalingState(history(), history(), history(), np.float32(uses)) for _ in range(count))


def of_gated_mlp(x, kernels, dy):
    """Largest magnitudes of the activations and of the gradients of gate, up and down, without FP8."""
    gate, up, down = kernels

    @jax.jit
    def run(x, dy):
        h, vjp = jax.vjp(lambda gate, up: jax.nn.silu(gate) * up, x @ gate, x @ up)
        return h, vjp(dy @ down.T)

    h, gradients = run(x, dy)
    return (amax(x), amax(x), amax(h)), (*map(amax, gradients), amax(dy))


@without("experts_mlp", "parallel.gated_mlp")  # fused for block scaling alone; two layers that are here by themselves
def test_next_states_and_scales(layer, rng):
    """Histories take up the largest magnitudes. With states that have seen a step, its results and gradients are, bit
    for bit, those of current scaling."""
    x, kernels, _, dys = layer.draw(rng)
    rows = SIZES.sum() if layer.experts else len(x)
    for a in (x, *dys):
        a[rows:] = 1e6  # those of no expert are not observed
    states, used_twice = warm(rng, len(kernels)), warm(rng, len(kernels), uses=2.0)

    @jax.jit
    def step(x, kernels, states, dys):
        delayed = layer.by(RECIPE)
        ys, vjp = jax.vjp(lambda x, kernels, states: delayed(x, kernels, None, states), x, kernels, states)
        expected, vjp_of_same = jax.vjp(layer.by(SAME), x, kernels)
        _, of_quantized = jax.vjp(lambda states: delayed.of_quantized(x, kernels, None, states), states)
        return (ys, vjp(dys)), (expected, vjp_of_same(dys)), *of_quantized(dys)

    (_, (*_, after)), _, _ = step(x, kernels, states, dys)
    activations, gradients, rounding = [amax(x[:rows])] * len(kernels), [amax(dy[:rows]) for dy in dys], 1e-6
    if len(dys) < len(kernels):
        (activations, gradients), rounding = of_gated_mlp(x, kernels, *dys), 0.15
    for before, found, activation, kernel, gradient in zip(states, after, activations, kernels, gradients, strict=True):
        for role, seen in (("activation", activation), ("kernel", amax(kernel)), ("gradient", gradient)):
            newest, *rest = getattr(found, role)
            np.testing.assert_allclose(newest, seen, rtol=1e-6 if role == "kernel" else rounding, err_msg=role)
            np.testing.assert_array_equal(rest, getattr(before, role)[:-1])
        assert found.uses == 1
    if layer.experts:  # all have one scale
        for kernel in kernels:
            kernel[:, 0, 0] = amax(kernel)
    for _ in range(2 * RECIPE.history_len):
        found, expected, _ = step(x, kernels, after, dys)
        after = found[1][2]
    # Each device of a gated MLP has its own scale of h with current scaling.
    same = functools.partial(assert_close, tolerance=0.1) if layer.specs and rounding > 0.1 else assert_bits
    jax.tree.map(same, (found[0], found[1][:2]), expected)
    # Kernels that come quantized are not observed; the newest entry is a sum over uses.
    *_, after = step(x, kernels, used_twice, dys)
    for before, found in zip(used_twice, after, strict=True):
        np.testing.assert_allclose(found.kernel, before.kernel / 2, rtol=1e-6)
        np.testing.assert_allclose(found.activation[1:], before.activation[:-1] / [1, 2], rtol=1e-6)


SEVERAL = layers({name: KINDS[name] for name in ("dense", "grouped_dense", "all_gather_matmul")})


@SEVERAL
def test_a_result_that_is_not_used(layer, rng):
    """Its accumulator gets its next value. Its gradient is zeros where there is one, and not observed elsewhere."""
    x, kernels, before, (dy, _) = layer.draw(rng)
    states = warm(rng, 2)

    @jax.jit
    def step(x, kernels, before, states, dy):
        def loss(before, states, **options):
            return jnp.sum(layer.by(RECIPE)(x, kernels, before, states, **options)[0] * dy)

        return (
            jax.grad(loss, argnums=(0, 1))(before, states),
            jax.grad(lambda *operands: loss(*operands, accumulate=False), argnums=(0, 1))(before, states),
            jax.grad(lambda states: loss(None, states))(states),
        )

    (added, after), (overwritten, _), without_accumulators = step(x, kernels, before, states, dy)
    np.testing.assert_array_equal(added[1], before[1])
    assert not np.any(overwritten[1])
    assert np.any(overwritten[0])
    assert_close(np.asarray(added[0]) - before[0], overwritten[0], tolerance=1e-5)
    assert after[1].gradient[0] == 0
    np.testing.assert_array_equal(without_accumulators[1].gradient, states[1].gradient)
    for found in (after, without_accumulators):
        assert found[0].gradient[0] == amax(dy[: SIZES.sum()] if layer.experts else dy)
        assert [state.kernel[0] for state in found] == [*map(amax, kernels)]


@SEVERAL
def test_the_first_state_says_how_x_is_quantized(layer, rng):
    x, kernels, _, _ = layer.draw(rng)
    first, second = warm(rng, 2)
    tiny = dataclasses.replace(first, activation=np.full(RECIPE.history_len, 1e-3, np.float32))
    run = jax.jit(lambda x, kernels, *states: layer.by(RECIPE)(x, kernels, None, states)[1])
    expected = run(x, kernels, first, second)
    other = dataclasses.replace(second, activation=tiny.activation)
    np.testing.assert_array_equal(expected, run(x, kernels, first, other))
    assert amax(run(x, kernels, tiny, second)) < 0.01 * amax(expected)  # x saturates
