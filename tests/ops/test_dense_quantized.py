"""Operands of linear layers that come quantized: what QuantizedArrays go through on the way, and what is refused.

That each layer computes the same with them is in tests/linear/test_linear_operands.py.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import results_and_gradients
from dense_oracle import GRADIENT, RECIPES, oracle, random_case
from jax import lax
from quantize_oracle import assert_bits

from te_jax import checkpoint_policies, ops
from te_jax.hlo import buffers
from te_jax.testing import assert_close

CURRENT, BLOCK, DELAYED = RECIPES["current"], RECIPES["block"], RECIPES["delayed"]
recipes = pytest.mark.parametrize("recipe", [CURRENT, BLOCK], ids=["current", "block"])


@pytest.fixture
def case(rng):
    return random_case(rng, (2, 128), (128,), (256,), with_bias=False)


def quantized(x, recipe=CURRENT, role="kernel", **options):
    return ops.quantize(x, recipe.quantization(role), **options)


def quantized_x(x, **options):
    return quantized(x, role="activation", row_ndim=x.ndim - 1, straight_through=True, **options)


# -------------------------------------------------------------------------------------------------------------- kernels


@recipes
def test_backward_passes_keep_no_second_copy(recipe, case, capsys):
    """Of a kernel that is an argument, remat saves none, whatever its policy; stacked ones are those of the scan."""
    kernel = quantized(case.kernel, recipe)

    def layer(x, kernel):
        return jnp.sin(ops.dense(x, kernel, recipe=recipe)[..., : x.shape[-1]])

    remat = jax.checkpoint(layer, policy=checkpoint_policies.save_fp8_operands)
    jax.ad_checkpoint.print_saved_residuals(lambda x: remat(x, kernel).astype(jnp.float32).sum(), case.x)
    assert "te_dense_kernel" not in capsys.readouterr().out

    def run(x, kernels):
        return jnp.sum(lax.scan(lambda x, kernel: (layer(x, kernel), None), x, kernels)[0].astype(jnp.float32))

    stacked = jax.tree.map(lambda leaf: np.stack([leaf] * 3), kernel)
    loops = [e for e in jax.make_jaxpr(jax.grad(run))(case.x, stacked).jaxpr.eqns if e.primitive.name == "scan"]
    assert len(loops) == 2
    assert not [out for loop in loops for out in loop.outvars if out.aval.dtype == jnp.float8_e4m3fn]


def test_donation_and_host_memory(case):
    """The kernel of the next step takes the place of this one's, array by array."""

    @functools.partial(jax.jit, donate_argnums=0)
    def update(kernel, x):
        y = ops.dense(x, kernel, recipe=BLOCK)
        return jax.tree.map(lambda leaf: lax.bitcast_convert_type(leaf, leaf.dtype), kernel), y

    kernel = quantized(case.kernel, BLOCK)
    before, leaves = jax.tree.map(np.array, kernel), jax.tree.leaves(kernel)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in leaves]
    after, _ = update(kernel, case.x)
    assert all(leaf.is_deleted() for leaf in leaves)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(after)] == pointers
    device = jax.devices()[0]
    if "unpinned_host" in {memory.kind for memory in device.addressable_memories()}:
        host = jax.sharding.SingleDeviceSharding(device, memory_kind="unpinned_host")
        after = jax.device_put(after, host)
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(after)} == {"unpinned_host"}
        after = jax.device_put(after, jax.sharding.SingleDeviceSharding(device))
    jax.tree.map(assert_bits, after, before)


def test_orbax(case, tmp_path):
    checkpoint, kernel = pytest.importorskip("orbax.checkpoint"), quantized(case.kernel, BLOCK)
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "kernel", kernel)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "kernel", jax.tree.map(jnp.zeros_like, kernel))
    jax.tree.map(assert_bits, restored, kernel)


# ------------------------------------------------------------------------------------------------------------------- x


def test_straight_through_takes_no_memory(case):
    """Nothing in the program reads the zeros, and nothing is kept of them."""

    def compiled(make):
        def step(x, kernel, dy):
            return jax.vjp(lambda x, kernel: ops.dense(make(x), kernel, recipe=CURRENT), x, kernel)[1](dy)

        return jax.jit(step).lower(case.x, case.kernel, case.dy).compile()

    found, wanted = map(compiled, (quantized_x, lambda x: x))
    assert found.memory_analysis().temp_size_in_bytes == wanted.memory_analysis().temp_size_in_bytes
    assert [b for b in buffers(found, "broadcast") if b.bytes >= case.x.nbytes] == []


def test_a_producer_of_its_own(case):
    """A layer that writes FP8 has straight_through of its own making."""

    @jax.custom_vjp
    def doubled(x):
        return dataclasses.replace(quantized(2 * x, role="activation", row_ndim=2), straight_through=jnp.zeros_like(x))

    doubled.defvjp(lambda x: (doubled(x), None), lambda _, q: (2 * q.straight_through,))
    found, wanted = (
        results_and_gradients(
            lambda x, kernel, make=make: ops.dense(make(x), kernel, recipe=CURRENT), (case.x, case.kernel), case.dy
        )
        for make in (doubled, lambda x: 2 * x)
    )
    jax.tree.map(assert_bits, found, wanted)


def test_its_gradient_as_an_argument(case):
    """The cotangent of a QuantizedArray: dx in straight_through, and zeros."""
    x = quantized_x(case.x)
    _, (dx,) = results_and_gradients(lambda x: ops.dense(x, case.kernel, recipe=CURRENT), (x,), case.dy)
    assert_close(dx.straight_through, oracle(case).dx, dtype="bfloat16", tolerance=GRADIENT)
    codes = dataclasses.replace(dx, straight_through=None)
    assert not any(np.any(np.asarray(leaf).astype(np.float32)) for leaf in jax.tree.leaves(codes))


# --------------------------------------------------------------------------------------------------------------- errors

X, KERNEL = np.zeros((32, 64), jnp.bfloat16), np.zeros((64, 48), jnp.bfloat16)
QUANTIZED = quantized_x(X)


@pytest.mark.parametrize(
    ("x", "kernel", "options", "message"),
    [
        (QUANTIZED, KERNEL, {}, "recipe is None, but x is a QuantizedArray; name its recipe or pass x.dequantize()"),
        (QUANTIZED, KERNEL, {"recipe": BLOCK}, "x has 'tensor' and 'tensor' scaling, but recipe is BlockScaling"),
        (quantized(X, BLOCK, "activation"), KERNEL.T, {"recipe": BLOCK, "kernel_contracting": "last"},
         'quantize it with dataclasses.replace(recipe.quantization("activation"), '
         "transposed_scaling='block_128x128')"),
        (quantized(X, role="gradient"), KERNEL, {"recipe": CURRENT},
         "x was quantized to float8_e5m2, and activations of CurrentScaling"),
        (QUANTIZED.without_data(), KERNEL, {"recipe": CURRENT}, "x has no data copy, which the forward pass reads"),
        (quantized(X.reshape(2, 16, 64), role="activation", row_ndim=1), KERNEL, {"recipe": CURRENT},
         "x was quantized as 1 rows and 2 cols, shape (2, 16, 64); quantize it with row_ndim=2"),
        (QUANTIZED, KERNEL, {"recipe": DELAYED, "scaling_state": DELAYED.init()},
         "whose state remembers the amax of x: pass x unquantized"),
        (dataclasses.replace(QUANTIZED, straight_through=X[:2]), KERNEL, {"recipe": CURRENT},
         "x has straight_through of shape (2, 64) and dtype bfloat16; it must be float32"),
        (dataclasses.replace(QUANTIZED, straight_through=X.astype(jnp.int32)), KERNEL, {"recipe": CURRENT},
         "x has straight_through of shape (32, 64) and dtype int32; it must be float32"),
    ],
)  # fmt: skip
def test_message_names_argument_and_rule(x, kernel, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(functools.partial(ops.dense, **options), x, kernel)
