"""Every notebook runs from top to bottom on a CPU, is stored without what it printed, and calls what there is."""

import ast
import importlib
import inspect
import os
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from xla_flags import environment_without_devices

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


class ThisInterpreter(AsyncKernelManager):
    """Starts kernels with the interpreter that runs the tests, whatever kernels the machine has registered."""

    @property
    def kernel_spec(self):
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name="this interpreter", language="python")


def test_there_are_notebooks():
    assert {path.name for path in NOTEBOOKS} == {
        "collective_matmul.ipynb",
        "convert.ipynb",
        "fp8_linear.ipynb",
        "low_precision_adam.ipynb",
        "quickstart.ipynb",
    }


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_it_runs_without_an_error_or_a_warning(path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", environment_without_devices()["XLA_FLAGS"])  # it asks for them itself
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=280, kernel_manager_class=ThisInterpreter)
    client.execute(cwd=str(path.parent))
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    complaints = [output.text for output in outputs if output.output_type == "stream" and output.name == "stderr"]
    assert not complaints
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_it_is_stored_without_outputs(path):
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_names_of_the_package_exist(path):
    """All that it imports of te_jax, and all that it reads of te_jax's modules, without running it."""
    cells = nbformat.read(path, as_version=4).cells
    tree = ast.parse("\n".join(cell.source for cell in cells if cell.cell_type == "code"))
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
