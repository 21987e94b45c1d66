"""Quantization of sharded arrays: the scales are those of the whole array, and no array is gathered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from quantize_oracle import E5M2, assert_bits, assert_dbias, assert_quantized, oracle, quantization_of, random_case

from te_jax import ops
from te_jax.hlo import collectives

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
SHAPE = (1024, 512)  # whole blocks on every one of 8 × 1 or 4 × 2 devices
axis_types = pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])
pairs = pytest.mark.parametrize("pair", ["tensor", "row", "1x128 and square"])


def place(x, mesh, spec):
    # From NumPy: JAX would compile a program that cuts the array.
    return jax.device_put(np.asarray(x), NamedSharding(mesh, spec))


def compiled_for(x, quantization, **options):
    run = functools.partial(ops.quantize, with_amax=True, with_dbias=True, **options)
    return jax.jit(lambda x: run(x, quantization)).lower(x).compile()


def assert_exchanges_little(compiled, shape):
    """Only all-reduces: for each local row and column a largest magnitude, and a sum for each local column."""
    found = collectives(compiled)
    assert {entry.kind for entry in found} <= {"all-reduce"}
    assert sum(array.elements for entry in found for array in entry.results) <= shape[0] + 2 * shape[1] + 8, found


def assert_same_bits_everywhere(x):
    """All devices that hold the same part of an array hold the same bits."""
    parts = {}
    for shard in x.addressable_shards:
        parts.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
    assert all(len(bits) == 1 for bits in parts.values())


def assert_results(results, x, quantization, **options):
    quantized, amax, dbias = results
    expected = oracle(x, quantization, **options)
    assert_quantized(quantized, expected)
    assert_bits(amax, expected.amax)
    assert_dbias(dbias, x, expected)
    jax.tree.map(assert_same_bits_everywhere, results)


@axis_types
@pytest.mark.parametrize("shape", [(1024, 136), (264, 512)], ids=["short cols", "cut rows"])
def test_dimensions_whose_blocks_would_be_cut_are_gathered(shape, axis_type, make_mesh, native_kernels, rng):
    mesh = make_mesh({"data": axis_type, "model": axis_type})
    x, quantization = random_case(rng, shape, "bfloat16"), quantization_of("1x128 and square")
    placed = place(x, mesh, P("data", "model"))
    compiled = compiled_for(placed, quantization, implementation="native")
    assert "all-gather" in {entry.kind for entry in collectives(compiled)}
    assert_results(compiled(placed), x, quantization)
    # Without blocks in them, rows may be split anywhere.
    run = jax.jit(lambda x: ops.quantize(x, quantization, copies="data", implementation="native"))
    rows_split = place(x, mesh, P("data"))
    compiled = run.lower(rows_split).compile()
    assert collectives(compiled) == []
    assert_quantized(compiled(rows_split), oracle(x, quantization, copies="data"))


@pairs
@axis_types
def test_groups_of_sharded_dimensions(axis_type, pair, make_mesh, native_kernels, rng):
    """A batch of sequences, both sharded, and heads."""
    mesh = make_mesh({"data": axis_type, "sequence": axis_type, "model": axis_type})
    x, quantization = random_case(rng, (4, 256, 2, 128), "bfloat16"), quantization_of(pair)
    placed = place(x, mesh, P("data", "sequence", "model"))
    compiled = compiled_for(placed, quantization, row_ndim=2, implementation="native")
    assert_results(compiled(placed), x, quantization, row_ndim=2)
    assert_exchanges_little(compiled, (2 * 128, 128))


def test_names_of_axes(make_mesh, implementation, rng):
    """A name alone is about rows; several axes may split one group."""
    mesh = make_mesh({"data": AUTO, "model": AUTO})
    x, quantization = random_case(rng, SHAPE, "float32"), quantization_of("tensor")
    for spec, amax_axis in (
        (P("data"), "data"),
        (P(("data", "model")), ("data", "model")),
        (P(None, ("model", "data")), {"cols": ("model", "data")}),
    ):
        run = jax.shard_map(
            lambda x, amax_axis=amax_axis: ops.quantize(
                x, quantization, amax_axis=amax_axis, copies="data", with_dbias=True, implementation=implementation
            )[1],
            mesh=mesh, in_specs=spec, out_specs=P(*(*spec, None)[1:2]),
        )  # fmt: skip
        assert_dbias(jax.jit(run)(x), x, oracle(x, quantization))


@axis_types
def test_largest_magnitudes_of_shards_keep_nan(axis_type, make_mesh, native_kernels, rng):
    mesh = make_mesh({"data": axis_type, "model": axis_type})
    x = np.array(random_case(rng, (256, 256), "float32", edges=0.0))
    x[3, 7], x[200, 100] = np.nan, np.inf
    for pair in ("tensor", "row"):
        quantization = quantization_of(pair, E5M2)
        quantized, amax = ops.quantize(
            place(jnp.asarray(x), mesh, P("data", "model")), quantization, with_amax=True, implementation="native"
        )
        assert_quantized(quantized, oracle(x, quantization))
        assert_bits(amax, np.float32(np.nan))
