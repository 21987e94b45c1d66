"""Which parameters are matrices, and which of their dimensions are rows and columns."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import Array
from optax.contrib import MuonDimensionNumbers

from te_jax import sharding
from te_jax._core.types import PyTree
from te_jax.optim._buckets import Packed

_NO_KERNEL = re.compile(
    r"(^|_)(bias|scale|sinks|norm|ln|(lm_?)?head|logits)(_?\d+)?$"  # at the end: a multi-head attention has kernels
    r"|(^|_)(embed|embedding|embedder|emb|wte|wpe|conv)(\d|_|$)"
)
_READS_HEADS = re.compile(r"(^|_)(out|o|o_proj)$")
_WRITES_HEADS = re.compile(r"(^|_)(query|key|value|[qkv]|[qkv]_proj)$")


def muon_dimension_numbers(params: PyTree) -> PyTree:
    """Which parameters Muon takes, and which of their dimensions are rows and columns: the default of `muon`.

    It goes by shapes and by names, in snake_case or CamelCase. Vectors, arrays without elements, and what is called
    embedding, head, norm, scale, bias or conv are for Adam. Kernels [..., in, out] are for Muon, with a stack of
    matrices in dimensions before these: layers of a scan, experts. Of kernels with heads [in, heads, head_dim], called
    query, key or value, the last two are one, and of [heads, head_dim, out], called out, the first two.

    Args:
      params: arrays, or `jax.ShapeDtypeStruct`.

    Returns:
      A tree of this structure: an `optax.contrib.MuonDimensionNumbers`, or None for Adam.

    Raises:
      ValueError: the parameters are packed by `Buckets`, and have no names.

    Examples:
      >>> import jax.numpy as jnp, te_jax.optim
      >>> params = {"up": {"kernel": jnp.ones((16, 32)), "bias": jnp.ones(32)}, "embedding": jnp.ones((99, 16))}
      >>> te_jax.optim.muon_dimension_numbers(params)["up"]["kernel"]
      MuonDimensionNumbers(reduction_axis=(0,), output_axis=(1,))
    """
    if any(isinstance(node, Packed) for node in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Packed))):
        raise ValueError(
            "params are packed by Buckets, whose leaves have no names: give dimension_numbers=buckets.pack of those of "
            "the tree that was packed, or pack what Adam takes alone"
        )
    return jax.tree.map_with_path(_of_name, params)


def _of_name(path: jax.tree_util.KeyPath, leaf: Array) -> MuonDimensionNumbers | None:
    words = [re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", word).lower() for word in _words(path)]
    if leaf.ndim < 2 or not math.prod(leaf.shape) or any(map(_NO_KERNEL.search, words)):
        return None
    has_heads = leaf.ndim > 2
    writes, reads = (has_heads and any(map(name.search, words[-2:])) for name in (_WRITES_HEADS, _READS_HEADS))
    axes = tuple(range(leaf.ndim))
    if writes:
        return MuonDimensionNumbers(axes[-3:-2], axes[-2:])
    return MuonDimensionNumbers(axes[-3:-1] if reads else axes[-2:-1], axes[-1:])


def _words(path: jax.tree_util.KeyPath) -> list[str]:
    if path and getattr(path[-1], "name", None) == "value":  # of a box of Flax
        path = path[:-1]
    keys = (getattr(entry, "key", getattr(entry, "name", None)) for entry in path)
    return [key for key in keys if isinstance(key, str)]


class Matrices(NamedTuple):
    """How a parameter is a stack of matrices: its dimensions in this order, grouped as [stack, rows, columns]."""

    shape: tuple[int, ...]
    stack: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def order(self) -> tuple[int, ...]:
        return (*self.stack, *self.rows, *self.columns)

    @property
    def sizes(self) -> list[tuple[int, ...]]:
        return [tuple(self.shape[i] for i in group) for group in (self.stack, self.rows, self.columns)]

    @property
    def folded_sizes(self) -> list[tuple[int, ...]]:
        return [(math.prod(group),) for group in self.sizes]

    def folded(self, x: Array) -> Array:
        """[count, rows, columns]."""
        return sharding.regrouped(x.transpose(self.order), self.sizes, self.folded_sizes)

    def unfolded(self, x: Array) -> Array:
        inverse = [self.order.index(i) for i in range(len(self.order))]
        return sharding.regrouped(x, self.folded_sizes, self.sizes).transpose(inverse)


def matrices_of(dimension_numbers: PyTree | Callable[[PyTree], PyTree], params: PyTree) -> list[Matrices]:
    """The matrices of each leaf, in order.

    Raises:
      ValueError: it is no matrix.
    """
    given = dimension_numbers(params) if callable(dimension_numbers) else dimension_numbers

    def of_leaf(numbers: MuonDimensionNumbers | None, x: Array) -> Matrices:
        if numbers is None:
            raise ValueError(
                f"dimension_numbers has None for a parameter of shape {x.shape}: Muon is for matrices, so label the "
                "others for another optimizer, as te_jax.optim.muon does"
            )
        groups = [(axes,) if isinstance(axes, int) else tuple(axes) for axes in numbers]
        named = [axis for group in groups for axis in group]
        if not all(groups) or not all(-x.ndim <= axis < x.ndim for axis in named):
            raise ValueError(f"dimension_numbers has {numbers} for a parameter of shape {x.shape}, which lacks some")
        rows, columns = (tuple(axis % x.ndim for axis in group) for group in groups)
        if len({*rows, *columns}) < len(named):
            raise ValueError(
                f"dimension_numbers has {numbers} for a parameter of shape {x.shape}: some are named twice"
            )
        stack = tuple(axis for axis in range(x.ndim) if axis not in (*rows, *columns))
        return Matrices(tuple(x.shape), stack, rows, columns)

    found: list[Matrices] = []
    jax.tree.map(
        lambda numbers, part: found.extend(of_leaf(numbers, x) for x in jax.tree.leaves(part)),
        given,
        params,
        is_leaf=is_numbers,
    )
    return found


def is_numbers(x: object) -> bool:
    return x is None or isinstance(x, MuonDimensionNumbers)
