"""Einsums of an activation and a kernel in FP8."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array

from te_jax import native
from te_jax.ops.dense import dense
from te_jax.ops.linear.einsum import Einsum
from te_jax.ops.operands import as_array
from te_jax.quantized import QuantizedArray
from te_jax.recipe import DelayedScalingState, Recipe
from te_jax.sharding import AxisName

__all__ = ["einsum"]


def einsum(
    subscripts: str,
    x: jax.typing.ArrayLike,
    kernel: jax.typing.ArrayLike | QuantizedArray,
    bias: jax.typing.ArrayLike | None = None,
    *,
    recipe: Recipe | None = None,
    wgrad_accumulator: jax.typing.ArrayLike | None = None,
    accumulate: bool = True,
    scaling_state: DelayedScalingState | None = None,
    state_axis: AxisName | None = None,
    out_sharding: jax.NamedSharding | jax.P | None = None,
    implementation: native.Implementation | None = None,
) -> Array:
    """`jnp.einsum(subscripts, x, kernel) + bias` as a linear layer, whose three GEMMs run in FP8.

    It is `te_jax.ops.dense` with named dimensions. Dimensions that x, kernel and result share, such as experts, make a
    product of their own for each index.

    Args:
      subscripts: the dimensions of x, kernel and result, such as "btd,dhk->bthk". x and result may have an ellipsis. x
        and kernel share one or more dimensions that the result lacks, and the kernel has one or more that x lacks; the
        result has all others, in any order, and none comes twice.
      x: float32, bfloat16 or float16.
      kernel: as in `dense`, in any order of its dimensions. A QuantizedArray, or a kernel with an accumulator, needs
        those that all three share first, and the summed ones either behind these or last.
      bias: the dimensions that kernel and result share, in the order of the result.
      recipe, wgrad_accumulator, accumulate, scaling_state, state_axis, implementation: as in `dense`.
      out_sharding: of the result, as in `jnp.einsum`; for Explicit meshes.

    Returns:
      The result in the dtype of x.

    Raises:
      ValueError: the subscripts are those of another sum, or do not fit the shapes; and as `dense`.
      NotImplementedError, te_jax.native.NativeUnavailableError: as `dense`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from te_jax import ops, recipe
      >>> x, kernel = jnp.ones((2, 64, 32)), jnp.ones((4, 32, 16))
      >>> ops.einsum("btd,hdk->bthk", x, kernel, recipe=recipe.BlockScaling()).shape
      (2, 64, 4, 16)
    """
    x = as_array("x", x)
    bias = None if bias is None else as_array("bias", bias)
    if not isinstance(kernel, QuantizedArray):
        kernel = as_array("kernel", kernel)
    names = Einsum.parse(subscripts, kernel.shape, "subscripts")
    accumulator = None if wgrad_accumulator is None else as_array("wgrad_accumulator", wgrad_accumulator)
    in_order = isinstance(kernel, QuantizedArray) or accumulator is not None
    if in_order:
        _ = names.kernel_ndims  # raises

    def product(x: Array, kernel: Any, bias: Array | None, *, features: tuple[int, ...], **dimensions: Any) -> Array:
        del features
        kernel, accumulator = kernel if in_order else (kernel, None)
        return dense(
            x,
            kernel,
            bias,
            recipe=recipe,
            wgrad_accumulator=accumulator,
            accumulate=accumulate,
            scaling_state=scaling_state,
            state_axis=state_axis,
            implementation=implementation,
            **dimensions,
        )

    y = names.apply(product, x, (kernel, accumulator) if in_order else kernel, bias, in_order=in_order)
    return y if out_sharding is None else jax.reshard(y, out_sharding)
