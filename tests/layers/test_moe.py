"""The mixture of experts against products by all experts, which masks what they were not given."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xla_targets
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from xla_targets import know_handlers, needs_compiler

from te_jax.hlo import Buffer, buffers
from te_jax.layers import ExpertParallel, Router, expert_buffers, moe
from te_jax.ops import Activation
from te_jax.recipe import BlockScaling
from te_jax.testing import assert_close

pytestmark = pytest.mark.skipif(
    jax.default_backend() == "gpu", reason="float32, which has no kernel on a GPU: see tests/gpu"
)

TOKENS, IN, HIDDEN, OUT, EXPERTS = (2, 24), 32, 48, 32, 8
GPT_OSS = Activation("silu", 1.702, 7.0, 1.0)
MODELS = {
    "deepseek_v3": (
        Router(4, score="sigmoid", num_groups=4, top_groups=2, scaling_factor=2.5),
        {},
        ("expert_bias", "shared"),
    ),
    "qwen2": (Router(4, normalize=False), {}, ("shared", "shared_router")),
    "llama4": (Router(1, score="sigmoid", normalize=False, weighted="inputs"), {}, ("shared",)),
    "gpt_oss": (Router(4), {"activation": GPT_OSS}, ("router_bias", "bias")),
}


def draw(rng, extra=(), dtype="float32", tokens=TOKENS):
    def normal(*shape, scale=1.0, dtype=jnp.dtype(dtype)):
        return jax.device_put(np.asarray(scale * rng.standard_normal(shape), np.float32).astype(dtype))

    def kernels(*experts):
        shapes = ((IN, HIDDEN), (IN, HIDDEN), (HIDDEN, OUT))
        return tuple(normal(*experts, *shape, scale=2 * shape[0] ** -0.5) for shape in shapes)

    operands = {
        "x": normal(*tokens, IN),
        "router_kernel": normal(IN, EXPERTS, scale=IN**-0.5, dtype="float32"),
        "kernel": kernels(EXPERTS),
        "router_bias": normal(EXPERTS, dtype="float32"),
        "expert_bias": normal(EXPERTS, scale=0.1, dtype="float32"),
        "bias": (normal(EXPERTS, HIDDEN), normal(EXPERTS, HIDDEN), normal(EXPERTS, OUT)),
        "shared": kernels(),
        "shared_router": normal(IN, 1, scale=IN**-0.5),
    }
    return {name: operands[name] for name in ("x", "router_kernel", "kernel", *extra)}


def mlp(x, kernels, biases, activation):
    """The products of x [experts or 1, *tokens, in] and kernels [experts, in, out]."""

    def linear(x, kernel, bias):
        y = jnp.einsum("e...d,edh->e...h", jnp.broadcast_to(x, (len(kernel), *x.shape[1:])), kernel)
        return y + bias.reshape(len(bias), *(1,) * (y.ndim - 2), -1)

    gate, up, down = zip(kernels, biases, strict=True)
    gate, up = linear(x, *gate), linear(x, *up)
    gate, up = jnp.minimum(gate, activation.limit), jnp.clip(up, -activation.limit, activation.limit)
    return linear(gate * jax.nn.sigmoid(activation.alpha * gate) * (up + activation.offset), *down)


def all_experts(routing, x, router_kernel, kernel, router, *, router_bias=0.0, bias=None, shared=None,
                shared_router=None, activation=Activation("silu"), expert_bias=None):  # fmt: skip
    """y with the given choice of experts, whose weights are computed from the logits once more."""
    del expert_bias
    logits = x @ router_kernel + router_bias
    scores = jax.nn.softmax(logits, axis=-1) if router.score == "softmax" else jax.nn.sigmoid(logits)
    chosen = jnp.take_along_axis(scores, routing.experts, axis=-1)
    if router.normalize:
        chosen = chosen / chosen.sum(axis=-1, keepdims=True)
    of_expert = routing.experts == np.arange(EXPERTS, dtype=np.int32).reshape(-1, *(1,) * x.ndim)
    weight = router.scaling_factor * jnp.where(of_expert, chosen, 0.0).sum(axis=-1, keepdims=True)
    zeros = (jnp.zeros((1, 1), x.dtype),) * 3
    if router.weighted == "inputs":
        y = jnp.where(of_expert.any(axis=-1, keepdims=True), mlp(x * weight, kernel, bias or zeros, activation), 0.0)
    else:
        y = weight * mlp(x[None], kernel, bias or zeros, activation)
    y = y.sum(axis=0)
    if shared is None:
        return y
    of_shared = mlp(x[None], [k[None] for k in shared], zeros, activation)[0]
    return y + (of_shared if shared_router is None else jax.nn.sigmoid(x @ shared_router) * of_shared)


def step_of(function, cotangent, **static):
    def step(operands, *first):
        def y(operands):
            result = function(*first, **operands, **static)
            return getattr(result, "y", result)

        value, vjp = jax.vjp(y, operands)
        return value, vjp(cotangent.astype(value.dtype))[0]

    return jax.jit(step)


def expected(operands, cotangent, routing, **static):
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        wide = jax.tree.map(lambda leaf: np.asarray(leaf).astype(np.float64), operands)
        routing = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), routing)
        found = step_of(all_experts, jnp.asarray(np.asarray(cotangent, np.float64)), **static)(wide, routing)
        return jax.tree.map(np.asarray, found)


@pytest.mark.parametrize("model", MODELS)
def test_as_all_experts(rng, model):
    """Value, and gradients of everything that has one."""
    router, options, extra = MODELS[model]
    operands = draw(rng, extra)
    cotangent = jax.device_put(rng.standard_normal((*TOKENS, OUT), np.float32))

    @jax.jit
    def both(operands):
        result = moe(**operands, router=router, **options)
        return result, step_of(moe, cotangent, router=router, **options)(operands)

    result, (y, gradients) = both(operands)
    assert result.dropped == 0
    wanted, wanted_gradients = expected(operands, cotangent, result.routing, router=router, **options)
    assert_close(y, wanted, dtype="float32")
    for (path, found), other in zip(
        jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(wanted_gradients), strict=True
    ):
        if "expert_bias" in str(path):
            assert not np.any(np.asarray(found))
        else:
            assert_close(found, other, dtype="float32", tolerance=1e-4)


def test_fp8(rng):
    recipe = BlockScaling()
    router, options, extra = MODELS["deepseek_v3"]
    operands = draw(rng, extra, dtype="bfloat16")
    cotangent = jax.device_put(rng.standard_normal((*TOKENS, OUT), np.float32))

    @jax.jit
    def both(operands):
        routing = moe(**operands, router=router).routing
        return routing, step_of(moe, cotangent, router=router, recipe=recipe)(operands)

    routing, (y, gradients) = both(operands)
    wanted, wanted_gradients = expected(operands, cotangent, routing, router=router, **options)
    assert_close(y, wanted, dtype="bfloat16", tolerance=0.12)
    for name in ("x", "kernel"):
        for found, other in zip(*map(jax.tree.leaves, (gradients[name], wanted_gradients[name])), strict=True):
            assert_close(found, other, dtype="bfloat16", tolerance=0.2)


def test_what_is_kept(rng):
    """x, gate and up, the weights, and integers: 2Td + 4TKn bytes in bfloat16, and kernels."""
    top_k, tokens = 4, (2048,)
    operands = draw(rng, dtype="bfloat16", tokens=tokens)
    kernels = operands["kernel"]

    def layer(x, weights_of, kernel):
        return moe(x, weights_of, kernel, Router(top_k), recipe=BlockScaling()).y

    _, vjp = jax.vjp(layer, operands["x"], operands["router_kernel"], kernels)
    kept = {id(leaf): leaf for leaf in jax.tree.leaves(vjp) if hasattr(leaf, "nbytes")}.values()
    of_tokens = [leaf for leaf in kept if leaf.ndim and max(leaf.shape) >= tokens[0]]
    rows = tokens[0] * top_k + 127 * EXPERTS
    # Beside x and both pre-activations: float32 logits, weights and their product, and int32 permutation and experts.
    small = 4 * tokens[0] * (EXPERTS + 4 * top_k) + 4 * rows
    assert sum(leaf.nbytes for leaf in of_tokens) <= 2 * tokens[0] * IN + 4 * rows * HIDDEN + small


def test_no_product_runs_twice_and_nothing_is_scattered(rng):
    operands = draw(rng)
    cotangent = jnp.ones((*TOKENS, OUT))
    text = step_of(moe, cotangent, router=Router(2)).lower(operands).as_text()
    assert text.count("@te_grouped_gemm") == 8, "3 forward, 3 of kernels, 1 of gate and up for the rows, 1 of down"
    assert "stablehlo.scatter" not in text


def test_passes_over_rows_in_blocks(rng):
    """Tokens, and the gradients of results, are quantized where they are gathered; gate and up are kept as they are."""
    operands = draw(rng, dtype="bfloat16")
    step = step_of(moe, jnp.ones((*TOKENS, OUT)), router=Router(2), recipe=BlockScaling())
    text = step.lower(operands).as_text()
    assert text.count("@te_grouped_gemm(") == 8  # one for both parts of the gradient of x
    assert text.count("@te_quantize_blocks_of_rows(") == 3
    assert text.count("@te_quantize_blocks(") == 3  # kernels
    assert "reduce_precision" not in text
    assert "stablehlo.scatter" not in text


def test_capacity(rng):
    """What is beyond it adds nothing, not even a bias, and has no gradient."""
    operands, count = draw(rng, ("bias", "router_bias")), int(np.prod(TOKENS))
    operands["router_kernel"] = np.asarray(operands["router_kernel"]) * (np.arange(EXPERTS) != 0)
    operands["router_bias"] = 100.0 * np.asarray(np.arange(EXPERTS) == 0, np.float32)

    @jax.jit
    def step(operands):
        results = [moe(**operands, router=Router(1, capacity=capacity)) for capacity in (5, None)]
        dx = jax.grad(lambda x: jnp.sum(moe(**operands | {"x": x}, router=Router(1, capacity=5)).y))(operands["x"])
        return results, dx

    (limited, whole), dx = step(operands)
    assert limited.dropped == count - 5
    assert whole.dropped == 0
    y, wanted, dx = (np.asarray(value).reshape(count, -1) for value in (limited.y, whole.y, dx))
    assert_close(y[:5], wanted[:5], tolerance=1e-6)
    assert wanted[5:].any(axis=1).all()
    assert not y[5:].any()
    assert dx[:5].any(axis=1).all()
    assert not dx[5:].any()


DIVIDED = ("x", "kernel", "bias")
EXPERT_PARALLEL = {
    "exchange, capacity, four devices": (
        4,
        Router(4, capacity=17),
        {"exchange": "all_to_all"},
        ("bias", "router_bias"),
    ),
    "fp8, weighted inputs, four devices": (
        4,
        Router(2, score="sigmoid", normalize=False, weighted="inputs"),
        {"recipe": BlockScaling(power_of_two_scales=True), "exchange": "all_gather", "buffer_factor": 4.0},
        ("bias", "shared"),
    ),
    "gathered tokens in fp8, bfloat16, four devices": (
        4,
        Router(4),
        {"recipe": BlockScaling(power_of_two_scales=True), "exchange": "all_gather", "dtype": "bfloat16"},
        (),
    ),
    "gathered tokens, capacity, tokens without experts on most devices of two axes": (
        4,
        Router(1, normalize=False, capacity=5),
        {"recipe": BlockScaling(), "exchange": "all_gather", "mesh": {"node": 2, "expert": 2}},
        (),
    ),
}


@pytest.mark.parametrize("name", EXPERT_PARALLEL)
def test_expert_parallel(rng, require_devices, name):
    """Each device holds some of the experts: loss and all gradients are those of one device with all tokens."""
    devices, router, options, extra = EXPERT_PARALLEL[name]
    require_devices(devices)
    axes = options.get("mesh", {"expert": devices})
    split = P(tuple(axes))
    apart = ExpertParallel(tuple(axes), options.get("buffer_factor"), options.get("exchange"))
    both = {name: options[name] for name in ("recipe",) if name in options}
    operands = jax.tree.map(np.asarray, draw(rng, extra, tokens=(8, 6), dtype=options.get("dtype", "float32")))
    cotangent = jax.device_put(rng.standard_normal((8, 6, OUT), np.float32))
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(*axes.values()), tuple(axes))

    def mapped(**operands):
        local = functools.partial(moe, router=router, expert_parallel=apart, **both)
        specs = {name: split if name in DIVIDED else P() for name in operands}
        return jax.shard_map(
            lambda operands: (r := local(**operands))._replace(dropped=r.dropped[None]),
            mesh=mesh, in_specs=(specs,), out_specs=split, check_vma=options.get("check_vma", True),
        )(operands)  # fmt: skip

    def step(function):
        def loss(operands):
            result = function(**operands)
            return jnp.sum(result.y.astype(jnp.float32) * cotangent), result

        return jax.jit(jax.value_and_grad(loss, has_aux=True))

    functions = mapped, functools.partial(moe, router=router, **both)
    results = [jax.tree.map(np.asarray, step(function)(operands)) for function in functions]
    ((_, result), gradients), ((_, wanted), wanted_gradients) = results
    np.testing.assert_array_equal(result.routing.experts, wanted.routing.experts)
    assert result.dropped.sum() == wanted.dropped
    assert (wanted.dropped > 0) == (router.capacity is not None)
    tolerance = 1e-2 if "dtype" in options else 1e-5  # sums over tokens in another order, rounded
    for one, other in zip(
        jax.tree.leaves((result.y, gradients)), jax.tree.leaves((wanted.y, wanted_gradients)), strict=True
    ):
        assert_close(one, other, tolerance=tolerance)


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
def test_nothing_travels_twice(rng, require_devices, exchange):
    """On GPUs rows or tokens in FP8 and weights there, results back, and the gradients of all three."""
    recipe = BlockScaling(power_of_two_scales=True)
    require_devices(2)
    operands = draw(rng, dtype="bfloat16")
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    specs = {name: P("expert") if name in DIVIDED else P() for name in operands}
    apart = ExpertParallel("expert", exchange=exchange)
    options = {"expert_parallel": apart, "recipe": recipe, "implementation": "reference"}

    def loss(operands):
        local = functools.partial(moe, router=Router(2), **options)
        y = jax.shard_map(lambda o: local(**o).y, mesh=mesh, in_specs=(specs,), out_specs=P("expert"))(operands)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    text = jax.jit(jax.value_and_grad(loss)).trace(operands).lower(lowering_platforms=("cuda",)).as_text()
    if exchange == "all_to_all":  # scales in one exchange with the weights
        found = re.findall(r"@ragged_all_to_all.*\(tensor<\d+x\d+x(\w+)>", text)
        wanted = ["ui8", "f32", "bf16", "bf16", "bf16", "f32"]
    else:
        found = re.findall(r"stablehlo\.(all_gather|all_to_all)\b.*: \(tensor<[\dx]+x24x\d+x([uif8632b1]+)>", text)
        wanted = [("all_gather", dtype) for dtype in ("ui8", "f32", "f32", "bf16")]
        wanted += [("all_to_all", dtype) for dtype in ("bf16", "bf16", "f32")]
        found.remove(("all_gather", "i32"))  # where choices lie
    assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
def test_what_travelled_is_kept_as_it_arrived(rng, require_devices, exchange):
    """In FP8, rather than what it was dequantized to."""
    require_devices(2)
    operands, kept = draw(rng, dtype="bfloat16"), set()
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    specs = {name: P("expert") if name in DIVIDED else P() for name in operands}
    options = {"expert_parallel": ExpertParallel("expert", exchange=exchange), "router": Router(2)}

    def local(operands):
        recipe = BlockScaling(power_of_two_scales=True)
        y, vjp = jax.vjp(lambda operands: moe(**operands, recipe=recipe, **options).y, operands)
        kept.update((leaf.dtype.name, leaf.shape) for leaf in jax.tree.leaves(vjp) if leaf.shape[-1:] == (IN,))
        return y

    jax.eval_shape(jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=P("expert")), operands)
    said = expert_buffers(24, (IN, HIDDEN, OUT), EXPERTS, Router(2), devices=2, recipe=BlockScaling())
    arrived = (2, 1, 24, IN) if exchange == "all_gather" else (said.num_rows, IN)
    wide = {shape for dtype, shape in kept if dtype == "bfloat16"}
    assert ("uint8", arrived) in kept
    assert wide == {(1, 24, IN)}, "x of this device, for the router"


@needs_compiler
def test_xla_makes_no_pass_over_rows_of_gathered_tokens():
    """Rows [num_rows, width] lie in memory for te_jax's kernels; XLA only adds up y and dx of each token's rows."""
    know_handlers()
    tokens, width, hidden, experts = 4 * 1024, 512, 256, 32
    mesh = xla_targets.mesh(4, "expert")
    recipe = BlockScaling(power_of_two_scales=True)  # tokens travel in FP8
    said = expert_buffers(tokens // 4, (width, hidden, width), experts, Router(4), devices=4, recipe=recipe)
    num_rows = said.num_rows

    def shape(*sizes, spec=P("expert"), dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))

    def local(x, dy, router_kernel, kernel):
        options = {"recipe": recipe, "implementation": "native"}
        apart = ExpertParallel("expert", exchange="all_gather")
        y, vjp = jax.vjp(lambda *a: moe(*a, Router(4), expert_parallel=apart, **options).y, x, router_kernel, kernel)
        return y, vjp(dy)

    specs = P("expert"), P("expert"), P(), P("expert")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P("expert"), (P("expert"), P(), P("expert"))))
    kernels = tuple(shape(experts, *sizes) for sizes in ((width, hidden), (width, hidden), (hidden, width)))
    operands = shape(tokens, width), shape(tokens, width), shape(width, experts, spec=P(), dtype=jnp.float32), kernels
    program = xla_targets.without_autotuning(jax.jit(mapped).lower(*operands)).as_text()
    scales, rows = Buffer("f32", (width // 128, num_rows)), Buffer("f8e4m3fn", (num_rows, width))
    gate, y = Buffer("bf16", (num_rows, hidden)), Buffer("bf16", (num_rows, width))
    assert {scales, rows, gate, y} <= set(buffers(program))
    assert said == (num_rows, scales.bytes + rows.bytes, 2 * gate.bytes, y.bytes)
    # The entry computation alone: values inside of fusions are not stored.
    entry = program[program.index("\nENTRY") :]
    instructions = re.findall(r"^  (?:ROOT )?%(\S+) = (.*?) ([a-z][\w-]*)\((.*)", entry, re.MULTILINE)
    names = {
        name for name, result, *_ in instructions if {str(num_rows), str(width)} <= set(re.findall(r"\d+", result))
    }
    assert names
    passes = [each for each in instructions if each[2] not in ("custom-call", "get-tuple-element", "tuple", "bitcast")]
    assert [name for name, *_ in passes if name in names] == []
    sums = [
        result.split("{")[0] for _, result, _, operands in passes if names & set(re.findall(r"%([\w.-]+)", operands))
    ]
    assert sums == [f"bf16[4,1024,{width}]"] * 2


def test_accumulators(rng):
    operands = draw(rng)
    cotangent = jax.device_put(rng.standard_normal((*TOKENS, OUT), np.float32))
    step = step_of(moe, cotangent, router=Router(2))
    zeros, ones = (tuple(np.full(k.shape, value, k.dtype) for k in operands["kernel"]) for value in (0, 1))
    of_zeros, of_ones = (step({**operands, "wgrad_accumulator": before})[1] for before in (zeros, ones))
    for kernel, gradient, following in zip(
        of_ones["kernel"], of_zeros["wgrad_accumulator"], of_ones["wgrad_accumulator"], strict=True
    ):
        assert not kernel.any()
        assert gradient.any()
        assert_close(following, np.asarray(gradient) + 1.0, tolerance=1e-5)


def test_refusals(rng):
    operands = draw(rng)
    with pytest.raises(ValueError, match="weighted is 'outputs'; it must be 'results' or 'inputs'"):
        Router(2, weighted="outputs")
    with pytest.raises(ValueError, match=r"kernel must be a tuple of three, \(gate, up, down\)"):
        jax.eval_shape(lambda: moe(operands["x"], operands["router_kernel"], operands["kernel"][:2], Router(2)))
    for more in ({}, {"shared": operands["kernel"], "shared_router": jnp.ones((IN,))}):
        with pytest.raises(ValueError, match=r"shared_router has shape .*; it must be \(32, 1\), with shared"):
            jax.eval_shape(
                lambda more=more: moe(**operands, router=Router(2), **{"shared_router": np.ones((IN, 1))} | more)
            )
    with pytest.raises(ValueError, match=r"router is 2; it must be a te_jax\.layers\.Router, such as"):
        jax.eval_shape(lambda: moe(**operands, router=2))
    with pytest.raises(ValueError, match="num_experts is 6; it must be a multiple of the 4 devices"):
        expert_buffers(64, (IN, HIDDEN, OUT), 6, Router(2), devices=4)
    mesh = Mesh(np.array(jax.devices()[:1]), ("expert",))
    local = functools.partial(moe, router=Router(2), expert_parallel="expert")
    mapped = jax.shard_map(lambda o: local(**o).y, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    with pytest.raises(
        ValueError, match=r"kernel\[0\] has shape \(4, 32, 48\); with expert_parallel each device has 8 experts"
    ):
        jax.eval_shape(mapped, {**operands, "kernel": tuple(k[:4] for k in operands["kernel"])})
    with pytest.raises(ValueError, match="top_k is 9; there are only 8 experts"):
        jax.eval_shape(lambda: moe(**operands, router=dataclasses.replace(Router(2), top_k=9)))


def test_forward_mode_names_the_way_out(rng):
    operands = draw(rng)

    def run(x):
        return moe(x, operands["router_kernel"], operands["kernel"], Router(2), recipe=BlockScaling()).y

    with pytest.raises(NotImplementedError, match=r"te_jax\.layers\.moe has first derivatives in reverse mode"):
        jax.jvp(run, (operands["x"],), (operands["x"],))
