"""Recipes per product: the error of a product is that of its own recipe, and of no other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from ops.dense_oracle import FORWARD, GRADIENT, PLAIN
from ops.dense_oracle import random_case as random_layer
from parameters import in_turns

import te_jax
from te_jax import ops, parallel
from te_jax.recipe import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Fake,
    MXFP8Scaling,
    RowwiseScaling,
    products,
)
from te_jax.testing import relative_error

CURRENT, BLOCK = CurrentScaling(), BlockScaling()
ONES = {
    "current": CURRENT, "rowwise": RowwiseScaling(), "block": BLOCK, "mxfp8": MXFP8Scaling(), "fake": Fake(BLOCK),
}  # fmt: skip
PRODUCTS = ("forward", "dgrad", "wgrad")


def errors(case, recipe, **options):
    """Relative errors of y, dx and dkernel, from the same layer in float32."""

    def step(recipe):
        y, vjp = jax.vjp(
            lambda *operands: ops.dense(
                *operands, recipe=recipe, contracting_ndim=len(case.inner),
                kernel_contracting=case.kernel_contracting, **options,
            ),
            *case.operands,
        )  # fmt: skip
        return y, *vjp(case.dy)

    found, expected = jax.jit(lambda: (step(recipe), step(None)))()
    assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, expected)
    return dict(zip((*PRODUCTS, "dbias"), map(relative_error, found, expected), strict=True))


def assert_in_fp8(product, errors, plain):
    """The error of one product is that of FP8, and those of others at most `plain`."""
    for other, error in errors.items():
        if other == product:
            assert 0.015 < error < (FORWARD if product == "forward" else GRADIENT)
        else:
            assert error < plain


@pytest.mark.parametrize(("recipe", "product", "contracting"), in_turns(ONES, PRODUCTS, ["first", "last"]))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_product_in_fp8(recipe, product, contracting, dtype, implementation, rng):
    if isinstance(recipe, MXFP8Scaling) and implementation == "native":
        implementation = None
    case = random_layer(rng, (3, 40), (2, 32), (3, 16), dtype, kernel_contracting=contracting)
    found = errors(case, products(**{product: recipe}), implementation=implementation)
    assert_in_fp8(product, found, PLAIN[dtype])


@pytest.mark.parametrize(
    ("recipe", "product", "contracting"),
    in_turns({name: recipe for name, recipe in ONES.items() if name != "mxfp8"}, PRODUCTS, ["first", "last"]),
)
@pytest.mark.parametrize("gathers", [True, False], ids=["gather", "scatter"])
def test_one_collective_product_in_fp8(recipe, product, contracting, gathers, rng, require_devices):
    require_devices(2)
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    case = random_layer(rng, (256,), (128,), (256,), "float32", with_bias=False, kernel_contracting=contracting)
    rows, cols = P("tp"), P(None, "tp")
    in_specs = rows if gathers else cols, cols if gathers == (contracting == "first") else rows
    function = parallel.all_gather_matmul if gathers else parallel.matmul_reduce_scatter
    dimension = {"gather_dimension" if gathers else "scatter_dimension": 0}

    def step(recipe):
        local = functools.partial(
            function, axis_name="tp", recipe=recipe, kernel_contracting=contracting, **dimension
        )  # fmt: skip
        mapped = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=cols if gathers else rows)
        y, vjp = jax.vjp(mapped, case.x, case.kernel)
        return y, *vjp(case.dy)

    found, expected = jax.jit(lambda: (step(products(**{product: recipe})), step(None)))()
    assert_in_fp8(product, dict(zip(PRODUCTS, map(relative_error, found, expected), strict=True)), 1e-6)


@pytest.mark.parametrize(("recipe", "product", "contracting"), in_turns(ONES, PRODUCTS, ["first", "last"]))
def test_one_product_of_experts_in_fp8(recipe, product, contracting, rng):
    sizes = jnp.array([128, 0, 96], jnp.int32)
    case = random_layer(rng, (256,), (128,), (256,), "float32", with_bias=False, kernel_contracting=contracting)
    kernels = jnp.stack([case.kernel, -case.kernel, 2 * case.kernel])

    def step(recipe):
        y, vjp = jax.vjp(
            functools.partial(ops.grouped_dense, recipe=recipe, kernel_contracting=contracting, group_sizes=sizes),
            case.x, kernels,
        )  # fmt: skip
        return y, *vjp(case.dy)

    found, expected = jax.jit(lambda: (step(products(**{product: recipe})), step(None)))()
    assert_in_fp8(product, dict(zip(PRODUCTS, map(relative_error, found, expected), strict=True)), 1e-6)


def test_a_fake_product_reads_its_own_copies(rng):
    """The blocks of its own direction, also where the other product that reads an operand has the same recipe."""
    case = random_layer(rng, (40,), (32,), (48,), "float32", with_bias=False)

    def step(names):
        recipe = products(**dict.fromkeys(names, Fake(BLOCK)))
        y, vjp = jax.vjp(lambda x, kernel: ops.dense(x, kernel, recipe=recipe), case.x, case.kernel)
        return y, *vjp(case.dy)

    together, *alone = jax.jit(lambda: [step(PRODUCTS), *(step((name,)) for name in PRODUCTS)])()
    for place, results in enumerate(alone):
        assert relative_error(together[place], results[place]) < 1e-6, PRODUCTS[place]


def test_mixture_of_experts(rng):
    kernels = tuple(
        jnp.asarray(rng.standard_normal(shape) / 11, jnp.float32) for shape in ((4, 128, 128),) * 2 + ((4, 128, 128),)
    )
    x, router = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((64, 128), (128, 4)))

    def loss(kernels, recipe):
        return jnp.sum(te_jax.layers.moe(x, router, kernels, te_jax.layers.Router(top_k=2), recipe=recipe).y ** 2)

    both = products(forward=BLOCK, dgrad=BLOCK)
    (value, found), (plain, expected), (in_fp8, other) = (
        jax.jit(jax.value_and_grad(functools.partial(loss, recipe=of)))(kernels)
        for of in (products(wgrad=BLOCK), None, both)
    )
    np.testing.assert_allclose(value, plain, rtol=1e-5)
    assert 0.015 < relative_error(found[0], expected[0]) < GRADIENT
    assert not np.array_equal(in_fp8, plain)
    assert 0.015 < relative_error(other[0], expected[0]) < 2 * GRADIENT


def test_three_recipes(implementation, rng):
    case = random_layer(rng, (65,), (64,), (48,), "float32", with_bias=False)
    several = products(forward=BLOCK, dgrad=Fake(MXFP8Scaling()), wgrad=RowwiseScaling())

    def y_dx_dkernel(recipe):
        y, vjp = jax.vjp(
            functools.partial(ops.dense, recipe=recipe, implementation=implementation), case.x, case.kernel
        )
        return y, *vjp(case.dy)

    found = y_dx_dkernel(several)
    np.testing.assert_array_equal(found[0], y_dx_dkernel(BLOCK)[0])
    np.testing.assert_array_equal(found[2], y_dx_dkernel(RowwiseScaling())[2])
    expected = jax.vjp(
        functools.partial(ops.dense, recipe=MXFP8Scaling(), implementation="reference"), case.x, case.kernel
    )[1](case.dy)[0]
    assert relative_error(found[1], expected) < 1e-5


@pytest.mark.parametrize("recipe", [CURRENT, BLOCK], ids=["current", "block"])
def test_the_same_recipe_three_times_is_that_recipe(recipe, rng, native_kernels):
    """Operands are quantized once: no kernel runs more often."""
    case = random_layer(rng, (128,), (128,), (128,), "bfloat16")

    def step(recipe, x, kernel, dy):
        y, vjp = jax.vjp(functools.partial(ops.dense, recipe=recipe), x, kernel)
        return y, vjp(dy)

    operands = case.x, case.kernel, case.dy
    found, expected = (
        jax.jit(functools.partial(step, of)).lower(*operands)
        for of in (products(forward=recipe, dgrad=recipe, wgrad=recipe), recipe)
    )
    jax.tree.map(np.testing.assert_array_equal, *(program.compile()(*operands) for program in (found, expected)))
    assert found.as_text().count("custom_call @te_") == expected.as_text().count("custom_call @te_")


@pytest.mark.parametrize("several", [False, True])
def test_accumulators(several, rng):
    case = random_layer(rng, (40,), (32,), (2, 16), "float32", with_bias=False)
    recipe = products(forward=CURRENT, wgrad=BLOCK)

    def step(accumulator):
        given = ((case.kernel,) * 2, (accumulator,) * 2) if several else (case.kernel, accumulator)
        _, vjp = jax.vjp(
            lambda x, accumulator: ops.dense(x, given[0], recipe=recipe, wgrad_accumulator=accumulator),
            case.x, given[1],
        )  # fmt: skip
        return vjp((case.dy,) * 2 if several else case.dy)

    dx, following = jax.jit(step)(jnp.ones(case.kernel.shape))
    times = 2 if several else 1
    assert relative_error(dx, times * np.einsum("bij,kij->bk", case.dy, case.kernel)) < 1e-5
    for accumulated in jax.tree.leaves(following):
        assert 0.015 < relative_error(accumulated - 1, np.einsum("bk,bij->kij", case.x, case.dy)) < GRADIENT


def test_remat_and_scan(rng):
    kernels = jnp.asarray(rng.standard_normal((3, 32, 32)) / 6, jnp.float32)
    x = jnp.asarray(rng.standard_normal((16, 32)), jnp.float32)

    def loss(kernels, recipe, wrap):
        layer = wrap(lambda x, kernel: (ops.dense(x, kernel, recipe=recipe, activation="gelu"), None))
        return jnp.sum(jnp.square(jax.lax.scan(layer, x, kernels)[0]))

    recipe = products(dgrad=CURRENT, wgrad=CURRENT)
    for wrap in (lambda f: f, jax.checkpoint):
        (value, found), (plain, expected) = jax.jit(
            lambda: tuple(jax.value_and_grad(loss)(kernels, r, wrap) for r in (recipe, None))  # noqa: B023
        )()
        np.testing.assert_allclose(value, plain, rtol=1e-6)
        assert 0.015 < relative_error(found, expected) < 2 * GRADIENT


def test_gated_mlp_einsum_and_modules(rng):
    recipe = products(wgrad=BLOCK)
    x = jnp.asarray(rng.standard_normal((32, 64)), jnp.float32)
    kernel = jnp.asarray(rng.standard_normal((64, 32)) / 8, jnp.float32)
    mlp = functools.partial(ops.gated_mlp, x)
    kernels = kernel, kernel, kernel.T
    np.testing.assert_allclose(mlp(kernels, recipe=recipe), mlp(kernels), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        ops.einsum("td,df->tf", x, kernel, recipe=recipe), ops.einsum("td,df->tf", x, kernel), rtol=1e-4, atol=1e-5
    )
    model = MLP()
    plain, gradient = model(x), nnx.grad(lambda model: model(x).var())(model)
    te_jax.nnx.convert(model, None, rules=[("up", recipe)])
    np.testing.assert_allclose(model(x), plain, rtol=1e-4, atol=1e-5)
    found = nnx.grad(lambda model: model(x).var())(model)
    assert 0.015 < relative_error(found["up"]["kernel"][...], gradient["up"]["kernel"][...]) < GRADIENT
    assert relative_error(found["down"]["kernel"][...], gradient["down"]["kernel"][...]) < 1e-5


class MLP(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(32, 64, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def test_refusals():
    x, kernel, recipe = jnp.ones((32, 64)), jnp.ones((64, 32)), products(forward=CURRENT)
    one = "one recipe for all three products is needed here"
    quantized = jax.vmap(lambda kernel: ops.quantize(kernel, CURRENT.quantization("kernel")))(kernel[None])
    with pytest.raises(ValueError, match="kernel is a QuantizedArray, and recipe is ProductRecipes"):
        ops.grouped_dense(x, quantized, jnp.array([32]), recipe=recipe)
    mesh = jax.make_mesh((1,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])

    def gathered(x, kernel, recipe=recipe):
        local = functools.partial(parallel.all_gather_matmul, axis_name="tp", recipe=recipe)
        return jax.shard_map(local, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P("tp"))(x, kernel)

    with pytest.raises(ValueError, match="kernel is a QuantizedArray, and recipe is ProductRecipes"):
        gathered(x, ops.quantize(kernel, CURRENT.quantization("kernel")))
    with pytest.raises(ValueError, match="collective products have no blocks of 32"):
        gathered(x, kernel, products(wgrad=MXFP8Scaling()))
    with pytest.raises(ValueError, match=one):
        ops.linear_cross_entropy(x, kernel, jnp.zeros(32, jnp.int32), recipe=recipe)
    with pytest.raises(ValueError, match=r"x is a QuantizedArray, and recipe is ProductRecipes.*: pass x unquantized"):
        ops.dense(ops.quantize(x, CURRENT.quantization("activation")), kernel, recipe=recipe)
    with pytest.raises(ValueError, match="only DelayedScaling has a state"):
        ops.dense(x, kernel, recipe=recipe, scaling_state=DelayedScaling().init())
    with pytest.raises(ValueError, match="forward, dgrad and wgrad are None; for a layer without FP8 pass recipe=None"):
        products()
    with pytest.raises(ValueError, match=r"dgrad is DelayedScaling.*, whose state belongs to all products of a layer"):
        products(dgrad=DelayedScaling())
    with pytest.raises(ValueError, match=r"wgrad is ProductRecipes.*; it must be one recipe"):
        products(wgrad=recipe)
    with pytest.raises(ValueError, match="recipe is 3; it must be one recipe"):
        Fake(3)
