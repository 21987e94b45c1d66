"""A stack of layers whose residuals wait for the backward pass in host memory, and whose parameters devices share.

XLA owns everything: residuals are values of memory space Host, and their copies are asynchronous pairs that run on
streams of their own. Left alone, it would start stores as late as the backward pass, and save nothing, and fetches
right before their use, and hide nothing. Barriers place both:

    forward    the residuals of layer i have arrived when layer i + slots ends
    backward   those of layer i-1 are fetched when the backward pass of layer i begins

XLA has two copies under way at a time, and lets the GPU wait for the end of one before it begins a third. So layers
whose residuals are more than two arrays in all slots pack them into one for each dtype, where a device has whole
arrays.

Parameters that devices share travel in the same way: those of layer i+1 are gathered when layer i begins, and in the
backward pass those of layer i-1; the sums of layer i's gradients have arrived when the backward pass of layer i-1 ends.
Without barriers XLA would gather those of all layers before the first product, and once for both passes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

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
from te_jax.parallel.shards import Shards
from te_jax.quantized import QuantizedArray
from te_jax.sharding import together, varying_axes

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def run_layers(
    layers: Sequence[Layer], params: Sequence[PyTree], x: PyTree, offload: Offload, shards: Shards | None = None
) -> PyTree:
    """x through the layers, as `te_jax.layers.apply_layers` describes it."""
    stack, constants = trace(layers, params, x, shards)

    @jax.custom_vjp
    def run(constants: list[Array], params: list[PyTree], x: PyTree) -> PyTree:
        exchanges = _Exchanges(shards, params, range(len(stack)))
        for place, layer in enumerate(stack):
            of_layer, x = exchanges.beside(place, x)
            x = exchanges.before_next(layer(constants, of_layer, x))
        return x

    forward = functools.partial(_forward, stack, offload, shards)
    run.defvjp(forward, functools.partial(_backward, len(constants), shards), symbolic_zeros=True)
    # Calls outside of jit would run the barriers, and the copies between them, one by one.
    return jax.jit(run)(constants, list(params), x)


def describe(layers: Sequence[Layer], params: Sequence[PyTree], x: PyTree, offload: Offload | None) -> str:
    """See `te_jax.layers.residual_table`."""
    plans: list[Plan] = []

    def run(params: list[PyTree], x: PyTree) -> None:
        stack, constants = trace(layers, params, x)
        wanted = [False] * len(constants), jax.tree.map(lambda leaf: jnp.issubdtype(leaf.dtype, jnp.inexact), params)
        plans.extend(_plans(stack, constants, params, x, offload or NOTHING, wanted))

    jax.eval_shape(run, list(params), x)
    lines: list[str] = []
    described = [_description(plan) for plan in plans]
    start = 0
    for stop in range(1, len(plans) + 1):
        if stop == len(plans) or described[stop] != described[start]:
            lines.append(f"layer {start}" if stop == start + 1 else f"layers {start} to {stop - 1}, each")
            lines += described[start][0]
            start = stop
    host, device = (sum(bytes_of[place] for _, bytes_of in described) for place in ("host", "device"))
    lines.append(f"in all {host / 1e6:.1f} MB on the host, {device / 1e6:.1f} MB on the device")
    if host:
        slowest = max(bytes_of["host"] for _, bytes_of in described) / _PCIE_BYTES_PER_SECOND
        lines.append(f"copies hide behind a layer whose forward pass takes {slowest * 1e3:.3g} ms, at 50 GB/s")
    return "\n".join(lines)


def _description(plan: Plan) -> tuple[list[str], dict[str, int]]:
    lines = []
    total = {"host": 0, "device": 0}
    for place, (residual, source) in enumerate(zip(plan.residuals, plan.sources, strict=True)):
        if residual is None or source != place:
            continue
        size, note = residual.nbytes, ""
        if place in plan.in_fp8:
            size, note = size // residual.dtype.itemsize, " in FP8, its scales on the device"
        where = "host" if place in plan.leaving else "device"
        total[where] += size
        lines.append(f"  {where:<6}{size / 1e6:>10.1f} MB  {residual}{note}")
    return lines, total


def _plans(
    stack: Sequence[TracedLayer],
    constants: Sequence[Array],
    params: Sequence[PyTree],
    x: PyTree,
    offload: Offload,
    wanted: tuple[list[bool], list[PyTree]],
    shards: Shards | None = None,
) -> list[Plan]:
    """A plan for each layer; `wanted` says of each constant and parameter whether it has a gradient."""
    made: dict[Hashable, Plan] = {}
    plans: list[Plan] = []

    def run(constants: list[Array], params: list[PyTree], x: PyTree) -> None:
        for place, (layer, of_layer) in enumerate(zip(stack, params, strict=True)):
            of_layer = of_layer if shards is None else shards.gather(place, of_layer)
            flags = tuple(wanted[0][i] for i in layer.constants) + tuple(jax.tree.leaves(wanted[1][place]))
            stays = offload.stays(place, len(stack))
            kind = (layer.kind, flags, stays)
            if kind not in made:
                layer_constants = [constants[i] for i in layer.constants]
                made[kind] = plan_of(layer, layer_constants, of_layer, x, flags, NOTHING if stays else offload)
                if offload.required and isinstance(offload.names, tuple) and not stays:
                    check_names(made[kind].residuals, offload.names, place)
            plans.append(made[kind])
            x = layer(constants, of_layer, x)

    jax.eval_shape(run, list(constants), list(params), x)
    return plans


class _Exchanges:
    """What devices exchange beside the layers that run: parameters, gathered in the order in which they are asked for,
    and the sums of gradients. Without shards all are there."""

    def __init__(self, shards: Shards | None, params: Sequence[PyTree], order: Sequence[int]) -> None:
        self._shards = shards
        self._params = params
        self._order = list(order)
        self._ready: dict[int, PyTree] = {}
        self._summands: dict[int, PyTree] = {}
        self._gradients: dict[int, PyTree] = {}

    def beside(self, place: int, x: PyTree) -> tuple[PyTree, PyTree]:
        """Parameters of a layer, and x. Once x is there, those of the next layers are gathered, and the last gradients
        summed, as one launch: of two, the second would wait for the first, beside nothing."""
        if self._shards is None:
            return self._params[place], x
        most = self._shards.ahead(place, self._params[place]) + (place in self._ready or place in self._order)
        gathers: dict[int, PyTree] = {}
        while self._order and len(self._ready) + len(gathers) < most:
            next_ = self._order.pop(0)
            sent, x = together(self._shards.sent(next_, self._params[next_]), x)
            gathers[next_] = self._shards.gathers(next_, self._params[next_], sent)
        if place in gathers:
            self._launch({place: gathers.pop(place)})
        self._launch(gathers, sum_last=True)
        return self._ready.pop(place, None), x

    def before_next(self, x: PyTree) -> PyTree:
        """x, which is there when what travels beside this layer is: XLA would begin to gather when the layer ends."""
        if self._shards is None:
            return x
        for place in list(self._ready)[:1]:
            self._ready[place], x = together(self._ready[place], x)
        for place in list(self._gradients)[-1:]:
            self._gradients[place], x = together(self._gradients[place], x)
        return x

    def sum_beside_next(self, place: int, gradients: PyTree) -> None:
        """Takes the gradients of a layer."""
        (self._gradients if self._shards is None else self._summands)[place] = gradients

    def summed(self) -> list[PyTree]:
        """The gradients of all layers, of this device's parts."""
        self._launch({}, sum_last=True)
        return [self._gradients[place] for place in range(len(self._gradients))]

    def _launch(self, gathers: dict[int, PyTree], *, sum_last: bool = False) -> None:
        if (shards := self._shards) is None:
            return
        summands = {}
        if sum_last:
            summands, self._summands = self._summands, {}
        sums = {place: shards.sums(place, self._params[place], each) for place, each in summands.items()}
        gathered, sums = shards.launch((gathers, sums))
        for place, each in gathered.items():
            self._ready[place] = shards.whole(place, self._params[place], each)
        for place, each in sums.items():
            self._gradients[place] = shards.scattered(place, self._params[place], summands[place], each)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("here", "stored", "scales", "shards"), meta_fields=("plan",)
)
@dataclasses.dataclass(frozen=True, eq=False)
class _Kept:
    """The residuals of a layer.

    Attributes:
      here: those on the device; None for the others.
      stored: those in host memory, by their places: one array, or several one after another in a vector.
      scales: of those in FP8, by place, on the device; their data are in `stored`.
      shards: (constants of the layer, this device's parts of its parameters), from which the backward pass gathers what
        `here` lacks of them; None where parameters are whole.
      plan: of the layer.
    """

    here: list[Array | None]
    stored: dict[tuple[int, ...], Array]
    scales: dict[int, QuantizedArray]
    shards: tuple[list[Array], PyTree] | None
    plan: Plan


def _forward(
    stack: Sequence[TracedLayer], offload: Offload, shards: Shards | None, constants: PyTree, params: PyTree, x: PyTree
) -> tuple[PyTree, PyTree]:
    wanted = jax.tree.map(lambda leaf: leaf.perturbed, (constants, params))
    constants, params, x = jax.tree.map(lambda leaf: leaf.value, (constants, params, x))
    kept: list[_Kept] = []
    slots = offload.slots or 1
    exchanges = _Exchanges(shards, params, range(len(stack)))
    for place, plan in enumerate(_plans(stack, constants, params, x, offload, wanted, shards)):
        layer_constants = [constants[i] for i in plan.constants]
        of_layer, x = exchanges.beside(place, x)
        x, residuals = plan.run(jax.tree.leaves((layer_constants, of_layer)), x)
        x = exchanges.before_next(x)
        arrived = place if place + 1 == len(stack) else place - slots + 1
        for before in range(max(place - slots, 0), arrived):
            stored, x = together(kept[before].stored, x)
            kept[before] = dataclasses.replace(kept[before], stored=stored)
        drops = shards is not None and not shards.keeps(place)
        stays = [
            source not in plan.leaving and not (drops and plan.residuals[source] is None) for source in plan.sources
        ]
        here = [residual if here else None for residual, here in zip(residuals, stays, strict=True)]
        leaving = {place: residuals[place] for place in sorted(plan.leaving)}
        in_fp8 = {place: quantized(residuals[place]) for place in sorted(plan.in_fp8)}
        # Quantized before the next layer: XLA would hold the residual itself until then.
        _, x = together(in_fp8, x)
        leaving |= {place: data for place, (data, _) in in_fp8.items()}
        scales = {place: scale for place, (_, scale) in in_fp8.items()}
        stored = refuse_loops(_store(leaving, slots))
        kept.append(_Kept(here, stored, scales, None if shards is None else (layer_constants, params[place]), plan))
    return x, kept


def _backward(
    count: int, shards: Shards | None, kept: list[_Kept], cotangent: PyTree
) -> tuple[list[Array | None], list[PyTree], PyTree]:
    cotangent = jax.tree.map(instantiated, cotangent, is_leaf=is_symbolic_zero)
    of_constants: dict[int, Array] = {}
    parts = [layer.shards[1] if layer.shards else None for layer in kept]
    again = [place for place in reversed(range(len(kept))) if shards is not None and not shards.keeps(place)]
    exchanges = _Exchanges(shards, parts, again)
    fetched: dict[tuple[int, ...], Array] = {}
    for place in reversed(range(len(kept))):
        layer, arrived = kept[place], fetched
        stored, cotangent = together(kept[place - 1].stored if place else {}, cotangent)
        fetched = {places: jax.device_put(value, _DEVICE) for places, value in stored.items()}
        of_layer, cotangent = exchanges.beside(place, cotangent)
        residuals = _residuals(layer, arrived, of_layer if place in again else None)
        gradients, cotangent = layer.plan.backward.joined(residuals)(cotangent)
        # All gradients of this layer before the next: XLA would hold residuals for products that it puts off.
        gradients, cotangent = together(gradients, cotangent)
        cotangent = exchanges.before_next(cotangent)
        plan = layer.plan
        leaves: list[Array | None] = [None] * plan.operands.num_leaves
        for index, gradient in zip(plan.differentiated, gradients, strict=True):
            leaves[index] = gradient
        dconstants, of_layer = plan.operands.unflatten(leaves)
        exchanges.sum_beside_next(place, of_layer)
        for index, gradient in zip(plan.constants, dconstants, strict=True):
            if gradient is not None:
                of_constants[index] = of_constants[index] + gradient if index in of_constants else gradient
    return [of_constants.get(place) for place in range(count)], exchanges.summed(), cotangent


def _residuals(layer: _Kept, arrived: dict[tuple[int, ...], Array], params: PyTree) -> list[Array | None]:
    """All of a layer, from what has arrived of the host, and from its parameters if these were gathered again."""
    shapes = [aval.shape for aval in layer.plan.closed.out_avals[layer.plan.output.num_leaves :]]
    whole: dict[int, Array] = {}
    if layer.shards is not None and params is not None:
        whole |= layer.plan.of_operands(jax.tree.leaves((layer.shards[0], params)))
    for places, value in arrived.items():
        parts = [value]
        if len(places) > 1:
            sizes = [math.prod(shapes[place]) for place in places]
            parts = jnp.split(value, np.cumsum(sizes[:-1]))
        whole.update(zip(places, parts, strict=True))
    for place, scales in layer.scales.items():
        whole[place] = dequantized(whole[place].reshape(shapes[place]), scales)
    return [
        whole[source].reshape(shape) if source in whole else here
        for here, source, shape in zip(layer.here, layer.plan.sources, shapes, strict=True)
    ]


def _store(values: dict[int, Array], slots: int) -> dict[tuple[int, ...], Array]:
    """Values by place in host memory, those of a dtype in one vector where XLA would have too many under way."""
    groups: dict[Hashable, list[int]] = {}
    for place, value in values.items():
        alone = len(values) * slots <= _COPIES or not is_whole()
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

_PCIE_BYTES_PER_SECOND = 50e9
"""Rate of PCIe 5 with 16 lanes, each way, as measured on H100s."""
