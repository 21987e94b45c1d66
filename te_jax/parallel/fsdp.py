"""Parameters of which every device has a part, and which are gathered for the layer that reads them.

What travels is as small as what is computed with. Kernels that `quantize` names are quantized by the device that has
the part, once a step, and gathered in FP8: one byte for a parameter, in the forward pass and again in the backward
pass. Gradients leave their products in `reduce_dtype`, and each device gets the sum of its part.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from te_jax._core.arguments import as_dtype, is_whole_number
from te_jax._core.types import BLOCK, FLOAT_NAMES, FLOATS, PyTree, T
from te_jax.ops.linear.kernels import Requantize
from te_jax.quantized import QuantizedArray, facts_of
from te_jax.recipe import DelayedScalingState, Scaling
from te_jax.sharding import axes_of_entry

Parameter = Array | QuantizedArray | DelayedScalingState
_Entries = tuple[str | tuple[str, ...] | None, ...]


@dataclasses.dataclass(frozen=True)
class FSDP:
    """Fully sharded data parallelism (ZeRO-3): devices share the batch, and the parameters too.

    `te_jax.layers.apply_layers` runs a stack of layers with it: it gathers the parameters of a layer beside the one
    before, and drops them after it; the backward pass gathers them again, and sums gradients beside the next layer.

    Args:
      size: number N of devices along `axis_name`.
      axis_name: the mesh axis that splits parameters and the batch.
      replica_axis: a mesh axis that splits the batch only (HSDP): its devices have the same parts of parameters, whose
        gradients they sum once a step.
      quantize: which kernels of a layer are gathered in FP8: a pytree of the structure of its parameters, or the
        beginning of it, with a `te_jax.optim.Requantize` for these and None elsewhere; or a list with one for each
        layer. The layer gets a `te_jax.quantized.QuantizedArray`, which te_jax's layers take as they take the kernel.
      gather_dtype: in which the other parameters of two and more dimensions travel; None for the dtype of x.
      reduce_dtype: in which gradients of parameters of two and more dimensions travel, also between replicas if devices
        split them. Each device adds them to float32 parameters in float32.
      keep: for how many of the last layers the gathered parameters wait for the backward pass, which gathers those of
        the others again. As many as there are layers gathers once and holds all.
      prefetch_bytes: of gathered parameters that are on their way beside a layer; one layer's at least.
      min_size: values; smaller parameters are whole on each device, and their gradients are summed once a step.
      specs: the PartitionSpecs of a layer's parameters, where `apply_layers` is called inside of `jax.shard_map`; or a
        list with those of each layer. None stands for what the layer reads as this device has it, such as experts of
        its own. Elsewhere they are those of `shard_specs`.

    Raises:
      ValueError: an argument is out of range.

    Examples:
      >>> import jax, jax.numpy as jnp, te_jax
      >>> from jax.sharding import NamedSharding
      >>> mesh = jax.make_mesh((1,), ("fsdp",))
      >>> fsdp = te_jax.parallel.FSDP(size=1)
      >>> layers = [{"kernel": jnp.eye(256)}, {"kernel": 2 * jnp.eye(256)}]
      >>> specs = te_jax.parallel.shard_specs(layers, fsdp)
      >>> layers = jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), layers, specs)
      >>> def loss(layers, x):
      ...     return te_jax.layers.apply_layers(lambda x, p: x @ p["kernel"], layers, x, remat=True, fsdp=fsdp).sum()
      >>> with jax.set_mesh(mesh):
      ...     jax.jit(jax.grad(loss))(layers, jnp.ones((8, 256)))[0]["kernel"].shape
      (256, 256)
    """

    size: int
    axis_name: str = "fsdp"
    replica_axis: str | None = None
    quantize: PyTree = None
    gather_dtype: DTypeLike | None = None
    reduce_dtype: DTypeLike = "bfloat16"
    keep: int = 1
    prefetch_bytes: int = 0
    min_size: int = 2**16
    specs: PyTree = None

    def __post_init__(self) -> None:
        for name, smallest in (("size", 1), ("keep", 0), ("prefetch_bytes", 0), ("min_size", 0)):
            value = getattr(self, name)
            if not is_whole_number(value) or value < smallest:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {smallest}")
        for name in ("axis_name", "replica_axis"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (value is None and name == "replica_axis"):
                raise ValueError(f"{name} is {value!r}; it must be the name of a mesh axis")
        if self.axis_name == self.replica_axis:
            raise ValueError(f"axis_name and replica_axis are both {self.axis_name!r}; name two axes")
        for name in ("gather_dtype", "reduce_dtype"):
            value = getattr(self, name)
            if value is not None or name == "reduce_dtype":
                object.__setattr__(self, name, as_dtype(f"{name} is", value, FLOATS, FLOAT_NAMES))

    def __hash__(self) -> int:
        # Equal values have equal leaves; trees may be of dicts, which have no hash.
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return hash(tuple(tuple(jax.tree.leaves(value)) for value in values))

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the batch."""
        return (self.axis_name,) if self.replica_axis is None else (self.replica_axis, self.axis_name)


def validate(fsdp: object) -> None:
    if not isinstance(fsdp, FSDP):
        raise ValueError(f"fsdp is {fsdp!r}: it must be a te_jax.parallel.FSDP")


def shard_specs(params: PyTree, fsdp: FSDP) -> PyTree:
    """How parameters lie on a mesh: each is split along its first dimension whose parts are whole blocks of 128.

    Blocks are what shares a scale in block scaling, so that every device quantizes its part alone. Where no dimension
    has them by itself, kernels of `fsdp.quantize` are split along the first of several dimensions that are rows or
    columns together, such as heads, or along those that stack kernels, such as experts. If these do not have whole
    blocks either, the first dimension that devices divide is split, and devices exchange the amaxes of blocks that they
    cut. Parameters of fewer than `fsdp.min_size` values are not split.

    Args:
      params: a pytree of arrays or `jax.ShapeDtypeStruct`. Of a QuantizedArray the spec is that of what it stands for.
        What lies on a mesh that other axes split, such as those of tensor parallelism, stays split by these.
      fsdp: the devices. `quantize` counts where `params` are those of a layer, or a list of these.

    Returns:
      A PartitionSpec for every array, in the same pytree.

    Raises:
      ValueError: devices divide no dimension of a parameter, and the message names numbers of devices that do; or they
        cut blocks of one that is in FP8 already.

    Examples:
      >>> import jax.numpy as jnp, te_jax
      >>> params = {"kernel": jnp.zeros((28672, 512)), "scale": jnp.zeros(512)}
      >>> te_jax.parallel.shard_specs(params, te_jax.parallel.FSDP(size=4))
      {'kernel': P('fsdp',), 'scale': P()}
      >>> te_jax.parallel.shard_specs({"kernel": jnp.zeros((28672, 8192))}, te_jax.parallel.FSDP(size=64))
      {'kernel': P(None, 'fsdp')}
    """

    validate(fsdp)
    is_list = isinstance(params, list | tuple) and not hasattr(params, "_fields")
    layers = params if is_list else [params]
    try:
        hows = itertools.chain(*for_each_layer("quantize", fsdp.quantize, layers, requantize_of))
    except ValueError:  # these are other parameters
        hows = itertools.repeat(None)

    def of(path: KeyPath, leaf: Any, how: Requantize | None) -> PartitionSpec:
        shape = () if isinstance(leaf, DelayedScalingState) else jnp.shape(leaf)
        entries, parts = _split_by_others(leaf, shape, fsdp.axis_name)
        if math.prod(shape) < max(fsdp.min_size, 1):
            return _spec(entries)
        split = split_dimension(parts, fsdp.size, how)
        if split is None:
            sizes = [str(size) for size in range(2, fsdp.size) if split_dimension(parts, size) is not None]
            left = "" if parts == shape else f", of which other axes leave {parts}"
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} has shape {shape}{left}, and size={fsdp.size} divides no "
                f"dimension of that; sizes that do: {', '.join(sizes) or 'none'}. Use one of these with replica_axis "
                "for the other devices, or min_size to leave it whole"
            )
        if isinstance(leaf, QuantizedArray) and cuts_blocks(leaf, split[0], parts[split[0]] // fsdp.size):
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} of shape {shape} is in FP8, and size={fsdp.size} cuts its blocks "
                f"of {BLOCK}: pass it unquantized, and name it in fsdp.quantize, or use a smaller size and replica_axis"
            )
        entries[split[0]] += (fsdp.axis_name,)
        return _spec(entries)

    leaves, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_parameter)
    return structure.unflatten([of(path, leaf, how) for (path, leaf), how in zip(leaves, hows, strict=False)])


def _split_by_others(
    leaf: object, shape: tuple[int, ...], axis_name: str
) -> tuple[list[tuple[str, ...]], tuple[int, ...]]:
    """The other mesh axes that split each dimension of an array, and the shape of its parts."""
    on = leaf.sharding if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and not isinstance(leaf, Tracer) else None
    if not isinstance(on, NamedSharding):
        return [()] * len(shape), shape
    spec = (*on.spec, *(None,) * (len(shape) - len(on.spec)))
    entries = [tuple(axis for axis in axes_of_entry(entry) if axis != axis_name) for entry in spec]
    devices = (math.prod(on.mesh.shape[axis] for axis in axes) for axes in entries)
    return entries, tuple(count // number for count, number in zip(shape, devices, strict=True))


def _spec(entries: Sequence[tuple[str, ...]]) -> PartitionSpec:
    """The PartitionSpec of mesh axes by dimension, without those at the end that have none."""
    last = max((dim + 1 for dim, axes in enumerate(entries) if axes), default=0)
    return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in entries[:last]))


def split_dimension(shape: Sequence[int], size: int, how: Requantize | None = None) -> tuple[int, bool] | None:
    """The dimension along which devices split a parameter, if they can, and whether its parts are whole blocks.

    Args:
      shape: of the parameter.
      size: number of devices.
      how: how it is quantized; None if it is not.
    """
    dividing = [dim for dim, count in enumerate(shape) if count and count % size == 0]
    whole = [dim for dim in dividing if shape[dim] // size % BLOCK == 0]
    if how is not None:
        cols = how.stacked_ndim + how.row_ndim
        # Heads and head_dim are one dimension of the matrix, in which parts along heads are contiguous.
        inner = {how.stacked_ndim: shape[how.stacked_ndim + 1 : cols], cols: shape[cols + 1 :]}
        inner |= dict.fromkeys(range(how.stacked_ndim), (BLOCK,))  # kernels have blocks of their own
        whole += [dim for dim in dividing if dim in inner and shape[dim] // size * math.prod(inner[dim]) % BLOCK == 0]
    return ((whole or dividing)[0], bool(whole)) if dividing else None


def cuts_blocks(kernel: QuantizedArray, dim: int, part: int) -> bool:
    """Whether shards of `part` values along `dim` divide 128 × 128 blocks of the kernel, which share a scale."""
    facts, last = facts_of(kernel.scaling), (kernel.ndim - kernel.col_ndim - 1, kernel.ndim - 1)
    return facts.in_blocks and facts.is_symmetric and dim in last and part % BLOCK != 0


def is_parameter(leaf: object) -> bool:
    return isinstance(leaf, QuantizedArray | DelayedScalingState)


def for_each_layer(
    name: str, value: PyTree, params: Sequence[PyTree], spread: Callable[[PyTree, PyTree], list[T]]
) -> list[list[T]]:
    """An entry for each parameter of each layer, from that of all layers or a list with those of each."""
    try:
        return [spread(value, of_layer) for of_layer in params]
    except ValueError as error:
        if not isinstance(value, list | tuple) or len(value) != len(params):
            raise ValueError(
                f"fsdp.{name} fits no layer's parameters, and is no list with an entry for each of {len(params)} "
                f"layers: {error}"
            ) from None
    try:
        return [spread(entry, of_layer) for entry, of_layer in zip(value, params, strict=True)]
    except ValueError as error:
        raise ValueError(f"fsdp.{name} does not have the structure of a layer's parameters: {error}") from None


def requantize_of(quantize: PyTree, of_layer: PyTree) -> list[Requantize | None]:
    hows, structure = jax.tree.flatten(quantize, is_leaf=lambda x: x is None or isinstance(x, Requantize))
    for how in hows:
        if not (how is None or isinstance(how, Requantize)):
            raise ValueError(f"{how!r} is neither a te_jax.optim.Requantize nor None")
    try:
        parts = structure.flatten_up_to(of_layer)
    except ValueError:  # JAX's message holds the whole layer
        raise ValueError(_difference(quantize, of_layer)) from None
    counts = [len(jax.tree.leaves(part, is_leaf=is_parameter)) for part in parts]
    return [how for how, count in zip(hows, counts, strict=True) for _ in range(count)]


def _difference(quantize: PyTree, of_layer: PyTree) -> str:
    """Where entries of `quantize` and parameters of a layer do not meet."""
    is_entry = lambda x: x is None or isinstance(x, Requantize)  # noqa: E731
    entries = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(quantize, is_leaf=is_entry)]
    params = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(of_layer, is_leaf=is_parameter)]
    surplus = [entry for entry in entries if not any(param.startswith(entry) for param in params)]
    missing = [param for param in params if not any(param.startswith(entry) for entry in entries)]
    if surplus:
        return f"it has {surplus}, which the layer lacks"
    if missing:
        return f"it has nothing for the layer's {missing}"
    return "their containers differ, such as nnx.Param and QuantizedKernel; leave out kernels that are quantized"


def quantized_specs(x: QuantizedArray, spec: PartitionSpec) -> QuantizedArray:
    """The specs of all arrays of a kernel [*stacked, *rows, *cols], from that of the kernel."""
    entries = (*spec, *(None,) * (x.ndim - len(spec)))
    count = x.ndim - x.row_ndim - x.col_ndim
    stacked, rows, cols = entries[:count], entries[count : count + x.row_ndim], entries[count + x.row_ndim :]

    def scales(scale_inv: Array | None, scaling: Scaling, outer: _Entries, summed: _Entries) -> PartitionSpec | None:
        return None if scale_inv is None else PartitionSpec(*stacked, *facts_of(scaling).of_scales(outer, summed))

    return dataclasses.replace(
        x,
        data=None if x.data is None else PartitionSpec(*stacked, *rows, *cols),
        scale_inv=scales(x.scale_inv, x.scaling, rows, cols),
        transposed=None if x.transposed is None else PartitionSpec(*stacked, *cols, *rows),
        transposed_scale_inv=scales(x.transposed_scale_inv, x.transposed_scaling, cols, rows),
        straight_through=None if x.straight_through is None else PartitionSpec(*stacked, *rows, *cols),
    )


def spread_specs(specs: PyTree, params: PyTree) -> PyTree:
    """A PartitionSpec for every array, from those of parameters that may be quantized or states of delayed scaling."""

    def of(leaf: Parameter, spec: PartitionSpec) -> PyTree:
        if isinstance(leaf, DelayedScalingState):
            return jax.tree.map(lambda _: PartitionSpec(), leaf)
        return quantized_specs(leaf, spec) if isinstance(leaf, QuantizedArray) else spec

    return jax.tree.map(of, params, specs, is_leaf=is_parameter)
