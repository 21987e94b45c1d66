"""The product of sharded operands: what te_gemm computes in one pass, how it is split, and how it is called.

On Explicit meshes the reference is split in the same way; on Auto meshes XLA does that.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from te_jax import native, sharding
from te_jax._core.types import BLOCK, E5M2, FP8_ALIGNMENT
from te_jax.quantized import QuantizedArray
from te_jax.recipe import Quantization
from te_jax.reference.gemm import epilogue

Scaling = Literal["none", "tensor", "row", "block"]
"""Of a product: both operands' scales together."""
BlockScaling = Literal["block_1x128", "block_128x128"]
Group = Literal["m", "n", "k"]
"""The outer dimensions of lhs and of rhs, and those summed over."""

# The order in which te_gemm takes them.
_OPERANDS = ("a", "b", "a_scale_inv", "b_scale_inv", "bias", "accumulator", "aux_in", "amax_in")
_ACCUMULATOR, _D = _OPERANDS.index("accumulator"), 0
_FLOAT32, _BFLOAT16 = np.dtype(jnp.float32), np.dtype(jnp.bfloat16)

_BLOCK_ROW_MULTIPLE = 4
"""The kernel of blocks reads the scales of four rows at a time."""

_CUBLASLT_WORKSPACE_BYTES = 32 * 2**20 + 512
"""32 MiB aligned to 256 bytes, and before them 256 bytes for scalars."""

_EPILOGUE_ROW_MULTIPLE = 8
"""cuBLASLt's activations want rows of a multiple of 16 bytes: of other results none, and with other operands
products were rounded before a bias. All that is FP8 has them, on every shard."""


@dataclasses.dataclass(frozen=True)
class Followup:
    """What follows a product of bias and epilogue, in this order, each where it is asked for.

    Attributes:
      bias: whether one is added.
      activation: "gelu", or "dgelu" for a product with gelu's derivative at values that are given.
      save_preactivation: whether the values before the activation are a result as well.
      quantization: of the result.
      accumulate: whether an accumulator is added; then there is nothing else.
    """

    bias: bool = False
    activation: Literal["gelu", "dgelu"] | None = None
    save_preactivation: bool = False
    quantization: Quantization | None = None
    accumulate: bool = False


@dataclasses.dataclass(frozen=True)
class Product:
    """One call of te_gemm, as static as its attributes are.

    Attributes:
      a_outer_ndim, b_outer_ndim, summed_ndim: of both operands.
      a_summed_first, b_summed_first: whether the summed dimensions come before the outer ones.
      scaling: "none", "tensor", "row" or "block".
      dtype: of the result, before it is quantized.
      native: by te_gemm; else by the reference, with nothing fused.
      followup: what is fused.
      overwrite: whether the result may take the place of an accumulator that is not read.
      fast_accumulation, autotune, own_kernel: see `te_jax.ops.gemm`.
      whole: factors that must not be split, since shards of them could not be multiplied.
    """

    a_outer_ndim: int
    b_outer_ndim: int
    summed_ndim: int
    a_summed_first: bool
    b_summed_first: bool
    scaling: Scaling
    dtype: np.dtype
    native: bool
    followup: Followup
    overwrite: bool
    fast_accumulation: bool
    autotune: bool
    own_kernel: bool
    whole: tuple[str, ...]

    @property
    def operands(self) -> tuple[str, ...]:
        """Those that it takes, in order."""
        followup = self.followup
        taken = {
            "a_scale_inv": self.scaling != "none",
            "b_scale_inv": self.scaling != "none",
            "bias": followup.bias,
            "accumulator": followup.accumulate or self.overwrite,
            "aux_in": followup.activation == "dgelu",
            "amax_in": followup.quantization is not None,
        }
        return tuple(name for name in _OPERANDS if taken.get(name, True))

    def factors(self, group: Group) -> tuple[str, ...]:
        """Names of the dimensions of a group that may be split, as sharding rules know them."""
        ndim = {"m": self.a_outer_ndim, "n": self.b_outer_ndim, "k": self.summed_ndim}[group]
        return tuple(f"{group}{i}" for i in range(ndim))


def autotunes() -> bool:
    """Whether candidates may be timed: TE_JAX_AUTOTUNE=0 in the environment says no.

    Raises:
      ValueError: TE_JAX_AUTOTUNE is neither 0 nor 1.
    """
    chosen = os.environ.get("TE_JAX_AUTOTUNE", "1")
    if chosen not in ("0", "1"):
        raise ValueError(
            f"TE_JAX_AUTOTUNE is {chosen!r} in the environment; it must be 0 (cuBLASLt's first suggestion) or 1 (the "
            "fastest candidate), or not be set, which is 1"
        )
    return chosen == "1"


def multiply(product: Product, arrays: Mapping[str, Array]) -> tuple[Array, ...]:
    """The product of sharded arrays.

    Args:
      product: what to compute.
      arrays: by name, all of `product.operands`.

    Returns:
      D; with `save_preactivation` the values before the activation; with `quantization` amax and the inverse of the
      scale.
    """
    return _sharded(product)(*(arrays[name] for name in product.operands))


def allowed_dtype(operand_dtype: np.dtype, wanted: np.dtype) -> np.dtype:
    """The dtype nearest to the wanted one that products of plain operands can have."""
    return wanted if wanted in (operand_dtype, _FLOAT32) else _FLOAT32


def split_followup(product: Product, *, e5m2_operand: bool) -> tuple[Followup, Followup]:
    """What of a followup te_gemm does in the same pass, and what XLA does afterwards.

    cuBLASLt sets the rules. Its epilogues know one scale for each tensor, and results of 16 and 8 bits; the bias of a
    float32 result of FP8 operands would be bfloat16; FP8 results come with bfloat16 bias and preactivation, and are
    E5M2 only if an operand is. The kernel of rows and blocks adds a bias.
    """
    wanted = product.followup
    epilogues = product.scaling in ("none", "tensor") and not product.own_kernel
    fuses_bias = product.scaling != "tensor" or product.dtype != _FLOAT32
    fuses_fp8 = (
        wanted.quantization is not None
        and epilogues
        and product.scaling == "tensor"
        and wanted.activation != "dgelu"
        and (e5m2_operand or wanted.quantization.dtype != E5M2)
        and (product.dtype == _BFLOAT16 or not wanted.save_preactivation)
    )
    if fuses_fp8:
        return wanted, Followup()
    bias = wanted.bias and fuses_bias
    activation = wanted.activation if epilogues and product.dtype != _FLOAT32 and bias == wanted.bias else None
    fused = Followup(
        bias=bias,
        activation=activation,
        save_preactivation=wanted.save_preactivation and activation is not None,
        accumulate=wanted.accumulate,
    )
    rest = Followup(
        bias=wanted.bias and not fused.bias,
        activation=wanted.activation if activation is None else None,
        save_preactivation=wanted.save_preactivation and activation is None,
        quantization=wanted.quantization,
    )
    return fused, rest


def follow_up(
    value: Array, followup: Followup, arrays: Mapping[str, Array], dtype: np.dtype, row_ndim: int, axes=None
) -> tuple[Array, ...]:
    """A followup in XLA, with the results of `multiply`; `axes` are the mesh axes that rows and cols are split over."""

    def lying_alike(name: str, wanted: bool) -> Array | None:
        return sharding.split_as_last(arrays[name], value) if wanted else None

    results = epilogue(
        value,
        bias=lying_alike("bias", followup.bias),
        activation="gelu" if followup.activation == "gelu" else None,
        save_preactivation=followup.save_preactivation,
        gelu_preactivation=lying_alike("aux_in", followup.activation == "dgelu"),
        dtype=dtype,
        out_quantization=followup.quantization,
        out_amax=arrays["amax_in"] if followup.quantization is not None else None,
        out_row_ndim=row_ndim,
        accumulator=lying_alike("accumulator", followup.accumulate),
        axis_name=axes,
    )
    if followup.quantization is None:
        return results if followup.save_preactivation else (results,)
    d, amax, *preactivation = results
    return d.data, *preactivation, amax, d.scale_inv


@functools.cache
def _sharded(product: Product):
    """The product as a function of its operands, which may be sharded in any way."""
    names = product.operands
    over_m, over_n, over_k = (product.factors(group) for group in ("m", "n", "k"))
    quantizes = product.followup.quantization is not None
    reuse = {names.index("accumulator"): _D} if "accumulator" in names else None

    @sharding.per_shard(
        _rule(product),
        axes_of=(*over_k, *over_m, *over_n) if quantizes else over_k,
        replicated=product.whole,
        sizes=_minor_sizes(product),
        reuse=reuse,
    )
    def local(*operands: Array, axes: Mapping[str, Sequence[str]], reuse: Mapping[int, int] | None = None):
        arrays = dict(zip(names, operands, strict=True))
        m_axes, n_axes, k_axes = (
            tuple(axis for factor in factors for axis in axes.get(factor, ())) for factors in (over_m, over_n, over_k)
        )
        if k_axes:
            # Only sums are exchanged: whatever follows is done once, after them, and so is an accumulator added.
            (part,) = multiply(dataclasses.replace(product, followup=Followup(), overwrite=False), arrays)
            total = lax.psum(part, k_axes)
            return follow_up(
                total,
                product.followup,
                arrays,
                product.dtype,
                total.ndim - product.b_outer_ndim,
                {"rows": m_axes, "cols": n_axes},
            )
        if axes:  # the largest magnitude is that of the whole result
            *others, amax, scale_inv = multiply(product, arrays)
            return (*others, *_largest((amax, scale_inv), m_axes + n_axes))
        if product.followup.activation and any(n % _EPILOGUE_ROW_MULTIPLE for n in _row_lengths(product, arrays)):
            part = dataclasses.replace(product, dtype=_FLOAT32, followup=Followup())  # rounded once, at the end
            (value,) = _call(part, {name: arrays[name] for name in part.operands}, in_place=False)
            return follow_up(value, product.followup, arrays, product.dtype, value.ndim - product.b_outer_ndim)
        return _call(product, arrays, in_place=bool(reuse))

    return local


def _row_lengths(product: Product, arrays: Mapping[str, Array]) -> list[int]:
    """Values in a row, as they lie in memory, of the result on this shard, of a and of b."""
    operands, columns = [], 0
    for x, summed_first, outer_ndim in (
        (arrays["a"], product.a_summed_first, product.a_outer_ndim),
        (arrays["b"], product.b_summed_first, product.b_outer_ndim),
    ):
        end = x.ndim if summed_first else x.ndim - product.summed_ndim
        columns = math.prod(x.shape[end - outer_ndim : end])
        operands.append(columns if summed_first else math.prod(x.shape[end:]))
    return [columns, *operands]


def _largest(values: Sequence[Array], axes: Sequence[str]) -> Sequence[Array]:
    """The largest of values of at least 0 over mesh axes, as bits: their order puts NaN above infinity."""
    bits = lax.pmax([lax.bitcast_convert_type(value, jnp.int32) for value in values], tuple(axes))
    return [lax.bitcast_convert_type(value, jnp.float32) for value in bits]


def _call(product: Product, arrays: Mapping[str, Array], *, in_place: bool) -> tuple[Array, ...]:
    """te_gemm, or the reference, on local arrays."""
    if not product.native:
        return (_reference_product(product, arrays),)
    if product.scaling != "none":
        padded, rows = _aligned(product, arrays)
        if padded is not arrays:
            outer_ndim = product.a_outer_ndim
            a, b = arrays["a"], arrays["b"]
            batch_ndim = a.ndim - outer_ndim - product.summed_ndim
            one = dataclasses.replace(product, a_outer_ndim=1, summed_ndim=1)
            shape = (*a.shape[: batch_ndim + outer_ndim], *b.shape[batch_ndim : batch_ndim + product.b_outer_ndim])
            return tuple(
                lax.slice_in_dim(d, 0, rows, axis=batch_ndim).reshape(shape)
                for d in _call(one, padded, in_place=in_place)
            )
    followup, a, b = product.followup, arrays["a"], arrays["b"]
    if not (in_place or followup.accumulate):
        arrays = {name: array for name, array in arrays.items() if name != "accumulator"}
    batch_ndim = a.ndim - product.a_outer_ndim - product.summed_ndim
    outer = [
        x.shape[batch_ndim:][product.summed_ndim :] if summed_first else x.shape[batch_ndim : batch_ndim + outer_ndim]
        for x, summed_first, outer_ndim in (
            (a, product.a_summed_first, product.a_outer_ndim),
            (b, product.b_summed_first, product.b_outer_ndim),
        )
    ]
    batch = a.shape[:batch_ndim]
    shape = (*batch, *outer[0], *outer[1])
    quantizes = followup.quantization is not None
    d_dtype = followup.quantization.dtype if followup.quantization is not None else product.dtype
    side_dtype = _BFLOAT16 if quantizes else product.dtype
    absent = jax.ShapeDtypeStruct((0,), jnp.float32)
    scalar = jax.ShapeDtypeStruct(batch, jnp.float32)
    results = (
        jax.ShapeDtypeStruct(shape, d_dtype),
        jax.ShapeDtypeStruct(shape, side_dtype) if followup.save_preactivation else absent,
        scalar if quantizes else absent,
        scalar if quantizes else absent,
        jax.ShapeDtypeStruct((_workspace_bytes(product),), jnp.uint8),
    )
    arrays = {
        name: x.astype(side_dtype) if name in ("bias", "aux_in") else x for name, x in arrays.items()
    }  # fmt: skip
    d, preactivation, amax, scale_inv, _ = native.call(
        "te_gemm",
        results,
        *(arrays[name] if name in arrays else jnp.zeros((0,), jnp.float32) for name in _OPERANDS),
        aliases={_ACCUMULATOR: _D} if in_place else None,
        a_outer_ndim=product.a_outer_ndim,
        b_outer_ndim=product.b_outer_ndim,
        a_summed_first=product.a_summed_first,
        b_summed_first=product.b_summed_first,
        scaling=product.scaling,
        epilogue=followup.activation or "none",
        fast_accumulation=product.fast_accumulation,
        accumulate=followup.accumulate,
        power_of_two_scale=followup.quantization is not None and followup.quantization.power_of_two_scales,
        autotune=product.autotune,
        own_kernel=product.own_kernel,
    )
    kept = (d, *((preactivation,) if followup.save_preactivation else ()))
    return (*kept, amax, scale_inv) if quantizes else kept


def _aligned(product: Product, arrays: Mapping[str, Array]) -> tuple[Mapping[str, Array], int]:
    """FP8 operands, and the rows of the result that count, padded with zeros to sizes that kernels multiply: K in
    multiples of 16, and M of 4 with blocks. What is padded has one dimension of outer rows in a, and one summed."""
    a, b = arrays["a"], arrays["b"]
    batch_ndim = a.ndim - product.a_outer_ndim - product.summed_ndim
    batch = a.shape[:batch_ndim]
    m, k = math.prod(a.shape[batch_ndim : -product.summed_ndim]), math.prod(a.shape[-product.summed_ndim :])
    multiple = _BLOCK_ROW_MULTIPLE if product.scaling == "block" else 1
    # Not -k % 16: of that, symbolic sizes of jax.export do not know that the sum is a multiple.
    more_m, more_k = (-(-size // n) * n - size for size, n in ((m, multiple), (k, FP8_ALIGNMENT)))
    if not (more_m or more_k):
        return arrays, m

    def padded(x: Array, *paddings: int) -> Array:
        return jnp.pad(x, ((0, 0),) * (x.ndim - len(paddings)) + tuple((0, padding) for padding in paddings))

    padded_arrays = dict(arrays)
    padded_arrays["a"] = padded(a.reshape(*batch, m, k), more_m, more_k)
    padded_arrays["b"] = padded(b.reshape(*b.shape[: -product.summed_ndim], k), more_k)
    a_scale_inv = arrays["a_scale_inv"]
    if product.scaling == "block":
        blocks = a_scale_inv.shape[batch_ndim : a_scale_inv.ndim - product.a_outer_ndim]
        padded_arrays["a_scale_inv"] = padded(a_scale_inv.reshape(*batch, math.prod(blocks), m), more_m)
        b_scale_inv = arrays["b_scale_inv"]
        own = b_scale_inv.shape[: b_scale_inv.ndim - product.summed_ndim]
        padded_arrays["b_scale_inv"] = b_scale_inv.reshape(*own, math.prod(blocks))
    elif product.scaling == "row":
        padded_arrays["a_scale_inv"] = a_scale_inv.reshape(*batch, m)
    if "accumulator" in arrays:
        own = arrays["accumulator"].shape[batch_ndim + product.a_outer_ndim :]
        accumulator = arrays["accumulator"].reshape(*batch, m, *own)
        padded_arrays["accumulator"] = padded(accumulator, more_m, *(0,) * len(own))
    return padded_arrays, m


def _reference_product(product: Product, arrays: Mapping[str, Array]) -> Array:
    a, b = arrays["a"], arrays["b"]
    batch_ndim = a.ndim - product.a_outer_ndim - product.summed_ndim
    if product.scaling != "none":
        a = _dequantized(product, a, arrays["a_scale_inv"], product.a_outer_ndim, "block_1x128")
        b = _dequantized(product, b, arrays["b_scale_inv"], product.b_outer_ndim, "block_128x128")

    def summed(x: Array, summed_first: bool) -> tuple[int, ...]:
        first = batch_ndim if summed_first else x.ndim - product.summed_ndim
        return tuple(range(first, first + product.summed_ndim))

    batch = tuple(range(batch_ndim))
    contracting = summed(a, product.a_summed_first), summed(b, product.b_summed_first)
    return lax.dot_general(
        a,
        b,
        (contracting, (batch, batch)),
        precision=lax.Precision.HIGHEST if a.dtype == product.dtype else None,
        preferred_element_type=product.dtype,
    )


def _dequantized(product: Product, data: Array, scale_inv: Array, outer_ndim: int, block: BlockScaling) -> Array:
    scaling = block if product.scaling == "block" else "row" if product.scaling == "row" else "tensor"
    float32 = np.dtype(np.float32)
    quantized = QuantizedArray(data, scale_inv, None, None, outer_ndim, product.summed_ndim, scaling, scaling, float32)
    return quantized.dequantize()


def _workspace_bytes(product: Product) -> int:
    if not native.has_gpu():
        return 0
    return 0 if product.scaling == "block" or product.own_kernel else _CUBLASLT_WORKSPACE_BYTES


# The sharding rule. Dimensions of FP8 operands are split where every shard has whole blocks, and multiples of what
# kernels can address; a compound factor of the last dimension of a group says so.


def _granularity(scaling: Scaling) -> dict[Group, int]:
    """Multiples of which a shard must have, by group."""
    if scaling == "none":
        return {}
    return {"n": BLOCK, "k": BLOCK} if scaling == "block" else {"n": FP8_ALIGNMENT}


def factors_kept_whole(scaling: Scaling, sizes: Mapping[Group, tuple[int, ...]]) -> tuple[str, ...]:
    """Factors of groups whose last dimension is no multiple of what a shard must have, but their product is.

    The last one itself is kept whole by its compound factor.

    Args:
      scaling: of both operands.
      sizes: of the dimensions, by group.
    """
    return tuple(
        f"{group}{i}"
        for group, granularity in _granularity(scaling).items()
        for i in range(len(sizes[group]) - 1)
        if sizes[group][-1] % granularity
    )


def _minor_sizes(product: Product) -> dict[str, int]:
    granularity = _granularity(product.scaling)
    return {f"{group}_": size for group, size in granularity.items() if product.factors(group)}


def _rule(product: Product) -> str:
    granularity = _granularity(product.scaling)

    def dimensions(group: Group) -> str:
        factors = list(product.factors(group))
        if factors and group in granularity:
            factors[-1] = f"({factors[-1]} {group}_)"
        return " ".join(factors)

    def blocks(group: Group) -> str:
        return " ".join(product.factors(group))

    m, n, k = dimensions("m"), dimensions("n"), dimensions("k")
    scales = {
        "tensor": ("", ""),
        "row": (m, n),
        "block": (f"{blocks('k')} {m}", f"{blocks('n')} {blocks('k')}"),
    }.get(product.scaling, ("", ""))
    terms = {
        "a": f"{k} {m}" if product.a_summed_first else f"{m} {k}",
        "b": f"{k} {n}" if product.b_summed_first else f"{n} {k}",
        "a_scale_inv": scales[0],
        "b_scale_inv": scales[1],
        "bias": n,
        "accumulator": f"{m} {n}",
        "aux_in": f"{m} {n}",
        "amax_in": "",
    }
    followup = product.followup
    results = [f"{m} {n}"]
    results += [f"{m} {n}"] if followup.save_preactivation else []
    results += ["", ""] if followup.quantization is not None else []
    operands = ", ".join(f"... {terms[name]}" for name in product.operands)
    return f"{operands} -> {', '.join(f'... {term}' for term in results)}"
