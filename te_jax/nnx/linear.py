"""Linear layers for NNX, and a `dot_general` for layers that others wrote."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import variablelib
from jax import Array

from te_jax import native
from te_jax.layers import delayed_scaling, linear
from te_jax.layers.tensor_parallel import TensorAxis
from te_jax.nnx.variables import OverwriteWithGradient
from te_jax.quantized import QuantizedArray
from te_jax.recipe import DelayedScaling, DelayedScalingState, Recipe
from te_jax.sharding import AxisName, axes_of_entry, current_mesh

Initializer = Callable[..., Any]


class LinearGeneral(nnx.Module):
    """A linear layer over any dimensions, in FP8 with a recipe: y = activation(x · kernel + bias).

    Parameters have the names, shapes and initial values of `flax.nnx.LinearGeneral`. `DelayedScaling` adds state in
    variables of type `OverwriteWithGradient`.

    Args:
      in_features: number of input features, or several numbers, one for each axis in ascending order.
      out_features: number of output features, or several numbers.
      axis: dimension of the input that is contracted, or several; they are taken in ascending order.
      use_bias: whether to add a bias.
      dtype: of the computation and of y: float32, bfloat16 or float16. None is what input and parameters promote to.
      param_dtype: of the parameters.
      kernel_init, bias_init: initializers; like Flax's they see the kernel as a matrix and the bias as a vector.
      kernel_metadata, bias_metadata: metadata of the parameters, such as {"out_sharding": ("embed", "mlp")}.
      recipe: how to quantize (`te_jax.recipe`), or None to compute in `dtype`.
      activation: None, or as in `te_jax.ops.activation`.
      state_axis: inside `pmap`, or `shard_map` with check_vma=False, the mesh axes over which the state of
        `DelayedScaling` is the same; None elsewhere.
      implementation: None takes native kernels where they are installed, else the reference. On a GPU that cannot
        multiply as the recipe says it raises instead of being slow. "native" or "reference" never fall back.
      rngs: `nnx.Rngs`, of which "params" is used.

    Raises:
      ValueError: features are not positive integers, or in_features and axis differ in number.
    """

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int | Sequence[int],
        *,
        axis: int | Sequence[int] = -1,
        use_bias: bool = True,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        kernel_init: Initializer = nnx.initializers.lecun_normal(),
        bias_init: Initializer = nnx.initializers.zeros_init(),
        kernel_metadata: Mapping[str, Any] | None = None,
        bias_metadata: Mapping[str, Any] | None = None,
        recipe: Recipe | None = None,
        activation: linear.Activation | linear.ActivationName | None = None,
        state_axis: str | tuple[str, ...] | None = None,
        implementation: native.Implementation | None = None,
        rngs: nnx.Rngs,
    ):
        rows, cols = linear.sizes("in_features", in_features), linear.sizes("out_features", out_features)
        self.in_features: int | tuple[int, ...] = rows
        self.out_features: int | tuple[int, ...] = cols
        self.axis = linear.as_tuple(axis)
        if len(rows) != len(self.axis):
            raise ValueError(
                f"in_features is {rows} and axis is {self.axis}; they must have the same number of entries"
            )
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.activation: linear.Activation | linear.ActivationName | None = activation
        self.options = linear.Options(recipe, state_axis, implementation)

        matrix = (math.prod(rows), math.prod(cols))
        kernel = _reshaped(kernel_init(rngs.params(), matrix, param_dtype), (*rows, *cols))
        self.kernel: nnx.Variable = nnx.Param(kernel, **(kernel_metadata or {}))
        self.bias: nnx.Param | None
        if use_bias:
            bias = _reshaped(bias_init(rngs.params(), matrix[1:], param_dtype), cols)
            self.bias = nnx.Param(bias, **(bias_metadata or {}))
        else:
            self.bias = nnx.data(None)
        _add_scaling_state(self, recipe)

    def __call__(self, inputs: jax.typing.ArrayLike | QuantizedArray, out_sharding: linear.OutSharding = None) -> Array:
        """Applies the layer.

        Args:
          inputs: floating point, with the dimensions `axis` of sizes in_features; or with axis=-1 a QuantizedArray from
            a norm.
          out_sharding: of the result, on Explicit meshes.

        Returns:
          [*other dimensions of the inputs, *out_features].

        Raises:
          ValueError: for axes, shapes or dtypes that do not fit, naming the argument.
        """
        inputs = linear.as_input(inputs)
        y = linear.linear(
            inputs,
            *self.held(),
            axis=tuple(sorted(linear.normalize_axes("axis", self.axis, inputs.ndim))),
            features=linear.as_tuple(self.out_features),
            dtype=self.dtype,
            activation=self.activation,
            options=self.options,
        )
        return y if out_sharding is None else jax.reshard(y, out_sharding)

    def held(self) -> linear.Layer:
        """The values of its variables, for modules that run several layers as one operation."""
        return _held(self)


class Linear(LinearGeneral):
    """`LinearGeneral` over the last dimension, with the parameters and attributes of `flax.nnx.Linear`.

    Args:
      in_features, out_features: numbers of features.
      arguments: those of `LinearGeneral`.
    """

    def __init__(self, in_features: int, out_features: int, **arguments: Any):
        for name, value in (("in_features", in_features), ("out_features", out_features)):
            if isinstance(value, Iterable):
                raise ValueError(f"{name} is {value!r}; Linear takes one number: use LinearGeneral for several")
        super().__init__(in_features, out_features, **arguments)
        self.in_features, self.out_features = in_features, out_features


class Einsum(nnx.Module):
    """The einsum of an input and a kernel, in FP8 with a recipe, plus a bias: `flax.nnx.Einsum` on te_jax's products.

        layer = Einsum("btd,dhk->bthk", (64, 4, 32), (4, 32), recipe=CurrentScaling(), rngs=nnx.Rngs(0))

    Parameters have the names, shapes and initial values of `flax.nnx.Einsum`. The input is always quantized as the
    activation. If input, kernel and result share a dimension, such as that of experts, each of its indices is a
    separate product, with separate scales.

    Args:
      einsum_str: names the dimensions of input, kernel and result; None to pass it to the call. The kernel must share
        one with the input alone and one with the result alone. Input and result may have an ellipsis.
      kernel_shape: of the kernel.
      bias_shape: sizes of the dimensions that kernel and result share, in the order of the result; None for no bias.
      dtype, param_dtype, recipe, state_axis, implementation, rngs: as in `LinearGeneral`.
      kernel_init, bias_init, kernel_metadata, bias_metadata: as in `LinearGeneral`, but initializers get the
        parameter's own shape.
    """

    def __init__(
        self,
        einsum_str: str | None,
        kernel_shape: Sequence[int],
        bias_shape: Sequence[int] | None = None,
        *,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        kernel_init: Initializer = nnx.initializers.lecun_normal(),
        bias_init: Initializer = nnx.initializers.zeros_init(),
        kernel_metadata: Mapping[str, Any] | None = None,
        bias_metadata: Mapping[str, Any] | None = None,
        recipe: Recipe | None = None,
        state_axis: str | tuple[str, ...] | None = None,
        implementation: native.Implementation | None = None,
        rngs: nnx.Rngs,
    ):
        self.kernel_shape = linear.sizes("kernel_shape", kernel_shape)
        if einsum_str is not None:
            linear.Einsum.parse(einsum_str, self.kernel_shape)
        self.einsum_str = einsum_str
        self.bias_shape = None if bias_shape is None else linear.sizes("bias_shape", bias_shape)
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.options = linear.Options(recipe, state_axis, implementation)
        kernel = kernel_init(rngs.params(), self.kernel_shape, param_dtype)
        self.kernel: nnx.Variable = nnx.Param(kernel, **(kernel_metadata or {}))
        self.bias: nnx.Param | None = nnx.data(None)
        if self.bias_shape is not None:
            bias = bias_init(rngs.params(), self.bias_shape, param_dtype)
            self.bias = nnx.Param(bias, **(bias_metadata or {}))
        _add_scaling_state(self, recipe)

    def __call__(
        self,
        inputs: jax.typing.ArrayLike,
        einsum_str: str | None = None,
        out_sharding: linear.OutSharding = None,
    ) -> Array:
        """Applies the layer.

        Args:
          inputs: floating point, with the dimensions that the einsum string names.
          einsum_str: the string, where the module has none.
          out_sharding: of the result, on Explicit meshes.

        Raises:
          ValueError: for strings, shapes or dtypes that do not fit, naming the argument.
        """
        if (einsum_str is None) == (self.einsum_str is None):
            raise ValueError(
                f"einsum_str is {einsum_str!r} in the call and {self.einsum_str!r} in the layer; give exactly one"
            )
        y = linear.einsum(
            linear.Einsum.parse(einsum_str or self.einsum_str, self.kernel_shape),
            linear.as_array("inputs", inputs),
            *self.held(),
            dtype=self.dtype,
            options=self.options,
        )
        return y if out_sharding is None else jax.reshard(y, out_sharding)

    def held(self) -> linear.Layer:
        """The values of its variables, for modules that run several layers as one operation."""
        return _held(self)


class DotGeneral(nnx.Module):
    """`jax.lax.dot_general` of an activation and a kernel in FP8, for layers that take a `dot_general`.

    With `DelayedScaling` it holds the state: give each layer its own, as an attribute of a module.

    The left operand must be the activation. `jnp.einsum` exchanges its operands if the result has the dimensions of the
    kernel first, and would then quantize the kernel as the activation: use `Einsum` there.

    Args:
      recipe: how to quantize, or None.
      state_axis, implementation: as in `LinearGeneral`.
    """

    def __init__(
        self,
        recipe: Recipe | None,
        *,
        state_axis: str | tuple[str, ...] | None = None,
        implementation: native.Implementation | None = None,
    ):
        self.options = linear.Options(recipe, state_axis, implementation)
        _add_scaling_state(self, recipe)

    def __call__(
        self,
        lhs: Array,
        rhs: Array,
        dimension_numbers: jax.lax.DotDimensionNumbers,
        precision: jax.lax.PrecisionLike = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
        out_sharding: linear.OutSharding = None,
        **kwargs: object,
    ) -> Array:
        """The product [*other dimensions of lhs, *other dimensions of rhs].

        Args:
          lhs: the activation. It is transposed unless its contracted dimensions are the last ones.
          rhs: the kernel. It is transposed unless its contracted dimensions are the first or the last ones.
          dimension_numbers: ((dimensions of lhs, dimensions of rhs), ((), ())).
          preferred_element_type: dtype of the result; None for that of lhs.
          out_sharding: of the result, on Explicit meshes.
          precision, kwargs: ignored; the recipe says how precise the product is.

        Raises:
          ValueError: for batch dimensions, and where the operands do not fit.
        """
        del precision, kwargs
        return linear.dot_general(
            lhs,
            rhs,
            dimension_numbers,
            scaling_state(self, self.options.recipe),
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
            options=self.options,
        )


def _held(module: LinearGeneral | Einsum) -> linear.Layer:
    bias = None if module.bias is None else module.bias.get_value()
    return linear.Layer(module.kernel.get_value(), bias, scaling_state(module, module.options.recipe))


def _add_scaling_state(module: Any, recipe: Recipe | None) -> None:
    if isinstance(recipe, DelayedScaling):
        for name, value in delayed_scaling.initial_state(recipe).items():
            setattr(module, name, OverwriteWithGradient(value))


def scaling_state(module: Any, recipe: Recipe | None) -> DelayedScalingState | None:
    if not isinstance(recipe, DelayedScaling):
        return None
    return delayed_scaling.scaling_state(
        {name: getattr(module, name).get_value() for name in delayed_scaling.STATE_NAMES}
    )


def without_metadata(init: Initializer) -> Initializer:
    """An initializer that draws the same values, without metadata."""

    def drawn(*arguments: Any) -> Any:
        value = init(*arguments)
        return value.raw_value if isinstance(value, variablelib.VariableMetadata) else value

    return drawn


def split_over(tensor_axis: AxisName | None, *dimensions: AxisName | None) -> dict[str, object]:
    """Metadata of a parameter whose dimensions are split over these mesh axes; none without a tensor_axis."""
    if tensor_axis is None:
        return {}
    axes = {axis for entry in dimensions for axis in axes_of_entry(entry)}
    mesh = current_mesh()
    # Where there is no such mesh yet, Flax would refuse to place the parameter on it.
    placed = axes <= set(mesh.axis_names) - set(mesh.manual_axes)
    return {"out_sharding": dimensions, **({} if placed else {"eager_sharding": False})}


def apply_dropout(
    dropout: nnx.Dropout | None, y: Array, tensor: TensorAxis | None, deterministic: bool | None, rngs: Any
) -> Array:
    """The dropout of y, of which this device may have a part."""
    if dropout is None:
        return y
    inactive = dropout.deterministic if deterministic is None else deterministic
    if tensor is not None and tensor.mesh is None and not inactive:
        stream = dropout.rngs if rngs is None else rngs
        key: Any = stream.dropout() if isinstance(stream, nnx.Rngs) else stream() if callable(stream) else stream
        rngs = tensor.own_key(key)
    return dropout(y, deterministic=deterministic, rngs=rngs)


def _reshaped(value: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(value, variablelib.VariableMetadata):  # from an initializer with metadata
        value.raw_value = value.raw_value.reshape(shape)
        return value
    return value.reshape(shape)
