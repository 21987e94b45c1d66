"""The GEMM of sharded operands: its static description, how it is split, and the call of te_gemm on each shard."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from te_jax import native, reference, sharding
from te_jax._core.platforms import by_platform
from te_jax._core.types import FP8, FP8_ALIGNMENT, MX_BLOCK
from te_jax.quantized import Facts, one_copy
from te_jax.reference.gemm import epilogue

Algorithm = Literal["auto", "cublaslt", "te_jax"]
Group = Literal["m", "n", "k"]
"""The outer dimensions of lhs and of rhs, and those summed over."""

_OPERANDS = ("a", "b", "a_scale_inv", "b_scale_inv", "bias", "accumulator")
_FLOAT32 = np.dtype(jnp.float32)

FEW_ROWS = 8
"""Products of blocks with no more rows have a kernel that takes any number of them."""

_CUBLASLT_WORKSPACE_BYTES = 32 * 2**20 + 512
"""32 MiB aligned to 256 bytes, and before them 256 bytes for scalars."""

_GELU_ROW_MULTIPLE = 8
"""cuBLASLt's gelu needs rows of a multiple of 16 bytes: of D, for it has no algorithm for others, and of a and b, for
there it rounded the product before it added the bias. FP8 operands are padded to it."""

_CAN_NAME_ALGORITHM = jax.__version_info__ < (0, 12)
"""Where a product names its algorithm, XLA for CUDA multiplies FP8 with cuBLASLt. Elsewhere it also compiles about
twenty Triton kernels for each product, to time them: minutes for a model. Later versions of jax cannot hand XLA for
CUDA an algorithm of E4M3: "Failed to serialize StableHLO to plugin version"."""

_SMALLEST_WITH_ALGORITHM = 256
"""XLA knows no algorithm for a product with a vector, and a mesh may leave one row of few."""


@dataclasses.dataclass(frozen=True)
class GemmSpec:
    """A GEMM of a [*outer, *summed] and b [*outer, *summed] without its arrays: hashable, so that it is traced once.

    Attributes:
      a_outer_ndim, b_outer_ndim, summed_ndim: numbers of outer and of summed dimensions.
      a_summed_first, b_summed_first: whether the summed dimensions come before the outer ones.
      scaling: the facts of the scaling of a.
      dtype: of the result.
      product_dtype: of the bare product: `dtype` where te_gemm can write it, else float32, which XLA rounds.
      implementation: "native" for te_gemm, "xla" for XLA's product of FP8, else the reference.
      bias: whether one is added.
      activation, save_preactivation, fast_accumulation: see `te_jax.ops.gemm`.
      accumulator: "add" for one that is added, "overwrite" for one whose buffer the result may take.
      algorithm: as `algorithm_for` returns it.
      whole: factors of the sharding rule that must not be split: te_gemm could not multiply the shards.
    """

    a_outer_ndim: int
    b_outer_ndim: int
    summed_ndim: int
    a_summed_first: bool
    b_summed_first: bool
    scaling: Facts
    dtype: np.dtype
    product_dtype: np.dtype
    implementation: native.Implementation
    bias: bool
    activation: Literal["gelu"] | None
    save_preactivation: bool
    accumulator: Literal["add", "overwrite"] | None
    fast_accumulation: bool
    algorithm: Algorithm
    whole: tuple[str, ...]

    @property
    def native(self) -> bool:
        return self.implementation == "native"

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the arrays, in order."""
        absent = {
            "a_scale_inv": self.scaling.is_plain,
            "b_scale_inv": self.scaling.is_plain,
            "bias": not self.bias,
            "accumulator": self.accumulator is None,
        }
        return tuple(name for name in _OPERANDS if not absent.get(name, False))

    def factors(self, group: Group) -> tuple[str, ...]:
        """Names of the dimensions of a group that may be split, as sharding rules know them."""
        ndim = {"m": self.a_outer_ndim, "n": self.b_outer_ndim, "k": self.summed_ndim}[group]
        return tuple(f"{group}{i}" for i in range(ndim))

    def bare(self, dtype: np.dtype) -> GemmSpec:
        """The product alone."""
        return dataclasses.replace(
            self, dtype=dtype, bias=False, activation=None, save_preactivation=False, accumulator=None
        )

    def in_one_pass(self, arrays: Mapping[str, Array]) -> GemmSpec:
        """As much of this GEMM as te_gemm computes in one pass.

        cuBLASLt sets the rules: gelu comes with one scale for each tensor, 16-bit results and aligned rows; the bias of
        a float32 result of FP8 tensors would be bfloat16. The package's kernel adds a bias and has no gelu.
        """
        if self.product_dtype != self.dtype:
            return self.bare(self.product_dtype)
        by_cublaslt = self.algorithm != "te_jax" and not self.scaling.has_several_scales
        gelu = self.activation is not None and by_cublaslt and self.dtype != _FLOAT32
        if gelu and self.scaling.is_plain and any(n % _GELU_ROW_MULTIPLE for n in _row_lengths(self, arrays)):
            return self.bare(_FLOAT32)  # rounded once, at the end
        return dataclasses.replace(
            self,
            bias=self.bias and not (self.scaling.by_tensor and self.dtype == _FLOAT32),
            activation="gelu" if gelu else None,
            save_preactivation=self.save_preactivation and gelu,
        )


def algorithm_for(algorithm: Algorithm, scaling: Facts) -> Algorithm:
    """The algorithm that te_gemm is told: blocks have but one, and "auto" is "cublaslt" with TE_JAX_AUTOTUNE=0.

    That is the default of several processes. Each would time candidates for itself, and where two choose differently,
    arrays that are replicated over them differ.

    Raises:
      ValueError: TE_JAX_AUTOTUNE is neither 0 nor 1.
    """
    if algorithm == "auto":
        # Only distributed programs have several, and others need no backend to start here.
        several = jax.distributed.is_initialized() and jax.process_count() > 1
        chosen = os.environ.get("TE_JAX_AUTOTUNE", "0" if several else "1")
        if chosen not in ("0", "1"):
            raise ValueError(
                f"TE_JAX_AUTOTUNE is {chosen!r} in the environment; it must be 0 (cuBLASLt's first suggestion) or 1 "
                "(the fastest candidate), or not be set, which is 1 in one process and 0 in several"
            )
        algorithm = "auto" if chosen == "1" else "cublaslt"
    return "te_jax" if scaling.native_blocks else algorithm


def allowed_dtype(operand_dtype: np.dtype, wanted: np.dtype) -> np.dtype:
    """The dtype nearest to the wanted one that native products of such operands, FP8 or plain, can have."""
    if operand_dtype in FP8:
        return wanted if native.takes(wanted) else _FLOAT32
    return wanted if wanted in (operand_dtype, _FLOAT32) else _FLOAT32


def sharded_gemm(spec: GemmSpec, arrays: Mapping[str, Array]) -> tuple[Array, ...]:
    """D and, with `save_preactivation`, the values before the activation.

    Args:
      spec: what to compute.
      arrays: by name, all of `spec.operands`, sharded in any way.
    """
    return _per_shard(spec)(*(arrays[name] for name in spec.operands))


@functools.cache
def _per_shard(spec: GemmSpec) -> Callable[..., tuple[Array, ...]]:
    names, over_k = spec.operands, spec.factors("k")
    in_place = spec.native and spec.accumulator is not None and spec.product_dtype == spec.dtype

    @sharding.per_shard(
        rule_of(spec),
        axes_of=over_k,
        replicated=spec.whole,
        sizes={f"{group}_": size for group, size in shard_multiples(spec.scaling).items() if spec.factors(group)},
        reuse={names.index("accumulator"): 0} if in_place else None,
    )
    def local(*operands: Array, axes: Mapping[str, Sequence[str]], reuse: Mapping[int, int] | None = None):
        arrays = dict(zip(names, operands, strict=True))
        k_axes = tuple(axis for factor in over_k for axis in axes.get(factor, ()))
        if k_axes:  # only sums are exchanged: what follows is done once, after them
            done = spec.bare(spec.product_dtype)
            (part,) = sharded_gemm(done, arrays)
            return _followed_up(spec, done, (lax.psum(part, k_axes),), arrays)
        if not spec.native:
            return gemm_by_xla(spec, arrays)
        done = spec.in_one_pass(arrays)
        return _followed_up(spec, done, _te_gemm(done, arrays, in_place=bool(reuse)), arrays)

    return local


def _followed_up(
    spec: GemmSpec, done: GemmSpec, results: tuple[Array, ...], arrays: Mapping[str, Array]
) -> tuple[Array, ...]:
    """The results of a GEMM from those of a part of it; XLA computes the rest."""
    if done == spec:
        return results

    def follow(value: Array, arrays: Mapping[str, Array]) -> tuple[Array, ...]:
        return epilogue(
            value,
            bias=arrays["bias"] if spec.bias and not done.bias else None,
            activation=spec.activation,
            save_preactivation=spec.save_preactivation,
            dtype=spec.dtype,
            accumulator=arrays["accumulator"] if spec.accumulator == "add" else None,
        )

    return _over_batch(spec, arrays, follow)(*results, arrays)


def gemm_by_xla(spec: GemmSpec, arrays: Mapping[str, Array]) -> tuple[Array, ...]:
    """The results of `sharded_gemm` on local arrays, by the product of FP8 that XLA has or by the reference."""
    if spec.implementation == "xla":
        multiply = _scaled_matmul if spec.scaling.in_blocks else _fp8_dot
        return multiply(spec, arrays)

    def reference_of(arrays: Mapping[str, Array]) -> tuple[Array, ...]:
        lhs, rhs = arrays["a"], arrays["b"]
        if not spec.scaling.is_plain:
            lhs = one_copy(lhs, arrays["a_scale_inv"], spec.scaling, spec.a_outer_ndim, spec.summed_ndim)
            rhs = one_copy(rhs, arrays["b_scale_inv"], spec.scaling.rhs, spec.b_outer_ndim, spec.summed_ndim)
        result = reference.gemm(
            lhs,
            rhs,
            lhs_contracting="rows" if spec.a_summed_first else "cols",
            rhs_contracting="rows" if spec.b_summed_first else "cols",
            contracting_ndim=spec.summed_ndim,
            bias=arrays.get("bias"),
            activation=spec.activation,
            save_preactivation=spec.save_preactivation,
            out_dtype=spec.dtype,
            accumulator=arrays.get("accumulator"),
        )
        return result if isinstance(result, tuple) else (result,)

    return _over_batch(spec, arrays, reference_of)({name: arrays[name] for name in spec.operands})


def _fp8_dot(spec: GemmSpec, arrays: Mapping[str, Array]) -> tuple[Array, ...]:
    """A product of FP8 with one scale for each operand, in the form that becomes cuBLASLt's or Triton's FP8 product.

    The scales follow the product. Before it, XLA may take operands for floats that it fuses with a float32 product.
    """
    a_summed, b_summed = (
        tuple(range(ndim, ndim + spec.summed_ndim)) for ndim in (spec.a_outer_ndim, spec.b_outer_ndim)
    )
    sizes = (math.prod(group) for name in ("a", "b") for group in _groups(spec, name, arrays)[1:])
    # For FP8 both forms say whether sums may stay in the tensor cores.
    if _CAN_NAME_ALGORITHM and min(sizes) >= _SMALLEST_WITH_ALGORITHM:
        fast, exact = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM, lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32
    else:
        fast, exact = lax.Precision.DEFAULT, lax.Precision.HIGHEST

    def dot(a: Array, b: Array, precision: lax.PrecisionLike | lax.DotAlgorithmPreset = None) -> tuple[Array]:
        contracted = (a_summed, b_summed), ((), ())
        return (lax.dot_general(a, b, contracted, precision, preferred_element_type=_sum_dtype(spec)),)

    on_cuda = functools.partial(dot, precision=fast if spec.fast_accumulation else exact)

    def multiply(arrays: Mapping[str, Array]) -> Array:
        (value,) = by_platform((arrays["a"], arrays["b"]), cuda=on_cuda, default=dot)
        return value.astype(jnp.float32) * arrays["a_scale_inv"] * arrays["b_scale_inv"]

    operands = {name: arrays[name] for name in ("a", "b", "a_scale_inv", "b_scale_inv")}
    return _followed_up(spec, spec.bare(_FLOAT32), (_over_batch(spec, arrays, multiply)(operands),), arrays)


def _scaled_matmul(spec: GemmSpec, arrays: Mapping[str, Array]) -> tuple[Array, ...]:
    """A product of MXFP8: on a GPU in the form that becomes cuDNN's block-scaled product, which no CPU compiles."""
    batch, a_outer, summed = _groups(spec, "a", arrays)
    depth, b_outer = math.prod(summed), _groups(spec, "b", arrays)[1]

    def matrices(name: str, outer: tuple[int, ...]) -> tuple[Array, Array]:
        shape = math.prod(batch), math.prod(outer)
        data, scales = arrays[name].reshape(*shape, depth), arrays[f"{name}_scale_inv"].reshape(*shape, -1)
        return jnp.pad(data, [(0, 0), (0, 0), (0, -depth % MX_BLOCK)]), scales

    (a, a_scales), (b, b_scales) = matrices("a", a_outer), matrices("b", b_outer)
    if native.compute_capability() is None:
        over_cols = ((2,), (2,)), ((0,), (0,))
        value = lax.scaled_dot(
            a, b, lhs_scale=a_scales, rhs_scale=b_scales, dimension_numbers=over_cols, preferred_element_type=_FLOAT32
        )
    else:
        value = jax.nn.scaled_matmul(a, b, a_scales, b_scales, preferred_element_type=_sum_dtype(spec))
    # JAX takes either result for one that is the same on all devices (0.10.2).
    value = sharding.varying_over(value.reshape(*batch, *a_outer, *b_outer), sharding.varying_axes(a, b))
    return _followed_up(spec, spec.bare(_FLOAT32), (value,), arrays)


def _sum_dtype(spec: GemmSpec) -> jax.typing.DTypeLike:
    """The dtype of a product by XLA. Sums without scales, and operands with them, are beyond the range of float16."""
    return jnp.bfloat16 if spec.dtype == jnp.bfloat16 else jnp.float32


def _over_batch(spec: GemmSpec, arrays: Mapping[str, Array], function: Callable) -> Callable:
    """The function of one GEMM's arrays, for arrays with the leading dimensions that vmap adds."""
    for _ in range(arrays["a"].ndim - spec.a_outer_ndim - spec.summed_ndim):
        function = jax.vmap(function)
    return function


def _te_gemm(spec: GemmSpec, arrays: Mapping[str, Array], *, in_place: bool) -> tuple[Array, ...]:
    """te_gemm on local arrays; `in_place` writes the result over the accumulator."""
    if not spec.scaling.is_plain and (aligned := _aligned(spec, arrays)):
        (batch, a_outer, _), b_outer = _groups(spec, "a", arrays), _groups(spec, "b", arrays)[1]
        ends = *batch, math.prod(a_outer), math.prod(b_outer)
        return tuple(
            lax.slice(d, (0,) * d.ndim, ends).reshape(*batch, *a_outer, *b_outer)
            for d in _te_gemm(*aligned, in_place=in_place)
        )
    batch, a_outer, _ = _groups(spec, "a", arrays)
    d = jax.ShapeDtypeStruct((*batch, *a_outer, *_groups(spec, "b", arrays)[1]), spec.dtype)
    needs_workspace = native.has_gpu() and spec.algorithm != "te_jax"
    workspace = jax.ShapeDtypeStruct((_CUBLASLT_WORKSPACE_BYTES if needs_workspace else 0,), jnp.uint8)
    operands = {name: arrays[name] for name in spec.operands}
    if spec.bias:
        operands["bias"] = operands["bias"].astype(spec.dtype)
    if spec.accumulator == "overwrite" and not in_place:
        del operands["accumulator"]
    results = {"d": d} | ({"preactivation": d} if spec.save_preactivation else {})
    *arrays_of_d, _ = native.call(
        "te_gemm",
        results | {"workspace": workspace},
        operands,
        aliases={"accumulator": "d"} if in_place else None,
        a_outer_ndim=spec.a_outer_ndim,
        b_outer_ndim=spec.b_outer_ndim,
        a_summed_first=spec.a_summed_first,
        b_summed_first=spec.b_summed_first,
        scaling=spec.scaling.product,
        gelu=spec.activation == "gelu",
        accumulate=spec.accumulator == "add",
        fast_accumulation=spec.fast_accumulation,
        algorithm=spec.algorithm,
    )
    return tuple(arrays_of_d)


def _aligned(spec: GemmSpec, arrays: Mapping[str, Array]) -> tuple[GemmSpec, dict[str, Array]] | None:
    """The same FP8 GEMM of matrices, with zeros appended to M, N and K; None where kernels take the sizes as they are.

    They need N and K in multiples of 16, and with blocks an M of more than 8 in multiples of 4.
    """
    batch, a_outer, summed = _groups(spec, "a", arrays)
    b_outer = _groups(spec, "b", arrays)[1]
    m, n, k = (math.prod(sizes) for sizes in (a_outer, b_outer, summed))
    # Not -k % 16: of that, symbolic sizes of jax.export do not know that the sum is a multiple.
    few_rows = isinstance(m, int) and m <= FEW_ROWS
    steps = (m, 1 if few_rows else spec.scaling.row_multiple), (n, FP8_ALIGNMENT), (k, FP8_ALIGNMENT)
    more_m, more_n, more_k = (-(-size // step) * step - size for size, step in steps)
    if not (more_m or more_n or more_k):
        return None
    # Sizes, and how many zeros follow. They begin no block of scales of b, which has 128 of N, or 1.
    rows, cols, depth = (m, more_m), (n, more_n), (k, more_k)
    dimensions = {"a": (rows, depth), "b": (cols, depth), "bias": (cols,), "accumulator": (rows, cols)}
    if spec.scaling.has_several_scales:
        k_blocks, n_blocks = (
            (math.prod(sizes[:-1]) * -(-sizes[-1] // (block or 1)), 0)
            for sizes, block in ((summed, spec.scaling.summed_block), (b_outer, spec.scaling.rhs.outer_block))
        )
        dimensions["a_scale_inv"] = spec.scaling.of_scales((rows,), (k_blocks,))
        outer = cols if spec.scaling.rhs.outer_block == 1 else n_blocks
        dimensions["b_scale_inv"] = spec.scaling.rhs.of_scales((outer,), (k_blocks,))

    def padded(x: Array, sizes: tuple[tuple[int, int], ...]) -> Array:
        matrix = x.reshape(*batch, *(size for size, _ in sizes))
        return jnp.pad(matrix, [(0, 0)] * len(batch) + [(0, more) for _, more in sizes])

    matrices = dataclasses.replace(spec, a_outer_ndim=1, b_outer_ndim=1, summed_ndim=1)
    return matrices, dict(arrays) | {
        name: padded(arrays[name], dimensions[name]) for name in spec.operands if name in dimensions
    }


def _groups(spec: GemmSpec, name: Literal["a", "b"], arrays: Mapping[str, Array]) -> tuple[tuple[int, ...], ...]:
    """Sizes of the batch, outer and summed dimensions of a local operand."""
    shape = arrays[name].shape
    outer_ndim, summed_first = (
        (spec.a_outer_ndim, spec.a_summed_first) if name == "a" else (spec.b_outer_ndim, spec.b_summed_first)
    )
    first = len(shape) - outer_ndim - spec.summed_ndim
    second = first + (spec.summed_ndim if summed_first else outer_ndim)
    groups = shape[first:second], shape[second:]
    return shape[:first], *(groups[::-1] if summed_first else groups)


def _row_lengths(spec: GemmSpec, arrays: Mapping[str, Array]) -> list[int]:
    """Values in a row, as they lie in memory, of D on this shard, of a and of b."""
    _, a_outer, summed = _groups(spec, "a", arrays)
    _, b_outer, _ = _groups(spec, "b", arrays)
    rows = b_outer, a_outer if spec.a_summed_first else summed, b_outer if spec.b_summed_first else summed
    return [math.prod(row) for row in rows]


# The sharding rule. Dimensions of FP8 operands are split where every shard has whole blocks, and multiples of what
# kernels can address; a compound factor of the last dimension of a group says so.


def shard_multiples(scaling: Facts) -> dict[Group, int]:
    """Multiples of which a shard must have, by group."""
    if scaling.is_plain:
        return {}
    of_k: dict[Group, int] = {} if scaling.summed_block is None else {"k": scaling.summed_block}
    return {"n": max(FP8_ALIGNMENT, scaling.rhs.outer_block or 1), **of_k}


def factors_kept_whole(scaling: Facts, sizes: Mapping[Group, tuple[int, ...]]) -> tuple[str, ...]:
    """Factors of groups whose last dimension is no multiple of what a shard must have, but their product is.

    The last one itself is kept whole by its compound factor.

    Args:
      scaling: the facts of the scaling of lhs.
      sizes: of the dimensions, by group.
    """
    return tuple(
        f"{group}{i}"
        for group, multiple in shard_multiples(scaling).items()
        for i in range(len(sizes[group]) - 1)
        if sizes[group][-1] % multiple
    )


def rule_of(spec: GemmSpec) -> str:
    multiples = shard_multiples(spec.scaling)

    def dimensions(group: Group) -> str:
        factors = list(spec.factors(group))
        if factors and group in multiples:
            factors[-1] = f"({factors[-1]} {group}_)"
        return " ".join(factors)

    def blocks(group: Group) -> str:
        return " ".join(spec.factors(group))

    m, n, k = dimensions("m"), dimensions("n"), dimensions("k")
    b_scales = n if spec.scaling.rhs.outer_block == 1 else blocks("n")
    terms = {
        "a": f"{k} {m}" if spec.a_summed_first else f"{m} {k}",
        "b": f"{k} {n}" if spec.b_summed_first else f"{n} {k}",
        "a_scale_inv": " ".join(spec.scaling.of_scales((m,), (blocks("k"),))),
        "b_scale_inv": " ".join(spec.scaling.rhs.of_scales((b_scales,), (blocks("k"),))),
        "bias": n,
        "accumulator": f"{m} {n}",
    }
    operands = ", ".join(f"... {terms[name]}" for name in spec.operands)
    return f"{operands} -> {', '.join([f'... {m} {n}'] * (1 + spec.save_preactivation))}"
