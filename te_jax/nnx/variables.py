"""What NNX layers hold beside parameters."""

from __future__ import annotations

from typing import Any

from flax import nnx


class OverwriteWithGradient(nnx.Variable):
    """State of delayed scaling: the gradient with respect to it is its next value.

    It is differentiated with the parameters, and is not for the optimizer:

        grads = nnx.grad(loss_fn, argnums=nnx.DiffState(0, nnx.Any(nnx.Param, OverwriteWithGradient)))(model, batch)
        optimizer.update(model, grads)           # nnx.Optimizer(model, tx, wrt=nnx.Param)
        overwrite_with_gradient(model, grads)
    """


class QuantizedKernel(nnx.Variable):
    """A kernel that `quantize_kernels` put in the place of a parameter; its value is a `QuantizedArray`."""


def overwrite_with_gradient(model: Any, gradients: nnx.State) -> None:
    """Gives every `OverwriteWithGradient` of the model its next value.

    Args:
      model: the module.
      gradients: of `nnx.grad` with respect to `nnx.Any(nnx.Param, OverwriteWithGradient)`.

    Raises:
      ValueError: the model has such state, and the gradients lack it.
    """
    found = nnx.state(gradients, OverwriteWithGradient)
    missing = nnx.to_flat_state(nnx.state(model, OverwriteWithGradient)).paths
    missing = set(missing) - set(nnx.to_flat_state(found).paths)
    if missing:
        raise ValueError(
            f"gradients have nothing for {sorted(missing)}: differentiate with respect to all of the state, "
            "argnums=nnx.DiffState(0, nnx.Any(nnx.Param, te_jax.nnx.OverwriteWithGradient))"
        )
    nnx.update(model, found)
