"""Where the time of a GPU program goes: its kernels by kind, from a trace.

    profile = traced(run, calls=3, folder=Path("/tmp/trace"), program=compiled.as_text())
    profile.milliseconds  # {"GEMM": 94.1, "attention": 32.5, …, "idle": 0.8}, of one call

A kernel's kind follows from its name. XLA names its own kernels after instructions of the optimized program, whose text
says in which `jax.named_scope` an instruction was made: "optimizer" and "loss" are kinds of their own. Of NCCL's
kernels, the time in which nothing else ran is one kind, and the rest another.
"""

import collections
import gzip
import itertools
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

NCCL = "NCCL beside others"
NCCL_ALONE = "NCCL alone"
IDLE = "idle"
KINDS: tuple[str, ...] = (
    "GEMM",
    "attention",
    "quantization",
    "elementwise",
    "loss",
    "optimizer",
    "copies and loops",
    NCCL,
    NCCL_ALONE,
    IDLE,
)

# The first pattern that is found in a kernel's name decides.
_KERNELS = (
    (NCCL, r"nccl"),
    ("attention", r"sdpa|fmha|flash|attention"),
    ("optimizer", r"multi_tensor_apply"),  # torch's
    ("quantization", r"AmaxOf|ClearValues|QuantizeTile|ComputeTiles|quantize"),
    ("loss", r"StatisticsOn|GradientOn|BothOfRow|\bSubtract\b|cross_entropy"),
    ("GEMM", r"gemm|cublas|cutlass|nvjet|xmma|wgmma|splitk|SpreadScales|\bMultiply\b"),
    ("elementwise", r"NormalizeRows|NormalizeLongRows|BackwardOf|SumParts|ActivateRows"),
)
_COPIES = re.compile(
    r"mem(cpy|set)|^(wrapped_)?(copy|slice|transpose|broadcast|concatenate|pad)|dynamic_(update_)?slice|loop_broadcast"
    r"|^loop_(slice|transpose|pad|copy)",
    re.IGNORECASE,
)
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<type>\(.*?\)|\S+) [\w-]+\(.*$", re.MULTILINE)
_SCOPE = re.compile(r'op_name="([^"]*)"')


@dataclass(frozen=True)
class Kernel:
    """All calls of one kernel.

    Attributes:
      name, kind: its name in the trace, and one of `KINDS`; of NCCL's kernels always `NCCL`.
      milliseconds, calls: of one call of the program.
    """

    name: str
    kind: str
    milliseconds: float
    calls: float


@dataclass(frozen=True)
class Profile:
    """Time of one call of a program on a device, the mean over devices.

    Attributes:
      milliseconds: by kind, all of `KINDS`. Kernels that run at the same time all count, except for several of NCCL's:
        the sum may exceed the span.
      span: from the first kernel's start to the last one's end, in milliseconds. "idle" is the part without a kernel.
      kernels: from the one that takes longest.
      trace: the file for ui.perfetto.dev.
    """

    milliseconds: dict[str, float]
    span: float
    kernels: tuple[Kernel, ...]
    trace: Path | None = None


def traced(run: Callable[[], Any], *, calls: int, folder: Path, program: str = "") -> Profile:
    """Traces calls of a program and sorts its kernels.

    Args:
      run: enqueues `calls` calls back to back, and returns what waits for all. It ran before.
      calls: how many.
      folder: where the trace goes.
      program: the optimized program's text, `compiled.as_text()`; without it XLA's kernels have no scopes.

    Returns:
      The profile, with nothing in it where the trace has no GPU.
    """
    with jax.profiler.trace(str(folder), create_perfetto_trace=True):
        jax.block_until_ready(run())
    path = max(folder.rglob("perfetto_trace.json.gz"), key=lambda path: path.stat().st_mtime)
    with gzip.open(path) as file:
        trace = json.load(file)
    found = sorted_kernels(trace["traceEvents"] if isinstance(trace, dict) else trace, calls=calls, program=program)
    return Profile(found.milliseconds, found.span, found.kernels, path)


def sorted_kernels(events: Iterable[dict[str, Any]], *, calls: int, program: str = "") -> Profile:
    """The profile of a trace's events, of so many calls of a program."""
    events = list(events)
    process = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    thread = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in events if event.get("name") == "thread_name"
    }
    kernels = [
        event
        for event in events
        if event.get("ph") == "X"
        and "GPU" in process.get(event["pid"], "")
        and "Stream" in thread.get((event["pid"], event["tid"]), "")
    ]
    instructions = _instructions(program)
    devices = len({event["pid"] for event in kernels}) or 1
    per_call = 1e-3 / calls / devices  # of microseconds
    time, count = collections.Counter[tuple[str, str]](), collections.Counter[tuple[str, str]]()
    for event in kernels:
        key = event["name"], _kind(event, instructions)
        time[key] += event["dur"]
        count[key] += 1
    span, busy, of_nccl, of_others = 0.0, 0.0, 0.0, 0.0
    for device in {event["pid"] for event in kernels}:
        here = [event for event in kernels if event["pid"] == device]
        nccl = [_kind(event, instructions) == NCCL for event in here]
        of_device = _span_and_busy(here)
        span, busy = span + of_device[0], busy + of_device[1]
        of_nccl += _span_and_busy(list(itertools.compress(here, nccl)))[1]
        of_others += _span_and_busy([event for event, is_nccl in zip(here, nccl, strict=True) if not is_nccl])[1]
    milliseconds = dict.fromkeys(KINDS, 0.0)
    for (_, kind), microseconds in time.items():
        milliseconds[kind] += microseconds * per_call
    milliseconds[NCCL_ALONE] = (busy - of_others) * per_call
    milliseconds[NCCL] = (of_nccl - busy + of_others) * per_call
    milliseconds[IDLE] = (span - busy) * per_call
    return Profile(
        milliseconds,
        span * per_call,
        tuple(
            Kernel(name, kind, microseconds * per_call, count[name, kind] / calls / devices)
            for (name, kind), microseconds in time.most_common()
        ),
    )


def _instructions(program: str) -> dict[str, str]:
    """The line of each instruction, by its name as kernels have it."""
    return {_kernel_name(match["name"]): match[0] for match in _INSTRUCTION.finditer(program)}


def _kernel_name(instruction: str) -> str:
    return re.sub(r"\W", "_", instruction)


def _kind(event: dict[str, Any], instructions: dict[str, str]) -> str:
    name = event["name"]
    for kind, pattern in _KERNELS:
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    of_event = event.get("args", {}).get("hlo_op", "")
    line = instructions.get(_kernel_name(of_event)) or instructions.get(_kernel_name(name), "")
    scope = _SCOPE.search(line)
    if scope is not None:
        for kind in ("optimizer", "loss"):
            if re.search(rf"[/(]{kind}[/)]", scope[1]):
                return kind
    if "f8e" in line.partition("(")[0] or re.search(r"= \([^)]*f8e", line):
        return "quantization"
    return "copies and loops" if _COPIES.search(name) else "elementwise"


def _span_and_busy(kernels: list[dict[str, Any]]) -> tuple[float, float]:
    """From the first start to the last end, and the time in which anything ran, in microseconds."""
    end = first = min((event["ts"] for event in kernels), default=0.0)
    busy = 0.0
    for event in sorted(kernels, key=lambda event: event["ts"]):
        start, stop = max(event["ts"], end), event["ts"] + event["dur"]
        if stop > start:
            busy += stop - start
            end = stop
    return end - first, busy
