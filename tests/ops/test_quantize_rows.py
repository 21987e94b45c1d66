"""Rows that are gathered and quantized in one pass: the bits of a quantization of gathered rows."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ops.quantize_oracle import E4M3, E5M2, assert_bits, quantization_of, random_case
from parameters import in_turns

from te_jax import native, ops
from te_jax.ops._quantize_rows import quantize_rows

SHAPES = {"blocks": (40, 256, 384), "short blocks": (300, 144, 272), "odd": (5, 33, 77)}  # of x, and rows
run = jax.jit(quantize_rows, static_argnums=(2, 3, 4))


def random_rows(rng, count, rows):
    """Rows that x has, some of them several times, and others."""
    return rng.choice([*range(count), -1, -(2**31), count, 2**31 - 1], rows).astype(np.int32)


def expected(x, rows, quantization, copies):
    x, rows = np.asarray(x), np.asarray(rows)
    known = (rows >= 0) & (rows < len(x))
    gathered = np.where(known[:, None], x[np.where(known, rows, 0)], np.zeros((), x.dtype))
    return jax.jit(lambda x: ops.quantize(x, quantization, copies=copies))(gathered)


def assert_same(found, wanted):
    jax.tree.map(assert_bits, found, wanted)  # of the same structure: the same copies


@pytest.mark.parametrize(
    ("shape", "pair", "copies", "x_dtype", "dtype", "use_native"),
    in_turns(
        [*SHAPES, "short blocks"],
        ["1x128", "1x128 and square", "square and 1x128", "128x128"],
        ["both", "data", "transposed"],
        ["bfloat16", "float32", "float16"],
        [E4M3, E5M2],
        [True, True, False, True],
    ),
)
def test_bits(rng, shape, pair, copies, x_dtype, dtype, use_native):
    count, cols, rows = SHAPES[shape]
    x, index = random_case(rng, (count, cols), x_dtype), random_rows(rng, count, rows)
    quantization = quantization_of(pair, dtype, bool(rng.integers(2)))
    found = run(x, index, quantization, copies, use_native and native.takes(x_dtype))
    assert_same(found, expected(x, index, quantization, copies))


def test_vmap(rng):
    xs = np.asarray(random_case(rng, (2, 20, 144), "bfloat16"))
    rows = np.stack([random_rows(rng, 20, 160) for _ in range(2)])
    quantization = quantization_of("1x128 and square")
    call = functools.partial(quantize_rows, quantization=quantization, copies="both", use_native=True)
    found = jax.jit(lambda xs, rows: (jax.vmap(call)(xs, rows), jax.vmap(call, (None, 0))(xs[0], rows)))(xs, rows)
    for i in range(2):
        own, shared = jax.tree.map(lambda leaf, i=i: np.asarray(leaf)[i], found)
        assert_same(own, expected(xs[i], rows[i], quantization, "both"))
        assert_same(shared, expected(xs[0], rows[i], quantization, "both"))


@pytest.mark.parametrize("axis_type", [AxisType.Explicit])
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
def test_empty(shape):
    """Without values the reference runs; it knows tables without rows."""
    rows = np.zeros(0 if shape == (8, 64) else 16, np.int32)
    found = run(np.zeros(shape, np.float32), rows, quantization_of("1x128"), "both", False)
    assert_same(found, ops.quantize(np.zeros((rows.size, shape[1]), np.float32), quantization_of("1x128")))
