"""Collective matmul with one process for each GPU: transports p2p and xla in turns, in the same processes.

    python -m benchmarks.collective_processes                  # 2 processes, the first 2 GPUs
    python -m benchmarks.collective_processes --processes 4 --cases 8192x8192x28672,1024x8192x28672
    python -m benchmarks.collective_processes --platform cpu   # to try it without GPUs

The layers and their programs of a few dependent calls are those of `benchmarks.collective_matmul`. A sample runs 8
programs and then 1, and takes the difference, which cancels the cost of launching and synchronising. Printed are µs of
one call, median and range of the slowest process, and the factor of p2p over xla:
`_SHORTEST_PRODUCT_OF_SEVERAL_PROCESSES` of te_jax/parallel/transports/p2p.py follows from the shortest case in which
p2p wins.
"""

import argparse
import functools
import socket
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from benchmarks import shapes
from benchmarks.collective_layers import AXIS, Layer, Operation
from benchmarks.workers import Workers

TRANSPORTS = ("te_jax_p2p", "xla")
PROGRAMS = 8
PATIENCE = 900.0


class Process:
    """One of the processes, with one device."""

    def __init__(self, port: int, platform: str, rank: int, count: int, _: str):
        jax.config.update("jax_platforms", "cuda" if platform == "gpu" else "cpu")
        if platform == "cpu":
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        device = [rank] if platform == "gpu" else None
        jax.distributed.initialize(f"localhost:{port}", count, rank, local_device_ids=device)
        self._mesh = Mesh(np.array(jax.devices()), (AXIS,), axis_types=(AxisType.Auto,))

    def measure(self, case: shapes.TensorParallelShape, gathers: bool, samples: int) -> dict[str, Any]:
        """Seconds of a call by transport, and how far p2p's results are from those of xla."""
        layer = Layer.of(Operation(gathers), case, self._mesh.size)
        programs = {name: _Program(layer, name, self._mesh) for name in TRANSPORTS}
        y, exact = (programs[name].run(1)["y"] for name in TRANSPORTS)
        seconds: dict[str, list[float]] = {name: [] for name in TRANSPORTS}
        for sample in range(samples + 1):
            for name in TRANSPORTS if sample % 2 else TRANSPORTS[::-1]:
                seconds[name].append(programs[name].seconds_of_a_call())
        return {"difference": float(_difference(y, exact)), **{name: each[1:] for name, each in seconds.items()}}


class _Program:
    """A compiled program of a few calls, and the arrays that it writes to."""

    def __init__(self, layer: Layer, name: str, mesh: Mesh):
        from benchmarks import collective_matmul as family

        inputs = family._inputs(layer, mesh)  # the same values, in arrays of its own
        self._xs, self._w, self._calls = inputs.xs, inputs.w, len(inputs.xs)
        specs = (layer.x,) * self._calls
        mapped = jax.shard_map(
            family._chained(family._collective(layer, family.TRANSPORTS[name])),
            mesh=mesh, in_specs=(specs, None, layer.w), out_specs=(specs, None, {"y": layer.y}),
        )  # fmt: skip
        self._compiled = jax.jit(mapped, donate_argnums=0).lower(self._xs, None, self._w).compile()

    def run(self, programs: int) -> dict[str, jax.Array]:
        results: dict[str, jax.Array] = {}
        for _ in range(programs):
            self._xs, _, results = self._compiled(self._xs, None, self._w)
        return jax.block_until_ready(results)

    def seconds_of_a_call(self) -> float:
        seconds = []
        for programs in (1, PROGRAMS):
            begin = time.perf_counter()
            self.run(programs)
            seconds.append(time.perf_counter() - begin)
        return (seconds[1] - seconds[0]) / (PROGRAMS - 1) / self._calls


@jax.jit
def _difference(y: jax.Array, exact: jax.Array) -> jax.Array:
    y, exact = y.astype(jnp.float32), exact.astype(jnp.float32)
    return jnp.linalg.norm(y - exact) / jnp.linalg.norm(exact)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--cases", help="names, with commas between them; all that fit the devices, if not given")
    parser.add_argument("--samples", type=int, default=10)
    options = parser.parse_args()
    cases = shapes.TENSOR_PARALLEL_GPU if options.platform == "gpu" else shapes.TENSOR_PARALLEL_CPU
    names = options.cases.split(",") if options.cases else [case.name for case in cases]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    workers = Workers(options.processes, functools.partial(Process, port, options.platform), PATIENCE)
    print(f"{'case':24} {'operation':22} {'p2p µs':>24} {'xla µs':>24} {'p2p/xla':>8} {'difference':>10}", flush=True)
    try:
        for case in cases:
            if case.name not in names or (case.tensor_parallel or np.inf) <= options.processes:
                continue
            for gathers in (True, False):
                found = workers.ask("measure", case, gathers, options.samples)
                times = {name: list(map(max, zip(*(each[name] for each in found), strict=True))) for name in TRANSPORTS}
                p2p, xla = (statistics.median(times[name]) for name in TRANSPORTS)
                texts = (
                    f"{statistics.median(t) * 1e6:.0f} ({min(t) * 1e6:.0f} – {max(t) * 1e6:.0f})"
                    for t in times.values()
                )
                cells = " ".join(f"{text:>24}" for text in texts)
                operation = Operation(gathers).name
                print(
                    f"{case.name:24} {operation:22} {cells} {p2p / xla:8.2f} {found[0]['difference']:10.1e}", flush=True
                )
    finally:
        workers.close()


if __name__ == "__main__":
    main()
