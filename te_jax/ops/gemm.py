"""Matrix products of FP8 arrays with scales, or of plain ones, with what follows them in the same pass."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from te_jax import native, reference, sharding
from te_jax._core.arguments import as_dtype, as_flag
from te_jax._core.types import BLOCK, FLOAT_NAMES, FLOATS, FP8, FP8_ALIGNMENT
from te_jax.ops._gemm_product import (
    Followup,
    Product,
    allowed_dtype,
    autotunes,
    factors_kept_whole,
    follow_up,
    multiply,
    split_followup,
)
from te_jax.ops._gemm_product import Scaling as ProductScaling
from te_jax.ops._operands import as_array, validate_copy, validate_quantization
from te_jax.quantized import QuantizedArray
from te_jax.recipe import Quantization, Scaling

Contracting = Literal["cols", "rows"]

# What the scaling of lhs says of both operands.
_OF_PRODUCT: dict[Scaling | None, ProductScaling] = {
    None: "none",
    "tensor": "tensor",
    "row": "row",
    "block_1x128": "block",
}


@dataclasses.dataclass(frozen=True)
class _Options:
    """The static arguments, together: hashable, so that a product is traced once."""

    lhs_contracting: Contracting
    rhs_contracting: Contracting
    contracting_ndim: int
    activation: Literal["gelu"] | None
    save_preactivation: bool
    out_dtype: np.dtype
    out_quantization: Quantization | None
    accumulate: bool
    fast_accumulation: bool
    autotune: bool
    own_kernel: bool


@dataclasses.dataclass(frozen=True)
class _Operand:
    """The copy of an argument that the product reads.

    Attributes:
      array: its values.
      scale_inv: their scales; None for plain arrays.
      scaling: None for plain arrays.
      outer, summed: sizes of its outer and of its summed dimensions, in their order.
    """

    array: Array
    scale_inv: Array | None
    scaling: Scaling | None
    outer: tuple[int, ...]
    summed: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype


# fmt: off
@overload
def gemm(
    lhs: QuantizedArray | jax.typing.ArrayLike, rhs: QuantizedArray | jax.typing.ArrayLike, *,
    lhs_contracting: Contracting = "cols", rhs_contracting: Contracting = "rows", contracting_ndim: int | None = None,
    bias: jax.typing.ArrayLike | None = None, activation: Literal["gelu"] | None = None,
    save_preactivation: Literal[False] = False, gelu_preactivation: jax.typing.ArrayLike | None = None,
    out_dtype: jax.typing.DTypeLike | None = None, out_quantization: None = None,
    out_amax: jax.typing.ArrayLike | None = None, accumulator: jax.typing.ArrayLike | None = None,
    accumulate: bool = True, fast_accumulation: bool = False, autotune: bool = True, own_kernel: bool = False,
    implementation: native.Implementation | None = None,
) -> Array: ...
@overload
def gemm(
    lhs: QuantizedArray | jax.typing.ArrayLike, rhs: QuantizedArray | jax.typing.ArrayLike, *,
    lhs_contracting: Contracting = "cols", rhs_contracting: Contracting = "rows", contracting_ndim: int | None = None,
    bias: jax.typing.ArrayLike | None = None, activation: Literal["gelu"] | None = None,
    save_preactivation: bool = False, gelu_preactivation: jax.typing.ArrayLike | None = None,
    out_dtype: jax.typing.DTypeLike | None = None, out_quantization: Quantization | None = None,
    out_amax: jax.typing.ArrayLike | None = None, accumulator: jax.typing.ArrayLike | None = None,
    accumulate: bool = True, fast_accumulation: bool = False, autotune: bool = True, own_kernel: bool = False,
    implementation: native.Implementation | None = None,
) -> Any: ...
# fmt: on
def gemm(
    lhs: QuantizedArray | jax.typing.ArrayLike,
    rhs: QuantizedArray | jax.typing.ArrayLike,
    *,
    lhs_contracting: Contracting = "cols",
    rhs_contracting: Contracting = "rows",
    contracting_ndim: int | None = None,
    bias: jax.typing.ArrayLike | None = None,
    activation: Literal["gelu"] | None = None,
    save_preactivation: bool = False,
    gelu_preactivation: jax.typing.ArrayLike | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    out_quantization: Quantization | None = None,
    out_amax: jax.typing.ArrayLike | None = None,
    accumulator: jax.typing.ArrayLike | None = None,
    accumulate: bool = True,
    fast_accumulation: bool = False,
    autotune: bool = True,
    own_kernel: bool = False,
    implementation: native.Implementation | None = None,
) -> Any:
    r"""The product of two matrices whose dimensions are groups of dimensions, summed over rows or cols of either.

    With A = lhs, or its transpose for lhs_contracting="rows", as a matrix [M, K], and B = rhs, or its transpose for
    rhs_contracting="cols", as a matrix [K, N]:

        D = gelu(A B + bias)                 gelu(x) = 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³)))
        D = A B · gelu'(gelu_preactivation)
        D = accumulator + A B

    each part where it is asked for. FP8 operands stand for FP8 value × scale; products are exact and are added up
    in float32, and D is rounded once where the kernel does all of it. Sharded operands are multiplied where they are: a
    contraction that is split over devices ends in one all-reduce of the result, in its dtype. The native kernel has no
    derivative with respect to operands and accumulator; `te_jax.ops.dense` defines those of products.

    Args:
      lhs: [*rows, *cols], a QuantizedArray, or float32, bfloat16 or float16.
      rhs: [*rows, *cols], of the same kind: quantized with the same scaling, or of the same dtype. With blocks, lhs
        must have scales for 1 × 128 and rhs for 128 × 128 values. E5M2 times E5M2 does not exist.
      lhs_contracting: "cols" sums over the cols of lhs (its `data`), "rows" over its rows (its `transposed` copy).
      rhs_contracting: "rows" sums over the rows of rhs (its `transposed` copy), "cols" over its cols (its `data`).
      contracting_ndim: how many dimensions of plain arrays are summed over: the last ones for "cols", the first ones
        for "rows"; None is 1. Quantized arrays know.
      bias: [*N], float32, bfloat16 or float16.
      activation: "gelu" or None.
      save_preactivation: also return A B + bias, in `out_dtype`.
      gelu_preactivation: [*M, *N], float32, bfloat16 or float16: multiplies the result by the derivative of gelu there.
      out_dtype: float32, bfloat16 or float16. None is the accumulator's, or that of both operands (of a QuantizedArray,
        the dtype that it stands for).
      out_quantization: returns D in FP8, with one scale for all of it, which follows from `out_amax`.
      out_amax: float32 scalar, the magnitude that the scale maps to the largest FP8 value.
      accumulator: [*M, *N], float32, bfloat16 or float16: D is written over it where it is donated or an intermediate.
        It goes with none of bias, activation, gelu_preactivation and out_quantization.
      accumulate: False overwrites the accumulator's buffer without reading it.
      fast_accumulation: sums may stay in FP8 tensor cores (about 14 bits of mantissa) instead of being added up in
        float32 every 128 values. Blocks, and plain arrays, are always added up in float32.
      autotune: on a GPU, times cuBLASLt's candidates, and for FP8 without activation or FP8 result the kernel that
        blocks use, once in a process for each kind of product; devices of one kind agree on the fastest. False, or
        TE_JAX_AUTOTUNE=0 in the environment, takes cuBLASLt's first suggestion, which is the same in every process, for
        bits that are. Each candidate adds up in a fixed order.
      own_kernel: on a GPU, multiplies operands with one scale each, or one for each row, by the kernel that blocks use,
        untimed.
      implementation: None takes the native kernel where there is one, else the reference; "native" or "reference"
        never fall back.

    Returns:
      D [*M, *N]. With save_preactivation (D, preactivation). With out_quantization (D, amax), D a QuantizedArray
      without transposed copy and amax the float32 scalar max |D| before scaling, or (D, amax, preactivation). Inside
      `shard_map` D is the product of the local operands: psum it where the contraction is split, and pmax amax.

    Raises:
      ValueError: for shapes, dtypes, scalings or combinations that break a rule above, naming the argument.
      NotImplementedError: where a gradient comes through the native kernel.
      te_jax.native.NativeUnavailableError: for implementation="native" where it cannot run.

    References:
      Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433. DeepSeek-V3, arXiv:2412.19437, section 3.3.
    """
    lhs, rhs = (x if isinstance(x, QuantizedArray) else as_array(name, x) for name, x in (("lhs", lhs), ("rhs", rhs)))
    bias, gelu_preactivation, out_amax, accumulator = (
        None if x is None else as_array(name, x)
        for name, x in (
            ("bias", bias),
            ("gelu_preactivation", gelu_preactivation),
            ("out_amax", out_amax),
            ("accumulator", accumulator),
        )
    )
    a, b = _operands(lhs, rhs, lhs_contracting, rhs_contracting, contracting_ndim)
    _validate_operands(a, b)
    if out_dtype is None and accumulator is None and lhs.dtype != rhs.dtype:
        raise ValueError(f"lhs stands for {lhs.dtype} and rhs for {rhs.dtype}; give the out_dtype of their product")
    if out_dtype is None:
        out_dtype = lhs.dtype if accumulator is None else accumulator.dtype
    options = _Options(
        lhs_contracting,
        rhs_contracting,
        len(a.summed),
        activation,
        as_flag("save_preactivation", save_preactivation),
        as_dtype("out_dtype is", out_dtype, FLOATS, f"{FLOAT_NAMES}; for FP8 give out_quantization"),
        out_quantization,
        as_flag("accumulate", accumulate),
        as_flag("fast_accumulation", fast_accumulation),
        as_flag("autotune", autotune) and autotunes(),
        as_flag("own_kernel", own_kernel),
    )
    _validate_result(a, b, options, bias, gelu_preactivation, out_amax, accumulator)
    problem = unsupported(a.scaling, options.own_kernel)
    problem = problem and f"{problem}; use implementation='reference', or do not quantize"
    # Nothing to multiply is nothing for a kernel.
    use_native = native.use_native(implementation, problem) and 0 not in (*a.outer, *a.summed, *b.outer)
    return _gemm(lhs, rhs, bias, gelu_preactivation, out_amax, accumulator, options, use_native)


# Under jit even when called eagerly: sharded operands are then partitioned rather than gathered.
@functools.partial(jax.jit, static_argnums=(6, 7), inline=sharding.INLINE)
def _gemm(lhs, rhs, bias, gelu_preactivation, out_amax, accumulator, options: _Options, use_native: bool):
    if use_native or sharding.is_explicit(lhs, rhs):
        return _sharded_gemm(lhs, rhs, bias, gelu_preactivation, out_amax, accumulator, options, use_native)
    return reference.gemm(
        lhs,
        rhs,
        lhs_contracting=options.lhs_contracting,
        rhs_contracting=options.rhs_contracting,
        contracting_ndim=options.contracting_ndim,
        bias=bias,
        activation=options.activation,
        save_preactivation=options.save_preactivation,
        gelu_preactivation=gelu_preactivation,
        out_dtype=options.out_dtype,
        out_quantization=options.out_quantization,
        out_amax=out_amax,
        accumulator=accumulator,
        accumulate=options.accumulate,
    )


def _sharded_gemm(lhs, rhs, bias, gelu_preactivation, out_amax, accumulator, options: _Options, use_native: bool):
    a = _operand("lhs", lhs, options.lhs_contracting, options.contracting_ndim)
    b = _operand("rhs", rhs, options.rhs_contracting, options.contracting_ndim)
    fp8 = a.scaling is not None
    scaling = _OF_PRODUCT[a.scaling]
    dtype = options.out_dtype if fp8 else allowed_dtype(a.dtype, options.out_dtype)
    if not use_native:
        dtype = np.promote_types(np.float32, np.float32 if fp8 else a.dtype)
    fits = use_native and dtype == options.out_dtype
    wanted = Followup(
        bias=bias is not None,
        activation="dgelu" if gelu_preactivation is not None else options.activation,
        save_preactivation=options.save_preactivation,
        quantization=options.out_quantization,
        accumulate=accumulator is not None and options.accumulate,
    )
    product = Product(
        a_outer_ndim=len(a.outer),
        b_outer_ndim=len(b.outer),
        summed_ndim=len(a.summed),
        a_summed_first=not fp8 and options.lhs_contracting == "rows",
        b_summed_first=not fp8 and options.rhs_contracting == "rows",
        scaling=scaling,
        dtype=dtype,
        native=use_native,
        followup=wanted,
        overwrite=accumulator is not None and not options.accumulate and fits,
        fast_accumulation=options.fast_accumulation and fp8,
        autotune=options.autotune,
        own_kernel=options.own_kernel and fp8,
        whole=factors_kept_whole(scaling, {"m": a.outer, "n": b.outer, "k": a.summed}),
    )
    if fits:
        fused, rest = split_followup(product, e5m2_operand=FP8[1] in (a.dtype, b.dtype))
    else:
        fused, rest = Followup(), wanted
    arrays = {
        "a": a.array,
        "b": b.array,
        "a_scale_inv": a.scale_inv,
        "b_scale_inv": b.scale_inv,
        "bias": bias,
        "accumulator": accumulator,
        "aux_in": gelu_preactivation,
        "amax_in": out_amax,
    }
    d, *others = multiply(dataclasses.replace(product, followup=fused), arrays)
    if rest != Followup() or not fits:
        d, *more = follow_up(d, rest, arrays, options.out_dtype, len(a.outer))
        others += more
    if options.out_quantization is None:
        return (d, *others) if others else d
    *preactivation, amax, scale_inv = others
    quantized = QuantizedArray(
        d,
        scale_inv,
        None,
        None,
        row_ndim=len(a.outer),
        col_ndim=len(b.outer),
        scaling="tensor",
        transposed_scaling=options.out_quantization.transposed_scaling,
        dtype=options.out_dtype,
    )
    return (quantized, amax, *preactivation)


def unsupported(scaling: Scaling | None, own_kernel: bool = False) -> str | None:
    """Why the default backend's device cannot multiply FP8 with this scaling, if so."""
    capability = native.compute_capability()
    if scaling is None or capability is None:
        return None
    if scaling == "tensor" and not own_kernel:
        needed, what = (8, 9), "FP8 products need"
    else:
        needed, what = (9, 0), f"FP8 products with {scaling!r} scaling need"
    if capability >= needed and (needed == (8, 9) or capability[0] == 9):
        return None
    have = f"this GPU has {capability[0]}.{capability[1]}"
    exact = " exactly" if needed == (9, 0) else " or later"
    return f"{what} CUDA compute capability {needed[0]}.{needed[1]}{exact}, and {have}"


def _operands(lhs, rhs, lhs_contracting, rhs_contracting, contracting_ndim) -> tuple[_Operand, _Operand]:
    if isinstance(lhs, QuantizedArray) != isinstance(rhs, QuantizedArray):
        plain = "rhs" if isinstance(lhs, QuantizedArray) else "lhs"
        raise ValueError(f"{plain} is a plain array and the other operand quantized; quantize both or neither")
    if contracting_ndim is not None:
        integer = isinstance(contracting_ndim, numbers.Integral) and not isinstance(contracting_ndim, bool)
        if not integer or contracting_ndim < 0:
            raise ValueError(f"contracting_ndim is {contracting_ndim!r}; it must be an integer of at least 0, or None")
        contracting_ndim = int(contracting_ndim)
    a = _operand("lhs", lhs, lhs_contracting, contracting_ndim)
    b = _operand("rhs", rhs, rhs_contracting, contracting_ndim)
    return a, b


def _operand(name: str, x: QuantizedArray | Array, contracting: Contracting, contracting_ndim: int | None) -> _Operand:
    if contracting not in ("cols", "rows"):
        raise ValueError(f"{name}_contracting is {contracting!r}; it must be 'cols' or 'rows'")
    over_cols = contracting == "cols"
    if not isinstance(x, QuantizedArray):
        if x.dtype not in FLOATS:
            raise ValueError(
                f"{name} has dtype {x.dtype}; it must be a QuantizedArray, {FLOAT_NAMES}: quantize it or cast it"
            )
        summed_ndim = 1 if contracting_ndim is None else contracting_ndim
        if x.ndim < summed_ndim:
            raise ValueError(f"{name} has shape {x.shape}; a product over {summed_ndim} dimensions needs as many")
        first = x.ndim - summed_ndim if over_cols else summed_ndim
        rows, cols = x.shape[:first], x.shape[first:]
        return _Operand(x, None, None, *((rows, cols) if over_cols else (cols, rows)))

    data, scale_inv = (x.data, x.scale_inv) if over_cols else (x.transposed, x.transposed_scale_inv)
    if data is None:
        copy = "data" if over_cols else "transposed"
        raise ValueError(
            f"{name} has no {copy} copy, which {name}_contracting={contracting!r} reads; "
            f"quantize it with copies='both' or '{copy}'"
        )
    outer_ndim, summed_ndim = (x.row_ndim, x.col_ndim) if over_cols else (x.col_ndim, x.row_ndim)
    validate_copy(name, x, "data" if over_cols else "transposed")
    if contracting_ndim not in (None, summed_ndim):
        raise ValueError(
            f"contracting_ndim is {contracting_ndim}, but {name} was quantized for {summed_ndim} summed dimensions"
        )
    scaling = x.scaling if over_cols else x.transposed_scaling
    return _Operand(data, scale_inv, scaling, data.shape[:outer_ndim], data.shape[outer_ndim:])


def _validate_operands(a: _Operand, b: _Operand) -> None:
    if a.summed != b.summed:
        raise ValueError(
            f"rhs sums over dimensions of sizes {b.summed}, but lhs over {a.summed}; they must be the same, in the "
            "same order (see lhs_contracting and rhs_contracting)"
        )
    if a.scaling is None or b.scaling is None:
        if a.dtype != b.dtype:
            raise ValueError(f"rhs has dtype {b.dtype} and lhs {a.dtype}; cast one of them")
        return
    if a.dtype == b.dtype == FP8[1]:
        raise ValueError(
            "lhs and rhs are both float8_e5m2, which no GPU multiplies; quantize one of them to float8_e4m3fn"
        )
    blocks = ("block_1x128", "block_128x128")
    if (a.scaling, b.scaling) != blocks:
        if a.scaling in blocks or b.scaling in blocks:
            raise ValueError(
                f"lhs has {a.scaling!r} scales and rhs {b.scaling!r}; a product of blocks needs 'block_1x128' on lhs "
                "and 'block_128x128' on rhs: quantize them so, or exchange them and transpose the result"
            )
        if a.scaling != b.scaling:
            raise ValueError(f"rhs has {b.scaling!r} scales and lhs {a.scaling!r}; both must have the same kind")
    else:
        _validate_blocks("lhs", "sums over", a.summed)
        _validate_blocks("rhs", "keeps", b.outer)
    if (n := math.prod(b.outer)) % FP8_ALIGNMENT:
        raise ValueError(
            f"rhs has {n} outer values; FP8 products need a multiple of {FP8_ALIGNMENT}: pad rhs and slice the result, "
            "or do not quantize"
        )


def _validate_blocks(name: str, verb: str, sizes: tuple[int, ...]) -> None:
    if len(sizes) > 1 and sizes[-1] % BLOCK:
        raise ValueError(
            f"{name} {verb} dimensions of sizes {sizes}; with blocks the last of several must be a multiple of "
            f"{BLOCK}: collapse them into one before quantizing"
        )


def _validate_result(a: _Operand, b: _Operand, options: _Options, bias, gelu_preactivation, out_amax, accumulator):
    shape = (*a.outer, *b.outer)
    for name, array, expected in (
        ("bias", bias, b.outer),
        ("gelu_preactivation", gelu_preactivation, shape),
        ("accumulator", accumulator, shape),
    ):
        if array is None:
            continue
        if array.shape != expected:
            raise ValueError(f"{name} has shape {array.shape}; for a result of shape {shape} it must have {expected}")
        if array.dtype not in FLOATS:
            raise ValueError(f"{name} has dtype {array.dtype}; it must be {FLOAT_NAMES}")
    if options.activation not in (None, "gelu"):
        raise ValueError(f"activation is {options.activation!r}; it must be None or 'gelu': apply others to the result")
    if options.save_preactivation and options.activation is None:
        raise ValueError("save_preactivation is True without an activation; the result itself is the preactivation")
    if gelu_preactivation is not None and (options.activation is not None or bias is not None):
        raise ValueError("gelu_preactivation is for gradients; it goes with neither activation nor bias")
    if options.out_quantization is not None:
        validate_quantization("out_quantization", options.out_quantization)
        if options.out_quantization.scaling != "tensor":
            raise ValueError(
                f"out_quantization has {options.out_quantization.scaling!r} scaling; an FP8 result has one scale, "
                "'tensor': quantize the result afterwards for others"
            )
        if out_amax is None:
            raise ValueError(
                "out_quantization needs out_amax, from which the scale follows; te_jax.recipe keeps its history"
            )
    if out_amax is not None:
        if options.out_quantization is None:
            raise ValueError("out_amax is given without out_quantization; it says nothing then")
        if out_amax.shape != () or out_amax.dtype != jnp.float32:
            raise ValueError(f"out_amax is {out_amax.dtype}{list(out_amax.shape)}; it must be a float32 scalar")
    if accumulator is None:
        return
    if accumulator.dtype != options.out_dtype:
        raise ValueError(
            f"accumulator has dtype {accumulator.dtype} and out_dtype is {options.out_dtype}; they must be the same"
        )
    for name, value in (
        ("bias", bias),
        ("activation", options.activation),
        ("gelu_preactivation", gelu_preactivation),
        ("out_quantization", options.out_quantization),
    ):
        if value is not None:
            raise ValueError(
                f"accumulator is given together with {name}; a product is either accumulated or followed up"
            )
