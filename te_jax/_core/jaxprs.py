"""Programs as JAX traces them: families of primitives, the parts of an equation, and evaluation with other results.

Differences between the versions of JAX that te_jax supports end here.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import jax
from jax import Array, lax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.sharding import PartitionSpec

Atom = Var | Literal
Program = Jaxpr | ClosedJaxpr

CALLS = ("jit", "pjit", "closed_call", "core_call", "eval_jaxpr")
"""They run a jaxpr as it is. The last is jax 0.11's for closed_call."""

CUSTOM_DERIVATIVES = ("custom_jvp_call", "custom_vjp_call")
"""They run a jaxpr that has derivatives of its own."""

CHECKPOINTS = ("checkpoint", "remat", "remat2")

IDENTITIES = ("name", "copy", "optimization_barrier", "pvary")
"""They return their operands."""

LAYOUTS = ("transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "rev")
"""They return the elements of their operand in another shape or order."""

MOVES = ("sharding_constraint", "reshard", "mesh_cast", "all_gather", "all_gather_invariant")
"""They return their operand on other devices."""


def opened(jaxpr: Program) -> tuple[Jaxpr, Sequence[Any]]:
    """A jaxpr, closed or not, and its constants."""
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, ClosedJaxpr) else (jaxpr, ())


def called(eqn: JaxprEqn) -> Program:
    """The jaxpr of an equation that calls one function."""
    return next(eqn.params[name] for name in ("jaxpr", "call_jaxpr", "call") if name in eqn.params)


def inner(eqn: JaxprEqn) -> list[Jaxpr]:
    """All jaxprs of an equation."""
    values = [x for value in eqn.params.values() for x in (value if isinstance(value, tuple | list) else (value,))]
    return [opened(value)[0] for value in values if isinstance(value, ClosedJaxpr | Jaxpr)]


def scan_parts(eqn: JaxprEqn) -> tuple[int, int]:
    """The places of the first carried and of the first scanned operand."""
    if "ft_in" in eqn.params:  # from JAX 0.11 on
        first, carried = (len(part) for part in eqn.params["ft_in"].unpack()[:2])
    else:
        first, carried = eqn.params["num_consts"], eqn.params["num_carry"]
    return first, first + carried


def type_of(atom: Atom) -> ShapedArray:
    return cast(ShapedArray, atom.aval)


def variables(atoms: Iterable[Atom]) -> list[Var]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def part(jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], results: Sequence[Atom]) -> ClosedJaxpr:
    """Some equations of a jaxpr as a program of their own, whose operands are the variables that they read."""
    made = {var for eqn in eqns for var in eqn.outvars}
    read = dict.fromkeys(var for eqn in eqns for var in variables(eqn.invars) if var not in made)
    names = jaxpr.debug_info.with_unknown_names()
    program = jaxpr.replace(constvars=[], invars=list(read), outvars=list(results), eqns=list(eqns), debug_info=names)
    return ClosedJaxpr(program, ())


class Values:
    """The values of a jaxpr's variables, while its equations are evaluated in their order.

    Attributes:
      jaxpr: without its constants.
    """

    def __init__(self, jaxpr: Program, operands: Sequence[Any]) -> None:
        self.jaxpr, consts = opened(jaxpr)
        operands_of = (*self.jaxpr.constvars, *self.jaxpr.invars)
        self._values: dict[Var, Any] = dict(zip(operands_of, (*consts, *operands), strict=True))
        self._postponed: list[JaxprEqn] = []
        self._uses = collections.Counter(variables(self.jaxpr.outvars))
        for eqn in self.jaxpr.eqns:
            self._uses.update(variables(eqn.invars))

    def postpone(self, eqn: JaxprEqn) -> None:
        """Lets an equation run as it is, together with its neighbours, before anything is read."""
        self._postponed.append(eqn)

    def known(self, atoms: Iterable[Atom]) -> list[Any]:
        """The values of those variables that no postponed equation makes."""
        return [self._values[var] for var in variables(atoms) if var in self._values]

    def read(self, atoms: Iterable[Atom]) -> list[Any]:
        eqns, self._postponed = self._postponed, []
        inside = collections.Counter(var for eqn in eqns for var in variables(eqn.invars))
        kept = [var for eqn in eqns for var in eqn.outvars if self._uses[var] > inside[var]]
        if kept or any(eqn.effects for eqn in eqns):
            self._values.update(zip(kept, run(part(self.jaxpr, eqns, kept), self._values), strict=True))
        return [atom.val if isinstance(atom, Literal) else self._values[atom] for atom in atoms]

    def write(self, eqn: JaxprEqn, results: Sequence[Any]) -> None:
        self._values.update(zip(eqn.outvars, results, strict=True))


def run(closed: ClosedJaxpr, values: Mapping[Var, Any]) -> list[Array]:
    """The results of a part of a jaxpr, from values by variable."""
    return jaxpr_as_fun(closed)(*(values[var] for var in closed.jaxpr.invars))


def remade(eqn: JaxprEqn, function: Callable[..., Sequence[Array]], operands: Sequence[Array]) -> list[Array]:
    """The results of a call, checkpoint, scan or shard_map with a function in the place of its jaxpr.

    Args:
      function: returns the results of the jaxpr, or those and more.

    Returns:
      The results, and what there is more: of a scan stacked, of a shard_map as all devices have it.
    """
    params, operands = eqn.params, list(operands)
    if eqn.primitive.name in CALLS:
        return list(function(*operands))
    if eqn.primitive.name in CHECKPOINTS:
        return jax.checkpoint(function, prevent_cse=params["prevent_cse"], policy=params["policy"])(*operands)
    if eqn.primitive.name == "scan":
        first, last = scan_parts(eqn)

        def body(carry: Sequence[Array], xs: Sequence[Array]) -> tuple[Sequence[Array], Sequence[Array]]:
            results = function(*operands[:first], *carry, *xs)
            return results[: last - first], results[last - first :]

        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        carry, ys = lax.scan(body, operands[first:last], operands[last:], **options)
        return [*carry, *ys]

    def local(*arrays: Array) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        results = function(*arrays)
        return tuple(results[: len(eqn.outvars)]), tuple(results[len(eqn.outvars) :])

    specs = {"in_specs": tuple(params["in_specs"]), "out_specs": (tuple(params["out_specs"]), PartitionSpec())}
    options = {"mesh": params["mesh"], "axis_names": params["newly_manual_axes"], "check_vma": params["check_vma"]}
    results, more = jax.shard_map(local, **specs, **options)(*operands)
    return [*results, *more]
