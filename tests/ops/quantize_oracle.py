"""Quantization in NumPy, block by block, with ml_dtypes for the rounding: what all its tests compare with."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from parameters import named

from te_jax import ops
from te_jax.quantized import QuantizedArray, scale_shape
from te_jax.recipe import Quantization
from te_jax.testing import assert_close

E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
LARGEST = {E4M3: np.float32(448), E5M2: np.float32(57344)}
PAIRS = {
    "tensor": ("tensor", "tensor"),
    "row": ("row", "row"),
    "1x128": ("block_1x128", "block_1x128"),
    "128x128": ("block_128x128", "block_128x128"),
    "1x128 and square": ("block_1x128", "block_128x128"),
    "square and 1x128": ("block_128x128", "block_1x128"),
    "tensor and row": ("tensor", "row"),
    "block and tensor": ("block_1x128", "tensor"),
}
MXFP8 = {"1x32": ("block_1x32", "block_1x32"), "1x32 and tensor": ("block_1x32", "tensor")}
"""Scalings without native kernels."""
STATICS = ("quantization", "row_ndim", "copies", "amax_axis", "with_amax", "with_dbias", "implementation")


def quantization_of(pair, dtype=E4M3, power_of_two_scales=False) -> Quantization:
    return Quantization(dtype, *(PAIRS | MXFP8)[pair], power_of_two_scales)


@dataclasses.dataclass(frozen=True)
class Oracle:
    """What is expected, as NumPy arrays; None for the copy that is not asked for."""

    data: np.ndarray | None
    scale_inv: np.ndarray | None
    transposed: np.ndarray | None
    transposed_scale_inv: np.ndarray | None
    amax: np.ndarray
    dbias: np.ndarray


def oracle(x, quantization, *, row_ndim=None, amax=None, copies="both") -> Oracle:
    """All that `ops.quantize` can return for an array."""
    x = np.asarray(x)
    row_ndim = x.ndim - 1 if row_ndim is None else row_ndim
    rows, cols = x.shape[:row_ndim], x.shape[row_ndim:]
    data = scale_inv = transposed = transposed_scale_inv = None
    with np.errstate(all="ignore"):
        matrix = x.astype(np.float32).reshape(math.prod(rows), math.prod(cols))
        if copies != "transposed":
            data, scale_inv = _copy(matrix, quantization, quantization.scaling, amax)
            data = data.reshape(x.shape)
            scale_inv = scale_inv.reshape(scale_shape(quantization.scaling, rows, cols))
        if copies != "data":
            transposed, transposed_scale_inv = _copy(matrix.T, quantization, quantization.transposed_scaling, amax)
            transposed = transposed.reshape(*cols, *rows)
            shape = scale_shape(quantization.transposed_scaling, cols, rows)
            transposed_scale_inv = transposed_scale_inv.reshape(shape)
        dbias = matrix.astype(np.float64).sum(axis=0).reshape(cols)
    return Oracle(data, scale_inv, transposed, transposed_scale_inv, _amax(matrix), dbias)


def _amax(x: np.ndarray) -> np.float32:
    if np.isnan(x).any():
        return np.float32(np.nan)
    return np.abs(x).max(initial=np.float32(0))


def _scale(amax: np.ndarray, quantization: Quantization, scaling: str) -> np.ndarray:
    scale = np.minimum(LARGEST[np.dtype(quantization.dtype)] / amax, np.float32(2.0**126))
    if quantization.power_of_two_scales or scaling == "block_1x32":
        scale = np.exp2(np.floor(np.log2(scale.astype(np.float64)))).astype(np.float32)
    return np.where(np.isfinite(amax) & (amax >= np.float32(2.0**-126)), scale, np.float32(1))


def _copy(matrix: np.ndarray, quantization: Quantization, scaling: str, amax) -> tuple[np.ndarray, np.ndarray]:
    """A copy [outer, summed] and the inverses of its scales, a row for each block of the first dimension they have."""
    outer, summed = matrix.shape
    height, width = {
        "tensor": (outer, summed),
        "row": (1, summed),
        "block_1x32": (1, 32),
        "block_1x128": (1, 128),
        "block_128x128": (128, 128),
    }[scaling]
    height, width = max(height, 1), max(width, 1)
    blocks = (1, 1) if scaling == "tensor" else (-(-outer // height), 1 if scaling == "row" else -(-summed // width))
    padded = np.pad(matrix, [(0, blocks[0] * height - outer), (0, blocks[1] * width - summed)])
    amaxes = np.abs(padded.reshape(blocks[0], height, blocks[1], width)).max(axis=(1, 3), initial=np.float32(0))
    if scaling == "tensor" and amax is not None:
        amaxes = np.full((1, 1), amax, np.float32)
    scale = _scale(amaxes, quantization, scaling)
    data = _encode(matrix, scale.repeat(height, 0).repeat(width, 1)[:outer, :summed], np.dtype(quantization.dtype))
    scale_inv = np.where(np.isfinite(amaxes), np.float32(1) / scale, np.float32(np.nan))
    if scaling == "block_1x32":
        return data, scale_inv.astype(ml_dtypes.float8_e8m0fnu)
    return data, scale_inv.T if scaling == "block_1x128" else scale_inv


def _encode(x: np.ndarray, scale: np.ndarray, dtype: np.dtype) -> np.ndarray:
    flushed = np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)
    product = np.clip(flushed * scale, -LARGEST[dtype], LARGEST[dtype])
    codes = product.astype(dtype).view(np.uint8)
    infinity = np.uint8(0x7F) if dtype == E4M3 else np.where(np.signbit(x), np.uint8(0xFC), np.uint8(0x7C))
    return np.where(np.isnan(x), np.uint8(0x7F), np.where(np.isinf(x), infinity, codes)).view(dtype)


# Compiled once for each shape and choice of options, whichever test asks.
quantize = jax.jit(ops.quantize, static_argnames=STATICS)


def assert_bits(actual, expected, name=""):
    """The same dtype, shape and bits."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype, name
    assert actual.shape == expected.shape, name
    integer = {1: np.uint8, 2: np.uint16, 4: np.uint32}[actual.dtype.itemsize]
    differ = np.reshape(actual, -1).view(integer) != np.reshape(expected, -1).view(integer)
    if differ.any():
        first = np.unravel_index(np.argmax(differ), actual.shape)
        raise AssertionError(
            f"{name}: {differ.sum()} of {differ.size} elements differ, the first at {tuple(map(int, first))}: "
            f"{actual[first]}, but {expected[first]} is expected"
        )


def assert_quantized(actual: QuantizedArray, expected: Oracle):
    """The copies that are expected, bit for bit; no others."""
    for name in ("data", "scale_inv", "transposed", "transposed_scale_inv"):
        if getattr(expected, name) is None:
            assert getattr(actual, name) is None, name
        else:
            assert_bits(getattr(actual, name), getattr(expected, name), name)


def assert_dbias(dbias, x, expected: Oracle):
    """Sums over rows, relative to their terms, which may cancel; where they are neither subnormal nor overflow."""
    assert dbias.dtype == jnp.float32
    assert dbias.shape == expected.dbias.shape
    rows = tuple(range(x.ndim - expected.dbias.ndim))
    terms = np.abs(np.asarray(x).astype(np.float64)).sum(axis=rows)
    sound = (terms > 1e-30) & (terms < 1e38)
    actual = np.asarray(dbias, np.float64)[sound]
    assert_close(np.stack([actual, terms[sound]]), np.stack([expected.dbias[sound], terms[sound]]), tolerance=1e-6)


def check(x, quantization, *, implementation, row_ndim=None, amax=None, copies="both", run=quantize):
    """Everything that `ops.quantize` returns for x against the oracle."""
    expected = oracle(x, quantization, row_ndim=row_ndim, amax=amax, copies=copies)
    quantized, own_amax, dbias = run(
        x,
        quantization,
        row_ndim=row_ndim,
        amax=None if amax is None else jnp.float32(amax),
        copies=copies,
        with_amax=True,
        with_dbias=True,
        implementation=named(implementation, x.dtype),
    )
    assert_quantized(quantized, expected)
    assert quantized.shape == x.shape
    assert quantized.dtype == x.dtype
    assert_bits(own_amax, expected.amax, "amax")
    assert_dbias(dbias, x, expected)
    return quantized


@functools.cache
def _edges(dtype: np.dtype) -> np.ndarray:
    """Where rounding may go wrong: zeros, subnormals, FP8 values and the middles between them."""
    codes = np.arange(256, dtype=np.uint8)
    values = np.concatenate([codes.view(fp8).astype(np.float64) for fp8 in (E4M3, E5M2)])
    values = np.unique(values[np.isfinite(values)])
    middles = (values[1:] + values[:-1]) / 2
    info = ml_dtypes.finfo(dtype)
    tiny = np.float64(info.smallest_subnormal) * np.array([1, 2, 3, 100])
    limits = np.array([0.0, -0.0, np.float64(info.tiny)])
    beside = [middles * (1 + 2.0**-20), middles * (1 - 2.0**-20)]
    return np.concatenate([values, middles, *beside, tiny, -tiny, limits]).astype(dtype)


def random_case(rng, shape, dtype, *, edges=0.25):
    """Normal numbers of very different size in every row and column, with a share of `_edges` between them."""
    dtype = np.dtype(dtype)
    spread = 4.0 if dtype == np.float16 else 20.0
    size = [np.exp2(rng.uniform(-spread, spread / 2, n)) for n in shape]
    values = rng.standard_normal(shape)
    for axis, factors in enumerate(size):
        values *= factors.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    x = values.astype(np.float32).astype(dtype)
    if edges:
        x = np.where(rng.random(shape) < edges, rng.choice(_edges(dtype), shape), x)
    return jax.device_put(x)
