"""An NNX model of Flax's layers into FP8, in place, and back."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax import lax

from te_jax import native
from te_jax.layers import convert as conversion
from te_jax.layers import delayed_scaling, linear
from te_jax.nnx.linear import Einsum, Linear, LinearGeneral, scaling_state
from te_jax.nnx.variables import OverwriteWithGradient
from te_jax.quantized import QuantizedArray
from te_jax.recipe import DelayedScaling, Recipe

_OURS: dict[type[nnx.Module], type[nnx.Module]] = {
    nnx.Linear: Linear,
    nnx.LinearGeneral: LinearGeneral,
    nnx.Einsum: Einsum,
}
_STACKED = "stacked along another dimension than the first, where DelayedScaling has no place for its state"


def convert(
    model: Any,
    recipe: Recipe | None,
    *,
    rules: conversion.Rules = (),
    layers: conversion.Layers = types.MappingProxyType({}),
    state_axis: str | tuple[str, ...] | None = None,
    implementation: native.Implementation | None = None,
) -> conversion.Report:
    """Puts the linear layers of a model into FP8, in place.

        report = te_jax.nnx.convert(model, BlockScaling(), rules=[("layers/0/*", None)])
        print(report)

    `nnx.Linear`, `nnx.LinearGeneral` and `nnx.Einsum`, and classes of yours that inherit their `__call__`, become
    te_jax's layers of these names. Their variables stay the same objects, so optimizers, sharding and checkpoints keep
    working. Shared layers stay shared, and layers that `nnx.vmap` stacked stay stacked. `DelayedScaling` adds its state
    as `OverwriteWithGradient` variables. Classes of yours that multiply by themselves are converted if `layers` says
    how; the Einsums of Tunix are known. FP8 replaces a layer's `precision`, and the report says so. Layers of te_jax
    get the recipe too. A second call changes recipes: recipe and rules say what the model is afterwards, whatever it
    was before.

    Unless a rule names a recipe for them, `convert` leaves output heads alone (a part of the path is "head", "lm_head",
    "logits", "logitdense", "classifier", "unembed" or similar, or the last part is "output"), and routers ("router", or
    "gate" in a part with "moe", but no einsum of experts). It always leaves alone embeddings; sizes that are no
    multiples of 16; dtypes that FP8 layers do not have; layers in te_jax's `Attention`, `GatedMLP` and other modules
    with a recipe argument; layers with a `__call__`, `dot_general`, `promote_dtype`, `einsum_op`,
    `preferred_element_type` or `batch_axis` of their own; and layers with variables besides kernel and bias, or of
    models that qwix made, such as those with LoRA. The report has the reason for each.

    Args:
      model: an NNX module or a container of modules.
      recipe: for all layers that no rule names; None to convert only those that a rule names.
      rules: pairs of a pattern and a recipe or None; the first pattern that matches the path of a layer applies. Paths
        are attributes and indices, joined by "/". `*` matches any characters, also "/".
      layers: an `EinsumLayer` for classes of yours, by class or by full name ("my_models.layers.Einsum"). Classes that
        inherit their `__call__` are meant, too.
      state_axis, implementation: as in `LinearGeneral`.

    Returns:
      All kernels: the recipe of each, or the reason why it has none.

    Raises:
      ValueError: model holds no NNX module, or recipe, rules or layers are invalid; the model is then unchanged.
        Later, in a call: a class of `layers` gives another shape than its subscripts, or has further arguments.
    """
    rules, known = conversion.validate(recipe, rules), conversion.validate_layers(layers)
    rows: list[conversion.Layer] = []
    changes: list[tuple[Any, linear.Options | _Converted]] = []
    module: Any
    modules = list(_modules(model))
    linear_layers = (LinearGeneral, Einsum, _EinsumLayer)
    composites = {paths[0]: type(m) for paths, m in modules if conversion.is_composite(m, linear_layers)}
    for paths, module in modules:
        if not _is_linear(module):
            how = conversion.einsum_layer(known, _layer_class(module)) or _how(module)
            if how is None:
                rows += _kernels_of_another_class(paths, module)
                continue
            chosen, reason = _decide_einsum(paths, module, how, recipe, rules)
            changes.append((module, _Converted(how, linear.Options(chosen, state_axis, implementation))))
            kernel = getattr(module, how.variables(module)[0], None)
            kind = f"{_layer_class(module).__name__} {tuple(getattr(kernel, 'shape', ()))}"
            rows.append(conversion.Layer(paths[0], kind, chosen, reason, paths[1:]))
            continue
        if (foreign := _foreign_part(module)) is not None:
            chosen, reason = None, foreign
        elif isinstance(module.kernel.get_value(), QuantizedArray):
            chosen, reason = module.options.recipe, "its kernel is quantized already"
        elif (composite := composites.get(paths[0].rpartition("/")[0])) is not None:
            chosen, reason = module.options.recipe, conversion.part_of(composite)
        else:
            experts = _is_einsum(module) and conversion.has_experts(module.einsum_str, module.kernel_shape)
            chosen, reason = conversion.decide(paths, recipe, rules, _obstacle(module), experts=experts)
            if isinstance(chosen, DelayedScaling) and _stacked_shape(module) is None:
                chosen, reason = None, _STACKED
            if chosen is None and _is_ours(module) and not reason.startswith("rule "):
                chosen = module.options.recipe  # a recipe that someone gave to this very layer
            else:
                changes.append((module, linear.Options(chosen, state_axis, implementation)))
            if chosen is not None:
                reason = conversion.replaced_precision(getattr(module, "precision", None)) or reason
        kind = f"{_layer_class(module).__name__} {tuple(getattr(module.kernel, 'shape', ()))}"
        rows.append(conversion.Layer(paths[0], kind, chosen, reason, paths[1:]))
    for module, change in changes:
        if isinstance(change, _Converted):
            _set_einsum(module, change)
        else:
            _set(module, change)
    return conversion.report(rows, rules)


def revert(model: Any) -> None:
    """Restores all layers of a model to their classes and recipes before `convert`, in place and without state.

    Variables stay the same objects. Layers that `convert` did not change stay as they are.

    Raises:
      ValueError: model holds no NNX module, or has kernels that `quantize_kernels` quantized.
    """
    module: Any
    for paths, module in _modules(model):
        ours = isinstance(module, LinearGeneral | Einsum) and _before(module) is not None
        if ours and isinstance(module.kernel.get_value(), QuantizedArray):
            raise ValueError(f"the kernel of {paths[0]} is quantized; revert the model that quantize_kernels was given")
    for _, module in _modules(model):
        if (before := _before(module)) is not None:
            _restore(module, before)
            _remove(module, "_before_conversion")


@dataclasses.dataclass(frozen=True)
class _Before:
    """The class of a layer before its conversion, and its options if it was one of te_jax."""

    layer: type[nnx.Module]
    options: linear.Options | None


def _before(module: Any) -> _Before | None:
    return getattr(module, "_before_conversion", None)


def _was_converted(module: nnx.Module) -> bool:
    """Whether the layer was one of Flax's."""
    before = _before(module)
    return before is not None and before.options is None


def _is_ours(module: nnx.Module) -> bool:
    """Whether the layer was made as one of te_jax."""
    return isinstance(module, LinearGeneral | Einsum) and not _was_converted(module)


def _layer_class(module: nnx.Module) -> type[nnx.Module]:
    before = _before(module)
    return type(module) if before is None else before.layer


def _modules(model: Any) -> Iterator[tuple[tuple[str, ...], nnx.Module]]:
    """Every module once, with all its paths."""
    nodes = nnx.iter_graph(model, graph=True) if nnx.graph.is_node(model) else ()
    modules = [(path, node) for path, node in nodes if isinstance(node, nnx.Module)]
    if not modules:
        raise ValueError(
            f"model is of type {type(model).__name__} and holds no flax.nnx.Module; pass one, or a container of some. "
            "te_jax.flax.convert takes models of flax.linen; in others call te_jax.ops.dense"
        )
    shared = nnx.find_duplicates(model, only=nnx.Module)
    for path, module in modules:
        paths = [path]
        for places in shared:
            for place in places:
                if path[: len(place)] == place:
                    paths += [(*other, *path[len(place) :]) for other in places if other != place]
        yield tuple("/".join(map(str, path)) for path in dict.fromkeys(paths)), module


@dataclasses.dataclass(frozen=True)
class _Converted:
    """How a class that `layers` names multiplies, and its options."""

    how: conversion.EinsumLayer
    options: linear.Options


class _EinsumLayer(nnx.Module):
    """What such a class becomes, beside itself: its product, by `te_jax.ops`."""

    te_jax_einsum: _Converted

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        how, options = self.te_jax_einsum.how, self.te_jax_einsum.options
        layer = _layer_class(self)
        x, subscripts, others = how.operands(layer, self, args, kwargs)
        if others:
            raise ValueError(
                f"{layer.__name__} is called with {', '.join(others)} beside its input, which its product in FP8 does "
                "not take: leave it out of the layers of te_jax.nnx.convert, or give it a rule with None"
            )
        own: Any = super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        held = self.held()
        kernel: Any = held.kernel
        names = linear.Einsum.parse(subscripts, kernel.shape, "subscripts")
        y = linear.einsum(names, linear.as_array("x", x), *held, dtype=jnp.result_type(own), options=options)
        return conversion.as_its_own(y, own, subscripts, layer)

    def held(self) -> linear.Layer:
        """The values of its variables."""
        kernel, *biases = (getattr(self, name) for name in self.te_jax_einsum.how.variables(self))
        bias = biases[0].get_value() if biases and biases[0] is not None else None
        return linear.Layer(kernel.get_value(), bias, scaling_state(self, self.te_jax_einsum.options.recipe))


def _how(module: nnx.Module) -> conversion.EinsumLayer | None:
    return module.te_jax_einsum.how if isinstance(module, _EinsumLayer) else None


def _decide_einsum(
    paths: tuple[str, ...],
    module: Any,
    how: conversion.EinsumLayer,
    recipe: Recipe | None,
    rules: tuple[tuple[str, Recipe | None], ...],
) -> tuple[Recipe | None, str]:
    names = how.variables(module)
    variables = [getattr(module, name, None) for name in names]
    subscripts = how.subscripts_of(module)
    experts = False
    if missing := [n for n, v in zip(names, variables, strict=True) if not isinstance(v, nnx.Variable | None)]:
        obstacle = f"its {missing[0]} is no nnx.Variable"
    elif variables[0] is None:
        obstacle = f"it has no {names[0]}, which its EinsumLayer names as the kernel"
    elif subscripts is None:
        obstacle = f"it has no {how.subscripts}, which its EinsumLayer names for the subscripts"
    else:
        kernel = variables[0].get_value()
        shape = _one_of_stack(subscripts, kernel.shape)
        obstacle = _added_part(module, names) or conversion.obstacle_in_subscripts(subscripts, shape, kernel.dtype)
        experts = conversion.has_experts(subscripts, shape)
    return conversion.decide(paths, recipe, rules, obstacle, experts=experts)


def _one_of_stack(subscripts: str | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a kernel without the dimensions along which `nnx.vmap` stacked it: the first ones."""
    kernel = str(subscripts).replace(" ", "").partition("->")[0].partition(",")[2]
    return tuple(shape[max(0, len(shape) - len(kernel)) :])


def _is_linear(module: nnx.Module) -> bool:
    return issubclass(_layer_class(module), (*_OURS, LinearGeneral, Einsum)) and hasattr(module, "kernel")


def _own_variables(module: nnx.Module) -> Iterator[tuple[str, nnx.Variable[Any]]]:
    """The variables of a module, with their paths in it, without those of modules in it."""
    for name, value in vars(module).items():
        leaves = jax.tree.leaves_with_path(value, is_leaf=lambda leaf: isinstance(leaf, nnx.Module | nnx.Variable))
        for path, leaf in leaves:
            if isinstance(leaf, nnx.Variable):
                yield jax.tree_util.keystr(((jax.tree_util.DictKey(name), *path)), simple=True, separator="/"), leaf


def _kernels_of_another_class(paths: tuple[str, ...], module: nnx.Module) -> Iterator[conversion.Layer]:
    """The rows of a module that is no linear layer."""
    kernels: dict[str, tuple[int, ...]] = {}
    for name, variable in _own_variables(module):
        shape = tuple(getattr(variable.get_value(), "shape", ()))
        if isinstance(variable, nnx.Param) and len(shape) >= 2 and name.rpartition("/")[2] not in ("scale", "bias"):
            kernels[name] = shape
    for name, shape in kernels.items():
        if isinstance(module, nnx.Embed) or "emb" in name:
            reason = "an embedding"
        else:
            reason = conversion.no_linear_layer(type(module), "nnx.Linear, nnx.LinearGeneral and nnx.Einsum")
        first, *others = ["/".join(filter(None, (path, name))) for path in paths] if len(kernels) > 1 else paths
        yield conversion.Layer(first, f"{type(module).__name__} {shape}", None, reason, tuple(others))


def _foreign_part(module: Any) -> str | None:
    """A part that another library added to a layer of Flax, if any: te_jax's product would disconnect it."""
    if isinstance(module, LinearGeneral | Einsum):
        return None
    if not isinstance(module.kernel, nnx.Variable):
        return f"its kernel is of type {type(module.kernel).__name__}, which is no nnx.Variable"
    return _added_part(module, ("kernel", "bias"))


def _added_part(module: Any, expected: Sequence[str]) -> str | None:
    if hasattr(module, "qwix_path"):  # qwix marks all modules of its models
        return conversion.WRAPPED_BY_QWIX
    expected = (*expected, *(delayed_scaling.STATE_NAMES if isinstance(module, _EinsumLayer) else ()))
    others = [
        name
        for name, variable in _own_variables(module)
        if name not in expected and not isinstance(variable, nnx.RngState | nnx.Intermediate)
    ]
    return f"it has variables besides kernel and bias: {', '.join(sorted(others))}" if others else None


def _obstacle(module: Any) -> str | None:
    """Why a linear layer cannot become one of te_jax, if so."""
    return _own_behaviour(module) or _obstacle_in_kernel(module)


def _own_behaviour(module: Any) -> str | None:
    layer = _layer_class(module)
    flax = _flax_class(layer)
    if flax is None:
        return None
    if layer.__call__ is not flax.__call__:  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
        return f"{layer.__name__} has a __call__ of its own"
    usual = {
        "dot_general": (None, lax.dot_general),
        "dot_general_cls": (None,),
        "promote_dtype": (dtypes.promote_dtype,),
        "einsum_op": (jnp.einsum,),
        "preferred_element_type": (None,),
    }
    for name, values in usual.items():
        if not any(getattr(module, name, values[0]) is value for value in values):
            return f"it has a {name} of its own"
    return "it has a batch_axis" if getattr(module, "batch_axis", None) else None


def _obstacle_in_kernel(module: Any) -> str | None:
    if obstacle := conversion.obstacle_in_dtype(module.dtype, module.kernel.get_value().dtype):
        return obstacle
    if _is_einsum(module):
        return conversion.obstacle_in_einsum(module.einsum_str, module.kernel_shape)
    return conversion.obstacle_in_sizes(linear.as_tuple(module.in_features), linear.as_tuple(module.out_features))


def _is_einsum(module: nnx.Module) -> bool:
    return isinstance(module, nnx.Einsum | Einsum)


def _flax_class(layer: type[nnx.Module]) -> type[nnx.Module] | None:
    return next((flax for flax in _OURS if issubclass(layer, flax)), None)


def _stacked_shape(module: Any) -> tuple[int, ...] | None:
    """The dimensions along which `nnx.vmap` stacked the layer, if they are the first ones."""
    if isinstance(module, _EinsumLayer):
        how = module.te_jax_einsum.how
        shape = getattr(module, how.variables(module)[0]).get_value().shape
        return shape[: len(shape) - len(_one_of_stack(how.subscripts_of(module), shape))]
    shape = module.kernel.get_value().shape
    if _is_einsum(module):
        own = tuple(module.kernel_shape)
    else:
        own = (*linear.as_tuple(module.in_features), *linear.as_tuple(module.out_features))
    stacked = len(shape) - len(own)
    return shape[:stacked] if shape[stacked:] == own else None


def _set(module: Any, options: linear.Options) -> None:
    """Gives a layer its recipe. Without one, a layer of Flax becomes what it was."""
    if _is_ours(module):
        options = dataclasses.replace(module.options, recipe=options.recipe)
        if options != module.options:
            module._before_conversion = _before(module) or _Before(type(module), module.options)
    elif options.recipe is None:
        if (before := _before(module)) is not None:
            _restore(module, before)
            _remove(module, "_before_conversion")
        return
    elif not _was_converted(module):
        module._before_conversion = _Before(type(module), None)
        object.__setattr__(module, "__class__", _converted_class(type(module)))
        if isinstance(module, Linear):
            module.axis = (-1,)
        if isinstance(module, LinearGeneral):
            module.activation = None
    module.options = options
    _set_scaling_state(module, options.recipe)


def _set_einsum(module: Any, converted: _Converted) -> None:
    """Gives a layer that `layers` names its recipe. Without one it becomes what it was."""
    before = _before(module)
    if converted.options.recipe is None:
        if before is not None:
            _restore(module, before)
            _remove(module, "_before_conversion")
        return
    if before is None:
        module._before_conversion = _Before(type(module), None)
        object.__setattr__(module, "__class__", _converted_class(type(module)))
    module.te_jax_einsum = converted
    _set_scaling_state(module, converted.options.recipe)


def _restore(module: Any, before: _Before) -> None:
    if before.options is not None:
        module.options = before.options
        _set_scaling_state(module, before.options.recipe)
        return
    _set_scaling_state(module, None)
    object.__setattr__(module, "__class__", before.layer)
    if hasattr(module, "te_jax_einsum"):
        _remove(module, "te_jax_einsum")
        return
    _remove(module, "options", "activation", *(() if isinstance(module, nnx.LinearGeneral) else ("axis",)))


def _set_scaling_state(module: Any, recipe: Recipe | None) -> None:
    """Adds the state of delayed scaling, or removes it. A state of the same shape is kept."""
    initial = delayed_scaling.initial_state(recipe) if isinstance(recipe, DelayedScaling) else {}
    stacked = _stacked_shape(module) or ()
    shapes = {name: (*stacked, *value.shape) for name, value in initial.items()}
    if all(hasattr(module, name) and getattr(module, name).shape == shape for name, shape in shapes.items()) and shapes:
        return
    _remove(module, *delayed_scaling.STATE_NAMES)
    for name, value in initial.items():
        setattr(module, name, OverwriteWithGradient(jnp.broadcast_to(value, shapes[name])))


def _remove(module: nnx.Module, *names: str) -> None:
    for name in names:
        if hasattr(module, name):
            delattr(module, name)


@functools.cache
def _converted_class(layer: type[nnx.Module]) -> type[nnx.Module]:
    """te_jax's layer for one of Flax; for a subclass, a subclass of both."""
    if layer in _OURS:
        return _OURS[layer]
    flax = _flax_class(layer)
    metaclass = conversion.metaclass_for_pickle(type(layer), _converted_class)
    names = {"__module__": layer.__module__, "__qualname__": layer.__qualname__}
    return types.new_class(
        layer.__name__,
        (_EinsumLayer if flax is None else _OURS[flax], layer),
        {"metaclass": metaclass},
        lambda body: body.update(names),
    )
