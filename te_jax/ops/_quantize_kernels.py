"""The native kernels behind `te_jax.ops.quantize`, and how the results of shards become those of the whole array."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from te_jax import native, sharding
from te_jax._core.types import BLOCK
from te_jax.quantized import PLAIN, Facts, QuantizedArray, facts_of
from te_jax.recipe import Quantization
from te_jax.reference.quantize import (
    Copies,
    QuantizedParts,
    SharedBlocks,
    amax_of,
    amax_of_shards,
    blocked_groups,
    facts_of_copies,
    scale_inv_of,
)

Dimensions = tuple[tuple[str, ...], ...]
"""Each dimension as its factors in a sharding rule: ("r0",), or ("r0", "ri") for r0 blocks of ri = 128 values."""

_FLOAT32 = np.dtype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Request:
    """The static arguments of `quantize`, together: hashable, so that a quantization is traced once."""

    quantization: Quantization
    row_ndim: int
    copies: Copies
    row_axes: tuple[str, ...]
    col_axes: tuple[str, ...]
    with_amax: bool
    with_dbias: bool
    shared_blocks: SharedBlocks | None = None

    @property
    def facts(self) -> tuple[Facts, ...]:
        """The facts of the scalings of the copies."""
        return facts_of_copies(self.quantization, self.copies)


def quantize_by_kernels(x: Array, amax: Array | None, request: Request) -> QuantizedParts:
    """Does what `te_jax.ops.quantize` does."""
    facts = shared_facts(request)
    if facts.is_plain:  # a pass for each copy
        parts = quantize_by_kernels(x, amax, dataclasses.replace(request, copies="data"))
        alone = dataclasses.replace(request, copies="transposed", with_amax=False, with_dbias=False)
        other = quantize_by_kernels(x, amax, alone).array
        copies = {name: getattr(other, name) for name in ("transposed", "transposed_scale_inv")}
        return parts._replace(array=dataclasses.replace(parts.array, **copies))
    run = _by_tensor if facts.by_tensor else _by_rows if facts.by_row else _by_blocks
    arrays, current_amax, dbias = run(x, amax, request)
    return QuantizedParts(quantized_array(x, arrays, request), current_amax if request.with_amax else None, dbias)


def shared_facts(*requests: Request | None) -> Facts:
    """The facts of one of the copies, where the same native kernels quantize all that are asked for; otherwise those of
    plain arrays."""
    all_facts = [facts for each in requests if each for facts in each.facts]
    return all_facts[0] if len({facts.product for facts in all_facts}) == 1 and all_facts[0].native else PLAIN


def quantized_array(x: Array, arrays: Sequence[Array | None], request: Request) -> QuantizedArray:
    """x as its data, scale_inv, transposed and transposed_scale_inv."""
    data, scale_inv, transposed, transposed_scale_inv = arrays
    return QuantizedArray(
        data,
        scale_inv,
        transposed,
        transposed_scale_inv,
        request.row_ndim,
        x.ndim - request.row_ndim,
        request.quantization.scaling,
        request.quantization.transposed_scaling,
        np.dtype(x.dtype),
    )


def _by_tensor(x: Array, amax: Array | None, request: Request):
    kernels = Kernels(request, x.ndim)
    current_amax = _amax_of_tensor(x, request) if amax is None else None
    data, transposed, scale_inv, transposed_scale_inv, seen_amax, dbias = kernels.run(
        "te_quantize_tensor",
        {"x": (kernels.x, x), "amax": ((), current_amax if amax is None else amax)},
        {
            **kernels.copies,
            **kernels.tensor_scales("amax"),
            "amax_out": AMAX if request.with_amax and current_amax is None else None,
            "dbias_partial": kernels.dbias,
        },
        power_of_two_scales=request.quantization.power_of_two_scales,
    )
    return (
        (data, scale_inv, transposed, transposed_scale_inv),
        seen_amax if current_amax is None else current_amax,
        dbias,
    )


def _amax_of_tensor(x: Array, request: Request) -> Array:
    kernels = Kernels(request, x.ndim)
    (amax,) = kernels.run("te_amax_tensor", {"x": (kernels.x, x)}, {"amax": AMAX})
    return amax


def _by_rows(x: Array, _: Array | None, request: Request):
    kernels = Kernels(request, x.ndim)
    rows, cols = kernels.rows, kernels.cols
    row_amax, col_amax = kernels.run(
        "te_amax_rows",
        {"x": (kernels.x, x)},
        {
            "row_amax": kernels.data and Result(rows, reduced_by="amax"),
            "col_amax": kernels.transposed and Result(cols, reduced_by="amax"),
        },
    )
    data, transposed, scale_inv, transposed_scale_inv, dbias = kernels.run(
        "te_quantize_rows",
        {"x": (kernels.x, x), "row_amax": (rows, row_amax), "col_amax": (cols, col_amax)},
        {
            **kernels.copies,
            "row_scale_inv": kernels.data and Result(rows, scale_of=("row_amax", request.quantization)),
            "col_scale_inv": kernels.transposed and Result(cols, scale_of=("col_amax", request.quantization)),
            "dbias_partial": kernels.dbias,
        },
        power_of_two_scales=request.quantization.power_of_two_scales,
    )
    current_amax = None
    if request.with_amax:
        current_amax = amax_of(col_amax, request.col_axes) if row_amax is None else amax_of(row_amax, request.row_axes)
    return (data, scale_inv, transposed, transposed_scale_inv), current_amax, dbias


def _by_blocks(x: Array, _: Array | None, request: Request):
    quantization = request.quantization
    kernels = Kernels(request, x.ndim, blocked_groups(quantization, request.copies))
    data, scale_inv, transposed, transposed_scale_inv, dbias = kernels.run(
        "te_quantize_blocks",
        {"x": (kernels.x, x)},
        kernels.blocks | {"dbias_partial": kernels.dbias},
        **block_attributes(quantization),
    )
    current_amax = _amax_of_tensor(x, request) if request.with_amax else None
    return (data, scale_inv, transposed, transposed_scale_inv), current_amax, dbias


@dataclasses.dataclass(frozen=True)
class Result:
    """A result of a kernel.

    Attributes:
      dimensions: of the result.
      dtype: of the result.
      reduced_by: how a shard's results are combined over the dimensions of x that the result lacks. For "sum" the
        kernel returns a sum for every 128 rows, or columns where it sums over those, and those are added up.
      most_partials: in place of that, as many sums as there are rows, and no more than this.
      scale_of: name of the amax operand whose scale's reciprocal this result holds, and how that scale follows.
    """

    dimensions: Dimensions
    dtype: np.dtype = _FLOAT32
    reduced_by: Literal["amax", "sum"] | None = None
    most_partials: int | None = None
    scale_of: tuple[str, Quantization] | None = None

    def partials(self, summed: int) -> int:
        """The number of sums that a kernel returns, of so many rows or columns."""
        if self.most_partials is None:
            return -(-summed // BLOCK)
        if not isinstance(summed, int):  # symbolic: of jax.export
            return self.most_partials
        return min(summed, self.most_partials)


AMAX = Result((), reduced_by="amax")


class Kernels:
    """Runs kernels for a request on an array with `ndim` dimensions; results that are not asked for are None.

    `blocked` names the groups of dimensions, "rows" and "cols", whose last one is cut into blocks; `replicated` the
    factors that must not be sharded.
    """

    def __init__(
        self, request: Request, ndim: int, blocked: Collection[str] = (), replicated: tuple[str, ...] = ()
    ):  # fmt: skip
        self.rows = group("r", request.row_ndim, "rows" in blocked)
        self.cols = group("c", ndim - request.row_ndim, "cols" in blocked)
        self.x = self.rows + self.cols
        self._quantization = request.quantization
        self._replicated = replicated
        groups = ((self.rows, request.row_axes), (self.cols, request.col_axes))
        self._axes = {group[0][0]: axes for group, axes in groups if axes}
        dtype = np.dtype(request.quantization.dtype)
        self.data = None if request.copies == "transposed" else Result(self.x, dtype)
        self.transposed = None if request.copies == "data" else Result(self.cols + self.rows, dtype)
        self.dbias = Result(self.cols, reduced_by="sum") if request.with_dbias else None

    @property
    def copies(self) -> dict[str, Result | None]:
        """Both copies by the names of results."""
        return {"data": self.data, "transposed": self.transposed}

    def tensor_scales(self, amax: str) -> dict[str, Result | None]:
        """The scales of both copies, from the amax that this operand is. One for each: XLA would copy one that a
        program returns twice."""
        scale = Result((), scale_of=(amax, self._quantization))
        return {"scale_inv": self.data and scale, "transposed_scale_inv": self.transposed and scale}

    @property
    def blocks(self) -> dict[str, Result | None]:
        """Both copies and their scales of blocks by the names of results."""
        scale_inv, transposed_scale_inv = self.block_scales()
        return {
            "data": self.data,
            "scale_inv": scale_inv,
            "transposed": self.transposed,
            "transposed_scale_inv": transposed_scale_inv,
        }

    def block_scales(self) -> tuple[Result | None, Result | None]:
        """The scales of both copies."""
        scaling, transposed_scaling = self._quantization.scaling, self._quantization.transposed_scaling
        return (
            self.data and Result(scale_dimensions(facts_of(scaling), self.rows, self.cols)),
            self.transposed and Result(scale_dimensions(facts_of(transposed_scaling), self.cols, self.rows)),
        )

    def run(
        self,
        target: str,
        operands: Mapping[str, tuple[Dimensions, Array | None]],
        results: Mapping[str, Result | None],
        **attributes: Any,
    ) -> list[Any]:
        """`run_kernel` for the rows and cols of x."""
        return run_kernel(target, self.rows, self.cols, operands, results, self._replicated, self._axes, **attributes)


def run_kernel(
    target: str,
    rows: Dimensions,
    cols: Dimensions,
    operands: Mapping[str, tuple[Dimensions, Array | None]],
    results: Mapping[str, Result | None],
    replicated: tuple[str, ...] = (),
    axes: Mapping[str, tuple[str, ...]] | None = None,
    **attributes: Any,
) -> list[Any]:
    """Runs a target on x and other operands, by their names. The target sees no elements in the place of a None.

    Args:
      target: of the extension.
      rows, cols: the dimensions of x.
      operands: x, first, and others, with their dimensions.
      results: what the target returns; None for what is not asked for.
      replicated: factors that must not be sharded.
      axes: mesh axes that split factors of x inside `shard_map`.
      attributes: of the target.
    """
    kernel = _kernel(
        target,
        rows,
        cols,
        tuple((name, dimensions) for name, (dimensions, operand) in operands.items() if operand is not None),
        tuple((name, result) for name, result in results.items() if result is not None),
        replicated,
        tuple(sorted(attributes.items())),
    )
    arrays = iter(kernel(*[operand for _, operand in operands.values() if operand is not None], axes=axes))
    return [None if result is None else next(arrays) for result in results.values()]


@functools.cache
def _kernel(
    target: str,
    rows: Dimensions,
    cols: Dimensions,
    operand_dimensions: tuple[tuple[str, Dimensions], ...],
    results: tuple[tuple[str, Result], ...],
    replicated: tuple[str, ...],
    attributes: tuple[tuple[str, Any], ...],
) -> Callable[..., tuple[Array, ...]]:
    """A target as a function of arrays that may be sharded, without the absent operands and results."""
    wanted = [result for _, result in results]
    reduced = {result: set(rows + cols).difference(result.dimensions) for result in wanted if result.reduced_by}

    @sharding.per_shard(
        f"{terms([term for _, term in operand_dimensions])} -> {terms([result.dimensions for result in wanted])}",
        axes_of=[dimension[0] for dimension in rows + cols if any(dimension in over for over in reduced.values())],
        replicated=replicated,
        sizes={minor: BLOCK for dimension in rows + cols for minor in dimension[1:]},
    )
    def kernel(*operands: Array, axes: Mapping[str, tuple[str, ...]]) -> tuple[Array, ...]:
        if axes:
            return tuple(map(functools.partial(combined, axes), wanted, kernel(*operands)))
        arguments = {name: operand for (name, _), operand in zip(operand_dimensions, operands, strict=True)}
        x = operands[0]
        batch_ndim = x.ndim - len(rows + cols)
        sizes = dict(zip(rows + cols, x.shape[batch_ndim:], strict=True))
        blocks = {dimension[:1]: -(-size // BLOCK) for dimension, size in sizes.items()}

        def type_of(result: Result) -> jax.ShapeDtypeStruct:
            shape = [(blocks | sizes)[dimension] for dimension in result.dimensions]
            summed = math.prod(size for dimension, size in sizes.items() if dimension not in result.dimensions)
            partial = [result.partials(summed)] if result.reduced_by == "sum" else []
            return jax.ShapeDtypeStruct((*x.shape[:batch_ndim], *partial, *shape), result.dtype)

        values = native.call(
            target,
            {name: type_of(result) for name, result in results},
            arguments,
            row_ndim=len(rows),
            batch_ndim=batch_ndim,
            **dict(attributes),
        )

        def finished(result: Result, value: Array) -> Array:
            if result.reduced_by == "sum":
                return jnp.sum(value, axis=batch_ndim)
            if result.scale_of is None:
                return value
            # The kernel's results vary over the mesh axes of x too; a scale must not, where its amax does not.
            amax, quantization = arguments[result.scale_of[0]], result.scale_of[1]
            more = sharding.varying_axes(value) - sharding.varying_axes(amax)
            return scale_inv_of(amax, quantization) if more else value

        return tuple(finished(result, value) for result, value in zip(wanted, values, strict=True))

    def combined(axes: Mapping[str, tuple[str, ...]], result: Result, value: Array) -> Array:
        """A result of the whole array, from those of its shards."""
        reduced_dimensions = [dimension for dimension in rows + cols if dimension in reduced.get(result, ())]
        over = tuple(axis for dimension in reduced_dimensions for axis in axes.get(dimension[0], ()))
        if not over:
            return value
        return lax.psum(value, over) if result.reduced_by == "sum" else amax_of_shards(value, over)

    return kernel


def block_attributes(quantization: Quantization) -> dict[str, bool]:
    """How a target quantizes in blocks."""
    return {
        "data_128x128": facts_of(quantization.scaling).outer_block == BLOCK,
        "transposed_128x128": facts_of(quantization.transposed_scaling).outer_block == BLOCK,
        "power_of_two_scales": quantization.power_of_two_scales,
    }


def group(name: str, ndim: int, blocked: bool) -> Dimensions:
    """The dimensions of rows or cols; if blocked, the last one is made of blocks of 128 values."""
    plain = tuple((f"{name}{i}",) for i in range(ndim))
    return (*plain[:-1], (*plain[-1], f"{name}i")) if blocked else plain


def scale_dimensions(facts: Facts, outer: Dimensions, summed: Dimensions) -> Dimensions:
    """The dimensions of the scales of blocks, as `quantized.scale_shape` orders them."""

    def blocks(group: Dimensions) -> Dimensions:
        return (*group[:-1], group[-1][:1])

    return facts.of_scales(outer if facts.outer_block == 1 else blocks(outer), blocks(summed))


def terms(operands: Sequence[Dimensions | None]) -> str:
    """The terms of a sharding rule, such as "... r0 (c0 ci)"."""
    return ", ".join(
        " ".join(["...", *(d[0] if len(d) == 1 else f"({' '.join(d)})" for d in term)])
        for term in operands
        if term is not None
    )
