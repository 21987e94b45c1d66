"""The arithmetic of norms, and what they hand over to the layers behind them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from te_jax import native, ops
from te_jax._core import observe
from te_jax._core.types import BLOCK
from te_jax.layers import linear
from te_jax.layers.tensor_parallel import TensorAxis
from te_jax.quantized import Quantizable, QuantizedArray, facts_of_recipe
from te_jax.recipe import DelayedScaling, ProductRecipes, Quantization, Recipe

Kind = Literal["rms", "layer"]


@dataclasses.dataclass(frozen=True)
class Norm:
    """The norm of a layer, where its kind alone does not say everything.

        te_jax.nnx.NormLinear(64, 256, norm=te_jax.layers.Norm("layer", epsilon=1e-5), rngs=nnx.Rngs(0))

    Attributes:
      kind: "rms" or "layer".
      epsilon: added to the mean square, or to the variance.
      zero_centered: multiplies by 1 + scale, as Gemma does.
      scale_init: initializer of the scale; None is ones, or zeros with zero_centered.
      bias_init: initializer of a layer norm's bias; None is zeros.

    Raises:
      ValueError: for another kind, and a bias_init without a bias.
    """

    kind: Kind
    epsilon: float = 1e-6
    zero_centered: bool = False
    scale_init: Callable[..., Array] | None = None
    bias_init: Callable[..., Array] | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("rms", "layer"):
            raise ValueError(f"the kind of a norm is {self.kind!r}; it must be 'rms' or 'layer'")
        if self.bias_init is not None and self.kind == "rms":
            raise ValueError("bias_init is given, but an RMS norm has no bias: leave it out, or use Norm('layer')")

    @classmethod
    def of(cls, norm: Norm | Kind, argument: str = "norm") -> Norm:
        """The norm that an argument is, or names.

        Raises:
          ValueError: it is and names none.
        """
        if isinstance(norm, Norm):
            return norm
        if norm not in ("rms", "layer"):
            raise ValueError(f"{argument} is {norm!r}; it must be 'rms', 'layer' or a te_jax.layers.Norm")
        return cls(norm)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the norm as a layer, without initializers that are None."""
        given = {"epsilon": self.epsilon, "zero_centered": self.zero_centered, "scale_init": self.scale_init}
        return given if self.bias_init is None else given | {"bias_init": self.bias_init}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `te_jax.ops.rms_norm` or `te_jax.ops.layer_norm`.

    Attributes:
      kind: which of the two.
      epsilon, zero_centered, implementation: as there.
    """

    kind: Kind
    epsilon: float
    zero_centered: bool
    implementation: native.Implementation | None


def normalize(
    x: jax.typing.ArrayLike,
    residual: jax.typing.ArrayLike | None,
    scale: Array | None,
    bias: Array | None,
    *,
    dtype: jax.typing.DTypeLike | None,
    quantization: Quantization | None = None,
    options: Options,
) -> Any:
    """y, or (y, x + residual), in the given dtype, or in what x, residual, scale and bias promote to.

    Where x or residual has another dtype than the result, they are added and normalized in float32: a residual stream
    in float32 stays so where layers compute in a narrower dtype.
    """
    x, residual = linear.as_array("x", x), None if residual is None else linear.as_array("residual", residual)
    dtype = linear.result_dtype(dtype, x, residual, scale, bias)
    given = {array.dtype for array in (x, residual) if array is not None}
    wide = dtype if given == {jnp.dtype(dtype)} else jnp.float32
    if x.ndim == 0 or (scale is not None and x.shape[-1] != scale.shape[0]):
        features = "a last dimension, the features" if scale is None else f"{scale.shape[0]} features"
        raise ValueError(f"x has shape {x.shape}; the norm needs {features}")
    if scale is None:
        scale = jnp.full(x.shape[-1], 0.0 if options.zero_centered else 1.0)
    arguments: dict[str, Any] = {
        "epsilon": options.epsilon,
        "zero_centered": options.zero_centered,
        "residual": None if residual is None else residual.astype(wide),
        "quantization": quantization,
        "implementation": options.implementation,
    }
    x = x.astype(wide)
    found = (
        ops.rms_norm(x, scale, **arguments) if options.kind == "rms" else ops.layer_norm(x, scale, bias, **arguments)
    )
    y, *total = (found,) if residual is None else found
    y = linear.cast(y, dtype)
    return (y, *total) if total else y


def before(
    norm: Callable[..., Any] | None,
    x: jax.typing.ArrayLike | QuantizedArray,
    residual: jax.typing.ArrayLike | None,
    recipe: Recipe | None,
    tensor: TensorAxis | None = None,
) -> tuple[Quantizable, Array | None]:
    """(what a norm hands over to layers with this recipe, x + residual or None); x itself without a norm.

    With a tensor axis devices split the time of x.
    """
    x = linear.as_input(x)
    if norm is None:
        if residual is not None:
            raise ValueError("residual is given, and there is no norm that adds it: pass norm='rms' or 'layer'")
        return x, None
    if isinstance(x, QuantizedArray):
        raise ValueError("x is a QuantizedArray, and there is a norm, which needs values: pass them, or norm=None")
    found = norm(x, residual, quantization=handover(recipe, x, tensor))
    return (found, None) if residual is None else found


def handover(recipe: Recipe | None, x: Quantizable, tensor: TensorAxis | None = None) -> Quantization | None:
    """How a norm quantizes its result for layers with a recipe; None where these quantize it themselves.

    They do with delayed scaling, whose state remembers the amax of a layer's input, for a single row, and with blocks
    where these do not divide the rows of an x [*rows, features] in several dimensions. Of devices that split the time
    each needs whole blocks; on other scales than those of blocks they agree when they gather x. And they do where
    statistics of x are asked for.
    """
    if observe.requested() is not None:
        return None
    if recipe is None or isinstance(recipe, DelayedScaling | ProductRecipes) or x.ndim < 2:
        return None
    blocked = facts_of_recipe(recipe).in_blocks
    if tensor is not None:
        return recipe.quantization("activation") if blocked and tensor.rows(x) % BLOCK == 0 else None
    return None if blocked and x.ndim > 2 and x.shape[-2] % BLOCK else recipe.quantization("activation")
