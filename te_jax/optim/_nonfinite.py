"""Steps that are left out where a gradient overflowed, and the scale of the loss that keeps float16 from it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.core import Tracer

from te_jax._core.arguments import is_finite_number
from te_jax._core.types import PyTree
from te_jax.sharding import AxisName, mapped_axes


class SkipNonfiniteState(NamedTuple):
    """State of `skip_nonfinite`."""

    skipped: Array  # int32 (): steps left out so far
    inner: PyTree  # state of the wrapped transform


class DynamicLossScaleState(NamedTuple):
    """State of `dynamic_loss_scale`."""

    loss_scale: Array  # float32 (): what the next loss is multiplied by
    finite_steps: Array  # int32 (): steps since the scale changed
    skipped: Array  # int32 (): steps left out so far
    inner: PyTree  # state of the wrapped transform


def skip_nonfinite(
    inner: optax.GradientTransformation, *, axis_name: AxisName | None = None
) -> optax.GradientTransformationExtraArgs:
    """Skips a step whose gradients have an infinity or NaN: updates are zero, and the state stays as it was.

    So the count of steps, schedules and random bits stay too. The device decides by selection, so that the host does
    not wait; with `jax.lax.cond` it would on a GPU. It costs another read of the gradients.

    Args:
      inner: the whole transform: one after it, such as weight decay, would not be skipped.
      axis_name: mesh axes over which gradients are split, in `shard_map` or `pmap`: all shards decide alike.

    Returns:
      The transform.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> SkipNonfiniteState:
        return SkipNonfiniteState(jnp.zeros([], jnp.int32), inner.init(params))

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object):
        finite = _all_finite(updates, axis_name)
        updates, inner_state = _update_if(finite, inner.update(updates, state.inner, params, **extra_args), state.inner)
        return updates, SkipNonfiniteState(state.skipped + (~finite).astype(jnp.int32), inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def dynamic_loss_scale(
    inner: optax.GradientTransformation,
    initial_scale: float = 2.0**15,
    *,
    growth_interval: int = 2000,
    factor: float = 2.0,
    smallest: float = 1.0,
    largest: float = 2.0**24,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Divides gradients by the scale of the loss, and finds that scale: for training in float16.

    If gradients overflow, scaled or unscaled, it skips the step like `skip_nonfinite`, and divides the scale by
    `factor`; after `growth_interval` steps without overflow it multiplies the scale by `factor`. The loss is multiplied
    by `loss_scale(state)`:

        loss_of = lambda params: loss(params, batch) * te_jax.optim.loss_scale(state)

    Args:
      inner: the transform. It gets unscaled gradients in float32, so its updates are float32.
      initial_scale: of the first step.
      growth_interval: steps, at least 1 and below 2**31.
      factor: at least 1; a power of two changes no digit of a gradient.
      smallest, largest: between which the scale stays, both above 0.
      axis_name: see `skip_nonfinite`.

    Returns:
      The transform.

    Raises:
      ValueError: a number is out of range.

    References:
      Micikevicius et al., Mixed precision training, https://arxiv.org/abs/1710.03740.
    """
    for name, value, least, rule in (
        ("initial_scale", initial_scale, 2.0**-126, "a finite number above 0 that float32 holds"),
        ("growth_interval", growth_interval, 1, "a number of steps, at least 1 and below 2**31"),
        ("factor", factor, 1, "a finite number of at least 1, such as 2.0"),
        ("smallest", smallest, 2.0**-126, "a finite number above 0 that float32 holds"),
        ("largest", largest, 2.0**-126, "a finite number above 0 that float32 holds"),
    ):
        if isinstance(value, Tracer):
            continue
        in_range = is_finite_number(value) and least <= float(value) <= float(np.finfo(np.float32).max)
        if not in_range or (name == "growth_interval" and (value % 1 or value >= 2**31)):
            raise ValueError(f"{name} is {value!r}; it must be {rule}")
    if not (isinstance(smallest, Tracer) or isinstance(largest, Tracer)) and float(smallest) > float(largest):
        raise ValueError(f"smallest is {smallest!r}; it must not be above largest, which is {largest!r}")
    if not any(isinstance(x, Tracer) for x in (smallest, initial_scale, largest)) and not (
        float(smallest) <= float(initial_scale) <= float(largest)
    ):
        raise ValueError(
            f"initial_scale is {initial_scale!r}; it must be in [smallest, largest]: {smallest!r}, {largest!r}"
        )
    inner = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> DynamicLossScaleState:
        # Two arrays, not one twice, which could not be donated.
        steps, skipped = jnp.zeros([], jnp.int32), jnp.zeros([], jnp.int32)
        return DynamicLossScaleState(jnp.asarray(initial_scale, jnp.float32), steps, skipped, inner.init(params))

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object):
        unscaled = jax.tree.map(lambda g: g.astype(jnp.float32) / state.loss_scale, updates)
        finite = _all_finite(unscaled, axis_name)  # after what may overflow: scales below 1, and float64 gradients
        updates, inner_state = _update_if(
            finite, inner.update(unscaled, state.inner, params, **extra_args), state.inner
        )
        ratio, low, high = (jnp.asarray(number, jnp.float32) for number in (factor, smallest, largest))
        steps = jnp.where(finite, state.finite_steps + 1, 0)
        grows = steps >= jnp.asarray(growth_interval, jnp.int32)
        grown = jnp.where(grows, state.loss_scale * ratio, state.loss_scale)
        scale = jnp.clip(jnp.where(finite, grown, state.loss_scale / ratio), low, high)
        steps = jnp.where(grows, 0, steps)
        return updates, DynamicLossScaleState(scale, steps, state.skipped + (~finite).astype(jnp.int32), inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def loss_scale(state: PyTree) -> Array:
    """The factor by which to multiply the loss: float32 scalar.

    Args:
      state: of an optimizer with a `dynamic_loss_scale` somewhere in it.

    Raises:
      ValueError: there is none, or more than one.
    """
    scales = [
        leaf.loss_scale
        for leaf in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, DynamicLossScaleState))
        if isinstance(leaf, DynamicLossScaleState)
    ]
    if len(scales) != 1:
        raise ValueError(f"state holds {len(scales)} loss scales: it must come from one `dynamic_loss_scale`")
    return scales[0]


def _all_finite(updates: PyTree, axis_name: AxisName | None) -> Array:
    flags = [jnp.asarray(True), *(jnp.all(jnp.isfinite(gradient)) for gradient in jax.tree.leaves(updates))]
    # As integers: of flags XLA makes a chain of ands, which it repeats in the loops of all leaves, for each all flags.
    finite = jnp.min(jnp.stack(flags).astype(jnp.int32))
    if axis_name not in (None, (), []):
        finite = lax.pmin(finite, mapped_axes(axis_name)[0])
    return finite > 0


def _update_if(finite: Array, update: tuple[PyTree, PyTree], state: PyTree) -> tuple[PyTree, PyTree]:
    steps, after = update
    steps = jax.tree.map(lambda step: jnp.where(finite, step, jnp.zeros_like(step)), steps)
    return steps, jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, state)
