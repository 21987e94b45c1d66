"""Statistics out of a function: its jaxpr is evaluated, and what its tags carry becomes further results.

Equations without tags run as they are. Those that contain some (`jit`, `checkpoint`, `scan`, `while`, `cond`,
`shard_map`) are made anew, with statistics as further results. Kernels are followed from the arguments to the tags,
through casts, layouts and collectives, and give the layers their names.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from te_jax import sharding
from te_jax._core import jaxprs, observe
from te_jax.debug._sources import Source, Sources


@dataclasses.dataclass(frozen=True)
class Record:
    """Content of one tag about one layer.

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

    results: list[Array]
    sources: list[Source | None]


def evaluate(
    closed: ClosedJaxpr, operands: Sequence[Array], sources: Sequence[Source | None]
) -> tuple[list[Array], list[Record]]:
    """The results of a jaxpr, and the records of its tags.

    Raises:
      NotImplementedError: a tag is in an equation that is none of those above.
    """
    run, records = _Run(), []
    evaluated = run.evaluate(closed, operands, sources, records, recomputed=False)
    return evaluated.results, records


class _Run:
    """One evaluation."""

    def __init__(self) -> None:
        self.sources = Sources()
        self.order = itertools.count()
        self._tagged: dict[int, tuple[Jaxpr, bool]] = {}

    def evaluate(self, jaxpr: jaxprs.Program, operands, sources, records: list[Record], recomputed: bool) -> Found:
        """The results of a jaxpr.

        Args:
          operands, sources: of its arguments.
          records: gets those of tags.
          recomputed: whether tags of a forward pass were there before.
        """
        values = jaxprs.Values(jaxpr, operands)
        jaxpr = values.jaxpr
        origins: dict[Var, Source | None] = {var: self.sources.known(None, var) for var in jaxpr.constvars}
        origins |= {var: self.sources.known(source, var) for var, source in zip(jaxpr.invars, sources, strict=True)}

        def source_of(atom: jaxprs.Atom) -> Source | None:
            return None if isinstance(atom, Literal) else origins[atom]

        for eqn in jaxpr.eqns:
            of_operands = [source_of(atom) for atom in eqn.invars]
            if self._has_tags(eqn):
                arguments = values.read(eqn.invars)
                with eqn.ctx.manager:
                    results, result_sources = self._apply(eqn, arguments, of_operands, records, recomputed)
                values.write(eqn, results)
                of_results = map(self.sources.known, result_sources, eqn.outvars)
            else:
                values.postpone(eqn)
                of_results = self.sources.of_results(eqn, of_operands)
            origins.update(zip(eqn.outvars, of_results, strict=True))
        return Found(values.read(jaxpr.outvars), [source_of(atom) for atom in jaxpr.outvars])

    def _has_tags(self, eqn: JaxprEqn) -> bool:
        return eqn.primitive.name == observe.TAG or any(map(self._is_tagged, jaxprs.inner(eqn)))

    def _is_tagged(self, jaxpr: Jaxpr) -> bool:
        if id(jaxpr) not in self._tagged:
            self._tagged[id(jaxpr)] = jaxpr, any(map(self._has_tags, jaxpr.eqns))
        return self._tagged[id(jaxpr)][1]

    def _apply(self, eqn: JaxprEqn, arguments, sources, records: list[Record], recomputed: bool) -> Found:
        rule = _RULES.get(eqn.primitive.name)
        if rule is None:
            raise NotImplementedError(
                f"a layer in FP8 is called inside of {eqn.primitive.name}, out of which te_jax.debug takes no "
                "statistics: call it in jit, checkpoint, scan, while_loop, cond or shard_map, or leave it out of "
                "function"
            )
        return rule(self, eqn, arguments, sources, records, recomputed)

    def _tag(self, eqn: JaxprEqn, arguments, sources, records: list[Record], recomputed: bool) -> Found:
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

    def _inlined(self, eqn: JaxprEqn, arguments, sources, records: list[Record], recomputed: bool) -> Found:
        closed = jaxprs.called(eqn)
        arguments = _constrained(arguments, eqn.params.get("in_shardings"))
        # Rules of derivatives are traced for operands that vary over the same mesh axes.
        types = [jaxprs.type_of(var) for var in jaxprs.opened(closed)[0].invars]
        arguments = [
            sharding.varying_over(x, type_.manual_axis_type.varying) if hasattr(type_, "manual_axis_type") else x
            for type_, x in zip(types, arguments, strict=True)
        ]
        evaluated = self.evaluate(closed, arguments, sources, records, recomputed)
        return evaluated._replace(results=_constrained(evaluated.results, eqn.params.get("out_shardings")))

    def _inside(self, inner: jaxprs.Program, sources, recomputed: bool) -> tuple[Callable[..., list[Array]], _Traced]:
        """A function of a jaxpr's results and then its tags' statistics, and what is known once it is traced."""
        traced = _Traced()

        def function(*arrays: Array) -> list[Array]:
            traced.records = []
            evaluated = self.evaluate(inner, arrays, sources, traced.records, recomputed)
            traced.sources = evaluated.sources
            return [*evaluated.results, *(x for record in traced.records for x in record.statistics)]

        return function, traced

    def _checkpoint(self, eqn: JaxprEqn, arguments, sources, records: list[Record], recomputed: bool) -> Found:
        inner = eqn.params["jaxpr"]
        function, traced = self._inside(inner, sources, recomputed or eqn.params["differentiated"])
        closed = jax.make_jaxpr(function)(*arguments)
        jaxpr = closed.jaxpr.replace(
            constvars=[],
            invars=[*closed.jaxpr.constvars, *closed.jaxpr.invars],
            debug_info=closed.jaxpr.debug_info.with_unknown_names(),
        )
        made = ClosedJaxpr(jaxpr, ()) if isinstance(inner, ClosedJaxpr) else jaxpr
        leaves = eqn.primitive.bind(*closed.consts, *arguments, **{**eqn.params, "jaxpr": made})
        records += traced.with_statistics(leaves[len(eqn.outvars) :])
        return Found(leaves[: len(eqn.outvars)], traced.sources)

    def _cond(self, eqn: JaxprEqn, arguments, sources, records: list[Record], recomputed: bool) -> Found:
        index, *operands = arguments
        count, each, closed_branches = len(eqn.outvars), [], []
        for branch in eqn.params["branches"]:
            function, traced = self._inside(branch, sources[1:], recomputed)
            closed_branches.append(jax.make_jaxpr(function)(*operands))
            each.append(traced)

        def taken(place: int) -> Callable[..., list[Array]]:
            def function(*arrays: Array) -> list[Array]:
                leaves = jaxpr_as_fun(closed_branches[place])(*arrays)
                parts = [
                    leaves[count:] if other == place else traced.identities(closed_branches[other].out_avals[count:])
                    for other, traced in enumerate(each)
                ]
                return [*leaves[:count], *itertools.chain(*parts)]

            return function

        leaves = lax.switch(index, list(map(taken, range(len(each)))), *operands)
        statistics = iter(leaves[count:])
        for traced in each:
            records += traced.with_statistics(statistics)
        of_results = [
            of[0] if of[0] is not None and len(set(of)) == 1 else None
            for of in zip(*(traced.sources for traced in each), strict=True)
        ]
        return Found(leaves[:count], of_results)

    def _scan(self, eqn: JaxprEqn, arguments, sources, records: list[Record], recomputed: bool) -> Found:
        loop, count = id(eqn), len(eqn.outvars)
        function, traced = self._inside(eqn.params["jaxpr"], self.sources.in_scan(eqn, sources), recomputed)
        leaves = jaxprs.remade(eqn, function, arguments)
        for record in traced.with_statistics(leaves[count:]):
            if loop in record.source.loops:
                loops = (*record.loops, (loop, bool(eqn.params["reverse"])))
                records.append(dataclasses.replace(record, loops=loops))
            else:
                statistics = tuple(map(observe.reduced, record.static.kinds, record.statistics))
                records.append(dataclasses.replace(record, statistics=statistics))
        return Found(leaves[:count], self.sources.out_of_scan(eqn, sources, traced.sources))

    def _while(self, eqn: JaxprEqn, arguments, sources, records: list[Record], recomputed: bool) -> Found:
        of_cond, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        first, count = of_cond + of_body, len(eqn.outvars)
        cond_consts, body_consts, carry = arguments[:of_cond], arguments[of_cond:first], arguments[first:]
        inside = [*sources[of_cond:first], *self.sources.carried(eqn.params["body_jaxpr"], of_body, sources[first:])]
        function, traced = self._inside(eqn.params["body_jaxpr"], inside, recomputed)
        types = jax.make_jaxpr(function)(*body_consts, *carry).out_avals[count:]
        condition = jaxpr_as_fun(eqn.params["cond_jaxpr"])

        def body(carried: tuple[list[Array], list[Array]]) -> tuple[list[Array], list[Array]]:
            values, before = carried
            leaves = function(*body_consts, *values)
            return leaves[:count], traced.combined(before, leaves[count:])

        initial = list(carry), traced.identities(types)
        results, statistics = lax.while_loop(lambda carried: condition(*cond_consts, *carried[0])[0], body, initial)
        records += traced.with_statistics(statistics)
        return Found(results, self.sources.carried(eqn.params["body_jaxpr"], of_body, sources[first:]))

    def _shard_map(self, eqn: JaxprEqn, arguments, sources, records: list[Record], recomputed: bool) -> Found:
        function, traced = self._inside(eqn.params["jaxpr"], sources, recomputed)
        axes, count = eqn.params["newly_manual_axes"], len(eqn.outvars)

        def local(*arrays: Array) -> list[Array]:
            leaves = function(*arrays)
            if eqn.params["check_vma"]:
                leaves[count:] = [sharding.varying_over(x, axes) for x in leaves[count:]]
            return [*leaves[:count], *traced.over_devices(leaves[count:], tuple(sorted(axes, key=str)))]

        leaves = jaxprs.remade(eqn, local, arguments)
        records += traced.with_statistics(leaves[count:])
        return Found(leaves[:count], traced.sources)


class _Traced:
    """Records and sources of a function of `_Run._inside`, once it is traced.

    Attributes:
      records: of its tags, with statistics of the trace.
      sources: of its results.
    """

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.sources: list[Source | None] = []

    @property
    def kinds(self) -> list[observe.Kind]:
        return [kind for record in self.records for kind in record.static.kinds]

    def with_statistics(self, statistics: Iterable[Array]) -> list[Record]:
        """The records, with what came out of the function."""
        left = iter(statistics)
        return [
            dataclasses.replace(record, statistics=tuple(itertools.islice(left, len(record.statistics))))
            for record in self.records
        ]

    def identities(self, types: Sequence[ShapedArray]) -> list[Array]:
        """Statistics of nothing, of given types."""
        pairs = zip(self.kinds, types, strict=True)
        values = [jnp.full(type_.shape, observe.identity_of(kind, type_.dtype), type_.dtype) for kind, type_ in pairs]
        axes = (type_.manual_axis_type.varying for type_ in types)
        return list(map(sharding.varying_over, values, axes))

    def combined(self, first: Sequence[Array], second: Sequence[Array]) -> list[Array]:
        return list(map(observe.combined, self.kinds, first, second))

    def over_devices(self, statistics: Sequence[Array], axes: tuple[str, ...]) -> list[Array]:
        """Statistics of all devices, by one collective for each kind."""
        kinds, leaves = self.kinds, list(statistics)
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
        return leaves


_RULES: dict[str, Callable[..., Found]] = {
    observe.TAG: _Run._tag,
    **dict.fromkeys((*jaxprs.CALLS, *jaxprs.CUSTOM_DERIVATIVES, "custom_vmap_call"), _Run._inlined),
    **dict.fromkeys(jaxprs.CHECKPOINTS, _Run._checkpoint),
    "cond": _Run._cond,
    "scan": _Run._scan,
    "while": _Run._while,
    "shard_map": _Run._shard_map,
}


def _constrained(values: Sequence[Array], shardings: Sequence[object] | None) -> list[Array]:
    """Values with the shardings that a jit was given for them."""
    if shardings is None:
        return list(values)
    return [
        lax.with_sharding_constraint(value, sharding) if isinstance(sharding, jax.sharding.Sharding) else value
        for value, sharding in zip(values, shardings, strict=True)
    ]


_WRAPPERS = re.compile(r"\b(?:jvp|transpose|vmap|remat|checkpoint|rematted_computation|jit|pjit|shard_map)\b\(?|[()]")


def _scope(name_stack: object) -> str:
    """The user's names in a name stack, without those that transformations add."""
    parts = (_WRAPPERS.sub("", part) for part in str(name_stack).split("/"))
    return "/".join(part for part in parts if part)
