"""Attention by cuDNN against float64: what programs for CUDA promise, computed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ops import attention_oracle as oracle

from te_jax import checkpoint_policies, ops
from te_jax.ops import _fa3_attention
from te_jax.testing import assert_close

pytestmark = pytest.mark.gpu

B, T, S = 3, 192, 256
LENGTHS = {"query_lengths": [192, 77, 130], "key_lengths": [256, 100, 1]}
SORTED = np.sort(np.random.default_rng(0).integers(0, 4, (B, S)), axis=1)

# Arguments of the operation and of the oracle's mask.
CASES = {
    "all": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "window": ({"causal": True, "window": 40}, {"causal": True, "window": 40}),
    "window of 1": ({"causal": True, "window": 1}, {"causal": True, "window": 1}),
    "lengths": (LENGTHS, {"q_lengths": LENGTHS["query_lengths"], "k_lengths": LENGTHS["key_lengths"]}),
    "lengths, causal": (
        {**LENGTHS, "causal": True},
        {"q_lengths": LENGTHS["query_lengths"], "k_lengths": LENGTHS["key_lengths"], "causal": True},
    ),
    "key lengths, window": (
        {"key_lengths": [256, 5, 100], "causal": True, "window": 40},
        {"k_lengths": [256, 5, 100], "causal": True, "window": 40},
    ),
    "no keys": ({"key_lengths": [256, 0, 3]}, {"k_lengths": [256, 0, 3]}),
    "segments": (
        {"segment_ids": SORTED[:, :T], "key_segment_ids": SORTED, "causal": True},
        {"segments": (SORTED[:, :T], SORTED), "causal": True},
    ),
}


def normal(rng, *shape, dtype="float32"):
    return jnp.asarray(rng.standard_normal(shape).astype(np.float32)).astype(dtype)


def draw(rng, *, heads=8, kv_heads=2, t=T, s=S, head_dim=64, width=None, dtype="bfloat16"):
    return {
        "query": normal(rng, B, t, heads, head_dim, dtype=dtype),
        "key": normal(rng, B, s, kv_heads, head_dim, dtype=dtype),
        "value": normal(rng, B, s, kv_heads, width or head_dim, dtype=dtype),
    }


def finite(x):
    return jnp.where(jnp.isfinite(x), x, 0.0)


def check(arguments, options, mask, rng, *, lse=False, implementation="native", gradient_tolerance=2e-2):
    """Results and gradients against the oracle, relative to each array's norm."""
    options = {key: x if isinstance(x, bool | int) else jnp.asarray(x, jnp.int32) for key, x in options.items()}
    shape = (*arguments["query"].shape[:-1], arguments["value"].shape[-1])
    dtype = arguments["query"].dtype
    dout = normal(rng, *shape, dtype=dtype)
    cotangents = (dout, normal(rng, *shape[:3])) if lse else dout

    def run(arguments):
        found = ops.attention(**arguments, **options, return_lse=lse, implementation=implementation)
        return (found[0], finite(found[1])) if lse else found

    def step(arguments, cotangents):
        results, vjp = jax.vjp(run, arguments)
        return results, vjp(cotangents)[0]

    def expected(arguments):
        out, of_rows = oracle.attention(**arguments, mask=mask)
        return (out, finite(of_rows)) if lse else out

    results, gradients = jax.jit(step)(arguments, cotangents)
    with jax.enable_x64(True):
        wide, dy = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (arguments, cotangents))
        wanted, vjp = jax.vjp(expected, wide)
        wanted_gradients = vjp(dy)[0]
    for found, want in zip(*map(jax.tree.leaves, (results, wanted)), strict=True):
        assert_close(found, np.asarray(want), dtype=found.dtype, tolerance=1e-3 if found.dtype == "float32" else 1e-2)
    for name, want in wanted_gradients.items():
        found, want = np.asarray(gradients[name], np.float64), np.asarray(want)
        assert gradients[name].dtype == arguments[name].dtype
        assert np.isfinite(found).all(), name
        error = np.linalg.norm(found - want)
        assert error <= gradient_tolerance * np.linalg.norm(want) + 1e-2, (name, error, np.linalg.norm(want))


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("extra", ["", "sinks", "bias"])
@pytest.mark.parametrize("name", CASES)
def test_cudnn(name, extra, lse, rng):
    """With gradients of sinks, of a bias and through the log-sum-exp."""
    options, of_mask = CASES[name]
    if name == "segments" and extra == "bias":
        pytest.skip("XLA's")
    arguments = draw(rng)
    if extra == "sinks":
        arguments["sinks"] = normal(rng, 8)
    if extra == "bias":
        arguments["bias"] = normal(rng, 1, 8, T, S, dtype="bfloat16")
    check(arguments, options, oracle.visible(B, T, S, **of_mask), rng, lse=lse)


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize(
    ("widths", "name"),
    [
        *(((192, 128), name) for name in ("causal", "window", "lengths, causal", "no keys", "segments")),
        *((widths, "lengths, causal") for widths in ((128, 64), (96, 40), (248, 128), (64, 96))),
    ],
    ids=str,
)
def test_values_of_another_width(widths, name, lse, rng):
    """As they are where they are narrower than keys, and else with zeros."""
    options, of_mask = CASES[name]
    arguments = draw(rng, kv_heads=8, head_dim=widths[0], width=widths[1]) | {"sinks": normal(rng, 8)}
    check(arguments, options, oracle.visible(B, T, S, **of_mask), rng, lse=lse)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_bias_of_narrow_values(kv_heads, rng):
    arguments = draw(rng, kv_heads=kv_heads, head_dim=192, width=128)
    arguments["bias"] = normal(rng, 1, 8, T, S, dtype="bfloat16")
    check(arguments, {}, oracle.visible(B, T, S), rng)


def test_packed_segments_of_narrow_values(rng):
    runs = np.stack([oracle.random_runs(rng, 640, count) for count in (9, 1, 5)])
    packed = {"segment_ids": runs % 3, "max_segments_per_seq": 9, "causal": True}
    check(draw(rng, head_dim=192, width=128, t=640, s=640), packed, mask_of_runs(runs, causal=True), rng)


def mask_of_runs(runs, *, causal=False, window=None):
    """`oracle.visible` of long sequences, where pair by pair takes long."""
    positions = np.arange(runs.shape[1])
    distance = positions[:, None] - positions
    near = (distance >= 0 if causal else True) & (distance < (window or positions.size))
    return (runs[:, :, None] == runs[:, None]) & near


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 40}], ids=str)
@pytest.mark.parametrize("extra", ["", "sinks", "lse"])
@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "dtype"), [(8, 64, "bfloat16"), (2, 128, "bfloat16"), (1, 192, "float16")]
)
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_packed_segments(calls, kv_heads, head_dim, dtype, extra, options, rng):
    """Segments have any lengths; one sequence has as many as may be, another one, and the last fewer.

    Their gradients take so many calls of cuDNN, each for a range of lengths.
    """
    t, most = {1: (int(rng.integers(130, 400)), 9), 2: (4 * int(rng.integers(128, 200)), 9), 3: (2048, 40)}[calls]
    counts = most, 1, int(rng.integers(2, most))
    runs = np.stack([oracle.random_runs(rng, t, count) for count in counts])
    arguments = draw(rng, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, t=t, s=t)
    if extra == "sinks":
        arguments["sinks"] = normal(rng, 8)
    packed = {"segment_ids": runs % 3, "max_segments_per_seq": most}
    check(arguments, {**packed, **options}, mask_of_runs(runs, **options), rng, lse=extra == "lse")


# Arguments of the operation, what is beside them, and (t, s, heads of key, head_dim, dtype).
OF_FA3 = {
    "all": ({}, "", (192, 320, 2, 64, "bfloat16")),
    "causal": ({"causal": True}, "sinks", (300, 300, 2, 128, "bfloat16")),
    "one head of key": ({"causal": True}, "", (192, 192, 1, 128, "float16")),
    "as many heads": ({"causal": True}, "sinks", (129, 129, 8, 40, "bfloat16")),
    "window": ({"causal": True, "window": 40}, "", (520, 520, 2, 128, "bfloat16")),
    "window of 1": ({"causal": True, "window": 1}, "sinks", (64, 64, 4, 64, "bfloat16")),
    "wide": ({"causal": True}, "", (256, 256, 2, 256, "bfloat16")),
    "narrow": ({}, "", (100, 3, 2, 192, "float16")),
    "packed": ({"causal": True, "max_segments_per_seq": 9}, "", (1000, 1000, 2, 128, "bfloat16")),
    "packed, sinks": ({"max_segments_per_seq": 40}, "sinks", (2048, 2048, 8, 64, "float16")),
    "packed, window": ({"causal": True, "window": 40, "max_segments_per_seq": 9}, "", (777, 777, 1, 128, "bfloat16")),
}


@pytest.mark.skipif(_fa3_attention.missing() is not None, reason=_fa3_attention.missing() or "")
@pytest.mark.parametrize("name", OF_FA3)
def test_fa3(name, rng):
    options, extra, (t, s, kv_heads, head_dim, dtype) = OF_FA3[name]
    options = dict(options)
    arguments = draw(rng, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, t=t, s=s)
    if extra:
        arguments["sinks"] = normal(rng, 8)
    seen = {key: options[key] for key in ("causal", "window") if key in options}
    mask = oracle.visible(B, t, s, **seen)
    if most := options.get("max_segments_per_seq"):
        runs = np.stack([oracle.random_runs(rng, t, count) for count in (most, 1, most // 2)])
        options["segment_ids"] = runs % 3
        mask = mask_of_runs(runs, **seen)
    check(arguments, options, mask, rng, implementation="fa3")


@pytest.mark.parametrize("length", [40, 300, 2048])
def test_packed_segments_of_one_length(length, rng):
    """Two of the three calls for gradients have no segments."""
    runs = np.broadcast_to(np.arange(2048) // length, (B, 2048))
    arguments = draw(rng, t=2048, s=2048)
    packed = {"segment_ids": runs, "max_segments_per_seq": 64}
    check(arguments, {**packed, "causal": True}, mask_of_runs(runs, causal=True), rng)


@pytest.mark.parametrize("batch", [1, B])
@pytest.mark.parametrize("heads", [1, 8])
def test_shapes_of_a_bias(batch, heads, rng):
    arguments = draw(rng) | {"bias": normal(rng, batch, heads, T, S, dtype="bfloat16")}
    check(arguments, {}, oracle.visible(B, T, S), rng)


@pytest.mark.parametrize("head_dim", [8, 40, 128, 192, 256])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_heads(dtype, kv_heads, head_dim, rng):
    arguments = draw(rng, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    check(arguments, {"causal": True}, oracle.visible(B, T, S, causal=True), rng)


@pytest.mark.parametrize("t", [2, 7, 64, 100, 129])
@pytest.mark.parametrize("s", [1, 3, 64, 100, 192])
def test_lengths_of_every_kind(t, s, rng):
    """More queries than keys, too."""
    for causal in (False, True):
        mask = oracle.visible(B, t, s, causal=causal)
        check(draw(rng, t=t, s=s), {"causal": causal}, mask, rng, lse=True)


@pytest.mark.parametrize("t", [1, 192])
def test_where_gradients_are_left_to_xla(t, rng):
    """One query, and a bias over 64 keys more than a multiple of 128: the forward pass is cuDNN's."""
    arguments = draw(rng, t=t, s=192) | {"bias": normal(rng, 1, 8, t, 192, dtype="bfloat16")}
    check(arguments, {}, oracle.visible(B, t, 192), rng, implementation=None)


def test_vmap_and_scan(rng):
    cases = [draw(rng) for _ in range(2)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *cases)
    run = jax.grad(lambda x: jnp.sum(ops.attention(**x, causal=True, implementation="native").astype(jnp.float32) ** 2))
    alone = [run(case) for case in cases]
    scanned = jax.jit(lambda stacked: jax.lax.scan(lambda carry, x: (carry, run(x)), 0, stacked)[1])(stacked)
    for found in (jax.jit(jax.vmap(run))(stacked), scanned):
        for i, expected in enumerate(alone):
            for leaf, wanted in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
                assert_close(leaf[i], wanted, tolerance=5e-3)  # cuDNN adds dQ up in any order
    shared = jax.jit(jax.vmap(run, in_axes=({"query": 0, "key": None, "value": None},)))(
        {**cases[0], "query": stacked["query"]}
    )
    assert_close(shared["key"][0], alone[0]["key"], tolerance=5e-3)


def test_scores_are_never_held(rng):
    """Neither with gradients nor under a policy that keeps the results."""
    t, heads = 4096, 16
    arguments = jax.tree.map(lambda x: x[:1], draw(rng, heads=heads, kv_heads=4, t=t, s=t, head_dim=128))
    scores = t * t * heads * 2

    def layer(x):
        return jnp.sum(ops.attention(**x, causal=True).astype(jnp.float32) ** 2)

    for function in (layer, jax.checkpoint(layer, policy=checkpoint_policies.save_attention)):
        compiled = jax.jit(jax.grad(function)).lower(arguments).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < scores / 2


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_batch_and_heads_split_over_devices(axis_type, require_devices, rng):
    require_devices(4)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type,) * 2, devices=jax.devices()[:4])
    arguments = jax.tree.map(lambda x: jnp.concatenate([x, x[:1]]), draw(rng))
    spec = NamedSharding(mesh, P("data", None, "model"))
    run = jax.jit(
        jax.grad(lambda x: jnp.sum(ops.attention(**x, causal=True, implementation="native").astype(jnp.float32) ** 2))
    )
    with jax.set_mesh(mesh):
        found = run(jax.device_put(arguments, spec))
    for leaf, wanted in zip(*map(jax.tree.leaves, (found, run(arguments))), strict=True):
        assert_close(np.asarray(leaf), np.asarray(wanted), tolerance=5e-3)


def test_what_cudnn_cannot(rng):
    arguments = draw(rng, dtype="float32")
    with pytest.raises(ValueError, match="query has dtype float32, and cuDNN takes"):
        ops.attention(**arguments, implementation="native")
    with pytest.raises(ValueError, match="max_score_bytes=1000: raise it"):
        ops.attention(**arguments, max_score_bytes=1000)
    by_xla = functools.partial(ops.attention, implementation="reference")
    assert_close(ops.attention(**arguments), by_xla(**arguments))
