"""The devices of a training run, and where they have each of its arrays."""

import contextlib
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from te_jax.cli import _processes
from te_jax.cli.errors import UserError
from te_jax.models import DecoderConfig, Experts, TensorParallel, param_specs
from te_jax.models.parallel import operand_specs
from te_jax.parallel import FSDP
from te_jax.parallel.options import TransportName
from te_jax.quantized import QuantizedArray
from te_jax.sharding import axes_of_entry

if TYPE_CHECKING:
    from te_jax.cli._step import TrainState

_BATCH_AXIS, _FSDP_AXIS, _TENSOR_AXIS = "data", "fsdp", "tensor"
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
    def groups(self) -> int:
        """Number of groups of devices that share a decoder or its parameters."""
        return self.mesh.shape[_BATCH_AXIS]

    @property
    def devices(self) -> list[Any]:
        return list(self.mesh.devices.flat)

    @property
    def local_devices(self) -> list[Any]:
        """Those of this process."""
        return list(self.mesh.local_devices)

    def of_state(self, state: "TrainState", on_host: "TrainState", config: DecoderConfig) -> Any:
        """A tree of shardings like the state; `on_host` says which leaves are in host memory."""
        return jax.tree.map(
            lambda sharding, host: sharding.with_memory_kind("pinned_host") if host else sharding,
            jax.tree.broadcast(self._on_device(state, config), state),
            on_host,
        )

    def _on_device(self, state: "TrainState", config: DecoderConfig) -> Any:
        if self.parallel is None:
            return self.state
        specs, structure = param_specs(config, self.parallel), jax.tree.structure(state.params)

        def one_for_each_parameter(part: Any) -> bool:
            return jax.tree.structure(part) == structure

        def shardings(part: Any) -> Any:
            if not one_for_each_parameter(part):
                return self.state
            return jax.tree.map(self._like_parameter, part, specs)

        kernels = jax.tree.map(
            lambda kernel, spec: None if kernel is None else operand_specs(spec, kernel),
            state.kernels, specs, is_leaf=lambda x: x is None or isinstance(x, QuantizedArray),
        )  # fmt: skip
        found = jax.tree.map(shardings, state._replace(kernels=None), is_leaf=one_for_each_parameter)
        return found._replace(kernels=jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), kernels))

    def _like_parameter(self, leaf: Any, spec: PartitionSpec) -> NamedSharding:
        """The sharding of a parameter, a moment or the bounds of its blocks, which may be too few to be split."""
        entries = [
            entry if size % math.prod(self.mesh.shape[axis] for axis in axes_of_entry(entry)) == 0 else None
            for entry, size in zip(spec, leaf.shape, strict=False)
        ]
        return NamedSharding(self.mesh, PartitionSpec(*entries))


def take_devices(count: int | None, tp: int = 1, fsdp: int = 1) -> list[Any]:
    """The devices to train on. Starts JAX's backend.

    Args:
      count: the first so many GPUs, or so many CPU devices cut out of one host; None for all that JAX shows, or for
        `tp` · `fsdp` of them where devices share a decoder or its parameters. Several processes take all of them.
      tp: how many devices share a decoder.
      fsdp: how many of these groups share the parameters.

    Raises:
      UserError: there are fewer, they cannot be divided into such groups, or several processes have more.
    """
    group = tp * fsdp
    options = [f"--tp {tp}"] * (tp > 1 or fsdp == 1) + [f"--fsdp {fsdp}"] * (fsdp > 1)
    if count is not None and count % group:
        raise UserError(
            f"--devices {count} cannot be divided into groups of {' · '.join(options)}: choose a multiple of {group}"
        )
    processes = _processes.count()
    wanted = group if count is None and group > 1 and processes == 1 else count
    # JAX refuses both ways of asking for CPU devices at once; a user who set the flag has asked already.
    if wanted is not None and _HOST_DEVICE_FLAG not in os.environ.get("XLA_FLAGS", ""):
        # Raised where a backend runs in this process already: its devices are what there is.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", -(-wanted // processes))
    devices = jax.devices()
    if wanted is not None and wanted > len(devices):
        platform = devices[0].platform
        option = f"--devices {wanted}" if count is not None else " · ".join(options)
        way_out = f": start it with XLA_FLAGS=--{_HOST_DEVICE_FLAG}={-(-wanted // processes)}" * (platform == "cpu")
        raise UserError(f"{option} is more than the {len(devices)} {platform} devices present{way_out}")
    if processes > 1 and (wanted not in (None, len(devices)) or len(devices) % group):
        raise UserError(
            f"{processes} processes have {len(devices)} devices, all of which train: --devices must be {len(devices)}, "
            f"and {' · '.join(options)} divide it"
        )
    return devices[:wanted]


def memory_of(devices: Sequence[Any]) -> int:
    """Bytes that one of these devices may use: a GPU's limit in JAX, or this host's memory divided by the devices."""
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    return limit or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(devices)


def build_placement(
    devices: Sequence[Any],
    tp: int = 1,
    transport: TransportName = "auto",
    experts: Experts | None = None,
    *,
    fsdp: int = 1,
) -> Placement:
    """Each `tp` devices that share a decoder have an equal part of every batch, and each `fsdp` times as many the whole
    state.

    Experts are divided among all devices where their number allows it, else among those that share a decoder.
    """
    axes = (_BATCH_AXIS, _FSDP_AXIS, _TENSOR_AXIS)
    mesh = Mesh(np.asarray(devices).reshape(-1, fsdp, tp), axes, axis_types=(AxisType.Auto,) * 3)
    by_all = experts is not None and experts.num_experts % len(devices) == 0
    shared = tp > 1 or fsdp > 1 or (experts is not None and len(devices) > 1)
    parallel = TensorParallel(
        tp,
        axis_name=_TENSOR_AXIS,
        batch_axes=(_BATCH_AXIS, _FSDP_AXIS),
        expert_axes=axes if by_all else None,
        transport=transport,
        fsdp=FSDP(fsdp, axis_name=_FSDP_AXIS, replica_axis=_BATCH_AXIS) if fsdp > 1 else None,
    )
    return Placement(
        state=NamedSharding(mesh, PartitionSpec()),
        windows=NamedSharding(mesh, PartitionSpec(None, (_BATCH_AXIS, _FSDP_AXIS))),
        parallel=parallel if shared else None,
    )
