"""Rows that are gathered and quantized in one pass: the bits of a quantization of gathered rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ops.quantize_oracle import E4M3, E5M2, assert_bits, quantization_of, random_case
from parameters import in_turns

from te_jax import ops
from te_jax.ops._quantize_rows import quantize_rows
from te_jax.recipe import BlockScaling

SHAPES = {"blocks": (40, 256, 384), "short blocks": (300, 144, 272), "odd": (5, 33, 77)}  # of x, and rows
run = jax.jit(quantize_rows, static_argnums=(2, 3, 4))


def random_rows(rng, count, rows):
    """Rows that x has, some of them several times, and others."""
    return jnp.asarray(rng.choice([*range(count), -1, -(2**31), count, 2**31 - 1], rows), jnp.int32)


def expected(x, rows, quantization, copies):
    x, rows = np.asarray(x), np.asarray(rows)
    known = (rows >= 0) & (rows < len(x))
    gathered = np.where(known[:, None], x[np.where(known, rows, 0)], np.zeros((), x.dtype))
    return ops.quantize(jnp.asarray(gathered), quantization, copies=copies)


def assert_same(found, wanted):
    jax.tree.map(assert_bits, found, wanted)  # of the same structure: the same copies


@pytest.mark.parametrize("use_native", [True, False], ids=["native", "reference"])
@pytest.mark.parametrize(
    ("shape", "pair", "copies", "x_dtype", "dtype"),
    in_turns(
        [*SHAPES] * 4,
        ["1x128", "1x128 and square", "square and 1x128", "128x128"],
        ["both", "data", "transposed"],
        ["bfloat16", "float32", "float16"],
        [E4M3, E5M2],
    ),
)
def test_bits(rng, shape, pair, copies, x_dtype, dtype, use_native):
    count, cols, rows = SHAPES[shape]
    x, index = random_case(rng, (count, cols), x_dtype), random_rows(rng, count, rows)
    quantization = quantization_of(pair, dtype, bool(rng.integers(2)))
    found = run(x, index, quantization, copies, use_native)
    assert_same(found, expected(x, index, quantization, copies))


@pytest.mark.parametrize("pair", ["tensor", "row", "block and tensor"])
def test_other_scalings_gather_before(rng, pair):
    x, rows = random_case(rng, (30, 64), "bfloat16"), random_rows(rng, 30, 48)
    quantization = quantization_of(pair)
    assert_same(run(x, rows, quantization, "both", True), expected(x, rows, quantization, "both"))


def test_tokens_sorted_by_expert(rng):
    """What quantize(permute(x)) gives."""
    x = random_case(rng, (200, 128), "bfloat16")
    experts = jnp.asarray(rng.integers(0, 3, (200, 2)), jnp.int32)
    permutation = ops.group_by_expert(experts, 4, align=128)
    quantization = BlockScaling().quantization("activation")
    wanted = ops.quantize(ops.permute(x, permutation), quantization)
    assert_same(run(x, permutation.choices // 2, quantization, "both", True), wanted)


@pytest.mark.parametrize("use_native", [True, False], ids=["native", "reference"])
def test_vmap(rng, use_native):
    xs, rows = random_case(rng, (2, 20, 144), "bfloat16"), jnp.stack([random_rows(rng, 20, 160) for _ in range(2)])
    quantization = quantization_of("1x128 and square")
    call = functools.partial(quantize_rows, quantization=quantization, copies="both", use_native=use_native)
    found, shared = jax.vmap(call)(xs, rows), jax.vmap(call, in_axes=(None, 0))(xs[0], rows)
    for i in range(2):
        assert_same(jax.tree.map(lambda leaf, i=i: leaf[i], found), expected(xs[i], rows[i], quantization, "both"))
        assert_same(jax.tree.map(lambda leaf, i=i: leaf[i], shared), expected(xs[0], rows[i], quantization, "both"))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_columns_that_are_split(rng, make_mesh, axis_type):
    mesh = make_mesh({"data": axis_type, "model": axis_type})
    x, rows = random_case(rng, (24, 512), "bfloat16"), random_rows(rng, 24, 256)
    quantization = quantization_of("1x128 and square")
    placed = jax.device_put(x, NamedSharding(mesh, P(None, "model"))), jax.device_put(rows, NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        compiled = run.lower(*placed, quantization, "both", True).compile()
    found = compiled(*placed)
    assert_same(jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, expected(x, rows, quantization, "both")))
    assert found.data.sharding.spec == P(None, "model")
    assert "all-gather" not in compiled.as_text()


@pytest.mark.parametrize("shape", [(0, 64), (8, 0), (8, 64)])
def test_empty(rng, shape):
    """Without values the reference runs; it knows tables without rows."""
    rows = jnp.zeros((0 if shape == (8, 64) else 16,), jnp.int32)
    quantization = quantization_of("1x128")
    x = jnp.zeros(shape)
    assert_same(run(x, rows, quantization, "both", False), expected_of_zeros(rows.size, shape[1], quantization))


def expected_of_zeros(rows, cols, quantization):
    return ops.quantize(jnp.zeros((rows, cols)), quantization)
