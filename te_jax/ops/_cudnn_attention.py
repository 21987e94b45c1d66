"""cuDNN's fused attention on local arrays, as XLA calls it: the one place that touches JAX's private names for it.

JAX's public function asks for cuDNN on the machine that traces, keeps residuals without names, and returns the
log-sum-exp in the dtype of the query. Here the same custom calls are emitted directly. JAX writes their configuration,
which belongs to its own jaxlib; shapes, layouts and the order of operands are those of its own lowering, with which
tests/ops/test_attention.py compares them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

# Private: XLA's configuration of a fused attention, its kinds of masks and layouts, and the version of cuDNN.
from jax._src.cudnn import fused_attention_stablehlo as jax_cudnn
from jaxlib.mlir import ir

from te_jax import native, sharding
from te_jax.ops._fused_attention import Masks, Operands, Segments, gradient_of_sinks, with_sinks

MAX_HEAD_DIM = 256
# The cotangent of the log-sum-exp needs three more columns; head_dim stays a multiple of 8.
_LSE_COLUMNS = 8
# The last of `_Call.tiers` takes all segments of up to so many tokens: cuDNN's blocks have as many.
_SHORTEST_TIER = 128


# ------------------------------------------------------------------------------------------------- where it is no help


def problem(
    operands: Operands, masks: Masks, *, backward: bool, lse_cotangent: bool, max_mask_bytes: int
) -> str | None:
    """Why cuDNN cannot compute attention on these local arrays, or is known to do it wrongly; None if it can.

    Args:
      operands: of attention, by name.
      masks: of attention.
      backward: whether it is about gradients.
      lse_cotangent: whether a cotangent of the log-sum-exp is among the operands of the gradients.
      max_mask_bytes: limit of the mask that segments need.
    """
    query, key = operands["query"], operands["key"]
    (*batch, t, heads, head_dim), s = query.shape, key.shape[-3]
    bias, segments = "bias" in operands, "query_segment_ids" in operands
    masked = segments and masks.max_segments_per_seq is None
    if not all(isinstance(size, int) for size in (*query.shape, *key.shape)):
        return f"query has shape {query.shape}, and cuDNN needs sizes that are known: export it for each size"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"query has dtype {query.dtype}, and cuDNN takes bfloat16 and float16: cast query, key and value"
    if masks.softcap is not None:
        return f"softcap is {masks.softcap}, and cuDNN has none"
    capability, version = _device()
    largest = MAX_HEAD_DIM if capability is None or capability >= (9, 0) else 128
    if head_dim > largest or head_dim % 8:
        return f"query has a head_dim of {head_dim}, and cuDNN takes multiples of 8 up to {largest}: pad it with zeros"
    if math.prod(batch) * t * s * heads * head_dim == 0:
        return f"query has shape {query.shape} and key {key.shape}, and cuDNN takes no empty arrays"
    if segments and bias:
        return "bias and segment_ids are both given, and cuDNN takes one mask: add a mask of the segments to the bias"
    if segments and ("query_lengths" in operands or "key_lengths" in operands):
        return "segment_ids are given with lengths: give padding a segment of its own instead"
    if masked and (size := 2 * math.prod(batch) * t * s) > max_mask_bytes:
        return f"segment_ids need a mask of {size} bytes, above max_score_bytes={max_mask_bytes}: raise it to that"
    if segments and not masked:
        if capability is not None and capability < (9, 0):
            return "max_segments_per_seq is given, and cuDNN packs segments on Hopper and later: leave it out"
        if math.prod(batch) * t * heads * (head_dim + _LSE_COLUMNS) >= 2**31:
            return (
                f"query has shape {query.shape}, and cuDNN's offsets of segments end at 2^31 values: use a smaller "
                "batch, or leave max_segments_per_seq out"
            )
    if (bias or masked) and (t % 2 or s % 2):
        return f"query and key have lengths {t} and {s}, which with bias or segment_ids must be even: pad them"
    if lse_cotangent and head_dim + _LSE_COLUMNS > largest:
        most = largest - _LSE_COLUMNS
        return (
            f"query has a head_dim of {head_dim}, and with a gradient through the log-sum-exp cuDNN takes up to {most}"
        )
    for wrong, reason in (
        # Known errors of cuDNN, silent ones. The version is known where a program is traced beside a GPU only.
        (version in ((9, 10, 0), (9, 10, 1)), "cuDNN 9.10.0 and 9.10.1 compute attention wrongly: upgrade cuDNN"),
        # pytorch#196678: dQ is NaN on sm90.
        (
            backward and (bias or masked) and s % 128 == 64,
            f"key has a length of {s}, and for 64 beyond a multiple of 128 cuDNN's gradients with bias or segment_ids "
            "are NaN: pad it",
        ),
        # cudnn-frontend#1072: dK and dV are NaN.
        (backward and t == 1, "query has a length of 1, for which cuDNN's gradients are NaN"),
    ):
        if wrong:
            return reason
    return None


def takes_narrow_values(operands: Operands, masks: Masks) -> bool:
    """Whether values are narrower than keys, and cuDNN takes them as they are, as latent attention has them."""
    capability, version = _device()
    known = (capability is None or capability >= (9, 0)) and (version is None or version >= (9, 10, 0))
    # Offsets of segments count values of an array, and XLA has those of queries and keys alone.
    packed = "query_segment_ids" in operands and masks.max_segments_per_seq is not None
    return known and not packed and operands["value"].shape[-1] < operands["query"].shape[-1]


@functools.cache
def _device() -> tuple[tuple[int, int] | None, tuple[int, int, int] | None]:
    """(compute capability, version of cuDNN), each None where no GPU is there to ask."""
    if not native.has_gpu():
        return None, None
    version = jax_cudnn.check_cudnn_version()
    return native.compute_capability(), (version // 10000, version // 100 % 100, version % 100)


# --------------------------------------------------------------------------------------------------------------- calls


def forward(operands: Operands, masks: Masks) -> tuple[Array, Array]:
    """(output, float32 log-sum-exp [*batch, N, T]) of operands with any number of batch dimensions."""
    call = _Call.of(operands, masks)
    lse_type = jax.ShapeDtypeStruct((call.batch * call.segments, call.heads, call.t), jnp.float32)
    query, _, value = call.inputs
    like_out = jax.ShapeDtypeStruct((*query.shape[:-1], value.shape[-1]), query.dtype)
    out, lse = call.run([like_out], [lse_type], *call.inputs, *call.bias, *call.lengths)
    if call.packed is not None:
        lse = call.packed.unpacked(lse)
    lead = operands["query"].shape[:-3]
    out, lse = out.reshape(*operands["query"].shape[:-1], value.shape[-1]), lse.reshape(*lead, call.heads, call.t)
    if (rows := _rows_with_keys(operands, masks)) is not None:
        out = jnp.where(rows[..., None, None], out, 0.0)
        lse = jnp.where(rows[..., None, :], lse, -jnp.inf)
    return with_sinks(operands, out, lse)


def backward(
    operands: Operands, masks: Masks, out: Array, lse: Array, dout: Array, dlse: Array | None, wanted: tuple[str, ...]
) -> tuple[Array, ...]:
    """Gradients of the wanted operands.

    cuDNN computes P = exp(scores - lse), δ = Σ dout · out and dscores = P (dP - δ). With an output and a log-sum-exp
    that include the sinks all of these are right.
    """
    gradients: dict[str, Array] = {}
    rows = _rows_with_keys(operands, masks)
    if rows is not None:
        dout = jnp.where(rows[..., None, None], dout, 0.0)
    if "sinks" in wanted:
        gradients["sinks"] = gradient_of_sinks(operands, out, lse, dout, dlse)
    if rows is not None:
        lse = jnp.where(rows[..., None, :], lse, 0.0)  # exp(-inf - 0) is 0, where exp(-inf + inf) is NaN
        dlse = None if dlse is None else jnp.where(rows[..., None, :], dlse, 0.0)

    wide_out, wide_dout = out, dout
    if dlse is not None:
        wide_out, wide_dout = _with_columns(out), _with_columns(dout, _summands(jnp.swapaxes(dlse, -1, -2), dout.dtype))
    call = _Call.of(operands if dlse is None else _with_lse_columns(operands), masks)
    lse = lse.reshape(call.batch, call.heads, call.t)
    results: list[Array] = []
    for tier in call.tiers():
        of_tier = tier.run(
            tier.inputs,
            tier.bias if "bias" in wanted else [],
            *tier.inputs,
            lse if tier.packed is None else tier.packed.packed(lse),
            tier.folded(wide_dout),
            *tier.bias,
            tier.folded(wide_out),
            *tier.lengths,
            backward=True,
        )
        results = [*of_tier] if tier.packed is None or not results else tier.packed.select(of_tier, results)
    dquery, dkey, dvalue, *dbias = results
    for name, gradient in (("query", dquery), ("key", dkey), ("value", dvalue)):
        gradients[name] = gradient[..., : operands[name].shape[-1]].reshape(operands[name].shape)
    if rows is not None:
        gradients["query"] = jnp.where(rows[..., None, None], gradients["query"], 0.0)
    if "key_lengths" in operands:
        lengths = operands["key_lengths"][..., None]
        positions = lax.broadcasted_iota(jnp.int32, (*lengths.shape[:-1], call.s), lengths.ndim - 1)
        for name in ("key", "value"):
            gradients[name] = jnp.where((positions < lengths)[..., None, None], gradients[name], 0.0)
    if dbias:
        gradients["bias"] = _unbroadcast(dbias[0], operands["bias"], operands["query"].shape[:-3])
    return tuple(gradients[name] for name in wanted)


def _with_lse_columns(operands: Operands) -> Operands:
    """The operands with columns through which the backward pass takes a cotangent of the log-sum-exp.

    cuDNN has no argument for it. It adds P · dlse to dscores: with columns of dout that hold dlse, where value is 1 and
    out is 0, dP grows by dlse and δ does not. Three columns of half precision hold a float32 as a sum.
    """
    ones = jnp.ones((*operands["value"].shape[:-1], 3), operands["value"].dtype)
    return {
        **operands,
        "query": _with_columns(operands["query"]),
        "key": _with_columns(operands["key"]),
        "value": _with_columns(operands["value"], ones),
    }


class _Packed(Segments):
    """Segments as cuDNN takes them: all of them, or those of a range of lengths."""

    def tier(self, shortest: int, longest: int, count: int) -> _Packed:
        """The segments of `shortest` to `longest` tokens, of which there are at most `count`."""
        inside = (self.lengths >= shortest) & (self.lengths <= longest)
        ranks = jnp.cumsum(inside, dtype=jnp.int32)
        places = lax.broadcasted_iota(jnp.int32, (count + 1, inside.size), 0)
        indices = jnp.sum(ranks[None] <= places, axis=1, dtype=jnp.int32)  # S behind the last one
        segment = jnp.where(inside, ranks - 1, count)[self.segment]
        return _Packed(segment, self.offsets[indices], jnp.pad(self.lengths, (0, 1))[indices[:-1]], longest)

    def operands(self, query: Array, key: Array) -> tuple[Array, ...]:
        """Lengths and offsets as cuDNN takes them: the latter count values."""
        return (self.lengths, self.lengths, *(self.offsets * math.prod(x.shape[-2:]) for x in (query, key)))

    def select(self, packed: Sequence[Array], rest: Sequence[Array]) -> list[Array]:
        """`packed` for tokens of these segments, for which alone it is defined, and `rest` for others."""
        inside = (self.segment < self.lengths.size).reshape(*rest[0].shape[:2], 1, 1)
        pairs = zip(packed, rest, strict=True)
        return [jnp.where(inside, one.reshape(other.shape), other) for one, other in pairs]

    def unpacked(self, of_segments: Array) -> Array:
        """[B, N, T] of tokens, from [S, N, T] where each segment begins at 0."""
        place = jnp.arange(self.segment.size, dtype=jnp.int32) - self.offsets[self.segment]
        of_tokens = of_segments[self.segment, :, place]
        return jnp.swapaxes(of_tokens.reshape(-1, self.time, of_segments.shape[1]), 1, 2)

    def packed(self, of_tokens: Array) -> Array:
        """[S, N, T] where each segment begins at 0, and what is behind its end has any values, from [B, N, T]."""
        heads = jnp.swapaxes(of_tokens, 0, 1).reshape(of_tokens.shape[1], -1)
        places = self.offsets[:-1, None] + lax.broadcasted_iota(jnp.int32, (self.offsets.size - 1, self.time), 1)
        return jnp.swapaxes(heads[:, jnp.minimum(places, heads.shape[1] - 1)], 0, 1)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A custom call: its operands with one batch dimension, and its configuration."""

    batch: int
    t: int
    s: int
    heads: int
    inputs: tuple[Array, ...]
    bias: tuple[Array, ...]
    lengths: tuple[Array, ...]
    segments: int
    packed: _Packed | None
    masks: Masks

    @classmethod
    def of(cls, operands: Operands, masks: Masks) -> _Call:
        query, s = operands["query"], operands["key"].shape[-3]
        *lead, t, heads, _ = query.shape
        lead = tuple(lead)
        batch = math.prod(lead)

        def folded(x: Array, tail: int) -> Array:
            shape = x.shape[x.ndim - tail :]
            return jnp.broadcast_to(x, (*lead, *shape)).reshape(batch, *shape)

        lengths = ()
        if "query_lengths" in operands or "key_lengths" in operands:
            full = {"query_lengths": t, "key_lengths": s}
            # A length of 0 is a NaN: one key is seen then, by queries that do not count.
            lengths = tuple(
                jnp.clip(folded(operands[name], 0), 1, size)
                if name in operands
                else sharding.varying_together((jnp.full(batch, size, jnp.int32), query))[0]
                for name, size in full.items()
            )
        bias, segments, packed = (), 1, None
        if "query_segment_ids" in operands and masks.max_segments_per_seq is not None:
            segments = max(masks.max_segments_per_seq, 2)  # one is a call without segments
            packed = _Packed.of(folded(operands["query_segment_ids"], 1), batch * segments)
            lengths = packed.operands(query, operands["key"])
        elif "query_segment_ids" in operands:
            same = operands["query_segment_ids"][..., :, None] == operands["key_segment_ids"][..., None, :]
            bias = (folded(jnp.where(same, 0.0, _lowest(query.dtype))[..., None, :, :].astype(query.dtype), 3),)
        elif "bias" in operands:
            clipped = jnp.maximum(operands["bias"], _lowest(operands["bias"].dtype)).astype(query.dtype)
            whole = clipped.ndim == 4 and clipped.shape[0] == 1  # cuDNN repeats it for all of the batch
            bias = (clipped if whole else folded(clipped, 3),)
        inputs = tuple(folded(operands[name], 3) for name in ("query", "key", "value"))
        return cls(batch, t, s, heads, inputs, bias, lengths, segments, packed, masks)

    def tiers(self) -> list[_Call]:
        """Calls of the backward pass, each for a range of lengths of segments, so that many need no more memory.

        XLA does not tell cuDNN how many tokens there are, so the workspace has `longest` tokens for each slot. At most
        T // (l + 1) segments of a sequence are longer than l tokens: with l = longest / 4 and a slot for each, the
        workspace has at most 4 T tokens of a sequence.
        """
        calls, longest, t = [], self.t, self.t
        while self.segments * longest > 4 * t:
            shorter = max(longest // 4, _SHORTEST_TIER)
            if t % shorter or 2 * shorter > longest:
                break
            calls.append(self._tier(shorter + 1, longest, t // (shorter + 1)))
            longest = shorter
        return [*calls, self._tier(1, longest, self.segments)] if calls else [self]

    def _tier(self, shortest: int, longest: int, most: int) -> _Call:
        """The call for segments of `shortest` to `longest` tokens, of which a sequence has at most `most`.

        cuDNN takes the length of a sequence as the limit of a segment's: the same tokens are shorter sequences here.
        """
        assert self.packed is not None
        batch = self.batch * self.t // longest
        segments = max(-(-most * longest // self.t), 2)
        packed = self.packed.tier(shortest, longest, batch * segments)
        query, key, value = (x.reshape(batch, longest, *x.shape[-2:]) for x in self.inputs)
        window = self.masks.window
        return dataclasses.replace(
            self,
            batch=batch,
            t=longest,
            s=longest,
            inputs=(query, key, value),
            lengths=packed.operands(query, key),
            segments=segments,
            packed=packed,
            masks=dataclasses.replace(self.masks, window=None if window is None or window >= longest else window),
        )

    def folded(self, x: Array) -> Array:
        return x.reshape(self.batch, self.t, *x.shape[-2:])

    def run(
        self,
        like: Sequence[Array | jax.ShapeDtypeStruct],
        extra: Sequence[Any],
        *buffers: Array,
        backward: bool = False,
    ) -> tuple[Array, ...]:
        """Results like arrays [B, T, N, H] and then like `extra`, all row-major.

        cuDNN gives the dimensions of the former as [B, N, T, H], with T outside of N in memory.
        """
        shapes = [tuple(x.shape[i] for i in (0, 2, 1, 3)) for x in like] + [x.shape for x in extra]
        types = [*zip(shapes, (x.dtype for x in (*like, *extra)), strict=True), ((0,), jnp.uint8)]  # XLA's workspace
        target = f"__cudnn$fmha{'ScaleBias' if self.bias else ''}Softmax{'Backward' if backward else ''}"
        *results, _ = jax.ffi.ffi_call(
            target,
            [sharding.result_type(shape, dtype, *buffers) for shape, dtype in types],
            custom_call_api_version=2,
            legacy_backend_config=self._configuration(backward),
            output_layouts=[(0, 2, 1, 3)] * len(like) + [None] * (len(extra) + 1),
        )(*buffers)
        return (*(jnp.swapaxes(x, 1, 2) for x in results[: len(like)]), *results[len(like) :])

    def _configuration(self, backward: bool) -> str:
        kinds = jax_cudnn.MaskType
        plain, padded = (kinds.CAUSAL, kinds.PADDING_CAUSAL) if self.masks.causal else (kinds.NO_MASK, kinds.PADDING)
        with ir.Context():
            return jax_cudnn.create_dot_product_attention_backend_config(
                self.batch,
                self.heads,
                self.t,
                self.s,
                ir.BF16Type.get() if self.inputs[0].dtype == jnp.bfloat16 else ir.F16Type.get(),
                self.masks.scale,
                42,  # seed of a dropout
                0.0,  # dropout_rate
                padded if self.lengths else plain,
                jax_cudnn.AttentionLayout.BTNH.value,
                self.masks.window,
                self.segments,
                False,  # is_paged_attention
                backward,
            )


def _lowest(dtype) -> float:
    """The number in the place of -inf: cuDNN may subtract two of them."""
    return -(2.0**15) if dtype == jnp.float16 else -(2.0**41)


def _rows_with_keys(operands: Operands, masks: Masks) -> Array | None:
    """bool [*batch, T]: which queries see any key, where it may be that some see none."""
    if masks.max_segments_per_seq is not None and not {"query_lengths", "key_lengths"} & set(operands):
        return None  # all see themselves
    lengths_or_segments = {"query_lengths", "key_lengths", "query_segment_ids"} & set(operands)
    t, s = operands["query"].shape[-3], operands["key"].shape[-3]
    if not lengths_or_segments and not (masks.window is not None and t > s):
        return None
    visible = masks.visible(operands)
    assert visible is not None
    lead = operands["query"].shape[:-3]
    return jnp.broadcast_to(jnp.any(visible, axis=-1), (*lead, t))


def _summands(x: Array, dtype) -> Array:
    """Three numbers of the dtype that add up to x, along a new last dimension."""
    parts = []
    for _ in range(3):
        parts.append(x.astype(dtype))
        x = x - parts[-1].astype(x.dtype)
    return jnp.stack(parts, axis=-1)


def _with_columns(x: Array, columns: Array | None = None) -> Array:
    """x with more values in each head: first the columns, then zeros."""
    columns = x[..., :0] if columns is None else columns
    zeros = jnp.zeros((*x.shape[:-1], _LSE_COLUMNS - columns.shape[-1]), x.dtype)
    return jnp.concatenate([x, columns, zeros], axis=-1)


def _unbroadcast(dbias: Array, bias: Array, lead: tuple[int, ...]) -> Array:
    """The gradient of a bias from that of its copies for all of a batch."""
    if dbias.shape != bias.shape:
        dbias = dbias.reshape(*lead, *dbias.shape[-3:])
    for axis, size in enumerate(bias.shape):
        if dbias.shape[axis] != size:
            dbias = jnp.sum(dbias.astype(jnp.float32), axis=axis, keepdims=True)
    return dbias.astype(bias.dtype)
