"""What FP8 costs each tensor of a model, and which layers it changes. Programs that do not ask are what they were."""

from te_jax.debug.comparison import Comparison, LayerErrors, compare
from te_jax.debug.statistics import Statistics, TensorStatistics, scalars, table, with_statistics

__all__ = [
    "Comparison", "LayerErrors", "Statistics", "TensorStatistics", "compare", "scalars", "table", "with_statistics",
]  # fmt: skip
