"""NNX modules over `te_jax.ops`. They hold parameters and state; the arithmetic is in the operations."""

from typing import TYPE_CHECKING, NoReturn

try:
    import flax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ImportError('te_jax.nnx needs Flax, which is not installed: pip install "flax>=0.12.7"') from error

from te_jax._core import transformer_engine
from te_jax.layers.convert import KernelsLayer
from te_jax.nnx.attention import Attention
from te_jax.nnx.convert import convert, revert
from te_jax.nnx.embed import Embed
from te_jax.nnx.gated_mlp import GatedMLP
from te_jax.nnx.generation import generate
from te_jax.nnx.linear import DotGeneral, Einsum, Linear, LinearGeneral
from te_jax.nnx.microbatches import accumulate_gradients, merge_gradients, quantize_kernels, requantize
from te_jax.nnx.moe import MoE
from te_jax.nnx.norm import LayerNorm, NormLinear, RMSNorm
from te_jax.nnx.transformer_block import TransformerBlock
from te_jax.nnx.variables import ExpertBias, OverwriteWithGradient, QuantizedKernel, overwrite_with_gradient

__all__ = [
    "Attention",
    "DotGeneral",
    "Einsum",
    "Embed",
    "ExpertBias",
    "GatedMLP",
    "KernelsLayer",
    "LayerNorm",
    "Linear",
    "LinearGeneral",
    "MoE",
    "NormLinear",
    "OverwriteWithGradient",
    "QuantizedKernel",
    "RMSNorm",
    "TransformerBlock",
    "accumulate_gradients",
    "convert",
    "generate",
    "merge_gradients",
    "overwrite_with_gradient",
    "quantize_kernels",
    "requantize",
    "revert",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        raise transformer_engine.missing(__name__, name)
