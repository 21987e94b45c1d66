"""Rules of `jax.vmap` for results of a `jax.custom_vjp`, and for what has none."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array

_Tree = TypeVar("_Tree")


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


def refuse_batches(operands: _Tree, reason: str) -> _Tree:
    """The operands, whose batches are an error.

    Args:
      operands: a tree of arrays.
      reason: names the operation and the way out.
    """

    @jax.custom_batching.custom_vmap
    def same(operands: _Tree) -> _Tree:
        return operands

    @same.def_vmap
    def _(size: int, batched: list[bool], operands: _Tree):
        raise NotImplementedError(reason)

    return same(operands)
