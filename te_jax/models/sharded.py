"""The decoder over several devices of a mesh: functions of whole arrays, for `jax.jit` and `jax.grad`."""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from te_jax import sharding
from te_jax._core.types import PyTree
from te_jax.models import decoder
from te_jax.models.config import DecoderConfig, Params
from te_jax.models.decoder import Implementation, ScalingState
from te_jax.models.parallel import TensorParallel, operand_specs, param_specs

_EVERYWHERE = PartitionSpec()

__all__ = ["parallel_apply", "parallel_loss", "parallel_losses"]


def parallel_apply(
    mesh: Mesh, config: DecoderConfig, parallel: TensorParallel, *, implementation: Implementation | None = None
) -> jax.stages.Wrapped:
    """`te_jax.models.apply` over several devices.

    Args:
      mesh: with the axes that `parallel` names.
      config: the shape.
      parallel: the devices that share the decoder.
      implementation: see `te_jax.models.apply`.

    Returns:
      (params, tokens [batch, time], scaling_state=None, segment_ids=None) → logits [batch, time, vocab_size], split
      over the vocabulary. Parameters that do not lie as `te_jax.models.param_specs` says are moved first.

    Raises:
      ValueError: `parallel` does not fit the mesh or the decoder; and, when called, for what `apply` refuses.
    """
    parallel, specs, of_tokens = _specs(mesh, config, parallel)
    options: Any = {"parallel": parallel, "implementation": implementation}

    def local(params: Params, tokens: jax.Array, scaling_state: PyTree, segment_ids: jax.Array | None) -> jax.Array:
        return decoder.apply(params, tokens, config, scaling_state, segment_ids=segment_ids, **options)

    logits = PartitionSpec(*of_tokens, parallel.axis_name)

    def whole(
        params: Params,
        tokens: jax.Array,
        scaling_state: ScalingState | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        in_specs = operand_specs(specs, params), of_tokens, _EVERYWHERE, of_tokens
        return sharding.shard_map(local, mesh, in_specs, logits)(params, tokens, scaling_state, segment_ids)

    return jax.jit(whole)


def parallel_loss(
    mesh: Mesh, config: DecoderConfig, parallel: TensorParallel, *, implementation: Implementation | None = None
) -> jax.stages.Wrapped:
    """`te_jax.models.loss` over several devices, the same up to the order of sums, and to rounding in FP8.

        mesh = jax.make_mesh((2, 4), ("data", "tensor"))
        parallel = TensorParallel(size=4, batch_axes=("data",))
        specs = param_specs(config, parallel)
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        params = jax.jit(functools.partial(init, config), out_shardings=shardings)(key)
        value, gradients = jax.jit(jax.value_and_grad(parallel_loss(mesh, config, parallel)))(params, tokens, targets)

    Args:
      mesh, config, parallel, implementation: as in `parallel_apply`.

    Returns:
      (params, tokens [batch, time], targets [batch, time], scaling_state=None, segment_ids=None) → float32 scalar.
      Gradients lie where the parameters do. The one with respect to scaling_state, which for delayed scaling is what
      `te_jax.models.init_scaling_state` returned or a later one, is the state of the next step.

    Raises:
      ValueError: `parallel` does not fit the mesh or the decoder; and, when called, for what `loss` refuses.
    """
    losses = parallel_losses(mesh, config, parallel, implementation=implementation)

    def whole(
        params: Params,
        tokens: jax.Array,
        targets: jax.Array,
        scaling_state: ScalingState | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        return losses(params, tokens, targets, scaling_state, segment_ids).objective

    return jax.jit(whole)


def parallel_losses(
    mesh: Mesh, config: DecoderConfig, parallel: TensorParallel, *, implementation: Implementation | None = None
) -> jax.stages.Wrapped:
    """`te_jax.models.losses` over several devices, as `parallel_loss`.

    Args:
      mesh, config, parallel, implementation: as in `parallel_apply`.

    Returns:
      (params, tokens [batch, time], targets [batch, time], scaling_state=None, segment_ids=None) →
      `te_jax.models.Losses`.

    Raises:
      ValueError: as for `parallel_loss`.
    """
    parallel, specs, of_tokens = _specs(mesh, config, parallel)
    options: Any = {"parallel": parallel, "implementation": implementation}

    def local(
        params: Params, tokens: jax.Array, targets: jax.Array, scaling_state: PyTree, segment_ids: jax.Array | None
    ) -> decoder.Losses:
        return decoder.losses(params, tokens, targets, config, scaling_state, segment_ids=segment_ids, **options)

    def whole(
        params: Params,
        tokens: jax.Array,
        targets: jax.Array,
        scaling_state: ScalingState | None = None,
        segment_ids: jax.Array | None = None,
    ) -> decoder.Losses:
        in_specs = operand_specs(specs, params), of_tokens, of_tokens, _EVERYWHERE, of_tokens
        run = sharding.shard_map(local, mesh, in_specs, _EVERYWHERE)
        return run(params, tokens, targets, scaling_state, segment_ids)

    return jax.jit(whole)


def _specs(mesh: Mesh, config: DecoderConfig, parallel: TensorParallel) -> tuple[TensorParallel, Params, PartitionSpec]:
    """`parallel` without axes of one device, over which JAX would take gradients to differ; the specs of parameters and
    of tokens."""
    missing = [name for name in (parallel.axis_name, *parallel.batch_axes) if name not in mesh.shape]
    if missing:
        raise ValueError(f"mesh has axes {mesh.axis_names}, and parallel names {missing}: name axes of the mesh")
    size = mesh.shape[parallel.axis_name]
    if size != parallel.size:
        raise ValueError(
            f"parallel.size is {parallel.size}, and the mesh has {size} devices along {parallel.axis_name!r}: "
            "they must be the same"
        )
    fsdp = parallel.fsdp
    if fsdp is not None and mesh.shape[fsdp.axis_name] != fsdp.size:
        raise ValueError(
            f"parallel.fsdp.size is {fsdp.size}, and the mesh has {mesh.shape[fsdp.axis_name]} devices along "
            f"{fsdp.axis_name!r}: they must be the same"
        )
    if fsdp is not None and fsdp.replica_axis is not None and mesh.shape[fsdp.replica_axis] == 1:
        fsdp = dataclasses.replace(fsdp, replica_axis=None)
    if fsdp is not None and fsdp.size == 1:
        fsdp = None
    context = parallel.context_axis
    several = {parallel.axis_name, *(name for name in parallel.batch_axes if mesh.shape[name] > 1)}
    parallel = dataclasses.replace(
        parallel,
        fsdp=fsdp,
        batch_axes=tuple(name for name in parallel.batch_axes if name in several),
        expert_axes=tuple(name for name in parallel.expert_axes or () if name in several),
        context_axis=context if context in several else None,
    )
    batch = tuple(name for name in parallel.batch_axes if name != parallel.context_axis)
    return parallel, param_specs(config, parallel), PartitionSpec(batch or None, parallel.context_axis)
