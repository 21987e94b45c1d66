"""FP8 products by XLA: their values are the reference's, and XLA's compiler makes FP8 products of them for each GPU."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from xla_targets import compiled, mesh, needs_compiler, without_autotuning

from te_jax import ops
from te_jax.hlo import _hlo
from te_jax.hlo._program import Program
from te_jax.hlo.collectives import _type_of, parse
from te_jax.recipe import CurrentScaling, DelayedScaling, MXFP8Scaling
from te_jax.testing import assert_close

CURRENT, DELAYED, MXFP8 = CurrentScaling(), DelayedScaling(history_len=2), MXFP8Scaling()
TOKENS, IN, OUT = 384, 256, 512
CAPABILITIES = ("8.9", "9.0", "10.0", "12.0")

# --------------------------------------------------------------------------------------------------------------- values


def test_values_are_those_of_the_reference(rng):
    """Both multiply the same FP8 values. Before their scales sums are beyond float16."""
    dtype, contracting, activation = "float16", "last", "silu"
    x, dy = (normal(rng, (40, size), dtype, 30.0) for size in (32, 48))
    kernel, bias, accumulator = (
        normal(rng, (48, 32), dtype), normal(rng, (48,), dtype), normal(rng, (48, 32), "float32", 5e3)
    )  # fmt: skip

    def step(implementation):
        def layer(x, kernel, bias, accumulator):
            return ops.dense(
                x, kernel, bias, recipe=CURRENT, wgrad_accumulator=accumulator, kernel_contracting=contracting,
                activation=activation, implementation=implementation,
            )  # fmt: skip

        y, vjp = jax.vjp(layer, x, kernel, bias, accumulator)
        return y, *vjp(dy)

    found, expected = jax.jit(lambda: (step("xla"), step("reference")))()
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        # The sum is rounded once more, which moves a few values of the gradient to the next code.
        assert_close(a, b, tolerance=2e-2)


def test_a_program_exported_for_gpus_and_cpus(rng):
    """CUDA's products have an algorithm that CPUs have not."""
    x, kernel = normal(rng, (2, 256, 256), "bfloat16"), normal(rng, (2, 256, 512), "bfloat16")

    def layer(implementation):
        dense = functools.partial(ops.dense, recipe=CURRENT, implementation=implementation)
        return jax.jit(lambda x, kernel: (dense(x, kernel[0]), jax.vmap(dense)(x, kernel)))

    exported = export.export(layer("xla"), platforms=("cuda", "cpu"))(x, kernel)
    for found, wanted in zip(exported.call(x, kernel), layer("reference")(x, kernel), strict=True):
        assert_close(found, wanted, tolerance=1e-2)
    assert ("allow_imprecise_accumulation = true" in exported.mlir_module()) == (jax.__version_info__ < (0, 12))


def normal(rng, shape, dtype, scale=1.0):
    return jax.device_put((scale * rng.standard_normal(shape)).astype(jnp.dtype(dtype)))


# --------------------------------------------------------------------------------------------------- programs for GPUs


LAYERS = {
    "dense": functools.partial(ops.dense, recipe=CURRENT, activation="gelu"),
    "delayed": lambda x, kernel, state, **options: ops.dense(x, kernel, recipe=DELAYED, scaling_state=state, **options),
    "einsum": functools.partial(ops.einsum, "td,df->tf", recipe=CURRENT),
    "gated_mlp": lambda x, gate, down, **options: ops.gated_mlp(x, (gate, -gate, down), recipe=CURRENT, **options),
    "linear_cross_entropy": lambda x, kernel, **options: ops.linear_cross_entropy(
        x, kernel, jnp.zeros(TOKENS, jnp.int32), recipe=CURRENT, fp8_products=("forward", "dgrad", "wgrad"), **options
    ),
}
OF_BLOCKS = {
    "dense": functools.partial(ops.dense, recipe=MXFP8, activation="gelu"),
    "gated_mlp": lambda x, kernel, down, **options: ops.gated_mlp(x, (kernel, kernel, down), recipe=MXFP8, **options),
    "linear_cross_entropy": lambda x, kernel, **options: ops.linear_cross_entropy(
        x, kernel, jnp.zeros(TOKENS, jnp.int32), recipe=MXFP8, fp8_products=("forward", "dgrad", "wgrad"), **options
    ),
}
MORE = {"delayed": jax.eval_shape(DELAYED.init), "gated_mlp": jax.ShapeDtypeStruct((OUT, IN), jnp.bfloat16)}


def products(program):
    """(target, dtypes of both operands, shape of the result) of every product; "dot" where XLA or Triton multiplies."""
    program = Program(program.as_text())
    for computation, instructions in program.instructions(("custom-call", "dot")).items():
        for instruction in instructions.values():
            target = instruction.opcode
            if target == "custom-call":
                target = _hlo.unquoted(instruction.attributes["custom_call_target"])
            if target != "dot" and not target.startswith(("__cublas", "__cudnn")):
                continue
            types = (_type_of(operand, program.computations[computation]) for operand in instruction.operands[:2])
            dtypes = [array.dtype for type_ in types for array in _hlo.arrays(type_)]
            yield target, dtypes, tuple(_hlo.arrays(instruction.type)[0].shape)


CUBLASLT = "__cublas$lt$matmul$f8"
SHAPES = {"forward": (TOKENS, OUT), "dgrad": (TOKENS, IN), "wgrad": (IN, OUT)}


@needs_compiler
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n != "dense" else []) for n in LAYERS])
def test_programs(capability, name, report_gpus):
    """cuBLASLt's FP8 product forward and for both gradients, by default where there are no native kernels.

    From 9.0 on kernels would quantize beside it: no machine without a GPU registers them for one.
    """
    report_gpus(capability)
    layer = functools.partial(LAYERS[name], implementation=None if capability == "8.9" else "xla")
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (SHAPES["dgrad"], SHAPES["wgrad"])]
    operands += [MORE[name]] if name in MORE else []

    def loss(*operands):
        return jnp.sum(jnp.square(layer(*operands).astype(jnp.float32)))

    gradients = jax.grad(loss, argnums=tuple(range(len(operands))))
    # Elsewhere autotuning chooses between cuBLASLt and Triton on the GPU.
    options = {"xla_gpu_enable_triton_gemm": jax.__version_info__ < (0, 12)}
    found = list(products(compiled(gradients, *operands, capability=capability, compiler_options=options)))
    assert {(target, *(dtype[:2] for dtype in dtypes)) for target, dtypes, _ in found} == {(CUBLASLT, "f8", "f8")}
    shapes = {shape[-2:] for *_, shape in found}  # XLA may share a sum among several products
    assert shapes >= {SHAPES["forward"], SHAPES["dgrad"]}
    assert shapes & {SHAPES["wgrad"], SHAPES["wgrad"][::-1]}


@needs_compiler
@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_programs_of_few_rows(tokens, report_gpus):
    """No algorithm that XLA has for matrices alone is named for a product that may become one of a vector."""
    report_gpus("9.0")
    x, kernel = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((tokens, IN), SHAPES["wgrad"]))

    def loss(x, kernel):
        return jnp.sum(jnp.square(ops.dense(x, kernel, recipe=CURRENT, implementation="xla").astype(jnp.float32)))

    compiled(jax.grad(loss, argnums=(0, 1)), x, kernel)


@needs_compiler
@pytest.mark.parametrize("capability", ["10.0", "12.0"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n != "dense" else []) for n in OF_BLOCKS])
def test_programs_of_mxfp8(capability, name, report_gpus):
    """cuDNN's block-scaled product forward and for both gradients, and no other product."""
    report_gpus(capability)
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (SHAPES["dgrad"], SHAPES["wgrad"])]
    operands += [MORE[name]] if name in MORE else []

    def loss(*operands):
        return jnp.sum(jnp.square(OF_BLOCKS[name](*operands, implementation="xla").astype(jnp.float32)))

    gradients = jax.grad(loss, argnums=tuple(range(len(operands))))
    found = list(products(compiled(gradients, *operands, capability=capability)))
    assert {(target, *dtypes) for target, dtypes, _ in found} == {("__cudnn$blockScaledDot", *["f8e4m3fn"] * 2)}
    shapes = {shape[-2:] for *_, shape in found}
    assert shapes >= {SHAPES["forward"], SHAPES["dgrad"]}
    assert shapes & {SHAPES["wgrad"], SHAPES["wgrad"][::-1]}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("x", "kernel"), [(P("device"), P()), (P(), P(None, "device")), (P(None, None, "device"), P("device"))]
)
def test_programs_of_mxfp8_on_two_gpus(x, kernel, kind, report_gpus):
    """Each multiplies its part, and only sums are exchanged."""
    report_gpus("10.0")
    two = Mesh(mesh(2, capability="10.0").devices, ("device",), axis_types=(kind,))

    def loss(x, kernel):
        return jnp.sum(jnp.square(ops.dense(x, kernel, recipe=MXFP8).astype(jnp.float32)))

    operands = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(two, spec))
        for shape, spec in (((4, TOKENS // 3, IN), x), ((IN, OUT), kernel))
    ]
    with jax.set_mesh(two):
        program = without_autotuning(jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*operands))
    assert [target for target, *_ in products(program)] == ["__cudnn$blockScaledDot"] * 3
    assert {collective.kind for collective in parse(program.as_text())} <= {"all-reduce"}
