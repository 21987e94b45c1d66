"""`te_jax.models.generate`: what is drawn, where texts end, and caches against whole sequences."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax.models import PRESETS, apply, generate, init
from te_jax.recipe import BlockScaling, DelayedScaling

CONFIG = dataclasses.replace(PRESETS["nano"], num_layers=1)


@pytest.fixture(scope="module")
def params():
    return init(CONFIG, jax.random.key(0))


def by_whole_sequences(params, tokens, config, count):
    """The likeliest tokens, where every one begins anew."""
    tokens = jnp.asarray(tokens)
    for _ in range(count):
        logits = apply(params, tokens, config)
        tokens = jnp.concatenate([tokens, jnp.argmax(logits[:, -1:], axis=-1)], axis=1)
    return np.asarray(tokens[:, -count:])


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{}, {"window": 3}, {"recipe": BlockScaling(), "hidden_size": 64, "mlp_size": 128}, {"attention_sinks": True}],
    ids=["plain", "window", "FP8", "sinks"],
)
def test_a_cache_gives_what_whole_sequences_give(changes, rng):
    config = dataclasses.replace(CONFIG, num_layers=2, **changes)
    params = init(config, jax.random.key(1))
    tokens = rng.integers(0, 256, (2, 5))
    found = generate(params, tokens, config, max_new_tokens=6)
    np.testing.assert_array_equal(found, by_whole_sequences(params, tokens, config, 6))
    # One token at a time needs no prompt of several.
    one = generate(params, tokens[:, :1], config, max_new_tokens=3)
    np.testing.assert_array_equal(one, by_whole_sequences(params, tokens[:, :1], config, 3))


def test_a_text_that_has_ended_repeats_its_end(params):
    tokens = np.array([[1, 2, 3], [4, 5, 6]])
    free = np.asarray(generate(params, tokens, CONFIG, max_new_tokens=8))
    stop = int(free[0, 2])
    first = [int(np.argmax(row == stop)) if stop in row else 7 for row in free]
    found = np.asarray(generate(params, tokens, CONFIG, max_new_tokens=8, stop_tokens=[stop]))
    for row, other, end in zip(found, free, first, strict=True):
        np.testing.assert_array_equal(row[: end + 1], other[: end + 1])
        assert set(row[end:]) == {other[end]}


def test_tokens_are_drawn_by_their_probability_among_the_likeliest(params):
    tokens = np.tile([[7, 8, 9]], (2000, 1))
    logits = np.asarray(apply(params, tokens[:1], CONFIG), np.float64)[0, -1]
    temperature, top_p = 0.5, 0.7
    scaled = np.exp(logits / temperature - (logits / temperature).max())
    scaled /= scaled.sum()
    order = np.argsort(-scaled)
    kept = order[: int(np.searchsorted(np.cumsum(scaled[order]), top_p)) + 1]
    wanted = np.zeros_like(scaled)
    wanted[kept] = scaled[kept] / scaled[kept].sum()
    options = {"max_new_tokens": 1, "temperature": temperature, "top_p": top_p}
    found = np.asarray(generate(params, tokens, CONFIG, key=jax.random.key(3), **options))[:, 0]
    assert set(found) <= set(kept)
    counts = np.bincount(found, minlength=256)
    assert np.all(np.abs(counts - 2000 * wanted) <= 5 * np.sqrt(2000 * wanted * (1 - wanted)) + 1)
    again = np.asarray(generate(params, tokens, CONFIG, key=jax.random.key(3), **options))[:, 0]
    np.testing.assert_array_equal(again, found)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0: it needs to be a whole number of at least 1"),
        ({"temperature": -1.0}, "temperature is -1.0: it needs to be a finite number of at least 0"),
        ({"temperature": float("nan")}, "temperature is nan: it needs to be a finite number of at least 0"),
        ({"temperature": 1.0}, "key is None, and temperature is not 0"),
        ({"top_p": 0.0}, "top_p is 0.0: it needs to be a number above 0 and at most 1"),
        ({"stop_tokens": [1.5]}, r"stop_tokens is \[1.5\]: it needs to be whole numbers"),
        ({"config": dataclasses.replace(CONFIG, recipe=DelayedScaling())}, "config.recipe is DelayedScaling"),
        ({"tokens": np.array([1, 2])}, "tokens has shape"),
    ],
)
def test_what_cannot_be_generated_is_refused(options, sentence, params):
    given = {"tokens": np.array([[1, 2]]), "config": CONFIG, "max_new_tokens": 1, **options}
    with pytest.raises(ValueError, match=sentence):
        generate(params, **given)
