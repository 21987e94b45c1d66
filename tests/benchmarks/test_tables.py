"""Tables and figures: made from result files alone, checked, and the pages of this repository are current."""

import copy
import json
import re
import subprocess
import xml.etree.ElementTree

import pytest

from benchmarks import first_screen, tables

MARKED = "Before.\n<!-- {kind}: demo gpu-x -->\nstale\n<!-- /{kind} -->\nAfter.\n"


def row(case, implementation, ratio, operation="both"):
    return {
        "case": case,
        "operation": operation,
        "implementation": implementation,
        "median_ms": ratio * 2,
        "spread": {"min_ms": 1.0, "max_ms": 2.0, "iqr_ms": 0.125, "samples": 3},
        "bytes": 10,
        "share_of_floor": 0.5,
        "ratio_to_copy": ratio,
        "speedup_over": {} if implementation == "peer" else {"peer": 4.25},
        "temporaries_over_logits": None if implementation == "peer" else 1.0,
    }


DOCUMENT = {
    "family": "demo",
    "commit": "0123456789abcdef",
    "dirty": False,
    "date": "2026-01-02T03:04:05Z",
    "versions": {"jax": "0.11.2", "optax": "0.2.8", "numpy": "2.0"},
    "device": {"kind": "GPU X", "platform": "gpu", "driver": "580.1", "host": "processor"},
    "headline": {
        "operation": "both",
        "figure": "ratio_to_copy",
        "label": 'Time & "copies"',
        "implementations": ["te_jax", "peer", "never"],
    },
    "rows": [
        row("small", "te_jax", 1.5),
        row("small", "peer", 6.375),
        row("large", "te_jax", 1.75),
        row("large", "te_jax", 9.0, operation="forward"),
    ],
    "skipped": [{"case": "large", "operation": "both", "implementation": "peer", "reason": "out of memory"}],
}


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    return tmp_path


def page(root, kind, name="docs/page.md"):
    (root / name).write_text(MARKED.format(kind=kind))
    return root / name


def publish(root, document=DOCUMENT, device="gpu-x"):
    path = root / "benchmarks" / "results" / device / f"{document['family']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize("kind", ["summary", "figure"])
def test_a_place_without_results_says_so(root, kind):
    path = page(root, kind)
    assert tables.main([]) == 0
    text = path.read_text()
    assert "Not measured yet on gpu-x" in text
    assert text.startswith("Before.\n")
    assert text.endswith("After.\n")
    assert "stale" not in text


def test_the_page_beside_a_result_file_has_every_row_and_what_was_not_measured(root):
    document = copy.deepcopy(DOCUMENT)
    del document["rows"][2]["share_of_floor"]
    another = {"case": "small", "operation": "both", "implementation": "never", "reason": "not installed"}
    document["skipped"] += [another, another]
    publish(root, document)
    assert tables.main(["--check"]) == 1
    assert tables.main([]) == 0
    text = (root / "benchmarks" / "results" / "gpu-x" / "demo.md").read_text()
    assert text.startswith("# demo, GPU X\n")
    assert "| small | `te_jax` | 3.000 | 0.125 | 1.50 | 50% | 1.00 | 4.25 |" in text
    assert "| small | `peer` | 12.750 | 0.125 | 6.38 | 50% |  |  |" in text
    assert "| large | `te_jax` | 3.500 | 0.125 | 1.75 |  | 1.00 | 4.25 |" in text
    assert "| large | `te_jax` | 18.000 |" in text
    assert "large, both, `peer`: out of memory" in text
    assert text.count("small, both, `never`: not installed") == 1
    assert "GPU X, driver 580.1; jax 0.11.2, optax 0.2.8; commit 0123456789ab; 2026-01-02." in text


def test_times_by_kind_have_a_table_of_their_own():
    document = copy.deepcopy(DOCUMENT)
    document["rows"][0]["breakdown_ms"] = {"GEMM": 2.04, "NCCL": 0.0, "idle": 0.0}
    document["rows"][2]["breakdown_ms"] = {"GEMM": 3.0, "NCCL": 0.04, "idle": 0.26}
    text = tables.results_page(document)
    wanted = "| case | implementation | GEMM | idle |\n| --- | --- | ---: | ---: |\n"
    wanted += "| small | `te_jax` | 2.0 | 0.0 |\n| large | `te_jax` | 3.0 | 0.3 |\n\n"
    assert f"GPU time by kind, ms:\n\n{wanted}" in text
    assert text.count("GPU time by kind") == 1


def test_a_summary_has_one_line_for_each_case_of_the_headline(root):
    path = page(root, "summary", "README.md")
    publish(root)
    assert tables.main([]) == 0
    text = path.read_text()
    assert "| case | `te_jax` | `peer` |\n" in text
    assert "| small | 1.50 | 6.38 |" in text
    assert "| large | 1.75 |  |" in text
    assert "9.00" not in text


def test_gains_are_in_times_as_fast_with_the_memory_of_both(root, monkeypatch):
    page, home = root / "README.md", root / "docs" / "index.md"
    for each in (page, home):
        each.write_text("Before.\n<!-- gains -->\nstale\n<!-- /gains -->\n")
    place = ("demo", "gpu-x", "both", "small")
    gains = ("a step", "1 × GPU", place, "te_jax", "peer", "the peer"), ("", "", place, "peer", "te_jax", "us")
    monkeypatch.setattr(tables, "GAINS", gains)
    assert tables.main([]) == 0
    assert "stale" not in page.read_text()
    document = copy.deepcopy(DOCUMENT)
    document["rows"][0]["peak_bytes"], document["rows"][1]["peak_bytes"] = 30, 40
    publish(root, document)
    assert tables.main([]) == 0
    text = page.read_text()
    assert (
        "| a step | 1 × GPU | [the peer](benchmarks/results/gpu-x/demo.md) | **4.25×** | 0.75× | 2026-01-02 |" in text
    )
    assert "|  |  | [us](benchmarks/results/gpu-x/demo.md) | **0.24×** | 1.33× | 2026-01-02 |" in text
    assert "[us](../benchmarks/results/gpu-x/demo.md)" in home.read_text()
    publish(root, {**document, "dirty": True})
    assert tables.main([]) == 0
    assert "| 2026-01-02 with local changes |" in page.read_text()
    monkeypatch.setattr(tables, "GAINS", (("a step", "", place, "te_jax", "never", "a peer that did not run"),))
    assert tables.main([]) == 1


PLACE = ("demo", "gpu-x", "both", "small")


@pytest.mark.parametrize("shown", ["<!-- first_rows -->\n<!-- /first_rows -->\n", MARKED.format(kind="summary")])
def test_check_tells_the_age_of_what_the_readme_shows_and_refuses_local_changes(root, monkeypatch, capsys, shown):
    (root / "README.md").write_text(shown)
    monkeypatch.setattr(tables, "FIRST", (("a step", "1 × GPU", PLACE, "te_jax", "peer", "the peer"),))
    publish(root)
    assert tables.main([]) == 0
    assert "2026-01-02" in (root / "README.md").read_text()
    assert tables.main(["--check"]) == 0
    printed = capsys.readouterr().out
    assert re.search(
        "^README.md, .*(a step|demo gpu-x).*: 2026-01-02$", printed, re.MULTILINE
    )  # no commits without git
    publish(root, {**DOCUMENT, "dirty": True})
    assert tables.main([]) == 0
    assert tables.main(["--check"]) == 1
    assert "demo.json was measured with local changes" in capsys.readouterr().err
    (root / "README.md").rename(root / "docs" / "page.md")
    assert tables.main([]) == 0
    assert tables.main(["--check"]) == 0


def test_rows_of_another_run_are_compared_and_dated_by_it(root, monkeypatch, capsys):
    page = root / "README.md"
    page.write_text(
        "<!-- first_rows -->\n<!-- /first_rows -->\n"
        "It is <!-- ratio: demo gpu-x both small te_jax peer --><!-- /ratio -->.\n"
    )
    monkeypatch.setattr(tables, "FIRST", (("a step", "1 × GPU", PLACE, "te_jax", "peer", "the peer"),))
    document = copy.deepcopy(DOCUMENT)
    document["rows"][0] |= {
        "run": {"commit": "fedcba9876543210", "dirty": False, "date": "2025-12-31T00:00:00Z"},
        "speedup_over": {"peer": 3.0},  # not the quotient of both times
    }
    publish(root, document)
    assert tables.main([]) == 0
    first, second = [line for line in page.read_text().splitlines() if "×" in line]
    assert first.endswith("| **3.00×** |  | 2025-12-31 |")
    assert "-->3.00×<!--" in second
    assert tables.main(["--check"]) == 0
    assert "README.md, a step: 2025-12-31" in capsys.readouterr().out
    where = "commit 0123456789ab; 2026-01-02. `small` by `te_jax`: commit fedcba987654; 2025-12-31."
    assert tables.provenance(document).endswith(where)
    assert tables.provenance(document | {"rows": document["rows"][:1]}).endswith(
        "`small`: commit fedcba987654; 2025-12-31."
    )
    document["rows"][0]["speedup_over"] = {}
    publish(root, document)
    assert tables.main([]) == 1
    assert "no run of small has te_jax and peer" in capsys.readouterr().err


def test_age_counts_commits_of_the_package_and_its_kernels(tmp_path):
    def git(*words):
        who = "-c", "user.name=x", "-c", "user.email=x@example.com"
        return subprocess.run(
            ["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True, text=True
        ).stdout

    git("init", "--quiet")
    for place in ("te_jax", "te_jax/ops", "cuda_ext", "docs"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "file").touch()
        git("add", ".")
        git("commit", "--quiet", "--message", place)
    measured = git("rev-list", "HEAD").split()[-1]
    assert first_screen.age(tmp_path, {**DOCUMENT, "commit": measured}).startswith("2026-01-02, 2 commits of te_jax/")
    assert first_screen.age(tmp_path, DOCUMENT) == "2026-01-02", "a commit that is not there"


def test_the_first_figure_has_speed_memory_and_loss_of_what_was_measured(root):
    page = root / "README.md"
    page.write_text("<!-- first_figure -->\n<!-- /first_figure -->\n")
    assert tables.main([]) == 0
    assert f"Not measured yet on {first_screen.DEVICE}" in page.read_text()
    figures = ("nnx", 10.0, 60, 2.5), ("nnx_loss", 8.0, 45, 2.75)
    rows = [
        {**row(first_screen.CASE, name, ms / 2), "peak_bytes": gb * 10**9, "losses": [9.0, loss]}
        for name, ms, gb, loss in figures
    ]
    document = {**DOCUMENT, "family": "flax_models", "rows": rows}
    publish(root, document, first_screen.DEVICE)
    assert tables.main([]) == 0
    assert "](docs/images/first-screen.svg)" in page.read_text()
    drawing = root / "docs" / "images" / "first-screen.svg"
    svg = xml.etree.ElementTree.parse(drawing).getroot()
    bars = [float(item.get("width", "")) for item in svg.iter("{http://www.w3.org/2000/svg}rect")]
    assert [bars[0] / bars[1], bars[3] / bars[2]] == pytest.approx([8 / 10, 45 / 60], rel=1e-2)
    words = [item.text for item in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"1.25×", "60.0", "45.0", "2.50", "2.75", "step 2", "te_jax: three changes", "GPU X, 2026-01-02"} <= set(
        words
    )
    assert "te_jax: one change" not in words
    older = {"commit": "fedcba9876543210", "dirty": False, "date": "2025-12-31T00:00:00Z"}
    publish(root, {**document, "rows": [rows[0], rows[1] | {"run": older}]}, first_screen.DEVICE)
    assert tables.main([]) == 0
    assert "te_jax: three changes" not in drawing.read_text(), "two runs are not compared"
    publish(root, {**document, "rows": rows[1:]}, first_screen.DEVICE)
    assert tables.main([]) == 1, "no bar to compare with"
    del rows[1]["losses"]
    publish(root, document, first_screen.DEVICE)
    assert tables.main(["--check"]) == 1
    assert tables.main([]) == 0
    assert "loss" not in drawing.read_text()


def test_changes_are_beside_the_plain_model_and_lines_without_figures_are_left_out(root):
    page = root / "docs" / "guide.md"
    page.write_text("<!-- changes -->\n<!-- /changes -->\n\n<!-- waiting -->\n<!-- /waiting -->\n")
    assert tables.main([]) == 0
    assert page.read_text().count(f"Not measured yet on {first_screen.DEVICE}: run `te-jax bench flax_models`") == 2

    def row(case, name, milliseconds, **figures):
        times = {"median_ms": milliseconds, "spread": {"iqr_ms": 0.0}, "speedup_over": {}}
        return {"operation": "step", "case": case, "implementation": name, **times, **figures}

    waited = {f"waited_{form}_ms": 12.0 for form in ("jit", "cached", "split")}
    rows = [
        row(case, "nnx" + change, 10.0 - place, peak_bytes=(9 - place) * 10**9, **({} if place else waited))
        for case in ("8b-8x1x8192", "8b-8x4x2048")
        for place, (_, change) in enumerate(tables.CHANGES)
        if change != "_params"
        if (case, change) != ("8b-8x4x2048", "_convert")
    ]
    publish(root, {**DOCUMENT, "family": "flax_models", "rows": rows}, first_screen.DEVICE)
    assert tables.main([]) == 0
    changes, _, waiting = page.read_text().partition("<!-- waiting -->")
    assert "| the plain model | 10.0 | 1.00× | 9.0 | 1.00× |" in changes
    assert "| 1. `convert` | 9.0 | 1.11× | 8.0 |  |" in changes
    assert "| 2. `te_jax.optim.adamw`, moments in bfloat16 | 8.0 | 1.25× | 7.0 | 1.25× |" in changes
    assert "int16" not in changes
    assert "| the plain model | 10.0 | 12.0 | 12.0 | 12.0 |" in waiting
    assert "convert" not in waiting


SENTENCE = "It is <!-- ratio: demo gpu-x both {} te_jax peer{} -->stale<!-- /ratio --> as fast.\n"


def test_a_ratio_stands_in_a_sentence(root):
    page = root / "README.md"
    page.write_text(SENTENCE.format("small", "") + SENTENCE.format("small", " ratio_to_copy"))
    assert tables.main([]) == 0
    assert page.read_text().count(">(not measured yet)<!--") == 2
    document = copy.deepcopy(DOCUMENT)
    document["rows"][0]["median_ms"] = 2.0
    publish(root, document)
    assert tables.main(["--check"]) == 1
    assert tables.main([]) == 0
    first, second = page.read_text().splitlines()
    assert "-->6.38×<!-- /ratio --> as fast." in first
    assert "-->4.25×<!-- /ratio --> as fast." in second


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"device": {"driver": None}}, "GPU X, driver unknown; "),
        ({"device": {"platform": "cpu", "driver": None}}, "CPU: processor; "),
        ({"versions": {"cuBLAS": "13.1.1", "cuDNN": "9.19.1"}}, "optax 0.2.8, cuBLAS 13.1.1, cuDNN 9.19.1; commit"),
        ({"dirty": True}, "commit 0123456789ab with local changes"),
    ],
)
def test_where_and_of_what_a_result_is(changes, where):
    document = {key: DOCUMENT[key] | value if isinstance(value, dict) else value for key, value in changes.items()}
    assert where in tables.provenance(DOCUMENT | document)


@pytest.mark.parametrize("kind", ["summary", "figure"])
def test_a_row_without_the_figure_of_the_headline_is_left_out(root, kind):
    path = page(root, kind)
    document = copy.deepcopy(DOCUMENT)
    del document["rows"][0]["ratio_to_copy"]
    publish(root, document)
    assert tables.main([]) == 0
    shown = path if kind == "summary" else root / "docs" / "images" / "demo-gpu-x.svg"
    assert ("1.75" in shown.read_text(), "1.50" in shown.read_text()) == (True, False)


@pytest.mark.parametrize(("name", "link"), [("README.md", "docs/images/"), ("docs/page.md", "images/")])
def test_a_figure_is_well_formed_and_linked_from_where_the_page_stands(root, name, link):
    path = page(root, "figure", name)
    publish(root)
    assert tables.main([]) == 0
    assert f'![Time & "copies"]({link}demo-gpu-x.svg)' in path.read_text()
    svg = xml.etree.ElementTree.parse(root / "docs" / "images" / "demo-gpu-x.svg").getroot()
    bars = [float(item.get("width", "")) for item in svg.iter("{http://www.w3.org/2000/svg}rect")]
    assert len(bars) == 3
    assert bars[1] / bars[0] == pytest.approx(6.375 / 1.5, rel=1e-2)


@pytest.mark.parametrize("kind", ["summary", "figure"])
def test_check_accepts_what_was_generated_and_nothing_else(root, kind, capsys):
    path = page(root, kind)
    publish(root)
    assert tables.main(["--check"]) == 1
    assert "stale" in path.read_text(), "--check must change nothing"
    assert "-stale" in capsys.readouterr().out
    assert tables.main([]) == 0
    assert tables.main(["--check"]) == 0
    faster = copy.deepcopy(DOCUMENT)
    for measured in faster["rows"]:
        measured["ratio_to_copy"] /= 2
    publish(root, faster)
    assert tables.main(["--check"]) == 1
    publish(root)
    if kind == "figure":
        drawn = root / "docs" / "images" / "demo-gpu-x.svg"
        drawn.write_text(drawn.read_text().replace("1.50", "1.05"))
        assert tables.main(["--check"]) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (SENTENCE.format("large", ""), "has no "),
        (SENTENCE.format("small", " no_key"), "has no "),
        (SENTENCE.format("small", "").replace("is ", "is\n"), "begins a line"),
        *(
            (text, "README.md has a marker without its partner")
            for text in (
                "<!-- summary: demo gpu-x -->\nopen\n", "<!-- summary: demo -->\nx\n<!-- /summary -->\n",
                "<!-- /summary -->\n", "<!-- table: demo gpu-x -->\nx\n<!-- /table -->\n",
                "<!-- gains -->\nopen\n", "<!-- changes -->\n<!-- /waiting -->\n",
            )
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_filled_is_an_error_instead_of_forgotten(root, text, words, capsys):
    (root / "README.md").write_text(text)
    publish(root)
    assert tables.main([]) == 1
    assert words in capsys.readouterr().err


def test_the_pages_of_this_repository_are_current(capsys):
    assert tables.main(["--check"]) == 0, capsys.readouterr().out
