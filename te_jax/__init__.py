"""Fused kernels, FP8 training and overlapped communication for JAX on Hopper GPUs.

Importing te_jax loads no extension, starts no backend and touches no GPU; the first operation does.
"""

from te_jax import checkpoint_policies, inspect, ops, parallel, recipe
from te_jax._version import __version__

__all__ = ["__version__", "checkpoint_policies", "inspect", "ops", "parallel", "recipe"]
