"""Collective matmul by plain collectives: gather, then multiply; multiply, then reduce-scatter. Nothing overlaps."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from te_jax.parallel.transports.exchange import Exchange, Operand, all_gather, multiply, sum_of_products, with_bias


def all_gather_gemm(
    exchange: Exchange,
    x: Operand,
    weights: tuple[Operand, ...],
    biases: tuple[Array | None, ...],
    extras: tuple[Array, ...],
    keep_gathered: bool,
) -> tuple[tuple[Array, ...], Array | None, tuple[Array, ...]]:
    """See `te_jax.parallel.transports.exchange.Transport`."""
    axes = exchange.axis_name
    scale_inv = x.scale_inv
    if x.scaling in ("row", "block"):
        assert scale_inv is not None
        scale_inv = all_gather(scale_inv, axes, axis=scale_inv.ndim - 1, tiled=True)
    whole = dataclasses.replace(x, data=all_gather(x.data, axes, axis=1, tiled=True), scale_inv=scale_inv)
    products = tuple(multiply(exchange, whole, weight, bias=bias) for weight, bias in zip(weights, biases, strict=True))
    return products, whole.data if keep_gathered else None, tuple(all_gather(extra, axes) for extra in extras)


def gemm_reduce_scatter(
    exchange: Exchange, xs: tuple[Operand, ...], weights: tuple[Operand, ...], bias: Array | None
) -> Array:
    """See `te_jax.parallel.transports.exchange.Transport`.

    The collective adds up in the output dtype, as is customary and as XLA's own rewrites do: over D devices a sum in
    bfloat16 is rounded up to D-1 times. The other transports round partial sums once, and add them in float32.
    """
    partial = sum_of_products(exchange, tuple(_with_merged_rows(x) for x in xs), weights)
    z = lax.psum_scatter(partial, exchange.axis_name, scatter_dimension=1, tiled=True)
    return with_bias(z, bias, exchange.out_dtype)


def _with_merged_rows(x: Operand) -> Operand:
    """A left side [A, D, R, K] as [A, D·R, K]."""
    A, D, R, K = x.data.shape
    scale_inv = x.scale_inv
    if x.scaling == "row":
        assert scale_inv is not None
        scale_inv = scale_inv.reshape(A, D * R)
    if x.scaling == "block":
        assert scale_inv is not None
        scale_inv = jnp.moveaxis(scale_inv, 1, 2).reshape(A, scale_inv.shape[2], D * R)
    return dataclasses.replace(x, data=x.data.reshape(A, D * R, K), scale_inv=scale_inv)
