"""FlashAttention 3 on local arrays, by the library of the package dew-flash-attn-cu13: an option, never required.

The package's own function returns no log-sum-exp and loads kernels of other GPUs too, so its library is opened here,
and its four handlers are called. Each has two results that nobody reads: they are scratch.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from te_jax import native, sharding
from te_jax.native import cuda_libraries
from te_jax.native.extension import FA3_TARGETS
from te_jax.ops._fused_attention import Masks, Operands, Segments, gradient_of_sinks, with_sinks

_Type = tuple[tuple[int, ...], np.dtype]
"""Shape and dtype."""

PACKAGE = "dew-flash-attn-cu13"
MAX_HEAD_DIM = 256
_KNOWN = "0.3"  # version of the package: its handlers' operands are no public interface
_HANDLERS = {target: target.replace("te_jax_fa3_", "dew_flash3_mha_") for target in FA3_TARGETS}
# The backward pass has scratch for rows of query, and up to so many more behind each sequence.
_ROWS_OF_BLOCK = 128


# ------------------------------------------------------------------------------------------------- where it is no help


def problem(operands: Operands, masks: Masks, *, lse_cotangent: bool) -> str | None:
    """Why FlashAttention 3 cannot compute attention on these local arrays; None if it can.

    Args:
      operands: of attention, by name.
      masks: of attention.
      lse_cotangent: whether a cotangent of the log-sum-exp is among the operands of the gradients.
    """
    if (reason := missing()) is not None:
        return reason
    query, key = operands["query"], operands["key"]
    capability = native.compute_capability() if native.has_gpu() else None
    masked = {"bias", "query_lengths", "key_lengths"} & set(operands)
    if "query_segment_ids" in operands and masks.max_segments_per_seq is None:
        masked.add("segment_ids without max_segments_per_seq")
    for wrong, reason in (
        (capability not in (None, (9, 0)), "FlashAttention 3 is for compute capability 9.0"),
        (
            not all(isinstance(size, int) for size in (*query.shape, *key.shape)),
            f"query has shape {query.shape}, and FlashAttention 3 needs sizes that are known: export it for each size",
        ),
        (
            query.dtype not in (jnp.bfloat16, jnp.float16),
            f"query has dtype {query.dtype}, and FlashAttention 3 takes bfloat16 and float16: cast the operands",
        ),
        (masks.softcap is not None, f"softcap is {masks.softcap}, and FlashAttention 3 is called without"),
        (bool(masked), f"{' and '.join(sorted(masked))} are given, which FlashAttention 3 does not take"),
        (lse_cotangent, "FlashAttention 3 has no gradient through the log-sum-exp"),
    ):
        if wrong:
            return reason
    (*batch, t, heads, head_dim), s = query.shape, key.shape[-3]
    if head_dim > MAX_HEAD_DIM or head_dim % 8:
        return (
            f"query has a head_dim of {head_dim}, and FlashAttention 3 takes multiples of 8 up to {MAX_HEAD_DIM}: pad "
            "it with zeros"
        )
    if math.prod(batch) * t * s * heads * head_dim == 0:
        return f"query has shape {query.shape} and key {key.shape}, and FlashAttention 3 takes no empty arrays"
    if masks.causal and t != s:
        return f"query has {t} tokens and key {s}, and FlashAttention 3 counts them from the end with causal=True"
    return None


def is_here() -> bool:
    """Whether it is installed for this GPU. It is faster than cuDNN then (benchmarks/lab/attention.md)."""
    return native.has_gpu() and native.compute_capability() == (9, 0) and missing() is None


@functools.cache
def missing() -> str | None:
    """Why the library is not there; None if it is."""
    way_out = f"pip install {PACKAGE}"
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return f"FlashAttention 3 is not installed: {way_out}"
    if not version.startswith(f"{_KNOWN}."):
        return f"{PACKAGE} is {version}, of which te_jax knows {_KNOWN}: {way_out}=={_KNOWN}.*"
    try:
        _register()
    except (AttributeError, OSError) as error:
        return f"FlashAttention 3 of {PACKAGE} {version} cannot be loaded ({error}): {way_out} --force-reinstall"
    return None


@functools.cache
def _register() -> None:
    """Makes the library's handlers known to JAX. Raises OSError or AttributeError where there are none."""
    spec = importlib.util.find_spec("dew_flash_attn")
    folders = spec.submodule_search_locations or () if spec else ()
    cuda_libraries.load()
    library = ctypes.CDLL(str(next((Path(folder) / "libdew_flash_attn3.so" for folder in folders), "its library")))
    handlers = {target: jax.ffi.pycapsule(getattr(library, name)) for target, name in _HANDLERS.items()}
    for target, handler in handlers.items():
        jax.ffi.register_ffi_target(target, handler, platform="CUDA")


# --------------------------------------------------------------------------------------------------------------- calls


def forward(operands: Operands, masks: Masks) -> tuple[Array, Array]:
    """(output, float32 log-sum-exp [*batch, N, T]) of operands with any number of batch dimensions."""
    query, key, value = _folded(operands)
    batch, t, heads, _ = query.shape
    packed = _offsets(operands, masks, batch)
    rows = (heads, batch * t) if packed else (batch, heads, t)
    out, lse, *_ = _run(
        "fwd",
        [_type(_tokens(query, packed)), (rows, jnp.float32), *(((1,) * count, jnp.float32) for count in (4, 3))],
        *(_tokens(x, packed) for x in (query, key, value)),
        *packed,
        **_attributes(operands, masks, packed),
    )
    if packed:
        lse = jnp.swapaxes(lse.reshape(heads, batch, t), 0, 1)
    shape = operands["query"].shape
    return with_sinks(operands, out.reshape(shape), lse.reshape(*shape[:-3], heads, t))


def backward(
    operands: Operands, masks: Masks, out: Array, lse: Array, dout: Array, dlse: Array | None, wanted: tuple[str, ...]
) -> tuple[Array, ...]:
    """Gradients of the wanted operands. The log-sum-exp may be that of more keys than these, or of sinks."""
    assert dlse is None  # see `problem`
    query, key, value = _folded(operands)
    batch, t, heads, _ = query.shape
    packed = _offsets(operands, masks, batch)
    lse_of_rows = lse.reshape(batch, heads, t)
    if packed:
        lse_of_rows = jnp.swapaxes(lse_of_rows, 0, 1).reshape(heads, batch * t)
    sequences = packed[0].size - 1 if packed else batch
    scratch = (heads * (batch * t + _ROWS_OF_BLOCK * (sequences + 1)),), jnp.float32
    inputs = [_tokens(x, packed) for x in (query, key, value)]
    gradients: dict[str, Array] = {}
    gradients["query"], gradients["key"], gradients["value"], *_ = _run(
        "bwd",
        [*map(_type, inputs), scratch, scratch],
        _tokens(dout.reshape(query.shape), packed),
        *inputs,
        _tokens(out.reshape(query.shape), packed),
        lse_of_rows,
        *packed,
        **_attributes(operands, masks, packed),
    )
    gradients = {name: gradient.reshape(operands[name].shape) for name, gradient in gradients.items()}
    if "sinks" in wanted:
        gradients["sinks"] = gradient_of_sinks(operands, out, lse, dout, None)
    return tuple(gradients[name] for name in wanted)


def _folded(operands: Operands) -> list[Array]:
    """query, key and value with one batch dimension."""
    lead = operands["query"].shape[:-3]
    arrays = (operands[name] for name in ("query", "key", "value"))
    return [jnp.broadcast_to(x, (*lead, *x.shape[-3:])).reshape(-1, *x.shape[-3:]) for x in arrays]


def _offsets(operands: Operands, masks: Masks, batch: int) -> tuple[Array, ...]:
    """Where segments begin and end, of query and of key; nothing if each sequence is one."""
    if "query_segment_ids" not in operands or masks.max_segments_per_seq is None:
        return ()
    ids = operands["query_segment_ids"]
    lead = operands["query"].shape[:-3]
    ids = jnp.broadcast_to(ids, (*lead, ids.shape[-1])).reshape(batch, -1)
    offsets = Segments.of(ids, batch * masks.max_segments_per_seq).offsets
    return offsets, offsets


def _tokens(x: Array, packed: tuple[Array, ...]) -> Array:
    """As the library takes it: [B, T, N, H], or with segments [B · T, N, H]."""
    return x.reshape(-1, *x.shape[-2:]) if packed else x


def _type(x: Array) -> _Type:
    return x.shape, x.dtype


def _attributes(operands: Operands, masks: Masks, packed: tuple[Array, ...]) -> dict[str, np.generic | bool]:
    longest = {"max_seqlen": operands["query"].shape[-3], "max_seqlen_k": operands["key"].shape[-3]} if packed else {}
    window = {"window_size_left": -1 if masks.window is None else masks.window - 1}
    window["window_size_right"] = -1 if masks.window is None else 0
    return {
        "softmax_scale": np.float64(masks.scale),
        "is_causal": masks.causal,
        **{name: np.int64(value) for name, value in (longest | window).items()},
    }


def _run(direction: str, results: list[_Type], *operands: Array, **attributes: np.generic | bool) -> list[Array]:
    kind = "varlen_" * ("max_seqlen" in attributes)
    types = [sharding.result_type(shape, dtype, *operands) for shape, dtype in results]
    return [*jax.ffi.ffi_call(f"te_jax_fa3_{kind}{direction}", types)(*operands, **attributes)]
