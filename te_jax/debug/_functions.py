"""Functions traced under a request for statistics, and evaluated with them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array

from te_jax import sharding
from te_jax._core import observe
from te_jax._core.derivatives import not_differentiated
from te_jax.debug._collect import Record, evaluate
from te_jax.debug._names import names_of, paths
from te_jax.debug._sources import Source

Finish = Callable[[list[Record], dict[Any, str]], Any]


def traced_with(
    function: Callable[..., Any], request: observe.Request, finish: Finish, owner: str
) -> Callable[..., tuple[Any, Any]]:
    """A function of the same arguments that returns (function(…), finish(records, names of their layers)).

    Args:
      function: of pytrees. Leaves that are no arrays are static.
      request: under which it is traced.
      finish: what becomes of the records.
      owner: the public function, for errors.
    """
    reason = (
        f"{owner} is differentiated, and its statistics are those of the pass that it sees: differentiate function, "
        f"and call {owner}(jax.value_and_grad(function), …)"
    )

    # Under jit even when called eagerly: each equation would be a program.
    @functools.partial(jax.jit, static_argnums=0, inline=sharding.INLINE)
    def run(static: tuple[Any, Any, tuple[Any, ...]], arrays: list[Array]) -> tuple[Any, Any]:
        tree, static_leaves, places = static
        arrays = not_differentiated(arrays, reason)

        def flat(*arrays: Array) -> Any:
            left = iter(arrays)
            leaves = [next(left) if other is _ARRAY else other for other in static_leaves]
            args, kwargs = jax.tree.unflatten(tree, leaves)
            return function(*args, **kwargs)

        with observe.requesting(request):
            closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*arrays)
        sources = [Source(("argument", i), name) for i, (_, name) in enumerate(places)]
        results, records = evaluate(closed, arrays, sources)
        by_key = {source.key: place for source, place in zip(sources, places, strict=True)}
        result = jax.tree.unflatten(jax.tree.structure(shapes), results)
        return result, finish(records, names_of(records, by_key))

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        places, leaves, tree = paths(function, (args, kwargs))
        is_array = [isinstance(leaf, jax.Array | np.ndarray | np.generic) for leaf in leaves]
        static_leaves = tuple(_ARRAY if array else leaf for array, leaf in zip(is_array, leaves, strict=True))
        arrays = [leaf for array, leaf in zip(is_array, leaves, strict=True) if array]
        of_arrays = tuple(place for array, place in zip(is_array, places, strict=True) if array)
        try:
            hash(static_leaves)
        except TypeError:
            kinds = sorted({type(leaf).__name__ for leaf in static_leaves if type(leaf).__hash__ is None})
            raise ValueError(
                f"an argument of {owner}'s function has leaves of type {', '.join(kinds)}, which are neither arrays "
                "nor hashable: close over them"
            ) from None
        return run((tree, static_leaves, of_arrays), arrays)

    return wrapped


class _Array:
    def __repr__(self) -> str:
        return "array"


_ARRAY = _Array()
