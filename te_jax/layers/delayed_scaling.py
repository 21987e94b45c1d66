"""The state of delayed scaling that a layer holds, as variables with names."""

from __future__ import annotations

from collections.abc import Mapping

from jax import Array

from te_jax.recipe import DelayedScaling, DelayedScalingState

USES = "uses"
STATE_NAMES = ("activation_amax_history", "kernel_amax_history", "gradient_amax_history", USES)


def initial_state(recipe: DelayedScaling) -> dict[str, Array]:
    """The state of a layer between steps, by name."""
    state = recipe.init()
    return dict(zip(STATE_NAMES, (state.activation, state.kernel, state.gradient, state.uses), strict=True))


def scaling_state(values: Mapping[str, Array]) -> DelayedScalingState:
    """The state out of what `initial_state` names."""
    return DelayedScalingState(*(values[name] for name in STATE_NAMES))
