"""A rule of `jax.vmap` for results of a `jax.custom_vjp`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def batched_together(results: tuple[Array, ...]) -> tuple[Array, ...]:
    """The results of a function with a rule of its own for gradients, all mapped by vmap if one of them is.

    If a result is the same for all examples, JAX adds up its cotangents before it calls the rule. If the rule then adds
    cotangents of mapped results, as in a sum over several products, the former count once for each example.
    """
    return tuple(_together(*results)) if len(results) > 1 else results


@jax.custom_batching.custom_vmap
def _together(*results: Array) -> tuple[Array, ...]:
    return results


@_together.def_vmap
def _(size: int, batched: list[bool], *results: Array):
    mapped = (x if has else jnp.broadcast_to(x, (size, *x.shape)) for x, has in zip(results, batched, strict=True))
    return _together(*mapped), (True,) * len(results)
