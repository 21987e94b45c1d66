"""Weight gradients that are accumulated over microbatches, in place. tests/linear has what all layers do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_oracle import GRADIENT, PLAIN, RECIPES, oracle, random_case, wide
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax import ops
from te_jax.hlo import buffers, collectives
from te_jax.layers import Router, moe
from te_jax.ops.linear.kernels import quantize_kernel
from te_jax.testing import assert_close

CURRENT = RECIPES["current"]
axis_types = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
few_recipes = pytest.mark.parametrize("recipe", [CURRENT, RECIPES["block"], None], ids=["current", "block", "none"])


def loss(x, kernel, accumulator, dy, recipe=CURRENT, **options):
    y = ops.dense(x, kernel, recipe=recipe, wgrad_accumulator=accumulator, **options)
    return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32))


def draw(rng, like, dtype=jnp.float32):
    values = np.asarray(10 * rng.standard_normal(like.shape), jnp.dtype(dtype))
    return jnp.array(values)  # a copy: XLA does not write over what NumPy holds


@few_recipes
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(dtype, recipe, rng):
    """The product is added up in float32 and rounded once, to the accumulator's dtype."""
    case = random_case(rng, (32,), (32,), (48,), "float32" if dtype == "float32" else "bfloat16", with_bias=False)
    before = draw(rng, case.kernel, dtype)
    after = jax.grad(functools.partial(loss, recipe=recipe), argnums=2)(case.x, case.kernel, before, case.dy)
    assert_close(after, wide(before) + oracle(case).dkernel, dtype=dtype, tolerance=GRADIENT)
    assert not np.array_equal(after, before)


def test_products_of_16_bits_reach_a_float32_accumulator_whole(rng):
    case = random_case(rng, (256,), (32,), (48,), with_bias=False)
    before = draw(rng, case.kernel)
    after = jax.grad(functools.partial(loss, recipe=None), argnums=2)(case.x, case.kernel, before, case.dy)
    assert_close(after, wide(before) + oracle(case).dkernel, dtype="float32", tolerance=1e-6)


@few_recipes
def test_groups_of_dimensions(recipe, rng):
    case = random_case(rng, (3, 5), (2, 32), (4, 16), with_bias=False)
    before = draw(rng, case.kernel)
    after = jax.grad(functools.partial(loss, recipe=recipe, contracting_ndim=2), argnums=2)(
        case.x, case.kernel, before, case.dy
    )
    assert after.shape == case.kernel.shape
    assert_close(
        after - before, oracle(case).dkernel, dtype="float32", tolerance=PLAIN["bfloat16"] if recipe is None else 0.08
    )


@pytest.mark.parametrize("kernel_contracting", ["first", "last"])
def test_accumulator_of_a_kernel_whose_dimensions_quantization_merged(kernel_contracting, rng):
    """As `apply_updates` and quantize_kernels make it: accumulators keep the parameter's shape."""
    case = random_case(rng, (32,), (128,), (4, 48), with_bias=False, kernel_contracting=kernel_contracting)
    recipe, before = RECIPES["block"], draw(rng, case.kernel)
    kernel = quantize_kernel(case.kernel, recipe, row_ndim=1 if kernel_contracting == "first" else 2)
    assert kernel.ndim == 2
    dy, options = case.dy.reshape(32, 192), {"recipe": recipe, "kernel_contracting": kernel_contracting}
    after = jax.grad(functools.partial(loss, **options), argnums=2)(case.x, kernel, before, dy)
    assert after.shape == before.shape
    assert_close(after - before, oracle(case).dkernel, dtype="float32", tolerance=GRADIENT)
    with pytest.raises(ValueError, match=r"wgrad_accumulator has shape \(96, 256\)"):
        loss(case.x, kernel, before.reshape(96, 256), dy, **options)


def test_only_the_accumulator_is_differentiated(rng):
    case = random_case(rng, (32,), (32,), (48,), with_bias=False)
    before = jnp.zeros(case.kernel.shape)
    after = jax.jit(jax.grad(loss, argnums=2))(case.x, case.kernel, before, case.dy)
    assert_close(after, oracle(case).dkernel, dtype="float32", tolerance=GRADIENT)


def _layers(rng):
    """Functions of an accumulator, and its shape."""
    x, labels, sizes = draw(rng, jnp.zeros((16, 32))), jnp.zeros(16, jnp.int32), jnp.array([4, 12])
    kernel, experts = draw(rng, jnp.zeros((32, 48))), draw(rng, jnp.zeros((2, 32, 16)))
    rows = x.astype(jnp.bfloat16)  # of experts GPUs multiply no others
    return {
        "dense": (lambda a: ops.dense(x, kernel, wgrad_accumulator=a).sum(), kernel.shape),
        "dense in FP8": (lambda a: ops.dense(x, kernel, recipe=CURRENT, wgrad_accumulator=a).sum(), kernel.shape),
        "gated_mlp": (
            lambda a: ops.gated_mlp(x, (kernel, kernel, kernel.T), wgrad_accumulator=(a, None, None)).sum(),
            kernel.shape,
        ),
        "linear_cross_entropy": (
            lambda a: ops.linear_cross_entropy(x, kernel, labels, wgrad_accumulator=a), kernel.shape,
        ),
        "grouped_dense": (lambda a: ops.grouped_dense(rows, experts, sizes, wgrad_accumulator=a).sum(), experts.shape),
    }  # fmt: skip


def test_a_branch_that_need_not_be_taken_is_refused(rng):
    """Its gradient would be zeros, and what earlier microbatches have left would be lost."""
    for name, (layer, shape) in _layers(rng).items():
        before = draw(rng, jnp.zeros(shape))
        for wrapped in (layer, jax.jit(layer), jax.checkpoint(layer)):
            of_branch = jax.grad(lambda a, taken, f=wrapped: lax.cond(taken, f, lambda _: 0.0, a))
            with pytest.raises(ValueError, match=r"wgrad_accumulator.* is given in a branch.*Take the gradient in"):
                jax.jit(of_branch)(before, False)
        with pytest.raises(ValueError, match="in a branch"):
            jax.grad(lambda a, f=layer: lax.switch(1, [lambda: f(a), lambda: 0.0]))(before)
        inside = jax.jit(lambda a, taken, f=layer: lax.cond(taken, jax.grad(f), lambda a: a, a))
        np.testing.assert_array_equal(inside(before, False), before, err_msg=name)
        assert not np.array_equal(inside(before, True), before), name


@pytest.mark.parametrize(
    ("examples", "accumulate", "recipe"),
    [
        pytest.param((4,), True, CURRENT, id="vmap-accumulate-current"),
        pytest.param((2, 2), False, CURRENT, id="vmap of vmap-overwrite-current"),
        pytest.param((4,), False, RECIPES["block"], id="vmap-overwrite-block"),
        pytest.param((2, 2), True, RECIPES["block"], id="vmap of vmap-accumulate-block"),
        pytest.param((4,), True, None, id="vmap-accumulate-none"),
        pytest.param((2, 2), False, None, id="vmap of vmap-overwrite-none"),
    ],
)
def test_examples_of_a_vmap_share_it(examples, accumulate, recipe, implementation, rng):
    """It is added once, not once for each of them."""
    if implementation == "reference" and recipe is RECIPES["block"]:
        pytest.skip("slow, and as with scales of tensors")
    case = random_case(rng, (*examples, 16), (32,), (48,), with_bias=False)
    before = draw(rng, case.kernel)
    run = functools.partial(loss, recipe=recipe, accumulate=accumulate, implementation=implementation)
    for _ in examples:
        run = jax.vmap(run, in_axes=(0, None, None, 0))
    total = jax.grad(lambda accumulator: jnp.sum(run(case.x, case.kernel, accumulator, case.dy)))
    tolerance = PLAIN["bfloat16"] if recipe is None else GRADIENT
    for wrap in (jax.jit, lambda f: f) if (implementation, recipe) == ("native", CURRENT) else (jax.jit,):
        after = wrap(total)(before)
        assert_close(
            after - before * np.float32(accumulate), oracle(case).dkernel, dtype="float32", tolerance=tolerance
        )


@axis_types
def test_sharded_examples_of_a_vmap_share_it(axis_type, make_mesh, rng):
    mesh = make_mesh({"data": axis_type, "model": axis_type})
    case = random_case(rng, (2 * mesh.shape["data"], 16), (32,), (48,), with_bias=False)
    before = draw(rng, case.kernel)
    x, dy = (jax.device_put(a, NamedSharding(mesh, P("data"))) for a in (case.x, case.dy))
    kernel, accumulator = (jax.device_put(a, NamedSharding(mesh, P(None, "model"))) for a in (case.kernel, before))

    def total(accumulator, x, kernel, dy):
        return jnp.sum(jax.vmap(loss, in_axes=(0, None, None, 0))(x, kernel, accumulator, dy))

    after = jax.jit(jax.grad(total))(accumulator, x, kernel, dy)
    assert_close(after - before, oracle(case).dkernel, dtype="float32", tolerance=GRADIENT)


@pytest.mark.parametrize("recipe", [CURRENT, None], ids=["current", "none"])
def test_an_accumulator_that_no_examples_share_is_refused(recipe):
    def total(accumulator, x, dy):
        kernel = jnp.zeros((32, 48), jnp.bfloat16)
        run = functools.partial(loss, recipe=recipe)
        return jnp.sum(jax.vmap(run, in_axes=(0, None, None, 0))(x, kernel, accumulator, dy))

    with pytest.raises(ValueError, match="wgrad_accumulator is shared by the 0 examples of a vmap"):
        jax.grad(total)(jnp.zeros((32, 48)), jnp.zeros((0, 16, 32)), jnp.zeros((0, 16, 48)))


# ------------------------------------------------------------------------------------------------------------ in place


SHAPE = (256, 512)
SIZE = 4 * 256 * 512


def copies(compiled):
    """Arrays of the accumulator's size that are copied."""
    return [b for b in buffers(compiled, "copy", "copy-start") if b.elements >= SHAPE[0] * SHAPE[1]]


def exchanged(compiled):
    """Kind and number of values of each collective."""
    return [(entry.kind, sum(array.elements for array in entry.results)) for entry in collectives(compiled)]


def large_results(compiled, dtype="f32"):
    """How many instructions have a float32 result of the accumulator's size, beside arguments and what only renames."""
    return [
        b
        for b in buffers(compiled, "custom-call", "fusion", "dot", "copy", "add")
        if b.shape == SHAPE and b.dtype == dtype
    ]


@pytest.fixture
def big_case(rng):
    return random_case(rng, (128,), SHAPE[:1], SHAPE[1:], with_bias=False)


@few_recipes
@pytest.mark.parametrize("accumulate", [True, False], ids=["accumulate", "overwrite"])
def test_donated_accumulator_is_written_in_place(accumulate, recipe, native_kernels, big_case, rng):
    case = big_case
    accumulator = draw(rng, case.kernel)
    before, pointer = np.array(accumulator), accumulator.unsafe_buffer_pointer()
    step = jax.jit(jax.grad(functools.partial(loss, recipe=recipe, accumulate=accumulate), argnums=2), donate_argnums=2)
    compiled = step.lower(case.x, case.kernel, accumulator, case.dy).compile()
    assert copies(compiled) == []
    assert compiled.memory_analysis().alias_size_in_bytes == SIZE
    if recipe is not None:
        assert len(large_results(compiled)) == 1  # the product itself: there is no second buffer to add up
    after = compiled(case.x, case.kernel, accumulator, case.dy)
    assert accumulator.is_deleted()
    assert after.unsafe_buffer_pointer() == pointer
    tolerance = PLAIN["bfloat16"] if recipe is None else GRADIENT
    assert_close(after - before * np.float32(accumulate), oracle(case).dkernel, dtype="float32", tolerance=tolerance)


@few_recipes
def test_accumulator_carried_over_microbatches(recipe, native_kernels, rng):
    """A loop over microbatches, with a kernel that is quantized once: the accumulator stays in its place."""
    case = random_case(rng, (3, 128), SHAPE[:1], SHAPE[1:], with_bias=False)

    def step(accumulator, kernel, x, dy):
        if recipe is not None:
            kernel = ops.quantize(kernel, recipe.quantization("kernel"))

        def microbatch(accumulator, inputs):
            dx, accumulator = jax.grad(functools.partial(loss, recipe=recipe), argnums=(0, 2))(
                inputs[0], kernel, accumulator, inputs[1]
            )
            return accumulator, dx

        return lax.scan(microbatch, accumulator, (x, dy))

    accumulator = jnp.zeros(SHAPE)
    compiled = jax.jit(step, donate_argnums=0).lower(accumulator, case.kernel, case.x, case.dy).compile()
    assert copies(compiled) == []
    assert compiled.memory_analysis().alias_size_in_bytes == SIZE
    if recipe is not None:
        assert len(large_results(compiled)) == 1
    pointer = accumulator.unsafe_buffer_pointer()
    after, dx = compiled(accumulator, case.kernel, case.x, case.dy)
    assert after.unsafe_buffer_pointer() == pointer
    expected, tolerance = oracle(case), PLAIN["bfloat16"] if recipe is None else GRADIENT
    assert_close(after, expected.dkernel, dtype="float32", tolerance=tolerance)
    assert_close(dx, expected.dx, dtype="bfloat16", tolerance=tolerance)


def test_overwrite_then_accumulate(native_kernels, rng):
    """The first microbatch overwrites what is left from the step before, so that nothing has to be zeroed."""
    case = random_case(rng, (3, 32), (64,), (48,), with_bias=False)
    accumulator = draw(rng, case.kernel) * np.nan
    for i in range(3):
        run = jax.jit(jax.grad(functools.partial(loss, accumulate=i > 0), argnums=2), donate_argnums=2)
        accumulator = run(case.x[i], case.kernel, accumulator, case.dy[i])
    assert_close(accumulator, oracle(case).dkernel, dtype="float32", tolerance=GRADIENT)


@few_recipes
@pytest.mark.parametrize("quantized", [True, False], ids=["quantized", "plain"])
def test_stacked_layers_keep_no_copy_of_kernels_and_accumulators(quantized, recipe):
    """The loop's own inputs are there in the backward pass: a copy of each would be another 8 bytes a weight. Blocks
    read the 4 × 64 features as one dimension."""
    before, x = jnp.zeros((3, 128, 4, 64)), jnp.zeros((32, 128))
    kernels = quantize_kernel(before, recipe, row_ndim=1, stacked_ndim=1) if recipe and quantized else before

    def run(x, accumulators, kernels):
        def layer(x, inputs):
            y = ops.dense(x, inputs[0], recipe=recipe, wgrad_accumulator=inputs[1])
            return y.reshape(32, 2, 128).sum(1), None

        return jnp.sum(lax.scan(layer, x, (kernels, accumulators))[0])

    program = jax.make_jaxpr(jax.grad(run, argnums=(0, 1)))(x, before, kernels)
    loops = [eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "scan"]
    results = [result.aval for loop in loops for result in loop.outvars]
    assert len(loops) == 2
    made = [result.shape for result in results if result.size == before.size and result.dtype == jnp.float32]
    assert made == [before.shape]  # the accumulators' next values


# ------------------------------------------------------------------------------------------------------------ sharding


def test_shards_without_sums_accumulate_in_place(native_kernels, make_mesh, rng):
    """Features over devices, tokens on all of them: every shard of the accumulator stays where it is."""
    mesh = make_mesh({"model": AxisType.Auto})
    case = random_case(rng, (128,), SHAPE[:1], SHAPE[1:], with_bias=False)
    specs = P(), P(None, "model"), P(None, "model"), P(None, "model")
    accumulator = draw(rng, case.kernel)
    before = np.array(accumulator)
    x, kernel, accumulator, dy = (
        jax.device_put(a, NamedSharding(mesh, s))
        for a, s in zip((case.x, case.kernel, accumulator, case.dy), specs, strict=True)
    )
    compiled = jax.jit(jax.grad(loss, argnums=2), donate_argnums=2).lower(x, kernel, accumulator, dy).compile()
    assert all(size < 16 for _, size in exchanged(compiled))
    shard = SHAPE[0] * SHAPE[1] // mesh.size
    assert [b for b in buffers(compiled, "copy", "copy-start") if b.elements >= shard and b.dtype == "f32"] == []
    assert compiled.memory_analysis().alias_size_in_bytes == 4 * shard
    pointers = [s.data.unsafe_buffer_pointer() for s in accumulator.addressable_shards]
    after = compiled(x, kernel, accumulator, dy)
    assert [s.data.unsafe_buffer_pointer() for s in after.addressable_shards] == pointers
    assert_close(np.asarray(after) - before, oracle(case).dkernel, dtype="float32", tolerance=GRADIENT)


@few_recipes
def test_each_device_accumulates_its_own_part_inside_shard_map(recipe, make_mesh, rng):
    mesh = make_mesh({"data": AxisType.Auto})
    case = random_case(rng, (2, 16 * mesh.size), (64,), (48,), with_bias=False)

    def step(x, kernel, dy):
        accumulator = lax.pcast(jnp.zeros(case.kernel.shape), "data", to="varying")

        def microbatch(accumulator, inputs):
            return jax.grad(functools.partial(loss, recipe=recipe), argnums=2)(
                inputs[0], kernel, accumulator, inputs[1]
            ), None

        return lax.psum(lax.scan(microbatch, accumulator, (x, dy))[0], "data")

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(None, "data"), P(), P(None, "data")), out_specs=P())
    compiled = jax.jit(mapped).lower(case.x, case.kernel, case.dy).compile()
    large = [(kind, size) for kind, size in exchanged(compiled) if size > 64]
    assert large == [("all-reduce", 64 * 48)]  # once for both microbatches
    tolerance = PLAIN["bfloat16"] if recipe is None else GRADIENT
    assert_close(compiled(case.x, case.kernel, case.dy), oracle(case).dkernel, dtype="float32", tolerance=tolerance)


SIZES = np.full(2, 8)
WITH_ACCUMULATOR = {
    "dense": lambda x, kernel, sums: ops.dense(x, kernel[0], wgrad_accumulator=sums[0]),
    "gated_mlp": lambda x, kernel, sums: ops.gated_mlp(x, (*kernel, kernel[0]), wgrad_accumulator=(*sums, sums[0])),
    "grouped_dense": lambda x, kernel, sums: ops.grouped_dense(x, kernel, SIZES, wgrad_accumulator=sums),
    "moe": lambda x, kernel, sums: moe(x, x[:, :2], (kernel,) * 3, Router(1), wgrad_accumulator=(sums,) * 3).y,
    "linear_cross_entropy": lambda x, kernel, sums: ops.linear_cross_entropy(
        x, kernel[0], np.zeros(16, int), wgrad_accumulator=sums[0]
    ),
}


@pytest.mark.parametrize("run", WITH_ACCUMULATOR.values(), ids=WITH_ACCUMULATOR)
def test_an_accumulator_that_devices_share_inside_shard_map_is_refused(run, make_mesh):
    """JAX would sum over devices what each has added up already."""
    mesh = make_mesh({"data": AxisType.Auto})
    gradient = jax.grad(lambda sums, x, kernel: lax.psum(run(x, kernel, sums).sum(), "data"))
    mapped = jax.shard_map(gradient, mesh=mesh, in_specs=(P(), P("data"), P()), out_specs=P())
    with pytest.raises(ValueError, match=r"wgrad_accumulator\S* is the same on all devices along \['data'\]"):
        jax.eval_shape(mapped, jnp.zeros((2, 16, 16)), jnp.ones((16 * mesh.size, 16)), jnp.ones((2, 16, 16)))
