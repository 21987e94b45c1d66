"""Which derivatives there are.

Rounding has a derivative of zero, silently: layers in FP8 define first derivatives, and all others are errors.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from te_jax._core.types import PyTree


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def not_differentiated(x: PyTree, reason: str) -> PyTree:
    """A tree x, whose derivative is an error that says why."""
    del reason
    return x


@not_differentiated.defjvp
def _(reason, *_):
    raise NotImplementedError(reason)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def without_gradient(result: PyTree, x: PyTree, reason: str) -> PyTree:
    """A result, which follows from x and has a derivative of zero: a gradient that comes through it is an error. Inside
    `shard_map` only under jit."""
    del x, reason
    return result


def _without_gradient_forward(result, x, reason):
    del x, reason
    return custom_vjp_primal_tree_values(result), None


def _refuse_gradient(reason, _, cotangents):
    if any(not isinstance(cotangent, SymbolicZero) for cotangent in jax.tree.leaves(cotangents)):
        raise NotImplementedError(reason)
    return None, None


without_gradient.defvjp(_without_gradient_forward, _refuse_gradient, symbolic_zeros=True)


def straight_through(x: Array, *others: Array) -> Array:
    """Zeros like x, with the derivative of x; under vmap one for each example of any operand."""
    return _straight_through_p.bind(x, *others)


# A primitive, for under vmap the zeros must count as batched: each example has its own gradient.
_straight_through_p = Primitive("te_straight_through")
_straight_through_p.def_impl(lambda x, *_: jnp.zeros_like(x))
_straight_through_p.def_abstract_eval(lambda x, *_: x)
mlir.register_lowering(_straight_through_p, mlir.lower_fun(lambda x, *_: jnp.zeros_like(x), multiple_results=False))
ad.primitive_jvps[_straight_through_p] = lambda primals, tangents: (straight_through(*primals), tangents[0])


def _batch_straight_through(operands, dims):
    x, dim = operands[0], dims[0]
    if dim is None:
        (size,) = {other.shape[d] for other, d in zip(operands, dims, strict=True) if d is not None}
        x, dim = jnp.broadcast_to(x, (size, *x.shape)), 0
    return straight_through(x), dim


batching.primitive_batchers[_straight_through_p] = _batch_straight_through


def differentiated_once(x: PyTree, name: str) -> PyTree:
    """x on its way into a quantization, or with what came of it, where the rules of the layer `name` lie around it."""
    return not_differentiated(
        x, f"{name} in FP8 is differentiated once, by its own rules; for second derivatives use recipe=None"
    )
