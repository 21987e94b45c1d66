"""Tensor-parallel linear layers: te_jax's collective matmul against plain collectives and torch's fused ones.

A case is a pair of layers over all devices of the machine, D of them. For tokens S, hidden size K and features N:

- all_gather_matmul: x [S, K] is split by rows, w [K, N] by columns, and so is the result.
- matmul_reduce_scatter: x [S, N] is split by columns, w [N, K] by rows, and so is the result.

Each as it is (2SKN floating-point operations), and with `_forward_backward` behind its name also with the gradients of
x and w for a given cotangent, in one program (6SKN). Values are random normal in bfloat16, and so are results. In
`fp8_all_gather_matmul` and `fp8_matmul_reduce_scatter` x and w come quantized (CurrentScaling, fast accumulation). A
case "…-tp4" gives D devices the shares that four would have: S·D/4 tokens and N·D/4 features. In a case "8x1024x…"
x and y are [8, 1024, …], 8 sequences that are split along their tokens: each device's rows are 8 pieces of the whole.

Implementations: `te_jax` (transport "auto"), `te_jax_p2p`, `te_jax_ring`, `te_jax_ring_bidirectional`, `xla` (transport
"xla", plain collectives: nothing overlaps), `gemm_alone` (the products without communication, of a gathered x, and of
sums that stay where they are: the time if all communication were hidden), and `torch`
(`torch.ops.symm_mem.fused_all_gather_matmul` and its like, in a process for each GPU, as they need it).

A call that begins before the one ahead of it has ended would hide what it waits for. So a sample consists of programs
of a few calls, each of which reads a value that is made of the results of the one before, and a time is the program's
divided by their number. Torch's calls are in such an order because each of them ends on the stream that the next one
begins on. It takes its samples in the same rounds as all others, but reads the clocks of the GPUs, which do not see
messages between processes; of all processes the slowest counts. TFLOP/s are those of one device.

No time is reported for a result outside the error bounds: 64 rows of y and of either gradient are compared with float64
arithmetic on the values before quantization.
"""

import functools
import importlib.util
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import collective_torch, dense, shapes
from benchmarks.collective_layers import AXIS, Layer, Operation
from benchmarks.harness import (
    Candidate,
    CaseResult,
    Checked,
    Family,
    Headline,
    Timing,
    calls_that_fit,
    compute_row,
    out_of_bounds,
    problem,
    rounded,
    run_operation,
    temporary_bytes,
)
from benchmarks.workers import Workers
from te_jax import ops, parallel
from te_jax.quantized import QuantizedArray
from te_jax.recipe import CurrentScaling

OPERATIONS = tuple(
    Operation(gathers, **kind) for kind in ({}, {"backward": True}, {"fp8": True}) for gathers in (True, False)
)
TRANSPORTS: dict[str, dict[str, Any]] = {
    "te_jax": {"transport": "auto"},
    "te_jax_p2p": {"transport": "p2p"},
    "te_jax_ring": {"transport": "ring"},
    "te_jax_ring_bidirectional": {"transport": parallel.Ring(bidirectional=True)},
    "xla": {"transport": "xla"},
}
PEERS = ("te_jax_ring", "te_jax_ring_bidirectional", "xla", "torch")
IMPLEMENTATIONS = (*TRANSPORTS, "gemm_alone", "torch")
_COMPARED = ("xla", "te_jax_ring", "torch")
_IN_SWEEPS = ("te_jax", "te_jax_p2p", "te_jax_ring", "xla", "gemm_alone")

_RECIPE = CurrentScaling(fast_accumulation=("forward", "dgrad", "wgrad"))
_CALLS = {"gpu": 4, "cpu": 2}
"""Calls of one program."""


def run_case(case: shapes.TensorParallelShape, implementations: Sequence[str], timing: Timing) -> CaseResult:
    """Measure all operations of one case with the named implementations; see `harness.Family.run_case`."""
    result = CaseResult()
    devices = jax.local_devices()
    if reason := _misfit(case, devices):
        result.skipped.append(problem(case.name, "all", "all", reason))
        return result
    mesh = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
    operations = [operation for operation in OPERATIONS if not (case.sweep and (operation.backward or operation.fp8))]
    if case.sweep:
        implementations = [name for name in implementations if name in _IN_SWEEPS]
    reasons = {name: reason for name in implementations if (reason := _unavailable(name, len(devices)))}
    result.skipped += [problem(case.name, "all", name, reason) for name, reason in reasons.items()]
    implementations = [name for name in implementations if name not in reasons]
    for gathers in sorted({operation.gathers for operation in operations}, reverse=True):
        same = [operation for operation in operations if operation.gathers == gathers]
        inputs = _inputs(Layer.of(same[0], case, len(devices)), mesh)
        exact = dense._exact(dense._Inputs(inputs.xs[-1], inputs.w, inputs.dy))
        for operation in same:
            layer = Layer.of(operation, case, len(devices))
            _run_operation(case, layer, implementations, timing, inputs, exact, result)
    return result


def too_few(devices: Sequence[Any]) -> str | None:
    """Says what to do where there is only one device, and nothing to communicate with."""
    if len(devices) > 1:
        return None
    reason = "it needs 2 devices, and there is 1"
    if devices[0].platform == "cpu":
        return f"{reason}; set XLA_FLAGS=--xla_force_host_platform_device_count=4 to have some on a CPU"
    return reason


def _misfit(case: shapes.TensorParallelShape, devices: Sequence[Any]) -> str | None:
    count = len(devices)
    if reason := too_few(devices):
        return reason
    if case.tensor_parallel is not None and count >= case.tensor_parallel:
        return f"it is for fewer than {case.tensor_parallel} devices, and there are {count}"
    if case.tokens % (case.sequences * count) or case.features % (16 * count):
        return f"its layers cannot be split over {count} devices; CUDA_VISIBLE_DEVICES can name fewer"
    return None


def _unavailable(name: str, count: int) -> str | None:
    if name == "te_jax_ring_bidirectional" and count == 2:
        return "between two devices there is but one way"
    if name == "torch" and jax.default_backend() != "gpu":
        return "its fused products need GPUs"
    if name == "torch" and importlib.util.find_spec("torch") is None:
        return "it is not installed"
    return None


def _run_operation(
    case: shapes.TensorParallelShape,
    layer: Layer,
    implementations: Sequence[str],
    timing: Timing,
    inputs: "_Inputs",
    exact: Any,
    result: CaseResult,
) -> None:
    operation = layer.operation
    operands: _Operands | None = None

    def build(name: str) -> Candidate:
        nonlocal operands
        if name == "torch":
            return _build_torch(layer, collective_torch.workers(layer.devices))
        operands = operands or _operands(layer, inputs)
        return _build(name, layer, inputs.mesh, operands)

    def errors(name: str, output: Any, _: Any) -> Checked:
        errors = output if name == "torch" else dense.errors_of(output, exact)
        return errors, out_of_bounds(errors, dense.FP8_ERROR_BOUNDS if operation.fp8 else dense.ERROR_BOUNDS)

    def row(candidate: Candidate, seconds: dict[str, list[float]]) -> dict[str, Any]:
        mine, alone = (statistics.median(seconds[name]) for name in (candidate.name, "gemm_alone"))
        return {
            **compute_row(seconds, candidate.name, flops=layer.flops, peers=_COMPARED),
            "over_gemm": rounded(mine / alone),
            "temporary_bytes": candidate.temporary_bytes,
        }

    run_operation(
        {"case": case.name, "model": case.model, "devices": layer.devices, "operation": operation.name},
        implementations,
        timing,
        result,
        build=build,
        errors=errors,
        row=row,
        yardstick="gemm_alone",
    )


# Operands


@dataclass(frozen=True)
class _Inputs:
    """Plain operands in bfloat16: an x for each call of a program, w, and dy for the gradients.

    The first value of xs and dy on each device is a nought, for `_after`.
    """

    mesh: Mesh
    xs: tuple[jax.Array, ...]
    w: jax.Array
    dy: jax.Array


def _inputs(layer: Layer, mesh: Mesh) -> _Inputs:
    calls = _CALLS[jax.default_backend()]
    shapes_of = [(layer.rows, layer.inner)] * calls + [(layer.inner, layer.columns), (layer.rows, layer.columns)]
    specs = [layer.x] * calls + [layer.w, layer.y]

    def draw(key: jax.Array) -> list[jax.Array]:
        keys = jax.random.split(key, len(shapes_of))
        drawn = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes_of, strict=True)]
        *xs, w, dy = (_with_noughts(x, spec, layer.devices) for x, spec in zip(drawn, specs, strict=True))
        return [*xs, w, dy]

    drawn = jax.jit(draw, out_shardings=[NamedSharding(mesh, spec) for spec in specs])(jax.random.key(0))
    *xs, w, dy = jax.block_until_ready(drawn)
    return _Inputs(mesh, tuple(xs), w, dy)


def _with_noughts(x: jax.Array, spec: P, devices: int) -> jax.Array:
    """x [rows, columns] with a nought as the first value of every device."""
    first = jnp.ones((1, 1), bool)
    for axis, (size, name) in enumerate(zip(x.shape, spec, strict=True)):
        part = size if name is None else size // devices
        first = first & (lax.broadcasted_iota(jnp.int32, x.shape, axis) % part == 0)
    return jnp.where(first, jnp.zeros_like(x), x)


@dataclass(frozen=True)
class _Operands:
    """What a program takes: an x for each call, w, and dy where there are gradients."""

    xs: tuple[Any, ...]
    w: Any
    dy: jax.Array | None

    def of_their_own(self, mesh: Mesh, x: P, dy: P) -> tuple[tuple[Any, ...], jax.Array | None]:
        """Copies of xs and dy, split as the specs say, for programs that write to them."""
        xs = tuple(_placed(each, mesh, x, may_alias=False) for each in self.xs)
        return xs, None if self.dy is None else _placed(self.dy, mesh, dy, may_alias=False)


def _operands(layer: Layer, inputs: _Inputs) -> _Operands:
    operation = layer.operation
    if not operation.fp8:
        return _Operands(inputs.xs, inputs.w, inputs.dy if operation.backward else None)
    # Never implementation=None: where the kernels are not loaded that would publish the reference under their name.
    quantize = functools.partial(ops.quantize, implementation="native")
    xs = tuple(quantize(x, _RECIPE.quantization("activation"), copies="data") for x in inputs.xs)
    w = quantize(inputs.w, _RECIPE.quantization("kernel"), copies="transposed")
    return _Operands(tuple(_placed(x, inputs.mesh, layer.x) for x in xs), _placed(w, inputs.mesh, layer.w), None)


def _placed(x: Any, mesh: Mesh, spec: P, *, may_alias: bool = True) -> Any:
    """An array, plain or quantized with one scale, on the devices that a spec names."""
    specs = [spec]
    if isinstance(x, QuantizedArray):
        specs = [spec if x.transposed is None else P(*reversed(spec)), P()]
    leaves, tree = jax.tree.flatten(x)
    return tree.unflatten(
        jax.device_put(leaf, NamedSharding(mesh, each), may_alias=may_alias)
        for leaf, each in zip(leaves, specs, strict=True)
    )


# Implementations in JAX

_Results = dict[str, jax.Array]
"""y, and with gradients dx and dkernel."""
_Call = Callable[..., _Results]
"""(x, w, dy or None) on one device → results."""


def _build(name: str, layer: Layer, mesh: Mesh, operands: _Operands) -> Candidate:
    x, dy = layer.x, layer.y
    results = {"y": layer.y, "dx": layer.x, "dkernel": layer.w} if layer.operation.backward else {"y": layer.y}
    unsummed = None
    if name == "gemm_alone":
        call, unsummed = _products_alone(layer)
        x, dy = (P(), dy) if layer.operation.gathers else (x, P())
        results = {key: P(AXIS) if key == unsummed else spec for key, spec in results.items()}
    else:
        call = _collective(layer, TRANSPORTS[name])

    state = operands.of_their_own(mesh, x, dy)
    xs_specs, dy_specs, w_specs = (_specs_of(each) for each in (*state, operands.w))
    mapped = jax.shard_map(
        _chained(call),
        mesh=mesh,
        in_specs=(xs_specs, dy_specs, w_specs),
        out_specs=(xs_specs, dy_specs, results),  # JAX gives what is donated to the first results of its shape
        check_vma=name != "gemm_alone",  # what it has gathered is the same everywhere, and JAX would not believe it
    )
    compiled = jax.jit(mapped, donate_argnums=(0, 1)).lower(*state, operands.w).compile()

    def program() -> _Results:
        nonlocal state
        *state, results = compiled(*state, operands.w)
        return results

    def read(output: _Results) -> _Results:
        if unsummed in output:
            output[unsummed] = jnp.sum(output[unsummed].astype(jnp.float32), axis=0)
        if name != "gemm_alone":
            output["y"] = _in_order_of_x(output["y"], layer)
        return output

    return Candidate(
        name=name,
        call=program,
        arguments=lambda programs: [()] * programs,
        most_calls=calls_that_fit(2 * (layer.rows * (layer.inner + layer.columns) + layer.inner * layer.columns)),
        temporary_bytes=temporary_bytes(compiled),
        read=read,
        seconds=lambda samples: [sample / len(operands.xs) for sample in samples],
    )


def _specs_of(operands: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding.spec, operands)


def _chained(call: _Call) -> Callable[..., tuple[tuple[Any, ...], jax.Array | None, _Results]]:
    """Several calls, each of which begins when the one before has all its results: (xs, dy, w) → (xs, dy, results)."""

    def program(xs: tuple[Any, ...], dy: jax.Array | None, w: Any) -> Any:
        results: _Results = {}
        written = []
        for x in xs:
            if results:
                x, dy = _after(results, (x, dy))
            written.append(x)
            # The barrier keeps XLA from computing no more of the results than is used of them.
            results = lax.optimization_barrier(call(x, w, dy))
        return tuple(written), dy, results

    return program


def _after(results: _Results, operands: Any) -> Any:
    """The operands, whose first value, a nought, is written again: nought times one value of each result.

    A barrier would not do: XLA drops what is not used behind it, and on a CPU it forgets the order before it schedules.
    Donated operands are written in place, so that this is one value. Scales of tensors stay as they are.
    """
    nought = jnp.zeros((1, 1), jnp.float32)
    for result in results.values():
        first = lax.slice(result, (0,) * result.ndim, (1,) * result.ndim)
        nought = nought + 0 * first.astype(jnp.float32).reshape(1, 1)

    def write(x: jax.Array) -> jax.Array:
        return x if x.ndim == 0 else lax.dynamic_update_slice(x, nought.astype(x.dtype), (0, 0))

    return jax.tree.map(write, operands)


def _collective(layer: Layer, transport: dict[str, Any]) -> _Call:
    operation = layer.operation
    collective = parallel.all_gather_matmul if operation.gathers else parallel.matmul_reduce_scatter
    options = {"recipe": _RECIPE, "implementation": "native"} if operation.fp8 else {}
    collective = functools.partial(collective, axis_name=AXIS, **transport, **options)

    def product(x: Any, w: Any) -> jax.Array:
        if layer.sequences == 1:
            return collective(x, w)
        y = collective(x.reshape(layer.sequences, -1, x.shape[-1]), w)
        return y.reshape(-1, y.shape[-1])

    if not operation.backward:
        return lambda x, w, dy: {"y": product(x, w)}

    def forward_backward(x: jax.Array, w: jax.Array, dy: jax.Array) -> _Results:
        y, vjp = jax.vjp(product, x, w)
        dx, dw = vjp(dy)
        return {"y": y, "dx": dx, "dkernel": dw}

    return forward_backward


def _in_order_of_x(y: jax.Array, layer: Layer) -> jax.Array:
    """The rows of y [rows, columns] in the order of x's: on one side only a device's pieces lie one after another."""
    split = (layer.sequences, layer.devices) if layer.operation.gathers else (layer.devices, layer.sequences)
    return jnp.swapaxes(y.reshape(*split, -1, y.shape[-1]), 0, 1).reshape(y.shape)


def _products_alone(layer: Layer) -> tuple[_Call, str | None]:
    """The products of a layer whose operands are gathered, and the name of the result that would be scattered."""
    operation = layer.operation

    def product(x: Any, w: Any) -> jax.Array:
        if not operation.fp8:
            return x @ w
        return ops.gemm(x, w, rhs_contracting="rows", fast_accumulation=True, implementation="native")

    unsummed = ("dx" if operation.backward else None) if operation.gathers else "y"

    def call(x: Any, w: Any, dy: jax.Array | None) -> _Results:
        results = {"y": product(x, w)}
        if dy is not None:
            results |= {"dx": dy @ w.T, "dkernel": x.T @ dy}
        return {name: each[None] if name == unsummed else each for name, each in results.items()}

    return call, unsummed


# Torch


def _build_torch(layer: Layer, workers: Workers) -> Candidate:
    """What the candidate reads are errors: each process compares its part of the results."""
    calls = _CALLS[jax.default_backend()]
    workers.ask("ready")
    errors = workers.ask("prepare", layer, calls)
    programs = 0
    clocked: list[tuple[int, float]] = []

    def enqueue() -> None:
        nonlocal programs
        programs += 1

    def wait(_: Any) -> None:
        nonlocal programs
        count, programs = programs * calls, 0
        clocked.append((count, max(workers.ask("time", count))))

    def seconds(samples: list[float]) -> list[float]:
        # Those as long as the last: before each of them fewer ran.
        return [seconds for count, seconds in clocked if count == clocked[-1][0]][-len(samples) :]

    return Candidate(
        name="torch",
        call=enqueue,
        arguments=lambda programs: [()] * programs,
        wait=wait,
        read=lambda _: {name: max(each[name] for each in errors) for name in errors[0]},
        seconds=seconds,
    )


FAMILY = Family(
    description="tensor-parallel linear layers: products that gather rows or scatter sums while they multiply",
    cases={"gpu": shapes.TENSOR_PARALLEL_GPU, "cpu": shapes.TENSOR_PARALLEL_CPU},
    implementations=IMPLEMENTATIONS,
    peers=PEERS,
    run_case=run_case,
    headline=Headline(
        operation="all_gather_matmul",
        figure="over_gemm",
        label="All-gather and matrix product, time as a multiple of the product's alone",
        implementations=("te_jax", "xla", "te_jax_ring"),
    ),
)
