"""A decoder block of the Llama family over several devices, forward and backward, with overlapped communication.

The devices share the block by tensor parallelism with sequence parallelism: the residual stream and norms are split
along the sequence; query, key and value share one gather, as gate and up do; attention and MLP are split by heads and
columns, and their outputs are scattered. A call computes the block's result, and for a given cotangent the gradients of
its input and all parameters. Activations and parameters are bfloat16.

Implementations: `te_jax` (transport "auto", which is p2p for all of these products on two and four GPUs), `te_jax_ring`
and `xla` (plain collectives: nothing overlaps); `te_jax_current` and `te_jax_current_xla` have their projections in FP8
(CurrentScaling, fast accumulation), all quantization inside the clock. Attention is `ops.attention`, by cuDNN on a
GPU and by XLA on a CPU; rows say which.

TFLOP/s are those of one device, for three times the forward pass's operations, where causal attention counts the pairs
that it needs. No time is reported for results that differ from those of `xla` by more than the error bounds.

    te-jax bench transformer                                              # all implementations, on all devices
    python -m benchmarks.transformer --tp 2 --transport p2p --profile DIR # one of them, and a trace for ui.perfetto.dev
    python -m benchmarks.transformer --no-sp                              # all-reduces in place of gathers and scatters
"""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import shapes
from benchmarks.collective_matmul import too_few
from benchmarks.harness import (
    FULL,
    QUICK,
    Candidate,
    CaseResult,
    Checked,
    Family,
    Headline,
    Timing,
    compute_row,
    out_of_bounds,
    problem,
    run_operation,
    screen_table,
)
from te_jax import ops
from te_jax.parallel import all_gather_matmul, matmul_reduce_scatter
from te_jax.recipe import CurrentScaling, Recipe

OPERATION = "forward_backward"
ERROR_BOUNDS = {"y_error": 0.02, "gradient_error": 0.02}
"""Largest relative L2 differences of the result, and of any gradient, to those of `xla`."""
FP8_ERROR_BOUNDS = {"y_error": 0.08, "gradient_error": 0.5}
"""The same in FP8. The gradients of queries and keys are differences of nearly equal terms: 0.38 at 8192 tokens, with
every transport."""

AXIS = "tensor"
TransportName = Literal["auto", "p2p", "ring", "xla"]
Parameters = dict[str, jax.Array]

_FP8 = CurrentScaling(fast_accumulation=("forward", "dgrad", "wgrad"))
_NORM_EPS, _ROPE_THETA = 1e-5, 500_000.0
_CALLS = {"gpu": 4, "cpu": 1}
"""Calls that are enqueued together, so that the dispatch of a few milliseconds hides behind one call at most."""


@dataclass(frozen=True)
class Setup:
    """How devices share the block.

    Attributes:
      transport: of collective products.
      recipe: of all projections; None for bfloat16.
      sequence_parallel: whether the residual stream is split. Else all devices have all of it, nothing is gathered, and
        sums are all-reduced.
    """

    transport: TransportName = "auto"
    recipe: Recipe | None = None
    sequence_parallel: bool = True


SETUPS = {
    "te_jax": Setup("auto"),
    "te_jax_ring": Setup("ring"),
    "xla": Setup("xla"),
    "te_jax_current": Setup("auto", _FP8),
    "te_jax_current_xla": Setup("xla", _FP8),
}
PEERS = ("te_jax_ring", "te_jax_current_xla")


def run_case(case: shapes.BlockShape, implementations: Sequence[str], timing: Timing) -> CaseResult:
    """Measure one case with the named implementations; see `harness.Family.run_case`."""
    devices = jax.local_devices()
    if reason := too_few(devices) or _misfit(case, len(devices)):
        return CaseResult(skipped=[problem(case.name, "all", "all", reason)])
    result, _ = _measure(case, {name: SETUPS[name] for name in implementations}, mesh_of(devices), timing)
    return result


def mesh_of(devices: Sequence[Any]) -> Mesh:
    """The mesh of a group of devices."""
    return Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))


def _misfit(case: shapes.BlockShape, count: int) -> str | None:
    def fits(count: int) -> bool:
        return not (case.sequence % count or case.kv_heads % count or case.mlp % (16 * count))

    if fits(count):
        return None
    fitting = [size for size in range(1, count) if fits(size)]
    return (
        f"the block cannot be split over {count} devices, but over {', '.join(map(str, fitting))}: name one of these, "
        f"as in `python -m benchmarks.transformer --tp {fitting[-1]}`"
    )


def _measure(
    case: shapes.BlockShape, setups: dict[str, Setup], mesh: Mesh, timing: Timing
) -> tuple[CaseResult, dict[str, Candidate]]:
    """(rows of the setups by name, and what was measured). "xla", which all are compared with, is one of them."""
    result = CaseResult()
    candidates: dict[str, Candidate] = {}

    def build(name: str) -> Candidate:
        candidates[name] = _candidate(name, *compiled(case, setups[name], mesh))
        return candidates[name]

    def errors(name: str, output: Any, expected: Any) -> Checked:
        errors = errors_of(output, expected)
        return errors, out_of_bounds(errors, ERROR_BOUNDS if setups[name].recipe is None else FP8_ERROR_BOUNDS)

    def row(candidate: Candidate, seconds: dict[str, list[float]]) -> dict[str, Any]:
        flops, peers = _flops(case) // mesh.size, ("xla", "te_jax_current_xla")
        row = compute_row(seconds, candidate.name, flops=flops, peers=peers, over="xla")
        return row | {"attention": "cudnn" if jax.default_backend() == "gpu" else "xla"}

    run_operation(
        {"case": case.name, "model": case.model, "devices": mesh.size, "operation": OPERATION},
        list(setups),
        timing,
        result,
        build=build,
        errors=errors,
        row=row,
        references=("xla",),
    )
    return result, candidates


def _candidate(name: str, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Candidate:
    count = _CALLS[jax.default_backend()]

    def calls(*arguments: Any) -> Any:
        result = None
        for _ in range(count):
            result = call(*arguments)
        return result

    return Candidate(
        name=name,
        call=calls,
        arguments=lambda calls: [arguments] * calls,
        most_calls=4,
        seconds=lambda samples: [sample / count for sample in samples],
    )


def _flops(case: shapes.BlockShape) -> int:
    """Of all devices, forward and backward: a product has two gradients of its own size."""
    attention_width, kv_width = case.heads * case.head_dim, case.kv_heads * case.head_dim
    projections = 2 * case.sequence * case.hidden * (2 * attention_width + 2 * kv_width + 3 * case.mlp)
    pairs = case.sequence * (case.sequence + 1) // 2
    return 3 * (projections + 4 * pairs * attention_width)


def errors_of(output: Any, expected: Any) -> dict[str, float]:
    """Relative L2 differences of (y, *gradients): of the result, and the largest of all gradients."""
    y, *gradients = jax.device_get(_differences(output, expected))
    largest = np.max(jax.tree.leaves(gradients))  # NaN if any is
    return {"y_error": float(f"{y:.3g}"), "gradient_error": float(f"{largest:.3g}")}


@jax.jit
def _differences(output: Any, expected: Any) -> Any:
    def difference(one: jax.Array, other: jax.Array) -> jax.Array:
        one, other = one.astype(jnp.float32), other.astype(jnp.float32)
        return jnp.sqrt(jnp.sum((one - other) ** 2) / jnp.sum(other**2))

    return jax.tree.map(difference, output, expected)


# The block


def compiled(
    case: shapes.BlockShape, setup: Setup, mesh: Mesh, seed: int = 0
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The compiled block, and arguments for it.

    Args:
      case: its shape.
      setup: how the devices share it.
      mesh: of the devices, with one axis, `AXIS`.
      seed: of parameters, x and dy, normal values that are scaled as in a network that begins to train.

    Returns:
      (parameters, x [1, sequence, hidden], dy like x) → (y like x, gradients of parameters, gradient of x); and
      (parameters, x, dy), placed.
    """
    specs, stream = _parameter_specs(), P(None, AXIS) if setup.sequence_parallel else P()

    def forward_backward(parameters: Parameters, x: jax.Array, dy: jax.Array) -> Any:
        y, vjp = jax.vjp(functools.partial(_block, case=case, setup=setup), parameters, x)
        return y, *vjp(dy)

    mapped = jax.shard_map(
        forward_backward, mesh=mesh, in_specs=(specs, stream, stream), out_specs=(stream, specs, stream)
    )
    parameters, x, dy = _drawing(case, mesh)(jax.random.key(seed))
    x, dy = jax.device_put((x, dy), NamedSharding(mesh, stream))
    arguments = jax.block_until_ready((parameters, x, dy))
    return jax.jit(mapped).lower(*arguments).compile(), arguments


@functools.cache
def _drawing(case: shapes.BlockShape, mesh: Mesh) -> Callable[[jax.Array], tuple[Parameters, jax.Array, jax.Array]]:
    stream = P(None, AXIS)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), (_parameter_specs(), stream, stream))
    return jax.jit(functools.partial(_drawn, case), out_shardings=shardings)


def _parameter_shapes(case: shapes.BlockShape) -> dict[str, tuple[int, ...]]:
    attention_width, kv_width = case.heads * case.head_dim, case.kv_heads * case.head_dim
    return {
        "attention_norm": (case.hidden,),
        "query": (case.hidden, attention_width),
        "key": (case.hidden, kv_width),
        "value": (case.hidden, kv_width),
        "out": (attention_width, case.hidden),
        "mlp_norm": (case.hidden,),
        "gate": (case.hidden, case.mlp),
        "up": (case.hidden, case.mlp),
        "down": (case.mlp, case.hidden),
    }


def _parameter_specs() -> dict[str, P]:
    columns, rows, everywhere = P(None, AXIS), P(AXIS), P()
    return {
        "attention_norm": everywhere,
        "query": columns,
        "key": columns,
        "value": columns,
        "out": rows,
        "mlp_norm": everywhere,
        "gate": columns,
        "up": columns,
        "down": rows,
    }


def _drawn(case: shapes.BlockShape, key: jax.Array) -> tuple[Parameters, jax.Array, jax.Array]:
    sizes = _parameter_shapes(case)
    *keys, x_key, dy_key = jax.random.split(key, len(sizes) + 2)
    parameters = {}
    for (name, shape), each in zip(sizes.items(), keys, strict=True):
        normal = jax.random.normal(each, shape, jnp.bfloat16)
        is_norm = len(shape) == 1
        parameters[name] = 1 + 0.1 * normal if is_norm else normal * shape[0] ** -0.5
    stream = (1, case.sequence, case.hidden)
    x, dy = (jax.random.normal(each, stream, jnp.bfloat16) for each in (x_key, dy_key))
    return parameters, x, dy


def _block(parameters: Parameters, x: jax.Array, *, case: shapes.BlockShape, setup: Setup) -> jax.Array:
    """One device's part: x is [1, its part of the sequence, hidden], or all of it without sequence parallelism."""
    h = _rms_norm(x, parameters["attention_norm"])
    projected = _from_stream(setup, h, tuple(parameters[name] for name in ("query", "key", "value")))
    query, key, value = (each.reshape(1, case.sequence, -1, case.head_dim) for each in projected)
    query, key = _rotated(query), _rotated(key)
    implementation = "native" if jax.default_backend() == "gpu" else "reference"
    mixed = ops.attention(query, key, value, causal=True, implementation=implementation)
    x = x + _to_stream(setup, mixed.reshape(1, case.sequence, -1), parameters["out"])
    h = _rms_norm(x, parameters["mlp_norm"])
    gate, up = _from_stream(setup, h, (parameters["gate"], parameters["up"]))
    return x + _to_stream(setup, jax.nn.silu(gate) * up, parameters["down"])


def _from_stream(setup: Setup, x: jax.Array, kernels: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """x · kernel for each of them, this device's columns, for the whole sequence."""
    if setup.sequence_parallel:
        return all_gather_matmul(x, kernels, **_collective_options(setup))
    x = lax.pcast(x, AXIS, to="varying")  # whose derivative is the all-reduce
    return tuple(_dense(setup, x, kernel) for kernel in kernels)


def _to_stream(setup: Setup, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x · kernel summed over devices, for this device's part of the sequence."""
    if setup.sequence_parallel:
        return matmul_reduce_scatter(x, kernel, **_collective_options(setup))
    return lax.psum(_dense(setup, x, kernel), AXIS)


def _collective_options(setup: Setup) -> dict[str, Any]:
    return {"axis_name": AXIS, "recipe": setup.recipe, "transport": setup.transport, **_implementation(setup)}


def _dense(setup: Setup, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return ops.dense(x, kernel, recipe=setup.recipe, **_implementation(setup))


def _implementation(setup: Setup) -> dict[str, Any]:
    # Never None with FP8: where the kernels are not loaded that would publish the reference under their name.
    return {} if setup.recipe is None else {"implementation": "native"}


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    normal = x32 * lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + _NORM_EPS)
    return (normal * scale.astype(jnp.float32)[None, None]).astype(x.dtype)


def _rotated(x: jax.Array) -> jax.Array:
    """Turns pairs (i, i + head_dim / 2) of x [1, sequence, heads, head_dim] by the angle of their position."""
    _, sequence, _, head_dim = x.shape
    frequencies = _ROPE_THETA ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = jnp.outer(jnp.arange(sequence, dtype=jnp.float32), frequencies)[None, :, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


FAMILY = Family(
    description="a decoder block over several devices, forward and backward, by transport and precision",
    cases={"gpu": shapes.BLOCK_GPU, "cpu": shapes.BLOCK_CPU},
    implementations=tuple(SETUPS),
    peers=PEERS,
    run_case=run_case,
    headline=Headline(
        operation=OPERATION,
        figure="time_over_xla",
        label="Decoder block with gradients, time as a multiple of that with plain collectives in bfloat16",
        implementations=("te_jax", "te_jax_ring", "te_jax_current", "te_jax_current_xla"),
    ),
)


# One setup, chosen by hand


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one setup against `xla`, and trace it if asked to. Returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if not args.sp:
        if args.transport in ("p2p", "ring"):
            parser.error(
                f"--transport is {args.transport}, and --no-sp leaves only all-reduces, which are XLA's: leave one of "
                "them out"
            )
        args.transport = "xla"
    devices = jax.local_devices()
    count = len(devices) if args.tp is None else args.tp
    platform = devices[0].platform
    (default, *_) = shapes.BLOCK_GPU if platform == "gpu" else shapes.BLOCK_CPU
    case = next((case for case in (*shapes.BLOCK_GPU, *shapes.BLOCK_CPU) if case.name == args.case), default)
    if not 1 <= count <= len(devices):
        flag = "; set XLA_FLAGS=--xla_force_host_platform_device_count to have more" if platform == "cpu" else ""
        parser.error(f"--tp is {args.tp}; it must be 1 to {len(devices)}, the devices here{flag}")
    if reason := _misfit(case, count):
        parser.error(f"--tp is {count}: {reason}")

    setup = Setup(args.transport, _FP8 if args.recipe == "current" else None, args.sp)
    name = _name_of(setup)
    setups = {name: setup, "xla": SETUPS["xla"]}
    result, candidates = _measure(case, setups, mesh_of(devices[:count]), QUICK if args.quick else FULL)
    print(f"transformer on {count} × {devices[0].device_kind}: {_described(args)}")
    print(screen_table(result.rows))
    for each in (*result.skipped, *result.wrong):
        print(f"  {each['implementation']}: not measured, {each['reason']}")
    measured = name in {row["implementation"] for row in result.rows}
    if measured and args.profile is not None:
        print(f"Perfetto trace: {_traced(candidates[name], args.profile)}")
    return 0 if measured and not result.wrong else 1


def _name_of(setup: Setup) -> str:
    """Of a row: that of `SETUPS`, or else one like those."""
    for name, each in SETUPS.items():
        if each == setup:
            return name
    precision = [] if setup.recipe is None else ["current"]
    return "_".join(["te_jax", *precision, setup.transport if setup.sequence_parallel else "no_sp"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transformer", description="Measure a decoder block over several devices against xla."
    )
    parser.add_argument("--case", choices=[case.name for case in (*shapes.BLOCK_GPU, *shapes.BLOCK_CPU)])
    parser.add_argument("--tp", type=int, metavar="N", help="number of devices that share the block (default: all)")
    parser.add_argument(
        "--sp",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="split the residual stream along the sequence; without it there are XLA's all-reduces alone",
    )
    parser.add_argument("--transport", choices=("auto", "p2p", "ring", "xla"), default="auto")
    parser.add_argument("--recipe", choices=("none", "current"), default="none", help="FP8 scaling of projections")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="write a Perfetto trace of a few calls under DIR")
    parser.add_argument("--quick", action="store_true", help="few, short samples")
    return parser


def _described(args: argparse.Namespace) -> str:
    precision = "bfloat16" if args.recipe == "none" else "FP8, current scaling"
    sequence = "with" if args.sp else "without"
    return f"transport {args.transport}, {precision}, {sequence} sequence parallelism"


def _traced(candidate: Candidate, folder: Path) -> Path:
    """Traces a few calls, and returns the file that Perfetto opens."""
    (arguments,) = candidate.arguments(1)
    with jax.profiler.trace(str(folder), create_perfetto_trace=True):
        candidate.wait(candidate.call(*arguments))
    return max(folder.rglob("perfetto_trace.json.gz"), key=lambda path: path.stat().st_mtime)


if __name__ == "__main__":
    sys.exit(main())
