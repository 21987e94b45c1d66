"""One step of AdamW and `optax.apply_updates`: te_jax against optax, torch and a device copy of as many bytes.

Gradients are random normal values, parameters and states are donated and carried from call to call. Operations say what
te_jax keeps; the bytes of a parameter and step are those of all that must be read and written:

- float32: everything in float32: 28 bytes.
- bfloat16: parameters and gradients in float32, both moments in bfloat16, rounded at random: 20 bytes.
- remainder: parameters and gradients in bfloat16, 16 bits of remainder that make them float32 masters, both moments in
  bfloat16: 18 bytes.
- float8: as remainder, with both moments in FP8 and a bound for each block of 128: 14.1 bytes. te_jax reads gradients
  twice here, 16.1 bytes, of which the two more are not counted.

Implementations: `te_jax` (`te_jax.optim.adamw`), `optax` (`optax.adamw`) and `optax_mu_bf16` (with
mu_dtype=bfloat16), `torch` (AdamW, fused=True), all three with float32 parameters, gradients and other states whatever
te_jax keeps, and `copy` (a device copy, the yardstick, scaled to the bytes of the operation).

Where there are more than a thousand leaves, te_jax packs parameters and gradients with `te_jax.optim.Buckets`, as its
users would, and optax is left out: it would compile for minutes.

No time is reported for a result that is wrong: three steps from random parameters and gradients are compared with
those of `optax.adamw` in float32.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks import shapes
from benchmarks.harness import (
    Candidate,
    CaseResult,
    Family,
    Headline,
    Timing,
    calls_that_fit,
    run_operation,
    temporary_bytes,
    timing_row,
)
from benchmarks.torch_peer import torch_on_gpu
from te_jax import optim

IMPLEMENTATIONS = ("te_jax", "optax", "optax_mu_bf16", "torch", "copy")
PEERS = ("optax", "optax_mu_bf16", "torch")

_MOST_LEAVES = 1000
_RATE = 1e-3
_BLOCK = 128
_MOST_BYTES_TO_COPY = 2**32
_CHECKED = (512, 512)
_CHECKED_STEPS = 3


@dataclass(frozen=True)
class _Operation:
    """What te_jax keeps.

    Attributes:
      dtype: of parameters and gradients.
      master_dtype, moment_dtype: see `te_jax.optim.adamw`.
      error_bound: relative L2 error of the change of parameters in three steps.
    """

    dtype: str
    master_dtype: str | None
    moment_dtype: str
    error_bound: float

    def optimizer(self) -> optax.GradientTransformation:
        return optim.adamw(
            _RATE, mu_dtype=self.moment_dtype, nu_dtype=self.moment_dtype, master_dtype=self.master_dtype
        )

    def bytes_of(self, case: shapes.LeavesShape) -> int:
        """Read and written in a step: gradients once, everything else in both directions."""
        param, moment = jnp.dtype(self.dtype).itemsize, jnp.dtype(self.moment_dtype).itemsize
        master = 0 if self.master_dtype is None else jnp.dtype(self.master_dtype).itemsize
        blocks = case.leaves * case.rows * -(-case.cols // _BLOCK)
        bounds = 2 * 2 * 4 * blocks if moment == 1 else 0  # of two moments, in both directions
        return case.elements * (3 * param + 2 * master + 4 * moment) + bounds


OPERATIONS = {
    "float32": _Operation("float32", None, "float32", 1e-3),
    "bfloat16": _Operation("float32", None, "bfloat16", 1e-2),
    "remainder": _Operation("bfloat16", "int16", "bfloat16", 1e-2),
    "float8": _Operation("bfloat16", "int16", "float8_e4m3fn", 5e-2),
}


def run_case(case: shapes.LeavesShape, implementations: Sequence[str], timing: Timing) -> CaseResult:
    """Measure all operations of one case with the named implementations; see `harness.Family.run_case`."""
    names = [
        name
        for name in implementations
        if not (name == "torch" and jax.default_backend() != "gpu")
        and not (name.startswith("optax") and case.leaves > _MOST_LEAVES)
    ]
    result = CaseResult()
    for name, operation in OPERATIONS.items():
        run_operation(
            {"case": case.name, "model": case.model, "operation": name},
            names,
            timing,
            result,
            build=functools.partial(_build, operation=operation, case=case),
            errors=lambda name, *_, operation=operation: ({}, _problem(operation) if name == "te_jax" else None),
            row=functools.partial(_row, operation=operation, case=case),
            yardstick="copy",
        )
    return result


def _row(
    candidate: Candidate, seconds: dict[str, list[float]], *, operation: _Operation, case: shapes.LeavesShape
) -> dict[str, Any]:
    copy_bytes = _copy_bytes(operation, case)
    floor_bytes = {
        "te_jax": operation.bytes_of(case),
        "copy": copy_bytes,
        "optax_mu_bf16": 24 * case.elements,
    }.get(candidate.name, 28 * case.elements)
    row = timing_row(
        seconds,
        candidate.name,
        floor_bytes=floor_bytes,
        copy_bytes=copy_bytes,
        peers=() if candidate.name == "copy" else PEERS,
    )
    del row["ratio_to_copy"]
    return row | {"temporary_bytes": candidate.temporary_bytes}


def _copy_bytes(operation: _Operation, case: shapes.LeavesShape) -> int:
    return min(operation.bytes_of(case), _MOST_BYTES_TO_COPY)


# Implementations


def _build(name: str, operation: _Operation, case: shapes.LeavesShape) -> Candidate:
    if name == "copy":
        return _build_copy(_copy_bytes(operation, case))
    if name == "torch":
        return _build_torch(case)
    if name == "te_jax":
        return _build_jax(name, operation.optimizer(), case, operation.dtype)
    mu_dtype = "bfloat16" if name == "optax_mu_bf16" else None
    return _build_jax(name, optax.adamw(_RATE, mu_dtype=mu_dtype), case, "float32")


def _step_of(optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    def step(gradients: Any, params: Any, state: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return step


def _draw(seed: int, case: shapes.LeavesShape, dtype: str) -> list[jax.Array]:
    @jax.jit
    def draw(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, (case.rows, case.cols), jnp.dtype(dtype))

    return [draw(key) for key in jax.random.split(jax.random.key(seed), case.leaves)]


def _build_jax(name: str, optimizer: optax.GradientTransformation, case: shapes.LeavesShape, dtype: str) -> Candidate:
    gradients, params = _draw(0, case, dtype), _draw(1, case, dtype)
    if case.leaves > _MOST_LEAVES:
        buckets = optim.Buckets.of(params)
        gradients, params = buckets.pack(gradients), buckets.pack(params)
    carried = [(params, jax.jit(optimizer.init)(params))]
    compiled = jax.jit(_step_of(optimizer), donate_argnums=(1, 2)).lower(gradients, *carried[0]).compile()

    def call() -> Any:
        carried[0] = compiled(gradients, *carried[0])
        return carried[0]

    return Candidate(
        name=name,
        call=call,
        arguments=lambda calls: [()] * calls,
        temporary_bytes=temporary_bytes(compiled),
    )


def _build_copy(size: int) -> Candidate:
    array = jax.jit(lambda: jax.random.bits(jax.random.key(0), (size // 2,), jnp.uint8))()
    compiled = jax.jit(jnp.copy).lower(array).compile()
    return Candidate(
        name="copy",
        call=compiled,
        arguments=lambda calls: [(array,)] * calls,
        most_calls=calls_that_fit(array.nbytes),
    )


def _build_torch(case: shapes.LeavesShape) -> Candidate:
    torch = torch_on_gpu()
    params = [torch.randn(case.rows, case.cols, device="cuda", requires_grad=True) for _ in range(case.leaves)]
    for param in params:
        param.grad = torch.randn(case.rows, case.cols, device="cuda")
    optimizer = torch.optim.AdamW(params, lr=_RATE, fused=True)
    return Candidate(
        name="torch",
        call=lambda: optimizer.step(),
        arguments=lambda calls: [()] * calls,
        wait=lambda output: torch.cuda.synchronize(),
    )


# Checks


def _problem(operation: _Operation) -> str | None:
    """What is wrong with three steps of te_jax. Written so that NaN is wrong."""
    shape = shapes.LeavesShape(1, *_CHECKED, model="")
    (params,) = _draw(2, shape, operation.dtype)
    expected, actual = (
        _change(optimizer, params.astype(dtype), shape)
        for optimizer, dtype in ((optax.adamw(_RATE), "float32"), (operation.optimizer(), operation.dtype))
    )
    error = float(jnp.linalg.norm(actual - expected) / jnp.linalg.norm(expected))
    if error <= operation.error_bound:
        return None
    return f"the parameters' change is wrong: relative L2 error {error:.3g}, bound {operation.error_bound:.3g}"


def _change(optimizer: optax.GradientTransformation, params: jax.Array, shape: shapes.LeavesShape) -> jax.Array:
    """float32: how three steps change the parameters, or their masters."""
    before, state = params.astype(jnp.float32), optimizer.init(params)
    step = jax.jit(_step_of(optimizer))
    for seed in range(_CHECKED_STEPS):
        (gradient,) = _draw(3 + seed, shape, "bfloat16")
        params, state = step(gradient.astype(params.dtype), params, state)
    return optim.weights(params, state) - before


FAMILY = Family(
    description="a step of AdamW with moments in float32, bfloat16 and FP8, and parameters with masters",
    cases={"gpu": shapes.LEAVES_GPU, "cpu": shapes.LEAVES_CPU},
    implementations=IMPLEMENTATIONS,
    peers=PEERS,
    run_case=run_case,
    headline=Headline(
        operation="bfloat16",
        figure="median_ms",
        label="A step of AdamW with float32 parameters, moments of te_jax in bfloat16, milliseconds",
        implementations=("te_jax", "optax", "optax_mu_bf16", "torch"),
    ),
)
