"""FP8 for the dense layers of MaxText, which asks an object for a `dot_general_cls`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from te_jax import native
from te_jax.flax.linear import DotGeneral, make_dot_general_cls
from te_jax.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class MaxTextQuantization:
    """A quantization of MaxText (0.2.5) whose dense layers multiply in FP8 as a recipe says.

    In a training loop of your own, MaxText's models take it as an argument:

        model = model_creation_utils.get_transformer_model(config, mesh, MaxTextQuantization(BlockScaling()), rngs=rngs)

    MaxText's own trainer asks `configure_quantization(config)`, which knows MaxText's names alone. Until upstream calls
    a function that users register there, replace it before the model is made:

        from maxtext.layers import quantizations
        quantizations.configure_quantization = lambda *_, **__: MaxTextQuantization(BlockScaling())

    Only dense layers are quantized. Experts and KV caches are computed in the dtype of their operands.

    Attributes:
      recipe: how to quantize. The state of `DelayedScaling` is in variables of the type by which MaxText knows state
        that is overwritten with its gradient.
      implementation: as in `te_jax.flax.DenseGeneral`.
      quant_mode: "train": kernels are parameters, which are quantized in every step.
      needs_apply_rngs: False: quantization draws no random numbers.
    """

    recipe: Recipe
    implementation: native.Implementation | None = None
    quant_mode: ClassVar[str] = "train"
    needs_apply_rngs: ClassVar[bool] = False

    def dot_general_cls(self, mesh_axes: Sequence[str | None] = ()) -> Callable[[], DotGeneral]:
        """What makes the Linen module that multiplies the inputs and the kernel of one layer."""
        del mesh_axes
        return make_dot_general_cls(self.recipe, implementation=self.implementation)

    def einsum(self, mesh_axes: Sequence[str | None] = (), dtype: Any = None) -> Callable[..., Array]:
        """`jnp.einsum`: MaxText does not say which of its operands is a kernel."""
        del mesh_axes, dtype
        return jnp.einsum
