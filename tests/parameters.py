"""Parameters of tests whose product would run the same lines many times over."""

import collections
import itertools
import os
import random

import pytest

from te_jax import native


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


def parts(count, in_ci):
    """Parameters from 0 on: the first for `make test`, as many as `in_ci` for CI, and all with `pytest -m ""`."""
    marks = [()] + [pytest.mark.slow] * (in_ci - 1) + [(pytest.mark.slow, pytest.mark.product)] * (count - in_ci)
    return [pytest.param(part, marks=marks[part]) for part in range(count)]


def named(implementation, dtype):
    """The implementation, or None in place of "native" for float16, which XLA's path takes: no kernel does."""
    return None if implementation == "native" and not native.takes(dtype) else implementation


def drawn(rows, place):
    """One of the rows; TE_JAX_TEST_SEED=N draws others."""
    seed = int(os.environ.get("TE_JAX_TEST_SEED", 0))
    print(f"TE_JAX_TEST_SEED={seed}, row {place}")
    return random.Random(seed).sample(rows, len(rows))[place]


def covering_rows(options, refused):
    """Rows {option: value}, the same in every run, with each pair of values in one of them at least.

    Args:
      options: {option: values}.
      refused: groups {option: values}; no row, and no pair, has a value of each option of a group.
    """

    def is_refused(row):
        return any(all(row.get(name) in values for name, values in group.items()) for group in refused)

    def pairs(row):
        return set(itertools.combinations(row.items(), 2))

    def drawn_row():
        """One with a pair of `missing`, and of each further option the value that is in most others; None at a dead
        end."""
        row = dict(rng.choice(list(missing)))
        for name in rng.sample(order, len(order)):
            if name in row:
                continue
            gains = {}
            for value in options[name]:
                if not is_refused(row | {name: value}):
                    added = (
                        sorted(((name, value), item), key=lambda item: order.index(item[0])) for item in row.items()
                    )
                    gains[value] = sum(tuple(pair) in missing for pair in added)
            if not gains:
                return None
            row[name] = max(rng.sample(list(gains), len(gains)), key=gains.__getitem__)
        return {name: row[name] for name in order}

    rng, order = random.Random(0), list(options)
    missing = {
        pair: None
        for names in itertools.combinations(options, 2)
        for pair in itertools.product(*([(name, value) for value in options[name]] for name in names))
        if not is_refused(dict(pair))
    }
    rows = []
    while missing:
        candidates = [row for _ in range(8) if (row := drawn_row())]
        if not candidates:
            raise ValueError(f"groups of refused leave no row for {list(missing)}: refuse these, too")
        row = max(candidates, key=lambda row: len(pairs(row) & missing.keys()))
        for pair in pairs(row):
            missing.pop(pair, None)
        rows.append(row)
    return rows


def mark_products(items):
    """Marks most of every product of parameters `product`.

    Of independent parameters (several `parametrize`, or one and a fixture) combinations stay in which the positions of
    the values add up to a multiple of the second largest number of values: of two parameters each value once, beside
    the other's in turn; of three with two values each all pairs of two values.
    """
    functions = collections.defaultdict(list)
    for item in items:
        if hasattr(item, "callspec"):
            functions[item.path, item.originalname].append(item)
    for alike in functions.values():
        seen = collections.defaultdict(dict)  # {names of a parameter: {values: position}}
        places = []
        for item in alike:
            values = dict(item.callspec.params)
            marks = [mark.args[0] for mark in item.iter_markers("parametrize")]
            names = [tuple(mark.replace(",", " ").split() if isinstance(mark, str) else mark) for mark in marks]
            names += [(name,) for name in values if not any(name in group for group in names)]
            places.append([seen[of].setdefault(tuple(id(values[name]) for name in of), len(seen[of])) for of in names])
        if len(seen) > 1:
            every = sorted(len(positions) for positions in seen.values())[-2]
            for item, positions in zip(alike, places, strict=True):
                if sum(positions) % every:
                    item.add_marker(pytest.mark.product)
