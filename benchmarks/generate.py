"""Text from a decoder: `te_jax.models.generate` with kernels in bfloat16 and in FP8, beside transformers.

Random parameters in bfloat16, random prompts, and the most likely token each time. A call is what a user writes: it
reads the prompts, and with a recipe quantizes the kernels, once; a time is that of a call over its new tokens.

Implementations: `te_jax` (kernels in bfloat16), `te_jax_block` (blocks of 128 values to a scale), `transformers`
(`model.generate` of the same shape in bfloat16, with its defaults) and `transformers_static` (with its cache of a fixed
size, which torch compiles for).

No time is reported for te_jax where fewer than 95% of the tokens are most likely, within 1/64 of the largest logit, for
`te_jax.models.apply` by XLA alone after the ones before: its logits are rounded to bfloat16, and many are equal.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import shapes
from benchmarks.harness import (
    Candidate,
    CaseResult,
    Checked,
    Family,
    Headline,
    Timing,
    compute_row,
    rounded,
    run_operation,
)
from benchmarks.torch_peer import torch_on_gpu
from te_jax import models
from te_jax.models import PRESETS, DecoderConfig
from te_jax.models.config import Params
from te_jax.recipe import BlockScaling

RECIPES = {"te_jax": None, "te_jax_block": BlockScaling()}
PEERS = ("transformers", "transformers_static")
IMPLEMENTATIONS = (*RECIPES, *PEERS)

_LEAST_AGREEMENT = 0.95


def run_case(case: shapes.GenerateShape, implementations: Sequence[str], timing: Timing) -> CaseResult:
    """Measure one case with the named implementations; see `harness.Family.run_case`."""
    result = CaseResult()
    prompts = np.asarray(jax.random.randint(jax.random.key(1), (case.batch, case.prompt), 0, _config(case).vocab_size))
    run_operation(
        {"case": case.name, "model": case.model, "operation": "token"},
        implementations,
        timing,
        result,
        build=functools.partial(_build, case=case, prompts=prompts),
        errors=functools.partial(_checked, case=case, prompts=prompts),
        row=functools.partial(_row, case=case),
    )
    _params.cache_clear()
    return result


def _config(case: shapes.GenerateShape, name: str = "te_jax") -> DecoderConfig:
    dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    return dataclasses.replace(PRESETS[case.preset], dtype=dtype, recipe=RECIPES[name])


@functools.lru_cache(maxsize=1)
def _params(config: DecoderConfig) -> Params:
    init = jax.jit(lambda key: jax.tree.map(lambda x: x.astype(config.dtype), models.init(config, key)))
    return init(jax.random.key(0))


def _row(candidate: Candidate, seconds: dict[str, list[float]], *, case: shapes.GenerateShape) -> dict[str, Any]:
    products = sum(int(np.prod(shape)) for shape in _config(case).kernel_shapes.values()) * _config(case).num_layers
    row = compute_row(seconds, candidate.name, flops=2 * case.batch * products, peers=PEERS)
    return row | {"tokens_per_second": rounded(case.batch / row["median_ms"] * 1e3)}


def _checked(name: str, tokens: np.ndarray, _: Any, *, case: shapes.GenerateShape, prompts: np.ndarray) -> Checked:
    if name in PEERS:
        return {}, None
    config = _config(case, name)
    whole = jnp.concatenate([jnp.asarray(prompts), jnp.asarray(tokens)], axis=1)[:, :-1]

    @jax.jit
    def agreement_of(params: Params, whole: jax.Array, tokens: jax.Array) -> jax.Array:
        logits = models.apply(params, whole, config, implementation="reference")
        logits = logits[:, case.prompt - 1 :].astype(jnp.float32)
        largest, own = jnp.max(logits, axis=-1), jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
        return jnp.mean(own >= largest - jnp.abs(largest) / 64)

    # Two texts are checked: the logits of 64 would take 36 GB.
    agreement = float(agreement_of(_params(_config(case)), whole[:2], jnp.asarray(tokens[:2])))
    if agreement >= _LEAST_AGREEMENT:
        return {"difference": 1 - agreement}, None
    return {}, f"{agreement:.1%} of the tokens are most likely for models.apply, bound {_LEAST_AGREEMENT:.0%}"


def _build(name: str, case: shapes.GenerateShape, prompts: np.ndarray) -> Candidate:
    make = _of_transformers if name in PEERS else _of_te_jax
    return dataclasses.replace(make(name, case, prompts), seconds=lambda samples: [s / case.tokens for s in samples])


def _of_te_jax(name: str, case: shapes.GenerateShape, prompts: np.ndarray) -> Candidate:
    config, params = _config(case, name), _params(_config(case))
    generate = functools.partial(models.generate, config=config, max_new_tokens=case.tokens)
    given = jnp.asarray(prompts)
    return Candidate(
        name=name, call=lambda: generate(params, given), arguments=lambda calls: [()] * calls, read=np.asarray
    )


def _of_transformers(name: str, case: shapes.GenerateShape, prompts: np.ndarray) -> Candidate:
    torch = torch_on_gpu()
    try:
        from transformers import LlamaConfig, LlamaForCausalLM  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise RuntimeError("transformers is not installed") from error
    config = _config(case)
    shape = LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.mlp_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.heads.query,
        num_key_value_heads=config.heads.key_value,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_position_embeddings=case.prompt + case.tokens,
        tie_word_embeddings=False,
    )
    with torch.device("cuda"):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = LlamaForCausalLM(shape).eval()
        finally:
            torch.set_default_dtype(before)
        given = torch.as_tensor(prompts.copy())
    options: dict[str, Any] = {"max_new_tokens": case.tokens, "min_new_tokens": case.tokens, "do_sample": False}
    if name == "transformers_static":
        options["cache_implementation"] = "static"
    mask = torch.ones_like(given)

    def call() -> Any:
        with torch.inference_mode():
            return model.generate(given, attention_mask=mask, pad_token_id=0, **options)

    return Candidate(
        name=name,
        call=call,
        arguments=lambda calls: [()] * calls,
        wait=lambda _: torch.cuda.synchronize(),
        read=lambda found: found[:, case.prompt :].cpu().numpy(),
    )


FAMILY = Family(
    description="text from a decoder, in bfloat16 and in FP8, beside transformers",
    cases={"gpu": shapes.GENERATE_GPU, "cpu": shapes.GENERATE_CPU},
    implementations=IMPLEMENTATIONS,
    peers=PEERS,
    run_case=run_case,
    headline=Headline(
        operation="token",
        figure="median_ms",
        label="A token of every text, milliseconds",
        implementations=IMPLEMENTATIONS,
    ),
)
