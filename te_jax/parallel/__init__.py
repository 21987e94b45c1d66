"""Matrix products that communicate, for use inside `shard_map` and `pmap`."""

from te_jax.parallel.collective_matmul import all_gather_matmul, matmul_reduce_scatter

__all__ = ["all_gather_matmul", "matmul_reduce_scatter"]
