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
from te_jax.recipe import BlockScaling, CurrentScaling, Recipe, RowwiseScaling

TOKENS, IN, HIDDEN, EXPERTS = 256, 128, 256, 3
SIZES = np.int32([128, 0, 100])
COLUMNS, ROWS = P(None, "tp"), P("tp")


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer as `layer(x, kernels, accumulators, accumulate=True)`, whose result is a tuple.

    Attributes:
      call: the operation, of x and a tuple of kernels, with wgrad_accumulator and accumulate.
      shapes: of the kernels, without experts.
      experts: whether a kernel is a stack of them.
      specs: of x and results, and of each kernel, where devices along "tp" call it inside `shard_map`.
    """

    call: Callable[..., Any]
    recipe: Recipe | None
    shapes: tuple[tuple[int, int], ...]
    experts: bool = False
    specs: tuple[P, tuple[P, ...], P] | None = None

    def __call__(self, x, kernels, accumulators=None, **options):
        def local(x, kernels, accumulators):
            given = {} if accumulators is None else {"wgrad_accumulator": accumulators, **options}
            found = self.call(x, kernels, recipe=self.recipe, **given)
            return found if isinstance(found, tuple) else (found,)

        if self.specs is None:
            return local(x, kernels, accumulators)
        of_x, of_kernels, of_results = self.specs
        return self._mapped(local, (of_x, of_kernels, None if accumulators is None else of_kernels), of_results)(
            x, kernels, accumulators
        )

    def of_quantized(self, x, kernels, accumulators=None, **options):
        """The same, and all kernels are quantized before, each device its part; with options of `ops.quantize`."""
        quantize = functools.partial(ops.quantize, quantization=self.recipe.quantization("kernel"), **options)
        if self.specs is None:
            return self(x, jax.tree.map(jax.vmap(quantize) if self.experts else quantize, kernels), accumulators)
        quantize = functools.partial(quantize, amax_axis="tp")
        call = lambda x, kernels, **options: self.call(x, jax.tree.map(quantize, kernels), **options)  # noqa: E731
        return dataclasses.replace(self, call=call)(x, kernels, accumulators)

    @staticmethod
    def _mapped(function, in_specs, out_specs):
        mesh = Mesh(np.array(jax.devices()[:2]), ("tp",), axis_types=(AxisType.Auto,))
        return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)

    def draw(self, rng):
        """(x, kernels, accumulators, cotangents of the results)"""

        def normal(*shape, scale=1.0):
            return (scale * rng.standard_normal(shape)).astype(np.float32)

        stack = (EXPERTS,) if self.experts else ()
        kernels = tuple(normal(*stack, *shape, scale=shape[0] ** -0.5) for shape in self.shapes)
        x, accumulators = normal(TOKENS, IN), tuple(normal(*kernel.shape, scale=10.0) for kernel in kernels)
        return x, kernels, accumulators, tuple(normal(*y.shape) for y in jax.eval_shape(self, x, kernels))


def dense(recipe):
    return Layer(ops.dense, recipe, ((IN, HIDDEN), (IN, 64)))


def dense_of_transposed(recipe):
    return Layer(functools.partial(ops.dense, kernel_contracting="last"), recipe, ((HIDDEN, IN), (64, IN)))


def grouped_dense(recipe):
    call = lambda x, kernels, **options: ops.grouped_dense(x, kernels, SIZES, **options)  # noqa: E731
    return Layer(call, recipe, ((IN, HIDDEN), (IN, 128)), experts=True)


def of_experts(x, kernels, *, recipe, wgrad_accumulator=(None,) * 3, accumulate=True):
    return experts_mlp(
        x, jnp.linspace(0.5, 1.0, TOKENS), SIZES, None, kernels, recipe=recipe, activation=ops.Activation("silu"),
        wgrad_accumulator=wgrad_accumulator, accumulate=accumulate, implementation=None,
    )  # fmt: skip


def collective(function, shapes, *specs):
    """A collective product. One kernel is passed to it without a tuple."""

    def call(x, kernels, wgrad_accumulator=None, **options):
        one = len(shapes) == 1
        if wgrad_accumulator is not None:
            options["wgrad_accumulator"] = wgrad_accumulator[0] if one else wgrad_accumulator
        return function(x, kernels[0] if one else kernels, axis_name="tp", **options)

    return Layer(call, CurrentScaling(), shapes, specs=specs)


GATED = (IN, HIDDEN), (IN, HIDDEN), (HIDDEN, 128)
LAYERS = {
    "dense, none": dense(None),
    "dense, current": dense(CurrentScaling()),
    "dense, rowwise": dense(RowwiseScaling()),
    "dense, block": dense(BlockScaling()),
    "dense of a transposed kernel, none": dense_of_transposed(None),
    "dense of a transposed kernel, block": dense_of_transposed(BlockScaling()),
    "grouped_dense, none": grouped_dense(None),
    "grouped_dense, block": grouped_dense(BlockScaling()),
    "gated_mlp, block": Layer(ops.gated_mlp, BlockScaling(), GATED),
    "gated_mlp, current": Layer(ops.gated_mlp, CurrentScaling(), GATED),
    "experts_mlp, block": Layer(of_experts, BlockScaling(), GATED, experts=True),
    "all_gather_matmul, current": collective(
        parallel.all_gather_matmul, ((IN, HIDDEN), (IN, 64)), ROWS, (COLUMNS,) * 2, COLUMNS
    ),
    "matmul_reduce_scatter, current": collective(
        parallel.matmul_reduce_scatter, ((IN, HIDDEN),), COLUMNS, (ROWS,), ROWS
    ),
    "parallel.gated_mlp, current": collective(parallel.gated_mlp, GATED, ROWS, (COLUMNS, COLUMNS, ROWS), ROWS),
}


# Plain grouped GEMMs of a GPU are in bfloat16.
FALLS_BACK = pytest.mark.filterwarnings("ignore:te_jax runs no native kernel.*plain grouped GEMMs")
every_layer = pytest.mark.parametrize(
    "layer",
    [
        pytest.param(layer, id=name, marks=FALLS_BACK if name == "grouped_dense, none" else ())
        for name, layer in LAYERS.items()
    ],
)
in_fp8 = {name: layer for name, layer in LAYERS.items() if layer.recipe}
every_layer_in_fp8 = pytest.mark.parametrize("layer", in_fp8.values(), ids=in_fp8)
