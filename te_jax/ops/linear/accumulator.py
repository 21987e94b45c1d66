"""Accumulators of kernels' gradients: when one may be given, and how it is added to once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from te_jax import sharding
from te_jax._core.branches import in_branch_differentiated_outside


def validate_accumulator(name: str, accumulator: Array, varying: frozenset[str]) -> None:
    """Checks, where a layer with an accumulator is called, that every gradient reaches it, and that its value counts
    once: JAX would add up the next values of devices that share it.

    Args:
      name: of the accumulator.
      accumulator: the array.
      varying: the mesh axes over which the gradient varies that is added.
    """
    if missing := varying - sharding.varying_axes(accumulator):
        raise ValueError(
            f"{name} is the same on all devices along {sorted(missing)}, but each has other tokens or "
            "another kernel there and accumulates its own part: make it with lax.pcast(…, to='varying') or pass it in "
            "split, and sum over these axes after the last microbatch"
        )
    if in_branch_differentiated_outside():
        raise ValueError(
            f"{name} is given in a branch of jax.lax.cond or jax.lax.switch, and the gradient is taken outside of it: "
            "where the branch is not taken, that of the accumulator would be zero, and the sum lost. Take the gradient "
            "in the branch, or call the layer outside and choose its result with jnp.where"
        )


def validate_accumulated(for_kernel: bool, for_accumulator: bool) -> None:
    """Checks, in the forward rule of a layer with an accumulator, what is differentiated."""
    if for_kernel and not for_accumulator:
        raise ValueError(
            "wgrad_accumulator takes the gradient of kernel, but only kernel is differentiated; differentiate with "
            "respect to wgrad_accumulator, whose cotangent is its next value"
        )


@jax.custom_batching.custom_vmap
def added_once(accumulator: Array, *added: Array) -> Array:
    """The accumulator, to add `added` to. Where examples of a vmap share it, theirs is zero but for the first one's:
    JAX sums over them what comes back, as it does with all cotangents."""
    del added
    return accumulator


@added_once.def_vmap
def _(size: int, batched: list[bool], accumulator: Array, *added: Array):
    if batched[0]:
        return accumulator, True
    if not size:
        raise ValueError(
            "wgrad_accumulator is shared by the 0 examples of a vmap, whose sum would be zero and not its value; do "
            "without the empty vmap, or map wgrad_accumulator too"
        )
    # Examples of a vmap around this one may share it as well. The maxima only have its dimension, and are not computed.
    rest = (jnp.max(x, axis=0) if mapped else x for x, mapped in zip(added, batched[1:], strict=True))
    of_first = added_once(accumulator, *rest)
    return jnp.pad(of_first[None], ((0, size - 1), *((0, 0),) * of_first.ndim)), True
