"""Where values of a jaxpr come from: kernels, followed from the arguments of a function."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Sequence

from jax.extend.core import JaxprEqn, Literal, Var

from te_jax._core import jaxprs, observe


@dataclasses.dataclass(frozen=True)
class Source:
    """The origin of a value.

    Attributes:
      key: what is the same for all values of one origin.
      name: of the argument that it comes from; None if that is not known.
      index: along the first dimension of that, if only a part comes from there.
      loops: of which each iteration has a part of its own, as `id` of their equations.
      repeated: how many loops have stacked it, each of whose iterations had the same value.
    """

    key: Hashable
    name: str | None = None
    index: tuple[int, ...] = ()
    loops: tuple[int, ...] = ()
    repeated: int = 0

    @property
    def layer(self) -> tuple[Hashable, tuple[int, ...]]:
        """Identity that all values of one layer share."""
        return self.key, self.index


_SAME = {
    *(*jaxprs.IDENTITIES, *jaxprs.LAYOUTS, *jaxprs.MOVES, "all_gather_reduced", "layout_constraint", "device_put"),
    *("copy_p", "stop_gradient", "pcast", "reduce_precision", "convert_element_type", "bitcast_convert_type"),
    *("te_reverse_mode_only", "te_on_one_device"),
}
_FUNCTIONS = {*jaxprs.CALLS, *jaxprs.CHECKPOINTS, *jaxprs.CUSTOM_DERIVATIVES, "custom_vmap_call", "shard_map"}


class Sources:
    """Follows values through equations."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def new(self) -> Source:
        """Source of a value that comes from nowhere."""
        return Source(next(self._numbers))

    def known(self, source: Source | None, var: Var) -> Source | None:
        """The source, or a new one for what may be a kernel."""
        return self.new() if source is None and getattr(var.aval, "ndim", 0) >= 2 else source

    def of_results(self, eqn: JaxprEqn, sources: Sequence[Source | None]) -> list[Source | None]:
        """The sources of the results of an equation."""
        followed = self._followed(eqn, sources)
        return [self.known(source, var) for source, var in zip(followed, eqn.outvars, strict=True)]

    def _followed(self, eqn: JaxprEqn, sources: Sequence[Source | None]) -> list[Source | None]:
        name, count = eqn.primitive.name, len(eqn.outvars)
        if name == observe.LINK:
            return [sources[0]]
        if name in ("mul", "div"):
            return [sources[0] if _is_number(eqn.invars[1]) else sources[1] if _is_number(eqn.invars[0]) else None]
        if name in _SAME:
            return [*sources, *(None,) * count][:count]
        if name in ("slice", "dynamic_slice"):
            return [_sliced(eqn, sources)]
        if name == "split":
            return _split(eqn, sources[0])
        if name in ("concatenate", "stack"):
            return [_joined(sources)]
        if name in _FUNCTIONS:
            return self._through(jaxprs.called(eqn), sources)
        if name == "scan":
            inside = self.in_scan(eqn, sources)
            return self.out_of_scan(eqn, sources, self._through(eqn.params["jaxpr"], inside))
        if name == "while":
            consts = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
            return self.carried(eqn.params["body_jaxpr"], eqn.params["body_nconsts"], sources[consts:])
        if name == "cond":
            each = [self._through(branch, sources[1:]) for branch in eqn.params["branches"]]
            return [of[0] if len(set(of)) == 1 else None for of in zip(*each, strict=True)]
        return [None] * count

    def _through(self, jaxpr: jaxprs.Program, sources: Sequence[Source | None]) -> list[Source | None]:
        """The sources of the results of a jaxpr."""
        opened, _ = jaxprs.opened(jaxpr)
        origins: dict[Var, Source | None] = dict(zip(opened.invars, sources, strict=True))
        for eqn in opened.eqns:
            of_operands = [None if isinstance(atom, Literal) else origins.get(atom) for atom in eqn.invars]
            if any(source is not None for source in of_operands):
                origins.update(zip(eqn.outvars, self._followed(eqn, of_operands), strict=True))
        return [None if isinstance(atom, Literal) else origins.get(atom) for atom in opened.outvars]

    # ---------------------------------------------------------------------------------------------------- loops

    def in_scan(self, eqn: JaxprEqn, sources: Sequence[Source | None]) -> list[Source | None]:
        """The sources of what the body of a scan reads."""
        first, last = jaxprs.scan_parts(eqn)

        def part(source: Source | None) -> Source | None:
            if source is None:
                return None
            if source.repeated:
                return dataclasses.replace(source, repeated=source.repeated - 1)
            return dataclasses.replace(source, loops=(*source.loops, id(eqn)))

        carried = self.carried(eqn.params["jaxpr"], first, sources[first:last])
        return [*sources[:first], *carried, *map(part, sources[last:])]

    def out_of_scan(
        self, eqn: JaxprEqn, sources: Sequence[Source | None], inside: Sequence[Source | None]
    ) -> list[Source | None]:
        """The sources of the results of a scan, from those of its operands and of what its body returns."""
        first, last = jaxprs.scan_parts(eqn)

        def stacked(source: Source | None) -> Source | None:
            if source is None:
                return None
            if id(eqn) in source.loops:
                return dataclasses.replace(source, loops=tuple(loop for loop in source.loops if loop != id(eqn)))
            return dataclasses.replace(source, repeated=source.repeated + 1)

        carried = self.carried(eqn.params["jaxpr"], first, sources[first:last])
        return [*carried, *map(stacked, inside[last - first :])]

    def carried(self, jaxpr: jaxprs.Program, num_consts: int, sources: Sequence[Source | None]) -> list[Source | None]:
        """The sources of carried values that a loop hands on as they are."""
        opened, _ = jaxprs.opened(jaxpr)
        carried = opened.invars[num_consts : num_consts + len(sources)]
        return [
            source if before is after else None
            for source, before, after in zip(sources, carried, opened.outvars, strict=False)
        ]


def _is_number(atom: jaxprs.Atom) -> bool:
    return getattr(atom.aval, "ndim", None) == 0


def _sliced(eqn: JaxprEqn, sources: Sequence[Source | None]) -> Source | None:
    """Source of a slice: of one index of the first dimension it is a part."""
    source, before, after = sources[0], jaxprs.type_of(eqn.invars[0]), jaxprs.type_of(eqn.outvars[0])
    if source is None or before.ndim < 3 or after.shape[0] != 1 or before.shape[0] == 1:
        return source
    if eqn.primitive.name == "slice":
        return dataclasses.replace(source, index=(*source.index, eqn.params["start_indices"][0]))
    start = eqn.invars[1]
    if isinstance(start, Literal):
        return dataclasses.replace(source, index=(*source.index, int(start.val)))
    return source


def _split(eqn: JaxprEqn, source: Source | None) -> list[Source | None]:
    sizes, axis = eqn.params["sizes"], eqn.params["axis"]
    if source is None or axis or set(sizes) != {1} or jaxprs.type_of(eqn.invars[0]).ndim < 3:
        return [source] * len(sizes)
    return [dataclasses.replace(source, index=(*source.index, i)) for i in range(len(sizes))]


def _joined(sources: Sequence[Source | None]) -> Source | None:
    """Source of kernels that are joined to one."""
    distinct = list(dict.fromkeys(source for source in sources if source is not None))
    if len(distinct) < len(set(sources)) or not distinct:
        return None
    if len(distinct) == 1:
        return distinct[0]
    if any(source.name is None or source.loops != distinct[0].loops for source in distinct):
        return None
    names = " + ".join(f"{source.name}{''.join(f'[{i}]' for i in source.index)}" for source in distinct)
    return Source(tuple(source.layer for source in distinct), names, (), distinct[0].loops)
