"""Calling a registered target on local arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax import Array

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
