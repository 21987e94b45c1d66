"""Statistics of a quantized tensor in NumPy, from the codes and scales of tests/ops/quantize_oracle.py."""

from typing import Any

import numpy as np
from ops.quantize_oracle import LARGEST, oracle

FIELDS = ("amax", "smallest_scale", "largest_scale", "underflow", "saturation", "nonfinite", "error")
_SMALLEST = np.float32(2.0**-126)


def expected(x, quantization, copy, amax=None):
    """The fields of `TensorStatistics` of one copy of a matrix x, "data" or "transposed"."""
    x = np.asarray(x).astype(np.float32)
    found = oracle(x, quantization, amax=amax, copies=copy)
    scaling = quantization.scaling if copy == "data" else quantization.transposed_scaling
    codes = getattr(found, copy)
    scale_inv: Any = found.scale_inv if copy == "data" else found.transposed_scale_inv
    spread = _spread(scale_inv, scaling, codes.shape)
    if copy == "transposed":
        codes, spread = codes.T, spread.T
    with np.errstate(all="ignore"):
        read, exact = codes.astype(np.float64) * spread, x.astype(np.float64)
        finite = np.isfinite(x)
        nonzero = finite & (np.abs(x) >= _SMALLEST)
        beyond = np.abs(exact) / spread > LARGEST[np.dtype(quantization.dtype)] * (1 + 2.0**-20)
        scale = 1 / scale_inv.astype(np.float64)
        known = scale[np.isfinite(scale)]
        squares, errors = (np.sum(np.where(finite, a, 0.0) ** 2) for a in (exact, exact - read))
        exponents = np.bincount((x.view(np.int32) >> 23 & 0xFF).ravel(), minlength=256) / x.size
    return {
        "amax": found.amax,
        "smallest_scale": known.min() if known.size else np.nan,
        "largest_scale": known.max() if known.size else np.nan,
        "underflow": _share(nonzero & (read == 0), nonzero),
        "saturation": _share(nonzero & beyond, nonzero),
        "nonfinite": np.mean(~finite),
        "error": np.sqrt(errors / squares) if nonzero.any() else 0.0,
        "exponents": exponents,
    }


def assert_statistics(actual, wanted, label=""):
    for field in FIELDS:
        value = np.asarray(getattr(actual, field))
        tolerance = 1e-4 if field == "error" else 1e-6
        np.testing.assert_allclose(value, wanted[field], rtol=tolerance, atol=1e-7, err_msg=f"{label} {field}")
    if actual.exponents is not None:
        np.testing.assert_allclose(np.asarray(actual.exponents), wanted["exponents"], rtol=1e-6, err_msg=label)


def _share(part, whole):
    return part.sum() / max(whole.sum(), 1)


def _spread(scale_inv, scaling, shape):
    """The scale of every value of a copy [outer, summed]."""
    scale_inv = scale_inv.astype(np.float64)
    if scaling == "tensor":
        return np.broadcast_to(scale_inv, shape)
    if scaling == "row":
        return np.broadcast_to(scale_inv[:, None], shape)
    if scaling == "block_1x32":
        return np.repeat(scale_inv, 32, axis=1)[:, : shape[1]]
    if scaling == "block_1x128":
        return np.repeat(scale_inv.T, 128, axis=1)[:, : shape[1]]
    return np.repeat(np.repeat(scale_inv, 128, axis=0), 128, axis=1)[: shape[0], : shape[1]]
