"""Layers that communicate, for use inside `shard_map`: matrix products, and the exchange of experts' tokens."""

from te_jax.parallel.collective_matmul import all_gather_matmul, matmul_reduce_scatter
from te_jax.parallel.experts import DispatchPlan, combine, dispatch, plan_dispatch

__all__ = [
    "DispatchPlan",
    "all_gather_matmul",
    "combine",
    "dispatch",
    "matmul_reduce_scatter",
    "plan_dispatch",
]
