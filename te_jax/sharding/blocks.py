"""Blocks of values, 128 unless told otherwise, along dimensions of an array."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from te_jax._core.types import BLOCK
from te_jax.sharding.layout import is_explicit, moved, shards_of


def size_of(length: int, block: int = BLOCK) -> int:
    """The size of the blocks of a dimension: `block`, or all of a shorter one."""
    return max(1, min(block, length))


def zeros(x: Any) -> Array:
    """float32 zeros, one for each block along the last dimension of x, sharded as x where the blocks divide so."""
    shape = np.shape(x)
    shape = (*shape[:-1], -(-shape[-1] // BLOCK)) if shape else ()
    traced = isinstance(x, Tracer)
    sharding = jax.typeof(x).sharding if traced else getattr(x, "sharding", None)
    # What is traced knows its sharding on Explicit meshes; elsewhere that is XLA's to find out.
    if not isinstance(sharding, NamedSharding) or (traced and not sharding.mesh.explicit_axes):
        return jnp.zeros(shape, jnp.float32)
    return jnp.zeros(shape, jnp.float32, device=_of_blocks(sharding, shape))


def _of_blocks(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    if (
        not shape
        or len(sharding.spec) < len(shape)
        or shape[-1] % shards_of(sharding, sharding.spec[len(shape) - 1]) == 0
    ):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:-1]))


def split(x: Array, axes: Sequence[int], block: int = BLOCK) -> Array:
    """Each of the axes as two, [blocks, values of a block]; the last block is filled up with zeros."""
    x = _gather_cut_blocks(x, axes, block)
    size = {axis: size_of(x.shape[axis], block) for axis in axes}
    fill = [(0, -n % size.get(axis, 1)) for axis, n in enumerate(x.shape)]
    if any(after for _, after in fill):
        x = jnp.pad(x, fill)
    for axis in reversed(axes):
        x = x.reshape(*x.shape[:axis], x.shape[axis] // size[axis], size[axis], *x.shape[axis + 1 :])
    return x


def _gather_cut_blocks(x: Array, axes: Sequence[int], block: int) -> Array:
    """Axes that an Explicit mesh splits within a block, whole."""
    if not is_explicit(x):
        return x
    sharding = jax.typeof(x).sharding
    spec = list(sharding.spec)
    for axis in axes:
        if x.shape[axis] % (block * shards_of(sharding, spec[axis])):
            spec[axis] = None
    return moved(x, PartitionSpec(*spec))


def merge(blocks: Array, shape: tuple[int, ...], axes: Sequence[int]) -> Array:
    """The inverse of `split`."""
    for axis in axes:  # the axes before are merged already
        blocks = blocks.reshape(
            *blocks.shape[:axis], math.prod(blocks.shape[axis : axis + 2]), *blocks.shape[axis + 2 :]
        )
    return blocks if blocks.shape == shape else blocks[tuple(slice(n) for n in shape)]
