"""Statistics of quantization in `te-jax train`: their record in the log, and what is said about them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from te_jax import debug
from te_jax.debug.statistics import FIELDS

MAX_SATURATION = 0.01
"""Share of a tensor's values beyond the largest FP8 value. Scales that follow from the values themselves saturate none.
With delayed scaling up to 0.7% do in the first steps of small models, whose tensors grow fast, without harm."""

MAX_UNDERFLOW = {"activation": 0.1, "kernel": 0.1, "gradient": 0.9}
"""Share of a tensor's values other than zero that become zero, by its role. In healthy runs it is below 1% of
activations and kernels. Gradients of query and key have lost up to 85% without harm: where attention has decided, they
are nearly zero beside those of the other tokens."""

# Scales of delayed scaling are 1 until a gradient has been seen, which takes a step for each layer behind it at most.
_STEPS_WITHOUT_SCALES = 3

_NO_LAYER = "frozen/"  # of the train state, beside adapters


class Tensor(NamedTuple):
    """One tensor of a record, as one product reads it."""

    layer: str
    role: str
    product: str
    values: Mapping[str, float]  # by the fields of `te_jax.debug.TensorStatistics`

    def __str__(self) -> str:
        return f"the {self.role} of {self.layer} ({self.product})"


def record_of(step: int, statistics: Any) -> dict[str, Any]:
    """A record of the log: {"layers": {layer: {role: {product: values of "fields"}}}}, layers in the order of the
    forward pass. Values have four digits; null stands for one that is not finite."""
    layers: dict[str, dict[str, dict[str, list[float | None]]]] = {}
    for name, value in debug.scalars(statistics).items():
        layer, role, product, _ = name.removeprefix(_NO_LAYER).rsplit("/", 3)
        values = layers.setdefault(layer, {}).setdefault(role, {}).setdefault(product, [])
        values.append(float(f"{value:.4g}") if math.isfinite(value) else None)
    return {"kind": "statistics", "step": step, "fields": list(FIELDS), "layers": layers}


def is_record(values: Mapping[str, Any]) -> bool:
    """Whether they are what `record_of` makes."""
    fields, layers = values.get("fields"), values.get("layers")
    return (
        isinstance(fields, list)
        and set(FIELDS) <= set(fields)
        and isinstance(layers, dict)
        and all(isinstance(of_layer, dict) for of_layer in layers.values())
        and all(isinstance(of_role, dict) for of_layer in layers.values() for of_role in of_layer.values())
        and all(
            isinstance(numbers, list)
            and len(numbers) == len(fields)
            and all(number is None or isinstance(number, float) for number in numbers)
            for of_layer in layers.values()
            for of_role in of_layer.values()
            for numbers in of_role.values()
        )
    )


def tensors_of(record: Mapping[str, Any]) -> Iterator[Tensor]:
    """All tensors of a record."""
    for layer, roles in record["layers"].items():
        for role, products in roles.items():
            for product, numbers in products.items():
                named = zip(record["fields"], numbers, strict=True)
                yield Tensor(layer, role, product, {name: math.nan if x is None else x for name, x in named})


def limit_of(field: str, role: str) -> float:
    """Above it a run warns."""
    return MAX_SATURATION if field == "saturation" else MAX_UNDERFLOW[role]


class Watch:
    """Says which tensors lose much in FP8, each once.

    Args:
      delayed: whether the first steps have no scales yet.

    Attributes:
      nonfinite: where values began that are still not finite, as a sentence; None if all are finite.
    """

    def __init__(self, *, delayed: bool = False):
        self._first_step = 1 + (_STEPS_WITHOUT_SCALES if delayed else 0)
        self._named: set[tuple[str, str, str]] = set()
        self.nonfinite: str | None = None

    def look(self, record: Mapping[str, Any]) -> list[str]:
        """Sentences about a record."""
        step, tensors = record["step"], list(tensors_of(record))
        sentences = []
        begin = _begin_of_nonfinite(tensors)
        if begin is None:
            self.nonfinite = None
        elif self.nonfinite is None:
            self.nonfinite = f"at step {step} {begin}"
            sentences.append(self.nonfinite)
        if step < self._first_step:
            return sentences
        for field, words in (("saturation", "exceed the largest FP8 value"), ("underflow", "become zero in FP8")):
            beyond = [tensor for tensor in tensors if tensor.values[field] > limit_of(field, tensor.role)]
            new = {(tensor.layer, tensor.role, field) for tensor in beyond} - self._named
            if not new:
                continue
            self._named |= new
            named = [tensor for tensor in beyond if (tensor.layer, tensor.role, field) in new]
            worst = max(named, key=lambda tensor: tensor.values[field])
            suffix = f" (too many in {len(new)} tensors)" * (len(new) > 1)
            sentences.append(f"at step {step} {worst.values[field]:.2%} of {worst} {words}{suffix}")
        return sentences


def _begin_of_nonfinite(tensors: Iterable[Tensor]) -> str | None:
    """Where the first of the values arises that are not finite, in the order in which a step computes them."""
    broken = [tensor for tensor in tensors if tensor.values["nonfinite"] > 0]
    by_role: dict[str, list[str]] = {role: [] for role in ("kernel", "activation", "gradient")}
    for tensor in broken:
        by_role[tensor.role].append(tensor.layer)
    if by_role["kernel"]:
        return f"{by_role['kernel'][0]} has a kernel that is not finite, so that an earlier step is to blame"
    if by_role["activation"]:
        return f"{by_role['activation'][0]} is the first layer of the forward pass whose input is not finite"
    if by_role["gradient"]:
        return f"{by_role['gradient'][-1]} is the first layer of the backward pass whose gradient is not finite"
    return None
