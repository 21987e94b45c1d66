"""The sum of GEMMs of sharded operands in blocks: how it is split, and te_gemm_sum on each shard."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from te_jax import native, sharding
from te_jax._core.types import BLOCK, FP8_ALIGNMENT
from te_jax.ops.gemm_product import GemmSpec, allowed_dtype, rule_of, shard_multiples, sharded_gemm

_PREFIXES = ("", "second_", "third_")
"""What the operands of te_gemm_sum are called, before "a", "b" and their scales: one for each pair."""


def sharded_sum(specs: tuple[GemmSpec, ...], dtype: np.dtype, pairs: Sequence[Mapping[str, Array]]) -> Array:
    """The sum of products of blocks in the dtype, rounded once.

    Args:
      specs: of each product, bare and in float32.
      dtype: of the result.
      pairs: the arrays of each by name, sharded in any way.
    """
    arrays = [pair[name] for spec, pair in zip(specs, pairs, strict=True) for name in spec.operands]
    summed = tuple(pair["a"].shape[spec.a_outer_ndim :] for spec, pair in zip(specs, pairs, strict=True))
    fits = len(set(map(len, summed))) == 1 and len(specs) <= len(_PREFIXES)
    fits = fits and all(isinstance(size, int) for sizes in summed for size in sizes)  # jax.export leaves some open
    if not (fits and (specs[0].native or sharding.is_explicit(arrays))):
        return _one_after_the_other(specs, dtype, pairs)
    return _per_shard(specs, dtype, summed)(*arrays)[0]


@functools.cache
def _per_shard(
    specs: tuple[GemmSpec, ...], dtype: np.dtype, summed: tuple[tuple[int, ...], ...]
) -> Callable[..., tuple[Array, ...]]:
    rule, sizes, whole = _rule(specs, summed)
    over_k = [f"k{i}" for i in range(len(summed[0])) if re.search(rf"\bk{i}\b", rule)]

    @sharding.per_shard(rule, axes_of=over_k, replicated=whole, sizes=sizes)
    def local(*operands: Array, axes: Mapping[str, Sequence[str]]) -> tuple[Array, ...]:
        if k_axes := tuple(axis for factor in over_k for axis in axes.get(factor, ())):
            return (lax.psum(_per_shard(specs, dtype, summed)(*operands)[0], k_axes),)
        of_pair, names = len(operands) // len(specs), specs[0].operands
        pairs = [dict(zip(names, operands[i : i + of_pair], strict=True)) for i in range(0, len(operands), of_pair)]
        return ((_te_gemm_sum if _fits(specs, pairs) else _one_after_the_other)(specs, dtype, pairs),)

    return local


def _rule(specs: tuple[GemmSpec, ...], summed: tuple[tuple[int, ...], ...]) -> tuple[str, dict[str, int], list[str]]:
    """The sharding rule, sizes of minor factors, and factors that must not be split. Devices that split sums have the
    same part of each pair's, such as the heads of query and of the keys that go with them: k0 is what sizes have in
    common, in whole blocks."""
    rules, sizes = [], {f"{group}_": size for group, size in shard_multiples(specs[0].scaling).items() if group != "k"}
    whole = [factor for factor in specs[0].whole if factor[0] in "mn"]

    def dimension(shared: str, of_all: int, minor: str, size: int) -> str:
        if size == of_all:
            return shared
        if of_all == 1:
            whole.append(minor)
            return minor
        sizes[minor] = size // of_all
        return f"({shared} {minor})"

    for letter, spec, of_pair in zip("abc", specs, summed, strict=False):
        rule = rule_of(spec)
        for i, size in enumerate(of_pair):
            block = BLOCK if i == len(of_pair) - 1 else 1
            of_all = math.gcd(*(other[i] // block if other[i] % block == 0 else 1 for other in summed))
            values = dimension(f"k{i}", of_all, f"{letter}{i}", size)
            blocks = values if block == 1 else dimension(f"k{i}", of_all, f"{letter}{i}s", -(-size // block))
            of_term = {f"(k{i} k_)": values, f"k{i}": blocks}
            rule = re.sub(rf"\(k{i} k_\)|\bk{i}\b", lambda match, of_term=of_term: of_term[match[0]], rule)
        rules.append(rule.split(" -> "))
    return f"{', '.join(operands for operands, _ in rules)} -> {rules[0][1]}", sizes, whole


def _one_after_the_other(specs: tuple[GemmSpec, ...], dtype: np.dtype, pairs: Sequence[Mapping[str, Array]]) -> Array:
    products = (sharded_gemm(spec, pair)[0] for spec, pair in zip(specs, pairs, strict=True))
    return functools.reduce(jnp.add, products).astype(dtype)


def _fits(specs: tuple[GemmSpec, ...], pairs: Sequence[Mapping[str, Array]]) -> bool:
    """Whether te_gemm_sum takes local operands as they are: without a batch, of one type, and with aligned sizes."""
    kinds = {(pair["a"].dtype, pair["b"].dtype) for pair in pairs}
    if not specs[0].native or len(kinds) > 1:
        return False
    for spec, pair in zip(specs, pairs, strict=True):
        a, b = pair["a"], pair["b"]
        if not all(isinstance(size, int) for size in (*a.shape, *b.shape)):
            return False
        m, k = math.prod(a.shape[: spec.a_outer_ndim]), math.prod(a.shape[spec.a_outer_ndim :])
        n = math.prod(b.shape[: spec.b_outer_ndim])
        if a.ndim != spec.a_outer_ndim + spec.summed_ndim or 0 in (m, k, b.size):
            return False
        if m % spec.scaling.row_multiple or n % FP8_ALIGNMENT or k % FP8_ALIGNMENT:
            return False
    return True


def _te_gemm_sum(specs: tuple[GemmSpec, ...], dtype: np.dtype, pairs: Sequence[Mapping[str, Array]]) -> Array:
    outer = *pairs[0]["a"].shape[: specs[0].a_outer_ndim], *pairs[0]["b"].shape[: specs[0].b_outer_ndim]
    operands = {}
    for prefix, spec, pair in zip(_PREFIXES, specs, pairs, strict=False):
        k = math.prod(pair["a"].shape[spec.a_outer_ndim :])
        a, b = pair["a"].reshape(-1, k), pair["b"].reshape(-1, k)
        scales = {f"{name}_scale_inv": pair[f"{name}_scale_inv"] for name in ("a", "b")}
        operands |= {f"{prefix}{name}": array for name, array in ({"a": a, "b": b} | scales).items()}
    allowed = allowed_dtype(operands["a"].dtype, dtype)
    d = jax.ShapeDtypeStruct((operands["a"].shape[0], operands["b"].shape[0]), allowed)
    return native.call("te_gemm_sum", {"d": d}, operands)[0].reshape(outer).astype(dtype)
