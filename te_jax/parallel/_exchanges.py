"""Exchanges between devices in pairs, each the transpose of the other: of slices of rows, and of all that they have."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from te_jax import sharding
from te_jax.sharding import Axes


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("sizes", "origins", "places"),
    meta_fields=("axis_name", "sent_rows", "held_rows"),
)
@dataclasses.dataclass(frozen=True)
class Segments:
    """The slices that D devices send to the holders of E experts, of which device e // (E / D) holds expert e.

    There is one for each device and expert, and every device knows them all.

    Attributes:
      sizes: int32 [D, E], their rows.
      origins: int32 [D, E], their first row on the device that sends them.
      places: int32 [D, E], their first row on the device that holds the expert.
      axis_name: the mesh axes of the devices.
      sent_rows, held_rows: rows of the arrays that each device sends from, and that it receives into.
    """

    sizes: Array
    origins: Array
    places: Array
    axis_name: Axes
    sent_rows: int
    held_rows: int


class _Slices(NamedTuple):
    """The exchanges of one device, in the order of its peers: rows, first row here, and first row on the peer."""

    sizes: Array
    here: Array
    there: Array


@jax.custom_vjp
def send(rows: Array, segments: Segments) -> Array:
    """Rows [sent_rows, …] to the devices that hold their experts: what arrives, [held_rows, …], zeros elsewhere."""
    return _exchange(rows, _sent(segments), _held(segments), segments.axis_name, segments.held_rows)


@jax.custom_vjp
def send_back(rows: Array, segments: Segments) -> Array:
    """Rows [held_rows, …] of this device's experts to the devices that they came from: [sent_rows, …]."""
    return _exchange(rows, _held(segments), _sent(segments), segments.axis_name, segments.sent_rows)


send.defvjp(
    lambda rows, segments: (send(rows, segments), segments),
    lambda segments, drows: (send_back(drows, segments), None),
)
send_back.defvjp(
    lambda rows, segments: (send_back(rows, segments), segments),
    lambda segments, drows: (send(drows, segments), None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def all_gather(x: Array, axes: Axes) -> Array:
    """[D, …]: the arrays of all devices."""
    return lax.all_gather(x, axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def sum_over_devices(parts: Array, axes: Axes) -> Array:
    """This device's part of the sum of arrays [D, …] over devices: a reduce-scatter that adds up in float32."""
    parts = lax.all_to_all(parts, axes, 0, 0)
    return jnp.sum(parts.astype(jnp.float32), axis=0).astype(parts.dtype)


all_gather.defvjp(
    lambda x, axes: (all_gather(x, axes), None),
    lambda axes, _, dparts: (sum_over_devices(dparts, axes),),
)
sum_over_devices.defvjp(
    lambda parts, axes: (sum_over_devices(parts, axes), None),
    lambda axes, _, dx: (all_gather(dx, axes),),
)


def of_experts(table: Array, axes: Axes) -> Array:
    """The columns of this device's experts out of a table [D, E], row by row: [E]."""
    devices, experts = table.shape
    count = experts // devices
    return lax.dynamic_slice_in_dim(table, lax.axis_index(axes) * count, count, axis=1).reshape(experts)


def covered_by(sizes: Array, starts: Array, num_rows: int) -> tuple[Array, Array]:
    """For each of num_rows rows the slice that covers it and its place in that, or (-1, -1); [num_rows] both.

    Args:
      sizes: [n], rows of slices that do not overlap.
      starts: [n], their first rows, in any order.
      num_rows: number of rows.
    """
    starts = jnp.where(sizes > 0, starts, num_rows)
    order = jnp.argsort(starts).astype(jnp.int32)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    last = jnp.searchsorted(starts[order], row, side="right", method="scan_unrolled").astype(jnp.int32) - 1
    covering = order[jnp.maximum(last, 0)]
    place = row - starts[covering]
    covered = (last >= 0) & (place < sizes[covering])
    return jnp.where(covered, covering, -1), jnp.where(covered, place, -1)


def _sent(segments: Segments) -> _Slices:
    me = lax.axis_index(segments.axis_name)
    return _Slices(segments.sizes[me], segments.origins[me], segments.places[me])


def _held(segments: Segments) -> _Slices:
    tables = (segments.sizes, segments.places, segments.origins)
    return _Slices(*(of_experts(table, segments.axis_name) for table in tables))


def _exchange(rows: Array, sent: _Slices, received: _Slices, axes: Axes, num_rows: int) -> Array:
    def ragged_all_to_all(rows: Array, sent: _Slices, received: _Slices) -> Array:
        return lax.ragged_all_to_all(
            rows, zeros(rows), sent.here, sent.sizes, sent.there, received.sizes, axis_name=axes
        )

    def all_gather(rows: Array, sent: _Slices, received: _Slices) -> Array:
        """An exchange where XLA has no ragged all-to-all, on CPUs."""
        del sent
        everything = lax.all_gather(rows, axes)
        covering, place = covered_by(received.sizes, received.here, num_rows)
        slices = received.sizes.shape[0] // everything.shape[0]
        row = jnp.where(covering >= 0, received.there[covering] + place, 0)
        taken = everything.at[jnp.maximum(covering, 0) // slices, row].get(mode="promise_in_bounds")
        return jnp.where((covering >= 0).reshape(num_rows, *(1,) * (rows.ndim - 1)), taken, zeros(rows))

    def zeros(rows: Array) -> Array:
        return sharding.varying_over(jnp.zeros((num_rows, *rows.shape[1:]), rows.dtype), sharding.varying_axes(rows))

    operands = sharding.varying_together((rows, sent, received), sharding.tracked_axes(axes))
    return lax.platform_dependent(*operands, cuda=ragged_all_to_all, default=all_gather)
