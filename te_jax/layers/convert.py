"""The common part of `te_jax.nnx.convert` and `te_jax.flax.convert`: which layers are converted, and the report."""

from __future__ import annotations

import copyreg
import dataclasses
import fnmatch
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax
import numpy as np

from te_jax._core.arguments import kind_of
from te_jax._core.types import FP8_ALIGNMENT
from te_jax.layers import linear
from te_jax.recipe import DelayedScaling, Recipe

Rules = Sequence[tuple[str, Recipe | None]]

_HEADS = {
    *("head", "lm_head", "output_head", "logits", "logitdense", "logit_dense", "logits_dense"),
    *("classifier", "unembed", "unembedding"),
}
_ROUTERS = {"router", "routers", "router_logits"}


@dataclasses.dataclass(frozen=True)
class KernelsLayer:
    """For `layers=` of `convert`: which parameters of a class of yours are kernels, whatever else its `__call__` does.

        layers={MyEinsum: KernelsLayer(("w",))}
        layers={MoE: KernelsLayer(("gate_proj", "up_proj", "down_proj"), experts=("top_k", "num_experts"))}

    The `__call__` of the class runs as it is, except for its products of an array and a kernel: those of `jnp.dot`,
    `jnp.einsum`, `jax.lax.dot_general` and `jax.lax.ragged_dot` run in FP8. Before its product a kernel may be cast,
    multiplied by a number, transposed, reshaped, sliced and joined with others, also inside of `jax.jit`,
    `jax.checkpoint`, `jax.lax.scan`, `jax.lax.cond` and `jax.shard_map`. Any other use of a kernel is an error in the
    call, and so is a kernel in no product: what the report lists in FP8 is multiplied in FP8 alone.

    With `DelayedScaling` each kernel has a state, which all its products share; `jax.lax.ragged_dot` takes none.

    Attributes:
      kernels: the attributes (NNX) or parameters (Linen) that are kernels, or attributes that have their names; in
        Linen "experts/w" is the parameter w of the submodule experts. Those of experts, and of other products of
        `jax.lax.ragged_dot`, must have features in and out in multiples of 16.
      experts: how many experts a token meets, and how many there are, as numbers or as the attributes that have them;
        None where there are none, or if the report shall count kernels whole.
    """

    kernels: tuple[str, ...]
    experts: tuple[int | str, int | str] | None = None

    def __post_init__(self) -> None:
        names = self.kernels
        if not isinstance(names, tuple | list) or not names or not all(isinstance(name, str) for name in names):
            raise ValueError(
                f"kernels is {names!r}; it must be the names of kernels in a tuple, such as ('gate', 'up')"
            )
        object.__setattr__(self, "kernels", tuple(names))

    def names(self, module: object) -> tuple[str, ...]:
        """The names of the kernels in a module."""
        values = ((name, getattr(module, name, None)) for name in self.kernels)
        return tuple(value if isinstance(value, str) else name for name, value in values)

    def share(self, module: object) -> Fraction | None:
        """The share of the kernels that a token meets, if it is known."""
        if self.experts is None:
            return None
        met, number = (getattr(module, n, None) if isinstance(n, str) else n for n in self.experts)
        return Fraction(met, number) if isinstance(met, int) and isinstance(number, int) else None


Layers = Mapping[type | str, KernelsLayer]

_GEMMA_4, _QWEN_3 = ("num_experts_per_datapoint", "num_experts"), ("experts_per_tok", "num_experts")
_KNOWN: Layers = {
    "flax.nnx.nn.lora.LoRALinear": KernelsLayer(("kernel",)),
    "gemma.gm.nn._layers.Einsum": KernelsLayer(("weight_name",)),
    "gemma.gm.nn.gemma4._layers.Einsum": KernelsLayer(("w",)),
    "gemma.gm.nn.gemma4._moe.MoERagged": KernelsLayer(("gating_einsum/w", "linear/w"), _GEMMA_4),
    "maxtext.layers.moe.RoutedMoE": KernelsLayer(("wi_0", "wi_1", "wo"), ("num_experts_per_tok", "num_experts")),
    **dict.fromkeys(
        (f"tunix.models.{name}.model.Einsum" for name in ("gemma", "gemma3", "llama3", "qwen2", "qwen3")),
        KernelsLayer(("w",)),
    ),
    "tunix.models.gemma4.layers.Einsum": KernelsLayer(("w",)),
    "tunix.models.gemma4.moe.MoERagged": KernelsLayer(("gating_einsum", "linear"), _GEMMA_4),
    "tunix.models.qwen3.model.MoELayer": KernelsLayer(("gate_proj", "up_proj", "down_proj"), _QWEN_3),
}
"""Classes of libraries, by name: nothing is imported for them."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """One row of a `Report`: a kernel or an embedding, and the layer that has it.

    Attributes:
      path: of the layer in the model, such as "layers/0/mlp/up"; that of the kernel, such as "layers/0/moe/gate", where
        a module that is no linear layer has several.
      kind: the class of the layer and the shape of its kernel.
      recipe: how its products are quantized now, or None.
      reason: why the conversion left the layer alone, or the `precision` that FP8 replaces; empty for neither.
      other_paths: further places of the same layer in the model.
      flops: of its products for one token in the forward pass, in all places: twice the values of the kernel that a
        token meets. 0 for an embedding, which is looked up, and where they are not known.
      all_experts: whether flops counts a kernel with several matrices whole, though a token may meet some of them only.
      padding: FLOPs that FP8 adds to these, as its products pad features to multiples of 16.
    """

    path: str
    kind: str
    recipe: Recipe | None
    reason: str = ""
    other_paths: tuple[str, ...] = ()
    flops: int = 0
    all_experts: bool = False
    padding: int = 0


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """The outcome of a conversion for each layer. Printed, it is a table: layers that differ in numbers are one row.

    A conversion does not fuse norms with the layers after them, nor gate, up and down of an MLP: which results go where
    stands in the functions of a model, and not in its structure. Use te_jax's modules for that.

    A line below the table counts kernels, and the FLOPs of one token in their products and in those of LoRA. Attention,
    and embeddings, which are looked up, are in neither count. If an embedding may be the output head too, a line says
    that its product is not counted, and so does one for experts of which a token may meet some only.

    Attributes:
      layers: one for each kernel and embedding.
      unused_rules: patterns of rules that match none of these layers.
    """

    layers: tuple[Layer, ...]
    unused_rules: tuple[str, ...] = ()

    @property
    def converted(self) -> tuple[Layer, ...]:
        """The layers that multiply in FP8."""
        return tuple(layer for layer in self.layers if layer.recipe is not None)

    @property
    def skipped(self) -> tuple[Layer, ...]:
        """The layers that do not, each with its reason."""
        return tuple(layer for layer in self.layers if layer.recipe is None)

    def __repr__(self) -> str:
        rows: dict[tuple[str, str, str], list[Layer]] = {}
        for layer in self.layers:
            outcome = _brief(layer.recipe) if layer.recipe is not None else "-"
            outcome += f" ({layer.reason})" if layer.reason else ""
            rows.setdefault((re.sub(r"\d+", "*", layer.path), layer.kind, outcome), []).append(layer)
        table = [("layer", "kind", "recipe")]
        for (pattern, kind, outcome), layers in rows.items():
            path = layers[0].path if len(layers) == 1 else f"{pattern} ×{len(layers)}"
            others = layers[0].other_paths if len(layers) == 1 else ()
            table.append((" = ".join((path or "(the model)", *others)), kind, outcome))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]
        lines += self._totals()
        lines += [f"no layer has a path that matches the rule {pattern!r}" for pattern in self.unused_rules]
        return "\n".join(lines)

    def _totals(self) -> list[str]:
        tables = [layer for layer in self.layers if layer.reason == EMBEDDING]
        kernels = [layer for layer in self.layers if layer.reason not in (EMBEDDING, ADAPTER)]
        count, flops = f"{len(self.converted)} of {len(kernels)} kernels", sum(layer.flops for layer in self.layers)
        if not flops:
            return [f"{count} in FP8"]
        share = 100 * sum(layer.flops for layer in self.converted) / flops
        lines = [f"{count}, {math.floor(share)}% of the FLOPs of a token, in FP8"]
        if padded := [layer for layer in self.converted if layer.padding]:
            more = 100 * sum(layer.padding for layer in padded) / sum(layer.flops for layer in self.converted)
            lines.append(
                f"features that are no multiples of {FP8_ALIGNMENT} are padded in {len(padded)} of these, with "
                f"{math.ceil(more)}% more FLOPs in FP8"
            )
        if whole := sum(layer.all_experts for layer in kernels):
            lines.append(f"kernels counted with all experts, as it is not known how many a token meets: {whole}")
        if tables and not any(_is_head(path) for layer in kernels for path in (layer.path, *layer.other_paths)):
            lines.append(
                "no kernel is an output head by its name: if an embedding is it too, its product is not counted"
            )
        return lines


def report(layers: Iterable[Layer], rules: Rules) -> Report:
    """The report of a conversion by rules."""
    layers = tuple(layers)
    paths = [path for layer in layers for path in (layer.path, *layer.other_paths)]
    return Report(layers, tuple(pattern for pattern, _ in rules if not any(_matches(p, pattern) for p in paths)))


def validate(recipe: object, rules: Any) -> tuple[tuple[str, Recipe | None], ...]:
    """The rules as a tuple.

    Raises:
      ValueError: recipe is none, or rules are not pairs of a pattern and a recipe.
    """
    if not isinstance(recipe, Recipe | None):
        raise ValueError(
            f"recipe is {_shown(recipe)}; it must be a recipe, such as te_jax.recipe.BlockScaling(), or None; "
            "the model comes before it"
        )
    if isinstance(rules, Iterable) and not isinstance(rules, str):
        rules = tuple(tuple(rule) if isinstance(rule, Sequence) else rule for rule in rules)
        if all(_is_rule(rule) for rule in rules):
            return rules
    raise ValueError(
        f"rules are {_shown(rules)}; they must be pairs of a pattern of paths and a recipe or None, such as "
        "[('layers/*/attention/*', None), ('*/mlp/*', te_jax.recipe.BlockScaling())]"
    )


def _shown(value: object) -> str:
    """A value for errors; of one that fills screens, such as a model, its type."""
    text = repr(value)
    return kind_of(value) if "\n" in text or len(text) > 200 else text


def validate_layers(layers: Any) -> Layers:
    """The layers, with those of libraries that we know.

    Raises:
      ValueError: it does not give a `KernelsLayer` for classes or their names.
    """
    pairs = layers.items() if isinstance(layers, Mapping) else ((None, layers),)
    for layer, how in pairs:
        if not isinstance(layer, type | str) or not isinstance(how, KernelsLayer):
            raise ValueError(
                f"layers is {_shown(layers)}; it must give a KernelsLayer for each class or its full name, such as "
                "{MyEinsum: KernelsLayer(('w',))}, which names the kernels of the class"
            )
    return {**_KNOWN, **layers}


def entry_of(layers: Layers, layer: type) -> KernelsLayer | None:
    """The entry of a class, or of one that it inherits `__call__` from."""
    for base in layer.__mro__:
        name = f"{base.__module__}.{base.__qualname__}"
        for key in (base, name):
            if key in layers:
                return layers[key] if layer.__call__ is base.__call__ else None
    return None


def is_token(name: str, shape: Sequence[int]) -> bool:
    """Whether a parameter is a class or register token, which is added to a sequence: nothing multiplies by it."""
    return math.prod(shape[:-1]) == 1 or bool(re.search(r"(token|register)s?$", name.lower()))


def layer_of_kernel(
    path: str,
    module_class: type,
    shape: Sequence[int] | None,
    recipe: Recipe | None,
    reason: str,
    other_paths: tuple[str, ...] = (),
    *,
    experts: bool = False,
    share: Fraction | None = None,
    sizes: Sequence[int] = (),
) -> Layer:
    """The row of a kernel.

    Args:
      shape: of the kernel, if it has one.
      sizes: its features in and out, if they are known; those of a matrix are.
      experts: whether it may have a matrix for each expert.
      share: of these that a token meets; None if that is not known.
    """
    kind = module_class.__name__ if shape is None else f"{module_class.__name__} {tuple(shape)}"
    values = 0 if shape is None or reason == EMBEDDING else math.prod(shape)
    flops = int(2 * values * (share or 1)) * (1 + len(other_paths))
    sizes = shape if shape is not None and len(shape) == 2 else sizes
    padded = math.prod(-(-size // FP8_ALIGNMENT) * FP8_ALIGNMENT for size in sizes)
    padding = 0 if recipe is None or not values else flops * padded // math.prod(sizes) - flops
    return Layer(path, kind, recipe, reason, other_paths, flops, experts and share is None and values > 0, padding)


def obstacle_in_kernel(
    how: KernelsLayer, shape: Sequence[int], dtype: jax.typing.DTypeLike, recipe: Recipe | None
) -> str | None:
    """Why FP8 cannot take a kernel of a `KernelsLayer`, if so. Some sizes are known in the call alone."""
    if len(shape) < 2:
        return f"its shape is {tuple(shape)}: FP8 products need features in and out"
    if how.experts is not None and (obstacle := obstacle_in_groups(*shape[-2:])):
        return obstacle
    if isinstance(recipe, DelayedScaling) and how.experts is not None:
        return "DelayedScaling has no place for the state of experts: use a recipe without state"
    return obstacle_in_dtype(dtype)


def decide(
    paths: Sequence[str], recipe: Recipe | None, rules: Rules, obstacle: str | None, *, experts: bool
) -> tuple[Recipe | None, str]:
    """The recipe of a layer; if None, why it has none.

    Args:
      paths: all paths of the layer. The first rule that matches any of them holds.
      recipe: where no rule matches.
      rules: validated.
      obstacle: why FP8 cannot take this layer, if so. No rule overrides it.
      experts: see `has_experts`; a "gate" of experts is not their router.
    """
    for pattern, chosen in rules:
        if any(_matches(path, pattern) for path in paths):
            if chosen is None:
                return None, f"rule {pattern!r}"
            return (chosen, "") if obstacle is None else (None, obstacle)
    reason = obstacle or next(filter(None, (_skipped_by_name(path, experts) for path in paths)), None)
    if reason is None and recipe is None:
        reason = "recipe is None, and no rule names it"
    return (None, reason) if reason else (recipe, "")


def obstacle_in_groups(features_in: int, features_out: int) -> str | None:
    """Why FP8 cannot multiply groups of rows by a kernel for each, if so."""
    if features_in % FP8_ALIGNMENT or features_out % FP8_ALIGNMENT:
        return (
            f"{features_in} features in, {features_out} out: FP8 products of experts need multiples of {FP8_ALIGNMENT}"
        )
    return None


def obstacle_in_einsum(einsum_str: str | None, kernel_shape: Sequence[int], argument: str = "einsum_str") -> str | None:
    """Why FP8 cannot compute an einsum with such a kernel, if so."""
    if sizes_of_einsum(einsum_str, kernel_shape):
        return None
    return f"{argument} {einsum_str!r} is no product of inputs and a kernel as te_jax's Einsum computes them"


def sizes_of_einsum(einsum_str: str | None, kernel_shape: Sequence[int]) -> tuple[int, ...]:
    """Features in and out of an einsum with such a kernel; empty where it is no product."""
    try:
        names = linear.Einsum.parse(einsum_str, tuple(kernel_shape))
    except ValueError:
        return ()
    size = dict(zip(names.kernel, kernel_shape, strict=True))
    return tuple(math.prod(size[name] for name in group) for group in (names.contracted, names.features))


def has_experts(einsum_str: str | None, kernel_shape: Sequence[int]) -> bool:
    """Whether an einsum is one product for each index of a dimension, as "ecd,edf->ecf" is for each expert."""
    try:
        return bool(linear.Einsum.parse(einsum_str, tuple(kernel_shape)).shared)
    except ValueError:
        return False


def obstacle_in_dtype(*dtypes: jax.typing.DTypeLike | None) -> str | None:
    """Why FP8 layers cannot have these dtypes, if so."""
    for dtype in dtypes:
        try:
            if dtype is not None:
                linear.as_float("dtype", dtype)
        except ValueError:
            return f"its dtype {np.dtype(dtype).name} is none of FP8 layers"
    return None


def replaced_precision(precision: object) -> str:
    """For the report of a layer in FP8: what its `precision` asked for, if it is not JAX's default."""
    asked = precision if isinstance(precision, tuple | list) else (precision,)
    names = [str(name).lower() for name in asked if name is not None]
    return f"in place of precision {', '.join(dict.fromkeys(names))}" if set(names) - {"default"} else ""


def is_wrapped_by_qwix(module: object) -> bool:
    """Whether qwix made the class of a module.

    Its models replace `lax.dot_general` and `jnp.einsum` while they run: in a converted layer they would find no
    product to quantize, or to add LoRA to.
    """
    return hasattr(type(module), "_unquantized_type")


WRAPPED_BY_QWIX = "its model is one of qwix, which computes the products"
WAY_OUT_OF_KERNELS = "leave it out of the KernelsLayer of this class, or give the class a rule with None"
EMBEDDING, ADAPTER = "an embedding", "an adapter of LoRA, which stays as it is"


def no_linear_layer(layer: type, linear_layers: str) -> str:
    """The reason for which the kernels of a class that is no linear layer are left alone."""
    if any(base.__module__.startswith("flax.") and "Conv" in base.__name__ for base in layer.__mro__):
        return "a convolution"
    name = f"{layer.__module__}.{layer.__qualname__}"
    ways = "use one of these or te_jax.ops.einsum in it, or give convert a KernelsLayer for it"
    return f"{name} is none of {linear_layers}: {ways}"


def is_composite(module: object, linear_layers: tuple[type, ...]) -> bool:
    """Whether a module is one of te_jax that calls linear layers as one operation, all with its own recipe."""
    ours = any(base.__module__.partition(".")[0] == "te_jax" for base in type(module).__mro__)
    return ours and not isinstance(module, linear_layers)


def part_of(composite: type) -> str:
    """The reason for which layers in such a module are left alone."""
    return f"part of te_jax's {composite.__name__}, which has a recipe argument"


@functools.cache
def metaclass_for_pickle(metaclass: type, converted_class: Callable[[type], type]) -> type:
    """A metaclass for what `converted_class` makes of classes: pickle finds no such class by its name.

    The class is stored as the call `converted_class(base)`, base being the last one of its `__bases__`.

    Args:
      metaclass: of the base.
      converted_class: a function of a module, which caches its results.
    """
    derived = type(metaclass.__name__, (metaclass,), {})

    def reduced(cls: type) -> str | tuple[object, ...]:
        base = cls.__bases__[-1]
        if type(base) is derived:  # somebody's subclass of a converted class
            return cls.__qualname__
        return converted_class, (base,)

    copyreg.pickle(derived, reduced)  # pyright: ignore[reportArgumentType]
    return derived


def _is_rule(rule: object) -> bool:
    return (
        isinstance(rule, tuple) and len(rule) == 2 and isinstance(rule[0], str) and isinstance(rule[1], Recipe | None)
    )


def _matches(path: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(path, pattern)


def _parts(path: str) -> list[str]:
    return [re.sub(r"_\d+$", "", part.lower()) for part in path.split("/")]


def _is_head(path: str) -> bool:
    parts = _parts(path)
    return bool(_HEADS.intersection(parts)) or parts[-1] == "output"


def _skipped_by_name(path: str, experts: bool) -> str | None:
    if _is_head(path):
        return "an output head by its name: see ops.linear_cross_entropy"
    parts = _parts(path)
    gate = not experts and any(b == "gate" and "moe" in a for a, b in itertools.pairwise(parts))
    if gate or _ROUTERS.intersection(parts):
        return "a router by its name"
    return None


def _brief(recipe: Recipe) -> str:
    """The recipe with the arguments that are not the defaults of its class."""
    fields = [field for field in dataclasses.fields(recipe) if getattr(recipe, field.name) != field.default]
    return f"{type(recipe).__name__}({', '.join(f'{field.name}={_value(recipe, field.name)}' for field in fields)})"


def _value(recipe: Recipe, name: str) -> str:
    value = getattr(recipe, name)
    return value.name if isinstance(value, np.dtype) else repr(value)
