"""Quantization of rows that are gathered, such as tokens sorted by expert, without a derivative of its own.

With block scaling one native kernel gathers and quantizes: the rows never lie in memory in their own dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from te_jax import native, sharding
from te_jax._core.types import BLOCK
from te_jax.ops._quantize_kernels import (
    Kernels,
    Request,
    Result,
    block_attributes,
    quantized_array,
    shared_facts,
    terms,
)
from te_jax.ops.quantize import quantize_requested
from te_jax.quantized import QuantizedArray
from te_jax.recipe import Quantization
from te_jax.reference.quantize import Copies, blocked_groups


# Under jit even when called eagerly: sharded operands are then partitioned rather than gathered.
@functools.partial(jax.jit, static_argnums=(2, 3, 4), inline=sharding.INLINE)
def quantize_rows(
    x: Array, rows: Array, quantization: Quantization, copies: Copies, use_native: bool
) -> QuantizedArray:
    """`ops.quantize` of x[rows], bit for bit, with zeros for rows that x does not have.

    Args:
      x: [count, cols], float32, bfloat16 or float16.
      rows: int32 [num_rows]; those outside of [0, count) are zeros.
      quantization, copies: see `ops.quantize`.
      use_native: whether to run the native kernels; x and rows then have elements.
    """
    x = lax.stop_gradient(x)
    request = Request(quantization, 1, copies, (), (), with_amax=False, with_dbias=False)
    if not (use_native and shared_facts(request).in_blocks):
        return quantize_requested(_gathered(x, rows), None, request, use_native).array
    results, kernel = _kernel(request)
    arrays = iter(kernel(x, rows))
    return quantized_array(x, [None if result is None else next(arrays) for result in results.values()], request)


def _gathered(x: Array, rows: Array) -> Array:
    if x.shape[0] == 0:
        return jnp.zeros((*rows.shape, *x.shape[1:]), x.dtype)
    taken = x.at[jnp.clip(rows, 0, x.shape[0] - 1)].get(mode="promise_in_bounds")
    return jnp.where(((rows >= 0) & (rows < x.shape[0]))[:, None], taken, jnp.zeros((), x.dtype))


@functools.cache
def _kernel(request: Request) -> tuple[dict[str, Result | None], Callable[..., tuple[Array, ...]]]:
    """The results of te_quantize_blocks_of_rows, None for those that are not asked for; and the target as a function of
    arrays that may be sharded over their columns, which returns the others."""
    kernels = Kernels(request, 2, blocked_groups(request.quantization, request.copies))
    results = kernels.blocks
    wanted = {name: result for name, result in results.items() if result is not None}
    table = (("t",), *kernels.cols)

    @sharding.per_shard(
        f"{terms([table, kernels.rows])} -> {terms([result.dimensions for result in wanted.values()])}",
        replicated=("t", kernels.rows[0][0]),
        sizes={minor: BLOCK for dimension in kernels.x for minor in dimension[1:]},
    )
    def kernel(x: Array, rows: Array, *, axes: object) -> tuple[Array, ...]:
        del axes
        batch = x.shape[:-2]
        sizes = dict(zip(kernels.x, (rows.shape[-1], x.shape[-1]), strict=True))
        sizes |= {dimension[:1]: -(-size // BLOCK) for dimension, size in sizes.items() if len(dimension) > 1}
        # Tiles that read the same rows of x, such as those of experts, one after another: a cache then has them.
        order = jnp.argsort(rows[..., ::BLOCK], axis=-1).astype(jnp.int32)
        types = {
            name: jax.ShapeDtypeStruct((*batch, *(sizes[d] for d in result.dimensions)), result.dtype)
            for name, result in wanted.items()
        }
        operands = {"x": x, "rows": rows, "order": order}
        attributes: dict[str, Any] = block_attributes(request.quantization)
        target = "te_quantize_blocks_of_rows"
        return tuple(native.call(target, types, operands, batch_ndim=len(batch), **attributes))

    return results, kernel
