"""The harness: turns, failures, derived figures and result files. Nothing here depends on how long anything takes."""

import dataclasses
import itertools
import json
import math

import jax
import pytest

from benchmarks import harness
from benchmarks.harness import Candidate, CaseResult, Family, Headline, Timing
from te_jax import native

FEW = Timing(samples=6, sample_seconds=1e-9)


def candidate(name, log, *, fails_at=None, **fields):
    """A candidate that logs its calls and, at call number `fails_at`, raises."""

    def call(argument):
        log.append(name)
        if fails_at is not None and log.count(name) >= fails_at:
            raise MemoryError(f"{name} is out of memory\nwith details")
        return argument

    return Candidate(
        name=name,
        call=call,
        arguments=lambda calls: [(index,) for index in range(calls)],
        wait=lambda _: None,
        **fields,
    )


LABELS = {"case": "small", "model": "test", "operation": "forward"}


def run_operation(names, *, fails=(), **options):
    """A result of implementations that return twice their number, but for those that fail to be built."""
    result = CaseResult()

    def build(name):
        if name in fails:
            raise MemoryError(f"{name} is out of memory")
        made = candidate(name, [])
        return dataclasses.replace(made, call=lambda _: names.index(name), read=lambda output: 2 * output)

    options = {
        "errors": lambda name, output, expected: ({"error": 0.0}, None),
        "row": lambda candidate, seconds: {"samples": len(seconds[candidate.name])},
    } | options
    harness.run_operation(LABELS, names, FEW, result, build=build, **options)
    return result


def reasons(problems):
    assert all((problem["case"], problem["operation"]) == ("small", "forward") for problem in problems)
    return {problem["implementation"]: problem["reason"] for problem in problems}


@pytest.mark.parametrize(("error", "bound"), [(0.0625, 0.5), (1.5, 0.5), (math.nan, 0.5), (None, 0.5), (0.25, 0.0)])
def test_a_wrong_result_is_not_timed_and_nan_is_wrong(error, bound):
    def errors(name, output, expected):
        found = {"y_error": 0.25, "dx_error": error if name == "b" else 0.0}
        return found, harness.out_of_bounds(found, {"y_error": 0.25, "dx_error": bound})

    result = run_operation(["a", "b"], errors=errors)
    right = error is None or error <= bound
    assert reasons(result.wrong) == ({} if right else {"b": f"dx_error is {error:.3g}, and its bound {bound:.3g}"})
    assert not result.skipped
    assert result.rows[0] == {**LABELS, "implementation": "a", "samples": 6, "y_error": 0.25, "dx_error": 0.0}
    assert list(result.rows[0]) == [*LABELS, "implementation", "samples", "y_error", "dx_error"]
    assert [row["implementation"] for row in result.rows] == (["a", "b"] if right else ["a"])


def test_results_are_compared_with_the_first_reference_that_runs():
    seen = {}

    def errors(name, output, expected):
        seen[name] = output, expected
        return {}, None

    result = run_operation(["a", "b", "c"], errors=errors, references=("c",))
    assert list(seen.items()) == [("c", (4, 4)), ("a", (0, 4)), ("b", (2, 4))]  # what `read` makes of results
    assert [row["implementation"] for row in result.rows] == ["a", "b", "c"]
    run_operation(["a", "b", "c"], errors=errors, references=("b", "c"), fails="b")
    assert seen["a"] == (0, 4)
    result = run_operation(["a", "b", "c"], errors=errors, references=("b", "c"), fails="bc")
    assert not result.rows
    assert reasons(result.skipped) == {
        "a": "RuntimeError: b or c, with which results are compared, failed",
        "b": "MemoryError: b is out of memory",
        "c": "MemoryError: c is out of memory",
    }


def test_there_are_no_rows_without_the_yardstick():
    result = run_operation(["a", "copy"], yardstick="copy", fails=["copy"])
    assert not result.rows
    assert reasons(result.skipped) == {
        "a": "copy was not measured, and all others are compared with it",
        "copy": "MemoryError: copy is out of memory",
    }
    assert len(run_operation(["a", "copy"], yardstick="copy").rows) == 2


def test_seconds_are_those_of_a_call_of_several_in_a_program(spend):
    four = Candidate(
        "a", lambda: spend(4.0), lambda calls: [()] * calls, seconds=lambda samples: [s / 4 for s in samples]
    )
    assert harness.measure([four], Timing(samples=2), pipelined=False)[0] == {"a": [1.0, 1.0]}


def test_candidates_are_sampled_in_rounds_and_follow_one_another_in_every_order():
    log = []
    seconds, failed = harness.measure([candidate(name, log) for name in "abc"], FEW, pipelined=True)
    assert not failed
    assert {name: len(samples) for name, samples in seconds.items()} == dict.fromkeys("abc", FEW.samples)
    samples = log[-3 * FEW.samples :]
    assert all(sorted(samples[i : i + 3]) == ["a", "b", "c"] for i in range(0, len(samples), 3))
    assert {(one, other) for one, other in itertools.pairwise(samples) if one != other} == set(
        itertools.permutations("abc", 2)
    )


def test_a_candidate_that_fails_costs_the_others_nothing():
    log = []
    candidates = [candidate("a", log), candidate("warm-up", log, fails_at=1), candidate("later", log, fails_at=5)]
    seconds, failed = harness.measure(candidates, FEW, pipelined=True)
    assert list(seconds) == ["a"]
    assert len(seconds["a"]) == FEW.samples
    assert failed == {
        "warm-up": "MemoryError: warm-up is out of memory",
        "later": "MemoryError: later is out of memory",
    }


@pytest.mark.parametrize("pipelined", [True, False])
def test_a_sample_waits_once_or_after_every_call(pipelined):
    waits = []
    counted = Candidate(
        name="a",
        call=lambda index: index,
        arguments=lambda calls: [(index,) for index in range(calls)],
        wait=waits.append,
        most_calls=16,
    )
    harness.measure([counted], Timing(samples=1, sample_seconds=1.0), pipelined=pipelined)
    # Each call returns its index: one call to warm up, one and 16, the most allowed, to find how many a sample takes.
    # Then the round that is not recorded and the one that is: of 16, after an eighth as many that are taken off.
    if pipelined:
        assert waits == [0, 0, 15, *[1, 15] * 2]
    else:
        assert waits == [0, 0, 0, *[*range(16), 15] * 3]


@pytest.fixture
def spend(monkeypatch):
    """Lets time pass, which passes in no other way."""
    now = [0.0]
    monkeypatch.setattr(harness.time, "perf_counter", lambda: now[0])

    def spend(seconds):
        now[0] += seconds
        return seconds

    return spend


@pytest.mark.parametrize("sample_seconds", [0.01, 0.03])
def test_what_it_costs_to_begin_and_to_end_is_taken_off(sample_seconds, spend):
    # A call takes 1 ms; to hear of the end of any takes 7 more.
    slow = Candidate(
        name="a",
        call=lambda: spend(1e-3),
        arguments=lambda calls: [()] * calls,
        wait=lambda result: result and spend(7e-3),
    )
    seconds, _ = harness.measure([slow], Timing(samples=2, sample_seconds=sample_seconds), pipelined=True)
    assert seconds["a"] == pytest.approx([1e-3, 1e-3])
    nothing = Candidate(name="b", call=lambda: None, arguments=lambda calls: [()] * calls, wait=lambda _: None)
    seconds, _ = harness.measure([nothing], Timing(samples=2), pipelined=True)
    assert seconds["b"] == [0.0, 0.0]


def test_a_sample_follows_a_rest_and_a_call_that_wakes_the_device(monkeypatch):
    log = []
    monkeypatch.setattr(harness.time, "sleep", log.append)
    timing = Timing(samples=8, sample_seconds=6e-9).rested
    assert timing == Timing(samples=4, sample_seconds=1e-9, rest_seconds=0.15)
    seconds, failed = harness.measure([candidate("a", log), candidate("b", log, fails_at=9)], timing, pipelined=True)
    assert {name: len(samples) for name, samples in seconds.items()} == {"a": 4}
    assert list(failed) == ["b"]
    rests = [i for i, each in enumerate(log) if each == 0.15]
    assert all(log[i + 1 : i + 3] in (["a", "a"], ["b", "b"]) for i in rests[:4])


def test_derived_figures_follow_from_medians():
    seconds = {"copy": [2e-3, 1e-3, 3e-3], "te_jax": [9e-3, 2e-3, 3.0004e-3], "peer": [12e-3, 11e-3, 99e-3]}
    row = harness.timing_row(seconds, "te_jax", floor_bytes=300, copy_bytes=200, peers=("peer", "absent", "te_jax"))
    assert row == {
        "median_ms": 3.0004,
        "spread": {"min_ms": 2.0, "max_ms": 9.0, "iqr_ms": 3.5, "samples": 3},
        "bytes": 300,
        "share_of_floor": 0.99987,
        "ratio_to_copy": 1.5002,
        "speedup_over": {"peer": 3.9995},
    }


def row_of(case):
    seconds = {"copy": [1e-3], "te_jax": [2e-3]}
    return {
        "case": case.name,
        "operation": "forward",
        "implementation": "te_jax",
        **harness.timing_row(seconds, "te_jax", floor_bytes=1, copy_bytes=2, peers=()),
    }


class Size:
    def __init__(self, name):
        self.name = name


def family_of(run_case):
    return Family(
        description="a family for tests",
        cases={jax.devices()[0].platform: (Size("small"), Size("large"))},
        implementations=("te_jax", "peer", "copy"),
        peers=("peer",),
        run_case=run_case,
        headline=Headline("forward", "ratio_to_copy", "label", ("te_jax", "peer")),
    )


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()  # as in a checkout
    return tmp_path / "results"


def test_a_complete_run_is_written_with_its_environment(results, monkeypatch):
    monkeypatch.setattr(native, "cuda_library_versions", lambda: {"cuDNN": "9.19.1"})
    status = harness.run_family(
        "demo", family_of(lambda case, *_: CaseResult(rows=[row_of(case)])), commit="abc", say=lambda _: None
    )
    (path,) = results.glob("*/demo.json")
    document = json.loads(path.read_text())
    assert status == 0
    assert [row["case"] for row in document["rows"]] == ["small", "large"]
    assert document["versions"]["jax"] == jax.__version__
    assert document["versions"]["cuDNN"] == "9.19.1"
    assert document["device"]["kind"] == jax.devices()[0].device_kind
    assert document["date"].endswith("Z")
    assert document["headline"]["figure"] == "ratio_to_copy"


def test_an_installed_package_writes_no_results_into_itself(results):
    results.rmdir()
    family, said = family_of(lambda case, *_: CaseResult(rows=[row_of(case)])), []
    assert harness.run_family("demo", family, commit="abc", say=said.append) == 0
    assert not results.exists()
    assert said[-1] == "\nNot written: name a folder with --output to keep it."


@pytest.mark.parametrize("partial", [{"quick": True}, {"cases": ["large"]}, {"peers": []}])
def test_a_partial_run_replaces_no_published_figures(partial, results):
    seen = []

    def run_case(case, implementations, timing):
        seen.append((case.name, tuple(implementations)))
        return CaseResult(rows=[row_of(case)])

    harness.run_family("demo", family_of(run_case), **partial, say=lambda _: None)
    assert not list(results.iterdir())
    everything = ("te_jax", "peer", "copy")
    assert (
        seen
        == {
            "quick": [("small", everything)],
            "cases": [("large", everything)],
            "peers": [("small", ("te_jax", "copy")), ("large", ("te_jax", "copy"))],
        }[next(iter(partial))]
    )


def test_a_run_in_parts_is_complete_with_its_last(tmp_path):
    def run(**options):
        family = family_of(lambda case, *_: CaseResult(rows=[row_of(case)]))
        harness.run_family("demo", family, output=tmp_path, commit="abc", say=lambda _: None, **options)
        (path,) = tmp_path.glob("*/demo.json")
        document = json.loads(path.read_text())
        path.write_text(json.dumps(document | {"date": "2026-01-02T03:04:05Z"}))  # the next one is of another time
        assert len(document["cases"]) == len(set(document["cases"]))
        return [row["case"] for row in document["rows"]], document["timing"]["complete"]

    assert run(cases=["small"], add=True) == (["small"], False)
    assert run(cases=["large"]) == (["large"], False)
    assert run(cases=["small"], peers=[], add=True) == (["large", "small"], False)
    assert run(cases=["small"], add=True) == (["large", "small"], True)
    assert run(cases=["large"], add=True) == (["small", "large"], True)
    assert run(cases=["large"], peers=[], add=True) == (["small", "large"], False)
    assert run(cases=["small", "large"], quick=True) == (["small", "large"], False)


def test_a_case_whose_rows_name_its_parts_takes_the_place_of_its_rows(tmp_path):
    def run_case(case, *_):
        rows = [row_of(case) | {"case": f"{case.name} {part}"} for part in "ab"]
        problem = {"case": f"{case.name} c", "operation": "forward", "implementation": "peer", "reason": "no memory"}
        return CaseResult(rows=rows, skipped=[problem])

    def run(**options):
        harness.run_family("demo", family_of(run_case), output=tmp_path, commit="abc", say=lambda _: None, **options)
        (path,) = tmp_path.glob("*/demo.json")
        document = json.loads(path.read_text())
        return [[each["case"] for each in document[key]] for key in ("rows", "skipped")]

    run()
    assert run(cases=["small"], add=True) == [["large a", "large b", "small a", "small b"], ["large c", "small c"]]


def test_rows_of_another_commit_say_so(tmp_path):
    """Those that a run of some peers does not measure are kept; what differs in device or versions is not mixed."""

    def run(commit, **options):
        def run_case(case, implementations, timing):
            return CaseResult(rows=[row_of(case) | {"implementation": name} for name in implementations])

        harness.run_family("demo", family_of(run_case), output=tmp_path, commit=commit, say=lambda _: None, **options)
        (path,) = tmp_path.glob("*/demo.json")
        document = json.loads(path.read_text())
        path.write_text(json.dumps(document | {"date": f"when {commit} was"}))
        runs = [(row, harness.run_of(document, row)["commit"]) for row in document["rows"]]
        return [(row["case"], row["implementation"], of) for row, of in runs], document

    run("old", cases=["small", "large"])
    rows, document = run("new", cases=["large"], peers=[], add=True)
    before = [(case, name, "old") for case, name in (("small", "te_jax"), ("small", "peer"), ("small", "copy"))]
    new = [("large", "te_jax", "new"), ("large", "copy", "new")]
    assert rows == [*before, ("large", "peer", "old"), *new]
    assert harness.run_of(document, document["rows"][0]) == {"commit": "old", "dirty": None, "date": "when old was"}
    assert run("last", cases=["large"], add=True)[0] == [
        *before,
        *(("large", name, "last") for name in ("te_jax", "peer", "copy")),
    ]
    with pytest.raises(harness.SelectionError, match=r"--add would mix runs: .* has samples"):
        run("last", quick=True, add=True)
    (path,) = tmp_path.glob("*/demo.json")
    document = json.loads(path.read_text())
    for part, name in (("device", "kind"), ("versions", "jax")):
        path.write_text(json.dumps(document | {part: document[part] | {name: "another"}}))
        with pytest.raises(harness.SelectionError, match=r"--add would mix runs: .* has .*'another'.*, and this run"):
            run("last", cases=["large"], add=True)


def test_a_run_that_is_cut_off_leaves_what_it_has(tmp_path):
    def run_case(case, *_):
        if case.name == "large":
            raise KeyboardInterrupt
        return CaseResult(rows=[row_of(case)])

    with pytest.raises(KeyboardInterrupt):
        harness.run_family("demo", family_of(run_case), output=tmp_path, say=lambda _: None)
    (path,) = tmp_path.glob("*/demo.json")
    document = json.loads(path.read_text())
    assert document["cases"] == ["small"]
    assert not document["timing"]["complete"]


def test_wrong_results_fail_the_run_and_are_recorded_without_a_time(results):
    problem = {"case": "small", "operation": "forward", "implementation": "te_jax", "reason": "the loss is wrong"}
    said = []
    family = family_of(lambda case, *_: CaseResult(rows=[row_of(case)], wrong=[problem] * (case.name == "small")))
    assert harness.run_family("demo", family, say=said.append) == 1
    (path,) = results.glob("*/demo.json")
    assert problem in json.loads(path.read_text())["skipped"]
    assert any("the loss is wrong" in line for line in said)


def test_a_platform_without_cases_is_refused():
    family = family_of(lambda *_: CaseResult())
    family.cases.clear()
    with pytest.raises(harness.SelectionError, match="no case is made for the platform"):
        harness.run_family("demo", family, say=lambda _: None)


def test_a_run_without_results_writes_none(results):
    said = []
    harness.run_family("demo", family_of(lambda *_: CaseResult()), say=said.append)
    assert "  nothing measured" in said
    assert not list(results.iterdir())


@pytest.mark.parametrize(
    ("changed", "git", "found"),
    [
        (False, {}, ("0123abcd", False)),
        (True, {}, ("0123abcd", True)),
        (False, {":!benchmarks/results": " M te_jax/ops/gemm.py"}, ("0123abcd", True)),
        (False, {":!benchmarks/results": None}, ("0123abcd", None)),
        (False, {"--show-toplevel": "/"}, (None, None)),
    ],
)
def test_what_runs_may_be_installed_apart_from_the_checkout(changed, git, found, tmp_path, monkeypatch):
    """And the checkout may be no repository, or lie in another one, or have no commit."""
    root, installed = tmp_path / "checkout", tmp_path / "installed"
    for folder in (root, installed):
        (folder / "te_jax" / "ops").mkdir(parents=True)
        (folder / "te_jax" / "ops" / "gemm.py").write_text("fast = True\n")
    (installed / "te_jax" / "_te_cpu.so").touch()
    if changed:
        (installed / "te_jax" / "ops" / "gemm.py").write_text("fast = False\n")
    git = {"--show-toplevel": f"{root}\n", "HEAD": "0123abcd\n", ":!benchmarks/results": ""} | git
    monkeypatch.setattr(harness, "ROOT", root)
    monkeypatch.setattr(harness.te_jax, "__file__", str(installed / "te_jax" / "__init__.py"))
    monkeypatch.setattr(harness.host, "output_of", lambda command, **_: next(v for k, v in git.items() if k in command))
    assert harness._commit() == found
