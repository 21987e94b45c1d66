"""Which products and quantizations a linear layer runs, what it keeps, and programs of symbolic sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_oracle import GRADIENT, RECIPES, oracle, random_case, warm_state
from jax import export
from jax.ad_checkpoint import checkpoint_name

from te_jax import checkpoint_policies, native, ops
from te_jax.recipe import DelayedScaling
from te_jax.testing import assert_close

pytestmark = pytest.mark.usefixtures("native_kernels")

CURRENT, DELAYED = RECIPES["current"], RECIPES["delayed"]


def loss(x, kernel, dy, **options):
    return jnp.sum(ops.dense(x, kernel, **options).astype(jnp.float32) * dy.astype(jnp.float32))


@pytest.fixture
def case(rng):
    return random_case(rng, (32,), (64,), (48,), with_bias=False)


def test_symbolic_sizes(rng):
    """One exported program for any batch and time, forward and backward."""
    case = random_case(rng, (3, 7), (64,), (48,), with_bias=False)
    step = jax.jit(jax.grad(functools.partial(loss, recipe=RECIPES["block"]), argnums=(0, 1)))
    sizes = export.symbolic_shape("b, t")
    x, dy = (jax.ShapeDtypeStruct((*sizes, features), jnp.bfloat16) for features in (64, 48))
    checks = [export.DisabledSafetyCheck.custom_call(target) for target in native.register()]
    dx, dkernel = export.export(step, disabled_checks=checks)(x, case.kernel, dy).call(case.x, case.kernel, case.dy)
    for found, wanted in ((dx, oracle(case).dx), (dkernel, oracle(case).dkernel)):
        assert_close(found, wanted, dtype="bfloat16", tolerance=GRADIENT * 1.1)


# ----------------------------------------------------------------------------------------------------- what is computed


def calls(text, form):
    """(products, quantizations) of a program."""
    return tuple(text.count(form.format(target)) for target in ("te_gemm", "te_quantize_tensor"))


def compiled_calls(function, *operands):
    """Those that are left when XLA has removed what nothing reads."""
    text = jax.jit(function).lower(*operands).compile().as_text()
    return calls(text, 'custom_call_target="{}"')


@pytest.mark.parametrize(("argnums", "kernel_contracting"), [(0, "last"), (1, "first")], ids=["x", "kernel"])
def test_only_what_is_differentiated_is_computed(argnums, kernel_contracting, rng):
    """Two of the three products, and x, kernel and dy are quantized once each."""
    case = random_case(rng, (32,), (64,), (48,), with_bias=False, kernel_contracting=kernel_contracting)
    run = functools.partial(loss, recipe=CURRENT, kernel_contracting=kernel_contracting)
    assert compiled_calls(jax.value_and_grad(run, argnums), case.x, case.kernel, case.dy) == (2, 3)


def test_the_gradient_of_a_bias_alone_needs_no_products(case):
    def run(bias):
        return jnp.sum(ops.dense(case.x, case.kernel, bias, recipe=CURRENT).astype(jnp.float32))

    assert compiled_calls(jax.grad(run), jnp.zeros(48))[0] == 0


@pytest.mark.parametrize("recipe", [CURRENT, DELAYED], ids=["current", "delayed"])
def test_several_kernels_share_one_quantization_of_x(recipe, case):
    """Also where XLA merges nothing, and with the residuals: three kernels, three gradients, and one x."""
    states = (warm_state(case, recipe),) * 3 if recipe is DELAYED else None

    def step(x, kernels, states, dys):
        run = functools.partial(ops.dense, recipe=recipe)
        ys, vjp = jax.vjp(lambda x, kernels, states: run(x, kernels, scaling_state=states), x, kernels, states)
        return ys, vjp(dys)

    text = jax.jit(step).lower(case.x, (case.kernel,) * 3, states, (case.dy,) * 3).as_text()
    assert text.count("custom_call @te_quantize") == 1 + 3 + 3
    assert text.count("custom_call @te_gemm") == 3 + 3 + 3


# --------------------------------------------------------------------------------------------------------- what is kept

POLICIES = {
    None: None,
    "operands": checkpoint_policies.save_fp8_operands,
    "preactivations": checkpoint_policies.save_fp8_operands_and_preactivations,
    "offload": checkpoint_policies.offload_fp8_operands(preactivations=True),
    "offload operands": checkpoint_policies.offload_fp8_operands(),
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
}
# Products and quantizations of two layers with an activation between them: plain gradients have 6 and 6. The first
# product has to run again where the values before the activation are not kept, on x and kernel that are quantized
# again; where nothing is kept, those of the second layer are quantized again too.
EXPECTED = {"operands": (7, 6 + 2), "offload operands": (7, 6 + 2), "nothing": (7, 6 + 4)}


def two_layers(x, kernels, policy=None, activation="gelu"):
    def layers(x, kernels):
        h = ops.dense(jnp.sin(x), kernels[0], recipe=CURRENT, activation=activation)
        return ops.dense(h, kernels[1], recipe=CURRENT)

    if policy is not None:
        layers = jax.checkpoint(layers, policy=POLICIES[policy])
    return jnp.sum(jnp.square(layers(x, kernels).astype(jnp.float32)))


@pytest.fixture
def two_layer_case(rng):
    x = np.asarray(rng.standard_normal((32, 64)), jnp.bfloat16)
    return x, [np.asarray(rng.standard_normal(shape) / 8, jnp.bfloat16) for shape in ((64, 128), (128, 64))]


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_recompute_what_they_say(policy, two_layer_case):
    activation = "gelu" if policy in ("operands", "nothing") else "silu"  # inside the product, and after it
    run = functools.partial(two_layers, policy=policy, activation=activation)
    text = jax.jit(jax.grad(run, argnums=(0, 1))).lower(*two_layer_case).as_text()
    assert calls(text, "custom_call @{}(") == EXPECTED.get(policy, (6, 6))


def kept(capsys, function, *operands):
    jax.ad_checkpoint.print_saved_residuals(function, *operands)
    return sorted(line.split()[0] for line in capsys.readouterr().out.splitlines() if "from the argument" not in line)


# x and kernel of either layer, transposed and as it is, with their scales.
OPERANDS = ["f8_e4m3fn[64,32]", "f8_e4m3fn[128,32]", "f8_e4m3fn[64,128]", "f8_e4m3fn[128,64]", *["f32[]"] * 4]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("operands", OPERANDS), ("preactivations", [*OPERANDS, "bf16[32,128]"]), ("nothing", [])],
    ids=["operands", "preactivations", "nothing"],
)
def test_policies_keep_what_they_say(policy, expected, two_layer_case, capsys):
    found = kept(capsys, functools.partial(two_layers, policy=policy), *two_layer_case)
    found.remove("f32[32,64]")  # the result, which the loss squares
    assert found == sorted(expected)


def test_policies_keep_what_delayed_scaling_observed(rng, capsys):
    """Two numbers beside the operands and their scales: x and kernel are not read again for them."""
    case, recipe = random_case(rng, (32,), (64,), (64,), with_bias=False), DelayedScaling(history_len=2)

    def layer(x, kernel, state):
        return ops.dense(x, kernel, recipe=recipe, scaling_state=state)

    remat = jax.checkpoint(layer, policy=POLICIES["operands"])
    found = kept(capsys, remat, case.x, case.kernel, recipe.init())
    assert found == ["f32[]"] * 4 + ["f8_e4m3fn[64,32]", "f8_e4m3fn[64,64]"]


def test_memories_of_what_is_offloaded():
    policy = checkpoint_policies.offload_fp8_operands(offload_src="here", offload_dst="there")
    (name,) = jax.make_jaxpr(lambda x: checkpoint_name(x, "te_dense_activation"))(jnp.zeros(1)).eqns
    chosen = policy(name.primitive, **name.params)
    assert (chosen.src, chosen.dst) == ("here", "there")
