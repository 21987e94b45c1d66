"""The arithmetic of attention layers: rotary positions, attention, and the cache of decoding."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from te_jax import native, ops, sharding
from te_jax._core.arguments import is_finite_number, is_whole_number
from te_jax._core.integers import validate_integers
from te_jax.layers import linear
from te_jax.layers.microbatches import AccumulatedKernel
from te_jax.layers.tensor_parallel import TensorAxis
from te_jax.quantized import QuantizedArray

Layers = tuple[linear.Layer, linear.Layer, linear.Layer]
"""Those of query, key and value."""


@dataclasses.dataclass(frozen=True)
class Heads:
    """The sizes of an attention layer.

    Attributes:
      query: number of heads of query.
      key_value: number of heads of key and of value.
      head_dim: features of a head.
    """

    query: int
    key_value: int
    head_dim: int

    @classmethod
    def of(cls, in_features: int, num_heads: int, num_kv_heads: int | None, head_dim: int | None) -> Heads:
        """Checks the arguments of a layer, and fills in those that are None."""
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        given = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": 1 if head_dim is None else head_dim}
        for name, value in given.items():
            if not is_whole_number(value) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_kv_heads is {num_kv_heads} and num_heads {num_heads}; the first must divide the second: each "
                "head of key serves as many of query"
            )
        if head_dim is None and in_features % num_heads:
            raise ValueError(
                f"num_heads is {num_heads}, which does not divide the {in_features} input features: pass head_dim"
            )
        return cls(int(num_heads), int(num_kv_heads), int(head_dim or in_features // num_heads))

    def repeated(self, devices: int) -> Heads:
        """The same with the fewest heads of key and value, repeated, that all devices have equally many of.

        Their number divides that of query heads, if that of devices does.
        """
        return dataclasses.replace(self, key_value=math.lcm(self.key_value, devices))

    @property
    def features(self) -> tuple[tuple[int, int], ...]:
        """The features of the layers query, key and value."""
        key_value = (self.key_value, self.head_dim)
        return (self.query, self.head_dim), key_value, key_value


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of an attention layer, the same for all calls: see `te_jax.nnx.Attention`."""

    causal: bool
    window: int | None
    rope_theta: float | None
    implementation: native.Implementation | None  # of the layers; on a CPU attention has the reference alone
    max_score_bytes: int

    def __post_init__(self):
        theta, window = self.rope_theta, self.window
        if theta is not None and (not is_finite_number(theta) or theta <= 0):
            raise ValueError(f"rope_theta is {theta!r}; it must be a positive number, or None for no rotary positions")
        if window is not None and (not is_whole_number(window) or window < 1 or not self.causal):
            raise ValueError(
                f"window is {window!r} with causal={self.causal}; it must be an integer of at least 1, with causal=True"
            )


class Cache(NamedTuple):
    """Keys and values of the tokens so far.

    Attributes:
      key, value: [batch, length, kv_heads, head_dim], with rotary positions. Where value has no features, as
        in a cache of latents, it is the first features of key.
      filled: int32, the number of tokens that are there; or [batch], of each sequence.
    """

    key: Array
    value: Array
    filled: Array

    @classmethod
    def empty(cls, batch: int, length: int, heads: Heads, dtype: jax.typing.DTypeLike) -> Cache:
        """A cache for as many sequences of at most `length` tokens."""
        for name, value in (("batch", batch), ("length", length)):
            if not is_whole_number(value) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
        shape = (batch, length, heads.key_value, heads.head_dim)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((), jnp.int32))

    @classmethod
    def of(cls, key: Array, value: Array, length: int) -> Cache:
        """A cache of these tokens, the first ones, and of others up to `length`; it lies as they do."""
        time = key.shape[1]
        key, value = (jnp.pad(x, [(0, 0), (0, length - time), (0, 0), (0, 0)]) for x in (key, value))
        return cls(key, value, jnp.full((), time, jnp.int32))

    def appended(self, key: Array, value: Array) -> Cache:
        """The cache with new tokens behind those that are there."""
        each = self.filled.ndim == 1
        write = functools.partial(lax.dynamic_update_slice_in_dim, axis=0 if each else 1)

        def with_new(cached: Array, new: Array) -> Array:
            return (jax.vmap(write) if each else write)(cached, sharding.Layout.of(cached).apply(new), self.filled)

        return Cache(with_new(self.key, key), with_new(self.value, value), self.filled + key.shape[1])

    def positions(self, time: int) -> Array:
        """int32 [time] or [batch, time]: those of the next tokens."""
        counted = lax.broadcasted_iota(jnp.int32, (*self.filled.shape, time), self.filled.ndim)
        return counted + jnp.expand_dims(self.filled, -1)


def as_input(x: jax.typing.ArrayLike | QuantizedArray, in_features: int | None = None) -> Array | QuantizedArray:
    """The input of an attention layer, [batch, time, in_features].

    Raises:
      ValueError: it has another shape.
    """
    x = linear.as_input(x)
    if x.ndim != 3 or in_features not in (None, x.shape[-1]):
        raise ValueError(
            f"x has shape {x.shape}; it must be [batch, time, {in_features or 'in_features'}]: add a dimension of 1 "
            "for what it lacks"
        )
    return x


def project(
    x: Array | QuantizedArray,
    layers: Layers,
    heads: Heads,
    *,
    dtype: jax.typing.DTypeLike | None,
    options: linear.Options,
    tensor: TensorAxis | None = None,
) -> tuple[Array, Array, Array]:
    """Query [batch, time, heads, head_dim], key and value, from one quantized x.

    With a tensor axis the time of x is split over devices, and then the heads are. Where there are too few heads of key
    and value, these are repeated.
    """
    if tensor is not None:
        layers, heads = split_heads(layers, heads, tensor)
    query, key, value = linear.linears(x, layers, features=heads.features, dtype=dtype, options=options, tensor=tensor)
    return query, key, value


def heads_here(heads: Heads, tensor: TensorAxis) -> Heads:
    """The heads of the kernels in this place."""
    is_split = heads == heads.repeated(tensor.size)
    return Heads(
        tensor.here(heads.query), tensor.here(heads.key_value) if is_split else heads.key_value, heads.head_dim
    )


def split_heads(layers: Layers, heads: Heads, tensor: TensorAxis) -> tuple[Layers, Heads]:
    """The layers of query, key and value, and their heads, where devices split the latter.

    Kernels are [in, heads, head_dim] or [in, heads · head_dim]. Where there are too few heads of key and value, these
    are repeated: of whole arrays all, else this device's.
    """
    repeated = heads.repeated(tensor.size)
    if repeated == heads:
        return layers, heads
    query, *others = layers
    key, value = (_repeated(layer, heads.key_value, repeated.key_value, tensor) for layer in others)
    return (query, key, value), repeated


def _repeated(layer: linear.Layer, count: int, repeated: int, tensor: TensorAxis) -> linear.Layer:
    """The layer of key or value, which has `count` heads, with `repeated` ones, or this device's part of these."""
    kernel = layer.kernel.added() if isinstance(layer.kernel, AccumulatedKernel) else layer.kernel
    if isinstance(kernel, QuantizedArray):
        raise ValueError(
            f"key or value is quantized beforehand, and the {tensor.size} devices along tensor_axis {tensor.name!r} "
            "cannot split its heads: leave it as it is, or use num_kv_heads that they divide"
        )

    def of_array(array: Array, axis: int) -> Array:
        if tensor.mesh is not None:
            return jnp.repeat(array, repeated // count, axis)
        array, here = sharding.varying_over(array, frozenset((tensor.name,))), repeated // tensor.size
        first, width = lax.axis_index(tensor.name) * here, array.shape[axis] // count
        places = ((first + i) // (repeated // count) * width for i in range(here))
        parts = [lax.dynamic_slice_in_dim(array, place, width, axis) for place in places]
        return jnp.concatenate(parts, axis)

    return layer._replace(kernel=of_array(kernel, 1), bias=None if layer.bias is None else of_array(layer.bias, 0))


def attend(
    query: Array,
    key: Array,
    value: Array,
    settings: Settings,
    *,
    segment_ids: Array | None = None,
    max_segments_per_seq: int | None = None,
    key_lengths: Array | None = None,
    positions: jax.typing.ArrayLike | None = None,
    cache: Cache | None = None,
) -> tuple[Array, Cache | None]:
    """Attention with rotary positions; with a cache, to the tokens that it holds and to these.

    Args:
      query: [batch, time, heads, head_dim].
      key, value: [batch, time, kv_heads, head_dim].
      settings: of the layer.
      segment_ids, max_segments_per_seq, key_lengths: as in `te_jax.ops.attention`; not with a cache.
      positions: integers [time] or [batch, time]; None counts from 0, or from the tokens in the cache.
      cache: of decoding.

    Returns:
      ([batch, time, heads, head_dim], the cache with these tokens). With more tokens than the cache takes: NaN.

    Raises:
      ValueError: for arguments that do not fit.
    """
    time = query.shape[1]
    if cache is not None:
        _validate_cached(key, settings, segment_ids, key_lengths, cache)
    if settings.rope_theta is not None:
        if positions is None:
            positions = jnp.arange(time) if cache is None else cache.positions(time)
        cos, sin = rotary_tables(_as_positions(positions, query), query.shape[-1], settings.rope_theta)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
    elif positions is not None:
        raise ValueError("positions are given, but rope_theta is None, and nothing else reads them: leave them out")
    reference = "reference" if settings.implementation == "reference" else None
    options: Any = {"implementation": reference, "max_score_bytes": settings.max_score_bytes}
    if cache is None:
        masks: Any = {"segment_ids": segment_ids, "max_segments_per_seq": max_segments_per_seq}
        masks |= {"key_lengths": key_lengths, "causal": settings.causal, "window": settings.window}
        return ops.attention(query, key, value, **masks, **options), None

    return attend_cached(query, key, value, cache, window=settings.window, **options)


def attend_cached(
    query: Array,
    key: Array,
    value: Array,
    cache: Cache,
    *,
    window: int | None,
    sinks: Array | None = None,
    value_dim: int | None = None,
    **options: Any,
) -> tuple[Array, Cache]:
    """Causal attention to the tokens that a cache holds and to these, with rotary positions.

    Args:
      query, key, value: of new tokens, [batch, time, heads or kv_heads, head_dim].
      cache: of the tokens before them.
      window, sinks: see `te_jax.ops.attention`.
      value_dim: how many features of key are its value, where value has none; see `Cache`.
      options: other arguments of it.

    Returns:
      ([batch, time, heads, head_dim], the cache with these tokens). With more tokens than the cache takes: NaN.
    """
    time, each = query.shape[1], cache.filled.ndim == 1
    after = cache.appended(key, value)
    keys, values = after.key, after.value if value_dim is None else after.key[..., :value_dim]
    # Causal masks of ops.attention count queries from 0, and these come after those of the cache.
    filled = cache.filled[:, None, None, None] if each else cache.filled
    shape = (*filled.shape[:2], time, keys.shape[1])
    place = filled + lax.broadcasted_iota(jnp.int32, shape, len(shape) - 2)
    seen = lax.broadcasted_iota(jnp.int32, place.shape, place.ndim - 1)
    visible = seen <= place
    if window is not None and window < keys.shape[1]:
        visible &= seen > place - int(window)
    bias = jnp.where(visible, 0.0, -jnp.inf).astype(query.dtype)
    keys_here, values_here = keys.astype(query.dtype), values.astype(query.dtype)
    mixed = ops.attention(query, keys_here, values_here, bias=bias, sinks=sinks, **options)
    fits = filled + time <= keys.shape[1]
    return jnp.where(fits, mixed, jnp.nan), after


def _validate_cached(key: Array, settings: Settings, segment_ids: object, key_lengths: object, cache: Cache) -> None:
    for name, value in (("segment_ids", segment_ids), ("key_lengths", key_lengths)):
        if value is not None:
            raise ValueError(f"{name} are given with decode=True, where no token is padding: leave them out")
    if not settings.causal:
        raise ValueError("causal is False, and decode=True adds tokens one after the other: use causal=True")
    batch, length, *others = cache.key.shape
    if key.shape[0] != batch or key.shape[2:] != tuple(others):
        raise ValueError(
            f"x gives keys of shape {key.shape}, and the cache holds {cache.key.shape}: make one for this batch"
        )
    taken = 0 if isinstance(cache.filled, Tracer) else int(cache.filled)
    if taken + key.shape[1] > length:
        raise ValueError(
            f"x has {key.shape[1]} tokens, and the cache of length {length} holds {taken} already: make a longer one"
        )


def _as_positions(positions: jax.typing.ArrayLike | None, query: Array) -> Array:
    validate_integers("positions", positions)
    positions = jnp.asarray(positions)
    integers = jnp.issubdtype(positions.dtype, jnp.integer)
    if not integers or positions.shape not in (query.shape[1:2], query.shape[:2]):
        raise ValueError(
            f"positions have shape {positions.shape} and dtype {positions.dtype}; they must be integers, of shape "
            f"{query.shape[1:2]} or {query.shape[:2]}"
        )
    return positions


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary positions are stretched, so that a model reads longer sequences than it was pre-trained on.

    With f_i = theta^(-2i / head_dim), the frequencies of pairs, and wavelengths 2π / f_i:

    - "linear" divides all by `factor`.
    - "llama3" divides those of wavelengths above original_length / low_freq_factor by `factor`, leaves those below
      original_length / high_freq_factor, and passes from one to the other in between.
    - "yarn" does the same between the pairs that turn `beta_slow` and `beta_fast` times within original_length, and
      multiplies cos and sin by `attention_factor`.

    Args:
      kind: "linear", "llama3" or "yarn".
      factor: how much longer sequences are; at least 1.
      original_length: tokens in a sequence of pre-training; of "llama3" and "yarn".
      low_freq_factor, high_freq_factor: of "llama3".
      beta_fast, beta_slow, truncate: of "yarn"; truncate rounds the two pairs to whole numbers.
      attention_factor: of "yarn"; None is 0.1 · ln(factor) + 1.

    Raises:
      ValueError: an argument breaks a rule above.

    References:
      Peng et al., YaRN: Efficient Context Window Extension of Large Language Models, arXiv:2309.00071.

    Examples:
      >>> import te_jax
      >>> te_jax.models.RopeScaling("llama3", factor=8.0, original_length=8192).low_freq_factor
      1.0
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_length: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None

    def __post_init__(self):
        if self.kind not in ("linear", "llama3", "yarn"):
            raise ValueError(f"kind is {self.kind!r}: choose 'linear', 'llama3' or 'yarn'")
        numbers = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
        for name in (*numbers, *(() if self.attention_factor is None else ("attention_factor",))):
            value = getattr(self, name)
            if not is_finite_number(value) or value <= 0:
                raise ValueError(f"{name} is {value!r}: it needs to be a finite number above 0")
            object.__setattr__(self, name, float(value))
        if self.factor < 1:
            raise ValueError(f"factor is {self.factor}: it needs to be at least 1")
        length = self.original_length
        countable = length is not None and is_whole_number(length) and is_finite_number(length) and length >= 1
        if self.kind != "linear" and not countable:
            raise ValueError(f"original_length is {length!r}: kind {self.kind!r} needs a whole number of at least 1")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor is {self.low_freq_factor} and high_freq_factor {self.high_freq_factor}: the first "
                "needs to be the smaller one"
            )

    @property
    def magnitude(self) -> float:
        """What multiplies cos and sin."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0

    def frequencies(self, theta: float, head_dim: int) -> np.ndarray:
        """Float32 [head_dim / 2], of every pair."""
        plain = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.kind == "linear":
            return (plain / self.factor).astype(np.float32)
        assert self.original_length is not None
        if self.kind == "llama3":
            turns = self.original_length * plain / (2 * math.pi)
            kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        else:
            first, last = (
                head_dim * (math.log(self.original_length / (2 * math.pi)) - math.log(turns)) / (2 * math.log(theta))
                for turns in (self.beta_fast, self.beta_slow)
            )
            if self.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, head_dim - 1)
            kept = 1 - (np.arange(head_dim // 2) - first) / max(last - first, 1e-3)
        kept = np.clip(kept, 0, 1)
        return (plain / self.factor * (1 - kept) + plain * kept).astype(np.float32)


def rotary_tables(
    positions: Array, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Array, Array]:
    """cos and sin of the angles of rotary positions, float32 [batch or 1, time, 1, head_dim / 2].

    The angle of pair i at position p is p · theta^(-2i / head_dim), unless `scaling` says otherwise.

    Args:
      positions: [time] or [batch, time].
      head_dim: features of a head.
      theta: the longest period is about 2π · theta tokens.
      scaling: how positions are stretched; None for not at all.

    Raises:
      ValueError: head_dim is odd.

    References:
      Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, arXiv:2104.09864.
    """
    if head_dim % 2:
        raise ValueError(
            f"head_dim is {head_dim}, and rotary positions turn pairs of features; make it even, or use rope_theta=None"
        )
    if scaling is None:
        frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    else:
        frequencies = jnp.asarray(scaling.frequencies(theta, head_dim))
    angles = positions.astype(jnp.float32)[..., None, None] * lax.expand_dims(frequencies, range(positions.ndim + 1))
    angles = angles if positions.ndim == 2 else angles[None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if scaling is not None and scaling.magnitude != 1:
        cos, sin = cos * scaling.magnitude, sin * scaling.magnitude
    return cos, sin


# One program where a layer runs eagerly.
@functools.partial(jax.jit, inline=sharding.INLINE)
def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Turns the pairs (i, i + head_dim / 2) of x [batch, time, heads, head_dim] by their position's angle."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
