"""Recipes per product: each product is that of a layer with its own recipe, whatever layer it is."""

import functools

import jax
import numpy as np
from linear_layers import KINDS, without
from ops.dense_oracle import random_case

from te_jax import ops
from te_jax.recipe import BlockScaling, CurrentScaling, Fake, RowwiseScaling, products
from te_jax.testing import assert_close, relative_error

CURRENT, BLOCK, ROWWISE = CurrentScaling(), BlockScaling(), RowwiseScaling()
PRODUCTS = ("forward", "dgrad", "wgrad")
# Tensor cores add products of FP8 in fewer bits than those of float32.
SUMS = 5e-4 if jax.default_backend() == "gpu" else 1e-5


def results_by(layer, recipes, x, kernels, dys):
    """{recipe: {product: its results}}, in one program."""

    def step(recipe):
        ys, vjp = jax.vjp(layer.by(recipe), x, kernels)
        return dict(zip(PRODUCTS, (ys, *vjp(dys)), strict=True))

    return {name: step(recipe) for name, recipe in recipes.items()}


# MLPs have one recipe, or are two layers with one for each.
@without("experts_mlp", "gated_mlp", "parallel.gated_mlp", "dense of transposed kernels")
def test_each_product_is_that_of_its_recipe(layer, rng):
    recipes = {
        "none": None, "block": BLOCK, "rowwise": ROWWISE,
        "fake": products(forward=Fake(BLOCK), dgrad=Fake(BLOCK), wgrad=Fake(BLOCK)),
        "mixed": products(forward=BLOCK, dgrad=ROWWISE, wgrad=BLOCK),
        "one": products(dgrad=Fake(BLOCK)),
    }  # fmt: skip
    expected = {
        "fake": ("block", "block", "block"),
        "mixed": ("block", "rowwise", "block"),
        "one": ("none", "block", "none"),
    }
    x, kernels, _, dys = layer.draw(rng)
    found = jax.jit(functools.partial(results_by, layer, recipes))(x, kernels, dys)
    for one, names in expected.items():
        for product, name in zip(PRODUCTS, names, strict=True):
            for result, wanted in zip(*(jax.tree.leaves(found[of][product]) for of in (one, name)), strict=True):
                assert_close(result, wanted, tolerance=SUMS)
                assert np.any(wanted)
    for product in PRODUCTS:  # all recipes differ
        first, *others = (jax.tree.leaves(found[name][product])[0] for name in ("block", "rowwise", "none"))
        assert all(relative_error(other, first) > 1e-3 for other in others)


def test_the_same_recipe_three_times_runs_no_more_kernels(rng, native_kernels):
    """Operands are quantized once."""
    case = random_case(rng, (128,), (128,), (128,), "bfloat16")

    def step(recipe, x, kernel, dy):
        y, vjp = jax.vjp(functools.partial(ops.dense, recipe=recipe), x, kernel)
        return y, vjp(dy)

    for recipe in (CURRENT, BLOCK):
        found, expected = (
            jax.jit(functools.partial(step, of)).lower(case.x, case.kernel, case.dy).as_text()
            for of in (products(forward=recipe, dgrad=recipe, wgrad=recipe), recipe)
        )
        assert found.count("custom_call @te_") == expected.count("custom_call @te_")


def test_accumulators(rng):
    layer = KINDS["dense"].by(products(forward=CURRENT, wgrad=BLOCK))
    x, kernels, before, dys = layer.draw(rng)

    @jax.jit
    def step(before):
        gradients = jax.vjp(lambda kernels: layer(x, kernels), kernels)[1](dys)
        return jax.vjp(lambda before: layer(x, kernels, before), before)[1](dys), gradients

    (after,), (gradients,) = step(before)
    for one, old, gradient in zip(after, before, gradients, strict=True):
        assert_close(np.asarray(one) - old, gradient, tolerance=1e-5)
