"""Linen modules over `te_jax.ops`. They hold parameters and state; the arithmetic is in the operations."""

from typing import TYPE_CHECKING, NoReturn

try:
    import flax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ImportError('te_jax.flax needs Flax, which is not installed: pip install "flax>=0.12.7"') from error

from te_jax._core import transformer_engine
from te_jax.flax.attention import Attention
from te_jax.flax.convert import convert, report
from te_jax.flax.embed import Embed
from te_jax.flax.gated_mlp import GatedMLP
from te_jax.flax.linear import Dense, DenseGeneral, DotGeneral, Einsum, make_dot_general_cls
from te_jax.flax.microbatches import merge_gradients, quantize_kernels, requantize
from te_jax.flax.moe import MoE
from te_jax.flax.norm import LayerNorm, NormLinear, RMSNorm
from te_jax.flax.transformer_block import TransformerBlock
from te_jax.layers.convert import KernelsLayer
from te_jax.layers.microbatches import accumulate_gradients

__all__ = [
    "Attention",
    "Dense",
    "DenseGeneral",
    "DotGeneral",
    "Einsum",
    "Embed",
    "GatedMLP",
    "KernelsLayer",
    "LayerNorm",
    "MoE",
    "NormLinear",
    "RMSNorm",
    "TransformerBlock",
    "accumulate_gradients",
    "convert",
    "make_dot_general_cls",
    "merge_gradients",
    "quantize_kernels",
    "report",
    "requantize",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        raise transformer_engine.missing(__name__, name)
