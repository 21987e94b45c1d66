"""Routers and their losses against the formulas of published models."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from ops import router_oracle as oracle

from te_jax import ops
from te_jax.testing import assert_close

TOKENS, EXPERTS = (3, 4), 16
DEEPSEEK = {"score": "sigmoid", "num_groups": 4, "top_groups": 2, "scaling_factor": 2.5}


def draw(rng, *shape, dtype=jnp.float32):
    return jax.device_put((2.0 * rng.standard_normal(shape)).astype(dtype))


def biases(rng):
    return jax.device_put((0.3 * rng.standard_normal(EXPERTS)).astype(np.float32))


def deepseek_v2(logits):
    scores = np.exp(logits) / np.exp(logits).sum()
    groups = scores.reshape(4, -1)
    allowed = oracle.highest(groups.max(axis=1), 3)
    masked = np.where(np.isin(np.arange(4), allowed)[:, None], groups, 0).reshape(-1)
    experts = oracle.highest(masked, 4)
    return experts, 16 * scores[experts]


DEEPSEEK_V2 = {"num_groups": 4, "top_groups": 3, "top_of_group": 1, "normalize": False, "scaling_factor": 16.0}
# name: (options of router, function of one token's logits)
MODELS = {
    "mixtral": ({"top_k": 2}, functools.partial(oracle.mixtral, k=2)),
    "qwen3": ({"top_k": 8}, functools.partial(oracle.mixtral, k=8)),
    "qwen2": ({"top_k": 4, "normalize": False}, functools.partial(oracle.qwen2, k=4)),
    "gpt-oss": ({"top_k": 4}, functools.partial(oracle.gpt_oss, k=4)),
    "llama4": ({"top_k": 1, "score": "sigmoid", "normalize": False}, oracle.llama4),
    "deepseek-v2": ({"top_k": 4, **DEEPSEEK_V2}, deepseek_v2),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("model", MODELS)
def test_models(rng, model, dtype):
    options, route = MODELS[model]
    logits = draw(rng, *TOKENS, EXPERTS, dtype=dtype)
    found = jax.jit(functools.partial(ops.router, **options))(logits)
    experts, weights = oracle.each_token(route, np.asarray(logits, np.float64))
    assert found.experts.dtype == jnp.int32
    np.testing.assert_array_equal(found.experts, experts)
    assert_close(found.weights, weights, dtype="float32")


def test_deepseek_v3(rng):
    logits, bias = draw(rng, *TOKENS, EXPERTS), biases(rng)
    found = jax.jit(functools.partial(ops.router, top_k=4, **DEEPSEEK))(logits, expert_bias=bias)
    experts, weights = oracle.each_token(
        oracle.deepseek_v3, logits, bias=np.asarray(bias, np.float64), k=4, groups=4, top_groups=2, factor=2.5
    )
    np.testing.assert_array_equal(found.experts, experts)
    assert_close(found.weights, weights, dtype="float32")
    without = jax.jit(functools.partial(ops.router, top_k=4, score="sigmoid", scaling_factor=2.5))(logits)
    assert (np.asarray(without.experts) != experts).any(), "neither groups nor bias moved any choice"


def test_ernie(rng):
    """A bias beside probabilities, which are those of a token's experts."""
    logits, bias = draw(rng, *TOKENS, EXPERTS), biases(rng) / 4
    found = jax.jit(functools.partial(ops.router, top_k=4))(logits, expert_bias=bias)
    experts, weights = oracle.each_token(oracle.ernie, logits, bias=np.asarray(bias, np.float64), k=4)
    np.testing.assert_array_equal(found.experts, experts)
    assert_close(found.weights, weights, dtype="float32")
    assert (oracle.each_token(oracle.mixtral, logits, k=4)[0] != experts).any()


@pytest.mark.parametrize("model", [*MODELS, "deepseek_v3"])
def test_gradients(rng, model):
    """Against central differences in float64; no step is wide enough to change a choice."""
    logits, bias = draw(rng, 5, EXPERTS), None
    if model == "deepseek_v3":
        options, bias = {"top_k": 4, **DEEPSEEK}, biases(rng)
        route = functools.partial(
            oracle.deepseek_v3, bias=np.asarray(bias, np.float64), k=4, groups=4, top_groups=2, factor=2.5
        )
    else:
        options, route = MODELS[model]
    cotangent = rng.standard_normal((5, options["top_k"]))

    def loss(logits, bias):
        return jnp.sum(ops.router(logits, expert_bias=bias, **options).weights * cotangent.astype(np.float32))

    found, of_bias = jax.jit(jax.grad(loss, argnums=(0, 1) if bias is not None else (0,)))(logits, bias), None
    if bias is not None:
        of_bias = found[1]
        assert not np.any(of_bias)
    expected = oracle.derivative(lambda x: np.sum(oracle.each_token(route, x)[1] * cotangent), logits)
    assert_close(found[0], expected, dtype="float32", tolerance=2e-5)


@pytest.mark.parametrize("options", [{}, {"score": "sigmoid"}, DEEPSEEK], ids=["softmax", "sigmoid", "groups"])
def test_of_equal_scores_the_lower_index_is_chosen(options):
    logits = np.zeros((2, EXPERTS), np.float32)
    experts = jax.jit(lambda logits: ops.router(logits, top_k=4, **options).experts)(logits)
    np.testing.assert_array_equal(experts, np.tile(np.arange(4), (2, 1)))


def test_scores_that_underflow():
    """Weights still sum to 1, and have gradients."""
    logits = np.array([[-300.0, -301.0, -500.0, -500.0]], np.float32)
    first = jax.jit(jax.value_and_grad(lambda x: ops.router(x, top_k=2, score="sigmoid").weights[0, 0]))
    weights, gradient = first(logits)
    assert_close(weights, 1 / (1 + np.exp(-1.0)), dtype="float32")
    assert np.isfinite(gradient).all()
    assert np.any(gradient)


def test_no_scatter_in_the_gradient(rng):
    def loss(logits):
        routing = ops.router(logits, top_k=4, **DEEPSEEK)
        return jnp.sum(routing.weights**2) + ops.load_balancing_loss(logits, routing.experts, score="sigmoid")

    text = jax.jit(jax.grad(loss)).lower(draw(rng, 8, EXPERTS)).as_text()
    assert "scatter" not in text


def test_memory(rng):
    """Neither pass has an array of tokens, choices and experts."""
    tokens, experts, top_k = 256, 64, 8

    def loss(logits):
        routing = ops.router(logits, top_k=top_k)
        return jnp.sum(routing.weights[:, 0]) + ops.load_balancing_loss(logits, routing.experts)

    memory = jax.jit(jax.grad(loss)).lower(draw(rng, tokens, experts)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2 * tokens * top_k * experts  # half of one in float32


# --------------------------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_load_balancing_loss(rng, score):
    logits = draw(rng, 12, EXPERTS)
    experts = jax.jit(functools.partial(ops.router, top_k=4, score=score))(logits).experts
    function = functools.partial(ops.load_balancing_loss, score=score)
    loss, gradient = jax.jit(jax.value_and_grad(function))(logits, experts)
    assert_close(loss, oracle.balance(np.asarray(logits, np.float64), experts, score), dtype="float32")
    expected = oracle.derivative(lambda x: oracle.balance(x, experts, score), logits)
    assert_close(gradient, expected, dtype="float32", tolerance=2e-5)
    shaped = jax.jit(function)(*(np.asarray(x).reshape(3, 4, -1) for x in (logits, experts)))
    assert_close(shaped, loss, tolerance=1e-6)


def test_sequence_loss(rng):
    logits = draw(rng, 3, 8, EXPERTS)
    experts = jax.jit(functools.partial(ops.router, top_k=4, score="sigmoid"))(logits).experts
    found = jax.jit(functools.partial(ops.load_balancing_loss, score="sigmoid", per_sequence=True))(logits, experts)
    each = [oracle.balance(x, e, "sigmoid") for x, e in zip(np.float64(logits), np.asarray(experts), strict=True)]
    assert_close(found, np.mean(each), dtype="float32")
    whole = jax.jit(functools.partial(ops.load_balancing_loss, score="sigmoid"))(logits, experts)
    assert abs(float(whole) - float(found)) > 1e-3


@pytest.mark.parametrize("per_sequence", [False, True])
def test_tokens_that_do_not_count(rng, per_sequence):
    """As if they were not there, even where their logits are NaN; a sequence of padding alone has no part in means."""
    logits = np.asarray(draw(rng, 3, 8, EXPERTS))
    experts = np.asarray(jax.jit(functools.partial(ops.router, top_k=2))(logits).experts)
    mask = np.ones((3, 8), bool)
    mask[:2, 5:], mask[2] = False, False
    poisoned = np.where(mask[..., None], logits, np.float32(np.nan))

    def losses(logits, experts, mask=None):
        balance = ops.load_balancing_loss(logits, experts, mask=mask, per_sequence=per_sequence)
        return balance + ops.router_z_loss(logits, mask=mask)

    step = jax.jit(jax.value_and_grad(losses))
    found, gradient = step(poisoned, experts, mask)
    wanted, expected = step(logits[:2, :5], experts[:2, :5])
    assert_close(found, wanted, tolerance=1e-6)
    assert_close(np.asarray(gradient)[:2, :5], expected, tolerance=1e-5)
    assert not np.asarray(gradient)[~mask].any()
    counts = jax.jit(lambda experts, mask: ops.expert_counts(experts, EXPERTS, mask=mask))(experts, mask)
    np.testing.assert_array_equal(counts, np.bincount(experts[:2, :5].ravel(), minlength=EXPERTS))
    nothing = np.zeros((3, 8), bool)
    assert float(step(poisoned, experts, nothing)[0]) == 0.0


def test_z_loss(rng):
    logits = draw(rng, 12, EXPERTS)
    loss, gradient = jax.jit(jax.value_and_grad(ops.router_z_loss))(logits)

    def expected(x):
        return np.mean(np.log(np.exp(x).sum(-1)) ** 2)

    assert_close(loss, expected(np.asarray(logits, np.float64)), dtype="float32")
    assert_close(gradient, oracle.derivative(expected, logits), dtype="float32", tolerance=2e-5)


def test_bias_balances_experts(rng):
    """Repeated, the update brings every expert close to the mean load."""
    logits = np.asarray(rng.standard_normal((512, EXPERTS)) + np.linspace(0.0, 2.0, EXPERTS), np.float32)
    bias = jax.jit(ops.update_expert_bias)(np.zeros(4, np.float32), np.array([1, 3, 2, 2]))
    assert bias.tolist() == pytest.approx([1e-3, -1e-3, 0, 0])

    def step(bias, _):
        counts = ops.expert_counts(ops.router(logits, top_k=2, score="sigmoid", expert_bias=bias).experts, EXPERTS)
        return ops.update_expert_bias(bias, counts, rate=2e-3), jnp.max(counts)

    _, highest = jax.jit(lambda: jax.lax.scan(step, jnp.zeros(EXPERTS), length=200))()
    highest, mean = np.asarray(highest), 2 * 512 / EXPERTS
    assert int(highest[0]) > 2.0 * mean
    assert int(highest[-1]) < 1.3 * mean


# ---------------------------------------------------------------------------------------------------- several devices


def all_of(logits, bias, **options):
    """Everything that has gradients, and what has none."""
    experts, weights = ops.router(logits, top_k=4, expert_bias=bias, **DEEPSEEK)
    losses = (
        ops.load_balancing_loss(logits, experts, score="sigmoid", **options),
        ops.load_balancing_loss(
            logits, experts, score="sigmoid", per_sequence=True, mask=logits[..., 0] > -2.0, **options
        ),
        ops.router_z_loss(logits, token_axis=tuple(name for name in options.values() if name) or None),
    )
    counts = ops.expert_counts(experts, EXPERTS, token_axis=tuple(name for name in options.values() if name) or None)
    return (experts, counts), (weights, *losses)


def mesh_of(axis_type):
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "sequence"), axis_types=(axis_type,) * 2)


def test_shard_map(rng, require_devices):
    """Losses, and their gradients, are those of all tokens, on every device."""
    require_devices(4)
    logits, bias = draw(rng, 4, 8, EXPERTS), biases(rng)
    split = P("data", "sequence")

    def total(function, logits, bias):
        _, (_, *losses) = function(logits, bias)
        return sum((i + 1.0) * loss for i, loss in enumerate(losses))

    local = functools.partial(all_of, token_axis="data", sequence_axis="sequence")
    mapped = jax.shard_map(
        local, mesh=mesh_of(AxisType.Auto), in_specs=(split, P()), out_specs=((split, P()), (split, P(), P(), P()))
    )
    (experts, counts), others = jax.jit(mapped)(logits, bias)
    (wanted, numbers), values = jax.jit(all_of)(logits, bias)
    np.testing.assert_array_equal(experts, wanted)
    np.testing.assert_array_equal(counts, numbers)
    for found, expected in zip(others, values, strict=True):
        assert_close(found, expected, tolerance=1e-5)
    found = jax.jit(jax.grad(functools.partial(total, mapped)))(logits, bias)
    assert_close(found, jax.jit(jax.grad(functools.partial(total, all_of)))(logits, bias), tolerance=1e-5)


# ------------------------------------------------------------------------------------------------------------- refusals

LOGITS = np.zeros((4, 8), np.float32)
REFUSED = {
    "logits are integers": (lambda: ops.router(jnp.zeros((4, 8), jnp.int32), top_k=2), "logits have dtype int32"),
    "no experts": (lambda: ops.router(jnp.zeros((4, 0)), top_k=2), "they need a last dimension, the experts"),
    "score": (lambda: ops.router(LOGITS, top_k=2, score="tanh"), "score is 'tanh'; it must be 'softmax' or 'sigmoid'"),
    "top_k": (lambda: ops.router(LOGITS, top_k=9), "top_k is 9; there are only 8 experts"),
    "top_k is no integer": (lambda: ops.router(LOGITS, top_k=2.0), "top_k is 2.0; it must be an integer"),
    "num_groups": (lambda: ops.router(LOGITS, top_k=2, num_groups=3), "num_groups is 3; it must divide"),
    "top_groups": (lambda: ops.router(LOGITS, top_k=2, num_groups=2, top_groups=3), "there are only 2 groups"),
    "top_groups and top_k": (lambda: ops.router(LOGITS, top_k=3, num_groups=4, top_groups=2),
     "top_groups is 2; it must divide top_k, 3"),
    "top_of_group": (lambda: ops.router(LOGITS, top_k=2, num_groups=4, top_of_group=3),
     "top_of_group is 3; a group has only 2 experts"),
    "groups too small": (lambda: ops.router(LOGITS, top_k=4, num_groups=4), "1 groups of 2 experts have only 2"),
    "bias": (lambda: ops.router(LOGITS, top_k=2, expert_bias=jnp.zeros(4)), r"expert_bias has shape \(4,\)"),
    "factor": (lambda: ops.router(LOGITS, top_k=2, scaling_factor=np.inf), "scaling_factor is inf"),
    "tokens": (lambda: ops.load_balancing_loss(LOGITS, jnp.zeros((3, 2), jnp.int32)), "begin with the same tokens"),
    "experts": (lambda: ops.load_balancing_loss(LOGITS, jnp.zeros((4, 2))), "they must be integers"),
    "mask": (lambda: ops.router_z_loss(LOGITS, mask=jnp.ones(3, bool)), r"mask has shape \(3,\)"),
    "no sequence": (lambda: ops.load_balancing_loss(jnp.zeros(8), jnp.zeros(2, jnp.int32), per_sequence=True),
     r"needs \[\*batch, sequence, experts\]"),
    "axis": (lambda: ops.router_z_loss(LOGITS, token_axis="data"), "no axis 'data' is mapped here"),
    "counts": (lambda: ops.update_expert_bias(jnp.zeros(4), jnp.zeros(3)), r"counts have shape \(3,\)"),
    "bias dtype": (lambda: ops.update_expert_bias(jnp.zeros(4, jnp.bfloat16), jnp.zeros(4)), "it must be float32"),
    "rate": (lambda: ops.update_expert_bias(jnp.zeros(4), jnp.zeros(4), rate=-1.0), "rate is -1.0"),
    "num_experts": (lambda: ops.expert_counts(jnp.zeros((4, 2), jnp.int32), 0), "num_experts is 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call)


def test_tokens_that_are_not_split_over_the_axis(require_devices):
    require_devices(4)

    def local(logits):
        return ops.router_z_loss(logits, token_axis="data")

    with pytest.raises(ValueError, match="logits is the same on all devices along"):
        jax.eval_shape(jax.shard_map(local, mesh=mesh_of(AxisType.Auto), in_specs=P(), out_specs=P()), LOGITS)
