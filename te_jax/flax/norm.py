"""Norms for Linen, alone and with the linear layer behind them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from te_jax import native
from te_jax.flax.linear import DenseGeneral, Initializer, layer_options, reshaped, split_over
from te_jax.layers import linear, norm, tensor_parallel
from te_jax.layers.tensor_parallel import TensorAxis
from te_jax.recipe import Quantization, Recipe
from te_jax.reference.activation import Activation, ActivationName


class RMSNorm(nn.Module):
    """RMS normalization of the last dimension: `te_jax.ops.rms_norm`, with the parameter of `flax.linen.RMSNorm`.

    Attributes:
      epsilon: added to the mean square.
      dtype: of the result: float32, bfloat16 or float16. None is what x and scale promote to.
      param_dtype: of the parameter.
      use_scale: whether to multiply by "scale".
      scale_init: initializer; None is ones, or zeros with zero_centered.
      zero_centered: multiplies by 1 + scale, as Gemma does.
      implementation: as in `te_jax.ops.rms_norm`.
    """

    epsilon: float = 1e-6
    dtype: jax.typing.DTypeLike | None = None
    param_dtype: jax.typing.DTypeLike = jnp.float32
    use_scale: bool = True
    scale_init: Initializer | None = None
    _: dataclasses.KW_ONLY
    zero_centered: bool = False
    implementation: native.Implementation | None = None

    @nn.compact
    def __call__(
        self,
        x: jax.typing.ArrayLike,
        residual: jax.typing.ArrayLike | None = None,
        *,
        quantization: Quantization | None = None,
    ) -> Any:
        """Applies the norm to x, or to x + residual.

        Args:
          x: [*rows, features].
          residual: like x; None for none.
          quantization: None, or how to write y in FP8, for linear layers that take it directly:
            `recipe.quantization("activation")`.

        Returns:
          y like x, or a `te_jax.quantized.QuantizedArray`; with residual (y, x + residual).

        Raises:
          ValueError: for shapes or dtypes that do not fit, naming the argument.
        """
        x = linear.as_array("x", x)
        return norm.normalize(
            x,
            residual,
            _scale(self, x),
            None,
            dtype=self.dtype,
            quantization=quantization,
            options=norm.Options("rms", self.epsilon, self.zero_centered, self.implementation),
        )


class LayerNorm(nn.Module):
    """Layer normalization of the last dimension, `te_jax.ops.layer_norm`, with `flax.linen.LayerNorm`'s parameters.

    Attributes:
      use_bias: whether to add "bias".
      bias_init: initializer of "bias".
      epsilon, dtype, param_dtype, use_scale, scale_init, zero_centered, implementation: as in `RMSNorm`.
    """

    epsilon: float = 1e-6
    dtype: jax.typing.DTypeLike | None = None
    param_dtype: jax.typing.DTypeLike = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Initializer = nn.initializers.zeros_init()
    scale_init: Initializer | None = None
    _: dataclasses.KW_ONLY
    zero_centered: bool = False
    implementation: native.Implementation | None = None

    @nn.compact
    def __call__(
        self,
        x: jax.typing.ArrayLike,
        residual: jax.typing.ArrayLike | None = None,
        *,
        quantization: Quantization | None = None,
    ) -> Any:
        """Applies the norm; see `RMSNorm`."""
        x = linear.as_array("x", x)
        scale, bias = _scale(self, x), None
        if self.use_bias:
            shape = x.shape[-1:]
            bias = self.param("bias", reshaped(self.bias_init, shape), shape, self.param_dtype)
        return norm.normalize(
            x,
            residual,
            scale,
            bias,
            dtype=self.dtype,
            quantization=quantization,
            options=norm.Options("layer", self.epsilon, self.zero_centered, self.implementation),
        )


def _scale(module: RMSNorm | LayerNorm, x: jax.Array) -> Any:
    if not module.use_scale:
        return None
    of_zeros = nn.initializers.zeros_init() if module.zero_centered else nn.initializers.ones_init()
    shape = x.shape[-1:]
    init = reshaped(module.scale_init or of_zeros, shape)
    return module.param("scale", init, shape, module.param_dtype)


def make_norm(which: norm.Norm | norm.Kind, **arguments: Any) -> RMSNorm | LayerNorm:
    """The norm as a module."""
    which = norm.Norm.of(which)
    return (RMSNorm if which.kind == "rms" else LayerNorm)(**which.arguments, **arguments)


class NormLinear(nn.Module):
    """A norm and the linear layer after it, "norm" and "linear", between which x passes in FP8 with a recipe.

    With current, block and row scaling the norm quantizes its result; with delayed scaling the layer does.

    Attributes:
      features: number of output features, or several numbers.
      norm: "rms", "layer", or a `te_jax.layers.Norm`.
      tensor_axis: the mesh axis whose devices split the time of x, and the first output features: the call overlaps the
        gather of x with GEMMs, `te_jax.parallel.all_gather_matmul`. None for no such axis. `init` creates whole
        parameters.
      dtype, param_dtype, implementation: of both.
      use_bias, kernel_init, bias_init, recipe, activation, state_axis: of the layer, as in `DenseGeneral`.
    """

    features: int | Sequence[int]
    _: dataclasses.KW_ONLY
    norm: norm.Norm | norm.Kind = "rms"
    tensor_axis: str | None = None
    use_bias: bool = True
    dtype: jax.typing.DTypeLike | None = None
    param_dtype: jax.typing.DTypeLike = jnp.float32
    kernel_init: Initializer = nn.initializers.lecun_normal()
    bias_init: Initializer = nn.initializers.zeros_init()
    recipe: Recipe | None = None
    activation: Activation | ActivationName | None = None
    state_axis: str | tuple[str, ...] | None = None
    implementation: native.Implementation | None = None

    def __post_init__(self) -> None:
        linear.Options(self.recipe, self.state_axis, self.implementation)
        tensor_parallel.validate(self.tensor_axis, self.state_axis)
        super().__post_init__()

    @nn.compact
    def __call__(self, x: jax.typing.ArrayLike, residual: jax.typing.ArrayLike | None = None) -> Any:
        """y [*rows, *features] of x [*rows, in]; with a residual like x: (y of x + residual, this sum)."""
        shared: Any = {name: getattr(self, name) for name in ("dtype", "param_dtype", "implementation")}
        before = make_norm(self.norm, name="norm", **shared)
        axis = self.tensor_axis
        tensor = None if self.is_initializing() else TensorAxis.of(axis)
        normed, total = norm.before(before, x, residual, None if self.activation else self.recipe, tensor)
        options = {name: getattr(self, name) for name in _OF_LAYER}
        first, *others = features = linear.sizes("features", self.features)
        options |= {
            "kernel_init": split_over(axis, self.kernel_init, None, axis, *(None for _ in others)),
            "bias_init": split_over(axis, self.bias_init, axis, *(None for _ in others)),
        }
        tensor_parallel.validate_sizes(axis, features=first)
        here = features if tensor is None else (tensor.here(first), *others)
        layer = DenseGeneral(here, name="linear", **options, **shared)
        if tensor is None:
            y = layer(normed)
        else:
            held = layer.held(normed.shape[-1:])
            y = linear.gathered_linear(
                normed, held, features, self.activation, self.dtype, layer_options(layer), tensor
            )
        return y if residual is None else (y, total)


_OF_LAYER = ("use_bias", "kernel_init", "bias_init", "recipe", "activation", "state_axis")
