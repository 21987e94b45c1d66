"""`ops.einsum` against `jnp.einsum`; tests of the layers `Einsum` have more strings."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import results_and_gradients
from jax.sharding import AxisType
from parameters import in_turns

from te_jax import ops
from te_jax.recipe import BlockScaling, CurrentScaling
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


def plain(subscripts, x, kernel, bias, rng):
    """(dy, y, gradients) in float64. A bias has the dimensions that kernel and result share, in the result's order."""
    x, kernel = np.float64(x), np.float64(kernel)
    of_x, of_kernel, result = re.split(",|->", subscripts.replace("...", "xyz"[: x.ndim + 3 - subscripts.index(",")]))
    y = np.einsum(f"{of_x},{of_kernel}->{result}", x, kernel)
    dy = normal(rng, y.shape)
    gradients = (
        np.einsum(f"{result},{of_kernel}->{of_x}", dy, kernel), np.einsum(f"{result},{of_x}->{of_kernel}", dy, x),
    )  # fmt: skip
    if bias is None:
        return dy, y, (*gradients, None)
    shared = [name in of_kernel for name in result]
    y = y + np.reshape(bias, [size if own else 1 for size, own in zip(y.shape, shared, strict=True)])
    return dy, y, (*gradients, dy.sum(axis=tuple(np.flatnonzero(np.invert(shared))), dtype=np.float64))


@pytest.mark.parametrize(("case", "recipe"), in_turns([*CASES], RECIPES))
def test_values_and_gradients(rng, case, recipe):
    """In plain JAX and with one of the recipes."""
    subscripts, *given = operands(rng, case)
    dy, expected, gradients = plain(subscripts, *given, rng)
    for of in {None, recipe}:
        einsum = functools.partial(ops.einsum, subscripts, recipe=of)
        found, gradients_found = results_and_gradients(einsum, given, dy)
        forward, gradient = (1e-5, 1e-5) if of is None else (0.06, 0.09)
        for one, other, bound in zip(
            jax.tree.leaves((found, gradients_found)), jax.tree.leaves((expected, gradients)),
            (forward, gradient, gradient, gradient), strict=False,
        ):  # fmt: skip
            assert one.dtype == np.float32
            assert relative_error(one, other) < bound


@pytest.mark.parametrize("case", ["summed last", "experts"])
def test_quantized_kernels_and_accumulators(rng, case):
    """A kernel that came quantized, and whose gradient is added to a buffer."""
    subscripts, x, kernel, _ = operands(rng, case)
    recipe = CurrentScaling()

    def quantize(kernel):
        return ops.quantize(kernel, recipe.quantization("kernel"), row_ndim=1)

    quantized = jax.jit(jax.vmap(quantize) if case == "experts" else quantize)(kernel)
    dy = normal(rng, jax.eval_shape(functools.partial(ops.einsum, subscripts), x, kernel).shape)

    def loss(kernel, accumulator):
        y = ops.einsum(subscripts, x, kernel, recipe=recipe, wgrad_accumulator=accumulator)
        return jnp.sum(y * dy)

    before = normal(rng, kernel.shape)
    expected = before + np.asarray(jax.jit(jax.grad(loss))(kernel, None))
    for given in kernel, quantized:
        assert_close(jax.jit(jax.grad(loss, argnums=1))(given, before), expected, tolerance=1e-5)


@pytest.mark.parametrize(
    ("subscripts", "shape", "options", "message"),
    [
        ("btd,bd->bt", (3, 32), {}, r"subscripts is 'btd,bd->bt'; .*use jnp.einsum for other sums"),
        ("btd->bt", (32, 16), {}, r"subscripts is 'btd->bt'; it must name the dimensions"),
        ("btd,dhk->bthk", (32, 16), {}, r"subscripts is .* kernel has 3 dimensions; its shape is \(32, 16\)"),
        ("btd,df->btf", (48, 16), {}, r"does not fit x of shape \(3, 16, 32\)"),
        ("btd,fdk->btfk", (4, 32, 16), {"wgrad_accumulator": jnp.zeros((4, 32, 16))},
         r"subscripts is .* accumulator needs the dimensions 'dfk' in this order"),
    ], ids=["sum", "one operand", "dimensions", "sizes", "order"],
)  # fmt: skip
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
