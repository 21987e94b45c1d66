"""Activation functions, gated or not, in plain jax.numpy."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from te_jax._core.arguments import is_finite_number

ActivationName = Literal["silu", "gelu", "relu", "squared_relu"]


@dataclasses.dataclass(frozen=True)
class Activation:
    """An activation function, where its name alone does not say everything; hashable, a static argument.

        gpt_oss = te_jax.ops.Activation("silu", alpha=1.702, limit=7.0, offset=1.0)

    Attributes:
      kind: "silu" is f(x) = x · sigmoid(alpha x), "gelu" 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))), "relu" max(x, 0),
        "squared_relu" its square.
      alpha: of silu.
      limit: a gated function clips gate at it from above, and up at ±limit; infinity clips nothing.
      offset: a gated function adds it to up.

    Raises:
      ValueError: for another name, numbers that are not known while tracing or not finite, a limit that is not above 0,
        and an alpha of another function than silu.
    """

    kind: ActivationName
    alpha: float = 1.0
    limit: float = math.inf
    offset: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(ActivationName):
            raise ValueError(f"activation is {self.kind!r}; it must be one of {get_args(ActivationName)}")
        for field in ("alpha", "offset"):
            if not is_finite_number(getattr(self, field)):
                raise ValueError(
                    f"{field} is {getattr(self, field)!r}; it must be a finite number, known while tracing"
                )
        if self.kind != "silu" and self.alpha != 1:
            raise ValueError(
                f"alpha is {self.alpha!r}, but the function is {self.kind!r}; only 'silu' has an alpha: leave it 1"
            )
        if self.limit != math.inf and not (is_finite_number(self.limit) and self.limit > 0):
            raise ValueError(
                f"limit is {self.limit!r}; it must be a number above 0, known while tracing, or infinity for no limit"
            )
        for field in ("alpha", "limit", "offset"):
            object.__setattr__(self, field, float(getattr(self, field)))

    @classmethod
    def of(cls, activation: Activation | ActivationName) -> Activation:
        """The function that an argument is, or names.

        Raises:
          ValueError: it is and names none.
        """
        return activation if isinstance(activation, Activation) else cls(activation)

    @classmethod
    def ungated(cls, activation: Activation | ActivationName) -> Activation:
        """The function for one operand that an argument is, or names.

        Raises:
          ValueError: it is and names none, or has a limit or an offset.
        """
        function = cls.of(activation)
        if function.limit != math.inf or function.offset:
            raise ValueError(
                f"activation is {function!r}; limit and offset are for gated functions: leave them out, or call "
                "te_jax.ops.gated_activation"
            )
        return function


def activation(x: Array, function: Activation) -> Array:
    """Definition of `te_jax.ops.activation`: computed in float32, returned in the dtype of x."""
    return _of(x.astype(jnp.float32), function).astype(x.dtype)


def gated_activation(gate: Array, up: Array, function: Activation) -> Array:
    """Definition of `te_jax.ops.gated_activation`: computed in float32, returned in the dtype of gate."""
    wide_gate, wide_up = gate.astype(jnp.float32), up.astype(jnp.float32)
    if math.isfinite(function.limit):
        # By selection: the derivative is whole at the limit, where that of jnp.minimum would be half, and NaN stays.
        limit = np.float32(function.limit)
        wide_gate = jnp.where(wide_gate > limit, limit, wide_gate)
        wide_up = jnp.where(wide_up > limit, limit, jnp.where(wide_up < -limit, -limit, wide_up))
    return (_of(wide_gate, function) * (wide_up + np.float32(function.offset))).astype(gate.dtype)


def _of(x: Array, function: Activation) -> Array:
    if function.kind == "silu":
        return x * jax.nn.sigmoid(np.float32(function.alpha) * x)
    if function.kind == "gelu":
        # (1 + tanh(z)) / 2 is sigmoid(2z), which does not cancel for negative z.
        slope = np.float32(2 * math.sqrt(2 / math.pi))
        return x * jax.nn.sigmoid(slope * (x + np.float32(0.044715) * x * x * x))
    positive = jnp.where(x <= 0, np.float32(0), x)  # the derivative at 0 is 0, and NaN stays
    return positive if function.kind == "relu" else positive * positive
