"""What derivative rules of linear layers are given: the weights of a layer, and how it quantizes and multiplies."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

from jax import Array

from te_jax import native, sharding
from te_jax._core import observe
from te_jax._core.derivatives import not_differentiated
from te_jax.ops._quantize_kernels import Request
from te_jax.ops.linear.arguments import KernelContracting, quantization_of
from te_jax.ops.linear.fp8 import Copy, Fp8
from te_jax.ops.quantize import QuantizedParts
from te_jax.quantized import QuantizedArray
from te_jax.recipe import DelayedScalingState, Quantization, Recipe, Role
from te_jax.reference.quantize import Copies
from te_jax.sharding import Layout


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


def together(operands: Any, axes: frozenset[str] = frozenset()) -> Any:
    """Operands of a layer, which end with its weights, as `sharding.varying_together` has them, states as they are."""
    *others, weights = operands
    stateless = tuple(weight._replace(state=None) for weight in weights)
    *others, stateless = sharding.varying_together((*others, stateless), axes)
    return *others, tuple(w._replace(state=weight.state) for w, weight in zip(stateless, weights, strict=True))


class Wgrad(NamedTuple):
    """The gradient of a kernel, not computed yet.

    Attributes:
      product: `product(out_dtype=…)`, or with `accumulator=…, accumulate=…` its next value.
      operands: what it multiplies.
    """

    product: Callable[..., Array]
    operands: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Products(abc.ABC):
    """How a layer quantizes and multiplies. Hashable, so that a layer is traced once.

    `group` is what products read beside their operands, such as the sizes of groups of rows. It has no gradient.

    Attributes:
      name: of the public function, for errors.
      recipe: how operands are quantized; None multiplies them as they are.
      implementation: of products.
      by_kernels: whether native kernels quantize, as far as there are any. They run on more GPUs than native products.
      accumulate: whether accumulators are added to, or written over.
      state_axis: mesh axes over which scaling states are the same, where JAX does not track that.
      batch_ndim: number of dimensions of x before those that are contracted.
      kernel_contracting: where in the kernels these dimensions stand.
    """

    name: str
    recipe: Recipe | None
    implementation: native.Implementation
    by_kernels: bool = False
    accumulate: bool = True
    state_axis: sharding.Axes = ()
    batch_ndim: int = 1
    kernel_contracting: KernelContracting = "first"

    prefix: ClassVar[str] = "te_dense"
    """The names of what is kept begin with it."""

    @property
    def once(self) -> str:
        """Why there are no second derivatives."""
        if self.is_plain:
            return (
                f"{self.name} with wgrad_accumulator is differentiated once, by its own rules; for second derivatives "
                "do without wgrad_accumulator"
            )
        return f"{self.name} in FP8 is differentiated once, by its own rules; for second derivatives use recipe=None"

    def differentiated_once(self, operands: Any) -> Any:
        """Operands of the backward pass, where no quantization lies before them."""
        return not_differentiated(operands, self.once) if self.recipe is None else operands

    @property
    def is_plain(self) -> bool:
        """Whether no operand is quantized."""
        return self.recipe is None

    @property
    def fp8(self) -> Fp8:
        assert self.recipe is not None
        return Fp8(self.name, self.recipe, self.by_kernels, self.state_axis)

    @property
    def dgrad_copy(self) -> Copy:
        """The copy of a quantized kernel that the gradient of x reads."""
        return "data" if self.kernel_contracting == "first" else "transposed"

    def observed_for(self, links: Sequence[Array]) -> contextlib.AbstractContextManager[None]:
        """A context in which operands of the kernels with these links are quantized."""
        return observe.layer(self.name, links, self.dgrad_copy)

    @abc.abstractmethod
    def quantize(
        self,
        role: Role,
        x: Any,
        state: Any,
        group: Any,
        *,
        first_copy: bool = True,
        second_copy: bool,
        with_dbias: bool = False,
    ) -> QuantizedParts:
        """An operand as products read it, its amax where scaling is delayed, and dbias where it is asked for.

        Args:
          role: of x.
          x: plain, or quantized, which is returned as it is.
          state: of delayed scaling, or None.
          group: see above.
          first_copy: whether the copy is needed that the forward pass reads of x and of a kernel, and dgrad of dy.
          second_copy: whether the copy is needed that dgrad reads of a kernel, and wgrad of x and of dy.
          with_dbias: of a gradient, whether its sum over rows is asked for.
        """

    def quantization(self, role: Role) -> Quantization:
        assert self.recipe is not None
        return quantization_of(self.recipe, role, self.kernel_contracting)

    def request(self, role: Role, copies: Copies, *, with_amax: bool, with_dbias: bool = False) -> Request:
        """The arguments of a kernel that writes, in FP8, what these products multiply."""
        return Request(self.quantization(role), self.batch_ndim, copies, (), (), with_amax, with_dbias)

    def layouts(self, x: Any, kernels: Iterable[Any]) -> tuple[Layout | None, ...]:
        """Those of the results, from operands that are not quantized yet; None for as they come."""
        del x
        return tuple(None for _ in kernels)

    @abc.abstractmethod
    def forward(self, x8, kernel8s, biases, layouts, group, *, differentiated: bool) -> tuple[Any, Any, Any]:
        """(ys, x as wgrad reads it, for each y what `before_activation` reads)."""

    def kept(self, x: Any, role: Role, *, is_argument: bool) -> Any:
        """What the backward pass reads of a quantized operand, None for nothing, with its name unless it is there
        anyway."""
        if not isinstance(x, QuantizedArray):
            return x
        reads_data = role == "kernel" and self.dgrad_copy == "data"
        x = x.without_transposed() if reads_data else x.without_data()
        if x.data is None and x.transposed is None:
            return None
        return x if is_argument else x.named(f"{self.prefix}_{role}")

    @abc.abstractmethod
    def plain(self) -> Products:
        """The same products of operands that are not quantized, without activation."""

    def token_ndim(self, x: Array) -> int:
        """The number of dimensions of x, of a result or of their gradients that are tokens, and not features."""
        return x.ndim - 1

    def activated(self, y: Array) -> Array:
        """The activation of a result."""
        return y

    def before_activation(self, preactivation: Any, dy: Array) -> Array:
        """The gradient of a result before its activation."""
        del preactivation
        return dy

    @abc.abstractmethod
    def dgrad(self, dy8s, kernel8s, group, layout: Layout) -> tuple[Array, Any]:
        """(dx, dys as wgrad reads them, None where it cannot). XLA drops dx where nobody asks for it."""

    @abc.abstractmethod
    def wgrads(self, x8, dy8s, group) -> tuple[Wgrad, ...]:
        """For each kernel."""

    def wgrad_sides(self, x8: Any, dy8: Any) -> tuple[Any, Any]:
        """(lhs, rhs) of the product that lies as the kernel."""
        return (x8, dy8) if self.kernel_contracting == "first" else (dy8, x8)

    def validate_x(self, x8: Any, trained: str) -> None:
        """Checks that an x that came quantized has what the gradient of the kernel `trained` reads.

        Raises:
          ValueError: it has not.
        """
        if x8 is not None and x8.transposed is None:
            raise ValueError(
                f"x has no transposed copy, which the gradient with respect to {trained} reads; quantize it with "
                "copies='both'"
            )
