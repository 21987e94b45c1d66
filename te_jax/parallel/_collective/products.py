"""The products of linear layers whose rows lie on several devices, on canonical shapes: where the forward pass gathers
them the backward pass scatters sums, and the other way round."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from te_jax import sharding
from te_jax._core.types import BLOCK, PyTree
from te_jax.ops.linear.products import Pair, Products, State, Wgrad
from te_jax.ops.quantize import QuantizedParts
from te_jax.parallel._collective.call import CollectiveSpec
from te_jax.parallel._collective.sides import Sides, gather, in_order, sides_of, travelling, wgrad, with_parts
from te_jax.parallel.options import P2P, Ring
from te_jax.parallel.transports import p2p, ring, xla
from te_jax.parallel.transports.exchange import GemmOperand, Transport
from te_jax.quantized import QuantizedArray
from te_jax.recipe import Product, Role
from te_jax.sharding import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveProducts(Products[None]):
    """Operands are `Sides`, and what is kept of them `GemmOperand`s.

    A layer that gathers has products [A·D·R, N] of x [A, R, K] with the columns of kernels that a device has; one that
    scatters has the product [A, R, N] of x [A, D, R, K] with the rows of a kernel, summed over devices.

    Attributes:
      spec: static arguments of the products.
    """

    spec: CollectiveSpec

    prefix: ClassVar[str] = "te_collective"

    def differentiated_once(self, operands: PyTree) -> PyTree:
        return operands  # plain products and collectives have derivatives of their own

    def of(self, product: Product) -> CollectiveSpec:
        """The static arguments of a product."""
        return self.spec.of(product, self.codec(product))

    def encoded(self, codec, role, x, state, group, **options) -> QuantizedParts:
        return self.quantized(codec, role, x, state, group, **options)  # plain operands have sides, too

    def quantized(self, codec, role, x, state, group, *, first_copy, second_copy, with_dbias=False) -> QuantizedParts:
        spec = dataclasses.replace(self.spec, codec=codec)
        if role == "kernel":
            sides: Any = self._kernel(spec, x, state, first_copy=first_copy, second_copy=second_copy)
            return QuantizedParts(sides, sides.amax, None)
        travels = (role == "activation") == spec.gathers  # the rows of one device, and not its columns
        lead = (spec.leading, spec.rows) if travels else (spec.leading, spec.size, spec.rows)
        sides = sides_of(
            spec,
            role,
            x,
            lead,
            "rows" if travels else "cols",
            state,
            kernel_contracting=self.kernel_contracting,
            by_rows=first_copy,
            by_cols=second_copy and not spec.blocks_span_shards,
            gathered=travels,
            with_dbias=with_dbias and not travels,
        )
        dbias = self.sum_of_rows(x, group) if with_dbias and travels else sides.dbias
        return QuantizedParts(sides, sides.amax, dbias)

    def sum_of_rows(self, dy: Array, group: None) -> Array:
        return jnp.sum(dy.astype(jnp.float32), axis=(0, 1))

    def _kernel(self, spec: CollectiveSpec, kernel: Any, state: State, *, first_copy: bool, second_copy: bool) -> Sides:
        """Its sides as those of [K, N]: `by_cols` the forward pass reads, `by_rows` the gradient of x."""
        first = self.kernel_contracting == "first"
        if spec.codec.recipe is None:
            right = GemmOperand(kernel.astype(spec.x_dtype), summed_first=first)
            return Sides(GemmOperand(kernel, summed_first=not first), right)
        sides = sides_of(
            spec,
            "kernel",
            kernel,
            kernel.shape[:1],
            "rows" if first != spec.gathers else "cols",
            state,
            kernel_contracting=self.kernel_contracting,
            by_rows=second_copy if first else first_copy,
            by_cols=first_copy if first else second_copy,
        )
        by_rows, by_cols = sides[:2] if first else sides[1::-1]
        if spec.codec.is_read_back:
            by_rows, by_cols = (
                None if side is None else dataclasses.replace(side, summed_first=summed_first)
                for side, summed_first in ((by_rows, not first), (by_cols, first))
            )
        return sides._replace(by_rows=by_rows, by_cols=by_cols)

    def kept(self, x: Any, role: Role, *, is_argument: bool) -> Any:
        x = x.second if isinstance(x, Pair) else x
        if isinstance(x, Sides):
            is_argument = is_argument or (role == "kernel" and self.codec("dgrad").recipe is None)
            x = x.by_rows if role == "kernel" else x.by_cols
        name = functools.partial(checkpoint_name, name=f"{self.prefix}_{role}")
        return x if is_argument else jax.tree.map(name, x)

    def plain(self) -> CollectiveProducts:
        spec = dataclasses.replace(self.spec, transport="xla", residual="shard")
        return dataclasses.replace(self, codecs=self.plain_codecs, spec=spec)

    def _forward(self, x8: Sides, kernel8s, biases, layouts, group, *, differentiated):
        spec, rights = self.of("forward"), tuple(kernel8.by_cols for kernel8 in kernel8s)
        by_cols = x8.by_cols if differentiated and not spec.blocks_span_shards else None
        if not spec.gathers:
            return (_gemm_reduce_scatter(spec, (x8.by_rows,), rights, biases[0]),), by_cols, (None,)
        keep = by_cols is not None and spec.residual == "gathered"
        ys, gathered = _all_gather_gemm(spec, x8, rights, biases, keep=keep)
        ys = tuple(y.reshape(-1, y.shape[-1]) for y in ys)
        return ys, gathered if keep else by_cols, (None,) * len(ys)

    def _dgrad(self, dy8s, kernel8s, group, layout: Layout):
        spec = self.of("dgrad")
        if spec.codec.recipe is None:  # they were kept as they are
            kernel8s = tuple(dataclasses.replace(k, data=k.data.astype(spec.x_dtype)) for k in kernel8s)
        if spec.gathers:
            lefts = tuple(dy8.by_rows for dy8 in dy8s)
            return layout.apply(_gemm_reduce_scatter(spec, lefts, kernel8s, None)), dy8s
        # dy is gathered once, for both gradients.
        (dx,), dy = _all_gather_gemm(spec, dy8s[0], kernel8s, (None,), keep=dy8s[0].by_cols is not None)
        return layout.apply(dx.reshape(spec.leading, spec.size, spec.rows, dx.shape[-1])), (dy,)

    def _wgrads(self, x8: Any, dy8s, group):
        spec = self.of("wgrad")
        x8, *dys = (side.by_cols if isinstance(side, Sides) else side for side in (x8, *dy8s))
        if not spec.gathers:
            dys = [in_order(spec, gather(spec, dys[0]) if isinstance(dy8s[0], Sides) else dys[0])]
        elif spec.residual == "shard":
            # Not before dy is there, and not as one with the gather of the forward pass: what it gathers would be kept.
            x8, _ = sharding.together(x8, dys[0].data)
            x8 = gather(spec, x8)
        x8 = in_order(spec, x8) if spec.gathers else x8
        sides = (self.wgrad_sides(x8, dy) for dy in dys)
        return tuple(Wgrad(functools.partial(wgrad, spec, *pair), pair) for pair in sides)

    def validate_x(self, x8: QuantizedArray | None, trained: str) -> None:
        spec = self.of("wgrad")
        if spec.blocks_span_shards:
            raise ValueError(
                f"x has {spec.rows} rows for each device; the gradient of {trained} with block scaling needs a "
                f"multiple of {BLOCK}: pad them, or use CurrentScaling or RowwiseScaling"
            )
        # What is gathered of a tensor with one scale is transposed afterwards.
        super().validate_x(None if spec.gathers and spec.scaling.by_tensor else x8, trained)


def _all_gather_gemm(
    spec: CollectiveSpec, x: Sides, kernels, biases, *, keep: bool
) -> tuple[tuple[Array, ...], GemmOperand | None]:
    """(products, the columns of x of all devices)."""
    by_cols = x.by_cols if keep else None
    parts = travelling(by_cols)
    transport = _transport(spec, (x.by_rows,), kernels, gathers=True)
    ys, data, parts = transport.all_gather_gemm(spec, x.by_rows, kernels, biases, parts, keep and not parts)
    return ys, None if by_cols is None else with_parts(by_cols, data, parts)


def _gemm_reduce_scatter(spec: CollectiveSpec, xs, kernels, bias: Array | None) -> Array:
    return _transport(spec, xs, kernels, gathers=False).gemm_reduce_scatter(spec, xs, kernels, bias)


def _transport(spec: CollectiveSpec, xs, kernels, *, gathers: bool) -> Transport:
    chosen: Any = p2p
    if spec.size == 1 or isinstance(spec.transport, Ring):
        chosen = ring  # without any step it is the product alone
    elif not isinstance(spec.transport, P2P):
        worthwhile = spec.transport == "auto" and p2p.is_worthwhile(spec, xs, kernels, gathers=gathers)
        chosen = p2p if worthwhile else xla
    return cast(Transport, chosen)
