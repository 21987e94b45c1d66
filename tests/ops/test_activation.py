"""Activation functions against float64: results and gradients in their own dtype, and in FP8."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from activation_oracle import (
    GPT_OSS,
    GRADIENTS,
    KINDS,
    assert_rounded,
    check_gradients,
    check_result,
    check_weighted_result,
    draw,
    draw_weights,
    oracle,
    request,
)
from compiled import results_and_gradients
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from parameters import in_turns
from quantize_oracle import E4M3, E5M2, assert_bits, quantization_of

from te_jax import native, ops
from te_jax.ops import Activation
from te_jax.ops._activation_kernels import activate_quantized, activation_gradients_quantized

DTYPES = ("float32", "bfloat16", "float16")
CLIPPED = {"limit": 1.5, "offset": 1.0}  # often
PAIRS = ("tensor", "1x128", "square and 1x128", "row", "tensor and row")
each_kind = pytest.mark.parametrize("kind", KINDS)
axis_types = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])


# ------------------------------------------------------------------------------------------------- in their own dtype


@pytest.mark.parametrize("dtype", DTYPES)
@each_kind
def test_results_and_gradients(kind, dtype, rng):
    gate, up, dy = draw(rng, (7, 3, 50), dtype, count=3, scale=3.0)
    alpha = 1.702 if kind == "silu" else 1.0
    for options in ({}, {"limit": 2.0, "offset": 1.0}):
        call = functools.partial(ops.gated_activation, activation=Activation(kind, alpha=alpha, **options))
        y, gradients = results_and_gradients(call, (gate, up), dy)
        expected = oracle(kind, gate, up, dy, alpha=alpha, **options)
        for found, wanted in zip((y, *gradients), (expected.y, expected.gate, expected.up), strict=True):
            assert_rounded(found, wanted, dtype)
    y, gradients = results_and_gradients(
        functools.partial(ops.activation, activation=Activation(kind, alpha=alpha)), (gate,), dy
    )
    expected = oracle(kind, gate, None, dy, alpha=alpha)
    assert_rounded(y, expected.y, dtype)
    assert_rounded(gradients[0], expected.gate, dtype)


AT_THE_LIMIT = np.float32([-8, -7.03125, -7, -6.96875, 0, 6.96875, 7, 7.03125, 8])


def test_gradients_are_whole_at_the_limit():
    gate, up = (x.reshape(-1).astype(np.float32) for x in np.meshgrid(AT_THE_LIMIT, AT_THE_LIMIT))
    dy = np.ones_like(gate)
    expected = oracle("silu", gate, up, dy, **GPT_OSS)
    _, gradients = results_and_gradients(
        functools.partial(ops.gated_activation, activation=Activation("silu", **GPT_OSS)), (gate, up), dy
    )
    for found, wanted in zip(gradients, (expected.gate, expected.up), strict=True):
        assert_rounded(found, wanted, "float32")
        np.testing.assert_array_equal(np.asarray(found) == 0, wanted == 0)


@each_kind
def test_higher_derivatives(kind):
    def gradient(function):
        return jax.jit(jax.vmap(jax.grad(function)))

    x = np.linspace(-3.0, 3.0, 13, dtype=np.float32) + np.float32(0.1)
    second = gradient(jax.grad(lambda x: ops.activation(x, kind)))(x)
    slopes = [oracle(kind, x + np.float32(h), None, np.ones(13)).gate for h in (-1e-2, 1e-2)]
    np.testing.assert_allclose(second, (slopes[1] - slopes[0]) / 2e-2, atol=2e-3)
    _, tangent = jax.jit(lambda x: jax.jvp(lambda x: ops.activation(x, kind), (x,), (jnp.ones_like(x),)))(x)
    np.testing.assert_allclose(tangent, oracle(kind, x, None, np.ones(13)).gate, atol=2e-6)


def test_residuals_are_the_operands(rng):
    gate, up = draw(rng, (64, 32))
    run = functools.partial(ops.gated_activation, activation=Activation("silu", **GPT_OSS))
    _, gradient = jax.eval_shape(lambda *operands: jax.vjp(run, *operands), gate, up)
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(gradient)) <= gate.nbytes + up.nbytes


# ------------------------------------------------------------------------------------------------------------- in FP8


@pytest.mark.parametrize(
    ("pair", "kind", "implementation"),
    [*in_turns(PAIRS, KINDS, ["native"]), ("1x128", "squared_relu", "reference")],
)
@pytest.mark.usefixtures("native_kernels")
def test_quantized_results(pair, kind, implementation, rng):
    gate, up = draw(rng, (200, 260))
    for operands, options in (((gate, None), {}), ((gate, up), CLIPPED)):
        check_result(kind, *operands, quantization_of(pair), implementation, **options)


@pytest.mark.parametrize(("shape", "dtype"), in_turns(((33, 17), (130, 1), (3, 2, 130)), DTYPES))
def test_shapes_and_dtypes(shape, dtype, native_kernels, rng):
    """Only in the kernels: the reference calls `ops.quantize`, whose own tests have such shapes."""
    gate, up = draw(rng, shape, dtype)
    check_result("silu", gate, up, quantization_of("tensor", E5M2), "native", **GPT_OSS)
    if len(shape) == 2:
        check_result("gelu", gate, up, quantization_of("1x128 and square"), "native")
    else:
        check_result("gelu", gate, up, quantization_of("1x128"), "native", row_ndim=2, copies="data")


@pytest.mark.parametrize(("copies", "pair"), in_turns(["data", "transposed"], ["tensor", "1x128"]))
def test_one_copy_in_powers_of_two(copies, pair, implementation, rng):
    gate, up = draw(rng, (140, 72))
    quantization = quantization_of(pair, power_of_two_scales=True)
    found = check_result("silu", gate, up, quantization, implementation, copies=copies)
    mantissas, _ = np.frexp(np.asarray(found.scale_inv if copies != "transposed" else found.transposed_scale_inv))
    assert (mantissas == 0.5).all()


@pytest.mark.parametrize("amax", [0.0, 0.25])
def test_scale_from_a_given_amax(amax, implementation, rng):
    gate, up = draw(rng, (64, 48))
    check_result("silu", gate, up, quantization_of("tensor"), implementation, amax=np.float32(amax))


@pytest.mark.parametrize("limit", [np.inf, 7.0])
def test_values_that_are_not_finite(limit, implementation, rng):
    """NaN of either operand stays NaN; infinities are clipped where there is a limit."""
    gate, up = (np.array(x) for x in draw(rng, (128, 256), "float32"))
    gate[0, 0], up[1, 1], gate[2, 200], up[3, 130] = np.nan, np.nan, np.inf, -np.inf
    quantization = quantization_of("tensor", E5M2)
    found, amax = ops.gated_activation(
        gate, up, Activation("silu", limit=limit), quantization=quantization, amax=np.float32(50), with_amax=True,
        implementation=implementation,
    )  # fmt: skip
    data = np.asarray(found.data).astype(np.float32)
    assert np.isnan(amax)
    np.testing.assert_array_equal(np.argwhere(np.isnan(data)), [[0, 0], [1, 1]])
    infinite = [[2, 200], [3, 130]] if np.isinf(limit) else []
    np.testing.assert_array_equal(np.argwhere(np.isinf(data)).tolist(), infinite)
    blocks = ops.gated_activation(
        gate, up, Activation("silu", limit=limit), quantization=quantization_of("1x128"), copies="data",
        implementation=implementation,
    )  # fmt: skip
    poisoned = np.argwhere(np.isnan(np.asarray(blocks.scale_inv)))  # [block of columns, row]
    np.testing.assert_array_equal(poisoned, [[0, 0], [0, 1]] + ([[1, 2], [1, 3]] if np.isinf(limit) else []))


def test_nothing_to_compute(implementation):
    x = np.zeros((0, 8), jnp.bfloat16)
    found, amax = ops.gated_activation(
        x, x, quantization=quantization_of("tensor"), with_amax=True, implementation=implementation
    )
    assert (found.data.shape, found.transposed.shape, float(amax)) == ((0, 8), (8, 0), 0.0)


# ------------------------------------------------------------------------------------------------- gradients in FP8


@pytest.mark.parametrize(
    ("case", "kind", "implementation", "gated"),
    [
        *in_turns([*GRADIENTS], KINDS, ["native"], [True]),
        *in_turns(["blocks", "rows"], KINDS, ["native"], [False]),
        *in_turns(["mixed"], KINDS[1:], ["reference"], [True]),
    ],
)
@pytest.mark.usefixtures("native_kernels")
def test_quantized_gradients(case, kind, implementation, gated, rng):
    gate, up, dy = draw(rng, (200, 260), count=3)
    clipped = (1.5, 1.0) if gated else ()
    function = Activation(kind, 1.702 if kind == "silu" else 1.0, *clipped)
    check_gradients(function, gate, up if gated else None, dy, *GRADIENTS[case], implementation == "native")


@pytest.mark.parametrize(
    ("copies", "use_native"), [("both", True), ("data", True), ("transposed", True), ("both", False)]
)
def test_gradients_with_given_amaxes(copies, use_native, native_kernels, rng):
    gate, up, dy = draw(rng, (72, 40), count=3)
    amaxes = tuple(np.float32(amax) for amax in (1.0, 20.0, 3.0))
    check_gradients(Activation("silu"), gate, up, dy, *GRADIENTS["current"], use_native, amaxes=amaxes, copies=copies)


def test_gradients_at_the_limit(native_kernels):
    """In the kernels as in the definition: whole at the limit, and zero beyond it."""
    gate, up = (jax.device_put(x.astype(np.float32)) for x in np.meshgrid(AT_THE_LIMIT, AT_THE_LIMIT))
    for case in ("current", "blocks"):
        check_gradients(Activation("silu", **GPT_OSS), gate, up, np.ones_like(gate), *GRADIENTS[case], True)


# --------------------------------------------------------------------------------------------------- weights of rows


@pytest.mark.parametrize(
    ("case", "kind", "implementation", "copies"),
    [
        *in_turns([*GRADIENTS], KINDS, ["native"], ["both", "data", "transposed"]),
        ("blocks", "gelu", "reference", "both"),
    ],
)
@pytest.mark.usefixtures("native_kernels")
def test_weights_of_rows(case, kind, implementation, copies, rng):
    """In the kernels with block scaling; else a product of its own."""
    gate, up, dy = draw(rng, (200, 260), count=3)
    weights, use_native = draw_weights(rng, 200), implementation == "native"
    function = Activation(kind, 1.702 if kind == "silu" else 1.0, 1.5, 1.0)
    operands, case = (gate, None if copies == "transposed" else up), GRADIENTS[case]
    check_weighted_result(function, *operands, weights, case[0], use_native, copies=copies)
    with_amax = copies == "both"
    check_gradients(
        function, *operands, dy, *case, use_native, copies=copies, weights=weights, with_amax=with_amax
    )  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "dtype", "case"),
    in_turns(((33, 17), (3, 128, 40), (17, 1033)), DTYPES, ["blocks", "square blocks"]),
)
def test_shapes_and_dtypes_with_weights(shape, dtype, case, native_kernels, rng):
    gate, up, dy = draw(rng, shape, dtype, count=3)
    weights, function = draw_weights(rng, shape[:-1]), Activation("silu", **GPT_OSS)
    options = {"row_ndim": len(shape) - 1}
    check_weighted_result(function, gate, up, weights, GRADIENTS[case][0], True, **options)
    check_gradients(function, gate, up, dy, *GRADIENTS[case], True, **options, weights=weights, with_amax=False)


def test_rows_that_hold_anything_leave_others_alone(implementation, rng):
    """In the copy as it is, and in the gradients of weights. In transposed copies rows share scales."""
    gate, up, dy = (np.array(x) for x in draw(rng, (200, 260), count=3))
    weights, use_native = np.array(draw_weights(rng, 200)), implementation == "native"
    quantization = quantization_of("1x128")

    @jax.jit
    def step(gate, up, dy, weights):
        y = activate_quantized(Activation("silu"), gate, up, None, request(quantization), use_native, weights).array
        parts = activation_gradients_quantized(
            Activation("silu"), gate, up, dy, None, None, None, request(quantization), None, use_native, weights
        )  # fmt: skip
        return [array.data for array in (y, parts[0].array, parts[1].array)] + [parts[3]]

    def run():
        return [np.asarray(x).astype(np.float32) for x in step(*map(np.array, (gate, up, dy, weights)))]

    before = run()
    gate[150:] = up[170:] = dy[180:] = weights[190:] = np.nan
    for found, wanted in zip(run(), before, strict=True):
        np.testing.assert_array_equal(found[:150], wanted[:150])
        assert np.isnan(found[190:]).all()


# ------------------------------------------------------------------------------------------------------------ sharded


def place(x, mesh, spec):
    return jax.device_put(np.asarray(x), NamedSharding(mesh, spec))


@axis_types
def test_operands_that_lie_differently(axis_type, make_mesh, native_kernels, rng):
    mesh = make_mesh({"data": axis_type, "model": axis_type})
    gate, up = draw(rng, (1024, 512))
    run = functools.partial(ops.gated_activation, quantization=quantization_of("1x128"), implementation="native")
    found = jax.jit(run)(place(gate, mesh, P("data")), place(up, mesh, P("data", "model")))
    jax.tree.map(assert_bits, found, jax.jit(run)(gate, up))


# ------------------------------------------------------------------------------------------------------------- errors

X = np.zeros((4, 8), np.float32)
TENSOR, BLOCK = quantization_of("tensor"), quantization_of("1x128")


@pytest.mark.parametrize(
    ("operands", "options", "message"),
    [
        ((X, X.astype(jnp.bfloat16)), {}, "up has shape (4, 8) and dtype bfloat16, but gate has shape (4, 8) and"),
        ((X, X[0]), {}, "up has shape (8,) and dtype float32, but gate has"),
        ((X.astype(jnp.int32), X), {}, "gate has dtype int32; it must be float32, bfloat16 or float16: cast it"),
        (
            (X, X),
            {"activation": "swish"},
            "activation is 'swish'; it must be one of ('silu', 'gelu', 'relu', 'squared_",
        ),
        ((X, X), {"with_amax": True}, "with_amax is given without quantization"),
        ((X, X), {"amax": jnp.float32(1)}, "amax is given without quantization"),
        ((X, X), {"implementation": "native"}, "implementation is given without quantization"),
        ((X, X), {"quantization": "tensor"}, "quantization is 'tensor'; it must be a Quantization"),
        ((X[0], X[0]), {"quantization": TENSOR}, "gate has shape (8,); it needs at least two dimensions"),
        ((X, X), {"quantization": TENSOR, "copies": "rows"}, "copies is 'rows'; it must be one of"),
        ((X, X), {"quantization": TENSOR, "amax": X}, "amax has shape (4, 8) and dtype float32; it must be a"),
        ((X, X), {"quantization": BLOCK, "amax": jnp.float32(1)}, "amax is given, but quantization has scaling"),
    ],
)
def test_message_names_argument_value_and_rule(operands, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ops.gated_activation(*operands, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("silu", np.inf), "alpha is inf; it must be a finite number"),
        (("gelu", 2.0), "alpha is 2.0, but the function is 'gelu'; only 'silu' has an alpha"),
        (("silu", 1.0, 1.0, jnp.nan), "offset is nan; it must be a finite number"),
        (("silu", 1.0, 0), "limit is 0; it must be a number above 0, known while tracing, or infinity"),
        (("silu", 1.0, -1.0), "limit is -1.0; it must be a number above 0"),
        (("silu", 1.0, np.nan), "limit is nan; it must be a number above 0"),
    ],
)
def test_functions_that_are_none(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Activation(*arguments)


def test_messages_about_one_operand():
    for options in ({"limit": 7.0}, {"offset": 1.0}):
        with pytest.raises(ValueError, match=r"limit and offset are for gated functions: leave them out"):
            ops.activation(X, Activation("silu", **options))
    with pytest.raises(ValueError, match=r"x has dtype int32; it must be float32"):
        ops.activation(X.astype(jnp.int32))
    with pytest.raises(ValueError, match=r"row_ndim is 2; for x of shape \(4, 8\) it must be in"):
        ops.activation(X, quantization=TENSOR, row_ndim=2)


FUNCTION = {"kind": "silu", "alpha": 1.0, "limit": np.inf, "offset": 0.0}
NONE = np.zeros(0, np.float32)


@pytest.mark.parametrize(
    ("operands", "changed", "message"),
    [
        ((X, X), {"kind": "swish"}, "gate is F32[4,8]; it must come with kind silu, gelu, relu or squared_relu"),
        ((X, X), {"alpha": np.nan}, "gate is F32[4,8]; it must come with a finite alpha and offset"),
        ((X, X), {"offset": -np.inf}, "gate is F32[4,8]; it must come with a finite alpha and offset"),
        ((X, X), {"limit": np.nan}, "gate is F32[4,8]; it must come with a limit above 0"),
        ((X, X), {"limit": -1.0}, "gate is F32[4,8]; it must come with a limit above 0"),
        ((X, X[:3]), {}, "up is F32[3,8]; it must have 32 elements"),
        ((X, X.astype(jnp.bfloat16)), {}, "up is BF16[4,8]; it must be of type F32"),
        ((X, X), {"row_ndim": 3}, "gate is F32[4,8]; it must have batch_ndim (0) and row_ndim (3) dimensions"),
    ],
)
def test_handlers_refuse(operands, changed, message, native_kernels):
    attributes = FUNCTION | {"row_ndim": 1, "batch_ndim": 0} | changed
    result = [jax.ShapeDtypeStruct((), np.float32)]
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(f"te_activation_amax: {message}")):
        jax.block_until_ready(
            jax.jit(lambda *a: native.call_in_order("te_activation_amax", result, *a, **attributes))(*operands)
        )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gate_data": ((4, 7), E4M3)}, "gate_data is F8E4M3FN[4,7]; it must have 32 elements"),
        ({"up_data": ((0,), E4M3), "up_transposed": ((0,), E4M3)}, "up_data is F8E4M3FN[0]; it must be there where"),
        ({"up_scale_inv": ((2,), np.float32)}, "up_scale_inv is F32[2]; it must have 1 elements"),
        ({"y_transposed": ((8, 4), np.float32)}, "y_transposed is F32[8,4]; it must be float8_e4m3fn or"),
        ({"up": NONE}, "up_data is F8E4M3FN[4,8]; it must have no elements without up"),
        ({"dy": X[:2]}, "dy is F32[2,8]; it must have 32 elements"),
        ({"y_amax": NONE}, "y_amax is F32[0]; it must have 1 elements"),
    ],
)
def test_gradient_handler_refuses(changed, message, native_kernels):
    operands = {"gate": X, "up": X, "dy": X} | dict.fromkeys(("gate_amax", "up_amax", "y_amax"), jnp.float32(1))
    scalar, absent = ((), np.float32), ((0,), np.float32)
    results = {}
    for name in ("gate", "up"):
        results |= {f"{name}_data": ((4, 8), E4M3), f"{name}_transposed": ((8, 4), E4M3)}
        results |= {f"{name}_scale_inv": scalar, f"{name}_transposed_scale_inv": scalar}
        results |= {f"{name}_amax_out": absent, f"{name}_dbias_partial": absent}
    results |= {"y_transposed": ((8, 4), E5M2), "y_transposed_scale_inv": scalar}
    operands |= {name: value for name, value in changed.items() if name in operands}
    results |= {name: value for name, value in changed.items() if name in results}
    attributes = FUNCTION | {"row_ndim": 1, "batch_ndim": 0}
    attributes |= {"power_of_two_scales": False, "y_power_of_two_scales": True}

    def run(*operands):
        types = [jax.ShapeDtypeStruct(*result) for result in results.values()]
        return native.call_in_order("te_activation_gradient_tensor", types, *operands, **attributes)

    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(f"te_activation_gradient_tensor: {message}")):
        jax.block_until_ready(jax.jit(run)(*operands.values()))


@pytest.mark.parametrize(
    ("weights", "partial", "message"),
    [
        (np.zeros(3, np.float32), (1, 4), "weights is F32[3]; it must have 4 elements"),
        (np.zeros(4, jnp.bfloat16), (1, 4), "weights is BF16[4]; it must be of type F32"),
        (np.zeros(4, np.float32), (4,), "ok"),
        (np.zeros(4, np.float32), (0,), "dweights_partial is F32[0]; it must have 4 elements"),
        (NONE, (1, 4), "dweights_partial is F32[1,4]; it must have no elements without weights"),
    ],
)
def test_gradient_handler_refuses_weights(weights, partial, message, native_kernels):
    absent = ((0,), np.float32)
    copies = [((4, 8), E4M3), ((1, 4), np.float32), absent, absent, absent]
    attributes = FUNCTION | {"row_ndim": 1, "batch_ndim": 0}
    attributes |= dict.fromkeys(("data_128x128", "transposed_128x128", "y_transposed_128x128"), False)
    attributes |= dict.fromkeys(("power_of_two_scales", "y_power_of_two_scales"), False)
    types = [jax.ShapeDtypeStruct(*result) for result in (*copies, *copies, absent, absent, (partial, np.float32))]

    def run(*operands):
        return native.call_in_order("te_activation_gradient_blocks", types, *operands, **attributes)

    expected = pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(f"te_activation_gradient_blocks: {message}"))
    with contextlib.nullcontext() if message == "ok" else expected:
        jax.block_until_ready(jax.jit(run)(X, X, X, weights))


def test_handlers_write_amaxes_of_nothing(native_kernels):
    """Zeros, in memory that was not zero before."""
    attributes = FUNCTION | {"row_ndim": 1, "batch_ndim": 1}
    result = [jax.ShapeDtypeStruct((4096,), np.float32)]
    x = np.zeros((4096, 0, 8), np.float32)
    compiled = (
        jax.jit(lambda x: native.call_in_order("te_activation_amax", result, x, x, **attributes)).lower(x).compile()
    )
    jax.block_until_ready([jax.device_put(np.full(4096, np.nan, np.float32), may_alias=False) for _ in range(64)])
    assert (np.asarray(compiled(x)[0]) == 0).all()
