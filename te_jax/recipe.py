"""How tensors become FP8: frozen, hashable recipes, which are values to pass and static arguments of `jax.jit`.

A linear layer multiplies tensors of three roles: the activation x and the kernel w forward, the gradient dy backward.
FP8 tensor cores read both operands of a GEMM along the summed dimension, so a layer needs each role in two copies,
plain and transposed. For each role a recipe sets the FP8 format of the copies and how many values share a scale.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection
from typing import TYPE_CHECKING, ClassVar, Literal, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, export

from te_jax._core import transformer_engine
from te_jax._core.arguments import as_dtype, as_flag, is_finite_number, is_whole_number
from te_jax._core.types import E4M3, E5M2

__all__ = [
    "BlockScaling", "CurrentScaling", "DelayedScaling", "DelayedScalingState", "Fake", "MXFP8Scaling", "Product",
    "ProductRecipes", "Quantization", "Recipe", "Role", "RowwiseScaling", "Scaling", "advance", "merge", "products",
]  # fmt: skip

Role = Literal["activation", "kernel", "gradient"]
Scaling = Literal["tensor", "row", "block_1x32", "block_1x128", "block_128x128"]
Product = Literal["forward", "dgrad", "wgrad"]

PRODUCTS: tuple[Product, ...] = ("forward", "dgrad", "wgrad")

if not TYPE_CHECKING:  # which would take every name for one that the module has

    def __getattr__(name: str) -> NoReturn:
        raise transformer_engine.missing(__name__, name)


@dataclasses.dataclass(frozen=True)
class Quantization:
    """How one tensor is quantized.

    Attributes:
      dtype: float8_e4m3fn or float8_e5m2.
      scaling: which values of the copy as it is share a scale. A copy is a matrix, its dimensions grouped into outer
        ones and summed ones: "tensor": all; "row": those of one outer index; "block_1x128": 128 consecutive summed
        values of one outer index, and "block_1x32" 32 of them, with scales in one byte; "block_128x128": a square
        block.
      transposed_scaling: the same for the transposed copy.
      power_of_two_scales: round scales down to powers of two, as "block_1x32" always does.
    """

    dtype: np.dtype
    scaling: Scaling
    transposed_scaling: Scaling
    power_of_two_scales: bool = False


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The base of all recipes.

    Args:
      forward_dtype: FP8 format of activations and kernels.
      gradient_dtype: FP8 format of gradients: float8_e4m3fn (3 bits of mantissa, up to 448) or float8_e5m2 (2 bits, up
        to 57344).
      fast_accumulation: products whose sums stay inside the tensor cores (about 14 bits of mantissa) instead of
        being added up in float32 every 128 values: any of "forward", "dgrad", "wgrad". Block scaling always
        adds up in float32.
      power_of_two_scales: round scales down to powers of two, so that scaling itself never rounds.

    Raises:
      ValueError: a parameter is none of those named above, or the recipe is none of those below.
    """

    # Fields that have one legal value, or none that changes a result, are not printed.
    forward_dtype: jax.typing.DTypeLike = dataclasses.field(default=E4M3, repr=False)
    gradient_dtype: jax.typing.DTypeLike = E5M2
    fast_accumulation: tuple[Product, ...] = ("forward",)
    power_of_two_scales: bool = False

    scalings: ClassVar[dict[Role, tuple[Scaling, Scaling]]]

    def __post_init__(self):
        if not hasattr(self, "scalings"):
            raise ValueError(
                f"{type(self).__name__} does not say which values share a scale; use a recipe that does, such as "
                "te_jax.recipe.CurrentScaling()"
            )
        for name in ("forward_dtype", "gradient_dtype"):
            rule = "float8_e4m3fn or float8_e5m2, of jax.numpy"
            object.__setattr__(self, name, as_dtype(f"{name} is", getattr(self, name), (E4M3, E5M2), rule))
        if np.dtype(self.forward_dtype) == E5M2:
            raise ValueError("forward_dtype is float8_e5m2; no GPU multiplies E5M2 by E5M2: use float8_e4m3fn forward")
        fast = self.fast_accumulation
        known = isinstance(fast, Collection) and not isinstance(fast, str | bytes)
        if not known or any(name not in PRODUCTS for name in fast):
            raise ValueError(
                f"fast_accumulation is {fast!r}; it must be a tuple of names out of {PRODUCTS}, () for none"
            )
        object.__setattr__(
            self, "fast_accumulation", tuple(name for name in PRODUCTS if name in self.fast_accumulation)
        )
        object.__setattr__(self, "power_of_two_scales", as_flag("power_of_two_scales", self.power_of_two_scales))

    @property
    def by_product(self) -> dict[Product, Recipe | Fake | None]:
        """The recipes of the three products."""
        return dict.fromkeys(PRODUCTS, self)

    def quantization(self, role: Role) -> Quantization:
        """How tensors of a role are quantized.

        Raises:
          ValueError: for any other role.
        """
        if role not in self.scalings:
            raise ValueError(f"role is {role!r}; it must be one of {', '.join(map(repr, self.scalings))}")
        dtype = self.gradient_dtype if role == "gradient" else self.forward_dtype
        return Quantization(np.dtype(dtype), *self.scalings[role], self.power_of_two_scales)


@transformer_engine.names_arguments
@dataclasses.dataclass(frozen=True)
class CurrentScaling(Recipe):
    """One scale for each tensor, from its own amax (largest magnitude): quantization reads the tensor twice.

    Args:
      forward_dtype: FP8 format of activations and kernels; it must be float8_e4m3fn.
      gradient_dtype: FP8 format of gradients: float8_e4m3fn (3 bits of mantissa, up to 448) or float8_e5m2 (2 bits, up
        to 57344).
      fast_accumulation: products whose sums stay inside the tensor cores (about 14 bits of mantissa) instead of
        being added up in float32 every 128 values: any of "forward", "dgrad", "wgrad".
      power_of_two_scales: round scales down to powers of two, so that scaling itself never rounds.
    """

    scalings = dict.fromkeys(("activation", "kernel", "gradient"), ("tensor", "tensor"))


@transformer_engine.names_arguments
@dataclasses.dataclass(frozen=True)
class RowwiseScaling(Recipe):
    """One scale for each row of both copies, so that tokens and features with outliers do not disturb others.

    Args:
      forward_dtype: FP8 format of activations and kernels; it must be float8_e4m3fn.
      gradient_dtype: FP8 format of gradients: float8_e4m3fn (3 bits of mantissa, up to 448) or float8_e5m2 (2 bits, up
        to 57344).
      fast_accumulation: products whose sums stay inside the tensor cores (about 14 bits of mantissa) instead of
        being added up in float32 every 128 values: any of "forward", "dgrad", "wgrad".
      power_of_two_scales: round scales down to powers of two, so that scaling itself never rounds.
    """

    gradient_dtype: jax.typing.DTypeLike = E4M3
    scalings = dict.fromkeys(("activation", "kernel", "gradient"), ("row", "row"))


@transformer_engine.names_arguments
@dataclasses.dataclass(frozen=True)
class BlockScaling(Recipe):
    """One scale for 1 × 128 values of activations and gradients, and for 128 × 128 of kernels.

    The transposed copy of a gradient has 128 × 128 scales too. So every GEMM has 1 × 128 scales on one operand and 128
    × 128 on the other, and the weight gradient is as fast as the forward pass.

    Args:
      forward_dtype: FP8 format of activations and kernels; it must be float8_e4m3fn.
      gradient_dtype: FP8 format of gradients: float8_e4m3fn (3 bits of mantissa, up to 448) or float8_e5m2 (2 bits, up
        to 57344).
      fast_accumulation: has no effect: sums are always added up in float32.
      power_of_two_scales: round scales down to powers of two, so that scaling itself never rounds.

    References:
      DeepSeek-V3, arXiv:2412.19437, section 3.3.
    """

    gradient_dtype: jax.typing.DTypeLike = E4M3
    fast_accumulation: tuple[Product, ...] = dataclasses.field(default=("forward",), repr=False)
    scalings: ClassVar = {
        "activation": ("block_1x128", "block_1x128"),
        "kernel": ("block_128x128", "block_128x128"),
        "gradient": ("block_1x128", "block_128x128"),
    }


@transformer_engine.names_arguments
@dataclasses.dataclass(frozen=True)
class MXFP8Scaling(Recipe):
    """One scale for 32 values along the summed dimension of every copy, a power of two in one byte: MXFP8.

    GPUs multiply it from compute capability 10.0 on (B200, RTX 5090), by XLA. Elsewhere use `BlockScaling`; on a CPU,
    or with implementation="reference", MXFP8 products are float32 products of the same values.

    Args:
      forward_dtype: FP8 format of activations and kernels; it must be float8_e4m3fn.
      gradient_dtype: FP8 format of gradients: float8_e4m3fn (3 bits of mantissa, up to 448) or float8_e5m2 (2 bits, up
        to 57344).
      fast_accumulation: has no effect: sums are always added up in float32.
      power_of_two_scales: True. Scales are rounded down, so that no value saturates.

    Raises:
      ValueError: a parameter is none of those named above.

    References:
      OCP Microscaling Formats (MX) Specification 1.0. Mishra et al., Recipes for Pre-training LLMs with MXFP8,
      arXiv:2506.08027, whose rounding of scales this is.
    """

    gradient_dtype: jax.typing.DTypeLike = E4M3
    fast_accumulation: tuple[Product, ...] = dataclasses.field(default=("forward",), repr=False)
    power_of_two_scales: bool = dataclasses.field(default=True, repr=False)
    scalings = dict.fromkeys(("activation", "kernel", "gradient"), ("block_1x32", "block_1x32"))

    def __post_init__(self):
        super().__post_init__()
        if not self.power_of_two_scales:
            raise ValueError(
                "power_of_two_scales is False; scales of MXFP8 are powers of two: leave it out, or use BlockScaling"
            )


@transformer_engine.names_arguments
@dataclasses.dataclass(frozen=True)
class DelayedScaling(Recipe):
    """One scale for each tensor, from the amaxes of earlier steps: quantization reads the tensor once.

    The history is state: `init()` creates it, the operation takes it, and its gradient is the next state. A step
    records at most 16 times the largest entry before it. So a single outlier saturates in its own step and costs later
    steps no precision, and if values grow by 1000 in one step, the scale follows in three.

    Args:
      forward_dtype: FP8 format of activations and kernels; it must be float8_e4m3fn.
      gradient_dtype: FP8 format of gradients: float8_e4m3fn (3 bits of mantissa, up to 448) or float8_e5m2 (2 bits, up
        to 57344).
      fast_accumulation: products whose sums stay inside the tensor cores (about 14 bits of mantissa) instead of
        being added up in float32 every 128 values: any of "forward", "dgrad", "wgrad".
      power_of_two_scales: round scales down to powers of two, so that scaling itself never rounds.
      history_len: number of earlier steps that are remembered.
      algorithm: "max" over the history, or the "most_recent" step that was not all zeros.
      margin: scales are divided by 2^margin, room for values to grow from step to step; in [-64, 64].

    Raises:
      ValueError: a parameter is out of range.

    References:
      Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433.
    """

    history_len: int = 1024
    algorithm: Literal["max", "most_recent"] = "max"
    margin: float = 0
    scalings = dict.fromkeys(("activation", "kernel", "gradient"), ("tensor", "tensor"))

    def __post_init__(self):
        super().__post_init__()
        if not is_whole_number(self.history_len) or self.history_len < 1:
            raise ValueError(f"history_len is {self.history_len!r}; it must be a whole number of at least 1")
        if self.algorithm not in ("max", "most_recent"):
            raise ValueError(f"algorithm is {self.algorithm!r}; it must be 'max' or 'most_recent'")
        if not is_finite_number(self.margin) or abs(self.margin) > 64:
            raise ValueError(f"margin is {self.margin!r}; it must be a number in [-64, 64], 0 for none")
        object.__setattr__(self, "margin", float(self.margin))  # arrays are not hashable

    def init(self) -> DelayedScalingState:
        """The state of a layer that has seen no values: every scale is then 1."""
        # Three arrays, not one three times, which could not be donated.
        activation, kernel, gradient = (jnp.zeros((self.history_len,), jnp.float32) for _ in range(3))
        return DelayedScalingState(activation, kernel, gradient, jnp.zeros((), jnp.float32))

    def reference_amax(self, history: Array) -> Array:
        """The magnitude that is mapped to the largest FP8 value; 0 if the history is empty, for a scale of 1.

        Args:
          history: float32 [history_len], the most recent step first.

        Returns:
          float32 scalar.
        """
        # A step of zeros tells nothing about the next.
        amax = history[jnp.argmax(history > 0)] if self.algorithm == "most_recent" else jnp.max(history)
        return jnp.minimum(amax * np.float32(2.0**self.margin), np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class Fake:
    """A recipe whose values products read, but not its tensor cores: for experiments, on any GPU and on a CPU.

    Operands are quantized and read back in the dtype of the layer's input, which XLA multiplies. It saves no time.

    Args:
      recipe: one without state.

    Raises:
      ValueError: recipe is none, or has a state.
    """

    recipe: Recipe

    def __post_init__(self):
        _validate_one_of_several("recipe", self.recipe)


@dataclasses.dataclass(frozen=True)
class ProductRecipes(Recipe):
    """A recipe for each of the three products of a layer, from `products`.

    Layers take it, alone, in groups and over devices, and so do modules that call them; `linear_cross_entropy`, which
    names the products of the head in FP8 by `fp8_products`, does not.

    Attributes:
      forward: of x · kernel: how it reads x and the kernel; None multiplies them in the dtype of x.
      dgrad: of dy · kernelᵀ.
      wgrad: of xᵀ · dy.
    """

    forward: Recipe | Fake | None = None
    dgrad: Recipe | Fake | None = None
    wgrad: Recipe | Fake | None = None

    # Each product has its own.
    forward_dtype: jax.typing.DTypeLike = dataclasses.field(default=E4M3, init=False, repr=False, compare=False)
    gradient_dtype: jax.typing.DTypeLike = dataclasses.field(default=E4M3, init=False, repr=False, compare=False)
    fast_accumulation: tuple[Product, ...] = dataclasses.field(default=(), init=False, repr=False, compare=False)
    power_of_two_scales: bool = dataclasses.field(default=False, init=False, repr=False, compare=False)

    def __post_init__(self):
        for product, recipe in self.by_product.items():
            if recipe is not None and not isinstance(recipe, Fake):
                _validate_one_of_several(product, recipe)
        if not any(self.by_product.values()):
            raise ValueError("forward, dgrad and wgrad are None; for a layer without FP8 pass recipe=None")

    @property
    def by_product(self) -> dict[Product, Recipe | Fake | None]:
        return {"forward": self.forward, "dgrad": self.dgrad, "wgrad": self.wgrad}

    @property
    def scalings(self) -> dict[Role, tuple[Scaling, Scaling]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """None: raises ValueError, since an operand has no scaling of its own."""
        raise ValueError(
            f"recipe is {self!r}; one recipe for all three products is needed here: those of products are for layers "
            "with plain arrays, and the head names its products in FP8 by fp8_products"
        )


def products(
    *, forward: Recipe | Fake | None = None, dgrad: Recipe | Fake | None = None, wgrad: Recipe | Fake | None = None
) -> ProductRecipes:
    """A recipe for each of the three products of a layer: FP8 here, 16 bits there, any scaling.

    An operand that two products read by one recipe is quantized once for both.

    Args:
      forward: of x · kernel.
      dgrad: of dy · kernelᵀ, the gradient of x.
      wgrad: of xᵀ · dy, the gradient of the kernel. Each is a recipe without state, `Fake` of one, or None, which
        multiplies in the dtype of x.

    Raises:
      ValueError: all are None, or one is no such recipe.

    Examples:
      >>> import jax.numpy as jnp
      >>> from te_jax import ops, recipe
      >>> forward_only = recipe.products(forward=recipe.BlockScaling())
      >>> ops.dense(jnp.ones((4, 32)), jnp.ones((32, 16)), recipe=forward_only).shape
      (4, 16)
    """
    return ProductRecipes(forward, dgrad, wgrad)


def _validate_one_of_several(name: str, recipe: object) -> None:
    if isinstance(recipe, DelayedScaling):
        raise ValueError(
            f"{name} is {recipe!r}, whose state belongs to all products of a layer; use CurrentScaling, or "
            "DelayedScaling for the whole layer"
        )
    if not isinstance(recipe, Recipe) or isinstance(recipe, ProductRecipes):
        raise ValueError(f"{name} is {recipe!r}; it must be one recipe, such as te_jax.recipe.CurrentScaling()")


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("activation", "kernel", "gradient", "uses"), meta_fields=()
)
@dataclasses.dataclass(frozen=True)
class DelayedScalingState:
    """The amaxes of earlier steps. It is no parameter: the gradient of a layer with respect to it is its next value.

    Attributes:
      activation, kernel, gradient: float32 [history_len], the amax of the most recent step first, at most 16 times the
        largest before it. After a step with a non-finite amax, the entry before it is repeated.
      uses: float32 scalar, how often the most recent step used this state: JAX adds up the next states of all uses, and
        the next step divides the older entries by their number. 0 before the first step.
    """

    activation: Array
    kernel: Array
    gradient: Array
    uses: Array


export.register_pytree_node_serialization(
    DelayedScalingState,
    serialized_name="te_jax.recipe.DelayedScalingState",
    serialize_auxdata=lambda _: b"",  # it has none
    deserialize_auxdata=lambda _: (),
)


def merge(*states: DelayedScalingState) -> DelayedScalingState:
    """Combines the states after several uses of one state (microbatches, shared weights, replicas) by their maximum.

    Do not add or average states as you do gradients.

    Args:
      states: each float32 histories, all of the same history_len.

    Raises:
      ValueError: there is none, or their histories have different shapes.
    """
    shapes = {tuple(map(np.shape, jax.tree.leaves(state))) for state in states}
    if len(shapes) != 1:
        raise ValueError(
            f"states have histories of shapes {sorted(shapes)}; pass one state at least, and all of the same layers "
            "and history_len"
        )
    return jax.tree.map(lambda *histories: functools.reduce(jnp.maximum, histories), *states)


def advance(state: DelayedScalingState, next_state: DelayedScalingState) -> DelayedScalingState:
    """The next state, or the former one if the step did not use it.

    A layer in a branch that was not taken, or that the loss does not depend on, has a gradient of zeros.

    Args:
      state: before the step; its arrays may be stacked.
      next_state: the gradient with respect to it.
    """

    def chosen(former: Array, following: Array) -> Array:
        uses = jnp.expand_dims(next_state.uses, tuple(range(next_state.uses.ndim, following.ndim)))
        return jnp.where(uses == 0, former, following)

    return jax.tree.map(chosen, state, next_state)
