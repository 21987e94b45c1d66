"""FP8 data with its scales, as one pytree that stands for an array, and the facts of each scaling."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, export
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from te_jax._core.derivatives import without_gradient
from te_jax._core.types import BLOCK, E8M0, MX_BLOCK, T
from te_jax.recipe import Recipe, Scaling
from te_jax.sharding import INLINE, blocks

__all__ = ["QuantizedArray", "scale_shape"]


_NO_GRADIENT = (
    "the values of a QuantizedArray with straight_through are read by dequantize() and differentiated: its gradient is "
    "that of the layer which takes it; pass it to a layer, or wrap dequantize() in jax.lax.stop_gradient"
)
_DATA = ("data", "scale_inv", "transposed", "transposed_scale_inv", "straight_through")
_META = ("row_ndim", "col_ndim", "scaling", "transposed_scaling", "dtype")
_FLOAT32 = np.dtype(np.float32)
SCALINGS: tuple[Scaling, ...] = get_args(Scaling)
OWN_KERNELS = (9, 0)
"""CUDA compute capability of the package's own kernels of products, which no other has."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """How a copy [*outer, *summed] is scaled, and products whose lhs it is. Hashable.

    Attributes:
      name: None for a plain array.
      product: the scaling of both operands of a product, as native calls know it.
      rhs_name: the scaling of rhs where lhs has this one; None for plain arrays, and where lhs cannot have it.
      outer_block, summed_block: how many values of the last outer and of the last summed dimension share a scale; None
        where all outer, or all summed, values do.
      summed_first: whether scales lie [*summed, *outer].
      dtype: of the scales.
      native: CUDA compute capability that native products need; None where no native kernel quantizes or multiplies.
      xla: compute capability of the first GPUs for which XLA compiles a product; None where it has none.
      native_blocks: whether native kernels quantize in blocks, and the package's own kernel multiplies, several
        products in one pass; cuBLASLt never does.
      row_multiple: native products need a multiple of so many rows of lhs, whose scales a kernel reads at a time.
    """

    name: Scaling | None
    product: Literal["none", "tensor", "row", "block", "mx"]
    rhs_name: Scaling | None = None
    outer_block: int | None = None
    summed_block: int | None = None
    summed_first: bool = False
    dtype: np.dtype = _FLOAT32
    native: tuple[int, int] | None = OWN_KERNELS
    xla: tuple[int, int] | None = None
    native_blocks: bool = False
    row_multiple: int = 1

    @property
    def rhs(self) -> Facts:
        return facts_of(self.rhs_name)

    @property
    def is_plain(self) -> bool:
        return self.name is None

    @property
    def by_tensor(self) -> bool:
        return self.name is not None and self.outer_block is None

    @property
    def by_row(self) -> bool:
        return self.outer_block is not None and self.summed_block is None

    @property
    def in_blocks(self) -> bool:
        return self.summed_block is not None

    @property
    def has_several_scales(self) -> bool:
        return self.outer_block is not None

    @property
    def rows_travel(self) -> bool:
        """Whether each row has float32 scales of its own, so that it can be sent alone."""
        return self.outer_block == 1 and self.dtype == _FLOAT32

    @property
    def is_symmetric(self) -> bool:
        """Whether both copies of an array have the same scales, if both are scaled like this."""
        return self.name is not None and self.outer_block == self.summed_block

    @property
    def block_size(self) -> int:
        """How many values along a dimension share a scale of blocks; 1 without blocks."""
        return self.summed_block or 1

    def of_scales(self, outer: tuple[T, ...], summed: tuple[T, ...]) -> tuple[T, ...]:
        """Selects what belongs to the dimensions of scales, in their order, of what belongs to those of the copy."""
        outer = () if self.outer_block is None else outer
        summed = () if self.summed_block is None else summed
        return summed + outer if self.summed_first else outer + summed


_FACTS: dict[Scaling | None, Facts] = {
    facts.name: facts
    for facts in (
        Facts(None, "none"),
        Facts("tensor", "tensor", "tensor", native=(8, 9), xla=(8, 9)),
        Facts("row", "row", "row", 1),
        Facts("block_1x32", "mx", "block_1x32", 1, MX_BLOCK, dtype=E8M0, native=None, xla=(10, 0)),
        Facts("block_1x128", "block", "block_128x128", 1, BLOCK, summed_first=True, native_blocks=True, row_multiple=4),
        Facts("block_128x128", "block", None, BLOCK, BLOCK, native_blocks=True, row_multiple=4),
    )
}
PLAIN = _FACTS[None]


def facts_of(name: Scaling | None) -> Facts:
    """The facts of a scaling, or of plain arrays."""
    return _FACTS[name]


def facts_of_recipe(recipe: Recipe | None) -> Facts:
    """The facts of activations as forward products read them, which are those of a layer's products; None is plain."""
    return PLAIN if recipe is None else _FACTS[recipe.scalings["activation"][0]]


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


Quantizable = Array | QuantizedArray
"""An array that may be quantized."""


def _serialize_meta(meta: tuple[Any, ...]) -> bytes:
    *others, dtype = meta
    return json.dumps([*others, np.dtype(dtype).name]).encode()


def _deserialize_meta(serialized: bytes | bytearray) -> tuple[object, ...]:
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

    def blocks(sizes: tuple[int, ...], size: int | None) -> tuple[int, ...]:
        return sizes if size in (None, 1) else (*sizes[:-1], -(-sizes[-1] // size))

    facts = facts_of(scaling)
    return facts.of_scales(blocks(outer, facts.outer_block), blocks(summed, facts.summed_block))


def one_copy(
    values: Array, scale_inv: Array | None, facts: Facts, outer_ndim=1, summed_ndim=1, *, transposed: bool = False
) -> QuantizedArray:
    """A copy [*outer, *summed] alone, of an array in float32."""
    assert facts.name is not None
    copies = (None, None, values, scale_inv) if transposed else (values, scale_inv, None, None)
    return QuantizedArray(*copies, outer_ndim, summed_ndim, facts.name, facts.name, _FLOAT32)


def both_copies(x: QuantizedArray) -> QuantizedArray:
    """A matrix in blocks of 128 × 128, or a stack of them, with both copies: codes and scales of one, turned."""

    def turned(codes: Array | None, other: Array | None) -> Array | None:
        return codes if other is None else jnp.swapaxes(other, -1, -2) if codes is None else codes

    data, scale_inv = turned(x.data, x.transposed), turned(x.scale_inv, x.transposed_scale_inv)
    transposed, of_transposed = turned(x.transposed, x.data), turned(x.transposed_scale_inv, x.scale_inv)
    return dataclasses.replace(
        x, data=data, scale_inv=scale_inv, transposed=transposed, transposed_scale_inv=of_transposed
    )


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
    value = _dequantize(x.transposed, x.transposed_scale_inv, x.transposed_scaling, x.col_ndim, x.row_ndim, x.dtype)
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
    facts = facts_of(scaling)
    if facts.by_tensor:
        return jnp.broadcast_to(scales, (*outer, *summed))
    if facts.by_row:
        return jnp.broadcast_to(scales.reshape(*outer, *(1,) * len(summed)), (*outer, *summed))
    if facts.summed_first:
        scales = jnp.moveaxis(scales, range(len(summed)), range(len(outer), len(outer) + len(summed)))
    if facts.outer_block != 1:
        scales = _repeated(scales, len(outer) - 1, outer[-1], facts.block_size)
    return _repeated(scales, scales.ndim - 1, summed[-1], facts.block_size)


def _repeated(scales: Array, axis: int, length: int, block: int) -> Array:
    """Each scale for all values of its block: as `jnp.repeat`, which does not know what to do on Explicit meshes."""
    shape = (*scales.shape[: axis + 1], blocks.size_of(length, block), *scales.shape[axis + 1 :])
    repeated = jnp.broadcast_to(jnp.expand_dims(scales, axis + 1), shape)
    return blocks.merge(repeated, (*scales.shape[:axis], length, *scales.shape[axis + 1 :]), [axis])
