"""Gated MLPs of experts with block scaling: `grouped_dense`, a gated activation and `grouped_dense`, in fewer passes.

Tokens are gathered where they are quantized, the activation multiplies the weights of rows and writes FP8, and the
backward pass does the same: of arrays [rows, features], only gate, up, the gradient of the activation, y and the
gradient of the rows lie in memory in their own dtype.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from te_jax import native, sharding
from te_jax._core import observe
from te_jax._core.arguments import as_flag
from te_jax._core.reverse_mode import reverse_mode_only
from te_jax.ops.grouped_dense import as_kernels, validate_kernel, validate_rows
from te_jax.ops.linear.arguments import KernelContracting, named_weights
from te_jax.ops.linear.gated import GatedMLP, gated
from te_jax.ops.linear.grouped import NAME, REVERSE_MODE, GatheredProducts, Groups, ScatteredProducts, grouped_codecs
from te_jax.ops.linear.rule import traced
from te_jax.ops.linear.weight import Weight
from te_jax.ops.permute import Permutation, permute_weights
from te_jax.quantized import facts_of
from te_jax.recipe import ProductRecipes, Recipe
from te_jax.reference.activation import Activation

__all__ = ["experts_mlp", "is_fused"]


def is_fused(recipe: Recipe | None) -> bool:
    """Whether `experts_mlp` takes this recipe, and there is no h to observe, which it does not have as it is."""
    if observe.requested() is not None:
        return False
    return (
        isinstance(recipe, Recipe)
        and not isinstance(recipe, ProductRecipes)
        and all(facts_of(each).native_blocks for role in ("activation", "gradient") for each in recipe.scalings[role])
    )


def experts_mlp(
    x: Array,
    weights: Array,
    group_sizes: Array,
    permutation: Permutation | None,
    kernel: tuple[Any, Any, Any],
    *,
    activation: Activation,
    recipe: Recipe,
    kernel_contracting: KernelContracting = "first",
    wgrad_accumulator: tuple[jax.typing.ArrayLike | None, ...],
    accumulate: bool,
    implementation: native.Implementation | None,
) -> Array:
    """y = Σ_k h_k · down with h = w f(x · gate) (x · up), over the choices k of each token.

    It computes the same as these lines, with fewer passes over memory, and h is rounded once:

        rows = permute(x, permutation)
        gate, up = grouped_dense(rows, (gate, up), group_sizes, …)
        h = gated_activation(gate, up, activation) * permute_weights(weights, permutation)[:, None]
        y = unpermute(grouped_dense(h, down, group_sizes, …), permutation)

    The residuals are x, weights, gate and up ("te_moe_preactivation"), and the kernels in FP8 ("te_dense_kernel").

    Args:
      x: [*tokens, in], float32, bfloat16 or float16; without a permutation the rows themselves, [rows, in], whose
        rows of no expert are not read.
      weights: [*tokens, top_k], any float dtype, from `router`; without a permutation those of rows, [rows].
      group_sizes: integers [experts], multiples of 128.
      permutation: with these sizes, or None.
      kernel: (gate, up, down), as in `grouped_dense`, as are all other arguments but activation.
      activation: of the experts, as in `gated_activation`.
      recipe: one that `is_fused`.

    Returns:
      [*tokens, out], or without a permutation [rows, out], in the dtype of x.

    Raises:
      ValueError, NotImplementedError, NativeUnavailableError: as `grouped_dense`.
    """
    layers = named_weights(kernel, None, None, wgrad_accumulator, as_kernels)
    kernels = tuple(weight.kernel for weight in layers.values())
    count = x.shape[0] if permutation is None else permutation.choices.shape[0]
    rows: Any = jax.ShapeDtypeStruct((count, x.shape[-1]), x.dtype)
    gate, up, _ = kernels
    if gate.shape != up.shape:
        raise ValueError(
            f"kernel[1] has shape {up.shape}, but kernel[0] has {gate.shape}; gate and up must have the same"
        )
    validate_rows(recipe, rows)
    width = gate.shape[-1 if kernel_contracting == "first" else 1]
    hidden: Any = jax.ShapeDtypeStruct((rows.shape[0], width), x.dtype)
    for operand, (name, weight) in zip((rows, rows, hidden), layers.items(), strict=True):
        validate_kernel(operand, group_sizes, recipe, kernel_contracting, name, weight)
    static: Any = {
        "name": NAME,
        "codecs": grouped_codecs(recipe, implementation, rows, kernels),
        "accumulate": as_flag("accumulate", accumulate),
        "kernel_contracting": kernel_contracting,
        "dtype": np.dtype(x.dtype),
    }
    mlp = GatedMLP(GatheredProducts(**static), ScatteredProducts(**static), activation, "te_moe_preactivation")
    x, weights, each = reverse_mode_only((x, weights, tuple(layers.values())), REVERSE_MODE)
    return traced(_multiplied, mlp, *sharding.varying_together((x, weights, each, Groups(group_sizes, permutation))))


def _multiplied(mlp: GatedMLP, x: Array, weights: Array, layers: tuple[Weight, ...], groups: Groups) -> Array:
    of_rows = weights if groups.permutation is None else permute_weights(weights, groups.permutation)
    return gated(mlp, x, None, of_rows.astype(jnp.float32), layers, groups)
