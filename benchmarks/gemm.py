"""Matrix products: te_jax in FP8 with every scaling against torch's FP8 products and jnp in bfloat16.

Operands [M, K] and [N, K] are random normal values, quantized beforehand, outside the clock. Operations:

- forward: a bfloat16 result.
- accumulate: a float32 result that is added to a float32 buffer in place, as weight gradients are.

Implementations: `te_jax_tensor` (one scale for each operand, cuBLASLt, fast accumulation), `te_jax_tensor_split`
(float32 takes over sums every 128 values), `te_jax_tensor_own` (te_jax's own kernel instead of cuBLASLt),
`te_jax_row` and `te_jax_row_split` (a scale for each row), `te_jax_block` (1 × 128 and 128 × 128 values to a scale,
always split), `jnp` (a bfloat16 dot), `torch_tensor` and `torch_row` (`torch._scaled_mm`, fast accumulation), and
`torch_block` (`torch.nn.functional.scaled_mm`: cuBLASLt's own block scaling). Weight gradients are split by default in
te_jax.recipe, so `accumulate` leaves fast ones out; torch does not accumulate.

Several products of one size, each of operands with scales of their own, are computed under `jax.vmap`, forward only; a
time is that of all of them. torch has no such product in FP8.

On a GPU, forward products are measured a second time in bursts of 10 ms after rests of 150 ms (`tflops_rested`): what
the kernels do before the power limit slows them down.

No time is reported for a result outside the error bound: 64 rows of every result, of several products those of the
first and of the last one, are compared with float64 products of the values that the operands stand for.
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
from benchmarks.harness import (
    Candidate,
    CaseResult,
    Checked,
    Family,
    Headline,
    Timing,
    compute_row,
    measure,
    out_of_bounds,
    relative_error,
    run_operation,
)
from benchmarks.torch_peer import as_torch, rows_of, torch_on_gpu
from te_jax import ops
from te_jax.quantized import QuantizedArray
from te_jax.recipe import Quantization, Scaling

OPERATIONS = ("forward", "accumulate")
ERROR_BOUND = 1e-2
"""Relative L2 error against float64 beyond which no time is reported."""

_CHECKED_ROWS = 64


@dataclass(frozen=True)
class _Variant:
    """How te_jax multiplies.

    Attributes:
      scalings: of lhs and rhs.
      options: of `ops.gemm`.
      operations: in which it takes part.
    """

    scalings: tuple[Scaling, Scaling]
    options: dict[str, Any]
    operations: tuple[str, ...]


_TENSOR: tuple[Scaling, Scaling] = ("tensor", "tensor")
_ROW: tuple[Scaling, Scaling] = ("row", "row")
_BLOCK: tuple[Scaling, Scaling] = ("block_1x128", "block_128x128")
_FAST = {"fast_accumulation": True}

VARIANTS = {
    "te_jax_tensor": _Variant(_TENSOR, _FAST, ("forward",)),
    "te_jax_tensor_split": _Variant(_TENSOR, {}, OPERATIONS),
    "te_jax_tensor_own": _Variant(_TENSOR, {**_FAST, "algorithm": "te_jax"}, ("forward",)),
    "te_jax_row": _Variant(_ROW, _FAST, ("forward",)),
    "te_jax_row_split": _Variant(_ROW, {}, OPERATIONS),
    "te_jax_block": _Variant(_BLOCK, {}, OPERATIONS),
}
PEERS = ("jnp", "torch_tensor", "torch_row", "torch_block")
IMPLEMENTATIONS = (*VARIANTS, *PEERS)


@dataclass(frozen=True)
class _Inputs:
    """Operands [M, K] and [N, K]: in bfloat16, and by scalings quantized."""

    plain: tuple[jax.Array, jax.Array]
    quantized: dict[tuple[Scaling, Scaling], tuple[QuantizedArray, QuantizedArray]]

    def of(self, name: str) -> tuple[Any, Any]:
        """What an implementation multiplies."""
        if name == "jnp":
            return self.plain
        if name in VARIANTS:
            return self.quantized[VARIANTS[name].scalings]
        return self.quantized[{"torch_tensor": _TENSOR, "torch_row": _ROW, "torch_block": _BLOCK}[name]]


def run_case(case: shapes.GemmShape, implementations: Sequence[str], timing: Timing) -> CaseResult:
    """Measure both operations of one case with the named implementations; see `harness.Family.run_case`."""
    inputs = _inputs(case, implementations)
    rows = np.unique(np.linspace(0, case.m - 1, _CHECKED_ROWS).astype(np.int32))
    exact: dict[int, np.ndarray] = {}  # by the operands' identity: implementations share them
    result = CaseResult()
    for operation in OPERATIONS if case.products is None else OPERATIONS[:1]:
        _run_operation(case, operation, implementations, timing, inputs, rows, exact, result)
    return result


def _run_operation(
    case: shapes.GemmShape,
    operation: str,
    implementations: Sequence[str],
    timing: Timing,
    inputs: _Inputs,
    rows: np.ndarray,
    exact: dict[int, np.ndarray],
    result: CaseResult,
) -> None:
    candidates: dict[str, Candidate] = {}
    flops = 2 * (case.products or 1) * case.m * case.n * case.k

    def build(name: str) -> Candidate:
        candidates[name] = _build(name, operation, case, inputs.of(name), rows)
        return candidates[name]

    def errors(name: str, output: np.ndarray, _: Any) -> Checked:
        operands = inputs.of(name)
        if id(operands) not in exact:
            exact[id(operands)] = _exact(operands, rows)
        found = {"error": relative_error(output, exact[id(operands)])}
        return found, out_of_bounds(found, {"error": ERROR_BOUND})

    measured = run_operation(
        {"case": case.name, "model": case.model, "operation": operation},
        [name for name in implementations if _applies(name, operation)],
        timing,
        result,
        build=build,
        errors=errors,
        row=lambda candidate, seconds: compute_row(seconds, candidate.name, flops=flops, peers=PEERS, over="jnp"),
    )
    if operation == "forward" and jax.default_backend() == "gpu":
        rested, _ = measure([candidates[name] for name in measured], timing.rested, pipelined=True)
        for name in rested:
            measured[name]["tflops_rested"] = compute_row(rested, name, flops=flops, peers=())["tflops"]


def _applies(name: str, operation: str) -> bool:
    if name.startswith("torch"):
        return operation == "forward" and jax.default_backend() == "gpu"
    return name not in VARIANTS or operation in VARIANTS[name].operations


# Inputs and the exact result


def _inputs(case: shapes.GemmShape, implementations: Sequence[str]) -> _Inputs:
    keys = jax.random.split(jax.random.key(0))
    plain = tuple(
        jax.random.normal(key, (*case.batch, outer, case.k), jnp.bfloat16)
        for key, outer in zip(keys, (case.m, case.n), strict=True)
    )
    wanted = {VARIANTS[name].scalings for name in implementations if name in VARIANTS}
    if jax.default_backend() == "gpu":
        wanted |= {_TENSOR, _ROW, _BLOCK} if any(name.startswith("torch") for name in implementations) else set()

    def quantized(x: jax.Array, scaling: Scaling) -> QuantizedArray:
        e4m3 = np.dtype(jnp.float8_e4m3fn)
        quantize = functools.partial(
            ops.quantize,
            quantization=Quantization(e4m3, scaling, scaling),
            copies="data",
            implementation="reference",
        )
        return _mapped(quantize, x)(x)

    return jax.block_until_ready(
        _Inputs(
            (plain[0], plain[1]),
            {pair: (quantized(plain[0], pair[0]), quantized(plain[1], pair[1])) for pair in sorted(wanted)},
        )
    )


def _exact(operands: tuple[Any, Any], rows: np.ndarray) -> np.ndarray:
    """The rows of the first product and, of several, of the last one, in float64: [products, rows, N]."""
    lhs, rhs = (_ends(np.asarray(_values(x))) for x in operands)
    return product(lhs[:, rows], rhs)


def product(lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    """lhs · rhsᵀ in float64, a part of rhs at a time."""
    lhs = lhs.astype(np.float64)
    step = max(1, 2**24 // rhs.shape[-1])

    def part(start: int) -> np.ndarray:
        return lhs @ rhs[..., start : start + step, :].astype(np.float64).mT

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return np.concatenate(list(pool.map(part, range(0, rhs.shape[-2], step))), axis=-1)


def _ends(matrices: np.ndarray) -> np.ndarray:
    """One matrix, or the first and the last one of several."""
    return matrices[None] if matrices.ndim == 2 else matrices[[0, -1]]


def _mapped(function: Callable[..., Any], x: jax.Array | QuantizedArray) -> Callable[..., Any]:
    """The function of matrices, of several where x has three dimensions."""
    return jax.vmap(function) if x.ndim == 3 else function


def _values(x: Any) -> jax.Array:
    """What an operand stands for; float32 holds FP8 times a scale to 24 bits."""
    if not isinstance(x, QuantizedArray):
        return x
    wide = QuantizedArray(
        x.data, x.scale_inv, None, None, x.row_ndim, x.col_ndim, x.scaling, x.transposed_scaling, np.dtype(np.float32)
    )
    return jax.jit(QuantizedArray.dequantize)(wide)


# Implementations


def _build(name: str, operation: str, case: shapes.GemmShape, operands: tuple[Any, Any], rows: np.ndarray) -> Candidate:
    if name.startswith("torch"):
        return _build_torch(name, operands, rows)
    multiply = _jnp_product if name == "jnp" else functools.partial(_te_jax_product, VARIANTS[name])
    if operation == "forward":
        call = jax.jit(lambda lhs, rhs: multiply(lhs, rhs)).lower(*operands).compile()
    else:
        call = _accumulating(multiply, case, operands)
    return Candidate(
        name=name,
        call=call,
        arguments=lambda calls: [operands] * calls,
        read=lambda output: _ends(np.asarray(output[..., rows, :])),
    )


def _jnp_product(lhs: jax.Array, rhs: jax.Array, total: jax.Array | None = None) -> jax.Array:
    dtype = jnp.bfloat16 if total is None else jnp.float32
    product = jnp.einsum("...mk,...nk->...mn", lhs, rhs, preferred_element_type=dtype)
    return product if total is None else total + product


def _te_jax_product(
    variant: _Variant, lhs: QuantizedArray, rhs: QuantizedArray, total: jax.Array | None = None
) -> jax.Array:
    # Never implementation=None: where the kernels are not loaded that would publish the reference under their name.
    gemm = functools.partial(ops.gemm, rhs_contracting="cols", implementation="native", **variant.options)
    return gemm(lhs, rhs, accumulator=total) if total is not None else _mapped(gemm, lhs)(lhs, rhs)


def _accumulating(
    multiply: Callable[..., jax.Array], case: shapes.GemmShape, operands: tuple[Any, Any]
) -> Callable[[Any, Any], jax.Array]:
    totals = [jnp.zeros((case.m, case.n), jnp.float32)]
    compiled = (
        jax.jit(lambda lhs, rhs, total: multiply(lhs, rhs, total), donate_argnums=2)
        .lower(*operands, totals[0])
        .compile()
    )

    def call(lhs: Any, rhs: Any) -> jax.Array:
        totals[0] = compiled(lhs, rhs, totals[0])
        return totals[0]

    return call


def _build_torch(name: str, operands: tuple[QuantizedArray, QuantizedArray], rows: np.ndarray) -> Candidate:
    torch = torch_on_gpu()
    lhs, rhs = operands
    if lhs.ndim == 3:
        raise RuntimeError("torch has no FP8 product of several matrices")
    assert rhs.scale_inv is not None
    a, b = _fp8_as_torch(lhs.data), _fp8_as_torch(rhs.data).t()
    a_scale, b_scale = as_torch(lhs.scale_inv), as_torch(rhs.scale_inv)
    if name == "torch_block":
        functional: Any = torch.nn.functional
        if not (hasattr(functional, "scaled_mm") and hasattr(functional, "ScalingType")):
            raise RuntimeError(f"torch {torch.__version__} has no torch.nn.functional.scaled_mm")
        if rhs.scale_inv.shape[1] % 4:
            raise RuntimeError("cuBLASLt wants scales of square blocks padded to a multiple of 4 along K")
        # [K / 128, M] and [N / 128, K / 128] in memory, which torch names in the order of the operands.
        scaled = functools.partial(
            functional.scaled_mm,
            scale_a=a_scale.t(),
            scale_recipe_a=functional.ScalingType.BlockWise1x128,
            scale_b=b_scale.t(),
            scale_recipe_b=functional.ScalingType.BlockWise128x128,
            output_dtype=torch.bfloat16,
        )
    else:
        if name == "torch_row":
            a_scale, b_scale = a_scale[:, None], b_scale[None, :]
        scaled = functools.partial(
            torch._scaled_mm, scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return Candidate(
        name=name,
        call=scaled,
        arguments=lambda calls: [(a, b)] * calls,
        wait=lambda output: torch.cuda.synchronize(),
        read=lambda output: _ends(rows_of(output, rows)),
    )


def _fp8_as_torch(array: jax.Array | None) -> Any:
    """`as_torch` of FP8, as bytes: not every DLPack knows the type."""
    assert array is not None
    return as_torch(jax.lax.bitcast_convert_type(array, jnp.uint8)).view(torch_on_gpu().float8_e4m3fn)


FAMILY = Family(
    description="matrix products in FP8, quantized beforehand: forward, and accumulating weight gradients",
    cases={"gpu": shapes.GEMM_GPU, "cpu": shapes.GEMM_CPU},
    implementations=IMPLEMENTATIONS,
    peers=PEERS,
    run_case=run_case,
    headline=Headline(
        operation="forward",
        figure="time_over_jnp",
        label="FP8 product, time as a multiple of jnp's in bfloat16",
        implementations=("te_jax_tensor", "te_jax_row", "te_jax_block", "torch_tensor", "torch_row", "torch_block"),
    ),
)
