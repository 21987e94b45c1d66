"""Makes the folders beside this file: tiny models of transformers, for tests of `te_jax.models.from_hf`.

    python -m pip install torch transformers
    python tests/models/hf/make.py [folder]

Each has config.json, its tensors in bfloat16, and expected.npz: tokens, the float32 logits of transformers, and the
tokens that it generates greedily. Parameters are drawn so that every one matters, also scales of norms, biases and
sinks; windows are shorter than the sequences, and scaled rotary positions are neither all as they were nor all scaled.
"""

import json
import pathlib
import shutil
import sys
import zlib
from typing import Any

import numpy as np
import torch
import transformers as hf

SHAPE: Any = {
    **{"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 48, "head_dim": 16, "initializer_range": 0.3, "max_position_embeddings": 64},
}
NO_TOKENS: Any = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # classes have larger ones
EXPERTS: Any = SHAPE | {"intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"rope_theta": 1e3, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 16}
OF_GPT_OSS = YARN | {"rope_theta": 1.5e5, "beta_fast": 8.0, "beta_slow": 0.5, "truncate": False}
OF_DEEPSEEK: Any = (
    SHAPE
    | NO_TOKENS
    | {
        **{"num_hidden_layers": 3, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8},
        **{"qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 12, "num_experts_per_tok": 4},
        **{"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 16},
    }
)
del OF_DEEPSEEK["head_dim"]
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}

CONFIGS = {
    "llama": hf.LlamaConfig(**SHAPE, attention_bias=True, rms_norm_eps=1e-5, rope_parameters=LLAMA3),
    "llama_tied": hf.LlamaConfig(**SHAPE | {"head_dim": 8}, tie_word_embeddings=True, rope_parameters=LINEAR),
    "llama_2024": hf.LlamaConfig(**SHAPE, rope_parameters=LLAMA3),  # with a config.json of that year
    "mistral": hf.MistralConfig(**SHAPE, sliding_window=5),  # in several files
    "qwen2": hf.Qwen2Config(
        **SHAPE | {"head_dim": 8},
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=1,
        tie_word_embeddings=True,
    ),
    "qwen3": hf.Qwen3Config(**SHAPE, rope_parameters=YARN),
    "gemma": hf.GemmaConfig(**SHAPE),
    "granite": hf.GraniteConfig(
        **SHAPE | {"head_dim": 8},
        embedding_multiplier=6.0,
        residual_multiplier=0.6,
        attention_multiplier=0.2,
        logits_scaling=3.0,
        tie_word_embeddings=True,
    ),
    "smollm3": hf.SmolLM3Config(
        **SHAPE | {"head_dim": 8, "num_hidden_layers": 3},
        no_rope_layer_interval=2,
        use_sliding_window=True,
        sliding_window=5,
        **NO_TOKENS,
    ),
    "olmo2": hf.Olmo2Config(**SHAPE, **NO_TOKENS),
    "phi3": hf.Phi3Config(**SHAPE | {"head_dim": 8}, sliding_window=5, **NO_TOKENS),
    "gemma2": hf.Gemma2Config(
        **SHAPE,
        sliding_window=5,
        query_pre_attn_scalar=9,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        **NO_TOKENS,
    ),
    "gemma3": hf.Gemma3TextConfig(
        **SHAPE | {"num_hidden_layers": 3},
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=5,
        query_pre_attn_scalar=9,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e3, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
        **NO_TOKENS,
    ),
    "mixtral": hf.MixtralConfig(**EXPERTS),
    "qwen3_moe": hf.Qwen3MoeConfig(**EXPERTS, moe_intermediate_size=16, norm_topk_prob=True),
    "qwen2_moe": hf.Qwen2MoeConfig(
        **SHAPE | {"head_dim": 8, "num_hidden_layers": 3},
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=48,
        mlp_only_layers=[0],
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        use_sliding_window=True,
        sliding_window=5,
        **NO_TOKENS,
    ),
    "deepseek_v2": hf.DeepseekV2Config(
        **OF_DEEPSEEK,
        q_lora_rank=None,
        n_shared_experts=2,
        topk_method="group_limited_greedy",
        routed_scaling_factor=3.0,
        rope_parameters=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "deepseek_v3": hf.DeepseekV3Config(
        **OF_DEEPSEEK,
        q_lora_rank=24,
        num_mtp_layers=0,
        rope_parameters=YARN | {"mscale": 1.5, "mscale_all_dim": 0.707},
    ),
    "gpt_oss": hf.GptOssConfig(**EXPERTS, sliding_window=5, swiglu_limit=1.0, rope_parameters=OF_GPT_OSS),
}


def make(folder: pathlib.Path, config: Any) -> None:
    name = folder.name
    torch.manual_seed(zlib.crc32(name.encode()))
    model = hf.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1 or parameter_name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
        biases = {name: 0.3 * torch.randn_like(bias) for name, bias in choice_biases(model).items()}
    shutil.rmtree(folder, ignore_errors=True)
    model.bfloat16()
    for name, bias in biases.items():  # in float32, as in published files
        model.get_submodule(name.rpartition(".")[0]).e_score_correction_bias = bias
    model.save_pretrained(folder, max_shard_size="20KB" if name == "mistral" else "5GB")
    (folder / "generation_config.json").unlink()
    for file in folder.iterdir():
        file.chmod(0o644)
    if name == "llama_2024":
        as_in_2024(folder / "config.json")

    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.randint(0, config.vocab_size, (2, 24))
    with torch.no_grad():
        logits = model(tokens).logits
        check_that_all_matters(model, tokens, logits)
        prompt = tokens[:1, :8]
        options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        # Without a mask, token 0 of the prompt would count as padding.
        text = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    as_bytes = {"tokens": tokens.numpy().astype(np.uint8), "generated": text.numpy().astype(np.uint8)}
    np.savez_compressed(folder / "expected.npz", logits=logits.numpy(), **as_bytes)


def choice_biases(model: Any) -> dict[str, torch.Tensor]:
    return {name: x for name, x in model.named_buffers() if name.endswith("e_score_correction_bias")}


def as_in_2024(path: pathlib.Path) -> None:
    fields = json.loads(path.read_text())
    scaling = fields.pop("rope_parameters")
    fields["rope_theta"] = scaling.pop("rope_theta")
    fields["rope_scaling"] = {"type": scaling.pop("rope_type"), **scaling}
    fields["torch_dtype"] = fields.pop("dtype")
    fields["transformers_version"] = "4.43.0"
    path.write_text(json.dumps(fields, indent=2) + "\n")


def check_that_all_matters(model: Any, tokens: torch.Tensor, logits: torch.Tensor) -> None:
    """Every parameter moves logits, and no token is so near to another expert that rounding in float32 decides."""
    for name, parameter in (*model.named_parameters(), *choice_biases(model).items()):
        kept = parameter.clone()
        parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
        moved = (model(tokens).logits - logits).abs().max() / logits.abs().max()
        parameter.copy_(kept)
        assert moved > 1e-3, (name, moved)
    for name, module in model.named_modules():
        if name.endswith(("mlp.gate", "mlp.router", "block_sparse_moe.gate")):
            with module.register_forward_pre_hook(check_gap):
                model(tokens)


def check_gap(router: Any, inputs: tuple[torch.Tensor, ...]) -> None:
    """The scores of the last expert that is chosen, and of the first that is not."""
    if hasattr(router, "num_group"):
        return check_gaps_of_groups(router, inputs[0])
    scores = torch.nn.functional.linear(inputs[0], router.weight, getattr(router, "bias", None)).sort(-1).values
    gaps = scores[..., -2] - scores[..., -3]
    assert gaps.min() > 1e-4, gaps


def check_gaps_of_groups(router: Any, x: torch.Tensor) -> None:
    """The same of DeepSeek's: of groups, and of the experts in those that are chosen."""
    logits = torch.nn.functional.linear(x.reshape(-1, x.shape[-1]), router.weight)
    is_v3 = hasattr(router, "e_score_correction_bias")
    scores = logits.sigmoid() + router.e_score_correction_bias if is_v3 else logits.softmax(-1)
    grouped = scores.unflatten(-1, (router.num_group, -1))
    of_groups = grouped.topk(2 if is_v3 else 1, dim=-1).values.sum(-1)
    chosen = of_groups >= of_groups.topk(router.topk_group, dim=-1).values[:, -1:]
    inside = grouped.masked_fill(~chosen[..., None], -1).flatten(1)
    for values, count in ((of_groups, router.topk_group), (inside, router.top_k)):
        ordered = values.sort(dim=-1, descending=True).values
        gaps = ordered[:, count - 1] - ordered[:, count]
        assert gaps.min() > 1e-5, gaps


if __name__ == "__main__":
    into = pathlib.Path(sys.argv[1]) if sys.argv[1:] else pathlib.Path(__file__).parent
    for model_name, model_config in CONFIGS.items():
        make(into / model_name, model_config)
        print(model_name)
