"""Checks of operands that several operations share; each error names the operand."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from te_jax import sharding
from te_jax._core.arguments import as_dtype, as_flag, kind_of, static_way_out
from te_jax._core.integers import validate_integers
from te_jax._core.types import FLOAT_NAMES, FLOATS, FP8, FP8_NAMES
from te_jax.quantized import SCALINGS, QuantizedArray, facts_of, scale_shape
from te_jax.recipe import Quantization


def as_array(name: str, x: jax.typing.ArrayLike) -> Array:
    """x as an array; nothing that stands for one."""
    if isinstance(x, QuantizedArray):
        raise ValueError(
            f"{name} is a QuantizedArray; it must be a plain array: pass what was quantized, or its dequantize()"
        )
    validate_integers(name, x)
    try:
        array = jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is {kind_of(x)}; it must be an array, of jax.numpy or numpy") from error
    sharding.validate_not_a_partial_sum(name, array)
    return array


def one_for_each(name: str, values: Any, count: int, several: bool) -> list[tuple[str, Any]]:
    """An argument of which there is one for each kernel, by name."""
    if not several:
        if isinstance(values, tuple | list):
            raise ValueError(f"{name} is a tuple, but kernel is not; pass one value")
        return [(name, values)]
    if values is None:
        values = (None,) * count
    if not isinstance(values, tuple | list) or len(values) != count:
        raise ValueError(f"kernel is a tuple of {count}, so {name} must be one too, with None where there is none")
    return [(f"{name}[{i}]", value) for i, value in enumerate(values)]


def validate_quantization(name: str, quantization: object) -> None:
    """Checks that an argument says how to quantize to FP8.

    Raises:
      ValueError: it does not.
    """
    if not isinstance(quantization, Quantization):
        raise ValueError(
            f"{name} is {quantization!r}; it must be a Quantization, such as "
            f'te_jax.recipe.CurrentScaling().quantization("activation"){static_way_out(quantization)}'
        )
    as_dtype(f"{name} has dtype", quantization.dtype, FP8, FP8_NAMES)
    for field in ("scaling", "transposed_scaling"):
        scaling = getattr(quantization, field)
        if scaling not in SCALINGS:
            raise ValueError(f"{name} has {field} {scaling!r}; it must be one of {SCALINGS}")
    as_flag(f"{name}.power_of_two_scales", quantization.power_of_two_scales)


def validate_quantized_array(name: str, x: QuantizedArray) -> None:
    """Checks that the copies of a QuantizedArray are there, whole, and of one array.

    Raises:
      ValueError: they are not.
    """
    if x.data is None and x.transposed is None:
        raise ValueError(f"{name} has neither a data nor a transposed copy; quantize it with copies='both'")
    validate_copy(name, x, "data")
    validate_copy(name, x, "transposed")
    if x.data is not None and x.transposed is not None and x.without_data().shape != x.data.shape:
        raise ValueError(
            f"{name} has data of shape {x.data.shape} and transposed of shape {x.transposed.shape}, which are not of "
            "one array; quantize it with copies='both'"
        )
    through = x.straight_through
    if through is not None and (through.shape != x.shape or through.dtype not in FLOATS):
        raise ValueError(
            f"{name} has straight_through of shape {through.shape} and dtype {through.dtype}; it must be {FLOAT_NAMES} "
            f"{x.shape}: quantize it with straight_through=True"
        )


def validate_copy(name: str, x: QuantizedArray, copy: Literal["data", "transposed"]) -> None:
    """Checks dimensions, dtype and scales of a copy, where it is there.

    Raises:
      ValueError: one of them is wrong.
    """
    values, scale_inv = (x.data, x.scale_inv) if copy == "data" else (x.transposed, x.transposed_scale_inv)
    scaling = x.scaling if copy == "data" else x.transposed_scaling
    outer_ndim, summed_ndim = (x.row_ndim, x.col_ndim) if copy == "data" else (x.col_ndim, x.row_ndim)
    if values is None:
        return
    if values.ndim != outer_ndim + summed_ndim:
        raise ValueError(
            f"{name} has {copy} of shape {values.shape} for {outer_ndim} outer and {summed_ndim} summed dimensions; "
            "a batch of products is written with jax.vmap, and layers that are stacked with jax.lax.scan"
        )
    if values.dtype not in FP8:
        raise ValueError(f"{name} has {copy} of dtype {values.dtype}; it must be {FP8_NAMES}")
    expected = scale_shape(scaling, values.shape[:outer_ndim], values.shape[outer_ndim:])
    dtype = facts_of(scaling).dtype
    if scale_inv is None or scale_inv.shape != expected or scale_inv.dtype != dtype:
        scales = "no scales" if scale_inv is None else f"scales of shape {scale_inv.shape} and dtype {scale_inv.dtype}"
        raise ValueError(
            f"{name} has {scales}; for {copy} of shape {values.shape} and {scaling!r} scaling they must be {dtype} "
            f"{expected}: quantize it with te_jax.ops.quantize"
        )
