"""How the decoder is split over the devices of one mesh axis: tensor parallel, with sequence parallelism in between.

    residual stream, norms    [batch, time / N, D]: each device has a part of the time
    attention                 each device has a part of the heads, for all of the time
    gated MLP                 each device has a part of its columns, for all of the time
    mixture of experts        each device has some of the experts, to which tokens travel from its part of the time
    embedding                 each device has a part of the features; one all-to-all makes it a part of the time
    head and loss             each device has a part of the vocabulary

A block gathers its time twice, for query, key and value together and for gate and up together, and scatters sums twice:
`te_jax.parallel.all_gather_matmul` and `matmul_reduce_scatter`, whose transports hide that behind the products. Key and
value kernels are split where every device gets whole heads of its own. Else all devices have all of them, and each uses
the heads that its query heads share; their gradients are summed over devices, like those of norms, once a step.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import PartitionSpec

from te_jax._core.arguments import is_whole_number
from te_jax._core.types import FP8_ALIGNMENT
from te_jax.layers.microbatches import AccumulatedKernel
from te_jax.models.config import MLP, DecoderConfig
from te_jax.parallel.fsdp import quantized_specs
from te_jax.parallel.options import Residual, Transport, as_transport, validate_residual
from te_jax.quantized import QuantizedArray


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """The devices that share one decoder, and how they exchange what they compute.

    Args:
      size: number N of devices along `axis_name`. It divides the decoder's `num_heads`, `hidden_size`, `mlp_size` or
        number of experts, `vocab_size`, and the time of its tokens.
      axis_name: the mesh axis of these devices.
      batch_axes: mesh axes over which the batch is split besides; losses are means over them. Scales of FP8 tensors are
        those of a device's own part of the batch, except for delayed scaling, whose state is one for all.
      expert_axes: mesh axes that split the experts of `config.experts`, out of `axis_name` and `batch_axes`; None for
        `axis_name`. Devices along the others have the same experts.
      transport, residual: see `te_jax.parallel.all_gather_matmul`.

    Raises:
      ValueError: `size` is no whole number of at least 1, an axis is no name or named twice, or what
        `te_jax.parallel.all_gather_matmul` takes too is not what it takes.
    """

    size: int
    axis_name: str = "tensor"
    batch_axes: tuple[str, ...] = ()
    expert_axes: tuple[str, ...] | None = None
    transport: Transport = "auto"
    residual: Residual = "gathered"

    def __post_init__(self):
        if not is_whole_number(self.size) or self.size < 1:
            raise ValueError(f"size is {self.size!r}: it needs to be a whole number of devices, at least 1")
        object.__setattr__(self, "size", int(self.size))
        if not isinstance(self.batch_axes, tuple):
            example = (self.batch_axes,) if isinstance(self.batch_axes, str) else ("data",)
            raise ValueError(f"batch_axes is {self.batch_axes!r}: name mesh axes in a tuple, {example}")
        names = (self.axis_name, *self.batch_axes)
        if not all(isinstance(name, str) for name in names):
            raise ValueError(
                f"axis_name is {self.axis_name!r} and batch_axes is {self.batch_axes!r}: axes go by their names, which "
                "are strings"
            )
        if len(set(names)) < len(names):
            raise ValueError(
                f"axis_name is {self.axis_name!r} and batch_axes is {self.batch_axes}: name each axis once"
            )
        if self.expert_axes is None:
            object.__setattr__(self, "expert_axes", (self.axis_name,))
        elif not isinstance(self.expert_axes, tuple) or not set(self.expert_axes) <= set(names):
            raise ValueError(
                f"expert_axes is {self.expert_axes!r}: choose from {names}, in a tuple, or None for {self.axis_name!r}"
            )
        as_transport(self.transport)
        validate_residual(self.residual)

    def check(self, config: DecoderConfig) -> None:
        """Checks that a decoder can be split like this.

        Args:
          config: its shape.

        Raises:
          ValueError: a size does not divide; the message names sizes that fit.
        """
        DecoderConfig.check(config)
        splits_experts = self.axis_name in (self.expert_axes or ())
        problem = _misfit(config, self.size, splits_experts)
        if problem is not None:
            sizes = range(1, config.num_heads + 1)
            fitting = [str(size) for size in sizes if _misfit(config, size, splits_experts) is None]
            raise ValueError(
                f"parallel.size is {self.size}: {problem}; sizes that fit this decoder: {', '.join(fitting) or 'none'}"
            )


def param_specs(config: DecoderConfig, parallel: TensorParallel) -> dict[str, Any]:
    """How the parameters of a decoder lie on a mesh.

    Args:
      config: its shape.
      parallel: the devices that share it.

    Returns:
      A PartitionSpec for every array of `te_jax.models.init`, in the same dicts.

    Raises:
      ValueError: what `parallel.check` refuses.
    """
    parallel.check(config)
    axis = parallel.axis_name
    rows, columns, everywhere = PartitionSpec(axis), PartitionSpec(None, axis), PartitionSpec()
    kv = columns if kv_heads(config, parallel.size).is_split else everywhere
    layer = {
        "attention_norm": everywhere,
        "mlp_norm": everywhere,
        "query": columns,
        "key": kv,
        "value": kv,
        "out": rows,
        "gate": columns,
        "up": columns,
        "down": rows,
    }
    if config.experts is not None:
        layer |= {"router": everywhere, **dict.fromkeys(MLP, PartitionSpec(parallel.expert_axes or None))}
    return {
        "embedding": columns,
        "layers": [layer] * config.num_layers,
        "final_norm": everywhere,
        "head": columns,
    }


def operand_specs(specs: Any, operands: Any) -> Any:
    """The specs of what the decoder reads, from those of its parameters.

    Args:
      specs: what `param_specs` returns.
      operands: parameters whose kernels may be quantized, or stand-ins for these of
        `te_jax.layers.accumulate_gradients`.

    Returns:
      A tree like the operands, with a PartitionSpec for every array; fields that are None stay None.
    """

    def of(value: Any, spec: PartitionSpec) -> Any:
        if isinstance(value, AccumulatedKernel):
            return dataclasses.replace(value, kernel=of(value.kernel, spec), gradient=spec, uses=PartitionSpec())
        return quantized_specs(value, spec) if isinstance(value, QuantizedArray) else spec

    return jax.tree.map(of, operands, specs, is_leaf=lambda x: isinstance(x, QuantizedArray | AccumulatedKernel))


@dataclasses.dataclass(frozen=True)
class KeyValueHeads:
    """Which key and value heads the devices use.

    Attributes:
      per_device: how many each of them uses.
      repeats: how often each head stands in the list of what all devices use, one device after the other.
    """

    per_device: int
    repeats: int

    @property
    def is_split(self) -> bool:
        return self.repeats == 1


def kv_heads(config: DecoderConfig, size: int) -> KeyValueHeads:
    # The least number of heads that is a multiple of both: each device then has the same number, and each of these
    # serves the same number of query heads. Both divide num_heads, so it does too.
    total = math.lcm(config.num_kv_heads, size)
    return KeyValueHeads(total // size, total // config.num_kv_heads)


def _misfit(config: DecoderConfig, size: int, splits_experts: bool) -> str | None:
    """Why the decoder cannot be split into so many parts, or None."""
    split = {name: getattr(config, name) for name in ("num_heads", "hidden_size", "mlp_size", "vocab_size")}
    if config.experts is not None:
        mlp_size = split.pop("mlp_size")
        if splits_experts:
            split["experts.num_experts"] = config.experts.num_experts
    else:
        mlp_size = split["mlp_size"] // size
    for name, count in split.items():
        if count % size:
            return f"{name} is {count}, which {size} does not divide"
    if config.recipe is None:
        return None
    columns = {
        "query": config.num_heads // size * config.head_dim,
        "key": kv_heads(config, size).per_device * config.head_dim,
        "gate": mlp_size,
        "out": config.hidden_size,
    }
    for name, count in columns.items():
        if count % FP8_ALIGNMENT:
            return f"{name} has {count} columns on a device, and FP8 products need a multiple of {FP8_ALIGNMENT}"
    return None
