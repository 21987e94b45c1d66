"""The operations, as functions on arrays: everything else in te_jax stands on these."""

from te_jax.ops.activation import activation, gated_activation
from te_jax.ops.attention import attention
from te_jax.ops.dense import dense
from te_jax.ops.gated_mlp import gated_mlp
from te_jax.ops.gemm import GemmResult, gemm
from te_jax.ops.linear_cross_entropy import linear_cross_entropy
from te_jax.ops.norm import layer_norm, rms_norm
from te_jax.ops.quantize import quantize
from te_jax.ops.softmax_cross_entropy import softmax_cross_entropy

__all__ = [
    "GemmResult",
    "activation",
    "attention",
    "dense",
    "gated_activation",
    "gated_mlp",
    "gemm",
    "layer_norm",
    "linear_cross_entropy",
    "quantize",
    "rms_norm",
    "softmax_cross_entropy",
]
