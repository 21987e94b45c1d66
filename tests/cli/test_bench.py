"""`te-jax bench`: finding the benchmarks, refusing mistakes in a sentence, and running a family."""

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

import jax
import pytest

from te_jax.cli import bench
from te_jax.cli.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def run(*words):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(words))


@pytest.fixture(autouse=True)
def _in_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))


def test_without_family_it_lists_the_families(capsys):
    assert run() == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert "softmax_cross_entropy" in [line.split()[0] for line in lines]
    assert not {"harness", "shapes", "tables"} & {line.split()[0] for line in lines}


def test_a_family_whose_package_is_missing_is_listed_and_refused_in_a_sentence(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "benchmarks.adam", raising=False)
    monkeypatch.setitem(sys.modules, "optax", None)
    assert run() == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[1:]}
    assert "optax, which is not installed" in lines["adam"]
    assert "softmax_cross_entropy" in lines
    with pytest.raises(UserError, match="adam needs optax, which is not installed: pip install optax"):
        run("adam", "--quick")


@pytest.mark.parametrize("name", ["nope", "harness", "os.path", ""])
def test_an_unknown_family_is_refused(name):
    with pytest.raises(UserError, match=re.escape("is called 'stepp' (did you mean step?); `te-jax bench` lists them")):
        run("stepp")
    with pytest.raises(UserError, match="no benchmark family is called"):
        run(name)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--cases", "1x1"), "--cases 1x1 is unknown; the cases are: .*8192x128256-bfloat16"),
        (("--peers", "nobody"), "--peers nobody is unknown; the peers are: .*optax"),
    ],
)
def test_unknown_cases_and_peers_are_refused_with_the_known_ones(words, message):
    with pytest.raises(UserError, match=message):
        run("softmax_cross_entropy", *words)


def test_an_output_folder_that_cannot_be_made_is_refused_before_measuring(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be made"):
        run("softmax_cross_entropy", "--output", str(tmp_path / "file" / "folder"))


@pytest.mark.parametrize("error", [RuntimeError("no GPU\nand more"), AssertionError()])
def test_a_backend_that_does_not_start_is_one_sentence(error, monkeypatch):
    def devices():
        raise error

    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(UserError, match="JAX starts no backend") as refused:
        run("softmax_cross_entropy")
    assert "\n" not in str(refused.value)


def test_a_quick_run_prints_a_table_and_writes_where_it_is_told(tmp_path, capsys):
    words = ("--quick", "--cases", "4096x256-float32", "--peers", "jnp", "--commit", "abc")
    assert run("softmax_cross_entropy", *words, "--output", str(tmp_path)) == 0
    (path,) = tmp_path.glob("*/softmax_cross_entropy.json")
    document = json.loads(path.read_text())
    measured = {(row["operation"], row["implementation"]) for row in document["rows"]}
    assert {(operation, name) for operation in ("forward", "forward_backward") for name in ("jnp", "copy")} <= measured
    assert {"optax", "torch"}.isdisjoint(name for _, name in measured)
    assert document["commit"] != "unknown"
    assert {"jax", "jaxlib", "te_jax"} <= document["versions"].keys()
    for row in document["rows"]:
        assert row["spread"]["min_ms"] <= row["median_ms"] <= row["spread"]["max_ms"]
    shown = capsys.readouterr().out
    assert "4096x256-float32" in shown
    assert shown.endswith(f"Drawn in {path.with_suffix('.svg')}.\n")
    assert "4096x256-float32" in path.with_suffix(".svg").read_text()


def test_an_installed_package_finds_the_benchmarks_of_its_wheel(monkeypatch, tmp_path, capsys):
    package = tmp_path / "te_jax"
    shutil.copytree(
        ROOT / "benchmarks", package / "cli/_installed/benchmarks", ignore=shutil.ignore_patterns("results")
    )
    monkeypatch.setattr(bench, "__file__", str(package / "cli/bench.py"))
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(ROOT))])
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        monkeypatch.delitem(sys.modules, name)
    assert run() == 0
    assert "softmax_cross_entropy" in capsys.readouterr().out
    assert sys.modules["benchmarks.softmax_cross_entropy"].__file__.startswith(str(package))
