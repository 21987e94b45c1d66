"""From one Adam's state to another's, so that a run can change its dtypes or its optimizer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from te_jax.optim import _moments
from te_jax.optim._adam import ScaleByAdamState
from te_jax.optim._master import MasterWeightsState, convert_masters
from te_jax.optim._nonfinite import DynamicLossScaleState, SkipNonfiniteState

_ADAM = (ScaleByAdamState, optax.ScaleByAdamState)
_WRAPPERS = (MasterWeightsState, SkipNonfiniteState, DynamicLossScaleState)


def convert_state(optimizer: optax.GradientTransformation, state: Any, params: Any) -> Any:
    """The state with which an optimizer carries on where another Adam stopped.

    Moments are rounded to nearest where the new dtype is narrower, and counts and schedules are kept. Masters are taken
    over, or begin as the parameters are; those of the former state are dropped where the new one has none.

    Args:
      optimizer: the one to carry on with: of this module or of optax, of the same composition apart from
        `master_weights`, `skip_nonfinite` and `dynamic_loss_scale`.
      state: of the one that stopped: of this module or of optax.
      params: the parameters that both have.

    Returns:
      A state as `optimizer.init(params)` returns it.

    Raises:
      ValueError: the two states are composed differently.

    Examples:
      >>> import jax.numpy as jnp, optax, te_jax.optim
      >>> params = {"w": jnp.ones(4)}
      >>> state = optax.adamw(1e-3).init(params)
      >>> optimizer = te_jax.optim.adamw(1e-3, mu_dtype=jnp.bfloat16, nu_dtype=jnp.bfloat16)
      >>> te_jax.optim.convert_state(optimizer, state, params)[0].nu["w"].dtype
      dtype(bfloat16)
    """
    return _convert(optimizer.init(params), state, params)


def _convert(target: Any, source: Any, params: Any) -> Any:
    if isinstance(target, _ADAM) and isinstance(source, _ADAM):
        return _convert_adam(target, source)
    if isinstance(target, _WRAPPERS) or isinstance(source, _WRAPPERS):
        found = {}
        while isinstance(source, _WRAPPERS):
            found[type(source)], source = source, source.inner
        return _convert_wrapped(target, found, source, params)
    if isinstance(target, dict) and isinstance(source, dict):
        return {key: _convert(target[key], source[key], params) if key in source else target[key] for key in target}
    if isinstance(target, tuple | list) and isinstance(source, tuple | list) and len(target) == len(source):
        parts = [_convert(one, other, params) for one, other in zip(target, source, strict=True)]
        kind: Any = type(target)
        return kind(*parts) if hasattr(target, "_fields") else kind(parts)
    if jax.tree.structure(target) != jax.tree.structure(source):
        raise ValueError(
            f"state has {jax.tree.structure(source)} where the optimizer has {jax.tree.structure(target)}: "
            "both must be composed of the same transforms"
        )
    return jax.tree.map(lambda new, old: jnp.asarray(old).astype(new.dtype), target, source)


def _convert_wrapped(target: Any, found: dict[type, Any], source: Any, params: Any) -> Any:
    if not isinstance(target, _WRAPPERS):
        return _convert(target, source, params)
    inner = _convert_wrapped(target.inner, found, source, params)
    before = found.get(type(target))
    if before is None:
        return target._replace(inner=inner)
    if isinstance(target, MasterWeightsState):
        return MasterWeightsState(convert_masters(target.master, before.master, params), inner)
    return before._replace(inner=inner)


def _convert_adam(target: Any, source: Any) -> Any:
    def convert(name: str) -> tuple[Any, Any]:
        old, new = getattr(source, name), getattr(target, name)
        old_bounds = getattr(source, f"{name}_bounds", None)
        leaves, structure = jax.tree.flatten(old)
        dtypes = [leaf.dtype for leaf in structure.flatten_up_to(new)]
        scaled = getattr(target, f"{name}_bounds", None) is not None
        if dtypes == [leaf.dtype for leaf in leaves] and scaled == (old_bounds is not None):
            return old, old_bounds
        bounds = [None] * len(leaves) if old_bounds is None else structure.flatten_up_to(old_bounds)
        wide = [
            _moments.decode(leaf, bound, np.promote_types(leaf.dtype, np.float32) if bound is None else "float32")
            for leaf, bound in zip(leaves, bounds, strict=True)
        ]
        largest = [_moments.maxima(x) if scaled else None for x in wide]
        values = [
            _moments.encode(x, bound, dtype, None, positive=name == "nu")
            for x, bound, dtype in zip(wide, largest, dtypes, strict=True)
        ]
        return structure.unflatten(values), structure.unflatten(largest) if scaled else None

    (mu, mu_bounds), (nu, nu_bounds) = convert("mu"), convert("nu")
    count = jnp.asarray(source.count).astype(np.int32)
    if isinstance(target, ScaleByAdamState):
        return ScaleByAdamState(count, mu, nu, mu_bounds, nu_bounds)
    return optax.ScaleByAdamState(count, mu, nu)
