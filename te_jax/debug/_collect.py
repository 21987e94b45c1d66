"""Statistics out of a function: its jaxpr is evaluated, and what its tags carry becomes further results.

Equations without tags run as they are. Those that contain some (`jit`, `checkpoint`, `scan`, `while`, `cond`,
`shard_map`) are made anew, with statistics as further results. Kernels are followed from the arguments to the tags,
through casts, layouts and collectives, and give the layers their names.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun

from te_jax import sharding
from te_jax._core import observe
from te_jax._core.jaxprs import CALLS, CHECKPOINTS
from te_jax.debug._sources import Source, Sources, function_of, scan_parts


@dataclasses.dataclass(frozen=True)
class Record:
    """What one tag carries about one layer.

    Attributes:
      source: of its kernel.
      static: of the tag.
      order: its place among all tags, in the order in which they are computed.
      scope: names of the user's functions around it.
      loops: those loops around it, the innermost first, of which each iteration has a kernel of its own, as `id` of
        their equations; and whether they run backwards.
      statistics: [*loops] for each field of the tag.
    """

    source: Source
    static: observe.Tag
    order: int
    scope: str
    loops: tuple[tuple[int, bool], ...]
    statistics: tuple[Array, ...]


class Found(NamedTuple):
    """The results of a jaxpr, and where each comes from."""

    results: list[Any]
    sources: list[Source | None]


def evaluate(closed: Any, operands: Sequence[Any], sources: Sequence[Source | None]) -> tuple[list[Any], list[Record]]:
    """The results of a jaxpr, and the records of its tags.

    Raises:
      NotImplementedError: a tag is in an equation that is none of those above.
    """
    run, records = _Run(), []
    found = run.evaluate(*_opened(closed), operands, sources, records, recomputed=False)
    return found.results, records


class _Run:
    """One evaluation."""

    def __init__(self) -> None:
        self.sources = Sources()
        self.order = itertools.count()
        self._tagged: dict[int, tuple[Any, bool]] = {}

    def evaluate(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        operands: Sequence[Any],
        sources: Sequence[Source | None],
        records: list[Record],
        *,
        recomputed: bool,
    ) -> Found:
        """The results of a jaxpr.

        Args:
          jaxpr, consts: what is evaluated.
          operands, sources: of its arguments.
          records: gets those of tags.
          recomputed: whether tags of a forward pass were there before.
        """
        values: dict[Var, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *operands), strict=True))
        origins: dict[Var, Source | None] = {var: self.sources.known(None, var) for var in jaxpr.constvars}
        origins |= {var: self.sources.known(source, var) for var, source in zip(jaxpr.invars, sources, strict=True)}
        uses = collections.Counter(_variables(jaxpr.outvars))
        for eqn in jaxpr.eqns:
            uses.update(_variables(eqn.invars))
        waiting: list[Any] = []

        def source_of(atom: Any) -> Source | None:
            return None if isinstance(atom, Literal) else origins[atom]

        for eqn in jaxpr.eqns:
            of_operands = [source_of(atom) for atom in eqn.invars]
            if not self._has_tags(eqn):
                waiting.append(eqn)
                origins.update(zip(eqn.outvars, self.sources.of_results(eqn, of_operands), strict=True))
                continue
            _run_plain(jaxpr, waiting, uses, values)
            waiting = []
            arguments = [atom.val if isinstance(atom, Literal) else values[atom] for atom in eqn.invars]
            with eqn.ctx.manager:
                found = self._apply(eqn, arguments, of_operands, records, recomputed)
            values.update(zip(eqn.outvars, found.results, strict=True))
            known = map(self.sources.known, found.sources, eqn.outvars)
            origins.update(zip(eqn.outvars, known, strict=True))
        _run_plain(jaxpr, waiting, uses, values)
        results = [atom.val if isinstance(atom, Literal) else values[atom] for atom in jaxpr.outvars]
        return Found(results, [source_of(atom) for atom in jaxpr.outvars])

    def _has_tags(self, eqn: Any) -> bool:
        return eqn.primitive.name == observe.TAG or any(self._is_tagged(jaxpr) for jaxpr in _inner(eqn))

    def _is_tagged(self, jaxpr: Jaxpr) -> bool:
        if id(jaxpr) not in self._tagged:
            self._tagged[id(jaxpr)] = jaxpr, any(map(self._has_tags, jaxpr.eqns))
        return self._tagged[id(jaxpr)][1]

    def _apply(self, eqn: Any, arguments, sources, records: list[Record], recomputed: bool) -> Found:
        rule = _RULES.get(eqn.primitive.name)
        if rule is None:
            raise NotImplementedError(
                f"a layer in FP8 is called inside of {eqn.primitive.name}, out of which te_jax.debug takes no "
                "statistics: call it in jit, checkpoint, scan, while_loop, cond or shard_map, or leave it out of "
                "function"
            )
        return rule(self, eqn, arguments, sources, records, recomputed)

    def _tag(self, eqn: Any, arguments, sources, records: list[Record], recomputed: bool) -> Found:
        static, count = eqn.params["static"], eqn.params["num_arrays"]
        first = count + eqn.params["num_links"]
        links: list[Source] = [source or self.sources.new() for source in sources[count:first]]
        forward = static.role == "plain" or any("forward" in entry.products for entry in static.entries)
        if (static.entries or static.role == "plain") and not (recomputed and forward):
            scope = _scope(eqn.source_info.name_stack)
            statistics = tuple(map(jnp.asarray, arguments[first:]))
            for source in dict.fromkeys(links):
                records.append(Record(source, static, next(self.order), scope, (), statistics))
        of_results = [links[0]] * count if static.role == "kernel" and links else sources[:count]
        return Found(list(arguments[:count]), list(of_results))

    # ------------------------------------------------------------------------------------------------- functions

    def _inlined(self, eqn: Any, arguments, sources, records: list[Record], recomputed: bool) -> Found:
        jaxpr, consts = _opened(function_of(eqn))
        arguments = _constrained(arguments, eqn.params.get("in_shardings"))
        # Rules of derivatives are traced for operands that vary over the same mesh axes.
        types: list[Any] = [var.aval for var in jaxpr.invars]
        arguments = [
            sharding.varying_over(x, type_.manual_axis_type.varying) if hasattr(type_, "manual_axis_type") else x
            for type_, x in zip(types, arguments, strict=True)
        ]
        found = self.evaluate(jaxpr, consts, arguments, sources, records, recomputed=recomputed)
        return found._replace(results=_constrained(found.results, eqn.params.get("out_shardings")))

    def _inside(self, inner: Any, sources, recomputed: bool) -> tuple[Callable[..., Any], _Traced]:
        """A function with the results of a jaxpr and the statistics of its tags, and what is known once it is
        traced."""
        traced = _Traced()

        def function(*arrays: Array) -> tuple[list[Any], list[tuple[Array, ...]]]:
            traced.records = []
            found = self.evaluate(*_opened(inner), arrays, sources, traced.records, recomputed=recomputed)
            traced.sources = found.sources
            return found.results, [record.statistics for record in traced.records]

        return function, traced

    def _checkpoint(self, eqn: Any, arguments, sources, records: list[Record], recomputed: bool) -> Found:
        inner = eqn.params["jaxpr"]
        again = recomputed or eqn.params["differentiated"]
        function, traced = self._inside(inner, sources, again)
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        jaxpr = closed.jaxpr.replace(
            constvars=[],
            invars=[*closed.jaxpr.constvars, *closed.jaxpr.invars],
            debug_info=closed.jaxpr.debug_info.with_unknown_names(),
        )
        made = ClosedJaxpr(jaxpr, ()) if isinstance(inner, ClosedJaxpr) else jaxpr
        leaves = eqn.primitive.bind(*closed.consts, *arguments, **{**eqn.params, "jaxpr": made})
        results, statistics = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
        records += traced.with_statistics(statistics)
        return Found(list(results), traced.sources)

    def _cond(self, eqn: Any, arguments, sources, records: list[Record], recomputed: bool) -> Found:
        index, *operands = arguments
        branches, each, closed_branches = eqn.params["branches"], [], []
        for branch in branches:
            function, traced = self._inside(branch, sources[1:], recomputed)
            closed_branches.append(jax.make_jaxpr(function, return_shape=True)(*operands))
            each.append(traced)
        counts = [len(traced.records) for traced in each]
        types = [_statistics_types(closed, shapes) for closed, shapes in closed_branches]

        def taken(place: int) -> Callable[..., Any]:
            closed, shapes = closed_branches[place]

            def function(*arrays: Array) -> Any:
                leaves = jaxpr_as_fun(closed)(*arrays)
                results, statistics = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
                parts = [
                    list(statistics) if other == place else traced.identities(types[other])
                    for other, traced in enumerate(each)
                ]
                return results, list(itertools.chain(*parts))

            return function

        results, statistics = lax.switch(index, [taken(place) for place in range(len(branches))], *operands)
        ends = list(itertools.accumulate(counts))
        for traced, end, count in zip(each, ends, counts, strict=True):
            records += traced.with_statistics(statistics[end - count : end])
        of_results = [
            of[0] if of[0] is not None and len(set(of)) == 1 else None
            for of in zip(*(traced.sources for traced in each), strict=True)
        ]
        return Found(list(results), of_results)

    def _scan(self, eqn: Any, arguments, sources, records: list[Record], recomputed: bool) -> Found:
        inner, loop = eqn.params["jaxpr"], id(eqn)
        first, last = scan_parts(eqn)
        inside = self.sources.in_scan(eqn, sources)
        function, traced = self._inside(inner, inside, recomputed)

        def body(carry: Any, xs: Any) -> Any:
            results, statistics = function(*arguments[:first], *carry, *xs)
            return results[: last - first], (results[last - first :], statistics)

        options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        options |= {name: eqn.params[name] for name in ("_split_transpose",) if name in eqn.params}
        carry, (ys, statistics) = lax.scan(body, list(arguments[first:last]), list(arguments[last:]), **options)
        for record in traced.with_statistics(statistics):
            if loop in record.source.loops:
                loops = (*record.loops, (loop, bool(eqn.params["reverse"])))
                records.append(dataclasses.replace(record, loops=loops))
            else:
                records.append(_reduced(record))
        return Found([*carry, *ys], self.sources.out_of_scan(eqn, sources, traced.sources))

    def _while(self, eqn: Any, arguments, sources, records: list[Record], recomputed: bool) -> Found:
        of_cond, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        first = of_cond + of_body
        cond_consts, body_consts, carry = arguments[:of_cond], arguments[of_cond:first], arguments[first:]
        inside = [*sources[of_cond:first], *self.sources.carried(eqn.params["body_jaxpr"], of_body, sources[first:])]
        function, traced = self._inside(eqn.params["body_jaxpr"], inside, recomputed)
        types = _statistics_types(*jax.make_jaxpr(function, return_shape=True)(*body_consts, *carry))
        condition = jaxpr_as_fun(eqn.params["cond_jaxpr"])

        def body(carried: Any) -> Any:
            values, before = carried
            results, statistics = function(*body_consts, *values)
            return list(results), traced.combined(before, statistics)

        initial = list(carry), traced.identities(types)
        results, statistics = lax.while_loop(lambda carried: condition(*cond_consts, *carried[0])[0], body, initial)
        for record in traced.with_statistics(statistics):
            records.append(record)
        return Found(list(results), self.sources.carried(eqn.params["body_jaxpr"], of_body, sources[first:]))

    def _shard_map(self, eqn: Any, arguments, sources, records: list[Record], recomputed: bool) -> Found:
        function, traced = self._inside(eqn.params["jaxpr"], sources, recomputed)
        axes = eqn.params["newly_manual_axes"]
        names = tuple(sorted(axes, key=str))

        def local(*arrays: Array) -> Any:
            results, statistics = function(*arrays)
            if eqn.params["check_vma"]:
                statistics = jax.tree.map(lambda x: sharding.varying_over(x, axes), statistics)
            return tuple(results), traced.over_devices(statistics, names)

        specs, (in_specs, out_specs) = jax.sharding.PartitionSpec(), _specs(eqn)
        mapped = jax.shard_map(
            local,
            mesh=eqn.params["mesh"],
            in_specs=in_specs,
            out_specs=(out_specs, specs),
            axis_names=axes,
            check_vma=eqn.params["check_vma"],
        )
        results, statistics = mapped(*arguments)
        records += traced.with_statistics(statistics)
        return Found(list(results), traced.sources)


class _Traced:
    """What is known of a function of `_Run._inside` once it is traced.

    Attributes:
      records: of its tags, with statistics of the trace.
      sources: of its results.
    """

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.sources: list[Source | None] = []

    def with_statistics(self, statistics: Sequence[Sequence[Array]]) -> list[Record]:
        """The records, with what came out of the function."""
        return [
            dataclasses.replace(record, statistics=tuple(arrays))
            for record, arrays in zip(self.records, statistics, strict=True)
        ]

    def identities(self, types: Sequence[Any]) -> list[tuple[Array, ...]]:
        """Statistics of nothing, of given types."""
        left = iter(types)

        def identity(kind: observe.Kind) -> Array:
            type_ = next(left)
            value = jnp.full(type_.shape, observe.identity_of(kind, type_.dtype), type_.dtype)
            return sharding.varying_over(value, type_.manual_axis_type.varying)

        return [tuple(map(identity, record.static.kinds)) for record in self.records]

    def combined(self, first: Any, second: Any) -> list[tuple[Array, ...]]:
        return [
            tuple(map(observe.combined, record.static.kinds, one, other))
            for record, one, other in zip(self.records, first, second, strict=True)
        ]

    def over_devices(self, statistics: Any, axes: tuple[str, ...]) -> list[tuple[Array, ...]]:
        """Statistics of all devices, by one collective for each kind."""
        kinds: list[observe.Kind] = [kind for record in self.records for kind in record.static.kinds]
        leaves, structure = jax.tree.flatten(statistics)
        for kind in dict.fromkeys(kinds if axes else ()):
            for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
                places = [i for i, leaf in enumerate(leaves) if kinds[i] == kind and leaf.dtype == dtype]
                if not places:
                    continue
                flat = jnp.concatenate([leaves[i].reshape(-1) for i in places])
                flat = observe.reduced_over_devices(kind, flat, axes)
                ends = np.cumsum([leaves[i].size for i in places])
                for i, part in zip(places, jnp.split(flat, ends[:-1]), strict=True):
                    leaves[i] = part.reshape(leaves[i].shape)
        return jax.tree.unflatten(structure, leaves)


def _reduced(record: Record) -> Record:
    """All iterations of a loop together."""
    statistics = tuple(map(observe.reduced, record.static.kinds, record.statistics))
    return dataclasses.replace(record, statistics=statistics)


_RULES: dict[str, Callable[..., Found]] = {
    observe.TAG: _Run._tag,
    **dict.fromkeys(CALLS, _Run._inlined),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_vmap_call"), _Run._inlined),
    **dict.fromkeys(CHECKPOINTS, _Run._checkpoint),
    "cond": _Run._cond,
    "scan": _Run._scan,
    "while": _Run._while,
    "shard_map": _Run._shard_map,
}


def _run_plain(jaxpr: Jaxpr, eqns: list[Any], uses: Any, values: dict[Var, Any]) -> None:
    """Runs equations as they are, together."""
    inside = collections.Counter(var for eqn in eqns for var in _variables(eqn.invars))
    made = dict.fromkeys(var for eqn in eqns for var in eqn.outvars)
    read = [var for var in inside if var not in made]
    kept = [var for var in made if uses[var] > inside[var]]
    effects = any(eqn.effects for eqn in eqns)
    if kept or effects:
        names = jaxpr.debug_info.with_unknown_names()
        part = jaxpr.replace(constvars=[], invars=read, outvars=kept, eqns=eqns, debug_info=names)
        results = jaxpr_as_fun(ClosedJaxpr(part, ()))(*(values[var] for var in read))
        values.update(zip(kept, results, strict=True))


def _statistics_types(closed: ClosedJaxpr, shapes: Any) -> list[Any]:
    results, statistics = shapes
    return closed.out_avals[len(jax.tree.leaves(results)) :] if jax.tree.leaves(statistics) else []


def _constrained(values: Sequence[Any], shardings: Any) -> list[Any]:
    """Values with the shardings that a jit was given for them."""
    if shardings is None:
        return list(values)
    return [
        lax.with_sharding_constraint(value, sharding) if isinstance(sharding, jax.sharding.Sharding) else value
        for value, sharding in zip(values, shardings, strict=True)
    ]


def _specs(eqn: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return tuple(eqn.params["in_specs"]), tuple(eqn.params["out_specs"])


def _opened(jaxpr: Any) -> tuple[Jaxpr, Sequence[Any]]:
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, ClosedJaxpr) else (jaxpr, ())


def _inner(eqn: Any) -> list[Jaxpr]:
    """The jaxprs of an equation."""
    leaves = jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: isinstance(x, Jaxpr | ClosedJaxpr))
    return [_opened(leaf)[0] for leaf in leaves if isinstance(leaf, Jaxpr | ClosedJaxpr)]


def _variables(atoms: Sequence[Any]) -> list[Var]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


_WRAPPERS = re.compile(r"\b(?:jvp|transpose|vmap|remat|checkpoint|rematted_computation|jit|pjit|shard_map)\b\(?|[()]")


def _scope(name_stack: Any) -> str:
    """The user's names in a name stack, without those that transformations add."""
    parts = (_WRAPPERS.sub("", part) for part in str(name_stack).split("/"))
    return "/".join(part for part in parts if part)
