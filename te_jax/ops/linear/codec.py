"""Operands of linear layers: plain, in FP8, or the values that FP8 codes stand for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from jax import Array

from te_jax import native
from te_jax._core.derivatives import differentiated_once
from te_jax.ops.linear import fp8
from te_jax.ops.linear.arguments import KernelContracting, implementation_for, quantization_of
from te_jax.ops.linear.observed import observed
from te_jax.ops.quantize import QuantizedParts, quantize_parts
from te_jax.quantized import Facts, QuantizedArray, facts_of_recipe
from te_jax.recipe import PRODUCTS, DelayedScaling, DelayedScalingState, Fake, Product, Quantization, Recipe, Role
from te_jax.reference.quantize import Copies, GroupAxes

READ_BY: dict[Role, tuple[Product, Product]] = {
    "activation": ("forward", "wgrad"),
    "kernel": ("forward", "dgrad"),
    "gradient": ("dgrad", "wgrad"),
}
"""The two products that read an operand."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codec:
    """How a product reads its operands. Hashable, so that a layer is traced once.

    Attributes:
      name: of the public function, for errors.
      recipe: by which operands are quantized; None for plain ones.
      implementation: of the product.
      by_kernels: whether native kernels quantize, as far as there are any. They run on more GPUs than native products.
      is_read_back: whether the product reads, in the dtype of x, the values that FP8 codes stand for.
    """

    name: str
    recipe: Recipe | None = None
    implementation: native.Implementation = "reference"
    by_kernels: bool = False
    is_read_back: bool = False

    @property
    def in_fp8(self) -> bool:
        """Whether the product reads FP8."""
        return self.recipe is not None and not self.is_read_back

    @property
    def facts(self) -> Facts:
        """Facts of the scaling of activations as the forward pass reads them, that of the lhs of all products."""
        return facts_of_recipe(self.recipe)

    def is_fast(self, product: Product) -> bool:
        """Whether the sums of a product may stay in the tensor cores."""
        return self.recipe is not None and not self.is_read_back and product in self.recipe.fast_accumulation

    def quantization(self, role: Role, kernel_contracting: KernelContracting) -> Quantization:
        """How operands of a role are quantized."""
        assert self.recipe is not None
        return quantization_of(self.recipe, role, kernel_contracting)

    def quantize(
        self,
        role: Role,
        x: Array,
        state: DelayedScalingState | None,
        *,
        row_ndim: int,
        quantization: Quantization,
        copies: Copies = "both",
        amax_axis: GroupAxes | None = None,
        with_dbias: bool = False,
    ) -> QuantizedParts:
        """x in FP8, its amax where scaling is delayed, and dbias where asked for.

        Args:
          role: of x.
          x: plain, or a QuantizedArray, which is returned as it is.
          state: of delayed scaling; None for other recipes.
          row_ndim, quantization, copies, amax_axis, with_dbias: see `te_jax.ops.quantize`.
        """
        if isinstance(x, QuantizedArray):
            return QuantizedParts(x, None, None)
        amax = self.reference_amax(state, role)
        parts = quantize_parts(
            differentiated_once(x, self.name),
            quantization,
            row_ndim=row_ndim,
            copies=copies,
            amax=None if amax is None else differentiated_once(amax, self.name),
            amax_axis=None if amax is not None else amax_axis,
            with_amax=amax is not None,
            with_dbias=with_dbias,
            implementation=None if self.by_kernels else "reference",
        )
        return parts._replace(array=fp8.checked(observed(role, x, parts.array), state, role))

    def reference_amax(self, state: DelayedScalingState | None, role: Role) -> Array | None:
        """The amax from which a scale follows where scaling is delayed."""
        if state is None:
            return None
        assert isinstance(self.recipe, DelayedScaling)
        return self.recipe.reference_amax(fp8.restored(getattr(state, role), state.uses))


Codecs = tuple[Codec, Codec, Codec]
"""Codecs of the three products: forward, dgrad, wgrad."""


def codecs_of(
    name: str,
    recipe: Recipe | None,
    implementation: native.Implementation | None,
    dtype: np.dtype,
    chosen: Callable[[Recipe | None], native.Implementation] | None = None,
) -> Codecs:
    """The codecs of a layer.

    Args:
      name: of the public function.
      recipe, implementation: of the layer.
      dtype: of its input.
      chosen: the implementation of products by a recipe, or of plain ones; None for those of one device.

    Raises:
      NativeUnavailableError: an implementation cannot run here, before anything warns.
    """

    def of_one_device(recipe: Recipe | None) -> native.Implementation:
        if recipe is not None:
            return implementation_for(implementation, recipe)
        return "native" if native.use_native(implementation, products=True) else "reference"

    def codec(one: Recipe | Fake | None) -> Codec:
        if isinstance(one, Fake):
            product = (chosen or of_one_device)(None)
            return Codec(name=name, recipe=one.recipe, implementation=product, is_read_back=True)
        product = (chosen or of_one_device)(one)
        # Without a recipe there is nothing to quantize, and products are native in more dtypes than quantization.
        named = None if one is None and product == "native" else implementation
        by_kernels = native.use_native(named, dtype=dtype)
        return Codec(name=name, recipe=one, implementation=product, by_kernels=by_kernels)

    recipes = dict.fromkeys(PRODUCTS) if recipe is None else recipe.by_product
    codecs = {one: codec(one) for one in dict.fromkeys(recipes.values())}
    return codecs[recipes["forward"]], codecs[recipes["dgrad"]], codecs[recipes["wgrad"]]


def plain(name: str) -> Codecs:
    """Codecs of products of plain operands, by XLA."""
    codec = Codec(name=name)
    return codec, codec, codec
