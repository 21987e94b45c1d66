"""Arguments of the operations with an output head: checked, and made one static value."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from te_jax import native, sharding
from te_jax._core.arguments import as_flag, is_whole_number
from te_jax._core.reverse_mode import reverse_mode_only
from te_jax.ops.head.rows import Head, Rows
from te_jax.ops.linear import fp8
from te_jax.ops.linear.accumulator import validate_accumulator
from te_jax.ops.linear.arguments import KernelContracting, implementation_for
from te_jax.ops.linear.codec import codecs_of
from te_jax.ops.linear.local import LocalProducts
from te_jax.ops.operands import as_array
from te_jax.quantized import facts_of_recipe
from te_jax.recipe import PRODUCTS, DelayedScaling, Product, ProductRecipes, Recipe

_Tree = TypeVar("_Tree")

_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


class HeadOperands(NamedTuple):
    """Arrays of a head."""

    x: Array
    kernel: Array
    bias: Array | None
    accumulator: Array | None

    @classmethod
    def of(
        cls,
        x: jax.typing.ArrayLike,
        kernel: jax.typing.ArrayLike,
        bias: jax.typing.ArrayLike | None = None,
        accumulator: jax.typing.ArrayLike | None = None,
        *,
        kernel_contracting: KernelContracting,
        weight: Array | None = None,
        whose: str = "",
    ) -> HeadOperands:
        """Raises ValueError unless they fit each other; `whose` stands before the names of x and kernel."""
        x_name, kernel_name = f"{whose}x", f"{whose}kernel"
        x, kernel = as_array(x_name, x), as_array(kernel_name, kernel)
        bias = None if bias is None else as_array("bias", bias)
        accumulator = None if accumulator is None else as_array("wgrad_accumulator", accumulator)
        if kernel_contracting not in ("first", "last"):
            raise ValueError(f"kernel_contracting is {kernel_contracting!r}; it must be 'first' or 'last'")
        if x.ndim < 1 or kernel.ndim != 2:
            raise ValueError(
                f"{x_name} has shape {x.shape} and {kernel_name} {kernel.shape}; they must be [*batch, in] and [in, "
                "vocab], or [vocab, in] with kernel_contracting='last'"
            )
        width, vocab = kernel.shape if kernel_contracting == "first" else kernel.shape[::-1]
        if x.shape[-1] != width:
            remedy = ""
            if x.shape[-1] == vocab:
                other = "last" if kernel_contracting == "first" else "first"
                order = f"a kernel in this order with kernel_contracting={other!r}"
                remedy = f": pass hidden states, not logits, or {order}"
            raise ValueError(
                f"{kernel_name} has shape {kernel.shape}, whose {kernel_contracting} dimension is contracted; the last "
                f"one of {x_name} must be the same, and {x_name} has shape {x.shape}{remedy}"
            )
        if 0 in kernel.shape:
            raise ValueError(f"{kernel_name} has shape {kernel.shape}; only the batch may be empty")
        for name, a, shape in (
            (x_name, x, x.shape),
            (kernel_name, kernel, kernel.shape),
            ("bias", bias, (vocab,)),
            ("weight", weight, x.shape[:-1]),
            ("wgrad_accumulator", accumulator, kernel.shape),
        ):
            if a is None:
                continue
            if a.dtype not in _FLOATS:
                raise ValueError(f"{name} has dtype {a.dtype}; it must be float32, bfloat16 or float16: cast it")
            if a.shape != shape:
                raise ValueError(
                    f"{name} has shape {a.shape}; for {x_name} of shape {x.shape} and {kernel_name} of shape "
                    f"{kernel.shape} it must be {shape}"
                )
        return cls(x, kernel, bias, accumulator)


def head_of(
    name: str,
    rows: Rows,
    operands: HeadOperands,
    *,
    kernel_contracting: KernelContracting,
    recipe: Recipe | None,
    fp8_products: Collection[Product],
    chunk_tokens: int | None,
    implementation: native.Implementation | None,
    accumulate: bool = True,
) -> Head:
    """The static arguments of the operation `name`. Raises ValueError where one breaks a rule."""
    if chunk_tokens is not None and (not is_whole_number(chunk_tokens) or chunk_tokens < 1):
        raise ValueError(f"chunk_tokens is {chunk_tokens!r}; it must be a whole number of at least 1, or None")
    axes = rows.vocab_axis
    spec = f"P(None, {(axes[0] if len(axes) == 1 else axes)!r})" if axes else ""
    remedy = f"pass the device's shard of the vocabulary, by in_specs such as {spec}, or vocab_axis=None"
    sharding.validate_split("kernel", operands.kernel, axes, remedy, "vocab_axis")
    recipes = None if recipe is None else _recipes(recipe, fp8_products)
    by_kernels = native.use_native(implementation, dtype=operands.x.dtype)

    def chosen(recipe: Recipe | None) -> native.Implementation:
        if recipe is not None:
            return implementation_for(implementation, recipe)
        return "native" if by_kernels and native.use_native(None, products=True) else "reference"

    layer = LocalProducts(
        name=name,
        codecs=codecs_of(name, recipes, implementation, operands.x.dtype, chosen),
        dtype=np.dtype(operands.x.dtype),
        accumulate=as_flag("accumulate", accumulate),
        kernel_contracting=kernel_contracting,
    )
    return Head(rows, layer, None if chunk_tokens is None else int(chunk_tokens))


def _recipes(recipe: Recipe, products: Collection[Product]) -> Recipe:
    """Recipes of the three products."""
    fp8.validate_recipe(recipe)
    facts_of_recipe(recipe)  # refuses recipes of products
    if isinstance(recipe, DelayedScaling):
        raise ValueError(f"recipe is {recipe!r}, whose state a loss does not take; use BlockScaling or CurrentScaling")
    known = isinstance(products, tuple | list | set | frozenset) and set(products) <= set(PRODUCTS)
    if not known or not products:
        raise ValueError(f"fp8_products is {products!r}; it must be a tuple of one or more names out of {PRODUCTS}")
    return ProductRecipes(**dict.fromkeys(products, recipe))


def differentiated_once(name: str, operands: _Tree) -> _Tree:
    """Operands of an operation that takes tokens in chunks, by derivatives of its own."""
    return reverse_mode_only(
        operands,
        f"{name} with native kernels has first derivatives in reverse mode (jax.grad, jax.vjp) only: for forward mode "
        "(jax.jvp, jax.jacfwd) or second derivatives use implementation='reference'",
    )


def validate_accumulated_with(operands: HeadOperands, *per_token: Array | None) -> None:
    """Raises ValueError unless the accumulator, if there is one, lies as the gradient of the kernel does."""
    if operands.accumulator is not None:
        varying = sharding.varying_axes(operands.x, operands.kernel, operands.bias, *per_token)
        validate_accumulator("wgrad_accumulator", operands.accumulator, varying)
