"""The Python examples of README.md and docs/ run, in the order in which a page shows them; links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
_EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


def examples(page):
    return _EXAMPLE.findall(page.read_text(encoding="utf-8"))


def linked(page):
    return {(page.parent / link).resolve() for link in _LINK.findall(page.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("page", [page for page in PAGES if examples(page)], ids=lambda page: page.name)
def test_examples_run(page):
    namespace = {}
    for number, example in enumerate(examples(page), start=1):
        exec(compile(example, f"{page.name}, example {number}", "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    assert not [path for path in linked(page) if not path.exists()]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_notebooks_are_linked(page):
    assert set(NOTEBOOKS) <= linked(ROOT / page)


@pytest.mark.parametrize(
    ("page", "notebook"),
    [
        ("fp8", "fp8_linear"),
        ("adam", "low_precision_adam"),
        ("softmax_cross_entropy", "quickstart"),
        ("linear_cross_entropy", "quickstart"),
    ],
)
def test_a_page_links_the_notebook_of_its_subject(page, notebook):
    assert ROOT / "notebooks" / f"{notebook}.ipynb" in linked(ROOT / "docs" / f"{page}.md")
