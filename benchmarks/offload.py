"""What host memory costs: layers whose residuals wait there for the backward pass, and AdamW whose state lives there.

Layers are x + silu(x @ up) @ down in bfloat16, run by `te_jax.layers.apply_layers`, or by `scan_layers` where the name
of an implementation ends in scan; a call computes the gradients of x and of all kernels. Operations and their
implementations:

- input: the backward pass recomputes all of a layer but its input. remat and remat_scan keep the inputs on the device,
  te_jax and te_jax_scan in host memory, and xla_scan as well, by JAX's own policy `save_and_offload_only_these_names`
  in a `lax.scan`.
- hidden: it recomputes the activation only. saved and saved_scan keep the input and x @ up on the device; te_jax and
  te_jax_scan keep x @ up in host memory, te_jax_fp8 and te_jax_fp8_scan in FP8 there, and xla_scan in bfloat16 by JAX's
  policy. With te_jax_keep and te_jax_keep_scan a third of the layers keep it on the device. saved recomputes nothing.
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
from collections.abc import Sequence
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
    Checked,
    Family,
    Headline,
    Timing,
    measure,
    out_of_bounds,
    relative_error,
    rounded,
    run_operation,
    spread_of,
    temporary_bytes,
)
from te_jax import optim
from te_jax.layers import apply_layers, scan_layers
from te_jax.offload import LAYER_INPUT, Offload

PEERS = ("xla_scan",)
OF_OPERATION = {
    "input": ("remat", "te_jax", "remat_scan", "te_jax_scan", "xla_scan"),
    "hidden": (
        *("saved", "te_jax", "te_jax_keep", "te_jax_fp8"),
        *("saved_scan", "te_jax_scan", "te_jax_keep_scan", "te_jax_fp8_scan", "xla_scan"),
    ),
    "optimizer": ("device", "te_jax"),
}
"""The implementations of each operation; the first is what others are compared with, and scans also with its scan."""

IMPLEMENTATIONS = tuple(dict.fromkeys(name for names in OF_OPERATION.values() for name in names))

BOUNDS = {"te_jax_fp8": 0.05, "te_jax_fp8_scan": 0.05, "xla_scan": 0.01}
"""Largest differences; others are within 0.01 of layers, and bit-equal as an optimizer."""

_KEEP_HIDDEN = jax.checkpoint_policies.save_only_these_names("hidden")


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
    first = OF_OPERATION[operation][0]
    host_bytes: dict[str, int] = {}

    def build(name: str) -> Candidate:
        begin = time.perf_counter()
        built, compiled = _optimizer(name, case) if operation == "optimizer" else _layers(operation, name, case)
        took = time.perf_counter() - begin
        print(f"  {case.name} {operation} {name}: compiled in {took:.1f} s", file=sys.stderr, flush=True)
        in_host = case.state_bytes if operation == "optimizer" else compiled.memory_analysis().host_temp_size_in_bytes
        host_bytes[name] = 0 if name in _ON_DEVICE else int(in_host)
        return built

    def errors(name: str, values: np.ndarray, expected: np.ndarray) -> Checked:
        errors = {"difference": relative_error(values, expected)}
        bound = BOUNDS.get(name, 0.0 if operation == "optimizer" else 0.01)
        return errors, out_of_bounds(errors, {"difference": bound})

    def row(candidate: Candidate, seconds: dict[str, list[float]]) -> dict[str, Any]:
        name = candidate.name
        median = {each: statistics.median(samples) for each, samples in seconds.items()}
        peers = [peer for peer in (first, *PEERS) if peer in median]
        return {
            "median_ms": rounded(median[name] * 1e3),
            "spread": spread_of(seconds[name]),
            "speedup_over": {peer: rounded(median[peer] / median[name]) for peer in peers if peer != name},
            **{
                f"time_over_{other}": rounded(median[name] / median[other])
                for other in (first, f"{first}_scan")
                if other in median and (other == first or name.endswith("_scan"))
            },
            "temporaries_gb": rounded((candidate.temporary_bytes or 0) / 1e9),
            "host_gb": rounded(host_bytes[name] / 1e9),
        }

    rows = run_operation(
        {"case": case.name, "model": case.model, "operation": operation},
        names,
        timing,
        result,
        build=build,
        errors=errors,
        row=row,
        references=(first,),
    )
    copies = [_copies(name, host_bytes[name], both=operation == "optimizer") for name in rows if host_bytes[name]]
    floors, _ = measure(copies, timing, pipelined=jax.default_backend() != "cpu")
    for name, samples in floors.items():
        rows[name]["floor_ms"] = rounded(statistics.median(samples) * 1e3)


_ON_DEVICE = ("remat", "remat_scan", "saved", "saved_scan", "device")
"""Implementations that use no host memory."""


# Layers


def _layer(x: jax.Array, params: dict[str, jax.Array]) -> jax.Array:
    hidden = checkpoint_name(checkpoint_name(x, "input") @ params["up"], "hidden")
    return x + jax.nn.silu(hidden) @ params["down"]


def _layers(operation: str, name: str, case: shapes.OffloadShape) -> tuple[Candidate, Any]:
    """The candidate, which reads values of the first and the last kernel's gradients, and its compiled program."""
    scanned, kind = name.endswith("_scan"), name.removesuffix("_scan")
    remat: Any = True if operation == "input" else _KEEP_HIDDEN if scanned or kind != "saved" else None
    names = [LAYER_INPUT] if operation == "input" else ["hidden"]
    implementation = "native" if scanned else None  # all arrays are on one device, however many there are
    offload = Offload(
        names=names,
        min_size=0,
        quantize=kind == "te_jax_fp8",
        keep=max(1, case.layers // 3) if kind == "te_jax_keep" else 1,
        slots=2 if kind == "te_jax_keep" else None,
        implementation=implementation,
    )

    def total(params: Any, x: jax.Array) -> jax.Array:
        if name == "xla_scan":
            y = _scanned(operation, params, x)
        else:
            run = scan_layers if scanned else apply_layers
            y = run(_layer, params, x, remat=remat, offload=None if kind in _ON_DEVICE else offload)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    params, x = _drawn(case, stacked=scanned)
    compiled = jax.jit(jax.grad(total, argnums=(0, 1))).lower(params, x).compile()

    def read(gradients: Any) -> np.ndarray:
        of_params = gradients[0]
        last = of_params["down"][-1] if scanned else of_params[-1]["down"]
        first = of_params["up"][0] if scanned else of_params[0]["up"]
        return np.stack([np.asarray(a[:64, :64].astype(jnp.float32)) for a in (first, last)])

    candidate = Candidate(
        name=name,
        call=compiled,
        arguments=lambda calls: [(params, x)] * calls,
        most_calls=2,
        temporary_bytes=temporary_bytes(compiled),
        read=read,
    )
    return candidate, compiled


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


def _optimizer(name: str, case: shapes.OffloadShape) -> tuple[Candidate, Any]:
    """The candidate, which reads values of a parameter and of its state after three steps, and its compiled program."""
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

    def call() -> Any:
        if not held:  # a step that failed may have consumed it
            params = draw(jax.random.key(0))
            held.append((params, optimizer.init(params)))
        params, state = held.pop()
        held.append(compiled(params, state, gradients))
        return held[0]

    def read(_: Any) -> np.ndarray:
        call()
        call()
        params, state = held[0]
        leaves = [params["0"], *(leaf for leaf in jax.tree.leaves(state) if leaf.ndim)]
        values = np.stack([np.asarray(leaf[:64, :64]) for leaf in leaves])
        held.clear()  # the memory, for the others
        return values

    candidate = Candidate(
        name=name,
        call=call,
        arguments=lambda calls: [()] * calls,
        most_calls=4,
        temporary_bytes=temporary_bytes(compiled),
        read=read,
    )
    return candidate, compiled


# Copies


def _copies(name: str, size: int, *, both: bool) -> Candidate:
    """Moves this many bytes to the host in pieces of 256 MB, with `both` as many back at the same time."""
    pieces = max(1, size // 2**28)
    if both and jax.default_backend() != "cpu":
        copies = _CopiesBothWays(size // pieces)
        return Candidate(name, lambda: copies.run(pieces), lambda calls: [()] * calls, most_calls=2)
    there = jnp.zeros((size // pieces // 4,), jnp.float32)
    back = jax.device_put(there, jax.memory.Space.Host)

    def run() -> Any:
        found = []
        for _ in range(pieces):
            found = [jax.device_put(there, jax.memory.Space.Host)]
            if both:
                found.append(jax.device_put(back, jax.memory.Space.Device))
        return found

    return Candidate(name, run, lambda calls: [()] * calls, most_calls=2)


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
