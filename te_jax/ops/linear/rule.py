"""The derivative rule of linear layers, y = x · kernel + bias for several kernels that share one x.

What a layer does beside multiplying is here, once: it quantizes each operand once, names what it keeps, gives the next
values of accumulators and scaling states, and refuses choices of derivatives that would be silently wrong. How operands
are quantized and multiplied is the business of `Products`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jax.interpreters import ad

from te_jax import sharding
from te_jax._core import observe
from te_jax._core.batching import batched_together
from te_jax._core.derivatives import not_differentiated
from te_jax._core.types import PyTree, T
from te_jax.ops.linear import fp8
from te_jax.ops.linear.accumulator import added_once, validate_accumulated
from te_jax.ops.linear.compared import Observed, gradients_observed, results_observed
from te_jax.ops.linear.products import Products, Wgrad
from te_jax.ops.linear.weight import Weight, Weights
from te_jax.quantized import Quantizable, QuantizedArray
from te_jax.sharding import Layout


# Under jit even when called eagerly: sharded operands are then partitioned rather than gathered, and XLA removes what
# nobody asks for.
@functools.partial(jax.jit, static_argnums=(0, 1), inline=sharding.INLINE)
def traced(layer: Callable[..., T], static: Hashable, *operands: PyTree) -> T:
    """`layer(static, *operands)`, which ends in a derivative rule."""
    return layer(static, *operands)


def validated(validate: Callable[..., None], *operands: PyTree) -> None:
    """Checks operands in a forward rule."""
    try:
        validate(*operands)
    except Exception:
        jitted: Any = traced  # JAX would take the trace whose rule failed for the next gradient, and not find its parts
        jitted.clear_cache()
        raise


Amaxes = tuple[Array | None, ...]


class Layouts(NamedTuple):
    """Layouts of operands, which are those of their gradients; None for what has no gradient."""

    x: Layout | None
    weights: Weights

    @classmethod
    def of(cls, x: Quantizable | None, weights: Weights) -> Layouts:
        return cls(
            _layout(x), tuple(Weight(_layout(w.kernel), _layout(w.bias), _layout(w.accumulator)) for w in weights)
        )


def _layout(x: Quantizable | None) -> Layout | None:
    x = x.straight_through if isinstance(x, QuantizedArray) else x
    return Layout.of(x) if isinstance(x, Array) else None


class _Residuals(NamedTuple):
    layouts: Layouts
    x: Any  # as wgrad reads it; None where no kernel has a gradient
    kernels: tuple[Quantizable | None, ...]  # as dgrad reads them
    preactivations: tuple[Array | None, ...]
    weights: Weights  # what `gradients_of` reads of them
    amaxes: Amaxes  # of x and of each kernel
    group: PyTree
    observed: Observed  # empty unless statistics are asked for


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def linear(
    products: Products, x: Array | None, x8: QuantizedArray | None, weights: Weights, group: PyTree
) -> tuple[Array, ...]:
    """The results of a layer, one for each weight.

    Args:
      products: how operands are quantized and multiplied.
      x: plain. If x8 is given, what the gradient of x goes through, or None.
      x8: an x that came quantized, or None.
      weights: of the kernels.
      group: see `Products`.
    """
    return _multiplied(products, x, x8, weights, group, differentiated=False)[0]


def _multiplied(products: Products, x, x8, weights, group, *, differentiated: bool):
    """(ys; x, kernels and preactivations as the backward pass reads them; amaxes; what is observed)."""
    like = x if x8 is None else x8
    layouts = products.layouts(like, (weight.kernel for weight in weights))
    with_wgrad = differentiated and any(weight.is_trained for weight in weights)
    observed = Observed(observe.links_of([weight.kernel for weight in weights]))
    with products.observed_for(observed.links):
        x8, x_amax, _ = products.quantize("activation", like, weights[0].state, group, second_copy=with_wgrad)
    kernel8s, amaxes = quantized_kernels(products, weights, group, observed.links, second_copy=differentiated)
    biases = [weight.bias for weight in weights]
    ys, x8, preactivations = products.forward(x8, kernel8s, biases, layouts, group, differentiated=differentiated)
    ys, observed = results_observed(products, observed, tuple(ys), like, weights, layouts, group)
    kept = x8 if with_wgrad else None, kernel8s, preactivations
    return batched_together(tuple(ys)), kept, (x_amax, *amaxes), observed


def _forward(products: Products, *operands):
    validated(validate_differentiated, products, *operands)
    x, x8, weights, group = custom_vjp_primal_tree_values(operands)
    if x8 is not None:
        x8, _ = not_differentiated((x8, x), products.once)
    ys, (x_kept, kernel8s, preactivations), amaxes, observed = _multiplied(
        products, x, x8, weights, group, differentiated=True
    )
    return ys, _Residuals(
        Layouts.of(x, weights),
        None if x_kept is None else products.kept(x_kept, "activation", is_argument=False),
        kept_kernels(products, kernel8s, weights),
        preactivations,
        tuple(map(without_values, weights)),
        named_amaxes(products, amaxes, weights),
        group,
        observed,
    )


def _backward(products: Products, residuals: _Residuals, dys):
    layouts, x8, kernel8s, preactivations, weights, (x_amax, *amaxes), group, observed = residuals
    # Of a result that is not used there is no gradient to observe or multiply; but an accumulator gets its next value.
    used = [
        i
        for i, (dy, weight) in enumerate(zip(dys, weights, strict=True))
        if not isinstance(dy, SymbolicZero) or weight.accumulator is not None
    ]
    gradients = [
        None if i in used else gradients_of(products, weight, Weight(None), None, None, (x_amax, amax, None))
        for i, (weight, amax) in enumerate(zip(weights, amaxes, strict=True))
    ]
    if not used:
        return None, None, tuple(gradients), None
    observed = observed.with_links_of(kernel8s)
    kernel8s, dys = tuple(kernel8s[i] for i in used), zeros_of_unused(dys[i] for i in used)
    # Here, for a scan keeps what passes through a function beside what it is passed, once more for every layer.
    x8, kernel8s, dys = products.differentiated_once((x8, kernel8s, dys))

    def quantized(i: int, dy: Array):
        with products.observed_for(observed.links[i : i + 1]):
            return products.quantize(
                "gradient",
                dy,
                weights[i].state,
                group,
                second_copy=x8 is not None and has_gradient(layouts.weights[i]),
                with_dbias=layouts.weights[i].bias is not None,
            )

    dys = [products.before_activation(preactivations[i], dy) for i, dy in zip(used, dys, strict=True)]
    dy8s, dy_amaxes, dbiases = zip(*map(quantized, used, dys), strict=True)
    dx = None
    wgrads: Sequence[Wgrad | None] = [None] * len(used)
    if layouts.x is not None and all(kernel8 is not None for kernel8 in kernel8s):
        dx, dy8s = products.dgrad(dy8s, kernel8s, group, layouts.x)
    if x8 is not None:
        wgrads = products.wgrads(x8, dy8s, group)
    dx, wgrads = gradients_observed(products, observed, used, dys, dx, wgrads, group, layouts.x)
    for i, wgrad, dbias, dy_amax in zip(used, wgrads, dbiases, dy_amaxes, strict=True):
        seen = x_amax, amaxes[i], dy_amax
        gradients[i] = gradients_of(products, weights[i], layouts.weights[i], wgrad, dbias, seen)
    return dx, None, tuple(gradients), None


linear.defvjp(_forward, _backward, symbolic_zeros=True)


# ----------------------------------------------------------------------------------------- what rules of layers share


def validate_differentiated(products: Products, x, x8, weights: Weights, group=None) -> None:
    """Refuses choices of derivatives that would be silently wrong; operands are those of a forward rule."""
    del group
    if _perturbed(x8):
        raise NotImplementedError(
            "x is a QuantizedArray without straight_through, and has no gradient of its own: quantize it with "
            "straight_through=True, or pass jax.lax.stop_gradient(x)"
        )
    for i, weight in enumerate(weights):
        name = f"kernel[{i}]" if weights[1:] else "kernel"
        validate_weight(products, name, weight, for_x=_perturbed(x))
        if _perturbed(weight[:3:2]):
            products.validate_x(x8, name)
    if products.state_axis:
        sharding.mapped_axes(products.state_axis, "state_axis")


def validate_weight(products: Products, name: str, weight: Weight, *, for_x: bool) -> None:
    """Checks what is differentiated of a weight, and that its kernel has what the gradient of x reads."""
    for_kernel, for_accumulator = _perturbed(weight.kernel), _perturbed(weight.accumulator)
    quantized = weight.kernel if isinstance(weight.kernel, QuantizedArray) else None
    if weight.accumulator is not None:
        validate_accumulated(for_kernel, for_accumulator)
    elif for_kernel and quantized is not None and quantized.straight_through is None:
        raise NotImplementedError(
            f"{name} is a QuantizedArray without straight_through, and has no gradient of its own: pass "
            "wgrad_accumulator and differentiate with respect to it (accumulate_gradients in modules), quantize it "
            f"with straight_through=True, or do not differentiate with respect to {name}"
        )
    if for_x and quantized is not None and getattr(quantized, products.dgrad_copy) is None:
        raise ValueError(
            f"{name} has no {products.dgrad_copy} copy, which the gradient with respect to x reads; quantize it with "
            "copies='both'"
        )
    fp8.validate_advanced(weight.state, trained=for_kernel or for_accumulator)


def _perturbed(operand: PyTree) -> bool:
    return any(leaf.perturbed for leaf in jax.tree.leaves(operand))


def quantized_kernels(
    products: Products, weights: Sequence[Weight], group: PyTree, links: Sequence[Array] = (), *, second_copy: bool
):
    """(kernels as products read them, their amaxes), with statistics where links of the kernels are given."""
    kernels = (
        dataclasses.replace(w.kernel, straight_through=None) if isinstance(w.kernel, QuantizedArray) else w.kernel
        for w in weights
    )
    parts = []
    for i, (kernel, weight) in enumerate(zip(kernels, weights, strict=True)):
        with products.observed_for(links[i : i + 1]):
            parts.append(products.quantize("kernel", kernel, weight.state, group, second_copy=second_copy))
    return tuple(part.array for part in parts), tuple(part.amax for part in parts)


def kept_kernels(products: Products, kernel8s: tuple[Any, ...], weights: Weights) -> tuple[Any, ...]:
    return tuple(
        products.kept(kernel8, "kernel", is_argument=isinstance(weight.kernel, QuantizedArray))
        for kernel8, weight in zip(kernel8s, weights, strict=True)
    )


def named_amaxes(products: Products, amaxes: Amaxes, weights: Weights) -> Amaxes:
    """Amaxes of activations and, last, of the kernels."""
    roles = ("activation",) * (len(amaxes) - len(weights)) + ("kernel",) * len(weights)
    return tuple(
        None if amax is None else checkpoint_name(amax, f"{products.prefix}_{role}")
        for amax, role in zip(amaxes, roles, strict=True)
    )


def without_values(weight: Weight) -> Weight:
    """Accumulator and state of a weight, and the empty shell of a kernel that came quantized."""
    kernel = weight.kernel
    shell = jax.tree.map(lambda _: None, kernel) if isinstance(kernel, QuantizedArray) else None
    return Weight(shell, None, weight.accumulator, weight.state)


def zeros_of_unused(dys: Iterable[Array | SymbolicZero]) -> list[Array]:
    """Gradients of results, zeros for those that are not used."""
    return [ad.zeros_like_aval(dy.aval) if isinstance(dy, SymbolicZero) else dy for dy in dys]


def has_gradient(layout: Weight) -> bool:
    """Whether the gradient of a kernel goes anywhere, from the layouts of a weight."""
    return layout.kernel is not None or layout.accumulator is not None


def gradients_of(
    products: Products,
    weight: Weight,
    layout: Weight,
    wgrad: Wgrad | None,
    dbias: Array | None,
    amaxes: Amaxes,
) -> Weight:
    """The cotangents of a weight.

    Args:
      products: of the layer.
      weight: see `without_values`.
      layout: of its operands.
      wgrad: the gradient of its kernel; None where it is not computed.
      dbias: the sum of the gradients of y, or None.
      amaxes: of x, of the kernel and of the gradient of y, as far as they were observed.
    """
    dkernel = following = None
    if wgrad is not None and (target := layout.accumulator) is not None:
        accumulator = weight.accumulator
        if products.accumulate:
            operands = jax.tree.leaves(wgrad.operands)
            accumulator, operands = not_differentiated((accumulator, operands), products.once)
            accumulator = added_once(accumulator, *operands)
        following = wgrad.product(accumulator=accumulator, accumulate=products.accumulate, out_dtype=target.dtype)
        following = target.apply(following)
    elif wgrad is not None and (target := layout.kernel) is not None:
        dkernel = target.apply(wgrad.product(out_dtype=target.dtype))
        if weight.kernel is not None:
            dkernel = dataclasses.replace(weight.kernel, straight_through=dkernel)
    state = weight.state
    if state is not None:
        state = fp8.next_state(state, dict(zip(fp8.ROLES, amaxes, strict=True)), products.state_axis)
    return Weight(dkernel, None if layout.bias is None else layout.bias.apply(dbias), following, state)
