"""The cost of FP8 for each tensor of a model, and the layers that it changes. Other programs are what they were."""

from te_jax.debug.comparison import Comparison, LayerErrors, compare
from te_jax.debug.statistics import Statistics, TensorStatistics, scalars, table, with_statistics
from te_jax.debug.writers import JSONLinesWriter, Writer, write

__all__ = [
    "Comparison", "JSONLinesWriter", "LayerErrors", "Statistics", "TensorStatistics", "Writer", "compare", "scalars",
    "table", "with_statistics", "write",
]  # fmt: skip
