"""An NNX model of Flax's layers into FP8, in place, and back."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax import lax

from te_jax import native
from te_jax.layers import convert as conversion
from te_jax.layers import delayed_scaling, linear
from te_jax.layers.kernel_products import KernelOptions, call_with_products
from te_jax.nnx.linear import Einsum, Linear, LinearGeneral, scaling_state
from te_jax.nnx.moe import MoE
from te_jax.nnx.variables import OverwriteWithGradient
from te_jax.quantized import QuantizedArray
from te_jax.recipe import DelayedScaling, Recipe

_OURS: dict[type[nnx.Module], type[nnx.Module]] = {
    nnx.Linear: Linear,
    nnx.LinearGeneral: LinearGeneral,
    nnx.Einsum: Einsum,
}
_QWIX_FIRST = "apply qwix before te_jax.nnx.convert, which leaves kernels that qwix quantizes as they are"
_STACKED = "stacked along another dimension than the first, where DelayedScaling has no place for its state"


def convert(
    model: nnx.Module,
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
    how; the Einsums and experts of Tunix are known. FP8 replaces a layer's `precision`, and the report says so. Layers
    of te_jax get the recipe too. A second call changes recipes: recipe and rules say what the model is afterwards,
    whatever it was before.

    LoRA stays beside the products in FP8, in its own dtype: `nnx.LoRA`, `nnx.LoRALinear`, and that of qwix, applied
    before or after.

    Unless a rule names a recipe for them, `convert` leaves output heads alone (a part of the path is "head", "lm_head",
    "logits", "logitdense", "classifier", "unembed" or similar, or the last part is "output"), and routers ("router", or
    "gate" in a part with "moe", but no einsum of experts). It always leaves alone embeddings; dtypes that FP8 layers do
    not have; layers in te_jax's `Attention`, `GatedMLP` and other modules with a recipe argument; layers with a
    `__call__`, `dot_general`, `promote_dtype`, `einsum_op`, `preferred_element_type` or `batch_axis` of their own;
    layers with other variables besides kernel and bias; and those of models that qwix quantized, such as QLoRA. The
    report has the reason for each.

    Args:
      model: an NNX module or a container of modules.
      recipe: for all layers that no rule names; None to convert only those that a rule names.
      rules: pairs of a pattern and a recipe or None; the first pattern that matches the path of a layer applies. Paths
        are attributes and indices, joined by "/". `*` matches any characters, also "/".
      layers: a `KernelsLayer` for classes of yours, by class or by full name ("my_models.layers.Einsum"). Classes that
        inherit their `__call__` are meant, too. With `DelayedScaling` convert them inside of `nnx.vmap`, not stacked.
      state_axis, implementation: as in `LinearGeneral`.

    Returns:
      All kernels: the recipe of each, or the reason why it has none.

    Raises:
      ValueError: model holds no NNX module, or recipe, rules or layers are invalid; the model is then unchanged.
        Later, in a call: a class of `layers` uses a kernel otherwise than in products.
    """
    rules, known = conversion.validate(recipe, rules), conversion.validate_layers(layers)
    rows: list[conversion.Layer] = []
    changes: list[tuple[Any, linear.Options | _Converted]] = []
    module: Any
    modules = list(_modules(model))
    linear_layers = (LinearGeneral, Einsum, _OwnCall)
    composites: dict[str, Any] = {paths[0]: m for paths, m in modules if conversion.is_composite(m, linear_layers)}
    with_lora = any(_is_adapted_by_qwix(module) for _, module in modules)
    for paths, module in modules:
        rows += _adapters(paths, module)
        how = _how(module, known)
        if how is not None:
            decided = {n: _decide_kernel(paths, module, how, n, recipe, rules, with_lora) for n in how.names(module)}
            recipes = ((name, row.recipe) for name, row in decided.items() if row.recipe is not None)
            options = tuple((name, linear.Options(chosen, state_axis, implementation)) for name, chosen in recipes)
            changes.append((module, _Converted(how, options)))
            rows += [*decided.values(), *_kernels_of_another_class(paths, module, except_for=tuple(decided))]
            continue
        if not _is_linear(module):
            rows += _kernels_of_another_class(paths, module)
            continue
        composite = composites.get(paths[0].rpartition("/")[0])
        experts = _is_einsum(module) and conversion.has_experts(module.einsum_str, module.kernel_shape)
        if (foreign := _foreign_part(module, with_lora)) is not None:
            chosen, reason = None, foreign
            if _was_converted(module):  # before that part was added
                changes.append((module, linear.Options(None, state_axis, implementation)))
        elif isinstance(module.kernel.get_value(), QuantizedArray):
            chosen, reason = module.options.recipe, "its kernel is quantized already"
        elif composite is not None:
            chosen, reason = module.options.recipe, conversion.part_of(type(composite))
        else:
            chosen, reason = conversion.decide(paths, recipe, rules, _obstacle(module), experts=experts)
            if isinstance(chosen, DelayedScaling) and _stacked_shape(module) is None:
                chosen, reason = None, _STACKED
            if chosen is None and _is_ours(module) and not reason.startswith("rule "):
                chosen = module.options.recipe  # a recipe that someone gave to this very layer
            else:
                changes.append((module, linear.Options(chosen, state_axis, implementation)))
            if chosen is not None:
                reason = conversion.replaced_precision(getattr(module, "precision", None)) or reason
        share = Fraction(composite.choice.top_k, composite.num_experts) if isinstance(composite, MoE) else None
        shape = getattr(module.kernel, "shape", ())
        layer = _layer_class(module)
        rows.append(
            conversion.layer_of_kernel(
                paths[0],
                layer,
                shape,
                chosen,
                reason,
                paths[1:],
                experts=experts,
                share=share,
                sizes=_sizes(module),
            )
        )
    for module, change in changes:
        if isinstance(change, _Converted):
            _set_own_call(module, change)
        else:
            _set(module, change)
    return conversion.report(rows, rules)


def revert(model: nnx.Module) -> None:
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


def _modules(model: nnx.Module) -> Iterator[tuple[tuple[str, ...], nnx.Module]]:
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
    """How a class with a `__call__` of its own multiplies by kernels, and by which options for those in FP8."""

    how: conversion.KernelsLayer
    options: tuple[tuple[str, linear.Options], ...]


class _OwnCall(nnx.Module):
    """What a class that `layers` names becomes, beside itself."""

    te_jax_converted: _Converted
    te_jax_states: nnx.Dict[Any]

    def __call__(self, *args: object, **kwargs: object) -> Any:
        options = {
            name: KernelOptions(options, scaling_state(self.te_jax_states.get(name), options.recipe))
            for name, options in self.te_jax_converted.options
        }
        return _call_with_products(self, options, args, kwargs)


class _FlaxLayer(nnx.Module):
    """What a linear layer of Flax becomes, beside te_jax's. In a model of qwix, which adds LoRA to its own product, it
    runs as that of Flax, with the product in FP8."""

    options: linear.Options

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if hasattr(self, "qwix_path"):
            options = KernelOptions(self.options, scaling_state(self, self.options.recipe))
            return _call_with_products(self, {"kernel": options}, args, kwargs)
        return super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


def _call_with_products(module: Any, options: dict[str, KernelOptions], args: Any, kwargs: Any) -> Any:
    """The call of a module's own class, with its products by these kernels as te_jax computes them.

    It runs on a copy, since it is traced. What it changes in the copy's variables is then changed in the module's.
    """
    layer = _layer_class(module)
    kernels = {name: getattr(module, name).get_raw_value() for name in options}
    for name, kernel in kernels.items():
        if isinstance(kernel, QuantizedArray):
            raise ValueError(
                f"{name} of {layer.__name__} is quantized already, and te_jax does not multiply by it inside of the "
                "__call__ of another class: convert without quantize_kernels, or give it a rule with None"
            )
    graphdef, state = nnx.split(module)
    before = {path: variable.get_raw_value() for path, variable in nnx.to_flat_state(state)}

    def call(*values: jax.Array) -> Any:
        copy: Any = nnx.merge(graphdef, state, copy=True)
        for name, value in zip(kernels, values, strict=True):
            getattr(copy, name).set_raw_value(value)
        y = layer.__call__(copy, *args, **kwargs)  # pyright: ignore[reportCallIssue]
        after = nnx.to_flat_state(nnx.state(copy))
        changed = [(p, v) for p, v in after if p not in inputs and v.get_raw_value() is not before.get(p)]
        return y, nnx.from_flat_state(changed)

    inputs = {(name,) for name in kernels}
    name = f"{layer.__module__}.{layer.__qualname__}"
    way_out = _QWIX_FIRST if hasattr(module, "qwix_path") else conversion.WAY_OUT_OF_KERNELS
    y, changed = call_with_products(call, kernels, options, name, way_out)
    if changed:
        nnx.update(module, changed)
    return y


def _how(module: Any, known: conversion.Layers) -> conversion.KernelsLayer | None:
    """How a class with a `__call__` of its own multiplies, as `layers` says or said in a former conversion."""
    layer = _layer_class(module)
    flax = _flax_class(layer)
    if flax is not None and layer.__call__ is flax.__call__:  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
        return None
    how = conversion.entry_of(known, layer)
    return module.te_jax_converted.how if how is None and isinstance(module, _OwnCall) else how


def _decide_kernel(
    paths: tuple[str, ...],
    module: Any,
    how: conversion.KernelsLayer,
    name: str,
    recipe: Recipe | None,
    rules: tuple[tuple[str, Recipe | None], ...],
    with_lora: bool,
) -> conversion.Layer:
    """The row of a kernel of a `KernelsLayer`."""
    kernel: Any = getattr(module, name, None)
    layer = _layer_class(module)
    named = tuple("/".join(filter(None, (path, name))) for path in paths)
    rows = named if len(how.kernels) > 1 else paths
    shape = tuple(kernel.shape) if isinstance(kernel, nnx.Variable) else None
    if shape is None:
        obstacle = _no_variable(module, name, "KernelsLayer")
    elif hasattr(module, "qwix_path") and not with_lora:
        obstacle = conversion.WRAPPED_BY_QWIX
    else:
        obstacle = None
    experts = shape is not None and len(shape) > 2
    chosen, reason = conversion.decide((*named, *paths), recipe, rules, obstacle, experts=experts)
    if chosen is not None and shape is not None:
        obstacle = conversion.obstacle_in_kernel(how, shape, kernel.get_raw_value().dtype, chosen)
        chosen, reason = (chosen, reason) if obstacle is None else (None, obstacle)
    return conversion.layer_of_kernel(
        rows[0], layer, shape, chosen, reason, rows[1:], experts=how.experts is not None, share=how.share(module)
    )


def _no_variable(module: Any, name: str, entry: str) -> str:
    kernel = getattr(module, name, None)
    if kernel is None:
        return f"it has no {name}, which its {entry} names as the kernel"
    if hasattr(module, "qwix_path"):
        return f"qwix has quantized its {name}"
    return f"its {name} is no nnx.Variable"


def _is_adapted_by_qwix(module: Any) -> bool:
    """Whether qwix has added LoRA to a module. In such a model it computes no other product."""
    return hasattr(module, "qwix_path") and any(
        isinstance(variable, nnx.LoRAParam) and name.endswith("_lora_a") for name, variable in _own_variables(module)
    )


def _adapters(paths: tuple[str, ...], module: nnx.Module) -> Iterator[conversion.Layer]:
    """The rows of matrices of LoRA."""
    for name, variable in _own_variables(module):
        if isinstance(variable, nnx.LoRAParam):
            first, *others = ("/".join(filter(None, (path, name))) for path in paths)
            yield conversion.layer_of_kernel(
                first, type(variable), variable.shape, None, conversion.ADAPTER, tuple(others)
            )


def _is_linear(module: nnx.Module) -> bool:
    return issubclass(_layer_class(module), (*_OURS, LinearGeneral, Einsum)) and hasattr(module, "kernel")


def _own_variables(module: nnx.Module) -> Iterator[tuple[str, nnx.Variable]]:
    """The variables of a module, with their paths in it, without those of modules in it."""
    for name, value in vars(module).items():
        leaves = jax.tree.leaves_with_path(value, is_leaf=lambda leaf: isinstance(leaf, nnx.Module | nnx.Variable))
        for path, leaf in leaves:
            if isinstance(leaf, nnx.Variable):
                yield jax.tree_util.keystr(((jax.tree_util.DictKey(name), *path)), simple=True, separator="/"), leaf


def _kernels_of_another_class(
    paths: tuple[str, ...], module: nnx.Module, except_for: Sequence[str] = ()
) -> Iterator[conversion.Layer]:
    """The rows of a module that is no linear layer."""
    kernels: dict[str, tuple[int, ...]] = {}
    for name, variable in _own_variables(module):
        shape = tuple(getattr(variable.get_value(), "shape", ()))
        last = name.rpartition("/")[2]
        other = isinstance(variable, nnx.LoRAParam) or last in ("scale", "bias") or conversion.is_token(last, shape)
        if isinstance(variable, nnx.Param) and len(shape) >= 2 and not other and name not in except_for:
            kernels[name] = shape
    several, convolution = len(kernels) + len(except_for) > 1, isinstance(module, nnx.Conv | nnx.ConvTranspose)
    for name, shape in kernels.items():
        if isinstance(module, nnx.Embed) or "emb" in name:
            reason = conversion.EMBEDDING
        elif except_for:
            reason = "its KernelsLayer does not name it as a kernel"
        else:
            reason = conversion.no_linear_layer(type(module), "nnx.Linear, nnx.LinearGeneral and nnx.Einsum")
        chosen = None
        if (noted := _noted_by_maxtext(module, shape)) is not None:
            chosen, reason = noted.recipe, noted.reason or "by its MaxTextQuantization"
        first, *others = ["/".join(filter(None, (path, name))) for path in paths] if several else paths
        yield conversion.layer_of_kernel(
            first, _layer_class(module), shape, chosen, reason, tuple(others),
            experts=len(shape) > 2 and not convolution and noted is None,
        )  # fmt: skip


def _noted_by_maxtext(module: nnx.Module, shape: tuple[int, ...]) -> conversion.Layer | None:
    """The row of a kernel of MaxText's layers that a bridged `te_jax.flax.maxtext.DotGeneral` multiplies by."""
    products = (getattr(child, "to_nnx__module", None) for child in vars(module).values())
    noting = [getattr(product, "noted") for product in products if hasattr(product, "noted")]  # noqa: B009
    return noting[0](shape) if noting else None


def _foreign_part(module: Any, with_lora: bool) -> str | None:
    """A part that another library added to a layer of Flax, if any: te_jax's product would disconnect it.

    Args:
      with_lora: whether the model has LoRA of qwix. Calls of converted layers know that.
    """
    if not isinstance(module.kernel, nnx.Variable):
        return _no_variable(module, "kernel", "class")
    if _is_ours(module):
        return None
    if hasattr(module, "qwix_path"):  # qwix marks all modules of its models
        return None if with_lora else conversion.WRAPPED_BY_QWIX
    if isinstance(module, LinearGeneral | Einsum):
        return None
    others = [
        name
        for name, variable in _own_variables(module)
        if name not in ("kernel", "bias") and not isinstance(variable, nnx.RngState | nnx.Intermediate)
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
    return None


def _sizes(module: Any) -> tuple[int, ...]:
    """Features in and out."""
    if _is_einsum(module):
        return conversion.sizes_of_einsum(module.einsum_str, module.kernel_shape)
    return tuple(math.prod(linear.as_tuple(each)) for each in (module.in_features, module.out_features))


def _is_einsum(module: nnx.Module) -> bool:
    return isinstance(module, nnx.Einsum | Einsum)


def _flax_class(layer: type[nnx.Module]) -> type[nnx.Module] | None:
    return next((flax for flax in _OURS if issubclass(layer, flax)), None)


def _stacked_shape(module: Any) -> tuple[int, ...] | None:
    """The dimensions along which `nnx.vmap` stacked the layer, if they are the first ones. Other classes show none."""
    if not _is_linear(module):
        return ()
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
    _set_scaling_state(module, options.recipe, _stacked_shape(module))


def _set_own_call(module: Any, converted: _Converted) -> None:
    """Gives a layer that `layers` names its recipes. Without one it becomes what it was."""
    before = _before(module)
    if not converted.options:
        if before is not None:
            _restore(module, before)
            _remove(module, "_before_conversion")
        return
    if before is None:
        module._before_conversion = _Before(type(module), None)
        object.__setattr__(module, "__class__", _converted_class(type(module)))
    module.te_jax_converted = converted
    former = getattr(module, "te_jax_states", {})
    module.te_jax_states = nnx.Dict()
    for name, options in converted.options:
        if isinstance(options.recipe, DelayedScaling):
            module.te_jax_states[name] = state = former.get(name, nnx.Dict())
            _set_scaling_state(state, options.recipe, state.uses.shape if "uses" in state else _stacked_shape(module))


def _restore(module: Any, before: _Before) -> None:
    if before.options is not None:
        module.options = before.options
        _set_scaling_state(module, before.options.recipe, _stacked_shape(module))
        return
    object.__setattr__(module, "__class__", before.layer)
    if hasattr(module, "te_jax_converted"):
        _remove(module, "te_jax_converted", "te_jax_states")
        return
    _remove(module, *delayed_scaling.STATE_NAMES, "options", "activation")
    if not isinstance(module, nnx.LinearGeneral):
        _remove(module, "axis")


def _set_scaling_state(module: Any, recipe: Recipe | None, stacked: tuple[int, ...] | None) -> None:
    """Adds the state of delayed scaling, or removes it. A state of the same shape is kept."""
    initial = delayed_scaling.initial_state(recipe) if isinstance(recipe, DelayedScaling) else {}
    shapes = {name: (*(stacked or ()), *value.shape) for name, value in initial.items()}
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
    """A subclass of a layer and of how te_jax calls it: a class of its own `__call__`, or one of Flax's."""
    flax = _flax_class(layer)
    if flax is None or layer.__call__ is not flax.__call__:  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
        bases = _OwnCall, layer
    else:
        bases = _FlaxLayer, _OURS[flax], layer
    metaclass = conversion.metaclass_for_pickle(type(layer), _converted_class)
    named = _OURS.get(layer, layer)
    names = {"__module__": named.__module__, "__qualname__": named.__qualname__}
    return types.new_class(layer.__name__, bases, {"metaclass": metaclass}, lambda body: body.update(names))
