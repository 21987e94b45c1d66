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
import importlib.util
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import shapes
from benchmarks.harness import (
    Candidate,
    CaseResult,
    Family,
    Headline,
    Timing,
    calls_that_fit,
    measure,
    reason_of,
    rounded,
    temporary_bytes,
    timing_row,
)
from te_jax import ops

OPERATIONS = ("forward", "forward_backward")
IMPLEMENTATIONS = ("te_jax", "te_jax_donated", "jnp", "optax", "optax_uncast", "torch", "torch.compile", "copy")
PEERS = ("jnp", "optax", "optax_uncast", "torch", "torch.compile")

LOSS_BOUND = 1e-5
UNCAST_LOSS_BOUND = 1e-2
GRADIENT_BOUND = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}
"""Relative L2 errors against float64 beyond which no time is reported, the gradient's by dtype of the logits."""

_CHECKED_ROWS = 64
_BYTES_BEYOND_CACHES = 256 * 2**20
_MOST_BUFFERS = 64


@dataclass(frozen=True)
class _Exact:
    """The mean loss and, at `rows`, the gradient of that mean, in float64."""

    loss: float
    rows: np.ndarray
    gradient: np.ndarray


@dataclass(frozen=True)
class _Checked:
    """A candidate and how to read its result: the loss, and the gradient's rows at the given indices or None."""

    candidate: Candidate
    read: Callable[[Any, np.ndarray], tuple[float, np.ndarray | None]]


def run_case(case: shapes.LogitsShape, implementations: Sequence[str], timing: Timing) -> CaseResult:
    """Measure both operations of one case with the named implementations; see `harness.Family.run_case`."""
    logits, labels = _inputs(case)
    exact = _exact(np.asarray(logits), np.asarray(labels))
    buffers = [logits, *(_fresh(logits) for _ in range(_buffers_for(case.bytes) - 1))]
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
    def entry(name: str, reason: str) -> dict[str, str]:
        return {"case": case.name, "operation": operation, "implementation": name, "reason": reason}

    errors: dict[str, tuple[float | None, float | None]] = {}
    candidates: list[Candidate] = []
    for name in implementations:
        if not _applies(name, operation, case.dtype):
            continue
        try:
            checked = _build(name, operation, buffers, labels)
            output = checked.candidate.call(*checked.candidate.arguments(1)[0])
            checked.candidate.wait(output)
            errors[name] = _errors(checked, output, exact) if name != "copy" else (None, None)
            del output
        except Exception as error:  # one peer that is missing or out of memory must not cost the others theirs
            result.skipped.append(entry(name, reason_of(error)))
            continue
        bound = UNCAST_LOSS_BOUND if name == "optax_uncast" else LOSS_BOUND
        wrong = _out_of_bounds(errors[name], case.dtype, bound)
        if wrong:
            result.wrong.append(entry(name, wrong))
        else:
            candidates.append(checked.candidate)

    seconds, failed = measure(candidates, timing, pipelined=buffers[0].devices().pop().platform != "cpu")
    result.skipped += [entry(name, reason) for name, reason in failed.items()]
    if "copy" not in seconds:
        raise RuntimeError(f"the copy of the logits, the yardstick of {case.name}, was not measured: {failed}")
    for candidate in candidates:
        if candidate.name not in seconds:
            continue
        is_copy = candidate.name == "copy"
        temporaries, (loss_error, gradient_error) = candidate.temporary_bytes, errors[candidate.name]
        result.rows.append(
            {
                "case": case.name,
                "model": case.model,
                "operation": operation,
                "implementation": candidate.name,
                **timing_row(
                    seconds,
                    candidate.name,
                    floor_bytes={"forward": 1, "forward_backward": 3}[operation] * case.bytes
                    if not is_copy
                    else 2 * case.bytes,
                    copy_bytes=2 * case.bytes,
                    peers=() if is_copy else PEERS,
                ),
                "temporaries_over_logits": None if temporaries is None else rounded(temporaries / case.bytes),
                "loss_error": loss_error,
                "gradient_error": gradient_error,
            }
        )
    if importlib.util.find_spec("torch") is not None and any(name.startswith("torch") for name in seconds):
        _release_torch()


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


_fresh = jax.jit(jnp.copy)
"""A new array with the same values, copied on the device."""


def _buffers_for(logits_bytes: int) -> int:
    """How many copies of the logits to rotate through so that no cache serves the next call."""
    return max(1, min(_MOST_BUFFERS, -(-_BYTES_BEYOND_CACHES // logits_bytes)))


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


def _errors(checked: _Checked, output: Any, exact: _Exact) -> tuple[float, float | None]:
    """Relative errors of the loss and, where there is one, of the gradient's checked rows (L2)."""
    loss, gradient = checked.read(output, exact.rows)
    loss_error = float(f"{abs(loss - exact.loss) / abs(exact.loss):.3g}")
    if gradient is None:
        return loss_error, None
    difference = np.linalg.norm(gradient.astype(np.float64) - exact.gradient)
    return loss_error, float(f"{difference / np.linalg.norm(exact.gradient):.3g}")


def _out_of_bounds(errors: tuple[float | None, float | None], dtype: str, loss_bound: float = LOSS_BOUND) -> str | None:
    """Says which error is too large. Written so that NaN is too large."""
    loss, gradient = errors
    if loss is not None and not loss <= loss_bound:
        return f"the loss is wrong: relative error {loss:.3g}, bound {loss_bound:.3g}"
    if gradient is not None and not gradient <= GRADIENT_BOUND[dtype]:
        return f"the gradient is wrong: relative L2 error {gradient:.3g}, bound {GRADIENT_BOUND[dtype]:.3g}"
    return None


# Implementations


def _build(name: str, operation: str, buffers: list[jax.Array], labels: jax.Array) -> _Checked:
    if name == "copy":
        return _build_copy(buffers)
    if name.startswith("torch"):
        return _build_torch(name, operation, buffers, labels)
    return _build_jax(name, operation, buffers, labels)


def _build_copy(buffers: list[jax.Array]) -> _Checked:
    compiled = _fresh.lower(buffers[0]).compile()
    copied = compiled(buffers[0])
    if copied.unsafe_buffer_pointer() == buffers[0].unsafe_buffer_pointer():
        raise RuntimeError("XLA returned the logits themselves instead of a copy")
    candidate = Candidate(
        name="copy",
        call=compiled,
        arguments=lambda calls: [(buffers[index % len(buffers)],) for index in range(calls)],
        most_calls=calls_that_fit(buffers[0].nbytes),
        temporary_bytes=temporary_bytes(compiled),
    )
    return _Checked(candidate, lambda output, rows: (0.0, None))


def _build_jax(name: str, operation: str, buffers: list[jax.Array], labels: jax.Array) -> _Checked:
    loss = _jax_loss(name)
    donated = name == "te_jax_donated"
    function = loss if operation == "forward" else jax.value_and_grad(loss)
    compiled = jax.jit(function, donate_argnums=(0,) if donated else ()).lower(buffers[0], labels).compile()

    def arguments(calls: int) -> list[tuple[Any, ...]]:
        used = (buffers[index % len(buffers)] for index in range(calls))
        return jax.block_until_ready([(_fresh(logits) if donated else logits, labels) for logits in used])

    def read(output: Any, rows: np.ndarray) -> tuple[float, np.ndarray | None]:
        if operation == "forward":
            return float(output), None
        return float(output[0]), np.asarray(output[1][rows])

    candidate = Candidate(
        name=name,
        call=compiled,
        arguments=arguments,
        most_calls=calls_that_fit(buffers[0].nbytes),
        temporary_bytes=temporary_bytes(compiled),
    )
    return _Checked(candidate, read)


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


def _build_torch(name: str, operation: str, buffers: list[jax.Array], labels: jax.Array) -> _Checked:
    import torch  # pyright: ignore[reportMissingImports]

    if not torch.cuda.is_available():
        raise RuntimeError("this torch has no CUDA support")

    def loss(logits: Any, targets: Any) -> Any:
        return torch.nn.functional.cross_entropy(logits.float(), targets)

    if name == "torch.compile":
        torch.compiler.reset()  # otherwise the next shape is compiled as a dynamic one
        loss = torch.compile(loss, dynamic=False)

    def forward(logits: Any, targets: Any) -> Any:
        with torch.no_grad():
            return loss(logits, targets)

    def forward_backward(logits: Any, targets: Any) -> Any:
        value = loss(logits, targets)
        return value.detach(), torch.autograd.grad(value, logits)[0]

    call = forward if operation == "forward" else forward_backward
    targets = _as_torch(labels).long()
    tensors = [_as_torch(logits).requires_grad_(operation != "forward") for logits in buffers]

    def read(output: Any, rows: np.ndarray) -> tuple[float, np.ndarray | None]:
        if operation == "forward":
            return float(output), None
        index = torch.as_tensor(rows.astype(np.int64), device=output[1].device)
        return float(output[0]), output[1][index].float().cpu().numpy()

    candidate = Candidate(
        name=name,
        call=call,
        arguments=lambda calls: [(tensors[index % len(tensors)], targets) for index in range(calls)],
        wait=lambda output: torch.cuda.synchronize(),
        temporary_bytes=_torch_temporaries(lambda: call(tensors[0], targets)),
    )
    return _Checked(candidate, read)


def _as_torch(array: jax.Array) -> Any:
    """The same device memory as a torch tensor that needs no gradient."""
    import torch  # pyright: ignore[reportMissingImports]

    return torch.utils.dlpack.from_dlpack(jax.block_until_ready(array)).detach()


def _torch_temporaries(call: Callable[[], Any]) -> int:
    """Peak bytes that one call allocates beside its results, once warm."""
    import torch  # pyright: ignore[reportMissingImports]

    call()  # compiles, and keeps workspaces that outlive the call out of the figure
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = call()
    torch.cuda.synchronize()
    kept = sum(tensor.nbytes for tensor in (results if isinstance(results, tuple) else (results,)))
    return max(0, torch.cuda.max_memory_allocated() - before - kept)


def _release_torch() -> None:
    """Return torch's cached memory, which the next case needs in other sizes."""
    import torch  # pyright: ignore[reportMissingImports]

    torch.cuda.empty_cache()


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
