"""Layers that communicate, for use inside `shard_map`: matrix products, and the exchange of experts' tokens."""

from te_jax.parallel.collective_matmul import all_gather_matmul, matmul_reduce_scatter
from te_jax.parallel.experts import DispatchPlan, combine, dispatch, plan_dispatch
from te_jax.parallel.gated_mlp import gated_mlp
from te_jax.parallel.options import P2P, Ring

__all__ = [
    "P2P",
    "DispatchPlan",
    "Ring",
    "all_gather_matmul",
    "combine",
    "dispatch",
    "gated_mlp",
    "matmul_reduce_scatter",
    "plan_dispatch",
]
