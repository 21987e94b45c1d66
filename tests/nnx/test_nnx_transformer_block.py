"""te_jax.nnx.TransformerBlock against an oracle, and against the operations that it consists of."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import results_and_gradients
from flax import nnx
from layer_oracle import transformer_block

from te_jax import ops
from te_jax.nnx import (
    OverwriteWithGradient,
    TransformerBlock,
    accumulate_gradients,
    overwrite_with_gradient,
    quantize_kernels,
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


def normal(rng, shape, dtype=jnp.float32):
    return jax.device_put(np.asarray(rng.standard_normal(shape), jnp.dtype(dtype)))


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
    "layer": {"norm": "layer", "epsilon": 1e-3},
    "zero-centered": {"zero_centered": True, "qk_norm": True, "epsilon": 1e-2},
    "GeGLU": {"kind": "gelu", "window": 3, "qk_norm": True},
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


def test_state_of_delayed_scaling_advances(rng):
    block, x = made(rng, recipe=RECIPES["delayed"]), normal(rng, (2, 16, 64))
    optimizer = nnx.Optimizer(block, optax.sgd(0.1), wrt=nnx.Param)
    for _ in range(2):
        gradients = gradients_of(block, x)
        optimizer.update(block, gradients)
        overwrite_with_gradient(block, gradients)
    histories = [v for path, v in nnx.to_flat_state(nnx.state(block, OverwriteWithGradient)) if path[-1] != "uses"]
    assert len(histories) == 7 * 3
    for history in histories:
        assert (history[:2] > 0).all()
        assert (history[2:] == 0).all()


@pytest.mark.parametrize("name", ["by role"])
def test_kernels_are_quantized_once(rng, name):
    block, microbatches = made(rng, recipe=RECIPES[name]), normal(rng, (2, 2, 128, 64))
    if name == "by role":  # scales of kernels quantized once are always up to date
        overwrite_with_gradient(block, gradients_of(block, microbatches[0]))

    @nnx.jit
    def accumulated(block, microbatches):
        quantized = quantize_kernels(block)
        gradients = jax.tree.map(jnp.zeros_like, nnx.state(block, TRAINED))
        for x in microbatches:
            _, gradients = accumulate_gradients(loss_fn)(quantized, gradients, x)
        return gradients

    actual, first, second = accumulated(block, microbatches), *(gradients_of(block, x) for x in microbatches)
    actual, first, second = (nnx.to_pure_dict(nnx.state(g, nnx.Param)) for g in (actual, first, second))
    jax.tree.map(lambda a, e, f: assert_close(a, e + f, tolerance=5e-3), actual, first, second)


def test_decoding_gives_what_the_whole_sequence_does(rng):
    block, x = made(rng, window=3, recipe=BlockScaling()), normal(rng, (2, 7, 64))
    expected = block(x)
    block.attention.init_cache(2, 7)
    step = nnx.jit(lambda block, x: block(x, decode=True))
    actual = [step(block, x[:, :4])] + [step(block, x[:, t : t + 1]) for t in range(4, 7)]
    assert_close(jnp.concatenate(actual, axis=1), expected, tolerance=5e-3)


@pytest.mark.slow
def test_blocks_are_stacked_and_rematerialized(rng):
    x = normal(rng, (2, 128, 64))

    @nnx.split_rngs(splits=2)
    @nnx.vmap
    def stacked(rngs):
        return TransformerBlock(**SHAPE, recipe=RECIPES["delayed"], rngs=rngs)

    blocks = stacked(nnx.Rngs(int(rng.integers(2**31))))
    graph, state = nnx.split(blocks)

    def scanned(state, x):
        layer = jax.checkpoint(lambda x, state: (nnx.merge(graph, state)(x), None), prevent_cse=False)
        return jax.lax.scan(layer, x, state)[0]

    def unrolled(state, x):
        for i in range(2):
            x = nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state))(x)
        return x

    cotangent = normal(rng, x.shape)
    for a, e in zip(*(jax.tree.leaves(found(f, state, x, cotangent)) for f in (scanned, unrolled)), strict=True):
        assert_close(a, e, tolerance=5e-3)


def test_dropout_is_of_both_parts(rng):
    x = normal(rng, (2, 64, 64))
    block = TransformerBlock(**SHAPE, dropout_rate=0.5, rngs=nnx.Rngs(0, dropout=1))
    expected = block(x, deterministic=True)
    block.mlp.down_proj.kernel[...] *= 0
    dropped = block(x) == x  # of attention
    assert 0.3 < jnp.mean(dropped) < 0.7
    block.mlp.down_proj.kernel[...] += 1
    block.attention.out.kernel[...] *= 0
    assert 0.3 < jnp.mean(block(x) == x) < 0.7  # of the MLP
    block.eval()
    assert not jnp.any(block(x) == x)
    assert expected.shape == x.shape


ERRORS = {
    "norm": ({"norm": "batch"}, r"norm is 'batch'; it must be 'rms' or 'layer'"),
    "roles": ({"recipe": {"attention": None}}, r"recipe has the keys \['attention'\]; it must be .* 'mlp'"),
    "heads": ({"num_kv_heads": 3}, r"num_kv_heads is 3 and num_heads 4"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_argument_rule_and_way_out(name):
    arguments, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        TransformerBlock(**{**SHAPE, **arguments}, rngs=nnx.Rngs(0))
