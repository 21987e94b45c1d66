"""Derivatives of what an output head computes: of a sum, whose gradients come with it, and of numbers of each token."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jax.interpreters import ad

from te_jax import sharding
from te_jax.ops import _cross_entropy
from te_jax.ops.head.chunks import Wanted, run
from te_jax.ops.head.rows import Head
from te_jax.ops.linear.accumulator import added_once


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def total(head: Head, x, kernel, bias, accumulator, rows):
    """Σ factor · the first number of each token, whose gradients are computed with it; and the second numbers."""
    del accumulator
    first, second = run(head, Wanted(), x, kernel, bias, None, rows).values
    return _sum(rows["factor"], first), second


def _sum(factor: Array, values: Array) -> Array:
    return jnp.sum(sharding.split_as_last(factor, values) * values)


def _total_forward(head: Head, *operands):
    wanted = Wanted.of(*operands)
    x, kernel, bias, accumulator, rows = custom_vjp_primal_tree_values(operands)
    if accumulator is not None:
        accumulator = added_once(accumulator, x, rows["factor"])
        # For a loss that is scaled afterwards; XLA removes that of the two which is not used.
        wanted = dataclasses.replace(wanted, kernel=wanted.accumulator)
    values, of_rows, found = run(head, wanted, x, kernel, bias, accumulator, rows)
    gradients = [checkpoint_name(_absent() if a is None else a, "linear_cross_entropy_gradient") for a in found]
    of_rows = {"factor": values[0], **{name: of_rows.get(name, _absent()) for name in head.rows.derived}}
    like = {name: sharding.Layout.of(rows[name]) for name in of_rows}
    residuals = gradients, *map(_like, (x, kernel, bias)), accumulator, of_rows, like, dict.fromkeys(rows)
    return (_sum(rows["factor"], values[0]), values[1]), residuals


def _like(a: Array | None) -> sharding.Layout | None:
    return None if a is None else sharding.Layout.of(a)


def _absent() -> Array:
    """Placeholder for a gradient that is not asked for: JAX wants residuals of one structure, whatever is asked for."""
    return jnp.zeros((0,), jnp.float32)


def _total_backward(head: Head, residuals, cotangents):
    gradients, *layouts, accumulator, of_rows, like, no_rows = residuals
    of_device = _instantiated(cotangents[0])
    cotangent = _cross_entropy.over_replicas(of_device, head.rows.vocab_axis)
    dx, dkernel, dbias, following = (None if a.shape == (0,) else a for a in gradients)
    if following is not None:
        assert dkernel is not None
        # XLA sees a cotangent that is 1, and then needs neither the accumulator nor dkernel.
        previous = accumulator.astype(jnp.float32) if head.layer.accumulate else 0.0
        scaled = (previous + cotangent * dkernel).astype(following.dtype)
        following, dkernel = jnp.where(cotangent == 1.0, following, scaled), None
    dx, dkernel, dbias = (
        None if a is None or layout is None else layout.apply(cotangent * a.astype(jnp.float32))
        for a, layout in zip((dx, dkernel, dbias), layouts, strict=True)
    )
    # Each shard of the vocabulary has the whole of these, where it has a part of dx.
    drows = {name: like[name].apply(of_device * a) for name, a in of_rows.items() if a.shape != (0,)}
    return dx, dkernel, dbias, following, no_rows | drows


def _instantiated(cotangent: Array | SymbolicZero) -> Array:
    return ad.zeros_like_aval(cotangent.aval) if isinstance(cotangent, SymbolicZero) else cotangent


total.defvjp(_total_forward, _total_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def per_token(head: Head, x, kernel, bias, accumulator, rows):
    """Both numbers of each token, whose gradients are computed when their cotangents are known."""
    del accumulator
    return run(head, Wanted(), x, kernel, bias, None, rows).values


def _per_token_forward(head: Head, *operands):
    wanted = Wanted.of(*operands)
    x, kernel, bias, accumulator, rows = custom_vjp_primal_tree_values(operands)
    first, second = run(head, Wanted(), x, kernel, bias, None, rows).values
    second = checkpoint_name(second, "linear_cross_entropy_lse")
    return (first, second), (wanted.as_shapes(), x, kernel, bias, accumulator, rows, second)


def _per_token_backward(head: Head, residuals, cotangents):
    axes = head.rows.vocab_axis
    summed = [_cross_entropy.over_replicas(_instantiated(each), axes) for each in cotangents]
    return _gradients_again(head, residuals, summed)


# Under jit, or each gradient outside of jit would trace it anew.
@functools.partial(jax.jit, static_argnums=0, inline=sharding.INLINE)
def _gradients_again(head: Head, residuals, cotangents: list[Array]):
    shapes, x, kernel, bias, accumulator, rows, second = residuals
    wanted = Wanted(*(a.shape == (1,) for a in shapes))
    weighted = rows | head.rows.weighted(cotangents, second)
    if accumulator is not None:
        accumulator = added_once(accumulator, x, cotangents[0])
    gradients = run(head, wanted, x, kernel, bias, accumulator, weighted).gradients
    dx, dkernel, dbias = (
        None if a is None else sharding.Layout.of(of).apply(a)
        for a, of in zip(gradients[:3], (x, kernel, bias), strict=True)
    )
    return dx, dkernel, dbias, gradients.accumulator, dict.fromkeys(rows)


per_token.defvjp(_per_token_forward, _per_token_backward, symbolic_zeros=True)
