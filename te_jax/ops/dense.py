"""Linear layers in FP8: forward, input gradient and weight gradient, with what surrounds them fused where possible."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import numbers
import operator
from typing import Any, NamedTuple

import jax
from jax import Array

from te_jax import native, sharding
from te_jax._core.arguments import as_flag
from te_jax._core.reverse_mode import reverse_mode_only
from te_jax._core.types import BLOCK, FLOAT_NAMES, FLOATS, FP8_ALIGNMENT
from te_jax.ops import _delayed, _fp8_dense, _plain_dense
from te_jax.ops._fp8_dense import Layer
from te_jax.ops._operands import as_array, validate_quantized_array
from te_jax.ops._plain_dense import ACTIVATIONS, Activation, KernelContracting
from te_jax.ops.gemm import unsupported
from te_jax.ops.quantize import quantize
from te_jax.quantized import QuantizedArray
from te_jax.recipe import DelayedScalingState, Recipe
from te_jax.sharding import AxisName, as_axis_names, regrouped

_REVERSE_MODE = (
    "te_jax.ops.dense with a recipe or a wgrad_accumulator has first derivatives in reverse mode (jax.grad, jax.vjp) "
    "only: for forward mode (jax.jvp, jax.jacfwd) or second derivatives use recipe=None and no wgrad_accumulator"
)


def dense(
    x: jax.typing.ArrayLike,
    kernel: jax.typing.ArrayLike | QuantizedArray,
    bias: jax.typing.ArrayLike | None = None,
    *,
    recipe: Recipe | None = None,
    contracting_ndim: int = 1,
    kernel_contracting: KernelContracting = "first",
    activation: Activation | None = None,
    wgrad_accumulator: jax.typing.ArrayLike | None = None,
    accumulate: bool = True,
    scaling_state: DelayedScalingState | None = None,
    axis_name: AxisName | None = None,
    implementation: native.Implementation | None = None,
) -> Array:
    r"""A linear layer, y = activation(x · kernel + bias), whose three matrix products run in FP8.

    With Q for quantization as the recipe says, g for the gradient of y before the activation:

        y  = activation(Q(x) Q(kernel) + bias)
        dx = Q(g) Q(kernel)ᵀ,   dkernel = Q(x)ᵀ Q(g),   dbias = Σ g

    Every tensor is quantized once, in one pass that also gives its transposed copy, its largest magnitude and dbias
    where they are needed. For the backward pass the layer keeps x and kernel in FP8 ("te_dense_activation",
    "te_dense_kernel"), and with an activation the values before it ("te_dense_preactivation"): names for
    `te_jax.checkpoint_policies`. What is not differentiated is neither kept nor computed. tanh-gelu is part of the
    matrix product where scaling is by tensor; the other activations are left to XLA, in float32.

    The number of tokens need not fit: they are padded with zeros to a multiple of 16. Block scaling divides the last
    dimension of each group; where that is no multiple of 128, the group is treated as one dimension.

    Args:
      x: [*batch, *in], float32, bfloat16 or float16. Sharded in any way.
      kernel: [*in, *out], or [*out, *in] for kernel_contracting="last"; float32, bfloat16 or float16. Or a
        QuantizedArray of it, from `quantize(kernel, recipe.quantization("kernel"), row_ndim=…)`, which serves several
        microbatches; its gradient then goes to wgrad_accumulator, and it is an error to differentiate with respect to
        it alone. Where kernels are sharded and tokens are too (FSDP), FP8 values are gathered.
      bias: [*out], or None.
      recipe: how to quantize; None multiplies x and kernel as they are, in the dtype of x, by XLA.
      contracting_ndim: number of dimensions in `in`.
      kernel_contracting: "first" or "last": where in the kernel the dimensions of `in` stand. With "last", block
        scaling has square blocks in the transposed copy of x rather than of g, so that its weight gradient is as fast.
      activation: None, "gelu" (tanh approximation), "relu" or "silu".
      wgrad_accumulator: float32, bfloat16 or float16, shaped as kernel (as before quantization, where that made one
        dimension of several). Its cotangent is not a gradient but its next value, written in place where the buffer is
        donated or carried by a loop; kernel's own cotangent is then zero, and it is an error to differentiate with
        respect to kernel and not to wgrad_accumulator. One use in each backward pass: JAX would add up the values of
        several. Examples of a vmap may share it: it is added once, and every example's gradient is there first. Inside
        `shard_map` each device accumulates what it computes: sum over devices at the end.
      accumulate: the next value is wgrad_accumulator + dkernel; False: dkernel, in the same buffer. Without
        wgrad_accumulator it has no effect.
      scaling_state: for DelayedScaling: histories of largest magnitudes. Its cotangent is the next state. Where several
        layers or iterations share one, pass `te_jax.recipe.accumulating(state)`, whose cotangents merge by their
        maximum.
      axis_name: inside `pmap`, or `shard_map` with check_vma=False, the mesh axes over which scaling_state is the same:
        what delayed scaling observes is combined over them. With check_vma=False take that gradient inside the
        shard_map: JAX adds up cotangents of devices outside. Elsewhere the axes are known: leave it None.
      implementation: None takes the native kernels where they are installed, else the reference. A GPU that cannot
        multiply as the recipe says is an error rather than slow. "native" or "reference" never fall back.

    Returns:
      [*batch, *out], in the dtype of x. Gradients have the dtypes of what they belong to. Inside `shard_map` every
      device's operands are tensors of their own, with their own scales.

    Raises:
      ValueError: for shapes, dtypes or parameters that break a rule above, naming the argument.
      NotImplementedError: for second derivatives with a recipe or a wgrad_accumulator, and those with respect to a
        QuantizedArray alone.
      te_jax.native.NativeUnavailableError: for implementation="native" where it cannot run, and for a recipe that this
        GPU has no products for, unless implementation is "reference".

    References:
      Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433. Blocks: DeepSeek-V3, arXiv:2412.19437,
      section 3.3. gelu: Hendrycks and Gimpel, arXiv:1606.08415.
    """
    x = as_array("x", x)
    bias, wgrad_accumulator = (
        None if a is None else as_array(name, a)
        for name, a in (("bias", bias), ("wgrad_accumulator", wgrad_accumulator))
    )
    if isinstance(kernel, QuantizedArray):
        validate_quantized_array("kernel", kernel)
    else:
        kernel = as_array("kernel", kernel)
    accumulate = as_flag("accumulate", accumulate)
    axis_names = as_axis_names("axis_name", axis_name)
    shape = _Shape.of(x, kernel, contracting_ndim, kernel_contracting)
    _validate(x, kernel, bias, shape, activation, wgrad_accumulator)
    if recipe is None:
        _validate_plain(kernel, scaling_state)
    else:
        _validate_fp8(kernel, shape, recipe, scaling_state, kernel_contracting)
    if recipe is not None or wgrad_accumulator is not None:
        operands = (x, kernel, bias, wgrad_accumulator, scaling_state)
        x, kernel, bias, wgrad_accumulator, scaling_state = reverse_mode_only(operands, _REVERSE_MODE)
    if recipe is None:
        native.use_native(implementation)  # the same answer to a bad name as with a recipe
        return _plain_dense.dense(
            x, kernel, bias, wgrad_accumulator, len(shape.inner), kernel_contracting, activation, accumulate
        )
    layer = Layer(
        recipe,
        len(shape.inner),
        len(shape.outer),
        kernel_contracting,
        activation,
        accumulate,
        axis_names,
        _implementation(implementation, recipe),
    )
    return _dense(x, kernel, bias, wgrad_accumulator, scaling_state, layer)


def _implementation(implementation: native.Implementation | None, recipe: Recipe) -> native.Implementation:
    """The one that quantization and products have in common. A GPU on which only products would be the reference's is
    refused: the layer would be slower there than without a recipe."""
    if not native.use_native(implementation):
        return "reference"
    if problem := unsupported(recipe.scalings["activation"][0]):
        raise native.NativeUnavailableError(
            f"recipe is {recipe!r}: {problem}; use recipe=None, or implementation='reference', which is slow"
        )
    return "native"


class _Shape(NamedTuple):
    """The sizes of the groups of dimensions."""

    batch: tuple[int, ...]
    inner: tuple[int, ...]
    outer: tuple[int, ...]

    @classmethod
    def of(cls, x: Array, kernel: Array | QuantizedArray, contracting_ndim: int, kernel_contracting: str) -> _Shape:
        if kernel_contracting not in ("first", "last"):
            raise ValueError(f"kernel_contracting is {kernel_contracting!r}; it must be 'first' or 'last'")
        integer = isinstance(contracting_ndim, numbers.Integral) and not isinstance(contracting_ndim, bool)
        if not integer or contracting_ndim < 1:
            raise ValueError(f"contracting_ndim is {contracting_ndim!r}; it must be an integer of at least 1")
        if x.ndim < contracting_ndim:
            raise ValueError(
                f"x has shape {x.shape}; contracting_ndim={contracting_ndim} needs at least as many dimensions"
            )
        if kernel.ndim <= contracting_ndim:
            raise ValueError(
                f"kernel has shape {kernel.shape}; beside its {contracting_ndim} contracted dimensions it needs at "
                "least one of its own"
            )
        first = kernel_contracting == "first"
        place = contracting_ndim if first else kernel.ndim - contracting_ndim
        groups = kernel.shape[:place], kernel.shape[place:]
        inner, outer = groups if first else groups[::-1]
        if x.shape[-contracting_ndim:] != inner:
            raise ValueError(
                f"kernel has shape {kernel.shape}, whose {kernel_contracting} dimensions {inner} are contracted; the "
                f"last ones of x (the inputs) must be the same, and x has shape {x.shape}"
            )
        return cls(x.shape[:-contracting_ndim], inner, outer)


# ----------------------------------------------------------------------------------------------------------- validation


def _validate(x: Array, kernel, bias: Array | None, shape: _Shape, activation, accumulator: Array | None) -> None:
    for name, array, expected in (
        ("x", x, x.shape),
        ("kernel", kernel, kernel.shape),
        ("bias", bias, shape.outer),
        ("wgrad_accumulator", accumulator, _accumulator_shape(kernel, accumulator)),
    ):
        if array is None:
            continue
        if array.dtype not in FLOATS:
            raise ValueError(f"{name} has dtype {array.dtype}; it must be {FLOAT_NAMES}: cast it")
        if array.shape != expected:
            raise ValueError(
                f"{name} has shape {array.shape}; for a kernel of shape {kernel.shape} it must be {expected}"
            )
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; it must be None or one of {ACTIVATIONS}: apply others to y")
    if 0 in (*shape.inner, *shape.outer):
        raise ValueError(f"kernel has shape {kernel.shape}; only the batch may be empty")
    if accumulator is not None and (missing := sharding.varying_axes(x, kernel) - sharding.varying_axes(accumulator)):
        raise ValueError(
            f"wgrad_accumulator is the same on all devices along {sorted(missing)}, but each has other tokens or "
            "another kernel there and accumulates its own part: make it with lax.pcast(…, to='varying') or pass it in "
            "split, and sum over these axes after the last microbatch"
        )


def _accumulator_shape(kernel: Array | QuantizedArray, accumulator: Array | None) -> tuple[int, ...]:
    """The kernel's; of one that came quantized, where rows or cols are one dimension, also that which it had before."""
    if accumulator is None or not isinstance(kernel, QuantizedArray) or accumulator.size != kernel.size:
        return kernel.shape
    rows = math.prod(kernel.shape[: kernel.row_ndim])
    return accumulator.shape if rows in itertools.accumulate(accumulator.shape, operator.mul) else kernel.shape


def _validate_plain(kernel: Array | QuantizedArray, scaling_state: DelayedScalingState | None) -> None:
    if isinstance(kernel, QuantizedArray):
        raise ValueError("recipe is None, but kernel is a QuantizedArray; name its recipe or pass kernel.dequantize()")
    if scaling_state is not None:
        raise ValueError("scaling_state is given, but recipe is None; only DelayedScaling has a state")


def _validate_fp8(
    kernel: Array | QuantizedArray, shape: _Shape, recipe: Recipe, state: Any, kernel_contracting: str
) -> None:
    if not isinstance(recipe, Recipe):
        raise ValueError(f"recipe is {recipe!r}; it must be a Recipe, such as te_jax.recipe.CurrentScaling(), or None")
    for name, sizes in (("in", shape.inner), ("out", shape.outer)):
        if math.prod(sizes) % FP8_ALIGNMENT:
            raise ValueError(
                f"kernel has shape {kernel.shape}, {math.prod(sizes)} features {name}; FP8 products need a multiple of "
                f"{FP8_ALIGNMENT}: pad them or use recipe=None"
            )
    if isinstance(kernel, QuantizedArray):
        _validate_quantized(kernel, shape, recipe, kernel_contracting)
    _delayed.validate(recipe, state)


def _validate_quantized(kernel: QuantizedArray, shape: _Shape, recipe: Recipe, kernel_contracting: str) -> None:
    copy = "transposed" if kernel_contracting == "first" else "data"
    if getattr(kernel, copy) is None:
        raise ValueError(f"kernel has no {copy} copy, which the forward pass reads; quantize it with copies='both'")
    inner, outer = len(shape.inner), len(shape.outer)
    if kernel.shape[: kernel.row_ndim] not in (shape.inner, shape.outer) or kernel.row_ndim + kernel.col_ndim != (
        inner + outer
    ):
        raise ValueError(
            f"kernel was quantized as {kernel.row_ndim} rows and {kernel.col_ndim} cols, shape {kernel.shape}; in and "
            f"out have sizes {shape.inner} and {shape.outer}: quantize it with that row_ndim"
        )
    expected = recipe.quantization("kernel")
    if (kernel.scaling, kernel.transposed_scaling) != (expected.scaling, expected.transposed_scaling):
        raise ValueError(
            f"kernel has {kernel.scaling!r} and {kernel.transposed_scaling!r} scaling, but recipe is {recipe!r}; "
            'quantize it with recipe.quantization("kernel")'
        )
    for name in ("data", "transposed"):
        found = getattr(kernel, name)
        if found is not None and found.dtype != expected.dtype:
            raise ValueError(
                f"kernel was quantized to {found.dtype}, and kernels of {recipe!r} are {expected.dtype}; quantize it "
                'with recipe.quantization("kernel")'
            )


# ------------------------------------------------------------------------------------------------ shapes that FP8 takes


# Under jit even when called eagerly: sharded operands are then partitioned rather than gathered.
@functools.partial(jax.jit, static_argnums=5, inline=sharding.INLINE)
def _dense(x: Array, kernel, bias: Array | None, accumulator: Array | None, state, layer: Layer) -> Array:
    """Brings tokens and groups of dimensions to sizes that FP8 products take, and back."""
    shape = _Shape.of(x, kernel, layer.contracting_ndim, layer.kernel_contracting)
    like = _fp8_dense.result_like(layer, x, kernel)  # padding and merging dimensions may gather what was split
    batch, inner, outer = (_whole_blocks(sizes, layer.recipe) for sizes in shape)
    tokens = math.prod(batch)
    # Not -tokens % FP8_ALIGNMENT: of that, symbolic sizes of jax.export do not know that the sum is a multiple.
    padding = -(-tokens // FP8_ALIGNMENT) * FP8_ALIGNMENT - tokens if tokens else FP8_ALIGNMENT
    tokens_first = (tokens,) if padding or not batch else batch
    flat = regrouped(x, (shape.batch, shape.inner), (tokens_first, inner))
    if padding:
        flat = sharding.padded(flat, padding)
    if not isinstance(kernel, QuantizedArray):
        before, after = (shape.inner, shape.outer), (inner, outer)
        if layer.kernel_contracting == "last":
            before, after = before[::-1], after[::-1]
        kernel = regrouped(kernel, before, after)
    bias = None if bias is None else regrouped(bias, (shape.outer,), (outer,))
    layer = dataclasses.replace(layer, contracting_ndim=len(inner), out_ndim=len(outer))
    y: Any = _fp8_dense.product(layer, *sharding.varying_together((flat, kernel, bias, accumulator)), state)
    y = regrouped(y[:tokens] if padding else y, (tokens_first, outer), (shape.batch, shape.outer))
    return like.apply(y)


def _whole_blocks(sizes: tuple[int, ...], recipe: Recipe) -> tuple[int, ...]:
    """The group as it is, or as one dimension where blocks do not divide its last one."""
    blocks = recipe.scalings["activation"][0].startswith("block")
    return (math.prod(sizes),) if blocks and len(sizes) > 1 and sizes[-1] % BLOCK else sizes


def quantize_kernel(
    kernel: Array,
    recipe: Recipe,
    *,
    row_ndim: int,
    stacked_ndim: int = 0,
    amax: Array | None = None,
    implementation: native.Implementation | None = None,
) -> QuantizedArray:
    """Both copies of a kernel [*stacked, *rows, *cols], each stacked one with scales of its own.

    Where blocks would not divide the last dimension of rows or cols, these are one dimension, as `dense` has it.

    Args:
      amax: float32 [*stacked], the largest magnitudes where scaling is by tensor; None to find them.
    """
    stacked, rows, cols = (
        kernel.shape[:stacked_ndim],
        kernel.shape[stacked_ndim : stacked_ndim + row_ndim],
        kernel.shape[stacked_ndim + row_ndim :],
    )
    after = _whole_blocks(rows, recipe), _whole_blocks(cols, recipe)

    def quantized(kernel: Array, amax: Array | None) -> QuantizedArray:
        quantization = recipe.quantization("kernel")
        return quantize(kernel, quantization, row_ndim=len(after[0]), amax=amax, implementation=implementation)

    for _ in stacked:
        quantized = jax.vmap(quantized)
    return quantized(regrouped(kernel, (stacked, rows, cols), (stacked, *after)), amax)
