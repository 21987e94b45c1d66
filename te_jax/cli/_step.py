"""The compiled parts of a training run: optimizer, placement on devices, train step and evaluation."""

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from te_jax import nn, optim
from te_jax.cli import _options
from te_jax.cli.errors import UserError
from te_jax.models import (
    DecoderConfig,
    Experts,
    Losses,
    TensorParallel,
    decoder,
    parallel_apply,
    parallel_losses,
    param_specs,
    requantize,
)
from te_jax.parallel.collective_matmul import TransportName
from te_jax.recipe import DelayedScaling
from te_jax.sharding import axes_of_entry

LossFunction = Callable[[Any, Any, jax.Array, jax.Array], Losses]
"""(params, scaling state, tokens [batch, time], targets [batch, time]) → losses."""

_BATCH_AXIS, _TENSOR_AXIS = "data", "tensor"
_HOST_DEVICE_FLAG = "xla_force_host_platform_device_count"


class TrainState(NamedTuple):
    """What one step turns into the next."""

    params: Any  # of the decoder, float32
    optimizer: Any  # of the optax transform
    scaling: Any  # amax histories of delayed scaling; None with every other recipe
    kernels: Any  # like params: a QuantizedArray for each kernel that the optimizer quantized, None elsewhere

    @property
    def operands(self) -> Any:
        """What the decoder reads: quantized kernels, and all other parameters."""
        return optim.merge_kernels(self.params, self.kernels)


class Placement(NamedTuple):
    """Shardings of the arrays of a run."""

    state: NamedSharding  # replicated: losses, and every leaf of `TrainState` unless devices share a decoder
    windows: NamedSharding  # integer [batches, batch, seq_len + 1]: microbatches of a step, or batches of a validation
    parallel: TensorParallel | None  # how devices share a decoder; None where each has all of it

    @property
    def mesh(self) -> Mesh:
        assert isinstance(self.state.mesh, Mesh)
        return self.state.mesh

    def of_state(self, state: TrainState, on_host: TrainState, config: DecoderConfig) -> Any:
        """A tree of shardings like the state; `on_host` says which leaves are in host memory."""
        return jax.tree.map(
            lambda sharding, host: sharding.with_memory_kind("pinned_host") if host else sharding,
            jax.tree.broadcast(self._on_device(state, config), state),
            on_host,
        )

    def _on_device(self, state: TrainState, config: DecoderConfig) -> Any:
        if self.parallel is None:
            return self.state
        specs, structure = param_specs(config, self.parallel), jax.tree.structure(state.params)

        def one_for_each_parameter(part: Any) -> bool:
            return jax.tree.structure(part) == structure

        def shardings(part: Any) -> Any:
            if not one_for_each_parameter(part):
                return self.state
            return jax.tree.map(self._like_parameter, part, specs)

        return jax.tree.map(shardings, state, is_leaf=one_for_each_parameter)

    def _like_parameter(self, leaf: Any, spec: PartitionSpec) -> NamedSharding:
        """Of a parameter, of a moment, or of the bounds of a moment's blocks, which may be too few to be split."""
        entries = [
            entry if size % math.prod(self.mesh.shape[axis] for axis in axes_of_entry(entry)) == 0 else None
            for entry, size in zip(spec, leaf.shape, strict=False)
        ]
        return NamedSharding(self.mesh, PartitionSpec(*entries))


class Learner(NamedTuple):
    """The jitted functions of a run.

    Args:
      init: key → TrainState.
      step: (state, windows [microbatches, batch, seq_len + 1]) → (state, mean losses); the state given is donated.
      evaluate: (state, windows [batches, batch, seq_len + 1]) → mean losses.
      stored: state → what a checkpoint holds of it, without copies. Shapes in place of arrays are fine.
      resumed: what a checkpoint holds → state.
    """

    init: Callable[[jax.Array], TrainState]
    step: Callable[[TrainState, jax.Array], tuple[TrainState, Losses]]
    evaluate: Callable[[TrainState, jax.Array], Losses]
    stored: Callable[[TrainState], TrainState]
    resumed: Callable[[TrainState], TrainState]

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state, without computing it."""
        return jax.eval_shape(self.init, jax.random.key(0))


def take_devices(count: int | None, tp: int = 1) -> list[Any]:
    """The devices to train on. Starts JAX's backend.

    Args:
      count: the first so many GPUs, or so many CPU devices cut out of one host; None for all that JAX shows, or for
        `tp` of them where devices share a decoder.
      tp: how many devices share a decoder.

    Raises:
      UserError: there are fewer, or they cannot be divided into groups of `tp`.
    """
    if count is not None and count % tp:
        raise UserError(f"--devices {count} cannot be divided into groups of --tp {tp}: choose a multiple of {tp}")
    wanted = tp if count is None and tp > 1 else count
    # JAX refuses both ways of asking for CPU devices at once; a user who set the flag has asked already.
    if wanted is not None and _HOST_DEVICE_FLAG not in os.environ.get("XLA_FLAGS", ""):
        # Raised where a backend runs in this process already: its devices are what there is.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", wanted)
    devices = jax.devices()
    if wanted is not None and wanted > len(devices):
        platform = devices[0].platform
        option = f"--devices {wanted}" if count is not None else f"--tp {tp}"
        way_out = f": start it with XLA_FLAGS=--{_HOST_DEVICE_FLAG}={wanted}" if platform == "cpu" else ""
        raise UserError(f"{option} is more than the {len(devices)} {platform} devices present{way_out}")
    return devices[:wanted]


def memory_of(devices: Sequence[Any]) -> int:
    """Bytes that one of these devices may use: a GPU's limit in JAX, or this host's memory divided by the devices."""
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    return limit or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(devices)


def build_placement(
    devices: Sequence[Any], tp: int = 1, transport: TransportName = "auto", experts: Experts | None = None
) -> Placement:
    """Each group of `tp` devices that share a decoder has the whole state and an equal part of every batch.

    Experts are divided among all devices where their number allows it, else among those of a group.
    """
    axes = (_BATCH_AXIS, _TENSOR_AXIS)
    mesh = Mesh(np.asarray(devices).reshape(-1, tp), axes, axis_types=(AxisType.Auto,) * 2)
    by_all = experts is not None and experts.num_experts % len(devices) == 0
    shared = tp > 1 or (experts is not None and len(devices) > 1)
    parallel = TensorParallel(
        tp,
        axis_name=_TENSOR_AXIS,
        batch_axes=(_BATCH_AXIS,),
        expert_axes=axes if by_all else None,
        transport=transport,
    )
    return Placement(
        state=NamedSharding(mesh, PartitionSpec()),
        windows=NamedSharding(mesh, PartitionSpec(None, _BATCH_AXIS)),
        parallel=parallel if shared else None,
    )


def build_optimizer(
    learning_rate: float,
    steps: int,
    *,
    warmup_steps: int | None = None,
    clip_norm: float = 1.0,
    state_dtype: str = "float32",
    seed: int = 0,
    offload: bool = False,
) -> optax.GradientTransformation:
    """AdamW after clipping the gradient's norm, with both moments in `state_dtype`, rounded at random by `seed`.

    The rate rises to `learning_rate` for `warmup_steps`, None for a twentieth of the steps, and then falls along a
    cosine to a twentieth of it. A `clip_norm` of 0 clips nothing. With `offload` the moments are in host memory.
    """
    warmup = steps // 20 if warmup_steps is None else warmup_steps
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=learning_rate / (warmup + 1),
        peak_value=learning_rate,
        warmup_steps=warmup,
        decay_steps=steps,
        end_value=learning_rate / 20,
    )
    adamw = optim.adamw(
        schedule,
        b2=0.95,
        weight_decay=0.1,
        mu_dtype=state_dtype,
        nu_dtype=state_dtype,
        seed=jnp.uint32(seed),
    )
    if offload:
        adamw = optim.offload(adamw, min_size=_options.OFFLOAD_MIN_SIZE)
    return optax.chain(optax.clip_by_global_norm(clip_norm), adamw) if clip_norm else optax.chain(adamw)


def te_jax_loss(
    config: DecoderConfig, implementation: Literal["native", "reference"] | None, placement: Placement | None = None
) -> LossFunction:
    """The decoder with te_jax's fused cross-entropy and, where its recipe says so, projections in FP8."""
    if placement is not None and placement.parallel is not None:
        split = parallel_losses(placement.mesh, config, placement.parallel, implementation=implementation)
        return lambda params, scaling, tokens, targets: split(params, tokens, targets, scaling)

    def loss(params: Any, scaling: Any, tokens: jax.Array, targets: jax.Array) -> Losses:
        return decoder.losses(params, tokens, targets, config, scaling, implementation=implementation)

    return loss


def optax_loss(config: DecoderConfig, placement: Placement | None = None) -> LossFunction:
    """The same decoder with optax's cross-entropy: the twin of `--compare` without a recipe."""
    split = None
    if placement is not None and placement.parallel is not None:
        split = parallel_apply(placement.mesh, config, placement.parallel)

    def loss(params: Any, scaling: Any, tokens: jax.Array, targets: jax.Array) -> Losses:
        logits = decoder.apply(params, tokens, config, scaling) if split is None else split(params, tokens, scaling)
        values = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
        cross_entropy = jnp.mean(values)
        return Losses(cross_entropy, cross_entropy, None)

    return loss


def build_learner(
    config: DecoderConfig,
    loss: LossFunction,
    optimizer: optax.GradientTransformation,
    placement: Placement,
    *,
    deterministic: bool = False,
    implementation: Literal["native", "reference"] | None = None,
) -> Learner:
    """The functions of a run that minimises a loss.

    With a recipe that has no state, each step quantizes all kernels once, for all microbatches of the next one. Devices
    that share a decoder quantize their parts themselves, in every microbatch.

    Args:
      deterministic: on GPUs, without XLA's autotuning and atomic additions, which would keep a resumed run from
        repeating the bits of an uninterrupted one.
      implementation: that quantizes kernels.
    """
    platform = next(iter(placement.state.device_set)).platform
    options = {"xla_gpu_deterministic_ops": True} if deterministic and platform == "gpu" else None

    in_optimizer = placement.parallel is None and not isinstance(config.recipe, DelayedScaling | None)
    how = requantize(config, implementation=implementation) if in_optimizer else None

    def kernels_of(params: Any) -> Any:
        # Adding -0.0 changes no bit, that of zeros included.
        return _updated(params, jax.tree.map(lambda param: jnp.full_like(param, -0.0), params), how)[1]

    def init(key: jax.Array) -> TrainState:
        params = decoder.init(config, key)
        return TrainState(params, optimizer.init(params), decoder.init_scaling_state(config), kernels_of(params))

    shardings = placement.of_state(*_types(init, jax.random.key(0)), config)
    in_place = decoder.is_head if placement.parallel is None else None

    def step(state: TrainState, windows: jax.Array) -> tuple[TrainState, Losses]:
        losses, gradients, scaling = _value_and_gradients(loss, state, windows, in_place)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        params, kernels = _updated(state.params, updates, how)
        return TrainState(params, optimizer_state, scaling, kernels), losses

    def evaluate(state: TrainState, windows: jax.Array) -> Losses:
        losses = lax.map(lambda batch: loss(state.operands, state.scaling, *_tokens_and_targets(batch)), windows)
        return jax.tree.map(jnp.mean, losses)

    # Kernels follow from the parameters, and whether there are any from the devices, which a resumed run may change.
    def stored(state: TrainState) -> TrainState:
        return state._replace(kernels=None)

    quantize = jax.jit(kernels_of, out_shardings=shardings.kernels, compiler_options=options)

    def resumed(state: TrainState) -> TrainState:
        return state._replace(kernels=quantize(state.params))

    return Learner(
        init=jax.jit(init, out_shardings=shardings, compiler_options=options),
        step=jax.jit(step, donate_argnums=0, out_shardings=(shardings, placement.state), compiler_options=options),
        evaluate=jax.jit(evaluate, out_shardings=placement.state, compiler_options=options),
        stored=stored,
        resumed=resumed,
    )


def _types(init: Callable[[jax.Array], TrainState], key: jax.Array) -> tuple[TrainState, TrainState]:
    """Shapes and dtypes of a state, and for each leaf whether it is in host memory."""
    closed, shapes = jax.make_jaxpr(init, return_shape=True)(key)
    on_host = [aval.memory_space == jax.memory.Space.Host for aval in closed.out_avals]
    return cast(TrainState, shapes), jax.tree.unflatten(jax.tree.structure(shapes), on_host)


def _updated(params: Any, updates: Any, how: Any) -> tuple[Any, Any]:
    """New parameters, and beside them their `TrainState.kernels`."""
    if how is None:
        return optax.apply_updates(params, updates), jax.tree.map(lambda _: None, params)
    return optim.apply_updates(params, updates, requantize=how)


def _value_and_gradients(
    loss: LossFunction,
    state: TrainState,
    windows: jax.Array,
    in_place: Callable[[tuple[Any, ...], jax.Array], bool] | None = None,
) -> tuple[Losses, Any, Any]:
    """(mean losses, gradients, next scaling state) of microbatches of windows [microbatches, batch, seq_len + 1].

    `in_place` is that of `te_jax.nn.accumulate_gradients`.
    """
    count = windows.shape[0]

    # The gradient of the scaling state is its next value, which the optimizer never sees.
    def objective(variables: Any, *batch: jax.Array) -> tuple[jax.Array, Losses]:
        losses = loss(*variables, *batch)
        return losses.objective, losses

    gradient = nn.accumulate_gradients(objective, has_aux=True, in_place=in_place)

    def add(sums: Any, windows: jax.Array) -> tuple[Any, Losses]:
        (value, losses), sums = gradient((state.operands, state.scaling), sums, *_tokens_and_targets(windows))
        return sums, losses._replace(objective=value)  # NaN where a quantized kernel was used twice

    if count == 1:
        (gradients, scaling), losses = add(None, windows[0])
        return losses, gradients, scaling
    zeros = jax.tree.map(jnp.zeros_like, (state.params, state.scaling))
    (gradients, scaling), losses = lax.scan(add, zeros, windows)
    return jax.tree.map(jnp.mean, losses), jax.tree.map(lambda total: total / count, gradients), scaling


def _tokens_and_targets(windows: jax.Array) -> tuple[jax.Array, jax.Array]:
    windows = windows.astype(jnp.int32)
    return windows[:, :-1], windows[:, 1:]
