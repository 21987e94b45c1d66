"""Attention over devices that split time, against that of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from parameters import in_turns

from te_jax import checkpoint_policies, ops
from te_jax._core.jaxprs import inner
from te_jax.parallel import context_order, ring_attention
from te_jax.testing import assert_close

B, T, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 2, 32, 4, 2, 8, 16
SPEC = P(None, "context")


def drawn(rng, dtype="float32"):
    widths = (HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, VALUE_DIM), (HEADS, VALUE_DIM)
    shapes = [(B, T, *width) for width in widths]
    return [np.asarray(rng.standard_normal(shape), jnp.dtype(dtype)) for shape in shapes]


@functools.partial(jax.jit, static_argnames=("causal", "window", "scale", "max_segments_per_seq"))
def whole(query, key, value, dout, ids, **options):
    y, vjp = jax.vjp(lambda *a: ops.attention(*a, segment_ids=ids, **options), query, key, value)
    return y, *vjp(dout)


def split(mesh, query, key, value, dout, ids, *, spec=SPEC, check_vma=True, **options):
    """In the order of devices, and back."""
    size = mesh.shape["context"]
    order = context_order(T, size) if options["causal"] else np.arange(T)
    there = [None if x is None else np.asarray(x)[:, order] for x in (query, key, value, dout, ids)]

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(spec,) * 3 + (SPEC,), out_specs=spec, check_vma=check_vma)
    def attend(query, key, value, ids):
        return ring_attention(query, key, value, axis_name="context", segment_ids=ids, **options)

    @jax.jit
    def run(query, key, value, dout, ids):
        y, vjp = jax.vjp(lambda *a: attend(*a, ids), query, key, value)
        return y, *vjp(dout)

    return [np.asarray(x)[:, np.argsort(order)] for x in run(*there)]


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for part in inner(eqn):
            yield from equations(part)


def assert_same(found, expected, tolerance=1e-5):
    for one, other in zip(found, expected, strict=True):
        assert_close(np.asarray(one), np.asarray(other), tolerance=tolerance)


@pytest.fixture
def mesh(request, require_devices):
    size = getattr(request, "param", 2)
    require_devices(size)
    return jax.make_mesh((size,), ("context",), (AxisType.Auto,), devices=jax.devices()[:size])


OPTIONS = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": 5},
    "of one token": {"causal": True, "window": 1},
    "wide window": {"causal": True, "window": 19, "scale": 0.1},
    "all": {"causal": False},
}


@pytest.mark.parametrize(
    ("options", "segments", "mesh"),
    [*in_turns(OPTIONS, [True, False], [4, 2, 4]), pytest.param({"causal": True}, False, 1, id="one device")],
    indirect=["mesh"],
)
def test_values_and_gradients_are_those_of_one_device(options, segments, mesh, rng):
    operands = drawn(rng)
    # Segments have any lengths, and one begins again.
    ids = np.int32(np.sort(rng.integers(0, 4, (B, T)), axis=1) % 3) if segments else None
    assert_same(split(mesh, *operands, ids, **options), whole(*operands, ids, **options))


@pytest.mark.parametrize(
    ("window", "steps"), [(1, []), (2, [1, 7]), (65, [1, 7]), (66, [1, 2, 6, 7]), (None, range(1, 8))]
)
def test_keys_that_no_device_sees_do_not_travel(window, steps, require_devices):
    """With 8 devices, that have two chunks of 64 tokens each."""
    require_devices(8)
    mesh = jax.make_mesh((8,), ("context",), (AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=SPEC, out_specs=SPEC)
    def attend(x):
        return ring_attention(x, x, x, axis_name="context", window=window)

    x = jax.ShapeDtypeStruct((1, 8 * 128, 1, 8), jnp.float32)
    shifts = [
        (eqn.params["perm"][0][1] - eqn.params["perm"][0][0]) % 8
        for eqn in equations(jax.make_jaxpr(attend)(x).jaxpr)
        if eqn.primitive.name == "ppermute"
    ]
    assert list(np.cumsum(shifts)) == list(steps)


BFLOAT16 = {name: OPTIONS[name] for name in ("window", "all")}


@pytest.mark.parametrize(("options", "mesh"), in_turns(BFLOAT16, [2, 4]), indirect=["mesh"])
def test_bfloat16(options, mesh, rng):
    """Which is cuDNN's on GPUs."""
    operands, ids = drawn(rng, "bfloat16"), np.int32(np.sort(rng.integers(0, 4, (B, T)), axis=1))
    implementation = "native" if jax.default_backend() == "gpu" else None
    found = split(mesh, *operands, ids, **options, implementation=implementation)
    assert all(x.dtype == jnp.bfloat16 for x in found)
    expected = whole(*(np.asarray(x, np.float32) for x in operands), ids, **options)
    # XLA rounds a sum over devices once, which costs 1.6e-3; cuDNN also rounds each device's part. Gradients of query
    # and key subtract the product of the result, as it is rounded, and its gradient.
    tolerances = (2e-2,) * 4 if implementation == "native" else (3e-3, 9e-3, 9e-3, 3e-3)
    for one, other, tolerance in zip(found, expected, tolerances, strict=True):
        assert_close(np.asarray(one, np.float32), np.asarray(other), tolerance=tolerance)


@pytest.mark.parametrize("check_vma", [True])
def test_batch_and_heads_may_be_split_too(check_vma, rng, require_devices):
    require_devices(8)
    axes = {"data": 2, "context": 2, "tensor": 2}
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * 3)
    operands = drawn(rng)
    spec = P("data", "context", "tensor")
    found = split(mesh, *operands, None, spec=spec, check_vma=check_vma, causal=True)
    assert_same(found, whole(*operands, None, causal=True))


def test_large_scores_of_hidden_keys_stay_hidden(mesh, rng):
    """Above the log-sum-exp of what is seen by more than float32 has exponents for."""
    query, key, value, dout = drawn(rng)
    ids = np.int32(np.arange(T)[None].repeat(B, 0) // 4)
    key[:, ::4] *= 1000
    operands = query, key, value, dout
    found = split(mesh, *operands, ids, causal=True)
    assert_same(found, whole(*operands, ids, causal=True), tolerance=1e-4)


@pytest.mark.parametrize("causal", [True])
def test_runs_of_equal_numbers_are_segments_of_their_own(causal, mesh, rng):
    """Whichever devices they lie on; and a sequence with too many is NaN."""
    operands = drawn(rng)
    # 0 comes twice, a run covers several chunks, and chunks begin and end inside of runs and between them.
    runs = [[0] * 4 + [1] * 14 + [0] * 9 + [2] * 5, [0, 1] * 2 + [3] * 28]
    options = {"causal": causal, "max_segments_per_seq": 4}
    found = split(mesh, *operands, np.int32(runs), **options)
    expected = whole(*operands, np.int32(runs), **options)
    assert [bool(np.isnan(x).all()) for x in found[0]] == [False, True]
    for one, other in zip(found, expected, strict=True):
        assert_close(np.asarray(one)[:1], np.asarray(other)[:1], tolerance=1e-5)


def test_a_policy_keeps_attention():
    """Then keys go around the forward ring once."""
    mesh = jax.sharding.AbstractMesh((4,), ("context",), (AxisType.Auto,))
    x = jax.ShapeDtypeStruct((B, T, HEADS, HEAD_DIM), jnp.float32)
    attend = functools.partial(ring_attention, axis_name="context")
    attend = jax.shard_map(attend, mesh=mesh, in_specs=SPEC, out_specs=SPEC)

    def exchanges(policy):
        layer = jax.checkpoint(lambda *operands: jnp.sin(attend(*operands)), policy=policy)
        gradients = jax.grad(lambda *operands: jnp.sum(layer(*operands)), argnums=(0, 1, 2))
        return str(jax.make_jaxpr(gradients)(x, x, x)).count("ppermute")

    assert exchanges(checkpoint_policies.save_attention) == 3 + 3 + 4
    assert exchanges(jax.checkpoint_policies.nothing_saveable) == 3 + 3 + 3 + 4
    of_operands = jax.checkpoint_policies.save_only_these_names("te_attention_operand")
    _, residuals = jax.eval_shape(lambda *o: jax.vjp(jax.checkpoint(attend, policy=of_operands), *o), x, x, x)
    assert len(jax.tree.leaves(residuals)) >= 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"axis_name": ("a", "b")}, "no axis 'a' is mapped here"),
        ({"axis_name": "other"}, "no axis 'other' is mapped here"),
        ({"window": 3, "causal": False}, "window is 3 with causal=False"),
        ({"scale": float("inf")}, "scale is inf"),
        ({"max_segments_per_seq": 2}, "max_segments_per_seq is given for runs of segment_ids"),
        ({"segment_ids": np.zeros((B, 3), np.int32)}, r"segment_ids has shape \(2, 3\); .* must be \(2, 16\)"),
        ({"segment_ids": np.zeros((B, 16), np.float32)}, "segment_ids has dtype float32; it must be integers"),
    ],
)
def test_arguments(options, message, mesh):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(attending(mesh, **options), *shapes())


def attending(mesh, specs=SPEC, **options):
    function = functools.partial(ring_attention, **{"axis_name": "context", **options})
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=SPEC, check_vma="axis_name" not in options)


def shapes(dtype=jnp.float32):
    return [jax.ShapeDtypeStruct((B, T, HEADS, HEAD_DIM), dtype)] * 3


def test_operands_that_there_are_not(mesh):
    query, key, _ = shapes(jnp.bfloat16)
    with pytest.raises(ValueError, match="key has dtype float32; query, key and value must be"):
        jax.eval_shape(attending(mesh), query, *shapes()[:2])
    with pytest.raises(ValueError, match="query is the same on all devices along"):
        jax.eval_shape(attending(mesh, P()), query, key, key)
    with pytest.raises(NotImplementedError, match="ring_attention has first derivatives in reverse mode"):
        jax.jit(lambda *o: jax.jvp(attending(mesh), o, o)).lower(*shapes())


@pytest.mark.parametrize(("length", "size"), [(12, 4), (0, 2), (8, 0)])
def test_orders_that_there_are_not(length, size):
    with pytest.raises(ValueError, match="it must be"):
        context_order(length, size)


def test_orders():
    order = context_order(16, 4)
    assert order.reshape(4, 4).tolist() == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    np.testing.assert_array_equal(order[np.argsort(order)], np.arange(16))
