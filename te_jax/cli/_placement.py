"""The devices of a training run, and where they have each of its arrays."""

import collections
import contextlib
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from te_jax._core.types import PyTree
from te_jax.cli import _processes
from te_jax.cli._options import Devices
from te_jax.cli._state import TrainState
from te_jax.cli.errors import UserError
from te_jax.models import DecoderConfig, TensorParallel, init, param_specs, split_adapters
from te_jax.models.parallel import fsdp_misfit, operand_specs
from te_jax.parallel import FSDP
from te_jax.quantized import QuantizedArray
from te_jax.sharding import axes_of_entry

_AXES = _REPLICA_AXIS, _FSDP_AXIS, _TENSOR_AXIS = "replica", "fsdp", "tensor"
_HOST_DEVICE_FLAG = "xla_force_host_platform_device_count"


class Placement(NamedTuple):
    """Shardings of the arrays of a run."""

    state: NamedSharding  # replicated: losses, and every leaf of `TrainState` unless devices share a decoder
    windows: NamedSharding  # integer [batches, batch, seq_len + 1]: microbatches of a step, or batches of a validation
    parallel: TensorParallel | None  # how devices share a decoder; None where each has all of it

    @property
    def mesh(self) -> Mesh:
        assert isinstance(self.state.mesh, Mesh)
        return self.state.mesh

    @property
    def replicas(self) -> int:
        """Number of groups of devices that share a decoder or its parameters."""
        return self.mesh.shape[_REPLICA_AXIS]

    @property
    def fsdp(self) -> int:
        """Number of devices that share the parameters, for each part of a decoder."""
        return self.mesh.shape[_FSDP_AXIS]

    @property
    def devices(self) -> list[Any]:
        return list(self.mesh.devices.flat)

    @property
    def local_devices(self) -> list[Any]:
        """Devices of this process."""
        return list(self.mesh.local_devices)

    def of_state(self, state: TrainState, on_host: TrainState, config: DecoderConfig) -> Any:
        """A tree of shardings like the state; `on_host` says which leaves are in host memory."""
        return jax.tree.map(
            lambda sharding, host: sharding.with_memory_kind("pinned_host") if host else sharding,
            jax.tree.broadcast(self._on_device(state, config), state),
            on_host,
        )

    def _on_device(self, state: TrainState, config: DecoderConfig) -> Any:
        if self.parallel is None:
            return self.state
        specs, frozen = param_specs(config, self.parallel), None
        if config.lora is not None:
            specs, of_frozen = split_adapters(specs)
            frozen = operand_specs(of_frozen, state.frozen)
        structure = jax.tree.structure(state.params)

        def is_masked(node: object) -> bool:
            return isinstance(node, optax.MaskedNode)  # in the place of a parameter of another optimizer

        def one_for_each_parameter(part: Any) -> bool:
            return jax.tree.structure(part, is_leaf=is_masked) == structure

        def shardings(part: Any) -> Any:
            if not one_for_each_parameter(part):
                return self.state
            return jax.tree.map(
                lambda leaf, spec: leaf if is_masked(leaf) else self._like_parameter(leaf, spec),
                part, specs, is_leaf=is_masked,
            )  # fmt: skip

        kernels = jax.tree.map(
            lambda kernel, spec: None if kernel is None else operand_specs(spec, kernel),
            state.kernels, specs, is_leaf=lambda x: x is None or isinstance(x, QuantizedArray),
        )  # fmt: skip
        rest = state._replace(kernels=None, frozen=None)
        state_shardings = jax.tree.map(shardings, rest, is_leaf=one_for_each_parameter)
        kernels, frozen = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), (kernels, frozen))
        return state_shardings._replace(kernels=kernels, frozen=frozen)

    def of_params(self, config: DecoderConfig, dtype: str) -> Any:
        """The parameters of a decoder: `jax.ShapeDtypeStruct` with shardings."""
        shapes = jax.eval_shape(lambda: init(config, jax.random.key(0)))
        if self.parallel is None:
            places = jax.tree.map(lambda _: self.state, shapes)
        else:
            places = jax.tree.map(self._like_parameter, shapes, param_specs(config, self.parallel))
        return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, dtype, sharding=place), shapes, places)

    def _like_parameter(self, leaf: Any, spec: PartitionSpec) -> NamedSharding:
        """The sharding of a parameter, a moment or the bounds of its blocks, which may be too few to be split."""
        entries = [
            entry if size % math.prod(self.mesh.shape[axis] for axis in axes_of_entry(entry)) == 0 else None
            for entry, size in zip(spec, leaf.shape, strict=False)
        ]
        return NamedSharding(self.mesh, PartitionSpec(*entries))


class Defaults(NamedTuple):
    """Values of options that were left open, where the platform decides."""

    dtype: str  # of activations
    parameters: str  # their dtype
    checkpoint_every: int  # steps


def defaults_of(platform: str) -> Defaults:
    """All that depends on the platform alone."""
    return Defaults("bfloat16", "bfloat16", 1000) if platform == "gpu" else Defaults("float32", "float32", 100)


def take_devices(asked: Devices) -> list[Any]:
    """The devices to train on: all that JAX shows, or the first `--devices`. Starts JAX's backend.

    A host without GPUs is divided into as many CPU devices as are asked for. Several processes take all of theirs.

    Raises:
      UserError: there are fewer, or several processes have more.
    """
    processes = _processes.count()
    wanted = asked.devices or math.prod(asked.sizes.values())
    made = -(-wanted // processes)
    # JAX refuses both ways of asking for CPU devices at once; a user who set the flag has asked already.
    if (asked.devices or wanted > 1) and _HOST_DEVICE_FLAG not in os.environ.get("XLA_FLAGS", ""):
        # Raised where a backend runs in this process already: its devices are what there is.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", made)
    devices = jax.devices()
    platform = devices[0].platform
    if wanted > len(devices):
        words = _described({"--devices": wanted} if asked.devices else asked.sizes)
        way_out = f": start it with XLA_FLAGS=--{_HOST_DEVICE_FLAG}={made}" * (platform == "cpu")
        raise UserError(f"{words} is more than the {len(devices)} {platform} devices present{way_out}")
    if processes > 1 and asked.devices not in (None, len(devices)):
        raise UserError(
            f"{processes} processes have {len(devices)} {platform} devices, all of which train: --devices must be "
            f"{len(devices)}"
        )
    return devices[: asked.devices]


def _described(options: dict[str, int]) -> str:
    return " · ".join(f"{name} {size}" for name, size in options.items())


def memory_of(devices: Sequence[Any]) -> int:
    """Bytes that one of these devices may use: a GPU's limit in JAX, or this host's memory divided by the devices."""
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    return limit or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(devices)


def places_of(devices: Sequence[object], config: DecoderConfig) -> PyTree:
    """Where devices that share a decoder while it generates have each of its parameters. Each has some columns of every
    expert, and not some experts, which XLA would gather.

    Raises:
      UserError: so many do not divide the decoder.
    """
    mesh, count = Mesh(np.asarray(devices), (_TENSOR_AXIS,), axis_types=(AxisType.Auto,)), len(devices)
    try:
        specs = param_specs(config, TensorParallel(count, axis_name=_TENSOR_AXIS, expert_axes=()))
    except ValueError as error:
        raise UserError(f"--tp is {count}: {error}") from error
    if config.experts is not None:
        if config.mlp_size % count:
            raise UserError(f"--tp is {count}: mlp_size is {config.mlp_size}, which {count} does not divide")
        columns, rows = PartitionSpec(None, None, _TENSOR_AXIS), PartitionSpec(None, _TENSOR_AXIS)
        specs["layers"] = [layer | {"gate": columns, "up": columns, "down": rows} for layer in specs["layers"]]
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def build_placement(devices: Sequence[Any], asked: Devices, config: DecoderConfig, named: str) -> Placement:
    """Each `--tp` devices that share a decoder have an equal part of every batch, and each `--fsdp` times as many the
    whole state. With `--cp` these have an equal part of the time of every window, in the place of the batch.

    Experts are divided among all devices where their number allows it, else among those that share a decoder. `named`
    is the option that names the model, for errors.

    Raises:
      UserError: the sizes that are asked for do not fit the devices or the model.
    """
    fsdp = _fsdp_size(devices, asked, config, named)
    mesh = Mesh(np.asarray(devices).reshape(-1, fsdp, asked.tp), _AXES, axis_types=(AxisType.Auto,) * 3)
    shared = fsdp * asked.tp > 1 or (config.experts is not None and len(devices) > 1)
    return Placement(
        state=NamedSharding(mesh, PartitionSpec()),
        windows=NamedSharding(mesh, PartitionSpec(None, _REPLICA_AXIS if asked.cp > 1 else _AXES[:2])),
        parallel=_parallel(len(devices), fsdp, asked, config) if shared else None,
    )


def describe(placement: Placement, asked: Devices, config: DecoderConfig) -> str:
    """How the devices share the run, and why not all of them share the parameters if nobody asked for replicas."""
    devices, replicas, fsdp = placement.devices, placement.replicas, placement.fsdp
    line = f"{len(devices)} {devices[0].platform} devices: replicas {replicas}, fsdp {fsdp}, tp {asked.tp}"
    line += f", transport {asked.transport}" * (asked.tp > 1)
    line += f", each window by {asked.cp}" * (asked.cp > 1)
    if replicas > 1 and _is_open(asked):
        problem, per_host = _misfit(len(devices), replicas * fsdp, asked, config), _devices_per_host(devices)
        if problem is not None:
            line += f" (fsdp {replicas * fsdp} does not fit: {problem})"
        elif per_host < len(devices):
            line += f" (each host has all parameters: --fsdp {replicas * fsdp} shares them between hosts)"
    return line


def _is_open(asked: Devices) -> bool:
    """Whether how many devices share the parameters is for te-jax to decide."""
    return asked.replicas is None and asked.fsdp is None and asked.cp == 1


def _devices_per_host(devices: Sequence[Any]) -> int:
    """Devices of each host, where all hosts have equally many; else all of them."""
    hosts = _processes.hosts()
    counts = collections.Counter(hosts[device.process_index] for device in devices)
    return next(iter(counts.values())) if len(set(counts.values())) == 1 else len(devices)


def _fsdp_size(devices: Sequence[Any], asked: Devices, config: DecoderConfig, named: str) -> int:
    """The largest of the sizes that fit the devices, the model and what is asked for; by default within a host, since
    parameters travel for each microbatch, and sums of gradients once a step."""
    count, platform = len(devices), devices[0].platform
    if count % asked.tp:
        sizes = ", ".join(str(size) for size in range(1, count + 1) if count % size == 0)
        raise UserError(
            f"--tp {asked.tp} does not divide {count} {platform} devices: choose --tp from {sizes}, or a multiple of "
            f"{asked.tp} for --devices"
        )
    groups = count // asked.tp
    dividing = [size for size in range(1, groups + 1) if groups % size == 0]
    fitting = {size: groups // size for size in dividing if not _misfit(count, size, asked, config)}
    size_asked = asked.cp if asked.cp > 1 else asked.fsdp
    in_host = [size for size in fitting if _devices_per_host(devices) % (size * asked.tp) == 0]
    for fsdp in sorted(in_host if in_host and _is_open(asked) else fitting, reverse=True):
        if size_asked in (None, fsdp) and asked.replicas in (None, fitting[fsdp]):
            return fsdp
    wanted = size_asked or max(1, groups // (asked.replicas or 1))
    problem = _misfit(count, wanted, asked, config) or f"--replicas · --fsdp · --tp must be {count}"
    fit = "; ".join(f"--replicas {replicas} --fsdp {fsdp}" for fsdp, replicas in fitting.items())
    raise UserError(
        f"{_described(asked.sizes)} does not fit {count} {platform} devices and {named}: {problem}; "
        f"sizes that fit: {fit}, or choose another --devices"
    )


def _misfit(count: int, fsdp: int, asked: Devices, config: DecoderConfig) -> str | None:
    """Why devices cannot share the parameters, or None."""
    parallel = _parallel(count, fsdp, asked, config)
    return None if parallel.fsdp is None else fsdp_misfit(config, parallel, parallel.fsdp)


def _parallel(count: int, fsdp: int, asked: Devices, config: DecoderConfig) -> TensorParallel:
    by_all = config.experts is not None and config.experts.num_experts % count == 0
    # Gradients travel in the dtype of activations, so that in float32 losses do not depend on the number of devices.
    shared = FSDP(fsdp, axis_name=_FSDP_AXIS, replica_axis=_REPLICA_AXIS, reduce_dtype=config.dtype)
    return TensorParallel(
        asked.tp,
        axis_name=_TENSOR_AXIS,
        batch_axes=(_REPLICA_AXIS, _FSDP_AXIS),
        expert_axes=_AXES if by_all else None,
        transport=asked.transport,
        fsdp=shared if fsdp > 1 else None,
        context_axis=_FSDP_AXIS if asked.cp > 1 else None,
    )
