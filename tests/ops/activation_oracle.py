"""Activation functions and their gradients in float64, and how far what is rounded may be off."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from ops.gemm_oracle import matrix
from ops.quantize_oracle import E5M2, quantization_of
from ops.quantize_oracle import oracle as quantized_by_numpy
from parameters import named

from te_jax import native, ops
from te_jax.ops._activation_kernels import activate_quantized, activation_gradients_quantized
from te_jax.ops._quantize_kernels import Request
from te_jax.quantized import QuantizedArray

KINDS = ("silu", "gelu", "relu", "squared_relu")
GPT_OSS = {"alpha": 1.702, "limit": 7.0, "offset": 1.0}


@dataclasses.dataclass(frozen=True)
class Expected:
    """The result, and the gradients of all operands, in float64; None without dy, and without the operand."""

    y: np.ndarray
    gate: np.ndarray | None = None
    up: np.ndarray | None = None
    weights: np.ndarray | None = None


def oracle(kind, gate, up=None, dy=None, *, weights=None, alpha=1.0, limit=None, offset=0.0) -> Expected:
    gate, up, dy, weights = (
        None if x is None else np.asarray(x).astype(np.float64) for x in (gate, up, dy, weights)
    )  # fmt: skip
    if weights is not None:
        cols = tuple(range(weights.ndim, gate.ndim))
        weight = np.expand_dims(weights, cols)
        plain = oracle(kind, gate, up, alpha=alpha, limit=limit, offset=offset).y
        of_dy = None if dy is None else dy * weight
        expected = oracle(kind, gate, up, of_dy, alpha=alpha, limit=limit, offset=offset)
        of_weights = None if dy is None else (dy * plain).sum(axis=cols)
        return dataclasses.replace(expected, y=plain * weight, weights=of_weights)
    with np.errstate(all="ignore"):
        inside, up_inside, factor = True, True, 1.0
        if up is not None:
            factor = up
            if limit is not None:
                inside, up_inside = ~(gate > limit), ~(np.abs(up) > limit)
                gate, factor = np.where(inside, gate, limit), np.where(up_inside, up, np.sign(up) * limit)
            factor = factor + offset
        value, slope = _function(kind, gate, alpha)
        return Expected(
            value * factor,
            None if dy is None else np.where(inside, dy * factor * slope, 0.0),
            None if dy is None or up is None else np.where(up_inside, dy * value, 0.0),
        )


def _function(kind, x, alpha):
    """(f(x), its derivative)."""
    if kind == "silu":
        sigmoid = 1 / (1 + np.exp(-alpha * x))
        return x * sigmoid, sigmoid + alpha * x * sigmoid * (1 - sigmoid)
    if kind == "gelu":
        tanh = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
        slope = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
        return 0.5 * x * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * slope
    positive = np.where(x <= 0, 0.0, x)
    return (positive, np.where(x <= 0, 0.0, 1.0)) if kind == "relu" else (positive**2, 2 * positive)


def assert_rounded(actual, expected, dtype):
    """Finite values within a unit of the last place of a dtype, which float32 computed."""
    actual = np.asarray(actual)
    assert actual.dtype == np.dtype(dtype)
    assert actual.shape == expected.shape
    epsilon = float(jnp.finfo(dtype).eps)
    # Derivatives cross zero, where what float32 rounds is as large as elsewhere.
    error = np.abs(actual.astype(np.float64) - expected)
    bound = (epsilon + 4e-6) * np.abs(expected) + 4e-6 * np.abs(expected).max(initial=0.0)
    assert (error <= bound).all(), (error - bound).max()


def assert_quantized_from(quantized, plain, quantization, *, row_ndim=None, amax=None):
    """The copies of an array whose values may differ from `plain` by a unit in the last place of its dtype: so may
    the amaxes that scales follow from, and codes by a step where a value lies in the middle of two. Of values that are
    next to nothing beside the largest, float32 may leave anything that is next to nothing; where the terms of a
    derivative cancel, some of its digits."""
    row_ndim = plain.ndim - 1 if row_ndim is None else row_ndim
    copies = "data" if quantized.transposed is None else "transposed" if quantized.data is None else "both"
    expected = quantized_by_numpy(plain, quantization, row_ndim=row_ndim, copies=copies, amax=amax)
    expected = QuantizedArray(
        expected.data, expected.scale_inv, expected.transposed, expected.transposed_scale_inv,
        row_ndim, plain.ndim - row_ndim, quantization.scaling, quantization.transposed_scaling, np.dtype(plain.dtype),
    )  # fmt: skip
    assert jax.tree.structure(quantized) == jax.tree.structure(expected)
    magnitudes = np.abs(np.asarray(plain).astype(np.float64))
    nothing = 1e-4 * magnitudes.max(initial=0.0)
    order = (*range(row_ndim, plain.ndim), *range(row_ndim))
    largest = float(jnp.finfo(quantization.dtype).max)
    for name, sizes in (("data", magnitudes), ("transposed", magnitudes.transpose(order))):
        found, wanted = getattr(quantized, name), getattr(expected, name)
        if wanted is None:
            continue
        significant = sizes > nothing
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        steps = np.abs(_places(found) - _places(wanted))[significant]
        assert steps.max(initial=0) <= 1, (name, steps.max())
        assert (steps > 0).sum() <= 3 + 0.1 * steps.size, (name, (steps > 0).mean())
        scales = "scale_inv" if name == "data" else "transposed_scale_inv"
        found, wanted = (np.asarray(getattr(each, scales), np.float64) for each in (quantized, expected))
        assert found.shape == wanted.shape
        close = np.abs(found - wanted) * largest <= (
            2 * float(jnp.finfo(plain.dtype).eps) * wanted * largest + 1e-5 * magnitudes.max(initial=0.0)
        )
        # Blocks of zeros have a scale of 1.
        small = [(scale == 1) | (scale * largest <= nothing) for scale in (found, wanted)]
        assert (close | (small[0] & small[1])).all(), (name, found[~close], wanted[~close])
        found, wanted = (matrix(each, "cols" if name == "data" else "rows")[0] for each in (quantized, expected))
        difference = np.abs(found - wanted).reshape(sizes.shape)
        assert (difference[~significant] <= 2 * nothing).all()


def _places(codes):
    """FP8 codes as integers in the order of their values; both zeros are 0, NaN is beyond all."""
    codes = np.asarray(codes)
    bits = codes.view(np.uint8).astype(np.int64)
    places = np.where(bits > 0x7F, -(bits & 0x7F), bits)
    return np.where(np.isnan(codes.astype(np.float32)), 1000, places)


def draw(rng, shape, dtype="bfloat16", count=2, scale=2.0):
    return [
        jax.device_put((scale * rng.standard_normal(shape)).astype(np.float32).astype(jnp.dtype(dtype)))
        for _ in range(count)
    ]


def draw_weights(rng, shape):
    """Weights of rows as a router gives them: float32 between 0 and 1, with zeros among them."""
    weights = rng.uniform(0.0, 1.0, shape).astype(np.float32)
    weights[..., 1::7] = 0.0
    return jax.device_put(weights)


def request(quantization, *, row_ndim=1, copies="both", with_amax=False, with_dbias=False):
    return Request(quantization, row_ndim, copies, (), (), with_amax, with_dbias)


def check_result(kind, gate, up, quantization, implementation, *, row_ndim=None, copies="both", amax=None, **options):
    """A result in FP8 against that of the operation in its own dtype, and its amax; returns it."""
    operands, operation = ((gate,), ops.activation) if up is None else ((gate, up), ops.gated_activation)
    run = functools.partial(operation, activation=ops.Activation(kind, **options))

    def both(operands, amax):
        quantized = run(
            *operands, quantization=quantization, row_ndim=row_ndim, copies=copies, amax=amax, with_amax=True,
            implementation=named(implementation, gate.dtype),
        )  # fmt: skip
        return quantized, run(*operands)

    (found, own_amax), plain = jax.jit(both)(operands, amax)
    assert (found.data is None, found.transposed is None) == (copies == "transposed", copies == "data")
    assert_quantized_from(found, plain, quantization, row_ndim=row_ndim, amax=amax)
    largest = np.abs(np.asarray(plain).astype(np.float64)).max()
    np.testing.assert_allclose(float(own_amax), largest, rtol=float(jnp.finfo(gate.dtype).eps) + 1e-5)
    return found


def check_weighted_result(function, gate, up, weights, quantization, use_native, *, row_ndim=1, copies="both"):
    """A result with weights of rows in FP8 against float64; returns it."""
    wanted = request(quantization, row_ndim=row_ndim, copies=copies)
    run = jax.jit(activate_quantized, static_argnums=(0, 4, 5))
    found = run(function, gate, up, None, wanted, use_native and native.takes(gate.dtype), weights).array
    expected = oracle(function.kind, gate, up, weights=weights, **_options(function)).y
    assert_quantized_from(found, expected.astype(gate.dtype), quantization, row_ndim=row_ndim)
    return found


def _options(function):
    limit = None if np.isinf(function.limit) else function.limit
    return {"alpha": function.alpha, "limit": limit, "offset": function.offset}


def check_gradients(
    function, gate, up, dy, gradient, activation, use_native,
    *, row_ndim=1, amaxes=(None,) * 3, copies="both", weights=None, with_amax=True,
):  # fmt: skip
    """Gradients in FP8 against those in their own dtype, which float64 confirms; dbias, amaxes and the gradient of the
    weights against float64."""
    wanted = request(gradient, row_ndim=row_ndim, copies=copies, with_amax=with_amax, with_dbias=True)
    if up is None:
        amaxes = (amaxes[0], None, amaxes[2])
    use_native = use_native and native.takes(gate.dtype)
    run = jax.jit(activation_gradients_quantized, static_argnums=(0, 7, 8, 9))
    found = run(function, gate, up, dy, *amaxes, wanted, activation, use_native, weights)
    expected = oracle(function.kind, gate, up, dy, weights=weights, **_options(function))
    epsilon = float(jnp.finfo(gate.dtype).eps)
    for parts, plain, amax in zip(found[:2], (expected.gate, expected.up), amaxes[:2], strict=True):
        if plain is None:
            assert parts is None
            continue
        assert_quantized_from(parts.array, plain.astype(gate.dtype), gradient, row_ndim=row_ndim, amax=amax)
        assert (parts.amax is not None) == with_amax
        if with_amax:
            np.testing.assert_allclose(float(parts.amax), np.abs(plain).max(), rtol=epsilon + 1e-5)
        rows = tuple(range(row_ndim))
        assert parts.dbias.shape == plain.shape[row_ndim:]
        bound = (epsilon + 1e-5) * np.abs(plain).sum(axis=rows) + 4e-6 * np.abs(plain).max()
        assert (np.abs(np.asarray(parts.dbias, np.float64) - plain.sum(axis=rows)) <= bound).all()
    if activation is None:
        assert found[2] is None
    else:
        assert found[2].data is None
        plain = expected.y.astype(gate.dtype)
        assert_quantized_from(found[2], plain, activation, row_ndim=row_ndim, amax=amaxes[2])
    assert len(found) == (3 if weights is None else 4)
    if weights is not None:
        assert (found[3].dtype, found[3].shape) == (np.float32, weights.shape)
        terms = np.abs(np.asarray(dy, np.float64)) * np.abs(
            oracle(function.kind, gate, up, **_options(function)).y
        )  # fmt: skip
        bound = 1e-5 * terms.sum(axis=tuple(range(row_ndim, gate.ndim))) + 1e-30
        assert (np.abs(np.asarray(found[3], np.float64) - expected.weights) <= bound).all()
    return found


GRADIENTS = {
    "current": (quantization_of("tensor", E5M2), quantization_of("tensor")),
    "blocks": (quantization_of("1x128 and square"), quantization_of("1x128")),
    "square blocks": (quantization_of("128x128"), quantization_of("square and 1x128", E5M2, True)),
    "rows": (quantization_of("row"), quantization_of("row")),
    "mixed": (quantization_of("1x128"), quantization_of("tensor")),
    "without y": (quantization_of("1x128"), None),
}
