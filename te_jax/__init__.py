"""Fused kernels, FP8 training and overlapped communication for JAX on Hopper GPUs.

Importing te_jax loads no extension, starts no backend and touches no GPU; the first operation does.
"""

from te_jax import ops

__version__ = "0.1.0"

__all__ = ["__version__", "ops"]
