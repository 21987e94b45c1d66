"""Matrix products of groups of rows with a matrix for each group, whose sizes are known on the device only."""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from te_jax import native, sharding
from te_jax._core.arguments import as_dtype, as_flag
from te_jax._core.reverse_mode import reverse_mode_only
from te_jax._core.types import FLOAT_NAMES, FLOATS, FP8, FP8_ALIGNMENT
from te_jax.ops._grouped_product import GroupedSpec, group_bounds, grouped_product
from te_jax.ops.implementations import operands_implementation
from te_jax.ops.operands import as_array, validate_copy
from te_jax.quantized import PLAIN, QuantizedArray, facts_of
from te_jax.recipe import Scaling

__all__ = ["cuda_problem", "grouped_gemm", "grouped_gemm_of_pairs", "grouped_native", "ragged_dot"]

Contracting = Literal["cols", "rows"]
Operand = QuantizedArray | jax.typing.ArrayLike

_REVERSE_MODE = (
    "te_jax.ops.ragged_dot with native kernels has first derivatives in reverse mode (jax.grad, jax.vjp) only: for "
    "forward mode (jax.jvp, jax.jacfwd) or second derivatives use implementation='reference'"
)


def ragged_dot(
    lhs: jax.typing.ArrayLike,
    rhs: jax.typing.ArrayLike,
    group_sizes: jax.typing.ArrayLike,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    group_offset: jax.typing.ArrayLike | None = None,
    *,
    implementation: native.Implementation | None = None,
) -> Array:
    r"""Multiplies each group of consecutive rows by a matrix of its own: `jax.lax.ragged_dot`, and what that lacks.

        result[r] = lhs[r] · rhs[g]        for the rows r of group g,  and zeros for rows after the last group

    The contract is that of `jax.lax.ragged_dot`: rows of no group are zero, and what lhs holds there reaches neither
    the result nor a gradient; empty groups get gradients of zero; sizes beyond the rows are cut off. Beyond it, every
    combination of operands may be under `vmap`, where rows of several examples share the matrices without a copy, and
    `group_offset` is implemented. The native kernels multiply the rows that there are, once, forward and backward. On
    a GPU they do so for bfloat16 in and out, with k and n multiples of 8; otherwise implementation=None takes the
    reference there, a loop over groups that multiplies all rows in each.

    Args:
      lhs: [rows, k], float32, bfloat16 or float16.
      rhs: [groups, k, n], one of these too. Operands of two dtypes are multiplied in float32.
      group_sizes: integers [groups], rows of each group, in order; with group_offset [all groups].
      precision: accepted for `jax.lax.ragged_dot`'s sake; products of float32 are float32, and sums always.
      preferred_element_type: dtype of the result, float32, bfloat16 or float16; None is that of the product.
      group_offset: integer, the group that rhs[0] belongs to, where rhs has the matrices of some of the groups only;
        rows of the others are zero.
      implementation: None prefers the native kernel over the reference; "native" and "reference" never fall back, and
        "xla" is the reference of plain operands.

    Returns:
      [rows, n].

    Raises:
      ValueError: an argument breaks a rule above; the message names it.
      NotImplementedError: for forward mode and second derivatives with the native kernel.
      te_jax.native.NativeUnavailableError: implementation="native" cannot run here.

    Examples:
      >>> import jax.numpy as jnp
      >>> from te_jax import ops
      >>> rhs = jnp.array([1.0, 10.0, 100.0]).reshape(3, 1, 1)
      >>> ops.ragged_dot(jnp.ones((5, 1)), rhs, jnp.array([2, 0, 1]))[:, 0].tolist()
      [1.0, 1.0, 100.0, 0.0, 0.0]
    """
    del precision
    lhs, rhs = as_array("lhs", lhs), as_array("rhs", rhs)
    group_sizes, group_offset = _as_sizes(group_sizes), _as_offset(group_offset)
    a, b = _Copy.of("lhs", lhs, "cols", 2), _Copy.of("rhs", rhs, "rows", 3)
    if lhs.dtype != rhs.dtype:
        lhs, rhs = lhs.astype(jnp.float32), rhs.astype(jnp.float32)
        a, b = a._replace(values=lhs), b._replace(values=rhs)
    _validate_operands(a, b, grouped_sums=False)
    _validate_groups(group_sizes, group_offset, rhs.shape[0], "rhs has")
    wanted = lhs.dtype if preferred_element_type is None else preferred_element_type
    dtype = as_dtype("preferred_element_type is", wanted, FLOATS, FLOAT_NAMES)
    plain = lhs.dtype if lhs.dtype == dtype else np.dtype(np.float32)  # in which the gradients are
    use_native = grouped_native(implementation, cuda_problem(None, plain, *rhs.shape))
    bounds = group_bounds(group_sizes, group_offset, rhs.shape[0], lhs.shape[0])
    if not use_native and not sharding.is_explicit(lhs, rhs):
        return _run({"a": lhs, "b": rhs, "bounds": bounds}, _rows_spec(dtype, native=False))
    if use_native:
        lhs, rhs = reverse_mode_only((lhs, rhs), _REVERSE_MODE)
    lhs, rhs, bounds = sharding.varying_together((lhs, rhs, bounds))
    return _ragged_dot(lhs, rhs, bounds, dtype, use_native)


def grouped_gemm(
    lhs: Operand,
    rhs: Operand,
    group_sizes: jax.typing.ArrayLike,
    *,
    lhs_contracting: Contracting = "cols",
    rhs_contracting: Contracting = "rows",
    bias: jax.typing.ArrayLike | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    accumulator: jax.typing.ArrayLike | None = None,
    accumulate: bool = True,
    group_offset: jax.typing.ArrayLike | None = None,
    implementation: native.Implementation | None = None,
) -> Array:
    r"""The products of a layer of experts, on FP8 or plain operands: forward, input gradient, and weight gradient.

    With groups of consecutive rows, whose sizes are data:

        lhs_contracting="cols"    result[r] = lhs[r] · rhs[g] + bias[g]         for rows r of group g; others are zero
        lhs_contracting="rows"    result[g] = Σ_r lhs[r]ᵀ rhs[r]  (+ accumulator[g])     over rows r of group g

    The former, with rhs a kernel [groups, in, out], is the forward product for rhs_contracting="rows", and the input
    gradient for "cols", which multiplies by the transposes. The latter is the weight gradient; an empty group has
    zeros, or its accumulator. Rows of no group are not read. An FP8 value counts as value × scale_inv. Sums are
    float32, and the result is rounded once. Operands may be sharded over their features; rows and groups are whole on
    every device, or each device's own inside `shard_map`. The native kernel has no derivative: use `ragged_dot`.

    On a GPU (compute capability 9.0) the native kernel multiplies FP8, with block scaling of multiples of 4 outer
    values in lhs, and bfloat16 with k and n multiples of 8. For other plain operands implementation=None takes the
    reference there, a loop over groups that multiplies all rows in each; for other FP8 it raises.

    Args:
      lhs: [rows, k], a QuantizedArray, or float32, bfloat16 or float16.
      rhs: the same kind: [groups, k, n], for rhs_contracting="cols" [groups, n, k], and for lhs_contracting="rows"
        [rows, n]. A QuantizedArray of groups comes from a `jax.vmap` of `quantize`, and has scales for each group.
        Block scaling needs 1×128 scales on lhs and 128×128 on rhs.
      group_sizes: integers [groups], rows of each group, in order; sizes beyond the rows are cut off.
      lhs_contracting: "cols" reads `data` of a quantized lhs, "rows" `transposed` of both.
      rhs_contracting: "rows" reads `transposed` of rhs, "cols" `data`; "rows" where lhs_contracting is.
      bias: [groups, n], float32, bfloat16 or float16; for lhs_contracting="cols".
      out_dtype: float32, bfloat16 or float16; None is that of the accumulator, or else that of both operands.
      accumulator: [groups, k, n] in out_dtype; for lhs_contracting="rows". A donated one is overwritten.
      accumulate: False overwrites the accumulator without reading it.
      group_offset: integer, the group that rhs[0] or accumulator[0] belongs to, where these have some groups only.
      implementation: None prefers the native kernel over the reference; "native" and "reference" never fall back, and
        "xla" is the reference of plain operands.

    Returns:
      [rows, n], or [groups, k, n] for lhs_contracting="rows".

    Raises:
      ValueError: a shape, dtype, scaling or combination breaks a rule above; the message names the argument.
      NotImplementedError: a gradient comes through the native kernel.
      te_jax.native.NativeUnavailableError: implementation="native" cannot run here.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from te_jax import ops, recipe
      >>> block = recipe.BlockScaling()
      >>> x = ops.quantize(jnp.ones((256, 128)), block.quantization("activation"))
      >>> quantize_kernel = lambda kernel: ops.quantize(kernel, block.quantization("kernel"))
      >>> kernel = jax.vmap(quantize_kernel)(jnp.ones((2, 128, 64)))
      >>> ops.grouped_gemm(x, kernel, jnp.array([128, 100])).shape
      (256, 64)
    """
    lhs, rhs = (x if isinstance(x, QuantizedArray) else as_array(name, x) for name, x in (("lhs", lhs), ("rhs", rhs)))
    bias, accumulator = (
        None if x is None else as_array(name, x) for name, x in (("bias", bias), ("accumulator", accumulator))
    )
    group_sizes, group_offset = _as_sizes(group_sizes), _as_offset(group_offset)
    for name, value in (("lhs_contracting", lhs_contracting), ("rhs_contracting", rhs_contracting)):
        if value not in ("cols", "rows"):
            raise ValueError(f"{name} is {value!r}; it must be 'cols' or 'rows'")
    sums = lhs_contracting == "rows"
    if sums and rhs_contracting == "cols":
        raise ValueError("lhs_contracting is 'rows' and rhs_contracting 'cols'; where lhs sums over rows, rhs does too")
    if isinstance(lhs, QuantizedArray) != isinstance(rhs, QuantizedArray):
        plain = "rhs" if isinstance(lhs, QuantizedArray) else "lhs"
        raise ValueError(f"{plain} is a plain array and the other operand quantized; quantize both or neither")
    a = _Copy.of("lhs", lhs, lhs_contracting, 2)
    b = _Copy.of("rhs", rhs, rhs_contracting, 2 if sums else 3)
    _validate_operands(a, b, grouped_sums=sums)
    if out_dtype is None and accumulator is None and lhs.dtype != rhs.dtype:
        raise ValueError(f"lhs stands for {lhs.dtype} and rhs for {rhs.dtype}; give the out_dtype of their product")
    if out_dtype is None:
        out_dtype = lhs.dtype if accumulator is None else accumulator.dtype
    dtype = as_dtype("out_dtype is", out_dtype, FLOATS, f"{FLOAT_NAMES}; for FP8, quantize the result")

    groups, whose = group_sizes.shape[0], "group_sizes has"
    if not sums:
        groups, whose = b.values.shape[0], "rhs has"
    elif accumulator is not None:
        if accumulator.ndim != 3:
            raise ValueError(f"accumulator has shape {accumulator.shape}; it must be [groups, k, n]")
        groups, whose = accumulator.shape[0], "accumulator has"
    _validate_groups(group_sizes, group_offset, groups, whose)
    expected_bias, expected_accumulator = (groups, b.outer), (groups, a.outer, b.outer)
    for name, x, expected, fits in (
        ("bias", bias, expected_bias, not sums),
        ("accumulator", accumulator, expected_accumulator, sums),
    ):
        if x is None:
            continue
        if not fits:
            raise ValueError(f"{name} is given with lhs_contracting={lhs_contracting!r}, which has none; leave it out")
        if x.shape != expected or x.dtype not in FLOATS:
            raise ValueError(f"{name} has shape {x.shape} and dtype {x.dtype}; it must be {expected}, {FLOAT_NAMES}")
    if accumulator is not None and accumulator.dtype != dtype:
        raise ValueError(f"accumulator has dtype {accumulator.dtype} and out_dtype is {dtype}; they must be the same")
    reads = as_flag("accumulate", accumulate)
    of_lhs = a.outer if sums or a.scaling is not None else a.summed
    problem = cuda_problem(a.scaling, a.values.dtype, groups, of_lhs, b.outer)
    use_native = operands_implementation(implementation, a.scaling, problem, by_xla=False) == "native"
    spec = GroupedSpec(
        grouped_sums=sums,
        b_summed_first=not sums and a.scaling is None and rhs_contracting == "rows",
        scaling=facts_of(a.scaling),
        dtype=dtype,
        native=use_native,
        bias=bias is not None,
        accumulator=None if accumulator is None else "add" if reads else "overwrite" if use_native else None,
    )
    arrays = {
        "a": a.values,
        "b": b.values,
        "a_scale_inv": a.scale_inv,
        "b_scale_inv": b.scale_inv,
        "bounds": group_bounds(group_sizes, group_offset, groups, lhs.shape[0]),
        "bias": bias,
        "accumulator": accumulator,
    }
    return _run({name: arrays[name] for name in spec.operands}, spec)


def grouped_gemm_of_pairs(
    first: tuple[QuantizedArray | Array, QuantizedArray | Array],
    second: tuple[QuantizedArray | Array, QuantizedArray | Array],
    group_sizes: Array,
    *,
    rhs_contracting: Contracting = "rows",
    out_dtype: jax.typing.DTypeLike,
    implementation: native.Implementation | None = None,
) -> Array:
    """The sum of two products of grouped rows, rounded once. A pair is lhs and rhs of `grouped_gemm`; see there.

    The native kernel adds up both in one pass: neither product is written. It does so for plain operands and for block
    scaling, where both pairs have the same shapes and dtypes. Others are multiplied one after the other, in float32.
    """
    (a, b), (second_a, second_b) = (
        (_Copy.of("lhs", lhs, "cols", 2), _Copy.of("rhs", rhs, rhs_contracting, 3)) for lhs, rhs in (first, second)
    )
    groups = b.values.shape[0]
    of_lhs = a.summed if a.scaling is None else a.outer
    problem = cuda_problem(a.scaling, a.values.dtype, groups, of_lhs, b.outer)
    in_pairs = a.scaling is None or facts_of(a.scaling).native_blocks
    one_pass = in_pairs and a.kind == second_a.kind and b.kind == second_b.kind
    if not (one_pass and grouped_native(implementation, problem)):
        product = functools.partial(grouped_gemm, rhs_contracting=rhs_contracting, implementation=implementation)
        products = [product(lhs, rhs, group_sizes, out_dtype=jnp.float32) for lhs, rhs in (first, second)]
        return (products[0] + products[1]).astype(out_dtype)
    _validate_operands(a, b, grouped_sums=False)
    _validate_groups(group_sizes, None, groups, "rhs has")
    spec = GroupedSpec(
        grouped_sums=False,
        b_summed_first=a.scaling is None and rhs_contracting == "rows",
        scaling=facts_of(a.scaling),
        dtype=np.dtype(out_dtype),
        native=True,
        pairs=True,
    )
    arrays = {
        "a": a.values,
        "b": b.values,
        "a_scale_inv": a.scale_inv,
        "b_scale_inv": b.scale_inv,
        "bounds": group_bounds(group_sizes, None, groups, a.outer),
        "second_a": second_a.values,
        "second_b": second_b.values,
        "second_a_scale_inv": second_a.scale_inv,
        "second_b_scale_inv": second_b.scale_inv,
    }
    return _run({name: arrays[name] for name in spec.operands}, spec)


def grouped_native(implementation: native.Implementation | None, problem: str | None) -> bool:
    """Whether te_grouped_gemm multiplies."""
    problem = problem and f"{problem}; use implementation='reference'"
    return native.use_native(implementation, problem, products=True)


def cuda_problem(scaling: Scaling | None, dtype: np.dtype, groups: int, of_lhs: int, n: int) -> str | None:
    """Why the default backend's GPU cannot multiply groups, if it is one and cannot.

    Args:
      scaling: of lhs, None for plain operands.
      dtype: of both operands, if they are plain.
      groups: number of them.
      of_lhs: values in a row of plain lhs; outer values of a quantized one.
      n: values in a row of the result.
    """
    capability = native.compute_capability()
    if capability is None:
        return None
    if capability != (9, 0):
        have = f"{capability[0]}.{capability[1]}"
        return f"grouped GEMMs need CUDA compute capability 9.0 exactly, and this GPU has {have}"
    if groups > _MOST_GROUPS:
        return f"there are {groups} groups, and the CUDA kernel of grouped GEMMs takes up to {_MOST_GROUPS}"
    if of_lhs % (multiple := facts_of(scaling).row_multiple):
        return f"lhs has {of_lhs} outer values, and grouped GEMMs of blocks need a multiple of {multiple} on a GPU"
    if scaling is None and dtype != np.dtype(jnp.bfloat16):
        return f"the operands and their gradients are {dtype}, and plain grouped GEMMs are in bfloat16 on a GPU"
    if scaling is None and (of_lhs == 0 or of_lhs % 8 or n % 8):
        return f"rows have {of_lhs} and {n} values, and plain grouped GEMMs need positive multiples of 8 on a GPU"
    return None


_MOST_GROUPS = 1500
"""The bounds of more groups have no room in shared memory beside the tiles."""


# Under jit even when called eagerly: sharded operands are then partitioned rather than gathered.
@functools.partial(jax.jit, static_argnums=1, inline=sharding.INLINE)
def _run(arrays: dict[str, Array], spec: GroupedSpec) -> Array:
    return grouped_product(spec, arrays)


def _rows_spec(dtype: np.dtype, *, native: bool, transposed: bool = False) -> GroupedSpec:
    return GroupedSpec(grouped_sums=False, b_summed_first=not transposed, scaling=PLAIN, dtype=dtype, native=native)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _ragged_dot(lhs: Array, rhs: Array, bounds: Array, dtype: np.dtype, use_native: bool) -> Array:
    return _run({"a": lhs, "b": rhs, "bounds": bounds}, _rows_spec(dtype, native=use_native))


def _forward(lhs: Array, rhs: Array, bounds: Array, dtype: np.dtype, use_native: bool):
    return _ragged_dot(lhs, rhs, bounds, dtype, use_native), (lhs, rhs, bounds)


def _backward(dtype: np.dtype, use_native: bool, residuals, dout: Array):
    lhs, rhs, bounds = residuals
    layouts = [sharding.Layout.of(x) for x in (lhs, rhs)]
    # Products of two dtypes are in float32: neither the gradient nor an operand is rounded.
    common = lhs.dtype if lhs.dtype == dtype else np.dtype(np.float32)
    lhs, rhs, dout = (x.astype(common) for x in (lhs, rhs, dout))
    dgrad = _rows_spec(layouts[0].dtype, native=use_native, transposed=True)
    dlhs = _run({"a": dout, "b": rhs, "bounds": bounds}, dgrad)
    wgrad = GroupedSpec(True, False, PLAIN, layouts[1].dtype, use_native)
    drhs = _run({"a": lhs, "b": dout, "bounds": bounds}, wgrad)
    return layouts[0].apply(dlhs), layouts[1].apply(drhs), None


_ragged_dot.defvjp(_forward, _backward)


# ----------------------------------------------------------------------------------------------------- arguments


class _Copy(NamedTuple):
    """The copy of an operand that the product reads.

    Attributes:
      values: FP8 or plain; [groups, …] with groups.
      scale_inv, scaling: None for plain values.
      outer, summed: its two sizes beside groups.
    """

    values: Array
    scale_inv: Array | None
    scaling: Scaling | None
    outer: int
    summed: int

    @property
    def kind(self) -> tuple[object, ...]:
        """All but the values."""
        return self.scaling, self.values.shape, self.values.dtype

    @classmethod
    def of(cls, name: str, x: QuantizedArray | Array, contracting: Contracting, ndim: int) -> _Copy:
        shape = ("[rows, features]", "[groups, k, n]")[ndim - 2]
        if x.ndim != ndim:
            raise ValueError(f"{name} has shape {x.shape}; it must be {shape}")
        over_cols = contracting == "cols"
        if not isinstance(x, QuantizedArray):
            if x.dtype not in FLOATS:
                raise ValueError(
                    f"{name} has dtype {x.dtype}; it must be a QuantizedArray, {FLOAT_NAMES}: quantize it or cast it"
                )
            rows, cols = x.shape[-2:]
            return cls(x, None, None, *((rows, cols) if over_cols else (cols, rows)))
        copy: Literal["data", "transposed"] = "data" if over_cols else "transposed"
        if (x.row_ndim, x.col_ndim) != (1, 1):
            raise ValueError(
                f"{name} was quantized for {x.row_ndim} rows and {x.col_ndim} cols; a grouped GEMM needs one dimension "
                f"of each{' beside groups: quantize it by jax.vmap' if ndim == 3 else ''}"
            )
        values, scale_inv = (x.data, x.scale_inv) if over_cols else (x.transposed, x.transposed_scale_inv)
        if values is None:
            raise ValueError(
                f"{name} has no {copy} copy, which {name}_contracting={contracting!r} reads; "
                f"quantize it with copies='both' or '{copy}'"
            )
        if ndim == 2:
            validate_copy(name, x, copy)
        else:  # as one member of it
            member: Any = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), x)
            validate_copy(name, member, copy)
        return cls(values, scale_inv, x.scaling if over_cols else x.transposed_scaling, *values.shape[-2:])


def _validate_operands(a: _Copy, b: _Copy, *, grouped_sums: bool) -> None:
    if a.summed != b.summed:
        what = "rows" if grouped_sums else "values"
        raise ValueError(f"rhs sums over {b.summed} {what}, but lhs over {a.summed}; they must be the same")
    if a.scaling is None or b.scaling is None:
        if a.values.dtype != b.values.dtype:
            raise ValueError(f"rhs has dtype {b.values.dtype} and lhs {a.values.dtype}; cast one of them")
        return
    if a.values.dtype == b.values.dtype == FP8[1]:
        raise ValueError(
            "lhs and rhs are both float8_e5m2, which no GPU multiplies; quantize one of them to float8_e4m3fn"
        )
    if facts_of(a.scaling).rhs_name != b.scaling:
        raise ValueError(
            f"lhs has {a.scaling!r} scales and rhs {b.scaling!r}; both must have 'tensor' or 'row', or lhs "
            "'block_1x128' and rhs 'block_128x128': quantize them so"
        )
    for name, size in (("outer", b.outer), ("summed", b.summed)):
        if size % FP8_ALIGNMENT:
            raise ValueError(
                f"rhs has {size} {name} values; FP8 products need a multiple of {FP8_ALIGNMENT}: pad it, or do not "
                "quantize"
            )


def _as_sizes(group_sizes: jax.typing.ArrayLike) -> Array:
    group_sizes = as_array("group_sizes", group_sizes)
    if group_sizes.ndim != 1 or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(
            f"group_sizes has shape {group_sizes.shape} and dtype {group_sizes.dtype}; it must be integers [groups]"
        )
    return group_sizes


def _as_offset(group_offset: jax.typing.ArrayLike | None) -> Array | None:
    if group_offset is None:
        return None
    group_offset = as_array("group_offset", group_offset)
    if group_offset.shape not in ((), (1,)) or not jnp.issubdtype(group_offset.dtype, jnp.integer):
        raise ValueError(
            f"group_offset has shape {group_offset.shape} and dtype {group_offset.dtype}; it must be one integer"
        )
    return group_offset


def _validate_groups(group_sizes: Array, group_offset: Array | None, groups: int, whose: str) -> None:
    sizes = group_sizes.shape[0]
    if group_offset is None and sizes != groups:
        raise ValueError(
            f"group_sizes has {sizes} groups and {whose} {groups}; they must be the same, or give a group_offset"
        )
    if group_offset is not None and sizes < groups:
        raise ValueError(f"group_sizes has {sizes} groups and {whose} {groups}; with group_offset it has those of all")
