"""The custom call: its protocols, who takes part, and what happens when somebody does not."""

import dataclasses
import functools
import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mixed_calls import run_program, spec_of

from te_jax import native
from te_jax.parallel import P2P, all_gather_matmul, matmul_reduce_scatter
from te_jax.parallel.transports import p2p
from te_jax.parallel.transports.exchange import GemmOperand
from te_jax.quantized import facts_of
from te_jax.recipe import BlockScaling, CurrentScaling, RowwiseScaling
from te_jax.testing import assert_close

pytestmark = pytest.mark.skipif(not native.available(), reason="needs te_jax's extension")

F32 = np.dtype(np.float32)
GATHERS = ("get", "put")
PLAIN = (("float32", "none", 1e-5), ("bfloat16", "none", 6e-3), ("float16", "none", 1e-3))
FP8 = (CurrentScaling(), RowwiseScaling(), BlockScaling())


def mesh_of(shape, names, rng=None):
    """A mesh whose devices are in random order, with a generator of numbers. Skips the test where there are fewer."""
    if jax.device_count() < np.prod(shape):
        pytest.skip(f"needs {np.prod(shape)} devices, and there are {jax.device_count()}")
    devices = np.array(jax.devices())
    if rng is not None:
        devices = rng.permutation(devices)
    return Mesh(devices[: np.prod(shape)].reshape(shape), names)


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def gather_over(mesh, transport="p2p", *, axis_names=frozenset(), **options):
    """all_gather_matmul of whole operands along the axis "t"."""
    layer = functools.partial(all_gather_matmul, axis_name="t", transport=transport, **options)
    specs = P("t"), P(None, "t")
    return jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=specs[1], axis_names=axis_names)


# Everything is [groups, ...] outside, so that each group works on numbers of its own.
def gathering(mesh, axes, protocol, *, timeout=20.0):
    groups = tuple(axis for axis in mesh.axis_names if axis not in axes) or None
    spec = spec_of(axes, mesh, protocol, timeout)

    def local(x, w, v, other):
        weights = (GemmOperand(w[0], summed_first=True), GemmOperand(v[0], summed_first=True))
        (y, z), gathered, (others,) = p2p.all_gather_gemm(
            spec, GemmOperand(x[0]), weights, (None, None), (other[0],), True
        )
        return y[None], z[None], gathered[None], others[None]

    specs = P(groups, None, axes), P(groups, None, axes), P(groups, None, axes), P(groups, axes)
    out_specs = P(groups, None, None, axes), P(groups, None, None, axes), P(groups), P(groups)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False))


def scattering(mesh, axes, *, timeout=20.0):
    groups = tuple(axis for axis in mesh.axis_names if axis not in axes) or None
    spec = spec_of(axes, mesh, timeout=timeout)

    def local(h, w, g, v):
        def left(x):
            return GemmOperand(x[0].reshape(x.shape[1], spec.size, -1, x.shape[-1]))

        weights = (GemmOperand(w[0]), GemmOperand(v[0]))
        return p2p.gemm_reduce_scatter(spec, (left(h), left(g)), weights, None)[None]

    specs = (P(groups, None, None, axes), P(groups, None, axes)) * 2
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(groups, None, axes), check_vma=False))


MESHES = [
    ((2,), ("t",), ("t",)),
    ((4,), ("t",), ("t",)),
    ((8,), ("t",), ("t",)),
    ((2, 2), ("d", "t"), ("t",)),
    ((2, 2), ("d", "t"), ("d",)),
    ((2, 4), ("d", "t"), ("t",)),
    ((4, 2), ("d", "t"), ("t", "d")),
    ((2, 2, 2), ("a", "b", "c"), ("c", "a")),
]


@pytest.mark.parametrize(("shape", "names", "axes"), MESHES)
@pytest.mark.parametrize("protocol", GATHERS)
def test_gather(protocol, shape, names, axes, rng):
    mesh = mesh_of(shape, names, rng)
    size = int(np.prod([mesh.shape[axis] for axis in axes]))
    groups = mesh.size // size
    x, other = normal(rng, groups, 2, size * 3, 5), normal(rng, groups, size * 2, 3)
    w, v = normal(rng, groups, 5, size * 4), normal(rng, groups, 5, size * 7)
    y, z, gathered, others = gathering(mesh, axes, protocol)(x, w, v, other)
    assert_close(y, np.einsum("gask,gkn->gasn", x.astype(np.float64), w), dtype=F32)
    assert_close(z, np.einsum("gask,gkn->gasn", x.astype(np.float64), v), dtype=F32)
    np.testing.assert_array_equal(gathered, x)
    np.testing.assert_array_equal(others, other.reshape(groups, size, 2, 3))


@pytest.mark.parametrize(("shape", "names", "axes"), MESHES)
def test_scatter(shape, names, axes, rng):
    mesh = mesh_of(shape, names, rng)
    size = int(np.prod([mesh.shape[axis] for axis in axes]))
    groups = mesh.size // size
    h, g = normal(rng, groups, 2, size * 3, size * 4), normal(rng, groups, 2, size * 3, size * 5)
    w, v = normal(rng, groups, 6, size * 4), normal(rng, groups, 6, size * 5)
    z = scattering(mesh, axes)(h, w, g, v)
    expected = np.einsum("gask,gnk->gasn", h.astype(np.float64), w)
    expected += np.einsum("gask,gnk->gasn", g.astype(np.float64), v)
    assert_close(z, expected, dtype=F32)


def scaled(rng, dtype, scaling, lead, rows, summed):
    """Data, scales, and their values in float64, of an operand on each device, the first dimension of `lead`: a right
    one where that is all of it."""
    data = normal(rng, *lead, rows, summed).astype(dtype)
    values = data.astype(np.float64)
    if scaling == "none":
        return data, np.zeros(lead[:1], np.float32), values
    blocks = -(-summed // 128)
    shape = {"tensor": lead[:1], "row": (*lead, rows), "block": (*lead, blocks, rows)}[scaling]
    if scaling == "block" and len(lead) == 1:
        shape = (*lead, -(-rows // 128), blocks)
    scales = rng.uniform(0.5, 2.0, shape).astype(np.float32)
    wide = scales.astype(np.float64)
    if scaling == "tensor":
        wide = wide.reshape(-1, *(1,) * (data.ndim - 1))
    elif scaling == "row":
        wide = wide[..., None]
    elif len(lead) == 1:
        wide = wide.repeat(128, axis=1)[:, :rows].repeat(128, axis=2)[..., :summed]
    else:
        wide = np.moveaxis(wide, -2, -1).repeat(128, axis=-1)[..., :summed]
    return data, scales, values * wide


@pytest.mark.parametrize(
    ("dtype", "scaling", "tolerance", "shape", "size"),
    [
        *((*case, shape, size) for case in PLAIN for shape, size in [((128, 128, 128), 2), ((7, 33, 5), 4)]),
        *(
            ("float8_e4m3fn", scaling, 2e-3, (4, 144, 48), size)
            for scaling in ("tensor", "row", "block")
            for size in (2, 4)
        ),
        (*PLAIN[0], (7, 33, 5), 1),
        ("float8_e4m3fn", "row", 2e-3, (4, 144, 48), 1),
    ],
)
def test_several_sequences(dtype, scaling, tolerance, shape, size, rng):
    """What one index of the leading dimension selects lies between the rows of other devices."""
    (rows, summed, columns), dtype = shape, np.dtype(dtype)
    mesh, sequences = mesh_of((size,), ("t",), rng), 5
    spec = spec_of(("t",), mesh)
    if scaling == "none":
        spec = dataclasses.replace(spec, out_dtype=dtype)
    tensor = scaling == "tensor"  # of which x has one scale, not one of each device
    x, x_scale, wide_x = scaled(rng, dtype, scaling, (size, sequences), rows, summed)
    if tensor:
        wide_x, x_scale = wide_x / x_scale.reshape(-1, 1, 1, 1) * x_scale[0], np.full_like(x_scale, x_scale[0])
    h, h_scale, wide_h = scaled(rng, dtype, scaling, (size, sequences, size), rows, summed)
    w, w_scale, wide_w = scaled(rng, dtype, scaling, (size,), columns, summed)
    v, v_scale, wide_v = scaled(rng, dtype, scaling, (size,), columns, summed)
    bias = normal(rng, size, columns).astype(spec.out_dtype)
    left = facts_of({"none": None, "block": "block_1x128"}.get(scaling, scaling))

    def local(*arrays):
        x, x_scale, h, h_scale, w, w_scale, v, v_scale, bias = (array[0] for array in arrays)

        def operand(data, scale, facts=left):
            return GemmOperand(data, None if scaling == "none" else scale, facts)

        right = operand(w, w_scale, left.rhs), operand(v, v_scale, left.rhs)
        ys, *_ = p2p.all_gather_gemm(spec, operand(x, x_scale), right, (bias, None), (), False)
        several = p2p.gemm_reduce_scatter(spec, (operand(h, h_scale),) * 2, right, None)
        one = p2p.gemm_reduce_scatter(spec, (operand(h, h_scale),), right[:1], None)
        return [result[None] for result in (*ys, several, one)]

    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("t"), out_specs=P("t"), check_vma=False))
    y, z, several, one = mapped(x, x_scale, h, h_scale, w, w_scale, v, v_scale, bias)
    gathered = np.moveaxis(wide_x, 0, 1).reshape(sequences, size * rows, summed)
    close = functools.partial(assert_close, tolerance=tolerance, dtype=spec.out_dtype)
    close(y, np.einsum("ark,dnk->darn", gathered, wide_w) + bias.astype(np.float64)[:, None, None])
    close(z, np.einsum("ark,dnk->darn", gathered, wide_v))
    close(one, np.einsum("pasrk,pnk->sarn", wide_h, wide_w))
    close(several, np.einsum("pasrk,pnk->sarn", wide_h, wide_w + wide_v))


def test_devices_in_another_order_are_another_program(rng, require_devices):
    """The same traced function on meshes of one shape, whose groups differ."""
    require_devices(4)
    x, w = normal(rng, 8, 3), normal(rng, 3, 8)

    mapped = gather_over(None)
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]):
        mesh = Mesh(np.array(jax.devices())[order], ("t",))
        with jax.set_mesh(mesh):
            assert_close(jax.jit(mapped)(x, w), x.astype(np.float64) @ w, dtype=F32)


def test_devices_that_arrive_at_different_times(rng):
    """Every device works for a time of its own before each call, on buffers that the next call takes over."""
    mesh = mesh_of((4,), ("t",))
    x, w = normal(rng, 8, 16), normal(rng, 16, 16) / 4

    def delayed(x, work):
        def body(_, a):
            return jnp.sin(a) * 1.0001

        spent = lax.fori_loop(0, work, body, jnp.ones((64,)))
        return x + 0.0 * jnp.sum(spent)

    def local(x, w, works):
        def step(x, work):
            y = all_gather_matmul(delayed(x, work[0]), w, axis_name="t", transport="p2p")
            return jnp.tanh(matmul_reduce_scatter(y, w.T, axis_name="t", transport="p2p")), None

        return lax.scan(step, x, works)[0]

    works = rng.integers(0, 2000, (150, 4)) * (rng.random((150, 4)) < 0.3)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P("t"), P(None, "t"), P(None, "t")), out_specs=P("t"))
    found = jax.jit(mapped)(x, w, works)
    expected = x.astype(np.float64)
    for _ in range(150):
        expected = np.tanh(expected @ w @ w.T)
    assert_close(found, expected, tolerance=1e-4, dtype=F32)


def test_mixed_calls_in_random_groups(rng, require_devices):
    """Gathers and scatters over different axes of a mesh, several of them independent of each other."""
    require_devices(4)
    for _ in range(2):
        run_program(rng, rounds=6, most_rows=200)  # simulated devices share few cores


def test_one_function_called_several_times(rng):
    """It is lowered once, so all its calls have one name; their operands are ready in another order on each device."""
    mesh = mesh_of((8,), ("t",))
    layer = jax.jit(functools.partial(all_gather_matmul, axis_name="t", transport="p2p"))
    xs, w = [normal(rng, 16, 8) for _ in range(6)], normal(rng, 8, 16)

    def after_some_work(x, i):
        work = (lax.axis_index("t") * 7 + i * 5) % 8 * 300
        spent = lax.fori_loop(0, work, lambda _, a: jnp.sin(a) * 1.0001, jnp.ones((256,)))
        return x + 0.0 * jnp.sum(spent)

    def local(xs, w):
        return [layer(after_some_work(x, i), w) for i, x in enumerate(xs)]

    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P("t"), P(None, "t")), out_specs=P(None, "t")))
    assert mapped.lower(xs, w).as_text().count("te_all_gather_gemm") == 1
    for _ in range(5):
        for x, y in zip(xs, mapped(xs, w), strict=True):
            assert_close(y, x.astype(np.float64) @ w, dtype=F32)


def test_several_programs_at_once(rng):
    """Executions of one program that are under way together do not meet each other's devices."""
    mesh = mesh_of((4,), ("t",))
    call = gathering(mesh, ("t",), None)
    w, v, other = normal(rng, 1, 5, 16), normal(rng, 1, 5, 28), normal(rng, 1, 8, 3)
    xs = [normal(rng, 1, 2, 12, 5) for _ in range(20)]
    for x, (y, *_) in zip(xs, [call(x, w, v, other) for x in xs], strict=True):
        assert_close(y, np.einsum("gask,gkn->gasn", x.astype(np.float64), w), dtype=F32)


@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_a_device_that_does_not_come_in_time(name, rng):
    """All devices give up, the late one too, and say who is missing; the next execution works."""
    if jax.default_backend() == "gpu":
        pytest.skip("work on a GPU does not keep its host thread from coming; see test_processes")
    mesh = mesh_of((4,), ("t",))

    def local(x, w, work):
        spent = lax.fori_loop(0, work[0], lambda _, a: jnp.sin(a) * 1.0001, jnp.ones((4096,)))
        call = all_gather_matmul if name == "all_gather_matmul" else matmul_reduce_scatter
        return call(x + 0.0 * jnp.sum(spent), w, axis_name="t", transport=P2P(0.5))

    specs = (P("t"), P(None, "t")) if name == "all_gather_matmul" else (P(None, "t"), P("t"))
    out = P(None, "t") if name == "all_gather_matmul" else P("t")
    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(*specs, P("t")), out_specs=out))
    x, w = normal(rng, 8, 8), normal(rng, 8, 8)
    missing = rf"{name}, call \d+, on device \d of the group 0, 1, 2, 3 waited 0.5.* for device 2"
    with pytest.raises(Exception, match=missing):
        jax.block_until_ready(mapped(x, w, np.array([0, 0, 120_000, 0])))
    assert_close(mapped(x, w, np.zeros(4, int)), x.astype(np.float64) @ w, dtype=F32)


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["one group", "groups in a circle"])
def test_devices_of_one_process_that_make_different_calls(shape, rng):
    """Long before the timeout all name the same two devices and what they do; the next execution works."""
    names = ("a", "b")[: len(shape)]
    mesh = mesh_of(shape, names)
    gather = functools.partial(all_gather_matmul, transport=P2P(600.0))

    def local(x, w, differs):
        odd = sum(lax.axis_index(name) for name in names) % 2 == 1
        orders = (names, names[::-1]) if len(names) > 1 else (("a", "a"), ("a",))

        def run(order):
            return sum(jnp.sum(gather(x, w, axis_name=axes), axis=0) for axes in order)

        return lax.cond(differs & odd, lambda: run(orders[1]), lambda: run(orders[0]))[None]

    mapped = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(P(names), P(), P()), out_specs=P(names), check_vma=False)
    )
    x, w = normal(rng, 8, 8), normal(rng, 8, 8)
    call = r"device \d makes call \d+, all_gather_matmul of the group (\d, )+\d"
    with pytest.raises(Exception, match=f"{call}, and {call}; all must make the same calls, in the same order"):
        jax.block_until_ready(mapped(x, w, True))
    by_device = x.reshape(*shape, 2, 8).astype(np.float64).sum(axis=-2) @ w
    expected = sum(by_device.sum(axis=i, keepdims=True) for i in ((0, 1) if len(shape) > 1 else (0, 0)))
    assert_close(mapped(x, w, False), np.broadcast_to(expected, by_device.shape).reshape(4, 8), dtype=F32)


def test_a_mesh_without_devices():
    mesh = mesh_of((4,), ("t",)).abstract_mesh
    with pytest.raises(ValueError, match="must know the devices"):
        jax.jit(gather_over(mesh)).lower(jnp.ones((8, 3)), jnp.ones((3, 8)))


def test_programs_to_export(monkeypatch, rng):
    """They run on devices that are not known yet."""
    monkeypatch.setattr(p2p, "is_worthwhile", lambda *_, **__: True)
    monkeypatch.setattr(p2p, "_is_usable", lambda devices, _: devices is not None)
    mesh = mesh_of((4,), ("t",))
    x, w = normal(rng, 8, 3), normal(rng, 3, 8)

    def exported(transport):
        return jax.export.export(jax.jit(gather_over(mesh, transport)))(x, w)

    with pytest.raises(ValueError, match="an exported program does not: use transport='auto', 'ring' or 'xla'"):
        exported("p2p")
    other = mesh_of((4,), ("t",), rng)
    placed = [jax.device_put(a, NamedSharding(other, spec)) for a, spec in ((x, P("t")), (w, P(None, "t")))]
    assert_close(jax.jit(exported("auto").call)(*placed), x.astype(np.float64) @ w, dtype=F32)


@pytest.mark.parametrize("transport", ["auto", "p2p"])
def test_auto_does_without_memory_that_processes_cannot_share(transport, monkeypatch, rng):

    def refuse(*_, **__):
        raise RuntimeError("transport='p2p' cannot share memory")

    monkeypatch.setattr(p2p, "is_worthwhile", lambda *_, **__: True)
    monkeypatch.setattr(p2p, "_is_usable", lambda *_: True)
    monkeypatch.setattr(p2p, "_group", refuse)
    x, w = normal(rng, 8, 3), normal(rng, 3, 8)
    mapped = jax.jit(gather_over(mesh_of((4,), ("t",)), transport))
    if transport == "p2p":
        with pytest.raises(RuntimeError, match="cannot share memory"):
            mapped(x, w)
        return
    with pytest.warns(RuntimeWarning, match="transport='auto' uses plain collectives: .* cannot share memory"):
        y = mapped(x, w)
    assert_close(y, x.astype(np.float64) @ w, dtype=F32)


@pytest.mark.parametrize("transport", ["ring", "p2p"])
def test_while_jit_is_disabled(transport, rng):
    mesh = mesh_of((4,), ("t",))
    x, w = normal(rng, 8, 8), normal(rng, 8, 8)
    for function, specs, out in (
        (all_gather_matmul, (P("t"), P(None, "t")), P(None, "t")),
        (matmul_reduce_scatter, (P(None, "t"), P("t")), P("t")),
    ):
        local = functools.partial(function, axis_name="t", transport=transport)
        with jax.disable_jit():
            y = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out)(x, w)
        assert_close(y, x.astype(np.float64) @ w, dtype=F32)


@pytest.mark.parametrize(
    ("check_vma", "recipe"),
    [(True, None), (False, None), *zip((True, False, True), FP8, strict=True)],
    ids=lambda value: type(value).__name__ if value in FP8 else str(value),
)
def test_auto_does_without_it_where_devices_are_unknown(recipe, check_vma, monkeypatch, rng):
    """As `transport="xla"` does, also for a mesh without devices, and for CPUs beside a GPU."""
    monkeypatch.setattr(p2p, "is_worthwhile", lambda *_, **__: True)
    mesh = mesh_of((2, 2), ("d", "t"), rng)
    specs = P("d", "t"), P(None, "t"), P("t"), P("t"), P()
    shapes = (2, 256, 128), (128, 256), (256,), (256, 128), (128,)
    placed = [jax.device_put(normal(rng, *s), NamedSharding(mesh, spec)) for s, spec in zip(shapes, specs, strict=True)]

    def run(transport, mesh):
        options = {"axis_name": "t", "transport": transport, "recipe": recipe}

        def layers(x, w, b, v, c):
            return matmul_reduce_scatter(jnp.tanh(all_gather_matmul(x, w, bias=b, **options)), v, bias=c, **options)

        mapped = jax.shard_map(layers, mesh=mesh, in_specs=specs, out_specs=P("d", "t"), check_vma=check_vma)
        return jax.jit(jax.value_and_grad(lambda *a: jnp.square(mapped(*a)).sum(), argnums=range(5)))(*placed)

    for found, expected in zip(
        jax.tree.leaves(run("auto", mesh.abstract_mesh)), jax.tree.leaves(run("xla", mesh)), strict=True
    ):
        assert_close(found, expected)


def mapped_axis(size):
    return jax.sharding.use_abstract_mesh(AbstractMesh((size,), ("t",), axis_types=(AxisType.Manual,)))


@pytest.mark.parametrize(
    ("local_devices", "limit", "worthwhile"), [(1, None, True), (1, 1e-4, True), (1, 1e-2, False), (2, None, True)]
)
def test_auto_has_a_limit_of_its_own_for_groups_of_several_processes(local_devices, limit, worthwhile, monkeypatch):
    """Known while tracing where a process has fewer devices than a group."""
    monkeypatch.setattr(native, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(jax, "local_device_count", lambda: local_devices)
    if limit is not None:
        monkeypatch.setattr(p2p, "_SHORTEST_PRODUCT_OF_SEVERAL_PROCESSES", limit)
    x, w = (GemmOperand(jax.ShapeDtypeStruct(shape, jnp.bfloat16)) for shape in ((1, 8192, 8192), (8192, 8192)))
    spec = spec_of(("t",), AbstractMesh((2,), ("t",)))
    with mapped_axis(2):
        assert p2p.is_worthwhile(spec, (x,), (w,), gathers=True) is worthwhile


@pytest.mark.parametrize(
    ("platform", "count", "limit", "hosts", "usable"),
    [
        ("gpu", 1, math.inf, 1, True),
        ("gpu", 2, math.inf, 1, False),
        ("gpu", 2, 1e-4, 1, True),
        ("gpu", 2, 1e-2, 1, False),
        ("gpu", 2, 1e-4, 2, False),
        ("cpu", 1, 1e-4, 1, False),
    ],
)
def test_auto_keeps_to_gpus_of_one_process_or_host(platform, count, limit, hosts, usable, monkeypatch):
    """Known while lowering."""
    monkeypatch.setattr(p2p, "_SHORTEST_PRODUCT_OF_SEVERAL_PROCESSES", limit)
    monkeypatch.setattr(p2p.processes, "place_of", lambda device: device.process_index << 16 | device.number)
    store = {f"te_jax/host/{process}": "this one" if hosts == 1 else str(process) for process in range(count)}
    monkeypatch.setattr(p2p.processes, "_store", lambda: types.SimpleNamespace(
        key_value_set=lambda key, value, allow_overwrite: None, blocking_key_value_get=lambda key, _: store[key]
    ))  # fmt: skip
    devices = [types.SimpleNamespace(platform=platform, process_index=i % count, number=i) for i in range(4)]
    assert p2p._is_usable(np.array([devices]), 1e-3) is usable


def test_processes_wait_for_each_other_to_compile(monkeypatch):
    """For as long as a call does, if that is longer."""
    waits = []
    monkeypatch.setattr(p2p.processes, "span_processes", lambda groups: True)
    monkeypatch.setattr(p2p.processes, "ensure", lambda *arguments: waits.append(arguments[-1]))
    for timeout in (1.0, 1000.0, 1e300):
        jax.jit(gather_over(mesh_of((2,), ("t",)), P2P(timeout))).lower(jnp.ones((4, 3)), jnp.ones((3, 4)))
    assert waits == [p2p.processes.SECONDS_TO_COMPILE, 1000.0, 1e8]


@pytest.mark.parametrize(("timeout", "devices"), [(1e10, 2), (10**400, 2), (1e-60, 1)])
def test_extreme_timeouts(timeout, devices, rng):
    """They become the longest and the shortest that the handler takes."""
    x, w = normal(rng, 4, 5), normal(rng, 5, 6)
    mapped = gather_over(mesh_of((devices,), ("t",)), P2P(timeout))
    assert_close(jax.jit(mapped)(x, w), x.astype(np.float64) @ w, dtype=F32)


def test_axes_that_are_left_to_xla(monkeypatch):
    """ "auto" leaves all to XLA then; axes of one device are not split."""
    monkeypatch.setattr(native, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(p2p, "_SHORTEST_PRODUCT", 0.0)

    def run(transport, size):
        mapped = gather_over(mesh_of((size, 2), ("d", "t")), transport, axis_names={"t"})
        return jax.jit(mapped)(jnp.ones((8, 3)), jnp.ones((3, 8)))

    with pytest.raises(ValueError, match=r"leaves \['d'\] to XLA"):
        run("p2p", 2)
    for transport, size in (("auto", 2), ("p2p", 1)):
        assert_close(run(transport, size), np.full((8, 8), 3.0), dtype=F32)


@pytest.mark.parametrize("check_vma", [None, True, False])
def test_axes_of_vmap_stand_for_no_devices(check_vma, monkeypatch):
    """In a shard_map over another axis, or in none: "auto" leaves them to XLA."""
    monkeypatch.setattr(native, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(p2p, "_SHORTEST_PRODUCT", 0.0)
    x, w = jnp.ones((2, 4, 3)), jnp.ones((2, 3, 8))

    def run(transport):
        layer = functools.partial(all_gather_matmul, axis_name="v", transport=transport)
        mapped = jax.vmap(layer, axis_name="v")
        if check_vma is not None:
            specs = P(None, "t"), P()
            mapped = jax.shard_map(
                mapped, mesh=mesh_of((2,), ("t",)), in_specs=specs, out_specs=P(None, "t"), check_vma=check_vma
            )
        return jax.jit(mapped)(x, w)

    with pytest.raises(ValueError, match=r"transport='p2p' over \['v'\], which shard_map or pmap did not map"):
        run("p2p")
    if not check_vma:  # JAX itself fails on such an axis where it tracks what varies
        assert_close(run("auto"), run("xla"))
        assert_close(run("ring"), run("xla"))


def test_reference():
    mapped = gather_over(mesh_of((2,), ("t",)), implementation="reference")
    with pytest.raises(native.NativeUnavailableError, match="transport='p2p' is a kernel"):
        jax.jit(mapped)(jnp.ones((8, 3)), jnp.ones((3, 8)))


def test_second_derivatives_say_so():
    mapped = gather_over(mesh_of((2,), ("t",)))
    with pytest.raises(NotImplementedError, match="transport='xla'"):
        jax.jit(jax.grad(lambda x: jax.grad(lambda y: mapped(y, jnp.ones((3, 4))).sum())(x).sum()))(jnp.ones((4, 3)))


def test_vmap(rng):
    x, w = normal(rng, 3, 4, 5), normal(rng, 5, 6)
    layer = functools.partial(all_gather_matmul, axis_name="t", transport="p2p")
    mapped = jax.shard_map(
        jax.vmap(layer, in_axes=(0, None)),
        mesh=mesh_of((2,), ("t",)),
        in_specs=(P(None, "t"), P(None, "t")),
        out_specs=P(None, None, "t"),
    )
    assert_close(jax.jit(mapped)(x, w), x.astype(np.float64) @ w, dtype=F32)


# ------------------------------------------------------------------------------------------- what handlers refuse


ATTRIBUTES = {
    "name": "a product",
    "groups": np.zeros(1, np.int64),
    "group_size": 1,
    "shared_bytes": 0,
    "call": 7,
    "timeout": 20.0,
    "scaling": "none",
    "summed_first": True,
    "fast_accumulation": False,
    "algorithm": "cublaslt",
    "products": 1,
    "keep_gathered": False,
    "put": False,
}
OF_TWO = ATTRIBUTES | {"groups": np.arange(2), "group_size": 2}
ABSENT, WORKSPACE = jax.ShapeDtypeStruct((0,), F32), jax.ShapeDtypeStruct((2**25,), jnp.uint8)


def shapes(**given):
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in given.items()}


def alone(target, results, left_out=(), **given):
    """A call of x and w [4, 4] in a group of one device, but for what is given."""
    native.extension_module(jax.default_backend()).introduce({0: 0})
    operands = {"x": jnp.ones([*results.values()][0 if "y" in results else 1]), "x_scale_inv": jnp.zeros(0)}
    operands |= {"w": jnp.ones((4, 4)), "w_scale_inv": jnp.zeros(0), "bias": jnp.zeros(0)}
    results = shapes(**{name: (shape, F32) for name, shape in results.items()}) | {"workspace": WORKSPACE}
    attributes = dict(ATTRIBUTES)
    for name, value in given.items():
        kind = results if isinstance(value, jax.ShapeDtypeStruct) else operands
        (kind if isinstance(value, jax.ShapeDtypeStruct | jax.Array) else attributes)[name] = value
    for name in left_out:
        operands.pop(name, None)
        results.pop(name, None)
    return native.call_in_order(target, tuple(results.values()), *operands.values(), **attributes)


gather_alone = functools.partial(alone, "te_all_gather_gemm", {"y": (1, 2, 4), "gathered": (1, 2, 4), "scales": (0,)})
scatter_alone = functools.partial(
    alone, "te_gemm_reduce_scatter", {"z": (1, 2, 4), "received": (1, 1, 2, 4), "outgoing": (0,), "sums": (0,)}
)


@pytest.mark.parametrize("call", [gather_alone, scatter_alone])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"group_size": 2}, "groups names 1 devices; it must name some multiple of group_size, 2"),
        ({"group_size": 0}, "groups names 1 devices; it must name some multiple of group_size, 0"),
        ({"group_size": -1}, "groups names 1 devices; it must name some multiple of group_size, -1"),
        ({"group_size": 2**63 - 1}, "groups names 1 devices; it must name some multiple of group_size, 92233720368547"),
        ({"groups": np.array([-1]), "group_size": 1}, "groups names -1, which is no place"),
        ({"groups": np.array([2**32])}, "groups names 4294967296, which is no place"),
        ({"groups": np.array([0, 0])}, "groups names device 0 more than once"),
        ({"groups": np.array([5])}, "device 0 belongs to no group of this call"),
        ({"timeout": math.nan}, "timeout is nan; it must be a number of seconds from 0 to 1e9"),
        ({"timeout": math.inf}, "timeout is inf; it must be"),
        ({"timeout": -math.inf}, "timeout is -inf; it must be"),
        ({"timeout": -1.0}, "timeout is -1.000000; it must be"),
        ({"timeout": 1e30}, "timeout is 10000000150"),
        ({"products": -1}, "products is -1 and shared_bytes 0; neither can be negative"),
        ({"products": -(2**63)}, "products is -9223372036854775808 and"),
        ({"shared_bytes": -1}, "products is 1 and shared_bytes -1; neither can be negative"),
        ({"products": 2**62}, "come with all the operands and results that its attributes announce"),
        ({"workspace": jax.ShapeDtypeStruct((64,), jnp.int4)}, "workspace is S4[64]; it must be of type U8"),
        # a result that nothing would write, and an operand that nothing reads
        (shapes(more_results=((4,), F32)), "come without operands and results that its attributes do not announce"),
        ({"more": jnp.ones(4)}, "come without operands and results that its attributes do not announce"),
    ],
    ids=lambda value: value.split(";")[0] if isinstance(value, str) else "",
)
def test_handlers_refuse_attributes(call, given, message):
    if "more" in given and call is gather_alone and jax.default_backend() == "gpu":
        message = "gathered is U8"  # it takes the workspace for a result
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT: .*{re.escape(message)}"):
        jax.block_until_ready(call(**given))


@pytest.mark.parametrize(
    ("call", "given", "message"),
    [
        # 2^20 · 2^44 rows and columns wrap to the size of an array without elements
        (
            gather_alone,
            {"x": jnp.zeros((1, 2**20, 0)), "w": jnp.zeros((0, 2**44)), **shapes(y=((0,), F32), gathered=((0,), F32))},
            "w is F32[0,17592186044416]; it must have dimensions below 2^31",
        ),
        (
            gather_alone,
            {"x": jnp.zeros((0, 2**31, 4)), **shapes(y=((0,), F32), gathered=((0,), F32))},
            "x is F32[0,2147483648,4]; it must have rows and columns below 2^31",
        ),
        (
            scatter_alone,
            {"x": jnp.zeros((0, 1, 2**31, 4)), **shapes(z=((0, 2**31, 4), F32), received=((0,), F32))},
            "x is F32[0,1,2147483648,4]; it must have rows and columns below 2^31",
        ),
        # the number of blocks is not worked out: UBSan would find it wraps
        (
            scatter_alone,
            {"x": jnp.zeros((0, 1, 1, 2**62), jnp.float8_e4m3fn), "w": jnp.zeros((0, 2**63 - 1), jnp.float8_e4m3fn)}
            | {"scaling": "block", "algorithm": "te_jax", "summed_first": False}
            | shapes(z=((0, 1, 2**62), F32), received=((0,), F32)),
            "it must have rows and columns below 2^31",
        ),
        # XLA packs two of these in a byte
        (
            gather_alone,
            {"x": jnp.ones((1, 2, 4), jnp.int4), "gathered": jax.ShapeDtypeStruct((1, 2, 4), jnp.int4), "products": 0}
            | {"left_out": ("w", "w_scale_inv", "bias", "y")},
            "gathered is S4[1,2,4]; it must be of a float type of 8, 16 or 32 bits",
        ),
        (
            gather_alone,
            {"x_scale_inv": jnp.ones(2, jnp.complex64), "scaling": "row", "products": 0},
            "x_scale_inv is C64[2]; it must be of type F32",
        ),
    ],
    ids=lambda value: value.split(";")[0] if isinstance(value, str) else "",
)
def test_handlers_refuse_arrays(call, given, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(message)):
        jax.block_until_ready(call(**given))


def test_handlers_work_otherwise():
    y, gathered, *_ = gather_alone(keep_gathered=True)
    np.testing.assert_array_equal(y, np.full((1, 2, 4), 4.0))
    np.testing.assert_array_equal(gathered, np.ones((1, 2, 4)))
    np.testing.assert_array_equal(scatter_alone()[0], np.full((1, 2, 4), 4.0))


@pytest.mark.timeout(60)  # a loop over all pieces would take hours
def test_any_number_of_empty_pieces_takes_no_time():
    empty = shapes(y=((0,), F32), gathered=((0,), F32))
    run = jax.jit(lambda: gather_alone(x=jnp.zeros((2**40, 0, 4)), **empty))
    jax.block_until_ready(run.lower().compile({"xla_backend_optimization_level": 3})())


def gather(rows=1, pieces=1, others=(), put=False):
    """A call of the handler that gathers on two devices and multiplies nothing."""

    def run(x):
        x = jnp.broadcast_to(x[0, 0], (pieces, rows, 8))
        operands = x, jnp.zeros(0), *(jnp.zeros(size) for size in others)
        gathered = (pieces, 2 * rows, 8), (0,), *((2, size) for size in others)
        results = *(jax.ShapeDtypeStruct(shape, F32) for shape in gathered), WORKSPACE
        found = native.call_in_order("te_all_gather_gemm", results, *operands, **OF_TWO | {"products": 0, "put": put})
        return sum(jnp.sum(result) for result in found[:-1])[None]

    return run


def scatter(rows):
    """A call of the handler that scatters on two devices."""

    def run(x):
        empty = jnp.zeros(0)
        operands = jnp.broadcast_to(x[0, 0], (1, 2, rows, 8)), empty, jnp.ones((8, 8)), empty, empty
        z, received = (jax.ShapeDtypeStruct(shape, F32) for shape in ((1, rows, 8), (1, 1, rows, 8)))
        results = z, received, ABSENT, ABSENT, WORKSPACE
        return jnp.sum(native.call_in_order("te_gemm_reduce_scatter", results, *operands, **OF_TWO)[0])[None]

    return run


@pytest.mark.parametrize(
    ("first", "second", "of_first", "of_second"),
    [
        (gather(), gather(1 << 15), "brings pieces of 32 bytes", "brings pieces of 1048576 bytes"),
        (gather(2), gather(1, pieces=2), "brings 1 pieces", "brings 2 pieces"),
        (gather(), gather(others=(4,)), "brings 0 further arrays", "brings 1 further arrays"),
        (gather(others=(4, 8)), gather(others=(8, 4)), "brings further arrays of ", "brings further arrays of "),
        (gather(), gather(put=True), "gathers by reading", "gathers by writing"),
        (gather(), scatter(1), "gathers by reading", "scatters"),
        (scatter(1), scatter(4), "brings pieces of 32 bytes", "brings pieces of 128 bytes"),
    ],
)
def test_calls_that_differ_are_refused_by_all(first, second, of_first, of_second, require_devices):
    """Instead of reading and writing beyond the arrays of a peer."""
    require_devices(2)
    native.extension_module(jax.default_backend()).introduce({0: 0, 1: 1})

    def local(x):
        return lax.cond(lax.axis_index("t") == 0, first, second, x)

    mesh = Mesh(np.array(jax.devices()[:2]), ("t",))
    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("t"), out_specs=P("t"), check_vma=False))
    told = f"a product, call 7 of the group 0, 1: device 0 {of_first}.*, and device 1 {of_second}.*; all must make"
    with pytest.raises(jax.errors.JaxRuntimeError, match=told):
        jax.block_until_ready(mapped(jnp.ones((2, 1))))
