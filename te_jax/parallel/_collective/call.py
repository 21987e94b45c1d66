"""The static arguments of one collective product, as transports read them."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from te_jax._core.types import BLOCK
from te_jax.ops.linear.codec import Codec
from te_jax.parallel.options import P2P, Residual, Ring
from te_jax.quantized import Facts
from te_jax.recipe import Product


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveSpec:
    """Hashable, so that a product is traced once.

    Attributes:
      gathers: whether the layer gathers rows of x over the devices, or scatters sums of results.
      axis_name: the mesh axes of the devices, the first varying slowest.
      size: D, the number of devices along them.
      leading: A, the product of the dimensions before the one that is gathered or scattered.
      rows: R, the rows of one device: its part of that dimension times the dimensions between it and the last.
      x_dtype: of x, or of the array that a quantized x stands for.
      out_dtype: of the product, and of partial sums on their way.
      codec: how the product reads its operands.
      transport: how devices exchange rows.
      residual: what is kept of x for the kernel's gradient: the "gathered" operand, or this device's "shard" of it.
      product: which of the layer's three products this is.
    """

    gathers: bool
    axis_name: tuple[str, ...]
    size: int
    leading: int
    rows: int
    x_dtype: np.dtype
    out_dtype: np.dtype
    codec: Codec
    transport: Literal["auto", "xla"] | Ring | P2P = "auto"
    residual: Residual = "gathered"
    product: Product = "forward"

    @property
    def name(self) -> str:
        """Name of the function, in `te_jax.parallel`."""
        return "all_gather_matmul" if self.gathers else "matmul_reduce_scatter"

    @property
    def scaling(self) -> Facts:
        """The facts of the scaling of the lhs of all products."""
        return self.codec.facts

    @property
    def fast_accumulation(self) -> bool:
        return self.codec.is_fast(self.product)

    @property
    def blocks_span_shards(self) -> bool:
        """Whether blocks of 128 rows, which gradients of kernels sum over, would reach over shards of x."""
        return self.scaling.in_blocks and self.leading * self.size > 1 and self.rows % BLOCK != 0

    @property
    def p2p(self) -> P2P:
        return self.transport if isinstance(self.transport, P2P) else P2P()

    def of(self, product: Product, codec: Codec) -> CollectiveSpec:
        """Spec of one of the three products."""
        out_dtype = self.out_dtype if product == "forward" else self.x_dtype
        return dataclasses.replace(self, product=product, codec=codec, out_dtype=out_dtype)
