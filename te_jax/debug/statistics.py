"""Statistics of the tensors that layers quantize."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from te_jax._core import observe
from te_jax._core.arguments import as_flag
from te_jax._core.terminal import aligned
from te_jax.debug._collect import Record
from te_jax.debug._functions import traced_with
from te_jax.debug._names import matches
from te_jax.recipe import Product, Role

ROLES: tuple[Role, ...] = get_args(Role)
PRODUCTS: tuple[Product, ...] = get_args(Product)
_INFINITY, _QUIET_NAN = 0x7F800000, 0x7FC00000

LayerStatistics = Mapping[str, Mapping[str, "TensorStatistics"]]


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Which statistics `with_statistics` returns. Hashable.

    Args:
      rules: patterns of names of layers, as in the rules of `te_jax.nnx.convert`, such as ("layers/*/mlp/*",); None for
        all layers.
      roles: of tensors: any of "activation", "kernel" and "gradient".
      products: that read the tensors: any of "forward", "dgrad" and "wgrad".
      exponents: histograms of exponents too.

    Raises:
      ValueError: an argument is none of these.
    """

    rules: tuple[str, ...] | None = None
    roles: tuple[Role, ...] = ROLES
    products: tuple[Product, ...] = PRODUCTS
    exponents: bool = False

    def __post_init__(self) -> None:
        if self.rules is not None:
            rules = self.rules
            known = isinstance(rules, Collection) and not isinstance(rules, str | bytes)
            if not known or not rules or not all(isinstance(pattern, str) for pattern in rules):
                raise ValueError(
                    f"rules is {rules!r}; it must be a tuple of patterns of names, such as ('layers/*/mlp/*',), or "
                    "None for all layers"
                )
            object.__setattr__(self, "rules", tuple(rules))
        for name, allowed in (("roles", ROLES), ("products", PRODUCTS)):
            value: Any = getattr(self, name)
            names = tuple(value) if isinstance(value, Collection) and not isinstance(value, str | bytes) else ()
            if not names or any(each not in allowed for each in names):
                raise ValueError(f"{name} is {value!r}; it must be a tuple of one or more names out of {allowed}")
            object.__setattr__(self, name, tuple(each for each in allowed if each in names))
        object.__setattr__(self, "exponents", as_flag("exponents", self.exponents))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        *("amax", "smallest_scale", "largest_scale", "underflow", "saturation", "nonfinite", "error"),
        "exponents",
    ),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class TensorStatistics:
    """Statistics of one tensor as one product reads it: x, and the values Q(x) that its FP8 codes stand for.

    Q(x) of a transposed copy is computed again, from x and the copy's scales.

    Every field is a maximum or a quotient of sums, over all devices, examples of `jax.vmap`, calls and iterations with
    this kernel. Float32 subnormals count as zero.

    Attributes:
      amax: float32 [*layers], the largest |x|; NaN if any value is, else infinite if any is, as in
        `te_jax.ops.quantize`.
      smallest_scale, largest_scale: float32 [*layers], of the scales by which x is multiplied; NaN if no amax that a
        scale follows from is finite.
      underflow: float32 [*layers], the share of the values other than zero, and subnormals, that became zero.
      saturation: float32 [*layers], the share of these that were beyond the largest FP8 value, and became that.
      nonfinite: float32 [*layers], the share of all values that are NaN or infinite.
      error: float32 [*layers], ‖x - Q(x)‖ / ‖x‖ over the finite values of x; 0 for zeros, NaN where Q(x) is NaN because
        another value of its scale is not finite, or where ‖x‖ leaves float32.
      exponents: float32 [*layers, 256], the share of all values whose float32 has exponent bits i: zeros are in 0,
        |x| in [2^(i-127), 2^(i-126)) in i, NaN and infinities in 255. None unless asked for.
    """

    amax: Array
    smallest_scale: Array
    largest_scale: Array
    underflow: Array
    saturation: Array
    nonfinite: Array
    error: Array
    exponents: Array | None = None


def with_statistics(
    function: Callable[..., Any], statistics: Statistics = Statistics()
) -> Callable[..., tuple[Any, dict[str, LayerStatistics]]]:
    """A function of the same arguments that returns (result, statistics of the tensors that its layers quantize).

    The statistics are arrays that the program computes beside its results. So compile a second step with them, and run
    it instead of the first as often as you want to look; the first is what it was.

        step = jax.jit(train_step, donate_argnums=0)
        step_with_statistics = jax.jit(te_jax.debug.with_statistics(train_step), donate_argnums=0)

    A layer has the path of its kernel in the arguments as its name, as `te_jax.nnx.convert` writes it: "layers/0/up"
    for params["layers"][0]["up"] or params["layers"][0]["up"]["kernel"]. Kernels are followed through casts, layouts
    and slices, and through jit, checkpoint, scan, while_loop, cond and shard_map. In a scan over stacked kernels the
    fields of a layer have a first dimension, that of the stack. A kernel that does not come from an argument is called
    by its operation and its number, such as "dense 3", behind the names of `jax.named_scope` around it.

    Layers in FP8 with activations, gated MLPs and experts are then computed without the kernels that fuse an activation
    with its quantization, with equal values up to the rounding of the activation. An x or a kernel that comes as a
    QuantizedArray has no statistics, except for kernels that FSDP quantizes: give this step the plain kernels, which
    layers quantize to the same bits.

    Args:
      function: a loss, its `jax.value_and_grad`, or a whole step. Statistics of gradients need the backward pass in
        it. Leaves of its arguments that are no arrays are static, and must be hashable.
      statistics: which of them.

    Returns:
      A function that returns (result, {layer: {role: {product: TensorStatistics}}}), layers in the order of the forward
      pass. It can be jitted, and not differentiated.

    Raises:
      ValueError: statistics is no `Statistics`; a rule matches no layer; or an argument is neither array nor hashable.
      NotImplementedError: the function is differentiated, or calls a layer where its tensors are out of reach.

    Examples:
      >>> import jax, jax.numpy as jnp, te_jax
      >>> params, x = {"up": {"kernel": jnp.ones((32, 16))}}, jnp.full((4, 32), 3.0).at[0, 0].set(1e-7)
      >>> def loss(params, x):
      ...     return te_jax.ops.dense(x, params["up"]["kernel"], recipe=te_jax.recipe.CurrentScaling()).sum()
      >>> step = jax.jit(te_jax.debug.with_statistics(jax.value_and_grad(loss)))
      >>> _, statistics = step(params, x)
      >>> found = statistics["up"]["activation"]["forward"]
      >>> float(found.amax), float(found.underflow), float(found.saturation)
      (3.0, 0.0078125, 0.0)
    """
    if not isinstance(statistics, Statistics):
        raise ValueError(f"statistics is {statistics!r}; it must be a te_jax.debug.Statistics")
    if not callable(function):
        raise ValueError(f"function is {function!r}; it must be a function of arrays, such as a training step")
    request = observe.Request(statistics.roles, statistics.products, statistics.exponents)
    finish = functools.partial(by_layer, statistics)
    return traced_with(function, request, finish, "te_jax.debug.with_statistics")


def by_layer(
    statistics: Statistics, records: list[Record], names: Mapping[Any, str]
) -> dict[str, dict[str, dict[str, TensorStatistics]]]:
    """{layer: {role: {product: statistics}}}, as far as they are asked for, layers in the order of the forward pass."""
    check_rules(statistics.rules, list(names.values()))
    parts: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    # Kernels that iterations share are quantized before a loop.
    for record in sorted(records, key=lambda record: (record.static.role != "activation", record.order)):
        name, static = names[record.source.layer], record.static
        if static.role not in ROLES or not matches(name, statistics.rules):
            continue
        left = iter(record.statistics)
        for entry in static.entries:
            fields = {field: next(left) for field in entry.fields}
            for product in entry.products:
                parts.setdefault((name, static.role, product), []).append(fields)
    layers: dict[str, dict[str, dict[str, TensorStatistics]]] = collections.OrderedDict()  # dicts are sorted by jit
    for (name, role, product), several in parts.items():
        layers.setdefault(name, {}).setdefault(role, {})[product] = _statistics(together(several))
    return layers


def check_rules(rules: Sequence[str] | None, names: Sequence[str]) -> None:
    """Raises ValueError if one of the patterns matches none of the layers."""
    for pattern in rules or ():
        if not any(matches(name, (pattern,)) for name in names):
            known = ", ".join(dict.fromkeys(names)) or "no layers in FP8"
            raise ValueError(f"rules has {pattern!r}, which matches no layer in FP8 of function; it has {known}")


def together(parts: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """The raw statistics of all parts of a tensor together."""
    shapes = {tuple(np.shape(part[field]) for field in part) for part in parts}
    if len(shapes) > 1:  # one call is in a loop over the layers, and another is not
        parts = [{field: _of_all_layers(field, value) for field, value in part.items()} for part in parts]
    first, *later = parts
    whole = dict(first)
    for other in later:
        whole = {field: observe.combined(observe.KINDS[field], whole[field], other[field]) for field in whole}
    return whole


def _of_all_layers(field: str, value: Array) -> Array:
    while value.ndim > (field == "exponents"):
        value = observe.reduced(observe.KINDS[field], value)
    return value


def _statistics(raw: Mapping[str, Array]) -> TensorStatistics:
    bits = jnp.where(raw["amax_bits"] > _INFINITY, _QUIET_NAN, raw["amax_bits"])
    known = raw["smallest_scale"] <= raw["largest_scale"]
    known_norm = (raw["norm"] > 0.0) & jnp.isfinite(raw["norm"])
    norm = jnp.where(known_norm, raw["norm"], jnp.nan)  # an error beside an infinite norm is not 0
    error = jnp.where(raw["nonzero"] == 0.0, 0.0, raw["error_norm"] / norm)
    exponents = raw.get("exponents")
    return TensorStatistics(
        amax=lax.bitcast_convert_type(bits, jnp.float32),
        smallest_scale=jnp.where(known, raw["smallest_scale"], jnp.nan),
        largest_scale=jnp.where(known, raw["largest_scale"], jnp.nan),
        underflow=_share(raw["underflows"], raw["nonzero"]),
        saturation=_share(raw["saturated"], raw["nonzero"]),
        nonfinite=_share(raw["nonfinite"], raw["count"]),
        error=error,
        exponents=None if exponents is None else _share(exponents, raw["count"][..., None]),
    )


def _share(part: Array, whole: Array) -> Array:
    return part / jnp.maximum(whole, 1.0)


# ------------------------------------------------------------------------------------------------------ for people

FIELDS = tuple(field.name for field in dataclasses.fields(TensorStatistics) if field.name != "exponents")


def scalars(statistics: Mapping[str, LayerStatistics]) -> dict[str, float]:
    """Statistics as numbers by name, for a log or TensorBoard, without histograms.

    Args:
      statistics: of `with_statistics`, on the host or on devices.

    Returns:
      {"<layer>/<role>/<product>/<field>": value}; of stacked layers, "<layer>[<index>]/…".
    """
    return {
        "/".join((name, role, product, field)): value
        for name, role, product, values in rows_of(statistics)
        for field, value in values.items()
    }


def table(statistics: Mapping[str, LayerStatistics], *, sort_by: str = "error", most: int | None = None) -> str:
    """Statistics as an aligned table, the largest of a field first; products that read equal values share a line.

    Args:
      statistics: of `with_statistics`.
      sort_by: a field of `TensorStatistics`.
      most: number of lines; None for all.

    Raises:
      ValueError: sort_by is no such field.
    """
    if sort_by not in FIELDS:
        raise ValueError(f"sort_by is {sort_by!r}; it must be one of {', '.join(map(repr, FIELDS))}")
    merged: dict[tuple[str, str, tuple[str, ...]], tuple[list[str], dict[str, float]]] = {}
    for name, role, product, values in rows_of(statistics):
        key = name, role, tuple(map(str, values.values()))
        merged.setdefault(key, ([], values))[0].append(product)
    rows = [(name, role, ", ".join(products), values) for (name, role, _), (products, values) in merged.items()]
    rows.sort(key=lambda row: -_sortable(row[3][sort_by]))
    headings = ("layer", "role", "products", "amax", "scale", "underflow", "saturation", "nonfinite", "error")
    return aligned(headings, [_cells(*row) for row in rows[:most]], indent=0)


def _sortable(value: float) -> float:
    return np.inf if np.isnan(value) else value


def _cells(name: str, role: str, products: str, values: Mapping[str, float]) -> list[str]:
    smallest, largest = (f"{values[field]:.4g}" for field in ("smallest_scale", "largest_scale"))
    scale = smallest if smallest == largest else f"{smallest} to {largest}"
    shares = (f"{values[field]:.2%}" for field in ("underflow", "saturation", "nonfinite"))
    return [name, role, products, f"{values['amax']:.4g}", scale, *shares, f"{values['error']:.4f}"]


def rows_of(statistics: Any) -> list[tuple[str, str, str, dict[str, float]]]:
    """(layer, role, product, fields) of each tensor."""
    rows = []
    for name, roles in jax.device_get(statistics).items():
        for role, products in roles.items():
            for product, of in products.items():
                for index in np.ndindex(np.shape(of.amax)):
                    label = name + "".join(f"[{i}]" for i in index)
                    rows.append((label, role, product, {field: float(getattr(of, field)[index]) for field in FIELDS}))
    return rows
