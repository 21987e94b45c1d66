"""The three matrix products of a linear layer in FP8, and what is kept between them."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import custom_vjp_primal_tree_values

from te_jax import native, sharding
from te_jax._core.derivatives import as_residual, differentiated_once, from_residual
from te_jax.ops import _delayed
from te_jax.ops._plain_dense import (
    Activation,
    KernelContracting,
    activate,
    activation_gradient,
    added_once,
    validate_wanted,
)
from te_jax.ops.gemm import GemmResult, gemm
from te_jax.ops.quantize import QuantizedParts, quantize_parts
from te_jax.quantized import QuantizedArray
from te_jax.recipe import DelayedScalingState, Product, Quantization, Recipe, Role
from te_jax.sharding import Layout, regrouped, split_in_two

_NAME = "te_jax.ops.dense"
_NO_GRADIENT = (
    "kernel is a QuantizedArray, which has no gradient of its own: pass wgrad_accumulator and differentiate with "
    "respect to it (accumulate_gradients in modules), or do not differentiate with respect to kernel"
)

Copy = Literal["data", "transposed"]


@dataclasses.dataclass(frozen=True)
class Layer:
    """The static arguments, together, for shapes that FP8 takes: hashable, so that a layer is traced once."""

    recipe: Recipe
    contracting_ndim: int
    out_ndim: int
    kernel_contracting: KernelContracting
    activation: Activation | None
    accumulate: bool
    axis_name: tuple[str, ...]
    implementation: native.Implementation

    @property
    def dgrad_copy(self) -> Copy:
        """The copy of the kernel that the input gradient reads, which sums over out."""
        return "data" if self.kernel_contracting == "first" else "transposed"

    @property
    def gelu_is_fused(self) -> bool:
        return self.activation == "gelu" and self.recipe.scalings["activation"][0] == "tensor"

    def quantization(self, role: Role) -> Quantization:
        """How a role is quantized here: the left operand of a product of blocks has slim ones, the right square ones,
        and with kernel_contracting="last" x and the gradient change sides in the weight gradient."""
        quantization = self.recipe.quantization(role)
        if self.kernel_contracting == "first" or role == "kernel":
            return quantization
        other = self.recipe.quantization("gradient" if role == "activation" else "activation")
        return dataclasses.replace(quantization, transposed_scaling=other.transposed_scaling)

    def is_fast(self, product: Product) -> bool:
        return product in self.recipe.fast_accumulation


def result_like(layer: Layer, x: Array, kernel: Array | QuantizedArray) -> Layout:
    """The batch lies as that of x and out as that of kernel, whichever copies products read, and what they gather."""
    out_first = layer.kernel_contracting == "last"
    copy: Any = kernel
    if isinstance(kernel, QuantizedArray):
        copy, out_first = (kernel.data if out_first else kernel.transposed), True
    out = slice(layer.out_ndim) if out_first else slice(-layer.out_ndim, None)
    return sharding.layout_of_product(x, x.ndim - layer.contracting_ndim, copy, out)


class _Residuals(NamedTuple):
    """What is kept for the backward pass. What is not needed is there without elements, as in `as_residual`."""

    wanted: tuple[Array, ...]  # whether gradients of x, kernel, bias, accumulator and state are
    likes: tuple[Layout | None, ...]  # of x, kernel, bias and accumulator
    x: QuantizedArray  # the copy that products over tokens read
    kernel: QuantizedArray  # the copy that products over out read
    preactivation: Array | None
    accumulator: Array | None
    state: DelayedScalingState | None
    amaxes: dict[Role, Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(layer: Layer, x: Array, kernel, bias: Array | None, accumulator: Array | None, state) -> Array:
    del accumulator
    like = result_like(layer, x, kernel)
    x8, _, _ = _quantize(layer, "activation", x, state, outer=True, observed=False)
    if not isinstance(kernel, QuantizedArray):
        kernel, _, _ = _quantize(layer, "kernel", kernel, state, outer=True, observed=False)
    return _forward_product(layer, x8, kernel, bias, like, keep_preactivation=False)[0]


def _forward(layer: Layer, *operands):
    x, kernel, bias, accumulator, state = custom_vjp_primal_tree_values(operands)
    wanted = [any(leaf.perturbed for leaf in jax.tree.leaves(operand)) for operand in operands]
    for_x, for_kernel, _, for_accumulator, _ = wanted
    for_wgrad = for_accumulator if accumulator is not None else for_kernel

    x8, x_amax, _ = _quantize(layer, "activation", x, state, outer=True, summed=for_wgrad)
    amaxes: dict[Role, Any] = {"activation": x_amax}
    if isinstance(kernel, QuantizedArray):
        if for_kernel and accumulator is None:
            raise NotImplementedError(_NO_GRADIENT)
        kernel8 = kernel
        kept_kernel = _kept(kernel, layer.dgrad_copy)  # without a name: as an argument it is there anyway
    else:
        kernel8, amaxes["kernel"], _ = _quantize(layer, "kernel", kernel, state, outer=True, summed=for_x)
        kept_kernel = _kept(kernel8, layer.dgrad_copy).named("te_dense_kernel")
    like = result_like(layer, x, kernel)
    y, preactivation = _forward_product(layer, x8, kernel8, bias, like, keep_preactivation=True)
    return y, _Residuals(
        tuple(map(as_residual, wanted)),
        tuple(Layout.of(a) if isinstance(a, Array) else None for a in (x, kernel, bias, accumulator)),
        _kept(x8, "transposed").named("te_dense_activation"),
        kept_kernel,
        preactivation,
        accumulator,
        state,
        {role: checkpoint_name(amax, f"te_dense_{role}") for role, amax in amaxes.items() if amax is not None},
    )


def _backward(layer: Layer, residuals: _Residuals, dy: Array):
    wanted, likes, x8, kernel8, preactivation, accumulator, state, amaxes = residuals
    for_x, for_wgrad, for_bias, for_accumulator, for_state = map(from_residual, wanted)
    x_like, kernel_like, bias_like, accumulator_like = likes
    if accumulator is not None:
        validate_wanted(for_wgrad, for_accumulator)
        for_wgrad = for_accumulator
    if for_x and getattr(kernel8, layer.dgrad_copy).ndim == 1:  # as in `_kept`
        raise ValueError(
            f"kernel has no {layer.dgrad_copy} copy, which the gradient with respect to x reads; quantize it with "
            "copies='both'"
        )
    if layer.activation is not None:
        assert preactivation is not None
        dy = activation_gradient(layer.activation, preactivation, dy)
    dx = dkernel = dbias = next_accumulator = next_state = None
    if for_x or for_wgrad or for_state:
        dy8, amax, dbias = _quantize(
            layer, "gradient", dy, state, outer=for_x or not for_wgrad, summed=for_wgrad, with_dbias=for_bias
        )
        if for_x:
            dx = x_like.apply(_dgrad(layer, dy8, kernel8, dy.dtype))
        if for_wgrad and accumulator is not None:
            if layer.accumulate:
                accumulator = added_once(accumulator, *jax.tree.leaves((x8, dy8)))
            next_accumulator = accumulator_like.apply(_accumulated(layer, x8, dy8, accumulator))
        elif for_wgrad:
            assert kernel_like is not None
            dkernel = kernel_like.apply(_wgrad(layer, x8, dy8, None, kernel_like.dtype))
        if for_state:
            assert state is not None
            next_state = _delayed.next_state(state, {**amaxes, "gradient": amax}, layer.axis_name)
    elif for_bias:
        dbias = jnp.sum(dy.astype(jnp.float32), axis=tuple(range(dy.ndim - layer.out_ndim)))
    return dx, dkernel, bias_like.apply(dbias) if for_bias else None, next_accumulator, next_state


product.defvjp(_forward, _backward, symbolic_zeros=True)


def _forward_product(layer: Layer, x8, kernel8, bias: Array | None, like: Layout, *, keep_preactivation: bool):
    """(y, preactivation or None)."""
    result = gemm(
        x8,
        kernel8,
        rhs_contracting="rows" if layer.kernel_contracting == "first" else "cols",
        bias=bias,
        activation="gelu" if layer.gelu_is_fused else None,
        save_preactivation=layer.gelu_is_fused and keep_preactivation,
        out_dtype=like.dtype,
        fast_accumulation=layer.is_fast("forward"),
        implementation=layer.implementation,
    )
    y, preactivation = result if isinstance(result, GemmResult) else (result, None)
    y = like.apply(y)
    if layer.activation is None:
        return y, None
    if layer.gelu_is_fused:
        return y, None if preactivation is None else _named_preactivation(like.apply(preactivation))
    preactivation = _named_preactivation(y)  # where it is kept, y is computed from it again
    return activate(layer.activation, preactivation), preactivation


def _named_preactivation(x: Array) -> Array:
    return checkpoint_name(x, "te_dense_preactivation")


def _dgrad(layer: Layer, dy8: QuantizedArray, kernel8: Any, dtype) -> Array:
    return gemm(
        dy8,
        kernel8,
        rhs_contracting="cols" if layer.kernel_contracting == "first" else "rows",
        out_dtype=dtype,
        fast_accumulation=layer.is_fast("dgrad"),
        implementation=layer.implementation,
    )


def _wgrad(layer: Layer, x8: Any, dy8: QuantizedArray, accumulator: Array | None, dtype) -> Array:
    return gemm(
        *((x8, dy8) if layer.kernel_contracting == "first" else (dy8, x8)),
        lhs_contracting="rows",
        rhs_contracting="rows",
        out_dtype=dtype,
        accumulator=accumulator,
        accumulate=layer.accumulate,
        fast_accumulation=layer.is_fast("wgrad"),
        implementation=layer.implementation,
    )


def _accumulated(layer: Layer, x8: Any, dy8: QuantizedArray, accumulator: Array) -> Array:
    """The next value of an accumulator, which may have more dimensions than the kernel that products read. It gets
    those here: a scan keeps what is reshaped before beside its own inputs, once more for every layer."""
    inner, outer = x8.transposed.shape[: layer.contracting_ndim], dy8.shape[-layer.out_ndim :]
    groups = (inner, outer) if layer.kernel_contracting == "first" else (outer, inner)
    own = split_in_two(accumulator.shape, math.prod(groups[0]))
    wgrad = _wgrad(layer, x8, dy8, regrouped(accumulator, own, groups), accumulator.dtype)
    return regrouped(wgrad, groups, own)


def _kept(x: QuantizedArray, copy: Copy) -> QuantizedArray:
    """x with this copy alone, which has no elements where it was not made."""
    codes, scale_inv = (x.data, x.scale_inv) if copy == "data" else (x.transposed, x.transposed_scale_inv)
    if codes is None:
        other = x.data if x.transposed is None else x.transposed
        assert other is not None
        codes, scale_inv = jnp.zeros((0,), other.dtype), jnp.zeros((0,), jnp.float32)
    if copy == "data":
        return dataclasses.replace(x.without_transposed(), data=codes, scale_inv=scale_inv)
    return dataclasses.replace(x.without_data(), transposed=codes, transposed_scale_inv=scale_inv)


def _quantize(
    layer: Layer,
    role: Role,
    x: Array,
    state: DelayedScalingState | None,
    *,
    outer: bool,
    summed: bool = False,
    observed: bool = True,
    with_dbias: bool = False,
) -> QuantizedParts:
    """FP8, the largest magnitude where scaling is delayed and observed, and dbias where asked for.

    Of activations and gradients [*batch, *features] the outer copy keeps the batch and the summed copy sums over it. Of
    kernels the outer copy keeps out, and the summed copy sums over it.
    """
    if role != "kernel":
        row_ndim = x.ndim - (layer.contracting_ndim if role == "activation" else layer.out_ndim)
    else:
        row_ndim = layer.contracting_ndim if layer.kernel_contracting == "first" else layer.out_ndim
    rows_are_outer = role != "kernel" or layer.kernel_contracting == "last"
    one: Copy = "data" if outer == rows_are_outer else "transposed"
    amax = _delayed.reference_amax(layer.recipe, state, role)
    return quantize_parts(
        differentiated_once(x, _NAME),
        layer.quantization(role),
        row_ndim=row_ndim,
        copies="both" if outer and summed else one,
        amax=None if amax is None else differentiated_once(amax, _NAME),
        with_amax=amax is not None and observed,
        with_dbias=with_dbias,
        implementation=layer.implementation,
    )
