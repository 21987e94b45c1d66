"""Collective products and their derivatives, on canonical shapes: the gradient of one is the other."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values

from te_jax import sharding
from te_jax._core.batching import batched_together
from te_jax._core.reverse_mode import reverse_mode_only
from te_jax._core.types import BLOCK
from te_jax.ops import _fp8
from te_jax.parallel._collective.call import CollectiveSpec
from te_jax.parallel._collective.sides import gather, in_order, sides_of, travelling, wgrad, with_parts
from te_jax.parallel.transports import p2p, ring, xla
from te_jax.parallel.transports.exchange import GemmOperand, Transport
from te_jax.quantized import QuantizedArray
from te_jax.recipe import DelayedScalingState, Product, Role


def all_gather_products(spec: CollectiveSpec, x, kernels, biases, states) -> Any:
    """(products [A, D·R, N] in a tuple, gathered x [A, D·R, K] where it is a result) of x [A, R, K]."""
    with jax.disable_jit(False):
        operands = reverse_mode_only((x, kernels, biases, states), _reverse_mode(spec))
        return _collective_product(_all_gather, spec, *operands)


def reduce_scatter_product(spec: CollectiveSpec, x, kernel, bias, state) -> Array:
    """The product [A, R, N] of x [A, D, R, K]."""
    with jax.disable_jit(False):
        operands = reverse_mode_only((x, kernel, bias, state), _reverse_mode(spec))
        return _collective_product(_reduce_scatter, spec, *operands)


def _reverse_mode(spec: CollectiveSpec) -> str:
    return (
        f"te_jax.parallel.{spec.name} has derivatives in reverse mode (jax.grad, jax.vjp) only: for forward mode "
        "(jax.jvp, jax.jacfwd) write jax.lax collectives around jnp.matmul"
    )


# Under jit even when called eagerly, or while it is disabled: XLA removes gradients that are not used, and shard_map
# does not run rules of derivatives with symbolic zeros.
@functools.partial(jax.jit, static_argnums=(0, 1), inline=sharding.INLINE)
def _collective_product(function: Callable[..., Any], spec: CollectiveSpec, *operands) -> Any:
    return function(spec, *operands)


class Residuals(NamedTuple):
    """What the backward pass reads: all that the operands allow, whichever gradients are asked for.

    Attributes:
      activation: x as the gradients of kernels read it; None where x came quantized without that copy, or where blocks
        of rows would reach over shards.
      kernels: the kernels as the gradient of x reads them; None for one that came quantized without that copy.
      states: of delayed scaling, for each of the kernels.
      amaxes: of x and of each of the kernels; None where they were not observed.
    """

    activation: GemmOperand | None
    kernels: tuple[GemmOperand | None, ...]
    states: tuple[DelayedScalingState | None, ...]
    amaxes: tuple[Array | None, ...]


def _all_gather_gemm(spec: CollectiveSpec, product: Product, x: GemmOperand, kernels, biases, extras, keep_gathered):
    spec = spec.of(product)
    transport = _transport(spec, (x,), kernels, gathers=True)
    return transport.all_gather_gemm(spec, x, kernels, biases, extras, keep_gathered)


def _gemm_reduce_scatter(spec: CollectiveSpec, product: Product, xs, kernels, bias: Array | None) -> Array:
    spec = spec.of(product)
    return _transport(spec, xs, kernels, gathers=False).gemm_reduce_scatter(spec, xs, kernels, bias)


def _transport(spec: CollectiveSpec, xs, kernels, *, gathers: bool) -> Transport:
    name = spec.transport
    if spec.size == 1:
        name = "ring"  # without any step it is the product alone
    elif name == "auto":
        name = "p2p" if p2p.is_worthwhile(spec, xs, kernels, gathers=gathers) else "xla"
    return cast(Transport, {"xla": xla, "ring": ring, "p2p": p2p}[name])


# ------------------------------------------------------------------------------------------------- all-gather · matmul


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _all_gather(spec: CollectiveSpec, *operands):
    return _all_gather_and_residuals(spec, *operands, differentiated=False)[0]


def _all_gather_forward(spec: CollectiveSpec, *operands):
    x, kernels, _, states = operands
    _validate_differentiated(spec, x, kernels, states)
    return _all_gather_and_residuals(spec, *custom_vjp_primal_tree_values(operands), differentiated=True)


def _all_gather_and_residuals(spec: CollectiveSpec, x, kernels, biases, states, *, differentiated: bool):
    for_kernels = differentiated and spec.has_kernel_gradients
    x_sides = sides_of(
        spec, "activation", x, (spec.leading, spec.rows), "rows", states[0], by_cols=for_kernels, gathered=True
    )
    rights, kept, amaxes = _kernels(spec, kernels, "cols", states, differentiated)
    by_cols = x_sides.by_cols if for_kernels else None
    keep = by_cols is not None and spec.residual == "gathered"
    parts = travelling(by_cols) if keep else ()
    products, gathered, parts = _all_gather_gemm(
        spec, "forward", x_sides.by_rows, rights, biases, parts, (keep and not parts) or spec.gather_result
    )
    if keep:
        assert by_cols is not None
        by_cols = with_parts(by_cols, gathered, parts)
    residuals = Residuals(_named(by_cols, "activation"), kept, states, _named((x_sides.amax, *amaxes), "activation"))
    if spec.gather_result:
        *products, gathered = batched_together((*products, gathered))
        return (tuple(products), gathered), residuals
    return (batched_together(products), None), residuals


def _all_gather_backward(spec: CollectiveSpec, residuals: Residuals, cotangents):
    dys, dgathered = cotangents
    used = [i for i, dy in enumerate(dys) if not isinstance(dy, SymbolicZero)]
    dx: Any = None
    dkernels, dbiases, amaxes = ([cast(Any, None)] * len(dys) for _ in range(3))
    x = _regathered(spec, residuals.activation, dys[used[0]]) if used else None
    lefts = []
    for i in used:
        dtype = spec.kernel_dtypes[i]
        dy = sides_of(
            spec, "gradient", dys[i], (spec.leading, spec.size, spec.rows), "cols", residuals.states[i],
            by_cols=x is not None and dtype is not None, with_dbias=spec.biased[i],
        )  # fmt: skip
        lefts.append(dy.by_rows)
        dkernels[i], dbiases[i], amaxes[i] = wgrad(spec, x, dy.by_cols, dtype), dy.dbias, dy.amax
    if kernels := _for_dgrad(spec, tuple(residuals.kernels[i] for i in used)):
        dx = _gemm_reduce_scatter(spec, "dgrad", tuple(lefts), kernels, None)
    if dgathered is not None and not isinstance(dgathered, SymbolicZero):
        more = lax.psum_scatter(dgathered.astype(jnp.float32), spec.axis_name, scatter_dimension=1, tiled=True)
        dx = (more if dx is None else dx.astype(jnp.float32) + more).astype(spec.x_dtype)
    dstates = (
        _next_state(spec, state, (residuals.amaxes[0], residuals.amaxes[i + 1], amaxes[i]))
        for i, state in enumerate(residuals.states)
    )
    return dx, tuple(dkernels), tuple(dbiases), tuple(dstates)


_all_gather.defvjp(_all_gather_forward, _all_gather_backward, symbolic_zeros=True)


# --------------------------------------------------------------------------------------------- matmul · reduce-scatter


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _reduce_scatter(spec: CollectiveSpec, *operands) -> Array:
    return _reduce_scatter_and_residuals(spec, *operands, differentiated=False)[0]


def _reduce_scatter_forward(spec: CollectiveSpec, x, kernel, bias, state):
    _validate_differentiated(spec, x, (kernel,), (state,))
    operands = custom_vjp_primal_tree_values((x, kernel, bias, state))
    return _reduce_scatter_and_residuals(spec, *operands, differentiated=True)


def _reduce_scatter_and_residuals(spec: CollectiveSpec, x, kernel, bias, state, *, differentiated: bool):
    for_kernel = differentiated and spec.has_kernel_gradients
    x_sides = sides_of(spec, "activation", x, (spec.leading, spec.size, spec.rows), "cols", state, by_cols=for_kernel)
    rights, kept, amaxes = _kernels(spec, (kernel,), "rows", (state,), differentiated)
    z = _gemm_reduce_scatter(spec, "forward", (x_sides.by_rows,), rights, bias)
    by_cols = x_sides.by_cols if for_kernel else None
    return z, Residuals(_named(by_cols, "activation"), kept, (state,), _named((x_sides.amax, *amaxes), "activation"))


def _reduce_scatter_backward(spec: CollectiveSpec, residuals: Residuals, dz):
    (dtype,), (state,) = spec.kernel_dtypes, residuals.states
    dx = gathered = None
    for_kernel = residuals.activation is not None and dtype is not None
    sides = sides_of(
        spec, "gradient", dz, (spec.leading, spec.rows), "rows", state,
        by_cols=for_kernel, gathered=True,
    )  # fmt: skip
    dbias = jnp.sum(dz.astype(jnp.float32), axis=(0, 1)) if spec.biased[0] else None
    if kernels := _for_dgrad(spec, residuals.kernels):
        parts = travelling(sides.by_cols) if for_kernel else ()
        keep = for_kernel and not parts
        (dx,), data, parts = _all_gather_gemm(spec, "dgrad", sides.by_rows, kernels, (None,), parts, keep)
        dx = dx.reshape(spec.leading, spec.size, spec.rows, dx.shape[-1])
        gathered = with_parts(sides.by_cols, data, parts) if for_kernel else None
    elif for_kernel:
        gathered = gather(spec, sides.by_cols)
    dy = None if gathered is None else in_order(spec, gathered, square=True)
    dkernel = wgrad(spec, residuals.activation, dy, dtype)
    return dx, dkernel, dbias, _next_state(spec, state, (*residuals.amaxes, sides.amax))


_reduce_scatter.defvjp(_reduce_scatter_forward, _reduce_scatter_backward, symbolic_zeros=True)


# ------------------------------------------------------------------------------------------------------ what both share


def _validate_differentiated(spec: CollectiveSpec, x, kernels, states) -> None:
    """Checks that operands have what the gradients that are asked for read, and that states are advanced."""

    def perturbed(operand) -> bool:
        return not isinstance(operand, QuantizedArray) and operand.perturbed

    if perturbed(x):
        for i, kernel in enumerate(kernels):
            if isinstance(kernel, QuantizedArray) and kernel.data is None:
                name = f"kernel[{i}]" if kernels[1:] else "kernel"
                raise ValueError(
                    f"{name} has no data copy, which the gradient with respect to x reads; quantize it with "
                    "copies='both'"
                )
    for kernel, state in zip(kernels, states, strict=True):
        _fp8.validate_advanced(state, trained=perturbed(kernel))
    if not any(map(perturbed, kernels)):
        return
    tensor_is_gathered = spec.name == "all_gather_matmul" and spec.scaling == "tensor"
    if isinstance(x, QuantizedArray) and x.transposed is None and not tensor_is_gathered:
        raise ValueError(
            "x has no transposed copy, which the gradient with respect to kernel reads; quantize it with copies='both'"
        )
    if spec.blocks_span_shards:
        raise ValueError(
            f"x has {spec.rows} rows for each device; the gradient of kernel with block scaling needs a multiple of "
            f"{BLOCK}: pad them, or use CurrentScaling or RowwiseScaling"
        )


def _kernels(spec: CollectiveSpec, kernels, split: Literal["rows", "cols"], states, differentiated: bool):
    """(rhs of the product for each kernel, what the gradient of x reads of it, its amax)."""
    rights, kept, amaxes = [], [], []
    for kernel, state in zip(kernels, states, strict=True):
        amax = None
        if spec.recipe is None:
            right, left = GemmOperand(kernel.astype(spec.x_dtype), summed_first=True), GemmOperand(kernel)
        else:
            left, right, amax, _ = sides_of(
                spec, "kernel", kernel, kernel.shape[:1], split, state, by_rows=differentiated
            )
            if not isinstance(kernel, QuantizedArray):  # as an argument it is there anyway
                left = _named(left, "kernel")
        rights.append(right)
        kept.append(left)
        amaxes.append(amax)
    return tuple(rights), tuple(kept), tuple(amaxes)


def _for_dgrad(spec: CollectiveSpec, kernels: tuple[GemmOperand | None, ...]) -> tuple[GemmOperand, ...]:
    """Kept kernels as products with gradients read them; none where x has no gradient."""
    found = tuple(kernel for kernel in kernels if kernel is not None)
    if spec.x_is_quantized or len(found) < len(kernels):
        return ()
    if spec.recipe is not None:
        return found
    return tuple(dataclasses.replace(kernel, data=kernel.data.astype(spec.x_dtype)) for kernel in found)


def _regathered(spec: CollectiveSpec, activation: GemmOperand | None, dy: Array) -> GemmOperand | None:
    """All rows of x for the gradients of kernels."""
    if activation is not None and spec.residual == "shard":
        # Not before dy is there, and not as one with the gather of the forward pass: what it gathers would be kept.
        data, _ = lax.optimization_barrier((activation.data, dy))
        activation = gather(spec, dataclasses.replace(activation, data=data))
    return None if activation is None else in_order(spec, activation, square=False)


def _named(tree: Any, role: Role) -> Any:
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, f"te_collective_{role}"), tree)


def _next_state(spec: CollectiveSpec, state: Any, amaxes: tuple[Array | None, ...]) -> DelayedScalingState | None:
    """The state after this use of it, with the amaxes of x, kernel and dy; those that are None were not observed."""
    return None if state is None else _fp8.next_state(state, dict(zip(_fp8.ROLES, amaxes, strict=True)), spec.axis_name)
