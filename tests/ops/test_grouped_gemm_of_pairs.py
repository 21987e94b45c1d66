"""Sums of two grouped GEMMs in one pass, against NumPy."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ops.gemm_oracle import E5M2, tolerance_of
from ops.grouped_oracle import options_of, product, random_operands, with_nan_in
from ops.test_grouped_gemm import GROUPS, LOADS, ROWS, sizes_of
from parameters import in_turns

from te_jax.ops.grouped_gemm import grouped_gemm_of_pairs
from te_jax.testing import assert_close

pytestmark = pytest.mark.skipif(jax.default_backend() == "gpu", reason="tests/gpu has those of the CUDA kernel")

FORMS = ("forward", "dgrad")
KINDS = {
    "float32": ("plain", {"dtype": "float32"}),
    "bfloat16": ("plain", {"dtype": "bfloat16"}),
    "block": ("block", {}),
    "block, E5M2": ("block", {"lhs_dtype": E5M2}),
    "row": ("row", {}),
    "tensor": ("tensor", {"rhs_dtype": E5M2}),
}


def draw(rng, kind, form, k=176, n=144):
    """Two pairs."""
    name, options = KINDS[kind]
    return tuple(random_operands(rng, ROWS, k, n, GROUPS, name, form, **options) for _ in range(2))


def of_pairs(form, dtype, implementation="native"):
    options = {**options_of(form), "out_dtype": jnp.dtype(dtype), "implementation": implementation}
    return jax.jit(functools.partial(grouped_gemm_of_pairs, **options))


def expected(form, pairs, sizes):
    return sum(product(form, *pair, sizes) for pair in pairs)


@pytest.mark.parametrize(
    ("form", "kind", "implementation", "dtype"),
    in_turns(FORMS * 6, list(KINDS), ["native", "native", "native", "reference"], ["float32", "bfloat16"]),
)
def test_values(rng, form, kind, implementation, dtype):
    """All loads under one compiled program; tails of K and N."""
    pairs = draw(rng, kind, form)
    run = of_pairs(form, dtype, implementation)
    for load in LOADS:
        found = run(*pairs, sizes_of(load))
        tolerance = tolerance_of(dtype, KINDS[kind][0])
        assert_close(found, expected(form, pairs, LOADS[load]), dtype=dtype, tolerance=tolerance)
        assert not np.asarray(found)[sum(LOADS[load]) :].any(), "rows of no group are not zero"
    assert run._cache_size() == 1


@pytest.mark.parametrize(("kind", "k"), [*itertools.product(("float32", "block"), (16, 128, 528, 640))])
def test_depths(rng, kind, k):
    """Fewer summed values than a block, and more panels than one."""
    for form in FORMS:
        pairs = draw(rng, kind, form, k=k, n=272)
        found = of_pairs(form, "float32")(*pairs, sizes_of("uneven"))
        assert_close(
            found,
            expected(form, pairs, LOADS["uneven"]),
            dtype="float32",
            tolerance=tolerance_of("float32", KINDS[kind][0]),
        )


@pytest.mark.parametrize("kind", ["float32", "block"])
def test_neither_product_is_rounded(rng, kind):
    """Products that nearly cancel: one rounded to bfloat16 would be all error."""
    (lhs, rhs), _ = draw(rng, kind, "dgrad")
    nearly = jnp.float32(-(1 + 2.0**-8))
    other = lhs * nearly if kind == "float32" else dataclasses.replace(lhs, scale_inv=lhs.scale_inv * nearly)
    pairs = (lhs, rhs), (other, rhs)
    found = of_pairs("dgrad", "bfloat16")(*pairs, sizes_of("all rows"))
    assert_close(found, expected("dgrad", pairs, LOADS["all rows"]), dtype="bfloat16")


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "block"])
@pytest.mark.parametrize("form", FORMS)
def test_nan_in_rows_of_no_group_changes_no_bit(rng, form, kind):
    pairs = draw(rng, kind, form)
    run, sizes = of_pairs(form, "float32"), sizes_of("uneven")
    tail = slice(sum(LOADS["uneven"]), None)
    poisoned = [(with_nan_in(lhs, tail), rhs) for lhs, rhs in pairs]
    found = run(*poisoned, sizes)
    np.testing.assert_array_equal(found, run(*pairs, sizes))
    assert np.isfinite(found).all()


@pytest.mark.parametrize("kind", KINDS)
def test_one_pass_where_scales_allow_it(rng, kind):
    """One call, whose result is all that is written; scales that apply to whole sums need two."""
    pairs = draw(rng, kind, "dgrad")
    text = of_pairs("dgrad", "bfloat16").lower(*pairs, sizes_of("uneven")).as_text()
    one_pass = KINDS[kind][0] in ("plain", "block")
    assert text.count("@te_grouped_gemm") == (1 if one_pass else 2)
    assert (f"tensor<{ROWS}x144xf32>" in text) != one_pass


def test_pairs_that_differ_are_two_products(rng):
    first, _ = draw(rng, "block", "dgrad")
    second, _ = draw(rng, "block, E5M2", "dgrad", k=128)
    found = of_pairs("dgrad", "bfloat16")(first, second, sizes_of("uneven"))
    wanted = expected("dgrad", (first, second), LOADS["uneven"])
    assert_close(found, wanted, dtype="bfloat16", tolerance=tolerance_of("bfloat16", "block"))


@pytest.mark.parametrize("kind", ["float32", "block"])
@pytest.mark.parametrize(
    "axes", [(0, None, 0, None, 0), (0, None, 0, None, None), (0, 0, 0, 0, 0), (None, 0, 0, 0, None)]
)
def test_vmap(rng, kind, axes):
    """Rows of examples that share the matrices, and others."""
    examples = [draw(rng, kind, "dgrad") for _ in range(2)]
    loads = jnp.asarray([LOADS["uneven"], LOADS["all rows"]], jnp.int32)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *examples)
    operands = [*jax.tree.leaves(stacked, is_leaf=lambda x: not isinstance(x, tuple)), loads]
    operands = [
        x if axis == 0 else jax.tree.map(lambda leaf: leaf[0], x) for x, axis in zip(operands, axes, strict=True)
    ]

    def run(lhs, rhs, second_lhs, second_rhs, sizes):
        return of_pairs("dgrad", "float32")((lhs, rhs), (second_lhs, second_rhs), sizes)

    found = jax.jit(jax.vmap(run, in_axes=axes))(*operands)
    for i in range(2):
        alone = (
            jax.tree.map(lambda leaf, i=i: leaf[i], x) if axis == 0 else x
            for x, axis in zip(operands, axes, strict=True)
        )
        assert_close(found[i], run(*alone), tolerance=1e-6)


def test_vmap_does_not_copy_shared_matrices(rng):
    pairs = draw(rng, "float32", "dgrad")
    lhs = [jnp.stack([pair[0]] * 3) for pair in pairs]

    def run(first, second, sizes):
        return of_pairs("dgrad", "float32")((first, pairs[0][1]), (second, pairs[1][1]), sizes)

    text = jax.jit(jax.vmap(run, in_axes=(0, 0, None))).lower(*lhs, sizes_of("uneven")).as_text()
    assert f"tensor<3x{GROUPS}x" not in text


@pytest.mark.parametrize("kind", ["float32", "block"])
@pytest.mark.parametrize("split", ["k", "n"])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_features_on_two_devices(rng, kind, split, axis_type):
    mesh = jax.make_mesh((2,), ("model",), axis_types=(axis_type,), devices=jax.devices()[:2])
    specs = {"k": (P(None, "model"), P(None, None, "model")), "n": (P(), P(None, "model"))}[split]

    def put(x, spec):
        place = functools.partial(jax.device_put, device=NamedSharding(mesh, spec))
        return place(x) if kind == "float32" else dataclasses.replace(jax.device_put(x, P()), data=place(x.data))

    pairs = draw(rng, kind, "dgrad", k=512, n=256)
    with jax.set_mesh(mesh):
        split_pairs = [tuple(map(put, pair, specs)) for pair in pairs]
        run = of_pairs("dgrad", "float32").lower(*split_pairs, sizes_of("uneven")).compile()
        found = run(*split_pairs, sizes_of("uneven"))
    assert_close(
        found,
        expected("dgrad", pairs, LOADS["uneven"]),
        dtype="float32",
        tolerance=tolerance_of("float32", KINDS[kind][0]),
    )
    assert "all-gather" not in run.as_text()


@pytest.mark.parametrize("kind", ["float32", "block"])
def test_inside_shard_map(rng, kind):
    """Every device has rows and groups of its own, and matrices that all share."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    examples = [draw(rng, kind, "dgrad") for _ in range(2)]
    (_, rhs), (_, second_rhs) = examples[0]
    loads = jnp.asarray([LOADS["uneven"], LOADS["all rows"]], jnp.int32)
    lhs, second_lhs = (
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *(example[i][0] for example in examples)) for i in range(2)
    )

    def local(lhs, second_lhs, sizes):
        lhs, second_lhs, sizes = jax.tree.map(lambda leaf: leaf[0], (lhs, second_lhs, sizes))
        return of_pairs("dgrad", "float32")((lhs, rhs), (second_lhs, second_rhs), sizes)

    found = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data")))(lhs, second_lhs, loads)
    for i, (first, second) in enumerate(examples):
        wanted = expected("dgrad", ((first[0], rhs), (second[0], second_rhs)), loads[i])
        tolerance = tolerance_of("float32", KINDS[kind][0])
        assert_close(found[i * ROWS :][:ROWS], wanted, dtype="float32", tolerance=tolerance)
