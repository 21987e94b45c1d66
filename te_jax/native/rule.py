"""Einsum-like sharding rules, read as Shardy reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

Axes = tuple[str, ...]
_BATCH = "..."


@dataclasses.dataclass(frozen=True)
class Rule:
    """The factors of each operand and result. "..." at the start of a term stands for leading batch dimensions."""

    text: str
    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Reads a rule such as "... v, ... -> ...": two operands, one result."""
        left, right = (tuple(tuple(term.split()) for term in side.split(",")) for side in text.split("->"))
        return cls(text, left, right)

    def assign(self, specs: Sequence[PartitionSpec], ranks: Sequence[int], replicated: Sequence[str]) -> Assignment:
        """Mesh axes for each factor, from the operands' shardings; those in `replicated` get none.

        Where operands disagree, the first that has a factor decides, and no mesh axis is given out twice.
        """
        terms = zip(self.operands, ranks, strict=True)
        batch = next((rank - len(term) + 1 for term, rank in terms if _BATCH in term), 0)
        axes: dict[str, Axes] = {}
        for term, spec in zip(self.operands, specs, strict=True):
            factors = _expand(term, batch)
            for factor, entry in zip(factors, (*spec, *(None,) * (len(factors) - len(spec))), strict=True):
                taken = {axis for given in axes.values() for axis in given}
                wanted = axes_of_entry(entry)
                if factor not in axes:
                    axes[factor] = () if factor in replicated or taken & set(wanted) else wanted
        axes = {factor: given for factor, given in axes.items() if given}
        return Assignment(
            axes,
            tuple(_spec(term, batch, axes) for term in self.operands),
            tuple(_spec(term, batch, axes) for term in self.results),
        )


@dataclasses.dataclass(frozen=True)
class Assignment:
    """Mesh axes of the factors that are sharded, and the shardings of operands and results that follow."""

    axes: Mapping[str, Axes]
    operand_specs: tuple[PartitionSpec, ...]
    result_specs: tuple[PartitionSpec, ...]


def axes_of_entry(entry: str | tuple[str, ...] | None) -> Axes:
    """The mesh axes that one entry of a PartitionSpec names."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _expand(term: tuple[str, ...], batch: int) -> tuple[str, ...]:
    return (*(f"{_BATCH}{i}" for i in range(batch)), *term[1:]) if term[:1] == (_BATCH,) else term


def _spec(term: tuple[str, ...], batch: int, axes: Mapping[str, Axes]) -> PartitionSpec:
    return PartitionSpec(*(axes.get(factor) for factor in _expand(term, batch)))
