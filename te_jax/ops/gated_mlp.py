"""A gated MLP in FP8: between its three linear layers, kernels compute the activation and its gradients in FP8."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jax.interpreters import ad

from te_jax import native, sharding
from te_jax._core.arguments import as_flag
from te_jax._core.derivatives import differentiated_once
from te_jax._core.reverse_mode import reverse_mode_only
from te_jax.ops import _fp8
from te_jax.ops._activation_kernels import activate_quantized, activation_gradients_quantized
from te_jax.ops._dense_arguments import (
    Operand,
    Shape,
    as_operand,
    implementation_for,
    sequence_padding,
    split,
    state_axes,
    validate,
    validate_differentiated,
    validate_fp8,
    whole_blocks,
)
from te_jax.ops._fp8 import Fp8
from te_jax.ops._fp8_products import Layer, Layouts, backward_products, forward_products
from te_jax.ops._operands import as_array, one_for_each
from te_jax.ops._quantize_kernels import Request
from te_jax.ops.activation import as_function, gated_activation
from te_jax.ops.dense import dense
from te_jax.quantized import QuantizedArray
from te_jax.recipe import DelayedScalingState, Recipe, Role
from te_jax.reference.activation import Function, Kind
from te_jax.reference.quantize import Copies
from te_jax.sharding import AxisName, Layout, regrouped

_REVERSE_MODE = (
    "te_jax.ops.gated_mlp with a recipe has first derivatives in reverse mode (jax.grad, jax.vjp) only: for forward "
    "mode (jax.jvp, jax.jacfwd) or second derivatives use recipe=None"
)


def gated_mlp(
    x: Operand,
    kernel: tuple[Operand, Operand, Operand],
    bias: tuple[jax.typing.ArrayLike | None, ...] | None = None,
    *,
    kind: Kind = "silu",
    alpha: float = 1.0,
    limit: float | None = None,
    offset: float = 0.0,
    recipe: Recipe | None = None,
    wgrad_accumulator: tuple[jax.typing.ArrayLike | None, ...] | None = None,
    accumulate: bool = True,
    scaling_state: tuple[DelayedScalingState, ...] | None = None,
    axis_name: AxisName | None = None,
    implementation: native.Implementation | None = None,
) -> Array:
    r"""The MLP of Llama and similar models, y = h · down with h = f(x · gate) · (x · up), whose GEMMs run in FP8.

    It computes the same as these lines, with fewer passes over memory:

        gate, up = dense(x, (gate, up), …)
        y = dense(gated_activation(gate, up, kind, …), down, …)

    CUDA kernels write h and the gradients of gate and up in FP8. h is no residual: the backward pass computes it again,
    transposed, together with these gradients. The residuals are x and the kernels in FP8 and the values before the
    activation, under the names of `te_jax.checkpoint_policies`. With row scaling, and without a recipe, it runs those
    lines.

    Args:
      x: [*batch, in], float32, bfloat16 or float16, sharded in any way. Or a QuantizedArray, as in `dense`.
      kernel: (gate, up, down), [in, hidden], [in, hidden] and [hidden, out]; each as in `dense`.
      bias: ([hidden], [hidden], [out]), each of which may be None, or None.
      kind, alpha, limit, offset: the activation, as in `gated_activation`; "silu" is SwiGLU.
      recipe: how to quantize; None multiplies in the dtype of x, by XLA.
      wgrad_accumulator, accumulate, scaling_state, axis_name, implementation: as in `dense` with three kernels.

    Returns:
      [*batch, out] in the dtype of x.

    Raises:
      ValueError: for arguments that break a rule above, naming the argument.
      NotImplementedError: for second derivatives with a recipe.
      te_jax.native.NativeUnavailableError: "native" cannot run here, or this GPU cannot multiply as the recipe says.

    References:
      Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202.

    Examples:
      >>> import jax, jax.numpy as jnp, te_jax
      >>> x, kernel = jnp.ones((4, 32)), (jnp.ones((32, 64)), jnp.ones((32, 64)), jnp.ones((64, 16)))
      >>> y = jax.jit(lambda x: te_jax.ops.gated_mlp(x, kernel, recipe=te_jax.recipe.BlockScaling()))(x)
      >>> y.shape, float(y[0, 0])  # silu(32) · 32 · 64
      ((4, 16), 65536.0)
    """
    function = as_function(kind, alpha, limit, offset)
    if not isinstance(kernel, tuple | list) or len(kernel) != 3:
        raise ValueError("kernel must be a tuple of three, (gate, up, down)")
    options: Any = {
        "recipe": recipe,
        "accumulate": accumulate,
        "axis_name": axis_name,
        "implementation": implementation,
    }
    several: dict[str, Any] = {"bias": bias, "wgrad_accumulator": wgrad_accumulator, "scaling_state": scaling_state}
    each = {name: one_for_each(name, values, 3, True) for name, values in several.items()}
    if recipe is None or (isinstance(recipe, Recipe) and recipe.scalings["activation"][0] == "row"):
        values = {name: [value for _, value in named] for name, named in each.items()}
        gate, up = dense(x, tuple(kernel[:2]), **{name: tuple(v[:2]) for name, v in values.items()}, **options)
        h = gated_activation(gate, up, kind, alpha=alpha, limit=limit, offset=offset)
        return dense(h, kernel[2], **{name: v[2] for name, v in values.items()}, **options)

    x = as_operand("x", x)
    kernels = {name: as_operand(name, value) for name, value in one_for_each("kernel", kernel, 3, True)}
    biases, accumulators = (
        {name: None if a is None else as_array(name, a) for name, a in each[argument]}
        for argument in ("bias", "wgrad_accumulator")
    )
    states = dict(each["scaling_state"])
    axis_names = state_axes(axis_name, recipe)
    _, (up_name, up_kernel), (_, down) = kernels.items()
    if kernels["kernel[0]"].shape != up_kernel.shape:
        raise ValueError(
            f"{up_name} has shape {up_kernel.shape}, but kernel[0] has {kernels['kernel[0]'].shape}; gate and up must "
            "have the same, [in, hidden]"
        )
    if up_kernel.ndim != 2 or down.ndim != 2:
        raise ValueError(
            f"kernel has shapes {[k.shape for k in kernels.values()]}; they must be [in, hidden], [in, hidden] and "
            "[hidden, out]"
        )
    hidden = jax.ShapeDtypeStruct((*x.shape[:-1], up_kernel.shape[-1]), x.dtype)
    varying = sharding.varying_axes(x, tuple(kernels.values()))
    named = zip(kernels.items(), biases.items(), accumulators.items(), states.items(), strict=True)
    for operand, (named_kernel, named_bias, named_accumulator, named_state) in zip((x, x, hidden), named, strict=True):
        shape = Shape.of(operand, *named_kernel, 1, "first")
        validate(operand, *named_kernel, shape, None, named_bias, named_accumulator, varying)
        validate_fp8(operand, *named_kernel, shape, recipe, *named_state, "first")
    operands = (*split(x), *(tuple(some.values()) for some in (kernels, biases, accumulators, states)))
    fp8 = Fp8("te_jax.ops.gated_mlp", recipe, implementation_for(implementation, recipe), axis_names)
    layer = Layer(fp8, x.ndim - 1, 1, accumulate=as_flag("accumulate", accumulate))
    return _gated_mlp(*reverse_mode_only(operands, _REVERSE_MODE), layer, function)


# Under jit even when called eagerly: sharded operands are then partitioned rather than gathered.
@functools.partial(jax.jit, static_argnums=(6, 7), inline=sharding.INLINE)
def _gated_mlp(x, x8, kernels, biases, accumulators, states, layer: Layer, function: Function) -> Array:
    """Brings the batch into a form that FP8 products take, and back; see `dense`."""
    like, recipe = x if x8 is None else x8, layer.fp8.recipe
    batch, width = like.shape[:-1], like.shape[-1:]
    layout = layer.layout(like, kernels[2])
    if x8 is None and (padding := sequence_padding(batch, recipe, x)):
        axis = len(batch) - 1
        x = sharding.padded(x, padding, axis)
        y = _gated_mlp(x, None, kernels, biases, accumulators, states, layer, function)
        return layout.apply(lax.slice_in_dim(y, 0, batch[-1], axis=axis))
    merged = batch
    if x8 is None:
        merged = whole_blocks(batch, recipe) or (1,)
        x = regrouped(x, (batch, width), (merged, width))
    layer = dataclasses.replace(layer, batch_ndim=len(merged))
    operands = sharding.varying_together((x, x8, kernels, biases, accumulators))
    y: Any = _mlp(layer, function, *operands, states)
    return layout.apply(regrouped(y, (merged, y.shape[-1:]), (batch, y.shape[-1:])))


class _Residuals(NamedTuple):
    """What is kept for the backward pass."""

    layouts: Layouts
    x: QuantizedArray  # the copy that sums over tokens; none where neither gate nor up has a gradient
    kernels: tuple[QuantizedArray, ...]  # the copies that sum over out
    gate: Array  # x · gate
    up: Array  # x · up
    accumulators: tuple[Array | None, ...]
    states: tuple[DelayedScalingState | None, ...]
    h_amax: Array | None  # from which the scale of h follows
    amaxes: tuple[Array | None, ...]  # seen by delayed scaling, of x, h and the kernels


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mlp(layer: Layer, function: Function, x, x8, kernels, biases, accumulators, states) -> Array:
    del accumulators
    return _run(layer, function, x, x8, kernels, biases, states, "data", "transposed")[0]


def _run(layer: Layer, function: Function, x, x8, kernels, biases, states, x_copies: Copies, kernel_copies: Copies):
    """y, and what the backward pass may read of what it came from."""
    like = x if x8 is None else x8
    layouts = tuple(layer.layout(like, kernel) for kernel in kernels)
    x8, x_amax, _ = layer.quantize("activation", like, states[0], copies=x_copies)
    kernel8s, amaxes, _ = zip(
        *(
            layer.quantize("kernel", kernel, state, copies=kernel_copies)
            for kernel, state in zip(kernels, states, strict=True)
        ),
        strict=True,
    )
    (gate, up), _ = forward_products(layer, x8, kernel8s[:2], biases[:2], layouts[:2], keep_preactivations=False)
    gate, up = (checkpoint_name(a, "te_dense_preactivation") for a in (gate, up))
    reference_amax = layer.fp8.reference_amax(states[2], "activation")
    h8, h_amax, _ = activate_quantized(
        function,
        *(differentiated_once(a, layer.fp8.name) for a in (gate, up)),
        reference_amax,
        _request(layer, "activation", "data", with_amax=layer.fp8.recipe.scalings["activation"][0] == "tensor"),
        _use_native(layer, gate),
    )
    h8 = layer.fp8.checked(h8, states[2], "activation")
    (y,), _ = forward_products(layer, h8, kernel8s[2:], biases[2:], layouts[2:], keep_preactivations=False)
    return y, x8, kernel8s, gate, up, h_amax if reference_amax is None else reference_amax, (x_amax, h_amax, *amaxes)


def _request(layer: Layer, role: Role, copies: Copies, *, with_amax: bool, with_dbias: bool = False) -> Request:
    return Request(layer.quantization(role), layer.batch_ndim, copies, (), (), with_amax, with_dbias)


def _use_native(layer: Layer, x: Array) -> bool:
    return layer.fp8.implementation == "native" and x.size > 0


def _forward(layer: Layer, function: Function, *operands):
    try:
        validate_differentiated(layer, *operands)
        if isinstance(operands[2][2], QuantizedArray) and operands[2][2].data is None:
            raise ValueError(
                "kernel[2] has no data copy, which the gradients of gate and up read; quantize it with copies='both'"
            )
    except Exception:
        jitted: Any = _gated_mlp  # as in dense
        jitted.clear_cache()
        raise
    x, x8, kernels, biases, accumulators, states = custom_vjp_primal_tree_values(operands)
    if x8 is not None:
        x8, _ = differentiated_once((x8, x), layer.fp8.name)
    given = [isinstance(kernel, QuantizedArray) for kernel in kernels]
    with_wgrad = any(a is not None or not g for a, g in zip(accumulators[:2], given[:2], strict=True))
    y, x8, kernel8s, gate, up, h_amax, amaxes = _run(
        layer, function, x, x8, kernels, biases, states, "both" if with_wgrad else "data", "both"
    )

    def named(amax: Array | None) -> Array | None:
        return None if amax is None else checkpoint_name(amax, "te_dense_activation")

    return y, _Residuals(
        Layouts.of(x, kernels, biases, accumulators),
        _fp8.kept(x8 if with_wgrad else x8.without_transposed(), "transposed", "te_dense_activation"),
        tuple(
            _fp8.kept(kernel8, layer.dgrad_copy, None if g else "te_dense_kernel")
            for kernel8, g in zip(kernel8s, given, strict=True)
        ),
        gate,
        up,
        accumulators,
        states,
        named(h_amax),
        tuple(map(named, amaxes)),
    )


def _backward(layer: Layer, function: Function, residuals: _Residuals, dy: Any):
    if isinstance(dy, SymbolicZero):
        dy = ad.zeros_like_aval(dy.aval)
    layouts, x8, kernel8s, gate, up, accumulators, states, h_amax, (x_amax, seen_h_amax, *kernel_amaxes) = residuals
    of_x, of_kernels, of_biases, of_accumulators = layouts
    with_wgrad = [k is not None or a is not None for k, a in zip(of_kernels, of_accumulators, strict=True)]
    dy8, dy_amax, down_dbias = layer.quantize(
        "gradient",
        dy,
        states[2],
        copies="both" if with_wgrad[2] else "data",
        with_dbias=of_biases[2] is not None,
    )
    dh = Layout.of(gate).apply(layer.gemm("dgrad", dy8, kernel8s[2], out_dtype=gate.dtype))
    references = [layer.fp8.reference_amax(state, "gradient") for state in states[:2]]
    gate_parts, up_parts, h8 = activation_gradients_quantized(
        function,
        *(differentiated_once(a, layer.fp8.name) for a in (gate, up, dh)),
        *references,
        h_amax,
        _request(
            layer,
            "gradient",
            "both" if x8.transposed is not None else "data",
            with_amax=references[0] is not None,
            with_dbias=of_biases[0] is not None or of_biases[1] is not None,
        ),
        layer.quantization("activation") if with_wgrad[2] else None,
        _use_native(layer, gate),
    )
    assert up_parts is not None
    gradients = tuple(
        layer.fp8.checked(parts.array, state, "gradient")
        for parts, state in zip((gate_parts, up_parts), states[:2], strict=True)
    )
    pair = Layouts(of_x, of_kernels[:2], of_biases[:2], of_accumulators[:2])
    dx, dkernels, next_accumulators = backward_products(layer, x8, kernel8s[:2], gradients, pair, accumulators[:2])
    ddown: tuple[Any, ...] = (None,)
    next_of_down: tuple[Any, ...] = (None,)
    if h8 is not None:
        alone = Layouts(None, of_kernels[2:], of_biases[2:], of_accumulators[2:])
        h8 = layer.fp8.checked(h8, states[2], "activation")
        _, ddown, next_of_down = backward_products(layer, h8, kernel8s[2:], (dy8,), alone, accumulators[2:])
    dbiases = tuple(
        None if layout is None or dbias is None else layout.apply(dbias)
        for layout, dbias in zip(of_biases, (gate_parts.dbias, up_parts.dbias, down_dbias), strict=True)
    )
    activations, own = (x_amax, x_amax, seen_h_amax), (gate_parts.amax, up_parts.amax, dy_amax)
    next_states = tuple(
        None
        if state is None
        else _fp8.next_state(
            state,
            {"activation": activations[i], "kernel": kernel_amaxes[i], "gradient": own[i]},
            layer.fp8.axis_name,
        )
        for i, state in enumerate(states)
    )
    return dx, None, (*dkernels, *ddown), dbiases, (*next_accumulators, *next_of_down), next_states


_mlp.defvjp(_forward, _backward, symbolic_zeros=True)
