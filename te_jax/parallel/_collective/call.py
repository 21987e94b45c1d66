"""The static arguments of a collective product, and the devices that share it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from te_jax import native
from te_jax._core.arguments import as_flag
from te_jax._core.types import BLOCK
from te_jax.parallel.transports.exchange import Exchange, Scaling
from te_jax.recipe import Product, Recipe
from te_jax.sharding import mapped_axes

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """The static arguments, together: hashable.

    Attributes:
      name: of the public function, for messages.
      axis_name: the mesh axes of the devices, the first varying slowest.
      size: D, the number of devices along them.
      leading: A, the product of the dimensions before the one that is gathered or scattered.
      rows: R, those of one device: its part of that dimension times the ones between it and the last.
      recipe: how operands are quantized; None multiplies them as they are.
      transport: one of `TRANSPORTS`.
      bidirectional: rings send halves both ways.
      residual: what is kept of x for dw: the "gathered" operand, or this device's "shard" of it.
      gather_result: the gathered x is a result too.
      x_dtype: of x, or of what it stands for.
      out_dtype: of y.
      timeout: seconds after which "p2p" gives up on a device that does not arrive.
      native: FP8 products and quantization are te_jax's kernels, else the reference.
    """

    name: str
    axis_name: tuple[str, ...]
    size: int
    leading: int
    rows: int
    recipe: Recipe | None
    transport: TransportName
    bidirectional: bool
    residual: Residual
    gather_result: bool
    x_dtype: np.dtype
    out_dtype: np.dtype
    timeout: float
    native: bool

    def __post_init__(self):
        validate_options(self.transport, self.bidirectional, self.residual, self.timeout)
        as_flag("gather_result", self.gather_result)

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


def validate_options(transport: Any, bidirectional: Any, residual: Any, timeout: Any) -> None:
    """Of a collective product: those that say how its devices exchange what they compute.

    Raises:
      ValueError: one is not what `te_jax.parallel.all_gather_matmul` takes.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport is {transport!r}; it must be one of {TRANSPORTS}")
    as_flag("bidirectional", bidirectional)
    if residual not in ("gathered", "shard"):
        raise ValueError(f"residual is {residual!r}; it must be 'gathered' or 'shard'")
    is_number = isinstance(timeout, int | float | np.integer | np.floating) and not isinstance(timeout, bool)
    if not is_number or not 0 < timeout < math.inf:
        raise ValueError(f"timeout is {timeout!r}; it must be a positive number of seconds")


def validate_rows_of_blocks(call: Call) -> None:
    """Where tokens of several shards are summed over, blocks of them must not reach over shards."""
    if call.scaling == "block" and call.leading * call.size > 1 and call.rows % BLOCK:
        raise ValueError(
            f"x has {call.rows} rows for each device; the gradient of w with block scaling needs a multiple of {BLOCK}:"
            " pad them, or use CurrentScaling or RowwiseScaling"
        )


def scaling_of(scaling: str) -> Scaling:
    return cast(Scaling, scaling.partition("_")[0])
