"""Collective matmul by `ppermute`: every step multiplies what has arrived while the next piece travels.

All steps are unrolled, so that XLA's scheduler sees each of them. It runs on every platform.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array, lax

from te_jax.parallel._collective.call import BLOCK_PRODUCT_ROWS
from te_jax.parallel.transports.exchange import (
    Exchange,
    Operand,
    as_bytes,
    like_bytes,
    multiply,
    sum_of_products,
    with_bias,
)


def all_gather_gemm(
    exchange: Exchange,
    x: Operand,
    weights: tuple[Operand, ...],
    biases: tuple[Array | None, ...],
    extras: tuple[Array, ...],
    keep_gathered: bool,
) -> tuple[tuple[Array, ...], Array | None, tuple[Array, ...]]:
    """See `te_jax.parallel.transports.exchange.Transport`.

    Shards are passed on from device to device: after i steps device r multiplies the shard of device r+i. Its own one
    comes first, before anything has arrived. Both ways, half of the rows of each shard come from device r-i instead.
    """
    A, R, _ = x.data.shape
    D, rank = exchange.size, lax.axis_index(exchange.axis_name)

    def written(buffers: list[Array], piece: Operand, first: Array) -> list[Array]:
        values = [multiply(exchange, piece, weight, bias=b) for weight, b in zip(weights, biases, strict=True)]
        values += [as_bytes(piece.data)] if keep_gathered else []
        buffers = buffers or [lax.empty((A, D * R, value.shape[2]), value.dtype) for value in values]
        return [_updated(buffer, value, first, axis=1) for buffer, value in zip(buffers, values, strict=True)]

    def collected(buffers: list[Array], values: list[Array], q: Array) -> list[Array]:
        buffers = buffers or [lax.empty((D, *value.shape), value.dtype) for value in values]
        return [_updated(buffer, value[None], q, axis=0) for buffer, value in zip(buffers, values, strict=True)]

    pieces = [(direction, first, x.rows(first, size)) for direction, first, size in _pieces(exchange, x)]
    carried_extras = [as_bytes(extra) for extra in extras]
    buffers = written([], x, rank * R)
    extra_buffers = collected([], carried_extras, rank)
    for step in range(1, D):
        pieces = [(direction, first, _sent(exchange, piece, -direction)) for direction, first, piece in pieces]
        carried_extras = [_permuted(exchange, extra, -1) for extra in carried_extras]
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
    exchange: Exchange, xs: tuple[Operand, ...], weights: tuple[Operand, ...], bias: Array | None
) -> Array:
    """See `te_jax.parallel.transports.exchange.Transport`.

    Every block is sent to its owner once, in the output dtype, and summed there in float32: no partial sum is rounded
    again on its way, as it would be if it were accumulated and passed on. A device's own block comes last.
    """
    D, rank = exchange.size, lax.axis_index(exchange.axis_name)
    if D == 1:
        return sum_of_products(exchange, tuple(x.block(rank) for x in xs), weights, bias)
    pieces = _pieces(exchange, xs[0])
    arrived: list[list[Array]] = [[] for _ in pieces]
    for step in range(1, D + 1):
        for parts, (direction, first, size) in zip(arrived, pieces, strict=True):
            owner = (rank + direction * step) % D
            block = tuple(x.block(owner).rows(first, size) for x in xs)
            parts.append(_permuted(exchange, sum_of_products(exchange, block, weights), direction * step))
    sums = [sum(part.astype(jnp.float32) for part in parts[1:]) + parts[0].astype(jnp.float32) for parts in arrived]
    z = jnp.concatenate(sums, axis=1) if len(sums) > 1 else sums[0]
    return with_bias(z, bias, exchange.out_dtype)


def _pieces(exchange: Exchange, x: Operand) -> list[tuple[int, int, int]]:
    """(direction, first row, number of rows) of what travels: a shard as it is, or its halves in both directions."""
    rows = x.data.shape[-2]
    half = rows // 2
    if x.scaling == "block":
        half -= half % BLOCK_PRODUCT_ROWS
    if not exchange.bidirectional or half == 0:
        return [(1, 0, rows)]
    return [(1, 0, half), (-1, half, rows - half)]


def _sent(exchange: Exchange, x: Operand, shift: int) -> Operand:
    """What arrives of a left side where each device sends its own to the one `shift` further on."""
    data = like_bytes(_permuted(exchange, as_bytes(x.data), shift), x.data)
    scale_inv = x.scale_inv
    if x.scaling in ("row", "block"):
        assert scale_inv is not None
        scale_inv = _permuted(exchange, scale_inv, shift)
    return Operand(data, scale_inv, x.scaling)


def _permuted(exchange: Exchange, x: Array, shift: int) -> Array:
    """What arrives where each device sends x to the one `shift` further on."""
    D = exchange.size
    if shift % D == 0:
        return x
    # ppermute counts devices in the order in which the mesh names its axes, whatever the order asked for.
    mesh_axes = jax.sharding.get_abstract_mesh().axis_names
    names = tuple(sorted(exchange.axis_name, key=lambda name: mesh_axes.index(name) if name in mesh_axes else 0))
    places = _places(exchange.axis_name, names)
    return lax.ppermute(x, names, [(places[source], places[(source + shift) % D]) for source in range(D)])


def _places(names: tuple[str, ...], order: tuple[str, ...]) -> list[int]:
    """For each device, counted along mesh axes `names`, where it stands when they are counted in another order."""
    sizes = [lax.axis_size(name) for name in names]
    places = []
    for device in range(math.prod(sizes)):
        index = {}
        for name, size in zip(reversed(names), reversed(sizes), strict=True):
            device, index[name] = divmod(device, size)
        place = 0
        for name in order:
            place = place * lax.axis_size(name) + index[name]
        places.append(place)
    return places


def _updated(buffer: Array, value: Array, first: Array, *, axis: int) -> Array:
    return lax.dynamic_update_slice_in_dim(buffer, value, first, axis=axis)
