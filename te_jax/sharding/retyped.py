"""A program of `jax.shard_map` in which some values vary over more mesh axes than they did when it was traced.

- Random numbers: devices that draw by one key, each for its part of a batch, would all draw the same.
- Branches of `lax.cond` that devices choose by their own values: JAX sums the gradient of an operand that devices share
  where the operand begins to vary. Inside of the branch some devices would take no part in that sum
  (https://github.com/jax-ml/jax/issues/40823). Here such operands vary before the branch.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from te_jax._core import jaxprs
from te_jax.sharding.axes import varying_axes, varying_over


def of_this_device(
    closed: ClosedJaxpr, operands: Sequence[Array], batch_axes: Sequence[str], states: Sequence[Array] = ()
) -> ClosedJaxpr:
    """A program whose random numbers, and whose sums of gradients, are right where devices have parts of a batch.

    Args:
      closed: the program, traced inside of `jax.shard_map`.
      operands: of it.
      batch_axes: mesh axes along which devices have parts of a batch, and draw by keys of their own.
      states: those of the operands whose cotangents devices do not sum.

    Returns:
      The program for the same operands. Its results may vary over more axes.

    Raises:
      ValueError: a branch that devices choose by their own values reads a state; or a value that now varies is read by
        a function that cannot be traced again.
    """
    axes = frozenset(axis for axis in batch_axes if lax.axis_size(axis) > 1)
    if not _Retyped(axes, ()).concerns(closed.jaxpr):
        return closed
    places = [place for place, x in enumerate(operands) if any(x is state for state in states)]
    return jax.make_jaxpr(lambda *traced: _Retyped(axes, [traced[i] for i in places]).call(closed, *traced))(*operands)


class _Retyped:
    def __init__(self, batch_axes: frozenset[str], states: Sequence[Array]) -> None:
        self.batch_axes = batch_axes
        self.states = states

    def concerns(self, jaxpr: Jaxpr) -> bool:
        return self._draws(jaxpr) or _has_branches_of_devices(jaxpr)

    def _draws(self, jaxpr: Jaxpr) -> bool:
        """Whether devices draw by a key that they share."""
        return any(
            (eqn.primitive.name in _DRAWS and not self.batch_axes <= _axes(eqn.invars[0]))
            or any(map(self._draws, jaxprs.inner(eqn)))
            for eqn in jaxpr.eqns
        )

    def call(self, jaxpr: jaxprs.Program, *operands: Array) -> list[Array]:
        """The results of a jaxpr; operands vary over the axes of their types in it, or over more."""
        values = jaxprs.Values(jaxpr, operands)
        for eqn in values.jaxpr.eqns:
            as_traced, arguments = functools.partial(_as_traced, values.jaxpr, eqn), values.read(eqn.invars)
            with eqn.ctx.manager:
                values.write(eqn, self._apply(as_traced, eqn, arguments))
        return values.read(values.jaxpr.outvars)

    def _apply(self, as_traced: Callable[..., list[Array]], eqn: JaxprEqn, arguments: list[Array]) -> Sequence[Array]:
        name, inner = eqn.primitive.name, jaxprs.inner(eqn)
        if name in _DRAWS:
            arguments[0] = self._key_of_device(arguments[0])
        retyped = any(varying_axes(x) != _axes(atom) for x, atom in zip(arguments, eqn.invars, strict=True))
        draws = any(map(self._draws, inner))
        axes = varying_axes(arguments) | (self.batch_axes if draws else frozenset())
        if name in _FUNCTIONS and (
            retyped or draws or _is_branch_of_devices(eqn) or any(map(_has_branches_of_devices, inner))
        ):
            return _FUNCTIONS[name](self, eqn, arguments, axes)
        if not (retyped or draws):
            return as_traced(*arguments)
        if name == "pvary":
            return [varying_over(arguments[0], _axes(eqn.outvars[0]))]
        if name in jaxprs.CUSTOM_DERIVATIVES:
            return self._with_derivative(as_traced, eqn, arguments, axes)
        if name == "te_local_call":
            return eqn.params["again"](*_varying(arguments, axes))
        if inner or name == "ffi_call":
            raise ValueError(
                f"in a layer of apply_layers with fsdp, {name} reads an array that devices share, in a branch that "
                "they choose by their own values, or random numbers: it cannot be traced again for values that vary. "
                "Pass the array among the layer's parameters, or draw outside of this function"
            )
        results = eqn.primitive.bind(*_varying(arguments, axes), **eqn.params)
        return results if eqn.primitive.multiple_results else [results]

    def _key_of_device(self, key: Array) -> Array:
        axes = tuple(sorted(self.batch_axes - varying_axes(key)))
        if not axes:
            return key
        fold = lambda key: jax.random.fold_in(key, lax.axis_index(axes))  # noqa: E731
        for _ in range(key.ndim):
            fold = jax.vmap(fold)
        return fold(key)

    def _remade(self, eqn: JaxprEqn, arguments: list[Array], axes: frozenset[str]) -> list[Array]:
        del axes
        return jaxprs.remade(eqn, functools.partial(self.call, jaxprs.called(eqn)), arguments)

    def _cond(self, eqn: JaxprEqn, arguments: list[Array], axes: frozenset[str]) -> list[Array]:
        index, *operands = arguments
        if any(x is state for x in operands for state in self.states) and varying_axes(index):
            raise ValueError(
                "a branch that devices choose by their own values reads a state of delayed scaling, whose next value "
                "is the maximum over all devices: use a recipe without a state there"
            )
        drawn = varying_axes(index) - _axes(eqn.invars[0])
        if collective := next(filter(None, (_collective(each, drawn) for each in jaxprs.inner(eqn))), None):
            raise ValueError(
                f"a layer of apply_layers with fsdp draws the branch of lax.cond that it takes, on each device for its "
                f"part of the batch, and a branch has a {collective} over {sorted(drawn)}, in which all devices take "
                "part: draw before apply_layers, and pass each layer its choice among its parameters"
            )

        def branch(jaxpr: jaxprs.Program) -> Callable[..., list[Array]]:
            return lambda *operands: _varying(self.call(jaxpr, *operands), axes)

        # Keys stay shared until they are drawn by.
        operands = [varying_over(x, axes) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in operands]
        branches = list(map(branch, eqn.params["branches"]))
        if (platforms := eqn.params.get("branches_platforms")) is None:
            return lax.switch(index, branches, *operands)
        named = {name: run for names, run in zip(platforms, branches, strict=True) for name in names or ("default",)}
        return lax.platform_dependent(*operands, **named)

    def _scan(self, eqn: JaxprEqn, arguments: list[Array], axes: frozenset[str]) -> list[Array]:
        del axes
        (first, last), body = jaxprs.scan_parts(eqn), eqn.params["jaxpr"]
        consts, carry, xs = arguments[:first], arguments[first:last], arguments[last:]
        carry = self._settled(body, consts, carry, xs)

        def function(*operands: Array) -> list[Array]:
            results, carried = self.call(body, *operands), operands[first:last]
            return [*_like(results[: len(carried)], carried), *results[len(carried) :]]

        return jaxprs.remade(eqn, function, [*consts, *carry, *xs])

    def _while(self, eqn: JaxprEqn, arguments: list[Array], axes: frozenset[str]) -> list[Array]:
        del axes
        first = eqn.params["cond_nconsts"]
        last = first + eqn.params["body_nconsts"]
        carry = self._settled(eqn.params["body_jaxpr"], arguments[first:last], arguments[last:])

        def proceeds(carry: list[Array]) -> Array:
            return self.call(eqn.params["cond_jaxpr"], *arguments[:first], *carry)[0]

        def body(carry: list[Array]) -> list[Array]:
            return _like(self.call(eqn.params["body_jaxpr"], *arguments[first:last], *carry), carry)

        return lax.while_loop(proceeds, body, carry)

    def _settled(self, body: ClosedJaxpr, consts: list[Array], carry: list[Array], xs: Sequence[Array] = ()):
        """The first carried values of a loop, varying over all axes over which those of later iterations vary."""
        variables = body.jaxpr.invars[len(consts) + len(carry) :]
        rows = [
            jaxprs.type_of(var).update(manual_axis_type=jax.typeof(x).manual_axis_type)
            for var, x in zip(variables, xs, strict=True)
        ]
        while True:
            types = jax.make_jaxpr(functools.partial(self.call, body))(*consts, *carry, *rows).out_avals
            pairs = zip(carry, types[: len(carry)], strict=True)
            settled = [varying_over(x, type_.manual_axis_type.varying) for x, type_ in pairs]
            if all(map(operator.is_, settled, carry)):
                return carry
            carry = settled

    def _with_derivative(
        self, as_traced: Callable[..., list[Array]], eqn: JaxprEqn, arguments: list[Array], axes: frozenset[str]
    ) -> list[Array]:
        """A function with a derivative of its own, which `jax.vjp` takes for operands of the types that it had."""
        floats = [
            place for place, atom in enumerate(eqn.invars) if jnp.issubdtype(jaxprs.type_of(atom).dtype, jnp.inexact)
        ]

        def gradients(arguments: list[Array], cotangents: list[Array]) -> tuple[Array, ...]:
            def function(*chosen: Array) -> list[Array]:
                replaced = dict(zip(floats, chosen, strict=True))
                return as_traced(*(replaced.get(place, x) for place, x in enumerate(arguments)))

            return jax.vjp(function, *(arguments[place] for place in floats))[1](cotangents)

        run = jax.custom_vjp(lambda *arguments: _varying(self.call(eqn.params["call_jaxpr"], *arguments), axes))

        def backward(arguments: Sequence[Array], cotangents: list[Array]) -> tuple[Array | None, ...]:
            types = [atom.aval for atom in eqn.invars], [var.aval for var in eqn.outvars]
            in_cotangents = self.call(jax.make_jaxpr(gradients)(*types), *arguments, *cotangents)
            replaced = dict(zip(floats, _varying(in_cotangents, axes), strict=True))
            return tuple(replaced.get(place) for place in range(len(arguments)))

        run.defvjp(lambda *arguments: (run(*arguments), arguments), backward)
        return run(*_varying(arguments, axes))


_DRAWS = ("random_bits", "random_gamma")
_FUNCTIONS: dict[str, Callable[[_Retyped, JaxprEqn, list[Array], frozenset[str]], Sequence[Array]]] = {
    **dict.fromkeys((*jaxprs.CALLS, *jaxprs.CHECKPOINTS), _Retyped._remade),
    "cond": _Retyped._cond,
    "scan": _Retyped._scan,
    "while": _Retyped._while,
}


def _has_branches_of_devices(jaxpr: Jaxpr) -> bool:
    """Whether a branch that devices choose by their own values reads floats that they share."""
    return any(
        _is_branch_of_devices(eqn)
        or (eqn.primitive.name in _FUNCTIONS and any(map(_has_branches_of_devices, jaxprs.inner(eqn))))
        for eqn in jaxpr.eqns
    )


def _is_branch_of_devices(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name != "cond":
        return False
    index, *operands = eqn.invars
    floats = [
        x for x in operands if not isinstance(x, Literal) and jnp.issubdtype(jaxprs.type_of(x).dtype, jnp.inexact)
    ]
    return any(not _axes(index) <= _axes(x) for x in floats)


def _collective(jaxpr: Jaxpr, axes: frozenset[str]) -> str | None:
    """The name of a primitive by which devices along any of these axes exchange values."""
    for eqn in jaxpr.eqns:
        names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        shared = [name for name in (names if isinstance(names, tuple) else (names,)) if isinstance(name, str)]
        if axes.intersection(shared) and eqn.primitive.name not in ("pvary", "axis_index"):
            return eqn.primitive.name
        if collective := next(filter(None, (_collective(each, axes) for each in jaxprs.inner(eqn))), None):
            return collective
    return None


def _as_traced(jaxpr: Jaxpr, eqn: JaxprEqn, *arguments: Array) -> list[Array]:
    """The results of an equation of the jaxpr, for operands of the types that it had."""
    operands = {atom: x for atom, x in zip(eqn.invars, arguments, strict=True) if not isinstance(atom, Literal)}
    return jaxprs.run(jaxprs.part(jaxpr, [eqn], eqn.outvars), operands)


def _axes(atom: jaxprs.Atom) -> frozenset[str]:
    return frozenset() if isinstance(atom, Literal) else jaxprs.type_of(atom).manual_axis_type.varying


def _varying(values: Sequence[Array], axes: frozenset[str]) -> list[Array]:
    return [varying_over(x, axes) for x in values]


def _like(values: Sequence[Array], carry: Sequence[Array]) -> list[Array]:
    return [varying_over(x, varying_axes(like)) for x, like in zip(values, carry, strict=True)]
