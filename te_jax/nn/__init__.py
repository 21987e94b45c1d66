"""What the Linen and NNX modules share, without a module system: also for models that are plain functions."""

from te_jax.nn.layers import apply_layers, residual_table
from te_jax.nn.microbatches import accumulate_gradients, dense_kernels

__all__ = ["accumulate_gradients", "apply_layers", "dense_kernels", "residual_table"]
