"""Names of layers: the paths of their kernels in the arguments of a function, as `convert` writes them."""

from __future__ import annotations

import collections
import fnmatch
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.tree_util import GetAttrKey

from te_jax.debug._collect import Record
from te_jax.quantized import QuantizedArray

_OF_VARIABLES = {"value", "raw_value"}


def paths(function: Any, arguments: Any) -> tuple[list[tuple[str, str]], list[Any], Any]:
    """For each leaf of (args, kwargs): the parameter of the function and its path there; the leaves; their tree.

    Arrays of a QuantizedArray have its path.
    """
    places: list[tuple[str, str]] = []
    names = _parameters(function)
    leaves: list[Any] = []
    grouped, _ = jax.tree_util.tree_flatten_with_path(arguments, is_leaf=lambda x: isinstance(x, QuantizedArray))
    for path, leaf in grouped:
        parts = jax.tree.leaves(leaf)
        leaves += parts
        argument = _part(path[1])
        if isinstance(argument, int):
            argument = names[argument] if argument < len(names) else str(argument)
        places += [(argument, _joined(path[2:]))] * len(parts)
    return places, leaves, jax.tree.structure(arguments)


def _parameters(function: Any) -> list[str]:
    """The names of positional parameters."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of builtins
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in positional]


def _part(key: Any) -> int | str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)


def _joined(path: Sequence[Any]) -> str:
    while len(path) > 1 and isinstance(path[-1], GetAttrKey) and path[-1].name in _OF_VARIABLES:
        path = path[:-1]
    parts = [str(_part(key)) for key in path]
    while len(parts) > 1 and parts[0] == "params":
        del parts[0]
    if len(parts) > 1 and parts[-1] == "kernel":
        parts.pop()
    return "/".join(parts)


def names_of(records: Iterable[Record], places: Mapping[Any, tuple[str, str]]) -> dict[Any, str]:
    """The name of each layer, in the order of its first record.

    Args:
      records: of all layers.
      places: of the arguments, by the keys of their sources.
    """
    names: dict[Any, str] = {}
    taken: set[str] = set()
    numbers: collections.Counter[str] = collections.Counter()
    for record in sorted(records, key=lambda record: record.order):
        source = record.source
        if source.layer in names:
            continue
        if source.name is None:
            name = "/".join(filter(None, (record.scope, record.static.operation.rpartition(".")[2])))
            numbers[name] += 1
            name = f"{name} {numbers[name] - 1}"
        else:
            name = source.name + "".join(f"[{i}]" for i in source.index)
        if (name in taken or not name) and source.key in places:
            name = "/".join(filter(None, (places[source.key][0], name)))
        names[source.layer] = name
        taken.add(name)
    return names


def matches(name: str, patterns: Sequence[str] | None) -> bool:
    """Whether a layer is among those that are asked for."""
    return patterns is None or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
