"""The state of delayed scaling that a layer holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from te_jax.recipe import DelayedScaling, DelayedScalingState

USES = "uses"
STATE_NAMES = ("activation_amax_history", "kernel_amax_history", "gradient_amax_history", USES)


def initial_state(recipe: DelayedScaling) -> dict[str, Array]:
    """What a layer keeps between steps, by name: the amaxes of each role, and how often a step used them."""
    state = recipe.init()
    histories = (state.activation, state.kernel, state.gradient)
    return dict(zip(STATE_NAMES, (*histories, jnp.ones((), jnp.float32)), strict=True))


def scaling_state(values: Mapping[str, Array]) -> DelayedScalingState:
    """The state out of what `initial_state` names."""
    *histories, uses = (values[name] for name in STATE_NAMES)
    return _counted(DelayedScalingState(*histories), uses)


@jax.custom_vjp
def _counted(state: DelayedScalingState, uses: Array) -> DelayedScalingState:
    """The state that was used `uses` times in the step before.

    JAX adds up the cotangents of what is used several times, and so the next states of a layer that is called twice
    inside one gradient. Their number, which is added up alike, takes the sum apart: all but the most recent amaxes are
    equal, so dividing restores them. Of the most recent ones the sum remains, which no value exceeds: scales are then
    smaller than need be, at most by the number of uses, and nothing saturates. With `te_jax.recipe.accumulating` the
    number stays 1, and the maximum is exact.

    Who divides all gradients by a loss scale divides the number too. Below 1 it restores the most recent amaxes as
    well; those of several uses are then their mean.
    """
    return _counted_forward(state, uses)[0]


def _counted_forward(state: DelayedScalingState, uses: Array):
    dtype = uses.dtype
    state, uses = jax.tree.map(lambda x: lax.convert_element_type(x, jnp.float32), (state, uses))
    count = jnp.where(uses > 0, uses, 1.0)

    def restored(history: Array) -> Array:
        return history.at[1:].divide(count).at[0].divide(jnp.minimum(count, 1.0))

    state = jax.tree.map(restored, state)
    newest = jax.tree.map(lambda history: history[0], state)
    return state, (_Static(dtype), newest, jnp.maximum(count, 1.0))


def _counted_backward(residuals, next_state: DelayedScalingState):
    dtype, newest, count = residuals

    def part(history: Array, newest: Array) -> Array:
        # Each use that saw something not finite repeats the newest amax, which is a sum already: its part of it.
        return history.at[0].divide(jnp.where(history[0] == newest, count, 1.0))

    cotangents = (jax.tree.map(part, next_state, newest), jnp.ones((), jnp.float32))
    return jax.tree.map(lambda x: lax.convert_element_type(x, dtype.value), cotangents)


_counted.defvjp(_counted_forward, _counted_backward)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    value: Any
