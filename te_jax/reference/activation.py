"""Activation functions, gated or not, in plain jax.numpy."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

Kind = Literal["silu", "gelu", "relu", "squared_relu"]


@dataclasses.dataclass(frozen=True)
class Function:
    """An activation function: hashable, a static argument.

    Attributes:
      kind: f: "silu" is x · sigmoid(alpha x), "gelu" 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))), "relu" max(x, 0),
        "squared_relu" its square.
      alpha: of silu.
      limit: where a gated function clips gate and up; infinite for nowhere.
      offset: what a gated function adds to up.
    """

    kind: Kind
    alpha: float = 1.0
    limit: float = math.inf
    offset: float = 0.0


def activation(x: Array, function: Function) -> Array:
    """Definition of `te_jax.ops.activation`: computed in float32, returned in the dtype of x."""
    return _of(x.astype(jnp.float32), function).astype(x.dtype)


def gated_activation(gate: Array, up: Array, function: Function) -> Array:
    """Definition of `te_jax.ops.gated_activation`: computed in float32, returned in the dtype of gate."""
    wide_gate, wide_up = gate.astype(jnp.float32), up.astype(jnp.float32)
    if math.isfinite(function.limit):
        # By selection: the derivative is whole at the limit, where that of jnp.minimum would be half, and NaN stays.
        limit = np.float32(function.limit)
        wide_gate = jnp.where(wide_gate > limit, limit, wide_gate)
        wide_up = jnp.where(wide_up > limit, limit, jnp.where(wide_up < -limit, -limit, wide_up))
    return (_of(wide_gate, function) * (wide_up + np.float32(function.offset))).astype(gate.dtype)


def _of(x: Array, function: Function) -> Array:
    if function.kind == "silu":
        return x * jax.nn.sigmoid(np.float32(function.alpha) * x)
    if function.kind == "gelu":
        # (1 + tanh(z)) / 2 is sigmoid(2z), which does not cancel for negative z.
        slope = np.float32(2 * math.sqrt(2 / math.pi))
        return x * jax.nn.sigmoid(slope * (x + np.float32(0.044715) * x * x * x))
    positive = jnp.where(x <= 0, np.float32(0), x)  # the derivative at 0 is 0, and NaN stays
    return positive if function.kind == "relu" else positive * positive
