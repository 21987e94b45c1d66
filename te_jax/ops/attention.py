"""Attention by FlashAttention 3, cuDNN, or XLA where neither can: chosen for the platform a program is lowered for."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, cast, overload

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from te_jax import native, reference, sharding
from te_jax._core.arguments import as_flag, is_finite_number, is_whole_number
from te_jax._core.derivatives import not_differentiated
from te_jax._core.integers import as_int32, in_one_dtype
from te_jax._core.platforms import by_platform
from te_jax._core.reverse_mode import reverse_mode_only
from te_jax.ops import _cudnn_attention, _fa3_attention
from te_jax.ops._fused_attention import Library, Masks, Operands
from te_jax.ops.operands import as_array

AttentionImplementation = native.Implementation | Literal["fa3"]

_FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)
_REVERSE_MODE = (
    "te_jax.ops.attention has first derivatives in reverse mode (jax.grad, jax.vjp) only: for forward mode (jax.jvp, "
    "jax.jacfwd) or second derivatives use implementation='reference'"
)


# fmt: off
@overload
def attention(
    query: jax.typing.ArrayLike, key: jax.typing.ArrayLike, value: jax.typing.ArrayLike, *,
    causal: bool = False, window: int | None = None,
    query_lengths: jax.typing.ArrayLike | None = None, key_lengths: jax.typing.ArrayLike | None = None,
    segment_ids: jax.typing.ArrayLike | None = None, key_segment_ids: jax.typing.ArrayLike | None = None,
    max_segments_per_seq: int | None = None, scale: float | None = None, softcap: float | None = None,
    bias: jax.typing.ArrayLike | None = None, sinks: jax.typing.ArrayLike | None = None,
    return_lse: Literal[False] = False, max_score_bytes: int = 2**30,
    implementation: AttentionImplementation | None = None,
) -> Array: ...
@overload
def attention(
    query: jax.typing.ArrayLike, key: jax.typing.ArrayLike, value: jax.typing.ArrayLike, *,
    causal: bool = False, window: int | None = None,
    query_lengths: jax.typing.ArrayLike | None = None, key_lengths: jax.typing.ArrayLike | None = None,
    segment_ids: jax.typing.ArrayLike | None = None, key_segment_ids: jax.typing.ArrayLike | None = None,
    max_segments_per_seq: int | None = None, scale: float | None = None, softcap: float | None = None,
    bias: jax.typing.ArrayLike | None = None, sinks: jax.typing.ArrayLike | None = None,
    return_lse: Literal[True], max_score_bytes: int = 2**30,
    implementation: AttentionImplementation | None = None,
) -> tuple[Array, Array]: ...
# fmt: on
def attention(
    query: jax.typing.ArrayLike,
    key: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike,
    *,
    causal: bool = False,
    window: int | None = None,
    query_lengths: jax.typing.ArrayLike | None = None,
    key_lengths: jax.typing.ArrayLike | None = None,
    segment_ids: jax.typing.ArrayLike | None = None,
    key_segment_ids: jax.typing.ArrayLike | None = None,
    max_segments_per_seq: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: jax.typing.ArrayLike | None = None,
    sinks: jax.typing.ArrayLike | None = None,
    return_lse: bool = False,
    max_score_bytes: int = 2**30,
    implementation: AttentionImplementation | None = None,
) -> Array | tuple[Array, Array]:
    r"""softmax(scale · query keyᵀ + bias) value, of each head; a query that sees no key gives 0.

    On CUDA cuDNN computes it without ever holding the scores [B, N, T, S], and FlashAttention 3, which is faster, where
    it is installed (te_jax[fa3], compute capability 9.0); on other platforms XLA computes it with them. The platform is
    that for which the program is lowered, wherever it is traced. If neither can (float32, a
    head_dim above 256, …: docs/attention.md), XLA takes its place as long as the scores of a device fit
    `max_score_bytes`; beyond that lowering raises. Gradients of both may differ in their last bits from run to run.

    Devices may split batch and heads, in whole groups of heads with their key; they gather a split sequence. The
    residuals have the checkpoint names "te_attention_operand" for query, key and value, "te_attention_output" and
    "te_attention_lse".

    Args:
      query: [B, T, N, H], bfloat16, float16 or float32.
      key, value: [B, S, K, H] in the same dtype. K divides N: N / K neighbouring heads of query share one of key.
        Values may have another width than keys, [B, S, K, V], as in latent attention.
      causal: query t sees keys 0 … t; both count from 0, whatever their lengths.
      window: query t sees itself and the window - 1 keys before it. Needs causal=True.
      query_lengths, key_lengths: integers [B]: later tokens are padding, which sees no token and which no token sees.
      segment_ids, key_segment_ids: integers [B, T] and [B, S], by default the same: a query sees keys with its own
        number. cuDNN needs a mask [B, T, S] for them, which counts against `max_score_bytes`, and computes what it
        hides.
      max_segments_per_seq: with packed sequences, each run of equal segment_ids is a segment of its own, and a sequence
        has at most so many; one with more gives NaN. cuDNN needs no mask then, and computes segments alone.
      scale: a number; None is H^-½.
      softcap: c of scores that become c · tanh(scores / c), before bias and masks; None for none. XLA alone has it.
      bias: added to the scores: floats of 2 to 4 dimensions that can be broadcast to [B, N, T, S]. It must not hide all
        keys from a query.
      sinks: floats [N]: a further score of every query, without a value.
      return_lse: also return the log-sum-exp of the scores, with the sinks. Its gradient is right, but costs time.
      max_score_bytes: limit of XLA's float32 scores of one device on CUDA; ignored with implementation="reference".
      implementation: "native" is cuDNN, "fa3" FlashAttention 3, "reference" XLA with all derivatives, not only first
        ones in reverse mode; none falls back. None chooses, and so does "xla": XLA calls cuDNN too.

    Returns:
      [B, T, N, V] in the dtype of query, where V is the width of values; with return_lse also float32 [B, T, N].

    Raises:
      ValueError: an argument breaks a rule above. While lowering: neither cuDNN nor XLA within `max_score_bytes` can
        compute it, or the implementation that is asked for cannot.
      NotImplementedError: forward mode and second derivatives, unless implementation="reference".

    Examples:
      >>> import jax.numpy as jnp
      >>> from te_jax import ops
      >>> query, key = jnp.ones((1, 5, 4, 8)), jnp.ones((1, 5, 2, 8))
      >>> value = jnp.arange(80.0).reshape(key.shape)
      >>> out = ops.attention(query, key, value, causal=True, window=2)
      >>> out[0, :, 0, 0].tolist()
      [0.0, 8.0, 24.0, 40.0, 56.0]
    """
    validate_implementation(implementation)
    arguments = {
        "query": query,
        "key": key,
        "value": value,
        "bias": bias,
        "sinks": sinks,
        "query_lengths": query_lengths,
        "key_lengths": key_lengths,
        "segment_ids": segment_ids,
        "key_segment_ids": key_segment_ids,
    }
    arrays = {name: as_array(name, x) for name, x in arguments.items() if x is not None}
    validate_operands(arrays)
    causal, return_lse = as_flag("causal", causal), as_flag("return_lse", return_lse)
    if window is not None and (not is_whole_number(window) or window < 1 or not causal):
        raise ValueError(
            f"window is {window!r} with causal={causal}; it must be an integer of at least 1, with causal=True"
        )
    if scale is not None and (isinstance(scale, Tracer) or not is_finite_number(scale)):
        raise ValueError(f"scale is {scale!r}; it must be a finite number that is known while tracing, or None")
    if softcap is not None and (isinstance(softcap, Tracer) or not is_finite_number(softcap) or softcap <= 0):
        raise ValueError(f"softcap is {softcap!r}; it must be a finite number above 0, known while tracing, or None")
    if not is_whole_number(max_score_bytes) or max_score_bytes < 0:
        raise ValueError(f"max_score_bytes is {max_score_bytes!r}; it must be an integer of at least 0")
    validate_segments(max_segments_per_seq, segment_ids, key_segment_ids)
    max_segments_per_seq = None if max_segments_per_seq is None else int(max_segments_per_seq)
    (t, _, head_dim), s = arrays["query"].shape[1:], arrays["key"].shape[1]
    if window is not None and window >= t:
        window = None  # it hides nothing
    factor = head_dim**-0.5 if scale is None else float(scale)
    softcap = None if softcap is None else float(softcap)
    masks = Masks(causal, None if window is None else int(window), factor, max_segments_per_seq, softcap)
    settings = Settings(masks, implementation, int(max_score_bytes))
    operands = _prepared(arrays, t, s, max_segments_per_seq)
    if implementation != "reference":
        operands = reverse_mode_only(operands, _REVERSE_MODE)
    out, lse = _run(operands, settings, return_lse)
    return (out, lse) if return_lse else out


def validate_implementation(implementation: object) -> None:
    """Raises ValueError unless it is one of attention."""
    if implementation not in (None, "native", "xla", "reference", "fa3"):
        raise ValueError(
            f"implementation is {implementation!r}; it must be None, 'native', 'fa3', 'xla' or 'reference'"
        )


def validate_segments(max_segments_per_seq: int | None, segment_ids: object, key_segment_ids: object = None) -> None:
    """Raises ValueError if max_segments_per_seq is no bound of runs of segment_ids that query and key share."""
    if max_segments_per_seq is None:
        return
    if not is_whole_number(max_segments_per_seq) or max_segments_per_seq < 1:
        raise ValueError(f"max_segments_per_seq is {max_segments_per_seq!r}; it must be an integer of at least 1")
    if segment_ids is None or key_segment_ids is not None:
        raise ValueError(
            "max_segments_per_seq is given for runs of segment_ids that query and key share: pass segment_ids, and no "
            "key_segment_ids"
        )


def validate_operands(arrays: Operands) -> None:
    """Raises ValueError if shapes or dtypes are none of attention, or do not fit together."""
    query, key = arrays["query"], arrays["key"]
    for name in ("query", "key", "value"):
        x = arrays[name]
        if x.ndim != 4:
            raise ValueError(
                f"{name} has shape {x.shape}; it must be [batch, time, heads, head_dim]: add a dimension of 1 for what "
                "it lacks"
            )
        if x.dtype not in _FLOATS or x.dtype != query.dtype:
            raise ValueError(
                f"{name} has dtype {x.dtype}; query, key and value must be bfloat16, float16 or float32, all three the "
                "same: cast them"
            )
    batch, t, heads, head_dim = query.shape
    _, s, kv_heads, _ = key.shape
    if arrays["value"].shape[:3] != key.shape[:3] or (key.shape[0], key.shape[3]) != (batch, head_dim):
        raise ValueError(
            f"key has shape {key.shape} and value {arrays['value'].shape}; for a query of shape {query.shape} they "
            f"must be ({batch}, S, K, {head_dim}) and ({batch}, S, K, V)"
        )
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"query has {heads} heads and key {kv_heads}; the heads of key must divide those of query")
    expected = {
        "sinks": (heads,),
        "query_lengths": (batch,),
        "key_lengths": (batch,),
        "segment_ids": (batch, t),
        "key_segment_ids": (batch, s),
    }
    for name, x in arrays.items():
        floats = name in ("bias", "sinks")
        if name in expected or name == "bias":
            if floats and x.dtype not in _FLOATS:
                raise ValueError(f"{name} has dtype {x.dtype}; it must be bfloat16, float16 or float32: cast it")
            if not floats and not jnp.issubdtype(x.dtype, jnp.integer):
                raise ValueError(f"{name} has dtype {x.dtype}; it must be integers, such as int32")
        if name in expected and x.shape != expected[name]:
            raise ValueError(
                f"{name} has shape {x.shape}; for a query of shape {query.shape} and a key of shape {key.shape} it "
                f"must be {expected[name]}"
            )
    if "bias" in arrays:
        shape, scores = arrays["bias"].shape, (batch, heads, t, s)
        aligned = zip(reversed(shape), reversed(scores), strict=False)
        if not 2 <= len(shape) <= 4 or any(size not in (1, whole) for size, whole in aligned):
            raise ValueError(
                f"bias has shape {shape}; it must have 2 to 4 dimensions that can be broadcast to the scores {scores}"
            )
    if "key_segment_ids" in arrays and "segment_ids" not in arrays:
        raise ValueError("key_segment_ids are given without segment_ids, those of query: give both")
    if "segment_ids" in arrays and "key_segment_ids" not in arrays and t != s:
        raise ValueError(
            f"segment_ids are given without key_segment_ids for {t} queries and {s} keys; only for as many they are "
            "the same: give both"
        )


def _prepared(arrays: dict[str, Array], t: int, s: int, max_segments_per_seq: int | None) -> dict[str, Array]:
    """The operands in the dtypes and shapes that the functions below take."""
    if max_segments_per_seq is not None:
        runs = _runs(arrays["segment_ids"])
        arrays |= bounded_runs(arrays["query"], runs, jnp.max(runs, axis=1, initial=0), max_segments_per_seq)
    operands = {name: checkpoint_name(arrays[name], "te_attention_operand") for name in ("query", "key", "value")}
    operands |= {name: arrays[name] for name in ("bias", "sinks") if name in arrays}
    for name in ("query_lengths", "key_lengths"):
        if name in arrays:
            operands[name] = as_int32(arrays[name])
    if "segment_ids" in arrays:
        ids = in_one_dtype(arrays["segment_ids"], arrays.get("key_segment_ids", arrays["segment_ids"]))
        operands["query_segment_ids"], operands["key_segment_ids"] = ids
    if "bias" in arrays:
        bias = jnp.expand_dims(arrays["bias"], tuple(range(4 - arrays["bias"].ndim)))
        operands["bias"] = jnp.broadcast_to(bias, (*bias.shape[:2], t, s))
    return sharding.varying_together(operands)


def _runs(segment_ids: Array) -> Array:
    """Which run of equal segment_ids each token is in, counted from 0."""
    begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))[:, : segment_ids.shape[1]]
    return jnp.cumsum(begins, axis=1, dtype=jnp.int32)


def bounded_runs(query: Array, runs: Array, last: Array, most: int) -> dict[str, Array]:
    """Runs [B, T] as segment_ids. Where the last of a sequence [B] is one too many its query is NaN, and so is what
    follows."""
    query = jnp.where((last < most)[:, None, None, None], query, jnp.nan).astype(query.dtype)
    return {"query": query, "segment_ids": jnp.minimum(runs, most - 1)}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The static arguments, together."""

    masks: Masks
    implementation: AttentionImplementation | None
    max_score_bytes: int
    part: bool = False

    def forward(self, operands: dict[str, Array]) -> tuple[Array, ...]:
        """The output, float32 with `part`, and the log-sum-exp [B, N, T]."""
        return _Split.of(operands).forward(*operands.values(), settings=self)

    def backward(
        self, operands: dict[str, Array], out: Array, lse: Array, dout: Array, wanted: tuple[str, ...]
    ) -> tuple[Array, ...]:
        """Gradients of the wanted operands. With `part` they are float32, and out and lse are those of more keys than
        these."""
        inputs = {**operands, "out": out, "lse": lse, "dout": dout}
        return _Split.of(inputs, wanted).backward(*inputs.values(), settings=self)

    def by_xla(self, operands: Operands) -> tuple[Array, Array]:
        masks, arrays = self.masks, self.wide(operands)
        options = {"causal": masks.causal, "window": masks.window, "scale": masks.scale, "softcap": masks.softcap}
        return reference.attention(**arrays, **options)

    def by_library(self, library: Library, operands: Operands) -> tuple[Array, Array]:
        out, lse = library.forward(self.taken_by(library, operands), self.masks)
        out = out[..., : operands["value"].shape[-1]]
        return out.astype(jnp.float32) if self.part else out, lse

    def library(self, operands: Operands, *, backward: bool, lse_cotangent: bool) -> tuple[Library, str | None]:
        """Which library computes attention of these local arrays on CUDA, and why it cannot."""
        asked, narrow = self.implementation == "fa3", _cudnn_attention.takes_narrow_values(operands, self.masks)
        operands = _of_one_width(operands)
        # FlashAttention 3 takes zeros in their place, and is no faster then (benchmarks/lab/attention.md).
        if asked or (self.implementation != "native" and not narrow and _fa3_attention.is_here()):
            problem = _fa3_attention.problem(operands, self.masks, lse_cotangent=lse_cotangent)
            if asked or problem is None:
                return _fa3_attention, problem
        problem = _cudnn_attention.problem(
            operands, self.masks, backward=backward, lse_cotangent=lse_cotangent, max_mask_bytes=self.max_score_bytes
        )
        return _cudnn_attention, problem

    def taken_by(self, library: Library, arrays: Operands) -> Operands:
        """The arrays as a library takes them."""
        narrow = library is _cudnn_attention and _cudnn_attention.takes_narrow_values(arrays, self.masks)
        return arrays if narrow else _of_one_width(arrays)

    def wide(self, operands: Operands) -> Operands:
        """The operands for XLA, in float32 if the results are parts of sums."""
        if not self.part:
            return operands
        return {**operands, **{name: operands[name].astype(jnp.float32) for name in ("query", "key", "value")}}


def _of_one_width(arrays: Operands) -> Operands:
    """Arrays of keys or values with zeros behind the features of the narrower ones."""
    width = max(arrays["query"].shape[-1], arrays["value"].shape[-1])

    def padded(x: Array) -> Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])]) if x.shape[-1] < width else x

    of_width = ("query", "key", "value", "out", "dout")
    return {name: padded(x) if name in of_width else x for name, x in arrays.items()}


# Under jit even when called eagerly: sharded operands are then partitioned rather than gathered.
@functools.partial(jax.jit, static_argnums=(1, 2), inline=sharding.INLINE)
def _run(operands: dict[str, Array], settings: Settings, return_lse: bool) -> tuple[Array, Array | None]:
    attend = settings.by_xla if settings.implementation == "reference" else functools.partial(_attention, settings)
    out, lse = attend(operands)
    return out, jnp.swapaxes(lse, 1, 2) if return_lse else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(settings: Settings, operands: dict[str, Array]) -> tuple[Array, Array]:
    return _named_results(settings, operands)


def _named_results(settings: Settings, operands: dict[str, Array]) -> tuple[Array, Array]:
    out, lse = _Split.of(operands).forward(*operands.values(), settings=settings)
    return checkpoint_name(out, "te_attention_output"), checkpoint_name(lse, "te_attention_lse")


def _forward(settings: Settings, primals: dict[str, Any]):
    operands = {name: primal.value for name, primal in primals.items()}
    out, lse = _named_results(settings, not_differentiated(operands, _REVERSE_MODE))
    # The gradient of a bias costs as much as the bias: None, which unlike a bool has no array, where no one wants it.
    constant_bias = None if "bias" in primals and not primals["bias"].perturbed else ()
    return (out, lse), (operands, out, lse, constant_bias)


def _backward(settings: Settings, residuals, cotangents):
    operands, out, lse, constant_bias = residuals
    dout, dlse = cotangents
    if isinstance(dout, SymbolicZero):
        dout = jnp.zeros_like(out)
    wanted = ["query", "key", "value", *(name for name in ("bias", "sinks") if name in operands)]
    if constant_bias is None:
        wanted.remove("bias")
    inputs = {**operands, "out": out, "lse": lse, "dout": dout}
    if not isinstance(dlse, SymbolicZero):
        inputs["dlse"] = dlse
    inputs = cast(dict[str, Array], not_differentiated(inputs, _REVERSE_MODE))
    gradients = _Split.of(inputs, tuple(wanted)).backward(*inputs.values(), settings=settings)
    # Where types say that a sequence is split, which is gathered here, so is its gradient.
    by_operand = {name: sharding.Layout.of(operands[name]).apply(x) for name, x in zip(wanted, gradients, strict=True)}
    return ({**dict.fromkeys(operands), **by_operand},)


_attention.defvjp(_forward, _backward, symbolic_zeros=True)


# ----------------------------------------------------------------------------------------------- on each device's shard


@dataclasses.dataclass(frozen=True)
class _Split:
    """How operands of these names and groups of heads may be split over devices.

    Attributes:
      names: of the operands, in order.
      wanted: names of the operands whose gradients are the results; empty for the forward pass.
      group: how many heads of query share one of key.
      shared: dimensions of the bias, of batch and heads, that have size 1 and stand for all.
      one_kv_head: whether there is but one head of key: its gradient is a sum over the devices that split query's.
    """

    names: tuple[str, ...]
    wanted: tuple[str, ...]
    group: int
    shared: tuple[bool, bool]
    one_kv_head: bool

    @classmethod
    def of(cls, operands: Operands, wanted: tuple[str, ...] = ()) -> _Split:
        (batch, _, heads, _), kv_heads = operands["query"].shape, operands["key"].shape[2]
        shared = (False, False)
        if "bias" in operands:
            shared = operands["bias"].shape[0] < batch, operands["bias"].shape[1] < heads
        return cls(tuple(operands), wanted, heads // kv_heads, shared, kv_heads == 1 < heads)

    def rule(self, results: tuple[str, ...]) -> str:
        """The rule for `sharding.per_shard`."""
        terms = self.terms()
        left, right = (", ".join(terms[name] for name in names) for names in (self.names, results))
        return f"{left} -> {right}"

    def terms(self) -> dict[str, str]:
        """The dimensions of every array."""
        heads = "n" if self.group == 1 or self.one_kv_head else "(n g)"
        kv_heads = "one" if self.one_kv_head else "n"
        batch_of_bias, heads_of_bias = "alone" if self.shared[0] else "b", "one" if self.shared[1] else heads
        return {
            "query": f"... b t {heads} h",
            **dict.fromkeys(("out", "dout"), f"... b t {heads} v"),
            "key": f"... b s {kv_heads} h",
            "value": f"... b s {kv_heads} v",
            **dict.fromkeys(("lse", "dlse"), f"... b {heads} t"),
            **dict.fromkeys(("query_lengths", "key_lengths"), "... b"),
            "bias": f"... {batch_of_bias} {heads_of_bias} t s",
            "sinks": f"... {heads}",
            "query_segment_ids": "... b t",
            "key_segment_ids": "... b s",
        }

    def per_shard(self, results: tuple[str, ...], **options: Any):
        sizes = {} if self.group == 1 or self.one_kv_head else {"g": self.group}
        whole = ("t", "s", "h", "v", "alone", "one")
        return sharding.per_shard(self.rule(results), replicated=whole, sizes=sizes, **options)

    def forward(self, *arrays: Array, settings: Settings) -> tuple[Array, ...]:
        return _forward_on_shards(self)(*arrays, split=self, settings=settings)

    def backward(self, *arrays: Array, settings: Settings) -> tuple[Array, ...]:
        return _backward_on_shards(self)(*arrays, split=self, settings=settings)


@functools.cache
def _forward_on_shards(split: _Split):
    return split.per_shard(("out", "lse"))(_local_forward)


@functools.cache
def _backward_on_shards(split: _Split):
    return split.per_shard(split.wanted, axes_of=("b", "n"))(_local_backward)


def _local_forward(*arrays: Array, axes, split: _Split, settings: Settings) -> tuple[Array, ...]:
    del axes
    operands = dict(zip(split.names, sharding.varying_together(arrays), strict=True))
    return _by_platform(operands, operands, settings.by_library, settings.by_xla, settings)


def _local_backward(*arrays: Array, axes, split: _Split, settings: Settings) -> tuple[Array, ...]:
    if axes:  # gradients of what several devices hold are sums over them
        gradients = split.backward(*arrays, settings=settings)
        factors = (set(split.terms()[name].translate({ord("("): " "}).split()) for name in split.wanted)
        missing = [tuple(axis for name in axes if name not in of_term for axis in axes[name]) for of_term in factors]
        return tuple(lax.psum(x, over) if over else x for x, over in zip(gradients, missing, strict=True))
    # All vary alike, or JAX would itself sum gradients of what does not, and only XLA's.
    inputs = dict(zip(split.names, sharding.varying_together(arrays), strict=True))
    operands = {name: x for name, x in inputs.items() if name not in ("out", "lse", "dout", "dlse")}

    def by_library(library: Library, inputs: Operands):
        taken = settings.taken_by(library, {**inputs, "out": inputs["out"].astype(inputs["dout"].dtype)})
        residuals = taken["out"], taken["lse"], taken["dout"], taken.get("dlse")
        gradients = library.backward(operands_of(taken), settings.masks, *residuals, split.wanted)
        of_width = ("query", "key", "value")
        gradients = tuple(
            x[..., : inputs[name].shape[-1]] if name in of_width else x
            for name, x in zip(split.wanted, gradients, strict=True)
        )
        return tuple(x.astype(jnp.float32) for x in gradients) if settings.part else gradients

    def by_xla(inputs: Operands):
        # Scores once more instead of probabilities that were kept: what is kept must not depend on the platform.
        wide = settings.wide(operands_of(inputs))
        wanted = {name: wide[name] for name in split.wanted}
        (out, lse), vjp = jax.vjp(lambda wanted: settings.by_xla({**wide, **wanted}), wanted)
        dout, dlse = inputs["dout"], inputs["dlse"] if "dlse" in inputs else jnp.zeros_like(lse)
        if settings.part:
            # The whole output is the sum of its parts, each times exp(its log-sum-exp - that of all).
            share = jnp.exp(lse - inputs["lse"])
            dout, change = dout.astype(jnp.float32), out - inputs["out"].astype(jnp.float32)
            dlse = share * jnp.swapaxes(jnp.sum(dout * change, axis=-1), -1, -2)
            dout = dout * jnp.swapaxes(share, -1, -2)[..., None]
        (gradients,) = vjp((dout, dlse))
        return tuple(gradients[name] for name in split.wanted)

    def operands_of(inputs: Operands) -> Operands:
        return {name: inputs[name] for name in operands}

    return _by_platform(inputs, operands, by_library, by_xla, settings, backward=True)


# --------------------------------------------------------------------------------------------- a library, XLA, or error


def _by_platform(
    inputs: Operands,
    operands: Operands,
    by_library: Callable[[Library, Operands], tuple[Array, ...]],
    by_xla: Callable[[Operands], tuple[Array, ...]],
    settings: Settings,
    *,
    backward: bool = False,
) -> tuple[Array, ...]:
    """The results of a library or of XLA, chosen when the program is lowered for a platform."""
    library, problem = settings.library(operands, backward=backward, lse_cotangent="dlse" in inputs)

    def of(function: Callable[[Operands], tuple[Array, ...]]) -> Callable[..., tuple[Array, ...]]:
        return lambda *arrays: function(dict(zip(inputs, arrays, strict=True)))

    elsewhere = on_cuda = of(by_xla)
    refused: dict[str, str] = {}
    if problem is None:
        on_cuda = of(functools.partial(by_library, library))
    elif settings.implementation in ("native", "fa3"):
        refused["cuda"] = f"{problem}; or use implementation=None"
    else:
        *batch_and_time, heads, _ = operands["query"].shape
        sizes = (*batch_and_time, heads, operands["key"].shape[-3])
        known = all(isinstance(size, int) for size in sizes)
        if not known or 4 * math.prod(sizes) > settings.max_score_bytes:
            size = f"{4 * math.prod(sizes)} bytes" if known else "an unknown size"
            refused["cuda"] = (
                f"{problem}; or let XLA hold scores of {size}, more than max_score_bytes={settings.max_score_bytes}: "
                "raise it, or use implementation='reference'"
            )
    if settings.implementation in ("native", "fa3"):
        named = "cuDNN" if settings.implementation == "native" else "FlashAttention 3"
        refused["default"] = (
            f"implementation is {settings.implementation!r}, {named}, and the program is not lowered for CUDA: use None"
        )
    arrays = tuple(inputs.values())
    return tuple(by_platform(arrays, cuda=on_cuda, default=elsewhere, refused=tuple(refused.items())))
