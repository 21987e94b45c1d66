"""Kernels that are quantized once, and what happens to QuantizedArrays on the way."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_oracle import FORWARD, GRADIENT, RECIPES, oracle, random_case, wide
from jax import lax
from parameters import in_turns

from te_jax import checkpoint_policies, ops
from te_jax.quantized import QuantizedArray
from te_jax.testing import assert_close

recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
CURRENT, BLOCK = RECIPES["current"], RECIPES["block"]


def quantized(kernel, recipe, **options):
    delayed = {"amax": jnp.max(jnp.abs(kernel)).astype(jnp.float32)} if hasattr(recipe, "init") else {}
    return ops.quantize(kernel, recipe.quantization("kernel"), **delayed, **options)


def state_of(recipe):
    return jax.tree.map(lambda h: h + 6, recipe.init()) if hasattr(recipe, "init") else None


def loss(x, kernel, dy, recipe, **options):
    y = ops.dense(x, kernel, recipe=recipe, scaling_state=state_of(recipe), **options)
    return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32))


@pytest.mark.parametrize(("recipe", "kernel_contracting"), in_turns(RECIPES, ("last", "first")))
def test_value_and_input_gradient(kernel_contracting, recipe, implementation, rng):
    case = random_case(rng, (4, 32), (128,), (256,), with_bias=False, kernel_contracting=kernel_contracting)
    kernel = quantized(case.kernel, recipe, implementation=implementation)
    options = {"kernel_contracting": kernel_contracting, "implementation": implementation}
    y = ops.dense(case.x, kernel, recipe=recipe, scaling_state=state_of(recipe), **options)
    dx = jax.jit(jax.grad(functools.partial(loss, recipe=recipe, **options)))(case.x, kernel, case.dy)
    expected = oracle(case)
    assert_close(y, expected.y, dtype="bfloat16", tolerance=FORWARD)
    assert_close(dx, expected.dx, dtype="bfloat16", tolerance=GRADIENT)


def test_groups_of_dimensions(rng):
    case = random_case(rng, (32,), (2, 32), (3, 16), with_bias=False)
    kernel = quantized(case.kernel, CURRENT, row_ndim=2)
    y = ops.dense(case.x, kernel, recipe=CURRENT, contracting_ndim=2)
    assert_close(y, oracle(case).y, dtype="bfloat16", tolerance=FORWARD)


def test_its_gradient_is_none_of_its_own(rng):
    """FP8 values have no use for one: the weight gradient goes to an accumulator, and is refused without."""
    case = random_case(rng, (32,), (64,), (48,), with_bias=False)
    kernel = quantized(case.kernel, CURRENT)
    for gradient in (jax.grad(loss, argnums=1), jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=3)):
        with pytest.raises(NotImplementedError, match=r"has no gradient of its own: pass wgrad_accumulator and"):
            gradient(case.x, kernel, case.dy, CURRENT)

    def accumulating(kernel, accumulator):
        return loss(case.x, kernel, case.dy, CURRENT, wgrad_accumulator=accumulator)

    zeros = jnp.zeros(case.kernel.shape)
    with pytest.raises(ValueError, match="only kernel is differentiated"):
        jax.grad(accumulating)(kernel, zeros)
    gradient, after = jax.grad(accumulating, argnums=(0, 1))(kernel, zeros)
    assert all(not np.any(wide(leaf)) for leaf in jax.tree.leaves(gradient))
    assert_close(after, oracle(case).dkernel, dtype="float32", tolerance=GRADIENT)


def test_one_quantization_for_all_microbatches(rng):
    """The loop holds no quantization of the kernel."""
    case = random_case(rng, (3, 32), (64,), (48,), with_bias=False)

    def run(x, kernel, dy):
        kernel = quantized(kernel, CURRENT)
        return lax.map(lambda a: jax.grad(loss)(a[0], kernel, a[1], CURRENT), (x, dy))

    assert_close(jax.jit(run)(case.x, case.kernel, case.dy), oracle(case).dx, dtype="bfloat16", tolerance=GRADIENT)
    text = jax.jit(run).lower(case.x, case.kernel, case.dy).as_text()
    body = text[text.index("stablehlo.while") :]
    assert "64x48xbf16" not in body


# ------------------------------------------------------------------------------------------- QuantizedArrays as pytrees


@pytest.fixture(params=[CURRENT, BLOCK], ids=["current", "block"])
def recipe(request):
    return request.param


@pytest.fixture
def case(rng):
    return random_case(rng, (32,), (128,), (256,), with_bias=False)


@pytest.fixture
def kernel(case, recipe):
    return quantized(case.kernel, recipe)


def assert_same(one: QuantizedArray, other: QuantizedArray):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_jit_and_eval_shape(kernel):
    assert_same(jax.jit(lambda k: k)(kernel), kernel)
    shapes = jax.eval_shape(lambda k: k, kernel)
    assert (shapes.shape, shapes.dtype, shapes.data.dtype) == ((128, 256), jnp.bfloat16, jnp.float8_e4m3fn)
    assert_close(jax.jit(lambda k: k.dequantize())(kernel), kernel.dequantize())


def test_dequantize(kernel, case):
    for copy, arrays in ((kernel, 4), (kernel.without_data(), 2), (kernel.without_transposed(), 2)):
        assert (copy.shape, copy.size, len(jax.tree.leaves(copy))) == ((128, 256), 128 * 256, arrays)
        assert_close(copy.dequantize(), wide(case.kernel), dtype="bfloat16", tolerance=0.035)


def test_scan_over_stacked_kernels(rng, recipe):
    x = jax.device_put(np.asarray(rng.standard_normal((32, 128)), jnp.bfloat16))
    kernels = jax.device_put(np.asarray(rng.standard_normal((3, 128, 128)) / 11, jnp.bfloat16))
    stacked = jax.vmap(functools.partial(quantized, recipe=recipe))(kernels)
    y, _ = jax.jit(lambda x, k: lax.scan(lambda x, k: (ops.dense(x, k, recipe=recipe), None), x, k))(x, stacked)
    expected = x
    for i in range(3):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], stacked)
        assert_same(layer, quantized(kernels[i], recipe))
        expected = ops.dense(expected, layer, recipe=recipe)
    assert_close(y, expected, tolerance=1e-3)


def test_remat_does_not_keep_a_second_copy(kernel, case, recipe, capsys):
    """A kernel that is an argument has no name, so no policy saves it again."""

    def plain(x, kernel):
        return loss(jnp.sin(x), kernel, case.dy, recipe)

    remat = jax.checkpoint(plain, policy=checkpoint_policies.save_fp8_operands)
    assert_close(jax.jit(jax.grad(remat))(case.x, kernel), jax.jit(jax.grad(plain))(case.x, kernel))
    jax.ad_checkpoint.print_saved_residuals(lambda x: remat(x, kernel), case.x)
    kept = [line for line in capsys.readouterr().out.splitlines() if "te_dense_kernel" in line]
    assert kept == []


def test_stacked_layers_keep_no_second_copy(kernel, case, recipe):
    """As of a frozen model with adapters: the backward pass reads the kernels that the scan is given."""
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), kernel)

    def run(x, kernels):
        def layer(x, kernel):
            return jnp.sin(ops.dense(x, kernel, recipe=recipe)[..., : x.shape[-1]]), None

        return jnp.sum(lax.scan(layer, x, kernels)[0].astype(jnp.float32))

    program = jax.make_jaxpr(jax.grad(run))(case.x, stacked)
    loops = [eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "scan"]
    assert len(loops) == 2
    assert not [out for loop in loops for out in loop.outvars if out.aval.dtype == jnp.float8_e4m3fn]


def test_donation(case, recipe):
    """The kernel of the next step takes the place of this one's, array by array."""

    @functools.partial(jax.jit, donate_argnums=0)
    def update(kernel, x):
        y = ops.dense(x, kernel, recipe=recipe)
        return jax.tree.map(lambda leaf: lax.bitcast_convert_type(leaf, leaf.dtype), kernel), y

    kernel = quantized(case.kernel, recipe)
    expected = ops.dense(case.x, kernel, recipe=recipe)
    leaves, pointers = jax.tree.leaves(kernel), [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(kernel)]
    after, y = update(kernel, case.x)
    assert all(leaf.is_deleted() for leaf in leaves)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(after)] == pointers
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host"])
def test_device_put_to_host_memory_and_back(kind, kernel):
    device = jax.devices()[0]
    if kind not in {memory.kind for memory in device.addressable_memories()}:
        pytest.skip(f"this backend has no {kind} memory")
    host = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
    moved = jax.device_put(kernel, host)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(moved)} == {kind}
    back = jax.device_put(moved, jax.sharding.SingleDeviceSharding(device))
    assert_same(back, kernel)


def test_orbax(kernel, tmp_path):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "kernel", kernel)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "kernel", jax.tree.map(jnp.zeros_like, kernel))
    assert_same(restored, kernel)


def test_export(kernel):
    pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
    exported = jax.export.export(jax.jit(lambda kernel: (kernel, kernel.dequantize())))(kernel)
    after, value = jax.export.deserialize(exported.serialize()).call(kernel)
    assert_same(after, kernel)
    assert_close(value, kernel.dequantize())


def test_named(kernel):
    named = jax.make_jaxpr(lambda k: k.named("te_dense_kernel"))(kernel)
    names = [eqn.params["name"] for eqn in named.jaxpr.eqns if eqn.primitive.name == "name"]
    assert names == ["te_dense_kernel"] * 4


def test_as_a_parameter_of_an_optimizer_step(case, recipe):
    """FP8 primary weights: a step takes the master copy, and returns it with the kernel for the next one."""

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(master, kernel, accumulator, x, dy):
        def run(accumulator):
            return loss(x, kernel, dy, recipe, wgrad_accumulator=accumulator, accumulate=False)

        accumulator = jax.grad(run)(accumulator)
        master = master - 1e-3 * accumulator
        return master, quantized(master.astype(jnp.bfloat16), recipe), accumulator

    master = case.kernel.astype(jnp.float32)
    kernel, accumulator = quantized(case.kernel, recipe), jnp.full(master.shape, jnp.nan)
    expected = wide(master)
    for _ in range(3):
        master, kernel, accumulator = step(master, kernel, accumulator, case.x, case.dy)
        expected = expected - 1e-3 * oracle(case).dkernel
    change = wide(master) - wide(case.kernel)
    assert_close(change, expected - wide(case.kernel), tolerance=GRADIENT)
    assert_same(kernel, quantized(master.astype(jnp.bfloat16), recipe))
