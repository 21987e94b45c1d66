"""A kernel of a layer, and what belongs to it."""

from __future__ import annotations

from typing import Any, NamedTuple

from te_jax import sharding
from te_jax._core.types import PyTree
from te_jax.quantized import QuantizedArray
from te_jax.recipe import DelayedScalingState


class Weight(NamedTuple):
    """A kernel of a layer, plain or quantized, and what belongs to it: None for what is not there."""

    kernel: Any
    bias: Any = None
    accumulator: Any = None
    state: DelayedScalingState | None = None

    @property
    def is_trained(self) -> bool:
        """Whether there is anything that the gradient of the kernel can go to."""
        if self.accumulator is not None or not isinstance(self.kernel, QuantizedArray):
            return True
        return self.kernel.straight_through is not None


Weights = tuple[Weight, ...]


def together(operands: tuple[PyTree, ...], axes: frozenset[str] = frozenset()) -> tuple[PyTree, ...]:
    """Operands of a layer, which end with its weights, as `sharding.varying_together` has them, states as they are."""
    *leading, weights = operands
    stateless = tuple(weight._replace(state=None) for weight in weights)
    *leading, stateless = sharding.varying_together((*leading, stateless), axes)
    return *leading, tuple(w._replace(state=weight.state) for w, weight in zip(stateless, weights, strict=True))
