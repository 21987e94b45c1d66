"""A gated MLP whose hidden features lie on several devices: gathered, multiplied, activated and scattered in FP8."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from te_jax import native, sharding
from te_jax._core import observe
from te_jax._core.reverse_mode import reverse_mode_only
from te_jax.ops.activation import gated_activation
from te_jax.ops.linear.arguments import (
    KernelContracting,
    Operand,
    as_operand,
    named_weights,
    validate_kernel_contracting,
)
from te_jax.ops.linear.gated import GatedMLP, gated
from te_jax.ops.linear.rule import traced
from te_jax.ops.linear.weight import Weight
from te_jax.ops.operands import one_for_each
from te_jax.parallel.collective_matmul import (
    REVERSE_MODE,
    all_gather_matmul,
    canonical,
    matmul_reduce_scatter,
    prepared,
)
from te_jax.parallel.options import Residual, Transport
from te_jax.quantized import QuantizedArray, facts_of_recipe
from te_jax.recipe import DelayedScalingState, ProductRecipes, Recipe
from te_jax.reference.activation import Activation, ActivationName
from te_jax.sharding import AxisName

_NAME = "te_jax.parallel.gated_mlp"


def gated_mlp(
    x: Operand,
    kernel: tuple[Operand, Operand, Operand],
    bias: tuple[jax.typing.ArrayLike | None, ...] | None = None,
    *,
    axis_name: AxisName,
    dimension: int = -2,
    activation: Activation | ActivationName = "silu",
    recipe: Recipe | None = None,
    kernel_contracting: KernelContracting = "first",
    scaling_state: tuple[DelayedScalingState, ...] | None = None,
    wgrad_accumulator: tuple[jax.typing.ArrayLike | None, ...] | None = None,
    accumulate: bool = True,
    transport: Transport = "auto",
    residual: Residual = "gathered",
    implementation: native.Implementation | None = None,
) -> Array:
    """The MLP of Llama and similar models, tensor-parallel: its hidden features are split over devices.

    For use inside `shard_map` and `pmap`. It computes the same as these lines, with fewer passes over memory:

        gate, up = all_gather_matmul(x, (gate, up), …)
        y = matmul_reduce_scatter(gated_activation(gate, up, activation), down, …)

    CUDA kernels write the activation and its gradients in FP8, as in `te_jax.ops.gated_mlp`; with CurrentScaling their
    scales are those of this device's features. With row scaling, recipes of products, and without a recipe, it runs
    those lines.

    Args:
      x: [*lead, S/D, *mid, in], this device's shard of a tensor whose dimension of size S is split over D devices, as
        in `all_gather_matmul`.
      kernel: (gate, up, down), this device's parts: [in, hidden/D], [in, hidden/D] and [hidden/D, out], or for
        kernel_contracting="last" [hidden/D, in], [hidden/D, in] and [out, hidden/D]; each as in `all_gather_matmul`.
      bias: ([hidden/D], [hidden/D], [out]), each of which may be None, or None. The last is the same on all devices.
      axis_name: the mesh axis of the devices, or several: the first varies slowest.
      dimension: that of x and y which is split, any but the last.
      activation: as in `te_jax.ops.gated_activation`; "silu" is SwiGLU.
      recipe, kernel_contracting, scaling_state, wgrad_accumulator, accumulate, transport, residual, implementation: as
        in `all_gather_matmul` with three kernels.

    Returns:
      [*lead, S/D, *mid, out] in the dtype of x.

    Raises:
      ValueError, NotImplementedError, NativeUnavailableError: as `all_gather_matmul`.

    Examples:
      >>> import functools, jax, jax.numpy as jnp, te_jax
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> mesh = jax.make_mesh((jax.device_count(),), ("tensor",), axis_types=(AxisType.Auto,))
      >>> mlp = functools.partial(te_jax.parallel.gated_mlp, axis_name="tensor")
      >>> kernels = jnp.ones((32, 64)), jnp.ones((32, 64)), jnp.ones((64, 16))
      >>> specs = P("tensor"), (P(None, "tensor"), P(None, "tensor"), P("tensor"))
      >>> jax.shard_map(mlp, mesh=mesh, in_specs=specs, out_specs=P("tensor"))(jnp.ones((64, 32)), kernels).shape
      (64, 16)
    """
    activation = Activation.of(activation)
    if not isinstance(kernel, tuple | list) or len(kernel) != 3:
        raise ValueError("kernel must be a tuple of three, (gate, up, down)")
    options: Any = {"axis_name": axis_name, "recipe": recipe, "accumulate": accumulate, "transport": transport}
    options |= {"implementation": implementation, "kernel_contracting": kernel_contracting}
    named = {"bias": bias, "scaling_state": scaling_state, "wgrad_accumulator": wgrad_accumulator}
    in_two = observe.requested() is not None  # the rule of gated MLPs has no plain h to observe
    by_lines = isinstance(recipe, ProductRecipes) or (isinstance(recipe, Recipe) and facts_of_recipe(recipe).by_row)
    if recipe is None or in_two or by_lines:
        each = {name: tuple(value for _, value in one_for_each(name, v, 3, True)) for name, v in named.items()}
        pair, last = ({name: values[part] for name, values in each.items()} for part in (slice(2), 2))
        gate, up = all_gather_matmul(
            x, tuple(kernel[:2]), gather_dimension=dimension, residual=residual, **pair, **options
        )
        h = gated_activation(gate, up, activation)
        return matmul_reduce_scatter(h, kernel[2], scatter_dimension=dimension, **last, **options)

    x = as_operand("x", x)
    weights = named_weights(tuple(kernel), **named)
    gate, up, down = weights.values()
    if gate.kernel.shape != up.kernel.shape or up.kernel.ndim != 2 or down.kernel.ndim != 2:
        raise ValueError(
            f"kernel has shapes {[weight.kernel.shape for weight in weights.values()]}; they must be [in, hidden/D], "
            "[in, hidden/D] and [hidden/D, out], or with kernel_contracting='last' [hidden/D, in], [hidden/D, in] and "
            "[out, hidden/D]"
        )
    validate_kernel_contracting(kernel_contracting)
    inner, outer = (0, 1) if kernel_contracting == "first" else (1, 0)
    width = up.kernel.shape[outer]
    if down.kernel.shape[inner] != width:
        raise ValueError(
            f"kernel[2] has shape {down.kernel.shape}, and kernel[1] {up.kernel.shape}; dimension {inner} of kernel[2] "
            f"must be dimension {outer} of kernel[1], this device's hidden features"
        )
    options |= {"residual": residual, "out_dtype": None}
    pair = {name: weights[name] for name in ("kernel[0]", "kernel[1]")}
    gate_up, rows = prepared(True, ("dimension", dimension), x, pair, **options)
    varying = sharding.tracked_axes(gate_up.spec.axis_name)
    hidden = jax.eval_shape(lambda: sharding.varying_over(jnp.zeros((*rows, width), x.dtype), varying))
    last = {"kernel[2]": down}
    second, rows = prepared(False, ("dimension", dimension), hidden, last, **options)
    operands = canonical(gate_up, x, tuple(weights.values()))
    operands = reverse_mode_only(operands, REVERSE_MODE.format(name=_NAME))
    with jax.disable_jit(False):  # as for `all_gather_matmul`
        y = traced(_mlp, GatedMLP(gate_up, second, activation, "te_collective_preactivation"), *operands)
    return y.reshape(*rows, y.shape[-1])


def _mlp(mlp: GatedMLP, x: Array | None, x8: QuantizedArray | None, weights: tuple[Weight, ...]) -> Array:
    return gated(mlp, x, x8, None, weights, None)
