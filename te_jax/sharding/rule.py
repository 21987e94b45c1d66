"""Einsum-like sharding rules, read as Shardy reads them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence

from jax.sharding import PartitionSpec

from te_jax.sharding.axes import Axes, axes_of_entry

Dimension = str | tuple[str, ...]
"""A factor, or the factors that one dimension is made of, the outermost first."""
Term = tuple[Dimension, ...]
_BATCH = "..."
_DIMENSION = re.compile(r"\(([^()]*)\)|([^\s()]+)")


@dataclasses.dataclass(frozen=True)
class Rule:
    """The factors of each operand and result. "..." at the start of a term stands for leading batch dimensions.

    A compound dimension "(kb ki)" is made of several factors, as a reshape would split it. Its first factor, the major
    one, may be split over devices; the others, the minor ones, are never.
    """

    text: str
    operands: tuple[Term, ...]
    results: tuple[Term, ...]

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Reads a rule such as "... v, ... -> ..." or "m (kb ki), kb m -> m": two operands, one result.

        Raises:
          ValueError: the text is no rule.
        """
        left, right = (tuple(_parse_term(term) for term in side.split(",")) for side in text.split("->"))
        return cls(text, left, right)

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        """The dimensions of all terms, each once."""
        return tuple(dict.fromkeys(dim for term in (*self.operands, *self.results) for dim in term))

    @property
    def factors(self) -> tuple[str, ...]:
        """The factors of all terms, each once."""
        return tuple(dict.fromkeys(factor for dimension in self.dimensions for factor in _factors(dimension)))

    @property
    def compounds(self) -> tuple[tuple[str, ...], ...]:
        """The compound dimensions, each once."""
        return tuple(dimension for dimension in self.dimensions if isinstance(dimension, tuple))

    @property
    def minor_factors(self) -> tuple[str, ...]:
        """All factors but the first of all compound dimensions."""
        return tuple(dict.fromkeys(factor for compound in self.compounds for factor in compound[1:]))

    def factor_sizes(self, shapes: Sequence[tuple[int, ...]], minor_sizes: Mapping[str, int]) -> dict[str, int]:
        """The size of every named factor of the operands.

        Args:
          shapes: of the operands.
          minor_sizes: of the minor factors.

        Returns:
          {factor: size}. Where a factor has a dimension to itself in several operands, the smallest counts.
        """
        sizes: dict[str, int] = dict(minor_sizes)
        whole: dict[str, int] = {}
        for term, shape in zip(self.operands, shapes, strict=True):
            for dimension, size in _named(term, shape):
                if isinstance(dimension, tuple):
                    sizes.setdefault(dimension[0], size // _product(dimension[1:], minor_sizes))
                else:
                    whole[dimension] = min(size, whole.get(dimension, size))
        return sizes | whole

    def fitted(self, shapes: Sequence[tuple[int, ...]], minor_sizes: Mapping[str, int]) -> tuple[Rule, tuple[str, ...]]:
        """The rule for operands of these shapes, and the factors that they keep from being split.

        A compound dimension whose size is not the product of its factors, because its last block is short, or that has
        one block only or a symbolic size of jax.export, which Shardy would refuse, becomes a factor of its own, and
        neither that nor its major factor is split.

        Args:
          shapes: of the operands.
          minor_sizes: of the minor factors.

        Returns:
          (rule, factors that must stay whole).
        """
        sizes = self.factor_sizes(shapes, minor_sizes)
        short = {
            dimension
            for term, shape in zip(self.operands, shapes, strict=True)
            for dimension, size in _named(term, shape)
            if isinstance(dimension, tuple)
            and (not isinstance(size, int) or size != _product(dimension, sizes) or sizes[dimension[0]] == 1)
        }
        if not short:
            return self, ()
        text = _DIMENSION.sub(
            lambda match: "_".join(compound) if (compound := _parse_dimension(match)) in short else match[0], self.text
        )
        rule = Rule.parse(text)
        whole = [factor for compound in short for factor in ("_".join(compound), compound[0])]
        return rule, tuple(dict.fromkeys(factor for factor in whole if factor in rule.factors))

    def shardy_sizes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The sizes, out of `sizes`, that Shardy asks for: of factors that have no dimension to themselves."""
        return {factor: sizes[factor] for factor in self.factors if factor in sizes and factor not in self.dimensions}

    def assign(
        self,
        specs: Sequence[PartitionSpec],
        ranks: Sequence[int],
        replicated: Sequence[str],
        divides: Callable[[str, Axes], bool] = lambda factor, axes: True,
    ) -> Assignment:
        """Mesh axes for each factor, from the operands' shardings; those in `replicated` get none.

        Where operands disagree, the first that has a factor decides, and no mesh axis is given out twice. A factor is
        left whole where `divides(factor, axes)` is false. The axes of a compound dimension are its major factor's.
        """
        terms = zip(self.operands, ranks, strict=True)
        batch = next((rank - len(term) + 1 for term, rank in terms if _BATCH in term), 0)
        axes: dict[str, Axes] = {}
        for term, spec in zip(self.operands, specs, strict=True):
            factors = _expand(term, batch)
            for factor, entry in zip(factors, (*spec, *(None,) * (len(factors) - len(spec))), strict=True):
                taken = {axis for assigned in axes.values() for axis in assigned}
                wanted = axes_of_entry(entry)
                if factor not in axes:
                    free = factor not in replicated and not taken & set(wanted) and divides(factor, wanted)
                    axes[factor] = wanted if free else ()
        axes = {factor: assigned for factor, assigned in axes.items() if assigned}
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


def _parse_term(text: str) -> Term:
    if _DIMENSION.sub("", text).strip():
        raise ValueError(f"the term {text.strip()!r} of a sharding rule has brackets that do not match")
    return tuple(_parse_dimension(match) for match in _DIMENSION.finditer(text))


def _parse_dimension(match: re.Match[str]) -> Dimension:
    if match[1] is None:
        return match[2]
    factors = tuple(match[1].split())
    if len(factors) < 2:
        raise ValueError(f"the dimension {match[0]!r} of a sharding rule must have two factors or more in its brackets")
    return factors


def _factors(dimension: Dimension) -> tuple[str, ...]:
    return (dimension,) if isinstance(dimension, str) else dimension


def _named(term: Term, shape: tuple[int, ...]) -> list[tuple[Dimension, int]]:
    """The dimensions of a term without its batch, each with its size."""
    dimensions = term[1:] if term[:1] == (_BATCH,) else term
    return list(zip(dimensions, shape[len(shape) - len(dimensions) :], strict=True)) if dimensions else []


def _product(factors: Sequence[str], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[factor] for factor in factors)


def _expand(term: Term, batch: int) -> tuple[str, ...]:
    """One factor for each dimension: that which may be split."""
    major = tuple(_factors(dimension)[0] for dimension in term)
    return (*(f"{_BATCH}{i}" for i in range(batch)), *major[1:]) if term[:1] == (_BATCH,) else major


def _spec(term: Term, batch: int, axes: Mapping[str, Axes]) -> PartitionSpec:
    return PartitionSpec(*(axes.get(factor) for factor in _expand(term, batch)))
