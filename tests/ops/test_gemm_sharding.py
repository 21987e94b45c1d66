"""Matrix products of sharded operands that are special: sizes, groups of dimensions, epilogues and accumulators.

How others lie and what they exchange is in tests/conformance.
"""

import dataclasses

import jax
import numpy as np
import pytest
from gemm_oracle import assert_product, gelu, product, random_array, random_product, random_quantized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from parameters import in_turns

from te_jax import ops
from te_jax.hlo import collectives
from te_jax.quantized import QuantizedArray
from te_jax.testing import assert_close

pytestmark = pytest.mark.usefixtures("native_kernels")

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
AXIS_TYPES = {"auto": AUTO, "explicit": EXPLICIT}


def spec_of(scaling, outer, summed):
    """Shardings of data and scales of a copy, with one dimension in each group."""
    scales = {"tensor": P(), "row": P(outer), "block_1x128": P(summed, outer), "block_128x128": P(outer, summed)}[
        scaling
    ]
    return P(outer, summed), scales


def place(x, mesh, spec):
    # From NumPy: JAX would compile a program that cuts the array.
    return jax.device_put(np.asarray(x), NamedSharding(mesh, spec))


def place_operands(lhs, rhs, mesh, m, n, k):
    """lhs [m, k] and rhs [k, n], split over these mesh axes."""
    if not isinstance(lhs, QuantizedArray):
        return place(lhs, mesh, P(m, k)), place(rhs, mesh, P(k, n))
    data, scales = spec_of(lhs.scaling, m, k)
    placed = {"data": place(lhs.data, mesh, data), "scale_inv": place(lhs.scale_inv, mesh, scales)}
    lhs = dataclasses.replace(lhs.without_transposed(), **placed)
    data, scales = spec_of(rhs.transposed_scaling, n, k)
    placed = {
        "transposed": place(rhs.transposed, mesh, data),
        "transposed_scale_inv": place(rhs.transposed_scale_inv, mesh, scales),
    }
    return lhs, dataclasses.replace(rhs.without_data(), **placed)


def shards(mesh, axes):
    return int(np.prod([mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes or ())]))


def assert_exchanges_only(compiled, result, split):
    """One all-reduce of the local result where the contraction is split, and nothing otherwise."""
    found = collectives(compiled)
    if not split:
        assert found == []
        return
    assert [entry.kind for entry in found] == ["all-reduce"]
    assert [array.shape for array in found[0].results] == [result.sharding.shard_shape(result.shape)]


@pytest.mark.parametrize(
    ("size", "kind", "axis_type"),
    in_turns([("k", 16 * 5), ("k", 128 * 5 + 16), ("n", 16 * 9), ("m", 20)], ["row", "block", "block"], AXIS_TYPES),
)
def test_sizes_that_shards_cannot_have(kind, size, axis_type, make_mesh, rng):
    """Where shards would cut blocks, or be too small to address, operands are gathered; the result is right."""
    mesh = make_mesh({"data": axis_type, "model": axis_type})
    group, count = size
    sizes = {"m": 16, "n": 512, "k": 512} | {group: count}
    lhs, rhs = random_product(rng, (sizes["m"],), (sizes["n"],), (sizes["k"],), kind)
    expected = product(lhs, rhs)
    split = {group: "model"} if sizes[group] % 2 == 0 else {}
    # Scales of short blocks cannot be split evenly themselves.
    lhs, rhs = place_operands(lhs, rhs, mesh, *(None,) * 3)
    data = [lhs.data, rhs.transposed]
    for i, outer in enumerate(("m", "n")):
        data[i] = place(data[i], mesh, P(split.get(outer), split.get("k")))
    lhs, rhs = dataclasses.replace(lhs, data=data[0]), dataclasses.replace(rhs, transposed=data[1])
    result = jax.jit(lambda *a: ops.gemm(*a, out_dtype="float32", implementation="native"))(lhs, rhs)
    assert_product(result, expected, dtype="float32")


def test_several_dimensions(make_mesh, rng):
    """[batch, sequence, heads, values] times [heads, values, features]: each split on its own."""
    mesh = make_mesh({"data": EXPLICIT, "sequence": EXPLICIT, "model": EXPLICIT})
    lhs = random_quantized(rng, (4, 8), (4, 128), "block_1x128")
    rhs = random_quantized(rng, (4, 128), (2, 128), "block_128x128")
    expected = product(lhs, rhs)
    lhs = dataclasses.replace(
        lhs.without_transposed(),
        data=place(lhs.data, mesh, P("data", "sequence", "model")),
        scale_inv=place(lhs.scale_inv, mesh, P("model", None, "data", "sequence")),
    )
    rhs = dataclasses.replace(
        rhs.without_data(),
        transposed=place(rhs.transposed, mesh, P(None, None, "model")),
        transposed_scale_inv=place(rhs.transposed_scale_inv, mesh, P(None, None, "model")),
    )
    compiled = jax.jit(lambda *a: ops.gemm(*a, out_dtype="float32", implementation="native")).lower(lhs, rhs).compile()
    result = compiled(lhs, rhs)
    assert_product(result, expected, dtype="float32")
    assert_exchanges_only(compiled, result, "model")


# ---------------------------------------------------------------------------------------- what follows a split product


def test_epilogue_where_a_shard_has_short_rows(make_mesh, rng):
    """Rows of 24 values split in two have 12, which cuBLASLt's epilogues do not take."""
    mesh = make_mesh({"data": AUTO, "model": AUTO})
    lhs, rhs = random_array(rng, (16, 32), "bfloat16"), random_array(rng, (32, 24), "bfloat16")
    expected = gelu(product(lhs, rhs))
    operands = place_operands(lhs, rhs, mesh, "data", "model", None)
    compiled = jax.jit(lambda *a: ops.gemm(*a, activation="gelu", implementation="native")).lower(*operands).compile()
    assert_close(compiled(*operands), expected, dtype="bfloat16")
    assert collectives(compiled) == []


@pytest.mark.parametrize(
    ("dtype", "other_dtype", "axis_type"), [("float32", "float32", AUTO), ("float16", "bfloat16", EXPLICIT)]
)
def test_an_accumulator_that_lies_otherwise(dtype, other_dtype, axis_type, make_mesh, rng):
    mesh = make_mesh({"data": axis_type, "model": axis_type})
    operands = (random_array(rng, (16, 32), dtype), random_array(rng, (32, 16), dtype))
    accumulator = random_array(rng, (16, 16), other_dtype)

    @jax.jit
    def run(lhs, rhs, accumulator):
        return ops.gemm(lhs, rhs, out_dtype=other_dtype, implementation="native", accumulator=accumulator)

    expected = run(*operands, accumulator)
    placed = place_operands(*operands, mesh, "data", "model", None), place(accumulator, mesh, P("model", "data"))
    assert_close(run(*placed[0], placed[1]), expected, dtype=other_dtype)


# -------------------------------------------------------------------------------------------------------- accumulation
