"""Norms for NNX, alone and with the linear layer behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from te_jax import native
from te_jax.layers import linear, norm, tensor_parallel
from te_jax.layers.tensor_parallel import TensorAxis
from te_jax.nnx.linear import Initializer, LinearGeneral, split_over
from te_jax.recipe import Quantization, Recipe


class _Norm(nnx.Module):
    """The parameters and options of both norms."""

    scale: nnx.Param | None
    bias: nnx.Param | None
    options: norm.Options
    dtype: jax.typing.DTypeLike | None

    def __call__(
        self,
        x: jax.typing.ArrayLike,
        residual: jax.typing.ArrayLike | None = None,
        *,
        quantization: Quantization | None = None,
    ) -> Any:
        """Applies the norm to x, or to x + residual.

        Args:
          x: [*rows, num_features].
          residual: like x; None for none.
          quantization: None, or how to write y in FP8, for linear layers that take it directly:
            `recipe.quantization("activation")`.

        Returns:
          y like x, or a `te_jax.quantized.QuantizedArray`; with residual (y, x + residual).

        Raises:
          ValueError: for shapes or dtypes that do not fit, naming the argument.
        """
        return norm.normalize(
            x,
            residual,
            *(None if parameter is None else parameter.get_value() for parameter in (self.scale, self.bias)),
            dtype=self.dtype,
            quantization=quantization,
            options=self.options,
        )


class RMSNorm(_Norm):
    """RMS normalization of the last dimension: `te_jax.ops.rms_norm`, with the parameter of `flax.nnx.RMSNorm`.

    Args:
      num_features: size of the last dimension.
      epsilon: added to the mean square.
      dtype: of the result: float32, bfloat16 or float16. None is what x and scale promote to.
      param_dtype: of the parameter.
      use_scale: whether to multiply by `scale`.
      scale_init: initializer; None is ones, or zeros with zero_centered.
      scale_metadata: metadata of the parameter, such as {"out_sharding": ("embed",)}.
      zero_centered: multiplies by 1 + scale, as Gemma does.
      implementation: as in `te_jax.ops.rms_norm`.
      rngs: `nnx.Rngs`, of which "params" is used.
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        use_scale: bool = True,
        scale_init: Initializer | None = None,
        scale_metadata: Mapping[str, Any] | None = None,
        zero_centered: bool = False,
        implementation: native.Implementation | None = None,
        rngs: nnx.Rngs,
    ):
        self.num_features, self.dtype = num_features, dtype
        self.options = norm.Options("rms", epsilon, zero_centered, implementation)
        self.scale = _scale(use_scale, num_features, scale_init, zero_centered, param_dtype, scale_metadata, rngs)
        self.bias = nnx.data(None)


class LayerNorm(_Norm):
    """Layer normalization of the last dimension: `te_jax.ops.layer_norm`, with the parameters of `flax.nnx.LayerNorm`.

    Args:
      use_bias: whether to add `bias`.
      bias_init, bias_metadata: initializer and metadata of `bias`.
      num_features, epsilon, dtype, param_dtype, use_scale, scale_init, scale_metadata: as in `RMSNorm`.
      zero_centered, implementation, rngs: as in `RMSNorm`.
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = nnx.initializers.zeros_init(),
        scale_init: Initializer | None = None,
        bias_metadata: Mapping[str, Any] | None = None,
        scale_metadata: Mapping[str, Any] | None = None,
        zero_centered: bool = False,
        implementation: native.Implementation | None = None,
        rngs: nnx.Rngs,
    ):
        self.num_features, self.dtype = num_features, dtype
        self.options = norm.Options("layer", epsilon, zero_centered, implementation)
        self.scale = _scale(use_scale, num_features, scale_init, zero_centered, param_dtype, scale_metadata, rngs)
        self.bias = nnx.data(None)
        if use_bias:
            self.bias = nnx.Param(bias_init(rngs.params(), (num_features,), param_dtype), **(bias_metadata or {}))


def _scale(use_scale, num_features, init, zero_centered, dtype, metadata, rngs) -> nnx.Param | None:
    if not use_scale:
        return nnx.data(None)
    init = init or (nnx.initializers.zeros_init() if zero_centered else nnx.initializers.ones_init())
    return nnx.Param(init(rngs.params(), (num_features,), dtype), **(metadata or {}))


def make_norm(which: norm.Norm | norm.Kind, num_features: int, **arguments: Any) -> RMSNorm | LayerNorm:
    """The norm as a module."""
    which = norm.Norm.of(which)
    return (RMSNorm if which.kind == "rms" else LayerNorm)(num_features, **which.arguments, **arguments)


class NormLinear(nnx.Module):
    """A norm and the linear layer after it, `norm` and `linear`, between which x passes in FP8 with a recipe.

    With current, block and row scaling the norm quantizes its result; with delayed scaling the layer does.

    Args:
      in_features: number of input features.
      out_features: number of output features, or several numbers.
      norm: "rms", "layer", or a `te_jax.layers.Norm`.
      tensor_axis: the mesh axis whose devices split the time of x, and the first output features: the call overlaps the
        gather of x with GEMMs, `te_jax.parallel.all_gather_matmul`. None for no such axis.
      dtype, param_dtype, implementation, rngs: of both.
      arguments: others of `LinearGeneral`, without axis: norm and layer work on the last one.

    Raises:
      ValueError: for another norm, another axis, and sizes that do not fit.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        *,
        norm: norm.Norm | norm.Kind = "rms",
        tensor_axis: str | None = None,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        recipe: Recipe | None = None,
        implementation: native.Implementation | None = None,
        rngs: nnx.Rngs,
        **arguments: Any,
    ):
        shared: Any = {"dtype": dtype, "param_dtype": param_dtype, "implementation": implementation, "rngs": rngs}
        if linear.as_tuple(arguments.get("axis", -1)) != (-1,):
            raise ValueError(
                f"axis is {arguments['axis']!r}, and the norm is of the last one: leave it out, or use a norm and a "
                "LinearGeneral"
            )
        tensor_parallel.validate(tensor_axis, arguments.get("state_axis"))
        tensor_parallel.validate_sizes(tensor_axis, out_features=linear.as_tuple(out_features)[0])
        self.recipe, self.tensor_axis = recipe, tensor_axis
        self.norm = make_norm(norm, in_features, **shared)
        others = (None,) * (len(linear.as_tuple(out_features)) - 1)
        for name, split in (("kernel_metadata", (None, tensor_axis)), ("bias_metadata", (tensor_axis,))):
            arguments[name] = split_over(tensor_axis, *split, *others) | dict(arguments.get(name) or {})
        self.linear = LinearGeneral(in_features, out_features, recipe=recipe, **shared, **arguments)

    def __call__(self, x: jax.typing.ArrayLike, residual: jax.typing.ArrayLike | None = None) -> Any:
        """y [*rows, *out_features] of x [*rows, in_features]; with a residual like x: (y of x + residual, this sum)."""
        tensor, layer = TensorAxis.of(self.tensor_axis), self.linear
        normed, total = norm.before(self.norm, x, residual, None if layer.activation else self.recipe, tensor)
        if tensor is None:
            y = layer(normed)
        else:
            features, options = linear.as_tuple(layer.out_features), layer.options
            tensor_parallel.validate_sizes(tensor.name, out_features=features[0])
            y = linear.gathered_linear(normed, layer.held(), features, layer.activation, layer.dtype, options, tensor)
        return y if residual is None else (y, total)
