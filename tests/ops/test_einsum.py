"""`ops.einsum` against `jnp.einsum`; tests of the layers `Einsum` have more strings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import results_and_gradients
from jax.sharding import AxisType
from parameters import in_turns

from te_jax import ops
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling
from te_jax.testing import assert_close, relative_error

# Subscripts, shapes of x, kernel and bias.
CASES = {
    "matrix": ("td,df->tf", (48, 32), (32, 64), (64,)),
    "heads": ("btd,dhk->bthk", (3, 16, 32), (32, 4, 8), (4, 8)),
    "heads first": ("BTD,NDH->BTNH", (3, 16, 32), (4, 32, 16), (4, 16)),
    "out of heads": ("BTNH,NHD->BTD", (3, 16, 4, 16), (4, 16, 32), None),
    "queries and keys": ("bsd,ckdh->cbskh", (2, 16, 32), (2, 4, 32, 16), None),
    "turned": ("btd,hdk->btkh", (3, 16, 32), (4, 32, 16), (16, 4)),
    "summed last": ("...d,fd->...f", (3, 16, 32), (64, 32), (64,)),
    "experts": ("ebd,edf->ebf", (4, 16, 32), (4, 32, 16), (4, 16)),
}
RECIPES = {"none": None, "block": BlockScaling(), "current": CurrentScaling()}


def normal(rng, shape):
    return rng.standard_normal(shape).astype(np.float32)


def operands(rng, case):
    subscripts, *shapes = CASES[case]
    x, kernel, bias = (None if shape is None else normal(rng, shape) for shape in shapes)
    return subscripts, x, kernel, bias


def plain(subscripts, x, kernel, bias):
    """The einsum in float32, whose bias has the dimensions that kernel and result share."""
    y = jnp.einsum(subscripts, x, kernel, precision="highest")
    if bias is None:
        return y
    kernel_names, result = subscripts.split(",")[1].split("->")
    result = result.replace("...", "xy"[: y.ndim - len(result) + 3])
    shape = [size if name in kernel_names else 1 for name, size in zip(result, y.shape, strict=True)]
    return y + bias.reshape(shape)


@pytest.mark.parametrize(("case", "recipe"), in_turns([*CASES], RECIPES))
def test_values_and_gradients(rng, case, recipe):
    """In plain JAX and with one of the recipes."""
    subscripts, *given = operands(rng, case)
    einsum, expected_of = (functools.partial(function, subscripts) for function in (ops.einsum, plain))
    dy = normal(rng, jax.eval_shape(expected_of, *given).shape)
    expected, gradients = results_and_gradients(expected_of, given, dy)
    for of in {None, recipe}:
        found, gradients_found = results_and_gradients(functools.partial(einsum, recipe=of), given, dy)
        forward, gradient = (1e-5, 1e-5) if of is None else (0.06, 0.09)
        for one, other, bound in zip(
            jax.tree.leaves((found, gradients_found)), jax.tree.leaves((expected, gradients)),
            (forward, gradient, gradient, gradient), strict=False,
        ):  # fmt: skip
            assert one.dtype == np.float32
            assert relative_error(one, other) < bound


@pytest.mark.parametrize("case", ["heads", "summed last", "experts"])
def test_quantized_kernels_and_accumulators(rng, case):
    """A kernel that came quantized, and whose gradient is added to a buffer."""
    subscripts, x, kernel, _ = operands(rng, case)
    recipe = CurrentScaling()

    def quantize(kernel):
        return ops.quantize(kernel, recipe.quantization("kernel"), row_ndim=1)

    quantized = jax.jit(jax.vmap(quantize) if case == "experts" else quantize)(kernel)
    dy = normal(rng, jnp.einsum(subscripts, x, kernel).shape)

    def loss(kernel, accumulator):
        y = ops.einsum(subscripts, x, kernel, recipe=recipe, wgrad_accumulator=accumulator)
        return jnp.sum(y * dy)

    before = normal(rng, kernel.shape)
    expected = before + np.asarray(jax.jit(jax.grad(loss))(kernel, None))
    for given in kernel, quantized:
        assert_close(jax.jit(jax.grad(loss, argnums=1))(given, before), expected, tolerance=1e-5)


def test_a_state_of_delayed_scaling(rng):
    subscripts, x, kernel, bias = operands(rng, "heads first")
    recipe = DelayedScaling(history_len=4)

    def loss(kernel, state):
        return jnp.sum(ops.einsum(subscripts, x, kernel, bias, recipe=recipe, scaling_state=state) ** 2)

    state = jax.jit(jax.grad(loss, argnums=1))(kernel, recipe.init())
    assert state.kernel[0] == np.abs(kernel).max()


@pytest.mark.parametrize(
    ("subscripts", "shape", "options", "message"),
    [
        ("btd,bd->bt", (3, 32), {}, r"subscripts is 'btd,bd->bt'; .*use jnp.einsum for other sums"),
        ("btd->bt", (32, 16), {}, r"subscripts is 'btd->bt'; it must name the dimensions"),
        (
            "btd,dhk->bthk",
            (32, 16),
            {},
            r"subscripts is .* kernel has 3 dimensions; its shape is \(32, 16\)",
        ),
        ("btd,df->btf", (48, 16), {}, r"does not fit x of shape \(3, 16, 32\)"),
        (
            "btd,fdk->btfk",
            (4, 32, 16),
            {"wgrad_accumulator": jnp.zeros((4, 32, 16))},
            r"subscripts is .* accumulator needs the dimensions 'dfk' in this order",
        ),
    ],
    ids=["sum", "one operand", "dimensions", "sizes", "order"],
)
def test_errors(rng, subscripts, shape, options, message):
    with pytest.raises(ValueError, match=message):
        ops.einsum(subscripts, normal(rng, (3, 16, 32)), normal(rng, shape), recipe=BlockScaling(), **options)


def test_the_sharding_of_the_result_on_an_explicit_mesh(rng, make_mesh):
    mesh = make_mesh({"data": AxisType.Explicit, "model": AxisType.Explicit})
    batch = 8 * mesh.shape["data"]
    x, kernel = (rng.standard_normal(shape, np.float32) for shape in ((batch, 2, 32), (4, 32, 16)))
    spec = jax.P("data", None, "model", None)
    einsum = functools.partial(ops.einsum, "btd,hdk->bthk", recipe=BlockScaling())
    expected = jax.jit(einsum)(x, kernel)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
        y = jax.jit(functools.partial(einsum, out_sharding=spec))(x, kernel)
    assert y.sharding.spec == spec
    assert relative_error(y, expected) < 1e-6
