"""te_jax.nnx.Einsum in FP8 against Flax's own; input and kernel keep their roles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_apis import NNX, normal, value_and_gradients
from parameters import in_turns

from te_jax import ops
from te_jax.nnx import Einsum, OverwriteWithGradient, accumulate_gradients, overwrite_with_gradient, quantize_kernels
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling
from te_jax.testing import assert_close, relative_error

WRT = nnx.Any(nnx.Param, OverwriteWithGradient)

# String, shapes of inputs, kernel and bias.
CASES = {
    "heads": ("btd,dhk->bthk", (3, 5, 32), (32, 4, 8), (4, 8)),
    "heads before tokens": ("btd,dhk->bhtk", (3, 5, 32), (32, 4, 8), (4, 8)),
    "features before tokens": ("bd,df->fb", (6, 32), (32, 16), (16,)),
    "kernel contracted last": ("b t d, h k d -> b t h k", (3, 5, 32), (4, 8, 32), (4, 8)),
    "kernel mixed": ("bthk,hdk->btd", (3, 5, 4, 8), (4, 16, 8), (16,)),
    "ellipsis": ("...d,df->f...", (3, 2, 5, 32), (32, 16), None),
    "experts": ("ebd,edf->ebf", (4, 6, 32), (4, 32, 16), (4, 16)),
    "experts apart": ("beid,dfie->iefb", (6, 2, 3, 32), (32, 16, 3, 2), (3, 2, 16)),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def loss_fn(layer, x, cotangent):
    return jnp.sum(layer(x) * cotangent)


def made(rng, case, **arguments):
    string, _, kernel, bias = case
    layer = Einsum(string, kernel, bias, **arguments, rngs=nnx.Rngs(int(rng.integers(2**31))))
    if bias is not None:
        layer.bias[...] = normal(rng, bias)
    return layer


@pytest.mark.parametrize(("case", "recipe"), in_turns(CASES, {"current": CurrentScaling(), "block": BlockScaling()}))
def test_value_and_gradients_in_fp8(rng, case, recipe):
    layer, x = made(rng, case, recipe=recipe), normal(rng, case[1])
    exact = nnx.Einsum(*(case[0], *case[2:]), rngs=nnx.Rngs(0))
    nnx.update(exact, nnx.state(layer, nnx.Param))
    cotangent = normal(rng, exact(x).shape)
    actual, expected = (value_and_gradients(NNX, one, x, cotangent=cotangent) for one in (layer, exact))
    assert relative_error(actual[0], expected[0]) < 0.06
    assert relative_error(actual[3][0], expected[3][0]) < 0.09
    assert relative_error(actual[1]["kernel"], expected[1]["kernel"]) < 0.09
    if "bias" in expected[1]:
        assert_close(actual[1]["bias"], expected[1]["bias"], tolerance=1e-5)


def test_experts_are_products_of_their_own(rng):
    layer, x = made(rng, CASES["experts"], recipe=CurrentScaling()), normal(rng, (4, 6, 32))
    scales = jnp.asarray([1.0, 1e-4, 1e4, 1.0])[:, None, None]
    y = layer(x * scales)
    for i in range(4):
        kernel, bias = layer.kernel[i], layer.bias[i]
        expected = ops.dense(x[i] * scales[i], kernel, bias, recipe=CurrentScaling())
        assert_close(y[i], expected, tolerance=1e-6)


@cases
def test_input_and_kernel_keep_their_roles(rng, case):
    """Two steps, so that the second must find what the first one observed where it belongs."""
    layer = made(rng, case, recipe=DelayedScaling(history_len=4))
    layer.kernel[...] *= 100
    seen = []
    for factor in (1.0, 3.0):
        x = factor * normal(rng, case[1])
        cotangent = normal(rng, jax.eval_shape(layer, x).shape)
        gradients = nnx.jit(nnx.grad(loss_fn, argnums=nnx.DiffState(0, WRT)))(layer, x, cotangent)
        seen.append([float(jnp.abs(a).max()) for a in (x, layer.kernel[...], cotangent)])
        overwrite_with_gradient(layer, gradients)
    for role, history in zip(("activation", "kernel", "gradient"), np.array(seen[::-1]).T, strict=True):
        found = getattr(layer, f"{role}_amax_history")[...]
        np.testing.assert_allclose(found, [*history, 0, 0], rtol=1e-6, err_msg=role)
    assert layer.uses[...] == 1


@pytest.mark.parametrize(
    ("name", "recipe"),
    in_turns(
        ["heads before tokens", "kernel contracted last", "experts"],
        {"current": CurrentScaling(), "block": BlockScaling()},
    ),
)
def test_kernels_that_are_quantized_once(rng, name, recipe):
    layer, xs = made(rng, CASES[name], recipe=recipe), normal(rng, (2, *CASES[name][1]))

    def loss_fn(layer, x):
        return jnp.mean(jnp.square(layer(x)))

    @nnx.jit
    def accumulated(layer, xs):
        gradients = jax.tree.map(jnp.zeros_like, nnx.state(layer, WRT))
        quantized = quantize_kernels(layer)
        for x in xs:
            _, gradients = accumulate_gradients(loss_fn)(quantized, gradients, x)
        return gradients, quantized(xs[0])

    gradients, y = accumulated(layer, xs)
    assert_close(y, layer(xs[0]), tolerance=1e-6)
    gradient = nnx.jit(nnx.grad(loss_fn))
    single = [gradient(layer, x) for x in xs]
    expected = jax.tree.map(lambda *parts: sum(parts), *map(nnx.to_pure_dict, single))
    jax.tree.map(lambda a, e: assert_close(a, e, tolerance=1e-5), nnx.to_pure_dict(gradients), expected)


@pytest.mark.parametrize(
    ("string", "kernel", "message"),
    [
        ("bthk,hdk->btd", (4, 16, 8), r"needs the dimensions 'hkd' in this order"),
        (None, (16, 16), "einsum_str is None; it must name the dimensions"),
    ],
)
def test_kernels_that_cannot_be_quantized_once_are_refused(string, kernel, message):
    with pytest.raises(ValueError, match=message):
        quantize_kernels(Einsum(string, kernel, recipe=CurrentScaling(), rngs=nnx.Rngs(0)))


def test_the_string_may_come_with_the_call(rng):
    layer, x = Einsum(None, (16, 32), rngs=nnx.Rngs(0)), normal(rng, (3, 16))
    assert_close(layer(x, "bi,io->ob"), (x @ layer.kernel[...]).T)
    for arguments in ((x,), (x, "bi,io->bo", None)):
        other = layer if len(arguments) == 1 else Einsum("bi,io->bo", (16, 32), rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match="give exactly one"):
            other(*arguments)


@pytest.mark.parametrize("string", ["bi,bi->b", "bi,io->b", "bi,io->boo", "bii,io->bo", "bi,oj->bioj", "bij,io->bo"])
def test_sums_that_are_no_product_of_input_and_kernel_are_refused(string):
    with pytest.raises(ValueError, match=r"einsum_str is .*: use jnp.einsum for other sums"):
        Einsum(string, (16,) * len(string.split("->")[0].split(",")[1]), rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda rngs: Einsum("bi,io", (16, 16), rngs=rngs), "it must name the dimensions of inputs, kernel and result"),
        (lambda rngs: Einsum("bi,io,o->bo", (16, 16), rngs=rngs), "it must name the dimensions"),
        (lambda rngs: Einsum("bi,i...->b...", (16, 16), rngs=rngs), "only inputs and result may have an ellipsis"),
        (lambda rngs: Einsum("bi,io->bo", (16, 4, 4), rngs=rngs), r"the kernel has 2 dimensions; its shape is"),
        (lambda rngs: Einsum("bti,io->bto", (16, 16), rngs=rngs), r"does not fit inputs of shape \(3, 16\)"),
        (lambda rngs: Einsum("bi,io->bo", (32, 16), rngs=rngs), r"does not fit inputs of shape \(3, 16\)"),
        (lambda rngs: Einsum("bi,io->bo", (16, 16), (8,), rngs=rngs), r"bias has shape \(8,\); .* \(16,\)"),
        (lambda rngs: Einsum("bi,io->bo", (16, 0), rngs=rngs), r"kernel_shape is \(16, 0\); it must be"),
        (lambda rngs: Einsum("bi,io->bo", (16, 20), recipe=CurrentScaling(), rngs=rngs), "multiple of 16"),
        (lambda rngs: Einsum("bi,io->bo", (16, 16), dtype=jnp.int8, rngs=rngs), "dtype is int8"),
    ],
)
def test_bad_arguments_are_named(rng, make, message):
    with pytest.raises(ValueError, match=message):
        make(nnx.Rngs(0))(normal(rng, (3, 16)))
