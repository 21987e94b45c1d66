"""Sharding rules: which mesh axes each factor gets from the operands' shardings."""

import hypothesis.strategies as st
import pytest
from hypothesis import given
from jax.sharding import PartitionSpec as P

from te_jax.sharding.rule import Rule


def axes(entry):
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def test_parse_of_compound_dimensions():
    rule = Rule.parse("m (kb ki),... kb  (nb no ni) -> m, (kb ki) m")
    assert rule.operands == (("m", ("kb", "ki")), ("...", "kb", ("nb", "no", "ni")))
    assert rule.results == (("m",), (("kb", "ki"), "m"))
    assert rule.minor_factors == ("ki", "no", "ni")
    assert rule.factors == ("m", "kb", "ki", "...", "nb", "no", "ni")


@pytest.mark.parametrize("text", ["i j", "i -> j -> k", "", "(i) -> i", "(i j -> i", "i j) -> i", "((i j) k) -> i"])
def test_parse_refuses_what_is_no_rule(text):
    with pytest.raises(ValueError):  # noqa: PT011
        Rule.parse(text)


def assign(text, specs, ranks, replicated=()):
    return Rule.parse(text).assign(specs, ranks, replicated)


def test_the_first_operand_that_has_a_factor_decides():
    assert assign("i, i -> i", [P("x"), P("y")], [1, 1]).axes == {"i": ("x",)}
    assert assign("i, i -> i", [P(None), P("y")], [1, 1]).axes == {}


def test_no_mesh_axis_is_given_out_twice():
    assert assign("i, j -> i j", [P("x"), P("x")], [1, 1]).axes == {"i": ("x",)}
    assert assign("i, j -> i j", [P("x"), P(("y", "x"))], [1, 1]).axes == {"i": ("x",)}


# -------------------------------------------------------------------------------------------------- compound dimensions

BLOCKS = "m (kb ki), kb m -> (kb ki) m, kb"


def test_axes_of_a_compound_dimension_are_its_major_factors():
    assignment = assign(BLOCKS, [P("x", "y"), P()], [2, 2])
    assert assignment.axes == {"m": ("x",), "kb": ("y",)}
    assert [tuple(map(axes, spec)) for spec in assignment.operand_specs] == [(("x",), ("y",)), (("y",), ("x",))]
    assert [tuple(map(axes, spec)) for spec in assignment.result_specs] == [(("y",), ("x",)), (("y",),)]


def test_the_first_operand_decides_about_a_compound_dimension_too():
    assignment = assign("kb m, m (kb ki) -> m", [P("x"), P("x", "y")], [2, 2])
    assert assignment.axes == {"kb": ("x",)}
    assert [tuple(map(axes, spec)) for spec in assignment.operand_specs] == [(("x",), ()), ((), ("x",))]


@pytest.mark.parametrize("sizes", [(8, 6), (6, 8)])
def test_the_smallest_size_of_a_factor_counts(sizes):
    assert Rule.parse("k, k -> k").factor_sizes([(size,) for size in sizes], {}) == {"k": 6}


@pytest.mark.parametrize(("size", "blocks"), [(200, 2), (64, 1), (129, 2), (128, 1)])
def test_a_dimension_with_one_or_a_short_last_block_stays_whole(size, blocks):
    rule, whole = Rule.parse(BLOCKS).fitted([(5, size), (blocks, 5)], {"ki": 128})
    assert rule == Rule.parse("m kb_ki, kb m -> kb_ki m, kb")
    assert set(whole) == {"kb_ki", "kb"}
    assert rule.minor_factors == ()
    assignment = rule.assign([P("x", "y"), P("y")], [2, 2], whole)
    assert assignment.axes == {"m": ("x",)}


MESH_AXES = "wxyz"
entries = st.lists(st.sampled_from(MESH_AXES), unique=True, max_size=2).map(tuple)


@st.composite
def cases(draw):
    """(rule, specs, ranks, replicated) with any number of batch dimensions; specs may contradict each other."""
    batch = draw(st.integers(0, 3))
    terms = draw(
        st.lists(st.tuples(st.booleans(), st.permutations("ijk").map(lambda f: f[:2])), min_size=1, max_size=3)
    )
    specs, ranks = [], []
    for has_batch, factors in terms:
        rank = len(factors) + (batch if has_batch else 0)
        free, spec = list(MESH_AXES), []
        for wanted in draw(st.lists(entries, max_size=rank)):
            entry = tuple(axis for axis in wanted if axis in free)
            free = [axis for axis in free if axis not in entry]
            spec.append(entry or None)
        specs.append(P(*spec))
        ranks.append(rank)
    compound = draw(st.booleans())  # "(i ii)" wherever "i" stands, but in some operand alone
    alone = draw(st.integers(0, len(terms) - 1))
    text = ", ".join(
        " ".join(
            (
                *(("...",) if has_batch else ()),
                *(f"({f} {f}{f})" if compound and f == "i" and t != alone else f for f in factors),
            )
        )
        for t, (has_batch, factors) in enumerate(terms)
    )
    return f"{text} -> {text}", specs, ranks, draw(st.sampled_from([(), ("i",), ("j", "k")]))


@given(cases())
def test_any_assignment_is_consistent(case):
    text, specs, ranks, replicated = case
    assignment = assign(text, specs, ranks, replicated)
    given_out = [axis for factor in assignment.axes.values() for axis in factor]
    assert len(given_out) == len(set(given_out))
    assert not set(assignment.axes) & set(replicated)
    assert [len(spec) for spec in assignment.operand_specs] == ranks
    # Operands and results have the same terms here, so the same shardings: each factor is split in one way everywhere.
    assert assignment.operand_specs == assignment.result_specs
    for spec in assignment.operand_specs:
        used = [axis for entry in spec for axis in axes(entry)]
        assert len(used) == len(set(used))


@given(cases())
def test_shardings_that_agree_are_kept(case):
    """What was assigned once asks for nothing else when assigned again."""
    text, specs, ranks, replicated = case
    once = assign(text, specs, ranks, replicated)
    again = assign(text, once.operand_specs, ranks, replicated)
    assert again == once
