"""One of several processes with a device each: worker.py RANK PROCESSES PORT [leave]. Prints "fine" at its end.

With "leave" the last process ends without taking part in the last call.
"""

import os
import sys

rank, processes, port = (int(text) for text in sys.argv[1:4])
leave = sys.argv[4:] == ["leave"]
gpu = os.environ.get("JAX_PLATFORMS", "").startswith("cuda")

import jax  # noqa: E402

jax.config.update("jax_default_matmul_precision", "highest")
if not gpu:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(
    f"localhost:{port}", processes, rank, local_device_ids=[rank] if gpu else None, initialization_timeout=60
)

import functools  # noqa: E402

import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from te_jax.parallel import _processes, all_gather_matmul, matmul_reduce_scatter  # noqa: E402
from te_jax.testing import assert_close  # noqa: E402


def placed(mesh, spec, value):
    return jax.make_array_from_callback(value.shape, NamedSharding(mesh, spec), lambda index: value[index])


def local_part(value, expected, tolerance=1e-5):
    for shard in value.addressable_shards:
        assert_close(np.asarray(shard.data), expected[shard.index], tolerance=tolerance, dtype=np.float32)


mesh = Mesh(np.array(jax.devices()), ("t",))
rng = np.random.default_rng(0)  # the same in all
options = {"axis_name": "t", "transport": "p2p", "timeout": 10.0}
gathers = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("t"), P(None, "t")), out_specs=P(None, "t"))
scatters = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(None, "t"), P("t")), out_specs=P("t"))


def layer(x, w):
    return all_gather_matmul(x, w, **options)


def inverse(y, w):
    return matmul_reduce_scatter(y, w, **options)


def loss(x, w, v):
    y = gathers(layer)(x, w)
    return (scatters(inverse)(y, v) ** 2).sum()


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
    (sizes,) = _processes._sizes.values()
    shared.append(len(sizes))
assert shared[0] == shared[1] < shared[2] == shared[3], shared

many = jax.jit(lambda x, w: jax.lax.scan(lambda c, _: (step(c, w), None), x, None, length=300)[0])


def step(x, w):
    return jax.numpy.tanh(scatters(inverse)(gathers(layer)(x, w), w.T))


w = w / np.float32(np.linalg.norm(w, 2))
found = many(gx, placed(mesh, P(None, "t"), w))
expected = x.astype(np.float64)
for _ in range(300):
    expected = np.tanh(expected @ w @ w.T)
local_part(found, expected, 1e-3)

if leave:
    if rank == processes - 1:
        print("left", flush=True)
        os._exit(0)
    options["timeout"] = 2.0
    try:
        jax.block_until_ready(jax.jit(gathers(lambda x, w: layer(2 * x, w)))(gx, gw))
    except Exception as error:
        text = str(error)
        assert f"for device 0 of process {processes - 1}, which did not come" in text, text
        print("fine", flush=True)
        os._exit(0)
    raise SystemExit("nobody missed the process that left")
print("fine", flush=True)
jax.distributed.shutdown()
