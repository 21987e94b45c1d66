"""The decoder's pieces inside `shard_map`, for devices that share it as `te_jax.models.parallel` says."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from te_jax import sharding
from te_jax.layers.microbatches import AccumulatedKernel
from te_jax.models.config import DecoderConfig, Params, kernel_facts
from te_jax.models.parallel import TensorParallel, kernels_cut_by_fsdp, loop_specs
from te_jax.parallel.shards import over_devices
from te_jax.reference.softmax_cross_entropy import equals

_TIME_AXIS = 1
_NO_TARGET = -100  # `ignore_index` of `te_jax.ops.softmax_cross_entropy`


def enter(params: Params, tokens: Array, config: DecoderConfig, parallel: TensorParallel) -> Params:
    """This device's parameters, such that gradients of what all devices have are summed once.

    Raises:
      ValueError: this is no place for `parallel`, or it does not fit the decoder or the tokens.
    """
    parallel.check(config)
    axis = parallel.axis_name
    _, size = sharding.mapped_axes(axis, "parallel.axis_name")
    if size != parallel.size:
        raise ValueError(f"parallel.size is {parallel.size}, and the mesh has {size} devices along {axis!r}")
    if not sharding.tracked_axes((axis,)):
        raise ValueError(
            "parallel is given where JAX does not track what varies over devices, and gradients of what they share "
            "would not be summed: use shard_map with check_vma=True, its default"
        )
    if tokens.shape[_TIME_AXIS] % size:
        raise ValueError(
            f"tokens has shape {tokens.shape}, a time of {tokens.shape[_TIME_AXIS]}, which the {size} devices of "
            "`parallel` do not divide: pad it, with -100 for targets"
        )

    def varying(leaf: Any) -> Any:
        if isinstance(leaf, AccumulatedKernel):
            if parallel.batch_axes:  # a sum that all devices along these have cannot take the part of each
                return varying(leaf.added())
            # All devices count its uses alike.
            kernel, gradient = jax.tree.map(varying, (leaf.kernel, leaf.gradient))
            return dataclasses.replace(leaf, kernel=kernel, gradient=gradient)
        return jax.tree.map(lambda array: sharding.varying_over(array, frozenset((axis,))), leaf)

    # Here rather than where they are used, which may be in several places, and twice where blocks are recomputed.
    return jax.tree.map(varying, params, is_leaf=lambda leaf: isinstance(leaf, AccumulatedKernel))


def quantized_in_layers(config: DecoderConfig, parallel: TensorParallel) -> tuple[str, ...]:
    """The names of a block's kernels that cannot be quantized before devices take their parts."""
    parallel.check(config)
    left = ("key", "value") if config.num_kv_heads % parallel.size else ()
    facts, shapes = kernel_facts(config), config.kernel_shapes
    if facts.block_size > 1:
        names = [name for name in config.projections if len(shapes[name]) == 2]
        split = {name: shapes[name][0 if name in ("out", "down", "shared_down") else 1] for name in names}
        left += tuple(name for name, count in split.items() if count // parallel.size % facts.block_size)
    if parallel.fsdp is not None and not (facts.is_plain or facts.is_symmetric):
        # Each of the two copies has scales of its own, along a dimension of which a device has a part.
        specs = loop_specs(config, parallel)
        axes = {name: itertools.chain(*map(sharding.axes_of_entry, specs[name] or ())) for name in shapes}
        left += tuple(name for name in axes if parallel.fsdp.axis_name in axes[name])
    return left + kernels_cut_by_fsdp(config, parallel)


def embed(embedding: Array, tokens: Array, config: DecoderConfig, parallel: TensorParallel | None) -> Array:
    """The residual stream of tokens: [batch, time, D], or with `parallel` [batch, time/N, D]."""

    def of(tokens: Array) -> Array:
        x = sharding.take_rows(embedding, tokens).astype(config.dtype)
        x = x * jnp.asarray(config.hidden_size**0.5, x.dtype) if config.scaled_embedding else x
        return scaled(x, config.factors.embedding)

    if parallel is None:
        return of(tokens)
    if (fsdp := parallel.fsdp) is None:
        return features_to_time(of(tokens), parallel)
    embedding = over_devices(fsdp, embedding, sharding.varying_axes(tokens))
    # A device has some features of all tokens of its group, and sends each device those of its own tokens.
    x = of(lax.all_gather(tokens, fsdp.axis_name, axis=0, tiled=True))
    x = lax.all_to_all(x, fsdp.axis_name, split_axis=0, concat_axis=2, tiled=True)
    x = features_to_time(x, parallel)
    if config.tied_head and parallel.size > 1:  # its features lie the other way round: see `param_specs`
        parts = x.reshape(*x.shape[:2], parallel.size, fsdp.size, -1)
        x = jnp.swapaxes(parts, 2, 3).reshape(x.shape)
    return x


def scaled(x: Array, factor: float) -> Array:
    """x · factor, rounded once."""
    return x if factor == 1 else (x.astype(jnp.float32) * factor).astype(x.dtype)


def tied_head(embedding: Array, parallel: TensorParallel | None) -> Array:
    """The part of the head that a device has of a tied embedding: [D, V], or [D/M, V/N] with M devices of FSDP."""
    if parallel is not None and parallel.size > 1:
        embedding = lax.all_to_all(embedding, parallel.axis_name, split_axis=0, concat_axis=1, tiled=True)
    return embedding.T


def features_to_time(x: Array, parallel: TensorParallel) -> Array:
    """[batch, time, D/N] → [batch, time/N, D]."""
    return lax.all_to_all(x, parallel.axis_name, split_axis=_TIME_AXIS, concat_axis=2, tiled=True)


def all_of_the_time(x: Array, parallel: TensorParallel) -> Array:
    """[batch, time/N, D] → [batch, time, D]."""
    return lax.all_gather(x, parallel.axis_name, axis=_TIME_AXIS, tiled=True)


def shares_of_the_mean(targets: Array, parallel: TensorParallel) -> Array:
    """The weights with which the losses of all devices add up to the mean over tokens with a target.

    As weights: a sum that is divided afterwards has another cotangent than 1, for which the head's gradient would be
    scaled after it was added to an accumulator.
    """
    counted = jnp.sum(~equals(targets, _NO_TARGET), dtype=jnp.int32)
    if parallel.batch_axes:
        counted = lax.psum(counted, parallel.batch_axes)
    return jnp.full(targets.shape, 1.0 / jnp.maximum(counted, 1).astype(jnp.float32))
