"""The mixture of experts against a loop over all experts, which masks what they were not given."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax import ops
from te_jax.layers import ExpertParallel, Router, moe
from te_jax.ops import Activation
from te_jax.recipe import BlockScaling, CurrentScaling, RowwiseScaling
from te_jax.testing import assert_close

pytestmark = pytest.mark.skipif(
    jax.default_backend() == "gpu", reason="float32, which has no kernel on a GPU: see tests/gpu"
)

TOKENS, IN, HIDDEN, OUT, EXPERTS = (2, 24), 32, 48, 32, 8
GPT_OSS = Activation("silu", 1.702, 7.0, 1.0)
MODELS = {
    "mixtral": (Router(2), {}, ()),
    "qwen3": (Router(4), {}, ()),
    "deepseek_v3": (
        Router(4, score="sigmoid", num_groups=4, top_groups=2, scaling_factor=2.5),
        {},
        ("expert_bias", "shared"),
    ),
    "llama4": (Router(1, score="sigmoid", normalize=False, weighted="inputs"), {}, ("shared",)),
    "gpt_oss": (Router(4), {"activation": GPT_OSS}, ("router_bias", "bias")),
}


def draw(rng, extra=(), dtype="float32", tokens=TOKENS):
    def normal(*shape, scale=1.0):
        return jnp.asarray(scale * rng.standard_normal(shape), jnp.float32).astype(dtype)

    def kernels(*experts):
        shapes = ((IN, HIDDEN), (IN, HIDDEN), (HIDDEN, OUT))
        return tuple(normal(*experts, *shape, scale=2 * shape[0] ** -0.5) for shape in shapes)

    operands = {
        "x": normal(*tokens, IN),
        "router_kernel": normal(IN, EXPERTS, scale=IN**-0.5).astype(jnp.float32),
        "kernel": kernels(EXPERTS),
        "router_bias": normal(EXPERTS).astype(jnp.float32),
        "expert_bias": 0.1 * normal(EXPERTS).astype(jnp.float32),
        "bias": (normal(EXPERTS, HIDDEN), normal(EXPERTS, HIDDEN), normal(EXPERTS, OUT)),
        "shared": kernels(),
    }
    return {name: operands[name] for name in ("x", "router_kernel", "kernel", *extra)}


def mlp(x, kernels, biases, activation):
    gate, up = (x @ kernel + bias for kernel, bias in zip(kernels[:2], biases[:2], strict=True))
    gate, up = jnp.minimum(gate, activation.limit), jnp.clip(up, -activation.limit, activation.limit)
    return (gate * jax.nn.sigmoid(activation.alpha * gate) * (up + activation.offset)) @ kernels[2] + biases[2]


def loop(routing, x, router_kernel, kernel, router, *, router_bias=0.0, bias=None, shared=None,
         activation=Activation("silu"), expert_bias=None):  # fmt: skip
    """y with the given choice of experts, whose weights are computed from the logits once more."""
    del expert_bias
    experts = routing.experts
    logits = x @ router_kernel + router_bias
    scores = jax.nn.softmax(logits, axis=-1) if router.score == "softmax" else jax.nn.sigmoid(logits)
    chosen = jnp.take_along_axis(scores, experts, axis=-1)
    if router.normalize:
        chosen = chosen / chosen.sum(axis=-1, keepdims=True)
    chosen = router.scaling_factor * chosen
    y = 0.0
    for e in range(EXPERTS):
        weight = jnp.sum(jnp.where(experts == e, chosen, 0.0), axis=-1, keepdims=True)
        here = jnp.any(experts == e, axis=-1, keepdims=True)
        own = [k[e] for k in kernel], [0.0 if bias is None else b[e] for b in bias or (None,) * 3]
        if router.weighted == "inputs":
            y = y + jnp.where(here, mlp(x * weight, *own, activation), 0.0)
        else:
            y = y + jnp.where(here, weight * mlp(x, *own, activation), 0.0)
    return y if shared is None else y + mlp(x, shared, (0.0,) * 3, activation)


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
        wide = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf).astype(np.float64)), operands)
        routing = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), routing)
        found = step_of(loop, jnp.asarray(np.asarray(cotangent, np.float64)), **static)(wide, routing)
        return jax.tree.map(np.asarray, found)


@pytest.mark.parametrize("model", MODELS)
def test_as_a_loop_over_experts(rng, model):
    """Value, and gradients of everything that has one."""
    router, options, extra = MODELS[model]
    operands = draw(rng, extra)
    cotangent = jnp.asarray(rng.standard_normal((*TOKENS, OUT)), jnp.float32)
    result = jax.jit(functools.partial(moe, router=router, **options))(**operands)
    assert result.dropped == 0
    y, gradients = step_of(moe, cotangent, router=router, **options)(operands)
    np.testing.assert_array_equal(y, result.y)
    wanted, wanted_gradients = expected(operands, cotangent, result.routing, router=router, **options)
    assert_close(y, wanted, dtype="float32")
    for (path, found), other in zip(
        jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(wanted_gradients), strict=True
    ):
        if "expert_bias" in str(path):
            assert not found.any()
        else:
            assert_close(found, other, dtype="float32", tolerance=1e-4)


@pytest.mark.parametrize(
    "recipe", [BlockScaling(), CurrentScaling(), RowwiseScaling()], ids=["block", "current", "row"]
)
def test_fp8(rng, recipe):
    router, options, extra = MODELS["deepseek_v3"]
    operands = draw(rng, extra, dtype="bfloat16")
    cotangent = jnp.asarray(rng.standard_normal((*TOKENS, OUT)), jnp.float32)
    routing = jax.jit(functools.partial(moe, router=router))(**operands).routing
    y, gradients = step_of(moe, cotangent, router=router, recipe=recipe)(operands)
    wanted, wanted_gradients = expected(operands, cotangent, routing, router=router, **options)
    assert_close(y, wanted, dtype="bfloat16", tolerance=0.12)
    for name in ("x", "kernel"):
        for found, other in zip(*map(jax.tree.leaves, (gradients[name], wanted_gradients[name])), strict=True):
            assert_close(found, other, dtype="bfloat16", tolerance=0.2)


@pytest.mark.parametrize("recipe", [None, BlockScaling()], ids=["none", "block"])
def test_what_is_kept(rng, recipe):
    """x, gate and up, the weights, and integers: 2Td + 4TKn bytes in bfloat16, and kernels."""
    top_k, tokens = 4, (2048,)
    operands = draw(rng, dtype="bfloat16", tokens=tokens)
    kernels = operands["kernel"]

    def layer(x, weights_of, kernel):
        return moe(x, weights_of, kernel, Router(top_k), recipe=recipe).y

    _, vjp = jax.vjp(layer, operands["x"], operands["router_kernel"], kernels)
    kept = {id(leaf): leaf for leaf in jax.tree.leaves(vjp) if hasattr(leaf, "nbytes")}.values()
    of_tokens = [leaf for leaf in kept if leaf.ndim and max(leaf.shape) >= tokens[0]]
    rows = tokens[0] * top_k + (0 if recipe is None else 127 * EXPERTS)
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
    """What is beyond it adds nothing, and has no gradient."""
    operands = draw(rng)
    operands["router_kernel"] = operands["router_kernel"].at[:, 0].set(0.0)
    operands["router_bias"] = jnp.zeros(EXPERTS).at[0].set(100.0)
    result = moe(**operands, router=Router(1, capacity=5))
    count = int(np.prod(TOKENS))
    assert result.dropped == count - 5
    flat = np.asarray(result.y).reshape(count, OUT)
    assert flat[:5].any(axis=1).all()
    assert not flat[5:].any()
    biased = moe(**operands, router=Router(1, capacity=5), bias=(None, None, jnp.ones((EXPERTS, OUT))))
    assert_close(biased.y.reshape(count, OUT)[:5], flat[:5] + 1.0, tolerance=1e-5)
    assert not biased.y.reshape(count, OUT)[5:].any()


def test_losses_and_bias_in_a_step(rng):
    """The parts of a training step: losses from the logits, and the next expert bias."""
    operands = draw(rng)
    router = Router(2, score="sigmoid")

    @jax.jit
    def step(operands, expert_bias):
        def loss(operands):
            result = moe(**operands, router=router, expert_bias=expert_bias)
            balance = ops.load_balancing_loss(result.logits, result.routing.experts, score="sigmoid")
            total = jnp.mean(result.y**2) + 1e-2 * balance + 1e-3 * ops.router_z_loss(result.logits)
            return total, ops.expert_counts(result.routing.experts, EXPERTS)

        (value, counts), gradients = jax.value_and_grad(loss, has_aux=True)(operands)
        return value, gradients, ops.update_expert_bias(expert_bias, counts), counts

    value, gradients, bias, counts = step(operands, jnp.zeros(EXPERTS))
    assert np.isfinite(value)
    assert counts.sum() == 2 * np.prod(TOKENS)
    assert bias.any()
    assert all(leaf.any() for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize("recipe", [None, BlockScaling()], ids=["none", "block"])
def test_data_parallel(rng, recipe):
    """Inside shard_map every device sorts its own tokens; gradients of kernels are summed over devices."""
    operands = draw(rng)
    cotangent = jnp.asarray(rng.standard_normal((*TOKENS, OUT)), jnp.float32)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))

    def mapped(x, router_kernel, kernel):
        local = functools.partial(moe, router=Router(2), recipe=recipe)
        return jax.shard_map(
            lambda *a: local(*a).y, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data")
        )(x, router_kernel, kernel)  # fmt: skip

    found = step_of(mapped, cotangent)(operands)
    wanted = step_of(moe, cotangent, router=Router(2), recipe=recipe)(operands)
    tolerance = 1e-5 if recipe is None else 0.15  # devices have blocks of their own
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert_close(one, other, tolerance=tolerance)


PARTS = {"x": P("expert"), "kernel": P("expert"), "bias": P("expert")}
EXPERT_PARALLEL = {
    "gather, two devices": (2, Router(2, weighted="inputs"), {"buffer_factor": 4.0}, ("shared",)),
    "exchange, capacity, four devices": (
        4,
        Router(4, capacity=17),
        {"exchange": "all_to_all"},
        ("bias", "router_bias"),
    ),
    "fp8, an expert on each of eight": (
        8,
        Router(2, score="sigmoid", scaling_factor=2.5),
        {"recipe": BlockScaling(power_of_two_scales=True), "check_vma": False, "dtype": "bfloat16"},
        ("expert_bias",),
    ),
    **{
        f"fp8, weighted inputs, {exchange}, four devices": (
            4,
            Router(2, score="sigmoid", normalize=False, weighted="inputs"),
            {"recipe": BlockScaling(power_of_two_scales=True), "exchange": exchange},
            ("bias",),
        )
        for exchange in ("all_to_all", "all_gather")
    },
}


@pytest.mark.parametrize("name", EXPERT_PARALLEL)
def test_expert_parallel(rng, require_devices, name):
    """Each device holds some of the experts: loss and all gradients are those of one device with all tokens."""
    devices, router, options, extra = EXPERT_PARALLEL[name]
    require_devices(devices)
    apart = ExpertParallel("expert", options.get("buffer_factor"), options.get("exchange"))
    both = {name: options[name] for name in ("recipe",) if name in options}
    operands = draw(rng, extra, tokens=(8, 6), dtype=options.get("dtype", "float32"))
    cotangent = jnp.asarray(rng.standard_normal((8, 6, OUT)), jnp.float32)
    mesh = Mesh(np.array(jax.devices()[:devices]), ("expert",))

    def mapped(**operands):
        local = functools.partial(moe, router=router, expert_parallel=apart, **both)
        specs = {name: PARTS.get(name, P()) for name in operands}
        return jax.shard_map(
            lambda operands: (r := local(**operands))._replace(dropped=r.dropped[None]),
            mesh=mesh, in_specs=(specs,), out_specs=P("expert"), check_vma=options.get("check_vma", True),
        )(operands)  # fmt: skip

    def step(function):
        def loss(operands):
            result = function(**operands)
            return jnp.sum(result.y.astype(jnp.float32) * cotangent), result

        return jax.jit(jax.value_and_grad(loss, has_aux=True))

    (_, result), gradients = step(mapped)(operands)
    (_, wanted), wanted_gradients = step(functools.partial(moe, router=router, **both))(operands)
    np.testing.assert_array_equal(result.routing.experts, wanted.routing.experts)
    assert result.dropped.sum() == wanted.dropped
    assert (wanted.dropped > 0) == (router.capacity is not None)
    tolerance = 1e-2 if "dtype" in options else 1e-5  # sums over tokens in another order, rounded
    for one, other in zip(
        jax.tree.leaves((result.y, gradients)), jax.tree.leaves((wanted.y, wanted_gradients)), strict=True
    ):
        assert_close(one, other, tolerance=tolerance)


@pytest.mark.parametrize(
    ("power_of_two_scales", "weighted", "rows"),
    [(False, "results", "bf16"), (True, "results", "ui8"), (True, "inputs", "bf16")],
)
def test_nothing_travels_twice(rng, require_devices, power_of_two_scales, weighted, rows):
    """On GPUs rows and weights there, in FP8 where that is exact, results back, and the gradients of all three."""
    recipe = BlockScaling(power_of_two_scales=power_of_two_scales)
    require_devices(2)
    operands = draw(rng, dtype="bfloat16")
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    specs = {name: PARTS.get(name, P()) for name in operands}
    apart = ExpertParallel("expert", exchange="all_to_all")
    options = {"expert_parallel": apart, "recipe": recipe, "implementation": "reference"}

    def loss(operands):
        local = functools.partial(moe, router=Router(2, weighted=weighted), **options)
        y = jax.shard_map(lambda o: local(**o).y, mesh=mesh, in_specs=(specs,), out_specs=P("expert"))(operands)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    text = jax.jit(jax.value_and_grad(loss)).trace(operands).lower(lowering_platforms=("cuda",)).as_text()
    exchanges = re.findall(r"@ragged_all_to_all.*\(tensor<\d+x\d+x(\w+)>", text)
    assert sorted(exchanges) == sorted([rows, "f32", "bf16", "bf16", "bf16", "f32"])


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_tensor_parallel(rng, axis_type):
    """Under jit the hidden features of all experts are split over devices, and x too."""
    operands = draw(rng, ("shared",))
    cotangent = jnp.asarray(rng.standard_normal((*TOKENS, OUT)), jnp.float32)
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",), axis_types=(axis_type,))
    columns, rows = P(None, None, "model"), P(None, "model")
    specs = {
        "x": P(None, None, "model"),
        "router_kernel": P(),
        "kernel": (columns, columns, rows),
        "shared": (P(None, "model"), P(None, "model"), P("model")),
    }
    placed = jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), operands, specs)
    with jax.set_mesh(mesh):
        found = step_of(moe, cotangent, router=Router(2))(placed)
    wanted = step_of(moe, cotangent, router=Router(2))(operands)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert_close(one, other, tolerance=1e-5)


def test_accumulators(rng):
    operands = draw(rng)
    accumulators = tuple(jnp.ones_like(k) for k in operands["kernel"])
    cotangent = jnp.asarray(rng.standard_normal((*TOKENS, OUT)), jnp.float32)
    _, wanted = step_of(moe, cotangent, router=Router(2))(operands)
    _, found = step_of(moe, cotangent, router=Router(2))({**operands, "wgrad_accumulator": accumulators})
    for kernel, following, gradient in zip(found["kernel"], found["wgrad_accumulator"], wanted["kernel"], strict=True):
        assert not kernel.any()
        assert_close(following, gradient + 1.0, tolerance=1e-5)


def test_refusals(rng):
    operands = draw(rng)
    with pytest.raises(ValueError, match="weighted is 'outputs'; it must be 'results' or 'inputs'"):
        Router(2, weighted="outputs")
    with pytest.raises(ValueError, match=r"kernel must be a tuple of three, \(gate, up, down\)"):
        moe(operands["x"], operands["router_kernel"], operands["kernel"][:2], Router(2))
    mesh = Mesh(np.array(jax.devices()[:1]), ("expert",))
    local = functools.partial(moe, router=Router(2), expert_parallel="expert")
    mapped = jax.shard_map(lambda o: local(**o).y, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    with pytest.raises(
        ValueError, match=r"kernel\[0\] has shape \(4, 32, 48\); with expert_parallel each device has 8 experts"
    ):
        jax.eval_shape(mapped, {**operands, "kernel": tuple(k[:4] for k in operands["kernel"])})
    with pytest.raises(ValueError, match="top_k is 9; there are only 8 experts"):
        moe(**operands, router=dataclasses.replace(Router(2), top_k=9))


@pytest.mark.parametrize("recipe", [None, BlockScaling()], ids=["none", "block"])
def test_forward_mode_names_the_way_out(rng, recipe):
    operands = draw(rng)

    def run(x):
        return moe(x, operands["router_kernel"], operands["kernel"], Router(2), recipe=recipe).y

    with pytest.raises(NotImplementedError, match=r"te_jax\.layers\.moe has first derivatives in reverse mode"):
        jax.jvp(run, (operands["x"],), (operands["x"],))
