"""A stack of layers whose residuals wait for the backward pass in host memory.

XLA owns everything: residuals are values of memory space Host, and their copies are asynchronous pairs that run on
streams of their own. Left alone, it would start stores as late as the backward pass, and save nothing, and fetches
right before their use, and hide nothing. Barriers place both:

    forward    the residuals of layer i have arrived when layer i+1 ends
    backward   those of layer i-1 are fetched when the backward pass of layer i begins

XLA has two copies under way at a time, and lets the GPU wait for the end of one before it begins a third. So a layer
whose residuals are more than two arrays packs them into one for each dtype, where a device has whole arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from te_jax import ops
from te_jax.offload._options import LAYER_INPUT, Offload, Residual
from te_jax.offload._values import Value, values_of
from te_jax.quantized import QuantizedArray
from te_jax.recipe import BlockScaling
from te_jax.sharding import inside_shard_map, together, unmapped_axes, varying_axes, varying_over

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
_FLOAT0 = jax.dtypes.float0

Layer = Callable[[Any, Any], Any]


def run_layers(layers: Sequence[Layer], params: Sequence[Any], x: Any, offload: Offload) -> Any:
    """x through the layers, as `te_jax.layers.apply_layers` describes it."""
    stack, constants = _trace(layers, params, x)

    @jax.custom_vjp
    def run(constants: list[Array], params: list[Any], x: Any) -> Any:
        for layer, of_layer in zip(stack, params, strict=True):
            x = layer(constants, of_layer, x)
        return x

    forward = functools.partial(_forward, stack, offload)
    run.defvjp(forward, functools.partial(_backward, len(constants)), symbolic_zeros=True)
    # Calls outside of jit would run the barriers, and the copies between them, one by one.
    return jax.jit(run)(constants, list(params), x)


def describe(layers: Sequence[Layer], params: Sequence[Any], x: Any, offload: Offload | None) -> str:
    """See `te_jax.layers.residual_table`."""
    plans: list[_Plan] = []

    def run(params: list[Any], x: Any) -> None:
        stack, constants = _trace(layers, params, x)
        wanted = [False] * len(constants), jax.tree.map(lambda leaf: jnp.issubdtype(leaf.dtype, jnp.inexact), params)
        plans.extend(_plans(stack, constants, params, x, offload or _NOTHING, wanted))

    jax.eval_shape(run, list(params), x)
    lines: list[str] = []
    total = {"host": 0, "device": 0}
    described = [_description(plan, total) for plan in plans]
    start = 0
    for stop in range(1, len(plans) + 1):
        if stop == len(plans) or described[stop] != described[start]:
            lines.append(f"layer {start}" if stop == start + 1 else f"layers {start} to {stop - 1}, each")
            lines += described[start]
            start = stop
    host, device = (f"{count / 1e6:.1f} MB on the {place}" for place, count in total.items())
    return "\n".join([*lines, f"in all {host}, {device}"])


def _description(plan: _Plan, total: dict[str, int]) -> list[str]:
    lines = []
    for place, (residual, source) in enumerate(zip(plan.residuals, plan.sources, strict=True)):
        if residual is None or source != place:
            continue
        size, note = residual.nbytes, ""
        if place in plan.in_fp8:
            size, note = size // residual.dtype.itemsize, " in FP8, its scales on the device"
        where = "host" if place in plan.leaving else "device"
        total[where] += size
        lines.append(f"  {where:<6}{size / 1e6:>10.1f} MB  {residual}{note}")
    return lines


@dataclasses.dataclass(frozen=True, eq=False)
class _Layer:
    """A layer as a jaxpr.

    Attributes:
      closed: leaves of constants, of parameters and of x → leaves of x.
      constants: the places of what it closes over, among the constants of the stack.
      output: structure of the x that it returns.
      kind: equal for layers that are one function of operands of the same types.
    """

    closed: ClosedJaxpr
    constants: tuple[int, ...]
    output: Any
    kind: Hashable

    def __call__(self, constants: Sequence[Array], params: Any, x: Any) -> Any:
        own = [constants[place] for place in self.constants]
        return self.with_own(own, params, x)

    def with_own(self, own: Sequence[Array], params: Any, x: Any) -> Any:
        function = jaxpr_as_fun(ClosedJaxpr(self.closed.jaxpr, list(own)))
        return self.output.unflatten(function(*jax.tree.leaves((params, x))))


def _trace(layers: Sequence[Layer], params: Sequence[Any], x: Any) -> tuple[list[_Layer], list[Array]]:
    """The layers, and all that they close over: derivatives and batches reach it as operands only."""
    constants: list[Array] = []
    traced: dict[Hashable, _Layer] = {}
    stack: list[_Layer] = []

    def place_of(constant: Array) -> int:
        for place, known in enumerate(constants):
            if known is constant:
                return place
        constants.append(constant)
        return len(constants) - 1

    def run(params: list[Any], x: Any) -> None:
        for layer, of_layer in zip(layers, params, strict=True):
            kind = (layer, *_types((of_layer, x)))
            if kind not in traced:
                closed, output = jax.make_jaxpr(lambda p, x, f=layer: f(x, p), return_shape=True)(of_layer, x)
                places = tuple(place_of(constant) for constant in closed.consts)
                traced[kind] = _Layer(closed, places, jax.tree.structure(output), kind)
            stack.append(traced[kind])
            x = layer(x, of_layer)

    jax.eval_shape(run, list(params), x)
    return stack, constants


def _types(operands: Any) -> tuple[Any, ...]:
    leaves, structure = jax.tree.flatten(operands)
    return (structure, *map(jax.typeof, leaves))


@dataclasses.dataclass(frozen=True, eq=False)
class _Plan:
    """The forward pass of a layer, what it keeps, and where that waits.

    Attributes:
      closed: leaves of constants, of parameters and of x → leaves of x, and residuals.
      output: structure of x.
      backward: structure of what `jax.vjp` returns, whose leaves are the residuals.
      differentiated: which leaves of constants and of parameters have a gradient.
      operands: structure of the layer's constants and parameters.
      constants: places of the layer's constants.
      residuals: what they are; None where only constants and parameters decide their values.
      sources: for each residual the place of the first that is the same array.
      leaving: the sources that leave for the host.
      in_fp8: those of them that are stored in FP8.
    """

    closed: ClosedJaxpr
    output: Any
    backward: Any
    differentiated: tuple[int, ...]
    operands: Any
    constants: tuple[int, ...]
    residuals: tuple[Residual | None, ...]
    sources: tuple[int, ...]
    leaving: frozenset[int]
    in_fp8: frozenset[int]

    def run(self, operands: Sequence[Array], x: Any) -> tuple[Any, list[Array]]:
        """The next x, and the residuals."""
        out = jaxpr_as_fun(self.closed)(*operands, *jax.tree.leaves(x))
        count = self.output.num_leaves
        return self.output.unflatten(out[:count]), out[count:]


def _plan(layer: _Layer, own: list[Array], params: Any, x: Any, wanted: tuple[bool, ...], offload: Offload) -> _Plan:
    operands, structure = jax.tree.flatten((own, params))
    differentiated = tuple(place for place, needed in enumerate(wanted) if needed)
    backwards: list[Any] = []

    def forward(operands: list[Array], x: Any) -> tuple[Any, list[Array]]:
        def function(chosen: list[Array], x: Any) -> Any:
            whole = list(operands)
            for place, leaf in zip(differentiated, chosen, strict=True):
                whole[place] = leaf
            own, params = structure.unflatten(whole)
            return layer.with_own(own, params, x)

        y, backward = jax.vjp(function, [operands[place] for place in differentiated], x)
        leaves, structure_of_backward = jax.tree.flatten(backward)
        backwards.append(structure_of_backward)
        return y, leaves

    closed = jax.make_jaxpr(forward)(operands, x)
    inputs = [Value.new(marked=False) for _ in operands]
    inputs += [Value.new(marked=True, names=[LAYER_INPUT]) for _ in jax.tree.leaves(x)]
    count = layer.output.num_leaves
    avals = closed.out_avals[count:]
    values = values_of(closed.jaxpr, inputs)[count:]
    first: dict[object, int] = {}
    sources = tuple(first.setdefault(value.array, place) for place, value in enumerate(values))
    residuals = tuple(
        Residual(frozenset(value.names), aval.shape, aval.dtype) if value.marked else None
        for value, aval in zip(values, avals, strict=True)
    )
    leaving = frozenset(
        place
        for place in first.values()
        if (residual := residuals[place]) and avals[place].memory_space != _HOST and offload.chooses(residual)
    )
    in_fp8 = frozenset(place for place in leaving if offload.stores_in_fp8(cast(Residual, residuals[place])))
    return _Plan(
        *(closed, layer.output, backwards[0], differentiated, structure, layer.constants),
        *(residuals, sources, leaving, in_fp8),
    )


def _plans(
    stack: Sequence[_Layer],
    constants: Sequence[Array],
    params: Sequence[Any],
    x: Any,
    offload: Offload,
    wanted: tuple[list[bool], list[Any]],
) -> list[_Plan]:
    """A plan for each layer; `wanted` says of each constant and parameter whether it has a gradient."""
    made: dict[Hashable, _Plan] = {}
    plans: list[_Plan] = []

    def run(constants: list[Array], params: list[Any], x: Any) -> None:
        for place, (layer, of_layer) in enumerate(zip(stack, params, strict=True)):
            flags = tuple(wanted[0][i] for i in layer.constants) + tuple(jax.tree.leaves(wanted[1][place]))
            last = place >= len(stack) - offload.keep_last
            kind = (layer.kind, flags, last)
            if kind not in made:
                own = [constants[i] for i in layer.constants]
                made[kind] = _plan(layer, own, of_layer, x, flags, _NOTHING if last else offload)
                if offload.required and isinstance(offload.names, tuple):
                    _check_names(made[kind].residuals, offload.names, place)
            plans.append(made[kind])
            x = layer(constants, of_layer, x)

    jax.eval_shape(run, list(constants), list(params), x)
    return plans


_NOTHING = Offload(names=())


def _check_names(residuals: Sequence[Residual | None], names: tuple[str, ...], place: int) -> None:
    kept = [residual for residual in residuals if residual is not None]
    missing = [name for name in names if not any(name in residual.names for residual in kept)]
    if missing:
        raise ValueError(
            f"offload has the names {missing}, and layer {place} keeps nothing of that name for its backward pass. It "
            f"keeps {'; '.join(sorted(map(str, kept))) or 'nothing'}. Choose among the names of these, let remat keep "
            "what you name, or set required=False. The output of a layer is the next one's layer_input"
        )


@functools.partial(jax.tree_util.register_dataclass, data_fields=("here", "stored", "scales"), meta_fields=("plan",))
@dataclasses.dataclass(frozen=True, eq=False)
class _Kept:
    """The residuals of a layer.

    Attributes:
      here: those on the device; None for the others.
      stored: those in host memory, by their places: one array, or several one after another in a vector.
      scales: of those in FP8, by place, on the device; their data are in `stored`.
      plan: of the layer.
    """

    here: list[Array | None]
    stored: dict[tuple[int, ...], Array]
    scales: dict[int, QuantizedArray]
    plan: _Plan


def _forward(stack: Sequence[_Layer], offload: Offload, constants: Any, params: Any, x: Any) -> tuple[Any, Any]:
    wanted = jax.tree.map(lambda leaf: leaf.perturbed, (constants, params))
    constants, params, x = jax.tree.map(lambda leaf: leaf.value, (constants, params, x))
    kept: list[_Kept] = []
    for plan, of_layer in zip(_plans(stack, constants, params, x, offload, wanted), params, strict=True):
        operands = jax.tree.leaves(([constants[place] for place in plan.constants], of_layer))
        x, residuals = plan.run(operands, x)
        if kept:
            stored, x = together(kept[-1].stored, x)
            kept[-1] = dataclasses.replace(kept[-1], stored=stored)
        here = [None if source in plan.leaving else r for r, source in zip(residuals, plan.sources, strict=True)]
        leaving = {place: residuals[place] for place in sorted(plan.leaving)}
        in_fp8 = {place: _quantized(residuals[place]) for place in sorted(plan.in_fp8)}
        # Quantized before the next layer: XLA would hold the residual itself until then.
        _, x = together(in_fp8, x)
        leaving |= {place: cast(Array, value.data) for place, value in in_fp8.items()}
        scales = {place: dataclasses.replace(value, data=None) for place, value in in_fp8.items()}
        kept.append(_Kept(here, _store(leaving), scales, plan))
    return x, kept


def _backward(count: int, kept: list[_Kept], cotangent: Any) -> tuple[list[Any], list[Any], Any]:
    cotangent = jax.tree.map(_instantiated, cotangent, is_leaf=_is_symbolic_zero)
    of_constants: dict[int, Any] = {}
    of_params: list[Any] = []
    fetched: dict[tuple[int, ...], Array] = {}
    for place in reversed(range(len(kept))):
        layer, arrived = kept[place], fetched
        stored, cotangent = together(kept[place - 1].stored if place else {}, cotangent)
        fetched = {places: jax.device_put(value, _DEVICE) for places, value in stored.items()}
        backward = layer.plan.backward.unflatten(_residuals(layer, arrived))
        gradients, cotangent = backward(cotangent)
        # All gradients of this layer before the next: XLA would hold residuals for products that it puts off.
        gradients, cotangent = together(gradients, cotangent)
        plan = layer.plan
        leaves: list[Any] = [None] * plan.operands.num_leaves
        for index, gradient in zip(plan.differentiated, gradients, strict=True):
            leaves[index] = gradient
        own, of_layer = plan.operands.unflatten(leaves)
        of_params.insert(0, of_layer)
        for index, gradient in zip(plan.constants, own, strict=True):
            if gradient is not None:
                of_constants[index] = of_constants[index] + gradient if index in of_constants else gradient
    return [of_constants.get(place) for place in range(count)], of_params, cotangent


def _residuals(layer: _Kept, arrived: dict[tuple[int, ...], Array]) -> list[Any]:
    shapes = [aval.shape for aval in layer.plan.closed.out_avals[layer.plan.output.num_leaves :]]
    whole: dict[int, Array] = {}
    for places, value in arrived.items():
        parts = [value]
        if len(places) > 1:
            sizes = [math.prod(shapes[place]) for place in places]
            parts = jnp.split(value, np.cumsum(sizes[:-1]))
        whole.update(zip(places, parts, strict=True))
    for place, scales in layer.scales.items():
        whole[place] = dataclasses.replace(scales, data=whole[place].reshape(shapes[place])).dequantize()
    return [
        whole[source].reshape(shape) if source in whole else here
        for here, source, shape in zip(layer.here, layer.plan.sources, shapes, strict=True)
    ]


def _quantized(value: Array) -> QuantizedArray:
    return ops.quantize(value, BlockScaling().quantization("activation"), copies="data")


def _store(values: dict[int, Array]) -> dict[tuple[int, ...], Array]:
    """Values by place in host memory, those of a dtype in one vector where a layer has more than two."""
    groups: dict[Hashable, list[int]] = {}
    for place, value in values.items():
        alone = len(values) <= _COPIES or not _is_whole()
        groups.setdefault(place if alone else (value.dtype, varying_axes(value)), []).append(place)
    return {
        tuple(places): jax.device_put(
            values[places[0]] if len(places) == 1 else jnp.concatenate([values[place].ravel() for place in places]),
            _HOST,
        )
        for places in groups.values()
    }


_COPIES = 2
"""How many copies XLA has under way."""


def _is_whole() -> bool:
    """Whether every array is whole on its device, as far as can be known while a program is traced. To join arrays that
    are split over devices would gather them."""
    return jax.device_count() == 1 or (inside_shard_map() and not unmapped_axes())


def _is_symbolic_zero(leaf: Any) -> bool:
    return isinstance(leaf, jax.custom_derivatives.SymbolicZero)


def _instantiated(leaf: Any) -> Any:
    if not _is_symbolic_zero(leaf):
        return leaf
    if leaf.dtype == _FLOAT0:
        return np.zeros(leaf.shape, _FLOAT0)
    return varying_over(jnp.zeros(leaf.shape, leaf.dtype), leaf.aval.manual_axis_type.varying)
