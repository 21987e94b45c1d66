"""Linear layers of every kind under one interface: what all of them do is tested once, and not once for each."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from te_jax import ops, parallel
from te_jax.ops.experts_mlp import experts_mlp
from te_jax.recipe import BlockScaling, CurrentScaling, Recipe

TOKENS, IN, HIDDEN, EXPERTS = 256, 128, 256, 3
SIZES = np.int32([128, 0, 100])
COLUMNS, ROWS = P(None, "tp"), P("tp")


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer as `layer(x, kernels, accumulators, states, accumulate=True)`, whose result is a tuple.

    Attributes:
      call: the operation, of x and a tuple of kernels, with recipe, wgrad_accumulator, accumulate and scaling_state.
      shapes: of the kernels, without experts.
      transposed: whether these are [out, in].
      experts: whether a kernel is a stack of them.
      specs: of x, of each kernel and of results, where devices along "tp" call it inside `shard_map`.
    """

    call: Callable[..., Any]
    recipe: Recipe | None
    shapes: tuple[tuple[int, int], ...]
    transposed: bool = False
    experts: bool = False
    specs: tuple[P, tuple[P, ...], P] | None = None

    def __call__(self, x, kernels, accumulators=None, states=None, **options):
        def local(x, kernels, accumulators, states):
            given = {} if accumulators is None else {"wgrad_accumulator": accumulators}
            given |= {} if states is None else {"scaling_state": states}
            found = self.call(x, kernels, recipe=self.recipe, **given, **options)
            return found if isinstance(found, tuple) else (found,)

        if self.specs is None:
            return local(x, kernels, accumulators, states)
        of_x, of_kernels, of_results = self.specs
        specs = of_x, of_kernels, None if accumulators is None else of_kernels, None if states is None else P()
        return jax.shard_map(local, mesh=mesh(), in_specs=specs, out_specs=of_results)(x, kernels, accumulators, states)

    def by(self, recipe):
        return dataclasses.replace(self, recipe=recipe)

    def of_quantized(self, x, kernels, accumulators=None, states=None, **options):
        """The same, and all kernels are quantized before, each device its part; with options of `ops.quantize`."""
        quantize = self._quantize("kernel", **options)
        quantize = jax.vmap(quantize) if self.experts else quantize
        return self._before(lambda x, kernels: (x, jax.tree.map(quantize, kernels)))(x, kernels, accumulators, states)

    def of_quantized_x(self, x, kernels, straight_through=True, **options):
        """The same, and x is quantized before."""
        quantize = self._quantize("activation", straight_through=straight_through, **options)
        return self._before(lambda x, kernels: (quantize(x), kernels))(x, kernels)

    def _quantize(self, role, **options):
        quantization = self.recipe.quantization(role)
        if self.transposed and role == "activation":
            gradient = self.recipe.quantization("gradient")
            quantization = dataclasses.replace(quantization, transposed_scaling=gradient.transposed_scaling)
        of_all = {"amax_axis": "tp"} if self.specs and quantization.scaling == "tensor" else {}
        return functools.partial(ops.quantize, quantization=quantization, **of_all, **options)

    def _before(self, changed):
        call = lambda x, kernels, **options: self.call(*changed(x, kernels), **options)  # noqa: E731
        return dataclasses.replace(self, call=call)

    def draw(self, rng):
        """(x, kernels, accumulators, cotangents of the results): magnitudes of kernels and cotangents differ."""

        def normal(*shape, scale=1.0):
            return (scale * rng.standard_normal(shape)).astype(np.float32)

        stack = (EXPERTS,) if self.experts else ()
        kernels = tuple(
            normal(*stack, *shape, scale=(1 + i) * IN**-0.5) for i, shape in enumerate(self.shapes)
        )  # fmt: skip
        x, accumulators = normal(TOKENS, IN), tuple(normal(*kernel.shape, scale=10.0) for kernel in kernels)
        if self.experts:
            x[SIZES.sum() :] = 0  # rows of no expert, which share scales with others where x comes quantized
            for kernel in kernels:
                kernel[-1] *= 2
        results = jax.eval_shape(self.by(None) if self.call is not of_experts else self, x, kernels)
        return x, kernels, accumulators, tuple(normal(*y.shape, scale=1.0 + i) for i, y in enumerate(results))


@functools.cache
def mesh():
    return Mesh(np.array(jax.devices()[:2]), ("tp",), axis_types=(AxisType.Auto,))


def of_experts(x, kernels, *, recipe, wgrad_accumulator=(None,) * 3, accumulate=True):
    return experts_mlp(
        x, jnp.linspace(0.5, 1.0, TOKENS), SIZES, None, kernels, recipe=recipe, activation=ops.Activation("silu"),
        wgrad_accumulator=wgrad_accumulator, accumulate=accumulate, implementation=None,
    )  # fmt: skip


def collective(function, shapes, *specs):
    """A collective product. One kernel is passed to it without a tuple, and so is what belongs to it."""

    def call(x, kernels, recipe, **options):
        one = len(shapes) == 1
        options = {
            name: value[0] if one and isinstance(value, tuple) else value for name, value in options.items()
        }  # fmt: skip
        return function(x, kernels[0] if one else kernels, axis_name="tp", recipe=recipe, **options)

    return Layer(call, CurrentScaling(), shapes, specs=specs)


TWO, GATED = ((IN, HIDDEN), (IN, 64)), ((IN, HIDDEN), (IN, HIDDEN), (HIDDEN, 128))
KINDS = {
    "dense": Layer(ops.dense, CurrentScaling(), ((IN, HIDDEN), (IN, 60))),  # of a size that products pad
    "dense of transposed kernels": Layer(
        functools.partial(ops.dense, kernel_contracting="last"), BlockScaling(), ((HIDDEN, IN), (60, IN)), True
    ),
    "grouped_dense": Layer(
        lambda x, kernels, **options: ops.grouped_dense(x, kernels, SIZES, **options), BlockScaling(),
        ((IN, HIDDEN), (IN, 128)), experts=True,
    ),
    "gated_mlp": Layer(ops.gated_mlp, CurrentScaling(), GATED),
    "experts_mlp": Layer(of_experts, BlockScaling(), GATED, experts=True),
    "all_gather_matmul": collective(parallel.all_gather_matmul, TWO, ROWS, (COLUMNS,) * 2, COLUMNS),
    "matmul_reduce_scatter": collective(parallel.matmul_reduce_scatter, TWO[:1], COLUMNS, (ROWS,), ROWS),
    "parallel.gated_mlp": collective(parallel.gated_mlp, GATED, ROWS, (COLUMNS, COLUMNS, ROWS), ROWS),
}  # fmt: skip
MORE = {
    "dense, none": KINDS["dense"].by(None),
    "dense, block": KINDS["dense"].by(BlockScaling()),
    "grouped_dense, none": KINDS["grouped_dense"].by(None),
    "gated_mlp, block": KINDS["gated_mlp"].by(BlockScaling()),
    "all_gather_matmul, block": KINDS["all_gather_matmul"].by(BlockScaling()),
}

# Plain grouped GEMMs of a GPU are in bfloat16.
FALLS_BACK = pytest.mark.filterwarnings("ignore:te_jax runs no native kernel.*plain grouped GEMMs")


def layers(of):
    """A test of each of these layers."""
    rows = [
        pytest.param(layer, id=name, marks=FALLS_BACK if name.startswith("grouped_dense") else ())
        for name, layer in of.items()
    ]
    return pytest.mark.parametrize("layer", rows)


def without(*names):
    """All kinds but these."""
    return layers({name: layer for name, layer in KINDS.items() if name not in names})


every_kind = layers(KINDS)
every_layer = layers(KINDS | MORE)
