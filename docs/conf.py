"""The documentation site, built by `make docs` from the pages, notebooks and docstrings of this checkout.

The source folder is the checkout itself, so that a relative link means the same on the site as on GitHub.
"""

import os
import re
import sys
from pathlib import Path

from sphinx.util import inspect

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["JAX_PLATFORMS"] = "cpu"

project = "te_jax"
author = "The te_jax authors"
copyright = author
version = release = re.findall(r'__version__ = "(.*)"', (ROOT / "te_jax" / "_version.py").read_text())[0]

extensions = ["myst_nb", "sphinx_copybutton"]
extensions += [f"sphinx.ext.{name}" for name in ("autodoc", "autosummary", "napoleon", "viewcode")]
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "notebooks/*.ipynb",
    "benchmarks/results/*/*.md",
    "benchmarks/lab/*.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
]
exclude_patterns = ["**/.ipynb_checkpoints"]

# furo: pages are plain HTML that reads well on a phone and in the dark, with two tables of contents and no framework.
html_theme = "furo"
pygments_dark_style = "github-dark"  # the default underlines names of modules as if they were links
html_title = f"te_jax {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/favicon.svg"
html_extra_path = ["_redirect"]  # the site's own index.html leads to docs/index.html
html_show_copyright = False
html_show_sourcelink = False
copybutton_exclude = ".linenos, .gp, .go"

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
myst_html_meta = {"description": "te_jax trains transformers in FP8 on NVIDIA H100 and H200 GPUs from JAX."}
suppress_warnings = ["mystnb.unknown_mime_type"]
nb_execution_mode = "off"  # notebooks are stored with their outputs, which `make notebooks` writes
nb_merge_streams = True

autodoc_default_options = {
    "members": True,
    "special-members": "__call__",
    "exclude-members": "dtype, param_dtype",  # attributes whose values are classes, with docstrings of JAX's
    "member-order": "bysource",
}
autodoc_inherit_docstrings = False
autodoc_typehints = "none"  # docstrings state shapes and dtypes, which annotations cannot
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Args", "params_style"), ("Attributes", "params_style")]  # several names on a line stay so
napoleon_use_rtype = False
# `te_jax.ops.dense` in a docstring is a link where there is such a name, which -n checks; other code is code.
default_role = "py:obj"
nitpick_ignore_regex = [("py:.*", r"(?!te_jax\.).*")]

_CODE = re.compile(r"(`[^`]*`)")
_MARKUP = re.compile(r"(\*|\|(?=\S)|(?<=\w)_(?!\w))")


_GROUP_OR_NAME = re.compile(r"^(.+)\n---+$|^\.\. auto(?:class|exception|function):: (\w+)$", re.MULTILINE)


def with_summaries(app, docname, source):
    """An API page in groups begins with a line on each of its functions and classes."""
    found = _GROUP_OR_NAME.findall(source[0]) if docname.startswith("docs/api/") else []
    if any(group for group, _ in found):
        tables = ""
        for group, name in found:
            tables += f"\n**{group}**\n\n.. autosummary::\n   :nosignatures:\n\n" if group else f"   {name}\n"
        head, first, rest = source[0].partition(f"{found[0][0]}\n---")
        source[0] = f"{head}{tables}\n{first}{rest}"


def as_restructured_text(app, what, name, obj, options, lines):
    """Docstrings are plain text: names in backticks, examples after >>>, formulas and tables indented behind an empty
    line. Nothing else in them is markup."""
    # In its first line napoleon takes what stands before a colon for a type.
    result = [""] if what in ("attribute", "data", "property") else []
    depth, base, literal, example = 0, 0, False, False
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if line.strip():
            literal = literal and indent > base
            example = example or line.lstrip().startswith(">>>")
            if not literal and not example and result and not result[-1].strip() and indent > depth:
                literal, base = True, depth
                result += [" " * depth + "::", ""]
            if not (literal or example):
                parts = _CODE.split(line)
                line = "".join(part if part.startswith("`") else _MARKUP.sub(r"\\\1", part) for part in parts)
            depth = depth if literal else indent
        else:
            example = False
        result.append(line)
    lines[:] = result


def without_fields_of_tuples(app, what, name, obj, skip, options):
    return True if type(obj).__name__ == "_tuplegetter" else None


def plain_signature(app, what, name, obj, options, signature, return_annotation):
    """Arguments of NNX classes, which their metaclass hides, and defaults without addresses and module paths."""
    if what == "class" and signature == "(*args, **kwargs)":
        parameters = inspect.signature(obj.__init__, bound_method=True)
        signature = inspect.stringify_signature(parameters, show_annotation=False)
    if signature:
        signature = re.sub(r"<function [\w.<>]+?>(?=[,)])", "…", signature)
        signature = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", signature)
    return signature, return_annotation


def setup(app):
    app.connect("source-read", with_summaries)
    app.connect("autodoc-process-signature", plain_signature)
    app.connect("autodoc-skip-member", without_fields_of_tuples)
    app.connect("autodoc-process-docstring", as_restructured_text, priority=100)  # before napoleon
