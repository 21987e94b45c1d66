"""te_jax.flax.Einsum against Flax's own, and with state and quantized kernels; its sums are tested with te_jax.nnx."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT as OVERWRITE

from te_jax.flax import Einsum, accumulate_gradients, quantize_kernels
from te_jax.recipe import CurrentScaling, DelayedScaling
from te_jax.testing import assert_close, relative_error


def normal(rng, shape, dtype=jnp.float32):
    return jax.device_put(np.asarray(rng.standard_normal(shape), jnp.dtype(dtype)))


def loss_of(model):
    return lambda variables, x: jnp.mean(jnp.square(model.apply(variables, x)))


@pytest.mark.parametrize(
    ("shape", "string", "inputs", "use_bias"),
    [
        ((32, 4, 8), "btd,dhk->bhtk", (3, 5, 32), True),
        ((4, 16, 8), "bthk,hdk->btd", (3, 5, 4, 8), False),
        ((32, 16, 3, 2), "...eid,dfie->i...ef", (6, 2, 3, 32), True),
    ],
)
def test_without_recipe_it_is_the_layer_of_flax(rng, shape, string, inputs, use_bias):
    arguments = {"use_bias": use_bias, "bias_init": nn.initializers.normal()}
    ours, theirs = (layer(shape, string, **arguments) for layer in (Einsum, nn.Einsum))
    x, key = normal(rng, inputs), jax.random.key(int(rng.integers(2**31)))
    variables = jax.jit(theirs.init)(key, x)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(ours.init)(key, x), variables)
    of_layer = (jax.jit(jax.value_and_grad(loss_of(layer), argnums=(0, 1))) for layer in (ours, theirs))
    actual, expected = (value_and_gradients(variables, x) for value_and_gradients in of_layer)
    jax.tree.map(lambda a, e: assert_close(a, e, tolerance=1e-5), actual, expected)


def test_input_and_kernel_keep_their_roles(rng):
    model, x = Einsum((32, 4, 8), "btd,dhk->bhtk", recipe=DelayedScaling(history_len=4)), normal(rng, (3, 5, 32))
    variables = jax.jit(model.init)(jax.random.key(int(rng.integers(2**31))), x)
    state = jax.jit(jax.grad(loss_of(model)))(variables, x)[OVERWRITE]
    assert state["activation_amax_history"][0] == jnp.abs(x).max()
    assert state["kernel_amax_history"][0] == jnp.abs(variables["params"]["kernel"]).max()


class Stack(nn.Module):
    """Two stacked layers of experts, whose states are stacked too."""

    recipe: object

    @nn.compact
    def __call__(self, x):
        class Block(nn.Module):
            recipe: object

            @nn.compact
            def __call__(self, x, _):
                return x + Einsum((4, 32, 32), "ebd,edf->ebf", recipe=self.recipe, name="experts")(x), None

        scan = nn.scan(Block, variable_axes={"params": 0, OVERWRITE: 0}, split_rngs={"params": True}, length=2)
        return scan(self.recipe, name="layers")(x, None)[0]


@pytest.mark.parametrize("recipe", [CurrentScaling(), DelayedScaling(history_len=4)], ids=["current", "delayed"])
def test_kernels_of_stacked_layers_are_quantized_once(rng, recipe):
    model, xs = Stack(recipe), normal(rng, (2, 4, 6, 32))
    variables = jax.jit(model.init)(jax.random.key(int(rng.integers(2**31))), xs[0])
    exact = jax.grad(lambda variables: loss_of(Stack(None))({"params": variables["params"]}, xs[0]))(variables)

    @jax.jit
    def accumulated(variables, xs):
        quantized = quantize_kernels(model, variables, xs[0])
        assert quantized["params"]["layers"]["experts"]["kernel"].scale_inv.shape[:2] == (2, 4)
        gradients = jax.tree.map(jnp.zeros_like, variables)
        for x in xs:
            _, gradients = accumulate_gradients(loss_of(model))(quantized, gradients, x)
        return gradients

    gradients = accumulated(variables, jnp.stack([xs[0], xs[0]]))
    for name, gradient in gradients["params"]["layers"]["experts"].items():
        assert relative_error(gradient, 2 * exact["params"]["layers"]["experts"][name]) < 0.2


def test_kernels_that_cannot_be_quantized_once_are_refused(rng):
    model, x = Einsum((4, 16, 8), "bthk,hdk->btd", recipe=CurrentScaling()), normal(rng, (3, 5, 4, 8))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    with pytest.raises(ValueError, match=r"quantize_kernels needs a kernel with the dimensions 'hkd' in this order"):
        quantize_kernels(model, variables, x)


def test_logical_axes_name_the_dimensions(rng):
    model = Einsum((32, 4, 8), "btd,dhk->bhtk", kernel_axes=("embed", "heads", "kv"), bias_axes=("heads", "kv"))
    params = jax.jit(model.init)(jax.random.key(0), normal(rng, (3, 5, 32)))["params"]
    assert nn.get_partition_spec(params) == {
        "kernel": jax.P("embed", "heads", "kv"),
        "bias": jax.P("heads", "kv"),
    }


def test_a_string_is_given_once(rng):
    x = normal(rng, (3, 16))
    model = Einsum((16, 16))
    assert model.init_with_output(jax.random.key(0), x, "bi,io->ob")[0].shape == (16, 3)
    for arguments, layer in (((x,), model), ((x, "bi,io->bo"), Einsum((16, 16), "bi,io->bo"))):
        with pytest.raises(ValueError, match="einsum_str"):
            layer.init(jax.random.key(0), *arguments)
