"""Log-probabilities, losses of policies and distances of heads: all logits at once in float64, whatever the options."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax import ops
from te_jax.recipe import BlockScaling, CurrentScaling
from te_jax.reference.token_distributions import divergence, log_probs
from te_jax.testing import assert_close

TOKENS, WIDTH, VOCAB = 70, 48, 50  # a vocabulary that is padded for 16 bits
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


def normal(rng, *shape, dtype="float32", scale=1.0):
    return jnp.asarray(scale * rng.standard_normal(shape), dtype)


def draw(rng, dtype="float32", vocab=VOCAB):
    """x, kernel and bias, and tokens of which some are ignored."""
    tokens = np.where(rng.random(TOKENS) < 0.2, -100, rng.integers(0, vocab, TOKENS))
    kernel = normal(rng, WIDTH, vocab, dtype=dtype, scale=0.3)
    return (normal(rng, TOKENS, WIDTH, dtype=dtype), kernel, normal(rng, vocab, dtype=dtype)), jnp.asarray(tokens)


def policy(log_prob, entropy, before, advantage, counted):
    ratio = jnp.exp(log_prob - before)
    loss = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage) - 0.1 * entropy
    return jnp.where(counted == 1, loss, 0.0)


def compare(loss, wanted, operands, tolerance):
    """A scalar and its gradients, against float64."""
    value, found = jax.jit(jax.value_and_grad(loss, argnums=range(len(operands))))(*operands)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = [np.asarray(a, np.float64) for a in operands]
        expected = jax.jit(jax.value_and_grad(wanted, argnums=range(len(operands))))(*wide)
        expected = jax.tree.map(lambda a: np.asarray(a, np.float32), expected)
    for a, b in zip((value, *found), (expected[0], *expected[1]), strict=True):
        assert_close(np.asarray(a, np.float32), b, tolerance=tolerance)
    assert [a.dtype for a in found] == [a.dtype for a in operands]


CASES = [
    (1.0, None, False, "float32"),
    (0.7, None, True, "float32"),
    (1.0, 3.0, True, "bfloat16"),
    (1.5, None, False, "bfloat16"),
    (1.0, 3.0, False, "bfloat16"),
]


@pytest.mark.parametrize(("temperature", "softcap", "entropy", "dtype"), CASES)
def test_log_probs(temperature, softcap, entropy, dtype, rng):
    operands, tokens = draw(rng, dtype)
    weights = np.asarray(rng.uniform(0.5, 2.0, (2, TOKENS)), np.float32)  # no sum that vanishes
    softmax = ops.Softmax(temperature=temperature, logit_softcap=softcap)

    def loss(x, kernel, bias):
        found = ops.linear_log_probs(x, kernel, tokens, bias=bias, entropy=entropy, chunk_tokens=16, softmax=softmax)
        return sum(jnp.sum(a * w) for a, w in zip(found if entropy else [found], weights, strict=False))

    def wanted(x, kernel, bias):
        found = log_probs(x @ kernel + bias[None, :], tokens, softmax)
        return sum(jnp.sum(a * w) for a, w in zip(found if entropy else found[:1], weights, strict=False))

    compare(loss, wanted, operands, TOLERANCE[dtype])


@pytest.mark.parametrize(("temperature", "softcap", "entropy", "dtype"), CASES)
def test_token_loss(temperature, softcap, entropy, dtype, rng):
    (x, kernel, bias), tokens = draw(rng, dtype)
    softmax = ops.Softmax(temperature=temperature, logit_softcap=softcap)
    before = log_probs((x @ kernel + bias[None, :]).astype(jnp.float32), tokens, softmax)[0]
    before += rng.choice([-0.5, -0.1, 0.1], TOKENS)  # far from where the loss is clipped, which rounding would move
    counted = jnp.asarray(rng.integers(0, 2, TOKENS))
    fn = policy if entropy else lambda log_prob, *arrays: policy(log_prob, jnp.zeros_like(log_prob), *arrays)

    def loss(x, kernel, bias, before, advantage):
        arrays = before, advantage, counted
        head = functools.partial(ops.linear_token_loss, bias=bias, entropy=entropy, chunk_tokens=16, softmax=softmax)
        return 3.0 * head(x, kernel, tokens, fn, *arrays)

    def wanted(x, kernel, bias, before, advantage):
        found = log_probs(x @ kernel + bias[None, :], tokens, softmax)[: 1 + entropy]
        values = jnp.where(tokens == -100, 0.0, fn(*found, before, advantage, counted))
        return 3.0 * jnp.sum(values) / jnp.sum(tokens != -100).astype(values.dtype)

    compare(loss, wanted, (x, kernel, bias, before, jnp.abs(normal(rng, TOKENS))), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "temperature", "softcap", "reduction"),
    [("forward", 2.0, None, "mean"), ("reverse", 1.0, 3.0, "sum"), ("jensen_shannon", 0.7, None, "none")],
)
def test_divergence(kind, temperature, softcap, reduction, dtype, rng):
    operands, tokens = draw(rng, dtype)
    teacher = normal(rng, TOKENS, 32, dtype=dtype), normal(rng, 32, VOCAB, dtype=dtype, scale=0.3)
    weight = jnp.where(tokens == -100, 0.0, normal(rng, TOKENS) ** 2)
    cotangent = jnp.abs(normal(rng, TOKENS)) if reduction == "none" else 3.0
    options = {"kind": kind, "beta": 0.3, "softmax": ops.Softmax(temperature=temperature, logit_softcap=softcap)}

    def loss(x, kernel, bias):
        head = functools.partial(ops.linear_divergence, bias=bias, weight=weight, reduction=reduction, chunk_tokens=16)
        return jnp.sum(cotangent * head(x, kernel, *teacher, **options))

    def wanted(x, kernel, bias):
        other = jnp.matmul(*(a.astype(x.dtype) for a in teacher))
        values = divergence(x @ kernel + bias[None, :], other, weight == 0.0, **options) * weight
        total = jnp.sum(values * cotangent)
        return total / jnp.sum(weight) if reduction == "mean" else total

    compare(loss, wanted, operands, TOLERANCE[dtype])


@pytest.mark.parametrize("products", [("dgrad", "wgrad"), ("forward", "dgrad", "wgrad")])
@pytest.mark.parametrize("recipe", [BlockScaling(), CurrentScaling()], ids=["block", "current"])
def test_products_in_fp8(recipe, products, rng):
    (x, kernel, _), tokens = draw(rng)
    teacher = normal(rng, TOKENS, 32), normal(rng, 32, VOCAB, scale=0.3)
    arrays = jnp.full((TOKENS,), -9.0), -jnp.ones(TOKENS), jnp.ones((TOKENS,), jnp.int32)  # none is clipped

    def gradients(name, **options):
        fn = {
            "log_probs": lambda x, kernel: ops.linear_log_probs(x, kernel, tokens, **options).sum(),
            "token_loss": lambda x, kernel: ops.linear_token_loss(
                x, kernel, tokens, policy, *arrays, entropy=True, **options
            ),
            "divergence": lambda x, kernel: ops.linear_divergence(x, kernel, *teacher, **options),
        }[name]
        return jax.jit(jax.grad(fn, argnums=(0, 1)))(x, kernel)

    for name in ("log_probs", "token_loss", "divergence"):
        wanted = gradients(name)
        found = gradients(name, recipe=recipe, fp8_products=products)
        for a, b in zip(found, wanted, strict=True):
            assert 1e-4 < np.linalg.norm(a - b) / np.linalg.norm(b) < 0.2, name


def test_an_ignored_token_is_not_read(rng):
    (x, kernel, _), tokens = draw(rng)
    ignored = (tokens == -100)[:, None]
    advantage = normal(rng, TOKENS)

    def loss(x, kernel, advantage):
        fn = lambda log_prob, advantage: jnp.log(advantage) * log_prob  # noqa: E731
        one = ops.linear_token_loss(x, kernel, tokens, fn, advantage)
        two = ops.linear_log_probs(x, kernel, tokens, entropy=True)
        three = ops.linear_divergence(x, kernel, x, kernel + 1.0, weight=jnp.where(tokens == -100, 0.0, 1.0))
        return one + jnp.sum(two[0] + two[1]) + three

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    clean = step(jnp.where(ignored, 0.0, x), kernel, jnp.abs(advantage) + 0.1)
    broken = step(jnp.where(ignored, jnp.nan, x), kernel, jnp.where(ignored[:, 0], jnp.nan, jnp.abs(advantage) + 0.1))
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(broken), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.any(np.asarray(broken[1][0])[np.asarray(ignored[:, 0])])


def test_a_loss_of_tokens_takes_three_products_and_says_log_probs(rng, native_kernels):
    (x, kernel, _), tokens = draw(rng, vocab=64)

    def loss(x, kernel):
        return ops.linear_token_loss(x, kernel, tokens, jnp.negative, reduction="sum", return_log_probs=True)

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (value, said), _ = step(x, kernel)
    assert_close(said, log_probs(x @ kernel, tokens)[0], tolerance=2e-5)
    assert_close(value, -np.sum(said), tolerance=2e-5)
    text = step.lower(x, kernel).compile().as_text()
    assert (text.count(" dot("), text.count('custom_call_target="te_gemm"')) == (2, 1)


@pytest.mark.parametrize("temperature", [0.0, float("inf"), "1"])
def test_a_temperature_is_above_zero(temperature):
    with pytest.raises(ValueError, match=r"temperature is .*; it must be a finite number above 0"):
        ops.Softmax(temperature)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"softmax": 0.7}, "softmax is 0.7; it must be a te_jax.ops.Softmax"),
        ({"reduction": "none"}, "for each token use linear_log_probs"),
        ({"arrays": (jnp.ones(3),)}, r"arrays\[0\] has shape \(3,\), which does not broadcast to that of tokens"),
        ({"fn": lambda log_prob: jnp.sum(log_prob)}, r"fn returns .* for arrays of shape \(3,\)"),
        ({"fn": lambda log_prob: log_prob > 0}, r"fn returns .*bool.*it must return floats"),
    ],
)
def test_refusals_of_a_token_loss(change, message, rng):
    (x, kernel, _), tokens = draw(rng)
    options = {"fn": jnp.negative, "arrays": ()} | change
    fn, arrays = options.pop("fn"), options.pop("arrays")
    with pytest.raises(ValueError, match=message):
        ops.linear_token_loss(x, kernel, tokens, fn, *arrays, **options)


def test_a_function_that_closes_over_what_is_traced_is_refused(rng):
    (x, kernel, _), tokens = draw(rng)
    with pytest.raises(ValueError, match="fn closes over a traced array: give it"):
        jax.jit(lambda a: ops.linear_token_loss(x, kernel, tokens, lambda log_prob: a * log_prob))(2.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "kl"}, "kind is 'kl'; it must be one of"),
        ({"beta": 1.0}, "beta is 1.0; it must be a number above 0 and below 1"),
        ({"teacher_x": jnp.ones((3, 32))}, r"teacher_x has shape \(3, 32\); for x of shape"),
        ({"teacher_kernel": jnp.ones((32, 51))}, "a vocabulary of 51; kernel has 50"),
        ({"weight": jnp.ones((3,))}, r"weight has shape \(3,\)"),
    ],
)
def test_refusals_of_a_divergence(change, message, rng):
    (x, kernel, _), _ = draw(rng)
    operands = {"teacher_x": jnp.ones((TOKENS, 32)), "teacher_kernel": jnp.ones((32, VOCAB))} | change
    with pytest.raises(ValueError, match=message):
        ops.linear_divergence(x, kernel, **operands)
