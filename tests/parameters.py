"""Parameters of tests whose product would run the same lines many times over."""

import pytest


def in_turns(every, *others):
    """Each of `every` once, with one value of each of the others, which take turns.

    Mappings give the parameters their names. `parametrize(("recipe", "axis_type"), in_turns(RECIPES, AXIS_TYPES))` runs
    every recipe, on one kind of axis or the other.
    """
    every, *others = (
        list(values.items() if hasattr(values, "items") else ((str(value), value) for value in values))
        for values in (every, *others)
    )
    rows = []
    for i, (name, value) in enumerate(every):
        chosen = [values[i % len(values)] for values in others]
        label = "-".join((name, *(other for other, _ in chosen)))
        rows.append(pytest.param(value, *(other for _, other in chosen), id=label))
    return rows
