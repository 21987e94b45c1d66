"""The decoder's pieces inside `shard_map`, for devices that share it as `te_jax.models.parallel` says."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from te_jax import native, ops, sharding
from te_jax.models.config import DecoderConfig
from te_jax.models.mixture import Balance, mixture
from te_jax.models.parallel import TensorParallel, kv_heads
from te_jax.parallel import all_gather_matmul, matmul_reduce_scatter
from te_jax.recipe import DelayedScalingState
from te_jax.reference.softmax_cross_entropy import equals

_TIME_AXIS = 1
_NO_TARGET = -100  # `ignore_index` of `te_jax.ops.softmax_cross_entropy`


def enter(params: dict[str, Any], tokens: Array, config: DecoderConfig, parallel: TensorParallel) -> dict[str, Any]:
    """This device's parameters, such that gradients of what all devices have are summed once.

    Raises:
      ValueError: this is no place for `parallel`, or it does not fit the decoder or the tokens.
    """
    parallel.check(config)
    axis = parallel.axis_name
    try:
        size = lax.axis_size(axis)
    except NameError:
        raise ValueError(
            f"parallel.axis_name is {axis!r}, and no such axis is mapped here: call this inside shard_map over a mesh "
            "that has it, or use te_jax.models.parallel_loss"
        ) from None
    if size != parallel.size:
        raise ValueError(f"parallel.size is {parallel.size}, and the mesh has {size} devices along {axis!r}")
    if not sharding.tracked_axes((axis,)):
        raise ValueError(
            "parallel is given where JAX does not track what varies over devices, and gradients of what they share "
            "would not be summed: use shard_map with check_vma=True, its default"
        )
    if tokens.shape[_TIME_AXIS] % size:
        raise ValueError(
            f"tokens has shape {tokens.shape}, a time of {tokens.shape[_TIME_AXIS]}, which the {size} devices of "
            "`parallel` do not divide: pad it, with -100 for targets"
        )
    # Here rather than where they are used, which may be in several places, and twice where blocks are recomputed.
    return jax.tree.map(lambda leaf: sharding.varying_over(leaf, frozenset((axis,))), params)


def features_to_time(x: Array, parallel: TensorParallel) -> Array:
    """[batch, time, D/N] → [batch, time/N, D]."""
    return lax.all_to_all(x, parallel.axis_name, split_axis=_TIME_AXIS, concat_axis=2, tiled=True)


@dataclasses.dataclass(frozen=True)
class SplitProjections:
    """`te_jax.models.decoder.Projections` of a block that devices share."""

    layer: dict[str, Array]
    scaling_state: dict[str, DelayedScalingState] | None
    config: DecoderConfig
    parallel: TensorParallel
    implementation: native.Implementation | None

    def norm(self, x: Array, name: str, residual: Array | None = None) -> tuple[Array, Array]:
        found = ops.rms_norm(
            x,
            self.layer[name],
            epsilon=self.config.norm_eps,
            residual=residual,
            implementation=self.implementation,
        )
        return (found, x) if residual is None else found

    def from_stream(self, x: Array, names: tuple[str, ...]) -> tuple[Array, ...]:
        return all_gather_matmul(
            x,
            tuple(self._kernel(name) for name in names),
            gather_dimension=_TIME_AXIS,
            recipe=self.config.recipe,
            scaling_state=None if self.scaling_state is None else tuple(self.scaling_state[name] for name in names),
            residual=self.parallel.residual,
            implementation=self.implementation,
            **_exchange(self.parallel),
        )

    def to_stream(self, x: Array, name: str) -> Array:
        return matmul_reduce_scatter(
            x,
            self._kernel(name),
            scatter_dimension=_TIME_AXIS,
            recipe=self.config.recipe,
            scaling_state=None if self.scaling_state is None else self.scaling_state[name],
            implementation=self.implementation,
            **_exchange(self.parallel),
        )

    def mlp(self, x: Array) -> tuple[Array, Balance | None]:
        if self.config.experts is not None:
            return mixture(x, self.layer, self.config, self.parallel, self.implementation)
        gate, up = self.from_stream(x, ("gate", "up"))
        return self.to_stream(ops.gated_activation(gate, up), "down"), None

    def _kernel(self, name: str) -> Array:
        kernel, heads = self.layer[name], kv_heads(self.config, self.parallel.size)
        if name not in ("key", "value") or heads.is_split:
            return kernel
        first, width = lax.axis_index(self.parallel.axis_name) * heads.per_device, self.config.head_dim
        return jnp.concatenate(
            [
                lax.dynamic_slice_in_dim(kernel, (first + i) // heads.repeats * width, width, axis=1)
                for i in range(heads.per_device)
            ],
            axis=1,
        )


def logits(x: Array, head: Array, parallel: TensorParallel, implementation: native.Implementation | None) -> Array:
    """[batch, time/N, D] · [D, V/N] → [batch, time, V/N]."""
    return all_gather_matmul(
        x,
        head,
        gather_dimension=_TIME_AXIS,
        residual=parallel.residual,
        implementation=implementation,
        **_exchange(parallel),
    )


def mean_cross_entropy(
    logits: Array, targets: Array, parallel: TensorParallel, implementation: native.Implementation | None
) -> Array:
    """The mean over all tokens with a target, of all devices; logits are [batch, time, V/N]."""
    total = ops.softmax_cross_entropy(
        logits, targets, reduction="sum", axis_name=parallel.axis_name, implementation=implementation
    )
    counted = jnp.sum(~equals(targets, _NO_TARGET), dtype=jnp.int32)
    if parallel.batch_axes:
        total, counted = lax.psum((total, counted), parallel.batch_axes)
    return total / jnp.maximum(counted, 1).astype(total.dtype)


def _exchange(parallel: TensorParallel) -> dict[str, Any]:
    """Arguments that all collective products have."""
    return {
        "axis_name": parallel.axis_name,
        "transport": parallel.transport,
        "bidirectional": parallel.bidirectional,
        "timeout": parallel.timeout,
    }
