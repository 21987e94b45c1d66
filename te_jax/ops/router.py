"""Which experts a token goes to, with which weights, and the losses that keep the experts evenly used."""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from te_jax import sharding
from te_jax._core.arguments import as_flag, is_finite_number, is_whole_number
from te_jax._core.integers import as_int32
from te_jax._core.types import FLOAT_NAMES, FLOATS
from te_jax.ops.operands import as_array
from te_jax.sharding import AxisName

__all__ = ["Routing", "expert_counts", "load_balancing_loss", "router", "router_z_loss", "update_expert_bias"]

Score = Literal["softmax", "sigmoid"]


class Routing(NamedTuple):
    """The experts of every token.

    Attributes:
      experts: int32 [*tokens, top_k], those with the highest scores, the highest first.
      weights: float32 [*tokens, top_k], by which the experts' results count.
    """

    experts: Array
    weights: Array


def router(
    logits: jax.typing.ArrayLike,
    *,
    top_k: int,
    score: Score = "softmax",
    normalize: bool = True,
    num_groups: int = 1,
    top_groups: int = 1,
    expert_bias: jax.typing.ArrayLike | None = None,
    scaling_factor: float = 1.0,
    top_of_group: int | None = None,
) -> Routing:
    r"""Chooses `top_k` experts for every token, and their weights.

    With scores s = softmax(logits) over all experts, or s = sigmoid(logits), and I the chosen experts:

        c = s + expert_bias
        I = the top_k experts with the highest c, out of the top_groups groups with the highest sums of their
            top_of_group highest c
        w = scaling_factor · s_I / Σ s_I        or  scaling_factor · s_I  without `normalize`

    A normalized softmax is the softmax of the chosen logits, as in Mixtral, Qwen3-MoE and gpt-oss. score="sigmoid" with
    groups, bias and a scaling factor of 2.5 is DeepSeek-V3's router, and softmax with top_of_group=1, normalize=False
    DeepSeek-V2's; sigmoid with top_k=1 and normalize=False is Llama-4's, whose weights multiply the experts' inputs.
    All of it is computed in float32. If values of c are equal, the expert with the lowest index is chosen; NaN counts
    as the highest. Scores and sums are those of the chosen experts in the backward pass too: the choice and the bias
    have no gradient.

    Args:
      logits: [*tokens, experts], float32, bfloat16 or float16. Tokens may be split over devices; experts must not.
      top_k: number of experts for a token.
      score: "softmax" or "sigmoid".
      normalize: whether the weights of a token sum to `scaling_factor`.
      num_groups: number of groups of consecutive experts; divides the number of experts.
      top_groups: number of groups that the experts of one token may come from; divides top_k, or give top_of_group.
      expert_bias: [experts], any float dtype; see `update_expert_bias`. It moves the choice, not the weights.
      scaling_factor: factor of all weights.
      top_of_group: number of experts of a group whose c are summed; None is top_k / top_groups.

    Returns:
      Routing(experts, weights). The gradient of the weights has the dtype of the logits.

    Raises:
      ValueError: an argument breaks a rule above; the message names it.

    References:
      Mixtral: arXiv:2401.04088. DeepSeek-V3: arXiv:2412.19437. Balancing by a bias: arXiv:2408.15664.

    Examples:
      >>> import jax.numpy as jnp
      >>> from te_jax import ops
      >>> routing = ops.router(jnp.log(jnp.array([[1.0, 3.0, 2.0, 1.0]])), top_k=2)
      >>> routing.experts.tolist(), [round(w, 3) for w in routing.weights[0].tolist()]
      ([[1, 2]], [0.6, 0.4])
    """
    logits = _as_logits(logits)
    experts = logits.shape[-1]
    _validate_score(score)
    _validate_groups(experts, top_k, num_groups, top_groups, top_of_group)
    if not is_finite_number(scaling_factor):
        raise ValueError(f"scaling_factor is {scaling_factor!r}; it must be a finite number")
    if expert_bias is not None:
        expert_bias = as_array("expert_bias", expert_bias)
        if expert_bias.shape != (experts,) or not jnp.issubdtype(expert_bias.dtype, jnp.floating):
            raise ValueError(
                f"expert_bias has shape {expert_bias.shape} and dtype {expert_bias.dtype}; it must be a float array of "
                f"shape {(experts,)}, one value for each expert"
            )
    return _router(
        logits,
        expert_bias,
        int(top_k),
        score,
        as_flag("normalize", normalize),
        int(num_groups),
        int(top_groups),
        float(scaling_factor),
        int(top_k) // int(top_groups) if top_of_group is None else int(top_of_group),
    )


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5, 6, 7, 8), inline=sharding.INLINE)
def _router(
    logits: Array,
    expert_bias: Array | None,
    top_k: int,
    score: Score,
    normalize: bool,
    num_groups: int,
    top_groups: int,
    scaling_factor: float,
    top_of_group: int,
) -> Routing:
    # Scores saturate where logits still differ: without a bias and groups, which are about scores, logits decide.
    choice = lax.stop_gradient(logits).astype(jnp.float32)
    if expert_bias is not None or top_groups < num_groups:
        choice = _scores(choice, score)
    if expert_bias is not None:
        bias = lax.stop_gradient(expert_bias).astype(jnp.float32)
        choice = choice + lax.expand_dims(bias, range(choice.ndim - 1))
    if top_groups < num_groups:
        choice = _within_groups(choice, num_groups, top_groups, top_of_group)
    experts = lax.top_k(choice, top_k)[1].astype(jnp.int32)

    # Keeps logits and experts for the backward pass, rather than masks [*tokens, top_k, experts].
    weigh = jax.checkpoint(functools.partial(_weights, score=score, normalize=normalize))
    return Routing(experts, weigh(logits, experts) * scaling_factor)


def _weights(logits: Array, experts: Array, *, score: Score, normalize: bool) -> Array:
    logits = logits.astype(jnp.float32)
    chosen = _at(logits, experts)
    if normalize:
        # s / Σs of scores s is the softmax of log(s), which no underflow of scores divides by zero.
        return jax.nn.softmax(chosen if score == "softmax" else jax.nn.log_sigmoid(chosen), axis=-1)
    if score == "softmax":
        return jnp.exp(chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
    return jax.nn.sigmoid(chosen)


def _within_groups(choice: Array, num_groups: int, top_groups: int, of_group: int) -> Array:
    """The scores, -inf outside the groups whose `of_group` highest scores have the highest sums."""
    grouped = choice.reshape(*choice.shape[:-1], num_groups, -1)
    sums = jnp.sum(lax.top_k(grouped, of_group)[0], axis=-1)
    chosen = lax.top_k(sums, top_groups)[1]
    kept = jnp.any(_equals(chosen, num_groups), axis=-2)
    return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(choice.shape)


@jax.custom_jvp
def _at(values: Array, experts: Array) -> Array:
    """values [*tokens, experts] at [*tokens, k]."""
    return jnp.take_along_axis(values, experts, axis=-1, mode="promise_in_bounds")


@_at.defjvp
def _(primals, tangents):
    """Derivatives as sums over all but one masked value: their transpose is one loop, where that of a gather would be a
    scatter."""
    (values, experts), (tangent, _) = primals, tangents
    count = values.shape[-1]
    columns = [
        jnp.sum(jnp.where(_equals(experts[..., k], count), tangent, 0.0), axis=-1) for k in range(experts.shape[-1])
    ]
    return _at(values, experts), jnp.stack(columns, axis=-1)


def _equals(indices: Array, count: int) -> Array:
    """bool [*indices, count]: whether an index is 0, 1, …"""
    return indices[..., None] == lax.expand_dims(jnp.arange(count, dtype=indices.dtype), range(indices.ndim))


# --------------------------------------------------------------------------------------------------------------- losses


def load_balancing_loss(
    logits: jax.typing.ArrayLike,
    experts: jax.typing.ArrayLike,
    *,
    score: Score = "softmax",
    per_sequence: bool = False,
    mask: jax.typing.ArrayLike | None = None,
    token_axis: AxisName | None = None,
    sequence_axis: AxisName | None = None,
) -> Array:
    r"""The auxiliary loss of a router: 1 where all experts are used evenly, and up to E where one has all tokens.

    With N tokens of K experts each, C_e the number of those that chose expert e, and p = s / Σ s the scores of a token
    over all E experts, without bias and groups:

        f_e = C_e / (K N)        P_e = 1/N Σ_t p_te        loss = E Σ_e f_e P_e

    The gradient comes through P alone. Multiply the loss by its weight: 1e-2 in the Switch Transformer, and 1e-4 in
    DeepSeek-V3, which takes it for each sequence.

    Args:
      logits: [*tokens, experts], those that `router` was given.
      experts: integers [*tokens, top_k], from `router`.
      score: as `router` was told.
      per_sequence: takes the loss of every sequence, over the last dimension of tokens, and of these the mean.
      mask: bool [*tokens], False for tokens that do not count, such as padding. Sequences without any that count are
        left out of the mean.
      token_axis: inside `shard_map` or `pmap`, the mesh axis or axes that split the tokens. All counts and means are
        then over the tokens of all devices, and so is the loss. Under `jit` leave it None. Under `pmap` and with
        check_vma=False, gradients taken inside are those of the sum of all devices' losses, as with JAX's own `psum`.
      sequence_axis: those that split every sequence. With per_sequence, `token_axis` splits whole sequences.

    Returns:
      float32 scalar; 0 where no token counts.

    Raises:
      ValueError: an argument breaks a rule above; the message names it.

    References:
      Switch Transformer: arXiv:2101.03961. Per sequence: arXiv:2412.19437, equation 17.

    Examples:
      >>> import jax.numpy as jnp
      >>> from te_jax import ops
      >>> logits = 5.0 * jnp.eye(4)
      >>> round(ops.load_balancing_loss(logits, ops.router(logits, top_k=1).experts).item(), 4)
      1.0
    """
    logits, experts = _as_logits(logits), as_array("experts", experts)
    _validate_experts(experts)
    if experts.shape[:-1] != logits.shape[:-1]:
        raise ValueError(
            f"experts have shape {experts.shape} and logits {logits.shape}; both must begin with the same tokens"
        )
    _validate_score(score)
    if (per_sequence := as_flag("per_sequence", per_sequence)) and logits.ndim < 2:
        raise ValueError(f"logits have shape {logits.shape}; per_sequence=True needs [*batch, sequence, experts]")
    axes = _split_axes(logits, token_axis, "token_axis")
    sequence_axes = _split_axes(logits, sequence_axis, "sequence_axis")
    if same := sorted(set(axes) & set(sequence_axes)):
        raise ValueError(f"token_axis and sequence_axis both name {same}; each mesh axis splits one of them")
    counted = _as_mask(mask, logits.shape[:-1])

    # Masked before the softmax: a token that does not count may have logits that are not finite.
    logits = jnp.where(counted[..., None], logits.astype(jnp.float32), 0.0)
    scores = jax.nn.softmax(logits if score == "softmax" else jax.nn.log_sigmoid(logits), axis=-1)
    within = tuple(range(logits.ndim - 2 if per_sequence else 0, logits.ndim - 1))
    over = sequence_axes if per_sequence else (*axes, *sequence_axes)

    def total(x: Array) -> Array:
        return _psum(jnp.sum(x, axis=within), over)

    counts = total(jnp.where(counted[..., None], _chosen(experts, logits.shape[-1]), 0)).astype(jnp.float32)
    sums = total(jnp.where(counted[..., None], scores, 0.0))
    tokens = total(counted).astype(jnp.float32)
    at_least_one = jnp.maximum(tokens, 1.0)[..., None]
    fractions, means = counts / (experts.shape[-1] * at_least_one), sums / at_least_one
    losses = logits.shape[-1] * jnp.sum(lax.stop_gradient(fractions) * means, axis=-1)
    if not per_sequence:
        return losses
    sequences = _psum(jnp.sum(tokens > 0), axes)
    return _psum(jnp.sum(losses), axes) / jnp.maximum(sequences, 1).astype(jnp.float32)


def router_z_loss(
    logits: jax.typing.ArrayLike,
    *,
    mask: jax.typing.ArrayLike | None = None,
    token_axis: AxisName | None = None,
) -> Array:
    r"""The mean over tokens of (log Σ_e exp(logits_e))², which keeps the logits of a router from growing.

    Args:
      logits: [*tokens, experts], float32, bfloat16 or float16.
      mask: bool [*tokens], False for tokens that do not count.
      token_axis: inside `shard_map` or `pmap`, the mesh axis or axes that split the tokens; the mean is over all of
        them. See `load_balancing_loss`.

    Returns:
      float32 scalar; 0 where no token counts.

    Raises:
      ValueError: an argument breaks a rule above; the message names it.

    References:
      ST-MoE: arXiv:2202.08906.

    Examples:
      >>> import jax.numpy as jnp
      >>> from te_jax import ops
      >>> round(ops.router_z_loss(jnp.zeros((3, 8))).item(), 4), round(float(jnp.log(8) ** 2), 4)
      (4.3241, 4.3241)
    """
    logits = _as_logits(logits)
    axes = _split_axes(logits, token_axis, "token_axis")
    counted = _as_mask(mask, logits.shape[:-1])
    lse = jax.nn.logsumexp(jnp.where(counted[..., None], logits.astype(jnp.float32), 0.0), axis=-1)
    total = _psum(jnp.sum(jnp.where(counted, jnp.square(lse), 0.0)), axes)
    return total / jnp.maximum(_psum(jnp.sum(counted), axes), 1).astype(jnp.float32)


# ------------------------------------------------------------------------------------------------ balancing by a bias


def expert_counts(
    experts: jax.typing.ArrayLike,
    num_experts: int,
    *,
    mask: jax.typing.ArrayLike | None = None,
    token_axis: AxisName | None = None,
) -> Array:
    """The number of tokens that chose each expert.

    Args:
      experts: integers [*tokens, top_k]. Those outside [0, num_experts) are no expert's.
      num_experts: number of experts.
      mask: bool [*tokens], False for tokens that do not count.
      token_axis: inside `shard_map` or `pmap`, the mesh axis or axes that split the tokens.

    Returns:
      int32 [num_experts].

    Raises:
      ValueError: an argument breaks a rule above; the message names it.

    Examples:
      >>> import jax.numpy as jnp
      >>> from te_jax import ops
      >>> ops.expert_counts(jnp.array([[0, 2], [2, 1]]), 4).tolist()
      [1, 1, 2, 0]
    """
    experts = as_array("experts", experts)
    _validate_experts(experts)
    if not (is_whole_number(num_experts) and num_experts >= 1):
        raise ValueError(f"num_experts is {num_experts!r}; it must be an integer of at least 1")
    axes = _split_axes(experts, token_axis, "token_axis", name="experts")
    counted = _as_mask(mask, experts.shape[:-1])
    chosen = jnp.where(counted[..., None], _chosen(experts, int(num_experts)), 0)
    return _psum(jnp.sum(chosen, axis=tuple(range(chosen.ndim - 1)), dtype=jnp.int32), axes)


def update_expert_bias(expert_bias: jax.typing.ArrayLike, counts: jax.typing.ArrayLike, *, rate: float = 1e-3) -> Array:
    r"""The next `expert_bias` of `router`: up for experts with fewer tokens than the mean, down for those with more.

        b + rate · sign(mean(counts) - counts)

    Call it once for each optimizer step, with the counts of all its microbatches and devices. The bias is no parameter:
    keep it in a mutable collection of Linen or a `nnx.Variable`, where the optimizer does not see it.

    Args:
      expert_bias: [experts], float32; a smaller dtype would round the steps away.
      counts: [experts], from `expert_counts`, summed over microbatches.
      rate: γ, the size of a step.

    Returns:
      float32 [experts].

    Raises:
      ValueError: an argument breaks a rule above; the message names it.

    References:
      Auxiliary-loss-free balancing: arXiv:2408.15664.

    Examples:
      >>> import jax.numpy as jnp
      >>> from te_jax import ops
      >>> [round(b, 3) for b in ops.update_expert_bias(jnp.zeros(3), jnp.array([9, 0, 3]), rate=0.5).tolist()]
      [-0.5, 0.5, 0.5]
    """
    expert_bias, counts = as_array("expert_bias", expert_bias), as_array("counts", counts)
    if expert_bias.ndim != 1 or expert_bias.dtype != jnp.float32:
        raise ValueError(
            f"expert_bias has shape {expert_bias.shape} and dtype {expert_bias.dtype}; it must be float32 [experts]"
        )
    if counts.shape != expert_bias.shape:
        raise ValueError(f"counts have shape {counts.shape}; they must have that of expert_bias, {expert_bias.shape}")
    if not (is_finite_number(rate) and rate >= 0.0):
        raise ValueError(f"rate is {rate!r}; it must be a finite number of at least 0")
    load = lax.stop_gradient(counts).astype(jnp.float32)
    return expert_bias + rate * jnp.sign(jnp.mean(load) - load)


# ---------------------------------------------------------------------------------------------------------------- parts


def _scores(logits: Array, score: Score) -> Array:
    return jax.nn.softmax(logits, axis=-1) if score == "softmax" else jax.nn.sigmoid(logits)


def _chosen(experts: Array, count: int) -> Array:
    """int32 [*tokens, count]: how many of a token's choices each expert is."""
    experts = as_int32(experts)
    masks = (_equals(experts[..., k], count).astype(jnp.int32) for k in range(experts.shape[-1]))
    return functools.reduce(jnp.add, masks)  # one loop, without an array [*tokens, top_k, count]


def _psum(x: Array, axes: tuple[str, ...]) -> Array:
    if not axes:
        return x
    # What is the same on all devices, such as a number of tokens without a mask, is one summand on each.
    return lax.psum(sharding.varying_over(x, sharding.tracked_axes(axes)), axes)


def _as_logits(logits: jax.typing.ArrayLike) -> Array:
    logits = as_array("logits", logits)
    if logits.dtype not in FLOATS:
        raise ValueError(f"logits have dtype {logits.dtype}; they must be {FLOAT_NAMES}: cast them")
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits have shape {logits.shape}; they need a last dimension, the experts, of 1 or more")
    return logits


def _as_mask(mask: jax.typing.ArrayLike | None, tokens: tuple[int, ...]) -> Array:
    if mask is None:
        return jnp.ones(tokens, jnp.bool_)
    mask = as_array("mask", mask)
    if mask.shape != tokens or mask.dtype != jnp.bool_:
        raise ValueError(f"mask has shape {mask.shape} and dtype {mask.dtype}; it must be bool {tokens}, as the tokens")
    return mask


def _split_axes(x: Array, token_axis: sharding.AxisName | None, argument: str, name: str = "logits") -> tuple[str, ...]:
    if token_axis is None:
        return ()
    axes, _ = sharding.mapped_axes(token_axis, argument)
    remedy = f"pass each device its own tokens, by in_specs such as P({token_axis!r}), or {argument}=None"
    sharding.validate_split(name, x, axes, remedy, argument)
    return axes


def _validate_score(score: object) -> None:
    if score not in ("softmax", "sigmoid"):
        raise ValueError(f"score is {score!r}; it must be 'softmax' or 'sigmoid'")


def _validate_experts(experts: Array) -> None:
    if experts.ndim == 0 or experts.shape[-1] == 0 or not jnp.issubdtype(experts.dtype, jnp.integer):
        raise ValueError(
            f"experts have shape {experts.shape} and dtype {experts.dtype}; they must be integers [*tokens, top_k], "
            "as te_jax.ops.router returns them"
        )


def _validate_groups(experts: int, top_k: int, num_groups: int, top_groups: int, top_of_group: int | None) -> None:
    given = {"top_k": top_k, "num_groups": num_groups, "top_groups": top_groups}
    for name, value in (given if top_of_group is None else given | {"top_of_group": top_of_group}).items():
        if not (is_whole_number(value) and value >= 1):
            raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
    if top_k > experts:
        raise ValueError(f"top_k is {top_k}; there are only {experts} experts")
    if experts % num_groups:
        raise ValueError(f"num_groups is {num_groups}; it must divide the number of experts, {experts}")
    if top_groups > num_groups:
        raise ValueError(f"top_groups is {top_groups}; there are only {num_groups} groups")
    if top_groups < num_groups and top_of_group is None and top_k % top_groups:
        raise ValueError(f"top_groups is {top_groups}; it must divide top_k, {top_k}, or give top_of_group")
    if top_of_group is not None and top_of_group > experts // num_groups:
        raise ValueError(f"top_of_group is {top_of_group}; a group has only {experts // num_groups} experts")
    if top_groups < num_groups and top_k > top_groups * (experts // num_groups):
        raise ValueError(
            f"top_k is {top_k}; {top_groups} groups of {experts // num_groups} experts have only "
            f"{top_groups * (experts // num_groups)}"
        )
