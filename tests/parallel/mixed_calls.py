"""Mixed collective calls in random groups, shapes and protocols, under skew, on poisoned memory; all bytes are checked.

    python tests/parallel/mixed_calls.py [CALLS [SEED]]    # 10 000 by default; on GPUs, or on simulated CPU devices

test_p2p.py runs a few. Each program scans over rounds of a gather and a scatter for each of a few groups, on some
mesh of all devices in some order. Values are small whole numbers, so that every sum is exact in bfloat16's products
and float32. Before each call a device may work for a random time, and fills memory of the size of the next results
with NaN.
"""

import itertools
import math
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from te_jax.ops.linear.codec import Codec
from te_jax.parallel import P2P
from te_jax.parallel._collective.call import CollectiveSpec
from te_jax.parallel.transports import p2p
from te_jax.parallel.transports.exchange import GemmOperand

ROUNDS, RUNS = 60, 2  # of a program
NAMES = ("a", "b", "c")


def factorizations(count: int) -> list[tuple[int, ...]]:
    """Shapes of a mesh, of at most three axes of two devices and more each."""
    return [
        shape
        for axes in (1, 2, 3)
        for shape in itertools.product(range(2, count + 1), repeat=axes)
        if math.prod(shape) == count
    ]


def spec_of(axes: tuple[str, ...], mesh: Any, protocol: Any = None, timeout: float = 20.0) -> CollectiveSpec:
    return CollectiveSpec(
        gathers=True,
        axis_name=axes,
        size=math.prod(mesh.shape[axis] for axis in axes),
        leading=1,
        rows=1,
        x_dtype=np.dtype(np.float32),
        out_dtype=np.dtype(np.float32),
        codec=Codec(name="test", implementation="native"),
        transport=P2P(timeout, protocol),
    )


def values_of(spec: CollectiveSpec, mesh: Mesh, all_x: jax.Array) -> list[jax.Array]:
    """What each member of this device's group puts in, without XLA's collectives: on CPUs they may block each other."""
    strides = dict(zip(mesh.axis_names, np.cumprod([1, *mesh.devices.shape[:0:-1]])[::-1].tolist(), strict=True))
    base = sum(lax.axis_index(name) * stride for name, stride in strides.items() if name not in spec.axis_name)
    values = []
    for rank, place in enumerate(np.ndindex(*(mesh.shape[axis] for axis in spec.axis_name))):
        offset = sum(index * strides[axis] for index, axis in zip(place, spec.axis_name, strict=True))
        values.append((lax.dynamic_index_in_dim(all_x, base + offset, keepdims=False) + rank).astype(jnp.bfloat16))
    return values


def wrong_values(spec: CollectiveSpec, mesh: Mesh, all_x: jax.Array, work: jax.Array) -> jax.Array:
    """How many results of a gather, and of a scatter of what it gathered, are not what they should be."""
    _, pieces, rows, summed = all_x.shape
    spent = lax.fori_loop(0, work, lambda _, a: jnp.sin(a) * 1.0001, jnp.ones((256,)))
    poison = jnp.full((pieces, rows * spec.size, summed), jnp.where(work < 0, 0.0, jnp.nan))
    all_x = all_x + jnp.where(jnp.sum(spent) > 1e30, 1.0, 0.0)
    members = values_of(spec, mesh, all_x)
    x = lax.dynamic_index_in_dim(jnp.stack(members), lax.axis_index(spec.axis_name), keepdims=False)
    x, poison = lax.optimization_barrier((x, poison))
    eye = GemmOperand(jnp.eye(summed, dtype=jnp.bfloat16), summed_first=True)
    (y,), gathered, (extras,) = p2p.all_gather_gemm(spec, GemmOperand(x), (eye,), (None,), (x[0, :1] * 2,), True)
    wrong = jnp.sum(gathered != jnp.concatenate(members, axis=1)) + jnp.sum(y != gathered.astype(jnp.float32))
    wrong += jnp.sum(extras != jnp.stack([member[0, :1] * 2 for member in members]))
    blocks = GemmOperand(gathered.reshape(pieces, spec.size, rows, summed))
    z = p2p.gemm_reduce_scatter(spec, (blocks,), (eye,), None)
    return wrong + jnp.sum(z != x.astype(jnp.float32) * spec.size) + jnp.sum(~jnp.isnan(poison))


def run_program(rng: np.random.Generator, rounds: int = ROUNDS, most_rows: int = 512) -> int:
    """Compiles one program, runs it, and returns the number of its calls; fails with AssertionError."""
    devices = jax.devices()
    shapes = factorizations(len(devices))
    shape = shapes[rng.integers(len(shapes))]
    names = NAMES[: len(shape)]
    mesh = Mesh(rng.permutation(np.array(devices)).reshape(shape), names)
    groups = [axes for count in range(1, len(names) + 1) for axes in itertools.permutations(names, count)]
    plan = [(groups[rng.integers(len(groups))], ("get", "put")[rng.integers(2)]) for _ in range(rng.integers(2, 7))]
    pieces, rows, summed = int(rng.integers(1, 3)), int(rng.choice([1, 8, 64, 200, 512])), int(rng.choice([8, 64, 256]))
    rows = min(rows, most_rows)
    x = rng.integers(-8, 9, (len(devices), pieces, rows, summed)).astype(np.float32)
    late = rng.random((rounds, len(devices))) < 0.4
    works = (rng.integers(0, 3000, late.shape) * late).astype(np.int32)

    def local(x: jax.Array, works: jax.Array) -> jax.Array:
        def step(x: jax.Array, work: jax.Array) -> tuple[jax.Array, jax.Array]:
            wrong = [wrong_values(spec_of(axes, mesh, protocol), mesh, x, work[0]) for axes, protocol in plan]
            return jnp.mod(x * 3 + 1, 11.0) - 5.0, jnp.stack(wrong)

        return lax.scan(step, x, works)[1][None]

    specs = (P(), P(None, names))
    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(names), check_vma=False))
    for _ in range(RUNS):
        found = np.asarray(mapped(x, works))
        where = [f"device {device}, round {step}, call {call}" for device, step, call in np.argwhere(found)[:5]]
        assert not where, f"wrong values: {where}, mesh {mesh.shape}, groups {plan}, {pieces} × {rows} × {summed}"
    return 2 * RUNS * rounds * len(plan)


def main(calls: int = 10_000, seed: int = 0) -> None:
    rng = np.random.default_rng(seed or time.time_ns())
    done = programs = 0
    begin = time.monotonic()
    while done < calls:
        done += run_program(rng)
        programs += 1
    print(f"{done} calls in {programs} programs, {time.monotonic() - begin:.0f} s: all values as they should be")


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:3]))
