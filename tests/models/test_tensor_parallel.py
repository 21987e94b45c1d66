"""The decoder split over devices: loss and gradients of one device, what is exchanged for them, and what is refused."""

import dataclasses
import functools
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from parameters import in_turns

from te_jax import hlo, layers, optim
from te_jax.models import (
    PRESETS,
    DecoderConfig,
    RopeScaling,
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
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling
from te_jax.testing import assert_close, relative_error

# Of two devices each has 3 key heads of its own. Of four each uses one and the half of another.
CONFIG = DecoderConfig(
    vocab_size=24, num_layers=2, hidden_size=24, num_heads=12, num_kv_heads=6, head_dim=4, mlp_size=40, norm_eps=1e-3
)
TOKENS = (4, 16)
ALL_VARIANTS = {
    **{"window": (None, 5), "rope_scaling": RopeScaling("yarn", factor=4.0, original_length=8), "qk_norm": True},
    **{"activation": Activation("silu", alpha=1.7, limit=0.5, offset=1.0), "attention_sinks": True},
    **{"attention_biases": ("query", "key", "value", "out"), "zero_centered_norms": True, "scaled_embedding": True},
    "tied_head": True,
}
TRANSPORTS = ["xla", "ring", "p2p"]

# Nearly all of the time goes into compiling.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@pytest.fixture
def promotion():
    return "strict"


@pytest.fixture(autouse=True)
def _promotion(promotion):
    with jax.numpy_dtype_promotion(promotion):
        yield


@pytest.fixture
def mesh_of(require_devices):
    """mesh_of(data=2, tensor=2): a mesh of so many devices; skips the test where fewer are there."""

    def make(axis_type=AxisType.Auto, **axes):
        count = math.prod(axes.values())
        require_devices(count)
        devices = np.array(jax.devices()[:count]).reshape(*axes.values())
        return Mesh(devices, tuple(axes), axis_types=(axis_type,) * len(axes))

    return make


def random_params(config, rng):
    """Parameters as `init` has them, but with norms that are not 1, and biases and sinks that are not 0."""

    def draw(path, leaf):
        if "norm" in path[-1].key:
            return jax.device_put(np.asarray(rng.uniform(0.5, 1.5, leaf.shape), leaf.dtype))
        of_vector = leaf.ndim == 1 or path[-1].key.endswith("_bias")
        scale = 0.3 if of_vector else 1.0 if path[-1].key == "embedding" else leaf.shape[-2] ** -0.5
        return jax.device_put(np.asarray(scale * rng.standard_normal(leaf.shape), leaf.dtype))

    return jax.tree.map_with_path(draw, jax.eval_shape(functools.partial(init, config), jax.random.key(0)))


def random_batch(config, rng, shape=TOKENS):
    """Tokens and targets; a part of the targets is missing, and not the same number in every sequence."""
    tokens, targets = (
        jax.device_put(np.asarray(rng.integers(0, config.vocab_size, shape), jnp.int32)) for _ in range(2)
    )
    return tokens, jnp.where(jax.device_put(rng.random(shape) < 0.3), -100, targets)


def placed(params, mesh, config, parallel):
    return jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), params, param_specs(config, parallel)
    )


@functools.cache
def on_one_device(config):
    return jit(jax.value_and_grad(functools.partial(loss, config=config)))


@functools.cache
def with_state_on_one_device(config):
    return jit(jax.value_and_grad(lambda *operands: loss(*operands[:3], config, operands[3]), argnums=(0, 3)))


@functools.cache
def on_mesh(mesh, config, parallel):
    return jit(jax.value_and_grad(parallel_loss(mesh, config, parallel)))


def compare(config, parallel, mesh, rng, *, reference=None, tolerance, gradients=None, shape=TOKENS):
    """Loss and gradients with those of one device.

    Args:
      config, parallel, mesh: what runs.
      rng: draws parameters and tokens.
      reference: runs on one device; None for `config`.
      tolerance: relative error that passes, and
      gradients: that of gradients, if it is another.
      shape: of tokens.

    Returns:
      The errors of gradients, by their paths.
    """
    params, batch = random_params(config, rng), random_batch(config, rng, shape)
    expected, expected_gradients = on_one_device(reference or config)(params, *batch)
    params = placed(params, mesh, config, parallel)
    value, found_gradients = on_mesh(mesh, config, parallel)(params, *batch)
    assert_close(value, expected, tolerance=tolerance)
    errors = {}
    leaves = (jax.tree.leaves(tree) for tree in (expected_gradients, params))
    for (path, found), expected, parameter in zip(jax.tree.leaves_with_path(found_gradients), *leaves, strict=True):
        assert found.dtype == jnp.float32, path
        assert found.sharding.is_equivalent_to(parameter.sharding, found.ndim), path
        errors[jax.tree_util.keystr(path)] = relative_error(found, expected)
    assert max(errors.values()) <= (gradients or tolerance), errors
    return errors


@pytest.mark.parametrize(("transport", "size"), in_turns(TRANSPORTS, (4, 2)))
def test_loss_and_gradients_are_those_of_one_device(size, transport, rng, request, mesh_of):
    if transport == "p2p":
        request.getfixturevalue("native_kernels")
    compare(CONFIG, TensorParallel(size, transport=transport), mesh_of(tensor=size), rng, tolerance=1e-5)


@pytest.mark.parametrize(
    ("axes", "changes"),
    [
        ({"tensor": 2}, {}),
        ({"tensor": 4}, {}),
        ({"fsdp": 2, "tensor": 1}, {}),
        ({"fsdp": 2, "tensor": 2}, {"remat": True}),
        ({"fsdp": 2, "tensor": 4}, {"remat": True}),
        ({"fsdp": 3, "tensor": 2}, {"tied_head": False}),
    ],
)
def test_variants_of_the_decoder(axes, changes, rng, mesh_of):
    """A tied embedding is one parameter with two gradients, which devices of fsdp have parts of in another order."""
    fsdp = FSDP(axes["fsdp"], reduce_dtype="float32", min_size=0) if "fsdp" in axes else None
    config = dataclasses.replace(CONFIG, **ALL_VARIANTS | changes)
    shape = (6, 16) if axes.get("fsdp") == 3 else TOKENS
    parallel = TensorParallel(axes["tensor"], fsdp=fsdp)
    reference = dataclasses.replace(config, remat=False)
    compare(config, parallel, mesh_of(**axes), rng, reference=reference, tolerance=2e-5, shape=shape)
    if fsdp is not None:
        spec = param_specs(config, parallel)["embedding"]
        assert spec == P(None, ("fsdp", "tensor") if config.tied_head else ("tensor", "fsdp"))


def test_logits_of_variants(rng, mesh_of):
    config, mesh = dataclasses.replace(CONFIG, **ALL_VARIANTS), mesh_of(fsdp=2, tensor=2)
    parallel = TensorParallel(2, fsdp=FSDP(2, reduce_dtype="float32", min_size=0))
    params, (tokens, _) = random_params(config, rng), random_batch(config, rng)
    logits = jit(parallel_apply(mesh, config, parallel))(placed(params, mesh, config, parallel), tokens)
    assert_close(logits, jit(apply, static_argnums=2)(params, tokens, config), tolerance=1e-5)


def test_devices_that_share_a_sequence_take_no_sinks(rng, mesh_of):
    config, mesh = dataclasses.replace(CONFIG, attention_sinks=True), mesh_of(context=2, tensor=1)
    parallel = TensorParallel(1, batch_axes=("context",), context_axis="context")
    with pytest.raises(ValueError, match=r"config.attention_sinks is True, which devices that share a sequence"):
        parallel_loss(mesh, config, parallel)(random_params(config, rng), *random_batch(config, rng))


def test_devices_that_share_a_sequence_count_its_segments(rng, mesh_of):
    """A number that comes again is another segment, and a sequence with too many is NaN."""
    config, mesh = dataclasses.replace(CONFIG, num_layers=1, max_segments_per_seq=3), mesh_of(context=2, tensor=1)
    parallel = TensorParallel(1, batch_axes=("context",), context_axis="context")
    params, (tokens, _) = random_params(config, rng), random_batch(config, rng, (2, 16))
    segment_ids = jnp.asarray([[0] * 5 + [1] * 6 + [0] * 5, [0, 1] * 8], jnp.int32)
    order = context_order(16, 2)
    logits = jit(parallel_apply(mesh, config, parallel))(params, tokens[:, order], None, segment_ids[:, order])
    expected = jit(apply, static_argnums=2)(params, tokens, config, segment_ids=segment_ids)
    assert_close(logits, expected[:, order], tolerance=1e-5, equal_nan=True)
    assert [bool(jnp.isnan(x).any()) for x in logits] == [False, True]


def test_devices_that_share_a_sequence_offload_attention(rng, mesh_of):
    offload = Offload(names=["te_attention_operand", "te_attention_output"], min_size=0)
    config, mesh = dataclasses.replace(CONFIG, offload=offload), mesh_of(context=2, tensor=1)
    parallel = TensorParallel(1, batch_axes=("context",), context_axis="context")
    step = jax.value_and_grad(parallel_loss(mesh, config, parallel))
    value, _ = jax.eval_shape(step, random_params(config, rng), *random_batch(config, rng))
    assert value.shape == ()


@pytest.mark.parametrize("offload", [None, Offload(min_size=0)], ids=["on the device", "offload"])
def test_a_batch_that_is_split_too_and_blocks_that_are_recomputed(offload, rng, mesh_of):
    """Sequences have different numbers of targets, so a mean of means would be another loss."""
    parallel = TensorParallel(
        2, axis_name="model", batch_axes=("data", "more"), transport=Ring(bidirectional=True), residual="shard"
    )
    config, mesh = dataclasses.replace(CONFIG, remat=True, offload=offload), mesh_of(data=2, model=2, more=2)
    compare(config, parallel, mesh, rng, reference=CONFIG, tolerance=1e-5)


def test_a_batch_without_targets_has_no_loss(rng, mesh_of):
    parallel, mesh = TensorParallel(2), mesh_of(tensor=2)
    params, (tokens, targets) = random_params(CONFIG, rng), random_batch(CONFIG, rng)
    value, gradients = on_mesh(mesh, CONFIG, parallel)(
        placed(params, mesh, CONFIG, parallel), tokens, jnp.full_like(targets, -100)
    )
    assert value == 0.0
    assert not any(jnp.any(leaf) for leaf in jax.tree.leaves(gradients))


def test_targets_of_any_integers(rng, mesh_of):
    """The byte 156 is a target, though -100 has the same bits."""
    config, parallel = dataclasses.replace(CONFIG, vocab_size=160, num_layers=1), TensorParallel(2)
    params, (tokens, _) = random_params(config, rng), random_batch(config, rng)
    targets = jnp.full(TOKENS, 156, jnp.uint8)
    value = jit(parallel_loss(mesh_of(tensor=2), config, parallel))(params, tokens, targets)
    assert_close(value, jit(functools.partial(loss, config=config))(params, tokens, targets.astype(jnp.int32)))


@pytest.mark.parametrize("promotion", ["standard"])  # attention in bfloat16 needs it
def test_bfloat16(promotion, rng, mesh_of):
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    errors = compare(config, TensorParallel(2), mesh_of(tensor=2), rng, reference=CONFIG, tolerance=5e-2)
    assert min(errors.values()) > 1e-4


FOR_FP8 = dataclasses.replace(CONFIG, hidden_size=32, num_heads=2, num_kv_heads=2, head_dim=16, mlp_size=64)


@pytest.mark.parametrize(
    "head",
    [{}, {"head_recipe": BlockScaling(), "head_fp8_products": ("forward", "dgrad", "wgrad")}],
    ids=["head", "head in FP8"],
)
@pytest.mark.parametrize("recipe", [CurrentScaling(), BlockScaling()], ids=["current", "block"])
def test_fp8_is_as_accurate_as_on_one_device(recipe, head, rng, mesh_of):
    """Scales are those of one device, but for blocks that devices cut, and for one scale of the MLP's activation: each
    device has features with a scale of their own."""
    config, mesh = dataclasses.replace(FOR_FP8, recipe=recipe, **head), mesh_of(tensor=2)
    params, batch = random_params(config, rng), random_batch(config, rng, (1, 256))
    _, exact = on_one_device(FOR_FP8)(params, *batch)
    _, alone = on_one_device(config)(params, *batch)
    parallel = TensorParallel(2)
    _, shared = on_mesh(mesh, config, parallel)(placed(params, mesh, config, parallel), *batch)

    def error(found):
        squares = [
            (jnp.sum((one - two) ** 2), jnp.sum(two**2))
            for one, two in zip(*map(jax.tree.leaves, (found, exact)), strict=True)
        ]
        difference, norm = (math.sqrt(sum(map(float, parts))) for parts in zip(*squares, strict=True))
        return difference / norm

    assert error(jax.device_get(shared)) <= 1.2 * error(alone) + 1e-5


@pytest.mark.parametrize(
    ("changes", "axes", "options"),
    [
        ({}, {"tensor": 2}, {}),
        (ALL_VARIANTS, {"tensor": 2}, {}),
        ({}, {"data": 2, "tensor": 1}, {"batch_axes": ("data",)}),
        ({}, {"context": 2, "tensor": 2}, {"batch_axes": ("context",), "context_axis": "context"}),
    ],
    ids=["plain", "variants", "replicas", "context"],
)
def test_kernels_that_are_quantized_once(changes, axes, options, rng, mesh_of):
    """Each device quantizes its parts once for all microbatches, and adds their gradients in place; where replicas have
    parts of a batch, they sum each microbatch's first."""
    config = dataclasses.replace(FOR_FP8, recipe=CurrentScaling(), **changes)
    mesh, parallel = mesh_of(**axes), TensorParallel(axes["tensor"], **options)
    params = placed(random_params(config, rng), mesh, config, parallel)
    batches = [random_batch(config, rng, (2, 256)) for _ in range(2)]
    how = requantize(config, parallel=parallel)
    zeros = jax.tree.map(jnp.zeros_like, params)
    _, kernels = jit(lambda params: optim.apply_updates(params, zeros, requantize=how))(params)
    operands = optim.merge_kernels(params, kernels)
    gradient = layers.accumulate_gradients(parallel_loss(mesh, config, parallel), in_place=is_head)

    def both(operands, sums):
        losses = []
        for batch in batches:
            value, sums = gradient(operands, sums, *batch)
            losses.append(value)
        return losses, sums

    tolerance = 1e-5 if jax.default_backend() == "cpu" else 1e-3  # FP8 tensor cores add up with about 14 bits
    values, sums = jit(both)(operands, zeros)
    expected = [on_mesh(mesh, config, parallel)(params, *batch) for batch in batches]
    for value, (wanted, _) in zip(values, expected, strict=True):
        assert_close(value, wanted, tolerance=tolerance)
    totals = jax.tree.map(jnp.add, *(gradients for _, gradients in expected))
    for found, wanted in zip(jax.tree.leaves(sums), jax.tree.leaves(totals), strict=True):
        assert_close(found, wanted, tolerance=tolerance)


@pytest.mark.parametrize("axis_type", [AxisType.Explicit])
def test_delayed_scaling_has_one_state_for_all_devices(axis_type, rng, mesh_of):
    """Also where the batch is split: its next value has the largest magnitudes of the whole."""
    config = dataclasses.replace(FOR_FP8, recipe=DelayedScaling(history_len=2))
    mesh, parallel = mesh_of(axis_type, data=2, tensor=2), TensorParallel(2, batch_axes=("data",))
    params, batch, state = random_params(config, rng), random_batch(config, rng), init_scaling_state(config)
    whole = with_state_on_one_device(config)
    split = jit(jax.value_and_grad(parallel_loss(mesh, config, parallel), argnums=(0, 3)))
    for _ in range(3):  # gradients reach layers beneath others at their right size once those know their own
        _, (_, state) = whole(params, *batch, state)
    expected, (_, after) = whole(params, *batch, state)
    value, (_, found) = split(placed(params, mesh, config, parallel), *batch, state)
    assert_close(value, expected, tolerance=1e-2)
    for (path, history), wanted in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(after), strict=True):
        if history.ndim == 0:  # uses
            np.testing.assert_array_equal(history, wanted)
            continue
        np.testing.assert_array_equal(history[1], wanted[1], err_msg=str(path))
        np.testing.assert_allclose(history[0], wanted[0], rtol=0.2, err_msg=str(path))
    for of_layer, wanted in zip(found, after, strict=True):
        np.testing.assert_array_equal(of_layer["query"].kernel, wanted["query"].kernel)
    np.testing.assert_array_equal(found[0]["key"].activation, after[0]["query"].activation)


@pytest.mark.parametrize("recipe", [RowwiseScaling(), BlockScaling()], ids=lambda recipe: type(recipe).__name__)
def test_other_recipes_scale_the_parts_of_a_device(recipe, rng, mesh_of):
    config = dataclasses.replace(FOR_FP8, recipe=recipe)
    errors = compare(
        config,
        TensorParallel(2),
        mesh_of(tensor=2),
        rng,
        reference=FOR_FP8,
        tolerance=2e-2,
        gradients=0.25,
        shape=(1, 256),
    )
    assert min(errors.values()) > 1e-3


@pytest.mark.parametrize("tensor", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("data", [AxisType.Auto, AxisType.Explicit])
def test_logits_are_split_over_the_vocabulary(data, tensor, rng, mesh_of):
    """And operands that lie elsewhere are moved, which Explicit axes would refuse."""
    params, (tokens, _) = random_params(CONFIG, rng), random_batch(CONFIG, rng)
    parallel = TensorParallel(2, batch_axes=("data",))
    mesh = Mesh(mesh_of(data=2, tensor=2).devices, ("data", "tensor"), axis_types=(data, tensor))
    logits = jit(parallel_apply(mesh, CONFIG, parallel))(params, tokens)
    assert_close(logits, jit(apply, static_argnums=2)(params, tokens, CONFIG), tolerance=1e-5)
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
    config, parallel, mesh = dataclasses.replace(CONFIG, num_layers=3), TensorParallel(4), mesh_of(tensor=4)
    tokens, _ = random_batch(config, rng)
    found = hlo.collectives(
        jit(jax.value_and_grad(parallel_loss(mesh, config, dataclasses.replace(parallel, transport="xla")))),
        abstract_params(config, parallel, mesh),
        tokens,
        tokens,
    )
    found = [each for each in found if each.axis == ("tensor",)]
    assert not any(each.inserted for each in found)
    counts = Counter()
    for each in found:
        counts[each.kind] += each.times
    # Query, key and value share a gather, as do gate and up; the head has its own. Features become time, and back.
    times = {"all-gather": 4 * 3 + 1, "reduce-scatter": 4 * 3 + 1, "all-to-all": 2}
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

    def count(words, **options):
        parallel = TensorParallel(2, **options)
        tokens = jax.ShapeDtypeStruct(TOKENS, jnp.int32)
        step = jax.value_and_grad(parallel_loss(mesh, CONFIG, parallel))
        return str(jax.make_jaxpr(step)(abstract_params(CONFIG, parallel, mesh), tokens, tokens)).count(words)

    permutes = count(" ppermute[", transport="ring")
    assert count(" ppermute[", transport=Ring(bidirectional=True)) == 2 * permutes > 0
    # Query, key and value, and gate and up, each gather once more.
    gathers = count(" all_gather[", transport="xla")
    assert count(" all_gather[", transport="xla", residual="shard") == gathers + 2
    calls = count("timeout=", transport="p2p")
    assert count("timeout=12.5", transport=P2P(timeout=12.5)) == calls > 0


def test_the_reference_runs_no_kernel(native_kernels, mesh_of):
    config = dataclasses.replace(PRESETS["nano"], recipe=CurrentScaling())
    parallel, mesh = TensorParallel(2), mesh_of(tensor=2)
    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)

    def step(implementation):
        function = parallel_loss(mesh, config, parallel, implementation=implementation)
        return str(
            jax.make_jaxpr(jax.value_and_grad(function))(abstract_params(config, parallel, mesh), tokens, tokens)
        )

    assert "ffi_call[" in step(None)
    assert "ffi_call[" not in step("reference")


@pytest.mark.parametrize(("name", "size"), [("tiny", 4), ("small", 2), ("8b", 8)])
def test_each_device_has_its_part_of_the_parameters(name, size):
    config = PRESETS[name]
    parallel, mesh = TensorParallel(size), AbstractMesh((size,), ("tensor",))
    params = abstract_params(config, parallel, mesh)
    assert jax.tree.structure(params) == jax.tree.structure(
        jax.eval_shape(functools.partial(init, config), jax.random.key(0))
    )
    sizes = {
        jax.tree_util.keystr(path): np.prod(leaf.sharding.shard_shape(leaf.shape)) / leaf.size
        for path, leaf in jax.tree.leaves_with_path(params)
    }
    # `tiny` has 2 key heads for 4 devices.
    shared = ("norm", "key", "value") if name == "tiny" else ("norm",)
    assert sizes == {path: 1.0 if any(word in path for word in shared) else 1 / size for path in sizes}


@pytest.mark.parametrize("promotion", ["standard"])  # attention in bfloat16 needs it
@pytest.mark.parametrize(("name", "size"), [("nano", 2), ("tiny", 4), ("small", 4), ("8b", 8)])
def test_presets_trace(name, size, promotion, mesh_of):
    config = dataclasses.replace(PRESETS[name], recipe=CurrentScaling())
    parallel, mesh = TensorParallel(size, transport="ring"), mesh_of(tensor=size)
    params = abstract_params(config, parallel, mesh)
    tokens = jax.ShapeDtypeStruct((2, 8 * size), jnp.int32)
    value, gradients = jax.eval_shape(jax.value_and_grad(parallel_loss(mesh, config, parallel)), params, tokens, tokens)
    assert (value.shape, value.dtype) == ((), jnp.float32)
    assert jax.tree.map(jnp.shape, gradients) == jax.tree.map(jnp.shape, params)


# ----------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": 0}, "size is 0: it needs"),
        ({"size": True}, "size is True"),
        ({"size": 2, "batch_axes": "data"}, r"batch_axes is 'data': name mesh axes in a tuple, \('data',\)"),
        ({"size": 2, "batch_axes": ["data"]}, r"batch_axes is \['data'\]: name mesh axes in a tuple, \('data',\)"),
        ({"size": 2, "batch_axes": None}, r"batch_axes is None: name mesh axes in a tuple"),
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


def test_sizes_may_be_numbers_of_numpy(rng, mesh_of):
    sizes = {name: np.int64(value) for name, value in vars(CONFIG).items() if type(value) is int}
    config, parallel = dataclasses.replace(CONFIG, **sizes), TensorParallel(np.prod([2, 1]))
    assert (config, parallel) == (CONFIG, TensorParallel(2))
    compare(config, parallel, mesh_of(tensor=2), rng, tolerance=1e-5)


@pytest.mark.parametrize(
    ("change", "size", "words"),
    [
        ({}, 5, "parallel.size is 5: num_heads is 12, which 5 does not divide; sizes that fit this decoder: 1, 2, 4$"),
        ({"mlp_size": 48}, 5, "num_heads is 12, .*: 1, 2, 3, 4, 6, 12$"),
        ({"hidden_size": 25}, 2, "hidden_size is 25, which 2 does not divide; .*: 1$"),
        ({"mlp_size": 42}, 4, "mlp_size is 42, .*: 1, 2, 3, 6$"),
        ({"vocab_size": 19}, 2, "vocab_size is 19"),
        ({"recipe": CurrentScaling()}, 2, "query has 24 columns on a device, .* multiple of 16; .*: none$"),
        ({"recipe": CurrentScaling(), "head_dim": 8, "hidden_size": 32, "mlp_size": 64}, 2, "key has 24 columns"),
        ({"recipe": CurrentScaling(), "head_dim": 16, "hidden_size": 32}, 4, "gate has 10 columns"),
        ({"recipe": CurrentScaling(), "head_dim": 16, "mlp_size": 64}, 2, "out has 24 columns"),
    ],
)
def test_decoders_that_do_not_fit(change, size, words, mesh_of):
    config = dataclasses.replace(CONFIG, **change)
    for function in (TensorParallel(size).check, functools.partial(param_specs, parallel=TensorParallel(size))):
        with pytest.raises(ValueError, match=words):
            function(config)
    with pytest.raises(ValueError, match=words):
        parallel_loss(mesh_of(tensor=size), config, TensorParallel(size))


def test_meshes_that_do_not_fit(mesh_of):
    with pytest.raises(ValueError, match=r"parallel.size is 2, and the mesh has 4 devices along 'tensor'"):
        parallel_loss(mesh_of(tensor=4), CONFIG, TensorParallel(2))
    with pytest.raises(ValueError, match=r"mesh has axes \('tensor',\), and parallel names \['data'\]"):
        parallel_apply(mesh_of(tensor=2), CONFIG, TensorParallel(2, batch_axes=("data",)))


def test_places_where_a_decoder_cannot_be_split(rng, mesh_of):
    params, (tokens, targets) = random_params(CONFIG, rng), random_batch(CONFIG, rng)
    parallel, mesh = TensorParallel(2), mesh_of(tensor=2)
    with pytest.raises(ValueError, match=r"no such axis is mapped here: call this inside shard_map"):
        loss(params, tokens, targets, CONFIG, parallel=parallel)

    def mapped(parallel, mesh, config=CONFIG, **options):
        specs = param_specs(CONFIG, parallel), P(), P()
        function = functools.partial(loss, config=config, parallel=parallel)
        return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P(), **options)

    with pytest.raises(ValueError, match=r"parallel.size is 2, and the mesh has 4 devices along 'tensor'"):
        mapped(parallel, mesh_of(tensor=4))(params, tokens, targets)
    with pytest.raises(ValueError, match=r"parallel.size is 2: vocab_size is 19, which 2 does not divide"):
        mapped(parallel, mesh, dataclasses.replace(CONFIG, vocab_size=19))(params, tokens, targets)
    with pytest.raises(ValueError, match=r"gradients of what they share would not be summed: .* check_vma=True"):
        mapped(parallel, mesh, check_vma=False)(params, tokens, targets)
    with pytest.raises(ValueError, match=r"tokens has shape \(4, 15\), a time of 15, which the 2 devices"):
        mapped(parallel, mesh)(params, tokens[:, 1:], targets[:, 1:])
