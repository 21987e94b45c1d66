"""Training runs of benchmarks.accuracy: stopped, resumed, condensed, and their table and figure."""

import json
import subprocess
import xml.etree.ElementTree

import pytest

from benchmarks import accuracy, accuracy_text, tables
from benchmarks.accuracy import Run

MARKED = "<!-- {kind}: accuracy gpu-x -->\nstale\n<!-- /{kind} -->\n"
RECORD = {
    "commit": "0123456789abcdef",
    "dirty": False,
    "date": "2026-01-02T03:04:05Z",
    "versions": {"jax": "0.11.2"},
    "device": {"kind": "GPU X", "platform": "gpu", "driver": "580.1", "host": "processor"},
}
HEADER = {
    "kind": "header",
    "options": {"steps": 40, "batch": 4, "seq_len": 100, "learning_rate": 0.5},
    "model": {"num_parameters": 12_300_000},
    "text": {"source": "text.txt", "tokens": 8000, "sha256": "ab"},
}


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    for kind in ("summary", "figure"):
        (tmp_path / "docs" / f"{kind}.md").write_text(MARKED.format(kind=kind))
    return tmp_path


def publish(root, run, loss, output="", header=HEADER):
    """The result of a run whose training loss falls by one in 40 steps to `loss`, with a validation loss above it."""
    folder = root / run.name
    folder.mkdir()
    records = [{"kind": "validation", "step": 0, "loss": loss + 1.5}]
    records += [{"kind": "train", "step": step, "loss": loss + 1 - step / 40} for step in range(1, 41)]
    records += [{"kind": "validation", "step": 40, "loss": loss + 0.5}]
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in [header, *records]))
    (folder / "output.txt").write_text(output)
    results = root / "benchmarks" / "results" / "gpu-x" / "accuracy"
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{run.name}.json").write_text(json.dumps(RECORD | accuracy.condensed(folder, run)))


def publish_all(root):
    publish(root, Run("bf16", 0), 2.0)
    publish(root, Run("bf16", 1), 2.02)
    stopped = "te-jax: SIGTERM: step {} of 40 is saved; continue with te-jax train --resume\n"
    publish(root, Run("block", 0), 2.01)
    publish(root, Run("block", 1), 2.0, stopped.format(7) + stopped.format(31))


def test_without_results_both_places_say_so(root):
    assert tables.main([]) == 0
    for kind in ("summary", "figure"):
        text = (root / "docs" / f"{kind}.md").read_text()
        assert "Not measured yet on gpu-x: run `python -m benchmarks.accuracy`" in text
        assert "stale" not in text


def test_the_table_has_each_seed_beside_that_of_bfloat16_and_the_mean(root):
    publish_all(root)
    assert tables.main([]) == 0
    text = (root / "docs" / "summary.md").read_text()
    # The mean of the last four of 40 steps is 0.0375 above the last.
    assert "| training loss | seed 0 | seed 1 | mean |" in text
    assert "| `bf16` | 2.0375 | 2.0575 | 2.0475 |" in text
    assert "| `block` | 2.0475 (+0.49%) | 2.0375 (-0.97%) | 2.0425 (-0.24%) |" in text
    assert "| validation loss | seed 0 | seed 1 | mean |" in text
    assert "| `block` | 2.5100 (+0.40%) | 2.5000 (-0.79%) | 2.5050 (-0.20%) |" in text
    assert "seeds of `bf16` differ by 0.98% in training and 0.80% in validation" in text
    assert "12.3 million parameters" in text
    assert "each is met 2.2 times in the mean" in text  # 16000 of 7200 tokens
    assert "the last 4 steps" in text
    assert "Stopped and resumed from a checkpoint: `block` with seed 1 after step 7, 31." in text
    assert "GPU X, driver 580.1; jax 0.11.2; commit 0123456789ab; 2026-01-02." in text


def test_the_figure_has_a_curve_for_each_run_and_one_for_each_difference(root):
    publish_all(root)
    assert tables.main([]) == 0
    assert "(images/accuracy-gpu-x.svg)" in (root / "docs" / "figure.md").read_text()
    svg = xml.etree.ElementTree.parse(root / "docs" / "images" / "accuracy-gpu-x.svg").getroot()
    lines = list(svg.iter("{http://www.w3.org/2000/svg}polyline"))
    assert len(lines) == 4 + 2
    falling = [float(place.split(",")[1]) for place in lines[0].get("points", "").split()]
    assert falling == sorted(falling)  # down the page
    assert len(falling) > 30
    # The first seed of block is above bfloat16 everywhere, the second one below.
    above, below = ([float(place.split(",")[1]) for place in line.get("points", "").split()] for line in lines[4:])
    assert max(above) < min(below)


def test_runs_of_another_text_are_not_compared(root, capsys):
    publish(root, Run("bf16", 0), 2.0)
    publish(root, Run("block", 0), 2.0, header=HEADER | {"text": HEADER["text"] | {"sha256": "cd"}})
    assert tables.main([]) == 1
    assert "has runs with different text: train them all again" in capsys.readouterr().err


def test_a_run_that_fails_says_why(tmp_path, monkeypatch, capsys):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho out of memory\nexit 2\n")
    python.chmod(0o755)
    monkeypatch.setattr(accuracy.sys, "executable", str(python))
    runs = [Run("bf16", 0), Run("block", 0)]
    assert accuracy.train(runs, [], tmp_path / "runs", tmp_path / "results", RECORD, float("inf")) == 1
    assert "bf16-0: failed: out of memory" in capsys.readouterr().out
    assert not (tmp_path / "results").exists()


def test_text_comes_from_a_commit_without_links_and_other_files(tmp_path):
    def git(*words):
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
        subprocess.run(["git", "-C", tmp_path, *identity, *words], check=True, capture_output=True)

    git("init", "--quiet")
    (tmp_path / "b.md").write_text("b\nä\n")
    (tmp_path / "a.rst").write_text("")
    (tmp_path / "c.py").write_text("c")
    (tmp_path / "link.md").symlink_to("b.md")
    git("add", ".")
    git("commit", "--quiet", "-m", "files")
    (tmp_path / "b.md").write_text("changed since")
    assert list(accuracy_text.documents(str(tmp_path), "HEAD")) == ["", "b\nä\n"]


def test_long_paragraphs_are_kept_once_and_short_documents_are_left_out(monkeypatch):
    monkeypatch.setattr(accuracy_text, "_DOCUMENT", 100)
    shared = "a paragraph of both documents, " * 4
    first, second = f"# Title\r\n\r\n{shared}\r\n\r\none", f"# Title\n\n{shared}\n\n{'two, ' * 40}"
    joined = accuracy_text.joined(iter([first, second, "short"]))
    assert joined.count(shared) == 1
    assert joined.count("# Title") == 2
    assert "one" in joined
    assert "two" in joined
    assert "short" not in joined
    assert "\r" not in joined
