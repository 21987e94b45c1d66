"""The API reference lists every public name once, and nothing else."""

import importlib
import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

import te_jax

PAGES = sorted((Path(__file__).resolve().parents[2] / "docs" / "api").glob("*.rst"))
PUBLIC = [name for name in (*te_jax.__all__, *te_jax._AT_FIRST_USE) if not name.startswith("__")]
MODULES = [f"te_jax.{name}" for name in (*PUBLIC, "native", "quantized")]
_ENTRY = re.compile(r"^\.\. (?P<directive>currentmodule|auto(?!module)\w+|data):: (?P<name>[\w.]+)$", re.MULTILINE)


def entries(text):
    """Full names of what a page documents."""
    module = ""
    for entry in _ENTRY.finditer(text):
        if entry["directive"] == "currentmodule":
            module = entry["name"]
        else:
            yield f"{module}.{entry['name']}"


LISTED = Counter(name for page in PAGES for name in entries(page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_one_entry(module):
    wanted = {f"{module}.{name}": 1 for name in importlib.import_module(module).__all__}
    assert {name: count for name, count in LISTED.items() if name.rpartition(".")[0] == module} == wanted


def test_there_are_no_entries_of_other_modules():
    assert {name.rpartition(".")[0] for name in LISTED} == set(MODULES)


# Flax adds these to every Linen module.
_OF_LINEN = {"parent", "name"}

# A class has at most 23, but this one is a record: the shape of a model, a field for each way in which families differ.
_MOST_OF_A_CLASS = {"DecoderConfig": 32}
# A function has at most 16, but attention takes each way in which libraries of attention differ.
_MOST_OF_A_FUNCTION = {"attention": 17}


def parameters(value):
    function = value.__init__ if inspect.isclass(value) else value
    return set(inspect.signature(function).parameters) - _OF_LINEN - {"self"}


@pytest.mark.parametrize("module", MODULES)
def test_signatures_are_short(module):
    """Options that belong together are one value, such as `te_jax.ops.CrossEntropy`."""
    public = importlib.import_module(module)
    for name in public.__all__:
        value = getattr(public, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            most = _MOST_OF_A_CLASS.get(name, 23) if inspect.isclass(value) else _MOST_OF_A_FUNCTION.get(name, 16)
            assert len(parameters(value)) <= most, name


def test_an_entry_that_is_missing_would_be_found():
    text = ".. currentmodule:: te_jax.ops\n\n.. autofunction:: dense\n.. data:: KINDS\n\n   Text.\n"
    assert list(entries(text)) == ["te_jax.ops.dense", "te_jax.ops.KINDS"]
