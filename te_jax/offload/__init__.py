"""What a training step keeps in host memory, and copies while the GPU computes.

`te_jax.nn.apply_layers(..., offload=Offload(...))` moves what layers keep for the backward pass, and
`te_jax.nn.residual_table` shows what that is. `te_jax.optim.offload` moves the state of an optimizer.
"""

from te_jax.offload._options import LAYER_INPUT, Offload, Residual

__all__ = ["LAYER_INPUT", "Offload", "Residual"]
