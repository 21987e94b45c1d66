"""The parts of parameters that a device has inside of `jax.shard_map`, and what travels of them.

`prepare` quantizes the parts of kernels that `FSDP.quantize` names. `Shards` says what devices gather of a layer, and
what they sum of its gradients, and starts both together.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from te_jax import sharding
from te_jax._core.types import BLOCK, PyTree
from te_jax.ops.linear.arguments import whole_blocks, with_gradient_through
from te_jax.ops.linear.kernels import Requantize, quantize_kernel
from te_jax.parallel.fsdp import FSDP, Parameter, cuts_blocks, for_each_layer, is_parameter, requantize_of, validate
from te_jax.quantized import QuantizedArray, facts_of
from te_jax.recipe import DelayedScaling, DelayedScalingState
from te_jax.reference.quantize import SharedBlocks

# Before, XLA did not take a group for a collective, and had two under way at once.
_LAUNCHES_GROUPS = jax.__version_info__ >= (0, 11, 2)


@dataclasses.dataclass(frozen=True, eq=False)
class Shards:
    """The parameters of a stack of layers, of which this device has a part.

    Attributes:
      fsdp: the devices.
      dims: for each layer the dimension along which each leaf is split, or None, in a list; QuantizedArrays and states
        of delayed scaling are leaves.
      dtype: in which kernels travel that are not quantized; None for their own.
    """

    fsdp: FSDP
    dims: tuple[tuple[int | None, ...], ...]
    dtype: DTypeLike | None

    def gather(self, place: int, params: PyTree) -> PyTree:
        """The whole parameters of a layer."""
        return self.whole(place, params, self.launch(self.gathers(place, params, self.sent(place, params))))

    def sent(self, place: int, params: PyTree) -> PyTree:
        """A layer's parameters as devices send them."""
        return self._map(place, self._sent, params)

    def gathers(self, place: int, params: PyTree, sent: PyTree) -> PyTree:
        """What devices gather of a layer's parameters: `Operand`s of a launch, and what they have whole."""
        return self._map(place, self._gathers, params, sent)

    def whole(self, place: int, params: PyTree, gathered: PyTree) -> PyTree:
        """The whole parameters of a layer, from the results of `gathers`."""
        return self._map(place, self._whole, params, gathered)

    def sums(self, place: int, params: PyTree, gradients: PyTree) -> PyTree:
        """What devices sum of a layer's gradients: `Operand`s of a launch."""
        return self._map(place, self._sums, params, gradients)

    def scattered(self, place: int, params: PyTree, gradients: PyTree, sums: PyTree) -> PyTree:
        """The gradients of this device's part, from the results of `sums`. None stays None."""
        return self._map(place, self._scattered, params, gradients, sums)

    def scatter(self, place: int, params: PyTree, gradients: PyTree) -> PyTree:
        """The sums of gradients over devices, of this device's part. None stays None."""
        return self.scattered(place, params, gradients, self.launch(self.sums(place, params, gradients)))

    def launch(self, operands: PyTree) -> PyTree:
        """A tree with the results of its `Operand`s, whose collectives NCCL starts as one.

        There is one to wait for, and to hide. They need no common buffer, whose parts would be copied on arrival.
        """
        leaves, structure = jax.tree.flatten(operands)
        each = [leaf for leaf in leaves if isinstance(leaf, Operand)]
        kinds = tuple((operand.gathers, operand.dim) for operand in each)
        arguments = self.fsdp.axis_name, kinds, [operand.array for operand in each]
        if _LAUNCHES_GROUPS and self.fsdp.size > 1 and len(each) > 1:
            with set_xla_metadata(_collectives_group="", inlineable="false"):
                results = iter(jax.jit(_collectives, static_argnums=(0, 1))(*arguments))
        else:
            results = iter(_collectives(*arguments))
        return structure.unflatten([next(results) if isinstance(leaf, Operand) else leaf for leaf in leaves])

    def ahead(self, place: int, params: PyTree) -> int:
        """How many layers' parameters are on their way beside a layer that has these."""
        sent = jax.eval_shape(lambda: self.sent(place, params))
        gathered = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(sent)) * self.fsdp.size
        return max(1, self.fsdp.prefetch_bytes // max(gathered, 1))

    def of_device(self, closed: ClosedJaxpr, params: PyTree, x: PyTree) -> ClosedJaxpr:
        """The program of a layer, which draws random numbers for this device's part of the batch."""
        leaves = jax.tree.leaves(params, is_leaf=is_parameter)
        states = jax.tree.leaves([leaf for leaf in leaves if isinstance(leaf, DelayedScalingState)])
        return sharding.of_this_device(closed, jax.tree.leaves((params, x)), self.fsdp.batch_axes, states)

    def keeps(self, place: int) -> bool:
        """Whether the gathered parameters of a layer wait for the backward pass."""
        return place >= len(self.dims) - self.fsdp.keep

    def _map(self, place: int, function: Callable[..., PyTree], params: PyTree, *trees: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(params, is_leaf=is_parameter)
        trees = tuple(structure.flatten_up_to(tree) for tree in trees)
        return structure.unflatten([function(*each) for each in zip(self.dims[place], leaves, *trees, strict=True)])

    def _sent(self, dim: int | None, leaf: Any) -> PyTree:
        if dim is None:
            return leaf
        if isinstance(leaf, QuantizedArray):
            # The copy whose parts lie one after the other.
            by_rows = _splits_rows(leaf, dim)
            return (leaf.data, leaf.scale_inv) if by_rows else (leaf.transposed, leaf.transposed_scale_inv)
        return leaf.astype(self.dtype or leaf.dtype) if _is_kernel(leaf) else leaf

    def _gathers(self, dim: int | None, leaf: Parameter, sent: PyTree) -> PyTree:
        if dim is None:
            return sent
        if not isinstance(leaf, QuantizedArray):
            return Operand(sent, dim, gathers=True)
        axis = dim if _splits_rows(leaf, dim) else _to_transposed(leaf).index(dim)
        data, scale_inv = sent
        # Scales of tensors have the stacked dimensions alone; those of blocks that devices cut are whole.
        scales_split = axis < scale_inv.ndim and not cuts_blocks(leaf, dim, leaf.shape[dim])
        return (
            Operand(data, axis, gathers=True),
            Operand(scale_inv, axis, gathers=True) if scales_split else scale_inv,
        )

    def _whole(self, dim: int | None, leaf: Parameter, arrays: PyTree) -> PyTree:
        if dim is None or not isinstance(leaf, QuantizedArray):
            return arrays
        # The other copy is the transpose: `_validate_split` has made sure.
        split_rows, order = _splits_rows(leaf, dim), _to_transposed(leaf)
        order = order if split_rows else np.argsort(order)
        turned = tuple(x.transpose(order) if x.ndim == leaf.ndim else x for x in arrays)
        data, transposed = (arrays, turned) if split_rows else (turned, arrays)
        through = leaf.straight_through
        if through is not None:
            axes = sharding.varying_axes(through)
            through = sharding.varying_over(lax.empty(data[0].shape, self.fsdp.reduce_dtype), axes)
        return dataclasses.replace(
            leaf,
            data=data[0],
            scale_inv=data[1],
            transposed=transposed[0],
            transposed_scale_inv=transposed[1],
            straight_through=through,
        )

    def _sums(self, dim: int | None, leaf: Parameter, gradient: PyTree) -> Operand | None:
        if dim is None or gradient is None:
            return None
        of_parameter, gradient = _through(leaf), _through(gradient)
        if of_parameter is None or gradient is None:
            return None
        dtype = self.fsdp.reduce_dtype if _is_kernel(of_parameter) else jnp.float32
        return Operand(gradient.astype(dtype), dim, gathers=False)

    def _scattered(self, dim: int | None, leaf: Parameter, gradient: PyTree, total: Array | None) -> PyTree:
        if dim is None or gradient is None:
            return gradient
        of_parameter = _through(leaf)
        part = None if total is None or of_parameter is None else total.astype(of_parameter.dtype)
        if not isinstance(leaf, QuantizedArray):
            return part
        none = dict.fromkeys(("data", "scale_inv", "transposed", "transposed_scale_inv"))
        return dataclasses.replace(gradient, **none, straight_through=part)


def _through(leaf: Parameter) -> Array | None:
    """What the gradient of a parameter that devices share goes through."""
    assert not isinstance(leaf, DelayedScalingState)
    return leaf.straight_through if isinstance(leaf, QuantizedArray) else leaf


@dataclasses.dataclass(frozen=True)
class Operand:
    """What devices gather or sum.

    Attributes:
      array: this device's part, or its summand.
      dim: along which devices have parts.
      gathers: whether all get the whole array, or each its part of the sum.
    """

    array: Array
    dim: int
    gathers: bool


def _collectives(axis_name: str, kinds: Sequence[tuple[bool, int]], arrays: Sequence[Array]) -> list[Array]:
    gather = functools.partial(lax.all_gather, axis_name=axis_name, tiled=True)
    scatter = functools.partial(lax.psum_scatter, axis_name=axis_name, tiled=True)
    return [
        gather(x, axis=dim) if gathers else scatter(x, scatter_dimension=dim)
        for x, (gathers, dim) in zip(arrays, kinds, strict=True)
    ]


def _splits_rows(kernel: QuantizedArray, dim: int) -> bool:
    return dim < kernel.ndim - kernel.col_ndim


def _to_transposed(kernel: QuantizedArray) -> tuple[int, ...]:
    """The order of a kernel's dimensions in its transposed copy."""
    rows = kernel.ndim - kernel.col_ndim
    stacked = rows - kernel.row_ndim
    return (*range(stacked), *range(rows, kernel.ndim), *range(stacked, rows))


def _is_kernel(leaf: Array) -> bool:
    return leaf.ndim >= 2 and jnp.issubdtype(leaf.dtype, jnp.floating)


def prepare(fsdp: FSDP, params: Sequence[PyTree], x: PyTree) -> tuple[list[PyTree], Shards]:
    """The parameters of layers as they travel, kernels of `fsdp.quantize` in FP8, and how they are split.

    Args:
      fsdp: with specs.
      params: of each layer, this device's parts.
      x: what the layers get, this device's part of the batch.

    Raises:
      ValueError: this is no place for `fsdp`, or it does not fit the parameters.
    """
    _check_axes(fsdp)
    sharding.validate_split("x", x, fsdp.batch_axes, "pass this device's part of the batch", "fsdp")
    axes = sharding.varying_axes(x) | {fsdp.axis_name}
    specs = for_each_layer("specs", fsdp.specs, params, _specs_of)
    requantize = for_each_layer("quantize", fsdp.quantize, params, requantize_of)
    layers, dims = [], []
    for place, of_layer in enumerate(params):
        leaves, structure = jax.tree_util.tree_flatten_with_path(of_layer, is_leaf=is_parameter)
        prepared = [
            _prepared(fsdp, f"params[{place}]{jax.tree_util.keystr(path)}", leaf, spec, how, axes)
            for (path, leaf), spec, how in zip(leaves, specs[place], requantize[place], strict=True)
        ]
        layers.append(structure.unflatten([leaf for leaf, _ in prepared]))
        dims.append(tuple(dim for _, dim in prepared))
    dtype = fsdp.gather_dtype or _dtype_of(x)
    return layers, Shards(fsdp, tuple(dims), dtype)


def _dtype_of(x: PyTree) -> DTypeLike | None:
    floats = [leaf.dtype for leaf in jax.tree.leaves(x) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return floats[0] if floats else None


def _check_axes(fsdp: FSDP) -> None:
    _, size = sharding.mapped_axes(fsdp.axis_name, "fsdp.axis_name")
    if fsdp.replica_axis is not None:
        sharding.mapped_axes(fsdp.replica_axis, "fsdp.replica_axis")
    if size != fsdp.size:
        raise ValueError(
            f"fsdp.size is {fsdp.size}, and the mesh has {size} devices along {fsdp.axis_name!r}: pass size={size}, "
            "or enter another mesh"
        )
    if not sharding.tracked_axes(fsdp.batch_axes):
        raise ValueError(
            "fsdp is given where JAX does not track what varies over devices, in pmap or in shard_map with "
            "check_vma=False, and gradients of what they share would not be summed: use shard_map with check_vma=True, "
            "its default"
        )


def _specs_of(specs: PyTree, of_layer: PyTree) -> list[PartitionSpec | None]:
    leaf_specs = jax.tree.structure(of_layer, is_leaf=is_parameter).flatten_up_to(specs)
    for spec in leaf_specs:
        if not (spec is None or isinstance(spec, PartitionSpec)):
            raise ValueError(f"{spec!r} is no PartitionSpec; pass one for each parameter, as shard_specs returns them")
    return leaf_specs


def _prepared(
    fsdp: FSDP, name: str, leaf: Any, spec: PartitionSpec | None, how: Requantize | None, axes: frozenset[str]
) -> tuple[Any, int | None]:
    """The leaf as it travels, and the dimension along which it is split."""
    if isinstance(leaf, DelayedScalingState):
        return leaf, None
    entries = enumerate(spec or ())
    dim = next((dim for dim, entry in entries if fsdp.axis_name in sharding.axes_of_entry(entry)), None)
    differs = fsdp.axis_name in sharding.varying_axes(leaf)
    if spec is not None and differs != (dim is not None):
        here = "differs from device to device" if differs else "is the same on all devices"
        raise ValueError(
            f"{name} {here} along {fsdp.axis_name!r}, and fsdp.specs has {spec} for it: pass shard_map the same specs, "
            "or None for what the layer reads as this device has it"
        )
    if isinstance(leaf, QuantizedArray):
        if leaf.data is None or leaf.transposed is None:
            raise ValueError(
                f"{name} has one copy, and the backward pass reads the other: quantize it with copies='both'"
            )
        _validate_split(name, leaf, dim)
        if leaf.straight_through is not None:
            leaf = dataclasses.replace(leaf, straight_through=over_devices(fsdp, leaf.straight_through, axes))
        return leaf, dim
    leaf = jnp.asarray(leaf)
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf, dim
    leaf = over_devices(fsdp, leaf, axes)
    if how is not None and how.row_ndim >= leaf.ndim - how.stacked_ndim:
        raise ValueError(
            f"fsdp.quantize has row_ndim={how.row_ndim} and stacked_ndim={how.stacked_ndim} for {name} of shape "
            f"{leaf.shape}; rows and cols need a dimension each: use None for what is no kernel"
        )
    if how is None or dim is None:
        return leaf, dim
    if isinstance(how.recipe, DelayedScaling):
        raise ValueError(
            f"fsdp.quantize has {how.recipe!r} for {name}, whose state remembers the kernel's amax: choose None there, "
            "or another recipe"
        )
    group = "rows" if dim < how.stacked_ndim + how.row_ndim else "cols"
    shares_scale = facts_of(how.recipe.quantization("kernel").scaling).by_tensor and dim >= how.stacked_ndim
    cuts = _cuts_blocks(leaf.shape, dim, how)
    kernel = quantize_kernel(
        leaf,
        how.recipe,
        row_ndim=how.row_ndim,
        stacked_ndim=how.stacked_ndim,
        amax_axis={group: fsdp.axis_name} if shares_scale else None,
        shared_blocks=SharedBlocks(group, fsdp.axis_name) if cuts else None,
        straight_through=True,
        implementation=how.implementation,
    )
    if kernel.ndim != leaf.ndim:  # a group became one dimension
        starts = {0: 0, how.stacked_ndim: how.stacked_ndim}
        starts[how.stacked_ndim + how.row_ndim] = how.stacked_ndim + kernel.row_ndim
        if dim not in starts:
            raise ValueError(
                f"{name} of shape {leaf.shape} is split along dimension {dim}, and FP8 makes one dimension of those "
                "that are contracted, and one of the others: split it along the first of these"
            )
        dim = starts[dim]
    if not cuts:
        _validate_split(name, kernel, dim)
    return with_gradient_through(kernel), dim


def over_devices(fsdp: FSDP, x: Array, axes: frozenset[str]) -> Array:
    """x, varying over these mesh axes as well. Replicas sum gradients of the kernels that devices split in
    `reduce_dtype`."""
    varying = sharding.varying_axes(x)
    if _is_kernel(x) and fsdp.axis_name in varying and fsdp.replica_axis in axes - varying:
        x = _over_replicas(fsdp, sharding.varying_over(x, axes - {fsdp.replica_axis}))
    return sharding.varying_over(x, axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _over_replicas(fsdp: FSDP, x: Array) -> Array:
    return sharding.varying_over(x, frozenset(fsdp.batch_axes))


_over_replicas.defvjp(
    lambda fsdp, x: (_over_replicas(fsdp, x), None),
    # In a loop over microbatches, XLA adds up what replicas sum, and sums it once.
    lambda fsdp, _, dx: (lax.psum(dx.astype(fsdp.reduce_dtype), fsdp.replica_axis).astype(dx.dtype),),
)


def _cuts_blocks(shape: Sequence[int], dim: int, how: Requantize) -> bool:
    """Whether parts of this shape, along a dimension, cut blocks that both copies of a kernel have."""
    facts = facts_of(how.recipe.quantization("kernel").scaling)
    if not (facts.in_blocks and facts.is_symmetric and dim >= how.stacked_ndim):
        return False
    cols = how.stacked_ndim + how.row_ndim
    first, last = (how.stacked_ndim, cols) if dim < cols else (cols, len(shape))
    after = whole_blocks(tuple(shape[first:last]), BLOCK)
    return after[-1] % BLOCK != 0 and dim == (first if len(after) == 1 else last - 1)


def _validate_split(name: str, kernel: QuantizedArray, dim: int | None) -> None:
    scalings, facts = {kernel.scaling, kernel.transposed_scaling}, facts_of(kernel.scaling)
    same = len(scalings) == 1 and facts.is_symmetric
    if dim is None or (same and facts.by_tensor):
        return
    if not same:
        raise ValueError(
            f"{name} is quantized by {sorted(scalings)}: its two copies have scales of their own, and devices that "
            "have parts cannot agree on them. Leave it out of fsdp.quantize, or use BlockScaling or CurrentScaling"
        )
    if cuts_blocks(kernel, dim, kernel.shape[dim]):
        raise ValueError(
            f"{name} has shape {kernel.shape} on a device, and dimension {dim} cuts blocks of {BLOCK}: split another "
            "dimension, or over fewer devices with replica_axis for the others"
        )


def gather_params(fsdp: FSDP, params: PyTree, specs: PyTree) -> PyTree:
    """Whole parameters from the parts that devices have, inside of `jax.shard_map`: for what is in no stack of layers.

    The gradient is the sum over devices, of this device's part.

    Args:
      fsdp: the devices; `quantize` does not matter.
      params: a pytree of this device's parts.
      specs: the PartitionSpecs of the parameters.

    Returns:
      A pytree of whole parameters, those of two and more dimensions in `fsdp.gather_dtype`, or in their own dtype.

    Raises:
      ValueError: fsdp does not fit the mesh or the parameters.
    """
    validate(fsdp)
    fsdp = dataclasses.replace(fsdp, specs=specs, quantize=None)
    _check_axes(fsdp)
    here = jax.lax.axis_index(fsdp.batch_axes)
    (params,), shards = prepare(fsdp, [params], here)
    return _gathered(shards, params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(shards: Shards, params: PyTree) -> PyTree:
    return shards.gather(0, params)


_gathered.defvjp(
    lambda shards, params: (shards.gather(0, params), params),
    lambda shards, params, gradients: (shards.scatter(0, params, gradients),),
)
