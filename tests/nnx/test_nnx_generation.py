"""NNX models continue prompts as without a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from te_jax.nnx import Linear, TransformerBlock, convert, generate
from te_jax.recipe import BlockScaling, DelayedScaling


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(64, 128, rngs=rngs)
        blocks = [TransformerBlock(128, 128, num_heads=2, rope_theta=1e4, rngs=rngs) for _ in range(2)]
        self.blocks, self.head = nnx.List(blocks), nnx.Linear(128, 64, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@nnx.jit
def log_probs_of(model, tokens):
    return jax.nn.log_softmax(model(tokens).astype(jnp.float32))


@pytest.mark.parametrize("recipe", [None, BlockScaling()])
def test_a_cache_gives_what_whole_sequences_give(recipe, rng):
    model, lengths = Model(nnx.Rngs(0)), [2, 5]
    if recipe is not None:
        convert(model, recipe)
    tokens = rng.integers(0, 64, (2, 5))
    found, log_probs = generate(model, tokens, 64, max_new_tokens=4, lengths=np.array(lengths), samples=2)
    assert found.shape == log_probs.shape == (4, 4)
    for row, length in enumerate(lengths):
        for sample in (2 * row, 2 * row + 1):
            whole = np.concatenate([tokens[row, :length], found[sample]])[None]
            wanted = np.asarray(log_probs_of(model, whole))[0, length - 1 : -1]
            np.testing.assert_array_equal(found[sample], np.argmax(wanted, axis=1))
            np.testing.assert_allclose(log_probs[sample], np.max(wanted, axis=1), atol=1e-4 if recipe is None else 0.05)
    assert model.blocks[0].attention.cached_key is None  # the model stays as it is


def test_the_smallest_temperature_draws_the_likeliest_token():
    options = {"vocab_size": 64, "max_new_tokens": 2}
    model, key = Model(nnx.Rngs(0)), jax.random.key(0)
    found, log_probs = generate(model, [[1, 2]], **options, temperature=1e-38, key=key)
    np.testing.assert_array_equal(found, generate(model, [[1, 2]], **options)[0])
    np.testing.assert_array_equal(log_probs, 0)


def odd_tokens(model, tokens):
    logits = model(tokens)
    return jnp.where(jax.lax.broadcasted_iota(int, logits.shape, 2) % 2 == 1, logits, -jnp.inf)


def test_the_end_of_a_text_and_a_head_of_ones_own():
    model = Model(nnx.Rngs(0))
    found, log_probs = generate(model, [[1, 2]], 64, max_new_tokens=6, logits=odd_tokens, stop_tokens=range(64))
    assert found[0, 0] % 2 == 1
    assert set(np.asarray(found)[0]) == {int(found[0, 0])}
    assert log_probs[0, 0] < 0
    np.testing.assert_array_equal(log_probs[0, 1:], 0)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (lambda rngs: nnx.Sequential(nnx.Embed(64, 16, rngs=rngs)), "model needs te_jax.nnx.Attention"),
        (lambda rngs: nnx.Sequential(Model(rngs), lambda x: x[..., 1:]), r"gives \[1, 1, 63\] of tokens \[1, 1\], and"),
        (lambda rngs: nnx.List([Model(rngs), nnx.MultiHeadAttention(1, 8, rngs=rngs)]), "in the place of flax.nnx"),
        (lambda rngs: Linear(16, 16, recipe=DelayedScaling(), rngs=rngs), "model has delayed scaling"),
    ],
)
def test_models_that_cannot_generate_are_refused(model, sentence):
    with pytest.raises(ValueError, match=sentence):
        generate(model(nnx.Rngs(0)), [[1]], 64, max_new_tokens=1)
