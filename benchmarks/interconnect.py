"""Data from device to device: peer copies, ppermute, and collectives, from messages of 4 KiB to 1 GiB.

A case goes through all sizes of messages. Its rows call them "4x1MiB": four devices, messages of 1 MiB. Operations:

- one_way: a message from the first device to the second.
- both_ways: devices send a message and receive one at the same time. device_put does it between the first two,
  ppermute from every device to the next.
- all_gather: every device has one part of a message and receives all others.
- reduce_scatter: every device has a whole message, and receives one part of the sum of all.

Implementations: `device_put` (`jax.device_put` of an array that is on another device, a peer copy), `ppermute` (in
shard_map, as XLA does it by default), `ppermute_ring` (as many ppermutes, one after another, as there are other
devices), `all_gather` (`lax.all_gather`: NCCL on GPUs) and `psum_scatter` (`lax.psum_scatter`, likewise). Each is
called as JAX programs would call it, so that for small messages the figures are those of calls.

GB/s are those of one direction: the bytes that a device has to receive, by time. For D devices these are the message in
one_way and both_ways, and (D - 1) / D of it in all_gather and reduce_scatter, which is what NCCL calls bus bandwidth.
The link, 100 %, is the best one-way peer copy of the same run and case, whatever its size. On the CPU, where devices
are threads and share memory, the figures say nothing about a link.

No time is reported for data that did not arrive: pseudo-random words, others for every device, size and implementation,
are compared bit by bit with what the receivers compute for themselves.
"""

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from benchmarks import shapes
from benchmarks.harness import (
    Candidate,
    CaseResult,
    Family,
    Headline,
    Timing,
    problem,
    rounded,
    run_operation,
    spread_of,
)

OPERATIONS = {
    "one_way": ("device_put",),
    "both_ways": ("device_put", "ppermute"),
    "all_gather": ("ppermute_ring", "all_gather"),
    "reduce_scatter": ("psum_scatter",),
}
_PAIRS = [(operation, name) for operation, names in OPERATIONS.items() for name in names]
PEERS = ("ppermute", "ppermute_ring", "all_gather", "psum_scatter")

_AXIS = "device"
_MOST_BYTES_IN_FLIGHT = 2**33  # that a device receives before anybody waits
_MOST_CALLS_ON_CPU = 20  # each is waited for, and more would only take longer


def run_case(case: shapes.MessageSizes, implementations: Sequence[str], timing: Timing) -> CaseResult:
    """Measure all sizes of one case with the named implementations; see `harness.Family.run_case`."""
    result = CaseResult()
    available = jax.local_devices()
    wanted = case.devices or max(2, len(available))
    if len(available) < wanted:
        result.skipped.append(problem(case.name, "all", "all", _too_few(wanted, available)))
        return result
    for size in case.sizes:
        for operation in OPERATIONS:
            _run_operation(operation, size, available[:wanted], implementations, timing, result)
    _compare_with_link(result)
    return result


def _too_few(wanted: int, available: Sequence[Any]) -> str:
    reason = f"it needs {wanted} devices and finds {len(available)}"
    if available[0].platform == "cpu":
        return f"{reason}; set XLA_FLAGS=--xla_force_host_platform_device_count={max(wanted, 4)} to have some on a CPU"
    return reason


def _run_operation(
    operation: str,
    size: int,
    devices: Sequence[Any],
    implementations: Sequence[str],
    timing: Timing,
    result: CaseResult,
) -> None:
    received = _received_bytes(operation, size, len(devices))

    def row(candidate: Candidate, seconds: dict[str, list[float]]) -> dict[str, Any]:
        medians = {name: statistics.median(samples) for name, samples in seconds.items()}
        median = medians[candidate.name]
        return {
            "median_ms": rounded(median * 1e3),
            "spread": spread_of(seconds[candidate.name]),
            "bytes": received,
            "gigabytes_per_second": rounded(received / median / 1e9),
            "speedup_over": {
                peer: rounded(medians[peer] / median)
                for peer in OPERATIONS[operation]
                if peer != candidate.name and peer in medians
            },
        }

    run_operation(
        {
            "case": f"{len(devices)}x{shapes.bytes_as_text(size)}",
            "devices": len(devices),
            "operation": operation,
        },
        [name for name in OPERATIONS[operation] if name in implementations],
        timing,
        result,
        build=functools.partial(_build, operation, size=size, devices=devices),
        errors=lambda name, arrived, _: ({}, None if arrived else "what arrived is not what was sent"),
        row=row,
    )


def _received_bytes(operation: str, size: int, devices: int) -> int:
    """That a device receives in a call."""
    words = size // 4
    return 4 * (words if operation in ("one_way", "both_ways") else words // devices * (devices - 1))


def _compare_with_link(result: CaseResult) -> None:
    """Adds what depends on the link's speed, the best of all one-way copies."""
    link = max((row["gigabytes_per_second"] for row in result.rows if row["operation"] == "one_way"), default=None)
    if link is None:
        reason = "no one-way copy was measured, and the others are compared with the best of them"
        result.skipped += [problem(row["case"], row["operation"], row["implementation"], reason) for row in result.rows]
        result.rows = []
    for row in result.rows:
        row["share_of_link"] = rounded(row["gigabytes_per_second"] / link)
        row["time_over_link"] = rounded(link / row["gigabytes_per_second"])


# What is sent


def _words(salt: tuple[Any, Any], rank: Any, count: int) -> jax.Array:
    """uint32 [count]: pseudo-random words of one device, which every device can compute without a message.

    Each size of messages and each transfer has a salt of its own, so that no memory holds by chance what was to arrive.
    """
    word = lax.iota(jnp.uint32, count)
    for part in (*salt, rank):
        word = _mixed(word ^ _mixed(jnp.asarray(part, jnp.uint32) + jnp.uint32(1)))
    return word


def _mixed(word: jax.Array) -> jax.Array:
    """One to one, and so that each bit depends on all: what ends MurmurHash3."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        word = (word ^ (word >> jnp.uint32(shift))) * jnp.uint32(factor)
    return word ^ (word >> jnp.uint32(16))


# Implementations


def _build(operation: str, implementation: str, *, size: int, devices: Sequence[Any]) -> Candidate:
    """The candidate reads whether a result holds what was sent."""
    salt = size, _PAIRS.index((operation, implementation))
    if implementation == "device_put":
        return _build_copies(operation, size, salt, devices[:2])
    return _build_mapped(operation, implementation, size, salt, devices)


def _most_calls(received: int) -> int:
    most_calls = 1000 if jax.default_backend() != "cpu" else _MOST_CALLS_ON_CPU
    return max(1, min(most_calls, _MOST_BYTES_IN_FLIGHT // received))


_drawn = jax.jit(_words, static_argnums=2)
_holds = jax.jit(lambda message, salt, rank: (message == _words(salt, rank, message.size)).all())


def _build_copies(operation: str, size: int, salt: tuple[int, int], devices: Sequence[Any]) -> Candidate:
    count = size // 4
    ways = [(0, 1)] if operation == "one_way" else [(0, 1), (1, 0)]

    def draw(rank: int, device: Any) -> jax.Array:
        with jax.default_device(device):
            drawn = _drawn(salt, rank, count)
        return jax.device_put(drawn, device)  # no copy: from here on nothing but another device_put may move it

    on_their_way: list[list[jax.Array]] = []

    def copy(messages: list[jax.Array]) -> list[jax.Array]:
        received = [jax.device_put(message, devices[to]) for message, (_, to) in zip(messages, ways, strict=True)]
        on_their_way.append(received)
        return received

    def wait(_: Any) -> None:  # for all copies: XLA makes them on several streams, and the last need not come last
        jax.block_until_ready(on_their_way)
        on_their_way.clear()

    def arrived(received: list[jax.Array]) -> bool:
        return all(
            message.devices() == {devices[to]} and bool(_holds(message, salt, source))
            for message, (source, to) in zip(received, ways, strict=True)
        )

    sent = jax.block_until_ready([draw(source, devices[source]) for source, _ in ways])
    return Candidate(
        name="device_put",
        call=copy,
        arguments=lambda calls: [(sent,)] * calls,
        wait=wait,
        most_calls=_most_calls(_received_bytes(operation, size, len(devices))),
        read=arrived,
    )


def _build_mapped(
    operation: str, implementation: str, size: int, salt: tuple[int, int], devices: Sequence[Any]
) -> Candidate:
    many = len(devices)
    part = size // 4 // many
    count = {"both_ways": size // 4, "all_gather": part, "reduce_scatter": part * many}[operation]
    mesh = Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))

    def mapped(fn: Callable[..., Any], operands: int) -> Any:
        return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=(P(_AXIS),) * operands, out_specs=P(_AXIS)))

    def expected() -> tuple[jax.Array, ...]:
        rank = lax.axis_index(_AXIS)
        if implementation == "ppermute":
            return (_words(salt, (rank - 1) % many, count),)
        if implementation == "ppermute_ring":
            return tuple(_words(salt, (rank - step) % many, count) for step in range(1, many))
        everything = [_words(salt, other, count) for other in range(many)]
        if implementation == "all_gather":
            return (jnp.concatenate(everything),)
        return (lax.dynamic_slice_in_dim(functools.reduce(jnp.add, everything), rank * part, part),)

    def same(actual: tuple[jax.Array, ...]) -> jax.Array:
        equal = [(one == other).all() for one, other in zip(actual, expected(), strict=True)]
        return jnp.stack(equal).all()[None]

    sent = jax.block_until_ready(mapped(lambda: _words(salt, lax.axis_index(_AXIS), count), 0)())
    compiled = mapped(_MAPPED[implementation], 1).lower(sent).compile()
    return Candidate(
        name=implementation,
        call=compiled,
        arguments=lambda calls: [(sent,)] * calls,
        most_calls=_most_calls(_received_bytes(operation, size, many)),
        read=lambda output: bool(np.asarray(mapped(same, 1)(output)).all()),
    )


def _to_next(x: jax.Array) -> jax.Array:
    many = lax.axis_size(_AXIS)
    return lax.ppermute(x, _AXIS, [(rank, (rank + 1) % many) for rank in range(many)])


def _around(x: jax.Array) -> tuple[jax.Array, ...]:
    """What all other devices have, the previous one's first; not joined, for that would be another copy."""
    parts = [x]
    for _ in range(lax.axis_size(_AXIS) - 1):
        parts.append(_to_next(parts[-1]))
    return tuple(parts[1:])


_MAPPED: dict[str, Callable[[jax.Array], tuple[jax.Array, ...]]] = {
    "ppermute": lambda x: (_to_next(x),),
    "ppermute_ring": _around,
    "all_gather": lambda x: (lax.all_gather(x, _AXIS, tiled=True),),
    "psum_scatter": lambda x: (lax.psum_scatter(x, _AXIS, tiled=True),),
}


FAMILY = Family(
    description="data from device to device: peer copies, ppermute, all-gather and reduce-scatter, by message size",
    cases={"gpu": shapes.MESSAGES_GPU, "cpu": shapes.MESSAGES_CPU},
    implementations=("device_put", *PEERS),
    peers=PEERS,
    run_case=run_case,
    headline=Headline(
        operation="all_gather",
        figure="median_ms",
        label="All-gather, milliseconds",
        implementations=("ppermute_ring", "all_gather"),
    ),
)
