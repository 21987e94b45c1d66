"""Names of TransformerEngine in errors: which name of te_jax a reader of its documentation looks for."""

from __future__ import annotations

import functools
import opcode
import sys
from typing import TypeVar

_T = TypeVar("_T", bound=type)

_PAGE = "see docs/transformer_engine.md"
_RECIPE = "recipe=… of each layer, or te_jax.nnx.convert(model, recipe) and te_jax.flax.convert for a model"
_QUANTIZED_KERNELS = "te_jax.nnx.quantize_kernels or te_jax.flax.quantize_kernels"
_OFFLOAD = "te_jax.offload.Offload in te_jax.layers.apply_layers or te_jax.layers.scan_layers"
_GROUPS = "te_jax.ops.group_by_expert, te_jax.ops.permute and te_jax.ops.unpermute"
_AXES = "a mesh under jax.set_mesh, and arguments such as tensor_axis"
_DOCTOR = "`te-jax doctor` or te_jax.native.status"

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
    "RotaryPositionEmbedding": "the argument rope_theta of te_jax.nnx.Attention and te_jax.flax.Attention",
    "InferenceParams": "init_cache of te_jax.nnx.Attention, or te_jax.models.generate",
    "Fp8Padding": "te_jax.ops.group_by_expert with align=128",
    "autocast": _RECIPE,
    "fp8_autocast": _RECIPE,
    "quantized_model_init": _QUANTIZED_KERNELS,
    "fp8_model_init": _QUANTIZED_KERNELS,
    "is_fp8_available": _DOCTOR,
    "get_device_compute_capability": "te_jax.native.compute_capability",
    "checkpoint": "jax.checkpoint with a policy of te_jax.checkpoint_policies",
    "get_cpu_offload_context": _OFFLOAD,
    "mark_not_offload": "the arguments names and min_size of te_jax.offload.Offload",
    "make_graphed_callables": "jax.jit, whose CUDA graphs XLA records by itself",
    "onnx_export": "jax.export, which writes StableHLO",
    "initialize_ub": "te_jax.parallel.all_gather_matmul or tensor_axis of a layer, which need no set-up",
    "moe_permute": _GROUPS,
    "moe_unpermute": _GROUPS,
    "parallel_cross_entropy": "te_jax.ops.softmax_cross_entropy",
    "FusedAdam": "te_jax.optim.adamw",
    "FusedSGD": "optax.sgd, in te_jax.optim.master_weights for float32 masters",
    "QuantizedTensor": "te_jax.quantized.QuantizedArray",
    "Float8Tensor": "te_jax.quantized.QuantizedArray",
    "Quantizer": "te_jax.recipe.Quantization, which te_jax.ops.quantize takes",
    "Format": "the arguments forward_dtype and gradient_dtype of a recipe, such as te_jax.recipe.CurrentScaling",
    "DelayedScaling": "te_jax.recipe.DelayedScaling",
    "Float8CurrentScaling": "te_jax.recipe.CurrentScaling",
    "Float8BlockScaling": "te_jax.recipe.BlockScaling",
    "MXFP8BlockScaling": "te_jax.recipe.MXFP8Scaling",
    "NVFP4BlockScaling": "te_jax.recipe.BlockScaling, which comes closest",
    "CustomRecipe": "te_jax.recipe.products, a recipe for each GEMM",
    "MeshResource": _AXES,
    "global_shard_guard": _AXES,
    "extend_logical_axis_rules": _AXES,
    "make_grouped_dense_cls": "te_jax.ops.grouped_dense or te_jax.flax.MoE",
}
"""By the name in TransformerEngine for PyTorch or JAX."""

_ARGUMENTS = {
    "amax_history_len": "history_len of te_jax.recipe.DelayedScaling",
    "amax_compute_algo": "algorithm of te_jax.recipe.DelayedScaling",
    "fp8_format": "gradient_dtype",
    "use_power_2_scales": "power_of_two_scales",
    "fp8_gemm_fprop": "fast_accumulation",
    "fp8_gemm_dgrad": "fast_accumulation",
    "fp8_gemm_wgrad": "fast_accumulation",
    "backward_override": "te_jax.recipe.products",
}


def missing(module: str, name: str) -> Exception:
    """The error about a name that a module does not have.

    `from module import name` drops the message of an AttributeError, so that statement gets the ImportError it would
    raise itself. `getattr` and `hasattr` get an AttributeError, as everywhere.
    """
    if name not in NAMES:
        return AttributeError(f"module {module!r} has no attribute {name!r}", name=name)
    hint = f"in place of TransformerEngine's {name} use {NAMES[name]}; {_PAGE}"
    caller = sys._getframe(2)  # of the module's __getattr__
    if caller.f_code.co_code[caller.f_lasti] == opcode.opmap["IMPORT_FROM"]:
        return ImportError(f"cannot import name {name!r} from {module!r}: {hint}", name=module)
    return AttributeError(f"module {module!r} has no attribute {name!r}: {hint}", name=name)


def names_arguments(recipe: _T) -> _T:
    """Decorates a class of recipes, whose errors about arguments of TransformerEngine then name those of te_jax."""
    init = recipe.__init__

    @functools.wraps(init)
    def checked(self: object, *args: object, **kwargs: object) -> None:
        for name in _ARGUMENTS.keys() & kwargs:
            hint = f"in place of TransformerEngine's {name} use {_ARGUMENTS[name]}; {_PAGE}"
            raise TypeError(f"{recipe.__name__} has no argument {name!r}: {hint}")
        init(self, *args, **kwargs)

    recipe.__init__ = checked
    return recipe
