"""Kernels that are quantized once per optimizer step, and gradients that are added up over microbatches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from te_jax.layers import linear, microbatches
from te_jax.nnx.linear import Einsum, LinearGeneral
from te_jax.nnx.variables import OverwriteWithGradient, QuantizedKernel
from te_jax.ops.linear.kernels import Requantize
from te_jax.quantized import QuantizedArray

Model = TypeVar("Model", bound=nnx.Module)

_ZEROS = (
    "jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Any(nnx.Param, te_jax.nnx.OverwriteWithGradient))), of the "
    "model before quantize_kernels"
)


def quantize_kernels(model: Model) -> Model:
    """Quantizes the kernels of te_jax's layers, once for several microbatches.

    Each becomes a `QuantizedKernel`, as its layer's recipe says. Kernels of layers with recipe=None and all other
    variables are shared with the given model, which the optimizer updates. Take gradients with `accumulate_gradients`.

    Args:
      model: an NNX module or a container of modules. `nnx.vmap` must stack kernels along the first dimension.

    Returns:
      A model of the same structure. Layers that share a kernel share the quantized one.

    Raises:
      ValueError: model is no NNX module; layers share a kernel that they quantize differently or that something else
        needs as it is; or the kernel of an `Einsum` has its dimensions in an order that cannot be quantized once.
    """
    if not nnx.graph.is_node(model):
        raise ValueError(f"model is of type {type(model).__name__}; it must be a flax.nnx.Module, or hold some")
    quantized = nnx.clone(model, variables=False)
    done: dict[int, tuple[tuple[Any, ...], QuantizedKernel, Any]] = {}  # by the identity of the kernel's variable
    for path, module in nnx.iter_modules(quantized):
        if not isinstance(module, LinearGeneral | Einsum) or module.options.recipe is None:
            continue
        variable = module.kernel
        if isinstance(variable.get_value(), QuantizedArray):
            continue
        ndims = _kernel_ndims(module)
        how = (*ndims, module.options.recipe.quantization("kernel"))
        if id(variable) not in done:
            kernel = QuantizedKernel(linear.quantize_kernel(variable.get_value(), *ndims, module.options))
            done[id(variable)] = path, kernel, how
        first, kernel, as_first = done[id(variable)]
        if how != as_first:
            raise ValueError(
                f"layers {_name(first)} and {_name(path)} share a kernel and quantize it differently: give them the "
                "same recipe and the same numbers of dimensions, or kernels of their own"
            )
        module.kernel = kernel
    for path, node in nnx.iter_graph(quantized):
        if id(node) in done:
            raise ValueError(
                f"layer {_name(done[id(node)][0])} has a recipe and shares its kernel with {_name(path)}, which needs "
                "it as it is: use recipe=None for the layer, or a kernel of its own"
            )
    return quantized


def requantize(model: nnx.Module) -> nnx.State:
    """How the kernels of te_jax's layers are quantized, for `te_jax.parallel.FSDP` and `te_jax.optim.apply_updates`.

    Args:
      model: an NNX module or a container of modules. `nnx.vmap` must stack kernels along the first dimension.

    Returns:
      A state like `nnx.state(model)`, with a `te_jax.optim.Requantize` for each kernel of a layer that has a recipe,
      and None elsewhere; `nnx.filter_state(state, nnx.Param)` is that of parameters alone.

    Raises:
      ValueError: the kernel of an `Einsum` has its dimensions in an order that cannot be quantized once.
    """
    hows: dict[tuple[Any, ...], Requantize] = {}
    for path, module in nnx.iter_modules(model):
        if isinstance(module, LinearGeneral | Einsum) and module.options.recipe is not None:
            rows, cols = _kernel_ndims(module)
            stacked = module.kernel.get_value().ndim - rows - cols
            how = Requantize(module.options.recipe, rows, stacked, module.options.implementation)
            hows[(*path, "kernel")] = how
    flat = dict(nnx.to_flat_state(nnx.state(model)))
    return nnx.from_flat_state({path: variable.replace(hows.get(path)) for path, variable in flat.items()})


def _kernel_ndims(module: LinearGeneral | Einsum) -> tuple[int, int]:
    """How many dimensions the rows and the columns of a layer's quantized kernel have."""
    if isinstance(module, Einsum):
        return linear.Einsum.parse(module.einsum_str, module.kernel_shape).kernel_ndims
    return len(linear.as_tuple(module.in_features)), len(linear.as_tuple(module.out_features))


def accumulate_gradients(loss_fn: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., tuple[Any, nnx.State]]:
    """`nnx.value_and_grad` with respect to the model, adding to the gradients of earlier microbatches.

    The sum for a quantized kernel is updated in place if it is donated or the carry of a loop. `OverwriteWithGradient`
    variables are not summed: their next value is the maximum (`te_jax.recipe.merge`).

    Args:
      loss_fn: loss_fn(model, *args, **kwargs) returns a scalar, or (scalar, aux) with has_aux. What it changes in
        variables that are not differentiated, such as batch statistics, is kept.
      has_aux: as in `nnx.value_and_grad`.

    Returns:
      f(model, gradients, *args, **kwargs) -> (what loss_fn returns, gradients). `model` may have quantized kernels;
      `gradients` are a state of the parameters and the `OverwriteWithGradient` variables, zeros at first:
      `jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Any(nnx.Param, OverwriteWithGradient)))` before
      `quantize_kernels`. f raises ValueError where `gradients` do not fit.
    """

    @functools.wraps(loss_fn)
    def wrapped(model: nnx.Module, gradients: nnx.State, *args: object, **kwargs: object):
        if not isinstance(gradients, nnx.State):
            raise ValueError(f"gradients is of type {type(gradients).__name__}: start from {_ZEROS}")
        differentiable = nnx.Any(nnx.Param, OverwriteWithGradient)
        graphdef, quantized, trained, rest = nnx.split(model, QuantizedKernel, differentiable, ...)
        paths = {_name(path): path for path, _ in nnx.to_flat_state(quantized)}
        variables, before = dict(nnx.to_flat_state(quantized)), dict(nnx.to_flat_state(gradients))
        needed = variables | dict(nnx.to_flat_state(trained))
        microbatches.validate_gradients(_values(needed), _values(before), _ZEROS)

        def loss_of(kernels: dict[str, microbatches.AccumulatedKernel], trained: nnx.State):
            accumulated = {path: variables[path].replace(kernels[name]) for name, path in paths.items()}
            merged = nnx.merge(graphdef, nnx.from_flat_state(accumulated), trained, rest, copy=True)
            result = loss_fn(merged, *args, **kwargs)
            loss, aux = result if has_aux else (result, None)
            return loss, (aux, nnx.split(merged, nnx.Any(QuantizedKernel, differentiable), ...)[2])

        kernels = {name: variables[path].get_value() for name, path in paths.items()}
        sums = {name: before[path].get_value() for name, path in paths.items()}
        loss, (aux, changed), sums, found = microbatches.accumulate(loss_of, kernels, sums, trained)
        nnx.update(model, changed)
        after = {path: before[path].replace(sums[name]) for name, path in paths.items()}
        after |= {path: _merged(before[path], variable) for path, variable in nnx.to_flat_state(found)}
        return (loss, aux) if has_aux else loss, nnx.from_flat_state(after)

    return wrapped


def merge_gradients(first: nnx.State, second: nnx.State) -> nnx.State:
    """The gradients of two microbatches as one: their sum, and the maximum of `OverwriteWithGradient` variables.

    Args:
      first, second: gradients with respect to the same variables.

    Raises:
      ValueError: they are of different variables.
    """
    microbatches.validate_mergeable(*map(_named, (first, second)))
    return jax.tree.map(_merged, first, second, is_leaf=_is_variable)


def _named(gradients: nnx.State) -> dict[str, jax.Array]:
    leaves = jax.tree.leaves_with_path(gradients, is_leaf=_is_variable)
    return {jax.tree_util.keystr(path, simple=True, separator="."): variable.get_value() for path, variable in leaves}


def _is_variable(x: object) -> bool:
    return isinstance(x, nnx.Variable)


def _merged(first: nnx.Variable, second: nnx.Variable) -> nnx.Variable:
    a, b = first.get_value(), second.get_value()
    return first.replace(jnp.maximum(a, b) if isinstance(first, OverwriteWithGradient) else a + b.astype(a.dtype))


def _values(variables: dict[Any, nnx.Variable]) -> dict[str, jax.Array]:
    return {_name(path): variable.get_value() for path, variable in variables.items()}


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
