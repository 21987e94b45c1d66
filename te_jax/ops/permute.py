"""Sorting the rows of tokens by expert, and adding up what the experts return, by gathers in both directions."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from te_jax import sharding
from te_jax._core.arguments import is_whole_number
from te_jax._core.integers import as_int32
from te_jax._core.reverse_mode import reverse_mode_only
from te_jax._core.types import FLOAT_NAMES, FLOATS
from te_jax.ops.operands import as_array

__all__ = ["Permutation", "group_by_expert", "permute", "permute_weights", "unpermute"]


class Permutation(NamedTuple):
    """Where each choice of a token lies once rows are sorted by expert, from `group_by_expert`.

    Attributes:
      rows: int32 [*tokens, top_k], the row of each choice; -1 for one that has none.
      choices: int32 [num_rows], the choice of each row, counted over [*tokens, top_k]; -1 for padding.
      group_sizes: int32 [num_experts], rows of each expert, padding included. Rows after their sum are padding.
      dropped: int32 scalar, choices that found their expert full.
    """

    rows: Array
    choices: Array
    group_sizes: Array
    dropped: Array


def group_by_expert(
    experts: jax.typing.ArrayLike, num_experts: int, *, align: int = 1, capacity: int | None = None
) -> Permutation:
    r"""The permutation that sorts the choices of tokens by expert, and for an expert by token.

    With T tokens of K experts each, the number of rows is static, the largest that there can be:

        T K                                        for align = 1
        ⌊(T K + (align - 1) min(E, T K)) / align⌋ align

    or, where that is less, E ⌈capacity / align⌉ align. How many of them each expert has is known on the device only:
    one compiled program serves all loads, and nothing is copied to the host.

    The sort is over all tokens at hand. Where tokens are split over devices, call it inside `shard_map`, so that every
    device sorts its own.

    Args:
      experts: integers [*tokens, top_k], from `router`. A choice outside [0, num_experts) gets no row and does not
        count as dropped: subtract the first of the experts that a device holds, and it sorts the choices of these.
      num_experts: number of experts.
      align: rows of an expert are padded to a multiple of this; its group then begins at one too. Block-scaled GEMMs
        want 128.
      capacity: most choices that an expert takes, or None for all. Further ones, in the order of tokens, are dropped.

    Returns:
      Permutation(rows, choices, group_sizes, dropped).

    Raises:
      ValueError: an argument breaks a rule above; the message names it.

    Examples:
      >>> import jax.numpy as jnp
      >>> from te_jax import ops
      >>> permutation = ops.group_by_expert(jnp.array([[1], [0], [1]]), 2, align=2)
      >>> permutation.group_sizes.tolist(), permutation.choices.tolist(), permutation.rows[:, 0].tolist()
      ([2, 2], [1, -1, 0, 2], [2, 0, 3])
    """
    experts = as_array("experts", experts)
    if experts.ndim == 0 or experts.shape[-1] == 0 or not jnp.issubdtype(experts.dtype, jnp.integer):
        raise ValueError(
            f"experts have shape {experts.shape} and dtype {experts.dtype}; they must be integers [*tokens, top_k], "
            "as te_jax.ops.router returns them"
        )
    if sharding.is_explicit(experts) and (axes := sharding.axes_of_type(experts)):
        raise ValueError(
            f"experts are split over {sorted(axes)}, and the sort is over all tokens: call it inside shard_map, where "
            "each device sorts its own, or jax.reshard them to a PartitionSpec without these axes"
        )
    integers = {"num_experts": num_experts, "align": align, "capacity": 1 if capacity is None else capacity}
    for name, value in integers.items():
        if not (is_whole_number(value) and value >= 1):
            raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
    return _group_by_expert(experts, int(num_experts), int(align), None if capacity is None else int(capacity))


def permute(x: jax.typing.ArrayLike, permutation: Permutation) -> Array:
    r"""Rows of tokens, sorted by expert: result[r] = x[token of row r], and zeros in padding.

    The gradient adds up the rows of each token in float32: a gather too, in the same order in every run. What the
    gradient of padding holds is not read.

    Args:
      x: [*tokens, features], any dtype.
      permutation: from `group_by_expert`.

    Returns:
      [num_rows, features] in the dtype of x.

    Raises:
      ValueError: x does not have the tokens of the permutation.
      NotImplementedError: in forward mode.

    Examples:
      >>> import jax.numpy as jnp
      >>> from te_jax import ops
      >>> permutation = ops.group_by_expert(jnp.array([[1, 0], [1, 2]]), 3)
      >>> ops.permute(jnp.array([[10.0], [20.0]]), permutation)[:, 0].tolist()
      [10.0, 10.0, 20.0, 20.0]
    """
    x = as_array("x", x)
    _validate_permutation(permutation)
    tokens = permutation.rows.shape[:-1]
    if x.ndim != len(tokens) + 1 or x.shape[:-1] != tokens:
        raise ValueError(f"x has shape {x.shape}; the permutation is one of tokens {tokens}, so x must be [*tokens, d]")
    rows, choices = permutation.rows, permutation.choices
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return _rows_of_tokens(x, rows, choices)
    return _jitted(_permute)(*_together((x,), permutation, "permute"))


def unpermute(y: jax.typing.ArrayLike, permutation: Permutation, weights: jax.typing.ArrayLike | None = None) -> Array:
    r"""The rows of each token, added up: result[t] = Σ_k weights[t, k] · y[row of choice k of t].

    Choices without a row count as zeros. Sums are float32, in the order of choices, and rounded once. All gradients are
    gathers; rows of padding are not read, whatever they hold, and their gradient is zero.

    Args:
      y: [num_rows, features], float32, bfloat16 or float16; rows as those of `permute`.
      permutation: from `group_by_expert`.
      weights: [*tokens, top_k], any float dtype, from `router`, or None for ones. Their gradient needs y, which is then
        kept for the backward pass; weights that are multiplied into the experts' activations spare it
        (`permute_weights`).

    Returns:
      [*tokens, features] in the dtype of y.

    Raises:
      ValueError: an argument breaks a rule above; the message names it.
      NotImplementedError: in forward mode.

    Examples:
      >>> import jax.numpy as jnp
      >>> from te_jax import ops
      >>> permutation = ops.group_by_expert(jnp.array([[1, 0], [1, 2]]), 3)
      >>> y = jnp.array([[1.0], [2.0], [3.0], [4.0]])
      >>> ops.unpermute(y, permutation, jnp.array([[0.5, 0.5], [1.0, 0.0]]))[:, 0].tolist()
      [1.5, 3.0]
    """
    y = as_array("y", y)
    _validate_permutation(permutation)
    if y.dtype not in FLOATS:
        raise ValueError(f"y has dtype {y.dtype}; it must be {FLOAT_NAMES}: cast it")
    if y.ndim != 2 or y.shape[0] != permutation.choices.shape[0]:
        raise ValueError(
            f"y has shape {y.shape}; the permutation has {permutation.choices.shape[0]} rows, so y must be "
            f"[{permutation.choices.shape[0]}, features]"
        )
    if weights is None:
        return _jitted(_sum_of_rows)(*_together((y,), permutation, "unpermute"))
    return _jitted(_combine)(*_together((y, _as_weights(weights, permutation)), permutation, "unpermute"))


def permute_weights(weights: jax.typing.ArrayLike, permutation: Permutation) -> Array:
    """The weight of every row, zero in padding: result[r] = weights[choice of row r].

    Multiplied into the experts' activations before their last product, it makes `unpermute` a plain sum, whose backward
    pass does not need the experts' results.

    Args:
      weights: [*tokens, top_k], any float dtype, from `router`.
      permutation: from `group_by_expert`.

    Returns:
      [num_rows] in the dtype of the weights.

    Raises:
      ValueError: weights do not have the choices of the permutation.
      NotImplementedError: in forward mode.

    Examples:
      >>> import jax.numpy as jnp
      >>> from te_jax import ops
      >>> permutation = ops.group_by_expert(jnp.array([[1, 0], [1, 2]]), 3)
      >>> [round(w, 2) for w in ops.permute_weights(jnp.array([[0.5, 0.5], [0.9, 0.1]]), permutation).tolist()]
      [0.5, 0.5, 0.9, 0.1]
    """
    _validate_permutation(permutation)
    return _jitted(_of_choices)(*_together((_as_weights(weights, permutation),), permutation, "permute_weights"))


# ------------------------------------------------------------------------------------------------------- the sort


@functools.partial(jax.jit, static_argnums=(1, 2, 3), inline=sharding.INLINE)
def _group_by_expert(experts: Array, num_experts: int, align: int, capacity: int | None) -> Permutation:
    total = experts.size
    keys = as_int32(experts).reshape(total)
    valid = (keys >= 0) & (keys < num_experts)
    keys = jnp.where(valid, keys, num_experts)
    order = jnp.argsort(keys, stable=True).astype(jnp.int32)
    position = jnp.argsort(order).astype(jnp.int32)  # the inverse, which a scatter would give as well

    # One more group, without rows, for choices outside of the experts. By binary searches in sorted arrays: comparing
    # all with all would take an array [choices, experts].
    numbers = jnp.arange(num_experts + 1, dtype=jnp.int32)
    starts = _searchsorted(keys[order], numbers, "left")
    counts = jnp.append(starts[1:], jnp.int32(total)) - starts
    kept = counts if capacity is None else jnp.minimum(counts, capacity)
    kept = jnp.where(numbers < num_experts, kept, 0)
    sizes = -(-kept // align) * align
    ends = jnp.cumsum(sizes)
    group_starts = ends - sizes

    rank = position - starts[keys]
    rows = jnp.where(rank < kept[keys], group_starts[keys] + rank, -1)

    row = jnp.arange(most_rows(total, num_experts, align, capacity), dtype=jnp.int32)
    group = jnp.minimum(_searchsorted(ends, row, "right"), num_experts)
    rank = row - group_starts[group]
    place = jnp.clip(starts[group] + rank, 0, max(total - 1, 0))
    choices = jnp.where(rank < kept[group], order[place], -1) if total else jnp.full(row.shape, -1, jnp.int32)
    dropped = jnp.sum((counts - kept)[:num_experts], dtype=jnp.int32)
    return Permutation(rows.reshape(experts.shape), choices, sizes[:num_experts], dropped)


def _searchsorted(table: Array, values: Array, side: str) -> Array:
    return jnp.searchsorted(table, values, side=side, method="scan_unrolled").astype(jnp.int32)


def most_rows(choices: int, num_experts: int, align: int, capacity: int | None) -> int:
    """The largest sum that group sizes can have, padded to multiples of align."""
    most = (choices + (align - 1) * min(num_experts, choices)) // align * align
    return most if capacity is None else min(most, num_experts * (-(-capacity // align) * align))


# ------------------------------------------------------------------------------------------------------- the gathers
# Each is the other's transpose.


@jax.custom_vjp
def _permute(x: Array, rows: Array, choices: Array) -> Array:
    return _rows_of_tokens(x, rows, choices)


def _rows_of_tokens(x: Array, rows: Array, choices: Array) -> Array:
    tokens = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return _where_given(choices, tokens, choices // rows.shape[-1])


def _permute_forward(x: Array, rows: Array, choices: Array):
    return _permute(x, rows, choices), (rows, choices)


def _permute_backward(residuals, dy: Array):
    return _sum_of_rows(dy, *residuals), None, None


_permute.defvjp(_permute_forward, _permute_backward)


@jax.custom_vjp
def _sum_of_rows(y: Array, rows: Array, choices: Array) -> Array:
    del choices
    return _weighted_sum(y, rows, None)


def _sum_forward(y: Array, rows: Array, choices: Array):
    return _sum_of_rows(y, rows, choices), (rows, choices)


def _sum_backward(residuals, dout: Array):
    return _permute(dout, *residuals), None, None


_sum_of_rows.defvjp(_sum_forward, _sum_backward)


@jax.custom_vjp
def _combine(y: Array, weights: Array, rows: Array, choices: Array) -> Array:
    del choices
    return _weighted_sum(y, rows, weights)


def _combine_forward(y: Array, weights: Array, rows: Array, choices: Array):
    return _combine(y, weights, rows, choices), (y, weights, rows, choices)


def _combine_backward(residuals, dout: Array):
    y, weights, rows, choices = residuals
    of_rows = _of_choices(weights, rows, choices).astype(jnp.float32)
    dy = (_permute(dout, rows, choices).astype(jnp.float32) * of_rows[:, None]).astype(y.dtype)
    wide = dout.astype(jnp.float32)
    dweights = [
        jnp.sum(wide * _where_given(rows[..., k], y, rows[..., k]).astype(jnp.float32), axis=-1)
        for k in range(rows.shape[-1])
    ]
    return dy, jnp.stack(dweights, axis=-1).astype(weights.dtype), None, None


_combine.defvjp(_combine_forward, _combine_backward)


@jax.custom_vjp
def _of_choices(weights: Array, rows: Array, choices: Array) -> Array:
    del rows
    return _where_given(choices, weights.reshape(weights.size), choices)


def _of_choices_forward(weights: Array, rows: Array, choices: Array):
    return _of_choices(weights, rows, choices), (rows, choices)


def _of_choices_backward(residuals, dresult: Array):
    rows, choices = residuals
    return _of_rows(dresult, rows, choices), None, None


_of_choices.defvjp(_of_choices_forward, _of_choices_backward)


def values_of_choices(values: Array, permutation: Permutation) -> Array:
    """The transpose of `permute_weights`: the value [num_rows] of each choice's row, zero for one without."""
    return _of_rows(values, permutation.rows, permutation.choices)


@jax.custom_vjp
def _of_rows(values: Array, rows: Array, choices: Array) -> Array:
    del choices
    return _where_given(rows, values, rows)


def _of_rows_forward(values: Array, rows: Array, choices: Array):
    return _of_rows(values, rows, choices), (rows, choices)


def _of_rows_backward(residuals, dresult: Array):
    return _of_choices(dresult, *residuals), None, None


_of_rows.defvjp(_of_rows_forward, _of_rows_backward)


def _weighted_sum(y: Array, rows: Array, weights: Array | None) -> Array:
    """One gather for each choice, all in one loop of XLA's."""
    total: Any = None
    for k in range(rows.shape[-1]):
        term = _where_given(rows[..., k], y, rows[..., k]).astype(jnp.float32)
        if weights is not None:
            # Selected again: the weight of a choice that was dropped may be NaN.
            weighted = term * weights[..., k, None].astype(jnp.float32)
            term = jnp.where(rows[..., k, None] >= 0, weighted, 0.0)
        total = term if total is None else total + term
    return total.astype(y.dtype)


def _where_given(places: Array, table: Array, indices: Array) -> Array:
    """table[indices], zeros where `places` is negative. By selection, not by factors: 0 · NaN is NaN."""
    if table.shape[0] == 0:
        return jnp.zeros((*indices.shape, *table.shape[1:]), table.dtype)
    taken = table.at[jnp.maximum(indices, 0)].get(mode="promise_in_bounds")
    mask = (places >= 0).reshape(*places.shape, *(1,) * (table.ndim - 1))
    return jnp.where(mask, taken, jnp.zeros((), table.dtype))


# ----------------------------------------------------------------------------------------------------- arguments

_REVERSE_MODE = (
    "te_jax.ops.{} has derivatives in reverse mode (jax.grad, jax.vjp) only, by gathers; forward mode (jax.jvp, "
    "jax.jacfwd) has x[permutation.choices // top_k] and y[permutation.rows]"
)


def _together(values: tuple[Array, ...], permutation: Permutation, name: str) -> tuple[Array, ...]:
    """Operands of a gather, which all vary over the same mesh axes: JAX then sums their gradients over others."""
    values = reverse_mode_only(values, _REVERSE_MODE.format(name))
    return sharding.varying_together((*values, permutation.rows, permutation.choices))


@functools.cache
def _jitted(function: Any) -> Any:
    """Under jit even when called eagerly: one program, and the gathers of all choices in one loop."""
    return jax.jit(function, inline=sharding.INLINE)


def _validate_permutation(permutation: Any) -> None:
    if not isinstance(permutation, Permutation):
        raise ValueError(
            f"permutation is of type {type(permutation).__name__}; it must come from te_jax.ops.group_by_expert"
        )


def _as_weights(weights: jax.typing.ArrayLike, permutation: Permutation) -> Array:
    weights = as_array("weights", weights)
    if weights.shape != permutation.rows.shape or not jnp.issubdtype(weights.dtype, jnp.floating):
        raise ValueError(
            f"weights have shape {weights.shape} and dtype {weights.dtype}; the permutation is one of choices "
            f"{permutation.rows.shape}, and weights must be a float array of the same shape"
        )
    return weights
