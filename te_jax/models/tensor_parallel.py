"""The decoder's pieces inside `shard_map`, for devices that share it as `te_jax.models.parallel` says."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from te_jax import native, ops, sharding
from te_jax.layers.microbatches import AccumulatedKernel, dense_kernels
from te_jax.layers.norm import handover
from te_jax.models.config import MLP, DecoderConfig, kernel_facts
from te_jax.models.mixture import Balance, mixture
from te_jax.models.parallel import TensorParallel, kv_heads, loop_specs
from te_jax.parallel import all_gather_matmul, gated_mlp, matmul_reduce_scatter
from te_jax.quantized import facts_of
from te_jax.recipe import DelayedScalingState, Quantization
from te_jax.reference.softmax_cross_entropy import equals

_TIME_AXIS = 1
_NO_TARGET = -100  # `ignore_index` of `te_jax.ops.softmax_cross_entropy`


def enter(params: dict[str, Any], tokens: Array, config: DecoderConfig, parallel: TensorParallel) -> dict[str, Any]:
    """This device's parameters, such that gradients of what all devices have are summed once.

    Raises:
      ValueError: this is no place for `parallel`, or it does not fit the decoder or the tokens.
    """
    parallel.check(config)
    axis = parallel.axis_name
    try:
        size = lax.axis_size(axis)
    except NameError:
        raise ValueError(
            f"parallel.axis_name is {axis!r}, and no such axis is mapped here: call this inside shard_map over a mesh "
            "that has it, or use te_jax.models.parallel_loss"
        ) from None
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
    heads, size = kv_heads(config, parallel.size), parallel.size
    left = () if heads.is_split else ("key", "value")
    facts = kernel_facts(config)
    block = facts.block_size
    if block > 1:
        split = {
            "query": config.num_heads * config.head_dim,
            "key": config.num_kv_heads * config.head_dim,
            "value": config.num_kv_heads * config.head_dim,
            "out": config.num_heads * config.head_dim,
            **({} if config.experts is not None else dict.fromkeys(MLP, config.mlp_size)),
        }
        left += tuple(name for name, count in split.items() if count // size % block)
    if parallel.fsdp is not None and not (facts.is_plain or facts.is_symmetric):
        # Each of the two copies has scales of its own, along a dimension of which a device has a part.
        specs = loop_specs(config, parallel)
        axes = {name: itertools.chain(*map(sharding.axes_of_entry, specs[name] or ())) for name in config.kernel_shapes}
        left += tuple(name for name in axes if parallel.fsdp.axis_name in axes[name])
    return left


def embed(embedding: Array, tokens: Array, config: DecoderConfig, parallel: TensorParallel | None) -> Array:
    """The residual stream of tokens: [batch, time, D], or with `parallel` [batch, time/N, D]."""

    def of(tokens: Array) -> Array:
        x = sharding.take_rows(embedding, tokens).astype(config.dtype)
        return x * jnp.asarray(config.hidden_size**0.5, x.dtype) if config.scaled_embedding else x

    if parallel is None:
        return of(tokens)
    if (fsdp := parallel.fsdp) is None:
        return features_to_time(of(tokens), parallel)
    # A device has some features of all tokens of its group, and sends each device those of its own tokens.
    x = of(lax.all_gather(tokens, fsdp.axis_name, axis=0, tiled=True))
    x = lax.all_to_all(x, fsdp.axis_name, split_axis=0, concat_axis=2, tiled=True)
    x = features_to_time(x, parallel)
    if config.tied_head and parallel.size > 1:  # its features lie the other way round: see `param_specs`
        parts = x.reshape(*x.shape[:2], parallel.size, fsdp.size, -1)
        x = jnp.swapaxes(parts, 2, 3).reshape(x.shape)
    return x


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


@dataclasses.dataclass(frozen=True)
class Projections:
    """What a block does with its parameters, which are called by their names in `te_jax.models.init`.

    Where devices share the block, the residual stream is this device's part of the time, and all else its heads and
    columns of the MLP.
    """

    layer: dict[str, Any]  # arrays, QuantizedArrays, or what stands for these in `te_jax.layers.accumulate_gradients`
    scaling_state: dict[str, DelayedScalingState] | None
    config: DecoderConfig
    parallel: TensorParallel | None
    implementation: native.Implementation | None

    @property
    def is_split(self) -> bool:
        return self.parallel is not None and self.parallel.size > 1

    def norm(self, x: Array, name: str, residual: Array | None = None) -> tuple[Any, Array]:
        """The RMS norm of the residual stream x, or of x + residual, for what follows; and the stream itself."""
        found = ops.rms_norm(
            x,
            self.layer[name],
            epsilon=self.config.norm_eps,
            zero_centered=self.config.zero_centered_norms,
            residual=residual,
            quantization=self._handover(name, x),
            implementation=self.implementation,
        )
        return (found, x) if residual is None else found

    def _handover(self, name: str, x: Array) -> Quantization | None:
        if name == "mlp_norm" and self.config.experts is not None:  # the router reads values
            return None
        readers = ("gate", "up") if name == "mlp_norm" else ("query", "key", "value")
        if self._adapted(*readers):  # and so do adapters
            return None
        quantization = handover(self.config.recipe, x)
        # Devices would have to agree on other scales than those of blocks before they quantize.
        blocked = quantization is not None and facts_of(quantization.scaling).in_blocks
        return quantization if blocked or not self.is_split else None

    def norm_heads(self, x: Array, name: str) -> Array:
        """The RMS norm of every head of x [batch, time, heads, head_dim]."""
        options: Any = {"epsilon": self.config.norm_eps, "zero_centered": self.config.zero_centered_norms}
        return ops.rms_norm(x, self.layer[name], implementation=self.implementation, **options)

    def from_stream(self, x: Any, names: tuple[str, ...]) -> tuple[Array, ...]:
        """A norm's result [batch, time, D] times kernels [D, N], and biases: [batch, time, N] for each."""
        of = self._of(names)
        if not self.is_split:
            projected = tuple(self._with_adapter(y, x, name) for y, name in zip(ops.dense(x, **of), names, strict=True))
        else:
            options: Any = self._exchange | of
            projected = all_gather_matmul(x, gather_dimension=_TIME_AXIS, residual=self._shared.residual, **options)
        return tuple(self._biased(y, name) for y, name in zip(projected, names, strict=True))

    def to_stream(self, x: Array, name: str) -> Array:
        """[batch, time, N] times a kernel [N, D], and a bias: what is added to the residual stream."""
        of = self._of((name,))
        if not self.is_split:
            return self._biased(self._with_adapter(ops.dense(x, **of)[0], x, name), name)
        of |= {key: None if of[key] is None else of[key][0] for key in ("kernel", "wgrad_accumulator", "scaling_state")}
        return self._biased(matmul_reduce_scatter(x, scatter_dimension=_TIME_AXIS, **self._exchange, **of), name)

    def _adapted(self, *names: str) -> bool:
        return self.config.lora is not None and not set(names).isdisjoint(self.config.lora.names)

    def _with_adapter(self, y: Array, x: Array, name: str) -> Array:
        """y = x · kernel, and what the adapter of the kernel adds. x is no adapter's where none has a part in it."""
        if not self._adapted(name):
            return y
        assert self.config.lora is not None
        a, b = (self.layer[f"{name}_{part}"].astype(x.dtype) for part in "ab")
        return y + ops.dense(ops.dense(x, a), b * jnp.asarray(self.config.lora.scale, b.dtype))

    def _biased(self, y: Array, name: str) -> Array:
        # Beside the products, since XLA adds it where it rotates, normalizes or adds the stream.
        bias = self._part(f"{name}_bias", self.layer.get(f"{name}_bias"))
        return y if bias is None else y + jnp.expand_dims(bias.astype(y.dtype), (0, 1))

    def mlp(self, x: Any) -> tuple[Array, Balance | None]:
        """The gated MLP or the experts of a norm's result: what is added to the residual stream; of experts also how
        they share the tokens."""
        if self.config.experts is not None:
            return mixture(x, self.layer, self.config, self.parallel, self.implementation)
        if self._adapted(*MLP):
            gate, up = self.from_stream(x, ("gate", "up"))
            return self.to_stream(ops.gated_activation(gate, up, self.config.activation), "down"), None
        of: Any = self._of(MLP) | {"activation": self.config.activation}
        if not self.is_split:
            return ops.gated_mlp(x, **of), None
        options: Any = self._exchange | of
        return gated_mlp(x, dimension=_TIME_AXIS, residual=self._shared.residual, **options), None

    def _of(self, names: tuple[str, ...]) -> dict[str, Any]:
        state = self.scaling_state
        return {
            **dense_kernels([self._kernel(name) for name in names]),
            "recipe": self.config.recipe,
            "scaling_state": None if state is None else tuple(state[name] for name in names),
            "implementation": self.implementation,
        }

    @property
    def _shared(self) -> TensorParallel:
        assert self.parallel is not None
        return self.parallel

    @property
    def _exchange(self) -> dict[str, Any]:
        return {"axis_name": self._shared.axis_name, "transport": self._shared.transport}

    def _kernel(self, name: str) -> Any:
        return self._part(name, self.layer[name])

    def _part(self, name: str, kernel: Any) -> Any:
        """This device's part of a kernel or bias, of which all devices have those of key and value where these cannot
        be split."""
        if kernel is None or name.removesuffix("_bias") not in ("key", "value") or not self.is_split:
            return kernel
        heads = kv_heads(self.config, self._shared.size)
        if heads.is_split:
            return kernel
        if not isinstance(kernel, Array):
            raise ValueError(
                f"{name} is quantized or chosen by in_place, and parallel.size is {self._shared.size}: devices take "
                f"parts of it, since {self.config.num_kv_heads} heads of key and value cannot be split; leave it as it "
                "is (te_jax.models.requantize with parallel does)"
            )
        first, width = lax.axis_index(self._shared.axis_name) * heads.per_device, self.config.head_dim
        return jnp.concatenate(
            [
                lax.dynamic_slice_in_dim(kernel, (first + i) // heads.repeats * width, width, axis=-1)
                for i in range(heads.per_device)
            ],
            axis=-1,
        )


def logits(x: Array, head: Array, parallel: TensorParallel, implementation: native.Implementation | None) -> Array:
    """[batch, time/N, D] · [D, V/N] → [batch, time, V/N]."""
    return all_gather_matmul(
        x,
        head,
        axis_name=parallel.axis_name,
        gather_dimension=_TIME_AXIS,
        residual=parallel.residual,
        transport=parallel.transport,
        implementation=implementation,
    )


def shares_of_the_mean(targets: Array, parallel: TensorParallel) -> Array:
    """The weights with which the losses of all devices add up to the mean over tokens with a target.

    As weights: a sum that is divided afterwards has another cotangent than 1, for which the head's gradient would be
    scaled after it was added to an accumulator.
    """
    counted = jnp.sum(~equals(targets, _NO_TARGET), dtype=jnp.int32)
    if parallel.batch_axes:
        counted = lax.psum(counted, parallel.batch_axes)
    return jnp.full(targets.shape, 1.0 / jnp.maximum(counted, 1).astype(jnp.float32))
