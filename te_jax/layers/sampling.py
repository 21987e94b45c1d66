"""Tokens that follow prompts, one after the other, by any model that keeps a cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from te_jax import sharding
from te_jax._core.arguments import is_finite_number, is_whole_number
from te_jax._core.types import PyTree
from te_jax.ops.operands import as_array

C = TypeVar("C")
Run = Callable[[Array, C, Array | None], tuple[PyTree, Array, C]]
"""run(tokens [batch, time], caches, lengths or None) -> (anything [batch, ...], float32 logits [batch, V], caches).

These are of the last of the tokens, or of as many as lengths [batch] say.
"""


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of sampling. Each value compiles a program of its own.

    Attributes:
      count, samples: tokens of each text, and texts of each prompt.
      draws: whether by probability; else the most likely token follows.
      stop: tokens that end a text, in order.
    """

    count: int
    samples: int
    draws: bool
    stop: tuple[int, ...]


class Inputs(NamedTuple):
    """Arrays: prompts int32 [batch, time], lengths int32 [batch] or None, a key, and three scalars."""

    prompt: Array
    lengths: Array | None
    key: Array
    temperature: Array
    top_p: Array
    top_k: Array


def validate(
    tokens: jax.typing.ArrayLike,
    vocab_size: int,
    *,
    max_new_tokens: int,
    lengths: jax.typing.ArrayLike | None,
    samples: int,
    temperature: float,
    top_p: float,
    top_k: int | None,
    key: Array | None,
    stop_tokens: Collection[int],
) -> tuple[Options, Inputs, float]:
    """The arguments of `te_jax.models.generate`, which says what they mean; and the temperature, 0 for none.

    Raises:
      ValueError: one breaks its rule.
    """
    prompt = jnp.asarray(tokens)
    check_tokens("tokens", prompt)
    _check_values(tokens, prompt, vocab_size)
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
    if not isinstance(stop_tokens, Collection) or not all(
        is_whole_number(token) and 0 <= token < vocab_size for token in stop_tokens
    ):
        raise ValueError(
            f"stop_tokens is {stop_tokens!r}: it needs to be whole numbers from 0 to vocab_size - 1, {vocab_size - 1}"
        )
    # XLA flushes smaller numbers to 0, and larger ones are infinite in float32.
    limits = np.finfo(np.float32)
    temperature = min(max(float(temperature), float(limits.tiny)), float(limits.max)) if temperature else 0.0
    inputs = Inputs(
        prompt.astype(jnp.int32),
        lengths,
        jax.random.key(0) if key is None else key,
        jnp.float32(temperature),
        jnp.float32(top_p),
        jnp.int32(vocab_size if top_k is None else min(top_k, vocab_size)),
    )
    stop = tuple(sorted(map(int, stop_tokens)))
    return Options(int(max_new_tokens), int(samples), bool(temperature > 0), stop), inputs, temperature


def check_tokens(name: str, tokens: jax.Array) -> None:
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"{name} has shape {tokens.shape} and dtype {tokens.dtype}: the model reads integers [batch, time]; "
            "a single sequence needs a leading axis of 1"
        )
    if tokens.size == 0:
        raise ValueError(f"{name} has shape {tokens.shape}: the model needs at least one sequence of one token")


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


class _Found(NamedTuple):
    """What was generated, and whether it counts: not after the end of a text."""

    tokens: Array  # int32 [batch, count]
    kept: PyTree  # [batch, count, ...]
    counts: Array  # bool [batch, count]

    def with_row(self, place: Array, *row: PyTree) -> _Found:
        """With what is [batch, ...] at a place."""

        def write(whole: Array, part: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(whole, part[:, None], place, axis=1)

        return jax.tree.map(write, self, _Found(*row))


def sample(
    run: Run[C], caches: C, options: Options, inputs: Inputs, keep: Callable[[PyTree, Array, Array], PyTree]
) -> tuple[Array, PyTree, Array]:
    """The tokens that follow, for `jax.jit`.

    Args:
      run: the model. It reads all prompts, and then one token of each text.
      caches: empty ones, with room for prompts and texts.
      options, inputs: of `validate`.
      keep: of what run returns first, its logits and the tokens int32 [batch] that follow: a tree [batch, ...].

    Returns:
      (int32 [batch × samples, count], what was kept [batch × samples, count, ...], bool [batch × samples, count], false
      behind the end of a text).
    """

    def chosen(logits: Array, place: Array) -> Array:
        if not options.draws:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        key = jax.random.fold_in(inputs.key, place)
        return _drawn(logits, inputs.temperature, inputs.top_p, inputs.top_k, key)

    def ends(tokens: Array) -> Array:
        return functools.reduce(jnp.logical_or, (tokens == stop for stop in options.stop), jnp.zeros_like(tokens, bool))

    def unfinished(carried: tuple[PyTree, ...]) -> Array:
        _, done, *_, ended = carried
        return (done < options.count) & ~jnp.all(ended)

    def step(carried: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        found, done, token, caches, ended = carried
        x, logits, caches = run(token[:, None], caches, None)
        token = jnp.where(ended, token, chosen(logits, done))
        found = found.with_row(done, token, keep(x, logits, token), ~ended)
        return found, done + 1, token, caches, ended | ends(token)

    lengths = inputs.lengths
    if lengths is not None and sharding.is_explicit(inputs.prompt):
        place = jax.typeof(inputs.prompt).sharding
        lengths = jax.reshard(lengths, NamedSharding(place.mesh, PartitionSpec(place.spec[0])))
    read = run(inputs.prompt, caches, lengths)
    # How many tokens are filled is one number for prompts of one length.
    x, logits, caches = jax.tree.map(lambda y: _repeated(y, options.samples) if y.ndim else y, read)
    token = chosen(logits, jnp.int32(0))
    row = token, keep(x, logits, token), jnp.ones_like(token, bool)
    others = options.count - 1
    found = _Found(
        *jax.tree.map(lambda part: jnp.pad(part[:, None], [(0, 0), (0, others), *[(0, 0)] * (part.ndim - 1)]), row)
    )
    found, done, token, *_ = lax.while_loop(unfinished, step, (found, jnp.int32(1), token, caches, ends(token)))
    return jnp.where(jnp.arange(options.count) < done, found.tokens, token[:, None]), found.kept, found.counts


def _repeated(x: Array, count: int) -> Array:
    """Each row of x [batch, ...] `count` times, one after the other."""
    batch, *rest = x.shape
    rows = jnp.broadcast_to(jnp.expand_dims(x, 1), (batch, count, *rest))
    alike = [(size,) for size in rest]
    return sharding.regrouped(rows, [(batch, count), *alike], [(batch * count,), *alike])


def _drawn(logits: Array, temperature: Array, top_p: Array, top_k: Array, key: Array) -> Array:
    """Tokens drawn from the most likely ones of float32 logits [batch, V]."""
    # By rank and not by a smallest logit, which several tokens may have.
    if sharding.is_explicit(logits):  # no device can sort a part of a row
        place = jax.typeof(logits).sharding
        logits = jax.reshard(logits, NamedSharding(place.mesh, PartitionSpec(place.spec[0])))
    ranks = jnp.zeros_like(logits, jnp.int32) + lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    negated, tokens = lax.sort((-logits, ranks), dimension=1, num_keys=1, is_stable=True)
    # The largest becomes 0 before the division, which may overflow.
    likely = (negated[:, :1] - negated) / temperature
    probabilities = jax.nn.softmax(likely, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # Sums may round to 1 before the last token, and a top_p may be flushed to 0.
    kept = ((before < top_p) | (top_p == 1) | (ranks == 0)) & (ranks < top_k)
    rank = jax.random.categorical(key, jnp.where(kept, likely, -jnp.inf))
    return jnp.sum(jnp.where(ranks == rank[:, None], tokens, 0), axis=1, dtype=jnp.int32)
