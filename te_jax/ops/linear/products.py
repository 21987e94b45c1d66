"""Arguments of derivative rules of linear layers: the weights of a layer, and how it quantizes and multiplies."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
from jax import Array

from te_jax import sharding
from te_jax._core import observe
from te_jax._core.derivatives import not_differentiated
from te_jax._core.types import PyTree
from te_jax.ops._quantize_kernels import Request
from te_jax.ops.linear.arguments import KernelContracting
from te_jax.ops.linear.codec import READ_BY, Codec, Codecs
from te_jax.ops.linear.fp8 import Copy
from te_jax.ops.quantize import QuantizedParts
from te_jax.quantized import Quantizable, QuantizedArray
from te_jax.recipe import PRODUCTS, DelayedScalingState, Product, Quantization, Role
from te_jax.reference.quantize import Copies
from te_jax.sharding import Layout

GroupT = TypeVar("GroupT")
State = DelayedScalingState | None


class Wgrad(NamedTuple):
    """The gradient of a kernel, not computed yet.

    Attributes:
      product: `product(out_dtype=…)`, or with `accumulator=…, accumulate=…` its next value.
      operands: what it multiplies.
    """

    product: Callable[..., Array]
    operands: PyTree


class Pair(NamedTuple):
    """An operand that its two products read by codecs of their own; the second None where it is not needed."""

    first: Any
    second: Any


def _first(operand: Any) -> Any:
    return operand.first if isinstance(operand, Pair) else operand


def _second(operand: Any) -> Any:
    return operand.second if isinstance(operand, Pair) else operand


@dataclasses.dataclass(frozen=True, kw_only=True)
class Products(abc.ABC, Generic[GroupT]):
    """How a layer multiplies. Hashable, so that a layer is traced once.

    `group` is what products read beside their operands, such as the sizes of groups of rows. It has no gradient.

    Attributes:
      name: of the public function, for errors.
      codecs: how each product reads its operands.
      dtype: of x.
      accumulate: whether accumulators are added to, or written over.
      state_axis: mesh axes over which scaling states are the same, where JAX does not track that.
      batch_ndim: number of dimensions of x before those that are contracted.
      kernel_contracting: where in the kernels these dimensions stand.
    """

    name: str
    codecs: Codecs
    dtype: np.dtype
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

    def differentiated_once(self, operands: PyTree) -> PyTree:
        """Operands of the backward pass, where no quantization lies before them."""
        return operands if all(codec.in_fp8 for codec in self.codecs) else not_differentiated(operands, self.once)

    # ------------------------------------------------------------------------------------------------------- operands

    def codec(self, product: Product) -> Codec:
        return self.codecs[PRODUCTS.index(product)]

    @property
    def is_plain(self) -> bool:
        """Whether no operand is quantized."""
        return all(codec.recipe is None for codec in self.codecs)

    def shares(self, role: Role) -> bool:
        """Whether both products that read an operand read one quantized array, or a plain one."""
        first, second = map(self.codec, READ_BY[role])
        return first == second and not first.is_read_back

    @property
    def dgrad_copy(self) -> Copy:
        """The copy of a quantized kernel that the gradient of x reads."""
        return "data" if self.kernel_contracting == "first" else "transposed"

    def observed_for(self, links: Sequence[Array]) -> contextlib.AbstractContextManager[None]:
        """A context in which operands of the kernels with these links are quantized."""
        return observe.layer(self.name, links, self.dgrad_copy)

    def quantize(
        self, role: Role, x: Quantizable, state: State, group: GroupT, *, second_copy: bool, with_dbias: bool = False
    ) -> QuantizedParts:
        """An operand as products read it, its amax where scaling is delayed, and dbias where it is asked for.

        Args:
          role: of x.
          x: plain, or quantized, which is returned as it is.
          state: of delayed scaling, or None.
          group: see above.
          second_copy: whether the copy is needed that dgrad reads of a kernel, and wgrad of x and of dy.
          with_dbias: of a gradient, whether its sum over rows is asked for.
        """
        first, second = map(self.codec, READ_BY[role])
        encoded = functools.partial(self.encoded, role=role, x=x, state=state, group=group)
        if self.shares(role):
            return encoded(first, first_copy=True, second_copy=second_copy, with_dbias=with_dbias)
        parts = encoded(first, first_copy=True, second_copy=False, with_dbias=with_dbias)
        read = encoded(second, first_copy=False, second_copy=True).array if second_copy else None
        return parts._replace(array=Pair(parts.array, read))  # pyright: ignore[reportArgumentType]

    def encoded(
        self, codec: Codec, role: Role, x: Any, state: State, group: GroupT, *,
        first_copy: bool, second_copy: bool, with_dbias: bool = False,
    ) -> QuantizedParts:  # fmt: skip
        """An operand by one codec."""
        copies = {"first_copy": first_copy, "second_copy": second_copy}
        if codec.in_fp8:
            return self.quantized(codec, role, x, state, group, **copies, with_dbias=with_dbias)
        x = not_differentiated(x, self.once)
        dbias = self.sum_of_rows(x, group) if with_dbias else None
        if codec.recipe is None:
            return QuantizedParts(x.astype(self.dtype), None, dbias)
        array = self.quantized(codec, role, x, None, group, **copies).array
        return QuantizedParts(self.read_back(role, array), None, dbias)  # pyright: ignore[reportArgumentType]

    @abc.abstractmethod
    def quantized(
        self, codec: Codec, role: Role, x: Any, state: State, group: GroupT, *,
        first_copy: bool, second_copy: bool, with_dbias: bool = False,
    ) -> QuantizedParts:  # fmt: skip
        """An operand in FP8, with the copies that its first and its second product read."""

    def read_back(self, role: Role, array: QuantizedArray) -> Array:
        """The values that the codes of one copy stand for."""
        del role
        return dataclasses.replace(array, dtype=self.dtype).dequantize()

    @abc.abstractmethod
    def sum_of_rows(self, dy: Array, group: GroupT) -> Array:
        """The gradient of a bias from that of a plain result, float32."""

    def quantization(self, role: Role) -> Quantization:
        """How operands of products are quantized that share a codec."""
        return self.codecs[0].quantization(role, self.kernel_contracting)

    def request(self, role: Role, copies: Copies, *, with_amax: bool, with_dbias: bool = False) -> Request:
        """The arguments of a kernel that writes, in FP8, what such products multiply."""
        return Request(self.quantization(role), self.batch_ndim, copies, (), (), with_amax, with_dbias)

    def kept(self, x: Any, role: Role, *, is_argument: bool) -> Any:
        """Residual of an operand, None for nothing, with its name unless it is there anyway."""
        x = _second(x)
        if not isinstance(x, QuantizedArray):
            return x
        reads_data = role == "kernel" and self.dgrad_copy == "data"
        x = x.without_transposed() if reads_data else x.without_data()
        if x.data is None and x.transposed is None:
            return None
        return x if is_argument else x.named(f"{self.prefix}_{role}")

    def validate_x(self, x8: QuantizedArray | None, trained: str) -> None:
        """Checks that an x that came quantized has what the gradient of the kernel `trained` reads.

        Raises:
          ValueError: it has not.
        """
        if x8 is not None and x8.transposed is None:
            raise ValueError(
                f"x has no transposed copy, which the gradient with respect to {trained} reads; quantize it with "
                "copies='both'"
            )

    # ------------------------------------------------------------------------------------------------------- products

    @property
    def plain_codecs(self) -> Codecs:
        """For the same products of plain operands."""
        forward, dgrad, wgrad = (dataclasses.replace(c, recipe=None, is_read_back=False) for c in self.codecs)
        return forward, dgrad, wgrad

    @abc.abstractmethod
    def plain(self) -> Products:
        """The same products of operands that are not quantized, without activation."""

    def layouts(self, x: Quantizable, kernels: Iterable[Quantizable]) -> tuple[Layout | None, ...]:
        """Layouts of the results, from operands that are not quantized yet; None for as they come."""
        del x
        return tuple(None for _ in kernels)

    def forward(self, x8, kernel8s, biases, layouts, group, *, differentiated: bool) -> tuple[Any, Any, Any]:
        """(ys, x as wgrad reads it, for each y what `before_activation` reads)."""
        kernels = tuple(map(_first, kernel8s))
        ys, read, befores = self._forward(_first(x8), kernels, biases, layouts, group, differentiated=differentiated)
        return ys, x8.second if isinstance(x8, Pair) else read, befores

    def dgrad(self, dy8s, kernel8s, group, layout: Layout) -> tuple[Array, Any]:
        """(dx, dys as wgrad reads them, None where it cannot). XLA drops dx where nobody asks for it."""
        dx, read = self._dgrad(tuple(map(_first, dy8s)), kernel8s, group, layout)
        return dx, tuple(dy.second if isinstance(dy, Pair) else r for dy, r in zip(dy8s, read, strict=True))

    def wgrads(self, x8, dy8s, group) -> tuple[Wgrad, ...]:
        """For each kernel."""
        return self._wgrads(x8, tuple(map(_second, dy8s)), group)

    @abc.abstractmethod
    def _forward(self, x8, kernel8s, biases, layouts, group, *, differentiated: bool) -> tuple[Any, Any, Any]:
        """`forward` of operands as that product reads them."""

    @abc.abstractmethod
    def _dgrad(self, dy8s, kernel8s, group, layout: Layout) -> tuple[Array, Any]:
        """`dgrad` of operands as that product reads them."""

    @abc.abstractmethod
    def _wgrads(self, x8, dy8s, group) -> tuple[Wgrad, ...]:
        """`wgrads` of operands as that product reads them."""

    def token_ndim(self, x: Array) -> int:
        """The number of dimensions of x, of a result or of their gradients that are tokens, and not features."""
        return x.ndim - 1

    def activated(self, y: Array) -> Array:
        """The activation of a result."""
        return y

    def before_activation(self, preactivation: Array | None, dy: Array) -> Array:
        """The gradient of a result before its activation."""
        del preactivation
        return dy

    def wgrad_sides(self, x8: Any, dy8: Any) -> tuple[Any, Any]:
        """(lhs, rhs) of the product that lies as the kernel."""
        return (x8, dy8) if self.kernel_contracting == "first" else (dy8, x8)
