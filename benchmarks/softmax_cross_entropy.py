"""Softmax cross-entropy: te_jax against optax, the jnp reference, torch and a plain copy of the logits.

Operations, mean over the tokens, no ignored labels:

- forward: the loss alone. Floor: the logits are read once.
- forward_backward: the loss and its gradient with respect to the logits. JAX runs forward and backward as two calls, so
  the floor is two reads of the logits and one write of the gradient: 1.5 copies.

Implementations: `te_jax` (native kernels), `te_jax_donated` (the same with the logits donated, so that the gradient
takes their place), `jnp` (te_jax's reference under jit), `optax` (its integer-label loss under jit, on logits cast to
float32 as its users do for 16-bit logits), `optax_uncast` (the same on 16-bit logits as they are, in 16-bit arithmetic:
faster, and its loss has three digits), `torch` (`F.cross_entropy` on logits cast to float32, eager),
`torch.compile` (the same, compiled) and `copy` (one device-to-device copy of the logits, the yardstick).

No time is reported for a result outside the error bounds: every loss and 64 rows of every gradient are compared with
float64 arithmetic on the host.
"""

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import shapes
from benchmarks.elementwise import buffers_for, fresh
from benchmarks.harness import (
    Candidate,
    CaseResult,
    Checked,
    Family,
    Headline,
    Timing,
    calls_that_fit,
    out_of_bounds,
    relative_error,
    rounded,
    run_operation,
    temporary_bytes,
    timing_row,
)
from benchmarks.torch_peer import as_torch, rows_of, temporaries, torch_on_gpu
from te_jax import ops

OPERATIONS = ("forward", "forward_backward")
IMPLEMENTATIONS = ("te_jax", "te_jax_donated", "jnp", "optax", "optax_uncast", "torch", "torch.compile", "copy")
PEERS = ("jnp", "optax", "optax_uncast", "torch", "torch.compile")

LOSS_BOUND = 1e-5
UNCAST_LOSS_BOUND = 1e-2
GRADIENT_BOUND = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}
"""Relative L2 errors against float64 beyond which no time is reported, the gradient's by dtype of the logits."""

_CHECKED_ROWS = 64


@dataclass(frozen=True)
class _Exact:
    """The mean loss and, at `rows`, the gradient of that mean, in float64."""

    loss: float
    rows: np.ndarray
    gradient: np.ndarray


def run_case(case: shapes.LogitsShape, implementations: Sequence[str], timing: Timing) -> CaseResult:
    """Measure both operations of one case with the named implementations; see `harness.Family.run_case`."""
    logits, labels = _inputs(case)
    exact = _exact(np.asarray(logits), np.asarray(labels))
    buffers = [logits, *(fresh(logits) for _ in range(buffers_for(case.bytes, least=1) - 1))]
    result = CaseResult()
    for operation in OPERATIONS:
        _run_operation(case, operation, implementations, timing, buffers, labels, exact, result)
    return result


def _run_operation(
    case: shapes.LogitsShape,
    operation: str,
    implementations: Sequence[str],
    timing: Timing,
    buffers: list[jax.Array],
    labels: jax.Array,
    exact: _Exact,
    result: CaseResult,
) -> None:
    def errors(name: str, output: Any, _: Any) -> Checked:
        if name == "copy":
            return {"loss_error": None, "gradient_error": None}, None
        loss, gradient = output
        errors = {
            "loss_error": relative_error(loss, exact.loss),
            "gradient_error": None if gradient is None else relative_error(gradient, exact.gradient),
        }
        bound = UNCAST_LOSS_BOUND if name == "optax_uncast" else LOSS_BOUND
        return errors, out_of_bounds(errors, {"loss_error": bound, "gradient_error": GRADIENT_BOUND[case.dtype]})

    def row(candidate: Candidate, seconds: dict[str, list[float]]) -> dict[str, Any]:
        is_copy, temporaries = candidate.name == "copy", candidate.temporary_bytes
        passes = 2 if is_copy else {"forward": 1, "forward_backward": 3}[operation]
        row = timing_row(
            seconds,
            candidate.name,
            floor_bytes=passes * case.bytes,
            copy_bytes=2 * case.bytes,
            peers=() if is_copy else PEERS,
        )
        return row | {"temporaries_over_logits": None if temporaries is None else rounded(temporaries / case.bytes)}

    run_operation(
        {"case": case.name, "model": case.model, "operation": operation},
        [name for name in implementations if _applies(name, operation, case.dtype)],
        timing,
        result,
        build=functools.partial(_build, operation=operation, buffers=buffers, labels=labels, rows=exact.rows),
        errors=errors,
        row=row,
        yardstick="copy",
    )


def _applies(name: str, operation: str, dtype: str) -> bool:
    if name == "optax_uncast":  # the same as optax on float32 logits
        return dtype != "float32"
    if name == "te_jax_donated":  # the loss alone has no result that could take the logits' place
        return operation == "forward_backward"
    if name.startswith("torch"):
        return jax.default_backend() == "gpu"
    return True


# Inputs and the exact result


def _inputs(case: shapes.LogitsShape) -> tuple[jax.Array, jax.Array]:
    """Random normal logits [rows, vocab] and uniform int32 labels [rows], none ignored."""
    logits_key, labels_key = jax.random.split(jax.random.key(0))
    draw = jax.jit(functools.partial(jax.random.normal, shape=(case.rows, case.vocab), dtype=jnp.dtype(case.dtype)))
    labels = jax.random.randint(labels_key, (case.rows,), 0, case.vocab, jnp.int32)
    return jax.block_until_ready((draw(logits_key), labels))


def _exact(logits: np.ndarray, labels: np.ndarray) -> _Exact:
    rows, vocab = logits.shape
    step = max(1, 2**22 // vocab)

    def losses(start: int) -> np.ndarray:
        wide = logits[start : start + step].astype(np.float64)
        return _log_sum_exp(wide) - wide[np.arange(len(wide)), labels[start : start + step]]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        loss = float(np.mean(np.concatenate(list(pool.map(losses, range(0, rows, step))))))
    checked = np.unique(np.linspace(0, rows - 1, _CHECKED_ROWS).astype(np.int32))
    wide = logits[checked].astype(np.float64)
    gradient = np.exp(wide - _log_sum_exp(wide)[:, None])
    gradient[np.arange(len(checked)), labels[checked]] -= 1
    return _Exact(loss, checked, gradient / rows)


def _log_sum_exp(wide: np.ndarray) -> np.ndarray:
    largest = wide.max(axis=1)
    return largest + np.log(np.exp(wide - largest[:, None]).sum(axis=1))


# Implementations


def _build(name: str, operation: str, buffers: list[jax.Array], labels: jax.Array, rows: np.ndarray) -> Candidate:
    """What the candidate reads are the loss, and the gradient's rows at these indices or None."""
    if name == "copy":
        return _build_copy(buffers)
    build = _build_torch if name.startswith("torch") else _build_jax
    return build(name, operation, buffers, labels, rows)


def _build_copy(buffers: list[jax.Array]) -> Candidate:
    compiled = fresh.lower(buffers[0]).compile()
    copied = compiled(buffers[0])
    if copied.unsafe_buffer_pointer() == buffers[0].unsafe_buffer_pointer():
        raise RuntimeError("XLA returned the logits themselves instead of a copy")
    return Candidate(
        name="copy",
        call=compiled,
        arguments=lambda calls: [(buffers[index % len(buffers)],) for index in range(calls)],
        most_calls=calls_that_fit(buffers[0].nbytes),
        temporary_bytes=temporary_bytes(compiled),
    )


def _build_jax(name: str, operation: str, buffers: list[jax.Array], labels: jax.Array, rows: np.ndarray) -> Candidate:
    loss = _jax_loss(name)
    donated = name == "te_jax_donated"
    function = loss if operation == "forward" else jax.value_and_grad(loss)
    compiled = jax.jit(function, donate_argnums=(0,) if donated else ()).lower(buffers[0], labels).compile()

    def arguments(calls: int) -> list[tuple[Any, ...]]:
        used = (buffers[index % len(buffers)] for index in range(calls))
        return jax.block_until_ready([(fresh(logits) if donated else logits, labels) for logits in used])

    def read(output: Any) -> tuple[float, np.ndarray | None]:
        if operation == "forward":
            return float(output), None
        return float(output[0]), np.asarray(output[1][rows])

    return Candidate(
        name=name,
        call=compiled,
        arguments=arguments,
        most_calls=calls_that_fit(buffers[0].nbytes),
        temporary_bytes=temporary_bytes(compiled),
        read=read,
    )


def _jax_loss(name: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The mean loss of logits [rows, vocab] and labels [rows] as a float32 scalar."""
    if name == "jnp":
        return lambda logits, labels: ops.softmax_cross_entropy(logits, labels, implementation="reference")
    if name in ("optax", "optax_uncast"):
        import optax

        def loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
            logits = logits if name == "optax_uncast" else logits.astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).astype(jnp.float32).mean()

        return loss
    # Never None: where the kernels are not loaded that would publish the reference under their name.
    return lambda logits, labels: ops.softmax_cross_entropy(logits, labels, implementation="native")


def _build_torch(name: str, operation: str, buffers: list[jax.Array], labels: jax.Array, rows: np.ndarray) -> Candidate:
    torch = torch_on_gpu()

    def loss(logits: Any, targets: Any) -> Any:
        return torch.nn.functional.cross_entropy(logits.float(), targets)

    if name == "torch.compile":
        torch.compiler.reset()  # otherwise the next shape is compiled as a dynamic one
        loss = torch.compile(loss, dynamic=False)

    def forward(logits: Any, targets: Any) -> Any:
        with torch.no_grad():
            return (loss(logits, targets),)

    def forward_backward(logits: Any, targets: Any) -> Any:
        value = loss(logits, targets)
        return value.detach(), torch.autograd.grad(value, logits)[0]

    call = forward if operation == "forward" else forward_backward
    targets = as_torch(labels).long()
    tensors = [as_torch(logits).requires_grad_(operation != "forward") for logits in buffers]

    return Candidate(
        name=name,
        call=call,
        arguments=lambda calls: [(tensors[index % len(tensors)], targets) for index in range(calls)],
        wait=lambda output: torch.cuda.synchronize(),
        temporary_bytes=temporaries(lambda: call(tensors[0], targets)),
        read=lambda output: (float(output[0]), rows_of(output[1], rows) if output[1:] else None),
    )


FAMILY = Family(
    description="mean loss of a language model's logits, forward and with gradient",
    cases={"gpu": shapes.LOGITS_GPU, "cpu": shapes.LOGITS_CPU},
    implementations=IMPLEMENTATIONS,
    peers=PEERS,
    run_case=run_case,
    headline=Headline(
        operation="forward_backward",
        figure="ratio_to_copy",
        label="Loss and gradient, time as a multiple of one copy of the logits",
        implementations=("te_jax", "te_jax_donated", "optax", "optax_uncast", "torch", "torch.compile"),
    ),
)
