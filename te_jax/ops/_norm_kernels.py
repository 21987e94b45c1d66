"""Norms whose results leave as FP8, and their gradients, for operations: without a derivative of their own.

Features are whole on every device; rows may be split in any way. With H hidden features of 2 bytes, a value costs

    block scaling    read x, write y as it is: 3 bytes; for both copies, read x: 2 bytes; read x, write them: 4 bytes
    tensor scaling   read x for the amax: 2 bytes; read x, write both copies: 4 bytes
    with a residual  4 bytes more in the first pass, which reads it and writes the sum
    gradient         read x and dy, write dx: 6 bytes; 8 with the gradient of the sum
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
from jax import Array

from te_jax import sharding
from te_jax.ops._quantize_kernels import (
    AMAX,
    Dimensions,
    Kernels,
    Request,
    Result,
    block_attributes,
    group,
    quantized_array,
    run_kernel,
    shared_facts,
)
from te_jax.ops.quantize import quantize_requested
from te_jax.quantized import QuantizedArray
from te_jax.reference.norm import normalize, residual_sum
from te_jax.reference.quantize import blocked_groups

_WHOLE = ("c0",)  # the features, in rules
_MOST_PARTIALS = 264  # sums of dgamma and dbeta: two for each multiprocessor of an H100 or H200


@dataclasses.dataclass(frozen=True)
class Norm:
    """The static arguments of a norm; hashable.

    Attributes:
      epsilon: added to the variance.
      centered: whether the mean is subtracted.
    """

    epsilon: float
    centered: bool


@dataclasses.dataclass(frozen=True)
class Normalized:
    """Results of a norm, and what its gradient needs of them.

    Attributes:
      y: in the dtype of x, or in FP8.
      x: what was normalized: x, or the sum with the residual.
      mean: float32 [*rows], None unless centered.
      rstd: float32 [*rows].
    """

    y: Array | QuantizedArray
    x: Array
    mean: Array | None
    rstd: Array


def normalized(
    norm: Norm, x: Array, residual: Array | None, gamma: Array, beta: Array | None, request: Request | None
) -> Normalized:
    """The norm by the native kernels, or by XLA where they would not save a pass, or would serve no recipe: where the
    transposed copy, or the only one, has scales of 128×128 values.

    Args:
      norm: what to compute.
      x, residual: [*rows, features], float32, bfloat16 or float16, with values; residual may be None.
      gamma, beta: float32 [features]; beta may be None.
      request: how to quantize, without amax and dbias; None for a result in the dtype of x.
    """
    facts = shared_facts(request)
    if request is not None and facts.in_blocks and request.facts[-1].outer_block == 1:
        return _in_blocks(norm, x, residual, gamma, beta, request)
    if request is not None and facts.by_tensor:
        return _in_tensor(norm, x, residual, gamma, beta, request)
    if residual is not None:
        x = residual_sum(x, residual)
    y, mean, rstd = normalize(x, gamma, beta, epsilon=norm.epsilon, centered=norm.centered)
    if request is None:
        return Normalized(y, x, mean, rstd)
    return Normalized(quantize_requested(y, None, request, True).array, x, mean, rstd)


def _in_blocks(
    norm: Norm, x: Array, residual: Array | None, gamma: Array, beta: Array | None, request: Request
) -> Normalized:
    quantization = request.quantization
    # The first pass can write scales of 1×128 values of a row, which the features of no other row decide.
    at_once = request.copies == "data"
    x, mean, rstd, _, *arrays = _first_pass(norm, x, residual, gamma, beta, request, in_blocks=at_once)
    if at_once:
        return Normalized(quantized_array(x, (*arrays, None, None), request), x, mean, rstd)
    kernels = Kernels(request, x.ndim, blocked_groups(quantization, request.copies), _WHOLE)
    codes_and_scales = kernels.run(
        "te_norm_blocks",
        _known(kernels.rows, kernels.cols, x, gamma, beta, mean, rstd),
        kernels.blocks,
        **dataclasses.asdict(norm),
        **block_attributes(quantization),
    )
    return Normalized(quantized_array(x, tuple(codes_and_scales), request), x, mean, rstd)


def _in_tensor(
    norm: Norm, x: Array, residual: Array | None, gamma: Array, beta: Array | None, request: Request
) -> Normalized:
    x, mean, rstd, amax, *_ = _first_pass(norm, x, residual, gamma, beta, request, with_amax=True)
    kernels = Kernels(request, x.ndim, (), _WHOLE)
    data, transposed, scale_inv, transposed_scale_inv = kernels.run(
        "te_norm_tensor",
        {**_known(kernels.rows, kernels.cols, x, gamma, beta, mean, rstd), "amax": ((), amax)},
        {**kernels.copies, **kernels.tensor_scales("amax")},
        **dataclasses.asdict(norm),
        power_of_two_scales=request.quantization.power_of_two_scales,
    )
    arrays = data, scale_inv, transposed, transposed_scale_inv
    return Normalized(quantized_array(x, arrays, request), x, mean, rstd)


def _first_pass(
    norm: Norm,
    x: Array,
    residual: Array | None,
    gamma: Array,
    beta: Array | None,
    request: Request,
    *,
    in_blocks: bool = False,
    with_amax: bool = False,
) -> tuple[Array, Array | None, Array, Array | None, Array | None, Array | None]:
    """(what is normalized, mean, rstd, amax of y, data, scale_inv)."""
    kernels = Kernels(request, x.ndim, ("cols",) if in_blocks else (), _WHOLE)
    row = Result(kernels.rows)
    total, mean, rstd, amax, data, scale_inv = kernels.run(
        "te_norm",
        {
            "x": (kernels.x, x),
            "residual": (kernels.x, residual),
            "gamma": (kernels.cols, gamma),
            "beta": (kernels.cols, beta),
        },
        {
            "sum": None if residual is None else Result(kernels.x, np.dtype(x.dtype)),
            "mean": row if norm.centered else None,
            "rstd": row,
            "amax": AMAX if with_amax else None,
            "data": kernels.data if in_blocks else None,
            "scale_inv": kernels.block_scales()[0] if in_blocks else None,
        },
        **dataclasses.asdict(norm),
        power_of_two_scales=request.quantization.power_of_two_scales,
    )
    return x if total is None else total, mean, rstd, amax, data, scale_inv


# Under jit, or each gradient outside of jit would trace it anew.
@functools.partial(jax.jit, static_argnums=(0, 7), inline=sharding.INLINE)
def norm_gradients(
    norm: Norm,
    x: Array,
    gamma: Array,
    mean: Array | None,
    rstd: Array,
    dy: Array,
    dsum: Array | None,
    with_dbeta: bool,
) -> tuple[Array, Array, Array | None]:
    """The gradients of x, with `dsum` added to it where that is not None, of gamma and, if asked for, of beta."""
    rows, cols = group("r", x.ndim - 1, False), group("c", 1, False)
    like_x = rows + cols
    sums = Result(cols, reduced_by="sum", most_partials=_MOST_PARTIALS)
    dx, dgamma, dbeta = run_kernel(
        "te_norm_gradient",
        rows,
        cols,
        {
            "x": (like_x, x),
            "dy": (like_x, dy),
            "dsum": (like_x, dsum),
            "gamma": (cols, gamma),
            "mean": (rows, mean),
            "rstd": (rows, rstd),
        },
        {
            "dx": Result(like_x, np.dtype(x.dtype)),
            "dgamma_partial": sums,
            "dbeta_partial": sums if with_dbeta else None,
        },
        _WHOLE,
        **dataclasses.asdict(norm),
    )
    return dx, dgamma, dbeta


def _known(
    rows: Dimensions, cols: Dimensions, x: Array, gamma: Array, beta: Array | None, mean: Array | None, rstd: Array
) -> dict[str, tuple[Dimensions, Array | None]]:
    """The operands of a pass that knows the statistics."""
    return {
        "x": (rows + cols, x),
        "gamma": (cols, gamma),
        "beta": (cols, beta),
        "mean": (rows, mean),
        "rstd": (rows, rstd),
    }
