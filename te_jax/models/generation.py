"""Text from a decoder: tokens that follow a prompt, one after the other."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection
from typing import Any, Literal, NamedTuple, cast, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from te_jax import ops, sharding
from te_jax._core.arguments import is_finite_number, is_whole_number
from te_jax._core.types import PyTree
from te_jax.layers.attention import Cache, attend_cached, rotary_tables
from te_jax.models import tensor_parallel
from te_jax.models.block import Block, rms_norm
from te_jax.models.config import DecoderConfig, Params, kernel_facts
from te_jax.models.decoder import Implementation, check_tokens, head_of, requantize
from te_jax.ops.linear.kernels import Requantize, quantize_kernel
from te_jax.ops.operands import as_array
from te_jax.quantized import QuantizedArray
from te_jax.recipe import DelayedScaling

__all__ = ["generate"]


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
    in a cache [batch, time + max_new_tokens, kv_heads, head_dim] of each block. Parameters in bfloat16 are read in half
    the time of float32 ones. They may be split over devices by `jax.sharding`, which XLA then divides the work over.

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
    prompt = jnp.asarray(tokens)
    check_tokens("tokens", prompt)
    _check_values(tokens, prompt, config.vocab_size)
    if not is_whole_number(max_new_tokens) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens!r}: it needs to be a whole number of at least 1")
    if not is_whole_number(samples) or samples < 1:
        raise ValueError(f"samples is {samples!r}: it needs to be a whole number of at least 1")
    if prompt.shape[1] + max_new_tokens >= 2**31:
        raise ValueError(
            f"max_new_tokens is {max_new_tokens}: a prompt of {prompt.shape[1]} and what follows must be fewer than "
            f"{2**31} tokens"
        )
    if not is_finite_number(temperature) or temperature < 0:
        raise ValueError(f"temperature is {temperature!r}: it needs to be a finite number of at least 0")
    if not is_finite_number(top_p) or not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p!r}: it needs to be a number above 0 and at most 1")
    if top_k is not None and (not is_whole_number(top_k) or top_k < 1):
        raise ValueError(f"top_k is {top_k!r}: it needs to be a whole number of at least 1, or None for all tokens")
    if lengths is not None:
        lengths = as_array("lengths", lengths)
        if lengths.shape != prompt.shape[:1] or not jnp.issubdtype(lengths.dtype, jnp.integer):
            raise ValueError(f"lengths is {lengths.dtype}{list(lengths.shape)}: it needs to be integers, one a prompt")
        known = not isinstance(lengths, Tracer) and lengths.is_fully_addressable
        if known and not np.all((np.asarray(lengths) >= 1) & (np.asarray(lengths) <= prompt.shape[1])):
            raise ValueError(
                f"lengths is {lengths}: each needs to be from 1 to {prompt.shape[1]}, as long as tokens are"
            )
        lengths = lengths.astype(jnp.int32)
    if temperature and key is None:
        raise ValueError("key is None, and temperature is not 0: tokens are drawn with a jax.random.key")
    if isinstance(config.recipe, DelayedScaling):
        raise ValueError("config.recipe is DelayedScaling, whose state is one of training: use another recipe or None")
    if not isinstance(stop_tokens, Collection) or not all(
        is_whole_number(token) and 0 <= token < config.vocab_size for token in stop_tokens
    ):
        raise ValueError(
            f"stop_tokens is {stop_tokens!r}: it needs to be whole numbers from 0 to vocab_size - 1, "
            f"{config.vocab_size - 1}"
        )
    # XLA flushes smaller numbers to 0, and larger ones are infinite in float32.
    limits = np.finfo(np.float32)
    temperature = min(max(float(temperature), float(limits.tiny)), float(limits.max)) if temperature else 0.0
    found, log_probs = _generate(
        params,
        prompt.astype(jnp.int32),
        lengths,
        jax.random.key(0) if key is None else key,
        jnp.float32(temperature),
        jnp.float32(top_p),
        jnp.int32(config.vocab_size if top_k is None else min(top_k, config.vocab_size)),
        config=config,
        count=int(max_new_tokens),
        samples=int(samples),
        draws=bool(temperature > 0),
        stop=tuple(sorted(map(int, stop_tokens))),
        softmax=ops.Softmax(temperature or 1.0) if return_log_probs else None,
        implementation=implementation,
    )
    return found if log_probs is None else (found, log_probs)


def _check_values(tokens: object, prompt: Array, vocab_size: int) -> None:
    """Refuses tokens that the embedding does not have, if their values are known in this process."""
    if isinstance(prompt, Tracer) or not prompt.is_fully_addressable:
        return
    values = np.asarray(tokens)  # jnp.asarray may have cut 64 bits to 32
    outside = values[(values < 0) | (values >= vocab_size)]
    if outside.size:
        raise ValueError(
            f"tokens has {outside[0]}, and the model knows tokens from 0 to {vocab_size - 1}: read the text with the "
            "model's own tokenizer, and pad prompts with any token that there is, with their lengths"
        )


@functools.partial(
    jax.jit, static_argnames=("config", "count", "samples", "draws", "stop", "softmax", "implementation")
)
def _generate(
    params: Params,
    prompt: Array,
    lengths: Array | None,
    key: Array,
    temperature: Array,
    top_p: Array,
    top_k: Array,
    *,
    config: DecoderConfig,
    count: int,
    samples: int,
    draws: bool,
    stop: tuple[int, ...],
    softmax: ops.Softmax | None,
    implementation: Implementation | None,
) -> tuple[Array, Array | None]:
    params = _quantized_once(params, config, implementation)
    batch, time = prompt.shape
    caches = [Cache.empty(batch, time + count, config.heads, config.dtype) for _ in range(config.num_layers)]

    def chosen(logits: Array, place: Array) -> Array:
        if not draws:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return _drawn(logits, temperature, top_p, top_k, jax.random.fold_in(key, place))

    def ends(tokens: Array) -> Array:
        return jnp.isin(tokens, jnp.array(stop, jnp.int32)) if stop else jnp.zeros(tokens.shape, bool)

    def unfinished(carried: tuple[PyTree, ...]) -> Array:
        _, done, *_, ended = carried
        return (done < count) & ~jnp.all(ended)

    def step(carried: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        found, done, token, caches, ended = carried
        x, logits, caches = _run(params, token[:, None], caches, config, implementation)
        token = jnp.where(ended, token, chosen(logits, done))
        found = found.with_row(done, token, x, ~ended)
        return found, done + 1, token, caches, ended | ends(token)

    x, logits, caches = _run(params, prompt, caches, config, implementation, lengths)
    # How many tokens are filled is one number for prompts of one length.
    x, logits, caches = jax.tree.map(lambda y: jnp.repeat(y, samples, axis=0) if y.ndim else y, (x, logits, caches))
    batch *= samples
    token = chosen(logits, jnp.int32(0))
    found = _Found(jnp.zeros((batch, count), jnp.int32), None, None)
    if softmax is not None:
        found = _Found(found.tokens, jnp.zeros((batch, count, x.shape[1]), x.dtype), jnp.zeros((batch, count), bool))
    found = found.with_row(jnp.int32(0), token, x, jnp.ones((batch,), bool))
    found, done, token, *_ = lax.while_loop(unfinished, step, (found, jnp.int32(1), token, caches, ends(token)))
    tokens = jnp.where(jnp.arange(count) < done, found.tokens, token[:, None])
    if softmax is None:
        return tokens, None
    states, counts = cast(tuple[Array, Array], (found.x, found.counts))
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


class _Found(NamedTuple):
    """What was generated; the hidden states and whether they count only for log-probabilities."""

    tokens: Array  # int32 [batch, count]
    x: Array | None  # [batch, count, hidden]
    counts: Array | None  # [batch, count]: not after the end of a text

    def with_row(self, place: Array, *row: Array) -> _Found:
        """With the tokens, states and counts [batch, ...] of a place."""
        written: Any = (
            None if whole is None else lax.dynamic_update_slice_in_dim(whole, part[:, None], place, axis=1)
            for whole, part in zip(self, row, strict=True)
        )
        return _Found(*written)


def _drawn(logits: Array, temperature: Array, top_p: Array, top_k: Array, key: Array) -> Array:
    """Tokens drawn from the most likely ones of float32 logits [batch, V]."""
    # By rank and not by a smallest logit, which several tokens may have.
    ranks = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    negated, tokens = lax.sort((-logits, ranks), dimension=1, num_keys=1, is_stable=True)
    # The largest becomes 0 before the division, which may overflow.
    likely = (negated[:, :1] - negated) / temperature
    probabilities = jax.nn.softmax(likely, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # Sums may round to 1 before the last token, and a top_p may be flushed to 0.
    kept = ((before < top_p) | (top_p == 1) | (ranks == 0)) & (ranks < top_k)
    rank = jax.random.categorical(key, jnp.where(kept, likely, -jnp.inf))
    return jnp.sum(jnp.where(ranks == rank[:, None], tokens, 0), axis=1, dtype=jnp.int32)


def _last(x: Array, lengths: Array | None) -> Array:
    """[batch, 1, hidden] of the last token of each sequence."""
    return x[:, -1:] if lengths is None else jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1)


def _run(
    params: Params,
    tokens: Array,
    caches: list[Cache],
    config: DecoderConfig,
    implementation: Implementation | None,
    lengths: Array | None = None,
) -> tuple[Array, Array, list[Cache]]:
    """The last hidden states [batch, hidden] and logits [batch, V] in float32 after the last of tokens [batch, time],
    or of as many as lengths [batch] say, and the caches with them. Several tokens are the first ones."""
    time, filled = tokens.shape[1], []
    filled_before = caches[0].filled
    positions = lax.broadcasted_iota(jnp.int32, (*filled_before.shape, time), filled_before.ndim)
    positions += jnp.expand_dims(filled_before, -1)
    rotary = rotary_tables(positions, config.head_dim, config.rope_theta, config.rope_scaling)
    x = tensor_parallel.embed(params["embedding"], tokens, config, None)
    for layer, cache, window in zip(params["layers"], caches, config.windows, strict=True):

        def attend(
            query: Array,
            key: Array,
            value: Array,
            sinks: Array | None,
            cache: Cache = cache,
            window: int | None = window,
        ) -> Array:
            options: Any = {"window": window, "sinks": sinks, "implementation": config.attention}
            mixed, after = attend_cached(query, key, value, cache, **options)
            filled.append(after if lengths is None else after._replace(filled=lengths))
            # Without a mask for those that are not there yet, which cuDNN would have to read.
            return ops.attention(query, key, value, causal=True, **options) if time > 1 else mixed

        x, _ = Block(layer, None, config, None, implementation)(x, rotary, attend)
    x = rms_norm(params["final_norm"], config, implementation)(_last(x, lengths), None)[:, 0]
    # In 16 bits many tokens would share the largest logit: bfloat16 has multiples of 1/8 from 16 on.
    return x, sharding.dot(x, head_of(params, config).astype(x.dtype), ((1,), (0,)), jnp.float32), filled
