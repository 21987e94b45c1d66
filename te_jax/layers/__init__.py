"""Layers, and loops over layers, without a module system: for Linen, NNX and models that are plain functions."""

from te_jax.layers.microbatches import accumulate_gradients, dense_kernels
from te_jax.layers.mixture import ExpertBuffers, ExpertParallel, MoEResult, Router, expert_buffers, moe
from te_jax.layers.norm import Norm
from te_jax.layers.stack import apply_layers, residual_table, scan_layers

__all__ = [
    "ExpertBuffers",
    "ExpertParallel",
    "MoEResult",
    "Norm",
    "Router",
    "accumulate_gradients",
    "apply_layers",
    "dense_kernels",
    "expert_buffers",
    "moe",
    "residual_table",
    "scan_layers",
]
