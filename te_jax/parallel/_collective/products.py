"""Collective products and their derivatives, on canonical shapes: the gradient of one is the other."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values

from te_jax import sharding
from te_jax._core.types import FP8_ALIGNMENT
from te_jax.ops import _fp8
from te_jax.ops.gemm import gemm
from te_jax.parallel._collective.call import Call, scaling_of, validate_rows_of_blocks
from te_jax.parallel._collective.sides import (
    in_order,
    left_side,
    quantize_matrix,
    transposed_codes,
    transposed_side,
    travelling_parts,
)
from te_jax.parallel.transports import p2p, ring, xla
from te_jax.parallel.transports.exchange import Exchange, Operand, Transport, all_gather, dot, quantized
from te_jax.quantized import QuantizedArray
from te_jax.recipe import DelayedScalingState, Product

_NAMES = {"activation": "te_collective_activation", "kernel": "te_collective_kernel"}


# Under jit even when called eagerly, or while it is disabled: shard_map does not run rules of derivatives that tell
# apart what is asked for.
def all_gather_products(call: Call, x, weights, biases, states) -> Any:
    with jax.disable_jit(False):
        return _all_gather_products(call, x, weights, biases, states)


def reduce_scatter_product(call: Call, x, weight, bias, state) -> Any:
    with jax.disable_jit(False):
        return _reduce_scatter_product(call, x, weight, bias, state)


@functools.partial(jax.jit, static_argnums=0, inline=sharding.INLINE)
def _all_gather_products(call: Call, x, weights, biases, states) -> Any:
    return _gathered_products(call, x, weights, biases, states)


@functools.partial(jax.jit, static_argnums=0, inline=sharding.INLINE)
def _reduce_scatter_product(call: Call, x, weight, bias, state) -> Any:
    return _scattered_product(call, x, weight, bias, state)


class _Residuals(NamedTuple):
    """What is kept for the backward pass. What is not needed is there without elements: JAX may run the backward pass
    of one choice of derivatives with the tree of another's residuals, so only shapes may depend on the choice."""

    wanted: tuple[Array, ...]  # of x, of each of the weights, biases and states: (1, 0) for yes, (0, 0) for no
    dtypes: _Dtypes
    activation: Array  # what dw reads of x
    activation_scale_inv: Array | None
    weights: tuple[Operand, ...]  # right sides that sum over N
    states: tuple[DelayedScalingState | None, ...]  # of each of the weights
    amaxes: tuple[Array, ...]  # of x and of each of the weights


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Dtypes:
    """Of the weights."""

    weights: tuple[np.dtype, ...]


def as_residual(flag: bool) -> Array:
    return jnp.zeros((int(flag), 0), jnp.int8)


def from_residual(flag: Array) -> bool:
    return len(flag) == 1


class _Wanted(NamedTuple):
    """Which gradients are asked for."""

    x: bool
    weights: tuple[bool, ...]
    biases: tuple[bool, ...]
    states: tuple[bool, ...]

    @classmethod
    def of(cls, x, weights, biases, states) -> _Wanted:
        """From the operands of a forward rule. What was quantized before has no gradient."""

        def perturbed(operand) -> bool:
            leaves = jax.tree.leaves(operand)
            return not isinstance(operand, QuantizedArray) and any(leaf.perturbed for leaf in leaves)

        return cls(perturbed(x), *(tuple(map(perturbed, operands)) for operands in (weights, biases, states)))

    def as_flags(self) -> tuple[Array, ...]:
        return tuple(map(as_residual, (self.x, *self.weights, *self.biases, *self.states)))

    @classmethod
    def from_flags(cls, flags: tuple[Array, ...]) -> _Wanted:
        first, *rest = map(from_residual, flags)
        count = len(rest) // 3
        return cls(first, tuple(rest[:count]), tuple(rest[count : 2 * count]), tuple(rest[2 * count :]))


_NOTHING = _Wanted(False, (), (), ())


def _all_gather_gemm(call: Call, product: Product, x: Operand, weights, biases, extras=(), *, keep_gathered=False):
    exchange = call.exchange(product)
    transport = _transport(call, exchange, "all_gather", (x,), weights)
    return transport.all_gather_gemm(exchange, x, weights, biases, extras, keep_gathered)


def _gemm_reduce_scatter(call: Call, product: Product, xs, weights, bias: Array | None) -> Array:
    exchange = call.exchange(product)
    transport = _transport(call, exchange, "reduce_scatter", xs, weights)
    return transport.gemm_reduce_scatter(exchange, xs, weights, bias)


def _transport(call: Call, exchange: Exchange, kind: Literal["all_gather", "reduce_scatter"], xs, weights) -> Transport:
    name = call.transport
    if call.size == 1:
        name = "ring"  # without any step it is the product alone
    elif name == "auto":
        name = "p2p" if p2p.is_worthwhile(exchange, xs, weights, gathers=kind == "all_gather") else "xla"
    return cast(Transport, {"xla": xla, "ring": ring, "p2p": p2p}[name])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered_products(call: Call, x, weights: tuple[Any, ...], biases: tuple[Any, ...], states: tuple[Any, ...]):
    """(products [A, D·R, N], gathered x [A, D·R, K] where it is a result)"""
    return _gathered_products_and_residuals(call, x, weights, biases, states, _NOTHING)[0]


def _gathered_products_forward(call: Call, *operands):
    x, weights, biases, states = custom_vjp_primal_tree_values(operands)
    return _gathered_products_and_residuals(call, x, weights, biases, states, _Wanted.of(*operands))


def _gathered_products_and_residuals(call: Call, x, weights, biases, states, wanted: _Wanted):
    dtypes = _Dtypes(tuple(np.dtype(weight.dtype) for weight in weights))
    for_w = any(wanted.weights)
    keep = for_w and call.residual == "gathered"
    if call.recipe is None:
        rights = tuple(Operand(weight.astype(x.dtype), summed_first=True) for weight in weights)
        products, gathered, _ = _all_gather_gemm(
            call, "forward", Operand(x), rights, biases, keep_gathered=keep or call.gather_result
        )
        activation, scale_inv = gathered if keep else x if for_w else _absent(x.dtype), None
        kept = tuple(Operand(weight if wanted.x else _absent(weight.dtype)) for weight in weights)
        results = products, gathered if call.gather_result else None
        return results, _residuals(wanted, dtypes, activation, scale_inv, kept, states)

    rows, cols = {"rows": call.axis_name}, {"cols": call.axis_name}
    # One scale for all of the tensor: the gathered codes are transposed where that is read.
    travelling = for_w and call.scaling != "tensor"
    observed = any(wanted.states)
    x8, x_amax, _ = quantize_matrix(
        call, "activation", x, rows, data=True, transposed=travelling, gathered=True, state=states[0], observed=observed
    )
    if for_w:
        validate_rows_of_blocks(call)
    quantized_weights, amaxes = [], [x_amax]
    for weight, state in zip(weights, states, strict=True):
        weight8, amax, _ = quantize_matrix(
            call, "kernel", weight, cols, data=wanted.x, transposed=True, state=state, observed=observed
        )
        quantized_weights.append(weight8)
        amaxes.append(amax)
    products, gathered, extras = _all_gather_gemm(
        call,
        "forward",
        left_side(x8, call.leading, call.rows),
        tuple(transposed_side(weight) for weight in quantized_weights),
        biases,
        travelling_parts(call, x8) if travelling and keep else (),
        keep_gathered=keep and not travelling,
    )
    assert x8.data is not None
    if not for_w:
        activation, scale_inv = _absent(x8.data.dtype), _absent(jnp.float32)
    elif travelling:
        activation, scale_inv = (*(extras if keep else travelling_parts(call, x8)), x8.transposed_scale_inv)[:2]
    else:
        activation, scale_inv = gathered if keep else left_side(x8, call.leading, call.rows).data, x8.scale_inv
    names = [f"w[{i}]" for i in range(len(weights))] if weights[1:] else ["w"]
    kept = tuple(
        _kept_weight(name, weight, weight8, wanted.x)
        for name, weight, weight8 in zip(names, weights, quantized_weights, strict=True)
    )
    return (products, None), _residuals(wanted, dtypes, activation, scale_inv, kept, states, amaxes)


def _gathered_products_backward(call: Call, residuals: _Residuals, cotangents):
    dys, dgathered = cotangents
    wanted = _Wanted.from_flags(residuals.wanted)
    seen = [i for i, dy in enumerate(dys) if not isinstance(dy, SymbolicZero)]
    A, D, R = call.leading, call.size, call.rows
    dx: Any = None
    dweights: list[Any] = [None] * len(dys)
    dbiases: list[Any] = [None] * len(dys)
    dstates: list[Any] = [None] * len(dys)
    amaxes: list[Any] = [None] * len(dys)
    lefts, rights = [], []
    whole = _whole_activation(call, residuals, dys[seen[0]]) if any(wanted.weights[i] for i in seen) else None
    for i in seen:
        dy, for_w, for_bias = dys[i], wanted.weights[i], wanted.biases[i]
        dtype = residuals.dtypes.weights[i]
        if call.recipe is None:
            if for_bias:
                dbiases[i] = jnp.sum(dy.astype(jnp.float32), axis=(0, 1))
            dy = dy.astype(call.x_dtype)
            lefts.append(Operand(dy.reshape(A, D, R, dy.shape[-1])))
            if for_w:
                assert whole is not None
                dweights[i] = dot(whole.data, dy, (0, 1), (0, 1), dtype)
        elif wanted.x or for_w or wanted.states[i]:
            dy8, amaxes[i], dbiases[i] = quantize_matrix(
                call,
                "gradient",
                dy,
                {"cols": call.axis_name},
                data=wanted.x or not for_w,
                transposed=for_w,
                with_dbias=for_bias,
                state=residuals.states[i],
                observed=wanted.states[i],
            )
            if wanted.x:
                lefts.append(left_side(dy8, A, D, R))
            if for_w:
                assert whole is not None
                dweights[i] = _wgrad(call, whole, transposed_side(dy8), dtype)
        elif for_bias:
            dbiases[i] = jnp.sum(dy.astype(jnp.float32), axis=(0, 1))
        rights.append(_like_left(residuals.weights[i], call))
    if wanted.x:
        if seen:
            dx = _gemm_reduce_scatter(call, "dgrad", tuple(lefts), tuple(rights), None)
        if dgathered is not None and not isinstance(dgathered, SymbolicZero):
            more = lax.psum_scatter(dgathered.astype(jnp.float32), call.axis_name, scatter_dimension=1, tiled=True)
            dx = (more if dx is None else dx.astype(jnp.float32) + more).astype(call.x_dtype)
    for i, state in enumerate(residuals.states):
        if wanted.states[i]:
            dstates[i] = _next_state(call, state, (residuals.amaxes[0], residuals.amaxes[i + 1], amaxes[i]))
    return dx, tuple(dweights), tuple(dbiases), tuple(dstates)


_gathered_products.defvjp(_gathered_products_forward, _gathered_products_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scattered_product(call: Call, x, weight, bias: Array | None, state: DelayedScalingState | None) -> Array:
    """[A, R, N]"""
    return _scattered_product_and_residuals(call, x, weight, bias, state, _NOTHING)[0]


def _scattered_product_forward(call: Call, x, weight, bias, state):
    wanted = _Wanted.of(x, (weight,), (bias,), (state,))
    x, weight, bias, state = custom_vjp_primal_tree_values((x, weight, bias, state))
    return _scattered_product_and_residuals(call, x, weight, bias, state, wanted)


def _scattered_product_and_residuals(call: Call, x, weight, bias: Array | None, state, wanted: _Wanted):
    dtypes = _Dtypes((np.dtype(weight.dtype),))
    for_w = any(wanted.weights)
    if call.recipe is None:
        right = Operand(weight.astype(x.dtype), summed_first=True)
        z = _gemm_reduce_scatter(call, "forward", (Operand(x),), (right,), bias)
        kept = Operand(weight if wanted.x else _absent(weight.dtype))
        return z, _residuals(wanted, dtypes, x if for_w else _absent(x.dtype), None, (kept,), (state,))

    if for_w:
        validate_rows_of_blocks(call)
    rows, cols = {"rows": call.axis_name}, {"cols": call.axis_name}
    observed = any(wanted.states)
    x8, x_amax, _ = quantize_matrix(
        call, "activation", x, cols, data=True, transposed=for_w, state=state, observed=observed
    )
    weight8, amax, _ = quantize_matrix(
        call, "kernel", weight, rows, data=wanted.x, transposed=True, state=state, observed=observed
    )
    left = left_side(x8, call.leading, call.size, call.rows)
    z = _gemm_reduce_scatter(call, "forward", (left,), (transposed_side(weight8),), bias)
    activation, scale_inv = x8.transposed, x8.transposed_scale_inv
    if not for_w or activation is None:
        activation, scale_inv = _absent(left.data.dtype), _absent(jnp.float32)
    kept = _kept_weight("w", weight, weight8, wanted.x)
    return z, _residuals(wanted, dtypes, activation, scale_inv, (kept,), (state,), (x_amax, amax))


def _scattered_product_backward(call: Call, residuals: _Residuals, dz):
    if isinstance(dz, SymbolicZero):
        return None, None, None, None
    wanted = _Wanted.from_flags(residuals.wanted)
    (for_w,), (for_bias,), (dtype,) = wanted.weights, wanted.biases, residuals.dtypes.weights
    (for_state,), (state,) = wanted.states, residuals.states
    dbias = jnp.sum(dz.astype(jnp.float32), axis=(0, 1)) if for_bias else None
    dx = dweight = dstate = None
    gathered: Any = None
    extras: tuple[Array, ...] = ()
    if not (wanted.x or for_w or for_state):
        return None, None, dbias, None
    dz8 = None
    if call.recipe is None:
        left = Operand(dz.astype(call.x_dtype))
    else:
        travelling = for_w and call.scaling != "tensor"
        dz8, amax, _ = quantize_matrix(
            call,
            "gradient",
            dz,
            {"rows": call.axis_name},
            data=wanted.x or not travelling,
            transposed=travelling,
            gathered=True,
            state=state,
            observed=for_state,
        )
        if for_state:
            dstate = _next_state(call, state, (*residuals.amaxes, amax))
        left = left_side(dz8, call.leading, call.rows) if dz8.data is not None else None
        extras = travelling_parts(call, dz8) if travelling else ()
    keep = for_w and not extras
    if wanted.x:
        assert left is not None
        right = _like_left(residuals.weights[0], call)
        (dx,), gathered, extras = _all_gather_gemm(call, "dgrad", left, (right,), (None,), extras, keep_gathered=keep)
    elif keep:
        assert left is not None
        gathered = all_gather(left.data, call.axis_name, axis=1, tiled=True)
    else:
        extras = tuple(all_gather(extra, call.axis_name) for extra in extras)
    if for_w and call.recipe is None:
        x = residuals.activation
        x = x.reshape(call.leading, call.size * call.rows, x.shape[-1])
        dweight = dot(x, gathered, (0, 1), (0, 1), dtype)
    elif for_w:
        assert dz8 is not None
        if extras:
            right = in_order(call, (*extras, dz8.transposed_scale_inv)[:2], square=True)
        else:
            right = transposed_codes(gathered, dz8.scale_inv)
        x8 = Operand(residuals.activation, residuals.activation_scale_inv, call.scaling)
        dweight = _wgrad(call, x8, right, dtype)
    if dx is not None:
        dx = dx.reshape(call.leading, call.size, call.rows, dx.shape[-1])
    return dx, dweight, dbias, dstate


_scattered_product.defvjp(_scattered_product_forward, _scattered_product_backward, symbolic_zeros=True)


def _absent(dtype) -> Array:
    return jnp.zeros((0,), dtype)


def _residuals(
    wanted: _Wanted, dtypes, activation: Any, scale_inv, weights: tuple[Operand, ...], states, amaxes=()
) -> _Residuals:
    name = _NAMES["activation"]
    return _Residuals(
        wanted.as_flags(),
        dtypes,
        checkpoint_name(activation, name),
        None if scale_inv is None else checkpoint_name(scale_inv, name),
        weights,
        states,
        tuple(_absent(jnp.float32) if amax is None else checkpoint_name(amax, name) for amax in amaxes),
    )


def _next_state(call: Call, state: Any, amaxes: tuple[Any, ...]) -> DelayedScalingState:
    """What follows from the largest magnitudes of x, w and dy; those without elements or None were not observed."""
    seen: Any = {
        role: amax if amax is not None and amax.ndim == 0 else None
        for role, amax in zip(_fp8.ROLES, amaxes, strict=True)
    }
    return _fp8.next_state(state, seen, call.axis_name)


def _kept_weight(name: str, weight, weight8: QuantizedArray, wanted: bool) -> Operand:
    """The copy that products over N read, with a name unless it is an argument."""
    given = isinstance(weight, QuantizedArray)
    scaling = scaling_of(weight8.scaling)
    if not wanted:
        assert weight8.transposed is not None
        return Operand(_absent(weight8.transposed.dtype), _absent(jnp.float32), scaling)
    if weight8.data is None:
        raise ValueError(
            f"{name} has no data copy, which the gradient with respect to x reads; quantize it with copies='both'"
        )
    kept = Operand(weight8.data, weight8.scale_inv, scaling)
    return kept if given else jax.tree.map(lambda leaf: checkpoint_name(leaf, _NAMES["kernel"]), kept)


def _like_left(weight: Operand, call: Call) -> Operand:
    """A kept right side in the dtype of plain left sides."""
    return dataclasses.replace(weight, data=weight.data.astype(call.x_dtype)) if weight.scaling == "none" else weight


def _whole_activation(call: Call, residuals: _Residuals, dy: Array) -> Operand:
    """What dw reads of x: plain [A, D·R, K], or FP8 [K, A·D·R]."""
    activation, scale_inv = residuals.activation, residuals.activation_scale_inv
    shard = call.residual == "shard"
    if shard:
        # Not before dy is there, and not as one with the gather of the forward pass: what it gathers would be kept.
        activation, _ = lax.optimization_barrier((activation, dy))
    if call.scaling in ("none", "tensor"):
        if shard:
            activation = all_gather(activation, call.axis_name, axis=1, tiled=True)
        return Operand(activation) if scale_inv is None else transposed_codes(activation, scale_inv)
    assert scale_inv is not None
    if shard:
        activation = all_gather(activation, call.axis_name)
        scale_inv = all_gather(scale_inv, call.axis_name) if call.scaling == "block" else scale_inv
    return in_order(call, (activation, scale_inv), square=False)


def _wgrad(call: Call, x: Operand, dy: Operand, dtype: np.dtype) -> Array:
    """x · dyᵀ of FP8 [K, T] and [N, T]: [K, N]."""
    padding = -x.data.shape[1] % FP8_ALIGNMENT  # zeros change neither the sum nor the scales
    x, dy = (dataclasses.replace(a, data=jnp.pad(a.data, ((0, 0), (0, padding)))) for a in (x, dy))
    return gemm(
        quantized(x, left=True),
        quantized(dy, left=False),
        rhs_contracting="cols",
        out_dtype=dtype,
        fast_accumulation=call.is_fast("wgrad"),
        implementation=call.implementation,
    )
