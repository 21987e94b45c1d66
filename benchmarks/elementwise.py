"""What families of operations share that are as fast as memory: programs of several tensors, beside a device copy.

A program has four calls on tensors of their own, and a time is that of one of them: as in a model, and so that no
figure holds what passes between two programs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from benchmarks.harness import (
    Candidate,
    CaseResult,
    Timing,
    calls_that_fit,
    measure,
    reason_of,
    temporary_bytes,
    timing_row,
)

TENSORS = 4
"""Calls in one program. XLA leaves 2 to 5 µs between two programs, and more where the host is late with the next."""

_BYTES_BEYOND_CACHES = 256 * 2**20
_MOST_BUFFERS = 64


class Case(Protocol):
    """What a family measures."""

    @property
    def name(self) -> str: ...
    @property
    def model(self) -> str: ...


@dataclass(frozen=True)
class Checked:
    """A candidate, whose calls return `TENSORS` results, and what is wrong with one of them, or None."""

    candidate: Candidate
    problem: Callable[[Any], str | None]


def run_operation(
    case: Case,
    operation: str,
    builds: Mapping[str, Callable[[], Checked]],
    timing: Timing,
    floor_bytes: int,
    peers: Sequence[str],
    result: CaseResult,
) -> None:
    """Measures one operation of a case.

    Args:
      case: of the family.
      operation: its name.
      builds: what makes each of the candidates; the copy is added.
      timing: how long to measure.
      floor_bytes: that one call must read and write at least; the copy reads and writes as many.
      peers: names to compare with.
      result: what is found is added to it.
    """

    def entry(name: str, reason: str) -> dict[str, str]:
        return {"case": case.name, "operation": operation, "implementation": name, "reason": reason}

    candidates: list[Candidate] = []
    for name, build in (*builds.items(), ("copy", lambda: _build_copy(floor_bytes))):
        try:
            checked = build()
            output = checked.candidate.call(*checked.candidate.arguments(1)[0])
            checked.candidate.wait(output)
            problem = next(filter(None, map(checked.problem, output)), None)
            del output
        except Exception as error:  # one peer that is missing or out of memory must not cost the others theirs
            result.skipped.append(entry(name, reason_of(error)))
            continue
        if problem:
            result.wrong.append(entry(name, problem))
        else:
            candidates.append(checked.candidate)

    seconds, failed = measure(candidates, timing, pipelined=jax.default_backend() != "cpu")
    result.skipped += [entry(name, reason) for name, reason in failed.items()]
    if "copy" not in seconds:
        raise RuntimeError(f"the copy, the yardstick of {case.name}, was not measured: {failed}")
    seconds = {name: [sample / TENSORS for sample in samples] for name, samples in seconds.items()}
    for candidate in candidates:
        if candidate.name not in seconds:
            continue
        row = timing_row(
            seconds,
            candidate.name,
            floor_bytes=floor_bytes,
            copy_bytes=floor_bytes,
            peers=() if candidate.name == "copy" else peers,
        )
        head = {"case": case.name, "model": case.model, "operation": operation, "implementation": candidate.name}
        result.rows.append(head | row)


fresh = jax.jit(partial(jax.tree.map, jnp.copy))
"""New arrays with the same values, copied on the device: equal, which XLA does not know."""


def buffers_for(size: int) -> int:
    """How many copies of the values to rotate through so that no cache serves the next call."""
    return max(TENSORS, min(_MOST_BUFFERS, -(-_BYTES_BEYOND_CACHES // size)))


def in_turns(arrays: Sequence[Any]) -> Callable[[int], list[tuple[Any, ...]]]:
    """The tensors of so many calls."""
    return lambda calls: [
        tuple(arrays[(call * TENSORS + index) % len(arrays)] for index in range(TENSORS)) for call in range(calls)
    ]


def build_jax(
    name: str,
    function: Callable[[Any, Any], Any],
    problem: Callable[[Any], str | None],
    *,
    shared: Any,
    tensors: Sequence[Any],
    result_bytes: int,
) -> Checked:
    """A function of JAX.

    Args:
      name: of the candidate.
      function: what one call computes of one of `tensors` and of what is shared.
      problem: what is wrong with its result, or None.
      shared: the other operand, the same in all calls: a tree of arrays.
      tensors: more than `TENSORS` of the first operand, each a tree of arrays.
      result_bytes: of one call.
    """

    @jax.jit
    def run(shared: Any, *tensors: Any) -> list[Any]:
        return [function(x, shared) for x in tensors]

    compiled = run.lower(shared, *tensors[:TENSORS]).compile()
    turns = in_turns(tensors)
    candidate = Candidate(
        name=name,
        call=compiled,
        arguments=lambda calls: [(shared, *some) for some in turns(calls)],
        most_calls=calls_that_fit(TENSORS * result_bytes),
        temporary_bytes=temporary_bytes(compiled),
    )
    return Checked(candidate, problem)


def _build_copy(floor_bytes: int) -> Checked:
    size = floor_bytes // 2
    draw = jax.jit(lambda seed: jax.random.bits(jax.random.key(seed), (size,), jnp.uint8))
    copied = [draw(seed) for seed in range(buffers_for(size))]
    compiled = jax.jit(lambda *arrays: [jnp.copy(array) for array in arrays]).lower(*copied[:TENSORS]).compile()
    candidate = Candidate(
        name="copy",
        call=compiled,
        arguments=in_turns(copied),
        most_calls=calls_that_fit(TENSORS * size),
        temporary_bytes=temporary_bytes(compiled),
    )
    pointers = {array.unsafe_buffer_pointer() for array in copied}

    def problem(output: jax.Array) -> str | None:
        itself = output.unsafe_buffer_pointer() in pointers
        return "XLA returned an array itself instead of a copy" if itself else None

    return Checked(candidate, problem)
