"""The decoder whose parameters devices share: loss and gradients of devices that have all of them, and what travels."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_tensor_parallel import ALL_VARIANTS, jit, mesh_of, placed, random_batch, random_params

from te_jax import layers, optim
from te_jax.models import (
    PRESETS,
    DecoderConfig,
    Experts,
    TensorParallel,
    apply,
    init_scaling_state,
    is_head,
    loss,
    parallel_apply,
    parallel_loss,
    param_specs,
    requantize,
)
from te_jax.offload import Offload
from te_jax.parallel import FSDP, context_order
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling, products
from te_jax.testing import assert_close

__all__ = ["mesh_of"]  # a fixture

CONFIG = DecoderConfig(
    vocab_size=32, num_layers=2, hidden_size=256, num_heads=2, num_kv_heads=2, head_dim=128, mlp_size=256
)
BLOCK = {"recipe": BlockScaling(), "remat": True}
EXPERTS = {"experts": Experts(num_experts=2, router=layers.Router(top_k=1)), "remat": True}
SHARED = FSDP(2, reduce_dtype="float32")
# Changes of the decoder, of how devices share it, and axes of the mesh.
CASES = {
    "plain": ({}, {}, {"fsdp": 2, "tensor": 1}),
    "recomputed, in blocks": (BLOCK, {}, {"fsdp": 2, "tensor": 1}),
    "all kept": (BLOCK | {"remat": False}, {"keep": 9}, {"fsdp": 2, "tensor": 1}),
    "gathered one ahead of another": (BLOCK, {"keep": 0, "prefetch_bytes": 10**9}, {"fsdp": 2, "tensor": 1}),
    "by rows": ({"recipe": RowwiseScaling()}, {}, {"fsdp": 2, "tensor": 1}),
    "by tensors": ({"recipe": CurrentScaling()}, {}, {"fsdp": 2, "tensor": 1}),
    "offloaded": (BLOCK | {"offload": Offload(min_size=0)}, {}, {"fsdp": 2, "tensor": 1}),
    "offloaded by names of a block": (
        {"offload": Offload(["te_attention_output"], min_size=0)},
        {},
        {"fsdp": 2, "tensor": 1},
    ),
    "tensor parallel": (BLOCK, {}, {"fsdp": 2, "tensor": 2}),
    "recipes of products": (
        BLOCK | {"recipe": products(forward=BlockScaling(), wgrad=RowwiseScaling())},
        {},
        {"fsdp": 2, "tensor": 2},
    ),
    "replicas": (BLOCK, {"replica_axis": "replica"}, {"replica": 2, "fsdp": 2, "tensor": 1}),
    "experts": (EXPERTS | BLOCK, {}, {"fsdp": 2, "tensor": 1}),
    "all variants": (ALL_VARIANTS | BLOCK, {}, {"fsdp": 2, "tensor": 2}),
    "experts with biases": (
        EXPERTS | BLOCK | {"experts": dataclasses.replace(EXPERTS["experts"], biases=True)},
        {},
        {"fsdp": 2, "tensor": 2},
    ),
}


@functools.cache
def gradient_of(mesh, config, parallel, *, with_state=False):
    function = parallel_loss(mesh, config, parallel)
    return jit(jax.value_and_grad(function, argnums=(0, 3) if with_state else 0))


def whole(parallel):
    """The same devices, each of which has all parameters."""
    return TensorParallel(parallel.size, batch_axes=parallel.batch_axes)


def assert_same(found, expected, tolerance=1e-6):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(one, jax.device_get(other), tolerance=tolerance)


IN_MINUTES = ("plain", "recomputed, in blocks", "tensor parallel")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in IN_MINUTES else pytest.mark.slow) for case in CASES]
)
def test_loss_and_gradients_are_those_of_whole_parameters(case, rng, mesh_of):
    changes, options, axes = CASES[case]
    config, mesh = dataclasses.replace(CONFIG, **changes), mesh_of(**axes)
    parallel = TensorParallel(axes["tensor"], fsdp=dataclasses.replace(SHARED, **options))
    params, batch = random_params(config, rng), random_batch(config, rng, (4, 256))
    value, found = gradient_of(mesh, config, parallel)(placed(params, mesh, config, parallel), *batch)
    of_whole = dataclasses.replace(config, offload=None)
    expected = gradient_of(mesh, of_whole, whole(parallel))(placed(params, mesh, config, whole(parallel)), *batch)
    # A GPU adds in another order, after which some values are rounded to the next one of FP8.
    in_order = jax.default_backend() == "cpu" or config.recipe is None
    assert_same((value, found), expected, 1e-6 if in_order else 5e-3)
    for (path, leaf), spec in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(param_specs(config, parallel)), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), leaf.ndim), path


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2])
def test_packed_documents(tensor, rng, mesh_of):
    config, mesh = dataclasses.replace(CONFIG, **BLOCK, max_segments_per_seq=4), mesh_of(fsdp=2, tensor=tensor)
    parallel = TensorParallel(tensor, fsdp=SHARED)
    params, batch = random_params(config, rng), random_batch(config, rng, (4, 256))
    segment_ids = jnp.asarray(np.sort(rng.integers(0, 4, (4, 256)), axis=1), jnp.int32)
    found, expected = (
        gradient_of(mesh, config, how)(placed(params, mesh, config, how), *batch, None, segment_ids)
        for how in (parallel, whole(parallel))
    )
    assert_same(found, expected)
    without = gradient_of(mesh, config, parallel)(placed(params, mesh, config, parallel), *batch)
    assert float(without[0]) != float(found[0])


CONTEXT = {
    "with a batch and tensor parallelism": (
        TensorParallel(2, batch_axes=("data", "context"), context_axis="context"),
        {"data": 2, "context": 2, "tensor": 2},
    ),
    "of those that share parameters": (
        TensorParallel(1, fsdp=FSDP(2, reduce_dtype="float32"), context_axis="fsdp"),
        {"fsdp": 2, "tensor": 1},
    ),
    "beside those that share parameters": (
        TensorParallel(1, batch_axes=("context",), fsdp=FSDP(2, reduce_dtype="float32"), context_axis="context"),
        {"fsdp": 2, "context": 2, "tensor": 1},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CONTEXT)
def test_devices_that_share_sequences(case, rng, mesh_of):
    parallel, axes = CONTEXT[case]
    config, mesh = dataclasses.replace(CONFIG, remat=True), mesh_of(**axes)
    params, (tokens, targets) = random_params(config, rng), random_batch(config, rng, (4, 256))
    segment_ids = jnp.asarray(np.sort(rng.integers(0, 3, (4, 256)), axis=1), jnp.int32)
    order = context_order(256, axes[parallel.context_axis])
    ordered = [x[:, order] for x in (tokens, targets)]
    of_devices = placed(params, mesh, config, parallel)
    found = gradient_of(mesh, config, parallel)(of_devices, *ordered, None, segment_ids[:, order])
    expected = jax.jit(jax.value_and_grad(loss), static_argnums=3)(
        params, tokens, targets, config, segment_ids=segment_ids
    )
    assert_same(found, expected, 1e-5)
    if parallel.size > 1:
        logits = parallel_apply(mesh, config, parallel)(of_devices, ordered[0])
        assert_close(np.asarray(logits), np.asarray(apply(params, tokens, config)[:, order]), tolerance=1e-5)


@pytest.mark.slow
def test_experts_that_devices_have_are_not_gathered(rng, mesh_of):
    """A device's own compute the tokens of all, so that their gradients are sums already."""
    config, mesh = dataclasses.replace(CONFIG, **EXPERTS, recipe=BlockScaling()), mesh_of(fsdp=2, tensor=1)
    parallel = TensorParallel(1, expert_axes=("fsdp", "tensor"), fsdp=SHARED)
    replicated = dataclasses.replace(whole(parallel), expert_axes=parallel.expert_axes)
    assert param_specs(config, parallel)["layers"][0]["gate"] == P(("fsdp", "tensor"))
    params, batch = random_params(config, rng), random_batch(config, rng, (4, 256))
    found, expected = (
        gradient_of(mesh, config, how)(placed(params, mesh, config, how), *batch) for how in (parallel, replicated)
    )
    assert_same(found, expected)


@pytest.mark.slow
def test_delayed_scaling_has_one_state_for_all_devices(rng, mesh_of):
    config, mesh = dataclasses.replace(CONFIG, recipe=DelayedScaling(history_len=2)), mesh_of(fsdp=2, tensor=1)
    parallel, state = TensorParallel(1, fsdp=SHARED), init_scaling_state(config)
    params, batch = random_params(config, rng), random_batch(config, rng, (4, 128))
    found, expected = (
        gradient_of(mesh, config, how, with_state=True)(placed(params, mesh, config, how), *batch, state)
        for how in (parallel, whole(parallel))
    )
    assert_same(found, expected)


@pytest.mark.parametrize(
    "changes", [{}, ALL_VARIANTS, {"recipe": RowwiseScaling()}], ids=["plain", "variants", "by rows"]
)
def test_microbatches_of_kernels_that_are_quantized_once(changes, rng, mesh_of):
    """Each device quantizes its parts, and adds to its parts of the sums."""
    config, mesh = dataclasses.replace(CONFIG, **BLOCK | changes), mesh_of(fsdp=2, tensor=1)
    parallel = TensorParallel(1, fsdp=SHARED)
    params = placed(random_params(config, rng), mesh, config, parallel)
    batches = [random_batch(config, rng, (2, 128)) for _ in range(2)]
    zeros = jax.tree.map(jnp.zeros_like, params)
    how = requantize(config, parallel=parallel)
    _, kernels = jit(lambda params: optim.apply_updates(params, zeros, requantize=how))(params)
    operands = optim.merge_kernels(params, kernels)
    gradient = layers.accumulate_gradients(parallel_loss(mesh, config, parallel), in_place=is_head)

    def both(operands):
        _, sums = gradient(operands, None, *batches[0])
        return gradient(operands, sums, *batches[1])[1]

    sums = jit(both)(operands)
    each = [gradient_of(mesh, config, parallel)(params, *batch)[1] for batch in batches]
    assert_same(sums, jax.tree.map(jnp.add, *each))


def test_logits(rng, mesh_of):
    mesh, parallel = mesh_of(fsdp=2, tensor=1), TensorParallel(1, fsdp=SHARED)
    params, (tokens, _) = random_params(CONFIG, rng), random_batch(CONFIG, rng, (2, 16))
    found, expected = (
        parallel_apply(mesh, CONFIG, how)(placed(params, mesh, CONFIG, how), tokens)
        for how in (parallel, whole(parallel))
    )
    assert_same(found, expected)


def test_what_travels(mesh_of):
    """Kernels in FP8 and the head in bfloat16, gradients in bfloat16; nothing large in float32."""
    config, mesh = dataclasses.replace(CONFIG, dtype="bfloat16", **BLOCK), mesh_of(fsdp=2, tensor=1)
    parallel = TensorParallel(1, fsdp=FSDP(2))
    params = jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)),
        jax.eval_shape(lambda: random_params(config, np.random.default_rng(0))),
        param_specs(config, parallel),
    )
    tokens = jax.ShapeDtypeStruct((2, 128), jnp.int32)
    with jax.numpy_dtype_promotion("standard"):  # attention in bfloat16 needs it
        text = jax.jit(jax.grad(parallel_loss(mesh, config, parallel))).lower(params, tokens, tokens).as_text()
    found = re.findall(
        r'"stablehlo\.(all_gather|reduce_scatter|all_to_all)".*?: \(tensor<([\dx]+)x(\w+)>\)', text, re.S
    )
    large = {
        (name, dtype) for name, shape, dtype in found if np.prod([int(size) for size in shape.split("x")]) > 128 * 16
    }
    assert large == {
        ("all_gather", "f8E4M3FN"),
        ("all_gather", "bf16"),
        ("reduce_scatter", "bf16"),
        ("all_to_all", "bf16"),
    }


def test_each_device_has_its_part_of_the_parameters():
    specs = param_specs(dataclasses.replace(PRESETS["8b"], recipe=BlockScaling()), TensorParallel(2, fsdp=FSDP(8)))
    assert specs["embedding"] == P(None, ("tensor", "fsdp"))
    assert specs["head"] == P("fsdp", "tensor")
    layer = specs["layers"][0]
    assert layer["gate"] == P("fsdp", "tensor")
    assert layer["out"] == layer["down"] == P(("tensor", "fsdp"), None)
    assert layer["attention_norm"] == P()


def test_seventy_billion_parameters_fit_64_devices_and_not_128():
    config = dataclasses.replace(
        PRESETS["8b"], recipe=BlockScaling(), hidden_size=8192, num_heads=64, mlp_size=28672, num_layers=80
    )
    layer = param_specs(config, TensorParallel(1, fsdp=FSDP(64)))["layers"][0]
    assert layer["gate"] == P("fsdp", "tensor")
    assert layer["down"] == P("tensor", "fsdp")  # 28672 / 64 rows would cut blocks
    with pytest.raises(ValueError, match=r"fsdp.size is 128: \w+ has shape .* whole blocks of 128; .*64.*replica_axis"):
        param_specs(config, TensorParallel(1, fsdp=FSDP(128)))


def test_what_does_not_fit(mesh_of):
    with pytest.raises(ValueError, match=r"parallel.fsdp.size is 4, and the mesh has 2 devices along 'fsdp'"):
        parallel_loss(mesh_of(fsdp=2, tensor=1), CONFIG, TensorParallel(1, fsdp=FSDP(4)))
    with pytest.raises(ValueError, match=r"hidden_size is 256, which 1 · 3 does not divide; smaller sizes .*: 2\."):
        TensorParallel(1, fsdp=FSDP(3)).check(CONFIG)
    with pytest.raises(ValueError, match=r"parallel names \['fsdp'\]"):
        parallel_loss(mesh_of(tensor=1), CONFIG, TensorParallel(1, fsdp=SHARED))
    with pytest.raises(ValueError, match="which the decoder's shape and recipe say"):
        TensorParallel(1, fsdp=FSDP(2, specs={}))
    with pytest.raises(ValueError, match=r"fsdp is 2: it must be a te_jax.parallel.FSDP"):
        TensorParallel(1, fsdp=2)
