"""A block's mixture of experts, and what losses and logs need to know of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from te_jax import native, ops
from te_jax.layers.microbatches import dense_kernels
from te_jax.layers.mixture import moe
from te_jax.models.config import MLP, DecoderConfig
from te_jax.models.parallel import TensorParallel


class Balance(NamedTuple):
    """The auxiliary loss and the largest load of the experts of the blocks so far: float32 scalars."""

    auxiliary: jax.Array
    largest_load: jax.Array


def mixture(
    x: jax.Array,
    layer: dict[str, Any],
    config: DecoderConfig,
    parallel: TensorParallel | None,
    implementation: native.Implementation | None,
) -> tuple[jax.Array, Balance]:
    """The experts' result for tokens x [batch, time, D], and how all tokens share the experts.

    Args:
      x, layer, config, parallel: of a block.
      implementation: see `te_jax.layers.moe`.
    """
    token_axes = expert_axes = None
    if parallel is not None:
        token_axes = (*parallel.batch_axes, parallel.axis_name)
        whole = parallel.size == 1 and parallel.expert_axes == (parallel.axis_name,)
        expert_axes = None if whole else parallel.expert_axes or None
    experts = config.experts
    assert experts is not None
    kernels = dense_kernels([layer[name] for name in MLP])
    gate, up, down = kernels.pop("kernel")
    found = moe(
        x,
        layer["router"],
        (gate, up, down),
        experts.router,
        router_bias=layer.get("router_bias"),
        bias=(layer.get("gate_bias"), layer.get("up_bias"), layer.get("down_bias")),
        activation=config.activation,
        **kernels,
        expert_parallel=expert_axes,
        recipe=config.recipe,
        implementation=implementation,
    )
    over: Any = {"token_axis": token_axes}
    chosen = found.routing.experts
    auxiliary = jnp.zeros((), jnp.float32)
    if experts.balance_weight:
        balance = ops.load_balancing_loss(found.logits, chosen, score=experts.router.score, **over)
        auxiliary += experts.balance_weight * balance
    if experts.z_weight:
        auxiliary += experts.z_weight * ops.router_z_loss(found.logits, **over)
    counts = ops.expert_counts(chosen, experts.num_experts, **over).astype(jnp.float32)
    return found.y, Balance(auxiliary, jnp.max(counts) / jnp.mean(counts))
