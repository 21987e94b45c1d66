"""Calling a registered target on the arrays at hand, and the types of what it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from te_jax.native import extension


def varying_axes(*operands) -> frozenset[str]:
    """The mesh axes, mapped by `shard_map`, along which any of the operands differs from device to device.

    Empty where JAX does not track that: in `pmap` and with check_vma=False.
    """
    types = [jax.typeof(x) for x in jax.tree.leaves(operands)]
    return frozenset().union(*(type_.manual_axis_type.varying for type_ in types))


def varying_over(x: Array, axes: frozenset[str]) -> Array:
    """x, varying over these mesh axes as well."""
    missing = tuple(sorted(axes - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def result_type(shape: Sequence[int], dtype: jax.typing.DTypeLike, *operands: Array):
    """The abstract value of a result that depends on all operands.

    Inside `shard_map` it varies over every mesh axis that any operand varies over. A plain `ShapeDtypeStruct` would
    drop these axes silently: wrong `out_specs` then pass the check, and `custom_vjp` rejects the gradients.
    """
    first = jax.typeof(operands[0])
    return first.update(
        shape=tuple(shape),
        dtype=np.dtype(dtype),
        weak_type=False,
        sharding=first.sharding.update(spec=PartitionSpec(*(None,) * len(shape))),
        manual_axis_type=first.manual_axis_type.update(varying=varying_axes(*operands)),
    )


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
            [result_type(result.shape, result.dtype, *operands) for result in results],
            input_output_aliases=dict(aliases or {}),
            vmap_method="sequential",
        )(*operands, **{name: _attribute(value) for name, value in attributes.items()})
    )
