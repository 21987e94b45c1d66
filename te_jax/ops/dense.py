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
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import custom_vjp_primal_tree_values

from te_jax import native, sharding
from te_jax._core.arguments import as_flag
from te_jax._core.derivatives import differentiated_once
from te_jax._core.reverse_mode import reverse_mode_only
from te_jax._core.types import BLOCK, FLOAT_NAMES, FLOATS, FP8_ALIGNMENT
from te_jax.ops import _fp8, _plain_dense
from te_jax.ops._fp8 import Copy, Fp8
from te_jax.ops._operands import as_array, validate_quantized_array
from te_jax.ops._plain_dense import (
    ACTIVATIONS,
    Activation,
    KernelContracting,
    activate,
    activation_gradient,
    added_once,
    validate_accumulated,
)
from te_jax.ops.gemm import gemm, unsupported
from te_jax.ops.quantize import QuantizedParts, quantize
from te_jax.quantized import QuantizedArray
from te_jax.recipe import DelayedScalingState, Product, Quantization, Recipe, Role
from te_jax.sharding import AxisName, Layout, as_axis_names, regrouped, split_in_two

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

    With Q for quantization as the recipe says, and g for the gradient of y before the activation:

        y  = activation(Q(x) Q(kernel) + bias)
        dx = Q(g) Q(kernel)ᵀ,   dkernel = Q(x)ᵀ Q(g),   dbias = Σ g

    The backward pass reads x and kernel in FP8 and, with an activation, the values before it, under the names of
    `te_jax.checkpoint_policies`. docs/fp8.md has the costs, FSDP, and how block scaling treats shapes.

    Args:
      x: [*batch, *in], float32, bfloat16 or float16. Sharded in any way.
      kernel: [*in, *out], or [*out, *in] for kernel_contracting="last"; float32, bfloat16 or float16. Or a
        QuantizedArray from `quantize(kernel, recipe.quantization("kernel"), row_ndim=…)`, which serves several
        microbatches and has no gradient of its own: that goes to wgrad_accumulator.
      bias: [*out], or None.
      recipe: how to quantize; None multiplies in the dtype of x, by XLA.
      contracting_ndim: number of dimensions in `in`.
      kernel_contracting: "first" or "last": where in the kernel the dimensions of `in` stand.
      activation: None, "gelu" (tanh approximation), "relu" or "silu".
      wgrad_accumulator: float32, bfloat16 or float16, shaped as kernel. Its cotangent is its next value, written in
        place where the buffer is donated or carried by a loop; kernel's own cotangent is then zero. Use it once in a
        gradient. Inside `shard_map` each device accumulates its part: sum over devices at the end.
      accumulate: the next value is wgrad_accumulator + dkernel; False: dkernel, in the same buffer.
      scaling_state: for DelayedScaling, first `recipe.init()`. Its cotangent is the next state. Where several layers or
        iterations share one, the newest amax is their sum.
      axis_name: inside `pmap`, or `shard_map` with check_vma=False: the mesh axes over which scaling_state is the same.
        Take its gradient inside. Elsewhere leave it None.
      implementation: None takes the native kernels where they are installed, else the reference; "native" or
        "reference" never fall back.

    Returns:
      [*batch, *out], in the dtype of x. Gradients have the dtypes of what they belong to. The result is NaN where
      scaling_state has negative entries or a fraction of uses: it was updated as if it were a parameter.

    Raises:
      ValueError: for arguments that break a rule above, or where the kernel is differentiated and scaling_state not.
      NotImplementedError: for second derivatives with a recipe or a wgrad_accumulator, and those with respect to a
        QuantizedArray alone.
      te_jax.native.NativeUnavailableError: "native" cannot run here, or this GPU cannot multiply as the recipe says.

    Examples:
      >>> import jax, jax.numpy as jnp, te_jax
      >>> x, kernel = jnp.ones((4, 32)), jnp.ones((32, 16))
      >>> recipe = te_jax.recipe.CurrentScaling()
      >>> loss = lambda x, kernel: te_jax.ops.dense(x, kernel, recipe=recipe).sum()
      >>> dx, dkernel = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, kernel)
      >>> round(float(dx[0, 0]), 3), round(float(dkernel[0, 0]), 3)
      (16.0, 4.0)
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
    if axis_names and sharding.inside_shard_map():
        sharding.mapped_axes(axis_names)  # elsewhere modules are initialised and evaluated
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
    layer = _Layer(
        Fp8("te_jax.ops.dense", recipe, _implementation(implementation, recipe), axis_names),
        len(shape.inner),
        len(shape.outer),
        kernel_contracting,
        activation,
        accumulate,
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
    _fp8.validate_recipe(recipe)
    for name, sizes in (("in", shape.inner), ("out", shape.outer)):
        if math.prod(sizes) % FP8_ALIGNMENT:
            raise ValueError(
                f"kernel has shape {kernel.shape}, {math.prod(sizes)} features {name}; FP8 products need a multiple of "
                f"{FP8_ALIGNMENT}: pad them or use recipe=None"
            )
    if isinstance(kernel, QuantizedArray):
        _fp8.validate_quantized(
            "kernel", kernel, recipe, "kernel", "transposed" if kernel_contracting == "first" else "data"
        )
        groups = kernel.shape[: kernel.row_ndim], kernel.shape[kernel.row_ndim :]
        if groups != ((shape.inner, shape.outer) if kernel_contracting == "first" else (shape.outer, shape.inner)):
            raise ValueError(
                f"kernel was quantized as {kernel.row_ndim} rows and {kernel.col_ndim} cols, shape {kernel.shape}; in "
                f"and out have sizes {shape.inner} and {shape.outer}: quantize it with that row_ndim"
            )
    _fp8.validate_state(recipe, state)


# --------------------------------------------------------------------------------------------- products and derivatives


@dataclasses.dataclass(frozen=True)
class _Layer:
    """The static arguments, together. Hashable, so that a layer is traced once."""

    fp8: Fp8
    contracting_ndim: int
    out_ndim: int
    kernel_contracting: KernelContracting
    activation: Activation | None
    accumulate: bool

    @property
    def dgrad_copy(self) -> Copy:
        """The copy of the kernel that the input gradient reads, which sums over out."""
        return "data" if self.kernel_contracting == "first" else "transposed"

    @property
    def gelu_is_fused(self) -> bool:
        return self.activation == "gelu" and self.fp8.recipe.scalings["activation"][0] == "tensor"

    def quantization(self, role: Role) -> Quantization:
        """Block-scaled GEMMs need 1x128 scales on the LHS and 128x128 on the RHS. With kernel_contracting="last" x and
        the gradient change sides in the weight gradient, and so their transposed copies their scaling."""
        quantization = self.fp8.recipe.quantization(role)
        if self.kernel_contracting == "first" or role == "kernel":
            return quantization
        other = self.fp8.recipe.quantization("gradient" if role == "activation" else "activation")
        return dataclasses.replace(quantization, transposed_scaling=other.transposed_scaling)

    def quantize(self, role: Role, x: Any, state: DelayedScalingState | None, **options: Any) -> QuantizedParts:
        row_ndim = x.ndim - (self.out_ndim if role == "gradient" else self.contracting_ndim)
        if role == "kernel":
            row_ndim = self.contracting_ndim if self.kernel_contracting == "first" else self.out_ndim
        return self.fp8.quantize(role, x, state, row_ndim=row_ndim, quantization=self.quantization(role), **options)

    def gemm(self, product: Product, lhs: QuantizedArray, rhs: QuantizedArray, **options: Any) -> Any:
        """One of the three products: "forward" x · kernel, "dgrad" dy · kernelᵀ, "wgrad" xᵀ · dy or dyᵀ · x."""
        rows_summed = self.kernel_contracting == ("last" if product == "dgrad" else "first") or product == "wgrad"
        return gemm(
            lhs,
            rhs,
            lhs_contracting="rows" if product == "wgrad" else "cols",
            rhs_contracting="rows" if rows_summed else "cols",
            fast_accumulation=self.fp8.is_fast(product),
            implementation=self.fp8.implementation,
            **options,
        )


# Under jit even when called eagerly: sharded operands are then partitioned rather than gathered.
@functools.partial(jax.jit, static_argnums=5, inline=sharding.INLINE)
def _dense(x: Array, kernel, bias: Array | None, accumulator: Array | None, state, layer: _Layer) -> Array:
    """Brings groups of dimensions into forms that FP8 products take, and back."""
    shape = _Shape.of(x, kernel, layer.contracting_ndim, layer.kernel_contracting)
    layout = _layout(layer, x, kernel)  # merging dimensions may gather what was split
    if padding := _sequence_padding(shape.batch, layer.fp8.recipe, x):
        axis = len(shape.batch) - 1
        y = _dense(sharding.padded(x, padding, axis), kernel, bias, accumulator, state, layer)
        return layout.apply(lax.slice_in_dim(y, 0, shape.batch[-1], axis=axis))
    batch, inner, outer = (_whole_blocks(sizes, layer.fp8.recipe) or (1,) for sizes in shape)
    x = regrouped(x, (shape.batch, shape.inner), (batch, inner))
    if not isinstance(kernel, QuantizedArray):
        order = 1 if layer.kernel_contracting == "first" else -1
        kernel = regrouped(kernel, (shape.inner, shape.outer)[::order], (inner, outer)[::order])
    bias = None if bias is None else regrouped(bias, (shape.outer,), (outer,))
    layer = dataclasses.replace(layer, contracting_ndim=len(inner), out_ndim=len(outer))
    y: Any = _product(layer, *sharding.varying_together((x, kernel, bias, accumulator)), state)
    return layout.apply(regrouped(y, (batch, outer), (shape.batch, shape.outer)))


def _sequence_padding(batch: tuple[int, ...], recipe: Recipe, x: Array) -> int:
    """Tokens to append to every sequence, so that devices which split a batch of sequences cut no block of 128."""
    symbolic = any(not isinstance(size, int) for size in batch)  # of jax.export
    if symbolic or len(batch) < 2 or not _has_blocks(recipe) or batch[-1] < BLOCK or not sharding.may_be_split(x):
        return 0
    return -batch[-1] % BLOCK


def _has_blocks(recipe: Recipe) -> bool:
    return recipe.scalings["activation"][0].startswith("block")


def _whole_blocks(sizes: tuple[int, ...], recipe: Recipe) -> tuple[int, ...]:
    """The group as it is, or as one dimension where blocks do not divide its last one."""
    return (math.prod(sizes),) if _has_blocks(recipe) and len(sizes) > 1 and sizes[-1] % BLOCK else sizes


def _layout(layer: _Layer, x: Array, kernel: Array | QuantizedArray) -> Layout:
    """The batch lies as that of x and out as that of kernel, whichever copies products read, and what they gather."""
    out_first = layer.kernel_contracting == "last"
    copy: Any = kernel
    if isinstance(kernel, QuantizedArray):
        copy, out_first = (kernel.data if out_first else kernel.transposed), True
    out = slice(layer.out_ndim) if out_first else slice(-layer.out_ndim, None)
    return sharding.layout_of_product(x, x.ndim - layer.contracting_ndim, copy, out)


class _Residuals(NamedTuple):
    """What is kept for the backward pass."""

    layouts: tuple[Layout | None, ...]  # of x, kernel, bias and accumulator
    x: QuantizedArray  # the copy that sums over tokens; none where the kernel has no gradient
    kernel: QuantizedArray  # the copy that sums over out; none where a quantized kernel came without
    preactivation: Array | None
    accumulator: Array | None
    state: DelayedScalingState | None
    amaxes: dict[Role, Array | None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(layer: _Layer, x: Array, kernel, bias: Array | None, accumulator: Array | None, state) -> Array:
    del accumulator
    layout = _layout(layer, x, kernel)
    x8 = layer.quantize("activation", x, state, copies="data").array
    kernel8 = layer.quantize("kernel", kernel, state, copies=_other(layer.dgrad_copy)).array
    return _forward_product(layer, x8, kernel8, bias, layout, keep_preactivation=False)[0]


def _other(copy: Copy) -> Copy:
    return "transposed" if copy == "data" else "data"


def _forward(layer: _Layer, *operands):
    try:
        _validate_differentiated(layer, *operands)
    except Exception:
        jitted: Any = _dense  # JAX would take the trace whose rule failed for the next gradient, and not find its parts
        jitted.clear_cache()
        raise
    x, kernel, bias, accumulator, state = custom_vjp_primal_tree_values(operands)
    given = isinstance(kernel, QuantizedArray)
    with_wgrad = not given or accumulator is not None
    x8, x_amax, _ = layer.quantize("activation", x, state, copies="both" if with_wgrad else "data")
    kernel8, kernel_amax, _ = layer.quantize("kernel", kernel, state)
    y, preactivation = _forward_product(layer, x8, kernel8, bias, _layout(layer, x, kernel), keep_preactivation=True)
    amaxes: dict[Role, Array | None] = {"activation": x_amax, "kernel": kernel_amax}
    return y, _Residuals(
        tuple(Layout.of(a) if isinstance(a, Array) else None for a in (x, kernel, bias, accumulator)),
        _fp8.kept(x8, "transposed", "te_dense_activation"),
        _fp8.kept(kernel8, layer.dgrad_copy, None if given else "te_dense_kernel"),
        preactivation,
        accumulator,
        state,
        {role: None if amax is None else checkpoint_name(amax, f"te_dense_{role}") for role, amax in amaxes.items()},
    )


def _validate_differentiated(layer: _Layer, *operands) -> None:
    """Refuses choices of derivatives that would be silently wrong."""
    x, kernel, _, accumulator, state = operands
    for_x, for_kernel, for_accumulator = (
        any(leaf.perturbed for leaf in jax.tree.leaves(operand)) for operand in (x, kernel, accumulator)
    )
    if accumulator is not None:
        validate_accumulated(for_kernel, for_accumulator)
    elif for_kernel and isinstance(kernel, QuantizedArray):
        raise NotImplementedError(
            "kernel is a QuantizedArray, which has no gradient of its own: pass wgrad_accumulator and differentiate "
            "with respect to it (accumulate_gradients in modules), or do not differentiate with respect to kernel"
        )
    if for_x and isinstance(kernel, QuantizedArray) and getattr(kernel, layer.dgrad_copy) is None:
        raise ValueError(
            f"kernel has no {layer.dgrad_copy} copy, which the gradient with respect to x reads; quantize it with "
            "copies='both'"
        )
    _fp8.validate_advanced(state, trained=for_kernel or for_accumulator)
    if layer.fp8.axis_name:
        sharding.mapped_axes(layer.fp8.axis_name)


def _forward_product(layer: _Layer, x8, kernel8, bias: Array | None, layout: Layout, *, keep_preactivation: bool):
    """(y, preactivation or None)."""
    keep = layer.gelu_is_fused and keep_preactivation
    result = layer.gemm(
        "forward",
        x8,
        kernel8,
        bias=bias,
        activation="gelu" if layer.gelu_is_fused else None,
        save_preactivation=keep,
        out_dtype=layout.dtype,
    )
    if keep:
        y, preactivation = map(layout.apply, result)
        return y, checkpoint_name(preactivation, "te_dense_preactivation")
    y = layout.apply(result)
    if layer.activation is None or layer.gelu_is_fused:
        return y, None
    preactivation = checkpoint_name(y, "te_dense_preactivation")  # where it is kept, y is computed from it again
    return activate(layer.activation, preactivation), preactivation


# XLA removes the gradients that nobody asks for, and the products that they are made by.
def _backward(layer: _Layer, residuals: _Residuals, dy: Array):
    layouts, x8, kernel8, preactivation, accumulator, state, amaxes = residuals
    x_layout, kernel_layout, bias_layout, accumulator_layout = layouts
    if layer.activation is not None:
        assert preactivation is not None
        dy = activation_gradient(layer.activation, preactivation, dy)
    with_wgrad = x8.transposed is not None
    dy8, amax, dbias = layer.quantize(
        "gradient", dy, state, copies="both" if with_wgrad else "data", with_dbias=bias_layout is not None
    )
    dx = dkernel = next_accumulator = None
    if getattr(kernel8, layer.dgrad_copy) is not None:
        assert x_layout is not None
        dx = x_layout.apply(layer.gemm("dgrad", dy8, kernel8, out_dtype=dy.dtype))
    if with_wgrad:
        sides = (x8, dy8) if layer.kernel_contracting == "first" else (dy8, x8)
        if accumulator is not None:
            assert accumulator_layout is not None
            next_accumulator = accumulator_layout.apply(_accumulated(layer, *sides, accumulator))
        else:
            assert kernel_layout is not None
            dkernel = kernel_layout.apply(layer.gemm("wgrad", *sides, out_dtype=kernel_layout.dtype))
    next_state = None
    if state is not None:
        next_state = _fp8.next_state(state, {**amaxes, "gradient": amax}, layer.fp8.axis_name)
    if bias_layout is not None and dbias is not None:
        dbias = bias_layout.apply(dbias)
    return dx, dkernel, dbias, next_accumulator, next_state


_product.defvjp(_forward, _backward, symbolic_zeros=True)


def _accumulated(layer: _Layer, lhs: QuantizedArray, rhs: QuantizedArray, accumulator: Array) -> Array:
    """The next value of an accumulator, which may have more dimensions than the kernel that products read. It gets
    those here: a scan keeps what is reshaped before beside its own inputs, once more for every layer."""
    if layer.accumulate:
        accumulator = differentiated_once(accumulator, layer.fp8.name)
        accumulator = added_once(accumulator, *jax.tree.leaves((lhs, rhs)))
    groups = lhs.shape[lhs.row_ndim :], rhs.shape[rhs.row_ndim :]
    own = split_in_two(accumulator.shape, math.prod(groups[0]))
    wgrad = layer.gemm("wgrad", lhs, rhs, accumulator=regrouped(accumulator, own, groups), accumulate=layer.accumulate)
    return regrouped(wgrad, groups, own)


# ---------------------------------------------------------------------------------------------------- quantized kernels


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
