"""Result types of operations, for pyright, which reads this file in `make lint`; here they are what is returned."""

import re
from pathlib import Path
from typing import assert_type

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, PartitionSpec

import te_jax
from te_jax.ops import (
    GemmResult,
    activation,
    attention,
    dense,
    gated_activation,
    gemm,
    layer_norm,
    linear_cross_entropy,
    quantize,
    rms_norm,
    softmax_cross_entropy,
)
from te_jax.parallel import all_gather_matmul
from te_jax.quantized import QuantizedArray
from te_jax.recipe import CurrentScaling, RowwiseScaling

HOW = CurrentScaling().quantization("activation")
ROWS = RowwiseScaling().quantization("activation")


def test_results_of_products():
    x, kernel = jnp.ones((32, 16)), jnp.ones((16, 8))
    array = quantize(x, HOW)
    product = assert_type(gemm(array, array, rhs_contracting="cols"), Array)
    both = gemm(array, array, rhs_contracting="cols", activation="gelu", save_preactivation=True)
    assert assert_type(both, GemmResult).preactivation.shape == both.value.shape == product.shape == (32, 32)
    y = assert_type(dense(x, kernel), Array)
    several = assert_type(dense(x, (kernel, kernel)), tuple[Array, ...])
    assert [found.shape for found in (y, *several)] == [(32, 8)] * 3


def test_results_of_quantization_follow_from_what_is_asked_for():
    x = jnp.ones((32, 16))
    alone = assert_type(quantize(x, HOW), QuantizedArray)
    with_amax = assert_type(quantize(x, HOW, with_amax=True), tuple[QuantizedArray, Array])
    with_dbias = assert_type(quantize(x, HOW, with_dbias=True), tuple[QuantizedArray, Array])
    everything = quantize(x, HOW, with_amax=True, with_dbias=True)
    _, amax, dbias = assert_type(everything, tuple[QuantizedArray, Array, Array])
    assert (alone.shape, with_amax[1].shape, with_dbias[1].shape) == (x.shape, amax.shape, dbias.shape)
    assert (amax.shape, dbias.shape) == ((), (16,))


def test_results_of_activations_follow_from_the_quantization():
    x = jnp.ones((32, 16))
    plain = assert_type(activation(x), Array), assert_type(gated_activation(x, x), Array)
    quantized = (
        assert_type(activation(x, quantization=HOW), QuantizedArray),
        assert_type(gated_activation(x, x, quantization=HOW), QuantizedArray),
    )
    with_amax = (
        assert_type(activation(x, quantization=HOW, with_amax=True), tuple[QuantizedArray, Array]),
        assert_type(gated_activation(x, x, quantization=HOW, with_amax=True), tuple[QuantizedArray, Array]),
    )
    assert {found.shape for found in (*plain, *quantized, *(pair[0] for pair in with_amax))} == {x.shape}
    assert all(isinstance(found, QuantizedArray) for found in quantized)


def test_results_of_norms_follow_from_residual_and_quantization():
    x, scale = jnp.ones((32, 16)), jnp.ones((16,))
    plain = assert_type(rms_norm(x, scale), Array)
    y, residual = assert_type(rms_norm(x, scale, residual=x), tuple[Array, Array])
    y8 = assert_type(rms_norm(x, scale, quantization=ROWS), QuantizedArray)
    pair = assert_type(layer_norm(x, scale, residual=x, quantization=ROWS), tuple[QuantizedArray, Array])
    assert isinstance(y8, QuantizedArray)
    assert isinstance(pair[0], QuantizedArray)
    assert {found.shape for found in (plain, y, residual, y8, *pair)} == {x.shape}


def test_results_of_losses_and_attention():
    x, kernel, labels = jnp.ones((32, 16)), jnp.ones((16, 8)), jnp.zeros((32,), jnp.int32)
    loss = assert_type(softmax_cross_entropy(jnp.ones((32, 8)), labels), Array)
    assert assert_type(linear_cross_entropy(x, kernel, labels), Array).shape == loss.shape == ()
    _, lse = assert_type(linear_cross_entropy(x, kernel, labels, return_lse=True), tuple[Array, Array])
    assert lse.shape == labels.shape
    q = jnp.ones((1, 4, 2, 16))
    assert assert_type(attention(q, q, q), Array).shape == q.shape
    _, lse = assert_type(attention(q, q, q, return_lse=True), tuple[Array, Array])
    assert lse.size == 8


def test_results_of_gathered_products_follow_from_weights():
    def products(x: Array, w: Array) -> tuple[Array, ...]:
        y = assert_type(all_gather_matmul(x, w, axis_name="d"), Array)
        several = assert_type(all_gather_matmul(x, (w, w), axis_name="d"), tuple[Array, ...])
        return y, *several

    mesh, spec = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,)), PartitionSpec("d")
    x, w = jnp.ones((4, 16)), jnp.ones((16, 8))
    results = jax.shard_map(products, mesh=mesh, in_specs=spec, out_specs=spec)(x, w)
    assert [y.shape for y in results] == [(4, 8)] * 3


_MOST_ANY = 842
"""Names of types that say nothing. Lower it with them."""


def test_types_say_something():
    package = Path(te_jax.__file__).parent
    count = sum(len(re.findall(r"\bAny\b", path.read_text(encoding="utf-8"))) for path in package.rglob("*.py"))
    assert count <= _MOST_ANY
