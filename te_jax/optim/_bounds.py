"""Bounds of moments, with the names of axes that Flax keeps beside a parameter.

A dimension of bounds has one element for 128 of the parameter's, so that the devices among which Flax splits the
parameter need not divide it. Then the bounds' box must not name that dimension: Flax and `jit` would refuse it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from te_jax._core.types import PyTree
from te_jax.sharding import axes_of_entry, blocks

_Entry = str | tuple[str, ...] | None
_NNX_NAMES = ("out_sharding", "optimizer_sharding")


def zeros(params: PyTree) -> PyTree:
    """float32 zeros, one for each block of a parameter, of the structure of `params`.

    They are split as their parameters where the devices divide the blocks. Boxes with names of axes need a mesh for
    this: that of the box, of the array, or of the context. Without one the last dimension is whole.
    """
    return jax.tree.map(_of_box, params, is_leaf=_is_box)


def _is_box(x: object) -> bool:
    return _is_variable(x) or hasattr(x, "replace_boxed")  # a flax.core.meta.AxisMetadata


def _is_variable(x: object) -> bool:
    return hasattr(x, "set_metadata")  # an nnx.Variable


def _of_box(param: Any) -> Any:
    bounds = jax.tree.map(blocks.zeros, param)
    if not _is_box(param) or len(leaves := jax.tree.leaves(param)) != 1:
        return bounds
    (value,), (of_blocks,) = leaves, jax.tree.leaves(bounds)
    if not of_blocks.ndim:
        return bounds
    if _is_variable(param):
        metadata = param.get_metadata()
        mesh = metadata.get("mesh")
        for key in _NNX_NAMES:
            if names := metadata.get(key):
                names_of_bounds = _names(names, of_blocks.shape, mesh or _mesh(names) or _mesh_of(value), metadata)
                bounds.set_metadata(**{key: names_of_bounds})
    elif getattr(param, "names", None):
        mesh = getattr(param, "mesh", None) or _mesh_of(value)
        bounds = bounds.replace(names=_names(param.names, of_blocks.shape, mesh, vars(param)))
    return bounds


def _mesh(names: object) -> Mesh | AbstractMesh | None:
    return names.mesh if isinstance(names, NamedSharding) else None


def _mesh_of(value: object) -> Mesh | AbstractMesh | None:
    sharding = getattr(value, "sharding", None)
    if isinstance(sharding, NamedSharding) and not sharding.mesh.empty:
        return sharding.mesh
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def _names(names: Any, shape: tuple[int, ...], mesh: Mesh | AbstractMesh | None, metadata: Mapping[str, Any]) -> Any:
    """Names of the bounds' axes: those of the parameter, without the last unless the mesh divides the blocks."""
    entries = tuple(names.spec) if isinstance(names, NamedSharding) else tuple(names)
    if len(entries) < len(shape) or entries[-1] is None:
        return names
    axes = axes_of_entry(_on_mesh(entries[-1], metadata))
    sizes = {} if mesh is None else mesh.shape
    if all(axis in sizes for axis in axes) and shape[-1] % math.prod(sizes[axis] for axis in axes) == 0:
        return names
    entries = (*entries[:-1], None)
    if isinstance(names, NamedSharding):
        return NamedSharding(names.mesh, PartitionSpec(*entries))
    return PartitionSpec(*entries) if isinstance(names, PartitionSpec) else entries


def _on_mesh(entry: _Entry, metadata: Mapping[str, Any]) -> _Entry:
    """The axes of the mesh that a rule of Flax gives to a logical axis."""
    from flax.core import spmd  # there is a box of Flax

    rules = [*(metadata.get("sharding_rules") or metadata.get("rules") or ()), *spmd.get_logical_axis_rules()]
    return next((on_mesh for name, on_mesh in rules if name == entry), entry)
