"""Linear layers under JAX's transformations, and that nothing is computed that nobody asks for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_oracle import GRADIENT, PLAIN, RECIPES, oracle, random_case, wide
from jax import export, lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from te_jax import checkpoint_policies, native, ops
from te_jax.recipe import DelayedScaling
from te_jax.testing import assert_close

CURRENT, BLOCK = RECIPES["current"], RECIPES["block"]
recipes = pytest.mark.parametrize("recipe", [CURRENT, BLOCK, None], ids=["current", "block", "none"])


@pytest.fixture
def case(rng):
    return random_case(rng, (32,), (64,), (48,), with_bias=False)


def loss(x, kernel, dy, **options):
    return jnp.sum(ops.dense(x, kernel, **options).astype(jnp.float32) * dy.astype(jnp.float32))


def assert_gradients(found, case, recipe=CURRENT):
    expected = oracle(case)
    tolerance = PLAIN["bfloat16"] if recipe is None else GRADIENT * 1.1
    for gradient, wanted in zip(found, (expected.dx, expected.dkernel), strict=True):
        assert_close(gradient, wanted, dtype="bfloat16", tolerance=tolerance)


@recipes
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_grad(wrap, recipe, case):
    run = wrap(jax.grad(functools.partial(loss, recipe=recipe), argnums=(0, 1)))
    assert_gradients(run(case.x, case.kernel, case.dy), case, recipe)


@recipes
def test_scan_over_layers_with_shared_code(recipe, rng):
    """As a model with stacked layers has it: kernels are slices, and so are their gradients."""
    x = jnp.asarray(rng.standard_normal((32, 64)), jnp.bfloat16)
    kernels = jnp.asarray(rng.standard_normal((3, 64, 64)) / 8, jnp.bfloat16)

    def run(x, kernels):
        y, _ = lax.scan(lambda x, kernel: (ops.dense(x, kernel, recipe=recipe), None), x, kernels)
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    _, (dx, dkernels) = jax.jit(jax.value_and_grad(run, argnums=(0, 1)))(x, kernels)
    hidden = [wide(x)]
    for kernel in wide(kernels):
        hidden.append(hidden[-1] @ kernel)
    g, expected = 2 * hidden[-1], []
    for kernel, inputs in zip(wide(kernels)[::-1], hidden[-2::-1], strict=True):
        expected.insert(0, inputs.T @ g)
        g = g @ kernel.T
    tolerance = 0.03 if recipe is None else 0.13  # three layers deep
    assert_close(dx, g, dtype="bfloat16", tolerance=tolerance)
    assert_close(dkernels, np.stack(expected), dtype="bfloat16", tolerance=tolerance)


@recipes
def test_vmap(recipe, rng):
    """Every example is a tensor of its own; a kernel that is not mapped collects the sum of its gradients."""
    case = random_case(rng, (3, 32), (64,), (48,), with_bias=False)
    run = jax.grad(functools.partial(loss, recipe=recipe), argnums=(0, 1))
    per_example = jax.vmap(run, in_axes=(0, None, 0))(case.x, case.kernel, case.dy)
    assert_gradients(
        (per_example[0], jnp.sum(per_example[1].astype(jnp.float32), 0).astype(jnp.bfloat16)), case, recipe
    )
    mapped = jax.vmap(functools.partial(ops.dense, recipe=recipe), in_axes=(0, None))
    total = jax.grad(
        lambda x, k: jnp.sum(mapped(x, k).astype(jnp.float32) * case.dy.astype(jnp.float32)), argnums=(0, 1)
    )
    assert_gradients(jax.jit(total)(case.x, case.kernel), case, recipe)
    for i in range(3):
        alone = ops.dense(case.x[i], case.kernel, recipe=recipe)
        assert_close(mapped(case.x, case.kernel)[i], alone, tolerance=1e-3)


def test_vmap_of_everything(rng):
    """Experts: every one has tokens and a kernel."""
    case = random_case(rng, (4, 32), (64,), (48,), with_bias=False)
    kernels = jnp.stack([case.kernel * i for i in (1, 2, 3, 4)])
    run = jax.vmap(jax.value_and_grad(functools.partial(loss, recipe=CURRENT), argnums=(0, 1)))
    _, (dx, dkernels) = jax.jit(run)(case.x, kernels, case.dy)
    expected = oracle(case)
    for i in range(4):
        assert_close(dx[i], (i + 1) * expected.dx[i], dtype="bfloat16", tolerance=GRADIENT * 1.1)
        assert_close(dkernels[i], wide(case.x[i]).T @ wide(case.dy[i]), dtype="bfloat16", tolerance=GRADIENT * 1.1)


@recipes
@pytest.mark.parametrize("implementation", [None, "reference"])
def test_symbolic_sizes(implementation, recipe, rng):
    """One exported program for any batch and time, as those who serve a model make it."""
    layer = jax.jit(functools.partial(ops.dense, recipe=recipe, implementation=implementation))
    targets = native.register() if implementation is None else {}
    checks = [export.DisabledSafetyCheck.custom_call(target) for target in targets]
    kernel = random_case(rng, (32,), (64,), (48,), with_bias=False).kernel
    for sizes, symbols in (((1, 1), "b, t"), ((3, 7), "b, t"), ((2, 16), "b, 16"), ((1, 128), "b, 128*t")):
        tokens = jax.ShapeDtypeStruct((*export.symbolic_shape(symbols), 64), jnp.bfloat16)
        x = jnp.asarray(rng.standard_normal((*sizes, 64)), jnp.bfloat16)
        found = export.export(layer, disabled_checks=checks)(tokens, kernel).call(x, kernel)
        assert_close(found, layer(x, kernel), tolerance=1e-3)
        assert_close(found, wide(x) @ wide(kernel), dtype="bfloat16", tolerance=GRADIENT)


@pytest.mark.parametrize("recipe", [CURRENT, BLOCK], ids=["current", "block"])
def test_gradients_of_symbolic_sizes(recipe, native_kernels, rng):
    case = random_case(rng, (3, 7), (64,), (48,), with_bias=False)
    step = jax.jit(jax.grad(functools.partial(loss, recipe=recipe), argnums=(0, 1)))
    sizes = export.symbolic_shape("b, t")
    x, dy = (jax.ShapeDtypeStruct((*sizes, features), jnp.bfloat16) for features in (64, 48))
    checks = [export.DisabledSafetyCheck.custom_call(target) for target in native.register()]
    exported = export.export(step, disabled_checks=checks)(x, case.kernel, dy)
    assert_gradients(exported.call(case.x, case.kernel, case.dy), case, recipe)


@recipes
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma, recipe, make_mesh, rng):
    """Tokens split over one axis, out features over the other; JAX sums gradients over devices, once."""
    mesh = make_mesh({"data": AxisType.Auto, "model": AxisType.Auto})
    case = random_case(rng, (16 * mesh.shape["data"],), (64,), (64,))

    def local(x, kernel, bias, dy):
        return lax.psum(loss_with_bias(x, kernel, bias, dy, recipe), ("data", "model"))

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P("data"), P(None, "model"), P("model"), P("data", "model")),
        out_specs=P(),
        check_vma=check_vma,
    )
    dx, dkernel, dbias = jax.jit(jax.grad(mapped, argnums=(0, 1, 2)))(*case.operands, case.dy)
    assert_gradients((dx, dkernel), case, recipe)
    assert_close(dbias, oracle(case).dbias, dtype="bfloat16", tolerance=1e-2)


def loss_with_bias(x, kernel, bias, dy, recipe):
    return jnp.sum(ops.dense(x, kernel, bias, recipe=recipe).astype(jnp.float32) * dy.astype(jnp.float32))


def test_gradient_inside_shard_map(make_mesh, rng):
    mesh = make_mesh({"data": AxisType.Auto})
    case = random_case(rng, (16 * mesh.size,), (64,), (64,))

    def local(x, kernel, bias, dy):
        return jax.grad(lambda *a: loss_with_bias(*a, dy, CURRENT), argnums=(0, 1, 2))(x, kernel, bias)

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(P("data"), P(), P(), P("data")), out_specs=(P("data"), P(), P())
    )  # fmt: skip
    dx, dkernel, dbias = jax.jit(mapped)(*case.operands, case.dy)
    assert_gradients((dx, dkernel), case)
    assert_close(dbias, oracle(case).dbias, dtype="bfloat16", tolerance=1e-2)


def test_pmap(require_devices, rng):
    require_devices(2)
    count = jax.device_count()
    case = random_case(rng, (count, 16), (32,), (32,), with_bias=False)
    run = jax.pmap(jax.grad(functools.partial(loss, recipe=CURRENT), argnums=(0, 1)), in_axes=(0, None, 0))
    dx, dkernels = run(case.x, case.kernel, case.dy)
    assert_gradients((dx, jnp.sum(dkernels.astype(jnp.float32), 0).astype(jnp.bfloat16)), case)


def test_eager_calls_trace_once(case):
    """An eager call that was made before runs what was compiled then."""
    for recipe in (CURRENT, BLOCK, None):
        ops.dense(case.x, case.kernel, recipe=recipe)
        with jax.no_tracing():
            ops.dense(case.x, case.kernel, recipe=recipe)


@recipes
def test_eval_shape(recipe):
    x, kernel = jax.ShapeDtypeStruct((3, 7, 64), jnp.float16), jax.ShapeDtypeStruct((64, 48), jnp.float32)
    run = functools.partial(ops.dense, recipe=recipe)
    y = jax.eval_shape(run, x, kernel)
    assert (y.shape, y.dtype, y.weak_type) == ((3, 7, 48), jnp.float16, False)
    gradients = jax.eval_shape(jax.grad(lambda *a: run(*a).astype(jnp.float32).sum(), argnums=(0, 1)), x, kernel)
    assert [(g.shape, g.dtype, g.weak_type) for g in gradients] == [(a.shape, a.dtype, False) for a in (x, kernel)]


@recipes
def test_without_jit(recipe, case):
    run = jax.grad(functools.partial(loss, recipe=recipe, activation="gelu"), argnums=(0, 1))
    expected = jax.jit(run)(case.x, case.kernel, case.dy)
    with jax.disable_jit():
        found = run(case.x, case.kernel, case.dy)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, tolerance=1e-2)


# --------------------------------------------------------------------------------------------------- second derivatives


def _input_gradient_norm(x, kernel, dy, wrap=lambda f: f, **options):
    """What a gradient penalty is: its derivatives are second ones of the layer."""
    return jnp.sum(jnp.square(wrap(jax.grad(functools.partial(loss, **options)))(x, kernel, dy).astype(jnp.float32)))


@pytest.mark.parametrize("argnum", [0, 1, 2], ids=["x", "kernel", "dy"])
@pytest.mark.parametrize("recipe", [*RECIPES.values()], ids=RECIPES)
def test_second_derivatives_are_refused(recipe, argnum, request, case):
    # Every recipe and every operand meets both implementations.
    implementation = "reference" if ([*RECIPES.values()].index(recipe) + argnum) % 2 else "native"
    if implementation == "native":
        request.getfixturevalue("native_kernels")
    options = {"recipe": recipe, "implementation": implementation, "activation": "silu"}
    if isinstance(recipe, DelayedScaling):
        options["scaling_state"] = recipe.init()
    for wrap in (lambda f: f, jax.jit, jax.checkpoint):
        run = functools.partial(_input_gradient_norm, wrap=wrap, **options)
        with pytest.raises(NotImplementedError, match=r"is differentiated once.*recipe=None"):
            jax.grad(run, argnums=argnum)(case.x, case.kernel, case.dy)
    first = jax.grad(functools.partial(loss, **options), argnums=argnum % 2)
    with pytest.raises(NotImplementedError, match="is differentiated once"):
        jax.jvp(first, (case.x, case.kernel, case.dy), (case.x, case.kernel, case.dy))


def test_second_derivative_without_a_recipe(rng):
    case = random_case(rng, (32,), (64,), (48,), "float32", with_bias=False)
    found = jax.grad(_input_gradient_norm, argnums=1)(case.x, case.kernel, case.dy)
    dy, kernel = wide(case.dy), wide(case.kernel)
    assert_close(found, 2 * (dy @ kernel.T).T @ dy, dtype="float32", tolerance=1e-5)


def test_derivatives_of_what_surrounds_a_gradient(case):
    """An outer derivative that does not pass the layer is none of its business."""

    def outer(factor):
        dx = jax.grad(functools.partial(loss, recipe=CURRENT))(case.x, case.kernel, case.dy)
        return factor * jnp.sum(jnp.square(dx.astype(jnp.float32)))

    (value, slope), linear = jax.value_and_grad(outer)(2.0), jax.linearize(outer, 2.0)[1]
    assert value == pytest.approx(2 * slope)
    assert linear(1.0) == pytest.approx(slope)
    assert slope > 0


# -------------------------------------------------------------------------------------- what is computed, and what kept


def count(function, *arguments, **options):
    """(products, quantizations) in what JAX traces, before any compiler removes what is not used.

    One quantization serves both copies of a tensor: with one scale they are the same values.
    """
    run = functools.partial(function, **options)
    return _count(jax.make_jaxpr(run)(*arguments).jaxpr)


def _count(jaxpr: Jaxpr):
    products, quantizations = 0, 0
    for eqn in jaxpr.eqns:
        products += eqn.primitive.name == "dot_general"
        quantizations += eqn.primitive.name == "bitcast_convert_type" and "float8" in str(eqn.params["new_dtype"])
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: isinstance(v, Jaxpr | ClosedJaxpr)):
            inner = value.jaxpr if isinstance(value, ClosedJaxpr) else value
            if isinstance(inner, Jaxpr) and eqn.primitive.name != "custom_vjp_call":
                found = _count(inner)
                products, quantizations = products + found[0], quantizations + found[1]
    return products, quantizations


reference = functools.partial(loss, implementation="reference")


@pytest.mark.parametrize("kernel_contracting", ["first", "last"])
@pytest.mark.parametrize(
    ("argnums", "expected"), [((0, 1), (3, 3)), ((0,), (2, 3)), ((1,), (2, 3))], ids=["both", "x", "kernel"]
)
def test_only_what_is_differentiated_is_computed(argnums, expected, kernel_contracting, rng):
    """Three products for both, two for one alone, and x, kernel and dy quantized once each."""
    case = random_case(rng, (32,), (64,), (48,), with_bias=False, kernel_contracting=kernel_contracting)
    options = {"recipe": CURRENT, "kernel_contracting": kernel_contracting}
    for wrap in (lambda f: f, jax.jit):
        grad = wrap(jax.grad(functools.partial(reference, **options), argnums=argnums))
        assert count(grad, case.x, case.kernel, case.dy) == expected


def test_a_forward_pass_makes_two_copies(case):
    def run(x, kernel, dy):
        return jax.jit(functools.partial(reference, recipe=CURRENT))(x, kernel, dy)

    # A function with a derivative of its own is traced into one equation; what is inside is what runs.
    text = str(jax.jit(run).lower(case.x, case.kernel, case.dy).as_text())
    assert text.count("stablehlo.dot_general") == 1
    assert sum("bitcast_convert" in line and "f8E4M3FN>" in line.split("->")[-1] for line in text.splitlines()) == 2


def test_gradient_of_the_bias_alone_needs_no_gradient_products(rng):
    case = random_case(rng, (32,), (64,), (48,))

    def run(bias):
        return jnp.sum(
            ops.dense(case.x, case.kernel, bias, recipe=CURRENT, implementation="reference").astype(jnp.float32)
        )

    assert count(jax.grad(run), case.bias) == (1, 2)
    assert_close(jax.grad(run)(case.bias), np.full(48, 32.0), dtype="bfloat16", tolerance=0.0)


POLICIES = {
    "operands": checkpoint_policies.save_fp8_operands,
    "preactivations": checkpoint_policies.save_fp8_operands_and_preactivations,
    "offload": checkpoint_policies.offload_fp8_operands(preactivations=True),
    "offload operands": checkpoint_policies.offload_fp8_operands(),
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
}
# Two layers with gelu between them, products and quantizations: plain gradients have 6 and 6. The first product has to
# run again where the values before gelu are not kept, on x and kernel that are quantized again; where nothing is kept,
# those of the second layer are quantized again too.
EXPECTED = {
    "operands": (7, 6 + 2),
    "preactivations": (6, 6),
    "offload": (6, 6),
    "offload operands": (7, 6 + 2),
    "everything": (6, 6),
    "nothing": (7, 6 + 4),
}


def two_layers(x, kernels, policy=None, implementation="reference"):
    dense = functools.partial(ops.dense, recipe=CURRENT, implementation=implementation)

    def layers(x, kernels):
        return dense(dense(jnp.sin(x), kernels[0], activation="gelu"), kernels[1])

    if policy is not None:
        layers = jax.checkpoint(layers, policy=POLICIES[policy])
    return jnp.sum(jnp.square(layers(x, kernels).astype(jnp.float32)))


@pytest.fixture
def two_layer_case(rng):
    x = jnp.asarray(rng.standard_normal((32, 64)), jnp.bfloat16)
    return x, [jnp.asarray(rng.standard_normal(shape) / 8, jnp.bfloat16) for shape in ((64, 128), (128, 64))]


@functools.cache
def gradients_of_two_layers(policy=None):
    # Otherwise XLA may leave out a rounding to bfloat16 in one program that the other keeps.
    options = {"xla_allow_excess_precision": False}
    return jax.jit(jax.grad(functools.partial(two_layers, policy=policy), argnums=(0, 1)), compiler_options=options)


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_recompute_what_they_say(policy, two_layer_case):
    remat = functools.partial(two_layers, policy=policy)
    assert count(jax.grad(remat, argnums=(0, 1)), *two_layer_case) == EXPECTED[policy]
    plain, again = (gradients_of_two_layers(each)(*two_layer_case) for each in (None, policy))
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        assert_close(other, one)


@pytest.mark.parametrize(("policy", "expected"), [(None, (6, 6)), ("operands", (7, 8)), ("preactivations", (6, 6))])
def test_kernels_that_run_under_a_policy(policy, expected, native_kernels, two_layer_case):
    """Products and quantizations of the program that XLA is given; on a CPU it merges those that are equal."""
    run = functools.partial(two_layers, policy=policy, implementation="native")
    text = jax.jit(jax.grad(run, argnums=(0, 1))).lower(*two_layer_case).as_text()
    assert tuple(text.count(f"custom_call @{target}(") for target in ("te_gemm", "te_quantize_tensor")) == expected


def test_values_before_an_activation_serve_all_that_follows(rng):
    """A gate multiplies what comes out of silu, which its gradient needs: no product runs again for it."""
    case = random_case(rng, (32,), (64,), (64,), with_bias=False)

    def gated(x, kernel):
        dense = functools.partial(ops.dense, recipe=CURRENT, implementation="reference")
        return jnp.sum((dense(x, kernel, activation="silu") * dense(x, kernel)).astype(jnp.float32))

    remat = jax.checkpoint(gated, policy=checkpoint_policies.save_fp8_operands_and_preactivations)
    assert count(jax.grad(gated, argnums=(0, 1)), case.x, case.kernel)[0] == 6
    assert count(jax.grad(remat, argnums=(0, 1)), case.x, case.kernel)[0] == 7  # that without an activation


# x and kernel of either layer, transposed and as it is, with their scales.
OPERANDS = ["f8_e4m3fn[64,32]", "f8_e4m3fn[128,32]", "f8_e4m3fn[64,128]", "f8_e4m3fn[128,64]", *["f32[]"] * 4]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("operands", OPERANDS), ("preactivations", [*OPERANDS, "bf16[32,128]"]), ("nothing", [])],
    ids=["operands", "preactivations", "nothing"],
)
def test_policies_keep_what_they_say(policy, expected, two_layer_case, capsys):
    jax.ad_checkpoint.print_saved_residuals(functools.partial(two_layers, policy=policy), *two_layer_case)
    kept = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "from the argument" not in line]
    kept = [name for name in kept if name != "f32[32,64]"]  # the result, which the loss squares
    assert sorted(kept) == sorted(expected)


def test_memories_of_what_is_offloaded():
    policy = checkpoint_policies.offload_fp8_operands(offload_src="here", offload_dst="there")
    (name,) = jax.make_jaxpr(lambda x: checkpoint_name(x, "te_dense_activation"))(jnp.zeros(1)).eqns
    chosen = policy(name.primitive, **name.params)
    assert (chosen.src, chosen.dst) == ("here", "there")


def test_policies_keep_what_delayed_scaling_observed(rng, capsys):
    """Two numbers beside the operands and their scales: x and kernel are not read again for them."""
    case, recipe = random_case(rng, (32,), (64,), (64,), with_bias=False), DelayedScaling(history_len=2)
    layer = functools.partial(ops.dense, recipe=recipe, implementation="reference")
    remat = jax.checkpoint(lambda *operands, state: layer(*operands, scaling_state=state), policy=POLICIES["operands"])
    jax.ad_checkpoint.print_saved_residuals(remat, case.x, case.kernel, state=recipe.init())
    kept = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "from the argument" not in line]
    assert sorted(kept) == ["f32[]"] * 4 + ["f8_e4m3fn[64,32]", "f8_e4m3fn[64,64]"]
