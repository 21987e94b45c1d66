"""The faults of tests/mutants.toml are faults of the code as it is. `make mutants` plants them."""

import collections

import mutants

LIST = mutants.read()


def test_each_fits():
    assert not {mutant.name: problem for mutant in LIST if (problem := mutant.problem())}
    assert not [name for name, count in collections.Counter(mutant.name for mutant in LIST).items() if count > 1]


def test_an_entry_that_does_not_fit_is_named():
    fits = LIST[0]
    for problem, entry in {
        "0 times, not once": {"before": "no such line"},
        "are the same": {"after": fits.before},
        "names no file of tests": {"seen_by": "-k nothing"},
        "tests/test_nothing.py, which is not there": {"seen_by": "tests/test_nothing.py"},
        "tests/cli/test_train.py, which `make test` does not run": {"seen_by": "tests/cli/test_train.py"},
    }.items():
        assert problem in mutants.dataclasses.replace(fits, **entry).problem()
