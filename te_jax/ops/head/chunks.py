"""An output head and what is computed from its logits, a chunk of tokens at a time, with the gradients asked for."""

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
from te_jax.ops._cross_entropy import IGNORED
from te_jax.ops._quantize_kernels import Request, shared_facts
from te_jax.ops.head.rows import Head, LogitsGradient
from te_jax.ops.linear.accumulator import validate_accumulated
from te_jax.ops.linear.compared import compared
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


# ----------------------------------------------------------------------------------------------------------- all chunks


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Which gradients are asked for: that of the kernel by itself, added to the accumulator, or both."""

    x: bool = False
    kernel: bool = False
    bias: bool = False
    accumulator: bool = False
    rows: bool = False
    """The derivatives by `Rows.derived`, which come with any gradient."""

    @classmethod
    def of(cls, x: Any, kernel: Any, bias: Any, accumulator: Any, rows: Any) -> Wanted:
        """From operands as custom_vjp hands them over with symbolic_zeros."""
        if accumulator is not None:
            validate_accumulated(kernel.perturbed, accumulator.perturbed)
        return cls(
            x=x.perturbed,
            kernel=kernel.perturbed and accumulator is None,
            bias=bias is not None and bias.perturbed,
            accumulator=accumulator is not None and accumulator.perturbed,
            rows=any(each.perturbed for name, each in rows.items() if name != "factor"),
        )

    def as_shapes(self) -> list[Array]:
        """As residuals, whose structure must not depend on it."""
        return [jnp.zeros((flag,), bool) for flag in dataclasses.astuple(self)]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in Gradients._fields if getattr(self, name))

    @property
    def anything(self) -> bool:
        return any(dataclasses.astuple(self))


class Gradients(NamedTuple):
    """None for what is not asked for; that of kernel is float32."""

    x: Array | None
    kernel: Array | None
    bias: Array | None
    accumulator: Array | None


class Found(NamedTuple):
    """Attributes:
    values: of `Rows.values`.
    of_rows: derivatives by `Rows.derived`, where anything is differentiated.
    gradients: those that are asked for.
    """

    values: tuple[Array, Array]
    of_rows: dict[str, Array]
    gradients: Gradients


def run(head: Head, wanted: Wanted, x, kernel, bias, accumulator, rows: Mapping[str, Array]) -> Found:
    """What the rows of logits give, and the gradients of Σ factor · the first number.

    Args:
      head: the static arguments.
      wanted: which gradients.
      x, kernel, bias, accumulator: as in `linear_cross_entropy`.
      rows: operands of each token [*batch, ...] by name, with `codes` and, where something is differentiated, `factor`;
        `fixed_kernel` is that of another head, split as kernel is.
    """
    operands = {
        "x": x,
        "kernel": kernel,
        "bias": bias,
        "accumulator": accumulator if wanted.accumulator else None,
        **{name: a for name, a in rows.items() if name != "factor" or wanted.anything},
    }
    names = tuple(name for name, a in operands.items() if a is not None)
    call: Any = _per_shard(head, wanted, names, x.ndim - 1)
    vocab_axis = head.rows.vocab_axis
    if observe.requested() is not None and head.codec is not None and not vocab_axis:
        call = call.observable
    options = {"axes": {"v": vocab_axis}} if vocab_axis else {}
    first, second, *others = call(*(operands[name] for name in names), **options)
    derived = head.rows.derived if wanted.anything else ()
    named = dict(zip((*derived, *wanted.names), others, strict=True))
    gradients = Gradients(*(named.get(field) for field in Gradients._fields))
    return Found((first, second), {name: named[name] for name in derived}, gradients)


@functools.cache
def _per_shard(head: Head, wanted: Wanted, names: tuple[str, ...], batch_ndim: int) -> Callable[..., Any]:
    batch = [f"b{i}" for i in range(batch_ndim)]
    tokens = " ".join(["...", *batch])
    terms = {
        "x": f"{tokens} h",
        "kernel": f"... {head.kernel_dimensions}",
        "bias": "... v",
        "accumulator": f"... {head.kernel_dimensions}",
        "fixed_x": f"{tokens} g",
        "fixed_kernel": f"... {head.kernel_dimensions.replace('h', 'g')}",
    }
    derived = [tokens] * len(head.rows.derived if wanted.anything else ())
    results = [tokens, tokens, *derived, *(terms[name] for name in wanted.names)]

    @sharding.per_shard(
        f"{', '.join(terms.get(name, tokens) for name in names)} -> {', '.join(results)}",
        axes_of=(*batch, "v"),
        replicated=("h", *("g" for name in names if name == "fixed_x")),
    )
    def local(*operands: Array, axes: Mapping[str, Sequence[str]]) -> tuple[Array, ...]:
        token_axes = tuple(axis for factor in batch for axis in axes.get(factor, ()))
        run = functools.partial(_run_locally, head, wanted, token_axes, tuple(axes.get("v", ())))
        for _ in range(operands[0].ndim - batch_ndim - 1):
            run = jax.vmap(run)
        return run(dict(zip(names, operands, strict=True)))

    return local


def _run_locally(head: Head, wanted: Wanted, token_axes, vocab_axes, operands: dict[str, Array]) -> tuple[Array, ...]:
    """What `run` returns, on one device's arrays, without more batch dimensions than x has."""
    x, accumulator = operands["x"], operands.get("accumulator")
    batch, axis, vocab = x.shape[:-1], head.vocab_axis, operands["kernel"].shape[head.vocab_axis]
    alone = not token_axes  # what devices have is not added up
    chunks = HeadChunks(head, wanted, vocab_axes, operands, accumulator if alone else None)
    pieces = {name: a.reshape(-1, *a.shape[len(batch) :]) for name, a in operands.items() if name not in _OF_ALL_TOKENS}

    tokens = math.prod(batch)
    rows = head.chunk_tokens or chunk_tokens(
        tokens, head.rows.heads * (vocab + chunks.padding), x.dtype.itemsize, head.codec is not None
    )
    more = max(0, -(-tokens // rows) - 1)
    first = tokens - more * rows
    totals, per_token = chunks.step(
        _Totals(None, None, accumulator if chunks.in_place else None),
        {name: a[:first] for name, a in pieces.items()},
        first=True,
    )
    rest = {name: a[first:].reshape(more, rows, *a.shape[1:]) for name, a in pieces.items()}
    if more > _MOST_UNROLLED or (more and not wanted.anything):
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
    return *per_token[: len(per_token) - wanted.x], *(gradients[name] for name in wanted.names)


_OF_ALL_TOKENS = {"kernel", "bias", "accumulator", "fixed_kernel"}


def chunk_tokens(tokens: int, vocab: int, itemsize: int, in_fp8: bool) -> int:
    """The number of tokens in a chunk; the first one has what is left."""
    most = _CHUNK_BYTES * (1 + in_fp8) // (vocab * itemsize) // _CHUNK_MULTIPLE * _CHUNK_MULTIPLE
    count = -(-tokens // max(most, _LEAST_CHUNK))
    return max(1, tokens) if count <= 1 else -(-tokens // (count * _CHUNK_MULTIPLE)) * _CHUNK_MULTIPLE


class _Totals(NamedTuple):
    """Sums over chunks: of the gradients of kernel and bias, padded as `HeadChunks` says, and the accumulator with that
    of kernel. None for none so far."""

    kernel: Any
    bias: Any
    accumulator: Any


# ------------------------------------------------------------------------------------------------------------ one chunk


class HeadChunks:
    """Data that all chunks share: the kernel as products read it, and how a chunk is computed.

    `padding` columns of zeros follow the kernel, whose logits do not count. With `in_place` products add to the
    accumulator.
    """

    def __init__(
        self, head: Head, wanted: Wanted, vocab_axes, operands: Mapping[str, Array], accumulator: Array | None
    ):
        kernel, bias, dtype = operands["kernel"], operands.get("bias"), operands["x"].dtype
        axis, vocab = head.vocab_axis, kernel.shape[head.vocab_axis]
        self.head, self.wanted, self.vocab_axes, self.dtype = head, wanted, vocab_axes, dtype
        self.padding = -vocab % _ALIGNMENT if dtype.itemsize == 2 or head.codec else 0
        self.in_place = accumulator is not None and not self.padding and accumulator.dtype == jnp.float32
        self.with_wgrad = wanted.kernel or wanted.accumulator
        # The whole vocabulary: Auto and Explicit axes split it, or those of vocab_axis.
        self.vocab = vocab * (lax.axis_size(vocab_axes) if vocab_axes else 1)
        self.links = observe.links_of([kernel] if head.codec else [])
        self.kernel, self.bias = self._padded(kernel, axis), None if bias is None else self._padded(bias, 0)
        fixed = operands.get("fixed_kernel")
        self.fixed_kernel = None if fixed is None else self._padded(fixed, axis)
        self.kernel8: QuantizedArray | None = None
        if self._in_fp8("forward") or self._in_fp8("dgrad"):
            self.kernel8 = self._quantized("kernel", self.kernel, self._in_fp8("forward"), self._in_fp8("dgrad"))

    def _padded(self, a: Array, axis: int) -> Array:
        a = a.astype(self.dtype)
        return jnp.pad(a, [(0, self.padding if i == axis else 0) for i in range(a.ndim)]) if self.padding else a

    def _quantized(self, role: Role, x: Array, first_copy: bool, second_copy: bool) -> QuantizedArray:
        layer, codec = self.head.layer, self.head.codec
        assert codec is not None
        with layer.observed_for(self.links):
            return layer.quantized(codec, role, x, None, first_copy=first_copy, second_copy=second_copy).array

    def _in_fp8(self, product: Product) -> bool:
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
        """Totals with those of a chunk, and for its tokens what `run` returns, the last of it dx if it is asked for."""
        rows = self.head.rows
        x = jnp.where(piece["codes"][:, None] == IGNORED, jnp.zeros((), self.dtype), piece["x"])  # or dkernel: 0 · NaN
        logits = self._logits(x)
        if not self.wanted.anything:
            return totals, rows.values(self, logits, piece)
        values, gradient = rows.differentiated(self, logits, piece)
        dx, totals = self._products(totals, x, *gradient, first)
        return totals, [*values, *([dx] if self.wanted.x else [])]

    def summed(self, dx: Array) -> Array:
        """dx of all shards of the vocabulary. Inside shard_map JAX, or the user, adds up."""
        return lax.psum(dx, self.vocab_axes) if self.vocab_axes and not self.head.rows.vocab_axis else dx

    def gradient_of_labels(
        self, logits: Array, codes: Array, lse: Array, weight: Array, attributes: dict[str, float]
    ) -> LogitsGradient:
        """The gradient of Σ weight · loss."""
        head, codec = self.head, self.head.codec
        columns = _cross_entropy.local_codes(codes, self.local_vocab, self.vocab_axes) if self.vocab_axes else codes
        operands = logits, columns, lse, weight
        if codec is None:
            return LogitsGradient(
                _cross_entropy.logits_gradient(*operands, axes={}, use_native=head.by_kernels, **attributes)[0], None
            )
        for_dgrad, for_wgrad = self._in_fp8("dgrad"), self._in_fp8("wgrad")
        copies: Any = "both" if for_dgrad and for_wgrad else "data" if for_dgrad else "transposed"
        as_it_is = self.links or self.wanted.bias or for_dgrad != self.wanted.x or for_wgrad != self.with_wgrad
        quantization = codec.quantization("gradient", head.layer.kernel_contracting)
        request = Request(quantization, 1, copies, (), (), with_amax=False, with_dbias=False)
        if not as_it_is and head.by_kernels and shared_facts(request).in_blocks:
            return LogitsGradient(None, _cross_entropy.quantized_gradient(*operands, request, **attributes))
        (plain,) = _cross_entropy.logits_gradient(*operands, axes={}, use_native=head.by_kernels, **attributes)
        return self.quantized_gradient(plain)

    def quantized_gradient(self, plain: Array) -> LogitsGradient:
        """A gradient of the logits, as products read it."""
        for_dgrad, for_wgrad = self._in_fp8("dgrad"), self._in_fp8("wgrad")
        if not (for_dgrad or for_wgrad):
            return LogitsGradient(plain, None)
        return LogitsGradient(plain, self._quantized("gradient", plain, for_dgrad, for_wgrad))

    @property
    def local_vocab(self) -> int:
        return self.kernel.shape[self.head.vocab_axis] - self.padding

    def _logits(self, x: Array) -> Array:
        head = self.head
        if head.in_fp8("forward"):
            x8 = self._quantized("activation", x, True, False)
            logits = head.layer.gemm("forward", x8, self.kernel8, bias=self.bias, out_dtype=self.dtype)
            return self._compared("forward", logits, functools.partial(self._plain_logits, x))
        return self._plain_logits(x)

    def product(self, x: Array, kernel: Array) -> Array:
        """x · kernel, not in FP8."""
        return _dot(x, kernel, (1, 1 - self.head.vocab_axis), self.dtype)

    def _plain_logits(self, x: Array) -> Array:
        logits = self.product(x, self.kernel)
        return logits if self.bias is None else logits + self.bias[None, :]

    def statistics(self, logits: Array, codes: Array, softcap: float, *, with_total: bool = False) -> tuple[Array, ...]:
        """(lse, z[code], Σz) of each row, over all shards of the vocabulary."""
        return _cross_entropy.row_statistics(
            logits,
            codes,
            with_total=with_total,
            softcap=softcap,
            padding=self.padding,
            use_native=self.head.by_kernels,
            axes={"v": self.vocab_axes} if self.vocab_axes else {},
        )

    def _products(self, totals: _Totals, x: Array, dlogits: Any, dlogits8: QuantizedArray | None, first: bool):
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

    def _wgrads(self, totals: _Totals, x: Array, dlogits: Any, dlogits8: QuantizedArray | None, first: bool):
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


def _dot(lhs: Array, rhs: Array, contracting: tuple[int, int], dtype: jnp.dtype) -> Array:
    dims = ((contracting[0],), (contracting[1],)), ((), ())
    return lax.dot_general(lhs, rhs, dims, preferred_element_type=dtype)
