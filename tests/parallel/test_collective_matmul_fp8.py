"""Collective products in FP8: against float64 and against what one device computes, and what travels."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collective_oracle import FUNCTIONS, TRANSPORTS, check, computed, mesh_of, oracle, random_case, wide
from compiled import results_and_gradients
from jax.sharding import PartitionSpec as P
from parameters import in_turns

from te_jax import ops
from te_jax.hlo import collectives
from te_jax.parallel import Ring, all_gather_matmul, matmul_reduce_scatter
from te_jax.recipe import BlockScaling, CurrentScaling, RowwiseScaling
from te_jax.testing import assert_close

RECIPES = {"current": CurrentScaling(), "rowwise": RowwiseScaling(), "block": BlockScaling()}
BOUNDS = (0.055, 0.085)  # relative L2 errors on normal data: forward, gradients
SUMMED = "f32" if jax.default_backend() == "cpu" else "bf16"  # in which XLA adds results in bfloat16 up
SUMS = 1e-5 if jax.default_backend() == "cpu" else 1e-3  # FP8 tensor cores add up with about 14 bits

transports = pytest.mark.parametrize("transport", TRANSPORTS)
last = pytest.mark.parametrize("transport", TRANSPORTS[-1:])  # where the transport matters little
NAMES = ["all_gather_matmul", "matmul_reduce_scatter"]
functions = pytest.mark.parametrize("name", NAMES)
recipes = pytest.mark.parametrize("recipe", RECIPES)


def every_second():
    """Half of all recipes, functions and transports, with every pair of two of them."""
    choices = [
        (recipe, name, transport)
        for i, recipe in enumerate(RECIPES)
        for j, name in enumerate(("all_gather_matmul", "matmul_reduce_scatter"))
        for k, transport in enumerate(TRANSPORTS)
        if (i + j + k) % 2 == 0
    ]
    return pytest.mark.parametrize(("recipe", "name", "transport"), choices)


def fp8_case(rng, name, size, *, rows=128, inner=128, outers=((128,),), dtype="bfloat16", **options):
    """Tokens of different magnitude, larger in x where they are smaller in the gradient: scales that are those of other
    tokens, and tokens in another order, would show."""
    case = random_case(rng, name, size, rows=rows, inner=inner, outers=outers, dtype=dtype, **options)
    tokens = case.x.shape[:-1]
    magnitudes = jnp.exp2(6 * rng.permutation(math.prod(tokens)) / math.prod(tokens)).astype(case.x.dtype)
    magnitudes = magnitudes.reshape(*tokens, 1)
    x = case.x * magnitudes
    dys = tuple(dy / magnitudes.reshape(*tokens, *(1,) * (dy.ndim - len(tokens))) for dy in case.dys)
    return dataclasses.replace(case, x=x, dys=dys)


@every_second()
def test_values_and_gradients(recipe, name, transport, rng, require_devices):
    require_devices(2)
    case = fp8_case(rng, name, 2)
    check(case, mesh_of({"tp": 2}), tolerance=BOUNDS, transport=transport, recipe=RECIPES[recipe])


def dequantized(x, recipe, role, copy="data"):
    """A matrix as products read one of its copies, in float64; of a single device's array."""
    quantized = ops.quantize(x.astype(jnp.float32), RECIPES[recipe].quantization(role), implementation="reference")
    return wide((quantized.without_transposed() if copy == "data" else quantized.without_data()).dequantize())


@pytest.mark.parametrize(
    ("recipe", "name", "transport"),
    [*in_turns(list(RECIPES), NAMES, TRANSPORTS), *in_turns(list(RECIPES), NAMES[::-1], TRANSPORTS[::-1])],
)
def test_scales_are_those_of_the_whole(recipe, name, transport, rng, require_devices):
    """Results and weight gradients are products of what one device would multiply, up to sums in float32."""
    require_devices(2)
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
@pytest.mark.parametrize(
    ("recipe", "residual"), [("current", "shard"), ("rowwise", "shard"), ("block", "shard"), ("block", "gathered")]
)
def test_batches_and_several_weights(recipe, residual, transport, rng, require_devices):
    """Rows of a batch are gathered one after the other: scales and transposed copies are brought in their order."""
    require_devices(2)
    case = fp8_case(rng, "all_gather_matmul", 2, lead=(2,), rows=64, mid=(2,), inner=256, outers=((2, 128), (48,)))
    case = dataclasses.replace(case, biases=(None, case.biases[1]))
    options = {"transport": transport, "recipe": RECIPES[recipe], "residual": residual}
    check(case, mesh_of({"tp": 2}), tolerance=BOUNDS, **options)


@last
@recipes
def test_batches_of_a_scatter(recipe, transport, rng, require_devices):
    require_devices(2)
    case = fp8_case(rng, "matmul_reduce_scatter", 2, lead=(2,), rows=64, mid=(2,), inner=256, outers=((2, 128),))
    check(case, mesh_of({"tp": 2}), tolerance=BOUNDS, transport=transport, recipe=RECIPES[recipe])


@last
@pytest.mark.parametrize(
    ("recipe", "name", "residual"),
    [
        ("none", NAMES[0], "gathered"),
        ("none", NAMES[1], None),
        ("current", NAMES[1], None),
        ("rowwise", NAMES[0], "gathered"),
        ("block", NAMES[0], "shard"),
        ("block", NAMES[1], None),
    ],
)
def test_transposed_kernels(recipe, name, residual, transport, rng, require_devices):
    """[*N, K], as checkpoints have them, plain and quantized before: the same as one device computes."""
    require_devices(2)
    case = fp8_case(rng, name, 2, lead=(2,), outers=((2, 128),), dtype="float32")
    weight, rowwise, recipe = jnp.moveaxis(case.weights[0], 0, -1), recipe == "rowwise", RECIPES.get(recipe)
    options = {"recipe": recipe, "kernel_contracting": "last"}
    x_spec, _, (bias_spec,) = case.specs
    weight_spec = P("tp") if case.gathers else P(None, None, "tp")

    def local(x, weight, bias, accumulator):
        collective = {"transport": transport, **({"residual": residual} if residual else {})}
        if accumulator is not None and recipe:
            axes = {"rows" if case.gathers else "cols": "tp"} if recipe.scalings["kernel"][0] == "tensor" else None
            weight = ops.quantize(weight, recipe.quantization("kernel"), row_ndim=2, amax_axis=axes)
        (y,) = case.call(x, (weight,), (bias,), wgrad_accumulator=accumulator, **options, **collective)
        return y

    def alone(x, weight, bias, accumulator):
        return ops.dense(x, weight, bias, wgrad_accumulator=accumulator, **options)

    for accumulator in (None, jnp.full_like(weight, 2.0)):
        specs = x_spec, weight_spec, bias_spec, None if accumulator is None else weight_spec
        mapped = jax.shard_map(local, mesh=mesh_of({"tp": 2}), in_specs=specs, out_specs=case.result_specs[0])
        operands = case.x, weight, case.biases[0], accumulator
        found, expected = (results_and_gradients(layer, operands, case.dys[0]) for layer in (mapped, alone))
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            # On each device rows of dy have scales of its columns, where they are of rows.
            assert_close(one, other, tolerance=BOUNDS[1] if rowwise else SUMS)


@pytest.mark.parametrize(("recipe", "name"), in_turns(["rowwise", "block"], NAMES))
def test_a_ring_both_ways(recipe, name, rng, require_devices):
    """Halves of rows, and the scales that belong to them."""
    require_devices(2)
    case, mesh = fp8_case(rng, name, 2, lead=(2,), inner=256, outers=((64,),)), mesh_of({"tp": 2})
    check(case, mesh, tolerance=BOUNDS, transport=Ring(bidirectional=True), recipe=RECIPES[recipe])


@functions
def test_a_ring_both_ways_cuts_blocks_into_rows_that_products_take(name, rng, require_devices):
    """Of 12 rows the half is no multiple of 4."""
    require_devices(2)
    case, mesh = fp8_case(rng, name, 2, rows=12, outers=((64,),)), mesh_of({"tp": 2})
    mapped = case.mapped(mesh, transport=Ring(bidirectional=True), recipe=RECIPES["block"])
    (y,) = jax.jit(mapped)(*case.operands)
    assert_close(y, oracle(case).ys[0], tolerance=BOUNDS[0], dtype=jnp.bfloat16)


@last
@pytest.mark.parametrize(
    ("recipe", "rows", "name"),
    [("current", 3, NAMES[1]), ("rowwise", 1, NAMES[0]), ("block", 128, NAMES[0]), ("block", 128, NAMES[1])],
)
def test_any_number_of_rows(recipe, rows, name, transport, rng, require_devices):
    """Tokens need no multiple of 16, in groups within a mesh whose other axis has other tokens."""
    require_devices(4)
    case = fp8_case(rng, name, 2, lead=(2,), rows=rows, batch="dp", dtype="float32")
    mesh = mesh_of({"dp": 2, "tp": 2})
    check(case, mesh, tolerance=(0.06, 0.09), transport=transport, recipe=RECIPES[recipe])


@pytest.mark.parametrize(("recipe", "name"), in_turns(list(RECIPES), NAMES))
def test_one_device(recipe, name, rng):
    """Just the layer that there is, without collectives."""
    case, mesh = fp8_case(rng, name, 1, rows=64), mesh_of({"tp": 1})
    found = computed(case, mesh, recipe=RECIPES[recipe])
    (w,), (b,), (dy,) = case.weights, case.biases, case.dys
    y, vjp = jax.vjp(lambda *a: ops.dense(*a, recipe=RECIPES[recipe]), case.x, w, b)
    for one, other in zip((*found.ys, found.dx, *found.dweights, *found.dbiases), (y, *vjp(dy)), strict=True):
        assert_close(one, other, tolerance=1e-3)


@pytest.mark.parametrize(("fast", "name"), in_turns(["forward", "dgrad", "wgrad"], NAMES))
def test_fast_accumulation_is_that_of_each_product(fast, name, rng, require_devices, native_kernels):
    require_devices(2)
    case, mesh = fp8_case(rng, name, 2, with_bias=False), mesh_of({"tp": 2})
    mapped = case.mapped(mesh, transport="xla", recipe=CurrentScaling(fast_accumulation=(fast,)))

    def fast_and_all(program):
        text = jax.jit(program).lower(case.x, case.weights).compile().as_text()
        return text.count("fast_accumulation = true"), text.count("fast_accumulation = ")

    def forward(x, weights):
        return mapped(x, weights, case.biases)[0]

    def gradient(of):
        return jax.grad(lambda *operands: jnp.sum(jnp.sin(forward(*operands))), argnums=of)

    assert fast_and_all(forward) == (int(fast == "forward"), 1)
    assert fast_and_all(gradient(0)) == (int(fast in ("forward", "dgrad")), 2)
    assert fast_and_all(gradient(1)) == (int(fast in ("forward", "wgrad")), 2)


@functions
def test_the_bias_alone_is_differentiated(name, rng, require_devices):
    require_devices(2)
    case, mesh = fp8_case(rng, name, 2, dtype="float32"), mesh_of({"tp": 2})

    def of_bias(biases):
        return case.mapped(mesh, recipe=RECIPES["current"])(case.x, case.weights, biases)

    ((found,),) = jax.jit(lambda biases, dys: jax.vjp(of_bias, biases)[1](dys))(case.biases, case.dys)
    assert_close(found, oracle(case).dbiases[0], dtype=jnp.float32)


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


@pytest.mark.parametrize("recipe", ["current", "rowwise", "block"])
def test_bytes_travel(recipe, rng, require_devices):
    """x is gathered in one byte a value, and its transposed copy as well where its scales are others."""
    require_devices(4)
    case, mesh = fp8_case(rng, "all_gather_matmul", 4, with_bias=False), mesh_of({"tp": 4})
    options = {"recipe": RECIPES[recipe]}
    copies = 1 if recipe == "current" else 2
    whole, part = 512 * 128, 128 * 128
    assert exchanged(case, mesh, False, transport="xla", **options) == [("all-gather", "u8", whole)]
    assert exchanged(case, mesh, False, transport="ring", **options) == [("collective-permute", "u8", part)] * 3
    found = exchanged(case, mesh, True, transport="xla", **options)
    assert found == [("all-gather", "u8", whole)] * copies + [("reduce-scatter", SUMMED, part)]
    found = exchanged(case, mesh, True, transport="ring", **options)
    assert [entry for entry in found if entry[1] == "u8"] == [("collective-permute", "u8", part)] * 3 * copies
    assert len(found) == 3 * copies + 3


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_bytes_of_gradients_travel(recipe, rng, require_devices):
    require_devices(4)
    case, mesh = fp8_case(rng, "matmul_reduce_scatter", 4, with_bias=False), mesh_of({"tp": 4})
    found = exchanged(case, mesh, True, transport="xla", recipe=RECIPES[recipe])
    gathered = [("all-gather", "u8", 512 * 128)] * (1 if recipe == "current" else 2)
    assert found == [*gathered, ("reduce-scatter", SUMMED, 128 * 128)]


def test_remat_keeps_fp8(rng, require_devices):
    require_devices(4)
    case, mesh = fp8_case(rng, "all_gather_matmul", 4, with_bias=False), mesh_of({"tp": 4})
    policy = jax.checkpoint_policies.save_only_these_names("te_collective_activation", "te_collective_kernel")
    mapped = case.mapped(mesh, transport="xla", recipe=RECIPES["block"])
    layer = jax.checkpoint(lambda x, weights: mapped(jnp.sin(x), weights, case.biases), policy=policy)
    _, vjp = jax.jit(lambda x, weights: jax.vjp(layer, x, weights))(case.x, case.weights)
    kept = sorted((leaf.dtype.name, leaf.size) for leaf in jax.tree.leaves(vjp) if leaf.size)
    # x, of which sin is differentiated; x in FP8 from all devices, on each of them; w; the scales of both.
    whole = 512 * 128
    codes = [("float8_e4m3fn", whole), ("float8_e4m3fn", 4 * whole)]
    assert kept == [("bfloat16", whole), ("float32", 4), ("float32", 4 * whole // 128), *codes]


# ----------------------------------------------------------------------------------------- quantized before


@last
@pytest.mark.parametrize(("recipe", "name"), [*in_turns(list(RECIPES), NAMES), ("block", NAMES[1])])
def test_quantized_operands(recipe, name, transport, rng, require_devices):
    """x and w quantized by the caller give the same, and the gradients: that of x passes through, that of w is added to
    an accumulator. Blocks may be short."""
    require_devices(2)
    case = fp8_case(rng, name, 2, lead=(2,), inner=144, outers=((2, 128),), with_bias=False)
    mesh = mesh_of({"tp": 2})
    gathers, recipe = case.gathers, RECIPES[recipe]
    agreed = "tensor" in recipe.scalings["kernel"]

    def quantized(x, w):
        sides = ("rows", "cols") if gathers else ("cols", "rows")
        axes = [{side: "tp"} if agreed or (gathers and role == 0) else None for role, side in enumerate(sides)]
        return (
            ops.quantize(x, recipe.quantization("activation"), amax_axis=axes[0]),
            ops.quantize(w, recipe.quantization("kernel"), row_ndim=1, amax_axis=axes[1]),
        )

    def local(x, w, dy):
        x8, w8 = quantized(x, w)
        options = {"transport": transport, "recipe": recipe}
        (y,), vjp = jax.vjp(lambda x, w: case.call(x, (w,), (None,), **options), x, w)
        (y_of_quantized,) = case.call(x8, (w8,), (None,), **options)

        def of_quantized(x, accumulator):
            x8 = dataclasses.replace(quantized(x, w)[0], straight_through=x)
            return case.call(x8, (w8,), (None,), wgrad_accumulator=accumulator, **options)

        accumulator = jnp.full_like(w, 2.0)
        dx, dw = jax.vjp(of_quantized, x, accumulator)[1]((dy,))
        return (y, *vjp((dy,))), (y_of_quantized, dx, dw - accumulator)

    x_spec, (w_spec,), _ = case.specs
    results = (case.result_specs[0], x_spec, w_spec)
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(x_spec, w_spec, case.result_specs[0]), out_specs=(results, results)
    )
    for one, other in zip(*jax.jit(mapped)(case.x, case.weights[0], case.dys[0]), strict=True):
        assert_close(one, other, tolerance=3e-3)  # an accumulator in 16 bits rounds what it adds to


@functions
@pytest.mark.parametrize(("which", "problem"), [(0, "x is a QuantizedArray"), (1, "kernel is a QuantizedArray")])
def test_quantized_operands_have_no_gradient_of_their_own(which, problem, name, require_devices):
    require_devices(2)
    recipe = RECIPES["current"]
    call = functools.partial(FUNCTIONS[name], axis_name="tp", recipe=recipe)

    def gradients(x, w):
        x, w = (jax.lax.pcast(operand, "tp", to="varying") for operand in (x, w))
        x8 = ops.quantize(x, recipe.quantization("activation"), amax_axis="tp")
        w8 = ops.quantize(w, recipe.quantization("kernel"), amax_axis="tp")
        found = jax.grad(lambda *operands: jnp.sum(call(*operands)), argnums=which)(x8, w8)
        return [leaf[None] for leaf in jax.tree.leaves(found)]

    run = jax.shard_map(gradients, mesh=mesh_of({"tp": 2}), in_specs=P(), out_specs=P("tp"))
    with pytest.raises(NotImplementedError, match=problem):
        jax.eval_shape(run, jnp.ones((32, 32)), jnp.ones((32, 32)))


def test_copies_that_are_missing(rng, require_devices):
    """Forward they are not needed; a gradient that needs one says so."""
    require_devices(2)
    mesh = mesh_of({"tp": 2})
    recipe = RECIPES["block"]
    case = fp8_case(rng, "all_gather_matmul", 2, with_bias=False)

    def local(x, w, of):
        x8 = ops.quantize(x, recipe.quantization("activation"), copies="data")
        w8 = ops.quantize(w, recipe.quantization("kernel"), copies="transposed")
        options = {"axis_name": "tp", "recipe": recipe}
        if of == "x":
            return jax.vjp(lambda x: all_gather_matmul(x, w8, **options), x)[0]
        if of == "x, of several":
            return jax.vjp(lambda x: all_gather_matmul(x, (w, w8), **options)[1], x)[0]
        if of == "w":
            return jax.vjp(lambda w: all_gather_matmul(x8, w, **options), w)[0]
        return all_gather_matmul(x8, w8, **options)

    def run(of):
        x_spec, (w_spec,), _ = case.specs
        mapped = jax.shard_map(
            lambda x, w: local(x, w, of), mesh=mesh, in_specs=(x_spec, w_spec), out_specs=case.result_specs[0]
        )
        return jax.jit(mapped)(case.x, case.weights[0])

    assert_close(run("nothing"), oracle(case).ys[0], tolerance=BOUNDS[0], dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="kernel has no data copy, which the gradient with respect to x reads"):
        run("x")
    with pytest.raises(ValueError, match=r"kernel\[1\] has no data copy, which the gradient with respect to x reads"):
        run("x, of several")
    with pytest.raises(ValueError, match="x has no transposed copy, which the gradient with respect to kernel reads"):
        run("w")


# ----------------------------------------------------------------------------------------------- values that stand out


@last
@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_zeros_and_values_that_are_not_finite(value, transport, rng, require_devices):
    """As `ops.quantize` treats them: one value of one device decides for all of a tensor with one scale."""
    require_devices(4)
    case = fp8_case(rng, "all_gather_matmul", 4, rows=16, dtype="float32", with_bias=False)
    x = np.zeros(case.x.shape, np.float32) if value == 0 else np.array(case.x)
    x[5, 7] = value
    found = jax.jit(case.mapped(mesh_of({"tp": 4}), transport=transport, recipe=RECIPES["current"]))(
        jnp.asarray(x), case.weights, (None,)
    )
    expected = dequantized(jnp.asarray(x), "current", "activation") @ dequantized(
        case.weights[0], "current", "kernel", "transposed"
    )
    assert np.isnan(expected).any() == (value != 0)
    assert_close(found[0], expected, tolerance=SUMS, dtype=jnp.float32, equal_nan=True)


@last
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_layer_in_a_loop(check_vma, transport, rng, require_devices):
    """Both products, scanned, differentiated inside a mesh with other axes; weights replicated over dp."""
    require_devices(4)
    mesh = mesh_of({"dp": 2, "tp": 2})
    x = rng.standard_normal((2, 64, 64)).astype(np.float32)
    up = (rng.standard_normal((2, 64, 128)) / 8).astype(np.float32)
    down = (rng.standard_normal((2, 128, 64)) / 11).astype(np.float32)
    options = {"axis_name": "tp", "recipe": RECIPES["rowwise"], "transport": transport}

    def layer(x, kernels):
        return x + matmul_reduce_scatter(all_gather_matmul(x, kernels[0], **options), kernels[1], **options), None

    mapped = jax.shard_map(
        lambda x, up, down: jax.lax.scan(layer, x, (up, down))[0],
        mesh=mesh, in_specs=(P("dp", "tp"), P(None, None, "tp"), P(None, "tp")), out_specs=P("dp", "tp"),
        check_vma=check_vma,
    )  # fmt: skip

    def exact(x, up, down):
        for i in range(2):
            x = x + x @ up[i] @ down[i]
        return x

    def gradients(function):
        return jax.jit(jax.grad(lambda *a: jnp.sum(jnp.square(function(*a))), argnums=(0, 1, 2)))(x, up, down)

    for found, expected in zip(gradients(mapped), gradients(exact), strict=True):
        assert_close(found, expected, tolerance=0.1)


@pytest.mark.parametrize(("recipe", "scales"), [(CurrentScaling(), "tensors"), (RowwiseScaling(), "features")])
def test_an_x_whose_scales_do_not_agree(recipe, scales, require_devices):
    require_devices(2)
    x, w = jnp.ones((32, 32)), jnp.ones((32, 32))

    def layer(x, w, **options):
        x8 = ops.quantize(x, recipe.quantization("activation"), **options)
        return all_gather_matmul(x8, w, axis_name="tp", recipe=recipe, transport="ring")

    def run(**options):
        mapped = functools.partial(layer, **options)
        return jax.jit(
            jax.shard_map(mapped, mesh=mesh_of({"tp": 2}), in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp"))
        )(x, w)

    with pytest.raises(ValueError, match=rf"along \['tp'\]; scales of {scales}.*quantize it with amax_axis"):
        run()
    run(amax_axis="tp")


@functions
@pytest.mark.parametrize("recipe", [CurrentScaling(), RowwiseScaling()], ids=["current", "rowwise"])
def test_second_derivatives_say_so(name, recipe, rng, require_devices):
    """They would be zero."""
    require_devices(2)
    case, mesh = fp8_case(rng, name, 2), mesh_of({"tp": 2})
    function = all_gather_matmul if name == "all_gather_matmul" else matmul_reduce_scatter
    x_spec, (w_spec,), _ = case.specs
    layer = functools.partial(function, axis_name="tp", recipe=recipe, transport="ring")
    mapped = jax.shard_map(layer, mesh=mesh, in_specs=(x_spec, w_spec), out_specs=case.result_specs[0])

    def slope(w):
        return jnp.square(jax.grad(lambda x: mapped(x, w).astype(jnp.float32).sum())(case.x)).sum()

    with pytest.raises(NotImplementedError, match=rf"{name} in FP8 is differentiated once.*recipe=None"):
        jax.jit(jax.grad(slope))(case.weights[0])


@pytest.mark.skipif("p2p" not in TRANSPORTS, reason="needs te_jax's extension")
@pytest.mark.parametrize(("recipe", "name"), in_turns([None, *RECIPES], NAMES))
def test_gradients_that_are_not_used_are_removed(name, recipe, rng, require_devices):
    """The backward pass computes all of them, and XLA removes the calls of those that nothing reads."""
    require_devices(2)
    case, mesh = fp8_case(rng, name, 2, with_bias=False), mesh_of({"tp": 2})
    mapped = case.mapped(mesh, transport="p2p", recipe=RECIPES.get(recipe))

    def loss(x, weights):
        return jnp.sum(jnp.sin(mapped(x, weights, case.biases)[0]))

    def calls(function):
        text = jax.jit(function).lower(case.x, case.weights).compile().as_text()
        targets = "te_all_gather_gemm", "te_gemm_reduce_scatter", "te_gemm"
        return [text.count(f'custom_call_target="{target}"') for target in targets]

    wgrad = int(recipe is not None)  # otherwise XLA's own product
    scatters = int(not case.gathers)
    assert calls(loss) == [1 - scatters, scatters, 0]
    assert calls(jax.grad(loss)) == [1, 1, 0]
    assert calls(jax.grad(loss, argnums=1)) == [1, scatters, wgrad]
    assert calls(jax.grad(loss, argnums=(0, 1))) == [1, 1, wgrad]
