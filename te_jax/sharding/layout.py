"""Reshapes, casts and products that keep what Explicit meshes know of an array.

On Auto meshes XLA finds out how results lie, and these are the plain functions of `jax.numpy`. On Explicit meshes the
caller has to say it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from te_jax._core.integers import as_int32
from te_jax._core.types import PyTree, T
from te_jax.sharding.axes import axes_of_entry

Shape = tuple[int, ...]
Entry = str | tuple[str, ...] | None


def is_explicit(*operands: PyTree) -> bool:
    """Whether any leaf lies on a mesh with Explicit axes."""
    return any(jax.typeof(x).sharding.mesh.explicit_axes for x in jax.tree.leaves(operands))


def moved(x: Array, spec: PartitionSpec, mesh: Mesh | AbstractMesh | None = None) -> Array:
    """x, which lies on an Explicit mesh, with another PartitionSpec."""
    sharding = jax.typeof(x).sharding
    return x if sharding.spec == spec else jax.reshard(x, NamedSharding(mesh or sharding.mesh, spec))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Layout:
    """Dtype of an array and, on Explicit meshes, its sharding."""

    dtype: np.dtype
    sharding: NamedSharding | None = None

    @classmethod
    def of(cls, x: Array) -> Layout:
        return cls(np.dtype(x.dtype), jax.typeof(x).sharding if is_explicit(x) else None)

    def apply(self, value: Array) -> Array:
        """The value in this dtype and sharding."""
        value = value.astype(self.dtype)
        return value if self.sharding is None else moved(value, self.sharding.spec, self.sharding.mesh)


def layout_of_product(x: Array, batch_ndim: int, kernel: Array, out: slice) -> Layout:
    """Layout of x · kernel: the batch lies as that of x, and the kernel's dimensions `out` as there, where free."""
    specs = [tuple(jax.typeof(a).sharding.spec) if is_explicit(a) else (None,) * a.ndim for a in (x, kernel)]
    mesh = next((jax.typeof(a).sharding.mesh for a in (x, kernel) if is_explicit(a)), None)
    if mesh is None:
        return Layout(np.dtype(x.dtype))
    batch = specs[0][:batch_ndim]
    return Layout(np.dtype(x.dtype), NamedSharding(mesh, PartitionSpec(*batch, *_free(specs[1][out], batch))))


def _free(entries: Sequence[Entry], taken: Sequence[Entry]) -> list[Entry]:
    """The entries of a PartitionSpec, None where they name axes that others have taken."""
    axes = {axis for entry in taken for axis in axes_of_entry(entry)}
    return [None if axes & set(axes_of_entry(entry)) else entry for entry in entries]


def split_as_last(operand: Array, whole: Array) -> Array:
    """The operand, split as the last dimensions of `whole` are: on Explicit meshes JAX adds nothing else to it."""
    if not (is_explicit(operand) and is_explicit(whole)):
        return operand
    sharding = jax.typeof(whole).sharding
    return moved(operand, PartitionSpec(*tuple(sharding.spec)[whole.ndim - operand.ndim :]), sharding.mesh)


def dot(lhs: Array, rhs: Array, contracting: tuple[Shape, Shape], dtype: jax.typing.DTypeLike) -> Array:
    """`lax.dot_general` over the given dimensions of either; where shardings disagree, rhs is moved to lhs."""
    if not is_explicit(lhs, rhs):
        return lax.dot_general(lhs, rhs, (contracting, ((), ())), preferred_element_type=dtype)
    mesh = next(jax.typeof(a).sharding.mesh for a in (lhs, rhs) if is_explicit(a))
    left, right = (list(jax.typeof(a).sharding.spec) if is_explicit(a) else [None] * a.ndim for a in (lhs, rhs))
    right = _free(right, left)
    for i, j in zip(*contracting, strict=True):
        right[j] = left[i]
    out = [entry for i, entry in enumerate(left) if i not in contracting[0]]
    out += [entry for i, entry in enumerate(right) if i not in contracting[1]]
    return lax.dot_general(
        lhs,
        moved(rhs, PartitionSpec(*right), mesh),
        (contracting, ((), ())),
        preferred_element_type=dtype,
        out_sharding=NamedSharding(mesh, PartitionSpec(*out)),
    )


def take_rows(table: Array, indices: Array) -> Array:
    """table[indices] [*indices, columns], as `jnp.take` gives it: -1 is the last row, and what is out of bounds is NaN.
    Split as the indices are."""
    indices = as_int32(indices)  # JAX adds the number of rows to negative indices in their own dtype
    if not is_explicit(indices, table):
        return jnp.take(table, indices, axis=0)
    on_mesh = is_explicit(indices)
    mesh = jax.typeof(indices if on_mesh else table).sharding.mesh
    out = NamedSharding(mesh, PartitionSpec(*(jax.typeof(indices).sharding.spec if on_mesh else ()), None))
    return table.at[indices].get(mode="fill", out_sharding=out)


def regrouped(x: Array, before: Sequence[Shape], after: Sequence[Shape]) -> Array:
    """x with the dimensions of each group merged into one or split, as `after` says.

    On Explicit meshes what splits the first dimension of a group over devices does so afterwards; the others are
    gathered, for their shards would not lie in one piece.
    """
    sizes = tuple(itertools.chain(*after))
    if x.shape == sizes:
        return x
    if not is_explicit(x):
        return x.reshape(sizes)
    sharding = jax.typeof(x).sharding
    place, spec_before, spec_after = 0, [], []
    for old, new in zip(before, after, strict=True):
        entries = list(sharding.spec[place : place + len(old)])
        place += len(old)
        if old != new:
            first = entries[0] if entries else None
            first = first if new and new[0] % shards_of(sharding, first) == 0 else None
            entries = [first, *(None,) * (len(old) - 1)][: len(old)]
            spec_after += [first, *(None,) * (len(new) - 1)][: len(new)]
        else:
            spec_after += entries
        spec_before += entries
    x = moved(x, PartitionSpec(*spec_before))
    return lax.reshape(x, sizes, out_sharding=NamedSharding(sharding.mesh, PartitionSpec(*spec_after)))


def split_in_two(shape: Shape, first: int) -> tuple[Shape, Shape]:
    """The dimensions as two groups, of which the first has `first` elements."""
    place = next(i for i in range(len(shape)) if math.prod(shape[:i]) == first)
    return shape[:place], shape[place:]


def padded(x: Array, padding: int, axis: int) -> Array:
    """x with zeros appended to a dimension."""
    if is_explicit(x):
        sharding = jax.typeof(x).sharding
        if (x.shape[axis] + padding) % shards_of(sharding, sharding.spec[axis]):
            x = moved(x, PartitionSpec(*sharding.spec[:axis], None, *sharding.spec[axis + 1 :]))
    return jnp.pad(x, [(0, padding if i == axis else 0) for i in range(x.ndim)])


def shards_of(sharding: NamedSharding, entry: Entry) -> int:
    """The number of shards that an entry of a PartitionSpec makes of a dimension."""
    return math.prod(sharding.mesh.shape[axis] for axis in axes_of_entry(entry))


def shard_map(
    local: Callable[..., T], mesh: Mesh | AbstractMesh, in_specs: tuple[PyTree, ...], out_specs: PyTree
) -> Callable[..., T]:
    """`jax.shard_map` that moves operands along Explicit axes to their in_specs, as JAX does along Auto axes."""
    mapped = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    explicit = mesh.abstract_mesh.explicit_axes
    if not explicit:
        return mapped

    def place(spec: PartitionSpec, argument: Array) -> Array:
        entries = (tuple(axis for axis in axes_of_entry(entry) if axis in explicit) for entry in spec)
        return jax.reshard(argument, NamedSharding(mesh, PartitionSpec(*entries)))

    return lambda *arguments: mapped(*jax.tree.map(place, in_specs, arguments))
