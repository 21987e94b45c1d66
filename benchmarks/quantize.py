"""Quantization to FP8, both copies: te_jax against jnp, torch.compile and a device copy of as many bytes.

Random normal values are quantized to float8_e4m3fn, as they are and transposed, with their scales. Operations:

- delayed: one scale, which is known beforehand, and the largest magnitude of the values for later. They are read once
  and two bytes are written for each: in bfloat16 4 bytes a value.
- current: one scale, from the values themselves, which are therefore read twice: 6 bytes a value.
- row: a scale for each row of both copies: 6 bytes a value.
- block: a scale for 1 × 128 values of both copies, as activations have: 4 bytes a value.
- block_gradient: 1 × 128 values, and squares of 128 × 128 for the transposed copy: 4 bytes a value.
- block_kernel: squares of 128 × 128 for both copies: 4 bytes a value.
- current_dbias: current, and the sum of the values over the rows.

Implementations: `te_jax` (native kernels), `te_jax_reference` (its definition in jnp, under jit), `jnp` (largest
magnitude, scale, clip, `astype` and transpose, as one would write them, under jit), `torch.compile` (the same in torch)
and `copy` (a device copy that reads and writes as many bytes as the operation must, the yardstick).

A program quantizes four tensors, and a time is that of one of them: as in a model, and so that no figure holds what
passes between two programs. Several examples, each with scales of its own, are quantized under `jax.vmap`, and torch is
given them as one more dimension; then a time is that of all of them.

No time is reported for a result that is wrong: of te_jax both copies and all scales are compared bit by bit with
its definition, of the others both copies by their relative error.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import shapes
from benchmarks.elementwise import buffers_for, build_jax, candidate, fresh, in_turns, relative, run_beside_copy
from benchmarks.harness import Candidate, CaseResult, Family, Headline, Timing
from benchmarks.torch_peer import as_torch, torch_on_gpu
from te_jax import ops
from te_jax.quantized import QuantizedArray
from te_jax.recipe import Quantization, Scaling

IMPLEMENTATIONS = ("te_jax", "te_jax_reference", "jnp", "torch.compile", "copy")
PEERS = ("te_jax_reference", "jnp", "torch.compile")
ERROR_BOUND = 0.03
"""Relative L2 error of both copies beyond which no time is reported: of normal values in 3 bits of mantissa, 0.027."""

_LARGEST = 448.0
_E4M3 = np.dtype(jnp.float8_e4m3fn)
_AMAX = 6.0  # where the scale is known beforehand


@dataclass(frozen=True)
class _Operation:
    """What is quantized how.

    Attributes:
      scaling, transposed_scaling: see `te_jax.recipe.Quantization`.
      reads: how often every value is read at least.
      delayed: the scale is known beforehand, and the largest magnitude is a result.
      dbias: the sum over the rows is a result.
    """

    scaling: Scaling
    transposed_scaling: Scaling
    reads: int
    delayed: bool = False
    dbias: bool = False

    @property
    def quantization(self) -> Quantization:
        return Quantization(_E4M3, self.scaling, self.transposed_scaling)


OPERATIONS = {
    "delayed": _Operation("tensor", "tensor", 1, delayed=True),
    "current": _Operation("tensor", "tensor", 2),
    "row": _Operation("row", "row", 2),
    "block": _Operation("block_1x128", "block_1x128", 1),
    "block_gradient": _Operation("block_1x128", "block_128x128", 1),
    "block_kernel": _Operation("block_128x128", "block_128x128", 1),
    "current_dbias": _Operation("tensor", "tensor", 2, dbias=True),
}


def run_case(case: shapes.MatrixShape, implementations: Sequence[str], timing: Timing) -> CaseResult:
    """Measure all operations of one case with the named implementations; see `harness.Family.run_case`."""
    x = _inputs(case)
    buffers = [x, *(fresh(x) for _ in range(buffers_for(x.nbytes) - 1))]  # equal, which XLA does not know
    result = CaseResult()
    for name, operation in OPERATIONS.items():
        floor_bytes = case.elements * (operation.reads * x.itemsize + 2)
        builds = {
            implementation: functools.partial(_build, implementation, operation, buffers)
            for implementation in implementations
            if implementation != "copy" and (implementation != "torch.compile" or jax.default_backend() == "gpu")
        }
        run_beside_copy(case, name, builds, timing, floor_bytes, PEERS, result)
    return result


# Inputs


def _inputs(case: shapes.MatrixShape) -> jax.Array:
    draw = jax.jit(lambda key: jax.random.normal(key, case.shape, jnp.dtype(case.dtype)))
    return jax.block_until_ready(draw(jax.random.key(0)))


def _amax(x: jax.Array) -> jax.Array:
    """What is known beforehand, for each example."""
    return jnp.full(x.shape[:-2], _AMAX, jnp.float32)


# Implementations


def _build(name: str, operation: _Operation, buffers: list[jax.Array]) -> Candidate:
    mapped = jax.vmap if buffers[0].ndim == 3 else lambda function: function
    build = functools.partial(build_jax, shared=_amax(buffers[0]), tensors=buffers, result_bytes=2 * buffers[0].size)
    if name == "torch.compile":
        return _build_torch(operation, buffers)
    if name == "jnp":
        function = mapped(_jnp(operation))
        return build(name, function, lambda output: _too_far_off(_errors(output, buffers[0])))

    def quantize(implementation):
        def run(x, amax):
            return ops.quantize(
                x,
                operation.quantization,
                amax=amax if operation.delayed else None,
                with_amax=operation.delayed,
                with_dbias=operation.dbias,
                implementation=implementation,
            )

        return mapped(run)

    # Never None: where the kernels are not loaded that would publish the reference under their name.
    reference = quantize("reference")
    if name == "te_jax_reference":
        return build(name, reference, lambda output: _too_far_off(_errors_of_copies(output, buffers[0])))

    def problem(output: Any) -> str | None:
        expected = jax.jit(reference)(buffers[0], _amax(buffers[0]))
        if operation.dbias:
            output, expected = output[0], expected[0]
        wrong = int(_differing_bits(output, expected))
        return f"{wrong} codes or scales differ from the definition" if wrong else None

    return build(name, quantize("native"), problem)


def _jnp(operation: _Operation) -> Callable[[jax.Array, jax.Array], Any]:
    """As one would write it: (data, transposed, inverse scales of both for every value, dbias, amax)."""

    def scale_of(amax: jax.Array) -> jax.Array:
        return _LARGEST / jnp.maximum(amax, 1e-30)

    def encode(x: jax.Array, scale: jax.Array) -> jax.Array:
        return jnp.clip(x * scale, -_LARGEST, _LARGEST).astype(_E4M3)

    def copy(x: jax.Array, scaling: Scaling, amax: jax.Array) -> tuple[jax.Array, jax.Array]:
        outer, summed = x.shape
        if scaling == "tensor":
            scale = scale_of(amax if operation.delayed else jnp.max(jnp.abs(x)))
            return encode(x, scale), jnp.reshape(1 / scale, (1, 1))
        if scaling == "row":
            scale = scale_of(jnp.max(jnp.abs(x), axis=1, keepdims=True))
            return encode(x, scale), 1 / scale
        height = 1 if scaling == "block_1x128" else 128
        blocks = x.reshape(outer // height, height, summed // 128, 128)
        scale = scale_of(jnp.max(jnp.abs(blocks), axis=(1, 3), keepdims=True))
        return encode(blocks, scale).reshape(x.shape), (1 / scale)[:, 0, :, 0]

    def quantize(x: jax.Array, amax: jax.Array) -> Any:
        wide = x.astype(jnp.float32)
        data, scale_inv = copy(wide, operation.scaling, amax)
        if operation.scaling == operation.transposed_scaling and operation.scaling in ("tensor", "block_128x128"):
            transposed, transposed_scale_inv = data.T, scale_inv.T
        else:
            transposed, transposed_scale_inv = copy(wide.T, operation.transposed_scaling, amax)
        extra = [jnp.max(jnp.abs(x))] if operation.delayed else []
        extra += [jnp.sum(wide, axis=0)] if operation.dbias else []
        return data, scale_inv, transposed, transposed_scale_inv, extra

    return quantize


def _build_torch(operation: _Operation, buffers: list[jax.Array]) -> Candidate:
    torch = torch_on_gpu()
    torch.compiler.reset()  # otherwise the next shape is compiled as a dynamic one

    def scale_of(amax: Any) -> Any:
        return _LARGEST / amax.clamp(min=1e-30)

    def encode(x: Any, scale: Any) -> Any:
        return (x * scale).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)

    def copy(x: Any, scaling: Scaling, amax: Any) -> tuple[Any, Any]:
        *examples, outer, summed = x.shape
        if scaling == "tensor":
            scale = scale_of(amax[..., None, None] if operation.delayed else x.abs().amax(dim=(-2, -1), keepdim=True))
            return encode(x, scale), 1 / scale
        if scaling == "row":
            scale = scale_of(x.abs().amax(dim=-1, keepdim=True))
            return encode(x, scale), 1 / scale
        height = 1 if scaling == "block_1x128" else 128
        blocks = x.reshape(*examples, outer // height, height, summed // 128, 128)
        scale = scale_of(blocks.abs().amax(dim=(-3, -1), keepdim=True))
        return encode(blocks, scale).reshape(x.shape), (1 / scale)[..., 0, :, 0]

    def quantize(x: Any, amax: Any) -> Any:
        wide = x.float()
        data, scale_inv = copy(wide, operation.scaling, amax)
        if operation.scaling == operation.transposed_scaling and operation.scaling in ("tensor", "block_128x128"):
            transposed, transposed_scale_inv = data.mT.contiguous(), scale_inv.mT
        else:
            transposed, transposed_scale_inv = copy(wide.mT, operation.transposed_scaling, amax)
            transposed = transposed.contiguous()
        extra = [x.abs().amax(dim=(-2, -1))] if operation.delayed else []
        extra += [wide.sum(dim=-2)] if operation.dbias else []
        return data, scale_inv, transposed, transposed_scale_inv, extra

    @torch.compile(dynamic=False)
    def run(amax: Any, *tensors: Any) -> list[Any]:
        return [quantize(x, amax) for x in tensors]

    def as_jax(tensor: Any) -> jax.Array:
        if tensor.dtype == torch.float8_e4m3fn:
            return jax.lax.bitcast_convert_type(as_jax(tensor.view(torch.uint8)), _E4M3)
        return jnp.from_dlpack(tensor.contiguous())

    turns, amax = in_turns([as_torch(x) for x in buffers]), as_torch(_amax(buffers[0]))
    return candidate(
        "torch.compile",
        lambda *arguments: run(*arguments),
        lambda calls: [(amax, *tensors) for tensors in turns(calls)],
        lambda output: _too_far_off(_errors([as_jax(part) for part in output[:4]], buffers[0])),
        wait=lambda output: torch.cuda.synchronize(),
    )


# Checks


def _errors(output: Any, x: jax.Array) -> tuple[float, float]:
    """Relative L2 errors of both copies, whose scales are spread over rows and columns of blocks."""
    data, scale_inv, transposed, transposed_scale_inv, *_ = output
    return float(_error_of_codes(data, scale_inv, x)), float(_error_of_codes(transposed, transposed_scale_inv, x.mT))


def _errors_of_copies(output: Any, x: jax.Array) -> tuple[float, float]:
    """Relative L2 errors of both copies of a QuantizedArray."""
    quantized = output[0] if isinstance(output, tuple) else output
    return float(_error_of_copy(quantized.without_transposed(), x)), float(_error_of_copy(quantized.without_data(), x))


@jax.jit
def _error_of_codes(codes: jax.Array, scale_inv: jax.Array, x: jax.Array) -> jax.Array:
    for axis in (-2, -1):
        scale_inv = jnp.repeat(scale_inv, codes.shape[axis] // scale_inv.shape[axis], axis=axis)
    return relative(codes.astype(jnp.float32) * scale_inv, x)


@jax.jit
def _error_of_copy(copy: QuantizedArray, x: jax.Array) -> jax.Array:
    return relative(copy.dequantize(), x)


def _too_far_off(errors: tuple[float, float]) -> str | None:
    """Says which error is too large. Written so that NaN is too large."""
    for copy, error in zip(("data", "transposed"), errors, strict=True):
        if not error <= ERROR_BOUND:
            return f"{copy} is wrong: relative L2 error {error:.3g}, bound {ERROR_BOUND:.3g}"
    return None


@jax.jit
def _differing_bits(a: Any, b: Any) -> jax.Array:
    """How many values differ between two trees of arrays."""

    def count(a: jax.Array, b: jax.Array) -> jax.Array:
        unsigned = {1: jnp.uint8, 4: jnp.uint32}[a.dtype.itemsize]
        a, b = (jax.lax.bitcast_convert_type(x, unsigned) for x in (a, b))
        return jnp.sum(a != b, dtype=jnp.int32)

    return jnp.sum(jnp.stack(jax.tree.leaves(jax.tree.map(count, a, b))))


FAMILY = Family(
    description="both FP8 copies of a tensor and their scales",
    cases={"gpu": shapes.QUANTIZE_GPU, "cpu": shapes.QUANTIZE_CPU},
    implementations=IMPLEMENTATIONS,
    peers=PEERS,
    run_case=run_case,
    headline=Headline(
        operation="current",
        figure="ratio_to_copy",
        label="Both FP8 copies with one scale from the tensor itself, time as a multiple of a copy of as many bytes",
        implementations=("te_jax", "te_jax_reference", "jnp", "torch.compile"),
    ),
)
