"""Collective matmul by plain collectives: gather, then multiply; multiply, then reduce-scatter. Nothing overlaps."""

from __future__ import annotations

from jax import Array, lax

from te_jax.parallel._collective.call import CollectiveSpec
from te_jax.parallel.transports.exchange import GemmOperand, all_gather, multiply, sum_of_products, with_bias


def all_gather_gemm(
    spec: CollectiveSpec,
    x: GemmOperand,
    kernels: tuple[GemmOperand, ...],
    biases: tuple[Array | None, ...],
    extras: tuple[Array, ...],
    keep_gathered: bool,
) -> tuple[tuple[Array, ...], Array | None, tuple[Array, ...]]:
    """See `te_jax.parallel.transports.exchange.Transport`."""

    def gathered(x: Array, axis: int) -> Array:
        return all_gather(x, spec.axis_name, axis=axis, tiled=True)

    whole = x.map(lambda data: gathered(data, 1), lambda scales: gathered(scales, scales.ndim - 1))
    products = tuple(multiply(spec, whole, kernel, bias=bias) for kernel, bias in zip(kernels, biases, strict=True))
    return products, whole.data if keep_gathered else None, tuple(all_gather(extra, spec.axis_name) for extra in extras)


def gemm_reduce_scatter(
    spec: CollectiveSpec, xs: tuple[GemmOperand, ...], kernels: tuple[GemmOperand, ...], bias: Array | None
) -> Array:
    """See `te_jax.parallel.transports.exchange.Transport`.

    The collective adds up in the output dtype, as is customary and as XLA's own rewrites do: over D devices a sum in
    bfloat16 is rounded up to D-1 times. The other transports round partial sums once, and add them in float32.
    """
    partial = sum_of_products(spec, tuple(x.merged(1) for x in xs), kernels)
    z = lax.psum_scatter(partial, spec.axis_name, scatter_dimension=1, tiled=True)
    return with_bias(z, bias, spec.out_dtype)
