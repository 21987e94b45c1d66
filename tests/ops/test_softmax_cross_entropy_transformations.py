"""Softmax cross-entropy under JAX's transformations, against the oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cross_entropy_oracle import OPTIONS, oracle, random_case
from jax import lax

from te_jax import native, ops
from te_jax.testing import assert_close

TARGETS = ("te_softmax_cross_entropy_statistics", "te_softmax_cross_entropy_gradient")


@pytest.fixture
def loss(implementation):
    return functools.partial(ops.softmax_cross_entropy, implementation=implementation)


@pytest.fixture
def case(rng):
    return random_case(rng, (6, 77), "float32", ignored=0.2)


def assert_matches(value_and_gradient, expected):
    assert_close(value_and_gradient[0], expected.loss, dtype="float32")
    assert_close(value_and_gradient[1], expected.gradient, dtype="float32")


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_value_and_grad(wrap, loss, case):
    assert_matches(wrap(jax.value_and_grad(loss))(*case), oracle(*case))
    assert_close(wrap(jax.grad(loss))(*case), oracle(*case).gradient, dtype="float32")
    assert_close(wrap(loss)(*case), oracle(*case).loss, dtype="float32")


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("in_axes", [(0, 0), (1, 1), (2, 0), (0, None), (None, 0), (-1, None)])
def test_vmap(in_axes, reduction, loss, rng):
    whole_logits, whole_labels = random_case(rng, (3, 4, 50), "float32", ignored=0.2)
    logits, labels = (
        x[0] if axis is None else jnp.moveaxis(x, 0, axis)
        for x, axis in zip((whole_logits, whole_labels), in_axes, strict=True)
    )
    result = jax.vmap(functools.partial(loss, reduction=reduction), in_axes)(logits, labels)
    for i in range(3):
        expected = oracle(
            whole_logits[0 if in_axes[0] is None else i],
            whole_labels[0 if in_axes[1] is None else i],
            reduction=reduction,
        )
        assert_close(result[i], expected.loss, dtype="float32")


def test_vmap_of_grad(loss, rng):
    logits, labels = random_case(rng, (3, 4, 50), "float32", ignored=0.2)
    value, gradient = jax.vmap(jax.value_and_grad(loss))(logits, labels)
    for i in range(3):
        assert_matches((value[i], gradient[i]), oracle(logits[i], labels[i]))


def test_grad_of_vmap(loss, rng):
    logits, labels = random_case(rng, (3, 4, 50), "float32", ignored=0.2)
    weights = jnp.asarray([1.0, -2.0, 0.5])
    gradient = jax.grad(lambda x: jnp.sum(weights * jax.vmap(loss)(x, labels)))(logits)
    for i in range(3):
        assert_close(gradient[i], weights[i] * oracle(logits[i], labels[i]).gradient, dtype="float32")


def test_vmap_of_vmap_of_grad(loss, rng):
    logits, labels = random_case(rng, (2, 3, 4, 20), "float32")
    gradient = jax.vmap(jax.vmap(jax.grad(loss), in_axes=(0, None)), in_axes=(0, 0))(logits, labels[:, 0])
    expected = oracle(logits[1, 2], labels[1, 0]).gradient
    assert_close(gradient[1, 2], expected, dtype="float32")


def test_scan_with_logits_from_the_body(loss, rng):
    """As a language model does that computes its loss in chunks of the sequence."""
    hidden = jnp.asarray(rng.standard_normal((3, 5, 8)), jnp.float32)
    weights = jnp.asarray(rng.standard_normal((8, 40)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, 40, (3, 5)), jnp.int32)

    def total(weights, hidden):
        def chunk(carry, x):
            hidden, labels = x
            return carry + loss(hidden @ weights, labels, reduction="sum"), None

        return lax.scan(chunk, jnp.float32(0), (hidden, labels))[0]

    value, (to_weights, to_hidden) = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(weights, hidden)
    logits = np.asarray(hidden, np.float64) @ np.asarray(weights, np.float64)
    expected = oracle(logits, labels, reduction="sum")
    assert_close(value, expected.loss, dtype="float32")
    assert_close(to_weights, np.einsum("csh,csv->hv", hidden, expected.gradient), dtype="float32")
    assert_close(to_hidden, np.einsum("csv,hv->csh", expected.gradient, weights), dtype="float32")


def test_lax_map(loss, rng):
    logits, labels = random_case(rng, (4, 3, 30), "float32")
    gradients = jax.jit(lambda *a: lax.map(lambda x: jax.grad(loss)(*x), a))(logits, labels)
    for i in range(4):
        assert_close(gradients[i], oracle(logits[i], labels[i]).gradient, dtype="float32")


POLICIES = {
    "lse": jax.checkpoint_policies.save_only_these_names("softmax_cross_entropy_lse"),
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
}


def targets_in(compiled):
    """How often the program calls each of the kernels."""
    return tuple(compiled.as_text().count(f'custom_call_target="{target}"') for target in TARGETS)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_checkpoint(policy, loss, case):
    logits, labels = case
    remat = jax.checkpoint(lambda x: loss(x * 2.0, labels), policy=policy)
    value, gradient = jax.jit(jax.value_and_grad(remat))(logits)
    expected = oracle(2.0 * np.asarray(logits), labels)
    assert_close(value, expected.loss, dtype="float32")
    assert_close(gradient, 2.0 * expected.gradient, dtype="float32")


@pytest.mark.parametrize(("policy", "statistics"), [("lse", 1), ("everything", 1), ("nothing", 2)])
def test_checkpoint_name_saves_the_second_read(policy, statistics, native_kernels, case):
    """With the log-sum-exp saved, remat runs the statistics once; without it twice."""
    logits, labels = case
    remat = jax.checkpoint(
        lambda x: ops.softmax_cross_entropy(jnp.sin(x), labels, implementation="native"), policy=POLICIES[policy]
    )
    compiled = jax.jit(jax.value_and_grad(remat)).lower(logits).compile()
    assert targets_in(compiled) == (statistics, 1)


def test_pmap_over_batch(loss, require_devices, rng):
    require_devices(2)
    devices = jax.device_count()
    logits, labels = random_case(rng, (devices, 3, 30), "float32", ignored=0.2)
    value, gradient = jax.pmap(jax.value_and_grad(loss))(logits, labels)
    for i in range(devices):
        assert_matches((value[i], gradient[i]), oracle(logits[i], labels[i]))


def test_pmap_over_the_vocabulary(loss, require_devices, rng):
    require_devices(2)
    devices = jax.device_count()
    logits, labels = random_case(rng, (5, 11 * devices), "float32", ignored=0.2)
    shards = jnp.stack(jnp.split(logits, devices, axis=-1))
    options = OPTIONS["all"]
    split = functools.partial(loss, axis_name="v", **options)
    value = jax.pmap(split, axis_name="v", in_axes=(0, None))(shards, labels)
    expected = oracle(logits, labels, **options)
    assert_close(value, np.full(devices, expected.loss), dtype="float32")
    assert len(set(np.asarray(value).tolist())) == 1
    # pmap differentiates the sum of what all devices return, and each returns the whole loss.
    gradient = jax.pmap(jax.grad(split), axis_name="v", in_axes=(0, None))(shards, labels)
    assert_close(jnp.concatenate(list(gradient), axis=-1) / devices, expected.gradient, dtype="float32")


def test_jit_compiles_once_for_equal_arguments(native_kernels, case):
    logits, labels = case
    count = 0

    @functools.partial(jax.jit, static_argnames=("label_smoothing", "z_loss"))
    def run(logits, labels, **options):
        nonlocal count
        count += 1
        return ops.softmax_cross_entropy(logits, labels, **options)

    for _ in range(3):
        run(logits, labels, label_smoothing=0.1, z_loss=1e-3)
    assert count == 1
    ops.softmax_cross_entropy(logits, labels, label_smoothing=0.1)
    with jax.no_tracing():  # nor does an eager call that was made before
        ops.softmax_cross_entropy(logits, labels, label_smoothing=0.1)


def test_an_eager_gradient_is_traced_once(native_kernels, case, monkeypatch):
    gradient = jax.grad(ops.softmax_cross_entropy)
    first = gradient(*case)
    monkeypatch.setattr(native, "call", lambda *_, **__: pytest.fail("traced again"))
    assert_close(gradient(*case), first, dtype="float32")


def test_eval_shape(loss):
    logits = jax.ShapeDtypeStruct((4, 5, 32), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((4, 5), jnp.int32)
    for reduction, shape in (("mean", ()), ("sum", ()), ("none", (4, 5))):
        result = jax.eval_shape(functools.partial(loss, reduction=reduction), logits, labels)
        assert (result.shape, result.dtype) == (shape, jnp.float32)
    gradient = jax.eval_shape(jax.grad(loss), logits, labels)
    assert (gradient.shape, gradient.dtype) == (logits.shape, jnp.bfloat16)


def test_result_is_not_weakly_typed(loss, case):
    assert not loss(*case).weak_type
    assert not jax.eval_shape(jax.grad(loss), *case).weak_type


def test_second_derivative_of_the_native_kernel_is_refused(native_kernels, case):
    logits, labels = case
    first = jax.grad(lambda x: ops.softmax_cross_entropy(x, labels, implementation="native"))
    for derivative in (jax.jacfwd(first), jax.grad(lambda x: jnp.sum(jnp.square(first(x))))):
        with pytest.raises(NotImplementedError, match="implementation='reference'"):
            derivative(logits)


def test_forward_mode_of_the_native_kernel_is_refused(native_kernels, case):
    logits, labels = case
    with pytest.raises(NotImplementedError, match=r"softmax_cross_entropy .* implementation='reference'"):
        jax.jvp(lambda x: ops.softmax_cross_entropy(x, labels, implementation="native"), (logits,), (logits,))


def test_second_derivative_of_the_reference(rng):
    logits, labels = random_case(rng, (1, 5), "float32")
    hessian = jax.hessian(lambda x: ops.softmax_cross_entropy(x, labels, implementation="reference"))(logits)
    z = np.asarray(logits, np.float64)[0]
    p = np.exp(z) / np.exp(z).sum()
    assert_close(hessian[0, :, 0, :], np.diag(p) - np.outer(p, p), dtype="float32")


def test_implementation_decides_what_runs(native_kernels, case):
    def calls(implementation):
        gradient = jax.grad(functools.partial(ops.softmax_cross_entropy, implementation=implementation))
        return targets_in(jax.jit(gradient).lower(*case).compile())

    assert calls("native") == (1, 1)
    assert calls(None) == (1, 1)
    assert calls("reference") == (0, 0)
    assert native.available()


def test_debug_nans_without_jit(implementation, rng):
    """It stops where a label has no loss, and nowhere else."""
    logits, labels = random_case(rng, (6, 50), "bfloat16")
    loss, ignored = functools.partial(ops.softmax_cross_entropy, implementation=implementation), labels.at[2].set(-100)
    with jax.disable_jit(), jax.debug_nans(True):
        value, gradient = jax.value_and_grad(loss)(logits, ignored)
        with pytest.raises(FloatingPointError):
            loss(logits, labels.at[2].set(50))
    expected = oracle(logits, ignored)
    assert_close(value, expected.loss, dtype="float32")
    assert_close(gradient, expected.gradient, dtype="bfloat16")
