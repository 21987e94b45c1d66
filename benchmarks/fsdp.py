"""Whole train steps on all devices of a host, which have parts of the parameters: te_jax's FSDP against its peers.

The step is that of `benchmarks.step`, with as many sequences on each device as the case says. Parameters, moments and
quantized kernels are split over the devices. In a case "…-remat" blocks are recomputed from their inputs. A row's case
names the sequences of all devices, and its TFLOP/s, MFU, tokens/s and memory are those of one. In a case "…-context"
all devices share one sequence (`te_jax.parallel.ring_attention`): plain JAX gathers its keys. Implementations:

- bf16, bf16_scan, flax_fp8, flax_fp8_scan: those of `benchmarks.step` under `jit`, as their best users shard them: each
  kernel by its first dimension, the embedding by features, activations constrained to the devices' own sequences, and
  the head gathered in bfloat16. Compiled for H100s, all of their gathers and scatters are asynchronous.
- torch_fsdp2: torch's `fully_shard` of compiled blocks, in a process for each GPU; torch_fsdp2_fp8 gathers kernels in
  FP8 and multiplies so, by torchao. See `benchmarks.fsdp_torch`.
- nnx_loss, nnx_blocks_tensor: Flax models of `benchmarks.flax_models`: one of plain Flax with its blocks in
  `apply_layers(fsdp=…)`, and one of te_jax's blocks with a `tensor_axis` of two devices.
- te_jax, te_jax_block, te_jax_block_fp8_head: those of `benchmarks.step` with `te_jax.parallel.FSDP`. And of the last
  …_overlap: XLA lets two collectives be under way at a time; …_keep: gathered kernels are kept for the backward pass;
  …_jit: sharded by `jit` and NamedSharding alone; …_tensor: each two devices share layers; …_replicas: two groups
  of at least two devices, or groups of eight, have all parameters each (HSDP).

Times by kind tell NCCL's kernels beside others from those alone, which nothing hides.

No time is reported for an implementation whose losses in the first steps are not those of bf16; torch draws its
parameters from the same distribution.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import flax_models, fsdp_torch, shapes, step
from benchmarks.collective_matmul import too_few
from benchmarks.harness import CaseResult, Family, Headline, Timing, problem, reason_of
from te_jax import models, native
from te_jax.models import DecoderConfig, TensorParallel
from te_jax.models.parallel import operand_specs
from te_jax.parallel import FSDP, context_order, shard_specs
from te_jax.quantized import QuantizedArray

REPLICA, AXIS, TENSOR = "replica", "fsdp", "tensor"


@dataclasses.dataclass(frozen=True)
class Sharded(step.OneDevice):
    """A step of plain JAX or te_jax that `jit` partitions: each parameter is split by its first fitting dimension.

    Args:
      mesh: with axes `REPLICA`, `AXIS` and `TENSOR`.
      features: whether the embedding is split by features, and not by tokens.
      one_sequence: whether devices share each sequence.
    """

    mesh: Mesh
    features: bool = True
    one_sequence: bool = False

    def rows(self, x: jax.Array) -> jax.Array:
        spec = P(None, AXIS) if self.one_sequence else P(AXIS)
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def whole(self, kernel: jax.Array) -> jax.Array:
        # The barrier keeps XLA from gathering first.
        rounded = lax.optimization_barrier(kernel.astype(jnp.bfloat16))
        return lax.with_sharding_constraint(rounded, NamedSharding(self.mesh, P()))

    def parts(self, gradients: Any) -> Any:
        return lax.with_sharding_constraint(gradients, self.shardings({"params": gradients})["params"])

    def specs(self, params: Any) -> Any:
        return shard_specs(params, FSDP(self.mesh.shape[AXIS])) | {
            "embedding": P(None, AXIS) if self.features else P(AXIS)
        }

    def shardings(self, state: step.State) -> Any:
        params, kernels = state["params"], state.get("kernels")
        specs = self._stacked(params) if isinstance(params["layers"], dict) else self.specs(params)
        structure = jax.tree.structure(params)

        def like_params(part: Any) -> bool:
            return jax.tree.structure(part) == structure

        def of(part: Any) -> Any:
            return specs if like_params(part) else P()

        rest = {name: part for name, part in state.items() if name != "kernels"}
        found = jax.tree.map(of, rest, is_leaf=like_params)
        if kernels is not None:
            found["kernels"] = jax.tree.map(
                lambda kernel, spec: None if kernel is None else operand_specs(spec, kernel),
                kernels, specs, is_leaf=lambda x: x is None or isinstance(x, QuantizedArray),
            )  # fmt: skip
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), found)

    def _stacked(self, params: Any) -> Any:
        layer = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params["layers"])
        specs = self.specs({**params, "layers": layer})
        return specs | {"layers": jax.tree.map(lambda spec: P(None, *spec), specs["layers"])}

    def put(self, batch: Any) -> Any:
        spec = P(None, REPLICA, AXIS) if self.one_sequence else P(None, (REPLICA, AXIS))
        return jax.device_put(batch, NamedSharding(self.mesh, spec))


@dataclasses.dataclass(frozen=True)
class Shared(Sharded):
    """A step of te_jax with `FSDP`, and tensor parallel where the mesh says so.

    Args:
      config: of the decoder.
      keep: that of `FSDP`.
      under_way: how many collectives XLA lets be under way at a time.
    """

    config: DecoderConfig | None = None
    keep: int = 1
    under_way: int = 1

    @property
    def compiler_options(self) -> dict[str, Any]:
        limit = {"xla_gpu_experimental_parallel_collective_overlap_limit": self.under_way}
        return limit if self.under_way > 1 else {}

    @property
    def parallel(self) -> TensorParallel:
        shape = self.mesh.shape
        fsdp = FSDP(shape[AXIS], replica_axis=REPLICA, keep=self.keep)
        context, experts = AXIS if self.one_sequence else None, None
        if self.config is not None and self.config.experts is not None:
            experts = (AXIS, TENSOR)
        return TensorParallel(shape[TENSOR], fsdp=fsdp, context_axis=context, expert_axes=experts)

    def put(self, batch: Any) -> Any:
        if self.one_sequence:
            order = context_order(batch[0].shape[-1], size=self.mesh.shape[AXIS])
            batch = jax.tree.map(lambda x: x[..., order], batch)
        return super().put(batch)

    @property
    def sums_in_place(self) -> Callable[..., bool] | None:
        # Replicas sum gradients in every microbatch, and devices quantize their parts themselves.
        return None if self.mesh.shape[REPLICA] > 1 else models.is_head

    def specs(self, params: Any) -> Any:
        assert self.config is not None
        return models.param_specs(self.config, self.parallel)

    def loss(self, config: DecoderConfig, implementation: native.Implementation) -> Callable[..., jax.Array]:
        return models.parallel_loss(self.mesh, config, self.parallel, implementation=implementation)

    def requantize(self, config: DecoderConfig, implementation: native.Implementation) -> Any:
        if config.recipe is None or self.mesh.shape[REPLICA] > 1:
            return None
        return models.requantize(config, parallel=self.parallel, implementation=implementation)


@dataclasses.dataclass(frozen=True)
class SharedModel(Sharded):
    """A step of a user's Flax model, whose variables lie as their metadata or `shard_specs` say."""

    def shardings(self, state: step.State) -> Any:
        if "params" in state:
            return super().shardings(state)
        by_metadata = self.mesh.shape[TENSOR] > 1
        specs = nnx.get_partition_spec(state) if by_metadata else shard_specs(state, FSDP(self.mesh.shape[AXIS]))
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)


OURS = ("te_jax", "te_jax_block", "te_jax_block_fp8_head")
_BEST = OURS[-1]
LAYOUTS = ("overlap", "keep", "jit", "tensor", "replicas")
TORCH = ("torch_fsdp2", "torch_fsdp2_fp8")
_OF_USERS = {"nnx_loss": "nnx_loss", "nnx_blocks_tensor": "nnx_blocks"}
IMPLEMENTATIONS = (*step.PEERS, *OURS, *_OF_USERS, *(f"{_BEST}_{layout}" for layout in LAYOUTS), *TORCH)


def run_case(
    case: shapes.StepShape, implementations: Sequence[str], timing: Timing, *, profile: Path | None = None
) -> CaseResult:
    """Measure one case with the named implementations; see `harness.Family.run_case`."""
    result = CaseResult()
    devices = jax.local_devices()
    case = on_devices(case, len(devices))
    if reason := too_few(devices):
        result.skipped.append(problem(case.name, "step", "all", reason))
        return result
    elsewhere: dict[str, step.Elsewhere] = {}
    for name in (name for name in TORCH if name in implementations and not case.one_sequence):
        try:
            if (devices[0].memory_stats() or {}).get("peak_bytes_in_use", 0) > 2**30:
                raise RuntimeError("JAX has the GPUs' memory since an earlier case: run each case alone, with --add")
            elsewhere[name] = fsdp_torch.measured(case, step.drawn(case), timing, fp8=name.endswith("fp8"))
        except Exception as error:
            result.skipped.append(problem(case.name, "step", name, reason_of(error)))
    here = [name for name in implementations if name not in TORCH]
    step.run_depth(
        case, case.depths[0], here, timing, profile, result,
        build=lambda name, case, depth: _built(name, case, depth, devices), elsewhere=elsewhere,
    )  # fmt: skip
    return result


def on_devices(case: shapes.StepShape, count: int) -> shapes.StepShape:
    """The case of so many devices, with the sequences or the parts of all of them."""
    if case.one_sequence:
        return dataclasses.replace(case, sequence=case.sequence * count, devices=count)
    return dataclasses.replace(case, batch=case.batch * count, devices=count)


def _built(name: str, case: shapes.StepShape, depth: int, devices: Sequence[Any]) -> step.Program:
    made, on = made_on(name, case, depth, devices)
    with jax.set_mesh(on.mesh):
        program = step.compiled(name, made, case, depth, on)

    def first() -> step.State:  # which is traced in the first call
        with jax.set_mesh(on.mesh):
            return program.first()

    return dataclasses.replace(program, first=first)


def made_on(name: str, case: shapes.StepShape, depth: int, devices: Sequence[Any]) -> tuple[step.Made, Sharded]:
    """The state and the step of an implementation, and where they are.

    Raises:
      ValueError: there are too few devices for it.
    """
    layout = next((layout for layout in LAYOUTS if name.endswith(f"_{layout}")), "")
    if case.one_sequence and (name in _OF_USERS or layout in ("jit", "replicas")):
        raise ValueError("its devices cannot share a sequence")
    variant = _BEST if layout else name
    least = {"tensor": 2, "replicas": 4}.get(layout, 1)
    if len(devices) % least:
        raise ValueError(f"it needs a multiple of {least} devices, and there are {len(devices)}")
    shape = (max(2, len(devices) // 8) if layout == "replicas" else 1, -1, 2 if layout == "tensor" else 1)
    mesh = Mesh(np.array(devices).reshape(shape), (REPLICA, AXIS, TENSOR), axis_types=(AxisType.Auto,) * 3)
    if name in _OF_USERS:
        on = SharedModel(mesh)
        with jax.set_mesh(mesh):
            return flax_models.nnx_made(_OF_USERS[name], case, depth), on
    if variant not in step.VARIANTS:
        on = Sharded(mesh, one_sequence=case.one_sequence)
        return step.plain_step(name, case, depth, on), on
    how = step.VARIANTS[variant]
    if layout == "jit":
        on = Sharded(mesh, features=False)  # XLA would split activations so, too
    else:
        keep = depth + 1 if layout == "keep" else 1  # with the head
        under_way = 2 if layout == "overlap" else 1
        config = step.config_of(case, depth)
        on = Shared(mesh, config=config, keep=keep, under_way=under_way, one_sequence=case.one_sequence)
    return step.te_jax_step(how, case, depth, on), on


FAMILY = Family(
    description="whole train steps on all devices, which have parts of the parameters: FSDP, with and without remat",
    cases={"gpu": shapes.FSDP_GPU, "cpu": shapes.FSDP_CPU, "by name alone": shapes.FSDP_BY_NAME},
    implementations=IMPLEMENTATIONS,
    peers=tuple(name for name in IMPLEMENTATIONS if name != "bf16"),
    run_case=run_case,
    headline=Headline(
        operation="step",
        figure="time_over_bf16",
        label="Train step with FSDP, time as a multiple of the fastest plain JAX's in bfloat16",
        implementations=("bf16", "flax_fp8", *TORCH, *OURS),
    ),
    profiles=True,
    environment={**step.ENVIRONMENT, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},  # torch's processes come first
)
