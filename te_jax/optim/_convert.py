"""From one Adam's or Muon's state to another's, so that a run can change its dtypes or its optimizer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from optax.contrib import MuonState

from te_jax._core.types import PyTree, T
from te_jax.optim import _moments
from te_jax.optim._adam import ScaleByAdamState
from te_jax.optim._master import MasterWeightsState, convert_masters, is_masked
from te_jax.optim._muon import ScaleByMuonState
from te_jax.optim._nonfinite import DynamicLossScaleState, SkipNonfiniteState

_WITH_MOMENTS = (ScaleByAdamState, optax.ScaleByAdamState), (ScaleByMuonState, MuonState)
_WRAPPERS = (MasterWeightsState, SkipNonfiniteState, DynamicLossScaleState)


def convert_state(optimizer: optax.GradientTransformation, state: PyTree, params: PyTree) -> PyTree:
    """Converts the state of one Adam into that of another, or of one Muon, with which a run continues.

    It rounds moments to nearest if the new dtype is narrower, and keeps counts and schedules. It keeps masters, or
    starts them from the parameters. If the new optimizer has none, it drops the old ones: to keep their values, pass
    `weights(params, state)` as parameters.

    Args:
      optimizer: the new one, of this module or of optax, of the same composition apart from `master_weights`,
        `skip_nonfinite` and `dynamic_loss_scale`.
      state: of the old optimizer, of this module or of optax.
      params: the parameters of both.

    Returns:
      A state as `optimizer.init(params)` returns it.

    Raises:
      ValueError: the two states are composed differently, or belong to other parameters, labels or shapes.

    Examples:
      >>> import jax.numpy as jnp, optax, te_jax.optim
      >>> params = {"w": jnp.ones(4)}
      >>> state = optax.adamw(1e-3).init(params)
      >>> optimizer = te_jax.optim.adamw(1e-3, mu_dtype=jnp.bfloat16, nu_dtype=jnp.bfloat16)
      >>> te_jax.optim.convert_state(optimizer, state, params)[0].nu["w"].dtype
      dtype(bfloat16)
    """
    like = optimizer.init(params)
    return jax.tree.map(_beside, _convert(like, state, params, "state"), like)


def _beside(leaf: Array, like: Array) -> Array:
    """A leaf in the memory of another one: that of the host, if the optimizer is offloaded."""
    space = jax.typeof(like).memory_space
    return leaf if leaf is like or jax.typeof(leaf).memory_space == space else jax.device_put(leaf, space)


def _convert(target: PyTree, source: PyTree, params: PyTree, where: str) -> PyTree:
    """The state `source`, which messages call `where`, in the form of the state `target`."""
    if _have_the_same_moments(target, source):
        return _convert_moments(target, source, where)
    if isinstance(target, _WRAPPERS) or isinstance(source, _WRAPPERS):
        wrappers: dict[type, list[tuple[PyTree, str]]] = {kind: [] for kind in _WRAPPERS}
        while isinstance(source, _WRAPPERS):
            wrappers[type(source)].append((source, where))
            source, where = source.inner, f"{where}.inner"
        return _convert_wrapped(target, wrappers, source, params, where)
    if isinstance(target, optax.InjectStatefulHyperparamsState) and type(source) is type(target):
        return source._replace(
            hyperparams=_known_to(target.hyperparams, source.hyperparams),
            hyperparams_states=_known_to(target.hyperparams_states, source.hyperparams_states),
            inner_state=_convert(target.inner_state, source.inner_state, params, f"{where}.inner_state"),
        )
    if isinstance(target, dict) and isinstance(source, dict):
        _check_keys([f"[{key!r}]" for key in target], [f"[{key!r}]" for key in source], where)
        return type(target)(  # an OrderedDict in optax.named_chain
            {key: _convert(target[key], source[key], params, f"{where}[{key!r}]") for key in target}
        )
    if _are_sequences(target, source):
        fields = getattr(target, "_fields", None)
        names = [f"[{i}]" for i in range(len(target))] if fields is None else [f".{field}" for field in fields]
        parts = [
            _convert(one, other, params, where + name) for one, other, name in zip(target, source, names, strict=True)
        ]
        kind: Any = type(target)
        return kind(parts) if fields is None else kind(*parts)
    if jax.tree.structure(target) != jax.tree.structure(source):
        raise ValueError(
            f"{where} has {jax.tree.structure(source)} where the optimizer has {jax.tree.structure(target)}: "
            "both must be composed of the same transforms"
        )
    _check_parameters(target, source, where)
    return jax.tree.map(
        lambda new, old: new if old is new else lax.convert_element_type(old, new.dtype), target, source
    )


def _have_the_same_moments(target: object, source: object) -> bool:
    return any(isinstance(target, kind) and isinstance(source, kind) for kind in _WITH_MOMENTS)


def _are_sequences(target: object, source: object) -> bool:
    """Whether both are states of the same number of transforms, or the same NamedTuple."""
    if not isinstance(target, tuple | list) or not isinstance(source, tuple | list) or len(target) != len(source):
        return False
    return type(target) is type(source) or not (hasattr(target, "_fields") or hasattr(source, "_fields"))


def _known_to(target: dict[str, T], source: dict[str, T]) -> dict[str, T]:
    """Hyperparameters under the names of `target`: dtypes and seeds are some as well, and may be new."""
    return {key: source.get(key, value) for key, value in target.items()}


def _check_parameters(target: PyTree, source: PyTree, where: str, *, masks_may_differ: bool = False) -> None:
    """Raises ValueError unless two trees belong to the same parameters: the same keys, and the same shapes."""

    def shapes(tree: PyTree) -> dict[str, tuple[int, ...] | None]:
        leaves = jax.tree.leaves_with_path(tree, is_leaf=is_masked)
        return {
            jax.tree_util.keystr(path): None if isinstance(leaf, optax.MaskedNode) else np.shape(leaf)
            for path, leaf in leaves
        }

    new, old = shapes(target), shapes(source)
    _check_keys(list(new), list(old), where)
    needs, has = (jax.tree.structure(tree, is_leaf=is_masked) for tree in (target, source))
    if needs != has:
        raise ValueError(
            f"{where} has {has} where the optimizer has {needs}: give params in the containers that the state was made "
            "for, such as dict or FrozenDict; state and params of NNX as nnx.as_pure returns them"
        )
    for key in new:
        if new[key] != old[key] and not (masks_may_differ and None in (new[key], old[key])):
            has, needs = (f"shape {tree[key]}" if tree[key] is not None else "a mask" for tree in (old, new))
            raise ValueError(
                f"{where}{key} has {has} where the optimizer has {needs}: "
                "both must have the same parameters, labels and masks; convert with those of the run that stopped"
            )


def _check_keys(expected: list[str], found: list[str], where: str) -> None:
    missing, left = [key for key in expected if key not in found], [key for key in found if key not in expected]
    differences = ["lacks " + ", ".join(missing)] * bool(missing)
    differences += ["has " + ", ".join(left) + ", which the optimizer lacks"] * bool(left)
    if differences:
        raise ValueError(
            f"{where} {' and '.join(differences)}: both must have the same parameters and labels; convert with those "
            "of the run that stopped, and rename or add to the result"
        )


def _convert_wrapped(
    target: PyTree, wrappers: dict[type, list[tuple[PyTree, str]]], source: PyTree, params: PyTree, where: str
) -> PyTree:
    if not isinstance(target, _WRAPPERS):
        return _convert(target, source, params, where)
    of_this_kind = wrappers[type(target)]
    before, its_name = of_this_kind.pop(0) if of_this_kind else (None, where)
    inner = _convert_wrapped(target.inner, wrappers, source, params, where)
    if before is None:
        return target._replace(inner=inner)
    if isinstance(target, MasterWeightsState):
        _check_parameters(target.master, before.master, f"{its_name}.master", masks_may_differ=True)
        return MasterWeightsState(convert_masters(target.master, before.master, params), inner)
    return before._replace(inner=inner)


def _convert_moments(target: PyTree, source: PyTree, where: str) -> PyTree:
    def convert(name: str) -> tuple[PyTree, PyTree]:
        old, new = getattr(source, name), getattr(target, name)
        _check_parameters(new, old, f"{where}.{name}")
        old_bounds = getattr(source, f"{name}_bounds", None)
        leaves, structure = jax.tree.flatten(old)
        dtypes = [leaf.dtype for leaf in structure.flatten_up_to(new)]
        new_bounds = getattr(target, f"{name}_bounds", None)
        scaled = new_bounds is not None
        if dtypes == [leaf.dtype for leaf in leaves] and scaled == (old_bounds is not None):
            return old, old_bounds
        bounds = [None] * len(leaves) if old_bounds is None else jax.tree.leaves(old_bounds)
        wide = [
            _moments.decode(leaf, bound, np.promote_types(leaf.dtype, np.float32) if bound is None else "float32")
            for leaf, bound in zip(leaves, bounds, strict=True)
        ]
        largest = [_moments.maxima(x) if scaled else None for x in wide]
        values = [
            _moments.encode(x, bound, dtype, None, positive=name == "nu")
            for x, bound, dtype in zip(wide, largest, dtypes, strict=True)
        ]
        return structure.unflatten(values), jax.tree.structure(new_bounds).unflatten(largest) if scaled else None

    fields: dict[str, PyTree] = {"count": jnp.asarray(source.count).astype(np.int32)}
    for name in ("mu", "nu"):
        if hasattr(target, name):
            fields[name], bounds = convert(name)
            fields |= {f"{name}_bounds": bounds} if hasattr(target, f"{name}_bounds") else {}
    return target._replace(**fields)
