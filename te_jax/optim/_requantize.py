"""New parameters, and at once what the next forward pass reads of them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
from jax import Array

from te_jax._core.types import PyTree
from te_jax.ops.linear.kernels import Requantize, quantize_kernel
from te_jax.quantized import QuantizedArray, facts_of


def apply_updates(params: PyTree, updates: PyTree, *, requantize: PyTree = None) -> PyTree:
    """`optax.apply_updates`, which with `requantize` also returns the kernels of the next forward pass in FP8.

    With per-tensor scaling, the loop that computes the new kernel also takes its amax, so quantization reads the kernel
    once and not twice.

    Args:
      params: the optimizer's own parameters, of any dtype that it takes; kernels to quantize must be float32, bfloat16
        or float16.
      updates: from the optimizer.
      requantize: of the structure of `params`, or the beginning of it, with a `Requantize` or None at its leaves; None
        leaves parameters as they are.

    Returns:
      The new parameters; with `requantize` (parameters, kernels), where kernels has a
      `te_jax.quantized.QuantizedArray` with both copies for each kernel that is quantized and None elsewhere, so that a
      step can donate both. Pass `merge_kernels(params, kernels)` to layers that are called several times, for
      microbatches; they then quantize nothing. Where blocks do not divide the last dimension of rows or cols, these are
      one dimension in the QuantizedArray, as `quantize_kernels` of te_jax.flax and te_jax.nnx has it: their layers take
      either.

    Raises:
      ValueError: `requantize` does not fit, or a kernel cannot be quantized in this way.

    Examples:
      >>> import jax.numpy as jnp, te_jax.optim
      >>> from te_jax.recipe import CurrentScaling
      >>> params = {"kernel": jnp.ones((16, 32)), "bias": jnp.zeros(32)}
      >>> how = {"kernel": te_jax.optim.Requantize(CurrentScaling()), "bias": None}
      >>> params, kernels = te_jax.optim.apply_updates(params, params, requantize=how)
      >>> kernels["kernel"].transposed.shape, kernels["bias"]
      ((32, 16), None)
    """
    with jax.numpy_dtype_promotion("standard"):  # float32 updates of 16-bit parameters
        new = optax.apply_updates(params, updates)
    if requantize is None:
        return new

    def quantized(how: Requantize | None, part: PyTree) -> PyTree:
        if how is not None and not isinstance(how, Requantize):
            raise ValueError(f"requantize has {how!r} at a leaf: it must be a Requantize, or None")
        return jax.tree.map((lambda _: None) if how is None else functools.partial(_quantized, how), part)

    try:
        parts = jax.tree.map(lambda _, part: part, requantize, new, is_leaf=lambda x: x is None)
    except ValueError as error:
        raise ValueError(f"requantize must have the structure of params, or the beginning of it: {error}") from error
    return new, jax.tree.map(quantized, requantize, parts, is_leaf=lambda x: x is None)


def merge_kernels(params: PyTree, kernels: PyTree) -> PyTree:
    """Puts quantized kernels in the place of their parameters, for layers to read.

    Args:
      params: the parameters.
      kernels: those that `apply_updates` quantized, with None elsewhere.

    Returns:
      A tree of the structure of `params`.

    Raises:
      ValueError: `kernels` has another structure than `params`.

    Examples:
      >>> import jax, jax.numpy as jnp, te_jax.optim
      >>> from te_jax.recipe import CurrentScaling
      >>> params = {"kernel": jnp.ones((16, 32)), "bias": jnp.zeros(32)}
      >>> how = {"kernel": te_jax.optim.Requantize(CurrentScaling()), "bias": None}
      >>> no_updates = jax.tree.map(jnp.zeros_like, params)
      >>> params, kernels = te_jax.optim.apply_updates(params, no_updates, requantize=how)
      >>> operands = te_jax.optim.merge_kernels(params, kernels)
      >>> operands["kernel"] is kernels["kernel"], operands["bias"] is params["bias"]
      (True, True)
    """
    try:
        return jax.tree.map(lambda param, kernel: param if kernel is None else kernel, params, kernels)
    except ValueError as error:
        raise ValueError(
            f"kernels must have the structure of params, as apply_updates(params, …, requantize=…) returns it: {error}"
        ) from error


def _quantized(how: Requantize, kernel: Array) -> QuantizedArray:
    if how.row_ndim >= kernel.ndim - how.stacked_ndim:
        raise ValueError(
            f"requantize has row_ndim={how.row_ndim} and stacked_ndim={how.stacked_ndim} for a kernel of shape "
            f"{kernel.shape}; rows and cols need a dimension each: use None for what is no kernel"
        )
    amax = None
    if facts_of(how.recipe.quantization("kernel").scaling).by_tensor:
        kernel_axes = tuple(range(how.stacked_ndim, kernel.ndim))
        amax = jnp.max(jnp.abs(kernel), axis=kernel_axes, initial=0).astype(jnp.float32)
    return quantize_kernel(
        kernel,
        how.recipe,
        row_ndim=how.row_ndim,
        stacked_ndim=how.stacked_ndim,
        amax=amax,
        implementation=how.implementation,
    )
