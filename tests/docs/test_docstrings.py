"""The examples in docstrings of public functions run and print what they say."""

import doctest

import pytest

from te_jax import debug, hlo, native, offload, ops, parallel, recipe

FUNCTIONS = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (debug, hlo, native, offload, ops, parallel, recipe)
    for name in module.__all__
}
EXAMPLES = {name: function for name, function in FUNCTIONS.items() if ">>>" in (function.__doc__ or "")}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name, capsys):
    (example,) = doctest.DocTestFinder(recurse=False).find(EXAMPLES[name], name, globs={})
    failures, count = doctest.DocTestRunner().run(example)
    assert count
    assert not failures, capsys.readouterr().out


def test_operations_have_examples():
    assert {
        "te_jax.ops.attention",
        "te_jax.ops.dense",
        "te_jax.ops.quantize",
        "te_jax.ops.softmax_cross_entropy",
    } <= set(EXAMPLES)
