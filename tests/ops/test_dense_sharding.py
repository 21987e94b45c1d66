"""Linear layers on sharded operands under jit: what is exchanged between devices, and what is not."""

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
from te_jax.inspect import collectives, parse
from te_jax.sharding import regrouped
from te_jax.testing import assert_close

pytestmark = pytest.mark.usefixtures("native_kernels")

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
axis_types = pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])
BATCH, IN, OUT = (4, 256), 512, 512
TOKENS = math.prod(BATCH)

# How x, kernel and dy lie over the mesh axes "data" and "model".
SPECS = {
    "data parallel": (P("data"), P(), P("data")),
    "sequence parallel": (P("data", "model"), P(), P("data", "model")),
    "column parallel": (P("data"), P(None, "model"), P("data", None, "model")),
    "row parallel": (P("data", None, "model"), P("model"), P("data")),
    "fsdp": (P("data"), P("data"), P("data")),
    "fsdp of columns": (P("data"), P(None, "data"), P("data")),
    "fsdp, column parallel": (P("data"), P("data", "model"), P("data", None, "model")),
    "fsdp, row parallel": (P("data", None, "model"), P("model", "data"), P("data")),
}


def exchanged(name, d, m):
    """Forward and backward, what is exchanged beside a few numbers for each row: [(kind, elements on a device)].

    `d` and `m` are the sizes of "data" and "model".
    """
    y_or_dx = TOKENS // d
    gather = {
        "fsdp": IN * OUT,
        "fsdp of columns": IN * OUT,
        "fsdp, column parallel": IN * OUT // m,
        "fsdp, row parallel": IN * OUT // m,
    }
    forward = [("all-gather", gather[name])] if name in gather else []
    backward = list(forward)
    if "row parallel" in name:
        forward.append(("all-reduce", y_or_dx * OUT))
    if "column parallel" in name:
        backward.append(("all-reduce", y_or_dx * IN))
    split = m if "parallel" in name and ("column" in name or "row" in name) else 1
    backward.append(("all-reduce", IN * OUT // split))  # the gradient of the kernel, over its replicas
    return {"forward": sorted(forward), "backward": sorted(backward)}


def place(x, mesh, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


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


# Every sharding with scales of tensors on both kinds of axes, and with blocks or without a recipe on one of them.
@pytest.mark.parametrize(
    ("recipe", "axis_type", "name"),
    [
        *(pytest.param("current", AUTO, name, id=f"current-auto-{name}") for name in SPECS),
        *(pytest.param("current", EXPLICIT, name, id=f"current-explicit-{name}") for name in SPECS),
        *(pytest.param("block", AUTO, name, id=f"block-auto-{name}") for name in [*SPECS][::2]),
        *(pytest.param(None, EXPLICIT, name, id=f"none-explicit-{name}") for name in [*SPECS][1::2]),
    ],
)
def test_only_expected_collectives(recipe, name, axis_type, make_mesh, rng):
    mesh = make_mesh({"data": axis_type, "model": axis_type})
    case = random_case(rng, BATCH, (IN,), (OUT,), with_bias=False)
    x, kernel, dy = placed(case, mesh, SPECS[name])
    options = {"recipe": RECIPES.get(recipe)}
    forward = forward_of(**options).lower(x, kernel).compile()
    backward = backward_of(**options).lower(x, kernel, dy).compile()
    expected = exchanged(name, mesh.shape["data"], mesh.shape["model"])
    assert large(forward) == expected["forward"]
    if recipe == "current":  # beside these, largest magnitudes of whole tensors: a number each
        for program, count in ((forward, len(expected["forward"])), (backward, len(expected["backward"]))):
            sizes = [(entry.kind, sum(array.elements for array in entry.results)) for entry in collectives(program)]
            others = [(kind, size) for kind, size in sizes if size < 64]
            assert len(others) + count == len(sizes)
            assert {kind for kind, _ in others} <= {"all-reduce"}
            assert sum(size for _, size in others) <= 3
    if recipe is not None or name != "sequence parallel":  # there XLA sums over one axis after the other
        assert large(backward, mesh.shape["data"]) == expected["backward"]
    y, (dx, dkernel) = forward(x, kernel), backward(x, kernel, dy)
    assert_matches(Gradients(y, dx, dkernel, None), oracle(case), case, recipe=options["recipe"])
    assert y.sharding.is_equivalent_to(dy.sharding, y.ndim), y.sharding
    assert dx.sharding.is_equivalent_to(x.sharding, x.ndim), dx.sharding
    if axis_type is EXPLICIT:
        assert dkernel.sharding.is_equivalent_to(kernel.sharding, kernel.ndim), dkernel.sharding


@pytest.mark.parametrize("name", ["column parallel", "row parallel", "fsdp"])
@pytest.mark.parametrize(
    ("recipe", "axis_type"),
    [("rowwise", AUTO), ("delayed", AUTO), ("block", EXPLICIT)],
    ids=["rowwise-auto", "delayed-auto", "block-explicit"],
)
def test_other_recipes(recipe, name, axis_type, make_mesh, rng):
    mesh = make_mesh({"data": axis_type, "model": axis_type})
    case = random_case(rng, BATCH, (IN,), (OUT,), with_bias=False)
    operands = placed(case, mesh, SPECS[name])
    recipe = RECIPES[recipe]
    state = place(warm_state(case, recipe), mesh, P()) if recipe is RECIPES["delayed"] else None

    @jax.jit
    def run(x, kernel, dy, state):
        layer = functools.partial(ops.dense, recipe=recipe)
        y, vjp = jax.vjp(lambda x, kernel, state: layer(x, kernel, scaling_state=state), x, kernel, state)
        return y, vjp(dy)[:2]

    compiled = run.lower(*operands, state).compile()
    expected = exchanged(name, mesh.shape["data"], mesh.shape["model"])
    assert set(large(compiled, mesh.shape["data"])) == set(expected["forward"] + expected["backward"])
    y, (dx, dkernel) = compiled(*operands, state)
    assert_matches(Gradients(y, dx, dkernel, None), oracle(case), case, recipe=recipe)


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_the_result_does_not_depend_on_the_sharding(axis_type, make_mesh, rng):
    """Scales are those of whole tensors: sharded, the layer computes what one device computes, up to sums' order."""
    mesh = make_mesh({"data": axis_type, "model": axis_type})
    case = random_case(rng, BATCH, (IN,), (OUT,), with_bias=False)
    scaled = case.x * jnp.linspace(0.01, 30, BATCH[0]).astype(jnp.bfloat16)[:, None, None]
    options = {"recipe": RECIPES["current"]}
    alone = forward_of(**options)(scaled, case.kernel)
    for name in ("data parallel", "row parallel", "fsdp, column parallel"):
        x, kernel = place(scaled, mesh, SPECS[name][0]), place(case.kernel, mesh, SPECS[name][1])
        assert_close(forward_of(**options)(x, kernel), alone, tolerance=5e-3)


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


@axis_types
@pytest.mark.parametrize(
    ("recipe", "name"), [("current", "column parallel"), ("current", "row parallel"), ("block", "row parallel")]
)
def test_bias_and_activation(recipe, name, axis_type, make_mesh, rng):
    """Both come after the sum over devices, once."""
    mesh = make_mesh({"data": axis_type, "model": axis_type})
    case = random_case(rng, BATCH, (IN,), (OUT,))
    x, kernel, dy = placed(case, mesh, SPECS[name])
    bias = place(case.bias, mesh, P("model") if name == "column parallel" else P())

    @jax.jit
    def run(x, kernel, bias, dy):
        y, vjp = jax.vjp(lambda *a: ops.dense(*a, recipe=RECIPES.get(recipe), activation="gelu"), x, kernel, bias)
        return y, *vjp(dy)

    expected = oracle(case, activation="gelu")
    assert_matches(Gradients(*run(x, kernel, bias, dy)), expected, case, recipe=RECIPES.get(recipe), factor=1.15)


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


@pytest.mark.parametrize("shape", [(2, 4), (4, 2)])
@pytest.mark.parametrize("spec", [P(None, "model"), P("model"), P("data", "model")], ids=str)
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
    x = place(jnp.asarray(rng.standard_normal((*tokens, *before)), jnp.float32), mesh, P("data", *spec))
    y = jax.jit(lambda x: regrouped(x, (tokens, before), (tokens, after)))(x)
    np.testing.assert_array_equal(y, np.asarray(x).reshape(*tokens, *after))
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("data", *expected)), y.ndim)


@pytest.mark.parametrize("explicit", ["data", "model"])
def test_mixed_mesh(explicit, make_mesh, rng):
    """In float32: XLA's CPU backend aborts on sums of bfloat16 over some axes of a mesh inside any shard_map."""
    mesh = make_mesh({axis: EXPLICIT if axis == explicit else AUTO for axis in ("data", "model")})
    case = random_case(rng, BATCH, (IN,), (OUT,), "float32", with_bias=False)
    for name in ("column parallel", "row parallel"):
        x, kernel, dy = placed(case, mesh, SPECS[name])
        with jax.set_mesh(mesh):
            y = forward_of(recipe=RECIPES["current"])(x, kernel)
            dx, dkernel = backward_of(recipe=RECIPES["current"])(x, kernel, dy)
        assert_matches(Gradients(y, dx, dkernel, None), oracle(case), case, recipe=RECIPES["current"])


@axis_types
@pytest.mark.parametrize("set_mesh", [False, True], ids=["", "set_mesh"])
def test_eager_calls_and_scan(set_mesh, axis_type, make_mesh, rng):
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


def test_partly_manual(make_mesh, rng):
    """Tokens by shard_map, features by jit."""
    mesh = make_mesh({"data": AUTO, "model": AUTO})
    case = random_case(rng, BATCH, (IN,), (OUT,), with_bias=False)
    x, kernel, _ = placed(case, mesh, SPECS["row parallel"])
    mapped = jax.shard_map(
        lambda x, kernel: ops.dense(x, kernel, recipe=RECIPES["current"]),
        mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"},
    )  # fmt: skip
    compiled = jax.jit(mapped).lower(x, kernel).compile()
    assert large(compiled) == [("all-reduce", TOKENS // mesh.shape["data"] * OUT)]
    assert_close(compiled(x, kernel), oracle(case).y, dtype="bfloat16", tolerance=0.055)


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


@axis_types
@pytest.mark.parametrize(
    ("recipe", "name"),
    [("current", "row parallel"), ("rowwise", "column parallel"), ("block", "fsdp, row parallel"), (None, "fsdp")],
)
def test_the_reference_is_split_as_well(recipe, name, axis_type, make_mesh, rng):
    mesh = make_mesh({"data": axis_type, "model": axis_type})
    case = random_case(rng, (8, 64), (512,), (512,), with_bias=False)
    x, kernel, dy = placed(case, mesh, SPECS[name])
    options = {"recipe": RECIPES.get(recipe), "implementation": "reference"}
    y, (dx, dkernel) = forward_of(**options)(x, kernel), backward_of(**options)(x, kernel, dy)
    assert_matches(Gradients(y, dx, dkernel, None), oracle(case), case, recipe=options["recipe"])
    if axis_type is EXPLICIT:
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
