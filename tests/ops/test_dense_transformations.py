"""Linear layers of symbolic sizes, which kernels run, and what remat keeps. The rest is in tests/conformance."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_oracle import GRADIENT, PLAIN, RECIPES, oracle, random_case, wide
from jax import export
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr

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


@pytest.mark.parametrize(
    ("implementation", "recipe"),
    [(None, CURRENT), (None, BLOCK), (None, None), ("reference", BLOCK)],
    ids=["current", "block", "none", "block-reference"],
)
def test_symbolic_sizes(implementation, recipe, rng):
    """One exported program for any batch and time, as those who serve a model make it."""
    layer = jax.jit(functools.partial(ops.dense, recipe=recipe, implementation=implementation))
    targets = native.register() if implementation is None else {}
    checks = [export.DisabledSafetyCheck.custom_call(target) for target in targets]
    kernel = random_case(rng, (32,), (64,), (48,), with_bias=False).kernel
    cases = [("b, t", (1, 1), (3, 7)), ("b, 128*t", (1, 128)), ("b, 16", (2, 16))]
    for symbols, *several in cases if implementation is None else cases[1:2]:
        tokens = jax.ShapeDtypeStruct((*export.symbolic_shape(symbols), 64), jnp.bfloat16)
        program = export.export(layer, disabled_checks=checks)(tokens, kernel)
        for sizes in several:
            x = jax.device_put(np.asarray(rng.standard_normal((*sizes, 64)), jnp.bfloat16))
            found = program.call(x, kernel)
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


def kernels_that_run(function, *arguments):
    """(products, quantizations) of the compiled program, from which XLA has removed what is not used."""
    text = jax.jit(function).lower(*arguments).compile().as_text()
    return tuple(text.count(f'custom_call_target="{target}"') for target in ("te_gemm", "te_quantize_tensor"))


@pytest.mark.parametrize("kernel_contracting", ["first", "last"])
@pytest.mark.parametrize(
    ("argnums", "expected"), [((0, 1), (3, 3)), ((0,), (2, 3)), ((1,), (2, 3))], ids=["both", "x", "kernel"]
)
def test_only_what_is_differentiated_is_computed(argnums, expected, kernel_contracting, native_kernels, rng):
    """Three products for both, two for one alone, and x, kernel and dy quantized once each."""
    case = random_case(rng, (32,), (64,), (48,), with_bias=False, kernel_contracting=kernel_contracting)
    options = {"recipe": CURRENT, "kernel_contracting": kernel_contracting}
    step = jax.value_and_grad(functools.partial(loss, **options), argnums=argnums)
    assert kernels_that_run(step, case.x, case.kernel, case.dy) == expected


def test_a_forward_pass_makes_two_copies(case):
    def run(x, kernel, dy):
        return jax.jit(functools.partial(reference, recipe=CURRENT))(x, kernel, dy)

    # A function with a derivative of its own is traced into one equation; what is inside is what runs.
    text = str(jax.jit(run).lower(case.x, case.kernel, case.dy).as_text())
    assert text.count("stablehlo.dot_general") == 1
    assert sum("bitcast_convert" in line and "f8E4M3FN>" in line.split("->")[-1] for line in text.splitlines()) == 2


def test_gradient_of_the_bias_alone_needs_no_products(native_kernels, rng):
    case = random_case(rng, (32,), (64,), (48,))

    def run(bias):
        return jnp.sum(ops.dense(case.x, case.kernel, bias, recipe=CURRENT).astype(jnp.float32))

    products, _ = kernels_that_run(jax.grad(run), case.bias)
    assert products == 0
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
    x = jax.device_put(np.asarray(rng.standard_normal((32, 64)), jnp.bfloat16))
    return x, [
        jax.device_put(np.asarray(rng.standard_normal(shape) / 8, jnp.bfloat16)) for shape in ((64, 128), (128, 64))
    ]


@functools.cache
def gradients_of_two_layers(policy=None):
    # Otherwise XLA may leave out a rounding to bfloat16 in one program that the other keeps.
    options = {"xla_allow_excess_precision": False}
    return jax.jit(jax.grad(functools.partial(two_layers, policy=policy), argnums=(0, 1)), compiler_options=options)


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_recompute_what_they_say(policy, two_layer_case):
    remat = functools.partial(two_layers, policy=policy)
    assert count(jax.grad(remat, argnums=(0, 1)), *two_layer_case) == EXPECTED[policy]
    if policy in ("preactivations", "everything", "nothing"):
        return  # tests/conformance has their values
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
