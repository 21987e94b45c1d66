"""SwiGLU and its gradients to FP8: te_jax against XLA's loops followed by a quantization, and XLA's loops alone.

Random normal gate, up and dy in bfloat16. Operations, and the bytes that they must move for each value of the result:

- forward_data, forward: the result in FP8, as it is (4 read, 1 written), and transposed too (4 + 2).
- backward, backward_y: the gradients of gate and up in FP8, as they are and transposed (6 + 4), and also the result
  once more, transposed (6 + 5), for the weight gradient of the layer that reads it.

Each comes with block scaling (…_block: 1 × 128 scales, and 128 × 128 for transposed gradients), with one scale that is
known beforehand (…_delayed), and with one that follows from the values, which are computed twice (…_current: 4 or 6
bytes more).

Implementations: `te_jax` (native kernels), `unfused` (XLA's loop in bfloat16, then `ops.quantize` with its kernels),
`xla_fp8` (all by XLA, which may cast in its loop), `xla` (XLA's loop in bfloat16 alone: nothing in FP8) and `copy` (a
device copy of as many bytes, the yardstick).

A program computes four sets of operands, and a time is that of one. No time is reported for a result that is wrong:
every copy is compared with the values in bfloat16 by its relative error.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import shapes
from benchmarks.elementwise import buffers_for, build_jax, fresh, relative, run_beside_copy
from benchmarks.harness import Candidate, CaseResult, Family, Headline, Timing
from te_jax import ops
from te_jax.ops._activation_kernels import activated, activation_gradients_quantized
from te_jax.ops._quantize_kernels import Request
from te_jax.quantized import QuantizedArray
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, Recipe
from te_jax.reference.activation import Activation

IMPLEMENTATIONS = ("te_jax", "unfused", "xla_fp8", "xla", "copy")
PEERS = ("unfused", "xla_fp8", "xla")
ERROR_BOUND = {"float8_e4m3fn": 0.04, "float8_e5m2": 0.08}
"""Relative L2 error of a copy beyond which no time is reported."""

_SWIGLU = Activation("silu")
_AMAXES = {"gate": 24.0, "up": 24.0, "y": 24.0}  # where scales are known beforehand
_RECIPES: dict[str, Recipe] = {"block": BlockScaling(), "delayed": DelayedScaling(), "current": CurrentScaling()}


@dataclasses.dataclass(frozen=True)
class _Operation:
    """What is computed and quantized how.

    Attributes:
      scales: "block", "delayed" or "current".
      backward: the gradients rather than the result.
      transposed: with the transposed copies; of the forward pass.
      with_y: with the transposed copy of the result; of the backward pass.
    """

    scales: str
    backward: bool
    transposed: bool = True
    with_y: bool = False

    @property
    def recipe(self) -> Recipe:
        return _RECIPES[self.scales]

    @property
    def bytes(self) -> int:
        """That a value of the result moves at least."""
        read, written = (6, 4 + self.with_y) if self.backward else (4, 1 + self.transposed)
        return read * (2 if self.scales == "current" else 1) + written

    def amax(self, name: str) -> jax.Array | None:
        known = self.scales == "delayed" or (name == "y" and self.scales == "current" and self.backward)
        return jnp.float32(_AMAXES[name]) if known else None  # that of y was seen in the forward pass


OPERATIONS = {
    f"{name}_{scales}": _Operation(scales, **fields)
    for name, fields in {
        "forward_data": {"backward": False, "transposed": False},
        "forward": {"backward": False},
        "backward": {"backward": True},
        "backward_y": {"backward": True, "with_y": True},
    }.items()
    for scales in _RECIPES
}

_Operands = tuple[jax.Array, jax.Array, jax.Array]


def run_case(case: shapes.MatrixShape, implementations: Sequence[str], timing: Timing) -> CaseResult:
    """Measure all operations of one case with the named implementations; see `harness.Family.run_case`."""
    dtype = jnp.dtype(case.dtype)
    draw = jax.jit(lambda key: jax.random.normal(key, case.shape, jnp.float32).astype(dtype))
    gate, up, dy = (jax.block_until_ready(draw(key)) for key in jax.random.split(jax.random.key(0), 3))
    operands = [(gate, up, dy)]
    operands += [fresh(operands[0]) for _ in range(buffers_for(gate.nbytes) - 1)]
    names = [name for name in implementations if name != "copy"]
    result = CaseResult()
    for name, operation in OPERATIONS.items():
        builds = {each: functools.partial(_build, each, operation, operands) for each in names}
        run_beside_copy(case, name, builds, timing, case.elements * operation.bytes, PEERS, result)
    return result


def _build(name: str, operation: _Operation, operands: list[_Operands]) -> Candidate:
    function = {
        "te_jax": functools.partial(_fused, native=True),
        "unfused": _unfused,
        "xla_fp8": functools.partial(_fused, native=False),
        "xla": _plain,
    }[name]
    expected = jax.jit(functools.partial(_plain, operation))(*operands[0])
    return build_jax(
        name,
        lambda operands, _: function(operation, *operands),
        lambda output: _problem(output, expected),
        shared=(),
        tensors=operands,
        result_bytes=4 * operands[0][0].size,
    )


def _plain(operation: _Operation, gate: jax.Array, up: jax.Array, dy: jax.Array) -> list[jax.Array]:
    """The results in bfloat16."""
    if not operation.backward:
        return [activated(_SWIGLU, gate, up)]
    y, gradients_of = jax.vjp(functools.partial(activated, _SWIGLU), gate, up)
    return [*gradients_of(dy), *([y] if operation.with_y else [])]


def _fused(
    operation: _Operation, gate: jax.Array, up: jax.Array, dy: jax.Array, *, native: bool
) -> list[QuantizedArray]:
    activation = operation.recipe.quantization("activation")
    if not operation.backward:
        return [
            ops.gated_activation(
                gate,
                up,
                quantization=activation,
                copies="both" if operation.transposed else "data",
                amax=operation.amax("y"),
                implementation="native" if native else "reference",
            )
        ]
    *gradients, y = activation_gradients_quantized(
        _SWIGLU,
        gate,
        up,
        dy,
        operation.amax("gate"),
        operation.amax("up"),
        operation.amax("y"),
        Request(operation.recipe.quantization("gradient"), 1, "both", (), (), False, False),
        activation if operation.with_y else None,
        native,
    )
    return [*(parts.array for parts in gradients if parts is not None), *([] if y is None else [y])]


def _unfused(operation: _Operation, gate: jax.Array, up: jax.Array, dy: jax.Array) -> list[QuantizedArray]:
    activation = operation.recipe.quantization("activation")
    quantize = functools.partial(ops.quantize, implementation="native")
    results = _plain(operation, gate, up, dy)
    if not operation.backward:
        copies = "both" if operation.transposed else "data"
        return [quantize(results[0], activation, copies=copies, amax=operation.amax("y"))]
    gradient = operation.recipe.quantization("gradient")
    quantized = [
        quantize(x, gradient, amax=operation.amax(name)) for x, name in zip(results[:2], ("gate", "up"), strict=True)
    ]
    if operation.with_y:
        quantized.append(quantize(results[2], activation, copies="transposed", amax=operation.amax("y")))
    return quantized


def _problem(output: Sequence[Any], expected: Sequence[jax.Array]) -> str | None:
    """Says which copy is too far off, if one is. Written so that NaN is."""
    for name, found, wanted in zip(("first", "second", "third"), output, expected, strict=False):
        if not isinstance(found, QuantizedArray):
            continue
        for copy, alone in (("data", found.without_transposed()), ("transposed", found.without_data())):
            codes = getattr(alone, copy)
            if codes is None:
                continue
            error, bound = float(_error(alone, wanted)), ERROR_BOUND[codes.dtype.name]
            if not error <= bound:
                return f"{copy} of the {name} result is wrong: relative L2 error {error:.3g}, bound {bound:.3g}"
    return None


@jax.jit
def _error(found: QuantizedArray, wanted: jax.Array) -> jax.Array:
    return relative(found.dequantize(), wanted)


FAMILY = Family(
    description="SwiGLU and its gradients to FP8",
    cases={"gpu": shapes.ACTIVATION_GPU, "cpu": shapes.ACTIVATION_CPU},
    implementations=IMPLEMENTATIONS,
    peers=PEERS,
    run_case=run_case,
    headline=Headline(
        operation="backward_block",
        figure="ratio_to_copy",
        label="Gradients of SwiGLU in FP8, both copies, block scaling, time as a multiple of a copy of as many bytes",
        implementations=IMPLEMENTATIONS[:-1],
    ),
)
