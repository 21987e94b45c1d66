"""A Linen module of Flax's layers into FP8, by intercepting the calls of its layers."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import DenyList, lift, meta, unfreeze
from flax.linen import dtypes
from flax.linen.module import InterceptorContext
from flax.linen.transforms import lift_direct_transform
from jax import Array

from te_jax import native
from te_jax._core.types import PyTree
from te_jax.flax import linear as modules
from te_jax.layers import convert as conversion
from te_jax.layers import linear
from te_jax.layers.kernel_products import KernelOptions, call_with_products
from te_jax.recipe import Recipe

Model = TypeVar("Model", bound=nn.Module)

_FLAX = (nn.Dense, nn.DenseGeneral, nn.Einsum)
_OURS = (modules.DenseGeneral, modules.Einsum)


def convert(
    module: Model,
    recipe: Recipe | None,
    *,
    rules: conversion.Rules = (),
    layers: conversion.Layers = MappingProxyType({}),
    state_axis: str | tuple[str, ...] | None = None,
    implementation: native.Implementation | None = None,
) -> Model:
    """Returns a module that computes the linear layers of the given one in FP8.

        model = te_jax.flax.convert(model, BlockScaling(), rules=[("decoder/layer_0/*", None)])
        variables = model.init(jax.random.key(0), x)
        print(te_jax.flax.report(model))

    `nn.Dense`, `nn.DenseGeneral` and `nn.Einsum`, wherever the module creates or calls them, and classes of yours that
    inherit their `__call__`, compute like te_jax's layers of these names. Layers of te_jax get the recipe. Parameters
    keep their names, shapes and initial values. `DelayedScaling` adds its state in the collection
    "_overwrite_with_gradient": `nn.scan` and `nn.vmap` must name it in their `variable_axes`. Classes of yours that
    multiply by themselves are converted if `layers` says how; DeepMind's gemma is known. FP8 replaces a layer's
    `precision`, and the report says so. Convert a model once, outside of functions that run often: JAX traces each
    conversion separately.

    Unless a rule names a recipe for them, `convert` leaves output heads alone (a part of the path is "head", "lm_head",
    "logits", "logitdense", "classifier", "unembed" or similar, or the last part is "output"), and routers ("router", or
    "gate" in a part with "moe", but no einsum of experts). It always leaves alone embeddings; dtypes that FP8 layers do
    not have; layers in te_jax's `Attention`, `GatedMLP` and other modules with a recipe argument; layers with a
    `__call__`, `dot_general`, `dot_general_cls`, `promote_dtype`, `preferred_element_type` or `batch_dims` of their
    own; and layers in models that qwix made, such as those with LoRA, or in a `nn.intercept_methods` of the model.

    Args:
      module: a Linen module that is not bound. It is not changed. If it was converted before, this recipe and these
        rules take the place of the former.
      recipe: for all layers that no rule names; None to convert only those that a rule names.
      rules: pairs of a pattern and a recipe or None; the first pattern that matches the path of a layer applies. Paths
        are those of the parameters, joined by "/". `*` matches any characters, also "/".
      layers: a `KernelsLayer` for classes of yours, by class or by full name ("my_models.layers.Einsum"). Classes that
        inherit their `__call__` are meant, too. `init` runs them as they are.
      state_axis, implementation: as in `DenseGeneral`.

    Returns:
      A module of a subclass of its class, with the same attributes and methods. Call these, not those of submodules
      that `bind` returns, which are not intercepted. After it has run, `report` lists the converted layers.

    Raises:
      ValueError: module is no Linen module or bound, or recipe, rules or layers are invalid. Later, in a call: a class
        of `layers` uses a kernel otherwise than in products.
    """
    rules, known = conversion.validate(recipe, rules), conversion.validate_layers(layers)
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"module is of type {type(module).__name__}; it must be a flax.linen.Module; "
            "te_jax.nnx.convert takes models of flax.nnx"
        )
    if module.parent is not None or module.scope is not None:
        raise ValueError(
            f"module {type(module).__name__} is bound or was made inside of another module; convert the outer one, "
            "with a rule for its path"
        )
    made = {field.name: getattr(module, field.name) for field in dataclasses.fields(module) if field.init}
    made["te_jax_conversion"] = _Conversion(recipe, rules, known, state_axis, implementation)
    base = type(module)
    return _converted_class(base.__bases__[0] if _conversion_of(module) else base)(**made)


def report(module: nn.Module) -> conversion.Report:
    """Reports what the conversion of a module did with each layer that has run so far.

    Linen creates layers when they run, so first call `init` or `apply`. Tracing is enough:
    `jax.eval_shape(model.init, jax.random.key(0), x)`.

    Args:
      module: a result of `convert`.

    Returns:
      The layers in the order of their first calls.

    Raises:
      ValueError: module was not converted, or has not run.
    """
    made = _conversion_of(module)
    if made is None:
        raise ValueError(f"module is of type {type(module).__name__}; it must be what te_jax.flax.convert returned")
    if not made.log.layers:
        raise ValueError(
            "module has not run, and Linen makes layers when they run: call its init or apply before, or "
            "jax.eval_shape(module.init, jax.random.key(0), x)"
        )
    return conversion.report(made.log.rows(), made.rules)


def options_in_call(context: InterceptorContext) -> linear.Options | None:
    """How a layer multiplied in a call that ended, by itself or as converted; None if it is no layer in FP8.

    Args:
      context: of the call, as an interceptor of Flax gets it.
    """
    module: Any = context.module
    if not _has_kernel(context):
        return None
    if isinstance(module, _OURS):
        options = modules.layer_options(module)
    else:
        options = None if _running.conversion is None else _running.conversion.options_in_last_call(module)
    return None if options is None or options.recipe is None else options


class _Log:
    """The kernels that a conversion has met, by the paths of their modules and their names: "" in a linear layer."""

    def __init__(self):
        self.layers: dict[tuple[str, str], conversion.Layer] = {}
        self.of_shape: dict[tuple[str, str], Callable[..., conversion.Layer]] = {}

    def complete(self, params: PyTree) -> None:
        """Counts whole kernels: `nn.scan` and `nn.vmap` show a layer its part of them."""
        for (path, name), row in self.of_shape.items():
            whole = modules.unboxed(_at(params, "/".join(filter(None, (path, name or "kernel")))))
            if getattr(whole, "ndim", 0) >= 2:
                self.layers[path, name] = row(shape=whole.shape)
        self.of_shape.clear()

    def rows(self) -> list[conversion.Layer]:
        """The layers, with the names of kernels in the paths of modules that are no linear layers and have several."""
        kernels = collections.Counter(path for path, _ in self.layers)
        return [
            dataclasses.replace(layer, path="/".join(filter(None, (path, name)))) if kernels[path] > 1 else layer
            for (path, name), layer in self.layers.items()
        ]


@dataclasses.dataclass(frozen=True)
class _Conversion:
    recipe: Recipe | None
    rules: tuple[tuple[str, Recipe | None], ...]
    layers: conversion.Layers = dataclasses.field(hash=False)
    state_axis: str | tuple[str, ...] | None
    implementation: native.Implementation | None
    log: _Log = dataclasses.field(default_factory=_Log, compare=False, repr=False)

    def options_in_last_call(self, module: Any) -> linear.Options:
        """How a layer of Flax multiplied, with the recipe None if as Flax does."""
        recipe = self.log.layers[_path(module), ""].recipe
        return linear.Options(recipe, self.state_axis, self.implementation)

    def intercept(self, call: Callable[..., Any], args: Any, kwargs: Any, context: InterceptorContext) -> Any:
        """Runs a method: that of a linear layer on te_jax's products."""
        module: Any = context.module
        if _running.composite is not None:
            y = call(*args, **kwargs)
            if _has_kernel(context):
                reason = conversion.part_of(_running.composite)
                self._note(module, "kernel", module.get_variable("params", "kernel"), module.recipe, reason)
            return y
        if context.method_name == "__call__" and conversion.is_composite(module, _OURS):
            _running.composite = type(module)
            try:
                return call(*args, **kwargs)
            finally:
                _running.composite = None
        how = self._entry(context)
        if how is not None:
            return self._kernels(how, call, args, kwargs, context)
        if not _has_kernel(context):
            y = call(*args, **kwargs)
            if context.method_name == "__call__" and not isinstance(module, _OURS):
                self._note_other(module)
            return y
        if isinstance(module, _OURS):
            recipe, reason = self._recipe_of_ours(module, args, kwargs)
            object.__setattr__(module, "recipe", recipe)  # modules are made anew for each init and apply
            y = call(*args, **kwargs)
        else:
            obstacle = _foreign_part(module, call, context) or _own_behaviour(module)
            recipe, reason = self._decide(module, obstacle or _obstacle(module, *args, **kwargs), args, kwargs)
            if recipe is None:
                y = call(*args, **kwargs)
            else:
                reason = conversion.replaced_precision(module.precision)
                options = linear.Options(recipe, self.state_axis, self.implementation)
                y = _compute(module, options, *args, **kwargs)
        self._note(module, "kernel", module.get_variable("params", "kernel"), recipe, reason)
        return y

    def _entry(self, context: InterceptorContext) -> conversion.KernelsLayer | None:
        module: Any = context.module
        inherited = module is _running.own_call  # its __call__ calls that of its base
        plain = isinstance(module, _OURS) or (isinstance(module, _FLAX) and not _has_own_call(module))
        if context.method_name != "__call__" or inherited or plain:
            return None
        return conversion.entry_of(self.layers, type(module))

    def _kernels(
        self,
        how: conversion.KernelsLayer,
        call: Callable[..., Any],
        args: Any,
        kwargs: Any,
        context: InterceptorContext,
    ) -> Any:
        """Runs the call of a class with kernels that `layers` names, and its products by these in FP8."""
        module: Any = context.module
        plain = functools.partial(_own_call, module, call)
        first = plain(*args, **kwargs) if module.is_initializing() else None  # makes the parameters
        params = module.variables.get("params", {})
        kernels = {name: _at(params, name) for name in how.names(module)}
        foreign, options = _foreign_part(module, call, context), {}
        for name, kernel in kernels.items():
            obstacle = (
                foreign if hasattr(kernel, "dtype") else f"it has no {name}, which its KernelsLayer names as the kernel"
            )
            experts = getattr(kernel, "ndim", 0) > 2
            paths = "/".join(filter(None, (_path(module), name))), _path(module)
            recipe, reason = conversion.decide(paths, self.recipe, self.rules, obstacle, experts=experts)
            if recipe is not None:
                obstacle = conversion.obstacle_in_kernel(how, kernel.shape, kernel.dtype, recipe)
                recipe, reason = (recipe, reason) if obstacle is None else (None, obstacle)
            if recipe is not None:
                state = modules.scaling_state(module, recipe, name.replace("/", "_"))
                options[name] = KernelOptions(linear.Options(recipe, self.state_axis, self.implementation), state)
            self._note(module, name, kernel, recipe, reason, experts=how.experts is not None, share=how.share(module))
        if first is not None:
            return first
        if not options:
            return plain(*args, **kwargs)
        name = f"{type(module).__module__}.{type(module).__qualname__}"
        method = context.orig_method.func  # pyright: ignore[reportFunctionMemberAccess]

        def te_jax_own_call(module: Any) -> Any:
            return _own_call(module, functools.partial(method, module), *args, **kwargs)

        return lift_direct_transform(
            functools.partial(_with_products, options=options, owner=name),
            (te_jax_own_call,),
            module,
            multi_scope=False,
        )

    def _decide(self, module: Any, obstacle: str | None, args: Any, kwargs: Any) -> tuple[Recipe | None, str]:
        experts = obstacle is None and _has_experts(module, *args, **kwargs)
        return conversion.decide((_path(module),), self.recipe, self.rules, obstacle, experts=experts)

    def _recipe_of_ours(self, module: Any, args: Any, kwargs: Any) -> tuple[Recipe | None, str]:
        recipe, reason = self._decide(module, _obstacle(module, *args, **kwargs), args, kwargs)
        if recipe is None and not reason.startswith("rule "):
            recipe = module.recipe  # one that someone gave to this very layer
        return recipe, reason

    def _note_other(self, module: nn.Module) -> None:
        for name, value in module.variables.get("params", {}).items():
            value = modules.unboxed(value)
            shared = (_path(module), "" if name == "kernel" else name) in self.log.layers  # noted with its scope
            matrix = getattr(value, "ndim", 0) >= 2 and not conversion.is_token(name, value.shape)
            if name not in ("scale", "bias") and matrix and not shared:
                embedding = isinstance(module, nn.Embed) or "emb" in name
                other = conversion.no_linear_layer(type(module), "nn.Dense, nn.DenseGeneral and nn.Einsum")
                reason = conversion.EMBEDDING if embedding else other
                experts = value.ndim > 2 and not isinstance(module, nn.Conv | nn.ConvTranspose | nn.ConvLocal)
                self._note(module, name, value, None, reason, experts=experts)

    def _note(
        self,
        module: nn.Module,
        name: str,
        kernel: Any,
        recipe: Recipe | None,
        reason: str,
        *,
        experts: bool = False,
        share: Fraction | None = None,
    ) -> None:
        shape = getattr(modules.unboxed(kernel), "shape", None)  # of a quantized kernel, none in some calls
        inner, _, name = name.rpartition("/")
        path = "/".join(filter(None, (_path(module), inner)))
        key = path, "" if name == "kernel" else name
        if shape is not None or key not in self.log.layers:
            row = functools.partial(
                conversion.layer_of_kernel,
                path,
                type(module),
                recipe=recipe,
                reason=reason,
                experts=experts,
                share=share,
                sizes=() if shape is None else _sizes(module, shape),
            )
            self.log.layers[key], self.log.of_shape[key] = row(shape=shape), row


class _Running(threading.local):
    """What runs in this thread: the conversion and the path of its module, a module of te_jax with layers, or the
    `__call__` of a class that `layers` names."""

    conversion: _Conversion | None = None
    root: tuple[str, ...] = ()
    composite: type[nn.Module] | None = None
    own_call: nn.Module | None = None


_running = _Running()

# nn.jit must trace again: a trace of the module without this conversion computes something else.
_traced_as = jax.make_user_context()


@contextlib.contextmanager
def _intercepted(made: _Conversion, root: tuple[str, ...]):
    """Within it, layers compute as a conversion says. The outermost one holds."""
    if _running.conversion is not None:
        yield
        return
    _running.conversion, _running.root = made, root
    try:
        with nn.intercept_methods(made.intercept), _traced_as(made.log):
            yield
    finally:
        _running.conversion = None


def _conversion_of(module: nn.Module) -> _Conversion | None:
    return getattr(module, "te_jax_conversion", None)


@functools.cache
def _converted_class(base: type[nn.Module]) -> type:
    """A subclass whose methods run with the calls of layers intercepted, however they are reached."""

    metaclass: Any = conversion.metaclass_for_pickle(type(base), _converted_class)

    class Converted(base, kw_only=True, metaclass=metaclass):
        te_jax_conversion: Any = None

        @nn.nowrap
        def apply(self, *args: Any, **kwargs: Any):
            with _intercepted(self.te_jax_conversion, ()):
                return super().apply(*args, **kwargs)

        @nn.nowrap
        def init_with_output(self, *args: Any, **kwargs: Any):
            with _intercepted(self.te_jax_conversion, ()):
                return super().init_with_output(*args, **kwargs)

        @nn.nowrap
        def _call_wrapped_method(self, fun: Any, args: Any, kwargs: Any):  # as part of another module, or bound
            with _intercepted(self.te_jax_conversion, self.path if self.scope is not None else ()):
                result = super()._call_wrapped_method(fun, args, kwargs)
                if self.scope is not None and self.path == _running.root and _running.conversion is not None:
                    _running.conversion.log.complete(self.variables.get("params", {}))
                return result

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Converted, name, getattr(base, name))
    return Converted


def _path(module: nn.Module) -> str:
    return "/".join(module.path[len(_running.root) :])


def _has_kernel(context: InterceptorContext) -> bool:
    """Whether a call is that of a linear layer in which it has its kernel."""
    method = "held" if isinstance(context.module, _OURS) else "__call__"
    return isinstance(context.module, (*_FLAX, *_OURS)) and context.method_name == method


def _compute(
    module: Any, options: linear.Options, inputs: jax.typing.ArrayLike, einsum_str: str | None = None
) -> Array:
    """The result of a layer of Flax, by te_jax's products."""
    if isinstance(module, nn.Einsum):
        return modules.einsum(module, inputs, einsum_str, options)
    inputs = jnp.asarray(inputs)
    axis = _axis(module, inputs)
    return linear.linear(
        inputs,
        *modules.held(module, tuple(inputs.shape[i] for i in axis), options.recipe),
        axis=axis,
        features=linear.as_tuple(module.features),
        dtype=module.dtype,
        activation=None,
        options=options,
    )


def _foreign_part(module: Any, call: Callable[..., Any], context: InterceptorContext) -> str | None:
    """A part that another library adds to a call of a layer, if any: te_jax's product would disconnect it."""
    if call is not context.orig_method:
        return "it runs in a nn.intercept_methods of the model"
    holder = module
    while isinstance(holder, nn.Module):
        if conversion.is_wrapped_by_qwix(holder):
            return conversion.WRAPPED_BY_QWIX
        holder = holder.parent
    return None


def _own_call(module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The call of a class that `layers` names, in which that of its base is no other layer."""
    outer, _running.own_call = _running.own_call, module
    try:
        return call(*args, **kwargs)
    finally:
        _running.own_call = outer


def _with_products(function: Callable[..., Any], scope: Any, *, options: dict[str, KernelOptions], owner: str) -> Any:
    """A lifted transformation: function(scope), with its products by kernels in FP8."""

    def inner(scope_fn: Any, repack_fn: Any, variable_groups: Any, rng_groups: Any) -> Any:
        ((variables,),) = variable_groups  # of one filter and one scope

        def call(*values: Array) -> Any:
            params = unfreeze(variables["params"])
            for name, value in zip(options, values, strict=True):
                *parents, leaf = name.split("/")
                holder = functools.reduce(lambda tree, key: tree[key], parents, params)
                holder[leaf] = meta.replace_boxed(holder[leaf], value)
            scope = scope_fn((({**variables, "params": params},),), rng_groups)
            y = function(scope)
            return y, repack_fn(scope)

        kernels = {name: _at(variables["params"], name) for name in options}
        return call_with_products(call, kernels, options, owner, conversion.WAY_OUT_OF_KERNELS)

    return lift.pack(inner, (True,), (DenyList("params"),), (True,), name="te_jax")(scope)


def _at(params: PyTree, name: str) -> Any:
    """The value of a parameter by its path, or None."""
    for key in name.split("/"):
        params = params.get(key) if isinstance(params, Mapping) else None
    return modules.unboxed(params)


def _has_own_call(module: Any) -> bool:
    flax = next(layer for layer in _FLAX if isinstance(module, layer))
    return type(module).__call__ is not flax.__call__


def _own_behaviour(module: Any) -> str | None:
    """How a layer of Flax behaves otherwise than te_jax's, if so."""
    if _has_own_call(module):
        return f"{type(module).__name__} has a __call__ of its own"
    usual = {"promote_dtype": dtypes.promote_dtype}
    for name in ("dot_general", "dot_general_cls", "promote_dtype", "preferred_element_type"):
        if getattr(module, name, usual.get(name)) is not usual.get(name):
            return f"it has a {name} of its own"
    return "it has batch_dims" if linear.as_tuple(getattr(module, "batch_dims", ())) else None


def _obstacle(module: Any, inputs: Any = None, einsum_str: str | None = None) -> str | None:
    """Why FP8 cannot take a layer, if so."""
    del inputs
    if obstacle := conversion.obstacle_in_dtype(module.dtype, module.param_dtype):
        return obstacle
    if isinstance(module, nn.Einsum | modules.Einsum):
        return conversion.obstacle_in_einsum(einsum_str or module.einsum_str, linear.as_tuple(module.shape))
    return None


def _sizes(module: nn.Module, shape: Sequence[int]) -> tuple[int, ...]:
    """Features in and out of a kernel of this shape, where they are known."""
    if isinstance(module, nn.Einsum | modules.Einsum):
        return conversion.sizes_of_einsum(module.einsum_str, shape)
    if not isinstance(module, nn.Dense | nn.DenseGeneral | modules.DenseGeneral):
        return ()
    out = math.prod(linear.as_tuple(module.features))
    return math.prod(shape) // out, out


def _has_experts(module: Any, inputs: Any = None, einsum_str: str | None = None) -> bool:
    del inputs
    if not isinstance(module, nn.Einsum | modules.Einsum):
        return False
    return conversion.has_experts(einsum_str or module.einsum_str, linear.as_tuple(module.shape))


def _axis(module: Any, inputs: Any) -> tuple[int, ...]:
    axis = linear.as_tuple(getattr(module, "axis", -1))
    return tuple(sorted(linear.normalize_axes("axis", axis, jnp.ndim(inputs))))
