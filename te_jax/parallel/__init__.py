"""Matrix products that communicate, for use inside `shard_map` and `pmap`, and what programs communicate."""

from te_jax.parallel import inspect
from te_jax.parallel.collective_matmul import all_gather_matmul, matmul_reduce_scatter

__all__ = ["all_gather_matmul", "inspect", "matmul_reduce_scatter"]
