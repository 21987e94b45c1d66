"""Adapters of a decoder (LoRA), which are trained in the place of its kernels."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from te_jax._core.types import PyTree
from te_jax.models.config import DecoderConfig, Params
from te_jax.quantized import QuantizedArray

__all__ = ["join_adapters", "merge_adapters", "split_adapters"]


def split_adapters(params: Params) -> tuple[Params, Params]:
    """The adapters of a decoder with `DecoderConfig.lora`, and all other parameters.

    Training differentiates with respect to the adapters alone, so that no product computes the gradient of a kernel:

        adapters, frozen = te_jax.models.split_adapters(params)

        @jax.grad
        def gradient(adapters):
            return te_jax.models.loss(te_jax.models.join_adapters(adapters, frozen), tokens, targets, config)

    Args:
      params: as of `init`.

    Returns:
      (adapters, frozen): {"layers": […]} with `query_a`, `query_b` and others of each block, and what is left.
    """

    def is_adapter(name: str) -> bool:
        return name.endswith(("_a", "_b"))

    adapters = [{name: x for name, x in layer.items() if is_adapter(name)} for layer in params["layers"]]
    frozen = [{name: x for name, x in layer.items() if not is_adapter(name)} for layer in params["layers"]]
    return {"layers": adapters}, params | {"layers": frozen}


def join_adapters(adapters: Params, frozen: Params) -> Params:
    """Parameters of which `split_adapters` made two parts."""
    layers = [of_layer | own for of_layer, own in zip(frozen["layers"], adapters["layers"], strict=True)]
    return frozen | {"layers": layers}


def merge_adapters(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
    """The decoder without adapters that computes the same: kernel + scale · a · b, in the dtype of the kernel.

    Args:
      config: the shape, with `lora`.
      params: as of `init`; no kernel is quantized.

    Returns:
      (config without lora, parameters).

    Raises:
      ValueError: `config` has no lora, or a kernel is quantized.
    """
    DecoderConfig.check(config)
    if (lora := config.lora) is None:
        raise ValueError("config.lora is None: there are no adapters to merge")
    refuse_quantized(params)
    adapters, frozen = split_adapters(params)

    @jax.jit
    def merged(kernel: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        product = jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32), precision="highest")
        return (kernel.astype(jnp.float32) + lora.scale * product).astype(kernel.dtype)

    layers = [
        layer | {name: merged(layer[name], own[f"{name}_a"], own[f"{name}_b"]) for name in lora.names}
        for layer, own in zip(frozen["layers"], adapters["layers"], strict=True)
    ]
    return dataclasses.replace(config, lora=None), frozen | {"layers": layers}


def refuse_quantized(params: PyTree) -> None:
    """Raises a ValueError if a parameter is quantized: its values are not those of the model."""
    for path, leaf in jax.tree.leaves_with_path(params, is_leaf=lambda leaf: isinstance(leaf, QuantizedArray)):
        if isinstance(leaf, QuantizedArray):
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is quantized, {leaf!r}: give the parameters that kernels were "
                "quantized from, as from_hf reads them without keep_fp8"
            )
