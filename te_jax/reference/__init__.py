"""The operations in plain jax.numpy: their definition, the oracle of the tests, and the fallback without an extension.

Nothing here calls a kernel or defines a derivative: gradients are JAX's own.
"""

from te_jax.reference.activation import activation, gated_activation
from te_jax.reference.attention import attention
from te_jax.reference.gemm import GemmResult, gemm
from te_jax.reference.grouped_gemm import grouped_gemm
from te_jax.reference.linear_cross_entropy import linear_cross_entropy
from te_jax.reference.quantize import quantize
from te_jax.reference.softmax_cross_entropy import softmax_cross_entropy

__all__ = [
    "GemmResult",
    "activation",
    "attention",
    "gated_activation",
    "gemm",
    "grouped_gemm",
    "linear_cross_entropy",
    "quantize",
    "softmax_cross_entropy",
]
