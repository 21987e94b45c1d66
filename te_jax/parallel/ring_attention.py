"""Attention to tokens of several devices, which send keys and values around a ring (context parallelism).

Each device attends to its own tokens, then to those that its neighbour sends while it does, and so on; results are
joined by their log-sum-exps in float32. With a causal mask device i of D has the chunks i and 2 D - 1 - i of a
sequence, so that all have the same work in every step:

    keys of an earlier device    both chunks of query see its first chunk
    keys of a later device       the second chunk of query sees both

which is two products of a chunk with a chunk, without a mask, in one call.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

from te_jax import ops, sharding
from te_jax._core.arguments import as_flag, is_finite_number, is_whole_number
from te_jax._core.integers import as_int32
from te_jax._core.reverse_mode import reverse_mode_only
from te_jax._core.types import PyTree
from te_jax.ops.attention import (
    AttentionImplementation,
    Masks,
    Settings,
    bounded_runs,
    validate_implementation,
    validate_operands,
    validate_segments,
)

__all__ = ["context_order", "ring_attention"]

_REVERSE_MODE = "te_jax.parallel.ring_attention has first derivatives in reverse mode (jax.grad, jax.vjp) only"


def context_order(length: int, size: int) -> np.ndarray:
    """The order of tokens in which devices along an axis have the same work in causal `ring_attention`.

    Args:
      length: tokens of a sequence; a multiple of 2 size.
      size: number of devices D.

    Returns:
      int32 [length]. Of x[:, order], split along its second dimension, device i has the chunks i and 2 D - 1 - i of
      2 D. The numbers are the positions of the tokens, and `numpy.argsort` of them restores the order.

    Raises:
      ValueError: length is no multiple of 2 size.

    Examples:
      >>> from te_jax.parallel import context_order
      >>> context_order(8, size=2).tolist()
      [0, 1, 6, 7, 2, 3, 4, 5]
    """
    if not is_whole_number(size) or size < 1:
        raise ValueError(f"size is {size!r}; it must be a whole number of at least 1")
    if not is_whole_number(length) or length < 1 or length % (2 * size):
        raise ValueError(
            f"length is {length!r}; it must be a multiple of {2 * size}, so that each of {size} devices has two "
            "chunks: pad the sequence"
        )
    chunks = np.arange(length, dtype=np.int32).reshape(2 * size, -1)
    return chunks[[chunk for device in range(size) for chunk in (device, 2 * size - 1 - device)]].ravel()


def positions_here(axis_name: str, time: int) -> Array:
    """int32 [time]: the positions of this device's tokens in `context_order`."""
    here, last = lax.axis_index(axis_name), 2 * lax.axis_size(axis_name) - 1
    return jnp.concatenate([_places(chunk, time // 2) for chunk in (here, last - here)])


def ring_attention(
    query: jax.typing.ArrayLike,
    key: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike,
    *,
    axis_name: str,
    causal: bool = True,
    window: int | None = None,
    segment_ids: jax.typing.ArrayLike | None = None,
    max_segments_per_seq: int | None = None,
    scale: float | None = None,
    max_score_bytes: int = 2**30,
    implementation: AttentionImplementation | None = None,
) -> Array:
    """`te_jax.ops.attention` inside of `jax.shard_map`, where devices along an axis split the time of all operands.

    The residuals have the same checkpoint names. A policy that keeps "te_attention_output" and "te_attention_lse"
    sends keys and values around the forward ring once.

    Args:
      query: [B, T, N, H]: this device's T of the sequences' D T tokens. If causal, in `context_order`.
      key, value: [B, T, K, H] and [B, T, K, V] of the same tokens.
      axis_name: the mesh axis of the D devices.
      causal: a token sees itself and those before it.
      window: a token sees itself and the window - 1 tokens before it. Needs causal=True. Keys of devices that none sees
        do not travel: with a window of at most T / 2 + 1 they take two steps, instead of one for each other device.
      segment_ids: integers [B, T] of this device's tokens: a query sees keys with its own number.
      max_segments_per_seq: each run of equal segment_ids in a whole sequence is a segment of its own, and a sequence
        has at most so many; one with more gives NaN. If not causal, device i has the i-th T tokens.
      scale, max_score_bytes, implementation: as in `te_jax.ops.attention`. With window or segment_ids cuDNN needs masks
        of T / 2 × T / 2 tokens, without causal of T × T.

    Returns:
      [B, T, N, V] in the dtype of query.

    Raises:
      ValueError: an argument breaks a rule above, or `axis_name` is no mapped axis.
      NotImplementedError: forward mode and second derivatives.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> from te_jax.parallel import context_order, ring_attention
      >>> mesh = jax.make_mesh((1,), ("context",), (jax.sharding.AxisType.Auto,))
      >>> attend = jax.shard_map(
      ...     lambda q, k, v: ring_attention(q, k, v, axis_name="context"), mesh=mesh,
      ...     in_specs=P(None, "context"), out_specs=P(None, "context"))
      >>> x = jnp.ones((1, 8, 2, 16))[:, context_order(8, size=1)]
      >>> attend(x, x, x).shape
      (1, 8, 2, 16)

    References:
      Liu et al., Ring Attention with Blockwise Transformers for Near-Infinite Context, arXiv:2310.01889.
    """
    (axis, *more_axes), size = sharding.mapped_axes(axis_name)
    if more_axes:
        raise ValueError(f"axis_name is {axis_name!r}; a ring has one axis: name that of the devices that split time")
    validate_implementation(implementation)
    causal = as_flag("causal", causal)
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 4 or x.shape[:2] != query.shape[:2]:
            raise ValueError(
                f"{name} has shape {x.shape} and query {query.shape}; all must be [batch, time, heads, head_dim] of "
                "the same tokens"
            )
    if window is not None and (not is_whole_number(window) or window < 1 or not causal):
        raise ValueError(
            f"window is {window!r} with causal={causal}; it must be an integer of at least 1, with causal=True"
        )
    if scale is not None and (isinstance(scale, Tracer) or not is_finite_number(scale)):
        raise ValueError(f"scale is {scale!r}; it must be a finite number that is known while tracing, or None")
    operands = {
        name: checkpoint_name(x, "te_attention_operand") if size > 1 else x
        for name, x in (("query", query), ("key", key), ("value", value))
    }
    validate_segments(max_segments_per_seq, segment_ids)
    if segment_ids is not None:
        operands["segment_ids"] = jnp.asarray(segment_ids)
    validate_operands(operands)
    if segment_ids is not None:
        operands["segment_ids"] = as_int32(operands["segment_ids"])
    sharding.validate_split("query", query, (axis,), "pass this device's tokens")
    if size == 1:
        segments = {"segment_ids": segment_ids, "max_segments_per_seq": max_segments_per_seq}
        options = {"window": window, "scale": scale, "max_score_bytes": max_score_bytes, **segments}
        return ops.attention(query, key, value, causal=causal, implementation=implementation, **options)
    if causal and query.shape[1] % 2:
        raise ValueError(f"query has {query.shape[1]} tokens; with causal=True they are two chunks: pad the sequence")
    if max_segments_per_seq is not None:
        runs = _runs(operands["segment_ids"], axis, causal=causal)
        operands |= bounded_runs(operands["query"], *runs, int(max_segments_per_seq))
    factor = query.shape[3] ** -0.5 if scale is None else float(scale)
    ring = _Ring(axis, size, causal, window, factor, int(max_score_bytes), implementation)
    return _attention(ring, reverse_mode_only(sharding.varying_together(operands), _REVERSE_MODE))


def _runs(segment_ids: Array, axis_name: str, *, causal: bool) -> tuple[Array, Array]:
    """int32 ([B, T], [B]): which run of equal segment_ids each token is in, counted from 0 in a whole sequence, and the
    last of each sequence."""
    size = lax.axis_size(axis_name)
    per_device = 2 if causal else 1
    chunks = segment_ids.reshape(segment_ids.shape[0], per_device, -1)
    inside = jnp.cumsum(jnp.pad(chunks[..., 1:] != chunks[..., :-1], ((0, 0), (0, 0), (1, 0))), -1, dtype=jnp.int32)
    # [B, 3, chunks], in the order of the sequence: first and last number of each chunk, and how often it changes.
    ends = jnp.stack([chunks[..., 0], chunks[..., -1], inside[..., -1]], 1)
    ends = lax.all_gather(ends, axis_name, axis=2, tiled=True)
    order = context_order(2 * size, size) if causal else np.arange(size)
    first, last, changes = jnp.moveaxis(ends[..., np.argsort(order)], 1, 0)
    between = jnp.pad(first[:, 1:] != last[:, :-1], ((0, 0), (1, 0))).astype(jnp.int32)
    through = jnp.cumsum(between + changes, axis=1, dtype=jnp.int32)
    here = lax.axis_index(axis_name)
    places = jnp.stack([here, 2 * size - 1 - here]) if causal else here[None]
    return ((through - changes)[:, places, None] + inside).reshape(segment_ids.shape), through[:, -1]


class _Keys(NamedTuple):
    """Ring data: the segments of tokens, and keys and values [B, T, K, H + V] as one array, since XLA has one exchange
    under way at a time."""

    pair: Array
    segment_ids: Array | None

    @classmethod
    def of(cls, operands: dict[str, Array]) -> _Keys:
        return cls(_pair(operands["key"], operands["value"]), operands.get("segment_ids"))


def _pair(key: Array, value: Array) -> Array:
    return jnp.concatenate([key, value], 3)


class _Gradients(NamedTuple):
    """Gradients of query, and of key and value as they travel, in float32."""

    query: Array
    pair: Array


@dataclasses.dataclass(frozen=True)
class _Ring:
    """The static arguments, together."""

    axis: str
    size: int
    causal: bool
    window: int | None
    scale: float
    max_score_bytes: int
    implementation: AttentionImplementation | None

    def shifted(self, tree: PyTree, steps: int) -> PyTree:
        """Arrays of the device so many steps before."""
        if steps % self.size == 0:
            return tree
        order = [(device, (device + steps) % self.size) for device in range(self.size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis, order), tree)

    def settings(self, *, causal: bool) -> Settings:
        masks = Masks(causal, None, self.scale)
        return Settings(masks, self.implementation, self.max_score_bytes, part=True)

    def blocks(self, operands: dict[str, Array]) -> list[_Block]:
        """Block of this device's own keys, and those of later steps whose keys a device sees."""
        here, query = lax.axis_index(self.axis), operands["query"]
        other = _Half if self.causal else _Block
        steps = [step for step in range(1, self.size) if self._sees(step, query.shape[1] // 2)]
        kinds = [(0, _Own), *((step, other) for step in steps)]
        return [kind(self, query, operands.get("segment_ids"), step, here) for step, kind in kinds]

    def _sees(self, step: int, chunk: int) -> bool:
        """Whether any device sees keys of the one so many steps before, by the window."""
        if self.window is None:
            return True
        chunks = [(device, 2 * self.size - 1 - device) for device in range(self.size)]
        distances = (
            of_query - of_keys
            for here in range(self.size)
            for of_query, of_keys in itertools.product(chunks[here], chunks[here - step])
        )
        return any(distance > 0 and (distance - 1) * chunk + 1 < self.window for distance in distances)


@dataclasses.dataclass(frozen=True, eq=False)
class _Block:
    """Attention of this device's tokens to those of the device that is some steps before it.

    Attributes:
      ring: the devices.
      query, segment_ids: of this device.
      step: of the ring.
      here: number of this device.
    """

    ring: _Ring
    query: Array
    segment_ids: Array | None
    step: int
    here: Array

    @property
    def there(self) -> Array:
        """Number of the device whose keys these are."""
        return (self.here - self.step) % self.ring.size

    def forward(self, keys: _Keys) -> tuple[Array, Array]:
        """float32 ([B, T, N, H], [B, N, T]): results of these keys alone, and their log-sum-exps."""
        operands, rows = self.operands(keys)
        out, lse = self.settings.forward(operands)
        if rows is not None:
            out, lse = jnp.where(rows[..., None, None], out, 0.0), jnp.where(rows[:, None], lse, -jnp.inf)
        return self.of_tokens(out, lse)

    def backward(self, keys: _Keys, out: Array, lse: Array, dout: Array) -> _Gradients:
        """The gradients, from the result and the log-sum-exp of all keys."""
        operands, rows = self.operands(keys)
        out, lse, dout = self.of_block(out, lse, dout)
        if rows is not None:
            dout, lse = jnp.where(rows[..., None, None], dout, 0.0), jnp.where(rows[:, None], lse, _NO_PART)
        gradients = self.settings.backward(operands, out, lse, dout, ("query", "key", "value"))
        of_query, of_key, of_value = gradients
        return self.gradients(_Gradients(of_query, _pair(of_key, of_value)))

    # Here of all queries and keys, as they are.

    @property
    def settings(self) -> Settings:
        return self.ring.settings(causal=False)

    def operands(self, keys: _Keys) -> tuple[dict[str, Array], Array | None]:
        """Operands of `ops.attention`, and which queries see any key, if some may see none."""
        return self.masked(self.query, keys.pair, self.visible(keys))

    def visible(self, keys: _Keys) -> Array | None:
        """bool [B, T, S], or None for all."""
        return _same(self.segment_ids, keys.segment_ids)

    def of_block(self, out: Array, lse: Array, dout: Array) -> tuple[Array, Array, Array]:
        return out, lse, dout

    def of_tokens(self, out: Array, lse: Array) -> tuple[Array, Array]:
        return out, lse

    def gradients(self, of_blocks: _Gradients) -> _Gradients:
        return of_blocks

    def masked(self, query: Array, pair: Array, visible: Array | None) -> tuple[dict[str, Array], Array | None]:
        operands = {"query": query} | dict(zip(("key", "value"), jnp.split(pair, [query.shape[3]], 3), strict=True))
        if visible is None:
            return operands, None
        rows = jnp.any(visible, axis=-1)
        # A bias must not hide all keys: what such a query gets is left out.
        seen = visible | ~rows[..., None]
        operands["bias"] = jnp.where(seen, 0.0, -jnp.inf).astype(query.dtype)[:, None]
        return sharding.varying_together(operands), rows


class _Own(_Block):
    """Attention to this device's own keys."""

    @property
    def settings(self) -> Settings:
        return self.ring.settings(causal=self.ring.causal)

    def visible(self, keys: _Keys) -> Array | None:
        visible = _same(self.segment_ids, keys.segment_ids)
        if self.ring.window is None:
            return visible
        places = positions_here(self.ring.axis, self.query.shape[1])
        near = _near(places, places, self.ring.window)[None]
        return near if visible is None else near & visible


class _Half(_Block):
    """Attention to the keys of another device, with a causal mask: two products of a chunk with a chunk.

    The first chunk of keys is seen by the second of query. And if the keys are of an earlier device, by the first of
    query, too; if not, the second chunk of keys is seen by the second of query.
    """

    @property
    def earlier(self) -> Array:
        return self.there < self.here

    def queries(self, x: Array, axis: int = 1) -> Array:
        first, second = jnp.split(x, 2, axis)
        return jnp.concatenate([second, jnp.where(self.earlier, first, second)])

    def keys(self, x: Array) -> Array:
        first, second = jnp.split(x, 2, 1)
        return jnp.concatenate([first, jnp.where(self.earlier, first, second)])

    def operands(self, keys: _Keys) -> tuple[dict[str, Array], Array | None]:
        return self.masked(self.queries(self.query), self.keys(keys.pair), self.visible(keys))

    def visible(self, keys: _Keys) -> Array | None:
        visible = None
        if self.segment_ids is not None and keys.segment_ids is not None:
            visible = _same(self.queries(self.segment_ids), self.keys(keys.segment_ids))
        if self.ring.window is None:
            return visible
        chunk, last = self.query.shape[1] // 2, 2 * self.ring.size - 1
        batch = self.query.shape[0]
        of_query = last - self.here, jnp.where(self.earlier, self.here, last - self.here)
        of_keys = self.there, jnp.where(self.earlier, self.there, last - self.there)
        near = [
            _near(_places(one, chunk), _places(other, chunk), self.ring.window)
            for one, other in zip(of_query, of_keys, strict=True)
        ]
        whole = jnp.repeat(jnp.stack(near), batch, axis=0)
        return whole if visible is None else whole & visible

    def of_block(self, out: Array, lse: Array, dout: Array) -> tuple[Array, Array, Array]:
        return self.queries(out), self.queries(lse, 2), self.queries(dout)

    def of_tokens(self, out: Array, lse: Array) -> tuple[Array, Array]:
        (always, other), (of_always, of_other) = jnp.split(out, 2), jnp.split(lse, 2)
        nothing = jnp.full_like(of_other, -jnp.inf)
        always, of_always = _joined(always, of_always, other, jnp.where(self.earlier, nothing, of_other))
        # What does not count has a log-sum-exp of -inf.
        return jnp.concatenate([other, always], 1), jnp.concatenate(
            [jnp.where(self.earlier, of_other, nothing), of_always], 2
        )

    def gradients(self, of_blocks: _Gradients) -> _Gradients:
        def of_halves(x: Array, *, always_second: bool) -> Array:
            always, other = jnp.split(x, 2)
            nothing = jnp.zeros_like(other)
            first, second = jnp.where(self.earlier, other, nothing), jnp.where(self.earlier, nothing, other)
            halves = (first, second + always) if always_second else (first + always, second)
            return jnp.concatenate(halves, 1)

        return _Gradients(
            of_halves(of_blocks.query, always_second=True), of_halves(of_blocks.pair, always_second=False)
        )


_NO_PART = 1e30
"""A log-sum-exp so large that no key has a part in it."""


def _same(ids: Array | None, of_keys: Array | None) -> Array | None:
    return None if ids is None or of_keys is None else ids[:, :, None] == of_keys[:, None, :]


def _places(chunk: Array, length: int) -> Array:
    """The positions of a chunk's tokens."""
    return chunk * length + jnp.arange(length)


def _near(places: Array, of_keys: Array, window: int) -> Array:
    return places[:, None] - of_keys[None, :] < window


def _joined(out: Array, lse: Array, other: Array, of_other: Array) -> tuple[Array, Array]:
    """Results [B, T, N, H] of some keys and of others, as one of all, with the log-sum-exps [B, N, T]."""
    both = jnp.logaddexp(lse, of_other)
    steady = jnp.where(both == -jnp.inf, 0.0, both)
    share, rest = (jnp.swapaxes(jnp.exp(part - steady), 1, 2)[..., None] for part in (lse, of_other))
    return out * share + other * rest, both


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(ring: _Ring, operands: dict[str, Array]) -> Array:
    return _forward(ring, operands)[0]


def _forward(ring: _Ring, operands: dict[str, Array]) -> tuple[Array, tuple[dict[str, Array], Array, Array]]:
    keys = _Keys.of(operands)
    blocks = ring.blocks(operands)
    joined: tuple[Array, Array] | None = None
    for block, after in itertools.zip_longest(blocks, blocks[1:]):
        of_block = block.forward(keys)
        if after is not None:
            # The barrier: XLA takes calls for short, and would let nothing be under way beside them.
            keys, of_block = sharding.together(ring.shifted(keys, after.step - block.step), of_block)
        joined = of_block if joined is None else _joined(*joined, *of_block)
    assert joined is not None
    out, lse = joined[0].astype(operands["query"].dtype), joined[1]
    out, lse = checkpoint_name(out, "te_attention_output"), checkpoint_name(lse, "te_attention_lse")
    return out, (operands, out, lse)


def _backward(ring: _Ring, residuals: tuple[dict[str, Array], Array, Array], dout: Array):
    operands, out, lse = residuals
    keys = _Keys.of(operands)
    blocks = ring.blocks(operands)
    # Gradients follow the keys that they are of, a step behind, and are at home after the last step.
    of_query = of_keys = None
    last = 0  # the step of the keys whose gradients are under way
    for block, after in itertools.zip_longest(blocks, blocks[1:]):
        of_block = block.backward(keys, out, lse, dout)
        keys = None if after is None else ring.shifted(keys, after.step - block.step)
        of_keys, last = ring.shifted(of_keys, block.step - last), block.step
        (keys, of_keys), of_block = sharding.together((keys, of_keys), of_block)
        of_query = of_block.query if of_query is None else of_query + of_block.query
        of_keys = of_block.pair if of_keys is None else of_keys + of_block.pair
    assert of_query is not None
    of_pair = jnp.split(ring.shifted(of_keys, ring.size - last), [of_query.shape[3]], 3)
    sums = dict(zip(("query", "key", "value"), (of_query, *of_pair), strict=True))
    gradients = {name: x.astype(operands[name].dtype) for name, x in sums.items()}
    return ({**dict.fromkeys(operands), **gradients},)


_attention.defvjp(_forward, _backward)
