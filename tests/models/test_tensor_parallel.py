"""The decoder split over devices: loss and gradients of one device, what is exchanged for them, and what is refused."""

import dataclasses
import functools
import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_decoder import random_params, random_tokens

from te_jax import hlo, layers, optim
from te_jax.models import (
    PRESETS,
    DecoderConfig,
    Experts,
    Factors,
    Latent,
    RopeScaling,
    Softcaps,
    TensorParallel,
    apply,
    init,
    init_scaling_state,
    is_head,
    loss,
    parallel_apply,
    parallel_loss,
    param_specs,
    requantize,
)
from te_jax.offload import Offload
from te_jax.ops import Activation
from te_jax.parallel import FSDP, P2P, Ring, context_order
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling
from te_jax.testing import assert_close, relative_error

# Of two devices each has 3 key heads of its own. Of four each uses one and the half of another.
CONFIG = DecoderConfig(
    vocab_size=24, num_layers=1, hidden_size=24, num_heads=12, num_kv_heads=6, head_dim=4, mlp_size=40, norm_eps=1e-3
)
TOKENS = (4, 16)
ALL_VARIANTS = {
    **{"window": 5, "rope_scaling": RopeScaling("yarn", factor=4.0, original_length=8), "qk_norm": True},
    **{"activation": Activation("silu", alpha=1.7, limit=0.5, offset=1.0), "attention_sinks": True},
    **{"attention_biases": ("query", "key", "value", "out"), "zero_centered_norms": True, "scaled_embedding": True},
    **{"tied_head": True, "norms": "both", "softcaps": Softcaps(0.7, 2.0), "factors": Factors(2.0, 0.5, 0.3, 3.0)},
}

# Nearly all of the time goes into compiling.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@pytest.fixture
def mesh_of(require_devices):
    """mesh_of(data=2, tensor=2): a mesh of so many devices; skips the test where fewer are there."""

    def make(axis_type=AxisType.Auto, **axes):
        count = math.prod(axes.values())
        require_devices(count)
        devices = np.array(jax.devices()[:count]).reshape(*axes.values())
        return Mesh(devices, tuple(axes), axis_types=(axis_type,) * len(axes))

    return make


def random_batch(config, rng, shape=TOKENS):
    """Tokens and targets; a part of the targets is missing, and not the same number in every sequence."""
    tokens, targets = (random_tokens(config, rng, shape) for _ in range(2))
    return tokens, np.where(rng.random(shape) < 0.3, np.int32(-100), targets)


def placed(params, mesh, config, parallel):
    specs = param_specs(config, parallel)
    # From NumPy, since JAX compiles a program to cut its own arrays.
    return jax.tree.map(lambda leaf, spec: jax.device_put(np.asarray(leaf), NamedSharding(mesh, spec)), params, specs)


@functools.cache
def on_one_device(config):
    """(parameters, tokens, targets, segments, state) -> loss and gradients, of a state too, if there is one."""

    def run(params, tokens, targets, segments=None, state=None):
        return loss(params, tokens, targets, config, state, segment_ids=segments)

    return jit(jax.value_and_grad(run, argnums=(0, 4) if init_scaling_state(config) else 0))


@functools.cache
def on_mesh(mesh, config, parallel):
    split = parallel_loss(mesh, config, parallel)

    def run(params, tokens, targets, segments=None, state=None):
        return split(params, tokens, targets, state, segments)

    return jit(jax.value_and_grad(run, argnums=(0, 4) if init_scaling_state(config) else 0))


def assert_same(found, expected, tolerance):
    for (path, one), other in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert relative_error(jax.device_get(one), jax.device_get(other)) <= tolerance, jax.tree_util.keystr(path)


SHARED = FSDP(2, reduce_dtype="float32", min_size=0)
CONTEXT = {"context_axis": "context", "batch_axes": ("context",)}
EXPERTS = Experts(num_experts=4, router=layers.Router(top_k=2), balance_weight=0.1, z_weight=0.01, biases=True)
OF_DEEPSEEK = dataclasses.replace(
    EXPERTS, biases=False, choice_bias=True, weighted_shared=24, dense_layers=1, dense_size=48
)
LATENT = Latent(rank=8, rope_dim=2, value_dim=6, query_rank=16)
OFFLOADED = {"remat": True, "offload": Offload(min_size=0)}
# Axes of the mesh, how a decoder is split over them, and changes of the decoder; in float32.
MESHES = {
    "gathered": ({"tensor": 4}, {"transport": "xla"}, {}),
    "p2p": ({"tensor": 2}, {"transport": "p2p"}, {}),
    # Sequences have different numbers of targets, so a mean of means would be another loss.
    "with a batch": (
        {"data": 2, "tensor": 2, "more": 2},
        {"batch_axes": ("data", "more"), "transport": Ring(bidirectional=True), "residual": "shard"},
        OFFLOADED,
    ),
    "replicas of fsdp": (
        {"replica": 2, "fsdp": 2, "tensor": 1},
        {"fsdp": dataclasses.replace(SHARED, keep=1, replica_axis="replica")},
        {"num_layers": 2, "rope_theta": (10_000.0, None)} | OFFLOADED,
    ),
    # A tied embedding is one parameter with two gradients, which devices of fsdp have parts of in another order.
    "fsdp and tensor": ({"fsdp": 2, "tensor": 4}, {"fsdp": SHARED}, ALL_VARIANTS | {"remat": True}),
    "context, fsdp and tensor": (
        {"fsdp": 2, "context": 2, "tensor": 2},
        {"fsdp": SHARED, "transport": "ring"} | CONTEXT,
        {"max_segments_per_seq": 4, "remat": True, "norms": "after", "factors": Factors(scores=0.3)},
    ),
    "context of fsdp": (
        {"fsdp": 2, "tensor": 1},
        {"fsdp": SHARED, "context_axis": "fsdp"},
        {"max_segments_per_seq": 4, "norms": "after", "qk_norm": "projection"},
    ),
    "latent attention of fsdp": (
        {"fsdp": 2, "tensor": 1},
        {"fsdp": SHARED, "expert_axes": ("fsdp",)},
        {"num_layers": 2, "num_kv_heads": 12, "latent": LATENT, "experts": OF_DEEPSEEK},
    ),
    "latent attention in a context": ({"context": 2, "tensor": 1}, CONTEXT, {"num_kv_heads": 12, "latent": LATENT}),
    "experts of fsdp": (
        {"fsdp": 2, "tensor": 2},
        {"fsdp": SHARED, "expert_axes": ("fsdp", "tensor")},
        {"experts": EXPERTS},
    ),
}


@pytest.mark.parametrize("case", MESHES)
def test_loss_and_gradients_are_those_of_one_device(case, rng, request, mesh_of):
    axes, options, changes = MESHES[case]
    if case == "p2p":
        request.getfixturevalue("native_kernels")
    config, parallel = dataclasses.replace(CONFIG, **changes), TensorParallel(axes["tensor"], **options)
    mesh = mesh_of(**axes)
    params, (tokens, targets) = random_params(config, rng), random_batch(config, rng)
    segments = None
    if config.max_segments_per_seq:  # a number that comes again is another segment
        segments = jax.device_put(np.asarray([[0] * 5 + [1] * 6 + [0] * 5] * 2 + [[1] * 3 + [2] * 13] * 2, np.int32))
    expected = on_one_device(dataclasses.replace(config, remat=False, offload=None))(params, tokens, targets, segments)
    order = np.arange(16) if parallel.context_axis is None else context_order(16, axes[parallel.context_axis])
    tokens, targets, segments = (None if x is None else np.asarray(x)[:, order] for x in (tokens, targets, segments))
    params = placed(params, mesh, config, parallel)
    found = on_mesh(mesh, config, parallel)(params, tokens, targets, segments)
    assert_same(found, expected, 2e-5)
    for leaf, parameter in zip(jax.tree.leaves(found[1]), jax.tree.leaves(params), strict=True):
        assert leaf.dtype == jnp.float32
        assert leaf.sharding.is_equivalent_to(parameter.sharding, leaf.ndim)


# Kernels whose parts are whole blocks.
FOR_FP8 = dataclasses.replace(CONFIG, hidden_size=256, num_heads=2, num_kv_heads=2, head_dim=128, mlp_size=256)
# As above, with recipes; against devices that have all parameters. `test_delayed_scaling_...` has delayed scaling.
IN_FP8 = {
    "blocks": (
        {"replica": 2, "fsdp": 2, "tensor": 2},
        dataclasses.replace(SHARED, replica_axis="replica"),
        {"recipe": BlockScaling(), "remat": True, "qk_norm": True, "tied_head": True},
    ),
    "tensors": ({"fsdp": 2, "tensor": 1}, SHARED, {"recipe": CurrentScaling()}),
}


@pytest.mark.parametrize("case", IN_FP8)
def test_devices_that_share_parameters_in_fp8(case, rng, mesh_of):
    """They quantize as those that have all of them."""
    axes, fsdp, changes = IN_FP8[case]
    config, mesh = dataclasses.replace(FOR_FP8, **changes), mesh_of(**axes)
    parallel = TensorParallel(axes["tensor"], fsdp=fsdp)
    params, batch = random_params(config, rng), random_batch(config, rng, (4, 256))
    found, expected = (
        on_mesh(mesh, config, how)(placed(params, mesh, config, how), *batch)
        for how in (parallel, TensorParallel(parallel.size, batch_axes=parallel.batch_axes))
    )
    # A GPU adds in another order, after which some values are rounded to the next one of FP8.
    assert_same(found, expected, 1e-6 if jax.default_backend() == "cpu" else 5e-3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"attention_sinks": True}, "attention_sinks is True"), ({"softcaps": Softcaps(9.0)}, "softcaps.scores is 9.0")],
)
def test_devices_that_share_a_sequence_take_no_sinks_and_no_caps(changes, words, rng, mesh_of):
    config, mesh = dataclasses.replace(CONFIG, **changes), mesh_of(context=2, tensor=1)
    parallel = TensorParallel(1, batch_axes=("context",), context_axis="context")
    with pytest.raises(
        ValueError, match=f"parallel.context_axis is 'context': config.{words}, which .*; leave it out, and use fsdp"
    ):
        jax.eval_shape(parallel_loss(mesh, config, parallel), random_params(config, rng), *random_batch(config, rng))


def test_a_sequence_with_too_many_segments_is_nan_on_devices_that_share_it(rng, mesh_of):
    config, mesh = dataclasses.replace(CONFIG, max_segments_per_seq=3), mesh_of(context=2, tensor=1)
    params, (tokens, _) = random_params(config, rng), random_batch(config, rng, (2, 16))
    segments = np.asarray([[0] * 5 + [1] * 11, [0, 1] * 8], np.int32)[:, context_order(16, 2)]
    logits = jit(parallel_apply(mesh, config, TensorParallel(1, **CONTEXT)))(params, tokens, None, segments)
    assert [bool(np.isnan(x).any()) for x in logits] == [False, True]


def test_a_batch_without_targets_has_no_loss(rng, mesh_of):
    parallel, mesh = TensorParallel(4, transport="xla"), mesh_of(tensor=4)  # that of "gathered"
    params, (tokens, targets) = random_params(CONFIG, rng), random_batch(CONFIG, rng)
    value, gradients = on_mesh(mesh, CONFIG, parallel)(
        placed(params, mesh, CONFIG, parallel), tokens, np.full_like(targets, -100)
    )
    assert value == 0.0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradients))


SPLIT_IN_FP8 = dataclasses.replace(CONFIG, hidden_size=32, num_heads=2, num_kv_heads=2, head_dim=16, mlp_size=64)


def test_kernels_that_are_quantized_once(rng, mesh_of):
    """Each device quantizes its parts before all microbatches, and adds their gradients in place; where replicas have
    parts of a batch, they sum each microbatch's first."""
    axes, fsdp, changes = IN_FP8["blocks"]
    config, mesh, parallel = dataclasses.replace(FOR_FP8, **changes), mesh_of(**axes), TensorParallel(2, fsdp=fsdp)
    params, before = (placed(random_params(config, rng), mesh, config, parallel) for _ in range(2))
    batch = random_batch(config, rng, (4, 256))
    how = requantize(config, parallel=parallel)
    gradient = layers.accumulate_gradients(parallel_loss(mesh, config, parallel), in_place=is_head)

    def added(params, before):
        zeros = jax.tree.map(jnp.zeros_like, params)
        operands = optim.merge_kernels(params, optim.apply_updates(params, zeros, requantize=how)[1])
        return gradient(operands, before, *batch)

    tolerance = 1e-5 if jax.default_backend() == "cpu" else 1e-3  # FP8 tensor cores add up with about 14 bits
    value, expected = on_mesh(mesh, config, parallel)(params, *batch)
    expected = jax.tree.map(lambda a, b: np.asarray(a) + np.asarray(b), expected, before)
    assert_same(jit(added)(params, before), (value, expected), tolerance)


def test_delayed_scaling_has_one_state_for_all_devices(rng, mesh_of):
    """Also where the batch and kernels are split: its next value has the amax of the whole."""
    config = dataclasses.replace(SPLIT_IN_FP8, recipe=DelayedScaling(history_len=2))
    mesh, parallel = mesh_of(AxisType.Explicit, fsdp=2, tensor=2), TensorParallel(2, fsdp=SHARED)
    params, batch, state = random_params(config, rng), random_batch(config, rng), init_scaling_state(config)
    whole = on_one_device(config)
    for _ in range(3):  # gradients reach layers beneath others at their right size once those know their own
        _, (_, state) = whole(params, *batch, None, state)
    expected, (gradients, after) = whole(params, *batch, None, state)
    value, (of_shared, found) = on_mesh(mesh, config, parallel)(
        placed(params, mesh, config, parallel), *batch, None, state
    )
    assert_close(value, expected, tolerance=1e-2)
    assert_same(of_shared, gradients, 0.2)
    for (path, history), wanted in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(after), strict=True):
        if history.ndim == 0:  # uses
            np.testing.assert_array_equal(history, wanted)
            continue
        np.testing.assert_array_equal(history[1], wanted[1], err_msg=str(path))
        np.testing.assert_allclose(history[0], wanted[0], rtol=0.2, err_msg=str(path))
    for of_layer, wanted in zip(found, after, strict=True):
        np.testing.assert_array_equal(of_layer["query"].kernel, wanted["query"].kernel)
    np.testing.assert_array_equal(found[0]["key"].activation, after[0]["query"].activation)


def test_logits_are_split_over_the_vocabulary(rng, mesh_of):
    """And operands that lie elsewhere are moved, which Explicit axes would refuse."""
    config = dataclasses.replace(CONFIG, **ALL_VARIANTS)
    params, (tokens, _) = random_params(config, rng), random_batch(config, rng)
    mesh = Mesh(mesh_of(fsdp=2, tensor=2).devices, ("fsdp", "tensor"), axis_types=(AxisType.Explicit, AxisType.Auto))
    logits = jit(parallel_apply(mesh, config, TensorParallel(2, fsdp=SHARED)))(params, tokens)
    assert_close(logits, jit(apply, static_argnums=2)(params, tokens, config), tolerance=1e-5)
    assert {shard.data.shape for shard in logits.addressable_shards} == {(2, 16, 12)}


# --------------------------------------------------------------------------------------------------- what is exchanged


def abstract_params(config, parallel, mesh):
    params = jax.eval_shape(functools.partial(init, config), jax.random.key(0))
    return jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)),
        params,
        param_specs(config, parallel),
    )


def test_a_block_gathers_twice_and_scatters_twice_each_way(rng, mesh_of):
    config, parallel, mesh = dataclasses.replace(CONFIG, num_layers=2), TensorParallel(4), mesh_of(tensor=4)
    tokens, _ = random_batch(config, rng)
    step = jax.value_and_grad(parallel_loss(mesh, config, dataclasses.replace(parallel, transport="xla")))
    found = hlo.collectives(jit(step), abstract_params(config, parallel, mesh), tokens, tokens)
    found = [each for each in found if each.axis == ("tensor",)]
    assert not any(each.inserted for each in found)
    counts = Counter()
    for each in found:
        counts[each.kind] += each.times
    # Query, key and value share a gather, as do gate and up; the head has its own. Features become time, and back.
    times = {"all-gather": 4 * 2 + 1, "reduce-scatter": 4 * 2 + 1, "all-to-all": 2}
    assert {kind: count for kind, count in counts.items() if kind != "all-reduce"} == times
    # Of statistics of the loss, and of gradients of what all devices have.
    sums = [each for each in found if each.kind == "all-reduce"]
    assert {each.times for each in sums} == {1}
    shared = ("attention_norm", "mlp_norm", "key", "value")
    params = jax.eval_shape(functools.partial(init, config), jax.random.key(0))
    size = params["final_norm"].size + sum(layer[name].size for layer in params["layers"] for name in shared)
    statistics = 3 * tokens.size  # the largest logit, and two sums, of each token
    assert sum(each.bytes for each in sums) == 4 * (size + statistics)


def test_options_reach_all_products(native_kernels, mesh_of):
    mesh = mesh_of(tensor=2)

    def program(config=CONFIG, implementation=None, transform=lambda f: f, **options):
        parallel = TensorParallel(2, **options)
        tokens = jax.ShapeDtypeStruct(TOKENS, jnp.int32)
        step = transform(parallel_loss(mesh, config, parallel, implementation=implementation))
        return str(jax.make_jaxpr(step)(abstract_params(config, parallel, mesh), tokens, tokens))

    ring = program(transport="ring")
    permutes = ring.count(" ppermute[")
    assert program(transport=Ring(bidirectional=True)).count(" ppermute[") == 2 * permutes > 0
    # Query, key and value, and gate and up, each gather once more.
    gathers = program(transport="xla", transform=jax.grad).count(" all_gather[")
    assert program(transport="xla", residual="shard", transform=jax.grad).count(" all_gather[") == gathers + 2
    calls = program(transport="p2p").count("timeout=")
    assert program(transport=P2P(timeout=12.5)).count("timeout=12.5") == calls > 0
    in_fp8 = dataclasses.replace(SPLIT_IN_FP8, recipe=CurrentScaling())
    assert "ffi_call[" in ring
    assert "ffi_call[" not in program(in_fp8, "reference", jax.grad)


@pytest.mark.parametrize(("name", "size"), [("tiny", 4), ("small", 2), ("8b", 8)])
def test_each_device_has_its_part_of_the_parameters(name, size):
    config = PRESETS[name]
    parallel, mesh = TensorParallel(size), AbstractMesh((size,), ("tensor",))
    params = abstract_params(config, parallel, mesh)
    sizes = {
        jax.tree_util.keystr(path): np.prod(leaf.sharding.shard_shape(leaf.shape)) / leaf.size
        for path, leaf in jax.tree.leaves_with_path(params)
    }
    # `tiny` has 2 key heads for 4 devices.
    shared = ("norm", "key", "value") if name == "tiny" else ("norm",)
    assert sizes == {path: 1.0 if any(word in path for word in shared) else 1 / size for path in sizes}


def test_devices_of_fsdp_and_tensor_have_parts_of_parts():
    specs = param_specs(dataclasses.replace(PRESETS["8b"], recipe=BlockScaling()), TensorParallel(2, fsdp=FSDP(8)))
    assert specs["embedding"] == P(None, ("tensor", "fsdp"))
    assert specs["head"] == P("fsdp", "tensor")
    layer = specs["layers"][0]
    assert layer["gate"] == P("fsdp", "tensor")
    assert layer["out"] == layer["down"] == P(("tensor", "fsdp"), None)
    assert layer["attention_norm"] == P()


def test_devices_that_share_seventy_billion_parameters():
    config = dataclasses.replace(
        PRESETS["8b"], recipe=BlockScaling(), hidden_size=8192, num_heads=64, mlp_size=28672, num_layers=80
    )
    layer = param_specs(config, TensorParallel(1, fsdp=FSDP(64)))["layers"][0]
    assert layer["gate"] == P("fsdp", "tensor")
    assert layer["down"] == P("tensor", "fsdp")  # 28672 / 64 rows would cut blocks
    parallel = TensorParallel(1, fsdp=FSDP(128))  # 8192 / 128 rows cut blocks, 28672 / 128 do, too
    assert param_specs(config, parallel)["layers"][0]["gate"] == P("fsdp", "tensor")
    left = requantize(config, parallel=parallel)["layers"][0]
    assert all(left[name] is None for name in ("gate", "query"))  # devices quantize these in the layer
    with pytest.raises(ValueError, match=r"fsdp.size is 96: hidden_size is 8192, .*fit this decoder: .*64"):
        param_specs(config, TensorParallel(1, fsdp=FSDP(96)))


def test_what_travels_of_parameters_that_devices_share(mesh_of):
    """Kernels in FP8 and the head in bfloat16, gradients in bfloat16; nothing large in float32."""
    config = dataclasses.replace(FOR_FP8, dtype="bfloat16", recipe=BlockScaling(), remat=True)
    mesh, parallel = mesh_of(fsdp=2, tensor=1), TensorParallel(1, fsdp=FSDP(2))
    tokens = jax.ShapeDtypeStruct((2, 128), jnp.int32)
    step = jax.jit(jax.grad(parallel_loss(mesh, config, parallel)))
    with jax.numpy_dtype_promotion("standard"):  # attention in bfloat16 needs it
        text = step.lower(abstract_params(config, parallel, mesh), tokens, tokens).as_text()
    collectives = r'"stablehlo\.(all_gather|reduce_scatter|all_to_all)".*?: \(tensor<([\dx]+)x(\w+)>\)'
    found = re.findall(collectives, text, re.DOTALL)
    large = {(name, dtype) for name, shape, dtype in found if math.prod(map(int, shape.split("x"))) > 128 * 16}
    assert large == {
        ("all_gather", "f8E4M3FN"),
        *((name, "bf16") for name in ("all_gather", "reduce_scatter", "all_to_all")),
    }


# ----------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": 0}, "size is 0: it needs"),
        ({"size": True}, "size is True"),
        ({"size": 2, "batch_axes": "data"}, r"batch_axes is 'data': name mesh axes in a tuple, \('data',\)"),
        ({"size": 2, "axis_name": 3}, r"axis_name is 3 and batch_axes is \(\): axes go by their names"),
        ({"size": 2, "batch_axes": ("data", None)}, r"batch_axes is \('data', None\): axes go by their names"),
        ({"size": 2, "transport": "nccl"}, "transport is 'nccl'; it must be one of"),
        ({"size": 2, "residual": "x"}, "residual is 'x'; it must be 'gathered' or 'shard'"),
        ({"size": 2, "context_axis": "data"}, r"context_axis is 'data' and batch_axes is \(\): name one of these"),
        ({"size": 2, "batch_axes": ("tensor",)}, "axis_name is 'tensor' and batch_axes .* once"),
    ],
)
def test_what_is_no_split(options, words):
    with pytest.raises(ValueError, match=words):
        TensorParallel(**options)


@pytest.mark.parametrize(
    ("change", "size", "words"),
    [
        ({"qk_norm": "projection"}, 2, "parallel.size is 2: config.qk_norm is 'projection', .*; use 1, and fsdp"),
        ({"latent": LATENT, "num_kv_heads": 12}, 2, "the kernels of config.latent are not split; use 1, and fsdp"),
        (
            {"experts": dataclasses.replace(EXPERTS, weighted_shared=8)},
            2,
            "of config.experts.shared, weighted_shared or",
        ),
        ({}, 5, "parallel.size is 5: num_heads is 12, which 5 does not divide; sizes that fit this decoder: 1, 2, 4$"),
        ({"mlp_size": 48}, 5, "num_heads is 12, .*: 1, 2, 3, 4, 6, 12$"),
        ({"hidden_size": 25}, 2, "hidden_size is 25, which 2 does not divide; .*: 1$"),
        ({"mlp_size": 42}, 4, "mlp_size is 42, .*: 1, 2, 3, 6$"),
        ({"vocab_size": 19}, 2, "vocab_size is 19"),
        ({"recipe": CurrentScaling()}, 2, "query has 24 columns on a device, .* multiple of 16; .*: 1$"),
        ({"recipe": CurrentScaling(), "head_dim": 8, "hidden_size": 32, "mlp_size": 64}, 2, "key has 24 columns"),
        ({"recipe": CurrentScaling(), "head_dim": 16, "hidden_size": 32}, 4, "gate has 10 columns"),
        ({"recipe": CurrentScaling(), "head_dim": 16, "mlp_size": 64}, 2, "out has 24 columns"),
    ],
)
def test_decoders_that_do_not_fit(change, size, words, mesh_of):
    config = dataclasses.replace(CONFIG, **change)
    with pytest.raises(ValueError, match=words):
        param_specs(config, TensorParallel(size))
    with pytest.raises(ValueError, match=words):
        parallel_loss(mesh_of(tensor=size), config, TensorParallel(size))


def test_meshes_that_do_not_fit(mesh_of):
    with pytest.raises(ValueError, match=r"parallel.fsdp.size is 4, and the mesh has 2 devices along 'fsdp'"):
        parallel_loss(mesh_of(fsdp=2, tensor=1), CONFIG, TensorParallel(1, fsdp=FSDP(4)))
    with pytest.raises(ValueError, match=r"hidden_size is 256, which 1 · 3 does not divide; smaller sizes .*: 2\."):
        TensorParallel(1, fsdp=FSDP(3)).check(FOR_FP8)
    with pytest.raises(ValueError, match=r"parallel names \['fsdp'\]"):
        parallel_loss(mesh_of(tensor=1), CONFIG, TensorParallel(1, fsdp=SHARED))
    with pytest.raises(ValueError, match="which the decoder's shape and recipe say"):
        TensorParallel(1, fsdp=FSDP(2, specs={}))
    with pytest.raises(ValueError, match=r"fsdp is 2: it must be a te_jax.parallel.FSDP"):
        TensorParallel(1, fsdp=2)
    with pytest.raises(ValueError, match=r"parallel.size is 2, and the mesh has 4 devices along 'tensor'"):
        parallel_loss(mesh_of(tensor=4), CONFIG, TensorParallel(2))
    with pytest.raises(ValueError, match=r"mesh has axes \('tensor',\), and parallel names \['data'\]"):
        parallel_apply(mesh_of(tensor=2), CONFIG, TensorParallel(2, batch_axes=("data",)))


def test_places_where_a_decoder_cannot_be_split(rng, mesh_of):
    params, (tokens, targets) = random_params(CONFIG, rng), random_batch(CONFIG, rng)
    parallel, mesh = TensorParallel(2), mesh_of(tensor=2)
    with pytest.raises(ValueError, match=r"parallel.axis_name is 'tensor', but no axis 'tensor' is mapped here"):
        jax.eval_shape(functools.partial(loss, config=CONFIG, parallel=parallel), params, tokens, targets)

    def mapped(parallel, mesh, config=CONFIG, **options):
        specs = param_specs(CONFIG, parallel), P(), P()
        function = functools.partial(loss, config=config, parallel=parallel)
        return functools.partial(
            jax.eval_shape, jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P(), **options)
        )

    with pytest.raises(ValueError, match=r"parallel.size is 2, and the mesh has 4 devices along 'tensor'"):
        mapped(parallel, mesh_of(tensor=4))(params, tokens, targets)
    with pytest.raises(ValueError, match=r"parallel.size is 2: vocab_size is 19, which 2 does not divide"):
        mapped(parallel, mesh, dataclasses.replace(CONFIG, vocab_size=19))(params, tokens, targets)
    with pytest.raises(ValueError, match=r"gradients of what they share would not be summed: .* check_vma=True"):
        mapped(parallel, mesh, check_vma=False)(params, tokens, targets)
    with pytest.raises(ValueError, match=r"tokens has shape \(4, 15\), a time of 15, which the 2 devices"):
        mapped(parallel, mesh)(params, tokens[:, 1:], targets[:, 1:])
