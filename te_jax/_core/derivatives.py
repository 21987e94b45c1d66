"""Which derivatives there are, and which are asked for.

Rounding has a derivative of zero, silently: layers in FP8 define first derivatives, and all others are errors.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def not_differentiated(x: Array, reason: str) -> Array:
    """x, whose derivative is an error that says why."""
    del reason
    return x


@not_differentiated.defjvp
def _(reason, *_):
    raise NotImplementedError(reason)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def without_gradient(result: Any, x: Any, reason: str) -> Any:
    """A result, which follows from x and has a derivative of zero: a gradient that comes through it is an error."""
    del x, reason
    return result


def _refuse_gradient(reason, *_):
    raise NotImplementedError(reason)


without_gradient.defvjp(lambda result, x, reason: (result, None), _refuse_gradient)


def differentiated_once(x: Array, name: str) -> Array:
    """x on its way into a quantization, where the rules of the layer `name` lie around it."""
    return not_differentiated(
        x, f"{name} in FP8 is differentiated once, by its own rules; for second derivatives use recipe=None"
    )


def as_residual(flag: bool) -> Array:
    """A choice of derivatives, for the backward pass. JAX may run that of one choice with the tree of another's
    residuals, so only shapes may depend on the choice: (1, 0) for yes and (0, 0) for no."""
    return jnp.zeros((int(flag), 0), jnp.int8)


def from_residual(flag: Array) -> bool:
    return len(flag) == 1
