"""Linear layers and their gradients in float64 NumPy, and the random cases that all tests of them share."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from te_jax import ops
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, DelayedScalingState, RowwiseScaling
from te_jax.testing import assert_close, relative_error

RECIPES = {
    "current": CurrentScaling(),
    "rowwise": RowwiseScaling(),
    "block": BlockScaling(),
    "delayed": DelayedScaling(history_len=3),
}
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}

# Relative L2 errors on normal data. FP8 rounds both operands of a product, which costs 0.037; E5M2 gradients have a bit
# less, 0.058. The rest is for the scatter of small cases.
FORWARD, GRADIENT = 0.055, 0.085
EXACT = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
PLAIN = {**EXACT, "bfloat16": 3e-2}  # XLA's CPU backend adds up some products of bfloat16 in bfloat16

_OPTIONS = ("recipe", "contracting_ndim", "kernel_contracting", "activation", "accumulate", "implementation")


@dataclasses.dataclass(frozen=True)
class Case:
    """The operands of a layer and the cotangent of its result; the groups of dimensions as NumPy letters."""

    x: jax.Array
    kernel: jax.Array
    bias: jax.Array | None
    dy: jax.Array
    batch: tuple[int, ...]
    inner: tuple[int, ...]
    outer: tuple[int, ...]
    kernel_contracting: str

    @property
    def operands(self):
        return self.x, self.kernel, self.bias


@dataclasses.dataclass(frozen=True)
class Gradients:
    """y and the gradients, in float64 from the oracle or as computed."""

    y: np.ndarray
    dx: np.ndarray
    dkernel: np.ndarray
    dbias: np.ndarray | None


def random_case(
    rng,
    batch=(64,),
    inner=(128,),
    outer=(256,),
    dtype="bfloat16",
    *,
    kernel_dtype=None,
    kernel_contracting="first",
    with_bias=True,
):
    """Random normal values; the kernel is scaled so that y is normal too."""

    def draw(*shape, dtype, scale=1.0):
        return jax.device_put((scale * rng.standard_normal(shape)).astype(DTYPES[dtype]))

    groups = (inner, outer) if kernel_contracting == "first" else (outer, inner)
    kernel_dtype = kernel_dtype or dtype
    return Case(
        draw(*batch, *inner, dtype=dtype),
        draw(*groups[0], *groups[1], dtype=kernel_dtype, scale=math.prod(inner) ** -0.5),
        draw(*outer, dtype=kernel_dtype) if with_bias else None,
        draw(*batch, *outer, dtype=dtype),
        tuple(batch),
        tuple(inner),
        tuple(outer),
        kernel_contracting,
    )


def wide(x):
    return np.asarray(x).astype(np.float64)


def _activation(function, z):
    """(value, derivative)"""
    if function is None:
        return z, np.ones_like(z)
    name, alpha = (function, 1.0) if isinstance(function, str) else (function.kind, function.alpha)
    if name == "gelu":
        c = math.sqrt(2 / math.pi)
        t = np.tanh(c * (z + 0.044715 * z**3))
        return 0.5 * z * (1 + t), 0.5 * (1 + t) + 0.5 * z * (1 - t**2) * c * (1 + 3 * 0.044715 * z**2)
    if name == "relu":
        return np.maximum(z, 0), (z > 0).astype(np.float64)
    if name == "squared_relu":
        return np.maximum(z, 0) ** 2, 2 * np.maximum(z, 0)
    s = 1 / (1 + np.exp(-alpha * z))
    return z * s, s * (1 + alpha * z * (1 - s))


def oracle(case: Case, *, activation=None, y_found=None) -> Gradients:
    """y and the gradients for the cotangent dy. The derivative of relu jumps: it is taken where `y_found` has it."""
    tokens, features, outputs = (math.prod(sizes) for sizes in (case.batch, case.inner, case.outer))
    x, dy = wide(case.x).reshape(tokens, features), wide(case.dy).reshape(tokens, outputs)
    first = case.kernel_contracting == "first"
    kernel = wide(case.kernel)
    kernel = kernel.reshape(features, outputs) if first else kernel.reshape(outputs, features).T
    z = x @ kernel + (0.0 if case.bias is None else wide(case.bias).reshape(-1))
    y, slope = _activation(activation, z)
    if activation == "relu" and y_found is not None:
        slope = (wide(y_found).reshape(tokens, outputs) > 0).astype(np.float64)
    g = dy * slope
    dkernel = x.T @ g
    return Gradients(
        y.reshape(*case.batch, *case.outer),
        (g @ kernel.T).reshape(case.x.shape),
        (dkernel if first else dkernel.T).reshape(case.kernel.shape),
        None if case.bias is None else g.sum(axis=0).reshape(case.outer),
    )


@functools.partial(jax.jit, static_argnames=_OPTIONS)
def gradients_of(x, kernel, bias, dy, state=None, **options):
    """(y, (dx, dkernel, dbias, next state))"""

    def layer(x, kernel, bias, state):
        return ops.dense(x, kernel, bias, scaling_state=state, **options)

    y, vjp = jax.vjp(layer, x, kernel, bias, state)
    return y, vjp(dy)


def warm_state(case: Case, recipe: DelayedScaling):
    """A state that knows the magnitudes of a case, so that its scales fit."""
    amax = [float(np.abs(wide(a)).max()) for a in (case.x, case.kernel, case.dy)]
    histories = (jnp.full((recipe.history_len,), a, jnp.float32) for a in amax)
    return DelayedScalingState(*histories, jnp.ones(()))


def computed(case: Case, *, recipe, state=None, **options) -> Gradients:
    """y and gradients as the layer computes them; delayed scaling with a state that fits."""
    if isinstance(recipe, DelayedScaling) and state is None:
        state = warm_state(case, recipe)
    y, (dx, dkernel, dbias, _) = gradients_of(
        *case.operands,
        case.dy,
        state,
        recipe=recipe,
        contracting_ndim=len(case.inner),
        kernel_contracting=case.kernel_contracting,
        **options,
    )
    return Gradients(y, dx, dkernel, dbias)


def check(case: Case, *, recipe, activation=None, state=None, factor=1.0, **options) -> Gradients:
    """y and gradients against the oracle, and their dtypes. Returns both as they came."""
    found = computed(case, recipe=recipe, activation=activation, state=state, **options)
    expected = oracle(case, activation=activation, y_found=found.y)
    assert_matches(found, expected, case, recipe=recipe, factor=factor)
    return found


def assert_matches(found: Gradients, expected: Gradients, case: Case, *, recipe, factor=1.0) -> None:
    x_dtype, kernel_dtype = case.x.dtype.name, case.kernel.dtype.name
    plain = max(PLAIN[x_dtype], PLAIN[kernel_dtype])  # without a recipe the product is in the dtype of x
    forward, gradient = (plain, plain) if recipe is None else (FORWARD * factor, GRADIENT * factor)
    assert_close(found.y, expected.y, tolerance=forward, dtype=x_dtype)
    assert_close(found.dx, expected.dx, tolerance=gradient, dtype=x_dtype)
    assert_close(found.dkernel, expected.dkernel, tolerance=gradient, dtype=kernel_dtype)
    if case.bias is not None:
        assert_close(found.dbias, expected.dbias, tolerance=gradient, dtype=case.bias.dtype)


def errors(found: Gradients, expected: Gradients) -> dict[str, float]:
    return {
        field.name: relative_error(getattr(found, field.name), getattr(expected, field.name))
        for field in dataclasses.fields(found)
        if getattr(expected, field.name) is not None
    }
