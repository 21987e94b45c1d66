"""Relative links and anchors of README.md, docs/, the notebooks and the pages of results lead somewhere."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
PAGES = [page for folder in ("", "docs/**/", "benchmarks/results/*/") for page in sorted(ROOT.glob(f"{folder}*.md"))]
PAGES += NOTEBOOKS
_FENCED = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*?) *#*$", re.MULTILINE)


def prose(page):
    """The text of a page or a notebook, without blocks of code."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return _FENCED.sub("", text)


def links(page):
    """(file, anchor or "") of every relative link."""
    for link in _LINK.findall(_CODE.sub("code", prose(page))):
        path, _, anchor = link.partition("#")
        yield (page.parent / path).resolve() if path else page, anchor


def anchors(page):
    """Names of headings, as GitHub and MyST derive them."""
    seen = Counter()
    for heading in _HEADING.findall(prose(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        name = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        yield f"{name}-{seen[name]}" if seen[name] else name
        seen[name] += 1


def broken(page):
    for path, anchor in links(page):
        if not path.exists():
            yield path
        elif anchor and (path.suffix not in (".md", ".ipynb") or anchor not in set(anchors(path))):
            yield path, anchor


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    assert not list(broken(page))


def test_every_page_is_in_the_table_of_contents():
    """The site's build would find it too, minutes later."""
    index = ROOT / "docs/index.md"
    listed = re.findall(r"^```\{toctree\}\n(.*?)^```", index.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    entries = {line for block in listed for line in block.splitlines() if line and not line.startswith(":")}
    guides = [page for page in ROOT.glob("docs/*.md") if page != index] + sorted(ROOT.glob("docs/guides/*.md"))
    for page in [*guides, *NOTEBOOKS]:
        name = page.relative_to(ROOT).with_suffix("").as_posix()
        assert name.removeprefix("docs/") in entries or f"../{name}" in entries, name


def test_what_is_broken_would_be_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A `b`, c\n\n[x](page.md#a-b-c) [y](#a-b) [z](no.md)\n\n```\n[no link](none.md)\n```\n")
    assert list(broken(page)) == [(page, "a-b"), tmp_path / "no.md"]


def test_the_index_links_every_page_and_notebook():
    """The page of measurements links those of benchmarks/lab/."""
    found = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/lab/*.md"), *NOTEBOOKS]
    pages = {page for page in found if page.name != "index.md"}
    assert pages <= {path for name in ("index", "measurements") for path, _ in links(ROOT / "docs" / f"{name}.md")}


@pytest.mark.parametrize(
    ("page", "notebook"),
    [("fp8", "fp8_linear"), ("adam", "low_precision_adam"), ("linear_cross_entropy", "quickstart")],
)
def test_a_page_links_the_notebook_of_its_subject(page, notebook):
    assert ROOT / "notebooks" / f"{notebook}.ipynb" in {path for path, _ in links(ROOT / "docs" / f"{page}.md")}
