"""Linear layers with several kernels: one quantization of x, results and gradients of layers of their own."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_oracle import FORWARD, GRADIENT, RECIPES, oracle, random_case, warm_state, wide
from parameters import in_turns

from te_jax import ops
from te_jax.recipe import DelayedScaling
from te_jax.testing import assert_close

CURRENT, BLOCK, DELAYED = RECIPES["current"], RECIPES["block"], RECIPES["delayed"]
X, KERNEL = jnp.zeros((32, 64), jnp.bfloat16), jnp.zeros((64, 48), jnp.bfloat16)


def assert_near(found, expected, *, tolerance):
    """Against float64."""
    assert_close(found, expected, dtype=found.dtype, tolerance=tolerance)


def random_cases(rng, *outers, batch=(2, 32), inner=(128,), kernel_contracting="first", with_bias=True):
    """Cases that share x."""
    cases = [random_case(rng, batch, inner, outer, kernel_contracting=kernel_contracting) for outer in outers]
    return [dataclasses.replace(case, x=cases[0].x, bias=case.bias if with_bias else None) for case in cases]


def operands(cases):
    return cases[0].x, tuple(case.kernel for case in cases), tuple(case.bias for case in cases)


def states_of(cases, recipe):
    return tuple(warm_state(case, recipe) for case in cases) if isinstance(recipe, DelayedScaling) else None


def gradients(cases, recipe, states, **options):
    """(results, (dx, dkernels, dbiases, next states))"""

    def run(x, kernels, biases, states):
        return ops.dense(x, kernels, biases, scaling_state=states, recipe=recipe, **options)

    ys, vjp = jax.vjp(jax.jit(run), *operands(cases), states)
    return ys, vjp(tuple(case.dy for case in cases))


@pytest.mark.parametrize(("recipe", "kernel_contracting"), in_turns({**RECIPES, "none": None}, ("first", "last")))
def test_as_layers_of_their_own(kernel_contracting, recipe, rng):
    """Sizes differ, and numbers of dimensions. In FP8 all but dx are the same bits; XLA's GEMMs may be others."""
    compare = functools.partial(assert_near, tolerance=5e-3) if recipe is None else np.testing.assert_array_equal
    cases = random_cases(rng, (256,), (2, 64), (16,), kernel_contracting=kernel_contracting)
    states = states_of(cases, recipe)
    options = {"kernel_contracting": kernel_contracting}
    ys, (dx, *others) = gradients(cases, recipe, states, **options)
    expected = np.zeros(dx.shape)
    for i, case in enumerate(cases):
        (y,), (part, *wanted) = gradients([case], recipe, None if states is None else states[i : i + 1], **options)
        compare(ys[i], y)
        jax.tree.map(compare, [other and other[i] for other in others], [w and w[0] for w in wanted])
        expected += wide(part)
    assert dx.dtype == jnp.bfloat16
    assert_near(dx, expected, tolerance=5e-3)
    assert_near(dx, sum(oracle(case).dx for case in cases), tolerance=GRADIENT)


def test_each_product_is_in_the_sum(rng):
    """One dy at a time, the others zero: its own dx comes back."""
    cases = random_cases(rng, (32,), (48,), (64,))
    for i, case in enumerate(cases):
        alone = [c if c is case else dataclasses.replace(c, dy=jnp.zeros_like(c.dy)) for c in cases]
        _, (dx, dkernels, *_) = gradients(alone, CURRENT, None)
        assert_near(dx, oracle(case).dx, tolerance=GRADIENT)
        assert [bool(np.any(wide(dkernel))) for dkernel in dkernels] == [j == i for j in range(3)]


def test_the_sum_is_rounded_once(rng):
    """In float32, in which a large product and its opposite leave the small one as it is."""
    cases = random_cases(rng, (32,), (32,), (32,), with_bias=False)
    large, small = cases[0], cases[1]
    opposite = dataclasses.replace(large, dy=-large.dy)
    tiny = dataclasses.replace(small, dy=small.dy / 1024)
    dx = gradients([large, tiny, opposite], CURRENT, None)[1][0]
    assert_near(dx, oracle(tiny).dx, tolerance=GRADIENT)


def test_biases_where_they_are(rng):
    cases = random_cases(rng, (32,), (48,))
    x, kernels, (bias, _) = operands(cases)
    for recipe in (CURRENT, None):
        y, other = ops.dense(x, kernels, (bias, None), recipe=recipe)
        np.testing.assert_array_equal(y, ops.dense(x, kernels[0], bias, recipe=recipe))
        np.testing.assert_array_equal(other, ops.dense(x, kernels[1], recipe=recipe))


@pytest.mark.parametrize("activation", ["gelu", "silu"])
@pytest.mark.parametrize("recipe", [CURRENT, BLOCK, None], ids=["current", "block", "none"])
def test_activation(recipe, activation, rng):
    cases = random_cases(rng, (128,), (256,))
    ys, (dx, *_) = gradients(cases, recipe, None, activation=activation)
    expected = [oracle(case, activation=activation) for case in cases]
    for y, wanted in zip(ys, expected, strict=True):
        assert_near(y, wanted.y, tolerance=FORWARD)
    assert_near(dx, sum(wanted.dx for wanted in expected), tolerance=1.15 * GRADIENT)


def test_one_quantization_of_x(rng):
    """In a scan, and with delayed scaling, where XLA merges nothing: three kernels are quantized, and one x."""
    cases = random_cases(rng, (32,), (48,), (64,), with_bias=False)
    x, kernels, _ = operands(cases)
    dys = tuple(case.dy for case in cases)
    for recipe in (CURRENT, DELAYED):

        def run(x, kernels, states, recipe=recipe):
            return ops.dense(x, kernels, recipe=recipe, scaling_state=states)

        def step(x, kernels, states, dys, run=run):
            return jax.vjp(run, x, kernels, states)[1](dys)

        text = jax.jit(step).lower(x, kernels, states_of(cases, recipe), dys).as_text()
        assert len(re.findall(r"custom_call @te_quantize", text)) == 1 + 3 + 3
    kept = jax.eval_shape(lambda x, kernels: jax.vjp(run, x, kernels, states_of(cases, DELAYED))[1], x, kernels)
    shapes = [leaf.shape for leaf in jax.tree.leaves(kept) if leaf.dtype == jnp.float8_e4m3fn]
    assert shapes.count((128, 2, 32)) == 1


def test_quantized_kernels_and_accumulators(rng):
    """Of either kind, side by side."""
    cases = random_cases(rng, (32,), (48,), (64,), with_bias=False)
    x, kernels, _ = operands(cases)
    quantized = ops.quantize(kernels[1], CURRENT.quantization("kernel"))
    accumulators = (jnp.ones(kernels[0].shape), jnp.full(kernels[1].shape, 2.0), None)

    def loss(x, kernel, accumulators):
        ys = ops.dense(x, (kernels[0], quantized, kernel), recipe=CURRENT, wgrad_accumulator=accumulators)
        return sum(jnp.sum((y * case.dy).astype(jnp.float32)) for y, case in zip(ys, cases, strict=True))

    dx, dkernel, after = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(x, kernels[2], accumulators)
    assert_near(dx, sum(oracle(case).dx for case in cases), tolerance=GRADIENT)
    assert_near(dkernel, oracle(cases[2]).dkernel, tolerance=GRADIENT)
    for i, start in ((0, 1.0), (1, 2.0)):
        assert_near(after[i] - start, oracle(cases[i]).dkernel, tolerance=GRADIENT)
    assert after[2] is None


@pytest.mark.parametrize("accumulate", [True, False])
def test_a_result_that_is_not_used(accumulate, rng):
    """Its accumulator and its state still get their next values."""
    cases = random_cases(rng, (32,), (48,), with_bias=False)
    x, kernels, _ = operands(cases)
    accumulators = tuple(jnp.full(kernel.shape, 3.0) for kernel in kernels)

    def loss(accumulators, states):
        y, _ = ops.dense(
            x, kernels, recipe=DELAYED, scaling_state=states, wgrad_accumulator=accumulators, accumulate=accumulate
        )
        return jnp.sum((y * cases[0].dy).astype(jnp.float32))

    after, states = jax.jit(jax.grad(loss, argnums=(0, 1)))(accumulators, states_of(cases, DELAYED))
    np.testing.assert_array_equal(after[1], 3.0 if accumulate else 0.0)
    assert_near(after[0] - 3.0 * accumulate, oracle(cases[0]).dkernel, tolerance=GRADIENT)
    assert [state.activation[0] for state in states] == [jnp.max(jnp.abs(x)).astype(jnp.float32)] * 2
    assert [state.gradient[0] for state in states] == [jnp.max(jnp.abs(cases[0].dy)).astype(jnp.float32), 0.0]


def test_the_first_state_says_how_x_is_quantized(rng):
    cases = random_cases(rng, (32,), (32,), with_bias=False)
    x, kernels, _ = operands(cases)
    state = warm_state(cases[0], DELAYED)
    tiny = dataclasses.replace(state, activation=jnp.full_like(state.activation, 1e-6))
    run = jax.jit(lambda *states: ops.dense(x, (kernels[0],) * 2, recipe=DELAYED, scaling_state=states))
    y, again = run(state, tiny)
    np.testing.assert_array_equal(y, again)
    assert_near(y, oracle(cases[0]).y, tolerance=FORWARD)
    assert np.max(np.abs(wide(run(tiny, state)[1]))) < 1e-3  # x saturates


@pytest.mark.parametrize(
    ("kernel", "options", "message"),
    [
        ((), {}, "kernel is an empty tuple; pass one array at least"),
        ((KERNEL, KERNEL[:32]), {}, "kernel[1] has shape (32, 48), whose first dimensions (32,) are contracted"),
        ((KERNEL, None), {}, "kernel[1] is None; it must be an array"),
        ((KERNEL, KERNEL[:, :40]), {"recipe": CURRENT}, "kernel[1] has shape (64, 40), 40 features out"),
        ((KERNEL, KERNEL), {"bias": KERNEL[0]}, "kernel is a tuple of 2, so bias must be one too, with None where"),
        ((KERNEL, KERNEL), {"bias": (None,)}, "kernel is a tuple of 2, so bias must be one too"),
        ((KERNEL, KERNEL), {"bias": (None, X[0])}, "bias[1] has shape (64,); for a kernel of shape (64, 48)"),
        (KERNEL, {"bias": (KERNEL[0],)}, "bias is a tuple, but kernel is not; pass one value"),
        ((KERNEL, KERNEL), {"wgrad_accumulator": KERNEL}, "so wgrad_accumulator must be one too"),
        ((KERNEL, KERNEL), {"wgrad_accumulator": (None, X)}, "wgrad_accumulator[1] has shape (32, 64)"),
        ((KERNEL, KERNEL), {"recipe": DELAYED}, "scaling_state[0] is None; DelayedScaling needs a DelayedScalingState"),
        ((KERNEL, KERNEL), {"recipe": DELAYED, "scaling_state": DELAYED.init()}, "so scaling_state must be one too"),
        ((KERNEL,), {"scaling_state": (DELAYED.init(),)}, "scaling_state[0] is given, but recipe is None"),
        (
            (KERNEL, ops.quantize(KERNEL, CURRENT.quantization("kernel"))),
            {"recipe": BLOCK},
            "kernel[1] has 'tensor' and 'tensor' scaling, but recipe is BlockScaling",
        ),
    ],
)
def test_message_names_which(kernel, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ops.dense(X, kernel, **options)


def test_the_gradient_of_a_quantized_kernel_is_refused_by_name():
    quantized = ops.quantize(KERNEL, CURRENT.quantization("kernel"))

    def loss(kernel, x, quantized=quantized):
        return sum(y.astype(jnp.float32).sum() for y in ops.dense(x, (KERNEL, kernel), recipe=CURRENT))

    with pytest.raises(NotImplementedError, match=r"kernel\[1\] is a QuantizedArray without straight_through"):
        jax.grad(loss)(quantized, X)
    with pytest.raises(ValueError, match=r"kernel\[1\] has no data copy, which the gradient with respect to x reads"):
        jax.grad(loss, argnums=1)(quantized.without_data(), X)


def test_a_single_one_in_a_tuple(rng):
    case = random_case(rng)
    (y,) = ops.dense(case.x, (case.kernel,), (case.bias,), recipe=CURRENT)
    np.testing.assert_array_equal(y, ops.dense(case.x, case.kernel, case.bias, recipe=CURRENT))
