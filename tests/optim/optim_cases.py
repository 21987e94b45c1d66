"""Random parameters and gradients, Adam in NumPy's float64, and how states are compared and read."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from te_jax import optim

FLOAT8 = jnp.float8_e4m3fn
NAN_OF_GPUS = np.uint64(2**63 - 1).view(np.float64)
"""With all bits of the mantissa set, in any dtype: what is added to its bits carries into the sign."""
MOMENT_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16, "float8": FLOAT8}


def random_params(rng, dtype="float32"):
    """Around blocks of 128: a short dimension, two that they do not divide, one that they do, a scalar, and nothing.

    The same shapes in all tests, which then share the programs of single operations.
    """
    return normal_like(
        rng,
        {
            "kernel": jnp.zeros((3, 200), dtype),
            "heads": jnp.zeros((2, 3, 70), dtype),
            "bias": [jnp.zeros(300, dtype), jnp.zeros(128, dtype), jnp.zeros(1, dtype)],
            "scale": jnp.zeros((), dtype),
            "empty": jnp.zeros((3, 0), dtype),
            "absent": None,
        },
    )


def normal_like(rng, tree, steps=None):
    """Normal numbers of the tree's shapes and dtypes, with `steps` in front of the shapes."""
    lead = () if steps is None else (steps,)
    return jax.tree.map(lambda x: jax.device_put(np.asarray(rng.standard_normal(lead + x.shape), x.dtype)), tree)


def assert_same(actual, expected):
    """Trees of one structure whose leaves agree in dtype, shape and every bit."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        a, e = np.asarray(a), np.asarray(e)
        assert (a.dtype, a.shape) == (e.dtype, e.shape), jax.tree_util.keystr(path)
        assert a.tobytes() == e.tobytes(), jax.tree_util.keystr(path)


def weight(param, code):
    """The float32 number whose upper half is a bfloat16, and lower half a code: inverted where the upper is odd."""
    upper = np.asarray(param).view(np.uint16).astype(np.int64)
    remainder = np.where(upper & 1, ~np.asarray(code), code)
    return ((upper << 16) + remainder & 0xFFFFFFFF).astype(np.uint32).view(np.float32)


def types(tree):
    """The structure, and dtype, shape and weakness of every leaf."""
    return jax.tree.structure(tree), [(x.dtype, x.shape, x.weak_type) for x in jax.tree.leaves(tree)]


@functools.partial(jax.jit, static_argnums=0)
def step(transform, params, state, g):
    """Parameters and state after a step."""
    updates, state = transform.update(g, state, params)
    return optax.apply_updates(params, updates), state


def run(transform, params, gradients, state=None):
    """Parameters and state after some steps."""
    state = transform.init(params) if state is None else state
    for g in gradients:
        params, state = step(transform, params, state, g)
    return params, state


def adam_state(state):
    """The one ScaleByAdamState in a state."""
    found = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, optim.ScaleByAdamState))
    (state,) = (x for x in found if isinstance(x, optim.ScaleByAdamState))
    return state


@jax.jit
def moments(state, params):
    """Both moments of a ScaleByAdamState in float32."""
    wide = optim.convert_state(optim.scale_by_adam(mu_dtype="float32", nu_dtype="float32"), state, params)
    return wide.mu, wide.nu


@dataclasses.dataclass(frozen=True)
class Expected:
    """float64: update and moments after the last step."""

    update: np.ndarray
    mu: np.ndarray
    nu: np.ndarray


def adam_oracle(gradients, b1=0.9, b2=0.999, eps=1e-8):
    """Adam of gradients [steps, ...]."""
    gradients = np.asarray(gradients).astype(np.float64)
    m, v = np.zeros(gradients.shape[1:]), np.zeros(gradients.shape[1:])
    for g in gradients:
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    t = len(gradients)
    return Expected(m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps), m, v)
