"""Every refused argument is named, with its value, the rule and the way out."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gemm_oracle import E4M3, E5M2, random_array, random_product, random_quantized, wide

from te_jax import native, ops
from te_jax.native import extension
from te_jax.testing import assert_close


def ones(*shape):
    return np.ones(shape, np.float32)


RNG = np.random.default_rng(0)
LHS, RHS = random_product(RNG, (8,), (32,), (48,), "tensor")
ROWS = random_product(RNG, (8,), (32,), (48,), "row")
BLOCKS = random_product(RNG, (8,), (32,), (48,), "block")
X, W = ones(8, 4), ones(4, 6)


def quantized(rows, cols, scaling="tensor", **options):
    return random_quantized(RNG, rows, cols, scaling, **options)


@pytest.mark.parametrize(
    ("lhs", "rhs", "options", "message"),
    [
        # kinds of operands
        (LHS, W, {}, "rhs is a plain array and the other operand quantized; quantize both or neither"),
        (X, RHS, {}, "lhs is a plain array and the other operand quantized"),
        (X.astype(jnp.int32), W, {}, "lhs has dtype int32; it must be a QuantizedArray, float32, bfloat16 or float16"),
        (X, W.astype(E4M3), {}, "rhs has dtype float8_e4m3fn; it must be a QuantizedArray"),
        (X, W.astype(jnp.bfloat16), {}, "rhs has dtype bfloat16 and lhs float32; cast one of them"),
        (LHS.without_data(), RHS, {},
         "lhs has no data copy, which lhs_contracting='cols' reads; quantize it with copies="),
        (LHS, RHS.without_transposed(), {}, "rhs has no transposed copy, which rhs_contracting='rows' reads"),
        (quantized((8,), (48,), dtype=E5M2), quantized((48,), (32,), dtype=E5M2), {},
         "lhs and rhs are both float8_e5m2, which no GPU multiplies; quantize one of them to float8_e4m3fn"),
        (dataclasses.replace(LHS, data=LHS.data.astype(jnp.bfloat16)), RHS, {},
         "lhs has data of dtype bfloat16; it must be float8_e4m3fn or float8_e5m2"),
        (jax.tree.map(lambda x: x[None], LHS), RHS, {}, "a batch of products is written with jax.vmap"),
        (None, W, {}, "lhs is None; it must be an array"),
        (X, "kernel", {}, "rhs is of type str; it must be an array"),
        (X, W, {"bias": LHS}, "bias is a QuantizedArray; it must be a plain array: pass what was quantized, or its"),
        (X, W, {"accumulator": LHS}, "accumulator is a QuantizedArray"),
        # shapes
        (X, ones(5, 6), {}, "rhs sums over dimensions of sizes (5,), but lhs over (4,)"),
        (X, W, {"lhs_contracting": "rows"}, "rhs sums over dimensions of sizes (4,), but lhs over (8,)"),
        (X, W, {"contracting_ndim": 2}, "rhs sums over dimensions of sizes (4, 6), but lhs over (8, 4)"),
        (X, W, {"contracting_ndim": 3}, "lhs has shape (8, 4); a product over 3 dimensions needs as many"),
        (X, W, {"contracting_ndim": -1}, "contracting_ndim is -1; it must be an integer of at least 0, or None"),
        (X, W, {"contracting_ndim": True}, "contracting_ndim is True; it must be an integer of at least 0, or None"),
        (LHS, RHS, {"contracting_ndim": 2}, "contracting_ndim is 2, but lhs was quantized for 1 summed dimensions"),
        (X, W, {"lhs_contracting": "columns"}, "lhs_contracting is 'columns'; it must be 'cols' or 'rows'"),
        (X, W, {"rhs_contracting": None}, "rhs_contracting is None; it must be 'cols' or 'rows'"),
        (dataclasses.replace(ROWS[0], scale_inv=ones(7)), ROWS[1], {},
         "lhs has scales of shape (7,) and dtype float32; for data of shape (8, 48) and 'row' scaling they must be "
         "float32 (8,)"),
        (LHS, dataclasses.replace(RHS, transposed_scale_inv=np.ones((), jnp.bfloat16)), {},
         "rhs has scales of shape () and dtype bfloat16"),
        # scalings
        (LHS, ROWS[1], {}, "rhs has 'row' scales and lhs 'tensor'; both must have the same kind"),
        (BLOCKS[0], LHS, {"rhs_contracting": "cols"},
         "a product of blocks needs 'block_1x128' on lhs and 'block_128x128' on"),
        (quantized((8,), (48,), "block_128x128"), quantized((48,), (32,), "block_1x128"), {},
         "lhs has 'block_128x128' scales and rhs 'block_1x128'; a product of blocks needs 'block_1x128' on lhs and "
         "'block_128x128' on rhs: quantize them so, or exchange them and transpose the result"),
        (quantized((8,), (48,), "block_1x128"), quantized((48,), (32,), "block_1x128"), {},
         "rhs 'block_1x128'; a product"),
        (quantized((8,), (3, 16), "block_1x128"), quantized((3, 16), (32,), "block_128x128"), {},
         "lhs sums over dimensions of sizes (3, 16); with blocks the last of several must be a multiple of 128: "
         "collapse them into one before quantizing"),
        # what follows
        (X, W, {"bias": ones(5)}, "bias has shape (5,); for a result of shape (8, 6) it must have (6,)"),
        (X, W, {"bias": np.ones(6, jnp.int32)}, "bias has dtype int32; it must be float32, bfloat16 or float16"),
        (X, W, {"activation": "relu"}, "activation is 'relu'; it must be None or 'gelu': apply others to the result"),
        (X, W, {"save_preactivation": True}, "save_preactivation is True without an activation"),
        (X, W, {"out_dtype": jnp.int8}, "out_dtype is int8; it must be float32, bfloat16 or float16; for FP8, q"),
        (X, W, {"out_dtype": E4M3}, "out_dtype is float8_e4m3fn"),
        (X, W, {"out_dtype": "bf"}, "out_dtype is 'bf'; it must be float32, bfloat16 or float16"),
        (quantized((8,), (48,), stands_for="float32"), RHS, {},
         "lhs stands for float32 and rhs for bfloat16; give the out_dt"),
        # accumulation
        (X, W, {"accumulator": ones(6, 8)}, "accumulator has shape (6, 8); for a result of shape (8, 6)"),
        (X, W, {"accumulator": ones(8, 6), "out_dtype": jnp.bfloat16},
         "accumulator has dtype float32 and out_dtype is bf"),
        (X, W, {"accumulator": ones(8, 6), "accumulate": "no"}, "accumulate is 'no'; it must be True or False"),
        (X, W, {"accumulator": ones(8, 6), "bias": ones(6)}, "accumulator is given together with bias"),
        (X, W, {"accumulator": ones(8, 6), "activation": "gelu"}, "accumulator is given together with activation"),
        # what multiplies
        (LHS, RHS, {"algorithm": "cublas"}, "algorithm is 'cublas'; it must be 'auto', 'cublaslt' or 'te_jax'"),
        (LHS, RHS, {"algorithm": None}, "algorithm is None; it must be 'auto', 'cublaslt' or 'te_jax'"),
        (X, W, {"algorithm": "te_jax"}, "algorithm is 'te_jax', whose kernel multiplies FP8, and lhs and rhs are"),
        (*BLOCKS, {"algorithm": "cublaslt"},
         "algorithm is 'cublaslt', and lhs and rhs have block scales, with which only the package's kernel "
         "multiplies: use algorithm='auto' or 'te_jax'"),
        (X, W, {"implementation": "cuda"}, "implementation is 'cuda'; it must be None, 'native', 'xla' or 'reference'"),
    ], ids=lambda value: "",
)  # fmt: skip
def test_message_names_argument_value_and_rule(lhs, rhs, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ops.gemm(lhs, rhs, **options)


@pytest.mark.parametrize("chosen", ["", "false", "OFF", "2"])
def test_a_choice_of_tuning_that_is_none(chosen, monkeypatch):
    """It would be taken for 1, and products that are to be the same in every process would not be."""
    monkeypatch.setenv("TE_JAX_AUTOTUNE", chosen)
    with pytest.raises(ValueError, match=f"TE_JAX_AUTOTUNE is '{chosen}' in the environment; it must be 0 .* or 1 "):
        ops.gemm(jnp.ones((16, 16)), jnp.ones((16, 16)))


def test_arrays_and_integers_of_numpy_are_taken(implementation):
    result = ops.gemm(
        ones(2, 3),
        ones(3, 4),
        contracting_ndim=np.int64(1),
        implementation=implementation,
    )
    np.testing.assert_array_equal(result, np.full((2, 4), 3.0))


# --------------------------------------------------------------------------------------------- what the handler refuses

F32 = jax.ShapeDtypeStruct((8, 32), jnp.float32)
NONE = jax.ShapeDtypeStruct((0,), jnp.float32)
ABSENT = np.zeros(0, np.float32)
OPERANDS = ("a", "b", "a_scale_inv", "b_scale_inv", "bias", "accumulator")
RESULTS = ("d", "preactivation", "workspace")


def call(**given):
    """te_gemm of a plain product [8, 48] · [32, 48]ᵀ, but for what is given."""
    operands = dict.fromkeys(OPERANDS, ABSENT) | {"a": ones(8, 48), "b": ones(32, 48)}
    results = dict.fromkeys(RESULTS, NONE) | {"d": F32}
    attributes = {
        "a_outer_ndim": 1,
        "b_outer_ndim": 1,
        "a_summed_first": False,
        "b_summed_first": False,
        "scaling": "none",
        "gelu": False,
        "accumulate": False,
        "fast_accumulation": False,
        "algorithm": "cublaslt",
    }
    for name, value in given.items():
        assert name in operands or name in results or name in attributes
        (operands if name in operands else results if name in results else attributes)[name] = value
    if jax.default_backend() == "gpu" and "workspace" not in given:
        results["workspace"] = jax.ShapeDtypeStruct((2**25 + 512,), jnp.uint8)
    return native.call_in_order("te_gemm", tuple(results.values()), *operands.values(), **attributes)[0]


def fp8(*shape, dtype=E4M3):
    return np.ones(shape, dtype)


SCALED = {
    "a": fp8(8, 48),
    "b": fp8(32, 48),
    "a_scale_inv": ones(1),
    "b_scale_inv": ones(1),
    "scaling": "tensor",
}
# XLA leaves out calls of which no result has elements.
SUMMED_FIRST = {"a_summed_first": True, "b_summed_first": True, "workspace": jax.ShapeDtypeStruct((1,), jnp.uint8)}
EMPTY, NONE_BY_ONE = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 0, 1), (0, 1)))
GELU = {"gelu": True, "d": jax.ShapeDtypeStruct((8, 32), jnp.bfloat16)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": np.ones((8, 48), jnp.int32)}, "a is S32[8,48]; it must be of a float type of 8, 16 or 32 bits"),
        ({"b": ones(32, 47)}, "b is F32[32,47]; it must sum over 48 values, as a does"),
        ({"b": np.ones((32, 48), jnp.bfloat16)}, "b is BF16[32,48]; it must have the type of the other operand"),
        ({"d": jax.ShapeDtypeStruct((8, 31), jnp.float32)}, "d is F32[8,31]; it must have 256 elements"),
        ({"d": jax.ShapeDtypeStruct((8,), jnp.float32)},
         "d is F32[8]; it must have the outer dimensions of a and of b"),
        ({"a_outer_ndim": -1}, "d is F32[8,32]; it must have the outer dimensions of a and of b"),
        ({"b_outer_ndim": -3}, "d is F32[8,32]; it must have the outer dimensions of a and of b"),
        # sums and products that would wrap
        ({"a_outer_ndim": 2**63 - 1, "b_outer_ndim": 2**63 - 1},
         "d is F32[8,32]; it must have the outer dimensions of a and of b"),
        ({"a_outer_ndim": 2**62, "b_outer_ndim": 2**63 - 1},
         "d is F32[8,32]; it must have the outer dimensions of a and of b"),
        ({"a": ones(16, 0, 2**30), "b": ones(16, 0, 2**30), "d": EMPTY} | SUMMED_FIRST,
         "d is F32[16,0,1]; it must have more elements than arrays can have"),
        ({"a": ones(0, 2**31), "b": ones(0, 1), "d": NONE_BY_ONE} | SUMMED_FIRST,
         "a is F32[0,2147483648]; it must have groups of dimensions below 2^31"),
        ({"workspace": jax.ShapeDtypeStruct((4,), jnp.int4)}, "workspace is S4[4]; it must be of type U8"),
        ({"scaling": "channel"}, "a is F32[8,48]; it must come with scaling none, tensor, row or block"),
        ({"scaling": "tensor"}, "a is F32[8,48]; it must be FP8 with scaling"),
        ({"a": fp8(8, 48)}, "a is F8E4M3FN[8,48]; it must be plain without scaling"),
        (SCALED | {"a_scale_inv": ones(8)}, "a_scale_inv is F32[8]; it must have 1 elements"),
        (SCALED | {"b_scale_inv": np.ones(1, jnp.bfloat16)}, "b_scale_inv is BF16[1]; it must be of type F32"),
        (SCALED | {"a": fp8(8, 48, dtype=E5M2), "b": fp8(32, 48, dtype=E5M2)},
         "b is F8E5M2[32,48]; it must be E4M3 where the other one is E5M2"),
        (SCALED | {"a_summed_first": True, "a": fp8(48, 8)},
         "a is F8E4M3FN[48,8]; it must have its summed dimensions last with scaling"),
        (SCALED | {"bias": ones(32)}, "bias is F32[32]; it must be absent where tensors in FP8 give float32"),
        (SCALED | {"d": jax.ShapeDtypeStruct((8, 32), E4M3)}, "d is F8E4M3FN[8,32]; it must be float32, bfloat16 or"),
        ({"algorithm": "mma"}, "a is F32[8,48]; it must come with algorithm auto, cublaslt or te_jax"),
        ({"algorithm": "te_jax"}, "a is F32[8,48]; it must be FP8 with algorithm te_jax"),
        (SCALED | {"scaling": "block"}, "a is F8E4M3FN[8,48]; it must come with algorithm te_jax with block scaling"),
        ({"bias": ones(31)}, "bias is F32[31]; it must have 32 elements"),
        ({"bias": np.ones(32, jnp.bfloat16)}, "bias is BF16[32]; it must be of type F32"),
        ({"gelu": True}, "d is F32[8,32]; it must be of 16 bits for gelu"),
        (SCALED | GELU | {"algorithm": "te_jax"}, "d is BF16[8,32]; it must come without gelu with algorithm te_jax"),
        (SCALED | GELU | {"scaling": "row", "a_scale_inv": ones(8), "b_scale_inv": ones(32)},
         "d is BF16[8,32]; it must come without gelu with row or block scaling"),
        ({"preactivation": F32}, "preactivation is F32[8,32]; it must come with gelu"),
        ({"accumulator": ones(8, 32), "accumulate": True, "bias": ones(32)},
         "accumulator is F32[8,32]; it must come without bias and gelu"),
        ({"accumulate": True}, "accumulator is F32[0]; it must be there with accumulate"),
        ({"accumulator": ones(8, 31), "accumulate": True}, "accumulator is F32[8,31]; it must have 256 elements"),
    ], ids=lambda value: value.split(";")[0] if isinstance(value, str) else "",
)  # fmt: skip
def test_handler_refuses(given, message, native_kernels):
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(f"INVALID_ARGUMENT: te_gemm: {message}")):
        jax.block_until_ready(call(**given))


def test_handler_works_otherwise(native_kernels):
    np.testing.assert_array_equal(call(), np.full((8, 32), 48.0))
    np.testing.assert_array_equal(call(**SCALED), np.full((8, 32), 48.0))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about the CPU's BLAS")
@pytest.mark.parametrize(
    ("signature", "fits"),
    [
        ("void (char *, char *, int *, int *, int *, {0}, {0}, int *, {0}, int *, {0}, {0}, int *)", True),
        ("void (char *, char *, long *, long *, long *, {0}, {0}, long *, {0}, long *, {0}, {0}, long *)", False),
        ("int (char *, char *)", False),
        ("", False),
    ],
)
def test_only_a_blas_of_the_known_signature_is_used(signature, fits, native_kernels):
    """scipy names the C types of what it exports; a BLAS with 64-bit integers would read beyond the arguments."""
    import ctypes

    from scipy.linalg import cython_blas

    module, _ = extension._load("cpu")
    real = cython_blas.__pyx_capi__["sgemm"]
    get_name, get, new = (getattr(ctypes.pythonapi, f"PyCapsule_{name}") for name in ("GetName", "GetPointer", "New"))
    get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    name = signature.format("__pyx_t_5scipy_6linalg_11cython_blas_s *").encode()
    x, w = random_array(RNG, (3, 5)), random_array(RNG, (5, 4))
    try:
        module.use_sgemm(new(get(real, get_name(real)), name, None))
        if fits:
            assert_close(ops.gemm(x, w, implementation="native"), wide(x) @ wide(w), dtype="float32")
        else:
            with pytest.raises(
                (ValueError, jax.errors.JaxRuntimeError), match=r"scipy's BLAS cannot be used \(its sgemm"
            ):
                jax.block_until_ready(ops.gemm(x, w, implementation="native"))
    finally:
        module.use_sgemm(real)
    assert_close(ops.gemm(x, w, implementation="native"), wide(x) @ wide(w), dtype="float32")
