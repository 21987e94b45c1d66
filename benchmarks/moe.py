"""Mixtures of experts on one device: grouped GEMMs, the whole layer, and the permutation of its rows.

A case is named experts × rows × hidden × width of an expert, and how the rows are spread over experts; rows are tokens
times the experts of each. Sizes of groups are values on the device. TFLOP/s count the rows that there are, not those
that pad groups to 128. Operations:

- forward, dgrad, wgrad: the grouped GEMMs of one kernel [experts, hidden, mlp], operands at hand, results in bfloat16.
- layer: router, experts and combination, and for a given cotangent the gradients of x and of all parameters. All are
  bfloat16 but the router's kernel.
- permute: rows of x sorted by expert, each expert's padded to 128.
- permute_quantize: both FP8 copies of these rows in blocks, as products read them, by the kernel that gathers them.
- share: what one of four devices computes of a layer whose tokens and experts they divide, with all tokens at hand: a
  quarter of the experts, with gradients of tokens, weights and kernels. The buffer has room for any load, and four
  times the rows of an even load, which this is up to chance. Nothing travels.

Implementations:

- te_jax_block: FP8 with block scaling. Operands of products come quantized; a layer quantizes in the clock.
- te_jax_block_once, layers only: kernels come quantized, as the optimizer leaves them for all microbatches of a step,
  and their gradients are written in bfloat16 into buffers that are donated.
- te_jax_block_rows, share only: rows are gathered in bfloat16 before they are quantized, and added up after.
- te_jax_block_even, share only: te_jax_block in a buffer of no more rows than there are.
- te_jax: the same in bfloat16.
- ragged_dot: `jax.lax.ragged_dot` and its gradients. As a layer: rows gathered by `argsort`, three `ragged_dot`s, and
  a weighted sum of the rows that are sorted back, as in layers of Flax and MaxText.
- torch: `torch._grouped_mm`, products only.
- jnp: for permute, a gather with zeros where there is no token.
- copy: for permute, a device copy that reads and writes as many bytes as the operation must: x once, and its results.

`kept_over_least` of a layer is what the backward pass keeps for one more token, over that of x and of both values
before the activation, 2 hidden + 4 top_k mlp bytes.

No time is reported for a wrong result: products are compared with float64, 32 rows of a result or of the gradients of
the first and the last expert; layers with the first one in bfloat16 that runs; permuted rows with the bits of x.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import shapes
from benchmarks.elementwise import buffers_for, build_jax, fresh, run_beside_copy
from benchmarks.harness import (
    Candidate,
    CaseResult,
    Checked,
    Family,
    Headline,
    Timing,
    compute_row,
    out_of_bounds,
    relative_error,
    rounded,
    run_operation,
    temporary_bytes,
)
from benchmarks.torch_peer import as_torch, torch_on_gpu
from benchmarks.transformer import errors_of
from te_jax import ops
from te_jax.layers import Router, moe
from te_jax.ops._quantize_rows import quantize_rows
from te_jax.ops.experts_mlp import experts_mlp
from te_jax.ops.linear.kernels import quantize_kernel
from te_jax.quantized import QuantizedArray
from te_jax.recipe import BlockScaling

_SHARES = ("te_jax_block_rows", "te_jax_block", "te_jax_block_even")
IMPLEMENTATIONS = ("te_jax_block", "te_jax_block_once", *_SHARES[::2], "te_jax", "ragged_dot", "torch", "jnp")
PEERS = ("ragged_dot", "torch", "jnp")
ERROR_BOUNDS = {"te_jax_block": 0.06, "te_jax": 0.01, "ragged_dot": 0.01, "torch": 0.01}
"""Largest relative L2 errors of products. Those of two operands in FP8 are 0.037."""
LAYER_BOUNDS = {"y_error": 0.02, "gradient_error": 0.03}
"""Largest relative L2 differences of a layer's result, and of any gradient, to the first layer in bfloat16."""
FP8_LAYER_BOUNDS = {"y_error": 0.1, "gradient_error": 0.3}
"""The same in FP8."""

_ALIGN = 128
_KERNELS = ("gate", "up", "down")
_DEVICES = 4
_CHECKED = 32
_COMPARED = ("te_jax", *PEERS)
_RECIPE = BlockScaling()

Operands = dict[str, Any]


def run_case(case: shapes.ExpertsShape, implementations: Sequence[str], timing: Timing) -> CaseResult:
    """Measure the operations of one case with the named implementations; see `harness.Family.run_case`."""
    result = CaseResult()
    products = [operation for operation in case.operations if operation in _PRODUCTS]
    if products:
        _run_products(case, products, implementations, timing, result)
    if "layer" in case.operations:
        _run_layer(case, implementations, timing, result)
    if "share" in case.operations:
        _run_share(case, implementations, timing, result)
    for operation in case.operations:
        if operation.startswith("permute"):
            _run_permutation(case, operation, implementations, timing, result)
    return result


def _labels(case: shapes.ExpertsShape, operation: str) -> dict[str, str]:
    return {"case": case.name, "model": case.model, "operation": operation}


def _row(candidate: Candidate, seconds: dict[str, list[float]], *, flops: int) -> dict[str, Any]:
    return compute_row(seconds, candidate.name, flops=flops, peers=_COMPARED, over="te_jax")


def _check_room(case: shapes.ExpertsShape, operation: str) -> None:
    """Raises if a GPU has no memory for `lax.ragged_dot`, which repeats the rows for every expert: compiling it to find
    out takes minutes."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0) if jax.default_backend() == "gpu" else 0
    repeated = 2 * case.experts * case.rows * (case.mlp if operation == "dgrad" else case.hidden)
    if limit and 2 * repeated > 0.8 * limit:
        raise MemoryError(
            f"lax.ragged_dot holds two arrays of {repeated / 2**30:.0f} GiB, and the GPU has {limit / 2**30:.0f} GiB"
        )


# Loads


def _shares(case: shapes.ExpertsShape) -> np.ndarray:
    """The share of all rows that each expert has, in float64."""
    weights = {
        "balanced": np.ones(case.experts),
        "zipf": 1 / np.arange(1, case.experts + 1),
        "one_hot": np.eye(case.experts)[0],
    }[case.load]
    return weights / weights.sum()


def _sizes(case: shapes.ExpertsShape) -> np.ndarray:
    """Rows of each expert."""
    ends = np.rint(np.cumsum(_shares(case)) * case.rows).astype(np.int32)
    return np.diff(ends, prepend=0).astype(np.int32)


# Products


def _run_products(
    case: shapes.ExpertsShape,
    operations: Sequence[str],
    implementations: Sequence[str],
    timing: Timing,
    result: CaseResult,
) -> None:
    operands = _drawn(case)
    given = {name: _GIVEN[name](case, operands) for name in implementations if name in _GIVEN}
    for operation in operations:
        run_operation(
            _labels(case, operation),
            [name for name in given if name != "torch" or jax.default_backend() == "gpu"],
            timing,
            result,
            build=functools.partial(_build_product, case=case, operation=operation, given=given),
            errors=functools.partial(_checked_product, case, operation, _exact(case, operation, operands)),
            row=functools.partial(_row, flops=2 * case.rows * case.hidden * case.mlp),
        )


def _drawn(case: shapes.ExpertsShape) -> Operands:
    """x, kernel and dy of normal values in bfloat16, and the sizes of groups."""
    sizes = {
        "x": (case.rows, case.hidden),
        "kernel": (case.experts, case.hidden, case.mlp),
        "dy": (case.rows, case.mlp),
    }

    @jax.jit
    def draw(key: jax.Array) -> Operands:
        keys = jax.random.split(key, len(sizes))
        return {
            name: jax.random.normal(each, shape, jnp.bfloat16)
            for (name, shape), each in zip(sizes.items(), keys, strict=True)
        }

    return jax.block_until_ready(draw(jax.random.key(0)) | {"sizes": jnp.asarray(_sizes(case))})


def _quantized(case: shapes.ExpertsShape, operands: Operands) -> Operands:
    """Operands in FP8, with groups padded to 128 rows of zeros."""
    sizes = _sizes(case)
    padded = _padded(sizes)
    rows = _rows_of(sizes, padded)

    def pad(x: jax.Array) -> jax.Array:
        return jnp.zeros((int(padded.sum()), x.shape[1]), x.dtype).at[rows].set(x)

    @jax.jit
    def quantize(x: jax.Array, kernel: jax.Array, dy: jax.Array) -> Operands:
        return {
            "x": ops.quantize(pad(x), _RECIPE.quantization("activation"), implementation="reference"),
            "kernel": quantize_kernel(kernel, _RECIPE, row_ndim=1, stacked_ndim=1, implementation="reference"),
            "dy": ops.quantize(pad(dy), _RECIPE.quantization("gradient"), implementation="reference"),
        }

    found = quantize(operands["x"], operands["kernel"], operands["dy"])
    return jax.block_until_ready(found | {"sizes": jnp.asarray(padded)})


def _padded(sizes: np.ndarray) -> np.ndarray:
    return (-(-sizes // _ALIGN) * _ALIGN).astype(np.int32)


def _rows_of(sizes: np.ndarray, padded: np.ndarray) -> np.ndarray:
    """Where the rows are among those of padded groups."""
    gaps = np.cumsum(padded - sizes) - (padded - sizes)
    return np.arange(sizes.sum()) + np.repeat(gaps, sizes)


_GIVEN: dict[str, Callable[[shapes.ExpertsShape, Operands], Operands]] = {
    "te_jax_block": _quantized,
    "te_jax": lambda case, operands: operands,
    "ragged_dot": lambda case, operands: operands,
    "torch": lambda case, operands: operands,
}
"""What an implementation multiplies."""

_PRODUCTS = {"forward": ("x", "kernel"), "dgrad": ("dy", "kernel"), "wgrad": ("x", "dy")}
_CONTRACTING = {
    "forward": {},
    "dgrad": {"rhs_contracting": "cols"},
    "wgrad": {"lhs_contracting": "rows"},
}


def _build_product(name: str, case: shapes.ExpertsShape, operation: str, given: dict[str, Operands]) -> Candidate:
    if name == "torch":
        return _torch_product(operation, given[name])
    if name == "ragged_dot":
        _check_room(case, operation)
    return _jax_product(name, operation, given[name])


def _jax_product(name: str, operation: str, operands: Operands) -> Candidate:
    def te_jax(lhs: Any, rhs: Any, sizes: jax.Array) -> jax.Array:
        # Never implementation=None: where the kernels are not loaded that would publish the reference under their name.
        options: dict[str, Any] = {"out_dtype": jnp.bfloat16, "implementation": "native", **_CONTRACTING[operation]}
        return ops.grouped_gemm(lhs, rhs, sizes, **options)

    def ragged_dot(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        if operation == "forward":
            return lax.ragged_dot(lhs, rhs, sizes)
        if operation == "dgrad":
            x = jax.ShapeDtypeStruct((lhs.shape[0], rhs.shape[1]), lhs.dtype)
            return jax.linear_transpose(lambda x: lax.ragged_dot(x, rhs, sizes), x)(lhs)[0]
        kernel = jax.ShapeDtypeStruct((sizes.shape[0], lhs.shape[1], rhs.shape[1]), lhs.dtype)
        return jax.linear_transpose(lambda kernel: lax.ragged_dot(lhs, kernel, sizes), kernel)(rhs)[0]

    left, right = _PRODUCTS[operation]
    arguments = operands[left], operands[right], operands["sizes"]
    compiled = jax.jit(ragged_dot if name == "ragged_dot" else te_jax).lower(*arguments).compile()
    return Candidate(
        name=name,
        call=compiled,
        arguments=lambda calls: [arguments] * calls,
        most_calls=16,
        temporary_bytes=temporary_bytes(compiled),
        read=np.asarray,
    )


def _torch_product(operation: str, operands: Operands) -> Candidate:
    torch = torch_on_gpu()
    x, kernel, dy, sizes = (as_torch(operands[each]) for each in ("x", "kernel", "dy", "sizes"))
    left, right = {
        "forward": (x, kernel),
        "dgrad": (dy, kernel.transpose(-2, -1)),
        "wgrad": (x.t(), dy),
    }[operation]
    ends = torch.cumsum(sizes, dim=0, dtype=torch.int32)
    return Candidate(
        name="torch",
        call=functools.partial(torch._grouped_mm, offs=ends, out_dtype=torch.bfloat16),
        arguments=lambda calls: [(left, right)] * calls,
        wait=lambda output: torch.cuda.synchronize(),
        most_calls=16,
        read=lambda output: output.float().cpu().numpy(),
    )


def _checked(case: shapes.ExpertsShape) -> np.ndarray:
    """Rows of a result, or of the gradient of a kernel."""
    return np.unique(np.linspace(0, case.rows - 1, _CHECKED).astype(np.int64))


def _exact(case: shapes.ExpertsShape, operation: str, operands: Operands) -> np.ndarray:
    """In float64: the checked rows, or for the first and last expert the gradient of as many features of x."""
    values = {name: np.asarray(operands[name].astype(jnp.float32)) for name in _PRODUCTS[operation]}
    ends = np.cumsum(_sizes(case))
    if operation == "wgrad":
        features = _features(case)
        parts = [slice(0, ends[0]), slice(ends[-2], ends[-1])]
        found = [
            values["x"][part][:, features].T.astype(np.float64) @ values["dy"][part].astype(np.float64)
            for part in parts
        ]
        return np.stack(found)
    rows = _checked(case)
    lhs = values[_PRODUCTS[operation][0]][rows].astype(np.float64)
    experts = np.searchsorted(ends, rows, side="right")
    found = np.zeros((len(rows), case.mlp if operation == "forward" else case.hidden))
    for expert in np.unique(experts):
        kernel = values["kernel"][expert].astype(np.float64)
        own = experts == expert
        found[own] = lhs[own] @ (kernel if operation == "forward" else kernel.T)
    return found


def _features(case: shapes.ExpertsShape) -> np.ndarray:
    return np.unique(np.linspace(0, case.hidden - 1, _CHECKED).astype(np.int64))


def _picked(case: shapes.ExpertsShape, operation: str, output: np.ndarray, *, padded: bool) -> np.ndarray:
    """The same of a result."""
    if operation == "wgrad":
        return output[[0, -1]][:, _features(case)]
    rows = _checked(case)
    if padded:
        sizes = _sizes(case)
        rows = _rows_of(sizes, _padded(sizes))[rows]
    return output[rows]


def _checked_product(
    case: shapes.ExpertsShape, operation: str, exact: np.ndarray, name: str, output: np.ndarray, _: Any
) -> Checked:
    errors = {"error": relative_error(_picked(case, operation, output, padded=name == "te_jax_block"), exact)}
    return errors, out_of_bounds(errors, {"error": ERROR_BOUNDS[name]})


# Layers


def _run_layer(case: shapes.ExpertsShape, implementations: Sequence[str], timing: Timing, result: CaseResult) -> None:
    operands = _drawn_layer(case)

    def errors(name: str, output: Any, expected: Any) -> Checked:
        errors = errors_of(output, expected)
        return errors, out_of_bounds(errors, FP8_LAYER_BOUNDS if "block" in name else LAYER_BOUNDS)

    def row(candidate: Candidate, seconds: dict[str, list[float]]) -> dict[str, Any]:
        row = _row(candidate, seconds, flops=3 * 3 * 2 * case.rows * case.hidden * case.mlp)
        least, size = 2 * case.hidden + 4 * case.top_k * case.mlp, candidate.temporary_bytes
        row["kept_over_least"] = rounded(kept_bytes(candidate.name, case) / least)
        return row if size is None else row | {"temporaries_gb": rounded(size / 1e9)}

    run_operation(
        _labels(case, "layer"),
        sorted((name for name in implementations if name in _LAYERS), key=lambda name: "block" in name),
        timing,
        result,
        build=functools.partial(_build_layer, case=case, operands=operands),
        errors=errors,
        row=row,
        references=("te_jax", "ragged_dot"),
    )


def _drawn_layer(case: shapes.ExpertsShape) -> Operands:
    """x, dy [tokens, hidden] and the parameters; `bias` spreads the tokens as the case says."""
    bias = jnp.asarray(np.log(_shares(case)), jnp.float32)

    @jax.jit
    def draw(key: jax.Array) -> Operands:
        keys = jax.random.split(key, 6)
        wide = case.experts, case.hidden, case.mlp
        sizes = {"x": (case.tokens, case.hidden), "dy": (case.tokens, case.hidden)}
        sizes |= {"gate": wide, "up": wide, "down": (case.experts, case.mlp, case.hidden)}
        drawn = {
            name: jax.random.normal(each, shape, jnp.bfloat16) * jnp.bfloat16(shape[1] ** -0.5 if shape[2:] else 1.0)
            for (name, shape), each in zip(sizes.items(), keys[1:], strict=True)
        }
        router = jax.random.normal(keys[0], (case.hidden, case.experts), jnp.float32) * case.hidden**-0.5
        return drawn | {"router": router, "bias": bias}

    return jax.block_until_ready(draw(jax.random.key(0)))


def _te_jax_layer(case: shapes.ExpertsShape, recipe: BlockScaling | None) -> Callable[..., jax.Array]:
    def layer(
        x: jax.Array, parameters: Operands, bias: jax.Array, buffers: tuple[Any, Any, Any] = (None, None, None)
    ) -> jax.Array:
        kernels = tuple(parameters[name] for name in _KERNELS)
        options = {"recipe": recipe, "wgrad_accumulator": buffers, "accumulate": False, "implementation": "native"}
        return moe(x, parameters["router"], kernels, Router(top_k=case.top_k), router_bias=bias, **options).y

    return layer


def _ragged_dot_layer(case: shapes.ExpertsShape) -> Callable[..., jax.Array]:
    return functools.partial(plain_experts, top_k=case.top_k)


def plain_experts(x: jax.Array, parameters: Operands, bias: jax.Array | float = 0.0, *, top_k: int) -> jax.Array:
    """A layer of experts in plain JAX: x [tokens, in], the router's logits shifted by bias [experts]."""
    gate, up, down = (parameters[name].astype(x.dtype) for name in ("gate", "up", "down"))
    logits = jnp.matmul(x.astype(jnp.float32), parameters["router"], precision=lax.Precision.HIGHEST)
    chosen, experts = lax.top_k(logits + jnp.broadcast_to(bias, logits.shape), top_k)
    weights = jax.nn.softmax(chosen)
    order = jnp.argsort(experts.reshape(-1))
    sizes = jnp.bincount(experts.reshape(-1), length=gate.shape[0]).astype(jnp.int32)
    rows = jnp.take(x, order // top_k, axis=0)
    h = jax.nn.silu(lax.ragged_dot(rows, gate, sizes)) * lax.ragged_dot(rows, up, sizes)
    of_tokens = jnp.take(lax.ragged_dot(h, down, sizes), jnp.argsort(order), axis=0).reshape(*experts.shape, -1)
    return jnp.einsum("tkd,tk->td", of_tokens, weights.astype(x.dtype))


_LAYERS: dict[str, Callable[[shapes.ExpertsShape], Callable[..., jax.Array]]] = {
    "te_jax_block": functools.partial(_te_jax_layer, recipe=_RECIPE),
    "te_jax_block_once": functools.partial(_te_jax_layer, recipe=_RECIPE),
    "te_jax": functools.partial(_te_jax_layer, recipe=None),
    "ragged_dot": _ragged_dot_layer,
}


def _build_layer(name: str, case: shapes.ExpertsShape, operands: Operands) -> Candidate:
    if name == "ragged_dot":
        _check_room(case, "layer")
    layer = _LAYERS[name](case)
    parameters = {name: operands[name] for name in ("router", *_KERNELS)}
    quantized: Operands = {}
    buffers: Operands = {}
    if name.endswith("_once"):
        quantize = functools.partial(
            quantize_kernel, recipe=_RECIPE, row_ndim=1, stacked_ndim=1, implementation="native"
        )
        buffers = {name: jnp.zeros_like(parameters[name]) for name in _KERNELS}
        quantized = {name: quantize(parameters.pop(name)) for name in _KERNELS}

    def run(x: jax.Array, dy: jax.Array, bias: jax.Array, parameters: Operands, quantized: Operands, buffers: Operands):
        def given(x: jax.Array, parameters: Operands, buffers: Operands) -> jax.Array:
            options = {"buffers": tuple(buffers[name] for name in _KERNELS)} if buffers else {}
            return layer(x, parameters | quantized, bias, **options)

        y, vjp = jax.vjp(given, x, parameters, buffers)
        dx, gradients, written = vjp(dy)
        return y, (dx, gradients | written)

    arguments = operands["x"], operands["dy"], operands["bias"], parameters, quantized
    compiled = jax.jit(run, donate_argnums=5).lower(*arguments, buffers).compile()
    held = [buffers]

    def call(*arguments: Any) -> Any:
        y, (dx, gradients) = compiled(*arguments, held[0])
        held[0] = {name: gradients[name] for name in buffers}
        return y, (dx, gradients)

    return Candidate(
        name=name,
        call=call,
        arguments=lambda calls: [arguments] * calls,
        most_calls=4,
        temporary_bytes=temporary_bytes(compiled),
    )


def kept_bytes(name: str, case: shapes.ExpertsShape) -> float:
    """Bytes that the backward pass of a layer keeps for one more token."""
    operands = jax.eval_shape(functools.partial(_drawn_layer, case))
    parameters = {name: operands[name] for name in ("router", *_KERNELS)}
    layer = _LAYERS[name](case)

    def kept(tokens: int) -> int:
        x = jax.ShapeDtypeStruct((tokens, case.hidden), jnp.bfloat16)
        residuals = jax.eval_shape(lambda *given: jax.vjp(layer, *given)[1], x, parameters, operands["bias"])
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(residuals))

    return (kept(2 * case.tokens) - kept(case.tokens)) / case.tokens


# A device's share of a mesh


def _run_share(case: shapes.ExpertsShape, implementations: Sequence[str], timing: Timing, result: CaseResult) -> None:
    operands = _drawn_share(case)

    def errors(name: str, output: Any, expected: Any) -> Checked:
        errors = errors_of(output, expected)
        return errors, out_of_bounds(errors, LAYER_BOUNDS)

    def row(candidate: Candidate, seconds: dict[str, list[float]]) -> dict[str, Any]:
        flops = 3 * 3 * 2 * (case.rows // _DEVICES) * case.hidden * case.mlp
        row = compute_row(seconds, candidate.name, flops=flops, peers=("te_jax_block_rows",), over="te_jax_block_rows")
        size = candidate.temporary_bytes
        return row if size is None else row | {"temporaries_gb": rounded(size / 1e9)}

    run_operation(
        _labels(case, "share"),
        [name for name in _SHARES if name in implementations],
        timing,
        result,
        build=functools.partial(_build_share, operands=operands),
        errors=errors,
        row=row,
        references=_SHARES[:2],
    )


def _drawn_share(case: shapes.ExpertsShape) -> Operands:
    """Tokens of all devices with their weights, dy, the kernels of one device, and where its rows are."""
    experts = case.experts // _DEVICES

    @jax.jit
    def draw(key: jax.Array) -> Operands:
        keys = jax.random.split(key, 6)
        routing = ops.router(jax.random.normal(keys[0], (case.tokens, case.experts)), top_k=case.top_k)
        sizes = ((case.hidden, case.mlp), (case.hidden, case.mlp), (case.mlp, case.hidden))
        x, dy = (jax.random.normal(each, (case.tokens, case.hidden), jnp.bfloat16) for each in keys[1:3])
        kernels = tuple(
            jax.random.normal(each, (experts, *size), jnp.bfloat16) * jnp.bfloat16(size[0] ** -0.5)
            for size, each in zip(sizes, keys[3:], strict=True)
        )
        # The choices of other devices' experts have no rows, and leave as many of the buffer unused.
        permutation = ops.group_by_expert(routing.experts, experts, align=_ALIGN)
        return {"x": x, "weights": routing.weights, "kernels": kernels, "dy": dy, "permutation": permutation}

    return jax.block_until_ready(draw(jax.random.key(0)))


def _build_share(name: str, operands: Operands) -> Candidate:
    permutation = operands["permutation"]
    if name.endswith("_even"):
        used = int(np.sum(permutation.group_sizes))
        permutation = permutation._replace(choices=permutation.choices[:used])

    def share(x: jax.Array, weights: jax.Array, kernels: Any, permutation: ops.Permutation) -> jax.Array:
        def run(x: jax.Array, weights: jax.Array, permutation: ops.Permutation | None) -> jax.Array:
            return experts_mlp(
                x, weights, sizes, permutation, kernels, activation=ops.Activation("silu"),
                recipe=_RECIPE, wgrad_accumulator=(None,) * 3, accumulate=False, implementation="native",
            )  # fmt: skip

        sizes = permutation.group_sizes
        if not name.endswith("_rows"):
            return run(x, weights, permutation)
        rows, of_rows = ops.permute(x, permutation), ops.permute_weights(weights, permutation)
        return ops.unpermute(run(rows, of_rows, None), permutation)

    @jax.jit
    def step(x: jax.Array, weights: jax.Array, kernels: Any, dy: jax.Array, permutation: ops.Permutation) -> Any:
        y, vjp = jax.vjp(lambda x, weights, kernels: share(x, weights, kernels, permutation), x, weights, kernels)
        return y, vjp(dy)

    arguments = operands["x"], operands["weights"], operands["kernels"], operands["dy"], permutation
    compiled = step.lower(*arguments).compile()
    return Candidate(
        name=name,
        call=compiled,
        arguments=lambda calls: [arguments] * calls,
        most_calls=4,
        temporary_bytes=temporary_bytes(compiled),
    )


# Permutation


def _run_permutation(
    case: shapes.ExpertsShape, operation: str, implementations: Sequence[str], timing: Timing, result: CaseResult
) -> None:
    operands = _drawn_layer(case)

    @jax.jit
    def sorted_tokens(x: jax.Array, router: jax.Array, bias: jax.Array) -> ops.Permutation:
        logits = x.astype(jnp.float32) @ router + bias[None]
        experts = ops.router(logits, top_k=case.top_k).experts
        return ops.group_by_expert(experts, case.experts, align=_ALIGN)

    permutation = sorted_tokens(operands["x"], operands["router"], operands["bias"])
    x = operands["x"]
    tokens = permutation.choices // case.top_k  # of padding -1, which a gather that fills reads as no token
    rows = tokens.shape[0]
    tensors = [x, *(fresh(x) for _ in range(buffers_for(x.nbytes) - 1))]
    quantizes = operation == "permute_quantize"
    written = rows * case.hidden * 2  # in bfloat16, or twice in FP8
    expected = np.where(np.asarray(tokens)[:, None] >= 0, np.asarray(x.astype(jnp.float32))[np.asarray(tokens)], 0)

    def te_jax(x: jax.Array, permutation: ops.Permutation) -> Any:
        if not quantizes:
            return ops.permute(x, permutation)
        tokens = permutation.choices // case.top_k
        return quantize_rows(x, tokens, _RECIPE.quantization("activation"), "both", True)

    def jnp_permute(x: jax.Array, permutation: ops.Permutation) -> jax.Array:
        tokens = permutation.choices // case.top_k
        return jnp.where((tokens >= 0)[:, None], jnp.take(x, tokens, axis=0, mode="clip"), 0)

    def problem(output: Any) -> str | None:
        if isinstance(output, QuantizedArray):
            again = ops.quantize(jnp.asarray(expected, jnp.bfloat16), _RECIPE.quantization("activation"))
            same = jax.tree.map(lambda one, other: bool(jnp.all(one == other)), output, again)
            return None if all(jax.tree.leaves(same)) else "codes or scales differ from those of the rows"
        return (
            None if np.array_equal(np.asarray(output.astype(jnp.float32)), expected) else "rows differ from those of x"
        )

    functions = {"te_jax_block": te_jax} if quantizes else {"te_jax": te_jax, "jnp": jnp_permute}
    builds = {
        name: functools.partial(
            build_jax, name, function, problem, shared=permutation, tensors=tensors, result_bytes=written
        )
        for name, function in functions.items()
        if name in implementations
    }
    run_beside_copy(case, operation, builds, timing, x.nbytes + written, PEERS, result)


FAMILY = Family(
    description="mixtures of experts on one device: grouped products, the whole layer, and its permutation",
    cases={"gpu": shapes.MOE_GPU, "cpu": shapes.MOE_CPU},
    implementations=IMPLEMENTATIONS,
    peers=PEERS,
    run_case=run_case,
    headline=Headline(
        operation="layer",
        figure="time_over_te_jax",
        label="Layer of experts with gradients, time as a multiple of te_jax's in bfloat16",
        implementations=("te_jax_block", "te_jax_block_once", "ragged_dot"),
    ),
)
