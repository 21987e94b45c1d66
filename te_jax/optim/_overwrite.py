"""State whose gradient is its next value, such as that of delayed scaling, among the parameters of an optimizer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.tree_util import KeyPath

from te_jax._core.types import PyTree
from te_jax.recipe import DelayedScalingState

_COLLECTION = "_overwrite_with_gradient"
_USES = "uses"
_LAYERS = (
    frozenset(("activation_amax_history", "kernel_amax_history", "gradient_amax_history", _USES)),
    frozenset(f"{name}_{kind}" for name in ("input", "kernel", "output_grad") for kind in ("amax_history", "scale")),
)
"""Names of the state in a layer of te_jax and in one of Flax: `nnx.Optimizer` drops the types of variables."""

_Path = tuple[str, ...]


def overwrite_with_gradient(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """An optimizer for a tree that holds the state of delayed scaling among its parameters.

    The gradient of this state is its next value. `optax.apply_updates` replaces the state by it, or keeps the state of
    a layer that the loss did not use. The inner optimizer sees only the parameters. State is every
    `te_jax.recipe.DelayedScalingState`, Linen's collection "_overwrite_with_gradient", and the variables of te_jax's
    and Flax's layers in NNX, which are known by their names.

    Make it the outermost transformation: another around it, such as `optax.clip_by_global_norm` in a chain, would
    change the next states. If no float32 update leads exactly to the next value, the result is larger, by less than
    2^-22 of the larger of the two values.

    Args:
      inner: the optimizer of the parameters.

    Returns:
      A transformation whose `update` needs `params`.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, te_jax
      >>> model = te_jax.flax.Dense(16, recipe=te_jax.recipe.DelayedScaling(history_len=2))
      >>> variables = model.init(jax.random.key(0), jnp.ones((4, 16)))
      >>> optimizer = te_jax.optim.overwrite_with_gradient(optax.adamw(1e-3))
      >>> state = optimizer.init(variables)
      >>> gradients = jax.grad(lambda v: jnp.sum(model.apply(v, 3 * jnp.ones((4, 16)))))(variables)
      >>> updates, state = optimizer.update(gradients, state, variables)
      >>> optax.apply_updates(variables, updates)["_overwrite_with_gradient"]["activation_amax_history"].tolist()
      [3.0, 0.0]

      With NNX: nnx.Optimizer(model, optimizer, wrt=nnx.Any(nnx.Param, te_jax.nnx.OverwriteWithGradient)).
    """
    masked = optax.masked(inner, lambda tree: jax.tree.map(lambda state: not state, _is_state(tree)))

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: object) -> tuple[PyTree, PyTree]:
        if params is None:
            raise ValueError(
                "params is None; overwrite_with_gradient takes the difference to the present state: call "
                "update(gradients, opt_state, params)"
            )
        updates, state = masked.update(updates, state, params, **extra)
        counts = {path: leaf for path, leaf in _leaves(updates) if path[-1:] == (_USES,)}

        def difference(path: KeyPath, is_state: bool, new: PyTree, former: PyTree) -> PyTree:
            if not is_state:
                return new
            has_uses = isinstance(new, DelayedScalingState)
            uses = new.uses if has_uses else counts.get((*_names(path)[:-1], _USES))
            return jax.tree.map(lambda new, former: _difference(new, former, uses), new, former)

        return jax.tree.map_with_path(difference, _is_state(updates), updates, params), state

    return optax.GradientTransformationExtraArgs(masked.init, update)


def _is_state(tree: PyTree) -> PyTree:
    """A tree of bools, with one for each DelayedScalingState."""
    leaves = _leaves(tree)
    paths = {path for path, _ in leaves}

    def is_state(path: _Path, leaf: object) -> bool:
        layers = (layer for layer in _LAYERS if path[-1:] and path[-1] in layer)
        return (
            isinstance(leaf, DelayedScalingState)
            or _COLLECTION in path
            or any(paths.issuperset((*path[:-1], name) for name in layer) for layer in layers)
        )

    structure = jax.tree.structure(tree, is_leaf=_is_scaling_state)
    return structure.unflatten([is_state(path, leaf) for path, leaf in leaves])


def _leaves(tree: PyTree) -> list[tuple[_Path, PyTree]]:
    return [(_names(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=_is_scaling_state)]


def _names(path: KeyPath) -> _Path:
    if path and path[-1] == jax.tree_util.GetAttrKey("value"):  # of an nnx.Variable
        path = path[:-1]
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)


def _is_scaling_state(x: object) -> bool:
    return isinstance(x, DelayedScalingState)


def _difference(new: Array, former: Array, uses: Array | None) -> Array:
    """An update that leads from `former` to `new`, or to the next larger reachable value: a smaller amax would let
    values saturate, and 0 means that no amax is known."""
    update = new - former
    update = jnp.where(former + update < new, jnp.nextafter(update, jnp.inf), update)
    if uses is None:
        return update
    uses = jnp.expand_dims(uses, tuple(range(uses.ndim, update.ndim)))  # stacked layers have one each
    return jnp.where(uses > 0, update, 0.0)
