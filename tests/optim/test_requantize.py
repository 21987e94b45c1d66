"""Kernels for the next forward pass from the optimizer's step: the bits that quantizing the new kernels has."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from optim_cases import assert_same, normal_like
from parameters import in_turns

from te_jax import ops, optim
from te_jax.flax import DenseGeneral, quantize_kernels
from te_jax.optim import Requantize
from te_jax.quantized import QuantizedArray
from te_jax.recipe import BlockScaling, CurrentScaling, RowwiseScaling

RECIPES = {
    "current": CurrentScaling(),
    "current, powers of two": CurrentScaling(power_of_two_scales=True),
    "rowwise": RowwiseScaling(),
    "block": BlockScaling(),
}
blocks_and_tensors = pytest.mark.parametrize("recipe", [RECIPES["current"], RECIPES["block"]], ids=["current", "block"])


def step(rng, shape, dtype="float32"):
    """A kernel and its update."""
    kernel, updates = (normal_like(rng, jnp.zeros(shape, d)) for d in (dtype, jnp.float32))
    return kernel, updates * jnp.float32(0.1)


def boxes(params):
    return {name: linen.Partitioned(leaf, (None,)) for name, leaf in params.items()}


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def quantized(kernel, recipe, row_ndim, implementation):
    return ops.quantize(kernel, recipe.quantization("kernel"), row_ndim=row_ndim, implementation=implementation)


@functools.partial(jax.jit, static_argnums=2)
def apply(params, updates, how):
    return optim.apply_updates(params, updates, requantize=how)


@pytest.mark.parametrize(("recipe", "dtype"), in_turns(RECIPES, ["float32", "bfloat16"]))
def test_operands_are_the_new_kernel_quantized(dtype, recipe, implementation, rng):
    kernel, updates = step(rng, (144, 256), dtype)
    new, operand = apply(kernel, updates, Requantize(recipe, implementation=implementation))
    assert_same(new, np.asarray(kernel.astype(jnp.float32) + updates).astype(dtype))
    assert isinstance(operand, QuantizedArray)
    assert_same(operand, quantized(new, recipe, 1, implementation))
    assert operand.transposed is not None


def test_the_implementation_is_the_one_that_is_named(native_kernels, rng):
    """Both give the same bits."""
    for name in ("native", "reference"):
        how = Requantize(RECIPES["current"], implementation=name)
        program = str(jax.make_jaxpr(lambda *operands, how=how: apply(*operands, how))(*step(rng, (32, 32))))
        assert ("ffi_call" in program) == (name == "native")


@blocks_and_tensors
def test_stacked_kernels_have_scales_of_their_own(recipe, implementation, rng):
    """Two layers of three experts each, of magnitudes far apart."""
    kernel, updates = step(rng, (2, 3, 48, 128))
    kernel = kernel * jax.device_put(np.asarray(10.0 ** rng.uniform(-3, 3, (2, 3, 1, 1)), jnp.float32))
    new, operand = apply(kernel, updates, Requantize(recipe, stacked_ndim=2, implementation=implementation))
    for layer in range(2):
        for expert in range(3):
            expected = quantized(new[layer, expert], recipe, 1, implementation)
            assert_same(jax.tree.map(lambda x: x[layer, expert], operand), expected)  # noqa: B023


@pytest.mark.parametrize(("recipe", "axis", "features"), [(RECIPES["block"], (-2, -1), 64)])
def test_operands_of_layers_over_several_dimensions_are_those_of_quantize_kernels(recipe, axis, features, rng):
    """Also where blocks do not divide the last dimension of rows or cols."""
    layer, x = DenseGeneral(features, axis=axis, recipe=recipe), normal_like(rng, jnp.zeros((8, 4, 32)))
    variables = layer.init(jax.random.key(0), x)
    updates = normal_like(rng, variables)
    how = {"params": {"kernel": Requantize(recipe, row_ndim=2 if axis == (-2, -1) else 1), "bias": None}}
    new, kernels = optim.apply_updates(variables, updates, requantize=how)
    operands = optim.merge_kernels(new, kernels)
    assert_same(operands, quantize_kernels(layer, new, x))
    np.testing.assert_array_equal(layer.apply(operands, x), layer.apply(new, x))


def test_trees(rng):
    """None and a whole subtree may stand for one Requantize or none."""
    params = {
        "attention": {"query": jnp.zeros((32, 16)), "out": jnp.zeros((16, 32))},
        "norm": {"scale": jnp.zeros(32), "bias": jnp.zeros(32)},
        "head": jnp.zeros((32, 64)),
        "unused": None,
    }
    params, updates = normal_like(rng, params), normal_like(rng, params)
    how = {
        "attention": Requantize(CurrentScaling(), implementation="reference"),
        "norm": None,
        "head": Requantize(RowwiseScaling(), implementation="reference"),
        "unused": None,
    }
    new, kernels = jax.jit(functools.partial(optim.apply_updates, requantize=how))(params, updates)
    assert_same(new, jax.jit(optax.apply_updates)(params, updates))
    for name in ("query", "out"):
        assert_same(kernels["attention"][name], quantized(new["attention"][name], CurrentScaling(), 1, "reference"))
    assert_same(kernels["head"], quantized(new["head"], RowwiseScaling(), 1, "reference"))
    assert kernels["norm"] == {"scale": None, "bias": None}
    assert kernels["unused"] is None
    assert_same(optim.merge_kernels(new, kernels), {**new, "attention": kernels["attention"], "head": kernels["head"]})


@pytest.mark.parametrize("container", [dict, boxes, nnx.State], ids=["dict", "Linen boxes", "NNX state"])
def test_a_step_may_donate_parameters_and_kernels(container, rng):
    """No array is in both."""
    params = container(normal_like(rng, {"kernel": jnp.zeros((32, 16)), "bias": jnp.zeros(16)}))
    how = container({"kernel": Requantize(CurrentScaling(), implementation="reference"), "bias": None})

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train(params, kernels):
        operands = optim.merge_kernels(params, kernels)
        updates = jax.tree.map(lambda p: -0.1 * p, params)
        return *optim.apply_updates(params, updates, requantize=how), jax.tree.map(jnp.copy, operands)

    state = optim.apply_updates(params, jax.tree.map(jnp.zeros_like, params), requantize=how)
    for _ in range(2):
        expected = [np.asarray(leaf) for leaf in jax.tree.leaves(optim.merge_kernels(*state))]
        *state, operands = train(*state)
        assert_same(jax.tree.leaves(operands), expected)
        assert len(expected) == 1 + 4  # bias, and a kernel's two copies with their scales


def test_other_structures_than_that_of_the_parameters():
    params = {"kernel": np.ones((16, 32)), "bias": np.ones(32)}
    for requantize in ({"kernel": None}, {"kernel": None, "other": None}, [None, None]):
        with pytest.raises(ValueError, match="requantize must have the structure of params, or the beginning of it"):
            optim.apply_updates(params, params, requantize=requantize)
    for kernels in ({"kernel": None}, [None, None], None):
        with pytest.raises(ValueError, match="kernels must have the structure of params, as apply_updates"):
            optim.merge_kernels(params, kernels)
    with pytest.raises(ValueError, match="requantize has 3 at a leaf: it must be a Requantize, or None"):
        optim.apply_updates(params, params, requantize={"kernel": 3, "bias": None})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"recipe": None}, r"recipe is None; it must be a recipe, such as te_jax.recipe.CurrentScaling\(\)"),
        ({"recipe": "fp8"}, "recipe is 'fp8'; it must be a recipe"),
        ({"recipe": CurrentScaling}, "recipe is <class .*CurrentScaling'>; it must be a recipe"),
        ({"row_ndim": 0}, "row_ndim is 0; it must be a whole number of at least 1"),
        ({"row_ndim": True}, "row_ndim is True; it must be a whole number"),
        ({"row_ndim": None}, "row_ndim is None; it must be a whole number"),
        ({"stacked_ndim": -1}, "stacked_ndim is -1; it must be a whole number of at least 0"),
        ({"stacked_ndim": 1.0}, "stacked_ndim is 1.0; it must be a whole number"),
    ],
)
def test_arguments_of_no_use(arguments, message):
    with pytest.raises(ValueError, match=message):
        Requantize(**{"recipe": CurrentScaling(), **arguments})


@pytest.mark.parametrize(("row_ndim", "stacked_ndim"), [(2, 0), (1, 1)])
def test_dimensions_that_a_kernel_does_not_have(row_ndim, stacked_ndim):
    how = Requantize(BlockScaling(), row_ndim=row_ndim, stacked_ndim=stacked_ndim)
    with pytest.raises(ValueError, match=f"row_ndim={row_ndim} and stacked_ndim={stacked_ndim} for a kernel of shape"):
        optim.apply_updates(jnp.ones((16, 32)), jnp.ones((16, 32)), requantize=how)
