"""GEMMs that gather rows from other devices, or scatter their sums to them.

These are the two GEMMs of tensor parallelism with sequence parallelism, for use inside `shard_map` and `pmap`. The
gradient of one uses the other. Their residuals have names for `jax.checkpoint` policies and offloading:

    te_collective_activation   x, gathered or this device's part of it: in FP8 where there is a recipe, 1 byte a value,
                               else in its dtype
    te_collective_kernel       kernels in FP8, 1 byte a value. Plain kernels, and those that are passed in quantized,
                               have no name: as arguments they are there anyway
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from te_jax import native, sharding
from te_jax._core.arguments import as_dtype, as_flag
from te_jax._core.reverse_mode import reverse_mode_only
from te_jax._core.types import FLOAT_NAMES, FLOATS, FP8_ALIGNMENT, PyTree
from te_jax.ops.linear import fp8
from te_jax.ops.linear.arguments import (
    KernelContracting,
    Operand,
    Shaped,
    as_operand,
    named_weights,
    of_kernel,
    recipes_of,
    split,
    validate_kernel_contracting,
    validate_not_quantized,
    validate_parts,
    validate_quantized_x,
)
from te_jax.ops.linear.codec import Codec, codecs_of
from te_jax.ops.linear.rule import linear, traced
from te_jax.ops.linear.weight import Weight, Weights, together
from te_jax.parallel._collective.call import CollectiveSpec
from te_jax.parallel._collective.products import CollectiveProducts
from te_jax.parallel.options import Residual, Transport, as_transport, validate_residual
from te_jax.quantized import Quantizable, QuantizedArray, facts_of, facts_of_recipe, scale_shape
from te_jax.recipe import DelayedScalingState, ProductRecipes, Recipe, Scaling
from te_jax.sharding import AxisName

REVERSE_MODE = (
    "{name} has derivatives in reverse mode (jax.grad, jax.vjp) only: for forward mode (jax.jvp, jax.jacfwd) write "
    "jax.lax collectives around jnp.matmul"
)


# fmt: off
@overload
def all_gather_matmul(
    x: Operand, kernel: Operand, *, axis_name: AxisName, bias: jax.typing.ArrayLike | None = None,
    gather_dimension: int = -2, recipe: Recipe | None = None, kernel_contracting: KernelContracting = "first",
    scaling_state: DelayedScalingState | None = None,
    wgrad_accumulator: jax.typing.ArrayLike | None = None, accumulate: bool = True,
    transport: Transport = "auto", residual: Residual = "gathered", out_dtype: jax.typing.DTypeLike | None = None,
    implementation: native.Implementation | None = None,
) -> Array: ...
@overload
def all_gather_matmul(
    x: Operand, kernel: tuple[Operand, ...], *, axis_name: AxisName,
    bias: tuple[jax.typing.ArrayLike | None, ...] | None = None, gather_dimension: int = -2,
    recipe: Recipe | None = None, kernel_contracting: KernelContracting = "first",
    scaling_state: tuple[DelayedScalingState, ...] | None = None,
    wgrad_accumulator: tuple[jax.typing.ArrayLike | None, ...] | None = None, accumulate: bool = True,
    transport: Transport = "auto", residual: Residual = "gathered", out_dtype: jax.typing.DTypeLike | None = None,
    implementation: native.Implementation | None = None,
) -> tuple[Array, ...]: ...
# fmt: on
def all_gather_matmul(
    x: Operand,
    kernel: Operand | tuple[Operand, ...],
    *,
    axis_name: AxisName,
    bias: jax.typing.ArrayLike | tuple[jax.typing.ArrayLike | None, ...] | None = None,
    gather_dimension: int = -2,
    recipe: Recipe | None = None,
    kernel_contracting: KernelContracting = "first",
    scaling_state: DelayedScalingState | tuple[DelayedScalingState, ...] | None = None,
    wgrad_accumulator: jax.typing.ArrayLike | tuple[jax.typing.ArrayLike | None, ...] | None = None,
    accumulate: bool = True,
    transport: Transport = "auto",
    residual: Residual = "gathered",
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: native.Implementation | None = None,
) -> Any:
    r"""y = all_gather(x) · kernel + bias, where rows of other devices travel while those that are here are multiplied.

    This is the first half of a tensor-parallel layer, for a kernel split by columns and x split along the sequence.
    With g for the gradient of y,

        dx = reduce_scatter(g kernelᵀ),   dkernel = all_gather(x)ᵀ g,   dbias = Σ g

    With a recipe it quantizes x first, so FP8 values travel. Scales are those of the gathered x, which
    `te_jax.ops.dense` would use on one device.

    Args:
      x: [*lead, S/D, *mid, K], this device's shard of a tensor whose dimension of size S is split over D devices;
        float32, bfloat16 or float16. Or a QuantizedArray of it with row_ndim = all but the last dimension, from
        `quantize(x, recipe.quantization("activation"), amax_axis=axis_name, straight_through=True)` or an operation
        that writes FP8: the cotangent of its straight_through is dx. Not for DelayedScaling.
      kernel: [K, *N], or [*N, K] for kernel_contracting="last", this device's part, float32, bfloat16 or float16; or
        several in a tuple, which share one gather (q, k and v; gate and up). Without a recipe they are cast to the
        dtype of x. Or a QuantizedArray, from `quantize(kernel, recipe.quantization("kernel"), row_ndim=…)`, which
        serves several microbatches and whose gradient goes to wgrad_accumulator.
      axis_name: the mesh axis of the devices, or several: the first varies slowest.
      bias: [*N], or None; a tuple of them if kernel is one.
      gather_dimension: the dimension of x that is split, any but the last.
      recipe: how to quantize; None multiplies x and kernel as they are.
      kernel_contracting: "first" or "last": where in the kernel the dimension K stands.
      scaling_state: for DelayedScaling, the same on all devices. A tuple of them if kernel is one; the first gives the
        scale of x. Its cotangent is the next state, see docs/collective_matmul.md.
      wgrad_accumulator, accumulate: as in `te_jax.ops.dense`, of this device's part of the kernel. It is written in
        place with a recipe.
      transport: "xla" gathers first; "ring", or a `Ring`, overlaps by `ppermute`; "p2p", or a `P2P`, copies between
        GPUs beside the GEMMs. "auto" is "p2p" on GPUs of one host if GEMMs last long enough to hide its cost, else
        "xla".
      residual: the part of x that is kept for dkernel: the "gathered" operand, or this device's "shard" of it, which is
        D times smaller and gathered again in the backward pass.
      out_dtype: of y: float32, bfloat16 or float16; None is the dtype of x.
      implementation: of FP8, as in `te_jax.ops.dense`; "p2p" needs "native".

    Returns:
      y [*lead, S, *mid, *N], or a tuple of them if kernel is one.

    Raises:
      ValueError: for shapes, dtypes or parameters that break a rule, naming the argument; and for an x that is the same
        on all devices, where JAX tracks that. FP8 needs K and each N in multiples of 16; block scaling needs rows, S/D
        times *mid, in multiples of 4, and of 128 where kernel is differentiated.
      NotImplementedError: for second derivatives with a recipe or a wgrad_accumulator, or over "p2p"; and for
        derivatives with respect only to a QuantizedArray without straight_through.
      te_jax.native.NativeUnavailableError: for implementation="native" where it cannot run.

    Examples:
      >>> import functools, jax, jax.numpy as jnp, te_jax
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> mesh = jax.make_mesh((jax.device_count(),), ("tensor",), axis_types=(AxisType.Auto,))
      >>> layer = functools.partial(te_jax.parallel.all_gather_matmul, axis_name="tensor")
      >>> specs, out = (P("tensor"), P(None, "tensor")), P(None, "tensor")
      >>> y = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=out)(jnp.ones((64, 32)), jnp.ones((32, 64)))
    """
    several = isinstance(kernel, tuple | list)
    ys = _multiplied(
        True, ("gather_dimension", gather_dimension), x, kernel, bias, scaling_state, wgrad_accumulator,
        axis_name=axis_name, recipe=recipe, kernel_contracting=kernel_contracting, accumulate=accumulate,
        transport=transport, residual=residual, out_dtype=out_dtype, implementation=implementation,
    )  # fmt: skip
    return ys if several else ys[0]


def matmul_reduce_scatter(
    x: Operand,
    kernel: Operand,
    *,
    axis_name: AxisName,
    bias: jax.typing.ArrayLike | None = None,
    scatter_dimension: int = -2,
    recipe: Recipe | None = None,
    kernel_contracting: KernelContracting = "first",
    scaling_state: DelayedScalingState | None = None,
    wgrad_accumulator: jax.typing.ArrayLike | None = None,
    accumulate: bool = True,
    transport: Transport = "auto",
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: native.Implementation | None = None,
) -> Array:
    r"""y = reduce_scatter(x · kernel) + bias: rows for other devices travel while the next ones are multiplied.

    This is the second half of a tensor-parallel layer, for a kernel split by rows and y split along the sequence. With
    g for the gradient of y,

        dx = all_gather(g) kernelᵀ,   dkernel = xᵀ all_gather(g),   dbias = Σ g

    It rounds partial sums to out_dtype once, to send them, and adds them up in float32; transport="xla" adds them up in
    out_dtype, as `lax.psum_scatter` does. With a recipe it quantizes x and kernel first, and the backward pass sends
    FP8 values of g.

    Args:
      x: [*lead, S, *mid, K/D], this device's part of a tensor whose last dimension is split over D devices; float32,
        bfloat16 or float16. Or a QuantizedArray of it with row_ndim = all but the last dimension, from
        `quantize(x, recipe.quantization("activation"), straight_through=True)`, as in `all_gather_matmul`.
      kernel: [K/D, *N], or [*N, K/D] for kernel_contracting="last", the same part of the kernel, float32, bfloat16 or
        float16, or a QuantizedArray, as in `all_gather_matmul`.
      axis_name: the mesh axis of the devices, or several: the first varies slowest.
      bias: [*N], the same on all devices, added once, after the sum; or None.
      scatter_dimension: the dimension of x that the result is split along, any but the last; a multiple of D.
      recipe, kernel_contracting, scaling_state, wgrad_accumulator, accumulate, transport, out_dtype, implementation: as
        in `all_gather_matmul`.

    Returns:
      y [*lead, S/D, *mid, *N].

    Raises:
      ValueError: for shapes, dtypes or parameters that break a rule, naming the argument; and for an x or a kernel that
        is the same on all devices, where JAX tracks that. FP8 needs K/D and N in multiples of 16; block scaling needs
        rows, S/D times *mid, in multiples of 4, and of 128 where kernel is differentiated.
      NotImplementedError: for second derivatives with a recipe or a wgrad_accumulator, or over "p2p"; and for
        derivatives with respect only to a QuantizedArray without straight_through.
      te_jax.native.NativeUnavailableError: for implementation="native" where it cannot run.

    Examples:
      >>> import functools, jax, jax.numpy as jnp, te_jax
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> mesh = jax.make_mesh((jax.device_count(),), ("tensor",), axis_types=(AxisType.Auto,))
      >>> layer = functools.partial(te_jax.parallel.matmul_reduce_scatter, axis_name="tensor")
      >>> specs, out = (P(None, "tensor"), P("tensor")), P("tensor")
      >>> y = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=out)(jnp.ones((64, 32)), jnp.ones((32, 64)))
    """
    if isinstance(kernel, tuple | list):
        raise ValueError(
            "kernel is a tuple; matmul_reduce_scatter takes one, for its products have one sum: pass an array"
        )
    (y,) = _multiplied(
        False, ("scatter_dimension", scatter_dimension), x, kernel, bias, scaling_state,
        wgrad_accumulator,
        axis_name=axis_name, recipe=recipe, kernel_contracting=kernel_contracting, accumulate=accumulate,
        transport=transport, residual="shard", out_dtype=out_dtype, implementation=implementation,
    )  # fmt: skip
    return y


def _multiplied(
    gathers: bool,
    dimension: tuple[str, int],
    x: Operand,
    kernel: Any,
    bias: Any,
    scaling_state: object,
    wgrad_accumulator: Any,
    **options: Any,
) -> tuple[Array, ...]:
    """The results of a layer that gathers or scatters; see `prepared` for options."""
    x = as_operand("x", x)
    weights = named_weights(kernel, bias, scaling_state, wgrad_accumulator)
    products, sizes = prepared(gathers, dimension, x, weights, **options)
    operands = canonical(products, x, tuple(weights.values()))
    operands = reverse_mode_only(operands, REVERSE_MODE.format(name=products.name))
    # shard_map does not run rules of derivatives with symbolic zeros outside of jit.
    with jax.disable_jit(False):
        ys = traced(_linear, products, *operands)
    outers = (outer_of(products.kernel_contracting, weight.kernel) for weight in weights.values())
    return tuple(y.reshape(*sizes, *outer) for y, outer in zip(ys, outers, strict=True))


def outer_of(kernel_contracting: KernelContracting, kernel: Quantizable) -> tuple[int, ...]:
    """*N of a kernel."""
    return kernel.shape[1:] if kernel_contracting == "first" else kernel.shape[:-1]


def _linear(products: CollectiveProducts, x: Array | None, x8: QuantizedArray | None, weights: Weights):
    return linear(products, x, x8, weights, None)


def prepared(
    gathers: bool,
    dimension: tuple[str, int],
    x: Shaped,
    weights: dict[str, Weight],
    *,
    axis_name: sharding.AxisName,
    recipe: Recipe | None,
    kernel_contracting: KernelContracting,
    accumulate: bool,
    transport: Transport,
    residual: Residual,
    out_dtype: jax.typing.DTypeLike | None,
    implementation: native.Implementation | None,
) -> tuple[CollectiveProducts, tuple[int, ...]]:
    """(products for checked operands, the dimensions of results before those of the kernels' own).

    Args:
      gathers: whether the layer gathers rows of x, or scatters sums.
      dimension: the name of the argument that says which dimension of x is gathered or scattered, and its value.
      x: an array, a QuantizedArray, or the shape and dtype of one.
      weights: by name.
      axis_name, recipe, kernel_contracting, accumulate, transport, residual, out_dtype, implementation: see
        `all_gather_matmul`.

    Raises:
      ValueError, NativeUnavailableError: as `all_gather_matmul`.
    """
    kernels = {name: weight.kernel for name, weight in weights.items()}
    transport = as_transport(transport)
    validate_residual(residual)
    axes, size = sharding.mapped_axes(axis_name)
    axis = _axis(*dimension, x)
    length = x.shape[axis]
    if not gathers and length % size:
        raise ValueError(
            f"x has shape {x.shape}; dimension {axis}, {dimension[0]}, must be a multiple of the {size} devices along "
            f"{axis_name!r}: pad it"
        )
    part = length if gathers else length // size
    name = f"te_jax.parallel.{'all_gather_matmul' if gathers else 'matmul_reduce_scatter'}"
    lead, mid = x.shape[:axis], x.shape[axis + 1 : -1]
    _validate_operands(x, weights, recipe, kernel_contracting)
    spec = CollectiveSpec(
        gathers=gathers,
        axis_name=axes,
        size=size,
        leading=math.prod(lead),
        rows=part * math.prod(mid),
        x_dtype=np.dtype(x.dtype),
        out_dtype=as_dtype("out_dtype is", x.dtype if out_dtype is None else out_dtype, FLOATS, FLOAT_NAMES),
        codec=Codec(name=name),
        transport=transport,
        residual=residual,
    )
    for one in [] if recipe is None else recipes_of(recipe):
        of_one = dataclasses.replace(spec, codec=dataclasses.replace(spec.codec, recipe=one))
        _validate_fp8(of_one, x, kernels, dimension[0], kernel_contracting)
    for label, weight in weights.items():
        _validate_state(recipe, axes, of_kernel(label, "scaling_state"), weight.state)
    _validate_split(spec, x, kernels)
    products = CollectiveProducts(
        name=name,
        codecs=codecs_of(name, recipe, implementation, spec.x_dtype),
        dtype=spec.x_dtype,
        spec=spec,
        accumulate=as_flag("accumulate", accumulate),
        state_axis=axes,
        kernel_contracting=kernel_contracting,
    )
    if not products.shares("activation"):  # the gradients of kernels read another x than is gathered
        products = dataclasses.replace(products, spec=dataclasses.replace(spec, residual="shard"))
    return products, (*lead, length * size if gathers else part, *mid)


# ----------------------------------------------------------------------------------------------------------- validation


def _axis(name: str, axis: int, x: Shaped) -> int:
    if x.ndim < 2:
        raise ValueError(f"x has shape {x.shape}; it needs a dimension before the last, which is summed over")
    integer = isinstance(axis, int | np.integer) and not isinstance(axis, bool)
    if not integer or not -x.ndim <= axis < x.ndim or axis % x.ndim == x.ndim - 1:
        raise ValueError(
            f"{name} is {axis!r}; for x of shape {x.shape} it must be an integer that names a dimension before the "
            "last, which is summed over"
        )
    return int(axis) % x.ndim


def _validate_operands(
    x: Shaped, weights: dict[str, Weight], recipe: Recipe | None, kernel_contracting: KernelContracting
) -> None:
    validate_kernel_contracting(kernel_contracting)
    kernels = {name: weight.kernel for name, weight in weights.items()}
    if recipe is not None:
        fp8.validate_recipe(recipe)
        if not all(facts_of_recipe(one).native for one in recipes_of(recipe)):
            raise ValueError(
                f"recipe is {recipe!r}; collective products have no blocks of 32: use CurrentScaling, RowwiseScaling "
                "or BlockScaling, or te_jax.ops.dense on an Auto or Explicit mesh"
            )
    for name, array in {"x": x, **kernels}.items():
        for leaf in jax.tree.leaves(array):
            if taken := set(sharding.axes_of_type(leaf)):
                raise ValueError(
                    f"{name} is split over {sorted(taken)}, Explicit axes that shard_map left out; let it map them as "
                    "well, or make them Auto"
                )
        if array.dtype not in FLOATS:
            raise ValueError(f"{name} has dtype {array.dtype}; it must be {FLOAT_NAMES}: cast it")
        if isinstance(array, QuantizedArray) and recipe is None:
            raise ValueError(
                f"recipe is None, but {name} is a QuantizedArray; name its recipe or pass {name}.dequantize()"
            )
        if isinstance(recipe, ProductRecipes):
            validate_not_quantized(name, array, recipe)
        if 0 in array.shape:
            raise ValueError(f"{name} has shape {array.shape}; no dimension may be 0: leave out the call")
    varying = sharding.varying_axes(x, tuple(kernels.values()))
    for name, weight in weights.items():
        kernel = weight.kernel
        place, shape = (0, f"[{x.shape[-1]}, …]") if kernel_contracting == "first" else (-1, f"[…, {x.shape[-1]}]")
        if kernel.ndim < 2 or kernel.shape[place] != x.shape[-1]:
            raise ValueError(
                f"{name} has shape {kernel.shape}; it must be {shape}, with the last dimension of x, which "
                f"has shape {x.shape}, and at least one of its own"
            )
        validate_parts(name, weight, outer_of(kernel_contracting, kernel), varying)


def _validate_fp8(
    spec: CollectiveSpec,
    x: Shaped,
    kernels: dict[str, Quantizable],
    dimension: str,
    kernel_contracting: KernelContracting,
) -> None:
    recipe = spec.codec.recipe
    assert recipe is not None
    for name, kernel in kernels.items():
        for side, size in (("in", x.shape[-1]), ("out", math.prod(outer_of(kernel_contracting, kernel)))):
            if size % FP8_ALIGNMENT:
                raise ValueError(
                    f"{name} has shape {kernel.shape}, {size} features {side} on this device; FP8 products need a "
                    f"multiple of {FP8_ALIGNMENT}: pad them or use recipe=None"
                )
    if spec.rows % (multiple := spec.scaling.row_multiple):
        raise ValueError(
            f"x has shape {x.shape}, {spec.rows} rows for each device along {dimension}; block scaling needs a "
            f"multiple of {multiple}: pad them, or use CurrentScaling or RowwiseScaling"
        )
    if isinstance(x, QuantizedArray):
        validate_quantized_x(x, recipe, kernel_contracting, row_ndim=x.ndim - 1)
        # Scales of rows and blocks travel with them; not so those of features, which the gradient of kernel reads.
        shared = x.scale_inv if spec.scaling.by_tensor else x.transposed_scale_inv if spec.scaling.by_row else None
        differing = sharding.varying_axes(shared) & set(spec.axis_name)
        if spec.gathers and differing:
            kind = "tensors" if spec.scaling.by_tensor else "features, of the transposed copy,"
            raise ValueError(
                f"x has another scale on each device along {sorted(differing)}; scales of {kind} must agree: quantize "
                "it with amax_axis"
            )
    for name, kernel in kernels.items():
        if isinstance(kernel, QuantizedArray):
            row_ndim, read = (1, "transposed") if kernel_contracting == "first" else (kernel.ndim - 1, "data")
            if kernel.row_ndim != row_ndim:
                raise ValueError(
                    f"{name} was quantized as {kernel.row_ndim} rows and {kernel.col_ndim} cols, shape {kernel.shape}; "
                    f"quantize it with row_ndim={row_ndim}"
                )
            fp8.validate_quantized(name, kernel, recipe, "kernel", read)


def _validate_state(recipe: Recipe | None, axes: tuple[str, ...], name: str, state: object) -> None:
    fp8.validate_state(recipe, state, name)
    if differing := sharding.varying_axes(state) & set(axes):
        raise ValueError(
            f"{name} differs from device to device along {sorted(differing)}; scales of tensors must agree: pass "
            "it into shard_map whole, with PartitionSpec()"
        )


def _validate_split(spec: CollectiveSpec, x: Shaped, kernels: dict[str, Quantizable]) -> None:
    """Where all devices had the same, a gather would repeat the rows of x, and a sum would have a product D times."""
    parts = {"x": x} if spec.gathers else {"x": x, **kernels}
    for name, array in parts.items():
        sharding.validate_split(
            name, array, spec.axis_name, f"pass {name} split over these axes, or use te_jax.ops.dense"
        )


# ----------------------------------------------------------------------------------------------------- canonical shapes


def canonical(products: CollectiveProducts, x: Any, weights: Weights) -> tuple[PyTree, ...]:
    """Operands as products take them: x, or what its gradient goes through; x in FP8, where it came so; and weights of
    kernels [K, N], or [N, K], whose biases [N] are float32, in which they are added and their gradients summed.

    All vary over the same mesh axes: gradients are then summed outside, as those of JAX's own operations are. Quantized
    arrays are matrices.
    """
    spec, inner = products.spec, x.shape[-1]
    x, x8 = split(x)
    rows = (spec.leading, spec.rows) if spec.gathers else (spec.leading, spec.size, spec.rows)
    x = None if x is None else x.reshape(*rows, inner)
    x8 = None if x8 is None else as_matrix(x8, math.prod(rows), inner)
    weights = tuple(_canonical_weight(weight, products.kernel_contracting) for weight in weights)
    return together((x, x8, weights), sharding.tracked_axes(spec.axis_name))


def _canonical_weight(weight: Weight, kernel_contracting: KernelContracting) -> Weight:
    kernel, bias = weight.kernel, weight.bias
    rows = kernel.shape[0] if kernel_contracting == "first" else math.prod(kernel.shape[:-1])
    cols = kernel.size // rows
    quantized = isinstance(kernel, QuantizedArray)
    return weight._replace(
        kernel=as_matrix(kernel, rows, cols) if quantized else kernel.reshape(rows, cols),
        bias=None if bias is None else bias.astype(jnp.float32).reshape(-1),
    )


def as_matrix(x: QuantizedArray, rows: int, cols: int) -> QuantizedArray:
    """x with one dimension of rows and one of cols. Blocks divide the last dimension of each group."""

    def scales(scale_inv: Array | None, scaling: Scaling, outer: int, summed: int) -> Array | None:
        if scale_inv is None or facts_of(scaling).by_tensor:
            return scale_inv
        return scale_inv.reshape(scale_shape(scaling, (outer,), (summed,)))

    return QuantizedArray(
        None if x.data is None else x.data.reshape(rows, cols),
        scales(x.scale_inv, x.scaling, rows, cols),
        None if x.transposed is None else x.transposed.reshape(cols, rows),
        scales(x.transposed_scale_inv, x.transposed_scaling, cols, rows),
        1,
        1,
        x.scaling,
        x.transposed_scaling,
        x.dtype,
        None if x.straight_through is None else x.straight_through.reshape(rows, cols),
    )
