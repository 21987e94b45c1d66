"""The examples in docstrings of public functions run and print what they say."""

import doctest
import importlib

import jax
import pytest

MODULES = [
    importlib.import_module(f"te_jax.{name}")
    for name in (
        *(
            "checkpoint_policies",
            "debug",
            "flax",
            "hlo",
            "layers",
            "models",
            "native",
            "nnx",
            "offload",
            "ops",
            "optim",
        ),
        *("optim", "parallel", "quantized", "recipe", "sharding", "testing"),
    )
]

FUNCTIONS = {f"{module.__name__}.{name}": getattr(module, name) for module in MODULES for name in module.__all__}
EXAMPLES = {name: function for name, function in FUNCTIONS.items() if ">>>" in (function.__doc__ or "")}
NEED_FILES = {f"te_jax.models.{name}" for name in ("config_from_hf", "to_hf", "from_peft", "to_peft")}


@pytest.mark.slow  # as examples of pages, they run each operation of JAX by itself, which are programs of their own
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in NEED_FILES])
def test_examples(name, capsys):
    (example,) = doctest.DocTestFinder(recurse=False).find(EXAMPLES[name], name, globs={})
    with jax.numpy_dtype_promotion("standard"):  # as users have it
        failures, count = doctest.DocTestRunner().run(example)
    assert count
    assert not failures, capsys.readouterr().out


def test_operations_have_examples():
    wanted = ("attention", "dense", "quantize", "softmax_cross_entropy")
    assert {f"te_jax.ops.{name}" for name in wanted} <= set(EXAMPLES)
