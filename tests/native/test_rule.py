"""Sharding rules: which mesh axes each factor gets from the operands' shardings."""

import hypothesis.strategies as st
import pytest
from hypothesis import given
from jax.sharding import PartitionSpec as P

from te_jax.native.rule import Rule


def axes(entry):
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def test_parse():
    rule = Rule.parse("... v, ... -> ..., ... v")
    assert rule.text == "... v, ... -> ..., ... v"
    assert rule.operands == (("...", "v"), ("...",))
    assert rule.results == (("...",), ("...", "v"))
    assert Rule.parse("i k,k j->i j").operands == (("i", "k"), ("k", "j"))


@pytest.mark.parametrize("text", ["i j", "i -> j -> k", ""])
def test_parse_refuses_what_is_no_rule(text):
    with pytest.raises(ValueError):  # noqa: PT011
        Rule.parse(text)


def assign(text, specs, ranks, replicated=()):
    return Rule.parse(text).assign(specs, ranks, replicated)


def test_named_factors():
    assignment = assign("i k, k j -> i j", [P("x", "y"), P("y", None)], [2, 2])
    assert assignment.axes == {"i": ("x",), "k": ("y",)}
    assert [tuple(map(axes, spec)) for spec in assignment.operand_specs] == [(("x",), ("y",)), (("y",), ())]
    assert [tuple(map(axes, spec)) for spec in assignment.result_specs] == [(("x",), ())]


def test_batch_factors():
    assignment = assign("... v, ... -> ...", [P("x", None, ("y", "z")), P()], [3, 2])
    assert set(assignment.axes.values()) == {("x",), ("y", "z")}
    assert assignment.axes["v"] == ("y", "z")
    assert [tuple(map(axes, spec)) for spec in assignment.operand_specs] == [(("x",), (), ("y", "z")), (("x",), ())]
    assert [tuple(map(axes, spec)) for spec in assignment.result_specs] == [(("x",), ())]


def test_the_first_operand_that_has_a_factor_decides():
    assert assign("i, i -> i", [P("x"), P("y")], [1, 1]).axes == {"i": ("x",)}
    assert assign("i, i -> i", [P(None), P("y")], [1, 1]).axes == {}


def test_no_mesh_axis_is_given_out_twice():
    assert assign("i, j -> i j", [P("x"), P("x")], [1, 1]).axes == {"i": ("x",)}
    assert assign("i, j -> i j", [P("x"), P(("y", "x"))], [1, 1]).axes == {"i": ("x",)}


def test_replicated_factors_get_none():
    assignment = assign("i k -> i", [P("x", "y")], [2], replicated=["k"])
    assert assignment.axes == {"i": ("x",)}
    assert [axes(entry) for entry in assignment.operand_specs[0]] == [("x",), ()]


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
    text = ", ".join(" ".join((*(("...",) if has_batch else ()), *factors)) for has_batch, factors in terms)
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
