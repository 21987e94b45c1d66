"""Collective products in FP8: against float64 and against what one device computes, and what travels."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collective_oracle import TRANSPORTS, check, computed, mesh_of, random_case, wide
from jax.sharding import PartitionSpec as P
from parameters import in_turns

from te_jax import ops
from te_jax.hlo import collectives
from te_jax.parallel import Ring, all_gather_matmul
from te_jax.recipe import BlockScaling, CurrentScaling, RowwiseScaling
from te_jax.testing import assert_close

RECIPES = {"current": CurrentScaling(), "rowwise": RowwiseScaling(), "block": BlockScaling()}
BOUNDS = (0.055, 0.085)  # relative L2 errors on normal data: forward, gradients
SUMMED = "f32" if jax.default_backend() == "cpu" else "bf16"  # in which XLA adds results in bfloat16 up
SUMS = 1e-5 if jax.default_backend() == "cpu" else 1e-3  # FP8 tensor cores add up with about 14 bits

last = pytest.mark.parametrize("transport", TRANSPORTS[-1:])  # where the transport matters little
NAMES = ["all_gather_matmul", "matmul_reduce_scatter"]


def fp8_case(rng, name, size, *, rows=128, inner=128, outers=((128,),), dtype="bfloat16", **options):
    """Tokens of different magnitude, larger in x where they are smaller in the gradient: scales that are those of other
    tokens, and tokens in another order, would show."""
    case = random_case(rng, name, size, rows=rows, inner=inner, outers=outers, dtype=dtype, **options)
    tokens = case.x.shape[:-1]
    magnitudes = np.exp2(6 * rng.permutation(math.prod(tokens)) / math.prod(tokens)).astype(case.x.dtype)
    x = np.asarray(case.x) * magnitudes.reshape(*tokens, 1)
    dys = (np.asarray(dy) / magnitudes.reshape(*tokens, *(1,) * (dy.ndim - len(tokens))) for dy in case.dys)
    return dataclasses.replace(case, x=x, dys=tuple(dys))


@functools.partial(jax.jit, static_argnums=(1, 2))
def both_copies(x, recipe, role):
    quantized = ops.quantize(x, RECIPES[recipe].quantization(role), implementation="reference")
    return quantized.without_transposed().dequantize(), quantized.without_data().dequantize()


def dequantized(x, recipe, role, copy="data"):
    """A matrix as products read one of its copies, in float64; of a single device's array."""
    return wide(both_copies(x.astype(np.float32), recipe, role)[copy == "transposed"])


@pytest.mark.parametrize(
    ("recipe", "name", "transport"),
    in_turns([*RECIPES, "block"], NAMES, TRANSPORTS),
)
def test_scales_are_those_of_the_whole(recipe, name, transport, rng):
    """Results and weight gradients are products of what one device would multiply, up to sums in float32."""
    case = fp8_case(rng, name, 2, dtype="float32", with_bias=False)
    found = computed(case, mesh_of({"tp": 2}), transport=transport, recipe=RECIPES[recipe])
    x, w, dy = case.x, case.weights[0], case.dys[0]
    gathers = case.gathers
    if recipe == "rowwise" and not gathers:  # the summed dimension is split: every device has scales of its own rows
        parts = [(x[:, i : i + 128], w[i : i + 128]) for i in (0, 128)]
        y = sum(dequantized(x, recipe, "activation") @ dequantized(w, recipe, "kernel", "transposed") for x, w in parts)
    else:
        y = dequantized(x, recipe, "activation") @ dequantized(w, recipe, "kernel", "transposed")
    assert_close(found.ys[0], y, tolerance=SUMS, dtype=jnp.float32)
    dw = dequantized(x, recipe, "activation", "transposed").T @ dequantized(dy, recipe, "gradient", "transposed")
    assert_close(found.dweights[0], dw, tolerance=SUMS, dtype=jnp.float32)
    if recipe != "rowwise":
        dx = dequantized(dy, recipe, "gradient") @ dequantized(w, recipe, "kernel").T
        assert_close(found.dx, dx, tolerance=SUMS, dtype=jnp.float32)


@last
@pytest.mark.parametrize(("recipe", "residual"), [("rowwise", "shard"), ("block", "gathered"), ("block", None)])
def test_batches_and_several_weights(recipe, residual, transport, rng):
    """Rows of a batch are gathered one after the other: scales and transposed copies are brought in their order."""
    name, outers = (NAMES[0], ((2, 128), (48,))) if residual else (NAMES[1], ((2, 128),))
    case = fp8_case(rng, name, 2, lead=(2,), rows=64, mid=(2,), inner=256, outers=outers)
    options = {"transport": transport, "recipe": RECIPES[recipe], **({"residual": residual} if residual else {})}
    check(case, mesh_of({"tp": 2}), tolerance=BOUNDS, **options)


@pytest.mark.parametrize(("recipe", "name"), in_turns(["rowwise", "block"], NAMES))
def test_a_ring_both_ways(recipe, name, rng):
    """Halves of rows, and the scales that belong to them."""
    case, mesh = fp8_case(rng, name, 2, lead=(2,), inner=256, outers=((64,),)), mesh_of({"tp": 2})
    check(case, mesh, tolerance=BOUNDS, transport=Ring(bidirectional=True), recipe=RECIPES[recipe])


@last
@pytest.mark.parametrize(
    ("recipe", "rows", "name"), [("current", 3, NAMES[1]), ("rowwise", 1, NAMES[0]), ("block", 128, NAMES[0])]
)
def test_any_number_of_rows(recipe, rows, name, transport, rng):
    """Tokens need no multiple of 16, in groups within a mesh whose other axis has other tokens."""
    case = fp8_case(rng, name, 2, lead=(2,), rows=rows, batch="dp", dtype="float32")
    mesh = mesh_of({"dp": 2, "tp": 2})
    check(case, mesh, tolerance=(0.06, 0.09), transport=transport, recipe=RECIPES[recipe])


@pytest.mark.parametrize(("fast", "name"), in_turns(["forward", "dgrad", "wgrad"], NAMES))
def test_fast_accumulation_is_that_of_each_product(fast, name, rng, native_kernels):
    """One product of two, the forward pass and a gradient."""
    case, mesh = fp8_case(rng, name, 2, with_bias=False), mesh_of({"tp": 2})
    mapped = case.mapped(mesh, transport="xla", recipe=CurrentScaling(fast_accumulation=(fast,)))

    def loss(x, weights):
        return jnp.sum(jnp.sin(mapped(x, weights, case.biases)[0]))

    gradient = jax.grad(loss, argnums=int(fast != "dgrad"))
    text = jax.jit(gradient).lower(case.x, case.weights).compile().as_text()
    assert (text.count("fast_accumulation = true"), text.count("fast_accumulation = ")) == (1, 2)


# --------------------------------------------------------------------------------------------------- what travels


def exchanged(case, mesh, backward, **options):
    """[(kind, dtype, elements)] of what is exchanged, without a few floats."""
    function, placed = case.mapped(mesh, **options), case.placed(mesh)
    if backward:

        @jax.jit
        def program(operands, dys):
            ys, vjp = jax.vjp(function, *operands)
            return ys, vjp(dys)

        compiled = program.lower(placed.operands, placed.dys).compile()
    else:
        compiled = jax.jit(function).lower(*placed.operands).compile()
    return sorted(
        (entry.kind, result.dtype, result.elements)
        for entry in collectives(compiled)
        for result in entry.results
        if result.elements > 16 * 128  # scales of rows, largest magnitudes and gradients of biases
    )


@pytest.mark.parametrize(("recipe", "name"), in_turns(["current", "block", "block"], NAMES[::-1]))
def test_bytes_travel(recipe, name, rng):
    """x or dy is gathered in one byte a value, and its transposed copy as well where its scales are others."""
    case, mesh = fp8_case(rng, name, 4, with_bias=False), mesh_of({"tp": 4})
    copies, whole, part = 1 if recipe == "current" else 2, 512 * 128, 128 * 128
    found = exchanged(case, mesh, True, transport="xla", recipe=RECIPES[recipe])
    assert found == [("all-gather", "u8", whole)] * copies + [("reduce-scatter", SUMMED, part)]


def test_bytes_travel_in_a_ring(rng):
    case, mesh = fp8_case(rng, NAMES[0], 4, with_bias=False), mesh_of({"tp": 4})
    options, part = {"transport": "ring", "recipe": RECIPES["rowwise"]}, 128 * 128
    assert exchanged(case, mesh, False, **options) == [("collective-permute", "u8", part)] * 3
    found = exchanged(case, mesh, True, **options)
    assert [entry for entry in found if entry[1] == "u8"] == [("collective-permute", "u8", part)] * 3 * 2
    assert len(found) == 3 * 2 + 3


# ----------------------------------------------------------------------------------------------- values that stand out


@last
def test_zeros_and_values_that_are_not_finite(transport, rng):
    """As `ops.quantize` treats them: one value of one device decides for all of a tensor with one scale."""
    case = fp8_case(rng, NAMES[0], 4, rows=16, dtype="float32", with_bias=False)
    run = jax.jit(case.mapped(mesh_of({"tp": 4}), transport=transport, recipe=RECIPES["current"]))
    for value in (0.0, np.nan, np.inf):
        x = np.zeros(case.x.shape, np.float32) if value == 0 else np.array(case.x)
        x[5, 7] = value
        expected = dequantized(x, "current", "activation") @ dequantized(
            case.weights[0], "current", "kernel", "transposed"
        )
        assert np.isnan(expected).any() == (value != 0)
        (y,) = run(x, case.weights, (None,))
        assert_close(y, expected, tolerance=SUMS, dtype=jnp.float32, equal_nan=True)


@pytest.mark.parametrize(("recipe", "scales"), [(CurrentScaling(), "tensors"), (RowwiseScaling(), "features")])
def test_an_x_whose_scales_do_not_agree(recipe, scales):
    x, w = jnp.ones((32, 32)), jnp.ones((32, 32))

    def layer(x, w, **options):
        x8 = ops.quantize(x, recipe.quantization("activation"), **options)
        return all_gather_matmul(x8, w, axis_name="tp", recipe=recipe, transport="ring")

    def run(**options):
        mapped = functools.partial(layer, **options)
        specs = P("tp"), P(None, "tp")
        jax.eval_shape(jax.shard_map(mapped, mesh=mesh_of({"tp": 2}), in_specs=specs, out_specs=specs[1]), x, w)

    with pytest.raises(ValueError, match=rf"along \['tp'\]; scales of {scales}.*quantize it with amax_axis"):
        run()
    run(amax_axis="tp")
