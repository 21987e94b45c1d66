"""Linear layers of experts: a kernel for each group of rows, forward, input gradient and weight gradient, in FP8."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jax.interpreters import ad

from te_jax import native, sharding
from te_jax._core.arguments import as_flag
from te_jax._core.batching import batched_together
from te_jax._core.derivatives import differentiated_once, not_differentiated
from te_jax._core.reverse_mode import reverse_mode_only
from te_jax._core.types import FLOAT_NAMES, FLOATS, FP8_ALIGNMENT
from te_jax.ops import _fp8
from te_jax.ops._dense_arguments import implementation_for
from te_jax.ops._fp8 import Fp8
from te_jax.ops._grouped_product import rows_in_groups
from te_jax.ops._operands import as_array, one_for_each
from te_jax.ops._plain_dense import added_once, validate_accumulated, validate_reached
from te_jax.ops.dense import quantize_kernel
from te_jax.ops.grouped_gemm import cuda_problem, grouped_gemm, grouped_gemm_of_pairs, grouped_native
from te_jax.quantized import QuantizedArray
from te_jax.recipe import DelayedScaling, Recipe, Role
from te_jax.sharding import Layout

__all__ = ["grouped_dense"]

Operand = QuantizedArray | jax.typing.ArrayLike

NAME = "te_jax.ops.grouped_dense"
REVERSE_MODE = (
    f"{NAME} has first derivatives in reverse mode (jax.grad, jax.vjp) only: for forward mode (jax.jvp, jax.jacfwd) "
    "or second derivatives use te_jax.ops.ragged_dot with implementation='reference'"
)


# fmt: off
@overload
def grouped_dense(
    x: jax.typing.ArrayLike, kernel: Operand, group_sizes: jax.typing.ArrayLike,
    bias: jax.typing.ArrayLike | None = None, *, recipe: Recipe | None = None,
    wgrad_accumulator: jax.typing.ArrayLike | None = None, accumulate: bool = True,
    implementation: native.Implementation | None = None,
) -> Array: ...
@overload
def grouped_dense(
    x: jax.typing.ArrayLike, kernel: tuple[Operand, ...], group_sizes: jax.typing.ArrayLike,
    bias: tuple[jax.typing.ArrayLike | None, ...] | None = None, *, recipe: Recipe | None = None,
    wgrad_accumulator: tuple[jax.typing.ArrayLike | None, ...] | None = None, accumulate: bool = True,
    implementation: native.Implementation | None = None,
) -> tuple[Array, ...]: ...
# fmt: on
def grouped_dense(
    x: jax.typing.ArrayLike,
    kernel: Operand | tuple[Operand, ...],
    group_sizes: jax.typing.ArrayLike,
    bias: jax.typing.ArrayLike | tuple[jax.typing.ArrayLike | None, ...] | None = None,
    *,
    recipe: Recipe | None = None,
    wgrad_accumulator: jax.typing.ArrayLike | tuple[jax.typing.ArrayLike | None, ...] | None = None,
    accumulate: bool = True,
    implementation: native.Implementation | None = None,
) -> Any:
    r"""A linear layer of experts, y[r] = x[r] · kernel[e] + bias[e] for the rows r of expert e, and zeros for others.

    With Q for quantization as the recipe says, and g for the gradient of y:

        y = Q(x) Q(kernel) + bias,   dx = Q(g) Q(kernel)ᵀ,   dkernel[e] = Σ_r Q(x)ᵀ Q(g),   dbias[e] = Σ_r g

    with sums over the rows of each expert. The backward pass reads x and kernel in FP8, under the names of
    `te_jax.checkpoint_policies`. Rows of no expert, in x and in g, are read as zeros whatever they hold; gradients of
    experts without rows are zero.

    Args:
      x: [rows, in], float32, bfloat16 or float16, sorted by expert (`permute`).
      kernel: [experts, in, out], float32, bfloat16 or float16. Or a QuantizedArray of it, from a `jax.vmap` of
        `quantize` with `recipe.quantization("kernel")`, which serves several microbatches and has no gradient of its
        own: that goes to wgrad_accumulator. Or several in a tuple (gate and up), which share one quantized x; dx is the
        sum over them.
      group_sizes: integers [experts], rows of each, in order.
      bias: [experts, out], or None; a tuple where kernel is one, as is wgrad_accumulator.
      recipe: how to quantize: block, row or current scaling, whose tensor is all of x, and of a kernel one expert's.
        A kernel is quantized from its own dtype. None multiplies in the dtype of x, to which kernels are rounded. With
        a recipe rows, in and out must be multiples of 16, and block scaling wants the rows of each expert to be one of
        128: `group_by_expert(…, align=128)`.
      wgrad_accumulator: float32, bfloat16 or float16, shaped as kernel. Its cotangent is its next value, written in
        place where the buffer is donated; kernel's own cotangent is then zero.
      accumulate: the next value is wgrad_accumulator + dkernel; False: dkernel, in the same buffer.
      implementation: None takes the native kernels where they are installed, else the reference; "native" or
        "reference" never fall back. See `grouped_gemm` about GPUs.

    Returns:
      [rows, out] in the dtype of x, or a tuple of them where kernel is one. Gradients have the dtypes of their
      arguments; dkernel and dbias are rounded once, from float32 sums.

    Raises:
      ValueError: an argument breaks a rule above; the message names it.
      NotImplementedError: for forward mode, second derivatives, and with respect to a QuantizedArray.
      te_jax.native.NativeUnavailableError: "native" cannot run here, or this GPU cannot multiply as the recipe says.

    Example:
      >>> import jax, jax.numpy as jnp, te_jax
      >>> x, kernel, sizes = jnp.ones((256, 32)), jnp.ones((2, 32, 16)), jnp.array([128, 0])
      >>> loss = lambda x, k: te_jax.ops.grouped_dense(x, k, sizes, recipe=te_jax.recipe.BlockScaling()).sum()
      >>> dx, dkernel = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, kernel)
      >>> dx[:, 0][jnp.array([0, 200])].tolist(), dkernel[:, 0, 0].tolist()
      ([16.0, 0.0], [128.0, 0.0])
    """
    several = isinstance(kernel, tuple | list)
    count = len(kernel) if isinstance(kernel, tuple | list) else 1
    if not count:
        raise ValueError("kernel is an empty tuple; pass one array at least")
    x, group_sizes = as_array("x", x), as_array("group_sizes", group_sizes)
    kernels = {
        name: value if isinstance(value, QuantizedArray) else as_array(name, value)
        for name, value in one_for_each("kernel", kernel, count, several)
    }
    biases, accumulators = (
        {name: None if a is None else as_array(name, a) for name, a in one_for_each(argument, values, count, several)}
        for argument, values in (("bias", bias), ("wgrad_accumulator", wgrad_accumulator))
    )
    accumulate = as_flag("accumulate", accumulate)
    validate_rows(recipe, x)
    if group_sizes.ndim != 1 or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(
            f"group_sizes has shape {group_sizes.shape} and dtype {group_sizes.dtype}; it must be integers [experts]"
        )
    for named in zip(kernels.items(), biases.items(), accumulators.items(), strict=True):
        validate_kernel(x, group_sizes, recipe, *named)
    problem = problem_of(recipe, x, tuple(kernels.values()))
    if recipe is None:
        products: native.Implementation = "native" if grouped_native(implementation, problem) else "reference"
    else:
        products = implementation_for(implementation, recipe, problem)
    layer = GroupedLayer(recipe, products, accumulate)
    operands = (x, *(tuple(named.values()) for named in (kernels, biases, accumulators)))
    operands = sharding.varying_together((*reverse_mode_only(operands, REVERSE_MODE), group_sizes))
    ys = _run(*operands, layer)
    return ys if several else ys[0]


@dataclasses.dataclass(frozen=True)
class GroupedLayer:
    """The static arguments. Hashable, so that a layer is traced once.

    Attributes:
      recipe, accumulate: see `grouped_dense`.
      implementation: of quantization and products.
    """

    recipe: Recipe | None
    implementation: native.Implementation
    accumulate: bool

    def quantize(self, role: Role, x: Array, group_sizes: Array, *, with_wgrad: bool) -> Any:
        """x [rows, features] as products read it, zeros in rows of no expert."""
        if self.recipe is None:
            return not_differentiated(x, REVERSE_MODE)
        counts = jnp.arange(x.shape[0], dtype=jnp.int32) < rows_in_groups(group_sizes, x.shape[0])
        x = jnp.where(counts[:, None], x, jnp.zeros((), x.dtype))
        fp8 = Fp8(NAME, self.recipe, self.implementation)
        return fp8.quantize(role, x, None, row_ndim=1, copies="both" if with_wgrad else "data").array

    def quantize_kernel(self, kernel: Any, dtype: Any) -> Any:
        """A kernel as products with an x of this dtype read it."""
        if isinstance(kernel, QuantizedArray):
            return kernel
        kernel = not_differentiated(kernel, REVERSE_MODE)
        if self.recipe is None:
            return kernel.astype(dtype)
        return quantize_kernel(kernel, self.recipe, row_ndim=1, stacked_ndim=1, implementation=self.implementation)

    def forward(self, x8: Any, kernel8s: Any, biases: Any, group_sizes: Array, dtype: Any) -> tuple[Array, ...]:
        ys = (
            self.gemm(x8, kernel8, group_sizes, bias=not_differentiated(bias, REVERSE_MODE), out_dtype=dtype)
            for kernel8, bias in zip(kernel8s, biases, strict=True)
        )
        return batched_together(tuple(ys))

    def dgrad(self, dy8s: Any, kernel8s: Any, group_sizes: Array, dtype: Any) -> Array:
        """dx, the sum over kernels. Of two kernels, such as gate and up, it is one product."""
        pairs = list(zip(dy8s, kernel8s, strict=True))
        if len(pairs) == 2:
            first, second = pairs
            return self.gemm_of_pairs(first, second, group_sizes, rhs_contracting="cols", out_dtype=dtype)
        options = {"rhs_contracting": "cols", "out_dtype": jnp.float32 if pairs[1:] else dtype}
        return functools.reduce(jnp.add, (self.gemm(*pair, group_sizes, **options) for pair in pairs))

    def gemm(self, lhs: Any, rhs: Any, group_sizes: Array, **options: Any) -> Array:
        return grouped_gemm(lhs, rhs, group_sizes, implementation=self.implementation, **options)

    def gemm_of_pairs(self, first: Any, second: Any, group_sizes: Array, **options: Any) -> Array:
        return grouped_gemm_of_pairs(first, second, group_sizes, implementation=self.implementation, **options)


# Under jit even when called eagerly: sharded operands are then partitioned rather than gathered.
@functools.partial(jax.jit, static_argnums=5, inline=sharding.INLINE)
def _run(x, kernels, biases, accumulators, group_sizes, layer: GroupedLayer) -> tuple[Array, ...]:
    return _products(layer, x, kernels, biases, accumulators, group_sizes)


class _Residuals(NamedTuple):
    """What is kept for the backward pass."""

    layouts: tuple[Any, ...]  # of x, kernels, biases
    x: Any  # in FP8 the copy that sums over rows
    kernels: tuple[Any, ...]  # in FP8 the copy that sums over out
    accumulators: tuple[Array | None, ...]
    group_sizes: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _products(layer: GroupedLayer, x, kernels, biases, accumulators, group_sizes) -> tuple[Array, ...]:
    del accumulators
    x8 = layer.quantize("activation", x, group_sizes, with_wgrad=False)
    kernel8s = [layer.quantize_kernel(kernel, x.dtype) for kernel in kernels]
    return layer.forward(x8, kernel8s, biases, group_sizes, x.dtype)


def _forward(layer: GroupedLayer, *operands):
    validate_differentiated(*operands)
    x, kernels, biases, accumulators, group_sizes = custom_vjp_primal_tree_values(operands)
    given = [isinstance(kernel, QuantizedArray) for kernel in kernels]
    with_wgrad = any(a is not None or not g for a, g in zip(accumulators, given, strict=True))
    x8 = layer.quantize("activation", x, group_sizes, with_wgrad=with_wgrad)
    kernel8s = tuple(layer.quantize_kernel(kernel, x.dtype) for kernel in kernels)
    ys = layer.forward(x8, kernel8s, biases, group_sizes, x.dtype)
    layouts = (
        Layout.of(x),
        *(tuple(Layout.of(a) if isinstance(a, Array) else None for a in arrays) for arrays in (kernels, biases)),
    )
    if layer.recipe is not None:
        x8 = _fp8.kept(x8 if with_wgrad else x8.without_transposed(), "transposed", "te_dense_activation")
        kernel8s = tuple(
            _fp8.kept(kernel8, "data", None if g else "te_dense_kernel")
            for kernel8, g in zip(kernel8s, given, strict=True)
        )
    return ys, _Residuals(layouts, x8, kernel8s, accumulators, group_sizes)


def _backward(layer: GroupedLayer, residuals: _Residuals, dys):
    (x_layout, kernel_layouts, bias_layouts), x8, kernel8s, accumulators, group_sizes = residuals
    dys = [ad.zeros_like_aval(dy.aval) if isinstance(dy, SymbolicZero) else dy for dy in dys]
    if layer.recipe is None:
        x8, kernel8s = not_differentiated((x8, kernel8s), REVERSE_MODE)
    trained = [
        accumulator is not None or layout is not None
        for accumulator, layout in zip(accumulators, kernel_layouts, strict=True)
    ]
    dy8s = [
        layer.quantize("gradient", dy, group_sizes, with_wgrad=with_wgrad)
        for dy, with_wgrad in zip(dys, trained, strict=True)
    ]
    dx = layer.dgrad(dy8s, kernel8s, group_sizes, x_layout.dtype)
    dkernels, dbiases, next_accumulators = [], [], []
    for dy, dy8, kernel_layout, bias_layout, accumulator in zip(
        dys, dy8s, kernel_layouts, bias_layouts, accumulators, strict=True
    ):
        wgrad = functools.partial(layer.gemm, x8, dy8, group_sizes, lhs_contracting="rows")
        next_accumulators.append(None if accumulator is None else accumulated(layer, wgrad, accumulator, x8, dy8))
        if accumulator is None and kernel_layout is not None:
            dkernels.append(kernel_layout.apply(wgrad(out_dtype=kernel_layout.dtype)))
        else:
            dkernels.append(None)
        dbiases.append(None if bias_layout is None else bias_layout.apply(_sum_of_rows(layer, dy, group_sizes)))
    return x_layout.apply(dx), tuple(dkernels), tuple(dbiases), tuple(next_accumulators), None


_products.defvjp(_forward, _backward, symbolic_zeros=True)


def accumulated(layer: GroupedLayer, wgrad: Any, accumulator: Array, *operands: Any) -> Array:
    layout = Layout.of(accumulator)
    if layer.accumulate:
        accumulator = differentiated_once(accumulator, NAME)
        accumulator = added_once(accumulator, *jax.tree.leaves(operands))
    return layout.apply(wgrad(accumulator=accumulator, accumulate=layer.accumulate, out_dtype=layout.dtype))


def _sum_of_rows(layer: GroupedLayer, dy: Array, group_sizes: Array) -> Array:
    """Float32 [experts, out]: the sum of the rows of each expert, as a product with ones, of as many columns as a GPU
    needs."""
    dy = not_differentiated(dy, REVERSE_MODE)
    columns = 1 if native.compute_capability() is None else 8
    ones = sharding.varying_over(jnp.ones((dy.shape[0], columns), dy.dtype), sharding.varying_axes(dy))
    if cuda_problem(None, dy.dtype, group_sizes.shape[0], dy.shape[1], columns):
        layer = dataclasses.replace(layer, implementation="reference")
    # dy first: under vmap of a split dimension the first operand says how examples lie, and ones are the same for all.
    return layer.gemm(dy, ones, group_sizes, lhs_contracting="rows", out_dtype=jnp.float32)[..., 0]


# ----------------------------------------------------------------------------------------------------- arguments


def problem_of(recipe: Recipe | None, x: Array, kernels: tuple[Any, ...]) -> str | None:
    """Why a GPU cannot multiply these, forward and backward."""
    scaling = None if recipe is None else recipe.quantization("activation").scaling
    problems = (cuda_problem(scaling, x.dtype, *kernel.shape) for kernel in kernels)
    return next(filter(None, problems), None)


def validate_rows(recipe: Any, x: Array) -> None:
    if x.ndim != 2 or x.dtype not in FLOATS:
        raise ValueError(f"x has shape {x.shape} and dtype {x.dtype}; it must be [rows, in], {FLOAT_NAMES}")
    if recipe is None:
        return
    _fp8.validate_recipe(recipe)
    if isinstance(recipe, DelayedScaling):
        raise ValueError(
            "recipe is DelayedScaling, and experts have no scaling state; use BlockScaling or CurrentScaling"
        )
    for name, size in (("rows", x.shape[0]), ("values of `in`", x.shape[1])):
        if size % FP8_ALIGNMENT:
            raise ValueError(
                f"x has {size} {name}; FP8 products need a multiple of {FP8_ALIGNMENT}: use group_by_expert(…, "
                "align=128), pad x and kernel, or use recipe=None"
            )


def validate_kernel(
    x: Array, group_sizes: Array, recipe: Recipe | None, named_kernel, named_bias, named_accumulator
) -> None:
    (name, kernel), (bias_name, bias), (accumulator_name, accumulator) = named_kernel, named_bias, named_accumulator
    experts, inner = group_sizes.shape[0], x.shape[1]
    if kernel.ndim != 3 or kernel.shape[:2] != (experts, inner):
        raise ValueError(
            f"{name} has shape {kernel.shape}; for {experts} group_sizes and x of shape {x.shape} it must be "
            f"({experts}, {inner}, out)"
        )
    if isinstance(kernel, QuantizedArray):
        if recipe is None:
            raise ValueError(f"{name} is a QuantizedArray and recipe is None; give the recipe that it was quantized by")
        _fp8.validate_quantized(name, kernel, recipe, "kernel", "transposed")
    elif kernel.dtype not in FLOATS:
        raise ValueError(f"{name} has dtype {kernel.dtype}; it must be {FLOAT_NAMES}: cast it")
    if accumulator is not None:
        validate_reached(accumulator_name)
    outer = kernel.shape[2]
    if recipe is not None and outer % FP8_ALIGNMENT:
        raise ValueError(
            f"{name} has {outer} values of `out`; FP8 products need a multiple of {FP8_ALIGNMENT}: pad it, or use "
            "recipe=None"
        )
    for label, array, expected in (
        (bias_name, bias, (experts, outer)),
        (accumulator_name, accumulator, (experts, inner, outer)),
    ):
        if array is not None and (array.shape != expected or array.dtype not in FLOATS):
            raise ValueError(
                f"{label} has shape {array.shape} and dtype {array.dtype}; it must be {FLOAT_NAMES}, {expected}"
            )


def validate_differentiated(x, kernels, _, accumulators, __) -> None:
    """Refuses choices of derivatives that would be silently wrong."""

    def perturbed(operand: Any) -> bool:
        return any(leaf.perturbed for leaf in jax.tree.leaves(operand))

    for i, (kernel, accumulator) in enumerate(zip(kernels, accumulators, strict=True)):
        name = f"kernel[{i}]" if kernels[1:] else "kernel"
        if accumulator is not None:
            validate_accumulated(perturbed(kernel), perturbed(accumulator))
        elif perturbed(kernel) and isinstance(kernel, QuantizedArray):
            raise NotImplementedError(
                f"{name} is a QuantizedArray, which has no gradient of its own: pass wgrad_accumulator and "
                f"differentiate with respect to it, or do not differentiate with respect to {name}"
            )
        if perturbed(x) and isinstance(kernel, QuantizedArray) and kernel.data is None:
            raise ValueError(
                f"{name} has no data copy, which the gradient with respect to x reads; quantize it with copies='both'"
            )
