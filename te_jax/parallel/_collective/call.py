"""The static arguments of a collective product."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, cast

import numpy as np

from te_jax import native
from te_jax._core.arguments import as_flag
from te_jax._core.types import BLOCK
from te_jax.ops._fp8 import Fp8
from te_jax.ops._gemm_product import Scaling
from te_jax.recipe import Product, Recipe

TransportName = Literal["auto", "xla", "ring", "p2p"]
Residual = Literal["gathered", "shard"]

TRANSPORTS = ("auto", "xla", "ring", "p2p")
BLOCK_PRODUCT_ROWS = 4
"""Block-scaled GEMMs need a multiple of this many rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveSpec:
    """The static arguments of a collective product and of its gradients, together: hashable.

    Attributes:
      name: of the public function, for messages.
      axis_name: the mesh axes of the devices, the first varying slowest.
      size: D, the number of devices along them.
      leading: A, the product of the dimensions before the one that is gathered or scattered.
      rows: R, the rows of one device: its part of that dimension times the dimensions between it and the last.
      x_dtype: of x, or of the array that a quantized x stands for.
      x_is_quantized: the caller has quantized x, which then has no gradient.
      kernel_dtypes: of the kernels and of their gradients; None for a kernel that the caller has quantized.
      biased: whether each product has a bias.
      out_dtype: of the product, and of partial sums on their way.
      native: FP8 products and quantization are te_jax's kernels, else the reference.
      recipe: how operands are quantized; None multiplies them as they are.
      transport: one of `TRANSPORTS`.
      bidirectional: rings send halves both ways.
      residual: what is kept of x for the kernel's gradient: the "gathered" operand, or this device's "shard" of it.
      gather_result: the gathered x is a result too.
      timeout: seconds after which "p2p" gives up on a device that does not arrive.
      product: which of the layer's three products this is.
      protocol: of a gather by "p2p": devices "get" from their peers or "put" to them; None for the faster one.
    """

    name: str
    axis_name: tuple[str, ...]
    size: int
    leading: int
    rows: int
    x_dtype: np.dtype
    x_is_quantized: bool
    kernel_dtypes: tuple[np.dtype | None, ...]
    biased: tuple[bool, ...]
    out_dtype: np.dtype
    native: bool
    recipe: Recipe | None = None
    transport: TransportName = "auto"
    bidirectional: bool = False
    residual: Residual = "gathered"
    gather_result: bool = False
    timeout: float = 60.0
    product: Product = "forward"
    protocol: Literal["get", "put"] | None = None

    def __post_init__(self):
        validate_options(self.transport, self.bidirectional, self.residual, self.timeout)
        as_flag("gather_result", self.gather_result)

    @property
    def implementation(self) -> native.Implementation:
        return "native" if self.native else "reference"

    @property
    def scaling(self) -> Scaling:
        """The scaling that all operands of all products share."""
        return "none" if self.recipe is None else scaling_of(self.recipe.scalings["activation"][0])

    @property
    def fp8(self) -> Fp8:
        """How operands are quantized, where there is a recipe."""
        assert self.recipe is not None
        return Fp8(self.name, self.recipe, self.implementation, self.axis_name)

    @property
    def fast_accumulation(self) -> bool:
        return self.recipe is not None and self.fp8.is_fast(self.product)

    @property
    def blocks_span_shards(self) -> bool:
        """Whether blocks of 128 rows, which gradients of kernels sum over, would reach over shards of x."""
        return self.scaling == "block" and self.leading * self.size > 1 and self.rows % BLOCK != 0

    @property
    def has_kernel_gradients(self) -> bool:
        """Whether any kernel can have a gradient."""
        return not self.blocks_span_shards and any(dtype is not None for dtype in self.kernel_dtypes)

    def of(self, product: Product) -> CollectiveSpec:
        """That of one of the three products."""
        return dataclasses.replace(
            self, product=product, out_dtype=self.out_dtype if product == "forward" else self.x_dtype
        )


def validate_options(transport: Any, bidirectional: Any, residual: Any, timeout: Any) -> None:
    """Checks how the devices of a collective product are to exchange what they compute.

    Raises:
      ValueError: an option is not what `te_jax.parallel.all_gather_matmul` takes.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport is {transport!r}; it must be one of {TRANSPORTS}")
    as_flag("bidirectional", bidirectional)
    if residual not in ("gathered", "shard"):
        raise ValueError(f"residual is {residual!r}; it must be 'gathered' or 'shard'")
    is_number = isinstance(timeout, int | float | np.integer | np.floating) and not isinstance(timeout, bool)
    if not is_number or not 0 < timeout < math.inf:
        raise ValueError(f"timeout is {timeout!r}; it must be a positive, finite number of seconds, such as 60.0")


def scaling_of(scaling: str) -> Scaling:
    return cast(Scaling, scaling.partition("_")[0])
