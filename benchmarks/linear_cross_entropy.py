"""The output head and its mean loss, with the gradients of x and of the kernel: te_jax against full logits and others.

x is bfloat16, labels follow Zipf's law, and a call computes the loss and both gradients. Operations:

- master: the kernel is float32, as an optimizer keeps it, and so is its gradient.
- bf16: the kernel is bfloat16. te_jax writes its gradient in float32 into a buffer that is donated; the others return
  it in bfloat16.
- trained: as master, with hidden states that point at their labels' columns, so that the loss is about 2, where those
  of the others are random and the loss is about log(vocab). Errors of FP8 depend on that.
- policy: as trained, with the loss of GRPO in the place of the cross-entropy: te_jax's is `linear_token_loss`.

Implementations:

- te_jax: `linear_cross_entropy`, or `linear_token_loss`, in bfloat16.
- te_jax_fp8_backward: the two products of the backward pass in FP8, with block scaling.
- te_jax_fp8: all three products in FP8, with block scaling.
- te_jax_fp8_backward_current: as te_jax_fp8_backward, with current scaling.
- full_logits: `x @ kernel`, then `te_jax.ops.softmax_cross_entropy`.
- optax: `x @ kernel`, then optax's integer-label loss of the logits in float32.
- maxtext_tiling: a checkpointed scan over tiles of tokens, as MaxText tiles its vocabulary loss, and Tunix its
  log-probabilities; the kernel's gradient is added up in the kernel's dtype.
- liger: Liger Kernel's fused loss for torch, added up in float32.

TFLOP/s are for 6 · tokens · hidden · vocab operations. Errors are relative: of the loss, and in L2 of 64 rows of dx and
64 columns of dkernel, against float64 arithmetic on the host. No time is reported for a result beyond the bounds.
"""

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import shapes
from benchmarks.harness import (
    Candidate,
    CaseResult,
    Checked,
    Family,
    Headline,
    Timing,
    compute_row,
    out_of_bounds,
    relative_error,
    rounded,
    run_operation,
    temporary_bytes,
)
from benchmarks.torch_peer import as_torch, rows_of, temporaries, torch_on_gpu
from te_jax import ops
from te_jax.recipe import BlockScaling, CurrentScaling

_BACKWARD = ("dgrad", "wgrad")
OURS: dict[str, dict[str, Any]] = {
    "te_jax": {},
    "te_jax_fp8_backward": {"recipe": BlockScaling(), "fp8_products": _BACKWARD},
    "te_jax_fp8": {"recipe": BlockScaling(), "fp8_products": ("forward", *_BACKWARD)},
    "te_jax_fp8_backward_current": {
        "recipe": CurrentScaling(fast_accumulation=("forward", *_BACKWARD)),
        "fp8_products": _BACKWARD,
    },
}
"""The options of `linear_cross_entropy`."""
WITH_FULL_LOGITS = ("full_logits", "optax")
PEERS = (*WITH_FULL_LOGITS, "maxtext_tiling", "liger")
IMPLEMENTATIONS = (*OURS, *PEERS)

ERROR_BOUNDS = {"loss_error": 1e-3, "dx_error": 0.02, "dkernel_error": 0.02}
"""Largest relative errors of what is computed in bfloat16."""
FP8_ERROR_BOUNDS = {"loss_error": 5e-3, "dx_error": 0.2, "dkernel_error": 0.2}
"""The same in FP8."""

_CHECKED = 64
_TILE = 2048


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """x bfloat16 [tokens, hidden], a float32 kernel [hidden, vocab] and int32 labels [tokens]; of a policy the
    log-probabilities with which tokens were drawn and their advantages [tokens]."""

    x: jax.Array
    kernel: jax.Array
    labels: jax.Array
    arrays: tuple[jax.Array, ...] = ()

    @property
    def operands(self) -> tuple[jax.Array, ...]:
        return self.x, self.kernel, self.labels, *self.arrays


@dataclasses.dataclass(frozen=True)
class _Exact:
    """The mean loss, and its gradients at `rows` of x and at `columns` of the kernel, for the kernel in bfloat16."""

    loss: float
    rows: np.ndarray
    dx: np.ndarray
    columns: np.ndarray
    dkernel: np.ndarray


def run_case(case: shapes.HeadShape, implementations: Sequence[str], timing: Timing) -> CaseResult:
    """Measure the operations of one case with the named implementations; see `harness.Family.run_case`."""
    result = CaseResult()
    for together in (("master", "bf16"), ("trained",), ("policy",)):
        operations = [operation for operation in case.operations if operation in together]
        if not operations:
            continue
        inputs = _drawn(case, trained=together != ("master", "bf16"))
        if "policy" in operations:
            inputs = _with_advantages(inputs)
        exact = _exact(inputs)
        for operation in operations:
            _run_operation(case, operation, implementations, timing, inputs, exact, result)
    return result


def _run_operation(
    case: shapes.HeadShape,
    operation: str,
    implementations: Sequence[str],
    timing: Timing,
    inputs: _Inputs,
    exact: _Exact,
    result: CaseResult,
) -> None:
    if operation == "bf16":
        inputs = _Inputs(inputs.x, inputs.kernel.astype(jnp.bfloat16), inputs.labels)
    accumulator = _Accumulator(inputs.kernel) if operation == "bf16" else None

    def errors(name: str, found: tuple[Any, Any, Any], _: Any) -> Checked:
        pairs = zip(ERROR_BOUNDS, found, (exact.loss, exact.dx, exact.dkernel), strict=True)
        errors = {key: relative_error(one, other) for key, one, other in pairs}
        return errors, out_of_bounds(errors, FP8_ERROR_BOUNDS if "fp8" in name else ERROR_BOUNDS)

    def row(candidate: Candidate, seconds: dict[str, list[float]]) -> dict[str, Any]:
        flops, size = 6 * case.tokens * case.hidden * case.vocab, candidate.temporary_bytes
        row = compute_row(seconds, candidate.name, flops=flops, peers=PEERS, over="full_logits")
        return row | {"temporaries_gb": None if size is None else rounded(size / 1e9)}

    run_operation(
        {"case": case.name, "model": case.model, "operation": operation},
        [name for name in implementations if _applies(name, case, operation)],
        timing,
        result,
        build=functools.partial(_build, inputs=inputs, accumulator=accumulator, exact=exact),
        errors=errors,
        row=row,
    )


def _applies(name: str, case: shapes.HeadShape, operation: str) -> bool:
    if name in WITH_FULL_LOGITS:
        return case.full_logits
    if name == "liger":
        if operation == "policy":
            return False
        installed = all(importlib.util.find_spec(module) for module in ("torch", "liger_kernel"))
        return installed and jax.default_backend() == "gpu"
    return True


# Inputs and the exact result


def _drawn(case: shapes.HeadShape, *, trained: bool) -> _Inputs:
    """Random hidden states, or with `trained` those of a network whose loss is about 2."""

    @jax.jit
    def draw(key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        x_key, kernel_key, labels_key = jax.random.split(key, 3)
        kernel = jax.random.normal(kernel_key, (case.hidden, case.vocab), jnp.float32) * case.hidden**-0.5
        # A uniform logarithm: label v is drawn with a probability of about 1 / (v + 1).
        logarithm = jax.random.uniform(labels_key, (case.tokens,)) * math.log(case.vocab + 1)
        labels = jnp.clip(jnp.exp(logarithm).astype(jnp.int32) - 1, 0, case.vocab - 1)
        x = jax.random.normal(x_key, (case.tokens, case.hidden), jnp.float32)
        if trained:  # columns have length 1, so that the label's logit is about `scale`, and the others' are about 0
            scale = math.log(case.vocab) + 0.5 - math.log(math.exp(2) - 1)
            x += scale * jnp.take(kernel, labels, axis=1).T
        return x.astype(jnp.bfloat16), kernel, labels

    return _Inputs(*jax.block_until_ready(draw(jax.random.key(0))))


def _grpo(log_prob: jax.Array, before: jax.Array, advantage: jax.Array) -> jax.Array:
    ratio = jnp.exp(log_prob - before)
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)


def _with_advantages(inputs: _Inputs) -> _Inputs:
    """Advantages, of one sign as errors are relative to their sum, and log-probabilities before that are near those of
    now: no token is about to be clipped."""
    lse, target = _lse_and_target(inputs.x, inputs.kernel, inputs.labels)
    noise = 0.02 * jax.random.normal(jax.random.key(1), lse.shape)
    return dataclasses.replace(
        inputs, arrays=(target - lse + noise, jax.random.uniform(jax.random.key(2), lse.shape) + 0.5)
    )


@jax.jit
def _lse_and_target(x: jax.Array, kernel: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both float32 [tokens], from float32 logits of products that are exact."""
    kernel = kernel.astype(x.dtype)

    def of_tile(tile: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        rows, own = tile
        logits = jnp.matmul(rows, kernel, preferred_element_type=jnp.float32)
        return jax.nn.logsumexp(logits, axis=1), jnp.take_along_axis(logits, own[:, None], axis=1)[:, 0]

    lse, target = lax.map(of_tile, _tiles(x, labels))
    return lse.ravel(), target.ravel()


def _tiles(x: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    tile = math.gcd(len(x), _TILE)
    return x.reshape(-1, tile, x.shape[1]), labels.reshape(-1, tile)


def _exact(inputs: _Inputs) -> _Exact:
    """In float64 on the host, but for log-sum-exps of all tokens, which are float32 on the device."""
    lse, target = (np.asarray(a).astype(np.float64) for a in _lse_and_target(inputs.x, inputs.kernel, inputs.labels))
    x = np.asarray(inputs.x.astype(jnp.float32)).astype(np.float64)
    labels = np.asarray(inputs.labels)
    (tokens, _), vocab = x.shape, inputs.kernel.shape[1]
    loss, weight = np.mean(lse - target), np.ones(tokens)
    if inputs.arrays:
        values, pull = jax.vjp(lambda log_prob: _grpo(log_prob, *inputs.arrays), jnp.float32(target - lse))
        loss, weight = np.mean(values), -np.asarray(pull(jnp.ones(tokens))[0], np.float64)

    def kernel(columns: Any) -> np.ndarray:
        return np.asarray(inputs.kernel[:, columns].astype(jnp.bfloat16).astype(jnp.float32)).astype(np.float64)

    rows = np.unique(np.linspace(0, tokens - 1, _CHECKED).astype(np.int32))
    blocks = [slice(start, start + 16384) for start in range(0, vocab, 16384)]
    logits = np.concatenate([x[rows] @ kernel(block) for block in blocks], axis=1)
    logits -= logits.max(axis=1, keepdims=True)
    gradient = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    gradient[np.arange(len(rows)), labels[rows]] -= 1
    gradient *= weight[rows, None]
    dx = sum(gradient[:, block] @ kernel(block).T for block in blocks) / tokens

    columns = np.unique(np.geomspace(1, vocab, _CHECKED).astype(np.int32) - 1)  # of frequent labels and of rare ones
    gradient = weight[:, None] * (np.exp(x @ kernel(columns) - lse[:, None]) - (labels[:, None] == columns))
    return _Exact(float(loss), rows, dx, columns, x.T @ gradient / tokens)


# Implementations


class _Accumulator:
    """One float32 buffer, which all implementations that write a gradient into it hand on."""

    def __init__(self, kernel: jax.Array):
        self.buffer: jax.Array | None = None
        self.like = jax.ShapeDtypeStruct(kernel.shape, jnp.float32)

    def take(self) -> jax.Array:
        buffer, self.buffer = self.buffer, None  # a call that fails may have consumed it
        return jnp.zeros(self.like.shape, self.like.dtype) if buffer is None else buffer


def _build(name: str, inputs: _Inputs, accumulator: _Accumulator | None, exact: _Exact) -> Candidate:
    """What the candidate reads are the loss, and the exact result's rows of dx and columns of dkernel."""
    if name == "liger":
        return _build_liger(inputs, exact)
    operands = inputs.operands
    if name in OURS and accumulator is not None:
        call, compiled = _accumulating(name, inputs, accumulator)
    else:
        loss = _policy_loss(name) if inputs.arrays else _loss(name)
        call = compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*operands).compile()

    def read(output: Any) -> tuple[Any, Any, Any]:
        loss, (dx, dkernel) = output
        return loss, dx[exact.rows].astype(jnp.float32), dkernel[:, exact.columns].astype(jnp.float32)

    return Candidate(
        name=name,
        call=call,
        arguments=lambda calls: [operands] * calls,
        most_calls=8,
        temporary_bytes=temporary_bytes(compiled),
        read=read,
    )


def _accumulating(name: str, inputs: _Inputs, accumulator: _Accumulator) -> tuple[Callable[..., Any], Any]:
    """A call that hands the accumulator on, and its compiled program."""

    def loss(x: jax.Array, buffer: jax.Array, kernel: jax.Array, labels: jax.Array) -> jax.Array:
        return _ours(name, x, kernel, labels, wgrad_accumulator=buffer, accumulate=False)

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), donate_argnums=1)
    compiled = step.lower(inputs.x, accumulator.like, inputs.kernel, inputs.labels).compile()

    def call(x: jax.Array, kernel: jax.Array, labels: jax.Array) -> Any:
        output = compiled(x, accumulator.take(), kernel, labels)
        accumulator.buffer = output[1][1]
        return output

    return call, compiled


def _ours(name: str, x: jax.Array, kernel: jax.Array, labels: jax.Array, **options: Any) -> jax.Array:
    # Never implementation=None: where the kernels are not loaded that would publish the reference under their name.
    return ops.linear_cross_entropy(x, kernel, labels, **OURS[name], **options, implementation="native")


def _loss(name: str) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """The mean loss of x [tokens, hidden], kernel [hidden, vocab] and labels [tokens]."""
    if name in OURS:
        return lambda x, kernel, labels: _ours(name, x, kernel, labels)
    if name == "maxtext_tiling":
        return _tiled_loss
    if name == "full_logits":
        return lambda x, kernel, labels: ops.softmax_cross_entropy(
            x @ kernel.astype(x.dtype), labels, implementation="native"
        )
    import optax

    def loss(x: jax.Array, kernel: jax.Array, labels: jax.Array) -> jax.Array:
        logits = (x @ kernel.astype(x.dtype)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return loss


def _policy_loss(name: str) -> Callable[..., jax.Array]:
    """The mean of `_grpo` of x [tokens, hidden], kernel [hidden, vocab], labels [tokens] and arrays [tokens]."""
    if name in OURS:
        return lambda x, kernel, labels, *arrays: ops.linear_token_loss(
            x, kernel, labels, _grpo, *arrays, **OURS[name], implementation="native"
        )
    if name == "maxtext_tiling":
        return _tiled_policy_loss

    def loss(x: jax.Array, kernel: jax.Array, labels: jax.Array, *arrays: jax.Array) -> jax.Array:
        logits = x @ kernel.astype(x.dtype)
        if name == "full_logits":
            losses = ops.softmax_cross_entropy(logits, labels, reduction="none", implementation="native")
            return jnp.mean(_grpo(-losses, *arrays))
        log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
        return jnp.mean(_grpo(jnp.take_along_axis(log_probs, labels[:, None], axis=1)[:, 0], *arrays))

    return loss


def _tiled_policy_loss(x: jax.Array, kernel: jax.Array, labels: jax.Array, *arrays: jax.Array) -> jax.Array:
    @jax.checkpoint
    def log_probs(tile: tuple[jax.Array, jax.Array]) -> jax.Array:
        rows, own = tile
        logits = (rows @ kernel.astype(rows.dtype)).astype(jnp.float32)
        return jnp.take_along_axis(jax.nn.log_softmax(logits), own[:, None], axis=1)[:, 0]

    return jnp.mean(_grpo(lax.map(log_probs, _tiles(x, labels)).ravel(), *arrays))


def _tiled_loss(x: jax.Array, kernel: jax.Array, labels: jax.Array) -> jax.Array:
    @jax.checkpoint
    def add(total: jax.Array, tile: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        rows, own = tile
        logits = (rows @ kernel.astype(rows.dtype)).astype(jnp.float32)
        target = jnp.sum(logits * jax.nn.one_hot(own, logits.shape[1], dtype=jnp.float32), axis=1)
        return total + jnp.sum(jax.nn.logsumexp(logits, axis=1) - target), None

    return lax.scan(add, jnp.zeros(()), _tiles(x, labels))[0] / len(x)


def _build_liger(inputs: _Inputs, exact: _Exact) -> Candidate:
    torch = torch_on_gpu()
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # pyright: ignore[reportMissingImports]

    fused = LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)
    x, labels = as_torch(inputs.x).requires_grad_(), as_torch(inputs.labels).long()
    weight = as_torch(inputs.kernel).T.contiguous().requires_grad_()  # [vocab, hidden], as torch keeps heads

    def call() -> Any:
        loss = fused(weight.to(x.dtype), x, labels)
        return loss.detach(), *torch.autograd.grad(loss, (x, weight))

    def read(output: Any) -> tuple[Any, Any, Any]:
        loss, dx, dweight = output
        return float(loss), rows_of(dx, exact.rows), rows_of(dweight, exact.columns).T

    return Candidate(
        name="liger",
        call=call,
        arguments=lambda calls: [()] * calls,
        wait=lambda output: torch.cuda.synchronize(),
        most_calls=8,
        temporary_bytes=temporaries(call),
        read=read,
    )


FAMILY = Family(
    description="output head and mean loss with both gradients, without an array of all logits",
    cases={"gpu": shapes.HEAD_GPU, "cpu": shapes.HEAD_CPU},
    implementations=IMPLEMENTATIONS,
    peers=PEERS,
    run_case=run_case,
    headline=Headline(
        operation="master",
        figure="time_over_full_logits",
        label="Output head, loss and both gradients, time as a multiple of that with full logits",
        implementations=("te_jax", "te_jax_fp8_backward", "te_jax_fp8", "optax", "maxtext_tiling", "liger"),
    ),
)
