"""Stored notebooks are those of their code; `make test-all` runs them, and compares what the cheapest one prints."""

import ast
import importlib
import inspect
import re

import nbformat
import pytest
from xla_flags import environment_without_devices

from notebooks import execute

CHEAPEST = "parallel_loops.ipynb"
NOTEBOOKS = execute.NOTEBOOKS
STORED = {path.name: nbformat.read(path, as_version=4) for path in NOTEBOOKS}
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def printed(notebook):
    """What the cells of a notebook printed or returned as text, without the names of figures."""
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in execute.outputs(notebook)]
    return "\n".join(text for text in texts if not text.startswith("<Figure"))


def the_same(found, stored, rtol=0.02):
    """Whether two texts have the same words, and numbers that differ by no more than another CPU's rounding."""
    numbers = [[float(number) for number in _NUMBER.findall(text)] for text in (found, stored)]
    words = [_NUMBER.sub("", text).split() for text in (found, stored)]
    return words[0] == words[1] and numbers[0] == pytest.approx(numbers[1], rel=rtol, abs=rtol)


def run(path):
    """Executes a notebook, which asks for its devices itself."""
    notebook = execute.execute(path, xla_flags=environment_without_devices()["XLA_FLAGS"])
    complaints = [o.text for o in execute.outputs(notebook) if o.output_type == "stream" and o.name == "stderr"]
    assert not complaints
    return notebook


def test_there_are_notebooks():
    assert set(STORED) == {
        "collective_matmul.ipynb",
        "convert.ipynb",
        "experts.ipynb",
        "finetune.ipynb",
        "fp8_linear.ipynb",
        "low_precision_adam.ipynb",
        "offload.ipynb",
        "parallel_loops.ipynb",
        "policy.ipynb",
        "quickstart.ipynb",
    }


@pytest.mark.parametrize("name", STORED)
def test_stored_outputs_are_those_of_the_stored_code(name):
    notebook = STORED[name]
    message = f"{name} has changed since it was run: make notebooks ARGS={name}"
    assert notebook.metadata.get("te_jax", {}).get("outputs_of") == execute.fingerprint(notebook), message
    found = execute.outputs(notebook)
    assert any("image/png" in output.get("data", {}) for output in found)
    assert not [output for output in found if output.output_type == "error" or output.get("name") == "stderr"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_it_is_small(path):
    assert path.stat().st_size < 150_000


@pytest.mark.parametrize("name", STORED)
def test_its_beginning_says_how_long_it_takes_and_what_a_cpu_shows(name):
    beginning = " ".join(STORED[name].cells[0].source.split())
    assert re.search(r"Takes (about|less than) .+ on two CPU cores\.", beginning)
    assert "on a CPU shows the numerics, not the speed" in beginning


@pytest.mark.slow
def test_the_cheapest_one_prints_what_is_stored():
    (path,) = (path for path in NOTEBOOKS if path.name == CHEAPEST)
    found, stored = printed(run(path)), printed(STORED[CHEAPEST])
    assert the_same(found, stored), found


def test_other_words_and_other_numbers_would_be_found():
    assert the_same("loss 1.500 and 3", "loss   1.501 and 3")
    assert not the_same("loss 1.500", "loss 1.600")
    assert not the_same("loss 1.500", "losses 1.500")
    assert not the_same("loss 1.500", "loss 1.500 2")


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path.name != CHEAPEST], ids=lambda path: path.name)
def test_it_runs_without_an_error_or_a_warning(path):
    assert any("image/png" in output.get("data", {}) for output in execute.outputs(run(path)))


@pytest.mark.parametrize("name", STORED)
def test_names_of_the_package_exist(name):
    """All that it imports of te_jax, and all that it reads of te_jax's modules, without running it."""
    tree = ast.parse("\n".join(cell.source for cell in STORED[name].cells if cell.cell_type == "code"))
    modules, found = {}, 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "te_jax":
                    module = importlib.import_module(alias.name)
                    modules[alias.asname or "te_jax"] = module if alias.asname else importlib.import_module("te_jax")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "te_jax":
            for alias in node.names:
                modules[alias.asname or alias.name] = getattr(importlib.import_module(node.module), alias.name)
                found += 1
    for node in ast.walk(tree):
        names = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        value = modules.get(node.id) if names and isinstance(node, ast.Name) else None
        while names and inspect.ismodule(value):
            value = getattr(value, names.pop(0))
            found += 1
    assert found
