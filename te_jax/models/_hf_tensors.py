"""The tensors of models of Hugging Face: their names, and the parameters of the decoder that they hold."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

from te_jax.models.config import MLP, DecoderConfig, Experts

ParamPath: TypeAlias = tuple[Any, ...]
"""The keys of a parameter in those of a decoder, from the outermost."""

IN_FLOAT32 = ("expert_bias",)
"""Parameters that are in float32 in every model: small differences of large values choose experts."""


class Tensor(NamedTuple):
    """A tensor of a model, and the parameters that it holds.

    Attributes:
      name: in safetensors.
      paths: of parameters of the decoder.
      form: "plain" as it is, or "transposed"; "pairs" holds two parameters, whose last dimensions alternate, and
        "joined" several transposed ones, one after the other.
      expert: of a parameter [experts, …], the one that it holds; None for all.
    """

    name: str
    paths: tuple[ParamPath, ...]
    form: Literal["plain", "transposed", "pairs", "joined"]
    expert: int | None = None

    @property
    def is_transposed(self) -> bool:
        return self.form in ("transposed", "joined")


OfExperts: TypeAlias = Callable[[str, int, Experts], Iterator[Tensor]]
"""(the block's prefix, its number, its experts) → their tensors."""


def tensors(config: DecoderConfig, joined: dict[str, tuple[str, ...]], of_experts: OfExperts) -> Iterator[Tensor]:
    """All tensors of a model, of a family with these joined kernels and experts."""
    yield Tensor("model.embed_tokens.weight", (("embedding",),), "plain")
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for place, names in joined.items():
            yield Tensor(f"{prefix}{place}.weight", tuple(("layers", layer, name) for name in names), "joined")
        block = config.block(layer)
        for name in (*block.kernel_shapes, *block.other_shapes):
            if name in itertools.chain(*joined.values()):
                continue
            if block.experts is not None and name.removesuffix("_bias") in _OF_EXPERTS:
                continue
            place, suffix = module(layer, name.removesuffix("_bias")), ".bias" if name.endswith("_bias") else ".weight"
            if name == "mlp_norm" and config.norms == "both":
                place = f"{prefix}pre_feedforward_layernorm"
            form = "transposed" if name in block.kernel_shapes else "plain"
            yield Tensor(place if name == "sinks" else place + suffix, (("layers", layer, name),), form)
        if block.experts is not None:
            yield from of_experts(prefix, layer, block.experts)
    yield Tensor("model.norm.weight", (("final_norm",),), "plain")
    if not config.tied_head:
        yield Tensor("lm_head.weight", (("head",),), "transposed")


def module(layer: int, name: str) -> str:
    """The module of transformers that holds a parameter of a block, of no expert."""
    return f"model.layers.{layer}.{_PLACES[name]}"


_OF_EXPERTS = (*MLP, *(f"shared_{name}" for name in MLP), "router", "shared_router", "expert")
_PLACES = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
    "sinks": "self_attn.sinks",
    "query_down": "self_attn.q_a_proj",
    "query_down_norm": "self_attn.q_a_layernorm",
    "query_up": "self_attn.q_b_proj",
    "key_value_down": "self_attn.kv_a_proj_with_mqa",
    "key_value_norm": "self_attn.kv_a_layernorm",
    "key_value_up": "self_attn.kv_b_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def one_by_one(where: str, names: dict[str, str]) -> OfExperts:
    """The tensors of experts that have one each."""

    def of(prefix: str, layer: int, experts: Experts) -> Iterator[Tensor]:
        prefix += where
        yield Tensor(f"{prefix}.gate.weight", (("layers", layer, "router"),), "transposed")
        if experts.choice_bias:
            yield Tensor(f"{prefix}.gate.e_score_correction_bias", (("layers", layer, "expert_bias"),), "plain")
        if experts.weighted_shared:
            yield Tensor(f"{prefix}.shared_expert_gate.weight", (("layers", layer, "shared_router"),), "transposed")
        shared = "shared_expert" if experts.weighted_shared else "shared_experts"
        for name, theirs in names.items() if experts.shared or experts.weighted_shared else ():
            full = f"{prefix}.{shared}.{theirs}.weight"
            yield Tensor(full, (("layers", layer, f"shared_{name}"),), "transposed")
        for expert in range(experts.num_experts):
            for name, theirs in names.items():
                full = f"{prefix}.experts.{expert}.{theirs}.weight"
                yield Tensor(full, (("layers", layer, name),), "transposed", expert)

    return of


def of_gpt_oss(prefix: str, layer: int, experts: Experts) -> Iterator[Tensor]:
    """The tensors of experts of gpt-oss, which are stacked."""
    del experts

    def path(name: str) -> tuple[str | int, ...]:
        return ("layers", layer, name)

    prefix += "mlp."
    yield Tensor(f"{prefix}router.weight", (path("router"),), "transposed")
    yield Tensor(f"{prefix}router.bias", (path("router_bias"),), "plain")
    yield Tensor(f"{prefix}experts.gate_up_proj", (path("gate"), path("up")), "pairs")
    yield Tensor(f"{prefix}experts.gate_up_proj_bias", (path("gate_bias"), path("up_bias")), "pairs")
    yield Tensor(f"{prefix}experts.down_proj", (path("down"),), "plain")
    yield Tensor(f"{prefix}experts.down_proj_bias", (path("down_bias"),), "plain")
