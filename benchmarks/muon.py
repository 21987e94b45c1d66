"""One step of Muon and `optax.apply_updates` over the kernels of a decoder's layers: te_jax against optax.

Gradients are random normal values, parameters and states are donated and carried from call to call. `te_jax` is
`te_jax.optim.muon` with float32 parameters and gradients and momentum in bfloat16, `te_jax_float8` with bfloat16
parameters and gradients, int16 remainders and momentum in FP8. `optax` is `optax.contrib.muon` with everything in
float32, which iterates in float32, and `optax_bf16` with everything in bfloat16.

`flops` are those of the iterations as each has them, of 2 for a multiplication and an addition.

No time is reported for a result that is wrong: three steps from random parameters and gradients are compared with those
of `optax.contrib.muon` in float32.
"""

import functools
from collections.abc import Sequence
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
    compute_row,
    run_operation,
    temporary_bytes,
)
from te_jax import optim
from te_jax.optim._orthogonal import flops as flops_of

PEERS = ("optax", "optax_bf16")
IMPLEMENTATIONS = ("te_jax", "te_jax_float8", *PEERS)

_RATE = 0.02
_ITERATIONS = 5
_CHECKED = {"square": (128, 128), "long": (128, 512), "wide": (512, 128)}
_ERROR_BOUND = {"te_jax": 0.02, "te_jax_float8": 0.2, "optax": 0.0, "optax_bf16": 0.2}


def _optimizer(name: str) -> tuple[optax.GradientTransformation, str]:
    """And the dtype of its parameters and gradients."""
    if name == "te_jax":
        return optim.muon(_RATE, mu_dtype="bfloat16"), "float32"
    if name == "te_jax_float8":
        return optim.muon(_RATE, mu_dtype="float8_e4m3fn", master_dtype="int16"), "bfloat16"
    return optax.contrib.muon(_RATE), "bfloat16" if name == "optax_bf16" else "float32"


def _kernels(case: shapes.StepShape) -> dict[str, tuple[int, int]]:
    """Shapes of the kernels of a layer, by name."""
    width, keys = case.heads * case.head_dim, case.kv_heads * case.head_dim
    return {
        **{"query": (case.hidden, width), "key": (case.hidden, keys), "value": (case.hidden, keys)},
        **{"out": (width, case.hidden), "gate": (case.hidden, case.mlp), "up": (case.hidden, case.mlp)},
        "down": (case.mlp, case.hidden),
    }


def run_case(case: shapes.StepShape, implementations: Sequence[str], timing: Timing) -> CaseResult:
    """Measure one case with the named implementations; see `harness.Family.run_case`."""
    result = CaseResult()
    run_operation(
        {"case": case.name, "model": case.model, "operation": "step"},
        implementations,
        timing,
        result,
        build=functools.partial(_build, case=case),
        errors=lambda name, *_: ({}, _problem(name)),
        row=functools.partial(_row, case=case),
    )
    return result


def _row(candidate: Candidate, seconds: dict[str, list[float]], *, case: shapes.StepShape) -> dict[str, Any]:
    flops = 0.0
    for m, n in map(sorted, _kernels(case).values()):
        by_optax = _ITERATIONS * (4 * m * m * n + 2 * m**3)
        flops += case.depths[0] * (by_optax if candidate.name in PEERS else flops_of((m, n), _ITERATIONS))
    return compute_row(seconds, candidate.name, flops=int(flops), peers=PEERS) | {
        "temporary_bytes": candidate.temporary_bytes
    }


def _draw(seed: int, kernels: dict[str, tuple[int, int]], layers: int, dtype: str) -> list[dict[str, jax.Array]]:
    @functools.partial(jax.jit, static_argnums=1)
    def draw(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
        return jax.random.normal(key, shape, jnp.dtype(dtype))

    keys = jax.random.split(jax.random.key(seed), layers)
    return [
        {name: draw(jax.random.fold_in(key, i), shape) for i, (name, shape) in enumerate(kernels.items())}
        for key in keys
    ]


def _build(name: str, case: shapes.StepShape) -> Candidate:
    optimizer, dtype = _optimizer(name)
    gradients, params = (_draw(seed, _kernels(case), case.depths[0], dtype) for seed in range(2))
    carried = [(params, jax.jit(optimizer.init)(params))]
    compiled = (
        jax.jit(functools.partial(_step, optimizer), donate_argnums=(1, 2)).lower(gradients, *carried[0]).compile()
    )

    def call() -> Any:
        carried[0] = compiled(gradients, *carried[0])
        return carried[0]

    return Candidate(
        name=name, call=call, arguments=lambda calls: [()] * calls, temporary_bytes=temporary_bytes(compiled)
    )


def _step(optimizer: optax.GradientTransformation, gradients: Any, params: Any, state: Any) -> tuple[Any, Any]:
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


def _problem(name: str) -> str | None:
    """What is wrong with three steps. Written so that NaN is wrong."""
    expected, actual = _change("optax"), _change(name)
    error = float(jnp.linalg.norm(actual - expected) / jnp.linalg.norm(expected))
    if error <= _ERROR_BOUND[name]:
        return None
    return f"the parameters' change is wrong: relative L2 error {error:.3g}, bound {_ERROR_BOUND[name]:.3g}"


@functools.cache
def _change(name: str) -> jax.Array:
    """float32: how three steps change the parameters, or their masters."""
    optimizer, dtype = _optimizer(name)
    (params,) = _draw(2, _CHECKED, 1, dtype)
    # Zeros, in which no step is lost that bfloat16 parameters would round away.
    params = jax.tree.map(jnp.zeros_like, params)
    state = optimizer.init(params)
    step = jax.jit(functools.partial(_step, optimizer))
    for seed in range(3):
        (gradients,) = _draw(3 + seed, _CHECKED, 1, "bfloat16")
        params, state = step(jax.tree.map(lambda g: g.astype(dtype), gradients), params, state)
    return jnp.concatenate([x.ravel() for x in jax.tree.leaves(optim.weights(params, state))])


FAMILY = Family(
    description="a step of Muon over the kernels of a decoder's layers, beside optax's",
    cases={"gpu": shapes.MUON_GPU, "cpu": shapes.STEP_CPU[:1]},
    implementations=IMPLEMENTATIONS,
    peers=PEERS,
    run_case=run_case,
    headline=Headline(
        operation="step",
        figure="median_ms",
        label="A step of Muon over the layers' kernels, milliseconds",
        implementations=IMPLEMENTATIONS,
    ),
)
