"""Checks, timing, the record of the environment, and result files: what every benchmark family shares.

How a call is timed. All candidates of a case run in one process on the same values. A sample enqueues as many calls as
last about `Timing.sample_seconds` and waits once, at their end. We time n and n/8 calls and divide the difference: that
cancels what launching the first and waiting for the last call cost. Candidates take their samples in rounds, each in
another order, so that clocks and temperatures drift alike for all. The first round is not recorded, and Python collects
no garbage meanwhile. GEMMs keep a GPU at its power limit this way; `Timing.rested` measures short bursts after rests.
The CPU backend runs independent computations concurrently: there we wait for every call.
"""

import contextlib
import dataclasses
import datetime
import gc
import importlib.metadata
import json
import math
import platform
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

import te_jax
from te_jax import native
from te_jax._core import host
from te_jax._core.terminal import aligned, reason_of

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

_VERSIONS_OF = ("jax", "jaxlib", "optax", "numpy", "torch", "triton", "jax-cuda13-plugin", "dew-flash-attn-cu13")


class SelectionError(ValueError):
    """The cases or peers asked for cannot be run; the message names those that can."""


class Case(Protocol):
    """A case of a family: one problem size."""

    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class Timing:
    """How long to measure: the samples of each candidate, how long one lasts, and the device's rest before it."""

    samples: int = 9
    sample_seconds: float = 0.06
    rest_seconds: float = 0.0

    @property
    def rested(self) -> "Timing":
        """Half as many samples, a sixth as long, each after a rest: before a GPU is at its power limit."""
        return Timing((self.samples + 1) // 2, self.sample_seconds / 6, rest_seconds=0.15)


FULL = Timing()
QUICK = Timing(samples=3, sample_seconds=0.005)
_RUN = "commit", "dirty", "date"


@dataclass(frozen=True)
class Candidate:
    """One implementation, ready to be timed.

    Attributes:
      name: its name in tables and result files.
      call: enqueues one call and returns what `wait` takes.
      arguments: n → arguments of n calls, ready on the device; fresh ones if a call consumes its arguments.
      wait: blocks until the call that returned its argument, and all before it on the same stream, have finished.
      most_calls: of one sample, for the memory that `arguments` takes.
      temporary_bytes: what the compiled program allocates beside arguments and results; None where unknown.
      read: turns a result into what is checked.
      seconds: turns samples of `call` into those of the operation, where a call holds several.
    """

    name: str
    call: Callable[..., Any]
    arguments: Callable[[int], Sequence[tuple[Any, ...]]]
    wait: Callable[[Any], Any] = jax.block_until_ready
    most_calls: int = 1000
    temporary_bytes: int | None = None
    read: Callable[[Any], Any] = lambda result: result
    seconds: Callable[[list[float]], list[float]] = lambda samples: samples


@dataclass
class CaseResult:
    """What a family measured of one case.

    Attributes:
      rows: one flat dictionary for each operation and implementation; see `docs/benchmarks.md` for the keys.
      skipped: dictionaries `{case, operation, implementation, reason}` of what could not be measured.
      wrong: like `skipped`, for results outside the error bounds; their times are not reported.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    wrong: list[dict[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Headline:
    """The figure of a family that README shows: `figure` of the rows of `operation`, where lower is better."""

    operation: str
    figure: str
    label: str
    implementations: tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """A benchmark family: what `te-jax bench NAME` runs.

    Attributes:
      description: one line for the list of families.
      cases: cases by JAX platform, "gpu" or "cpu"; the first of them are the default.
      implementations: every implementation and peer that it knows, in the order of the tables.
      peers: those of `implementations` that `--peers` chooses from. The others always run.
      run_case: measures one case with the chosen implementations.
      headline: what README shows.
      profiles: whether `run_case` also takes `profile`, a folder for traces or None.
      environment: variables that JAX reads when it starts, unless the user has set them.
    """

    description: str
    cases: dict[str, tuple[Case, ...]]
    implementations: tuple[str, ...]
    peers: tuple[str, ...]
    run_case: Callable[..., CaseResult]
    headline: Headline
    profiles: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


# One operation

Checked = tuple[Mapping[str, float | None], str | None]
"""Errors of a result by the name that they have in rows, and what is wrong with it, or None."""


def run_operation(
    labels: Mapping[str, Any],
    names: Sequence[str],
    timing: Timing,
    result: CaseResult,
    *,
    build: Callable[[str], Candidate],
    errors: Callable[[str, Any, Any], Checked],
    row: Callable[[Candidate, dict[str, list[float]]], dict[str, Any]],
    references: Sequence[str] = (),
    yardstick: str | None = None,
) -> dict[str, dict[str, Any]]:
    """Build, check and time the implementations of one operation.

    An implementation that raises costs the others nothing, and no time is reported for a wrong result.

    Args:
      labels: what all rows begin with: "case", "operation" and more.
      names: the implementations, in the order of the rows.
      timing: how long to measure.
      result: rows and problems are added to it.
      build: makes the candidate of a name.
      errors: (name, what the candidate reads of its first result, the same of the reference or None) → errors, which
        end the row, and what is wrong.
      row: (candidate, samples of all by name) → the figures of its row.
      references: run first; results are compared with that of the first of them that runs.
      yardstick: times are compared with that of this name; without it there are no rows.

    Returns:
      The new rows, by implementation.
    """

    def note(problems: list[dict[str, str]], name: str, reason: str) -> None:
        problems.append(problem(labels["case"], labels["operation"], name, reason))

    candidates: dict[str, Candidate] = {}
    errors_of: dict[str, Mapping[str, float | None]] = {}
    expected = None
    for name in sorted(names, key=lambda name: name not in references):
        try:
            candidate = build(name)
            output = candidate.call(*candidate.arguments(1)[0])
            candidate.wait(output)
            output = candidate.read(output)
            if expected is None and name in references:
                expected = output
            if expected is None and references:
                raise RuntimeError(f"{' or '.join(references)}, with which results are compared, failed")
            errors_of[name], wrong = errors(name, output, expected)
            del output
        except Exception as error:  # one that is missing or out of memory must not cost the others theirs
            note(result.skipped, name, reason_of(error))
            continue
        if wrong:
            note(result.wrong, name, wrong)
        else:
            candidates[name] = candidate
    del expected

    seconds, failed = measure(list(candidates.values()), timing, pipelined=jax.default_backend() != "cpu")
    for name, reason in failed.items():
        note(result.skipped, name, reason)
    if yardstick is not None and yardstick not in seconds:
        for name in seconds:
            note(result.skipped, name, f"{yardstick} was not measured, and all others are compared with it")
        seconds = {}
    rows = {
        name: {**labels, "implementation": name, **row(candidates[name], seconds), **errors_of[name]}
        for name in names
        if name in seconds
    }
    result.rows += rows.values()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()  # of memory that the next operation needs in other sizes
    return rows


def problem(case: str, operation: str, implementation: str, reason: str) -> dict[str, str]:
    """An entry of `CaseResult.skipped` or `wrong`."""
    return {"case": case, "operation": operation, "implementation": implementation, "reason": reason}


def relative_error(actual: Any, expected: Any) -> float:
    """The relative L2 error in float64, to three digits."""
    difference = np.asarray(actual).astype(np.float64) - expected
    return float(f"{np.linalg.norm(difference) / np.linalg.norm(expected):.3g}")


def out_of_bounds(errors: Mapping[str, float | None], bounds: Mapping[str, float]) -> str | None:
    """Says which errors are too large. Written so that NaN is too large."""
    return "; ".join(
        f"{name} is {error:.3g}, and its bound {bounds[name]:.3g}"
        for name, error in errors.items()
        if error is not None and not error <= bounds[name]
    ) or None  # fmt: skip


# Timing


def measure(
    candidates: Sequence[Candidate], timing: Timing, *, pipelined: bool
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Time candidates in rounds.

    Args:
      candidates: what to time.
      timing: how long.
      pipelined: enqueue all calls of a sample before waiting, for backends that run them one after another.

    Returns:
      Seconds of the operation, one for each sample, by candidate; and, for candidates that failed, the reason.
    """
    seconds: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    calls: dict[str, int] = {}
    for candidate in candidates:
        try:
            calls[candidate.name] = _calls_per_sample(candidate, timing, pipelined)
            seconds[candidate.name] = []
        except Exception as error:  # a peer that cannot run this case must not cost the others theirs
            failed[candidate.name] = reason_of(error)
    with _no_garbage_collection():
        for turn in range(-1, timing.samples):
            for candidate in random.Random(turn).sample(candidates, len(candidates)):
                if candidate.name in failed:
                    continue
                try:
                    if timing.rest_seconds:
                        time.sleep(timing.rest_seconds)
                        candidate.wait(candidate.call(*candidate.arguments(1)[0]))  # wakes it
                    sample = _sample(candidate, calls[candidate.name], pipelined)
                except Exception as error:
                    failed[candidate.name] = reason_of(error)
                    del seconds[candidate.name]
                else:
                    if turn >= 0:
                        seconds[candidate.name].append(sample)
    return {each.name: each.seconds(seconds[each.name]) for each in candidates if each.name in seconds}, failed


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def spread_of(seconds: Sequence[float]) -> dict[str, float]:
    """Spread of the samples in milliseconds: minimum, maximum, interquartile range, and the number of samples."""
    quartiles = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 3
    return {
        "min_ms": rounded(min(seconds) * 1e3),
        "max_ms": rounded(max(seconds) * 1e3),
        "iqr_ms": rounded((quartiles[2] - quartiles[0]) * 1e3),
        "samples": len(seconds),
    }


def timing_row(
    seconds: dict[str, list[float]], name: str, *, floor_bytes: int, copy_bytes: int, peers: Sequence[str]
) -> dict[str, Any]:
    """The derived figures of one memory-bound candidate.

    Args:
      seconds: samples by candidate, from `measure`; holds "copy", a device-to-device copy.
      name: the candidate.
      floor_bytes: bytes that the operation must move at least.
      copy_bytes: bytes that one copy moves, read and written. Its speed sets the floor's time.
      peers: names to compare with; those without samples are left out.

    Returns:
      `median_ms`, `spread`, `bytes`, `share_of_floor`, `ratio_to_copy` and `speedup_over`.
    """
    median, copy = statistics.median(seconds[name]), statistics.median(seconds["copy"])
    return {
        "median_ms": rounded(median * 1e3),
        "spread": spread_of(seconds[name]),
        "bytes": floor_bytes,
        "share_of_floor": rounded(floor_bytes * copy / copy_bytes / median),
        "ratio_to_copy": rounded(median / copy),
        "speedup_over": _speedups(seconds, name, peers),
    }


def compute_row(
    seconds: dict[str, list[float]], name: str, *, flops: int, peers: Sequence[str], over: str | None = None
) -> dict[str, Any]:
    """The derived figures of one compute-bound candidate whose call takes `flops` floating-point operations.

    Returns `median_ms`, `spread`, `flops`, `tflops` and `speedup_over`, see `timing_row`; and with `over`, one of the
    peers, `time_over_…`, the time as a multiple of its time.
    """
    median = statistics.median(seconds[name])
    speedups = _speedups(seconds, name, peers)
    return {
        "median_ms": rounded(median * 1e3),
        "spread": spread_of(seconds[name]),
        "flops": flops,
        "tflops": rounded(flops / median / 1e12),
        "speedup_over": speedups,
        **({f"time_over_{over}": rounded(median / statistics.median(seconds[over]))} if over in speedups else {}),
    }


def _speedups(seconds: dict[str, list[float]], name: str, peers: Sequence[str]) -> dict[str, float]:
    median = statistics.median(seconds[name])
    return {
        peer: rounded(statistics.median(seconds[peer]) / median) for peer in peers if peer in seconds and peer != name
    }


def calls_that_fit(result_bytes: int) -> int:
    """How many calls of results, or donated arguments, of this size fill a third of what JAX may allocate.

    It is 4 GiB where the backend does not say what that is.
    """
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 12 * 2**30)
    return max(1, min(1000, int(limit) // 3 // result_bytes))


def temporary_bytes(compiled: Any) -> int | None:
    """Bytes of temporaries of a compiled JAX program, or None where the backend does not say."""
    try:
        return int(compiled.memory_analysis().temp_size_in_bytes)
    except Exception:  # a figure that some backend does not offer must not stop a benchmark
        return None


def rounded(figure: float) -> float:
    """To five significant digits, as result files hold figures."""
    return float(f"{figure:.5g}")


def _calls_per_sample(candidate: Candidate, timing: Timing, pipelined: bool) -> int:
    candidate.wait(candidate.call(*candidate.arguments(1)[0]))  # compiles, loads modules, warms up
    calls = 1
    for _ in range(2):  # the first estimate holds one dispatch per call; the second hides it
        seconds = _elapsed(candidate, calls, pipelined) / calls
        wanted = math.ceil(timing.sample_seconds / max(seconds, 1e-7))
        calls = max(1, min(wanted, candidate.most_calls))
    return calls


def _sample(candidate: Candidate, calls: int, pipelined: bool) -> float:
    """Seconds per call."""
    if pipelined and calls > 1:
        few = max(1, calls // 8)  # a single call begins and ends unlike many
        of_few, of_all = _elapsed(candidate, few, pipelined), _elapsed(candidate, calls, pipelined)
        if of_all > of_few:
            return (of_all - of_few) / (calls - few)
        return of_all / calls  # there is next to nothing to do
    return _elapsed(candidate, calls, pipelined) / calls


def _elapsed(candidate: Candidate, calls: int, pipelined: bool) -> float:
    prepared = candidate.arguments(calls)
    result = None
    start = time.perf_counter()
    for arguments in prepared:
        result = candidate.call(*arguments)
        if not pipelined:
            candidate.wait(result)
    candidate.wait(result)
    return time.perf_counter() - start


# Columns of tables


@dataclass(frozen=True)
class Column:
    """A figure that only some families measure. Tables whose rows all lack its key have no such column."""

    key: str
    heading: str  # on pages
    short: str  # on a terminal
    text: Callable[[Any], str]  # of a value that is not None


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f}"


def _breakdown(milliseconds: dict[str, float]) -> str:
    return ", ".join(f"{kind} {value:.1f}" for kind, value in milliseconds.items() if value >= 0.05)


COLUMNS = (
    Column("ratio_to_copy", "× copy", "× copy", "{:.2f}".format),
    Column("share_of_floor", "of the floor", "of floor", "{:.0%}".format),
    Column("tflops", "TFLOP/s", "TFLOP/s", "{:.4g}".format),
    Column("mfu", "MFU", "MFU", "{:.1%}".format),
    Column("tokens_per_second", "tokens/s", "tokens/s", "{:,.0f}".format),
    Column("layer_ms", "a layer, ms", "layer ms", "{:.2f}".format),
    Column("peak_bytes", "peak memory, GB", "GB", _gigabytes),
    Column("compile_seconds", "compile, s", "compile s", "{:.1f}".format),
    Column("breakdown_ms", "GPU time by kind, ms", "by kind, ms", _breakdown),
    Column("tflops_rested", "TFLOP/s after a rest", "after a rest", "{:.4g}".format),
    Column("over_gemm", "× GEMM alone", "× GEMM", "{:.2f}".format),
    Column("gigabytes_per_second", "GB/s a direction", "GB/s", "{:.4g}".format),
    Column("share_of_link", "of the link", "of link", "{:.0%}".format),
    Column("loss_error", "error of the loss", "loss error", "{:.2g}".format),
    Column("y_error", "error of y", "y error", "{:.3g}".format),
    Column("dx_error", "of dx", "dx error", "{:.3g}".format),
    Column("dkernel_error", "of dkernel", "dkernel error", "{:.3g}".format),
    Column("temporaries_over_logits", "temporaries ÷ logits", "temporaries", "{:.2f}".format),
    Column("kept_over_least", "kept ÷ least", "kept", "{:.2f}".format),
    Column("temporaries_gb", "temporaries, GB", "temp. GB", "{:.2f}".format),
    Column("host_gb", "in host memory, GB", "host GB", "{:.2f}".format),
    Column("floor_ms", "copies alone, ms", "copies ms", "{:.4g}".format),
    Column("difference", "difference", "difference", "{:.2g}".format),
)
"""All of them, in the order of tables."""


def columns_of(rows: Sequence[dict[str, Any]]) -> list[Column]:
    """The columns that a table of these rows has."""
    return [column for column in COLUMNS if any(column.key in row for row in rows)]


def cell(row: dict[str, Any], column: Column) -> str:
    """What a row has in a column: nothing where it does not know."""
    value = row.get(column.key)
    return "" if value is None else column.text(value)


# The record


def slug(device_kind: str) -> str:
    """A device kind as a folder name: "NVIDIA H200" becomes "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-") or "unknown"


def environment(commit: str | None = None) -> dict[str, Any]:
    """Commit, versions, device, driver and UTC date; `commit` stands for what git says, and nothing checks it then."""
    device = jax.devices()[0]
    on_gpu = device.platform == "gpu"
    recorded, dirty = _commit() if commit is None else (commit, None)
    extensions = {status.module: dict(status.build) for status in native.status() if status.loaded}
    versions = {}
    for distribution in _VERSIONS_OF:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[distribution] = importlib.metadata.version(distribution)
    return {
        "commit": recorded or "unknown",
        "dirty": dirty,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "versions": {
            "python": platform.python_version(),
            "te_jax": te_jax.__version__,
            **versions,
            **native.cuda_library_versions(),  # which the extensions load where JAX has not
        },
        "device": {
            "kind": device.device_kind,
            "platform": device.platform,
            "compute_capability": str(getattr(device, "compute_capability", "")) or None if on_gpu else None,
            "driver": host.driver_version() if on_gpu else None,
            "host": host.processor(),
        },
        "extensions": extensions,
    }


def _commit() -> tuple[str | None, bool | None]:
    """The checkout's commit, and whether its files (without results), or those of the te_jax that runs, are others."""
    top = host.output_of(["git", "rev-parse", "--show-toplevel"], cwd=ROOT)
    if top is None or Path(top.strip()) != ROOT:
        return None, None
    head = host.output_of(["git", "rev-parse", "--verify", "HEAD"], cwd=ROOT)
    if not head:  # a repository without a commit says nothing about these files
        return None, None
    changes = host.output_of(["git", "status", "--porcelain", "--", ".", ":!benchmarks/results"], cwd=ROOT)
    if changes is None:
        return head.strip(), None
    measured = Path(te_jax.__file__).resolve().parent
    return head.strip(), bool(changes.strip()) or _sources(measured) != _sources(ROOT / "te_jax")


def _sources(package: Path) -> dict[Path, bytes]:
    return {path.relative_to(package): path.read_bytes() for path in package.rglob("*.py")}


# A whole family


def run_family(
    name: str,
    family: Family,
    *,
    cases: Sequence[str] = (),
    peers: Sequence[str] | None = None,
    quick: bool = False,
    output: Path | None = None,
    commit: str | None = None,
    add: bool = False,
    profile: Path | None = None,
    say: Callable[[str], None] = print,
) -> int:
    """Measure a family on JAX's default backend, print its table, and write its result file.

    Args:
      name: names the result file.
      family: the family.
      cases: names of the cases to run; empty for all of this platform.
      peers: names of the peers to run; None for all. What is not a peer always runs.
      quick: few and short samples, and the first case alone unless `cases` names others.
      output: results folder; None for `benchmarks/results` of a checkout, where only complete runs are written, so that
        a partial run never replaces published figures. An installed package has no such folder, and writes nothing.
      commit: recorded in the place of what git says, where the checkout has no history or another one.
      add: keep what the result file has and this run does not measure, which must be of the same device and versions.
        Rows of another commit say so, as `run_of` reads it.
      profile: folder for a trace of every implementation; only for families that make some.
      say: receives each line of the report.

    Returns:
      0, or 1 when an implementation's results were outside its error bounds.

    Raises:
      SelectionError: a case or peer is unknown, the platform has no cases, or the result file is of another device or
        version than what would be added.
    """
    if profile is not None and not family.profiles:
        raise SelectionError(f"--profile is given, and {name} makes no traces: leave it out")
    device = jax.devices()[0]
    chosen = _chosen_cases(family, device.platform, cases, quick)
    implementations = _chosen_implementations(family, peers)
    left = set(family.implementations).difference(implementations)
    record = environment(commit)
    timing = QUICK if quick else FULL
    folder = output or RESULTS
    found: dict[str, list[Any]] = {"cases": [], "rows": [], "skipped": []}
    if add:
        found |= _kept(folder, name, record, timing)
    default = {case.name for case in family.cases.get(device.platform, ())}
    say(f"{name} on {device.device_kind}, {timing.samples} samples of about {timing.sample_seconds * 1e3:.0f} ms")

    wrong, written = False, None
    for case in chosen:
        options = {"profile": profile} if family.profiles else {}
        result = family.run_case(case, implementations, timing, **options)
        wrong = wrong or bool(result.wrong)
        problems = [*result.skipped, *result.wrong]
        measured = {case.name, *(each["case"] for each in (*result.rows, *problems))}  # rows may name parts of it
        found = {
            "cases": [each for each in found["cases"] if each != case.name] + [case.name] * (peers is None),
            "rows": [row for row in found["rows"] if row["case"] not in measured or row["implementation"] in left]
            + result.rows,
            "skipped": [
                each for each in found["skipped"] if each["case"] not in measured or each["implementation"] in left
            ]
            + problems,
        }
        say("")
        say(screen_table(result.rows))
        for problem in problems:
            say(f"  {problem['operation']} · {problem['implementation']}: not measured, {problem['reason']}")
        complete = not quick and bool(default) and default <= set(found["cases"])
        if found["rows"] and (
            (complete and RESULTS.is_dir()) or output is not None
        ):  # after each case, for a run may be cut off
            document = {
                "family": name,
                **record,
                "timing": {**dataclasses.asdict(timing), "complete": complete},
                "headline": dataclasses.asdict(family.headline),
                **found,
            }
            written = write_results(document, folder)
    if written is not None:
        say(f"\nWritten to {written}.")
    elif found["rows"]:
        say("\nNot written: name a folder with --output to keep it.")
    return int(wrong)


def result_path(name: str, device_kind: str, folder: Path) -> Path:
    """Where a family's results on a device are."""
    return folder / slug(device_kind) / f"{name}.json"


def run_of(document: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """Commit, date, and whether there were local changes, of a row: the document's, but where `--add` kept the row."""
    return {key: document[key] for key in _RUN} | row.get("run", {})


def _kept(folder: Path, name: str, record: dict[str, Any], timing: Timing) -> dict[str, list[Any]]:
    """What a result file has, if there is one; "cases" are those with all peers."""
    path = result_path(name, record["device"]["kind"], folder)
    if not path.exists():
        return {}
    document = json.loads(path.read_text(encoding="utf-8"))
    theirs = _comparable(document, document["timing"])
    for key, mine in _comparable(record, dataclasses.asdict(timing)).items():
        if theirs.get(key, mine) != mine:
            raise SelectionError(
                f"--add would mix runs: {path} has {key} {theirs.get(key)!r}, and this run {mine!r}; name another "
                "folder with --output, or measure everything without --add"
            )
    kept = {key: list(document.get(key, ())) for key in ("cases", "rows", "skipped")}
    if document["commit"] != record["commit"]:
        kept["rows"] = [row | {"run": run_of(document, row)} for row in kept["rows"]]
    return kept


def _comparable(record: dict[str, Any], timing: dict[str, Any]) -> dict[str, Any]:
    """What rows of one file share: the device, how they were timed, and versions, where both have them."""
    device = record["device"] | ({"host": None} if record["device"]["platform"] == "gpu" else {})
    return {**record["versions"], "te_jax": None, "device": device, **timing, "complete": None}


def write_results(document: dict[str, Any], folder: Path) -> Path:
    """Write a result document to `<folder>/<device slug>/<family>.json` and return that path."""
    path = result_path(document["family"], document["device"]["kind"], folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")  # --add keeps what is there, also where this is interrupted
    unfinished.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    unfinished.replace(path)
    return path


def screen_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table for the terminal, with a column for the ratio to each peer."""
    if not rows:
        return "  nothing measured"
    peers = list(dict.fromkeys(peer for row in rows for peer in row["speedup_over"]))
    columns = columns_of(rows)
    headings = ("case", "operation", "implementation", "ms", "iqr", *(column.short for column in columns))
    cells = [
        (
            row["case"],
            row["operation"],
            row["implementation"],
            f"{row['median_ms']:.3f}",
            f"{row['spread']['iqr_ms']:.3f}",
            *(cell(row, column) for column in columns),
            *("" if row["speedup_over"].get(peer) is None else f"{row['speedup_over'][peer]:.2f}" for peer in peers),
        )
        for row in rows
    ]
    return aligned((*headings, *(f"{peer} ÷ it" for peer in peers)), cells)


def _chosen_cases(family: Family, platform_name: str, names: Sequence[str], quick: bool) -> Sequence[Case]:
    everything = {case.name: case for cases in family.cases.values() for case in cases}
    unknown = [name for name in names if name not in everything]
    if unknown:
        raise SelectionError(f"--cases {unknown[0]} is unknown; the cases are: {', '.join(everything)}")
    if names:
        return [everything[name] for name in names]
    default = family.cases.get(platform_name, ())
    if not default:
        raise SelectionError(f"no case is made for the platform {platform_name}; name one with --cases")
    return default[:1] if quick else default


def _chosen_implementations(family: Family, peers: Sequence[str] | None) -> list[str]:
    unknown = [peer for peer in peers or () if peer not in family.peers]
    if unknown:
        raise SelectionError(f"--peers {unknown[0]} is unknown; the peers are: {', '.join(family.peers)}")
    return [name for name in family.implementations if peers is None or name not in family.peers or name in peers]
