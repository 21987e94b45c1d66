"""Names of TransformerEngine in errors: which name of te_jax a reader of its documentation looks for."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

_T = TypeVar("_T", bound=type[Any])

_CONVERT = "the argument recipe of a layer, or te_jax.nnx.convert(model, recipe) and te_jax.flax.convert for a model"

NAMES = {
    "Linear": "te_jax.nnx.Linear or te_jax.flax.Dense",
    "DenseGeneral": "te_jax.flax.DenseGeneral or te_jax.nnx.LinearGeneral",
    "LayerNormLinear": "te_jax.nnx.NormLinear or te_jax.flax.NormLinear",
    "LayerNormDenseGeneral": "te_jax.flax.NormLinear or te_jax.nnx.NormLinear",
    "LayerNormMLP": "te_jax.nnx.GatedMLP or te_jax.flax.GatedMLP",
    "LayerNorm": "te_jax.nnx.LayerNorm or te_jax.flax.LayerNorm",
    "RMSNorm": "te_jax.nnx.RMSNorm or te_jax.flax.RMSNorm",
    "GroupedLinear": "te_jax.ops.grouped_dense, and te_jax.nnx.MoE or te_jax.flax.MoE as a layer",
    "DotProductAttention": "te_jax.ops.attention",
    "MultiheadAttention": "te_jax.nnx.Attention or te_jax.flax.Attention",
    "MultiHeadAttention": "te_jax.flax.Attention or te_jax.nnx.Attention",
    "TransformerLayer": "te_jax.nnx.TransformerBlock or te_jax.flax.TransformerBlock",
    "autocast": _CONVERT,
    "fp8_autocast": _CONVERT,
    "quantized_model_init": "te_jax.nnx.quantize_kernels or te_jax.flax.quantize_kernels",
    "fp8_model_init": "te_jax.nnx.quantize_kernels or te_jax.flax.quantize_kernels",
    "checkpoint": "jax.checkpoint with a policy of te_jax.checkpoint_policies",
    "Format": "the arguments forward_dtype and gradient_dtype of a recipe, such as te_jax.recipe.CurrentScaling",
    "DelayedScaling": "te_jax.recipe.DelayedScaling",
    "Float8CurrentScaling": "te_jax.recipe.CurrentScaling",
    "Float8BlockScaling": "te_jax.recipe.BlockScaling",
    "MXFP8BlockScaling": "te_jax.recipe.MXFP8Scaling",
    "NVFP4BlockScaling": "missing, and te_jax.recipe.BlockScaling comes closest",
}
"""By the name in TransformerEngine for PyTorch or JAX."""

_ARGUMENTS = {
    "amax_history_len": "history_len of te_jax.recipe.DelayedScaling",
    "amax_compute_algo": "algorithm of te_jax.recipe.DelayedScaling",
    "fp8_format": "gradient_dtype",
    "use_power_2_scales": "power_of_two_scales",
}


def missing(module: str, name: str) -> AttributeError:
    """The error about a name that a module does not have."""
    hint = f": {name} of TransformerEngine is here {NAMES[name]}" if name in NAMES else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}", name=name)


def names_arguments(recipe: _T) -> _T:
    """Decorates a class of recipes, whose errors about arguments of TransformerEngine then name those of te_jax."""
    init = recipe.__init__

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in _ARGUMENTS.keys() & kwargs:
            raise TypeError(
                f"{recipe.__name__} has no argument {name!r}: {name} of TransformerEngine is here {_ARGUMENTS[name]}"
            )
        init(self, *args, **kwargs)

    recipe.__init__ = checked
    return recipe
