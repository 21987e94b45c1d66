"""Matrix products of FP8 arrays with scales, or of plain ones, with what follows them in the same pass."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple, overload

import jax
import numpy as np
from jax import Array

from te_jax import native, sharding
from te_jax._core.arguments import as_dtype, as_flag, is_whole_number
from te_jax._core.types import FLOAT_NAMES, FLOATS, FP8
from te_jax.ops._gemm_sum import sharded_sum
from te_jax.ops.gemm_product import (
    Algorithm,
    GemmSpec,
    algorithm_for,
    allowed_dtype,
    factors_kept_whole,
    gemm_by_xla,
    sharded_gemm,
)
from te_jax.ops.implementations import operands_implementation, unsupported
from te_jax.ops.operands import as_array, validate_copy
from te_jax.quantized import QuantizedArray, facts_of
from te_jax.recipe import Scaling
from te_jax.reference.gemm import GemmResult

__all__ = ["Algorithm", "GemmResult", "gemm", "gemm_sum"]

Contracting = Literal["cols", "rows"]
Operand = QuantizedArray | jax.typing.ArrayLike


class _Copy(NamedTuple):
    """The copy of an operand that the product reads.

    Attributes:
      values: FP8 or plain.
      scale_inv: None for plain values.
      scaling: None for plain values.
      outer, summed: sizes of its outer and of its summed dimensions.
    """

    values: Array
    scale_inv: Array | None
    scaling: Scaling | None
    outer: tuple[int, ...]
    summed: tuple[int, ...]


# fmt: off
@overload
def gemm(
    lhs: Operand, rhs: Operand, *, lhs_contracting: Contracting = "cols", rhs_contracting: Contracting = "rows",
    contracting_ndim: int | None = None, bias: jax.typing.ArrayLike | None = None,
    activation: Literal["gelu"] | None = None, save_preactivation: Literal[False] = False,
    out_dtype: jax.typing.DTypeLike | None = None, accumulator: jax.typing.ArrayLike | None = None,
    accumulate: bool = True, fast_accumulation: bool = False, algorithm: Algorithm = "auto",
    implementation: native.Implementation | None = None,
) -> Array: ...
@overload
def gemm(
    lhs: Operand, rhs: Operand, *, lhs_contracting: Contracting = "cols", rhs_contracting: Contracting = "rows",
    contracting_ndim: int | None = None, bias: jax.typing.ArrayLike | None = None,
    activation: Literal["gelu"] | None = None, save_preactivation: Literal[True],
    out_dtype: jax.typing.DTypeLike | None = None, accumulator: jax.typing.ArrayLike | None = None,
    accumulate: bool = True, fast_accumulation: bool = False, algorithm: Algorithm = "auto",
    implementation: native.Implementation | None = None,
) -> GemmResult: ...
# fmt: on
def gemm(
    lhs: Operand,
    rhs: Operand,
    *,
    lhs_contracting: Contracting = "cols",
    rhs_contracting: Contracting = "rows",
    contracting_ndim: int | None = None,
    bias: jax.typing.ArrayLike | None = None,
    activation: Literal["gelu"] | None = None,
    save_preactivation: bool = False,
    out_dtype: jax.typing.DTypeLike | None = None,
    accumulator: jax.typing.ArrayLike | None = None,
    accumulate: bool = True,
    fast_accumulation: bool = False,
    algorithm: Algorithm = "auto",
    implementation: native.Implementation | None = None,
) -> Array | GemmResult:
    r"""Multiplies two FP8 or two plain arrays as matrices; adds a bias, applies gelu, or accumulates.

    Let A [M, K] be lhs, or its transpose for lhs_contracting="rows", and B [K, N] be rhs, or its transpose for
    rhs_contracting="cols", each with its dimensions grouped into rows and cols. The result is one of

        D = A B + bias        D = gelu(A B + bias)        D = accumulator + A B

    with gelu(x) = 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))). An FP8 value stands for value × scale_inv. Sums are
    float32, and D is rounded once if one kernel computes all of it. Each device multiplies its shards; if devices split
    the contraction, they add up D by one all-reduce. The native kernel has no derivative: use `te_jax.ops.dense`.

    Args:
      lhs: [*rows, *cols], a QuantizedArray, or float32, bfloat16 or float16.
      rhs: the same kind as lhs. Block scaling needs 1×128 scales on lhs and 128×128 on rhs, or 1×32 on both. E5M2 ×
        E5M2 is an error.
      lhs_contracting: "cols" sums over the cols of lhs (reads `data`), "rows" over its rows (reads `transposed`).
      rhs_contracting: "rows" sums over the rows of rhs (reads `transposed`), "cols" over its cols (reads `data`).
      contracting_ndim: the number of dimensions to sum over, in plain arrays; None is 1.
      bias: [*N], float32, bfloat16 or float16.
      activation: "gelu" or None.
      save_preactivation: also return A B + bias.
      out_dtype: float32, bfloat16 or float16; None is that of the accumulator, or else that of both operands.
      accumulator: [*M, *N] in out_dtype, without bias and activation. A donated one is overwritten with D.
      accumulate: False overwrites the accumulator without reading it.
      fast_accumulation: keeps FP8 sums in the tensor cores (about 14 bits of mantissa) instead of adding them up in
        float32 every 128 values. No effect on blocks and plain arrays.
      algorithm: on a GPU, "cublaslt" is cuBLASLt's first suggestion, and "te_jax" the package's FP8 kernel. "auto"
        times both and cuBLASLt's other candidates, once in a process for each kind of product; with TE_JAX_AUTOTUNE=0
        in the environment, the default of several processes, it is "cublaslt". Block scaling always uses "te_jax",
        plain arrays always cuBLASLt. The package's kernel also computes what "cublaslt" cannot: FP8 under vmap, row
        scaling with a float32 bias.
      implementation: "native"; "xla", whose compiler calls cuBLASLt for FP8 with tensor scaling on GPUs from compute
        capability 8.9 on, and cuDNN for 1×32 scales from 10.0 on; or "reference". None takes the first that is there,
        and on a GPU never the reference of FP8, which multiplies in float32.

    Returns:
      D [*M, *N], or GemmResult(D, preactivation). Inside `shard_map`, apply psum to D if the contraction is split.

    Raises:
      ValueError: a shape, dtype, scaling or combination breaks a rule above; the message names the argument.
      NotImplementedError: a gradient comes through the native kernel.
      te_jax.native.NativeUnavailableError: the implementation cannot run here, or this GPU cannot multiply such FP8.

    Examples:
      >>> import jax.numpy as jnp
      >>> from te_jax import ops, recipe
      >>> current = recipe.CurrentScaling()
      >>> x = ops.quantize(jnp.ones((8, 32)), current.quantization("activation"))
      >>> kernel = ops.quantize(jnp.ones((32, 16)), current.quantization("kernel"))
      >>> ops.gemm(x, kernel, activation="gelu").shape
      (8, 16)
    """
    lhs, rhs = (x if isinstance(x, QuantizedArray) else as_array(name, x) for name, x in (("lhs", lhs), ("rhs", rhs)))
    bias, accumulator = (
        None if x is None else as_array(name, x) for name, x in (("bias", bias), ("accumulator", accumulator))
    )
    a, b = _copies(lhs, rhs, lhs_contracting, rhs_contracting, contracting_ndim)
    _validate_operands(a, b)
    if out_dtype is None and accumulator is None and lhs.dtype != rhs.dtype:
        raise ValueError(f"lhs stands for {lhs.dtype} and rhs for {rhs.dtype}; give the out_dtype of their product")
    if out_dtype is None:
        out_dtype = lhs.dtype if accumulator is None else accumulator.dtype
    dtype = as_dtype("out_dtype is", out_dtype, FLOATS, f"{FLOAT_NAMES}; for FP8, quantize the result")
    _validate_algorithm(algorithm, a.scaling)

    chosen = operands_implementation(implementation, a.scaling, unsupported(a.scaling, algorithm))
    if 0 in (*a.outer, *a.summed, *b.outer):
        chosen = "reference"  # nothing to multiply is nothing for a kernel
    use_native = chosen == "native"
    fp8, scaling = a.scaling is not None, facts_of(a.scaling)
    product_dtype = allowed_dtype(a.values.dtype, dtype) if use_native else np.dtype(np.float32)
    reads, reuses = as_flag("accumulate", accumulate), use_native and product_dtype == dtype
    spec = GemmSpec(
        a_outer_ndim=len(a.outer),
        b_outer_ndim=len(b.outer),
        summed_ndim=len(a.summed),
        a_summed_first=not fp8 and lhs_contracting == "rows",
        b_summed_first=not fp8 and rhs_contracting == "rows",
        scaling=scaling,
        dtype=dtype,
        product_dtype=product_dtype,
        implementation=chosen,
        bias=bias is not None,
        activation=activation,
        save_preactivation=as_flag("save_preactivation", save_preactivation),
        accumulator=None if accumulator is None else "add" if reads else "overwrite" if reuses else None,
        fast_accumulation=as_flag("fast_accumulation", fast_accumulation) and fp8,
        algorithm=algorithm_for(algorithm, scaling),
        whole=factors_kept_whole(scaling, {"m": a.outer, "n": b.outer, "k": a.summed}),
    )
    _validate_epilogue(a, b, spec, bias, accumulator)
    arrays = {
        "a": a.values,
        "b": b.values,
        "a_scale_inv": a.scale_inv,
        "b_scale_inv": b.scale_inv,
        "bias": bias,
        "accumulator": accumulator,
    }
    results = _run({name: arrays[name] for name in spec.operands}, spec)
    return GemmResult(*results) if spec.save_preactivation else results[0]


def gemm_sum(
    pairs: Sequence[tuple[QuantizedArray, QuantizedArray]],
    *,
    rhs_contracting: Contracting = "rows",
    out_dtype: jax.typing.DTypeLike,
    implementation: native.Implementation | None = None,
) -> Array:
    """The sum of several products of blocks, rounded once. A pair is lhs and rhs of `gemm`; see there.

    The native kernel adds up two or three in one pass: no product is written. Pairs have the same outer dimensions, and
    each sums over dimensions of its own.
    """
    copies = [_copies(lhs, rhs, "cols", rhs_contracting, None) for lhs, rhs in pairs]
    facts = facts_of("block_1x128")
    chosen = operands_implementation(implementation, facts.name, unsupported(facts.name))
    for a, b in copies:
        _validate_operands(a, b)
    specs = tuple(
        GemmSpec(
            a_outer_ndim=len(a.outer),
            b_outer_ndim=len(b.outer),
            summed_ndim=len(a.summed),
            a_summed_first=False,
            b_summed_first=False,
            scaling=facts,
            dtype=np.dtype(np.float32),
            product_dtype=np.dtype(np.float32),
            implementation=chosen,
            bias=False,
            activation=None,
            save_preactivation=False,
            accumulator=None,
            fast_accumulation=False,
            algorithm="te_jax",
            whole=factors_kept_whole(facts, {"m": a.outer, "n": b.outer, "k": a.summed}),
        )
        for a, b in copies
    )
    arrays = [{"a": a.values, "b": b.values, "a_scale_inv": a.scale_inv, "b_scale_inv": b.scale_inv} for a, b in copies]
    return _run_sum(arrays, specs, np.dtype(out_dtype))


@functools.partial(jax.jit, static_argnums=(1, 2), inline=sharding.INLINE)
def _run_sum(pairs: list[dict[str, Array]], specs: tuple[GemmSpec, ...], dtype: np.dtype) -> Array:
    return sharded_sum(specs, dtype, pairs)


# Under jit even when called eagerly: sharded operands are then partitioned rather than gathered.
@functools.partial(jax.jit, static_argnums=1, inline=sharding.INLINE)
def _run(arrays: dict[str, Array], spec: GemmSpec) -> tuple[Array, ...]:
    # On Auto meshes XLA itself splits its programs; on Explicit ones it must be told how.
    by_shards = spec.native or (spec.implementation == "xla" and spec.scaling.in_blocks)
    if by_shards or sharding.is_explicit(arrays):
        return sharded_gemm(spec, arrays)
    return gemm_by_xla(spec, arrays)


def _copies(lhs, rhs, lhs_contracting, rhs_contracting, contracting_ndim) -> tuple[_Copy, _Copy]:
    if isinstance(lhs, QuantizedArray) != isinstance(rhs, QuantizedArray):
        plain = "rhs" if isinstance(lhs, QuantizedArray) else "lhs"
        raise ValueError(f"{plain} is a plain array and the other operand quantized; quantize both or neither")
    if contracting_ndim is not None and not (is_whole_number(contracting_ndim) and contracting_ndim >= 0):
        raise ValueError(f"contracting_ndim is {contracting_ndim!r}; it must be an integer of at least 0, or None")
    return _copy("lhs", lhs, lhs_contracting, contracting_ndim), _copy("rhs", rhs, rhs_contracting, contracting_ndim)


def _copy(name: str, x: QuantizedArray | Array, contracting: Contracting, contracting_ndim: int | None) -> _Copy:
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
        return _Copy(x, None, None, *((rows, cols) if over_cols else (cols, rows)))

    copy: Literal["data", "transposed"] = "data" if over_cols else "transposed"
    values, scale_inv = (x.data, x.scale_inv) if over_cols else (x.transposed, x.transposed_scale_inv)
    if values is None:
        raise ValueError(
            f"{name} has no {copy} copy, which {name}_contracting={contracting!r} reads; "
            f"quantize it with copies='both' or '{copy}'"
        )
    outer_ndim, summed_ndim = (x.row_ndim, x.col_ndim) if over_cols else (x.col_ndim, x.row_ndim)
    validate_copy(name, x, copy)
    if contracting_ndim not in (None, summed_ndim):
        raise ValueError(
            f"contracting_ndim is {contracting_ndim}, but {name} was quantized for {summed_ndim} summed dimensions"
        )
    scaling = x.scaling if over_cols else x.transposed_scaling
    return _Copy(values, scale_inv, scaling, values.shape[:outer_ndim], values.shape[outer_ndim:])


def _validate_operands(a: _Copy, b: _Copy) -> None:
    if a.summed != b.summed:
        raise ValueError(
            f"rhs sums over dimensions of sizes {b.summed}, but lhs over {a.summed}; they must be the same, in the "
            "same order (see lhs_contracting and rhs_contracting)"
        )
    if a.scaling is None or b.scaling is None:
        if a.values.dtype != b.values.dtype:
            raise ValueError(f"rhs has dtype {b.values.dtype} and lhs {a.values.dtype}; cast one of them")
        return
    if a.values.dtype == b.values.dtype == FP8[1]:
        raise ValueError(
            "lhs and rhs are both float8_e5m2, which no GPU multiplies; quantize one of them to float8_e4m3fn"
        )
    of_a, of_b = facts_of(a.scaling), facts_of(b.scaling)
    if of_a.rhs_name != b.scaling:
        if any(facts.rhs_name != facts.name for facts in (of_a, of_b)):
            raise ValueError(
                f"lhs has {a.scaling!r} scales and rhs {b.scaling!r}; a product of blocks needs 'block_1x128' on lhs "
                "and 'block_128x128' on rhs: quantize them so, or exchange them and transpose the result"
            )
        raise ValueError(f"rhs has {b.scaling!r} scales and lhs {a.scaling!r}; both must have the same kind")
    _validate_blocks("lhs", "sums over", a.summed, of_a.summed_block or 1)
    _validate_blocks("rhs", "keeps", b.outer, of_b.outer_block or 1)


def _validate_blocks(name: str, verb: str, sizes: tuple[int, ...], block: int) -> None:
    if len(sizes) > 1 and sizes[-1] % block:
        raise ValueError(
            f"{name} {verb} dimensions of sizes {sizes}; with blocks the last of several must be a multiple of "
            f"{block}: collapse them into one before quantizing"
        )


def _validate_algorithm(algorithm: Algorithm, scaling: Scaling | None) -> None:
    if algorithm not in ("auto", "cublaslt", "te_jax"):
        raise ValueError(f"algorithm is {algorithm!r}; it must be 'auto', 'cublaslt' or 'te_jax'")
    if algorithm == "te_jax" and scaling is None:
        raise ValueError(
            "algorithm is 'te_jax', whose kernel multiplies FP8, and lhs and rhs are plain arrays: quantize them, or "
            "use algorithm='auto'"
        )
    if algorithm == "cublaslt" and facts_of(scaling).native_blocks:
        raise ValueError(
            "algorithm is 'cublaslt', and lhs and rhs have block scales, with which only the package's kernel "
            "multiplies: use algorithm='auto' or 'te_jax'"
        )


def _validate_epilogue(a: _Copy, b: _Copy, spec: GemmSpec, bias: Array | None, accumulator: Array | None) -> None:
    shape = (*a.outer, *b.outer)
    for name, array, expected in (("bias", bias, b.outer), ("accumulator", accumulator, shape)):
        if array is None:
            continue
        if array.shape != expected:
            raise ValueError(f"{name} has shape {array.shape}; for a result of shape {shape} it must have {expected}")
        if array.dtype not in FLOATS:
            raise ValueError(f"{name} has dtype {array.dtype}; it must be {FLOAT_NAMES}")
    if spec.activation not in (None, "gelu"):
        raise ValueError(f"activation is {spec.activation!r}; it must be None or 'gelu': apply others to the result")
    if spec.save_preactivation and spec.activation is None:
        raise ValueError("save_preactivation is True without an activation; the result itself is the preactivation")
    if accumulator is None:
        return
    if accumulator.dtype != spec.dtype:
        raise ValueError(
            f"accumulator has dtype {accumulator.dtype} and out_dtype is {spec.dtype}; they must be the same"
        )
    for name, value in (("bias", bias), ("activation", spec.activation)):
        if value is not None:
            raise ValueError(f"accumulator is given together with {name}; add the accumulator to the result instead")
