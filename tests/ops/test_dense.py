"""Linear layers: y and all gradients against float64, for every recipe, dtype and shape."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import results_and_gradients
from dense_oracle import RECIPES, check, computed, errors, gradients_of, oracle, random_case, wide

from te_jax import ops
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScalingState, MXFP8Scaling, RowwiseScaling
from te_jax.testing import assert_close, relative_error

recipes = pytest.mark.parametrize("recipe", [*RECIPES.values(), None], ids=[*RECIPES, "none"])
few_recipes = pytest.mark.parametrize(
    "recipe", [RECIPES["current"], RECIPES["block"], None], ids=["current", "block", "none"]
)


@pytest.mark.parametrize(("recipe", "kernel_contracting"), [("block", "first"), ("delayed", "last")])
def test_the_reference(recipe, kernel_contracting, rng):
    """tests/conformance has it with current scaling, and all recipes with native kernels."""
    case = random_case(rng, (4, 64), (256,), (384,), kernel_contracting=kernel_contracting)
    check(case, recipe=RECIPES[recipe], implementation="reference")


# The others run the native kernels where there are any: they are about the layer, not about its products.


@few_recipes
@pytest.mark.parametrize(
    ("dtype", "kernel_dtype"), [("float16", "float16"), ("bfloat16", "float32"), ("float32", "bfloat16")]
)
def test_dtypes(dtype, kernel_dtype, recipe, rng):
    """y has the dtype of x, and every gradient that of what it belongs to."""
    case = random_case(rng, (48,), (128,), (64,), dtype, kernel_dtype=kernel_dtype)
    check(case, recipe=recipe)


@few_recipes
@pytest.mark.parametrize(
    ("batch", "inner", "outer", "kernel_contracting"),
    [
        ((2, 3, 16), (4, 32), (2, 64), "last"),
        ((), (32,), (16,), "first"),
        ((130,), (2, 128), (2, 3, 128), "first"),
        ((7, 9), (5, 27), (3, 11), "last"),
    ],
    ids=str,
)
def test_shapes(batch, inner, outer, kernel_contracting, recipe, rng):
    """Groups of several dimensions, tokens and features that are no multiple of 16, blocks that divide nothing."""
    case = random_case(rng, batch, inner, outer, kernel_contracting=kernel_contracting)
    # Few values: errors of single ones show.
    tokens = math.prod(batch)
    factor = 1.0 if tokens >= 32 else 1.6
    check(case, recipe=recipe, factor=factor)


@pytest.mark.parametrize("recipe", [*RECIPES.values(), MXFP8Scaling()], ids=[*RECIPES, "mxfp8"])
def test_features_of_any_size(recipe, rng):
    """Those of a Mamba and of a head of ten classes, by all recipes, with all that an epilogue adds."""
    case = random_case(rng, (96,), (552,), (10,))
    check(case, recipe=recipe, activation="gelu", factor=1.2)


@few_recipes
def test_empty_batch(recipe, rng):
    case = random_case(rng, (2, 0, 3), (32,), (48,))
    found = computed(case, recipe=recipe)
    assert found.y.shape == (2, 0, 3, 48)
    assert found.dx.shape == (2, 0, 3, 32)
    assert not np.any(wide(found.dkernel))
    assert not np.any(wide(found.dbias))


@few_recipes
@pytest.mark.parametrize(
    ("activation", "kernel_contracting"),
    [*[("gelu", "last"), ("relu", "first"), ("squared_relu", "first")], (ops.Activation("silu", alpha=1.702), "last")],
    ids=str,
)
def test_activations(activation, kernel_contracting, recipe, rng):
    """The derivative is taken at values that FP8 has rounded, which adds to the errors of the gradients."""
    case = random_case(rng, (2, 64), (256,), (256,), kernel_contracting=kernel_contracting)
    found = check(case, recipe=recipe, activation=activation, factor=1.15)
    assert relative_error(found.y, oracle(case).y) > 0.2  # it was applied


@pytest.mark.parametrize(("dtype", "activation"), [("float32", "gelu"), ("bfloat16", "silu")])
def test_activation_without_a_recipe_is_computed_in_float32(activation, dtype, rng):
    """XLA may do so anyway on a CPU, whatever the program says."""
    case = random_case(rng, (32,), (64,), (64,), dtype)
    check(case, recipe=None, activation=activation)
    program = str(jax.make_jaxpr(functools.partial(ops.dense, activation=activation))(*case.operands))
    assert set(re.findall(r":(\w+)\[[\d,]*\] = (?:tanh|logistic)", program)) == {"f32"}


@few_recipes
def test_the_gradient_of_a_bias_is_summed_in_float32(recipe, rng):
    """Of bfloat16 tokens too, and where nothing else is differentiated."""
    case = random_case(rng, (2048,), (16,), (32,))
    bias = case.bias.astype(jnp.float32)
    y, (dbias,) = results_and_gradients(
        lambda bias: ops.dense(case.x, case.kernel, bias, recipe=recipe), (bias,), case.dy
    )  # fmt: skip
    assert y.dtype == jnp.bfloat16
    assert_close(dbias, wide(case.dy).sum(axis=0), dtype="float32", tolerance=1e-5)


@pytest.mark.parametrize(
    ("power_of_two_scales", "gradient_dtype"),
    [(False, jnp.float8_e4m3fn), (True, jnp.float8_e4m3fn), (True, jnp.float8_e5m2)],
    ids=["e4m3", "e4m3, powers of two", "e5m2, powers of two"],
)
@pytest.mark.parametrize("kind", [CurrentScaling, RowwiseScaling, BlockScaling])
def test_formats_of_recipes(kind, power_of_two_scales, gradient_dtype, rng):
    recipe = kind(gradient_dtype=gradient_dtype, power_of_two_scales=power_of_two_scales)
    case = random_case(rng, (128,), (128,), (128,))
    found = errors(check(case, recipe=recipe), oracle(case))
    assert (found["dx"] > 0.047) == (gradient_dtype == jnp.float8_e5m2)


@pytest.mark.parametrize("product", ["forward", "dgrad", "wgrad"])
def test_fast_accumulation_is_that_of_the_product_that_is_named(product, native_kernels, rng):
    """One product of two, the forward pass and a gradient. Only a GPU shows it in numbers."""
    case = random_case(rng)

    def loss(x, kernel):
        y = ops.dense(x, kernel, recipe=CurrentScaling(fast_accumulation=(product,)))
        return jnp.sin(y.astype(jnp.float32)).sum()

    gradient = jax.jit(jax.grad(loss, argnums=int(product != "dgrad"))).lower(case.x, case.kernel)
    text = gradient.compile().as_text()
    assert (text.count("fast_accumulation = true"), text.count("fast_accumulation = ")) == (1, 2)


def _state_for(recipe, x):
    if not hasattr(recipe, "init"):
        return None
    amaxes = np.float32(np.abs(wide(x)).max()), np.float32(1.0), np.float32(5.0)
    return DelayedScalingState(*(jnp.full((recipe.history_len,), a) for a in amaxes), jnp.ones(()))


@recipes
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_visible(poison, recipe, rng):
    """In its token, and in all that shares a scale with it: under current scaling that is everything."""
    case = random_case(rng, (32,), (32,), (32,), with_bias=False)
    x = np.array(case.x)
    x[3, 5] = poison
    state = None if not hasattr(recipe, "init") else _state_for(recipe, case.x)
    y, (_, dkernel, _, _) = gradients_of(x, case.kernel, None, case.dy, state, recipe=recipe)
    assert not np.isfinite(wide(y)[3]).any()
    assert not np.isfinite(wide(dkernel)[5]).any()
    for others in (np.delete(wide(y), 3, axis=0), np.delete(wide(dkernel), 5, axis=0)):
        assert (np.isnan if isinstance(recipe, CurrentScaling) else np.isfinite)(others).all()
