"""Text from a decoder: tokens that follow a prompt, one after the other."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import Array, lax

from te_jax import ops, sharding
from te_jax.layers import sampling
from te_jax.layers.attention import Cache, attend_cached
from te_jax.models import tensor_parallel
from te_jax.models.block import Block, capped, final_norm, rotary_of
from te_jax.models.config import DecoderConfig, Params, kernel_facts
from te_jax.models.decoder import Implementation, head_of, requantize
from te_jax.ops.gemm_product import FEW_ROWS
from te_jax.ops.linear.kernels import Requantize, quantize_kernel
from te_jax.quantized import QuantizedArray
from te_jax.recipe import DelayedScaling

__all__ = ["generate"]

_ROW_MULTIPLE = 4
"""Rows of a product while texts are continued. Products of blocks with more than a few would each be padded to it, with
the scales, and XLA writes out the terms of a product of one row with a small kernel."""


# fmt: off
@overload
def generate(
    params: Params, tokens: jax.typing.ArrayLike, config: DecoderConfig, *, max_new_tokens: int,
    lengths: jax.typing.ArrayLike | None = None, samples: int = 1, temperature: float = 0.0, top_p: float = 1.0,
    top_k: int | None = None, key: Array | None = None,
    stop_tokens: Collection[int] = (), return_log_probs: Literal[False] = False,
    implementation: Implementation | None = None,
) -> Array: ...
@overload
def generate(
    params: Params, tokens: jax.typing.ArrayLike, config: DecoderConfig, *, max_new_tokens: int,
    lengths: jax.typing.ArrayLike | None = None, samples: int = 1, temperature: float = 0.0, top_p: float = 1.0,
    top_k: int | None = None, key: Array | None = None,
    stop_tokens: Collection[int] = (), return_log_probs: Literal[True],
    implementation: Implementation | None = None,
) -> tuple[Array, Array]: ...
# fmt: on
def generate(
    params: Params,
    tokens: jax.typing.ArrayLike,
    config: DecoderConfig,
    *,
    max_new_tokens: int,
    lengths: jax.typing.ArrayLike | None = None,
    samples: int = 1,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    key: Array | None = None,
    stop_tokens: Collection[int] = (),
    return_log_probs: bool = False,
    implementation: Implementation | None = None,
) -> Array | tuple[Array, Array]:
    """The tokens that follow a prompt.

    The prompt runs through the decoder at once, and then each token by itself, with keys and values of those before it
    in a cache [batch, time + max_new_tokens, kv_heads, head_dim] of each block, or with `config.latent` the latents of
    these, [batch, time + max_new_tokens, 1, rank + rope_dim]. Parameters in bfloat16 are read in half the time of
    float32 ones.

    Parameters may be split over devices by `jax.sharding`, as `te_jax.models.param_specs` says, and prompts by their
    batch: kernels and caches stay where they are, and for each token devices exchange some features of it, if
    their number divides that of heads of keys. Split experts by their columns: by their number they would be gathered.

    With a recipe kernels are quantized once, before the prompt, and each token reads a byte for each of their values.
    With `CurrentScaling` a text depends on the others of its batch, which share its scales.

    Args:
      params: of the decoder. Kernels may be quantized, as `te_jax.optim.merge_kernels` puts them into those of a train
        state: nothing is quantized again.
      tokens: integer [batch, time], each in [0, vocab_size): prompts.
      config: the shape. With experts, a `router.capacity` counts the tokens of each step.
      max_new_tokens: how many follow, at most.
      lengths: integer [batch], from 1 to time: the tokens of each prompt; those behind them are padding, of any values
        in [0, vocab_size). None for prompts of one length. Prompts that are padded to one of few lengths share a
        compilation. Scales of `CurrentScaling` and a capacity of experts count padding, too.
      samples: how many texts follow each prompt, which runs through the decoder once for all of them.
      temperature: divides the logits, which are float32, before a token is drawn; 0 takes the most likely one.
      top_p: tokens are drawn from the most likely ones, as few as have at least this probability together. Among equal
        logits the first tokens are the most likely ones.
      top_k: tokens are drawn from as many of the most likely ones, at most; None for all.
      key: a `jax.random.key`, where temperature is not 0.
      stop_tokens: those that end a text, each in [0, vocab_size); they repeat after it. Nothing is computed when all
        texts have ended.
      return_log_probs: return the log-probabilities of the tokens, too, as `te_jax.ops.linear_log_probs` has them at
        this temperature (1 for 0) for a trainer: whatever top_p and top_k leave out, and 0 after the end of a text.
      implementation: see `te_jax.models.apply`.

    Returns:
      int32 [batch × samples, max_new_tokens], where those of a prompt follow each other; with return_log_probs a tuple
      of that and float32 of the same shape.

    Raises:
      ValueError: an argument breaks a rule above (tokens only where their values are known: not inside `jax.jit`), or
        `config.recipe` is DelayedScaling, whose state is one of training.

    References:
      Holtzman et al., The Curious Case of Neural Text Degeneration (top_p), arXiv:1904.09751.

    Examples:
      >>> import jax, jax.numpy as jnp, te_jax
      >>> config = te_jax.models.PRESETS["nano"]
      >>> params = te_jax.models.init(config, jax.random.key(0))
      >>> te_jax.models.generate(params, jnp.array([[1, 2, 3]]), config, max_new_tokens=5).shape
      (1, 5)
    """
    DecoderConfig.check(config)
    options, inputs, temperature = sampling.validate(
        tokens,
        config.vocab_size,
        max_new_tokens=max_new_tokens,
        lengths=lengths,
        samples=samples,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        key=key,
        stop_tokens=stop_tokens,
    )
    if isinstance(config.recipe, DelayedScaling):
        raise ValueError("config.recipe is DelayedScaling, whose state is one of training: use another recipe or None")
    softmax = ops.Softmax(temperature or 1.0, logit_softcap=config.softcaps.logits) if return_log_probs else None
    found, log_probs = _generate(params, inputs, config, options, softmax, implementation)
    return found if log_probs is None else (found, log_probs)


@functools.partial(jax.jit, static_argnames=("config", "options", "softmax", "implementation"))
def _generate(
    params: Params,
    inputs: sampling.Inputs,
    config: DecoderConfig,
    options: sampling.Options,
    softmax: ops.Softmax | None,
    implementation: Implementation | None,
) -> tuple[Array, Array | None]:
    params = _quantized_once(params, config, implementation)
    room = inputs.prompt.shape[1] + options.count

    def run(tokens: Array, caches: list[Cache] | None, lengths: Array | None) -> tuple[Array, Array, list[Cache]]:
        return _run(params, tokens, caches, room, config, implementation, lengths)

    def keep(x: Array, logits: Array, tokens: Array) -> Array | None:
        # linear_log_probs of hidden states rounds as a trainer's head does.
        return None if softmax is None else x

    tokens, states, counts = sampling.sample(run, None, options, inputs, keep)
    if softmax is None:
        return tokens, None
    counted = jnp.where(counts, tokens, softmax.ignore_index)
    head = head_of(params, config)
    return tokens, ops.linear_log_probs(states, head, counted, softmax=softmax, implementation=implementation)


def _quantized_once(params: Params, config: DecoderConfig, implementation: Implementation | None) -> Params:
    """Parameters whose kernels are in FP8, once for all tokens, as far as one recipe says how."""
    if kernel_facts(config).is_plain:
        return params

    def once(how: Requantize | None, kernel: Array | QuantizedArray) -> Array | QuantizedArray:
        if how is None or isinstance(kernel, QuantizedArray):
            return kernel
        both = quantize_kernel(
            kernel, how.recipe, row_ndim=how.row_ndim, stacked_ndim=how.stacked_ndim, implementation=how.implementation
        )
        # No gradient asks for the other copy. Behind the barrier no loop can quantize once more.
        return lax.optimization_barrier(dataclasses.replace(both, data=None, scale_inv=None))

    how = requantize(config, implementation=implementation)
    return jax.tree.map(once, how, params, is_leaf=lambda x: x is None)


def _last(x: Array, lengths: Array | None) -> Array:
    """[batch, 1, hidden] of the last token of each sequence."""
    return x[:, -1:] if lengths is None else jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1)


def _run(
    params: Params,
    tokens: Array,
    caches: list[Cache] | None,
    room: int,
    config: DecoderConfig,
    implementation: Implementation | None,
    lengths: Array | None,
) -> tuple[Array, Array, list[Cache]]:
    """The last hidden states [batch, hidden] and logits [batch, V] in float32 after the last of tokens [batch, time],
    or of as many as lengths [batch] say, and the caches with them. Without caches the tokens are the first ones, and
    get caches with room for as many."""
    (batch, time), filled = tokens.shape, []
    # Scales of an amax and a capacity of experts would count the rows that are added.
    facts = kernel_facts(config)
    by_row = config.experts is None and not facts.by_tensor
    few_rows = facts.product == "block" and batch <= FEW_ROWS
    padding = [(0, -batch % _ROW_MULTIPLE if caches is not None and by_row and not few_rows else 0)]

    def padded(x: Array) -> Array:
        return jnp.pad(x, padding + [(0, 0)] * (x.ndim - 1))

    positions = jnp.arange(time, dtype=jnp.int32) if caches is None else caches[0].positions(time)
    positions = positions if positions.ndim == 1 else padded(positions)
    rotary = rotary_of(positions, config)
    x = tensor_parallel.embed(params["embedding"], padded(tokens), config, None)
    cached = caches or [None] * config.num_layers
    each = zip(range(config.num_layers), params["layers"], cached, config.windows, config.ropes, strict=True)
    for number, layer, cache, window, rope in each:

        def attend(
            query: Array,
            key: Array,
            value: Array,
            sinks: Array | None,
            latents: Array | None = None,
            cache: Cache | None = cache,
            window: int | None = window,
        ) -> Array:
            options: Any = {"window": window, "sinks": sinks, "scale": config.factors.scores or config.head_dim**-0.5}
            options |= {"softcap": config.softcaps.scores, "implementation": config.attention}
            if cache is None:
                after = Cache.of(*((key, value) if latents is None else (latents, latents[..., :0])), room)
                filled.append(after if lengths is None else after._replace(filled=lengths))
                return ops.attention(query, key, value, causal=True, **options)
            query, key, value = query[:batch], key[:batch], value[:batch]
            value_dim = None if config.latent is None else config.latent.rank
            mixed, after = attend_cached(query, key, value, cache, value_dim=value_dim, **options)
            filled.append(after)
            return padded(mixed)

        reads_latents = config.latent is not None and cache is not None
        block = Block(layer, None, config.block(number), None, implementation, reads_latents)
        x, _ = block(x, rotary[rope], attend)
    x = final_norm(params["final_norm"], config, implementation)(_last(x[:batch], lengths), None)[:, 0]
    # In 16 bits many tokens would share the largest logit: bfloat16 has multiples of 1/8 from 16 on.
    logits = sharding.dot(x, head_of(params, config).astype(x.dtype), ((1,), (0,)), jnp.float32)
    return x, capped(logits, config), filled
