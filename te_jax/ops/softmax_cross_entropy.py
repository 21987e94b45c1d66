"""Softmax cross-entropy that reads the logits once forward and once backward."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

from te_jax import native, reference, sharding
from te_jax._core.arguments import is_finite_number, is_whole_number
from te_jax._core.reverse_mode import reverse_mode_only
from te_jax.ops._operands import as_array
from te_jax.reference.softmax_cross_entropy import equals, in_vocabulary, nan_unless, reduce_tokens
from te_jax.sharding import AxisName

# Codes of labels for the kernel, beside columns of the local vocabulary.
_IGNORED = -1  # the row is not read
_ELSEWHERE = -2  # no target in this shard

_REVERSE_MODE = (
    "te_jax.ops.softmax_cross_entropy with native kernels has first derivatives in reverse mode (jax.grad, jax.vjp) "
    "only: for forward mode (jax.jvp, jax.jacfwd) or second derivatives use implementation='reference'"
)
_LARGEST = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class _Loss:
    """The static arguments, together: hashable, so that a loss is traced once."""

    label_smoothing: float
    ignore_index: int
    z_loss: float
    logit_softcap: float | None
    axis_name: tuple[str, ...]

    @property
    def split(self) -> dict[str, Any]:
        """The `axes` and `softcap` of the calls below."""
        return {"axes": {"v": self.axis_name} if self.axis_name else {}, "softcap": self.logit_softcap or 0.0}

    def vocab(self, logits: Array) -> int:
        """The size of the whole vocabulary."""
        return logits.shape[-1] * (lax.axis_size(self.axis_name) if self.axis_name else 1)


def softmax_cross_entropy(
    logits: jax.typing.ArrayLike,
    labels: jax.typing.ArrayLike,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    logit_softcap: float | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    axis_name: AxisName | None = None,
    implementation: native.Implementation | None = None,
) -> Array:
    r"""Cross-entropy of the softmax over the last dimension against integer labels.

    With z = logits, or z = c · tanh(logits / c) for a soft cap c, with ε = label_smoothing and V the vocabulary:

        lse  = log Σ_v exp(z_v)
        loss = lse - (1 - ε) z[label] - ε/V Σ_v z_v + z_loss · lse²

    The forward pass reads the logits once and keeps one float32 `lse` a row (checkpoint name
    "softmax_cross_entropy_lse"). The backward pass reads them once more and writes the gradient, over the logits
    themselves where XLA may reuse their buffer. There is never a float32 copy of the logits.

    Args:
      logits: [*batch, vocab], float32, bfloat16 or float16. They may be sharded in any way: over batch dimensions
        devices exchange nothing, over the vocabulary four floats a row.
      labels: [*batch], any integer dtype, in [0, vocab) or `ignore_index`. Any other label makes its row's loss and
        gradient NaN.
      label_smoothing: ε in [0, 1]: probability that is spread evenly over the whole vocabulary. Σ_v z_v is summed in
        float32: where it exceeds 3.4e38, the loss is not finite.
      ignore_index: rows with this label have loss 0 and gradient 0, and are not read.
      z_loss: weight of lse², at least 0; keeps the logits from drifting.
      logit_softcap: c, from 1e-30 to 1e30, or None for none.
      reduction: "mean" over the rows that are not ignored (at least 1), "sum", or "none" for [*batch].
      axis_name: inside `shard_map` or `pmap`, the mesh axis or axes that split the vocabulary in equal shards, in
        order. Labels then count over the whole vocabulary, and the loss is the same on every shard. Under `jit` on
        Auto or Explicit meshes leave it None. Under `pmap` and with check_vma=False, gradients taken inside are those
        of the sum of all shards' losses, as with JAX's own `psum`.
      implementation: None uses the native kernel where there is one, else the reference; "native" or "reference" never
        fall back.

    Returns:
      float32 scalar, or [*batch] for reduction="none". The gradient has the dtype of the logits.

    Raises:
      ValueError: for shapes, dtypes or parameters that break a rule above, naming the argument.
      NotImplementedError: for forward mode and second derivatives with the native kernel.
      te_jax.native.NativeUnavailableError: for implementation="native" where it cannot run.

    References:
      Online softmax: arXiv:1805.02867. Label smoothing: arXiv:1512.00567. z-loss: arXiv:2204.02311. Soft cap:
      arXiv:2408.00118.

    Examples:
      >>> import jax, jax.numpy as jnp, te_jax
      >>> logits, labels = jnp.zeros((3, 4)), jnp.array([0, 2, -100])
      >>> loss, gradient = jax.jit(jax.value_and_grad(te_jax.ops.softmax_cross_entropy))(logits, labels)
      >>> bool(jnp.allclose(loss, jnp.log(4))), gradient[0, 0].item(), gradient[2, 0].item()
      (True, -0.375, 0.0)
    """
    logits, labels = as_array("logits", logits), as_array("labels", labels)
    _validate(logits, labels, reduction)
    if not is_whole_number(ignore_index):
        raise ValueError(f"ignore_index is {ignore_index!r}; it must be an integer, such as -100")
    label_smoothing = _number("label_smoothing", label_smoothing, "a number in [0, 1], 0 for none", 0, 1)
    z_loss = _number("z_loss", z_loss, "a finite number of at least 0 that float32 holds, 0 for none", 0, _LARGEST)
    if logit_softcap is not None:  # beyond these limits c or logits / c would be subnormal
        logit_softcap = _number("logit_softcap", logit_softcap, "a number from 1e-30 to 1e30, or None", 1e-30, 1e30)
    axes = () if axis_name in (None, (), []) else sharding.mapped_axes(axis_name)[0]
    remedy = f"pass the device's shard of the vocabulary, by in_specs such as P(None, {axis_name!r}), or axis_name=None"
    sharding.validate_split("logits", logits, axes, remedy)
    if use_native := native.use_native(implementation):
        logits = reverse_mode_only(logits, _REVERSE_MODE)
    loss = _Loss(label_smoothing, int(ignore_index), z_loss, logit_softcap, axes)
    return _softmax_cross_entropy(logits, labels, loss, reduction, use_native)


def _validate(logits: Array, labels: Array, reduction: str) -> None:
    if logits.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"logits have dtype {logits.dtype}; they must be float32, bfloat16 or float16: cast them")
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits have shape {logits.shape}; they need a last dimension, the vocabulary, of 1 or more")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"labels have dtype {labels.dtype}; they must be integers, one for each row of the logits")
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels have shape {labels.shape}; for logits of shape {logits.shape} they must have {logits.shape[:-1]}"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}; it must be 'mean', 'sum' or 'none'")


def _number(name: str, value: Any, rule: str, least: float, most: float) -> float:
    if isinstance(value, Tracer):
        raise ValueError(f"{name} is traced; it must be {rule}, known while tracing: make it a static argument")
    if not is_finite_number(value) or not least <= float(value) <= most:
        raise ValueError(f"{name} is {value!r}; it must be {rule}")
    return float(value)


# Under jit even when called eagerly: sharded operands are then partitioned rather than gathered.
@functools.partial(jax.jit, static_argnums=(2, 3, 4), inline=sharding.INLINE)
def _softmax_cross_entropy(logits: Array, labels: Array, loss: _Loss, reduction: str, use_native: bool) -> Array:
    if not use_native:
        return reference.softmax_cross_entropy(logits, labels, reduction=reduction, **dataclasses.asdict(loss))
    losses = cast(Array, _per_token(logits, labels, loss))
    return reduce_tokens(losses, equals(sharding.split_as_last(labels, losses), loss.ignore_index), reduction)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _per_token(logits: Array, labels: Array, loss: _Loss) -> Array:
    return _forward(logits, labels, loss)[0]


def _forward(logits: Array, labels: Array, loss: _Loss):
    vocab = loss.vocab(logits)
    codes = jnp.where(in_vocabulary(labels, vocab), labels.astype(jnp.int32), _ELSEWHERE)
    codes = jnp.where(equals(labels, loss.ignore_index), _IGNORED, codes)
    lse, target, total = _row_statistics(logits, codes, with_total=loss.label_smoothing > 0.0, **loss.split)
    codes = sharding.split_as_last(codes, lse)
    lse = checkpoint_name(lse, "softmax_cross_entropy_lse")

    value = lse - (1.0 - loss.label_smoothing) * target
    if loss.label_smoothing:
        value -= loss.label_smoothing / vocab * total
    if loss.z_loss:
        value += loss.z_loss * lse * lse  # in this order it overflows only where the result does
    return _where_counted(codes, value), (logits, codes, lse)


# Under jit, or each gradient outside of jit would trace it anew.
@functools.partial(jax.jit, static_argnums=0, inline=sharding.INLINE)
def _backward(loss: _Loss, residuals, cotangent: Array):
    logits, codes, lse = residuals
    weight = _where_counted(codes, _over_replicas(cotangent, loss.axis_name))
    (gradient,) = _logits_gradient(
        logits,
        codes,
        lse,
        weight,
        label_smoothing=loss.label_smoothing,
        uniform=loss.label_smoothing / loss.vocab(logits),
        z_loss=loss.z_loss,
        **loss.split,
    )
    return gradient, None


_per_token.defvjp(_forward, _backward)


@sharding.per_shard("... v, ... -> ..., ..., ...", axes_of=("v",))
def _row_statistics(logits: Array, codes: Array, *, axes, **attributes) -> tuple[Array, ...]:
    """(lse, z[label], Σz) of each row, float32 [*batch], from the one read of the logits in the forward pass."""
    if "v" in axes:
        codes = _local_codes(codes, logits.shape[-1], axes["v"])
        return _merge(_row_statistics(logits, codes, **attributes), axes["v"])
    row = jax.ShapeDtypeStruct(codes.shape, jnp.float32)
    return native.call("te_softmax_cross_entropy_statistics", (row, row, row), logits, codes, **attributes)


@sharding.per_shard("... v, ..., ..., ... -> ... v", axes_of=("v",), reuse={0: 0})
def _logits_gradient(logits: Array, codes: Array, lse: Array, weight: Array, *, axes, reuse, **attributes):
    """The gradient of Σ weight · loss, over the logits themselves where their buffer is free."""
    if "v" in axes:
        codes = _local_codes(codes, logits.shape[-1], axes["v"])
        return _logits_gradient(logits, codes, lse, weight, reuse=reuse, **attributes)
    return native.call(
        "te_softmax_cross_entropy_gradient", (logits,), logits, codes, lse, weight, aliases=reuse, **attributes
    )


def _local_codes(codes: Array, local_vocab: int, axis_name: AxisName) -> Array:
    """Codes in this device's shard of the vocabulary from those in the whole vocabulary."""
    column = codes - lax.axis_index(axis_name) * local_vocab
    here = (codes >= 0) & (column >= 0) & (column < local_vocab)
    return jnp.where(here, column, jnp.where(codes == _IGNORED, _IGNORED, _ELSEWHERE))


def _merge(statistics: tuple[Array, ...], axis_name: AxisName) -> tuple[Array, ...]:
    """Statistics of whole rows from those of their shards: a max and a sum over the axis, four floats a row."""
    lse, target, total = statistics
    peak = lax.pmax(lse, axis_name)
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)
    mass, target, total = lax.psum((jnp.exp(lse - peak), target, total), axis_name)
    return peak + jnp.log(mass), target, total


def _where_counted(codes: Array, value: Array) -> Array:
    """Zero in ignored rows, NaN in rows whose label is outside the vocabulary."""
    return jnp.where(codes == _IGNORED, 0.0, value * nan_unless(codes != _ELSEWHERE))


def _over_replicas(cotangent: Array, axis_name: tuple[str, ...]) -> Array:
    """The cotangent of a loss that every shard of the vocabulary holds.

    Where shard_map tracks varying axes it is the same on every shard. Where it does not (check_vma=False, pmap), each
    shard holds a part and psum's own gradient would sum them; so does this.
    """
    if not axis_name or sharding.tracked_axes(axis_name):
        return cotangent
    return lax.psum(cotangent, axis_name)
