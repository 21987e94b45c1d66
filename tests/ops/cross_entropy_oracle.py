"""Softmax cross-entropy and its gradient in closed form, in float64 NumPy: what all its tests compare with."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from parameters import named

from te_jax import ops
from te_jax.ops import CrossEntropy
from te_jax.testing import assert_close

# name: keyword arguments that between them reach every term of the formula.
OPTIONS = {
    "plain": {},
    "smoothing": {"loss": CrossEntropy(label_smoothing=0.1)},
    "z_loss": {"loss": CrossEntropy(z_loss=1e-2)},
    "softcap": {"loss": CrossEntropy(logit_softcap=2.0)},
    "all": {"loss": CrossEntropy(label_smoothing=0.2, z_loss=3e-3, logit_softcap=3.0)},
}
STATICS = ("loss", "reduction", "vocab_axis", "implementation")


@dataclasses.dataclass(frozen=True)
class Oracle:
    """What is expected, and the size of the terms whose difference it is.

    A loss is a difference of two numbers that may be almost equal, and so is the gradient at the label. Float32 is
    then right relative to those numbers, not to the difference.
    """

    loss: np.ndarray
    gradient: np.ndarray
    loss_terms: np.ndarray
    gradient_terms: np.ndarray


def oracle(logits, labels, loss=CrossEntropy(), *, reduction="mean", cotangent=1.0) -> Oracle:
    """Loss, and its gradient times `cotangent`, a scalar or, for reduction="none", one number for each row."""
    smoothing, c = loss.label_smoothing, loss.logit_softcap
    x = np.asarray(logits).astype(np.float64)
    batch, vocab = x.shape[:-1], x.shape[-1]
    x = x.reshape(-1, vocab)
    labels = np.asarray(labels).astype(object).reshape(-1)  # Python integers: no wrap-around, no sign to mind
    ignored = np.array([label == loss.ignore_index for label in labels], bool)
    inside = np.array([0 <= label < vocab for label in labels], bool)
    column = np.array([label if 0 <= label < vocab else 0 for label in labels], np.int64)
    rows = np.arange(len(labels))
    with np.errstate(all="ignore"):
        tanh = np.tanh(x / c) if c else np.zeros_like(x)
        z = c * tanh if c else x
        peak = z.max(axis=1)
        lse = peak + np.log(np.exp(z - peak[:, None]).sum(axis=1))
        target = z[rows, column]
        smoothed = smoothing / vocab * z.sum(axis=1) if smoothing else 0.0
        value = lse - (1 - smoothing) * target - smoothed + loss.z_loss * lse**2
        terms = np.abs(lse) + np.abs(target)
        slope = np.exp(z - lse[:, None]) * (1 + 2 * loss.z_loss * lse[:, None]) - smoothing / vocab
        slope[rows, column] -= 1 - smoothing
        gradient = slope * (1 - tanh**2)
    value = np.where(ignored, 0.0, np.where(inside, value, np.nan))
    terms = np.where(ignored | ~np.isfinite(terms), 0.0, terms)
    gradient = np.where(ignored[:, None], 0.0, np.where(inside[:, None], gradient, np.nan))

    divisor = max(1, int((~ignored).sum())) if reduction == "mean" else 1
    weight = np.broadcast_to(np.asarray(cotangent, np.float64).reshape(-1), value.shape) / divisor
    gradient = np.where(ignored[:, None], 0.0, gradient * weight[:, None])
    gradient_terms = np.zeros_like(gradient)
    gradient_terms[rows, column] = np.where(ignored, 0.0, np.abs(weight))
    if reduction == "none":
        value, terms = value.reshape(batch), terms.reshape(batch)
    else:
        value, terms = value.sum() / divisor, terms.sum() / divisor
    shape = (*batch, vocab)
    return Oracle(value, gradient.reshape(shape), terms, gradient_terms.reshape(shape))


def assert_loss(actual, expected: Oracle, *, tolerance=1e-5, equal_nan=False):
    """A loss against the oracle, relative to its terms."""
    assert actual.dtype == jnp.float32
    _assert_close_beside(expected.loss_terms, actual, expected.loss, tolerance, equal_nan)


def assert_gradient(actual, expected: Oracle, dtype, *, tolerance=None, equal_nan=False):
    """A gradient against the oracle, relative to its terms, within what its dtype allows."""
    assert actual.dtype == dtype
    tolerance = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}[dtype.name] if tolerance is None else tolerance
    _assert_close_beside(expected.gradient_terms, actual, expected.gradient, tolerance, equal_nan)


def _assert_close_beside(terms, actual, expected, tolerance, equal_nan):
    actual = np.asarray(actual).astype(np.float64)
    assert_close(np.stack([actual, terms]), np.stack([expected, terms]), tolerance=tolerance, equal_nan=equal_nan)


# Compiled once for each shape and choice of options, whichever test asks.
loss_of = jax.jit(ops.softmax_cross_entropy, static_argnames=STATICS)


def _loss_and_gradient(logits, labels, cotangent, **options):
    loss, vjp = jax.vjp(lambda logits: ops.softmax_cross_entropy(logits, labels, **options), logits)
    return loss, vjp(cotangent)[0]


loss_and_gradient_of = jax.jit(_loss_and_gradient, static_argnames=STATICS)


def random_case(rng, shape, dtype, *, labels_dtype=np.int32, scale=2.0, ignored=0.0, ignore_index=-100):
    """(logits, labels) of a shape [*batch, vocab]; a share of the labels is ignored."""
    dtype = jnp.dtype(dtype)
    # A copy: XLA does not write over what NumPy holds.
    logits = jax.device_put((scale * rng.standard_normal(shape)).astype(dtype), may_alias=False)
    largest = min(shape[-1] - 1, np.iinfo(labels_dtype).max)
    labels = rng.integers(0, largest, shape[:-1], endpoint=True)
    labels = np.where(rng.random(shape[:-1]) < ignored, ignore_index, labels).astype(labels_dtype)
    return logits, jax.device_put(labels)


def changed(x, index, value):
    """A copy with this value there. By NumPy: `x.at` compiles a program for each shape."""
    x = np.array(x)
    x[index] = value
    return x


def check(logits, labels, rng, *, implementation, reduction="mean", tolerance=None, equal_nan=False, **options):
    """Value and gradient, for a random cotangent, against the oracle. Returns both as they came."""
    shape = labels.shape if reduction == "none" else ()
    cotangent = rng.uniform(0.5, 2.0, shape) * rng.choice([-1.0, 1.0], shape)
    cotangent, implementation = np.asarray(cotangent, np.float32), named(implementation, logits.dtype)
    expected = oracle(logits, labels, reduction=reduction, cotangent=cotangent, **options)
    loss, gradient = loss_and_gradient_of(
        logits, labels, cotangent, reduction=reduction, implementation=implementation, **options
    )
    loss_tolerance = 1e-5 if tolerance is None else tolerance
    assert_loss(loss, expected, tolerance=loss_tolerance, equal_nan=equal_nan)
    assert_gradient(gradient, expected, logits.dtype, tolerance=tolerance, equal_nan=equal_nan)
    return loss, gradient
