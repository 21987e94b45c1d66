"""Collective matmul by `ppermute`: every step multiplies what has arrived while the next piece travels.

All steps are unrolled, so that XLA's scheduler sees each of them. It runs on every platform.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from te_jax import sharding
from te_jax.parallel._collective.call import CollectiveSpec
from te_jax.parallel.options import Ring
from te_jax.parallel.transports.exchange import GemmOperand, as_bytes, like_bytes, multiply, sum_of_products, with_bias


def all_gather_gemm(
    spec: CollectiveSpec,
    x: GemmOperand,
    kernels: tuple[GemmOperand, ...],
    biases: tuple[Array | None, ...],
    extras: tuple[Array, ...],
    keep_gathered: bool,
) -> tuple[tuple[Array, ...], Array | None, tuple[Array, ...]]:
    """See `te_jax.parallel.transports.exchange.Transport`.

    Shards are passed on from device to device: after i steps device r multiplies the shard of device r+i. Its own one
    comes first, before anything has arrived. Both ways, half of the rows of each shard come from device r-i instead.
    """
    A, R, _ = x.data.shape
    D, rank = spec.size, lax.axis_index(spec.axis_name)

    def written(buffers: list[Array], piece: GemmOperand, first: Array) -> list[Array]:
        values = [multiply(spec, piece, kernel, bias=b) for kernel, b in zip(kernels, biases, strict=True)]
        values += [as_bytes(piece.data)] if keep_gathered else []
        buffers = buffers or [lax.empty((A, D * R, value.shape[2]), value.dtype) for value in values]
        return [_updated(buffer, value, first, axis=1) for buffer, value in zip(buffers, values, strict=True)]

    def collected(buffers: list[Array], values: list[Array], q: Array) -> list[Array]:
        buffers = buffers or [lax.empty((D, *value.shape), value.dtype) for value in values]
        return [_updated(buffer, value[None], q, axis=0) for buffer, value in zip(buffers, values, strict=True)]

    pieces = [(direction, first, x.rows(first, size)) for direction, first, size in _pieces(spec, x)]
    carried_extras = [as_bytes(extra) for extra in extras]
    buffers = written([], x, rank * R)
    extra_buffers = collected([], carried_extras, rank)
    for step in range(1, D):
        pieces = [(direction, first, _sent(spec, piece, -direction)) for direction, first, piece in pieces]
        carried_extras = [_permuted(spec, extra, -1) for extra in carried_extras]
        for direction, first, piece in pieces:
            buffers = written(buffers, piece, (rank + direction * step) % D * R + first)
        extra_buffers = collected(extra_buffers, carried_extras, (rank + step) % D)

    gathered = like_bytes(buffers.pop(), x.data) if keep_gathered else None
    return (
        tuple(buffers),
        gathered,
        tuple(like_bytes(buffer, extra) for buffer, extra in zip(extra_buffers, extras, strict=True)),
    )


def gemm_reduce_scatter(
    spec: CollectiveSpec, xs: tuple[GemmOperand, ...], kernels: tuple[GemmOperand, ...], bias: Array | None
) -> Array:
    """See `te_jax.parallel.transports.exchange.Transport`.

    Every block is sent to its owner once, in the output dtype, and summed there in float32: no partial sum is rounded
    again on its way, as it would be if it were accumulated and passed on. A device's own block comes last.
    """
    D, rank = spec.size, lax.axis_index(spec.axis_name)
    if D == 1:
        return sum_of_products(spec, tuple(x.shard(rank) for x in xs), kernels, bias)
    pieces = _pieces(spec, xs[0])
    arrived: list[list[Array]] = [[] for _ in pieces]
    for step in range(1, D + 1):
        for parts, (direction, first, size) in zip(arrived, pieces, strict=True):
            owner = (rank + direction * step) % D
            block = tuple(x.shard(owner).rows(first, size) for x in xs)
            parts.append(_permuted(spec, sum_of_products(spec, block, kernels), direction * step))
    sums = [sum(part.astype(jnp.float32) for part in parts[1:]) + parts[0].astype(jnp.float32) for parts in arrived]
    z = jnp.concatenate(sums, axis=1) if len(sums) > 1 else sums[0]
    return with_bias(z, bias, spec.out_dtype)


def _pieces(spec: CollectiveSpec, x: GemmOperand) -> list[tuple[int, int, int]]:
    """(direction, first row, number of rows) of what travels: a shard as it is, or its halves in both directions."""
    rows = x.data.shape[-2]
    half = rows // 2
    half -= half % x.scaling.row_multiple
    both_ways = isinstance(spec.transport, Ring) and spec.transport.bidirectional
    if not both_ways or half == 0:
        return [(1, 0, rows)]
    return [(1, 0, half), (-1, half, rows - half)]


def _sent(spec: CollectiveSpec, x: GemmOperand, shift: int) -> GemmOperand:
    """The LHS that arrives where each device sends its own to the one `shift` further on."""
    return x.map(
        lambda data: like_bytes(_permuted(spec, as_bytes(data), shift), data),
        lambda scales: _permuted(spec, scales, shift),
    )


def _permuted(spec: CollectiveSpec, x: Array, shift: int) -> Array:
    """The array that arrives where each device sends x to the one `shift` further on."""
    D = spec.size
    if shift % D == 0:
        return x
    names = sharding.in_order_of_mesh(spec.axis_name)  # in which ppermute counts devices, whatever the order asked for
    counted = np.arange(D).reshape([lax.axis_size(name) for name in names])
    numbers = counted.transpose([names.index(name) for name in spec.axis_name]).reshape(-1).tolist()  # by rank
    return lax.ppermute(x, names, [(numbers[source], numbers[(source + shift) % D]) for source in range(D)])


def _updated(buffer: Array, value: Array, first: Array, *, axis: int) -> Array:
    return lax.dynamic_update_slice_in_dim(buffer, value, first, axis=axis)
