"""The state of delayed scaling, as operations take it and give its next value as a cotangent."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from te_jax import sharding
from te_jax._core.arguments import kind_of
from te_jax.recipe import DelayedScaling, DelayedScalingState, Recipe, Role, observe
from te_jax.reference.quantize import amax_of_shards


def validate(recipe: Recipe, state: Any, name: str = "scaling_state") -> None:
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
    for role in ("activation", "kernel", "gradient"):
        history = getattr(state, role)
        if history.shape != (recipe.history_len,):
            raise ValueError(
                f"{name} has {role} of shape {history.shape}; for history_len={recipe.history_len} it must be "
                f"({recipe.history_len},): make it with recipe.init()"
            )
        if not jnp.issubdtype(history.dtype, jax.dtypes.extended) and history.dtype != jnp.float32:
            raise ValueError(f"{name} has {role} of dtype {history.dtype}; it must be float32")


def reference_amax(recipe: Recipe, state: DelayedScalingState | None, role: Role) -> Array | None:
    """The magnitude that a role's largest FP8 value stands for; None where the recipe has no state."""
    if not isinstance(recipe, DelayedScaling):
        return None
    assert state is not None
    return recipe.reference_amax(_as_float32(getattr(state, role)))


def next_state(
    state: DelayedScalingState, amaxes: dict[Role, Any], axis_name: tuple[str, ...] = ()
) -> DelayedScalingState:
    """The state after a step. What was not observed, such as a kernel that was quantized before, stays as it is, and
    what is not finite on any device is remembered on none.

    Args:
      state: before it.
      amaxes: the largest magnitudes, float32 scalars: of all devices along which they vary and the state does not.
      axis_name: these axes, where JAX does not track that.
    """

    def next_history(role: Role) -> Array:
        history = getattr(state, role)
        if role not in amaxes:
            return history
        axes = tuple(sorted(sharding.varying_axes(amaxes[role]) - sharding.varying_axes(history))) or _untracked(
            axis_name
        )
        amax = amax_of_shards(amaxes[role], axes)
        return lax.convert_element_type(_observe(_as_float32(history), amax), history.dtype)

    return DelayedScalingState(next_history("activation"), next_history("kernel"), next_history("gradient"))


@jax.custom_batching.custom_vmap
def _observe(history: Array, amax: Array) -> Array:
    """The next history. Where examples of a vmap share one, it is one for all of them, with the largest magnitude."""
    return observe(history, amax)


@_observe.def_vmap
def _(size: int, batched: list[bool], history: Array, amax: Array):
    del size
    if batched[0]:
        return jax.vmap(observe, in_axes=(0, 0 if batched[1] else None))(history, amax), True
    return _observe(history, jnp.max(amax, axis=0, initial=0.0)), False  # 0 of no examples, as of no tokens


def _as_float32(history: Array) -> Array:
    return lax.convert_element_type(history, jnp.float32)


def _untracked(axis_name: tuple[str, ...]) -> tuple[str, ...]:
    """The axes, where JAX does not track itself what varies over them."""
    names = sharding.mapped_axes(axis_name)[0] if axis_name else ()
    return tuple(sorted(frozenset(names) - sharding.tracked_axes(names)))
