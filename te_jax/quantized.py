"""FP8 data with its scales, as one pytree that stands for an array."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, export
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from te_jax._core.derivatives import without_gradient
from te_jax._core.types import BLOCK, E8M0, MX_BLOCK
from te_jax.recipe import Scaling
from te_jax.sharding import INLINE, blocks

__all__ = ["QuantizedArray", "scale_shape"]

_NO_GRADIENT = (
    "the values of a QuantizedArray with straight_through are read by dequantize() and differentiated: its gradient is "
    "that of the layer which takes it; pass it to a layer, or wrap dequantize() in jax.lax.stop_gradient"
)
_DATA = ("data", "scale_inv", "transposed", "transposed_scale_inv", "straight_through")
_META = ("row_ndim", "col_ndim", "scaling", "transposed_scaling", "dtype")


@functools.partial(jax.tree_util.register_dataclass, data_fields=_DATA, meta_fields=_META)
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class QuantizedArray:
    """An array [*rows, *cols] in FP8: as it is, transposed, or both. Value = FP8 value × scale_inv.

    It is a pytree of up to five arrays and passes through jit, scan, remat, donation, device_put, jax.export and
    checkpoints as any other. `np.asarray(q)` is `q.dequantize()`; `==` and `hash` are those of the object, not of its
    values.

    Attributes:
      data: FP8 [*rows, *cols], or None. Products sum over its cols.
      scale_inv: float32, or float8_e8m0fnu for "block_1x32" scaling, shaped as `scale_shape` says for outer = rows and
        summed = cols; None without data.
      transposed: FP8 [*cols, *rows], or None. Products sum over its rows.
      transposed_scale_inv: the same for outer = cols and summed = rows; None without transposed.
      row_ndim, col_ndim: number of dimensions in rows and in cols. Whatever comes before, from vmap or scan, is a
        batch.
      scaling, transposed_scaling: see `te_jax.recipe.Quantization`.
      dtype: of the array that it stands for.
      straight_through: zeros like the array that it stands for, or None: `te_jax.ops.dense` returns the gradient of the
        array as that of these. No product reads them, so that they take no memory under `jit`.
    """

    data: Array | None
    scale_inv: Array | None
    transposed: Array | None
    transposed_scale_inv: Array | None
    row_ndim: int
    col_ndim: int
    scaling: Scaling
    transposed_scaling: Scaling
    dtype: np.dtype
    straight_through: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array that it stands for."""
        if self.data is not None:
            return self.data.shape
        assert self.transposed is not None
        batch, cols, rows = _split(self.transposed.shape, self.col_ndim, self.row_ndim)
        return (*batch, *rows, *cols)

    @property
    def ndim(self) -> int:
        """Number of dimensions of the array that it stands for."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of values of the array that it stands for."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays that it holds: both copies, and their scales."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("a QuantizedArray holds no array of its values: NumPy cannot read it without a copy")
        return np.asarray(self.dequantize(), dtype)

    def __repr__(self) -> str:
        copies = (("data", self.data, self.scaling), ("transposed", self.transposed, self.transposed_scaling))
        held = [(name, x, scaling) for name, x, scaling in copies if x is not None]
        if not held or not all(hasattr(x, "shape") and hasattr(x, "dtype") for _, x, _ in held):
            # jax.tree.map may have put anything in the place of the arrays.
            names = _DATA if self.straight_through is not None else _DATA[:-1]
            return f"QuantizedArray({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"
        scalings = ", ".join(f"{name}: {scaling}" for name, _, scaling in held)
        through = "" if self.straight_through is None else ", straight_through"
        return f"QuantizedArray(shape={self.shape}, dtype={self.dtype}, format={held[0][1].dtype}, {scalings}{through})"

    def dequantize(self) -> Array:
        """The array [*rows, *cols] that it stands for, in `dtype`."""
        return _dequantized(self)

    def named(self, name: str) -> QuantizedArray:
        """The same with a `checkpoint_name` on every array, for remat and offload policies."""
        return jax.tree.map(lambda x: checkpoint_name(x, name), self)

    def without_data(self) -> QuantizedArray:
        """Only the transposed copy."""
        return dataclasses.replace(self, data=None, scale_inv=None)

    def without_transposed(self) -> QuantizedArray:
        """Only the copy as it is."""
        return dataclasses.replace(self, transposed=None, transposed_scale_inv=None)


def _serialize_meta(meta: Any) -> bytes:
    *others, dtype = meta
    return json.dumps([*others, np.dtype(dtype).name]).encode()


def _deserialize_meta(serialized: bytes | bytearray) -> tuple[Any, ...]:
    *others, dtype = json.loads(serialized)
    return (*others, jnp.dtype(dtype))


def _of_children(aux_data: Any, children: Sequence[Any]) -> QuantizedArray:
    # Programs that were exported before straight_through have no such child.
    return QuantizedArray(**dict(zip(_DATA, children, strict=False)), **dict(zip(_META, aux_data, strict=True)))


export.register_pytree_node_serialization(
    QuantizedArray,
    serialized_name="te_jax.quantized.QuantizedArray",
    serialize_auxdata=_serialize_meta,
    deserialize_auxdata=_deserialize_meta,
    from_children=_of_children,
)


def scale_shape(scaling: Scaling, outer: tuple[int, ...], summed: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a copy [*outer, *summed], in the order in which matrix products read them.

    Returns:
      tensor          ()
      row             [*outer]
      block_1x32      [*outer, *summed[:-1], ceil(summed[-1] / 32)]
      block_1x128     [*summed[:-1], ceil(summed[-1] / 128), *outer]
      block_128x128   [*outer[:-1], ceil(outer[-1] / 128), *summed[:-1], ceil(summed[-1] / 128)]
    """
    if scaling == "tensor":
        return ()
    if scaling == "row":
        return outer
    if scaling == "block_1x32":
        return (*outer, *summed[:-1], -(-summed[-1] // MX_BLOCK))
    if scaling == "block_1x128":
        return (*summed[:-1], -(-summed[-1] // BLOCK), *outer)
    return (*outer[:-1], -(-outer[-1] // BLOCK), *summed[:-1], -(-summed[-1] // BLOCK))


def scale_dtype(scaling: Scaling) -> np.dtype:
    """Dtype of the scales of a copy."""
    return E8M0 if scaling == "block_1x32" else np.dtype(np.float32)


def block_size(scaling: Scaling) -> int:
    """How many values along a dimension share a scale of blocks; 1 with scales of tensors and rows, which cut none."""
    if scaling == "block_1x32":
        return MX_BLOCK
    return BLOCK if scaling.startswith("block") else 1


def _split(shape: tuple[int, ...], outer_ndim: int, summed_ndim: int):
    batch = len(shape) - outer_ndim - summed_ndim
    return shape[:batch], shape[batch : batch + outer_ndim], shape[batch + outer_ndim :]


# One program where it is called eagerly.
@functools.partial(jax.jit, inline=INLINE)
def _dequantized(x: QuantizedArray) -> Array:
    if x.straight_through is not None:
        value = _dequantized(dataclasses.replace(x, straight_through=None))
        return without_gradient(value, x.straight_through, _NO_GRADIENT)
    if x.data is not None:
        return _dequantize(x.data, x.scale_inv, x.scaling, x.row_ndim, x.col_ndim, x.dtype)
    value = _dequantize(
        x.transposed,
        x.transposed_scale_inv,
        x.transposed_scaling,
        x.col_ndim,
        x.row_ndim,
        x.dtype,
    )
    batch = value.ndim - x.row_ndim - x.col_ndim
    order = [*range(batch), *range(batch + x.col_ndim, value.ndim), *range(batch, batch + x.col_ndim)]
    return value.transpose(order)


def _dequantize(data, scale_inv, scaling: Scaling, outer_ndim: int, summed_ndim: int, dtype: np.dtype) -> Array:
    batch, outer, summed = _split(data.shape, outer_ndim, summed_ndim)
    spread = functools.partial(_spread_scales, scaling=scaling, outer=outer, summed=summed)
    for _ in batch:
        spread = jax.vmap(spread)
    return (data.astype(jnp.float32) * spread(scale_inv.astype(jnp.float32))).astype(dtype)


def _spread_scales(scales: Array, *, scaling: Scaling, outer: tuple[int, ...], summed: tuple[int, ...]) -> Array:
    """The scale of every value of a copy [*outer, *summed]; broadcast where XLA can."""
    if scaling == "tensor":
        return jnp.broadcast_to(scales, (*outer, *summed))
    if scaling == "row":
        return jnp.broadcast_to(scales.reshape(*outer, *(1,) * len(summed)), (*outer, *summed))
    block = block_size(scaling)
    if scaling == "block_1x128":
        scales = jnp.moveaxis(scales, range(len(summed)), range(len(outer), len(outer) + len(summed)))
    elif scaling == "block_128x128":
        scales = _repeated(scales, len(outer) - 1, outer[-1], block)
    return _repeated(scales, scales.ndim - 1, summed[-1], block)


def _repeated(scales: Array, axis: int, length: int, block: int) -> Array:
    """Each scale for all values of its block: as `jnp.repeat`, which does not know what to do on Explicit meshes."""
    shape = (*scales.shape[: axis + 1], blocks.size_of(length, block), *scales.shape[axis + 1 :])
    repeated = jnp.broadcast_to(jnp.expand_dims(scales, axis + 1), shape)
    return blocks.merge(repeated, (*scales.shape[:axis], length, *scales.shape[axis + 1 :]), [axis])
