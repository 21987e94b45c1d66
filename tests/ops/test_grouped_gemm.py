"""Grouped GEMMs against NumPy, group by group, and against `jax.lax.ragged_dot`."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from ops.gemm_oracle import E5M2, random_array, tolerance_of
from ops.grouped_oracle import options_of, product, random_operands
from parameters import in_turns

from te_jax import native, ops, recipe
from te_jax.native import extension
from te_jax.testing import assert_close

pytestmark = pytest.mark.skipif(
    jax.default_backend() == "gpu", reason="float32, which has no kernel on a GPU: see tests/gpu"
)

FORMS = ("forward", "dgrad", "wgrad")
IMPLEMENTATIONS = ("native", "reference")
ROWS, GROUPS = 300, 5
LOADS = {
    "uneven": [70, 0, 129, 1, 60],
    "all rows": [100, 50, 50, 50, 50],
    "first and last empty": [0, 128, 64, 32, 0],
    "one has all": [0, 0, 300, 0, 0],
    "none has any": [0, 0, 0, 0, 0],
    "more than there are": [200, 90, 90, 0, 40],
}


def sizes_of(load):
    return np.array(LOADS[load], np.int32)


def grouped(form, **options):
    return jax.jit(functools.partial(ops.grouped_gemm, **options_of(form), **options))


# --------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("form", "dtype"), [*itertools.product(FORMS, ("float32", "bfloat16")), ("forward", "float16")]
)
def test_plain(rng, form, dtype, implementation):
    """All loads under one compiled program."""
    lhs, rhs = random_operands(rng, ROWS, 40, 72, GROUPS, "plain", form, dtype=dtype)
    run = grouped(form, implementation=implementation)
    for load in LOADS:
        found = run(lhs, rhs, sizes_of(load))
        assert_close(found, product(form, lhs, rhs, LOADS[load]), dtype=dtype)
    assert run._cache_size() == 1


FP8_CASES = {
    "tensor": ("tensor", {}),
    "row": ("row", {}),
    "block": ("block", {}),
    "E5M2": ("tensor", {"lhs_dtype": E5M2}),
    "block, E5M2": ("block", {"lhs_dtype": E5M2}),
}


@pytest.mark.parametrize(
    ("form", "case", "implementation", "load", "dtype"),
    in_turns([*FORMS] * 3, list(FP8_CASES), IMPLEMENTATIONS, list(LOADS), ["float32", "bfloat16"]),
)
def test_fp8(rng, form, case, implementation, load, dtype):
    """Tails of K and N, and groups that begin within blocks."""
    kind, options = FP8_CASES[case]
    rows = 304 if form == "wgrad" else ROWS
    lhs, rhs = random_operands(rng, rows, 176, 144, GROUPS, kind, form, **options)
    found = grouped(form, implementation=implementation, out_dtype=dtype)(lhs, rhs, sizes_of(load))
    assert_close(found, product(form, lhs, rhs, LOADS[load]), dtype=dtype, tolerance=tolerance_of(dtype, kind))


@pytest.mark.parametrize("kind", ["plain", "tensor", "row", "block"])
def test_large(rng, kind):
    """Several tiles and panels in every direction."""
    sizes = [130, 400, 0, 257]
    for form in FORMS if kind in ("plain", "block") else ("dgrad", "wgrad"):
        lhs, rhs = random_operands(rng, 800, 528, 272, 4, kind, form)
        found = grouped(form, implementation="native", out_dtype="float32")(lhs, rhs, np.array(sizes, np.int32))
        assert_close(found, product(form, lhs, rhs, sizes), dtype="float32", tolerance=tolerance_of("float32", kind))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["plain", "block"])
def test_bias(rng, kind, implementation):
    lhs, rhs = random_operands(rng, ROWS, 64, 48, GROUPS, kind, "forward")
    bias = random_array(rng, (GROUPS, 48))
    found = grouped("forward", implementation=implementation)(lhs, rhs, sizes_of("uneven"), bias=bias)
    assert_close(found, product("forward", lhs, rhs, LOADS["uneven"], bias=bias), dtype="float32")
    assert not np.asarray(found)[260:].any(), "a bias was added to rows of no group"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["plain", "block"])
def test_accumulator(rng, kind, implementation):
    lhs, rhs = random_operands(rng, 304, 48, 64, GROUPS, kind, "wgrad", dtype="bfloat16")
    accumulator = np.float32(32) * np.asarray(random_array(rng, (GROUPS, 48, 64)))
    run = grouped("wgrad", implementation=implementation)
    expected = product("wgrad", lhs, rhs, LOADS["uneven"], accumulator=accumulator)
    found = run(lhs, rhs, sizes_of("uneven"), accumulator=accumulator)
    assert_close(found, expected, dtype="float32")
    np.testing.assert_array_equal(np.asarray(found)[1], accumulator[1], "an empty group changed its accumulator")
    overwrite = grouped("wgrad", implementation=implementation, accumulate=False)
    nan = np.full_like(accumulator, np.nan)
    assert_close(overwrite(lhs, rhs, sizes_of("uneven"), accumulator=nan), expected - np.asarray(accumulator, float),
                 dtype="float32")  # fmt: skip


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("form", FORMS)
def test_group_offset(rng, form, implementation):
    """Two of five groups; rows of the others are zero."""
    lhs, rhs = random_operands(rng, ROWS, 40, 24, 2, "plain", form)
    given = {"accumulator": np.zeros((2, 40, 24), np.float32)} if form == "wgrad" else {}
    run = grouped(form, implementation=implementation)
    for offset in (0, 2, 3):
        found = run(lhs, rhs, sizes_of("uneven"), group_offset=np.int32(offset), **given)
        assert_close(found, product(form, lhs, rhs, LOADS["uneven"], offset=offset, groups=2), dtype="float32")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("form", FORMS)
def test_rows_of_no_group_are_never_read(rng, form, implementation):
    lhs, rhs = random_operands(rng, ROWS, 40, 24, GROUPS, "plain", form)
    outside = np.arange(ROWS)[:, None] >= 260
    run = grouped(form, implementation=implementation)
    expected = run(lhs, rhs, sizes_of("uneven"))
    nan = np.float32(np.nan)
    poisoned = np.where(outside, nan, lhs), np.where(outside, nan, rhs) if form == "wgrad" else rhs
    np.testing.assert_array_equal(run(*poisoned, sizes_of("uneven")), expected)
    assert np.isfinite(expected).all()


def test_scales_of_an_empty_group_are_not_used(rng):
    """A tensor of no tokens may have scales that are not finite."""
    lhs, rhs = random_operands(rng, 304, 48, 64, GROUPS, "tensor", "wgrad")
    lhs.__dict__["transposed_scale_inv"] = jnp.float32(np.inf)
    found = grouped("wgrad", implementation="native")(lhs, rhs, sizes_of("none has any"))
    assert not np.any(found)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nothing_at_all(implementation):
    for form, rows, k, n in (("forward", 8, 0, 8), ("wgrad", 0, 8, 8), ("wgrad", 8, 8, 0), ("forward", 0, 8, 8)):
        sizes, lhs = np.full(2, rows // 2, np.int32), np.ones((rows, k), np.float32)
        rhs = np.ones((2, k, n) if form == "forward" else (rows, n), np.float32)
        found = grouped(form, implementation=implementation)(lhs, rhs, sizes)
        np.testing.assert_array_equal(found, np.zeros((rows, n) if form == "forward" else (2, k, n), np.float32))


# ----------------------------------------------------------------------------------------------------------- ragged_dot


def gradients(dot, weights):
    """Gradients of a loss of the product, and the product: the loss itself may be nearly 0 by cancellation."""

    def loss(lhs, rhs, sizes):
        y = dot(lhs, rhs, sizes)
        return jnp.sum(jnp.sin(y.astype(jnp.float32)) * weights), y

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))


def test_operands_of_two_dtypes(rng):
    """As in lax: the product is float32, and gradients have the dtypes of their operands."""
    lhs, rhs = random_operands(rng, ROWS, 24, 40, GROUPS, "plain", "forward")
    weights = random_array(rng, (ROWS, 40))
    for operands in ((lhs.astype(jnp.bfloat16), rhs), (lhs, rhs.astype(jnp.float16))):
        found = gradients(ops.ragged_dot, weights)(*operands, sizes_of("uneven"))
        expected = gradients(lax.ragged_dot, weights)(*operands, sizes_of("uneven"))
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert_close(one, other, tolerance=None if one.dtype == jnp.float32 else 5e-3)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, None), (0, None, 0), (0, 0, 0)])
def test_every_vmap(rng, axes, implementation):
    """Values and gradients, and what no operand shares is not copied."""
    examples, rows = 3, 40
    lhs, rhs = (np.asarray(random_array(rng, (examples, *shape))) for shape in ((rows, 8), (4, 8, 16)))
    sizes = np.array([[10, 0, 20, 5], [40, 0, 0, 0], [0, 1, 2, 3]], np.int32)
    operands = [x if axis == 0 else x[0] for x, axis in zip((lhs, rhs, sizes), axes, strict=True)]
    weights = random_array(rng, (rows, 16))
    step = gradients(functools.partial(ops.ragged_dot, implementation=implementation), weights)
    found = jax.jit(jax.vmap(step, in_axes=axes))(*operands)
    found = jax.tree.map(np.asarray, found)
    for i in range(examples):
        alone = [x[i] if axis == 0 else x for x, axis in zip(operands, axes, strict=True)]
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(step(*alone)), strict=True):
            assert_close(one[i], other, tolerance=1e-5)


def test_vmap_does_not_copy_shared_matrices(rng):
    """Not even under two of them."""
    lhs, rhs = random_array(rng, (2, 3, 40, 8)), random_array(rng, (4, 8, 16))
    sizes = jnp.asarray([10, 0, 20, 5], jnp.int32)
    dot = functools.partial(ops.ragged_dot, implementation="native")
    inner = jax.vmap(dot, in_axes=(0, None, None))
    both = jax.jit(jax.vmap(inner, in_axes=(0, None, None)))
    assert "tensor<2x4x8x16" not in both.lower(lhs, rhs, sizes).as_text()
    assert "tensor<3x4x8x16" not in both.lower(lhs, rhs, sizes).as_text()
    found = both(lhs, rhs, sizes)
    for i, j in itertools.product(range(2), range(3)):
        assert_close(found[i, j], lax.ragged_dot(lhs[i, j], rhs, sizes), tolerance=1e-5)


def test_no_array_of_every_group_and_row(rng):
    """Forward and backward: beside operands and gradients there is nothing of their size."""
    groups, rows = 64, 256
    lhs, rhs = random_array(rng, (rows, 32)), random_array(rng, (groups, 32, 48))
    sizes = jnp.full(groups, 4, jnp.int32)
    step = gradients(functools.partial(ops.ragged_dot, implementation="native"), random_array(rng, (rows, 48)))
    memory = step.lower(lhs, rhs, sizes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * rows * 48 * 4


def test_group_offset_has_gradients(rng):
    """The parts of the matrices, one after the other, give the whole."""
    lhs, rhs = random_operands(rng, ROWS, 24, 40, GROUPS, "plain", "forward")
    weights = random_array(rng, (ROWS, 40))

    def in_parts(lhs, rhs, sizes):
        first = ops.ragged_dot(lhs, rhs[:2], sizes, group_offset=jnp.int32(0))
        return first + ops.ragged_dot(lhs, rhs[2:], sizes, group_offset=jnp.array([2]))

    found = gradients(in_parts, weights)(lhs, rhs, sizes_of("uneven"))
    expected = gradients(lax.ragged_dot, weights)(lhs, rhs, sizes_of("uneven"))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(one, other, tolerance=1e-5)


# ------------------------------------------------------------------------------------------------------------- refusals

X, KERNEL, SIZES = np.ones((8, 16), np.float32), np.ones((2, 16, 32), np.float32), np.array([4, 4], np.int32)


def quantized(x, role):
    return ops.quantize(x, recipe.CurrentScaling().quantization(role))


REFUSED = {
    "sizes": (lambda: ops.ragged_dot(X, KERNEL, jnp.ones(2)), "group_sizes has shape .* it must be integers"),
    "groups": (lambda: ops.ragged_dot(X, KERNEL, jnp.array([8])), "group_sizes has 1 groups and rhs has 2"),
    "offset": (lambda: ops.ragged_dot(X, KERNEL, jnp.array([8]), group_offset=0),
     "group_sizes has 1 groups and rhs has 2; with group_offset"),
    "offset dtype": (lambda: ops.ragged_dot(X, KERNEL, SIZES, group_offset=1.0), "group_offset has shape"),
    "summed": (lambda: ops.ragged_dot(X, KERNEL.swapaxes(1, 2), SIZES), "rhs sums over 32 values, but lhs over 16"),
    "dtypes": (lambda: ops.grouped_gemm(X, KERNEL.astype(jnp.bfloat16), SIZES), "rhs has dtype bfloat16"),
    "no groups": (lambda: ops.ragged_dot(X, KERNEL[0], SIZES), r"rhs has shape \(16, 32\); it must be \[groups"),
    "preferred": (lambda: ops.ragged_dot(X, KERNEL, SIZES, preferred_element_type=jnp.int32),
     "preferred_element_type is int32"),
    "contracting": (lambda: ops.grouped_gemm(X, X, SIZES, lhs_contracting="rows", rhs_contracting="cols"),
     "where lhs sums over rows, rhs does too"),
    "name": (lambda: ops.grouped_gemm(X, KERNEL, SIZES, rhs_contracting="in"), "rhs_contracting is 'in'"),
    "one quantized": (lambda: ops.grouped_gemm(quantized(X, "activation"), KERNEL, SIZES), "rhs is a plain array"),
    "rhs without groups": (lambda: ops.grouped_gemm(quantized(X, "activation"), quantized(KERNEL[0], "kernel"), SIZES),
     "rhs has shape"),
    "bias of sums": (lambda: ops.grouped_gemm(X, X, SIZES, lhs_contracting="rows", bias=jnp.ones((2, 16))),
     "bias is given with lhs_contracting='rows'"),
    "bias": (lambda: ops.grouped_gemm(X, KERNEL, SIZES, bias=jnp.ones(32)), r"bias has shape \(32,\)"),
    "accumulator of rows": (lambda: ops.grouped_gemm(X, KERNEL, SIZES, accumulator=jnp.ones((8, 32))),
     "accumulator is given with lhs_contracting='cols'"),
    "accumulator": (lambda: ops.grouped_gemm(X, X, SIZES, lhs_contracting="rows", accumulator=jnp.ones((2, 16, 8))),
     r"accumulator has shape \(2, 16, 8\)"),
    "out_dtype": (lambda: ops.grouped_gemm(X, KERNEL, SIZES, out_dtype=jnp.int8), "out_dtype is int8"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call)


def test_scalings_and_sizes_that_do_not_fit(rng):
    lhs, _ = random_operands(rng, 32, 128, 64, 2, "block", "forward")
    other, rhs = random_operands(rng, 32, 128, 40, 2, "tensor", "forward")
    with pytest.raises(ValueError, match="lhs has 'block_1x128' scales and rhs 'tensor'"):
        ops.grouped_gemm(lhs, rhs, SIZES)
    with pytest.raises(ValueError, match="rhs has 40 outer values; FP8 products need a multiple of 16"):
        ops.grouped_gemm(other, rhs, SIZES)


@pytest.mark.parametrize(
    ("kind", "shape", "dtype", "message"),
    [
        ("plain", (64, 48, 32), "bfloat16", None),
        ("block", (64, 48, 32), "bfloat16", None),
        ("plain", (64, 48, 32), "float32", "the operands and their gradients are float32, and plain grouped"),
        ("plain", (64, 44, 32), "bfloat16", "rows have 44 and 32 values, and plain grouped GEMMs need"),
        ("plain", (64, 48, 36), "bfloat16", "rows have 48 and 36 values"),
        ("block", (66, 48, 32), "bfloat16", "lhs has 66 outer values, and grouped GEMMs of blocks need"),
        ("tensor", (66, 48, 32), "bfloat16", None),
    ],
    ids=lambda value: "",
)
def test_sizes_on_a_hopper_gpu(rng, kind, shape, dtype, message, monkeypatch, native_kernels):
    """tests/ops/test_gpus.py has other GPUs."""
    monkeypatch.setattr(native, "compute_capability", lambda: (9, 0))
    extension._warn_once.cache_clear()
    operands = random_operands(rng, *shape, 2, kind, "forward", dtype=dtype)

    def run(implementation=None):
        call = functools.partial(ops.grouped_gemm, out_dtype="float32", implementation=implementation)
        return jax.eval_shape(call, *operands, np.int32([10, 30]))

    if message is None:
        run("native")
        return
    with pytest.raises(native.NativeUnavailableError, match=message):
        run("native")
    if kind == "plain":
        with pytest.warns(RuntimeWarning, match=message):
            run()
    else:  # the reference of FP8 would be slower than no FP8
        with pytest.raises(native.NativeUnavailableError, match=f"{message}.*; do not quantize, or use impl"):
            run()
        run("reference")
    extension._warn_once.cache_clear()
