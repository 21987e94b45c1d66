"""Sums of GEMMs of blocks in one pass, against NumPy."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.gemm_oracle import E4M3, E5M2, product, random_product, random_quantized, tolerance_of
from parameters import in_turns

from te_jax import native, ops, recipe
from te_jax.ops.gemm import gemm_sum
from te_jax.testing import assert_close

DEPTHS = {
    "two": ((512,), (512,)),
    "three": ((512,), (128,), (128,)),
    "tails": ((144,), (1040,), (16,)),
    "groups": ((2, 256), (128,)),
    "four": ((128,), (128,), (128,), (128,)),
}


def draw(rng, depths, m=(264,), n=(272,), **options):
    return [random_product(rng, m, n, k, "block", **options) for k in depths]


@functools.partial(jax.jit, static_argnames=("dtype", "implementation", "rhs_contracting"))
def sum_of(pairs, dtype="float32", implementation="native", **options):
    return gemm_sum(pairs, out_dtype=jnp.dtype(dtype), implementation=implementation, **options)


def assert_sum(found, pairs, dtype="float32", **options):
    expected = sum(product(*pair, **options) for pair in pairs)
    assert_close(found, expected, dtype=dtype, tolerance=tolerance_of(dtype, "block"))


@pytest.mark.parametrize(
    ("depths", "dtype", "lhs_dtype", "rhs_contracting", "implementation"),
    in_turns(
        DEPTHS | {"two again": DEPTHS["two"]},
        ["bfloat16", "float32", "float16"],
        [E4M3, E5M2],
        ["rows", "cols"],
        ["native", "native", "native", "reference"],
    ),
)
def test_values(rng, depths, dtype, lhs_dtype, rhs_contracting, implementation, native_kernels):
    """Pairs of different depths, with tails of K and of N."""
    pairs = draw(rng, depths, lhs_dtype=lhs_dtype)
    if rhs_contracting == "cols":
        rhs = [random_quantized(rng, (272,), k, "block_128x128") for k in depths]
        pairs = [(lhs, other) for (lhs, _), other in zip(pairs, rhs, strict=True)]
    found = sum_of(pairs, dtype, implementation, rhs_contracting=rhs_contracting)
    assert_sum(found, pairs, dtype, rhs_contracting=rhs_contracting)


@pytest.mark.parametrize(
    ("m", "n", "depths"),
    in_turns([4, 128, 192, 256, 1028], [16, 144, 1024], [((640,), (384,)), ((128,), (640,), (256,))]),
)
def test_tiles(rng, m, n, depths, native_kernels):
    """Tiles that rows or columns do not fill, and scales that begin anywhere in 16 bytes."""
    pairs = draw(rng, depths, (m,), (n,))
    assert_sum(sum_of(pairs), pairs)


@pytest.mark.parametrize("count", [2, 3])
def test_no_product_is_rounded(rng, count, native_kernels):
    """Products that nearly cancel: one rounded to bfloat16 would be all error."""
    lhs, rhs = draw(rng, ((256,),))[0]
    nearly = dataclasses.replace(lhs, scale_inv=lhs.scale_inv * jnp.float32(-(1 + 2.0**-8) / (count - 1)))
    pairs = [(lhs, rhs), *[(nearly, rhs)] * (count - 1)]
    assert_sum(sum_of(pairs, "bfloat16"), pairs, "bfloat16")


@pytest.mark.parametrize(
    ("change", "calls"),
    [
        ({}, (1, 0)),
        ({"m": (6,)}, (0, 2)),  # the kernel reads the scales of four rows
        ({"depths": ((136,), (128,))}, (0, 2)),  # and 16 values of k at a time
        ({"n": (40,)}, (0, 2)),  # and of n
        ({"depths": DEPTHS["four"]}, (0, 4)),
    ],
    ids=["sum", "rows", "depth", "columns", "four"],
)
def test_one_pass_where_sizes_allow_it(rng, change, calls, native_kernels):
    pairs = draw(rng, **({"depths": DEPTHS["two"], "m": (8,)} | change))
    text = sum_of.lower(pairs, "bfloat16").as_text()
    assert tuple(len(re.findall(rf"@{name}\(", text)) for name in ("te_gemm_sum", "te_gemm")) == calls
    assert_sum(sum_of(pairs, "bfloat16"), pairs, "bfloat16")


def test_pairs_of_several_types_are_several_products(rng, native_kernels):
    pairs = draw(rng, ((128,),)) + draw(rng, ((128,),), lhs_dtype=E5M2)
    assert_sum(sum_of(pairs), pairs)


def test_gradient_of_gate_and_up_is_one_product(rng, native_kernels):
    """The gradient of x, in `ops.dense` and `ops.gated_mlp`; tests/conformance has its values."""
    x = jnp.asarray(rng.standard_normal((256, 128)), jnp.bfloat16)
    kernels = [jnp.asarray(rng.standard_normal((128, 256)), jnp.float32) for _ in range(2)]
    down = jnp.asarray(rng.standard_normal((256, 128)), jnp.float32)

    def dense(x):
        ys = ops.dense(x, kernels, recipe=recipe.BlockScaling(), implementation="native")
        return sum(jnp.sum(y.astype(jnp.float32) ** 2) for y in ys)

    def mlp(x):
        y = ops.gated_mlp(x, (*kernels, down), recipe=recipe.BlockScaling(), implementation="native")
        return jnp.sum(y.astype(jnp.float32) ** 2)

    for loss in dense, mlp:
        assert jax.jit(jax.grad(loss)).lower(x).as_text().count("@te_gemm_sum(") == 1


def _operands(**given):
    ones = {"a": jnp.ones((8, 256), E4M3), "b": jnp.ones((32, 256), E4M3)}
    ones |= {"a_scale_inv": jnp.ones((2, 8)), "b_scale_inv": jnp.ones((1, 2))}
    ones |= {f"second_{name}": x for name, x in ones.items()}
    ones |= dict.fromkeys((f"third_{name}" for name in ("a", "b", "a_scale_inv", "b_scale_inv")), jnp.zeros(0))
    return list((ones | given).values())


def _call(*operands, shape=(8, 32)):
    return native.call_in_order("te_gemm_sum", (jax.ShapeDtypeStruct(shape, jnp.float32),), *operands)[0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"b": jnp.ones((32, 255), E4M3)}, "b is F8E4M3FN[32,255]; it must sum over as many values as a does"),
        ({"a_scale_inv": jnp.ones((2, 4))}, "a_scale_inv is F32[2,4]; it must have 16 elements"),
        ({"second_a": jnp.ones((4, 256), E4M3)}, "second_a is F8E4M3FN[4,256]; it must have the type and the rows of"),
        ({"second_a": jnp.ones((8, 256), E5M2)}, "second_a is F8E5M2[8,256]; it must have the type and the rows of"),
        ({"second_b": jnp.ones((16, 256), E4M3)}, "second_b is F8E4M3FN[16,256]; it must have the type and the rows"),
        ({"second_b_scale_inv": jnp.ones(1)}, "second_b_scale_inv is F32[1]; it must have 2 elements"),
        ({"second_a": jnp.zeros(0)}, "second_a is F32[0]; it must"),
        ({"third_a": jnp.ones((8, 128), E4M3)}, "third_b is F32[0]; it must be FP8 with scaling"),
    ],
    ids=lambda value: value.split(" ")[0] if isinstance(value, str) else "",
)
def test_handler_refuses(given, message, native_kernels):
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(f"INVALID_ARGUMENT: te_gemm_sum: {message}")):
        jax.block_until_ready(_call(*_operands(**given)))


def test_handler_takes_the_rest(native_kernels):
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape("d is F32[8,16]; it must have 256 elements")):
        jax.block_until_ready(_call(*_operands(), shape=(8, 16)))
    np.testing.assert_array_equal(_call(*_operands()), np.full((8, 32), 512.0))
