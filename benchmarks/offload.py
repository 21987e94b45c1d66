"""What host memory costs: layers whose residuals wait there for the backward pass, and AdamW whose state lives there.

Layers are x + silu(x @ up) @ down in bfloat16, run by `te_jax.nn.apply_layers`; a call computes the gradients of x and
of all kernels. Operations and their implementations:

- input: the backward pass recomputes all of a layer but its input. remat keeps the inputs on the device, te_jax in
  host memory, and xla_scan as well, by JAX's own policy `save_and_offload_only_these_names` in a `lax.scan`.
- hidden: it recomputes nothing. saved keeps all on the device; te_jax keeps x @ up in host memory, te_jax_fp8 in FP8
  there, and xla_scan in bfloat16 by JAX's policy.
- optimizer: a step of AdamW with float32 parameters and moments, gradients given and all else donated. device keeps
  the moments on the device, te_jax in host memory (`te_jax.optim.offload`).

Device and host temporaries are those that XLA plans. `floor_ms` is the time in which the copy engines move the same
bytes to the host, and for the optimizer back at the same time, and nothing else. A result whose difference to that of
the first implementation is beyond the bounds is not timed; `difference` is relative, in L2 of the last kernel's or
parameter's values, and 0 where all bits agree.
"""

import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from benchmarks import shapes
from benchmarks.harness import (
    Candidate,
    CaseResult,
    Family,
    Headline,
    Timing,
    measure,
    reason_of,
    rounded,
    spread_of,
)
from te_jax import nn, optim
from te_jax.offload import LAYER_INPUT, Offload

PEERS = ("xla_scan",)
IMPLEMENTATIONS = ("remat", "saved", "device", "te_jax", "te_jax_fp8", *PEERS)
OF_OPERATION = {
    "input": ("remat", "te_jax", "xla_scan"),
    "hidden": ("saved", "te_jax", "te_jax_fp8", "xla_scan"),
    "optimizer": ("device", "te_jax"),
}
"""The implementations of each operation; the first is what others are compared with."""

BOUNDS = {"te_jax_fp8": 0.05, "xla_scan": 0.01}
"""Largest differences; others are within 0.01 of layers, and bit-equal as an optimizer."""

_KEEP_HIDDEN = jax.checkpoint_policies.save_only_these_names("hidden")


@dataclass(frozen=True)
class _Built:
    """A compiled implementation.

    Attributes:
      candidate: to be timed.
      read: the values of a call's result that are compared.
      compiled: the program.
    """

    candidate: Candidate
    read: Callable[[Any], np.ndarray]
    compiled: Any


def run_case(case: shapes.OffloadShape, implementations: Sequence[str], timing: Timing) -> CaseResult:
    """Measure the operations of one case with the named implementations; see `harness.Family.run_case`."""
    result = CaseResult()
    for operation in case.operations:
        names = [name for name in OF_OPERATION[operation] if name in implementations]
        _run_operation(case, operation, names, timing, result)
    return result


def _run_operation(
    case: shapes.OffloadShape, operation: str, names: Sequence[str], timing: Timing, result: CaseResult
) -> None:
    def entry(name: str, reason: str) -> dict[str, str]:
        return {"case": case.name, "operation": operation, "implementation": name, "reason": reason}

    first = OF_OPERATION[operation][0]
    built: dict[str, _Built] = {}
    differences: dict[str, float] = {}
    expected: np.ndarray | None = None
    for name in names:
        begin = time.perf_counter()
        try:
            one = _optimizer(name, case) if operation == "optimizer" else _layers(operation, name, case)
            values = one.read(one.candidate.call(*one.candidate.arguments(1)[0]))
        except Exception as error:  # one that is out of memory must not cost the others theirs
            result.skipped.append(entry(name, reason_of(error)))
            continue
        expected = values if name == first else expected
        took = time.perf_counter() - begin
        print(f"  {case.name} {operation} {name}: a result after {took:.1f} s", file=sys.stderr, flush=True)
        if expected is None:
            result.skipped.append(entry(name, f"nothing to compare with: {first} did not run"))
            continue
        difference = float(np.linalg.norm(values - expected) / np.linalg.norm(expected))
        bound = BOUNDS.get(name, 0.0 if operation == "optimizer" else 0.01)
        if difference <= bound:  # which NaN is not
            built[name], differences[name] = one, difference
        else:
            result.wrong.append(entry(name, f"differs by {difference:.3g} from {first}, bound {bound}"))

    sizes = {name: _memory(one.compiled) for name, one in built.items()}
    candidates = [one.candidate for one in built.values()]
    moved = {
        name: case.state_bytes if operation == "optimizer" else size["host_temporaries"]
        for name, size in sizes.items()
        if name not in _HERE
    }
    candidates += [_copies(name, moved[name], both=operation == "optimizer") for name in moved if moved[name]]
    seconds, failed = measure(candidates, timing, pipelined=jax.default_backend() != "cpu")
    result.skipped += [entry(name, reason) for name, reason in failed.items() if name in built]
    for name in built:
        if name not in seconds:
            continue
        median = statistics.median(seconds[name])
        peers = {peer: statistics.median(seconds[peer]) for peer in (first, *PEERS) if peer in seconds}
        floor = seconds.get(f"copies of {name}")
        result.rows.append(
            {
                "case": case.name,
                "model": case.model,
                "operation": operation,
                "implementation": name,
                "median_ms": rounded(median * 1e3),
                "spread": spread_of(seconds[name]),
                "speedup_over": {peer: rounded(time / median) for peer, time in peers.items() if peer != name},
                **({f"time_over_{first}": rounded(median / peers[first])} if first in peers else {}),
                **({} if floor is None else {"floor_ms": rounded(statistics.median(floor) * 1e3)}),
                "temporaries_gb": rounded(sizes[name]["temporaries"] / 1e9),
                "host_gb": rounded(moved.get(name, 0) / 1e9),
                "difference": float(f"{differences[name]:.3g}"),
            }
        )


_HERE = ("remat", "saved", "device")
"""What uses no host memory."""


def _memory(compiled: Any) -> dict[str, int]:
    found = compiled.memory_analysis()
    return {
        "temporaries": int(found.temp_size_in_bytes),
        "host_temporaries": int(found.host_temp_size_in_bytes),
    }


# Layers


def _layer(x: jax.Array, params: dict[str, jax.Array]) -> jax.Array:
    hidden = checkpoint_name(checkpoint_name(x, "input") @ params["up"], "hidden")
    return x + jax.nn.silu(hidden) @ params["down"]


def _layers(operation: str, name: str, case: shapes.OffloadShape) -> _Built:
    remat, offload = {
        ("input", "remat"): (True, None),
        ("input", "te_jax"): (True, Offload(names=[LAYER_INPUT], min_size=0)),
        ("hidden", "saved"): (None, None),
        ("hidden", "te_jax"): (_KEEP_HIDDEN, Offload(names=["hidden"], min_size=0)),
        ("hidden", "te_jax_fp8"): (_KEEP_HIDDEN, Offload(names=["hidden"], min_size=0, quantize=True)),
    }.get((operation, name), (None, None))

    def total(params: Any, x: jax.Array) -> jax.Array:
        if name == "xla_scan":
            y = _scanned(operation, params, x)
        else:
            y = nn.apply_layers(_layer, params, x, remat=remat, offload=offload)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    params, x = _drawn(case, stacked=name == "xla_scan")
    compiled = jax.jit(jax.grad(total, argnums=(0, 1))).lower(params, x).compile()

    def read(gradients: Any) -> np.ndarray:
        of_params = gradients[0]
        last = of_params["down"][-1] if name == "xla_scan" else of_params[-1]["down"]
        first = of_params["up"][0] if name == "xla_scan" else of_params[0]["up"]
        return np.stack([np.asarray(a[:64, :64].astype(jnp.float32)) for a in (first, last)])

    candidate = Candidate(name=name, call=compiled, arguments=lambda calls: [(params, x)] * calls, most_calls=2)
    return _Built(candidate, read, compiled)


def _scanned(operation: str, params: Any, x: jax.Array) -> jax.Array:
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[operation],
        offload_src="device",
        offload_dst="pinned_host",
    )
    run = jax.checkpoint(_layer, policy=policy)
    return lax.scan(lambda x, params: (run(x, params), None), x, params)[0]


def _drawn(case: shapes.OffloadShape, *, stacked: bool) -> tuple[Any, jax.Array]:
    """Parameters of the layers, in a list or stacked, and x."""

    @jax.jit
    def draw(key: jax.Array) -> tuple[Any, jax.Array]:
        def of_layer(key: jax.Array) -> dict[str, jax.Array]:
            up, down = jax.random.split(key)
            return {
                "up": jax.random.normal(up, (case.hidden, case.mlp), jnp.bfloat16) * case.hidden**-0.5,
                "down": jax.random.normal(down, (case.mlp, case.hidden), jnp.bfloat16) * case.mlp**-0.5,
            }

        x_key, *keys = jax.random.split(key, 1 + case.layers)
        layers = [of_layer(key) for key in keys]
        x = jax.random.normal(x_key, (case.tokens, case.hidden), jnp.bfloat16)
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers) if stacked else layers, x

    return jax.block_until_ready(draw(jax.random.key(0)))


# The optimizer


def _optimizer(name: str, case: shapes.OffloadShape) -> _Built:
    adamw = optim.adamw(1e-3)
    optimizer = adamw if name == "device" else optim.offload(adamw)

    @jax.jit
    def draw(key: jax.Array) -> dict[str, jax.Array]:
        keys = jax.random.split(key, case.kernels)
        return {str(i): jax.random.normal(each, (case.hidden, case.mlp), jnp.float32) for i, each in enumerate(keys)}

    def step(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    gradients = draw(jax.random.key(1))
    params = draw(jax.random.key(0))
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, optimizer.init(params), gradients).compile()
    held: list[Any] = []  # what the last step returned, which the next consumes

    def start() -> None:
        held.clear()
        params = draw(jax.random.key(0))
        held.append((params, optimizer.init(params)))

    def call() -> Any:
        if not held:  # a step that failed may have consumed it
            start()
        params, state = held.pop()
        held.append(compiled(params, state, gradients))
        return held[0]

    def read(result: Any) -> np.ndarray:
        del result
        start()
        for _ in range(3):
            call()
        params, state = held[0]
        leaves = [params["0"], *(leaf for leaf in jax.tree.leaves(state) if leaf.ndim)]
        values = np.stack([np.asarray(leaf[:64, :64]) for leaf in leaves])
        held.clear()  # the memory, for the others
        return values

    return _Built(Candidate(name, call, lambda calls: [()] * calls, most_calls=4), read, compiled)


# Copies


def _copies(name: str, size: int, *, both: bool) -> Candidate:
    """Moves this many bytes to the host in pieces of 256 MB, with `both` as many back at the same time."""
    pieces = max(1, size // 2**28)
    if both and jax.default_backend() != "cpu":
        copies = _CopiesBothWays(size // pieces)
        return Candidate(f"copies of {name}", lambda: copies.run(pieces), lambda calls: [()] * calls, most_calls=2)
    there = jnp.zeros((size // pieces // 4,), jnp.float32)
    back = jax.device_put(there, jax.memory.Space.Host)

    def run() -> Any:
        found = []
        for _ in range(pieces):
            found = [jax.device_put(there, jax.memory.Space.Host)]
            if both:
                found.append(jax.device_put(back, jax.memory.Space.Device))
        return found

    return Candidate(f"copies of {name}", run, lambda calls: [()] * calls, most_calls=2)


class _CopiesBothWays:
    """Copies to the host and from it on two streams of CUDA's driver: JAX runs one `device_put` after the other."""

    def __init__(self, size: int) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._size = ctypes.c_size_t(size)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._do("cuDeviceGet", ctypes.byref(device), 0)
        self._do("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)  # JAX's
        self._do("cuCtxSetCurrent", context)
        self._streams = [self._made("cuStreamCreate", 1) for _ in range(2)]  # that wait for no other stream
        self._device = [self._made("cuMemAlloc_v2", self._size) for _ in range(2)]
        self._host = [self._made("cuMemAllocHost_v2", self._size) for _ in range(2)]

    def run(self, pieces: int) -> None:
        to_host, to_device = self._streams
        for _ in range(pieces):
            self._do("cuMemcpyDtoHAsync_v2", self._host[0], self._device[0], self._size, to_host)
            self._do("cuMemcpyHtoDAsync_v2", self._device[1], self._host[1], self._size, to_device)
        for stream in self._streams:
            self._do("cuStreamSynchronize", stream)

    def _made(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._do(name, ctypes.byref(made), *arguments)
        return made

    def _do(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._cuda, name)(*arguments):
            raise RuntimeError(f"{name} returned {code}")


FAMILY = Family(
    description="residuals of layers, and the optimizer's state, in host memory",
    cases={"gpu": shapes.OFFLOAD_GPU, "cpu": shapes.OFFLOAD_CPU},
    implementations=IMPLEMENTATIONS,
    peers=PEERS,
    run_case=run_case,
    headline=Headline(
        operation="input",
        figure="time_over_remat",
        label="Layers whose inputs are in host memory, with gradients, time as a multiple of that without offload",
        implementations=("remat", "te_jax", "xla_scan"),
    ),
)
