"""Running a function of local arrays under every way that JAX has of splitting arrays over devices.

XLA cannot look into a custom call: on sharded operands it gathers them, silently. `per_shard` wraps a function whose
dimensions are named by an einsum-like rule, and looks at how the operands at hand are sharded:

  manual    inside `shard_map` or `pmap` the operands are local already: the function is called as it is;
  Auto      `custom_partitioning`, whose Shardy rule lets shardings flow through, calls it on the shards;
  Explicit  `shard_map` over the mesh axes that the operands' types name (`custom_partitioning` would hand its result
            back unsharded there).

Meshes that mix the three are taken apart: Explicit axes first, Auto axes inside.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Rule:
    """A rule such as "... v, ... -> ...": factors of each operand and result; "..." stands for leading dimensions."""

    text: str
    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]

    @classmethod
    def parse(cls, text: str) -> _Rule:
        left, right = (tuple(tuple(term.split()) for term in side.split(",")) for side in text.split("->"))
        return cls(text, left, right)

    def _factors(self, term: tuple[str, ...], leading: int) -> tuple[str, ...]:
        if term and term[0] == "...":
            return (*(f"...{i}" for i in range(leading)), *term[1:])
        return term

    def _leading(self, ranks: Sequence[int]) -> int:
        for term, rank in zip(self.operands, ranks, strict=True):
            if term and term[0] == "...":
                return rank - (len(term) - 1)
        return 0

    def assign(self, specs: Sequence[PartitionSpec], ranks: Sequence[int]) -> _Assignment:
        """Mesh axes of each factor. Where operands disagree the first that shards the factor decides."""
        leading = self._leading(ranks)
        axes: dict[str, Axes] = {}
        for term, spec in zip(self.operands, specs, strict=True):
            for factor, entry in zip(self._factors(term, leading), spec, strict=False):
                taken = {axis for used in axes.values() for axis in used}
                wanted = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
                if wanted and not axes.get(factor) and not taken & set(wanted):
                    axes[factor] = wanted
        return _Assignment(self, leading, axes)


@dataclasses.dataclass(frozen=True)
class _Assignment:
    rule: _Rule
    leading: int
    axes: Mapping[str, Axes]

    def _spec(self, term: tuple[str, ...]) -> PartitionSpec:
        return PartitionSpec(*(self.axes.get(f) or None for f in self.rule._factors(term, self.leading)))

    @property
    def operand_specs(self) -> tuple[PartitionSpec, ...]:
        return tuple(self._spec(term) for term in self.rule.operands)

    @property
    def result_specs(self) -> tuple[PartitionSpec, ...]:
        return tuple(self._spec(term) for term in self.rule.results)

    def only(self, keep: Callable[[str], bool]) -> dict[str, Axes]:
        return {factor: axes for factor, axes in self.axes.items() if keep(factor)}


def per_shard(rule: str, *, reduced: Sequence[str] = (), replicated: Sequence[str] = ()):
    """Decorates `function(*operands, axes, **static)`, which computes on local arrays, for use on sharded ones.

    Args:
      rule: Shardy's einsum-like notation, for example "... v, ... -> ..., ...". Factors that start a term as "..."
        are batch dimensions: `vmap` adds its own there, so the function must accept any number of them.
      reduced: factors that operands may have sharded and results lack. The function is told their mesh axes and
        combines over them by collectives; what it returns must not vary over them.
      replicated: factors that must not be sharded; operands that are get gathered.

    Returns:
      A decorator. The decorated function takes the operands, the static keyword arguments, which must be hashable, and
      `axes`, and returns a tuple. The original is given `axes`, {factor: mesh axes}, for the factors in `reduced` that
      are split right here; it should call the decorated function on its shard, without `axes`, and combine what comes
      back. Where nothing is split `axes` is empty, and it makes its native call.
    """
    parsed = _Rule.parse(rule)

    def decorate(function: Callable[..., tuple[Array, ...]]) -> Callable[..., tuple[Array, ...]]:
        @functools.cache
        def bind(static: tuple[tuple[str, Any], ...]) -> Callable[..., tuple[Array, ...]]:
            local = functools.partial(function, **dict(static))
            return _batchable(_dispatcher(local, parsed, tuple(reduced), tuple(replicated)))

        @functools.wraps(function)
        def wrapper(*operands: Array, axes: Mapping[str, Any] | None = None, **static: Any) -> tuple[Array, ...]:
            if axes:  # the caller is inside shard_map and says itself what is split
                return function(*operands, axes=axes, **static)
            return bind(tuple(sorted(static.items())))(*operands)

        return wrapper

    return decorate


def _batchable(dispatch: Callable[..., tuple[Array, ...]]) -> Callable[..., tuple[Array, ...]]:
    """Gives `dispatch` a vmap rule, which custom_partitioning lacks: one more leading dimension."""
    batchable = custom_vmap(dispatch)

    @batchable.def_vmap
    def _(axis_size, in_batched, *operands):
        whole = [
            x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
            for x, batched in zip(operands, in_batched, strict=True)
        ]
        results = batchable(*whole)
        return results, (True,) * len(results)

    return batchable


def _dispatcher(local, rule: _Rule, reduced: Axes, replicated: Axes) -> Callable[..., tuple[Array, ...]]:
    def dispatch(*operands: Array) -> tuple[Array, ...]:
        mesh = _mesh_of(operands)
        explicit = set(mesh.explicit_axes)
        if any(axis in explicit for operand in operands for axis in _axes_of(operand)):
            return over_explicit_axes(mesh, operands)
        if not mesh.empty and not mesh.auto_axes:
            return local(*operands, axes={})
        return _partitioned(local, rule, reduced, replicated, mesh)(*operands)

    def over_explicit_axes(mesh, operands: tuple[Array, ...]) -> tuple[Array, ...]:
        assignment = rule.assign([jax.typeof(x).sharding.spec for x in operands], [x.ndim for x in operands])
        assignment = dataclasses.replace(assignment, axes=assignment.only(lambda factor: factor not in replicated))
        axes = assignment.only(lambda factor: factor in reduced)
        specs = assignment.operand_specs

        def shards(*local_operands: Array) -> tuple[Array, ...]:
            return local(*local_operands, axes=axes) if axes else dispatch(*local_operands)

        return jax.shard_map(
            shards,
            mesh=mesh,
            in_specs=specs,
            out_specs=assignment.result_specs,
            axis_names=set(mesh.explicit_axes),
        )(*(jax.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(operands, specs, strict=True)))

    return dispatch


def _partitioned(local, rule: _Rule, reduced: Axes, replicated: Axes, trace_mesh) -> Callable[..., tuple[Array, ...]]:
    @custom_partitioning
    def whole(*operands: Array) -> tuple[Array, ...]:
        return local(*operands, axes={})

    def partition(mesh, operand_shapes, result_shapes):
        del result_shapes
        whole_mesh, mesh, specs = _decode(mesh, trace_mesh, operand_shapes)
        assignment = rule.assign(specs, [len(x.shape) for x in operand_shapes])
        assignment = dataclasses.replace(assignment, axes=assignment.only(lambda factor: factor not in replicated))
        axes = assignment.only(lambda factor: factor in reduced)

        def shards(*operands: Array) -> tuple[Array, ...]:
            return local(*operands, axes=axes)

        return (
            whole_mesh,
            shards,
            tuple(NamedSharding(mesh, spec) for spec in assignment.result_specs),
            tuple(NamedSharding(mesh, spec) for spec in assignment.operand_specs),
        )

    whole.def_partition(partition, sharding_rule=rule.text, need_replication_factors=replicated)
    return whole


def _decode(mesh: Mesh, trace_mesh, operands) -> tuple[Mesh, Mesh, list[PartitionSpec]]:
    """(mesh of all devices, mesh that the shardings speak of, specs) of a partitioning callback's operands.

    Inside a partly manual shard_map JAX passes no mesh, and shardings over groups of devices that differ in the Auto
    axes only. The mesh is then the one seen while tracing, and JAX's own decoder reads the shardings.
    """
    if not mesh.empty:
        return mesh, mesh, [operand.sharding.spec for operand in operands]
    from jax._src.sharding_impls import parse_flatten_op_sharding

    # Only positions matter: XLA numbers the devices of a mesh in the order of the mesh.
    def mesh_of(axes: Sequence[str]) -> Mesh:
        sizes = [trace_mesh.shape[axis] for axis in axes]
        return Mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), tuple(axes))

    group = mesh_of([axis for axis in trace_mesh.axis_names if axis in trace_mesh.auto_axes])
    specs = [parse_flatten_op_sharding(operand.sharding._hlo_sharding, group)[0] for operand in operands]
    return mesh_of(trace_mesh.axis_names), group, specs


def _axes_of(operand: Array) -> tuple[str, ...]:
    spec = jax.typeof(operand).sharding.spec
    return tuple(axis for entry in spec if entry is not None for axis in ((entry,) if isinstance(entry, str) else entry))


def _mesh_of(operands: Sequence[Array]):
    """The mesh that the operands' types name, or the one of the context."""
    for operand in operands:
        mesh = jax.typeof(operand).sharding.mesh
        if not mesh.empty:
            return mesh
    return jax.sharding.get_abstract_mesh()
