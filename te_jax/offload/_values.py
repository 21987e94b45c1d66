"""Which values of a jaxpr are the same array, what `checkpoint_name` calls them, and what they depend on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from te_jax._core import jaxprs

# What these return lies in memory as their operand does; reshape, unless it has another order of dimensions.
# JAX's checkpoint has a reduce_precision, which rounds nothing, for what its policy saves.
_SAME_BYTES = {*jaxprs.IDENTITIES, "reshape", "squeeze", "pcast", "reduce_precision", "te_reverse_mode_only"}
# What these return is what their jaxpr returns.
_CALLS = {*jaxprs.CALLS, *jaxprs.CHECKPOINTS, *jaxprs.CUSTOM_DERIVATIVES}


@dataclasses.dataclass(eq=False)
class Value:
    """Facts about a variable.

    Attributes:
      array: the same object for values that are the same array but for their shape.
      names: of `checkpoint_name`; those of the array, whatever its shape, are in one set.
      marked: whether it depends on an input that is marked.
    """

    array: object
    names: set[str]
    marked: bool

    @classmethod
    def new(cls, *, marked: bool, names: Iterable[str] = ()) -> Value:
        return cls(object(), set(names), marked)


def values_of(jaxpr: Jaxpr, inputs: Sequence[Value]) -> list[Value]:
    """The facts about the jaxpr's outputs.

    Args:
      jaxpr: the program. Calls are looked into; of loops and `shard_map` only names come out.
      inputs: of its invars.
    """
    known: dict[Var, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
    known |= {var: Value.new(marked=False) for var in jaxpr.constvars}

    def read(atom: jaxprs.Atom) -> Value:
        return Value.new(marked=False) if isinstance(atom, Literal) else known[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        outputs = _outputs(eqn, operands)
        known |= dict(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _outputs(eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    name = eqn.primitive.name
    if name in _SAME_BYTES and len(eqn.invars) == len(eqn.outvars) and not _rounds(eqn):
        if name == "name":
            operands[0].names.add(eqn.params["name"])
        reordered = name == "reshape" and eqn.params["dimensions"] is not None
        return [
            before
            if not reordered and _same_bytes(jaxprs.type_of(var), jaxprs.type_of(out))
            else Value.new(marked=before.marked, names=before.names)
            for before, var, out in zip(operands, eqn.invars, eqn.outvars, strict=True)
        ]
    marked = any(value.marked for value in operands)
    for value in eqn.params.values():
        inner = jaxprs.opened(value)[0] if isinstance(value, ClosedJaxpr | Jaxpr) else None
        if inner is None or len(inner.outvars) != len(eqn.outvars):
            continue
        if name in _CALLS and len(inner.invars) == len(operands):
            return values_of(inner, operands)
        of_inner = values_of(inner, [Value.new(marked=marked) for _ in inner.invars])
        return [Value.new(marked=marked, names=value.names) for value in of_inner]
    return [Value.new(marked=marked) for _ in eqn.outvars]


def _rounds(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name != "reduce_precision":
        return False
    whole = jnp.finfo(jaxprs.type_of(eqn.invars[0]).dtype)
    return eqn.params["exponent_bits"] < whole.nexp or eqn.params["mantissa_bits"] < whole.nmant


def _same_bytes(before: ShapedArray, after: ShapedArray) -> bool:
    if before.dtype != after.dtype or math.prod(before.shape) != math.prod(after.shape):
        return False
    # On Explicit meshes the result may be distributed otherwise: always where its shape is another.
    same_type = before.shape == after.shape and before.sharding == after.sharding
    return same_type or not before.sharding.mesh.explicit_axes
