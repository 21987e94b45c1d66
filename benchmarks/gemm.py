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
from benchmarks.harness import Candidate, CaseResult, Family, Headline, Timing, compute_row, measure, reason_of
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


@dataclass(frozen=True)
class _Checked:
    """A candidate, and how to read the rows at given indices of its first result."""

    candidate: Candidate
    read: Callable[[Any, np.ndarray], np.ndarray]


def run_case(case: shapes.GemmShape, implementations: Sequence[str], timing: Timing) -> CaseResult:
    """Measure both operations of one case with the named implementations; see `harness.Family.run_case`."""
    inputs = _inputs(case, implementations)
    rows = np.unique(np.linspace(0, case.m - 1, _CHECKED_ROWS).astype(np.int32))
    exact = {}  # by the operands' identity: implementations share them
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
    def entry(name: str, reason: str) -> dict[str, str]:
        return {"case": case.name, "operation": operation, "implementation": name, "reason": reason}

    errors: dict[str, float] = {}
    candidates: list[Candidate] = []
    for name in implementations:
        if not _applies(name, operation):
            continue
        try:
            operands = inputs.of(name)
            checked = _build(name, operation, case, operands)
            output = checked.candidate.call(*checked.candidate.arguments(1)[0])
            checked.candidate.wait(output)
            if id(operands) not in exact:
                exact[id(operands)] = _exact(operands, rows)
            errors[name] = _error(checked.read(output, rows), exact[id(operands)])
            del output
        except Exception as error:  # one peer that is missing or out of memory must not cost the others theirs
            result.skipped.append(entry(name, reason_of(error)))
            continue
        if errors[name] <= ERROR_BOUND:  # NaN is not
            candidates.append(checked.candidate)
        else:
            reason = f"the product is wrong: relative L2 error {errors[name]:.3g}, bound {ERROR_BOUND:.3g}"
            result.wrong.append(entry(name, reason))

    seconds, failed = measure(candidates, timing, pipelined=jax.default_backend() != "cpu")
    result.skipped += [entry(name, reason) for name, reason in failed.items()]
    rested: dict[str, list[float]] = {}
    if operation == "forward" and jax.default_backend() == "gpu":
        rested, _ = measure([each for each in candidates if each.name in seconds], timing.rested, pipelined=True)
    flops = 2 * (case.products or 1) * case.m * case.n * case.k
    for name in seconds:
        row = compute_row(seconds, name, flops=flops, peers=PEERS)
        if name in rested:
            row["tflops_rested"] = compute_row(rested, name, flops=flops, peers=())["tflops"]
        relative = {"time_over_jnp": 1 / row["speedup_over"]["jnp"]} if "jnp" in row["speedup_over"] else {}
        result.rows.append(
            {
                "case": case.name,
                "model": case.model,
                "operation": operation,
                "implementation": name,
                **row,
                **relative,
                "error": errors[name],
            }
        )


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
    lhs = lhs[:, rows].astype(np.float64)
    step = max(1, 2**24 // rhs.shape[2])

    def product(start: int) -> np.ndarray:
        return lhs @ rhs[:, start : start + step].astype(np.float64).mT

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return np.concatenate(list(pool.map(product, range(0, rhs.shape[1], step))), axis=2)


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


def _error(actual: np.ndarray, expected: np.ndarray) -> float:
    difference = np.linalg.norm(actual.astype(np.float64) - expected)
    return float(f"{difference / np.linalg.norm(expected):.3g}")


# Implementations


def _build(name: str, operation: str, case: shapes.GemmShape, operands: tuple[Any, Any]) -> _Checked:
    if name.startswith("torch"):
        return _build_torch(name, operands)
    product = _jnp_product if name == "jnp" else functools.partial(_te_jax_product, VARIANTS[name])
    if operation == "forward":
        return _build_forward(name, product, operands)
    return _build_accumulate(name, product, case, operands)


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


def _build_forward(name: str, product: Callable[..., jax.Array], operands: tuple[Any, Any]) -> _Checked:
    compiled = jax.jit(lambda lhs, rhs: product(lhs, rhs)).lower(*operands).compile()
    candidate = Candidate(name=name, call=compiled, arguments=lambda calls: [operands] * calls)
    return _Checked(candidate, lambda output, rows: _ends(np.asarray(output[..., rows, :])))


def _build_accumulate(
    name: str, product: Callable[..., jax.Array], case: shapes.GemmShape, operands: tuple[Any, Any]
) -> _Checked:
    totals = [jnp.zeros((case.m, case.n), jnp.float32)]
    compiled = (
        jax.jit(lambda lhs, rhs, total: product(lhs, rhs, total), donate_argnums=2)
        .lower(*operands, totals[0])
        .compile()
    )

    def call(lhs: Any, rhs: Any) -> jax.Array:
        totals[0] = compiled(lhs, rhs, totals[0])
        return totals[0]

    candidate = Candidate(name=name, call=call, arguments=lambda calls: [operands] * calls)
    return _Checked(candidate, lambda output, rows: _ends(np.asarray(output[rows])))


def _build_torch(name: str, operands: tuple[QuantizedArray, QuantizedArray]) -> _Checked:
    import torch  # pyright: ignore[reportMissingImports]

    if not torch.cuda.is_available():
        raise RuntimeError("this torch has no CUDA support")
    lhs, rhs = operands
    if lhs.ndim == 3:
        raise RuntimeError("torch has no FP8 product of several matrices")
    assert rhs.scale_inv is not None
    a, b = _fp8_as_torch(lhs.data), _fp8_as_torch(rhs.data).t()
    a_scale, b_scale = _as_torch(lhs.scale_inv), _as_torch(rhs.scale_inv)
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

    def read(output: Any, rows: np.ndarray) -> np.ndarray:
        return _ends(output[torch.as_tensor(rows.astype(np.int64), device=output.device)].float().cpu().numpy())

    candidate = Candidate(
        name=name,
        call=scaled,
        arguments=lambda calls: [(a, b)] * calls,
        wait=lambda output: torch.cuda.synchronize(),
    )
    return _Checked(candidate, read)


def _as_torch(array: jax.Array | None) -> Any:
    """The same device memory as a torch tensor."""
    import torch  # pyright: ignore[reportMissingImports]

    return torch.utils.dlpack.from_dlpack(jax.block_until_ready(array))


def _fp8_as_torch(array: jax.Array | None) -> Any:
    """The same for FP8, as bytes: not every DLPack knows the type."""
    import torch  # pyright: ignore[reportMissingImports]

    assert array is not None
    return _as_torch(jax.lax.bitcast_convert_type(array, jnp.uint8)).view(torch.float8_e4m3fn)


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
