"""The arithmetic of gated MLPs of Linen and NNX: one call of `te_jax.ops.gated_mlp`."""

from __future__ import annotations

import jax
from jax import Array

from te_jax import ops
from te_jax.layers import linear
from te_jax.layers.microbatches import dense_kernels
from te_jax.quantized import QuantizedArray
from te_jax.reference.activation import Activation


def gated_mlp(
    x: Array | QuantizedArray,
    gate: linear.Layer,
    up: linear.Layer,
    down: linear.Layer,
    activation: Activation,
    *,
    dtype: jax.typing.DTypeLike | None,
    options: linear.Options,
) -> Array:
    """The MLP of three layers, in the given dtype, or in what x, kernels and biases promote to. x may come in FP8."""
    layers = gate, up, down
    dtype = linear.result_dtype(dtype, x, *(array for layer in layers for array in (layer.kernel, layer.bias)))
    states = tuple(layer.scaling_state for layer in layers if layer.scaling_state is not None)
    return ops.gated_mlp(
        linear.cast(x, dtype),
        **dense_kernels([layer.kernel for layer in layers]),
        bias=tuple(layer.bias for layer in layers),
        activation=activation,
        scaling_state=states or None,
        **vars(options),
    )
