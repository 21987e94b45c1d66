"""Residuals and optimizer states in host memory, copied while the GPU computes.

`te_jax.layers.apply_layers` with an `Offload` moves what layers keep for the backward pass, and
`te_jax.layers.residual_table` shows what that is. `te_jax.optim.offload` moves the state of an optimizer.
"""

from te_jax.offload._options import LAYER_INPUT, Offload, Residual

__all__ = ["LAYER_INPUT", "Offload", "Residual"]
