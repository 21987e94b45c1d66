"""A scan over layers whose residuals wait for the backward pass in host memory.

A copy that XLA begins in the body of a loop ends there, so it hides behind nothing. Here the extension copies, on
streams of its own, and its copies cross iterations:

    forward    a residual is copied to a slot on the device, and from there to its row of the stack in host memory
    backward   a row is fetched to a slot one layer ahead or more, and copied from there when its layer begins

XLA owns all memory, as values that the loops close over: the stack, the slots, and the rows that stay on the device.
Handlers write them unseen by XLA, for which they are operands of calls that a token orders. So XLA must make no copy of
them within a pass, and must not read them before its end:

    the first call of a pass depends on all that the layers read, so no loop around it keeps the memory for several
    the last calls return the stack and the kept rows, aliased, so what reads these comes later: loops stack residuals
    handlers compare addresses, and end the program where memory moved within a pass
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import mlir, partial_eval

from te_jax import native, sharding
from te_jax._core.batching import refuse_batches
from te_jax._core.platforms import by_platform
from te_jax._core.types import PyTree
from te_jax.offload._loops import refuse_loops
from te_jax.offload._options import Offload
from te_jax.offload._plan import (
    NOTHING,
    Layer,
    Plan,
    TracedLayer,
    check_names,
    dequantized,
    instantiated,
    is_symbolic_zero,
    is_whole,
    plan_of,
    quantized,
    trace,
)
from te_jax.quantized import QuantizedArray
from te_jax.sharding import together, unmapped_axes

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def run_scan(layer: Layer, params: PyTree, x: PyTree, offload: Offload) -> PyTree:
    """x through the layers, as `te_jax.layers.scan_layers` describes it."""
    count = len(jax.tree.leaves(params)[0])
    traced, constants = _trace(layer, params, x)
    is_native = count > offload.keep and _is_native(offload)

    @jax.custom_vjp
    def run(constants: list[Array], params: PyTree, x: PyTree) -> PyTree:
        return lax.scan(lambda x, of_layer: (traced(constants, of_layer, x), None), x, params)[0]

    forward = functools.partial(_forward, traced, count, is_native, offload)
    run.defvjp(forward, functools.partial(_backward, len(constants)), symbolic_zeros=True)
    return jax.jit(run)(constants, params, x)


def _is_native(offload: Offload) -> bool:
    if offload.implementation == "xla":
        return False
    problem = None
    # Where nothing says how arrays are split, "native" is a promise that they are not.
    if unmapped_axes() or (offload.implementation is None and not is_whole()):
        problem = (
            "scan_layers with offload leaves copies to XLA, which hides none of them in a loop: arrays may be split "
            "over devices here, and its own copies move what one device has. Call it inside jax.shard_map; or pass "
            "Offload(implementation='native') if every array is whole on one device, or 'xla'"
        )
    return native.use_native(offload.implementation, problem)


def _first(params: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: lax.index_in_dim(leaf, 0, keepdims=False), params)


def _trace(layer: Layer, params: PyTree, x: PyTree) -> tuple[TracedLayer, list[Array]]:
    """The layer, and what it closes over."""
    traces: list[tuple[list[TracedLayer], list[Array]]] = []
    jax.eval_shape(lambda params, x: traces.append(trace([layer], [_first(params)], x)), params, x)
    ((traced,), constants) = traces[0]
    before = jax.tree.map(jax.typeof, x)
    after = traced.output.unflatten(traced.closed.out_avals)
    if _types(before) != _types(after):
        raise ValueError(
            f"layer returns {_types(after)} for an x of {_types(before)}: layers of a scan must return an x of the "
            "type that they get; te_jax.layers.apply_layers takes others"
        )
    return traced, constants


def _types(avals: PyTree) -> str:
    return str(jax.tree.map(lambda aval: f"{aval.dtype.name}{list(aval.shape)}", avals))


# What leaves


@dataclasses.dataclass(frozen=True, eq=False)
class _Rows:
    """Where the residuals of a layer go.

    Attributes:
      plan: of the layer.
      count: number of layers.
      keep: how many of them have their rows on the device, where the extension copies: see `Offload`.
      slots: through which rows pass.
    """

    plan: Plan
    count: int
    keep: int
    slots: int

    @functools.cached_property
    def operands(self) -> dict[int, int]:
        """Residuals that are constants or parameters, and which: the backward pass has them already."""
        count = self.plan.operands.num_leaves
        return {place: number for place, number in self.plan.inputs.items() if number < count}

    @functools.cached_property
    def leaves_of_x(self) -> dict[int, int]:
        """Residuals that leave and are leaves of x, and which: they leave before the layer runs."""
        count = self.plan.operands.num_leaves
        return {
            place: number - count
            for place, number in self.plan.inputs.items()
            if number >= count and place in self.plan.leaving
        }

    @functools.cached_property
    def here(self) -> tuple[int, ...]:
        """Residuals that stay on the device."""
        places = [place for place, source in enumerate(self.plan.sources) if place == source]
        return tuple(place for place in places if place not in self.plan.leaving and place not in self.operands)

    @functools.cached_property
    def leaving(self) -> tuple[int, ...]:
        """Residuals that leave, in their order in a row of the stack."""
        return (*self.leaves_of_x, *sorted(self.plan.leaving - self.leaves_of_x.keys()))

    def type_of(self, place: int) -> Any:
        aval = self.plan.closed.out_avals[self.plan.output.num_leaves + place]
        if place not in self.plan.in_fp8:
            return aval
        return aval.update(dtype=np.dtype(jnp.float8_e4m3fn))

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of the pieces of a row."""
        types = [self.type_of(place) for place in self.leaving]
        return tuple(type_.size * type_.dtype.itemsize for type_ in types)

    @property
    def row_bytes(self) -> int:
        return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in self.sizes)


_ALIGNMENT = 256
"""Alignment of pieces in a row, in bytes: `Layout::kAlignment` of cuda_ext/offload."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=(), meta_fields=())
@dataclasses.dataclass(frozen=True)
class _XlaMemory:
    """XLA has its memory, and its copies are results and operands of its loops."""

    def end_store(self, after: PyTree) -> _XlaMemory:
        return self

    def begin_fetch(self, rows: _Rows, after: PyTree) -> _XlaMemory:
        return self

    def store(self, piece: int, value: Array) -> tuple[_XlaMemory, Array | None]:
        return self, jax.device_put(value, _HOST)

    def fetch(self, piece: int, type_: Any, stored: Array | None) -> tuple[_XlaMemory, Array]:
        assert stored is not None
        return self, jax.device_put(stored, _DEVICE)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("stack", "kept", "slots", "token"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class _Memory:
    """Buffers that the extension copies between.

    Attributes:
      stack: uint8 [layers - keep, row_bytes], in host memory.
      kept: uint8 [keep, row_bytes], the rows that stay on the device.
      slots: uint8 [slots, row_bytes], or None between the passes.
      token: int32[1], which orders the calls of a pass, or None between the passes; the rest are the same values in all
        of them.
    """

    stack: Array
    kept: Array
    slots: Array | None = None
    token: Array | None = None

    @property
    def _under_way(self) -> tuple[Array, Array]:
        assert self.token is not None
        assert self.slots is not None
        return self.token, self.slots

    @classmethod
    def begin_store(cls, rows: _Rows, after: PyTree) -> _Memory:
        """Memory that waits for `after`, all that the layers read."""
        stacked, row = rows.count - rows.keep, rows.row_bytes

        def begin(token: Array, in_host: int) -> tuple[Array, ...]:
            counts = {"slots": rows.slots, "kept": rows.keep, "stack": in_host}
            results = {name: jax.ShapeDtypeStruct((count, row), jnp.uint8) for name, count in counts.items()}
            results = {"token_out": token} | results
            target, sizes = "te_offload_begin_store", rows.sizes
            return native.call_once(target, results, {"token": token}, stacked=stacked, sizes=sizes)

        def on_cuda(token: Array) -> tuple[Array, ...]:
            *buffers, _ = begin(token, 0)
            # XLA allocates it in host memory. The extension's own results are always on the device.
            stack = sharding.varying_over(lax.empty((stacked, row), jnp.uint8), sharding.varying_axes(token))
            return *buffers, jax.device_put(stack, _HOST)

        # Not `lax.platform_dependent`: JAX would take `empty`, which has no operand, out of loops around this one.
        def elsewhere(token: Array) -> tuple[Array, ...]:
            *buffers, stack = begin(token, stacked)
            return *buffers, jax.device_put(stack, _HOST)

        reason = (
            "scan_layers with offload under jax.vmap: map inside of the layer, or pass Offload(implementation='xla')"
        )
        token = _token(refuse_batches(after, reason))
        token, slots, kept, stack = by_platform([token], cuda=on_cuda, default=elsewhere)
        return cls(stack, kept, slots, token)

    def end_store(self, after: PyTree) -> _Memory:
        """The last copies have ended, and may last until `after` is computed."""
        token, slots = self._under_way
        token, _ = together(token, after)

        def written(rows: Array) -> Array:
            # One result: XLA takes all aliased results of a call that has one in host memory for such.
            operands = {"rows": rows, "token": token, "slots": slots}
            return native.call("te_offload_end_store", {"written": rows}, operands, aliases={"rows": "written"})[0]

        return _Memory(written(self.stack), written(self.kept))

    def begin_fetch(self, rows: _Rows, after: PyTree) -> _Memory:
        token = _token((after, self))
        results = {"token_out": token, "slots": jax.ShapeDtypeStruct((rows.slots, rows.row_bytes), jnp.uint8)}
        operands = {"token": token, "stack": self.stack, "kept": self.kept}
        stacked, sizes = rows.count - rows.keep, rows.sizes
        token, slots = native.call_once("te_offload_begin_fetch", results, operands, stacked=stacked, sizes=sizes)
        return dataclasses.replace(self, token=token, slots=slots)

    def store(self, piece: int, value: Array) -> tuple[_Memory, Array | None]:
        # The barrier: XLA may give a call that reads a slice a kernel of its own, and call it twice.
        value = lax.optimization_barrier(value)
        token, slots = self._under_way
        operands = {"x": value, "token": token, "stack": self.stack, "slots": slots, "kept": self.kept}
        (token,) = native.call("te_offload_store", {"token_out": token}, operands, piece=piece)
        return dataclasses.replace(self, token=token), None

    def fetch(self, piece: int, type_: Any, stored: Array | None) -> tuple[_Memory, Array]:
        token, slots = self._under_way
        operands = {"token": token, "stack": self.stack, "slots": slots, "kept": self.kept}
        token, value = native.call("te_offload_fetch", {"token_out": token, "x": type_}, operands, piece=piece)
        return dataclasses.replace(self, token=token), value


_AnyMemory = _Memory | _XlaMemory


def _token(after: PyTree) -> Array:
    token = sharding.varying_over(jnp.zeros((1,), jnp.int32), sharding.varying_axes(after))
    return together(token, after)[0]


def _beside(x: PyTree, memory: _AnyMemory) -> tuple[PyTree, _AnyMemory]:
    """`together`, of a pass that JAX leaves out as a whole where nothing reads its rows, as `jax.checkpoint` needs it.

    A pass that is there must end: its copies would write to memory that XLA has given to others.
    """
    if not jax.tree.leaves(memory):
        return x, memory
    leaves, structure = jax.tree.flatten((x, memory))
    return structure.unflatten(_beside_p.bind(*leaves, count=len(jax.tree.leaves(x))))


_beside_p = Primitive("te_offload_beside")
_beside_p.multiple_results = True
_beside_p.def_abstract_eval(lambda *avals, count: list(avals))


def _together(*leaves: Array, count: int) -> list[Array]:
    return [leaf for part in together(leaves[:count], leaves[count:]) for leaf in part]


def _used_beside(used: list[bool], *of_version: Any) -> tuple[list[bool], JaxprEqn | None]:
    *_, eqn = of_version  # jax 0.12 gives which operands are alive before it
    if any(used[eqn.params["count"] :]):
        return [True] * len(used), eqn
    if not any(used):
        return used, None
    invars, outvars = (
        [var for var, is_used in zip(v, used, strict=True) if is_used] for v in (eqn.invars, eqn.outvars)
    )
    return used, eqn.replace(invars=invars, outvars=outvars, params={"count": len(outvars)})


mlir.register_lowering(_beside_p, mlir.lower_fun(_together, multiple_results=True))
partial_eval.dce_rules[_beside_p] = _used_beside


# The passes


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("constants", "params", "here", "stored", "scales", "memory"),
    meta_fields=("rows",),
)
@dataclasses.dataclass(frozen=True, eq=False)
class _Kept:
    """Residuals of the backward pass.

    Attributes:
      constants, params: of all layers.
      here: residuals on the device, stacked.
      stored: those that XLA holds in host memory, stacked; None for others, in the order of `rows.leaving`.
      scales: of those in FP8, by place, stacked; their data are among those that left.
      memory: of the copies.
      rows: where residuals went.
    """

    constants: list[Array]
    params: PyTree
    here: list[Array]
    stored: list[Array | None]
    scales: dict[int, QuantizedArray]
    memory: _AnyMemory
    rows: _Rows


def _forward(
    layer: TracedLayer, count: int, is_native: bool, offload: Offload, constants: PyTree, params: PyTree, x: PyTree
) -> tuple[PyTree, _Kept]:
    wanted = tuple(leaf.perturbed for leaf in [constants[place] for place in layer.constants])
    wanted += tuple(leaf.perturbed for leaf in jax.tree.leaves(params))
    constants, params, x = jax.tree.map(lambda leaf: leaf.value, (constants, params, x))
    rows = _rows(layer, count, offload, wanted, constants, params, x)
    layer_constants = [constants[place] for place in layer.constants]
    memory = _Memory.begin_store(rows, (layer_constants, params, x)) if is_native and rows.leaving else _XlaMemory()

    def step(carry: tuple[PyTree, _AnyMemory], of_layer: PyTree) -> tuple[PyTree, PyTree]:
        x, memory = carry
        stored: list[Array | None] = []
        scales: dict[int, QuantizedArray] = {}

        def leaves(piece: int, value: Array, memory: _AnyMemory) -> _AnyMemory:
            place = rows.leaving[piece]
            if place in rows.plan.in_fp8:
                value, scales[place] = quantized(value)
            memory, in_host = memory.store(piece, value)
            stored.append(in_host)
            return memory

        leaves_of_x = jax.tree.leaves(x)
        for piece, leaf in enumerate(rows.leaves_of_x.values()):
            memory = leaves(piece, leaves_of_x[leaf], memory)
        # Copies of x begin before the layer does.
        x, memory = _beside(x, memory)
        x, residuals = rows.plan.run(jax.tree.leaves((layer_constants, of_layer)), x)
        for piece in range(len(rows.leaves_of_x), len(rows.leaving)):
            memory = leaves(piece, residuals[rows.leaving[piece]], memory)
        here = [residuals[place] for place in rows.here]
        return (x, memory), (refuse_loops(here, inside=True), stored, scales)

    (x, memory), (here, stored, scales) = lax.scan(step, (x, memory), params)
    x, memory = _beside(x, memory.end_store(x))
    memory, stored = refuse_loops((memory, stored))
    return x, _Kept(constants, params, here, stored, scales, memory, rows)


def _rows(
    layer: TracedLayer,
    count: int,
    offload: Offload,
    wanted: tuple[bool, ...],
    constants: list[Array],
    params: PyTree,
    x: PyTree,
) -> _Rows:
    plans: list[Plan] = []

    def run(constants: list[Array], params: PyTree, x: PyTree) -> None:
        layer_constants = [constants[place] for place in layer.constants]
        leaves = offload if count > offload.keep else NOTHING
        plans.append(plan_of(layer, layer_constants, _first(params), x, wanted, leaves))

    jax.eval_shape(run, constants, params, x)
    if offload.required and isinstance(offload.names, tuple):
        check_names(plans[0].residuals, offload.names, 0)
    return _Rows(plans[0], count, min(offload.keep, count), offload.slots or 2)


def _backward(count: int, kept: _Kept, cotangent: PyTree) -> tuple[list[Array | None], PyTree, PyTree]:
    rows, plan = kept.rows, kept.rows.plan
    cotangent = jax.tree.map(instantiated, cotangent, is_leaf=is_symbolic_zero)
    leaves, structure = jax.tree.flatten(cotangent)
    floats = [place for place, leaf in enumerate(leaves) if leaf.dtype != jax.dtypes.float0]
    layer_constants = [kept.constants[place] for place in plan.constants]
    of_constants = [place for place in plan.differentiated if place < len(layer_constants)]
    memory = kept.memory.begin_fetch(rows, cotangent) if rows.leaving else kept.memory

    def step(carry: tuple[PyTree, ...], of_layer: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
        of_x, sums, memory = carry
        params, here, stored, scales = of_layer
        whole: dict[int, Array] = dict(zip(rows.here, here, strict=True))
        operands = jax.tree.leaves((layer_constants, params))
        whole |= {place: operands[number] for place, number in rows.operands.items()}
        for piece, place in enumerate(rows.leaving):
            memory, value = memory.fetch(piece, rows.type_of(place), stored[piece])
            whole[place] = value
        # The next rows are on their way before the layer begins.
        of_x, (memory, whole) = together(of_x, (memory, whole))
        for place, of_place in scales.items():
            whole[place] = dequantized(whole[place], of_place)
        avals = plan.closed.out_avals[plan.output.num_leaves :]
        residuals = [whole[source].reshape(aval.shape) for source, aval in zip(plan.sources, avals, strict=True)]
        for place, leaf in zip(floats, of_x, strict=True):
            leaves[place] = leaf
        gradients, of_x = plan.backward.joined(residuals)(structure.unflatten(leaves))
        of_operands = dict(zip(plan.differentiated, gradients, strict=True))
        sums = [total + of_operands[place] for total, place in zip(sums, of_constants, strict=True)]
        of_x = [leaf for leaf in jax.tree.leaves(of_x) if leaf.dtype != jax.dtypes.float0]
        of_params = [of_operands.get(place) for place in range(len(layer_constants), plan.operands.num_leaves)]
        return (of_x, sums, memory), of_params

    zeros = [jnp.zeros_like(layer_constants[place]) for place in of_constants]
    begin = [leaves[place] for place in floats], zeros, memory
    xs = kept.params, kept.here, kept.stored, kept.scales
    (of_x, sums, _), of_params = lax.scan(step, begin, xs, reverse=True)
    for place, leaf in zip(floats, of_x, strict=True):
        leaves[place] = leaf
    dconstants: list[Array | None] = [None] * count
    for place, total in zip(of_constants, sums, strict=True):
        dconstants[plan.constants[place]] = total
    return dconstants, jax.tree.unflatten(jax.tree.structure(kept.params), of_params), structure.unflatten(leaves)
