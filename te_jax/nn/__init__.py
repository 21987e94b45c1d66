"""Layers, and loops over layers, without a module system: for Linen, NNX and models that are plain functions."""

from te_jax.nn.layers import apply_layers, residual_table
from te_jax.nn.microbatches import accumulate_gradients, dense_kernels

__all__ = ["accumulate_gradients", "apply_layers", "dense_kernels", "residual_table"]
