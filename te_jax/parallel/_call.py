"""The static arguments of a collective product, and the devices that share it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from te_jax import native
from te_jax._arguments import mapped_axes
from te_jax.ops._gemm_product import FLOAT_NAMES, FLOATS
from te_jax.parallel._exchange import Exchange, Scaling
from te_jax.recipe import BLOCK, Product, Recipe

AxisName = str | tuple[str, ...]
TransportName = Literal["auto", "xla", "ring", "p2p"]
Residual = Literal["gathered", "shard"]

TRANSPORTS = ("auto", "xla", "ring", "p2p")
BLOCK_PRODUCT_ROWS = 4
"""Products of blocks want multiples of this many rows."""


class Group(NamedTuple):
    """The devices that communicate."""

    names: tuple[str, ...]
    size: int

    @classmethod
    def of(cls, axis_name: Any) -> Group:
        return cls(*mapped_axes(axis_name))


@dataclasses.dataclass(frozen=True)
class Call:
    """The static arguments, together: hashable.

    Attributes:
      leading: A, the product of the dimensions before the one that is gathered or scattered.
      rows: R, those of one device: its part of that dimension times the ones between it and the last.
      x_dtype: of x, or of what it stands for.
      out_dtype: of y.
    """

    name: str
    axis_name: tuple[str, ...]
    size: int
    leading: int
    rows: int
    recipe: Recipe | None
    transport: str
    bidirectional: bool
    residual: str
    gather_result: bool
    x_dtype: np.dtype
    out_dtype: np.dtype
    timeout: float
    native: bool

    @classmethod
    def of(
        cls, name: str, group: Group, x, leading: int, rows: int, recipe, transport, bidirectional, residual,
        gather_result, out_dtype, timeout, implementation,
    ) -> Call:  # fmt: skip
        if transport not in TRANSPORTS:
            raise ValueError(f"transport is {transport!r}; it must be one of {TRANSPORTS}")
        if residual not in ("gathered", "shard"):
            raise ValueError(f"residual is {residual!r}; it must be 'gathered' or 'shard'")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
            raise ValueError(f"timeout is {timeout!r}; it must be a positive number of seconds")
        dtype = np.dtype(x.dtype if out_dtype is None else out_dtype)
        if dtype not in FLOATS:
            raise ValueError(f"out_dtype is {dtype}; it must be {FLOAT_NAMES}")
        return cls(
            name, group.names, group.size, leading, rows, recipe, transport, bool(bidirectional), residual,
            bool(gather_result), np.dtype(x.dtype), dtype, float(timeout), native.use_native(implementation),
        )  # fmt: skip

    @property
    def implementation(self) -> native.Implementation:
        return "native" if self.native else "reference"

    @property
    def scaling(self) -> Scaling:
        """Of all operands of all products."""
        return "none" if self.recipe is None else scaling_of(self.recipe.scalings["activation"][0])

    @property
    def fp8(self) -> Recipe:
        assert self.recipe is not None
        return self.recipe

    def is_fast(self, product: Product) -> bool:
        return self.recipe is not None and product in self.recipe.fast_accumulation

    def exchange(self, product: Product) -> Exchange:
        return Exchange(
            self.axis_name,
            self.size,
            self.out_dtype if product == "forward" else self.x_dtype,
            self.is_fast(product),
            self.native,
            self.bidirectional,
            self.timeout,
            self.name,
            automatic=self.transport == "auto",
        )


def validate_rows_of_blocks(call: Call) -> None:
    """Where tokens of several shards are summed over, blocks of them must not reach over shards."""
    if call.scaling == "block" and call.leading * call.size > 1 and call.rows % BLOCK:
        raise ValueError(
            f"x has {call.rows} rows for each device; the gradient of w with block scaling needs a multiple of {BLOCK}:"
            " pad them, or use CurrentScaling or RowwiseScaling"
        )


def scaling_of(scaling: str) -> Scaling:
    return cast(Scaling, scaling.partition("_")[0])
