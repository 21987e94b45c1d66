"""The grouped GEMM of sharded operands: its static description, how it is split, and te_grouped_gemm on each shard."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from te_jax import native, reference, sharding
from te_jax._core.integers import as_int32
from te_jax.ops.gemm_product import shard_multiples
from te_jax.quantized import Facts, one_copy

_SECOND = ("second_a", "second_b", "second_a_scale_inv", "second_b_scale_inv")
_OPERANDS = ("a", "b", "a_scale_inv", "b_scale_inv", "bounds", "bias", "accumulator", *_SECOND)
_FLOAT32 = np.dtype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class GroupedSpec:
    """A grouped GEMM without its arrays: hashable, so that it is traced once.

    With grouped rows, a is [rows, k], b [groups, n, k], or [groups, k, n] where `b_summed_first`, and the result
    [rows, n]. With grouped sums, a is [rows, m] and b [rows, n], in FP8 [m, rows] and [n, rows], and the result
    [groups, m, n].

    Attributes:
      grouped_sums: whether groups are of the rows that are summed over.
      b_summed_first: see above; only for grouped rows of plain arrays.
      scaling: the facts of the scaling of a.
      dtype: of the result.
      native: te_grouped_gemm multiplies, else the reference.
      bias: whether one [groups, n] is added, to grouped rows.
      accumulator: "add" for one that is added, "overwrite" for one whose buffer the result may take.
      pairs: whether the product of a second pair, of the same shapes and dtypes, is added: for native grouped rows of
        plain operands or blocks.
    """

    grouped_sums: bool
    b_summed_first: bool
    scaling: Facts
    dtype: np.dtype
    native: bool
    bias: bool = False
    accumulator: Literal["add", "overwrite"] | None = None
    pairs: bool = False

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the arrays, in order."""
        absent: set[str] = set()
        if self.scaling.is_plain:
            absent |= {name for name in _OPERANDS if name.endswith("scale_inv")}
        if not self.bias:
            absent.add("bias")
        if self.accumulator is None:
            absent.add("accumulator")
        if not self.pairs:
            absent |= set(_SECOND)
        return tuple(name for name in _OPERANDS if name not in absent)


def group_bounds(group_sizes: Array, group_offset: Array | None, groups: int, rows: int) -> Array:
    """int32 [1, groups + 1]: rows where groups begin, from the group `group_offset` on, and where the last one ends.
    The one place where sizes become rows."""
    sizes = jnp.clip(as_int32(group_sizes), 0, rows)
    bounds = jnp.pad(jnp.cumsum(sizes), (1, 0))
    if group_offset is not None:
        bounds = lax.dynamic_slice_in_dim(bounds, as_int32(group_offset).reshape(()), groups + 1)
    return jnp.clip(bounds, 0, rows)[None]


def rows_in_groups(group_sizes: Array, rows: int) -> Array:
    """Int32 scalar: how many of the rows belong to a group."""
    return group_bounds(group_sizes, None, group_sizes.shape[0], rows)[0, -1]


def grouped_product(spec: GroupedSpec, arrays: Mapping[str, Array]) -> Array:
    """The result, of arrays by name, all of `spec.operands`, sharded in any way."""
    operands = [arrays[name] for name in spec.operands]
    # On Auto meshes XLA itself splits the reference; on Explicit ones it must be told how.
    if not (spec.native or sharding.is_explicit(operands)):
        return _reference(spec, arrays)
    if spec.grouped_sums or not spec.scaling.is_plain or sharding.is_explicit(operands):
        return _per_shard(spec)(*operands)[0]
    return _with_shared_matrices(spec)(*operands)


@functools.cache
def _with_shared_matrices(spec: GroupedSpec) -> Callable[..., Array]:
    """Grouped rows, of which a vmap does not copy the matrices that all examples share: the rows of examples become
    parts of rows, each with its groups."""

    @jax.custom_batching.custom_vmap
    def product(*operands: Array) -> Array:
        return _per_shard(spec)(*operands)[0]

    @product.def_vmap
    def _(examples: int, batched: Sequence[bool], *operands: Array) -> tuple[Array, bool]:
        is_mapped = dict(zip(spec.operands, batched, strict=True))
        rows_of_examples = {"a", "second_a"} & is_mapped.keys()
        if {name for name, is_batched in is_mapped.items() if is_batched} - {"bounds"} != rows_of_examples:
            axes = [0 if is_batched else None for is_batched in batched]
            return jax.vmap(lambda *operands: _per_shard(spec)(*operands)[0], in_axes=axes)(*operands), True
        arrays = dict(zip(spec.operands, operands, strict=True))
        if not is_mapped["bounds"]:
            arrays["bounds"] = jnp.broadcast_to(arrays["bounds"], (examples, *arrays["bounds"].shape))
        rows = arrays["a"].shape[1]
        for name in (*rows_of_examples, "bounds"):
            _, first, *trailing = arrays[name].shape
            arrays[name] = arrays[name].reshape(examples * first, *trailing)
        d = product(*(arrays[name] for name in spec.operands))
        return d.reshape(examples, rows, d.shape[-1]), True

    return product


@functools.cache
def _per_shard(spec: GroupedSpec) -> Callable[..., tuple[Array, ...]]:
    names = spec.operands
    in_place = spec.native and spec.accumulator is not None and native.takes(spec.dtype)
    rule, sizes = _rule(spec)

    @sharding.per_shard(
        rule,
        axes_of=() if spec.grouped_sums else ("k",),
        replicated=[factor for factor in _WHOLE if factor in re.findall(r"\w+", rule)],
        sizes=sizes,
        reuse={names.index("accumulator"): 0} if in_place else None,
    )
    def local(*operands: Array, axes: Mapping[str, Sequence[str]], reuse: Mapping[int, int] | None = None):
        arrays = dict(zip(names, operands, strict=True))
        if over_k := tuple(axes.get("k", ())):
            if spec.bias:  # once, not on every shard
                first = functools.reduce(jnp.logical_and, (lax.axis_index(axis) == 0 for axis in over_k))
                arrays["bias"] = jnp.where(first, arrays["bias"], 0)
            d = _per_shard(spec)(*(arrays[name] for name in names))[0]
            return (lax.psum(d, over_k),)
        if not spec.native:
            return (_reference(spec, arrays),)
        return (_te_grouped_gemm(spec, arrays, in_place=bool(reuse)),)

    return local


_WHOLE = ("r", "e", "p", "i", "j")
"""Factors that no device may have a part of: rows, groups, parts, bounds, and blocks of rows."""


def _rule(spec: GroupedSpec) -> tuple[str, dict[str, int]]:
    """The sharding rule, and sizes of minor factors. Shards of FP8 operands have whole blocks."""
    scaling, sizes = spec.scaling, {f"{group}_": size for group, size in shard_multiples(spec.scaling).items()}
    if spec.grouped_sums:
        sizes.pop("k_", None)
    n, k = (f"({group} {group}_)" if f"{group}_" in sizes else group for group in ("n", "k"))
    n_of_scales = n if scaling.rhs.outer_block == 1 else "n"
    if spec.grouped_sums:
        terms = {"a": "r m", "b": f"r {n}"} if scaling.is_plain else {"a": "m r", "b": f"{n} r"}
        scales = scaling.of_scales(("m",), ("j",)), scaling.rhs.of_scales((n_of_scales,), ("j",))
        result = f"... e m {n}"
    else:
        terms = {"a": f"r {k}", "b": f"e {k} {n}" if spec.b_summed_first else f"e {n} {k}"}
        scales = scaling.of_scales(("r",), ("k",)), ("e", *scaling.rhs.of_scales((n_of_scales,), ("k",)))
        result = f"... r {n}"
    terms |= {"a_scale_inv": " ".join(scales[0]), "b_scale_inv": " ".join(scales[1])}
    terms |= {"bounds": "p i", "bias": f"e {n}"}
    terms["accumulator"] = f"e m {n}"
    terms |= {name: terms[name.removeprefix("second_")] for name in _SECOND}
    return f"{', '.join(f'... {terms[name]}' for name in spec.operands)} -> {result}", sizes


def _te_grouped_gemm(spec: GroupedSpec, arrays: Mapping[str, Array], *, in_place: bool) -> Array:
    """te_grouped_gemm on local arrays; `in_place` writes the result over the accumulator."""
    if not native.takes(spec.dtype):  # XLA rounds
        d = _te_grouped_gemm(dataclasses.replace(spec, dtype=_FLOAT32, accumulator=None), arrays, in_place=False)
        return (d + arrays["accumulator"].astype(_FLOAT32) if spec.accumulator == "add" else d).astype(spec.dtype)
    a, b, bounds = arrays["a"], arrays["b"], arrays["bounds"]
    batch = bounds.shape[:-2]
    rows_last = spec.grouped_sums and not spec.scaling.is_plain
    if spec.grouped_sums:
        shape = *batch, bounds.shape[-1] - 1, *(x.shape[-2 if rows_last else -1] for x in (a, b))
    else:
        shape = *batch, a.shape[-2], b.shape[-1 if spec.b_summed_first else -2]
    operands = {name: arrays[name] for name in spec.operands}
    if spec.bias:
        operands["bias"] = operands["bias"].astype(spec.dtype)
    if spec.accumulator == "overwrite" and not in_place:
        del operands["accumulator"]
    (d,) = native.call(
        "te_grouped_gemm",
        {"d": jax.ShapeDtypeStruct(shape, spec.dtype)},
        operands,
        aliases={"accumulator": "d"} if in_place else None,
        grouped_sums=spec.grouped_sums,
        b_summed_first=spec.b_summed_first,
        scaling=spec.scaling.product,
        accumulate=spec.accumulator == "add",
    )
    return d


def _reference(spec: GroupedSpec, arrays: Mapping[str, Array]) -> Array:
    """A grouped product by the reference, on local arrays."""

    def multiply(arrays: Mapping[str, Array]) -> Array:
        lhs, rhs = arrays["a"], arrays["b"]
        if not spec.scaling.is_plain:
            lhs = one_copy(lhs, arrays["a_scale_inv"], spec.scaling, transposed=spec.grouped_sums)
            rhs = one_copy(rhs, arrays["b_scale_inv"], spec.scaling.rhs, transposed=spec.grouped_sums)
        return reference.grouped_gemm(
            lhs,
            rhs,
            arrays["bounds"][0],
            lhs_contracting="rows" if spec.grouped_sums else "cols",
            rhs_contracting="rows" if spec.grouped_sums or spec.b_summed_first else "cols",
            bias=arrays.get("bias"),
            out_dtype=spec.dtype,
            accumulator=arrays.get("accumulator"),
            accumulate=spec.accumulator == "add",
        )

    for _ in range(arrays["bounds"].ndim - 2):
        multiply = jax.vmap(multiply)
    return multiply({name: arrays[name] for name in spec.operands})
