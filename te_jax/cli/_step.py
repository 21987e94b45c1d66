"""The compiled parts of a training run: optimizer, train step and evaluation."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax

from te_jax import debug, layers, optim
from te_jax._core.types import PyTree
from te_jax.cli import _config
from te_jax.cli._placement import Placement
from te_jax.cli._plan import Model, Plan
from te_jax.cli._state import TrainState
from te_jax.cli._text import Tokens
from te_jax.models import (
    DecoderConfig,
    Losses,
    decoder,
    parallel_apply,
    parallel_losses,
    requantize,
    split_adapters,
)
from te_jax.parallel import context_order
from te_jax.quantized import Quantizable, QuantizedArray, both_copies
from te_jax.recipe import DelayedScaling

LossFunction = Callable[[Any, Any, jax.Array, jax.Array, jax.Array | None], Losses]
"""(params, scaling state, tokens [batch, time], targets [batch, time], segment ids [batch, time] or None) → losses."""

_NO_TARGET = -100  # `ignore_index` of `te_jax.ops.linear_cross_entropy`


class StepMemory(NamedTuple):
    """Bytes of each device's memory that a step needs, as XLA plans it."""

    kept: int  # what is there before and after it, too: the state, and tokens
    kernels: int  # of that copies of kernels in FP8
    rest: int  # gradients, what blocks keep for them, and other temporaries

    @property
    def total(self) -> int:
        return self.kept + self.rest


def bytes_on_a_device(arrays: Any) -> int:
    """Bytes of a tree of arrays, or of their types, on a device; arrays in host memory do not count."""
    leaves = [leaf for leaf in jax.tree.leaves(arrays) if leaf.sharding.memory_kind != "pinned_host"]
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


class Learner(NamedTuple):
    """The jitted functions of a run.

    Args:
      init: key → TrainState of random parameters.
      step: (state, windows [microbatches, batch, seq_len + 1]) → (state, mean losses); the state given is donated.
      evaluate: (state, windows [batches, batch, seq_len + 1]) → mean losses.
      stored: state → what a checkpoint holds of it, without copies. Shapes in place of arrays are fine.
      resumed: (what a checkpoint holds, with adapters the model that they belong to, else None) → state.
      begin: (parameters of a model, and adapters if they are not drawn) → TrainState.
      params: `jax.ShapeDtypeStruct` of the parameters that `begin` takes, with shardings.
      step_with_statistics: as step, with the statistics of `te_jax.debug.with_statistics` as a third result; None
        without --statistics. Layers that quantize a gated activation in one kernel do so in two, so that losses may
        differ in their last bits.
    """

    init: Callable[[jax.Array], TrainState]
    step: Callable[[TrainState, Tokens], tuple[TrainState, Losses]]
    evaluate: Callable[[TrainState, Tokens], Losses]
    stored: Callable[[TrainState], TrainState]
    resumed: Callable[[TrainState, Any], TrainState]
    begin: Callable[..., TrainState]
    params: Any
    step_with_statistics: Callable[[TrainState, Tokens], tuple[TrainState, Losses, Any]] | None = None

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state, without computing it."""
        return jax.eval_shape(self.init, jax.random.key(0))

    def memory(self, windows: Tokens) -> StepMemory:
        """Memory that a step needs, for `jax.ShapeDtypeStruct` of its windows. Its first call has it compiled then."""
        state = self.abstract_state()
        analysis = cast(Any, self.step).lower(state, windows).compile().memory_analysis()
        kept = analysis.argument_size_in_bytes
        rest = analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        return StepMemory(kept, bytes_on_a_device(state.kernels), rest)


def build_optimizer(plan: Plan, model: Model) -> optax.GradientTransformation:
    """AdamW or Muon after clipping the gradient's norm, with moments in `model.state_dtype` that are rounded at random,
    and the rest of float32 weights where parameters are bfloat16.

    After warming up, the rate falls along a cosine to a twentieth of its peak. A norm of 0 clips nothing.
    """
    training = plan.options.training
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=plan.learning_rate / (plan.warmup_steps + 1),
        peak_value=plan.learning_rate,
        warmup_steps=plan.warmup_steps,
        decay_steps=training.steps,
        end_value=plan.learning_rate / 20,
    )
    seed, dtype = jnp.uint32(training.seed), model.state_dtype
    master_dtype = "int16" if model.parameters == "bfloat16" else None
    experts = model.config.experts
    # It has no gradient that would hold against the decay.
    mask = _without_choice_bias if experts is not None and experts.choice_bias else None
    adamw = functools.partial(
        optim.adamw, schedule, b2=0.95, weight_decay=0.1, mask=mask, mu_dtype=dtype, nu_dtype=dtype, seed=seed
    )
    if training.optimizer == "muon":
        optimizer = optim.muon(
            schedule,
            weight_decay=0.1,
            mu_dtype=dtype,
            consistent_rms=0.2,
            adam=adamw(),
            seed=seed,
            master_dtype=master_dtype,
        )
    else:
        optimizer = adamw(master_dtype=master_dtype)
    if "optimizer" in plan.options.memory.offloaded:
        optimizer = optim.offload(optimizer, min_size=_config.OFFLOAD_MIN_SIZE)
    clips = [optax.clip_by_global_norm(training.clip_norm)] if training.clip_norm else []
    return optax.chain(*clips, optimizer)


def _without_choice_bias(params: PyTree) -> PyTree:
    return jax.tree.map_with_path(lambda path, _: getattr(path[-1], "key", None) != "expert_bias", params)


def build_loss(plan: Plan, model: Model) -> LossFunction:
    """The decoder with te_jax's fused cross-entropy, or with optax's, which knows no experts."""
    loss = _loss(plan, model)
    if plan.options.mesh.cp == 1:
        return loss

    def of_shared_windows(
        params: Any, scaling: Any, tokens: jax.Array, *targets_and_segments: jax.Array | None
    ) -> Losses:
        order = context_order(tokens.shape[1], plan.options.mesh.cp)
        targets, segments = (None if x is None else x[:, order] for x in targets_and_segments)
        assert targets is not None
        return loss(params, scaling, tokens[:, order], targets, segments)

    return of_shared_windows


def _loss(plan: Plan, model: Model) -> LossFunction:
    config, implementation, placement = model.config, plan.implementation, plan.placement
    if model.by_optax:
        return _optax_loss(config, placement)
    if placement.parallel is not None:
        split = parallel_losses(placement.mesh, config, placement.parallel, implementation=implementation)
        return lambda params, scaling, tokens, targets, segments: split(params, tokens, targets, scaling, segments)

    def loss(params: Any, scaling: Any, tokens: jax.Array, targets: jax.Array, segments: jax.Array | None) -> Losses:
        return decoder.losses(
            params, tokens, targets, config, scaling, segment_ids=segments, implementation=implementation
        )

    return loss


def _optax_loss(config: DecoderConfig, placement: Placement) -> LossFunction:
    split = None
    if placement.parallel is not None:
        split = parallel_apply(placement.mesh, config, placement.parallel)

    def loss(params: Any, scaling: Any, tokens: jax.Array, targets: jax.Array, segments: jax.Array | None) -> Losses:
        if split is None:
            logits = decoder.apply(params, tokens, config, scaling, segment_ids=segments)
        else:
            logits = split(params, tokens, scaling, segments)
        counted = targets != _NO_TARGET
        labels = jnp.where(counted, targets, 0)
        values = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
        cross_entropy = jnp.mean(values, where=None if segments is None else counted)
        return Losses(cross_entropy, cross_entropy, None)

    return loss


def build_learner(plan: Plan, model: Model) -> Learner:
    """The functions of a run that trains a model.

    With a recipe that has no state, each step quantizes all kernels once, for all microbatches of the next one, and
    adds their gradients in place, unless the model says otherwise. Where replicas share a batch, and devices of each a
    model, gradients are summed over replicas in every microbatch, and devices quantize their parts themselves.

    Microbatches of packed documents count by their targets. The head's gradients are then scaled before they are added,
    and not added in place.

    Deterministic runs on GPUs do without XLA's autotuning and atomic additions, which would keep a resumed run from
    repeating the bits of an uninterrupted one.
    """
    config, placement = model.config, plan.placement
    optimizer, loss = build_optimizer(plan, model), build_loss(plan, model)
    on_gpu = placement.devices[0].platform == "gpu"
    deterministic = {"xla_gpu_deterministic_ops": True} if plan.options.precision.deterministic and on_gpu else None
    jit = functools.partial(jax.jit, compiler_options=deterministic)

    parallel, base = placement.parallel, dataclasses.replace(config, lora=None)
    sums_replicas = parallel is not None and placement.replicas > 1
    how = None
    if model.quantized_once and not sums_replicas and not isinstance(config.recipe, DelayedScaling | None):
        how = requantize(base, parallel=parallel, implementation=plan.implementation)

    def kernels_of(params: Any) -> Any:
        # Adding -0.0 changes no bit, that of zeros included.
        return _updated(params, jax.tree.map(lambda param: jnp.full_like(param, -0.0), params), how)[1]

    def frozen_of(given: Any) -> Any:
        def is_kept(leaf: object) -> bool:
            return isinstance(leaf, QuantizedArray)

        def plain(param: Quantizable) -> jax.Array:
            return (param.dequantize() if isinstance(param, QuantizedArray) else param).astype(config.dtype)

        def chosen(leaf: Quantizable, own: Quantizable) -> Quantizable:
            # Kernels that came in FP8 keep their codes, if products read them.
            return both_copies(own) if isinstance(leaf, QuantizedArray) and isinstance(own, QuantizedArray) else leaf

        params = jax.tree.map(plain, given, is_leaf=is_kept)
        frozen = optim.merge_kernels(params, kernels_of(params))
        return jax.tree.map(chosen, frozen, given, is_leaf=is_kept)

    def begin(params: Any, adapters: Any = None) -> TrainState:
        scaling = decoder.init_scaling_state(config)
        if config.lora is None:
            params, optimizer_state = _rounded(params, optimizer, model.parameters)
            return TrainState(params, optimizer_state, scaling, kernels_of(params))
        if adapters is None:
            adapters, _ = split_adapters(decoder.init(config, jax.random.key(plan.options.training.seed)))
        kernels = jax.tree.map(lambda _: None, adapters)
        return TrainState(adapters, optimizer.init(adapters), scaling, kernels, frozen_of(params))

    def init(key: jax.Array) -> TrainState:
        return begin(decoder.init(base, key))

    shardings = placement.of_state(*_types(init, jax.random.key(0)), config)
    in_place = None if sums_replicas or plan.options.data.pack else decoder.is_head

    def gradients_of(state: TrainState, windows: Tokens) -> tuple[Losses, Any, Any]:
        return _value_and_gradients(loss, state, windows, in_place)

    def next_state(state: TrainState, gradients: Any, scaling: Any) -> TrainState:
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        params, kernels = _updated(state.params, updates, how if config.lora is None else None)
        return TrainState(params, optimizer_state, scaling, kernels, state.frozen)

    def step(state: TrainState, windows: Tokens) -> tuple[TrainState, Losses]:
        losses, gradients, scaling = gradients_of(state, windows)
        return next_state(state, gradients, scaling), losses

    def step_with_statistics(state: TrainState, windows: Tokens) -> tuple[TrainState, Losses, Any]:
        # Kernels that come quantized have no statistics. Layers quantize them to the same bits.
        plain = state._replace(kernels=jax.tree.map(lambda _: None, state.params))
        (losses, gradients, scaling), statistics = debug.with_statistics(gradients_of)(plain, windows)
        return next_state(state, gradients, scaling), losses, statistics

    def evaluate(state: TrainState, windows: Tokens) -> Losses:
        def of_batch(batch: tuple[Tokens, jax.Array | None]) -> Losses:
            windows, share = batch
            return _scaled(loss(state.whole(state.operands), state.scaling, *_operands(windows)), share)

        return jax.tree.map(jnp.mean, lax.map(of_batch, (windows, _shares(windows))))

    # Kernels follow from the parameters, and whether there are any from the devices, which a resumed run may change.
    def stored(state: TrainState) -> TrainState:
        return state._replace(kernels=None, frozen=None)

    quantize = jit(kernels_of, out_shardings=shardings.kernels)
    freeze = jit(frozen_of, out_shardings=shardings.frozen)

    def resumed(state: TrainState, params: Any) -> TrainState:
        if config.lora is not None:
            return state._replace(kernels=jax.tree.map(lambda _: None, state.params), frozen=freeze(params))
        return state._replace(kernels=quantize(state.params))

    return Learner(
        init=jit(init, out_shardings=shardings),
        step=jit(step, donate_argnums=0, out_shardings=(shardings, placement.state)),
        evaluate=jit(evaluate, out_shardings=placement.state),
        stored=stored,
        resumed=resumed,
        begin=jit(begin, donate_argnums=() if config.lora else 0, out_shardings=shardings),
        params=placement.of_params(base, "float32" if config.lora is None else config.dtype),
        step_with_statistics=jit(
            step_with_statistics, donate_argnums=0, out_shardings=(shardings, placement.state, placement.state)
        )
        if plan.options.output.statistics
        else None,
    )


def _types(init: Callable[[jax.Array], TrainState], key: jax.Array) -> tuple[TrainState, TrainState]:
    """Shapes and dtypes of a state, and for each leaf whether it is in host memory."""
    closed, shapes = jax.make_jaxpr(init, return_shape=True)(key)
    on_host = [aval.memory_space == jax.memory.Space.Host for aval in closed.out_avals]
    return cast(TrainState, shapes), jax.tree.unflatten(jax.tree.structure(shapes), on_host)


def _rounded(params: Any, optimizer: optax.GradientTransformation, dtype: str) -> tuple[Any, Any]:
    """float32 parameters in another dtype, and the first state of the optimizer, which has what they lack."""
    if dtype == "float32":
        return params, optimizer.init(params)

    def is_master(part: Any) -> bool:
        return isinstance(part, optim.MasterWeightsState)

    rounded = jax.tree.map(lambda param: param.astype(dtype), params)
    first = jax.tree.map(
        lambda part: part._replace(master=params) if is_master(part) else part,
        optimizer.init(rounded),
        is_leaf=is_master,
    )
    return rounded, optim.convert_state(optimizer, first, rounded)


def _updated(params: Any, updates: Any, how: Any) -> tuple[Any, Any]:
    """New parameters, and beside them their `TrainState.kernels`."""
    if how is None:
        return optim.apply_updates(params, updates), jax.tree.map(lambda _: None, params)
    return optim.apply_updates(params, updates, requantize=how)


def _value_and_gradients(
    loss: LossFunction,
    state: TrainState,
    windows: Tokens,
    in_place: Callable[[tuple[Any, ...], jax.Array], bool] | None = None,
) -> tuple[Losses, Any, Any]:
    """(mean losses, gradients, next scaling state) of microbatches of windows [microbatches, batch, seq_len + 1].

    `in_place` is that of `te_jax.layers.accumulate_gradients`.
    """
    count = windows.ids.shape[0]

    # The gradient of the scaling state is its next value, which the optimizer never sees.
    def objective(variables: Any, windows: Tokens, share: jax.Array | None) -> tuple[jax.Array, Losses]:
        operands, scaling = variables
        losses = _scaled(loss(state.whole(operands), scaling, *_operands(windows)), share)
        return losses.objective, losses

    gradient = layers.accumulate_gradients(objective, has_aux=True, in_place=in_place)

    def add(sums: Any, batch: tuple[Tokens, jax.Array | None]) -> tuple[Any, Losses]:
        (value, losses), sums = gradient((state.operands, state.scaling), sums, *batch)
        return sums, losses._replace(objective=value)  # NaN where a quantized kernel was used twice

    if count == 1:
        (gradients, scaling), losses = add(None, (jax.tree.map(lambda array: array[0], windows), None))
        return losses, gradients, scaling
    sums = jax.tree.map(functools.partial(jnp.zeros_like, dtype=jnp.float32), state.params)
    zeros = sums, jax.tree.map(jnp.zeros_like, state.scaling)
    (gradients, scaling), losses = lax.scan(add, zeros, (windows, _shares(windows)))
    return jax.tree.map(jnp.mean, losses), jax.tree.map(lambda total: total / count, gradients), scaling


def _operands(windows: Tokens) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Tokens, targets and segment ids of windows [batch, seq_len + 1]."""
    ids, begins = windows.ids.astype(jnp.int32), windows.begins
    if begins is None:
        return ids[:, :-1], ids[:, 1:], None
    targets = jnp.where(begins[:, 1:], _NO_TARGET, ids[:, 1:])
    return ids[:, :-1], targets, jnp.cumsum(begins[:, :-1], axis=1, dtype=jnp.int32)


def _shares(windows: Tokens) -> jax.Array | None:
    """[batches]: factors that make the mean of means over targets one over the targets of all; None for ones."""
    if windows.begins is None:
        return None
    targets = jnp.sum(~windows.begins[..., 1:], axis=(1, 2), dtype=jnp.float32)
    return targets * (targets.size / jnp.maximum(jnp.sum(targets), 1))


def _scaled(losses: Losses, share: jax.Array | None) -> Losses:
    """Losses whose cross-entropy is multiplied by a share."""
    if share is None:
        return losses
    more = (share - 1) * losses.cross_entropy
    return losses._replace(objective=losses.objective + more, cross_entropy=losses.cross_entropy + more)
