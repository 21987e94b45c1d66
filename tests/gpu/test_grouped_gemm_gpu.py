"""Grouped GEMMs on a GPU: all forms against float64 over many sizes, rows of no group, equal bits, layouts of loads."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.gemm_oracle import E4M3, E5M2, random_array, tolerance_of
from ops.grouped_oracle import options_of, product, random_operands, with_nan_in

from te_jax import ops, recipe
from te_jax.ops.grouped_gemm import grouped_gemm_of_pairs
from te_jax.testing import assert_close

pytestmark = pytest.mark.gpu

FORMS = ("forward", "dgrad", "wgrad")
KINDS = {"block": ("block", {}), "row": ("row", {}), "tensor": ("tensor", {}), "bfloat16": ("plain", {})}
ROWS, GROUPS, K, N = 1600, 6, 400, 272
LOADS = {
    "multiples of 128": [256, 384, 128, 0, 512, 256],
    "multiples of tiles": [192, 384, 0, 576, 192, 192],
    "uneven": [1, 255, 0, 131, 700, 64],
    "tiny": [1, 1, 2, 3, 5, 8],
    "one has all": [0, 0, ROWS, 0, 0, 0],
    "one of the first": [ROWS - 3, 1, 1, 0, 0, 1],
    "none has any": [0] * GROUPS,
    "more than there are": [700, 700, 700, 5, 0, 9],
}


def draw(rng, kind, form, **options):
    name, fields = KINDS[kind]
    return random_operands(rng, ROWS, K, N, GROUPS, name, form, dtype="bfloat16", **fields, **options)


def run(form, **options):
    return jax.jit(functools.partial(ops.grouped_gemm, implementation="native", **options_of(form), **options))


def sizes_of(load):
    return jnp.asarray(LOADS[load], jnp.int32)


@pytest.mark.parametrize(("kind", "form"), [*itertools.product(KINDS, FORMS)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_for_all_sizes(rng, kind, form, dtype):
    """One compiled program; tails of m, n and k; groups that begin within tiles, within blocks, and at odd rows."""
    lhs, rhs = draw(rng, kind, form)
    multiply = run(form, out_dtype=dtype)
    for load in LOADS:
        found = multiply(lhs, rhs, sizes_of(load))
        expected = product(form, lhs, rhs, LOADS[load])
        assert_close(found, expected, dtype=dtype, tolerance=tolerance_of(dtype, KINDS[kind][0]))
        np.testing.assert_array_equal(found, multiply(lhs, rhs, sizes_of(load)), "another run gives other bits")
        if form != "wgrad":
            assert not np.asarray(found)[sum(LOADS[load]) :].any(), "rows of no group are not zero"
    assert multiply._cache_size() == 1


@pytest.mark.parametrize(("form", "dtypes"), [*itertools.product(FORMS, [(E5M2, E4M3), (E4M3, E5M2)])])
@pytest.mark.parametrize("kind", ["block", "row"])
def test_e5m2(rng, kind, form, dtypes):
    lhs, rhs = draw(rng, kind, form, lhs_dtype=dtypes[0], rhs_dtype=dtypes[1])
    found = run(form, out_dtype="float32")(lhs, rhs, sizes_of("uneven"))
    expected = product(form, lhs, rhs, LOADS["uneven"])
    assert_close(found, expected, dtype="float32", tolerance=tolerance_of("float32", kind))


@pytest.mark.parametrize(("kind", "form"), [*itertools.product(KINDS, FORMS)])
@pytest.mark.parametrize("load", ["uneven", "tiny", "none has any", "multiples of 128"])
def test_nan_in_rows_of_no_group_changes_no_bit(rng, kind, form, load):
    lhs, rhs = draw(rng, kind, form)
    multiply = run(form, out_dtype="float32")
    clean = multiply(lhs, rhs, sizes_of(load))
    tail = slice(sum(LOADS[load]), None)
    lhs = with_nan_in(lhs, tail)
    if form == "wgrad":
        rhs = with_nan_in(rhs, tail)
    np.testing.assert_array_equal(clean, multiply(lhs, rhs, sizes_of(load)))


@pytest.mark.parametrize("kind", ["block", "row", "bfloat16"])
@pytest.mark.parametrize("form", ["forward", "dgrad"])
def test_bias(rng, kind, form):
    lhs, rhs = draw(rng, kind, form)
    bias = random_array(rng, (GROUPS, N))
    found = run(form, out_dtype="float32")(lhs, rhs, sizes_of("uneven"), bias=bias)
    expected = product(form, lhs, rhs, LOADS["uneven"], bias=bias)
    assert_close(found, expected, dtype="float32", tolerance=tolerance_of("float32", KINDS[kind][0]))
    assert not np.asarray(found)[sum(LOADS["uneven"]) :].any(), "a bias was added to rows of no group"


@pytest.mark.parametrize("kind", ["block", "row", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_accumulator(rng, kind, dtype):
    lhs, rhs = draw(rng, kind, "wgrad")
    accumulator = (32.0 * random_array(rng, (GROUPS, K, N))).astype(dtype)
    kept = np.asarray(accumulator)
    add, overwrite = (run("wgrad", out_dtype=dtype, accumulate=accumulate) for accumulate in (True, False))
    tolerance = tolerance_of(dtype, KINDS[kind][0])
    for load in LOADS:
        expected = product("wgrad", lhs, rhs, LOADS[load], accumulator=kept)
        found = add(lhs, rhs, sizes_of(load), accumulator=jnp.asarray(kept))
        assert_close(found, expected, dtype=dtype, tolerance=tolerance)
        for group, size in enumerate(LOADS[load]):
            if size == 0:
                np.testing.assert_array_equal(found[group], kept[group], "an empty group changed its accumulator")
        found = overwrite(lhs, rhs, sizes_of(load), accumulator=jnp.full(kept.shape, jnp.nan, dtype))
        assert_close(found, product("wgrad", lhs, rhs, LOADS[load]), dtype=dtype, tolerance=tolerance)


@pytest.mark.parametrize("form", FORMS)
def test_group_offset(rng, form):
    """Rows before the first of these groups, too, are of none."""
    lhs, rhs = random_operands(rng, ROWS, K, N, 2, "block", form, dtype="bfloat16")
    given = {"accumulator": jnp.zeros((2, K, N))} if form == "wgrad" else {}
    multiply = run(form, out_dtype="float32")
    for offset in (0, 2, 4):
        found = multiply(lhs, rhs, sizes_of("uneven"), group_offset=jnp.int32(offset), **given)
        expected = product(form, lhs, rhs, LOADS["uneven"], offset=offset, groups=2)
        assert_close(found, expected, dtype="float32", tolerance=tolerance_of("float32", "block"))


def test_ragged_dot_under_vmap_and_its_gradients(rng):
    """Parts of rows that share the matrices, and examples of matrices."""
    lhs = random_array(rng, (3, 304, 64)).astype(jnp.bfloat16)
    rhs = random_array(rng, (3, GROUPS, 64, 48)).astype(jnp.bfloat16)
    sizes = jnp.asarray([[70, 0, 129, 1, 60, 0], [0, 0, 0, 0, 0, 304], [1, 2, 3, 4, 5, 6]], jnp.int32)

    def loss(lhs, rhs, sizes, implementation):
        return jnp.sum(jnp.sin(ops.ragged_dot(lhs, rhs, sizes, implementation=implementation).astype(jnp.float32)))

    for axes, matrices in (((0, None, 0), rhs[0]), ((0, 0, 0), rhs)):
        found, expected = (
            jax.jit(jax.vmap(jax.grad(functools.partial(loss, implementation=name), (0, 1)), in_axes=axes))(
                lhs, matrices, sizes
            )
            for name in ("native", "reference")
        )
        for a, b in zip(found, expected, strict=True):
            assert_close(a, b, dtype="bfloat16", tolerance=2e-2)


def test_many_groups(rng):
    """More than a warp compares at once, with stretches of empty ones."""
    groups, rows = 300, 1024
    sizes = np.zeros(groups, np.int32)
    sizes[rng.choice(groups, 60, replace=False)] = rng.integers(1, 30, 60)
    sizes[-1] = 5
    for form in FORMS:
        lhs, rhs = random_operands(rng, rows, 128, 128, groups, "plain", form, dtype="bfloat16")
        found = run(form, out_dtype="float32")(lhs, rhs, jnp.asarray(sizes))
        assert_close(found, product(form, lhs, rhs, list(sizes)), dtype="float32")


# --------------------------------------------------------------------------------------------------------------- pairs


def run_pairs(form, **options):
    options = {"implementation": "native", "out_dtype": jnp.float32, **options_of(form), **options}
    return jax.jit(functools.partial(grouped_gemm_of_pairs, **options))


def sum_of_products(form, pairs, sizes):
    return sum(product(form, *pair, sizes) for pair in pairs)


@pytest.mark.parametrize(("kind", "form"), [*itertools.product(("block", "bfloat16", "row"), ("forward", "dgrad"))])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pairs_for_all_sizes(rng, kind, form, dtype):
    pairs = [draw(rng, kind, form) for _ in range(2)]
    multiply = run_pairs(form, out_dtype=jnp.dtype(dtype))
    for load in LOADS:
        found = multiply(*pairs, sizes_of(load))
        expected = sum_of_products(form, pairs, LOADS[load])
        assert_close(found, expected, dtype=dtype, tolerance=tolerance_of(dtype, KINDS[kind][0]))
        np.testing.assert_array_equal(found, multiply(*pairs, sizes_of(load)), "another run gives other bits")
        assert not np.asarray(found)[sum(LOADS[load]) :].any(), "rows of no group are not zero"
    assert multiply._cache_size() == 1


@pytest.mark.parametrize(("kind", "k"), [*itertools.product(("block", "bfloat16"), (16, 128, 144, 528, 640, 1664))])
def test_depths_of_pairs(rng, kind, k):
    """From one step for each pair to more than the ring has stages; columns' scales anywhere in their boxes."""
    sizes = sizes_of("uneven")
    for form in ("forward", "dgrad"):
        pairs = [random_operands(rng, ROWS, k, 400, GROUPS, KINDS[kind][0], form, dtype="bfloat16") for _ in range(2)]
        found = run_pairs(form)(*pairs, sizes)
        expected = sum_of_products(form, pairs, LOADS["uneven"])
        assert_close(found, expected, dtype="float32", tolerance=tolerance_of("float32", KINDS[kind][0]))


@pytest.mark.parametrize("dtypes", [(E5M2, E4M3), (E4M3, E5M2)])
def test_pairs_with_e5m2(rng, dtypes):
    pairs = [draw(rng, "block", "dgrad", lhs_dtype=dtypes[0], rhs_dtype=dtypes[1]) for _ in range(2)]
    found = run_pairs("dgrad")(*pairs, sizes_of("uneven"))
    expected = sum_of_products("dgrad", pairs, LOADS["uneven"])
    assert_close(found, expected, dtype="float32", tolerance=tolerance_of("float32", "block"))


@pytest.mark.parametrize("kind", ["block", "bfloat16"])
@pytest.mark.parametrize("load", ["uneven", "tiny", "none has any"])
def test_nan_in_rows_of_no_group_changes_no_bit_of_pairs(rng, kind, load):
    pairs = [draw(rng, kind, "dgrad") for _ in range(2)]
    poisoned = [(with_nan_in(lhs, slice(sum(LOADS[load]), None)), rhs) for lhs, rhs in pairs]
    multiply = run_pairs("dgrad")
    np.testing.assert_array_equal(multiply(*pairs, sizes_of(load)), multiply(*poisoned, sizes_of(load)))


@pytest.mark.parametrize("kind", ["block", "bfloat16"])
@pytest.mark.parametrize("share", [False, True])
def test_pairs_under_vmap(rng, kind, share):
    """Examples whose scales begin anywhere, and rows of examples that share the matrices."""
    examples = [
        [random_operands(rng, 304, 656, 272, 3, KINDS[kind][0], "dgrad", dtype="bfloat16") for _ in range(2)]
        for _ in range(3)
    ]
    sizes = jnp.asarray([[70, 0, 129], [0, 0, 304], [1, 2, 3]], jnp.int32)
    lhs, rhs, second_lhs, second_rhs = (
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *(example[i][j] for example in examples))
        for i, j in itertools.product(range(2), range(2))
    )
    if share:
        rhs, second_rhs = examples[0][0][1], examples[0][1][1]
    axis = None if share else 0

    def multiply(lhs, rhs, second_lhs, second_rhs, sizes):
        return run_pairs("dgrad")((lhs, rhs), (second_lhs, second_rhs), sizes)

    found = jax.jit(jax.vmap(multiply, in_axes=(0, axis, 0, axis, 0)))(lhs, rhs, second_lhs, second_rhs, sizes)
    for i, pairs in enumerate(examples):
        pairs = [(pair[0], examples[0 if share else i][j][1]) for j, pair in enumerate(pairs)]
        expected = sum_of_products("dgrad", pairs, sizes[i].tolist())
        assert_close(found[i], expected, dtype="float32", tolerance=tolerance_of("float32", KINDS[kind][0]))


@pytest.mark.parametrize(
    "scaling", [None, recipe.BlockScaling(), recipe.RowwiseScaling()], ids=["none", "block", "row"]
)
def test_gradients_of_gate_and_up(rng, scaling):
    """The gradient of x is the sum of those of two layers."""
    x = random_array(rng, (1024, 512), "bfloat16")
    gate, up = (random_array(rng, (4, 512, 384), "bfloat16") for _ in range(2))
    dys = tuple(random_array(rng, (1024, 384), "bfloat16") for _ in range(2))
    sizes = jnp.asarray([256, 0, 384, 128])
    layer = functools.partial(ops.grouped_dense, recipe=scaling, implementation="native")

    @jax.jit
    def together(x, gate, up):
        return jax.vjp(lambda *a: layer(a[0], a[1:], sizes), x, gate, up)[1](dys)

    @jax.jit
    def alone(x, kernel, dy):
        return jax.vjp(lambda x, kernel: layer(x, kernel, sizes), x, kernel)[1](dy)

    dx, dgate, dup = together(x, gate, up)
    (dx1, dgate1), (dx2, dup2) = alone(x, gate, dys[0]), alone(x, up, dys[1])
    assert_close(dx, dx1.astype(jnp.float32) + dx2.astype(jnp.float32), dtype="bfloat16", tolerance=1e-2)
    np.testing.assert_array_equal(dgate, dgate1)
    np.testing.assert_array_equal(dup, dup2)
