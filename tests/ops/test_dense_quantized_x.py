"""Linear layers whose x comes in FP8, with its gradient: values and gradients are those of the plain x, bit for bit."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_oracle import GRADIENT, RECIPES, oracle, random_case
from jax import lax
from parameters import in_turns

from te_jax import ops
from te_jax.hlo import buffers
from te_jax.testing import assert_close

WITHOUT_STATE = {name: recipe for name, recipe in RECIPES.items() if name != "delayed"}
CURRENT, BLOCK, DELAYED = RECIPES["current"], RECIPES["block"], RECIPES["delayed"]


def assert_near(found, expected, *, tolerance):
    """Against float64."""
    assert_close(found, expected, dtype=found.dtype, tolerance=tolerance)


def plain(x, kernel, recipe, **options):
    return ops.dense(x, kernel, recipe=recipe, **options)


def quantization_of(recipe, kernel_contracting="first"):
    quantization = recipe.quantization("activation")
    if kernel_contracting == "last":
        transposed = recipe.quantization("gradient").transposed_scaling
        quantization = dataclasses.replace(quantization, transposed_scaling=transposed)
    return quantization


def quantized(x, kernel, recipe, **options):
    quantization = quantization_of(recipe, options.get("kernel_contracting", "first"))
    row_ndim = x.ndim - options.get("contracting_ndim", 1)
    implementation = options.get("implementation")
    x = ops.quantize(x, quantization, row_ndim=row_ndim, straight_through=True, implementation=implementation)
    return ops.dense(x, kernel, recipe=recipe, **options)


def step(run, *operands):
    *operands, dy = operands
    y, vjp = jax.vjp(run, *operands)
    return y, *vjp(dy)


def assert_same_bits(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture
def case(rng):
    return random_case(rng, (2, 128), (128,), (256,), with_bias=False)


@pytest.mark.parametrize(("recipe", "kernel_contracting"), in_turns(WITHOUT_STATE, ("first", "last")))
def test_the_same_bits(kernel_contracting, recipe, implementation, rng):
    case = random_case(rng, (2, 128), (256,), (2, 128), kernel_contracting=kernel_contracting)
    options = {"recipe": recipe, "kernel_contracting": kernel_contracting, "implementation": implementation}

    def run(layer, x, kernel, bias):
        return layer(x, kernel, bias=bias, **options)

    found, wanted = (
        jax.jit(functools.partial(step, functools.partial(run, f)))(*case.operands, case.dy) for f in (quantized, plain)
    )
    assert_same_bits(found, wanted)
    assert_near(found[1], oracle(case).dx, tolerance=GRADIENT)
    assert_near(found[2], oracle(case).dkernel, tolerance=GRADIENT)


def test_into_a_scan_and_out_of_remat(case):
    """The QuantizedArray may pass into a loop over kernels, where cotangents of zeros are arrays."""
    kernels = jnp.stack([case.kernel, -2 * case.kernel])

    def run(x, kernels, layer=quantized):
        if layer is quantized:
            x = jax.checkpoint(lambda x: ops.quantize(x, quantization_of(CURRENT), row_ndim=2, straight_through=True))(
                x
            )
        return lax.map(lambda kernel: ops.dense(x, kernel, recipe=CURRENT), kernels)

    dy = jnp.stack([case.dy, case.dy])
    found = jax.jit(functools.partial(step, run))(case.x, kernels, dy)
    wanted = jax.jit(functools.partial(step, functools.partial(run, layer=plain)))(case.x, kernels, dy)
    assert_same_bits(found, wanted)


def test_several_kernels_share_it(case):
    x, kernels = case.x, (case.kernel, 2 * case.kernel)
    found, wanted = (
        jax.jit(functools.partial(step, functools.partial(f, recipe=CURRENT)))(x, kernels, (case.dy, case.dy))
        for f in (quantized, plain)
    )
    assert_same_bits(found, wanted)


def test_straight_through_takes_no_memory(case):
    """Nothing in the program reads the zeros, and nothing is kept of them."""

    def program(run):
        return jax.jit(functools.partial(step, functools.partial(run, recipe=CURRENT))).lower(
            case.x, case.kernel, case.dy
        )

    found, wanted = (program(run).compile() for run in (quantized, plain))
    assert found.memory_analysis().temp_size_in_bytes == wanted.memory_analysis().temp_size_in_bytes
    zeros = [b for b in buffers(found, "broadcast") if b.bytes >= case.x.nbytes]
    assert zeros == []


def test_a_producer_of_its_own(case):
    """A layer that writes FP8 has straight_through of its own making."""

    @jax.custom_vjp
    def doubled(x):
        q = ops.quantize(2 * x, CURRENT.quantization("activation"), row_ndim=2)
        return dataclasses.replace(q, straight_through=jnp.zeros_like(x))

    doubled.defvjp(lambda x: (doubled(x), None), lambda _, q: (2 * q.straight_through,))
    found = step(jax.jit(lambda x, kernel: plain(doubled(x), kernel, CURRENT)), case.x, case.kernel, case.dy)
    wanted = step(jax.jit(lambda x, kernel: plain(2 * x, kernel, CURRENT)), case.x, case.kernel, case.dy)
    assert_same_bits(found, wanted)


def test_without_gradient_of_x(case):
    """Evaluation, and training of the kernel alone, need no straight_through."""
    x = ops.quantize(case.x, CURRENT.quantization("activation"), row_ndim=2)
    y, dkernel = step(lambda kernel: plain(x, kernel, CURRENT), case.kernel, case.dy)
    wanted = step(lambda kernel: plain(case.x, kernel, CURRENT), case.kernel, case.dy)
    assert_same_bits((y, dkernel), wanted)
    y = plain(x.without_transposed(), case.kernel, CURRENT)
    assert_same_bits(y, wanted[0])


def test_its_gradient_as_an_argument(case):
    """The cotangent of a QuantizedArray: dx in straight_through, and zeros."""
    x = ops.quantize(case.x, CURRENT.quantization("activation"), row_ndim=2, straight_through=True)
    _, dx = step(lambda x: plain(x, case.kernel, CURRENT), x, case.dy)
    assert_near(dx.straight_through, oracle(case).dx, tolerance=GRADIENT)
    codes = dataclasses.replace(dx, straight_through=None)
    assert not any(np.any(np.asarray(leaf).astype(np.float32)) for leaf in jax.tree.leaves(codes))


# --------------------------------------------------------------------------------------------------------------- errors

X, KERNEL = jnp.zeros((32, 64), jnp.bfloat16), jnp.zeros((64, 48), jnp.bfloat16)
QUANTIZED = ops.quantize(X, CURRENT.quantization("activation"), straight_through=True)


def loss(x, kernel, recipe=CURRENT):
    return ops.dense(x, kernel, recipe=recipe).astype(jnp.float32).sum()


@pytest.mark.parametrize(
    ("x", "kernel", "options", "message"),
    [
        (QUANTIZED, KERNEL, {}, "recipe is None, but x is a QuantizedArray; name its recipe or pass x.dequantize()"),
        (QUANTIZED, KERNEL, {"recipe": BLOCK}, "x has 'tensor' and 'tensor' scaling, but recipe is BlockScaling"),
        (
            ops.quantize(X, BLOCK.quantization("activation")),
            KERNEL.T,
            {"recipe": BLOCK, "kernel_contracting": "last"},
            'quantize it with dataclasses.replace(recipe.quantization("activation"), '
            "transposed_scaling='block_128x128')",
        ),
        (
            ops.quantize(X, CURRENT.quantization("gradient")),
            KERNEL,
            {"recipe": CURRENT},
            "x was quantized to float8_e5m2, and activations of CurrentScaling",
        ),
        (QUANTIZED.without_data(), KERNEL, {"recipe": CURRENT}, "x has no data copy, which the forward pass reads"),
        (
            ops.quantize(X.reshape(2, 16, 64), CURRENT.quantization("activation"), row_ndim=1),
            KERNEL,
            {"recipe": CURRENT},
            "x was quantized as 1 rows and 2 cols, shape (2, 16, 64); quantize it with row_ndim=2",
        ),
        (
            QUANTIZED,
            KERNEL,
            {"recipe": DELAYED, "scaling_state": DELAYED.init()},
            "whose state remembers the amax of x: pass x unquantized",
        ),
        (
            dataclasses.replace(QUANTIZED, straight_through=X[:2]),
            KERNEL,
            {"recipe": CURRENT},
            "x has straight_through of shape (2, 64) and dtype bfloat16; it must be float32",
        ),
        (
            dataclasses.replace(QUANTIZED, straight_through=X.astype(jnp.int32)),
            KERNEL,
            {"recipe": CURRENT},
            "x has straight_through of shape (32, 64) and dtype int32; it must be float32",
        ),
    ],
)
def test_message_names_argument_and_rule(x, kernel, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ops.dense(x, kernel, **options)


def test_a_gradient_without_a_way_is_refused():
    x = dataclasses.replace(QUANTIZED, straight_through=None)
    with pytest.raises(
        NotImplementedError, match=r"x is a QuantizedArray without straight_through.*stop_gradient\(x\)"
    ):
        jax.grad(loss)(x, KERNEL)

    def producer(x):
        return loss(ops.quantize(x, CURRENT.quantization("activation")), KERNEL)

    with pytest.raises(NotImplementedError, match=r"quantize it with straight_through=True"):
        jax.jit(jax.grad(producer))(X)
    frozen = jax.grad(lambda x: loss(lax.stop_gradient(x), KERNEL), allow_int=True)(x)
    assert not np.any(np.asarray(frozen.data).astype(np.float32))


def test_the_kernel_needs_the_transposed_copy():
    x = QUANTIZED.without_transposed()
    assert x.straight_through is not None
    assert jax.grad(loss)(x, KERNEL).straight_through.shape == X.shape
    with pytest.raises(ValueError, match=r"x has no transposed copy, which the gradient with respect to kernel reads"):
        jax.grad(loss, argnums=1)(x, KERNEL)
