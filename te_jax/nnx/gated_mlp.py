"""A gated MLP for NNX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from te_jax import native
from te_jax.layers import gated_mlp, norm, tensor_parallel
from te_jax.layers.tensor_parallel import TensorAxis
from te_jax.nnx.linear import Initializer, Linear, apply_dropout, split_over, without_metadata
from te_jax.nnx.norm import LayerNorm, RMSNorm, make_norm
from te_jax.quantized import QuantizedArray
from te_jax.recipe import Recipe
from te_jax.reference.activation import Activation, ActivationName


class GatedMLP(nnx.Module):
    """down(f(gate(x)) · up(x)), the MLP of Llama and similar models, optionally after a norm: `te_jax.ops.gated_mlp`.

    It consists of `gate_proj`, `up_proj`, `down_proj`, and `norm`. With a recipe x, the activation and its gradients
    pass between them in FP8.

    Args:
      in_features, hidden_features: of x, and between the layers.
      out_features: None is in_features.
      activation: as in `te_jax.ops.gated_activation`; "silu" is SwiGLU.
      norm: "rms", "layer", a `te_jax.layers.Norm`, or None.
      use_bias: whether the three layers have biases.
      dtype, param_dtype, recipe, state_axis, implementation: as in `LinearGeneral`, for all layers.
      kernel_init, bias_init: of `gate_proj` and `up_proj`. They may have metadata, as from `nnx.with_partitioning`.
      down_kernel_init, down_bias_init: of `down_proj`; None for the same values, without metadata.
      dropout_rate: of the result; `flax.nnx.Dropout`.
      tensor_axis: the mesh axis whose devices split the hidden features, and between modules the time, dimension -2 of
        x, residual and y. The call overlaps exchanges with GEMMs: `te_jax.parallel.gated_mlp`. None for no such axis.
      rngs: `nnx.Rngs`, of which "params" is used, and "dropout" with a dropout_rate.

    Raises:
      ValueError: for another norm, and sizes that do not fit.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: Activation | ActivationName = "silu",
        norm: norm.Norm | norm.Kind | None = None,
        use_bias: bool = False,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        kernel_init: Initializer = nnx.initializers.lecun_normal(),
        down_kernel_init: Initializer | None = None,
        bias_init: Initializer = nnx.initializers.zeros_init(),
        down_bias_init: Initializer | None = None,
        dropout_rate: float = 0.0,
        tensor_axis: str | None = None,
        recipe: Recipe | None = None,
        state_axis: str | tuple[str, ...] | None = None,
        implementation: native.Implementation | None = None,
        rngs: nnx.Rngs,
    ):
        tensor_parallel.validate(tensor_axis, state_axis)
        tensor_parallel.validate_sizes(tensor_axis, recipe, hidden_features=hidden_features)
        self.activation = Activation.of(activation)
        self.hidden_features, self.tensor_axis = hidden_features, tensor_axis
        self.dtype = dtype
        shared: Any = {"dtype": dtype, "param_dtype": param_dtype, "implementation": implementation, "rngs": rngs}
        layer: Any = {"use_bias": use_bias, "recipe": recipe, "state_axis": state_axis, **shared}
        wide: Any = {
            "kernel_init": kernel_init,
            "bias_init": bias_init,
            "kernel_metadata": split_over(tensor_axis, None, tensor_axis),
            "bias_metadata": split_over(tensor_axis, tensor_axis),
        }
        self.norm: RMSNorm | LayerNorm | None = nnx.data(None)
        if norm is not None:
            self.norm = make_norm(norm, in_features, **shared)
        self.gate_proj = Linear(in_features, hidden_features, **wide, **layer)
        self.up_proj = Linear(in_features, hidden_features, **wide, **layer)
        self.down_proj = Linear(
            hidden_features,
            in_features if out_features is None else out_features,
            kernel_init=down_kernel_init or without_metadata(kernel_init),
            bias_init=down_bias_init or without_metadata(bias_init),
            kernel_metadata=split_over(tensor_axis, tensor_axis, None),
            **layer,
        )
        self.dropout: nnx.Dropout | None = nnx.Dropout(dropout_rate, rngs=rngs) if dropout_rate else nnx.data(None)

    def __call__(
        self,
        x: jax.typing.ArrayLike | QuantizedArray,
        residual: jax.typing.ArrayLike | None = None,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
    ) -> Any:
        """Applies the MLP.

        Args:
          x: [*batch, in_features], or without a norm a QuantizedArray from another one; with tensor_axis [*batch, time,
            in_features].
          residual: like x; the norm first adds it to x.
          deterministic, rngs: as in `flax.nnx.Dropout`.

        Returns:
          y [*batch, out_features]; with residual (y, x + residual).

        Raises:
          ValueError: for shapes or dtypes that do not fit, naming the argument.
        """
        options = self.gate_proj.options
        tensor_parallel.validate_sizes(self.tensor_axis, options.recipe, hidden_features=self.hidden_features)
        tensor = TensorAxis.of(self.tensor_axis)
        normed, total = norm.before(self.norm, x, residual, options.recipe, tensor)
        layers = self.gate_proj.held(), self.up_proj.held(), self.down_proj.held()
        y = gated_mlp.gated_mlp(normed, *layers, self.activation, dtype=self.dtype, options=options, tensor=tensor)
        y = apply_dropout(self.dropout, y, tensor, deterministic, rngs)
        return y if residual is None else (y, total)
