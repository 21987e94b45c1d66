"""The state of an optimizer in host memory, on the device only while a parameter is updated."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import jax
import optax
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from te_jax._core import jaxprs
from te_jax._core.arguments import is_whole_number
from te_jax._core.types import PyTree
from te_jax.sharding import together

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def offload(optimizer: optax.GradientTransformation, *, min_size: int = 2**20) -> optax.GradientTransformationExtraArgs:
    """Keeps the optimizer's state in host memory (`pinned_host`), and streams it through the device in a step.

    While the step updates one parameter, the state of the next arrives and that of the one before leaves. The device
    holds the state of three parameters at a time. Values are those of the optimizer itself, bit for bit: the step runs
    its operations, parameter by parameter.

    Call `update` inside of `jax.jit`. Donate parameters and state, so that new values take the place of old ones, and
    return them in the order in which the step takes them: JAX pairs donated arrays with results by shape, in this
    order, and must not give the memory of a state to a parameter. In `out_shardings` name the state's memory kinds, as
    `jax.tree.map(lambda x: x.sharding, state)` does, or give none. Checkpoints have the same contents as without
    offload.

    Args:
      optimizer: any that computes the new state and update of a parameter from its own old state, its gradient and few
        numbers: those of `te_jax.optim`, with masters, loss scales and skipped steps, and most of optax.
      min_size: bytes; smaller arrays of the state stay on the device.

    Returns:
      The transform, with the state of `optimizer`.

    Raises:
      ValueError: min_size is no number of bytes.

    Examples:
      >>> import jax, jax.numpy as jnp, te_jax.optim
      >>> optimizer = te_jax.optim.offload(te_jax.optim.adamw(1e-3), min_size=0)
      >>> params = {"w": jnp.ones(4)}
      >>> state = optimizer.init(params)
      >>> jax.tree.leaves(state)[1].sharding.memory_kind
      'pinned_host'
      >>> def step(params, state, gradients):
      ...     updates, state = optimizer.update(gradients, state, params)
      ...     return te_jax.optim.apply_updates(params, updates), state
      >>> params, state = jax.jit(step, donate_argnums=(0, 1))(params, state, {"w": jnp.full(4, 2.0)})
    """
    if not is_whole_number(min_size) or min_size < 0:
        raise ValueError(f"min_size is {min_size!r}: it must be a number of bytes, 0 or more")
    inner = optax.with_extra_args_support(optimizer)

    def leaves_device(leaf: Array) -> bool:
        return leaf.size * leaf.dtype.itemsize >= max(min_size, 1) and leaf.ndim > 0

    def to_host(leaf: Array) -> Array:
        return jax.device_put(leaf, _HOST) if leaves_device(leaf) else leaf

    def init(params: PyTree) -> PyTree:
        # In one program, which never holds the whole state on the device.
        return jax.jit(lambda params: jax.tree.map(to_host, inner.init(params)))(params)

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object) -> tuple[PyTree, PyTree]:
        arguments = (updates, params, extra_args)
        return _streamed(inner.update, arguments, state, leaves_device)

    return optax.GradientTransformationExtraArgs(init, update)


def _streamed(
    update: optax.TransformUpdateExtraArgsFn, arguments: PyTree, state: PyTree, leaves_device: Callable[[Array], bool]
) -> tuple[PyTree, PyTree]:
    old, structure = jax.tree.flatten(state)
    hosted = [leaves_device(leaf) for leaf in old]

    def on_device(arguments: PyTree, old: list[Array]) -> tuple[PyTree, PyTree]:
        updates, params, extra_args = arguments
        return update(updates, structure.unflatten(old), params, **extra_args)

    # Types of the state on the device; no copy is made for them.
    types = jax.eval_shape(lambda old: [jax.device_put(leaf, _DEVICE) for leaf in old], old)
    closed, shape = jax.make_jaxpr(on_device, return_shape=True)(arguments, types)
    if jax.tree.structure(shape[1]) != structure:
        raise ValueError("the optimizer's new state has another structure than its old one: it cannot be offloaded")
    program = closed.jaxpr
    operands = (*closed.consts, *jax.tree.leaves(arguments), *old)
    values = dict(zip((*program.constvars, *program.invars), operands, strict=True))
    count = len(program.outvars) - len(old)
    old_state = program.invars[len(program.invars) - len(old) :]
    waiting = {var for var, host in zip(old_state, hosted, strict=True) if host}
    program = _without_barriers(program)
    leaving = {var for var, host in zip(program.outvars[count:], hosted, strict=True) if host and isinstance(var, Var)}
    stored = {var: values[var] for var in waiting}  # host arrays
    before: list[Array] = []  # the copies that are under way
    pieces = _pieces(program, count, waiting)
    for place in range(-1, len(pieces) + 1):
        # The state of the piece before this one leaves, and that of the next comes: an array each way at a time, so
        # that both directions of the bus are busy.
        leaves = [var for var in pieces[place - 1].jaxpr.outvars if var in leaving] if place > 0 else []
        comes = [v for v in pieces[place + 1].jaxpr.invars if v in waiting] if place + 1 < len(pieces) else []
        waiting.difference_update(comes)
        for out, into in itertools.zip_longest(leaves, comes):
            begin = [*([values[out]] if out else []), *([stored[into]] if into else [])]
            begin, _ = together(begin, before)
            before = []
            if out:
                stored[out] = jax.device_put(begin[0], _HOST)
                before.append(stored[out])
            if into:
                values[into] = jax.device_put(begin[-1], _DEVICE)
                before.append(values[into])
        if 0 <= place < len(pieces):
            outputs = jaxprs.run(pieces[place], values)
            values |= dict(zip(pieces[place].jaxpr.outvars, outputs, strict=True))

    def result(var: jaxprs.Atom, host: bool) -> Array:
        if host and isinstance(var, Var) and var in stored:
            return stored[var]
        value = var.val if isinstance(var, Literal) else values[var]
        return jax.device_put(value, _HOST) if host else value

    results = map(result, program.outvars, [*[False] * count, *hosted])
    return jax.tree.unflatten(jax.tree.structure(shape), results)


def _without_barriers(program: Jaxpr) -> Jaxpr:
    """The program without optimization barriers, which would put parameters in an order."""
    same: dict[Var, jaxprs.Atom] = {}

    def read(atom: jaxprs.Atom) -> jaxprs.Atom:
        return same.get(atom, atom) if isinstance(atom, Var) else atom

    eqns = []
    for eqn in program.eqns:
        invars = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name == "optimization_barrier":
            same |= dict(zip(eqn.outvars, invars, strict=True))
        else:
            eqns.append(eqn.replace(invars=invars))
    return program.replace(eqns=eqns, outvars=[read(atom) for atom in program.outvars])


def _pieces(program: Jaxpr, count: int, waiting: set[Var]) -> list[ClosedJaxpr]:
    """A piece for each of the first `count` outputs, and one for what no other has needed.

    Each has the equations that its outputs need and that no piece before has run. It returns what later pieces or the
    caller read.

    Every further output belongs to the first piece at whose end all is there that it needs of what waits.
    """
    maker = {var: place for place, eqn in enumerate(program.eqns) for var in eqn.outvars}
    reads: list[set[Var]] = []  # of each equation, what it needs of what waits

    def read_by(atoms: Iterable[jaxprs.Atom]) -> set[Var]:
        each = (reads[maker[var]] if var in maker else {var} & waiting for var in jaxprs.variables(atoms))
        return set[Var]().union(*each)

    for eqn in program.eqns:
        reads.append(read_by(eqn.invars))
    # From few bytes to many and back: as much comes as leaves at a time, and the first and the last copy are short.
    by_size = sorted(program.outvars[:count], key=lambda output: sum(map(_nbytes, read_by([output]))))
    further = list(program.outvars[count:])
    groups: list[list[jaxprs.Atom]] = []
    here: set[Var] = set()
    for output in [*by_size[::2], *by_size[1::2][::-1]]:
        here |= read_by([output])
        ready = [read_by([other]) <= here for other in further]
        groups.append([output, *itertools.compress(further, ready)])
        further = [other for other, is_ready in zip(further, ready, strict=True) if not is_ready]
    groups.append(further)

    run: set[int] = set()

    def needed(outputs: Iterable[jaxprs.Atom]) -> list[JaxprEqn]:
        """The equations that the outputs need and that have not run, in order."""
        places, todo = [], jaxprs.variables(outputs)
        while todo:
            place = maker.get(todo.pop())
            if place is not None and place not in run:
                run.add(place)
                places.append(place)
                todo += jaxprs.variables(program.eqns[place].invars)
        return [program.eqns[place] for place in sorted(places)]

    parts = list(map(needed, groups))
    last_read = {v: number for number, eqns in enumerate(parts) for eqn in eqns for v in jaxprs.variables(eqn.invars)}
    last_read |= dict.fromkeys(jaxprs.variables(program.outvars), len(parts))
    return [
        jaxprs.part(program, eqns, [v for eqn in eqns for v in eqn.outvars if last_read.get(v, -1) > number])
        for number, eqns in enumerate(parts)
    ]


def _nbytes(var: jaxprs.Atom) -> int:
    type_ = jaxprs.type_of(var)
    return type_.size * type_.dtype.itemsize
