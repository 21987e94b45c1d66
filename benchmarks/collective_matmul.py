"""Tensor-parallel linear layers: te_jax's collective matmul against plain collectives and torch's fused ones.

A case is a pair of layers over all devices of the machine, D of them. For tokens S, hidden size K and features N:

- all_gather_matmul: x [S, K] is split by rows, w [K, N] by columns, and so is the result.
- matmul_reduce_scatter: x [S, N] is split by columns, w [N, K] by rows, and so is the result.

Each as it is (2SKN floating-point operations), and with `_forward_backward` behind its name also with the gradients of
x and w for a given cotangent, in one program (6SKN). Values are random normal in bfloat16, and so are results. In
`fp8_all_gather_matmul` and `fp8_matmul_reduce_scatter` x and w come quantized (CurrentScaling, fast accumulation). A
case "…-tp4" gives D devices the shares that four would have: S·D/4 tokens and N·D/4 features.

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

import atexit
import faulthandler
import functools
import importlib.util
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import dense, shapes
from benchmarks.harness import (
    Candidate,
    CaseResult,
    Family,
    Headline,
    Timing,
    compute_row,
    measure,
    reason_of,
    temporary_bytes,
)
from te_jax import ops, parallel
from te_jax.quantized import QuantizedArray
from te_jax.recipe import CurrentScaling

AXIS = "tensor"


@dataclass(frozen=True)
class _Operation:
    """What is computed.

    Attributes:
      gathers: all_gather_matmul, else matmul_reduce_scatter.
      backward: with the gradients of x and w.
      fp8: of x and w that were quantized before.
    """

    gathers: bool
    backward: bool = False
    fp8: bool = False

    @property
    def name(self) -> str:
        head = "fp8_" if self.fp8 else ""
        tail = "_forward_backward" if self.backward else ""
        return f"{head}{'all_gather_matmul' if self.gathers else 'matmul_reduce_scatter'}{tail}"


OPERATIONS = tuple(
    _Operation(gathers, **kind) for kind in ({}, {"backward": True}, {"fp8": True}) for gathers in (True, False)
)
TRANSPORTS: dict[str, dict[str, Any]] = {
    "te_jax": {"transport": "auto"},
    "te_jax_p2p": {"transport": "p2p"},
    "te_jax_ring": {"transport": "ring"},
    "te_jax_ring_bidirectional": {"transport": "ring", "bidirectional": True},
    "xla": {"transport": "xla"},
}
PEERS = ("te_jax_ring", "te_jax_ring_bidirectional", "xla", "torch")
IMPLEMENTATIONS = (*TRANSPORTS, "gemm_alone", "torch")
_COMPARED = ("xla", "te_jax_ring", "torch")
_IN_SWEEPS = ("te_jax", "te_jax_p2p", "te_jax_ring", "xla", "gemm_alone")

_RECIPE = CurrentScaling(fast_accumulation=("forward", "dgrad", "wgrad"))
_CALLS = {"gpu": 4, "cpu": 2}
"""Calls of one program."""


@dataclass(frozen=True)
class _Layer:
    """The layer of an operation on this machine.

    Attributes:
      rows, inner, columns: of x [rows, inner] and w [inner, columns], on all devices together.
      devices: that share it.
    """

    operation: _Operation
    rows: int
    inner: int
    columns: int
    devices: int

    @classmethod
    def of(cls, operation: _Operation, case: shapes.TensorParallelShape, devices: int) -> "_Layer":
        share = devices / (case.tensor_parallel or devices)
        tokens, features = int(case.tokens * share), int(case.features * share)
        widths = (case.hidden, features) if operation.gathers else (features, case.hidden)
        return cls(operation, tokens, *widths, devices)

    @property
    def x(self) -> P:
        return P(AXIS, None) if self.operation.gathers else P(None, AXIS)

    @property
    def w(self) -> P:
        return P(None, AXIS) if self.operation.gathers else P(AXIS, None)

    @property
    def y(self) -> P:
        return self.w

    @property
    def flops(self) -> int:
        """Of one device."""
        return (6 if self.operation.backward else 2) * self.rows * self.inner * self.columns // self.devices


def run_case(case: shapes.TensorParallelShape, implementations: Sequence[str], timing: Timing) -> CaseResult:
    """Measure all operations of one case with the named implementations; see `harness.Family.run_case`."""
    result = CaseResult()
    devices = jax.local_devices()
    if problem := _misfit(case, devices):
        entry = {"case": case.name, "operation": "all", "implementation": "all"}
        result.skipped.append(entry | {"reason": problem})
        return result
    mesh = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
    operations = [operation for operation in OPERATIONS if not (case.sweep and (operation.backward or operation.fp8))]
    if case.sweep:
        implementations = [name for name in implementations if name in _IN_SWEEPS]
    problems = {name: problem for name in implementations if (problem := _unavailable(name, len(devices)))}
    entry = {"case": case.name, "operation": "all"}
    result.skipped += [entry | {"implementation": name, "reason": problem} for name, problem in problems.items()]
    implementations = [name for name in implementations if name not in problems]
    for gathers in sorted({operation.gathers for operation in operations}, reverse=True):
        same = [operation for operation in operations if operation.gathers == gathers]
        inputs = _inputs(_Layer.of(same[0], case, len(devices)), mesh)
        exact = dense._exact(dense._Inputs(inputs.xs[-1], inputs.w, inputs.dy))
        for operation in same:
            layer = _Layer.of(operation, case, len(devices))
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
    if problem := too_few(devices):
        return problem
    if case.tensor_parallel is not None and count >= case.tensor_parallel:
        return f"it is for fewer than {case.tensor_parallel} devices, and there are {count}"
    if case.tokens % count or case.features % (16 * count):
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
    layer: _Layer,
    implementations: Sequence[str],
    timing: Timing,
    inputs: "_Inputs",
    exact: Any,
    result: CaseResult,
) -> None:
    operation = layer.operation

    def entry(name: str, reason: str) -> dict[str, str]:
        return {"case": case.name, "operation": operation.name, "implementation": name, "reason": reason}

    operands: _Operands | None = None
    errors: dict[str, dict[str, float]] = {}
    built: dict[str, _Built] = {}
    for name in implementations:
        try:
            if name == "torch":
                candidate = _build_torch(layer, _torch_workers(layer.devices))
            else:
                operands = operands or _operands(layer, inputs)
                candidate = _build(name, layer, inputs.mesh, operands)
            errors[name] = candidate.errors(exact)
        except Exception as error:  # one that is missing or out of memory must not cost the others theirs
            result.skipped.append(entry(name, reason_of(error)))
            continue
        if wrong := dense._out_of_bounds(errors[name], fp8=operation.fp8):
            result.wrong.append(entry(name, wrong))
        else:
            built[name] = candidate

    candidates = [each.candidate for each in built.values()]
    seconds, failed = measure(candidates, timing, pipelined=jax.default_backend() != "cpu")
    result.skipped += [entry(name, reason) for name, reason in failed.items()]
    seconds = {name: built[name].seconds_of_a_call(samples) for name, samples in seconds.items()}
    if "gemm_alone" not in seconds:
        reason = "gemm_alone was not measured, and all others are compared with it"
        result.skipped += [entry(name, reason) for name in seconds]
        return
    alone = statistics.median(seconds["gemm_alone"])
    for name in seconds:
        result.rows.append(
            {
                "case": case.name,
                "model": case.model,
                "devices": layer.devices,
                "operation": operation.name,
                "implementation": name,
                **compute_row(seconds, name, flops=layer.flops, peers=_COMPARED),
                "over_gemm": float(f"{statistics.median(seconds[name]) / alone:.5g}"),
                "temporary_bytes": built[name].candidate.temporary_bytes,
                **errors[name],
            }
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


def _inputs(layer: _Layer, mesh: Mesh) -> _Inputs:
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


def _operands(layer: _Layer, inputs: _Inputs) -> _Operands:
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


@dataclass(frozen=True)
class _Built:
    """A candidate, and how to read what it does.

    Attributes:
      candidate: one call of it is a program.
      errors: calls it once and compares the results with exact rows.
      seconds_of_a_call: from samples of its programs.
    """

    candidate: Candidate
    errors: Callable[[Any], dict[str, float]]
    seconds_of_a_call: Callable[[list[float]], list[float]]


def _build(name: str, layer: _Layer, mesh: Mesh, operands: _Operands) -> _Built:
    x, dy = layer.x, layer.y
    results = {"y": layer.y, "dx": layer.x, "dkernel": layer.w} if layer.operation.backward else {"y": layer.y}
    unsummed = None
    if name == "gemm_alone":
        call, unsummed = _products_alone(layer)
        x, dy = (P(), dy) if layer.operation.gathers else (x, P())
        results = {key: P(AXIS) if key == unsummed else spec for key, spec in results.items()}
    else:
        call = _collective(layer.operation, TRANSPORTS[name])

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

    def errors(exact: Any) -> dict[str, float]:
        output = program()
        if unsummed in output:
            output[unsummed] = jnp.sum(output[unsummed].astype(jnp.float32), axis=0)
        return dense._errors(output, exact)

    candidate = Candidate(
        name=name,
        call=program,
        arguments=lambda programs: [()] * programs,
        most_calls=_programs_that_fit(layer),
        temporary_bytes=temporary_bytes(compiled),
    )
    return _Built(candidate, errors, lambda samples: [sample / len(operands.xs) for sample in samples])


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


def _collective(operation: _Operation, transport: dict[str, Any]) -> _Call:
    collective = parallel.all_gather_matmul if operation.gathers else parallel.matmul_reduce_scatter
    options = {"recipe": _RECIPE, "implementation": "native"} if operation.fp8 else {}
    layer = functools.partial(collective, axis_name=AXIS, **transport, **options)
    if not operation.backward:
        return lambda x, w, dy: {"y": layer(x, w)}

    def forward_backward(x: jax.Array, w: jax.Array, dy: jax.Array) -> _Results:
        y, vjp = jax.vjp(layer, x, w)
        dx, dw = vjp(dy)
        return {"y": y, "dx": dx, "dkernel": dw}

    return forward_backward


def _products_alone(layer: _Layer) -> tuple[_Call, str | None]:
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


def _programs_that_fit(layer: _Layer) -> int:
    """Programs whose results take a quarter of what JAX may allocate, or 4 GiB where the backend does not say."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 2**34)
    size = 2 * (layer.rows * (layer.inner + layer.columns) + layer.inner * layer.columns)
    return max(1, min(1000, int(limit) // 4 // size))


# Torch, in a process for each GPU

_PATIENCE = 60.0
"""Seconds after which torch's processes are ended."""
_ENVIRONMENT = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
"""Multicast over NVLink stays off: on a shared host it can put GPUs out of service."""


def _build_torch(layer: _Layer, workers: "Workers") -> _Built:
    calls = _CALLS[jax.default_backend()]
    programs = 0
    clocked: list[float] = []

    def enqueue() -> None:
        nonlocal programs
        programs += 1

    def wait(_: Any) -> None:
        nonlocal programs
        count, programs = programs * calls, 0
        clocked.append(max(workers.ask("time", count)))

    def errors(_: Any) -> dict[str, float]:
        workers.ask("ready")
        found = workers.ask("prepare", layer, calls)
        return {name: max(each[name] for each in found) for name in found[0]}

    candidate = Candidate(name="torch", call=enqueue, arguments=lambda programs: [()] * programs, wait=wait)
    return _Built(candidate, errors, lambda samples: clocked[-len(samples) :])


class Workers:
    """A process for each device, which all do the same at the same time.

    Args:
      count: how many.
      make: (rank, count, file) → what does the work, in the process of that rank. Its methods are what `ask` names. The
        file does not exist; all ranks are given the same path, to find each other.
      patience: seconds after which a process that does not answer is taken for lost.
    """

    def __init__(self, count: int, make: Callable[[int, int, str], Any], patience: float = _PATIENCE):
        self._patience = patience
        self._folder = tempfile.TemporaryDirectory(prefix="te_jax_bench_")
        self._lost: str | None = None
        context = multiprocessing.get_context("spawn")  # a fork would inherit JAX's threads' locks
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(count):
            connection, other = context.Pipe()
            arguments = (other, make, rank, count, str(Path(self._folder.name) / "rendezvous"), patience)
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            other.close()
            self._connections.append(connection)
            self._processes.append(process)

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method in all processes, and returns what they return, by rank.

        Raises:
          RuntimeError: a process raised, ended or did not answer in time. Unless all of them raised, all are ended, and
            every later call raises too.
        """
        if self._lost is not None:
            raise RuntimeError(self._lost)
        deadline = time.monotonic() + self._patience
        answers: list[Any] = []
        for rank, connection in enumerate(self._connections):
            try:
                connection.send((method, arguments))
            except OSError:
                self._give_up(rank, "has ended", answers)
        for rank, connection in enumerate(self._connections):
            try:
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    self._give_up(rank, f"did not answer within {self._patience:g} s", answers)
                answers.append(connection.recv())
            except (EOFError, OSError):
                self._give_up(rank, "has ended", answers)
        problems = [answer for answer in answers if isinstance(answer, _Problem)]
        if problems and len(problems) < len(answers):
            self._give_up(answers.index(problems[0]), f"raised {problems[0].reason}", [])
        if problems:
            raise RuntimeError(problems[0].reason)
        return answers

    def close(self) -> None:
        """Ends all processes. They have nothing to lose, and one that waits for another would not end by itself."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(self._patience)
        for connection in self._connections:
            connection.close()
        self._folder.cleanup()
        self._lost = self._lost or "the processes were ended"

    def _give_up(self, rank: int, what: str, answers: list[Any]) -> NoReturn:
        problem = next((f"; before that: {each.reason}" for each in answers if isinstance(each, _Problem)), "")
        self._lost = f"the process for device {rank} {what}{problem}"
        self.close()
        raise RuntimeError(self._lost)


@dataclass(frozen=True)
class _Problem:
    """What a process answers when it raised."""

    reason: str


def _work(
    connection: Connection, make: Callable[[int, int, str], Any], rank: int, count: int, file: str, patience: float
) -> None:
    """Answers calls until the other side closes."""

    def answer(call: Callable[[], Any]) -> Any:
        # Should the other side be gone as well, nobody else would end a process that waits for a peer.
        faulthandler.dump_traceback_later(patience + 10, exit=True)
        try:
            return call()
        except Exception as error:
            return _Problem(reason_of(error))
        finally:
            faulthandler.cancel_dump_traceback_later()

    worker = answer(functools.partial(make, rank, count, file))
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        if isinstance(worker, _Problem):
            connection.send(worker)
        else:
            connection.send(answer(lambda method=method, arguments=arguments: getattr(worker, method)(*arguments)))


@functools.cache
def _torch_workers(count: int) -> Workers:
    """Started once: later cases ask the same processes, or learn that they are lost."""
    workers = Workers(count, TorchRank)
    atexit.register(workers.close)
    return workers


class TorchRank:
    """Torch's side of the comparison on one GPU: its part of the layer, computed by fused operations.

    Args:
      rank, count: of this process.
      file: where all of them meet.
    """

    def __init__(self, rank: int, count: int, file: str):
        os.environ.update(_ENVIRONMENT)  # read when torch is imported
        import datetime

        import torch  # pyright: ignore[reportMissingImports]
        import torch.distributed  # pyright: ignore[reportMissingImports]
        import torch.distributed._symmetric_memory  # pyright: ignore[reportMissingImports]  # defines the operations
        from torch._C._autograd import DeviceType  # pyright: ignore[reportMissingImports]
        from torch._C._distributed_c10d import _SymmetricMemory  # pyright: ignore[reportMissingImports]

        self.torch, self.rank = torch, rank
        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        if _SymmetricMemory.has_multicast_support(DeviceType.CUDA, rank):
            raise RuntimeError(f"torch means to use NVLink multicast although the environment has {_ENVIRONMENT}")
        torch.distributed.init_process_group(
            "nccl",
            store=torch.distributed.FileStore(file, count),
            rank=rank,
            world_size=count,
            timeout=datetime.timedelta(seconds=_PATIENCE),
            device_id=self.device,
        )
        self.group = torch.distributed.group.WORLD.group_name
        self.count = count
        self.calls: list[Callable[[], dict[str, Any]]] = []

    def ready(self) -> None:
        """To be asked first, so that what comes next need not wait for all of this to start."""

    def prepare(self, layer: _Layer, calls: int) -> dict[str, float]:
        """Draws operands for that many calls, and returns relative L2 errors of this device's part of the results."""
        torch, operation, devices = self.torch, layer.operation, layer.devices
        self.calls = []
        torch.cuda.empty_cache()
        rows, inner, columns = layer.rows, layer.inner, layer.columns
        if operation.gathers:
            sizes = {"x": (rows // devices, inner), "w": (inner, columns // devices), "dy": (rows, columns // devices)}
        else:
            sizes = {"x": (rows, inner // devices), "w": (inner // devices, columns), "dy": (rows // devices, columns)}
        generator = torch.Generator(self.device).manual_seed(self.rank)
        options = {"generator": generator, "device": self.device, "dtype": torch.bfloat16}
        xs = [torch.randn(sizes["x"], **options) for _ in range(calls)]
        w, dy = (torch.randn(sizes[name], **options) for name in ("w", "dy"))
        compute = self._fp8_call if operation.fp8 else self._call
        right = self._quantized(w.t().contiguous()) if operation.fp8 else w
        self.calls = [
            functools.partial(compute, operation, self._quantized(x) if operation.fp8 else x, right, dy) for x in xs
        ]
        return self._errors(operation, self.calls[-1](), xs[-1], w, dy)

    def time(self, calls: int) -> float:
        """Seconds that each of so many calls takes by this GPU's clock."""
        torch = self.torch
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.distributed.barrier()
        torch.cuda.synchronize()
        start.record()
        for number in range(calls):
            self.calls[number % len(self.calls)]()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / calls

    def _call(self, operation: _Operation, x: Any, w: Any, dy: Any) -> dict[str, Any]:
        fused = self.torch.ops.symm_mem
        if operation.gathers:
            gathered, (y,) = fused.fused_all_gather_matmul(x, [w], 0, self.group, return_A=operation.backward)
            if not operation.backward:
                return {"y": y}
            dx = fused.fused_matmul_reduce_scatter(dy, w.t(), "sum", 0, self.group)
            return {"y": y, "dx": dx, "dkernel": gathered.t() @ dy}
        y = fused.fused_matmul_reduce_scatter(x, w, "sum", 0, self.group)
        if not operation.backward:
            return {"y": y}
        gathered, (dx,) = fused.fused_all_gather_matmul(dy, [w.t()], 0, self.group, return_A=True)
        return {"y": y, "dx": dx, "dkernel": x.t() @ gathered}

    def _fp8_call(self, operation: _Operation, x: Any, w: Any, dy: Any) -> dict[str, Any]:
        del dy
        fused, out = self.torch.ops.symm_mem, self.torch.bfloat16
        (x, x_scale), (w, w_scale) = x, w
        w = w.t()  # [inner, columns] with its columns in one piece, as FP8 products want the right side
        if operation.gathers:
            _, (y,) = fused.fused_all_gather_scaled_matmul(
                x, [w], x_scale, [w_scale], 0, self.group, [None], [None], [out], [True]
            )
            return {"y": y}
        y = fused.fused_scaled_matmul_reduce_scatter(
            x,
            w,
            x_scale,
            w_scale,
            "sum",
            0,
            0,
            self.group,
            [x.shape[0], w.shape[1]],
            out_dtype=out,
            use_fast_accum=True,
        )
        return {"y": y}

    def _quantized(self, x: Any) -> tuple[Any, Any]:
        """FP8 and the scale that all devices share."""
        amax = x.abs().max().float()
        self.torch.distributed.all_reduce(amax, self.torch.distributed.ReduceOp.MAX)
        scale = 448 / amax
        return (x.float() * scale).clamp(-448, 448).to(self.torch.float8_e4m3fn), scale.reciprocal()

    def _errors(self, operation: _Operation, results: dict[str, Any], x: Any, w: Any, dy: Any) -> dict[str, float]:
        """Of rows all over the results of this device, against float64."""
        if operation.gathers:
            x = self._gathered(x)
            exact = {"y": self._own(x, w), "dx": self._scattered(dy, w.t()), "dkernel": self._own(x.t(), dy)}
        else:
            dy = self._gathered(dy)
            exact = {"y": self._scattered(x, w), "dx": self._own(dy, w.t()), "dkernel": self._own(x.t(), dy)}
        errors = {}
        for name, value in results.items():
            rows, expected = exact[name]
            difference = (value[rows].double() - expected).norm() / expected.norm()
            errors[f"{name}_error"] = float(f"{difference.item():.3g}")
        return errors

    def _gathered(self, x: Any) -> Any:
        whole = x.new_empty((x.shape[0] * self.count, x.shape[1]))
        self.torch.distributed.all_gather_into_tensor(whole, x)
        return whole

    def _rows(self, count: int) -> Any:
        return self.torch.linspace(0, count - 1, dense._CHECKED_ROWS, device=self.device).long().unique()

    def _own(self, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        """(indices, exact rows) of a product of what this device has."""
        rows = self._rows(lhs.shape[0])
        return rows, lhs[rows].double() @ rhs.double()

    def _scattered(self, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        """(indices, exact rows) of this device's part of a sum of products over all devices."""
        part = lhs.shape[0] // self.count
        rows = self._rows(part)
        indices = (self.torch.arange(self.count, device=self.device)[:, None] * part + rows).flatten()
        total = lhs[indices].double() @ rhs.double()
        self.torch.distributed.all_reduce(total)
        return rows, total.chunk(self.count)[self.rank]


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
