"""Policies for `jax.checkpoint` that keep FP8 operands, one byte a value, and results of attention.

The rest is recomputed.

    layer = jax.checkpoint(layer, policy=te_jax.checkpoint_policies.save_fp8_operands)

`te_jax.ops.dense` gives names to what its backward pass reads; these policies, and any of `jax.checkpoint_policies`
that takes names, choose among them:

    te_dense_activation      x in FP8, transposed, with its scales: 1 byte a value
    te_dense_kernel          kernel in FP8, with its scales: 1 byte a value; a kernel that is passed in quantized has no
                             name, for it is there anyway
    te_dense_preactivation   y before the activation, in the dtype of x; layers without activation have none

and `te_jax.ops.attention` to its operands and to its results, without which it would run twice:

    te_attention_operand     query, key and value
    te_attention_output      [B, T, N, H] in the dtype of query
    te_attention_lse         float32 [B, N, T]

Norms name what they normalize, which is the sum where they are given a residual:

    te_norm_input            in the dtype of x

`te_jax.ops.grouped_dense` has the first two names of `dense`, and `te_jax.layers.moe` one more:

    te_moe_preactivation     gate and up [rows, hidden] of the experts, in the dtype of x: all that it keeps of rows

With experts on several devices, `te_jax.parallel.dispatch` names what arrives, without which it would travel twice:

    te_dispatched_rows       [rows, in], or with exchange="all_gather" the tokens of all devices, with their weights: 1
                             byte a value and the scales where they travel in FP8, else in the dtype of x

Losses have names for `jax.checkpoint_policies.save_only_these_names`:

    softmax_cross_entropy_lse      float32 [*batch]
    linear_cross_entropy_lse       float32 [*batch], with reduction="none"
    linear_cross_entropy_gradient  the gradients of a scalar loss, without which it would run twice: of x in its dtype,
                                   of kernel and bias in float32

`jax.checkpoint_policies.save_from_both_policies(save_fp8_operands, save_attention)` keeps both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

__all__ = [
    "Policy",
    "offload_fp8_operands",
    "save_attention",
    "save_fp8_operands",
    "save_fp8_operands_and_preactivations",
]

Policy = Callable[..., Any]

_OPERANDS = ("te_dense_activation", "te_dense_kernel")
_PREACTIVATION = "te_dense_preactivation"

save_fp8_operands: Policy = jax.checkpoint_policies.save_only_these_names(*_OPERANDS)
"""Keeps the FP8 operands. Before activations one forward product is run again; elsewhere no product is."""

save_fp8_operands_and_preactivations: Policy = jax.checkpoint_policies.save_only_these_names(*_OPERANDS, _PREACTIVATION)
"""Keeps the FP8 operands and what activations are applied to: no product is run again, only what is cheap."""

save_attention: Policy = jax.checkpoint_policies.save_only_these_names("te_attention_output", "te_attention_lse")
"""Keeps the results of attention: the backward pass does not compute attention again, only its operands."""


def offload_fp8_operands(
    *, preactivations: bool = False, offload_src: str = "device", offload_dst: str = "pinned_host"
) -> Policy:
    """Keeps activations in FP8 in host memory and kernels in FP8 on the device, and recomputes the rest.

    For a `lax.scan` over layers, where XLA hides no copy. For a loop of layers use `te_jax.offload.Offload`: its copies
    run beside the layers.

    Args:
      preactivations: also keep, in host memory, what activations are applied to.
      offload_src: memory kind of the device.
      offload_dst: memory kind to keep them in.

    Returns:
      A policy for `jax.checkpoint`.
    """
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["te_dense_kernel"],
        names_which_can_be_offloaded=["te_dense_activation", *([_PREACTIVATION] if preactivations else [])],
        offload_src=offload_src,
        offload_dst=offload_dst,
    )
