"""One of several processes: worker.py RANK PROCESSES PORT [TASK]. Prints "fine" at its end.

At the end all gather other numbers of rows than the first. With "leave" the last process is killed while it shares
memory, without taking part in the last call; with "late" it comes too late for one, and all
go on as if nothing had happened; with "groups" each process has two devices, in groups of its own and with others; with
"alone" the first and the last process at first lower without the others; with "fails" the last one at first cannot
share memory; with "again" they form another job after the first one, in another order; with "weights" several of them
share a gather, and the gradient of what is gathered is a sum.
"""

import os
import sys

rank, processes, port = (int(text) for text in sys.argv[1:4])
task = "".join(sys.argv[4:])
gpu = os.environ.get("JAX_PLATFORMS", "").startswith("cuda")
gpus = int(os.environ.get("TE_JAX_TEST_GPUS", processes))  # fewer than processes: these take turns on them

import jax  # noqa: E402

jax.config.update("jax_default_matmul_precision", "highest")
if not gpu:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(
    f"localhost:{port}", processes, rank, local_device_ids=[rank % gpus] if gpu else None, initialization_timeout=60
)

import dataclasses  # noqa: E402
import functools  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import time  # noqa: E402
import types  # noqa: E402

import jax.extend.backend  # noqa: E402
import numpy as np  # noqa: E402
from jax._src import distributed  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from te_jax import native, ops  # noqa: E402
from te_jax.parallel import P2P, all_gather_matmul, matmul_reduce_scatter  # noqa: E402
from te_jax.parallel.transports import processes as transport_processes  # noqa: E402
from te_jax.recipe import BlockScaling, CurrentScaling  # noqa: E402
from te_jax.testing import assert_close  # noqa: E402


def placed(mesh, spec, value):
    return jax.make_array_from_callback(value.shape, NamedSharding(mesh, spec), lambda index: value[index])


def local_part(value, expected, tolerance=1e-5, dtype=np.float32):
    for shard in value.addressable_shards:
        assert_close(np.asarray(shard.data), expected[shard.index], tolerance=tolerance, dtype=dtype)


mesh = Mesh(np.array(jax.devices()), ("t",))
rng = np.random.default_rng(0)  # the same in all
options = {"axis_name": "t", "transport": P2P(timeout=10.0)}
gathers = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("t"), P(None, "t")), out_specs=P(None, "t"))
scatters = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(None, "t"), P("t")), out_specs=P("t"))


def layer(x, w):
    return all_gather_matmul(x, w, **options)


def inverse(y, w):
    return matmul_reduce_scatter(y, w, **options)


def loss(x, w, v):
    y = gathers(layer)(x, w)
    return (scatters(inverse)(y, v) ** 2).sum()


def run_in_groups(devices, names, axis, rows):
    """A gather along one axis of a mesh, or all of it. Each group works on numbers of its own."""
    mesh = Mesh(devices, names)
    outer = tuple(name for name in names if name not in axis)
    x = rng.standard_normal((len(devices.reshape(-1)) // mesh.shape["t"], rows, 8)).astype(np.float32)
    w = rng.standard_normal((8, 8)).astype(np.float32)
    if len(axis) > 1:
        x = x[:1]
    specs = P(outer, axis), P(None, axis)
    layer = functools.partial(all_gather_matmul, **{**options, "axis_name": axis})
    mapped = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=P(outer, None, axis))
    local_part(jax.jit(mapped)(placed(mesh, specs[0], x), placed(mesh, specs[1], w)), x.astype(np.float64) @ w)


def sum_of_products(x, weights, dys, recipe):
    ys = all_gather_matmul(x, weights, recipe=recipe, **options)
    return sum((dy * y).sum() for dy, y in zip(dys, ys, strict=True)).astype(np.float32)


if task == "weights":
    late = np.random.default_rng(rank)  # another one in each
    for dtype, recipe, tolerance in (
        (np.float32, None, 1e-5),
        (jax.numpy.bfloat16, None, 6e-3),
        (np.float32, BlockScaling(), 0.06),
    ):

        def gradients(x, weights, dys, recipe=recipe):
            return jax.grad(functools.partial(sum_of_products, recipe=recipe), argnums=(0, 1))(x, weights, dys)

        rows, columns, results = P(None, "t"), P(None, "t"), P(None, None, "t")
        mapped = jax.jit(
            jax.shard_map(gradients, mesh=mesh, in_specs=(rows, columns, results), out_specs=(rows, columns))
        )
        for _ in range(10):  # other numbers, and other delays
            x = rng.standard_normal((2, 128 * processes, 128)).astype(dtype)
            weights = [rng.standard_normal((128, n * processes)).astype(dtype) for n in (256, 128, 128)]
            dys = [rng.standard_normal((*x.shape[:2], w.shape[1])).astype(dtype) for w in weights]
            gx, *others = (
                placed(mesh, rows, x),
                *(tuple(placed(mesh, spec, v) for v in vs) for spec, vs in ((columns, weights), (results, dys))),
            )
            time.sleep(late.uniform(0, 5e-3))
            dx, dws = mapped(gx, *others)
            x, weights, dys = jax.tree.map(lambda v: v.astype(np.float64), (x, weights, dys))
            local_part(dx, sum(dy @ w.T for dy, w in zip(dys, weights, strict=True)), tolerance, dtype)
            for dw, dy in zip(dws, dys, strict=True):
                local_part(dw, np.einsum("ask,asn->kn", x, dy), tolerance, dtype)

    # One scale for all of x, which is known before: XLA cannot find it together where processes share a GPU.
    x, w = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((2, 64 * processes, 128), (128, 64 * processes))
    )
    current = CurrentScaling()
    qx = ops.quantize(x, current.quantization("activation")).without_transposed()
    qw = ops.quantize(w, current.quantization("kernel"), row_ndim=1).without_data()
    spec_x = dataclasses.replace(qx, data=P(None, "t"), scale_inv=P())
    spec_w = dataclasses.replace(qw, transposed=P("t"), transposed_scale_inv=P())
    mapped = jax.shard_map(
        functools.partial(all_gather_matmul, recipe=current, **options),
        mesh=mesh, in_specs=(spec_x, spec_w), out_specs=P(None, None, "t"),
    )  # fmt: skip
    operands = tuple(
        jax.tree.map(lambda value, spec: placed(mesh, spec, np.asarray(value)), value, spec)
        for value, spec in ((qx, spec_x), (qw, spec_w))
    )
    assert 'algorithm = "cublaslt"' in jax.jit(mapped).lower(*operands).as_text()  # the same in all processes
    local_part(jax.jit(mapped)(*operands), x.astype(np.float64) @ w, 0.06)
    print("fine", flush=True)
    jax.distributed.shutdown()
    raise SystemExit

if task == "groups":
    grid = np.array(jax.devices()).reshape(processes, 2)  # a row for each process
    run_in_groups(grid, ("d", "t"), ("t",), 16)
    assert not transport_processes._sizes  # within a process nothing is shared
    run_in_groups(grid.T, ("d", "t"), ("t",), 16)
    run_in_groups(grid[:, :1].T, ("d", "t"), ("t",), 64)  # more, for the first devices alone
    run_in_groups(grid.T, ("d", "t"), ("t",), 32)  # enough for these, too little for the second ones
    run_in_groups(np.stack([grid[0], grid[1][::-1]], axis=1), ("d", "t"), ("t",), 16)  # in other pairs
    run_in_groups(grid, ("d", "t"), ("d", "t"), 16)
    assert all(len({place >> 16 for place in group}) > 1 for group in transport_processes._sizes)
    print("fine", flush=True)
    jax.distributed.shutdown()
    raise SystemExit

if task in ("alone", "fails"):
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((4 * processes, 12), (12, 8 * processes)))
    gx, gw = placed(mesh, P("t"), x), placed(mesh, P(None, "t"), w)
    step, last = jax.jit(gathers(layer)), processes - 1

    def error_of_lowering():
        try:
            step.lower(gx, gw)
        except RuntimeError as error:
            return str(error)
        raise SystemExit("the program was lowered")

    def wait_for_all(name):
        distributed.global_state.client.wait_at_barrier(name, 60_000)

    if task == "alone":
        ensure = transport_processes.ensure
        transport_processes.ensure = lambda groups, count, platform, *_: ensure(groups, count, platform, 1.0)
        for turn in (0, last):
            if rank == turn:
                text = error_of_lowering()
                others = ", ".join(f"device 0 of process {other}" for other in range(processes) if other != rank)
                assert text.startswith(f"transport='p2p' waited 1 s for {others} to share memory"), text
            wait_for_all(f"after {turn}")
        transport_processes.ensure = ensure
    else:
        module = native.extension_module(jax.default_backend())
        for name in ("create_segment", "join_segments"):
            if rank == last:
                spoilt = types.SimpleNamespace(**{each: getattr(module, each) for each in dir(module)})
                setattr(spoilt, name, lambda *_, name=name: (_ for _ in ()).throw(RuntimeError(f"no {name} here")))
                native.extension_module = lambda _, spoilt=spoilt: spoilt
            text = error_of_lowering()
            told = "('ring' and 'xla' need none): " if rank == last else f"device 0 of process {last} failed: "
            assert text.startswith("transport='p2p' cannot share memory between device 0 of process 0, "), text
            assert f"{told}no {name} here" in text, text
            wait_for_all(f"after {name}")
        native.extension_module = lambda _: module
    local_part(step(gx, gw), x.astype(np.float64) @ w)
    print("fine", flush=True)
    jax.distributed.shutdown()
    raise SystemExit

if task == "again":
    for turn in range(2):
        x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((4 * processes, 12), (12, 8 * processes)))
        y = jax.jit(gathers(layer))(placed(mesh, P("t"), x), placed(mesh, P(None, "t"), w))
        local_part(y, x.astype(np.float64) @ w)
        if turn == 0:
            store = distributed.global_state.client
            if rank == processes - 1:  # the first of the next one
                with socket.socket() as free:
                    free.bind(("localhost", 0))
                    store.key_value_set("port", str(free.getsockname()[1]))
            port = store.blocking_key_value_get("port", 60_000)
            jax.distributed.shutdown()
            jax.extend.backend.clear_backends()
            local = [rank % gpus] if gpu else None
            jax.distributed.initialize(f"localhost:{port}", processes, processes - 1 - rank, local_device_ids=local)
            mesh = Mesh(np.array(jax.devices()), ("t",))
            gathers.keywords["mesh"] = mesh
    print("fine", flush=True)
    jax.distributed.shutdown()
    raise SystemExit

shared = []
for rows in (8, 8, 40, 16):  # the third call needs more shared memory, and the last one nothing new
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, 12), (12, 8 * processes)))
    v = rng.standard_normal((8 * processes, 5)).astype(np.float32)
    gx, gw, gv = placed(mesh, P("t"), x), placed(mesh, P(None, "t"), w), placed(mesh, P("t"), v)
    y = jax.jit(gathers(layer))(gx, gw)
    local_part(y, x.astype(np.float64) @ w)
    z = jax.jit(scatters(inverse))(y, gv)
    local_part(z, x.astype(np.float64) @ w @ v)
    dx, dw, dv = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(gx, gw, gv)
    g = 2 * (x.astype(np.float64) @ w @ v)
    local_part(dx, g @ v.T @ w.T)
    local_part(dw, x.T.astype(np.float64) @ g @ v.T)
    local_part(dv, (x.astype(np.float64) @ w).T @ g)
    (sizes,) = transport_processes._sizes.values()
    shared.append(len(sizes))
assert shared[0] == shared[1] < shared[2] == shared[3], shared
if processes == 4:  # groups that this process is in, and others
    run_in_groups(np.array(jax.devices()).reshape(2, 2), ("d", "t"), ("t",), 16)
    assert all(rank << 16 in group for group in transport_processes._sizes)

many = jax.jit(lambda x, w: jax.lax.scan(lambda c, _: (step(c, w), None), x, None, length=300)[0])


def step(x, w):
    return jax.numpy.tanh(scatters(inverse)(gathers(layer)(x, w), w.T))


w = w / np.float32(np.linalg.norm(w, 2))
found = many(gx, placed(mesh, P(None, "t"), w))
expected = x.astype(np.float64)
for _ in range(300):
    expected = np.tanh(expected @ w @ w.T)
local_part(found, expected, 1e-3)

if task == "leave":
    options["transport"] = P2P(timeout=2.0)
    last = jax.jit(gathers(lambda x, w: layer(2 * x, w))).lower(gx, gw).compile()  # processes compile together on GPUs
    larger = jax.jit(gathers(layer)).trace(
        *(jax.ShapeDtypeStruct(shape, np.float32) for shape in ((4096, 12), (12, 8 * processes)))
    )
    if rank == processes - 1:
        print("left", flush=True)
        transport_processes._join = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        larger.lower()
    text = ""
    try:
        jax.block_until_ready(last(gx, gw))
    except Exception as error:
        text = str(error)
    assert f"for device 0 of process {processes - 1}, which did not come" in text, text
    try:
        larger.lower()
    except RuntimeError as error:
        text = str(error)
    assert f"the process of device 0 of process {processes - 1} has ended" in text, text
    print("fine", flush=True)
    os._exit(0)

if task == "late":
    options["transport"] = P2P(timeout=1.0)
    step = jax.jit(gathers(layer)).lower(gx, gw).compile()
    if rank == processes - 1:
        time.sleep(2.5)
    found = []
    for _ in range(3):  # nobody may take what a peer has left from another step for that of this one
        try:
            jax.block_until_ready(step(gx, gw))
        except Exception as error:
            found.append(str(error))
    assert len(found) == 3, found
    assert "which did not come" in found[0] or "cannot run: another call of this group failed" in found[0], found
    assert all("cannot run: another call of this group failed" in text for text in found[1:]), found

if not task and not gpu:  # which compile together on GPUs
    x = np.ones(((3 if rank == 0 else 4) * processes, 12), np.float32)
    step, gx, gw = (
        jax.jit(gathers(layer)),
        placed(mesh, P("t"), x),
        placed(mesh, P(None, "t"), np.ones((12, processes), np.float32)),
    )
    text = ""
    for told in ("device 0 brings pieces of 144 bytes, and device 0 of process 1 brings pieces of 192", "cannot run"):
        try:
            jax.block_until_ready(step(gx, gw))
        except jax.errors.JaxRuntimeError as problem:
            text = str(problem)
        assert told in text, text
print("fine", flush=True)
jax.distributed.shutdown()
