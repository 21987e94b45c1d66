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
from ops import attention_oracle, grouped_oracle
from ops.gemm_oracle import product, random_product, tolerance_of
from ops.quantize_oracle import oracle as quantized_by_numpy
from ops.quantize_oracle import quantization_of
from ops.quantize_oracle import random_case as random_magnitudes

from te_jax import checkpoint_policies, ops, parallel
from te_jax.ops.experts_mlp import experts_mlp as fused_experts_mlp
from te_jax.recipe import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXFP8Scaling,
    ProductRecipes,
    RowwiseScaling,
    products,
)

# Tensor cores add products of FP8 up with about 14 bits: how devices share a sum shows.
FP8_SUMS = 1e-3 if jax.default_backend() == "gpu" else None


def normal(rng, *shape, dtype="float32", scale=1.0):
    values = (scale * rng.standard_normal(shape)).astype(np.float32).astype(jnp.dtype(dtype))
    return jnp.array(values)  # a copy: XLA does not write over what NumPy holds


def checked_by(operation):
    """For `Operation.without`."""
    return dict.fromkeys(("dtypes", "shapes", "what_is_no_array"), f"{operation} refuses its operands")


def with_kernels_transposed(one):
    """A layer whose kernels are [out, in], and with them accumulators."""
    kernels = ("kernel", "wgrad_accumulator")
    ndim = jax.tree.leaves(one.draw(np.random.default_rng(0))["kernel"])[0].ndim

    def transposed(operands):
        def swapped(x):
            return jnp.array(np.swapaxes(np.asarray(x), -1, -2)) if isinstance(x, np.ndarray | jax.Array) else x

        return {name: jax.tree.map(swapped, x) if name in kernels else x for name, x in operands.items()}

    def spec_of(spec):
        *others, inner, outer = (*spec, *(None,) * ndim)[:ndim]
        return P(*others, outer, inner)

    def layout(single):
        operands = {
            name: jax.tree.map(spec_of, spec, is_leaf=lambda x: isinstance(x, P)) if name in kernels else spec
            for name, spec in single.operands.items()
        }
        return dataclasses.replace(single, operands=operands)

    def oracle(kernel, **others):
        return one.oracle(kernel=jax.tree.map(lambda x: x.mT, kernel), **others)

    operation, variety = one.name.split(", ", 1)
    return dataclasses.replace(
        one,
        name=f"{operation} of a transposed kernel, {variety}",
        draw=lambda rng: transposed(one.draw(rng)),
        call=functools.partial(one.call, kernel_contracting="last"),
        oracle=oracle,
        next_values=one.next_values
        and (lambda operands, cotangents: transposed(one.next_values(transposed(operands), cotangents))),
        layouts={name: layout(single) for name, single in one.layouts.items()},
    )


def with_x_quantized(one, recipe, amax_axis=None):
    """A layer that gets x in FP8; with amax_axis devices quantize their parts of x with one scale."""
    row_ndim = one.draw(np.random.default_rng(0))["x"].ndim - 1

    def call(x, implementation=None, **others):
        quantization = recipe.quantization("activation")
        x = ops.quantize(
            x, quantization, row_ndim=row_ndim, amax_axis=amax_axis, straight_through=True,
            implementation=implementation,
        )  # fmt: skip
        return one.call(x, **others, implementation=implementation)

    operation, variety = one.name.split(", ", 1)
    refused = "|".join((one.refuses["native"], "quantize has no derivative"))
    return dataclasses.replace(
        one,
        name=f"{operation} of a quantized x, {variety}",
        call=call,
        refuses=dict.fromkeys(one.refuses, refused),
    )


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


# ------------------------------------------------------------------------------------------------ softmax_cross_entropy

ROWS, VOCABULARY = (8, 2), 64
LOSS = {"loss": ops.CrossEntropy(label_smoothing=0.2, z_loss=3e-3, logit_softcap=3.0)}


def draw_logits(rng, dtype="float32"):
    labels = rng.integers(0, VOCABULARY, ROWS)
    labels = np.where(rng.random(ROWS) < 0.2, -100, labels)
    labels.flat[rng.integers(labels.size)] = -100  # one at least, or no draw would tell means over all of them apart
    return {
        "logits": normal(rng, *ROWS, VOCABULARY, dtype=dtype, scale=2.0),
        "labels": jax.device_put(np.asarray(labels, jnp.int32)),
    }


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
        "vocabulary": rows_and_vocabulary(None, "model", options={"vocab_axis": "model"}),
        "rows and vocabulary": rows_and_vocabulary(
            "data", "model", options={"vocab_axis": "model"}, own=("data",), reference=True
        ),
        "vocabulary over both": rows_and_vocabulary(None, ("model", "data"), options={"vocab_axis": ("model", "data")}),
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
        "vocabulary": Layout({"logits": P(None, None, "model")}, options={"vocab_axis": "model"}),
    },
    small={"all-reduce": 4 * math.prod(ROWS) + 8},
    variant=True,
)


# ------------------------------------------------------------------------------------------------ linear_cross_entropy

WIDTH = 16


def draw_head(rng, dtype="float32"):
    labels = draw_logits(rng)["labels"]
    x, kernel = normal(rng, *ROWS, WIDTH, dtype=dtype), normal(rng, WIDTH, VOCABULARY, dtype=dtype, scale=0.5)
    return {"x": x, "kernel": kernel, "labels": labels}


def tokens_and_vocabulary(tokens, vocabulary, collectives, **options):
    """The gradient of x is a sum over shards of the vocabulary, that of the kernel one over shards of the tokens."""
    specs = {"x": P(tokens), "kernel": P(None, vocabulary), "labels": P(tokens)}
    small = {"all-reduce": 4 * math.prod(ROWS) + 8} if vocabulary else {}
    return Layout(specs, P(tokens), collectives, small=small, **options)


_DX, _DKERNEL = math.prod(ROWS) * WIDTH, WIDTH * VOCABULARY

LINEAR_CROSS_ENTROPY = Operation(
    name="linear_cross_entropy",
    draw=draw_head,
    call=functools.partial(ops.linear_cross_entropy, reduction="none", chunk_tokens=5, **LOSS),
    oracle=lambda x, kernel, labels: losses(x @ kernel, labels),
    dtypes=("float32",),
    differentiable=("x", "kernel"),
    refuses={"native": "use implementation='reference'"},
    policy=jax.checkpoint_policies.save_only_these_names("linear_cross_entropy_lse"),
    layouts={
        "tokens": tokens_and_vocabulary("data", None, (("all-reduce", _DKERNEL),), options={}, own=("data",)),
        "vocabulary": tokens_and_vocabulary(None, "model", (("all-reduce", _DX),), options={"vocab_axis": "model"}),
        "tokens and vocabulary": tokens_and_vocabulary(
            "data",
            "model",
            (("all-reduce", _DX // 2), ("all-reduce", _DKERNEL // 2)),
            options={"vocab_axis": "model"},
            own=("data",),
        ),
        "nothing": tokens_and_vocabulary(None, None, ()),
    },
)

MEAN_LINEAR_CROSS_ENTROPY = Operation(
    name="linear_cross_entropy, mean",
    draw=draw_head,
    call=functools.partial(ops.linear_cross_entropy, chunk_tokens=5, **LOSS),
    oracle=lambda x, kernel, labels: mean_loss(x @ kernel, labels),
    dtypes=("float32",),
    differentiable=("x", "kernel"),
    refuses={"native": "use implementation='reference'"},
    policy=jax.checkpoint_policies.save_only_these_names("linear_cross_entropy_gradient"),
    layouts={
        "tokens": Layout(
            {"x": P("data"), "labels": P("data")}, collectives=(("all-reduce", _DKERNEL),), small={"all-reduce": 8}
        ),
        "vocabulary": Layout(
            {"kernel": P(None, "model")},
            collectives=(("all-reduce", _DX),),
            small={"all-reduce": 4 * math.prod(ROWS) + 8},
            options={"vocab_axis": "model"},
        ),
    },
    variant=True,
    without={"derivatives_that_are_not_defined": "gradients are ready before the cotangent, and linear in it"},
)


# ---------------------------------------------------------------------------------------------------- log-probabilities


def policy_gradient(log_prob, entropy, before, advantage):
    ratio = jnp.exp(log_prob - before)
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage) - 0.1 * entropy


def log_probs_of(logits, tokens, temperature=1.0):
    """Log-probabilities and entropies."""
    log_p = jax.nn.log_softmax(logits / temperature, axis=-1)
    log_prob = jnp.take_along_axis(log_p, jnp.maximum(tokens, 0)[..., None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    return tuple(jnp.where(tokens == -100, 0.0, each) for each in (log_prob, entropy))


def draw_policy(rng, dtype="float32"):
    operands = draw_head(rng, dtype)
    operands["tokens"] = operands.pop("labels")
    return operands


def draw_policy_loss(rng, dtype="float32"):
    log_probs = -4.0 + 0.1 * rng.standard_normal(ROWS)
    advantages = jnp.abs(normal(rng, *ROWS))  # losses of either sign would cancel in the sum
    return {**draw_policy(rng, dtype), "arrays": (jnp.asarray(log_probs, jnp.float32), advantages)}


def policy_loss(x, kernel, tokens, arrays, **options):
    loss = functools.partial(ops.linear_token_loss, entropy=True, chunk_tokens=5)
    return loss(x, kernel, tokens, policy_gradient, *arrays, **options)


def policy_loss_oracle(x, kernel, tokens, arrays):
    values = policy_gradient(*log_probs_of(x @ kernel, tokens), *arrays)
    return jnp.sum(jnp.where(tokens == -100, 0.0, values)) / jnp.sum(tokens != -100).astype(values.dtype)


_BY_TOKENS = {"x": P("data"), "tokens": P("data")}
_ROW_SUMS = {"all-reduce": 6 * math.prod(ROWS) + 8}
_PAIR = {"differentiable": ("x", "kernel"), "refuses": {"native": "use implementation='reference'"}}

LINEAR_LOG_PROBS = Operation(
    name="linear_log_probs",
    draw=draw_policy,
    call=functools.partial(ops.linear_log_probs, entropy=True, softmax=ops.Softmax(temperature=0.7), chunk_tokens=5),
    oracle=lambda x, kernel, tokens: log_probs_of(x @ kernel, tokens, 0.7),
    dtypes=("float32", "float32"),
    layouts={
        "tokens": Layout(
            _BY_TOKENS, P("data"), (("all-reduce", _DKERNEL),), small=_ROW_SUMS, options={}, own=("data",)
        ),
        "vocabulary": Layout(
            {"kernel": P(None, "model")}, P(), (("all-reduce", _DX),), small=_ROW_SUMS, options={"vocab_axis": "model"}
        ),
    },
    **_PAIR,
)

LOG_PROBS_BY_KERNELS = dataclasses.replace(
    LINEAR_LOG_PROBS,
    name="linear_log_probs by kernels",
    call=functools.partial(ops.linear_log_probs, chunk_tokens=5),
    oracle=lambda x, kernel, tokens: log_probs_of(x @ kernel, tokens)[0],
    dtypes=("float32",),
    variant=True,
)

LINEAR_TOKEN_LOSS = Operation(
    name="linear_token_loss",
    draw=draw_policy_loss,
    call=policy_loss,
    oracle=policy_loss_oracle,
    dtypes=("float32",),
    layouts={
        "tokens": Layout(
            {**_BY_TOKENS, "arrays": P("data")},
            collectives=(("all-reduce", _DKERNEL),),
            small=_ROW_SUMS,
        ),
        "vocabulary": Layout(
            {"kernel": P(None, "model")},
            collectives=(("all-reduce", _DX),),
            small=_ROW_SUMS,
            options={"vocab_axis": "model"},
        ),
    },
    without={"derivatives_that_are_not_defined": "gradients are ready before the cotangent, and linear in it"},
    **{**_PAIR, "differentiable": ("x", "kernel", "arrays")},
)


def draw_distillation(rng, dtype="float32"):
    teacher = {"teacher_x": normal(rng, *ROWS, 8), "teacher_kernel": normal(rng, 8, VOCABULARY)}
    operands = draw_head(rng, dtype)
    weight = jnp.where(operands.pop("labels") == -100, 0.0, 1.5)
    return {**operands, **teacher, "weight": weight}


def divergence_oracle(x, kernel, teacher_x, teacher_kernel, weight):
    log_p, log_q = (jax.nn.log_softmax(a @ b / 0.7, axis=-1) for a, b in ((x, kernel), (teacher_x, teacher_kernel)))
    log_m = jnp.log(0.3 * jnp.exp(log_q) + 0.7 * jnp.exp(log_p))
    pairs = (0.3, log_q), (0.7, log_p)
    terms = sum(share * jnp.sum(jnp.exp(each) * (each - log_m), axis=-1) for share, each in pairs)
    return jnp.sum(terms * weight) / jnp.sum(weight)


LINEAR_DIVERGENCE = Operation(
    name="linear_divergence",
    draw=draw_distillation,
    call=functools.partial(
        ops.linear_divergence, kind="jensen_shannon", beta=0.3, softmax=ops.Softmax(temperature=0.7), chunk_tokens=5
    ),
    oracle=divergence_oracle,
    dtypes=("float32",),
    layouts={
        "tokens": Layout(
            {"x": P("data"), "teacher_x": P("data"), "weight": P("data")},
            collectives=(("all-reduce", _DKERNEL),),
            small=_ROW_SUMS,
        ),
        "vocabulary": Layout(
            {"kernel": P(None, "model"), "teacher_kernel": P(None, "model")},
            collectives=(("all-reduce", _DX),),
            small=_ROW_SUMS,
            options={"vocab_axis": "model"},
        ),
    },
    without={"derivatives_that_are_not_defined": "gradients are ready before the cotangent, and linear in it"},
    **_PAIR,
)


# ------------------------------------------------------------------------------------------------------------ attention

SEQUENCES, TIME, HEADS, HEAD_DIM = 4, 16, 4, 8


def attention(name, kv_heads, *, options=None, extra=(), layouts=("batch", "heads", "batch and heads"), **fields):
    """Attention with the operands in `extra` beside query, key and value."""
    options = options or {}
    dtypes = ("float32",) * (2 if options.get("return_lse") else 1)

    def draw(rng):
        operands = {
            "query": normal(rng, SEQUENCES, TIME, HEADS, HEAD_DIM),
            "key": normal(rng, SEQUENCES, TIME, kv_heads, HEAD_DIM),
            "value": normal(rng, SEQUENCES, TIME, kv_heads, HEAD_DIM),
            "bias": normal(rng, 1, HEADS, TIME, TIME),
            "sinks": normal(rng, HEADS),
            "key_lengths": jax.device_put(np.asarray(rng.integers(1, TIME, SEQUENCES), jnp.int32)),
            "segment_ids": jax.device_put(np.asarray(np.sort(rng.integers(0, 3, (SEQUENCES, TIME))), jnp.int32)),
        }
        return {name: x for name, x in operands.items() if name in ("query", "key", "value", *extra)}

    def oracle(query, key, value, bias=None, sinks=None, key_lengths=None, segment_ids=None):
        positions = np.arange(TIME, dtype=np.int32)
        t, s = positions[None, :, None], positions[None, None, :]
        mask = jnp.broadcast_to((s <= t) & (t - s < options.get("window", TIME)), (len(query), TIME, TIME))
        if key_lengths is not None:
            mask = mask & (s < key_lengths[:, None, None])
        if segment_ids is not None:
            mask = mask & (segment_ids[:, :, None] == segment_ids[:, None, :])
        out, lse = attention_oracle.attention(query, key, value, mask, bias=bias, sinks=sinks)
        return (out, lse) if options.get("return_lse") else out

    def layout(batch, heads, **others):
        kv = P(batch, None, heads if kv_heads > 1 else None)
        operands = {"query": P(batch, None, heads), "key": kv, "value": kv, "bias": P(None, heads), "sinks": P(heads)}
        operands |= {"key_lengths": P(batch), "segment_ids": P(batch)}
        results = (P(batch, None, heads),) * len(dtypes) if len(dtypes) > 1 else P(batch, None, heads)
        sums = 0  # gradients of what all sequences share, and of one head of key that devices share
        if batch:
            sums += HEADS * ("sinks" in extra) + HEADS * TIME * TIME * ("bias" in extra)
        if heads and kv_heads == 1:
            sums += 2 * SEQUENCES * TIME * HEAD_DIM
        return Layout(operands, results, options={}, small={"all-reduce": sums} if sums else {}, **others)

    every = {
        "batch": layout("data", None, own=("data",)),
        "heads": layout(None, "model", own=("model",)),
        "batch and heads": layout("data", "model", own=("data",), reference=True),
        "batch over both": layout(("data", "model"), None),
    }
    gradients = [name for name in draw(np.random.default_rng(0)) if name not in ("key_lengths", "segment_ids")]
    return Operation(
        name=f"attention, {name}",
        draw=draw,
        call=functools.partial(ops.attention, **options),
        oracle=oracle,
        dtypes=dtypes,
        differentiable=tuple(gradients),
        refuses={"native": "use implementation='reference'"},
        layouts={name: every[name] for name in layouts},
        without={"implementations": "the native one is cuDNN, which no CPU has"},
        **fields,
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
        return Layout({"x": P(rows, cols)}, results, options={"amax_axis": {"rows": rows, "cols": cols}}, **options)

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
        return Layout(operands, results, options={"amax_axis": {"rows": rows, "cols": cols}}, **options)

    return Operation(
        name=f"gated_activation, {kind}",
        draw=draw_gate_and_up,
        call=functools.partial(
            ops.gated_activation,
            activation=ops.Activation("relu", limit=3.0, offset=1.0),
            quantization=quantization,
            with_amax=True,
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


# ------------------------------------------------------------------------------------------------------- grouped GEMMs

GROUPED_ROWS, GROUPS = 96, 3


def draw_sizes(rng):
    """Of groups that leave a tail of rows; sometimes empty ones."""
    return jnp.asarray(rng.multinomial(GROUPED_ROWS - 10, rng.dirichlet(np.ones(GROUPS))), jnp.int32)


def group_of_rows(group_sizes, count=GROUPED_ROWS):
    """[rows, groups], 1.0 where a row is in a group."""
    ends = jnp.cumsum(group_sizes)
    rows = jnp.arange(count, dtype=ends.dtype)[:, None]
    return ((rows < ends[None]) & (rows >= (ends - group_sizes)[None])).astype(float)


def ragged_product(lhs, rhs, group_sizes):
    return jnp.einsum("rk,gkn,rg->rn", lhs, rhs, group_of_rows(group_sizes).astype(lhs.dtype))


RAGGED_DOT = Operation(
    name="ragged_dot",
    draw=lambda rng: {
        "lhs": normal(rng, GROUPED_ROWS, 128),
        "rhs": normal(rng, GROUPS, 128, 64),
        "group_sizes": draw_sizes(rng),
    },
    call=ops.ragged_dot,
    oracle=ragged_product,
    dtypes=("float32",),
    differentiable=("lhs", "rhs"),
    refuses={"native": "use implementation='reference'"},
    layouts={
        "n": Layout(
            {"rhs": P(None, None, "model")}, P(None, "model"), (("all-reduce", GROUPED_ROWS * 128),), options={}
        ),
        "k": Layout({"lhs": P(None, "model"), "rhs": P(None, "model")}, P(), (("all-reduce", GROUPED_ROWS * 64),)),
        "k and n": Layout(
            {"lhs": P(None, "data"), "rhs": P(None, "data", "model")},
            P(None, "model"),
            (("all-reduce", GROUPED_ROWS * 32), ("all-reduce", GROUPED_ROWS * 64)),
            reference=True,
        ),
        "nothing": Layout({}, options={}),
    },
)


def grouped_gemm(kind, form, *, dtype="float32", **fields):
    """The three products of a layer of experts on quantized operands, with a bias or an accumulator."""
    rows, k, n = 256 if form == "wgrad" else GROUPED_ROWS, 512, 512

    def draw(rng):
        lhs, rhs = grouped_oracle.random_operands(rng, rows, k, n, GROUPS, kind, form)
        if form == "wgrad":
            operands = {"lhs": lhs.without_data(), "rhs": rhs.without_data(), "group_sizes": draw_sizes(rng)}
            return operands | {"accumulator": normal(rng, GROUPS, k, n, scale=9.0)}
        lhs, rhs = lhs.without_transposed(), rhs.without_data() if form == "forward" else rhs.without_transposed()
        return {"lhs": lhs, "rhs": rhs, "group_sizes": draw_sizes(rng), "bias": normal(rng, GROUPS, n)}

    def call(**operands):
        return ops.grouped_gemm(**operands, **grouped_oracle.options_of(form), out_dtype=dtype)

    def oracle(lhs, rhs, group_sizes, **others):
        return grouped_oracle.product(form, lhs, rhs, group_sizes, **others)

    def layout(over_n, over_k, **options):
        scales = {"row": (P(), P(None, over_n)), "tensor": (P(), P())}
        if form == "wgrad":
            lhs_scales, rhs_scales = {**scales, "row": (P(over_k), P(over_n)), "block": (P(None, over_k), P(over_n))}[
                kind
            ]
            lhs, rhs, result = P(over_k), P(over_n), P(None, over_k, over_n)
        else:
            lhs_scales, rhs_scales = {**scales, "block": (P(over_k), P(None, over_n, over_k))}[kind]
            lhs, rhs, result = P(None, over_k), P(None, over_n, over_k), P(None, over_n)
        operands = {"lhs": (lhs, lhs_scales), "rhs": (rhs, rhs_scales)}
        operands |= {"bias": P(None, over_n)} if form != "wgrad" else {"accumulator": result}
        summed = form != "wgrad" and over_k
        collectives = (("all-reduce", rows * n // (2 if over_n else 1)),) if summed else ()
        return Layout(operands, result, collectives, options=None if summed else {}, **options)

    return Operation(
        name=f"grouped_gemm, {kind}, {form}",
        draw=draw,
        call=call,
        oracle=oracle,
        dtypes=(dtype,),
        tolerance=(tolerance_of(dtype, kind), None),
        refuses={"native": r"no derivatives.*te_grouped_gemm.*use implementation='reference'"},
        donates=("accumulator",) if form == "wgrad" else (),
        layouts={
            "n": layout("model", None),
            "k": layout(None, "data"),
            "k and n": layout("model", "data", reference=True),
        },
        **fields,
    )


def grouped_dense(name, recipe, *, dtype="float32", accumulator=False, **fields):
    """A linear layer of experts."""
    rows, inner, outer = 128 * GROUPS, 256, 256
    delayed = isinstance(recipe, DelayedScaling)
    tolerance = (None, None) if recipe is None else (0.055, 0.085)  # what FP8 costs on normal data

    def draw(rng):
        operands = {
            "x": normal(rng, rows, inner, dtype=dtype),
            "kernel": normal(rng, GROUPS, inner, outer, dtype=dtype, scale=inner**-0.5),
            "group_sizes": jnp.asarray(128 * rng.multinomial(GROUPS - 1, np.ones(GROUPS) / GROUPS), jnp.int32),
            "bias": normal(rng, GROUPS, outer),
        }
        if accumulator:
            operands["wgrad_accumulator"] = normal(rng, GROUPS, inner, outer, scale=20.0)
        if delayed:
            operands["scaling_state"] = warm(recipe, 9.0, 0.6, 9.0)
        return operands

    def oracle(x, kernel, group_sizes, bias, **_):
        if accumulator:
            kernel = jax.lax.stop_gradient(kernel)
        mask = group_of_rows(group_sizes, rows).astype(x.dtype)
        return jnp.einsum("rk,gkn,rg->rn", x, kernel, mask) + mask @ bias.astype(x.dtype)

    def next_values(operands, cotangents):
        mask = np.asarray(group_of_rows(operands["group_sizes"], rows))
        x, dy = (np.asarray(a).astype(np.float64) for a in (operands["x"], cotangents))
        if delayed:
            in_groups = mask.any(axis=1)
            amaxes = (np.abs(a).max(initial=0) for a in (x[in_groups], np.asarray(operands["kernel"]), dy[in_groups]))
            return {"scaling_state": observed(operands["scaling_state"], *amaxes)}
        wgrad = np.einsum("rk,rn,rg->gkn", x, dy, mask, optimize=True)
        return {"wgrad_accumulator": np.asarray(operands["wgrad_accumulator"], np.float64) + wgrad}

    more = ("wgrad_accumulator",) * accumulator + ("scaling_state",) * delayed
    return Operation(
        name=f"grouped_dense, {name}",
        draw=draw,
        call=functools.partial(ops.grouped_dense, recipe=recipe),
        oracle=oracle,
        dtypes=(dtype,),
        tolerance=tolerance,
        differentiable=("x", "kernel", "bias", *more),
        next_values=next_values if more else None,
        refuses=dict.fromkeys(("native", "reference"), "grouped_dense"),
        linear=("bias",),
        policy=None if recipe is None else checkpoint_policies.save_fp8_operands,
        donates=("wgrad_accumulator",) if accumulator else (),
        unshared=("wgrad_accumulator", "scaling_state"),
        merged={"scaling_state": largest} if delayed else {},
        layouts={
            "column parallel": Layout(
                {"kernel": P(None, None, "model"), "bias": P(None, "model"),
                 "wgrad_accumulator": P(None, None, "model")},
                P(None, "model"), (("all-reduce", rows * inner),), options={},
            ),
            "row parallel": Layout(
                {"x": P(None, "model"), "kernel": P(None, "model"), "wgrad_accumulator": P(None, "model")},
                P(), (("all-reduce", rows * outer),),
            ),
            "nothing": Layout({}, options={}),
        },
        small={"all-reduce": 8},
        **fields,
    )  # fmt: skip


def grouped_dense_of_several(name, recipe, **fields):
    """Two kernels, as gate and up of experts, one of them with a bias. dx is one product."""
    one = grouped_dense(name, recipe, **fields)

    def draw(rng):
        operands = one.draw(rng)
        kernel, bias = operands["kernel"], operands["bias"]
        return operands | {"kernel": (kernel, one.draw(rng)["kernel"]), "bias": (None, bias)}

    def oracle(kernel, bias, **others):
        first, second = kernel
        return one.oracle(kernel=first, bias=jnp.zeros_like(bias[1]), **others), one.oracle(
            kernel=second, bias=bias[1], **others
        )

    return dataclasses.replace(
        one,
        name=f"grouped_dense of several kernels, {name}",
        draw=draw,
        oracle=oracle,
        dtypes=one.dtypes * 2,
        layouts={name: one.layouts[name] for name in ("column parallel", "nothing")},
    )


EXPERT_TOKENS, TOP_K = (2, 40), 2


def draw_choices(rng):
    """Distinct experts of each token."""
    chosen = np.argsort(rng.random((*EXPERT_TOKENS, GROUPS)), axis=-1)[..., :TOP_K]
    return jax.device_put(np.asarray(chosen, jnp.int32))


def experts_mlp(name, recipe, **fields):
    """Gated MLPs of experts: tokens are gathered where they are quantized, and weighted before the last product."""
    inner, hidden, outer = 128, 256, 128

    def draw(rng):
        shapes = (inner, hidden), (inner, hidden), (hidden, outer)
        return {
            "x": normal(rng, *EXPERT_TOKENS, inner),
            "weights": jnp.asarray(rng.uniform(0.1, 1.0, (*EXPERT_TOKENS, TOP_K)), jnp.float32),
            "experts": draw_choices(rng),
            "kernel": tuple(normal(rng, GROUPS, *shape, scale=shape[0] ** -0.5) for shape in shapes),
        }

    def call(x, weights, experts, kernel, **options):
        permutation = ops.group_by_expert(experts, GROUPS, align=128)
        return fused_experts_mlp(
            x, weights, permutation.group_sizes, permutation, kernel, recipe=recipe, activation=ops.Activation("silu"),
            wgrad_accumulator=(None,) * 3, accumulate=True, **{"implementation": None, **options},
        )  # fmt: skip

    def oracle(x, weights, experts, kernel):
        gate, up, down = kernel
        chosen = jnp.einsum("btk,btke->bte", weights, jax.nn.one_hot(experts, GROUPS, dtype=x.dtype))
        h = jax.nn.silu(jnp.einsum("bti,eih->bteh", x, gate)) * jnp.einsum("bti,eih->bteh", x, up)
        return jnp.einsum("bteh,eho,bte->bto", h, down, chosen)

    return Operation(
        name=f"experts_mlp, {name}",
        draw=draw,
        call=call,
        oracle=oracle,
        dtypes=("float32",),
        tolerance=(0.09, 0.15),
        differentiable=("x", "weights", "kernel"),
        refuses=dict.fromkeys(("native", "reference"), "grouped_dense"),
        policy=jax.checkpoint_policies.save_only_these_names("te_moe_preactivation", "te_dense_kernel"),
        layouts={"nothing": Layout({}, options={})},
        without=checked_by("te_jax.layers.moe"),
        **fields,
    )


# On a GPU there is no kernel of float32, which these have.
GROUPED = (
    []
    if jax.default_backend() == "gpu"
    else [
        RAGGED_DOT,
        grouped_gemm("block", "forward", variant=True),
        grouped_gemm("row", "dgrad", dtype="bfloat16", variant=True),
        grouped_gemm("block", "wgrad", variant=True),
        grouped_dense("block", BlockScaling()),
        grouped_dense("none, accumulator", None, dtype="bfloat16", accumulator=True, variant=True),
        with_kernels_transposed(grouped_dense("block", BlockScaling(), variant=True)),
        grouped_dense("delayed", DelayedScaling(history_len=3), variant=True),
        with_x_quantized(grouped_dense("block", BlockScaling(), variant=True), BlockScaling()),
        grouped_dense_of_several("block", BlockScaling(), variant=True),
        dataclasses.replace(
            grouped_dense(
                "products, forward and wgrad", products(forward=BlockScaling(), wgrad=RowwiseScaling()), variant=True
            ),
            policy=None,
        ),
        experts_mlp("block", BlockScaling(), variant=True),
    ]
)


# -------------------------------------------------------------------------------------------------- router, permutation

EXPERTS, ROUTING = 8, {"top_k": 2, "score": "sigmoid", "num_groups": 4, "top_groups": 2, "scaling_factor": 2.5}
BY_XLA = {"implementations": "XLA computes it"}


def route(logits, expert_bias, implementation=None):
    del implementation
    return ops.router(logits, expert_bias=expert_bias, **ROUTING).weights


def weights_of_chosen(logits, expert_bias):
    """Of two groups with the highest experts, the highest of all, one from each group or both from one."""
    scores = jax.nn.sigmoid(logits)
    grouped = (scores + expert_bias[None, None]).reshape(*logits.shape[:-1], 4, 2)
    best = jax.lax.top_k(jnp.max(grouped, axis=-1), 2)[1]
    kept = jnp.any(best[..., None] == jnp.arange(4, dtype=best.dtype)[None, None, None], axis=-2)[..., None]
    chosen = jax.lax.top_k(jnp.where(kept, grouped, -jnp.inf).reshape(logits.shape), 2)[1]
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    return 2.5 * weights / jnp.sum(weights, axis=-1, keepdims=True)


ROUTER = Operation(
    name="router",
    draw=lambda rng: {"logits": normal(rng, 8, 16, EXPERTS), "expert_bias": normal(rng, EXPERTS, scale=0.1)},
    call=route,
    oracle=weights_of_chosen,
    dtypes=("float32",),
    differentiable=("logits",),
    layouts={
        "tokens": Layout({"logits": P("data", "model")}, P("data", "model"), options={}, own=("data", "model")),
        "time": Layout({"logits": P(None, "model")}, P(None, "model"), options={}),
    },
    small={"all-gather": 60 * 8 * 16},  # XLA gathers what the top_k of split tokens reads
    without=BY_XLA,
)


def draw_tokens(rng):
    return {
        "x": normal(rng, *EXPERT_TOKENS, 64),
        "weights": jnp.asarray(rng.uniform(0.1, 1.0, (*EXPERT_TOKENS, TOP_K)), jnp.float32),
        "experts": draw_choices(rng),
        "factors": (normal(rng, GROUPS),),
    }


def through_rows(x, weights, experts, factors, implementation=None):
    """Each expert multiplies its rows by a factor."""
    del implementation
    permutation = ops.group_by_expert(experts, GROUPS)
    rows = ops.permute(x, permutation)
    of_rows = jnp.repeat(factors[0], permutation.group_sizes, total_repeat_length=len(rows))
    return ops.unpermute(rows * of_rows[:, None], permutation, weights)


def without_rows(x, weights, experts, factors):
    chosen = jax.nn.one_hot(experts, GROUPS, dtype=x.dtype)
    return x * jnp.einsum("btk,btke,e->bt", weights, chosen, factors[0])[..., None]


PERMUTE = Operation(
    name="permute and unpermute",
    draw=draw_tokens,
    call=through_rows,
    oracle=without_rows,
    dtypes=("float32",),
    differentiable=("x", "weights", "factors"),
    layouts={
        "features": Layout({"x": P(None, None, "model")}, P(None, None, "model"), options={}),
        "nothing": Layout({}, options={}),
    },
    small={"all-reduce": 2 * math.prod(EXPERT_TOKENS) * TOP_K},  # gradients of the weights and of every row's factor
    without=BY_XLA | {"dtypes": "permute takes any"},
)


# ------------------------------------------------------------------------------------------------ rms_norm, layer_norm


FEATURES = 192
ROWS_OF_NORM = {
    "rows": (P("data"), {"options": {}, "own": ("data",), "reference": True}),
    "rows over both": (P(("data", "model")), {"options": {}}),
    "rows and columns of rows": (P("data", "model"), {"options": {}}),
    "columns of rows": (P(None, "model"), {"options": {}}),
    "nothing": (P(), {}),
}


def norm(call, oracle, *, dtype="float32", residual=False, bias=False, **fields):
    """A norm of rows, with all operands it can have."""

    def draw(rng):
        operands = {"x": normal(rng, 4, 8, FEATURES, dtype=dtype), "scale": normal(rng, FEATURES, dtype=dtype)}
        if bias:
            operands["bias"] = normal(rng, FEATURES)
        if residual:
            operands["residual"] = normal(rng, 4, 8, FEATURES, dtype=dtype)
        return operands

    name = f"{call.__name__}, {'residual' if residual else 'plain'}"
    return Operation(
        name=name,
        draw=draw,
        call=call,
        oracle=oracle,
        dtypes=(dtype,) * (2 if residual else 1),
        differentiable=tuple(draw(np.random.default_rng(0))),
        refuses={"native": "use implementation='reference'"},
        linear=("bias",),
        layouts={
            name: Layout({"x": rows, "residual": rows}, rows, **options)
            for name, (rows, options) in ROWS_OF_NORM.items()
        },
        small={"all-reduce": 2 * FEATURES},  # gradients of scale and bias
        **fields,
    )


def rms_norm_of(x, scale, residual):
    total = x + residual
    return total * jax.lax.rsqrt(jnp.mean(total**2, axis=-1, keepdims=True) + 1e-6) * scale[None, None], total


def layer_norm_of(x, scale, bias):
    centered = x - jnp.mean(x, axis=-1, keepdims=True)
    rstd = jax.lax.rsqrt(jnp.mean(centered**2, axis=-1, keepdims=True) + 1e-6)
    return centered * rstd * scale[None, None] + bias[None, None]


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
    if isinstance(recipe, RowwiseScaling | BlockScaling | ProductRecipes):
        small = dict.fromkeys(("all-reduce", "all-gather"), 2 * (TOKENS + IN + OUT))
    if isinstance(recipe, MXFP8Scaling):
        small |= {"all-gather": 2 * IN * OUT // 32}  # the scales of both copies, with FSDP
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
        agreement=2e-2 if bias and recipe else 5e-3 if dtype == "bfloat16" else FP8_SUMS if recipe else None,
        differentiable=("x", *named),
        next_values=next_values if accumulator or delayed else None,
        refuses=dict.fromkeys(("native", "reference"), once) if recipe or accumulator else {},
        policy=checkpoint_policies.save_fp8_operands_and_preactivations if recipe else None,
        donates=("wgrad_accumulator",) if accumulator else (),
        unshared=("wgrad_accumulator", "scaling_state"),
        merged={"scaling_state": largest} if delayed else {},
        layouts={layout: dense_layout(layout, recipe, small, accumulator) for layout in layouts},
        left_to_xla=recipe is None,
        **fields,
    )


def dense_layout(name, recipe, small, accumulator):
    x, kernel, y, collectives = DENSE_LAYOUTS[name]
    (out,) = (*y, None, None)[2:3]
    if GATHERED in collectives and (accumulator or recipe is None):
        # The mesh axis of the accumulator is that of the tokens; and XLA may gather a plain kernel for both products.
        small = small | {"all-gather": IN * OUT}
        collectives = collectives[1:] if recipe is None else collectives
    return Layout(
        {"x": x, "kernel": kernel, "bias": P(out), "wgrad_accumulator": kernel}, y, tuple(collectives), small,
        own=() if accumulator else OWN.get(name, ()),  # devices cannot share one
        reference=name == "row parallel",
    )  # fmt: skip


def dense_of_several(name, recipe, layouts, **fields):
    """A layer with two kernels of the same size, one of them with a bias."""
    one = dense(name, recipe, layouts, **fields)

    def draw(rng):
        operands = {name: x if name == "x" else (x, _drawn_again(rng, x)) for name, x in one.draw(rng).items()}
        return operands | {"bias": (None, normal(rng, OUT))}

    def oracle(x, kernel, bias, **_):
        return jnp.matmul(x, kernel[0]), jnp.matmul(x, kernel[1]) + bias[1][None, None]

    def next_values(operands, cotangents):
        parts = ({name: x if name == "x" else x[i] for name, x in operands.items()} for i in range(2))
        values = [one.next_values(part, dy) for part, dy in zip(parts, cotangents, strict=True)]
        return {name: tuple(value[name] for value in values) for name in values[0]}

    def layout(name):
        single = one.layouts[name]
        small = {kind: 2 * size + OUT for kind, size in single.small.items()}  # and the gradient of the bias
        # With parts of their own along "model", devices sum both products of dx before they exchange it.
        own = tuple(axis for axis in single.own if axis == "data")
        collectives = list(single.collectives * 2)
        if name == "column parallel" and isinstance(recipe, BlockScaling):
            collectives.remove(("all-reduce", TOKENS // 2 * IN))  # one product for the gradient of x
        return dataclasses.replace(single, collectives=tuple(collectives), small=small, own=own)

    return dataclasses.replace(
        one,
        name=f"dense of several kernels, {name}",
        draw=draw,
        oracle=oracle,
        dtypes=one.dtypes * 2,
        differentiable=(*one.differentiable, "bias"),
        linear=("bias",),
        next_values=one.next_values and next_values,
        layouts={name: layout(name) for name in layouts},
    )


def with_kernels_quantized(one, recipe, amax_axis=None):
    """A layer with an accumulator, whose kernels come in FP8: all microbatches use what was quantized once."""

    def call(kernel, implementation=None, **others):
        quantization = recipe.quantization("kernel")
        options = {"amax_axis": amax_axis, "implementation": implementation}
        quantize = functools.partial(ops.quantize, quantization=quantization, **options)
        return one.call(kernel=jax.tree.map(quantize, kernel), implementation=implementation, **others)

    # It is quantized outside of what is computed again.
    name = one.name if "quantized" in one.name else f"{one.name} of a quantized kernel"
    without = one.without | checked_by("quantize")
    return dataclasses.replace(one, name=name, call=call, policy=None, without=without)


def by_xla(one, **fields):
    """A layer that XLA multiplies in FP8, unless another implementation is named."""

    def call(implementation=None, **operands):
        return one.call(**operands, implementation=implementation or "xla")

    # No kernels run again under remat.
    given = {"variant": True, "left_to_xla": True, "policy": None, "agreement": 5e-3, **fields}
    return dataclasses.replace(one, name=f"{one.name}, by XLA", call=call, **given)


def _drawn_again(rng, x):
    return normal(rng, IN, OUT, scale=IN**-0.5) if isinstance(x, jax.Array) else x


def dense_of_norm(name, recipe, **fields):
    """A layer whose x leaves a norm, which adds a residual, in FP8."""
    one = dense(name, recipe, ("data parallel", "sequence parallel"))

    def draw(rng):
        more = {"residual": normal(rng, *BATCH, IN), "scale": normal(rng, IN)}
        return one.draw(rng) | more

    def call(x, residual, scale, kernel, implementation=None):
        quantization = recipe.quantization("activation")
        x8, total = ops.rms_norm(
            x, scale, residual=residual, quantization=quantization, implementation=implementation
        )  # fmt: skip
        return one.call(x8, kernel, implementation=implementation), total

    def oracle(x, residual, scale, kernel):
        y, total = rms_norm_of(x, scale, residual)
        return jnp.matmul(y, kernel), total

    def layout(name):
        single = one.layouts[name]
        tokens = single.operands["x"]
        small = single.small | {"all-reduce": single.small["all-reduce"] + IN}  # the gradient of scale
        return dataclasses.replace(single, operands={**single.operands, "residual": tokens}, small=small)

    refused = "|".join((one.refuses["native"], "use implementation='reference'", "quantize has no derivative"))
    return dataclasses.replace(
        one,
        name=f"dense of rms_norm, {name}",
        draw=draw,
        call=call,
        oracle=oracle,
        dtypes=one.dtypes * 2,
        differentiable=("x", "kernel", "residual", "scale"),
        refuses=dict.fromkeys(one.refuses, refused),
        policy=None,
        layouts={name: layout(name) for name in one.layouts},
        **fields,
    )


HIDDEN = 256
MLP_LAYOUTS = {
    "data parallel": (P("data"), (P(), P(), P()), [("all-reduce", IN * HIDDEN)] * 2 + [("all-reduce", HIDDEN * OUT)]),
    # Column parallel up to the activation, row parallel after it.
    "tensor parallel": (
        P("data"),
        (P(None, "model"), P(None, "model"), P("model")),
        [("all-reduce", IN * HIDDEN // 2)] * 2
        + [("all-reduce", HIDDEN // 2 * OUT), ("all-reduce", TOKENS // 2 * OUT)]
        + [("all-reduce", TOKENS // 2 * IN)] * 2,
    ),
}


def gated_mlp(name, recipe, *, accumulator=False, **fields):
    """A gated MLP; `accumulator` gives it three for the gradients of its kernels."""

    def draw(rng):
        shapes = (IN, HIDDEN), (IN, HIDDEN), (HIDDEN, OUT)
        operands = {
            "x": normal(rng, *BATCH, IN),
            "kernel": tuple(normal(rng, *shape, scale=shape[0] ** -0.5) for shape in shapes),
        }
        if accumulator:
            operands["wgrad_accumulator"] = tuple(normal(rng, *shape, scale=20.0) for shape in shapes)
        return operands

    def oracle(x, kernel, **_):
        gate, up, down = kernel
        return jnp.matmul(jax.nn.silu(jnp.matmul(x, gate)) * jnp.matmul(x, up), down)

    def next_values(operands, cotangents):
        _, vjp = jax.vjp(functools.partial(oracle, operands["x"]), operands["kernel"])
        (gradients,) = vjp(jnp.asarray(cotangents, jnp.float32))
        return {"wgrad_accumulator": jax.tree.map(jnp.add, operands["wgrad_accumulator"], gradients)}

    def layout(name, x, kernels, collectives):
        small = dict.fromkeys(("all-reduce", "all-gather"), 4 * (TOKENS + IN + HIDDEN + OUT))
        if name == "tensor parallel" and isinstance(recipe, BlockScaling):
            collectives = collectives[:-1]  # one product of gate and up for the gradient of x
        return Layout({"x": x, "kernel": kernels, "wgrad_accumulator": kernels}, x, tuple(collectives), small)

    return Operation(
        name=f"gated_mlp, {name}",
        draw=draw,
        call=functools.partial(ops.gated_mlp, recipe=recipe),
        oracle=oracle,
        dtypes=("float32",),
        tolerance=(0.09, 0.15),
        agreement=2e-2,  # where a sum over devices precedes the activation, its last bits decide how values are rounded
        differentiable=("x", "wgrad_accumulator" if accumulator else "kernel"),
        next_values=next_values if accumulator else None,
        refuses=dict.fromkeys(("native", "reference"), r"is differentiated once|use recipe=None"),
        policy=checkpoint_policies.save_fp8_operands_and_preactivations,
        donates=("wgrad_accumulator",) if accumulator else (),
        unshared=("wgrad_accumulator",),
        layouts={name: layout(name, *of) for name, of in MLP_LAYOUTS.items()},
        **fields,
    )


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


def all_gather_matmul_of_several(name, recipe, **fields):
    """Two kernels share one gather; one of them has a bias."""
    one = all_gather_matmul(name, recipe, **fields)
    (layout,) = one.layouts.values()

    def draw(rng):
        operands = one.draw(rng)
        kernel, bias = operands["kernel"], operands["bias"]
        return operands | {"kernel": (kernel, _drawn_again(rng, kernel)), "bias": (None, bias)}

    gather, scatter, wgrad = layout.collectives
    return dataclasses.replace(
        one,
        name=f"all_gather_matmul of several kernels, {name}",
        draw=draw,
        oracle=lambda x, kernel, bias: (jnp.matmul(x, kernel[0]), jnp.matmul(x, kernel[1]) + bias[1][None, None]),
        dtypes=one.dtypes * 2,
        layouts={
            "tensor and sequence parallel": dataclasses.replace(layout, collectives=(gather, scatter, wgrad, wgrad))
        },
    )


def gathered_once_more(one):
    """The same where the gradient of the kernel reads x by a recipe of its own."""
    ((name, layout),) = one.layouts.items()
    collectives = (*layout.collectives, ("all-gather", SEQUENCE * IN))
    return dataclasses.replace(one, layouts={name: dataclasses.replace(layout, collectives=collectives)})


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


def with_accumulator(one):
    """The same with an accumulator, which takes the gradient of the kernel; no axis splits sequences then, over which
    devices would have to sum it."""
    name, layout = one.name.split(",")[0], next(iter(one.layouts.values()))
    gathers = name == "all_gather_matmul"

    def whole(specs):
        return P(None, *specs[1:])

    def next_values(operands, cotangents):
        dkernel = np.einsum("bti,bto->io", *(np.asarray(a, np.float64) for a in (operands["x"], cotangents)))
        return {"wgrad_accumulator": operands["wgrad_accumulator"] + dkernel}

    rows = 2 * SEQUENCE
    widths = (IN, IN) if gathers else (OUT, OUT)
    kinds = ("all-gather", "all-reduce") if gathers else ("all-reduce", "all-gather")
    layout = Layout(
        {**layout.operands, "x": whole(layout.operands["x"]), "wgrad_accumulator": layout.operands["kernel"]},
        whole(layout.results),
        tuple((kind, rows * width) for kind, width in zip(kinds, widths, strict=True)),
        options={},
    )
    return dataclasses.replace(
        one,
        name=f"{name}, accumulator",
        draw=lambda rng: one.draw(rng) | {"wgrad_accumulator": normal(rng, IN, OUT, scale=20.0)},
        oracle=lambda wgrad_accumulator, **others: one.oracle(**others),
        differentiable=("x", "wgrad_accumulator", "bias"),
        next_values=next_values,
        refuses=dict.fromkeys(("native", "reference"), r"is differentiated once"),
        donates=("wgrad_accumulator",),
        unshared=("wgrad_accumulator",),
        layouts={"tensor and sequence parallel": layout},
    )


def with_delayed_scaling(one, recipe):
    """The same with the state of delayed scaling, which all devices share."""
    name, (layout,) = one.name.split(",")[0], one.layouts.values()

    def next_values(operands, cotangents):
        amaxes = (np.abs(a).max() for a in (operands["x"], operands["kernel"], cotangents))
        return {"scaling_state": observed(operands["scaling_state"], *amaxes)}

    return dataclasses.replace(
        one,
        name=f"{name}, delayed",
        draw=lambda rng: one.draw(rng) | {"scaling_state": warm(recipe, 9.0, 0.6, 9.0)},
        call=functools.partial(one.call, recipe=recipe),
        oracle=lambda scaling_state, **others: one.oracle(**others),
        differentiable=(*one.differentiable, "scaling_state"),
        next_values=next_values,
        unshared=("scaling_state",),
        merged={"scaling_state": largest},
        layouts={
            "tensor and sequence parallel": dataclasses.replace(
                layout, operands={**layout.operands, "scaling_state": P()}
            )
        },
    )


def collective_gated_mlp(name, recipe, **fields):
    def draw(rng):
        shapes = (IN, HIDDEN), (IN, HIDDEN), (HIDDEN, OUT)
        kernels = tuple(normal(rng, *shape, scale=shape[0] ** -0.5) for shape in shapes)
        return {"x": normal(rng, 2, SEQUENCE, IN), "kernel": kernels}

    def oracle(x, kernel):
        gate, up, down = kernel
        return jnp.matmul(jax.nn.silu(jnp.matmul(x, gate)) * jnp.matmul(x, up), down)

    columns, rows = P(None, "model"), P("model")
    exchanged = [("all-gather", SEQUENCE * IN), ("all-reduce", SEQUENCE * OUT)]
    exchanged += [("all-gather", SEQUENCE * OUT), ("all-reduce", SEQUENCE * IN)]
    gradients = [("all-reduce", IN * HIDDEN // 2)] * 2 + [("all-reduce", HIDDEN * OUT // 2)]
    layout = Layout(
        {"x": P("data", "model"), "kernel": (columns, columns, rows)},
        P("data", "model"),
        (*exchanged, *gradients),
        options={},
    )
    return Operation(
        name=f"parallel.gated_mlp, {name}",
        draw=draw,
        call=functools.partial(parallel.gated_mlp, axis_name="model", recipe=recipe),
        oracle=oracle,
        dtypes=("float32",),
        tolerance=(0.09, 0.15),
        agreement=2e-2,  # devices may sum in another order before the activation
        differentiable=("x", "kernel"),
        refuses=dict.fromkeys(("native", "reference"), "is differentiated once"),
        policy=jax.checkpoint_policies.save_only_these_names(
            "te_collective_activation", "te_collective_kernel", "te_collective_preactivation"
        ),
        layouts={"tensor and sequence parallel": layout},
        small={"all-reduce": 16},
        collective=True,
        without={"without_jit": "JAX finds no NaN inside an eager shard_map: it recurses"},
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
        agreement=FP8_SUMS if recipe else None,
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
    LINEAR_CROSS_ENTROPY,
    MEAN_LINEAR_CROSS_ENTROPY,
    attention("grouped, causal", 2, options={"causal": True}),
    attention(
        "window, bias, sinks, lengths, lse",
        4,
        options={"causal": True, "window": 5, "return_lse": True},
        extra=("bias", "sinks", "key_lengths"),
        variant=True,
    ),
    attention(
        "one head of key, segments, sinks", 1, options={"causal": True}, extra=("segment_ids", "sinks"), variant=True
    ),
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
    *GROUPED,
    ROUTER,
    PERMUTE,
    norm(ops.rms_norm, rms_norm_of, residual=True),
    norm(ops.layer_norm, layer_norm_of, dtype="bfloat16", bias=True, variant=True),
    dense("current", CURRENT, ("data parallel", "sequence parallel", *TENSOR, *FSDP)),
    dense("rowwise", RowwiseScaling(), TENSOR, variant=True),
    dense("block", BlockScaling(), (*TENSOR, *FSDP, "fsdp, column parallel"), dtype="bfloat16", variant=True),
    dense("delayed", DelayedScaling(history_len=3), (*TENSOR, "fsdp of columns", "fsdp, row parallel"), variant=True),
    dataclasses.replace(
        dense("mxfp8", MXFP8Scaling(), (*TENSOR, "fsdp of columns"), variant=True),
        left_to_xla=True,
        without={"derivatives_that_are_not_defined": "it has no native kernel, and the rule of rows that have"},
    ),
    dataclasses.replace(
        dense("products, forward", products(forward=CURRENT), TENSOR, variant=True),
        tolerance=(FORWARD, None),
        policy=None,
    ),
    dataclasses.replace(
        dense("products, gradients", products(dgrad=BlockScaling(), wgrad=CURRENT), TENSOR, variant=True),
        tolerance=(None, GRADIENT * 1.15),
        policy=None,
    ),
    dense("bias and gelu", CURRENT, TENSOR, bias=True, variant=True),
    dense("accumulator", CURRENT, (*TENSOR, *FSDP), accumulator=True, variant=True),
    with_kernels_quantized(
        dense("accumulator of a quantized kernel", CURRENT, TENSOR, accumulator=True, variant=True), CURRENT
    ),
    with_kernels_transposed(dense("block", BlockScaling(), TENSOR, variant=True)),
    dense_of_several("current", CURRENT, ("data parallel", *TENSOR, *FSDP), variant=True),
    dense_of_several("block", BlockScaling(), TENSOR, variant=True),
    dense_of_several("delayed", DelayedScaling(history_len=3), TENSOR, variant=True),
    with_x_quantized(
        dense("current", CURRENT, ("data parallel", "sequence parallel", *TENSOR, *FSDP), variant=True), CURRENT
    ),
    dense_of_norm("block", BlockScaling(), variant=True),
    dense_of_norm("current", CURRENT, variant=True),
    gated_mlp("block", BlockScaling()),
    gated_mlp("current", CURRENT, variant=True),
    with_kernels_quantized(
        gated_mlp("accumulators of quantized kernels", BlockScaling(), accumulator=True, variant=True), BlockScaling()
    ),
    with_kernels_transposed(gated_mlp("block", BlockScaling(), accumulator=True, variant=True)),
    dataclasses.replace(
        dense("current", CURRENT, TENSOR, variant=True),
        name="einsum, current",
        call=functools.partial(ops.einsum, "bti,io->bto", recipe=CURRENT),
    ),
    by_xla(dense("current", CURRENT, ("data parallel", *TENSOR), bias=True), agreement=2e-2),
    by_xla(dense_of_several("delayed", DelayedScaling(history_len=3), TENSOR)),
    dense("none", None, (*TENSOR, *FSDP), bias=True, variant=True),
    dense("none, accumulator", None, ("row parallel", *FSDP), dtype="bfloat16", accumulator=True, variant=True),
    all_gather_matmul("plain", None),
    all_gather_matmul("current", CURRENT, variant=True),
    all_gather_matmul_of_several("current", CURRENT, variant=True),
    matmul_reduce_scatter("plain", None, variant=True),
    dataclasses.replace(
        gathered_once_more(
            all_gather_matmul("products, gradients", products(dgrad=BlockScaling(), wgrad=CURRENT), variant=True)
        ),
        tolerance=(None, GRADIENT * 1.15),
        policy=None,
    ),
    dataclasses.replace(
        with_accumulator(matmul_reduce_scatter("products, forward", products(forward=CURRENT), variant=True)),
        name="matmul_reduce_scatter, products and accumulator",
        tolerance=(FORWARD, None),
        policy=None,
    ),
    with_accumulator(all_gather_matmul("current", CURRENT, variant=True)),
    matmul_reduce_scatter("current", CURRENT, variant=True),
    with_accumulator(matmul_reduce_scatter("current", CURRENT, variant=True)),
    with_kernels_transposed(all_gather_matmul("current", CURRENT, variant=True)),
    with_kernels_transposed(matmul_reduce_scatter("current", CURRENT, variant=True)),
    with_delayed_scaling(all_gather_matmul("current", CURRENT, variant=True), DelayedScaling(history_len=3)),
    with_delayed_scaling(matmul_reduce_scatter("current", CURRENT, variant=True), DelayedScaling(history_len=3)),
    with_x_quantized(all_gather_matmul("current", CURRENT, variant=True), CURRENT, "model"),
    with_x_quantized(matmul_reduce_scatter("current", CURRENT, variant=True), CURRENT, {"cols": "model"}),
    with_kernels_quantized(
        with_accumulator(all_gather_matmul("current", CURRENT, variant=True)), CURRENT, {"cols": "model"}
    ),
    with_kernels_quantized(with_accumulator(matmul_reduce_scatter("current", CURRENT, variant=True)), CURRENT, "model"),
    with_kernels_transposed(collective_gated_mlp("current", CURRENT, variant=True)),
    LINEAR_LOG_PROBS,
    LOG_PROBS_BY_KERNELS,
    LINEAR_TOKEN_LOSS,
    LINEAR_DIVERGENCE,
]
assert len({operation.name for operation in OPERATIONS}) == len(OPERATIONS), "two rows have one name"
