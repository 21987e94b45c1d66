"""The products of linear layers whose rows lie on several devices, on canonical shapes: where the forward pass gathers
them the backward pass scatters sums, and the other way round."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, Literal, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from te_jax import native, sharding
from te_jax._core.types import BLOCK
from te_jax.ops.linear.arguments import means_of, quantization_of
from te_jax.ops.linear.per_product import PerProduct, is_shared
from te_jax.ops.linear.products import Products, Wgrad
from te_jax.ops.quantize import QuantizedParts
from te_jax.parallel._collective.call import CollectiveSpec
from te_jax.parallel._collective.sides import Sides, gather, in_order, sides_of, travelling, wgrad, with_parts
from te_jax.parallel.options import P2P, Ring
from te_jax.parallel.transports import p2p, ring, xla
from te_jax.parallel.transports.exchange import GemmOperand, Transport
from te_jax.recipe import Product, ProductRecipes, Recipe, Role
from te_jax.sharding import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveProducts(Products):
    """What both have in common: operands are `Sides`, and what is kept of them `GemmOperand`s.

    Attributes:
      spec: static arguments of the products.
      fake: a recipe whose values products without one read.
    """

    spec: CollectiveSpec
    fake: Recipe | None = None

    prefix: ClassVar[str] = "te_collective"
    split: ClassVar[Literal["rows", "cols"]]
    """Whether rows or cols of whole kernels are split over the devices."""

    def differentiated_once(self, operands: Any) -> Any:
        return operands  # plain products and collectives have derivatives of their own

    def sides(
        self, role: Role, x: Any, state: Any, lead: tuple[int, ...], split: Any, **options: Any
    ) -> QuantizedParts:
        spec = self.quantizing
        quantization = None if spec.recipe is None else quantization_of(spec.recipe, role, self.kernel_contracting)
        options["read_back"] = self.fake is not None
        sides = sides_of(spec, role, x, lead, split, state, quantization=quantization, **options)
        return QuantizedParts(sides, sides.amax, sides.dbias)  # pyright: ignore[reportArgumentType]

    @property
    def quantizing(self) -> CollectiveSpec:
        """Static arguments with the recipe by which operands are quantized."""
        if self.fake is None:
            return self.spec
        return dataclasses.replace(self.spec, recipe=self.fake, implementation="reference", by_kernels=False)

    def kernel(self, kernel: Any, state: Any, *, first_copy: bool, second_copy: bool) -> QuantizedParts:
        """Its sides as those of [K, N]: `by_cols` the forward pass reads, `by_rows` the gradient of x."""
        first = self.kernel_contracting == "first"
        if self.quantizing.recipe is None:
            right = GemmOperand(kernel.astype(self.spec.x_dtype), summed_first=first)
            sides: Any = Sides(GemmOperand(kernel, summed_first=not first), right)
            return QuantizedParts(sides, None, None)
        split = self.split if first else "rows" if self.split == "cols" else "cols"
        by_rows, by_cols = (second_copy, first_copy) if first else (first_copy, second_copy)
        options = {"by_rows": by_rows, "by_cols": by_cols}
        parts: Any = self.sides("kernel", kernel, state, kernel.shape[:1], split, **options)
        by_rows, by_cols = parts.array[:2] if first else parts.array[1::-1]
        if self.fake is not None:
            by_rows, by_cols = (
                None if side is None else dataclasses.replace(side, summed_first=summed_first)
                for side, summed_first in ((by_rows, not first), (by_cols, first))
            )
        return parts._replace(array=parts.array._replace(by_rows=by_rows, by_cols=by_cols))

    def kept(self, x: Any, role: Role, *, is_argument: bool) -> Any:
        if isinstance(x, Sides):
            is_argument = is_argument or (role == "kernel" and self.quantizing.recipe is None)
            x = x.by_rows if role == "kernel" else x.by_cols
        name = functools.partial(checkpoint_name, name=f"{self.prefix}_{role}")
        return x if is_argument else jax.tree.map(name, x)

    def plain_kernels(self, kernels: tuple[GemmOperand, ...]) -> tuple[GemmOperand, ...]:
        """Kept kernels as products with gradients read them."""
        if self.recipe is not None:
            return kernels
        return tuple(dataclasses.replace(k, data=k.data.astype(self.spec.x_dtype)) for k in kernels)

    def wgrads_of(self, x: GemmOperand, dys: list[GemmOperand]) -> tuple[Wgrad, ...]:
        sides = (self.wgrad_sides(x, dy) for dy in dys)
        return tuple(Wgrad(functools.partial(wgrad, self.spec, *pair), pair) for pair in sides)

    def plain(self) -> CollectiveProducts:
        spec = dataclasses.replace(self.spec, recipe=None, transport="xla", residual="shard")
        return dataclasses.replace(self, recipe=None, fake=None, spec=spec)

    def validate_x(self, x8: Any, trained: str) -> None:
        if self.quantizing.blocks_span_shards:
            raise ValueError(
                f"x has {self.spec.rows} rows for each device; the gradient of {trained} with block scaling needs a "
                f"multiple of {BLOCK}: pad them, or use CurrentScaling or RowwiseScaling"
            )
        super().validate_x(x8, trained)


class AllGatherProducts(CollectiveProducts):
    """Products [A·D·R, N] of x [A, R, K], gathered over devices, with the columns of kernels that a device has."""

    split = "cols"

    def quantize(self, role, x, state, group, *, first_copy=True, second_copy, with_dbias=False) -> QuantizedParts:
        spec = self.quantizing
        if role == "kernel":
            return self.kernel(x, state, first_copy=first_copy, second_copy=second_copy)
        if role == "gradient":
            lead = spec.leading, spec.size, spec.rows
            needed = {"by_rows": first_copy, "by_cols": second_copy}
            return self.sides(role, x, state, lead, "cols", **needed, with_dbias=with_dbias)
        needed = {"by_rows": first_copy, "by_cols": second_copy and not spec.blocks_span_shards}
        return self.sides(role, x, state, (spec.leading, spec.rows), "rows", **needed, gathered=True)

    def forward(self, x8: Sides, kernel8s, biases, layouts, group, *, differentiated):
        by_cols = x8.by_cols if differentiated and not self.spec.blocks_span_shards else None
        keep = by_cols is not None and self.spec.residual == "gathered"
        parts = travelling(by_cols) if keep else ()
        rights = tuple(kernel8.by_cols for kernel8 in kernel8s)
        ys, gathered, parts = _all_gather_gemm(
            self.spec, "forward", x8.by_rows, rights, biases, parts, keep and not parts
        )
        if keep:
            by_cols = with_parts(cast(GemmOperand, by_cols), gathered, parts)
        return tuple(y.reshape(-1, y.shape[-1]) for y in ys), by_cols, (None,) * len(ys)

    def dgrad(self, dy8s, kernel8s, group, layout: Layout):
        lefts = tuple(dy8.by_rows for dy8 in dy8s)
        return layout.apply(_gemm_reduce_scatter(self.spec, "dgrad", lefts, self.plain_kernels(kernel8s), None)), dy8s

    def wgrads(self, x8: GemmOperand, dy8s, group):
        if self.spec.residual == "shard":
            # Not before dy is there, and not as one with the gather of the forward pass: what it gathers would be kept.
            x8, _ = sharding.together(x8, dy8s[0].by_cols.data)
            x8 = gather(self.spec, x8)
        x8 = in_order(self.spec, x8)
        return self.wgrads_of(x8, [dy8.by_cols for dy8 in dy8s])

    def validate_x(self, x8: Any, trained: str) -> None:
        # What is gathered of a tensor with one scale is transposed afterwards.
        super().validate_x(None if self.spec.scaling.by_tensor else x8, trained)


class ReduceScatterProducts(CollectiveProducts):
    """The product [A, R, N] of x [A, D, R, K] with the rows of a kernel that a device has, summed over devices."""

    split = "rows"

    def quantize(self, role, x, state, group, *, first_copy=True, second_copy, with_dbias=False) -> QuantizedParts:
        spec = self.quantizing
        if role == "kernel":
            return self.kernel(x, state, first_copy=first_copy, second_copy=second_copy)
        needed = {"by_rows": first_copy, "by_cols": second_copy and not spec.blocks_span_shards}
        if role == "activation":
            return self.sides(role, x, state, (spec.leading, spec.size, spec.rows), "cols", **needed)
        parts = self.sides(role, x, state, (spec.leading, spec.rows), "rows", **needed, gathered=True)
        return parts._replace(dbias=jnp.sum(x.astype(jnp.float32), axis=(0, 1)) if with_dbias else None)

    def forward(self, x8: Sides, kernel8s, biases, layouts, group, *, differentiated):
        (kernel8,), (bias,) = kernel8s, biases
        y = _gemm_reduce_scatter(self.spec, "forward", (x8.by_rows,), (kernel8.by_cols,), bias)
        return (y,), x8.by_cols if differentiated and not self.spec.blocks_span_shards else None, (None,)

    def dgrad(self, dy8s, kernel8s, group, layout: Layout):
        """dy is gathered once, for both gradients."""
        spec, (dy8,) = self.spec, dy8s
        by_cols = dy8.by_cols
        parts = travelling(by_cols)
        keep = by_cols is not None and not parts
        kernels = self.plain_kernels(kernel8s)
        (dx,), data, parts = _all_gather_gemm(spec, "dgrad", dy8.by_rows, kernels, (None,), parts, keep)
        dx = layout.apply(dx.reshape(spec.leading, spec.size, spec.rows, dx.shape[-1]))
        return dx, (None if by_cols is None else with_parts(by_cols, data, parts),)

    def wgrads(self, x8: Any, dy8s, group):
        (dy,) = dy8s
        x8 = x8.by_cols if isinstance(x8, Sides) else x8
        dy = gather(self.spec, dy.by_cols) if isinstance(dy, Sides) else dy
        return self.wgrads_of(x8, [in_order(self.spec, dy)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectivePerProduct(PerProduct):
    """A recipe for each of the products of `CollectiveProducts`."""

    @property
    def spec(self) -> CollectiveSpec:
        return self.layers[0].spec


def collective_products(
    kind: type[CollectiveProducts],
    recipe: Recipe | None,
    implementation: native.Implementation | None,
    spec: CollectiveSpec,
    **options: Any,
) -> CollectiveProducts | CollectivePerProduct:
    """The products of a layer.

    Args:
      kind: of products.
      recipe, implementation: of the layer.
      spec: static arguments but for recipe and implementations.
      **options: further attributes of `CollectiveProducts`.

    Raises:
      NativeUnavailableError: an implementation cannot run here.
    """
    if isinstance(recipe, ProductRecipes) and not is_shared(recipe, "activation"):
        spec = dataclasses.replace(spec, residual="shard")  # the gradients of kernels read another x

    def of(recipe: Recipe | None, fake: Recipe | None = None) -> CollectiveProducts:
        means = means_of(implementation, recipe)
        return kind(**means, spec=dataclasses.replace(spec, **means), fake=fake, **options)

    return CollectivePerProduct.of(recipe, of) if isinstance(recipe, ProductRecipes) else of(recipe)


def _all_gather_gemm(spec: CollectiveSpec, product: Product, x: GemmOperand, kernels, biases, extras, keep_gathered):
    spec = spec.of(product)
    transport = _transport(spec, (x,), kernels, gathers=True)
    return transport.all_gather_gemm(spec, x, kernels, biases, extras, keep_gathered)


def _gemm_reduce_scatter(spec: CollectiveSpec, product: Product, xs, kernels, bias: Array | None) -> Array:
    spec = spec.of(product)
    return _transport(spec, xs, kernels, gathers=False).gemm_reduce_scatter(spec, xs, kernels, bias)


def _transport(spec: CollectiveSpec, xs, kernels, *, gathers: bool) -> Transport:
    chosen: Any = p2p
    if spec.size == 1 or isinstance(spec.transport, Ring):
        chosen = ring  # without any step it is the product alone
    elif not isinstance(spec.transport, P2P):
        worthwhile = spec.transport == "auto" and p2p.is_worthwhile(spec, xs, kernels, gathers=gathers)
        chosen = p2p if worthwhile else xla
    return cast(Transport, chosen)
