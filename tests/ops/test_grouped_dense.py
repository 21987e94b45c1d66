"""Linear layers of experts against a loop over experts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import results_and_gradients
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from ops.gemm_oracle import random_array, wide
from parameters import in_turns

from te_jax import ops
from te_jax.ops.linear.arguments import quantization_of
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling
from te_jax.testing import assert_close

pytestmark = pytest.mark.skipif(
    jax.default_backend() == "gpu", reason="float32, which has no kernel on a GPU: see tests/gpu"
)

ROWS, IN, OUT, EXPERTS = 512, 192, 128, 3
SIZES = {"aligned": [128, 0, 256], "uneven": [37, 100, 250], "all": [0, 512, 0]}
RECIPES = {"none": None, "block": BlockScaling(), "row": RowwiseScaling(), "current": CurrentScaling()}
FORWARD, GRADIENT = 0.055, 0.085  # what FP8 costs on normal data; see tests/ops/dense_oracle.py
IMPLEMENTATIONS = ("native", "reference")

sides = pytest.mark.parametrize("kernel_contracting", ["first", "last"])


def draw(rng, dtype="float32", rows=ROWS):
    x, dy = random_array(rng, (rows, IN), dtype), random_array(rng, (rows, OUT), dtype)
    return x, random_array(rng, (EXPERTS, IN, OUT), dtype), random_array(rng, (EXPERTS, OUT), dtype), dy


def expected(x, kernel, bias, dy, sizes):
    """y and gradients in float64."""
    x, kernel, bias, dy = map(wide, (x, kernel, bias, dy))
    y, dx = np.zeros((len(x), OUT)), np.zeros_like(x)
    dkernel, dbias = np.zeros_like(kernel), np.zeros_like(bias)
    begin = 0
    for e, size in enumerate(sizes):
        rows = slice(begin, begin := begin + size)
        y[rows] = x[rows] @ kernel[e] + bias[e]
        dx[rows] = dy[rows] @ kernel[e].T
        dkernel[e], dbias[e] = x[rows].T @ dy[rows], dy[rows].sum(axis=0)
    return y, (dx, dkernel, dbias)


@functools.cache
def step_of(**options):
    @jax.jit
    def step(x, kernel, bias, dy, sizes):
        y, vjp = jax.vjp(lambda *a: ops.grouped_dense(*a[:2], sizes, a[2], **options), x, kernel, bias)
        return y, vjp(dy)

    return step


@pytest.mark.parametrize(
    ("recipe", "implementation", "sizes", "dtype"),
    in_turns([*RECIPES, *RECIPES, *RECIPES], ["native", "native", "reference"], list(SIZES), ["float32", "bfloat16"]),
)
def test_values_and_gradients(rng, recipe, implementation, sizes, dtype):
    x, kernel, bias, dy = draw(rng, dtype)
    step = step_of(recipe=RECIPES[recipe], implementation=implementation)
    y, gradients = step(x, kernel, bias, dy, np.int32(SIZES[sizes]))
    wanted, wanted_gradients = expected(x, kernel, bias, dy, SIZES[sizes])
    fp8 = recipe != "none"
    assert_close(y, wanted, dtype=dtype, tolerance=FORWARD if fp8 else None)
    for gradient, other, exact in zip(gradients, wanted_gradients, (not fp8, not fp8, True), strict=True):
        assert_close(gradient, other, dtype=dtype, tolerance=None if exact else GRADIENT)
    for e, size in enumerate(SIZES[sizes]):
        assert size or not np.asarray(gradients[1])[e].any(), "an expert without rows has a gradient"


@sides
@pytest.mark.parametrize("recipe", ["block", "row", "none"])
def test_as_one_dense_for_each_expert(rng, recipe, kernel_contracting):
    """Where experts begin at blocks, FP8 values and scales of blocks are those of layers of their own."""
    x, kernel, bias, dy = draw(rng)
    options = {"recipe": RECIPES[recipe], "kernel_contracting": kernel_contracting}
    kernel = kernel if kernel_contracting == "first" else jnp.array(kernel.mT)
    found = step_of(**options)(x, kernel, bias, dy, np.int32(SIZES["aligned"]))
    x, kernel, bias, dy, (y, (dx, dkernel, _)) = jax.tree.map(np.asarray, (x, kernel, bias, dy, found))
    dense = functools.partial(ops.dense, **options)
    for e, rows in ((0, slice(0, 128)), (2, slice(128, 384))):
        alone, (of_x, of_kernel, _) = results_and_gradients(dense, (x[rows], kernel[e], bias[e]), dy[rows])
        assert_close(y[rows], alone, tolerance=1e-6)
        assert_close(dx[rows], of_x, tolerance=1e-6)
        if recipe != "row":  # scales of rows of the transposed copies are over all tokens
            assert_close(dkernel[e], of_kernel, tolerance=1e-6)


@pytest.mark.parametrize(("recipe", "implementation"), in_turns(RECIPES, IMPLEMENTATIONS))
def test_kernel_in_a_dtype_of_its_own(rng, recipe, implementation):
    """A float32 kernel of a bfloat16 x is quantized as it is, each expert as if alone, and has a float32 gradient."""
    x, _, bias, dy = draw(rng, "bfloat16")
    kernel, sizes = random_array(rng, (EXPERTS, IN, OUT)), SIZES["uneven"]
    rounded = np.asarray(kernel).astype(jnp.bfloat16)
    options = {"recipe": recipe, "implementation": implementation}
    step = step_of(**options)
    y, (dx, dkernel, dbias) = step(x, kernel, bias, dy, np.int32(sizes))
    of_rounded, (_, dkernel_of_rounded, _) = step(x, rounded, bias, dy, np.int32(sizes))
    assert [a.dtype for a in (y, dx, dkernel, dbias)] == [jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.bfloat16]
    np.testing.assert_array_equal(
        np.asarray(dkernel).astype(jnp.bfloat16), dkernel_of_rounded, "rounded once, at the end"
    )
    assert not np.array_equal(dkernel, wide(dkernel_of_rounded)), "the gradient has been rounded to bfloat16"
    if recipe is None:
        wanted, (_, wanted_dkernel, _) = expected(x, rounded, bias, dy, sizes)
        assert_close(y, wanted, dtype="bfloat16")
        assert_close(dkernel, wanted_dkernel, dtype="float32")
        return
    assert not np.array_equal(y, of_rounded), "the kernel was rounded to bfloat16 first"

    @jax.jit
    def of_quantized(kernel):
        alone = [ops.quantize(k, recipe.quantization("kernel"), implementation=implementation) for k in kernel]
        kernel8 = jax.tree.map(lambda *leaves: jnp.stack(leaves), *alone)
        return ops.grouped_dense(x, kernel8, np.int32(sizes), bias, **options)

    np.testing.assert_array_equal(y, of_quantized(kernel))
    assert_close(y, expected(x, kernel, bias, dy, sizes)[0], dtype="bfloat16", tolerance=FORWARD)


def test_kernels_of_several_dtypes(rng):
    """Each has its own rules; the accumulator of a float32 kernel gets what its gradient would be."""
    x, up, _, dy = draw(rng, "bfloat16")
    gate, sizes, options = random_array(rng, up.shape), np.int32(SIZES["aligned"]), {"recipe": BlockScaling()}

    @jax.jit
    def together(gate, up, accumulator):
        def layer(gate, up, accumulator):
            return ops.grouped_dense(x, (gate, up), sizes, wgrad_accumulator=(accumulator, None), **options)

        return jax.vjp(layer, gate, up, accumulator)[1]((dy, dy))

    no_bias = np.zeros((EXPERTS, OUT), np.float32)
    of_gate, of_up = (step_of(**options)(x, kernel, no_bias, dy, sizes)[1][1] for kernel in (gate, up))
    zeros, found_up, found_gate = together(gate, up, np.zeros_like(gate))
    assert not np.any(zeros)
    np.testing.assert_array_equal(found_gate, of_gate, strict=True)
    np.testing.assert_array_equal(found_up, of_up, strict=True)


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_of_no_expert_are_never_read(rng, recipe):
    x, kernel, bias, dy = draw(rng)
    step, sizes = step_of(recipe=RECIPES[recipe]), np.int32(SIZES["uneven"])
    outside = np.arange(ROWS)[:, None] >= sum(SIZES["uneven"])
    found, clean = (
        step(np.where(outside, value, x), kernel, bias, np.where(outside, value, dy), sizes)
        for value in (np.float32(np.nan), np.float32(0))
    )
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("recipe", ["none", "block"])
def test_several_kernels(rng, recipe):
    """One quantized x; gradients add up."""
    x, gate, bias, dy = draw(rng)
    _, up, _, dup = draw(rng)
    sizes, options = np.int32(SIZES["uneven"]), {"recipe": RECIPES[recipe]}

    @jax.jit
    def together(x, gate, up, dy, dup):
        ys, vjp = jax.vjp(lambda x, *k: ops.grouped_dense(x, k, sizes, (bias, None), **options), x, gate, up)
        return ys, vjp((dy, dup))

    (of_gate, of_up), (dx, *dkernels) = together(x, gate, up, dy, dup)
    y1, (dx1, dgate, _) = step_of(**options)(x, gate, bias, dy, sizes)
    y2, (dx2, dup_kernel, _) = step_of(**options)(x, up, np.zeros_like(bias), dup, sizes)
    dx1, dx2 = np.asarray(dx1), np.asarray(dx2)
    for found, wanted in ((of_gate, y1), (of_up, y2), (dkernels[0], dgate), (dkernels[1], dup_kernel), (dx, dx1 + dx2)):
        assert_close(found, wanted, tolerance=1e-6)


@sides
def test_quantized_kernel(rng, kernel_contracting):
    """Quantized once, it serves several microbatches; its gradient goes to the accumulator."""
    recipe = BlockScaling()
    x, kernel, bias, dy = draw(rng)
    kernel = kernel if kernel_contracting == "first" else jnp.array(kernel.mT)
    sizes, options = jnp.asarray(SIZES["aligned"]), {"recipe": recipe, "kernel_contracting": kernel_contracting}
    kernel8 = jax.vmap(lambda k: ops.quantize(k, recipe.quantization("kernel")))(kernel)
    wanted, (dx, dkernel, _) = step_of(**options)(x, kernel, bias, dy, sizes)

    def layer(x, accumulator):
        return ops.grouped_dense(x, kernel8, sizes, bias, wgrad_accumulator=accumulator, **options)

    y, vjp = jax.vjp(jax.jit(layer), x, jnp.zeros_like(kernel))
    of_x, of_kernel = vjp(dy)
    np.testing.assert_array_equal(y, wanted)
    np.testing.assert_array_equal(of_x, dx)
    assert_close(of_kernel, dkernel, tolerance=1e-6)
    with pytest.raises(NotImplementedError, match="kernel is a QuantizedArray without straight_through"):
        jax.grad(lambda k: ops.grouped_dense(x, k, sizes, **options).sum(), allow_int=True)(kernel8)


@pytest.mark.parametrize(
    ("recipe", "kernel_contracting"), [("block", "first"), ("block", "last"), ("row", "last"), ("current", "first")]
)
def test_x_in_fp8(rng, recipe, kernel_contracting):
    """Values and gradients are those of the plain x, bit for bit."""
    x, kernel, bias, dy = draw(rng)
    sizes, recipe = jnp.asarray(SIZES["uneven"]), RECIPES[recipe]
    x = x.at[387:].set(0)  # rows of no expert share scales with others
    kernel = kernel if kernel_contracting == "first" else jnp.array(kernel.mT)
    options = {"recipe": recipe, "kernel_contracting": kernel_contracting}
    quantization = quantization_of(recipe, "activation", kernel_contracting)

    @jax.jit
    def step(x, kernel, bias, dy):
        def layer(x, kernel, bias):
            x8 = ops.quantize(x, quantization, straight_through=True)
            return ops.grouped_dense(x8, kernel, sizes, bias, **options)

        y, vjp = jax.vjp(layer, x, kernel, bias)
        return y, vjp(dy)

    found, wanted = step(x, kernel, bias, dy), step_of(**options)(x, kernel, bias, dy, sizes)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    x8 = ops.quantize(x, quantization)
    with pytest.raises(NotImplementedError, match="x is a QuantizedArray without straight_through"):
        jax.grad(lambda x8: ops.grouped_dense(x8, kernel, sizes, **options).sum(), allow_int=True)(x8)
    with pytest.raises(ValueError, match="x has no transposed copy, which the gradient with respect to kernel reads"):
        jax.grad(lambda kernel: ops.grouped_dense(x8.without_transposed(), kernel, sizes, **options).sum())(kernel)


def test_delayed_scaling(rng):
    """Where one expert has all rows that count, values, gradients and the next state are those of its layer alone; but
    the state observes the kernels of all experts. Other rows are not observed, whatever they hold."""
    x, kernel, bias, dy = draw(rng)
    kernel, counted = kernel.at[2].mul(2), SIZES["all"][1] - 128
    x, dy = x.at[counted:].set(jnp.nan), dy.at[counted:].set(jnp.inf)
    recipe = DelayedScaling(history_len=2)
    state = recipe.init()
    histories = {role: jnp.full(2, amax) for role, amax in (("activation", 4.0), ("kernel", 3.5), ("gradient", 4.5))}
    state = dataclasses.replace(state, **histories)

    @functools.partial(jax.jit, static_argnums=0)
    def step(layer, x, kernel, bias, state, dy):
        y, vjp = jax.vjp(lambda x, k, b, s: layer(x, k, b, recipe=recipe, scaling_state=s), x, kernel, bias, state)
        return y, vjp(dy)

    def layer(x, kernel, bias, **options):
        return ops.grouped_dense(x, kernel, jnp.array([0, counted, 0]), bias, **options)

    y, (dx, dkernel, dbias, following) = step(layer, x, kernel, bias, state, dy)
    alone, (of_x, of_kernel, of_bias, of_alone) = step(
        ops.dense, x[:counted], kernel[1], bias[1], state, dy[:counted]
    )  # fmt: skip
    for found, wanted in ((y, alone), (dx, of_x)):
        assert_close(found[:counted], wanted, tolerance=1e-6)
        assert not found[counted:].any()
    for found, wanted in ((dkernel, of_kernel), (dbias, of_bias)):
        assert_close(found[1], wanted, tolerance=1e-5)
        assert not found[jnp.array([0, 2])].any()
    np.testing.assert_array_equal(following.activation, of_alone.activation)
    np.testing.assert_array_equal(following.gradient, of_alone.gradient)
    np.testing.assert_array_equal(following.kernel, [jnp.abs(kernel).max(), 3.5])
    with pytest.raises(ValueError, match="scaling_state"):
        jax.grad(lambda k: ops.grouped_dense(x, k, jnp.array([8, 8, 8]), recipe=recipe, scaling_state=state).sum())(
            kernel
        )


@pytest.mark.parametrize("recipe", ["none", "block"])
def test_vmap_over_one_of_two_kernels(rng, recipe):
    """What is the same for all examples counts once in each: x, the other kernel, and its result."""
    x, up, _, dy = draw(rng)
    gates = np.stack([draw(rng)[1] for _ in range(3)])

    def step(gates, x, up, each):
        def loss(gate):
            ys = ops.grouped_dense(x, (gate, up), np.int32(SIZES["uneven"]), recipe=RECIPES[recipe])
            return sum(jnp.sum(jnp.sin(y) * dy) for y in ys)

        return jnp.sum(each(loss, gates))

    def one_by_one(loss, gates):
        return jnp.stack([loss(gate) for gate in gates])

    found, wanted = (
        jax.jit(jax.grad(functools.partial(step, each=each), (0, 1, 2)))(gates, x, up)
        for each in (lambda loss, gates: jax.vmap(loss)(gates), one_by_one)
    )
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, tolerance=1e-5)


@pytest.mark.parametrize("recipe", ["none", "block"])
def test_shard_map(rng, recipe):
    """Every device has rows of its own, and the same experts: their gradients are summed."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    cases = [draw(rng) for _ in range(2)]
    sizes = np.int32([SIZES["aligned"], SIZES["uneven"]])
    x, dy = (np.concatenate([case[i] for case in cases]) for i in (0, 3))
    kernel, bias = cases[0][1:3]

    def local(x, kernel, bias, sizes):
        return ops.grouped_dense(x, kernel, sizes[0], bias, recipe=RECIPES[recipe])

    specs = P("data"), P(), P(), P("data")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("data"))
    y, (dx, dkernel, dbias) = results_and_gradients(lambda *a: mapped(*a, sizes), (x, kernel, bias), dy)
    each = [step_of(recipe=RECIPES[recipe])(case[0], kernel, bias, case[3], sizes[i]) for i, case in enumerate(cases)]
    each = jax.tree.map(np.asarray, each)
    assert_close(y, np.concatenate([one[0] for one in each]), tolerance=1e-6)
    assert_close(dx, np.concatenate([one[1][0] for one in each]), tolerance=1e-6)
    assert_close(dkernel, sum(one[1][1] for one in each), tolerance=1e-5)
    assert_close(dbias, sum(one[1][2] for one in each), tolerance=1e-5)


X, KERNEL, COUNTS = np.ones((32, 16), np.float32), np.ones((2, 16, 32), np.float32), np.int32([16, 16])
X8 = ops.quantize(X, CurrentScaling().quantization("activation"))
REFUSED = {
    "x": (lambda: ops.grouped_dense(X[None], KERNEL, COUNTS), r"x has shape \(1, 32, 16\)"),
    "kernel": (
        lambda: ops.grouped_dense(X, KERNEL.swapaxes(1, 2), COUNTS),
        r"kernel has shape .*it must be \(2, 16, out\)",
    ),
    "transposed kernel": (
        lambda: ops.grouped_dense(X, KERNEL, COUNTS, kernel_contracting="last"),
        r"kernel has shape .*it must be \(2, out, 16\)",
    ),
    "kernel_contracting": (
        lambda: ops.grouped_dense(X, KERNEL, COUNTS, kernel_contracting="rows"),
        "kernel_contracting is 'rows'; it must be 'first' or 'last'",
    ),
    "sizes": (lambda: ops.grouped_dense(X, KERNEL, COUNTS.astype(float)), "group_sizes has shape"),
    "dtype": (lambda: ops.grouped_dense(X, KERNEL.astype(jnp.int8), COUNTS), "kernel has dtype int8; it must be"),
    "bias": (lambda: ops.grouped_dense(X, KERNEL, COUNTS, jnp.ones(32)), r"bias has shape \(32,\)"),
    "of several": (
        lambda: ops.grouped_dense(X, (KERNEL, KERNEL[:, :8]), COUNTS),
        r"kernel\[1\] has shape \(2, 8, 32\)",
    ),
    "x in FP8 without a recipe": (
        lambda: ops.grouped_dense(X8, KERNEL, COUNTS),
        "recipe is None, but x is a Quantized",
    ),
    "x in FP8 by another recipe": (
        lambda: ops.grouped_dense(X8, KERNEL, COUNTS, recipe=BlockScaling()),
        "x has 'tensor' and 'tensor' scaling, but recipe is BlockScaling",
    ),
    "none": (lambda: ops.grouped_dense(X, (), COUNTS), "kernel is an empty tuple"),
    "rows": (lambda: ops.grouped_dense(X[:31], KERNEL, COUNTS, recipe=BlockScaling()), "x has 31 rows"),
    "out": (lambda: ops.grouped_dense(X, KERNEL[..., :8], COUNTS, recipe=BlockScaling()), "kernel has 8 values of"),
    "delayed": (lambda: ops.grouped_dense(X, KERNEL, COUNTS, recipe=DelayedScaling()), "scaling_state is None"),
    "state": (
        lambda: ops.grouped_dense(X, KERNEL, COUNTS, recipe=BlockScaling(), scaling_state=DelayedScaling().init()),
        "scaling_state is given, but recipe is BlockScaling",
    ),
    "recipe": (lambda: ops.grouped_dense(X, KERNEL, COUNTS, recipe="fp8"), "recipe is 'fp8'; it must be a Recipe"),
    "accumulator": (
        lambda: ops.grouped_dense(X, KERNEL, COUNTS, wgrad_accumulator=jnp.ones((2, 16))),
        r"wgrad_accumulator has shape \(2, 16\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call)


@pytest.mark.parametrize("recipe", ["none", "block"])
def test_other_derivatives(recipe):
    def layer(x):
        return ops.grouped_dense(x, KERNEL, COUNTS, recipe=RECIPES[recipe]).sum()

    with pytest.raises(NotImplementedError, match="reverse mode"):
        jax.jit(lambda x: jax.jvp(layer, (x,), (x,))).lower(X)
    with pytest.raises(NotImplementedError):
        jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(lambda x: layer(x) ** 2)(x)))).lower(X)
