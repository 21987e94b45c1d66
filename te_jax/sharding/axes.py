"""Names of mesh axes, and over which of them an array differs from device to device inside `shard_map`.

JAX tracks that as the varying axes of an array's type, except in `pmap` and with check_vma=False.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax import Array, lax
from jax.dtypes import float0
from jax.sharding import AbstractMesh, PartitionSpec

from te_jax._core.types import PyTree, T

Axes = tuple[str, ...]
AxisName = str | tuple[str, ...]


def as_axis_names(name: str, axes: object) -> Axes:
    """The mesh axes that an argument names: one, several, or None for none."""
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    if not isinstance(names, tuple | list) or not all(isinstance(axis, str) for axis in names):
        raise ValueError(f"{name} is {axes!r}; it must be the name of a mesh axis, a tuple of several, or None")
    return tuple(names)


def mapped_axes(axis_name: object, argument: str = "axis_name") -> tuple[Axes, int]:
    """The mesh axes that an argument names, and the number of devices along them.

    Raises:
      ValueError: it is no name or tuple of names, or one of them is not mapped here.
    """
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if (
        not isinstance(names, tuple | list)
        or not names
        or not all(isinstance(name, str) for name in names)
        or len(set(names)) < len(names)
    ):
        raise ValueError(
            f"{argument} is {axis_name!r}; it must be the name of a mesh axis, or a tuple of several, each once"
        )
    size = 1
    for name in names:
        try:
            size *= lax.axis_size(name)
        except NameError:
            raise ValueError(
                f"{argument} is {axis_name!r}, but no axis {name!r} is mapped here; call it inside shard_map or "
                "pmap over a mesh with that axis"
            ) from None
    return tuple(names), size


def axes_of_entry(entry: str | tuple[str, ...] | None) -> Axes:
    """The mesh axes that one entry of a PartitionSpec names."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def varying_axes(*operands: PyTree) -> frozenset[str]:
    """The mesh axes over which any leaf of the operands varies; empty where JAX does not track them."""
    types = [jax.typeof(x) for x in jax.tree.leaves(operands)]
    return frozenset().union(*(type_.manual_axis_type.varying for type_ in types))


def tracked_axes(names: Sequence[str]) -> frozenset[str]:
    """Mapped axes for which JAX tracks what varies over them."""
    return frozenset(name for name in names if varying_axes(lax.axis_index(name)))


def varying_over(x: Array, axes: frozenset[str]) -> Array:
    """x, varying over these mesh axes as well."""
    missing = tuple(sorted(axes - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def varying_together(operands: T, axes: frozenset[str] = frozenset()) -> T:
    """A tree whose leaves all vary over the axes that any of them varies over, and over `axes`.

    JAX then sums gradients over those axes outside, as it does for its own operations.
    """
    axes = axes | varying_axes(operands)
    return jax.tree.map(lambda x: varying_over(x, axes), operands)


def together(one: PyTree, other: PyTree) -> tuple[PyTree, PyTree]:
    """Both trees, and nothing that uses one begins before all of both is computed.

    An optimization barrier marks all that passes it as varying over the axes over which any of it varies. So what
    varies over fewer axes is waited for, but does not wait itself.
    """
    if not (jax.tree.leaves(one) and jax.tree.leaves(other)):
        return one, other
    axes = varying_axes(one, other)
    leaves, structure = jax.tree.flatten((one, other))
    arrays = [place for place, leaf in enumerate(leaves) if leaf.dtype != float0]
    for place, leaf in zip(arrays, lax.optimization_barrier([leaves[place] for place in arrays]), strict=True):
        leaves[place] = leaf if varying_axes(leaves[place]) == axes else leaves[place]
    return structure.unflatten(leaves)


def unmapped_axes() -> list[str]:
    """The axes of the mesh at hand that have several devices and that no shard_map has mapped."""
    mesh = jax.sharding.get_abstract_mesh()
    return [axis for axis in mesh.axis_names if axis not in mesh.manual_axes and mesh.shape[axis] > 1]


def axes_without_devices(names: Sequence[str]) -> list[str]:
    """Mapped axes that are examples of a vmap on one device."""
    return [name for name in names if name not in jax.sharding.get_abstract_mesh().manual_axes]


def inside_shard_map() -> bool:
    """Whether this is traced inside shard_map or pmap."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def in_order_of_mesh(names: Sequence[str]) -> Axes:
    """Mapped axes in the order in which the mesh names them."""
    order = jax.sharding.get_abstract_mesh().axis_names
    return tuple(sorted(names, key=lambda name: order.index(name) if name in order else 0))


def current_mesh() -> AbstractMesh:
    """The mesh that `shard_map` or `jax.set_mesh` has entered; an empty one where there is none."""
    return jax.sharding.get_abstract_mesh()


def axes_of_type(x: Array) -> Axes:
    """The Auto and Explicit mesh axes that the type of x says it is split over."""
    return tuple(axis for entry in jax.typeof(x).sharding.spec for axis in axes_of_entry(entry))


def mesh_of(*operands: PyTree) -> AbstractMesh:
    """The mesh of the context, or the one that the operands' types name. Under vmap only the context leaves out the
    axes over which the mapped dimension is split."""
    context = jax.sharding.get_abstract_mesh()
    named = (mesh for x in jax.tree.leaves(operands) if not (mesh := jax.typeof(x).sharding.mesh).empty)
    return context if not context.empty else next(named, context)


def may_be_split(x: Array) -> bool:
    """Whether x, or what XLA makes of it, may be split over devices that no shard_map has mapped."""
    mesh = mesh_of(x)
    return any(mesh.shape[axis] > 1 for axis in mesh.axis_names if axis not in mesh.manual_axes)


def result_type(shape: Sequence[int], dtype: jax.typing.DTypeLike, *operands: Array):
    """The abstract value of a result that depends on all operands.

    Inside `shard_map` it varies over every mesh axis that any operand varies over. A plain `ShapeDtypeStruct` would
    drop these axes silently: wrong `out_specs` then pass the check, and `custom_vjp` rejects the gradients.
    """
    first = jax.typeof(operands[0])
    return first.update(
        shape=tuple(shape),
        dtype=np.dtype(dtype),
        weak_type=False,
        sharding=first.sharding.update(spec=PartitionSpec(*(None,) * len(shape))),
        manual_axis_type=first.manual_axis_type.update(varying=varying_axes(*operands)),
    )


def validate_not_a_partial_sum(name: str, x: Array) -> None:
    """Checks that the type of x leaves no sum over devices to others, of the array or of its gradient.

    Raises:
      ValueError: it does. Inside shard_map JAX sums gradients of what is "reduced".
    """
    type_ = jax.typeof(x)
    if axes := sorted(type_.manual_axis_type.unreduced):
        raise ValueError(f"{name} is unreduced over {axes}, a part of a sum on each device: sum it first, by lax.psum")
    spec = type_.sharding.spec
    if axes := sorted(spec.unreduced | spec.reduced):
        kind = "unreduced" if spec.unreduced else "reduced"
        raise ValueError(
            f"{name} is {kind} over {axes}, for which te_jax has no rules: pass it through jax.reshard to a "
            "PartitionSpec without that"
        )


def validate_split(name: str, x: PyTree, axes: Sequence[str], remedy: str, argument: str = "axis_name") -> None:
    """Checks that x is split over mesh axes, where JAX tracks that.

    Raises:
      ValueError: x is the same on all devices along one of them.
    """
    if axes and (same := sorted(tracked_axes(axes) - varying_axes(x))):
        raise ValueError(
            f"{name} is the same on all devices along {same}, and {argument} says that it is split: {remedy}"
        )
