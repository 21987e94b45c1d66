"""Whole layers of a Llama on one device: te_jax in FP8 against bfloat16, and against Flax's own FP8.

A call computes the result, and for a given cotangent the gradients of x and of all parameters. x is bfloat16 and
parameters are float32, as in training. Operations:

- mlp: RMS norm, then the gated MLP.
- block: RMS norm, grouped-query attention with rotary positions, residual, RMS norm, gated MLP, residual.

Implementations:

- bf16: plain JAX, kernels cast to bfloat16 in the call; attention by cuDNN (by XLA on a CPU).
- flax_fp8: the same with Flax's `Fp8DirectDotGeneralOp` for every product with a kernel: delayed scaling, which XLA
  turns into FP8 products. Its state is an argument, and the next state a result.
- te_jax: te_jax's operations in bfloat16, without a recipe.
- te_jax_block, te_jax_current, te_jax_delayed: with a recipe. Norms hand x over in FP8 (not with delayed scaling) and
  add the residual, query, key and value share x, as gate and up do, and the MLP is `ops.gated_mlp`. All quantization is
  inside the clock.
- te_jax_xla: te_jax_current by XLA, as on GPUs without te_jax's products.
- te_jax_block_once, te_jax_current_once: kernels come quantized, as for all but the first of several microbatches, and
  their gradients are written in float32 into buffers that are donated.

TFLOP/s are for three times the forward pass's operations, where causal attention counts the pairs that it needs. No
time is reported for results that differ from those of bf16 by more than the error bounds.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import flax_fp8, shapes
from benchmarks.harness import (
    Candidate,
    CaseResult,
    Checked,
    Family,
    Headline,
    Timing,
    compute_row,
    out_of_bounds,
    run_operation,
    temporary_bytes,
)
from benchmarks.transformer import errors_of
from te_jax import native, ops
from te_jax.layers.attention import rotary_tables, rotate
from te_jax.layers.norm import handover
from te_jax.ops.linear.kernels import quantize_kernel
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, DelayedScalingState, Recipe

ERROR_BOUNDS = {"y_error": 0.02, "gradient_error": 0.03}
"""Largest relative L2 differences of the result, and of any gradient, to those of bf16."""
FP8_ERROR_BOUNDS = {"y_error": 0.08, "gradient_error": 0.5}
"""The same in FP8. The gradients of query and key are differences of nearly equal terms."""

_FAST = ("forward", "dgrad", "wgrad")
_EPSILON, _ROPE_THETA = 1e-5, 500_000.0

Parameters = dict[str, Any]


@dataclass(frozen=True)
class _Variant:
    """How te_jax runs a layer: with which recipe, whether kernels come quantized, and by which implementation."""

    recipe: Recipe | None
    once: bool = False
    implementation: native.Implementation = "native"


VARIANTS = {
    "te_jax": _Variant(None),
    "te_jax_block": _Variant(BlockScaling()),
    "te_jax_block_once": _Variant(BlockScaling(), once=True),
    "te_jax_current": _Variant(CurrentScaling(fast_accumulation=_FAST)),
    "te_jax_current_once": _Variant(CurrentScaling(fast_accumulation=_FAST), once=True),
    "te_jax_delayed": _Variant(DelayedScaling(fast_accumulation=_FAST)),
    "te_jax_xla": _Variant(CurrentScaling(fast_accumulation=_FAST), implementation="xla"),
}
PEERS = ("bf16", "flax_fp8")
IMPLEMENTATIONS = (*PEERS, *VARIANTS)


def run_case(case: shapes.LayerShape, implementations: Sequence[str], timing: Timing) -> CaseResult:
    """Measure the operations of one case with the named implementations; see `harness.Family.run_case`."""
    result = CaseResult()
    for operation in case.operations:
        parameters, x, dy = _drawn(case, operation)
        run_operation(
            {"case": case.name, "model": case.model, "operation": operation},
            list(dict.fromkeys(("bf16", *implementations))),
            timing,
            result,
            build=functools.partial(_build, case=case, operation=operation, parameters=parameters, x=x, dy=dy),
            errors=_checked,
            row=functools.partial(_row, flops=_flops(case, operation)),
            references=("bf16",),
        )
    return result


def _checked(name: str, output: Any, expected: Any) -> Checked:
    errors = errors_of(output, expected)
    return errors, out_of_bounds(errors, ERROR_BOUNDS if name in ("bf16", "te_jax") else FP8_ERROR_BOUNDS)


def _row(candidate: Candidate, seconds: dict[str, list[float]], *, flops: int) -> dict[str, Any]:
    row = compute_row(seconds, candidate.name, flops=flops, peers=PEERS, over="bf16")
    return row | {"temporary_bytes": candidate.temporary_bytes}


def _flops(case: shapes.LayerShape, operation: str) -> int:
    tokens, mlp = case.batch * case.sequence, 3 * case.hidden * case.mlp
    if operation == "mlp":
        return 3 * 2 * tokens * mlp
    wide, narrow = case.heads * case.head_dim, case.kv_heads * case.head_dim
    pairs = case.batch * (case.sequence * (case.sequence + 1) // 2)
    return 3 * (2 * tokens * (case.hidden * (2 * wide + 2 * narrow) + mlp) + 4 * pairs * wide)


# Inputs


def _drawn(case: shapes.LayerShape, operation: str) -> tuple[Parameters, jax.Array, jax.Array]:
    """Parameters in float32, x and dy [batch, sequence, hidden] in bfloat16, as in a network that begins to train."""
    wide, narrow = case.heads * case.head_dim, case.kv_heads * case.head_dim
    sizes = {
        "mlp_norm": (case.hidden,),
        "gate": (case.hidden, case.mlp),
        "up": (case.hidden, case.mlp),
        "down": (case.mlp, case.hidden),
    }
    if operation == "block":
        sizes |= {
            "attention_norm": (case.hidden,),
            "query": (case.hidden, wide),
            "key": (case.hidden, narrow),
            "value": (case.hidden, narrow),
            "out": (wide, case.hidden),
        }

    @jax.jit
    def draw(key: jax.Array) -> tuple[Parameters, jax.Array, jax.Array]:
        *keys, x_key, dy_key = jax.random.split(key, len(sizes) + 2)
        parameters = {}
        for (name, shape), each in zip(sizes.items(), keys, strict=True):
            normal = jax.random.normal(each, shape, jnp.float32)
            parameters[name] = 1 + 0.1 * normal if len(shape) == 1 else normal * shape[0] ** -0.5
        stream = (case.batch, case.sequence, case.hidden)
        x, dy = (jax.random.normal(each, stream, jnp.float32).astype(jnp.bfloat16) for each in (x_key, dy_key))
        return parameters, x, dy

    return jax.block_until_ready(draw(jax.random.key(0)))


# Layers


class Plain:
    """Plain JAX. What is kept between steps, `state`, is empty."""

    # Never implementation=None: where the kernels are not loaded that would publish the reference under their name.
    def __init__(
        self,
        parameters: Parameters,
        state: Any,
        recipe: Recipe | None = None,
        implementation: native.Implementation = "native",
    ):
        self.parameters, self.state, self.recipe = parameters, state, recipe
        self.implementation: native.Implementation = implementation

    def norm(self, x: jax.Array, name: str, residual: jax.Array | None = None) -> tuple[Any, jax.Array]:
        total = x if residual is None else x + residual
        wide = total.astype(jnp.float32)
        rstd = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + _EPSILON)
        return (wide * rstd * self.parameters[name][None, None]).astype(x.dtype), total

    def project(self, x: Any, names: tuple[str, ...]) -> tuple[jax.Array, ...]:
        return tuple(self._product(x, name) for name in names)

    def mlp(self, x: Any) -> jax.Array:
        gate, up = self.project(x, ("gate", "up"))
        return self.project(jax.nn.silu(gate) * up, ("down",))[0]

    def attention(self, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
        return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=implementation)

    def _product(self, x: jax.Array, name: str) -> jax.Array:
        return x @ self.parameters[name].astype(x.dtype)


class FlaxFp8(Plain):
    """With Flax's FP8 products; `state` has the variables of each."""

    def _product(self, x: jax.Array, name: str) -> jax.Array:
        return flax_fp8.product(x, self.parameters[name].astype(x.dtype), self.state[name])


class _TeJax(Plain):
    """te_jax's operations; `state` may have accumulators and the states of delayed scaling, by kernel."""

    def norm(self, x: jax.Array, name: str, residual: jax.Array | None = None) -> tuple[Any, jax.Array]:
        found = ops.rms_norm(
            x, self.parameters[name], epsilon=_EPSILON, residual=residual, quantization=handover(self.recipe, x),
            implementation=self.implementation,
        )  # fmt: skip
        return (found, x) if residual is None else found

    def project(self, x: Any, names: tuple[str, ...]) -> tuple[jax.Array, ...]:
        return ops.dense(x, **self._of(names))

    def mlp(self, x: Any) -> jax.Array:
        return ops.gated_mlp(x, **self._of(("gate", "up", "down")))

    def attention(self, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return ops.attention(query, key, value, causal=True)

    def _of(self, names: tuple[str, ...]) -> dict[str, Any]:
        def of(values: Any) -> Any:
            return None if values is None else tuple(values[name] for name in names)

        return {
            "kernel": of(self.parameters),
            "recipe": self.recipe,
            "wgrad_accumulator": of(self.state.get("accumulators")),
            "accumulate": False,
            "scaling_state": of(self.state.get("scaling")),
            "implementation": None if self.recipe is None else self.implementation,
        }


def applied(layer: Plain, x: jax.Array, case: shapes.LayerShape | shapes.StepShape, operation: str) -> jax.Array:
    if operation == "mlp":
        return layer.mlp(layer.norm(x, "mlp_norm")[0])
    normed, x = layer.norm(x, "attention_norm")
    query, key, value = (
        y.reshape(*y.shape[:2], -1, case.head_dim) for y in layer.project(normed, ("query", "key", "value"))
    )
    tables = rotary_tables(jnp.arange(case.sequence)[None], case.head_dim, _ROPE_THETA)
    mixed = layer.attention(rotate(query, *tables), rotate(key, *tables), value)
    (mixed,) = layer.project(mixed.reshape(*mixed.shape[:2], -1), ("out",))
    normed, x = layer.norm(mixed, "mlp_norm", residual=x)
    return x + layer.mlp(normed)


# Implementations


def _build(
    name: str, case: shapes.LayerShape, operation: str, parameters: Parameters, x: jax.Array, dy: jax.Array
) -> Candidate:
    variant = VARIANTS.get(name)
    kernels = [key for key, value in parameters.items() if value.ndim == 2]
    kind: Callable[..., Plain] = {"bf16": Plain, "flax_fp8": FlaxFp8}.get(name, _TeJax)
    state: dict[str, Any] = {}
    buffers: dict[str, jax.Array] = {}
    if name == "flax_fp8":
        # x of a norm or an activation is below 16, and so are gradients that a network of unit variance sends back.
        state = {key: flax_fp8.state(16.0, _largest(parameters[key]), 16.0) for key in kernels}
    if variant is not None:
        kind = functools.partial(_TeJax, recipe=variant.recipe, implementation=variant.implementation)
        if isinstance(variant.recipe, DelayedScaling):
            state["scaling"] = {key: _scaling_state(variant.recipe, parameters[key]) for key in kernels}
        if variant.once and variant.recipe is not None:
            quantize = functools.partial(quantize_kernel, recipe=variant.recipe, row_ndim=1, implementation="native")
            buffers = {key: jnp.zeros_like(parameters[key]) for key in kernels}
            parameters = parameters | {key: quantize(parameters[key]) for key in kernels}

    def run(parameters: Parameters, x: jax.Array, dy: jax.Array, state: Any, buffers: Any) -> dict[str, Any]:
        quantized = {key: value for key, value in parameters.items() if buffers and key in buffers}
        trained = {key: value for key, value in parameters.items() if key not in quantized}

        def layer(trained, x, state, buffers):
            held = state | ({"accumulators": buffers} if buffers else {})
            return applied(kind(trained | quantized, held), x, case, operation)

        y, vjp = jax.vjp(layer, trained, x, state, buffers)
        gradients, dx, next_state, next_buffers = vjp(dy)
        return {"y": y, "dx": dx, "parameters": gradients | next_buffers, "state": next_state}

    compiled = jax.jit(run, donate_argnums=4).lower(parameters, x, dy, state, buffers).compile()
    held = [buffers]

    def call(*arguments: Any) -> dict[str, Any]:
        output = compiled(*arguments, held[0])
        held[0] = {key: output["parameters"][key] for key in buffers}
        return output

    return Candidate(
        name=name,
        call=call,
        arguments=lambda calls: [(parameters, x, dy, state)] * calls,
        most_calls=8,
        temporary_bytes=temporary_bytes(compiled),
        read=lambda output: (output["y"], output["dx"], output["parameters"]),
    )


def _largest(values: jax.Array) -> float:
    return float(jnp.max(jnp.abs(values)))


def _scaling_state(recipe: DelayedScaling, kernel: jax.Array) -> DelayedScalingState:
    """What delayed scaling knows after many steps; see `flax_fp8.state`."""
    histories = (jnp.full((recipe.history_len,), largest) for largest in (16.0, _largest(kernel), 16.0))
    return DelayedScalingState(*histories, uses=jnp.ones(()))


FAMILY = Family(
    description="whole layers on one device, forward and backward: norm and MLP, and a decoder block",
    cases={"gpu": shapes.LAYER_GPU, "cpu": shapes.LAYER_CPU},
    implementations=IMPLEMENTATIONS,
    peers=("flax_fp8",),
    run_case=run_case,
    headline=Headline(
        operation="block",
        figure="time_over_bf16",
        label="Decoder block with gradients, time as a multiple of plain JAX's in bfloat16",
        implementations=("flax_fp8", "te_jax_current", "te_jax_block", "te_jax_block_once"),
    ),
)
