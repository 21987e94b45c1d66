"""Recipes and quantized operands of layers, validated; and the state of delayed scaling."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from te_jax import sharding
from te_jax._core.arguments import kind_of
from te_jax.quantized import QuantizedArray
from te_jax.recipe import DelayedScaling, DelayedScalingState, Quantization, Recipe, Role
from te_jax.reference.quantize import amax_of_shards

Copy = Literal["data", "transposed"]
ROLES: tuple[Role, ...] = ("activation", "kernel", "gradient")
_LARGEST_GROWTH = 16.0  # E4M3 holds values at a sixteenth of its range with full precision, down to 2^-10 of the amax


def validate_recipe(recipe: object) -> None:
    """Raises ValueError unless it is a Recipe."""
    if not isinstance(recipe, Recipe):
        raise ValueError(f"recipe is {recipe!r}; it must be a Recipe, such as te_jax.recipe.CurrentScaling(), or None")


def validate_quantized(
    name: str, x: QuantizedArray, recipe: Recipe, role: Role, read: Copy, quantization: Quantization | None = None
) -> None:
    """Checks that an operand was quantized as the recipe says, and has the copy that the forward pass reads.

    Args:
      quantization: where it is not the role's own, but has another transposed_scaling.

    Raises:
      ValueError: it was not.
    """
    if getattr(x, read) is None:
        raise ValueError(f"{name} has no {read} copy, which the forward pass reads; quantize it with copies='both'")
    expected, way_out = recipe.quantization(role), f'recipe.quantization("{role}")'
    if quantization not in (None, expected):
        expected = quantization
        way_out = f"dataclasses.replace({way_out}, transposed_scaling={expected.transposed_scaling!r})"
    if (x.scaling, x.transposed_scaling) != (expected.scaling, expected.transposed_scaling):
        raise ValueError(
            f"{name} has {x.scaling!r} and {x.transposed_scaling!r} scaling, but recipe is {recipe!r}; "
            f"quantize it with {way_out}"
        )
    for codes in (x.data, x.transposed):
        if codes is not None and codes.dtype != expected.dtype:
            raise ValueError(
                f"{name} was quantized to {codes.dtype}, and {role}s of {recipe!r} are {expected.dtype}; quantize it "
                f"with {way_out}"
            )


# -------------------------------------------------------------------------------------------- state of delayed scaling


def validate_state(recipe: Recipe | None, state: object, name: str = "scaling_state") -> None:
    """Checks that a state is there where the recipe has one, of the shape and dtype that it needs, and only there.

    Raises:
      ValueError: it is not.
    """
    if not isinstance(recipe, DelayedScaling):
        if state is not None:
            raise ValueError(f"{name} is given, but recipe is {recipe!r}; only DelayedScaling has a state")
        return
    if not isinstance(state, DelayedScalingState):
        raise ValueError(f"{name} is {kind_of(state)}; DelayedScaling needs a DelayedScalingState, first recipe.init()")
    for field, shape in (*((role, (recipe.history_len,)) for role in ROLES), ("uses", ())):
        x = getattr(state, field)
        if np.shape(x) != shape or x.dtype != jnp.float32:
            raise ValueError(
                f"{name} has {field} of shape {np.shape(x)} and dtype {x.dtype}; for history_len={recipe.history_len} "
                f"it must be float32 {shape}: make it with recipe.init()"
            )


def validate_advanced(state: object, trained: bool) -> None:
    """Checks, in a forward rule, that where the kernel is trained the next state is asked for too.

    Args:
      state: with `perturbed` leaves, as custom_vjp hands them over with symbolic_zeros.
      trained: whether the kernel or its accumulator is differentiated.

    Raises:
      ValueError: the state is there and not differentiated.
    """
    leaves = jax.tree.leaves(state)
    if trained and leaves and not any(leaf.perturbed for leaf in leaves):
        raise ValueError(
            "the kernel is differentiated and scaling_state is not, so that its next value is lost and every step "
            "would use the same scales: differentiate with respect to scaling_state too, whose gradient is its next "
            "value (in Linen the collection '_overwrite_with_gradient', in NNX argnums=nnx.DiffState(0, "
            "nnx.Any(nnx.Param, te_jax.nnx.OverwriteWithGradient))), or use a recipe without state"
        )


def next_state(
    state: DelayedScalingState, amaxes: dict[Role, Array | None], state_axis: sharding.Axes = ()
) -> DelayedScalingState:
    """The state after one use of it.

    What was not observed (None), such as a kernel that was quantized before, stays as it is. An amax that is not finite
    on any device is remembered on none.

    Args:
      state: before it.
      amaxes: float32 scalars, combined over all devices along which they vary and the state does not.
      state_axis: these axes, where JAX does not track that.
    """

    def next_history(role: Role) -> Array:
        history, amax = restored(getattr(state, role), state.uses), amaxes.get(role)
        if amax is None:
            return jnp.concatenate([history[:1] / _count(state.uses), history[1:]])
        more = sharding.varying_axes(amax) - sharding.varying_axes(history)
        axes = tuple(sorted(more or frozenset(state_axis) - sharding.tracked_axes(state_axis)))
        return _observe(history, amax_of_shards(amax, axes), state.uses)

    activation, kernel, gradient = map(next_history, ROLES)
    return DelayedScalingState(activation, kernel, gradient, jnp.ones_like(state.uses))


# JAX adds up the cotangents of a state that is used several times: by layers that share it, in a loop, by replicas. The
# older entries of their next states are equal, so dividing by the number of uses, which is added up alike, restores
# them. Of the newest entry the sum remains: no amax exceeds it, so nothing saturates, and scales are smaller than need
# be by at most the number of uses.


def _count(uses: Array) -> Array:
    return jnp.maximum(uses, 1.0)


def restored(history: Array, uses: Array) -> Array:
    is_newest = np.arange(history.shape[0]) == 0
    return history / lax.select(is_newest, jnp.ones_like(history), jnp.broadcast_to(_count(uses), history.shape))


def _observed(history: Array, amax: Array, uses: Array) -> Array:
    """The history after a step in which the amax was `amax`.

    One that is not finite would make scales 1 for as long as it is in the history, and gradients zero for many steps:
    the newest entry comes again instead. A zero is remembered unless nothing else would be left: then the oldest entry
    comes again. What comes again is divided by the number of uses, which all add it. One that is finite and stands out
    would make all other values zero for as long: no entry is more than 16 times the largest before it, if there is one.
    """
    count, before = _count(uses), jnp.max(history)
    amax = jnp.where(jnp.isfinite(amax), amax, history[0] / count)
    amax = jnp.where((amax > 0) | jnp.any(history[:-1] > 0), amax, history[-1] / count)
    amax = jnp.where(before > 0, jnp.minimum(amax, _LARGEST_GROWTH * before), amax)
    return jnp.concatenate([jnp.reshape(amax, (1,)), history[:-1]])


_observe = jax.custom_batching.custom_vmap(_observed)


@_observe.def_vmap
def _(size: int, batched: list[bool], history: Array, amax: Array, uses: Array):
    """Where examples of a vmap share a history, it is one for all of them, with the largest amax."""
    del size
    if batched[0]:
        in_axes = tuple(0 if mapped else None for mapped in batched)
        return jax.vmap(_observed, in_axes=in_axes)(history, amax, uses), True
    return _observe(history, jnp.max(amax, axis=0, initial=0.0), uses), False  # 0 of no examples, as of no tokens


def _is_valid(state: DelayedScalingState, role: Role) -> Array:
    """Whether a state can come from steps: an optimizer that updates it makes it negative, or `uses` a fraction."""
    history, uses = getattr(state, role), state.uses
    return jnp.all((history >= 0) & (history < jnp.inf)) & (uses >= 0) & (uses == lax.floor(uses))


def checked(x: QuantizedArray, state: DelayedScalingState | None, role: Role) -> QuantizedArray:
    """x, with scales of NaN, which reach all that is computed with it, where its scale came from a state that steps
    cannot have made."""
    if state is None:
        return x
    valid = _is_valid(state, role)

    def scale(scale_inv: Array | None) -> Array | None:
        return None if scale_inv is None else jnp.where(valid, scale_inv, jnp.nan)

    return dataclasses.replace(x, scale_inv=scale(x.scale_inv), transposed_scale_inv=scale(x.transposed_scale_inv))
