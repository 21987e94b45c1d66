"""The examples in docstrings of public functions run and print what they say."""

import doctest

import jax
import pytest

import te_jax.flax
import te_jax.nnx
from te_jax import (
    checkpoint_policies,
    debug,
    hlo,
    layers,
    models,
    native,
    offload,
    ops,
    optim,
    parallel,
    quantized,
    recipe,
    sharding,
    testing,
)

MODULES = (
    *(checkpoint_policies, debug, te_jax.flax, hlo, layers, models, native, te_jax.nnx, offload, ops, optim, parallel),
    *(quantized, recipe, sharding, testing),
)

FUNCTIONS = {f"{module.__name__}.{name}": getattr(module, name) for module in MODULES for name in module.__all__}
EXAMPLES = {name: function for name, function in FUNCTIONS.items() if ">>>" in (function.__doc__ or "")}
NEED_FILES = {"te_jax.models.config_from_hf", "te_jax.models.to_hf"}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in NEED_FILES])
def test_examples(name, capsys):
    (example,) = doctest.DocTestFinder(recurse=False).find(EXAMPLES[name], name, globs={})
    with jax.numpy_dtype_promotion("standard"):  # as users have it
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
