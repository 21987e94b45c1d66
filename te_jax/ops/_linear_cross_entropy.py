"""The output head and its cross-entropy, a chunk of tokens at a time: losses, and the gradients that are asked for."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from te_jax import sharding
from te_jax._core import observe
from te_jax.ops import _cross_entropy
from te_jax.ops._cross_entropy import IGNORED, Loss, where_counted
from te_jax.ops._quantize_kernels import Request, shared_facts
from te_jax.ops.linear.accumulator import validate_accumulated
from te_jax.ops.linear.codec import Codec
from te_jax.ops.linear.compared import compared
from te_jax.ops.linear.local import LocalProducts
from te_jax.quantized import QuantizedArray
from te_jax.recipe import Product, Role

_CHUNK_BYTES = 900_000_000
"""Bytes of logits, twice with a recipe. From a chunk to the next the weight gradient is read and written once more,
which takes a larger share of a faster product."""

_CHUNK_MULTIPLE = 1024
"""Tokens: tiles of the input gradient then fill a GPU's multiprocessors."""

_LEAST_CHUNK = 2048
"""With fewer tokens, reading and writing the weight gradient takes as long as its product."""

_MOST_UNROLLED = 4
"""Chunks, after the first, that are not made a loop, in which products took 1% longer."""

_ALIGNMENT = 16
"""Columns of 16-bit logits: GEMMs of other widths are slow, and FP8 has none."""


@dataclasses.dataclass(frozen=True)
class Head:
    """The static arguments, together: hashable, so that a head is traced once."""

    loss: Loss
    layer: LocalProducts
    chunk_tokens: int | None

    @property
    def kernel_dimensions(self) -> str:
        return "h v" if self.layer.kernel_contracting == "first" else "v h"

    @property
    def vocab_axis(self) -> int:
        return 1 if self.layer.kernel_contracting == "first" else 0

    @property
    def by_kernels(self) -> bool:
        """Whether native kernels compute what is no product."""
        return self.layer.codecs[0].by_kernels

    @property
    def codec(self) -> Codec | None:
        """Codec of the products in FP8, if there are any."""
        return next((codec for codec in self.layer.codecs if codec.in_fp8), None)

    @property
    def in_chunks(self) -> bool:
        """Whether tokens are taken in chunks, by rules of derivatives of its own."""
        return self.by_kernels or self.codec is not None

    def in_fp8(self, product: Product) -> bool:
        return self.layer.codec(product).in_fp8


# ----------------------------------------------------------------------------------------------------------- all chunks


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Which gradients are asked for: that of the kernel by itself, added to the accumulator, or both."""

    x: bool = False
    kernel: bool = False
    bias: bool = False
    accumulator: bool = False

    @classmethod
    def of(cls, x: Any, kernel: Any, bias: Any, accumulator: Any) -> Wanted:
        """From operands as custom_vjp hands them over with symbolic_zeros."""
        if accumulator is not None:
            validate_accumulated(kernel.perturbed, accumulator.perturbed)
        perturbed = [a is not None and a.perturbed for a in (x, kernel, bias, accumulator)]
        return cls(perturbed[0], perturbed[1] and accumulator is None, *perturbed[2:])

    def as_shapes(self) -> list[Array]:
        """As residuals, whose structure must not depend on it."""
        return [jnp.zeros((flag,), bool) for flag in dataclasses.astuple(self)]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(self) if getattr(self, field.name))


class Gradients(NamedTuple):
    """None for what is not asked for; that of kernel is float32."""

    x: Array | None
    kernel: Array | None
    bias: Array | None
    accumulator: Array | None


class Found(NamedTuple):
    losses: Array
    lse: Array
    gradients: Gradients


def run(head: Head, wanted: Wanted, x, kernel, bias, accumulator, codes, factor=None, lse=None) -> Found:
    """Losses, lse and the gradients of Σ factor · loss. Given lse, losses are not computed, and are lse."""
    operands = {
        "x": x,
        "kernel": kernel,
        "codes": codes,
        "bias": bias,
        "factor": factor if wanted.names else None,
        "lse": lse,
        "accumulator": accumulator if wanted.accumulator else None,
    }
    names = tuple(name for name, a in operands.items() if a is not None)
    call: Any = _per_shard(head, wanted, names, x.ndim - 1)
    if observe.requested() is not None and head.codec is not None and not head.loss.vocab_axis:
        call = call.observable
    axes = {"v": head.loss.vocab_axis} if head.loss.vocab_axis else None
    options = {} if axes is None else {"axes": axes}
    losses, lse, *gradients = call(*(operands[name] for name in names), **options)
    named = dict(zip(wanted.names, gradients, strict=True))
    return Found(losses, lse, Gradients(*(named.get(field) for field in Gradients._fields)))


@functools.cache
def _per_shard(head: Head, wanted: Wanted, names: tuple[str, ...], batch_ndim: int) -> Callable[..., Any]:
    batch = [f"b{i}" for i in range(batch_ndim)]
    tokens = " ".join(["...", *batch])
    terms = {
        "x": f"{tokens} h",
        "kernel": f"... {head.kernel_dimensions}",
        "bias": "... v",
        "accumulator": f"... {head.kernel_dimensions}",
    }
    results = [tokens, tokens, *(terms[name] for name in wanted.names)]

    @sharding.per_shard(
        f"{', '.join(terms.get(name, tokens) for name in names)} -> {', '.join(results)}",
        axes_of=(*batch, "v"),
        replicated=("h",),
    )
    def local(*operands: Array, axes: Mapping[str, Sequence[str]]) -> tuple[Array, ...]:
        token_axes = tuple(axis for factor in batch for axis in axes.get(factor, ()))
        run = functools.partial(_run_locally, head, wanted, token_axes, tuple(axes.get("v", ())))
        for _ in range(operands[0].ndim - batch_ndim - 1):
            run = jax.vmap(run)
        return run(dict(zip(names, operands, strict=True)))

    return local


def _run_locally(head: Head, wanted: Wanted, token_axes, vocab_axes, operands: dict[str, Array]) -> tuple[Array, ...]:
    """(losses, lse, *gradients) on one device's arrays, without more batch dimensions than x has."""
    x, kernel, accumulator = operands["x"], operands["kernel"], operands.get("accumulator")
    batch, axis, vocab = x.shape[:-1], head.vocab_axis, operands["kernel"].shape[head.vocab_axis]
    alone = not token_axes  # what devices have is not added up
    chunks = _Chunks(head, wanted, vocab_axes, kernel, operands.get("bias"), accumulator if alone else None, x.dtype)
    pieces = {
        name: operands[name].reshape(-1, *operands[name].shape[len(batch) :]) for name in _PER_TOKEN & set(operands)
    }

    tokens = math.prod(batch)
    rows = head.chunk_tokens or chunk_tokens(tokens, vocab + chunks.padding, x.dtype.itemsize, head.codec is not None)
    more = max(0, -(-tokens // rows) - 1)
    first = tokens - more * rows
    totals, per_token = chunks.step(
        _Totals(None, None, accumulator if chunks.in_place else None),
        {name: a[:first] for name, a in pieces.items()},
        first=True,
    )
    rest = {name: a[first:].reshape(more, rows, *a.shape[1:]) for name, a in pieces.items()}
    if more > _MOST_UNROLLED or (more and not wanted.names):
        totals, per_chunk = lax.scan(chunks.step, totals, rest)
        per_token = [
            jnp.concatenate([a, b.reshape(-1, *b.shape[2:])]) for a, b in zip(per_token, per_chunk, strict=True)
        ]
    elif more:
        each = [per_token]
        for i in range(more):
            piece = {name: a[i] for name, a in rest.items()}
            # Or XLA might compute the logits of all chunks first. What passes one barrier varies over the same axes.
            if wanted.x:
                piece["x"], each[-1][-1] = lax.optimization_barrier((piece["x"], each[-1][-1]))
            piece["x"], totals = lax.optimization_barrier((piece["x"], totals))
            totals, per_token = chunks.step(totals, piece)
            each.append(per_token)
        per_token = [jnp.concatenate(parts) for parts in zip(*each, strict=True)]
    if wanted.x:
        per_token[-1] = chunks.summed(per_token[-1])
    per_token = [a.reshape(*batch, *a.shape[1:]) for a in per_token]

    dkernel, dbias = (
        None if a is None else lax.slice_in_dim(a, 0, vocab, axis=along)
        for a, along in ((totals.kernel, axis), (totals.bias, 0))
    )
    if token_axes:
        dkernel, dbias = lax.psum((dkernel, dbias), token_axes)
    following = totals.accumulator
    if accumulator is not None and not chunks.in_place:
        assert dkernel is not None
        if head.layer.accumulate:
            following = (accumulator.astype(jnp.float32) + dkernel).astype(accumulator.dtype)
        else:  # the buffer is written over: an argument that is not mentioned at all would not be donated
            following = lax.dynamic_update_slice(accumulator, dkernel.astype(accumulator.dtype), (0, 0))
    gradients = {"x": per_token[-1], "kernel": dkernel, "bias": dbias, "accumulator": following}
    return *per_token[:2], *(gradients[name] for name in wanted.names)


_PER_TOKEN = {"x", "codes", "factor", "lse"}


def chunk_tokens(tokens: int, vocab: int, itemsize: int, in_fp8: bool) -> int:
    """The number of tokens in a chunk; the first one has what is left."""
    most = _CHUNK_BYTES * (1 + in_fp8) // (vocab * itemsize) // _CHUNK_MULTIPLE * _CHUNK_MULTIPLE
    count = -(-tokens // max(most, _LEAST_CHUNK))
    return max(1, tokens) if count <= 1 else -(-tokens // (count * _CHUNK_MULTIPLE)) * _CHUNK_MULTIPLE


class _Totals(NamedTuple):
    """Sums over chunks: of the gradients of kernel and bias, padded as `_Chunks` says, and the accumulator with that
    of kernel. None for none so far."""

    kernel: Any
    bias: Any
    accumulator: Any


# ------------------------------------------------------------------------------------------------------------ one chunk


class _Chunks:
    """Data that all chunks share: the kernel as products read it, and how a chunk is computed.

    `padding` columns of zeros follow the kernel, whose logits do not count. With `in_place` products add to the
    accumulator.
    """

    def __init__(
        self,
        head: Head,
        wanted: Wanted,
        vocab_axes,
        kernel: Array,
        bias: Array | None,
        accumulator: Array | None,
        dtype: Any,
    ):
        axis, vocab = head.vocab_axis, kernel.shape[head.vocab_axis]
        self.head, self.wanted, self.vocab_axes, self.dtype = head, wanted, vocab_axes, dtype
        self.padding = -vocab % _ALIGNMENT if dtype.itemsize == 2 or head.codec else 0
        self.in_place = accumulator is not None and not self.padding and accumulator.dtype == jnp.float32
        self.with_wgrad = wanted.kernel or wanted.accumulator
        # The whole vocabulary: Auto and Explicit axes split it, or those of vocab_axis.
        self.vocab = vocab * (lax.axis_size(vocab_axes) if vocab_axes else 1)
        self.links = observe.links_of([kernel] if head.codec else [])
        kernel, bias = kernel.astype(dtype), None if bias is None else bias.astype(dtype)
        if self.padding:
            kernel = jnp.pad(kernel, [(0, self.padding if i == axis else 0) for i in range(2)])
            bias = None if bias is None else jnp.pad(bias, (0, self.padding))
        self.kernel, self.bias = kernel, bias
        self.kernel8: Any = None
        if self._in_fp8("forward") or self._in_fp8("dgrad"):
            self.kernel8 = self._quantized("kernel", kernel, self._in_fp8("forward"), self._in_fp8("dgrad"))

    def _quantized(self, role: Role, x: Array, first_copy: bool, second_copy: bool) -> QuantizedArray:
        layer, codec = self.head.layer, self.head.codec
        assert codec is not None
        with layer.observed_for(self.links):
            return layer.quantized(codec, role, x, None, first_copy=first_copy, second_copy=second_copy).array

    def _in_fp8(self, product: Any) -> bool:
        """Whether a product is computed, and in FP8."""
        return self.head.in_fp8(product) and {"dgrad": self.wanted.x, "wgrad": self.with_wgrad}.get(product, True)

    @property
    def _compares(self) -> bool:
        request = observe.requested()
        return request is not None and request.results

    def _compared(self, product: Product, value: Array, plain: Callable[[], Array]) -> Array:
        """The result of a product in FP8, with its errors where they are asked for."""
        return compared(product, "linear_cross_entropy", value, plain(), self.links, 1) if self._compares else value

    def step(self, totals: _Totals, piece: dict[str, Array], *, first: bool = False):
        """Totals with those of a chunk, and for its tokens [losses, lse], and dx where it is asked for."""
        head, loss, codes, lse = self.head, self.head.loss, piece["codes"], piece.get("lse")
        x = jnp.where(codes[:, None] == IGNORED, jnp.zeros((), self.dtype), piece["x"])  # 0 · NaN would reach dkernel
        logits = self._logits(x)
        if not self.wanted.names:
            return totals, self._losses(codes, self._statistics(logits, codes))
        columns = _cross_entropy.local_codes(codes, self._local_vocab, self.vocab_axes) if self.vocab_axes else codes
        attributes: Any = loss.gradient_attributes(self.vocab) | {"softcap": loss.softcap, "padding": self.padding}
        weight = where_counted(codes, piece["factor"])
        statistics, dlogits8 = None, None
        if lse is None and head.codec is None and not self.vocab_axes:
            with_total = loss.label_smoothing > 0.0
            *statistics, dlogits = _cross_entropy.statistics_and_gradient(
                logits, codes, weight, with_total=with_total, **attributes
            )
            losses = self._losses(codes, statistics)
        else:
            if lse is None:
                statistics = self._statistics(logits, codes)
                lse = statistics[0]
            dlogits, dlogits8 = self._gradient(logits, columns, lse, weight, attributes)
            losses = [lse, lse] if statistics is None else self._losses(codes, statistics)
        dx, totals = self._products(totals, x, dlogits, dlogits8, first)
        return totals, [*losses, *([dx] if self.wanted.x else [])]

    def summed(self, dx: Array) -> Array:
        """dx of all shards of the vocabulary. Inside shard_map JAX, or the user, adds up."""
        return lax.psum(dx, self.vocab_axes) if self.vocab_axes and not self.head.loss.vocab_axis else dx

    def _gradient(self, logits: Array, columns: Array, lse: Array, weight: Array, attributes: dict[str, Any]):
        """The gradient of the logits, as it is and in FP8, as far as products read it."""
        head, wanted, codec = self.head, self.wanted, self.head.codec
        if codec is None:
            return _cross_entropy.logits_gradient(logits, columns, lse, weight, axes={}, **attributes)[0], None
        for_dgrad, for_wgrad = self._in_fp8("dgrad"), self._in_fp8("wgrad")
        copies: Any = "both" if for_dgrad and for_wgrad else "data" if for_dgrad else "transposed"
        as_it_is = self.links or wanted.bias or for_dgrad != wanted.x or for_wgrad != self.with_wgrad
        quantization = codec.quantization("gradient", head.layer.kernel_contracting)
        request = Request(quantization, 1, copies, (), (), with_amax=False, with_dbias=False)
        if not as_it_is and head.by_kernels and shared_facts(request).in_blocks:
            return None, _cross_entropy.quantized_gradient(logits, columns, lse, weight, request, **attributes)
        (plain,) = _cross_entropy.logits_gradient(
            logits, columns, lse, weight, axes={}, use_native=head.by_kernels, **attributes
        )
        if not (for_dgrad or for_wgrad):
            return plain, None
        return plain, self._quantized("gradient", plain, for_dgrad, for_wgrad)

    @property
    def _local_vocab(self) -> int:
        return self.kernel.shape[self.head.vocab_axis] - self.padding

    def _logits(self, x: Array) -> Array:
        head = self.head
        if head.in_fp8("forward"):
            x8 = self._quantized("activation", x, True, False)
            logits = head.layer.gemm("forward", x8, self.kernel8, bias=self.bias, out_dtype=self.dtype)
            return self._compared("forward", logits, functools.partial(self._plain_logits, x))
        return self._plain_logits(x)

    def _plain_logits(self, x: Array) -> Array:
        logits = _dot(x, self.kernel, (1, 1 - self.head.vocab_axis), self.dtype)
        return logits if self.bias is None else logits + self.bias[None, :]

    def _statistics(self, logits: Array, codes: Array) -> tuple[Array, ...]:
        return _cross_entropy.row_statistics(
            logits,
            codes,
            with_total=self.head.loss.label_smoothing > 0.0,
            softcap=self.head.loss.softcap,
            padding=self.padding,
            use_native=self.head.by_kernels,
            axes={"v": self.vocab_axes} if self.vocab_axes else {},
        )

    def _losses(self, codes: Array, statistics: Sequence[Array]) -> list[Array]:
        return [self.head.loss.of_rows(codes, statistics, self.vocab), statistics[0]]

    def _products(self, totals: _Totals, x: Array, dlogits: Any, dlogits8: Any, first: bool):
        """dx of a chunk, and the totals."""
        head, dx, dbias = self.head, None, None
        if self.wanted.bias:
            dbias = jnp.sum(dlogits, axis=0, dtype=jnp.float32) + (0.0 if first else totals.bias)
        if self.wanted.x:
            plain = functools.partial(_dot, dlogits, self.kernel, (1, head.vocab_axis), self.dtype)
            if head.in_fp8("dgrad"):
                dx = head.layer.gemm("dgrad", dlogits8, self.kernel8, out_dtype=self.dtype)
                dx = self._compared("dgrad", dx, plain)
            else:
                dx = plain()
        return dx, _Totals(None, dbias, None)._replace(**self._wgrads(totals, x, dlogits, dlogits8, first))

    def _wgrads(self, totals: _Totals, x: Array, dlogits: Any, dlogits8: Any, first: bool) -> dict[str, Array]:
        """The next sums of kernel and accumulator, as far as they are computed here."""
        head = self.head
        if not self.with_wgrad:
            return {}
        order = 1 if head.vocab_axis else -1
        read = (self._quantized("activation", x, False, True), dlogits8) if head.in_fp8("wgrad") else (x, dlogits)
        product = functools.partial(head.layer.gemm, "wgrad", *read[::order])
        sums = {}
        if self.wanted.kernel or not self.in_place:
            if self._compares and head.in_fp8("wgrad"):
                plain = functools.partial(_dot, *(x, dlogits)[::order], (0, 0), jnp.dtype(jnp.float32))
                alone = self._compared("wgrad", product(out_dtype=jnp.float32), plain)
                sums["kernel"] = alone if totals.kernel is None else totals.kernel + alone
            else:
                sums["kernel"] = product(out_dtype=jnp.float32, accumulator=totals.kernel)
        if self.in_place:
            accumulate = head.layer.accumulate or not first
            sums["accumulator"] = product(out_dtype=jnp.float32, accumulator=totals.accumulator, accumulate=accumulate)
        return sums


def _dot(lhs: Array, rhs: Array, contracting: tuple[int, int], dtype: Any) -> Array:
    dims = ((contracting[0],), (contracting[1],)), ((), ())
    return lax.dot_general(lhs, rhs, dims, preferred_element_type=dtype)
