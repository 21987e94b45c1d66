"""The gated MLP: what it computes is what its layers compute one by one. tests/linear and tests/conformance have the
rest."""

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

IN, HIDDEN, OUT = 128, 256, 48
SHAPES = (IN, HIDDEN), (IN, HIDDEN), (HIDDEN, OUT)
ACTIVATIONS = {
    "gpt-oss": {"activation": ops.Activation("silu", 1.702, 7.0, 1.0)}, "silu": {}, "gelu": {"activation": "gelu"},
}  # fmt: skip


def layer_by_layer(x, kernels, biases, states, *, activation="silu", **options):
    gate, up = ops.dense(x, kernels[:2], biases[:2], scaling_state=states and states[:2], **options)
    h = ops.gated_activation(gate, up, activation)
    return ops.dense(h, kernels[2], biases[2], scaling_state=states and states[2], **options)


def fused(x, kernels, biases, states, **options):
    return ops.gated_mlp(x, kernels, biases, scaling_state=states, **options)


@pytest.mark.parametrize(
    ("batch", "recipe", "activation", "kernel_contracting"),
    in_turns(
        [(3, 7), (0, 5), ()],
        {"delayed": RECIPES["delayed"], "block": RECIPES["block"], "none": None},
        ACTIVATIONS,
        ["first", "last"],
    ),
)
@pytest.mark.usefixtures("native_kernels")
def test_as_layer_by_layer(batch, activation, recipe, kernel_contracting, rng):
    """y and all gradients, next states among them."""

    def normal(*shape, dtype=np.float32):
        return rng.standard_normal(shape).astype(dtype)

    kernels = tuple(normal(*shape) / np.float32(shape[0] ** 0.5) for shape in SHAPES)
    kernels = kernels if kernel_contracting == "first" else tuple(kernel.T for kernel in kernels)
    biases, dy = (normal(HIDDEN), None, normal(OUT)), normal(*batch, OUT, dtype=jnp.bfloat16)
    states = (recipe.init(),) * 3 if isinstance(recipe, DelayedScaling) else None
    options = {"recipe": recipe, "kernel_contracting": kernel_contracting}
    operands = normal(*batch, IN, dtype=jnp.bfloat16), kernels, biases, states
    found, expected = (
        results_and_gradients(lambda *operands, run=run: run(*operands, **options, **activation), operands, dy)
        for run in (fused, layer_by_layer)
    )
    # Kernels round exponentials in another way than XLA: h then differs by a unit of bfloat16 here and there.
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        assert_close(one, other, tolerance=5e-3)


def test_one_pass_for_the_activation():
    """In a program with block scaling h and the gradients of gate and up are never quantized apart."""
    x, kernels = np.zeros((32, IN), jnp.bfloat16), tuple(np.zeros(shape, np.float32) for shape in SHAPES)
    step = jax.jit(jax.value_and_grad(lambda x, k: ops.gated_mlp(x, k, recipe=RECIPES["block"]).sum(), (0, 1)))
    names = re.findall(r"te_activation\w+|te_quantize\w+", step.lower(x, kernels).as_text())
    assert names.count("te_activation_blocks") == names.count("te_activation_gradient_blocks") == 1
    assert names.count("te_quantize_blocks") == 5  # x, three kernels, dy


X = np.zeros((32, IN), jnp.bfloat16)
KERNEL = tuple(np.zeros(shape, np.float32) for shape in SHAPES)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("kernel must be a tuple of three", {"kernel": KERNEL[:2]}),
        (
            "kernel[1] has shape (128, 48), but kernel[0] has (128, 256)",
            {"kernel": (KERNEL[0], KERNEL[2][:128], KERNEL[2])},
        ),
        ("kernel[2] has shape (128, 256), whose first dimensions (128,)", {"kernel": (*KERNEL[:2], KERNEL[0])}),
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
