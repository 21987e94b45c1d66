"""What families of operations share that are as fast as memory: programs of several tensors, beside a device copy.

A program has four calls on tensors of their own, and a time is that of one of them: as in a model, and so that no
figure holds what passes between two programs.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from benchmarks import harness
from benchmarks.harness import Candidate, CaseResult, Timing, calls_that_fit, temporary_bytes, timing_row

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


def run_beside_copy(
    case: Case,
    operation: str,
    builds: Mapping[str, Callable[[], Candidate]],
    timing: Timing,
    floor_bytes: int,
    peers: Sequence[str],
    result: CaseResult,
) -> None:
    """Measures one operation of a case.

    Args:
      case: of the family.
      operation: its name.
      builds: makes each of the candidates, see `candidate`; the copy is added.
      timing: how long to measure.
      floor_bytes: that one call must read and write at least; the copy reads and writes as many.
      peers: names to compare with.
      result: what is found is added to it.
    """

    def row(candidate: Candidate, seconds: dict[str, list[float]]) -> dict[str, Any]:
        return timing_row(
            seconds,
            candidate.name,
            floor_bytes=floor_bytes,
            copy_bytes=floor_bytes,
            peers=() if candidate.name == "copy" else peers,
        )

    builds = {**builds, "copy": lambda: _build_copy(floor_bytes)}
    harness.run_operation(
        {"case": case.name, "model": case.model, "operation": operation},
        list(builds),
        timing,
        result,
        build=lambda name: builds[name](),
        errors=lambda name, problem, _: ({}, problem),
        row=row,
        yardstick="copy",
    )


def candidate(
    name: str,
    call: Callable[..., Any],
    arguments: Callable[[int], list[tuple[Any, ...]]],
    problem: Callable[[Any], str | None],
    **fields: Any,
) -> Candidate:
    """A candidate whose calls return `TENSORS` results.

    Args:
      name, call, arguments, fields: see `harness.Candidate`.
      problem: what is wrong with one of the results, or None. The candidate reads the first of these.
    """
    return Candidate(
        name,
        call,
        arguments,
        read=lambda results: next(filter(None, map(problem, results)), None),
        seconds=lambda samples: [sample / TENSORS for sample in samples],
        **fields,
    )


fresh = jax.jit(partial(jax.tree.map, jnp.copy))
"""New arrays with the same values, copied on the device: equal, which XLA does not know."""


@jax.jit
def relative(actual: jax.Array, expected: jax.Array) -> jax.Array:
    """The relative L2 error, in float32 on the device."""
    actual, expected = actual.astype(jnp.float32), expected.astype(jnp.float32)
    return jnp.linalg.norm(actual - expected) / jnp.linalg.norm(expected)


def buffers_for(size: int, least: int = TENSORS) -> int:
    """How many copies of the values to rotate through so that no cache serves the next call."""
    return max(least, min(_MOST_BUFFERS, -(-_BYTES_BEYOND_CACHES // size)))


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
) -> Candidate:
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
    return candidate(
        name,
        compiled,
        lambda calls: [(shared, *some) for some in turns(calls)],
        problem,
        most_calls=calls_that_fit(TENSORS * result_bytes),
        temporary_bytes=temporary_bytes(compiled),
    )


def _build_copy(floor_bytes: int) -> Candidate:
    size = floor_bytes // 2
    draw = jax.jit(lambda seed: jax.random.bits(jax.random.key(seed), (size,), jnp.uint8))
    copied = [draw(seed) for seed in range(buffers_for(size))]
    compiled = jax.jit(lambda *arrays: [jnp.copy(array) for array in arrays]).lower(*copied[:TENSORS]).compile()
    pointers = {array.unsafe_buffer_pointer() for array in copied}

    def problem(output: jax.Array) -> str | None:
        itself = output.unsafe_buffer_pointer() in pointers
        return "XLA returned an array itself instead of a copy" if itself else None

    return candidate(
        "copy",
        compiled,
        in_turns(copied),
        problem,
        most_calls=calls_that_fit(TENSORS * size),
        temporary_bytes=temporary_bytes(compiled),
    )
