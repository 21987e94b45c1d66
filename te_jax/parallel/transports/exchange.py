"""Operands and results of transports of collective matmul, and the GEMM of one piece that those made of XLA share.

A transport is a module with two functions, the `Transport` below. Both run inside `shard_map` or `pmap`, on the shards
of D devices, in canonical shapes: A for the dimensions before the one that is gathered or scattered, R rows of one
device, K summed over, N columns.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from te_jax.ops.gemm import gemm, gemm_sum
from te_jax.ops.gemm_product import allowed_dtype
from te_jax.parallel._collective.call import CollectiveSpec
from te_jax.quantized import PLAIN, Facts, QuantizedArray, one_copy


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("data", "scale_inv"), meta_fields=("scaling", "summed_first")
)
@dataclasses.dataclass(frozen=True)
class GemmOperand:
    """One side of a GEMM: the LHS is [*rows, K], the RHS, a kernel, a matrix.

    Attributes:
      data: LHS: [A, R, K], or [A, D, R, K] where it is to be scattered. RHS: [K, N] or [N, K].
      scale_inv: float32; None for plain data. LHS: "tensor" [], "row" [A, (D,) R], "block" [A, (D,) ceil(K/128), R].
        RHS: "tensor" [], "row" [N], "block" [ceil(N/128), ceil(K/128)].
      scaling: the facts of the scaling of data.
      summed_first: of a RHS: whether it is [K, N]. Quantized data is [N, K].
    """

    data: Array
    scale_inv: Array | None = None
    scaling: Facts = PLAIN
    summed_first: bool = False

    @property
    def columns(self) -> int:
        """N of a RHS."""
        return self.data.shape[1 if self.summed_first else 0]

    def map(self, of_data: Callable[[Array], Array], of_scales: Callable[[Array], Array]) -> GemmOperand:
        """A LHS with a function of its data, and a function of its scales where each row has its own."""
        scale_inv = self.scale_inv
        if scale_inv is not None and self.scaling.has_several_scales:
            scale_inv = of_scales(scale_inv)
        return dataclasses.replace(self, data=of_data(self.data), scale_inv=scale_inv)

    def rows(self, first: int, size: int) -> GemmOperand:
        """A LHS [A, R, K] with the rows from `first` on."""

        def taken(x: Array, axis: int) -> Array:
            return lax.slice_in_dim(x, first, first + size, axis=axis)

        return self.map(lambda data: taken(data, 1), lambda scales: taken(scales, scales.ndim - 1))

    def shard(self, rank: Array) -> GemmOperand:
        """The rows [A, R, K] of a LHS [A, D, R, K] that belong to one device."""

        def taken(x: Array) -> Array:
            return lax.dynamic_index_in_dim(x, rank, axis=1, keepdims=False)

        return self.map(taken, taken)

    def merged(self, axis: int) -> GemmOperand:
        """A LHS whose dimension `axis` of rows becomes one with the rows that follow it."""

        def scales(x: Array) -> Array:
            x = jnp.moveaxis(x, axis, -2)
            return x.reshape(*x.shape[:-2], -1)

        shape = self.data.shape
        return self.map(lambda data: data.reshape(*shape[:axis], -1, *shape[axis + 2 :]), scales)


class Transport(Protocol):
    """The two functions of a transport."""

    def all_gather_gemm(
        self,
        spec: CollectiveSpec,
        x: GemmOperand,
        kernels: tuple[GemmOperand, ...],
        biases: tuple[Array | None, ...],
        extras: tuple[Array, ...],
        keep_gathered: bool,
    ) -> tuple[tuple[Array, ...], Array | None, tuple[Array, ...]]:
        """Gathers x and multiplies it with each kernel.

        Args:
          spec: static arguments.
          x: LHS [A, R, K] of this device.
          kernels: a RHS each, all for the same gathered x.
          biases: float32 [N] for each kernel, or None.
          extras: arrays [*s] that are gathered as well.
          keep_gathered: also return the gathered data of x.

        Returns:
          (products, gathered, gathered extras): for each kernel [A, D·R, N] in out_dtype, the rows of device q from
          q·R on; [A, D·R, K] or None; [D, *s] for each extra.
        """
        ...

    def gemm_reduce_scatter(
        self, spec: CollectiveSpec, xs: tuple[GemmOperand, ...], kernels: tuple[GemmOperand, ...], bias: Array | None
    ) -> Array:
        """Σᵢ xᵢ · kernelsᵢ, summed over devices; each device keeps its own rows.

        Args:
          spec: static arguments.
          xs: a LHS [A, D, R, Kᵢ] each.
          kernels: a RHS for each.
          bias: float32 [N], added once, after the sum; or None.

        Returns:
          [A, R, N] in out_dtype.
        """
        ...


def multiply(
    spec: CollectiveSpec,
    x: GemmOperand,
    kernel: GemmOperand,
    *,
    bias: Array | None = None,
    dtype: np.dtype | None = None,
    accumulator: Array | None = None,
) -> Array:
    """The product [A, R, N] of x [A, R, K] and a kernel, plus a bias [N] in float32.

    Args:
      spec, x, kernel, bias: as for `Transport`.
      dtype: of the result; None is out_dtype.
      accumulator: float32 [A, R, N], added to the product in its place; dtype is then float32.
    """
    dtype = dtype or spec.out_dtype
    if x.scaling.is_plain:
        y = dot(x.data, kernel.data, (2,), (0 if kernel.summed_first else 1,), dtype)
        return with_bias(y if accumulator is None else accumulator + y, bias, dtype)
    shape = (*x.data.shape[:2], kernel.data.shape[0])
    y = gemm(
        quantized(x.merged(0)),
        quantized(kernel),
        rhs_contracting="cols",
        bias=bias,
        out_dtype=dtype,
        accumulator=None if accumulator is None else accumulator.reshape(-1, shape[2]),
        fast_accumulation=spec.fast_accumulation,
        implementation=spec.codec.implementation,
    )
    return y.reshape(shape)


def sum_of_products(
    spec: CollectiveSpec, xs: tuple[GemmOperand, ...], kernels: tuple[GemmOperand, ...], bias: Array | None = None
) -> Array:
    """Σᵢ xᵢ · kernelsᵢ + bias, of xᵢ [A, R, Kᵢ]: [A, R, N] in out_dtype; several are added up in float32."""
    if len(xs) == 1:
        return multiply(spec, xs[0], kernels[0], bias=bias)
    if xs[0].scaling.native_blocks:
        pairs = [(quantized(x.merged(0)), quantized(kernel)) for x, kernel in zip(xs, kernels, strict=True)]
        dtype = spec.out_dtype if bias is None else np.dtype(np.float32)
        y = gemm_sum(pairs, rhs_contracting="cols", out_dtype=dtype, implementation=spec.codec.implementation)
        y = y.reshape(*xs[0].data.shape[:2], -1)
        return with_bias(y, bias, spec.out_dtype)
    total = None
    for x, kernel in zip(xs, kernels, strict=True):
        total = multiply(spec, x, kernel, dtype=np.dtype(np.float32), accumulator=total)
    assert total is not None
    return with_bias(total, bias, spec.out_dtype)


def with_bias(y: Array, bias: Array | None, dtype: jax.typing.DTypeLike) -> Array:
    """y [A, R, N] plus a bias [N], added in float32, in dtype."""
    return (y if bias is None else y.astype(jnp.float32) + bias.astype(jnp.float32)[None, None]).astype(dtype)


def dot(
    lhs: Array, rhs: Array, lhs_summed: tuple[int, ...], rhs_summed: tuple[int, ...], dtype: jax.typing.DTypeLike
) -> Array:
    """A product of plain arrays of one dtype over the given dimensions, summed in float32 and rounded to dtype once."""
    allowed = allowed_dtype(lhs.dtype, np.dtype(dtype))
    y = lax.dot_general(lhs, rhs, ((lhs_summed, rhs_summed), ((), ())), preferred_element_type=allowed)
    return y.astype(dtype)


def quantized(x: GemmOperand) -> QuantizedArray:
    """A matrix [outer, summed] with its scales as `te_jax.ops.gemm` takes it: summed over its cols."""
    return one_copy(x.data, x.scale_inv, x.scaling)


def as_bytes(x: Array) -> Array:
    """FP8 as bytes: XLA's CPU backend would widen FP8 values that are only moved."""
    return lax.bitcast_convert_type(x, jnp.uint8) if _is_fp8(x) else x


def like_bytes(moved: Array, x: Array) -> Array:
    """Bytes in the dtype of the array that they were made of."""
    return lax.bitcast_convert_type(moved, x.dtype) if _is_fp8(x) else moved


def _is_fp8(x: Array) -> bool:
    return x.dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2)


def all_gather(x: Array, axis_name: tuple[str, ...], *, axis: int = 0, tiled: bool = False) -> Array:
    """`lax.all_gather` that moves FP8 as bytes."""
    return like_bytes(lax.all_gather(as_bytes(x), axis_name, axis=axis, tiled=tiled), x)
