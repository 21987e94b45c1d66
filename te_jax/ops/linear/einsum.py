"""Einsums of inputs and a kernel, as products of a linear layer."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import string
from collections.abc import Callable
from typing import Any

import jax
from jax import Array


@dataclasses.dataclass(frozen=True)
class Einsum:
    """An einsum string for inputs and a kernel, in which each dimension has a letter.

    Attributes:
      inputs, kernel, result: the three parts of the string.
      kernel_shape: the kernel's sizes.
      argument: the name of the string for errors.
    """

    inputs: str
    kernel: str
    result: str
    kernel_shape: tuple[int, ...]
    argument: str = "einsum_str"

    @classmethod
    def parse(cls, einsum_str: str | None, kernel_shape: tuple[int, ...], argument: str = "einsum_str") -> Einsum:
        """Reads a string such as "btd,df->btf".

        Raises:
          ValueError: it is not that of inputs and a kernel of this shape.
        """
        with_dots = r"([a-zA-Z]*(?:\.\.\.)?[a-zA-Z]*)"
        match = re.fullmatch(f"{with_dots},([a-zA-Z]+)->{with_dots}", str(einsum_str).replace(" ", ""))
        if match is None:
            raise ValueError(
                f"{argument} is {einsum_str!r}; it must name the dimensions of inputs, kernel and result, as "
                "'btd,df->btf' does; only inputs and result may have an ellipsis"
            )
        inputs, kernel, result = match.groups()
        self = cls(inputs, kernel, result, kernel_shape, argument)
        if len(self.kernel) != len(kernel_shape):
            raise ValueError(
                f"{argument} is {einsum_str!r}, where the kernel has {len(self.kernel)} dimensions; its shape is "
                f"{kernel_shape}"
            )
        letters = [part.replace("...", "") for part in (inputs, kernel, result)]
        repeated = any(len(set(part)) != len(part) for part in letters)
        expected = set(inputs + kernel) - set(self.contracted)
        if repeated or set(result) != expected or not self.contracted or not self.features:
            raise ValueError(
                f"{argument} is {einsum_str!r}; inputs and kernel must share a dimension that the result lacks, the "
                "kernel must have one that the inputs lack, and the result must have all other dimensions, none of "
                "them twice: use jnp.einsum for other sums"
            )
        return self

    def __str__(self) -> str:
        return f"{self.inputs},{self.kernel}->{self.result}"

    @property
    def shared(self) -> str:
        """The kernel's dimensions that inputs and result have too."""
        return "".join(name for name in self.kernel if name in self.inputs and name in self.result)

    @property
    def contracted(self) -> str:
        """The kernel's dimensions that only the inputs have too, in the kernel's order."""
        return "".join(name for name in self.kernel if name in self.inputs and name not in self.result)

    @property
    def features(self) -> str:
        """The kernel's dimensions that only the result has too, in the kernel's order."""
        return "".join(name for name in self.kernel if name not in self.inputs)

    @property
    def bias(self) -> str:
        """The dimensions of a bias: those that kernel and result share, in the order of the result."""
        return "".join(name for name in self.result if name in self.kernel)

    @property
    def bias_shape(self) -> tuple[int, ...]:
        return tuple(self.kernel_shape[self.kernel.index(name)] for name in self.bias)

    @property
    def kernel_ndims(self) -> tuple[int, int]:
        """How many dimensions the rows and the columns of a quantized kernel have.

        Raises:
          ValueError: neither a quantized kernel nor its transposed copy would be laid out as a product needs it.
        """
        if self.kernel == self.shared + self.contracted + self.features:
            return len(self.contracted), len(self.features)
        if self.kernel == self.shared + self.features + self.contracted:
            return len(self.features), len(self.contracted)
        raise ValueError(
            f"{self.argument} is '{self}'; a kernel that is quantized beforehand or has an accumulator needs the "
            f"dimensions '{self.shared + self.contracted + self.features}' in this order: change it, or use recipe=None"
        )

    def without_ellipsis(self, ndim: int) -> tuple[str, str]:
        """The letters of inputs with `ndim` dimensions, and those of the result, with letters for the ellipsis."""
        free = [name for name in string.ascii_letters if name not in self.inputs + self.kernel]
        names = "".join(free[: max(0, ndim + len("...") - len(self.inputs))])
        return self.inputs.replace("...", names), self.result.replace("...", names)

    def apply(
        self, product: Callable[..., Array], x: Array, kernel: Any, bias: Array | None, *, in_order: bool
    ) -> Array:
        """The einsum of x and kernel, plus bias.

        Each index of the dimensions that inputs, kernel and result share is a product of its own, under `jax.vmap`.

        Args:
          product: a linear layer of x, kernel and bias with `contracting_ndim`, `kernel_contracting` and `features`.
          x: [*inputs].
          kernel: [*kernel], an array or a pytree of some.
          bias: of `bias_shape`, in any shape of that size; or None.
          in_order: whether the kernel stays as it is, because its dimensions are in order (`kernel_ndims`).
        """
        inputs, result = self.without_ellipsis(x.ndim)
        sizes = dict(zip(self.kernel, self.kernel_shape, strict=True))
        if len(inputs) != x.ndim or any(sizes.get(n, size) != size for n, size in zip(inputs, x.shape, strict=True)):
            operand = "inputs" if self.argument == "einsum_str" else "x"
            raise ValueError(
                f"{self.argument} is '{self}', where the kernel has shape {self.kernel_shape}; it does not fit "
                f"{operand} of shape {x.shape}"
            )
        tokens = "".join(name for name in inputs if name not in self.kernel)
        x = _renamed(x, inputs, self.shared + tokens + self.contracted)
        if bias is not None:
            if bias.size != math.prod(self.bias_shape):
                raise ValueError(
                    f"bias has shape {bias.shape}; for {self.argument} '{self}' and kernel shape {self.kernel_shape} "
                    f"it must be {self.bias_shape}"
                )
            bias = _renamed(bias.reshape(self.bias_shape), self.bias, self.shared + self.features)
        last = self.kernel == self.shared + self.features + self.contracted
        if not last and not in_order:
            kernel = _renamed(kernel, self.kernel, self.shared + self.contracted + self.features)
        multiply = functools.partial(
            product,
            contracting_ndim=len(self.contracted),
            features=tuple(sizes[name] for name in self.features),
            kernel_contracting="last" if last else "first",
        )
        for _ in self.shared:
            multiply = jax.vmap(multiply)
        return _renamed(multiply(x, kernel, bias), self.shared + tokens + self.features, result)


def _renamed(x: Array, names: str, order: str) -> Array:
    return x if names == order else x.transpose([names.index(name) for name in order])
