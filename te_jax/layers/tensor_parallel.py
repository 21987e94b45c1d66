"""A mesh axis whose devices share layers: tensor parallel, with sequence parallelism in between.

Between layers a device has a part of the time, inside them a part of the heads, hidden features or experts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array, lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from te_jax import sharding
from te_jax._core.types import FP8_ALIGNMENT, PyTree, T
from te_jax.layers.microbatches import AccumulatedKernel, dense_kernels
from te_jax.parallel.fsdp import quantized_specs
from te_jax.parallel.options import Residual, Transport
from te_jax.quantized import Quantizable, QuantizedArray, facts_of
from te_jax.recipe import Recipe
from te_jax.sharding import axes_of_entry


def validate(tensor_axis: object, state_axis: object = None) -> None:
    """Checks the arguments of a module.

    Raises:
      ValueError: tensor_axis is no name, or there is a state_axis as well.
    """
    if tensor_axis is not None and not isinstance(tensor_axis, str):
        raise ValueError(f"tensor_axis is {tensor_axis!r}; it must be the name of a mesh axis, or None")
    if tensor_axis is not None and state_axis is not None:
        raise ValueError(
            f"state_axis is {state_axis!r} and tensor_axis {tensor_axis!r}, whose shard_map tracks over which axes a "
            "state is the same: leave state_axis out"
        )


def validate_sizes(axes: sharding.AxisName | None, recipe: Recipe | None = None, **sizes: int) -> None:
    """Checks that the devices along mesh axes can have equal parts, where a mesh is known.

    Args:
      axes: one or several; None for none.
      recipe: of GEMMs with as many features, in FP8 multiples of 16 on each device.
      sizes: numbers of features, heads or experts, by the argument that says them.

    Raises:
      ValueError: they cannot; the message names what fits.
    """
    shape = sharding.current_mesh().shape
    devices = math.prod(shape.get(axis, 1) for axis in axes_of_entry(axes))
    unit = 1 if recipe is None else FP8_ALIGNMENT
    for name, count in sizes.items():
        if count % (devices * unit) and devices > 1:
            fitting = [parts for parts in range(1, count + 1) if count % (parts * unit) == 0]
            each = "" if recipe is None else f" into multiples of {unit}, which FP8 products need"
            raise ValueError(
                f"{name} is {count}, which the {devices} devices along {axes!r} do not divide{each}: use a multiple of "
                f"{devices * unit}, or one of these numbers of devices: {fitting}"
            )


def splits_kv_heads(tensor_axis: str | None, num_kv_heads: int) -> bool:
    """Whether devices split heads of key and value; where there is no mesh yet: that they will."""
    return num_kv_heads % sharding.current_mesh().shape.get(tensor_axis, 1) == 0


def refuse_decoding(tensor_axis: str | None) -> None:
    """Raises ValueError with a tensor_axis, in a call with decode=True."""
    if tensor_axis is not None:
        raise ValueError(
            f"decode is True and tensor_axis {tensor_axis!r}, whose devices split the time, but tokens come one by "
            "one: decode with a module without tensor_axis, which takes the same parameters, split or not"
        )


@dataclasses.dataclass(frozen=True)
class TensorAxis:
    """The axis in the place where a layer is called.

    Attributes:
      name: of the axis.
      size: number of devices along it.
      mesh: over which arrays here are whole. None inside a `shard_map` that has mapped the axis: arrays, and kernels
        too, are this device's parts.
      transport, residual: see `te_jax.parallel.all_gather_matmul`.
    """

    name: str
    size: int
    mesh: AbstractMesh | None
    transport: Transport = "auto"
    residual: Residual = "gathered"

    @classmethod
    def of(cls, tensor_axis: str | None) -> TensorAxis | None:
        """The axis of that name; None for None.

        Raises:
          ValueError: there is none.
        """
        if tensor_axis is None:
            return None
        mesh = sharding.current_mesh()
        if tensor_axis not in mesh.axis_names:
            raise ValueError(
                f"tensor_axis is {tensor_axis!r}, and the mesh here has the axes {mesh.axis_names}: call the module in "
                "jax.set_mesh(mesh), or inside shard_map, with a mesh that has this axis"
            )
        size = mesh.shape[tensor_axis]
        if not mesh.manual_axes:
            return cls(tensor_axis, size, mesh)
        if tensor_axis not in mesh.manual_axes:
            raise ValueError(
                f"tensor_axis is {tensor_axis!r} inside a shard_map over {sorted(mesh.manual_axes)}: let that map this "
                "axis as well, or call the module outside"
            )
        if not sharding.tracked_axes((tensor_axis,)):
            raise ValueError(
                f"tensor_axis is {tensor_axis!r} where JAX does not track what varies over devices, and gradients of "
                "what they share would not be summed: use shard_map with check_vma=True, its default"
            )
        return cls(tensor_axis, size, None)

    def here(self, count: int) -> int:
        """How many of a layer's features or heads the arrays in this place have."""
        return count if self.mesh is not None else count // self.size

    def rows(self, x: Quantizable) -> int:
        """The time that a device has of x [*batch, time, features].

        Raises:
          ValueError: devices cannot split it.
        """
        if x.ndim < 2:
            raise ValueError(f"x has shape {x.shape}; with tensor_axis it must be [*batch, time, features]")
        if self.mesh is None:
            return x.shape[-2]
        if x.shape[-2] % self.size:
            raise ValueError(
                f"x has shape {x.shape}, a time of {x.shape[-2]}, which the {self.size} devices along tensor_axis "
                f"{self.name!r} do not divide: pad it to a multiple of {self.size}"
            )
        return x.shape[-2] // self.size

    def batch_axes(self, x: Quantizable) -> sharding.Axes:
        """The mesh axes that split the first dimension of x, the batch.

        Explicit axes do where the type of x says so. Auto axes do where their devices divide it: what XLA does with
        them is not known here.
        """
        mesh, axes, left = self.mesh, (), x.shape[0]
        if mesh is None:
            return ()
        values = x.data if isinstance(x, QuantizedArray) else x
        known = axes_of_entry(jax.typeof(values).sharding.spec[0])
        for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True):
            free = axis != self.name and (axis in known or kind == AxisType.Auto) and mesh.shape[axis] > 1
            if free and left % mesh.shape[axis] == 0:
                axes, left = (*axes, axis), left // mesh.shape[axis]
        return axes

    def dense_kernels(self, kernels: Sequence[Quantizable | AccumulatedKernel], x: Quantizable) -> dict[str, Any]:
        """`te_jax.layers.dense_kernels` of layers that read x.

        Where devices have parts of the batch, gradients are summed over these before they are added to those of other
        microbatches: GEMMs could only add a device's own.
        """
        if self.batch_axes(x):
            kernels = [kernel.added() if isinstance(kernel, AccumulatedKernel) else kernel for kernel in kernels]
        return dense_kernels(kernels)

    def stream_spec(self, x: Quantizable) -> PartitionSpec:
        """The PartitionSpec of x [*batch, time, features], whose time is split.

        Raises:
          ValueError: devices cannot split it.
        """
        self.rows(x)
        batch = (self.batch_axes(x), *(None,) * (x.ndim - 3)) if x.ndim > 2 else ()
        return PartitionSpec(*(entry or None for entry in batch), self.name)

    def call(
        self, local: Callable[..., T], operands: tuple[PyTree, ...], in_specs: tuple[PyTree, ...], out_specs: PyTree
    ) -> T:
        """local(*operands) on every device.

        Args:
          local: a function of this device's parts, inside `shard_map`.
          operands: arrays, or QuantizedArrays; None stays None.
          in_specs, out_specs: PartitionSpecs of whole arrays, for operands in the same trees.
        """
        if self.mesh is None:
            return local(*operands)
        return sharding.shard_map(local, self.mesh, in_specs, out_specs)(*operands)

    def own_key(self, key: Array) -> Array:
        """Inside `shard_map`: a key for random numbers of this device, from one that all devices have."""
        return jax.random.fold_in(key, lax.axis_index(self.name))

    def specs(self, name: str, array: Any, spec: PartitionSpec) -> PyTree:
        """The specs of an array that may be quantized, from that of its values.

        Raises:
          ValueError: devices would have parts of blocks that share a scale.
        """
        if not isinstance(array, QuantizedArray):
            return spec
        entries = (*spec, *(None,) * (array.ndim - len(spec)))
        block = max(facts_of(scaling).block_size for scaling in (array.scaling, array.transposed_scaling))
        blocked = self.mesh is not None and block > 1
        # Blocks divide the last dimension of rows and of cols.
        for last in (array.ndim - array.col_ndim - 1, array.ndim - 1):
            if blocked and entries[last] == self.name and array.shape[last] % (self.size * block):
                raise ValueError(
                    f"{name} has shape {array.shape} and is quantized in blocks of {block}, of which the {self.size} "
                    f"devices along tensor_axis {self.name!r} cannot have whole ones: do not quantize it beforehand"
                )
        return quantized_specs(array, spec)
