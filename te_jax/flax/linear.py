"""Linear layers for Linen, and a `dot_general_cls` for layers that others wrote."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax import Array
from jax.sharding import AxisType

from te_jax import native
from te_jax._core.types import PyTree
from te_jax.layers import delayed_scaling, linear, microbatches
from te_jax.layers.tensor_parallel import TensorAxis
from te_jax.quantized import QuantizedArray
from te_jax.recipe import DelayedScaling, DelayedScalingState, Recipe
from te_jax.sharding import AxisName, current_mesh

Initializer = Callable[..., Any]


class DenseGeneral(nn.Module):
    """A linear layer over any dimensions, in FP8 with a recipe: y = activation(x · kernel + bias).

    Parameters have the names, shapes and initial values of `flax.linen.DenseGeneral`, so checkpoints are exchangeable.
    `DelayedScaling` adds state in the collection "_overwrite_with_gradient". Its gradient is its next value, by which
    `flax.training.train_state.TrainState` replaces it.

    Attributes:
      features: number of output features, or several numbers.
      axis: dimension of the input that is contracted, or several; they are taken in ascending order.
      use_bias: whether to add a bias.
      dtype: of the computation and of y: float32, bfloat16 or float16. None is what input and parameters promote to.
      param_dtype: of the parameters.
      kernel_init, bias_init: initializers; like Flax's they see the kernel as a matrix and the bias as a vector. They
        name the axes as Flax's do, `nn.with_logical_partitioning(init, ("embed", "mlp"))`: all axes of the parameter.
      recipe: how to quantize (`te_jax.recipe`), or None to compute in `dtype`.
      activation: None, or as in `te_jax.ops.activation`.
      state_axis: inside `pmap`, or `shard_map` with check_vma=False, the mesh axes over which the state of
        `DelayedScaling` is the same; None elsewhere.
      implementation: None takes native kernels where they are installed, else the reference. On a GPU that cannot
        multiply as the recipe says it raises instead of being slow. "native" or "reference" never fall back.
    """

    features: int | Sequence[int]
    axis: int | Sequence[int] = -1
    _: dataclasses.KW_ONLY
    use_bias: bool = True
    dtype: jax.typing.DTypeLike | None = None
    param_dtype: jax.typing.DTypeLike = jnp.float32
    kernel_init: Initializer = nn.initializers.lecun_normal()
    bias_init: Initializer = nn.initializers.zeros_init()
    recipe: Recipe | None = None
    activation: linear.Activation | linear.ActivationName | None = None
    state_axis: str | tuple[str, ...] | None = None
    implementation: native.Implementation | None = None

    def __post_init__(self) -> None:
        layer_options(self)
        super().__post_init__()

    def __call__(self, inputs: jax.typing.ArrayLike | QuantizedArray) -> Array:
        """Applies the layer.

        Args:
          inputs: floating point, with the dimensions `axis` to contract; or with axis=-1 a QuantizedArray from a norm.

        Returns:
          [*other dimensions of the inputs, *features].

        Raises:
          ValueError: for axes, names, shapes or dtypes that do not fit, naming the argument.
        """
        inputs = linear.as_input(inputs)
        features = linear.sizes("features", self.features)
        axis = tuple(sorted(linear.normalize_axes("axis", linear.as_tuple(self.axis), inputs.ndim)))
        return linear.linear(
            inputs,
            *self.held(tuple(inputs.shape[i] for i in axis)),
            axis=axis,
            features=features,
            dtype=self.dtype,
            activation=self.activation,
            options=layer_options(self),
        )

    @nn.compact
    def held(self, contracted: tuple[int, ...]) -> linear.Layer:
        """The values of its variables, for modules that run several layers as one operation; `init` creates them.

        Args:
          contracted: the sizes of the dimensions that it contracts.
        """
        return held(self, contracted, self.recipe)


class Dense(DenseGeneral):
    """`DenseGeneral` over the last dimension, with the first arguments and the parameters of `flax.linen.Dense`."""

    axis: int | Sequence[int] = dataclasses.field(default=-1, kw_only=True)
    use_bias: bool = dataclasses.field(default=True, kw_only=False)


class Einsum(nn.Module):
    """The einsum of an input and a kernel, in FP8 with a recipe, plus a bias: `flax.linen.Einsum` on te_jax's products.

        layer = Einsum((64, 4, 32), "btd,dhk->bthk", recipe=CurrentScaling())

    Parameters have the names, shapes and initial values of `flax.linen.Einsum`. The input is always quantized as the
    activation. If input, kernel and result share a dimension, such as that of experts, each of its indices is a
    separate product, with separate scales.

    Attributes:
      shape: of the kernel.
      einsum_str: names the dimensions of input, kernel and result; None to pass it to the call. The kernel must share
        one with the input alone and one with the result alone. Input and result may have an ellipsis.
      use_bias, dtype, param_dtype, kernel_init, bias_init, recipe, state_axis, implementation: as in
        `DenseGeneral`, but initializers get the parameter's own shape. The bias has the dimensions that kernel and
        result share, in the order of the result.
    """

    shape: Sequence[int]
    einsum_str: str | None = None
    _: dataclasses.KW_ONLY
    use_bias: bool = True
    dtype: jax.typing.DTypeLike | None = None
    param_dtype: jax.typing.DTypeLike = jnp.float32
    kernel_init: Initializer = nn.initializers.lecun_normal()
    bias_init: Initializer = nn.initializers.zeros_init()
    recipe: Recipe | None = None
    state_axis: str | tuple[str, ...] | None = None
    implementation: native.Implementation | None = None

    def __post_init__(self) -> None:
        layer_options(self)
        super().__post_init__()

    def __call__(self, inputs: jax.typing.ArrayLike, einsum_str: str | None = None) -> Array:
        """Applies the layer.

        Args:
          inputs: floating point, with the dimensions that the einsum string names.
          einsum_str: the string, where the module has none.

        Raises:
          ValueError: for strings, shapes or dtypes that do not fit, naming the argument.
        """
        return linear.einsum(
            _einsum_names(self, einsum_str),
            linear.as_array("inputs", inputs),
            *self.held(einsum_str=einsum_str),
            dtype=self.dtype,
            options=layer_options(self),
        )

    @nn.compact
    def held(self, *, einsum_str: str | None = None) -> linear.Layer:
        """The values of its variables, for modules that run several layers as one operation; `init` creates them.

        Args:
          einsum_str: as in the call.
        """
        return _held_by_einsum(self, _einsum_names(self, einsum_str), self.recipe)


class DotGeneral(nn.Module):
    """`jax.lax.dot_general` of an activation and a kernel in FP8, for layers that take a `dot_general_cls`.

    With `DelayedScaling` it holds the state, as `DenseGeneral` does.

    The left operand must be the activation. `jnp.einsum` exchanges its operands if the result has the dimensions of the
    kernel first, and would then quantize the kernel as the activation: use `Einsum` there.

    Attributes:
      recipe: how to quantize, or None.
      state_axis, implementation: as in `DenseGeneral`.
    """

    recipe: Recipe | None = None
    state_axis: str | tuple[str, ...] | None = None
    implementation: native.Implementation | None = None

    def __post_init__(self) -> None:
        layer_options(self)
        super().__post_init__()

    @nn.compact
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
            scaling_state(self, self.recipe),
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
            options=layer_options(self),
        )


def make_dot_general_cls(
    recipe: Recipe | None,
    *,
    state_axis: str | tuple[str, ...] | None = None,
    implementation: native.Implementation | None = None,
) -> Callable[[], DotGeneral]:
    """The `dot_general_cls` of `flax.linen.Dense`, `flax.linen.DenseGeneral` and others like them.

    Args:
      recipe: how to quantize, or None.
      state_axis, implementation: as in `DenseGeneral`.

    Returns:
      A callable that creates a `DotGeneral`; the same object for the same arguments.
    """
    return _dot_general_cls(recipe, state_axis, implementation)


@functools.cache  # distinguishes keywords from positions, and hides the signature from type checkers
def _dot_general_cls(
    recipe: Recipe | None, state_axis: str | tuple[str, ...] | None, implementation: native.Implementation | None
) -> Callable[[], DotGeneral]:
    return functools.partial(DotGeneral, recipe=recipe, state_axis=state_axis, implementation=implementation)


def layer_options(module: DenseGeneral | Einsum | DotGeneral) -> linear.Options:
    """The options of a module for `te_jax.ops.dense`."""
    return linear.Options(module.recipe, module.state_axis, module.implementation)


def held(module: Any, contracted: tuple[int, ...], recipe: Recipe | None) -> linear.Layer:
    """`DenseGeneral.held`, also of a layer of Flax, inside of its compact method."""
    features = linear.sizes("features", module.features)
    kernel = _kernel(module, (math.prod(contracted), math.prod(features)), (*contracted, *features))
    bias = _bias(module, (math.prod(features),), features)
    return linear.Layer(kernel, bias, scaling_state(module, recipe))


def einsum(module: Any, inputs: jax.typing.ArrayLike, einsum_str: str | None, options: linear.Options) -> Array:
    """`Einsum.__call__` of a layer of Flax, inside of its compact method."""
    names = _einsum_names(module, einsum_str)
    return linear.einsum(
        names,
        linear.as_array("inputs", inputs),
        *_held_by_einsum(module, names, options.recipe),
        dtype=module.dtype,
        options=options,
    )


def _einsum_names(module: Any, einsum_str: str | None) -> linear.Einsum:
    shape = linear.sizes("shape", module.shape)
    return linear.Einsum.parse(nn.merge_param("einsum_str", module.einsum_str, einsum_str), shape)


def _held_by_einsum(module: Any, names: linear.Einsum, recipe: Recipe | None) -> linear.Layer:
    kernel = _kernel(module, names.kernel_shape, names.kernel_shape)
    bias = _bias(module, names.bias_shape, names.bias_shape)
    return linear.Layer(kernel, bias, scaling_state(module, recipe))


def _kernel(module: Any, drawn_shape: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    """The kernel: quantized, or a parameter whose initializer draws `drawn_shape`."""
    if module.has_variable("params", "kernel"):
        kernel = module.get_variable("params", "kernel")
        if isinstance(kernel, (QuantizedArray, microbatches.AccumulatedKernel)):
            return kernel
    return _param(module, "kernel", reshaped(module.kernel_init, drawn_shape), shape)


def _bias(module: Any, drawn_shape: tuple[int, ...], shape: tuple[int, ...]) -> Array | None:
    if not module.use_bias:
        return None
    return _param(module, "bias", reshaped(module.bias_init, drawn_shape), shape)


def _param(module: Any, name: str, init: Initializer, shape: tuple[int, ...]) -> Any:
    """`module.param`, without the constraint by names of axes where JAX refuses it: inside `shard_map`, and while
    parameters are created on Explicit meshes."""
    value = module.param(name, init, shape, module.param_dtype, unbox=False)
    constrains = all(kind == AxisType.Auto for kind in current_mesh().axis_types)
    return meta.unbox(value) if constrains else unboxed(value)


def scaling_state(module: nn.Module, recipe: Recipe | None, kernel: str | None = None) -> DelayedScalingState | None:
    """The state of delayed scaling; `init` creates its variables, for one of several kernels in a dict of its name."""
    if not isinstance(recipe, DelayedScaling):
        return None
    initial = delayed_scaling.initial_state(recipe)
    variables = initial if kernel is None else {kernel: initial}
    kept = all(module.has_variable(OVERWRITE_WITH_GRADIENT, name) for name in variables)
    if not kept and not module.is_mutable_collection(OVERWRITE_WITH_GRADIENT):
        name = "/".join(module.path) or "the layer"
        if module.is_initializing():
            raise ValueError(
                f'{name} has no place for the state of DelayedScaling: name "{OVERWRITE_WITH_GRADIENT}" beside '
                '"params" in the variable_axes of the nn.scan or nn.vmap around it, and in the argument mutable of '
                "init, or give this layer another recipe"
            )
        raise ValueError(
            f'variables have no state in "{OVERWRITE_WITH_GRADIENT}" for {name}, which DelayedScaling needs: pass this '
            'collection beside "params", first as init returned it'
        )
    if not kept:
        for name, value in variables.items():
            module.put_variable(OVERWRITE_WITH_GRADIENT, name, value)
    values: Any = {name: module.get_variable(OVERWRITE_WITH_GRADIENT, name) for name in variables}
    return delayed_scaling.scaling_state(values if kernel is None else values[kernel])


def unboxed(x: PyTree) -> PyTree:
    """The value of a box with names of axes, without the sharding constraint that Flax applies elsewhere."""
    if isinstance(x, meta.Partitioned):
        return x.unbox(apply_constraint=False)
    return x.unbox() if isinstance(x, meta.AxisMetadata) else x


def reshaped(init: Initializer, drawn_shape: tuple[int, ...]) -> Initializer:
    """An initializer that draws an array of `drawn_shape`, and reshapes it, in its box."""

    def init_of(rng: Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike):
        value = init(rng, drawn_shape, dtype)
        if isinstance(value, meta.AxisMetadata):
            return value.replace_boxed(unboxed(value).reshape(shape))
        return value.reshape(shape)

    return init_of


def split_over(tensor_axis: AxisName | None, init: Initializer, *dimensions: Any) -> Initializer:
    """An initializer of a parameter whose dimensions are split over these mesh axes, unless it names them itself."""
    if tensor_axis is None:
        return init

    def named(*arguments: Any) -> Any:
        value = init(*arguments)
        return value if isinstance(value, meta.AxisMetadata) else nn.Partitioned(value, dimensions)

    return named


def apply_dropout(module: Any, y: Array, tensor: TensorAxis | None, deterministic: bool | None) -> Array:
    """The dropout of y, of which this device may have a part, inside of the module's compact method."""
    if not module.dropout_rate:
        return y
    deterministic = nn.merge_param("deterministic", module.deterministic, deterministic)
    rng = None
    if tensor is not None and tensor.mesh is None and not deterministic:
        rng = tensor.own_key(module.make_rng("dropout"))
    return nn.Dropout(module.dropout_rate, name="dropout")(y, deterministic=deterministic, rng=rng)


def without_names(init: Initializer) -> Initializer:
    """An initializer that draws the same values, without names of axes."""
    return lambda *arguments: unboxed(init(*arguments))
