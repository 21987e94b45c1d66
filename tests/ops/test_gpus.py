"""Which implementations run on GPUs of each compute capability: those of the table in docs/installation.md."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpus import documented
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from te_jax import native, ops, parallel
from te_jax.ops.experts_mlp import experts_mlp
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling, RowwiseScaling

CAPABILITIES = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
CURRENT = CurrentScaling()
RECIPES = {
    "current": CURRENT, "delayed": DelayedScaling(history_len=2), "rowwise": RowwiseScaling(),
    "block": BlockScaling(), "mxfp8": MXFP8Scaling(),
}  # fmt: skip
X, KERNEL = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((128, 128), (128, 128)))
SIZES = np.int32([128])


def states(recipe, count):
    return tuple(recipe.init() for _ in range(count)) if isinstance(recipe, DelayedScaling) else None


def state_of(recipe):
    return recipe.init() if isinstance(recipe, DelayedScaling) else None


def quantized(x, recipe, role):
    return ops.quantize(x, recipe.quantization(role), implementation="reference")


def on_mesh(operation, several=1):
    """A collective product of whole operands."""

    def call(x, kernel, recipe, **options):
        mesh = jax.make_mesh((1,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
        given = kernel if several == 1 else (kernel,) * several
        state = state_of(recipe) if several == 1 else states(recipe, several)
        local = functools.partial(operation, axis_name="tp", recipe=recipe, scaling_state=state, **options)
        return jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P("tp"), check_vma=False)(x, given)

    return call


LAYERS = {
    "dense": lambda x, kernel, recipe, **options: ops.dense(
        x, kernel, recipe=recipe, scaling_state=state_of(recipe), **options
    ),
    "gated_mlp": lambda x, kernel, recipe, **options: ops.gated_mlp(
        x, (kernel,) * 3, recipe=recipe, scaling_state=states(recipe, 3), **options
    ),
    "linear_cross_entropy": lambda x, kernel, recipe, **options: ops.linear_cross_entropy(
        x, kernel, jnp.zeros(len(x), jnp.int32), recipe=recipe, **options
    ),
    "gemm": lambda x, kernel, recipe, **options: ops.gemm(
        quantized(x, recipe, "activation"), quantized(kernel, recipe, "kernel"), **options
    ),
    "all_gather_matmul": on_mesh(functools.partial(parallel.all_gather_matmul, gather_dimension=0)),
    "matmul_reduce_scatter": on_mesh(functools.partial(parallel.matmul_reduce_scatter, scatter_dimension=0)),
    "parallel.gated_mlp": on_mesh(functools.partial(parallel.gated_mlp, dimension=0), several=3),
}
GROUPED = {
    "grouped_dense": lambda x, kernel, recipe, **options: ops.grouped_dense(
        x, kernel[None], SIZES, recipe=recipe, scaling_state=state_of(recipe), **options
    ),
    "experts_mlp": lambda x, kernel, recipe, **options: experts_mlp(
        x,
        jnp.ones(len(x)),
        SIZES,
        None,
        (kernel[None],) * 3,
        recipe=recipe,
        activation=ops.Activation("silu"),
        wgrad_accumulator=(None,) * 3,
        accumulate=True,
        **{"implementation": None} | options,
    ),
    "grouped_gemm": lambda x, kernel, recipe, **options: ops.grouped_gemm(
        quantized(x, recipe, "activation"),
        jax.vmap(lambda k: quantized(k, recipe, "kernel"))(kernel[None]),
        SIZES,
        **options,
    ),
}
COLLECTIVE = ("all_gather_matmul", "matmul_reduce_scatter", "parallel.gated_mlp")
NOT_FOR = {
    ("linear_cross_entropy", "delayed"),
    *((name, "mxfp8") for name in COLLECTIVE),
    *(("experts_mlp", name) for name in RECIPES if name != "block"),
}
# Layers other than the dense one take turns: each has every second recipe.
ROWS = [
    (name, recipe)
    for i, name in enumerate((*LAYERS, *GROUPED))
    for j, recipe in enumerate(RECIPES)
    if (name == "dense" or (i + j) % 2 or name == "experts_mlp") and (name, recipe) not in NOT_FOR
]
WITHOUT_GRADIENT = ("gemm", "grouped_gemm")


def multipliers(name, recipe, **options):
    """What multiplies in a layer and its gradients: of bfloat16 operands, float32 products are the reference's."""
    layer = (LAYERS | GROUPED)[name]

    def loss(x, kernel):
        return jnp.sum(layer(x, kernel, RECIPES[recipe], **options).astype(jnp.float32))

    traced = loss if name in WITHOUT_GRADIENT else jax.grad(loss, argnums=0 if recipe == "delayed" else (0, 1))
    found = set()
    for equation in equations(jax.make_jaxpr(traced)(X, KERNEL).jaxpr):
        if re.match("te_(grouped_)?gemm", str(equation.params.get("target_name"))):
            found.add("native")
        elif equation.primitive.name == "scaled_matmul_wrapper":
            found.add("xla")
        elif equation.primitive.name in ("dot_general", "ragged_dot_general"):
            types = {operand.aval.dtype.name for operand in equation.invars}
            if any(dtype.startswith("float8") for dtype in types):
                found.add("xla")
            elif types == {"float32"}:
                found.add("reference")
    return found


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("name", "recipe"), ROWS, ids=[f"{name}-{recipe}" for name, recipe in ROWS])
def test_what_multiplies(name, recipe, capability, report_gpus):
    report_gpus(capability)
    table = {(operations.split("`")[1], of): cells for (operations, of), cells in documented().items()}
    operations = "grouped_dense" if name in GROUPED else "dense"
    expected = table[operations, recipe]
    if expected[capability] == "refused":
        with pytest.raises(native.NativeUnavailableError) as refusal:
            multipliers(name, recipe)
        message = str(refusal.value)
        assert f"GPU {capability} has compute capability {capability}" in message or capability == "9.0"
        assert "implementation='reference'" in message
        if name not in WITHOUT_GRADIENT:
            assert message.startswith(f"recipe is {RECIPES[recipe]!r}, and no FP8 product for it runs on GPU")
            assert "recipe=None" in message
            for way_out, other in (("CurrentScaling", "current"), ("MXFP8Scaling", "mxfp8")):
                serves = recipe != other and table[operations, other][capability] != "refused"
                assert (f"recipe={way_out}()" in message) == serves
        if capability == "8.0":
            assert multipliers(name, recipe, implementation="reference") == {"reference"}
    else:
        assert multipliers(name, recipe) == {expected[capability]}


# --------------------------------------------------------------------------------------------------- what is no product


def in_fp8(operation, recipe):
    return functools.partial(operation, quantization=RECIPES[recipe].quantization("activation"))


def gradient_of(operation):
    def gradient(x, **options):
        return jax.grad(lambda x: jnp.sum(operation(x, **options).astype(jnp.float32)))(x)

    return gradient


def rms_norm(x, **options):
    return ops.rms_norm(x, jnp.ones(x.shape[-1]), **options)


def layer_norm(x, **options):
    return ops.layer_norm(x, jnp.ones(x.shape[-1]), jnp.zeros(x.shape[-1]), **options)


def activation(x, **options):
    return ops.activation(x, "gelu", **options)


def gated_activation(x, **options):
    return ops.gated_activation(x, x, "silu", **options)


def softmax_cross_entropy(x, **options):
    return ops.softmax_cross_entropy(x, jnp.zeros(len(x), jnp.int32), **options)


def linear_cross_entropy(x, **options):
    return ops.linear_cross_entropy(x, jnp.ones((x.shape[-1], 256), x.dtype), jnp.zeros(len(x), jnp.int32), **options)


OTHERS = {
    **{f"quantize, {recipe}": (in_fp8(ops.quantize, recipe), "te_(amax|quantize)_.*") for recipe in RECIPES},
    "rms_norm": (gradient_of(rms_norm), "te_norm.*"),
    "layer_norm": (gradient_of(layer_norm), "te_norm.*"),
    "rms_norm in FP8": (in_fp8(rms_norm, "block"), "te_norm.*"),
    "activation": (in_fp8(activation, "current"), "te_activation_.*"),
    "gated_activation": (in_fp8(gated_activation, "block"), "te_activation_.*"),
    "softmax_cross_entropy": (gradient_of(softmax_cross_entropy), "te_softmax_cross_entropy_.*"),
    "linear_cross_entropy": (gradient_of(linear_cross_entropy), "te_softmax_cross_entropy_.*"),
}
del OTHERS["quantize, mxfp8"]  # has no kernels


def kernels(fn, *operands, **options):
    """The targets that a function calls."""
    jaxpr = jax.make_jaxpr(functools.partial(fn, **options))(*operands).jaxpr
    targets = (str(equation.params.get("target_name")) for equation in equations(jaxpr))
    return {target for target in targets if target.startswith("te_")}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_product(name, capability, report_gpus):
    """Without a warning where there are no kernels: nothing would be faster."""
    report_gpus(capability)
    (cells,) = (cells for (operations, _), cells in documented().items() if operations.startswith("`quantize`"))
    operation, targets = OTHERS[name]
    found = kernels(operation, X)
    assert all(re.fullmatch(targets, target) for target in found)
    assert not kernels(operation, X, implementation="xla")
    if cells[capability] == "native":
        assert found
        assert kernels(operation, X, implementation="native") == found
    else:
        assert not found
        with pytest.raises(native.NativeUnavailableError, match=r"te_jax's kernels are for 9\.0 and later"):
            kernels(operation, X, implementation="native")


@pytest.mark.parametrize("capability", ["8.9", "9.0", "10.0", "12.0"])
@pytest.mark.parametrize("name", ["dense", "gated_mlp", "linear_cross_entropy", "all_gather_matmul"])
def test_what_quantizes_for_products_of_xla(name, capability, report_gpus):
    """Kernels, where they run; none if "xla" is asked for by name."""
    report_gpus(capability)

    def gradients(x, kernel, **options):
        def loss(x, kernel):
            return jnp.sum(LAYERS[name](x, kernel, CURRENT, **options).astype(jnp.float32))

        return jax.grad(loss, argnums=(0, 1))(x, kernel)

    found = kernels(gradients, X, KERNEL)
    assert any(target.startswith("te_quantize") for target in found) == (capability != "8.9")
    assert any(target.startswith("te_activation") for target in found) == (name == "gated_mlp" and capability != "8.9")
    assert any(target.startswith("te_gemm") for target in found) == (capability == "9.0")
    assert not kernels(gradients, X, KERNEL, implementation="xla")


@pytest.mark.parametrize("recipe", RECIPES)
def test_by_name(recipe, report_gpus):
    """A named implementation never falls back: neither where it is slower, nor where it is not there."""
    report_gpus("9.0")
    assert multipliers("dense", recipe, implementation="reference") == {"reference"}
    if recipe == "mxfp8":
        with pytest.raises(native.NativeUnavailableError, match="no native kernel multiplies FP8 with 'block_1x32'"):
            multipliers("dense", recipe, implementation="native")
        with pytest.raises(native.NativeUnavailableError, match=r"'block_1x32' .* from compute capability 10\.0 on"):
            multipliers("dense", recipe, implementation="xla")
        return
    assert multipliers("dense", recipe, implementation="native") == {"native"}
    if recipe in ("current", "delayed"):
        assert multipliers("dense", recipe, implementation="xla") == {"xla"}
    else:
        with pytest.raises(
            native.NativeUnavailableError, match="XLA multiplies FP8 with 'tensor' or 'block_1x32' scaling"
        ):
            multipliers("dense", recipe, implementation="xla")
    with pytest.raises(native.NativeUnavailableError, match="XLA has no FP8 product of groups of rows"):
        multipliers("grouped_dense", recipe, implementation="xla")
    report_gpus("10.0")
    with pytest.raises(native.NativeUnavailableError, match=r"kernels for products are for 9\.0 alone"):
        multipliers("dense", recipe, implementation="native")


@pytest.mark.parametrize("recipe", [None, CurrentScaling()])
def test_gpus_of_several_capabilities(recipe, report_gpus):
    """Kernels are chosen before JAX says on which GPU a program runs."""
    report_gpus("9.0", "8.9")
    message = r"several compute capabilities, GPU 9\.0 \(9\.0\) and GPU 8\.9 \(8\.9\).*set CUDA_VISIBLE_DEVICES"
    x = np.ones((16, 16), np.float32)
    if recipe is None:
        with pytest.warns(RuntimeWarning, match=message):
            assert jax.eval_shape(ops.dense, x, x).shape == (16, 16)
        with pytest.raises(native.NativeUnavailableError, match=message):
            jax.eval_shape(functools.partial(ops.rms_norm, implementation="native"), x, x[0])
        return
    with pytest.raises(native.NativeUnavailableError, match=message):
        jax.eval_shape(functools.partial(ops.dense, recipe=recipe), x, x)
    assert multipliers("grouped_dense", "block", implementation="reference") == {"reference"}
    assert multipliers("dense", "current", implementation="xla") == {"xla"}
    report_gpus("9.0", "9.0")
    assert multipliers("dense", "current") == {"native"}


def test_a_hopper_gpu_without_the_extension(report_gpus, monkeypatch):
    """XLA multiplies, and a warning says what would be faster."""
    report_gpus("9.0")
    state = native.extension._load("cpu")[1]
    without = native.extension.dataclasses.replace(state, loaded=False, problem="te_jax was installed without it")
    monkeypatch.setattr(native.extension, "_load", lambda platform: (None, without))
    with pytest.warns(RuntimeWarning, match="te_jax runs no native kernel: te_jax was installed without it"):
        assert multipliers("dense", "current") == {"xla"}
    with pytest.raises(native.NativeUnavailableError, match=r"installed without it\. XLA multiplies FP8 with 'tensor'"):
        multipliers("dense", "block")
