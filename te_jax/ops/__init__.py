"""The operations, as functions on arrays: everything else in te_jax stands on these."""

from te_jax.ops.softmax_cross_entropy import softmax_cross_entropy

__all__ = ["softmax_cross_entropy"]
