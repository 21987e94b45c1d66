"""Layers that communicate inside `shard_map`: matrix products and the exchange of experts' tokens; and parameters that
devices share."""

from te_jax.parallel.collective_matmul import all_gather_matmul, matmul_reduce_scatter
from te_jax.parallel.experts import DispatchPlan, combine, dispatch, plan_dispatch
from te_jax.parallel.fsdp import FSDP, shard_specs
from te_jax.parallel.gated_mlp import gated_mlp
from te_jax.parallel.options import P2P, Ring
from te_jax.parallel.ring_attention import context_order, ring_attention
from te_jax.parallel.shards import gather_params

__all__ = [
    "FSDP",
    "P2P",
    "DispatchPlan",
    "Ring",
    "all_gather_matmul",
    "combine",
    "context_order",
    "dispatch",
    "gated_mlp",
    "gather_params",
    "matmul_reduce_scatter",
    "plan_dispatch",
    "ring_attention",
    "shard_specs",
]
