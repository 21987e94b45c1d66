"""Statistics of tensors in FP8 products: the request for them, and the equations that carry them out of a function.

While a request is made, layers bind two primitives. `link` stands for a kernel: its result is empty, and a layer keeps
it for the backward pass, so that all tensors of one call are found to be of one kernel. `tag` is the identity on arrays
of a product, with the statistics as further operands. An evaluation of the jaxpr (`te_jax.debug`) takes them there.
Without a request nothing is bound, and programs are the same as before. The request is part of JAX's cache keys.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

Kind = Literal["sum", "max", "min", "norm"]


@dataclasses.dataclass(frozen=True)
class Request:
    """Statistics that are asked for. Hashable.

    Attributes:
      roles, products: of tensors.
      exponents: whether histograms of exponents are.
      results: whether the results of products are compared with those of plain operands.
      recipe: of layers that have none, while it lasts; None leaves them as they are.
    """

    roles: tuple[str, ...] = ()
    products: tuple[str, ...] = ()
    exponents: bool = False
    results: bool = False
    recipe: Any = None


_request = jax.make_user_context(None)


def requested() -> Request | None:
    """The request at hand."""
    return _request.value


def requesting(request: Request | None) -> contextlib.AbstractContextManager[object]:
    """A context in which functions are traced with this request."""
    return _request(request)


# ------------------------------------------------------------------------------------------------------- the layer


@dataclasses.dataclass(frozen=True)
class Layer:
    """The layer whose operands are quantized.

    Attributes:
      operation: name of the public function.
      links: those of the kernels that an operand belongs to.
      dgrad_copy: "data" or "transposed", the copy of a kernel that the gradient of x reads.
      data_copies: the copies for which the data counts, where the transposed one is made from it later; () where each
        copy counts for itself.
    """

    operation: str
    links: tuple[Array, ...]
    dgrad_copy: str
    data_copies: tuple[str, ...] = ()

    def product(self, role: str, copy: str) -> str:
        """The product that reads a copy of a tensor."""
        if role == "kernel":
            return "dgrad" if copy == self.dgrad_copy else "forward"
        if copy == "transposed":
            return "wgrad"
        return "forward" if role == "activation" else "dgrad"


# Only code that runs inside of the derivative rule of a layer reads it, so that no link leaves the trace that made it.
_layer: contextvars.ContextVar[Layer | None] = contextvars.ContextVar("te_jax_layer", default=None)


@contextlib.contextmanager
def layer(operation: str, links: Sequence[Array], dgrad_copy: str) -> Iterator[None]:
    """A context in which operands of kernels with these links are quantized; without effect if there is none."""
    token = _layer.set(Layer(operation, tuple(links), dgrad_copy) if links else None)
    try:
        yield
    finally:
        _layer.reset(token)


@contextlib.contextmanager
def data_read_as(copies: tuple[str, ...]) -> Iterator[None]:
    """A context in which the data of quantized arrays counts for these copies; see `Layer.data_copies`."""
    current = _layer.get()
    token = _layer.set(current and dataclasses.replace(current, data_copies=copies))
    try:
        yield
    finally:
        _layer.reset(token)


def current_layer() -> Layer | None:
    return _layer.get()


def links_of(kernels: Sequence[Any]) -> tuple[Array, ...]:
    """A link for each kernel, plain or quantized, if there is a request; else none."""
    if requested() is None:
        return ()
    return tuple(_link_p.bind(jax.tree.leaves(kernel)[0]) for kernel in kernels)


# -------------------------------------------------------------------------------------------------------- statistics

KINDS: Mapping[str, Kind] = {
    "amax_bits": "max",
    "smallest_scale": "min",
    "largest_scale": "max",
    "count": "sum",
    "nonzero": "sum",
    "underflows": "sum",
    "saturated": "sum",
    "nonfinite": "sum",
    "norm": "norm",
    "error_norm": "norm",
    "exponents": "sum",
    "row_errors": "sum",
    "rows": "sum",
    "col_errors": "sum",
    "cols": "sum",
}
"""The fields of statistics, and how those of parts of a tensor are combined; norms, as their squares may leave
float32."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """Statistics that are the same for several products.

    Attributes:
      products: "forward", "dgrad" or "wgrad".
      fields: names out of `KINDS`, in the order of the arrays.
    """

    products: tuple[str, ...]
    fields: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Tag:
    """The static part of `tag`.

    Attributes:
      operation: name of the public function.
      role: "activation", "kernel" or "gradient"; "result" for a comparison; "plain" for a layer without FP8.
      entries: statistics.
      note: for people.
    """

    operation: str
    role: str
    entries: tuple[Entry, ...] = ()
    note: str = ""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(KINDS[field] for entry in self.entries for field in entry.fields)


def tag(arrays: Sequence[Array], links: Sequence[Array], statistics: Sequence[Array], static: Tag) -> list[Array]:
    """The arrays, with statistics of them for the kernels that the links stand for.

    Args:
      arrays: at least one. The equation stays in a program where any of its results is used.
      links: of `links_of`.
      statistics: one for each field of each entry, scalars, or vectors of histograms.
      static: what they are.
    """
    return _tag_p.bind(*arrays, *links, *statistics, static=static, num_arrays=len(arrays), num_links=len(links))


def identity_of(kind: Kind, dtype: jax.typing.DTypeLike) -> np.ndarray:
    """Value that changes nothing that it is combined with."""
    if kind in ("sum", "norm"):
        return np.zeros((), dtype)
    limits: Any = jnp.iinfo(dtype) if np.issubdtype(dtype, np.integer) else None
    smallest, largest = (-np.inf, np.inf) if limits is None else (limits.min, limits.max)
    return np.asarray(smallest if kind == "max" else largest, dtype)


def combined(kind: Kind, first: Array, second: Array) -> Array:
    """The statistics of two parts together."""
    if kind == "norm":
        return reduced(kind, jnp.stack([first, second]))
    return {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}[kind](first, second)


def reduced(kind: Kind, x: Array, axis: int = 0) -> Array:
    """The statistics of all parts along an axis together."""
    if kind == "sum":
        return jnp.sum(x, axis=axis)
    if kind == "norm":
        factor = power_of_two_for(jnp.max(x, axis=axis, keepdims=True, initial=0.0))
        norm = jnp.sqrt(jnp.sum(jnp.square(x * factor), axis=axis, keepdims=True)) / factor
        return jnp.squeeze(norm, axis)
    function = jnp.max if kind == "max" else jnp.min
    return function(x, axis=axis, initial=identity_of(kind, x.dtype))


def reduced_over_devices(kind: Kind, x: Array, axes: tuple[str, ...]) -> Array:
    """The statistics of all devices along mapped axes together."""
    if kind == "norm":
        factor = power_of_two_for(lax.pmax(x, axes))
        return jnp.sqrt(lax.psum(jnp.square(x * factor), axes)) / factor
    return {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}[kind](x, axes)


def power_of_two_for(magnitude: Array) -> Array:
    """The factor that brings a float32 magnitude to between 1 and 4, exactly, as far as float32 reaches."""
    exponent = lax.bitcast_convert_type(magnitude, jnp.int32) >> 23
    return lax.bitcast_convert_type(jnp.clip(254 - exponent, 1, 253) << 23, jnp.float32)


# -------------------------------------------------------------------------------------------------------- primitives

_link_p = Primitive("te_jax_link")
_link_p.def_impl(lambda kernel: jnp.zeros((0,), jnp.float32))


@_link_p.def_abstract_eval
def _(kernel):
    sharding = kernel.sharding.update(spec=PartitionSpec(None))
    return kernel.update(shape=(0,), dtype=np.dtype(np.float32), weak_type=False, sharding=sharding)


mlir.register_lowering(
    _link_p, mlir.lower_fun(lambda kernel: jnp.zeros((0,), jnp.float32), multiple_results=False), cacheable=False
)
ad.primitive_jvps[_link_p] = lambda primals, tangents: _of_no_derivative(_link_p.bind(*primals))
batching.primitive_batchers[_link_p] = lambda operands, dims: (_link_p.bind(*operands), None)


def _of_no_derivative(x: Array) -> tuple[Array, ad.Zero]:
    return x, ad.Zero(jax.typeof(x))


_tag_p = Primitive("te_jax_observe")
_tag_p.multiple_results = True
_tag_p.def_impl(lambda *operands, num_arrays, **_: list(operands[:num_arrays]))
_tag_p.def_abstract_eval(lambda *operands, num_arrays, **_: list(operands[:num_arrays]))
mlir.register_lowering(_tag_p, lambda ctx, *operands, num_arrays, **_: operands[:num_arrays])
ad.primitive_jvps[_tag_p] = lambda primals, tangents, *, num_arrays, **static: (
    _tag_p.bind(*primals, num_arrays=num_arrays, **static),
    list(tangents[:num_arrays]),
)


def _batch_tag(operands, dims, *, static: Tag, num_arrays: int, num_links: int):
    """Examples are parts of one tensor."""
    first = num_arrays + num_links
    sizes = {x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None}
    (size,) = sizes
    mapped = any(dim is not None for dim in dims[:num_arrays])
    links = [
        link if dim is None else lax.index_in_dim(link, 0, dim, keepdims=False)
        for link, dim in zip(operands[num_arrays:first], dims[num_arrays:first], strict=True)
    ]
    repeated = {"sum": size, "norm": math.sqrt(size)}
    statistics = [
        reduced(kind, x, dim) if dim is not None else x * np.asarray(repeated.get(kind, 1) if mapped else 1, x.dtype)
        for kind, x, dim in zip(static.kinds, operands[first:], dims[first:], strict=True)
    ]
    return tag(operands[:num_arrays], links, statistics, static), dims[:num_arrays]


batching.primitive_batchers[_tag_p] = _batch_tag

LINK, TAG = _link_p.name, _tag_p.name
