"""The Python examples of README.md and docs/ run, in the order in which a page shows them, README's each alone."""

import re
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
_EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def examples(page):
    return _EXAMPLE.findall(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", [page for page in PAGES if examples(page)], ids=lambda page: page.name)
def test_examples_run(page):
    alone, namespace = page.name == "README.md", {}
    with jax.numpy_dtype_promotion("standard"):  # as users have it, and Flax's norms need it in bfloat16
        for number, example in enumerate(examples(page), start=1):
            exec(compile(example, f"{page.name}, example {number}", "exec"), {} if alone else namespace)
