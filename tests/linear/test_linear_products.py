"""Recipes per product: each product is that of a layer with its own recipe, whatever layer it is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from linear_layers import KINDS, without
from ops.dense_oracle import GRADIENT, random_case

import te_jax
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


@without("experts_mlp", "gated_mlp", "parallel.gated_mlp")  # they have one recipe, or are two layers with one for each
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


class MLP(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(32, 64, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def test_layers_that_take_them(rng):
    """Gated MLPs, einsums and converted modules: in FP8 is the product that is named, alone."""
    recipe = products(wgrad=BLOCK)
    x, kernel = (rng.standard_normal(shape).astype(np.float32) / 8 for shape in ((128, 64), (64, 32)))
    kernels, model = (kernel, kernel, kernel.T), MLP()
    calls = {
        "gated_mlp": (lambda x, k, recipe: ops.gated_mlp(x, k, recipe=recipe), kernels),
        "einsum": (lambda x, k, recipe: ops.einsum("td,df->tf", x, k[0], recipe=recipe), kernels[:1]),
    }

    def of_model(model):
        return jnp.sum(jnp.sin(model(x)))

    @functools.partial(jax.jit, static_argnums=0)
    def value_and_gradient(call, x, kernels):
        return [
            jax.value_and_grad(lambda kernels, of=of: jnp.sum(jnp.sin(call(x, kernels, of))))(kernels)
            for of in (recipe, None)
        ]

    for call, operands in calls.values():
        (value, gradient), (plain, expected) = value_and_gradient(call, x, operands)
        np.testing.assert_allclose(value, plain, rtol=1e-4, atol=1e-3)
        assert 0.015 < relative_error(gradient[0], expected[0]) < GRADIENT
    plain, expected = nnx.jit(nnx.value_and_grad(of_model))(model)
    te_jax.nnx.convert(model, None, rules=[("up", recipe)])
    value, gradient = nnx.jit(nnx.value_and_grad(of_model))(model)
    np.testing.assert_allclose(value, plain, rtol=1e-4)
    assert 0.015 < relative_error(gradient["up"]["kernel"][...], expected["up"]["kernel"][...]) < GRADIENT
    assert relative_error(gradient["down"]["kernel"][...], expected["down"]["kernel"][...]) < 1e-5
