"""The derivative rule of gated MLPs, y = h · down with h = w f(x · gate) (x · up), over the products of any two layers.

h and the gradients of gate and up leave their kernels in FP8. h is not kept: the backward pass computes it again,
transposed, together with these gradients.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import custom_vjp_primal_tree_values

from te_jax import native
from te_jax._core.derivatives import not_differentiated
from te_jax._core.types import PyTree
from te_jax.ops._activation_kernels import activate_quantized, activation_gradients_quantized
from te_jax.ops.linear import fp8, rule
from te_jax.ops.linear.products import Products, Wgrad
from te_jax.ops.linear.rule import Amaxes, Layouts, gradients_of, has_gradient, named_amaxes
from te_jax.ops.linear.weight import Weight, Weights
from te_jax.quantized import Quantizable, QuantizedArray
from te_jax.recipe import Role
from te_jax.reference.activation import Activation
from te_jax.sharding import Layout


@dataclasses.dataclass(frozen=True)
class GatedMLP:
    """The static arguments of a gated MLP in FP8. Hashable, so that it is traced once.

    Attributes:
      gate_up, down: products of its layers.
      function: the activation.
      preactivation: name of what is kept of gate and up.
    """

    gate_up: Products
    down: Products
    function: Activation
    preactivation: str = "te_dense_preactivation"

    def use_native(self, x: Array) -> bool:
        return self.down.codecs[0].by_kernels and native.takes(x.dtype) and x.size > 0

    def once(self, *operands: Array | None) -> PyTree:
        return not_differentiated(operands, self.down.once)

    def read_by(self, products: Products, role: Role, x: QuantizedArray, weight: Weight) -> Quantizable:
        """Output of an activation kernel, as the products read it; NaN where the state is not valid."""
        x = fp8.checked(x, weight.state, role)
        return products.quantize(role, x, None, None, second_copy=x.transposed is not None).array

    def reference_amax(self, weight: Weight, role: Role) -> Array | None:
        return self.down.codecs[0].reference_amax(weight.state, role)


class _Residuals(NamedTuple):
    layouts: Layouts
    x: Any  # as the gradients of gate and up read it; None where neither is trained
    kernels: tuple[Quantizable | None, ...]  # as the gradients of their operands read them
    gate: Array  # x · gate
    up: Array  # x · up
    row_weights: Array | None
    weights: Weights  # see `rule.without_values`
    h_amax: Array | None  # from which the scale of h follows
    amaxes: Amaxes  # of x, h and the kernels, where scaling is delayed
    group: PyTree


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated(
    mlp: GatedMLP, x: Array | None, x8: QuantizedArray | None, row_weights: Any, weights: Weights, group: PyTree
) -> Array:
    """y of a gated MLP.

    Args:
      mlp: static arguments.
      x, x8, group: as for `te_jax.ops.linear.rule.linear`.
      row_weights: float32 w for each row of h, or None.
      weights: of gate, up and down.
    """
    return _multiplied(mlp, x, x8, row_weights, weights, group, differentiated=False)[0]


def _multiplied(mlp: GatedMLP, x, x8, row_weights, weights, group, *, differentiated: bool):
    """(y; x, kernels, gate and up as the backward pass reads them; the amax of the scale of h; observed amaxes)."""
    like, kernels, biases = x if x8 is None else x8, [w.kernel for w in weights], [w.bias for w in weights]
    layouts = (*mlp.gate_up.layouts(like, kernels[:2]), *mlp.down.layouts(like, kernels[2:]))
    with_wgrad = differentiated and any(weight.is_trained for weight in weights[:2])
    x8, x_amax, _ = mlp.gate_up.quantize("activation", like, weights[0].state, group, second_copy=with_wgrad)
    kernel8s, amaxes = zip(
        *(
            rule.quantized_kernels(products, part, group, second_copy=differentiated)
            for products, part in ((mlp.gate_up, weights[:2]), (mlp.down, weights[2:]))
        ),
        strict=True,
    )
    (gate, up), x8, _ = mlp.gate_up.forward(
        x8, kernel8s[0], biases[:2], layouts[:2], group, differentiated=differentiated
    )
    gate, up = (checkpoint_name(a, mlp.preactivation) for a in (gate, up))
    reference_amax = mlp.reference_amax(weights[2], "activation")
    gate_, up_, row_weights = mlp.once(gate, up, row_weights)
    request = mlp.down.request("activation", "data", with_amax=mlp.down.codecs[0].facts.by_tensor)
    h8, h_amax, _ = activate_quantized(
        mlp.function, gate_, up_, reference_amax, request, mlp.use_native(gate), weights=row_weights
    )
    h8 = mlp.read_by(mlp.down, "activation", h8, weights[2])
    (y,), *_ = mlp.down.forward(h8, kernel8s[1], biases[2:], layouts[2:], group, differentiated=differentiated)
    residuals = x8 if with_wgrad else None, (*kernel8s[0], *kernel8s[1]), gate, up
    return y, residuals, h_amax if reference_amax is None else reference_amax, (x_amax, h_amax, *amaxes[0], *amaxes[1])


def _validate(mlp: GatedMLP, x, x8, row_weights, weights: Weights, group) -> None:
    del group
    rule.validate_differentiated(mlp.gate_up, (x, row_weights), x8, weights[:2])
    rule.validate_weight(mlp.down, "kernel[2]", weights[2], for_x=False)
    down, copy = weights[2].kernel, mlp.down.dgrad_copy
    if isinstance(down, QuantizedArray) and getattr(down, copy) is None:
        raise ValueError(
            f"kernel[2] has no {copy} copy, which the gradients of gate and up read; quantize it with copies='both'"
        )


def _forward(mlp: GatedMLP, *operands):
    rule.validated(_validate, mlp, *operands)
    x, x8, row_weights, weights, group = custom_vjp_primal_tree_values(operands)
    if x8 is not None:
        x8, _ = not_differentiated((x8, x), mlp.gate_up.once)
    y, (x_kept, kernel8s, gate, up), h_amax, amaxes = _multiplied(
        mlp, x, x8, row_weights, weights, group, differentiated=True
    )
    (h_amax, *amaxes) = named_amaxes(mlp.gate_up, (h_amax, *amaxes), weights)
    return y, _Residuals(
        Layouts.of(x, weights),
        None if x_kept is None else mlp.gate_up.kept(x_kept, "activation", is_argument=False),
        (
            *rule.kept_kernels(mlp.gate_up, kernel8s[:2], weights[:2]),
            *rule.kept_kernels(mlp.down, kernel8s[2:], weights[2:]),
        ),
        gate,
        up,
        row_weights,
        tuple(map(rule.without_values, weights)),
        h_amax,
        tuple(amaxes),
        group,
    )


def _backward(mlp: GatedMLP, residuals: _Residuals, dy: Array):
    layouts, x8, kernel8s, gate, up, row_weights, weights, h_amax, amaxes, group = residuals
    x_amax, seen_h_amax, *kernel_amaxes = amaxes
    (dy,), of_weights = rule.zeros_of_unused([dy]), layouts.weights
    dy8, dy_amax, down_dbias = mlp.down.quantize(
        "gradient",
        dy,
        weights[2].state,
        group,
        second_copy=has_gradient(of_weights[2]),
        with_dbias=of_weights[2].bias is not None,
    )
    of_gate = Layout.of(gate)
    dh, dy8s = mlp.down.dgrad((dy8,), kernel8s[2:], group, of_gate)
    gate_, up_, dh, row_weights_ = mlp.once(gate, up, dh.reshape(gate.shape), row_weights)
    references = [mlp.reference_amax(weight, "gradient") for weight in weights[:2]]
    parts: Any = activation_gradients_quantized(
        mlp.function,
        gate_,
        up_,
        dh,
        *references,
        h_amax,
        mlp.gate_up.request(
            "gradient",
            "both" if x8 is not None else "data",
            with_amax=references[0] is not None,
            with_dbias=any(of.bias is not None for of in of_weights[:2]),
        ),
        mlp.down.quantization("activation") if has_gradient(of_weights[2]) else None,
        mlp.use_native(gate),
        weights=row_weights_,
    )
    gate_parts, up_parts, h8, *drow_weights = parts
    dgate8_up8 = tuple(
        mlp.read_by(mlp.gate_up, "gradient", part.array, weight)
        for part, weight in zip((gate_parts, up_parts), weights[:2], strict=True)
    )
    dx = None
    wgrads: list[Wgrad | None] = [None] * 3
    if layouts.x is not None and all(kernel8 is not None for kernel8 in kernel8s[:2]):
        dx, dgate8_up8 = mlp.gate_up.dgrad(dgate8_up8, kernel8s[:2], group, layouts.x)
    if x8 is not None:
        wgrads[:2] = mlp.gate_up.wgrads(x8, dgate8_up8, group)
    if h8 is not None and dy8s[0] is not None:
        h8 = mlp.read_by(mlp.down, "activation", h8, weights[2])
        (wgrads[2],) = mlp.down.wgrads(h8, dy8s, group)
    dbiases = gate_parts.dbias, up_parts.dbias, down_dbias
    activations, gradients = (x_amax, x_amax, seen_h_amax), (gate_parts.amax, up_parts.amax, dy_amax)
    dweights = tuple(
        gradients_of(mlp.down, weights[i], of_weights[i], wgrads[i], dbiases[i], observed)
        for i, observed in enumerate(zip(activations, kernel_amaxes, gradients, strict=True))
    )
    return dx, None, drow_weights[0] if drow_weights else None, dweights, None


gated.defvjp(_forward, _backward, symbolic_zeros=True)
