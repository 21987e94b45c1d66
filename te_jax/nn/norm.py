"""What norms hand over to the layers behind them."""

from __future__ import annotations

from typing import Any

from te_jax._core.types import BLOCK
from te_jax.recipe import DelayedScaling, Quantization, Recipe


def handover(recipe: Recipe | None, x: Any) -> Quantization | None:
    """How a norm quantizes its result for layers with a recipe; None where these quantize it themselves.

    They do with delayed scaling, whose state remembers the amax of a layer's input, and with blocks where these do not
    divide the rows of an x [*rows, features] in several dimensions.
    """
    if recipe is None or isinstance(recipe, DelayedScaling):
        return None
    blocked = any(scaling.startswith("block") for scaling in recipe.scalings["activation"])
    return None if blocked and x.ndim > 2 and x.shape[-2] % BLOCK else recipe.quantization("activation")
