"""Residuals of a layer, found before it runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import ShapedArray
from jax.dtypes import float0
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import partial_eval

from te_jax import ops
from te_jax._core.types import PyTree
from te_jax.offload._options import LAYER_INPUT, Offload, Residual
from te_jax.offload._values import Value, values_of
from te_jax.parallel.shards import Shards
from te_jax.quantized import QuantizedArray
from te_jax.recipe import BlockScaling
from te_jax.sharding import inside_shard_map, unmapped_axes, varying_over

_HOST = jax.memory.Space.Host

Layer = Callable[[PyTree, PyTree], PyTree]

NOTHING = Offload(names=())


@dataclasses.dataclass(frozen=True, eq=False)
class TracedLayer:
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

    def __call__(self, constants: Sequence[Array], params: PyTree, x: PyTree) -> PyTree:
        layer_constants = [constants[place] for place in self.constants]
        return self.with_own(layer_constants, params, x)

    def with_own(self, own: Sequence[Array], params: PyTree, x: PyTree) -> PyTree:
        function = jaxpr_as_fun(ClosedJaxpr(self.closed.jaxpr, list(own)))
        return self.output.unflatten(function(*jax.tree.leaves((params, x))))


def trace(
    layers: Sequence[Layer], params: Sequence[PyTree], x: PyTree, shards: Shards | None = None
) -> tuple[list[TracedLayer], list[Array]]:
    """The layers, and all that they close over: derivatives and batches reach it as operands only."""
    constants: list[Array] = []
    traced: dict[Hashable, TracedLayer] = {}
    stack: list[TracedLayer] = []

    def place_of(constant: Array) -> int:
        for place, known in enumerate(constants):
            if known is constant:
                return place
        constants.append(constant)
        return len(constants) - 1

    def run(params: list[PyTree], x: PyTree) -> None:
        for place, (layer, of_layer) in enumerate(zip(layers, params, strict=True)):
            of_layer = of_layer if shards is None else shards.gather(place, of_layer)
            kind = (layer, *_types((of_layer, x)))
            if kind not in traced:
                closed, output = jax.make_jaxpr(lambda p, x, f=layer: f(x, p), return_shape=True)(of_layer, x)
                if shards is not None:
                    closed = shards.of_device(closed, of_layer, x)
                places = tuple(place_of(constant) for constant in closed.consts)
                traced[kind] = TracedLayer(closed, places, jax.tree.structure(output), kind)
            stack.append(traced[kind])
            x = traced[kind](constants, of_layer, x)

    jax.eval_shape(run, list(params), x)
    return stack, constants


def _types(operands: PyTree) -> tuple[Hashable, ...]:
    leaves, structure = jax.tree.flatten(operands)
    return (structure, *map(jax.typeof, leaves))


@dataclasses.dataclass(frozen=True, eq=False)
class Backward:
    """Backward function of `jax.vjp`, without its leaves.

    Attributes:
      structure: its structure.
      empty: the types of leaves that have no values, by place, such as those of cuDNN's attention. They are no
        residuals: XLA would end with a segmentation fault where one leaves a shard_map.
    """

    structure: Any
    empty: dict[int, ShapedArray]

    @classmethod
    def split(cls, backward: Callable[..., PyTree]) -> tuple[Backward, list[Array]]:
        """Function without its leaves, and its residuals."""
        leaves, structure = jax.tree.flatten(backward)
        empty = {place: jax.typeof(leaf) for place, leaf in enumerate(leaves) if not leaf.size}
        return cls(structure, empty), [leaf for leaf in leaves if leaf.size]

    def joined(self, residuals: Sequence[Array | None]) -> Callable[..., PyTree]:
        leaves = list(residuals)
        for place, kind in sorted(self.empty.items()):
            leaves.insert(place, varying_over(lax.empty(kind.shape, kind.dtype), kind.manual_axis_type.varying))
        return self.structure.unflatten(leaves)


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The forward pass of a layer, what it keeps, and where that waits.

    Attributes:
      closed: leaves of constants, of parameters and of x → leaves of x, and residuals.
      output: structure of x.
      backward: what `jax.vjp` returns, from the residuals.
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
    backward: Backward
    differentiated: tuple[int, ...]
    operands: Any
    constants: tuple[int, ...]
    residuals: tuple[Residual | None, ...]
    sources: tuple[int, ...]
    leaving: frozenset[int]
    in_fp8: frozenset[int]

    def run(self, operands: Sequence[Array], x: PyTree) -> tuple[PyTree, list[Array]]:
        """The next x, and the residuals."""
        out = jaxpr_as_fun(self.closed)(*operands, *jax.tree.leaves(x))
        count = self.output.num_leaves
        return self.output.unflatten(out[:count]), out[count:]

    @functools.cached_property
    def inputs(self) -> dict[int, int]:
        """Residuals that are operands, or leaves of x after those, and their numbers there."""
        jaxpr = self.closed.jaxpr
        numbers = {var: number for number, var in enumerate(jaxpr.invars)}
        outputs = jaxpr.outvars[self.output.num_leaves :]
        # A literal is no input, and has no hash.
        return {
            place: numbers[var]
            for place, var in enumerate(outputs)
            if not hasattr(var, "val") and var in numbers and self.sources[place] == place
        }

    def of_operands(self, operands: Sequence[Array]) -> dict[int, Array]:
        """The residuals that constants and parameters decide alone, by place."""
        wanted = [
            place for place, source in enumerate(self.sources) if source == place and self.residuals[place] is None
        ]
        values = {place: operands[self.inputs[place]] for place in wanted if place in self.inputs}
        if computed := [place for place in wanted if place not in values]:
            first, closed = self.output.num_leaves, self.closed
            used = [place - first in computed for place in range(len(closed.out_avals))]
            jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, used, instantiate=True)
            # What is left of x is read by nothing that the residuals depend on.
            x = [lax.empty(aval.shape, aval.dtype) for aval in closed.in_avals[len(operands) :]]
            residuals = jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))(*operands, *x)
            values |= dict(zip(computed, residuals, strict=True))
        return values


def plan_of(
    layer: TracedLayer, own: list[Array], params: PyTree, x: PyTree, wanted: tuple[bool, ...], offload: Offload
) -> Plan:
    operands, structure = jax.tree.flatten((own, params))
    differentiated = tuple(place for place, needed in enumerate(wanted) if needed)
    backwards: list[Backward] = []

    def forward(operands: list[Array], x: PyTree) -> tuple[PyTree, list[Array]]:
        def function(chosen: list[Array], x: PyTree) -> PyTree:
            whole = list(operands)
            for place, leaf in zip(differentiated, chosen, strict=True):
                whole[place] = leaf
            own, params = structure.unflatten(whole)
            return layer.with_own(own, params, x)

        y, backward = jax.vjp(function, [operands[place] for place in differentiated], x)
        rest, residuals = Backward.split(backward)
        backwards.append(rest)
        return y, residuals

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
    return Plan(
        *(closed, layer.output, backwards[0], differentiated, structure, layer.constants),
        *(residuals, sources, leaving, in_fp8),
    )


def check_names(residuals: Sequence[Residual | None], names: tuple[str, ...], place: int) -> None:
    kept = [residual for residual in residuals if residual is not None]
    missing = [name for name in names if not any(name in residual.names for residual in kept)]
    if missing:
        raise ValueError(
            f"offload has the names {missing}, and layer {place} keeps nothing of that name for its backward pass. It "
            f"keeps {'; '.join(sorted(map(str, kept))) or 'nothing'}. Choose among the names of these, let remat keep "
            "what you name, or set required=False. The output of a layer is the next one's layer_input"
        )


def quantized(value: Array) -> tuple[Array, QuantizedArray]:
    """The value in FP8, and its scales."""
    in_fp8 = ops.quantize(jnp.atleast_2d(value), BlockScaling().quantization("activation"), copies="data")
    return cast(Array, in_fp8.data).reshape(value.shape), dataclasses.replace(in_fp8, data=None)


def dequantized(data: Array, scales: QuantizedArray) -> Array:
    return dataclasses.replace(scales, data=jnp.atleast_2d(data)).dequantize().reshape(data.shape)


def is_whole() -> bool:
    """Whether every array is whole on its device, as far as can be known while a program is traced. To join arrays that
    are split over devices would gather them."""
    return jax.device_count() == 1 or (inside_shard_map() and not unmapped_axes())


def is_symbolic_zero(leaf: object) -> bool:
    return isinstance(leaf, jax.custom_derivatives.SymbolicZero)


def instantiated(leaf: Any) -> Any:
    if not is_symbolic_zero(leaf):
        return leaf
    if leaf.dtype == float0:
        return np.zeros(leaf.shape, float0)
    return varying_over(jnp.zeros(leaf.shape, leaf.dtype), leaf.aval.manual_axis_type.varying)
