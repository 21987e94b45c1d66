"""What the Linen and NNX modules share, without a module system, and the loop over the layers of a model."""

from te_jax.nn.layers import apply_layers

__all__ = ["apply_layers"]
