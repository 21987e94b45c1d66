"""te_jax.flax.Einsum: its string and its kernel. Values: tests/modules and tests/nnx."""

import jax
import pytest
from flax_apis import normal

from te_jax.flax import Einsum, quantize_kernels
from te_jax.recipe import CurrentScaling


def test_kernels_that_cannot_be_quantized_once_are_refused(rng):
    model, x = Einsum((4, 16, 8), "bthk,hdk->btd", recipe=CurrentScaling()), normal(rng, (3, 5, 4, 8))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    with pytest.raises(ValueError, match=r"needs the dimensions 'hkd' in this order"):
        quantize_kernels(model, variables, x)


def test_a_string_is_given_once(rng):
    x = normal(rng, (3, 16))
    model = Einsum((16, 16))
    assert model.init_with_output(jax.random.key(0), x, "bi,io->ob")[0].shape == (16, 3)
    for arguments, layer in (((x,), model), ((x, "bi,io->bo"), Einsum((16, 16), "bi,io->bo"))):
        with pytest.raises(ValueError, match="einsum_str"):
            layer.init(jax.random.key(0), *arguments)
