"""Linear layers: te_jax in FP8 with every recipe against jnp in bfloat16.

x [M, K], kernel [K, N] and dy [M, N] are random normal values in bfloat16, and so are results; all quantization is
inside the clock. Operations:

- forward: y = x · kernel. 2MNK floating-point operations.
- forward_backward: y, and for the cotangent dy the gradients with respect to x and kernel, in one program. 6MNK.

Implementations, for each recipe: `te_jax_current` (all sums stay inside the tensor cores), `te_jax_current_split` (in
gradients float32 takes over sums every 128 values, the recipe's default), `te_jax_current_once` (the kernel comes
quantized, as for all but the first of several microbatches, and its gradient is written into a buffer that is
donated); likewise `te_jax_delayed…`, whose state advances, and `te_jax_rowwise…`; `te_jax_block` and
`te_jax_block_once` always split. `te_jax_xla` is `te_jax_current` by XLA, as on GPUs without te_jax's products. `jnp`
is a bfloat16 dot with JAX's own derivative, and `flax_fp8` Flax's own `Fp8DirectDotGeneralOp`: delayed scaling, whose
state advances.

No time is reported for a result outside the error bounds: 64 rows of y and of either gradient are compared with float64
arithmetic on the values before quantization.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import flax_fp8, shapes
from benchmarks.gemm import product
from benchmarks.harness import (
    Candidate,
    CaseResult,
    Checked,
    Family,
    Headline,
    Timing,
    calls_that_fit,
    compute_row,
    out_of_bounds,
    relative_error,
    run_operation,
    temporary_bytes,
)
from te_jax import native, ops
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, DelayedScalingState, Recipe, RowwiseScaling

OPERATIONS = ("forward", "forward_backward")
FP8_ERROR_BOUNDS = {"y_error": 0.045, "dx_error": 0.065, "dkernel_error": 0.065}
"""Relative L2 errors of FP8 against float64 beyond which no time is reported."""
ERROR_BOUNDS = dict.fromkeys(FP8_ERROR_BOUNDS, 1e-2)
"""The same without FP8."""

CHECKED_ROWS = 64
_ALL = ("forward", "dgrad", "wgrad")


@dataclass(frozen=True)
class _Variant:
    """How te_jax runs the layer.

    Attributes:
      recipe: how to quantize.
      once: whether the kernel comes quantized.
      operations: in which it takes part.
      implementation: of te_jax's operations. Never None: where the kernels are not loaded that would publish the
        reference under their name.
    """

    recipe: Recipe
    once: bool = False
    operations: tuple[str, ...] = OPERATIONS
    implementation: native.Implementation = "native"


def _variants(name: str, kind: type[Recipe]) -> dict[str, _Variant]:
    fast = kind(fast_accumulation=_ALL)
    return {
        f"te_jax_{name}": _Variant(fast),
        f"te_jax_{name}_split": _Variant(kind(), operations=("forward_backward",)),
        f"te_jax_{name}_once": _Variant(fast, once=True),
    }


VARIANTS = {
    **_variants("current", CurrentScaling),
    **_variants("delayed", DelayedScaling),
    **_variants("rowwise", RowwiseScaling),
    "te_jax_block": _Variant(BlockScaling()),
    "te_jax_block_once": _Variant(BlockScaling(), once=True),
    "te_jax_xla": _Variant(CurrentScaling(fast_accumulation=_ALL), implementation="xla"),
}
PEERS = ("jnp", "flax_fp8")
IMPLEMENTATIONS = (*VARIANTS, *PEERS)


@dataclass(frozen=True)
class _Inputs:
    """x [M, K], kernel [K, N], possibly quantized, and dy [M, N], bfloat16."""

    x: jax.Array
    kernel: Any
    dy: jax.Array


@dataclass(frozen=True)
class _Exact:
    """Rows of y, dx and dkernel in float64, at the indices `tokens` of y and dx and `features` of dkernel."""

    tokens: np.ndarray
    features: np.ndarray
    y: np.ndarray
    dx: np.ndarray
    dkernel: np.ndarray


def run_case(case: shapes.GemmShape, implementations: Sequence[str], timing: Timing) -> CaseResult:
    """Measure both operations of one case with the named implementations; see `harness.Family.run_case`."""
    inputs = _inputs(case)
    exact = _exact(inputs)
    result = CaseResult()
    for operation in OPERATIONS:
        flops = {"forward": 2, "forward_backward": 6}[operation] * case.m * case.n * case.k
        run_operation(
            {"case": case.name, "model": case.model, "operation": operation},
            [name for name in implementations if name not in VARIANTS or operation in VARIANTS[name].operations],
            timing,
            result,
            build=functools.partial(_build, operation=operation, inputs=inputs),
            errors=functools.partial(_checked, exact),
            row=functools.partial(_row, flops=flops),
        )
    return result


def _row(candidate: Candidate, seconds: dict[str, list[float]], *, flops: int) -> dict[str, Any]:
    row = compute_row(seconds, candidate.name, flops=flops, peers=PEERS, over="jnp")
    return row | {"temporary_bytes": candidate.temporary_bytes}


# Inputs and exact results


def _inputs(case: shapes.GemmShape) -> _Inputs:
    shapes_of = ((case.m, case.k), (case.k, case.n), (case.m, case.n))
    keys = jax.random.split(jax.random.key(0), len(shapes_of))
    draw = jax.jit(functools.partial(jax.random.normal, dtype=jnp.bfloat16), static_argnums=1)
    return jax.block_until_ready(_Inputs(*(draw(key, shape) for key, shape in zip(keys, shapes_of, strict=True))))


def _exact(inputs: _Inputs) -> _Exact:
    x, kernel, dy = (np.asarray(a) for a in (inputs.x, inputs.kernel, inputs.dy))
    tokens, features = (np.unique(np.linspace(0, n - 1, CHECKED_ROWS).astype(np.int32)) for n in x.shape)
    return _Exact(
        tokens,
        features,
        product(x[tokens], kernel.T),
        product(dy[tokens], kernel),
        product(x[:, features].T, dy.T),
    )


def _checked(exact: _Exact, name: str, output: dict[str, jax.Array], _: Any) -> Checked:
    errors = errors_of(output, exact)
    return errors, out_of_bounds(errors, ERROR_BOUNDS if name == "jnp" else FP8_ERROR_BOUNDS)


def errors_of(output: dict[str, jax.Array], exact: _Exact) -> dict[str, float]:
    """Relative L2 errors by name, of the rows that are checked."""
    rows = {"y": exact.tokens, "dx": exact.tokens, "dkernel": exact.features}
    return {
        f"{name}_error": relative_error(output[name][rows[name]], getattr(exact, name))
        for name in rows
        if name in output
    }


# Implementations


def _build(name: str, operation: str, inputs: _Inputs) -> Candidate:
    if name == "flax_fp8":
        return _build_flax(name, operation, inputs)
    if name != "jnp":
        return _build_te_jax(name, operation, inputs)

    def forward(x: jax.Array, kernel: jax.Array, dy: jax.Array) -> dict[str, jax.Array]:
        del dy
        return {"y": x @ kernel}

    def forward_backward(x: jax.Array, kernel: jax.Array, dy: jax.Array) -> dict[str, jax.Array]:
        y, vjp = jax.vjp(jnp.matmul, x, kernel)
        dx, dkernel = vjp(dy)
        return {"y": y, "dx": dx, "dkernel": dkernel}

    return _candidate(name, forward if operation == "forward" else forward_backward, inputs)


def _build_flax(name: str, operation: str, inputs: _Inputs) -> Candidate:
    x, kernel, dy = (float(jnp.max(jnp.abs(a))) for a in (inputs.x, inputs.kernel, inputs.dy))

    def forward(x: jax.Array, kernel: jax.Array, dy: jax.Array, state: Any) -> dict[str, Any]:
        del dy
        return {"y": flax_fp8.product(x, kernel, state)}

    def forward_backward(x: jax.Array, kernel: jax.Array, dy: jax.Array, state: Any) -> dict[str, Any]:
        y, vjp = jax.vjp(flax_fp8.product, x, kernel, state)
        dx, dkernel, next_state = vjp(dy)
        return {"y": y, "dx": dx, "dkernel": dkernel, "state": next_state}

    return _candidate(
        name, forward if operation == "forward" else forward_backward, inputs, flax_fp8.state(x, kernel, dy)
    )


def _build_te_jax(name: str, operation: str, inputs: _Inputs) -> Candidate:
    variant = VARIANTS[name]
    recipe = variant.recipe
    dense = functools.partial(ops.dense, recipe=recipe, implementation=variant.implementation)
    state = _state(recipe, inputs)

    def forward(x: jax.Array, kernel: Any, dy: jax.Array, state: DelayedScalingState | None) -> dict[str, jax.Array]:
        del dy
        return {"y": dense(x, kernel, scaling_state=state)}

    def forward_backward(x: jax.Array, kernel: Any, dy: jax.Array, state, buffer=None) -> dict[str, Any]:
        def layer(x, kernel, state, buffer):
            return dense(x, kernel, scaling_state=state, wgrad_accumulator=buffer, accumulate=False)

        y, vjp = jax.vjp(layer, x, kernel, state, buffer)
        dx, dkernel, next_state, next_buffer = vjp(dy)
        return {"y": y, "dx": dx, "dkernel": dkernel if buffer is None else next_buffer, "state": next_state}

    function = forward if operation == "forward" else forward_backward
    if not variant.once:
        return _candidate(name, function, inputs, state)
    amax = recipe.reference_amax(state.kernel) if isinstance(recipe, DelayedScaling) and state else None
    quantized = ops.quantize(inputs.kernel, recipe.quantization("kernel"), amax=amax, implementation="native")
    buffer = None if operation == "forward" else jnp.zeros(inputs.kernel.shape, jnp.bfloat16)
    return _candidate(name, function, dataclasses.replace(inputs, kernel=quantized), state, buffer=buffer)


def _state(recipe: Recipe, inputs: _Inputs) -> DelayedScalingState | None:
    """For delayed scaling, what it knows after many steps on values like these."""
    if not isinstance(recipe, DelayedScaling):
        return None
    x, kernel, dy = (
        jnp.full((recipe.history_len,), jnp.max(jnp.abs(a)).astype(jnp.float32))
        for a in (inputs.x, inputs.kernel, inputs.dy)
    )
    return DelayedScalingState(x, kernel, dy, jnp.ones(()))


def _candidate(
    name: str,
    function: Callable[..., dict[str, Any]],
    inputs: _Inputs,
    *rest: Any,
    buffer: jax.Array | None = None,
) -> Candidate:
    """The compiled function; with a buffer, each call writes over the kernel's gradient of the one before."""
    operands = (inputs.x, inputs.kernel, inputs.dy, *rest)
    if buffer is None:
        compiled = jax.jit(function).lower(*operands).compile()
        call: Callable[..., Any] = compiled
    else:
        buffers = [buffer]
        compiled = jax.jit(function, donate_argnums=len(operands)).lower(*operands, buffer).compile()

        def overwrite(*operands: Any) -> dict[str, Any]:
            output = compiled(*operands, buffers[0])
            buffers[0] = output["dkernel"]
            return output

        call = overwrite
    return Candidate(
        name=name,
        call=call,
        arguments=lambda calls: [operands] * calls,
        most_calls=calls_that_fit(inputs.x.nbytes + inputs.dy.nbytes + 2 * inputs.x.shape[1] * inputs.dy.shape[1]),
        temporary_bytes=temporary_bytes(compiled),
    )


FAMILY = Family(
    description="linear layers in FP8, quantization included: forward, and with the gradients of x and kernel",
    cases={"gpu": shapes.DENSE_GPU, "cpu": shapes.DENSE_CPU},
    implementations=IMPLEMENTATIONS,
    peers=PEERS,
    run_case=run_case,
    headline=Headline(
        operation="forward_backward",
        figure="time_over_jnp",
        label="FP8 layer with gradients, time as a multiple of jnp's in bfloat16",
        implementations=("te_jax_current", "te_jax_delayed", "te_jax_rowwise", "te_jax_block", "te_jax_current_once"),
    ),
)
