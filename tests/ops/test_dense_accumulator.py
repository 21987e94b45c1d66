"""Weight gradients that are accumulated over microbatches: dtypes, and memory. tests/linear has what all layers do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_oracle import GRADIENT, RECIPES, oracle, random_case, wide
from jax import lax
from parameters import in_turns

from te_jax import ops
from te_jax.ops.linear.kernels import quantize_kernel
from te_jax.testing import assert_close

CURRENT, BLOCK = RECIPES["current"], RECIPES["block"]
FEW = {"current": CURRENT, "block": BLOCK, "none": None}


def loss(x, kernel, accumulator, dy, recipe=CURRENT, **options):
    y = ops.dense(x, kernel, recipe=recipe, wgrad_accumulator=accumulator, **options)
    return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32))


def after_of(**options):
    return jax.jit(jax.grad(functools.partial(loss, **options), argnums=2))


def draw(rng, like, dtype=jnp.float32):
    # A copy: XLA does not write over what NumPy holds.
    return jax.device_put(np.asarray(10 * rng.standard_normal(like.shape), jnp.dtype(dtype)), may_alias=False)


@pytest.mark.parametrize(("recipe", "dtype"), in_turns(FEW, ["float32", "bfloat16", "float16"]))
def test_dtypes(dtype, recipe, rng):
    """The product is added up in float32 and rounded once, to the accumulator's dtype; in groups of dimensions, too."""
    case = random_case(rng, (32,), (2, 16), (3, 16), "float32" if dtype == "float32" else "bfloat16", with_bias=False)
    before = draw(rng, case.kernel, dtype)
    after = after_of(recipe=recipe, contracting_ndim=2)(case.x, case.kernel, before, case.dy)
    assert after.shape == case.kernel.shape
    assert_close(after, wide(before) + oracle(case).dkernel, dtype=dtype, tolerance=GRADIENT)
    assert not np.array_equal(after, before)


@pytest.mark.parametrize("kernel_contracting", ["first", "last"])
def test_accumulator_of_a_kernel_whose_dimensions_quantization_merged(kernel_contracting, rng):
    """As `apply_updates` and quantize_kernels make it: accumulators keep the parameter's shape."""
    case = random_case(rng, (32,), (128,), (4, 48), with_bias=False, kernel_contracting=kernel_contracting)
    before = draw(rng, case.kernel)
    kernel = quantize_kernel(case.kernel, BLOCK, row_ndim=1 if kernel_contracting == "first" else 2)
    assert kernel.ndim == 2
    dy, options = case.dy.reshape(32, 192), {"recipe": BLOCK, "kernel_contracting": kernel_contracting}
    after = after_of(**options)(case.x, kernel, before, dy)
    assert after.shape == before.shape
    assert_close(np.asarray(after) - before, oracle(case).dkernel, dtype="float32", tolerance=GRADIENT)
    with pytest.raises(ValueError, match=r"wgrad_accumulator has shape \(96, 256\)"):
        jax.eval_shape(functools.partial(loss, **options), case.x, kernel, before.reshape(96, 256), dy)


# -------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(("recipe", "quantized"), [(BLOCK, True), (BLOCK, False), (None, False)])
def test_stacked_layers_keep_no_copy_of_kernels_and_accumulators(quantized, recipe):
    """The loop's own inputs are there in the backward pass: a copy of each would be another 8 bytes a weight. Blocks
    read the 4 × 64 features as one dimension."""
    before, x = np.zeros((3, 128, 4, 64), np.float32), np.zeros((32, 128), np.float32)
    kernels = quantize_kernel(jnp.asarray(before), recipe, row_ndim=1, stacked_ndim=1) if quantized else before

    def run(x, accumulators, kernels):
        def layer(x, inputs):
            y = ops.dense(x, inputs[0], recipe=recipe, wgrad_accumulator=inputs[1])
            return y.reshape(32, 2, 128).sum(1), None

        return jnp.sum(lax.scan(layer, x, (kernels, accumulators))[0])

    program = jax.make_jaxpr(jax.grad(run, argnums=(0, 1)))(x, before, kernels)
    loops = [eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "scan"]
    assert len(loops) == 2
    results = [result.aval for loop in loops for result in loop.outvars]
    made = [result.shape for result in results if result.size == before.size and result.dtype == np.float32]
    assert made == [before.shape]  # the accumulators' next values
