"""Result types of operations, for pyright, which reads this file in `make lint`; here they are what is returned."""

from typing import assert_type

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, PartitionSpec

from te_jax.ops import GemmResult, gemm, quantize
from te_jax.parallel import all_gather_matmul
from te_jax.quantized import QuantizedArray
from te_jax.recipe import CurrentScaling


def test_results_of_operations():
    x = jnp.ones((32, 16))
    how = CurrentScaling().quantization("activation")
    array = assert_type(quantize(x, how), QuantizedArray)
    product = assert_type(gemm(array, array, rhs_contracting="cols"), Array)
    both = gemm(array, array, rhs_contracting="cols", activation="gelu", save_preactivation=True)
    assert assert_type(both, GemmResult).preactivation.shape == both.value.shape == (32, 32)
    assert (array.shape, product.shape) == ((32, 16), (32, 32))


def test_results_of_gathered_products_follow_from_weights():
    def products(x: Array, w: Array) -> tuple[Array, ...]:
        y = assert_type(all_gather_matmul(x, w, axis_name="d"), Array)
        several = assert_type(all_gather_matmul(x, (w, w), axis_name="d"), tuple[Array, ...])
        return y, *several

    mesh, spec = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,)), PartitionSpec("d")
    x, w = jnp.ones((4, 16)), jnp.ones((16, 8))
    results = jax.shard_map(products, mesh=mesh, in_specs=spec, out_specs=spec)(x, w)
    assert [y.shape for y in results] == [(4, 8)] * 3
