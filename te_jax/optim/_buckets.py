"""Thousands of small parameters in a few arrays."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from te_jax._core.types import BLOCK, PyTree


class Packed(NamedTuple):
    """Parameters, gradients or anything of their structure, as `Buckets` packs it: a pytree like any other."""

    buckets: dict[str, Array]  # by "dtype" or "label/dtype": the small leaves, one after the other, [n]
    leaves: tuple[Array, ...]  # the others, as they are


class _Slot(NamedTuple):
    """Where a leaf lies: in a bucket, or (without a name) among the leaves that stay what they are."""

    bucket: str | None
    start: int
    shape: tuple[int, ...]
    dtype: np.dtype  # or that of random keys, which NumPy does not know


@dataclasses.dataclass(frozen=True)
class Buckets:
    """A plan that packs the small leaves of a tree into a few arrays, and takes them out again.

    A step over ten thousand leaves of a few thousand values runs as many kernels, and JAX needs a multiple of that time
    to handle their buffers. A step over packed leaves only takes the time of their bytes. So keep parameters packed
    from step to step, and unpack where the model reads them:

        buckets = te_jax.optim.Buckets.of(params)
        packed = buckets.pack(params)
        state = optimizer.init(packed)

        def step(packed, state, batch):
            loss, gradients = jax.value_and_grad(lambda p: loss_fn(buckets.unpack(p), batch))(packed)
            updates, state = optimizer.update(gradients, state, packed)
            return optax.apply_updates(packed, updates), state, loss

    Gradients with respect to packed parameters are packed too, by one concatenation. Leaves begin at multiples of 128
    values, so no block of a moment in FP8 holds values of two leaves. The plan is hashable, and static in `jax.jit`.
    """

    structure: Any
    slots: tuple[_Slot, ...]

    @classmethod
    def of(cls, tree: PyTree, *, largest: int = 2**16, labels: PyTree = None) -> Buckets:
        """Plans for trees like this one.

        Args:
          tree: arrays, or `jax.ShapeDtypeStruct`.
          largest: leaves of more values stay separate arrays, as do those that are not floating-point.
          labels: of the tree's structure, or the beginning of it, with strings at its leaves: each label has separate
            buckets, which masks such as that of weight decay can then name.

        Raises:
          ValueError: `labels` do not fit the tree, or are no strings.
        """
        leaves, structure = jax.tree.flatten(tree)
        names = [""] * len(leaves) if labels is None else _spread_labels(labels, tree)
        ends: dict[str, int] = {}
        slots = []
        for leaf, label in zip(leaves, names, strict=True):
            shape, dtype = tuple(leaf.shape), leaf.dtype
            if math.prod(shape) > largest or not jnp.issubdtype(dtype, jnp.floating):
                slots.append(_Slot(None, 0, shape, dtype))
                continue
            bucket = f"{label}/{dtype}" if label else str(dtype)
            start = ends.get(bucket, 0)
            slots.append(_Slot(bucket, start, shape, dtype))
            ends[bucket] = start + _whole_blocks(shape)
        return cls(structure, tuple(slots))

    def pack(self, tree: PyTree) -> Packed:
        """The tree, or another of its structure and shapes, packed.

        Dtypes may differ from the plan's: float32 gradients of bfloat16 parameters stay float32. If the leaves of one
        bucket have different dtypes, they are promoted to one.

        Raises:
          ValueError: the structure or a shape is another.
        """
        leaves = self._checked(tree)
        parts: dict[str, list[Array]] = {}
        for slot, leaf in zip(self.slots, leaves, strict=True):
            if slot.bucket is not None:
                flat = jnp.ravel(leaf)
                fill = -flat.size % BLOCK
                parts.setdefault(slot.bucket, []).append(jnp.pad(flat, (0, fill)) if fill else flat)
        with jax.numpy_dtype_promotion("standard"):
            buckets = {name: jnp.concatenate(arrays) for name, arrays in parts.items()}
        unbucketed = tuple(x for slot, x in zip(self.slots, leaves, strict=True) if slot.bucket is None)
        return Packed(buckets, unbucketed)

    def unpack(self, packed: Packed) -> PyTree:
        """The tree of packed leaves.

        Raises:
          ValueError: it was packed by another plan.
        """
        planned: dict[str, tuple[int, ...]] = {}
        for slot in self.slots:
            if slot.bucket is not None:
                planned[slot.bucket] = (slot.start + _whole_blocks(slot.shape),)
        leaves = [slot.shape for slot in self.slots if slot.bucket is None]
        has = {name: jnp.shape(x) for name, x in packed.buckets.items()}, list(map(jnp.shape, packed.leaves))
        if has != (planned, leaves):
            raise ValueError(
                f"packed has buckets of shapes {has[0]} and leaves of shapes {has[1]}, and the plan {planned} and "
                f"{leaves}: unpack it with the plan that packed it"
            )
        return _unpack(self, packed)

    def _checked(self, tree: PyTree) -> list[Array]:
        leaves, structure = jax.tree.flatten(tree)
        if structure != self.structure:
            raise ValueError(f"tree has structure {structure}, and the buckets were planned for {self.structure}")
        for slot, leaf in zip(self.slots, leaves, strict=True):
            if tuple(leaf.shape) != slot.shape:
                raise ValueError(
                    f"a leaf has shape {tuple(leaf.shape)} where the buckets were planned for {slot.shape}"
                )
        return leaves


def _whole_blocks(shape: tuple[int, ...]) -> int:
    """Values that a leaf takes in its bucket."""
    return -(-math.prod(shape) // BLOCK) * BLOCK


def _spread_labels(labels: PyTree, tree: PyTree) -> list[str]:
    for label in jax.tree.leaves(labels):
        if not isinstance(label, str):
            raise ValueError(f"labels has {label!r} at a leaf; it must be a string")
    try:
        names = jax.tree.map(lambda label, part: jax.tree.map(lambda _: label, part), labels, tree)
    except ValueError as error:
        raise ValueError(f"labels must have the structure of tree, or the beginning of it: {error}") from error
    return jax.tree.leaves(names)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _unpack(plan: Buckets, packed: Packed) -> PyTree:
    return _slices(plan, packed)


def _slices(plan: Buckets, packed: Packed) -> PyTree:
    leaves, unbucketed = [], iter(packed.leaves)
    for slot in plan.slots:
        if slot.bucket is None:
            leaves.append(next(unbucketed))
        else:
            end = slot.start + math.prod(slot.shape)
            leaves.append(packed.buckets[slot.bucket][slot.start : end].reshape(slot.shape))
    return plan.structure.unflatten(leaves)


def _unpack_forward(plan: Buckets, packed: Packed) -> tuple[PyTree, None]:
    return _slices(plan, packed), None  # no custom_vjp, through which second derivatives would not come


def _unpack_backward(plan: Buckets, _: None, gradients: PyTree) -> tuple[Packed]:
    # One concatenation, where JAX would add up as many padded arrays as there are leaves.
    return (plan.pack(gradients),)


_unpack.defvjp(_unpack_forward, _unpack_backward)
