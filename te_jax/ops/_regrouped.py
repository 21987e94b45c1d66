"""Reshapes of groups of dimensions that Explicit meshes allow too."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import jax
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from te_jax import native


def regrouped(x: Array, before: Sequence[tuple[int, ...]], after: Sequence[tuple[int, ...]]) -> Array:
    """x with the dimensions of each group merged into one or split, as `after` says.

    On Explicit meshes what splits the first dimension of a group over devices does so afterwards; the others are
    gathered, for their shards would not lie in one piece.
    """
    sizes = tuple(itertools.chain(*after))
    if x.shape == sizes:
        return x
    sharding = jax.typeof(x).sharding
    if not sharding.mesh.explicit_axes:
        return x.reshape(sizes)
    place, spec_before, spec_after = 0, [], []
    for old, new in zip(before, after, strict=True):
        entries = list(sharding.spec[place : place + len(old)])
        place += len(old)
        if old != new:
            first = entries[0] if entries else None
            shards = math.prod(sharding.mesh.shape[axis] for axis in native.axes_of_entry(first))
            first = first if new and new[0] % shards == 0 else None
            entries = [first, *(None,) * (len(old) - 1)][: len(old)]
            spec_after += [first, *(None,) * (len(new) - 1)][: len(new)]
        else:
            spec_after += entries
        spec_before += entries
    x = jax.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*spec_before)))
    return lax.reshape(x, sizes, out_sharding=NamedSharding(sharding.mesh, PartitionSpec(*spec_after)))


def split_in_two(shape: tuple[int, ...], first: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dimensions as two groups, of which the first has `first` elements."""
    place = next(i for i in range(len(shape)) if math.prod(shape[:i]) == first)
    return shape[:place], shape[place:]
