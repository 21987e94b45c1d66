"""The arithmetic of linear layers: each layer becomes one call of `te_jax.ops.dense`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from te_jax import native, ops
from te_jax._core.arguments import as_dtype, is_whole_number
from te_jax._core.types import FLOAT_NAMES, FLOATS, PyTree
from te_jax.layers.microbatches import AccumulatedKernel, dense_kernels
from te_jax.layers.tensor_parallel import TensorAxis
from te_jax.ops.linear.arguments import KernelContracting
from te_jax.ops.linear.einsum import Einsum
from te_jax.ops.linear.fp8 import validate_recipe
from te_jax.ops.linear.kernels import quantize_kernel as _quantize_kernel
from te_jax.ops.linear.products import State
from te_jax.parallel.collective_matmul import all_gather_matmul, as_matrix, matmul_reduce_scatter
from te_jax.quantized import Quantizable, QuantizedArray
from te_jax.recipe import DelayedScalingState, Recipe
from te_jax.reference.activation import Activation, ActivationName
from te_jax.sharding import regrouped


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `te_jax.ops.dense` that layers have."""

    recipe: Recipe | None
    state_axis: str | tuple[str, ...] | None
    implementation: native.Implementation | None

    def __post_init__(self) -> None:
        if self.recipe is not None:
            validate_recipe(self.recipe)
        native.validate_implementation(self.implementation)


OutSharding = jax.NamedSharding | PartitionSpec | None


class Layer(NamedTuple):
    """The arrays of a linear layer."""

    kernel: Array | QuantizedArray | AccumulatedKernel
    bias: Array | None
    scaling_state: DelayedScalingState | None


def as_input(x: jax.typing.ArrayLike | QuantizedArray) -> Quantizable:
    """The input of a layer, which a norm may have handed over in FP8."""
    return x if isinstance(x, QuantizedArray) else jnp.asarray(x)


def as_array(name: str, x: jax.typing.ArrayLike | QuantizedArray) -> Array:
    """An input that cannot come in FP8, called by its name in the error."""
    if isinstance(x, QuantizedArray):
        raise ValueError(f"{name} is a QuantizedArray, which linear layers take, and not this one: pass its values")
    return jnp.asarray(x)


def cast(x: Quantizable, dtype: jax.typing.DTypeLike) -> Quantizable:
    """x in another dtype; a QuantizedArray that stands for an array in it."""
    if not isinstance(x, QuantizedArray):
        return x.astype(dtype)
    through = None if x.straight_through is None else x.straight_through.astype(dtype)
    return dataclasses.replace(x, dtype=jnp.dtype(dtype), straight_through=through)


def linear(
    x: Quantizable,
    kernel: Array | QuantizedArray | AccumulatedKernel,
    bias: Array | None,
    scaling_state: DelayedScalingState | None,
    *,
    axis: tuple[int, ...],
    features: tuple[int, ...],
    dtype: jax.typing.DTypeLike | None,
    activation: Activation | ActivationName | None,
    options: Options,
) -> Array:
    """activation(x · kernel + bias), contracting the dimensions `axis` of x with the first ones of the kernel.

    y [*other dimensions of x, *features] has the given dtype, or what x, kernel and bias promote to. The kernel is
    quantized from its own dtype. An x in FP8 is contracted over its last dimension.
    """
    if isinstance(x, QuantizedArray):
        if axis != (x.ndim - 1,) or activation is not None:
            raise ValueError(
                f"inputs are a QuantizedArray, and the layer has axis {axis} and activation {activation!r}; it takes "
                "them with axis=-1 and activation=None"
            )
        layer = Layer(kernel, bias, scaling_state)
        return linears(x, (layer,), features=(features,), dtype=dtype, options=options)[0]
    x = _contracted_last(x.astype(result_dtype(dtype, x, kernel, bias)), axis)
    return _dense(
        x,
        kernel,
        bias,
        scaling_state=scaling_state,
        contracting_ndim=len(axis),
        features=features,
        activation=activation,
        options=options,
    )


def linears(
    x: Quantizable,
    layers: Sequence[Layer],
    *,
    features: Sequence[tuple[int, ...]],
    dtype: jax.typing.DTypeLike | None,
    options: Options,
    tensor: TensorAxis | None = None,
) -> tuple[Array, ...]:
    """x · kernel + bias of several layers that share one quantized x, contracting its last dimension.

    Each result [*other dimensions of x, *features] has the given dtype, or what x, kernels and biases promote to. x may
    come in FP8. With a tensor axis the time of x is split over devices, and kernels, biases and results are along the
    first of a layer's features.
    """
    dtype = result_dtype(dtype, x, *(array for layer in layers for array in (layer.kernel, layer.bias)))
    x = cast(x, dtype)
    if tensor is not None:
        return _gathered_linears(x, layers, features, options, tensor)
    kernels = dense_kernels([layer.kernel for layer in layers])
    columns = [
        kernel.shape[kernel.row_ndim :] if isinstance(kernel, QuantizedArray) else sizes
        for kernel, sizes in zip(kernels["kernel"], features, strict=True)
    ]
    biases = tuple(
        None if layer.bias is None else regrouped(layer.bias, (sizes,), (cols,))
        for layer, sizes, cols in zip(layers, features, columns, strict=True)
    )
    states = tuple(layer.scaling_state for layer in layers if layer.scaling_state is not None)
    ys = ops.dense(x, bias=biases, **kernels, scaling_state=states or None, **vars(options))
    batch = x.shape[:-1]
    return tuple(
        regrouped(y, (batch, cols), (batch, sizes)) for y, cols, sizes in zip(ys, columns, features, strict=True)
    )


def _gathered_linears(
    x: Quantizable,
    layers: Sequence[Layer],
    features: Sequence[tuple[int, ...]],
    options: Options,
    tensor: TensorAxis,
) -> tuple[Array, ...]:
    """`linears` of an x [*batch, time, in] whose time is split over devices."""
    arguments = tensor.dense_kernels([layer.kernel for layer in layers], x)
    accumulate = arguments["accumulate"]
    parts = [(first // tensor.size, *others) for first, *others in features]

    def local(x: Quantizable, kernels: PyTree, accumulators: PyTree, biases: PyTree, states: PyTree):
        columns = [kernel.shape[1:] for kernel in kernels]
        for kernel, cols, sizes in zip(kernels, columns, parts, strict=True):
            if math.prod(cols) != math.prod(sizes):
                raise ValueError(
                    f"a kernel has shape {kernel.shape} inside shard_map, where it must be this device's part with "
                    f"{sizes} features: pass it in with the PartitionSpec that its metadata gives"
                )
        ys = all_gather_matmul(
            x,
            kernels,
            axis_name=tensor.name,
            bias=tuple(b if b is None else b.reshape(cols) for b, cols in zip(biases, columns, strict=True)),
            recipe=options.recipe,
            scaling_state=states,
            wgrad_accumulator=accumulators,
            accumulate=accumulate,
            transport=tensor.transport,
            residual=tensor.residual,
            implementation=options.implementation,
        )
        return tuple(y.reshape(*y.shape[: x.ndim - 1], *sizes) for y, sizes in zip(ys, parts, strict=True))

    kernels = arguments["kernel"]
    columns = PartitionSpec(None, tensor.name)
    of_kernels = tuple(tensor.specs("kernel", kernel, columns) for kernel in kernels)
    stream = tensor.stream_spec(x)
    in_specs = tensor.specs("x", x, stream), of_kernels, columns, PartitionSpec(tensor.name), PartitionSpec()
    outs = PartitionSpec(*stream[:-1], None, tensor.name)
    states = tuple(layer.scaling_state for layer in layers if layer.scaling_state is not None)
    operands = x, kernels, arguments["wgrad_accumulator"], tuple(layer.bias for layer in layers)
    return tensor.call(local, (*operands, states or None), in_specs, outs)


def gathered_linear(
    x: Quantizable,
    layer: Layer,
    features: tuple[int, ...],
    activation: Activation | ActivationName | None,
    dtype: jax.typing.DTypeLike | None,
    options: Options,
    tensor: TensorAxis,
) -> Array:
    """`linears` of one layer with a tensor axis, and its activation."""
    (y,) = linears(x, (layer,), features=(features,), dtype=dtype, options=options, tensor=tensor)
    return y if activation is None else ops.activation(y, activation)


def scattered_linear(
    x: Array,
    layer: Layer,
    *,
    axis: tuple[int, ...],
    features: tuple[int, ...],
    dtype: jax.typing.DTypeLike | None,
    options: Options,
    tensor: TensorAxis | None = None,
) -> Array:
    """`linear` over the last dimensions `axis` of an x [*batch, time, *in].

    With a tensor axis the first of these is split over devices, and kernels are along the first of their rows. In the
    result the time is.
    """
    if tensor is None:
        return linear(x, *layer, axis=axis, features=features, dtype=dtype, activation=None, options=options)
    dtype = result_dtype(dtype, x, layer.kernel, layer.bias)
    arguments = tensor.dense_kernels([layer.kernel], x)
    accumulate = arguments["accumulate"]
    (kernel,), (accumulator,) = arguments["kernel"], arguments["wgrad_accumulator"]

    def local(x: Array, kernel: Quantizable, accumulator: Array | None, bias: Array | None, state: State):
        batch, rows, cols = x.shape[: axis[0]], math.prod(x.shape[axis[0] :]), math.prod(features)
        y = matmul_reduce_scatter(
            x.reshape(*batch, rows),
            as_matrix(kernel, rows, cols) if isinstance(kernel, QuantizedArray) else kernel.reshape(rows, cols),
            axis_name=tensor.name,
            bias=None if bias is None else bias.reshape(cols),
            recipe=options.recipe,
            scaling_state=state,
            wgrad_accumulator=None if accumulator is None else accumulator.reshape(rows, cols),
            accumulate=accumulate,
            transport=tensor.transport,
            implementation=options.implementation,
        )
        return y.reshape(*y.shape[:-1], *features)

    rows = PartitionSpec(tensor.name)
    batch = PartitionSpec(tensor.batch_axes(x) or None, *(None,) * (axis[0] - 1))
    in_specs = PartitionSpec(*batch, tensor.name), tensor.specs("kernel", kernel, rows), rows, PartitionSpec()
    operands = x.astype(dtype), kernel, accumulator, layer.bias, layer.scaling_state
    return tensor.call(local, operands, (*in_specs, PartitionSpec()), PartitionSpec(*batch[:-1], tensor.name))


def einsum(
    names: Einsum,
    x: Array,
    kernel: Array | QuantizedArray | AccumulatedKernel,
    bias: Array | None,
    scaling_state: DelayedScalingState | None,
    *,
    dtype: jax.typing.DTypeLike | None,
    options: Options,
) -> Array:
    """The einsum of inputs and kernel, plus bias.

    The dtype of the result, and the kernel's quantization, are as in `linear`.
    """

    def product(x: Array, kernel: Any, bias: Array | None, **arguments: Any) -> Array:
        return _dense(x, kernel, bias, scaling_state=scaling_state, options=options, **arguments)

    x = x.astype(result_dtype(dtype, x, kernel, bias))
    in_order = isinstance(kernel, QuantizedArray | AccumulatedKernel)  # `kernel_ndims` has checked these
    return names.apply(product, x, kernel, bias, in_order=in_order)


def dot_general(
    lhs: Array,
    rhs: Array,
    dimension_numbers: tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]],
    scaling_state: DelayedScalingState | None,
    *,
    preferred_element_type: jax.typing.DTypeLike | None,
    out_sharding: OutSharding,
    options: Options,
) -> Array:
    """`jax.lax.dot_general` of an activation and a kernel, without batch dimensions."""
    try:
        (lhs_axes, rhs_axes), (lhs_batch, rhs_batch) = (map(tuple, pair) for pair in dimension_numbers)
    except (TypeError, ValueError):
        raise ValueError(
            f"dimension_numbers is {dimension_numbers!r}; it must be ((dimensions of lhs, dimensions of rhs), "
            "((), ())), as jax.lax.dot_general has it"
        ) from None
    if preferred_element_type is not None and options.recipe is not None:
        preferred_element_type = as_float("preferred_element_type", preferred_element_type)
    if lhs_batch or rhs_batch:
        raise ValueError(
            f"dimension_numbers is {dimension_numbers}; batch dimensions are not supported: "
            "use jax.vmap, or jax.lax.dot_general for products of two activations"
        )
    lhs_axes = normalize_axes("dimension_numbers", lhs_axes, lhs.ndim)
    rhs_axes = normalize_axes("dimension_numbers", rhs_axes, rhs.ndim)
    if [lhs.shape[i] for i in lhs_axes] != [rhs.shape[i] for i in rhs_axes]:
        raise ValueError(
            f"dimension_numbers is {dimension_numbers}; it contracts dimensions of different sizes: "
            f"lhs has shape {lhs.shape} and rhs {rhs.shape}"
        )
    rhs_axes, lhs_axes = zip(*sorted(zip(rhs_axes, lhs_axes, strict=True)), strict=True)
    others = _others(rhs_axes, rhs.ndim)
    last = rhs_axes == tuple(range(rhs.ndim - len(rhs_axes), rhs.ndim))
    y = _dense(
        _contracted_last(lhs, lhs_axes),
        rhs if last else _moved(rhs, (*rhs_axes, *others)),
        None,
        scaling_state=scaling_state,
        contracting_ndim=len(rhs_axes),
        features=tuple(rhs.shape[i] for i in others),
        kernel_contracting="last" if last else "first",
        options=options,
    )
    y = y if preferred_element_type is None else y.astype(preferred_element_type)
    return y if out_sharding is None else jax.reshard(y, out_sharding)


def _dense(
    x: Array,
    kernel: Array | QuantizedArray | AccumulatedKernel,
    bias: Array | None,
    *,
    scaling_state: DelayedScalingState | None,
    contracting_ndim: int,
    features: tuple[int, ...],
    kernel_contracting: KernelContracting = "first",
    activation: Activation | ActivationName | None = None,
    options: Options,
) -> Array:
    """`te_jax.ops.dense`, also with a quantized kernel, which may have fewer dimensions (`quantize_kernel`)."""
    arguments = dense_kernels([kernel])
    (operand,), (accumulator,) = arguments["kernel"], arguments["wgrad_accumulator"]
    batch, inner = x.shape[: x.ndim - contracting_ndim], x.shape[x.ndim - contracting_ndim :]
    if isinstance(operand, QuantizedArray):
        rows, cols = operand.shape[: operand.row_ndim], operand.shape[operand.row_ndim :]
        if kernel_contracting == "last":
            rows, cols = cols, rows
        if math.prod(inner) != math.prod(rows):
            raise ValueError(
                f"inputs have sizes {inner} along the contracted axes; the quantized kernel has {rows} there"
            )
        x = regrouped(x, (batch, inner), (batch, rows))
        bias = None if bias is None else regrouped(bias, (features,), (cols,))
        contracting_ndim = len(rows)
    y = ops.dense(
        x,
        operand,
        bias,
        contracting_ndim=contracting_ndim,
        kernel_contracting=kernel_contracting,
        activation=activation,
        wgrad_accumulator=accumulator,
        accumulate=arguments["accumulate"],
        scaling_state=scaling_state,
        **vars(options),
    )
    return regrouped(y, (batch, y.shape[len(batch) :]), (batch, features))


def quantize_kernel(kernel: Array, row_ndim: int, col_ndim: int, options: Options) -> QuantizedArray:
    """Both copies of a kernel [*stacked, *rows, *cols], possibly with fewer dimensions in rows and cols."""
    assert options.recipe is not None
    return _quantize_kernel(
        kernel,
        options.recipe,
        row_ndim=row_ndim,
        stacked_ndim=kernel.ndim - row_ndim - col_ndim,
        implementation=options.implementation,
    )


def as_tuple(value: int | Iterable[int]) -> tuple[int, ...]:
    """One number or several, as several."""
    return tuple(value) if isinstance(value, Iterable) else (value,)


def normalize_axes(name: str, axes: Iterable[int], ndim: int) -> tuple[int, ...]:
    """Axes counted from the front, in the order given."""
    axes = tuple(axes)
    if axes and all(is_whole_number(axis) and -ndim <= axis < ndim for axis in axes):
        positive = tuple(int(axis) % ndim for axis in axes)
        if len(set(positive)) == len(axes):
            return positive
    raise ValueError(
        f"{name} is {axes}; for an input with {ndim} dimensions it must name different ones of them, at least one, by "
        f"integers in [{-ndim}, {ndim - 1}]"
    )


def sizes(name: str, value: int | Iterable[int]) -> tuple[int, ...]:
    """Numbers of features, one or several."""
    features = as_tuple(value)
    if not features or not all(is_whole_number(size) and size >= 1 for size in features):
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1, or several")
    return tuple(map(int, features))


def result_dtype(dtype: jax.typing.DTypeLike | None, *arrays: Any) -> jax.typing.DTypeLike:
    """The dtype that a layer computes in: the given one, or what its arrays promote to, of which some may be None."""
    if dtype is not None:
        return as_float("dtype", dtype)
    given = [x.kernel if isinstance(x, AccumulatedKernel) else x for x in arrays if x is not None]
    dtype = jnp.result_type(*(x.dtype if isinstance(x, QuantizedArray) else x for x in given))
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.float32


def as_float(name: str, dtype: jax.typing.DTypeLike) -> jax.typing.DTypeLike:
    """The dtype of a layer.

    Raises:
      ValueError: it is none of those that layers compute in, naming the argument.
    """
    if dtype in (float, jnp.float64):  # names of float32 where there are no 64 bits
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return as_dtype(f"{name} is", dtype, FLOATS, FLOAT_NAMES)


def _contracted_last(x: Array, axes: tuple[int, ...]) -> Array:
    return _moved(x, (*_others(axes, x.ndim), *axes))


def _others(axes: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    return tuple(axis for axis in range(ndim) if axis not in axes)


def _moved(x: Array, order: tuple[int, ...]) -> Array:
    return x if order == tuple(range(x.ndim)) else x.transpose(order)
