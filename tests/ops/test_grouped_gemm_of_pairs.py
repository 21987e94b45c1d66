"""Sums of two grouped GEMMs in one pass, against NumPy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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
    ("kind", "form", "implementation", "dtype"),
    in_turns([*KINDS], FORMS, ["native", "native", "native", "reference"], ["float32", "bfloat16", "float32"]),
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


@pytest.mark.parametrize(("kind", "form", "k"), in_turns(["float32", "block"], FORMS, [640, 16]))
def test_depths(rng, kind, form, k):
    """Fewer summed values than a block, and more panels than one."""
    pairs = draw(rng, kind, form, k=k, n=272)
    found = of_pairs(form, "float32")(*pairs, sizes_of("uneven"))
    wanted, tolerance = expected(form, pairs, LOADS["uneven"]), tolerance_of("float32", KINDS[kind][0])
    assert_close(found, wanted, dtype="float32", tolerance=tolerance)


@pytest.mark.parametrize("kind", ["float32", "block"])
def test_neither_product_is_rounded(rng, kind):
    """Products that nearly cancel: one rounded to bfloat16 would be all error."""
    (lhs, rhs), _ = draw(rng, kind, "dgrad")
    nearly = jnp.float32(-(1 + 2.0**-8))
    other = lhs * nearly if kind == "float32" else dataclasses.replace(lhs, scale_inv=lhs.scale_inv * nearly)
    pairs = (lhs, rhs), (other, rhs)
    found = of_pairs("dgrad", "bfloat16")(*pairs, sizes_of("all rows"))
    assert_close(found, expected("dgrad", pairs, LOADS["all rows"]), dtype="bfloat16")


@pytest.mark.parametrize(("kind", "form"), in_turns(["bfloat16", "block"], FORMS))
def test_nan_in_rows_of_no_group_changes_no_bit(rng, form, kind):
    pairs = draw(rng, kind, form)
    run, sizes = of_pairs(form, "float32"), sizes_of("uneven")
    tail = slice(sum(LOADS["uneven"]), None)
    poisoned = [(with_nan_in(lhs, tail), rhs) for lhs, rhs in pairs]
    found = run(*poisoned, sizes)
    np.testing.assert_array_equal(found, run(*pairs, sizes))
    assert np.isfinite(found).all()


@pytest.mark.parametrize("kind", ["bfloat16", "block", "row"])
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
