"""Kernels that are quantized once per optimizer step, and gradients that are added up over microbatches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import flax.linen as nn
import jax
from flax import serialization
from flax.core import meta

from te_jax._core.types import PyTree
from te_jax.flax.convert import options_in_call
from te_jax.flax.linear import Einsum, unboxed
from te_jax.layers import linear, microbatches
from te_jax.ops.linear.kernels import Requantize
from te_jax.quantized import QuantizedArray

Variables = PyTree
"""A nest of dicts with arrays, as `flax.linen.Module.init` returns it."""

# nn.jit must trace again: a cached trace would not report its layers.
_traced_anew = jax.make_user_context()


def quantize_kernels(model: nn.Module, variables: Variables, *args: object, **kwargs: object) -> Variables:
    """Quantizes the kernels of te_jax's layers, and of converted ones, once for several microbatches.

    Each becomes a `te_jax.quantized.QuantizedArray`, as its layer's recipe says. Kernels of layers with recipe=None and
    all other variables keep their values, but lose names of logical axes. Apply the model to the result as to
    `variables`, and take gradients with `accumulate_gradients`; the optimizer keeps `variables`. Each call traces the
    model to find its layers: call it inside `jit`.

    Args:
      model: a Linen module.
      variables: those of `model.apply`. `flax.linen.scan` and `vmap` must stack kernels along the first dimension
        (`variable_axes={"params": 0}`).
      args, kwargs: the other arguments of `model.apply`. Only shapes and dtypes of arrays in args are used.

    Returns:
      Variables of the same structure.

    Raises:
      ValueError: model is no Linen module, a kernel is stacked along another dimension than the first, or the kernel of
        an `Einsum` has its dimensions in an order that cannot be quantized once.
    """
    return _map_kernels(linear.quantize_kernel, lambda value: value, model, variables, args, kwargs)


def requantize(model: nn.Module, variables: Variables, *args: object, **kwargs: object) -> Variables:
    """How the kernels of te_jax's layers are quantized, for `te_jax.parallel.FSDP` and `te_jax.optim.apply_updates`.

    Args:
      model, variables, args, kwargs: as for `quantize_kernels`; arrays may be `jax.ShapeDtypeStruct`.

    Returns:
      A tree like the variables, with a `te_jax.optim.Requantize` for each kernel of a layer that has a recipe, also of
      a converted one, and None elsewhere.

    Raises:
      ValueError: what `quantize_kernels` refuses.
    """

    def how(value: jax.Array, row_ndim: int, col_ndim: int, options: linear.Options) -> Requantize:
        assert options.recipe is not None
        return Requantize(options.recipe, row_ndim, value.ndim - row_ndim - col_ndim, options.implementation)

    return _map_kernels(how, lambda _: None, model, variables, args, kwargs)


def _map_kernels(
    of_kernel: Callable[..., PyTree],
    of_other: Callable[[jax.Array], PyTree],
    model: nn.Module,
    variables: Variables,
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> Variables:
    """of_kernel(kernel, its numbers of dimensions, options of its layer) where a layer has a recipe, else of_other."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is of type {type(model).__name__}; it must be a flax.linen.Module")
    layers: dict[tuple[str, ...], tuple[linear.Options, tuple[int, ...], tuple[int, int]]] = {}

    def note(call, call_args, call_kwargs, context):
        y, module = call(*call_args, **call_kwargs), context.module
        options = options_in_call(context)
        if options is not None and not _is_quantized(kernel := _unboxed(module.get_variable("params", "kernel"))):
            layers[module.path] = (options, kernel.shape, _kernel_ndims(module, kernel.shape))
        return y

    leaves, structure = jax.tree.flatten(args)
    arrays = {i: leaf for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")}

    def apply(variables: Variables, arrays: dict[int, jax.Array]):
        given = structure.unflatten([arrays.get(i, leaf) for i, leaf in enumerate(leaves)])
        return model.apply(variables, *given, **kwargs)

    with nn.intercept_methods(note), _traced_anew(object()):
        jax.eval_shape(apply, variables, arrays)

    def quantized(path: jax.tree_util.KeyPath, value: jax.Array):
        keys = tuple(entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey))
        if keys[:1] != ("params",) or keys[-1] != "kernel" or keys[1:-1] not in layers:
            return of_other(value)
        options, shape, ndims = layers[keys[1:-1]]
        if value.shape[value.ndim - len(shape) :] != shape:
            raise ValueError(
                f"kernel {'/'.join(keys[1:])} has shape {value.shape}, and its layer sees {shape}: "
                'stack the kernels of layers along the first dimension, variable_axes={"params": 0}'
            )
        return of_kernel(value, *ndims, options)

    return jax.tree.map_with_path(quantized, _unboxed(variables), is_leaf=_is_quantized)


def _kernel_ndims(module: nn.Module, shape: tuple[int, ...]) -> tuple[int, int]:
    """How many dimensions the rows and the columns of a layer's quantized kernel have."""
    if isinstance(module, Einsum | nn.Einsum):
        return linear.Einsum.parse(module.einsum_str, shape).kernel_ndims
    rows = len(linear.as_tuple(getattr(module, "axis", -1)))
    return rows, len(shape) - rows


def merge_gradients(first: Variables, second: Variables) -> Variables:
    """The gradients of two microbatches as one: their sum, and the maximum in "_overwrite_with_gradient".

    Args:
      first, second: gradients with respect to the same variables.

    Raises:
      ValueError: they are of different variables.
    """
    microbatches.validate_mergeable(microbatches.named_leaves(first), microbatches.named_leaves(second))
    return jax.tree.map_with_path(microbatches.merged, first, second)


def _is_quantized(x: object) -> bool:
    return isinstance(x, QuantizedArray)


def _unboxed(tree: PyTree) -> PyTree:
    return jax.tree.map(unboxed, tree, is_leaf=lambda x: isinstance(x, (meta.AxisMetadata, QuantizedArray)))


def _to_state_dict(kernel: QuantizedArray) -> dict[str, jax.Array]:
    return {path[0].name: leaf for path, leaf in jax.tree.leaves_with_path(kernel)}


def _from_state_dict(kernel: QuantizedArray, state: dict[str, jax.Array]) -> QuantizedArray:
    names = sorted(_to_state_dict(kernel))
    if sorted(state) != names:
        raise ValueError(
            f"a quantized kernel at {serialization.current_path()} was saved with {sorted(state)}, and the target has "
            f"{names}: restore into what quantize_kernels returns for the same model, with the same copies"
        )
    return dataclasses.replace(kernel, **state)


# flax.serialization knows only its own dataclasses.
serialization.register_serialization_state(QuantizedArray, _to_state_dict, _from_state_dict)
