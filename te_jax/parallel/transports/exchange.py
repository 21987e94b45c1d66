"""What transports of collective matmul take and give, and the product of one piece that those made of XLA share.

A transport is a module with two functions, the `Transport` below. Both run inside `shard_map` or `pmap`, on the shards
of D devices, in canonical shapes: A for what comes before the dimension that is gathered or scattered, R rows of one
device, K summed over, N columns.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from te_jax.ops._gemm_product import Scaling, allowed_dtype
from te_jax.ops.gemm import gemm
from te_jax.quantized import QuantizedArray
from te_jax.recipe import Scaling as CopyScaling


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The static arguments of a transport, together.

    Attributes:
      axis_name: the mesh axes, the first varying slowest.
      size: D, the number of devices along them.
      out_dtype: of the products, and of partial sums on their way.
      fast_accumulation: see `te_jax.ops.gemm`; of quantized operands.
      native: quantized operands are multiplied by te_gemm, else by the reference.
      bidirectional: rings send halves both ways.
      timeout: seconds to wait for a device that does not arrive, where a transport waits on the host.
      name: of the public function, for messages.
      protocol: of a gather by "p2p": None for the faster one; it can "get" from its peers or "put" to them.
      automatic: "auto" has chosen the transport: plain collectives stand in for it where it turns out, while a program
        is lowered, that it cannot be used.
    """

    axis_name: tuple[str, ...]
    size: int
    out_dtype: np.dtype
    fast_accumulation: bool
    native: bool
    bidirectional: bool
    timeout: float
    name: str
    protocol: Literal["get", "put"] | None = None
    automatic: bool = False


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("data", "scale_inv"), meta_fields=("scaling", "summed_first")
)
@dataclasses.dataclass(frozen=True)
class Operand:
    """One side of a product: the left side is [*rows, K], the right side, the weights, a matrix.

    Attributes:
      data: left: [A, R, K], or [A, D, R, K] where it is to be scattered. Right: [K, N] or [N, K].
      scale_inv: float32; None for plain data. Left: "tensor" [], "row" [A, (D,) R], "block" [A, (D,) ceil(K/128), R].
        Right: "tensor" [], "row" [N], "block" [ceil(N/128), ceil(K/128)].
      scaling: "none" for plain data. The same on both sides.
      summed_first: right: whether it is [K, N]. Quantized data is [N, K].
    """

    data: Array
    scale_inv: Array | None = None
    scaling: Scaling = "none"
    summed_first: bool = False

    def rows(self, first: int, size: int) -> Operand:
        """A left side [A, R, K] with the rows from `first` on."""
        data, scale_inv = lax.slice_in_dim(self.data, first, first + size, axis=1), self.scale_inv
        if self.scaling in ("row", "block"):
            assert scale_inv is not None
            scale_inv = lax.slice_in_dim(scale_inv, first, first + size, axis=scale_inv.ndim - 1)
        return dataclasses.replace(self, data=data, scale_inv=scale_inv)

    def block(self, rank: Array) -> Operand:
        """Of a left side [A, D, R, K], the rows [A, R, K] that belong to a device."""

        def taken(x: Array) -> Array:
            return lax.dynamic_index_in_dim(x, rank, axis=1, keepdims=False)

        scale_inv = self.scale_inv
        if self.scaling in ("row", "block"):
            assert scale_inv is not None
            scale_inv = taken(scale_inv)
        return dataclasses.replace(self, data=taken(self.data), scale_inv=scale_inv)


class Transport(Protocol):
    """The two functions of a transport."""

    def all_gather_gemm(
        self,
        exchange: Exchange,
        x: Operand,
        weights: tuple[Operand, ...],
        biases: tuple[Array | None, ...],
        extras: tuple[Array, ...],
        keep_gathered: bool,
    ) -> tuple[tuple[Array, ...], Array | None, tuple[Array, ...]]:
        """Products of rows that are gathered with weights that are not.

        Args:
          exchange: what is static.
          x: left side [A, R, K] of this device.
          weights: right sides, all for the same gathered x.
          biases: float32 [N] for each of them, or None.
          extras: arrays [*s] that are gathered as well.
          keep_gathered: also return the gathered data of x.

        Returns:
          (products, gathered, gathered extras): for each of the weights [A, D·R, N] in out_dtype, the rows of device q
          from q·R on; [A, D·R, K] or None; [D, *s] for each extra.
        """
        ...

    def gemm_reduce_scatter(
        self, exchange: Exchange, xs: tuple[Operand, ...], weights: tuple[Operand, ...], bias: Array | None
    ) -> Array:
        """Σᵢ xᵢ · weightsᵢ, summed over devices, of which each keeps its own rows.

        Args:
          exchange: what is static.
          xs: left sides [A, D, R, Kᵢ].
          weights: a right side for each.
          bias: float32 [N], added once, after the sum; or None.

        Returns:
          [A, R, N] in out_dtype.
        """
        ...


def multiply(
    exchange: Exchange,
    x: Operand,
    weight: Operand,
    *,
    bias: Array | None = None,
    dtype: np.dtype | None = None,
    accumulator: Array | None = None,
) -> Array:
    """The product of a left side [A, R, K] with a right side.

    Args:
      exchange: what is static.
      x, weight: the operands.
      bias: float32 [N], added to the product.
      dtype: of the result; None is out_dtype.
      accumulator: float32 [A, R, N], added to the product in its place; dtype is then float32.

    Returns:
      [A, R, N].
    """
    dtype = dtype or exchange.out_dtype
    if x.scaling == "none":
        y = dot(x.data, weight.data, (2,), (0 if weight.summed_first else 1,), dtype)
        return with_bias(y if accumulator is None else accumulator + y, bias, dtype)
    A, R, _ = x.data.shape
    N = weight.data.shape[0]
    y = gemm(
        quantized(_flat_rows(x), left=True),
        quantized(weight, left=False),
        rhs_contracting="cols",
        bias=bias,
        out_dtype=dtype,
        accumulator=None if accumulator is None else accumulator.reshape(A * R, N),
        fast_accumulation=exchange.fast_accumulation,
        implementation="native" if exchange.native else "reference",
    )
    return y.reshape(A, R, N)


def sum_of_products(
    exchange: Exchange, xs: tuple[Operand, ...], weights: tuple[Operand, ...], bias: Array | None = None
) -> Array:
    """Σᵢ xᵢ · weightsᵢ + bias of left sides [A, R, Kᵢ]: [A, R, N] in out_dtype; several are added up in float32."""
    if len(xs) == 1:
        return multiply(exchange, xs[0], weights[0], bias=bias)
    total = None
    for x, weight in zip(xs, weights, strict=True):
        total = multiply(exchange, x, weight, dtype=np.dtype(np.float32), accumulator=total)
    assert total is not None
    return with_bias(total, bias, exchange.out_dtype)


def with_bias(y: Array, bias: Array | None, dtype: jax.typing.DTypeLike) -> Array:
    """y [A, R, N] plus a bias [N] in float32, in dtype."""
    return y.astype(dtype) if bias is None else (y.astype(jnp.float32) + bias[None, None]).astype(dtype)


def dot(
    lhs: Array, rhs: Array, lhs_summed: tuple[int, ...], rhs_summed: tuple[int, ...], dtype: jax.typing.DTypeLike
) -> Array:
    """A product of plain arrays of one dtype over the given dimensions, summed in float32 and rounded to dtype once."""
    allowed = allowed_dtype(lhs.dtype, np.dtype(dtype))
    y = lax.dot_general(lhs, rhs, ((lhs_summed, rhs_summed), ((), ())), preferred_element_type=allowed)
    return y.astype(dtype)


def quantized(x: Operand, *, left: bool) -> QuantizedArray:
    """A matrix [outer, summed] with its scales as `te_jax.ops.gemm` takes it: summed over its cols."""
    block: CopyScaling = "block_1x128" if left else "block_128x128"
    scaling: CopyScaling = block if x.scaling == "block" else "row" if x.scaling == "row" else "tensor"
    return QuantizedArray(x.data, x.scale_inv, None, None, 1, 1, scaling, scaling, np.dtype(np.float32))


def _flat_rows(x: Operand) -> Operand:
    """A quantized left side [A, R, K] as a matrix [A·R, K]."""
    A, R, K = x.data.shape
    scale_inv = x.scale_inv
    assert scale_inv is not None
    if x.scaling == "row":
        scale_inv = scale_inv.reshape(A * R)
    if x.scaling == "block":
        scale_inv = jnp.moveaxis(scale_inv, 0, 1).reshape(scale_inv.shape[1], A * R)
    return dataclasses.replace(x, data=x.data.reshape(A * R, K), scale_inv=scale_inv)


def as_bytes(x: Array) -> Array:
    """FP8 as bytes: what is only moved must not be widened on the way, as XLA's CPU backend does."""
    return lax.bitcast_convert_type(x, jnp.uint8) if _is_fp8(x) else x


def like_bytes(moved: Array, x: Array) -> Array:
    """Bytes in the dtype of what they were made of."""
    return lax.bitcast_convert_type(moved, x.dtype) if _is_fp8(x) else moved


def _is_fp8(x: Array) -> bool:
    return x.dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2)


def all_gather(x: Array, axis_name: tuple[str, ...], *, axis: int = 0, tiled: bool = False) -> Array:
    """`lax.all_gather` that moves FP8 as bytes."""
    return like_bytes(lax.all_gather(as_bytes(x), axis_name, axis=axis, tiled=tiled), x)
