"""Linear layers on sharded operands: FP8 between devices, and shapes, kernels and meshes that are special.

What each sharding exchanges is in tests/conformance.
"""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_oracle import RECIPES, Gradients, assert_matches, oracle, random_case, warm_state, wide
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax import ops
from te_jax.hlo import collectives, parse
from te_jax.sharding import regrouped
from te_jax.testing import assert_close

pytestmark = pytest.mark.usefixtures("native_kernels")

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
axis_types = pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])
BATCH, IN, OUT = (4, 256), 512, 512
TOKENS = math.prod(BATCH)

# How x, kernel and dy lie over the mesh axes "data" and "model".
SPECS = {
    "column parallel": (P("data"), P(None, "model"), P("data", None, "model")),
    "fsdp": (P("data"), P("data"), P("data")),
    "fsdp, row parallel": (P("data", None, "model"), P("model", "data"), P("data")),
}


def place(x, mesh, spec):
    # From NumPy: JAX would compile a program that cuts the array.
    return jax.device_put(np.asarray(x), NamedSharding(mesh, spec))


def placed(case, mesh, specs):
    return [place(a, mesh, spec) for a, spec in zip((case.x, case.kernel, case.dy), specs, strict=True)]


@functools.cache
def forward_of(**options):
    return jax.jit(lambda x, kernel: ops.dense(x, kernel, **options))


@functools.cache
def backward_of(**options):
    def gradients(x, kernel, dy):
        return jax.vjp(lambda x, kernel: ops.dense(x, kernel, **options), x, kernel)[1](dy)

    return jax.jit(gradients)


def large(compiled, parts=1):
    """Collectives of matrices. Scales and largest magnitudes, of rows at most, are left out."""
    limit = 4 * max(TOKENS, IN, OUT)
    # GPUs join several into one. A sum of which each device keeps a part is a sum.
    return sorted(
        ("all-reduce", result.elements * parts) if entry.kind == "reduce-scatter" else (entry.kind, result.elements)
        for entry in collectives(compiled)
        for result in entry.results
        if result.elements > limit
    )


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_fsdp_gathers_fp8(recipe, make_mesh, rng, tmp_path):
    """One byte a value, half of bfloat16. XLA's CPU backend widens FP8 afterwards, so this reads the program before."""
    mesh = make_mesh({"data": AUTO, "model": AUTO})
    case = random_case(rng, BATCH, (IN,), (OUT,), with_bias=False)
    x, kernel, dy = placed(case, mesh, SPECS["fsdp"])
    dump = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_pass_re": "spmd-partitioning"}
    backward_of(recipe=RECIPES[recipe]).lower(x, kernel, dy).compile(compiler_options=dump)
    (partitioned,) = tmp_path.glob("*gradients*after_spmd-partitioning*.txt")
    gathers = [entry for entry in parse(partitioned.read_text()) if entry.kind == "all-gather"]
    arrays = [array for entry in gathers for array in entry.results]
    assert {array.dtype for array in arrays} <= {"f8e4m3fn", "f32"}  # values, scales of blocks
    assert [array.bytes for array in arrays if array.dtype == "f8e4m3fn"] == [IN * OUT]
    assert sum(array.bytes for array in arrays) < 1.01 * IN * OUT


@pytest.mark.parametrize("recipe", [None, "current", "block"])
def test_bias_split_as_the_tokens_are(recipe, make_mesh, rng):
    """On Explicit meshes types refuse the sum of the two, so it is gathered, as the kernel is."""
    mesh = make_mesh({"data": EXPLICIT})
    case = random_case(rng, BATCH, (IN,), (OUT,), dtype="float32")
    x, kernel, dy = placed(case, mesh, (P(None, "data"), P("data"), P(None, "data")))
    bias = place(case.bias, mesh, P("data"))

    @jax.jit
    def run(x, kernel, bias, dy):
        y, vjp = jax.vjp(lambda *a: ops.dense(*a, recipe=RECIPES.get(recipe), activation="silu"), x, kernel, bias)
        return y, *vjp(dy)

    found = Gradients(*run(x, kernel, bias, dy))
    assert jax.typeof(found.dbias).sharding.spec == P("data")
    assert_matches(found, oracle(case, activation="silu"), case, recipe=RECIPES.get(recipe), factor=1.15)


@pytest.mark.parametrize(("spec", "shape"), [(P(None, "model"), (2, 4)), (P("data", "model"), (4, 2))], ids=str)
def test_blocks_that_a_part_of_an_axis_would_split(spec, shape, require_devices, rng):
    """6 blocks on 4 devices: Shardy proposes to split them over two of these."""
    require_devices(8)
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AUTO, AUTO), devices=jax.devices()[:8])
    case = random_case(rng, BATCH, (768,), (768,))
    run = backward_of(recipe=RECIPES["block"])
    sharded = run(*placed(case, mesh, (P("data"), spec, P("data"))))
    for found, expected in zip(sharded, run(case.x, case.kernel, case.dy), strict=True):
        assert_close(found, expected)


@axis_types
@pytest.mark.parametrize("kernel_contracting", ["first", "last"])
def test_groups_of_dimensions(kernel_contracting, axis_type, make_mesh, rng):
    """Heads split over devices, and a batch that has to be padded."""
    mesh = make_mesh({"data": axis_type, "model": axis_type})
    d = mesh.shape["data"]
    case = random_case(rng, (d, 3), (64,), (4, 32), kernel_contracting=kernel_contracting)
    kernel_spec = P(None, "model") if kernel_contracting == "first" else P("model")
    specs = P("data"), kernel_spec, P("model"), P("data", None, "model")
    operands = [place(a, mesh, spec) for a, spec in zip((*case.operands, case.dy), specs, strict=True)]
    for recipe in (RECIPES["block"], None):

        @jax.jit
        def run(x, kernel, bias, dy, recipe=recipe):
            y, vjp = jax.vjp(
                lambda *a: ops.dense(*a, recipe=recipe, kernel_contracting=kernel_contracting), x, kernel, bias
            )
            return y, *vjp(dy)

        found = Gradients(*run(*operands))
        assert_matches(found, oracle(case), case, recipe=recipe, factor=1.6)
        if axis_type is EXPLICIT:
            for gradient, primal in zip((found.dx, found.dkernel, found.dbias), operands[:3], strict=True):
                assert gradient.sharding.is_equivalent_to(primal.sharding, primal.ndim)


@pytest.mark.parametrize(
    ("before", "spec", "after", "expected"),
    [
        ((6,), ("model",), (2, 3), ("model", None)),
        ((6,), ("model",), (3, 2), (None, None)),
        ((2, 3), ("model", None), (6,), ("model",)),
        ((3, 2), (None, "model"), (6,), (None,)),
    ],
)
def test_reshapes_keep_what_splits_a_first_dimension(before, spec, after, expected, make_mesh, rng):
    """And other groups as they are."""
    mesh = make_mesh({"data": EXPLICIT, "model": EXPLICIT})
    tokens = (mesh.shape["data"],)
    x = place(jax.device_put(np.asarray(rng.standard_normal((*tokens, *before)), jnp.float32)), mesh, P("data", *spec))
    y = jax.jit(lambda x: regrouped(x, (tokens, before), (tokens, after)))(x)
    np.testing.assert_array_equal(y, np.asarray(x).reshape(*tokens, *after))
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("data", *expected)), y.ndim)


@pytest.mark.parametrize(("axis_type", "set_mesh"), [(AUTO, False), (EXPLICIT, True)], ids=["auto", "explicit"])
def test_eager_calls_and_scan(axis_type, set_mesh, make_mesh, rng):
    mesh = make_mesh({"data": axis_type, "model": axis_type})
    case = random_case(rng, (8, 64), (128,), (128,), with_bias=False)
    x, kernel = place(case.x, mesh, P("data")), place(case.kernel, mesh, P(None, "model"))
    expected = wide(case.x) @ wide(case.kernel)
    kernels = place(jnp.stack([case.kernel] * 3), mesh, P(None, None, "data"))

    def run(x, kernels):
        def layer(x, kernel):
            return ops.dense(x, kernel, recipe=RECIPES["block"]), None

        return jax.lax.scan(layer, x, kernels)[0]

    with jax.set_mesh(mesh) if set_mesh else contextlib.nullcontext():
        assert_close(ops.dense(x, kernel, recipe=RECIPES["current"]), expected, dtype="bfloat16", tolerance=0.055)
        deep = jax.jit(run)(x, kernels)
    for _ in range(2):
        expected = expected @ wide(case.kernel)
    assert_close(deep, expected, dtype="bfloat16", tolerance=0.08)


@axis_types
def test_sharded_quantized_kernel(axis_type, make_mesh, rng):
    """Quantized once where it lies, gathered in FP8 by every microbatch."""
    mesh = make_mesh({"data": axis_type, "model": axis_type})
    case = random_case(rng, BATCH, (IN,), (OUT,), with_bias=False)
    x, kernel, dy = placed(case, mesh, SPECS["fsdp"])
    recipe = RECIPES["block"]
    quantized = jax.jit(lambda k: ops.quantize(k, recipe.quantization("kernel")))(kernel)
    for copy, spec in ((quantized.data, P("data")), (quantized.transposed, P(None, "data"))):
        assert copy.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
    compiled = forward_of(recipe=recipe).lower(x, quantized).compile()
    assert large(compiled) == [("all-gather", IN * OUT)]
    assert_close(compiled(x, quantized), oracle(case).y, dtype="bfloat16", tolerance=0.055)
    input_gradient = jax.jit(lambda x, kernel, dy: jax.vjp(lambda x: ops.dense(x, kernel, recipe=recipe), x)[1](dy)[0])
    dx = input_gradient(x, quantized, dy)
    assert_close(dx, oracle(case).dx, dtype="bfloat16", tolerance=0.085)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "name"), [("rowwise", "column parallel"), ("block", "fsdp, row parallel"), (None, "fsdp")]
)
def test_the_reference_is_split_as_well(recipe, name, make_mesh, rng):
    mesh = make_mesh({"data": EXPLICIT, "model": EXPLICIT})
    case = random_case(rng, (8, 64), (512,), (512,), with_bias=False)
    x, kernel, dy = placed(case, mesh, SPECS[name])
    options = {"recipe": RECIPES.get(recipe), "implementation": "reference"}
    y, (dx, dkernel) = forward_of(**options)(x, kernel), backward_of(**options)(x, kernel, dy)
    assert_matches(Gradients(y, dx, dkernel, None), oracle(case), case, recipe=options["recipe"])
    assert y.sharding.is_equivalent_to(dy.sharding, y.ndim), y.sharding
    assert dkernel.sharding.is_equivalent_to(kernel.sharding, kernel.ndim), dkernel.sharding


@pytest.mark.parametrize(
    ("axis_type", "spec", "recipe"),
    [
        pytest.param(*kind, recipe, id=f"{ids}-{name}")
        for i, (name, recipe) in enumerate(RECIPES.items())
        for kind, ids in (
            ((AUTO, P("model") if i % 2 else P()), f"auto-{'split' if i % 2 else 'whole'}"),
            ((EXPLICIT, P() if i % 2 else P("model")), f"explicit-{'whole' if i % 2 else 'split'}"),
        )
    ],
)
def test_one_token_without_a_batch(axis_type, spec, recipe, make_mesh, rng):
    mesh = make_mesh({"data": axis_type, "model": axis_type})
    case = random_case(rng, (), (64,), (32 * mesh.shape["model"],), "float32", with_bias=False)
    x, kernel, dy = placed(case, mesh, (spec, P(None, "model"), P("model")))
    state = warm_state(case, recipe) if hasattr(recipe, "init") else None

    def run(x, kernel, dy):
        layer = functools.partial(ops.dense, recipe=recipe)
        y, vjp = jax.vjp(lambda x, kernel, state: layer(x, kernel, scaling_state=state), x, kernel, state)
        return y, *vjp(dy)[:2]

    y, dx, dkernel = jax.jit(run)(x, kernel, dy)
    assert_matches(Gradients(y, dx, dkernel, None), oracle(case), case, recipe=recipe, factor=1.5)


@pytest.mark.parametrize(("batch", "spec"), [((6,), P("data")), ((2, 3), P(None, "data"))], ids=["flat", "sequence"])
@pytest.mark.parametrize("recipe", ["current", "block"])
def test_padded_tokens_come_back_as_they_were_split(recipe, batch, spec, require_devices, rng):
    """6 tokens on 3 devices become 16, which types refuse to split over these. JAX refuses a dy unlike y."""
    require_devices(3)
    mesh = jax.make_mesh((3,), ("data",), axis_types=(EXPLICIT,), devices=jax.devices()[:3])
    case = random_case(rng, batch, (64,), (32,), "float32", with_bias=False)
    run = backward_of(recipe=RECIPES[recipe])
    sharded = run(*placed(case, mesh, (spec, P(), spec)))
    for found, expected in zip(sharded, run(case.x, case.kernel, case.dy), strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("kind", ["unreduced", "reduced"])
def test_sums_that_types_leave_to_others(kind, make_mesh):
    spec, x = P(None, None, **{kind: {"data"}}), jnp.zeros((16, 32))
    for name, function in (
        ("kernel", lambda kernel: ops.dense(x, kernel)),
        ("x", lambda x: ops.quantize(x, RECIPES["current"].quantization("activation"))),
        ("logits", lambda logits: ops.softmax_cross_entropy(logits, jnp.zeros(32, jnp.int32))),
    ):
        with (
            jax.set_mesh(make_mesh({"data": EXPLICIT})),
            pytest.raises(ValueError, match=rf"^{name} is {kind} over \['data'\], .*: pass it through jax.reshard"),
        ):
            jax.eval_shape(lambda array, function=function: function(jax.reshard(array, spec)), jnp.zeros((32, 16)))


def test_sums_that_shard_map_leaves_to_others(make_mesh):
    def local(x):
        return ops.dense(lax.pcast(x, "data", to="unreduced"), jnp.zeros((16, 32)))

    run = jax.shard_map(local, mesh=make_mesh({"data": AUTO}), in_specs=P("data"), out_specs=P("data"))
    with pytest.raises(ValueError, match=r"^x is unreduced over \['data'\], a part of a sum on each device: sum it"):
        jax.eval_shape(run, jnp.zeros((32, 16)))
