"""Rounding has a derivative of zero, silently: layers in FP8 define first derivatives, and all others are errors."""

from __future__ import annotations

import functools

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


def differentiated_once(x: Array, name: str) -> Array:
    """x on its way into a quantization, where the rules of the layer `name` lie around it."""
    return not_differentiated(
        x, f"{name} in FP8 is differentiated once, by its own rules; for second derivatives use recipe=None"
    )
