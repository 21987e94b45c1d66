"""Calling a registered target on local arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import mlir

from te_jax import sharding
from te_jax.native import extension


def _attribute(value: object) -> object:
    """Handlers read float attributes as float32; jax.ffi would send Python's as float64."""
    return np.float32(value) if isinstance(value, float) else value


def call(
    target: str,
    results: Sequence[jax.ShapeDtypeStruct | Array],
    *operands: Array,
    aliases: Mapping[int, int] | None = None,
    **attributes: object,
) -> tuple[Array, ...]:
    """Runs a target of the extension on local arrays, on whichever platform XLA compiles for.

    Args:
      target: name of the target, the same on every platform.
      results: an example of every result, for its shape and dtype.
      operands: arrays; XLA hands them over row-major.
      aliases: {operand index: result index} that must share one buffer. An operand that is still needed afterwards, or
        a jit argument that is not donated, is copied first.
      attributes: static values; Python floats are sent as float32.

    Returns:
      The results, in order, varying over every manual mesh axis that an operand varies over.
    """
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
    target: str, results: Sequence[jax.ShapeDtypeStruct | Array], *operands: Array, **attributes: int | tuple[int, ...]
) -> tuple[Array, ...]:
    """`call`, of which XLA runs as many as there are: of two that are alike it would make one.

    JAX still leaves out a call whose results nobody reads, as `jax.checkpoint` needs it: `jax.ffi`'s own side effects
    are an error there. There is no rule for `jax.vmap`. Attributes are integers, and tuples of them.
    """
    extension.register()
    types = tuple(sharding.result_type(result.shape, result.dtype, *operands) for result in results)
    return tuple(_once_p.bind(*operands, target=target, types=types, attributes=tuple(attributes.items())))


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
