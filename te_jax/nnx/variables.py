"""The types of variables in NNX layers, besides parameters."""

from __future__ import annotations

import sys
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from te_jax.layers import delayed_scaling

OverwriteWithGradient: type[nnx.Variable] = nnx.variable_type_from_name(OVERWRITE_WITH_GRADIENT, allow_register=True)
OverwriteWithGradient.__doc__ = """Flax's variable type for state whose gradient is its next value.

The state of delayed scaling has this type. It is what `flax.nnx.bridge` makes of Linen's collection
"_overwrite_with_gradient". Differentiate it together with the parameters, and keep it from the optimizer:

    grads = nnx.grad(loss_fn, argnums=nnx.DiffState(0, nnx.Any(nnx.Param, OverwriteWithGradient)))(model, batch)
    optimizer.update(model, grads)           # nnx.Optimizer(model, tx, wrt=nnx.Param)
    overwrite_with_gradient(model, grads)
"""


# Flax made this class without a name that pickle could find.
if getattr(sys.modules[OverwriteWithGradient.__module__], OverwriteWithGradient.__qualname__, None) is None:
    OverwriteWithGradient.__module__, OverwriteWithGradient.__qualname__ = "te_jax.nnx", "OverwriteWithGradient"


class ExpertBias(nnx.Variable):
    """The bias of a `MoE`'s choice of experts. Optimizers leave it alone: `te_jax.ops.update_expert_bias`."""


class QuantizedKernel(nnx.Variable):
    """A `QuantizedArray` that `quantize_kernels` put in the place of a parameter."""


def overwrite_with_gradient(model: nnx.Module, gradients: nnx.State) -> None:
    """Gives every `OverwriteWithGradient` of the model its next value. A layer that the loss did not use keeps its own.

    Args:
      model: the module.
      gradients: of `nnx.grad` with respect to `nnx.Any(nnx.Param, OverwriteWithGradient)`.

    Raises:
      ValueError: the model has such state, and the gradients lack it.
    """
    former = dict(nnx.to_flat_state(nnx.state(model, OverwriteWithGradient)))
    found = dict(nnx.to_flat_state(nnx.state(gradients, OverwriteWithGradient)))
    missing = set(former) - set(found)
    if missing:
        raise ValueError(
            f"gradients have nothing for {sorted(missing)}: differentiate with respect to all of the state, "
            "argnums=nnx.DiffState(0, nnx.Any(nnx.Param, te_jax.nnx.OverwriteWithGradient))"
        )

    def next_value(path: tuple[Any, ...]):
        value = found[path].get_value()
        uses = found.get((*path[:-1], delayed_scaling.USES))
        if uses is None:
            return value
        count = uses.get_value()  # stacked layers have one each
        count = jnp.expand_dims(count, tuple(range(count.ndim, value.ndim)))
        return jnp.where(count > 0, value, former[path].get_value())

    kept = [(path, found[path].replace(next_value(path))) for path in former]
    nnx.update(model, nnx.from_flat_state(kept))
