"""Float16 has native products of plain operands and no other native kernel: XLA computes the rest."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from te_jax import ops, recipe
from te_jax.native import NativeUnavailableError
from te_jax.quantized import QuantizedArray

X, KERNEL = (jax.ShapeDtypeStruct(shape, jnp.float16) for shape in ((32, 128), (128, 128)))
BLOCKS, TENSOR = recipe.BlockScaling(), recipe.CurrentScaling()


OPERATIONS = {
    "quantize": lambda x, kernel, **how: ops.quantize(x, TENSOR.quantization("activation"), **how),
    "rms_norm": lambda x, kernel, **how: ops.rms_norm(x, jnp.ones(128), **how),
    "norm in FP8": lambda x, kernel, **how: ops.layer_norm(
        x, jnp.ones(128), jnp.zeros(128), quantization=BLOCKS.quantization("activation"), **how
    ),
    "activation in FP8": lambda x, kernel, **how: ops.gated_activation(
        x, x, quantization=BLOCKS.quantization("activation"), **how
    ),
    "softmax_cross_entropy": lambda x, kernel, **how: ops.softmax_cross_entropy(x, jnp.arange(32), **how),
    "linear_cross_entropy": lambda x, kernel, **how: ops.linear_cross_entropy(x, kernel, jnp.arange(32), **how),
    "head in FP8": lambda x, kernel, **how: ops.linear_cross_entropy(
        x, kernel, jnp.arange(32), recipe=BLOCKS, **how
    ),
    "dense in FP8": lambda x, kernel, **how: ops.dense(x, kernel, recipe=TENSOR, **how),
    "gated_mlp": lambda x, kernel, **how: ops.gated_mlp(x, (kernel, kernel, kernel), recipe=BLOCKS, **how),
    "grouped_dense": lambda x, kernel, **how: ops.grouped_dense(
        x, jnp.stack([kernel, kernel]), jnp.array([16, 16]), recipe=BLOCKS, **how
    ),
}  # fmt: skip
each_operation = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
PRODUCTS = {"te_gemm", "te_gemm_sum", "te_grouped_gemm"}


@each_operation
def test_native_by_name_is_refused(operation, native_kernels):
    message = "no native kernel takes float16: cast to bfloat16 or float32, or leave implementation out"
    with pytest.raises(NativeUnavailableError, match=message):
        jax.eval_shape(lambda *operands: operation(*operands, implementation="native"), X, KERNEL)


@each_operation
def test_programs_call_products_alone(operation, native_kernels):
    """Without a warning, forward and, where the result is no FP8, backward."""

    def run(x, kernel):
        y, gradients = jax.vjp(operation, x, kernel)
        return y if isinstance(y, QuantizedArray) else gradients(jnp.ones_like(y))

    called = re.findall(r"custom_call @(te_\w+)", jax.jit(run).lower(X, KERNEL).as_text())
    assert set(called) <= PRODUCTS


def test_products_of_plain_operands_stay(native_kernels):
    lowered = jax.jit(lambda x, kernel: ops.gemm(x, kernel, implementation="native")).lower(X, KERNEL).as_text()
    assert re.findall(r"custom_call @te_gemm.*-> .*tensor<32x128xf16>", lowered)


@pytest.mark.parametrize("scaling", [TENSOR, BLOCKS], ids=["tensors", "blocks"])
@pytest.mark.parametrize("accumulates", [False, True], ids=["", "accumulator"])
def test_products_of_fp8_are_rounded_by_xla(scaling, accumulates, native_kernels, rng):
    """Once, from float32."""
    x, kernel = (jax.device_put(rng.standard_normal(a.shape).astype(np.float16)) for a in (X, KERNEL))
    accumulator = jax.device_put(rng.standard_normal(X.shape).astype(np.float32)) if accumulates else None

    @jax.jit
    def both(x, kernel, accumulator):
        x8, kernel8 = (
            ops.quantize(a, scaling.quantization(role)) for a, role in ((x, "activation"), (kernel, "kernel"))
        )
        half = None if accumulator is None else accumulator.astype(jnp.float16)
        wide = None if half is None else half.astype(jnp.float32)
        narrow = ops.gemm(x8, kernel8, out_dtype=jnp.float16, accumulator=half, implementation="native")
        return narrow, ops.gemm(x8, kernel8, out_dtype=jnp.float32, accumulator=wide, implementation="native")

    narrow, wide = both(x, kernel, accumulator)
    assert_array_equal(np.asarray(narrow), np.asarray(wide).astype(np.float16))
