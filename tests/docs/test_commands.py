"""What README.md, docs/ and the notebooks tell to type: commands, options and extras that there are."""

import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from te_jax.cli import _config, _options, bench, main
from te_jax.cli.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("notebooks/*.ipynb")])
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
_CODE = re.compile(r"```\w*\n(?P<block>.*?)```|`(?P<inline>[^`]+)`", re.DOTALL)
_STANDS_FOR = {"FAMILY": "gemm", "N": "2", "RANK": "8", "…": "none"}
_HF_CONFIG = {  # of Llama 3.2 1B, in the place of the models that pages name after --from
    **{"model_type": "llama", "vocab_size": 128_256, "num_hidden_layers": 16, "hidden_size": 2048},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192, "tie_word_embeddings": True},
}


def text_of(page):
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".md":
        return text
    return "\n\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown")


def commands(page, program, *, inline=True):
    """The words behind a program's name, wherever a page shows it in code."""
    for code in _CODE.finditer(text_of(page)):
        if not (inline or code["block"]):
            continue
        lines = code["block"].splitlines() if code["inline"] is None else [" ".join(code["inline"].split())]
        for line in lines:
            if line.startswith(program + " "):
                words = shlex.split(line.removeprefix(program), comments=True)
                yield [_STANDS_FOR.get(word, word) for word in words if word != "--help"]


def check_te_jax(words, folder):
    args = main._parser().parse_args(words)
    if words[0] == "train":
        if args.from_ is not None:
            (folder / "config.json").write_text(json.dumps(_HF_CONFIG))
            args.from_ = str(folder)
            args.lora = 8 if isinstance(args.lora, str) else args.lora
        _config.build_config(_options.resolve(args, None))
    if words[0] == "bench" and args.family is not None:
        assert bench._family(args.family) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_those_of_te_jax(page, tmp_path):
    for words in commands(page, "te-jax"):
        check_te_jax(words, tmp_path)


_WRONG = [
    *("train --recipes block", "train --recipe blocks", "trains", "bench cross_entropy", "train --lora 8"),
    *("train --from DIR --lora 8 --tp 2", "generate --top-q 1", "generate --run DIR --from DIR TEXT", "export"),
]


@pytest.mark.parametrize("command", _WRONG)
def test_commands_that_there_are_not_would_be_found(command, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"```python\nx = 1\n```\n`te-jax doctor`\n```sh\nte-jax {command}    # measures\n```\n")
    doctor, wrong = commands(page, "te-jax")
    check_te_jax(doctor, tmp_path)
    with pytest.raises((UserError, ModuleNotFoundError)):
        check_te_jax(wrong, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_extras_are_those_of_the_package(page):
    for words in commands(page, "pip install"):
        for named in re.findall(r"^\.\[(.*)\]$", words[-1]):
            assert set(named.split(",")) <= set(EXTRAS)


@pytest.mark.parametrize("extra", EXTRAS)
def test_extras_are_named_where_installation_is_explained(extra):
    _, _, install = text_of(ROOT / "README.md").partition("## Install\n")
    assert re.search(rf"`{extra}`|\[{extra}\]", install.partition("\n## ")[0])
    assert ["-e", f".[{extra}]"] in list(commands(ROOT / "docs" / "installation.md", "pip install"))


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_test_takes_an_environment_that_was_there_before_with_its_old_pip(tmp_path):
    (tmp_path / "bin").mkdir()
    for file in ("bin/python", "package.stamp"):
        (tmp_path / file).touch()
    command = ["make", "--dry-run", "test", f"VENV={tmp_path}"]
    environment = {"PATH": os.environ["PATH"]}  # make hands its own variables on
    found = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    lines = found.stdout.splitlines()
    (new_pip,) = (number for number, line in enumerate(lines) if "--upgrade" in line and "pip>=25.1" in line)
    (groups,) = (number for number, line in enumerate(lines) if "--group" in line)
    assert new_pip < groups


def test_the_package_is_installed_from_its_checkout():
    """No index has it."""
    files = [*PAGES, *(ROOT / "te_jax").rglob("*.py")]
    assert not [path for path in files if re.search(r"pip install[^`\n]*\bte_jax", path.read_text(encoding="utf-8"))]
