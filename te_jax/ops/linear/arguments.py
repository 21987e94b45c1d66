"""Arguments of layers in FP8: their shapes, the rules for them, and the forms that products take."""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
import operator
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
from jax import Array, lax

from te_jax import native, sharding
from te_jax._core.types import FLOAT_NAMES, FLOATS
from te_jax.ops.implementations import fp8_implementation, unsupported
from te_jax.ops.linear import fp8
from te_jax.ops.linear.accumulator import validate_accumulator
from te_jax.ops.linear.weight import Weight
from te_jax.ops.operands import as_array, one_for_each, validate_quantized_array
from te_jax.quantized import QuantizedArray
from te_jax.recipe import (
    CurrentScaling,
    DelayedScaling,
    Fake,
    MXFP8Scaling,
    ProductRecipes,
    Quantization,
    Recipe,
    Role,
    Scaling,
)
from te_jax.sharding import as_axis_names

Operand = jax.typing.ArrayLike | QuantizedArray
Shaped = Array | QuantizedArray | jax.ShapeDtypeStruct
KernelContracting = Literal["first", "last"]


def as_operand(name: str, x: Operand) -> Array | QuantizedArray:
    if not isinstance(x, QuantizedArray):
        return as_array(name, x)
    validate_quantized_array(name, x)
    return with_gradient_through(x)


def with_gradient_through(x: QuantizedArray) -> QuantizedArray:
    """x, whose copies have no gradient where its straight_through has it."""
    if x.straight_through is None:
        return x
    return dataclasses.replace(lax.stop_gradient(x), straight_through=x.straight_through)


def split(x: Array | QuantizedArray) -> tuple[Array | None, QuantizedArray | None]:
    """Array that the gradient of x goes through, if any, and x in FP8 if it came so."""
    if not isinstance(x, QuantizedArray):
        return x, None
    return x.straight_through, dataclasses.replace(x, straight_through=None)


def named_weights(
    kernel: Any,
    bias: Any,
    scaling_state: Any,
    wgrad_accumulator: Any,
    as_kernel: Callable[[str, Any], Array | QuantizedArray] = as_operand,
) -> dict[str, Weight]:
    """The kernels of a layer with what belongs to them, by the names of the kernels."""
    several = isinstance(kernel, tuple | list)
    count = len(kernel) if isinstance(kernel, tuple | list) else 1
    if not count:
        raise ValueError("kernel is an empty tuple; pass one array at least")
    kernels, biases, accumulators, states = (
        one_for_each(name, values, count, several)
        for name, values in (
            ("kernel", kernel),
            ("bias", bias),
            ("wgrad_accumulator", wgrad_accumulator),
            ("scaling_state", scaling_state),
        )
    )
    operands = [as_kernel(name, value) for name, value in kernels]
    arrays = ([None if a is None else as_array(label, a) for label, a in named] for named in (biases, accumulators))
    parts = zip(operands, *arrays, (state for _, state in states), strict=True)
    return {name: Weight(*part) for (name, _), part in zip(kernels, parts, strict=True)}


def of_kernel(name: str, argument: str) -> str:
    """The name of what belongs to a kernel: "bias[1]" to "kernel[1]"."""
    return name.replace("kernel", argument)


def implementation_for(
    implementation: native.Implementation | None, recipe: Recipe, problem: str | None = None, *, by_xla: bool = True
) -> native.Implementation:
    """The one of products.

    Args:
      implementation, recipe: of the layer.
      problem: why this GPU cannot multiply operands of such shapes by native kernels, if so.
      by_xla: whether XLA has a product for this layer.

    Raises:
      NativeUnavailableError: it cannot run here, or, without a name, a GPU would multiply in float32 by the reference,
        more slowly than without a recipe.
    """
    scaling = recipe.quantization("activation").scaling
    try:
        return fp8_implementation(implementation, scaling, problem or unsupported(scaling), by_xla=by_xla)
    except native.NativeUnavailableError as error:
        ways = ["recipe=None, which XLA multiplies in the dtype of x"]
        for other in (CurrentScaling(), MXFP8Scaling()):
            if scaling != (of_other := other.quantization("activation").scaling) and _multiplies(of_other, by_xla):
                ways.append(f"recipe={type(other).__name__}()")
        ways.append("implementation='reference', which multiplies slowly, in float32")
        raise native.NativeUnavailableError(
            f"recipe is {recipe!r}, and no FP8 product for it runs on {native.device_name()}: {error}. Use "
            f"{', or '.join(ways)}"
        ) from None


def recipes_of(recipe: Recipe) -> list[Recipe]:
    """The recipe, or those of products."""
    if not isinstance(recipe, ProductRecipes):
        return [recipe]
    several = (of.recipe if isinstance(of, Fake) else of for of in recipe.by_product.values())
    return [one for one in several if one is not None]


def _multiplies(scaling: Scaling, by_xla: bool) -> bool:
    try:
        return fp8_implementation(None, scaling, unsupported(scaling), by_xla=by_xla) != "reference"
    except native.NativeUnavailableError:
        return False


def state_axes(state_axis: object, recipe: object) -> sharding.Axes:
    """The mesh axes over which the states of delayed scaling are the same, from the argument state_axis.

    Raises:
      ValueError: the argument names no axes of the mesh, or the recipe has no state.
    """
    axes = as_axis_names("state_axis", state_axis)
    if axes and not isinstance(recipe, DelayedScaling):
        raise ValueError(
            f"state_axis is {state_axis!r}, and recipe is {recipe!r}: state_axis says over which mesh axes the "
            "scaling_state of DelayedScaling is the same, and sums no result. Leave it out; where devices split the "
            "contracted dimension, add up y with jax.lax.psum, or use te_jax.parallel.matmul_reduce_scatter"
        )
    if axes and sharding.inside_shard_map():
        sharding.mapped_axes(axes, "state_axis")  # elsewhere modules are initialised and evaluated
    return axes


def validate_kernel_contracting(value: object) -> None:
    if value not in ("first", "last"):
        raise ValueError(f"kernel_contracting is {value!r}; it must be 'first' or 'last'")


class Shape(NamedTuple):
    """The sizes of the groups of dimensions."""

    batch: tuple[int, ...]
    inner: tuple[int, ...]
    outer: tuple[int, ...]

    @classmethod
    def of(cls, x: Shaped, name: str, kernel: Shaped, contracting_ndim: int, kernel_contracting: str) -> Shape:
        validate_kernel_contracting(kernel_contracting)
        integer = isinstance(contracting_ndim, numbers.Integral) and not isinstance(contracting_ndim, bool)
        if not integer or contracting_ndim < 1:
            raise ValueError(f"contracting_ndim is {contracting_ndim!r}; it must be an integer of at least 1")
        if x.ndim < contracting_ndim:
            raise ValueError(
                f"x has shape {x.shape}; contracting_ndim={contracting_ndim} needs at least as many dimensions"
            )
        if kernel.ndim <= contracting_ndim:
            raise ValueError(
                f"{name} has shape {kernel.shape}; beside its {contracting_ndim} contracted dimensions it needs at "
                "least one of its own"
            )
        first = kernel_contracting == "first"
        place = contracting_ndim if first else kernel.ndim - contracting_ndim
        groups = kernel.shape[:place], kernel.shape[place:]
        inner, outer = groups if first else groups[::-1]
        inputs = x.shape[-contracting_ndim:]
        if inputs != inner:
            other = "last" if first else "first"
            fits = inputs == (kernel.shape[-contracting_ndim:] if first else kernel.shape[:contracting_ndim])
            raise ValueError(
                f"{name} has shape {kernel.shape}, whose {kernel_contracting} dimensions {inner} are contracted; the "
                f"last ones of x (the inputs) must be the same, and x has shape {x.shape}"
                + f": pass kernel_contracting={other!r}"
                * fits
            )
        return cls(x.shape[:-contracting_ndim], inner, outer)


# ----------------------------------------------------------------------------------------------------------- validation


def validate(x: Shaped, name: str, weight: Weight, shape: Shape, varying: frozenset[str]) -> None:
    """`varying`: the mesh axes over which x or the kernel varies."""
    for label, array in (("x", x), (name, weight.kernel)):
        _validate_float(label, array)
    if 0 in (*shape.inner, *shape.outer):
        raise ValueError(f"{name} has shape {weight.kernel.shape}; only the batch may be empty")
    validate_parts(name, weight, shape.outer, varying)


def _validate_float(label: str, array: Shaped) -> None:
    if array.dtype not in FLOATS:
        raise ValueError(f"{label} has dtype {array.dtype}; it must be {FLOAT_NAMES}: cast it")


def validate_parts(name: str, weight: Weight, outer: tuple[int, ...], varying: frozenset[str]) -> None:
    """Checks what belongs to a kernel of that name; for `varying` see `validate`."""
    kernel, bias, accumulator, _ = weight
    shapes = outer, _accumulator_shape(kernel, accumulator)
    for argument, array, expected in zip(("bias", "wgrad_accumulator"), (bias, accumulator), shapes, strict=True):
        if array is None:
            continue
        _validate_float(label := of_kernel(name, argument), array)
        if array.shape != expected:
            raise ValueError(
                f"{label} has shape {array.shape}; for a kernel of shape {kernel.shape} it must be {expected}"
            )
    if accumulator is not None:
        validate_accumulator(of_kernel(name, "wgrad_accumulator"), accumulator, varying)


def _accumulator_shape(kernel: Array | QuantizedArray, accumulator: Array | None) -> tuple[int, ...]:
    """The kernel's; of one that came quantized, where rows or cols are one dimension, also that which it had before."""
    if accumulator is None or not isinstance(kernel, QuantizedArray) or accumulator.size != kernel.size:
        return kernel.shape
    rows = math.prod(kernel.shape[: kernel.row_ndim])
    return accumulator.shape if rows in itertools.accumulate(accumulator.shape, operator.mul) else kernel.shape


def validate_plain(x: Shaped, name: str, weight: Weight) -> None:
    for operand, value in (("x", x), (name, weight.kernel)):
        if isinstance(value, QuantizedArray):
            raise ValueError(
                f"recipe is None, but {operand} is a QuantizedArray; name its recipe or pass {operand}.dequantize()"
            )
    if weight.state is not None:
        label = of_kernel(name, "scaling_state")
        raise ValueError(f"{label} is given, but recipe is None; only DelayedScaling has a state")


def validate_fp8(
    x: Shaped, name: str, weight: Weight, shape: Shape, recipe: Recipe, kernel_contracting: KernelContracting
) -> None:
    kernel = weight.kernel
    fp8.validate_recipe(recipe)
    if isinstance(recipe, ProductRecipes):
        validate_not_quantized("x", x, recipe)
        validate_not_quantized(name, kernel, recipe)
    if isinstance(x, QuantizedArray):
        validate_quantized_x(x, recipe, kernel_contracting, row_ndim=len(shape.batch))
    if isinstance(kernel, QuantizedArray):
        fp8.validate_quantized(
            name, kernel, recipe, "kernel", "transposed" if kernel_contracting == "first" else "data"
        )
        groups = kernel.shape[: kernel.row_ndim], kernel.shape[kernel.row_ndim :]
        if groups != ((shape.inner, shape.outer) if kernel_contracting == "first" else (shape.outer, shape.inner)):
            raise ValueError(
                f"{name} was quantized as {kernel.row_ndim} rows and {kernel.col_ndim} cols, shape {kernel.shape}; in "
                f"and out have sizes {shape.inner} and {shape.outer}: quantize it with that row_ndim"
            )
    fp8.validate_state(recipe, weight.state, of_kernel(name, "scaling_state"))


def validate_not_quantized(name: str, array: Shaped, recipe: ProductRecipes) -> None:
    """Raises ValueError if the array came quantized, by one recipe."""
    if isinstance(array, QuantizedArray):
        raise ValueError(
            f"{name} is a QuantizedArray, and recipe is {recipe!r}, by which each product quantizes: pass {name} "
            "unquantized"
        )


def validate_quantized_x(
    x: QuantizedArray, recipe: Recipe, kernel_contracting: KernelContracting, *, row_ndim: int
) -> None:
    """Checks an x that came quantized; one whose amax a state needs is refused."""
    if isinstance(recipe, DelayedScaling):
        raise ValueError(
            f"x is a QuantizedArray, but recipe is {recipe!r}, whose state remembers the amax of x: pass x unquantized"
        )
    quantization = quantization_of(recipe, "activation", kernel_contracting)
    fp8.validate_quantized("x", x, recipe, "activation", "data", quantization)
    if x.row_ndim != row_ndim:
        raise ValueError(
            f"x was quantized as {x.row_ndim} rows and {x.col_ndim} cols, shape {x.shape}; quantize it with "
            f"row_ndim={row_ndim}"
        )


def quantization_of(recipe: Recipe, role: Role, kernel_contracting: KernelContracting) -> Quantization:
    """Block-scaled GEMMs need 1x128 scales on the LHS and 128x128 on the RHS. With kernel_contracting="last" x and the
    gradient change sides in the weight gradient, and so their transposed copies their scaling."""
    quantization = recipe.quantization(role)
    if kernel_contracting == "first" or role == "kernel":
        return quantization
    other = recipe.quantization("gradient" if role == "activation" else "activation")
    return dataclasses.replace(quantization, transposed_scaling=other.transposed_scaling)


def sequence_padding(batch: tuple[int, ...], block: int, x: Array) -> int:
    """Tokens to append to every sequence, so that devices which split a batch of sequences cut no block."""
    symbolic = any(not isinstance(size, int) for size in batch)  # of jax.export
    if symbolic or len(batch) < 2 or batch[-1] < block or not sharding.may_be_split(x):
        return 0
    return -batch[-1] % block


def whole_blocks(sizes: tuple[int, ...], block: int) -> tuple[int, ...]:
    """The group as it is, or as one dimension where blocks do not divide its last one."""
    return (math.prod(sizes),) if len(sizes) > 1 and sizes[-1] % block else sizes
