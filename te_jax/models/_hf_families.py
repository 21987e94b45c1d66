"""Models of Hugging Face that the decoder can be, and their config.json."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeAlias

from te_jax._core.arguments import is_finite_number
from te_jax.layers.attention import RopeScaling
from te_jax.layers.mixture import Router
from te_jax.models._hf_fields import Fields
from te_jax.models._hf_tensors import OfExperts, of_gpt_oss, one_by_one
from te_jax.models.config import ATTENTION, MLP, DecoderConfig, Experts, Factors, Latent, Rope, Softcaps
from te_jax.models.safetensors import FolderError, shown
from te_jax.reference.activation import Activation

Arguments: TypeAlias = dict[str, Any]
"""Some of those of a DecoderConfig, by their names."""

BLOCK_FP8: dict[str, object] = {
    **{"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
}
"""A quantization_config of tensors in blocks of 128 × 128 with scales: `weight` and `weight_scale_inv`."""

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}
_BIASES = ("query", "key", "value")
_MOST_LAYERS = 10_000
_DEFAULT_ROPE = Rope(10_000.0, None)


def read(given: dict[str, Any], path: object, ignore: Collection[str] | None = ()) -> tuple[Family, DecoderConfig]:
    """What a config.json says.

    Args:
      given: its fields.
      path: of the file, for errors.
      ignore: unknown fields that are no error; None for all.

    Raises:
      FolderError: the decoder cannot be this model; the message names the field.
    """
    fields = Fields(given, path)
    kind = fields.take("model_type", kind=str)
    if kind not in FAMILIES:
        raise fields.error(f"model_type is {shown(kind)}: te_jax.models knows {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    fields = Fields({**family.defaults, **given}, path, ignore)
    fields.expect("model_type", kind)
    quantized = fields.take("quantization_config", kind=dict, default=BLOCK_FP8)
    # transformers writes no fmt.
    said = {"fmt": "e4m3", "activation_scheme": "dynamic"} | quantized
    wrong = [f"{name} {shown(said.get(name))}" for name, value in BLOCK_FP8.items() if said.get(name) != value]
    if wrong and (kind, quantized.get("quant_method")) != ("gpt_oss", "mxfp4"):
        raise fields.error(
            f"quantization_config has {wrong[0]}, and te_jax.models reads fp8 in e4m3 with weight_block_size [128, 128]"
            " and dynamic activation_scheme, and of gpt_oss mxfp4: load the model with transformers, dequantized to "
            "bfloat16, and save_pretrained it"
        )
    if family.joined and fields.look("quantization_config") is not None:
        raise fields.error(
            f"quantization_config is given, and te_jax.models reads a {kind} in float32, bfloat16 or float16 alone: "
            "load the model with transformers, dequantized to bfloat16, and save_pretrained it"
        )
    fields.expect("attention_dropout", 0.0)
    fields.expect("is_encoder_decoder", False)
    fields.expect("is_causal", True, None)
    fields.expect("pruned_heads", {}, None)
    try:
        found = _common(fields) | family.rope(fields) | family.read(fields)
        fields.finish()
        return family, DecoderConfig(**found)
    except FolderError:
        raise
    except ValueError as error:
        raise fields.error(str(error)) from error


def family_of(config: DecoderConfig) -> Family:
    """The first family that has such models.

    Raises:
      ValueError: none has.
    """
    for family in FAMILIES.values():
        try:
            _, again = read(describe(family, config), "")
        except (FolderError, TypeError, AttributeError):
            continue
        if again.architecture == config.architecture:
            return family
    raise ValueError(f"config is {config!r}, and none of {', '.join(FAMILIES)} has such models")


def describe(family: Family, config: DecoderConfig) -> dict[str, object]:
    """The fields of a config.json."""
    activation = Activation.of(config.activation)
    names = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_size,
        "hidden_act": names.get(activation.kind, activation.kind),
        "rms_norm_eps": config.norm_eps,
        # `family_of` finds out whether all blocks have the same.
        **_describe_rope(next((rope for rope in config.ropes if rope is not None), _DEFAULT_ROPE)),
        "tie_word_embeddings": config.tied_head,
        # The decoder knows none, and without these transformers takes those of the class.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **family.describe(config),
    }


def _common(fields: Fields) -> Arguments:
    hidden, heads = (fields.take(name, kind=int) for name in ("hidden_size", "num_attention_heads"))
    act = fields.take("hidden_activation", "hidden_act", kind=str, default="silu")
    # The first Gemma's files say "gelu" and mean its approximation.
    names = _ACTIVATIONS | ({"gelu": "gelu"} if fields.look("model_type") == "gemma" else {})
    if act not in names:
        raise fields.error(f"hidden_act is {shown(act)}: te_jax.models knows {', '.join(names)}")
    return {
        "vocab_size": fields.take("vocab_size", kind=int),
        "num_layers": fields.take("num_hidden_layers", kind=int),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": fields.take("num_key_value_heads", kind=int, default=heads),
        "head_dim": fields.take("head_dim", kind=int, default=max(hidden // max(heads, 1), 1)),
        "mlp_size": fields.take("intermediate_size", kind=int),
        "activation": names[act],
        "norm_eps": fields.take("rms_norm_eps", kind=(float, int), default=1e-6),
        "tied_head": fields.take("tie_word_embeddings", kind=bool, default=False),
    }


def _rope(fields: Fields) -> Arguments:
    """The base of rotary wavelengths and how they are stretched: of rope_parameters, or of older fields."""
    given = fields.take("rope_parameters", "rope_scaling", kind=dict, default={})
    own = fields.nested(given, "of rotary positions")
    theta = fields.take("rope_theta", kind=(float, int), default=10_000.0)
    theta = own.take("rope_theta", kind=(float, int), default=theta)
    kind = own.take("rope_type", "type", kind=str, default="default")
    for each in (fields, own):
        each.expect("partial_rotary_factor", 1.0, None)
    number: dict[str, Any] = {"kind": (float, int)}
    found: dict[str, Any] = {}
    if kind == "llama3":
        found = {name: own.take(name, **number) for name in ("low_freq_factor", "high_freq_factor")}
    elif kind == "yarn":
        found = {"beta_fast": own.take("beta_fast", default=32.0, **number)}
        found["beta_slow"] = own.take("beta_slow", default=1.0, **number)
        found["truncate"] = own.take("truncate", kind=bool, default=True)
        found["attention_factor"] = own.take("attention_factor", default=None, **number)
    elif kind not in ("default", "linear"):
        raise own.error(f"rope_type is {shown(kind)}: te_jax.models knows default, linear, llama3 and yarn")
    if kind != "default":
        found["factor"] = own.take("factor", **number)
    length = own.take("original_max_position_embeddings", kind=int, default=fields.look("max_position_embeddings"))
    own.finish()
    if kind == "default":
        return {"rope_theta": theta}
    try:
        scaling = RopeScaling(kind, original_length=None if kind == "linear" else length, **found)
        return {"rope_theta": theta, "rope_scaling": scaling}
    except ValueError as error:
        raise own.error(str(error)) from error


def _describe_rope(rope: Rope) -> dict[str, object]:
    scaling = None if rope.scaling is None else _describe_scaling(rope.scaling)
    return {"rope_theta": rope.theta, "rope_scaling": scaling, **_describe_length(rope.scaling)}


def _describe_scaling(scaling: RopeScaling) -> dict[str, object]:
    names = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_fast", "beta_slow", "truncate")}
    found = {"rope_type": scaling.kind, "factor": scaling.factor}
    found |= {name: getattr(scaling, name) for name in names.get(scaling.kind, ())}
    if scaling.original_length is not None:
        found["original_max_position_embeddings"] = scaling.original_length
    if scaling.attention_factor is not None:
        found["attention_factor"] = scaling.attention_factor
    return found


def _describe_length(scaling: RopeScaling | None) -> dict[str, int]:
    """Number of positions. Some versions of transformers compute the factor of yarn from it."""
    if scaling is None or scaling.original_length is None:
        return {}
    return {"max_position_embeddings": round(scaling.original_length * scaling.factor)}


def _window(fields: Fields) -> Arguments:
    """The window of all blocks."""
    return {"window": fields.take("sliding_window", kind=int, default=None)}


def _windows(fields: Fields, used: bool = True, every: int | None = None) -> Arguments:
    """The window of all blocks, or of each; without layer_types every so many blocks one has none."""
    width = fields.take("sliding_window", kind=int, default=None)
    kinds = fields.take("layer_types", kind=list, default=None)
    first = fields.take("max_window_layers", kind=int, default=0)  # of Qwen: blocks before it have no window
    count = fields.look("num_hidden_layers")
    if not used or width is None or (kinds is None and first >= count):
        return {"window": None}
    if kinds is None:
        if count > _MOST_LAYERS:
            raise fields.error(f"num_hidden_layers is {count}, and te_jax.models knows at most {_MOST_LAYERS}")
        kinds = [("full", "sliding")[i >= first] + "_attention" for i in range(count)]
        if every is not None:
            kinds = [("full", "sliding")[(i + 1) % max(every, 1) != 0] + "_attention" for i in range(count)]
    if not set(map(str, kinds)) <= {"full_attention", "sliding_attention"}:
        raise fields.error("layer_types names others than full_attention and sliding_attention")
    if len(kinds) != count:
        raise fields.error(f"layer_types has {len(kinds)} entries, and num_hidden_layers is {count}")
    windows = tuple(width if kind == "sliding_attention" else None for kind in kinds)
    return {"window": width if windows == (width,) * count else windows}


def _describe_window(config: DecoderConfig) -> dict[str, object]:
    """The window of the first block; `family_of` finds out whether all have it."""
    return {"sliding_window": config.windows[0]}


def _describe_windows(config: DecoderConfig) -> dict[str, object]:
    widths = {width for width in config.windows if width is not None}
    if len(widths) > 1:
        raise AttributeError("blocks have several windows")
    kinds = ["full_attention" if each is None else "sliding_attention" for each in config.windows]
    return {"sliding_window": next(iter(widths), None), "layer_types": kinds}


def _router(fields: Fields, *, count: tuple[str, ...], normalize: bool, biases: bool = False) -> Arguments:
    num_experts = fields.take(*count, kind=int)
    top_k = fields.take("num_experts_per_tok", "experts_per_token", kind=int)
    weight = fields.take("router_aux_loss_coef", kind=(float, int), default=0.0)
    fields.expect("router_jitter_noise", 0.0, None)
    experts = Experts(num_experts, Router(top_k, normalize=normalize), balance_weight=weight, biases=biases)
    return {"experts": experts}


def _describe_router(config: DecoderConfig, count: str = "num_local_experts") -> dict[str, object]:
    experts = config.experts
    if experts is None:
        raise AttributeError("there are no experts")
    return {
        count: experts.num_experts,
        "num_experts_per_tok": experts.router.top_k,
        "router_aux_loss_coef": experts.balance_weight,
    }


# Families


def _llama(fields: Fields) -> Arguments:
    fields.expect("mlp_bias", False)
    fields.expect("rope_interleaved", False)
    return {"attention_biases": ATTENTION if fields.take("attention_bias", kind=bool, default=False) else ()}


_GRANITE = {
    **{"embedding_multiplier": "embedding", "residual_multiplier": "residual", "attention_multiplier": "scores"},
    "logits_scaling": "logits_divisor",
}
"""Fields of Granite's config.json, and those of Factors."""


def _granite(fields: Fields) -> Arguments:
    number: dict[str, Any] = {"kind": (float, int), "default": 1.0}
    found = {ours: fields.take(theirs, **number) for theirs, ours in _GRANITE.items()}
    return _llama(fields) | {"factors": Factors(**found)}


def _describe_granite(config: DecoderConfig) -> dict[str, object]:
    found = {theirs: getattr(config.architecture.factors, ours) for theirs, ours in _GRANITE.items()}
    return _describe_biases(config) | found


def _phi3(fields: Fields) -> Arguments:
    for name in ("resid_pdrop", "embd_pdrop"):
        fields.expect(name, 0.0)
    fields.take("original_max_position_embeddings", kind=int, default=None)  # which longrope alone reads
    return _window(fields)


def _olmo2(fields: Fields) -> Arguments:
    return _llama(fields) | {"norms": "after", "qk_norm": "projection"}


def _describe_biases(config: DecoderConfig) -> dict[str, object]:
    return {"attention_bias": bool(config.attention_biases)}


def _qwen2(fields: Fields) -> Arguments:
    fields.expect("use_mrope", False)
    used = fields.take("use_sliding_window", kind=bool, default=False)
    return {"attention_biases": _BIASES} | _windows(fields, used)


def _describe_qwen(config: DecoderConfig) -> dict[str, object]:
    windows = _describe_windows(config)
    return windows | {"use_sliding_window": windows["sliding_window"] is not None}


def _qwen3(fields: Fields) -> Arguments:
    used = fields.take("use_sliding_window", kind=bool, default=False)
    return _normalized(fields) | _windows(fields, used)


def _listed_windows(fields: Fields) -> Arguments:
    """Those of families whose versions of transformers disagree about blocks that layer_types does not name."""
    used = fields.take("use_sliding_window", kind=bool, default=False)
    if used and fields.look("layer_types") is None:
        raise fields.error("layer_types is missing")
    return _windows(fields, used)


def _rope_of_smollm3(fields: Fields) -> Arguments:
    rope, count = _rope(fields), fields.look("num_hidden_layers")
    every = fields.take("no_rope_layer_interval", kind=int, default=4)
    given = fields.take("no_rope_layers", kind=list, default=None)  # 0 for a block without
    if given is None:
        if every < 1 or count > _MOST_LAYERS:
            raise fields.error(f"no_rope_layer_interval is {every} and num_hidden_layers {count}: give no_rope_layers")
        given = [int((layer + 1) % every != 0) for layer in range(count)]
    if not all(each in (0, 1) for each in given):
        raise fields.error("no_rope_layers has others than 0 and 1")
    theta = rope["rope_theta"]
    return rope | {"rope_theta": theta if all(given) else tuple(theta if each else None for each in given)}


def _describe_smollm3(config: DecoderConfig) -> dict[str, object]:
    rotated = [int(rope is not None) for rope in config.ropes]
    return _describe_qwen(config) | _describe_biases(config) | {"no_rope_layers": rotated}


def _normalized(fields: Fields) -> Arguments:
    biases = ATTENTION if fields.take("attention_bias", kind=bool, default=False) else ()
    return {"qk_norm": True, "attention_biases": biases}


def _gemma(fields: Fields) -> Arguments:
    fields.expect("use_bidirectional_attention", None, False)
    biases = ATTENTION if fields.take("attention_bias", kind=bool, default=False) else ()
    return {"zero_centered_norms": True, "scaled_embedding": True, "attention_biases": biases}


_NUMBER: dict[str, Any] = {"kind": (int, float), "default": None}
_BASE: dict[str, Any] = {"kind": (int, float), "default": 10_000.0}


def _gemma2(fields: Fields) -> Arguments:
    fields.take("cache_implementation", kind=str, default=None)
    scalar = fields.take("query_pre_attn_scalar", kind=(int, float))
    if scalar <= 0:
        raise fields.error(f"query_pre_attn_scalar is {shown(scalar)}: it needs to be above 0")
    caps = (fields.take(f"{name}_logit_softcapping", **_NUMBER) for name in ("attn", "final"))
    return _gemma(fields) | {"norms": "both", "factors": Factors(scores=scalar**-0.5), "softcaps": Softcaps(*caps)}


def _describe_gemma2(config: DecoderConfig) -> dict[str, object]:
    scores = config.architecture.factors.scores
    assert scores is not None
    found = {"query_pre_attn_scalar": round(scores**-2), "hidden_activation": "gelu_pytorch_tanh"}
    found |= {"attn_logit_softcapping": config.softcaps.scores, "final_logit_softcapping": config.softcaps.logits}
    return _describe_biases(config) | _describe_windows(config) | found


def _gemma3(fields: Fields) -> Arguments:
    fields.expect("attn_logit_softcapping", None)  # which transformers does not read
    return _gemma2(fields) | {"qk_norm": True}


def _blocks_of_gemma3(fields: Fields) -> Arguments:
    """Windows, and rotary positions: blocks with a window have others than those without."""
    if fields.look("sliding_window") is None:
        raise fields.error("sliding_window is missing")
    every = fields.take("sliding_window_pattern", "_sliding_window_pattern", kind=int, default=6)
    window, local = _windows(fields, every=every)["window"], fields.take("rope_local_base_freq", **_BASE)
    rope = fields.look("rope_parameters")
    if isinstance(rope, dict) and not rope.keys().isdisjoint(kinds := ("full_attention", "sliding_attention")):
        parts = fields.part(**fields.take("rope_parameters", kind=dict))
        bases = fields.take("rope_theta", **_BASE), local
        of_whole, of_local = (
            _rope(fields.part(rope_theta=base, rope_parameters=parts.take(kind, kind=dict, default={})))
            for kind, base in zip(kinds, bases, strict=True)
        )
        parts.finish()
    else:
        of_whole, of_local = _rope(fields), {"rope_theta": local}
    windows = window if isinstance(window, tuple) else (window,) * fields.look("num_hidden_layers")
    of_blocks = [of_whole if each is None else of_local for each in windows]
    names = ("rope_theta", "rope_scaling")
    return {"window": window} | {name: tuple(each.get(name) for each in of_blocks) for name in names}


def _describe_gemma3(config: DecoderConfig) -> dict[str, object]:
    both = list(zip(config.windows, config.ropes, strict=True))
    whole = next((rope for window, rope in both if window is None), None)
    local = next((rope for window, rope in both if window is not None), None)
    found = {"rope_local_base_freq": (local or _DEFAULT_ROPE).theta, **_describe_rope(whole or Rope(1e6, None))}
    return _describe_gemma2(config) | found


def _qwen3_moe(fields: Fields) -> Arguments:
    fields.expect("decoder_sparse_step", 1)
    fields.expect("mlp_only_layers", [], None)
    normalize = fields.take("norm_topk_prob", kind=bool, default=False)
    experts = _router(fields, count=("num_experts", "num_local_experts"), normalize=normalize)
    fields.take("max_window_layers", kind=int, default=None)  # which transformers reads no more
    window = _window(fields) if fields.take("use_sliding_window", kind=bool, default=False) else {}
    fields.take("sliding_window", kind=int, default=None)
    return _normalized(fields) | experts | window | {"mlp_size": fields.take("moe_intermediate_size", kind=int)}


def _describe_qwen3_moe(config: DecoderConfig) -> dict[str, object]:
    experts = _describe_router(config, "num_experts")
    assert config.experts is not None
    more = {"moe_intermediate_size": config.mlp_size, "norm_topk_prob": config.experts.router.normalize}
    window = _describe_window(config)
    more |= {"decoder_sparse_step": 1, "use_sliding_window": window["sliding_window"] is not None}
    return _describe_biases(config) | window | experts | more


def _qwen2_moe(fields: Fields) -> Arguments:
    fields.expect("decoder_sparse_step", 1)
    dense = fields.take("mlp_only_layers", kind=list, default=[])
    if dense != [*range(len(dense))]:
        raise fields.error(f"mlp_only_layers is {shown(dense)}, and te_jax.models knows the first blocks, in order")
    normalize = fields.take("norm_topk_prob", kind=bool, default=False)
    experts = dataclasses.replace(
        _router(fields, count=("num_experts", "num_local_experts"), normalize=normalize)["experts"],
        weighted_shared=fields.take("shared_expert_intermediate_size", kind=int),
        dense_layers=len(dense),
        dense_size=fields.look("intermediate_size") if dense else None,
    )
    biases = _BIASES if fields.take("qkv_bias", kind=bool, default=True) else ()
    sizes = {"mlp_size": fields.take("moe_intermediate_size", kind=int)}
    return sizes | {"experts": experts, "attention_biases": biases} | _listed_windows(fields)


def _describe_qwen2_moe(config: DecoderConfig) -> dict[str, object]:
    found = _describe_qwen(config) | _describe_router(config, "num_experts")
    experts = config.experts
    assert experts is not None
    return found | {
        **{"intermediate_size": experts.dense_size or config.mlp_size, "moe_intermediate_size": config.mlp_size},
        **{"mlp_only_layers": [*range(experts.dense_layers)], "norm_topk_prob": experts.router.normalize},
        **{"shared_expert_intermediate_size": experts.weighted_shared, "qkv_bias": bool(config.attention_biases)},
    }


def _latent(fields: Fields) -> Arguments:
    """Latent attention and its rotary positions, as both models of DeepSeek have them."""
    for name, value in (("attention_bias", False), ("mlp_bias", False), ("rope_interleave", True)):
        fields.expect(name, value)
    for name in ("head_dim", "qk_head_dim"):  # which follow from these
        fields.take(name, kind=int, default=None)
    names = {"rank": "kv_lora_rank", "rope_dim": "qk_rope_head_dim", "value_dim": "v_head_dim"}
    sizes = {ours: fields.take(theirs, kind=int) for ours, theirs in names.items()}
    latent = Latent(**sizes, query_rank=fields.take("q_lora_rank", kind=int, default=None))
    head_dim = latent.rope_dim + fields.take("qk_nope_head_dim", kind=int)
    given = fields.take("rope_parameters", "rope_scaling", kind=dict, default={})
    of_rope, scores = {**given}, None
    if given.get("rope_type", given.get("type")) == "yarn":
        # Two factors more than elsewhere: of scores, and by a quotient of cos and sin.
        own = fields.nested(given, "of rotary positions")
        factor = own.take("factor", kind=(int, float))
        scale, of_scores = (own.take(name, kind=(int, float), default=0) for name in ("mscale", "mscale_all_dim"))
        if not all(is_finite_number(each) and each >= 0 for each in (factor - 1, scale, of_scores)):
            raise own.error("factor needs to be at least 1, and mscale and mscale_all_dim at least 0")
        of_rope = {name: value for name, value in given.items() if name not in ("mscale", "mscale_all_dim")}
        if of_scores:
            scores = max(head_dim, 1) ** -0.5 * _magnitude(factor, of_scores) ** 2
        if scale and of_scores and given.get("attention_factor") is None:
            of_rope["attention_factor"] = _magnitude(factor, scale) / _magnitude(factor, of_scores)
    rope = _rope(fields.part(rope_theta=fields.take("rope_theta", **_BASE), rope_parameters=of_rope))
    return rope | {"latent": latent, "head_dim": head_dim, "factors": Factors(scores=scores)}


def _magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0


def _describe_latent(config: DecoderConfig) -> dict[str, object]:
    latent, factors = config.latent, config.architecture.factors
    if latent is None or factors.scores is None:
        raise AttributeError("there is no latent attention")
    rope = next((rope for rope in config.ropes if rope is not None), _DEFAULT_ROPE)
    found = _describe_rope(rope)
    if rope.scaling is not None and rope.scaling.kind == "yarn" and (log := 0.1 * math.log(rope.scaling.factor)):
        magnitude = math.sqrt(factors.scores * config.head_dim**0.5)
        scales = {"mscale": rope.scaling.magnitude * magnitude, "mscale_all_dim": magnitude}
        scales = {name: round((value - 1) / log, 6) for name, value in scales.items()}
        found["rope_scaling"] = _describe_scaling(rope.scaling) | scales
    return found | {
        **{"q_lora_rank": latent.query_rank, "kv_lora_rank": latent.rank, "qk_rope_head_dim": latent.rope_dim},
        **{"qk_nope_head_dim": config.head_dim - latent.rope_dim, "v_head_dim": latent.value_dim},
        **{"head_dim": latent.rope_dim, "attention_bias": False, "rope_interleave": True},
    }


def _deepseek(fields: Fields, *, grouped: bool, top_of_group: int, **of_router: Any) -> Arguments:
    """Experts, of which some meet every token, and blocks before them without any."""
    fields.expect("moe_layer_freq", 1)
    # Settings of training and of several devices, and blocks that are not read.
    fields.take("seq_aux", kind=bool, default=None)
    for name in ("ep_size", "num_nextn_predict_layers", "num_mtp_layers"):
        fields.take(name, kind=int, default=None)
    top_k, number = fields.take("num_experts_per_tok", kind=int), {"kind": (int, float)}
    groups, top = (fields.take(name, kind=int, default=1) for name in ("n_group", "topk_group"))
    if not grouped or top == groups:
        groups = top = 1
    router = Router(
        top_k,
        num_groups=groups,
        top_groups=top,
        scaling_factor=fields.take("routed_scaling_factor", **number),
        top_of_group=None if groups == 1 or top_of_group * top == top_k else top_of_group,
        **of_router,
    )
    dense = fields.take("first_k_dense_replace", kind=int)
    experts = Experts(
        fields.take("n_routed_experts", "num_local_experts", "num_experts", kind=int),
        router,
        balance_weight=fields.take("aux_loss_alpha", default=0.0, **number),
        choice_bias=router.score == "sigmoid",
        shared=fields.take("n_shared_experts", kind=int),
        dense_layers=dense,
        dense_size=fields.look("intermediate_size") if dense else None,
    )
    return {"experts": experts, "mlp_size": fields.take("moe_intermediate_size", kind=int)}


def _describe_deepseek(config: DecoderConfig) -> dict[str, object]:
    if (experts := config.experts) is None:
        raise AttributeError("there are no experts")
    router = experts.router
    return _describe_latent(config) | {
        **{"intermediate_size": experts.dense_size or config.mlp_size, "moe_intermediate_size": config.mlp_size},
        **{"first_k_dense_replace": experts.dense_layers, "n_shared_experts": experts.shared},
        **{"n_routed_experts": experts.num_experts, "num_experts_per_tok": router.top_k},
        **{"n_group": router.num_groups, "topk_group": router.top_groups, "norm_topk_prob": router.normalize},
        **{"routed_scaling_factor": router.scaling_factor, "aux_loss_alpha": experts.balance_weight},
    }


def _deepseek_v3(fields: Fields) -> Arguments:
    fields.expect("scoring_func", "sigmoid")
    fields.expect("topk_method", "noaux_tc")
    normalize = fields.take("norm_topk_prob", kind=bool)
    return _deepseek(fields, grouped=True, top_of_group=2, score="sigmoid", normalize=normalize)


def _describe_deepseek_v3(config: DecoderConfig) -> dict[str, object]:
    more = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 0}
    return _describe_deepseek(config) | more


def _deepseek_v2(fields: Fields) -> Arguments:
    fields.expect("scoring_func", "softmax")
    fields.expect("norm_topk_prob", False)
    method = fields.take("topk_method", kind=str)
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.error(f"topk_method is {shown(method)}: te_jax.models knows greedy and group_limited_greedy")
    return _deepseek(fields, grouped=method != "greedy", top_of_group=1, normalize=False)


def _describe_deepseek_v2(config: DecoderConfig) -> dict[str, object]:
    found = _describe_deepseek(config)
    method = "greedy" if found["n_group"] == 1 else "group_limited_greedy"
    return found | {"scoring_func": "softmax", "topk_method": method}


def _gpt_oss(fields: Fields) -> Arguments:
    for name in ("initial_context_length", "rope_scaling_factor", "rope_ntk_alpha", "rope_ntk_beta"):
        fields.take(name, kind=(float, int), default=None)  # which rope_parameters say again
    limit = fields.take("swiglu_limit", kind=(float, int), default=7.0)
    activation = Activation("silu", fields.take("swiglu_alpha", kind=float, default=1.702), limit, 1.0)
    fields.expect("attention_bias", True)
    experts = _router(fields, count=("num_local_experts",), normalize=True, biases=True)
    found = {"activation": activation, "attention_biases": ATTENTION, "attention_sinks": True}
    if fields.look("layer_types") is None:
        raise fields.error("layer_types is missing")
    return found | experts | _windows(fields)


def _describe_gpt_oss(config: DecoderConfig) -> dict[str, object]:
    activation = Activation.of(config.activation)
    found = {"swiglu_alpha": activation.alpha, "swiglu_limit": activation.limit, "attention_bias": True}
    return found | _describe_router(config) | _describe_windows(config)


class Family(NamedTuple):
    """Models of one model_type.

    Attributes:
      model_type, architecture: in config.json.
      read: fields of their own → arguments of a DecoderConfig.
      describe: the other way; a TypeError or AttributeError says that such a decoder is none of them.
      defaults: of fields that config.json may leave out, where they are not those of the other families.
      experts: the tensors of a block's experts.
      rope: fields of rotary positions → arguments of a DecoderConfig.
      joined: the kernels that a module of a block has together.
      has_later_blocks: whether files may have blocks behind the last one, for later tokens, which are not read.
    """

    model_type: str
    architecture: str
    read: Callable[[Fields], Arguments]
    describe: Callable[[DecoderConfig], dict[str, object]]
    defaults: dict[str, Any] = {}  # noqa: RUF012, nobody writes to it
    experts: OfExperts = of_gpt_oss
    rope: Callable[[Fields], Arguments] = _rope
    joined: dict[str, tuple[str, ...]] = {}  # noqa: RUF012
    has_later_blocks: bool = False


_OF_QWEN = {"sliding_window": 4096, "max_window_layers": 28}
_OF_DEEPSEEK = {
    **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
}
_OF_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}

FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", "LlamaForCausalLM", _llama, _describe_biases),
        Family("mistral", "MistralForCausalLM", _window, _describe_window, {"sliding_window": 4096}),
        Family("qwen2", "Qwen2ForCausalLM", _qwen2, _describe_qwen, _OF_QWEN),
        Family("qwen3", "Qwen3ForCausalLM", _qwen3, lambda c: {**_describe_qwen(c), **_describe_biases(c)}, _OF_QWEN),
        Family(
            "gemma",
            "GemmaForCausalLM",
            _gemma,
            _describe_biases,
            {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
        ),
        Family(
            "smollm3",
            "SmolLM3ForCausalLM",
            lambda fields: _llama(fields) | _listed_windows(fields),
            _describe_smollm3,
            {"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
            rope=_rope_of_smollm3,
        ),
        Family("olmo2", "Olmo2ForCausalLM", _olmo2, _describe_biases, {"rms_norm_eps": 1e-5}),
        Family(
            "phi3",
            "Phi3ForCausalLM",
            _phi3,
            _describe_window,
            {"rms_norm_eps": 1e-5},
            joined={"self_attn.qkv_proj": ("query", "key", "value"), "mlp.gate_up_proj": ("gate", "up")},
        ),
        Family("granite", "GraniteForCausalLM", _granite, _describe_granite),
        Family(
            "gemma2",
            "Gemma2ForCausalLM",
            lambda fields: _gemma2(fields) | _windows(fields, every=2),
            _describe_gemma2,
            {
                **{"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh", "head_dim": 256},
                **{"num_key_value_heads": 4, "sliding_window": 4096, "query_pre_attn_scalar": 256},
                **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
            },
        ),
        Family(
            "gemma3_text",
            "Gemma3ForCausalLM",
            _gemma3,
            _describe_gemma3,
            {
                **{"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh", "head_dim": 256},
                **{"num_key_value_heads": 4, "rope_theta": 1e6, "sliding_window": 4096, "query_pre_attn_scalar": 256},
            },
            rope=_blocks_of_gemma3,
        ),
        Family(
            "mixtral",
            "MixtralForCausalLM",
            lambda fields: _router(fields, count=("num_local_experts",), normalize=True) | _window(fields),
            lambda config: _describe_router(config) | _describe_window(config),
            {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
            one_by_one("block_sparse_moe", {"gate": "w1", "down": "w2", "up": "w3"}),
        ),
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            _qwen3_moe,
            _describe_qwen3_moe,
            {"sliding_window": 4096},
            one_by_one("mlp", {name: f"{name}_proj" for name in MLP}),
        ),
        Family(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            _qwen2_moe,
            _describe_qwen2_moe,
            _OF_QWEN,
            one_by_one("mlp", {name: f"{name}_proj" for name in MLP}),
        ),
        Family(
            "deepseek_v2",
            "DeepseekV2ForCausalLM",
            _deepseek_v2,
            _describe_deepseek_v2,
            {
                **_OF_DEEPSEEK,
                **{
                    "n_routed_experts": 64,
                    "n_shared_experts": 2,
                    "topk_method": "greedy",
                    "routed_scaling_factor": 1.0,
                },
                **{"first_k_dense_replace": 0, "moe_intermediate_size": 1407, "intermediate_size": 11008},
            },
            one_by_one("mlp", {name: f"{name}_proj" for name in MLP}),
            _latent,
        ),
        Family(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            _deepseek_v3,
            _describe_deepseek_v3,
            {
                **_OF_DEEPSEEK,
                **{"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8},
                **{"topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3},
                **{"moe_intermediate_size": 2048, "intermediate_size": 18432},
            },
            one_by_one("mlp", {name: f"{name}_proj" for name in MLP}),
            _latent,
            has_later_blocks=True,
        ),
        Family(
            "gpt_oss",
            "GptOssForCausalLM",
            _gpt_oss,
            _describe_gpt_oss,
            {"rms_norm_eps": 1e-5, "rope_theta": 1.5e5, "rope_scaling": _OF_GPT_OSS_ROPE, "sliding_window": 128},
        ),
    )
}
"""By model_type, those with the fewest parts first."""
