"""The table of operations. A new operation is one row here, and tests of its oddities.

A row says how to draw random operands, how to call the operation, and what comes out in float64; `Operation` describes
all of its fields. The tests of this folder know no operation: they run every row under every transformation
(test_transformations.py), on every kind of mesh (test_meshes.py), and with wrong arguments (test_errors.py). A row that
shares its rules with the one above is a `variant`, and is spared what does not depend on the difference.

Layouts are over a mesh of two axes, "data" and "model", with two devices each.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from operation import Layout, Operation
from ops.gemm_oracle import product, random_product, tolerance_of
from ops.quantize_oracle import oracle as quantized_by_numpy
from ops.quantize_oracle import quantization_of
from ops.quantize_oracle import random_case as random_magnitudes

from te_jax import checkpoint_policies, ops, parallel
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling


def normal(rng, *shape, dtype="float32", scale=1.0):
    return jnp.asarray((scale * rng.standard_normal(shape)).astype(np.float32).astype(jnp.dtype(dtype)))


# ------------------------------------------------------------------------------------------------ softmax_cross_entropy

ROWS, VOCABULARY = (8, 2), 64
LOSS = {"label_smoothing": 0.2, "z_loss": 3e-3, "logit_softcap": 3.0}


def draw_logits(rng, dtype="float32"):
    labels = rng.integers(0, VOCABULARY, ROWS)
    labels = np.where(rng.random(ROWS) < 0.2, -100, labels)
    return {"logits": normal(rng, *ROWS, VOCABULARY, dtype=dtype, scale=2.0), "labels": jnp.asarray(labels, jnp.int32)}


def losses(logits, labels):
    z = 3.0 * jnp.tanh(logits / 3.0)
    lse = jax.nn.logsumexp(z, axis=-1)
    target = jnp.take_along_axis(z, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(labels == -100, 0.0, lse - 0.8 * target - 0.2 * jnp.mean(z, axis=-1) + 3e-3 * lse**2)


def mean_loss(logits, labels):
    return jnp.sum(losses(logits, labels)) / jnp.maximum(jnp.sum(labels != -100), 1).astype(logits.dtype)


def rows_and_vocabulary(rows, vocabulary, **options):
    """Nothing is exchanged but numbers of rows, and nothing at all of whole rows."""
    specs = {"logits": P(rows, None, vocabulary), "labels": P(rows)}
    return Layout(specs, P(rows), small=None if vocabulary else {}, **options)


CROSS_ENTROPY = Operation(
    name="softmax_cross_entropy",
    draw=draw_logits,
    call=functools.partial(ops.softmax_cross_entropy, reduction="none", **LOSS),
    oracle=losses,
    dtypes=("float32",),
    differentiable=("logits",),
    refuses={"native": "use implementation='reference'"},
    policy=jax.checkpoint_policies.save_only_these_names("softmax_cross_entropy_lse"),
    donates=("logits",),
    layouts={
        "rows": rows_and_vocabulary("data", None, options={}, own=("data",)),
        "rows over both": rows_and_vocabulary(("data", "model"), None, options={}),
        "sequence": Layout({"logits": P("data", "model"), "labels": P("data", "model")}, P("data", "model"), small={}),
        "vocabulary": rows_and_vocabulary(None, "model", options={"axis_name": "model"}),
        "rows and vocabulary": rows_and_vocabulary(
            "data", "model", options={"axis_name": "model"}, own=("data",), reference=True
        ),
        "vocabulary over both": rows_and_vocabulary(None, ("model", "data"), options={"axis_name": ("model", "data")}),
        "nothing": rows_and_vocabulary(None, None),
    },
    small={"all-reduce": 4 * math.prod(ROWS) + 8},
)

MEAN_CROSS_ENTROPY = Operation(
    name="softmax_cross_entropy, mean",
    draw=functools.partial(draw_logits, dtype="bfloat16"),
    call=functools.partial(ops.softmax_cross_entropy, **LOSS),
    oracle=mean_loss,
    dtypes=("float32",),
    differentiable=("logits",),
    refuses={"native": "use implementation='reference'"},
    policy=jax.checkpoint_policies.save_only_these_names("softmax_cross_entropy_lse"),
    donates=("logits",),
    layouts={
        "rows": Layout({"logits": P("data"), "labels": P("data")}),
        "rows and vocabulary": Layout({"logits": P("data", None, "model"), "labels": P("data")}),
        "labels whole": Layout({"logits": P("data", None, "model")}),
        "vocabulary": Layout({"logits": P(None, None, "model")}, options={"axis_name": "model"}),
    },
    small={"all-reduce": 4 * math.prod(ROWS) + 8},
    variant=True,
)


# ------------------------------------------------------------------------------------------------------------- quantize


QUANTIZED = (512, 256)


def quantize(kind, *, delayed=False, **fields):
    quantization, count = quantization_of(kind), 4 if delayed else 6

    def draw(rng):
        x = random_magnitudes(rng, QUANTIZED, "bfloat16", edges=0.1)
        return {"x": x, "amax": jnp.float32(rng.uniform(1, 4))} if delayed else {"x": x}

    def oracle(x, amax=None):
        found = quantized_by_numpy(x, quantization, amax=None if amax is None else float(amax))
        copies = found.data, found.scale_inv, found.transposed, found.transposed_scale_inv
        return copies if delayed else (*copies, found.amax, found.dbias)

    def layout(rows, cols, **options):
        scales = {"tensor": (P(), P()), "row": (P(rows), P(cols))}.get(kind, (P(cols, rows), P(cols, rows)))
        results = (P(rows, cols), scales[0], P(cols, rows), scales[1], P(), P(cols))[:count]
        return Layout({"x": P(rows, cols)}, results, options={"axis_name": {"rows": rows, "cols": cols}}, **options)

    return Operation(
        name=f"quantize, {'delayed' if delayed else kind}",
        draw=draw,
        call=functools.partial(ops.quantize, quantization=quantization, with_amax=not delayed, with_dbias=not delayed),
        oracle=oracle,
        dtypes=("float8_e4m3fn", "float32", "float8_e4m3fn", "float32", "float32", "float32")[:count],
        # dbias is a sum of numbers of either sign and every size.
        tolerance=(1e-4, None),
        agreement=1e-4,
        refuses=dict.fromkeys(("native", "reference"), r"quantize has no derivative.*te_jax.ops.dense.*stop_gradient"),
        layouts={
            "rows": layout("data", None, own=("data",)),
            "cols": layout(None, "model"),
            "both": layout("data", "model", own=("data",), reference=True),
            "rows over both": layout(("data", "model"), None),
            "nothing": Layout({}),
        },
        small={} if delayed else {"all-reduce": sum(QUANTIZED) + 8},
        **fields,
    )


# ----------------------------------------------------------------------------------------------------- gated_activation


def draw_gate_and_up(rng):
    return {name: normal(rng, *QUANTIZED, dtype="bfloat16", scale=2.0) for name in ("gate", "up")}


def reglu(kind, **fields):
    """In FP8; of relu the kernels and NumPy have the same bits."""
    quantization = quantization_of(kind)

    def oracle(gate, up):
        gate, up = (np.asarray(x).astype(np.float32) for x in (gate, up))
        y = np.where(gate > 0, np.minimum(gate, np.float32(3)), 0) * (np.clip(up, -3, 3) + np.float32(1))
        found = quantized_by_numpy(y.astype(jnp.bfloat16), quantization)
        return found.data, found.scale_inv, found.transposed, found.transposed_scale_inv, found.amax

    def layout(rows, cols, **options):
        scales = P() if kind == "tensor" else P(cols, rows)
        operands = dict.fromkeys(("gate", "up"), P(rows, cols))
        results = (P(rows, cols), scales, P(cols, rows), scales, P())
        return Layout(operands, results, options={"axis_name": {"rows": rows, "cols": cols}}, **options)

    return Operation(
        name=f"gated_activation, {kind}",
        draw=draw_gate_and_up,
        call=functools.partial(
            ops.gated_activation, kind="relu", limit=3.0, offset=1.0, quantization=quantization, with_amax=True
        ),
        oracle=oracle,
        dtypes=("float8_e4m3fn", "float32", "float8_e4m3fn", "float32", "float32"),
        refuses=dict.fromkeys(("native", "reference"), r"gated_activation has no derivative.*stop_gradient"),
        layouts={
            "rows": layout("data", None, own=("data",)),
            "cols": layout(None, "model"),
            "both": layout("data", "model", own=("data",), reference=True),
            "rows over both": layout(("data", "model"), None),
            "nothing": Layout({}),
        },
        small={"all-reduce": 8},
        **fields,
    )


# ----------------------------------------------------------------------------------------------------------------- gemm

M, N, K = 64, 512, 512


def gemm(kind, *, dtype="float32", followup="bias", **fields):
    """Products of operands [M, K] and [K, N], quantized in a way of `gemm_oracle`, or "plain"."""

    def draw(rng):
        if kind == "plain":
            operands = {"lhs": normal(rng, M, K, dtype=dtype), "rhs": normal(rng, K, N, dtype=dtype)}
        else:
            lhs, rhs = random_product(rng, (M,), (N,), (K,), kind)
            operands = {"lhs": lhs.without_transposed(), "rhs": rhs.without_data()}
        if followup == "accumulator":
            return operands | {"accumulator": normal(rng, M, N, scale=9.0)}
        return operands | {"bias": normal(rng, N, dtype=dtype)}

    def call(implementation=None, **operands):
        if followup == "gelu":
            operands |= {"activation": "gelu", "save_preactivation": True}
        out_dtype = "float32" if followup == "accumulator" else dtype
        result = ops.gemm(**operands, out_dtype=out_dtype, implementation=implementation)
        return tuple(result) if followup == "gelu" else result

    def oracle(lhs, rhs, bias=None, accumulator=None):
        value = product(lhs, rhs) + np.asarray(bias if accumulator is None else accumulator, np.float64)
        return (np.asarray(jax.nn.gelu(value)), value) if followup == "gelu" else value

    def copies(outer, summed, scaling):
        """PartitionSpecs of the values and of their scales."""
        if kind == "plain":
            return P(outer, summed)
        blocks = {"lhs": P(summed, outer), "rhs": P(outer, summed)}
        return (P(outer, summed), {"tensor": P(), "row": P(outer)}.get(kind, blocks[scaling]))

    def layout(m, n, k, **options):
        part = M * N // math.prod(2 for axes in (m, n) for _ in np.atleast_1d(axes or ()))
        operands = {"lhs": copies(m, k, "lhs"), "rhs": copies(n, k, "rhs"), "bias": P(n), "accumulator": P(m, n)}
        if kind == "plain":
            operands["rhs"] = P(k, n)
        collectives = (("all-reduce", part),) if k else ()
        return Layout(operands, P(m, n), collectives, options=None if k else {}, **options)

    return Operation(
        name=f"gemm, {kind}, {followup}",
        draw=draw,
        call=call,
        oracle=oracle,
        dtypes=(dtype,) * (2 if followup == "gelu" else 1),
        tolerance=(tolerance_of(dtype, kind), None),
        refuses={"native": r"no derivatives.*te_gemm.*use implementation='reference'"},
        donates=("accumulator",) if followup == "accumulator" else (),
        layouts={
            "m and n": layout("data", "model", None, own=("data", "model")),
            "m and k": layout("data", None, "model", own=("data",), reference=True),
            "k over both": layout(None, None, ("model", "data")),
            "m over both": layout(("data", "model"), None, None),
        },
        **fields,
    )


# ---------------------------------------------------------------------------------------------------------------- dense

BATCH, IN, OUT = (2, 256), 256, 512
TOKENS = math.prod(BATCH)
FORWARD, GRADIENT = 0.055, 0.085  # what FP8 costs on normal data; see tests/ops/dense_oracle.py

# How x, kernel and y lie, and the collectives of matrices of a forward and a backward pass.
GATHERED = ("all-gather", IN * OUT)
DENSE_LAYOUTS = {
    "data parallel": (P("data"), P(), P("data"), [("all-reduce", IN * OUT)]),
    "sequence parallel": (P("data", "model"), P(), P("data", "model"), [("all-reduce", IN * OUT)]),
    "column parallel": (
        P("data"), P(None, "model"), P("data", None, "model"),
        [("all-reduce", TOKENS // 2 * IN), ("all-reduce", IN * OUT // 2)],
    ),
    "row parallel": (
        P("data", None, "model"), P("model"), P("data"),
        [("all-reduce", TOKENS // 2 * OUT), ("all-reduce", IN * OUT // 2)],
    ),
    "fsdp": (P("data"), P("data"), P("data"), [GATHERED, GATHERED, ("all-reduce", IN * OUT)]),
    "fsdp of columns": (P("data"), P(None, "data"), P("data"), [GATHERED, GATHERED, ("all-reduce", IN * OUT)]),
    "fsdp, column parallel": (
        P("data"), P("data", "model"), P("data", None, "model"),
        [("all-gather", IN * OUT // 2)] * 2 + [("all-reduce", TOKENS // 2 * IN), ("all-reduce", IN * OUT // 2)],
    ),
    "fsdp, row parallel": (
        P("data", None, "model"), P("model", "data"), P("data"),
        [("all-gather", IN * OUT // 2)] * 2 + [("all-reduce", TOKENS // 2 * OUT), ("all-reduce", IN * OUT // 2)],
    ),
}  # fmt: skip
OWN = {"column parallel": ("data", "model"), "row parallel": ("data",)}


def dense(name, recipe, layouts, *, dtype="float32", bias=False, accumulator=False, **fields):
    """A linear layer; `accumulator` gives it one for the gradient of its kernel."""

    def draw(rng):
        operands = {
            "x": normal(rng, *BATCH, IN, dtype=dtype),
            "kernel": normal(rng, IN, OUT, dtype=dtype, scale=IN**-0.5),
        }
        if bias:
            operands["bias"] = normal(rng, OUT, dtype=dtype)
        if accumulator:
            operands["wgrad_accumulator"] = normal(rng, IN, OUT, scale=20.0)
        if isinstance(recipe, DelayedScaling):
            operands["scaling_state"] = warm(recipe, 9.0, 0.6, 9.0)
        return operands

    def oracle(x, kernel, bias=None, **_):
        value = jnp.matmul(x, kernel)
        return value if bias is None else jax.nn.gelu(value + bias[None, None])

    def next_values(operands, cotangents):
        if accumulator:
            dkernel = np.einsum("bti,bto->io", *(np.asarray(a, np.float64) for a in (operands["x"], cotangents)))
            return {"wgrad_accumulator": operands["wgrad_accumulator"] + dkernel}
        amaxes = (np.abs(np.asarray(a)).max() for a in (operands["x"], operands["kernel"], cotangents))
        return {"scaling_state": observed(operands["scaling_state"], *amaxes)}

    delayed = isinstance(recipe, DelayedScaling)
    small = {"all-reduce": 8 + OUT * bias}  # largest magnitudes, and the gradient of the bias
    if isinstance(recipe, RowwiseScaling | BlockScaling):
        small = dict.fromkeys(("all-reduce", "all-gather"), 2 * (TOKENS + IN + OUT))
    # The gradient of the kernel goes to an accumulator.
    named = [name for name in draw(np.random.default_rng(0)) if name != "x" and not (accumulator and name == "kernel")]
    once = r"is differentiated once|FP8 layers: recipe=None"
    return Operation(
        name=f"dense, {name}",
        draw=draw,
        call=functools.partial(ops.dense, recipe=recipe, activation="gelu" if bias else None),
        oracle=oracle,
        dtypes=(dtype,),
        tolerance=(FORWARD, GRADIENT * 1.15) if recipe else (3e-2, 3e-2) if dtype == "bfloat16" else (None, None),
        # Where a sum over devices precedes an activation, its last bits decide how some gradients are rounded.
        agreement=2e-2 if bias and recipe else 5e-3 if dtype == "bfloat16" else None,
        differentiable=("x", *named),
        next_values=next_values if accumulator or delayed else None,
        refuses=dict.fromkeys(("native", "reference"), once) if recipe or accumulator else {},
        policy=checkpoint_policies.save_fp8_operands_and_preactivations if recipe else None,
        donates=("wgrad_accumulator",) if accumulator else (),
        unshared=("wgrad_accumulator", "scaling_state"),
        merged={"scaling_state": largest} if delayed else {},
        layouts={layout: dense_layout(layout, small, accumulator) for layout in layouts},
        left_to_xla=recipe is None,
        **fields,
    )


def dense_layout(name, small, accumulator):
    x, kernel, y, collectives = DENSE_LAYOUTS[name]
    (out,) = (*y, None, None)[2:3]
    if accumulator and name == "fsdp":  # the mesh axis of the accumulator is that of the tokens
        small = small | {"all-gather": IN * OUT}
    return Layout(
        {"x": x, "kernel": kernel, "bias": P(out), "wgrad_accumulator": kernel}, y, tuple(collectives), small,
        own=() if accumulator else OWN.get(name, ()),  # devices cannot share one
        reference=name == "row parallel",
    )  # fmt: skip


ROLES = ("activation", "kernel", "gradient")


def warm(recipe, *amaxes):
    """A state that knows these magnitudes of x, kernel and dy."""
    state = recipe.init()
    histories = {role: np.asarray(getattr(state, role)) + amax for role, amax in zip(ROLES, amaxes, strict=True)}
    return dataclasses.replace(state, **jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), histories))


def observed(state, *amaxes):
    """The state after one use of it."""
    histories = {role: np.append(amax, getattr(state, role)[:-1]) for role, amax in zip(ROLES, amaxes, strict=True)}
    return dataclasses.replace(state, **histories, uses=np.ones(()))


def largest(states):
    return jax.tree.map(lambda *histories: functools.reduce(np.maximum, histories), *states)


# ------------------------------------------------------------------------------------------------- collective products

SEQUENCE = 64


def all_gather_matmul(name, recipe, **fields):
    return _collective_product(
        f"all_gather_matmul, {name}",
        functools.partial(parallel.all_gather_matmul, axis_name="model", recipe=recipe),
        Layout(
            {"x": P("data", "model"), "kernel": P(None, "model"), "bias": P("model")},
            P("data", None, "model"),
            (
                ("all-gather", SEQUENCE * IN),
                ("all-reduce", SEQUENCE * IN),
                ("all-reduce", IN * OUT // 2),
            ),
            options={},
        ),
        recipe,
        **fields,
    )


def matmul_reduce_scatter(name, recipe, **fields):
    return _collective_product(
        f"matmul_reduce_scatter, {name}",
        functools.partial(parallel.matmul_reduce_scatter, axis_name="model", recipe=recipe),
        Layout(
            {"x": P("data", None, "model"), "kernel": P("model")},
            P("data", "model"),
            (
                ("all-reduce", SEQUENCE * OUT),
                ("all-gather", SEQUENCE * OUT),
                ("all-reduce", IN * OUT // 2),
            ),
            options={},
        ),
        recipe,
        **fields,
    )


def _collective_product(name, call, layout, recipe, **fields):
    def draw(rng):
        return {
            "x": normal(rng, 2, SEQUENCE, IN),
            "kernel": normal(rng, IN, OUT, scale=IN**-0.5),
            "bias": normal(rng, OUT),
        }

    return Operation(
        name=name,
        draw=draw,
        call=call,
        oracle=lambda x, kernel, bias: jnp.matmul(x, kernel) + bias[None, None],
        dtypes=("float32",),
        tolerance=(FORWARD, GRADIENT) if recipe else (None, None),
        differentiable=("x", "kernel", "bias"),
        refuses=dict.fromkeys(("native", "reference"), "is differentiated once") if recipe else {},
        policy=jax.checkpoint_policies.save_only_these_names("te_collective_activation", "te_collective_kernel")
        if recipe
        else None,
        layouts={"tensor and sequence parallel": layout},
        small={"all-reduce": OUT + 8},
        linear=("bias",),
        collective=True,
        without={"without_jit": "JAX finds no NaN inside an eager shard_map: it recurses"},
        **fields,
    )


CURRENT = CurrentScaling()
TENSOR, FSDP = ("column parallel", "row parallel"), ("fsdp",)

OPERATIONS = [
    CROSS_ENTROPY,
    MEAN_CROSS_ENTROPY,
    quantize("tensor"),
    quantize("row", variant=True),
    quantize("1x128 and square", variant=True),
    quantize("tensor", delayed=True, variant=True),
    reglu("tensor"),
    reglu("1x128 and square", variant=True),
    gemm("block"),
    gemm("row", dtype="bfloat16", variant=True),
    gemm("tensor", dtype="bfloat16", followup="gelu", variant=True),
    gemm("plain", followup="accumulator", variant=True),
    dense("current", CURRENT, ("data parallel", "sequence parallel", *TENSOR, *FSDP)),
    dense("rowwise", RowwiseScaling(), TENSOR, variant=True),
    dense("block", BlockScaling(), (*TENSOR, *FSDP, "fsdp, column parallel"), dtype="bfloat16", variant=True),
    dense("delayed", DelayedScaling(history_len=3), (*TENSOR, "fsdp of columns", "fsdp, row parallel"), variant=True),
    dense("bias and gelu", CURRENT, TENSOR, bias=True, variant=True),
    dense("accumulator", CURRENT, (*TENSOR, *FSDP), accumulator=True, variant=True),
    dense("none", None, (*TENSOR, *FSDP), bias=True, variant=True),
    dense("none, accumulator", None, ("row parallel", *FSDP), dtype="bfloat16", accumulator=True, variant=True),
    all_gather_matmul("plain", None),
    all_gather_matmul("current", CURRENT, variant=True),
    matmul_reduce_scatter("plain", None, variant=True),
    matmul_reduce_scatter("current", CURRENT, variant=True),
]
