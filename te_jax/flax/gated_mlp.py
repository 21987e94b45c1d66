"""A gated MLP for Linen."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from te_jax import native
from te_jax.flax.linear import Dense, Initializer, apply_dropout, layer_options, split_over, without_names
from te_jax.flax.norm import make_norm
from te_jax.layers import gated_mlp, linear, norm, tensor_parallel
from te_jax.layers.tensor_parallel import TensorAxis
from te_jax.quantized import QuantizedArray
from te_jax.recipe import Recipe
from te_jax.reference.activation import Activation, ActivationName


class GatedMLP(nn.Module):
    """down(f(gate(x)) · up(x)), the MLP of Llama and similar models, optionally after a norm: `te_jax.ops.gated_mlp`.

    It consists of "gate_proj", "up_proj", "down_proj", and "norm". With a recipe x, the activation and its gradients
    pass between them in FP8.

    Attributes:
      hidden_features: between the layers.
      out_features: None is the number of input features.
      activation: as in `te_jax.ops.gated_activation`; "silu" is SwiGLU.
      norm: "rms", "layer", a `te_jax.layers.Norm`, or None.
      use_bias: whether the three layers have biases.
      dtype, param_dtype, recipe, state_axis, implementation: as in `DenseGeneral`, for all layers.
      kernel_init, bias_init: of "gate_proj" and "up_proj", as in `DenseGeneral`.
      down_kernel_init, down_bias_init: of "down_proj"; None for the same values, without names of axes.
      dropout_rate: of the result; `flax.linen.Dropout`.
      tensor_axis: the mesh axis whose devices split the hidden features, and between modules the time, dimension -2 of
        x, residual and y. The call overlaps exchanges with GEMMs: `te_jax.parallel.gated_mlp`. None for no such axis.
        `init` creates whole parameters.
      deterministic: as in `flax.linen.Dropout`; may be given to the call.
    """

    hidden_features: int
    out_features: int | None = None
    _: dataclasses.KW_ONLY
    activation: Activation | ActivationName = "silu"
    norm: norm.Norm | norm.Kind | None = None
    use_bias: bool = False
    dtype: jax.typing.DTypeLike | None = None
    param_dtype: jax.typing.DTypeLike = jnp.float32
    kernel_init: Initializer = nn.initializers.lecun_normal()
    down_kernel_init: Initializer | None = None
    bias_init: Initializer = nn.initializers.zeros_init()
    down_bias_init: Initializer | None = None
    dropout_rate: float = 0.0
    tensor_axis: str | None = None
    deterministic: bool | None = None
    recipe: Recipe | None = None
    state_axis: str | tuple[str, ...] | None = None
    implementation: native.Implementation | None = None

    def __post_init__(self) -> None:
        linear.Options(self.recipe, self.state_axis, self.implementation)
        tensor_parallel.validate(self.tensor_axis, self.state_axis)
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        x: jax.typing.ArrayLike | QuantizedArray,
        residual: jax.typing.ArrayLike | None = None,
        *,
        deterministic: bool | None = None,
    ) -> Any:
        """Applies the MLP.

        Args:
          x: [*batch, in], or without a norm a QuantizedArray from another one; with tensor_axis [*batch, time, in].
          residual: like x; the norm first adds it to x.
          deterministic: see the attribute.

        Returns:
          y [*batch, out_features]; with residual (y, x + residual).

        Raises:
          ValueError: for shapes or dtypes that do not fit, naming the argument.
        """
        shared: Any = {name: getattr(self, name) for name in ("dtype", "param_dtype", "implementation")}
        layer: Any = {name: getattr(self, name) for name in ("use_bias", "recipe", "state_axis")} | shared
        axis, hidden = self.tensor_axis, self.hidden_features
        tensor_parallel.validate_sizes(axis, self.recipe, hidden_features=hidden)
        tensor = None if self.is_initializing() else TensorAxis.of(axis)
        hidden = hidden if tensor is None else tensor.here(hidden)
        wide: Any = {
            "kernel_init": split_over(axis, self.kernel_init, None, axis),
            "bias_init": split_over(axis, self.bias_init, axis),
        }
        down_kernel_init = self.down_kernel_init or without_names(self.kernel_init)
        before = None if self.norm is None else make_norm(self.norm, name="norm", **shared)
        normed, total = norm.before(before, x, residual, self.recipe, tensor)
        features = normed.shape[-1]
        gate = Dense(hidden, name="gate_proj", **wide, **layer)
        up = Dense(hidden, name="up_proj", **wide, **layer)
        down = Dense(
            features if self.out_features is None else self.out_features,
            kernel_init=split_over(axis, down_kernel_init, axis, None),
            bias_init=self.down_bias_init or without_names(self.bias_init),
            name="down_proj",
            **layer,
        )
        y = gated_mlp.gated_mlp(
            normed,
            gate.held((features,)),
            up.held((features,)),
            down.held((hidden,)),
            Activation.of(self.activation),
            dtype=self.dtype,
            options=layer_options(gate),
            tensor=tensor,
        )
        y = apply_dropout(self, y, tensor, deterministic)
        return y if residual is None else (y, total)
