"""te_jax.nnx.TransformerBlock against an oracle and the operations that it consists of. Linen's agrees with it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import results_and_gradients
from flax import nnx
from flax_apis import normal
from layer_oracle import transformer_block

from te_jax import ops
from te_jax.layers import Norm
from te_jax.nnx import (
    OverwriteWithGradient,
    TransformerBlock,
)
from te_jax.quantized import QuantizedArray
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling
from te_jax.testing import assert_close, relative_error

RECIPES = {
    "plain": None,
    "current": CurrentScaling(),
    "rowwise": RowwiseScaling(),
    "block": BlockScaling(),
    "delayed": DelayedScaling(history_len=4),
    "by role": {"attention": BlockScaling(), "mlp": DelayedScaling(history_len=4)},
}
SHAPE = {"in_features": 64, "hidden_features": 96, "num_heads": 4, "num_kv_heads": 2, "rope_theta": 100.0}
TRAINED = nnx.Any(nnx.Param, OverwriteWithGradient)


def made(rng, **arguments):
    """A block whose norms do something."""
    block = TransformerBlock(**SHAPE, **arguments, rngs=nnx.Rngs(int(rng.integers(2**31))))
    for _, variable in nnx.iter_graph(block):
        if isinstance(variable, nnx.Param) and variable.ndim == 1:
            variable.set_value(variable[...] + normal(rng, variable.shape) / 10)
    return block


def loss_fn(block, x):
    return jnp.mean(block(x) ** 2)


@nnx.jit
def gradients_of(block, x):
    return nnx.jit(nnx.grad(loss_fn, argnums=nnx.DiffState(0, TRAINED)))(block, x)


VARIANTS = {
    "rms": {},
    "layer": {"norm": Norm("layer", epsilon=1e-3)},
    "zero-centered": {"norm": Norm("rms", 1e-2, True), "qk_norm": Norm("rms", 1e-2, True)},
    "GeGLU": {"activation": "gelu", "window": 3, "qk_norm": "rms"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_value_and_gradients(rng, name):
    block, x = made(rng, **VARIANTS[name]), normal(rng, (2, 9, 64))
    graph, state = nnx.split(block)
    cotangent = normal(rng, x.shape)

    def ours(state, x):
        return nnx.merge(graph, state)(x)

    def expected(state, x):
        return transformer_block(nnx.to_pure_dict(state), x, theta=100.0, **VARIANTS[name])

    for a, e in zip(*(jax.tree.leaves(found(f, state, x, cotangent)) for f in (ours, expected)), strict=True):
        assert_close(a, e, tolerance=2e-5)


def found(f, state, x, cotangent):
    return results_and_gradients(f, (state, x), cotangent)


@pytest.mark.parametrize(("name", "time"), [*((name, 128) for name in RECIPES), ("block", 16), ("by role", 16)])
def test_it_is_the_operations(rng, name, time):
    recipe = RECIPES[name]
    of_attention, of_mlp = recipe.values() if isinstance(recipe, dict) else (recipe, recipe)
    block, x = made(rng, recipe=recipe, dtype=jnp.bfloat16), normal(rng, (2, time, 64), jnp.bfloat16)

    def quantization(recipe):
        cut = time != 128 and isinstance(recipe, BlockScaling)
        return (
            None if recipe is None or isinstance(recipe, DelayedScaling) or cut else recipe.quantization("activation")
        )

    norms = [block.attention_norm.scale[...], block.mlp_norm.scale[...]]
    h = ops.rms_norm(x, norms[0], quantization=quantization(of_attention))
    y = block.attention(h)
    h, x_and_y = ops.rms_norm(y, norms[1], residual=x, quantization=quantization(of_mlp))
    kernels = tuple(getattr(block.mlp, layer).kernel[...] for layer in ("gate_proj", "up_proj", "down_proj"))
    states = (of_mlp.init(),) * 3 if isinstance(of_mlp, DelayedScaling) else None
    expected = x_and_y + ops.gated_mlp(h, kernels, recipe=of_mlp, scaling_state=states)
    np.testing.assert_array_equal(block(x), expected, strict=True)

    seen = []
    block.attention, block.mlp = (
        lambda h, part=part, **arguments: (seen.append(type(h)), part(h, **arguments))[1]
        for part in (block.attention, block.mlp)
    )
    block(x)
    assert [kind is QuantizedArray for kind in seen] == [quantization(r) is not None for r in (of_attention, of_mlp)]


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("current", "block")), "by role"]
)
def test_value_and_gradients_in_fp8(rng, name):
    plain = made(rng)
    block = TransformerBlock(**SHAPE, recipe=RECIPES[name], rngs=nnx.Rngs(0))
    nnx.update(block, nnx.state(plain, nnx.Param))
    x = normal(rng, (2, 128, 64))
    y, exact = (nnx.jit(lambda block, x: block(x))(each, x) for each in (block, plain))
    assert 1e-3 < relative_error(y, exact) < 0.05
    actual, expected = (nnx.to_pure_dict(nnx.state(gradients_of(b, x), nnx.Param)) for b in (block, plain))
    errors = jax.tree.map(relative_error, actual, expected)
    # Those of query and key come last, after the gradients of all other products were rounded to E5M2.
    assert all(error < 0.25 for error in jax.tree.leaves(errors)), errors


def test_x_keeps_its_dtype(rng):
    block, x = made(rng, recipe=CurrentScaling(), dtype=jnp.bfloat16), normal(rng, (2, 16, 64))
    for kernel in (block.attention.out.kernel, block.mlp.down_proj.kernel):
        kernel[...] *= 0
    np.testing.assert_array_equal(block(x), x, strict=True)  # the residual stream is not rounded to `dtype`
    assert made(rng, dtype=jnp.float32)(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
