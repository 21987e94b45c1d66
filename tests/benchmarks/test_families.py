"""Every family at a small size: what it measures, that it checks each value of a result, and that kernels are native.

Below them is what families compute beside that. Those that start processes or several devices have files of their own.
"""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks import (
    activation,
    adam,
    attention,
    collective_matmul,
    dense,
    gemm,
    generate,
    harness,
    interconnect,
    layer,
    linear_cross_entropy,
    moe,
    muon,
    norm,
    offload,
    quantize,
    shapes,
    softmax_cross_entropy,
)
from benchmarks.harness import Timing
from te_jax import optim
from te_jax.native import extension

FEW = Timing(samples=2, sample_seconds=1e-6)
COPY = " copy "
_SHARE = ("te_jax_block_rows", "te_jax_block", "te_jax_block_even")
OTHER_TENSORS = rf" \[[012]\]|{COPY}"  # of a program of elementwise operations, which are checked alike


@dataclasses.dataclass(frozen=True)
class Family:
    """What a test runs of a family.

    Attributes:
      module, case, names: of the family, a small case of it, and implementations.
      rows: implementations of each operation that are measured.
      figures: that rows have, by "operation", "operation implementation" or "" for all.
      operations: those of the module's that take part, if not all.
      unchecked: a pattern of "operation implementation path" of leaves that are no results to check.
      no_reference: a pattern of "operation implementation" that names no kernels, or calls them itself.
    """

    module: Any
    case: Any
    names: tuple[str, ...]
    rows: dict[str, tuple[str, ...]]
    figures: dict[str, dict[str, Any]]
    operations: tuple[str, ...] | None = None
    unchecked: str = COPY
    no_reference: str = "te_jax_reference"


MATRIX = shapes.MatrixShape(rows=128, cols=256, dtype="bfloat16", model="test")
GEMM = shapes.GemmShape(m=96, n=128, k=256, model="test")
EXPERTS = shapes.ExpertsShape(
    ("forward", "wgrad"), experts=4, tokens=96, top_k=1, hidden=64, mlp=48, load="zipf", model="test"
)
PACKED = shapes.AttentionShape(
    batch=2, sequence=128, heads=4, kv_heads=2, head_dim=32, documents=(90, 38), model="test"
)
LAYER = shapes.LayerShape(
    batch=1, sequence=128, hidden=128, mlp=256, heads=8, kv_heads=4, head_dim=16, operations=("mlp",), model="test"
)
TENSOR_PARALLEL = shapes.TensorParallelShape(tokens=64, hidden=64, features=128, model="test")

_ADAM = ("te_jax", "optax", "optax_mu_bf16", "copy")
_DENSE = ("te_jax_current_split", "te_jax_delayed_once", "jnp")
_GEMM = ("te_jax_tensor_split", "te_jax_block", "jnp")
_LAYER = ("bf16", "te_jax_block_once")
_HEAD = ("te_jax", "te_jax_fp8_backward", "full_logits")
_LOSSES = ("te_jax", "te_jax_donated", "jnp", "copy")
_QUANTIZE = ("te_jax", "te_jax_reference", "jnp", "copy")
_PRODUCTS = ("te_jax_block", "te_jax", "ragged_dot")

OF_OPTAX = 2 * 5 * sum(4 * m * m * n + 2 * m**3 for m, n in [(128, 128)] * 2 + [(64, 128)] * 2 + [(128, 256)] * 3)
FAMILIES = {
    "activation": Family(
        activation,
        MATRIX,
        activation.IMPLEMENTATIONS,
        {"backward_y_current": activation.IMPLEMENTATIONS},
        {"backward_y_current": {"bytes": 17 * 128 * 256}},
        operations=("backward_y_current",),
        unchecked=f"{OTHER_TENSORS}| xla ",
        no_reference="backward",
    ),
    "adam": Family(
        adam,
        shapes.LeavesShape(leaves=2, rows=32, cols=128, model="test"),
        _ADAM,
        {"float8": _ADAM},
        {
            "float8 te_jax": {"bytes": 2 * 32 * (128 * 14 + 16)},
            "float8 optax": {"bytes": 2 * 32 * 128 * 28},
            "float8 optax_mu_bf16": {"bytes": 2 * 32 * 128 * 24},
            "float8 copy": {"bytes": 2 * 32 * (128 * 14 + 16), "share_of_floor": 1.0},
        },
        operations=("float8",),
        unchecked="",  # three steps with another parameter are
        no_reference="",
    ),
    "muon": Family(
        muon,
        shapes.STEP_CPU[0],
        ("te_jax", "optax"),
        {"step": ("te_jax", "optax")},
        {"step optax": {"flops": OF_OPTAX}},
        operations=None,
        unchecked="",  # three steps with other kernels are
        no_reference="",
    ),
    "generate": Family(
        generate,
        shapes.GENERATE_CPU[0],
        ("te_jax", "te_jax_block"),
        {"token": ("te_jax", "te_jax_block")},
        {},
        operations=None,
        unchecked="",  # another program's tokens are compared
        no_reference="",
    ),
    "collective_matmul, FP8": Family(
        collective_matmul,
        TENSOR_PARALLEL,
        ("te_jax", "gemm_alone"),
        dict.fromkeys(("fp8_all_gather_matmul", "fp8_matmul_reduce_scatter"), ("te_jax", "gemm_alone")),
        {"": {"devices": 4, "flops": 2 * 64 * 64 * 128 // 4}},
        operations=("fp8_all_gather_matmul", "fp8_matmul_reduce_scatter"),
    ),
    "dense": Family(
        dense,
        GEMM,
        _DENSE,
        {"forward": tuple(name for name in _DENSE if name != "te_jax_current_split"), "forward_backward": _DENSE},
        {"forward": {"flops": 2 * 96 * 128 * 256}, "forward_backward": {"flops": 6 * 96 * 128 * 256}},
        unchecked=r"\['state'\]",
    ),
    "gemm": Family(
        gemm,
        GEMM,
        _GEMM,
        {"forward": _GEMM, "accumulate": ("te_jax_tensor_split", "te_jax_block", "jnp")},
        {"": {"flops": 2 * 96 * 128 * 256}},
    ),
    "layer": Family(
        layer, LAYER, _LAYER, {"mlp": _LAYER}, {"": {"flops": 3 * 2 * 128 * 3 * 128 * 256}}, unchecked=r"\['state'\]"
    ),
    "attention": Family(
        attention,
        PACKED,
        ("jax", "te_jax", "te_jax_ring"),  # which is not of documents
        dict.fromkeys(attention.OPERATIONS, ("jax", "te_jax")),
        {"forward": {"flops": 4 * 2 * 4 * (90**2 + 38**2) // 2 * 32}},
        no_reference="",  # on a CPU it is the only one
    ),
    "linear_cross_entropy": Family(
        linear_cross_entropy,
        shapes.HeadShape(tokens=256, hidden=128, vocab=1024, operations=("master", "policy"), model="test"),
        (*_HEAD, "liger"),  # which needs a GPU
        {"master": _HEAD, "policy": _HEAD},
        {"": {"flops": 6 * 256 * 128 * 1024}},
    ),
    "moe": Family(
        moe,
        EXPERTS,
        _PRODUCTS,
        dict.fromkeys(("forward", "wgrad"), _PRODUCTS),
        {"": {"flops": 2 * 96 * 64 * 48}},  # not of the 4 × 128 rows in FP8
    ),
    "moe, layer": Family(
        moe,
        dataclasses.replace(EXPERTS, operations=("layer", "permute"), top_k=2, load="balanced"),
        ("te_jax_block_once", "te_jax", "jnp"),
        {"layer": ("te_jax", "te_jax_block_once"), "permute": ("te_jax", "jnp", "copy")},
        # Bytes of x and 640 rows: 192 choices of 4 experts, and up to 127 more for each, in whole blocks of 128.
        {"layer": {"flops": 18 * 192 * 64 * 48}, "permute": {"bytes": 2 * 64 * (96 + 640)}},
        unchecked=rf"permute.*({OTHER_TENSORS})",
        no_reference="permute",
    ),
    "moe, share": Family(
        moe,
        dataclasses.replace(EXPERTS, operations=("share",), top_k=2, load="balanced"),
        _SHARE,
        {"share": _SHARE},
        {"": {"flops": 18 * 48 * 64 * 48}},
    ),
    "norm": Family(
        norm,
        MATRIX,
        norm.IMPLEMENTATIONS,
        dict.fromkeys(("residual_both", "current_both", "backward"), norm.IMPLEMENTATIONS),
        {"residual_both": {"bytes": 8 * 128 * 256}, "backward": {"bytes": 8 * 128 * 256}},
        operations=("residual_both", "current_both"),
        unchecked=OTHER_TENSORS,
    ),
    "offload": Family(
        offload,
        shapes.OffloadShape(("input", "optimizer"), layers=2, tokens=128, hidden=64, mlp=128, kernels=2, model="test"),
        offload.IMPLEMENTATIONS,
        {operation: offload.OF_OPERATION[operation] for operation in ("input", "optimizer")},
        {
            "input remat": {"difference": 0.0, "time_over_remat": 1.0},
            "optimizer te_jax": {"difference": 0.0, "host_gb": harness.rounded(2 * 8 * 64 * 128 / 1e9)},
        },
        # Of gradients the first up and the last down are checked; the optimizer runs more steps.
        unchecked=r" \[1\]$|\[0\]\[0\]\['down'\]|\[0\]\[1\]\['up'\]|optimizer",
        no_reference="",
    ),
    "quantize": Family(
        quantize,
        MATRIX,
        _QUANTIZE,
        dict.fromkeys(("block_gradient", "current_dbias"), _QUANTIZE),
        {"block_gradient": {"bytes": 4 * 128 * 256}, "current_dbias": {"bytes": 6 * 128 * 256}},
        operations=("block_gradient", "current_dbias"),
        unchecked=rf"{OTHER_TENSORS}|current_dbias (te_jax\w* \[3\]\[1\]|jnp \[3\]\[4\])",
    ),
    "softmax_cross_entropy": Family(
        softmax_cross_entropy,
        shapes.LogitsShape(rows=96, vocab=384, dtype="bfloat16", model="test"),
        _LOSSES,
        {"forward": ("te_jax", "jnp", "copy"), "forward_backward": _LOSSES},
        {"forward_backward jnp": {"bytes": 3 * 96 * 384 * 2}, "forward copy": {"loss_error": None}},
    ),
}


@pytest.fixture(params=FAMILIES)
def family(request, monkeypatch, require_devices):
    """A family, with the operations that take part alone, on four devices if it is about several."""
    family = FAMILIES[request.param]
    if family.operations is not None:
        every = family.module.OPERATIONS
        few = (
            {name: every[name] for name in family.operations}
            if isinstance(every, dict)
            else tuple(each for each in every if each.name in family.operations)
        )
        monkeypatch.setattr(family.module, "OPERATIONS", few)
    if family.module in (collective_matmul, interconnect):
        require_devices(4)
        devices = jax.local_devices()[:4]
        monkeypatch.setattr(jax, "local_devices", lambda **_: devices)
    monkeypatch.setattr(optim, "offload", lambda optimizer, offload=optim.offload: offload(optimizer, min_size=0))
    with jax.numpy_dtype_promotion("standard"):  # as peers need it
        yield family


@pytest.mark.usefixtures("native_kernels")
def test_all_is_measured_and_no_wrong_value_of_a_result_is_overlooked(family, monkeypatch):
    run_operation = _spoiling(harness.run_operation, family.unchecked)
    monkeypatch.setattr(harness, "run_operation", run_operation)
    monkeypatch.setattr(family.module, "run_operation", run_operation, raising=False)
    result = family.module.run_case(family.case, family.names, FEW)
    assert not result.wrong
    assert not result.skipped
    found = [(row["operation"], row["implementation"]) for row in result.rows]
    assert found == [(operation, name) for operation, names in family.rows.items() for name in names]
    for row in result.rows:
        for key in ("", row["operation"], f"{row['operation']} {row['implementation']}"):
            figures = family.figures.get(key, {})
            assert {figure: row[figure] for figure in figures} == figures
    assert harness.screen_table(result.rows)


def _spoiling(run_operation, unchecked):
    """run_operation, which also hands the checks of te_jax its results with each leaf spoilt in turn."""

    def run(labels, *arguments, build, errors, **options):
        results = {}

        def building(name):
            candidate = build(name)

            def read(output):
                results[name] = candidate, jax.tree.map(lambda leaf: leaf, output)
                return candidate.read(output)

            return dataclasses.replace(candidate, read=read)

        def checking(name, output, expected):
            candidate, result = results.pop(name)
            leaves, tree = jax.tree.flatten_with_path(result)
            for i, (path, leaf) in enumerate(leaves if name.startswith("te_jax") else ()):
                where = f"{labels['operation']} {name} {jax.tree_util.keystr(path)}"
                for wrong in _spoilt(leaf) if not re.search(unchecked, where) else ():
                    values = [wrong if i == j else value for j, (_, value) in enumerate(leaves)]
                    assert errors(name, candidate.read(tree.unflatten(values)), expected)[1], f"{where} may be wrong"
            return errors(name, output, expected)

        return run_operation(labels, *arguments, build=building, errors=checking, **options)

    return run


def _spoilt(leaf):
    if leaf.dtype.itemsize == 1:
        codes = jax.lax.bitcast_convert_type(leaf, jnp.uint8) ^ jnp.uint8(0x80)
        return [jax.lax.bitcast_convert_type(codes, leaf.dtype)]
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        return [leaf.at[-1].add(1), leaf.at[0].set(leaf[1])]
    return [leaf * jnp.asarray(factor, leaf.dtype) for factor in (3, jnp.nan)]


def test_the_reference_is_not_published_as_the_native_kernel(family, monkeypatch):
    monkeypatch.setattr(extension, "_problem_on_default_backend", lambda *_: ("the kernels are not loaded", False))
    jax.clear_caches()  # of what was traced with the kernels
    kernels = {
        (operation, name)
        for operation, names in family.rows.items()
        for name in names
        if name.startswith("te_jax") and not re.search(family.no_reference, f"{operation} {name}")
    }
    if not kernels:
        pytest.skip("it names no kernels")
    result = family.module.run_case(family.case, tuple(dict(map(reversed, kernels))), FEW)
    reasons = {(problem["operation"], problem["implementation"]): problem["reason"] for problem in result.skipped}
    assert {pair for pair in kernels if reasons.get(pair, "").startswith("NativeUnavailableError")} == kernels


def test_bytes_that_every_operation_must_move():
    of_norms = {"rows": 3, "both": 4, "residual_rows": 7, "residual_both": 8, "current_both": 6}
    assert {name: 2 * each.wide + each.codes for name, each in norm.OPERATIONS.items()} == of_norms
    of_activations = {"forward_data": 5, "forward": 6, "backward": 10, "backward_y": 11}
    for name, operation in activation.OPERATIONS.items():
        direction, _, scales = name.rpartition("_")
        again = (6 if operation.backward else 4) if scales == "current" else 0
        assert operation.bytes == of_activations[direction] + again


def test_a_layer_of_experts_keeps_x_and_what_is_before_the_activation():
    """Beside these, 4 bytes for the logit of each expert, and 16 for each choice."""
    case = shapes.ExpertsShape(("layer",), 64, 1024, 8, hidden=2048, mlp=1024, load="balanced", model="test")
    least = 2 * 2048 + 4 * 8 * 1024
    for name in ("te_jax", "te_jax_block"):
        assert least <= moe.kept_bytes(name, case) <= least + 4 * 64 + 16 * 8
