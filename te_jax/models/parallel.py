"""How the decoder is split over the devices of one mesh axis: tensor parallel, with sequence parallelism in between.

    residual stream, norms    [batch, time / N, D]: each device has a part of the time
    attention                 each device has a part of the heads, for all of the time
    gated MLP                 each device has a part of its columns, for all of the time
    mixture of experts        each device has some of the experts, to which tokens travel from its part of the time
    embedding                 each device has a part of the features; one all-to-all makes it a part of the time
    head and loss             each device has a part of the vocabulary

With `TensorParallel.fsdp`, devices along another axis have parts of these parts, and of the batch. Blocks run in
`te_jax.layers.apply_layers`, which gathers what they read; the head is gathered as a layer after them. The embedding is
split by features over both axes, and one all-to-all makes these the features of a device's own tokens.

A block gathers its time twice, for query, key and value together and for gate and up together, and scatters sums twice:
`te_jax.parallel.all_gather_matmul` and `matmul_reduce_scatter`, whose transports hide that behind the products. Key and
value kernels are split where every device gets whole heads of its own. Else all devices have all of them, and each uses
the heads that its query heads share; their gradients are summed over devices, like those of norms, once a step.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import PartitionSpec

from te_jax._core.arguments import is_whole_number
from te_jax._core.types import FP8_ALIGNMENT, PyTree
from te_jax.layers.microbatches import AccumulatedKernel
from te_jax.layers.tensor_parallel import TensorAxis
from te_jax.models.config import MLP, DecoderConfig, kernel_facts
from te_jax.ops.linear.arguments import recipes_of
from te_jax.parallel.fsdp import FSDP, quantized_specs, split_dimension
from te_jax.parallel.options import Residual, Transport, as_transport, validate_residual
from te_jax.quantized import QuantizedArray, facts_of_recipe
from te_jax.sharding import axes_of_entry


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """The devices that share one decoder, and how they exchange what they compute.

    Args:
      size: number N of devices along `axis_name`. It divides the decoder's `num_heads`, `hidden_size`, `mlp_size` or
        number of experts, `vocab_size`, and the time of its tokens.
      axis_name: the mesh axis of these devices.
      batch_axes: mesh axes over which the batch is split besides; losses are means over them. Scales of FP8 tensors are
        those of a device's own part of the batch, except for delayed scaling, whose state is one for all.
      context_axis: one of `batch_axes` that splits the time of tokens instead of the batch, in the order of
        `te_jax.parallel.context_order`: attention is `te_jax.parallel.ring_attention`. It may be that of fsdp.
      expert_axes: mesh axes that split the experts of `config.experts`, out of `axis_name` and `batch_axes`; None for
        `axis_name`. Devices along the others have the same experts.
      transport, residual: see `te_jax.parallel.all_gather_matmul`.
      fsdp: the devices that have parts of these devices' parameters, and of the batch; their axes are added to
        `batch_axes`. The decoder itself says what is quantized, and how parameters are split: `fsdp.quantize` and
        `fsdp.specs` stay None. The head counts as the last layer of `fsdp.keep`.

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
    fsdp: FSDP | None = None
    context_axis: str | None = None

    def __post_init__(self):
        if not is_whole_number(self.size) or self.size < 1:
            raise ValueError(f"size is {self.size!r}: it needs to be a whole number of devices, at least 1")
        object.__setattr__(self, "size", int(self.size))
        if not isinstance(self.batch_axes, tuple):
            example = (self.batch_axes,) if isinstance(self.batch_axes, str) else ("data",)
            raise ValueError(f"batch_axes is {self.batch_axes!r}: name mesh axes in a tuple, {example}")
        if not (self.fsdp is None or isinstance(self.fsdp, FSDP)):
            raise ValueError(f"fsdp is {self.fsdp!r}: it must be a te_jax.parallel.FSDP, or None")
        if self.fsdp is not None:
            if self.fsdp.quantize is not None or self.fsdp.specs is not None:
                raise ValueError(
                    "fsdp has quantize or specs, which the decoder's shape and recipe say: leave them None"
                )
            others = tuple(axis for axis in self.fsdp.batch_axes if axis not in self.batch_axes)
            object.__setattr__(self, "batch_axes", self.batch_axes + others)
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
        if self.context_axis is not None and self.context_axis not in self.batch_axes:
            raise ValueError(
                f"context_axis is {self.context_axis!r} and batch_axes is {self.batch_axes}: name one of these, or add "
                "it"
            )
        if self.expert_axes is None:
            object.__setattr__(self, "expert_axes", (self.axis_name,))
        elif not isinstance(self.expert_axes, tuple) or not set(self.expert_axes) <= set(names):
            raise ValueError(
                f"expert_axes is {self.expert_axes!r}: choose from {names}, in a tuple, or None for {self.axis_name!r}"
            )
        as_transport(self.transport)
        validate_residual(self.residual)

    @property
    def tensor(self) -> TensorAxis:
        """The axis as layers take it inside `shard_map`."""
        return TensorAxis(self.axis_name, self.size, None, self.transport, self.residual)

    def check(self, config: DecoderConfig) -> None:
        """Checks that a decoder can be split like this.

        Args:
          config: its shape.

        Raises:
          ValueError: a size does not divide; the message names sizes that fit. Or the recipe, adapters or qk_norm
            are none that `size` devices share, or attention has what `context_axis` does not go with.
        """
        DecoderConfig.check(config)
        if config.lora is not None and self.size > 1:
            raise ValueError(f"parallel.size is {self.size}: adapters (config.lora) are not split; use 1, and fsdp")
        if config.qk_norm == "projection" and self.size > 1:
            raise ValueError(
                f"parallel.size is {self.size}: config.qk_norm is 'projection', a norm over heads that devices split; "
                "use 1, and fsdp"
            )
        experts = config.experts
        whole = experts and (experts.shared or experts.weighted_shared or experts.dense_layers)
        if self.size > 1 and (config.latent is not None or whole):
            name = "experts.shared, weighted_shared or dense_layers" if config.latent is None else "latent"
            raise ValueError(
                f"parallel.size is {self.size}: the kernels of config.{name} are not split; use 1, and fsdp"
            )
        if self.context_axis is not None and (lacking := lacking_in_a_ring(config)) is not None:
            raise ValueError(
                f"parallel.context_axis is {self.context_axis!r}: {lacking}, which attention of devices that share a "
                "sequence lacks; leave it out, and use fsdp"
            )
        recipes = () if config.recipe is None else recipes_of(config.recipe)
        if self.size > 1 and not all(facts_of_recipe(recipe).native for recipe in recipes):
            raise ValueError(
                f"parallel.size is {self.size} and config.recipe is {config.recipe!r}: collective products have no "
                "blocks of 32; use CurrentScaling, RowwiseScaling or BlockScaling, or 1, and fsdp"
            )
        splits_experts = self.axis_name in (self.expert_axes or ())
        problem = _misfit(config, self.size, splits_experts)
        if problem is None and self.fsdp is not None:
            self._check_fsdp(config, self.fsdp)
        if problem is not None:
            sizes = range(1, config.num_heads + 1)
            fitting = [str(size) for size in sizes if _misfit(config, size, splits_experts) is None]
            raise ValueError(
                f"parallel.size is {self.size}: {problem}; sizes that fit this decoder: {', '.join(fitting) or 'none'}"
            )

    def _check_fsdp(self, config: DecoderConfig, fsdp: FSDP) -> None:
        problem = fsdp_misfit(config, self, fsdp)
        if problem is not None:
            smaller = (dataclasses.replace(fsdp, size=size) for size in range(2, fsdp.size))
            fitting = [str(other.size) for other in smaller if fsdp_misfit(config, self, other) is None]
            raise ValueError(
                f"parallel.fsdp.size is {fsdp.size}: {problem}; smaller sizes that fit this decoder: "
                f"{', '.join(fitting) or 'none'}. Use one of these, and replica_axis for the other devices"
            )


def param_specs(config: DecoderConfig, parallel: TensorParallel) -> dict[str, PyTree]:
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
    embedding = PartitionSpec(None, axis)
    if (fsdp := parallel.fsdp) is not None:
        # A tied head's rows are those of one device of fsdp, one after the other.
        embedding = PartitionSpec(None, (fsdp.axis_name, axis) if config.tied_head else (axis, fsdp.axis_name))
    return {
        "embedding": embedding,
        "layers": [_block_specs(config.block(layer), parallel) for layer in range(config.num_layers)],
        "final_norm": PartitionSpec(),
        **({} if config.tied_head else {"head": head_spec(parallel)}),
    }


def _block_specs(config: DecoderConfig, parallel: TensorParallel) -> dict[str, PartitionSpec]:
    """How the parameters of a block lie on a mesh, of a decoder whose blocks are all like it."""
    axis = parallel.axis_name
    rows, columns, everywhere = PartitionSpec(axis), PartitionSpec(None, axis), PartitionSpec()
    kv = everywhere if config.num_kv_heads % parallel.size else columns
    of_kernels = {"key": kv, "value": kv, "out": rows, "down": rows, "shared_down": rows}
    layer = {
        **dict.fromkeys((*config.other_shapes, *config.kernel_shapes), everywhere),
        **{name: of_kernels.get(name, columns) for name in config.projections},
    }
    # A device has the biases of its columns, and the sinks of its heads of query.
    layer |= {f"{name}_bias": PartitionSpec(*layer[name][1:]) for name in config.attention_biases}
    if config.attention_sinks:
        layer["sinks"] = rows
    if config.experts is not None:
        of_experts = PartitionSpec(parallel.expert_axes or None)
        layer |= dict.fromkeys(MLP, of_experts)
        if config.experts.biases:
            layer |= dict.fromkeys((f"{name}_bias" for name in MLP), of_experts)
    if (fsdp := parallel.fsdp) is not None:
        for name, entries, split in _gathered_kernels(layer, config, parallel, fsdp):
            if split is not None:
                entries[split[0]] += (fsdp.axis_name,)
                layer[name] = PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in entries))
    return layer


def head_spec(parallel: TensorParallel) -> PartitionSpec:
    """How the output head lies on a mesh."""
    return PartitionSpec(None if parallel.fsdp is None else parallel.fsdp.axis_name, parallel.axis_name)


def loop_specs(config: DecoderConfig, parallel: TensorParallel) -> dict[str, PartitionSpec | None]:
    """How the parameters of a block lie where `fsdp` gathers them: experts that its axis splits are not gathered."""
    layer: dict[str, PartitionSpec | None] = {**_block_specs(config, parallel)}
    assert parallel.fsdp is not None
    if config.experts is not None and parallel.fsdp.axis_name in (parallel.expert_axes or ()):
        layer |= {name: None for name in layer if name.removesuffix("_bias") in MLP}
    return layer


def _gathered_kernels(
    layer: dict[str, PartitionSpec], config: DecoderConfig, parallel: TensorParallel, fsdp: FSDP
) -> Iterator[tuple[str, list[tuple[str, ...]], tuple[int, bool] | None]]:
    """The kernels of a block that `fsdp` gathers: names, axes that split each dimension, and `split_dimension`.

    Not small kernels, routers, and experts that the axis splits, of which each device has its own.
    """
    for name, shape in ((name, config.kernel_shapes[name]) for name in config.projections):
        spec, stacked = layer[name], len(shape) - 2
        entries = [axes_of_entry(entry) for entry in (*spec, *(None,) * (len(shape) - len(spec)))]
        if math.prod(shape) < fsdp.min_size or fsdp.axis_name in itertools.chain(*entries):
            continue
        sizes = zip(shape, entries, strict=True)
        parts = [count // parallel.size if parallel.axis_name in axes else count for count, axes in sizes]
        split = split_dimension(parts[stacked:], fsdp.size)
        yield name, entries, None if split is None else (stacked + split[0], split[1])


def kernels_cut_by_fsdp(config: DecoderConfig, parallel: TensorParallel) -> tuple[str, ...]:
    """The kernels of a block of which devices of `parallel.fsdp` have parts that cut blocks."""
    if (fsdp := parallel.fsdp) is None or not kernel_facts(config).in_blocks:
        return ()
    layer = _block_specs(config, dataclasses.replace(parallel, fsdp=None))
    return tuple(name for name, _, split in _gathered_kernels(layer, config, parallel, fsdp) if split and not split[1])


def lacking_in_a_ring(config: DecoderConfig) -> str | None:
    """What the attention of a decoder has, and `te_jax.parallel.ring_attention` lacks; None if there is nothing."""
    if config.attention_sinks:
        return "config.attention_sinks is True"
    return None if config.softcaps.scores is None else f"config.softcaps.scores is {config.softcaps.scores}"


def fsdp_misfit(config: DecoderConfig, parallel: TensorParallel, fsdp: FSDP) -> str | None:
    """Why devices cannot have parts of the parameters, or None."""
    if config.hidden_size // parallel.size % fsdp.size:
        return f"hidden_size is {config.hidden_size}, which {parallel.size} · {fsdp.size} does not divide"
    for block in dict.fromkeys((config.block(0), config)):
        layer = _block_specs(block, dataclasses.replace(parallel, fsdp=None))
        for name, _, split in _gathered_kernels(layer, block, parallel, fsdp):
            if split is None:
                return f"{name} has shape {block.kernel_shapes[name]}, of which it divides no dimension"
    return None


def operand_specs(specs: PyTree, operands: PyTree) -> PyTree:
    """The specs of what the decoder reads, from those of its parameters.

    Args:
      specs: what `param_specs` returns.
      operands: parameters whose kernels may be quantized, or stand-ins for these of
        `te_jax.layers.accumulate_gradients`.

    Returns:
      A tree like the operands, with a PartitionSpec for every array; fields that are None stay None.
    """

    def of(value: Any, spec: PartitionSpec) -> PyTree:
        if isinstance(value, AccumulatedKernel):
            return dataclasses.replace(value, kernel=of(value.kernel, spec), gradient=spec, uses=PartitionSpec())
        return quantized_specs(value, spec) if isinstance(value, QuantizedArray) else spec

    return jax.tree.map(of, operands, specs, is_leaf=lambda x: isinstance(x, QuantizedArray | AccumulatedKernel))


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
    if config.recipe is None or (size == 1 and config.experts is None):  # a product of one device pads
        return None
    columns = {
        "query": config.num_heads // size * config.head_dim,
        "key": config.heads.repeated(size).key_value // size * config.head_dim,
        "gate": mlp_size,
        "out": config.hidden_size,
    }
    columns = {name: count for name, count in columns.items() if name in config.kernel_shapes}
    for name, count in columns.items():
        if count % FP8_ALIGNMENT:
            return f"{name} has {count} columns on a device, and FP8 products need a multiple of {FP8_ALIGNMENT}"
    return None
