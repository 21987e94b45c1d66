"""RMS norms of rows whose results leave as FP8, and their gradients: te_jax against XLA's norm and a device copy.

Bytes a value in bfloat16, with a copy that moves as many:

- rows: y in FP8 with a scale for 1 × 128 values: 3.
- both: and transposed: 4. te_jax reads the values once more for that, 6.
- residual_rows: rows of x + residual, which is also a result: 7.
- residual_both: 8. te_jax 10.
- current_both: one scale from y itself, which is therefore computed twice, both copies: 6.
- backward: the gradients of x, residual and scale, from that of y and that of the new residual: 8.

Implementations: `te_jax` (native kernels), `xla` (XLA's norm, then the native kernels of `ops.quantize`; a gradient as
one would write it in jnp, from the same rstd) and `copy` (a device copy that reads and writes as many bytes).

A program has four norms, and a time is that of one. No time is reported for a result that is wrong, by its relative
error against the norm in float32.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import shapes
from benchmarks.elementwise import buffers_for, build_jax, fresh, relative, run_beside_copy
from benchmarks.harness import Candidate, CaseResult, Family, Headline, Timing
from te_jax import ops
from te_jax.recipe import BlockScaling, CurrentScaling, Recipe
from te_jax.reference.quantize import Copies

IMPLEMENTATIONS = ("te_jax", "xla", "copy")
PEERS = ("xla",)
ERROR_BOUND = {"forward": 0.03, "backward": 0.005}
"""Relative L2 error beyond which no time is reported: that of values in FP8, and of gradients in bfloat16."""

_EPSILON = 1e-6


@dataclass(frozen=True)
class _Operation:
    """A norm forward. `bytes` are those a value in bfloat16 that must be moved, of which `wide` are in its dtype."""

    recipe: Recipe
    copies: Copies
    residual: bool
    codes: int
    wide: int


OPERATIONS = {
    "rows": _Operation(BlockScaling(), "data", False, 1, 1),
    "both": _Operation(BlockScaling(), "both", False, 2, 1),
    "residual_rows": _Operation(BlockScaling(), "data", True, 1, 3),
    "residual_both": _Operation(BlockScaling(), "both", True, 2, 3),
    "current_both": _Operation(CurrentScaling(), "both", False, 2, 2),
}


def run_case(case: shapes.MatrixShape, implementations: Sequence[str], timing: Timing) -> CaseResult:
    """Measure all operations of one case with the named implementations; see `harness.Family.run_case`."""
    keys = jax.random.split(jax.random.key(0), 5)
    draw = jax.jit(lambda key: jax.random.normal(key, case.shape, jnp.dtype(case.dtype)))
    x, residual, dy, dtotal = (draw(key) for key in keys[:4])
    scale = 1 + 0.1 * jax.random.normal(keys[4], (case.cols,))
    count = buffers_for(x.nbytes)
    names = [name for name in implementations if name != "copy"]
    result = CaseResult()
    for name, operation in OPERATIONS.items():
        operands = (x, residual) if operation.residual else (x,)
        builds = {each: functools.partial(_build_forward, each, operation, operands, scale, count) for each in names}
        floor_bytes = case.elements * (operation.wide * x.itemsize + operation.codes)
        run_beside_copy(case, name, builds, timing, floor_bytes, PEERS, result)
    operands = x, residual, dy, dtotal
    builds = {each: functools.partial(_build_backward, each, operands, scale, count) for each in names}
    run_beside_copy(case, "backward", builds, timing, case.elements * 4 * x.itemsize, PEERS, result)
    return result


def _copies(operands: tuple[Any, ...], count: int) -> list[tuple[Any, ...]]:
    return [operands, *(fresh(operands) for _ in range(count - 1))]


def _build_forward(
    name: str, operation: _Operation, operands: tuple[jax.Array, ...], scale: jax.Array, count: int
) -> Candidate:
    quantization = operation.recipe.quantization("activation")

    def fused(operands: tuple[jax.Array, ...], scale: jax.Array) -> Any:
        residual = operands[1] if operation.residual else None
        results = ops.rms_norm(
            operands[0], scale, epsilon=_EPSILON, residual=residual, quantization=quantization,
            copies=operation.copies, implementation="native",
        )  # fmt: skip
        y8, total = results if operation.residual else (results, None)
        return dataclasses.replace(y8, straight_through=None), total  # which no layer reads

    def apart(operands: tuple[jax.Array, ...], scale: jax.Array) -> Any:
        total = sum(operands[1:], operands[0])
        y, _ = _norm(total, scale)
        y8 = ops.quantize(y, quantization, copies=operation.copies, implementation="native")
        return y8, total if operation.residual else None

    def problem(output: Any) -> str | None:
        y8, total = output
        expected_total = sum(operands[1:], operands[0])
        expected, _ = _norm(expected_total.astype(jnp.float32), scale)
        found = [y8.without_transposed().dequantize()]
        if operation.copies == "both":
            found.append(y8.without_data().dequantize())
        errors = [relative(value, expected) for value in found]
        if total is not None:
            errors.append(relative(total, expected_total))
        return _too_far_off(errors, ERROR_BOUND["forward"])

    function = {"te_jax": fused, "xla": apart}[name]
    return build_jax(
        name, function, problem, shared=scale, tensors=_copies(operands, count), result_bytes=4 * operands[0].nbytes
    )


def _build_backward(name: str, operands: tuple[jax.Array, ...], scale: jax.Array, count: int) -> Candidate:
    x, residual, dy, dtotal = operands
    total = x + residual
    forward = functools.partial(ops.rms_norm, epsilon=_EPSILON, implementation="native")

    def kept_by_te_jax() -> tuple[Any, Callable[[Any, Any], Any]]:
        _, gradient = jax.jit(lambda x, r, s: jax.vjp(lambda x, r, s: forward(x, s, residual=r), x, r, s))(
            x, residual, scale
        )
        leaves, tree = jax.tree.flatten(gradient)

        def backward(tensors: Any, _: Any) -> Any:
            leaves, dy, dtotal = tensors
            dx, _, dscale = jax.tree.unflatten(tree, leaves)((dy, dtotal))
            return dx, dscale

        return leaves, backward

    def kept_by_xla() -> tuple[Any, Callable[[Any, Any], Any]]:
        return [total, _norm(total, scale)[1]], lambda tensors, scale: _gradients(*tensors[0], scale, *tensors[1:])

    kept, function = {"te_jax": kept_by_te_jax, "xla": kept_by_xla}[name]()

    def problem(output: Any) -> str | None:
        wide = total.astype(jnp.float32)
        expected = _gradients(wide, _norm(wide, scale)[1], scale, dy, dtotal.astype(jnp.float32))
        return _too_far_off([relative(*pair) for pair in zip(output, expected, strict=True)], ERROR_BOUND["backward"])

    tensors = _copies((kept, dy, dtotal), count)
    return build_jax(name, function, problem, shared=scale, tensors=tensors, result_bytes=x.nbytes)


@jax.jit
def _norm(x: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As one would write it: (y, rstd)."""
    wide = x.astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + _EPSILON)
    return (wide * rstd * scale[None]).astype(x.dtype), rstd


@jax.jit
def _gradients(
    total: jax.Array, rstd: jax.Array, scale: jax.Array, dy: jax.Array, dtotal: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """As one would write it: the gradients of x and of scale."""
    normalized, dy = total.astype(jnp.float32) * rstd, dy.astype(jnp.float32)
    scaled = dy * scale[None]
    mean = jnp.mean(scaled * normalized, axis=-1, keepdims=True)
    dx = rstd * (scaled - normalized * mean) + dtotal.astype(jnp.float32)
    return dx.astype(total.dtype), jnp.sum(dy * normalized, axis=0)


def _too_far_off(errors: Sequence[jax.Array], bound: float) -> str | None:
    """Says which error is too large. Written so that NaN is too large."""
    wrong = [f"{float(error):.3g}" for error in errors if not float(error) <= bound]
    return f"relative L2 error {', '.join(wrong)}, bound {bound:.3g}" if wrong else None


FAMILY = Family(
    description="RMS norms with results in FP8, and their gradients",
    cases={"gpu": shapes.NORM_GPU, "cpu": shapes.NORM_CPU},
    implementations=IMPLEMENTATIONS,
    peers=PEERS,
    run_case=run_case,
    headline=Headline(
        operation="residual_rows",
        figure="ratio_to_copy",
        label="Residual, RMS norm and FP8 rows, time as a multiple of a copy of as many bytes",
        implementations=("te_jax", "xla"),
    ),
)
