"""Values and gradients of softmax cross-entropy against a float64 oracle, over shapes, dtypes and options."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cross_entropy_oracle import OPTIONS, changed, check, loss_and_gradient_of, loss_of, oracle, random_case
from hypothesis import given
from hypothesis import strategies as st
from parameters import in_turns

from te_jax import reference
from te_jax.ops import CrossEntropy
from te_jax.testing import assert_close

DTYPES = ("float32", "bfloat16", "float16")
REDUCTIONS = ("mean", "sum", "none")


# Each choice is a program of its own. For the kernel test_any_shape draws from them all.
@pytest.mark.parametrize(
    ("options", "reduction", "dtype", "implementation"),
    [
        *in_turns(OPTIONS, REDUCTIONS, DTYPES, ("native",)),
        *in_turns(OPTIONS, REDUCTIONS[2:] + REDUCTIONS[:2], DTYPES, ("reference",)),
    ],
)
@pytest.mark.usefixtures("native_kernels")
def test_value_and_gradient(dtype, options, reduction, implementation, rng):
    logits, labels = random_case(rng, (3, 5, 517), dtype, ignored=0.3)
    check(logits, labels, rng, implementation=implementation, reduction=reduction, **options)


def test_reference_is_exact_in_float64(rng):
    with jax.enable_x64(True):
        logits, labels = random_case(rng, (6, 301), "float64", ignored=0.3)
        run = functools.partial(reference.softmax_cross_entropy, **OPTIONS["all"])
        loss, gradient = jax.jit(jax.value_and_grad(run))(logits, labels)
        expected = oracle(logits, labels, **OPTIONS["all"])
        assert_close(loss, expected.loss, dtype="float64", tolerance=1e-12)
        assert_close(gradient, expected.gradient, dtype="float64", tolerance=1e-12)


# Vocabularies around the widths of vectors, warps and blocks, and others.
vocabularies = st.sampled_from(
    [1, 2, 3, 7, 8, 9, 31, 33, 127, 128, 255, 257, 1023, 2047, 2048, 2049, 4097]
) | st.integers(1, 5000)
batches = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(
    batch=batches,
    vocab=vocabularies,
    dtype=st.sampled_from(DTYPES),
    options=st.sampled_from(list(OPTIONS.values())),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    ignored=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape(batch, vocab, dtype, options, reduction, ignored, seed, native_kernels):
    rng = np.random.default_rng(seed)
    logits, labels = random_case(rng, (*batch, vocab), dtype, ignored=ignored)
    check(logits, labels, rng, implementation="native", reduction=reduction, **options)


@pytest.mark.parametrize(
    ("shape", "reduction"),
    in_turns([(1,), (300,), (0, 5), (2, 0, 9), (1, 5000)], ["mean", "none", "none"]),
)
def test_edge_shapes(shape, reduction, implementation, rng):
    logits, labels = random_case(rng, shape, "bfloat16")
    loss, gradient = check(logits, labels, rng, implementation=implementation, reduction=reduction)
    assert loss.shape == (() if reduction == "mean" else shape[:-1])
    assert gradient.shape == shape


@pytest.mark.parametrize(("dtype", "vocab"), in_turns(DTYPES, (61, 64)))
def test_many_short_rows(dtype, vocab, implementation, rng):
    logits, labels = random_case(rng, (3001, vocab), dtype, ignored=0.1)
    check(logits, labels, rng, implementation=implementation, reduction="none", **OPTIONS["all"])


# --------------------------------------------------------------------------------------------------------------- labels


@pytest.mark.parametrize(
    ("labels_dtype", "vocab"),
    [(np.int8, 300), (np.uint16, 70000), (np.uint32, 70000)],
)
def test_label_dtypes(labels_dtype, vocab, implementation, rng):
    """Also where the dtype cannot hold the vocabulary's size or ignore_index."""
    logits, labels = random_case(rng, (3, vocab), "bfloat16", labels_dtype=labels_dtype)
    check(logits, labels, rng, implementation=implementation)


@pytest.mark.parametrize("labels_dtype", [np.int64, np.uint64])
def test_wide_label_dtypes(labels_dtype, implementation, rng):
    with jax.enable_x64(True):
        logits, labels = random_case(rng, (9, 100), "float32", labels_dtype=labels_dtype)
        assert labels.dtype == labels_dtype
        check(logits, labels, rng, implementation=implementation)


def test_labels_beyond_int32_do_not_wrap_around(implementation, rng):
    with jax.enable_x64(True):
        logits, _ = random_case(rng, (3, 10), "float32")
        labels = np.array([2**32 + 3, 4, -(2**32) - 100])
        check(logits, labels, rng, implementation=implementation, reduction="none", equal_nan=True)


@pytest.mark.parametrize(
    ("labels_dtype", "ignore_index"),
    [
        *((np.int8, index) for index in (0, 255)),
        (np.uint8, -1),
        (np.uint32, 2**40),
    ],
)
def test_ignore_index(labels_dtype, ignore_index, implementation, rng):
    """The default, inside the vocabulary, and what the labels' dtype cannot hold."""
    logits, labels = random_case(rng, (24, 9), "float32", labels_dtype=labels_dtype)
    limits = np.iinfo(labels_dtype)
    if limits.min <= ignore_index <= limits.max:
        labels = changed(labels, slice(None, None, 3), ignore_index)
    check(logits, labels, rng, implementation=implementation, loss=CrossEntropy(ignore_index=ignore_index))


@pytest.mark.parametrize("bad", [-1, -2, -99, 50, 51, 2**31 - 1, -(2**31)])
def test_label_outside_the_vocabulary_gives_nan_in_its_row_only(bad, implementation, rng):
    """-1 and -2 mean something to the kernel, and nothing to the caller."""
    logits, labels = random_case(rng, (6, 50), "float32", ignored=0.2)
    labels = changed(labels, 2, bad)
    loss, gradient = check(logits, labels, rng, implementation=implementation, reduction="none", equal_nan=True)
    np.testing.assert_array_equal(np.isnan(loss), np.arange(6) == 2)
    np.testing.assert_array_equal(np.isnan(gradient), np.broadcast_to((np.arange(6) == 2)[:, None], (6, 50)))


def test_label_outside_the_vocabulary_makes_the_whole_loss_nan(implementation, rng):
    logits, labels = random_case(rng, (6, 50), "bfloat16")
    assert np.isnan(loss_of(logits, changed(labels, 3, 50), implementation=implementation))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_all_tokens_ignored(reduction, implementation, rng):
    logits, _ = random_case(rng, (3, 4, 70), "bfloat16")
    labels = np.full((3, 4), -100, np.int32)
    loss, gradient = check(logits, labels, rng, implementation=implementation, reduction=reduction)
    np.testing.assert_array_equal(loss, 0.0)
    assert not np.any(gradient)


# ---------------------------------------------------------------------------------------------------- large, not finite


def losses(logits, labels, implementation):
    """By the program that `check` has for this shape."""
    ones = np.ones(labels.shape, np.float32)
    return loss_and_gradient_of(logits, labels, ones, reduction="none", implementation=implementation)[0]


def test_large_logits(implementation, rng):
    logits, labels = random_case(rng, (16, 300), "float32", scale=1e4)
    # A log-sum-exp of 10^4 is known to half a unit in the last place of float32, and exp of it to as much.
    options = {"reduction": "none", "tolerance": 1e-3, **OPTIONS["smoothing"]}
    check(logits, labels, rng, implementation=implementation, **options)


def test_equal_large_logits_do_not_overflow(implementation):
    logits = np.full((6, 50), 3e38, np.float32)
    assert np.isfinite(losses(logits, np.zeros(6, np.int32), implementation)).all()


@pytest.mark.parametrize(("softcap", "dtype"), in_turns([0.5, 30.0, 500.0], DTYPES))
def test_softcap_of_small_and_large_logits(dtype, softcap, implementation, rng):
    """tanh where it is almost linear, where it bends, and where it is almost 1."""
    logits, labels = random_case(rng, (12, 200), "float32")
    logits = (np.asarray(logits) * np.logspace(-4, 3, 12)[:, None]).astype(jnp.dtype(dtype))
    check(
        logits, labels, rng, implementation=implementation, reduction="none", loss=CrossEntropy(logit_softcap=softcap)
    )


@pytest.mark.parametrize(("softcap", "scale"), in_turns([1e8, 1e20, 1e30], [0.25, 3.0]))
def test_large_softcaps(softcap, scale, implementation, rng):
    """Logits of the cap's size, whose last digit is more than 1: an exponent off by it would be seen at once."""
    logits, labels = random_case(rng, (16, 1000), "float32", scale=scale * softcap)
    check(
        logits,
        labels,
        rng,
        implementation=implementation,
        reduction="sum",
        tolerance=1e-4,
        loss=CrossEntropy(logit_softcap=softcap),
    )


def test_z_loss_of_large_logits(implementation, rng):
    """lse² overflows float32, z_loss · lse² does not."""
    logits, labels = random_case(rng, (16, 300), "float32", scale=1e20)
    loss, _ = check(
        logits, labels, rng, implementation=implementation, reduction="none", loss=CrossEntropy(z_loss=1e-6)
    )
    assert np.isfinite(loss).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_vocabulary(dtype, implementation, rng):
    """-inf in some columns: they have no probability and no gradient."""
    logits, labels = random_case(rng, (8, 100), dtype)
    logits, labels = changed(logits, np.s_[:, [0, *range(60, 100)]], -np.inf), 1 + np.asarray(labels) % 59
    loss, gradient = check(
        logits, labels, rng, implementation=implementation, reduction="none", loss=CrossEntropy(z_loss=1e-3)
    )
    assert np.isfinite(loss).all()
    assert not np.asarray(gradient)[:, 60:].any()


def test_masked_label_has_infinite_loss(implementation, rng):
    logits, _ = random_case(rng, (6, 50), "float32")
    loss = losses(changed(logits, (1, 4), -np.inf), np.full(6, 4, np.int32), implementation)
    np.testing.assert_array_equal(np.isposinf(loss), np.arange(6) == 1)
    assert not np.isnan(loss).any()


@pytest.mark.parametrize(
    ("dtype", "bad", "column"),
    [*in_turns(DTYPES, [np.nan, np.inf], [0, 130]), ("float32", np.nan, 130), ("float32", np.inf, 0)],
)
def test_nan_and_infinity_stay_in_their_row(dtype, bad, column, implementation, rng):
    """In whatever order a vector unit meets them, and also where the last element of a row is the bad one."""
    logits, labels = random_case(rng, (5, 131), dtype)
    loss, gradient = check(
        changed(logits, (3, column), bad),
        changed(labels, 3, 17),
        rng,
        implementation=implementation,
        reduction="none",
        equal_nan=True,
    )
    np.testing.assert_array_equal(np.isnan(loss), np.arange(5) == 3)
    np.testing.assert_array_equal(np.isnan(gradient).all(axis=1), np.arange(5) == 3)


def test_row_without_any_probability_is_nan(implementation, rng):
    logits, labels = random_case(rng, (6, 50), "float32")
    logits = changed(logits, 1, -np.inf)
    loss, gradient = check(logits, labels, rng, implementation=implementation, reduction="none", equal_nan=True)
    np.testing.assert_array_equal(np.isnan(loss), np.arange(6) == 1)
    np.testing.assert_array_equal(np.isnan(gradient).any(axis=1), np.arange(6) == 1)


@pytest.mark.parametrize(
    ("options", "bad"), [(OPTIONS["plain"], np.nan), (OPTIONS["all"], np.inf), (OPTIONS["all"], -np.inf)]
)
def test_ignored_rows_leak_nothing(bad, options, implementation, rng):
    logits, labels = random_case(rng, (4, 40), "float32")
    logits, labels = changed(changed(logits, 1, bad), (2, 7), bad), changed(labels, slice(1, 3), -100)
    expected = oracle(np.where((labels == -100)[:, None], 0.0, logits), labels, **options)
    loss, gradient = loss_and_gradient_of(logits, labels, np.float32(1), implementation=implementation, **options)
    assert_close(loss, expected.loss, dtype="float32")
    assert_close(gradient, expected.gradient, dtype="float32")
    assert not np.asarray(gradient)[1:3].any()


# ---------------------------------------------------------------------------------------------------------- determinism


def test_a_row_does_not_depend_on_its_neighbours(native_kernels, rng):
    """Whichever thread computes a row, and whatever else it computes: the same bits."""
    logits, labels = random_case(rng, (257, 1003), "float32")
    options = {"loss": CrossEntropy(label_smoothing=0.1), "reduction": "none"}
    whole = np.asarray(loss_of(logits, labels, **options))
    for begin, end in ((0, 1), (100, 120), (256, 257)):
        part = loss_of(np.asarray(logits)[begin:end], np.asarray(labels)[begin:end], **options)
        assert np.asarray(part).tobytes() == whole[begin:end].tobytes()
