"""The Python examples of README.md and docs/ run, in the order in which a page shows them, README's each alone.

Those in CUDA compile.
"""

import re
import shutil
import subprocess
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FIRST_SCREENS = ROOT / "README.md", ROOT / "docs" / "index.md"
_EXAMPLE = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def examples(page, language="python"):
    return [code for name, code in _EXAMPLE.findall(page.read_text(encoding="utf-8")) if name == language]


CUDA = [pytest.param(code, id=f"{page.stem}-{i}") for page in PAGES for i, code in enumerate(examples(page, "cuda"))]


@pytest.mark.parametrize("page", [page for page in PAGES if examples(page)], ids=lambda page: page.name)
def test_examples_run(page, capsys):
    alone, namespace = page.name == "README.md", {}
    with jax.numpy_dtype_promotion("standard"):  # as users have it, and Flax's norms need it in bfloat16
        for number, example in enumerate(examples(page), start=1):
            exec(compile(example, f"{page.name}, example {number}", "exec"), {} if alone else namespace)
            if number == 1 and page in FIRST_SCREENS:
                first, second, third = map(float, capsys.readouterr().out.splitlines()[-3:])
                assert first > second > third, "the losses of the first screen fall"


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not there")
@pytest.mark.parametrize("code", CUDA)
def test_cuda_examples_compile(code, tmp_path):
    (tmp_path / "example.cu").write_text(code, encoding="utf-8")
    flags = ["-std=c++20", "-arch=sm_90", "--expt-relaxed-constexpr", "-DTE_JAX_CUDA", f"-I{ROOT}/cuda_ext"]
    subprocess.run(["nvcc", *flags, "-ptx", "-o", tmp_path / "example.ptx", tmp_path / "example.cu"], check=True)


def test_first_screens_are_the_same():
    """One sentence, one program, and the same words around tables and figures, whose links differ."""
    generated = re.compile(r"^<!-- (first_\w+) -->\n.*?<!-- /\1 -->$", re.DOTALL | re.MULTILINE)
    texts = (generated.sub("", page.read_text(encoding="utf-8")) for page in FIRST_SCREENS)
    readme, home = (text.replace("](docs/", "](") for text in texts)
    screen, _, _ = readme.partition("## Install\n")
    assert examples(FIRST_SCREENS[0])[0] in screen
    assert home.startswith(screen)
