"""The logits of a router: a product in float32, of which a GPU's tensor cores compute three in bfloat16."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

from te_jax import sharding


def router_logits(x: Array, kernel: Array, bias: jax.typing.ArrayLike | None = None) -> Array:
    """x · kernel + bias in float32. Its part of the gradient of x is rounded to the dtype of x.

    Args:
      x: [*tokens, in], float32, bfloat16 or float16; the residual is x in its own dtype.
      kernel: float32 [in, experts].
      bias: [experts], or None.

    Returns:
      float32 [*tokens, experts].
    """
    logits = _product(*sharding.varying_together((x, kernel)))
    if bias is None:
        return logits
    return logits + lax.expand_dims(jnp.asarray(bias).astype(jnp.float32), range(logits.ndim - 1))


@jax.custom_vjp
def _product(x: Array, kernel: Array) -> Array:
    """x [*tokens, in] · kernel [in, experts], float32 like the kernel. Keeps x in its own dtype."""
    if x.dtype != jnp.bfloat16:
        return _plain_product(x, kernel)
    return lax.platform_dependent(x, kernel, cuda=_product_in_parts, default=_plain_product)


def _product_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product(x, kernel), (x, kernel)


def _product_backward(kept: tuple[Array, Array], dlogits: Array) -> tuple[Array, Array]:
    x, kernel = kept
    if x.dtype != jnp.bfloat16:
        return _plain_gradients(x, kernel, dlogits)
    return lax.platform_dependent(x, kernel, dlogits, cuda=_gradients_in_parts, default=_plain_gradients)


_product.defvjp(_product_forward, _product_backward)


def _plain_product(x: Array, kernel: Array) -> Array:
    return jnp.matmul(x.astype(jnp.float32), kernel, precision=lax.Precision.HIGHEST)


def _plain_gradients(x: Array, kernel: Array, dlogits: Array) -> tuple[Array, Array]:
    return jax.vjp(_plain_product, x, kernel)[1](dlogits)


def _product_in_parts(x: Array, kernel: Array) -> Array:
    """`_plain_product` of an x in bfloat16, by one GEMM in bfloat16 with three times the columns: GPUs have no tensor
    cores for float32."""
    return jnp.sum(_dot(x, _parts(kernel), ((x.ndim - 1,), (1,))), axis=-2)


def _gradients_in_parts(x: Array, kernel: Array, dlogits: Array) -> tuple[Array, Array]:
    d, k = _parts(dlogits), _parts(kernel)
    tokens = range(x.ndim - 1)
    dkernel = jnp.sum(_dot(x, d, (tokens, [1 + i for i in tokens])), axis=1)
    # What is left out is below the rounding to bfloat16.
    gradients, kernels = (jnp.concatenate(parts, axis=-1) for parts in ((d[0], d[1], d[0]), (k[0], k[0], k[1])))
    dx = _dot(gradients, kernels, ((x.ndim - 1,), (1,)))
    return dx.astype(x.dtype), dkernel


def _parts(x: Array) -> Array:
    """[3, *x.shape] in bfloat16, whose sum is x in float32."""
    parts = []
    for _ in range(3):
        part = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)  # XLA may leave out a pair of conversions
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return jnp.stack(parts)


def _dot(a: Array, b: Array, contracted: tuple[Sequence[int], Sequence[int]]) -> Array:
    return lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=jnp.float32)
