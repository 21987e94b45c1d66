"""Calling a registered target on local arrays."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import mlir

from te_jax import sharding
from te_jax.native import extension


def _attribute(value: object) -> object:
    """Handlers read float attributes as float32; jax.ffi would send Python's as float64."""
    return np.float32(value) if isinstance(value, float) else value


Type = jax.ShapeDtypeStruct | Array


def call(
    target: str,
    results: Mapping[str, Type],
    operands: Mapping[str, Array],
    *,
    aliases: Mapping[str, str] | None = None,
    **attributes: object,
) -> list[Array]:
    """Runs a target of the extension on local arrays, on whichever platform XLA compiles for.

    The extension knows the order in which a target takes and gives arrays (`TE_JAX_CALL` in its `ffi.cc`). For what is
    left out the target sees an array without elements.

    Args:
      target: name of the target, the same on every platform.
      results: an example of each result by name, for its shape and dtype.
      operands: arrays by name; XLA hands them over row-major.
      aliases: {operand: result} that must share one buffer. An operand that is still needed afterwards, or a jit
        argument that is not donated, is copied first.
      attributes: static values; Python floats are sent as float32.

    Returns:
      The results, in the order of `results`, varying over every manual mesh axis that an operand varies over.
    """
    names = _buffers(target)
    indices = {names[0].index(operand): names[1].index(result) for operand, result in (aliases or {}).items()}
    types, arrays = _in_order(target, names, results, operands)
    values = dict(zip(names[1], call_in_order(target, types, *arrays, aliases=indices, **attributes), strict=True))
    return [values[name] for name in results]


def call_in_order(
    target: str,
    results: Sequence[Type],
    *operands: Array,
    aliases: Mapping[int, int] | None = None,
    **attributes: object,
) -> tuple[Array, ...]:
    """`call` of targets whose numbers of operands and results depend on attributes. They come in order, and aliases are
    their indices."""
    extension.register()
    return tuple(
        jax.ffi.ffi_call(
            target,
            [sharding.result_type(result.shape, result.dtype, *operands) for result in results],
            input_output_aliases=dict(aliases or {}),
            vmap_method="sequential",
        )(*operands, **{name: _attribute(value) for name, value in attributes.items()})
    )


def call_once(
    target: str, results: Mapping[str, Type], operands: Mapping[str, Array], **attributes: int | tuple[int, ...]
) -> tuple[Array, ...]:
    """`call`, of which XLA runs as many as there are: of two that are alike it would make one.

    JAX still leaves out a call whose results nobody reads, as `jax.checkpoint` needs it: `jax.ffi`'s own side effects
    are an error there. There is no rule for `jax.vmap`. Attributes are integers, and tuples of them. All operands and
    results are given.
    """
    extension.register()
    names = _buffers(target)
    examples, arrays = _in_order(target, names, results, operands)
    types = tuple(sharding.result_type(result.shape, result.dtype, *arrays) for result in examples)
    values = _once_p.bind(*arrays, target=target, types=types, attributes=tuple(attributes.items()))
    of_name = dict(zip(names[1], values, strict=True))
    return tuple(of_name[name] for name in results)


@functools.cache
def _buffers(target: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of a target's operands and results, in order."""
    operands, results = (tuple(re.findall(r"\w+", names)) for names in extension.buffers(target).split("->"))
    return operands, results


def _in_order(
    target: str,
    names: tuple[tuple[str, ...], tuple[str, ...]],
    results: Mapping[str, Type],
    operands: Mapping[str, Array],
) -> tuple[list[Type], list[Array]]:
    for kind, known, given in (("operands", names[0], operands), ("results", names[1], results)):
        if unknown := set(given).difference(known):
            raise ValueError(f"{target} has no {kind} {sorted(unknown)}; it has {', '.join(known)}")
    absent = jax.ShapeDtypeStruct((0,), np.float32)
    types = [results.get(name, absent) for name in names[1]]
    return types, [operands[name] if name in operands else jnp.zeros((0,), jnp.float32) for name in names[0]]


_once_p = Primitive("te_call_once")
_once_p.multiple_results = True
_once_p.def_abstract_eval(lambda *_, types, **params: list(types))
_once_p.def_impl(lambda *operands, **params: jax.jit(lambda *operands: _once_p.bind(*operands, **params))(*operands))


def _lower_once(ctx, *operands, target, types, attributes):
    # Of `jax.shard_map` it has no number of devices. XLA would split what the handlers take for whole.
    if getattr(ctx.module_context.axis_context, "num_devices", 1) > 1:
        raise ValueError(
            f"{target} copies what one device has, and arrays of this program are on several devices: call scan_layers "
            "with offload inside of jax.shard_map, or pass Offload(implementation='xla')"
        )
    ffi_attributes = {
        name: np.int64(value) if isinstance(value, int) else np.array(value) for name, value in attributes
    }
    return jax.ffi.ffi_lowering(target, has_side_effect=True)(ctx, *operands, **ffi_attributes)


mlir.register_lowering(_once_p, _lower_once)
