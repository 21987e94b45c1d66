"""Runs the notebooks of this folder and stores them with their outputs: python notebooks/execute.py [NAME ...]

A stored notebook says in its metadata of which sources its outputs are, and tests/test_notebooks.py compares that.
"""

import base64
import hashlib
import io
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import nbclient
import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from PIL import Image

FOLDER = Path(__file__).resolve().parent
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


class ThisInterpreter(AsyncKernelManager):
    """Starts kernels with the interpreter that runs this, whatever kernels the machine has registered."""

    @property
    def kernel_spec(self):
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        command.append("--InlineBackend.print_figure_kwargs={'dpi': 72}")
        return KernelSpec(argv=command, display_name="this interpreter", language="python")


def fingerprint(notebook: nbformat.NotebookNode) -> str:
    """A digest of the code of a notebook: of all that its outputs depend on in it."""
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def execute(path: Path, xla_flags: str = "") -> nbformat.NotebookNode:
    """A notebook with the outputs that it has now; its kernel gets `xla_flags` instead of the environment's."""
    environment = {
        **os.environ,
        "XLA_FLAGS": xla_flags,
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(FOLDER.parent), *sys.path])),
    }
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=280,
        kernel_manager_class=ThisInterpreter,
        coalesce_streams=True,
        record_timing=False,
        store_widget_state=False,
    )
    client.execute(cwd=str(path.parent), env=environment)
    for output in outputs(notebook):
        if "image/png" in output.get("data", {}):
            output.data["image/png"] = _in_few_colors(output.data["image/png"])
    notebook.metadata["language_info"] = {"name": "python"}  # without the version of this interpreter
    notebook.metadata["te_jax"] = {"outputs_of": fingerprint(notebook)}
    return notebook


def outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """All outputs of a notebook, in order."""
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def _in_few_colors(png: str) -> str:
    """An image in base64 with 64 colors, which is a third of the bytes; bars and lines need no more."""
    image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    small = io.BytesIO()
    # Covers all colors, however few pixels have them, where the default keeps those of most pixels.
    image.quantize(64, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def main(names: Sequence[str]) -> None:
    """Executes the notebooks of these names, or all, and stores them."""
    for path in [FOLDER / f"{name.removesuffix('.ipynb')}.ipynb" for name in names] or NOTEBOOKS:
        started = time.monotonic()
        nbformat.write(execute(path), path)
        print(f"{path.name}: {time.monotonic() - started:.0f} s, {path.stat().st_size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
