"""Attention by XLA against float64, and what a program for CUDA calls: seen in its text, and emulated."""

import dataclasses
import functools
import importlib
import itertools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import results_and_gradients
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ops import attention_oracle as oracle

from te_jax import checkpoint_policies, ops
from te_jax.ops import _cudnn_attention, _fa3_attention
from te_jax.ops._fused_attention import Masks
from te_jax.testing import assert_close

B, T, S, H = 3, 12, 20, 8
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [None, "reference"])


def normal(rng, *shape, dtype="float32"):
    return jax.device_put(rng.standard_normal(shape).astype(np.float32).astype(jnp.dtype(dtype)))


def draw(rng, *, heads=4, kv_heads=4, t=T, s=S, dtype="float32", head_dim=H, batch=B, width=None):
    return {
        "query": normal(rng, batch, t, heads, head_dim, dtype=dtype),
        "key": normal(rng, batch, s, kv_heads, head_dim, dtype=dtype),
        "value": normal(rng, batch, s, kv_heads, head_dim if width is None else width, dtype=dtype),
    }


def integers(*values):
    return jnp.asarray(values, jnp.int32)


# Each as (keyword arguments of the operation, the same of the mask of the oracle), for 3 sequences.
LENGTHS = {"query_lengths": integers(12, 5, 7), "key_lengths": integers(20, 9, 1)}
SEGMENTS = {
    "segment_ids": jax.device_put(np.asarray(np.repeat([[0, 1], [3, 2], [5, 5]], 6, axis=1), jnp.int32)),
    "key_segment_ids": jax.device_put(np.asarray(np.repeat([[0, 1], [2, 3], [5, 6]], 10, axis=1), jnp.int32)),
}
# A number that returns begins another segment.
PACKED = {
    "segment_ids": jax.device_put(np.asarray([[4] * 3 + [2] * 8 + [4], [7] * 12, [*range(4)] + [9] * 8], np.int32)),
    "max_segments_per_seq": 5,
}
RUNS = np.asarray([[0] * 3 + [1] * 8 + [2], [0] * 12, [*range(4)] + [4] * 8], np.int32)
MASKS = {
    "all": ({}, {}),
    "window": ({"causal": True, "window": 3}, {"causal": True, "window": 3}),
    "window of 1": ({"causal": True, "window": 1}, {"causal": True, "window": 1}),
    "lengths": (LENGTHS, {"q_lengths": LENGTHS["query_lengths"], "k_lengths": LENGTHS["key_lengths"]}),
    "key lengths and window": (
        {"key_lengths": LENGTHS["key_lengths"], "causal": True, "window": 4},
        {"k_lengths": LENGTHS["key_lengths"], "causal": True, "window": 4},
    ),
    "no keys": ({"key_lengths": integers(20, 0, 3)}, {"k_lengths": [20, 0, 3]}),
    "segments": (SEGMENTS | {"causal": True}, {"segments": (*SEGMENTS.values(),), "causal": True}),
    "packed, causal": (PACKED | {"causal": True}, {"segments": (RUNS, RUNS), "causal": True}),
    "packed and window": (
        PACKED | {"causal": True, "window": 2},
        {"segments": (RUNS, RUNS), "causal": True, "window": 2},
    ),
}


def keys_of(options):
    """How many keys there are: as many as queries where sequences are packed."""
    return T if "max_segments_per_seq" in options else S


def by_oracle(arguments, mask, cotangents, scale=None, softcap=None):
    """(output, finite log-sum-exp) and gradients of the oracle in float64, as NumPy arrays."""
    with jax.enable_x64(True):
        wide, dy = jax.tree.map(lambda x: np.asarray(x).astype(np.float64), (arguments, cotangents))
        return jax.tree.map(np.asarray, _oracle_step(wide, mask, dy, scale, softcap))


@functools.partial(jax.jit, static_argnames=("scale", "softcap"))
def _oracle_step(arguments, mask, cotangents, scale, softcap):
    def run(arguments):
        out, lse = oracle.attention(**arguments, mask=mask, scale=scale, softcap=softcap)
        return out, finite(lse)

    results, vjp = jax.vjp(run, arguments)
    return results, vjp(cotangents)[0]


def finite(x):
    return jnp.where(jnp.isfinite(x), x, 0.0)


# --------------------------------------------------------------------------------------------------------------- values


OPERANDS = [(4, "bias"), (2, "sinks"), (1, "")]  # heads of key, and what there is beside
AROUND = [("", (B,), False), ("bias", (B,), True), ("bias", (2, B), False), ("sinks", (2, B), True)]


@pytest.mark.parametrize(
    ("name", "implementation", "kv_heads", "extra", "width"),
    [
        (name, (None, "reference")[i % 2], *OPERANDS[i % len(OPERANDS)], (H, H, H // 2, 2 * H)[i % 4])
        for i, name in enumerate(MASKS)
    ],
)
def test_values_and_gradients(name, kv_heads, extra, width, implementation, rng):
    """With a log-sum-exp that has a gradient, too, and values of a width of their own."""
    options, of_mask = MASKS[name]
    keys = keys_of(options)
    arguments = draw(rng, kv_heads=kv_heads, s=keys, width=width)
    if extra:
        shapes = {"bias": [(4, T, keys), (B, 1, 1, keys), (1, T, 1), (T, keys)], "sinks": [(4,)]}[extra]
        arguments[extra] = normal(rng, *shapes[rng.integers(len(shapes))])
    mask = oracle.visible(B, T, keys, **of_mask)

    def run(arguments):
        out, lse = ops.attention(**arguments, **options, return_lse=True, implementation=implementation)
        return out, finite(lse)

    cotangents = normal(rng, B, T, 4, width), normal(rng, B, T, 4)
    results, (gradients,) = results_and_gradients(run, (arguments,), cotangents)
    expected = by_oracle(arguments, mask, cotangents)
    jax.tree.map(lambda a, b: assert_close(a, b, dtype="float32"), (results, gradients), expected)


@IMPLEMENTATIONS
def test_a_sequence_of_too_many_segments_is_nan(implementation, rng):
    arguments = draw(rng, s=T)
    options = PACKED | {"max_segments_per_seq": 4, "return_lse": True, "implementation": implementation}
    for found in jax.jit(lambda arguments: ops.attention(**arguments, **options, causal=True))(arguments):
        assert np.isnan(found[2]).all()
        assert np.isfinite(found[:2]).all()


@IMPLEMENTATIONS
def test_soft_caps_of_scores(implementation, rng):
    """Before the bias, which may hide keys."""
    hidden = (rng.random((T, S)) < 0.2) & (np.arange(S) > 0)
    arguments, dout = draw(rng, kv_heads=2), normal(rng, B, T, 4, H)
    options = {"scale": 0.7, "softcap": 0.5}
    run = functools.partial(ops.attention, bias=np.where(hidden, -np.inf, 0.0).astype(np.float32), **options)
    found, (own,) = results_and_gradients(
        lambda arguments: run(**arguments, implementation=implementation), (arguments,), dout
    )
    (expected, _), gradients = by_oracle(arguments, ~hidden[None], (dout, np.zeros((B, T, 4))), **options)
    assert_close(found, expected, dtype="float32")
    for leaf, wanted in zip(*map(jax.tree.leaves, (own, gradients)), strict=True):
        assert_close(leaf, wanted, dtype="float32")


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype, implementation, rng):
    arguments = draw(rng, kv_heads=2, dtype=dtype)
    dout = normal(rng, B, T, 4, H, dtype=dtype)
    run = functools.partial(ops.attention, causal=True, scale=0.7, implementation=implementation)
    found, (own,) = results_and_gradients(lambda arguments: run(**arguments), (arguments,), dout)
    mask = oracle.visible(B, T, S, causal=True)
    (expected, _), gradients = by_oracle(arguments, mask, (dout, np.zeros((B, T, 4))), scale=0.7)
    assert_close(found, expected, dtype=dtype)
    for leaf, wanted in zip(*map(jax.tree.leaves, (own, gradients)), strict=True):
        assert_close(leaf, wanted, dtype=dtype, tolerance=2e-2)


@pytest.mark.parametrize(
    ("options", "implementation"),
    [
        ({"key_lengths": integers(0, 3, 20), "causal": True, "window": 2}, None),
        ({"segment_ids": np.zeros((B, S), np.int32), "key_segment_ids": integers([1] * S, [0] * S, [0] * S)}, None),
        ({"key_lengths": integers(0, 3, 20)}, "reference"),
    ],
    ids=["lengths", "segments", "reference"],
)
def test_queries_without_keys_give_zero(options, implementation, rng):
    """Not NaN, and neither do their gradients."""
    arguments = draw(rng, t=S)

    def run(arguments):
        return ops.attention(**arguments, return_lse=True, implementation=implementation, **options)

    cotangents = np.ones((B, S, 4, H), np.float32), np.ones((B, S, 4), np.float32)
    (out, lse), (gradients,) = results_and_gradients(run, (arguments,), cotangents)
    assert (np.asarray(lse[0]) == -np.inf).all()
    for array in (out, *gradients.values()):
        assert (np.asarray(array[0]) == 0).all()
        assert np.isfinite(array).all()


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_a_split_sequence_is_gathered(axis_type, make_mesh, rng):
    mesh = make_mesh({"data": axis_type, "model": axis_type})
    arguments = draw(rng, t=16, s=16, batch=4)
    dout = normal(rng, 4, 16, 4, H)

    def step(arguments, dout):
        out, vjp = jax.vjp(lambda arguments: ops.attention(**arguments, causal=True), arguments)
        return out, vjp(dout)

    split = jax.device_put(arguments, NamedSharding(mesh, P(None, "model")))
    with jax.set_mesh(mesh):
        found = jax.jit(step)(split, jax.device_put(dout, NamedSharding(mesh, P())))
    for leaf, wanted in zip(*map(jax.tree.leaves, (found, jax.jit(step)(arguments, dout))), strict=True):
        assert_close(np.asarray(leaf), np.asarray(wanted))


# --------------------------------------------------------------------------------------------------- programs for CUDA


def for_cuda(function, *arguments):
    """The program of a function for a GPU, which this machine need not have."""
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def calls(program):
    """Names of the calls of cuDNN, in order."""
    return re.findall(r"@__cudnn\$fmha(\w+)", program)


def loss_of(**options):
    return lambda arguments: jnp.sum(ops.attention(**arguments, **options).astype(jnp.float32) ** 2)


def test_programs_for_cuda_call_cudnn(rng):
    """Wherever they are traced, and for no other platform."""
    arguments = draw(rng, kv_heads=2, dtype="bfloat16")
    step = jax.grad(loss_of(causal=True))
    program = for_cuda(step, arguments)
    assert calls(program) == ["Softmax", "SoftmaxBackward"]
    assert "dot_general" not in program
    for_cpu = jax.jit(step).trace(arguments).lower(lowering_platforms=("cpu",)).as_text()
    assert calls(for_cpu) == []
    assert "dot_general" in for_cpu
    both = jax.jit(step).trace(arguments).lower(lowering_platforms=("cpu", "cuda")).as_text()
    assert calls(both) == calls(program)


CUSTOM_CALL = re.compile(
    r'custom_call (@__cudnn\$fmha\w+)\([^)]*\) \{api_version = 2 : i32, backend_config = "(.*?)".* (operand_layouts.*)$'
)


def described(program):
    """Target, configuration, layouts and types of the calls of cuDNN."""
    found = [CUSTOM_CALL.search(line) for line in program.splitlines() if "custom_call @__cudnn" in line]
    return [(match[1], json.loads(match[2].replace("\\22", '"')), match[3]) for match in found]


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("name", ["plain", "causal", "window", "lengths", "bias"])
def test_calls_are_those_of_jax(name, kv_heads, monkeypatch, rng):
    arguments = draw(rng, kv_heads=kv_heads, dtype="float16", s=T)
    lengths = {"query_lengths": LENGTHS["query_lengths"], "key_lengths": LENGTHS["query_lengths"]}
    ours, theirs = {
        "plain": ({}, {}),
        "causal": ({"causal": True}, {"is_causal": True}),
        "window": ({"causal": True, "window": 5}, {"is_causal": True, "local_window_size": (4, 0)}),
        "lengths": (
            {"causal": True, **lengths},
            {
                "is_causal": True,
                **dict(zip(("query_seq_lengths", "key_value_seq_lengths"), lengths.values(), strict=True)),
            },
        ),
        "bias": ({}, {}),
    }[name]
    if name == "bias":
        arguments["bias"] = normal(rng, 1, 4, T, T, dtype="float16")
    monkeypatch.setattr(_fa3_attention, "is_here", lambda: False)
    # JAX looks for cuDNN while it traces.
    monkeypatch.setattr(_cudnn_attention.jax_cudnn, "check_cudnn_version", lambda: 91300)

    def loss_by_jax(arguments):
        out = jax.nn.dot_product_attention(**arguments, **theirs, scale=0.5, implementation="cudnn")
        return jnp.sum(out.astype(jnp.float32) ** 2)

    found, wanted = (
        described(for_cuda(jax.value_and_grad(loss), arguments)) for loss in (loss_of(**ours, scale=0.5), loss_by_jax)
    )
    assert found == wanted
    assert len(found) == 2


def jax_looks_at_hopper(monkeypatch):
    """JAX asks for cuDNN and the GPU while it traces."""
    monkeypatch.setattr(_cudnn_attention.jax_cudnn, "check_cudnn_version", lambda: 91300)
    monkeypatch.setattr(_cudnn_attention.jax_cudnn, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(_fa3_attention, "is_here", lambda: False)


@pytest.mark.parametrize(
    ("device", "head_dim", "padded"),  # JAX remembers what it traced of each head_dim
    [
        ((None, None), 24, False),
        (((9, 0), (9, 19, 1)), 32, False),
        (((8, 9), (9, 19, 1)), 40, True),
        (((9, 0), (9, 9, 0)), 48, True),
    ],
)
def test_calls_of_narrow_values_are_those_of_jax(device, head_dim, padded, monkeypatch, rng):
    """Zeros stand behind them where cuDNN knows but one width."""
    arguments = draw(rng, kv_heads=2, dtype="bfloat16", s=T, head_dim=head_dim, width=16)
    jax_looks_at_hopper(monkeypatch)
    monkeypatch.setattr(_cudnn_attention, "_device", lambda: device)

    def loss_by_jax(arguments):
        value = jnp.pad(arguments["value"], [(0, 0)] * 3 + [(0, (head_dim - 16) * padded)])
        out = _cudnn_attention.jax_cudnn.dot_product_attention(
            arguments["query"], arguments["key"], value, scale=0.5, mask_type=_cudnn_attention.jax_cudnn.MaskType.CAUSAL
        )
        return jnp.sum(out[..., :16].astype(jnp.float32) ** 2)

    ours = loss_of(causal=True, scale=0.5)
    found, wanted = (described(for_cuda(jax.value_and_grad(loss), arguments)) for loss in (ours, loss_by_jax))
    assert found == wanted
    assert len(found) == 2


@pytest.mark.parametrize("window", [None, 5])
def test_calls_of_packed_segments_are_those_of_jax(window, monkeypatch, rng):
    """JAX's offsets have other shapes, with values that count or not."""
    arguments = draw(rng, kv_heads=2, dtype="bfloat16", s=T)
    jax_looks_at_hopper(monkeypatch)
    lengths, offsets = jnp.full((B, 5), 2, jnp.int32), jnp.full((B, 6), 2, jnp.int32)

    def loss_by_jax(arguments):
        out = _cudnn_attention.jax_cudnn.dot_product_attention(
            *(arguments[name] for name in ("query", "key", "value")),
            **dict.fromkeys(("q_seqlen", "kv_seqlen"), lengths),
            **dict.fromkeys(("q_offsets", "kv_offsets"), offsets),
            scale=0.5,
            mask_type=_cudnn_attention.jax_cudnn.MaskType.PADDING_CAUSAL,
            sliding_window_length=window,
        )
        return jnp.sum(out.astype(jnp.float32) ** 2)

    ours = loss_of(causal=True, window=window, **PACKED, scale=0.5)
    found, wanted = (described(for_cuda(jax.value_and_grad(loss), arguments)) for loss in (ours, loss_by_jax))
    assert [call[:2] for call in found] == [call[:2] for call in wanted]
    assert len(found) == 2
    assert found[0][1]["cudnn_fmha_backend_config"]["max_seg_per_batch"] == 5


def sizes(program):
    """(tokens of a sequence, slots for segments) of the calls of cuDNN."""
    for _, configuration, _ in described(program):
        config = configuration["cudnn_fmha_backend_config"]
        batch, _, t, _ = map(int, config["intermediate_tensor_shape"]["dimensions"])
        yield t, batch * config["max_seg_per_batch"]


@pytest.mark.parametrize(
    ("t", "most", "longest"),
    [
        (8192, 4, [8192]),
        (8192, 17, [8192, 2048, 512]),
        (8192, 256, [8192, 2048, 512, 128]),
        (640, 16, [640, 160]),
        (128, 4, [128]),
    ],
)
@pytest.mark.parametrize("around", ["", "vmap", "shard_map"])
def test_memory_of_gradients_of_packed_segments(around, t, most, longest, make_mesh):
    """Their calls have room for at most four times the tokens that there are, however many segments."""
    mesh = make_mesh({"data": AxisType.Auto})
    lead = {"": (B,), "vmap": (2, B), "shard_map": (mesh.size * B,)}[around]
    heads = {"query": 4, "key": 2, "value": 2}
    arguments = {name: jax.ShapeDtypeStruct((*lead, t, n, 64), jnp.bfloat16) for name, n in heads.items()}
    ids = jax.ShapeDtypeStruct((B, t), jnp.int32)

    def step(arguments, ids):
        options = {"causal": True, "window": 300, "segment_ids": ids, "max_segments_per_seq": most}
        return jax.grad(loss_of(**options))(arguments)

    if around == "vmap":
        step = jax.vmap(step, in_axes=(0, None))
    elif around == "shard_map":
        step = jax.shard_map(step, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    forward, *backward = sizes(for_cuda(step, arguments, ids))
    batch = 2 * B if around == "vmap" else B
    assert forward == (t, batch * max(most, 2))
    assert [time for time, _ in backward] == longest
    assert all(slots * time <= 4 * batch * t for time, slots in backward)


@pytest.mark.parametrize("differentiated", [True, False])
def test_a_constant_bias_has_no_gradient(differentiated, rng):
    """It would be as large as the bias."""
    arguments = draw(rng, dtype="bfloat16", s=T)
    bias = normal(rng, 1, 4, T, T, dtype="bfloat16")

    def loss(arguments, bias):
        return loss_of(bias=bias)(arguments)

    program = for_cuda(jax.grad(loss, argnums=(0, 1) if differentiated else 0), arguments, bias)
    (results,) = re.findall(r"BiasSoftmaxBackward.*-> \((.*)\)", program)
    assert results.count("tensor") == 4 + differentiated


@pytest.mark.parametrize(
    ("policy", "forward_calls"),
    [(checkpoint_policies.save_attention, 1), (jax.checkpoint_policies.nothing_saveable, 2)],
    ids=["attention kept", "nothing kept"],
)
def test_remat(policy, forward_calls, rng):
    arguments = draw(rng, dtype="bfloat16")

    def layer(arguments):
        arguments = jax.lax.optimization_barrier(arguments)
        return loss_of(causal=True)(arguments)

    program = for_cuda(jax.value_and_grad(jax.checkpoint(layer, policy=policy)), arguments)
    assert calls(program).count("Softmax") == forward_calls
    assert calls(program).count("SoftmaxBackward") == 1


def test_batch_dimensions_of_vmap_become_one(rng):
    arguments = draw(rng, dtype="bfloat16")
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), arguments)
    program = for_cuda(jax.vmap(jax.grad(loss_of(causal=True))), stacked)
    dimensions = [
        d["cudnn_fmha_backend_config"]["intermediate_tensor_shape"]["dimensions"] for _, d, _ in described(program)
    ]
    assert dimensions == [[str(2 * B), "4", str(T), str(S)]] * 2


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float32"}, r"^query has dtype float32, and cuDNN takes bfloat16 and float16: cast"),
        ({"head_dim": 320}, r"^query has a head_dim of 320.*up to 256"),
        ({"head_dim": 100}, r"^query has a head_dim of 100.*multiples of 8"),
        ({"softcap": 50.0}, r"^softcap is 50.0, and cuDNN has none"),
    ],
    ids=["dtype", "large heads", "odd heads", "softcap"],
)
def test_scores_on_a_gpu_are_limited(change, message):
    """XLA would hold 8.6 GB of them."""
    query = jax.ShapeDtypeStruct((1, 8192, 32, change.get("head_dim", 128)), change.get("dtype", "bfloat16"))
    run = functools.partial(ops.attention, causal=True, softcap=change.get("softcap"))
    with pytest.raises(
        ValueError, match=message + ".*8589934592 bytes, more than max_score_bytes=1073741824: raise it"
    ):
        for_cuda(run, query, query, query)
    with pytest.raises(ValueError, match=message + ".*or use implementation=None"):
        for_cuda(functools.partial(run, implementation="native"), query, query, query)
    jax.jit(run).trace(query, query, query).lower(lowering_platforms=("cpu",))
    for options in ({"max_score_bytes": 2**33}, {"implementation": "reference"}):
        program = for_cuda(functools.partial(run, **options), query, query, query)
        assert calls(program) == []
    small = jax.ShapeDtypeStruct((1, 1024, *query.shape[2:]), query.dtype)
    assert "dot_general" in for_cuda(run, small, small, small)


def test_named_cudnn_is_not_for_cpus(rng):
    message = r"^implementation is 'native', cuDNN, and the program is not lowered for CUDA: use None"
    with jax.default_device(jax.devices("cpu")[0]), pytest.raises(ValueError, match=message):
        ops.attention(**draw(rng, dtype="bfloat16"), implementation="native")


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"causal": True}, None),
        ({}, {"causal": True, "key_lengths": integers(5, 5, 5)}, "key_lengths are given, which FlashAttention 3"),
        ({}, {"segment_ids": PACKED["segment_ids"]}, "without max_segments_per_seq are given"),
        ({}, PACKED, None),
        ({"dtype": "float32"}, {}, "FlashAttention 3 takes bfloat16 and float16"),
        ({"head_dim": 100}, {}, "a head_dim of 100.*multiples of 8 up to 256"),
        ({}, {"softcap": 50.0}, "softcap is 50.0, and FlashAttention 3 is called without"),
        ({"s": S}, {}, None),
        ({"s": S}, {"causal": True}, "12 tokens and key 20.*from the end with causal=True"),
        ({"batch": 0}, {}, "no empty arrays"),
    ],
)
def test_fa3_by_name(change, options, message, monkeypatch, rng):
    """It falls back nowhere, and its calls are forward and backward ones of the package."""
    arguments = draw(rng, **{"s": T, "dtype": "bfloat16", **change})
    if message is None:
        program = (
            for_cuda(jax.grad(loss_of(**options, implementation="fa3")), arguments) if has_fa3(monkeypatch) else ""
        )
        kind = "varlen_" * ("segment_ids" in options)
        assert re.findall(r"@te_jax_fa3_(\w+)", program) == [f"{kind}fwd", f"{kind}bwd"]
    else:
        assert has_fa3(monkeypatch)
        with pytest.raises(ValueError, match=f"{message}.*; or use implementation=None"):
            for_cuda(functools.partial(ops.attention, **options, implementation="fa3"), *arguments.values())


def has_fa3(monkeypatch, missing=None):
    """As if its library were here, which a CPU does not need."""
    monkeypatch.setattr(_fa3_attention, "missing", lambda: missing)
    return True


def test_fa3_has_no_gradient_of_the_log_sum_exp(monkeypatch, rng):
    has_fa3(monkeypatch)

    def loss(arguments):
        return jnp.sum(ops.attention(**arguments, return_lse=True, implementation="fa3")[1])

    with pytest.raises(ValueError, match="no gradient through the log-sum-exp; or use implementation=None"):
        for_cuda(jax.grad(loss), draw(rng, dtype="bfloat16"))


def test_fa3_is_an_option(monkeypatch, rng):
    """Where its package is not installed."""
    monkeypatch.setattr(_fa3_attention, "PACKAGE", "no-such-package")
    monkeypatch.setattr(_fa3_attention, "missing", _fa3_attention.missing.__wrapped__)
    arguments = draw(rng, dtype="bfloat16", head_dim=24)  # which no other test has: JAX remembers what it traced
    with pytest.raises(ValueError, match="not installed: pip install no-such-package; or use implementation=None"):
        for_cuda(functools.partial(ops.attention, implementation="fa3"), *arguments.values())
    assert "fa3" not in for_cuda(ops.attention, *arguments.values())
    with pytest.raises(ValueError, match="is 'fa3', FlashAttention 3, and the program is not lowered for CUDA"):
        jax.jit(functools.partial(ops.attention, **arguments, implementation="fa3")).trace().lower(
            lowering_platforms=("cpu",)
        )


def test_fa3_is_chosen_where_it_is_installed(monkeypatch, rng):
    """On the GPUs of its kernels; cuDNN computes what it cannot."""
    has_fa3(monkeypatch)
    monkeypatch.setattr(_fa3_attention.native, "has_gpu", lambda: True)
    monkeypatch.setattr(_fa3_attention.native, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(_cudnn_attention, "_device", lambda: ((9, 0), (9, 19, 1)))
    long = jax.ShapeDtypeStruct((1, 8192, 32, 128), jnp.bfloat16)

    def library(query, value=None, **options):
        program = for_cuda(functools.partial(ops.attention, **options), query, query, value or query)
        return "fa3" if "te_jax_fa3" in program else "cuDNN" if calls(program) else "XLA"

    assert library(long, causal=True) == "fa3"
    assert library(long, causal=True, implementation="native") == "cuDNN"
    assert library(long, causal=True, key_lengths=integers(5)) == "cuDNN"
    narrow, documents = jax.ShapeDtypeStruct((1, 8192, 32, 64), jnp.bfloat16), jnp.zeros((1, 8192), jnp.int32)
    assert library(long, narrow, causal=True) == "cuDNN"  # which takes them without zeros
    assert library(long, narrow, causal=True, segment_ids=documents, max_segments_per_seq=4) == "fa3"
    monkeypatch.setattr(_fa3_attention.native, "compute_capability", lambda: (10, 0))
    assert library(long, causal=True, scale=1.0) == "cuDNN"


BF16 = {"query": (1, 256, 4, 64), "key": (1, 256, 2, 64)}


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ({}, {}, None),
        ({"bias": (1, 4, 256, 256)}, {}, None),
        ({"bias": (1, 4, 256, 192), "key": (1, 192, 2, 64)}, {}, "key has a length of 192.* are NaN: pad it"),
        ({"bias": (1, 4, 256, 192), "key": (1, 192, 2, 64)}, {"backward": False}, None),
        ({"bias": (1, 4, 256, 255), "key": (1, 255, 2, 64)}, {}, "lengths 256 and 255.*must be even"),
        ({"query": (1, 1, 4, 64)}, {}, "query has a length of 1, .*NaN"),
        ({"query": (1, 1, 4, 64)}, {"backward": False}, None),
        ({"query": (1, 256, 4, 256), "key": (1, 256, 4, 256)}, {"lse_cotangent": True}, "log-sum-exp .* up to 248"),
        ({"query": (0, 256, 4, 64), "key": (0, 256, 4, 64)}, {}, "no empty arrays"),
        ({"query_segment_ids": (1, 256), "bias": (1, 1, 256, 256)}, {}, "takes one mask"),
        ({"query_segment_ids": (1, 256), "key_lengths": (1,)}, {}, "padding a segment of its own"),
        ({"query_segment_ids": (1, 256)}, {"max_mask_bytes": 2 * 256**2 - 1}, "a mask of 131072 bytes"),
        ({"query_segment_ids": (1, 256)}, {"max_mask_bytes": 2 * 256**2}, None),
        ({"query_segment_ids": (1, 257), "query": (1, 257, 4, 64)}, {"max_mask_bytes": 0, "segments": 4}, None),
        ({"query_segment_ids": (1, 256)}, {"capability": (8, 9), "segments": 4}, "on Hopper and later: leave it out"),
        ({"query_segment_ids": (1, 2**23)}, {"segments": 4}, None),
        (
            {"query_segment_ids": (1, 2**23), "query": (1, 2**23, 4, 64)},
            {"segments": 4},
            r"offsets of segments end at 2\^31 values: use a smaller batch",
        ),
        ({}, {"version": (9, 10, 1)}, "9.10.0 and 9.10.1 compute attention wrongly: upgrade"),
        ({}, {"version": (9, 11, 0)}, None),
        ({"query": (1, 8, 4, 192), "key": (1, 8, 4, 192)}, {"capability": (8, 9)}, "up to 128"),
    ],
)
def test_problems_of_cudnn(shapes, options, message, monkeypatch):
    options = {"backward": True, "lse_cotangent": False, "max_mask_bytes": 2**30, **options}
    device = options.pop("capability", None), options.pop("version", None)
    masks = Masks(causal=False, window=None, scale=1.0, max_segments_per_seq=options.pop("segments", None))
    monkeypatch.setattr(_cudnn_attention, "_device", lambda: device)
    shapes = BF16 | shapes
    operands = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    problem = _cudnn_attention.problem(operands, masks, **options)
    if message is None:
        assert problem is None
    else:
        assert re.search(message, problem)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 3}, r"^window is 3 with causal=False; it must be an integer of at least 1, with causal=True"),
        ({"window": 0, "causal": True}, r"^window is 0"),
        ({"window": True, "causal": True}, r"^window is True"),
        ({"causal": 1}, r"^causal is 1; it must be True or False"),
        ({"scale": float("nan")}, r"^scale is nan"),
        ({"softcap": 0.0}, r"^softcap is 0.0; it must be a finite number above 0"),
        ({"max_score_bytes": -1}, r"^max_score_bytes is -1"),
        (
            {"segment_ids": jnp.zeros((B, T), jnp.int32)},
            r"^segment_ids are given without key_segment_ids for 12 queries",
        ),
        ({"key_segment_ids": jnp.zeros((B, S), jnp.int32)}, r"^key_segment_ids are given without segment_ids"),
        ({"max_segments_per_seq": 0}, r"^max_segments_per_seq is 0; it must be an integer of at least 1"),
        ({"max_segments_per_seq": 2}, r"^max_segments_per_seq is given for runs of segment_ids .*: pass segment_ids"),
        (SEGMENTS | {"max_segments_per_seq": 2}, r"^max_segments_per_seq is given .*, and no key_segment_ids"),
        ({"bias": jnp.zeros((3, T, S))}, r"^bias has shape \(3, 12, 20\); .*broadcast to the scores \(3, 4, 12, 20\)"),
        (
            dict.fromkeys(("key", "value"), jnp.zeros((B, S, 3, H))),
            r"^query has 4 heads and key 3; the heads of key must divide",
        ),
        ({"sinks": jnp.zeros(3)}, r"^sinks has shape \(3,\).*must be \(4,\)"),
    ],
)
def test_arguments(options, message, rng):
    with pytest.raises(ValueError, match=message):
        ops.attention(**draw(rng) | options)


# -------------------------------------------------------------------------------------------------- libraries, emulated


def emulated(target, types, *, legacy_backend_config=None, **_):
    """`jax.ffi.ffi_call` of cuDNN's attention, or of FlashAttention 3."""
    if legacy_backend_config is None:
        return lambda *buffers, **attributes: jax.pure_callback(
            lambda *buffers: emulated_fa3(target, types, attributes, *map(np.asarray, buffers)), tuple(types), *buffers
        )
    config = json.loads(legacy_backend_config)["cudnn_fmha_backend_config"]
    compute = emulated_segments if config["max_seg_per_batch"] > 1 else emulated_sequences
    return lambda *buffers: jax.pure_callback(
        lambda *buffers: compute(target, types, config, *map(np.asarray, buffers)), tuple(types), *buffers
    )


@np.errstate(invalid="ignore")
def emulated_sequences(target, types, config, *buffers):
    """Its formulas in NumPy, in float32, and NaN where it promises nothing."""
    backward, biased = "Backward" in target, "Bias" in target
    padded, causal = "PADDING" in config["mask_type"], "CAUSAL" in config["mask_type"]
    window, buffers = config["sliding_window_length"], list(buffers)
    q, k, v = (x.astype(np.float32) for x in buffers[:3])
    del buffers[:3]
    stats, dout = (buffers.pop(0) for _ in range(2)) if backward else (None, None)
    bias = buffers.pop(0) if biased else None
    out = buffers.pop(0) if backward else None
    lengths = buffers if padded else None
    batch, t, heads, _ = q.shape
    s, group = k.shape[1], heads // k.shape[2]
    mask = oracle.visible(
        batch,
        t,
        s,
        causal=causal,
        window=window or None,
        q_lengths=lengths and lengths[0],
        k_lengths=lengths and lengths[1],
    )
    assert lengths is None or (np.stack(lengths) > 0).all()  # cuDNN gives NaN
    keys, values = (np.repeat(x, group, axis=2) for x in (k, v))
    scores = config["fmha_scale"] * np.einsum("btnh,bsnh->bnts", q, keys)
    if biased:
        scores = scores + bias.astype(np.float32)
    scores = np.where(mask[:, None], scores, np.float32(-np.inf))
    empty = ~mask.any(-1)
    workspace = np.zeros(types[-1].shape, types[-1].dtype)
    if not backward:
        lse = np.where(empty[:, None], np.float32(np.nan), np.logaddexp.reduce(scores, axis=-1))
        out = np.einsum("bnts,bsnh->bnth", np.exp(scores - lse[..., None]), values)
        return out.astype(types[0].dtype), lse, workspace
    p = np.exp(scores - stats[..., None])
    dp = np.einsum("btnh,bsnh->bnts", dout.astype(np.float32), values)
    delta = np.sum(dout.astype(np.float32) * out.astype(np.float32), axis=-1)
    ds = p * (dp - np.swapaxes(delta, 1, 2)[..., None])
    dq = config["fmha_scale"] * np.einsum("bnts,bsnh->bnth", ds, keys)
    dk = config["fmha_scale"] * np.einsum("bnts,btnh->bnsh", ds, q)
    dv = np.einsum("bnts,btnh->bnsh", p, dout.astype(np.float32))
    dk, dv = (x.reshape(batch, heads // group, group, s, -1).sum(2) for x in (dk, dv))
    dq = np.where(empty[:, None, :, None], np.nan, dq)
    if padded:
        behind = (np.arange(s) >= lengths[1][:, None])[:, None, :, None]
        dk, dv = (np.where(behind, np.nan, x) for x in (dk, dv))
    gradients = [x.astype(type_.dtype) for x, type_ in zip((dq, dk, dv), types[:3], strict=True)]
    if len(types) == 5:
        over = tuple(i for i in range(2) if types[3].shape[i] == 1)
        gradients.append(np.sum(ds, axis=over, keepdims=True).astype(types[3].dtype) if over else ds)
    return *gradients, workspace


def emulated_segments(target, types, config, *buffers):
    """The same of packed segments, each a sequence alone, and NaN for tokens that are in none."""
    *arrays, lengths, key_lengths, offsets, key_offsets = buffers
    batch, time, heads, head_dim = arrays[0].shape
    places = offsets // (heads * head_dim)
    assert lengths.shape == (batch * config["max_seg_per_batch"],)
    assert ((lengths >= 0) & (lengths <= time)).all()
    assert (places[:-1] + lengths <= places[1:]).all()
    assert places[-1] <= batch * time
    assert config["sliding_window_length"] < time
    assert (arrays[3] if "Backward" in target else types[1]).shape == (lengths.size, heads, time)
    np.testing.assert_array_equal(key_lengths, lengths)
    np.testing.assert_array_equal(key_offsets * heads, offsets * arrays[1].shape[2])

    def tokens(x):
        return x.reshape(-1, *x.shape[-2:])

    results = [np.full(type_.shape, np.nan, type_.dtype) for type_ in types[:-1]]  # [B, N, T, H], or of segments
    results = [np.swapaxes(x, 1, 2).copy() if x.ndim == 4 else x for x in results]
    for slot in np.flatnonzero(lengths):
        its = slice(places[slot], places[slot] + lengths[slot])
        rows = slice(slot, slot + 1), slice(None), slice(lengths[slot])
        alone = [tokens(x)[None, its] if x.ndim == 4 else x[rows] for x in arrays]
        found = emulated_sequences(target, types, config, *alone, *[lengths[slot : slot + 1]] * 2)
        for result, part in zip(results, found[:-1], strict=True):
            if result.ndim == 4:
                tokens(result)[its] = np.swapaxes(part, 1, 2)[0]
            else:
                result[rows] = part
    results = [np.swapaxes(x, 1, 2) if x.ndim == 4 else x for x in results]
    return *results, np.zeros(types[-1].shape, types[-1].dtype)


def emulated_fa3(target, types, attributes, *buffers):
    """The same as FlashAttention 3 takes them: sequences of a batch, or between offsets."""
    backward, packed = target.endswith("bwd"), "varlen" in target
    config = {
        "mask_type": "CAUSAL" * attributes["is_causal"],
        "sliding_window_length": int(attributes["window_size_left"]) + 1,
        "fmha_scale": attributes["softmax_scale"],
    }
    if packed:
        *buffers, begins, key_begins = buffers
        np.testing.assert_array_equal(begins, key_begins)
        assert begins[0] == 0
        assert begins[-1] == buffers[0].shape[0]
        assert attributes["max_seqlen"] == attributes["max_seqlen_k"] >= np.diff(begins).max()
        parts = [(slice(a, b),) for a, b in itertools.pairwise(begins) if b > a]
    else:
        parts = list(range(buffers[0].shape[0]))
    results = [np.full(type_.shape, np.nan, type_.dtype) for type_ in types]
    if backward:
        rows = math.prod(types[0].shape[:-2]) + 128 * (len(begins) if packed else len(parts) + 1)
        assert all(type_.shape == (types[0].shape[-2] * rows,) for type_ in types[3:])
    of_rows = (lambda part: (slice(None), *part)) if packed else (lambda part: part)
    for part in parts:
        if not backward:
            out, lse, _ = emulated_sequences("Softmax", types, config, *(x[part][None] for x in buffers))
            results[0][part], results[1][of_rows(part)] = np.swapaxes(out[0], 0, 1), lse[0]
            continue
        dout, query, key, value, out = (x[part][None] for x in buffers[:5])
        lse = buffers[5][of_rows(part)][None]
        found = emulated_sequences("SoftmaxBackward", types[:4], config, query, key, value, lse, dout, out)
        for result, gradient in zip(results, found[:3], strict=False):
            result[part] = np.swapaxes(gradient[0], 0, 1)
    return tuple(results)


def names_of(arguments):
    """Arguments of the operation by the names that the functions below it use."""
    renamed = {"segment_ids": "query_segment_ids"}
    return {renamed.get(name, name): x for name, x in arguments.items()}


OF_FA3 = [
    ("all", "sinks", (2, B)),
    ("window", "", (B,)),
    ("packed, causal", "sinks", (2, B)),
    ("packed and window", "", (B,)),
]


@pytest.mark.parametrize("width", [8, 24])
def test_values_of_another_width_by_a_library(width, monkeypatch, rng):
    """As they are, or with zeros behind narrower keys, of which no result and no gradient has a trace."""
    monkeypatch.setattr(jax.ffi, "ffi_call", emulated)
    monkeypatch.setattr(_cudnn_attention._Call, "_configuration", _configuration)
    monkeypatch.setattr(_cudnn_attention, "problem", lambda *_, **__: None)
    module = importlib.import_module("te_jax.ops.attention")  # the package has the function by this name
    monkeypatch.setattr(module, "by_platform", lambda arrays, *, cuda, **_: cuda(*arrays))
    arguments = draw(rng, kv_heads=2, s=T, head_dim=16, width=width)
    run = functools.partial(ops.attention, causal=True)
    cotangent = normal(rng, B, T, 4, width)
    result, vjp = jax.vjp(lambda arguments: run(**arguments), arguments)
    (expected, _), of_oracle = by_oracle(
        arguments, oracle.visible(B, T, T, causal=True), (cotangent, np.zeros((B, T, 4), np.float32))
    )
    assert_close(result, expected, dtype="float32")
    for name, gradient in vjp(cotangent)[0].items():
        assert_close(gradient, of_oracle[name], dtype="float32")


@pytest.mark.parametrize(
    ("library", "name", "extra", "lead", "lse_cotangent"),
    [
        *((_cudnn_attention, name, *AROUND[i % len(AROUND)]) for i, name in enumerate(MASKS)),
        *((_fa3_attention, *row, False) for row in OF_FA3),
    ],
)
def test_what_surrounds_a_library(library, name, lse_cotangent, lead, extra, monkeypatch, rng):
    """Sinks, a gradient through the log-sum-exp, sequences without keys, and more than one batch dimension."""
    options, of_mask = MASKS[name]
    fa3 = library is _fa3_attention
    options, keys = dict(options), T if fa3 and "causal" in options else keys_of(options)
    extra = extra.replace("bias", "") if "segment_ids" in options else extra  # cuDNN takes one mask
    masks = Masks(*(options.pop(key, other) for key, other in (("causal", False), ("window", None))), H**-0.5)
    if (most := options.pop("max_segments_per_seq", None)) is not None:
        masks = dataclasses.replace(masks, max_segments_per_seq=most)
        options = dict.fromkeys(("segment_ids", "key_segment_ids"), RUNS)
    arrays = names_of(options)
    cases = [names_of(draw(rng, kv_heads=2, s=keys)) | arrays for _ in range(2 if len(lead) > 1 else 1)]
    for case in cases:
        case |= {"bias": {"bias": normal(rng, 1, 4, T, S)}, "sinks": {"sinks": normal(rng, 4)}, "": {}}[extra]
    operands = cases[0] if len(lead) == 1 else jax.tree.map(lambda *x: np.stack(x), *cases)
    wanted = ("query", "key", "value", *([extra] if extra else []))
    monkeypatch.setattr(jax.ffi, "ffi_call", emulated)
    monkeypatch.setattr(_cudnn_attention._Call, "_configuration", _configuration)
    dout, dlse = normal(rng, *lead, T, 4, H), normal(rng, *lead, 4, T) if lse_cotangent else None

    @jax.jit
    def step(operands, dout, dlse):
        out, lse = library.forward(operands, masks)
        return out, lse, library.backward(operands, masks, out, lse, dout, dlse, wanted)

    out, lse, gradients = step(operands, dout, dlse)
    mask = oracle.visible(B, T, keys, **of_mask)

    for i, case in enumerate(cases):
        own = (lambda x, i=i: np.asarray(x)) if len(lead) == 1 else (lambda x, i=i: np.asarray(x)[i])
        given = {key: case[key] for key in wanted}
        cotangents = own(dout), np.zeros((B, T, 4)) if dlse is None else np.swapaxes(own(dlse), 1, 2)
        (results, expected_lse), expected_gradients = by_oracle(given, mask, cotangents)
        assert_close(own(out), results, dtype="float32")
        assert_close(finite(np.swapaxes(own(lse), 1, 2)), expected_lse, dtype="float32")
        for key, gradient in zip(wanted, gradients, strict=True):
            assert gradient.dtype == jnp.float32
            # Some are all zero.
            np.testing.assert_allclose(own(gradient), expected_gradients[key], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 5}], ids=str)
@pytest.mark.parametrize(
    ("most", "lengths"),
    [
        *((most, None) for most in (1, 5, 17, 70)),
        *((17, lengths) for lengths in ([17, 17, 17, 13], [5] * 12 + [4])),
    ],
)
def test_gradients_of_segments_by_their_lengths(most, lengths, options, monkeypatch, rng):
    """Calls for segments of up to 64, 16 and 4 tokens, of each as many as there can be. One sequence is NaN."""
    t = 64
    counts = min(most, t), *rng.integers(1, min(most, t) + 1, B - 1)
    runs = np.stack([oracle.random_runs(rng, t, count) for count in counts])
    if lengths is not None:
        runs = np.stack([np.repeat(np.arange(len(lengths)), lengths)] * B)
    arguments = draw(rng, kv_heads=2, t=t, s=t)
    arguments["query"] = np.array(arguments["query"])
    arguments["query"][1] = np.nan
    operands = arguments | dict.fromkeys(("query_segment_ids", "key_segment_ids"), jnp.asarray(runs))
    masks = Masks(options.get("causal", False), options.get("window"), H**-0.5, most)
    dout, dlse = normal(rng, B, t, 4, H), normal(rng, B, 4, t)
    monkeypatch.setattr(jax.ffi, "ffi_call", emulated)
    monkeypatch.setattr(_cudnn_attention, "_SHORTEST_TIER", 4)
    monkeypatch.setattr(_cudnn_attention._Call, "_configuration", _configuration)

    @jax.jit
    def step(operands):
        out, lse = _cudnn_attention.forward(operands, masks)
        return _cudnn_attention.backward(operands, masks, out, lse, dout, dlse, tuple(arguments))

    mask = oracle.visible(B, t, t, **options, segments=(runs, runs))
    _, expected = by_oracle(arguments, mask, (dout, np.swapaxes(dlse, 1, 2)))
    for name, gradient in zip(arguments, step(operands), strict=True):
        assert np.isnan(gradient[1]).all()
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-4, atol=1e-4)


_of_jax = _cudnn_attention._Call._configuration


def _configuration(call, backward):
    """That of half precision: JAX knows no other, and the emulation computes in float32."""
    halves = tuple(jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in call.inputs)
    return _of_jax(_cudnn_attention.dataclasses.replace(call, inputs=halves), backward)
