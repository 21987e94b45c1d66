"""Flax's own FP8, `Fp8DirectDotGeneralOp`: delayed scaling in a form that XLA turns into FP8 products."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen import fp8_ops

_COLLECTION = fp8_ops.OVERWRITE_WITH_GRADIENT


def product(x: jax.Array, kernel: jax.Array, state: Any) -> jax.Array:
    """x [..., in] · kernel [in, out], of one dtype. The gradient of `state` is the next state."""
    dimensions = (((x.ndim - 1,), (0,)), ((), ()))
    op: Any = fp8_ops.Fp8DirectDotGeneralOp()
    return op.apply({_COLLECTION: state}, x, kernel, dimensions)


class _Layer(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        op: Any = fp8_ops.Fp8DirectDotGeneralOp(name="op")
        return op(x, kernel, (((1,), (0,)), ((), ())))


def first_state() -> dict[str, jax.Array]:
    """What the op knows before the first step: nothing."""
    tiny = jnp.zeros((16, 16), jnp.bfloat16)
    made: Any = _Layer().init(jax.random.key(0), tiny, tiny)[_COLLECTION]
    return dict(made["op"])


def state(x: float, kernel: float, gradient: float) -> dict[str, jax.Array]:
    """What the op knows after many steps on values up to these magnitudes."""
    found = first_state()
    limits = {"input": (x, 448.0), "kernel": (kernel, 448.0), "output_grad": (gradient, 57344.0)}
    for name, (largest, limit) in limits.items():
        found[f"{name}_amax_history"] = jnp.full_like(found[f"{name}_amax_history"], largest)
        found[f"{name}_scale"] = jnp.full_like(found[f"{name}_scale"], largest / limit)
    return found
