"""Operations that have derivatives in reverse mode only, and say so in forward mode.

In forward mode `jax.custom_vjp` raises an error that names neither the operation nor a way out.
"""

from __future__ import annotations

from typing import TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_Tree = TypeVar("_Tree")


def reverse_mode_only(operands: _Tree, reason: str) -> _Tree:
    """The operands, whose forward-mode derivatives are an error that says why; reverse mode passes through.

    Give all operands of an operation together: derivatives of some then leave no trace of the others in a program,
    where JAX would copy them as residuals.

    Args:
      operands: a tree of arrays.
      reason: names the operation and the way out.
    """
    leaves, tree = jax.tree.flatten(operands)
    return jax.tree.unflatten(tree, _reverse_mode_only_p.bind(*leaves, reason=reason))


_reverse_mode_only_p = Primitive("te_reverse_mode_only")
_reverse_mode_only_p.multiple_results = True
_reverse_mode_only_p.def_impl(lambda *operands, reason: operands)
_reverse_mode_only_p.def_abstract_eval(lambda *operands, reason: operands)
batching.primitive_batchers[_reverse_mode_only_p] = lambda operands, dims, *, reason: (operands, dims)
mlir.register_lowering(_reverse_mode_only_p, lambda ctx, *operands, reason: operands)


def _jvp(primals, tangents, *, reason):
    return primals, [t if type(t) is ad.Zero else _transposed_only_p.bind(t, reason=reason) for t in tangents]


ad.primitive_jvps[_reverse_mode_only_p] = _jvp

# The identity on a tangent. Reverse mode only transposes it; forward mode computes it.
_transposed_only_p = Primitive("te_transposed_only")
_transposed_only_p.def_abstract_eval(lambda tangent, *, reason: tangent)
ad.deflinear2(_transposed_only_p, lambda cotangent, _, *, reason: [cotangent])
batching.primitive_batchers[_transposed_only_p] = lambda tangents, dims, *, reason: (
    _transposed_only_p.bind(*tangents, reason=reason),
    dims[0],
)


def _refuse(*_, reason):
    raise NotImplementedError(reason)


_transposed_only_p.def_impl(_refuse)
mlir.register_lowering(_transposed_only_p, _refuse)
