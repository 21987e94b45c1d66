"""The operations, as functions on arrays: everything else in te_jax stands on these."""

from te_jax.ops.activation import activation, gated_activation
from te_jax.ops.attention import attention
from te_jax.ops.dense import dense
from te_jax.ops.einsum import einsum
from te_jax.ops.gated_mlp import gated_mlp
from te_jax.ops.gemm import GemmResult, gemm
from te_jax.ops.grouped_dense import grouped_dense
from te_jax.ops.grouped_gemm import grouped_gemm, ragged_dot
from te_jax.ops.linear_cross_entropy import linear_cross_entropy
from te_jax.ops.linear_divergence import linear_divergence
from te_jax.ops.linear_log_probs import linear_log_probs, linear_token_loss
from te_jax.ops.norm import layer_norm, rms_norm
from te_jax.ops.permute import Permutation, group_by_expert, permute, permute_weights, unpermute
from te_jax.ops.quantize import quantize
from te_jax.ops.router import (
    Routing,
    expert_counts,
    load_balancing_loss,
    router,
    router_z_loss,
    update_expert_bias,
)
from te_jax.ops.softmax_cross_entropy import softmax_cross_entropy
from te_jax.reference.activation import Activation
from te_jax.reference.softmax_cross_entropy import CrossEntropy
from te_jax.reference.token_distributions import Softmax

__all__ = [
    "Activation",
    "CrossEntropy",
    "GemmResult",
    "Permutation",
    "Routing",
    "Softmax",
    "activation",
    "attention",
    "dense",
    "einsum",
    "expert_counts",
    "gated_activation",
    "gated_mlp",
    "gemm",
    "group_by_expert",
    "grouped_dense",
    "grouped_gemm",
    "layer_norm",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_log_probs",
    "linear_token_loss",
    "load_balancing_loss",
    "permute",
    "permute_weights",
    "quantize",
    "ragged_dot",
    "rms_norm",
    "router",
    "router_z_loss",
    "softmax_cross_entropy",
    "unpermute",
    "update_expert_bias",
]
