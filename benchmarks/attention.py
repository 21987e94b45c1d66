"""Causal attention of the Llama family, forward and with its gradients, of whole sequences and of packed documents.

In a case "…-4documents" each sequence has so many of them, and a token sees its own. Implementations:

- te_jax: `te_jax.ops.attention`, cuDNN's on a GPU; of documents with max_segments_per_seq, of as many as there are.
- te_jax_spare: of four times as many. te_jax_mask: with segment_ids alone, which become a mask.
- jax: `jax.nn.dot_product_attention`, by cuDNN on a GPU; of documents with a mask.
- te_jax_ring: `te_jax.parallel.ring_attention` of all devices of the host, which share the sequences, of one document.
- fa3: te_jax with implementation="fa3", FlashAttention 3 by the package dew-flash-attn-cu13; on Hopper alone.
- torch: `scaled_dot_product_attention` of torch, of documents its `varlen_attn`. torch_flex: its compiled
  `flex_attention`, with a block mask.

A time is that of all sequences, and FLOPs are those of scores that a token sees: 2 GEMMs forward and 5 backward. No
time is reported for results that are wrong, by their relative errors against float32, of the first sequence and the
query heads of its first key head.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import shapes
from benchmarks.harness import (
    Candidate,
    CaseResult,
    Checked,
    Family,
    Headline,
    Timing,
    calls_that_fit,
    compute_row,
    out_of_bounds,
    relative_error,
    run_operation,
    temporary_bytes,
)
from benchmarks.torch_peer import as_torch, torch_on_gpu
from te_jax import ops
from te_jax.parallel import context_order, ring_attention

IMPLEMENTATIONS = ("te_jax", "te_jax_spare", "te_jax_mask", "te_jax_ring", "jax", "fa3", "torch", "torch_flex")
OPERATIONS = {"forward": 2, "forward_backward": 7}
"""And how many GEMMs they have."""
_ERROR_BOUNDS = {"y_error": 0.01, "dquery_error": 0.02, "dkey_error": 0.02, "dvalue_error": 0.02}
_OF_DOCUMENTS = ("te_jax_spare", "te_jax_mask")

Operands = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""query, key, value, and the gradient of the result."""


def run_case(case: shapes.AttentionShape, implementations: Sequence[str], timing: Timing) -> CaseResult:
    """Measure one case with the named implementations; see `harness.Family.run_case`."""
    operands = _drawn(case)
    ids = jnp.asarray(np.tile(np.repeat(np.arange(len(case.documents)), case.documents), (case.batch, 1)), jnp.int32)
    expected = _expected(case, operands, ids)
    left_out = ("te_jax_ring",) if len(case.documents) > 1 else _OF_DOCUMENTS
    names = [name for name in implementations if name not in left_out]
    result = CaseResult()
    for operation, gemms in OPERATIONS.items():
        run_operation(
            {"case": case.name, "model": case.model, "operation": operation},
            names,
            timing,
            result,
            build=functools.partial(_build, case=case, backward=gemms > 2, operands=operands, ids=ids),
            errors=functools.partial(_checked, expected),
            row=functools.partial(_row, flops=gemms * 2 * case.scores * case.head_dim),
        )
    return result


def _row(candidate: Candidate, seconds: dict[str, list[float]], *, flops: int) -> dict[str, Any]:
    row = compute_row(seconds, candidate.name, flops=flops, peers=IMPLEMENTATIONS[1:], over="jax")
    return row | {"temporary_bytes": candidate.temporary_bytes}


def _drawn(case: shapes.AttentionShape) -> Operands:
    shapes_of = [(case.batch, case.sequence, heads, case.head_dim) for heads in (case.heads, *[case.kv_heads] * 2)]
    keys = jax.random.split(jax.random.key(0), 4)
    draw = jax.jit(functools.partial(jax.random.normal, dtype=jnp.bfloat16), static_argnums=1)
    found = [draw(key, shape) for key, shape in zip(keys, (*shapes_of, shapes_of[0]), strict=True)]
    return found[0], found[1], found[2], found[3]


# What is checked


def _parts(case: shapes.AttentionShape, results: Sequence[Any]) -> list[Any]:
    """The results of the first sequence for its first key head and the query heads that share it."""
    group = case.heads // case.kv_heads
    return [x[:1, :, : group if x.shape[2] == case.heads else 1] for x in results]


def _expected(case: shapes.AttentionShape, operands: Operands, ids: jax.Array) -> dict[str, np.ndarray]:
    query, key, value, dy = (x.astype(jnp.float32) for x in _parts(case, operands))

    @jax.jit
    def of_head(query: jax.Array, key: jax.Array, value: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        attend = functools.partial(ops.attention, causal=True, segment_ids=ids[:1], implementation="reference")
        y, vjp = jax.vjp(attend, query, key, value)
        return y, *vjp(dy)

    with jax.default_matmul_precision("highest"):  # one head after the other, for their scores
        heads = range(query.shape[2])
        found = [of_head(query[:, :, i : i + 1], key, value, dy[:, :, i : i + 1]) for i in heads]
    y, dquery, dkey, dvalue = (np.stack([np.asarray(x) for x in of_heads]) for of_heads in zip(*found, strict=True))
    joined = (np.concatenate(x, axis=2) for x in (y, dquery))
    return dict(zip(_ERROR_BOUNDS, (*joined, dkey.sum(0), dvalue.sum(0)), strict=True))


def _checked(expected: dict[str, np.ndarray], name: str, output: list[np.ndarray], _: Any) -> Checked:
    errors = {key: relative_error(x, expected[key]) for key, x in zip(expected, output, strict=False)}
    return errors, out_of_bounds(errors, _ERROR_BOUNDS)


# Implementations


def _build(name: str, case: shapes.AttentionShape, backward: bool, operands: Operands, ids: jax.Array) -> Candidate:
    if name.startswith("torch"):
        return _build_torch(name, case, backward, operands)
    order = np.arange(case.sequence)
    if name == "te_jax_ring":
        attend, operands, order = _shared(case, operands)
    else:
        attend = (_by_jax if name == "jax" else functools.partial(_by_te_jax, name))(case, ids)

    def forward(query: jax.Array, key: jax.Array, value: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        del dy
        return (attend(query, key, value),)

    def forward_backward(query: jax.Array, key: jax.Array, value: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        y, vjp = jax.vjp(attend, query, key, value)
        return y, *vjp(dy)

    compiled = jax.jit(forward_backward if backward else forward).lower(*operands).compile()
    return Candidate(
        name,
        compiled,
        lambda calls: [operands] * calls,
        most_calls=_most_calls(operands),
        temporary_bytes=temporary_bytes(compiled),
        read=lambda results: [np.asarray(x)[:, np.argsort(order)] for x in _parts(case, results)],
    )


def _shared(case: shapes.AttentionShape, operands: Operands) -> tuple[Callable[..., jax.Array], Operands, np.ndarray]:
    """Attention over all devices of the host, its operands there, and the order of their tokens."""
    devices = jax.local_devices()
    if len(devices) < 2:
        raise RuntimeError("it needs two devices")
    mesh, split = jax.sharding.Mesh(np.array(devices), ("context",)), PartitionSpec(None, "context")
    order = context_order(case.sequence, len(devices))
    ring = functools.partial(ring_attention, axis_name="context", implementation=_implementation())
    attend = jax.shard_map(ring, mesh=mesh, in_specs=(split,) * 3, out_specs=split)
    query, key, value, dy = (jax.device_put(x[:, order], NamedSharding(mesh, split)) for x in operands)
    return attend, (query, key, value, dy), order


def _implementation() -> Any:
    """None stands for a CPU's only one: on a GPU cuDNN is named, lest XLA's time be published as its own."""
    return "native" if jax.default_backend() == "gpu" else None


def _most_calls(operands: Operands) -> int:
    return calls_that_fit(sum(x.nbytes for x in operands))


def _by_te_jax(name: str, case: shapes.AttentionShape, ids: jax.Array) -> Callable[..., jax.Array]:
    options: dict[str, Any] = {"implementation": "fa3" if name == "fa3" else _implementation()}
    if (count := len(case.documents)) > 1:
        options["segment_ids"] = ids
        if name != "te_jax_mask":
            options["max_segments_per_seq"] = 4 * count if name == "te_jax_spare" else count
    return functools.partial(ops.attention, causal=True, **options)


def _by_jax(case: shapes.AttentionShape, ids: jax.Array) -> Callable[..., jax.Array]:
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    mask = ids[:, None, :, None] == ids[:, None, None, :] if len(case.documents) > 1 else None

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=True, implementation=implementation)

    return attend


def _offsets(case: shapes.AttentionShape) -> np.ndarray:
    """Where the documents of all sequences begin and end."""
    return np.cumsum([0, *case.documents * case.batch], dtype=np.int32)


def _build_torch(name: str, case: shapes.AttentionShape, backward: bool, operands: Operands) -> Candidate:
    torch = torch_on_gpu()
    tensors = [as_torch(x).requires_grad_(place < 3 and backward) for place, x in enumerate(operands)]
    attend = _torch_flex(torch, case) if name == "torch_flex" else _torch(torch, case)

    def call(query: Any, key: Any, value: Any, dy: Any) -> tuple[Any, ...]:
        y = attend(query, key, value)
        return (y, *torch.autograd.grad(y, (query, key, value), dy)) if backward else (y,)

    return Candidate(
        name,
        call,
        lambda calls: [tuple(tensors)] * calls,
        wait=lambda _: torch.cuda.synchronize(),
        most_calls=_most_calls(operands),
        read=lambda results: [x.detach().float().cpu().numpy() for x in _parts(case, results)],
    )


def _torch(torch: Any, case: shapes.AttentionShape) -> Callable[..., Any]:
    if len(case.documents) == 1:

        def attend(*operands: Any) -> Any:
            by_heads = (x.transpose(1, 2) for x in operands)
            return torch.nn.functional.scaled_dot_product_attention(
                *by_heads, is_causal=True, enable_gqa=True
            ).transpose(1, 2)

        return attend
    from torch.nn.attention.varlen import varlen_attn  # pyright: ignore[reportMissingImports]

    offsets = torch.as_tensor(_offsets(case), device="cuda")
    longest, group = max(case.documents), case.heads // case.kv_heads

    def packed(query: Any, key: Any, value: Any) -> Any:
        key, value = (x.repeat_interleave(group, dim=2) for x in (key, value))  # it has no grouped queries
        flat = (x.flatten(0, 1) for x in (query, key, value))
        return varlen_attn(*flat, offsets, offsets, longest, longest, window_size=(-1, 0)).unflatten(0, query.shape[:2])

    return packed


def _torch_flex(torch: Any, case: shapes.AttentionShape) -> Callable[..., Any]:
    from torch.nn.attention import flex_attention  # pyright: ignore[reportMissingImports]

    ids = torch.as_tensor(np.repeat(np.arange(len(case.documents)), case.documents), device="cuda")

    def sees(batch: Any, head: Any, t: Any, s: Any) -> Any:
        return (t >= s) & (ids[t] == ids[s])

    mask = flex_attention.create_block_mask(sees, None, None, case.sequence, case.sequence, device="cuda")
    run = torch.compile(flex_attention.flex_attention, dynamic=False)

    def attend(*operands: Any) -> Any:
        query, key, value = (x.transpose(1, 2) for x in operands)
        return run(query, key, value, block_mask=mask, enable_gqa=True).transpose(1, 2)

    return attend


FAMILY = Family(
    description="causal attention of whole sequences and of packed documents: forward, and with its gradients",
    cases={"gpu": shapes.ATTENTION_GPU, "cpu": shapes.ATTENTION_CPU},
    implementations=IMPLEMENTATIONS,
    peers=IMPLEMENTATIONS[1:],
    run_case=run_case,
    headline=Headline(
        operation="forward_backward",
        figure="time_over_jax",
        label="Attention with gradients, time as a multiple of jax.nn's by cuDNN",
        implementations=("te_jax", "te_jax_mask", "fa3", "torch", "torch_flex"),
    ),
)
