"""FP8 beside plain operands, layer by layer, on one batch."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from te_jax._core import observe
from te_jax._core.terminal import aligned
from te_jax.debug._collect import Record
from te_jax.debug._functions import traced_with
from te_jax.debug.statistics import PRODUCTS, ROLES, LayerStatistics, Statistics, by_layer, rows_of, together
from te_jax.recipe import DelayedScaling, Recipe

_RESULTS = {"forward": "y", "dgrad": "dx", "wgrad": "dkernel"}


@dataclasses.dataclass(frozen=True)
class LayerErrors:
    """The relative errors of one layer in FP8, for the x and dy that it got.

    An error is the root mean square over tokens of ‖Δ‖ / ‖exact‖, or over features, whichever is larger. So outliers in
    a few tokens or features do not hide what the others lose. Zeros and values that are not finite do not count.

    Attributes:
      layer: its name, as in `with_statistics`; "layers/up[3]" of a stack.
      y, dx, dkernel: errors of the result and of both gradients; NaN for one that is not computed.
      nonfinite: share of the values of y, dx and dkernel that are NaN or infinite, the largest of the three.
      tensor: the one of which FP8 loses most, such as "kernel, error 0.004, 41.2% underflow".
    """

    layer: str
    y: float
    dx: float
    dkernel: float
    nonfinite: float
    tensor: str

    @property
    def largest(self) -> float:
        """The largest of the errors; infinite if there are values that are not finite."""
        known = [error for error in (self.y, self.dx, self.dkernel) if not math.isnan(error)]
        return math.inf if self.nonfinite else max(known, default=0.0)


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """The result of `compare`. Printed, it is a table.

    Attributes:
      layers: those in FP8, the largest error first.
      plain: layers that have no recipe and that FP8 cannot take, with the reason.
      first_nonfinite: the first layer, in the order of the backward pass, of which a gradient is not finite; None if
        all are.
      statistics: of their tensors, as `with_statistics` returns them, in NumPy.
      forward: names of the layers in FP8, in the order of the forward pass.
    """

    layers: tuple[LayerErrors, ...]
    plain: Mapping[str, str]
    first_nonfinite: str | None
    statistics: Mapping[str, LayerStatistics]
    forward: tuple[str, ...]

    def __str__(self) -> str:
        headings = ("layer", "y", "dx", "dkernel", "nonfinite", "worst tensor")
        cells = [
            (row.layer, *map(_number, (row.y, row.dx, row.dkernel)), f"{row.nonfinite:.2%}", row.tensor)
            for row in self.layers
        ]
        lines = [aligned(headings, cells, indent=0)]
        if self.first_nonfinite is not None:
            lines.append(f"the backward pass is not finite from {self.first_nonfinite} on")
        lines += [f"{name} stays as it is: {reason}" for name, reason in self.plain.items()]
        return "\n".join(lines)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the errors of all layers in the order of the forward pass.

        Args:
          path: file to write, of a format that matplotlib knows by its suffix.

        Raises:
          ImportError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ImportError("a plot needs matplotlib, which te_jax[train] installs; str() is a table") from None
        by_name = {row.layer: row for row in self.layers}
        rows = [by_name[name] for name in self.forward]
        # Figure, not pyplot: no global state, and it draws without a display.
        figure = Figure(figsize=(max(6.0, 0.22 * len(rows)), 4.5), dpi=150, layout="constrained")
        axes: Any = figure.subplots()
        for field, color in (("y", "#2563c9"), ("dx", "#d9641e"), ("dkernel", "#7a8294")):
            axes.plot([getattr(row, field) for row in rows], "o", markersize=4, color=color, label=field)
        axes.set_xticks(range(len(rows)), [row.layer for row in rows], rotation=90, fontsize=6)
        axes.set_yscale("log")
        axes.set_ylabel("relative error")
        axes.legend(frameon=False, ncols=3)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path)


def compare(
    loss: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    recipe: Recipe | None = None,
) -> Comparison:
    """Runs a loss and its gradient once, and compares each layer in FP8 with the same layer of plain operands.

    Each layer gets the x and dy that it has in FP8, so that errors are those of the layer alone, and multiplies them a
    second time by XLA, in the dtype of x with float32 sums. That takes the memory of plain operands of all layers until
    the backward pass, unless the loss recomputes them (`jax.checkpoint`).

    Products of `te_jax.ops.linear_cross_entropy` are compared where they are in FP8, dkernel by chunks of tokens.

    Args:
      loss: (*args) -> a scalar. It may be jitted and call layers on any mesh, as for `with_statistics`.
      args: parameters and a batch. Leaves that are no arrays are static.
      argnums: as in `jax.grad`. With DelayedScaling, its states must be among these arguments.
      recipe: for layers of `te_jax.ops.dense` and `grouped_dense` that have none; None compares only layers in FP8. Not
        DelayedScaling, which needs a state.

    Returns:
      `Comparison`, with one row for each layer.

    Raises:
      ValueError: recipe is none of these, or no layer is in FP8; and as `with_statistics`.

    Examples:
      >>> import jax, jax.numpy as jnp, te_jax
      >>> kernels = jax.random.normal(jax.random.key(0), (2, 64, 64)) / 8
      >>> params = {"up": kernels[0], "down": kernels[1].at[0, 0].set(1e4)}
      >>> def loss(params, x):
      ...     return te_jax.ops.dense(jax.nn.relu(te_jax.ops.dense(x, params["up"])), params["down"]).sum()
      >>> found = te_jax.debug.compare(loss, params, jnp.ones((16, 64)), recipe=te_jax.recipe.CurrentScaling())
      >>> found.layers[0].layer
      'down'
    """
    if recipe is not None and (not isinstance(recipe, Recipe) or isinstance(recipe, DelayedScaling)):
        raise ValueError(
            f"recipe is {recipe!r}; it must be a recipe without a state, such as te_jax.recipe.CurrentScaling(), or "
            "None for layers that have one"
        )
    request = observe.Request(ROLES, PRODUCTS, results=True, recipe=recipe)
    run = traced_with(jax.value_and_grad(loss, argnums), request, _collected, "te_jax.debug.compare")
    _, collected = run(*args)
    errors, statistics, order = jax.device_get(collected)
    if not errors:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in order.plain)
        raise ValueError(
            f"loss has no layer in FP8{f' ({reasons})' if reasons else ''}: give its layers a recipe, or pass recipe, "
            "for those of te_jax.ops.dense that have none"
        )
    rows = {label: row for name in errors for label, row in _rows(name, errors[name], statistics.get(name, {}))}
    forward = [label for product, label in order.computed if product == "forward" and label in rows]
    broken = [
        label
        for product, label in order.computed
        if product != "forward" and label in rows and rows[label][1].get(product, 0.0)
    ]
    layers = sorted((row for row, _ in rows.values()), key=lambda row: -row.largest)
    first = broken[0] if broken else None
    return Comparison(tuple(layers), dict(order.plain), first, statistics, tuple(dict.fromkeys(forward)))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Order:
    """Facts that are known while tracing.

    Attributes:
      plain: layers that stay as they are, and why.
      computed: (product, layer) of all results in the order in which they are computed.
    """

    plain: tuple[tuple[str, str], ...]
    computed: tuple[tuple[str, str], ...]


def _collected(records: list[Record], names: Mapping[Any, str]) -> Any:
    """({layer: {product: raw statistics}} of results, statistics of tensors, order)."""
    parts: dict[str, dict[str, list[dict[str, Any]]]] = {}
    first_of_loop: dict[int, int] = {}
    results = [record for record in records if record.static.role == "result"]
    for record in results:
        for loop, _ in record.loops:
            first_of_loop[loop] = min(record.order, first_of_loop.get(loop, record.order))
    computed = []
    for record in results:
        name, (entry,) = names[record.source.layer], record.static.entries
        (product,) = entry.products
        fields = dict(zip(entry.fields, record.statistics, strict=True))
        parts.setdefault(name, {}).setdefault(product, []).append(fields)
        for index in np.ndindex(fields["count"].shape):
            place: list[int] = []
            for (loop, backwards), i in zip(reversed(record.loops), index, strict=False):
                place += [first_of_loop[loop], -i if backwards else i]
            computed.append(((*place, record.order), product, _label(name, index)))
    plain = {names[r.source.layer]: r.static.note for r in records if r.static.role == "plain"}
    order = _Order(tuple(plain.items()), tuple((product, label) for _, product, label in sorted(computed)))
    errors = {name: {product: together(each) for product, each in of.items()} for name, of in parts.items()}
    return errors, by_layer(Statistics(), records, names), order


def _label(name: str, index: tuple[int, ...]) -> str:
    return name + "".join(f"[{i}]" for i in index)


def _rows(
    name: str, of_products: Mapping[str, Mapping[str, Any]], statistics: Any
) -> list[tuple[str, tuple[LayerErrors, dict[str, float]]]]:
    """(layer, (its row, share of values of each product that are not finite)), one for each layer of a stack."""
    rows = []
    shapes = {np.shape(raw["count"]) for raw in of_products.values()}
    for index in np.ndindex(max(shapes, key=len)):
        errors, nonfinite = dict.fromkeys(_RESULTS, math.nan), {}
        for product, raw in of_products.items():
            fields = {field: float(value[index[: np.ndim(value)]]) for field, value in raw.items()}
            errors[product] = math.sqrt(
                max(fields[f"{each}_errors"] / max(fields[f"{each}s"], 1.0) for each in ("row", "col"))
            )
            nonfinite[product] = fields["nonfinite"] / max(fields["count"], 1.0)
        label = _label(name, index)
        renamed = {_RESULTS[product]: error for product, error in errors.items()}
        row = LayerErrors(label, **renamed, nonfinite=max(nonfinite.values()), tensor=_worst(label, name, statistics))
        rows.append((label, (row, nonfinite)))
    return rows


def _worst(label: str, name: str, statistics: Any) -> str:
    """Tensor that loses most in FP8, as text."""
    worst, text = -1.0, ""
    for layer, role, _, values in rows_of({name: statistics}):
        if layer not in (label, name):
            continue
        shares = {
            "not finite": values["nonfinite"],
            "underflow": values["underflow"],
            "saturated": values["saturation"],
        }
        kind = max(shares, key=lambda kind: shares[kind])
        error = math.inf if math.isnan(values["error"]) else values["error"]
        score = max(error, shares[kind])
        if score > worst:
            lost = f", {shares[kind]:.1%} {kind}" if shares[kind] >= 5e-4 else ""
            worst, text = score, f"{role}, error {values['error']:.3f}{lost}"
    return text


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4f}"
