"""Names and arguments of te_jax that pages mention in code exist."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")} - {ROOT / "CHANGELOG.md"})  # which names what is gone
_CODE_BLOCK = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
_NAME = re.compile(r"`(?P<code>te_jax(?:\.\w+)+(?:\(.*?\))?)`")


def mentioned(text):
    """(dotted name, keyword arguments) of what stands between single backticks."""
    for match in _NAME.finditer(_CODE_BLOCK.sub("", text)):
        name, _, arguments = " ".join(match["code"].split()).partition("(")
        arguments = arguments.removesuffix(")").replace("…", "...")
        keywords = re.findall(r"(?:^|[,(] ?)(\w+)=", arguments)
        yield name, keywords


def resolve(name):
    """The object of a dotted name, importing modules on the way."""
    value, path = importlib.import_module("te_jax"), "te_jax"
    for part in name.split(".")[1:]:
        path += f".{part}"
        if not hasattr(value, part) and inspect.ismodule(value):
            importlib.import_module(path)
        value = getattr(value, part)
    return value


def takes(function, keywords):
    """Whether a call with these keyword arguments binds; what a function hands on as **arguments is not followed."""
    # A class of NNX hides its arguments behind its metaclass.
    plain = function.__init__ if inspect.isclass(function) and "nnx" in function.__module__ else function
    parameters = inspect.signature(plain).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return True
    return set(keywords) <= set(parameters)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_names_exist_and_take_the_arguments(page):
    for name, keywords in mentioned(page.read_text(encoding="utf-8")):
        if name.startswith("te_jax._te_"):  # an extension, which need not be there
            continue
        value = resolve(name)
        assert not keywords or takes(value, keywords), name


def test_what_does_not_exist_would_be_found():
    (module, _), (adamw, keywords) = mentioned("`te_jax.ops.dens` and `te_jax.optim.adamw(1e-3, mu=2)`")
    with pytest.raises(ModuleNotFoundError):
        resolve(module)
    assert not takes(resolve(adamw), keywords)
