"""Operands of one shape and dtype cannot change places unseen: each target then gives another result, or refuses."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax import native
from te_jax.native import extension
from te_jax.testing import assert_close

E4M3, F32, S32 = jnp.float8_e4m3fn, jnp.float32, jnp.int32
N = 128  # of everything, so that as many operands as can be have one shape
X, ROW, ONE, CODES = (N, N), (N,), (), ((N, N), E4M3)
BLOCKS, SQUARE = (1, N), (1, 1)  # scales of 1×128 and of 128×128 values

MATRIX = {"row_ndim": 1, "batch_ndim": 0}
IN_BLOCKS = {"data_128x128": False, "transposed_128x128": False, "power_of_two_scales": False}
NORM = MATRIX | {"epsilon": 1e-6, "centered": True}
SILU = MATRIX | {"kind": "silu", "alpha": 1.0, "limit": math.inf, "offset": 0.0}
LOSS = {"softcap": 0.0, "padding": 0}
GRADIENT = LOSS | {"label_smoothing": 0.1, "uniform": 0.1 / N, "z_loss": 1e-3}
LABELS = (ROW, S32)
COPIES = {"data": CODES, "transposed": CODES}
OF_TENSOR = COPIES | {"scale_inv": ONE, "transposed_scale_inv": ONE, "amax_out": ONE}
OF_BLOCKS = COPIES | {"scale_inv": BLOCKS, "transposed_scale_inv": BLOCKS}


def of_each(results, *names):
    return {f"{name}_{result}": type_ for name in names for result, type_ in results.items()}


# {target: (operands, results, attributes)}; a type without a dtype is of float32.
CALLS = {
    "te_gemm": (
        {"a": CODES, "b": CODES, "a_scale_inv": ROW, "b_scale_inv": ROW, "accumulator": X},
        {"d": X},
        {"a_outer_ndim": 1, "b_outer_ndim": 1, "a_summed_first": False, "b_summed_first": False, "scaling": "row"}
        | {"gelu": False, "accumulate": True, "fast_accumulation": False, "algorithm": "te_jax"},
    ),
    "te_gemm_sum": (
        {
            f"{pair}{name}": type_
            for pair in ("", "second_", "third_")
            for name, type_ in {"a": CODES, "b": CODES, "a_scale_inv": BLOCKS, "b_scale_inv": SQUARE}.items()
        },
        {"d": X},
        {},
    ),
    "te_symmetric_gemm": (
        dict.fromkeys("abc", ((1, N, N), jnp.float16)),
        {"d": ((1, N, N), jnp.float16)},
        {"summed_first": False, "alpha": 1.0, "beta": 1.0, "diagonal": 0.0},
    ),
    "te_grouped_gemm": (
        {"a": CODES, "b": ((1, N, N), E4M3), "a_scale_inv": BLOCKS, "b_scale_inv": SQUARE, "bounds": ((1, 2), S32)}
        | {"second_a": CODES, "second_b": ((1, N, N), E4M3), "second_a_scale_inv": BLOCKS}
        | {"second_b_scale_inv": SQUARE, "bias": (1, N)},
        {"d": X},
        {"grouped_sums": False, "b_summed_first": False, "scaling": "block", "accumulate": False},
    ),
    "te_softmax_cross_entropy_gradient": (
        {"logits": X, "labels": LABELS, "lse": ROW, "weight": ROW}, {"gradient": X}, GRADIENT
    ),
    "te_softmax_cross_entropy_gradient_blocks": (
        {"logits": X, "labels": LABELS, "lse": ROW, "weight": ROW}, OF_BLOCKS, GRADIENT | MATRIX | IN_BLOCKS
    ),
    "te_quantize_rows": (
        {"x": X, "row_amax": ROW, "col_amax": ROW},
        COPIES | {"row_scale_inv": ROW, "col_scale_inv": ROW, "dbias_partial": (1, N)},
        MATRIX | {"power_of_two_scales": False},
    ),
    "te_activation_amax": ({"gate": X, "up": X}, {"amax": ONE}, SILU),
    "te_activation_tensor": (
        {"gate": X, "up": X, "amax": ONE}, OF_TENSOR, SILU | {"power_of_two_scales": False}
    ),
    "te_activation_blocks": ({"gate": X, "up": X, "weights": ROW}, OF_BLOCKS, SILU | IN_BLOCKS),
    "te_activation_gradient_amax": ({"gate": X, "up": X, "dy": X}, {"gate_amax": ONE, "up_amax": ONE}, SILU),
    "te_activation_gradient_tensor": (
        {"gate": X, "up": X, "dy": X, "gate_amax": ONE, "up_amax": ONE, "y_amax": ONE},
        of_each(OF_TENSOR | {"dbias_partial": (1, N)}, "gate", "up")
        | {"y_transposed": CODES, "y_transposed_scale_inv": ONE},
        SILU | {"power_of_two_scales": False, "y_power_of_two_scales": False},
    ),
    "te_activation_gradient_blocks": (
        {"gate": X, "up": X, "dy": X, "weights": ROW},
        of_each(OF_BLOCKS | {"dbias_partial": (1, N)}, "gate", "up")
        | {"y_transposed": CODES, "y_transposed_scale_inv": BLOCKS, "dweights_partial": (1, N)},
        SILU | IN_BLOCKS | {"y_transposed_128x128": False, "y_power_of_two_scales": False},
    ),
    "te_norm": (
        {"x": X, "residual": X, "gamma": ROW, "beta": ROW, "reference_amax": ONE},
        {"sum": X, "mean": ROW, "rstd": ROW, "amax": ONE, "data": CODES, "scale_inv": ONE},
        NORM | {"power_of_two_scales": False},
    ),
    "te_norm_tensor": (
        {"x": X, "gamma": ROW, "beta": ROW, "mean": ROW, "rstd": ROW, "amax": ONE},
        OF_TENSOR,
        NORM | {"power_of_two_scales": False},
    ),
    "te_norm_blocks": ({"x": X, "gamma": ROW, "beta": ROW, "mean": ROW, "rstd": ROW}, OF_BLOCKS, NORM | IN_BLOCKS),
    "te_norm_gradient": (
        {"x": X, "dy": X, "dsum": X, "gamma": ROW, "mean": ROW, "rstd": ROW},
        {"dx": X, "dgamma_partial": (1, N), "dbeta_partial": (1, N)},
        NORM,
    ),
}  # fmt: skip
# Of one operand, or of some that have other shapes or dtypes: nothing can change places.
ALONE = {"te_amax_tensor", "te_amax_rows", "te_quantize_tensor", "te_quantize_blocks"}
ALONE |= {"te_quantize_blocks_of_rows", "te_softmax_cross_entropy_statistics", "te_softmax_cross_entropy_both"}
# Their operands depend on attributes: tests/parallel/test_p2p.py. And bytes that wait for each other: tests/offload.
ELSEWHERE = {"te_all_gather_gemm", "te_gemm_reduce_scatter", "te_offload_begin_store", "te_offload_store"}
ELSEWHERE |= {"te_offload_begin_fetch", "te_offload_fetch", "te_offload_end_store"}
# Sums of two: which of them is first changes nothing.
COMMUTES = {("te_norm", "x", "residual")}


def as_type(type_):
    return jax.ShapeDtypeStruct(*(type_ if type_ and isinstance(type_[0], tuple) else (type_, F32)))


def draw(rng, name, type_):
    if name == "bounds":
        return np.int32([[0, N]])
    if type_.dtype == S32:
        return rng.integers(0, type_.shape[0], type_.shape).astype(np.int32)
    return rng.uniform(0.2, 3.0, type_.shape).astype(np.float32).astype(type_.dtype)


def test_every_target_is_here(native_kernels):
    assert {*CALLS, *ALONE, *ELSEWHERE} == {*native.register()}


@pytest.mark.parametrize("target", CALLS)
def test_operands_that_change_places_are_seen(target, native_kernels, rng):
    operands, results, attributes = CALLS[target]
    types = {name: as_type(type_) for name, type_ in operands.items()}
    arrays = {name: draw(rng, name, type_) for name, type_ in types.items()}

    @jax.jit
    def call(arrays):
        return native.call(target, {name: as_type(of) for name, of in results.items()}, arrays, **attributes)

    expected = jax.block_until_ready(call(arrays))
    pairs = [(a, b) for a, b in itertools.combinations(types, 2) if types[a] == types[b]]
    assert pairs
    for a, b in pairs:
        found = call(arrays | {a: arrays[b], b: arrays[a]})
        same = all(np.array(x).tobytes() == np.array(y).tobytes() for x, y in zip(found, expected, strict=True))
        assert same == ((target, a, b) in COMMUTES), (a, b)


def test_names_stand_once(native_kernels):
    """Those that the extension does not know are refused, and it states their order."""
    assert extension.buffers("te_activation_amax") == "(gate, up) -> (amax)"
    one = jax.ShapeDtypeStruct((), F32)
    with pytest.raises(ValueError, match=r"te_activation_amax has no operands \['x'\]; it has gate, up"):
        native.call("te_activation_amax", {"amax": one}, {"x": jnp.zeros((4, 4))}, **SILU)
    with pytest.raises(ValueError, match=r"te_activation_amax has no results \['y'\]; it has amax"):
        native.call("te_activation_amax", {"y": one}, {"gate": jnp.zeros((4, 4))}, **SILU)


def test_attributes_are_those_of_the_handler(native_kernels):
    def call(**attributes):
        return jax.jit(lambda x: native.call("te_activation_amax", {"amax": as_type(ONE)}, {"gate": x}, **attributes))

    x = np.float32([[1.0, -30.0]])
    assert_close(call(**SILU)(x)[0], jax.nn.silu(1.0))
    for attributes, message in (
        ({name: value for name, value in SILU.items() if name != "alpha"}, "alpha"),
        (SILU | {"more": 1}, "Wrong number of attributes: expected 6 but got 7"),
        (SILU | {"alpha": np.int64(1)}, "expected F32 but got S64"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(call(**attributes)(x))
