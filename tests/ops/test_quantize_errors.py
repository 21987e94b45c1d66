"""Every refused argument is named, with its value and the rule; and what the handlers themselves refuse."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantize_oracle import E4M3, quantization_of

from te_jax import native, ops
from te_jax.recipe import CurrentScaling, Quantization

X = jnp.zeros((4, 8), jnp.float32)
TENSOR, ROW, BLOCK = (quantization_of(name) for name in ("tensor", "row", "1x128"))


@pytest.mark.parametrize(
    ("x", "quantization", "options", "message"),
    [
        (X.astype(jnp.int32), TENSOR, {}, "x has dtype int32; it must be float32, bfloat16 or float16"),
        (X.astype(jnp.float8_e4m3fn), TENSOR, {}, "x has dtype float8_e4m3fn"),
        (X[0], TENSOR, {}, "x has shape (8,); it needs at least two dimensions"),
        (X[0, 0], TENSOR, {}, "x has shape ()"),
        (X, TENSOR, {"row_ndim": 0}, "row_ndim is 0; for x of shape (4, 8) it must be in [1, 1]"),
        (X, TENSOR, {"row_ndim": 2}, "row_ndim is 2"),
        (X, TENSOR, {"row_ndim": 1.5}, "row_ndim is 1.5; it must be an integer"),
        (X, TENSOR, {"row_ndim": True}, "row_ndim is True; it must be an integer"),
        (X, TENSOR, {"copies": "rows"}, "copies is 'rows'; it must be one of"),
        (X, CurrentScaling(), {}, "quantization is CurrentScaling("),
        (X, "tensor", {}, "quantization is 'tensor'; it must be a Quantization"),
        (X, Quantization(np.dtype(np.float16), "row", "row"), {}, "quantization has dtype float16"),
        (X, Quantization(E4M3, "column", "row"), {}, "quantization has scaling 'column'; it must be one of"),
        (X, Quantization(E4M3, "row", "none"), {}, "quantization has transposed_scaling 'none'"),
        (X, Quantization(E4M3, "row", "row", 1), {}, "quantization.power_of_two_scales is 1; it must be True or False"),
        (X, TENSOR, {"amax": jnp.zeros(2)}, "amax has shape (2,) and dtype float32; it must be a float32 scalar"),
        (X, TENSOR, {"amax": jnp.bfloat16(1)}, "amax has shape () and dtype bfloat16"),
        (X, ROW, {"amax": jnp.float32(1)}, "amax is given, but quantization has scaling 'row'"),
        (X, TENSOR, {"amax_axis": {"row": "data"}}, "amax_axis has keys ['row']; they must be out of"),
        (jnp.zeros((3, 5, 8)), BLOCK, {}, "x has rows of shape (3, 5); blocks of 128 along them need"),
        (jnp.zeros((3, 5, 8)), BLOCK, {"row_ndim": 1}, "x has cols of shape (5, 8); blocks of 128 along them need"),
        (X, TENSOR, {"straight_through": "yes"}, "straight_through is 'yes'; it must be True or False"),
        (X, TENSOR, {"implementation": "cuda"}, "implementation is 'cuda'; it must be None,"),
    ],
)
def test_message_names_argument_value_and_rule(x, quantization, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ops.quantize(x, quantization, **options)


def test_numpy_arrays_and_numbers_are_taken(implementation):
    x = np.arange(32, dtype=np.float32).reshape(4, 8)
    quantized = ops.quantize(
        x, TENSOR, row_ndim=np.int64(1), amax=np.float32(31), implementation=implementation
    )  # fmt: skip
    assert np.asarray(quantized.data).astype(np.float32).max() == 448.0


F32, FP8 = np.float32, E4M3


@pytest.mark.parametrize(
    ("target", "operands", "results", "attributes", "message"),
    [
        ("te_amax_tensor", [X], [((2,), F32)], {}, "te_amax_tensor: amax is F32[2]; it must have 1 elements"),
        ("te_amax_tensor", [X.astype(np.int32)], [((), F32)], {}, "x is S32[4,8]; it must be float32"),
        ("te_amax_tensor", [X], [((), F32)], {"batch_ndim": 2}, "x is F32[4,8]; it must have batch_ndim (2)"),
        ("te_amax_tensor", [X], [((), F32)], {"row_ndim": 2**63 - 1, "batch_ndim": 1},
         "x is F32[4,8]; it must have batch"),
        ("te_amax_tensor", [X], [((), F32)], {"row_ndim": 2**62, "batch_ndim": 2**62},
         "x is F32[4,8]; it must have batch"),
        ("te_amax_tensor", [X], [((), F32)], {"row_ndim": -1, "batch_ndim": 2},
         "x is F32[4,8]; it must have batch_ndim"),
        ("te_amax_rows", [X], [((8,), F32), ((8,), F32)], {}, "row_amax is F32[8]; it must have 4 elements"),
    ],
)  # fmt: skip
def test_handlers_refuse(target, operands, results, attributes, message, native_kernels):
    results = [jax.ShapeDtypeStruct(*result) for result in results]
    attributes = {"row_ndim": 1, "batch_ndim": 0} | attributes
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(message)):
        jax.block_until_ready(jax.jit(lambda *a: native.call_in_order(target, results, *a, **attributes))(*operands))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"data": ((4, 8), F32)}, "data is F32[4,8]; it must be float8_e4m3fn or float8_e5m2"),
        ({"data": ((4, 7), FP8)}, "data is F8E4M3FN[4,7]; it must have 32 elements"),
        ({"transposed": ((8, 4), jnp.float8_e5m2)}, "transposed is F8E5M2[8,4]; it must be of type F8E4M3FN"),
        ({"data": ((0,), F32), "transposed": ((0,), F32)}, "data is F32[0]; it must be there where transposed is"),
        ({"scale_inv": ((4,), F32)}, "scale_inv is F32[4]; it must have 1 elements"),
        ({"transposed_scale_inv": ((0,), F32)}, "transposed_scale_inv is F32[0]; it must have 1 elements"),
        ({"dbias_partial": ((4, 8), F32)}, "dbias_partial is F32[4,8]; it must have 8 elements"),
    ],
)
def test_quantizing_handler_refuses(changed, message, native_kernels):
    results = {
        "data": ((4, 8), FP8),
        "transposed": ((8, 4), FP8),
        "scale_inv": ((), F32),
        "transposed_scale_inv": ((), F32),
        "amax_out": ((0,), F32),
        "dbias_partial": ((0,), F32),
    } | changed
    results = [jax.ShapeDtypeStruct(*result) for result in results.values()]
    attributes = {"row_ndim": 1, "batch_ndim": 0, "power_of_two_scales": False}
    run = jax.jit(lambda x: native.call_in_order("te_quantize_tensor", results, x, jnp.float32(1), **attributes))
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(message)):
        jax.block_until_ready(run(X))


def call_on_nothing(target, shape, results, batch_ndim=0, **attributes):
    """The results for an x without values, in memory that was not zero before."""
    results = [jax.ShapeDtypeStruct(*result) for result in results]
    operands = [jnp.zeros(shape)] + [jnp.ones(4096)] * (target == "te_quantize_tensor")
    attributes |= {"row_ndim": 1, "batch_ndim": batch_ndim}
    compiled = jax.jit(lambda *a: native.call_in_order(target, results, *a, **attributes)).lower(*operands).compile()
    jax.block_until_ready([jnp.full(4096, jnp.nan) for _ in range(64)])
    return compiled(*operands)


@pytest.mark.parametrize(
    ("target", "shape", "lengths", "batch_ndim"),
    [
        ("te_amax_tensor", (4096, 0), (4096,), 1),
        ("te_amax_rows", (4096, 0), (4096, 0), 0),
        ("te_amax_rows", (0, 4096), (0, 4096), 0),
    ],
)
def test_amax_of_no_values_is_zero(target, shape, lengths, batch_ndim, native_kernels):
    for amax in call_on_nothing(target, shape, [((length,), F32) for length in lengths], batch_ndim):
        np.testing.assert_array_equal(amax, np.zeros(amax.shape))


NOTHING = {
    "data": ((4096, 0), FP8),
    "transposed": ((0,), F32),
    "scale_inv": ((0,), F32),
    "transposed_scale_inv": ((0,), F32),
    "amax_out": ((4096,), F32),
    "dbias_partial": ((0,), F32),
}


def test_amax_of_no_values_beside_a_quantization(native_kernels):
    found = call_on_nothing("te_quantize_tensor", (4096, 0), NOTHING.values(), 1, power_of_two_scales=False)
    np.testing.assert_array_equal(found[4], np.zeros(4096))


def test_scales_of_absent_copies_are_refused(native_kernels):
    """No kernel writes them."""
    results = NOTHING | {"scale_inv": ((4096,), F32)}
    message = "scale_inv is F32[4096]; it must have no elements where its copy has none"
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(message)):
        jax.block_until_ready(
            call_on_nothing("te_quantize_tensor", (4096, 0), results.values(), 1, power_of_two_scales=False)
        )


def test_a_traced_quantization_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"quantization is .*; it must be a Quantization.* name it in static_argnames"):
        jax.jit(ops.quantize)(X, TENSOR)
