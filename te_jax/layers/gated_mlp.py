"""The arithmetic of gated MLPs: one call of `te_jax.ops.gated_mlp` or `te_jax.parallel.gated_mlp`."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec

from te_jax import ops, parallel
from te_jax.layers import linear
from te_jax.layers.microbatches import dense_kernels
from te_jax.layers.tensor_parallel import TensorAxis
from te_jax.quantized import Quantizable
from te_jax.reference.activation import Activation

_NAMES = ("gate_proj", "up_proj", "down_proj")


def gated_mlp(
    x: Quantizable,
    gate: linear.Layer,
    up: linear.Layer,
    down: linear.Layer,
    activation: Activation,
    *,
    dtype: jax.typing.DTypeLike | None,
    options: linear.Options,
    tensor: TensorAxis | None = None,
) -> Array:
    """The MLP of three layers, in the given dtype, or in what x, kernels and biases promote to. x may come in FP8.

    With a tensor axis devices have parts of the hidden features, and of the time of x and the result.
    """
    layers = gate, up, down
    dtype = linear.result_dtype(dtype, x, *(array for layer in layers for array in (layer.kernel, layer.bias)))
    states = tuple(layer.scaling_state for layer in layers if layer.scaling_state is not None)
    x = linear.cast(x, dtype)
    kernels = [layer.kernel for layer in layers]
    arguments = dense_kernels(kernels) if tensor is None else tensor.dense_kernels(kernels, x)
    arguments |= {"bias": tuple(layer.bias for layer in layers), "scaling_state": states or None}
    if tensor is None:
        return ops.gated_mlp(x, activation=activation, **arguments, **vars(options))
    accumulate = arguments.pop("accumulate")

    def local(x: Quantizable, arguments: dict[str, Any]) -> Array:
        return parallel.gated_mlp(
            x,
            axis_name=tensor.name,
            activation=activation,
            recipe=options.recipe,
            accumulate=accumulate,
            transport=tensor.transport,
            residual=tensor.residual,
            implementation=options.implementation,
            **arguments,
        )

    rows, columns = PartitionSpec(tensor.name), PartitionSpec(None, tensor.name)
    by_layer = columns, columns, rows
    specs = {
        "kernel": tuple(map(tensor.specs, _NAMES, arguments["kernel"], by_layer)),
        "wgrad_accumulator": by_layer,
        "bias": (rows, rows, PartitionSpec()),
        "scaling_state": PartitionSpec(),
    }
    stream = tensor.stream_spec(x)
    return tensor.call(local, (x, arguments), (tensor.specs("x", x, stream), specs), stream)
