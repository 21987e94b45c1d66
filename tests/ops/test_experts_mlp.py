"""MLPs of experts as one operation with block scaling, against the operations that it stands for."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.quantize_oracle import assert_bits

from te_jax import ops
from te_jax.ops import Activation
from te_jax.ops.experts_mlp import experts_mlp, is_fused
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling
from te_jax.testing import assert_close

TOKENS, TOP_K, IN, HIDDEN, OUT, EXPERTS = 160, 2, 192, 144, 128, 4
FUNCTIONS = {
    "swiglu": Activation("silu"),
    "gpt_oss": Activation("silu", alpha=1.702, limit=7.0, offset=1.0),
    "geglu": Activation("gelu"),
}
OPTIONS = {"recipe": BlockScaling(), "implementation": None, "accumulate": True}
LOADS = {
    "drawn": None,
    "one has all": lambda choices: np.stack([np.full(len(choices), 2), np.full(len(choices), -1)], axis=1),
    "none has any": lambda choices: np.full_like(choices, -1),
    "the last are empty": lambda choices: choices % 2,
}


def draw(rng, dtype="bfloat16", load="drawn"):
    def normal(*shape, scale=1.0):
        return jax.device_put((scale * rng.standard_normal(shape)).astype(np.float32).astype(jnp.dtype(dtype)))

    choices = np.argsort(rng.random((TOKENS, EXPERTS)), axis=1)[:, :TOP_K]
    choices = choices if LOADS[load] is None else LOADS[load](choices)
    shapes = ((IN, HIDDEN), (IN, HIDDEN), (HIDDEN, OUT))
    kernels = tuple(normal(EXPERTS, *shape, scale=shape[0] ** -0.5) for shape in shapes)
    weights = jax.device_put(rng.uniform(0.1, 1.0, (TOKENS, TOP_K)).astype(np.float32))
    return normal(TOKENS, IN), weights, kernels, jax.device_put(choices.astype(np.int32)), normal(TOKENS, OUT)


permutation_of = jax.jit(functools.partial(ops.group_by_expert, num_experts=EXPERTS, align=128))


def fused(x, weights, kernels, permutation, function=FUNCTIONS["swiglu"], accumulators=(None,) * 3, **options):
    options = OPTIONS | {"wgrad_accumulator": accumulators, "activation": function} | options
    return experts_mlp(x, weights, permutation.group_sizes, permutation, kernels, **options)


def apart(x, weights, kernels, permutation, function=FUNCTIONS["swiglu"], accumulators=(None,) * 3, **options):
    options = OPTIONS | options
    of_rows, sizes = ops.permute_weights(weights, permutation)[:, None], permutation.group_sizes
    rows = ops.permute(x, permutation)
    gate, up = ops.grouped_dense(rows, kernels[:2], sizes, wgrad_accumulator=accumulators[:2], **options)
    h = ops.gated_activation(gate, up, function)
    h = (h.astype(jnp.float32) * of_rows).astype(h.dtype)
    return ops.unpermute(
        ops.grouped_dense(h, kernels[2], sizes, wgrad_accumulator=accumulators[2], **options), permutation
    )


@functools.cache
def step_of(layer, function="swiglu", **options):
    @jax.jit
    def step(x, weights, kernels, choices, dy):
        permutation = permutation_of(choices)
        run = functools.partial(layer, permutation=permutation, function=FUNCTIONS[function], **options)
        y, vjp = jax.vjp(lambda *a: run(*a), x, weights, kernels)
        return y, vjp(dy)

    return step


def assert_near(found, wanted, tolerance):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        if not np.asarray(other).any():
            assert not np.asarray(one).any()
        else:
            assert_close(one, other, tolerance=tolerance)


def test_values_and_gradients(rng):
    """Of x, of the weights and of the kernels, for all loads by one program; zeros where there are no tokens."""
    options = {"implementation": "native", "kernel_contracting": "last"}
    steps = [step_of(layer, "gpt_oss", **options) for layer in (fused, apart)]
    for load in LOADS:
        x, weights, kernels, *others = draw(rng, "float32", load)
        kernels = tuple(np.ascontiguousarray(np.asarray(kernel).mT) for kernel in kernels)  # as checkpoints have them
        assert_near(
            *(step(x, weights, kernels, *others) for step in steps), 1e-3
        )  # the activation is rounded once, not twice
    assert all(step._cache_size() == 1 for step in steps)


def test_what_unused_rows_hold_changes_no_bit(rng):
    """Without a permutation, where rows come from other devices."""
    x, weights, kernels, choices, dy = draw(rng)
    permutation = permutation_of(choices)

    @jax.jit
    def permuted(x, weights, dy):
        return ops.permute(x, permutation), ops.permute_weights(weights, permutation), ops.permute(dy, permutation)

    rows, of_rows, drows = map(np.asarray, permuted(x, weights, dy))
    unused = (np.arange(len(rows)) >= np.sum(permutation.group_sizes))[:, None]
    assert unused.any()

    @jax.jit
    def step(x, of_rows, kernels, dy):
        options = OPTIONS | {"activation": FUNCTIONS["swiglu"], "wgrad_accumulator": (None,) * 3}
        y, vjp = jax.vjp(
            lambda *a: experts_mlp(*a[:2], permutation.group_sizes, None, a[2], **options), x, of_rows, kernels
        )
        return y, vjp(dy)

    y, gradients = step(rows, of_rows, kernels, drows)
    nan, inf = (np.asarray(value, rows.dtype) for value in (np.nan, np.inf))
    anything = step(np.where(unused, nan, rows), of_rows, kernels, np.where(unused, inf, drows))
    jax.tree.map(assert_bits, anything, (y, gradients))
    wanted_y, (wanted_dx, wanted_dweights, wanted_dkernels) = step_of(fused)(x, weights, kernels, choices, dy)
    assert_close(ops.unpermute(y, permutation), wanted_y, tolerance=1e-5)
    assert_close(ops.unpermute(gradients[0], permutation), wanted_dx, tolerance=1e-5)
    jax.tree.map(assert_bits, gradients[2], wanted_dkernels)
    jax.tree.map(assert_bits, ops.permute_weights(wanted_dweights, permutation), gradients[1])


def test_passes_over_rows(rng):
    """No product runs twice, none is left out, and nothing lies in memory only to be quantized."""
    x, weights, kernels, choices, dy = draw(rng)
    names = re.findall(r"@(te_\w+)\(", step_of(fused).lower(x, weights, kernels, choices, dy).as_text())
    assert names.count("te_grouped_gemm") == 8
    assert names.count("te_quantize_blocks_of_rows") == 3  # x, its transposed copy, dy
    assert names.count("te_quantize_blocks") == 3  # kernels
    assert names.count("te_activation_blocks") == names.count("te_activation_gradient_blocks") == 1


def test_policies_keep_what_the_backward_pass_reads(rng):
    """Where gate, up and the kernels in FP8 are kept, no product runs twice, nor where they lie in host memory."""
    x, weights, kernels, choices, _ = draw(rng)
    run = functools.partial(fused, permutation=permutation_of(choices))
    names = ("te_moe_preactivation", "te_dense_kernel")
    policies = jax.checkpoint_policies
    offload = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(names),
        offload_src="device",
        offload_dst="pinned_host",
    )
    for policy in (policies.save_only_these_names(*names), offload):
        kept = jax.checkpoint(run, policy=policy)
        step = jax.jit(jax.value_and_grad(lambda *a, kept=kept: kept(*a).astype(jnp.float32).sum(), (0, 1, 2)))
        assert step.lower(x, weights, kernels).as_text().count("@te_grouped_gemm") == 8


def test_recipes():
    assert is_fused(BlockScaling())
    assert not any(map(is_fused, (None, CurrentScaling(), RowwiseScaling(), DelayedScaling())))


def test_refusals(rng):
    x, weights, kernels, choices, _ = draw(rng)
    permutation = permutation_of(choices)
    refused = {
        "kernel[1] has shape (4, 192, 128), but kernel[0] has (4, 192, 144)": (kernels[0], kernels[1][..., :128]),
        "kernel[0] has shape (4, 176, 144); for 4 group_sizes": (kernels[0][:, :176], kernels[1][:, :176]),
    }
    for message, changed in refused.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            fused(x, weights, (*changed, kernels[2]), permutation)
    with pytest.raises(ValueError, match=re.escape("kernel[2] has shape (4, 128, 128); for 4 group_sizes")):
        fused(x, weights, (*kernels[:2], kernels[2][:, :128]), permutation)
    accumulators = (None, None, jnp.zeros((4, 3, 3)))
    with pytest.raises(ValueError, match=re.escape("wgrad_accumulator[2] has shape (4, 3, 3)")):
        fused(x, weights, kernels, permutation, accumulators=accumulators)
