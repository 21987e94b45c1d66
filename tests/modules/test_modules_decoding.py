"""Decoding with a cache."""

import numpy as np
import pytest
from flax_apis import LINEN, NNX, normal

from te_jax.recipe import BlockScaling
from te_jax.testing import assert_close

GROUPED = {"num_kv_heads": 2, "rope_theta": 100.0, "window": 3}
LAYERS = {
    "Attention": (("Attention", 64, 4), {**GROUPED, "recipe": BlockScaling()}),
    "TransformerBlock": (("TransformerBlock", 64, 96, 4), GROUPED),
}


@pytest.mark.parametrize(("api", "name"), [(LINEN, "Attention"), (NNX, "TransformerBlock")], ids=str)
def test_decoding_gives_what_the_whole_sequence_does(rng, api, name):
    layer, arguments = LAYERS[name]
    x = normal(rng, (2, 9, 64))
    model = api.drawn(api.layer(*layer, **arguments), rng, x)
    step = api.decoding(model, 2, 10, 64)
    parts = [step(part) for part in np.split(np.asarray(x), range(5, 9), axis=1)]
    expected = api.jit(lambda model, x: model(x))(model, x)
    # In FP8 a value next to the middle of two may be rounded either way.
    assert_close(np.concatenate(parts, axis=1), expected, tolerance=5e-3 if "recipe" in arguments else 1e-5)
    with pytest.raises(ValueError, match="x has 2 tokens, and the cache of length 10 holds 9 already: make a longer"):
        step(np.asarray(x)[:, :2], jit=False)
    assert np.isnan(step(np.asarray(x)[:, :2])).all()
