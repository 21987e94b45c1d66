"""Which derivatives there are.

Rounding has a derivative of zero, silently: layers in FP8 define first derivatives, and all others are errors.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
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
