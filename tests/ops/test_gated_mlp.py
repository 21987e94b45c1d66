"""The gated MLP: what it computes is what its layers compute one by one, and in float64."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import results_and_gradients
from dense_oracle import RECIPES
from parameters import in_turns

from te_jax import ops
from te_jax.recipe import DelayedScaling
from te_jax.testing import assert_close

IN, HIDDEN, OUT = 256, 384, 128
GPT_OSS = {"activation": ops.Activation("silu", 1.702, 7.0, 1.0)}
FORWARD, GRADIENT = 0.08, 0.13  # three products one after another, each with the errors of FP8
ACTIVATIONS = {"silu": {}, "gpt-oss": GPT_OSS, "gelu": {"activation": "gelu"}}


def normal(rng, *shape, scale=1.0, dtype="float32"):
    return jax.device_put((scale * rng.standard_normal(shape)).astype(np.float32).astype(jnp.dtype(dtype)))


def random_case(rng, batch=(2, 128), dtype="bfloat16", with_bias=True):
    """(x, kernels, biases, dy)"""
    kernels = (
        normal(rng, IN, HIDDEN, scale=IN**-0.5),
        normal(rng, IN, HIDDEN, scale=IN**-0.5),
        normal(rng, HIDDEN, OUT, scale=HIDDEN**-0.5),
    )
    biases = tuple(normal(rng, k.shape[-1]) if with_bias else None for k in kernels)
    return normal(rng, *batch, IN, dtype=dtype), kernels, biases, normal(rng, *batch, OUT, dtype=dtype)


def states_of(recipe):
    """Not warm: scales are 1 at first, which is enough for normal data."""
    return (recipe.init(),) * 3 if isinstance(recipe, DelayedScaling) else None


def layer_by_layer(
    x, kernels, biases, states, *, recipe, implementation=None, kernel_contracting="first", **activation
):
    options = {"recipe": recipe, "implementation": implementation, "kernel_contracting": kernel_contracting}
    biases, states = biases or (None,) * 3, states or (None,) * 3
    gate, up = ops.dense(x, kernels[:2], biases[:2], scaling_state=states[:2], **options)
    h = ops.gated_activation(gate, up, **activation)
    return ops.dense(h, kernels[2], biases[2], scaling_state=states[2], **options)


def fused(x, kernels, biases, states, **options):
    return ops.gated_mlp(x, kernels, biases, scaling_state=states, **options)


def step(function, case, states, **options):
    """y and all gradients, next states among them."""
    *operands, dy = case
    return results_and_gradients(lambda *operands: function(*operands, **options), (*operands, states), dy)


def assert_same(found, expected, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert_close(a, b, tolerance=tolerance)


@pytest.mark.parametrize(
    ("recipe", "activation", "implementation", "kernel_contracting"),
    [
        *in_turns({**RECIPES, "none": None}, ACTIVATIONS, ("native",), ("first",)),
        *in_turns({name: RECIPES[name] for name in ("delayed", "block")}, ACTIVATIONS, ("reference",), ("first",)),
        *in_turns({**RECIPES, "none": None}, ACTIVATIONS, ("native",), ("last",)),
        *in_turns({"block": RECIPES["block"]}, ACTIVATIONS, ("reference",), ("last",)),
    ],
)
@pytest.mark.usefixtures("native_kernels")
def test_as_layer_by_layer(activation, recipe, implementation, kernel_contracting, rng):
    (x, kernels, *others), states = random_case(rng), states_of(recipe)
    case = x, kernels if kernel_contracting == "first" else tuple(jnp.array(k.T) for k in kernels), *others
    options = {"recipe": recipe, "implementation": implementation, "kernel_contracting": kernel_contracting}
    options |= activation
    expected = step(layer_by_layer, case, states, **options)
    # Kernels round exponentials in another way than XLA: h then differs by a unit of bfloat16 here and there. On a GPU
    # XLA may keep h of the reference in float32 in one program and round it in the other, which moves more codes.
    found = step(fused, case, states, **options)
    assert_same(found, expected, tolerance=5e-3 if implementation == "native" else 2e-2)


@pytest.mark.parametrize("recipe", [RECIPES["block"], RECIPES["current"]], ids=["block", "current"])
def test_against_float64(recipe, rng):
    x, kernels, biases, dy = random_case(rng, dtype="float32")

    def oracle(x, kernels, biases):
        gate, up = (x @ kernels[i] + biases[i][None, None] for i in range(2))
        return (jax.nn.silu(gate) * up) @ kernels[2] + biases[2][None, None]

    with jax.enable_x64(True):
        *wide, wide_dy = jax.tree.map(lambda a: np.asarray(a, np.float64), (x, kernels, biases, dy))
        expected = jax.tree.map(np.asarray, results_and_gradients(oracle, wide, wide_dy))
    found_y, (*gradients, _) = step(fused, (x, kernels, biases, dy), None, recipe=recipe)
    assert_close(found_y, expected[0], dtype="float32", tolerance=FORWARD)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected[1]), strict=True):
        assert_close(a, b, dtype="float32", tolerance=GRADIENT)


@pytest.mark.parametrize(
    ("batch", "recipe"),
    in_turns([(), (0, 5), (1,), (3, 7), (130,)], {name: RECIPES[name] for name in ("block", "current")}),
)
def test_any_batch(recipe, batch, rng):
    case = random_case(rng, batch)
    assert_same(step(fused, case, None, recipe=recipe), step(layer_by_layer, case, None, recipe=recipe), tolerance=5e-3)


def test_x_in_fp8(rng):
    recipe = RECIPES["block"]
    x, kernels, _, dy = random_case(rng)

    def run(x, kernels):
        x8 = ops.quantize(x, recipe.quantization("activation"), row_ndim=2, straight_through=True)
        return ops.gated_mlp(x8, kernels, recipe=recipe)

    found = results_and_gradients(run, (x, kernels), dy)
    expected_y, (*expected, _, _) = step(fused, (x, kernels, None, dy), None, recipe=recipe)
    assert_same(found, (expected_y, tuple(expected)), tolerance=0.0)


def test_one_pass_for_the_activation(rng):
    """In a program with block scaling h and the gradients of gate and up are never quantized apart."""
    x, kernels, _, _ = random_case(rng)
    step = jax.jit(jax.value_and_grad(lambda x, k: ops.gated_mlp(x, k, recipe=RECIPES["block"]).sum(), (0, 1)))
    names = re.findall(r"te_activation\w+|te_quantize\w+", step.lower(x, kernels).as_text())
    assert names.count("te_activation_blocks") == names.count("te_activation_gradient_blocks") == 1
    assert names.count("te_quantize_blocks") == 5  # x, three kernels, dy


X = np.zeros((32, IN), jnp.bfloat16)
KERNEL = tuple(np.zeros(shape, np.float32) for shape in ((IN, HIDDEN), (IN, HIDDEN), (HIDDEN, OUT)))


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("kernel must be a tuple of three", {"kernel": KERNEL[:2]}),
        (
            "kernel[1] has shape (256, 128), but kernel[0] has (256, 384)",
            {"kernel": (KERNEL[0], KERNEL[2][:256], KERNEL[2])},
        ),
        ("kernel[2] has shape (256, 384), whose first dimensions (256,)", {"kernel": (*KERNEL[:2], KERNEL[0])}),
        ("bias[1] has shape (3,)", {"bias": (None, np.zeros(3, np.float32), None)}),
        ("activation is 'tanh'; it must be one of", {"activation": "tanh"}),
        ("scaling_state[0] is None; DelayedScaling needs", {"recipe": DelayedScaling()}),
        ("kernel is a tuple of 3, so wgrad_accumulator must be one too", {"wgrad_accumulator": KERNEL[0]}),
    ],
)
def test_errors(message, changes):
    arguments = {"x": X, "kernel": KERNEL, "recipe": RECIPES["block"]} | changes
    with pytest.raises(ValueError, match=re.escape(message)):
        ops.gated_mlp(**arguments)
